"""Compares results with the float64 reference; the error of a naive baseline gives the bound.

With ``e = max|result - reference|`` and ``E = max|baseline - reference|``, ``e`` must be at most

    o of 16-bit data           2 E + 1e-5 of the largest reference value
    dq, dk, dv of 16-bit data  3 E + 1e-5 of the largest
    lse of 16-bit data         1e-4; 1e-3 if the largest is above 32; 1e-6 of the largest where that is more
    o, dq, dk, dv of float32   1e-5 of the largest (1e-12 for float64)
    dbias, dsink, dscore_args  as dq
    lse of float32             1e-5 of the largest, or of 1 where that is more (1e-12 for float64)
    delta                      1e-5 of the largest (1e-12 for float64)

and NaN and infinities must be exactly where the reference has them. Reference and baseline have the features of the
call. Where terms cancel, the rounding errors of delta, dq, dk, dbias and dsink (`reference.gradient_noise`) are added
to the bound. All functions take NumPy and CuPy arrays.

The largest error is that of few elements, and its bound may not detect one rounding too many. The root mean square of
the errors of 16-bit results is therefore bounded, too. It must be at most

    o, dv        0.75 of the baseline's        (kernels that round P once and no score: 0.11 to 0.65)
    dq, dk       0.90                          (0.18 to 0.75; 0.83 where P is rounded before dS is made of it)

The kernels have the values in parentheses for head_dim 8 to 256, with and without features, and 0.5 to 0.6 for normal
inputs and a few hundred keys. For such inputs, scores rounded to 16 bits give 0.92 to 1.1 for o and dv, a P with one
bit less gives 0.85 to 1.3, and a dS with one bit less gives 0.9 to 1.1 for dq and dk.

The second bound applies if all of the following hold:

- There are at least 64 keys. If few keys are visible, P is often 1, which no rounding changes.
- The root mean square of the reference is at least 32 times the dtype's smallest normal number. P is subnormal where
  results are smaller.
- The baseline's error is 2.3 to 5 times the error of rounding the reference. Below that range the rounding of the
  result dominates, which no implementation avoids. Above it one key has nearly all of a row's P, dS is a difference of
  large terms, and most of the error comes from that of o, which is an input.
- There are at least 100 errors, counted as ``sum(e**2)**2 / sum(e**4)`` of the baseline's errors, and 16 rows of them,
  counted in the same way with ``sum(e**2)`` of a row for ``e**2``: the errors in a row share the roundings of P or dS.

lse and delta have no second bound because the first is tight enough; dbias, dsink and dscore_args have none because
they are sums of few terms, or of many that cancel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from . import reference
from .numerics.arrays import array_module, device_context
from .numerics.comparison import Comparison, assert_within_baseline, largest
from .problem.arguments import array_backend, check_int
from .problem.array_types import Array
from .problem.block_mask import check_length
from .problem.checks import check_layout, problem_from_arrays, problem_from_outputs
from .problem.choices import check_dtype
from .problem.feature_checks import extra_gradients
from .problem.features import complete
from .problem.function_checks import floating_arguments
from .problem.keywords import ScoreKeywords, check_keywords, takes
from .problem.names import Layout

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Comparison", "Expectation", "assert_within_baseline", "check_delta", "check_gradients", "make_inputs"]


@takes(ScoreKeywords)
class Expectation:
    """Reference and baseline of one problem, computed at first use and compared with any number of results.

    Parameters
    ----------
    q, k, v : ndarray
    do : ndarray, optional
        Gradient for o; required to check gradients.
    dlse : ndarray, optional
        Gradient for lse.
    causal, softmax_scale, layout, **keywords
        As for `fa2cupy.forward`.

    Examples
    --------
    >>> import fa2cupy
    >>> q, k, v, do = make_inputs("float16", seqlen_q=100)
    >>> expected = Expectation(q, k, v, do, causal=True)
    >>> o, lse = fa2cupy.forward(q, k, v, causal=True, out=expected.unwritten("o", "lse"))
    >>> expected.check(o=o, lse=lse)["o"].percent <= 100
    True
    """

    def __init__(
        self,
        q: Array,
        k: Array,
        v: Array,
        do: Array | None = None,
        *,
        dlse: Array | None = None,
        **keywords: Unpack[ScoreKeywords],
    ):
        check_keywords("fa2cupy.testing.Expectation", keywords)
        options: dict[str, Any] = {**keywords}
        complete(options)
        self._inputs, self._do, self._options = (q, k, v), do, options
        self._gradient_options = options | {"dlse": dlse}
        self.problem = problem_from_arrays(q, k, v, **options)
        wanted = {f"return_d{name}": options.get(name) is not None for name in ("bias", "sink")}
        wanted["return_dscore_args"] = options.get("score_mod") is not None and bool(floating_arguments(options))
        self._extra = extra_gradients(options, **wanted)
        self._gradient_options |= wanted

    def unwritten(self, *names: str) -> tuple[Array, ...]:
        """New arrays for the named results, to pass as ``out=``. They are all NaN, so that unwritten elements fail."""
        self._check_names(names)
        q, k, v = self._inputs
        xp = array_module(q)
        with device_context(q):
            lse = xp.empty(self.problem.lse_shape, self.problem.accumulator_dtype)
            o = xp.empty(self.problem.o_shape, q.dtype)
            like = {"o": o, "lse": lse, "dq": q, "dk": k, "dv": v, **self._extra}
            return tuple(xp.full(like[name].shape, np.nan, like[name].dtype) for name in names)

    def check(self, *, spec: object = None, **results: Array) -> dict[str, Comparison]:
        """Compares results with the reference by the rule at the top of this module.

        Parameters
        ----------
        spec : object, optional
            Kernel or tile that the text of a failure names.
        **results : ndarray
            Any of o, lse, dq, dk, dv, dbias, dsink, and ``**{"dscore_args[0]": ...}`` and so on.

        Returns
        -------
        dict of Comparison by name

        Raises
        ------
        AssertionError
            As for `assert_within_baseline`.
        """
        self._check_names(results)
        comparisons = {}
        for name, result in results.items():
            array_backend({name: result})
            standards = self._forward[name] if name in ("o", "lse") else self._backward[name]
            comparisons[name] = assert_within_baseline(name, result, *standards, problem=self.problem, spec=spec)
        return comparisons

    def _check_names(self, names: Iterable[str]) -> None:
        known = ("o", "lse", "dq", "dk", "dv", *self._extra)
        for name in names:
            if name not in known:
                hint = "; fa2cupy.testing.check_delta compares it" if name == "delta" else ""
                raise ValueError(f"{name}: expected the name of a result, {', '.join(known)}{hint}")

    @functools.cached_property
    def _forward(self) -> dict[str, tuple[Array, Array, float]]:
        wanted = reference.forward(*self._inputs, **self._options)
        baseline = reference.baseline_forward(*self._inputs, **self._options)
        pairs = zip(("o", "lse"), wanted, baseline, strict=True)
        return {name: (exact, naive, 0.0) for name, exact, naive in pairs}

    @functools.cached_property
    def _backward(self) -> dict[str, tuple[Array, Array, float]]:
        if self._do is None:
            raise ValueError("do: gradients are compared for one; write Expectation(q, k, v, do, ...)")
        o, lse = (self._forward[name][0] for name in ("o", "lse"))
        options = self._gradient_options
        names = ("dq", "dk", "dv", *self._extra)
        wanted = reference.backward(*self._inputs, o, lse, self._do, **options)
        baseline = reference.baseline_backward(*self._inputs, self._do, **options)
        noise = reference.gradient_noise(*self._inputs, o, lse, self._do, **options)
        pairs = zip(names, wanted, baseline, strict=True)
        return {name: (exact, naive, noise.get(name, 0.0)) for name, exact, naive in pairs}


def check_delta(o: Array, do: Array, delta: Array, *, layout: Layout = "bshd", spec: object = None) -> Comparison:
    """Compares a result of `fa2cupy.delta` with the reference.

    Parameters
    ----------
    o, do, layout
        As for `fa2cupy.delta`.
    delta : ndarray
        The result.
    spec : object, optional
        Kernel or tile that the text of a failure names.

    Returns
    -------
    Comparison

    Raises
    ------
    AssertionError
        As for `assert_within_baseline`.
    """
    problem = problem_from_outputs(o, do, layout=layout)
    wanted = reference.delta(o, do, layout=layout)
    with device_context(o):
        noise = largest(reference.delta(abs(o.astype("float64")), abs(do.astype("float64")), layout=layout))
    return assert_within_baseline("delta", delta, wanted, wanted, noise, problem=problem, spec=spec)


def check_gradients(
    loss: Callable[..., Any],
    arrays: Sequence[Array],
    gradients: Sequence[Array],
    *,
    directions: int = 2,
    step: float = 1e-5,
    tolerance: float = 1e-6,
    seed: int = 0,
) -> list[float]:
    """Compares gradients in float64 with central differences of a loss, along random directions.

    A direction takes two calls of the loss for each array, whatever its size.

    Parameters
    ----------
    loss : callable
        Takes `arrays` and returns a number.
    arrays, gradients : sequence of ndarray
        Points of float64, and the gradients of the loss there.
    directions : int, optional
        Number of directions for each array.
    step : float, optional
        Length of a difference, relative to the root mean square of the array.
    tolerance : float, optional
        Largest difference, relative to what a gradient of the same norm changes along a typical direction.
    seed : int, optional
        Of the directions.

    Returns
    -------
    list of float
        The largest relative difference of each array.

    Raises
    ------
    AssertionError
        A gradient differs by more than the tolerance.

    Examples
    --------
    >>> import fa2cupy
    >>> q, k, v, do = make_inputs("float64", seqlen_q=20, head_dim=8)
    >>> o, backprop = fa2cupy.attention(q, k, v, causal=True)
    >>> _ = check_gradients(
    ...     lambda *x: (fa2cupy.forward(*x, causal=True)[0] * do).sum(), (q, k, v), backprop(do)
    ... )
    """
    if len(gradients) != len(arrays):
        raise ValueError(f"gradients: expected {len(arrays)} of them, as many as arrays, got {len(gradients)}")
    for index, (x, gradient) in enumerate(zip(arrays, gradients, strict=True)):
        for name, one in (("arrays", x), ("gradients", gradient)):
            array_backend({f"{name}[{index}]": one})
            if one.dtype != "float64":
                raise ValueError(f"{name}[{index}]: finite differences are compared in float64, got {one.dtype}")
        if gradient.shape != x.shape:
            raise ValueError(f"gradients[{index}]: expected shape {x.shape}, got {gradient.shape}")
    if check_int("directions", directions) < 1:
        raise ValueError(f"directions: expected at least 1, got {directions}")
    rng, found = np.random.default_rng(seed), []
    for index, (x, gradient) in enumerate(zip(arrays, gradients, strict=True)):
        xp = array_module(x)
        with device_context(x):
            size = float(xp.sqrt((x * x).mean())) if x.size else 0.0
            norm = (size or 1.0) * float(xp.sqrt((gradient * gradient).sum()))
            errors = []
            for _ in range(directions):
                direction = (size or 1.0) * xp.asarray(rng.standard_normal(x.shape))
                ahead, behind = (
                    float(loss(*arrays[:index], x + move * direction, *arrays[index + 1 :])) for move in (step, -step)
                )
                difference = (ahead - behind) / (2 * step) - float((gradient * direction).sum())
                errors.append(abs(difference) / (norm or 1.0))
        worst = float(np.max(errors))  # of NaN, NaN
        if not worst <= tolerance:
            raise AssertionError(
                f"gradients[{index}] differs from finite differences by {worst:.2g} of its norm, not {tolerance:.2g}"
            )
        found.append(worst)
    return found


def make_inputs(
    dtype: DTypeLike = "float32",
    *,
    batch: int = 1,
    seqlen_q: int = 128,
    seqlen_k: int | None = None,
    num_heads: int = 2,
    num_heads_kv: int | None = None,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    layout: Layout = "bshd",
    magnitude: float = 1.0,
    seed: int = 0,
    xp: ModuleType = np,
) -> tuple[Array, Array, Array, Array]:
    """Normally distributed q, k, v and do, with the same values for NumPy and CuPy.

    Parameters
    ----------
    dtype : str or dtype, optional
        A dtype that `fa2cupy.forward` takes.
    batch, seqlen_q, seqlen_k, num_heads, num_heads_kv, head_dim, head_dim_v, layout : optional
        Sizes and layout as for `fa2cupy.forward`. By default those of k and v are q's.
    magnitude : float, optional
        Standard deviation.
    seed : int, optional
    xp : module, optional
        ``numpy`` or ``cupy``.

    Returns
    -------
    q, k, v, do : ndarray
        Arrays of four axes, with the shapes of `fa2cupy.forward` and `fa2cupy.backward`.
    """
    rng = np.random.default_rng(seed)
    known = check_dtype(dtype)
    dtype = np.dtype(ml_dtypes.bfloat16 if known == "bfloat16" else known)
    check_layout(layout)
    if not hasattr(xp, "asarray"):
        raise TypeError(f"xp: expected the module numpy or cupy, got {type(xp).__name__}")
    sizes = {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "num_heads": num_heads}
    sizes |= {"num_heads_kv": num_heads_kv, "head_dim": head_dim, "head_dim_v": head_dim_v}
    for name, size in sizes.items():
        if size is not None:
            check_length(name, size)

    def draw(seqlen: int, heads: int, columns: int) -> Array:
        inner = (seqlen, heads) if layout == "bshd" else (heads, seqlen)
        drawn = rng.standard_normal((batch, *inner, columns), dtype="float64" if dtype == "float64" else "float32")
        return xp.asarray(magnitude * drawn).astype(dtype)

    q = (seqlen_q, num_heads)
    k = (seqlen_q if seqlen_k is None else seqlen_k, num_heads if num_heads_kv is None else num_heads_kv)
    columns_v = head_dim if head_dim_v is None else head_dim_v
    return draw(*q, head_dim), draw(*k, head_dim), draw(*k, columns_v), draw(*q, columns_v)
