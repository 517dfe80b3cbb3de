"""Matrix instructions of a warp: ldmatrix, stmatrix and mma.sync.

Lane 4 g + t of a warp holds the elements 2 t and 2 t + 1 of row g of an 8 x 8 matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .decode import Control, address, control, space_of
from .errors import PtxError
from .scalars import NUMPY, halves_to_f32
from .shared_memory import GENERIC_SHARED
from .syntax import Inst, Operand, Reg, Vec
from .tensor_core_sums import AMPERE, add_products
from .warp import when_converged

if TYPE_CHECKING:
    from .machine import Machine

__all__ = ["register_rows"]

_MATRIX_MODIFIERS = "sync aligned m8n8 x1 x2 x4 trans shared shared::cta"
_MMA_SHAPES = ("m16n8k4", "m16n8k8", "m16n8k16", "m8n8k4")
_COLUMNS = {"f16": 8, "bf16": 8, "tf32": 4, "f64": 4}  # of an operand's 8 rows, in one register of each lane
_TF32_MASK = np.uint32(0xFFFFE000)
_LONGEST_RUN = 32


def _items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vec) else (operand,)


def register_rows(machine: Machine, operands: tuple[Operand, ...], width: int = 32) -> Callable[[Any], np.ndarray]:
    """Returns a closure from threads to the bits of registers of a width: (registers, threads)."""
    if all(isinstance(operand, Reg) and operand.width == width for operand in operands):
        file, index = machine.registers.rows[width], np.array([operand.index for operand in operands])
        if (np.diff(index) == 1).all():
            rows = file[index[0] : index[-1] + 1]
            return lambda ix: rows[:, ix]
        return lambda ix: file[index, ix] if isinstance(ix, slice) else file[index[:, None], ix]
    sources = [machine.source(operand, f"b{width}") for operand in operands]
    return lambda ix: np.stack([source[ix] for source in sources])


def _write_rows(machine: Machine, operands: tuple[Operand, ...], width: int = 32) -> Callable[[Any, np.ndarray], None]:
    targets = [machine.destination(operand, f"b{width}") for operand in operands]

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
    sums = {"f64"} if a == "f64" else {"f32", "f16"}
    if a != b or a not in ("f16", "bf16", "tf32", "f64") or {result, addend} - sums:
        raise PtxError(f"mma of these types is not implemented: {' '.join(inst.types)}")
    shape = next(part for part in inst.parts if part in _MMA_SHAPES)
    row_halves, depth = (1 if shape == "m8n8k4" else 2), int(shape.partition("k")[2])
    if (row_halves == 1 and a != "f64") or (depth == 4 and a not in ("tf32", "f64")):
        raise PtxError("mma of this shape is not implemented")
    of_a, of_b = row_halves * depth // _COLUMNS[a], depth // _COLUMNS[a]
    of_c = row_halves * (1 if result == "f16" else 2)
    if [len(arg.items) for arg in inst.args] != [of_c, of_a, of_b, of_c]:
        raise PtxError("mma of this shape has other fragments")
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
    """Returns elements of fragments, in float32 or float64: (registers, warps, 8 rows, elements of a row)."""
    shape = (len(bits), num_warps, 8, _COLUMNS[ty])
    if ty == "f64":
        return bits.view(np.float64).reshape(shape)
    if ty == "tf32":
        return (bits & _TF32_MASK).view(np.float32).reshape(shape)
    return halves_to_f32(np.ascontiguousarray(bits).view(np.uint16), ty).reshape(shape)


def _product(machine: Machine, run: list[Inst], depth: int) -> Callable[[Any, int], None]:
    """Returns a closure that multiplies A by the B of all instructions, side by side, for threads of whole warps."""
    result, ty, _, addend = run[0].types
    count, halves = len(run), len(run[0].args[1].items) * _COLUMNS[ty] // depth
    width = 64 if ty == "f64" else 32
    read_a = register_rows(machine, run[0].args[1].items, width)
    read_b, read_c = (register_rows(machine, sum((i.args[k].items for i in run), ()), width) for k in (2, 3))
    write = _write_rows(machine, sum((inst.args[0].items for inst in run), ()), width)

    def multiply(ix: Any, num_warps: int) -> None:
        a = _values(read_a(ix), ty, num_warps)  # register = row half + halves * column part
        a = a.reshape(-1, halves, *a.shape[1:]).transpose(2, 1, 3, 0, 4).reshape(num_warps, 8 * halves, depth)
        b = _values(read_b(ix), ty, num_warps)
        b = b.reshape(count, -1, *b.shape[1:]).transpose(2, 0, 3, 1, 4).reshape(num_warps, 8 * count, depth)
        bits, shape = read_c(ix), (count, halves, num_warps, 8, 4, 2)
        if addend == "f16":
            c = np.ascontiguousarray(bits).view(np.float16).reshape(shape)
        else:
            c = bits.view(NUMPY[addend]).reshape(count, halves, 2, num_warps, 8, 4).transpose(0, 1, 3, 4, 5, 2)
        # Transposed from (instruction, row half, warp, g, t, element) to (warp, row half, g, instruction, t, element).
        c = c.transpose(2, 1, 3, 0, 4, 5).reshape(num_warps, 8 * halves, 8 * count)
        if ty == "f64":  # as on an H200, whose errors are those of this order
            total = c
            for k in range(depth):
                total = total + a[..., k, None] * b[:, None, :, k]
        else:
            total = add_products(AMPERE, c.astype(np.float32), a, b) if machine.cuts_sums else a @ b.swapaxes(1, 2) + c
        total = total.reshape(num_warps, halves, 8, count, 4, 2).transpose(3, 1, 0, 2, 4, 5)
        if result == "f16":
            bits = np.ascontiguousarray(total.astype(np.float16)).view(np.uint32)
        else:
            bits = np.ascontiguousarray(total.transpose(0, 1, 5, 2, 3, 4)).view(f"u{width // 8}")
        write(ix, bits.reshape(-1, 32 * num_warps))

    return multiply
