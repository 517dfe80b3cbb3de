"""Benchmarks fa2cupy and the peers that can be imported, on the same arrays in one process.

    python scripts/benchmark.py                 everything: about seven minutes on an H100
    python scripts/benchmark.py --quick         fewer sizes, shorter measurements
    python scripts/benchmark.py --dtypes float16 --head-dims 128 --operations forward
    python scripts/benchmark.py --sections models features
    python scripts/benchmark.py --plot-only scripts/results/h100-80gb-hbm3/benchmark.csv

Sections:

speed
    16384 tokens (batch * seqlen) and num_heads * head_dim = 2048 (the number of heads rounded down), in the layout
    (batch, seqlen, heads, head_dim), with standard normal inputs; float32, which has few peers, with 4096 tokens and
    one length. A forward is 4 * batch * heads * seqlen^2 * head_dim FLOPs, half of it when causal, and a backward 2.5
    times as many, by either method. Results are checked first: one head of ours against float64, all heads of every
    peer against ours. A wrong result is reported and not timed. Then the implementations take turns in rounds, and each
    rotates among inputs larger than twice the L2 cache. ``ratio`` is the median over rounds of a peer's time over ours:
    above 1, ours is faster. In ``two_pass`` the peers are in their deterministic mode, except cuDNN: PyTorch has none
    for it, and it adds atomically there, too.
training
    A forward and a backward one after the other, through `fa2cupy.attention`, with the FLOPs of both.
memory
    One long sequence, to show that nothing of size seqlen^2 is allocated. ``extra_bytes``, here and above, is the peak
    memory of a call beyond inputs and o, or dq, dk, dv: ours are lse, delta and, in ``single_pass``, an fp32 dQ.
host
    ``host_us``: host time of a call on a tiny problem in float16 and float32 without waiting for the GPU, the least of
    several rounds.
startup
    First calls with an empty and with a filled disk cache, in processes of their own; that of attention is a forward
    and its backward: startup.csv.
models
    The heads of well-known models, most of them with fewer heads of k and v, in bfloat16, causal. They are measured as
    in speed, with shorter rounds, without a method (``default``) and with ``deterministic=True``, for which the peers
    are in the mode of ``two_pass``; ``tile`` names the method. Rows are in models.csv; the table at the end has the
    best peer's time over ours.
features
    The features of scripts/features.py, beside the peers that need no compiler of PyTorch's (windows beside
    FlashAttention-4, too, if the package flash-attn-4 is installed): features-peers.csv.
small
    Training steps of small models in bfloat16, causal, with head_dim 64: a forward and a backward as two ``calls``, by
    the host's clock, and as one CUDA ``graph``, by CUDA events. Ours and every peer's are checked as in speed, the
    graph's results against those of the calls. They take turns as in speed, each with a few sets of inputs, which stay
    in the L2 cache as those of a training step do. Rows are in small.csv; the table at the end has the best peer's time
    over ours.
float32
    float32 with 16384 tokens, by ``precision`` (``ieee``, ``split``), beside PyTorch's memory-efficient operator,
    measured as in models. Rows are in float32.csv; the table at the end has that operator's time over ours.
head_dims
    head_dims between those of speed, 256, and v with another head_dim than q and k, measured as in models; with 192 and
    128, those of DeepSeek-V3, also in float32. FLOPs are those of the true products: 2 * pairs * (head_dim +
    head_dim_v) in a forward, and 2 * pairs * (3 * head_dim + 2 * head_dim_v) in a backward. FlashAttention-4 is among
    the peers if the package flash-attn-4 is installed. Rows are in head_dims.csv. ``--head-dims`` and ``--seqlens``
    name some.
float64
    One sequence of 8 heads in float64, beside our kernels for CUDA cores (``fa2cupy simt``), attention written out in
    CuPy with cuBLAS, and PyTorch's math operator: both keep P for their backward. Calls are long, and there are three
    rounds. One head of 131072 rows follows, by itself and in one round. Rows are in float64.csv; the table at the end
    has the least time of the others over ours.
decode
    `fa2cupy.decode` in bfloat16 on caches of one length, ragged lengths and pages: bytes of keys and values over time,
    beside a device copy (bytes read and written over time) and those of PyTorch's operators that take the shape. Rows
    are in decode.csv.
functions
    The ready-made functions of `fa2cupy.mods`, and eight masks as users write them, in bfloat16, with 16384 tokens in
    one or two sequences, measured as in features, beside compiled FlexAttention with the same functions, and the same
    with its backend FLASH if the package flash-attn-4 is installed: PyTorch's compiler takes most of the time, once for
    each function and size (``--functions``, ``--head-dims`` and ``--seqlens`` name some, and ``--peers`` without names
    leaves it out). Rows are in functions.csv. ``over_plain`` is the time of the built-in keyword over that of the
    function for softcap, alibi, causal and sliding_window, and 1 for the others; ``tflops`` counts visible pairs. The
    table at the end has the time of the faster backend over ours.
calls
    What ready-made functions cost the host, each in a process of its own: the first call, which compiles kernels, and a
    warm one on a tiny problem, beside the same without a function. Rows are in function-calls.csv.
sparse
    Calls with sparse maps, in bfloat16, with 4096, 8192 and 16384 tokens in one sequence: ``tflops`` counts the pairs
    of the tiles of the map that are visited, and ``ratio`` is that number over the one of the call without a map. Calls
    of 13 x 13 and 5 x 5 x 5 neighborhoods visit fewer pairs, those that evaluate the function do not: the time of these
    over that of the same without is ``over_evaluated``. One head is compared with float64 first. Then the map of
    documents of 131072 x 131072 is made, beside PyTorch's ``create_block_mask``. Rows are in sparse.csv; the table at
    the end has the ratios. ``--patterns``, ``--head-dims`` and ``--seqlens`` name some.
second_order
    `fa2cupy.jvp`, `fa2cupy.backward_jvp` and `fa2cupy.double_backward` with 16384 tokens and num_heads * head_dim =
    2048 in bfloat16, and with 4096 tokens in float32 and float64, after a check of one head against float64. FLOPs are
    those of six, ten and twelve products, where a forward has two and a backward five. The forward and the backward of
    the same shape take turns with them: ``share`` is our TFLOP/s over theirs, and ``times`` our time over theirs.
    Beside them are the derivatives written out in CuPy with cuBLAS, where score matrices fit in memory, and in forward
    mode the Triton kernel of jvp_flash_attention, if that package is installed (it needs PyTorch and Triton).
    ``peak_bytes`` is the peak memory of a call with its results. One head of 131072 rows follows, by itself and in one
    round. Rows are in second_order.csv; host times of warm calls are measured in the section host.
biases
    Biases that many sequences share, with their gradients, after a check of one head against float64: ``pair``, the
    triangle attention of structure prediction (N rows of N queries and keys, 4 heads of 32, in bfloat16 and float32),
    also with a mask of keys for each row; ``sequences``, 16 of 1024 tokens with 12 heads of 64; ``windows``, 4096 of 64
    tokens with 6 heads of 32; and ``full``, a bias for each score, causal, with head_dim 64. ``over_plain`` is the
    speed beside that of our call without a bias, and ``ratio`` a peer's time over ours with the same arrays. The peers
    are PyTorch's memory-efficient operator, which gets a bias and a mask as one array as large as all scores; triangle
    attention of cuEquivariance, if the packages cuequivariance_torch and cuequivariance_ops_torch_cu13 are installed;
    and for windows the formulas written out in PyTorch. ``peak_bytes`` is the peak memory of a call with its results.
    Pairs that the mask hides are counted in ``tflops``. Rows are in biases.csv; the tables at the end have
    ``over_plain`` and the ratios.
wide
    head_dims beyond 256, and v with another one, in bfloat16, 8 heads of one sequence, measured as in models but in
    three rounds, beside PyTorch's memory-efficient and math operators; the math operator keeps P for its backward.
    FLOPs are those of the true products. `fa2cupy.decode` of latent attention follows, with 576 columns whose first 512
    are v, measured as in decode: ``of_copy`` is its speed over that of a device copy. Rows are in wide.csv; the table
    at the end has the best peer's time over ours.
numpy
    Only if asked for, and without a GPU: calls on NumPy arrays in float32, forward, backward and decode with every
    feature, beside attention written out in NumPy, which keeps P for its backward, and PyTorch's operator for the CPU
    where it takes the case. They take turns in one process, first on the machine as it is and then beside two other
    processes that never rest (``busy``). Rows are in numpy.csv in the folder of the CPU; ``ratio``, which the table at
    the end has, is the median over rounds of their time over ours.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import features
from common import decoding, function_cases
from common.biases import COLUMNS as BIAS_COLUMNS
from common.biases import BiasBenchmark, bias_cases, bias_specs, bias_tables
from common.check import HeadCheck, check_equal
from common.feature_peers import BIAS_PEERS
from common.flex import FUNCTION_PEERS
from common.function_calls import COLUMNS as CALL_COLUMNS
from common.function_calls import measure_calls
from common.measure import (
    DEFAULT,
    TRAINING,
    Candidate,
    Gpu,
    Problem,
    find_gpu,
    format_bytes,
    host_microseconds,
    plots_folder,
    positive_int,
    progress,
    results_folder,
    rotating_inputs,
    show_earlier,
    stamp_of,
    supported_head_dim,
    taking_turns,
    time_in_rounds,
    write_csv,
)
from common.on_numpy import CASES, cpu_name, numpy_table, run_numpy
from common.peers import (
    DEFAULT_OPERATIONS,
    FLOAT64_PEERS,
    HEAD_DIM_PEERS,
    OPERATIONS,
    PEERS,
    SECOND_ORDER_PEERS,
    WIDE_PEERS,
    Fa2cupy,
    Simt,
    available_peers,
)
from common.plots import bar_panels, can_plot
from common.second_order import COLUMNS as SECOND_ORDER_COLUMNS
from common.second_order import LONGEST, SecondOrderBenchmark, second_order_problems, second_order_table
from common.sparse import COLUMNS as SPARSE_COLUMNS
from common.sparse import PATTERNS, SparseBenchmark, sparse_problems, sparse_table
from common.startup import COLUMNS as STARTUP_COLUMNS
from common.startup import measure_startup
from common.tables import ratio_table, smallest_ratio, speed_table
from common.wide import COLUMNS as WIDE_COLUMNS
from common.wide import OPERATIONS as WIDE_OPERATIONS
from common.wide import latent_problems, row_of, wide_problems, wide_table

from fa2cupy.cli import run_command
from fa2cupy.plan.specs import decode_specs

COLUMNS = (
    "gpu", "driver", "date", "dtype", "head_dim", "seqlen", "batch", "num_heads", "causal", "operation", "provider",
    "tile", "ms_median", "ms_min", "ms_max", "tflops", "ratio", "extra_bytes", "host_us",
)  # fmt: skip
MODEL_COLUMNS = ("model", *COLUMNS[: COLUMNS.index("causal")], "num_heads_kv", *COLUMNS[COLUMNS.index("causal") : -1])
SECTIONS = (
    "speed", "training", "memory", "host", "startup", "models", "features", "float32", "head_dims", "float64", "decode",
    "functions", "calls", "sparse", "second_order", "biases", "small", "wide",
)  # fmt: skip
#: The section that needs no GPU. It is not a part of everything.
ON_NUMPY = "numpy"
#: Sections whose rows are in benchmark.csv.
IN_BENCHMARK_CSV = {"speed", "training", "memory", "host"}

TOKENS = {"float16": 16384, "bfloat16": 16384, "float32": 4096}
MODEL_DIM = 2048
FLOAT32_HEAD_DIMS = (64, 128)

DTYPES = ("float16", "bfloat16", "float32")
HEAD_DIMS = (32, 64, 96, 128, 256)
SEQLENS = (512, 2048, 4096, 16384)
QUICK = {"dtypes": ("float16",), "head_dims": (64, 128), "seqlens": (2048, 16384)}

#: Query heads, heads of k and v, and head_dim.
MODELS = {
    "llama3-8b": (32, 8, 128),
    "llama3-70b": (64, 8, 128),
    "llama3-70b-tp8": (8, 1, 128),
    "qwen2.5-7b": (28, 4, 128),
    "qwen3-0.6b": (16, 8, 128),
    "mqa": (16, 1, 128),
    "gemma2-9b": (16, 8, 256),
    "gpt-oss": (64, 8, 64),
    "gpt2": (12, 12, 64),
}
#: Batch and length.
MODEL_SIZES = ((1, 2048), (1, 8192), (4, 4096))
MODEL_PEERS = ("torch flash", "torch cudnn")
MODEL_BUDGET_MS, FEATURES_BUDGET_MS = 4.0, 4.0
PRECISIONS, PRECISION_HEAD_DIMS, PRECISION_SEQLENS = ("ieee", "split"), (64, 128, 256), (2048, 4096, 16384)
PRECISION_PEERS = ("torch efficient",)
PRECISION_COLUMNS = ("precision", *COLUMNS[:-1])
#: Heads, and batch and length, of the section small; how a step is launched; and the number of sets of inputs.
SMALL_HEADS, SMALL_SIZES = (4, 16), ((1, 128), (1, 512), (1, 1024), (8, 128), (8, 512), (8, 1024))
SMALL_LAUNCHES, SMALL_SETS = ("calls", "graph"), 4
SMALL_COLUMNS = tuple(name for name in COLUMNS if name not in ("extra_bytes", "host_us"))
#: head_dim and that of v: DeepSeek-V3's, with its heads and with those of a rank of eight, and others.
DEEPSEEK_HEAD_DIMS, DEEPSEEK_HEADS, DEEPSEEK_SEQLENS = (192, 128), (128, 16), (2048, 8192)
OTHER_HEAD_DIMS = ((96, 96), (160, 160), (192, 192), (256, 128), (64, 128), (128, 64))
#: Lengths of head_dim 256, which section speed does not have beside FlashAttention-4.
WIDEST_SEQLENS = (2048, 16384)
_AFTER_HEAD_DIM = COLUMNS.index("head_dim") + 1
HEAD_DIM_COLUMNS = (*COLUMNS[:_AFTER_HEAD_DIM], "head_dim_v", *COLUMNS[_AFTER_HEAD_DIM:-1])
#: head_dims and lengths of the section float64, and its heads; the length of one head that no score matrix fits.
FLOAT64_HEAD_DIMS, FLOAT64_SEQLENS, FLOAT64_HEADS = (32, 64, 96, 128, 256), (512, 1024, 4096, 8192), 8
FLOAT64_LONGEST = 131072
FLOAT64_COLUMNS = COLUMNS[:-1]
#: Features without the plain call, which is the baseline, and without window4095, which is like a shorter window.
PEER_FEATURES = tuple(name for name in features.FEATURES if name not in ("plain", "window4095"))

#: Colors of the bars of the plots, in their order.
COLORS = {
    "fa2cupy": "#d1301f",
    "fa2cupy single_pass": "#d1301f",
    "torch flash": "#4c78a8",
    "torch cudnn": "#7a7a7a",
    "torch efficient": "#7aa874",
    "cupy unfused": "#cfcfcf",
    "fa2cupy two_pass": "#f0988c",
    "torch flash deterministic": "#a6c1dc",
    "torch efficient deterministic": "#c1dbbd",
}

TRAINING_PROBLEMS = [Problem("bfloat16", 128, seqlen, 16384 // seqlen, 16, True) for seqlen in SEQLENS]
MEMORY_PROBLEM = Problem("float16", 128, 65536, 1, 2, False)
HOST_PROBLEMS = [Problem(dtype, 64, 128, 1, 2, False) for dtype in ("float16", "float32")]
STARTUP_PROBLEMS = [Problem("float16", head_dim, 1024, 1, 2, True) for head_dim in (64, 128)]


def speed_problems(dtypes: Iterable[str], head_dims: Iterable[int], seqlens: Sequence[int]) -> Iterator[Problem]:
    """Yields the problems of the section speed."""
    for dtype in dtypes:
        fitting = [seqlen for seqlen in seqlens if seqlen <= TOKENS[dtype]]
        for head_dim in head_dims:
            if dtype == "float32" and head_dim not in FLOAT32_HEAD_DIMS:
                continue
            for seqlen in fitting[-1:] if dtype == "float32" else fitting:
                for causal in (False, True):
                    yield Problem(dtype, head_dim, seqlen, TOKENS[dtype] // seqlen, MODEL_DIM // head_dim, causal)


def model_problems() -> Iterator[tuple[str, Problem]]:
    """Yields the models and problems of the section models, those that need the same kernels in succession."""
    for model, (num_heads, num_heads_kv, head_dim) in MODELS.items():
        for batch, seqlen in MODEL_SIZES:
            yield model, Problem("bfloat16", head_dim, seqlen, batch, num_heads, True, num_heads_kv)


def precision_problems() -> Iterator[Problem]:
    """Yields the problems of the section float32."""
    for head_dim, seqlen, causal in itertools.product(PRECISION_HEAD_DIMS, PRECISION_SEQLENS, (False, True)):
        yield Problem("float32", head_dim, seqlen, 16384 // seqlen, MODEL_DIM // head_dim, causal)


def head_dim_problems() -> Iterator[Problem]:
    """Yields the problems of the section head_dims."""
    columns, columns_v = DEEPSEEK_HEAD_DIMS
    for heads, causal, seqlen in itertools.product(DEEPSEEK_HEADS, (False, True), DEEPSEEK_SEQLENS):
        yield Problem("bfloat16", columns, seqlen, 1, heads, causal, head_dim_v=columns_v)
    yield Problem("float32", columns, 4096, 4, 16, True, head_dim_v=columns_v)
    for head_dim, head_dim_v in OTHER_HEAD_DIMS:
        yield Problem(
            "bfloat16", head_dim, 4096, 4, 16, True, head_dim_v=None if head_dim_v == head_dim else head_dim_v
        )
    for seqlen, causal in itertools.product(WIDEST_SEQLENS, (False, True)):
        yield Problem("bfloat16", 256, seqlen, 16384 // seqlen, 8, causal)


def small_problems() -> Iterator[Problem]:
    """Yields the problems of the section small."""
    for num_heads, (batch, seqlen) in itertools.product(SMALL_HEADS, SMALL_SIZES):
        yield Problem("bfloat16", 64, seqlen, batch, num_heads, True)


def float64_problems() -> Iterator[Problem]:
    """Yields the problems of the section float64 that others compute, too."""
    for head_dim, seqlen, causal in itertools.product(FLOAT64_HEAD_DIMS, FLOAT64_SEQLENS, (False, True)):
        yield Problem("float64", head_dim, seqlen, 1, FLOAT64_HEADS, causal)


class Benchmark:
    """One run: the device, the implementations, and the rows and failures so far."""

    def __init__(self, gpu: Gpu, peers: Sequence, rounds: int, budget_ms: float, precision: str | None = None):
        self.gpu = gpu
        self.ours = Fa2cupy(gpu, precision)
        self.peers = peers
        self.rounds = rounds
        self.budget_ms = budget_ms
        self.rows: list[dict[str, object]] = []
        self.failures: list[str] = []
        self._rng = random.Random(0)
        self._dropped: set[tuple[str, ...]] = set()
        self.stamp = stamp_of(gpu)

    def speed(
        self, problem: Problem, operations: Iterable[str], write=print, labels: Mapping[str, object] | None = None
    ) -> None:
        """Checks and times all implementations on one problem. `labels` are further columns of its rows."""
        self._release()
        sets = rotating_inputs(self.gpu, problem)
        check = HeadCheck(self.gpu.xp, problem, sets[0], precision=self.ours.precision)
        scores = format_bytes(problem.seqlen**2 * problem.tensor_bytes // math.prod(problem.shape))
        write(f"{problem} (the scores of one head would take {scores})")
        for operation in operations:
            candidates, bytes_held = self._checked(problem, sets, operation, check, write)
            if not candidates:
                continue
            times = time_in_rounds(self.gpu, candidates, self.rounds, self.budget_ms, self._rng)
            ours = times[self.ours.name]
            for name, samples in times.items():
                row = self._row(problem, operation, name) | (labels or {})
                self.rows.append(row)
                row.update(ms_median=statistics.median(samples), ms_min=min(samples), ms_max=max(samples))
                row["tflops"] = problem.tflops(operation, row["ms_median"])
                row["extra_bytes"] = bytes_held[name] - problem.result_bytes(operation)
                if name != self.ours.name:
                    row["ratio"] = statistics.median(theirs / our for theirs, our in zip(samples, ours, strict=True))
                write(describe(row))

    def small(self, problem: Problem, write=print) -> None:
        """Checks and times a training step of all implementations, as calls and as a graph."""
        self._release()
        sets = self.gpu.tensors(problem, SMALL_SETS)
        check = HeadCheck(self.gpu.xp, problem, sets[0])
        candidates, _ = self._checked(problem, sets, TRAINING, check, write)
        graphs = self._graphs(problem, sets, candidates, write)
        elapsed = {"calls": self.gpu.elapsed_host_ms, "graph": self.gpu.elapsed_ms}
        write(str(problem))
        for launched, some in zip(SMALL_LAUNCHES, (candidates, graphs), strict=True):
            if not some or some[0].name != self.ours.name:
                continue
            times = time_in_rounds(self.gpu, some, self.rounds, self.budget_ms, self._rng, elapsed[launched])
            ours = times[self.ours.name]
            for name, samples in times.items():
                row = {**self.stamp, **problem.columns(), "operation": launched, "provider": name}
                row.update(ms_median=statistics.median(samples), ms_min=min(samples), ms_max=max(samples))
                row["tflops"] = problem.tflops(TRAINING, row["ms_median"])
                if name == self.ours.name:
                    row["tile"] = self.ours.tile(problem, DEFAULT)
                else:
                    row["ratio"] = statistics.median(theirs / our for theirs, our in zip(samples, ours, strict=True))
                self.rows.append(row)
                write(f"  {launched:14s}{name:16s}{1e3 * row['ms_median']:9.1f} us  {row.get('ratio', 1):5.2f} x")

    def _graphs(self, problem: Problem, sets: Sequence, candidates: Sequence[Candidate], write) -> list[Candidate]:
        """Returns the candidates as graphs, one for each set of inputs, whose results are compared with the calls'."""
        by_name = {one.name: one for one in (self.ours, *self.peers)}
        graphs = []
        for candidate in candidates:
            owner, launches = by_name[candidate.name], []
            try:
                for one in sets:
                    call = owner.candidate(problem, [one], TRAINING).call
                    expected = owner.arrays(TRAINING, call())
                    launches.append(owner.captured(call))
                    check_equal(problem, expected, owner.arrays(TRAINING, launches[-1]()))
                graphs.append(Candidate(candidate.name, taking_turns(launches), candidate.mode))
            except Exception as error:  # a wrong result, or an operator that no graph can capture
                if owner is self.ours:
                    self._fail(f"FAILED: {problem} graph: {error}")
                else:
                    self._drop(candidate.name, problem, "graph", error, write)
        return graphs

    def host(self, problem: Problem, operations: Iterable[str]) -> None:
        """Measures the host time of all implementations on a tiny problem."""
        sets = self.gpu.tensors(problem, 1)
        check = HeadCheck(self.gpu.xp, problem, sets[0])
        for operation in operations:
            candidates, _ = self._checked(problem, sets, operation, check, print)
            for name, microseconds in host_microseconds(self.gpu, candidates).items():
                self.rows.append(self._row(problem, operation, name) | {"host_us": microseconds})
                print(f"  {problem.dtype} {operation:12s}{name:16s}{microseconds:8.1f} us of host time a call")

    def host_of_second_order(self, problem: Problem) -> None:
        """Measures the host time of ours in second order."""
        run = SecondOrderBenchmark(self.gpu, self.stamp, (), self.rounds, self.budget_ms)
        for operation, microseconds in run.host(problem).items():
            columns = {**self.stamp, **problem.columns(), "operation": operation, "provider": self.ours.name}
            self.rows.append(columns | {"host_us": microseconds})
            print(f"  {operation:13s}{self.ours.name:15s}{microseconds:8.1f} us of host time a call")
        self.failures += run.failures

    def startup(self, problems: Sequence[Problem], path: Path) -> None:
        """Measures first calls, in processes of their own."""
        try:
            rows = [{**self.stamp, **one.columns(), **row} for one in problems for row in measure_startup(one)]
        except RuntimeError as error:
            self._fail(f"FAILED: {error}")
            return
        write_csv(path, STARTUP_COLUMNS, [{name: row[name] for name in STARTUP_COLUMNS} for row in rows])
        for row in rows:
            first, again = row["first_call_ms_fresh"], row["first_call_ms_cached"]
            print(
                f"  d={row['head_dim']:<4d} first {row['call']:12s}{first:8.0f} ms, {row['new_kernels']} kernels "
                f"compiled (the longest {row['compile_s_longest']:.2f} s); {again:.0f} ms from the disk cache"
            )

    def _fail(self, text: str) -> None:
        self.failures.append(text)
        print(text, file=sys.stderr, flush=True)

    def _row(self, problem: Problem, operation: str, provider: str) -> dict[str, object]:
        row = {**self.stamp, **problem.columns(), "operation": operation, "provider": provider}
        if provider == self.ours.name:
            row["tile"] = self.ours.tile(problem, operation)
        return row

    def _checked(
        self, problem: Problem, sets: Sequence, operation: str, check: HeadCheck, write
    ) -> tuple[list[Candidate], dict[str, int]]:
        """Returns the candidates with right results, ours first, and the peak bytes of a call of each."""
        candidates, bytes_held = [], {}
        try:
            check.verify(operation)
            ours = self.ours.candidate(problem, sets, operation)
            results = self.ours.arrays(operation, ours.call())
        except Exception as error:  # a wrong result, or any failure to get one: this row is lost, the others are not
            kind = "WRONG" if isinstance(error, AssertionError) else "FAILED"
            self._fail(f"{kind}: {problem} {operation}: {error}")
            return [], {}
        candidates.append(ours)
        bytes_held[ours.name] = self.ours.peak_bytes(ours.call)
        for peer in self.peers:
            if not peer.supports(problem, operation):
                continue
            try:
                candidate = peer.candidate(problem, sets, operation)
                with candidate.mode():
                    check_equal(problem, results, peer.arrays(operation, candidate.call()))
                    bytes_held[peer.name] = peer.peak_bytes(candidate.call)
                candidates.append(candidate)
            except AssertionError as error:  # one of the two is wrong, in a head that was not compared with float64
                self._fail(f"WRONG: {problem} {operation}: {peer.name}: {error}")
            except Exception as error:  # an operator that does not know the problem, or has no memory for it
                self._drop(peer.name, problem, operation, error, write)
        return candidates, bytes_held

    def _drop(self, name: str, problem: Problem, operation: str, error: Exception, write) -> None:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
        key = (name, operation, problem.dtype, reason)
        if key not in self._dropped:
            self._dropped.add(key)
            write(f"  {operation:12s}without {name}: {reason}")

    def _release(self) -> None:
        self.gpu.release()
        for peer in self.peers:
            peer.release()


def describe(row: dict[str, object]) -> str:
    """Returns a row of the speed section as a line."""
    ratio = f"  {row['ratio']:5.2f} x our time" if "ratio" in row else ""
    return (
        f"  {row['operation']:14s}{row['provider']:16s}{row['ms_median']:9.3f} ms "
        f"({row['ms_min']:.3f} to {row['ms_max']:.3f}){row['tflops']:8.1f} TFLOP/s  "
        f"extra {format_bytes(row['extra_bytes']):>10s}{ratio}"
    )


def summary(rows: Iterable[dict[str, object]]) -> list[str]:
    """Returns our worst and median speed relative to each peer, by operation, dtype and head_dim, as lines."""
    groups: dict[tuple, list[float]] = {}
    for row in rows:
        if row.get("ratio"):
            key = (row["provider"], row["operation"], row["dtype"], int(row["head_dim"]))
            groups.setdefault(key, []).append(float(row["ratio"]))
    return [
        f"{provider:16s}{operation:12s}{dtype:10s}d={head_dim:<5d}worst {min(ratios):5.2f}  median "
        f"{statistics.median(ratios):5.2f}  ({len(ratios)} sizes)"
        for (provider, operation, dtype, head_dim), ratios in groups.items()
    ]


def plot(rows: Sequence[dict[str, object]], folder: Path) -> list[Path]:
    """Draws forward.png and backward.png from new rows or those of a CSV: panels by dtype, mask and head_dim."""
    paths = []
    for name, operations in (("forward", ("forward",)), ("backward", ("single_pass", "two_pass"))):
        panels: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
        for row in rows:
            if (row["operation"], row["provider"]) == ("two_pass", "torch cudnn"):
                continue  # the same call as beside single_pass
            swept = int(row["batch"]) * int(row["seqlen"]) == TOKENS.get(row["dtype"])
            if row["operation"] in operations and swept and row.get("tflops"):
                mask = "causal" if int(row["causal"]) else "full"
                panel = panels.setdefault((f"{row['dtype']} {mask}", f"head_dim {row['head_dim']}"), {})
                panel.setdefault(_series(row), {})[int(row["seqlen"])] = float(row["tflops"])
        if panels:
            title = f"Attention {name} on {rows[0]['gpu']}, {rows[0]['date']}"
            paths.append(folder / f"{name}.png")
            bar_panels(paths[-1], title, "TFLOP/s", COLORS, panels)
    return paths


def show(rows: Sequence[dict[str, object]], folder: Path) -> None:
    """Shows an earlier run: its table, and its plots if it has any and they can be drawn."""
    tables = {"model": model_table, "precision": precision_table, "pattern": sparse_table, "busy": numpy_table}
    tables |= {"work": bias_lines}
    tables |= {"over_plain": features.table, "head_dim_v": head_dim_table, "share": second_order_table}
    if {"head_dim_v", "of_copy"} <= set(rows[0]):
        print(*wide_table(rows), sep="\n")
        return
    for column, table in tables.items():
        if column in rows[0]:
            print(*table(rows), sep="\n")
            return
    if rows[0].get("operation") in SMALL_LAUNCHES:
        print(*small_table(rows), sep="\n")
        return
    if rows[0].get("dtype") == "float64":
        print(*float64_table(rows), sep="\n")
        return
    for column in COLUMNS:
        if column not in rows[0]:  # the CSV of a section that has neither, or of another script
            raise KeyError(column)
    if can_plot():
        print(*plot(rows, folder), sep="\n")
    print(*speed_table(rows, "float16", "torch cudnn"), sep="\n")


def model_table(rows: Sequence[dict[str, object]]) -> list[str]:
    """Returns the best peer's time over ours by model and size: forward, default backward, deterministic backward."""
    sized = [{**row, "size": f"{row['batch']} x {row['seqlen']}"} for row in rows]
    return [*ratio_table(sized, "model", "size", DEFAULT_OPERATIONS), *smallest_ratio(sized, "model", "size")]


def precision_table(rows: Sequence[dict[str, object]]) -> list[str]:
    """Returns the best peer's time over ours in float32, by precision, head_dim and mask, and by length."""
    masks = ("full", "causal")
    named = [
        {**row, "what": f"{row['precision']} {row['head_dim']} {masks[int(row['causal'])]}"}
        for row in sorted(rows, key=lambda row: str(row["precision"]))
    ]
    return [*ratio_table(named, "what", "seqlen", DEFAULT_OPERATIONS), *smallest_ratio(named, "what", "seqlen")]


def head_dim_table(rows: Sequence[dict[str, object]]) -> list[str]:
    """Returns the best peer's time over ours by both head_dims, heads and mask, and by batch and length."""
    masks = ("full", "causal")
    named = [
        {
            **row,
            "what": f"{row['dtype']} {row['head_dim']}/{row['head_dim_v']}, {row['num_heads']} heads, "
            f"{masks[int(row['causal'])]}",
            "size": f"{row['batch']} x {row['seqlen']}",
        }
        for row in rows
    ]
    return [*ratio_table(named, "what", "size", DEFAULT_OPERATIONS), *smallest_ratio(named, "what", "size")]


def bias_lines(rows: Sequence[dict[str, object]]) -> list[str]:
    """Returns the tables of `bias_tables` as lines, with what each is about above it."""
    tables = bias_tables(rows).items()
    return [line for name, table in tables for line in (f"{'cost' if name == Fa2cupy.name else name}:", *table, "")]


def small_table(rows: Sequence[dict[str, object]]) -> list[str]:
    """Returns the best peer's time over ours of a training step by heads, batch and length: as calls, as a graph."""
    named = [{**row, "what": f"{row['num_heads']} heads", "size": f"{row['batch']} x {row['seqlen']}"} for row in rows]
    return [*ratio_table(named, "what", "size", SMALL_LAUNCHES), *smallest_ratio(named, "what", "size")]


def float64_table(rows: Sequence[dict[str, object]]) -> list[str]:
    """Returns the least time of the others over ours in float64, by head_dim and mask, and by length."""
    masks = ("full", "causal")
    named = [{**row, "what": f"{row['head_dim']} {masks[int(row['causal'])]}"} for row in rows]
    return [*ratio_table(named, "what", "seqlen", DEFAULT_OPERATIONS), *smallest_ratio(named, "what", "seqlen")]


def _series(row: dict[str, object]) -> str:
    if row["operation"] == "forward":
        return row["provider"]
    if row["provider"] == Fa2cupy.name:
        return f"{row['provider']} {row['operation']}"
    return row["provider"] + (" deterministic" if row["operation"] == "two_pass" else "")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line; `--quick` only changes defaults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer sizes, fewer and shorter rounds")
    names = (*SECTIONS, ON_NUMPY)
    add("--sections", nargs="+", choices=names, default=SECTIONS, metavar="NAME", help=f"of {', '.join(names)}")
    add("--dtypes", nargs="+", choices=DTYPES, metavar="NAME", help=f"of {', '.join(DTYPES)}")
    head_dims = " ".join(map(str, HEAD_DIMS))
    add("--head-dims", nargs="+", type=supported_head_dim, metavar="N", help=f"default: {head_dims}")
    add(
        "--seqlens",
        nargs="+",
        type=positive_int,
        metavar="N",
        help=f"divisors of the tokens; default: {' '.join(map(str, SEQLENS))}",
    )
    add(
        "--operations",
        nargs="+",
        choices=OPERATIONS,
        default=OPERATIONS,
        metavar="NAME",
        help=f"of {', '.join(OPERATIONS)}",
    )
    names = tuple(function_cases.FUNCTIONS)
    add("--functions", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)}")
    add("--patterns", nargs="+", choices=PATTERNS, default=PATTERNS, metavar="NAME", help=f"of {', '.join(PATTERNS)}")
    names = tuple(
        PEERS | HEAD_DIM_PEERS | FLOAT64_PEERS | SECOND_ORDER_PEERS | BIAS_PEERS | WIDE_PEERS | FUNCTION_PEERS
    )
    add("--peers", nargs="*", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)}")
    add(
        "--rounds",
        type=positive_int,
        metavar="N",
        help="default: 7 (models, features, functions: 5, float64: 3), with --quick 3",
    )
    add("--out", metavar="DIR", help="default: scripts/results/<gpu>")
    add(
        "--plot-only",
        metavar="CSV",
        help="draw the plots of an earlier run beside its CSV, or in --out, and print its table; needs no GPU",
    )
    options = parser.parse_args(arguments)
    options.asked_head_dims, options.asked_seqlens = options.head_dims, options.seqlens
    defaults = QUICK if options.quick else {"dtypes": DTYPES, "head_dims": HEAD_DIMS, "seqlens": SEQLENS}
    for name, value in defaults.items():
        setattr(options, name, getattr(options, name) or value)
    options.few_rounds = options.rounds or 3
    options.short_rounds = options.rounds or (3 if options.quick else 5)
    options.rounds = options.rounds or (3 if options.quick else 7)
    options.budget_ms = 10.0 if options.quick else 20.0
    bad = [s for s in options.seqlens if TOKENS["float16"] % s]
    if bad:
        parser.error(f"--seqlens: {bad} do not divide {TOKENS['float16']}")
    return options


def run(options: argparse.Namespace, gpu: Gpu, folder: Path) -> Benchmark:
    """Runs the sections asked for; returns the `Benchmark` of benchmark.csv, with the failures of all sections.

    The rows so far are written after each problem, and when the run is interrupted.
    """
    peers = available_peers(gpu, [name for name in options.peers if name in PEERS])
    benchmark = Benchmark(gpu, peers, options.rounds, options.budget_ms)
    if IN_BENCHMARK_CSV & set(options.sections):
        run_speed(options, benchmark, folder / "benchmark.csv")
    if "startup" in options.sections:
        benchmark.startup(STARTUP_PROBLEMS, folder / "startup.csv")
    if "models" in options.sections:
        some = [peer for peer in peers if peer.name in MODEL_PEERS]
        models = Benchmark(gpu, some, options.short_rounds, MODEL_BUDGET_MS)
        run_models(models, folder / "models.csv")
        benchmark.failures += models.failures
    if "float32" in options.sections:
        some = [peer for peer in peers if peer.name in PRECISION_PEERS]
        benchmark.failures += run_precisions(gpu, some, options.short_rounds, folder / "float32.csv")
    if "head_dims" in options.sections:
        some = available_peers(gpu, [name for name in HEAD_DIM_PEERS if name in options.peers], HEAD_DIM_PEERS)
        head_dims = Benchmark(gpu, some, options.short_rounds, MODEL_BUDGET_MS)
        run_head_dims(options, head_dims, folder / "head_dims.csv")
        benchmark.failures += head_dims.failures
    if "float64" in options.sections:
        some = available_peers(gpu, [name for name in FLOAT64_PEERS if name in options.peers], FLOAT64_PEERS)
        benchmark.failures += run_float64(gpu, some, options.few_rounds, folder / "float64.csv")
    if "decode" in options.sections:
        some = [peer for peer in peers if peer.name in decoding.PEERS]
        path = folder / "decode.csv"
        benchmark.failures += decoding.run_decode(gpu, some, options.short_rounds, MODEL_BUDGET_MS, path)
    for name, (measure, file) in OWN_FILES.items():
        if name in options.sections:
            benchmark.failures += measure(options, gpu, folder / file)
    return benchmark


def run_speed(options: argparse.Namespace, benchmark: Benchmark, path: Path) -> None:
    """Runs the sections whose rows are in benchmark.csv."""
    problems = list(speed_problems(options.dtypes, options.head_dims, sorted(options.seqlens)))
    if "speed" not in options.sections:
        problems = []
    if "memory" in options.sections:
        problems.append(MEMORY_PROBLEM)
    if "speed" in options.sections:
        print("compiling")
        benchmark.gpu.precompile(problems, options.operations)
    work = [(problem, options.operations) for problem in problems]
    if "training" in options.sections:
        work += [(problem, (TRAINING,)) for problem in TRAINING_PROBLEMS]
    try:
        with progress(len(work), "benchmark") as bar:
            for problem, operations in work:
                benchmark.speed(problem, operations, bar.write)
                write_csv(path, COLUMNS, benchmark.rows)
                bar.update()
        if "host" in options.sections:
            for problem in HOST_PROBLEMS:
                benchmark.host(problem, options.operations)
            benchmark.host_of_second_order(HOST_PROBLEMS[0])
    finally:
        write_csv(path, COLUMNS, benchmark.rows)


def run_models(benchmark: Benchmark, path: Path) -> None:
    """Runs the section models."""
    work = list(model_problems())
    print("compiling")
    benchmark.gpu.precompile([problem for _, problem in work], OPERATIONS)
    with progress(len(work), "models") as bar:
        for model, problem in work:
            labels = {"model": model, "num_heads_kv": problem.heads_kv}
            benchmark.speed(problem, DEFAULT_OPERATIONS, bar.write, labels)
            write_csv(path, MODEL_COLUMNS, benchmark.rows)
            bar.update()
    print("", *model_table(benchmark.rows), "", sep="\n")


def run_precisions(gpu: Gpu, peers: Sequence, rounds: int, path: Path) -> list[str]:
    """Runs the section float32; returns its failures."""
    runs = [Benchmark(gpu, peers, rounds, MODEL_BUDGET_MS, precision) for precision in PRECISIONS]
    rows: list[dict[str, object]] = []
    problems = list(precision_problems())
    with progress(len(problems) * len(runs), "float32") as bar:
        for problem, one in itertools.product(problems, runs):
            one.speed(problem, DEFAULT_OPERATIONS, bar.write, {"precision": one.ours.precision})
            rows = [row for run in runs for row in run.rows]
            write_csv(path, PRECISION_COLUMNS, rows)
            bar.update()
    print("", *precision_table(rows), "", sep="\n")
    return [text for run in runs for text in run.failures]


def run_head_dims(options: argparse.Namespace, benchmark: Benchmark, path: Path) -> None:
    """Runs the section head_dims."""
    problems = [one for one in head_dim_problems() if is_asked(options, one)]
    print("compiling")
    benchmark.gpu.precompile(problems, OPERATIONS)
    with progress(len(problems), "head_dims") as bar:
        for problem in problems:
            benchmark.speed(
                problem, DEFAULT_OPERATIONS, bar.write, {"head_dim_v": problem.head_dim_v or problem.head_dim}
            )
            write_csv(path, HEAD_DIM_COLUMNS, benchmark.rows)
            bar.update()
    print("", *head_dim_table(benchmark.rows), "", sep="\n")


def run_float64(gpu: Gpu, peers: Sequence, rounds: int, path: Path) -> list[str]:
    """Runs the section float64; returns its failures."""
    beside, alone = Benchmark(gpu, peers, rounds, MODEL_BUDGET_MS), Benchmark(gpu, (), 1, MODEL_BUDGET_MS)
    work = [(beside, problem, DEFAULT_OPERATIONS) for problem in float64_problems()]
    work.append((alone, Problem("float64", 128, FLOAT64_LONGEST, 1, 1, False), DEFAULT_OPERATIONS[:2]))
    print("compiling")
    for family in (None, *(peer.family for peer in peers if isinstance(peer, Simt))):
        gpu.precompile([problem for _, problem, _ in work], OPERATIONS, family=family)
    rows: list[dict[str, object]] = []
    with progress(len(work), "float64") as bar:
        for run, problem, operations in work:
            run.speed(problem, operations, bar.write)
            rows = beside.rows + alone.rows
            write_csv(path, FLOAT64_COLUMNS, rows)
            bar.update()
    print("", *float64_table(rows), "", sep="\n")
    return beside.failures + alone.failures


def run_sparse(options: argparse.Namespace, gpu: Gpu, path: Path) -> list[str]:
    """Runs the section sparse; returns its failures."""
    run = SparseBenchmark(gpu, stamp_of(gpu), options.short_rounds, MODEL_BUDGET_MS, options.patterns)
    problems = [one for one in sparse_problems() if is_asked(options, one)]
    with progress(len(problems), "sparse") as bar:
        for problem in problems:
            run.measure(problem, bar.write)
            write_csv(path, SPARSE_COLUMNS, run.rows)
            bar.update()
    if "document" in options.patterns:
        run.measure_maps()
        write_csv(path, SPARSE_COLUMNS, run.rows)
    print("", *sparse_table(run.rows), "", sep="\n")
    return run.failures


def is_asked(options: argparse.Namespace, problem: Problem) -> bool:
    """Returns True if the command line names the head_dim and the length, or none."""
    asked = (options.asked_head_dims, problem.head_dim), (options.asked_seqlens, problem.seqlen)
    return all(names is None or own in names for names, own in asked)


def run_second_order(options: argparse.Namespace, gpu: Gpu, path: Path) -> list[str]:
    """Runs the section second_order; returns its failures."""
    peers = available_peers(gpu, [name for name in SECOND_ORDER_PEERS if name in options.peers], SECOND_ORDER_PEERS)
    beside = SecondOrderBenchmark(gpu, stamp_of(gpu), peers, options.short_rounds, MODEL_BUDGET_MS)
    alone = SecondOrderBenchmark(gpu, stamp_of(gpu), (), 1, MODEL_BUDGET_MS)
    work = [(beside, problem) for problem in second_order_problems()]
    work.append((alone, Problem("bfloat16", 128, LONGEST, 1, 1, False)))
    print("compiling")
    gpu.precompile([problem for _, problem in work], OPERATIONS, second_order=True)
    rows: list[dict[str, object]] = []
    with progress(len(work), "second_order") as bar:
        for run, problem in work:
            run.measure(problem, bar.write)
            rows = beside.rows + alone.rows
            write_csv(path, SECOND_ORDER_COLUMNS, rows)
            bar.update()
    print("", *second_order_table(rows), "", sep="\n")
    return beside.failures + alone.failures


def run_small(options: argparse.Namespace, gpu: Gpu, path: Path) -> list[str]:
    """Runs the section small; returns its failures."""
    peers = available_peers(gpu, [name for name in options.peers if name in PEERS])
    some = [peer for peer in peers if peer.name in MODEL_PEERS]
    run = Benchmark(gpu, some, options.short_rounds, MODEL_BUDGET_MS)
    work = list(small_problems())
    print("compiling")
    gpu.precompile(work, OPERATIONS)
    with progress(len(work), "small") as bar:
        for problem in work:
            run.small(problem, bar.write)
            write_csv(path, SMALL_COLUMNS, run.rows)
            bar.update()
    print("", *small_table(run.rows), "", sep="\n")
    return run.failures


def run_biases(options: argparse.Namespace, gpu: Gpu, path: Path) -> list[str]:
    """Runs the section biases; returns its failures."""
    peers = available_peers(gpu, [name for name in BIAS_PEERS if name in options.peers], BIAS_PEERS)
    run = BiasBenchmark(gpu, stamp_of(gpu), peers, options.short_rounds, MODEL_BUDGET_MS)
    work = list(bias_cases())
    print("compiling")
    gpu.compile(bias_specs(gpu.info, itertools.chain(*work)))
    with progress(len(work), "biases") as bar:
        for cases in work:
            run.measure(cases, bar.write)
            write_csv(path, BIAS_COLUMNS, run.rows)
            bar.update()
    print("", *bias_lines(run.rows), sep="\n")
    return run.failures


def run_wide(options: argparse.Namespace, gpu: Gpu, path: Path) -> list[str]:
    """Runs the section wide; returns its failures."""
    peers = available_peers(gpu, [name for name in WIDE_PEERS if name in options.peers], WIDE_PEERS)
    run = Benchmark(gpu, peers, options.few_rounds, MODEL_BUDGET_MS)
    problems, cached = list(wide_problems()), list(latent_problems())
    print("compiling")
    gpu.precompile(problems, ("forward", "two_pass"))
    pairs = dict.fromkeys((problem.head_dim, problem.head_dim_v) for problem in cached)
    gpu.compile(spec for pair in pairs for spec in decode_specs(gpu.info, "bfloat16", *pair, causal=False))
    with progress(len(problems) + len(cached), "wide") as bar:
        for problem in problems:
            labels = {"head_dim_v": problem.head_dim_v or problem.head_dim}
            run.speed(problem, WIDE_OPERATIONS, bar.write, labels)
            write_csv(path, WIDE_COLUMNS, run.rows)
            bar.update()
        copy, rng = decoding.copy_candidate(gpu), random.Random(0)
        for problem in cached:
            try:
                how = (copy, (), options.short_rounds, MODEL_BUDGET_MS, rng, bar.write)
                run.rows += [row_of(problem, row) for row in decoding.measured(gpu, problem, *how)]
                write_csv(path, WIDE_COLUMNS, run.rows)
            except Exception as error:  # a wrong result, or no memory
                run.failures.append(f"FAILED: {problem}: {error}")
            gpu.release()
            bar.update()
    print("", *wide_table(run.rows), "", sep="\n")
    return run.failures


def run_features(options: argparse.Namespace, gpu: Gpu, path: Path) -> list[str]:
    """Runs the section features; returns its failures."""
    peers = available_peers(gpu, [name for name in features.OPERATORS if name in options.peers], features.OPERATORS)
    run = features.FeatureBenchmark(gpu, peers, (features.DEFAULT,), options.short_rounds, FEATURES_BUDGET_MS)
    features.measure_all(run, features.all_cases(PEER_FEATURES, features.HEAD_DIMS, features.SEQLENS), path)
    print("", *features.table(run.rows), "", sep="\n")
    return run.failures


def run_functions(options: argparse.Namespace, gpu: Gpu, path: Path) -> list[str]:
    """Runs the section functions; returns its failures."""
    peers = available_peers(gpu, [name for name in FUNCTION_PEERS if name in options.peers], FUNCTION_PEERS)
    run = features.FeatureBenchmark(gpu, peers, (features.DEFAULT,), options.short_rounds, FEATURES_BUDGET_MS)
    cases = function_cases.all_cases(options.functions, features.HEAD_DIMS)
    features.measure_all(run, [one for one in cases if is_asked(options, one.problem)], path)
    print("", *features.table(run.rows), "", sep="\n")
    return run.failures


def run_calls(options: argparse.Namespace, gpu: Gpu, path: Path) -> list[str]:
    """Runs the section calls; returns its failures."""
    rows = []
    try:
        for row in measure_calls(stamp_of(gpu)):
            rows.append(row)
            write_csv(path, CALL_COLUMNS, rows)
            print(
                f"  {row['feature']:16s}d={row['head_dim']:<4}{row['operation']:9s} first {row['first_s']:.2f} s, host "
                f"{row['host_us']:.1f} us, {row['growth_us']:+.1f} us beside none"
            )
    except RuntimeError as error:
        return [f"FAILED: {error}"]
    return []


#: Sections that return their failures and write a file of their own, in the order in which they run.
OWN_FILES = {
    "sparse": (run_sparse, "sparse.csv"),
    "second_order": (run_second_order, "second_order.csv"),
    "biases": (run_biases, "biases.csv"),
    "features": (run_features, "features-peers.csv"),
    "functions": (run_functions, "functions.csv"),
    "calls": (run_calls, "function-calls.csv"),
    "small": (run_small, "small.csv"),
    "wide": (run_wide, "wide.csv"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a result was wrong or one of ours failed."""
    options = parse_arguments(arguments)
    if options.plot_only:
        source, chosen = options.plot_only, options.out
        return show_earlier(source, lambda rows: show(rows, plots_folder(source, chosen)))
    failures: list[str] = []
    if ON_NUMPY in options.sections:
        folder = results_folder(cpu_name(), options.out)
        failures = run_numpy(CASES, options.short_rounds, folder / "numpy.csv")
        print(f"written to {folder}", *failures, sep="\n")
    if not set(options.sections) - {ON_NUMPY}:
        return 1 if failures else 0
    gpu = find_gpu()
    if gpu is None:
        return 2
    folder = results_folder(gpu.name, options.out)
    benchmark = run(options, gpu, folder)
    if benchmark.rows:
        if can_plot():
            plot(benchmark.rows, folder)
        print("our speed relative to:", *summary(benchmark.rows), sep="\n")
    print(f"written to {folder}")
    for text in benchmark.failures:
        print(text, file=sys.stderr)
    return 1 if benchmark.failures or failures else 0


if __name__ == "__main__":
    sys.exit(run_command("benchmark.py", main))
