// FlashAttention-2 forward (Algorithm 1) on mma.sync.
//
//   S = scale Q K^T        P = exp(S - row_shift)        O = P V / rowsum(P)        lse = row_shift + log(rowsum(P))
//
//   block   owns kBr query rows of one head; loops over the key tiles of B_c = kBc keys that these rows see, or over a
//           share of them (common/output_shares.cuh)
//   warp    owns kBr / kWarps of these rows, 16 or 32; keeps their O in registers. With 32 rows, every right operand
//           loaded by ldmatrix feeds four mma instructions, so that shared memory bandwidth is not the limit
//
// Key tiles are visited from last to first, so that the masked ones (causal diagonal, partial last tile) come first.
// The row shift is the row maximum of the tiles so far, or an earlier one while P stays small
// (common/online_softmax.cuh).
//
//   shared memory                     written by          read by
//   Q [kBr][kD]                       all warps           each warp its rows, to compute S
//   (K, V) [kStages], [kBc][kD, kDv]  all warps           all warps, to compute S (K) and O (V)
//
// At the end O [kBr][kDv] is staged at the place of Q, and of the first slots if it is larger.
//
// Barriers: one __syncthreads per key tile, in the ring of K and V (key_ring.cuh). P stays in registers and needs none.
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
struct ForwardRows {
    using Element = typename Spec::Element;
    static constexpr bool kByKeys = false, kFindsSequences = false;
    static constexpr int kBr = Spec::kBr, kBc = Spec::kBc;
    static constexpr int kHeadDim = Spec::kHeadDim, kHeadDimV = Spec::kHeadDimV;
    static constexpr int kD = padded_head_dim(kHeadDim), kDv = padded_head_dim(kHeadDimV);
    static constexpr int kThreads = Spec::kWarps * 32;
    static constexpr int kWarpRows = kBr / Spec::kWarps;
    static constexpr int kM16 = kWarpRows / 16;

    using QTile = SmemTile<kBr, kD>;
    using OTile = SmemTile<kBr, kDv>;
    using Ring = KeyRing<common::KeyTiles<Spec>, Element, kBc, Spec::kStages, kThreads, kHeadDim, kHeadDimV>;
    using KTile = typename Ring::KTile;
    using VTile = typename Ring::VTile;
    static constexpr int kSharedBytes = common::max_of(QTile::kBytes + Ring::kBytes, OTile::kBytes);
    static_assert(kSharedBytes == Spec::kSharedBytes);

    using Scores = QuadFragment<kBc / 8>;
    using Output = QuadFragment<kDv / 8>;
    using Softmax = common::OnlineSoftmax<float, 2, 4, common::exp2_approx, false, 1, common::kNaturalInExponent<Spec>>;

    __device__ static void run(const Params& params, char* dynamic_smem) {
        const uint32 smem = shared_address(dynamic_smem);
        const int32 thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
        auto where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        const int32 share = common::take_share<Spec>(where, params);
        const int32 first_row = where.tile * kBr;
        const int32 head_kv = where.head / params.heads_per_group;
        const Element* q = params.q + params.q_strides.offset(where.batch, 0, where.head);
        const Element* k = params.k + params.k_strides.offset(where.batch, 0, head_kv);
        const Element* v = params.v + params.v_strides.offset(where.batch, 0, head_kv);

        auto tiles = common::key_tiles<Spec>(params, where);
        common::limit_to_share<Spec>(tiles, params, share);
        const auto mask = common::mask_of<Spec>(params);
        const int32 warp_row = warp * kWarpRows;

        const Ring ring(smem + QTile::kBytes, k, v, params, tiles, thread);
        load_tile_async<QTile, kThreads, kHeadDim>(smem, q, params.q_strides.row, first_row, params.seqlen_q, thread);
        cp_async_commit();
        ring.start();

        const LaneAddress<QTile, MatrixOrder::kRowsFirst> q_address(smem, warp_row, lane);
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
            const LaneAddress<KTile, MatrixOrder::kChunksFirst> k_address(slot, 0, lane);
            const LaneAddress<VTile, MatrixOrder::kRowsFirst> v_address(slot + KTile::kBytes, 0, lane);

            Scores scores[kM16];
#pragma unroll
            for (int m = 0; m < kM16; ++m) scores[m].fill(0.0f);
            multiply<Element, kD / 16>(
                scores, [&](int m, int kk) { return ldmatrix_x4<false>(q_address.at(m, kk)); },
                [&](int n, int kk) { return ldmatrix_x4<false>(k_address.at(n, kk)); });

            PackedFragment<Element, kBc / 8> p[kM16];
            const bool masked = position >= tiles.full_end || (tiles.kLeftLimit && position < tiles.full_begin);
            // The first tile has no row shift to try yet. Masked tiles are rare, so they take the general path.
            const bool try_row_shift = !masked && position != tiles.end - 1;
#pragma unroll
            for (int m = 0; m < kM16; ++m) {
                const common::ScoreTile score_tile{where.batch, where.head, first_row + warp_row + 16 * m, tile * kBc,
                                                   lane};
                common::modify_scores<Spec>(scores[m], params, score_tile);
                if (try_row_shift && softmax[m].try_row_shift(scores[m], common::score_scale<Spec>(params), p[m]))
                    continue;
                common::scale_scores<Spec>(scores[m], params);
                if (masked)
                    common::hide_scores<false, Spec>(scores[m], mask, params, score_tile, -common::infinity<float>());
                float rescale[2];
                softmax[m].update(scores[m], rescale);
#pragma unroll
                for (int n = 0; n < kDv / 8; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) output[m].value[n][e] *= rescale[e / 2];
                p[m].set(scores[m]);
            }

#pragma unroll
            for (int m = 0; m < kM16; ++m)
                common::drop<Spec>(p[m], params,
                                   {where.batch, where.head, first_row + warp_row + 16 * m, tile * kBc, lane});
            multiply<Element, kBc / 16>(
                output, [&](int m, int kk) { return p[m].k16(kk); },
                [&](int n, int kk) { return ldmatrix_x4<true>(v_address.at(kk, n)); });
        }

        // If there was no key tile, the copy of Q is still in flight, and O is about to overwrite it.
        cp_async_wait<0>();
        __syncthreads();
        store(params, where, share, softmax, output, smem, first_row, warp_row, lane);
    }

  private:
    // Stores O and lse in the results, or in the block's share of the workspace. Record is a template parameter because
    // no record has both.
    template <class Record>
    __device__ __forceinline__ static void store(const Record& params, const common::TileCoordinates& where,
                                                 int32 share, const Softmax (&softmax)[kM16], Output (&output)[kM16],
                                                 uint32 smem, int32 first_row, int32 warp_row, int32 lane) {
        float row_lse[2];
        if constexpr (Spec::kSplit) {
            using Shares = common::OutputShares<Spec>;
            float* own = Shares::of_block(params);
#pragma unroll
            for (int m = 0; m < kM16; ++m) {
                finish_output<Spec>(softmax[m], output[m], row_lse, params, where.head, share);
                Shares::put_lse(own, row_lse, warp_row / 16 + m, lane);
                Shares::put(own, output[m], warp_row / 16 + m, 0, lane);
            }
        } else {
            Element* o = params.o + params.o_strides.offset(where.batch, 0, where.head);
            float* lse = params.lse + common::first_statistic<Spec>(params, where.batch, where.head);
#pragma unroll
            for (int m = 0; m < kM16; ++m) {
                finish_output<Spec>(softmax[m], output[m], row_lse, params, where.head, share);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int32 row = first_row + warp_row + 16 * m + Output::row(i, lane);
                    if (lane % 4 == 0 && row < params.seqlen_q) lse[row] = row_lse[i];
                }
            }
            store_rows<OTile, kM16, kHeadDimV>(smem, warp_row, 0, output, o, params.o_strides.row, first_row + warp_row,
                                               params.seqlen_q, lane);
        }
    }
};

}  // namespace fa2::sm80
