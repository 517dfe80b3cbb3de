"""Draws docs/patterns.svg: the tiles of sparse patterns, from the maps that `fa2cupy.block_mask` makes of them.

It needs NumPy alone, and a second.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

import numpy as np
from common import SCRIPTS

import fa2cupy
from fa2cupy import BlockMask, mods
from fa2cupy.cli import run_command

__all__ = ["PATH", "drawing", "maps"]

PATH = SCRIPTS.parent / "docs" / "patterns.svg"
SEQLEN, TILE = 512, (32, 32)
#: Pixels of a tile, between panels, and above one for its title.
STEP, GAP, TITLE = 9, 18, 20
COLUMNS = 4
#: Of tiles that are mixed, and full.
COLORS = ("#9fb8d9", "#274b7d")


def maps() -> Iterator[tuple[str, BlockMask]]:
    """Yields the patterns by their titles."""
    lengths = [90, 30, 200, 72, 120]
    functions = {
        "causal()": (mods.causal(), ()),
        "sliding_window(127)": (mods.sliding_window(127), ()),
        "sliding_window(64, 64)": (mods.sliding_window(64, 64), ()),
        "dilated_window(256, 4)": (mods.dilated_window(256, 4), ()),
        "prefix_lm": (mods.prefix_lm, (np.array([160]),)),
        "document": (mods.document, (np.repeat(np.arange(len(lengths)), lengths)[None],)),
        "neighborhood_2d(32, 3)": (mods.neighborhood_2d(32, 3), ()),
    }
    for name, (function, arrays) in functions.items():
        yield name, fa2cupy.block_mask(function, arrays, 1, 1, SEQLEN, SEQLEN, tile=TILE)
    count = SEQLEN // TILE[0]
    best = np.random.default_rng(0).random((count, count)) < 0.15
    yield "BlockMask(tiles, ...)", BlockMask(best | np.eye(count, dtype=bool), SEQLEN, SEQLEN, TILE)


def drawing() -> str:
    """Returns the picture: queries from top to bottom, keys from left to right."""
    side = SEQLEN // TILE[0] * STEP
    panels = list(maps())
    lines = -(-len(panels) // COLUMNS)
    width, height = GAP + COLUMNS * (side + GAP), lines * (TITLE + side + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for number, (name, sparse) in enumerate(panels):
        line, column = divmod(number, COLUMNS)
        x, y = GAP + column * (side + GAP), TITLE + line * (TITLE + side + GAP)
        parts.append(f'<text x="{x}" y="{y - 6}">{name}</text>')
        states = sparse.states[0, 0]
        for state, color in enumerate(COLORS, start=1):
            path = "".join(_rows(states == state, x, y))
            if path:
                parts.append(f'<path fill="{color}" d="{path}"/>')
        parts.append(f'<rect x="{x}" y="{y}" width="{side}" height="{side}" fill="none" stroke="#888888"/>')
    return "\n".join((*parts, "</svg>", ""))


def _rows(chosen: np.ndarray, x: int, y: int) -> Iterator[str]:
    """Yields one rectangle for neighbouring tiles of a row."""
    for number, row in enumerate(chosen):
        ends = np.flatnonzero(np.diff(row, prepend=False, append=False)).tolist()
        for start, stop in zip(ends[::2], ends[1::2], strict=True):
            yield f"M{x + start * STEP} {y + number * STEP}h{(stop - start) * STEP}v{STEP}h-{(stop - start) * STEP}z"


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the picture."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(
        arguments
    )
    PATH.write_text(drawing(), encoding="utf-8")
    print(PATH)
    return 0


if __name__ == "__main__":
    sys.exit(run_command("patterns.py", main))
