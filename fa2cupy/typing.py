"""Types for annotations: arrays, names of options, the keywords of the public functions, and ``backprop``.

A function that passes keywords on has one parameter for all of them::

    def layer(q: ArrayT, k: ArrayT, v: ArrayT, **options: Unpack[ForwardKeywords]) -> ArrayT:
        return fa2cupy.forward(q, k, v, **options)[0]

CuPy has no types of its own: for a checker, its arrays are ``Any``, and so are results that are made of them. mypy asks
for ``ignore_missing_imports`` for ``cupy.*``. Lists, misspelt keywords and values, and results that are not returned
are found by mypy and by pyright; shapes, dtypes, devices and a mixture of both libraries are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypedDict

from .families.tile import TileConfig
from .problem.array_types import AnyArray, ArrayT, CupyArray
from .problem.features import FeatureKeywords
from .problem.keywords import ScoreKeywords
from .problem.names import Layout, Method, Operation, Order, Precision, Scheme
from .problem.options import GradientOptions, ScoreOptions, SecondOrderOptions

__all__ = [
    "AnyArray",
    "ArrayT",
    "Backprop",
    "BackwardKeywords",
    "CupyArray",
    "FeatureKeywords",
    "ForwardKeywords",
    "Layout",
    "Method",
    "Operation",
    "Order",
    "Precision",
    "RankBackwardKeywords",
    "RankForwardKeywords",
    "RankKeywords",
    "RankScoreKeywords",
    "RankSecondOrderKeywords",
    "Scheme",
    "ScoreKeywords",
    "SecondOrderKeywords",
]


class KernelOptions(TypedDict, total=False):
    """The options that choose kernels."""

    config: TileConfig | Mapping[str, TileConfig] | None
    family: str | None
    num_splits: int | None
    precision: Precision | None


class RankKeywords(TypedDict, total=False):
    """The keywords of the functions of `fa2cupy.distributed` alone. `fa2cupy.distributed.forward` describes them."""

    scheme: Scheme | None
    order: Order
    head_groups: int | None


class ForwardKeywords(ScoreOptions, KernelOptions, FeatureKeywords, total=False):
    """The keywords of `fa2cupy.forward`, but for `out`."""


class BackwardKeywords(ScoreOptions, GradientOptions, KernelOptions, FeatureKeywords, total=False):
    """The keywords of `fa2cupy.backward`, but for arrays that are no features. `fa2cupy.attention` has them, too."""


class SecondOrderKeywords(ScoreOptions, SecondOrderOptions, FeatureKeywords, total=False):
    """Those of `fa2cupy.backward_jvp` and `fa2cupy.double_backward`, but for arrays that are no features."""


class RankForwardKeywords(ScoreOptions, RankKeywords, KernelOptions, FeatureKeywords, total=False):
    """The keywords of `fa2cupy.distributed.forward`, but for `out`."""


class RankBackwardKeywords(ScoreOptions, GradientOptions, RankKeywords, KernelOptions, FeatureKeywords, total=False):
    """Those of `fa2cupy.distributed.backward`, but for arrays that are no features, and of its `attention`."""


class RankScoreKeywords(ScoreOptions, RankKeywords, FeatureKeywords, total=False):
    """The keywords of `fa2cupy.distributed.jvp`, but for arrays that are no features."""


class RankSecondOrderKeywords(ScoreOptions, SecondOrderOptions, RankKeywords, FeatureKeywords, total=False):
    """Those of its `backward_jvp` and `double_backward`, but for arrays that are no features."""


class Backprop(Protocol[ArrayT]):
    """What `fa2cupy.attention` returns to compute gradients, tangents and second derivatives.

    The methods are the functions of the same names with the arrays and options of the call, but for those that choose
    kernels. There are no third derivatives.
    """

    def __call__(
        self, do: ArrayT, dlse: ArrayT | None = None, *, out: tuple[ArrayT | None, ...] | None = None
    ) -> tuple[ArrayT, ...]:
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

    def jvp(
        self,
        qt: ArrayT | None,
        kt: ArrayT | None,
        vt: ArrayT | None,
        *,
        bias_tangent: ArrayT | None = None,
        sink_tangent: ArrayT | None = None,
        out: tuple[ArrayT | None, ...] | None = None,
    ) -> tuple[ArrayT, ArrayT]:
        """Tangents of o and lse along a direction: see `fa2cupy.jvp`.

        Parameters
        ----------
        qt, kt, vt, bias_tangent, sink_tangent
            As for `fa2cupy.jvp`.
        out : tuple of (ndarray or None), optional
            Arrays ``(ot, lset)`` to write the results to.

        Returns
        -------
        ot, lset : ndarray, shapes and dtypes of o, lse
        """

    def backward_jvp(
        self,
        do: ArrayT,
        qt: ArrayT | None,
        kt: ArrayT | None,
        vt: ArrayT | None,
        ot: ArrayT,
        lset: ArrayT,
        dot: ArrayT | None = None,
        *,
        dlse: ArrayT | None = None,
        dlset: ArrayT | None = None,
        bias_tangent: ArrayT | None = None,
        sink_tangent: ArrayT | None = None,
        out: tuple[ArrayT | None, ...] | None = None,
    ) -> tuple[ArrayT, ...]:
        """Tangents of the gradients along a direction, such as a Hessian-vector product: see `fa2cupy.backward_jvp`.

        Parameters
        ----------
        do, qt, kt, vt, ot, lset, dot, dlse, dlset, bias_tangent, sink_tangent, out
            As for `fa2cupy.backward_jvp`; ot and lset are those of `jvp`.

        Returns
        -------
        dqt, dkt, dvt : ndarray
        dbiast, dsinkt : ndarray
            The requested ones.

        Raises
        ------
        UnsupportedProblemError
            The gradients of `score_args` were requested, which have no derivatives.
        """

    def double_backward(
        self,
        do: ArrayT,
        gdq: ArrayT | None,
        gdk: ArrayT | None,
        gdv: ArrayT | None,
        *,
        dlse: ArrayT | None = None,
        gdbias: ArrayT | None = None,
        gdsink: ArrayT | None = None,
        out: tuple[ArrayT | None, ...] | None = None,
    ) -> tuple[ArrayT, ...]:
        """Gradients of a loss that is made of the results of this function: see `fa2cupy.double_backward`.

        Parameters
        ----------
        do, gdq, gdk, gdv, dlse, gdbias, gdsink, out
            As for `fa2cupy.double_backward`.

        Returns
        -------
        gq, gk, gv, gdo : ndarray
        gdlse : ndarray
            Only with dlse.
        gbias, gsink : ndarray
            The requested ones.

        Raises
        ------
        UnsupportedProblemError
            The gradients of `score_args` were requested, which have no derivatives.
        """
