"""Checks the arrays and options of a call, and derives its problem and its results from them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..errors import UnsupportedProblemError
from ..functions.built_in import Band
from .arguments import array_backend, check_array, check_bool, dtype_name
from .array_types import Array
from .attention import MAX_HEAD_DIM, MAX_SEQLEN, SOURCE_AXES, AttentionProblem, array_shape
from .block_mask import COLUMN_INTERVALS, MOST_INTERVALS, ROW_INTERVALS, BlockMask, check_map
from .conversions import as_dtype
from .dtypes import DTYPES
from .feature_checks import check_deterministic, extra_gradients, finite_number
from .features import ARRAYS, FEATURES, FeatureKeywords, FeatureSettings, feature_arrays
from .function_checks import bound_function, function_arrays
from .keywords import check_keywords, takes
from .options import CallOptions, check_options
from .strides import is_full

__all__ = [
    "Request",
    "Result",
    "check_backward",
    "check_delta",
    "check_forward",
    "check_heads",
    "check_layout",
    "check_merge",
    "check_tile_states",
    "problem_from_arrays",
    "problem_from_outputs",
    "problem_from_parts",
    "sizes_of",
    "with_band",
    "with_features",
]


class Result(NamedTuple):
    """An array that a call returns."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype


class Request(NamedTuple):
    """A call that has been checked: its problem and its results."""

    problem: AttentionProblem
    results: tuple[Result, ...]


def check_forward(arrays: Mapping[str, Any], options: CallOptions, keywords: Mapping[str, Any]) -> Request:
    """Checks a call of `fa2cupy.forward`: q, k and v by name, its options, and the keywords of features."""
    problem = _problem(arrays, options, keywords)
    statistic = np.dtype(problem.accumulator_dtype)
    return Request(
        problem, (Result("o", problem.o_shape, arrays["q"].dtype), Result("lse", problem.lse_shape, statistic))
    )


def check_delta(arrays: Mapping[str, Any], options: CallOptions) -> Request:
    """Checks a call of `fa2cupy.delta`: o and do by name."""
    problem = problem_from_outputs(arrays["o"], arrays["do"], layout=options.layout)
    return Request(problem, (Result("delta", problem.lse_shape, np.dtype(problem.accumulator_dtype)),))


def check_backward(arrays: Mapping[str, Any], options: CallOptions, keywords: Mapping[str, Any]) -> Request:
    """Checks a call of `fa2cupy.backward`: its arrays by name; delta and dlse may be None or missing."""
    problem = _problem(arrays, options, keywords)
    like = "q and v" if problem.head_dim_v else "q"
    if arrays["lse"].shape == problem.o_shape or arrays["o"].shape == problem.lse_shape:
        raise ValueError(
            f"lse: expected shape {problem.lse_shape} to match q, got {arrays['lse'].shape}; the order of arguments is "
            "q, k, v, o, lse, do"
        )
    check_array("o", arrays["o"], problem.o_shape, problem.dtype, like)
    check_array("lse", arrays["lse"], problem.lse_shape, problem.accumulator_dtype, "q")
    check_array("do", arrays["do"], problem.o_shape, problem.dtype, like)
    for name in ("delta", "dlse"):
        if arrays.get(name) is not None:
            check_array(name, arrays[name], problem.lse_shape, problem.accumulator_dtype, "q")
    dtype = arrays["q"].dtype
    gradients = (("dq", problem.q_shape), ("dk", problem.k_shape), ("dv", problem.v_shape))
    extra = {}
    if options.returns_more:
        extra = extra_gradients(keywords, options.return_dbias, options.return_dsink, options.return_dscore_args)
    if extra or arrays.get("dlse") is not None:
        wanted: dict[str, Any] = {name.partition("[")[0]: True for name in extra}
        wanted["dlse"] = arrays.get("dlse") is not None
        wanted["full_dbias"] = "dbias" in extra and is_full(extra["dbias"].shape, problem.score_shape)
        problem = problem.with_settings(dataclasses.replace(problem.settings, **wanted))
        if options.deterministic:
            check_deterministic(problem.settings)
    return Request(
        problem,
        (
            *(Result(name, shape, dtype) for name, shape in gradients),
            *(Result(name, array.shape, array.dtype) for name, array in extra.items()),
        ),
    )


def check_merge(arrays: Mapping[str, Any], options: CallOptions) -> Request:
    """Checks a call of `fa2cupy.merge`: o_parts and lse_parts by name."""
    problem = problem_from_parts(arrays["o_parts"], arrays["lse_parts"], layout=options.layout)
    return Request(
        problem,
        (
            Result("o", problem.q_shape, arrays["o_parts"].dtype),
            Result("lse", problem.lse_shape, np.dtype(problem.accumulator_dtype)),
        ),
    )


def check_tile_states(keywords: Mapping[str, Any]) -> Request:
    """Checks a call of `fa2cupy.block_mask`: `mask_mod`, `mask_args`, and as `block_mask` the layout of the map.

    The results include intervals if the layout has some: they are those to look for.
    """
    layout = keywords["block_mask"]
    batch, heads = layout.shape[:2]
    function = bound_function("mask_mod", keywords["mask_mod"], keywords["mask_args"])
    settings = FeatureSettings(mask_mod=function, block_mask=layout)
    sizes = (batch, layout.seqlen_q, layout.seqlen_k, heads, heads, 1)
    problem = AttentionProblem("float32", *sizes, False, 1.0, "bshd", 4, settings=settings)
    results = [Result("states", layout.shape, np.dtype("uint8"))]
    if any(layout.intervals):
        lengths = {ROW_INTERVALS: layout.seqlen_q, COLUMN_INTERVALS: layout.seqlen_k}
        shapes = {name: (batch, heads, length, 4) for name, length in lengths.items()}
        results += [Result(name, shape, np.dtype("int32")) for name, shape in {**shapes, MOST_INTERVALS: (2,)}.items()]
    return Request(problem, tuple(results))


def _problem(arrays: Mapping[str, Any], options: CallOptions, keywords: Mapping[str, Any]) -> AttentionProblem:
    q, k, v = (arrays[name] for name in ("q", "k", "v"))
    # `fa2cupy.distributed` passes the origin; it is no keyword of the public functions.
    own = {name: value for name, value in keywords.items() if name != "dropout_origin"}
    problem = problem_from_arrays(
        q, k, v, causal=options.causal, softmax_scale=options.softmax_scale, layout=options.layout, **own
    )
    if problem.settings.dropout_p and "dropout_origin" in keywords:
        settings = dataclasses.replace(problem.settings, dropout_origin=keywords["dropout_origin"])
        problem = problem.with_settings(settings)
    check_options(options, problem.dtype)
    return problem


@takes(FeatureKeywords)
def problem_from_arrays(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    layout: str = "bshd",
    **keywords: Any,
) -> AttentionProblem:
    """The problem of q, k, v, options and keywords of features (see `FeatureKeywords`), checked against each other."""
    if keywords:
        check_keywords("fa2cupy.problem.checks.problem_from_arrays", keywords)
    check_bool("causal", causal)
    array_backend({"q": q, "k": k, "v": v})
    batch, seqlen_q, num_heads, head_dim = sizes_of("q", q, layout)
    _, seqlen_k, num_heads_kv, _ = _sizes_like_q("k", k, q, layout)
    *_, head_dim_v = _sizes_like_q("v", v, q, layout)
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"v: expected shape {(*k.shape[:-1], head_dim_v)} to match k, got {v.shape}")
    check_heads("k", num_heads, num_heads_kv)
    for name, length in (("q", seqlen_q), ("k", seqlen_k)):
        if length > MAX_SEQLEN:
            raise UnsupportedProblemError(f"{name}: sequences of up to {MAX_SEQLEN} rows are supported, got {length}")
    scale = head_dim**-0.5 if softmax_scale is None else finite_number("softmax_scale", softmax_scale)
    sizes = (batch, seqlen_q, seqlen_k, num_heads, num_heads_kv, head_dim)
    own_v = None if head_dim_v == head_dim else head_dim_v
    problem = AttentionProblem(
        q.dtype.name, *sizes, bool(causal), scale, layout, q.ndim, own_v, leading=_several(q.shape)
    )
    return with_features(problem, q, keywords) if keywords else problem


def check_heads(name: str, num_heads: int, num_heads_kv: int) -> None:
    """Checks that query heads divide evenly among the heads of k and v; `name` is the argument that has these."""
    if num_heads and not num_heads_kv:
        raise ValueError(f"{name}: expected at least one head for the {num_heads} of q, got none")
    if num_heads_kv and num_heads % num_heads_kv:
        raise ValueError(
            f"{name}: the number of heads of q ({num_heads}) must be a multiple of that of k and v, got {num_heads_kv}"
        )


def with_features(problem: AttentionProblem, q: Array, keywords: Mapping[str, Any]) -> AttentionProblem:
    """The problem with the settings of the keywords of features."""
    arrays = feature_arrays(keywords)
    given = keywords.get("block_mask")
    states = {"block_mask": given.states} if isinstance(given, BlockMask) else {}
    array_backend({"q": q, **function_arrays(keywords), **states}, arrays, ARRAYS)
    settings: dict[str, Any] = {"arrays": tuple(arrays)}
    for feature in FEATURES.values():
        settings |= feature.check(keywords, problem)
    problem = problem.with_settings(FeatureSettings(**settings))
    for name, array in arrays.items():
        rule = ARRAYS[name].check
        if rule is not None:
            rule(name, array, problem)
    if problem.settings.block_mask is not None:
        function = problem.settings.mask_mod
        check_map(problem.settings.block_mask, problem.score_shape, None if function is None else function.program)
    return problem


def with_band(problem: AttentionProblem, any_lengths: bool = False) -> AttentionProblem:
    """The problem with a keyword in the place of the mask function and its map, if the function computes the same.

    Parameters
    ----------
    problem : AttentionProblem
    any_lengths : bool, optional
        True if calls with other lengths, in which queries are aligned as by the keyword, are meant, too.
    """
    settings = problem.settings
    found = settings.mask_mod and settings.mask_mod.program.known
    is_given_map = settings.block_mask is not None and settings.block_mask.program is None
    if not isinstance(found, Band) or is_given_map or problem.is_packed or problem.band != (None, None):
        return problem
    last = found.first if found.last is None else found.last
    window = found.window(last if any_lengths and last is not None else problem.seqlen_k - problem.seqlen_q)
    # Without a limit before the query, only causal: kernels that are compiled ahead are those of one keyword.
    if window is None or (window[0] is None and window[1] != 0):
        return problem
    causal = window[0] is None
    settings = dataclasses.replace(settings, mask_mod=None, block_mask=None, window=(None, None) if causal else window)
    return dataclasses.replace(problem, causal=causal, settings=settings)


def problem_from_outputs(o: Array, do: Array, *, layout: str = "bshd") -> AttentionProblem:
    """A problem without keys: delta depends on the queries' sizes only."""
    array_backend({"o": o, "do": do})
    batch, seqlen_q, num_heads, head_dim = sizes_of("o", o, layout)
    sizes = (batch, seqlen_q, 0, num_heads, num_heads, head_dim)
    problem = AttentionProblem(o.dtype.name, *sizes, False, 1.0, layout, o.ndim, leading=_several(o.shape))
    check_array("do", do, problem.q_shape, o.dtype, "o")
    return problem


def problem_from_parts(o_parts: Array, lse_parts: Array, *, layout: str = "bshd") -> AttentionProblem:
    """A problem without keys from parts of o and lse, along an axis in front of those of o and lse."""
    array_backend({"o_parts": o_parts, "lse_parts": lse_parts})
    if o_parts.ndim < 1:
        raise ValueError(f"o_parts: expected an axis of parts in front of those of o, got shape {o_parts.shape}")
    num_parts, shape = o_parts.shape[0], o_parts.shape[1:]
    batch, seqlen_q, num_heads, head_dim = _sizes_of_shape("o_parts", shape, o_parts.dtype, layout, "of each part ")
    sizes = (batch, seqlen_q, 0, num_heads, num_heads, head_dim)
    leading = _several(shape)
    problem = AttentionProblem(o_parts.dtype.name, *sizes, False, 1.0, layout, len(shape), leading=leading)
    expected = (num_parts, *problem.lse_shape)
    if lse_parts.shape != expected and o_parts.ndim < 5:
        hint = "; o_parts has an axis of parts in front of those of o, which a single result has not"
        raise ValueError(
            f"lse_parts: expected shape {expected} to match o_parts {o_parts.shape}, got {lse_parts.shape}{hint}"
        )
    check_array("lse_parts", lse_parts, expected, problem.accumulator_dtype, "o_parts")
    return problem


def _sizes_like_q(name: str, array: Array, q: Array, layout: str) -> tuple[int, int, int, int]:
    """The sizes of k or v. Their axes and dtype must be those of q, and so must batch and columns of k."""
    if array.ndim != q.ndim:
        raise ValueError(f"{name}: expected {q.ndim} axes like q, got shape {array.shape}")
    if array.dtype != q.dtype:
        # A float64 q is most often an accident: NumPy makes float64 arrays unless told otherwise.
        other = f", or {name}.astype(q.dtype)" if q.dtype == "float64" and array.dtype.name in DTYPES else ""
        hint = as_dtype("q", q.dtype, array.dtype.name) if other else as_dtype(name, array.dtype, q.dtype.name)
        raise TypeError(f"{name}: expected dtype {q.dtype} to match q, got {array.dtype}{hint}{other}")
    _, _, _, head_dim_q = sizes_of("q", q, layout)
    batch, seqlen, heads, head_dim = sizes_of(name, array, layout)
    leading = q.shape[: max(0, q.ndim - 3)]
    if name == "k" and (array.shape[: len(leading)], head_dim) != (leading, head_dim_q):
        inner = array_shape(layout, min(q.ndim, 3), 1, "seqlen_k", "num_heads_kv", head_dim_q)
        wanted = (*leading, *inner)
        raise ValueError(f"k: expected shape ({', '.join(map(str, wanted))}) to match q {q.shape}, got {array.shape}")
    return batch, seqlen, heads, head_dim


def check_layout(layout: object) -> None:
    """Raises ValueError unless it is an order of axes."""
    if layout not in ("bshd", "bhsd"):
        named = {"bshd": "bshd", "nhd": "bshd", "bhsd": "bhsd", "hnd": "bhsd"}
        meant = named.get(layout.lower()) if isinstance(layout, str) else None
        hint = f"; did you mean {meant!r}?" if meant else ""
        raise ValueError(f"layout: expected 'bshd' or 'bhsd', got {layout!r}{hint}")


def sizes_of(name: str, array: Array, layout: str, largest: int = MAX_HEAD_DIM) -> tuple[int, int, int, int]:
    """Sizes of the batch, row, head and column axes. All leading axes together are the batch."""
    return _sizes_of_shape(name, array.shape, array.dtype, layout, largest=largest)


def _sizes_of_shape(
    name: str, shape: tuple[int, ...], dtype: np.dtype, layout: str, whose: str = "", largest: int = MAX_HEAD_DIM
) -> tuple[int, int, int, int]:
    """The same for an array of this shape and dtype; `whose` follows the number of axes in messages."""
    check_layout(layout)
    if len(shape) < 2:
        wanted = "(batch, seqlen, heads, head_dim)" if layout == "bshd" else "(batch, heads, seqlen, head_dim)"
        raise ValueError(f"{name}: expected 2 or more axes {whose}such as {wanted}, got shape {shape}")
    if dtype_name(dtype) not in DTYPES:
        *most, last = DTYPES
        hint = as_dtype(name, dtype, "float32")
        raise TypeError(f"{name}: expected dtype {', '.join(most)} or {last}, got {dtype}{hint}")
    seqlen, heads, head_dim = (1 if axis is None else shape[axis] for axis in SOURCE_AXES[layout, len(shape) > 2])
    if head_dim == 0:
        raise ValueError(f"{name}: head_dim must be at least 1, got shape {shape}")
    if head_dim > largest:
        raise UnsupportedProblemError(f"{name}: head_dim up to {largest} is supported, got shape {shape}")
    return math.prod(shape[: max(0, len(shape) - 3)]), seqlen, heads, head_dim


def _several(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The leading axes of a tensor's shape if there are several."""
    return shape[:-3] if len(shape) > 4 else ()
