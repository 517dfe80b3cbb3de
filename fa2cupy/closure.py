"""Attention as one call that returns its output and its gradient function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

from .api import backward, forward
from .problem.arguments import check_bool
from .problem.array_types import ArrayT
from .problem.conversions import explains_absence
from .problem.feature_checks import extra_gradients
from .problem.function_checks import traced_now
from .problem.keywords import check_keywords, takes
from .problem.options import CallOptions, GradientOptions, requested_method
from .typing import Backprop, BackwardKeywords

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attention", "with_backprop"]


@overload
def attention(
    q: ArrayT, k: ArrayT, v: ArrayT, *, return_lse: Literal[False] = False, **keywords: Unpack[BackwardKeywords]
) -> tuple[ArrayT, Backprop[ArrayT]]: ...
@overload
def attention(
    q: ArrayT, k: ArrayT, v: ArrayT, *, return_lse: Literal[True], **keywords: Unpack[BackwardKeywords]
) -> tuple[ArrayT, ArrayT, Backprop[ArrayT]]: ...
@takes(BackwardKeywords)
@explains_absence
def attention(
    q: ArrayT, k: ArrayT, v: ArrayT, *, return_lse: bool = False, **keywords: Unpack[BackwardKeywords]
) -> tuple[Any, ...]:
    """`forward`, and its gradient as a closure, as layer libraries and tapes need it.

    Parameters
    ----------
    q, k, v
        As for `forward`.
    return_lse : bool, optional
        Also returns lse, for example for a z-loss.
    **keywords
        Those of `forward` and of `backward`, but for `out`, `delta` and `dlse`.

    Returns
    -------
    o : ndarray
        As from `forward`.
    lse : ndarray
        As from `forward`; only with `return_lse`.
    backprop : callable
        ``backprop(do, dlse=None, *, out=None)`` returns the results of `backward`, ``(dq, dk, dv)`` and the other
        requested gradients, for the gradients of o and lse; `out` is a tuple of arrays to write them to, as there. It
        keeps q, k, v, o, lse and the arrays of features alive: the arrays, not copies. A change of one in place, such
        as of k in a cache, gives wrong gradients. Numbers that `score_mod` and `mask_mod` read elsewhere are those of
        the forward.

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
    check_keywords("fa2cupy.attention", keywords)
    return with_backprop(forward, backward, (q, k, v), keywords, return_lse)


def with_backprop(
    forward: Callable[..., tuple[Any, Any]],
    backward: Callable[..., tuple[Any, ...]],
    inputs: tuple[Any, ...],
    keywords: Mapping[str, Any],
    return_lse: bool,
) -> tuple[Any, ...]:
    """The results of `attention`, made of these functions; `inputs` are their positional arguments, up to v."""
    shared = traced_now(keywords)  # what a function reads may have changed when `backprop` is called
    own = {name: shared.pop(name) for name in GradientOptions.__annotations__ if name in shared}
    # Errors are raised before the forward runs.
    check_bool("return_lse", return_lse)
    options = CallOptions(**own)
    requested_method(options.method, options.deterministic)
    extra_gradients(shared, options.return_dbias, options.return_dsink, options.return_dscore_args)
    o, lse = forward(*inputs, **shared)

    def backprop(do: Any, dlse: Any = None, *, out: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
        return backward(*inputs, o, lse, do, dlse=dlse, out=out, **own, **shared)

    backprop.__doc__ = Backprop.__call__.__doc__
    return (o, lse, backprop) if return_lse else (o, backprop)
