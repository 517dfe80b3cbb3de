"""Atomic operations on global and shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .decode import CACHE_MODIFIERS, Plain, address, plain, space_of
from .errors import PtxError
from .load_store import bits_of, load_words, order_of, store_words
from .memory import columns, joined
from .scalars import NUMPY, REDUCTIONS, WIDTH, bf16_to_f32, f32_to_bf16
from .shared_memory import GENERIC_SHARED, WINDOW
from .syntax import Inst, Operand, Vec

if TYPE_CHECKING:
    from .machine import Machine

__all__ = []


def _increment(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where(old >= limit, 0, old + 1).astype(old.dtype)


def _decrement(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where((old == 0) | (old > limit), limit, old - 1).astype(old.dtype)


_OPERATIONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    **REDUCTIONS,
    "exch": lambda old, new: new,
    "inc": _increment,
    "dec": _decrement,
}


def _items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vec) else (operand,)


def _numbers(bits: np.ndarray, ty: str) -> np.ndarray:
    if ty.startswith("bf"):
        return bf16_to_f32(bits.view(np.uint16))
    return bits.view(np.float16 if ty == "f16x2" else NUMPY[ty])


def _bits(numbers: np.ndarray, ty: str) -> np.ndarray:
    halves = f32_to_bf16(numbers) if ty.startswith("bf") else np.ascontiguousarray(numbers)
    return halves.view(NUMPY[f"b{WIDTH[ty]}"])


@plain(
    "atom",
    "red",
    allow=f"global shared shared::cta shared::cluster {CACHE_MODIFIERS} noftz v2 v4 cas {' '.join(_OPERATIONS)}",
)
def _atomic(machine: Machine, inst: Inst) -> Plain:
    """Lets threads with the same address take turns, lowest thread first."""
    ty, space = inst.type, space_of(inst)
    size, order = WIDTH[ty] // 8, order_of(inst)
    args = list(inst.args)
    returned = _items(args.pop(0)) if inst.op == "atom" else ()
    kind = next(part for part in inst.parts if part in _OPERATIONS or part == "cas")
    addresses = address(machine, args[0])
    operands = _items(args[1])
    if kind == "cas":
        operands += (args[2],)
    count = 1 if kind == "cas" else len(operands)
    if count * size > 16:
        raise PtxError(f"an atomic operation on {count * size} bytes is not implemented")
    sources = [bits_of(machine, operand, ty) for operand in operands]
    targets = [machine.destination(operand, f"b{WIDTH[ty]}") for operand in returned]

    def new_values(old: np.ndarray, values: list[np.ndarray]) -> list[np.ndarray]:
        if kind == "cas":
            expected, desired = values
            return [np.where(old[:, 0] == expected, desired, old[:, 0])]
        combine = _OPERATIONS[kind]
        columns_ = (np.ascontiguousarray(old[:, k]) for k in range(count))
        pairs = zip(columns_, values, strict=True)
        return [_bits(combine(_numbers(o, ty), _numbers(v, ty)), ty) for o, v in pairs]

    def run(ix: Any) -> None:
        where, values = addresses(ix), [np.ascontiguousarray(source[ix]) for source in sources]
        threads = machine.threads[ix]
        before = np.empty((len(where), count), NUMPY[f"b{WIDTH[ty]}"])
        for turn in _turns(_places(machine, threads, where, space)):
            mine, at = (threads, where) if len(turn) == len(where) else (threads[turn], where[turn])
            old = columns(load_words(machine, mine, space, at, size * count, order), size, count)
            new = new_values(old, [value if mine is threads else value[turn] for value in values])
            store_words(machine, mine, space, at, size * count, joined(new), order)
            before[slice(None) if mine is threads else turn] = old
        for k, target in enumerate(targets):
            target[ix] = before[:, k]

    return run


def _places(machine: Machine, threads: np.ndarray, addresses: np.ndarray, space: str) -> np.ndarray:
    """Returns addresses with the block added to shared ones, which mean another place in another block."""
    if space == "global":
        return addresses
    shared = (addresses >= GENERIC_SHARED) & (addresses < GENERIC_SHARED + WINDOW) if space == "generic" else True
    return np.where(shared, addresses + (machine.block_of[threads] << 48), addresses)


def _turns(places: np.ndarray) -> list[np.ndarray]:
    """Returns accesses in turns that have no place twice; without a conflict, all of them in order in one turn."""
    order = np.argsort(places, kind="stable")
    ordered = places[order]
    same = ordered[1:] == ordered[:-1]
    if not same.any():
        return [np.arange(len(places))]
    starts = np.concatenate(([True], ~same))
    position = np.arange(len(places))
    turn = position - np.maximum.accumulate(np.where(starts, position, 0))
    return [order[turn == k] for k in range(int(turn.max()) + 1)]
