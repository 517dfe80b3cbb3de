// float32 matrices as pairs of float16 matrices, for tensor cores that multiply float16 numbers and add in float32.
//
//   x = unit (high + low)      high = fp16(x / unit)      low = fp16(x / unit - high)
//
// The unit is a power of two for every kUnitRows rows of a head, chosen so that the largest |x / unit| is in
// [2^13, 2^14). The pair has 22 bits where |x| is at least 2^-17 of the largest, and an absolute error of 2^-39 of the
// largest below. A product of two such matrices is three products of their parts, the smallest first:
//
//   X Y^T = unit unit' (low high'^T + high low'^T + high high'^T)
//
// In memory a head has its high parts, then its low parts, each in panels (common/panel.cuh): [part][panel][row][64].
// A tile is thus one copy of contiguous bytes for each part and panel, and needs no tensor map. Parts of few columns share
// a panel in a forward, which memory would bound otherwise: the low ones follow the high ones in each row. Rows and
// columns beyond the matrix are zeros.
//
// The rows of a head form strips of kUnitRows, each with one unit. Packed sequences start with a strip each: sequence n
// has the strips from first_row / kUnitRows + n on, as tiles do (common/sequence.cuh).
#pragma once
#include "common/panel.cuh"
#include "common/sequence.cuh"

namespace fa2::float32_parts {

using common::ceil_div;
using common::kPanelColumns;
using common::kPanelRowBytes;
using common::max_of;
using common::min_of;

inline constexpr int kUnitRows = 64;
inline constexpr int kParts = 2;  // high, low

// The part that is multiplied in step t: of the operand whose low part comes first, or of the other one.
template <bool kLowFirst>
__device__ __forceinline__ constexpr int part_of_product(int t) {
    return (kLowFirst ? t == 0 : t == 1) ? 1 : 0;
}
inline constexpr int kProducts = 3;

// True if both parts of all operands have room in one panel. Only forwards have them there: the others that own keys
// multiply whole panels.
template <class Spec>
inline constexpr bool kPartsMayShare = max_of(Spec::kHeadDim, Spec::kHeadDimV) <= kPanelColumns / kParts;

// Rows of panels are counted through all heads of an operand. They have 128 bytes each, so that 32 bits count those of
// all memory that a GPU has. kShared: the parts share a panel.
template <int kHeadDim, bool kShared = false>
struct PartsLayout {
    static constexpr int kColumns = kShared ? kPanelColumns / kParts : common::round_up(kHeadDim, kPanelColumns);
    static constexpr int kPanels = kParts * kColumns / kPanelColumns;  // of both parts
    static_assert(kHeadDim <= kColumns);

    // Rows from one panel of a head, which has `num_strips` strips, to the next; those of the parts follow each other.
    __device__ __forceinline__ static int32 panel_rows(int32 num_strips) { return num_strips * kUnitRows; }
    // A row in the first panel of a head's high parts.
    __device__ __forceinline__ static int32 row_of(int32 head, int32 num_strips, int32 row) {
        return head * kPanels * panel_rows(num_strips) + row;
    }
    template <class Element>
    __device__ __forceinline__ static Element* address(Element* parts, int32 row) {
        return parts + static_cast<int64>(row) * kPanelColumns;
    }
    // Offset in elements of a chunk of eight columns in its row. The columns of the low parts follow the high ones'.
    __device__ __forceinline__ static int32 chunk(int32 column, int32 row) {
        return (column % kPanelColumns / 8 ^ row % 8) * 8;
    }
};

// The columns of Q and K, or of V and dO.
template <class Spec, bool kOfScores>
inline constexpr int kColumnsOf = kOfScores ? Spec::kHeadDim : Spec::kHeadDimV;

// The first row, in the parts of a head, of a sequence or batch; its rows follow each other.
template <class Spec, bool kOfKeys, class Record>
__device__ __forceinline__ int32 first_part_row(const Record& params, int32 batch) {
    if constexpr (Spec::kVarlen)
        return common::packed_axis<kOfKeys>(params).template first_tile<kUnitRows>(batch) * kUnitRows;
    else
        return 0;
}
// The number of a head among all that have parts: packed sequences are one batch.
template <class Spec>
__device__ __forceinline__ int32 head_with_parts(int32 batch, int32 num_heads, int32 head) {
    return Spec::kVarlen ? head : batch * num_heads + head;
}

// The scaled pair of two adjacent elements; what remains of them is given back in x and y.
__device__ __forceinline__ uint32 take_part(float& x, float& y) {
    const uint32 part = common::pack<float16>(x, y);
    x -= common::unpack_lo<float16>(part);
    y -= common::unpack_hi<float16>(part);
    return part;
}

}  // namespace fa2::float32_parts
