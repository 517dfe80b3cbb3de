"""Matrix instructions of a warp: ldmatrix, stmatrix and mma.sync.

Lane 4 g + t of a warp holds the elements 2 t and 2 t + 1 of row g of an 8 x 8 matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .decode import Control, address, control, space_of
from .errors import PtxError
from .scalars import halves_to_f32
from .shared_memory import GENERIC_SHARED
from .syntax import Inst, Operand, Reg, Vec
from .tensor_core_sums import AMPERE, add_products
from .warp import when_converged

if TYPE_CHECKING:
    from .machine import Machine

__all__ = ["register_rows"]

_MATRIX_MODIFIERS = "sync aligned m8n8 x1 x2 x4 trans shared shared::cta"
_MMA_SHAPES = ("m16n8k4", "m16n8k8", "m16n8k16")
_TF32_MASK = np.uint32(0xFFFFE000)
_LONGEST_RUN = 32


def _items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vec) else (operand,)


def register_rows(machine: Machine, operands: tuple[Operand, ...]) -> Callable[[Any], np.ndarray]:
    """Returns a closure from threads to the bits of 32-bit registers: (registers, threads)."""
    if all(isinstance(operand, Reg) and operand.width == 32 for operand in operands):
        file, index = machine.registers.rows[32], np.array([operand.index for operand in operands])
        if (np.diff(index) == 1).all():
            rows = file[index[0] : index[-1] + 1]
            return lambda ix: rows[:, ix]
        return lambda ix: file[index, ix] if isinstance(ix, slice) else file[index[:, None], ix]
    sources = [machine.source(operand, "b32") for operand in operands]
    return lambda ix: np.stack([source[ix] for source in sources])


def _write_rows(machine: Machine, operands: tuple[Operand, ...]) -> Callable[[Any, np.ndarray], None]:
    targets = [machine.destination(operand, "b32") for operand in operands]

    def write(ix: Any, bits: np.ndarray) -> None:
        for target, row in zip(targets, bits, strict=True):
            target[ix] = row

    return write


def _matrix_count(inst: Inst, operand: Operand) -> int:
    count = int(next(part for part in inst.parts if part in ("x1", "x2", "x4"))[1:])
    if inst.type != "b16" or "m8n8" not in inst.parts or len(_items(operand)) != count:
        raise PtxError(f"this shape of {inst.op} is not implemented")
    return count


def _row_offsets(machine: Machine, inst: Inst, operand: Operand, count: int) -> Callable:
    """Returns a closure from threads to (the lanes that hold addresses, offsets of their rows of 16 bytes)."""
    addresses, window = address(machine, operand), GENERIC_SHARED if space_of(inst) == "generic" else 0

    def offsets(threads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        lanes = threads.reshape(-1, 32)[:, : 8 * count].ravel()
        return lanes, machine.shared.resolve(lanes, addresses(lanes) - window, 16)

    return offsets


@control("ldmatrix", allow=_MATRIX_MODIFIERS)
def _load_matrices(machine: Machine, inst: Inst) -> Control:
    count, transposed = _matrix_count(inst, inst.args[0]), "trans" in inst.parts
    write = _write_rows(machine, _items(inst.args[0]))
    offsets = _row_offsets(machine, inst, inst.args[1], count)

    def work(threads: np.ndarray) -> None:
        lanes, offset = offsets(threads)
        rows = machine.shared.load(lanes, offset, 16).view(np.uint16).reshape(-1, count, 8, 8)
        if transposed:
            rows = np.ascontiguousarray(rows.swapaxes(2, 3))
        bits = rows.view(np.uint32).reshape(-1, count, 32).swapaxes(0, 1).reshape(count, -1)
        write(machine.selection(threads), bits)

    return when_converged(machine, inst, None, work)


@control("stmatrix", allow=_MATRIX_MODIFIERS)
def _store_matrices(machine: Machine, inst: Inst) -> Control:
    count, transposed = _matrix_count(inst, inst.args[1]), "trans" in inst.parts
    read = register_rows(machine, _items(inst.args[1]))
    offsets = _row_offsets(machine, inst, inst.args[0], count)

    def work(threads: np.ndarray) -> None:
        lanes, offset = offsets(threads)
        bits = read(machine.selection(threads)).reshape(count, -1, 32).swapaxes(0, 1)
        rows = np.ascontiguousarray(bits).view(np.uint16).reshape(-1, count, 8, 8)
        if transposed:
            rows = np.ascontiguousarray(rows.swapaxes(2, 3))
        machine.shared.store(lanes, offset, 16, rows.reshape(-1, 8).view(np.uint64))

    return when_converged(machine, inst, None, work)


# D = A B + C


@control("mma", allow="sync aligned row col " + " ".join(_MMA_SHAPES))
def _multiply(machine: Machine, inst: Inst) -> Control:
    if len(inst.types) != 4 or not {"row", "col"} <= set(inst.parts):
        raise PtxError(f"{inst.opcode} is not implemented")
    result, a, b, addend = inst.types
    if a != b or a not in ("f16", "bf16", "tf32") or {result, addend} - {"f32", "f16"}:
        raise PtxError(f"mma of these types is not implemented: {' '.join(inst.types)}")
    depth = int(next(part for part in inst.parts if part in _MMA_SHAPES)[6:])
    if len(inst.args[0].items) != (4 if result == "f32" else 2) or (a != "tf32" and depth == 4):
        raise PtxError("mma of this shape is not implemented")
    ready: list[tuple[Callable, int]] = []

    def work(threads: np.ndarray) -> None:
        if not ready:  # made at the first use: most of a run's instructions are executed with its first
            run = _run_of(machine, inst)
            ready.append((_product(machine, run, depth), len(run)))
        multiply, length = ready[0]
        multiply(machine.selection(threads), len(threads) // 32)
        machine.executed += length - 1
        machine.thread_instructions += (length - 1) * len(threads)
        machine.push(inst.pc + length, threads)

    return when_converged(machine, inst, None, work, moves_on=False)


def _run_of(machine: Machine, first: Inst) -> list[Inst]:
    """Returns instructions from this one on that multiply the same A, are independent, and are executed as one."""
    run = [first]
    written = set(first.args[0].items)
    for inst in machine.kernel.insts[first.pc + 1 : first.pc + _LONGEST_RUN]:
        if (inst.op, inst.parts, inst.predicate, inst.args[1:2]) != (first.op, first.parts, None, first.args[1:2]):
            break
        results, *operands = (set(arg.items) for arg in inst.args)
        if written & results.union(*operands) or first.predicate is not None:
            break
        run.append(inst)
        written |= results
    return run


def _values(bits: np.ndarray, ty: str, num_warps: int) -> np.ndarray:
    """Returns float32 elements of fragments: (registers, warps, 8 rows, elements of a row)."""
    if ty == "tf32":
        return (bits & _TF32_MASK).view(np.float32).reshape(len(bits), num_warps, 8, 4)
    return halves_to_f32(np.ascontiguousarray(bits).view(np.uint16), ty).reshape(len(bits), num_warps, 8, 8)


def _product(machine: Machine, run: list[Inst], depth: int) -> Callable[[Any, int], None]:
    """Returns a closure that multiplies A by the B of all instructions, side by side, for threads of whole warps."""
    result, ty, _, addend = run[0].types
    count = len(run)
    read_a = register_rows(machine, run[0].args[1].items)
    read_b, read_c = (register_rows(machine, sum((i.args[k].items for i in run), ())) for k in (2, 3))
    write = _write_rows(machine, sum((inst.args[0].items for inst in run), ()))

    def multiply(ix: Any, num_warps: int) -> None:
        a = _values(read_a(ix), ty, num_warps)  # register = row half + 2 column part
        a = a.reshape(-1, 2, *a.shape[1:]).transpose(2, 1, 3, 0, 4).reshape(num_warps, 16, depth)
        b = _values(read_b(ix), ty, num_warps)
        b = b.reshape(count, -1, *b.shape[1:]).transpose(2, 0, 3, 1, 4).reshape(num_warps, 8 * count, depth)
        bits, shape = read_c(ix), (count, 2, num_warps, 8, 4, 2)
        if addend == "f32":
            c = bits.view(np.float32).reshape(count, 2, 2, num_warps, 8, 4).transpose(0, 1, 3, 4, 5, 2)
        else:
            c = np.ascontiguousarray(bits).view(np.float16).reshape(shape)
        # Transposed from (instruction, row half, warp, g, t, element) to (warp, row half, g, instruction, t, element).
        c = c.transpose(2, 1, 3, 0, 4, 5).reshape(num_warps, 16, 8 * count)
        total = add_products(AMPERE, c.astype(np.float32), a, b) if machine.cuts_sums else a @ b.swapaxes(1, 2) + c
        total = total.reshape(num_warps, 2, 8, count, 4, 2).transpose(3, 1, 0, 2, 4, 5)
        if result == "f32":
            bits = np.ascontiguousarray(total.transpose(0, 1, 5, 2, 3, 4)).view(np.uint32)
        else:
            bits = np.ascontiguousarray(total.astype(np.float16)).view(np.uint32)
        write(ix, bits.reshape(-1, 32 * num_warps))

    return multiply
