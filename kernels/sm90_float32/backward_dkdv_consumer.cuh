// The consumers of the kernels that own keys: a warp group owns 64 keys, a warp 16 of them. A step is a tile of queries:
//
//   S^T = K Q^T                     -> P^T = exp(S^T - lse), in parts
//   for each panel:  T = P^T dO     -> dV += unit T
//   dP^T = V dO^T                   -> release dO's stage; dS^T = P^T o (dP^T - delta), in parts
//   for each panel:  T = dS^T Q     -> dK += unit T
//                                   -> release Q's stage
//   with dQ, for each panel:  T = dS K, of the group's keys   -> dQ += unit T, in the workspace
//
// With one panel, dP^T is issued behind S^T, and is in flight while P^T is computed; dV is, while dS^T is. Where dK and dV
// have two panels, they leave few registers. P^T is then made again from its parts if nothing else needs it, and the
// panels of a gradient have one product's registers.
//
// dS^T of dK has a scale for each key. The sums of dQ run over keys, so that dS of dQ has one for all keys of the group,
// the largest of theirs: its parts are those of dS^T, times powers of two of at most 1.
#pragma once
#include "sm90_float32/backward_dkdv_group.cuh"

namespace fa2::sm90_float32 {

template <class Spec, class Shape>
class DkdvConsumer : DkdvGroup<Spec, Shape> {
    using Base = DkdvGroup<Spec, Shape>;
    using Base::kBc, Base::kBr, Base::kD, Base::kDv, Base::kPanels, Base::kPanelsV;
    using Base::key_operand_, Base::key_unit_, Base::lane_, Base::memory_, Base::params_, Base::value_operand_,
        Base::warp_, Base::where_;
    using Base::start_dp, Base::statistics_at, Base::take_gradients;
    using typename Base::Memory, typename Base::Parts, typename Base::Scores;
    using Products = ColumnProducts<kD / 16, kPanels, kBc, kBr, true, Scores>;
    using Derivatives = ColumnProducts<kDv / 16, kPanelsV, kBc, kBr, true, Scores>;
    using Panel = typename PanelFragment<kPanels>::Panel;
    using Workspace = DqWorkspace<kBr, kD>;
    static constexpr bool kWithDq = Shape::kWithDq;
    static constexpr int kGroupBarrier = 1;  // the named barrier of the first warp group
    // True if registers suffice for P beside dP and the product of dV, so that two products are in flight at a time.
    static constexpr bool kOverlaps = kPanels == 1 && kPanelsV == 1;
    static constexpr bool kUnitesParts = !kOverlaps && !common::kTakesWeights<Spec>;

  public:
    __device__ DkdvConsumer(const Params& params, const Memory& memory, const common::TileCoordinates& where,
                            int32 group)
        : Base(params, memory, where, group),
          group_(group),
          query_operand_(matrix_descriptor(memory.query(0), kBr * kPanelRowBytes)),
          dout_operand_(matrix_descriptor(memory.dout(0), kBr * kPanelRowBytes)) {}

    template <class Tiles>
    __device__ void run(const Tiles& tiles) {
        dk_.fill(0.0f);
        dv_.fill(0.0f);
        Base::for_each_tile(tiles, [&](int32 head, int32 tile, bool masked) { step(head, tile, masked); });
        Base::template store<Spec::kHeadDim>(dk_, params_.softmax_scale, params_.dk, params_.dk_strides);
        Base::template store<Spec::kHeadDimV>(dv_, common::kept_scale<Spec>(params_), params_.dv, params_.dv_strides);
    }

  private:
    __device__ __forceinline__ void step(int32 head, int32 tile, bool masked) {
        auto units = Base::units_of(head, tile);
        const uint32 lse = memory_.statistics(queries_.slot()), delta = lse + Shape::kStatisticBytes;
        const uint64 queries = query_operand_ + queries_.slot() * (Shape::kQueryBytes / 16);
        const uint64 douts = dout_operand_ + douts_.slot() * (Shape::kDoutBytes / 16);
        Products products;
        mbarrier_wait(memory_.full_query(queries_.slot()), queries_.parity());
        Scores dp;
        if constexpr (kOverlaps) {
            start_dp(dp, delta, units.dp);
            pin(dp);
        }
        products.issue(key_operand_, queries);
        if constexpr (kOverlaps) {
            mbarrier_wait(memory_.full_dout(douts_.slot()), douts_.parity());
            Derivatives::issue_from(dp, value_operand_, douts);
        }
        wgmma_wait<kOverlaps ? 1 : 0>();
        Scores& scores = products.sum();
        scale_products<!common::kTakesWeights<Spec>>(scores, units.score, params_);
        Scores p;
        take_probabilities<true, Spec>(scores, FloatProbabilities<kBr / 8>{p}, masked, params_,
                                       Base::score_tile(head, tile), statistics_at(lse));
        Parts parts;
        const float probability_scale[2] = {kProbabilityScale, kProbabilityScale};
        parts.set_scaled(p, probability_scale);

        float scale[2], inverse[2];
        const auto take_ds = [&] {
            take_gradients(scores, dp, delta, units.dp);
            row_scales(scores, scale, inverse);
            if constexpr (kWithDq) give_unit(max_of(inverse[0], inverse[1]));
        };
        const float dv_unit = units.dout[0] / kProbabilityScale;
        const RowFactors dv_units = {dv_unit, dv_unit};
        if constexpr (kOverlaps) {
            Panel product;
            multiply_strip<kPanelsV, kBr>(product, parts, douts, 0);
            wgmma_wait<1>();
            pin(dp);
            take_ds();
            wgmma_wait<0>();
            pin(product);
            release_dout();
            add_rows(dv_.panel[0], product, dv_units.of_row);
        } else {
            mbarrier_wait(memory_.full_dout(douts_.slot()), douts_.parity());
            add_product(dv_, parts, douts, dv_units);
            start_dp(dp, delta, units.dp);
            Derivatives::issue_from(dp, value_operand_, douts);
            if constexpr (kUnitesParts) parts.unite(scores, 1.0f / kProbabilityScale);
            wgmma_wait<0>();
            pin(dp);
            release_dout();
            take_ds();
        }
        parts.set_scaled(scores, scale);
        float ds_unit = 0.0f;
        if constexpr (kWithDq) ds_unit = store_ds(parts, inverse) * key_unit_;

        const RowFactors dk_units = {inverse[0] * units.query[0], inverse[1] * units.query[0]};
        if constexpr (kOverlaps && kWithDq) {
            Panel product;
            multiply_strip<kPanels, kBr>(product, parts, queries, 0);
            add_dq(params_, head, tile, ds_unit, [&] {
                wgmma_wait<1>();
                pin(product);
                release_query();
                add_rows(dk_.panel[0], product, dk_units.of_row);
            });
        } else {
            add_product(dk_, parts, queries, dk_units);
            release_query();
            if constexpr (kWithDq) add_dq(params_, head, tile, ds_unit, [] {});
        }
    }

    __device__ __forceinline__ void release_query() {
        __syncwarp();  // all lanes have read the statistics
        if (lane_ == 0) mbarrier_arrive(memory_.empty_query(queries_.slot()));
        queries_.advance();
    }
    __device__ __forceinline__ void release_dout() {
        if (lane_ == 0) mbarrier_arrive(memory_.empty_dout(douts_.slot()));
        douts_.advance();
    }

    struct RowFactors {
        float of_row[2];
    };
    // gradient += factor parts rows, panel by panel.
    template <int kNumPanels>
    __device__ __forceinline__ void add_product(PanelFragment<kNumPanels>& gradient, const Parts& parts, uint64 rows,
                                                const RowFactors& factor) const {
        Panel product;
#pragma unroll
        for (int panel = 0; panel < kNumPanels; ++panel) {
            multiply_panel<kNumPanels, kBr>(product, parts, rows + panel * (kBr * kPanelRowBytes / 16), panel,
                                            params_.num_heads < 0);
            wgmma_wait<0>();
            pin(product);
            add_rows(gradient.panel[panel], product, factor.of_row);
        }
    }

    // ------------------------------------------------------------------------------------------------------------- dQ

    // Gives the other warps of the group the largest unit of this warp's rows of dS^T.
    __device__ __forceinline__ void give_unit(float unit) const {
#pragma unroll
        for (int mask = Scores::kLanesPerRow; mask < 32; mask *= 2)
            unit = max_of(unit, __shfl_xor_sync(common::kFullWarp, unit, mask));
        if (lane_ == 0) store_shared(memory_.ds_unit(group_) + 4 * warp_, unit);
    }

    // Stores this warp's 16 keys of dS, transposed, with the unit of all keys of the group, which it returns. `unit`:
    // those of the rows of dS^T.
    __device__ __forceinline__ float store_ds(const Parts& parts, const float (&unit)[2]) const {
        // All warps of the group have given their units, and have completed the last product that reads dS.
        barrier_sync(kGroupBarrier + group_, kGroupThreads);
        float of_warp[4];
        load_shared(memory_.ds_unit(group_), of_warp);
        const float largest = max_of(max_of(of_warp[0], of_warp[1]), max_of(of_warp[2], of_warp[3]));
        const float inverse = __uint_as_float((254u << 23) - __float_as_uint(largest));  // of a power of two
        uint32 factor[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) factor[i] = common::pack<float16>(unit[i] * inverse, unit[i] * inverse);

        const uint32 row = lane_ % 8 + lane_ / 16 * 8, chunk = (warp_ * 2 + lane_ / 8 % 2) ^ (lane_ % 8);
        const uint32 address = memory_.ds(group_) + row * kPanelRowBytes + chunk * 16;
#pragma unroll
        for (int part = 0; part < kParts; ++part)
#pragma unroll
            for (int s = 0; s < kBr / 16; ++s) {
                OperandA words = parts.k16(part, s);
#pragma unroll
                for (int r = 0; r < 4; ++r) words.reg[r] = multiply_halves(words.reg[r], factor[r % 2]);
                stmatrix_x4_transposed(address + part * Shape::kDsPanelBytes + s * 16 * kPanelRowBytes, words);
            }
        __syncwarp();
        if (lane_ == 0) mbarrier_arrive(memory_.written_ds(group_));
        return largest;
    }

    // Adds unit dS K to the workspace of dQ. Params is a template parameter because only one record has one.
    // When the product has been issued, meanwhile() is called.
    template <class Record, class Meanwhile>
    __device__ __forceinline__ void add_dq(const Record& params, int32 head, int32 tile, float unit,
                                           const Meanwhile& meanwhile) {
        const int64 index = common::first_workspace_tile<Spec>(params, where_.batch, head) + tile;
        float* to = params.dq_accum + index * Workspace::kTileElements + Workspace::offset(warp_, 0, lane_);
        const uint64 ds = matrix_descriptor(memory_.ds(group_), 0);
        mbarrier_wait(memory_.full_ds(group_), ds_.parity());
        ds_.advance();
        Panel product[kPanels];
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) multiply_ds(product[panel], ds, key_rows() + panel * kKeyPanel);
        meanwhile();
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
            if (panel + 1 < kPanels)
                wgmma_wait<1>();
            else
                wgmma_wait<0>();
            pin(product[panel]);
            const float factor[2] = {unit, unit};
            multiply_rows(product[panel], factor);
#pragma unroll
            for (int n = 0; n < kPanelColumns / 8; ++n)
                if (panel * (kPanelColumns / 8) + n < kD / 8)
                    add_global(to + Workspace::offset(0, panel * (kPanelColumns / 8) + n, 0), product[panel].value[n]);
        }
    }

    // Issues x = dS K of one panel's columns.
    __device__ __forceinline__ static void multiply_ds(Panel& x, uint64 ds, uint64 keys) {
        wgmma_fence();
#pragma unroll
        for (int t = 0; t < kProducts; ++t)
#pragma unroll
            for (int s = 0; s < kGroupRows / 16; ++s) {
                const uint64 a = ds + part_of_product<true>(t) * (Shape::kDsPanelBytes / 16) +
                                 along_columns<Shape::kDsPanelBytes>(s);
                const uint64 b = keys + part_of_product<false>(t) * (kPanels * kKeyPanel) + along_rows(s);
                if (t == 0 && s == 0)
                    wgmma_first_dq(x, a, b);
                else
                    wgmma_dq(x, a, b);
            }
        wgmma_commit();
        pin(x);
    }
    static constexpr uint64 kKeyPanel = kBc * kPanelRowBytes / 16;
    // The MN-major descriptor of the group's keys.
    __device__ __forceinline__ uint64 key_rows() const { return key_operand_ | kKeyPanel << 16; }

    const int32 group_;
    const uint64 query_operand_, dout_operand_;
    PanelFragment<kPanels> dk_;
    PanelFragment<kPanelsV> dv_;
    RingPosition<Shape::kStages> queries_;
    RingPosition<Shape::kDoutStages> douts_;
    RingPosition<1> ds_;
};

}  // namespace fa2::sm90_float32
