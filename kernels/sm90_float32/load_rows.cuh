// How tiles of parts come to shared memory: by bulk copies, which leave panels as they are.
#pragma once
#include "float32_parts/parts.cuh"
#include "sm90/layout.cuh"

namespace fa2::sm90_float32 {

using namespace fa2::float32_parts;
using namespace fa2::sm90;

// Copies the parts of a tile of kRows rows to shared memory, one panel after the other.
template <int kRows, int kHeadDim>
__device__ __forceinline__ void load_rows(const float16* parts, int32 row, int32 num_blocks, uint32 smem, uint32 full) {
    using Layout = PartsLayout<kHeadDim>;
    constexpr int kBytes = kRows * kPanelRowBytes, kPanels = kParts * Layout::kPanels;
    mbarrier_arrive_expect(full, kPanels * kBytes);
#pragma unroll
    for (int i = 0; i < kPanels; ++i) {
        bulk_load(smem + i * kBytes, Layout::address(parts, row), kBytes, full);
        row += Layout::panel_rows(num_blocks);
    }
}

}  // namespace fa2::sm90_float32
