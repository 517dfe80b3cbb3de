"""The problem of a call: its sizes, dtype and options. ``checks.py`` derives it from the arrays."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from .array_types import Array
from .dtypes import ACCUMULATOR, ITEMSIZE
from .features import NO_SETTINGS, FeatureSettings, Sizes
from .strides import Strides, flat_stride

__all__ = [
    "LETTERS_OF_TANGENTS",
    "MAX_HEAD_DIM",
    "MAX_KEY_COLUMNS",
    "MAX_SEQLEN",
    "ROWS_OF",
    "SOURCE_AXES",
    "WITH_COLUMNS_OF_V",
    "AttentionProblem",
    "CacheShape",
    "array_shape",
    "canonical_view",
]

MAX_HEAD_DIM = 512
#: Columns of k in ``decode``, whose v is then the first columns of k.
MAX_KEY_COLUMNS = 576
MAX_SEQLEN = 2**31 - 2**16  # row indices have 32 bits, also those of a tile that crosses the end

_Size = TypeVar("_Size")

#: The source axes of (row, head, column), counted from the last one, by layout and by whether there are more than two;
#: None where the caller left the axis out. All axes in front of them are leading ones.
SOURCE_AXES: dict[tuple[str, bool], tuple[int, int | None, int]] = {
    ("bshd", True): (-3, -2, -1),
    ("bhsd", True): (-2, -3, -1),
    ("bshd", False): (-2, None, -1),
    ("bhsd", False): (-2, None, -1),
}

#: The meaning of a tensor's rows, by the kernels' name for it: queries, keys, or the queries' statistics.
ROWS_OF = {
    **dict.fromkeys(("q", "o", "dout", "dq", "qt", "ot", "dot", "dqt"), "queries"),
    **dict.fromkeys(("k", "v", "dk", "dv", "kt", "vt", "dkt", "dvt"), "keys"),
    **dict.fromkeys(("lse", "given_lse", "delta", "lset", "deltat"), "statistics"),
}
#: The letters by which settings say which tangents a call has, by the kernels' names of these.
LETTERS_OF_TANGENTS = {"qt": "q", "kt": "k", "vt": "v", "dot": "o"}
#: The tensors with as many columns as v, by the names of callers and of kernels; all others have those of q.
WITH_COLUMNS_OF_V = frozenset(
    ("v", "v_cache", "o", "o_parts", "do", "dout", "dv", "vt", "ot", "dot", "dvt", "gdv", "gv", "gdo")
)


def canonical_view(array: Array, layout: str) -> Array:
    """A view of a tensor with the axes (batch, row, head, column), or with all leading axes in batch's place."""
    row, head, column = SOURCE_AXES[layout, array.ndim > 2]
    if head is None:
        return array[None, :, None]
    view = array.transpose((*range(array.ndim - 3), row, head, column))
    return view if array.ndim > 3 else view[None]


def array_shape(layout: str, rank: int, batch: _Size, seqlen: _Size, heads: _Size, columns: _Size) -> tuple[_Size, ...]:
    """The shape of an array of these sizes, without the axes that the caller left out."""
    if rank == 2:
        return (seqlen, columns)
    inner = (seqlen, heads, columns) if layout == "bshd" else (heads, seqlen, columns)
    return inner if rank == 3 else (batch, *inner)


@dataclass(frozen=True)
class CacheShape:
    """How a cache is divided into pages. Without a block table, each sequence has one page.

    Attributes
    ----------
    num_pages : int
        Pages of the whole cache.
    page_size : int
        Rows of a page.
    pages_per_sequence : int
        Columns of the block table; 1 without one.
    num_new : int
        Rows that the call appends to each sequence.
    """

    num_pages: int
    page_size: int
    pages_per_sequence: int
    num_new: int

    @property
    def capacity(self) -> int:
        """The most rows of a sequence, the appended ones included."""
        return self.page_size * self.pages_per_sequence


@dataclass(frozen=True)
class AttentionProblem:
    """Sizes, dtype and options of one attention call.

    Attributes
    ----------
    dtype : str
    batch, seqlen_q, seqlen_k, num_heads, num_heads_kv, head_dim : int
    causal : bool
    softmax_scale : float
    layout : {"bshd", "bhsd"}
    rank : int
        Number of axes of the caller's arrays, at least 2.
    head_dim_v : int or None
        Columns of v and o; None if there are head_dim.
    settings : FeatureSettings
        Settings of the features. With packed sequences, batch is 1 and seqlen_q and seqlen_k are the total lengths.
    cache : CacheShape or None
        The division of a cache of keys and values, whose capacity is seqlen_k.
    leading : tuple of int
        Lengths of the axes in front of a sequence's, if there are several. Their product is batch: the number of a
        sequence is its index along all of them, flattened in C order.
    """

    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    causal: bool
    softmax_scale: float
    layout: str
    rank: int
    head_dim_v: int | None = None
    settings: FeatureSettings = NO_SETTINGS
    cache: CacheShape | None = None
    leading: tuple[int, ...] = ()

    @cached_property
    def heads_per_group(self) -> int:
        """Query heads that share a K/V head."""
        return self.num_heads // self.num_heads_kv if self.num_heads_kv else 1

    @cached_property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEMSIZE[self.dtype]

    @cached_property
    def accumulator_dtype(self) -> str:
        """Dtype of lse and delta."""
        return ACCUMULATOR[self.dtype]

    @property
    def statistics_bytes(self) -> int:
        """The size of an array with a number for each query row, such as lse."""
        return self.batch * self.num_heads * self.seqlen_q * ITEMSIZE[self.accumulator_dtype]

    @cached_property
    def q_shape(self) -> tuple[int, ...]:
        """Shape of q and its gradient, as the caller sees it."""
        return self._shape(self.seqlen_q, self.num_heads)

    @cached_property
    def k_shape(self) -> tuple[int, ...]:
        """Shape of k and its gradient, as the caller sees it."""
        return self._shape(self.seqlen_k, self.num_heads_kv)

    def _shape(self, seqlen: int, heads: int) -> tuple[int, ...]:
        inner = array_shape(self.layout, min(self.rank, 4), self.batch, seqlen, heads, self.head_dim)
        return (*self.leading, *inner[1:]) if self.leading else inner

    @cached_property
    def o_shape(self) -> tuple[int, ...]:
        """Shape of o and its gradient, as the caller sees it."""
        return (*self.q_shape[:-1], self.columns_of("o"))

    @cached_property
    def v_shape(self) -> tuple[int, ...]:
        """Shape of v and its gradient, as the caller sees it."""
        return (*self.k_shape[:-1], self.columns_of("v"))

    @cached_property
    def mean_head_dim(self) -> int:
        """The mean of the columns of q and v. A product of a query and a key takes twice as many multiplications."""
        return (self.head_dim + self.columns_of("v")) // 2

    @cached_property
    def num_elements(self) -> int:
        """Elements of q."""
        return math.prod(self.q_shape)

    def shape_of(self, tensor: str) -> tuple[int, ...]:
        """Shape of a tensor as the caller sees it, by the kernels' name for it."""
        shapes = {"q": self.q_shape, "k": self.k_shape, "v": self.v_shape, "o": self.o_shape}
        return shapes[{"dout": "o", "dot": "o"}.get(tensor, tensor.removeprefix("d").removesuffix("t"))]

    @cached_property
    def absent(self) -> tuple[str, ...]:
        """The tangents that the call does not have, by the kernels' names."""
        return tuple([name for name, letter in LETTERS_OF_TANGENTS.items() if letter not in self.settings.tangents])

    def columns_of(self, tensor: str) -> int:
        """Columns of a tensor, by its name in calls or kernels."""
        return (self.head_dim_v or self.head_dim) if tensor in WITH_COLUMNS_OF_V else self.head_dim

    def sizes_of(self, tensor: str) -> tuple[int, int, int]:
        """Sizes of the batch, row and head axes of a tensor, by the kernels' name for it."""
        if ROWS_OF[tensor] == "keys":
            return self.batch, self.seqlen_k, self.num_heads_kv
        return self.batch, self.seqlen_q, self.num_heads

    @cached_property
    def is_packed(self) -> bool:
        """True if sequences are packed one behind the other along the rows."""
        return self.settings.num_sequences is not None

    @cached_property
    def typical_seqlen_q(self) -> int:
        """Number of queries of a sequence; if packed, an estimate of that of the sequence that most queries belong to.

        The host knows the number, the total and the longest length of packed sequences, but not their offsets.
        """
        settings = self.settings
        if settings.num_sequences is None:
            return self.seqlen_q
        mean = self.seqlen_q // max(1, settings.num_sequences)
        return min(2 * mean, settings.max_seqlen_q)

    @cached_property
    def score_shape(self) -> tuple[int, int, int, int]:
        """(batch, num_heads, seqlen_q, seqlen_k), with the number and the longest lengths of packed sequences.

        Leading axes are one here: batch.
        """
        settings = self.settings
        if settings.num_sequences is None:
            return self.batch, self.num_heads, self.seqlen_q, self.seqlen_k
        return settings.num_sequences, self.num_heads, settings.max_seqlen_q, settings.max_seqlen_k

    @cached_property
    def broadcast_shape(self) -> tuple[int, ...]:
        """The shape that biases and masks are broadcast to: that of the scores, with all leading axes."""
        return (*self.leading, *self.score_shape[1:]) if self.leading else self.score_shape

    @cached_property
    def band(self) -> tuple[int | None, int | None]:
        """Number of visible keys left and right of the diagonal, by window and causal together; None is no limit."""
        left, right = self.settings.window
        return left, 0 if self.causal else right

    @cached_property
    def feature_values(self) -> dict[str, int | float]:
        """Numbers that features add to a kernel's record."""
        if not self.features:
            return {}
        return self.settings.record(Sizes(self.seqlen_q, self.seqlen_k, self.band, self.softmax_scale))

    @cached_property
    def features(self) -> tuple[str, ...]:
        """The features that its kernels must have: rows of `fa2cupy.problem.features.FEATURES`."""
        return self.settings.features

    def with_settings(self, settings: FeatureSettings) -> AttentionProblem:
        """The same problem with other features."""
        return dataclasses.replace(self, settings=settings)

    @cached_property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of lse and delta: (batch, num_heads, seqlen_q), with as many leading axes as the caller's arrays."""
        inner = self.num_heads, self.seqlen_q
        return (*self.leading, *inner) if self.leading else (self.batch, *inner)[4 - self.rank :]

    def canonical_view(self, array: Array) -> Array:
        """A view of the array with the axes (batch, row, head, column), or with all leading axes in batch's place."""
        return canonical_view(array, self.layout)

    def statistics_view(self, array: Array) -> Array:
        """A view of lse or delta with the axes (batch, head, row), or with all leading axes in batch's place."""
        return array[(None,) * (4 - self.rank)]

    def contiguous_strides(self) -> dict[str, Strides]:
        """Element strides of all tensors with rows of head_dim, if they are contiguous, by the kernels' names."""
        names = (name for name, rows in ROWS_OF.items() if rows != "statistics")
        return {name: self.kernel_strides(self.shape_of(name)) for name in names}

    def kernel_strides(self, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> Strides:
        """Element strides of (batch, row, head), from strides in bytes; by default those of C order.

        An axis of length 1 gets 0, because its stride is arbitrary. Leading axes must be flat (`has_flat_batch`).
        """

        def elements(axis: int | None) -> int:
            if axis is None or shape[axis] == 1:
                return 0
            return math.prod(shape[axis + 1 :]) if strides is None else strides[axis] // self.itemsize

        row, head, _ = SOURCE_AXES[self.layout, self.rank > 2]
        if not self.leading:
            return elements(0 if self.rank == 4 else None), elements(row), elements(head)
        batch = flat_stride(self.leading, [elements(axis) for axis in range(len(self.leading))])
        assert batch is not None, "tensors whose leading axes are not flat are copied"
        return batch, elements(row), elements(head)

    def has_flat_batch(self, array: Array) -> bool:
        """True if a tensor's sequences that follow each other along several leading axes are equally far apart.

        It may have an axis of parts in front of them.
        """
        return flat_stride(array.shape[-self.rank : -3], array.strides[-self.rank : -3]) is not None
