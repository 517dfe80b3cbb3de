"""A module of kernels: parsed once, launched on simulated memory."""

from __future__ import annotations

import copy
import ctypes
import struct
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from .errors import PtxError
from .machine import Machine, Options, Trace
from .memory import Memory
from .parser import Program
from .race import RaceDetector
from .syntax import Kernel, Var

__all__ = ["Module"]

_MACHINES_KEPT = 6
_BATCH_THREADS = 4096
_BATCH_BYTES = 1 << 28

#: Machines of the last successful launches, for the next one of the same kernel, block and shared memory: decoding a
#: kernel takes as long as running a small grid. A machine holds its kernel, so that no other kernel has its id.
_machines: dict[tuple, Machine] = {}


class Module:
    """The kernels and variables of one PTX text.

    Parameters
    ----------
    ptx : str or bytes
        PTX text as NVRTC returns it.
    """

    def __init__(self, ptx: str | bytes) -> None:
        self.program = Program(ptx.decode().rstrip("\0") if isinstance(ptx, bytes) else ptx)
        self.stats: dict[str, int] = {}
        self._kernels: dict[str, Kernel] = {}

    def kernel(self, name: str) -> Kernel:
        if name not in self._kernels:
            self._kernels[name] = self.program.kernel(name)
        return self._kernels[name]

    def global_address(self, name: str, memory: Memory) -> int:
        """Returns the address of a module variable in that memory, where it is mapped at its first use."""
        key = (self, name)
        if key not in memory.symbols:
            variable = self.program.variables[name]
            data = np.frombuffer(variable.initial or bytes(variable.nbytes), np.uint8).copy()
            address = memory.map(data, name, tracked=False, align=max(variable.align, 512))
            memory.symbols[key] = address
            for offset, symbol in variable.references:
                target = symbol.replace("generic(", "").rstrip(")")
                if target not in self.program.variables:
                    raise PtxError(f"{name} is initialised with {symbol}, which is not implemented")
                value = self.global_address(target, memory).to_bytes(variable.element, "little")
                memory.write_bytes(address + offset, np.frombuffer(value, np.uint8))
        return memory.symbols[key]

    def launch(
        self,
        name: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any],
        dynamic_smem: int = 0,
        memory: Memory | None = None,
        race_check: bool = False,
        check_uninit: bool = True,
        batch: int | None = None,
        trace: Trace | None = None,
        seed: int | None = None,
        max_rounds: int = 5_000_000,
        cluster: Sequence[int] | None = None,
        block_races: bool = True,
        cuts_sums: bool = False,
        counts_banks: bool = False,
        blocks: range | None = None,
    ) -> dict[str, int]:
        """Runs a kernel to its end and returns statistics.

        Parameters
        ----------
        name : str
        grid, block : int or up to three of them
        args : sequence
            Python ints and floats, NumPy scalars, ctypes values; bytes, np.void or structured scalars for structs.
        dynamic_smem : int
            Bytes of dynamic shared memory.
        memory : Memory, optional
            Memory that the pointers among the arguments point to.
        race_check : bool
            Report races through shared memory and, between blocks, through global memory; missing fences of proxies and
            of wgmma, early use of wgmma's registers, and threads or blocks that end with copies in flight.
        check_uninit : bool
            Report reads of unwritten shared memory, and of unwritten bytes of `empty` buffers.
        batch : int, optional
            Blocks that run together; by default about 4096 threads. Only blocks of one batch can wait for each other.
        trace : callable, optional
            Called as trace(machine, inst, threads) before each step.
        seed : int, optional
            Run groups of threads in a random order instead of lowest program counter first.
        max_rounds : int
            Scheduling rounds of a batch after which it counts as endless.
        cluster : sequence of int, optional
            Shape of a cluster, if the kernel does not fix it.
        block_races : bool
            Let `race_check` include global memory; off if the arguments themselves make blocks collide.
        cuts_sums : bool
            Let wgmma and mma.sync add bit by bit as the hardware does, which takes several times as long as float32.
        counts_banks : bool
            Count wavefronts of shared memory: ``stats["wavefronts"]``, and ``stats["phases"]`` without conflicts.
        blocks : range, optional
            Blocks of the grid that run; by default all of them.
        """
        grid3, block3 = _three(grid), _three(block)
        kernel = self.kernel(name)
        if cluster is not None:
            kernel = copy.copy(kernel)
            kernel.cluster = _three(cluster)
        blocks = range(prod(grid3)) if blocks is None else blocks
        num_blocks, cluster_size = len(blocks), prod(kernel.cluster)
        if kernel.max_threads and prod(block3) > prod(kernel.max_threads):
            raise PtxError(
                f"kernel {name}: a block of {prod(block3)} threads, but it was compiled for at most "
                f"{prod(kernel.max_threads)}"
            )
        if any(g % c for g, c in zip(grid3, kernel.cluster, strict=True)):
            raise PtxError(f"kernel {name}: the grid {grid3} is no multiple of the cluster {kernel.cluster}")
        if batch is None:
            batch = _default_batch(kernel, prod(block3), dynamic_smem, race_check)
        batch = -(-batch // cluster_size) * cluster_size
        params = _packed(kernel.params, args)
        memory = Memory() if memory is None else memory
        key = (id(kernel), block3, dynamic_smem, batch, race_check)
        machine = _machines.pop(key, None)
        if machine is None or machine.num_blocks < min(batch, num_blocks):  # the second one has room for a whole batch
            room = batch if machine else max(1, min(batch, num_blocks))
            if machine is not None:
                machine.take_apart()
            machine = Machine(self, kernel, memory, block3, dynamic_smem, room, race_check)
        try:
            options = Options(check_uninit, trace, seed, max_rounds, block_races, cuts_sums, counts_banks)
            machine.begin(memory, grid3, params, options)
            for first in blocks[::batch]:
                machine.run(first, min(batch, blocks.stop - first))
        except Exception:
            machine.take_apart()
            raise
        self.stats = {
            "steps": machine.executed,
            "thread_instructions": machine.thread_instructions,
            "smem": machine.shared.nbytes,
            "ctas": num_blocks,
        }
        if machine.banks is not None:
            self.stats |= {"phases": machine.banks.phases, "wavefronts": machine.banks.wavefronts}
        if cluster is None and not machine.uses_memory_of_module:
            _keep(key, machine)
        else:
            machine.take_apart()
        return self.stats


def _three(extent: int | Sequence[int]) -> tuple[int, int, int]:
    values = tuple(int(x) for x in (extent if isinstance(extent, (tuple, list)) else (extent,)))
    return ((*values, 1, 1, 1))[:3]


def _keep(key: tuple, machine: Machine) -> None:
    machine.memory = machine.global_race = None
    _machines[key] = machine
    while len(_machines) > _MACHINES_KEPT:
        _machines.pop(next(iter(_machines))).take_apart()


def _default_batch(kernel: Kernel, num_threads: int, dynamic_smem: int, race_check: bool) -> int:
    warps = -(-num_threads // 32)
    nbytes = 32 * warps * sum(max(width // 8, 1) * count for width, count in kernel.registers.items())
    static = sum(v.nbytes for v in kernel.variables.values() if v.space == "shared")
    nbytes += 2 * (static + dynamic_smem)
    if race_check:
        nbytes += RaceDetector.bytes_per_block(warps, prod(kernel.cluster), static + dynamic_smem)
    return max(1, min(_BATCH_THREADS // (32 * warps), _BATCH_BYTES // max(nbytes, 1)))


def _packed(params: Sequence[Var], args: Sequence[Any]) -> bytes:
    """Returns the bytes of the parameter space; every argument must have its parameter's size."""
    if len(params) != len(args):
        raise PtxError(f"the kernel takes {len(params)} arguments, got {len(args)}")
    record = bytearray()
    for param, arg in zip(params, args, strict=True):
        match arg:
            case bytes() | bytearray() | ctypes._SimpleCData() | ctypes.Structure() | ctypes.Array():
                data = bytes(arg)
            case np.generic() | np.ndarray():
                data = arg.tobytes()
            case float():
                data = struct.pack("<f" if param.nbytes == 4 else "<d", arg)
            case _:
                data = (int(arg) & ((1 << (8 * param.nbytes)) - 1)).to_bytes(param.nbytes, "little")
        if len(data) != param.nbytes:
            raise PtxError(f"argument {param.name} has {len(data)} bytes, the kernel expects {param.nbytes}")
        record = record.ljust(param.offset, b"\0") + data
    return bytes(record)
