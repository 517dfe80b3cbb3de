"""wgmma: products of a warp group with operands from shared memory. They take effect at once; waits order them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .decode import Control, control
from .errors import PtxError
from .race import warps_of
from .scalars import halves_to_f32
from .syntax import Inst, Vec
from .tensor_core import register_rows
from .tensor_core_sums import HOPPER, add_products
from .tensor_map import swizzled
from .warp import when_converged
from .wgmma_registers import rows_of, selection_of

if TYPE_CHECKING:
    from .machine import Machine

__all__ = []

_THREADS = 128  # of a warp group
_ROWS, _DEPTH = 64, 16
_CHUNK = 16
_SPANS = {0: 0, 1: 128, 2: 64, 3: 32}  # swizzle by the descriptor's two highest bits
_SHAPES = [f"m64n{n}k16" for n in range(8, 257, 8)]


@control("wgmma.fence", "wgmma.commit_group", "wgmma.wait_group", allow="sync aligned")
def _synchronise(machine: Machine, inst: Inst) -> Control:
    kind = inst.parts[0]
    pending = int(inst.args[0].value) if inst.args else 0

    def work(threads: np.ndarray) -> None:
        if machine.race is None:
            return
        warps = warps_of(threads)
        if kind == "fence":
            machine.wgmma_registers.fence(warps)
        elif kind == "commit_group":
            machine.race.commit("wgmma", threads)
            machine.wgmma_registers.commit(warps)
        else:
            machine.race.wait("wgmma", threads, pending)
            machine.wgmma_registers.wait(warps, pending)

    return when_converged(machine, inst, None, work)


def _operand_offsets(descriptor: int, rows: int, mn_major: bool) -> np.ndarray:
    """Returns offsets in a block's shared memory of a rows x 16 operand of 16-bit elements.

    The leading and the stride byte offsets are those of PTX's tables. Without swizzle they are between core matrices of
    8 x 8, along K (leading) and along the rows (stride). K-major with swizzle, the stride is between groups of 8 rows.
    MN-major, the leading offset is between spans along the rows, and the stride between groups of 8 along K.
    """
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    span = _SPANS[descriptor >> 62]
    if descriptor >> 49 & 7:
        raise PtxError("a matrix descriptor with a base offset is not implemented")
    row, k = np.arange(rows)[:, None], np.arange(_DEPTH)[None, :]
    if span == 0:
        if mn_major:
            raise PtxError("an MN-major matrix descriptor without swizzle is not implemented")
        return start + row // 8 * stride + row % 8 * 16 + k // 8 * leading + k % 8 * 2
    if mn_major:
        per_span = span // 2
        linear = row // per_span * leading + k // 8 * stride + k % 8 * span + row % per_span * 2
    else:
        linear = row // 8 * stride + row % 8 * span + k * 2
    return swizzled(start + linear, span)


@dataclass(frozen=True)
class _Operand:
    """The places of an operand's chunks: 16 bytes, or 8 elements, that lie together along the rows or along K.

    Attributes
    ----------
    last : int
        The highest offset of a chunk in its block.
    chunks : numpy.ndarray
        Offsets of the chunks in the shared memory of the batch.
    words : numpy.ndarray
        The same as numbers of 16-byte words.
    granules : numpy.ndarray
        All granules of the race check in the chunks.
    """

    last: int
    chunks: np.ndarray
    words: np.ndarray
    granules: np.ndarray


@lru_cache(maxsize=2048)  # a loop reads the same operands over and over
def _operand(descriptor: int, rows: int, mn_major: bool, base: int, granule: int) -> _Operand:
    offset = _operand_offsets(descriptor, rows, mn_major)
    inside = (offset[::8] if mn_major else offset[:, ::8]).ravel()
    chunks = inside + base
    granules = ((chunks // granule)[:, None] + np.arange(_CHUNK // granule)).ravel()
    return _Operand(int(inside.max()), chunks, chunks // _CHUNK, granules)


def _read_operand(
    machine: Machine, block: int, descriptor: int, rows: int, mn_major: bool, warps: np.ndarray, ty: str
) -> np.ndarray:
    """Returns float32 values of an operand in shared memory, with the checks of an asynchronous read."""
    shared, race = machine.shared, machine.race
    operand = _operand(descriptor, rows, mn_major, block * shared.stride, _CHUNK if race is None else race.granule)
    if operand.last + _CHUNK > shared.nbytes:
        raise PtxError(
            f"wgmma operand out of bounds: descriptor 0x{descriptor:x} reaches {shared.describe(operand.last)}, "
            f"the block has 0x{shared.nbytes:x} bytes"
        )
    bad = shared.unwritten_words(operand.words, _CHUNK) if machine.check_uninit else None
    if bad is not None:
        where = shared.describe(int(operand.chunks[bad]) % shared.stride)
        raise PtxError(f"wgmma reads uninitialised shared memory: {where}, descriptor 0x{descriptor:x}")
    if race is not None:
        race.wgmma_read(warps, operand.granules)
    values = halves_to_f32(shared.words(_CHUNK).take(operand.words, axis=0).view(np.uint16), ty)
    if mn_major:
        return values.reshape(rows // 8, _DEPTH, 8).swapaxes(1, 2).reshape(rows, _DEPTH)
    return values.reshape(rows, _DEPTH)


@control("wgmma.mma_async", allow="sync aligned " + " ".join(_SHAPES))
def _multiply(machine: Machine, inst: Inst) -> Control:
    """Computes D += A B for a warp group: 64 x 16 by 16 x N."""
    columns = int(inst.parts[3][4:-3])
    if len(inst.types) != 3 or inst.types[0] != "f32" or inst.types[1] not in ("f16", "bf16"):
        raise PtxError(f"wgmma of these types is not implemented: {' '.join(inst.types)}")
    if len(inst.args[0].items) != columns // 2:
        raise PtxError(f"wgmma with {len(inst.args[0].items)} accumulators instead of {columns // 2}")
    from_registers = isinstance(inst.args[1], Vec)
    signs = [int(arg.value) for arg in inst.args[4:6]] or [1, 1]
    majors = [bool(arg.value) for arg in inst.args[6:]] or [False, False]
    multiply = _group_product(machine, inst, columns, from_registers, signs[0] * signs[1], majors)

    def run(threads: np.ndarray) -> None:
        within = threads % machine.padded_threads
        groups = (machine.block_of[threads] << 20) | within // _THREADS
        late = []
        for mine in np.split(threads, np.flatnonzero(np.diff(groups)) + 1):
            if len(mine) == _THREADS:
                multiply(mine)
                machine.push(inst.pc + 1, mine)
            else:
                late.append(mine)
        if late:
            machine.park(inst.pc, np.concatenate(late))

    return run


def _group_product(
    machine: Machine, inst: Inst, columns: int, from_registers: bool, sign: int, majors: list[bool]
) -> Callable[[np.ndarray], None]:
    ty = inst.types[1]
    rows = selection_of([item.index for item in inst.args[0].items])
    a_rows = selection_of(rows_of(inst.args[1]) if from_registers else [])
    accumulators = machine.registers.rows[32].view(np.float32)
    a = register_rows(machine, inst.args[1].items) if from_registers else machine.source(inst.args[1], "u64")
    b, adds = machine.source(inst.args[2], "u64"), machine.source(inst.args[3], "pred")

    def uniform(values: np.ndarray, what: str, threads: np.ndarray) -> Any:
        differs = values != values[0]
        if np.count_nonzero(differs):
            problem = f"wgmma: {what} differs between the threads of a warp group"
            machine.fault(problem, threads, int(np.argmax(differs)))
        return values[0].item()

    def multiply(threads: np.ndarray) -> None:
        ix = machine.selection(threads)
        block, warps = int(machine.block_of[threads[0]]), threads[::32] >> 5
        if from_registers:  # register = row half + 2 column half
            halves = np.ascontiguousarray(a(ix)).view(np.uint16)
            left = halves_to_f32(halves, ty).reshape(2, 2, 4, 8, 8).transpose(2, 1, 3, 0, 4).reshape(_ROWS, _DEPTH)
        else:
            descriptor = uniform(a[ix], "descriptor A", threads)
            left = _read_operand(machine, block, descriptor, _ROWS, majors[0], warps, ty)
        descriptor = uniform(b[ix], "descriptor B", threads)
        right = _read_operand(machine, block, descriptor, columns, majors[-1], warps, ty)
        if machine.wgmma_registers is not None:
            machine.wgmma_registers.issue(threads, rows, a_rows, columns)
        place, accumulates = (rows, ix), uniform(adds[ix], "scale-d", threads)
        # Row 16 warp + 8 h + g, column 8 c + 2 t + e are in register 4 c + 2 h + e of lane 4 g + t.
        if machine.cuts_sums:
            matrix = np.zeros((_ROWS, columns), np.float32)
            if accumulates:
                own = accumulators[place].reshape(columns // 8, 2, 2, 4, 8, 4)
                matrix = own.transpose(3, 1, 4, 0, 5, 2).reshape(_ROWS, columns)
            product = add_products(HOPPER, matrix, sign * left, right)
        else:
            product = left @ right.T if sign > 0 else -(left @ right.T)
        product = product.reshape(4, 2, 8, columns // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4).reshape(-1, _THREADS)
        if accumulates and not machine.cuts_sums:
            product = accumulators[place] + product
        accumulators[place] = product

    return multiply
