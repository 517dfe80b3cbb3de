"""Checks that a change costs no speed: an older checkout and this one, timed in turns on one GPU.

    git worktree add ../before 2219f09
    python scripts/compare.py ../before                        the grid of the benchmark, and features
    python scripts/compare.py ../before --cells "d128 .*sink"  the cells whose names match
    python scripts/compare.py ../before --pairs 3 --again 1.02

Each checkout works in a process of its own. Both have the same inputs, and their results are compared. Then the calls
of both are timed in turns with CUDA events, so that clocks and temperatures are the same for both. The addresses that a
process gets change the time of a cell by a few per cent, so that one pair of processes shows only large losses:
`--again` measures cells above a ratio in further pairs, and the ratio of a cell is the median of its pairs. One set of
inputs is larger than the L2 cache, or nearly so. Writes ``compare.csv``.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from common import ROOT, SCRIPTS
from common.checkout import FEATURES, Cell
from common.measure import find_gpu, positive_int, progress, results_folder, write_csv

from fa2cupy.cli import run_command

HEAD_DIMS, SEQLENS = (32, 64, 96, 128, 256), (512, 2048, 4096, 16384)
OPERATIONS = ("forward", "single_pass", "two_pass")
FEATURE_HEAD_DIMS, FEATURE_SEQLENS = (64, 128), (2048, 16384)
#: Milliseconds of one timing, and the fewest and the most calls in it.
TIMING_MS, FEWEST_CALLS, MOST_CALLS = 8, 2, 40
#: Largest difference between the two results, relative to the largest value: the rounding of 16-bit outputs.
TOLERANCE = 2**-6
WORKER = SCRIPTS / "common" / "checkout.py"
COLUMNS = ("gpu", "date", "before", "cell", "pairs", "ms_before", "ms_now", "ratio", "ratio_min", "ratio_max")


def all_cells(dtypes: Sequence[str]) -> Iterator[Cell]:
    """Yields the grid of the benchmark, then features, with a backward by the default method."""
    for cell in itertools.product(dtypes, HEAD_DIMS, SEQLENS, (False, True), OPERATIONS):
        yield Cell(*cell)
    features = itertools.product(FEATURE_HEAD_DIMS, FEATURE_SEQLENS, (True,), ("forward", "default"), FEATURES)
    for cell in itertools.starmap(functools.partial(Cell, dtypes[0]), features):
        row = FEATURES[cell.feature]
        is_of_another = cell.operation == "forward" and row.of_backward
        if cell.feature and not is_of_another and (cell.seqlen == FEATURE_SEQLENS[0] or not row.is_short):
            yield cell


class Checkout:
    """A worker's process, with the package of `folder`."""

    def __init__(self, folder: Path, cache: str | None):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))}
        environment["PYTHONSAFEPATH"] = "1"  # else the modules beside the worker would hide others of their names
        if cache:
            environment["FA2CUPY_CACHE_DIR"] = cache
        command = [sys.executable, str(WORKER)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=environment, cwd=folder, **pipes)

    def ask(self, question: object):
        """Returns the worker's answer. Raises RuntimeError if its process has ended; its output says why."""
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(f"the process of a checkout ended: exit code {self._process.wait()}")
        return json.loads(answer)

    def close(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait()


def measure(
    cells: Sequence[Cell], folders: Sequence[Path], caches: Sequence[str | None], rounds: int
) -> tuple[str, dict[Cell, tuple[float, float]]]:
    """Times cells in a new pair of processes; returns the GPU's name and the milliseconds of both checkouts.

    Raises
    ------
    AssertionError
        Results of the two checkouts differ.
    """
    times, gpu = {}, ""
    with contextlib.ExitStack() as stack:
        checkouts = [Checkout(*one) for one in zip(folders, caches, strict=True)]
        for checkout in checkouts:
            stack.callback(checkout.close)
        bar = stack.enter_context(progress(len(cells), "compare"))
        for cell in cells:
            answers = [checkout.ask(cell) for checkout in checkouts]
            gpu = answers[0]["gpu"]
            bound = TOLERANCE * answers[0]["largest"]
            difference = max(abs(x - y) for x, y in zip(*(answer["sample"] for answer in answers), strict=True))
            assert difference <= bound, f"{cell}: results differ by {difference:.3g}, allowed are {bound:.3g}"
            calls = int(TIMING_MS / max(answer["ms"] for answer in answers))
            calls = min(MOST_CALLS, max(FEWEST_CALLS, calls))
            timed: list[list[float]] = [[], []]
            for number in range(rounds):
                for which in (0, 1) if number % 2 else (1, 0):  # the first of two finds the GPU cooler
                    timed[which].append(checkouts[which].ask(calls))
            times[cell] = tuple(map(statistics.median, timed))
            bar.update()
    return gpu, times


def ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns the time of this checkout over that of the older one: the median over pairs of processes."""
    return statistics.median(now / before for before, now in pairs)


def row_of(cell: Cell, pairs: Sequence[tuple[float, float]]) -> dict[str, object]:
    """Returns a row of the results."""
    before, now = map(statistics.median, zip(*pairs, strict=True))
    ratios = [now / before for before, now in pairs]
    spread = {"ratio_min": min(ratios), "ratio_max": max(ratios)}
    return {"cell": str(cell), "pairs": len(pairs), "ms_before": before, "ms_now": now, "ratio": ratio(pairs), **spread}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a cell is slower than `--again` allows, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="folder of the older checkout")
    parser.add_argument("--cells", default="", metavar="REGEX", help="those whose names match; default: all")
    dtypes = {"nargs": "+", "default": ["bfloat16"], "choices": ("float16", "bfloat16"), "metavar": "NAME"}
    parser.add_argument("--dtypes", **dtypes, help="of float16, bfloat16; default: bfloat16")
    rounds = {"type": positive_int, "metavar": "N"}
    parser.add_argument("--rounds", **rounds, default=6, help="of timing in a pair of processes; default: %(default)s")
    parser.add_argument("--pairs", **rounds, default=3, help="of processes, the first included; default: %(default)s")
    again = "measure slower cells in all pairs; default: %(default)s"
    parser.add_argument("--again", type=float, default=1.02, metavar="RATIO", help=again)
    parser.add_argument("--caches", nargs=2, default=(None, None), metavar="FOLDER", help="compiled kernels: old, new")
    parser.add_argument("--out", metavar="DIR", help="default: scripts/results/<gpu>")
    options = parser.parse_args(arguments)
    if not (options.before / "fa2cupy" / "__init__.py").is_file():
        parser.error(f"before: {options.before} is no checkout of fa2cupy")
    cells = [cell for cell in all_cells(options.dtypes) if re.search(options.cells, str(cell))]
    if not cells:
        parser.error(f"--cells: {options.cells!r} matches no name such as {next(all_cells(options.dtypes))}")
    if find_gpu() is None:
        return 2
    both = ([options.before.resolve(), ROOT], options.caches, options.rounds)
    gpu, times = measure(cells, *both)
    pairs = {cell: [pair] for cell, pair in times.items()}
    slow = [cell for cell in cells if ratio(pairs[cell]) > options.again]
    for _ in range(options.pairs - 1) if slow else ():
        for cell, pair in measure(slow, *both)[1].items():
            pairs[cell].append(pair)
    rows = [row_of(cell, pairs[cell]) for cell in cells]
    stamp = {"gpu": gpu, "date": datetime.date.today().isoformat(), "before": options.before.name}
    write_csv(results_folder(gpu, options.out) / "compare.csv", COLUMNS, [stamp | row for row in rows])
    for row in sorted(rows, key=lambda row: row["ratio"], reverse=True):
        print("{cell:50} {ms_before:9.4f} -> {ms_now:9.4f} ms  {ratio:.3f} ({pairs} pairs)".format(**row))
    return int(any(row["ratio"] > options.again for row in rows))


if __name__ == "__main__":
    sys.exit(run_command("compare.py", main))
