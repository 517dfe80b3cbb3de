"""Measures the schemes of `fa2cupy.distributed` on the GPUs of one host, beside one GPU that has the same work.

    python scripts/scaleout.py                          2, 4, ... GPUs, 32768 and 131072 rows
    python scripts/scaleout.py --full                   524288 and 1048576 rows, too
    python scripts/scaleout.py --ranks 4 --rows 131072 --heads 32/8 --schemes heads gather
    python scripts/scaleout.py --ranks 2 --rows 131072 --documents 64   64 documents of any lengths, packed
    python scripts/scaleout.py --rows 4096 --schemes heads --peers      ``host_ms`` of short calls
    python scripts/scaleout.py --plot-only scripts/results/h100-80gb-hbm3/scaleout.csv
    python scripts/scaleout.py --simulate --out DIR     the same on NumPy and simulated ranks: times say nothing

Forward, backward and both (``training``; up to 32768 rows also as a CUDA graph, ``graph``) of bfloat16, head_dim 128,
causal, one sequence, rows in zigzag order, one process for each GPU.

Results are checked first. Up to 32768 rows they are compared with one call of one GPU: ``error`` is the largest error
over the largest value, and ``equal`` says whether o and lse are equal bit for bit. Beyond that, two calls with
``deterministic=True`` must give equal bits (``equal``), and 64 rows of each rank are compared with float64, o, lse and
dq over all keys, dk and dv over all queries, in one K/V head (``error``). A wrong result is reported and not timed, and
the exit status is 1.

The baseline is the same work on each GPU without messages: a share of the heads (at least one K/V head), the whole
sequence, in contiguous arrays. Scheme and baseline take turns, call by call, after at least 1.5 s of work. Ranks
meet before each call, and the time of a call is that of the slowest rank, by CUDA events. ``efficiency`` is the median
of the baseline over that of the scheme; it is empty where the ranks do not divide the heads. ``tflops`` is that of one
GPU. ``extra_bytes`` is the peak of CuPy's pool (for PyTorch, of its allocator) in a call beyond inputs and results, the
largest of all ranks; in ``heads`` and ``gather`` also the memory that other ranks write, which is that of the largest
call so far.
``host_ms`` is the time that the host takes to queue a call: the least of all calls, on the slowest rank. With an even
number of ranks from four on, ``hybrid`` takes each half of them for a host.

PyTorch's context parallelism with cuDNN (``torch ring``) is timed in the same processes, if PyTorch has it. Writes
scaleout.csv after each problem and scheme, and scaleout.png. Packed documents, which only ``heads`` takes, are in
scaleout-documents.csv; their ``tflops`` count pairs within documents.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.measure import (
    TRAINING,
    Problem,
    find_gpu,
    format_bytes,
    plots_folder,
    positive_int,
    progress,
    results_folder,
    show_earlier,
    stamp_of,
    write_csv,
)
from common.plots import can_plot, line_panels
from methods import group_of_heads
from sequence_parallel.devices import GpuDevice, HostDevice
from sequence_parallel.jobs import GRAPH, PEER, SCHEMES, Job, Measurement, is_possible
from sequence_parallel.processes import RankError, on_gpus, on_host

from fa2cupy.cli import run_command
from fa2cupy.families.device import device_count
from fa2cupy.families.operations import METHODS

COLUMNS = (
    "gpu", "driver", "date", "dtype", "head_dim", "seqlen", "batch", "num_heads", "num_heads_kv", "causal", "documents",
    "ranks", "scheme", "operation", "check", "error", "equal", "calls", "ms_median", "ms_min", "ms_max",
    "alone_ms_median", "tflops", "efficiency", "extra_bytes", "host_ms",
)  # fmt: skip
ROWS, FULL_ROWS = (32768, 131072), (32768, 131072, 524288, 1048576)
HEADS = ((32, 8), (16, 4), (16, 16))
SIMULATED_ROWS, SIMULATED_HEADS = (64, 128), ((4, 2), (2, 2))


# --- rows and pictures ------------------------------------------------------------------------------------------------


def rows_of(job: Job, by_rank: Sequence[Measurement]) -> list[dict[str, object]]:
    """Returns the rows of a job, one for each operation."""
    first, rows = by_rank[0], []
    for operation in first.times:
        work = TRAINING if operation == GRAPH else operation
        times = slowest([one.times[operation] for one in by_rank])
        median = statistics.median(times)
        row: dict[str, object] = {
            **job.problem.columns(), "num_heads_kv": job.problem.heads_kv, "documents": job.documents,
            "ranks": job.ranks, "scheme": job.scheme, "operation": operation, "check": first.check,
            "error": first.error, "equal": None if first.equal is None else int(first.equal), "calls": len(times),
            "ms_median": median, "ms_min": min(times), "ms_max": max(times),
            "tflops": job.tflops(work, median) / job.ranks,
            "extra_bytes": first.extra_bytes, "host_ms": max(one.host[operation] for one in by_rank),
        }  # fmt: skip
        if all(one.alone for one in by_rank):
            row["alone_ms_median"] = statistics.median(slowest([one.alone[work] for one in by_rank]))
            row["efficiency"] = row["alone_ms_median"] / median
        rows.append(row)
    return rows


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Returns the time of each call, that of its slowest rank."""
    return [max(one) for one in zip(*by_rank, strict=True)]


def describe(job: Job, rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the rows of a job as a line."""
    both = next(row for row in rows if row["operation"] == TRAINING)
    parts = [f"{job}:"]
    for row in rows:
        efficiency = f" ({100 * row['efficiency']:.1f} %)" if "efficiency" in row else ""
        parts.append(f"{row['operation']} {row['ms_median']:.2f} ms{efficiency},")
    bits = {None: "", 0: ", rounded", 1: ", bits equal"}[both["equal"]]
    parts.append(f"{both['tflops']:.0f} TFLOP/s a rank, error {both['error']:.1e} ({both['check']}{bits})")
    extra = both["extra_bytes"]
    return " ".join(parts) + ("" if extra is None else f", {format_bytes(extra)} more memory")


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plots the efficiency of forward and backward over the rows: panels by ranks and heads, lines by scheme."""
    panels: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for row in sorted(rows, key=lambda row: (int(row["ranks"]), int(row["seqlen"]))):
        if row["operation"] == TRAINING and row.get("efficiency") not in (None, ""):
            key = (f"{row['ranks']} ranks", f"heads {row['num_heads']}/{row['num_heads_kv']}")
            series = panels.setdefault(key, {}).setdefault(str(row["scheme"]), {})
            series[int(row["seqlen"])] = 100 * float(row["efficiency"])
    if not panels:
        raise ValueError("it has no efficiencies")
    title = f"Time of one GPU with the same work over that of the ranks\n{rows[0]['gpu']}, {rows[0]['date']}"
    line_panels(path, title, "efficiency in %", 100.0, panels)


def show(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes the plot, if matplotlib is installed."""
    if can_plot():
        plot(rows, path)
        print(path)


# --- the command ------------------------------------------------------------------------------------------------------


def rank_count(text: str) -> int:
    """Parses a number of ranks of the command line."""
    if positive_int(text) < 2:
        raise argparse.ArgumentTypeError(f"expected at least 2, got {text}")
    return int(text)


def argument_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", nargs="+", type=rank_count, metavar="N", help="numbers of GPUs; default: 2, 4, ... and all")
    lengths = parser.add_mutually_exclusive_group()
    default = f"of the whole sequence; default: {' '.join(map(str, ROWS))}"
    lengths.add_argument("--rows", nargs="+", type=positive_int, metavar="N", help=default)
    lengths.add_argument("--full", action="store_true", help=f"--rows {' '.join(map(str, FULL_ROWS))}")
    heads = f"of q, and of k and v; default: {' '.join(f'{q}/{kv}' for q, kv in HEADS)}"
    add("--heads", nargs="+", type=group_of_heads, metavar="N/M", help=heads)
    names = f"of {', '.join(SCHEMES)}"
    add("--schemes", nargs="+", choices=SCHEMES, default=SCHEMES, metavar="NAME", help=names)
    add(
        "--documents", type=positive_int, default=1, metavar="N", help="into which each sequence is divided; default: 1"
    )
    add("--peers", nargs="*", choices=("torch",), default=("torch",), metavar="NAME", help="torch, or nothing")
    add("--out", metavar="DIR", help="default: scripts/results/<gpu>")
    add("--simulate", action="store_true", help="on NumPy, with simulated ranks: by default two, on tiny problems")
    add("--plot-only", metavar="CSV", help="show the efficiencies of an earlier run; needs no GPU")
    return parser


def ranks_of(count: int) -> list[int]:
    """Returns the numbers of ranks: 2, 4, ... and all GPUs."""
    return sorted({2**power for power in range(1, count.bit_length()) if 2**power <= count} | {count})


def all_jobs(options: argparse.Namespace, ranks: Sequence[int], device: type) -> list[Job]:
    """Returns the jobs by number of ranks, rows, heads and scheme, where the ranks divide the K/V heads as it needs.

    Raises
    ------
    ValueError
        The ranks cannot divide the rows into two chunks each, or there is no job.
    """
    simulated = options.simulate
    rows = options.rows or (SIMULATED_ROWS if simulated else FULL_ROWS if options.full else ROWS)
    heads = options.heads or (SIMULATED_HEADS if simulated else HEADS)
    is_packed = options.documents > 1
    peers = [PEER] if options.peers and not simulated and not is_packed and importlib.util.find_spec("torch") else []
    jobs = []
    for count in ranks:
        for length in rows:
            if length % (2 * count):
                raise ValueError(
                    f"--rows: {length} is not a multiple of {2 * count}, two chunks for each of {count} ranks"
                )
            if length < options.documents:
                raise ValueError(f"--documents: {length} rows cannot be {options.documents} documents")
            for num_heads, num_heads_kv in heads:
                problem = Problem(device.dtype, device.head_dim, length, 1, num_heads, True, num_heads_kv)
                schemes = [name for name in options.schemes if name == "heads" or not is_packed]
                schemes = [name for name in schemes if is_possible(name, num_heads_kv, count)]
                schemes += peers if schemes else []
                jobs += [Job(problem, count, scheme, options.documents) for scheme in schemes]
    if not jobs:
        raise ValueError(
            "--schemes: 'heads' needs a number of K/V heads that is a multiple of the number of ranks, and 'hybrid' "
            "an even number of ranks from 4 on and a multiple of half of it; only 'heads' has documents"
        )
    return jobs


def run(jobs: Sequence[Job], measured: Callable, stamp: Mapping[str, str], path: Path) -> tuple[list[dict], int]:
    """Measures all jobs; returns the rows, and how many jobs failed. The rows so far are written after each."""
    rows: list[dict[str, object]] = []
    failed, told = 0, set()
    with progress(len(jobs), "scaleout") as bar:
        for job, found in measured(jobs):
            if not (why := reason(job, found)):
                new = rows_of(job, found)
                rows += [{**stamp, **row} for row in new]
                bar.write(describe(job, new))
                write_csv(path, COLUMNS, rows)
            elif job.scheme != PEER:
                failed += 1
                bar.write(f"{'FAILED' if isinstance(found, str) else 'WRONG'}: {job}: {why}")
            elif why not in told:
                told.add(why)
                bar.write(f"without {job}: {why}")
            bar.update()
    return rows, failed


def reason(job: Job, found: Sequence[Measurement] | str) -> str:
    """Returns the reason why a job has no rows; empty if it has."""
    if isinstance(found, str):
        return found
    return next((one.missing for one in found if one.missing), "") or found[0].wrong(job.problem.dtype)


def by_ranks(jobs: Sequence[Job]) -> Iterator[tuple[Job, list[Measurement] | str]]:
    """Yields the results of `on_gpus` for each number of GPUs."""
    for count in dict.fromkeys(job.ranks for job in jobs):
        yield from on_gpus([job for job in jobs if job.ranks == count])


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a result was wrong or a call failed."""
    parser = argument_parser()
    options = parser.parse_args(arguments)
    if options.plot_only:
        source, chosen = Path(options.plot_only), options.out
        return show_earlier(source, lambda rows: show(rows, plots_folder(source, chosen) / f"{source.stem}.png"))
    if options.simulate and not options.out:
        parser.error("--simulate: name a folder for its results with --out DIR; they are of no GPU")
    if options.simulate and options.full:
        parser.error("--full: simulated ranks have tiny problems")
    count = 0 if options.simulate else device_count()
    if count < 2 and not options.simulate:
        there = "is one" if count else "is none"
        print(f"this needs at least two CUDA GPUs, CuPy and NCCL, and there {there}; or --simulate", file=sys.stderr)
        return 2
    ranks = options.ranks or ([2] if options.simulate else ranks_of(count))
    if count and max(ranks) > count:
        parser.error(f"--ranks: expected at most {count}, the number of GPUs, got {max(ranks)}")
    try:
        jobs = all_jobs(options, ranks, HostDevice if options.simulate else GpuDevice)
    except ValueError as error:
        parser.error(str(error))
    if options.simulate:
        stamp, measured = {"gpu": "NumPy", "date": datetime.date.today().isoformat()}, on_host
    else:
        gpu = find_gpu()
        if gpu is None:
            return 2
        stamp, measured = stamp_of(gpu), by_ranks
        print("compiling")
        gpu.precompile([jobs[0].problem], METHODS, [("cu_seqlens",) if options.documents > 1 else ()])
    path = results_folder(stamp["gpu"], options.out) / f"scaleout{'-documents' if options.documents > 1 else ''}.csv"
    try:
        rows, failed = run(jobs, measured, stamp, path)
    except RankError as error:
        print(f"scaleout.py: {error}", file=sys.stderr)
        return 1
    if any("efficiency" in row for row in rows):
        show(rows, path.with_suffix(".png"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_command("scaleout.py", main))
