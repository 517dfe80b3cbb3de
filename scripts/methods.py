"""Compares the default with every method and number of splits, by heads, batch, length, head dimension and mask.

    python scripts/methods.py                               about three minutes on an H100
    python scripts/methods.py --operations backward --head-dims 128 --heads 8/1 16/2
    python scripts/methods.py --batches 1 --seqlens 2048 8192 --masks causal
    python scripts/methods.py --show scripts/results/h100-80gb-hbm3/methods.csv
    python scripts/methods.py --judge scripts/results/h100-80gb-hbm3/methods.csv

A caller who names neither ``method`` nor ``num_splits`` leaves two decisions to the package. The first is the method of
a backward: `single_pass` computes five matrix products for each pair of tiles and adds dQ up in memory; `two_pass`
computes seven and needs no sums. The second is the number of thread blocks that share the work on one tile, in a
forward and in a backward: more blocks speed up a grid that is too small for the GPU, and any other grid pays for their
sums. A forward of the last few queries alone, against all keys, has the smallest grids. Both decisions are made in
`fa2cupy/families/`, and follow from the results of this script. It measures the default and all choices in bfloat16.
Of 1, 2, 4, 8 and 16 splits it tries those that leave each split at least a tile, up to 4 blocks for each
multiprocessor. Choices that a kernel rejects are left out.

The default's results are checked against float64 first, and those of all choices against the default's. Then they take
turns, on inputs larger than twice the L2 cache. The fastest of several choices is partly so by chance, so that the
default is compared to it on new measurements: ``loss`` is the median over rounds of the default's time over that of the
best choice, less 1. It should be below 0.03 everywhere and 0.01 on average. Writes methods.csv, a row for each choice
and one, with the loss, for the default.

After a change to the estimates, ``--judge`` rewrites the rows of the default in the files of an earlier run. They then
have the choice of the present default, and its loss to the fastest choice by the times of that run. It needs no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from common.check import HeadCheck, check_equal
from common.measure import (
    DEFAULT,
    Candidate,
    Gpu,
    Problem,
    Tensors,
    find_gpu,
    flops,
    positive_int,
    progress,
    results_folder,
    rotating_inputs,
    show_earlier,
    stamp_of,
    supported_head_dim,
    taking_turns,
    time_in_rounds,
    visible_pairs,
    write_csv,
)
from common.peers import default_choice

import fa2cupy
from fa2cupy.cli import run_command
from fa2cupy.errors import UnsupportedProblemError
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.operations import METHODS

COLUMNS = (
    "gpu", "driver", "date", "operation", "dtype", "head_dim", "seqlen", "batch", "num_heads", "num_heads_kv", "causal",
    "window", "queries", "method", "num_splits", "ms_median", "ms_min", "ms_max", "tflops", "taken", "best", "loss",
)  # fmt: skip
DTYPE = "bfloat16"
OPERATIONS, MASKS = ("forward", "backward"), ("full", "causal", "window")
HEAD_DIMS = (64, 128, 256)
HEADS = ((16, 16), (16, 2), (8, 1), (64, 8))
BATCHES = (1, 4)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
WINDOW = 1023
#: Numbers of queries of the forwards with few of them, against at least eight times as many keys.
QUERIES = (128, 1024)
SPLITS = (1, 2, 4, 8, 16)

#: Limits of a problem. Larger ones fill the GPU many times over, as smaller ones do, and take most of the time.
MOST_TOKENS, MOST_FLOPS = 16384, 0.6e12
#: Approximate rows of a tile, and the blocks for each multiprocessor beyond which more splits are pointless.
TILE_ROWS, MOST_WAVES = 128, 4
#: Rounds in which the best choice is found, and in which the default is compared to it.
ROUNDS, ROUNDS_OF_TWO, BUDGET_MS = 3, 7, 2.0

#: Wanted limits of each loss and of their mean.
MOST_LOSS, MOST_MEAN_LOSS = 0.03, 0.01


class Choice(NamedTuple):
    """The decisions of a caller; None leaves one to the package."""

    method: str | None = None
    num_splits: int | None = None

    @property
    def keywords(self) -> dict[str, object]:
        """Keywords of the call."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def __str__(self) -> str:
        named = [self.method, f"{self.num_splits} splits" if self.num_splits else None]
        return ", ".join(filter(None, named)) or DEFAULT


class Cell(NamedTuple):
    """A call without its choices.

    Attributes
    ----------
    operation : str
    problem : Problem
    window : int or None
        Keys to the left of the diagonal that are visible.
    queries : int or None
        How many of the last queries a forward has; None for all.
    """

    operation: str
    problem: Problem
    window: int | None = None
    queries: int | None = None

    @property
    def options(self) -> dict[str, object]:
        """Keywords of the call."""
        return {"causal": self.problem.causal} | ({} if self.window is None else {"window": (self.window, 0)})

    @property
    def flops(self) -> float:
        """Floating-point operations on the visible pairs."""
        operation, problem = "forward" if self.operation == "forward" else DEFAULT, self.problem
        if self.queries:
            unseen = self.queries * (self.queries - 1) / 2 if problem.causal else 0
            pairs = self.queries * problem.seqlen - unseen
            return flops(operation, problem.batch * problem.num_heads * pairs, problem.head_dim)
        if self.window is None:
            return problem.flops(operation)
        pairs = problem.batch * problem.num_heads * visible_pairs(problem.seqlen, self.window)
        return flops(operation, pairs, problem.head_dim)

    def choices(self, multiprocessors: int) -> Iterator[Choice]:
        """Yields all sensible choices."""
        problem = self.problem
        is_forward = self.operation == "forward"
        heads = problem.num_heads if is_forward else problem.heads_kv
        tiles = problem.batch * heads * -(-(self.queries or problem.seqlen) // TILE_ROWS)
        rows = problem.seqlen if self.window is None else min(problem.seqlen, self.window + TILE_ROWS)
        longest = rows // TILE_ROWS * (1 if is_forward else problem.num_heads // heads)
        for method in (None,) if is_forward else METHODS:
            for splits in SPLITS:
                if method == "one_tile" and (problem.seqlen > TILE_ROWS or splits > 1):
                    continue
                if splits == 1 or (splits <= longest and tiles * splits <= MOST_WAVES * multiprocessors):
                    yield Choice(method, splits)

    def __str__(self) -> str:
        queries = f" queries={self.queries}" if self.queries else ""
        return f"{self.operation} {self.problem}" + ("" if self.window is None else f" window={self.window}") + queries


def all_cells(
    operations: Sequence[str],
    head_dims: Sequence[int],
    heads: Sequence[tuple[int, int]],
    batches: Sequence[int],
    seqlens: Sequence[int],
    masks: Sequence[str],
    queries: Sequence[int],
) -> Iterator[Cell]:
    """Yields every combination that is not too large; windows and few queries only for much longer sequences."""
    for head_dim in head_dims:
        for num_heads, num_heads_kv in heads:
            for batch in batches:
                for seqlen in seqlens:
                    for mask in masks:
                        window = WINDOW if mask == "window" else None
                        problem = Problem(DTYPE, head_dim, seqlen, batch, num_heads, mask != "full", num_heads_kv)
                        fits = Cell("forward", problem, window).flops <= MOST_FLOPS and batch * seqlen <= MOST_TOKENS
                        if fits and (window is None or seqlen >= 4 * window):
                            yield from (Cell(operation, problem, window) for operation in operations)
                        few = [n for n in queries if "forward" in operations and window is None and seqlen >= 8 * n]
                        if batch * seqlen <= MOST_TOKENS:
                            yield from (Cell("forward", problem, None, n) for n in few)


def measure(
    gpu: Gpu, cell: Cell, sets: Sequence[Tensors], check: HeadCheck, rng: random.Random, write: Callable[[str], object]
) -> list[dict[str, object]]:
    """Returns a row for each choice, checked and timed, and the last one for the default.

    Raises
    ------
    AssertionError
        A result is wrong.
    """
    problem = cell.problem
    check.verify("forward" if cell.operation == "forward" else DEFAULT)
    inputs = list(_inputs(cell, sets))
    default = _candidate(cell, Choice(), inputs)
    wanted = _compared(cell, default.call())
    if cell.queries:
        whole = fa2cupy.forward(sets[0].q, sets[0].k, sets[0].v, **cell.options)
        check_equal(problem, _compared(cell, (whole[0][:, -cell.queries :],)), wanted)
    candidates = {Choice(): default}
    for choice in cell.choices(gpu.info.multiprocessors):
        candidate = _candidate(cell, choice, inputs)
        try:
            results = candidate.call()
        except (ValueError, UnsupportedProblemError) as error:
            write(f"{cell}: without {choice}: {str(error).splitlines()[0][:160]}")
            continue
        check_equal(problem, wanted, _compared(cell, results))
        candidates[choice] = candidate
    times = time_in_rounds(gpu, list(candidates.values()), ROUNDS, BUDGET_MS, rng)
    rows = [_row(cell, choice, times[candidate.name]) for choice, candidate in candidates.items()]
    rows.append(rows.pop(0))
    if len(candidates) > 1:
        medians = {choice: statistics.median(times[str(choice)]) for choice in candidates if choice != Choice()}
        best = min(medians, key=medians.__getitem__)
        again = time_in_rounds(gpu, [default, candidates[best]], ROUNDS_OF_TWO, BUDGET_MS, rng)
        pairs = zip(again[str(Choice())], again[str(best)], strict=True)
        rows[-1].update(best=str(best), loss=statistics.median(mine / theirs for mine, theirs in pairs) - 1)
    rows[-1]["taken"] = str(default_of(gpu.info, cell))
    return rows


def default_of(device: DeviceInfo, cell: Cell) -> Choice:
    """Returns the choice of the package."""
    features = {name: value for name, value in cell.options.items() if name != "causal"}
    chosen = default_choice(device, cell.problem, cell.operation, queries=cell.queries, **features)
    return Choice(chosen.method, max(chosen.num_splits.values(), default=1))


def judge(device: DeviceInfo, rows: Sequence[dict[str, str]]) -> list[dict[str, object]]:
    """Returns the rows, with the default's rewritten to its present choice or to the nearest number of splits."""
    judged: list[dict[str, object]] = []
    for cell, group in itertools.groupby(rows, _cell_of):
        *measured, default = group
        times = {Choice(r["method"] or None, int(r["num_splits"])): float(r["ms_median"]) for r in measured}
        taken = default_of(device, cell)
        alike = [choice for choice in times if choice.method == taken.method]
        nearest = min(alike, key=lambda choice: abs(math.log(choice.num_splits / taken.num_splits)))
        best = min(times, key=times.__getitem__)
        row = measured[list(times).index(nearest)]
        new = {**row, "method": DEFAULT, "num_splits": "", "taken": str(taken)}
        if len(times) > 1:
            new |= {"best": str(best), "loss": times[nearest] / times[best] - 1}
        judged += [*measured, {**default, **new}]
    return judged


def _cell_of(row: Mapping[str, str]) -> Cell:
    sizes = {name: int(row[name]) for name in ("head_dim", "seqlen", "batch", "num_heads", "num_heads_kv")}
    problem = Problem(row["dtype"], **sizes, causal=row["causal"] == "1")
    window, queries = (int(row[name]) if row[name] else None for name in ("window", "queries"))
    return Cell(row["operation"], problem, window, queries)


def _inputs(cell: Cell, sets: Sequence[Tensors]) -> Iterator[tuple]:
    """Yields arguments of the call. A backward's o and lse are computed here, outside of the timing."""
    for t in sets:
        q, k, v = t.q[:, -(cell.queries or 0) :], t.k, t.v
        yield (q, k, v) if cell.operation == "forward" else (q, k, v, *fa2cupy.forward(q, k, v, **cell.options), t.do)


def _candidate(cell: Cell, choice: Choice, inputs: Sequence[tuple]) -> Candidate:
    function = fa2cupy.forward if cell.operation == "forward" else fa2cupy.backward
    call = partial(function, **cell.options, **choice.keywords)
    return Candidate(str(choice), taking_turns([partial(call, *arguments) for arguments in inputs]))


def _compared(cell: Cell, results: tuple) -> tuple:
    """Returns o of a forward, or all gradients of a backward."""
    return results[:1] if cell.operation == "forward" else results


def _row(cell: Cell, choice: Choice, samples: Sequence[float]) -> dict[str, object]:
    median = statistics.median(samples)
    return {
        **cell.problem.columns(), "operation": cell.operation, "num_heads_kv": cell.problem.heads_kv,
        "window": cell.window, "queries": cell.queries, "method": DEFAULT if choice == Choice() else choice.method,
        "num_splits": choice.num_splits, "ms_median": median, "ms_min": min(samples), "ms_max": max(samples),
        "tflops": cell.flops / median / 1e9,
    }  # fmt: skip


def describe(row: Mapping[str, object]) -> str:
    """Returns the time, the choice and the loss of a default's row, as text."""
    taken = f", {row['taken']}" if row.get("taken") else ""
    loss = f"; {100 * row['loss']:+.1f} % beside {row['best']}" if "loss" in row else "; no choice beside it"
    return f"{row['ms_median']:.3f} ms{taken}{loss}"


def summary(rows: Iterable[Mapping[str, object]]) -> list[str]:
    """Returns the losses by operation, heads and head_dim, and of all, as lines."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        if row["method"] == DEFAULT and row.get("loss") not in (None, ""):
            heads = f"{row['num_heads']}/{row['num_heads_kv']}"
            few = " of few queries" if row["queries"] else ""
            for name in (f"{row['operation']:9s}heads {heads:6s}head_dim {row['head_dim']}{few}", "all"):
                groups.setdefault(name, []).append(float(row["loss"]))
    everything = groups.pop("all", None)
    if everything is None:
        return []
    wanted = f"wanted: {100 * MOST_LOSS:.0f} % at most, {100 * MOST_MEAN_LOSS:.0f} % on average"
    beyond = sum(loss > MOST_LOSS for loss in everything)
    return [
        *(_losses(name, losses) for name, losses in groups.items()),
        f"{_losses('all', everything)}; {beyond} beyond what is wanted ({wanted})",
    ]


def _losses(name: str, losses: Sequence[float]) -> str:
    mean = 100 * statistics.mean(losses)
    return f"{name:51s}loses at most {100 * max(losses):5.1f} %, on average {mean:5.1f} % ({len(losses)} problems)"


def show(rows: Sequence[Mapping[str, object]]) -> None:
    """Prints the losses of a run."""
    lines = summary(rows)
    if not lines:
        raise ValueError("it has no losses")
    print(*lines, sep="\n")


def rewrite(rows: Sequence[dict[str, str]], path: Path, arch: str) -> None:
    """Rewrites the rows of the default in the CSV of an earlier run, and shows its losses."""
    judged = judge(DeviceInfo.named(arch), rows)
    write_csv(path, COLUMNS, judged)
    show(judged)


def group_of_heads(text: str) -> tuple[int, int]:
    """Parses ``16/2`` of the command line."""
    numbers = text.split("/")
    if len(numbers) != 2 or not all(number.isdecimal() and int(number) for number in numbers):
        raise argparse.ArgumentTypeError(f"expected two numbers such as 16/2, got {text!r}")
    num_heads, num_heads_kv = map(int, numbers)
    if num_heads % num_heads_kv:
        raise argparse.ArgumentTypeError(f"{num_heads} is not a multiple of {num_heads_kv}")
    return num_heads, num_heads_kv


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    for name, values in (("operations", OPERATIONS), ("masks", MASKS)):
        add(f"--{name}", nargs="+", choices=values, default=values, metavar="NAME", help=f"of {', '.join(values)}")
    add("--head-dims", nargs="+", type=supported_head_dim, default=HEAD_DIMS, metavar="N")
    heads = f"of q, and of k and v; default: {' '.join(f'{q}/{kv}' for q, kv in HEADS)}"
    add("--heads", nargs="+", type=group_of_heads, default=HEADS, metavar="N/M", help=heads)
    for name, sizes in (("batches", BATCHES), ("seqlens", SEQLENS)):
        default = f"default: {' '.join(map(str, sizes))}; at most {MOST_TOKENS} tokens together"
        add(f"--{name}", nargs="+", type=positive_int, default=sizes, metavar="N", help=default)
    few = f"of forwards with few queries; default: {' '.join(map(str, QUERIES))}; 0: none"
    add("--queries", nargs="+", type=int, default=QUERIES, metavar="N", help=few)
    add("--only-queries", action="store_true", help="no others than these")
    add("--out", metavar="DIR", help="default: scripts/results/<gpu>")
    add("--show", metavar="CSV", help="show the losses of an earlier run; needs no GPU")
    add("--judge", metavar="CSV", help="what the present default loses by the times of an earlier run; needs no GPU")
    add("--arch", default="sm_90", metavar="NAME", help="of the GPU of that run; default: %(default)s")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, gpu: Gpu, path: Path) -> tuple[list[dict[str, object]], int]:
    """Measures all cells; returns the rows, and how many cells failed. The rows so far are written after each."""
    axes = (options.operations, options.head_dims, options.heads, options.batches, options.seqlens, options.masks)
    found = all_cells(*axes, [n for n in options.queries if n > 0])
    cells, rows, failed = [cell for cell in found if cell.queries or not options.only_queries], [], 0
    stamp, rng = stamp_of(gpu), random.Random(0)
    print("compiling")
    methods = METHODS if "backward" in options.operations else ()
    features = [names for names in ((), ("window",)) if any((cell.window is not None) == bool(names) for cell in cells)]
    gpu.precompile([cell.problem for cell in cells], methods, features)
    with progress(len(cells), "methods") as bar:
        for (problem, window), same_inputs in itertools.groupby(cells, lambda cell: (cell.problem, cell.window)):
            gpu.release()
            sets = rotating_inputs(gpu, problem)
            check = HeadCheck(gpu.xp, problem, sets[0], window)
            for cell in same_inputs:
                try:
                    measured = measure(gpu, cell, sets, check, rng, bar.write)
                except Exception as error:  # a wrong result, or any failure to get one: the other cells go on
                    failed += 1
                    kind = "WRONG" if isinstance(error, AssertionError) else "FAILED"
                    bar.write(f"{kind}: {cell}: {error}")
                else:
                    rows += [{**stamp, **row} for row in measured]
                    bar.write(f"{cell}: {describe(rows[-1])}")
                    write_csv(path, COLUMNS, rows)
                bar.update()
    return rows, failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a result was wrong or a call failed."""
    options = parse_arguments(arguments)
    if options.show:
        return show_earlier(options.show, show, "--show")
    if options.judge:
        return show_earlier(options.judge, lambda rows: rewrite(rows, Path(options.judge), options.arch), "--judge")
    gpu = find_gpu()
    if gpu is None:
        return 2
    folder = results_folder(gpu.name, options.out)
    rows, failed = run(options, gpu, folder / "methods.csv")
    if any("loss" in row for row in rows):
        show(rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_command("methods.py", main))
