"""The ready-made functions of fa2cupy.mods, and two more, with arguments for given sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from support.fake_cupy import place

from fa2cupy import mods


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
    """Returns keywords with arrays on the simulated GPU, or on the one that `copied` copies them to."""

    def moved(value):
        if isinstance(value, tuple) and value and isinstance(value[0], np.ndarray):
            return tuple(map(copied, value))
        return copied(value) if isinstance(value, np.ndarray) else value

    return {name: moved(value) for name, value in options.items()}


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
    return {
        "causal": Case("mask_mod", mods.causal(diagonal), (), {"causal": True}),
        "sliding_window": Case("mask_mod", mods.sliding_window(9, 4, diagonal), (), {"window": (9, 4)}),
        "dilated_window": Case("mask_mod", mods.dilated_window(20, 3)),
        "neighborhood_2d": Case("mask_mod", mods.neighborhood_2d(7, 2)),
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
