// The consumers of the tangent of the forward: a warp group computes 64 query rows, a warp 16 of them, from the scores
// to O and O' in memory.
//
// The software pipeline, from P and P o T of the present key tile to those of the next one:
//
//   issue   O += P V,  O' += (P o T) V + P V'       (present)
//   issue   S = Q K^T                               (next)
//   wait    O, O'           -> release V's stage; the registers of P and P o T are free for T
//   issue   T = Q' K^T + Q K'^T                     (next)
//   wait    S               -> P = 2^(S - row_shift)
//   wait    T               -> release K's stage; P o T
//
// The exponentials stay between the last two waits because their sum is stored in shared memory, where no thread reads it;
// the compiler would move them behind both. Where features act on scores, S and T are waited for together. The tensor
// cores idle for a group only while it computes P o T, when they work for the others, which started at other times.
//
// O and O' are in no product when the row shift may rise, and are rescaled together then. P stays below a small bound
// without a rise (`keeps_raw`), so that P o T fits a float16.
#pragma once
#include "common/mask.cuh"
#include "common/online_softmax.cuh"
#include "common/statistics.cuh"
#include "sm90/jvp_shape.cuh"
#include "sm90/query_tile_loop.cuh"
#include "sm90/store_box.cuh"

namespace fa2::sm90 {

template <class Spec, bool kGiven>
class JvpConsumer : public QueryTileLoop<JvpConsumer<Spec, kGiven>, Spec, JvpShape<Spec, kGiven>> {
    using Shape = JvpShape<Spec, kGiven>;
    using Base = QueryTileLoop<JvpConsumer, Spec, Shape>;
    using Base::add_keys, Base::first_row, Base::is_last, Base::mask, Base::output_box, Base::score_tile,
        Base::wait_for_box;
    using Base::group_, Base::lane_, Base::memory_, Base::params_, Base::part_, Base::warp_;
    using Base::kBc, Base::kD;
    using Base::keys_, Base::queries_, Base::release_key, Base::release_value, Base::values_;
    using typename Base::Element, typename Base::Operand, typename Base::Scores;
    using Moved = typename Shape::Moved;
    friend Base;
    static constexpr int kOwnDv = Shape::kOwnDv, kOwnPanels = Shape::kOwnPanels;
    // The terms of T that are products, whether there is a T, and whether there is a sum for O'.
    static constexpr bool kMultipliesT = Moved::kQuery || Moved::kKey;
    static constexpr bool kHasT = kMultipliesT || common::kMovesTerms<Spec>;
    static constexpr bool kHasMoved = kHasT || Moved::kValue;

    using Output = QuadFragment<kOwnDv / 8>;
    using Softmax = common::OnlineSoftmax<float, 2, 4, common::exp2_approx, false, 1, common::kNaturalInExponent<Spec>>;

  public:
    using Base::Base;

  private:
    // ------------------------------------------------------------------------------------------- what the loops call

    __device__ __forceinline__ void begin_tile(const TileInSlot& tile, const GroupKeys&) {
        if constexpr (kGiven) load_lse(tile);
    }
    __device__ __forceinline__ void clear_sums() {
        output_.fill(0.0f);
        moved_.fill(0.0f);
    }

    // ---------------------------------------------------------------------------------------------------------- steps

    // Computes P and P o T of the query tile's first key tile.
    __device__ __forceinline__ void first_step(const TileInSlot& tile, const GroupKeys& keys, int32 block,
                                               bool masked) {
        mbarrier_wait(memory_.full_query(queries_.slot()), queries_.parity());
        if constexpr (Shape::kClearsRows) clear_hidden_rows();
        softmax_.reset();
        lse_tangent_[0] = lse_tangent_[1] = 0.0f;
        issue_scores();
        finish_step<true>(tile, keys, block, masked);
    }

    // From the present key tile to the next one, `block`.
    template <bool kMasked>
    __device__ __forceinline__ void step(const TileInSlot& tile, const GroupKeys& keys, int32 block) {
        issue_sums();
        issue_scores();
        wait_for_sums<1>();
        finish_step<false>(tile, keys, block, kMasked);
    }

    // From scores in flight to P and P o T.
    template <bool kFirst>
    __device__ __forceinline__ void finish_step(const TileInSlot& tile, const GroupKeys& keys, int32 block,
                                                bool masked) {
        constexpr bool kWaitsOnce = !common::kMovesProducts<Spec> || !kMultipliesT;
        if constexpr (kMultipliesT) issue_tangents();
        wgmma_wait<kWaitsOnce ? 0 : 1>();
        pin(scores_);
        if constexpr (kWaitsOnce && kMultipliesT) pin(tangents_);
        if constexpr (!common::kMovesProducts<Spec>) {
            if constexpr (!kMultipliesT) tangents_.fill(0.0f);
            common::NoSlopes slopes;
            common::move_scores<false, Spec>(scores_, tangents_, slopes, record_of<Spec>(params_, tile),
                                             score_tile(tile, block));
        }
        if (masked) mask(scores_, tile, block);
        exponentials<kFirst>(masked);
        if constexpr (!kWaitsOnce) {
            pin_exponentials();
            wgmma_wait<0>();
            pin(tangents_);
        }
        release_key();
        if (is_last(keys, block)) release_query();
        if constexpr (kHasT) weigh(masked);
        p_.set(scores_);
        if constexpr (common::kDrops<Spec>) {
            if constexpr (kHasT)
                common::drop<Spec>(p_, params_, score_tile(tile, block), weighted_);
            else
                common::drop<Spec>(p_, params_, score_tile(tile, block));
        }
    }

    // Makes P o T of T, and adds its row sums to lse'.
    __device__ __forceinline__ void weigh(bool masked) {
        if (common::kMovesProducts<Spec> && masked)  // hidden keys may hold NaN
#pragma unroll
            for (int n = 0; n < kBc / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (scores_.value[n][e] == 0.0f) tangents_.value[n][e] = 0.0f;
        common::weigh_tangents<Spec>(tangents_, scores_, params_);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float even = 0.0f, odd = 0.0f;
#pragma unroll
            for (int j = 0; j < Scores::kCols; j += 2) {
                even += tangents_(i, j);
                odd += tangents_(i, j + 1);
            }
            lse_tangent_[i] += even + odd;
        }
        weighted_.set(tangents_);
    }

    // Replaces S by P. Where the row shift rises, sums are rescaled; there are none of the first key tile.
    template <bool kFirst>
    __device__ __forceinline__ void exponentials(bool masked) {
        if constexpr (kGiven) {
            common::take_exponentials<Spec>(scores_, params_, [&](int i, int) { return lse_[i]; });
        } else {
            const float scale = common::score_scale<Spec>(params_);
            if (!kFirst && !masked && __builtin_expect(softmax_.keeps_raw(scores_, scale), 1)) {
                softmax_.keep_raw(scores_, scale);
                return;
            }
            float rescale[2];
            softmax_.update_raw(scores_, scale, rescale);
            if constexpr (kFirst) return;
            multiply(output_, rescale);
            if constexpr (kHasMoved) multiply(moved_, rescale);
            if constexpr (kHasT)
#pragma unroll
                for (int i = 0; i < 2; ++i) lse_tangent_[i] *= rescale[i];
        }
    }

    // Stores a number that depends on all of P.
    __device__ __forceinline__ void pin_exponentials() const {
        float sum[2] = {softmax_.sum[0], softmax_.sum[1]};
        if constexpr (kGiven) {
            sum[0] = sum[1] = 0.0f;
#pragma unroll
            for (int n = 0; n < kBc / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) sum[e % 2] += scores_.value[n][e];
        }
        store_shared(memory_.tile_slot(kTileSlots) + 4 * threadIdx.x, sum[0] + sum[1]);
    }

    // ------------------------------------------------------------------------------------------------------- products

    __device__ __forceinline__ void issue_scores() {
        mbarrier_wait(memory_.full_key(keys_.slot()), keys_.parity());
        Base::template multiply_rows<kD>(scores_, memory_.query(queries_.slot()), memory_.key(keys_.slot()));
    }

    __device__ __forceinline__ void issue_tangents() {
        const uint32 query = memory_.query(queries_.slot()), key = memory_.key(keys_.slot());
        const uint64 q = Base::template own_rows<kD>(query), k = matrix_descriptor(key, 0);
        const uint64 q_tangent = Base::template own_rows<kD>(query + Shape::Base::kQueryBytes);
        const uint64 k_tangent = matrix_descriptor(key + Shape::Base::kKeyBytes, 0);
        wgmma_fence();
        if constexpr (Moved::kQuery) Base::template issue_rows<kD, false>(tangents_, q_tangent, k);
        if constexpr (Moved::kKey) Base::template issue_rows<kD, Moved::kQuery>(tangents_, q, k_tangent);
        wgmma_commit();
        pin(tangents_);
    }

    __device__ __forceinline__ void issue_sums() {
        mbarrier_wait(memory_.full_value(values_.slot()), values_.parity());
        const uint32 first = part_ * kOwnPanels * Shape::kKeyPanelBytes;
        const uint64 v = matrix_descriptor(memory_.value(values_.slot()) + first, Shape::kKeyPanelBytes);
        pin_output();
        wgmma_fence();
        if constexpr (!kGiven) add_keys(output_, p_, v);
        if constexpr (kHasT) add_keys(moved_, weighted_, v);
        if constexpr (Moved::kValue) add_keys(moved_, p_, v + Shape::Base::kValueBytes / 16);
        wgmma_commit();
        pin_output();
    }
    template <int kPending>
    __device__ __forceinline__ void wait_for_sums() {
        wgmma_wait<kPending>();
        pin_output();
        release_value();
    }
    __device__ __forceinline__ void pin_output() {
        if constexpr (!kGiven) pin(output_);
        if constexpr (kHasMoved) pin(moved_);
        if constexpr (!kGiven || Moved::kValue) pin(p_);
        if constexpr (kHasT) pin(weighted_);
    }

    __device__ __forceinline__ static void multiply(Output& x, const float (&factor)[2]) {
#pragma unroll
        for (int n = 0; n < kOwnDv / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) x.value[n][e] *= factor[e / 2];
    }

    // ----------------------------------------------------------------------------------------------- loads and stores

    // Where results are stored through the buffer of Q and Q', it is released after that instead.
    __device__ __forceinline__ void release_query() {
        if (Shape::kOwnOutput && lane_ == 0) mbarrier_arrive(memory_.empty_query(queries_.slot()));
    }

    // Loads lse in base 2: +inf, which makes P zero, in rows past the end and in rows without a visible key.
    __device__ __forceinline__ void load_lse(const TileInSlot& tile) {
        const auto& own = record_of<Spec>(params_, tile);
        const float* lse = own.lse + common::first_statistic<Spec>(params_, tile.batch(), tile.head());
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int32 at = first_row(tile) + Scores::row(i, lane_);
            const float natural = at < own.seqlen_q ? lse[at] : -common::infinity<float>();
            lse_[i] = natural == -common::infinity<float>() ? common::infinity<float>() : common::in_base2(natural);
        }
    }

    // Stores zeros to this warp's rows of Q that see no key: a bias hides no NaN. Their P is then 0, whatever T is.
    __device__ __forceinline__ void clear_hidden_rows() const {
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (part_ == 0 && lse_[i] == common::infinity<float>()) {
                const uint32 row = (group_ * kGroupRows + warp_ * 16 + Scores::row(i, lane_)) * kPanelRowBytes;
#pragma unroll 1
                for (uint32 chunk = lane_ % 4; chunk < 8 * Shape::kPanels; chunk += 4)
                    store_shared(
                        memory_.query(queries_.slot()) + chunk / 8 * Shape::kQueryPanelBytes + row + chunk % 8 * 16, 0,
                        0, 0, 0);
            }
        async_proxy_fence();
        barrier_sync(Base::kOutputBarrier + group_, Shape::kDividers * kGroupThreads);
    }

    // Stores the results of this warp's 16 rows. The warp does not read the tile's slot afterwards, and releases it.
    __device__ __forceinline__ void store(const TileInSlot& tile) {
        const int32 row = first_row(tile), head = tile.head();
        const auto& own = record_of<Spec>(params_, tile);
        const int64 first = common::first_statistic<Spec>(params_, tile.batch(), head);
        float inverse[2] = {1.0f, 1.0f}, lse[2];
        if constexpr (kGiven)
#pragma unroll
            for (int i = 0; i < 2; ++i) lse[i] = common::natural_of(lse_[i]);
        else
            common::finish_sums<Spec>(softmax_, params_, head, 0, inverse, lse);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            lse_tangent_[i] = common::row_sum<4>(lse_tangent_[i]) * inverse[i];
            lse_tangent_[i] += common::sink_tangent_of<Spec>(params_, head, lse[i]);
            inverse[i] *= common::kept_scale<Spec>(params_);
            const int32 at = row + Scores::row(i, lane_);
            if (lane_ % 4 != 0 || part_ != 0 || at >= own.seqlen_q) continue;
            if constexpr (!kGiven) own.lse[first + at] = lse[i];
            own.lset[first + at] = lse_tangent_[i];
        }
        multiply(moved_, inverse);
        if constexpr (kGiven)
            subtract_given(own, tile);
        else {
            multiply(output_, inverse);
#pragma unroll
            for (int n = 0; n < kOwnDv / 8; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) moved_.value[n][e] -= lse_tangent_[e / 2] * output_.value[n][e];
        }
        auto box = output_box(memory_.query(queries_.slot()));
        box.address += part_ * (Shape::kOutputPanels / Shape::kDividers) * box.panel_bytes;
        store_panels<0>(box, tile);
        if (lane_ == 0) {
            mbarrier_arrive(tile.empty);
            if constexpr (!Shape::kOwnOutput) {
                tma_store_wait_read();
                mbarrier_arrive(memory_.empty_query(queries_.slot()));
            }
        }
        queries_.advance();
    }

    // O' -= lse' O, where O is given.
    template <class Record>
    __device__ __forceinline__ void subtract_given(const Record& own, const TileInSlot& tile) {
        const Element* o = own.o + own.o_strides.offset(tile.batch(), first_row(tile), tile.head());
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (lse_[i] == common::infinity<float>()) continue;
            const Element* of_row = o + Output::row(i, lane_) * own.o_strides.row;
#pragma unroll
            for (int n = 0; n < kOwnDv / 8; ++n) {
                const int32 column = part_ * kOwnDv + Output::col(2 * n, lane_);
                if (Spec::kHeadDimV < Shape::kDv && column >= Spec::kHeadDimV) continue;
                const uint32 pair = *reinterpret_cast<const uint32*>(of_row + column);
                moved_(i, 2 * n) -= lse_tangent_[i] * common::unpack_lo<Element>(pair);
                moved_(i, 2 * n + 1) -= lse_tangent_[i] * common::unpack_hi<Element>(pair);
            }
        }
    }

    // Stores the group's panels of O and of O' behind them from kFirst on, as many at a time as the box has. (An unrolled
    // loop over them would compile to more instructions.)
    template <int kFirst>
    __device__ __forceinline__ void store_panels(const typename Base::Box& box, const TileInSlot& tile) {
        constexpr int kOfO = kGiven ? 0 : kOwnPanels, kAll = kOfO + kOwnPanels;
        constexpr int kPanelsAtOnce =
            Shape::kOwnOutput ? Shape::kOutputPanels / Shape::kDividers : Shape::kQueryBytes / Shape::kQueryPanelBytes;
        constexpr int kEnd = min_of(kFirst + kPanelsAtOnce, kAll), kMiddle = max_of(kFirst, kOfO);
        if constexpr (kFirst < kOfO)
            write_box<Element>(box.address, box.panel_bytes, output_, lane_, kFirst, min_of(kEnd, kOfO) - kFirst);
        if constexpr (kOfO < kEnd)
            write_box<Element>(box.address + (kMiddle - kFirst) * box.panel_bytes, box.panel_bytes, moved_, lane_,
                               kMiddle - kOfO, kEnd - kMiddle);
        async_proxy_fence();
        __syncwarp();
        if (lane_ == 0) {
            const auto rows = query_tma_rows<Spec>(params_, tile.batch());
#pragma unroll
            for (int panel = kFirst; panel < kEnd; ++panel)
                rows.store(result_map(params_, panel < kOfO), box.address + (panel - kFirst) * box.panel_bytes,
                           (part_ * kOwnPanels + (panel < kOfO ? panel : panel - kOfO)) * kPanelColumns,
                           first_row(tile), tile.head(), tile.batch());
            tma_store_commit();
        }
        if constexpr (kEnd < kAll) {
            wait_for_box();
            store_panels<kEnd>(box, tile);
        }
    }
    template <class Record>
    __device__ __forceinline__ static const TensorMap& result_map(const Record& params, bool of_o) {
        if constexpr (!kGiven)
            if (of_o) return params.o;
        return params.ot;
    }

    float lse_[2];          // of this lane's two rows, in base 2, where it is given
    float lse_tangent_[2];  // rowsum(P o T), of this lane's columns
    Scores scores_, tangents_;
    Operand p_, weighted_;
    Output output_, moved_;
    Softmax softmax_;
};

}  // namespace fa2::sm90
