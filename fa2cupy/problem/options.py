"""The options of a call: the arguments that are neither arrays nor features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["MAX_SPLITS", "CallOptions", "check_num_splits", "check_precision", "hashable_config"]

#: The most blocks that share the work on a tile: each adds a copy of the results to the workspace.
MAX_SPLITS = 16


class _Tiles(dict[str, Any]):
    """Tiles by operation that can be part of a signature: the dict is hashable, and nothing changes it."""

    def __hash__(self) -> int:  # type: ignore[override]  # a dict is declared unhashable
        return hash(frozenset(self.items()))


def hashable_config(config: object) -> object:
    """The `config` of a call as `CallOptions` holds it: a copy of a mapping, and anything else as it is."""
    return _Tiles(config) if isinstance(config, Mapping) else config


def check_num_splits(num_splits: object) -> None:
    """Raises TypeError or ValueError unless `num_splits` is None or an int from 1 to `MAX_SPLITS`."""
    if num_splits is None:
        return
    if isinstance(num_splits, bool) or not isinstance(num_splits, int):
        raise TypeError(f"num_splits: expected None or an int, got {type(num_splits).__name__}")
    if not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits: expected None or 1 to {MAX_SPLITS}, got {num_splits}")


def check_precision(precision: object, dtype: str) -> None:
    """Raises TypeError or ValueError unless `precision` is legal for data of the dtype."""
    if precision is None:
        return
    if precision not in ("ieee", "split"):
        raise ValueError(f"precision: expected None, 'ieee' or 'split', got {precision!r}")
    if dtype != "float32":
        raise ValueError(f"precision: it is a choice for float32, got {precision!r} for {dtype}")


class CallOptions(NamedTuple):
    """The options of `fa2cupy.forward`, `delta` and `backward`, whose docstrings describe them.

    It is a tuple because prepared calls are looked up by their options, and tuples hash fastest.
    """

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
