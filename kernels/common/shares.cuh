// Shares of the backward (those of the forward are in output_shares.cuh): several blocks work on one key tile, where key
// tiles are too few to fill the GPU. The steps of a key tile, its query tiles in all heads of the group, are divided into
// consecutive ranges of equal length. The schedule counts the shares of a tile as tiles of further heads: share s of head
// h is the scheduled head h * num_splits + s.
//
// The gradients of a share go to a workspace, from which sum_dkdv.cu makes dK and dV. Its order is
//
//   [batch][head][share][tile][dK, dV] of a gradient [16 rows][8 columns][32 lanes][4 accumulators]
//
// where the accumulators have the order of the registers, so that warps write whole cache lines. With kAdds
// (`single_pass`) there is one copy for all shares, which are added to it atomically. Otherwise each share has its own,
// and their sum is bit-reproducible.
#pragma once
#include "common/fragment.cuh"
#include "common/math.cuh"
#include "common/ptx.cuh"
#include "common/tile_lists.cuh"

namespace fa2::common {

// Replaces the scheduled head by the head, and returns the share. Record is a template parameter because only records
// of split kernels have num_splits.
template <class Spec, class Record>
__device__ __forceinline__ int32 take_share(TileCoordinates& where, const Record& params) {
    if constexpr (Spec::kSplit) {
        const int32 scheduled = where.head;
        where.head = scheduled / params.num_splits;
        return scheduled - where.head * params.num_splits;
    } else {
        return 0;
    }
}

// The steps [begin, end) of a share.
struct StepRange {
    int32 begin, end;
};
__device__ __forceinline__ StepRange steps_of_share(int32 steps, int32 num_splits, int32 share) {
    const int32 most = ceil_div(steps, num_splits), begin = min_of(share * most, steps);
    return {begin, min_of(begin + most, steps)};
}

// A tile of kRows rows of results in accumulator order.
template <int kRows, int kHeadDim>
struct AccumulatorTile {
    static constexpr int kColumns8 = round_up(kHeadDim, 16) / 8;
    static constexpr int kElements = kRows * kColumns8 * 8;

    // Offset of the accumulators of `lane` in a block of 16 rows by 8 columns.
    __device__ static int32 offset(int32 row16, int32 column8, int32 lane) {
        return (row16 * kColumns8 + column8) * 128 + lane * 4;
    }
};

template <int kBc, int kHeadDim, int kHeadDimV, bool kAdds>
struct ShareWorkspace {
    using Dk = AccumulatorTile<kBc, kHeadDim>;
    using Dv = AccumulatorTile<kBc, kHeadDimV>;
    static constexpr int kTileElements = Dk::kElements + Dv::kElements;

    // The first element of the block's share.
    template <class Spec, class Record>
    __device__ __forceinline__ static float* of_block(const Record& params, int32 block = blockIdx.x) {
        const auto where = tile_in_order<Spec, true>(params, block);
        int64 copy = static_cast<int64>(where.batch) * params.scheduled_heads + where.head;
        if constexpr (kAdds) copy /= params.num_splits;
        return params.shares + (copy * params.num_tiles + where.tile) * kTileElements;
    }

    // Writes or adds 16 rows of a gradient, dK or dV, which a warp holds, from column 8 * first_column8 on. Columns beyond
    // the padded head_dim are left out.
    template <class Gradient, int kN8>
    __device__ __forceinline__ static void put(float* share, const QuadFragment<kN8>& x, int32 row16,
                                               int32 first_column8, int32 lane) {
#pragma unroll
        for (int n = 0; n < kN8; ++n) {
            if (first_column8 + n >= Gradient::kColumns8) break;
            float* to = share + Gradient::offset(row16, first_column8 + n, lane);
            if constexpr (!kAdds) {
                *reinterpret_cast<float4*>(to) =
                    make_float4(x.value[n][0], x.value[n][1], x.value[n][2], x.value[n][3]);
            } else {
#if __CUDA_ARCH__ >= 900
                add_global(to, x.value[n]);
#else
#pragma unroll
                for (int e = 0; e < 4; ++e) add_global(to + e, x.value[n][e]);
#endif
            }
        }
    }

    // Writes the share of a block without a step; all threads take part.
    __device__ static void put_zeros(float* share) {
        if constexpr (!kAdds)
            for (int32 i = threadIdx.x; i < kTileElements / 4; i += blockDim.x)
                reinterpret_cast<float4*>(share)[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
};

}  // namespace fa2::common
