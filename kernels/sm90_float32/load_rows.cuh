// Copies tiles of parts to shared memory, by bulk copies, which leave panels as they are.
#pragma once
#include "float32_parts/parts.cuh"
#include "sm90/layout.cuh"

namespace fa2::sm90_float32 {

using namespace fa2::float32_parts;
using namespace fa2::sm90;

// True if shared memory has no room for whole tiles of the operands that a kernel loops over: they pass through it in
// pieces.
template <class Spec>
inline constexpr bool kNeedsPieces = max_of(Spec::kHeadDim, Spec::kHeadDimV) > 2 * kPanelColumns;

// Copies the parts of a tile of kRows rows to shared memory, one panel after the other.
template <int kRows, int kHeadDim, bool kShared = false>
__device__ __forceinline__ void load_rows(const float16* parts, int32 row, int32 num_strips, uint32 smem, uint32 full) {
    using Layout = PartsLayout<kHeadDim, kShared>;
    constexpr int kBytes = kRows * kPanelRowBytes;
    mbarrier_arrive_expect(full, Layout::kPanels * kBytes);
#pragma unroll
    for (int i = 0; i < Layout::kPanels; ++i) {
        bulk_load(smem + i * kBytes, Layout::address(parts, row), kBytes, full);
        row += Layout::panel_rows(num_strips);
    }
}

// A piece of a tile of kUnitRows rows: both parts of one panel.
inline constexpr int kPiecePartBytes = kUnitRows * kPanelRowBytes, kPieceBytes = kParts * kPiecePartBytes;

// A ring of pieces: the addresses of the first slot and of the barriers. Those of full slots come before those of empty
// ones.
template <int kSlots>
struct PieceRing {
    uint32 slots, barriers;

    __device__ __forceinline__ uint32 full(uint32 slot) const { return barriers + 8 * slot; }
    __device__ __forceinline__ uint32 empty(uint32 slot) const { return barriers + 8 * kSlots + 8 * slot; }
};

// The rows of a tile in parts that have `num_panels` panels each; `first` is in the first panel of the high parts.
struct PanelRows {
    int32 first, num_panels;
};

// Copies pieces to a ring.
template <int kSlots>
class PieceWriter {
    using Layout = PartsLayout<kPanelColumns>;  // of any columns

  public:
    __device__ explicit PieceWriter(const PieceRing<kSlots>& ring) : ring_(ring) {}

    __device__ __forceinline__ void load(const float16* parts, const PanelRows& rows, int32 num_strips, int32 panel) {
        const uint32 slot = position_.slot(), full = ring_.full(slot);
        mbarrier_wait(ring_.empty(slot), position_.parity() ^ 1);
        mbarrier_arrive_expect(full, kPieceBytes);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const int32 from = rows.first + (part * rows.num_panels + panel) * Layout::panel_rows(num_strips);
            bulk_load(ring_.slots + slot * kPieceBytes + part * kPiecePartBytes, Layout::address(parts, from),
                      kPiecePartBytes, full);
        }
        position_.advance();
    }

  private:
    const PieceRing<kSlots> ring_;
    RingPosition<kSlots> position_;
};

}  // namespace fa2::sm90_float32
