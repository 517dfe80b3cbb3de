"""The ready-made functions of fa2cupy.mods, and two more, with arguments for given sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from support.fake_cupy import place

from fa2cupy import BlockMask, mods
from fa2cupy.problem.block_mask import Intervals


class Case(NamedTuple):
    """A function and its arrays; `keyword` is the built-in keyword that does the same."""

    role: str
    function: object
    arrays: tuple = ()
    keyword: dict | None = None

    @property
    def options(self) -> dict:
        """The keywords of a call."""
        return {self.role: self.function, self.role.replace("mod", "args"): self.arrays}


def on_gpu(options: dict, copied: Callable = place) -> dict:
    """Returns keywords with arrays and maps on the simulated GPU, or on the one that `copied` copies them to."""

    def moved(value):
        if isinstance(value, tuple) and value and isinstance(value[0], np.ndarray):
            return tuple(map(copied, value))
        return copied(value) if isinstance(value, np.ndarray) else value

    found = {name: moved(value) for name, value in options.items()}
    if isinstance(found.get("block_mask"), BlockMask):
        own = found["block_mask"]
        arrays, given = map(copied, own.arguments), found.get("mask_args", ())
        intervals = Intervals(*(None if side is None else copied(side) for side in own.intervals))
        found["block_mask"] = BlockMask.of_states(copied(own.states), *own.layout[1:5], arrays, given, intervals)
    return found


def by_function(sparse: BlockMask) -> BlockMask:
    """Returns the map without its intervals, so that kernels evaluate the function."""
    return BlockMask.of_states(sparse.states, *sparse.layout[1:5], sparse.arguments, sparse._copied)


def bounded(score, b, h, q, k):
    """A function of the score alone that no keyword computes."""
    return 0.8 * np.tanh(2 * score)


def relative(score, b, h, q, k, table):
    """A function with a number of its own for each distance, by which it multiplies and which it adds."""
    return score * (1 + 0.1 * table[h, (q - k) % 401]) + table[h, (k - q) % 401]


def ready_made(batch: int, heads: int, seqlen_q: int, seqlen_k: int, wide: str = "float32") -> dict[str, Case]:
    """Returns a case of every function by name, and those of `bounded` and `relative`."""
    rng = np.random.default_rng(11)
    diagonal, longest = seqlen_k - seqlen_q, max(seqlen_q, seqlen_k)
    slopes = np.linspace(0.4, -0.1, heads).astype(wide)
    window = mods.sliding_window(9, 4, diagonal)  # alone, it would run as the keyword
    return {
        "causal": Case("mask_mod", mods.causal(diagonal), (), {"causal": True}),
        "sliding_window": Case("mask_mod", lambda b, h, q, k: window(b, h, q, k) & (k >= 0), (), {"window": (9, 4)}),
        "dilated_window": Case("mask_mod", mods.dilated_window(20, 3)),
        "neighborhood_2d": Case("mask_mod", mods.neighborhood_2d(7, 2)),
        "neighborhood": Case("mask_mod", mods.neighborhood((3, 5, 6), (2, 3, 5))),
        "prefix_lm": Case("mask_mod", mods.prefix_lm, (rng.integers(0, longest, batch),)),
        "document": Case("mask_mod", mods.document, (np.sort(rng.integers(0, 4, (batch, longest)), axis=1),)),
        "softcap": Case("score_mod", mods.softcap(0.8), (), {"softcap": 0.8}),
        "bounded": Case("score_mod", bounded),
        "relative": Case("score_mod", relative, (rng.standard_normal((heads, 401)).astype(wide),)),
        "alibi": Case("score_mod", mods.alibi(diagonal), (slopes,), {"alibi_slopes": slopes}),
        "t5_relative": Case("score_mod", mods.t5_relative(), (rng.standard_normal((32, heads)).astype(wide),)),
        "t5 of a decoder": Case(
            "score_mod", mods.t5_relative(8, 20, bidirectional=False), (rng.standard_normal((8, heads)).astype(wide),)
        ),
    }


#: Functions at edges of their derivatives: values of the score, and the derivative there, or one of those of two sides.
#: b is 0: an exponent or a base with it is not constant.
EDGES = {
    "power, constant": (lambda s, b, h, q, k: s**1.7 + s**3 + s**2 + s**0, {0.0: 0.0}),
    "power by 1": (lambda s, b, h, q, k: s ** (1.0 + b), {0.0: 1.0, 3.0: 1.0}),
    "power by 2": (lambda s, b, h, q, k: s ** (2.0 + b), {0.0: 0.0, 3.0: 6.0}),
    "power by 0": (lambda s, b, h, q, k: s ** (1.0 * b), {0.0: 0.0, 3.0: 0.0}),
    "power, steep": (lambda s, b, h, q, k: np.where(s > 0, s, 0.0) ** (0.25 + b), {0.0: 0.0, -1.0: 0.0}),
    "power of a root": (lambda s, b, h, q, k: np.sqrt(s) ** 3, {0.0: 0.0}),
    "exponent of 0": (lambda s, b, h, q, k: (1.0 * b) ** s, {0.0: 0.0, 1.0: 0.0, 2.5: 0.0}),
    "exponent of 1": (lambda s, b, h, q, k: (1.0 + b) ** s, {0.0: 0.0, 7.0: 0.0}),
    "exponent of -2": (lambda s, b, h, q, k: (b - 2.0) ** np.where(s > 9, s, 2.0), {0.0: 0.0}),
    "both": (lambda s, b, h, q, k: np.maximum(s, 0) ** np.maximum(s, 0), {0.0: 0.0, 1.0: 1.0}),
    "sqrt": (lambda s, b, h, q, k: np.sqrt(s), {0.0: np.inf, 4.0: 0.25}),
    "sqrt of where": (lambda s, b, h, q, k: np.sqrt(np.where(s > 0, s, 0.0)), {0.0: 0.0, -1.0: 0.0, 4.0: 0.25}),
    "where of sqrt": (lambda s, b, h, q, k: np.where(s > 0, np.sqrt(s), 0.0), {0.0: 0.0, -1.0: 0.0, 4.0: 0.25}),
    "x sqrt x": (lambda s, b, h, q, k: s * np.sqrt(s) + np.sqrt(s) * s, {0.0: 0.0, 4.0: 6.0}),
    "sqrt of a square": (lambda s, b, h, q, k: np.sqrt(s * s), {0.0: 0.0, 2.0: 1.0}),
    "sine of sqrt": (lambda s, b, h, q, k: np.sin(np.sqrt(np.maximum(s, 0))), {-1.0: 0.0}),
    "cosine of sqrt": (lambda s, b, h, q, k: np.cos(np.sqrt(np.maximum(s, 0))), {-1.0: 0.0}),
    "where of log": (lambda s, b, h, q, k: np.where(s > 0, np.log(s), 0.0), {0.0: 0.0, -1.0: 0.0, 2.0: 0.5}),
    "x log x": (lambda s, b, h, q, k: np.where(s > 0, s * np.log(s), 0.0), {0.0: 0.0, -1.0: 0.0, 1.0: 1.0}),
    "tanh of log": (lambda s, b, h, q, k: np.tanh(np.log(np.maximum(s, 0))), {-1.0: 0.0}),
    "bounded log1p": (lambda s, b, h, q, k: np.maximum(np.log1p(np.maximum(s, -1)), -3), {-2.0: 0.0, 0.0: 1.0}),
    "x squared log x": (lambda s, b, h, q, k: np.where(s != 0, s * s * np.log(s * s), 0), {0.0: 0.0, 1.0: 2.0}),
    "sigmoid": (lambda s, b, h, q, k: 1 / (1 + np.exp(-s)), {0.0: 0.25, -1000.0: 0.0, 1000.0: 0.0}),
    "sigmoid of base 2": (lambda s, b, h, q, k: 1 / (1 + np.exp2(-2 * s)), {-1000.0: 0.0, 1000.0: 0.0}),
    "exp of -exp": (lambda s, b, h, q, k: np.exp(-np.exp(s)) + np.exp2(-np.exp2(s)), {1000.0: 0.0, -1000.0: 0.0}),
    "exp of -1/x^2": (lambda s, b, h, q, k: np.exp(-1 / (s * s)), {0.0: 0.0}),
    "tanh of exp": (lambda s, b, h, q, k: np.tanh(np.exp(s)), {1000.0: 0.0}),
    "tanh of 1/x": (lambda s, b, h, q, k: np.tanh(1 / s), {0.0: 0.0}),
    "tanh": (lambda s, b, h, q, k: np.tanh(s), {0.0: 1.0, 1000.0: 0.0, np.inf: 0.0}),
    "a divisor of 0": (lambda s, b, h, q, k: np.where(s == 0, 0.0, 1 / s), {0.0: 0.0, 2.0: -0.25}),
    "a bounded quotient": (lambda s, b, h, q, k: np.minimum(1 / abs(s), 5.0), {0.0: 0.0, 1.0: -1.0}),
    "abs": (lambda s, b, h, q, k: abs(s) - -s, {0.0: 2.0, -1.0: 0.0}),
    "x abs x": (lambda s, b, h, q, k: s * abs(s) + abs(s) ** 1.5 - abs(s) ** 3, {0.0: 0.0}),
    "ties": (lambda s, b, h, q, k: np.minimum(s, 0.0) + np.maximum(s, 0.0), {0.0: 1.0, -1.0: 1.0, 1.0: 1.0}),
    "clip": (lambda s, b, h, q, k: np.clip(s, -1, 1), {-2.0: 0.0, -1.0: 0.0, 0.5: 1.0, 1.0: 1.0, 2.0: 0.0}),
}


def at_edges(name: str, shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns scores at which a function of `EDGES` is tested, repeated, and its derivatives there."""
    points = np.array(list(EDGES[name][1].items()), dtype)
    scores, slopes = (np.resize(column, shape) for column in points.T)
    return scores, slopes
