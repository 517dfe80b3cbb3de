// FlashAttention forward of float32 data on mma.sync: products of float16 parts (float32_parts/parts.cuh).
//
//   S = scale Q K^T        P = exp(S - row_max)        O = P V / rowsum(P)        lse = row_max + log(rowsum(P))
//
//   block   owns kBr query rows of one head; loops over the key tiles of B_c = kBc keys that these rows see
//   warp    owns 16 of these rows; keeps their O in registers, which are stored from there: the results may have any
//           strides
//
//   shared memory                     written by          read by
//   Q [part][panel][kBr]              all warps           each warp its rows, to compute S
//   K [part][panel][kBc]              all warps           all warps, to compute S
//   V [part][panel][kBc]              all warps           all warps, to compute O
//
// Parts fill shared memory, so that K and V have one buffer each. V of a tile is copied while S is computed, and K of
// the next tile while O is. Barriers: two __syncthreads per key tile, one in front of each product. Each also makes sure
// that no warp reads the other buffer any more.
#pragma once
#include "common/exceptions.cuh"
#include "common/mask.cuh"
#include "common/online_softmax.cuh"
#include "common/scores.cuh"
#include "common/statistics.cuh"
#include "common/tile_range.cuh"
#include "sm80_float32/multiply.cuh"

namespace fa2::sm80_float32 {

template <class Spec>
struct Forward {
    static constexpr bool kByKeys = false, kFindsSequences = false;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kThreads = 32 * Spec::kWarps;
    static constexpr int kD = common::round_up(Spec::kHeadDim, 16), kDv = common::round_up(Spec::kHeadDimV, 16);
    static constexpr int kStrips = ceil_div(kBc, kUnitRows), kStripSteps = kBc / kStrips / 16;
    static_assert(kBr == 16 * Spec::kWarps && Spec::kStages == 1);

    static constexpr bool kShared = kPartsMayShare<Spec>;
    using QueryTile = PartsTile<kBr, Spec::kHeadDim, kShared>;
    using KeyTile = PartsTile<kBc, Spec::kHeadDim, kShared>;
    using ValueTile = PartsTile<kBc, Spec::kHeadDimV, kShared>;
    static constexpr int kQ = 0, kK = QueryTile::kBytes, kV = kK + KeyTile::kBytes;
    static constexpr int kSharedBytes = kV + ValueTile::kBytes;
    static_assert(kSharedBytes == Spec::kSharedBytes);

    using Scores = QuadFragment<kBc / 8>;
    using Output = QuadFragment<kDv / 8>;
    using Softmax = common::OnlineSoftmax<float, 2, 4, common::exp_approx, true>;

    __device__ static void run(const Params& params, char* dynamic_smem) {
        const auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        const int32 head_kv = where.head / params.heads_per_group;
        if (common::is_exception<Spec>(params, where.batch, head_kv)) return;
        const uint32 smem = shared_address(dynamic_smem);
        const int32 thread = threadIdx.x, lane = thread % 32, warp_row = thread / 32 * 16;
        const int32 first_row = where.tile * kBr;
        const auto tiles = common::key_tiles_of<Spec::kCausal, kBr, kBc>(where.tile, params.seqlen_q, params.seqlen_k,
                                                                         common::window_of<Spec>(params));
        const auto mask = common::mask_of<Spec>(params);
        const auto queries =
            head_parts<Spec, false, true, kShared>(params, params.q_parts, params.q_units, where.batch, where.head);
        const auto keys =
            head_parts<Spec, true, true, kShared>(params, params.k_parts, params.k_units, where.batch, head_kv);
        const auto values =
            head_parts<Spec, true, false, kShared>(params, params.v_parts, params.v_units, where.batch, head_kv);
        if (tiles.begin < tiles.end) {
            queries.template load_async<QueryTile, kThreads>(smem + kQ, first_row);
            keys.template load_async<KeyTile, kThreads>(smem + kK, (tiles.end - 1) * kBc);
        }
        cp_async_commit();

        const PartsAddress<QueryTile, MatrixOrder::kRowsFirst> q_address(smem + kQ, warp_row, lane);
        const PartsAddress<KeyTile, MatrixOrder::kChunksFirst> k_address(smem + kK, 0, lane);
        const PartsAddress<ValueTile, MatrixOrder::kRowsFirst> v_address(smem + kV, 0, lane);
        const float query_unit = queries.unit(first_row + warp_row);
        Softmax softmax;
        softmax.reset();
        Output output;
        output.fill(0.0f);

        for (int32 tile = tiles.end - 1; tile >= tiles.begin; --tile) {
            cp_async_wait<0>();
            __syncthreads();  // K is there
            values.template load_async<ValueTile, kThreads>(smem + kV, tile * kBc);
            cp_async_commit();
            float score_unit[kStrips], value_unit[kStrips];
#pragma unroll
            for (int c = 0; c < kStrips; ++c) {
                score_unit[c] = query_unit * keys.unit(tile * kBc + c * kUnitRows);
                value_unit[c] = values.unit(tile * kBc + c * kUnitRows) / kProbabilityScale;
            }
            Scores scores;
            multiply_columns<kD / 16, false>(
                scores, [&](int part, int s) { return ldmatrix_x4<false>(q_address.at(part, 0, s)); },
                [&](int part, int n, int s) { return ldmatrix_x4<false>(k_address.at(part, n, s)); });

            const common::ScoreTile position{where.batch, where.head, first_row + warp_row, tile * kBc, lane};
            scale_products<!common::kModifiesScores<Spec>>(scores, score_unit, params);
            common::modify_scores<Spec>(scores, params, position);
            if (tile >= tiles.full_end || (tiles.kLeftLimit && tile < tiles.full_begin))
                common::mask_scores(scores, mask, position.position, -common::infinity<float>());
            float rescale[2];
            softmax.update(scores, rescale);
            common::drop<Spec>(scores, params, position);
            FragmentParts<kBc / 8> p;
            const float scale[2] = {kProbabilityScale, kProbabilityScale};
            p.set_scaled(scores, scale);
            multiply_rows(output, rescale);

            cp_async_wait<0>();
            __syncthreads();  // V is there
            if (tile > tiles.begin) keys.template load_async<KeyTile, kThreads>(smem + kK, (tile - 1) * kBc);
            cp_async_commit();
#pragma unroll
            for (int c = 0; c < kStrips; ++c) {
                const float unit[2] = {value_unit[c], value_unit[c]};
                const auto value_block = [&](int part, int n, int s) {
                    // Keeps the compiler from loading the blocks of all columns ahead, for lack of registers.
                    if (part == 0 && s % kStripSteps == 0) __syncwarp();
                    return ldmatrix_x4<true>(v_address.at(part, s, n));
                };
                add_chain<kStripSteps, true>(
                    output, [&](int part, int s) { return p.k16(part, s); }, value_block, c * kStripSteps, unit);
            }
        }
        store(params, where, softmax, output, first_row + warp_row, lane);
    }

  private:
    __device__ __forceinline__ static void store(const Params& params, const common::TileCoordinates& where,
                                                 const Softmax& softmax, Output& output, int32 first_row, int32 lane) {
        float inverse_sum[2], row_lse[2];
        common::finish_rows<Spec>(softmax, params, where.head, 0, inverse_sum, row_lse);
        multiply_rows(output, inverse_sum);
        float* lse = params.lse + common::first_statistic<Spec>(params, where.batch, where.head);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int32 row = first_row + Output::row(i, lane);
            if (lane % 4 == 0 && row < params.seqlen_q) lse[row] = row_lse[i];
        }
        store_fragment<Spec::kHeadDimV>(output, params.o + params.o_strides.offset(where.batch, 0, where.head),
                                        params.o_strides.row, first_row, params.seqlen_q, 0, lane);
    }
};

}  // namespace fa2::sm80_float32
