"""Checks of single features: their keywords and their arrays. Messages name the argument."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard

from ..errors import UnsupportedProblemError
from .arguments import check_bool, check_int
from .array_types import Array
from .conversions import as_dtype, scalar_of
from .function_checks import floating_arguments

__all__ = [
    "OFFSETS",
    "Problem",
    "check_broadcast",
    "check_cap",
    "check_deterministic",
    "check_deterministic_tangents",
    "check_dropout",
    "check_key_padding",
    "check_packed",
    "check_sink",
    "check_slopes",
    "check_wide_bias",
    "check_window",
    "extra_gradients",
    "finite_number",
    "is_seed",
]

#: The offsets of packed sequences.
OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")


class Problem(Protocol):
    """The part of `fa2cupy.problem.attention.AttentionProblem`, which imports this module, that checks read."""

    @property
    def dtype(self) -> str:
        """Dtype of q, k and v."""

    @property
    def layout(self) -> str:
        """Order of the axes."""

    @property
    def rank(self) -> int:
        """Number of axes of the caller's arrays."""

    @property
    def seqlen_q(self) -> int:
        """Number of queries, of all packed sequences together."""

    @property
    def seqlen_k(self) -> int:
        """Number of keys, of all packed sequences together."""

    @property
    def accumulator_dtype(self) -> str:
        """Dtype of lse and delta."""

    @property
    def score_shape(self) -> tuple[int, int, int, int]:
        """Sequences, query heads, and queries and keys of the longest sequence."""

    @property
    def leading(self) -> tuple[int, ...]:
        """Lengths of the leading axes, if there are several."""

    @property
    def broadcast_shape(self) -> tuple[int, ...]:
        """The same with all leading axes."""

    @property
    def is_packed(self) -> bool:
        """True if sequences are packed."""


def extra_gradients(
    keywords: Mapping[str, Any], return_dbias: bool, return_dsink: bool, return_dscore_args: bool
) -> dict[str, Array]:
    """The gradients that `backward` returns after dq, dk and dv: for each name the array of its shape and dtype."""
    like = {}
    for name, source, wanted in (("dbias", "bias", return_dbias), ("dsink", "sink", return_dsink)):
        check_bool(f"return_{name}", wanted)
        if wanted and keywords.get(source) is None:
            raise ValueError(f"return_{name}: there is no {source}; pass that of the forward")
        if wanted:
            like[name] = keywords[source]
    check_bool("return_dscore_args", return_dscore_args)
    if return_dscore_args:
        if keywords.get("score_mod") is None:
            raise ValueError("return_dscore_args: there is no score_mod; pass that of the forward")
        arrays = floating_arguments(keywords)
        if not arrays:
            raise ValueError("return_dscore_args: score_args has no floating-point array")
        like |= {f"d{name}": array for name, array in arrays.items()}
    return like


def check_deterministic(settings: Any) -> None:
    """Raises UnsupportedProblemError if kernels add up the gradients of a call's arrays in any order.

    `settings` are the `FeatureSettings` of a backward, whose class imports this module.
    """
    if settings.dscore_args:
        raise UnsupportedProblemError("return_dscore_args: GPUs sum them atomically; not with deterministic")


def check_deterministic_tangents(settings: Any, keywords: Mapping[str, Any]) -> None:
    """The same for a call of second order, whose kernels have only atomics for a broadcast dbias."""
    if settings.sums_dbias:
        raise UnsupportedProblemError(
            f"return_dbias: for a bias that is broadcast, here {keywords['bias'].shape}, GPUs sum it atomically in "
            "calls of second order; not with deterministic"
        )


def finite_number(name: str, value: object, wanted: str = "a finite number", or_none: bool = True) -> float:
    """A finite real number as float; `wanted` describes it in the error for a value that is not finite."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        expected = f"{name}: expected a real number{' or None' if or_none else ''}"
        raise TypeError(f"{expected}, got {type(value).__name__}{scalar_of(name, value, 'float')}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected {wanted}, got {number}")
    return number


# Checks of the keywords that are no arrays. Each returns fields of `FeatureSettings`.


def check_window(keywords: Mapping[str, Any], problem: Problem) -> dict[str, Any]:
    """``window=(left, right)``."""
    window = keywords.get("window")
    if window is None:
        return {}
    if not isinstance(window, tuple | list) or len(window) != 2:
        got = f"{len(window)} elements" if isinstance(window, tuple | list) else type(window).__name__
        hint = f"; write window=({window}, 0) for keys up to the query's own" if isinstance(window, int) else ""
        raise TypeError(f"window: expected a tuple (left, right), got {got}{hint}")
    for side, limit in zip(("left", "right"), window, strict=True):
        if limit is not None and check_int(f"window ({side})", limit, "an int or None") < 0:
            hint = "; write None where other libraries have -1" if limit == -1 else ""
            raise ValueError(f"window ({side}): expected at least 0, or None for no limit, got {limit}{hint}")
    return {"window": tuple(None if limit is None else int(limit) for limit in window)}


def check_cap(keywords: Mapping[str, Any], problem: Problem) -> dict[str, Any]:
    """``softcap=``."""
    if keywords.get("softcap") is None:
        return {}
    cap = finite_number("softcap", keywords["softcap"], "a positive number")
    if cap <= 0:
        raise ValueError(f"softcap: expected a positive number, or None for no cap, got {cap}")
    return {"softcap": cap}


def check_dropout(keywords: Mapping[str, Any], problem: Problem) -> dict[str, Any]:
    """``dropout_p=`` and ``seed=``."""
    wanted = "a number from 0 to below 1"
    probability = finite_number("dropout_p", keywords.get("dropout_p", 0.0), wanted, or_none=False)
    if not 0 <= probability < 1:
        raise ValueError(f"dropout_p: expected {wanted}, got {probability}")
    seed = keywords.get("seed")
    if seed is None:
        if probability > 0:
            raise ValueError("seed: dropout needs one, the same in forward and backward and another one for each step")
        return {"dropout_p": probability}
    number = check_int("seed", seed)
    if not is_seed(seed):
        raise ValueError(f"seed: expected an int from 0 to below 2**64, got {number}")
    return {"dropout_p": probability, "seed": number if probability > 0 else 0}


def is_seed(seed: object) -> TypeGuard[int]:
    """True if a seed of dropout is legal."""
    return isinstance(seed, numbers.Integral) and not isinstance(seed, bool) and 0 <= int(seed) < 2**64


def check_wide_bias(keywords: Mapping[str, Any], problem: Problem) -> dict[str, Any]:
    """``bias=`` in a dtype that differs from q's."""
    bias = keywords.get("bias")
    return {"wide_bias": True} if bias is not None and bias.dtype.name != problem.dtype else {}


def check_packed(keywords: Mapping[str, Any], problem: Problem) -> dict[str, Any]:
    """``cu_seqlens_q=``, ``cu_seqlens_k=``, ``max_seqlen_q=`` and ``max_seqlen_k=``."""
    lengths = _longest(keywords)
    arrays = {name: keywords[name] for name in OFFSETS if keywords.get(name) is not None}
    if not arrays:
        return {}
    given = list(arrays)
    if len(given) == 1:
        missing = "cu_seqlens_k" if given == ["cu_seqlens_q"] else "cu_seqlens_q"
        raise ValueError(f"{missing}: packed sequences need it together with {given[0]}")
    for name, array in arrays.items():
        _check_dtype(name, array, ("int32",))
        if array.ndim != 1 or array.shape[0] < 1:
            raise ValueError(f"{name}: expected shape (batch + 1,), got {array.shape}")
    wanted, got = (array.shape for array in arrays.values())
    if wanted != got:
        raise ValueError(f"cu_seqlens_k: expected shape {wanted} to match cu_seqlens_q, got {got}")
    if problem.rank != 3:
        axes = "(total, heads, head_dim)" if problem.layout == "bshd" else "(heads, total, head_dim)"
        raise ValueError(f"cu_seqlens_q: packed sequences need q, k and v of 3 axes {axes}, got {problem.rank}")
    return {
        "num_sequences": wanted[0] - 1,
        "max_seqlen_q": lengths.get("max_seqlen_q", problem.seqlen_q),
        "max_seqlen_k": lengths.get("max_seqlen_k", problem.seqlen_k),
    }


def _longest(keywords: Mapping[str, Any]) -> dict[str, int]:
    """``max_seqlen_q=`` and ``max_seqlen_k=``, those that are given."""
    lengths = {}
    for name in ("max_seqlen_q", "max_seqlen_k"):
        if keywords.get(name) is None:
            continue
        length = lengths[name] = check_int(name, keywords[name], "an int or None")
        if length < 0:
            raise ValueError(f"{name}: expected at least 0, got {length}")
        if all(keywords.get(offsets) is None for offsets in OFFSETS):
            raise ValueError(f"{name}: is for packed sequences, which need cu_seqlens_q and cu_seqlens_k")
    return lengths


# Checks of arrays. Each takes the name, the array, and the problem with its settings.


def check_broadcast(name: str, array: Array, problem: Problem) -> None:
    """A bias or a mask, which is broadcast over the scores."""
    accumulator = problem.accumulator_dtype
    _check_dtype(name, array, tuple(dict.fromkeys((problem.dtype, accumulator))) if name == "bias" else ("bool",))
    shape = problem.broadcast_shape
    if not _can_be_broadcast(array.shape, shape):
        axes = f"{'...' if problem.leading else 'batch'}, heads, seqlen_q, seqlen_k"
        wanted = f"a shape that can be broadcast to ({axes}) = {shape}"
        *leading, _, seqlen_q, seqlen_k = shape
        own = ", ".join(":" * len(leading))
        hints = {
            (*leading, seqlen_q, seqlen_k): f"{name}[{own}, None]",
            (*leading, seqlen_k): f"{name}[{own}, None, None]",
        }
        first = "first axes are those" if problem.leading else "first axis is that"
        hint = f"; write {hints[array.shape]} if its {first} of the batch" if array.shape in hints else ""
        raise ValueError(f"{name}: expected {wanted}, got {array.shape}{hint}")


def check_key_padding(name: str, array: Array, problem: Problem) -> None:
    """One bool for each key of each sequence, broadcast over them."""
    _check_dtype(name, array, ("bool",))
    _check_broadcast_shape(name, array, problem, problem.score_shape[3], "seqlen_k")


def check_slopes(name: str, array: Array, problem: Problem) -> None:
    """One number for each query head, or for each sequence and query head, broadcast over them."""
    _check_dtype(name, array, (problem.accumulator_dtype,))
    _check_broadcast_shape(name, array, problem, problem.score_shape[1], "heads")


def check_sink(name: str, array: Array, problem: Problem) -> None:
    """One number for each query head."""
    _check_dtype(name, array, (problem.accumulator_dtype,))
    shape = (problem.score_shape[1],)
    if array.shape != shape:
        raise ValueError(f"{name}: expected shape {shape} to match q and k, got {array.shape}")


def _check_dtype(name: str, array: Array, wanted: tuple[str, ...]) -> None:
    if array.dtype.name not in wanted:
        hint = _conversion(name, array, wanted)
        raise TypeError(f"{name}: expected dtype {' or '.join(wanted)}, got {array.dtype}{hint}")


def _conversion(name: str, array: Array, wanted: tuple[str, ...]) -> str:
    """The end of the message: an expression with the wanted dtype."""
    if name in OFFSETS and array.dtype.kind in "iu":
        return f'; write {name}.astype("int32") or cumsum(..., dtype="int32"), or make them with fa2cupy.cu_seqlens'
    if wanted == ("bool",):
        added = ", or bias=mask where numbers are to be added to the scores" if name == "mask" else ""
        return f"; write {name} != 0 where ones are visible keys{added}"
    if name == "bias" and array.dtype.kind == "b":
        return "; write mask=bias where True is a visible key"
    return as_dtype(name, array.dtype, wanted[-1])


def _can_be_broadcast(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    lengths = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(own in (1, full) for own, full in lengths)


def _check_broadcast_shape(name: str, array: Array, problem: Problem, last: int, axis: str) -> None:
    """Checks an array that is broadcast over the leading axes and one more, of length `last`."""
    shape, front = (*(problem.leading or problem.score_shape[:1]), last), "..." if problem.leading else "batch"
    if not (array.ndim and _can_be_broadcast(array.shape, shape)):
        wanted = f"a shape that can be broadcast to ({front}, {axis}) = {shape}"
        raise ValueError(f"{name}: expected {wanted}, got {array.shape}")
