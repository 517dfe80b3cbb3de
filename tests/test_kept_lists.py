"""The lists of sparse maps: who writes them, who keeps them, and which stream waits for them."""

from __future__ import annotations

import threading
import types

import numpy as np
import pytest

pytest.importorskip("cupy")

from support.fake_cupy import FakeEvent, place
from support.fake_gpu import fake_gpu

from fa2cupy import BlockMask
from fa2cupy.gpu import kept_lists
from fa2cupy.gpu.kept_lists import KeptLists
from fa2cupy.problem import block_mask

STREAM = 32


class Lists:
    """A call with lists of two sides; `written` has the addresses that each of its two kernels got, and the stream."""

    def __init__(self, constants: bytes = b"") -> None:
        self.written: list[tuple[list[int], int]] = []
        stages = [types.SimpleNamespace(spec=side, constants=constants) for side in ("queries", "keys")]
        launch = lambda addresses, stream: self.written.append((addresses, stream))  # noqa: E731
        self._lists = KeptLists(stages, [launch, launch], {"key_lists": 100, "query_lists": 30}, num_addresses=6)

    def call(self, sparse: BlockMask, stream: int = STREAM) -> tuple[list[int], object]:
        """Returns the addresses of a call with the arguments 1 and 2, and the memory of its lists."""
        kept_lists.cupy.stream = stream
        addresses = [1, 2]
        memory = self._lists.add_to(addresses, stream, sparse)
        return addresses, memory


@pytest.fixture
def sparse(monkeypatch):
    with fake_gpu(monkeypatch):
        yield BlockMask(place(np.ones((2, 2), bool)), 256, 256)


def test_the_first_call_writes_and_later_ones_read(sparse):
    lists = Lists()
    addresses, memory = lists.call(sparse)
    assert addresses == [1, 2, memory.ptr, memory.ptr + 512]
    assert lists.written == [([*addresses, 0, 0], STREAM)] * 2
    for stream in (STREAM, STREAM + 16):
        assert lists.call(sparse, stream) == (addresses, memory)
    again = Lists()
    assert again.call(sparse) == (addresses, memory), "another call with the same lists"
    assert len(lists.written + again.written) == 2
    assert kept_lists.cupy.workspaces == [("pool", 1024, 0)]


def test_other_lists_and_other_maps_are_written_anew(sparse):
    lists, others = Lists(), Lists(b"a window")
    other = BlockMask(place(np.ones((2, 2), bool)), 256, 256)
    found = [lists.call(sparse), others.call(sparse), lists.call(other)]
    assert len({memory.ptr for _, memory in found}) == 3
    assert (len(lists.written), len(others.written)) == (4, 2)
    assert lists.call(sparse) == found[0] and others.call(sparse) == found[1]


def test_streams_wait_until_lists_are_complete(sparse, monkeypatch):
    lists = Lists()
    monkeypatch.setattr(FakeEvent, "done", False)
    for number in range(3):
        lists.call(sparse, STREAM + 16 * number)
        assert len(kept_lists.cupy.waited) == number + 1
    monkeypatch.setattr(FakeEvent, "done", True)
    lists.call(sparse)
    monkeypatch.setattr(FakeEvent, "done", property(lambda self: pytest.fail("complete lists need no event")))
    lists.call(sparse)
    assert len(kept_lists.cupy.waited) == 3
    assert len(lists.written) == 2


def test_a_captured_call_writes_its_own_lists(sparse, monkeypatch):
    """Checks calls before others, while kernels of others write, and after they have ended."""
    lists = Lists()
    kept_lists.cupy.capturing.add(STREAM)
    assert lists.call(sparse)[1].ptr != lists.call(sparse)[1].ptr
    assert not sparse.kept
    monkeypatch.setattr(FakeEvent, "done", False)
    _, memory = lists.call(sparse, STREAM + 16)
    assert lists.call(sparse)[1] is not memory
    assert len(lists.written) == 8
    assert [allocator for allocator, *_ in kept_lists.cupy.workspaces] == ["graph", "graph", "pool", "graph"]
    assert len(kept_lists.cupy.waited) == 1, "a capture cannot wait for what is outside"
    monkeypatch.setattr(FakeEvent, "done", True)
    assert lists.call(sparse, STREAM + 16)[1] is memory
    assert lists.call(sparse)[1] is memory
    assert len(lists.written) == 8


@pytest.mark.parametrize("captured", [False, True])
def test_maps_that_a_graph_writes_keep_nothing(sparse, monkeypatch, captured):
    monkeypatch.setattr(block_mask, "is_captured", lambda array: captured)
    own, lists = BlockMask(place(np.ones((2, 2), bool)), 256, 256), Lists()
    for _ in range(2):
        lists.call(own)
    assert len(lists.written) == (4 if captured else 2)
    assert own.kept is None if captured else len(own.kept) == 1


@pytest.mark.parametrize(("stream", "captures"), [(0, True), (1, True), (STREAM, True), (STREAM, False)])
def test_what_is_captured(monkeypatch, stream, captures):
    """Checks that streams that no graph can capture are not asked."""
    current = types.SimpleNamespace(ptr=stream, is_capturing=lambda: captures if stream > 1 else pytest.fail("asked"))
    cuda = types.SimpleNamespace(get_current_stream=lambda: current)
    monkeypatch.setitem(block_mask.sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    array = types.SimpleNamespace(device=threading.Lock())  # a context
    assert block_mask.is_captured(array) is (captures and stream == STREAM)


def test_threads_write_lists_once(sparse, monkeypatch):
    lists, barrier = Lists(), threading.Barrier(8)
    found = []

    def call() -> None:
        barrier.wait()
        found.append(lists.call(sparse)[1].ptr)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found) == 8
    assert len(lists.written) == 2
