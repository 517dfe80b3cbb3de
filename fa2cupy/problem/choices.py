"""Checks of arguments that describe calls without their arrays: dtypes, head dimensions, features and methods."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..errors import UnsupportedProblemError
from .arguments import check_int
from .attention import MAX_HEAD_DIM
from .dtypes import DTYPES
from .features import FEATURES
from .keywords import similar
from .options import METHOD_NAMES

__all__ = [
    "CALL_KEYWORDS",
    "check_dtype",
    "check_head_dim",
    "check_jobs",
    "check_method",
    "feature_combinations",
    "one_or_many",
]

#: The optional parts of calls, named by their keywords; `cu_seqlens` stands for both offsets.
CALL_KEYWORDS = (
    *(name for name, feature in FEATURES.items() if feature.example is not None),
    "dlse",
    "return_dbias",
    "return_dsink",
    "bias_tangent",
    "sink_tangent",
)


def one_or_many(value: Any) -> list[Any]:
    """The elements of an iterable; a single value, or a str, is one element."""
    return [value] if isinstance(value, str) or not isinstance(value, Iterable) else list(value)


def check_dtype(dtype: Any) -> str:
    """The name of a dtype, which may be anything that `numpy.dtype` takes."""
    if isinstance(dtype, str) and dtype in DTYPES:
        return dtype
    wanted = f"dtype: expected {_listed(DTYPES)}"
    try:
        name = np.dtype(dtype).name
    except TypeError as error:
        short = re.fullmatch(r"(b?)f(?:p|loat)?_?(\d+)", str(dtype).lower())
        meant = f"{short[1]}float{short[2]}" if short else ""
        hint = f"; did you mean {meant!r}?" if meant in DTYPES else ""
        raise ValueError(f"{wanted}, got {dtype!r}{hint}") from error
    if name not in DTYPES:
        raise UnsupportedProblemError(f"{wanted}, got {name}")
    return name


def check_head_dim(head_dim: object, name: str = "head_dim", most: int = MAX_HEAD_DIM) -> int:
    """The head_dim as an int, checked against the supported range. Up to `most`, others check it."""
    columns = check_int(name, head_dim)
    if columns < 1:
        raise ValueError(f"{name}: expected at least 1, got {columns}")
    if columns > most:
        raise UnsupportedProblemError(f"{name}: up to {MAX_HEAD_DIM} is supported, got {columns}")
    return columns


def check_method(method: Any) -> str:
    """The name of a backward method, checked."""
    if method not in METHOD_NAMES:
        raise ValueError(f"methods: expected 'single_pass', 'two_pass' or 'one_tile', got {method!r}")
    return method


def check_jobs(jobs: object) -> int | None:
    """The number of kernels that are compiled at a time, checked; None is one per CPU."""
    if jobs is None:
        return None
    number = check_int("jobs", jobs, "an int or None")
    if number < 1:
        raise ValueError(f"jobs: expected at least 1, or None for one per CPU, got {number}")
    return number


def feature_combinations(features: Any) -> list[tuple[str, ...]]:
    """The features of each call. Names make one call that has them all; iterables of names make one call each."""
    given = one_or_many(features)
    several = [not isinstance(names, str) for names in given]
    if any(several) and not all(several):
        raise TypeError("features: expected names for one call, or a tuple of names for each of several, got both")
    if any(several) and not all(isinstance(names, Iterable) for names in given):
        raise TypeError(f"features: expected a str, got {type(given[0]).__name__}")
    calls = [tuple(names) for names in given] if any(several) else [tuple(given)]
    for name in (name for names in calls for name in names):
        if name not in CALL_KEYWORDS:
            close = similar(name, CALL_KEYWORDS)
            hint = f"; did you mean {close!r}?" if close else ""
            raise ValueError(f"features: expected {_listed(CALL_KEYWORDS)}, got {name!r}{hint}")
    for names in calls:
        for name in names:
            source = name.removeprefix("return_d").removesuffix("_tangent")
            if source not in names:
                raise ValueError(f"features: {name!r} needs {source!r} beside it, got {names}")
    return calls


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}"
