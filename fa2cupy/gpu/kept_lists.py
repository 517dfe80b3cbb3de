"""The lists of sparse maps, which calls write once and maps keep.

A map's first call of a kind writes the lists of its tiles into memory that the map then owns. Later calls of that kind
only read them, on any stream: until the writing kernels have ended, their streams wait for an event. A call that is
captured into a graph cannot wait for what is outside of the graph; it writes lists of its own unless those of the map
are known to be complete.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import cupy

from ..plan.stages import Stage
from ..problem.block_mask import BlockMask
from ..system.locks import new_lock
from .device_memory import allocator_of, is_capturing

__all__ = ["KeptLists"]

_ALIGNMENT = 512  # bytes, like that of CuPy's allocations

_lock = new_lock()
#: A number for each set of lists, in place of keys that take long to hash.
_numbers: dict[object, int] = {}
_unused = itertools.count()


class KeptLists:
    """The lists of one kind of call.

    Parameters
    ----------
    stages : sequence of Stage
        They write the lists, from nothing but the map.
    launches : iterable of callable
        The same, bound: they take addresses and a stream.
    nbytes : mapping of str to int
        Bytes of the lists by the names of their workspaces, in the order of their addresses.
    num_addresses : int
        Addresses that the launches take.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        launches: Iterable[Callable[[Sequence[int], int], None]],
        nbytes: Mapping[str, int],
        num_addresses: int,
    ):
        self._num_addresses = num_addresses
        self._launches = tuple(launches)
        sizes = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in nbytes.values()]
        *self._offsets, self._nbytes = itertools.accumulate(sizes, initial=0)
        self._key = _numbers.setdefault(tuple((stage.spec, stage.constants) for stage in stages), next(_unused))

    def add_to(self, addresses: list[int], stream: int, sparse: BlockMask) -> cupy.cuda.MemoryPointer:
        """Adds the addresses of the lists of a map, which the stream can read; returns their memory.

        `addresses` are those of the arguments of the call.
        """
        found = None if sparse.kept is None else sparse.kept.get(self._key)
        if found is None or not found.is_complete:
            if sparse.kept is None or is_capturing(stream):
                return self._write(addresses, stream)
            with _lock:
                found = sparse.kept.get(self._key)
                if found is None:
                    found = sparse.kept[self._key] = _Written(self._write(addresses.copy(), stream))
            found.wait()
        addresses += [found.memory.ptr + offset for offset in self._offsets]
        return found.memory

    def _write(self, addresses: list[int], stream: int) -> cupy.cuda.MemoryPointer:
        memory = allocator_of(stream)(self._nbytes)
        addresses += [memory.ptr + offset for offset in self._offsets]
        others = [0] * (self._num_addresses - len(addresses))
        for launch in self._launches:
            launch([*addresses, *others], stream)
        return memory


class _Written:
    """Lists that the current stream has been told to write."""

    def __init__(self, memory: cupy.cuda.MemoryPointer):
        self.memory, self.is_complete = memory, False
        self._event = cupy.cuda.Event(disable_timing=True)
        self._event.record()

    def wait(self) -> None:
        """Makes the current stream wait, unless the lists are complete."""
        if self._event.done:
            self.is_complete = True
        else:
            cupy.cuda.get_current_stream().wait_event(self._event)
