"""References for results: the formulas with whole score matrices, one head at a time.

`forward`, `delta` and `backward` work in float64. `baseline_forward` and `baseline_backward` are naive implementations
in the working precision, which round each matrix product to the dtype of the inputs. `fa2cupy.testing` compares results
with both.

Arguments, shapes and errors are those of the functions of the package. The functions take NumPy and CuPy arrays and
compute where these are. They share only the argument checks and the generator of dropout with the rest of the package.
A NaN in a key that a mask hides may reach the rows that it is hidden from (0 * NaN), here as in the kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .numerics.arrays import device_context
from .numerics.formulas import Formulas
from .problem.arguments import array_backend, check_array
from .problem.array_types import ArrayT
from .problem.checks import problem_from_arrays, problem_from_outputs
from .problem.feature_checks import extra_gradients
from .problem.keywords import ScoreKeywords, check_keywords, takes
from .problem.names import Layout

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "backward",
    "baseline_backward",
    "baseline_forward",
    "delta",
    "forward",
    "gradient_noise",
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
    check_keywords("fa2cupy.reference.forward", keywords)
    problem = problem_from_arrays(q, k, v, **keywords)
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
        return products.sum(axis=-1).transpose(0, 2, 1).reshape(problem.lse_shape)


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
    check_keywords("fa2cupy.reference.backward", keywords)
    problem = problem_from_arrays(q, k, v, **keywords)
    array_backend({"q": q, "o": o, "lse": lse, "do": do}, {"dlse": dlse})
    for name, array, shape in (("o", o, problem.o_shape), ("lse", lse, problem.lse_shape), ("do", do, problem.o_shape)):
        check_array(name, array, shape, array.dtype, "q")
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
    check_keywords("fa2cupy.reference.baseline_forward", keywords)
    problem = problem_from_arrays(q, k, v, **keywords)
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
    check_keywords("fa2cupy.reference.baseline_backward", keywords)
    problem = problem_from_arrays(q, k, v, **keywords)
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
    check_keywords("fa2cupy.reference.gradient_noise", keywords)
    problem = problem_from_arrays(q, k, v, **keywords)
    extra = extra_gradients(keywords, return_dbias, return_dsink, return_dscore_args)
    with device_context(q):
        return Formulas(problem, keywords, q, "float64", "float64").noise(q, k, v, o, lse, do, dlse, extra)
