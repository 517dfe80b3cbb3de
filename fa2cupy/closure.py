"""Attention as one call that returns its output and its gradient function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from .api import backward, forward
from .backends import backend_of
from .errors import UnsupportedProblemError
from .jit.cache import meanwhile
from .jit.spec import KernelSpec
from .problem.arguments import check_bool, unpack_out
from .problem.array_types import ArrayT
from .problem.conversions import explains_absence
from .problem.feature_checks import extra_gradients
from .problem.features import complete
from .problem.function_checks import traced_now
from .problem.keywords import OPTION_NAMES, check_keywords, options_of, takes
from .problem.options import CallOptions, GradientOptions, SecondOrderOptions, requested_method
from .second_order import backward_jvp, double_backward, jvp
from .typing import Backprop, BackwardKeywords, KernelOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Functions", "attention", "with_backprop"]


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
        the forward. Its methods ``jvp``, ``backward_jvp`` and ``double_backward`` are the functions of these names
        with the arrays and options that it keeps (`fa2cupy.typing.Backprop`).

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
    >>> gq, gk, gv, gdo, gdlse = backprop.double_backward(do, dq, None, None, dlse=lse)  # for the loss 0.5 * sum(dq**2)
    """
    check_keywords("fa2cupy.attention", keywords)
    functions = Functions(forward, backward, jvp, backward_jvp, double_backward, _kernels_of_backward)
    return with_backprop(functions, (q, k, v), keywords, return_lse)


class Functions(NamedTuple):
    """The functions that a closure calls."""

    forward: Callable[..., tuple[Any, ...]]
    backward: Callable[..., tuple[Any, ...]]
    jvp: Callable[..., tuple[Any, ...]]
    backward_jvp: Callable[..., tuple[Any, ...]]
    double_backward: Callable[..., tuple[Any, ...]]
    kernels_of_backward: Callable[..., list[KernelSpec]] | None = None


def _kernels_of_backward(q: Any, k: Any, v: Any, **keywords: Any) -> list[KernelSpec]:
    """The kernels that `backward` will have, of CuPy arrays: calls on NumPy arrays wait for none."""
    options = options_of("fa2cupy.backward", keywords)
    return backend_of("q", q).kernels_of_backward(q, k, v, options, keywords)


def with_backprop(
    functions: Functions, inputs: tuple[Any, ...], keywords: Mapping[str, Any], return_lse: bool
) -> tuple[Any, ...]:
    """The results of `attention`, made of these functions; `inputs` are their positional arguments, up to v."""
    check_bool("return_lse", return_lse)
    try:
        shared, own = _divided_options(**keywords) if OPTION_NAMES.issuperset(keywords) else _divided(keywords)
    except TypeError:  # an option that cannot be hashed, or that is not legal
        shared, own = _divided(keywords)
    backprop = _Backprop(functions, inputs, shared, own)
    meanwhile.specs = backprop._kernels
    try:
        backprop._results = o, lse = functions.forward(*inputs, **shared)
    finally:
        meanwhile.specs = None
    return (o, lse, backprop) if return_lse else (o, backprop)


def _divided(keywords: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The keywords of `forward`, and the other ones of `backward`. Errors are raised before the forward runs."""
    shared = dict(keywords)
    complete(shared)
    shared = traced_now(shared)  # what a function reads may have changed when `backprop` is called
    own = {name: shared.pop(name) for name in GradientOptions.__annotations__ if name in shared}
    options = CallOptions(**own)
    requested_method(options.method, options.deterministic)
    extra_gradients(shared, options.return_dbias, options.return_dsink, options.return_dscore_args)
    return shared, own


@functools.lru_cache(maxsize=1024, typed=True)
def _divided_options(**options: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The same for a call without features, whose options are checked once: short calls wait for the host."""
    return _divided(options)


class _Backprop(Backprop[Any]):
    """The gradient function of a call of `attention`: see `fa2cupy.typing.Backprop`.

    Parameters
    ----------
    functions : Functions
    inputs : tuple
        Their positional arguments, up to v.
    shared, own : mapping
        The keywords of `forward`, and the other ones of `backward`.
    """

    _results: tuple[Any, ...]  # o and lse

    def __init__(
        self,
        functions: Functions,
        inputs: tuple[Any, ...],
        shared: Mapping[str, Any],
        own: Mapping[str, Any],
    ):
        self._functions, self._inputs = functions, inputs
        self._shared, self._own = shared, own

    def _kernels(self) -> list[KernelSpec]:
        """The kernels of its call, before there are results."""
        function = self._functions.kernels_of_backward
        return [] if function is None else function(*self._inputs, **self._own, **self._shared)

    def __call__(self, do: Any, dlse: Any = None, *, out: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
        function = self._functions.backward
        return function(*self._inputs, *self._results, do, dlse=dlse, out=out, **self._own, **self._shared)

    def jvp(self, qt: Any, kt: Any, vt: Any, *, out: tuple[Any, ...] | None = None, **tangents: Any) -> tuple[Any, Any]:
        o, lse = self._results
        given = {"o": o, "lse": lse, "out": (None, None, *unpack_out(out, ("ot", "lset")))}
        *_, ot, lset = self._functions.jvp(*self._inputs, qt, kt, vt, **given, **tangents, **self._scores())
        return ot, lset

    def backward_jvp(self, do: Any, *moved: Any, **more: Any) -> tuple[Any, ...]:
        function = self._functions.backward_jvp
        return function(*self._inputs, *self._results, do, *moved, **more, **self._gradients(), **self._scores())

    def double_backward(self, do: Any, *cotangents: Any, **more: Any) -> tuple[Any, ...]:
        function = self._functions.double_backward
        return function(*self._inputs, *self._results, do, *cotangents, **more, **self._gradients(), **self._scores())

    def _scores(self) -> dict[str, Any]:
        """The keywords without those that choose kernels, which functions of second order do not have."""
        return {name: value for name, value in self._shared.items() if name not in KernelOptions.__annotations__}

    def _gradients(self) -> dict[str, Any]:
        if self._own.get("return_dscore_args"):
            raise UnsupportedProblemError(
                "return_dscore_args: gradients of the arrays of score functions have no second derivatives"
            )
        return {name: value for name, value in self._own.items() if name in SecondOrderOptions.__annotations__}
