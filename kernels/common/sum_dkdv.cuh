// dK and dV, summed over the copies in the workspace of a split kernel (shares.cuh), scaled, rounded and rearranged from accumulator
// order into rows.
//
// A block owns 32 rows of one gradient. A thread sums 2 rows by 8 columns: the accumulators of 4 lanes of one 16 x 8
// block of the workspace, which it stores as two 16-byte chunks. Copies are summed in their order, so that the result
// is bit-reproducible.
#pragma once
#include "common/score_mod.cuh"
#include "common/sequence.cuh"
#include "common/shares.cuh"

namespace fa2::common {

template <class Spec, class Params = fa2::Params>
struct SumDkdv {
    using Element = typename Spec::Element;
    using Workspace = ShareWorkspace<Spec::kBc, Spec::kHeadDim, Spec::kHeadDimV, false>;
    using Dk = typename Workspace::Dk;
    using Dv = typename Workspace::Dv;
    static constexpr int kRow32s = ceil_div(Spec::kBc, 32);

    __device__ static void run(const Params& params, int32 block) {
        const bool is_dv = block % 2;
        const int32 row32 = block / 2 % kRow32s, tile_index = block / 2 / kRow32s;
        const int32 tile = tile_index % params.num_key_tiles, head_index = tile_index / params.num_key_tiles;
        const auto rows = workspace_rows<Spec, true>(params, tile);
        const int32 first_row = 32 * row32, left = min_of(rows.length, Spec::kBc) - first_row;
        if (left <= 0) return;
        const int32 heads = params.num_heads / params.heads_per_group;
        const int32 batch = head_index / heads, head = head_index % heads;
        const int64 row_stride = is_dv ? params.dv_strides.row : params.dk_strides.row;
        Element* out = is_dv ? params.dv + params.dv_strides.offset(batch, rows.first + first_row, head)
                             : params.dk + params.dk_strides.offset(batch, rows.first + first_row, head);
        const float scale = is_dv ? static_cast<float>(kept_scale<Spec>(params)) : params.softmax_scale;

        const int64 between_copies = static_cast<int64>(params.num_key_tiles) * Workspace::kTileElements;
        const float* first = params.shares + head_index * params.num_copies * between_copies +
                             static_cast<int64>(tile) * Workspace::kTileElements + (is_dv ? Dk::kElements : 0);
        const int32 chunks = is_dv ? Spec::kHeadDimV / 8 : Spec::kHeadDim / 8;
        for (int32 index = threadIdx.x; index < 2 * 8 * chunks; index += blockDim.x) {
            const int32 column8 = index % chunks, g = index / chunks % 8, row = index / (chunks * 8) * 16 + g;
            if (row >= left) return;
            const int32 row16 = (first_row + row) / 16;
            const float* share =
                first + (is_dv ? Dv::offset(row16, column8, 4 * g) : Dk::offset(row16, column8, 4 * g));
            float sum[4][4] = {};  // [lane - 4 g][accumulator]
#pragma unroll 4
            for (int32 copy = 0; copy < params.num_copies; ++copy, share += between_copies)
#pragma unroll
                for (int t = 0; t < 4; ++t) {
                    const float4 x = reinterpret_cast<const float4*>(share)[t];
                    sum[t][0] += x.x, sum[t][1] += x.y, sum[t][2] += x.z, sum[t][3] += x.w;
                }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (row + 8 * i >= left) continue;
                Vector<uint32, 4> chunk;
#pragma unroll
                for (int t = 0; t < 4; ++t)
                    chunk.item[t] = pack<Element>(scale * sum[t][2 * i], scale * sum[t][2 * i + 1]);
                *reinterpret_cast<Vector<uint32, 4>*>(out + (row + 8 * i) * row_stride + column8 * 8) = chunk;
            }
        }
    }
};

}  // namespace fa2::common
