"""Biases that many sequences share, beside the calls without them and the implementations that have them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.check import BLOCK_ELEMENTS, check_equal
from common.feature_cases import FEATURES, Case
from common.measure import (
    DEFAULT,
    DETERMINISTIC,
    Candidate,
    Gpu,
    Problem,
    Tensors,
    backward_options,
    format_bytes,
    rotating_inputs,
    taking_turns,
    time_in_rounds,
)
from common.tables import ratio_table

import fa2cupy
from fa2cupy import reference
from fa2cupy.errors import UnsupportedProblemError
from fa2cupy.families.device import DeviceInfo
from fa2cupy.jit.spec import KernelSpec
from fa2cupy.problem.checks import problem_from_arrays
from fa2cupy.testing import assert_within_baseline

__all__ = [
    "BIAS",
    "BOTH",
    "COLUMNS",
    "OPERATIONS",
    "PLAIN",
    "BiasBenchmark",
    "BiasCase",
    "bias_cases",
    "bias_specs",
    "bias_tables",
]

COLUMNS = (
    "gpu", "driver", "date", "work", "feature", "dtype", "head_dim", "seqlen", "batch", "num_heads", "causal",
    "operation", "provider", "ms_median", "ms_min", "ms_max", "tflops", "over_plain", "ratio", "peak_bytes",
)  # fmt: skip
OPERATIONS = ("forward", DEFAULT, DETERMINISTIC)
PLAIN, BIAS, BOTH = "plain", "bias", "bias, padding"
PAIR_SEQLENS, PAIR_DTYPES = (256, 384, 512, 768), ("bfloat16", "float32")
OURS = "fa2cupy"


@dataclass(frozen=True)
class BiasCase(Case):
    """A kind of work with some of its features.

    Attributes
    ----------
    feature : str
        ``plain``, ``bias`` or ``bias, padding``.
    problem : Problem
        Its batch is that of all leading axes.
    work : str
        ``pair``, ``sequences``, ``windows`` or ``full``, as in the docstring of benchmark.py.
    leading : tuple of int
        The axes of our q in front of (seqlen, heads, head_dim).
    """

    work: str = "pair"
    leading: tuple[int, ...] = ()

    @property
    def operations(self) -> tuple[str, ...]:
        """The measured operations."""
        return OPERATIONS

    @property
    def window(self) -> None:
        """No case has a window."""

    @property
    def is_shared(self) -> bool:
        """True if all sequences have the same bias."""
        return self.work != "full"

    @property
    def gradients(self) -> tuple[str, ...]:
        """Gradients of a backward besides dq, dk and dv."""
        return () if self.feature == PLAIN else ("dbias",)

    def options(self, xp: Any, seed: int) -> dict[str, Any]:
        """Returns the keywords of a call whose arrays have one leading axis."""
        names = {PLAIN: (), BIAS: ("bias",), BOTH: ("bias", "padding")}[self.feature]
        found: dict[str, Any] = {"causal": self.problem.causal}
        for name in names:
            name = "bias_full" if name == "bias" and not self.is_shared else name
            found |= FEATURES[name].options(xp, self.problem, seed)
        return found

    def with_axes(self, array: Any) -> Any:
        """Returns an array of one leading axis with those of our call; one that all sequences share has axes of 1."""
        leading = self.leading if array.shape[0] == self.problem.batch else (1,) * len(self.leading)
        return array.reshape(*leading, *array.shape[1:])

    def flat(self, array: Any) -> Any:
        """Returns a result of our call with one leading axis."""
        axes = len(self.leading)
        return array.reshape(math.prod(array.shape[:axes]), *array.shape[axes:])

    def __str__(self) -> str:
        return f"{self.work} ({self.feature}) {self.problem}"


def bias_specs(device: DeviceInfo, cases: Iterable[BiasCase]) -> list[KernelSpec]:
    """Returns the kernels of all cases and operations that are not refused."""
    specs: list[KernelSpec] = []
    for case, operation in itertools.product(cases, OPERATIONS):
        call = ("forward", {}) if operation == "forward" else ("backward", backward_options(operation))
        with contextlib.suppress(UnsupportedProblemError):  # reported when it is measured
            specs += case.kernels(device, call[0], **call[1]).specs
    return specs


def bias_cases() -> Iterator[list[BiasCase]]:
    """Yields the cases that are timed by turns: those of one size."""
    for dtype, seqlen in itertools.product(PAIR_DTYPES, PAIR_SEQLENS):
        pair = Problem(dtype, 32, seqlen, seqlen, 4, False)
        yield [BiasCase(feature, pair, leading=(1, seqlen)) for feature in (PLAIN, BIAS, BOTH)]
    for work, problem in {
        "sequences": Problem("bfloat16", 64, 1024, 16, 12, False),
        "windows": Problem("bfloat16", 32, 64, 4096, 6, False),
        "full": Problem("bfloat16", 64, 2048, 4, 32, True),
    }.items():
        yield [BiasCase(feature, problem, work=work, leading=(problem.batch,)) for feature in (PLAIN, BIAS)]


class BiasBenchmark:
    """The section biases: rows and failures so far.

    Parameters
    ----------
    gpu : Gpu
    stamp : mapping
        The columns that say where and when.
    peers : sequence
        Those of `common.feature_peers.BIAS_PEERS`.
    rounds : int
    budget_ms : float
    """

    def __init__(self, gpu: Gpu, stamp: Mapping[str, object], peers: Sequence[Any], rounds: int, budget_ms: float):
        self.gpu, self.stamp, self.peers, self.rounds, self.budget_ms = gpu, stamp, peers, rounds, budget_ms
        self.rows: list[dict[str, object]] = []
        self.failures: list[str] = []
        self._rng = random.Random(0)

    def measure(self, cases: Sequence[BiasCase], write: Callable[[str], object] = print) -> None:
        """Checks and times the cases of one size, by turns.

        ``over_plain`` is the time of our call without a bias over that of ours with it, and ``ratio`` a peer's time
        over ours with the same features.
        """
        for each in (self.gpu, *self.peers):
            each.release()
        try:
            sets = rotating_inputs(self.gpu, cases[0].problem)
            options = {case: [case.options(self.gpu.xp, seed) for seed in range(len(sets))] for case in cases}
            checks = {case: _LastHead(self.gpu.xp, case, sets[0], options[case][0]) for case in cases}
        except Exception as error:  # no memory, say: the next size may do with less
            self._fail("FAILED", f"{cases[0].work} {cases[0].problem}", error)
            return
        for operation in OPERATIONS:
            try:
                self._measure(operation, cases, sets, options, checks, write)
            except Exception as error:  # of the clock or the device, in candidates that have worked before
                self._fail("FAILED", f"{cases[0].work} {cases[0].problem} {operation}", error)

    def _measure(
        self,
        operation: str,
        cases: Sequence[BiasCase],
        sets: Sequence[Tensors],
        options: Mapping[BiasCase, Sequence[dict[str, Any]]],
        checks: Mapping[BiasCase, _LastHead],
        write: Callable[[str], object],
    ) -> None:
        candidates: dict[tuple[BiasCase, str], Candidate] = {}
        for case in cases:
            try:
                call = _call(case, operation, sets, options[case])
                results = tuple(map(case.flat, call()))
                checks[case].verify(operation, results)
            except UnsupportedProblemError as error:
                write(f"  {case} {operation}: without ours: {_first_line(error)}")
                continue
            except Exception as error:  # a wrong result, or any failure to get one: this case is lost, others are not
                self._fail("WRONG" if isinstance(error, AssertionError) else "FAILED", f"{case} {operation}", error)
                continue
            candidates[case, OURS] = Candidate(OURS, call)
            candidates |= self._of_peers(case, operation, sets, options[case], results, write)
            del results
        named = [Candidate(f"{case.feature}|{name}", one.call, one.mode) for (case, name), one in candidates.items()]
        held = {key: self._peak_bytes(key[1], one) for key, one in candidates.items()}
        times = time_in_rounds(self.gpu, named, self.rounds, self.budget_ms, self._rng)
        for case, provider in candidates:
            samples, ours = times[f"{case.feature}|{provider}"], times[f"{case.feature}|{OURS}"]
            row = {**self.stamp, "work": case.work, "feature": case.feature, **case.problem.columns()}
            row |= {"operation": operation, "provider": provider, "ms_median": statistics.median(samples)}
            row |= {"ms_min": min(samples), "ms_max": max(samples), "peak_bytes": held[case, provider]}
            row["tflops"] = case.problem.tflops(operation, row["ms_median"])
            if provider != OURS:
                row["ratio"] = _median_ratio(samples, ours)
            elif case.feature != PLAIN and f"{PLAIN}|{OURS}" in times:
                row["over_plain"] = _median_ratio(times[f"{PLAIN}|{OURS}"], samples)
            self.rows.append(row)
            write(_described(row))

    def _of_peers(
        self,
        case: BiasCase,
        operation: str,
        sets: Sequence[Tensors],
        options: Sequence[dict[str, Any]],
        results: tuple[Any, ...],
        write: Callable[[str], object],
    ) -> dict[tuple[BiasCase, str], Candidate]:
        """Returns the candidates of peers whose results are ours."""
        found = {}
        for peer in self.peers:
            if not peer.supports(case, operation):
                continue
            try:
                candidate = peer.candidate(case, sets, options, operation)
                with candidate.mode():
                    theirs = peer.arrays(operation, candidate.call())
                check_equal(case.problem, results[:1] if operation == "forward" else results, theirs)
                found[case, peer.name] = candidate
            except AssertionError as error:
                self._fail("WRONG", f"{case} {operation}: {peer.name}", error)
            except Exception as error:  # an operator that does not know the case, or has no memory for it
                write(f"  {case} {operation}: without {peer.name}: {_first_line(error)}")
        return found

    def _peak_bytes(self, provider: str, candidate: Candidate) -> int:
        peer = next((peer for peer in self.peers if peer.name == provider), self.gpu)
        with candidate.mode():
            return peer.peak_bytes(candidate.call)

    def _fail(self, kind: str, what: str, error: Exception) -> None:
        self.failures.append(f"{kind}: {what}: {error}")
        print(self.failures[-1], file=sys.stderr, flush=True)


class _LastHead:
    """A check of a case's last head in all sequences, by the rule of `fa2cupy.testing`.

    Sequences are taken in blocks, because the scores of all do not fit in memory in float64. Each block is a problem of
    its own; a gradient of a bias that sequences share is the sum over blocks.
    """

    def __init__(self, xp: Any, case: BiasCase, tensors: Tensors, options: Mapping[str, Any]):
        self._xp, self._case = xp, case
        self._inputs = tuple(xp.ascontiguousarray(array[:, :, -1:]) for array in case.arrays(tensors))
        self._options = {**options, **({"bias": options["bias"][:, -1:]} if "bias" in options else {})}
        self._problem = problem_from_arrays(*self._inputs[:3], **self._options)

    def verify(self, operation: str, results: tuple[Any, ...]) -> None:
        """Compares the results of a call.

        Raises
        ------
        AssertionError
            A result is wrong.
        """
        names = ("o", "lse") if operation == "forward" else ("dq", "dk", "dv", *self._case.gradients)
        standards = self._forward if operation == "forward" else self._backward
        for name, result in zip(names, results, strict=True):
            own = result[:, -1:] if name in ("lse", "dbias") else result[:, :, -1:]
            assert_within_baseline(name, own, *standards[name], problem=self._problem)

    def _blocks(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Yields the inputs and options of blocks of sequences."""
        batch, height = self._case.problem.batch, max(1, BLOCK_ELEMENTS // self._case.problem.seqlen**2)
        for start in range(0, batch, height):
            own = slice(start, start + height)
            options = {
                name: value[own] if name != "causal" and value.shape[0] == batch else value
                for name, value in self._options.items()
            }
            yield tuple(array[own] for array in self._inputs), options

    @functools.cached_property
    def _forward(self) -> dict[str, tuple[Any, ...]]:
        parts = [
            (*reference.forward(q, k, v, **options), *reference.baseline_forward(q, k, v, **options))
            for (q, k, v, _), options in self._blocks()
        ]
        exact_o, exact_lse, o, lse = map(self._joined, zip(*parts, strict=True))
        return {"o": (exact_o, o), "lse": (exact_lse, lse)}

    @functools.cached_property
    def _backward(self) -> dict[str, tuple[Any, ...]]:
        returned = {f"return_{name}": True for name in self._case.gradients}
        names = ("dq", "dk", "dv", *self._case.gradients)
        parts: dict[str, list[tuple[Any, Any, float]]] = {name: [] for name in names}
        for (q, k, v, do), options in self._blocks():
            how = {**options, **returned}
            saved = reference.forward(q, k, v, **options)
            exact = reference.backward(q, k, v, *saved, do, **how)
            naive = reference.baseline_backward(q, k, v, do, **how)
            noise = reference.gradient_noise(q, k, v, *saved, do, **how)
            for name, *pair in zip(names, exact, naive, strict=True):
                parts[name].append((*pair, noise.get(name, 0.0)))
        found = {}
        for name, of_blocks in parts.items():
            exact, naive, noise = zip(*of_blocks, strict=True)
            if name == "dbias" and self._case.is_shared:
                total = sum(part.astype("float32") for part in naive)
                found[name] = (sum(exact), total.astype(naive[0].dtype, copy=False), sum(noise))
            else:
                found[name] = (self._joined(exact), self._joined(naive), max(noise))
        return found

    def _joined(self, parts: Sequence[Any]) -> Any:
        """Returns the results of all blocks as one array."""
        dtype = parts[0].dtype
        # CuPy is not asked to join bfloat16; float32 holds each of its numbers.
        wide = "float32" if dtype.itemsize == 2 else dtype
        return self._xp.concatenate([part.astype(wide, copy=False) for part in parts]).astype(dtype, copy=False)


def _call(
    case: BiasCase, operation: str, sets: Sequence[Tensors], options: Sequence[dict[str, Any]]
) -> Callable[[], tuple[Any, ...]]:
    """Binds our call to rotating inputs. A backward's o and lse are computed here, outside of the timing."""
    returned = {f"return_{name}": True for name in case.gradients}
    calls = []
    for tensors, flat in zip(sets, options, strict=True):
        q, k, v, do = map(case.with_axes, case.arrays(tensors))
        keywords = {name: value if name == "causal" else case.with_axes(value) for name, value in flat.items()}
        forward = functools.partial(fa2cupy.forward, q, k, v, **keywords)
        if operation == "forward":
            calls.append(forward)
        else:
            how = {**keywords, **returned, **backward_options(operation)}
            calls.append(functools.partial(fa2cupy.backward, q, k, v, *forward(), do, **how))
    return taking_turns(calls)


def _median_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(times, others, strict=True))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0][:160]


def _described(row: Mapping[str, Any]) -> str:
    beside = f", {row['ratio']:.2f} x our time" if "ratio" in row else ""
    if "over_plain" in row:
        beside = f", {row['over_plain']:.2f} of the speed without"
    return (
        f"  {row['work']:10s}{row['dtype']:9s}seqlen={row['seqlen']:<5}{row['feature']:14s}{row['operation']:14s}"
        f"{row['provider']:22s}{row['ms_median']:9.3f} ms {row['tflops']:7.1f} TFLOP/s, "
        f"{format_bytes(row['peak_bytes'])}{beside}"
    )


def bias_tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Returns tables by what they are about: the cost of biases, and the times of each other provider over ours."""
    named = [{**row, "what": f"{row['work']} of {row['batch']} x {row['seqlen']}, {row['dtype']}"} for row in rows]
    cost = [{**row, "ratio": row.get("over_plain")} for row in named]
    tables = {OURS: ratio_table(cost, "what", "feature", OPERATIONS)}
    for provider in dict.fromkeys(str(row["provider"]) for row in named if row["provider"] != OURS):
        own = [row for row in named if row["provider"] == provider]
        tables[provider] = ratio_table(own, "what", "feature", OPERATIONS)
    return tables
