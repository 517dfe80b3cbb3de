// dQ = scale * workspace, rounded and restored to rows: the last stage of `single_pass`.
//
// A block converts one query tile of one head. A thread converts eight columns of rows g and g + 8 of a 16-row tile: in
// the workspace these belong to the four neighbouring lanes 4g .. 4g + 3 of one m16n8 tile, in dQ they are two 16-byte
// chunks.
#pragma once
#include "common/params.cuh.j2"
#include "common/sequence.cuh"
#include "sm80/dq_workspace.cuh"
#include "sm80/smem_tile.cuh"

namespace fa2::sm80 {

template <class Spec, class Params = fa2::Params>
struct ConvertDq {
    using Element = typename Spec::Element;
    static constexpr int kBr = Spec::kBr;
    static constexpr int kD = padded_head_dim(Spec::kHeadDim);
    static constexpr int kChunks = Spec::kHeadDim / 8;
    using Workspace = DqWorkspace<kBr, kD>;

    __device__ static void run(const Params& params, int32 block, int32) {
        const int32 head = block / params.num_tiles;
        const float* workspace = params.dq_accum + static_cast<int64>(block) * Workspace::kTileElements;
        const auto rows = common::workspace_rows<Spec>(params, block % params.num_tiles);
        if (Spec::kVarlen && rows.length <= 0) return;
        Element* dq =
            params.dq + params.dq_strides.offset(head / params.num_heads, rows.first, head % params.num_heads);

        for (int32 index = threadIdx.x; index < kBr / 2 * kChunks; index += blockDim.x) {
            const int32 n8 = index % kChunks, g = index / kChunks % 8, m16 = index / (kChunks * 8);
            float x[4][4];  // [lane - 4g][accumulator]
#pragma unroll
            for (int t = 0; t < 4; ++t)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    x[t][e] = params.softmax_scale * workspace[Workspace::offset(m16, n8, 4 * g + t, e)];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int32 row = 16 * m16 + g + 8 * i;
                if (row >= rows.length) continue;
                uint4 chunk;
                chunk.x = common::pack<Element>(x[0][2 * i], x[0][2 * i + 1]);
                chunk.y = common::pack<Element>(x[1][2 * i], x[1][2 * i + 1]);
                chunk.z = common::pack<Element>(x[2][2 * i], x[2][2 * i + 1]);
                chunk.w = common::pack<Element>(x[3][2 * i], x[3][2 * i + 1]);
                *reinterpret_cast<uint4*>(dq + row * params.dq_strides.row + n8 * 8) = chunk;
            }
        }
    }
};

}  // namespace fa2::sm80
