// FlashAttention-2 backward by key tiles (Algorithm 2) on mma.sync. The kernel computes dK and dV of a key tile; for
// `single_pass` it also adds the tile's contribution to dQ to an fp32 workspace (dq_workspace.cuh). For `one_tile`, whose
// key tile has all keys, it stores dQ and computes delta from O, so that no other kernel is needed; with a bias that
// sequences share, a block walks over many of them and sums dS.
//
//   S^T = K Q^T          P^T = exp(scale S^T - lse)       dV = P^T dO
//   dP^T = V dO^T        dS^T = P^T o (dP^T - delta)      dK = scale dS^T Q       dQ = scale dS K
//
//   block   owns kBc keys of one K/V head; loops over the query tiles of B_r = kBr rows that see them, in all query
//           heads of the group, so that dK and dV are summed on chip in a fixed order
//   group   a pair of warps, or two of them where a gradient has more than 256 columns, owns kGroupKeys = 16 kM16 keys
//   pair    two warps divide the work by role:
//             probability warp    S^T, then dV
//             derivative warp     dP^T, then dK
//           Two pairs of a group have one half of the rows of S^T and dP^T each. Warps of one role exchange what they have
//           computed of P^T, or dS^T, and each has one half of the columns of the gradient
//
// Scores are computed transposed. The accumulators of S^T or dP^T, rounded to 16 bits, are then the left operand of the
// second product and stay in registers.
//
// Roles: a warp that computed both gradients would have to hold dK and dV of its keys in registers. With roles each
// warp holds one of them, for twice as many keys, and uses every right operand read from shared memory twice as often.
// The cost is that P^T must pass from the probability warp to the derivative warp, through shared memory. It is stored
// in register order, without bank conflicts, and as float16 for either element type, since P lies in [0, 1], where
// float16 keeps eleven significant bits. In `single_pass` all warps share the work on dQ of the previous query tile,
// which fills the wait for P^T.
//
// Without roles: in `one_tile`, a warp computes both gradients of its keys if a tile has 16 keys or more for each warp and
// heads are narrow (kBothRoles), so that S^T, dP^T and both gradients fit into its registers. P^T then stays there, no
// warp waits for another one's, and the code is half as long: the kernel of a short sequence has no loop in which
// instructions are fetched once and used often.
//
// The two warps of a pair are neighbours (kInterleaved) or warps w and w + kPairs, which share a scheduler. On an H100
// at seqlen 4096 neighbours were 2 to 6 % faster with dQ from head_dim 96 on, and up to 5 % slower otherwise.
//
// Barriers: query_tile_barrier at the top of an iteration guarantees that the query tile has landed, that dS of the
// previous tile is complete, and that the slots read by the previous iteration are free. With one stage, another one
// before it protects the only slot from the next copy. Named barrier 1 + pair: P^T is written; those behind them: both
// halves of P^T, or of dS^T, of a group are written.
#pragma once
#include "common/bias_owner.cuh"
#include "common/mask.cuh"
#include "common/params.cuh.j2"
#include "common/sequence.cuh"
#include "common/shares.cuh"
#include "common/weights.cuh"
#include "sm80/backward_dkdv_shape.cuh"
#include "sm80/dq_of_keys.cuh"
#include "sm80/hidden_rows.cuh"
#include "sm80/one_tile_bias.cuh"
#include "sm80/row_statistics.cuh"

namespace fa2::sm80 {

template <class Spec, DqSums kDqSums = DqSums::kNone, class Params = fa2::Params>
struct BackwardDkdv : BackwardDkdvShape<Spec, kDqSums> {
    using Shape = BackwardDkdvShape<Spec, kDqSums>;
    using Element = typename Spec::Element;
    using Shape::kBr, Shape::kBc, Shape::kStages, Shape::kHeadDim, Shape::kHeadDimV, Shape::kThreads, Shape::kPairs;
    using Shape::kK, Shape::kV, Shape::kQ, Shape::kDo, Shape::kStageBytes, Shape::kDs, Shape::kP, Shape::kO;
    using Shape::kShared, Shape::kRowStats, Shape::kRowStatsBytes;
    using Shape::kSharers, Shape::kGroupKeys, Shape::kM16, Shape::kPartRows;
    using Shape::kWithDq, Shape::kStoresDq, Shape::kSumsDbias, Shape::kBothRoles, Shape::kInterleaved;
    using typename Shape::DsTile;
    using typename Shape::KTile, typename Shape::VTile, typename Shape::QTile, typename Shape::DoTile;
    static constexpr bool kByKeys = true, kFindsSequences = false;
    using Scores = QuadFragment<kPartRows / 8>;
    using Exchanged = PackedFragment<float16, kPartRows / 8>;
    static constexpr int kOwnWeights = kBothRoles ? kM16 : 1;

    using Step = common::QueryStep;
    using Statistics = RowStatistics<Spec, BackwardDkdv>;
    using Bias = BiasOfWarp<Spec, BackwardDkdv>;
    using Dbias = DbiasSums<BackwardDkdv>;
    using Dq = DqOfKeys<Spec, BackwardDkdv>;

    template <bool kProbability>
    using Role = RoleTiles<kProbability, KTile, VTile, QTile, DoTile>;
    template <bool kProbability>
    using Gradient = QuadFragment<Role<kProbability>::Result::kCols / kSharers / 8>;
    template <bool kProbability>
    static constexpr int kResultDim = kProbability ? kHeadDimV : kHeadDim;

    // What a thread knows of its block, which the parts of the kernel take.
    const Params& params;
    uint32 smem;
    common::TileCoordinates where;
    common::QueryTiles<Spec> tiles;
    int32 thread, lane, warp, pair;

    // This thread's numbers, computed anew where they are used.
    __device__ int32 lane_anew() const {
        const int32 x = computed_anew(lane);
        if constexpr (kStoresDq) __builtin_assume(x >= 0 && x < 32);
        return x;
    }
    __device__ int32 thread_anew() const {
        const int32 x = computed_anew(thread);
        if constexpr (kStoresDq) __builtin_assume(x >= 0 && x < kThreads);
        return x;
    }
    __device__ int32 first_own_key() const { return pair / kSharers * kGroupKeys; }  // in the tile
    __device__ int32 part() const { return pair % kSharers; }
    template <bool kProbability>
    __device__ int32 first_column8() const {
        return part() * (Role<kProbability>::Result::kCols / kSharers / 8);
    }

    __device__ static void run(const Params& params, char* smem) {
        common::TileCoordinates where{};
        if constexpr (!kSumsDbias) {
            where = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
            common::take_share<Spec>(where, params);
            if constexpr (kStoresDq) where.tile = 0;
        }
        const auto tiles = common::query_tiles<Spec>(params, where);
        const int32 thread = threadIdx.x, warp = __shfl_sync(common::kFullWarp, thread / 32, 0);
        const int32 pair = kInterleaved ? warp / 2 : warp % kPairs;
        const BackwardDkdv block{{}, params, shared_address(smem), where, tiles, thread, thread % 32, warp, pair};
        if constexpr (!kStoresDq) block.load_key_tile();
        if constexpr (kBothRoles)
            block.template run_roles<true, false>();
        else if (kInterleaved ? warp % 2 == 0 : warp < kPairs)
            block.template run_roles<true>();
        else
            block.template run_roles<false>();
    }

    // The roles of a warp: kProbability is true for that of the probability warp.
    template <bool... kRoles>
    __device__ void run_roles() const {
        if constexpr (!kSumsDbias) {
            if constexpr (kStoresDq) load_head<kRoles...>(true);
            loop<kRoles...>();
        } else {
            const common::HeadOwner<Spec, Params> owner(params);
            if constexpr ((!kRoles || ...)) Dbias::clear(*this);
            block_barrier();
            bool has_bias = false;
            owner.visit([&](int32 batch, int32 head) {
                const BackwardDkdv one{{},
                                       params,
                                       smem,
                                       {0, head, batch},
                                       tiles,
                                       computed_anew(thread),
                                       computed_anew(lane),
                                       computed_anew(warp),
                                       computed_anew(pair)};
                one.template load_head<kRoles...>(!has_bias);
                has_bias = true;
                one.template loop<kRoles...>();
                block_barrier();  // no warp reads its results in shared memory any more
            });
            Dbias::store(*this, owner);
        }
    }

    __device__ void load_key_tile() const {
        const int32 thread = kStoresDq ? thread_anew() : this->thread;
        const Element* k = params.k + params.k_strides.offset(where.batch, 0, where.head);
        const Element* v = params.v + params.v_strides.offset(where.batch, 0, where.head);
        load_tile_async<KTile, kThreads, kHeadDim>(smem + kK, k, params.k_strides.row, where.tile * kBc,
                                                   params.seqlen_k, thread);
        load_tile_async<VTile, kThreads, kHeadDimV>(smem + kV, v, params.v_strides.row, where.tile * kBc,
                                                    params.seqlen_k, thread);
    }

    __device__ void load_query_tile(Step step, int32 slot) const {
        const int32 thread = thread_anew(), batch = computed_anew(where.batch);
        if constexpr (common::kListsTiles<Spec>) step = tiles.at(step);
        const Element* q = params.q + params.q_strides.offset(batch, 0, step.head);
        const Element* dout = params.dout + params.dout_strides.offset(batch, 0, step.head);
        load_tile_async<QTile, kThreads, kHeadDim>(smem + kQ + slot * kStageBytes, q, params.q_strides.row,
                                                   step.tile * kBr, params.seqlen_q, thread);
        load_tile_async<DoTile, kThreads, kHeadDimV>(smem + kDo + slot * kStageBytes, dout, params.dout_strides.row,
                                                     step.tile * kBr, params.seqlen_q, thread);
        if constexpr (kStoresDq)
            if (params.o != nullptr)
                load_tile_async<DoTile, kThreads, kHeadDimV>(
                    smem + kO, params.o + params.o_strides.offset(batch, 0, step.head), params.o_strides.row,
                    step.tile * kBr, params.seqlen_q, thread);
    }

    // The barrier behind which a query tile is there, with zeros in the rows of Q and dO that see no key.
    __device__ void query_tile_barrier(int32 slot, int32 parity, bool is_first) const {
        clear_hidden_tile<Spec, kThreads>(
            params, is_first,
            [&](int32 thread) {  // by the number that this thread has stored
                const uint32 lse = smem + kRowStats + parity * kRowStatsBytes + thread * 4;
                return thread < kBr && load_shared<float>(lse) == common::infinity<float>();
            },
            [&](int32 row) {
                clear_row<QTile>(smem + kQ + slot * kStageBytes, row);
                clear_row<DoTile>(smem + kDo + slot * kStageBytes, row);
            });
    }

    __device__ uint32 exchange_address(int m, int s) const {
        return smem + kP + (((pair * kM16 + m) * (kPartRows / 16) + s) * 32 + lane) * 16;
    }
    // The same of the second operand of a role, by the pair. dS^T takes the place of the P^T that it is made of.
    template <bool kProbability>
    __device__ uint32 shared_address_of(int32 of_pair, int m, int s) const {
        return smem + (kProbability ? kShared : kP) + (((of_pair * kM16 + m) * (kPartRows / 16) + s) * 32 + lane) * 16;
    }

    // gradient += P^T dO, or dS^T Q, over one part of the query tile's rows, at which `second` starts.
    template <bool kProbability, class Second, class Fetch>
    __device__ void accumulate(Gradient<kProbability> (&gradient)[kM16], const Second& second, Fetch fetch) const {
        const int32 first_c16 = first_column8<kProbability>() / 2;
        multiply<Element, kPartRows / 16>(
            gradient, fetch, [&](int n, int kk) { return ldmatrix_x4<true>(second.at(kk, first_c16 + n)); });
    }

    // One role's part of an iteration.
    template <bool kProbability>
    __device__ void iterate(Gradient<kProbability> (&gradient)[kM16], Exchanged (&own_weights)[kOwnWeights], int32 slot,
                            int32 parity, Step step) const {
        const int32 lane = lane_anew();
        const uint32 q = smem + kQ + slot * kStageBytes, dout = smem + kDo + slot * kStageBytes;
        using Tiles = Role<kProbability>;
        const LaneAddress<typename Tiles::Own, MatrixOrder::kRowsFirst> own(smem + (kProbability ? kK : kV),
                                                                            first_own_key(), lane);
        const int32 first_row = part() * kPartRows;  // in the tile
        const LaneAddress<typename Tiles::Right, MatrixOrder::kChunksFirst> right(kProbability ? q : dout, first_row,
                                                                                  lane);
        using Second = LaneAddress<typename Tiles::Second, MatrixOrder::kRowsFirst>;
        const Second second(kProbability ? dout : q, first_row, lane);
        const uint32 row_stats =
            smem + kRowStats + parity * kRowStatsBytes + (kProbability ? 0 : kBr * 4) + first_row * 4 + lane % 4 * 8;

        Scores x[kM16];
#pragma unroll
        for (int n = 0; n < kPartRows / 8; ++n) {
            float minus_delta[2] = {};
            if constexpr (!kProbability && common::kProductsFromDelta<Spec>)
                load_shared(row_stats + n * 32, minus_delta);
#pragma unroll
            for (int m = 0; m < kM16; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e) x[m].value[n][e] = minus_delta[e % 2];
        }
        multiply<Element, Tiles::Own::kCols / 16>(
            x, [&](int m, int kk) { return ldmatrix_x4<false>(own.at(m, kk)); },
            [&](int n, int kk) { return ldmatrix_x4<false>(right.at(n, kk)); });

        PackedFragment<Element, kPartRows / 8> packed[kM16];
        const Step own_step = tiles.at(step);
        const common::ScoreTile score_tile{where.batch, own_step.head, own_step.tile * kBr + first_row,
                                           where.tile * kBc + first_own_key(), lane};
        if constexpr (kProbability) {
            if constexpr (common::kTakesWeights<Spec>) {
                const bool masked = step.tile < tiles.full_begin || (tiles.kLeftLimit && step.tile >= tiles.full_end);
#pragma unroll
                for (int m = 0; m < kM16; ++m)
                    common::take_weights_with<true, Spec>(
                        Bias::held(*this, m), x[m], packed[m], masked, params, score_tile.shifted(0, 16 * m),
                        [&](int, int j) { return load_shared<float>(row_stats + j / 2 * 32 + j % 2 * 4); },
                        {common::score_args_of(params), score_tile.shifted(0, 16 * m)});
            } else {
#pragma unroll
                for (int n = 0; n < kPartRows / 8; ++n) {
                    float lse[2];
                    load_shared(row_stats + n * 32, lse);
#pragma unroll
                    for (int m = 0; m < kM16; ++m)
#pragma unroll
                        for (int e = 0; e < 4; ++e)
                            x[m].value[n][e] =
                                common::exponential<Spec>(x[m].value[n][e], params.scale_log2, lse[e % 2]);
                }
                if (step.tile < tiles.full_begin || (tiles.kLeftLimit && step.tile >= tiles.full_end)) {
                    const auto mask = common::mask_of<Spec>(params);
#pragma unroll
                    for (int m = 0; m < kM16; ++m)
                        common::hide_scores<true, Spec>(x[m], mask, params, score_tile.shifted(0, 16 * m), 0.0f);
                }
            }
#pragma unroll
            for (int m = 0; m < kM16; ++m) {
                Exchanged p;
                p.set(x[m]);
                if constexpr (kBothRoles) {
                    own_weights[m] = p;
                    continue;
                }
#pragma unroll
                for (int s = 0; s < kPartRows / 16; ++s) store_shared(exchange_address(m, s), p.k16(s));
            }
            if constexpr (!kBothRoles) barrier_arrive(1 + pair, 64);
        } else {
            if constexpr (!kBothRoles) barrier_sync(1 + pair, 64);
#pragma unroll
            for (int m = 0; m < kM16; ++m)
#pragma unroll
                for (int s = 0; s < kPartRows / 16; ++s)
                    common::weigh_k16<Spec>(
                        x[m], s,
                        kBothRoles ? own_weights[kBothRoles * m].k16(s) : load_shared_operand(exchange_address(m, s)),
                        params, score_tile.shifted(0, 16 * m),
                        [&](int n, float (&minus_delta)[2]) { load_shared(row_stats + n * 32, minus_delta); });
        }

        if constexpr (kSumsDbias && !kProbability)
#pragma unroll
            for (int m = 0; m < kM16; ++m) Dbias::add(*this, x[m], m);
        if constexpr (!kProbability || !common::kTakesWeights<Spec>)
#pragma unroll
            for (int m = 0; m < kM16; ++m) packed[m].set(x[m]);
        if constexpr (kWithDq && !kProbability) {
            const uint32 ds = smem + kDs + (kStoresDq ? 0 : parity) * DsTile::kBytes;
            if constexpr (kStoresDq) {
                const StoreAddress<DsTile> to(ds, first_own_key(), lane);
#pragma unroll
                for (int m = 0; m < kM16; ++m)
#pragma unroll
                    for (int s = 0; s < kPartRows / 16; ++s) to.store(m, s, packed[m].k16(s));
            } else {
#pragma unroll
                for (int m = 0; m < kM16; ++m)
#pragma unroll
                    for (int n = 0; n < kPartRows / 8; ++n)
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            const int32 key = first_own_key() + 16 * m + Scores::row(i, lane);
                            store_shared(ds + DsTile::offset(key, n) + lane % 4 * 4, packed[m].word[n][i]);
                        }
            }
        }
        if constexpr (kSharers > 1) {
#pragma unroll
            for (int m = 0; m < kM16; ++m)
#pragma unroll
                for (int s = 0; s < kPartRows / 16; ++s)
                    store_shared(shared_address_of<kProbability>(pair, m, s), packed[m].k16(s));
        }
        accumulate<kProbability>(gradient, second, [&](int m, int kk) { return packed[m].k16(kk); });
        if constexpr (kSharers > 1) {
            const int32 other = pair ^ 1;
            barrier_sync(1 + kPairs + pair / kSharers * 2 + kProbability, 32 * kSharers);
            accumulate<kProbability>(
                gradient, Second(kProbability ? dout : q, other % kSharers * kPartRows, lane),
                [&](int m, int kk) { return load_shared_operand(shared_address_of<kProbability>(other, m, kk)); });
        }
    }

    template <bool kProbability>
    struct RoleSums {
        Gradient<kProbability> gradient[kM16];
    };
    // What a warp of these roles sums.
    template <bool... kRoles>
    struct Sums : RoleSums<kRoles>... {};

    // Starts the copies of a head's first tiles, and stores its statistics. Heads that share a bias leave it in its place.
    template <bool... kRoles>
    __device__ void load_head(bool with_bias) const {
        const Step first{where.head * params.heads_per_group, tiles.begin};
        if (tiles.begin >= tiles.end) return;
        load_key_tile();
        load_query_tile(first, 0);
        if (with_bias) (Bias::template load<kRoles>(*this, first), ...);
        Statistics::store(*this, Statistics::load(*this, first), 0);
    }

    template <bool... kRoles>
    __device__ void loop() const {
        constexpr bool kProbability = (kRoles && ...);
        Sums<kRoles...> sums;
#pragma unroll
        for (int m = 0; m < kM16; ++m) (sums.RoleSums<kRoles>::gradient[m].fill(0.0f), ...);

        const int32 tiles_per_head = tiles.end - tiles.begin;
        int32 first_step = 0, steps = tiles_per_head * tiles.num_heads(params.heads_per_group);
        if constexpr (Spec::kSplit) {
            const auto range = steps_of_block(steps);
            first_step = range.begin, steps = range.end - range.begin;
        }
        const int32 first_head = where.head * params.heads_per_group;
        // Without a mask all blocks visit the same query tiles. Each starts at a different tile, so that their atomic
        // additions do not meet in the same rows of dQ.
        constexpr bool kApart = kDqSums == DqSums::kAdded && !Spec::kCausal && !common::kListsTiles<Spec>;
        const int32 start = tiles.begin + (kApart && steps > 0 ? where.tile % tiles_per_head : 0);
        Step step{first_head, start};
        if (Spec::kSplit && steps > 0) {
            step.head += first_step / tiles_per_head;
            step.tile = tiles.begin + (start - tiles.begin + first_step) % tiles_per_head;
        }
        const auto next = [&](Step s) {
            const int32 tile = s.tile + 1 < tiles.end ? s.tile + 1 : tiles.begin;
            const bool same_head = kApart ? tile != start : s.tile + 1 < tiles.end;
            return Step{same_head ? s.head : s.head + 1, tile};
        };
        if constexpr (kStoresDq) {
            Dq::clear_unseen(*this);
        } else if (steps > 0) {
            if constexpr (kStages > 1) load_query_tile(step, 0);
            Statistics::store(*this, Statistics::load(*this, step), 0);
        }
        cp_async_commit();

        Step previous = step;
        for (int32 t = 0; t < steps; ++t) {
            const int32 slot = t % kStages;
            const Step following = next(step);
            const bool more = t + 1 < steps;
            if constexpr (kStages == 1) {
                if (!kStoresDq || (!kSumsDbias && t > 0)) {
                    block_barrier();
                    load_query_tile(step, 0);
                    (Bias::template load<kRoles>(*this, step), ...);
                    cp_async_commit();
                }
            }
            cp_async_wait<0>();
            query_tile_barrier(slot, t % 2, step.tile == tiles.begin);
            if constexpr (kStages > 1) {
                if (more) load_query_tile(following, (t + 1) % kStages);
                cp_async_commit();
            }
            if constexpr (kStoresDq) {
                Statistics::take_delta(*this, t % 2);
                block_barrier();
            }
            const float row_stat = more ? Statistics::load(*this, following) : 0.0f;
            if constexpr (kDqSums == DqSums::kAdded && !kProbability)
                if (t > 0) Dq::add(*this, previous, (t + 1) % 2);
            Exchanged own_weights[kOwnWeights];
            (iterate<kRoles>(sums.RoleSums<kRoles>::gradient, own_weights, slot, t % 2, step), ...);
            if constexpr (kDqSums == DqSums::kAdded && kProbability)
                if (t > 0) Dq::add(*this, previous, (t + 1) % 2);
            if constexpr (kStoresDq) {
                block_barrier();
                Dq::store(*this, step);
            }
            Statistics::store(*this, row_stat, (t + 1) % 2);
            previous = step;
            step = following;
        }
        cp_async_wait<0>();
        block_barrier();
        if constexpr (kDqSums == DqSums::kAdded) {
            if (steps > 0) Dq::add(*this, previous, (steps + 1) % 2);
            block_barrier();
        }
        if constexpr (Spec::kSplit)
            (put_share<kRoles>(sums.RoleSums<kRoles>::gradient), ...);
        else
            (store_gradient<kRoles>(sums.RoleSums<kRoles>::gradient), ...);
    }

    // The block's share of the steps of its key tile.
    __device__ common::StepRange steps_of_block(int32 steps) const {
        auto own = common::scheduled_tile<Spec, kByKeys>(params, blockIdx.x);
        return common::steps_of_share(steps, params.num_splits, common::take_share<Spec>(own, params));
    }

    template <bool kProbability>
    __device__ void put_share(const Gradient<kProbability> (&gradient)[kM16]) const {
        using Shares = common::ShareWorkspace<kBc, kHeadDim, kHeadDimV, kWithDq>;
        using Own = common::AccumulatorTile<kBc, kResultDim<kProbability>>;
        float* own = Shares::template of_block<Spec>(params) + kProbability * Shares::Dk::kElements;
#pragma unroll
        for (int m = 0; m < kM16; ++m)
            Shares::template put<Own>(own, gradient[m], first_own_key() / 16 + m, first_column8<kProbability>(), lane);
    }

    // No warp reads K and V any more.
    template <bool kProbability>
    __device__ void store_gradient(Gradient<kProbability> (&gradient)[kM16]) const {
        using Result = typename Role<kProbability>::Result;
        if constexpr (!kProbability || common::kHasKeptScale<Spec>)
#pragma unroll
            for (int m = 0; m < kM16; ++m)
#pragma unroll
                for (int n = 0; n < Result::kCols / 8; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        gradient[m].value[n][e] *=
                            kProbability ? common::kept_scale<Spec>(params) : params.softmax_scale;
        common::TileCoordinates where = this->where;
        if constexpr (!kStoresDq) where = common::scheduled_tile<Spec, kByKeys>(params, computed_anew(blockIdx.x));
        const Strides& strides = kProbability ? params.dv_strides : params.dk_strides;
        Element* gmem = (kProbability ? params.dv : params.dk) + strides.offset(where.batch, 0, where.head);
        const uint32 staged = smem + (kProbability ? 0 : VTile::kBytes);
        if constexpr (kBothRoles && 32 % Result::kChunks == 0)
            store_few_rows<Result, kM16, kResultDim<kProbability>>(staged, first_own_key(), gradient, gmem, strides.row,
                                                                   first_own_key(), params.seqlen_k, lane_anew());
        else
            store_rows<Result, kM16, kResultDim<kProbability>>(
                staged, first_own_key(), first_column8<kProbability>(), gradient, gmem, strides.row,
                where.tile * kBc + first_own_key(), params.seqlen_k, lane);
    }
};

}  // namespace fa2::sm80
