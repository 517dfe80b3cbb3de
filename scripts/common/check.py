"""Checks results before they are timed: one K/V head of ours against float64, all heads of the peers against ours."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

from common.measure import Problem, Tensors, backward_options

import fa2cupy
from fa2cupy import TileConfig, reference
from fa2cupy.problem.checks import problem_from_arrays
from fa2cupy.testing import Expectation, assert_within_baseline

__all__ = ["FeatureCheck", "HeadCheck", "check_equal", "check_finite"]

#: Score elements that the reference has in memory at a time: 256 MiB in float64.
BLOCK_ELEMENTS = 2**25

#: Largest difference between two right implementations, relative to the largest value; a wrong tile is off by 1.
_TOLERANCES = {"float16": 1e-2, "bfloat16": 5e-2, "float32": 1e-4, "float64": 1e-10}


class HeadCheck:
    """A check of the last K/V head of the last batch, and of its query heads, by the rule of `fa2cupy.testing`.

    A float64 score matrix of a long sequence does not fit into memory. Queries are therefore taken in blocks. Each
    block is a problem of its own: its rows with all the keys that they see. Gradients of k and v are sums over blocks.

    `window` is the number of keys that are visible to the left of the diagonal, if that is limited; `precision` is that
    of all calls.
    """

    def __init__(self, xp, problem: Problem, tensors: Tensors, window: int | None = None, precision: str | None = None):
        self._xp, self._problem, self._tensors, self._precision = xp, problem, tensors, precision
        self._group = slice(-(problem.num_heads // problem.heads_kv), None)
        t, group = tensors, self._group
        heads = (t.q[-1][:, group], t.k[-1][:, -1:], t.v[-1][:, -1:], t.do[-1][:, group])
        self._heads = tuple(map(xp.ascontiguousarray, heads))
        self._options = {"causal": problem.causal, **({} if window is None else {"window": (window, 0)})}
        self._single = problem_from_arrays(*self._heads[:3], **self._options)

    def verify(self, operation: str, config: Mapping[str, TileConfig] | None = None, family: str | None = None) -> None:
        """Runs ours into arrays full of NaN and compares the results with the reference.

        The operations are those of `common.measure.backward_options`, and ``forward``.

        Raises
        ------
        AssertionError
            A result is wrong, or an element of it was not written.
        """
        t, group = self._tensors, self._group
        options = {**self._options, "family": family, "precision": self._precision}
        forward = {"o": self._unwritten(t.do.shape, t.do.dtype), "lse": self._unwritten(*self._statistics)}
        forward_config = config if operation == "forward" else None
        fa2cupy.forward(t.q, t.k, t.v, out=tuple(forward.values()), config=forward_config, **options)
        if operation == "forward":
            self._compare({"o": forward["o"][-1][:, group], "lse": forward["lse"][-1, group]}, self._forward)
            return
        out = {name: self._unwritten(a.shape, a.dtype) for name, a in (("dq", t.q), ("dk", t.k), ("dv", t.v))}
        arguments = (t.q, t.k, t.v, *forward.values(), t.do)
        how = backward_options(operation)
        fa2cupy.backward(*arguments, out=tuple(out.values()), config=config, **how, **options)
        heads = {"dq": group, "dk": slice(-1, None), "dv": slice(-1, None)}
        self._compare({name: array[-1][:, heads[name]] for name, array in out.items()}, self._backward)

    @property
    def _statistics(self) -> tuple[tuple[int, ...], str]:
        problem = self._problem
        return (problem.batch, problem.num_heads, problem.seqlen), self._single.accumulator_dtype

    def _unwritten(self, shape: tuple[int, ...], dtype):
        return self._xp.full(shape, float("nan"), dtype)

    def _compare(self, results: Mapping[str, object], standards: Mapping[str, tuple]) -> None:
        for name, result in results.items():
            assert_within_baseline(name, result, *standards[name], problem=self._single)

    def _blocks(self) -> Iterator[tuple[slice, slice, tuple]]:
        """Yields rows, keys and their part of q, k, v. Masks align to the bottom right: a part keeps its mask."""
        q, k, v, _ = self._heads
        seqlen = self._problem.seqlen
        height = max(1, BLOCK_ELEMENTS // seqlen)
        for start in range(0, seqlen, height):
            rows = slice(start, min(start + height, seqlen))
            keys = slice(0, rows.stop if self._problem.causal else seqlen)
            yield rows, keys, (q[rows], k[keys], v[keys])

    @functools.cached_property
    def _forward(self) -> dict[str, tuple]:
        standards = []
        for function in (reference.forward, reference.baseline_forward):
            parts = [function(*inputs, **self._options) for _, _, inputs in self._blocks()]
            rows = ((0, [o for o, _ in parts]), (1, [lse for _, lse in parts]))  # the axis of o's rows, and of lse's
            standards.append([self._xp.concatenate([a.astype("float64") for a in each], axis) for axis, each in rows])
        return dict(zip(("o", "lse"), zip(*standards, strict=True), strict=True))

    @functools.cached_property
    def _backward(self) -> dict[str, tuple]:
        do = self._heads[3]
        standards = [[self._xp.zeros(array.shape) for array in self._heads[:3]] for _ in range(2)]
        for rows, keys, inputs in self._blocks():
            o, lse = reference.forward(*inputs, **self._options)
            parts = (
                reference.backward(*inputs, o, lse, do[rows], **self._options),
                reference.baseline_backward(*inputs, do[rows], **self._options),
            )
            for (dq, dk, dv), part in zip(standards, parts, strict=True):
                dq[rows] += part[0].astype("float64")
                dk[keys] += part[1].astype("float64")
                dv[keys] += part[2].astype("float64")
        return dict(zip(("dq", "dk", "dv"), zip(*standards, strict=True), strict=True))


class FeatureCheck:
    """A check of a call with features, on arrays that are small enough for whole score matrices in float64.

    `options` are those of `fa2cupy.forward`; `gradients` names those of `fa2cupy.backward` besides dq, dk and dv.
    """

    def __init__(self, q, k, v, do, gradients: Sequence[str] = (), **options):
        self._inputs, self._do, self._options = (q, k, v), do, options
        self._gradients = ("dq", "dk", "dv", *gradients)
        self._more = {f"return_{name}": True for name in gradients}
        self._expected = Expectation(q, k, v, do, **options)

    def verify(
        self, operation: str, method: str | None = None, family: str | None = None, num_splits: int | None = None
    ) -> None:
        """Does the same as `HeadCheck.verify`; the operations are ``forward`` and ``backward``."""
        options = {**self._options, "family": family, "num_splits": num_splits}
        results = fa2cupy.forward(*self._inputs, out=self._expected.unwritten("o", "lse"), **options)
        if operation == "forward":
            self._expected.check(spec=family, **dict(zip(("o", "lse"), results, strict=True)))
            return
        out = self._expected.unwritten(*self._gradients)
        arguments = (*self._inputs, *results, self._do)
        fa2cupy.backward(*arguments, method=method, out=out, **self._more, **options)
        self._expected.check(spec=(method, family), **dict(zip(self._gradients, out, strict=True)))


def check_finite(xp, results: Sequence) -> None:
    """Checks that no element is NaN or infinite.

    Raises
    ------
    AssertionError
        An element is.
    """
    for index, result in enumerate(results):
        if not bool(xp.isfinite(result.astype("float32")).all()):
            raise AssertionError(f"result {index} is not finite everywhere")


def check_equal(problem: Problem, ours: Sequence, theirs: Sequence) -> None:
    """Checks that two implementations' results are equal in all heads, except for rounding.

    Raises
    ------
    AssertionError
        They are not, or one has a NaN.
    """
    allowed, wide = _TOLERANCES[problem.dtype], "float64" if problem.dtype == "float64" else "float32"
    for index, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        our, their = our.astype(wide), their.astype(wide)
        difference = float(abs(their - our).max()) / float(abs(our).max())
        if not difference <= allowed:
            raise AssertionError(
                f"result {index} differs from fa2cupy's by {difference:.2g} of the largest value, not {allowed:.2g}"
            )
