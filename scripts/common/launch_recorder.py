"""What the ranks of a program queue, as entries that a later run can be compared with: see ``recorded_cupy.py``."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Address", "Recorder", "Word"]

_ALIGNMENT = 512
#: Sections of a record: kernels and other writes, copies and messages, and what orders them.
_SECTIONS = {
    "launches": ("launch", "compute", "clear", "upload"),
    "moves": ("copy", "send", "recv"),
    "order": ("signal", "await", "wait"),
}


class Address(int):
    """An address in an entry: a record has the array that it belongs to."""


class Word(int):
    """The address of a signal in an entry."""


class _Block:
    """An allocation."""

    def __init__(self, nbytes: int, owner: int, kind: str, is_divided: bool):
        memory = np.zeros(nbytes + _ALIGNMENT, np.uint8)  # takes no memory until it is written
        offset = -memory.ctypes.data % _ALIGNMENT
        self.bytes = memory[offset : offset + nbytes]
        self.start, self.nbytes = memory.ctypes.data + offset, max(nbytes, 1)
        self.owner, self.kind = owner, kind
        self.name: str | None = None
        #: Where the arrays begin that a program makes of it.
        self.parts: list[int] | None = [] if is_divided else None

    def part(self, address: int) -> int:
        """The beginning of the array that an address belongs to; the address itself if that is not known."""
        if self.parts is None:
            return self.start
        index = bisect.bisect_right(self.parts, address) - 1
        return self.parts[index] if index >= 0 else address


class _Entry(NamedTuple):
    kind: str
    stream: Any
    fields: dict[str, Any]


class Recorder:
    """What each rank, a thread, has queued.

    Attributes
    ----------
    kernels : dict
        A digest of the source of each kernel by its name.
    maps : list of dict
        Layouts of tensor maps.
    streams : dict
        All streams by address.
    capturing : set of int
        Addresses of the streams that a graph captures.
    shares_memory : bool
        False if ranks cannot write each other's memory, so that all messages travel by NCCL.
    """

    def __init__(self) -> None:
        self.kernels: dict[str, str] = {}
        self.maps: list[dict[str, Any]] = []
        self.streams: dict[int, Any] = {}
        self.capturing: set[int] = set()
        self.shares_memory = True
        self._local, self._lock = threading.local(), threading.Lock()
        self._starts: list[int] = []
        self._blocks: dict[int, _Block] = {}
        self._entries: dict[int, list[_Entry]] = {}

    # -- for scripts

    @contextlib.contextmanager
    def rank(self, number: int, device: int = 0) -> Iterator[None]:
        """Notes what this thread queues as the work of a rank, on a stream of its own."""
        self._local.__dict__.clear()
        self._local.__dict__.update(rank=number, devices=[device])
        self.forget()
        try:
            yield
        finally:
            self._local.__dict__.clear()

    def forget(self) -> None:
        """Begins the record of this thread's rank."""
        self._entries[self._local.rank] = []

    def release(self) -> None:
        """Ends the records so far. From now on their addresses may be those of other memory."""
        with self._lock:
            self._blocks = {start: block for start, block in self._blocks.items() if block.parts is not None}
            self._starts = sorted(self._blocks)

    def name(self, name: str, address: int) -> None:
        """Lets a name stand for an allocation in records."""
        block = self.block_at(address)
        if block is not None and block.name is None and block.parts is None:
            block.name = name

    def record(self, rank: int) -> dict[str, dict[str, list]]:
        """The entries of a rank by section and stream. Memory without a name is numbered in their order."""
        entries, names = self._entries[rank], _Names(self, rank)
        queued_on = {entry.stream.ptr: entry.stream for entry in entries}
        streams: dict[int, str] = {}
        for priority, used in itertools.groupby(
            sorted(queued_on.values(), key=lambda one: (one.priority, one.ptr)), lambda one: one.priority
        ):
            streams |= {one.ptr: one.role or f"priority {priority}, {number}" for number, one in enumerate(used)}
        found: dict[str, dict[str, list]] = {}
        for section, kinds in _SECTIONS.items():
            for stream, name in sorted(streams.items(), key=lambda pair: pair[1]):
                own = [one for one in entries if one.stream.ptr == stream and one.kind in kinds]
                if own:
                    found.setdefault(section, {})[name] = [names.entry(one, streams) for one in own]
        return found

    # -- for stand-ins

    def note(self, kind: str, stream: Any, **fields: Any) -> None:
        """Notes what is queued on a stream."""
        entries = self._entries.get(self._rank)
        if entries is not None:
            entries.append(_Entry(kind, stream, fields))

    def queued(self, stream: Any) -> int:
        """The number of kernels, copies and messages that a stream has been given."""
        entries = self._entries.get(self._rank, [])
        return sum(one.stream is stream and one.kind not in _SECTIONS["order"] for one in entries)

    def allocate(self, nbytes: int, is_divided: bool = False) -> _Block:
        """New memory; `is_divided` if the program makes several arrays of it."""
        block = _Block(nbytes, self._rank, self.stacks("kinds", "memory")[-1], is_divided)
        with self._lock:
            bisect.insort(self._starts, block.start)
            self._blocks[block.start] = block  # until `release`: no address stands for two blocks
        return block

    def divide(self, address: int) -> None:
        """Notes that an array begins at an address."""
        block = self.block_at(address)
        if block is not None and block.parts is not None and address not in block.parts:
            with self._lock:
                bisect.insort(block.parts, address)

    def block_at(self, address: int) -> _Block | None:
        """The allocation with an address."""
        with self._lock:
            index = bisect.bisect_right(self._starts, address) - 1
            block = self._blocks[self._starts[index]] if index >= 0 else None
        return block if block is not None and address < block.start + block.nbytes else None

    def stacks(self, name: str, first: Any = None) -> list[Any]:
        """A stack of this thread: "devices", "streams" or "kinds" of memory. The current one comes last."""
        return self._local.__dict__.setdefault(name, [first])

    @property
    def _rank(self) -> int:
        return self._local.__dict__.get("rank", -1)


class _Names:
    """Replaces addresses in the entries of a rank."""

    def __init__(self, recorder: Recorder, rank: int):
        self._recorder, self._rank = recorder, rank
        self._numbers: dict[int, int] = {}

    def entry(self, entry: _Entry, streams: dict[int, str]) -> dict[str, Any]:
        fields = entry.fields
        if entry.kind == "wait":
            return {"wait": streams.get(fields["of"], "a stream without work"), "after": fields["after"]}
        return {entry.kind: self._text(fields)}

    def _text(self, value: Any) -> Any:
        if isinstance(value, Address):
            return self._place(value)
        if isinstance(value, Word):
            block = self._recorder.block_at(value)
            assert block is not None
            return f"rank {block.owner}, word {(value - block.start) // 4}"
        if isinstance(value, dict):
            return {key: self._text(one) for key, one in value.items()}
        return [self._text(one) for one in value] if isinstance(value, list | tuple) else value

    def _place(self, address: int) -> str | None:
        block = self._recorder.block_at(address)
        if block is None:
            return "unknown" if address else None
        if block.parts == []:
            return "counters"  # of no rank: those of this process are not separate processes
        begin = block.part(address)
        name = block.name
        if name is None:
            whose = block.kind if block.owner == self._rank else f"{block.kind} of rank {block.owner}"
            name = f"{whose}, {self._numbers.setdefault(begin, len(self._numbers))}"
        return f"{name} + {address - begin}" if address > begin else name
