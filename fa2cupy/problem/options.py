"""The options of a call: the arguments that are neither arrays nor features."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CallOptions"]


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
