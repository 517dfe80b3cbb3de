// Matrices with their tangents: copies to shared memory and products. A tangent that the call does not have is neither
// copied nor multiplied; its pointer is null.
#pragma once
#include "common/tangents.cuh"
#include "sm80/key_ring.cuh"
#include "sm80/multiply.cuh"

namespace fa2::sm80 {

// A head of a matrix, or null if there is no matrix: its strides are then 0.
template <class Element>
__device__ __forceinline__ Element* head_of(Element* matrix, const Strides& strides, int32 batch, int32 head) {
    return matrix + strides.offset(batch, 0, head);
}

// The tangents of a tile of K and of V: what a slot of a KeyRing has besides.
template <class Element, int kBc, int kThreads, int kHeadDim, int kHeadDimV>
struct KeyTangents {
    using KTile = SmemTile<kBc, padded_head_dim(kHeadDim)>;
    using VTile = SmemTile<kBc, padded_head_dim(kHeadDimV)>;
    static constexpr int kBytes = KTile::kBytes + VTile::kBytes;  // K', then V'

    const Element *k, *v;
    int64 k_stride, v_stride;

    __device__ void load(uint32 smem, int32 first_key, int32 seqlen_k, int32 thread) const {
        if (k != nullptr) load_tile_async<KTile, kThreads, kHeadDim>(smem, k, k_stride, first_key, seqlen_k, thread);
        if (v != nullptr)
            load_tile_async<VTile, kThreads, kHeadDimV>(smem + KTile::kBytes, v, v_stride, first_key, seqlen_k, thread);
    }
};

// acc += A B and moved += A' B for one warp, as `multiply`: each block of B is fetched once for both.
template <class Element, int kK16, int kM16, int kN8, class FetchA, class FetchMoved, class FetchB>
__device__ __forceinline__ void multiply_both(QuadFragment<kN8> (&acc)[kM16], QuadFragment<kN8> (&moved)[kM16],
                                              FetchA fetch_a, FetchMoved fetch_moved, FetchB fetch_b) {
#pragma unroll
    for (int k = 0; k < kK16; ++k) {
        OperandA a[kM16], of_moved[kM16];
#pragma unroll
        for (int m = 0; m < kM16; ++m) a[m] = fetch_a(m, k), of_moved[m] = fetch_moved(m, k);
#pragma unroll
        for (int n = 0; n < kN8 / 2; ++n) {
            const OperandA b = fetch_b(n, k);
#pragma unroll
            for (int m = 0; m < kM16; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    mma_m16n8k16<Element>(acc[m].value[2 * n + half], a[m], b.reg[2 * half], b.reg[2 * half + 1]);
                    mma_m16n8k16<Element>(moved[m].value[2 * n + half], of_moved[m], b.reg[2 * half],
                                          b.reg[2 * half + 1]);
                }
        }
    }
}

// products += X Y^T and tangents += X' Y^T + X Y'^T, of the rows of X from `own_row` on and all rows of Y. Tiles of
// tangents, at `x_moved` and `y_moved`, are read if there are any.
template <class Element, class XTile, class YTile, int kM16, int kN8>
__device__ __forceinline__ void multiply_moved(QuadFragment<kN8> (&products)[kM16], QuadFragment<kN8> (&tangents)[kM16],
                                               uint32 x, uint32 x_moved, bool moves_x, int32 own_row, uint32 y,
                                               uint32 y_moved, bool moves_y, int32 lane) {
    constexpr int kSteps = XTile::kCols / 16;
    const LaneAddress<XTile, MatrixOrder::kRowsFirst> x_rows(x, own_row, lane);
    const LaneAddress<YTile, MatrixOrder::kChunksFirst> y_rows(y, 0, lane);
    const auto of_x = [&](int m, int kk) { return ldmatrix_x4<false>(x_rows.at(m, kk)); };
    const auto of_y = [&](int n, int kk) { return ldmatrix_x4<false>(y_rows.at(n, kk)); };
    if (moves_x) {
        const LaneAddress<XTile, MatrixOrder::kRowsFirst> moved_rows(x_moved, own_row, lane);
        multiply_both<Element, kSteps>(
            products, tangents, of_x, [&](int m, int kk) { return ldmatrix_x4<false>(moved_rows.at(m, kk)); }, of_y);
    } else {
        multiply<Element, kSteps>(products, of_x, of_y);
    }
    if (moves_y) {
        const LaneAddress<YTile, MatrixOrder::kChunksFirst> moved_rows(y_moved, 0, lane);
        multiply<Element, kSteps>(tangents, of_x,
                                  [&](int n, int kk) { return ldmatrix_x4<false>(moved_rows.at(n, kk)); });
    }
}

// sums += weights Y, from column 16 * first_c16 of Y on.
template <class YTile, class Element, int kM16, int kN8, int kK8>
__device__ __forceinline__ void accumulate(QuadFragment<kN8> (&sums)[kM16],
                                           const PackedFragment<Element, kK8> (&weights)[kM16], uint32 y,
                                           int32 first_c16, int32 lane) {
    const LaneAddress<YTile, MatrixOrder::kRowsFirst> columns(y, 0, lane);
    multiply<Element, kK8 / 2>(
        sums, [&](int m, int kk) { return weights[m].k16(kk); },
        [&](int n, int kk) { return ldmatrix_x4<true>(columns.at(kk, first_c16 + n)); });
}
// The same for two sums at once.
template <class YTile, class Element, int kM16, int kN8, int kK8>
__device__ __forceinline__ void accumulate_both(QuadFragment<kN8> (&sums)[kM16], QuadFragment<kN8> (&moved)[kM16],
                                                const PackedFragment<Element, kK8> (&weights)[kM16],
                                                const PackedFragment<Element, kK8> (&tangents)[kM16], uint32 y,
                                                int32 first_c16, int32 lane) {
    const LaneAddress<YTile, MatrixOrder::kRowsFirst> columns(y, 0, lane);
    multiply_both<Element, kK8 / 2>(
        sums, moved, [&](int m, int kk) { return weights[m].k16(kk); },
        [&](int m, int kk) { return tangents[m].k16(kk); },
        [&](int n, int kk) { return ldmatrix_x4<true>(columns.at(kk, first_c16 + n)); });
}

// The lse of a query in base 2; +inf, which makes P zero, in rows past the end and in rows without a visible key.
template <class Record>
__device__ __forceinline__ float base2_lse(const Record& params, int64 first, int32 row) {
    const float natural = row < params.seqlen_q ? params.lse[first + row] : -common::infinity<float>();
    return natural == -common::infinity<float>() ? -natural : common::in_base2(natural);
}

// All statistics of a query, given this lse.
template <class Record>
__device__ __forceinline__ common::MovedRow<float> moved_row(const Record& params, int64 first, int32 row, float lse) {
    if (lse == common::infinity<float>()) return {lse, 0.0f, 0.0f, 0.0f};  // the others may be NaN
    return {lse, params.delta[first + row], params.lset[first + row], params.deltat[first + row]};
}

}  // namespace fa2::sm80
