// Shares of the forward: several blocks work on one query tile, where query tiles are too few to fill the GPU. Its key
// tiles are divided into consecutive ranges of equal length, and scheduled as in shares.cuh. Each block computes O and
// lse as if its keys were all there are, and leaves them in a workspace, from which merge_forward.cu makes the results.
// Its order is
//
//   [batch][head][share][tile] of O [16 rows][8 columns][32 lanes][4 accumulators] and lse [row], both in float32
//
// where the accumulators have the order of the registers. Packed sequences are one batch, whose tile indices count
// through all sequences. Rows past the end of a sequence are there, too, and mean nothing.
#pragma once
#include "common/sequence.cuh"
#include "common/shares.cuh"

namespace fa2::common {

// Narrows the key tiles of a query tile to those of a share, which may be none.
template <class Spec, class Range, class Record>
__device__ __forceinline__ void limit_to_share(Range& tiles, const Record& params, int32 share) {
    if constexpr (Spec::kSplit) {
        const auto steps = steps_of_share(max_of(tiles.end - tiles.begin, 0), params.num_splits, share);
        tiles.end = tiles.begin + steps.end;
        tiles.begin += steps.begin;
    }
}

template <class Spec>
struct OutputShares {
    using Accumulators = AccumulatorTile<Spec::kBr, Spec::kHeadDimV>;
    static constexpr int kColumns8 = Accumulators::kColumns8, kOutputElements = Accumulators::kElements;
    static constexpr int kTileElements = kOutputElements + Spec::kBr;

    // The first element of a share of a query tile of a batch or sequence.
    template <class Record>
    __device__ __forceinline__ static float* of_tile(const Record& params, const TileCoordinates& where, int32 share) {
        int64 head = where.head;
        int32 tile = where.tile;
        if constexpr (Spec::kVarlen)
            tile += packed_axis<false>(params).template first_tile<Spec::kBr>(where.batch);
        else
            head += static_cast<int64>(where.batch) * params.num_heads;
        return params.shares + ((head * params.num_splits + share) * params.num_tiles + tile) * kTileElements;
    }

    // The same for the one share of a block. It takes the share's position from the block's index, so that no registers
    // hold it throughout the kernel.
    template <class Record>
    __device__ __forceinline__ static float* of_block(const Record& params) {
        const auto where = tile_in_order<Spec, false>(params, blockIdx.x);
        const int64 head = static_cast<int64>(where.batch) * params.scheduled_heads + where.head;
        return params.shares + (head * params.num_tiles + where.tile) * kTileElements;
    }

    // Writes 16 rows of O, which a warp holds, from column 8 * first_column8 on. Columns beyond the padded head_dim are
    // left out.
    template <int kN8>
    __device__ __forceinline__ static void put(float* share, const QuadFragment<kN8>& x, int32 row16,
                                               int32 first_column8, int32 lane) {
#pragma unroll
        for (int n = 0; n < kN8; ++n)
            if (first_column8 + n < kColumns8)
                *reinterpret_cast<float4*>(share + Accumulators::offset(row16, first_column8 + n, lane)) =
                    make_float4(x.value[n][0], x.value[n][1], x.value[n][2], x.value[n][3]);
    }
    // Writes lse of these rows.
    __device__ __forceinline__ static void put_lse(float* share, const float (&lse)[2], int32 row16, int32 lane) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (lane % 4 == 0) share[kOutputElements + 16 * row16 + QuadFragment<1>::row(i, lane)] = lse[i];
    }
};

}  // namespace fa2::common
