"""Calls of several GPUs that are recorded once, and queued with the addresses of other arrays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.fake_cupy import FakeArray, place
from support.fake_gpu import fake_gpu
from support.fake_nccl import SIZE, FakeNccl, fake_sharing, fake_streams, run_all, shards, together

import fa2cupy.distributed as dist
from fa2cupy.distributed.local.copies import copy, copy_parts
from fa2cupy.distributed.local.lanes import device_streams
from fa2cupy.distributed.local.prepared import PreparedCall
from fa2cupy.distributed.local.sums import sum_into
from fa2cupy.distributed.schemes import heads
from fa2cupy.distributed.transport import nccl as nccl_module
from fa2cupy.gpu import calls, signatures
from fa2cupy.problem.options import call_options
from fa2cupy.testing import Expectation, make_inputs


@pytest.fixture
def gpus(monkeypatch):
    """Provides fake GPUs that write each other's memory as (CuPy, NCCL)."""
    with fake_gpu(monkeypatch), fake_streams(monkeypatch) as cupy:
        nccl = FakeNccl(SIZE)
        monkeypatch.setattr(nccl_module, "_module", lambda: nccl)
        with fake_sharing(monkeypatch, cupy):
            yield cupy, nccl


def queue(call: PreparedCall, values: dict) -> None:
    (like,) = itertools.islice((x for x in values.values() if isinstance(x, np.ndarray)), 1)
    call(values.values(), *device_streams(like))


def count_recordings(monkeypatch) -> list[int]:
    """Returns a list with an entry for each time that the scheme queues a call, or has one recorded."""
    made, heads_of = [], heads.Heads
    monkeypatch.setattr(heads, "Heads", lambda *arguments: made.append(0) or heads_of(*arguments))
    return made


def add(target, sources, keywords) -> None:
    target[...] = sum(sources) + keywords["seed"]


def test_steps_get_the_arrays_of_their_call(gpus):
    """Views, arrays in lists, what the call allocates, strides below 0, an address that is no multiple of 16."""

    def values(first: int) -> dict:
        x = place(np.arange(first, first + 24, dtype="float32").reshape(4, 6))[::-1, 1:]
        return {"x": x, "seed": 10 * first, "out": place(np.zeros((2, 5), "float32"))}

    first = values(1)
    call = PreparedCall(first)
    x, seed, out = (call.symbols[name] for name in first)
    between = call.empty((2, 5), "float32")
    other = place(np.full((2, 5), 100, "float32"))
    call.lanes[3](np.copyto, between, x[1:3])
    event = call.lanes[3].record()
    call.lanes[0].wait(event)
    call.lanes[0](add, out, [between, x[2:], other], {"seed": seed, "more": (1, None)})
    assert not first["out"].any(), "nothing is queued yet"
    for given in (first, values(1000), first):
        given["out"][...] = 0
        queue(call, given)
        np.testing.assert_array_equal(given["out"], given["x"][1:3] + given["x"][2:] + 100 + given["seed"])


@pytest.mark.parametrize("low", [0, 2, 6])
def test_copies_by_kernel_get_the_addresses_of_their_call(low, gpus):
    """The address decides on words, also of a part of an array."""

    def values(first: int) -> dict:
        whole = place(np.arange(first, first + 4 * 40, dtype="float16").reshape(4, 40))
        start = low // 2
        return {"x": whole[:, start : start + 32], "out": place(np.zeros((4, 40), "float16"))[:, start : start + 32]}

    first = values(1)
    call = PreparedCall(first)
    x, out = call.symbols.values()
    call.lanes[2](copy_parts, [(out, (0, 8), x, (1, 16), (3, 8)), (out, (3, 0), x, (0, 0), (1, 8))])
    for given in (first, values(1000)):
        queue(call, given)
        np.testing.assert_array_equal(given["out"][:3, 8:16], given["x"][1:, 16:24])
        np.testing.assert_array_equal(given["out"][3, :8], given["x"][0, :8])
        assert np.count_nonzero(given["out"]) == 32


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_sums_and_copies_of_arrays_get_the_addresses_of_their_call(dtype, gpus):
    """Kernels make them, but for a copy to another dtype, and for arrays without shares."""

    def values(first: int) -> dict:
        x = place(np.arange(first, first + 120).astype(dtype).reshape(3, 5, 8))
        names = ("sum", "copy", "wide", "zeros")
        return {"x": x, **{n: place(np.ones((5, 8), "float64" if n == "wide" else dtype)) for n in names}}

    first, sharing = values(1), gpus[0].cuda.runtime
    call = PreparedCall(first)
    x, *out = call.symbols.values()
    for lane, function, *arguments in (
        (0, sum_into, out[0], [x[0], x[2]], "float32"),
        (4, copy, out[1], x[1]),
        (1, copy, out[2], x[1]),
        (2, sum_into, out[3], [], "float32"),
    ):
        call.lanes[lane](function, *arguments)
    for given in (first, values(70), first):
        sharing.log.clear()
        for name in ("sum", "copy", "wide", "zeros"):
            given[name][...] = 1
        queue(call, given)
        wanted = given["x"].astype("float32")
        np.testing.assert_array_equal(given["sum"], (wanted[0] + wanted[2]).astype(dtype))
        np.testing.assert_array_equal(given["copy"], given["x"][1])
        np.testing.assert_array_equal(given["wide"], wanted[1])
        assert not given["zeros"].any()
        assert [kind for kind, _ in sharing.log] == ["sum by kernel", "copy by kernel"]


@pytest.mark.parametrize(
    ("head_dim", "keywords", "is_bound"),
    ((16, {}, True), (16, {"sink": None}, True), (12, {}, False), (16, {"dropout_p": 0.0, "seed": 3}, False)),
)
def test_kernels_get_the_addresses_of_their_call_without_arrays(gpus, monkeypatch, head_dim, keywords, is_bound):
    """A call that copies its arrays, or that depends on more than addresses, is made each time."""

    def values(number: int) -> dict:
        q, k, v, _ = make_inputs("float16", seqlen_q=20, seqlen_k=30, num_heads=2, head_dim=head_dim, seed=number)
        return {"q": place(q), "k": place(k), "v": place(v), "o": place(np.zeros_like(q))}

    first = values(1)
    call = PreparedCall(first)
    q, k, v, o = call.symbols.values()
    lse = call.empty((1, 2, 20), "float32")
    call.lanes[1].kernels(calls.forward, q, k, v, (o, lse), call_options(causal=True), dict(keywords))
    made, run = [], signatures.run
    monkeypatch.setattr(calls, "run", lambda *arguments: made.append(0) or run(*arguments))
    for given in (first, values(2), first):
        given["o"][...] = 0
        queue(call, given)
        Expectation(given["q"], given["k"], given["v"], causal=True).check(o=given["o"])
    assert len(made) == (0 if is_bound else 3)


def test_waits_that_nothing_needs_are_not_queued(gpus, monkeypatch):
    """They are those of a lane for itself, for one that has been given nothing, and for what it has waited for."""
    x = place(np.zeros(3, "float32"))
    call = PreparedCall({"x": x})
    main, side, comm, back = call.lanes[:4]
    begun, idle = main.record(), side.record()
    for lane in (main, comm, comm, side):
        lane.wait(begun)
        lane.wait(idle)
    main.wait(side.record())  # it has waited, and may be behind
    main.wait(comm.record_for(lambda event: None))
    streams, arena = device_streams(x)
    waits = []
    for number, stream in enumerate(streams):
        monkeypatch.setattr(stream, "wait_event", lambda event, number=number: waits.append(number))
    call([x], streams, arena)
    assert waits == [2, 1, 0, 0]
    assert back.record().reached_on == set(range(len(streams)))


def test_each_call_gives_events_of_its_own_away(gpus):
    x = place(np.zeros(3, "float32"))
    call, events = PreparedCall({"x": x}), []
    call.lanes[0].wait(call.lanes[2].record_for(events.append, events.append))
    for _ in range(2):
        queue(call, {"x": x})
    assert events[0] is events[1] and events[2] is events[3] and events[0] is not events[2]


def test_an_error_lets_the_caller_wait_for_all_lanes(gpus, monkeypatch):
    x = place(np.zeros(3, "float32"))
    call = PreparedCall({"x": x})

    def fail() -> None:
        raise OSError("no more")

    call.lanes[1](fail)
    streams, arena = device_streams(x)
    waits = []
    monkeypatch.setattr(streams[0], "wait_event", waits.append, raising=False)
    with pytest.raises(OSError, match="no more"):
        call([x], streams, arena)
    assert len(waits) == len(streams) - 1


def test_a_call_of_the_same_layouts_is_queued_as_it_was_recorded(gpus, monkeypatch):
    """First with q, k and v that are views of one array, then with views of three."""
    _, nccl = gpus
    inputs = make_inputs("float16", seqlen_q=64, num_heads=4, num_heads_kv=4, head_dim=16)
    made = count_recordings(monkeypatch)

    def work(comm):
        found = []
        *own, do = shards(comm, inputs)
        shape = (*own[0].shape[:3], 48)
        for number in range(3):
            wholes = [place(np.full(shape, np.nan, "float16")) for _ in range(3)]
            q, k, v = (wholes[0 if number == 0 else i][..., 16 * i : 16 * (i + 1)] for i in range(3))
            for target, source in zip((q, k, v), own, strict=True):
                target[...] = source
            o, backprop = dist.attention(comm, q, k, v, scheme="heads")
            assert isinstance(o, FakeArray)
            found.append((o, *backprop(do)))
        return found

    results = run_all(nccl, work)
    assert len(made) == 3 * SIZE, "the first backward needs larger windows: the next forward is recorded anew"
    for number in range(3):
        o, dq, dk, dv = (together(parts, SIZE) for parts in zip(*(one[number] for one in results), strict=True))
        Expectation(*inputs).check(o=o, dq=dq, dk=dk, dv=dv)


@pytest.mark.parametrize("change", ["dtype", "strides", "address", "causal"])
def test_other_calls_are_recorded_themselves(change, gpus, monkeypatch):
    _, nccl = gpus
    made = count_recordings(monkeypatch)

    def work(comm):
        for number in range(2):
            is_changed = number == 1
            dtype = "bfloat16" if is_changed and change == "dtype" else "float16"
            q, k, v, _ = shards(comm, make_inputs(dtype, seqlen_q=64, num_heads=4, num_heads_kv=4, head_dim=16))
            if is_changed and change in ("strides", "address"):
                wide = place(np.zeros((*q.shape[:3], 32 if change == "strides" else 20), dtype))
                first = 0 if change == "strides" else 4
                wide[..., first : first + 16] = q
                q = wide[..., first : first + 16]
            for _ in range(2):
                dist.forward(comm, q, k, v, scheme="heads", causal=is_changed and change == "causal")

    run_all(nccl, work)
    assert len(made) == 2 * SIZE
