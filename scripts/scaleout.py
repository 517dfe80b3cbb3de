"""The schemes of `fa2cupy.distributed` on the GPUs of one host, beside one GPU that has the same work.

    python scripts/scaleout.py                          2, 4, ... GPUs, 32768 and 131072 rows
    python scripts/scaleout.py --full                   524288 and 1048576 rows, too
    python scripts/scaleout.py --ranks 4 --rows 131072 --heads 32/8 --schemes heads gather
    python scripts/scaleout.py --plot-only scripts/results/h200/scaleout.csv
    python scripts/scaleout.py --simulate --out DIR     the same on NumPy and simulated ranks: times say nothing

Forward, backward and both (``training``) of bfloat16, head_dim 128, causal, one sequence, rows in zigzag order, one
process for each GPU.

Results are checked first. Up to 32768 rows they are compared with one call of one GPU: ``error`` is the largest error
over the largest value, and ``equal`` says whether o and lse are equal bit for bit. Beyond, two calls with
``deterministic=True`` must give equal bits (``equal``), and 64 rows of each rank are compared with float64, o, lse and
dq over all keys, dk and dv over all queries, in one K/V head (``error``). A wrong result is reported and not timed, and
the exit status is 1.

The baseline is the same work on each GPU without messages: a share of the heads (at least one K/V head), the whole
sequence, in contiguous arrays. Scheme and baseline take turns, call by call, after at least a second of work. Ranks
meet before each call, and the time of a call is that of the slowest rank, by CUDA events. ``efficiency`` is the median
of the baseline over that of the scheme; it is empty where the ranks do not divide the heads. ``tflops`` is that of one
GPU. ``extra_bytes`` are the most bytes of CuPy's pool (for PyTorch, of its allocator) that a call of the largest rank
needs beyond inputs and results.

PyTorch's context parallelism with cuDNN (``torch ring``) is timed in the same processes, if PyTorch has it. Writes
scaleout.csv after each problem and scheme, and scaleout.png.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import multiprocessing
import os
import queue
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common.measure import (
    TRAINING,
    Gpu,
    Problem,
    find_gpu,
    format_bytes,
    positive_int,
    progress,
    results_folder,
    show_earlier,
    stamp_of,
    write_csv,
)
from common.plots import can_plot, line_panels
from common.scaleout_peers import TorchRing, TorchRingWork
from methods import group_of_heads

import fa2cupy
import fa2cupy.distributed as dist
from fa2cupy.cli import run_command
from fa2cupy.families.operations import METHODS

COLUMNS = (
    "gpu", "driver", "date", "dtype", "head_dim", "seqlen", "batch", "num_heads", "num_heads_kv", "causal", "ranks",
    "scheme", "operation", "check", "error", "equal", "calls", "ms_median", "ms_min", "ms_max", "alone_ms_median",
    "tflops", "efficiency", "extra_bytes",
)  # fmt: skip
SCHEMES, PEER = ("heads", "gather", "ring"), TorchRing.name
OPERATIONS = ("forward", "backward", TRAINING)
ROWS, FULL_ROWS = (32768, 131072), (32768, 131072, 524288, 1048576)
HEADS = ((32, 8), (16, 4), (16, 16))
SIMULATED_ROWS, SIMULATED_HEADS = (64, 128), ((4, 2), (2, 2))

#: Largest error over the largest value. Shares of gradients are rounded before they are summed.
ALLOWED = {"float64": 1e-12, "bfloat16": 2e-2}
#: Rows of a rank that are compared with float64.
SAMPLES = 64
#: Work before the clock counts, the time for one scheme, and calls in it at most.
WARM_S, BUDGET_S, MOST_CALLS = 1.5, 6.0, 15
#: How long a rank waits for messages, and this process for the next answer of the ranks.
TIMEOUT_S, PATIENCE_S = 600.0, 1800.0
#: How often it looks whether they are alive, and how long they may take to end.
POLL_S, EXIT_S = 1.0, 10.0


class Job(NamedTuple):
    """One scheme on one problem of the whole sequence."""

    problem: Problem
    ranks: int
    scheme: str

    def __str__(self) -> str:
        return f"{self.scheme} on {self.ranks} ranks, {self.problem}"


class Measurement(NamedTuple):
    """What one rank has found.

    Attributes
    ----------
    check : str
        What results were compared with: ``one call`` or ``samples``; for a peer ``gather``.
    error : float
        The largest of all ranks.
    equal : bool or None
        Whether o and lse are those of one call bit for bit, or whether repeated calls are equal, on all ranks.
    extra_bytes : int or None
    times, alone : dict of list of float
        Milliseconds of each call by operation, of the scheme and of the baseline; none if a result was wrong.
    missing : str
        Why there is no result of a peer.
    """

    check: str
    error: float
    equal: bool | None
    extra_bytes: int | None = None
    times: Mapping[str, Sequence[float]] = {}
    alone: Mapping[str, Sequence[float]] = {}
    missing: str = ""

    def wrong(self, dtype: str) -> str:
        """What is wrong with the result; empty if nothing is."""
        if not self.error <= ALLOWED[dtype]:
            return f"error {self.error:.1e} of the largest value, {ALLOWED[dtype]:.0e} is allowed"
        return "repeated calls differ" if self.check == "samples" and not self.equal else ""


class Work:
    """Forward and backward on arrays that stay the same."""

    def __init__(self, forward: Callable[..., tuple], backward: Callable[..., tuple], arrays: Sequence):
        self.inputs = arrays
        self._forward, self._backward = partial(forward, causal=True), partial(backward, causal=True)
        self._saved = self.forward()

    def forward(self) -> tuple:
        """O and lse."""
        return self._forward(*self.inputs[:3])

    def backward(self) -> tuple:
        """The gradients, from what the first forward left."""
        return self._backward(*self.inputs[:3], *self._saved, self.inputs[3])

    def training(self, **options: object) -> tuple:
        """A forward and its backward: o, lse, dq, dk and dv."""
        saved = self.forward()
        return (*saved, *self._backward(*self.inputs[:3], *saved, self.inputs[3], **options))


# --- where ranks compute ----------------------------------------------------------------------------------------------


class HostDevice:
    """NumPy, for simulated ranks."""

    xp, dtype, head_dim = np, "float64", 16
    #: The longest sequence that is compared with one call.
    whole_rows = 64
    warm_s, most_calls = 0.0, 2

    def __init__(self, rank: int):
        self._rng = np.random.default_rng(rank)

    def draw(self, problem: Problem) -> list:
        """Standard normal q, k, v and do."""
        shapes = (problem.shape, problem.shape_kv, problem.shape_kv, problem.shape)
        return [self._rng.standard_normal(shape) for shape in shapes]

    def mark(self) -> float:
        """A point in time, between two of which milliseconds are counted."""
        return time.perf_counter()

    def milliseconds(self, start: float, stop: float) -> float:
        """Between two marks, the second of which is waited for."""
        return 1e3 * (stop - start)

    def to_host(self, array) -> np.ndarray:
        """As an array of NumPy."""
        return array

    def extra_bytes(self, call: Callable[[], tuple]) -> int | None:
        """Not counted."""
        return None

    def release(self) -> None:
        """Nothing is kept."""


class GpuDevice:
    """The GPU of a rank; the same methods."""

    dtype, head_dim, whole_rows = "bfloat16", 128, 32768
    warm_s, most_calls = WARM_S, MOST_CALLS
    #: Rows that are drawn together, in float32.
    _STEP = 32768

    def __init__(self, rank: int):
        self.gpu = Gpu()
        self.xp = self.gpu.xp
        self._random = self.xp.random.RandomState(rank)

    def draw(self, problem: Problem) -> list:
        """Standard normal q, k, v and do."""
        arrays = []
        for shape in (problem.shape, problem.shape_kv, problem.shape_kv, problem.shape):
            array = self.xp.empty(shape, problem.numpy_dtype)
            for start in range(0, problem.seqlen, self._STEP):
                part = array[:, start : start + self._STEP]
                drawn = self._random.standard_normal(part.shape, dtype=self.xp.float32)
                part[...] = drawn.astype(problem.numpy_dtype)
            arrays.append(array)
        return arrays

    def mark(self):
        """An event on the current stream."""
        event = self.xp.cuda.Event()
        event.record()
        return event

    def milliseconds(self, start, stop) -> float:
        """Between two marks, the second of which is waited for."""
        stop.synchronize()
        return self.xp.cuda.get_elapsed_time(start, stop)

    def to_host(self, array) -> np.ndarray:
        """As an array of NumPy."""
        return array.get()

    def extra_bytes(self, call: Callable[[], tuple]) -> int | None:
        """Most bytes of the pool that a call holds beyond its results."""
        results = []

        def counted() -> None:
            results.append(sum(array.nbytes for array in call()))

        return max(0, self.gpu.peak_bytes(counted) - results[0])

    def release(self) -> None:
        """Gives unused memory of the pool back."""
        self.gpu.synchronize()
        self.gpu.release()


# --- one rank ---------------------------------------------------------------------------------------------------------


class Rank:
    """Measures jobs together with the other ranks.

    Parameters
    ----------
    comm : Communicator
    device : HostDevice or GpuDevice
    make_peer : callable, optional
        Returns the `TorchRing` of this rank.
    """

    def __init__(self, comm: dist.Communicator, device, make_peer: Callable[[], TorchRing] | None = None):
        self.comm, self.device, self.xp = comm, device, device.xp
        self._make_peer, self._peer = make_peer, None

    def meet(self) -> None:
        """Lets all ranks begin at the same time."""
        dist.unshard(self.comm, self.xp.zeros((1,), "float32"), axis=0, order="contiguous")

    def everyones(self, *values: float) -> np.ndarray:
        """The values of all ranks, a row for each."""
        own = self.xp.asarray([values], "float64")
        return self.device.to_host(dist.unshard(self.comm, own, axis=0, order="contiguous"))

    def measure(self, job: Job) -> Measurement:
        """Checks and times a job."""
        self.device.release()
        problem = job.problem
        own = self.device.draw(part_of(problem, seqlen=problem.seqlen // job.ranks))
        if job.scheme == PEER:
            return self._measure_peer(job, own)
        work = self._scheme(job.scheme, own)
        is_whole = problem.seqlen <= self.device.whole_rows
        error, equal = (self._whole_check if is_whole else self._sampled_check)(work)
        found = self.everyones(error, equal)
        result = Measurement("one call" if is_whole else "samples", float(found[:, 0].max()), bool(found[:, 1].all()))
        if result.wrong(problem.dtype):
            return result
        self.device.release()
        extra = [self.device.extra_bytes(call) for call in (work.forward, work.backward)]
        times, alone = self._times(job, work)
        most = None if None in extra else int(self.everyones(*extra).max())
        return result._replace(extra_bytes=most, times=times, alone=alone)

    def _scheme(self, scheme: str, own: Sequence) -> Work:
        forward, backward = (partial(call, self.comm, scheme=scheme) for call in (dist.forward, dist.backward))
        return Work(forward, backward, own)

    def _whole_check(self, work: Work) -> tuple[float, bool]:
        """The largest error beside one call on the whole sequence, and whether o and lse are equal."""
        whole = [dist.unshard(self.comm, array) for array in work.inputs]
        wanted = Work(fa2cupy.forward, fa2cupy.backward, whole).training()
        wanted = [dist.shard(self.comm, one, axis=axis) for one, axis in zip(wanted, (1, 2, 1, 1, 1), strict=True)]
        found = work.training()
        errors = [relative_error(one, other) for one, other in zip(found, wanted, strict=True)]
        return max(errors), all(is_equal(one, other) for one, other in zip(found[:2], wanted[:2], strict=True))

    def _sampled_check(self, work: Work) -> tuple[float, bool]:
        """The largest error of some rows beside float64, and whether two calls are equal."""
        found = work.training(deterministic=True)
        again = work.training(deterministic=True)
        equal = all(is_equal(one, other) for one, other in zip(found, again, strict=True))
        del again
        return max(self._sampled_errors(work.inputs, found)), equal

    def _sampled_errors(self, own: Sequence, found: Sequence) -> Iterator[float]:
        """Of o, lse, dq, dk and dv, for some rows of this rank in its last K/V head and a query head of that."""
        xp, (q, k, v, do), (o, lse, dq, dk, dv) = self.xp, own, found
        seqlen, scale = q.shape[1] * self.comm.size, q.shape[-1] ** -0.5
        rows = xp.asarray(np.unique(np.linspace(0, q.shape[1] - 1, SAMPLES).astype(int)))
        mine = xp.asarray(dist.positions(self.comm, seqlen))[rows][:, None]
        everywhere = xp.arange(seqlen)[None]
        head_kv, group = k.shape[2] - 1, q.shape[2] // k.shape[2]
        first = head_kv * group

        def some(array, head: int):
            return array[0, :, head][rows].astype("float64")

        def whole(array, head: int):
            return dist.unshard(self.comm, array[:, :, head])[0].astype("float64")

        all_k, all_v, some_do = whole(k, head_kv), whole(v, head_kv), some(do, first)
        scores = scale * some(q, first) @ all_k.T
        scores[everywhere > mine] = -np.inf
        largest = scores.max(axis=1, keepdims=True)
        wanted_lse = largest + xp.log(xp.exp(scores - largest).sum(axis=1, keepdims=True))
        p = xp.exp(scores - wanted_lse)
        wanted_o = p @ all_v
        p *= some_do @ all_v.T - (some_do * wanted_o).sum(axis=1, keepdims=True)
        yield relative_error(some(o, first), wanted_o)
        yield relative_error(lse[0, first][rows].astype("float64"), wanted_lse[:, 0])
        yield relative_error(some(dq, first), scale * p @ all_k)
        del all_k, all_v, scores, p

        some_k, some_v = some(k, head_kv), some(v, head_kv)
        wanted_dk, wanted_dv = xp.zeros(some_k.shape), xp.zeros(some_v.shape)
        for head in range(first, first + group):
            all_q, all_do = whole(q, head), whole(do, head)
            delta = (whole(o, head) * all_do).sum(axis=1)
            p = xp.exp(scale * some_k @ all_q.T - dist.unshard(self.comm, lse[:, head])[0].astype("float64"))
            p[everywhere < mine] = 0
            wanted_dv += p @ all_do
            p *= some_v @ all_do.T - delta
            wanted_dk += scale * p @ all_q
        yield relative_error(some(dk, head_kv), wanted_dk)
        yield relative_error(some(dv, head_kv), wanted_dv)

    def _times(self, job: Job, work) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        """Milliseconds of all calls, by operation, of the work and of the baseline, if there is one."""
        works = {"work": work}
        share = share_of(job.problem, job.ranks)
        if share is not None:
            works["alone"] = Work(fa2cupy.forward, fa2cupy.backward, self.device.draw(share))
        calls = self._warm_up(list(works.values()))
        work.forward()  # while the first turn is queued
        times: dict[tuple[str, str], list[float]] = {(n, op): [] for n in ("work", "alone") for op in OPERATIONS}
        queued: list[list[tuple]] = []
        for _ in range(calls):
            queued.append([])
            for operation in OPERATIONS:
                for name, one in works.items():
                    self.meet()
                    start = self.device.mark()
                    getattr(one, operation)()
                    queued[-1].append(((name, operation), start, self.device.mark()))
            # The host is one turn ahead of the GPU, so that the clock does not count how fast it queues calls.
            if len(queued) > 1:
                self._collect(queued.pop(0), times)
        self._collect(queued.pop(0), times)
        found = [{op: times[name, op] for op in OPERATIONS if times[name, op]} for name in ("work", "alone")]
        return found[0], found[1]

    def _collect(self, turn: Iterable[tuple], times: Mapping[tuple[str, str], list[float]]) -> None:
        for key, start, stop in turn:
            times[key].append(self.device.milliseconds(start, stop))

    def _warm_up(self, works: Sequence) -> int:
        """Works until clocks are those of a warm card; returns how often each call is to be timed."""
        spent = 0.0
        while True:
            start = self.device.mark()
            for work in works:
                work.training()
            seconds = float(self.everyones(self.device.milliseconds(start, self.device.mark())).max()) / 1e3
            spent += seconds
            if spent >= self.device.warm_s:
                return max(1, min(self.device.most_calls, int(BUDGET_S / max(2 * seconds, 1e-3))))

    def _measure_peer(self, job: Job, own: Sequence) -> Measurement:
        """The same for PyTorch, beside the results of ``"gather"``."""
        work, error, missing = None, 0.0, ""
        wanted = self._scheme("gather", own).training()
        try:
            if self._peer is None:
                self._peer = self._make_peer()
            work = TorchRingWork(self._peer, own)
            found = work.arrays()
            others = (wanted[0], *wanted[2:])
            error = max(relative_error(one, other) for one, other in zip(found, others, strict=True))
            del found, others
        except Exception as failure:  # PyTorch missing, another version, or no memory: it is not ours
            missing = f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"
        del wanted
        states = self.everyones(bool(missing), error)
        result = Measurement("gather", float(states[:, 1].max()), None, missing=missing)
        if states[:, 0].any():
            return result._replace(missing=missing or "another rank could not make the call")
        if wrong := result.wrong(job.problem.dtype):
            return result._replace(missing=f"its results are not ours: {wrong}")
        self.device.release()
        extra = [self._peer.peak_bytes(call) - tensor_bytes(call) for call in (work.forward, work.backward)]
        times, alone = self._times(job, work)
        most = int(self.everyones(max(0, *extra)).max())
        del work
        self._peer.release()
        return result._replace(extra_bytes=most, times=times, alone=alone)


def tensor_bytes(call: Callable[[], tuple]) -> int:
    """Bytes of the tensors that a call returns."""
    return sum(one.nbytes for one in call() if hasattr(one, "nbytes"))


def part_of(problem: Problem, **sizes: int) -> Problem:
    """A problem with other sizes."""
    return Problem(**{**vars(problem), **sizes})


def share_of(problem: Problem, ranks: int) -> Problem | None:
    """The work of one rank as one call: a share of the heads. None if the ranks do not divide them."""
    heads, heads_kv = problem.num_heads // ranks, max(1, problem.heads_kv // ranks)
    if problem.num_heads % ranks or (problem.heads_kv % ranks and problem.heads_kv > ranks) or heads % heads_kv:
        return None
    return part_of(problem, num_heads=heads, num_heads_kv=heads_kv)


def relative_error(found, wanted) -> float:
    """The largest error over the largest value; inf if there is a NaN, which no maximum may hide."""
    wide = "float64" if wanted.dtype == np.float64 else "float32"
    wanted = wanted.astype(wide)
    largest = float(abs(wanted).max())
    error = float(abs(found.astype(wide) - wanted).max()) / max(largest, 1e-30)
    return error if error == error else np.inf


def is_equal(one, other) -> bool:
    """Whether all elements are equal; NaN is not."""
    return bool((one == other).all())


# --- all ranks --------------------------------------------------------------------------------------------------------


class RankError(RuntimeError):
    """A rank failed, so that the others have to be ended.

    Attributes
    ----------
    is_setup : bool
        True if there was no first job yet: another start would fail, too.
    """

    def __init__(self, text: str, is_setup: bool = False):
        super().__init__(text)
        self.is_setup = is_setup


def on_host(jobs: Sequence[Job]) -> Iterator[tuple[Job, list[Measurement] | str]]:
    """Measures jobs on simulated ranks: what each rank has found, or why a job failed."""

    def one_job(comm: dist.Communicator, job: Job) -> Measurement:
        return Rank(comm, HostDevice(comm.rank)).measure(job)

    for job in jobs:
        try:
            yield job, dist.simulate(job.ranks, partial(one_job, job=job), timeout=TIMEOUT_S)
        except Exception as error:  # the other jobs go on
            yield job, f"{type(error).__name__}: {error}"


def on_gpus(jobs: Sequence[Job]) -> Iterator[tuple[Job, list[Measurement] | str]]:
    """Measures jobs for one number of GPUs. After a failure new processes go on with the next job.

    Raises
    ------
    RankError
        The processes do not reach each other.
    """
    left = list(jobs)
    while left:
        try:
            with started(tuple(left)) as answers:
                for found in answers:
                    yield left.pop(0), found
        except RankError as error:
            if error.is_setup:
                raise
            failed = left.pop(0)
            if failed.scheme == PEER:  # which may have ended the process
                left = [job for job in left if job.scheme != PEER]
            yield failed, str(error)


@contextlib.contextmanager
def started(jobs: Sequence[Job]) -> Iterator[Iterator[list[Measurement]]]:
    """The answers of new processes, one for each GPU, which are ended at the end."""
    ranks, context = jobs[0].ranks, multiprocessing.get_context("spawn")
    answers, ports = context.Queue(), free_ports(2)
    processes = [
        context.Process(target=gpu_rank, args=(rank, ranks, ports, jobs, answers), daemon=True) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        yield collected(answers, processes, len(jobs))
    except BaseException:  # the other ranks wait for messages that do not come
        for process in processes:
            process.kill()
        raise
    finally:
        end = time.monotonic() + EXIT_S
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()


def free_ports(count: int) -> list[int]:
    """Ports of this host that nobody listens on."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


def collected(answers, processes: Sequence, count: int) -> Iterator[list[Measurement]]:
    """What all ranks have found, job by job.

    Raises
    ------
    RankError
        A rank has failed or ended, or does not answer.
    """
    found: list[dict[int, Measurement]] = [{} for _ in range(count)]
    failures: dict[int, str] = {}  # by the number of the job, which is -1 before the first one
    for index in range(count):
        end = time.monotonic() + PATIENCE_S
        while len(found[index]) < len(processes):
            try:
                rank, place, answer = answers.get(timeout=POLL_S)
            except queue.Empty:
                ended = [rank for rank, process in enumerate(processes) if process.exitcode is not None]
                if failed := [failures[place] for place in (-1, index) if place in failures]:
                    raise RankError(failed[0], is_setup=-1 in failures) from None
                if dead := [rank for rank in ended if rank not in found[index]]:
                    raise RankError(f"the processes of ranks {dead} have ended") from None
                if time.monotonic() > end:
                    raise RankError(f"no answer within {PATIENCE_S:.0f} s") from None
                continue
            if isinstance(answer, str):
                failures.setdefault(place, f"rank {rank}: {answer}")
            else:
                found[place][rank] = answer
        yield [found[index][rank] for rank in range(len(processes))]


def gpu_rank(rank: int, ranks: int, ports: Sequence[int], jobs: Sequence[Job], answers) -> None:
    """The process of one GPU: puts a measurement for each job, or the text of the error that ended it."""
    place = -1
    try:
        import cupy

        cupy.cuda.Device(rank).use()
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks)}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
        device = GpuDevice(rank)
        comm = dist.Communicator.from_env(environment, timeout=TIMEOUT_S)
        one = Rank(comm, device, partial(TorchRing, device.gpu, rank, ranks, ports[1]))
        one.everyones(rank)  # makes NCCL's communicator
        for place, job in enumerate(jobs):
            answers.put((rank, place, one.measure(job)))
    except BaseException as error:  # told by the parent, which ends the other ranks
        traceback.print_exc()
        answers.put((rank, place, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"))


def device_count() -> int:
    """GPUs that CuPy can use."""
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount()
    except Exception:  # without CuPy or a driver, for any reason, there is no GPU
        return 0


# --- rows and pictures ------------------------------------------------------------------------------------------------


def rows_of(job: Job, by_rank: Sequence[Measurement]) -> list[dict[str, object]]:
    """The rows of a job, one for each operation."""
    first, rows = by_rank[0], []
    for operation in OPERATIONS:
        times = slowest([one.times[operation] for one in by_rank])
        median = statistics.median(times)
        row: dict[str, object] = {
            **job.problem.columns(), "num_heads_kv": job.problem.heads_kv, "ranks": job.ranks, "scheme": job.scheme,
            "operation": operation, "check": first.check, "error": first.error,
            "equal": None if first.equal is None else int(first.equal), "calls": len(times), "ms_median": median,
            "ms_min": min(times), "ms_max": max(times),
            "tflops": job.problem.tflops(operation, median) / job.ranks,
            "extra_bytes": first.extra_bytes,
        }  # fmt: skip
        if all(one.alone for one in by_rank):
            row["alone_ms_median"] = statistics.median(slowest([one.alone[operation] for one in by_rank]))
            row["efficiency"] = row["alone_ms_median"] / median
        rows.append(row)
    return rows


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """The time of each call: that of its slowest rank."""
    return [max(one) for one in zip(*by_rank, strict=True)]


def describe(job: Job, rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of a job as a line."""
    both = rows[-1]
    parts = [f"{job}:"]
    for row in rows:
        efficiency = f" ({100 * row['efficiency']:.1f} %)" if "efficiency" in row else ""
        parts.append(f"{row['operation']} {row['ms_median']:.2f} ms{efficiency},")
    bits = {None: "", 0: ", rounded", 1: ", bits equal"}[both["equal"]]
    parts.append(f"{both['tflops']:.0f} TFLOP/s a rank, error {both['error']:.1e} ({both['check']}{bits})")
    extra = both["extra_bytes"]
    return " ".join(parts) + ("" if extra is None else f", {format_bytes(extra)} more memory")


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The efficiency of forward and backward over the rows: panels by ranks and heads, a line for each scheme."""
    panels: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for row in sorted(rows, key=lambda row: (int(row["ranks"]), int(row["seqlen"]))):
        if row["operation"] == TRAINING and row.get("efficiency") not in (None, ""):
            key = (f"{row['ranks']} ranks", f"heads {row['num_heads']}/{row['num_heads_kv']}")
            series = panels.setdefault(key, {}).setdefault(str(row["scheme"]), {})
            series[int(row["seqlen"])] = 100 * float(row["efficiency"])
    if not panels:
        raise ValueError("it has no efficiencies")
    title = f"Time of one GPU with the same work over that of the ranks, {rows[0]['gpu']}, {rows[0]['date']}"
    line_panels(path, title, "efficiency in %", 100.0, panels)


def show(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes the picture, if matplotlib is there."""
    if can_plot():
        plot(rows, path)
        print(path)


# --- the command ------------------------------------------------------------------------------------------------------


def rank_count(text: str) -> int:
    """A number of ranks of the command line."""
    if positive_int(text) < 2:
        raise argparse.ArgumentTypeError(f"expected at least 2, got {text}")
    return int(text)


def argument_parser() -> argparse.ArgumentParser:
    """The command line."""
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
    add("--peers", nargs="*", choices=("torch",), default=("torch",), metavar="NAME", help="torch, or nothing")
    add("--out", metavar="DIR", help="default: scripts/results/<gpu>")
    add("--simulate", action="store_true", help="on NumPy, with simulated ranks: by default two, on tiny problems")
    add("--plot-only", metavar="CSV", help="show the efficiencies of an earlier run; needs no GPU")
    return parser


def ranks_of(count: int) -> list[int]:
    """2, 4, ... and all GPUs."""
    return sorted({2**power for power in range(1, count.bit_length()) if 2**power <= count} | {count})


def all_jobs(options: argparse.Namespace, ranks: Sequence[int], device: type) -> list[Job]:
    """By number of ranks, rows, heads and scheme, without what the ranks cannot divide.

    Raises
    ------
    ValueError
        The ranks cannot divide the rows, or there is no job.
    """
    simulated = options.simulate
    rows = options.rows or (SIMULATED_ROWS if simulated else FULL_ROWS if options.full else ROWS)
    heads = options.heads or (SIMULATED_HEADS if simulated else HEADS)
    peers = [PEER] if options.peers and not simulated and importlib.util.find_spec("torch") else []
    jobs = []
    for count in ranks:
        for length in rows:
            if length % (2 * count):
                raise ValueError(
                    f"--rows: {length} is not a multiple of {2 * count}, two chunks for each of {count} ranks"
                )
            for num_heads, num_heads_kv in heads:
                problem = Problem(device.dtype, device.head_dim, length, 1, num_heads, True, num_heads_kv)
                schemes = [name for name in options.schemes if name != "heads" or num_heads_kv % count == 0]
                jobs += [Job(problem, count, scheme) for scheme in (*schemes, *(peers if schemes else []))]
    if not jobs:
        raise ValueError("--schemes: 'heads' needs a number of K/V heads that is a multiple of the number of ranks")
    return jobs


def run(jobs: Sequence[Job], measured: Callable, stamp: Mapping[str, str], path: Path) -> tuple[list[dict], int]:
    """All jobs: the rows, and how many jobs failed. What there is by then is written after each."""
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
    """Why a job has no rows; empty if it has."""
    if isinstance(found, str):
        return found
    return next((one.missing for one in found if one.missing), "") or found[0].wrong(job.problem.dtype)


def by_ranks(jobs: Sequence[Job]) -> Iterator[tuple[Job, list[Measurement] | str]]:
    """`on_gpus` for each number of GPUs."""
    for count in dict.fromkeys(job.ranks for job in jobs):
        yield from on_gpus([job for job in jobs if job.ranks == count])


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a result was wrong or a call failed."""
    parser = argument_parser()
    options = parser.parse_args(arguments)
    if options.plot_only:
        path = Path(options.plot_only)
        return show_earlier(options.plot_only, lambda rows: show(rows, path.with_suffix(".png")))
    if options.simulate and (options.full or not options.out):
        parser.error("--simulate: it takes --out, and no --full")
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
        gpu.precompile([jobs[0].problem], METHODS)
    folder = results_folder(stamp["gpu"], options.out)
    try:
        rows, failed = run(jobs, measured, stamp, folder / "scaleout.csv")
    except RankError as error:
        print(f"scaleout.py: {error}", file=sys.stderr)
        return 1
    if any("efficiency" in row for row in rows):
        show(rows, folder / "scaleout.png")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_command("scaleout.py", main))
