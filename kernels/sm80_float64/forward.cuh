// FlashAttention forward of float64 data on mma.sync.
//
//   S = scale Q K^T        P = exp(S - row_shift)        O = P V / rowsum(P)        lse = row_shift + log(rowsum(P))
//
//   block   owns kBr query rows of one head; loops over the key tiles of B_c = kBc keys that these rows see
//   warp    owns 16 of these rows, alone or with another warp (sharers.cuh); keeps their O, and S and P of a tile, in
//           registers. With 16 rows, a load of a right operand feeds two products of 8 rows: with 8, shared memory would
//           be the limit
//
//   shared memory         written by          read by
//   powers [64]           first 64 threads    all warps, to compute exponentials
//   Q [kBr][kD]           all warps           each warp its rows, to compute S
//   K [kBc][kD]           all warps           all warps, to compute S
//   V [kBc][kDv]          all warps           all warps, to compute O
//   slots of sharers      two warps           the same two: sums, row maxima, P (sharers.cuh)
//
// V of a tile is copied while S is computed, and K of the next tile while O is. Barriers: two __syncthreads per key tile,
// one in front of each product. Each also makes sure that no warp reads the other buffer any more, and the first one, that
// no warp reads P. Warps that share rows have a named barrier.
//
// On an H200, all arithmetic of doubles shares a pipe with the tensor cores. Multiply-adds in a clock of a multiprocessor:
// 126 by m16n8k8 with two warps on a scheduler, 118 with one; 64 by m8n8k4. With a DFMA between two of them, their clocks
// add up, and up to a seventh more. Each instruction for a score thus costs as much as one more column of both products.
// That is why exponentials come from a table, and row shifts stay while P is small (common/online_softmax.cuh). Scores are
// natural: P of a row that one score dominates is then exactly 1.
#pragma once
#include "common/mask.cuh"
#include "common/params.cuh.j2"
#include "common/schedule.cuh"
#include "common/scores.cuh"
#include "common/sequence.cuh"
#include "common/statistics.cuh"
#include "common/tile_lists.cuh"
#include "sm80_float64/softmax.cuh"

namespace fa2::sm80_float64 {

template <class Spec>
struct Forward {
    static constexpr bool kByKeys = false, kFindsSequences = false;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kThreads = 32 * Spec::kWarps;
    static constexpr int kHeadDim = Spec::kHeadDim, kHeadDimV = Spec::kHeadDimV;
    static constexpr int kSharers = sharers_of_rows<Spec, kBr>();
    using RowWarps = Sharers<kSharers, kBc>;
    static constexpr int kD = common::round_up(kHeadDim, 16 * kSharers);
    static constexpr int kDv = common::round_up(kHeadDimV, 16 * kSharers);
    static_assert(Spec::kStages == 1);

    using QTile = Tile<kBr, kD>;
    using KTile = Tile<kBc, kD>;
    using VTile = Tile<kBc, kDv>;
    static constexpr int kQ = kPowersBytes, kK = kQ + QTile::kBytes, kV = kK + KTile::kBytes;
    static constexpr int kSlots = kV + VTile::kBytes;
    static_assert(kSlots + kBr / 16 * RowWarps::kBytes == Spec::kSharedBytes);

    using Scores = typename RowWarps::Scores;
    static constexpr int kN8 = kDv / kSharers / 8, kGroup = kN8 <= 8 ? kN8 : kN8 % 4 == 0 ? 4 : 2;
    using Output = Fragment<kN8>;

    __device__ static void run(const Params& params, char* dynamic_smem) {
        const uint32 smem = shared_address(dynamic_smem);
        const int32 thread = threadIdx.x, lane = thread % 32;
        const int32 rows16 = thread / 32 / kSharers, half = thread / 32 % kSharers, warp_row = 16 * rows16;
        const auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        const int32 first_row = where.tile * kBr, head_kv = where.head / params.heads_per_group;
        const double* q = params.q + params.q_strides.offset(where.batch, 0, where.head);
        const double* k = params.k + params.k_strides.offset(where.batch, 0, head_kv);
        const double* v = params.v + params.v_strides.offset(where.batch, 0, head_kv);
        const auto copy_k = [&](int32 tile) {
            load_tile_async<KTile, kThreads, kHeadDim>(smem + kK, k, params.k_strides.row, tile * kBc, params.seqlen_k,
                                                       thread);
        };
        const auto copy_v = [&](int32 tile) {
            load_tile_async<VTile, kThreads, kHeadDimV>(smem + kV, v, params.v_strides.row, tile * kBc, params.seqlen_k,
                                                        thread);
        };
        const auto mask = common::mask_of<Spec>(params);

        const RowWarps sharers(smem + kSlots + rows16 * RowWarps::kBytes, half, 1 + rows16, lane);
        const auto q_rows = sharers.template along_rows<QTile>(smem + kQ, warp_row);
        const auto k_rows = sharers.template along_rows<KTile>(smem + kK, 0);
        const auto v_rows = sharers.template across_rows<VTile>(smem + kV);
        Softmax softmax;
        softmax.reset();
        Output output;
        output.fill(0.0);

        // From last to first: masked tiles come early, so that the row shifts that they leave are seldom raised.
        const auto tiles = common::key_tiles<Spec>(params, where);
        if (tiles.begin < tiles.end) {
            load_tile_async<QTile, kThreads, kHeadDim>(smem + kQ, q, params.q_strides.row, first_row, params.seqlen_q,
                                                       thread);
            copy_k(tiles.at(tiles.end - 1));
        }
        store_powers<kThreads>(smem, thread);
        for (int32 position = tiles.end - 1; position >= tiles.begin; --position) {
            const int32 tile = tiles.at(position);
            common::cp_async_wait_all();
            __syncthreads();  // Q and K are there, V is free
            copy_v(tile);

            const common::ScoreTile score_tile{where.batch, where.head, first_row + warp_row,
                                               tile * kBc + sharers.first_column(), lane};
            Scores scores = sharers.products(q_rows, k_rows);
            common::natural_scores<Spec>(scores, params, score_tile);
            if (position >= tiles.full_end || (tiles.kLeftLimit && position < tiles.full_begin))
                common::hide_scores<false, Spec>(scores, mask, params, score_tile, -common::infinity<double>());
            take_softmax(softmax, sharers, scores, [&](const double (&factors)[2]) { scale_rows(output, factors); });
            common::drop<Spec>(scores, params, score_tile);
            sharers.give(scores);

            common::cp_async_wait_all();
            __syncthreads();  // V and P are there, K is free
            if (position > tiles.begin) copy_k(tiles.at(position - 1));
            const auto p = sharers.whole(scores);
            add_sums<kGroup>(output,
                             [&](Fragment<kGroup>& sums, int first8) { multiply_columns(sums, p, v_rows, 0, first8); });
        }

        double total[2] = {softmax.sum[0], softmax.sum[1]}, inverse_sum[2], row_lse[2];
        sharers.wait();  // P has been read
        total_of(sharers, total);
        common::finish_rows<Spec>(softmax, params, where.head, 0, inverse_sum, row_lse, total);
        scale_rows(output, inverse_sum);
        double* lse = params.lse + common::first_statistic<Spec>(params, where.batch, where.head);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int32 row = first_row + warp_row + Output::row(i, lane);
            if (half == 0 && lane % 4 == 0 && row < params.seqlen_q) lse[row] = row_lse[i];
        }
        store_rows<kHeadDimV, kDv>(output, params.o + params.o_strides.offset(where.batch, 0, where.head),
                                   params.o_strides.row, first_row + warp_row, params.seqlen_q, half * (kDv / kSharers),
                                   lane);
    }
};

}  // namespace fa2::sm80_float64
