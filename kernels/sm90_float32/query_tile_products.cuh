// For kernels whose blocks own query tiles: the products with K and V from shared memory, as whole tiles or in pieces.
// The result, `Output`, has the columns of V without dO, and those of K with it.
#pragma once
#include "sm90_float32/query_tile_consumer.cuh"

namespace fa2::sm90_float32 {

template <class Spec, class Shape, bool kInPieces = Shape::kInPieces>
class QueryTileProducts;

template <class Spec, class Shape>
class QueryTileProducts<Spec, Shape, false> : protected QueryTileConsumer<Spec, Shape> {
  protected:
    using Base = QueryTileConsumer<Spec, Shape>;
    using Base::kBc, Base::kBr, Base::kStrips, Base::kD, Base::kDv, Base::kPanels, Base::kPanelsV;
    using Base::lane_, Base::memory_, Base::query_operand_;
    using typename Base::Memory, typename Base::Scores;
    using Products = ColumnProducts<kD / 16, kPanels, kBr, kBc, false, Scores>;
    using Derivatives = ColumnProducts<kDv / 16, kPanelsV, kBr, kBc, false, Scores>;
    static constexpr bool kOfValues = Shape::kOperands == 1;
    using Output = QuadFragment<(kOfValues ? kDv : kD) / 8>;

    __device__ QueryTileProducts(const Params& params, const Memory& memory, int32 group)
        : Base(params, memory, group),
          key_operand_(matrix_descriptor(memory.key(0), kBc * kPanelRowBytes)),
          value_operand_(matrix_descriptor(memory.value(0), kBc * kPanelRowBytes)) {}

    // Issues S = Q K^T when K has arrived.
    __device__ __forceinline__ void issue_scores(Products& products) const {
        mbarrier_wait(memory_.full_key(keys_.slot()), keys_.parity());
        products.issue(query_operand_, key_stage());
    }
    // Issues dP += dO V^T, from about minus its half on, when V has arrived.
    __device__ __forceinline__ void issue_derivatives(Scores& dp, uint64 dout) const {
        mbarrier_wait(memory_.full_value(values_.slot()), values_.parity());
        Derivatives::issue_from(dp, dout, value_stage());
    }
    // S = Q K^T; releases K's stage.
    __device__ __forceinline__ void take_scores(Scores& scores) {
        Products products;
        issue_scores(products);
        wgmma_wait<0>();
        scores = products.sum();
        release_key();
    }
    // output += unit P V, and releases V's stage; or += unit dS K, and releases K's. unit(c, i) is that of the product of
    // strip c of the keys, in a lane's row i.
    template <class Operand, class Unit>
    __device__ __forceinline__ void add_values(Output& output, const Operand& p, const Unit& unit) {
        mbarrier_wait(memory_.full_value(values_.slot()), values_.parity());
        add_product(output, p, value_stage(), unit, [&] { release_value(); });
    }
    template <class Operand, class Unit>
    __device__ __forceinline__ void add_keys(Output& output, const Operand& ds, const Unit& unit) {
        add_product(output, ds, key_stage(), unit, [&] { release_key(); });
    }
    // Keys that only the other warp groups see.
    __device__ __forceinline__ void skip_keys() {
        mbarrier_wait(memory_.full_key(keys_.slot()), keys_.parity());
        release_key();
        mbarrier_wait(memory_.full_value(values_.slot()), values_.parity());
        release_value();
    }

    __device__ __forceinline__ uint64 key_stage() const {
        return key_operand_ + keys_.slot() * (Shape::kKeyBytes / 16);
    }
    __device__ __forceinline__ uint64 value_stage() const {
        return value_operand_ + values_.slot() * (Shape::kValueBytes / 16);
    }
    __device__ __forceinline__ void release_key() {
        if (lane_ == 0) mbarrier_arrive(memory_.empty_key(keys_.slot()));
        keys_.advance();
    }
    __device__ __forceinline__ void release_value() {
        if (lane_ == 0) mbarrier_arrive(memory_.empty_value(values_.slot()));
        values_.advance();
    }

    // Strip by strip. When all have been multiplied, release() is called.
    template <class Operand, class Unit, class Release>
    __device__ __forceinline__ static void add_product(Output& output, const Operand& p, uint64 rows, const Unit& unit,
                                                       const Release& release) {
#pragma unroll
        for (int c = 0; c < kStrips; ++c) {
            Output part;
            multiply_strip<kOfValues ? kPanelsV : kPanels, kBc>(part, p, rows, c);
            wgmma_wait<0>();
            pin(part);
            if (c == kStrips - 1) release();
            const float factor[2] = {unit(c, 0), unit(c, 1)};
            add_rows(output, part, factor);
        }
    }

    const uint64 key_operand_, value_operand_;
    RingPosition<Shape::kStages> keys_;
    RingPosition<Shape::kValueStages> values_;
};

// The rings of a warp group: those of K and of V, or one of the two that it has for itself if groups share rows.
template <class Reader, class Memory, int kSharers>
struct KeyRings {
    Reader own;

    __device__ KeyRings(const Memory& memory, int32 turn, int32 lane)
        : own(turn == 0 ? key_ring(memory) : value_ring(memory), lane) {}
    __device__ __forceinline__ Reader& keys() { return own; }
    __device__ __forceinline__ Reader& values() { return own; }
};
template <class Reader, class Memory>
struct KeyRings<Reader, Memory, 1> {
    Reader of_keys, of_values;

    __device__ KeyRings(const Memory& memory, int32, int32 lane)
        : of_keys(key_ring(memory), lane), of_values(value_ring(memory), lane) {}
    __device__ __forceinline__ Reader& keys() { return of_keys; }
    __device__ __forceinline__ Reader& values() { return of_values; }
};

template <class Spec, class Shape>
class QueryTileProducts<Spec, Shape, true> : protected QueryTileConsumer<Spec, Shape> {
  protected:
    using Base = QueryTileConsumer<Spec, Shape>;
    using Base::kBr;
    using Base::params_, Base::query_operand_;
    using typename Base::Memory, typename Base::Scores;
    using Output = PanelFragment<Shape::kOperands == 1 ? Base::kPanelsV : Base::kPanels>;

    __device__ QueryTileProducts(const Params& params, const Memory& memory, int32 group)
        : Base(params, memory, group), rings_(memory, Base::turn_, Base::lane_) {}

    // As above.
    __device__ __forceinline__ void take_scores(Scores& scores) {
        rings_.keys().template multiply_columns<Spec::kHeadDim, false, kBr>(scores, query_operand_,
                                                                            params_.num_heads < 0);
    }
    template <class Operand, class Unit>
    __device__ __forceinline__ void add_values(Output& output, const Operand& p, const Unit& unit) {
        const float factor[2] = {unit(0, 0), unit(0, 1)};
        rings_.values().add_product(output, p, factor, params_.num_heads < 0);
    }
    template <class Operand, class Unit>
    __device__ __forceinline__ void add_keys(Output& output, const Operand& ds, const Unit& unit) {
        const float factor[2] = {unit(0, 0), unit(0, 1)};
        rings_.keys().add_product(output, ds, factor, params_.num_heads < 0);
    }
    __device__ __forceinline__ void skip_keys() {
        rings_.keys().template skip<Spec::kHeadDim>();
        rings_.values().template skip<Spec::kHeadDimV>();
    }
    // dP += dO V^T, as in `PieceReader::add_columns`.
    template <class StartNext>
    __device__ __forceinline__ void add_derivatives(Scores& dp, uint64 dout, const StartNext& start_next) {
        rings_.values().template add_columns<Spec::kHeadDimV, false, kBr>(dp, dout, start_next);
    }

    KeyRings<PieceReader<Shape::kStages>, Memory, Shape::kSharers> rings_;
};

}  // namespace fa2::sm90_float32
