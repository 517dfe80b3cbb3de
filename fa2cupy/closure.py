"""Attention as one call that returns its output and its gradient function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .api import backward, forward
from .families.tile import TileConfig
from .problem.arguments import check_bool
from .problem.array_types import Array
from .problem.feature_checks import extra_gradients
from .problem.function_checks import traced_now
from .problem.keywords import check_keywords, takes_features
from .problem.options import requested_method

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .problem.features import FeatureKeywords

__all__ = ["attention", "with_backprop"]

#: The options that `backward` has and `forward` has not.
_OF_BACKWARD = ("method", "deterministic", "return_dbias", "return_dsink", "return_dscore_args")


@takes_features
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    layout: str = "bshd",
    method: str | None = None,
    deterministic: bool = False,
    return_dbias: bool = False,
    return_dsink: bool = False,
    return_dscore_args: bool = False,
    return_lse: bool = False,
    config: Mapping[str, TileConfig] | None = None,
    family: str | None = None,
    num_splits: int | None = None,
    precision: str | None = None,
    **keywords: Unpack[FeatureKeywords],
) -> tuple[Any, ...]:
    """`forward`, and its gradient as a closure, as layer libraries and tapes need it.

    Parameters
    ----------
    q, k, v, causal, softmax_scale, layout, family, **keywords
        As for `forward`.
    method, deterministic, return_dbias, return_dsink, return_dscore_args
        As for `backward`.
    return_lse : bool, optional
        Also returns lse, for example for a z-loss.
    config : dict of TileConfig by operation, optional
    num_splits : int, optional
    precision : {None, "ieee", "split"}, optional
        As for `forward` and `backward`.

    Returns
    -------
    o : ndarray
        As from `forward`.
    lse : ndarray
        As from `forward`; only with `return_lse`.
    backprop : callable
        ``backprop(do, dlse=None, *, out=None)`` returns the results of `backward`, ``(dq, dk, dv)`` and the other
        requested gradients, for the gradients of o and lse; `out` is a tuple of arrays to write them to, as there. It
        keeps q, k, v, o, lse and the arrays of features alive. Numbers that `score_mod` and `mask_mod` read elsewhere
        are those of the forward.

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
    >>> o, lse, backprop = attention(q, k, v, causal=True, return_lse=True)  # z-loss: mean of lse**2
    >>> dq, dk, dv = backprop(do, dlse=2 * lse / lse.size)
    >>> dqkv = np.empty((1, 64, 3, 2, 32), "float32")  # the gradient of a packed array
    >>> _ = backprop(do, out=(dqkv[:, :, 0], dqkv[:, :, 1], dqkv[:, :, 2]))
    """
    check_keywords(attention, keywords)
    return with_backprop(forward, backward, locals())


def with_backprop(
    forward: Callable[..., tuple[Array, Array]], backward: Callable[..., tuple[Array, ...]], arguments: dict[str, Any]
) -> tuple[Any, ...]:
    """The results of `attention`, made of these functions, for its arguments by name."""
    shared = {**arguments, **arguments["keywords"]}
    del shared["keywords"]
    inputs = [shared.pop(name) for name in ("comm", "q", "k", "v") if name in shared]
    own, return_lse = {name: shared.pop(name) for name in _OF_BACKWARD}, shared.pop("return_lse")
    shared = traced_now(shared)  # what a function reads may have changed when `backprop` is called
    # Errors are raised before the forward runs.
    check_bool("return_lse", return_lse)
    requested_method(own["method"], own["deterministic"], with_atomics=not isinstance(arguments["q"], np.ndarray))
    extra_gradients(shared, own["return_dbias"], own["return_dsink"], own["return_dscore_args"])
    o, lse = forward(*inputs, **shared)

    def backprop(
        do: Array, dlse: Array | None = None, *, out: tuple[Array | None, ...] | None = None
    ) -> tuple[Array, ...]:
        """Gradients of the call of `attention` that returned this function: see `fa2cupy.backward`.

        Parameters
        ----------
        do : ndarray, shape of o
            Gradient for o.
        dlse : ndarray, shape and dtype of lse, optional
            Gradient for lse.
        out : tuple of (ndarray or None), optional
            Arrays to write the results to.

        Returns
        -------
        dq, dk, dv : ndarray
        dbias, dsink, *dscore_args : ndarray
            The requested ones.
        """
        return backward(*inputs, o, lse, do, dlse=dlse, out=out, **own, **shared)

    return (o, lse, backprop) if return_lse else (o, backprop)
