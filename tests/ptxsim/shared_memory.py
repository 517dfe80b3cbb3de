"""Shared memory of a batch of blocks: its layout, and accesses with all their checks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import PtxError
from .memory import ByteStore
from .syntax import Var

if TYPE_CHECKING:
    from .machine import Machine
    from .race import Order

__all__ = ["GENERIC_LOCAL", "GENERIC_PARAM", "GENERIC_SHARED", "MAX_SHARED", "RANK_SHIFT", "WINDOW", "SharedMemory"]

# Windows of the generic address space; anything else in it is global.
GENERIC_SHARED = 0x7000_0000_0000
GENERIC_PARAM = 0x7100_0000_0000
GENERIC_LOCAL = 0x7200_0000_0000
WINDOW = 1 << 40

RANK_SHIFT = 24  # shared::cluster address = (rank + 1) << 24 | offset; rank field 0 means the thread's own block
MAX_SHARED = 227 << 10

_STRIDE_ALIGNMENT = 1024  # bytes; required by the 128-byte swizzle


def _readable(symbol: str) -> str:
    """Returns a variable's own name, without its mangled function and the number that makes it unique."""
    name = symbol.partition("#")[0]
    mangled = re.match(r"_ZZ.*E(\d+)(\w+)$", name)
    return mangled[2] if mangled and len(mangled[2]) == int(mangled[1]) else name


class SharedMemory(ByteStore):
    """The shared memory of all blocks, `stride` bytes apart; offsets count from the first block."""

    def __init__(self, machine: Machine, variables: dict[str, Var], dynamic_bytes: int) -> None:
        self.machine = machine
        self.offsets: dict[str, int] = {}
        self.nbytes = self._lay_out(variables, dynamic_bytes)
        if self.nbytes > MAX_SHARED:
            raise PtxError(f"{self.nbytes} bytes of shared memory, more than the {MAX_SHARED} of a block")
        self.stride = -(-max(self.nbytes, 1) // _STRIDE_ALIGNMENT) * _STRIDE_ALIGNMENT
        super().__init__(self.stride * machine.num_blocks, tracked=True)
        self.base = machine.block_of * self.stride

    def _lay_out(self, variables: dict[str, Var], dynamic_bytes: int) -> int:
        """Places static variables in their order, then the dynamic part, which several names may share."""
        end = 0
        self._extents: list[tuple[int, int, str]] = []
        shared = {name: v for name, v in variables.items() if v.space == "shared"}
        for name, variable in shared.items():
            if variable.nbytes:
                self.offsets[name] = -(-end // variable.align) * variable.align
                end = self.offsets[name] + variable.nbytes
                self._extents.append((self.offsets[name], variable.nbytes, _readable(name)))
        dynamic = {name: v for name, v in shared.items() if not v.nbytes}
        align = max([16, *(_STRIDE_ALIGNMENT if v.align >= 128 else v.align for v in dynamic.values())])
        end = -(-end // align) * align
        self.offsets |= dict.fromkeys(dynamic, end)
        if dynamic_bytes:
            self._extents.append((end, dynamic_bytes, next(iter(dynamic), "dynamic shared memory")))
        return end + dynamic_bytes

    def reset(self, num_blocks: int) -> None:
        self.data[: num_blocks * self.stride] = 0xA5
        self.written[: num_blocks * self.stride] = 0

    def describe(self, offset: int) -> str:
        """Describes an offset of a block with the variable it is in."""
        for start, nbytes, name in self._extents:
            if start <= offset < start + nbytes:
                return f"shared 0x{offset:x} (offset {offset - start} of {name}, which has {nbytes} bytes)"
        return f"shared 0x{offset:x}"

    def locate(self, thread: int, address: int) -> tuple[int, int]:
        """Returns (block of the batch, offset in it) of an address, generic or of another block of the cluster."""
        if address >= GENERIC_SHARED:
            address -= GENERIC_SHARED
        block, cluster = int(self.machine.block_of[thread]), self.machine.cluster_size
        rank = address >> RANK_SHIFT
        if rank <= 0:
            return block, address
        if rank > cluster:
            raise PtxError(f"shared::cluster address of block {rank - 1} in a cluster of {cluster}", thread)
        return block // cluster * cluster + rank - 1, address & ((1 << RANK_SHIFT) - 1)

    def check_range(self, what: str, block_offset: int, nbytes: int) -> None:
        if block_offset < 0 or block_offset + nbytes > self.nbytes:
            raise PtxError(
                f"{what} is out of bounds: {nbytes} bytes at {self.describe(block_offset)}, "
                f"the block has 0x{self.nbytes:x} bytes"
            )

    def resolve(self, ix: Any, address: np.ndarray, nbytes: int, cluster: bool = False) -> np.ndarray:
        """Returns offsets of the shared addresses of threads, which must be in bounds and aligned to their size."""
        machine, base, is_remote = self.machine, self.base[ix], False
        if cluster or machine.cluster_size > 1:
            rank = address >> RANK_SHIFT
            remote = rank > 0
            is_remote = bool(remote.any())
            if is_remote:
                if int(rank.max()) > machine.cluster_size:
                    machine.fault(f"shared::cluster address of block {int(rank.max()) - 1}", ix, int(rank.argmax()))
                first = machine.block_of[ix] // machine.cluster_size * machine.cluster_size
                base = np.where(remote, (first + rank - 1) * self.stride, base)
                address = address & ((1 << RANK_SHIFT) - 1)
        if int(address.min()) < 0 or int(address.max()) + nbytes > self.nbytes:
            k = int(np.argmax((address < 0) | (address + nbytes > self.nbytes)))
            machine.fault(
                f"shared access out of bounds: {nbytes} bytes at {self.describe(int(address[k]))}, "
                f"the block has 0x{self.nbytes:x} bytes",
                ix,
                k,
            )
        crooked = address & (nbytes - 1)
        if np.count_nonzero(crooked):
            k = int(np.argmax(crooked != 0))
            machine.fault(f"misaligned shared access: {nbytes} bytes at {self.describe(int(address[k]))}", ix, k)
        offset = address + base
        if machine.banks is not None and not is_remote:  # what leaves the multiprocessor has other limits
            machine.banks.count(machine.threads[ix], offset, nbytes)
        return offset

    def load(self, ix: Any, offset: np.ndarray, nbytes: int, order: Order | None = None) -> np.ndarray:
        machine = self.machine
        bad = self.unwritten(offset, nbytes) if machine.check_uninit else None
        if bad is not None:
            where = self.describe(int(offset[bad]) % self.stride)
            machine.fault(f"read of uninitialised shared memory: {nbytes} bytes at {where}", ix, bad)
        if machine.race is not None:
            if order is None:
                machine.race.read(machine.threads[ix], offset, nbytes)
            elif "rmw" not in order:  # the store of an atomic operation checks both
                machine.race.strong_read(machine.threads[ix], offset, nbytes, order)
        return self.gather(offset, nbytes)

    def store(self, ix: Any, offset: np.ndarray, nbytes: int, words: np.ndarray, order: Order | None = None) -> None:
        machine = self.machine
        if machine.race is not None:
            if order is None:
                machine.race.write(machine.threads[ix], offset, nbytes)
            else:
                machine.race.strong_write(machine.threads[ix], offset, nbytes, order)
        self.scatter(offset, nbytes, words)
