"""Measures the cost of each feature of attention, beside the plain causal call and PyTorch's implementations.

    python scripts/features.py                          about four minutes on an H100, most of it PyTorch's compiler
    python scripts/features.py --peers flash cudnn efficient    without FlexAttention, which needs it: 1.5 minutes
    python scripts/features.py --features softcap alibi --head-dims 128 --seqlens 16384
    python scripts/features.py --families default sm80  a row for each family

16384 tokens of bfloat16 (batch * seqlen), num_heads * head_dim = 2048, causal, standard normal inputs, forward and
backward by the default method:

    window127, ...         ``window=(127, 0)``, where it is shorter than the sequences
    softcap                30
    alibi, padding, sink   slopes by head; keys hidden at the end of each sequence; a sink by head, with its gradient
    mask, bias, bias_batch arrays as large as the scores of one head (mask, bias_batch) or sequence (bias), up to 2048
                           keys
    bias_full              one as large as all scores, for as many sequences as make 1 GiB
    dbias, ...             a backward that gives the gradient of such a bias, too
    dropout                0.1
    packed                 16 sequences of 131 to 2557 rows, beside 16 of 1024

The peers are FlashAttention-2, cuDNN and the memory-efficient operator, as PyTorch ships them, compiled FlexAttention,
and with the package flash-attn-4 FlashAttention-4 and FlexAttention on its kernels, each for the features that it has.
Results are checked first: ours on 512 rows against float64, by the kernels that are timed, and the peers' against ours,
except for dropout, where each draws its own elements. A wrong result is reported and not timed. Then plain call,
feature and peers take turns in rounds, on inputs larger than twice the L2 cache. ``tflops`` counts the pairs of query
and key that causal masks, windows and packed sequences leave; pairs that masks and padding hide are counted, too.
``over_plain`` is the median over rounds of the time of the plain call over that of the feature, with the same
``family=``: at 1 the feature costs nothing, and windows are above 1. For packed sequences it is their TFLOP/s over
those of equal lengths. Without a family the two calls may run on kernels of different families: ``family`` names that
of the feature. ``ratio`` is the median over rounds of the peer's time over ours, by the first of --families: above 1,
ours is faster. Writes features.csv.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from common.check import FeatureCheck, check_equal, check_finite
from common.feature_cases import FEATURES, HEAD_DIMS, SEQLENS, TOKENS, Case, Kernels, all_cases
from common.feature_peers import CudnnFeatures, EfficientFeatures, Flash4Features, FlashFeatures
from common.flex import FlexAttention, FlexFlash
from common.measure import (
    Candidate,
    Gpu,
    Tensors,
    find_gpu,
    positive_int,
    progress,
    results_folder,
    rotating_inputs,
    stamp_of,
    supported_head_dim,
    taking_turns,
    time_in_rounds,
    write_csv,
)
from common.peers import available_peers
from common.tables import ratio_table, smallest_ratio

import fa2cupy
from fa2cupy.cli import run_command
from fa2cupy.errors import UnsupportedProblemError
from fa2cupy.families.registry import FAMILIES

COLUMNS = (
    "gpu", "driver", "date", "dtype", "head_dim", "seqlen", "batch", "num_heads", "causal", "feature", "operation",
    "family", "method", "provider", "ms_median", "ms_min", "ms_max", "tflops", "over_plain", "ratio",
)  # fmt: skip
OURS, DEFAULT = "fa2cupy", "default"
BUDGET_MS = 8.0

#: The peers that need no compiler of PyTorch's, and all.
OPERATORS = {
    "flash": FlashFeatures, "cudnn": CudnnFeatures, "efficient": EfficientFeatures, "flash4": Flash4Features,
}  # fmt: skip
PEERS = {**OPERATORS, "flex": FlexAttention, "flex_flash": FlexFlash}

#: The least over_plain that is wanted, by feature and seqlen (None: any), and the least ratio to FlexAttention.
GOALS = {("window1023", 16384): 5.0, ("softcap", None): 0.85, ("alibi", None): 0.85, ("packed", None): 0.9}
RATIO_GOAL = 1.3


class Timed(NamedTuple):
    """A case on one family, ready to be timed: the names of its candidate and of the plain one, and its kernels."""

    name: str
    plain: str
    kernels: Kernels


class FeatureBenchmark:
    """One run: the device, the available peers, and the rows and failures so far."""

    def __init__(self, gpu: Gpu, peers: Sequence, families: Sequence[str], rounds: int, budget_ms: float = BUDGET_MS):
        self.gpu, self.peers, self.rounds, self.budget_ms = gpu, peers, rounds, budget_ms
        self.families = {name: None if name == DEFAULT else name for name in families}
        self.rows: list[dict[str, object]] = []
        self.failures: list[str] = []
        self._rng = random.Random(0)
        self._inputs: tuple[object, list[Tensors]] = (None, [])
        self._checks: dict[tuple, Exception | None] = {}
        self._stamp = stamp_of(gpu)

    def compile(self, cases: Iterable[Case]) -> None:
        """Compiles the kernels of the cases, in parallel."""
        specs = []
        for case in cases:
            for operation in case.operations:
                for family in self.families.values():
                    for each in (case.plain, case):
                        try:
                            specs += each.kernels(self.gpu.info, operation, family).specs
                        except UnsupportedProblemError:
                            continue  # reported when it is measured
        self.gpu.compile(specs)

    def measure(self, case: Case, write: Callable[[str], object]) -> None:
        """Checks and times a case. A failure is noted; the rest goes on."""
        try:
            self._release()
            sets = self._sets(case)
            options = [case.options(self.gpu.xp, seed) for seed in range(len(sets))]
        except Exception as error:  # no memory for a bias, say: the next case may do with less
            self._fail(f"FAILED: {case}: {describe_error(error)}")
            return
        for operation in case.operations:
            try:
                self._measure(case, operation, sets, options, write)
            except Exception as error:  # of the clock or the device, in candidates that have worked before
                self._fail(f"FAILED: {case} {operation}: {describe_error(error)}")

    def _measure(self, case: Case, operation: str, sets: list[Tensors], options: list[dict], write) -> None:
        candidates, timed, results = self._ours(case, operation, sets, options, write)
        if not timed:
            return
        peers = self._theirs(case, operation, sets, options, results, write)
        times = time_in_rounds(self.gpu, [*candidates, *peers], self.rounds, self.budget_ms, self._rng)
        work = case.flops(operation) / case.plain.flops(operation) if case.feature == "packed" else 1.0
        for one in timed:
            row = self._row(case, operation, OURS, times[one.name])
            row.update(family=one.kernels.family, method=one.kernels.method)
            row["over_plain"] = work * median_ratio(times[one.plain], times[one.name])
            write(describe(row))
        for peer in peers:
            row = self._row(case, operation, peer.name, times[peer.name])
            row["ratio"] = median_ratio(times[peer.name], times[timed[0].name])
            write(describe(row))

    def _ours(
        self, case: Case, operation: str, sets: list[Tensors], options: list[dict], write
    ) -> tuple[list[Candidate], list[Timed], tuple]:
        """Returns the candidates and their names by family, if their results are right, and the first results."""
        candidates, timed, first = [], [], ()
        for label, family in self.families.items():
            try:
                kernels = self._verified(case, operation, family)
                one = self._candidate(f"{case.feature} {label}", case, operation, sets, options, family, kernels.method)
                results = one.call()
                check_finite(self.gpu.xp, results[:1] if operation == "forward" else results)
                pair = [one]
                if case != case.plain:
                    method = self._verified(case.plain, operation, family).method
                    plain = [case.plain.options(self.gpu.xp, 0)] * len(sets)
                    pair.append(self._candidate(f"plain {label}", case.plain, operation, sets, plain, family, method))
                    pair[-1].call()
            except UnsupportedProblemError as error:
                write(f"  {case} {operation}: without {label}: {describe_error(error)[:160]}")
            except AssertionError as error:
                self._fail(f"WRONG: {case} {operation} ({label}): {error}")
            except Exception as error:  # this family's rows are lost, the others are not
                self._fail(f"FAILED: {case} {operation} ({label}): {describe_error(error)}")
            else:
                candidates += pair
                timed.append(Timed(one.name, pair[-1].name, kernels))
                first = first or results
        return candidates, timed, first

    def _theirs(
        self, case: Case, operation: str, sets: list[Tensors], options: list[dict], ours: tuple, write
    ) -> list[Candidate]:
        """Returns the peers' candidates with results equal to ours, or finite ones if they are random."""
        candidates = []
        for peer in self.peers:
            if not peer.supports(case, operation):
                continue
            try:
                candidate = peer.candidate(case, sets, options, operation)
                with candidate.mode():
                    theirs = peer.arrays(operation, candidate.call())
            except Exception as error:  # a compiler that refuses, or no memory
                write(f"  {case} {operation}: without {peer.name}: {describe_error(error)[:160]}")
                continue
            try:
                if case.is_random:
                    check_finite(self.gpu.xp, theirs)
                else:
                    check_equal(case.problem, ours[: len(theirs)], theirs)
                candidates.append(candidate)
            except AssertionError as error:  # one of the two is wrong
                self._fail(f"WRONG: {case} {operation}: {peer.name}: {error}")
        return candidates

    def _candidate(
        self,
        name: str,
        case: Case,
        operation: str,
        sets: list[Tensors],
        options: list[dict],
        family: str | None,
        method: str,
    ) -> Candidate:
        """Binds a call to rotating inputs. A backward's o and lse are computed here, outside of the timing."""
        calls, gradients = [], {f"return_{gradient}": True for gradient in case.gradients}
        for tensors, keywords in zip(sets, options, strict=True):
            q, k, v, do = case.arrays(tensors)
            forward = partial(fa2cupy.forward, q, k, v, family=family, **keywords)
            if operation == "forward":
                calls.append(forward)
            else:
                arguments = (q, k, v, *forward(), do)
                how = {"method": method, "family": family, **gradients}
                calls.append(partial(fa2cupy.backward, *arguments, **how, **keywords))
        return Candidate(name, taking_turns(calls))

    def _verified(self, case: Case, operation: str, family: str | None) -> Kernels:
        """Returns the kernels of a call. Each choice of kernels is compared with float64 once, on few rows."""
        kernels = case.kernels(self.gpu.info, operation, family)
        key = (kernels, case.feature, case.problem.head_dim, operation, family)
        if key not in self._checks:
            small, xp = case.shrunk(), self.gpu.xp
            self._checks[key] = None
            try:
                check = FeatureCheck(*small.inputs(xp), gradients=small.gradients, **small.options(xp, 0))
                check.verify(operation, kernels.method or None, family, kernels.num_splits)
            except Exception as error:
                self._checks[key] = error
        if self._checks[key] is not None:
            raise self._checks[key]
        return kernels

    def _sets(self, case: Case) -> list[Tensors]:
        """Returns inputs beyond the cache: those of the previous case if the problem is the same."""
        problem = case.problem
        if self._inputs[0] != problem:
            self._inputs = (None, [])
            self.gpu.release()
            self._inputs = (problem, rotating_inputs(self.gpu, problem))
        return self._inputs[1]

    def _row(self, case: Case, operation: str, provider: str, samples: list[float]) -> dict[str, object]:
        median = statistics.median(samples)
        row = {
            **self._stamp, **case.problem.columns(), "feature": case.feature, "operation": operation,
            "provider": provider, "ms_median": median, "ms_min": min(samples), "ms_max": max(samples),
            "tflops": case.flops(operation) / median / 1e9,
        }  # fmt: skip
        self.rows.append(row)
        return row

    def _release(self) -> None:
        self.gpu.release()
        for peer in self.peers:
            peer.release()

    def _fail(self, text: str) -> None:
        self.failures.append(text)
        print(text, file=sys.stderr, flush=True)


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Returns the median over rounds of the ratio of two candidates' times."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def describe_error(error: Exception) -> str:
    """Returns the type of an error and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def describe(row: dict[str, object]) -> str:
    """Returns a row as a line of the table."""
    how = " ".join(str(row[name]) for name in ("family", "method") if row.get(name))
    line = (
        f"{row['feature']:17s}{row['operation']:9s} d={row['head_dim']:<4}seqlen={row['seqlen']:<6}"
        f"{row['provider']:17s}{how:18s}{row['ms_median']:9.3f} ms ({row['ms_min']:.3f} to {row['ms_max']:.3f})"
        f"{row['tflops']:8.1f} TFLOP/s"
    )
    if "over_plain" in row:
        line += f"{row['over_plain']:7.2f} of plain"
    return f"{line}{row['ratio']:7.2f} x our time" if "ratio" in row else line


def summary(rows: Sequence[dict[str, object]]) -> list[str]:
    """Returns the worst value for each goal, as lines."""
    ratios = {(feature, None): RATIO_GOAL for feature in FlexAttention.features}
    lines = []
    for column, goals in (("over_plain", GOALS), ("ratio", ratios)):
        for (feature, seqlen), goal in goals.items():
            for operation in ("forward", "backward"):
                name = (feature, operation)
                own = [row for row in rows if (row["feature"], row["operation"]) == name and column in row]
                own = [row for row in own if row["provider"] in (OURS, FlexAttention.name, FlexFlash.name)]
                worst = min((row[column] for row in own if seqlen in (None, row["seqlen"])), default=None)
                if worst is not None:
                    lines.append(f"{feature:11s}{operation:9s} {column:11s}worst {worst:6.2f}, wanted {goal}")
    return lines


def table(rows: Sequence[dict[str, object]]) -> list[str]:
    """Returns the best peer's time over ours, by feature and size."""
    sized = [{**row, "size": f"d={row['head_dim']} seqlen={row['seqlen']}"} for row in rows]
    return [
        *ratio_table(sized, "feature", "size", ("forward", "backward")), *smallest_ratio(sized, "feature", "size")
    ]  # fmt: skip


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, names, families = (
        parser.add_argument,
        tuple(FEATURES),
        (DEFAULT, *dict.fromkeys(row.public_name for row in FAMILIES)),
    )
    add("--features", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)}")
    head_dims = f"default: {' '.join(map(str, HEAD_DIMS))}"
    add("--head-dims", nargs="+", type=supported_head_dim, default=HEAD_DIMS, metavar="N", help=head_dims)
    divisors = f"divisors of {TOKENS}, but for packed; default: {' '.join(map(str, SEQLENS))}"
    add("--seqlens", nargs="+", type=positive_int, default=SEQLENS, metavar="N", help=divisors)
    add("--families", nargs="+", choices=families, default=(DEFAULT,), metavar="NAME", help=f"of {', '.join(families)}")
    peers = f"of {', '.join(PEERS)}; the compiler of flex takes most of the time"
    add("--peers", nargs="*", choices=tuple(PEERS), default=tuple(PEERS), metavar="NAME", help=peers)
    add("--rounds", type=positive_int, default=5, metavar="N", help="default: %(default)s")
    add("--out", metavar="DIR", help="default: scripts/results/<gpu>")
    options = parser.parse_args(arguments)
    bad = [seqlen for seqlen in options.seqlens if TOKENS % seqlen]
    if bad:
        parser.error(f"--seqlens: {bad} do not divide {TOKENS}")
    return options


def measure_all(benchmark: FeatureBenchmark, cases: Iterable[Case], path: Path) -> None:
    """Measures all cases. The rows so far are written after each."""
    cases = list(cases)
    print("compiling")
    benchmark.compile(cases)
    with progress(len(cases), "features") as bar:
        for case in cases:
            benchmark.measure(case, bar.write)
            write_csv(path, COLUMNS, benchmark.rows)
            bar.update()


def run(options: argparse.Namespace, gpu: Gpu, folder: Path) -> FeatureBenchmark:
    """Runs what the command line asks for."""
    peers = available_peers(gpu, options.peers, PEERS)
    benchmark = FeatureBenchmark(gpu, peers, options.families, options.rounds)
    measure_all(benchmark, all_cases(options.features, options.head_dims, options.seqlens), folder / "features.csv")
    return benchmark


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a result was wrong or one of ours failed."""
    options = parse_arguments(arguments)
    gpu = find_gpu()
    if gpu is None:
        return 2
    folder = results_folder(gpu.name, options.out)
    benchmark = run(options, gpu, folder)
    rows = benchmark.rows
    print("", *map(describe, rows), "", *summary(rows), "", *table(rows), f"written to {folder}", sep="\n")
    for text in benchmark.failures:
        print(text, file=sys.stderr)
    return 1 if benchmark.failures else 0


if __name__ == "__main__":
    sys.exit(run_command("features.py", main))
