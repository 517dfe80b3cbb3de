// The fragment contract: how a warp's tile of scores is distributed over its lanes. Masks and softmax are written
// against this interface once, and serve the tensor-core families (mma.sync and wgmma accumulators share the quad
// layout) as well as simt. A lane holds a grid of kRows x kCols elements:
//
//   (i, j)             element of this lane, i < kRows, j < kCols
//   row(i, lane)       its row within the warp's tile
//   col(j, lane)       its column within the warp's tile
//   kLanesPerRow       number of lanes that share a row
//   kLaneStep          the distance from one of these lanes to the next; both numbers are powers of two
#pragma once
#include "common/types.cuh"

namespace fa2::common {

// The left operand of one m16n8k16 instruction.
struct OperandA {
    uint32 reg[4];
};

// The quad layout: accumulators of kN8 adjacent m16n8 tensor-core tiles. A lane holds columns 2t and 2t + 1 of each tile
// (t = lane % 4) in rows g and g + 8 (g = lane / 4). Code for QuadFragment<kN8> is that of float; double takes the code
// of any fragment.
template <int kN8, class Real = float>
struct QuadFragment {
    static constexpr int kRows = 2;
    static constexpr int kCols = 2 * kN8;
    static constexpr int kLanesPerRow = 4, kLaneStep = 1;

    Real value[kN8][4];

    __device__ static int32 row(int i, int32 lane) { return lane / 4 + 8 * i; }
    __device__ static int32 col(int j, int32 lane) { return j / 2 * 8 + lane % 4 * 2 + j % 2; }
    __device__ Real& operator()(int i, int j) { return value[j / 2][2 * i + j % 2]; }
    __device__ Real operator()(int i, int j) const { return value[j / 2][2 * i + j % 2]; }

    __device__ void fill(Real x) {
#pragma unroll
        for (int n = 0; n < kN8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) value[n][e] = x;
    }
};

// A QuadFragment rounded to 16 bits. Accumulators and left operands share the quad layout, so k16(s) is the left
// operand of the s-th k-step without any exchange between lanes.
template <class Element, int kN8>
struct PackedFragment {
    uint32 word[kN8][2];

    __device__ void set(int i, int n8, float even, float odd) { word[n8][i] = pack<Element>(even, odd); }
    __device__ void set_positive(int i, int n8, float even, float odd) {
        word[n8][i] = pack_positive<Element>(even, odd);
    }
    __device__ void set(const QuadFragment<kN8>& x) {
#pragma unroll
        for (int n = 0; n < kN8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) set(i, n, x.value[n][2 * i], x.value[n][2 * i + 1]);
    }
    __device__ OperandA k16(int s) const {
        return {{word[2 * s][0], word[2 * s][1], word[2 * s + 1][0], word[2 * s + 1][1]}};
    }
};

// x *= y, element by element, in the 16 columns of k-step s.
template <class Element, int kN8>
__device__ __forceinline__ void multiply_k16(QuadFragment<kN8>& x, int s, const OperandA& y) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        float (&tile)[4] = x.value[2 * s + r / 2];
        tile[r % 2 * 2] *= unpack_lo<Element>(y.reg[r]);
        tile[r % 2 * 2 + 1] *= unpack_hi<Element>(y.reg[r]);
    }
}

}  // namespace fa2::common
