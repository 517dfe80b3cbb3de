"""References for results: the formulas with whole score matrices, one head at a time.

`forward`, `delta`, `backward`, and `jvp`, `second_jvp`, `backward_jvp` and `double_backward`, work in float64.
`baseline_forward` and `baseline_backward` are naive implementations in the working precision, which round each matrix
product to the dtype of the inputs. `fa2cupy.testing` compares results with both.

Arguments, shapes and errors are those of the functions of the package. The functions take NumPy and CuPy arrays and
compute where these are. They share only the argument checks and the generator of dropout with the rest of the package.
A NaN in a key that a mask hides may reach the rows that it is hidden from (0 * NaN), here as in the kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .numerics.arrays import device_context
from .numerics.formulas import Formulas
from .numerics.second_order import SecondOrder
from .problem.arguments import array_backend, check_array
from .problem.array_types import Array, ArrayT
from .problem.attention import AttentionProblem
from .problem.checks import problem_from_arrays, problem_from_outputs
from .problem.feature_checks import extra_gradients
from .problem.features import complete
from .problem.keywords import ScoreKeywords, check_keywords, takes
from .problem.names import Layout
from .problem.tangents import COTANGENTS, TANGENTS, Tangents, check_tangents

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "backward",
    "backward_jvp",
    "baseline_backward",
    "baseline_forward",
    "delta",
    "double_backward",
    "forward",
    "gradient_noise",
    "jvp",
    "second_jvp",
]


@takes(ScoreKeywords)
def forward(q: ArrayT, k: ArrayT, v: ArrayT, **keywords: Unpack[ScoreKeywords]) -> tuple[ArrayT, ArrayT]:
    """`fa2cupy.forward` in float64.

    Parameters
    ----------
    q, k, v, causal, softmax_scale, layout, **keywords
        As for `fa2cupy.forward`.

    Returns
    -------
    o : ndarray of float64, shape of q, with the columns of v
    lse : ndarray of float64, shape (batch, num_heads, seqlen_q)
    """
    problem = _problem("forward", q, k, v, keywords)
    with device_context(q):
        return Formulas(problem, keywords, q, "float64", "float64").forward(q, k, v)


def delta(o: ArrayT, do: ArrayT, *, layout: Layout = "bshd") -> ArrayT:
    """`fa2cupy.delta` in float64.

    Parameters
    ----------
    o, do, layout
        As for `fa2cupy.delta`.

    Returns
    -------
    delta : ndarray of float64, shape (batch, num_heads, seqlen_q)
    """
    problem = problem_from_outputs(o, do, layout=layout)
    with device_context(o):
        products = problem.canonical_view(o).astype("float64") * problem.canonical_view(do).astype("float64")
        return products.sum(axis=-1).swapaxes(-1, -2).reshape(problem.lse_shape)


@takes(ScoreKeywords)
def backward(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    o: ArrayT,
    lse: ArrayT,
    do: ArrayT,
    *,
    dlse: ArrayT | None = None,
    return_dbias: bool = False,
    return_dsink: bool = False,
    return_dscore_args: bool = False,
    **keywords: Unpack[ScoreKeywords],
) -> tuple[ArrayT, ...]:
    """`fa2cupy.backward` in float64.

    Parameters
    ----------
    q, k, v, do, causal, softmax_scale, layout, dlse, return_dbias, return_dsink, return_dscore_args,
    **keywords
        As for `fa2cupy.backward`.
    o, lse : ndarray
        As for `fa2cupy.backward`, or in float64 as `forward` returns them.

    Returns
    -------
    dq, dk, dv : ndarray of float64, shapes of q, k, v
    dbias, dsink, *dscore_args : ndarray of float64, shapes of bias, sink and the floating-point score_args
        Only if asked for.
    """
    problem = _problem("backward", q, k, v, keywords)
    _check_shapes(problem, q, {"o": o, "lse": lse, "do": do}, {"dlse": dlse})
    extra = extra_gradients(keywords, return_dbias, return_dsink, return_dscore_args)
    with device_context(q):
        return Formulas(problem, keywords, q, "float64", "float64").backward(q, k, v, o, lse, do, dlse, extra)


@takes(ScoreKeywords)
def baseline_forward(q: ArrayT, k: ArrayT, v: ArrayT, **keywords: Unpack[ScoreKeywords]) -> tuple[ArrayT, ArrayT]:
    """The formulas of `forward` in the working precision.

    Parameters
    ----------
    q, k, v, causal, softmax_scale, layout, **keywords
        As for `fa2cupy.forward`.

    Returns
    -------
    o : ndarray, shape as of `forward`, dtype of q
    lse : ndarray of float32 or float64, shape (batch, num_heads, seqlen_q)

    Notes
    -----
    Matrix products, here and in `baseline_backward`, are summed in float32 (float64 for float64 data) and rounded to
    the dtype of q, and so are P and dS before they enter one. NumPy and CuPy differ by the order of sums only.
    """
    problem = _problem("baseline_forward", q, k, v, keywords)
    with device_context(q):
        return Formulas(problem, keywords, q, problem.accumulator_dtype, q.dtype).forward(q, k, v)


@takes(ScoreKeywords)
def baseline_backward(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    do: ArrayT,
    *,
    dlse: ArrayT | None = None,
    return_dbias: bool = False,
    return_dsink: bool = False,
    return_dscore_args: bool = False,
    **keywords: Unpack[ScoreKeywords],
) -> tuple[ArrayT, ...]:
    """The formulas of `backward` in the working precision, with o and lse of `baseline_forward`.

    Parameters
    ----------
    q, k, v, do, causal, softmax_scale, layout, dlse, return_dbias, return_dsink, return_dscore_args,
    **keywords
        As for `fa2cupy.backward`.

    Returns
    -------
    dq, dk, dv : ndarray, shapes and dtype of q, k, v
    dbias, dsink, *dscore_args : ndarray, shapes and dtypes of bias, sink and the floating-point score_args
        Only if asked for.
    """
    problem = _problem("baseline_backward", q, k, v, keywords)
    extra = extra_gradients(keywords, return_dbias, return_dsink, return_dscore_args)
    with device_context(q):
        formulas = Formulas(problem, keywords, q, problem.accumulator_dtype, q.dtype)
        return formulas.backward(q, k, v, *formulas.forward(q, k, v), do, dlse, extra)


@takes(ScoreKeywords)
def gradient_noise(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    o: ArrayT,
    lse: ArrayT,
    do: ArrayT,
    *,
    dlse: ArrayT | None = None,
    return_dbias: bool = False,
    return_dsink: bool = False,
    return_dscore_args: bool = False,
    **keywords: Unpack[ScoreKeywords],
) -> dict[str, float]:
    """Bounds of the error that one rounding of every product in dP and delta causes in gradients whose terms cancel.

    Where a row sees one key, P = 1 and dP = delta: dq and dk are 0, and an implementation returns the difference of two
    equal sums. No bound relative to the result holds for it; this one does. dbias is a sum of such differences. In
    dsink, and in a dbias that is summed over the keys, products of do and o cancel; the rounding error of o remains.

    Parameters
    ----------
    q, k, v, o, lse, do, causal, softmax_scale, layout, dlse, return_dbias, return_dsink, return_dscore_args,
    **keywords
        As for `backward`.

    Returns
    -------
    dict of float
        ``"dq"`` and ``"dk"``, and those of ``"dbias"``, ``"dsink"`` and ``"dscore_args[0]"`` and so on that are asked
        for, in units of the machine epsilon of the sums.
    """
    problem = _problem("gradient_noise", q, k, v, keywords)
    extra = extra_gradients(keywords, return_dbias, return_dsink, return_dscore_args)
    with device_context(q):
        return Formulas(problem, keywords, q, "float64", "float64").noise(q, k, v, o, lse, do, dlse, extra)


@takes(ScoreKeywords)
def jvp(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    qt: ArrayT | None,
    kt: ArrayT | None,
    vt: ArrayT | None,
    *,
    bias_tangent: ArrayT | None = None,
    sink_tangent: ArrayT | None = None,
    **keywords: Unpack[ScoreKeywords],
) -> tuple[ArrayT, ArrayT, ArrayT, ArrayT]:
    """`fa2cupy.jvp` in float64.

    Parameters
    ----------
    q, k, v, qt, kt, vt, causal, softmax_scale, layout, bias_tangent, sink_tangent, **keywords
        As for `fa2cupy.jvp`.

    Returns
    -------
    o, lse : ndarray of float64
        As of `forward`.
    ot, lset : ndarray of float64, shapes of o and lse
    """
    tangents = Tangents(qt, kt, vt, bias_tangent, sink_tangent)
    problem = _problem("jvp", q, k, v, keywords)
    check_tangents(TANGENTS, tangents, {"q": q, "k": k, "v": v}, keywords)
    with device_context(q):
        formulas = SecondOrder(problem, keywords, q, "float64", "float64")
        o, lse = formulas.forward(q, k, v)
        ot, lset = formulas.jvp({"q": q, "k": k, "v": v, "o": o, "lse": lse}, tangents)
        return o, lse, ot, lset


@takes(ScoreKeywords)
def second_jvp(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    qt: ArrayT | None,
    kt: ArrayT | None,
    vt: ArrayT | None,
    qu: ArrayT | None,
    ku: ArrayT | None,
    vu: ArrayT | None,
    **keywords: Unpack[ScoreKeywords],
) -> tuple[ArrayT, ArrayT]:
    """The derivative of ot and lset of `jvp` along a second direction: forward over forward.

    The package has no function for it that does not hold score matrices. For a loss, `fa2cupy.backward_jvp` gives the
    products of its Hessian and all directions.

    Parameters
    ----------
    q, k, v, qt, kt, vt, causal, softmax_scale, layout, **keywords
        As for `fa2cupy.jvp`.
    qu, ku, vu : ndarray or None, shapes and dtypes of q, k, v
        The second direction, along which q, k and v change, but not qt, kt and vt.

    Returns
    -------
    ott, lsett : ndarray of float64, shapes of o and lse
    """
    problem = _problem("second_jvp", q, k, v, keywords)
    one, other = Tangents(qt, kt, vt, None, None), Tangents(qu, ku, vu, None, None)
    for names, tangents in ((TANGENTS, one), (("qu", "ku", "vu", *TANGENTS[3:]), other)):
        check_tangents(names, tangents, {"q": q, "k": k, "v": v}, keywords)
    with device_context(q):
        formulas = SecondOrder(problem, keywords, q, "float64", "float64")
        _, lse = formulas.forward(q, k, v)
        return formulas.second_jvp({"q": q, "k": k, "v": v, "lse": lse}, one, other)


@takes(ScoreKeywords)
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
    return_dbias: bool = False,
    return_dsink: bool = False,
    **keywords: Unpack[ScoreKeywords],
) -> tuple[ArrayT, ...]:
    """`fa2cupy.backward_jvp` in float64.

    Parameters
    ----------
    q, k, v, do, qt, kt, vt, dot, causal, softmax_scale, layout, dlse, dlset, bias_tangent, sink_tangent, return_dbias,
    return_dsink, **keywords
        As for `fa2cupy.backward_jvp`.
    o, lse, ot, lset : ndarray
        As there, or in float64 as `jvp` returns them.

    Returns
    -------
    dqt, dkt, dvt : ndarray of float64, shapes of q, k, v
    dbiast, dsinkt : ndarray of float64, shapes of bias and sink
        Only if asked for.
    """
    tangents = Tangents(qt, kt, vt, bias_tangent, sink_tangent)
    problem = _problem("backward_jvp", q, k, v, keywords)
    check_tangents(TANGENTS, tangents, {"q": q, "k": k, "v": v}, keywords)
    results = {"o": o, "lse": lse, "do": do, "ot": ot, "lset": lset}
    optional = {"dot": dot, "dlse": dlse, "dlset": dlset}
    _check_shapes(problem, q, results, optional)
    extra = extra_gradients(keywords, return_dbias, return_dsink, return_dscore_args=False)
    with device_context(q):
        formulas = SecondOrder(problem, keywords, q, "float64", "float64")
        return formulas.backward_jvp({"q": q, "k": k, "v": v, **results, **optional}, tangents, extra)


@takes(ScoreKeywords)
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
    return_dbias: bool = False,
    return_dsink: bool = False,
    **keywords: Unpack[ScoreKeywords],
) -> tuple[ArrayT, ...]:
    """`fa2cupy.double_backward` in float64.

    Parameters
    ----------
    q, k, v, do, gdq, gdk, gdv, causal, softmax_scale, layout, dlse, gdbias, gdsink, return_dbias, return_dsink,
    **keywords
        As for `fa2cupy.double_backward`.
    o, lse : ndarray
        As there, or in float64 as `forward` returns them.

    Returns
    -------
    gq, gk, gv, gdo : ndarray of float64, shapes of q, k, v, do
    gdlse : ndarray of float64, shape of lse
        Only with dlse.
    gbias, gsink : ndarray of float64, shapes of bias and sink
        Only if asked for.
    """
    cotangents = Tangents(gdq, gdk, gdv, gdbias, gdsink)
    problem = _problem("double_backward", q, k, v, keywords)
    check_tangents(COTANGENTS, cotangents, {"q": q, "k": k, "v": v}, keywords)
    results, optional = {"o": o, "lse": lse, "do": do}, {"dlse": dlse}
    _check_shapes(problem, q, results, optional)
    extra = extra_gradients(keywords, return_dbias, return_dsink, return_dscore_args=False)
    with device_context(q):
        formulas = SecondOrder(problem, keywords, q, "float64", "float64")
        return formulas.double_backward({"q": q, "k": k, "v": v, **results, **optional}, cotangents, extra)


def _problem(function: str, q: Array, k: Array, v: Array, keywords: Any) -> AttentionProblem:
    """The problem of a call of a function of this module, whose keywords are checked and completed."""
    check_keywords(f"fa2cupy.reference.{function}", keywords)
    complete(keywords)
    return problem_from_arrays(q, k, v, **keywords)


def _check_shapes(
    problem: AttentionProblem, q: Array, required: Mapping[str, Any], optional: Mapping[str, Any]
) -> None:
    """Checks arrays of the shapes of o and lse, of any dtype."""
    array_backend({"q": q, **required}, optional)
    for name, array in {**required, **optional}.items():
        if array is not None:
            shape = problem.lse_shape if "lse" in name else problem.o_shape
            check_array(name, array, shape, array.dtype, "q")
