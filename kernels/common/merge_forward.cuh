// O and lse, merged from the shares of a split forward (output_shares.cuh), rounded and rearranged from accumulator order
// into rows.
//
//   lse = log(sum_s exp(lse_s))        O = sum_s exp(lse_s - lse) O_s
//
// A block owns 16 rows of a query tile. A thread merges 2 rows by 8 columns: the accumulators of 4 lanes of one 16 x 8
// block of the workspace, which it stores as two 16-byte chunks. Shares are summed in their order, so that the result is
// bit-reproducible.
#pragma once
#include "common/output_shares.cuh"
#include "common/statistics.cuh"

namespace fa2::common {

template <class Spec, class Params = fa2::Params>
struct MergeForward {
    using Element = typename Spec::Element;
    using Shares = OutputShares<Spec>;
    static constexpr int kChunks = Spec::kHeadDim / 8, kRow16s = Spec::kBr / 16;

    __device__ static void run(const Params& params) {
        const int32 row16 = blockIdx.x % kRow16s, tile_index = blockIdx.x / kRow16s;
        const int32 tile = tile_index % params.num_tiles, head_index = tile_index / params.num_tiles;
        const auto rows = workspace_rows<Spec>(params, tile);
        const int32 left = rows.length - 16 * row16;
        const int32 batch = head_index / params.num_heads, head = head_index % params.num_heads;
        Element* o = params.o + params.o_strides.offset(batch, rows.first + 16 * row16, head);
        float* lse = params.lse + first_statistic<Spec>(params, batch, head) + rows.first + 16 * row16;

        const int64 between_shares = static_cast<int64>(params.num_tiles) * Shares::kTileElements;
        const float* first = params.shares + head_index * params.num_splits * between_shares +
                             static_cast<int64>(tile) * Shares::kTileElements;
        for (int32 index = threadIdx.x; index < 8 * kChunks; index += blockDim.x) {
            const int32 column8 = index % kChunks, g = index / kChunks;
            if (g >= left) return;
            const float* share_lse = first + Shares::kOutputElements + 16 * row16 + g;
            float shift[2] = {-infinity<float>(), -infinity<float>()};
#pragma unroll 4
            for (int32 s = 0; s < params.num_splits; ++s)
#pragma unroll
                for (int i = 0; i < 2; ++i) shift[i] = maximum(shift[i], share_lse[s * between_shares + 8 * i]);
            // In a row without a visible key, 0 is subtracted instead, as -inf - (-inf) is NaN.
#pragma unroll
            for (int i = 0; i < 2; ++i) shift[i] = shift[i] == -infinity<float>() ? 0.0f : shift[i];

            const float* share = first + Shares::Accumulators::offset(row16, column8, 4 * g);
            float total[2] = {}, sum[4][4] = {};  // [lane - 4 g][accumulator]
#pragma unroll 4
            for (int32 s = 0; s < params.num_splits; ++s, share += between_shares, share_lse += between_shares) {
                float weight[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    weight[i] = exp2_approx((share_lse[8 * i] - shift[i]) * static_cast<float>(kLog2e));
                    total[i] += weight[i];
                }
                // Shares without a visible key are left out: V of hidden keys may have made their O NaN.
                const bool visible[2] = {share_lse[0] != -infinity<float>(), share_lse[8] != -infinity<float>()};
#pragma unroll
                for (int t = 0; t < 4; ++t) {
                    const Vector<float, 4> x = reinterpret_cast<const Vector<float, 4>*>(share)[t];
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (visible[e / 2]) sum[t][e] = fma(weight[e / 2], x.item[e], sum[t][e]);
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (g + 8 * i >= left) continue;
                const float inverse = total[i] == 0.0f ? 0.0f : 1.0f / total[i];
                Vector<uint32, 4> chunk;
#pragma unroll
                for (int t = 0; t < 4; ++t)
                    chunk.item[t] = pack<Element>(sum[t][2 * i] * inverse, sum[t][2 * i + 1] * inverse);
                *reinterpret_cast<Vector<uint32, 4>*>(o + (g + 8 * i) * params.o_strides.row + column8 * 8) = chunk;
                if (column8 == 0) lse[g + 8 * i] = shift[i] + log(total[i]);
            }
        }
    }
};

}  // namespace fa2::common
