"""Calls of several ranks that end early: the ranks that go on get right results or an error, and keep their memory."""

from __future__ import annotations

import contextlib
import functools
import signal
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
from fa2cupy.cpu import calls as cpu_calls
from fa2cupy.distributed.call import agreement
from fa2cupy.distributed.local.lanes import HostLane
from fa2cupy.distributed.movers import resources
from fa2cupy.distributed.transport import nccl as nccl_module
from fa2cupy.distributed.transport.messages import head_of
from fa2cupy.distributed.transport.mpi import MpiTransport
from fa2cupy.distributed.transport.nccl import NcclTransport
from fa2cupy.distributed.transport.threads import ThreadTransport

TIMEOUT, LATE = 0.15, 0.5
STEPS = 3
WAYS = ("is late", "raises", "is interrupted", "ends")
CALLS = ("forward", "attention", "total", "unshard")


class Ended(BaseException):
    """Ends a rank without telling the others."""


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
    """Makes the trouble happen in an exchange of the transport."""
    counts = [0] * SIZE
    exchange = transport.exchange

    def patched(self, sends, recvs):
        counts[self.rank] += 1
        if (self.rank, counts[self.rank] - 1) != (trouble.rank, trouble.wait):
            exchange(self, sends, recvs)
            return
        if trouble.way == "ends":
            self.end = lambda reason: None
        happens = functools.partial(trouble.happens, error)
        if trouble.moment == "before":
            happens()
        if trouble.moment == "between":
            between(functools.partial(exchange, self), sends, recvs, happens)
        else:
            exchange(self, sends, recvs)
        if trouble.moment == "after":
            happens()

    with monkeypatch.context() as patch:
        patch.setattr(transport, "exchange", patched)
        yield


def inputs_of(step: int) -> tuple[np.ndarray, ...]:
    """Returns q, k and v, whose results differ clearly from those of other steps."""
    rng = np.random.default_rng(step)
    q, k, v = rng.standard_normal((3, 1, 4 * SIZE, SIZE, 16)).astype("float16")
    return q, k, (v / 4 + step + 1).astype("float16")


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


def check_memory(ranks: list[Survivor | None]) -> None:
    """Checks, when all is over, results and arrays of the ranks that have not ended."""
    for rank in ranks:
        if rank is not None:
            for array, copy in rank.results:
                np.testing.assert_array_equal(array, copy)
            assert all((array == 7).all() for array in rank.sentinels)


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
    check_memory(ranks)


def fake_mpi(size: int, monkeypatch) -> FakeMpi:
    """Returns what mpi4py is from now on."""
    package = types.ModuleType("mpi4py")
    package.MPI = FakeMpi(size)
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    return package.MPI


def on_mpi(trouble, calls, scheme, monkeypatch) -> None:
    mpi = fake_mpi(SIZE, monkeypatch)
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
    check_memory(ranks)
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
        check_memory(ranks)


ON = {"threads": on_threads, "mpi": on_mpi, "nccl": on_nccl}
programs = st.lists(st.sampled_from(CALLS), min_size=1, max_size=2).map(tuple)
schemes = st.sampled_from(("heads", "gather", "hybrid"))


@pytest.mark.parametrize("transport", ON)
class TestTroubles:
    @settings(
        max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
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


def refused(work: Callable, size: int = 3) -> list[str]:
    """Returns the texts of the errors that `work` raises on all ranks, which then make a call together."""

    def of_rank(comm):
        with pytest.raises((TypeError, ValueError)) as caught:
            work(comm)
        assert dist.total(comm, np.ones(2)).tolist() == [size, size]
        return f"{type(caught.value).__name__}: {caught.value}"

    return dist.simulate(size, of_rank, timeout=10)


class TestRefusals:
    """If one rank refuses a call, all do, and all go on."""

    def test_totals_that_differ(self):
        texts = refused(lambda comm: dist.total(comm, np.ones(4, "int64" if comm.rank else "float64")))
        match = "x: expected the same on all ranks, got shape (4,), dtype float64 on rank 0; shape (4,), dtype int64"
        assert all(match in text for text in texts)
        assert all("shape (3,)" in text for text in refused(lambda comm: dist.total(comm, np.ones(3 + comm.rank))))

    def test_shards_that_differ(self):
        texts = refused(lambda comm: dist.unshard(comm, np.ones((1, 2 if comm.rank else 4))))
        assert all("x: expected the same on all ranks, got shape (1, 4), dtype float64 on rank 0" in x for x in texts)
        texts = refused(lambda comm: dist.unshard(comm, np.ones((4, 4)), axis=comm.rank // 2))
        assert all("axis: expected the same on all ranks, got 0 on ranks 0, 1; 1 on rank 2" in text for text in texts)
        texts = refused(lambda comm: dist.unshard(comm, np.ones((1, 3 if comm.rank == 1 else 4))))
        assert all("x (axis 1): expected a length that is a multiple of 6" in text for text in texts)
        texts = refused(lambda comm: dist.total(comm, 1.0) if comm.rank else dist.unshard(comm, np.ones((1, 2))))
        assert texts[0].startswith("ValueError: rank 1 cannot make this call: TypeError: x: expected a numpy.ndarray")

    @pytest.mark.parametrize("call", ["forward", "attention"])
    @pytest.mark.parametrize(
        ("bad", "match"),
        [
            ({"foo": 1}, "unexpected keyword argument 'foo'"),
            ({"return_dbias": True}, "return_dbias"),
            ({"config": 3}, "config"),
            ({"causal": "yes"}, "causal: expected a bool"),
            ({"out": 3}, "out"),
        ],
    )
    def test_arguments_of_one_rank(self, call, bad, match):
        def work(comm):
            own = np.ones((3, 1, 4, 3, 8))
            getattr(dist, call)(comm, *own, **(bad if comm.rank == 1 else {}))

        texts = refused(work)
        assert match in texts[1]
        assert all(text == f"ValueError: rank 1 cannot make this call: {texts[1]}" for text in (texts[0], texts[2]))

    def test_a_call_without_an_argument(self):
        texts = refused(lambda comm: dist.forward(comm, *np.ones((3, 1, 4, 3, 8))[: 2 + (comm.rank > 0)]))
        assert all("v: it is missing in forward(comm, q, k, v)" in text for text in texts)

    def test_what_is_no_communicator(self):
        with pytest.raises(TypeError, match="comm: expected a fa2cupy.distributed.Communicator, got ndarray"):
            dist.forward(*np.ones((3, 1, 4, 3, 8)))


@pytest.fixture
def ctrl_c():
    """Python's handler of Ctrl-C, which a process lacks that a shell has started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def gpus(monkeypatch):
    """Provides NCCL of fake GPUs."""
    with fake_gpu(monkeypatch), fake_streams(monkeypatch):
        nccl = FakeNccl(SIZE)
        monkeypatch.setattr(nccl_module, "_module", lambda: nccl)
        yield nccl


def on_gpus(nccl: FakeNccl, work: Callable, timeout: float = 5.0) -> list:
    def of_rank(comm):
        one = FakeCommunicator(nccl, comm.rank)
        return work(dist.Communicator.from_nccl(one, ranks_per_host=SIZE // 2, timeout=timeout))

    return dist.simulate(SIZE, of_rank)


def own_rows(comm, step: int) -> list:
    rows = dist.positions(comm, 4 * SIZE)
    return [place(x[:, rows]) for x in inputs_of(step)]


class TestGpus:
    @pytest.mark.parametrize("own_error", [False, True])
    def test_no_rank_remembers_what_was_refused(self, own_error, gpus):
        bad = {"window": (-1, 0)} if own_error else {"softcap": 3.0}

        def work(comm):
            with pytest.raises(ValueError, match="window" if own_error else "softcap: expected the same on all ranks"):
                dist.forward(comm, *own_rows(comm, 0), scheme="gather", **(bad if comm.rank == 3 else {}))
            assert not comm.agreed
            for options in ({}, {"softcap": 3.0}, {}):
                found = dist.forward(comm, *own_rows(comm, 1), scheme="gather", **options)
            np.testing.assert_allclose(
                np.asarray(found[0], "float64"), expected("forward", 1)[0][:, dist.positions(comm, 4 * SIZE)], rtol=2e-2
            )
            return comm.agreed

        agreed = on_gpus(gpus, work)
        assert all(one == agreed[0] and len(one) == 2 for one in agreed)

    @pytest.mark.parametrize("call", ["new", "refused", "total"])
    def test_a_rank_that_compares_meets_no_arrays_of_those_that_do_not(self, call, gpus):
        """The rank fails, and the others wait for its messages until their time is up."""
        gpus.timeout = 0.3

        def work(comm):
            dist.forward(comm, *own_rows(comm, 0), scheme="gather")
            assert dist.total(comm, place(np.ones(300)))[0] == SIZE
            with pytest.raises((dist.CommunicationError, ValueError)) as caught:
                if comm.rank < 3 and call == "total":
                    dist.total(comm, place(np.ones(300)))
                elif comm.rank < 3:
                    dist.forward(comm, *own_rows(comm, 1), scheme="gather")
                elif call == "new":
                    dist.forward(comm, *own_rows(comm, 1), scheme="gather", softcap=3.0)
                elif call == "refused":
                    dist.forward(comm, *own_rows(comm, 1), scheme="gather", window=(-1, 0))
                else:
                    dist.total(comm, place(np.ones(300, "int64")))
            with pytest.raises(dist.CommunicationError, match="an earlier call on this communicator failed"):
                dist.forward(comm, *own_rows(comm, 2), scheme="gather")
            return str(caught.value)

        texts = on_gpus(gpus, work)
        match = (
            "window" if call == "refused" else "make different calls, and at least one of them is one that all ranks"
        )
        assert match in texts[3]

    def test_sums_and_whole_arrays_have_a_timeout_unless_a_graph_captures_them(self, gpus, monkeypatch):
        watched = []
        monkeypatch.setattr(NcclTransport, "watch", lambda transport, *_: watched.append(transport.rank))

        def calls(comm):
            barrier.wait(20)
            before = watched.count(comm.rank)
            dist.total(comm, place(np.ones(8)))
            dist.unshard(comm, place(np.ones((1, 8))))
            barrier.wait(20)
            return watched.count(comm.rank) - before

        def work(comm):
            found = [calls(comm), calls(comm)]
            monkeypatch.setattr(agreement, "is_captured", lambda array: True)
            return [*found, calls(comm)]

        barrier = threading.Barrier(SIZE)
        assert on_gpus(gpus, work) == [[2, 2, 0]] * SIZE

    @pytest.mark.parametrize("how", ["out of step", "another call"])
    def test_calls_that_do_not_belong_together_are_noticed(self, how, gpus, capfd):
        """The calls are compared when they are done: nothing waits for the host."""
        match = "makes its call . on this communicator, and rank . its" if how == "out of step" else "different calls"

        def work(comm):
            x = place(np.ones(300))
            dist.total(comm, x)
            softcap = 1.0
            for softcap in (1.0, 2.0):
                dist.forward(comm, *own_rows(comm, 1), scheme="gather", softcap=softcap)
            if comm.rank == 2:
                comm.number += how == "out of step"  # as if it had made a call alone
                softcap = 1.0 if how == "another call" else softcap
            dist.forward(comm, *own_rows(comm, 1), scheme="gather", softcap=softcap)
            end = time.monotonic() + 10
            with pytest.raises(dist.CommunicationError, match=match):
                while time.monotonic() < end:
                    time.sleep(0.05)
                    comm.transport_of(x).check()

        on_gpus(gpus, work, timeout=0.2)
        assert "results of the last calls are not there" in capfd.readouterr().err


class TestFailures:
    @pytest.mark.parametrize("transport", ["threads", "mpi"])
    def test_the_others_are_told_at_once(self, transport, monkeypatch):
        mpi = fake_mpi(SIZE, monkeypatch)
        forward = cpu_calls.forward

        def work(comm):
            if transport == "mpi":
                comm = dist.Communicator.from_mpi(mpi.communicator(comm.rank), ranks_per_host=2, timeout=30)
            local.rank = comm.rank
            start = time.monotonic()
            with pytest.raises((dist.CommunicationError, MemoryError)) as caught:
                for _ in range(3):
                    dist.forward(comm, *np.ones((3, 1, 8, 4, 8)), scheme="gather")
            assert time.monotonic() - start < 10
            with pytest.raises(dist.CommunicationError, match="an earlier call on this communicator failed"):
                dist.total(comm, np.ones(2))
            return repr(caught.value)

        def full(*arguments):
            if local.rank == 1:
                raise MemoryError("full")
            return forward(*arguments)

        local = threading.local()
        monkeypatch.setattr(cpu_calls, "forward", full)
        texts = dist.simulate(SIZE, work, timeout=30)
        assert texts[1] == "MemoryError('full')"
        assert all("has failed with" in text and "full" in text for text in (texts[0], texts[2], texts[3])), texts

    def test_the_callers_lane_waits_for_all_others_after_an_error(self, monkeypatch):
        """What lanes still do with the memory of the call comes before what the caller does with it next."""

        class NotingLane(HostLane):
            def __init__(self):
                self.waited: list = []

            def record(self):
                return self

            def wait(self, lane):
                self.waited.append(lane)

        def fail(*_):
            if threading.get_ident() in first_rank:
                lanes[0].waited.clear()
            raise MemoryError

        first_rank = set()
        lanes = tuple(NotingLane() for _ in range(7))
        monkeypatch.setattr(resources, "host_lanes", lambda rank: lanes if rank == 0 else (HostLane(),) * 7)
        monkeypatch.setattr(cpu_calls, "forward", fail)

        def work(comm):
            if comm.rank == 0:
                first_rank.add(threading.get_ident())
            with pytest.raises((MemoryError, dist.CommunicationError)):
                dist.forward(comm, *np.ones((3, 1, 4, 2, 8)))

        dist.simulate(2, work, timeout=10)
        assert {*lanes[0].waited} == {*lanes[1:]}


class TestForeignMessages:
    @pytest.mark.parametrize(("text", "match"), [(b"\xff\xfe", "what is no text"), (b"{]", "what describes no call")])
    def test_what_is_no_description(self, text, match):
        def work(comm):
            if comm.rank == 1:
                transport, landing = comm.transport_of(np.ones(1)), np.empty(8, np.uint8)
                transport.exchange([(head_of(1, len(text)), 0)], [(landing, 0)])
                transport.exchange([(np.frombuffer(text, np.uint8), 0)], [])
                return
            with pytest.raises(dist.CommunicationError, match=match):
                dist.total(comm, np.ones(2))

        dist.simulate(2, work, timeout=10)

    def test_a_rank_that_has_left_out_a_call(self):
        def work(comm):
            comm.number += comm.rank
            with pytest.raises(
                dist.CommunicationError, match=r"makes its call . on this communicator, and rank .|failed"
            ):
                dist.total(comm, np.ones(2))

        dist.simulate(2, work, timeout=10)


class TestMemory:
    def test_messages_that_come_late_change_nothing(self, monkeypatch):
        """They change neither what the caller has made since, nor what the other rank reads."""
        mpi = fake_mpi(2, monkeypatch)
        late, done = threading.Event(), threading.Event()

        def work(comm):
            transport = MpiTransport(mpi.communicator(comm.rank), 0.2 if comm.rank == 0 else 10)
            own, landing = np.full(8192, 7.0), np.empty(8192)
            if comm.rank == 0:
                with pytest.raises(dist.CommunicationError):
                    transport.exchange([(own, 1)], [(landing, 1)])
                del landing
                own[:] = 1000
                later = [np.zeros(8192) for _ in range(20)]
                late.set()
                assert done.wait(10)
                assert not any(x.any() for x in later)
            else:
                assert late.wait(10)
                transport.exchange([], [(landing, 0)])
                assert (landing == 7).all()
                with contextlib.suppress(dist.CommunicationError):
                    mpi.before_test = interrupted
                    transport.exchange([(own, 0)], [])
                done.set()

        def interrupted():
            raise MpiError("ended")

        dist.simulate(2, work)


class TestThreads:
    def test_one_communicator_takes_one_call_at_a_time(self):
        def work(comm):
            def second():
                with pytest.raises(RuntimeError, match="another call on this communicator is under way, in another"):
                    dist.total(comm, np.ones(2))
                refusals.append(comm.rank)

            def score_mod(score, b, h, q, k):
                thread = threading.Thread(target=second)
                thread.start()
                thread.join()
                return score + 1.0

            dist.forward(comm, *np.ones((3, 1, 4, 2, 8)), score_mod=score_mod)

        refusals: list[int] = []
        dist.simulate(2, work, timeout=10)
        assert {*refusals} == {0, 1}

    def test_an_interrupt_of_the_caller_ends_the_ranks(self, ctrl_c):
        errors = []

        def work(comm):
            end = time.monotonic() + 20
            try:
                dist.total(comm, np.ones(2))
                if comm.rank == 0:  # all ranks are at work now
                    threading.Timer(0.1, signal.raise_signal, (signal.SIGINT,)).start()
                while time.monotonic() < end:
                    dist.total(comm, np.ones(2))
                    time.sleep(0.01)
            except dist.CommunicationError as error:
                errors.append(str(error))

        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            dist.simulate(3, work)
        # If the join of a thread was interrupted, Python may take the thread for ended: simulate does not wait for it.
        while len(errors) < 3 and time.monotonic() - start < 10:
            time.sleep(0.01)
        assert time.monotonic() - start < 10
        assert len(errors) == 3 and any("the caller of simulate has failed with KeyboardInterrupt" in x for x in errors)

    def test_ranks_that_do_not_call_do_not_delay_the_end(self, monkeypatch, ctrl_c):
        monkeypatch.setattr("fa2cupy.distributed.simulation._PATIENCE_S", 0.2)
        stop = threading.Event()
        start = time.monotonic()
        threading.Timer(0.2, signal.raise_signal, (signal.SIGINT,)).start()
        with pytest.raises(KeyboardInterrupt):
            dist.simulate(2, lambda comm: stop.wait(20))
        assert time.monotonic() - start < 10
        stop.set()

    def test_functions_without_messages_say_that_the_communicator_has_failed(self):
        def work(comm):
            if comm.rank == 1:
                return
            with pytest.raises(dist.CommunicationError, match="has waited"):
                dist.total(comm, np.ones(2))
            for function in (dist.shard, dist.pad, dist.total, dist.unshard):
                with pytest.raises(dist.CommunicationError, match="an earlier call on this communicator failed"):
                    function(comm, np.ones((1, 4)))
            with pytest.raises(dist.CommunicationError, match="an earlier call on this communicator failed"):
                dist.positions(comm, 4)

        dist.simulate(2, work, timeout=0.1)
