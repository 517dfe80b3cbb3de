"""When do the atomics of `single_pass` pay? Both backward methods, by length, head dimension and size of the grid.

    python scripts/methods.py                               about a minute on an H100
    python scripts/methods.py --head-dims 128 --tokens 4096
    python scripts/methods.py --plot-only scripts/results/h100-80gb-hbm3/methods.csv

`single_pass` computes five matrix products for each pair of tiles and adds dQ up in memory; `two_pass` computes seven
and needs no sums. Both compute the same gradients, which is checked first. Then they take turns, on inputs larger than
twice the L2 cache where there are that many. ``tokens`` are batch * seqlen; num_heads * head_dim is 2048, so that
tokens set the size of the grid. ``ratio`` is the median over rounds of the time of `two_pass` over that of
`single_pass`: above 1 the atomics pay. What `fa2cupy.backward` takes by default is in `fa2cupy/families.py`, from these
numbers. Writes methods.csv and methods.png.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.check import HeadCheck, check_equal
from common.measure import (
    Gpu,
    Problem,
    find_gpu,
    positive_int,
    progress,
    results_folder,
    sets_beyond_cache,
    show_earlier,
    stamp_of,
    supported_head_dim,
    time_in_rounds,
    write_csv,
)
from common.peers import Fa2cupy
from common.plots import can_plot, line_panels

from fa2cupy.cli import run_command
from fa2cupy.families.choice import choose_family
from fa2cupy.problem.checks import problem_from_arrays

METHODS = ("single_pass", "two_pass")
COLUMNS = (
    "gpu", "driver", "date", "dtype", "head_dim", "tokens", "seqlen", "batch", "num_heads", "causal",
    "single_pass_ms", "two_pass_ms", "single_pass_tflops", "two_pass_tflops", "ratio", "default",
)  # fmt: skip
DTYPE, MODEL_DIM = "bfloat16", 2048
HEAD_DIMS = (64, 128, 256)
TOKENS = (2048, 16384, 65536)
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
ROUNDS, BUDGET_MS = 5, 8.0


def problems(head_dims: Sequence[int], tokens: Sequence[int]) -> Iterator[Problem]:
    """All sizes, of each number of tokens the lengths that divide it."""
    for head_dim in head_dims:
        for count in tokens:
            for seqlen in SEQLENS:
                if count % seqlen == 0:
                    for causal in (False, True):
                        yield Problem(DTYPE, head_dim, seqlen, count // seqlen, MODEL_DIM // head_dim, causal)


def measure(gpu: Gpu, problem: Problem, rng: random.Random) -> dict[str, object]:
    """A row: both methods, checked and timed.

    Raises
    ------
    AssertionError
        A gradient is wrong.
    """
    ours = Fa2cupy(gpu)
    sets = [
        gpu.tensors(problem, seed) for seed in range(sets_beyond_cache(3 * problem.tensor_bytes, gpu.info.l2_bytes))
    ]
    check = HeadCheck(gpu.xp, problem, sets[0])
    for method in METHODS:
        check.verify(method)
    candidates = [ours.candidate(problem, sets, method) for method in METHODS]
    check_equal(problem, *(candidate.call() for candidate in candidates))
    named = [dataclasses.replace(candidate, name=method) for candidate, method in zip(candidates, METHODS, strict=True)]
    q, k, v = sets[0].q, sets[0].k, sets[0].v
    times = time_in_rounds(gpu, named, ROUNDS, BUDGET_MS, rng)
    row = {**vars(problem), "causal": int(problem.causal), "tokens": problem.batch * problem.seqlen}
    for method in METHODS:
        row[f"{method}_ms"] = statistics.median(times[method])
        row[f"{method}_tflops"] = problem.tflops(method, row[f"{method}_ms"])
    row["ratio"] = statistics.median(b / a for a, b in zip(times["single_pass"], times["two_pass"], strict=True))
    family = choose_family("backward", problem.dtype, gpu.info)
    row["default"] = family.default_method(problem_from_arrays(q, k, v, causal=problem.causal))
    return row


def plot(rows: Sequence[dict[str, object]], path: Path) -> None:
    """The ratio over the length: a panel for each mask and head_dim, a line for each number of tokens."""
    panels: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for row in rows:
        mask = "causal" if int(row["causal"]) else "full"
        panel = panels.setdefault((mask, f"head_dim {row['head_dim']}"), {})
        panel.setdefault(f"{row['tokens']} tokens", {})[int(row["seqlen"])] = float(row["ratio"])
    title = f"Time of two_pass over single_pass on {rows[0]['gpu']}, {rows[0]['date']}: above 1 the atomics pay"
    line_panels(path, title, "two_pass / single_pass", 1.0, panels)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a gradient was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", nargs="+", type=supported_head_dim, default=HEAD_DIMS, metavar="N")
    parser.add_argument("--tokens", nargs="+", type=positive_int, default=TOKENS, metavar="N", help="batch * seqlen")
    parser.add_argument("--out", metavar="DIR", help="default: scripts/results/<gpu>")
    parser.add_argument("--plot-only", metavar="CSV", help="draw the plot of an earlier run; needs no GPU")
    options = parser.parse_args(arguments)
    if options.plot_only:
        path = Path(options.plot_only).with_suffix(".png")
        return show_earlier(options.plot_only, lambda rows: plot(rows, path) if can_plot() else None)
    gpu = find_gpu()
    if gpu is None:
        return 2
    folder = results_folder(gpu.name, options.out)
    stamp = stamp_of(gpu)
    work, rows, wrong, rng = list(problems(options.head_dims, options.tokens)), [], 0, random.Random(0)
    gpu.precompile(work, METHODS)
    with progress(len(work), "methods") as bar:
        for problem in work:
            gpu.release()
            try:
                rows.append({**stamp, **measure(gpu, problem, rng)})
            except AssertionError as error:
                wrong += 1
                bar.write(f"WRONG: {problem}: {error}")
            else:
                bar.write(f"{problem}: {rows[-1]['ratio']:.2f}")
            bar.update()
    write_csv(folder / "methods.csv", COLUMNS, [{name: row[name] for name in COLUMNS} for row in rows])
    if rows and can_plot():
        plot(rows, folder / "methods.png")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(run_command("methods.py", main))
