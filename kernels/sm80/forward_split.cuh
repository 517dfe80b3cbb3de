// FlashAttention-2 forward (Algorithm 1) on mma.sync for more than 128 columns of V; see forward_rows.cuh.
//
// At this width a warp's registers hold O of only 16 rows. Every right operand read from shared memory would then feed
// half as many mma instructions, and shared memory bandwidth would be the limit. So two warps share 32 (or 16) rows, and
// beyond 256 columns four, or two that share 16:
//
//   block   owns kBr query rows of one head; loops over the key tiles of B_c = kBc keys that these rows see
//   group   kSharers warps own kGroupRows of these rows
//   warp    computes S and P for its part of the tile's keys, exchanges P with the other sharers, and accumulates its part
//           of the columns of O over all keys of the tile
//
// All sharers must use the same row shift, because their parts of P enter the same sums. They keep the old shift if
// all find P small enough, and otherwise all change to the new one.
//
//   shared memory                     written by          read by
//   Q [kBr][kD]                       all warps           all warps of a group, to compute S
//   (K, V) [kStages], [kBc][kD, kDv]  all warps           all warps, to compute S (K) and O (V)
//   P per warp, in register order     each warp its part  the other sharers, to compute O
//   statistics [kWarps][kGroupRows]   each warp its part  the other sharers; row maxima, and at the end row sums
//
// At the end O [kBr][kDv] is staged at the place of Q, and of what follows up to the statistics if it is larger.
//
// Barriers: one __syncthreads per key tile, in the ring of K and V, and a second one where K and V alternate. Named
// barrier 1 + group: all parts of P are written; the same barrier combines the votes. It is used once more when row
// maxima are exchanged.
#pragma once
#include "common/mask.cuh"
#include "common/online_softmax.cuh"
#include "common/output_shares.cuh"
#include "common/params.cuh.j2"
#include "common/schedule.cuh"
#include "common/scores.cuh"
#include "common/sequence.cuh"
#include "common/statistics.cuh"
#include "common/tile_lists.cuh"
#include "sm80/forward_output.cuh"
#include "sm80/key_ring.cuh"
#include "sm80/multiply.cuh"

namespace fa2::sm80 {

template <class Spec>
struct ForwardSplit {
    using Element = typename Spec::Element;
    static constexpr bool kByKeys = false, kFindsSequences = false;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc, kWarps = Spec::kWarps;
    static constexpr int kHeadDim = Spec::kHeadDim, kHeadDimV = Spec::kHeadDimV;
    static constexpr int kD = padded_head_dim(kHeadDim), kDv = padded_head_dim(kHeadDimV);
    static constexpr int kThreads = kWarps * 32;
    static constexpr int kSharers = sharers_of_output(kDv, kBc), kGroups = kWarps / kSharers;
    static constexpr int kGroupRows = kBr / kGroups;
    static constexpr int kGroupThreads = 32 * kSharers;
    static constexpr int kM16 = kGroupRows / 16;
    static constexpr int kPartKeys = kBc / kSharers;
    static constexpr int kPartCols = kDv / kSharers;

    using QTile = SmemTile<kBr, kD>;
    using OTile = SmemTile<kBr, kDv>;
    using Ring = KeyRing<common::KeyTiles<Spec>, Element, kBc, Spec::kStages, kThreads, kHeadDim, kHeadDimV, NoOthers,
                         turns_of(common::max_of(kD, kDv), Spec::kStages, Turns::kKeysFirst)>;
    using KTile = typename Ring::KTile;
    using VTile = typename Ring::VTile;
    static constexpr int kKeys = QTile::kBytes;
    static constexpr int kP = kKeys + Ring::kBytes;
    static constexpr int kStats = common::max_of(kP + kBr * kBc * 2, OTile::kBytes);
    static constexpr int kSharedBytes = kStats + kWarps * kGroupRows * 4;
    static_assert(kSharedBytes == Spec::kSharedBytes);

    using Scores = QuadFragment<kPartKeys / 8>;
    using Packed = PackedFragment<Element, kPartKeys / 8>;
    using Output = QuadFragment<kPartCols / 8>;
    using Softmax = common::OnlineSoftmax<float, 2, 4, common::exp2_approx, false, 1, common::kNaturalInExponent<Spec>>;

    uint32 smem;
    int32 lane, group, part;

    // An exchange slot of this group: the warp's own (of_part = part) or another sharer's.
    __device__ uint32 p_address(int32 of_part, int m, int kk) const {
        return smem + kP + ((((group * kSharers + of_part) * kM16 + m) * (kPartKeys / 16) + kk) * 32 + lane) * 16;
    }
    __device__ uint32 stat_address(int32 of_part, int m, int i) const {
        return smem + kStats + ((group * kSharers + of_part) * kGroupRows + 16 * m + Output::row(i, lane)) * 4;
    }
    __device__ int32 barrier() const { return 1 + group; }
    // The part of the s-th of the other sharers.
    __device__ int32 other(int s) const { return kSharers == 2 ? 1 - part : part ^ s; }

    __device__ void write_p(const Packed (&p)[kM16]) const {
#pragma unroll
        for (int m = 0; m < kM16; ++m)
#pragma unroll
            for (int kk = 0; kk < kPartKeys / 16; ++kk) store_shared(p_address(part, m, kk), p[m].k16(kk));
    }

    __device__ static void drop(Packed (&p)[kM16], const Params& params, const common::ScoreTile& tile) {
#pragma unroll
        for (int m = 0; m < kM16; ++m) common::drop<Spec>(p[m], params, tile.shifted(16 * m, 0));
    }

    // O += P V over one part of the tile's keys. The lane addresses `v` start at that part.
    template <class FetchP>
    __device__ static void accumulate(Output (&output)[kM16], const LaneAddress<VTile, MatrixOrder::kRowsFirst>& v,
                                      int32 first_c16, FetchP fetch_p) {
        multiply<Element, kPartKeys / 16>(output, fetch_p,
                                          [&](int n, int kk) { return ldmatrix_x4<true>(v.at(kk, first_c16 + n)); });
    }

    // Exchanges a row statistic among the sharers through shared memory and combines the values by `meet`, in the same
    // order in all of them but for the sides of each meeting.
    template <class Meet>
    __device__ void exchange(float (&stat)[kM16][2], Meet meet) const {
#pragma unroll
        for (int m = 0; m < kM16; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i)
                if (lane % 4 == 0) store_shared(stat_address(part, m, i), stat[m][i]);
        barrier_sync(barrier(), kGroupThreads);
#pragma unroll
        for (int m = 0; m < kM16; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float of_sharer[kSharers] = {stat[m][i]};
#pragma unroll
                for (int s = 1; s < kSharers; ++s) of_sharer[s] = load_shared<float>(stat_address(other(s), m, i));
#pragma unroll
                for (int step = 1; step < kSharers; step *= 2)
#pragma unroll
                    for (int s = 0; s < kSharers; s += 2 * step) of_sharer[s] = meet(of_sharer[s], of_sharer[s + step]);
                stat[m][i] = of_sharer[0];
            }
    }

    __device__ static void run(const Params& params, char* dynamic_smem) {
        const int32 thread = threadIdx.x, warp = __shfl_sync(common::kFullWarp, thread / 32, 0);
        ForwardSplit{shared_address(dynamic_smem), thread % 32, warp / kSharers, warp % kSharers}.forward(params);
    }

    __device__ void forward(const Params& params) const {
        const int32 thread = threadIdx.x;
        auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        const int32 share = common::take_share<Spec>(where, params);
        const int32 first_row = where.tile * kBr, group_row = group * kGroupRows;
        const int32 head_kv = where.head / params.heads_per_group;
        auto tiles = common::key_tiles<Spec>(params, where);
        common::limit_to_share<Spec>(tiles, params, share);
        const auto mask = common::mask_of<Spec>(params);

        const Ring ring(smem + kKeys, params.k + params.k_strides.offset(where.batch, 0, head_kv),
                        params.v + params.v_strides.offset(where.batch, 0, head_kv), params, tiles, thread);
        load_tile_async<QTile, kThreads, kHeadDim>(smem, params.q + params.q_strides.offset(where.batch, 0, where.head),
                                                   params.q_strides.row, first_row, params.seqlen_q, thread);
        cp_async_commit();
        ring.start();

        const LaneAddress<QTile, MatrixOrder::kRowsFirst> q_address(smem, group_row, lane);
        Softmax softmax[kM16];
        Output output[kM16];
#pragma unroll
        for (int m = 0; m < kM16; ++m) {
            softmax[m].reset();
            output[m].fill(0.0f);
        }

        for (int32 position = tiles.end - 1; position >= tiles.begin; --position) {
            const uint32 slot = ring.acquire(position);
            int32 tile = position;
            if constexpr (common::kListsTiles<Spec>) tile = tiles.at(position);
            const LaneAddress<KTile, MatrixOrder::kChunksFirst> k_address(slot, part * kPartKeys, lane);

            Scores scores[kM16];
#pragma unroll
            for (int m = 0; m < kM16; ++m) scores[m].fill(0.0f);
            multiply<Element, kD / 16>(
                scores, [&](int m, int kk) { return ldmatrix_x4<false>(q_address.at(m, kk)); },
                [&](int n, int kk) { return ldmatrix_x4<false>(k_address.at(n, kk)); });

            const common::ScoreTile score_tile{where.batch, where.head, first_row + group_row,
                                               tile * kBc + part * kPartKeys, lane};
#pragma unroll
            for (int m = 0; m < kM16; ++m)
                common::modify_scores<Spec>(scores[m], params, score_tile.shifted(16 * m, 0));
            Packed p[kM16];
            const bool masked = position >= tiles.full_end || (tiles.kLeftLimit && position < tiles.full_begin);
            bool kept = false;
            // The attempt fails in the first tile; shares make it nevertheless, so that no register holds `end`.
            if (!masked && (Spec::kSplit || position != tiles.end - 1)) {
                float share[kM16][2];
                bool fits = true;
#pragma unroll
                for (int m = 0; m < kM16; ++m)
                    fits &= softmax[m].attempt(scores[m], common::score_scale<Spec>(params), p[m], share[m]);
                drop(p, params, score_tile);
                write_p(p);
                kept = barrier_all(barrier(), kGroupThreads, fits);
                if (kept)
#pragma unroll
                    for (int m = 0; m < kM16; ++m) softmax[m].keep(share[m]);
            }
            if (!kept) {
                float highest[kM16][2];
#pragma unroll
                for (int m = 0; m < kM16; ++m) {
                    common::scale_scores<Spec>(scores[m], params);
                    if (masked)
                        common::hide_scores<false, Spec>(scores[m], mask, params, score_tile.shifted(16 * m, 0),
                                                         -common::infinity<float>());
                    softmax[m].maximum_of(scores[m], highest[m]);
                }
                exchange(highest, [](float a, float b) { return common::maximum(a, b); });
#pragma unroll
                for (int m = 0; m < kM16; ++m) {
                    float rescale[2];
                    softmax[m].move_row_shift(highest[m], scores[m], rescale);
#pragma unroll
                    for (int n = 0; n < kPartCols / 8; ++n)
#pragma unroll
                        for (int e = 0; e < 4; ++e) output[m].value[n][e] *= rescale[e / 2];
                    p[m].set(scores[m]);
                }
                drop(p, params, score_tile);
                write_p(p);
                barrier_sync(barrier(), kGroupThreads);
            }

            const uint32 v = slot + KTile::kBytes;
            const int32 first_c16 = part * (kPartCols / 16);
            ring.acquire_second(position);
            accumulate(output, {v, part * kPartKeys, lane}, first_c16, [&](int m, int kk) { return p[m].k16(kk); });
#pragma unroll
            for (int s = 1; s < kSharers; ++s)
                accumulate(output, {v, other(s) * kPartKeys, lane}, first_c16,
                           [&](int m, int kk) { return load_shared_operand(p_address(other(s), m, kk)); });
        }

        // If there was no key tile, the copy of Q is still in flight, and O is about to overwrite it.
        cp_async_wait<0>();
        __syncthreads();
        store(params, where, share, softmax, output, first_row + group_row, group_row);
    }

    // Record: as in forward_rows.cuh.
    template <class Record>
    __device__ void store(const Record& params, const common::TileCoordinates& where, int32 share,
                          const Softmax (&softmax)[kM16], Output (&output)[kM16], int32 first_row,
                          int32 group_row) const {
        constexpr int kPartChunks = kPartCols / 8;
        float total[kM16][2], row_lse[2];
#pragma unroll
        for (int m = 0; m < kM16; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) total[m][i] = common::row_sum<4>(softmax[m].sum[i]);
        exchange(total, [](float a, float b) { return a + b; });

        if constexpr (Spec::kSplit) {
            using Shares = common::OutputShares<Spec>;
            float* own = Shares::of_block(params);
#pragma unroll
            for (int m = 0; m < kM16; ++m) {
                finish_output<Spec>(softmax[m], output[m], row_lse, params, where.head, share, total[m]);
                if (part == 0) Shares::put_lse(own, row_lse, group_row / 16 + m, lane);
                Shares::put(own, output[m], group_row / 16 + m, part * kPartChunks, lane);
            }
        } else {
            float* lse = params.lse + common::first_statistic<Spec>(params, where.batch, where.head);
#pragma unroll
            for (int m = 0; m < kM16; ++m) {
                finish_output<Spec>(softmax[m], output[m], row_lse, params, where.head, share, total[m]);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int32 row = first_row + 16 * m + Output::row(i, lane);
                    if (part == 0 && lane % 4 == 0 && row < params.seqlen_q) lse[row] = row_lse[i];
                }
            }
            store_rows<OTile, kM16, kHeadDimV>(smem, group_row, part * kPartChunks, output,
                                               params.o + params.o_strides.offset(where.batch, 0, where.head),
                                               params.o_strides.row, first_row, params.seqlen_q, lane);
        }
    }
};

}  // namespace fa2::sm80
