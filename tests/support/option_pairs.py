"""Pairs of calls that differ in one option: tests of signatures check that neither is taken for the other."""

from __future__ import annotations

from support.feature_cases import booleans, numbers

from fa2cupy import TileConfig, mods

__all__ = ["option_pairs"]

TILES = (
    {"forward": TileConfig(64, 32, 4), "backward": TileConfig(32, 32, 4)},
    {"forward": TileConfig(64, 64, 4), "backward": TileConfig(64, 64, 4)},
)


def option_pairs(scores: tuple[int, int, int, int]) -> dict[str, tuple[dict, object, object]]:
    """Returns options of both calls and the two values that differ, by keyword.

    `scores` are sizes (batch, heads, queries, keys) of calls of float16 data. Both values are of one type where
    possible. Options that depend on more than these sizes are not among them.
    """
    batch, heads, _, keys = scores
    return {
        "causal": ({}, False, True),
        "softmax_scale": ({}, 0.5, 0.25),
        "layout": ({}, "bshd", "bhsd"),
        "config": ({"family": "sm80"}, *TILES),
        "family": ({}, "sm90", "sm80"),
        "num_splits": ({}, 1, 2),
        "precision": ({}, "ieee", "split"),
        "method": ({}, "single_pass", "two_pass"),
        "deterministic": ({"family": "sm80"}, False, True),
        "return_dbias": ({"bias": numbers(scores, "float16")}, False, True),
        "return_dsink": ({"sink": numbers((heads,), "float32")}, False, True),
        "delta": ({}, None, numbers(scores[:3], "float32")),
        "dlse": ({}, None, numbers(scores[:3], "float32")),
        "window": ({}, (3, 0), (3, 1)),
        "softcap": ({}, 2.0, 3.0),
        "alibi_slopes": ({}, numbers((heads,), "float32"), numbers((batch, heads), "float32")),
        "bias": ({}, numbers(scores, "float16"), numbers(scores[1:], "float16")),
        "mask": ({}, None, booleans(scores)),
        "key_padding_mask": ({}, None, booleans((batch, keys))),
        "sink": ({}, None, numbers((heads,), "float32")),
        "seed": ({"dropout_p": 0.5}, 1, 2**63),
        "score_mod": ({}, lambda score, b, h, q, k: 2 * score, lambda score, b, h, q, k: 3 * score),
        "mask_mod": ({}, mods.causal(), mods.causal(1)),
    }
