"""The public functions that differentiate `forward` forward, and `backward` in both directions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .backends import backend_of
from .problem.arguments import output_name, unpack_out
from .problem.array_types import ArrayT
from .problem.conversions import explains_absence, third_derivative
from .problem.keywords import ScoreKeywords, options_of, takes
from .problem.tangents import Tangents
from .typing import SecondOrderKeywords

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["backward_jvp", "double_backward", "jvp", "out_of_tangents"]


@takes(ScoreKeywords)
@explains_absence
def jvp(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    qt: ArrayT | None,
    kt: ArrayT | None,
    vt: ArrayT | None,
    *,
    o: ArrayT | None = None,
    lse: ArrayT | None = None,
    bias_tangent: ArrayT | None = None,
    sink_tangent: ArrayT | None = None,
    out: tuple[ArrayT | None, ...] | None = None,
    **keywords: Unpack[ScoreKeywords],
) -> tuple[ArrayT, ArrayT, ArrayT, ArrayT]:
    """`forward`, and the derivative of its results along a direction: a Jacobian-vector product.

    Parameters
    ----------
    q, k, v : ndarray
        As for `forward`.
    qt, kt, vt : ndarray or None, shapes and dtypes of q, k, v
        The direction: the tangents of q, k and v. None is one of zeros, whose products are not computed.
    causal, softmax_scale, layout, **keywords
        As for `forward`.
    o, lse : ndarray, optional
        The results of `forward` with the same options, both of them: they are then not computed again.
    bias_tangent, sink_tangent : ndarray, shapes and dtypes of bias, sink, optional
        Tangents of the bias and of the sink. ALiBi's slopes and the arrays of functions have none.
    out : tuple of (ndarray or None), optional
        Arrays ``(o, lse, ot, lset)`` to write the results to. They must not overlap each other or an input. The first
        two are None if o and lse are given.

    Returns
    -------
    o, lse : ndarray
        As from `forward`, or the given ones.
    ot, lset : ndarray, shapes and dtypes of o, lse
        Their tangents. A row without a visible key has zeros.

    Raises
    ------
    TypeError, ValueError, IndexError, UnsupportedProblemError
        As for `forward`. A tangent does not have the shape and dtype of its array, or there is no such array.

    See Also
    --------
    backward_jvp : the tangents of the gradients.

    Notes
    -----
    With P = exp(S - lse) and the tangent T of the scores, T = softmax_scale (Qt K^T + Q Kt^T) without features,
    lset = rowsum(P * T) and Ot = (P * T) V - lset * O + P Vt: six matrix products, five with o and lse, where
    `forward` has two. Memory beyond inputs and results is as for `forward`: T is never held for all scores. The dropped
    elements are those of `forward`. The docstring of ``fa2cupy/numerics/second_order.py`` has the terms that features
    add.

    Examples
    --------
    >>> import numpy as np
    >>> q, k, v, qt = np.random.default_rng(0).standard_normal((4, 1, 64, 2, 32))
    >>> o, lse, ot, lset = jvp(q, k, v, qt, None, None, causal=True)
    >>> near = jvp(q + 1e-6 * qt, k, v, None, None, None, causal=True)[0]
    >>> np.allclose(ot, (near - o) / 1e-6, atol=1e-5)
    True
    """
    options = options_of("fa2cupy.jvp", keywords)
    tangents = Tangents(qt, kt, vt, bias_tangent, sink_tangent)
    if o is None and lse is None:
        return backend_of("q", q).jvp(q, k, v, tangents, out, options, keywords)
    results, own_out = {"o": o, "lse": lse}, out_of_tangents(out)
    ot, lset = backend_of("q", q).output_jvp((q, k, v), results, tangents, own_out, options, keywords)
    found: Any = o, lse, ot, lset
    return found


def out_of_tangents(out: tuple[Any, ...] | None) -> tuple[Any, ...]:
    """The arrays for ot and lset among those of the argument `out` of a `jvp` that is given o and lse."""
    o, lse, *moved = unpack_out(out, ("o", "lse", "ot", "lset"))
    for name, array in (("o", o), ("lse", lse)):
        if array is not None:
            raise ValueError(f"{output_name(name)}: it is not written if {name} is given; expected None")
    return tuple(moved)


@takes(SecondOrderKeywords)
@explains_absence
def backward_jvp(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    o: ArrayT,
    lse: ArrayT,
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
    **keywords: Unpack[SecondOrderKeywords],
) -> tuple[ArrayT, ...]:
    """The derivative of `backward` along a direction, such as the product of a Hessian and a vector.

    Parameters
    ----------
    q, k, v, o, lse, do
        As for `backward`.
    qt, kt, vt, ot, lset
        As for `jvp`, and its results for the same direction.
    dot : ndarray, shape of o, optional
        Tangent of do: the derivative, along the direction, of the gradient for o. None is one of zeros. Where a loss
        follows o, it is the product of the loss's Hessian and ot.
    causal, softmax_scale, layout, **keywords
        As for `backward`.
    dlse, dlset : ndarray, shape and dtype of lse, optional
        Gradient for lse, and its tangent.
    bias_tangent, sink_tangent : ndarray, shapes and dtypes of bias, sink, optional
        As for `jvp`.
    return_dbias, return_dsink : bool, optional
        Also returns the tangent of the gradient of `bias`, and of `sink`.
    deterministic : bool, optional
        As for `backward`, but `return_dbias` of a broadcast bias is refused: GPUs sum it with atomics alone.
    out : tuple of (ndarray or None), optional
        Arrays ``(dqt, dkt, dvt)``, and dbiast and dsinkt if requested, to write the results to. They must not overlap
        each other or an input.

    Returns
    -------
    dqt, dkt, dvt : ndarray, shapes of q, k, v
        Tangents of the gradients, in q's dtype.
    dbiast, dsinkt : ndarray, shapes and dtypes of bias, sink
        The requested ones.

    Raises
    ------
    TypeError, ValueError, IndexError, UnsupportedProblemError
        As for `backward` and `jvp`.

    See Also
    --------
    double_backward : the gradients of `backward`.

    Notes
    -----
    With the symbols of `backward` and `jvp`, W = T - lset, dPt = dO Vt^T + dOt V^T and
    deltat = rowsum(dO * Ot + dOt * O) - dlset, the results are dVt = (P * W)^T dO + P^T dOt,
    dSt = P * (W * (dP - delta) + dPt - deltat), dQt = softmax_scale (dSt K + dS Kt) and
    dKt = softmax_scale (dSt^T Q + dS^T Qt): ten matrix products, and twelve with dot. A row that sees no key
    contributes nothing. Second derivatives of score functions are found from their expressions, as the first ones are.
    There are no third derivatives.

    Examples
    --------
    >>> import numpy as np
    >>> q, k, v, do, qt = np.random.default_rng(0).standard_normal((5, 1, 64, 2, 32))
    >>> o, lse, ot, lset = jvp(q, k, v, qt, None, None)
    >>> dqt, dkt, dvt = backward_jvp(q, k, v, o, lse, do, qt, None, None, ot, lset)
    """
    options = options_of("fa2cupy.backward_jvp", keywords)
    tangents = Tangents(qt, kt, vt, bias_tangent, sink_tangent)
    results = {"o": o, "lse": lse, "do": do, "ot": ot, "lset": lset, "dot": dot, "dlse": dlse, "dlset": dlset}
    try:
        return backend_of("q", q).backward_jvp((q, k, v), results, tangents, out, options, keywords)
    except TypeError as error:
        given = (q, k, v, o, lse, do, qt, kt, vt, ot, lset, dot, dlse, dlset, bias_tangent, sink_tangent)
        raise third_derivative(error, "backward_jvp", given) from None


@takes(SecondOrderKeywords)
@explains_absence
def double_backward(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    o: ArrayT,
    lse: ArrayT,
    do: ArrayT,
    gdq: ArrayT | None,
    gdk: ArrayT | None,
    gdv: ArrayT | None,
    *,
    dlse: ArrayT | None = None,
    gdbias: ArrayT | None = None,
    gdsink: ArrayT | None = None,
    out: tuple[ArrayT | None, ...] | None = None,
    **keywords: Unpack[SecondOrderKeywords],
) -> tuple[ArrayT, ...]:
    """Gradients of `backward`, for a loss that is made of its results: reverse over reverse.

    Parameters
    ----------
    q, k, v, o, lse, do
        As for `backward`.
    gdq, gdk, gdv : ndarray or None, shapes and dtypes of q, k, v
        Gradients of the loss for dq, dk and dv. None is one of zeros, whose products are not computed.
    causal, softmax_scale, layout, **keywords
        As for `backward`.
    dlse : ndarray, shape and dtype of lse, optional
        Gradient for lse that `backward` got.
    gdbias, gdsink : ndarray, shapes and dtypes of bias, sink, optional
        Gradients of the loss for dbias and dsink.
    return_dbias, return_dsink : bool, optional
        Also returns the gradient of `bias`, and of `sink`.
    deterministic : bool, optional
        As for `backward`, but `return_dbias` of a broadcast bias is refused: GPUs sum it with atomics alone.
    out : tuple of (ndarray or None), optional
        Arrays ``(gq, gk, gv, gdo)``, then gdlse if there is a dlse, and gbias and gsink if requested, to write the
        results to. They must not overlap each other or an input.

    Returns
    -------
    gq, gk, gv, gdo : ndarray, shapes of q, k, v, do
        Gradients of the loss, in q's dtype. o and lse count as functions of q, k and v: there are none for them.
    gdlse : ndarray, shape and dtype of lse
        Only with dlse.
    gbias, gsink : ndarray, shapes and dtypes of bias, sink
        The requested ones.

    Raises
    ------
    TypeError, ValueError, IndexError, UnsupportedProblemError
        As for `backward`. A cotangent does not have the shape and dtype of its array, or there is no such array.

    Notes
    -----
    Second derivatives are symmetric: gq, gk and gv are what `backward_jvp` gives for the direction (gdq, gdk, gdv), and
    gdo and gdlse are ot and lset of `jvp`. There are no third derivatives.

    Examples
    --------
    >>> import numpy as np
    >>> import fa2cupy
    >>> q, k, v, do = np.random.default_rng(0).standard_normal((4, 1, 64, 2, 32))
    >>> o, lse = fa2cupy.forward(q, k, v)
    >>> dq, dk, dv = fa2cupy.backward(q, k, v, o, lse, do)  # such as forces; the loss is 0.5 * (dq**2).sum()
    >>> gq, gk, gv, gdo = double_backward(q, k, v, o, lse, do, dq, None, None)
    """
    options = options_of("fa2cupy.double_backward", keywords)
    cotangents = Tangents(gdq, gdk, gdv, gdbias, gdsink)
    results = {"o": o, "lse": lse, "do": do, "dlse": dlse}
    try:
        return backend_of("q", q).double_backward((q, k, v), results, cotangents, out, options, keywords)
    except TypeError as error:
        given = (q, k, v, o, lse, do, gdq, gdk, gdv, dlse, gdbias, gdsink)
        raise third_derivative(error, "double_backward", given) from None
