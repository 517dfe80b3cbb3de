// Copies tiles of parts to shared memory, by bulk copies, which leave panels as they are.
#pragma once
#include "float32_parts/parts.cuh"
#include "sm90/layout.cuh"

namespace fa2::sm90_float32 {

using namespace fa2::float32_parts;
using namespace fa2::sm90;

// Copies the parts of a tile of kRows rows to shared memory, one panel after the other.
template <int kRows, int kHeadDim>
__device__ __forceinline__ void load_rows(const float16* parts, int32 row, int32 num_strips, uint32 smem, uint32 full) {
    using Layout = PartsLayout<kHeadDim>;
    constexpr int kBytes = kRows * kPanelRowBytes, kPanels = kParts * Layout::kPanels;
    mbarrier_arrive_expect(full, kPanels * kBytes);
#pragma unroll
    for (int i = 0; i < kPanels; ++i) {
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

// Copies pieces to a ring.
template <int kHeadDim, int kSlots>
class PieceWriter {
    using Layout = PartsLayout<kHeadDim>;

  public:
    __device__ explicit PieceWriter(const PieceRing<kSlots>& ring) : ring_(ring) {}

    // `row`: the tile's first row in the first panel of its head's high parts.
    __device__ __forceinline__ void load(const float16* parts, int32 row, int32 num_strips, int32 panel) {
        const uint32 slot = position_.slot(), full = ring_.full(slot);
        mbarrier_wait(ring_.empty(slot), position_.parity() ^ 1);
        mbarrier_arrive_expect(full, kPieceBytes);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            const int32 from = row + (part * Layout::kPanels + panel) * Layout::panel_rows(num_strips);
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
