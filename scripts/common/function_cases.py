"""The cases of the section functions of scripts/benchmark.py: those of `fa2cupy.mods`, and masks that users write."""

from __future__ import annotations

import dataclasses
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
#: Tokens of a block of diffusion, of a frame and of a tile of a video, whose tiles are 4 x 4 for each time; first
#: tokens that all see; global tokens, and the distance of the keys that others see; mean tokens of a branch of a tree.
BLOCK, FRAME, TILE, TILES, FIRST, GLOBALS, NEAR, BRANCH = 32, 240, 64, 4, 16, 16, 512, 32
#: Step between the queries that are counted for the number of visible pairs.
_COUNTED = 16

Arrays = tuple[np.ndarray, ...]


class Function(NamedTuple):
    """A function. One of scores is measured with the causal mask.

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
    return (_for_all(problem, np.arange(problem.seqlen) * DOCUMENTS // problem.seqlen),)


def _mixed_documents(problem: Problem) -> Arrays:
    """Returns documents of any lengths."""
    starts = np.random.default_rng(0).choice(np.arange(1, problem.seqlen), DOCUMENTS - 1, replace=False)
    return (_for_all(problem, np.searchsorted(np.sort(starts), np.arange(problem.seqlen), side="right")),)


def _answers(problem: Problem) -> Arrays:
    """Returns 0 for a prompt of a quarter of each sequence, and a number for each of the answers behind it."""
    behind = np.arange(problem.seqlen) - problem.seqlen // 4
    return (_for_all(problem, np.where(behind < 0, 0, 1 + behind * DOCUMENTS // problem.seqlen)),)


def _branches(problem: Problem) -> Arrays:
    """Returns the end of each token's descendants in a tree, in preorder, whose first quarter is a chain."""
    rng, ends, path = np.random.default_rng(0), np.full(problem.seqlen, problem.seqlen), []
    for token in range(problem.seqlen):
        if token > problem.seqlen // 4 and rng.random() * BRANCH < 1:
            kept = rng.integers(problem.seqlen // 4, len(path))  # ancestors of the next branch
            ends[path[kept:]] = token
            del path[kept:]
        path.append(token)
    return (_for_all(problem, ends),)


def _half(problem: Problem) -> Arrays:
    return (np.array([problem.seqlen // 2], "int32"),)


def _globals(problem: Problem) -> Arrays:
    """Returns 1 for a few tokens, and 0 for the others."""
    marks = np.zeros(problem.seqlen)
    marks[np.random.default_rng(0).choice(problem.seqlen, GLOBALS, replace=False)] = 1
    return (_for_all(problem, marks),)


def _for_all(problem: Problem, numbers: np.ndarray) -> np.ndarray:
    """Returns numbers of the tokens for each sequence."""
    return np.broadcast_to(numbers, (problem.batch, problem.seqlen)).astype("int32")


def tree(b, h, q, k, ends):
    """The mask of a tree of tokens in preorder: a query sees its ancestors."""
    return (k <= q) & (q < ends[b, k])


def block_diffusion(b, h, q, k, half):
    """The mask of training block diffusion: noisy tokens, and behind them the clean ones.

    Noisy blocks see themselves and earlier clean blocks; clean ones are causal by blocks.
    """
    noisy_q, noisy_k = q < half[0], k < half[0]
    block_q, block_k = q % half[0] // BLOCK, k % half[0] // BLOCK
    return (noisy_q & noisy_k & (block_k == block_q)) | (
        ~noisy_k & ((block_k < block_q) | (~noisy_q & (block_k == block_q)))
    )


def first_and_window(b, h, q, k):
    """The mask of a window beside the first tokens."""
    return (k <= q) & ((q - k <= WINDOW) | (k < FIRST))


def frames(b, h, q, k):
    """The mask of frames that see themselves and both neighbors."""
    return abs(q // FRAME - k // FRAME) <= 1


def tiles_of_tokens(b, h, q, k):
    """The mask of a video whose tokens are in the order of tiles of three axes: a tile sees those around it."""
    tile_q, tile_k = q // TILE, k // TILE
    times = abs(tile_q // TILES**2 - tile_k // TILES**2) <= 1
    rows = abs(tile_q // TILES % TILES - tile_k // TILES % TILES) <= 1
    return times & rows & (abs(tile_q % TILES - tile_k % TILES) <= 1)


def shared_prompt(b, h, q, k, answers):
    """The mask of answers to one prompt: each sees the prompt and itself, causally."""
    return (k <= q) & ((answers[b, k] == 0) | (answers[b, q] == answers[b, k]))


def causal_document(b, h, q, k, ids):
    """The mask of packed documents of a language model."""
    return (k <= q) & (ids[b, q] == ids[b, k])


def global_and_near(b, h, q, k, marks):
    """The mask of tokens that see and are seen everywhere, and others that see their neighbors."""
    return (marks[b, q] > 0) | (marks[b, k] > 0) | (abs(q - k) <= NEAR)


FUNCTIONS = {
    "softcap": Function("score_mod", mods.softcap(CAP), feature="softcap"),
    "alibi": Function("score_mod", mods.alibi(), _slopes, feature="alibi"),
    "t5_relative": Function("score_mod", mods.t5_relative(BUCKETS), _table),
    "causal": Function("mask_mod", mods.causal(), feature="plain"),
    "sliding_window": Function("mask_mod", mods.sliding_window(WINDOW), feature=f"window{WINDOW}"),
    "dilated_window": Function("mask_mod", mods.dilated_window(DILATION * WINDOW, DILATION)),
    "neighborhood_2d": Function("mask_mod", mods.neighborhood_2d(IMAGE_WIDTH, RADIUS)),
    "prefix_lm": Function("mask_mod", mods.prefix_lm, _prefixes),
    "document": Function("mask_mod", mods.document, _documents),
    "tree": Function("mask_mod", tree, _branches),
    "block_diffusion": Function("mask_mod", block_diffusion, _half),
    "first_and_window": Function("mask_mod", first_and_window),
    "frames": Function("mask_mod", frames),
    "tiles_of_tokens": Function("mask_mod", tiles_of_tokens),
    "shared_prompt": Function("mask_mod", shared_prompt, _answers),
    "causal_document": Function("mask_mod", causal_document, _mixed_documents),
    "global_and_near": Function("mask_mod", global_and_near, _globals),
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
    def small_tokens(self) -> int:
        """More rows: with fewer, more masks leave only intervals, which other kernels compare."""
        return 4 * super().small_tokens

    @property
    def plain(self) -> Case:
        """The built-in keyword that computes the same, or else the case itself."""
        feature = FUNCTIONS[self.feature].feature
        return Case(feature, dataclasses.replace(self.problem, causal=True), self.small) if feature else self

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
