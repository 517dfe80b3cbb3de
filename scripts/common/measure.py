"""The tools of all measurements: problems, the GPU, timing, memory, and result files."""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import functools
import gc
import itertools
import math
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from common import SCRIPTS

from fa2cupy import precompile
from fa2cupy.errors import KernelCompileError
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.operations import METHODS
from fa2cupy.jit.cache import cached_kernel
from fa2cupy.jit.spec import KernelSpec
from fa2cupy.problem.attention import MAX_HEAD_DIM
from fa2cupy.problem.dtypes import ITEMSIZE
from fa2cupy.system.progress import progress  # noqa: F401  (the scripts take it from here)


def visible_pairs(seqlen: int, left: int) -> float:
    """Returns the visible pairs of one causal head with a window of `left` keys to the left of the diagonal."""
    return float(np.minimum(np.arange(seqlen), left).sum() + seqlen)


#: Operations beside those of the single kernels: a backward by the default method, one by a method whose results are
#: reproducible, and a forward and a backward, attention's part of a training step.
DEFAULT, DETERMINISTIC, TRAINING = "default", "deterministic", "training"

#: Matrix products of one tile pair: those with the columns of q (S, dQ and dK), and with those of v (O, dP and dV).
#: ``single_pass``, ``two_pass`` and the operations above name whole calls; the useful work of a backward is five
#: products. The other names are those of single kernels, with the products that the kernel really computes.
_PRODUCTS = {
    "forward": (1, 1),
    "single_pass": (3, 2),
    "two_pass": (3, 2),
    DEFAULT: (3, 2),
    DETERMINISTIC: (3, 2),
    TRAINING: (4, 3),
    "backward": (3, 2),
    "backward_dq": (2, 1),
    "backward_dkdv": (2, 2),
    "jvp": (3, 3),
    "backward_jvp": (7, 3),
    "double_backward": (7, 5),
}


def flops(operation: str, pairs: float, head_dim: int, head_dim_v: int | None = None) -> float:
    """Returns the floating-point operations on pairs of a query and a key: 2 for each multiply-add of the products."""
    of_q, of_v = _PRODUCTS[operation]
    return 2 * pairs * (of_q * head_dim + of_v * (head_dim_v or head_dim))


def backward_options(operation: str) -> dict[str, object]:
    """Returns the keywords that make `fa2cupy.backward` this operation."""
    if operation in METHODS:
        return {"method": operation}
    return {"deterministic": True} if operation == DETERMINISTIC else {}


@dataclass(frozen=True)
class Problem:
    """Self-attention of (batch, seqlen, num_heads, head_dim) arrays.

    k and v may have fewer heads, and v may have another head_dim.
    """

    dtype: str
    head_dim: int
    seqlen: int
    batch: int
    num_heads: int
    causal: bool
    num_heads_kv: int | None = None
    head_dim_v: int | None = None

    @property
    def heads_kv(self) -> int:
        """Heads of k and v."""
        return self.num_heads_kv or self.num_heads

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of q and its gradient."""
        return self.batch, self.seqlen, self.num_heads, self.head_dim

    @property
    def shape_kv(self) -> tuple[int, int, int, int]:
        """The shape of k and its gradient."""
        return self.batch, self.seqlen, self.heads_kv, self.head_dim

    @property
    def shape_o(self) -> tuple[int, int, int, int]:
        """The shape of o and its gradient."""
        return (*self.shape[:-1], self.head_dim_v or self.head_dim)

    @property
    def shape_v(self) -> tuple[int, int, int, int]:
        """The shape of v and its gradient."""
        return (*self.shape_kv[:-1], self.head_dim_v or self.head_dim)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of o or its gradient."""
        return math.prod(self.shape_o) * ITEMSIZE[self.dtype]

    @property
    def input_bytes(self) -> int:
        """Bytes of q, k and v."""
        return sum(map(math.prod, (self.shape, self.shape_kv, self.shape_v))) * ITEMSIZE[self.dtype]

    def result_bytes(self, operation: str) -> int:
        """Returns the bytes of o in a forward, of dq, dk and dv in a backward, and of all four in a training step."""
        if operation == "forward":
            return self.tensor_bytes
        return self.input_bytes + (self.tensor_bytes if operation == TRAINING else 0)

    def columns(self) -> dict[str, object]:
        """Returns the columns of a CSV that identify it, except the heads of k and v and the head_dim of v."""
        columns = {**vars(self), "causal": int(self.causal)}
        del columns["num_heads_kv"], columns["head_dim_v"]
        return columns

    @property
    def numpy_dtype(self) -> np.dtype:
        """Dtype of the arrays; NumPy and CuPy know bfloat16 through ml_dtypes."""
        return np.dtype(ml_dtypes.bfloat16 if self.dtype == "bfloat16" else self.dtype)

    def flops(self, operation: str) -> float:
        """Returns the floating-point operations: 2 for each multiply-add of the matrix products, half when causal."""
        pairs = self.batch * self.num_heads * self.seqlen**2
        return flops(operation, pairs / 2 if self.causal else pairs, self.head_dim, self.head_dim_v)

    def tflops(self, operation: str, milliseconds: float) -> float:
        """Returns the TFLOP/s of a call."""
        return self.flops(operation) / milliseconds / 1e9

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        heads = self.num_heads if self.heads_kv == self.num_heads else f"{self.num_heads}/{self.heads_kv}"
        columns = f"{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v else "")
        return f"{self.dtype} d={columns} seqlen={self.seqlen} batch={self.batch} heads={heads} {mask}"


@dataclass(frozen=True)
class Tensors:
    """One set of inputs, in fa2cupy's layout."""

    q: object
    k: object
    v: object
    do: object


class Gpu:
    """The measured device, with everything that needs one."""

    def __init__(self):
        import cupy

        self.xp = cupy
        self.info = DeviceInfo.current()
        self.name = self.info.name
        self.driver = _driver_version()
        self._gate = _Gate(cupy)

    def tensors(self, problem: Problem, count: int) -> list[Tensors]:
        """Draws `count` sets of standard normal inputs together: a generator takes longer to start than to draw."""
        random_state = self.xp.random.RandomState(0)
        # Not float32 numbers for float64: multiplying their zeros takes less power, and clocks are higher.
        wide = "float64" if problem.dtype == "float64" else "float32"
        drawn = [
            random_state.standard_normal((count, *shape), dtype=wide).astype(problem.numpy_dtype)
            for shape in (problem.shape, problem.shape_kv, problem.shape_v, problem.shape_o)
        ]
        return [Tensors(*arrays) for arrays in zip(*drawn, strict=True)]

    def address(self, array) -> int:
        """Returns the address of an array's first element."""
        return array.data.ptr

    def synchronize(self) -> None:
        """Waits for all queued work."""
        self.xp.cuda.Device().synchronize()

    def elapsed_ms(self, call: Callable[[], object], repeats: int) -> float:
        """Returns the mean milliseconds of `repeats` calls, by CUDA events around all of them.

        The calls are queued while the GPU waits, so that the time of short ones is not that of the host.
        """
        start, stop = self.xp.cuda.Event(), self.xp.cuda.Event()
        with self._gate.closed():
            start.record()
            for _ in range(repeats):
                call()
            stop.record()
        stop.synchronize()
        return self.xp.cuda.get_elapsed_time(start, stop) / repeats

    def elapsed_host_ms(self, call: Callable[[], object], repeats: int) -> float:
        """Returns the mean milliseconds of `repeats` calls by the host's clock, from an idle GPU to an idle GPU."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        self.synchronize()
        return (time.perf_counter() - start) / repeats * 1e3

    def captured(self, call: Callable[[], tuple]) -> Callable[[], tuple]:
        """Returns the launch of a CUDA graph of a call that has been made before; it returns the call's results."""
        self.synchronize()  # the stream of the capture waits for no other one
        with self.xp.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            results = call()
            graph = stream.end_capture()

        def launch() -> tuple:
            graph.launch(self.xp.cuda.get_current_stream())
            return results

        return launch

    def peak_bytes(self, call: Callable[[], object]) -> int:
        """Returns the peak bytes of CuPy's pool in a call, its results included."""
        pool = self.xp.get_default_memory_pool()
        before = pool.used_bytes()
        with _pool_meter(self.xp, pool) as meter:
            call()
        return max(0, meter.peak - before)

    def precompile(
        self,
        problems: Iterable[Problem],
        operations: Iterable[str],
        features: Sequence[Sequence[str]] = ((),),
        family: str | None = None,
        second_order: bool = False,
    ) -> None:
        """Compiles the kernels of the calls in parallel; keywords are those of `fa2cupy.precompile`."""
        methods = [name for name in operations if name != "forward"]
        groups: dict[tuple[str, int | None], list[Problem]] = {}
        for problem in problems:
            groups.setdefault((problem.dtype, problem.head_dim_v), []).append(problem)
        for (dtype, head_dim_v), group in groups.items():
            sizes = {"head_dims": sorted({p.head_dim for p in group}), "head_dim_v": head_dim_v}
            masks = sorted({p.causal for p in group})
            how = {"methods": methods, "features": features, "family": family, "second_order": second_order}
            precompile(dtypes=[dtype], **sizes, causal=masks, **how, decode=False)

    def compile(self, specs: Iterable[KernelSpec]) -> None:
        """Compiles kernels in parallel. A failure is ignored: the call that needs the kernel will report it."""

        def attempt(spec: KernelSpec) -> None:
            with contextlib.suppress(KernelCompileError):
                cached_kernel(spec)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(attempt, dict.fromkeys(specs)))

    def release(self) -> None:
        """Gives unused memory of the pool back, so that other libraries can have it."""
        gc.collect()
        self.xp.get_default_memory_pool().free_all_blocks()


def find_gpu(otherwise: str = "") -> Gpu | None:
    """Returns the current device, or says what is missing, and what does without it, and returns None."""
    try:
        return Gpu()
    except Exception as error:  # CuPy missing, or without driver or device: each raises its own kind
        print(f"this needs a CUDA GPU and CuPy: {error}{otherwise}", file=sys.stderr)
        return None


def stamp_of(gpu: Gpu) -> dict[str, str]:
    """Returns the columns that say where and when a row was measured."""
    return {"gpu": gpu.name, "driver": gpu.driver, "date": datetime.date.today().isoformat()}


class _Gate:
    """A gate on the GPU: work that is queued after it starts when it is opened.

    It is a kernel that waits for a flag in the host's memory, for a limited number of clock cycles. The limit ends the
    deadlock of a host that waits for the GPU before it opens the gate, because the queue is full or memory is freed.
    """

    _SOURCE = r"""
    extern "C" __global__ void wait_for_flag(const volatile int* flag, long long cycles) {
        const long long start = clock64();
        while (!*flag && clock64() - start < cycles) {}
    }"""
    _CYCLES = 50_000_000

    def __init__(self, cupy):
        self._wait = cupy.RawKernel(self._SOURCE, "wait_for_flag")
        self._memory = cupy.cuda.alloc_pinned_memory(4)  # the GPU reads it at the same address
        self._flag = np.frombuffer(self._memory, np.int32, 1)

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Delays the work that is queued within it until its end. All earlier work must have finished."""
        self._flag[0] = 0
        self._wait((1,), (1,), (np.uint64(self._memory.ptr), np.int64(self._CYCLES)))
        try:
            yield
        finally:
            self._flag[0] = 1


def _pool_meter(cupy, pool):
    class PoolMeter(cupy.cuda.MemoryHook):
        """Notes the most bytes in use after any allocation."""

        name = "PoolMeter"
        peak = 0

        def malloc_postprocess(self, **event):
            self.peak = max(self.peak, pool.used_bytes())

    return PoolMeter()


def _driver_version() -> str:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        from cupy.cuda import runtime

        version = runtime.driverGetVersion()
        return f"for CUDA {version // 1000}.{version % 1000 // 10}"


# --- timing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """An implementation bound to its inputs.

    Attributes
    ----------
    name : str
    call : callable
        Computes on the next set of inputs and returns the implementation's own arrays.
    mode : callable, optional
        Returns a context manager in which the calls are made.
    """

    name: str
    call: Callable[[], tuple]
    mode: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


def sets_beyond_cache(bytes_per_set: int, l2_bytes: int) -> int:
    """Returns the number of input sets to rotate among, so that none is still in the L2 cache at its next turn."""
    return max(2, 2 * l2_bytes // bytes_per_set + 1)


def rotating_inputs(gpu: Gpu, problem: Problem) -> list[Tensors]:
    """Draws inputs that are together larger than twice the L2 cache."""
    return gpu.tensors(problem, sets_beyond_cache(problem.input_bytes, gpu.info.l2_bytes))


def rotating(function: Callable[..., tuple], argument_sets: Sequence[tuple]) -> Callable[[], tuple]:
    """Returns a call without arguments that takes the next of `argument_sets` each time."""
    return taking_turns([functools.partial(function, *arguments) for arguments in argument_sets])


def taking_turns(calls: Sequence[Callable[[], tuple]]) -> Callable[[], tuple]:
    """Returns a call that makes the next of `calls` each time."""
    following = itertools.cycle(calls).__next__
    return lambda: following()()


#: Most calls that are queued before the first one starts. Ours have up to four launches; the queue holds 1024.
MOST_QUEUED = 200


def milliseconds(
    gpu: Gpu, call: Callable[[], object], budget_ms: float, elapsed: Callable[..., float] | None = None
) -> float:
    """Returns the mean time of a call over about `budget_ms`; first calls (compilation, handles) must be done.

    `elapsed` is the clock, by default `Gpu.elapsed_ms`.
    """
    elapsed = elapsed or gpu.elapsed_ms
    repeats = min(MOST_QUEUED, max(1, round(budget_ms / max(elapsed(call, 1), 1e-3))))
    # After an idle GPU or a lighter kernel, a kernel starts at a higher clock than it can sustain.
    elapsed(call, -(-repeats // 3))
    return elapsed(call, repeats)


def time_in_rounds(
    gpu: Gpu,
    candidates: Sequence[Candidate],
    rounds: int,
    budget_ms: float,
    rng: random.Random,
    elapsed: Callable[..., float] | None = None,
) -> dict[str, list[float]]:
    """Returns the milliseconds of each candidate by round. Clocks drift, so they take turns, in shuffled order."""
    times: dict[str, list[float]] = {candidate.name: [] for candidate in candidates}
    for _ in range(rounds):
        for candidate in rng.sample(candidates, len(candidates)):
            with candidate.mode():
                times[candidate.name].append(milliseconds(gpu, candidate.call, budget_ms, elapsed))
    return times


def host_microseconds(
    gpu: Gpu, candidates: Sequence[Candidate], rounds: int = 5, calls: int = 30, batches: int = 30
) -> dict[str, float]:
    """Returns the host time of a call that waits for nothing: the least of rounds in which the candidates take turns.

    Other work of the host makes calls slower, never faster, and for seconds at a time: the median of one round alone
    varies by half between runs.
    """
    least = dict.fromkeys((candidate.name for candidate in candidates), math.inf)
    for _ in range(rounds):
        for candidate in candidates:
            least[candidate.name] = min(least[candidate.name], _host_median(gpu, candidate, calls, batches))
    return least


def _host_median(gpu: Gpu, candidate: Candidate, calls: int, batches: int) -> float:
    """Returns the microseconds of a call: the median over batches too short to fill the launch queue."""
    samples = []
    with candidate.mode():
        for _ in range(calls):
            candidate.call()
        enabled = gc.isenabled()
        gc.disable()
        try:
            for _ in range(batches):
                gpu.synchronize()
                start = time.perf_counter()
                for _ in range(calls):
                    candidate.call()
                samples.append((time.perf_counter() - start) / calls)
        finally:
            if enabled:
                gc.enable()
        gpu.synchronize()
    return statistics.median(samples) * 1e6


# --- results ----------------------------------------------------------------------------------------------------------


def slug(device_name: str) -> str:
    """Returns a device's name as a folder name: ``h100-80gb-hbm3``."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower().removeprefix("nvidia ")).strip("-")


def results_folder(device_name: str, chosen: str | None = None) -> Path:
    """Creates the folder for a device's results: the user's choice, else ``scripts/results/<device>``."""
    return _created(Path(chosen) if chosen else SCRIPTS / "results" / slug(device_name))


def plots_folder(source: str | Path, chosen: str | None = None) -> Path:
    """Creates the folder for the pictures of an earlier run: the user's choice, else that of its CSV."""
    return _created(Path(chosen) if chosen else Path(source).parent)


def _created(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Writes rows; a column that a row lacks stays empty, and numbers get five significant digits."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: f"{v:.5g}" if isinstance(v, float) else v for name, v in row.items()})


def read_csv(path: Path) -> list[dict[str, str]]:
    """Reads rows as `write_csv` wrote them, all values as text."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def show_earlier(
    source: str | Path, show: Callable[[list[dict[str, str]]], object], option: str = "--plot-only"
) -> int:
    """Shows the rows of a CSV that an earlier run has written, for `option`. Returns the exit status."""
    try:
        rows = read_csv(Path(source))
        if not rows:
            raise ValueError("it has no rows")
        show(rows)
    except BrokenPipeError:  # of stdout, which `run_command` handles
        raise
    except (OSError, csv.Error, KeyError, TypeError, ValueError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        print(f"{option}: {source} cannot be shown as the CSV of an earlier run ({reason})", file=sys.stderr)
        return 2
    return 0


def positive_int(text: str) -> int:
    """Parses a number of the command line that must be at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an int of at least 1, got {text!r}")
    return int(text)


def supported_head_dim(text: str) -> int:
    """Parses a head_dim of the command line."""
    if positive_int(text) > MAX_HEAD_DIM:
        raise argparse.ArgumentTypeError(f"up to {MAX_HEAD_DIM} is supported, got {text}")
    return int(text)


def format_bytes(count: float) -> str:
    """Formats ``1536`` as ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
