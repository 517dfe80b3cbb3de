"""The options of a call: the arguments that are neither arrays nor features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["CallOptions", "hashable_config"]


class _Tiles(dict[str, Any]):
    """Tiles by operation that can be part of a signature: the dict is hashable, and nothing changes it."""

    def __hash__(self) -> int:  # type: ignore[override]  # a dict is declared unhashable
        return hash(frozenset(self.items()))


def hashable_config(config: object) -> object:
    """The `config` of a call as `CallOptions` holds it: a copy of a mapping, and anything else as it is."""
    return _Tiles(config) if isinstance(config, Mapping) else config


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
