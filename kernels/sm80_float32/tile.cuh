// Tiles of parts in shared memory, [part][panel][row][64]: how cp.async copies them from global memory, where they lie in
// the same order (float32_parts/parts.cuh), and how ldmatrix reads them.
#pragma once
#include "float32_parts/parts.cuh"
#include "sm80/smem_tile.cuh"

namespace fa2::sm80_float32 {

using namespace fa2::float32_parts;
using namespace fa2::sm80;

template <int kRows_, int kHeadDim, bool kShared = false>
struct PartsTile {
    using Layout = PartsLayout<kHeadDim, kShared>;
    using Panel = SmemTile<kRows_, kPanelColumns>;
    static constexpr int kRows = kRows_, kPanels = Layout::kPanels;
    static constexpr int kBytes = kPanels * Panel::kBytes;
    // The swizzle of SmemTile is then that of panels.
    static_assert(Panel::kRowBytes == kPanelRowBytes && Panel::kSwizzleMask == 7 && Panel::kSwizzleShift == 0);
};

// This lane's ldmatrix addresses in a tile of parts.
template <class Tile, MatrixOrder kOrder>
class PartsAddress {
  public:
    __device__ __forceinline__ PartsAddress(uint32 tile, int32 first_row, int32 lane) : panel_(tile, first_row, lane) {}
    // The 16 x 16 block of a part at row 16 * r16, column 16 * c16.
    __device__ __forceinline__ uint32 at(int part, int r16, int c16) const {
        constexpr int kBlocks = kPanelColumns / 16, kOfPart = Tile::Layout::kColumns / 16;  // of the columns
        if constexpr (kOfPart < kBlocks)
            return panel_.at(r16, part * kOfPart + c16);
        else
            return panel_.at(r16, c16 % kBlocks) + (part * (kOfPart / kBlocks) + c16 / kBlocks) * Tile::Panel::kBytes;
    }

  private:
    const LaneAddress<typename Tile::Panel, kOrder> panel_;
};

// The parts of a head, from the first row of a sequence on. Addresses are computed where they are needed, because those
// of all operands would take registers throughout the main loop.
template <class Layout>
struct HeadParts {
    const float16* parts;
    const float* units;
    int32 first_row, num_strips;  // see PartsLayout
    int32 first_strip;            // among the strips of all heads

    // Starts to copy the tile that begins with row `row`.
    template <class Tile, int kThreads>
    __device__ __forceinline__ void load_async(uint32 smem, int32 row) const {
        constexpr int kChunks = Tile::Panel::kBytes / 16;  // of a panel
        static_assert(kChunks % kThreads == 0 && Tile::kPanels == Layout::kPanels);
        const int32 thread = threadIdx.x;
        const float16* panel = Layout::address(parts, first_row + row) + thread * 8;
        const int64 panel_elements = static_cast<int64>(Layout::panel_rows(num_strips)) * kPanelColumns;
#pragma unroll
        for (int i = 0; i < Tile::kPanels; ++i) {
#pragma unroll
            for (int c = 0; c < kChunks; c += kThreads)
                cp_async_16(smem + i * Tile::Panel::kBytes + (c + thread) * 16, panel + c * 8, true);
            panel += panel_elements;
        }
    }
    // The unit of a row's strip.
    __device__ __forceinline__ float unit(int32 row) const { return units[first_strip + row / kUnitRows]; }
};

// The parts of a head of Q or K (kOfScores), or of dO or V, of the sequence or batch number `batch`.
template <class Spec, bool kOfKeys, bool kOfScores, bool kShared = false, class Record,
          class Layout = PartsLayout<kColumnsOf<Spec, kOfScores>, kShared>>
__device__ __forceinline__ HeadParts<Layout> head_parts(const Record& params, const float16* parts, const float* units,
                                                        int32 batch, int32 head) {
    const int32 num_heads = kOfKeys ? params.num_heads / params.heads_per_group : params.num_heads;
    const int32 num_strips = kOfKeys ? params.k_strips : params.q_strips;
    const int32 index = head_with_parts<Spec>(batch, num_heads, head);
    const int32 first = first_part_row<Spec, kOfKeys>(params, batch);
    return {parts, units, Layout::row_of(index, num_strips, first), num_strips, index * num_strips + first / kUnitRows};
}

}  // namespace fa2::sm80_float32
