// The gradient of a broadcast bias: blocks own tiles of the bias and need no atomics. forward.cuh introduces the family.
//
//   S = scale Q K^T     P = exp(S - lse)     dP = dO V^T     dbias = sum of P o (dP - delta)
//
//   block   owns a tile of the bias, kBr queries and kBc keys; visits the tiles of scores that share it
//           (common/bias_owner.cuh)
//   warp    owns kBr / kWarps rows of the tile
//   lane    holds a part of the sums, S and dP of these rows, as microtile.cuh says, and their lse and delta
//
//   shared memory       written by    read by
//   Q [kBr][Rows]       all warps     each warp its rows, to compute S
//   dO [kBr][RowsV]     all warps     each warp its rows, to compute dP
//   K [kBc][Rows]       all warps     all warps, to compute S
//   V [kBc][RowsV]      all warps     all warps, to compute dP
//
// The block synchronises twice for each tile of scores: before it reads dO and V, where the copy of Q and K starts, and
// before it reads Q and K, where that of the next dO and V does. At the end, sums over queries pass through the same
// memory.
#pragma once
#include "common/bias_owner.cuh"
#include "common/params.cuh.j2"
#include "common/statistics.cuh"
#include "common/weights.cuh"
#include "simt/microtile.cuh"

namespace fa2::simt {

template <class Spec>
struct Dbias {
    using Real = typename Spec::Element;
    static constexpr bool kByKeys = false, kFindsSequences = true;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kThreads = Spec::kWarps * 32;
    using Warp = Microtile<Real, kBr / Spec::kWarps, kBc, Spec::kHeadDim>;
    using WarpV = Microtile<Real, kBr / Spec::kWarps, kBc, Spec::kHeadDimV>;
    using Rows = typename Warp::Rows;
    using RowsV = typename WarpV::Rows;
    using Scores = typename Warp::Scores;
    static constexpr int kRows = Scores::kRows;
    static_assert((kBr + kBc) * (Rows::kRowLength + RowsV::kRowLength) * sizeof(Real) == Spec::kSharedBytes);
    static_assert(Spec::kWarps * kBc * sizeof(Real) <= Spec::kSharedBytes);

    __device__ static void run(const Params& params, char* smem) {
        Real* q_rows = reinterpret_cast<Real*>(smem);
        Real* do_rows = q_rows + kBr * Rows::kRowLength;
        Real* k_tile = do_rows + kBr * RowsV::kRowLength;
        Real* v_tile = k_tile + kBc * Rows::kRowLength;
        const int32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_row = warp * Warp::kOwn;
        const auto copy_do_v = [&](const common::BiasStep& step) {
            const auto& own = common::record_of_sequence<Spec>(params, step.batch);
            const Real* dout = head_of(own.dout, own.dout_strides, step.batch, step.head);
            const Real* v = head_of(own.v, own.v_strides, step.batch, step.head / own.heads_per_group);
            RowsV::template copy<kThreads, kBr>(do_rows, dout, own.dout_strides.row, step.query_tile * kBr,
                                                own.seqlen_q);
            RowsV::template copy<kThreads, kBc>(v_tile, v, own.v_strides.row, step.key_tile * kBc, own.seqlen_k);
        };
        common::BiasOwner<Spec, Params> owner(params);
        Scores sums[1];
        Warp::clear(sums[0]);

        if (owner.has_step()) copy_do_v(owner.step());
        while (owner.has_step()) {
            const common::BiasStep step = owner.step();
            const auto& own = common::record_of_sequence<Spec>(params, step.batch);
            wait_for_copies();
            __syncthreads();  // dO and V are there, Q and K are free
            const Real* q = head_of(own.q, own.q_strides, step.batch, step.head);
            const Real* k = head_of(own.k, own.k_strides, step.batch, step.head / own.heads_per_group);
            Rows::template copy<kThreads, kBr>(q_rows, q, own.q_strides.row, step.query_tile * kBr, own.seqlen_q);
            Rows::template copy<kThreads, kBc>(k_tile, k, own.k_strides.row, step.key_tile * kBc, own.seqlen_k);

            // An lse of +inf makes P zero in rows past the end and in rows without a visible key.
            const int64 first_stat = common::first_statistic<Spec>(own, step.batch, step.head);
            const int32 first_row = step.query_tile * kBr + warp_row;
            Real lse[kRows], delta[kRows];
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                const int32 row = first_row + Scores::row(i, lane);
                const bool valid = row < own.seqlen_q && own.lse[first_stat + row] != -common::infinity<Real>();
                lse[i] = valid ? own.lse[first_stat + row] : common::infinity<Real>();
                delta[i] = valid ? own.delta[first_stat + row] : Real(0);
            }
            Scores p, ds;
            WarpV::dot(ds, do_rows + warp_row * RowsV::kRowLength, v_tile, lane);
            wait_for_copies();
            __syncthreads();  // Q and K are there, dO and V are free
            owner.advance();
            if (owner.has_step()) copy_do_v(owner.step());

            Warp::dot(p, q_rows + warp_row * Rows::kRowLength, k_tile, lane);
            const common::ScoreTile score_tile{step.batch, step.head, {first_row, step.key_tile * kBc, lane}};
            common::differentiate_softmax<false, Spec>(
                p, ds, common::mask_of<Spec>(own), {step.masked, false}, own, score_tile,
                [&](int i, int) { return lse[i]; }, [&](int i, int) { return delta[i]; });
#pragma unroll
            for (int i = 0; i < kRows; ++i)
#pragma unroll
                for (int j = 0; j < Scores::kCols; ++j)
                    if (lse[i] != common::infinity<Real>())  // rows that see no key may have NaN in Q and dO
                        sums[0](i, j) += ds(i, j);
        }
        owner.store(sums, reinterpret_cast<Real*>(smem), warp_row, warp, lane);
    }
};

}  // namespace fa2::simt
