// A panel is 64 columns of a matrix of 16-bit elements, whose rows are contiguous and have 128 bytes. The chunks
// of 16 bytes of row r are permuted by r % 8, so that eight rows of a chunk lie in different banks. TMA and wgmma call
// that the 128-byte swizzle; ldmatrix reads it without bank conflicts as well.
#pragma once

namespace fa2::common {

inline constexpr int kPanelColumns = 64;
inline constexpr int kPanelRowBytes = 128;

}  // namespace fa2::common
