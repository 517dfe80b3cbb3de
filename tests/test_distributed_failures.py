"""Calls of several ranks that end early: the ranks that go on get right results or an error, and keep their memory."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fake_cupy import place
from support.fake_gpu import fake_gpu
from support.fake_mpi import FakeMpi, MpiError
from support.fake_nccl import SIZE, FakeCommunicator, FakeNccl, fake_streams

import fa2cupy
import fa2cupy.distributed as dist
from fa2cupy.distributed import nccl as nccl_module
from fa2cupy.distributed.mpi import MpiTransport
from fa2cupy.distributed.nccl import NcclTransport
from fa2cupy.distributed.threads import ThreadTransport

TIMEOUT, LATE = 0.15, 0.5
STEPS = 3
WAYS = ("is late", "raises", "is interrupted", "ends")
CALLS = ("forward", "attention", "total", "unshard")


class Ended(BaseException):
    """Ends a rank that does not tell the others."""


@dataclass(frozen=True)
class Trouble:
    """What happens to a rank in one of its waits: before its messages are sent, after that, or when all are there."""

    rank: int
    wait: int
    moment: str
    way: str

    def happens(self, error: type[Exception]) -> None:
        if self.way == "is late":
            time.sleep(LATE)
        elif self.way == "raises":
            raise error("in a wait")
        elif self.way == "is interrupted":
            raise KeyboardInterrupt
        else:
            raise Ended


troubles = st.builds(
    Trouble,
    rank=st.integers(0, SIZE - 1),
    wait=st.integers(0, 30),
    moment=st.sampled_from(("before", "between", "after")),
    way=st.sampled_from(WAYS),
)


@contextlib.contextmanager
def troubled(trouble: Trouble, transport: type, monkeypatch, between: Callable, error: type[Exception]):
    """Lets the trouble happen in an exchange of the transport."""
    counts = [0] * SIZE
    exchange = transport.exchange

    def patched(self, sends, recvs):
        counts[self.rank] += 1
        if (self.rank, counts[self.rank] - 1) != (trouble.rank, trouble.wait):
            return exchange(self, sends, recvs)
        if trouble.way == "ends":
            self.end = lambda reason: None
        happens = functools.partial(trouble.happens, error)
        if trouble.moment == "before":
            happens()
        if trouble.moment == "between":
            return between(functools.partial(exchange, self), sends, recvs, happens)
        exchange(self, sends, recvs)
        if trouble.moment == "after":
            happens()

    with monkeypatch.context() as patch:
        patch.setattr(transport, "exchange", patched)
        yield


def inputs_of(step: int) -> tuple[np.ndarray, ...]:
    """Returns q, k and v, whose results are apart from those of other steps."""
    rng = np.random.default_rng(step)
    q, k, v = rng.standard_normal((3, 1, 4 * SIZE, SIZE, 16)).astype("float16")
    return q, k, (v / 4 + 10 * (step + 1)).astype("float16")


@functools.cache
def expected(call: str, step: int) -> tuple[np.ndarray, ...]:
    """Returns the results of a step for all rows."""
    q, k, v = (x.astype("float64") for x in inputs_of(step))
    if call == "total":
        return (np.full(300, SIZE * (step + 1) + SIZE * (SIZE - 1) / 2),)
    if call == "unshard":
        return (v,)
    o, lse, backprop = fa2cupy.attention(q, k, v, return_lse=True)
    return (o, *backprop(q)) if call == "attention" else (o, lse)


class Survivor:
    """What one rank does, and what it has found.

    Attributes
    ----------
    errors : list of BaseException
    results : list of (array, copy)
    sentinels : list of ndarray
        Arrays that were made after an error.
    """

    def __init__(self, comm: dist.Communicator, to_device: Callable[[np.ndarray], Any], scheme: str):
        self.comm, self.to_device, self.scheme = comm, to_device, scheme
        self.errors: list[BaseException] = []
        self.results: list[tuple[Any, np.ndarray]] = []
        self.sentinels: list[np.ndarray] = []

    def run(self, calls: tuple[str, ...]) -> Survivor:
        rows = [2 * chunk + n for chunk in (self.comm.rank, 2 * SIZE - 1 - self.comm.rank) for n in range(2)]
        for step in range(STEPS):
            for call in calls:
                own = [self.to_device(x[:, rows]) for x in inputs_of(step)]
                share = self.to_device(np.full(300, step + 1.0 + self.comm.rank))
                has_failed = bool(self.errors)
                try:
                    found = self.made(call, own, share)
                except (Exception, KeyboardInterrupt) as error:
                    if has_failed:
                        assert isinstance(error, dist.CommunicationError) and "an earlier call" in str(error)
                    self.errors.append(error)
                    for array in (*own, share):
                        array[...] = 1000  # the caller uses its memory again
                    self.sentinels += [np.full(array.size, 7.0, array.dtype) for array in (*own, share) * 4]
                    continue
                assert not has_failed, "a failed communicator made a call"
                for name, one, whole in zip(range(9), found, expected(call, step), strict=False):
                    axis = 2 if call == "forward" and name == 1 else 1
                    wanted = whole if call in ("total", "unshard") else np.take(whole, rows, axis)
                    np.testing.assert_allclose(np.asarray(one, "float64"), wanted, rtol=2e-2, atol=2e-2)
                self.results += [(one, np.array(one)) for one in found]
        return self

    def made(self, call: str, own: list, share) -> tuple:
        if call == "total":
            return (dist.total(self.comm, share),)
        if call == "unshard":
            return (dist.unshard(self.comm, own[2]),)
        if call == "forward":
            return dist.forward(self.comm, *own, scheme=self.scheme)
        o, backprop = dist.attention(self.comm, *own, scheme=self.scheme)
        return (o, *backprop(own[0].copy()))

    def check_memory(self) -> None:
        for array, copy in self.results:
            np.testing.assert_array_equal(array, copy)
        for array in self.sentinels:
            assert (array == 7).all()


def check(ranks: list[Survivor | None], trouble: Trouble) -> None:
    for rank in ranks:
        if rank is not None:
            rank.check_memory()
    if any(rank is not None and rank.errors for rank in ranks):
        return
    # Nobody noticed: the trouble did not come, or was a delay that nobody waited for until the end.
    assert all(rank is not None for rank in ranks)


def surviving(work: Callable, ranks: list) -> Callable:
    """Returns a function of a communicator that notes what its rank has found, if it does not end."""

    def of_rank(comm):
        with contextlib.suppress(Ended):
            ranks[comm.rank] = work(comm)
            assert ranks[comm.rank] is not None

    return of_rank


def on_threads(trouble, calls, scheme, monkeypatch) -> None:
    def between(exchange, sends, recvs, happens):
        rank = trouble.rank
        exchange([pair for pair in sends if pair[1] != rank], [])
        happens()
        own = [pair for pair in sends if pair[1] == rank]
        exchange(own, recvs)

    ranks: list = [None] * SIZE
    work = surviving(lambda comm: Survivor(comm, np.array, scheme).run(calls), ranks)
    with troubled(trouble, ThreadTransport, monkeypatch, between, RuntimeError):
        dist.simulate(SIZE, work, timeout=TIMEOUT, ranks_per_host=SIZE // 2)
    check(ranks, trouble)


def on_mpi(trouble, calls, scheme, monkeypatch) -> None:
    mpi = FakeMpi(SIZE)
    package = types.ModuleType("mpi4py")
    package.MPI = mpi
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    local = threading.local()

    def before_test():
        happens, local.happens = getattr(local, "happens", None), None
        if happens is not None:
            happens()

    def between(exchange, sends, recvs, happens):
        local.happens = happens
        exchange(sends, recvs)
        local.happens = None

    mpi.before_test = before_test
    ranks: list = [None] * SIZE

    def of_rank(comm):
        one = dist.Communicator.from_mpi(mpi.communicator(comm.rank), ranks_per_host=SIZE // 2, timeout=TIMEOUT)
        return Survivor(one, np.array, scheme).run(calls)

    with troubled(trouble, MpiTransport, monkeypatch, between, MpiError):
        dist.simulate(SIZE, surviving(of_rank, ranks))
    check(ranks, trouble)
    if trouble.moment == "between":
        errors = [rank.errors[0] for rank in ranks if rank is not None and rank.errors]
        assert all(isinstance(error, dist.CommunicationError | KeyboardInterrupt) for error in errors), errors


def on_nccl(trouble, calls, scheme, monkeypatch) -> None:
    with fake_gpu(monkeypatch), fake_streams(monkeypatch):
        nccl = FakeNccl(SIZE)
        nccl.timeout = TIMEOUT
        monkeypatch.setattr(nccl_module, "_module", lambda: nccl)
        ranks: list = [None] * SIZE

        def between(exchange, sends, recvs, happens):
            rank = trouble.rank
            exchange([pair for pair in sends if pair[1] != rank], [])
            happens()
            exchange([pair for pair in sends if pair[1] == rank], recvs)

        def of_rank(comm):
            one = FakeCommunicator(nccl, comm.rank)
            one = dist.Communicator.from_nccl(one, ranks_per_host=SIZE // 2, timeout=TIMEOUT)
            return Survivor(one, place, scheme).run(calls)

        with troubled(trouble, NcclTransport, monkeypatch, between, RuntimeError):
            dist.simulate(SIZE, surviving(of_rank, ranks))
        check(ranks, trouble)


ON = {"threads": on_threads, "mpi": on_mpi, "nccl": on_nccl}
programs = st.lists(st.sampled_from(CALLS), min_size=1, max_size=2).map(tuple)
schemes = st.sampled_from(("heads", "gather", "ring", "hybrid"))


@pytest.mark.parametrize("transport", ON)
class TestTroubles:
    @settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(trouble=troubles, calls=programs, scheme=schemes)
    def test_right_results_or_an_error(self, transport, trouble, calls, scheme, monkeypatch):
        with monkeypatch.context() as patch:
            ON[transport](trouble, calls, scheme, patch)

    @pytest.mark.matrix
    @settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(trouble=troubles, calls=programs, scheme=schemes)
    def test_any_trouble(self, transport, trouble, calls, scheme, monkeypatch):
        with monkeypatch.context() as patch:
            ON[transport](trouble, calls, scheme, patch)
