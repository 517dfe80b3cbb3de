"""Layouts of tensor maps: what TMA must know of an array in memory to copy boxes of it, but for its address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BOX_COLUMNS", "TensorLayout", "packed_layout", "tensor_layout"]

BOX_COLUMNS = 64  # of 16 bits: the 128 bytes that a swizzle spans
_FAR_ROW, _WRAP = 2**30, 2**34  # their product is 2**64; kernels/sm90/tma_rows.cuh has the first, too


@dataclass(frozen=True)
class TensorLayout:
    """An array of 16-bit elements as TMA sees it, but for its address: the innermost axis first.

    Attributes
    ----------
    dtype : str
    sizes : tuple of int
        Of column, row, head and batch; for packed sequences of column, row, head, end and wrap.
    strides : tuple of int
        Bytes from element to element of all these axes but the first.
    box_rows : int
        Rows of the boxes that are copied. They have 64 columns, and one element along the other axes.
    """

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box_rows: int


def tensor_layout(
    dtype: str, sizes: Sequence[int], strides: Sequence[int], head_dim: int, itemsize: int, box_rows: int
) -> TensorLayout:
    """The layout of an array that TMA takes, from sizes and element strides of batch, row and head."""
    # The stride of an axis of length 1 means nothing, but the driver wants a legal one.
    in_bytes = [16 if size <= 1 else stride * itemsize for size, stride in zip(sizes, strides, strict=True)]
    batch, row, head = sizes
    return TensorLayout(dtype, (head_dim, row, head, batch), (in_bytes[1], in_bytes[2], in_bytes[0]), box_rows)


def packed_layout(
    dtype: str, sizes: Sequence[int], strides: Sequence[int], head_dim: int, itemsize: int, box_rows: int
) -> TensorLayout:
    """The layout of packed sequences, of any lengths: kernels/sm90/tma_rows.cuh says how kernels address their rows.

    Row i of the sequence of n rows that ends before row `end` of the array is element (2**30 - n + i, end, 2**30) of the
    axes row, end and wrap, whose strides leave of the 2**30 a multiple of 2**64. What is past a sequence is then past the
    row axis, for all sequences with one map, which begins where the array does: a load of a box without an element of the
    tensor touches the map's address, which must be mapped.
    """
    plain = tensor_layout(dtype, sizes, strides, head_dim, itemsize, box_rows)
    row_stride, head_stride, _ = plain.strides
    _, rows, heads, _ = plain.sizes
    wrap_stride = _WRAP - row_stride % _WRAP
    sizes = (head_dim, _FAR_ROW, heads, rows + 1, _FAR_ROW + 1)
    return TensorLayout(dtype, sizes, (row_stride, head_stride, row_stride, wrap_stride), box_rows)
