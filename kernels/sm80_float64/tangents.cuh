// Matrices with their tangents: copies to shared memory, operands and products. A tangent that the call does not have is
// neither copied nor multiplied.
#pragma once
#include "sm80_float64/sharers.cuh"

namespace fa2::sm80_float64 {

// An operand, and that of its tangent.
template <class Rows>
struct Moved {
    Rows own, tangent;
    bool moves;
};

// Rows of a matrix and of its tangent: in global memory, those of one head, and in shared memory a tile, behind which that
// of the tangent lies. Main loops make such objects where they use them: there are no registers to keep them in.
template <class Tile, int kThreads, int kColumns>
class MovedRows {
  public:
    static constexpr int kBytes = 2 * Tile::kBytes;

    __device__ __forceinline__ MovedRows(uint32 tile, const double* x, const Strides& strides, const double* tangent,
                                         const Strides& tangent_strides, int32 batch, int32 head)
        : tile_(tile),
          moves_(tangent != nullptr),
          x_(x + strides.offset(batch, 0, head)),
          tangent_(tangent + tangent_strides.offset(batch, 0, head)),
          stride_(strides.row),
          tangent_stride_(tangent_strides.row) {}

    __device__ __forceinline__ bool moves() const { return moves_; }
    // Starts the copies of tile number `tile`.
    __device__ __forceinline__ void copy(int32 tile, int32 num_rows) const {
        const int32 first_row = tile * Tile::kRows, thread = computed_anew(threadIdx.x);
        load_tile_async<Tile, kThreads, kColumns>(tile_, x_, stride_, first_row, num_rows, thread);
        if (moves_)
            load_tile_async<Tile, kThreads, kColumns>(tile_ + Tile::kBytes, tangent_, tangent_stride_, first_row,
                                                      num_rows, thread);
    }

    // What a warp loads of them, as by the functions of Sharers with these names.
    template <class RowWarps>
    __device__ __forceinline__ Moved<AlongRows<Tile>> along_rows(const RowWarps& sharers, int32 first_row) const {
        return {sharers.template along_rows<Tile>(tile_, first_row),
                sharers.template along_rows<Tile>(tile_ + Tile::kBytes, first_row), moves_};
    }
    template <class RowWarps>
    __device__ __forceinline__ Moved<AcrossRows<Tile>> across_rows(const RowWarps& sharers) const {
        return {sharers.template across_rows<Tile>(tile_), sharers.template across_rows<Tile>(tile_ + Tile::kBytes),
                moves_};
    }

    // Stores zeros to a warp's share of its rows, from `first_row` on, whose lse is +inf.
    template <class RowWarps>
    __device__ __forceinline__ void clear_hidden_rows(const RowWarps& sharers, int32 first_row,
                                                      const double (&lse)[2]) const {
        sharers.template clear_hidden_rows<Tile>(first_row, lse, tile_);
        if (moves_) sharers.template clear_hidden_rows<Tile>(first_row, lse, tile_ + Tile::kBytes);
    }

    // Stores zeros to every kStep-th chunk of a row.
    template <int kStep>
    __device__ __forceinline__ void clear_row(int32 row, int32 first) const {
        sm80::clear_row<Tile, kStep>(tile_, row, first);
        if (moves_) sm80::clear_row<Tile, kStep>(tile_ + Tile::kBytes, row, first);
    }

  private:
    const uint32 tile_;
    const bool moves_;
    const double *const x_, *const tangent_;
    const int64 stride_, tangent_stride_;
};

// This warp's X' Y^T + X Y'^T. The products with X' come first, or last if kTransposed: a call's kernels that own queries
// and those that own keys then have the same sums.
template <bool kTransposed, class RowWarps, class Left, class Right>
__device__ __forceinline__ typename RowWarps::Scores moved_products(const RowWarps& sharers,
                                                                    const Moved<AlongRows<Left>>& x,
                                                                    const Moved<AlongRows<Right>>& y) {
    return sharers.template sum_over<Left::kCols>([&](typename RowWarps::All& sums, int first, int end) {
        if (!kTransposed && x.moves) multiply_rows(sums, x.tangent, y.own, first, end);
        if (y.moves) multiply_rows(sums, x.own, y.tangent, first, end);
        if (kTransposed && x.moves) multiply_rows(sums, x.tangent, y.own, first, end);
    });
}

}  // namespace fa2::sm80_float64
