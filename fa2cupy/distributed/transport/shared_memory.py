"""Memory of GPUs of one host that processes share (CUDA IPC)."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from .messages import CommunicationError

__all__ = ["SharedMemory"]

#: The driver may place smaller allocations inside a larger one, whose IPC handle they would share.
_PAGE = 1 << 21
_LAZY_PEER_ACCESS = 1


class SharedMemory:
    """Memory of all ranks that this process reaches.

    Parameters
    ----------
    rank : int
    texts : callable
        Returns the texts of all ranks; they call it together.

    Attributes
    ----------
    pointers : list of cupy.cuda.MemoryPointer
        By rank.
    """

    def __init__(self, rank: int, texts: Callable[[str], list[str]]):
        import cupy

        self._cupy, self._runtime = cupy, cupy.cuda.runtime
        self._rank, self._texts = rank, texts
        self._memory: Any = None
        self._mapped: list[int] = []
        self.pointers: list[Any] = []
        weakref.finalize(self, _unmap, self._runtime, self._mapped)  # or their owners could not free the memory

    def allocate(self, nbytes: int, zeroed: bool = False) -> None:
        """Allocates memory on each rank and maps that of the others. All ranks call it together.

        Raises
        ------
        MemoryError, CommunicationError
            A rank has no memory, or processes cannot share it. All ranks raise the error.
        """
        nbytes = -(-nbytes // _PAGE) * _PAGE
        handles = self.everyones(lambda: self._own_handle(nbytes, zeroed), MemoryError)
        self.everyones(lambda: self._map(handles, nbytes), CommunicationError)

    def release(self) -> None:
        """Unmaps the memory of the others, and frees that of this rank when all others have unmapped it."""
        _unmap(self._runtime, self._mapped)
        self.pointers = []
        self._texts("")
        self._memory = None

    def everyones(self, own: Callable[[], str], error: type[Exception]) -> list[str]:
        """The texts of all ranks; an exception of one is raised on all."""
        try:
            text = {"found": own()}
        except Exception as failure:
            text = {"error": f"{type(failure).__name__}: {failure}"}
        everyones = [json.loads(one) for one in self._texts(json.dumps(text))]
        for rank, one in enumerate(everyones):
            if "error" in one:
                raise error(f"rank {rank} cannot share memory with the others: {one['error']}")
        return [one["found"] for one in everyones]

    def _own_handle(self, nbytes: int, zeroed: bool) -> str:
        try:
            self._memory = self._cupy.cuda.Memory(nbytes)
        except self._cupy.cuda.memory.OutOfMemoryError:
            self._cupy.get_default_memory_pool().free_all_blocks()
            self._memory = self._cupy.cuda.Memory(nbytes)
        if zeroed:
            self._runtime.memset(self._memory.ptr, 0, nbytes)
            self._runtime.deviceSynchronize()
        return bytes(self._runtime.ipcGetMemHandle(self._memory.ptr)).hex()

    def _map(self, handles: Sequence[str], nbytes: int) -> str:
        memory, pointers = self._cupy.cuda, []
        device = memory.Device().id
        for rank, handle in enumerate(handles):
            if rank == self._rank:
                pointers.append(memory.MemoryPointer(self._memory, 0))
                continue
            address = self._runtime.ipcOpenMemHandle(bytes.fromhex(handle), _LAZY_PEER_ACCESS)
            self._mapped.append(address)
            pointers.append(memory.MemoryPointer(memory.UnownedMemory(address, nbytes, self, device), 0))
        self.pointers = pointers
        return ""


def _unmap(runtime: Any, addresses: list[int]) -> None:
    while addresses:
        runtime.ipcCloseMemHandle(addresses.pop())
