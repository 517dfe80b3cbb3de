"""Calls on GPUs that write each other's memory: copies as matrices, fake GPUs, and what is refused."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from dataclasses import replace
from enum import IntEnum

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_cupy import FakeArray, place
from support.fake_gpu import fake_gpu
from support.fake_nccl import SIZE, FakeCommunicator, FakeNccl, fake_sharing, fake_streams, run_all, shards, together
from support.feature_cases import numbers

import fa2cupy
import fa2cupy.distributed as dist
from fa2cupy import reference
from fa2cupy.distributed import api
from fa2cupy.distributed.call import groups as groups_module
from fa2cupy.distributed.call import run as run_module
from fa2cupy.distributed.call.choice import groups_of
from fa2cupy.distributed.call.orders import RowOrder
from fa2cupy.distributed.call.requests import Request
from fa2cupy.distributed.local.matrices import matrices_of
from fa2cupy.distributed.movers import by_messages, resources
from fa2cupy.distributed.schemes.head_parts import GroupedShape, parts_of_group
from fa2cupy.distributed.transport import device_window
from fa2cupy.distributed.transport import nccl as nccl_module
from fa2cupy.problem.checks import check_forward
from fa2cupy.problem.options import CallOptions
from fa2cupy.testing import Expectation, make_inputs


@st.composite
def parts(draw):
    """Two arrays with strides of their own, and equal parts of both."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    dtype = draw(st.sampled_from(["uint8", "float16", "float64"]))

    def array():
        more = [n + draw(st.integers(0, 2)) for n in shape]
        order = draw(st.permutations(range(len(shape))))
        whole = np.zeros([more[axis] for axis in order], dtype).transpose(np.argsort(order))
        start = tuple(draw(st.integers(0, has - n)) for has, n in zip(more, shape, strict=True))
        return whole, start, tuple(slice(first, first + n) for first, n in zip(start, shape, strict=True))

    return shape, array(), array()


@given(parts())
def test_matrices_cover_a_part_once(drawn):
    shape, (target, to_start, to), (source, of_start, of) = drawn
    source[...] = np.arange(1, source.size + 1).reshape(source.shape)
    copied = 0
    for one in matrices_of(shape, target.strides, source.strides, target.itemsize, to_start, of_start):
        assert min(one.target_pitch, one.source_pitch) >= one.width
        copied += one.width * one.height
        for row in range(one.height):
            ctypes.memmove(
                target.ctypes.data + one.target + row * one.target_pitch,
                source.ctypes.data + one.source + row * one.source_pitch,
                one.width,
            )
    np.testing.assert_array_equal(target[to], source[of])
    assert copied == source[of].nbytes
    assert np.count_nonzero(target) == np.count_nonzero(target[to])


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=5))
def test_a_part_is_a_message_of_its_own_where_it_is_contiguous(sizes):
    whole, part = [length + more for length, more in sizes], [length for length, _ in sizes]
    view = np.zeros(whole, "uint8")[tuple(map(slice, part))]
    assert by_messages._is_contiguous(tuple(whole), tuple(part)) is view.flags.c_contiguous


def test_rows_of_heads_are_one_matrix():
    own, whole = (1, 100, 16, 128), (1, 400, 4, 128)
    strides = [np.zeros(shape, "float16").strides for shape in (whole, own)]
    (one,) = matrices_of((1, 50, 4, 128), *strides, 2, (0, 300, 0, 0), (0, 50, 8, 0))
    assert one == (300 * 1024, 1024, 50 * 4096 + 8 * 256, 4096, 1024, 50)


@pytest.mark.parametrize("heads", [1, 8, 256])
@pytest.mark.parametrize("batch", [1, 64])
def test_parts_of_a_bias_are_at_most_one_matrix_for_each_sequence(batch, heads):
    """The number of sequences therefore limits those of biases, too."""
    shape = GroupedShape(RowOrder("zigzag", 4, 16), (batch, heads, 4, 5), (2, 1), ((0, max(1, heads // 4)),))
    strides = [np.empty(one, "int8").strides for one in (shape.whole(0), shape.sizes)]
    for part in parts_of_group(shape, 0, 1, 0):
        assert len(matrices_of(part.shape, *strides, 1, part.whole, part.own)) <= batch


def test_broadcast_rows_are_no_matrix():
    """A pitch must not be less than the width."""
    found = matrices_of((6, 4), (8, 2), (0, 2), 2)
    assert len(found) == 6 and {one.height for one in found} == {1}


@pytest.fixture
def gpus(monkeypatch):
    """Provides fake GPUs that write each other's memory as (launched stages, CuPy, NCCL, what they share)."""
    with fake_gpu(monkeypatch) as launched, fake_streams(monkeypatch) as cupy:
        nccl = FakeNccl(SIZE)
        monkeypatch.setattr(nccl_module, "_module", lambda: nccl)
        with fake_sharing(monkeypatch, cupy) as sharing:
            yield launched, cupy, nccl, sharing


@pytest.mark.sample(dtype=("bfloat16",), layout=("bhsd",))
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scheme", ["heads", "gather"])
def test_results_are_those_of_the_whole_sequence(scheme, dtype, layout, gpus):
    _, cupy, nccl, sharing = gpus
    inputs = make_inputs(dtype, batch=2, seqlen_q=64, num_heads=16, num_heads_kv=8, head_dim=16)
    axis, groups = 1 if layout == "bshd" else 2, 4 if scheme == "gather" else 2

    def work(comm):
        own = [place(x if layout == "bshd" else x.swapaxes(1, 2)) for x in shards(comm, inputs)]
        o, backprop = dist.attention(comm, *own[:3], causal=True, scheme=scheme, head_groups=groups, layout=layout)
        assert isinstance(o, FakeArray)
        return (o, *backprop(own[3]))

    found = [together(parts, SIZE, axis) for parts in zip(*run_all(nccl, work), strict=True)]
    o, dq, dk, dv = (x if layout == "bshd" else x.swapaxes(1, 2) for x in found)
    expected = Expectation(*inputs, causal=True)
    expected.check(o=o, dq=dq)
    if scheme == "heads":
        expected.check(dk=dk, dv=dv)
    else:  # shares are rounded before they are summed
        wide = [x.astype("float64") for x in inputs]
        _, backprop = fa2cupy.attention(*wide[:3], causal=True)
        tolerance = 1e-2 if dtype == "bfloat16" else 2e-3
        for found, wanted in zip((dk, dv), backprop(wide[3])[1:], strict=True):
            assert np.abs(found.astype("float64") - wanted).max() < tolerance * np.abs(wanted).max()
    kinds = [kind for kind, _ in sharing.log]
    assert kinds.count("copy") > kinds.count("wait") > 0
    # Ranks exchange messages only to begin with; no array is a message.
    assert {count for _, _, _, count, _, _ in nccl.log} <= set(range(8, 4096))
    computing = {stream for _, stream in cupy.launches}
    assert computing and not computing & {stream for kind, stream in sharing.log if kind == "copy"}


def test_calls_of_second_order_move_more_arrays_in_the_same_way(gpus):
    _, _, nccl, sharing = gpus
    inputs = make_inputs("float32", seqlen_q=64, num_heads=16, num_heads_kv=8, head_dim=16)
    waits = []

    def results(functions, arrays, *comm, **how):
        q, k, v, do = arrays
        o, lse, ot, lset = functions.jvp(*comm, q, k, v, q, None, v, causal=True, **how)
        found = functions.backward_jvp(*comm, q, k, v, o, lse, do, q, None, v, ot, lset, dot=do, causal=True, **how)
        return (o, ot, *found, *functions.double_backward(*comm, q, k, v, o, lse, do, q, None, v, causal=True, **how))

    def work(comm):
        for _ in range(2):
            found = results(dist, shards(comm, inputs), comm, head_groups=2)
            if comm.rank == 0:
                waits.append(len(nccl.log))
        return found

    found = [together(parts, SIZE, 1) for parts in zip(*run_all(nccl, work), strict=True)]
    for one, other in zip(found, results(reference, inputs), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    assert {kind for kind, _ in sharing.log} >= {"copy", "wait"}
    assert not [entry for entry in nccl.log[waits[0] :] if entry[0] == 0], "the second time nothing is compared"


@pytest.mark.parametrize("heads_kv", [16, 8])
@pytest.mark.parametrize("scheme", ["heads", "gather"])
def test_groups_of_several_sizes(scheme, heads_kv, gpus, monkeypatch):
    """Kernels read and write the heads of a group in memory that has room for more heads."""
    _, _, nccl, sharing = gpus
    inputs = make_inputs("float16", batch=2, seqlen_q=64, num_heads=32, num_heads_kv=heads_kv, head_dim=16)

    def work(comm):
        o, backprop = dist.attention(comm, *shards(comm, inputs[:3]), causal=True, scheme=scheme)
        return (o, *backprop(shards(comm, inputs)[3]))

    expected = [together(parts, SIZE) for parts in zip(*run_all(nccl, work), strict=True)]
    before = len(sharing.log)
    monkeypatch.setattr(groups_module, "_FEW_ROWS", 0)
    monkeypatch.setattr(groups_module, "_LEAST_ROWS", 1)
    monkeypatch.setattr(groups_module, "_LONG_KERNELS", 1 << 40)
    found = [together(parts, SIZE) for parts in zip(*run_all(nccl, work), strict=True)]
    assert len(sharing.log) - before > before
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def request_of(scheme, size, rows, heads):
    arrays = [np.broadcast_to(np.zeros((), "float16"), (1, rows, n, 128)) for n in (heads[0], *2 * heads[1:])]
    problem = check_forward(dict(zip("qkv", arrays, strict=True)), CallOptions(causal=True), {}).problem
    order = RowOrder("zigzag", size, rows)
    equal = groups_of(scheme, problem, size if scheme == "heads" else 1, None, False)
    return Request(problem, (), scheme, order, order, None, equal, CallOptions(), {})


@given(st.integers(1, 64), st.integers(1, 1 << 20))
def test_groups_have_all_heads_and_enough_rows(heads, rows):
    sizes = groups_module._with_small_ends(heads, rows)
    assert sum(sizes) == heads and min(sizes) > 0 and sizes[0] == sizes[-1] and len(sizes) <= 3
    assert len(sizes) == 1 or min(sizes[0], sizes[-1]) * rows >= groups_module._LEAST_ROWS


@pytest.mark.parametrize(
    ("scheme", "size", "rows", "heads", "groups"),
    [
        ("heads", 4, 4096, (32, 8), (2,)),
        ("heads", 4, 32768, (32, 8), (1, 1)),
        ("heads", 4, 32768, (16, 16), (1, 2, 1)),
        ("heads", 2, 32768, (32, 8), (1, 2, 1)),
        ("gather", 4, 4096, (32, 8), (8,)),
        ("gather", 4, 32768, (8, 1), (1,)),
        ("gather", 4, 32768, (32, 8), (1, 6, 1)),
        ("gather", 4, 32768, (16, 16), (4, 8, 4)),
        ("gather", 2, 32768, (16, 16), (2, 12, 2)),
        ("gather", 2, 32768, (32, 8), (4, 4)),
        ("gather", 2, 32768, (12, 3), (2, 1)),
        ("gather", 4, 131072, (32, 8), (2, 2, 2, 2)),
    ],
)
def test_groups_of_lengths(scheme, size, rows, heads, groups):
    assert groups_module.groups_of_copies(request_of(scheme, size, rows, heads)) == groups


@pytest.mark.parametrize(
    ("size", "rows", "heads", "groups"),
    [
        (4, 4096, (32, 8), [8]),
        (4, 32768, (32, 8), [1, 3, 3, 1]),
        (8, 32768, (32, 8), [1, 2, 1]),
        (2, 32768, (32, 8), [4, 8, 4]),
        (4, 32768, (16, 16), [1, 2, 1]),
        (4, 32768, (16, 4), [1, 2, 1]),
        (2, 32768, (12, 4), [1, 2, 2, 1]),
        (2, 32768, (8, 2), [1, 2, 1]),
    ],
)
def test_query_heads_of_groups(size, rows, heads, groups):
    request = request_of("heads", size, rows, heads)
    found = groups_module.query_groups(replace(request, groups=groups_module.groups_of_copies(request)))
    assert [one.stop - one.start for one in found] == groups


def test_keys_outside_all_windows_are_not_copied(gpus):
    _, _, nccl, sharing = gpus
    inputs = make_inputs("float16", seqlen_q=128, num_heads=4, num_heads_kv=2, head_dim=16)
    copies = {}

    def work(comm):
        q, k, v, _ = shards(comm, inputs)
        for window in (None, (7, 0)):
            barrier.wait(20)
            before = len(sharing.log)
            barrier.wait(20)
            dist.forward(comm, q, k, v, window=window, scheme="gather")
            barrier.wait(20)
            copies[window] = [kind for kind, _ in sharing.log[before:]].count("copy")

    barrier = threading.Barrier(SIZE)
    run_all(nccl, work)
    assert 0 < copies[7, 0] < copies[None] / 2


def test_only_other_shapes_make_the_host_wait(gpus):
    _, cupy, nccl, _ = gpus
    inputs = make_inputs("float16", seqlen_q=64, num_heads=8, num_heads_kv=4, head_dim=16)
    waits = []

    def work(comm):
        q, k, v, _ = shards(comm, inputs)
        for _ in range(3):
            dist.forward(comm, q, k, v, scheme="heads")
            if comm.rank == 0:
                waits.append(len(nccl.log))

    run_all(nccl, work)
    assert waits[0] > 0
    late = [entry for entry in nccl.log[waits[0] :] if entry[0] == 0]
    assert late == [] and "synchronize" not in cupy.host_waits


def test_a_larger_call_gives_all_ranks_larger_windows(gpus):
    _, cupy, nccl, sharing = gpus
    inputs = {
        rows: make_inputs("float16", seqlen_q=rows, num_heads=8, num_heads_kv=4, head_dim=16) for rows in (64, 128)
    }

    def work(comm):
        sizes, results = [], []
        for rows in (64, 128, 64):
            q, k, v, _ = shards(comm, inputs[rows])
            results.append(dist.forward(comm, q, k, v, scheme="heads")[0])
            sizes.append(comm.window_bytes)
        assert sizes[0] < sizes[1] == sizes[2]
        return results

    found = run_all(nccl, work)
    for number, rows in enumerate((64, 128, 64)):
        o = together([results[number] for results in found], SIZE)
        Expectation(*inputs[rows]).check(o=o)
    assert cupy.host_waits.count("synchronize") == SIZE
    assert len(sharing.mapped) == 2 * SIZE  # signals, and one window of each rank


@pytest.mark.sample(strides=("columns",))
@pytest.mark.parametrize("strides", ["broadcast", "columns"])
def test_arrays_that_are_many_matrices_are_copied_first(strides, gpus):
    _, _, nccl, _ = gpus
    inputs = make_inputs("float16", seqlen_q=512, num_heads=4, num_heads_kv=4, head_dim=8)
    if strides == "broadcast":
        inputs = (*inputs[:3], np.ones_like(inputs[3]))

    def work(comm):
        q, k, v, do = shards(comm, inputs)
        if strides == "broadcast":
            do = np.broadcast_to(place(np.ones((), "float16")), do.shape).view(FakeArray)
        else:
            wide = place(np.zeros((*q.shape[:3], 16), "float16"))
            wide[..., ::2] = q
            q = wide[..., ::2]
        o, lse = dist.forward(comm, q, k, v, scheme="heads")
        out = tuple(place(np.zeros((*x.shape[:3], 16), "float16"))[..., ::2] for x in (q, k, v))
        return dist.backward(comm, q, k, v, o, lse, do, scheme="heads", out=out)

    dq, dk, dv = (together(parts, SIZE) for parts in zip(*run_all(nccl, work), strict=True))
    Expectation(*inputs).check(dq=dq, dk=dk, dv=dv)


@pytest.mark.parametrize("heads", [4, 1])
def test_arrays_over_the_scores_and_their_gradients(heads, gpus, monkeypatch):
    """The fake GPU has no kernels with a bias: in their place, one returns the bias as its gradient."""
    _, _, nccl, sharing = gpus
    inputs = make_inputs("float16", seqlen_q=64, num_heads=4, num_heads_kv=4, head_dim=16)
    bias = numbers((heads, 64, 64), "float16")
    found = {}

    def gradient(rank, out, bias) -> None:
        found[rank] = np.array(bias)
        out[...] = bias

    def backward(run, lane, inputs, delta, out, keywords) -> None:
        lane(gradient, run.rank, out[3], keywords["bias"])

    def work(comm):
        q, k, v, do = shards(comm, inputs)
        own = place(bias[:, dist.positions(comm, 64)])
        o, backprop = dist.attention(comm, q, k, v, bias=own, scheme="heads", return_dbias=True)
        np.testing.assert_array_equal(backprop(do)[3], own if heads > 1 else own * comm.size)

    monkeypatch.setattr(run_module.Run, "backward", backward)
    run_all(nccl, work)
    for rank in range(SIZE):
        np.testing.assert_array_equal(found[rank], bias[None, rank : rank + 1] if heads > 1 else bias[None])
    assert {kind for kind, _ in sharing.log} > {"copy by kernel"}
    assert {count for _, _, _, count, _, _ in nccl.log} <= set(range(8, 4096))  # no array is a message


def by_copies_of(sharing) -> set[str]:
    """Returns what was queued to write other ranks' memory; the kernel of copies packs messages, too."""
    return {kind for kind, _ in sharing.log} - {"copy by kernel"}


class TestMessages:
    """Calls that do not write each other's memory travel by NCCL."""

    def test_of_many_sequences(self, gpus):
        _, _, nccl, sharing = gpus
        inputs = make_inputs("float16", batch=65, seqlen_q=8, num_heads=4, num_heads_kv=4, head_dim=8)
        o = together(run_all(nccl, lambda comm: dist.forward(comm, *shards(comm, inputs)[:3], scheme="heads")[0]), SIZE)
        Expectation(*inputs).check(o=o)
        assert not by_copies_of(sharing)

    def test_of_large_biases(self, gpus, monkeypatch):
        """What ranks write for each other stays allocated. A rank gets 8 KiB of a bias, and as much of dbias."""
        _, _, nccl, _ = gpus
        inputs = make_inputs("float16", seqlen_q=64, num_heads=4, num_heads_kv=4, head_dim=16)
        monkeypatch.setattr(run_module.Run, "backward", lambda *_: None)

        def work(comm):
            q, k, v, do = shards(comm, inputs)
            biases = place(np.ones((4, 16, 64), "float16")), place(np.ones((16, 64), "float16"))
            sizes = []
            for limit, bias in itertools.product((8191, 16383, 16384), biases):
                barrier.wait(20)
                monkeypatch.setattr(groups_module, "_MOST_BYTES_OF_SCORES", limit)
                barrier.wait(20)
                _, backprop = dist.attention(comm, q, k, v, bias=bias, scheme="heads", return_dbias=True)
                sizes.append(comm.window_bytes)
                backprop(do)
                sizes.append(comm.window_bytes)
            return sizes

        barrier = threading.Barrier(SIZE)
        (sizes,) = set(map(tuple, run_all(nccl, work)))
        of_forward, of_backward = sizes[4], sizes[9]
        assert of_forward >= 8192 and of_forward + 8192 <= of_backward
        assert sizes == (*[0] * 4, *[of_forward] * 5, *[of_backward] * 3)

    def test_of_processes_that_cannot_share(self, gpus, caplog):
        _, _, nccl, sharing = gpus
        sharing.refusal = "no peer access"
        inputs = make_inputs("float16", seqlen_q=64, num_heads=4, num_heads_kv=4, head_dim=16)

        def work(comm):
            q, k, v, _ = shards(comm, inputs)
            assert comm.window_bytes == 0
            return dist.forward(comm, q, k, v, scheme="heads")[0]

        with caplog.at_level("INFO", "fa2cupy"):
            o = together(run_all(nccl, work), SIZE)
        Expectation(*inputs).check(o=o)
        assert (
            not by_copies_of(sharing)
            and "rank 0 cannot share memory with the others: RuntimeError: no peer" in caplog.text
        )

    def test_where_streams_cannot_wait(self, gpus, monkeypatch):
        _, _, nccl, sharing = gpus
        monkeypatch.setattr(sharing, "SUCCESS", IntEnum("Result", {"CUDA_ERROR_NOT_SUPPORTED": 801})(801))
        inputs = make_inputs("float16", seqlen_q=64, num_heads=4, num_heads_kv=4, head_dim=16)
        o = together(run_all(nccl, lambda comm: dist.forward(comm, *shards(comm, inputs)[:3], scheme="heads")[0]), SIZE)
        Expectation(*inputs).check(o=o)
        assert "copy" not in by_copies_of(sharing)

    def test_of_several_hosts(self, gpus, monkeypatch):
        _, _, nccl, sharing = gpus
        names = iter("abcd")
        monkeypatch.setattr(device_window, "_host", lambda: next(names))
        inputs = make_inputs("float16", seqlen_q=64, num_heads=4, num_heads_kv=4, head_dim=16)
        o = together(run_all(nccl, lambda comm: dist.forward(comm, *shards(comm, inputs)[:3], scheme="heads")[0]), SIZE)
        Expectation(*inputs).check(o=o)
        assert not by_copies_of(sharing) and not sharing.mapped


def test_no_memory_is_an_error_on_all_ranks(gpus, monkeypatch):
    _, cupy, nccl, sharing = gpus
    inputs = make_inputs("float16", seqlen_q=64, num_heads=4, num_heads_kv=4, head_dim=16)
    cupy.get_default_memory_pool = lambda: type("Pool", (), {"free_all_blocks": lambda self: None})()
    memory = cupy.cuda.Memory

    def work(comm):
        q, k, v, _ = shards(comm, inputs)
        dist.forward(comm, q, k, v, scheme="heads")
        if comm.rank == 2:
            ranks_without.append(True)
        long = [place(np.concatenate([x, x], axis=1)) for x in (q, k, v)]
        with pytest.raises(MemoryError, match="rank . cannot share memory with the others: MemoryError: full"):
            dist.forward(comm, *long, scheme="heads")
        with pytest.raises(dist.CommunicationError, match="an earlier call on this communicator failed: MemoryError"):
            dist.forward(comm, q, k, v, scheme="heads")

    def limited(nbytes):
        if ranks_without:
            raise MemoryError("full")
        return memory(nbytes)

    ranks_without: list[bool] = []
    monkeypatch.setattr(cupy.cuda, "Memory", limited)
    run_all(nccl, work)


def test_a_failure_ends_all_waits(gpus, monkeypatch):
    """Waits of calls that are queued already end before NCCL frees its memory; later calls raise the error."""
    _, _, nccl, sharing = gpus
    aborts = []
    monkeypatch.setattr(FakeCommunicator, "abort", lambda one: aborts.append(sharing.is_idle(10)))
    inputs = make_inputs("float16", seqlen_q=64, num_heads=4, num_heads_kv=4, head_dim=16)
    sharing.timeout = 30.0
    failed = threading.Barrier(SIZE)

    def work(comm):
        q, k, v, _ = shards(comm, inputs)
        dist.forward(comm, q, k, v, scheme="heads")
        failed.wait(20)
        if comm.rank == 0:
            ending = threading.Timer(0.3, comm.transport_of(q)._end, ("rank 0 has waited",))
            ending.start()
            start = time.monotonic()
            dist.forward(comm, q, k, v, scheme="heads")  # the others do not make this call
            assert 0.1 < time.monotonic() - start < 10
            with pytest.raises(dist.CommunicationError, match="has waited"):
                dist.forward(comm, q, k, v, scheme="heads")
            ending.join(20)

    run_all(nccl, work)
    assert aborts == [True] and not sharing.never


def test_a_late_rank_gets_no_results_of_one_that_has_failed(gpus):
    """The waits of a failed rank end, so that it sends results of rows that it has not received."""
    _, _, nccl, sharing = gpus
    inputs = [make_inputs("float16", seqlen_q=64, num_heads=4, num_heads_kv=4, head_dim=16, seed=n) for n in range(2)]
    sharing.timeout = 30.0
    late, ended = threading.Event(), []

    def work(comm):
        q, k, v, _ = shards(comm, inputs[0])
        dist.forward(comm, q, k, v, scheme="heads")
        transport = comm.transport_of(q)
        q, k, v, _ = shards(comm, inputs[1])
        if comm.rank == 0:
            ending = threading.Timer(0.2, transport._end, ("rank 0 has waited",))
            ending.start()
            dist.forward(comm, q, k, v, scheme="heads")
            ending.join(20)
            late.set()
            return

        def end():
            ended.append((comm.rank, 0 in transport._window.failed()))
            with pytest.raises(dist.CommunicationError, match=r"cannot go on: ranks \[0.*\] have failed"):
                transport._check_calls([])
            transport.end("another rank has failed")

        assert late.wait(20)
        ending = threading.Timer(0.5, end)
        ending.start()
        dist.forward(comm, q, k, v, scheme="heads")
        assert (comm.rank, True) in ended, "results have come before the communicator has failed"
        with pytest.raises(dist.CommunicationError, match="another rank has failed"):
            dist.forward(comm, q, k, v, scheme="heads")

    run_all(nccl, work)
    assert not sharing.never


def test_ranks_that_make_different_calls_wait(gpus):
    """Ranks wait until the time is up: none takes the rows of another call for its own."""
    _, _, nccl, sharing = gpus
    inputs = make_inputs("float16", seqlen_q=64, num_heads=4, num_heads_kv=4, head_dim=16)

    def work(comm):
        q, k, v, _ = shards(comm, inputs)
        for softcap in (1.0, 2.0):  # all ranks agree on each
            dist.forward(comm, q, k, v, scheme="heads", softcap=softcap)
        assert not sharing.never
        together_.wait(20)
        sharing.timeout = 0.2
        together_.wait(20)
        dist.forward(comm, q, k, v, scheme="heads", softcap=1.0 if comm.rank == 3 else 2.0)

    together_ = threading.Barrier(SIZE)
    run_all(nccl, work)
    assert len(sharing.never) >= SIZE  # on every rank


class TestGraphs:
    @pytest.fixture
    def captured(self, monkeypatch):
        """Provides what says whether a graph captures calls."""
        state = [False]
        for module in (resources, api):
            monkeypatch.setattr(module, "is_captured", lambda array: state[0])
        return state

    def test_repeat_copies(self, gpus, captured):
        """A captured call has the signals of any call of its kind, and the window's memory is kept when it grows."""
        _, _, nccl, sharing = gpus
        inputs = {n: make_inputs("float16", seqlen_q=n, num_heads=4, num_heads_kv=4, head_dim=16) for n in (64, 128)}
        barrier = threading.Barrier(SIZE)

        def work(comm):
            q, k, v, _ = shards(comm, inputs[64])
            plain, _ = dist.forward(comm, q, k, v, scheme="heads")
            barrier.wait(20)
            captured[0] = True
            barrier.wait(20)
            copies = len(sharing.log)
            found, _ = dist.forward(comm, q, k, v, scheme="heads")
            assert len(sharing.log) > copies
            np.testing.assert_array_equal(found, plain)
            window = comm.transport_of(q).window(True)
            assert window._last is not None and not window._unfinished[1:]
            data = window._data
            barrier.wait(20)
            captured[0] = False
            barrier.wait(20)
            dist.forward(comm, *shards(comm, inputs[128])[:3], scheme="heads")
            assert window._kept == [data] and data.pointers and window._data is not data

        run_all(nccl, work)
        assert len(sharing.mapped) == 3 * SIZE  # signals, and two windows of each rank

    def test_of_calls_that_were_not_made_before_are_refused(self, gpus, captured):
        _, _, nccl, sharing = gpus
        inputs = {n: make_inputs("float16", seqlen_q=n, num_heads=4, num_heads_kv=4, head_dim=16) for n in (64, 128)}
        barrier = threading.Barrier(SIZE)

        def work(comm):
            dist.forward(comm, *shards(comm, inputs[64])[:3], scheme="heads")
            barrier.wait(20)
            captured[0] = True
            barrier.wait(20)
            with pytest.raises(RuntimeError, match="captures a call of a kind that has not been made; make it once"):
                dist.forward(comm, *shards(comm, inputs[128])[:3], scheme="heads")

        run_all(nccl, work)

    def test_before_there_are_windows_send_messages(self, gpus, captured):
        _, _, nccl, sharing = gpus
        captured[0] = True
        inputs = make_inputs("float16", seqlen_q=64, num_heads=4, num_heads_kv=4, head_dim=16)
        o = together(run_all(nccl, lambda comm: dist.forward(comm, *shards(comm, inputs)[:3], scheme="heads")[0]), SIZE)
        Expectation(*inputs).check(o=o)
        assert not by_copies_of(sharing)
