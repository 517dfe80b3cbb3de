"""What the caller asked: sizes, dtype and options of a call, checked against each other."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from .arguments import array_backend, check_array, check_bool
from ..errors import UnsupportedProblemError
from .feature_checks import check_features, finite_number
from .features import NO_FEATURES, Features
from .keywords import check_keywords

__all__ = ["MAX_HEAD_DIM", "AttentionProblem"]

MAX_HEAD_DIM = 256
_MAX_LENGTH = 2**31 - 2**16  # tile arithmetic is in 32 bits
_ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

# The source axes of (batch, row, head, column) by layout and rank; None where the caller left the axis out.
_AXES = {
    ("bshd", 4): (0, 1, 2, 3),
    ("bshd", 3): (None, 0, 1, 2),
    ("bshd", 2): (None, 0, None, 1),
    ("bhsd", 4): (0, 2, 1, 3),
    ("bhsd", 3): (None, 1, 0, 2),
    ("bhsd", 2): (None, 0, None, 1),
}


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
        2, 3 or 4: which axes the caller's arrays have.
    head_dim_v : int or None
        Columns of v and o where they are not head_dim.
    features : Features
        Of packed sequences, batch is 1 and the lengths are those of all together.
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
    features: Features = NO_FEATURES

    @classmethod
    def from_arrays(
        cls, q, k, v, *, causal=False, softmax_scale=None, layout="bshd", **features: object
    ) -> AttentionProblem:
        """Checks q, k, v, the options and the features (see `FeatureOptions`) against each other."""
        check_keywords(cls.from_arrays, features)
        check_bool("causal", causal)
        array_backend({"q": q, "k": k, "v": v})
        batch, seqlen_q, num_heads, head_dim = cls._sizes("q", q, layout)
        for name, array in (("k", k), ("v", v)):
            if array.ndim != q.ndim:
                raise ValueError(f"{name}: expected {q.ndim} axes like q, got shape {array.shape}")
            if array.dtype != q.dtype:
                raise TypeError(f"{name}: expected dtype {q.dtype} to match q, got {array.dtype}")
        batch_k, seqlen_k, num_heads_kv, head_dim_k = cls._sizes("k", k, layout)
        if (batch_k, head_dim_k) != (batch, head_dim):
            wanted = cls._compose(layout, q.ndim, batch, "seqlen_k", "num_heads_kv", head_dim)
            wanted = f"({', '.join(map(str, wanted))})"
            raise ValueError(f"k: expected shape {wanted} to match q {q.shape}, got {k.shape}")
        head_dim_v = cls._sizes("v", v, layout)[3]
        if v.shape[:-1] != k.shape[:-1]:
            raise ValueError(f"v: expected shape {(*k.shape[:-1], head_dim_v)} to match k, got {v.shape}")
        if num_heads and not num_heads_kv:
            raise ValueError(f"k: expected at least one head for the {num_heads} of q, got shape {k.shape}")
        if num_heads_kv and num_heads % num_heads_kv:
            raise ValueError(
                f"k: the number of heads of q ({num_heads}) must be a multiple of that of k and v, got {num_heads_kv}"
            )
        for name, length in (("q", seqlen_q), ("k", seqlen_k)):
            if length > _MAX_LENGTH:
                raise UnsupportedProblemError(f"{name}: sequences of up to {_MAX_LENGTH} rows are supported, got {length}")
        scale = cls._scale(softmax_scale, head_dim)
        sizes = (batch, seqlen_q, seqlen_k, num_heads, num_heads_kv, head_dim)
        own_v = None if head_dim_v == head_dim else head_dim_v
        problem = cls(q.dtype.name, *sizes, bool(causal), scale, layout, q.ndim, own_v)
        return problem.with_features(check_features(problem, q, features)) if features else problem

    @classmethod
    def from_outputs(cls, o, dout, *, layout="bshd") -> AttentionProblem:
        """The query side of a problem alone, which is all that delta needs."""
        array_backend({"o": o, "do": dout})
        batch, seqlen_q, num_heads, head_dim = cls._sizes("o", o, layout)
        problem = cls(o.dtype.name, batch, seqlen_q, 0, num_heads, num_heads, head_dim, False, 1.0, layout, o.ndim)
        check_array("do", dout, problem.q_shape, o.dtype, "o")
        return problem

    @staticmethod
    def _sizes(name: str, array, layout: str) -> tuple[int, int, int, int]:
        if layout not in ("bshd", "bhsd"):
            raise ValueError(f"layout: expected 'bshd' or 'bhsd', got {layout!r}")
        if array.ndim not in (2, 3, 4):
            wanted = "(batch, seqlen, heads, head_dim)" if layout == "bshd" else "(batch, heads, seqlen, head_dim)"
            raise ValueError(f"{name}: expected 2, 3 or 4 axes such as {wanted}, got shape {array.shape}")
        if array.dtype.name not in _ITEMSIZE:
            raise TypeError(f"{name}: expected dtype {', '.join(_ITEMSIZE)}, got {array.dtype}")
        sizes = tuple(1 if axis is None else array.shape[axis] for axis in _AXES[layout, array.ndim])
        if sizes[3] == 0:
            raise ValueError(f"{name}: head_dim must be at least 1, got shape {array.shape}")
        if sizes[3] > MAX_HEAD_DIM:
            raise UnsupportedProblemError(f"{name}: head_dim up to {MAX_HEAD_DIM} is supported, got shape {array.shape}")
        return sizes

    @staticmethod
    def _scale(softmax_scale, head_dim: int) -> float:
        if softmax_scale is None:
            return head_dim**-0.5
        return finite_number("softmax_scale", softmax_scale)

    @staticmethod
    def _compose(layout: str, rank: int, batch, seqlen, heads, head_dim) -> tuple:
        if rank == 2:
            return (seqlen, head_dim)
        inner = (seqlen, heads, head_dim) if layout == "bshd" else (heads, seqlen, head_dim)
        return inner if rank == 3 else (batch, *inner)

    @property
    def heads_per_group(self) -> int:
        """Query heads that share a K/V head."""
        return self.num_heads // self.num_heads_kv if self.num_heads_kv else 1

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _ITEMSIZE[self.dtype]

    @property
    def accumulator_dtype(self) -> str:
        """Dtype of lse and delta."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def q_shape(self) -> tuple[int, ...]:
        """Shape of q and its gradient, as the caller sees it."""
        return self._compose(self.layout, self.rank, self.batch, self.seqlen_q, self.num_heads, self.head_dim)

    @property
    def k_shape(self) -> tuple[int, ...]:
        """Shape of k and its gradient, as the caller sees it."""
        return self._compose(self.layout, self.rank, self.batch, self.seqlen_k, self.num_heads_kv, self.head_dim)

    @property
    def o_shape(self) -> tuple[int, ...]:
        """Shape of o and its gradient, as the caller sees it."""
        return (*self.q_shape[:-1], self.head_dim_v or self.head_dim)

    @property
    def v_shape(self) -> tuple[int, ...]:
        """Shape of v and its gradient, as the caller sees it."""
        return (*self.k_shape[:-1], self.head_dim_v or self.head_dim)

    @property
    def is_packed(self) -> bool:
        """Whether sequences lie one behind the other along the rows."""
        return self.features.num_sequences is not None

    @property
    def typical_seqlen_q(self) -> int:
        """Queries of a sequence; of packed ones about what most queries have beside them, from what the host knows."""
        if not self.is_packed:
            return self.seqlen_q
        mean = self.seqlen_q // max(1, self.features.num_sequences)
        return min(2 * mean, self.features.max_seqlen_q)

    @property
    def score_shape(self) -> tuple[int, int, int, int]:
        """(batch, num_heads, seqlen_q, seqlen_k), for packed sequences their number and the longest lengths."""
        features = self.features
        if not self.is_packed:
            return self.batch, self.num_heads, self.seqlen_q, self.seqlen_k
        return features.num_sequences, self.num_heads, features.max_seqlen_q, features.max_seqlen_k

    @property
    def band(self) -> tuple[int | None, int | None]:
        """How far left and right of the diagonal a key may be, of window and causal together; None is no limit."""
        left, right = self.features.window
        return left, 0 if self.causal else right

    @property
    def feature_values(self) -> dict[str, int | float]:
        """What features add to the numbers of a kernel's record."""
        return self.features.record(self.seqlen_q, self.seqlen_k, self.band, self.softmax_scale)

    @property
    def needs(self) -> tuple[str, ...]:
        """What kernels must have besides plain attention: names that `Family.features` lists."""
        return (*self.features.needs, *(("head_dim_v",) if self.head_dim_v else ()))

    def with_features(self, features: Features) -> AttentionProblem:
        """The same problem with other features."""
        return dataclasses.replace(self, features=features)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of lse and delta: (batch, num_heads, seqlen_q), without the axes that the caller left out."""
        return (self.batch, self.num_heads, self.seqlen_q)[4 - self.rank :]

    def canonical_view(self, array):
        """The array as (batch, row, head, column), a view."""
        batch, row, head, column = _AXES[self.layout, self.rank]
        present = tuple(axis for axis in (batch, row, head, column) if axis is not None)
        view = array.transpose(present)
        if head is None:
            view = view[:, None, :]
        return view if batch is not None else view[None]

    def kernel_strides(self, shape: tuple[int, ...], strides: tuple[int, ...] | None = None) -> tuple[int, int, int]:
        """Element strides of (batch, row, head), from strides in bytes or for C order.

        Axes of length 1, whose stride means nothing, get 0.
        """
        if strides is None:
            strides = tuple(self.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        axes = _AXES[self.layout, self.rank][:3]
        return tuple(0 if axis is None or shape[axis] == 1 else strides[axis] // self.itemsize for axis in axes)

    def check_backward_inputs(self, o, lse, do, delta, dlse=None) -> None:
        """What the forward left and what arrives from above fit q and v."""
        like = "q and v" if self.head_dim_v else "q"
        check_array("o", o, self.o_shape, self.dtype, like)
        check_array("lse", lse, self.lse_shape, self.accumulator_dtype, "q")
        check_array("do", do, self.o_shape, self.dtype, like)
        for name, array in (("delta", delta), ("dlse", dlse)):
            if array is not None:
                check_array(name, array, self.lse_shape, self.accumulator_dtype, "q")
