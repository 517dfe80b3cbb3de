// dQ = scale * workspace, rearranged from accumulator order into rows (last stage of `single_pass`).
//
// A block owns one query tile of a head. A thread has the four accumulators of a lane, 2 rows by 2 columns. Four
// neighbouring threads thus write whole sectors of 32 bytes.
#pragma once
#include "common/sequence.cuh"
#include "sm90/dq_workspace.cuh"

namespace fa2::sm90_float32 {

using namespace fa2::sm90;

template <class Spec>
struct ConvertDq {
    static constexpr int kBr = Spec::kBr, kD = round_up(Spec::kHeadDim, 16);
    using Workspace = DqWorkspace<kBr, kD>;
    using Fragment = QuadFragment<1>;
    static_assert(!Workspace::kTransposed);

    __device__ static void run(const Params& params, int32 block, int32 blocks) {
        // Blocks run from the last tile to the first, because those added last are still in the L2 cache.
        const int32 index = blocks - 1 - block;
        const int32 head = index / params.num_tiles;
        const auto rows = common::workspace_rows<Spec>(params, index % params.num_tiles);
        if (rows.length <= 0) return;
        const float* workspace = params.dq_accum + static_cast<int64>(index) * Workspace::kTileElements;
        float* dq = params.dq + params.dq_strides.offset(head / params.num_heads, rows.first, head % params.num_heads);
        const bool in_pairs = reinterpret_cast<uint64>(dq) % 8 == 0 && params.dq_strides.row % 2 == 0;
#pragma unroll 4
        for (int32 quad = threadIdx.x; quad < Workspace::kTileElements / 4; quad += 32 * Spec::kWarps) {
            const int32 lane = quad % 32, column8 = quad / 32 % (kD / 8), row16 = quad / 32 / (kD / 8);
            const int32 column = 8 * column8 + Fragment::col(0, lane);
            const auto x = reinterpret_cast<const Vector<float, 4>*>(workspace)[quad];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int32 row = 16 * row16 + Fragment::row(i, lane);
                if (row >= rows.length || column >= Spec::kHeadDim) continue;
                float* to = dq + row * params.dq_strides.row + column;
                const float even = params.softmax_scale * x.item[2 * i], odd = params.softmax_scale * x.item[2 * i + 1];
                if (in_pairs && column + 1 < Spec::kHeadDim) {
                    common::store_global(to, even, odd);
                } else {
                    to[0] = even;
                    if (column + 1 < Spec::kHeadDim) to[1] = odd;
                }
            }
        }
    }
};

}  // namespace fa2::sm90_float32
