"""Attention as one call that gives its gradient along."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from .api import backward, forward
from .feature_checks import extra_gradients
from .keywords import check_keywords
from .tiles import TileConfig

if TYPE_CHECKING:
    from typing import Unpack

    from .features import FeatureOptions

__all__ = ["attention"]


def attention(
    q, k, v, *,
    causal: bool = False,
    softmax_scale: float | None = None,
    layout: str = "bshd",
    method: str | None = None,
    deterministic: bool = False,
    return_dbias: bool = False,
    return_dsink: bool = False,
    config: Mapping[str, TileConfig] | None = None,
    family: str | None = None,
    **features: Unpack[FeatureOptions],
) -> tuple[object, Callable]:
    """`forward`, and its gradient as a closure: the style of layer libraries.

    Parameters
    ----------
    q, k, v, causal, softmax_scale, layout, family, **features
        As for `forward`.
    method, deterministic, return_dbias, return_dsink
        As for `backward`.
    config : dict of TileConfig by operation, optional
        As for `forward` and `backward`.

    Returns
    -------
    o : ndarray
        As from `forward`.
    backprop : callable
        ``backprop(do)`` gives what `backward` gives: ``(dq, dk, dv)`` and what else was asked for. It keeps q, k, v, o,
        lse and the arrays of features alive.

    Raises
    ------
    TypeError, ValueError, UnsupportedProblemError, KernelCompileError, KernelLaunchError
        As for `forward` and `backward`.

    Examples
    --------
    >>> import numpy as np
    >>> q, k, v, do = np.random.default_rng(0).standard_normal((4, 1, 64, 2, 32), dtype=np.float32)
    >>> o, backprop = attention(q, k, v, causal=True)
    >>> dq, dk, dv = backprop(do)
    """
    shared = {"causal": causal, "softmax_scale": softmax_scale, "layout": layout, "config": config, "family": family}
    shared |= features
    own = {"method": method, "deterministic": deterministic, "return_dbias": return_dbias, "return_dsink": return_dsink}
    check_keywords(attention, features)
    extra_gradients(features, return_dbias, return_dsink)  # rather now than after the forward
    o, lse = forward(q, k, v, **shared)

    def backprop(do):
        """Gradients of the call of `fa2cupy.attention` that gave this function.

        Parameters
        ----------
        do : ndarray, shape of o
            Gradient for o.

        Returns
        -------
        dq, dk, dv : ndarray
            As from `fa2cupy.backward`, and dbias and dsink behind them if that call asked for them.
        """
        return backward(q, k, v, o, lse, do, **own, **shared)

    return o, backprop
