"""Copies by the asynchronous proxy: runs of bytes, and tiles of tensors (TMA). They take effect at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from .async_copy import commit_group, wait_group
from .decode import Control, Plain, address, control, plain
from .errors import AccessError, PtxError
from .memory import Buffer
from .scalars import NUMPY, REDUCTIONS
from .shared_memory import GENERIC_PARAM, WINDOW
from .syntax import Addr, Inst
from .tensor_map import TensorMap

if TYPE_CHECKING:
    from .machine import Machine

__all__ = []

_CHUNK = 16
_MAP_NBYTES, _MAP_ALIGNMENT = 128, 64
_SPACES = ("global", "shared::cta", "shared::cluster")
_COMMON = "global shared::cta shared::cluster bulk_group L2::"
_COMPLETION = "mbarrier::complete_tx::bytes mbarrier::"

_decoded_map = lru_cache(TensorMap)


@plain("cp.async.bulk.commit_group")
def _commit(machine: Machine, inst: Inst) -> Plain:
    return commit_group(machine, "bulk")


@plain("cp.async.bulk.wait_group", allow="read")
def _wait(machine: Machine, inst: Inst) -> Plain:
    return wait_group(machine, inst, "bulk")


@plain("cp.async.bulk.prefetch", allow=f"tensor 1d 2d 3d 4d 5d tile {_COMMON}")
def _prefetch(machine: Machine, inst: Inst) -> Plain:
    return lambda ix: None


def _loads(inst: Inst) -> bool:
    """Returns True if the copy goes from global to shared memory; the first space named is the target."""
    return _spaces(inst)[1] == "global"


def _spaces(inst: Inst) -> list[str]:
    return [part for part in inst.parts if part in _SPACES]


def _reduction(inst: Inst) -> Callable | None:
    if inst.parts[0] != "reduce":
        return None
    name = next((part for part in inst.parts if part in REDUCTIONS), None)
    if name is None:
        raise PtxError(f"the reduction of {inst.opcode} is not implemented")
    return REDUCTIONS[name]


def _read_shared(
    machine: Machine, thread: int, block: int, chunks: np.ndarray, what: str, in_group: bool = True
) -> tuple[int, int] | None:
    """Checks a bulk read of 16-byte chunks of a block; returns the race detector's tag of it."""
    chunks = chunks + block * machine.shared.stride
    bad = machine.shared.unwritten(chunks, _CHUNK) if machine.check_uninit else None
    if bad is not None:
        where = machine.shared.describe(int(chunks[bad]) % machine.shared.stride)
        raise PtxError(f"{what} reads uninitialised shared memory: {where}", thread)
    if machine.race is None:
        return None
    return machine.race.bulk_read(thread, chunks, _CHUNK, in_group)


def _write_shared(
    machine: Machine,
    thread: int,
    block: int,
    chunks: np.ndarray,
    data: np.ndarray,
    mbarrier: tuple[int, int],
    read: tuple[int, int] | None = None,
) -> None:
    """Writes 16-byte chunks in bulk and signals an mbarrier; `read`: the tag of the read that it tells of, too."""
    chunks = chunks + block * machine.shared.stride
    if not machine.alive_in_block[block]:
        raise PtxError("a bulk copy into the shared memory of a block that has ended", thread)
    machine.mbarriers.use_for_copy(mbarrier, thread)
    tag = None
    if machine.race is not None:
        tag = machine.race.tma_write(thread, chunks, _CHUNK, *mbarrier)
    machine.shared.scatter(chunks, _CHUNK, data.view(np.uint64).reshape(-1, 2))
    machine.mbarriers.complete_bytes(mbarrier, data.nbytes, [one for one in (tag, read) if one is not None])


def _check_race(
    machine: Machine,
    thread: int,
    buffer: Buffer,
    offset: np.ndarray,
    size: int,
    what: str,
    loads: bool,
    reduce: Callable | None,
) -> None:
    """Checks a copy of elements from or to global memory for races with other blocks."""
    if machine.global_race is not None and len(offset):
        kind = "read" if loads else "write" if reduce is None else "atomic"
        machine.global_race.copy(kind, what, thread, buffer, offset, size)


# Runs of bytes


@control("cp.async.bulk", allow=f"{_COMMON} {_COMPLETION}")
@control("cp.reduce.async.bulk", allow=f"{_COMMON} {_COMPLETION} {' '.join(REDUCTIONS)}")
def _copy_bytes(machine: Machine, inst: Inst) -> Control:
    if "global" not in _spaces(inst):
        return _send_bytes(machine, inst)
    loads, reduce = _loads(inst), _reduction(inst)
    to, of = address(machine, inst.args[0]), address(machine, inst.args[1])
    sizes = machine.source(inst.args[2], "u32")
    mbarrier = address(machine, inst.args[3]) if loads else None
    if reduce is not None and (loads or inst.type not in ("u32", "s32", "u64", "f16", "f32", "f64")):
        raise PtxError(f"{inst.opcode} is not implemented")

    def run(threads: np.ndarray) -> None:
        machine.push(inst.pc + 1, threads)
        for thread in threads.tolist():
            one = threads[threads == thread]
            shared_address, global_address = (int(x(one)[0]) for x in ((to, of) if loads else (of, to)))
            block, start = machine.shared.locate(thread, shared_address)
            nbytes = int(sizes[thread])
            if nbytes % _CHUNK or start % _CHUNK or global_address % _CHUNK:
                raise PtxError(
                    f"misaligned bulk copy: shared 0x{start:x}, global 0x{global_address:x} and the size {nbytes} must "
                    "be multiples of 16",
                    thread,
                )
            machine.shared.check_range("bulk copy", start, nbytes)
            chunks = np.arange(start, start + nbytes, _CHUNK)
            buffer = machine.memory.find(global_address, nbytes, "read" if loads else "write")
            size = _CHUNK if reduce is None else np.dtype(NUMPY[inst.type]).itemsize
            at = np.arange(global_address - buffer.address, global_address - buffer.address + nbytes, size)
            what = "bulk copy" if reduce is None else "bulk reduction"
            _check_race(machine, thread, buffer, at, size, what, loads, reduce)
            if loads:
                data = machine.memory.read_bytes(global_address, nbytes, machine.check_uninit)
                place = machine.mbarriers.place(thread, int(mbarrier(one)[0]))
                _write_shared(machine, thread, block, chunks, data.copy(), place)
                continue
            _read_shared(machine, thread, block, chunks, "bulk copy")
            data = machine.shared.gather(chunks + block * machine.shared.stride, _CHUNK).reshape(-1).view(np.uint8)
            if reduce is not None:
                old = machine.memory.read_bytes(global_address, nbytes, machine.check_uninit).view(NUMPY[inst.type])
                data = reduce(old, data.view(NUMPY[inst.type])).view(np.uint8)
            machine.memory.write_bytes(global_address, data)

    return run


def _send_bytes(machine: Machine, inst: Inst) -> Control:
    """Copies from a block's shared memory to that of a block of its cluster, whose mbarrier it signals."""
    if _spaces(inst) != ["shared::cluster", "shared::cta"] or inst.parts[0] == "reduce":
        raise PtxError(f"{inst.opcode} is not implemented")
    to, of, mbarrier = (address(machine, inst.args[place]) for place in (0, 1, 3))
    sizes = machine.source(inst.args[2], "u32")

    def run(threads: np.ndarray) -> None:
        machine.push(inst.pc + 1, threads)
        for thread in threads.tolist():
            one = threads[threads == thread]
            ends = [machine.shared.locate(thread, int(x(one)[0])) for x in (to, of)]
            nbytes = int(sizes[thread])
            if nbytes % _CHUNK or any(start % _CHUNK for _, start in ends):
                raise PtxError(
                    f"misaligned bulk copy of {nbytes} bytes: addresses and the size are multiples of 16", thread
                )
            place = machine.mbarriers.place(thread, int(mbarrier(one)[0]))
            if place[0] != ends[0][0]:
                raise PtxError("a bulk copy to another block than that of its mbarrier", thread)
            chunks = []
            for _, start in ends:
                machine.shared.check_range("bulk copy", start, nbytes)
                chunks.append(np.arange(start, start + nbytes, _CHUNK))
            block = ends[1][0]
            read = _read_shared(machine, thread, block, chunks[1], "bulk copy", in_group=False)
            data = machine.shared.gather(chunks[1] + block * machine.shared.stride, _CHUNK).reshape(-1).view(np.uint8)
            _write_shared(machine, thread, ends[0][0], chunks[0], data.copy(), place, read)

    return run


# Tiles of tensors


def _map_at(machine: Machine, pointer: int, rank: int, thread: int) -> TensorMap:
    if pointer % _MAP_ALIGNMENT:
        raise PtxError(f"misaligned tensor map: 0x{pointer:x} is no multiple of {_MAP_ALIGNMENT}", thread)
    if GENERIC_PARAM <= pointer < GENERIC_PARAM + WINDOW:
        start = pointer - GENERIC_PARAM
        data = machine.params[start : start + _MAP_NBYTES].tobytes()
    else:
        data = machine.memory.read_bytes(pointer, _MAP_NBYTES).tobytes()
    if len(data) < _MAP_NBYTES:
        raise PtxError("a tensor map beyond the end of the arguments", thread)
    tensor = _decoded_map(data)
    if tensor.rank != rank:
        raise PtxError(f"a tensor map of rank {tensor.rank} in an instruction of rank {rank}", thread)
    return tensor


def _inside(machine: Machine, tensor: TensorMap, coordinates: list[int]) -> tuple[Buffer, np.ndarray, np.ndarray]:
    """Returns the buffer of a tile, offsets in it of its elements inside of the tensor, and which these are."""
    offset, inside = tensor.tile(coordinates)
    try:
        buffer = machine.memory.find(tensor.address)
    except AccessError as error:  # a load faults there even if it reads no element
        raise PtxError(f"a tensor map begins at an unmapped address: {error.problem}") from None
    offset = offset[inside] + tensor.address
    if len(offset):
        buffer = machine.memory.part_of(buffer, int(offset.min()))
    offset -= buffer.address
    if len(offset) and not 0 <= int(offset.min()) <= int(offset.max()) <= buffer.nbytes - tensor.size:
        raise PtxError(
            f"a tensor map out of bounds: bytes {int(offset.min())} to {int(offset.max()) + tensor.size} of "
            f"{buffer.name}, which has {buffer.nbytes} bytes"
        )
    return buffer, offset, inside


@control("cp.async.bulk.tensor", allow=f"1d 2d 3d 4d 5d tile multicast::cluster {_COMMON} {_COMPLETION}")
@control("cp.reduce.async.bulk.tensor", allow=f"1d 2d 3d 4d 5d tile {_COMMON} {' '.join(REDUCTIONS)}")
def _copy_tile(machine: Machine, inst: Inst) -> Control:
    loads, reduce = _loads(inst), _reduction(inst)
    if loads and reduce is not None:
        raise PtxError(f"{inst.opcode} is not implemented")
    pointer, shared = (inst.args[1], inst.args[0]) if loads else (inst.args[0], inst.args[1])
    coordinates = [machine.source(item, "s32") for item in pointer.extra[0].items]
    maps, starts = address(machine, Addr(pointer.base, pointer.offset)), address(machine, shared)
    mbarrier = address(machine, inst.args[2]) if loads else None
    multicast = machine.source(inst.args[3], "u16") if "multicast::cluster" in inst.parts else None

    def run(threads: np.ndarray) -> None:
        machine.push(inst.pc + 1, threads)
        for thread in threads.tolist():
            one = threads[threads == thread]
            tensor = _map_at(machine, int(maps(one)[0]), len(coordinates), thread)
            block, start = machine.shared.locate(thread, int(starts(one)[0]))
            machine.shared.check_range("TMA tile", start, tensor.nbytes)
            tile = _inside(machine, tensor, [int(row[thread]) for row in coordinates])
            if loads:
                place = machine.mbarriers.place(thread, int(mbarrier(one)[0]))
                mask = None if multicast is None else int(multicast[thread])
                _load_tile(machine, thread, tensor, tile, (block, start), place, mask)
            else:
                _store_tile(machine, thread, tensor, tile, (block, start), reduce)

    return run


def _load_tile(
    machine: Machine,
    thread: int,
    tensor: TensorMap,
    tile: tuple[Buffer, np.ndarray, np.ndarray],
    start: tuple[int, int],
    mbarrier: tuple[int, int],
    multicast: int | None,
) -> None:
    """Loads a tile; elements outside of the tensor become zeros, and all bytes of the tile count as arrived."""
    buffer, offset, inside = tile
    bad = buffer.unwritten(offset, tensor.size) if machine.check_uninit else None
    if bad is not None:
        raise PtxError(f"TMA load of uninitialised global memory: offset {int(offset[bad])} of {buffer.name}", thread)
    _check_race(machine, thread, buffer, offset, tensor.size, "TMA load", loads=True, reduce=None)
    values = np.zeros(len(inside), f"u{tensor.size}")
    values[inside] = buffer.gather(offset, tensor.size)
    chunks = tensor.chunks(start[1])
    if multicast is None:
        _write_shared(machine, thread, start[0], chunks, values, mbarrier)
        return
    size = machine.cluster_size
    first = start[0] // size * size
    for rank in range(size):
        if multicast >> rank & 1:  # to the same offsets and mbarrier of each block
            _write_shared(machine, thread, first + rank, chunks, values, (first + rank, mbarrier[1]))


def _store_tile(
    machine: Machine,
    thread: int,
    tensor: TensorMap,
    tile: tuple[Buffer, np.ndarray, np.ndarray],
    start: tuple[int, int],
    reduce: Callable | None,
) -> None:
    """Stores those elements of a tile that are inside of the tensor."""
    buffer, offset, inside = tile
    chunks = tensor.chunks(start[1])
    needed = inside.reshape(len(chunks), -1).any(1)
    _read_shared(machine, thread, start[0], chunks[needed], "TMA store")
    words = machine.shared.gather(chunks + start[0] * machine.shared.stride, _CHUNK)
    values = words.reshape(-1).view(f"u{tensor.size}")[inside]
    what = "TMA store" if reduce is None else "TMA reduction"
    _check_race(machine, thread, buffer, offset, tensor.size, what, loads=False, reduce=reduce)
    if reduce is not None:
        if tensor.name == "bf16":
            raise PtxError("TMA reductions of bf16 are not implemented", thread)
        old = buffer.gather(offset, tensor.size).view(tensor.dtype)
        values = reduce(old, values.view(tensor.dtype)).view(values.dtype)
    buffer.scatter(offset, tensor.size, values)
