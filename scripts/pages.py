"""Writes what README.md and docs/ say from the measurements of one card: tables, sentences with numbers, the picture.

    python scripts/pages.py               after a measurement, or after a change to scripts/measured/

A part of a page between ``<!-- measured: NAME -->`` and ``<!-- end of NAME -->`` is replaced by what `PARTS` makes from
the CSVs of ``scripts/results/``. docs/speed.png is drawn if matplotlib is installed.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from common import SCRIPTS
from common.plots import can_plot
from measured import features, on_numpy, picture, ranks, speed

from fa2cupy.cli import run_command

PARTS: dict[str, Callable[[], str]] = {
    "summary": speed.summary,
    "grid": speed.grid,
    "training": speed.training,
    "memory": speed.memory,
    "short calls": speed.short_calls,
    "small models": speed.small,
    "models": speed.models,
    "head dimensions": speed.head_dims,
    "wide heads": speed.wide,
    "methods": speed.methods,
    "float32": speed.float32,
    "float32 training": speed.float32_training,
    "float64": speed.float64,
    "float64 errors": speed.float64_errors,
    "second order": speed.second_order,
    "costs": features.costs,
    "peers": features.peers,
    "biases": features.biases,
    "FlexAttention, keywords": features.flex_keywords,
    "FlexAttention, functions": features.flex_functions,
    "function calls": features.function_calls,
    "maps": features.maps,
    "decode": features.decode,
    "scaleout": ranks.scaleout,
    "NumPy": on_numpy.numpy_calls,
    "language model": ranks.language_model,
}
_PART = re.compile(
    r"^(<!-- measured: (?P<name>[^\n]*) -->\n).*?(\n<!-- end of (?P=name) -->)$", re.DOTALL | re.MULTILINE
)


def pages(checkout: Path) -> list[Path]:
    """Returns the pages that may have parts."""
    return [checkout / "README.md", *sorted((checkout / "docs").glob("*.md"))]


def rewritten(text: str) -> str:
    """Returns the text of a page with its measured parts made anew."""
    return _PART.sub(lambda found: f"{found[1]}\n{PARTS[found['name']]()}\n{found[3]}", text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the pages that change."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    checkout = SCRIPTS.parent
    for page in pages(checkout):
        before = page.read_text(encoding="utf-8")
        after = rewritten(before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(page)
    if can_plot():
        picture.draw(checkout / "docs" / "speed.png")
    return 0


if __name__ == "__main__":
    sys.exit(run_command("pages.py", main))
