"""CuPy arrays by NCCL, on a fake GPU: streams, the order of the work on them, and waits of the host."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
import types
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from support.fake_cupy import FakeArray, place
from support.fake_gpu import backward, fake_gpu, forward
from support.fake_nccl import INT8, SIZE, FakeCommunicator, FakeNccl, fake_streams, run_all, shards, together
from support.simulator import simulated_gpu

import fa2cupy
import fa2cupy.distributed as dist
from fa2cupy.distributed import api
from fa2cupy.distributed.call import requests
from fa2cupy.distributed.local import copies as copies_module
from fa2cupy.distributed.movers import resources
from fa2cupy.distributed.transport import nccl as nccl_module
from fa2cupy.testing import Expectation, make_inputs


@pytest.fixture
def gpus(monkeypatch):
    """Provides fake GPUs as (launched stages, CuPy, NCCL)."""
    with fake_gpu(monkeypatch) as launched, fake_streams(monkeypatch) as cupy:
        nccl = FakeNccl(SIZE)
        monkeypatch.setattr(nccl_module, "_module", lambda: nccl)
        yield launched, cupy, nccl


@pytest.mark.sample(dtype=("bfloat16",))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scheme", ["heads", "gather", "hybrid"])
def test_results_are_those_of_the_whole_sequence(scheme, dtype, gpus):
    _, _, nccl = gpus
    inputs = make_inputs(dtype, batch=2, seqlen_q=64, num_heads=8, num_heads_kv=4, head_dim=16)
    options = {"causal": True}

    def work(comm):
        q, k, v, do = shards(comm, inputs)
        o, backprop = dist.attention(comm, q, k, v, scheme=scheme, **options)
        assert isinstance(o, FakeArray)
        return (o, *backprop(do))

    o, dq, dk, dv = (together(parts, SIZE) for parts in zip(*run_all(nccl, work), strict=True))
    expected = Expectation(*inputs, **options)
    expected.check(o=o, dq=dq)
    # Shares of dk and dv are rounded before they are summed.
    wide = [x.astype("float64") for x in inputs]
    _, backprop = fa2cupy.attention(*wide[:3], **options)
    tolerance = 1e-2 if dtype == "bfloat16" else 2e-3
    for found, wanted in zip((dk, dv), backprop(wide[3])[1:], strict=True):
        assert np.abs(found.astype("float64") - wanted).max() < tolerance * np.abs(wanted).max()


@pytest.mark.parametrize(("scheme", "most"), [("heads", 740), ("gather", 720)])
def test_a_warm_backward_makes_few_python_calls(scheme, most, gpus):
    """Counts those in ``fa2cupy/distributed``. GPUs wait for the host if calls are short."""
    _, _, nccl = gpus
    inputs = make_inputs("float16", seqlen_q=64, num_heads=8, num_heads_kv=4, head_dim=16)
    folder, calls = str(Path(dist.__file__).parent), []

    def note(frame, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            calls.append(frame.f_code.co_name)

    def work(comm):
        q, k, v, do = shards(comm, inputs)
        _, backprop = dist.attention(comm, q, k, v, scheme=scheme, causal=True)
        backprop(do)
        if comm.rank == 0:
            sys.setprofile(note)
        try:
            backprop(do)
        finally:
            sys.setprofile(None)

    run_all(nccl, work)
    assert 200 < len(calls) <= most


@pytest.mark.parametrize("scheme", ["heads", "gather", "hybrid"])
def test_parts_know_which_heads_and_queries_they_have(scheme, monkeypatch):
    launches, nccl = [], FakeNccl(SIZE)
    monkeypatch.setattr(nccl_module, "_module", lambda: nccl)
    inputs = make_inputs("float16", seqlen_q=128, num_heads=8, num_heads_kv=4, head_dim=16)
    options = {"window": (40, 8), "dropout_p": 0.3, "seed": 2**63 + 5}
    with fake_gpu(monkeypatch, run=launches.append), fake_streams(monkeypatch):
        run_all(nccl, lambda comm: dist.forward(comm, *shards(comm, inputs)[:3], scheme=scheme, **options))
    records = [launch.values for launch in launches if launch.spec.operation == "forward"]
    origins = {(record["dropout_head"], record["dropout_query_word"]) for record in records}
    if scheme == "heads":
        assert origins == {(head, 0) for head in (0, 2, 4, 6)}
        assert {(record["window_left"], record["window_right"]) for record in records} == {(40, 8)}
    else:
        first_heads, rows = ((0,), 16) if scheme == "gather" else ((0, 4), 32)
        assert origins == {(head, row // 2) for head in first_heads for row in range(0, 128, rows)}
        # All chunks but the last have 8 keys behind their last query: their windows move left by 8, and are limited to
        # the keys of the call.
        chunks = {(min(48, row + rows + 8), 0) for row in range(0, 128 - rows, rows)} | {(40, 8)}
        assert {(record["window_left"], record["window_right"]) for record in records} == chunks


@pytest.mark.parametrize(("rows", "expected"), [(2304, 3), (8192, 1)])
@pytest.mark.parametrize("scheme", ["heads", "gather", "hybrid"])
def test_parts_have_the_splits_of_the_whole(scheme, rows, expected, monkeypatch):
    """Calls of parts have smaller grids: by default they would have more splits, and other bits."""
    launches, nccl = [], FakeNccl(SIZE)
    monkeypatch.setattr(nccl_module, "_module", lambda: nccl)
    q, lse = np.zeros((1, rows, 4, 128), "float16"), np.zeros((1, 4, rows), "float32")
    options = {"causal": True, "deterministic": True}

    def splits() -> dict[str, set[int]]:
        found = defaultdict(set)
        for launch in launches:
            if launch.spec.operation in ("forward", "backward_dkdv"):
                found[launch.spec.operation].add(launch.values.get("num_splits", 1))
        launches.clear()
        return dict(found)

    def work(comm):
        own, statistics = dist.shard(comm, q), place(dist.shard(comm, lse, axis=2))
        own = place(own)
        dist.forward(comm, own, own, own, causal=True, scheme=scheme)
        if scheme == "heads":
            dist.backward(comm, own, own, own, own, statistics, own, scheme=scheme, **options)

    with fake_gpu(monkeypatch, run=launches.append):
        whole = place(q)
        forward(whole, whole, whole, causal=True)
        if scheme == "heads":
            backward(whole, whole, whole, whole, place(lse), whole, **options)
        of_whole = splits()
        with fake_streams(monkeypatch):
            run_all(nccl, work)
    assert splits() == of_whole and of_whole["forward"] == {expected}


@pytest.mark.sample(scheme=("gather",))
@pytest.mark.simulated
@pytest.mark.parametrize("scheme", ["heads", "gather"])
def test_kernels_compute_what_one_call_does(scheme, monkeypatch):
    inputs = make_inputs("float16", seqlen_q=64, num_heads=2, num_heads_kv=2, head_dim=16)
    options = {"causal": True, "window": (20, 0), "dropout_p": 0.3, "seed": 2**63 + 5}
    nccl = FakeNccl(2)
    monkeypatch.setattr(nccl_module, "_module", lambda: nccl)

    def work(comm):
        comm = dist.Communicator.from_nccl(FakeCommunicator(nccl, comm.rank), timeout=200)
        o, backprop = dist.attention(comm, *shards(comm, inputs)[:3], scheme=scheme, family="sm80", **options)
        return (o, *backprop(shards(comm, inputs)[3]))

    with simulated_gpu(monkeypatch), fake_streams(monkeypatch):
        found = dist.simulate(2, work, timeout=200)
    o, dq, dk, dv = (together(parts, 2) for parts in zip(*found, strict=True))
    expected = Expectation(*inputs, **options)
    expected.check(o=o, dq=dq)
    if scheme == "heads":
        expected.check(dk=dk, dv=dv)


@pytest.mark.parametrize("scheme", ["heads", "gather", "hybrid"])
def test_messages_match_and_are_in_one_order_on_all_ranks(scheme, gpus):
    _, cupy, nccl = gpus
    inputs = make_inputs("float16", seqlen_q=64, num_heads=16, num_heads_kv=16, head_dim=16)
    streams = {}

    def work(comm):
        q, k, v, do = shards(comm, inputs)
        streams[comm.rank] = cupy.cuda.get_current_stream().ptr
        o, backprop = dist.attention(comm, q, k, v, causal=True, scheme=scheme, head_groups=2)
        backprop(do)

    run_all(nccl, work)
    sent, received, used = defaultdict(list), defaultdict(list), defaultdict(set)
    for rank, kind, peer, count, dtype, stream in nccl.log:
        assert dtype == INT8 and count > 0 and peer != rank
        (sent[rank, peer] if kind == "send" else received[peer, rank]).append(count)
        used[rank].add(stream)
    assert sent == received
    assert sent.keys() == {(a, b) for a in range(SIZE) for b in range(SIZE) if a != b}
    for rank in range(SIZE):  # the agreement uses the caller's stream, all other messages another one
        assert len(used[rank]) == 2 and streams[rank] in used[rank]


@pytest.mark.parametrize("scheme", ["heads", "gather", "hybrid"])
def test_streams_and_memory(scheme, gpus):
    """Kernels run on streams without messages; memory comes from the caller's stream and one for nothing else."""
    launched, cupy, nccl = gpus
    inputs = make_inputs("float16", seqlen_q=64, num_heads=8, num_heads_kv=8, head_dim=16)
    made = []
    stream = cupy.cuda.Stream
    cupy.cuda.Stream = lambda **options: made.append(stream(**options)) or made[-1]

    def work(comm):
        q, k, v, do = shards(comm, inputs)
        caller = cupy.cuda.get_current_stream().ptr
        _, backprop = dist.attention(comm, q, k, v, causal=True, scheme=scheme, head_groups=2)
        backprop(do)
        return caller

    callers = set(run_all(nccl, work))
    assert len(made) == 8 * SIZE and all(one.non_blocking for one in made)
    by_priority = defaultdict(set)
    for one in made:
        by_priority[one.priority].add(one.ptr)
    urgent, *of_groups, least = (by_priority[priority] for priority in sorted(by_priority))
    assert len(urgent) == 2 * SIZE and [len(ptrs) for ptrs in of_groups] == [SIZE] * 3
    computing = {stream for _, stream in cupy.launches}
    assert not computing & urgent
    assert (computing >= set().union(*of_groups[:2])) is (scheme == "heads")
    arenas = least - computing
    allocating = {stream for stream, _ in cupy.allocated}
    assert not allocating & urgent
    assert allocating <= callers | arenas


def test_the_host_waits_in_the_first_call_of_a_kind_alone(gpus):
    _, cupy, nccl = gpus
    inputs = make_inputs("float16", seqlen_q=64, num_heads=8, num_heads_kv=4, head_dim=16)
    waits = []

    def work(comm):
        q, k, v, _ = shards(comm, inputs)
        for seed in range(4):
            dist.forward(comm, q, k, v, causal=True, dropout_p=0.1, seed=seed)
            if comm.rank == 0:
                waits.append(len([wait for wait in cupy.host_waits if wait == "get"]))

    run_all(nccl, work)
    assert waits[0] > 0 and len([wait for wait in cupy.host_waits if wait == "get"]) == SIZE * 2 * (SIZE - 1)


def test_calls_of_one_kind_are_checked_once(gpus, monkeypatch):
    _, _, nccl = gpus
    inputs = make_inputs("float16", seqlen_q=64, num_heads=8, num_heads_kv=4, head_dim=16)
    checks, check = [], requests._request
    requested, run = [], api.Run

    def noted(comm, request, *more):
        requested.append((comm.rank, request))
        return run(comm, request, *more)

    monkeypatch.setattr(api, "Run", noted)
    monkeypatch.setattr(requests, "_request", lambda comm, call: checks.append(comm.rank) or check(comm, call))

    def work(comm):
        def made(match=None, **options) -> int:
            """Returns how often a call is checked, which must raise an error if there is a text that it matches."""
            before = checks.count(comm.rank)
            with pytest.raises((TypeError, ValueError), match=match) if match else contextlib.nullcontext():
                results.append(dist.forward(comm, q, k, v, scheme="heads", **options)[0])
            return checks.count(comm.rank) - before

        q, k, v, _ = shards(comm, inputs)
        results: list = []
        sink = place(np.zeros(8, "float32"))
        for options in ({}, {"causal": True}, {"window": (9, 0)}, {"sink": sink, "dropout_p": 0.1, "seed": 1}):
            assert [made(**options), made(**options)] == [1, 0]
        ones = place(np.ones(8, "float32"))
        assert made(sink=ones, dropout_p=0.1, seed=2) == 0
        keywords = [request.keywords for rank, request in requested if rank == comm.rank][-1]
        assert keywords["sink"] is ones and keywords["seed"] == 2
        for softcap in (np.float64(3), np.float64(4)):
            assert [made(softcap=softcap), made(softcap=softcap)] == [1, 0]
        out = (place(np.zeros(q.shape, "float16")), None)
        assert [made(out=out), made(out=out)] == [1, 0]
        np.testing.assert_array_equal(out[0], results[0])
        # What is equal to a legal value, or has its hash, is checked all the same.
        for match, options in (
            ("causal: expected a bool, got int", {"causal": 1}),
            ("seed: expected", {"sink": sink, "dropout_p": 0.1, "seed": 1.0}),
            ("seed: expected", {"sink": sink, "dropout_p": 0.1, "seed": -1}),
            ("window", {"window": (9.0, 0)}),
            (r"out \(o\): overlaps q", {"out": (q, None)}),
        ):
            for _ in range(2):
                assert made(match, **options) == (0 if match.startswith("out") else 1)

    run_all(nccl, work)


@pytest.mark.parametrize("shape", [(2, 64, 3, 8), (2, 64, 3, 6), (4, 8)])
def test_large_arrays_are_copied_as_words(shape, gpus, monkeypatch):
    """Copies use words of 8 bytes if all rows consist of them."""
    _, cupy, _ = gpus
    viewed = []

    def view(shape, dtype, memory, strides):
        viewed.append(dtype)
        nbytes = 8 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        owner = (ctypes.c_char * nbytes).from_address(memory.ptr)
        return np.ndarray(shape, dtype, owner, 0, strides)

    monkeypatch.setattr(cupy, "ndarray", view)
    monkeypatch.setattr(copies_module, "is_on_host", lambda array: False)
    monkeypatch.setattr(copies_module, "_LARGE", 1000)
    source, target = place(np.random.default_rng(0).random(shape).astype("float16")), place(np.zeros(shape, "float16"))
    copies_module.copy(target.swapaxes(0, -2), source.swapaxes(0, -2))
    np.testing.assert_array_equal(target, source)
    assert viewed == (["uint64"] * 2 if shape == (2, 64, 3, 8) else [])


def test_captured_calls_keep_their_memory_and_are_not_watched(gpus, monkeypatch):
    _, _, nccl = gpus
    inputs = make_inputs("float16", seqlen_q=64, num_heads=8, num_heads_kv=4, head_dim=16)
    watched = []
    monkeypatch.setattr(nccl_module.NcclTransport, "watch", lambda transport, *_: watched.append(transport.rank))

    def work(comm):
        q, k, v, _ = shards(comm, inputs)
        plain, _ = dist.forward(comm, q, k, v, scheme="gather")
        assert watched.count(comm.rank) == 1 and not comm.captured
        barrier.wait(20)
        monkeypatch.setattr(resources, "is_captured", lambda array: True)
        monkeypatch.setattr(api, "is_captured", lambda array: True)
        barrier.wait(20)
        found, _ = dist.forward(comm, q, k, v, scheme="gather")
        np.testing.assert_array_equal(found, plain)
        assert watched.count(comm.rank) == 1
        assert len(comm.captured) == 1 and all(isinstance(x, FakeArray) for x in comm.captured[0])
        with pytest.raises(fa2cupy.UnsupportedProblemError, match="mask_mod: calls on several GPUs cannot be captured"):
            dist.forward(comm, q, k, v, mask_mod=lambda b, h, q, k: q >= k)
        dist.forward(comm, q, k, v, scheme="gather")  # the communicator can be used on

    barrier = threading.Barrier(SIZE)
    run_all(nccl, work)


def test_ranks_that_differ_get_an_error(gpus):
    _, _, nccl = gpus
    inputs = make_inputs("float16", seqlen_q=64, num_heads=8, head_dim=16)

    def work(comm):
        with pytest.raises(ValueError, match="softcap: expected the same on all ranks, got absent on ranks 0, 1, 2; 3"):
            dist.forward(comm, *shards(comm, inputs)[:3], **({"softcap": 3.0} if comm.rank == 3 else {}))

    run_all(nccl, work)


def test_dropout_in_chunks_of_other_lengths_is_refused(gpus):
    _, _, nccl = gpus
    inputs = make_inputs("float16", seqlen_q=64, num_heads=8, head_dim=16)

    def work(comm):
        with pytest.raises(
            fa2cupy.UnsupportedProblemError, match="multiple of 16 rows on a GPU, got 8; pad .* of 128,"
        ):
            dist.forward(comm, *shards(comm, inputs)[:3], scheme="gather", dropout_p=0.1, seed=0)

    run_all(nccl, work)


class TestCommunicators:
    def test_of_mpi_makes_one_with_the_identifier_of_rank_0(self, gpus):
        _, _, nccl = gpus
        transport = nccl_module.connect(2, SIZE, lambda own: list(nccl.get_unique_id()), 5.0)
        assert (transport.rank, transport.size) == (2, SIZE)
        assert not transport.waits_for_host

    def test_of_cupyx(self, gpus):
        _, _, nccl = gpus
        backend = types.SimpleNamespace(_comm=FakeCommunicator(nccl, 1))
        comm = dist.Communicator.from_nccl(backend)
        assert (comm.rank, comm.size) == (1, SIZE)
        with pytest.raises(ValueError, match="rank: expected 1, that of the communicator, got 2"):
            dist.Communicator.from_nccl(backend, rank=2)
        with pytest.raises(TypeError, match="simulated ranks|NumPy arrays travel by MPI"):
            comm.transport_of(np.zeros(2))

    def test_of_nccl4py(self, gpus, monkeypatch):
        """The methods of nccl4py take arrays, and its group is a context."""
        calls_made = []

        class Communicator:
            __module__ = "nccl.core.communicator"
            rank, nranks = 0, 2

            def send(self, buffer, peer, *, stream=None):
                calls_made.append(("send", buffer.dtype.name, buffer.shape, peer, stream))

            def recv(self, buffer, peer, *, stream=None):
                calls_made.append(("recv", buffer.dtype.name, buffer.shape, peer, stream))

        class Group:
            def __enter__(self):
                calls_made.append("start")

            def __exit__(self, *_):
                calls_made.append("end")

        core = types.ModuleType("nccl.core")
        core.group = Group
        package = types.ModuleType("nccl")
        package.core = core
        monkeypatch.setitem(sys.modules, "nccl", package)
        monkeypatch.setitem(sys.modules, "nccl.core", core)
        _, cupy, _ = gpus
        comm = dist.Communicator.from_nccl(Communicator())
        array = place(np.zeros((3, 2), "float16"))
        comm.transport_of(array).exchange([(array, 1)], [(array, 1)])
        stream = cupy.cuda.get_current_stream().ptr
        assert calls_made == ["start", ("send", "int8", (12,), 1, stream), ("recv", "int8", (12,), 1, stream), "end"]

    def test_other_objects_are_refused(self):
        with pytest.raises(
            TypeError, match=r"communicator: expected a cupy.cuda.nccl.NcclCommunicator.*got builtins.int"
        ):
            dist.Communicator.from_nccl(3)

    def test_simulated_ranks_refuse_cupy_arrays(self, gpus):
        def work(comm):
            with pytest.raises(TypeError, match="simulated ranks have NumPy arrays, got a cupy.ndarray"):
                comm.transport_of(place(np.zeros(2)))

        dist.simulate(2, work)

    def test_without_the_library_the_message_says_what_to_install(self, monkeypatch):
        package = types.ModuleType("cupy.cuda")
        package.nccl = types.SimpleNamespace(available=False)
        monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
        monkeypatch.setitem(sys.modules, "cupy.cuda", package)
        with pytest.raises(ImportError, match=r"CuPy finds no NCCL; .*'\.\[cuda12,nccl12\]'"):
            nccl_module.connect(0, 1, lambda own: own, 1.0)


class TestLateRanks:
    @pytest.fixture(autouse=True)
    def device(self, monkeypatch):
        """Provides the names of the threads that have made the device current."""
        used = []
        device = types.SimpleNamespace(use=lambda: used.append(threading.current_thread().name))
        monkeypatch.setattr(nccl_module, "_current_device", lambda: device)
        return used

    class Binding:
        def __init__(self):
            self.aborts = 0

        def abort(self):
            self.aborts += 1

    def test_a_call_that_does_not_end_is_aborted_with_a_message(self, monkeypatch, capfd, device):
        never = types.SimpleNamespace(done=False)
        monkeypatch.setattr(nccl_module, "_event", lambda: never)
        binding = self.Binding()
        transport = nccl_module.NcclTransport(binding, 1, 4, 0.1)
        transport.watch()
        end = time.monotonic() + 10
        while not binding.aborts and time.monotonic() < end:
            time.sleep(0.01)
        assert binding.aborts == 1 and device == ["fa2cupy.distributed"]
        assert "rank 1 has waited 0.1 s for messages of other ranks" in capfd.readouterr().err
        with pytest.raises(dist.CommunicationError, match="rank 1 has waited"):
            transport.exchange([], [])

    def test_calls_that_end_are_forgotten(self, monkeypatch):
        event = types.SimpleNamespace(done=True)
        monkeypatch.setattr(nccl_module, "_event", lambda: event)
        binding = self.Binding()
        transport = nccl_module.NcclTransport(binding, 1, 4, 0.05)
        for _ in range(3):
            transport.watch()
            time.sleep(0.1)
        assert not binding.aborts and len(transport._watched) <= 1

    def test_a_first_call_that_does_not_end(self, monkeypatch):
        monkeypatch.setattr(nccl_module, "_event", lambda: types.SimpleNamespace(done=False))
        binding = self.Binding()
        transport = nccl_module.NcclTransport(binding, 0, 2, 0.05)
        with pytest.raises(dist.CommunicationError, match="rank 0 has waited 0.05 s"):
            transport.to_host(object())
        assert binding.aborts == 1
