"""Tangents and second derivatives beside the forward and the backward of the same shape, and beside other packages."""

from __future__ import annotations

import functools
import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from common.check import BLOCK_ELEMENTS, check_equal
from common.measure import (
    DEFAULT,
    Candidate,
    Gpu,
    Problem,
    Tensors,
    format_bytes,
    host_microseconds,
    rotating,
    sets_beyond_cache,
    time_in_rounds,
)
from common.tables import ratio_table

import fa2cupy
from fa2cupy.numerics.second_order import SecondOrder
from fa2cupy.problem.checks import problem_from_arrays
from fa2cupy.problem.tangents import Tangents

__all__ = [
    "COLUMNS",
    "LONGEST",
    "OPERATIONS",
    "Moved",
    "SecondOrderBenchmark",
    "second_order_problems",
    "second_order_table",
]

COLUMNS = (
    "gpu", "driver", "date", "dtype", "head_dim", "seqlen", "batch", "num_heads", "causal", "operation", "provider",
    "ms_median", "ms_min", "ms_max", "tflops", "share", "times", "ratio", "peak_bytes",
)  # fmt: skip
#: The measured functions, and the call of first order that each is compared with.
OPERATIONS = {"jvp": "forward", "backward_jvp": DEFAULT, "double_backward": DEFAULT}
MODEL_DIM, HEAD_DIMS, SEQLENS, TOKENS = 2048, (64, 128, 256), (2048, 16384), 16384
#: The lengths and head_dims of float32 and float64, and their tokens.
WIDE_SEQLENS, WIDE_HEAD_DIMS, WIDE_TOKENS = (2048, 4096), (64, 128), 4096
#: Rows of the one head that no score matrix fits; it is measured in one round.
LONGEST = 131072
OURS = "fa2cupy"


def second_order_problems() -> Iterator[Problem]:
    """Yields the sizes, those that need the same kernels in succession."""
    for head_dim, causal, seqlen in itertools.product(HEAD_DIMS, (False, True), SEQLENS):
        yield Problem("bfloat16", head_dim, seqlen, TOKENS // seqlen, MODEL_DIM // head_dim, causal)
    for dtype, head_dim, causal, seqlen in itertools.product(
        ("float32", "float64"), WIDE_HEAD_DIMS, (False, True), WIDE_SEQLENS
    ):
        yield Problem(dtype, head_dim, seqlen, WIDE_TOKENS // seqlen, MODEL_DIM // head_dim, causal)


class Moved(NamedTuple):
    """One set of inputs: q, k, v and do, tangents of the first three, and what `fa2cupy.jvp` makes of them."""

    q: Any
    k: Any
    v: Any
    do: Any
    qt: Any
    kt: Any
    vt: Any
    o: Any
    lse: Any
    ot: Any
    lset: Any

    def arguments(self, operation: str) -> tuple[Any, ...]:
        """Returns the arrays of a call of ours. Cotangents of a double backward are the tangents."""
        q, k, v, do, *moved = self
        qt, kt, vt, o, lse, ot, lset = moved
        return {
            "forward": (q, k, v),
            DEFAULT: (q, k, v, o, lse, do),
            "jvp": (q, k, v, qt, kt, vt),
            "backward_jvp": (q, k, v, o, lse, do, qt, kt, vt, ot, lset),
            "double_backward": (q, k, v, o, lse, do, qt, kt, vt),
        }[operation]


_FUNCTIONS = {"forward": "forward", DEFAULT: "backward", **{name: name for name in OPERATIONS}}


class SecondOrderBenchmark:
    """The section second_order: rows and failures so far.

    Parameters
    ----------
    gpu : Gpu
    stamp : mapping
        The columns that say where and when.
    peers : sequence
        Those of `common.peers.SECOND_ORDER_PEERS`.
    rounds : int
    budget_ms : float
    """

    def __init__(self, gpu: Gpu, stamp: Mapping[str, object], peers: Sequence[Any], rounds: int, budget_ms: float):
        self.gpu, self.stamp, self.peers, self.rounds, self.budget_ms = gpu, stamp, peers, rounds, budget_ms
        self.rows: list[dict[str, object]] = []
        self.failures: list[str] = []
        self._rng = random.Random(0)

    def measure(self, problem: Problem, write: Callable[[str], object] = print) -> None:
        """Checks and times everything on one problem, by turns.

        ``share`` is our TFLOP/s over those of the forward, or for the others of the backward, and ``times`` the time
        over the time of these calls; ``ratio`` is a peer's time over ours.
        """
        for peer in self.peers:
            peer.release()
        self.gpu.release()
        try:
            sets = self._sets(problem)
            results = {name: self._call(problem, name, sets[:1])() for name in OPERATIONS}
            _verify(self.gpu.xp, problem, sets[0], results)
        except Exception as error:  # a wrong result, or any failure to get one: these rows are lost, others are not
            kind = "WRONG" if isinstance(error, AssertionError) else "FAILED"
            self.failures.append(f"{kind}: {problem} second order: {error}")
            write(self.failures[-1])
            return
        calls = {(OURS, name): self._call(problem, name, sets) for name in _FUNCTIONS}
        calls |= self._of_peers(problem, sets, results, write)
        held = {key: self._peak_bytes(key[0], call) for key, call in calls.items() if key[1] in OPERATIONS}
        candidates = [Candidate("|".join(key), call) for key, call in calls.items()]
        times = time_in_rounds(self.gpu, candidates, self.rounds, self.budget_ms, self._rng)
        for (provider, operation), call_held in held.items():
            samples = times[f"{provider}|{operation}"]
            row = {**self.stamp, **problem.columns(), "operation": operation, "provider": provider}
            row |= {"ms_median": statistics.median(samples), "ms_min": min(samples), "ms_max": max(samples)}
            row |= {"tflops": problem.tflops(operation, row["ms_median"]), "peak_bytes": call_held}
            if provider == OURS:
                first = OPERATIONS[operation]
                over = _median_ratio(samples, times[f"{OURS}|{first}"])
                row |= {"times": over, "share": problem.flops(operation) / problem.flops(first) / over}
            else:
                row["ratio"] = _median_ratio(samples, times[f"{OURS}|{operation}"])
            self.rows.append(row)
            write(_described(problem, row))

    def host(self, problem: Problem) -> dict[str, float]:
        """Returns the microseconds of the host that warm calls of `jvp` and `backward_jvp` take on a tiny problem."""
        try:
            sets = self._sets(problem)[:1]
            candidates = [Candidate(name, self._call(problem, name, sets)) for name in ("jvp", "backward_jvp")]
            return host_microseconds(self.gpu, candidates)
        except Exception as error:
            self.failures.append(f"FAILED: {problem} second order: {error}")
            return {}

    def _sets(self, problem: Problem) -> list[Moved]:
        count = sets_beyond_cache(2 * problem.input_bytes, self.gpu.info.l2_bytes)
        drawn = self.gpu.tensors(problem, 2 * count)
        return [_moved(problem, *both) for both in zip(drawn[:count], drawn[count:], strict=True)]

    @staticmethod
    def _call(problem: Problem, operation: str, sets: Sequence[Moved]) -> Callable[[], tuple[Any, ...]]:
        function = functools.partial(getattr(fa2cupy, _FUNCTIONS[operation]), causal=problem.causal)
        return rotating(function, [one.arguments(operation) for one in sets])

    def _peak_bytes(self, provider: str, call: Callable[[], object]) -> int:
        peer = next((peer for peer in self.peers if peer.name == provider), self.gpu)
        return peer.peak_bytes(call)

    def _of_peers(
        self, problem: Problem, sets: Sequence[Moved], results: Mapping[str, tuple], write: Callable[[str], object]
    ) -> dict[tuple[str, str], Callable[[], tuple[Any, ...]]]:
        """Returns the calls of peers whose results are ours, by provider and operation."""
        found = {}
        for peer, operation in itertools.product(self.peers, OPERATIONS):
            if not peer.supports(problem, operation):
                continue
            try:
                call = peer.call(problem, operation, sets)
                theirs = peer.arrays(operation, call())
                ours = results[operation]
                check_equal(problem, (ours[0], ours[2]) if operation == "jvp" else ours, theirs)
                found[peer.name, operation] = call
            except AssertionError as error:
                self.failures.append(f"WRONG: {problem} {operation}: {peer.name}: {error}")
            except Exception as error:  # a kernel that does not know the problem, or has no memory for it
                write(f"  {operation:16s}without {peer.name}: {(str(error).splitlines() or [repr(error)])[0][:160]}")
        return found


def _moved(problem: Problem, inputs: Tensors, directions: Tensors) -> Moved:
    moved = (directions.q, directions.k, directions.v)
    results = fa2cupy.jvp(inputs.q, inputs.k, inputs.v, *moved, causal=problem.causal)
    return Moved(inputs.q, inputs.k, inputs.v, inputs.do, *moved, *results)


def _verify(xp: Any, problem: Problem, one: Moved, results: Mapping[str, tuple[Any, ...]]) -> None:
    """Compares the last head of the last batch with float64: three times the error of the formulas in one precision.

    Queries are taken in blocks, each with all the keys that they see, because no score matrix of a long sequence fits
    in float64. Gradients of k and v are sums over blocks.

    Raises
    ------
    AssertionError
        A result is wrong.
    """
    exact, naive = (
        _formulas(xp, problem, one, *precision)
        for precision in (("float64", "float64"), ("float64" if problem.dtype == "float64" else "float32", one.q.dtype))
    )
    o, lse, ot, lset = results["jvp"]
    found = {"jvp o": o, "jvp ot": ot, "jvp lse": lse, "jvp lset": lset}
    for operation in ("backward_jvp", "double_backward"):
        found |= {f"{operation} {name}": x for name, x in zip(("dqt", "dkt", "dvt", "ot"), results[operation])}
    for name, result in found.items():
        own = result[-1, -1] if result.ndim == 3 else result[-1, :, -1]
        right, other = exact[name.split()[1]], naive[name.split()[1]]
        error, allowed = (float(abs(x.astype("float64") - right).max()) for x in (own, other))
        bound = 3 * allowed + 1e-5 * float(abs(right).max())
        if not error <= bound:
            raise AssertionError(f"{name} differs from float64 by {error:.2g}, not {bound:.2g}")


def _formulas(xp: Any, problem: Problem, one: Moved, work: str, rounded: Any) -> dict[str, Any]:
    """The results of the last head, in one precision, without an axis of heads."""
    # Contiguous copies with axes of one batch and one head.
    head = {name: x[-1:, :, -1:].copy() for name, x in one._asdict().items() if x.ndim == 4}
    q, k, v, do, qt, kt, vt = (head[name] for name in ("q", "k", "v", "do", "qt", "kt", "vt"))
    height = max(1, BLOCK_ELEMENTS // problem.seqlen)
    rows: dict[str, list[Any]] = {name: [] for name in ("o", "ot", "lse", "lset", "dqt")}
    sums = {"dkt": xp.zeros(k.shape[1::2]), "dvt": xp.zeros(v.shape[1::2])}
    for start in range(0, problem.seqlen, height):
        own = slice(start, min(start + height, problem.seqlen))
        seen = slice(0, own.stop if problem.causal else problem.seqlen)
        part = {"q": q[:, own], "k": k[:, seen], "v": v[:, seen], "do": do[:, own]}
        direction = Tangents(qt[:, own], kt[:, seen], vt[:, seen], None, None)
        options = {"causal": problem.causal}
        inputs = (part["q"], part["k"], part["v"])
        formulas = SecondOrder(problem_from_arrays(*inputs, **options), options, q, work, rounded)
        part |= dict(zip(("o", "lse"), formulas.forward(*inputs), strict=True))
        part |= dict(zip(("ot", "lset"), formulas.jvp(part, direction), strict=True))
        dqt, dkt, dvt = formulas.backward_jvp(part, direction, {})
        for name, array in (*part.items(), ("dqt", dqt)):
            if name in rows:
                rows[name].append((array[0, 0] if array.ndim == 3 else array[0, :, 0]).astype("float64"))
        for name, array in (("dkt", dkt), ("dvt", dvt)):
            sums[name][seen] += array[0, :, 0].astype("float64")
    return {**{name: xp.concatenate(parts) for name, parts in rows.items()}, **sums}


def _median_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(times, others, strict=True))


def _described(problem: Problem, row: Mapping[str, Any]) -> str:
    if row["provider"] == OURS:
        first = "forward" if row["operation"] == "jvp" else "backward"
        beside = f"{row['times']:.2f} x the {first}, {row['share']:.2f} of its TFLOP/s"
    else:
        beside = f"{row['ratio']:.2f} x our time"
    return (
        f"  {problem}  {row['operation']:16s}{row['provider']:20s}{row['ms_median']:9.3f} ms "
        f"{row['tflops']:7.1f} TFLOP/s, {format_bytes(row['peak_bytes'])}, {beside}"
    )


def second_order_table(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Returns our TFLOP/s and its share of the first order's, then the least time of others over ours."""
    masks = ("full", "causal")
    named = [
        {**row, "what": f"{row['dtype']} {row['head_dim']} {masks[int(str(row['causal']))]}"}
        for row in sorted(rows, key=lambda row: int(str(row["seqlen"])))
        if row["operation"] in OPERATIONS
    ]
    ours = {(row["what"], row["seqlen"], row["operation"]): row for row in named if row["provider"] == OURS}
    lines, columns = (list(dict.fromkeys(str(key[place]) for key in ours)) for place in (0, 1))
    table = [f"| {' / '.join(OPERATIONS)} | {' | '.join(columns)} |", f"|{'---|' * (1 + len(columns))}"]
    for what in lines:
        cells = []
        for seqlen in columns:
            found = [row for (name, length, _), row in ours.items() if (name, str(length)) == (what, seqlen)]
            cells.append(
                " / ".join(f"{float(str(row['tflops'])):.0f} ({float(str(row['share'])):.2f})" for row in found)
            )
        table.append(f"| {what} | {' | '.join(cells)} |")
    return [*table, "", *ratio_table(named, "what", "seqlen", tuple(OPERATIONS))]
