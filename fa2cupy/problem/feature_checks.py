"""Checks of the keywords of features, alone and against the problem. Messages name the argument."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from .arguments import array_backend, check_bool
from .features import ARRAY_FEATURES, OFFSETS, Features

if TYPE_CHECKING:
    from .attention import AttentionProblem

__all__ = ["check_features", "extra_gradients", "feature_arrays", "finite_number", "split_features"]


def feature_arrays(options: Mapping[str, object]) -> dict[str, object]:
    """The arrays among the keywords of features."""
    return {name: options[name] for name in ARRAY_FEATURES if options.get(name) is not None}


def check_features(problem: AttentionProblem, q, options: Mapping[str, object]) -> Features:
    """The features that `options` asks for.

    Parameters
    ----------
    problem : AttentionProblem
        Of q, k and v, without features.
    q : ndarray
        Whose module the arrays must be of.
    options : mapping
        As `FeatureOptions`.

    Raises
    ------
    TypeError, ValueError
        A value that does not fit.
    """
    arrays = feature_arrays(options)
    array_backend({"q": q}, arrays)
    packed = _packed(problem, options, arrays)
    dropout_p, seed = _dropout(options.get("dropout_p", 0.0), options.get("seed"))
    features = Features(
        window=_window(options.get("window")),
        softcap=_softcap(options.get("softcap")),
        dropout_p=dropout_p,
        seed=seed,
        **packed,
        arrays=tuple(arrays),
        wide_bias="bias" in arrays and arrays["bias"].dtype.name != problem.dtype,
    )
    shape = problem.with_features(features).score_shape
    batch, heads, _, seqlen_k = shape
    for name, array in arrays.items():
        _check_dtype(name, array, problem)
        if name in ("bias", "mask"):
            _check_broadcast(name, array, shape)
        elif name == "key_padding_mask":
            has_batch = problem.rank == 4 or features.num_sequences is not None
            _check_shape(name, array, ((batch, seqlen_k)[not has_batch :],))
        elif name == "alibi_slopes":
            _check_shape(name, array, ((heads,), (batch, heads)))
        elif name == "sink":
            _check_shape(name, array, ((heads,),))
    return features


def extra_gradients(options: Mapping[str, object], return_dbias: bool, return_dsink: bool) -> dict[str, object]:
    """The gradients that `backward` gives besides dq, dk and dv: by name, the array that each is like."""
    like = {}
    for name, source, wanted in (("dbias", "bias", return_dbias), ("dsink", "sink", return_dsink)):
        check_bool(f"return_{name}", wanted)
        if wanted and options.get(source) is None:
            raise ValueError(f"return_{name}: there is no {source}")
        if wanted:
            like[name] = options[source]
    return like


def finite_number(name: str, value: object, wanted: str = "a finite number", or_none: bool = True) -> float:
    """A real number as float. Errors ask for a `wanted`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a real number{' or None' if or_none else ''}, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected {wanted}, got {number}")
    return number


def _window(window) -> tuple[int | None, int | None]:
    if window is None:
        return (None, None)
    if not isinstance(window, tuple | list) or len(window) != 2:
        got = f"{len(window)} elements" if isinstance(window, tuple | list) else type(window).__name__
        raise TypeError(f"window: expected a tuple (left, right), got {got}")
    for side, limit in zip(("left", "right"), window, strict=True):
        if limit is None:
            continue
        if isinstance(limit, bool) or not isinstance(limit, numbers.Integral):
            raise TypeError(f"window ({side}): expected an int or None, got {type(limit).__name__}")
        if limit < 0:
            raise ValueError(f"window ({side}): expected at least 0, or None for no limit, got {limit}")
    return tuple(None if limit is None else int(limit) for limit in window)


def _softcap(softcap) -> float | None:
    if softcap is None:
        return None
    cap = finite_number("softcap", softcap, "a positive number")
    if cap <= 0:
        raise ValueError(f"softcap: expected a positive number, or None for no cap, got {cap}")
    return cap


def _dropout(dropout_p, seed) -> tuple[float, int]:
    probability = finite_number("dropout_p", dropout_p, "a number from 0 to below 1", or_none=False)
    if not 0 <= probability < 1:
        raise ValueError(f"dropout_p: expected a number from 0 to below 1, got {probability}")
    if seed is None:
        if probability > 0:
            raise ValueError("seed: dropout needs one, the same in forward and backward and another one for each step")
        return probability, 0
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise TypeError(f"seed: expected an int, got {type(seed).__name__}")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed: expected an int from 0 to below 2**64, got {seed}")
    return probability, int(seed) if probability > 0 else 0


def _packed(problem: AttentionProblem, options: Mapping[str, object], arrays: Mapping[str, object]) -> dict[str, int]:
    lengths = {name: options[name] for name in ("max_seqlen_q", "max_seqlen_k") if options.get(name) is not None}
    given = [name for name in ("cu_seqlens_q", "cu_seqlens_k") if name in arrays]
    for name, length in lengths.items():
        if isinstance(length, bool) or not isinstance(length, numbers.Integral):
            raise TypeError(f"{name}: expected an int or None, got {type(length).__name__}")
        if length < 0:
            raise ValueError(f"{name}: expected at least 0, got {length}")
        if not given:
            raise ValueError(f"{name}: is for packed sequences, which need cu_seqlens_q and cu_seqlens_k")
    if not given:
        return {}
    if len(given) == 1:
        missing = "cu_seqlens_k" if given == ["cu_seqlens_q"] else "cu_seqlens_q"
        raise ValueError(f"{missing}: packed sequences need it together with {given[0]}")
    for name in given:
        _check_dtype(name, arrays[name], problem)
        if arrays[name].ndim != 1 or arrays[name].shape[0] < 1:
            raise ValueError(f"{name}: expected shape (batch + 1,), got {arrays[name].shape}")
    wanted, got = (arrays[name].shape for name in given)
    if wanted != got:
        raise ValueError(f"cu_seqlens_k: expected shape {wanted} to match cu_seqlens_q, got {got}")
    if problem.rank != 3:
        axes = "(total, heads, head_dim)" if problem.layout == "bshd" else "(heads, total, head_dim)"
        raise ValueError(f"cu_seqlens_q: packed sequences need q, k and v of 3 axes {axes}, got {problem.rank}")
    return {
        "num_sequences": wanted[0] - 1,
        "max_seqlen_q": int(lengths.get("max_seqlen_q", problem.seqlen_q)),
        "max_seqlen_k": int(lengths.get("max_seqlen_k", problem.seqlen_k)),
    }


def _check_dtype(name: str, array, problem: AttentionProblem) -> None:
    accumulator = problem.accumulator_dtype
    wanted = {
        "bias": dict.fromkeys((problem.dtype, accumulator)),
        "alibi_slopes": (accumulator,),
        "sink": (accumulator,),
        "cu_seqlens_q": ("int32",),
        "cu_seqlens_k": ("int32",),
    }.get(name, ("bool",))
    if array.dtype.name not in wanted:
        hint = _conversion(name, array, wanted)
        raise TypeError(f"{name}: expected dtype {' or '.join(wanted)}, got {array.dtype}{hint}")


def _conversion(name: str, array, wanted: Iterable[str]) -> str:
    """What to write instead."""
    if name in OFFSETS and array.dtype.kind in "iu":
        return f'; write {name}.astype("int32") or cumsum(..., dtype="int32"), or make them with fa2cupy.cu_seqlens'
    if name == "mask":
        return "; write mask != 0 where ones are visible keys, or bias=mask where numbers are to be added to the scores"
    if name == "key_padding_mask":
        return "; write key_padding_mask != 0 where ones are visible keys"
    if name == "bias" and array.dtype.kind == "b":
        return "; write mask=bias where True is a visible key"
    *_, widest = wanted
    return f'; write {name}.astype("{widest}")'


def _check_shape(name: str, array, wanted: tuple[tuple[int, ...], ...]) -> None:
    if array.shape not in wanted:
        raise ValueError(f"{name}: expected shape {' or '.join(map(str, wanted))} to match q and k, got {array.shape}")


def _check_broadcast(name: str, array, shape: tuple[int, ...]) -> None:
    fits = array.ndim <= 4 and all(
        own in (1, full) for own, full in zip(array.shape, shape[4 - array.ndim :], strict=True)
    )
    if not fits:
        wanted = f"a shape that can be broadcast to (batch, heads, seqlen_q, seqlen_k) = {shape}"
        raise ValueError(f"{name}: expected {wanted}, got {array.shape}")


def split_features(features: Mapping[str, object]) -> tuple[tuple[str, ...], tuple, tuple, int | None]:
    """The arrays among the keywords of features, by name, the other keywords, and a seed that is legal.

    A call is not prepared anew for each seed: that is handed over like an address.
    """
    arrays = {name: x for name, x in features.items() if x is not None and name in (*ARRAY_FEATURES, "dlse")}
    settings = {name: x for name, x in features.items() if name not in (*ARRAY_FEATURES, "dlse")}
    if isinstance(settings.get("window"), list):  # which could not be hashed
        settings["window"] = tuple(settings["window"])
    seed = settings.get("seed")
    if not isinstance(seed, numbers.Integral) or isinstance(seed, bool) or not 0 <= seed < 2**64:
        return tuple(arrays), tuple(arrays.values()), tuple(settings.items()), None  # which the checks will name
    settings["seed"] = 0
    return (*arrays, "seed"), (*arrays.values(), None), tuple(settings.items()), int(seed)
