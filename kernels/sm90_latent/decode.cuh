// The arithmetic of a block in decode/decode.cuh on wgmma, for latent attention: V is the first columns of K. A left
// operand of wgmma has 64 rows, and the queries of a tile may be fewer. Keys and columns of V are the rows, therefore,
// and all products are transposed:
//
//   S^T = K Q^T       64 keys by the rows of a warp group, half of those of the tile. Up to 32 rows, where reading keys
//                     takes the time, each group reads half of the columns, for all rows, and the groups add the halves
//   O^T += V^T P^T    half of the columns of V, those of a warp group, by all rows of the tile
//
// P is computed with the current row shifts, and kept unless a vote of all threads finds that those of a row must move.
// The warps, each of which has 16 of the keys, exchange their maxima only then.
//
//   scratch                             written by               read by
//   P [kBr][64 keys]                    a group for its rows     both groups
//   maxima, or sums [warp][kBr]         a group for its rows     this group
//   factors of O [kBr]                  a group for its rows     both groups
//   halves of S^T [group][thread]       the other group          a group, for its rows
//   signals (signals.cuh)               mbarriers of the slots
//
// Warps behind those of the two groups are producers, which copy the keys.
#pragma once
#include "common/online_softmax.cuh"
#include "decode/decode.cuh"
#include "sm80/smem_tile.cuh"
#include "sm90/layout.cuh"
#include "sm90_latent/shares.cuh"
#include "sm90_latent/signals.cuh"
#include "sm90_latent/wgmma.cuh.j2"

namespace fa2::sm90_latent {

using common::kFullWarp, common::shared_address;
using sm90::along_columns, sm90::along_rows, sm90::kGroupThreads, sm90::kPanelColumns, sm90::kPanelRowBytes;

// Rows in panels of shared memory, as the copies of sm80/smem_tile.cuh need them.
template <int kRows_, int kCols_>
struct Panels {
    static constexpr int kRows = kRows_, kCols = kCols_, kChunks = kCols / 8, kPeriod = 8;
    static constexpr int kPanelBytes = kRows * kPanelRowBytes, kBytes = kCols / kPanelColumns * kPanelBytes;
    static_assert(kCols % kPanelColumns == 0 && kRows % 8 == 0);

    __device__ __forceinline__ static uint32 offset(int32 row, int32 chunk) {
        return chunk / 8 * kPanelBytes + row * kPanelRowBytes + ((chunk % 8 ^ row % 8) << 4);
    }
};

// The scores of 16 keys, which are the rows of an accumulator of S^T, by the fragment contract.
template <int kN8>
struct ScoresOfKeys {
    static constexpr int kRows = 2 * kN8, kCols = 2, kLanesPerRow = 8, kLaneStep = 4;

    QuadFragment<kN8> transposed;

    __device__ static int32 row(int i, int32 lane) { return QuadFragment<kN8>::col(i, lane); }
    __device__ static int32 col(int j, int32 lane) { return QuadFragment<kN8>::row(j, lane); }
    __device__ float& operator()(int i, int j) { return transposed(j, i); }
    __device__ float operator()(int i, int j) const { return transposed(j, i); }
};

// Stores two 8x8 matrices of 16-bit elements, each transposed; lane l < 16 passes the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x2_transposed(uint32 address, uint32 first, uint32 second) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(first),
                 "r"(second)
                 : "memory");
}

template <class Spec>
class DecodeWarp {
  public:
    static constexpr int kD = Spec::kHeadDim, kDv = Spec::kHeadDimV;
    static constexpr int kSharers = 8, kKeys = Spec::kBc, kProducers = Spec::kWarps - kSharers;
    static constexpr bool kValuesInKeys = true, kSendsRows = true;
    // A slot is filled again as soon as it is free, but for 64 rows, whose arithmetic is the limit, while the scores of the
    // next step are computed.
    static constexpr bool kCopiesMeanwhile = Spec::kBr == 64, kRefills = !kCopiesMeanwhile;

  private:
    using Element = typename Spec::Element;
    static constexpr int kBr = Spec::kBr, kStages = Spec::kStages;
    static constexpr int kThreads = 32 * kSharers, kGroups = kThreads / kGroupThreads;  // that multiply
    static constexpr int kGroupRows = kBr / kGroups, kGroupPanels = kDv / kPanelColumns / kGroups;
    using QTile = Panels<kBr, kD>;
    using KTile = Panels<kKeys, kD>;
    using PTile = Panels<kBr, kKeys>;
    using Scores = ScoresOfKeys<kGroupRows / 8>;
    using Softmax = common::OnlineSoftmax<float, Scores::kRows, Scores::kLanesPerRow, common::exp2_approx, false,
                                          Scores::kLaneStep>;
    using Job = decode::Job;
    static_assert(kGroups == 2 && kKeys == sm90::kGroupRows && kBr % 16 == 0);
    static_assert(kDv % (kGroups * kPanelColumns) == 0 && kDv <= kD);
    static constexpr bool kAddsHalves = kBr <= 32;
    static constexpr int kHalfBytes = kAddsHalves ? kThreads * kGroupRows / 8 * 16 : 0;
    static constexpr int kMaxima = PTile::kBytes, kFactors = kMaxima + 4 * kBr * 4, kHalves = kFactors + kBr * 4;
    using Products = QuadFragment<(kAddsHalves ? kBr : kGroupRows) / 8>;
    static constexpr int kOfBoth = 1, kOfGroup = 2;  // named barriers; the second of each group

  public:
    static constexpr int kColumns = kDv;
    static constexpr int kKeyBytes = KTile::kBytes, kQueryBytes = QTile::kBytes, kSlotBytes = kKeyBytes;
    using Shares = sm90_latent::Shares<Spec, kDv, kStages * kSlotBytes>;
    using Signals = sm90_latent::Signals<kStages, kProducers, kSharers, kHalves + kHalfBytes>;
    static constexpr int kScratchBytes = Signals::kEnd;
    static_assert(kQueryBytes % sm90::kAlignment == 0 && kSlotBytes % sm90::kAlignment == 0);

    template <int kThreads>
    __device__ __forceinline__ static void copy_queries(char* to, const Params& params, const Job& job, int32 rows) {
        const decode::QueryRows<Spec, Params> source_of{params, job, rows};
        sm80::load_rows_async<QTile, kThreads, kD>(shared_address(to), source_of, threadIdx.x);
    }
    __device__ __forceinline__ static void sync() { common::barrier_sync(kOfBoth, kThreads); }
    template <class SourceOf>
    __device__ __forceinline__ static void copy_keys(char* to, const SourceOf& source_of) {
        constexpr int kCopying = kProducers == 0 ? kThreads : 32 * kProducers;
        constexpr int kChunks = 8;  // of a panel
        const int32 first = threadIdx.x % kThreads / kChunks, chunk = threadIdx.x % kChunks;
#pragma unroll
        for (int32 row = first; row < first + kKeys; row += kCopying / kChunks) {
            const Element* source = source_of(row);
            const bool exists = source != nullptr;
            const uint32 place = shared_address(to) + KTile::offset(row, chunk);
            source += chunk * 8;
#pragma unroll
            for (int panel = 0; panel < kD / kPanelColumns; ++panel)
                sm80::cp_async_16(place + panel * KTile::kPanelBytes, source + panel * kPanelColumns, exists);
        }
    }
    __device__ __forceinline__ static void commit() { sm80::cp_async_commit(); }
    // Rows that this thread has copied, others may then multiply behind a barrier.
    template <int kPending>
    __device__ __forceinline__ static void wait() {
        sm80::cp_async_wait<kPending>();
        sm90::async_proxy_fence();
    }

    __device__ __forceinline__ static bool is_producer() { return threadIdx.x >= kThreads; }

    // Begins a job whose first row is `first_row`.
    __device__ __forceinline__ void begin(const Params& params, const Job& job, int32 first_row) {
        slopes_.load(params, job, [=](int i) { return first_row + own_row(i); });
        has_shifts_ = false;
        softmax_.reset();
#pragma unroll
        for (int m = 0; m < kGroupPanels; ++m) output_[m].fill(0.0f);
    }

    struct Nothing {
        __device__ __forceinline__ void operator()() const {}
    };
    // Calls `meanwhile` while S^T is computed.
    template <class Mask, class Meanwhile = Nothing>
    __device__ __forceinline__ void step(const Params& params, const char* q, const char* slot, char* scratch,
                                         const Mask& mask, int32 first_row, int32 first_key, bool masked,
                                         const Meanwhile& meanwhile = {}) {
        // In a register of the warp, too: producers' slots are not those of the warps that multiply.
        const uint32 own = shared_address(slot), keys = kProducers == 0 ? own : __shfl_sync(common::kFullWarp, own, 0);
        const uint32 probabilities = shared_address(scratch);
        Products products;
        multiply_scores(products, keys, shared_address(q));
        meanwhile();
        sm90::wgmma_wait<0>();
        sm90::pin(products);
        Scores scores = own_scores(products, probabilities + kHalves);
        first_key += 16 * warp();
        decode::modify<Spec>(scores, params, slopes_, 0, first_key, lane());
        if (masked || !has_shifts_ || !try_row_shift(params, scores, probabilities)) {
            if constexpr (!decode::kScalesFirst<Spec>) {
                const float scale = common::capped_scale<Spec>(params);
#pragma unroll
                for (int i = 0; i < Scores::kRows; ++i)
#pragma unroll
                    for (int j = 0; j < Scores::kCols; ++j) scores(i, j) *= scale;
            }
            if (masked)
                common::mask_scores(scores, mask,
                                    common::TilePosition{first_row + group() * kGroupRows, first_key, lane()},
                                    -common::infinity<float>());
            move_row_shift(scores, probabilities);
        }
        multiply_output(keys, probabilities);
        has_shifts_ = true;
    }

    // Writes the statistics of the rows.
    __device__ __forceinline__ void finish(common::RowStatistic<float>* rows, char* scratch) {
        float total[Scores::kRows];
        softmax_.totals(total);
        float* const sums = reinterpret_cast<float*>(scratch + kMaxima);
        if (lane() < 4)
#pragma unroll
            for (int i = 0; i < Scores::kRows; ++i) sums[warp() * kBr + own_row(i)] = total[i];
        group_sync();
        if (warp() == 0 && lane() < 4)
#pragma unroll
            for (int i = 0; i < Scores::kRows; ++i) {
                float sum = 0;
#pragma unroll
                for (int w = 0; w < 4; ++w) sum += sums[w * kBr + own_row(i)];
                rows[own_row(i)] = {softmax_.row_shift[i], sum};
            }
    }

    // Writes 16 rows of O, from the tile's row `begin` on.
    template <class Exchange>
    __device__ __forceinline__ void put(char* to, int32 begin) const {
        float* rows = reinterpret_cast<float*>(to);
#pragma unroll
        for (int n = 0; n < kBr / 8; ++n) {
            if (n / 2 * 16 != begin) continue;
#pragma unroll
            for (int m = 0; m < kGroupPanels; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int32 row = n % 2 * 8 + lane() % 4 * 2 + e % 2;
                    const int32 column =
                        (group() * kGroupPanels + m) * kPanelColumns + warp() * 16 + lane() / 4 + e / 2 * 8;
                    rows[Exchange::offset(row, column)] = output_[m].value[n][e];
                }
        }
    }

  private:
    // P with the current row shifts, or with new ones, as stmatrix takes it.
    struct Probabilities {
        float value[Scores::kRows][2];

        __device__ __forceinline__ void set(int i, int, float even, float odd) {
            value[i][0] = even;
            value[i][1] = odd;
        }
        // Leaves it in shared memory, where wgmma reads it behind a barrier.
        __device__ __forceinline__ void store(uint32 to) const {
            const int32 row = group() * kGroupRows + lane() % 8, chunk = 2 * warp() + lane() / 8 % 2;
#pragma unroll
            for (int n = 0; n < kGroupRows / 8; ++n)
                stmatrix_x2_transposed(to + PTile::offset(row + 8 * n, chunk),
                                       common::pack<Element>(value[2 * n][0], value[2 * n + 1][0]),
                                       common::pack<Element>(value[2 * n][1], value[2 * n + 1][1]));
            sm90::async_proxy_fence();
        }
    };

    __device__ __forceinline__ static int32 group() { return threadIdx.x / kGroupThreads; }
    __device__ __forceinline__ static int32 warp() { return threadIdx.x / 32 % 4; }
    __device__ __forceinline__ static int32 lane() { return threadIdx.x % 32; }
    // The tile's row that is the i-th one of this lane's scores.
    __device__ __forceinline__ static int32 own_row(int i) { return group() * kGroupRows + Scores::row(i, lane()); }
    __device__ __forceinline__ static void group_sync() { common::barrier_sync(kOfGroup + group(), kGroupThreads); }

    // The group, in a register of the warp, in which wgmma needs addresses.
    const int32 group_ = __shfl_sync(common::kFullWarp, threadIdx.x / kGroupThreads, 0);

    // Issues S^T = K Q^T: of the group's rows, or of all rows on half of each panel's columns.
    __device__ __forceinline__ void multiply_scores(Products& products, uint32 keys, uint32 queries) const {
        constexpr int kSteps = kAddsHalves ? 2 : 4;  // of a panel
        const uint32 first_column = kAddsHalves ? group_ * kPanelRowBytes / 2 : 0;
        const uint32 first_row = kAddsHalves ? 0 : group_ * kGroupRows * kPanelRowBytes;
        const uint64 left = sm90::matrix_descriptor(keys + first_column, 0);
        const uint64 right = sm90::matrix_descriptor(queries + first_row + first_column, 0);
        sm90::wgmma_fence();
        wgmma_first_scores(products, left, right);
#pragma unroll
        for (int i = 1; i < kD / kPanelColumns * kSteps; ++i) {
            const int s = i / kSteps * 4 + i % kSteps;
            wgmma_scores(products, left + along_columns<KTile::kPanelBytes>(s),
                         right + along_columns<QTile::kPanelBytes>(s));
        }
        sm90::wgmma_commit();
    }
    // The scores of the group's rows. All threads that multiply call this.
    __device__ __forceinline__ static Scores own_scores(const Products& products, uint32 halves) {
        Scores scores;
        if constexpr (kAddsHalves) {
            constexpr int kOwn = kGroupRows / 8;
            const auto half_of = [=](int32 group, int n) {
                return halves + ((group * kOwn + n) * kGroupThreads + threadIdx.x % kGroupThreads) * 16;
            };
            const bool is_first = group() == 0;
#pragma unroll
            for (int n = 0; n < kOwn; ++n) {
                float other[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    other[e] = is_first ? products.value[kOwn + n][e] : products.value[n][e];
                    scores.transposed.value[n][e] = is_first ? products.value[n][e] : products.value[kOwn + n][e];
                }
                common::store_shared(half_of(is_first, n), other);
            }
            sync();
#pragma unroll
            for (int n = 0; n < kOwn; ++n) {
                float half[4];
                common::load_shared(half_of(!is_first, n), half);
#pragma unroll
                for (int e = 0; e < 4; ++e) scores.transposed.value[n][e] += half[e];
            }
        } else {
            scores.transposed = products;
        }
        return scores;
    }

    // Leaves P with the current row shifts, and returns true if all threads find that they can stay.
    __device__ __forceinline__ bool try_row_shift(const Params& params, const Scores& scores, uint32 to) {
        const float scale = decode::kScalesFirst<Spec> ? 1.0f : common::capped_scale<Spec>(params);
        Probabilities p;
        float share[Scores::kRows];
        const bool fits = softmax_.attempt(scores, scale, p, share);
        p.store(to);
        if (!sm80::barrier_all(kOfBoth, kThreads, fits)) return false;
        softmax_.keep(share);
        return true;
    }

    // Moves the row shifts to the maxima of scores in units of the base, and leaves P.
    __device__ __forceinline__ void move_row_shift(Scores& scores, uint32 to) {
        const auto maximum_at = [=](int w, int i) { return to + kMaxima + (w * kBr + own_row(i)) * 4; };
        float highest[Scores::kRows], rescale[Scores::kRows];
        softmax_.maximum_of(scores, highest);
        if (lane() < 4)
#pragma unroll
            for (int i = 0; i < Scores::kRows; ++i) common::store_shared(maximum_at(warp(), i), highest[i]);
        group_sync();
#pragma unroll
        for (int i = 0; i < Scores::kRows; ++i)
#pragma unroll
            for (int w = 0; w < 4; ++w)
                highest[i] = common::maximum(highest[i], common::load_shared<float>(maximum_at(w, i)));
        softmax_.move_row_shift(highest, scores, rescale);
        if (warp() == 0 && lane() < 4)
#pragma unroll
            for (int i = 0; i < Scores::kRows; ++i) common::store_shared(to + kFactors + own_row(i) * 4, rescale[i]);
        Probabilities p;
#pragma unroll
        for (int i = 0; i < Scores::kRows; ++i) p.set(i, 0, scores(i, 0), scores(i, 1));
        p.store(to);
        sync();
#pragma unroll
        for (int n = 0; n < kBr / 8; ++n) {
            float factor[2];
            common::load_shared(to + kFactors + (8 * n + lane() % 4 * 2) * 4, factor);
#pragma unroll
            for (int m = 0; m < kGroupPanels; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e) output_[m].value[n][e] *= factor[e % 2];
        }
    }

    __device__ __forceinline__ void multiply_output(uint32 keys, uint32 probabilities) {
        const uint64 left = sm90::matrix_descriptor(keys + group_ * kGroupPanels * KTile::kPanelBytes, 0);
        const uint64 right = sm90::matrix_descriptor(probabilities, 0);
        sm90::wgmma_fence();
#pragma unroll
        for (int m = 0; m < kGroupPanels; ++m)
#pragma unroll
            for (int s = 0; s < kKeys / 16; ++s)
                wgmma_output(output_[m], left + m * (KTile::kPanelBytes / 16) + along_rows(s),
                             right + along_columns<PTile::kPanelBytes>(s));
        sm90::wgmma_commit();
        sm90::wgmma_wait<0>();
#pragma unroll
        for (int m = 0; m < kGroupPanels; ++m) sm90::pin(output_[m]);
    }

    decode::RowSlopes<Spec, Scores::kRows> slopes_;
    Softmax softmax_;
    bool has_shifts_;  // without, trying them is in vain
    QuadFragment<kBr / 8> output_[kGroupPanels];
};

}  // namespace fa2::sm90_latent
