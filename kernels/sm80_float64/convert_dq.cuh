// dQ = scale * workspace, restored to rows: the last stage of `single_pass`.
//
// A block owns one query tile of a head. A thread has the four accumulators of a lane, 2 rows by 2 columns. A warp thus
// reads 256 contiguous bytes at a time, and writes 64.
#pragma once
#include "common/params.cuh.j2"
#include "common/sequence.cuh"
#include "sm80_float64/dq_workspace.cuh"

namespace fa2::sm80_float64 {

template <class Spec>
struct ConvertDq {
    static constexpr int kBr = Spec::kBr, kD = common::round_up(Spec::kHeadDim, 16);
    using Workspace = DqWorkspace<kBr, kD>;

    __device__ static void run(const Params& params, int32 block, int32) {
        const int32 head = block / params.num_tiles;
        const auto rows = common::workspace_rows<Spec>(params, block % params.num_tiles);
        if (rows.length <= 0) return;
        const double* workspace = params.dq_accum + static_cast<int64>(block) * Workspace::kTileElements;
        double* dq = params.dq + params.dq_strides.offset(head / params.num_heads, rows.first, head % params.num_heads);
        for (int32 index = threadIdx.x; index < Workspace::kTileElements / 4; index += 32 * Spec::kWarps) {
            const int32 lane = index % 32, n8 = index / 32 % (kD / 8), m16 = index / 32 / (kD / 8);
            Fragment<1> x;
#pragma unroll
            for (int e = 0; e < 4; ++e)
                x.value[0][e] = params.softmax_scale * workspace[Workspace::offset(m16, n8, e, lane)];
            store_rows<Spec::kHeadDim, kD>(x, dq, params.dq_strides.row, 16 * m16, rows.length, 8 * n8, lane);
        }
    }
};

}  // namespace fa2::sm80_float64
