"""The cases of the section functions of scripts/benchmark.py: the ready-made functions of `fa2cupy.mods`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from common.feature_cases import DTYPE, MODEL_DIM, TOKENS, Case, Options
from common.measure import Problem, flops

import fa2cupy
from fa2cupy import mods

__all__ = ["FUNCTIONS", "SEQLENS", "FunctionCase", "all_cases", "distance_buckets"]

SEQLENS = (8192, 16384)
CAP, WINDOW, DILATION, IMAGE_WIDTH, RADIUS, BUCKETS, DOCUMENTS = 30.0, 1023, 4, 128, 8, 32, 16
#: Step between the queries that are counted for the number of visible pairs.
_COUNTED = 16

Arrays = tuple[np.ndarray, ...]


class Function(NamedTuple):
    """A ready-made function. A function of scores is measured with the causal mask.

    Attributes
    ----------
    role : str
        The keyword.
    function : callable
    arrays : callable
        Its arrays, from a problem.
    feature : str
        The row of `common.feature_cases.FEATURES` that computes the same by a keyword of its own, or "".
    """

    role: str
    function: Callable
    arrays: Callable[[Problem], Arrays] = lambda problem: ()
    feature: str = ""


def _slopes(problem: Problem) -> Arrays:
    """Returns the slopes of the built-in feature."""
    heads = np.arange(1, problem.num_heads + 1)
    return ((2.0 ** (-8 * heads / problem.num_heads)).astype("float32"),)


def _table(problem: Problem) -> Arrays:
    return (np.random.default_rng(0).standard_normal((BUCKETS, problem.num_heads)).astype("float32"),)


def _prefixes(problem: Problem) -> Arrays:
    """Returns prefixes of a quarter of each sequence."""
    return (np.full(problem.batch, problem.seqlen // 4, "int32"),)


def _documents(problem: Problem) -> Arrays:
    """Returns documents of equal lengths."""
    ids = np.arange(problem.seqlen) * DOCUMENTS // problem.seqlen
    return (np.broadcast_to(ids, (problem.batch, problem.seqlen)).astype("int32"),)


FUNCTIONS = {
    "softcap": Function("score_mod", mods.softcap(CAP), feature="softcap"),
    "alibi": Function("score_mod", mods.alibi(), _slopes, feature="alibi"),
    "t5_relative": Function("score_mod", mods.t5_relative(BUCKETS), _table),
    "causal": Function("mask_mod", mods.causal()),
    "sliding_window": Function("mask_mod", mods.sliding_window(WINDOW)),
    "dilated_window": Function("mask_mod", mods.dilated_window(DILATION * WINDOW, DILATION)),
    "neighborhood_2d": Function("mask_mod", mods.neighborhood_2d(IMAGE_WIDTH, RADIUS)),
    "prefix_lm": Function("mask_mod", mods.prefix_lm, _prefixes),
    "document": Function("mask_mod", mods.document, _documents),
}


@dataclass(frozen=True)
class FunctionCase(Case):
    """A function at one size; `feature` is its name in `FUNCTIONS`."""

    @property
    def operations(self) -> tuple[str, ...]:
        """The measured operations."""
        return ("forward", "backward")

    @property
    def gradients(self) -> tuple[str, ...]:
        """None: gradients of arrays are not measured."""
        return ()

    @property
    def is_random(self) -> bool:
        """False: no function draws random elements."""
        return False

    @property
    def window(self) -> int | None:
        """None: kernels do not know what functions hide."""
        return None

    @property
    def plain(self) -> Case:
        """The built-in keyword that computes the same, or else the case itself."""
        feature = FUNCTIONS[self.feature].feature
        return Case(feature, self.problem, self.small) if feature else self

    def options(self, xp, seed: int) -> Options:
        """Returns the keywords of the function, causal among them. A mask comes with its map."""
        row, problem = FUNCTIONS[self.feature], self.problem
        arrays = tuple(map(xp.asarray, row.arrays(problem)))
        own = {"causal": problem.causal, row.role: row.function, row.role.replace("mod", "args"): arrays}
        if row.role == "mask_mod":
            sizes = (problem.batch, problem.num_heads, problem.seqlen, problem.seqlen)
            own["block_mask"] = fa2cupy.block_mask(row.function, arrays, *sizes, like=xp.empty(0))
        return own

    def flops(self, operation: str) -> float:
        """Returns the floating-point operations on visible pairs."""
        problem = self.problem
        if FUNCTIONS[self.feature].role == "score_mod":
            return problem.flops(operation)
        return flops(operation, problem.num_heads * _visible_pairs(self.feature, problem), problem.head_dim)


@functools.lru_cache(maxsize=None)
def _visible_pairs(name: str, problem: Problem) -> int:
    """Estimates the visible pairs of all sequences from a sample of the queries."""
    row = FUNCTIONS[name]
    queries, keys = np.arange(0, problem.seqlen, _COUNTED)[:, None], np.arange(problem.seqlen)
    visible = (row.function(b, 0, queries, keys, *row.arrays(problem)).sum() for b in range(problem.batch))
    return _COUNTED * int(sum(visible))


def distance_buckets(longest: int) -> np.ndarray:
    """Returns T5's bucket of each distance of a key from its query, from -longest to longest."""
    distance = np.arange(-longest, longest + 1)
    numbers = np.arange(BUCKETS, dtype="float64")[:, None]
    function = FUNCTIONS["t5_relative"].function
    return function(0.0, 0, 0, np.maximum(-distance, 0), np.maximum(distance, 0), numbers).astype("int64")


def all_cases(names: Sequence[str], head_dims: Sequence[int]) -> Iterator[FunctionCase]:
    """Yields the cases of each function, those that share their inputs in succession."""
    for head_dim in head_dims:
        for seqlen in SEQLENS:
            for name in names:
                causal = FUNCTIONS[name].role == "score_mod"
                problem = Problem(DTYPE, head_dim, seqlen, TOKENS // seqlen, MODEL_DIM // head_dim, causal)
                yield FunctionCase(name, problem)
