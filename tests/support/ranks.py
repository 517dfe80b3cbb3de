"""Calls of fa2cupy.distributed by simulated ranks, with whole arrays in and whole results out."""

from __future__ import annotations

import contextlib
import functools
import queue
import random
import threading
import time
from collections.abc import Callable

import numpy as np
from support.feature_cases import extras, gradient_names

import fa2cupy
import fa2cupy.distributed as dist
from fa2cupy.distributed.local.lanes import Lane
from fa2cupy.distributed.movers import resources
from fa2cupy.distributed.transport.threads import ThreadTransport
from fa2cupy.distributed.transport.windows import IS_READY, MOST_STEPS, READY, Signal, Window

LANES = 7  # of a call: the caller's, a second one, those of messages and of copies, and three for groups of heads
ROW_AXIS = {"lse": -1, "dlse": -1, "bias": -2, "mask": -2, "dbias": -2}
#: Arrays that are the same on all ranks, whatever their number of rows.
WHOLE = ("alibi_slopes", "sink", "key_padding_mask", "cu_seqlens_q", "cu_seqlens_k")


def whole_call(inputs: tuple, *, dlse=None, method=None, **options) -> dict:
    """Returns all results of one call by name."""
    q, k, v, do = inputs
    o, lse = fa2cupy.forward(q, k, v, **options)
    gradients = fa2cupy.backward(q, k, v, o, lse, do, dlse=dlse, method=method, **options, **extras(options))
    return {"o": o, "lse": lse, **dict(zip(gradient_names(options), gradients, strict=True))}


def is_sharded(name: str, array, options: dict) -> bool:
    """Returns True if each rank has its own rows of a feature's array."""
    return name in ("bias", "mask") and array.ndim > 1 and array.shape[-2] > 1 and "cu_seqlens_q" not in options


def on_ranks(size: int, inputs: tuple, *, dlse=None, method=None, how: dict | None = None, **options) -> dict:
    """Returns the whole results of a call on several ranks; `how` has the scheme, order and groups of heads."""
    how = how or {}
    in_host = ranks_per_host(size) if how.get("scheme") == "hybrid" else None
    work = functools.partial(of_rank, inputs=inputs, dlse=dlse, method=method, how=how, options=options)
    return dist.simulate(size, work, ranks_per_host=in_host, timeout=20)[0]


def ranks_per_host(size: int) -> int:
    """Returns the ranks of each of two hosts; an odd number of ranks is on one."""
    return size if size % 2 else size // 2


def of_rank(comm, inputs: tuple, dlse, method, how: dict, options: dict) -> dict:
    order = {"order": how.get("order", "zigzag")}
    rank = inputs[0].ndim
    rows = rank - 3 if options.get("layout", "bshd") == "bshd" and rank > 2 else rank - 2

    def own(x, axis=rows):
        return dist.shard(comm, x, axis=axis, **order)

    q, k, v, do = map(own, inputs)
    mine = {n: own(x, -2) if hasattr(x, "shape") and is_sharded(n, x, options) else x for n, x in options.items()}
    o, lse = dist.forward(comm, q, k, v, **mine, **how)
    own_dlse = None if dlse is None else own(dlse, -1)
    gradients = dist.backward(comm, q, k, v, o, lse, do, dlse=own_dlse, method=method, **mine, **how, **extras(options))
    results = {"o": o, "lse": lse, **dict(zip(gradient_names(options), gradients, strict=True))}
    whole = {}
    for name, x in results.items():
        if name in ("o", "lse", "dq", "dk", "dv"):
            whole[name] = dist.unshard(comm, x, axis=ROW_AXIS.get(name, rows), **order)
        elif name == "dbias" and is_sharded("bias", options["bias"], options):
            whole[name] = dist.unshard(comm, x, axis=-2, **order)
        else:  # shares
            whole[name] = dist.total(comm, x)
    return whole


class Mark(threading.Event):
    """A place in a lane's work; `error` is the lane's failure before it, which waiting lanes raise, too."""

    error: BaseException | None = None


class SlowLane(Lane):
    """A lane as a thread with a queue: work starts late, so that a missing wait is a race, as on a GPU.

    Parameters
    ----------
    delay : callable
        Seconds before the next call.
    is_main : bool
        True for the caller's lane, the only one whose end the host waits for.
    """

    def __init__(self, delay: Callable[[], float], is_main: bool):
        self._queue: queue.Queue = queue.Queue()
        self._delay = delay
        self._is_main = is_main
        self._error: BaseException | None = None
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if isinstance(job, Mark):
                job.error = self._error
                job.set()
            elif self._error is None:
                try:
                    job()
                except BaseException as error:  # raised by `join`
                    self._error = error

    def __call__(self, function, *args) -> None:
        def late() -> None:
            time.sleep(self._delay())
            function(*args)

        self._queue.put(late)

    def on_stream(self, function, *args) -> None:
        self(function, 0, *args)

    def record(self) -> Mark:
        mark = Mark()
        self._queue.put(mark)
        return mark

    def wait(self, mark: Mark) -> None:
        def wait() -> None:
            mark.wait()  # every lane ends: messages give up after the transport's timeout
            if mark.error is not None:
                raise mark.error

        self._queue.put(wait)

    def join(self) -> None:
        end = self.record()
        self._queue.put(None)
        if self._is_main:
            end.wait()
        if self._error is not None:
            raise self._error


def random_delays(longest: float, seed: object) -> Callable[[int, int], Callable[[], float]]:
    """Returns random delays by rank and number of a lane; on some lanes they are four times as long, on others zero."""

    def of_lane(rank: int, number: int) -> Callable[[], float]:
        drawn = random.Random(repr((seed, rank, number)))
        factor = longest * drawn.choice((0, 1, 4))
        return lambda: factor * drawn.random()

    return of_lane


def poisoned(shape: tuple, dtype) -> np.ndarray:
    """Returns memory that is NaN until it is written."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[...] = 0xFF
    return array


@contextlib.contextmanager
def slow_lanes(monkeypatch, delays: Callable[[int, int], Callable[[], float]], lane: type = SlowLane):
    """Makes fa2cupy.distributed use threads as lanes, and poisoned memory."""

    def lanes(rank: int) -> tuple:
        return tuple(lane(delays(rank, number), number == 0) for number in range(LANES))

    with monkeypatch.context() as patch:
        patch.setattr(resources, "host_memory", poisoned)
        patch.setattr(resources, "host_lanes", lanes)
        yield


class SharedWindows:
    """What the windows of simulated ranks share.

    Attributes
    ----------
    memory : list of ndarray
        The bytes of each rank.
    numbers : ndarray, shape (rank, word, writer)
    """

    def __init__(self, size: int):
        self.memory = [np.zeros(0, np.uint8)] * size
        self.numbers = np.zeros((size, len(Signal) * MOST_STEPS, size), np.int64)
        self.numbers[:, READY] = IS_READY
        self.barrier, self.changed = threading.Barrier(size), threading.Condition()


class ThreadWindow(Window):
    """The window of a simulated rank: memory of the process, poisoned when it is allocated."""

    timeout = 20.0

    def __init__(self, shared: SharedWindows, rank: int, size: int):
        super().__init__(rank, size)
        self._shared = shared

    def send(self, lane, copies) -> None:
        lane(self._send, copies)

    def _send(self, copies) -> None:
        for target, target_start, source, source_start, shape in copies:
            to, of = (
                tuple(slice(first, first + n) for first, n in zip(start, shape, strict=True))
                for start in (target_start, source_start)
            )
            target[to] = source[of]

    def can_copy(self, array) -> bool:
        return array.strides[-1] == array.itemsize

    def _check(self) -> None:
        """No call before has failed: `simulate` would have ended."""

    def _grow(self, nbytes: int, last: Mark | None) -> None:
        if last is not None:
            last.wait()
        self._shared.barrier.wait(self.timeout)
        self._shared.memory[self.rank] = poisoned((nbytes,), np.uint8)
        self._shared.barrier.wait(self.timeout)

    def _array(self, peer: int, offset: int, shape: tuple, dtype) -> np.ndarray:
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self._shared.memory[peer][offset : offset + nbytes].view(dtype).reshape(shape)

    def _write(self, stream: int, word: int, number: int) -> None:
        with self._shared.changed:
            for peer in self.others:
                self._shared.numbers[peer, word, self.rank] = number
            self._shared.changed.notify_all()

    def _wait(self, stream: int, word: int, number: int) -> None:
        own, others = self._shared.numbers[self.rank, word], list(self.others)
        with self._shared.changed:
            if not self._shared.changed.wait_for(lambda: (own[others] == number).all(), self.timeout):
                raise dist.CommunicationError(f"rank {self.rank} waits for signal {word} of ranks {others}")
            own[others] = 0


@contextlib.contextmanager
def thread_windows(monkeypatch, window: type = ThreadWindow):
    """Lets simulated ranks write each other's memory, as GPUs of one host do."""
    lock = threading.Lock()

    def of_transport(transport: ThreadTransport, is_captured: bool) -> Window:
        with lock:
            if not hasattr(transport._world, "windows"):
                transport._world.windows = SharedWindows(transport.size)
        if not hasattr(transport, "own_window"):
            transport.own_window = window(transport._world.windows, transport.rank, transport.size)
        return transport.own_window

    with monkeypatch.context() as patch:
        patch.setattr(ThreadTransport, "window", of_transport)
        yield
