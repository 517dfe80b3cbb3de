"""Slow lanes on memory that is NaN until it is written, so that a missing wait shows in the results."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from support import ranks
from support.feature_cases import numbers

import fa2cupy
import fa2cupy.distributed as dist
from fa2cupy.distributed.call import groups as groups_module
from fa2cupy.distributed.call import run as run_module
from fa2cupy.distributed.local.lanes import Lane
from fa2cupy.distributed.movers import resources
from fa2cupy.distributed.schemes import gather_calls
from fa2cupy.testing import make_inputs

#: "copies" stands for ranks that write each other's memory.
SCHEMES = ("heads", "heads copies", "gather", "gather copies", "hybrid")


def windows_of(scheme: str, monkeypatch, window: type = ranks.ThreadWindow):
    """Returns the context of a scheme's calls."""
    return ranks.thread_windows(monkeypatch, window) if "copies" in scheme else contextlib.nullcontext()


def named(scheme: str) -> str:
    """Returns the scheme's name in the package."""
    return scheme.removesuffix(" copies")


def case(size: int, ratio: int = 1) -> tuple[tuple, dict, dict]:
    """Returns inputs, options and head groups of a call with several groups of heads."""
    heads = 4 * size
    inputs = make_inputs("float32", seqlen_q=8 * size, num_heads=ratio * heads, num_heads_kv=heads, head_dim=4)
    groups = {"heads": 4, "heads copies": 4, "gather": 4, "gather copies": 4, "hybrid": 2}
    return inputs, {"causal": True}, {name: {"head_groups": count} for name, count in groups.items()}


def check(scheme: str, seed: int, size: int, inputs: tuple, options: dict, groups: dict, monkeypatch) -> None:
    """Compares results of slow lanes (with windows if the scheme has them) with those of messages without delays."""
    how = {"scheme": named(scheme), **groups}
    expected = ranks.on_ranks(size, inputs, how=how, **options)
    with windows_of(scheme, monkeypatch), ranks.slow_lanes(monkeypatch, ranks.random_delays(0.002, seed)):
        found = ranks.on_ranks(size, inputs, how=how, **options)
    for name, result in found.items():
        np.testing.assert_array_equal(result, expected[name], err_msg=name)


@pytest.mark.sample(seed=(0,), size=(4,))
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", [2, 4, 5])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_order_of_events_changes_a_bit(scheme, size, seed, monkeypatch):
    inputs, options, groups = case(size)
    check(scheme, seed, size, inputs, options, groups[scheme], monkeypatch)


@pytest.mark.sample(seed=(0,))
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("scheme", ["heads copies", "gather copies"])
def test_nor_with_groups_of_several_sizes(scheme, ratio, seed, monkeypatch):
    inputs, options, _ = case(2, ratio)
    monkeypatch.setattr(groups_module, "_FEW_ROWS", 0)
    monkeypatch.setattr(groups_module, "_LEAST_ROWS", 1)
    monkeypatch.setattr(groups_module, "_LONG_KERNELS", 1 << 40)
    check(scheme, seed, 2, inputs, options, {}, monkeypatch)


@pytest.mark.sample(seed=(0,))
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("scheme", ["gather", "gather copies", "hybrid"])
def test_nor_where_calls_take_turns(scheme, seed, monkeypatch):
    inputs, options, groups = case(4)
    monkeypatch.setattr(gather_calls, "_UNCACHED_ROWS", 1)
    check(scheme, seed, 4, inputs, options, groups[scheme], monkeypatch)


@pytest.mark.parametrize(("uncached_rows", "expected"), [(8, [(True, 4), (True, 16)]), (9, [(True, 16), (False, 4)])])
def test_long_backward_calls_take_turns(uncached_rows, expected, monkeypatch):
    """Each chunk has 4 rows of 2 heads. The first rank has the first chunk, which sees 4 keys, and the last: all 16."""
    found = []

    def backward(run, lane, inputs, delta, out, keywords) -> None:
        if run.rank == 0:
            found.append((lane is run.main, inputs[1].shape[1]))
        of_package(run, lane, inputs, delta, out, keywords)

    of_package = run_module.Run.backward
    monkeypatch.setattr(run_module.Run, "backward", backward)
    monkeypatch.setattr(gather_calls, "_UNCACHED_ROWS", uncached_rows)
    inputs = make_inputs("float32", seqlen_q=16, num_heads=2, num_heads_kv=1, head_dim=4)
    with ranks.slow_lanes(monkeypatch, ranks.random_delays(0.0, 0)):
        ranks.on_ranks(2, inputs, how={"scheme": "gather"}, causal=True)
    assert found == expected


@pytest.mark.sample(seed=(0,), size=(2,))
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("scheme", ["heads", "heads copies"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_nor_in_second_order(with_bias, scheme, size, seed, monkeypatch):
    rows = 8 * size
    arrays = make_inputs("float32", seqlen_q=rows, num_heads=4 * size, head_dim=4)
    biases = [numbers((1, 4 * size, rows, rows), "float32", number) for number in range(2)]

    def work(comm) -> list:
        q, k, v, do = (dist.shard(comm, x) for x in arrays)
        bias, tangent = (dist.shard(comm, x, axis=-2) for x in biases)
        options = {"causal": True, **({"bias": bias} if with_bias else {"head_groups": 4})}
        of_bias = {"bias_tangent": tangent} if with_bias else {}
        back, of_gradient = ({"return_dbias": True}, {"gdbias": tangent}) if with_bias else ({}, {})
        o, lse, ot, lset = dist.jvp(comm, q, k, v, v, q, None, **options, **of_bias)
        found = dist.backward_jvp(comm, q, k, v, o, lse, do, v, q, None, ot, lset, o, **options, **back, **of_bias)
        found += dist.double_backward(comm, q, k, v, o, lse, do, v, q, None, dlse=lse, **options, **back, **of_gradient)
        return [ot, lset, *found]

    expected = dist.simulate(size, work)
    with windows_of(scheme, monkeypatch), ranks.slow_lanes(monkeypatch, ranks.random_delays(0.002, seed)):
        found = dist.simulate(size, work, timeout=20)
    for one, other in zip(found, expected, strict=True):
        for result, wanted in zip(one, other, strict=True):
            np.testing.assert_array_equal(result, wanted)


@pytest.mark.sample(seed=(0,))
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("scheme", ["heads", "gather", "gather copies", "hybrid"])
def test_nor_with_features_and_their_gradients(scheme, seed, monkeypatch):
    inputs = make_inputs("float32", seqlen_q=16, num_heads=4, num_heads_kv=2, head_dim=4)
    options = {
        "causal": True,
        "window": (5, 0),
        "bias": numbers((4, 16, 16), "float32"),
        "mask": np.tri(16, dtype=bool),
        "sink": numbers((4,), "float32"),
        "dlse": numbers((1, 4, 16), "float32"),
        "dropout_p": 0.2,
        "seed": 3,
    }
    check(scheme, seed, 2, inputs, options, {}, monkeypatch)


class PickyLane(ranks.SlowLane):
    """A lane that notes where the package makes it wait, and leaves out one of these waits."""

    seen: ClassVar[set[str]] = set()
    left_out: ClassVar[str | None] = None

    def wait(self, mark) -> None:
        frame = sys._getframe(1)
        if frame.f_code is Lane.wait_for.__code__:
            frame = frame.f_back
        site = place_of(frame)
        if "windows" in frame.f_code.co_filename:  # the call before has ended here: see TestFollowingCalls
            super().wait(mark)
            return
        self.seen.add(site)
        if site != self.left_out:
            super().wait(mark)


class PickyWindow(ranks.ThreadWindow):
    """A window that notes where the package waits for signals, and leaves out one of these waits."""

    def wait(self, lane, kind, step=0) -> None:
        site = place_of(sys._getframe(1))
        PickyLane.seen.add(site)
        if site != PickyLane.left_out:
            super().wait(lane, kind, step)


def place_of(frame) -> str:
    """Returns the lines of a wait, the scheme's own included: all schemes share the lines of the movers."""
    file = Path(frame.f_code.co_filename)
    place = f"{file.stem}.{frame.f_code.co_name}, line {frame.f_lineno}"
    return f"{place}, for {place_of(frame.f_back)}" if file.parent.name == "movers" else place


def one_slow_lane(slow: int, late_rank: int | None, delay: float) -> Callable[[int, int], Callable[[], float]]:
    """Returns delays that make one lane late with each of its calls, on all ranks or on one."""

    def of_lane(rank: int, number: int) -> Callable[[], float]:
        return lambda: delay if number == slow and late_rank in (None, rank) else 0.0

    return of_lane


class LateInputs:
    """A call whose inputs are written on the caller's lane, as if by kernels that were queued before."""

    def __init__(self, size: int, how: dict, **options):
        self.size, self.how, self.options = size, how, options
        self.scheme = how["scheme"]
        heads = options.pop("heads", 4 * size)
        kv = options.pop("kv", heads)
        self.inputs = make_inputs("float32", seqlen_q=8 * size, num_heads=heads, num_heads_kv=kv, head_dim=4)
        self.expected = self.run()

    def run(self) -> list[list[np.ndarray]]:
        """Returns the results of the forward and the backward by rank."""
        in_host = ranks.ranks_per_host(self.size)
        with pytest.MonkeyPatch.context() as patch, windows_of(self.scheme, patch, PickyWindow):
            return dist.simulate(self.size, self._work, ranks_per_host=in_host, timeout=20)

    def _work(self, comm) -> list[np.ndarray]:
        q, k, v, do = (dist.shard(comm, x) for x in self.inputs)
        options = self.options | self.how | {"scheme": named(self.scheme)}
        if "bias" in options and options["bias"].ndim > 1:
            options["bias"] = dist.shard(comm, options["bias"], axis=-2)
        extra = {"return_dbias": True} if "bias" in options else {}
        o, lse = self._late(comm, dist.forward, (q, k, v), (q, q[..., 0].swapaxes(1, 2)), options)
        like = (q, k, v, *([options["bias"]] if extra else []))
        return [o, lse, *self._late(comm, dist.backward, (q, k, v, o, lse, do), like, options | extra)]

    @staticmethod
    def _late(comm, call, arrays, like, options) -> tuple[np.ndarray, ...]:
        given = [ranks.poisoned(x.shape, x.dtype) for x in arrays]
        out = tuple(ranks.poisoned(x.shape, x.dtype) for x in like)

        def write() -> None:
            for target, source in zip(given, arrays, strict=True):
                target[...] = source

        first_work.queued[comm.rank] = write
        return call(comm, *given, out=out, **options)


class first_work:
    """The work that is queued on the caller's lane of each rank before a call."""

    queued: ClassVar[dict[int, Callable[[], None]]] = {}


def lanes_with_first_work(lane: type, delays) -> Callable[[int], tuple]:
    def lanes(rank: int) -> tuple:
        made = tuple(lane(delays(rank, number), number == 0) for number in range(ranks.LANES))
        made[0](first_work.queued.pop(rank))
        return made

    return lanes


class immediate_first_work:
    """Lanes that do their work at once, with the same first work."""

    def __call__(self, rank: int) -> tuple:
        lanes = HOST_LANES(rank)
        lanes[0](first_work.queued.pop(rank))
        return lanes


HOST_LANES = resources.host_lanes
CASES = {
    "heads": {"how": {"scheme": "heads", "head_groups": 4}},
    "heads copies": {"how": {"scheme": "heads copies", "head_groups": 4}},
    "heads copies of query heads": {"how": {"scheme": "heads copies"}, "heads": 16, "kv": 4},
    "heads bias": {"how": {"scheme": "heads"}, "bias": numbers((32, 32), "float32")},
    "gather": {"how": {"scheme": "gather", "head_groups": 4}, "heads": 4},
    "gather window": {"how": {"scheme": "gather"}, "heads": 2, "window": (3, 0)},
    "gather copies": {"how": {"scheme": "gather copies", "head_groups": 4}, "heads": 4},
    "gather copies window": {"how": {"scheme": "gather copies"}, "heads": 2, "window": (3, 0)},
    "gather bias": {"how": {"scheme": "gather"}, "heads": 2, "bias": numbers((1, 1, 32, 32), "float32")},
    "gather bias of keys": {"how": {"scheme": "gather"}, "heads": 2, "bias": numbers((32,), "float32")},
    "hybrid": {"how": {"scheme": "hybrid", "head_groups": 4}, "heads": 8},
}


@pytest.mark.matrix
def test_every_wait_that_is_left_out_is_caught(monkeypatch):
    """Without any one of the waits, the results of a scheme are wrong in at least one order of events."""
    monkeypatch.setattr(resources, "host_memory", ranks.poisoned)
    monkeypatch.setattr(PickyLane, "seen", set())
    monkeypatch.setattr(resources, "host_lanes", immediate_first_work())
    monkeypatch.setattr(groups_module, "_FEW_ROWS", 0)
    monkeypatch.setattr(groups_module, "_LEAST_ROWS", 1)
    cases = [LateInputs(4, causal=True, **options) for options in CASES.values()]
    orders = [(slow, late) for late in (None, 0, 2) for slow in range(ranks.LANES)]

    def is_right(call: LateInputs, order: tuple, delay: float) -> bool:
        monkeypatch.setattr(resources, "host_lanes", lanes_with_first_work(PickyLane, one_slow_lane(*order, delay)))
        try:
            found = call.run()
        except dist.CommunicationError:  # messages of two calls were mixed up
            return False
        return all(
            np.array_equal(one, other)
            for mine, theirs in zip(found, call.expected, strict=True)
            for one, other in zip(mine, theirs, strict=True)
        )

    def is_caught(call: LateInputs, site: str, delay: float) -> bool:
        monkeypatch.setattr(PickyLane, "left_out", site)
        return not all(is_right(call, order, delay) for order in orders)

    caught: set[str] = set()
    for call in cases:
        monkeypatch.setattr(PickyLane, "left_out", None)
        assert all(is_right(call, order, 0.004) for order in orders[: ranks.LANES])
        caught |= {site for site in sorted(PickyLane.seen - caught) if is_caught(call, site, 0.004)}
    # A busy machine delays all lanes: waits whose absence was not noticed are tried again with longer delays.
    caught |= {site for site in PickyLane.seen - caught if any(is_caught(call, site, 0.03) for call in cases)}
    assert len(caught) > 15
    assert sorted(PickyLane.seen - caught) == []


class LaneWithoutEnd(ranks.SlowLane):
    """A lane that the host does not wait for, as on a GPU."""

    ends: ClassVar[list[ranks.Mark]] = []

    def join(self) -> None:
        self.ends.append(self.record())
        self._queue.put(None)


class ImpatientWindow(ranks.ThreadWindow):
    """A window that gives up soon: without a wait, signals of two calls may be mixed up and never come."""

    timeout = 3.0


class WithoutReady(ImpatientWindow):
    """A window that is written while another rank may still read it."""

    def enter(self, lane) -> None:
        """Waits for no rank."""


class WithoutLast(ImpatientWindow):
    """A window of a call that does not wait for the one before it."""

    def begin(self, lane, nbytes, *call) -> None:
        if nbytes <= self.nbytes:
            self._last = None
        super().begin(lane, nbytes, *call)


class WithoutLanes(ImpatientWindow):
    """A window that is released while kernels of other lanes still read keys there."""

    def end(self, lane, *others) -> None:
        super().end(lane)


class TestFollowingCalls:
    """Calls on several of the caller's streams. The host waits for none of them."""

    def are_right(self, monkeypatch, window: type, seed: int, scheme: str = "heads") -> bool:
        # Where one length has a result in the window, the other has an input. The first call sets the window's size.
        sizes = {"num_heads": 8, "num_heads_kv": 4, "head_dim": 4}
        calls = [make_inputs("float32", seqlen_q=rows, **sizes, seed=n) for n, rows in enumerate((64, 32, 64, 32, 64))]
        how = {"causal": True, "scheme": scheme, "head_groups": 2}

        def work(comm) -> list[tuple]:
            results = []
            for inputs in calls:
                q, k, v = (dist.shard(comm, x) for x in inputs[:3])
                out = ranks.poisoned(q.shape, q.dtype), ranks.poisoned((1, 8, q.shape[1]), q.dtype)
                results.append(dist.forward(comm, q, k, v, out=out, **how))
            return results

        expected = dist.simulate(2, work)
        monkeypatch.setattr(LaneWithoutEnd, "ends", [])
        delays = ranks.random_delays(0.004, seed)
        with ranks.thread_windows(monkeypatch, window), ranks.slow_lanes(monkeypatch, delays, LaneWithoutEnd):
            found = dist.simulate(2, work)
            assert all(end.wait(20) for end in LaneWithoutEnd.ends)
        return all(
            np.array_equal(one, other)
            for mine, theirs in zip(found, expected, strict=True)
            for pair in zip(mine, theirs, strict=True)
            for one, other in zip(*pair, strict=True)
        )

    @pytest.mark.sample(seed=(0,))
    @pytest.mark.parametrize("scheme", ["heads", "gather"])
    @pytest.mark.parametrize("seed", range(4))
    def test_share_the_window(self, seed, scheme, monkeypatch):
        assert self.are_right(monkeypatch, ranks.ThreadWindow, seed, scheme)

    @pytest.mark.parametrize(
        ("window", "scheme"), [(WithoutReady, "heads"), (WithoutLast, "heads"), (WithoutLanes, "gather")]
    )
    def test_must_wait_for_each_other(self, window, scheme, monkeypatch):
        assert not all(self.are_right(monkeypatch, window, seed, scheme) for seed in range(12))
        assert self.are_right(monkeypatch, ImpatientWindow, 0, scheme)  # impatience alone does not make them wrong


class Pool:
    """CuPy's pool in miniature: memory that is freed is handed out at once, to the stream that it was allocated on.

    A call of the package frees its workspaces when it returns, before its kernels have ended.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._free: dict[object, list[np.ndarray]] = {}

    def take(self, stream: object, nbytes: int) -> np.ndarray:
        with self._lock:
            fitting = [block for block in self._free.setdefault(stream, []) if len(block) >= nbytes]
            if not fitting:
                return np.full(nbytes, 0xFF, np.uint8)
            block = min(fitting, key=len)
            self._free[stream] = [one for one in self._free[stream] if one is not block]
            return block

    def give(self, stream: object, block: np.ndarray) -> None:
        with self._lock:
            self._free[stream].append(block)


@pytest.mark.parametrize("arena", ["of its own", "the caller's stream"])
def test_memory_of_other_lanes_does_not_come_from_the_callers_stream(arena, monkeypatch):
    """A call's memory is not the caller's: workspaces of running kernels would go to a lane that does not wait."""
    inputs = make_inputs("float64", seqlen_q=64, num_heads=8, num_heads_kv=8, head_dim=8)
    how = {"scheme": "gather", "head_groups": 4}
    expected = ranks.on_ranks(4, inputs, causal=True, how=how)
    pool = Pool()
    backward = fa2cupy.cpu.calls.backward

    class LaneWithWorkspaces(ranks.SlowLane):
        def __call__(self, function, *args) -> None:
            if function is not backward:
                return super().__call__(function, *args)
            stream = "caller" if self._is_main else self
            nbytes = 2 * args[0].nbytes
            workspace = pool.take((threading.get_ident(), stream), nbytes)
            pool.give((threading.get_ident(), stream), workspace)  # on return, before the kernel runs

            def kernel() -> None:
                workspace[...] = 0xFF
                function(*args)
                workspace[...] = 0xFF

            return super().__call__(kernel)

    def from_pool(shape, dtype) -> np.ndarray:
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        key = (threading.get_ident(), "arena" if arena == "of its own" else "caller")
        array = pool.take(key, nbytes)[:nbytes].view(dtype).reshape(shape)
        array.reshape(-1).view(np.uint8)[...] = 0xFF
        return array

    wrong = []
    for seed in range(3):
        with ranks.slow_lanes(monkeypatch, ranks.random_delays(0.001, seed), LaneWithWorkspaces):
            monkeypatch.setattr(resources, "host_memory", from_pool)
            found = ranks.on_ranks(4, inputs, causal=True, how=how)
        wrong += [name for name in found if not np.array_equal(found[name], expected[name])]
    assert bool(wrong) is (arena == "the caller's stream"), wrong
