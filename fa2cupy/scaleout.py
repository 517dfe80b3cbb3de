"""``python -m fa2cupy scaleout``: the schemes of `fa2cupy.distributed`, checked against one call and timed."""

from __future__ import annotations

import functools
import multiprocessing
import os
import queue
import socket
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, get_args

import numpy as np

from . import api
from .distributed import api as ranks_api
from .distributed.communicator import Communicator
from .distributed.rows import shard, unshard
from .distributed.simulation import simulate
from .families.device import device_count
from .problem.array_types import Array
from .problem.names import Scheme

__all__ = ["run_scaleout", "two_hosts"]

_SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
#: Largest error of a result over its largest value, by dtype. Shares of gradients are rounded before they are summed.
_ALLOWED = {"float64": 1e-12, "bfloat16": 2e-2}
_ITERATIONS = 5
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class _Size:
    """Sizes of the arrays: head_dim is 128 on GPUs and 32 on NumPy."""

    rows: int
    heads: int
    heads_kv: int
    head_dim: int

    def flops(self) -> float:
        """Floating-point operations of a causal forward and backward: seven products of half a matrix of scores."""
        return 7 * self.rows**2 * self.heads * self.head_dim


@dataclass(frozen=True)
class _Measurement:
    """One line of the table, of one rank.

    Attributes
    ----------
    scheme : str
    error : float
        Largest error over the largest value, of all results.
    equal : bool
        True if o and lse are those of one call, bit for bit.
    milliseconds, alone : list of float
        Times of forward and backward, and of one GPU for the same work; the last are empty if heads cannot be divided.
    """

    scheme: str
    error: float
    equal: bool
    milliseconds: list[float]
    alone: list[float]


def run_scaleout(
    device: str = "auto", ranks: int | None = None, rows: int | None = None, heads: int = 32, heads_kv: int = 8
) -> int:
    """Prints the table; returns 0 if every result was within its allowed error.

    Parameters
    ----------
    device : {"auto", "gpu", "cpu"}
    ranks : int, optional
        Number of GPUs, by default all of them; or of simulated ranks, by default four.
    rows : int, optional
        Length of the whole sequence; 32768 on GPUs and 512 on NumPy by default.
    heads, heads_kv : int, optional
        Query heads and K/V heads.

    Raises
    ------
    ValueError
        A number is below 1, or does not fit the others.
    """
    for name, number in (("ranks", ranks), ("rows", rows), ("heads", heads), ("heads-kv", heads_kv)):
        if number is not None and number < 1:
            raise ValueError(f"--{name}: expected at least 1, got {number}")
    count = 0 if device == "cpu" else device_count()
    if device == "gpu" and count < 2:
        print(f"It needs at least two GPUs, and there {'is one' if count else 'is none'}.")
        return 1
    if count > 1:
        used = ranks or count
        if used > count:
            print(f"--ranks: expected at most {count}, the number of GPUs, got {used}")
            return 2
        size = _Size(rows or 32768, heads, heads_kv, 128)
        print(f"{used} GPUs, bfloat16, causal, {size.rows} rows, {heads}/{heads_kv} heads of {size.head_dim}:")
        return _print_table(_on_gpus(used, size), used, size, "bfloat16")
    used = ranks or 4
    size = _Size(rows or 512, heads, heads_kv, 32)
    print(f"{used} simulated ranks on NumPy, float64, causal, {size.rows} rows, {heads}/{heads_kv} heads of 32.")
    print("They share the cores of this machine: times say nothing about GPUs.")
    return _print_table(_simulated(used, size), used, size, "float64")


def _print_table(by_rank: list[list[_Measurement]], ranks: int, size: _Size, dtype: str) -> int:
    print(f"{'scheme':<8}{'max error':>11}{'o, lse':>12}{'fwd + bwd':>14}{'TFLOP/s a rank':>16}{'efficiency':>12}")
    is_right = True
    for lines in zip(*by_rank, strict=True):
        error, equal = max(line.error for line in lines), all(line.equal for line in lines)
        is_right &= error <= _ALLOWED[dtype]
        slowest = _slowest([line.milliseconds for line in lines])
        rate = size.flops() / ranks / slowest / 1e9
        alone = [line.alone for line in lines]
        efficiency = f"{100 * _slowest(alone) / slowest:.1f} %" if dtype != "float64" and all(alone) else "-"
        print(
            f"{lines[0].scheme:<8}{error:>11.1e}{'bits equal' if equal else 'rounded':>12}{slowest:>11.2f} ms"
            f"{rate:>16.3g}{efficiency:>12}"
        )
    print(f"All results are within {_ALLOWED[dtype]:.0e}." if is_right else "WRONG RESULT")
    return 0 if is_right else 1


def _slowest(times: list[list[float]]) -> float:
    """The median of the slowest rank's times."""
    return statistics.median(max(one) for one in zip(*times, strict=True))


def _simulated(ranks: int, size: _Size) -> list[list[_Measurement]]:
    work = functools.partial(_measure, size=size, xp=np, clock=_host_clock)
    return simulate(ranks, lambda comm: list(work(comm)), ranks_per_host=two_hosts(ranks), timeout=_TIMEOUT_S)


def two_hosts(ranks: int) -> int:
    """The ranks of a host, as if there were two; all of them if their number is odd."""
    return ranks if ranks % 2 else ranks // 2


def _measure(
    comm: Communicator, size: _Size, xp: ModuleType, clock: Callable[[Callable[[], object]], float]
) -> Iterator[_Measurement]:
    """The lines of this rank, for all schemes that the heads allow."""
    inputs = _inputs(size, xp)
    expected = _forward_and_backward(api.forward, api.backward, inputs)
    own = [shard(comm, x) for x in inputs]
    axes = (1, 2, 1, 1, 1)
    wanted = [shard(comm, x, axis=axis) for x, axis in zip(expected, axes, strict=True)]
    del expected
    few = [x[:, :, : max(1, x.shape[2] // comm.size)] for x in inputs]  # the work of one GPU
    divides = size.heads_kv % comm.size == 0 and size.heads % comm.size == 0
    for scheme in _SCHEMES:
        if scheme == "heads" and not divides:
            continue
        if scheme == "hybrid" and (comm.ranks_per_host in (1, comm.size) or size.heads_kv % comm.ranks_per_host):
            continue

        def call(scheme: Scheme = scheme) -> list[Array]:
            def forward(*arrays: Array, **options: Any) -> tuple[Array, ...]:
                return ranks_api.forward(comm, *arrays, scheme=scheme, **options)

            def backward(*arrays: Array, **options: Any) -> tuple[Array, ...]:
                return ranks_api.backward(comm, *arrays, scheme=scheme, **options)

            return _forward_and_backward(forward, backward, own)

        found = call()
        errors = [_error(one, other) for one, other in zip(found, wanted, strict=True)]
        equal = all(bool((one == other).all()) for one, other in zip(found[:2], wanted[:2], strict=True))
        times, alone = [], []
        for _ in range(_ITERATIONS):
            _meet(comm, xp)
            times.append(clock(call))
            if divides:
                _meet(comm, xp)
                alone.append(clock(lambda: _forward_and_backward(api.forward, api.backward, few)))
        yield _Measurement(scheme, max(errors), equal, times, alone)


def _inputs(size: _Size, xp: ModuleType) -> list[Array]:
    """The whole q, k, v and do, the same on all ranks."""
    import ml_dtypes

    rng = np.random.default_rng(0)
    dtype = np.dtype("float64") if xp is np else np.dtype(ml_dtypes.bfloat16)
    shapes = [(1, size.rows, heads, size.head_dim) for heads in (size.heads, size.heads_kv, size.heads_kv, size.heads)]
    return [xp.asarray(rng.standard_normal(shape, dtype="float32").astype(dtype)) for shape in shapes]


def _forward_and_backward(
    forward: Callable[..., tuple[Array, ...]], backward: Callable[..., tuple[Array, ...]], arrays: list[Array]
) -> list[Array]:
    q, k, v, do = arrays
    o, lse = forward(q, k, v, causal=True)
    return [o, lse, *backward(q, k, v, o, lse, do, causal=True)]


def _error(found: Array, wanted: Array) -> float:
    """The largest error over the largest value; inf for NaN."""
    wide = np.dtype("float64") if wanted.dtype == np.float64 else np.dtype("float32")
    one: Any = found.astype(wide)
    other: Any = wanted.astype(wide)
    largest = float(abs(other).max())
    one -= other
    error = float(abs(one).max()) / max(largest, 1e-30)
    return error if error == error else float("inf")


def _meet(comm: Communicator, xp: ModuleType) -> None:
    """Lets all ranks begin at the same time."""
    unshard(comm, xp.zeros((1,), "float32"), axis=0, order="contiguous")


def _host_clock(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def _device_clock(call: Callable[[], object]) -> float:
    import cupy

    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return cupy.cuda.get_elapsed_time(start, stop)


def _on_gpus(ranks: int, size: _Size) -> list[list[_Measurement]]:
    """Starts a process for each GPU."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = [
        context.Process(target=_gpu_rank, args=(rank, ranks, port, size, answers), daemon=True) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        return _answers(ranks, answers, processes)
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def _answers(ranks: int, answers: Any, processes: list[Any]) -> list[list[_Measurement]]:
    found: dict[int, Any] = {}
    end = time.monotonic() + 2 * _TIMEOUT_S
    while len(found) < ranks:
        try:
            rank, answer = answers.get(timeout=1.0)
        except queue.Empty:
            dead = [rank for rank, one in enumerate(processes) if one.exitcode not in (None, 0) and rank not in found]
            if dead or time.monotonic() > end:
                what = f"the processes of ranks {dead} have ended" if dead else "not all ranks have answered"
                raise RuntimeError(f"scaleout: {what}") from None
            continue
        if isinstance(answer, str):
            raise RuntimeError(f"scaleout: rank {rank} failed:\n{answer}")
        found[rank] = answer
    return [found[rank] for rank in range(ranks)]


def _gpu_rank(rank: int, ranks: int, port: int, size: _Size, answers: Any) -> None:
    """The process of one GPU."""
    try:
        import cupy

        cupy.cuda.Device(rank).use()
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}
        environment["MASTER_ADDR"] = "127.0.0.1"
        comm = Communicator.from_env(environment, ranks_per_host=two_hosts(ranks), timeout=_TIMEOUT_S)
        answers.put((rank, list(_measure(comm, size, cupy, _device_clock))))
    except BaseException:  # the parent prints it and ends the others
        answers.put((rank, traceback.format_exc()))
