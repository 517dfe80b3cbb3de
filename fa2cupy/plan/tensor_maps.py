"""Layouts of tensor maps: all that TMA must know about an array to copy boxes of it, except for the address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..problem.boxes import Lengths, sequence_axis

__all__ = ["BOX_COLUMNS", "TensorLayout", "box_layout", "packed_layout", "tensor_layout"]

BOX_COLUMNS = 64  # 16-bit elements in the 128 bytes that the widest swizzle spans
_FAR_ROW, _WRAP = 2**30, 2**34  # their product is 2**64; _FAR_ROW is also in kernels/sm90/tma_rows.cuh


@dataclass(frozen=True)
class TensorLayout:
    """An array of 16-bit elements as TMA sees it, except for the address. The innermost axis comes first.

    Attributes
    ----------
    dtype : str
    sizes : tuple of int
        Lengths of the axes column, row, head and batch; for packed sequences, of column, row, head, end and wrap; for
        grids of tokens, of column, x, y, z and sequence.
    strides : tuple of int
        Strides of all these axes but the first, in bytes.
    box : tuple of int
        Elements of a box along the axes. A swizzle spans its columns.
    """

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


def tensor_layout(
    dtype: str, sizes: Sequence[int], strides: Sequence[int], head_dim: int, itemsize: int, box_rows: int
) -> TensorLayout:
    """The layout of an array, from lengths and element strides of the batch, row and head axes."""
    # The stride of an axis of length 1 has no meaning, but the driver rejects an illegal one.
    in_bytes = [16 if size <= 1 else stride * itemsize for size, stride in zip(sizes, strides, strict=True)]
    batch, row, head = sizes
    box = (BOX_COLUMNS, box_rows, 1, 1)
    return TensorLayout(dtype, (head_dim, row, head, batch), (in_bytes[1], in_bytes[2], in_bytes[0]), box)


def packed_layout(
    dtype: str, sizes: Sequence[int], strides: Sequence[int], head_dim: int, itemsize: int, box_rows: int
) -> TensorLayout:
    """The layout of packed sequences of any lengths; kernels/sm90/tma_rows.cuh computes the coordinates.

    Consider a sequence of n rows that ends before row `end` of the array. Its row i has the coordinates
    (2**30 - n + i, end, 2**30) along row, end and wrap. The strides are such that the terms in 2**30 add up to a
    multiple of 2**64, so that the address is that of row end - n + i. Rows after the end of a sequence are outside the
    row axis: TMA fills them with zeros in a load and skips them in a store, with one map for all sequences. The map
    starts at the first element of the array, because a load of a box that is wholly outside the tensor touches the
    map's address, which must be mapped.
    """
    plain = tensor_layout(dtype, sizes, strides, head_dim, itemsize, box_rows)
    row_stride, head_stride, _ = plain.strides
    _, rows, heads, _ = plain.sizes
    wrap_stride = _WRAP - row_stride % _WRAP
    lengths = (head_dim, _FAR_ROW, heads, rows + 1, _FAR_ROW + 1)
    return TensorLayout(dtype, lengths, (row_stride, head_stride, row_stride, wrap_stride), (*plain.box, 1))


def box_layout(
    dtype: str,
    sizes: Sequence[int],
    strides: Sequence[int],
    head_dim: int,
    itemsize: int,
    lengths: Lengths,
    box: Lengths,
) -> TensorLayout:
    """The layout of sequences that are grids of tokens, with boxes of them. The last axis is a `SequenceAxis`."""
    batch, _, heads = sizes
    x, y, _ = lengths
    row, axis = strides[1] * itemsize, sequence_axis(sizes, strides)
    sequences = axis.at(heads - 1, batch - 1) + 1
    in_bytes = (row, row * x, row * x * y, axis.stride * itemsize)
    return TensorLayout(dtype, (head_dim, *lengths, sequences), in_bytes, (BOX_COLUMNS, *box, 1))
