"""The options of a call, which are neither arrays nor features, and the checks of those that need no kernels."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict, get_args

from .arguments import check_bool, check_int
from .names import Layout, Method, Precision

__all__ = [
    "MAX_SPLITS",
    "METHOD_NAMES",
    "CallOptions",
    "GradientOptions",
    "ScoreOptions",
    "SecondOrderOptions",
    "call_options",
    "check_options",
    "hashable_config",
    "kept_options",
    "requested_method",
]

#: The most blocks that share the work on a tile: each adds a copy of the results to the workspace.
MAX_SPLITS = 16

#: The methods of a backward.
METHOD_NAMES: tuple[Method, ...] = get_args(Method)


class ScoreOptions(TypedDict, total=False):
    """The options that change scores, and the order of axes."""

    causal: bool
    softmax_scale: float | None
    layout: Layout


class GradientOptions(TypedDict, total=False):
    """The options of a backward alone."""

    method: Method | None
    deterministic: bool
    return_dbias: bool
    return_dsink: bool
    return_dscore_args: bool


class SecondOrderOptions(TypedDict, total=False):
    """The options of the calls that differentiate a backward."""

    deterministic: bool
    return_dbias: bool
    return_dsink: bool


class _Tiles(dict[str, Any]):
    """Tiles by operation that can be part of a signature: the dict is hashable, and nothing changes it."""

    def __hash__(self) -> int:  # type: ignore[override]  # a dict is declared unhashable
        return hash(frozenset(self.items()))


def hashable_config(config: object) -> object:
    """The `config` of a call as `CallOptions` holds it: a copy of a mapping, and anything else as it is."""
    return _Tiles(config) if isinstance(config, Mapping) else config


def check_options(options: CallOptions, dtype: str, most_splits: int = MAX_SPLITS) -> None:
    """Raises TypeError or ValueError unless the options that need no kernels are legal for data of the dtype."""
    _check_num_splits(options.num_splits, most_splits)
    _check_precision(options.precision, dtype)
    requested_method(options.method, options.deterministic)


def _check_num_splits(num_splits: object, most: int) -> None:
    if num_splits is not None and not 1 <= check_int("num_splits", num_splits, "None or an int") <= most:
        numbers = f"1 to {most}" if most > 1 else "1"
        raise ValueError(f"num_splits: expected None or {numbers}, got {num_splits}")


def _check_precision(precision: object, dtype: str) -> None:
    if precision is None:
        return
    if precision not in get_args(Precision):
        raise ValueError(f"precision: expected None, 'ieee' or 'split', got {precision!r}")
    if dtype != "float32":
        raise ValueError(f"precision: it is a choice for float32, got {precision!r} for {dtype}")


def requested_method(method: str | None, deterministic: bool) -> str | None:
    """The method that the caller requests; None is the faster one.

    Parameters
    ----------
    method, deterministic
        As for `fa2cupy.backward`.

    Raises
    ------
    TypeError, ValueError
        An argument is not legal, or the two contradict each other.
    """
    if method not in (None, *METHOD_NAMES):
        raise ValueError(f"method: expected None, 'single_pass', 'two_pass' or 'one_tile', got {method!r}")
    check_bool("deterministic", deterministic)
    if not deterministic:
        return method
    if method == "single_pass":
        raise ValueError(
            "method: 'single_pass' adds atomically on GPUs, so that it cannot be deterministic; use 'two_pass' or None"
        )
    return method or "two_pass"


class _Options(NamedTuple):
    causal: bool = False
    softmax_scale: float | None = None
    layout: str = "bshd"
    config: object = None
    family: str | None = None
    method: str | None = None
    deterministic: bool = False
    return_dbias: bool = False
    return_dsink: bool = False
    num_splits: int | None = None
    precision: str | None = None
    return_dscore_args: bool = False


class CallOptions(_Options):
    """The options of `fa2cupy.forward`, `delta` and `backward`, whose docstrings describe them.

    It is a tuple because prepared calls are looked up by their options, and tuples hash fastest. Options are equal only
    if the types of their values are: True, 1 and 1.0 are equal, but not all are legal.
    """

    __slots__ = ()

    @property
    def returns_more(self) -> bool:
        """True if a backward returns gradients besides dq, dk and dv, or if one of the options is not legal."""
        return not (self.return_dbias is self.return_dsink is self.return_dscore_args is False)

    def __eq__(self, other: object) -> bool:
        if not (isinstance(other, tuple) and tuple.__eq__(self, other)):
            return False
        return [*map(type, self)] == [*map(type, other)]

    __ne__ = object.__ne__  # the opposite of the above; a tuple has one of its own
    __hash__ = tuple.__hash__


_kept = functools.lru_cache(maxsize=1024, typed=True)(CallOptions)


@functools.lru_cache(maxsize=1024, typed=True)
def kept_options(**named: Any) -> CallOptions:
    """`CallOptions`, as one object for all calls with the same options, which can be hashed.

    Finding it takes less time than making it, and comparing it with itself less than comparing its values.
    """
    return _kept(*CallOptions(**named))


def call_options(**named: Any) -> CallOptions:
    """The same for any options."""
    try:
        return kept_options(**named)
    except TypeError:  # an option that cannot be hashed is not legal: the checks will report it
        return CallOptions(**named)
