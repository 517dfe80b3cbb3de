"""Loads and stores of all state spaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .decode import CACHE_MODIFIERS, SPACES, Plain, address, plain, space_of
from .errors import AccessError, PtxError
from .memory import columns, joined
from .scalars import NUMPY, WIDTH, unsigned
from .shared_memory import GENERIC_LOCAL, GENERIC_PARAM, GENERIC_SHARED
from .syntax import Addr, Imm, Inst, Operand, Sym, Vec

if TYPE_CHECKING:
    from .machine import Machine
    from .race import Order

__all__ = ["bits_of", "load_words", "order_of", "store_words"]

_WINDOW_BITS = 40
_GENERIC = {
    GENERIC_SHARED >> _WINDOW_BITS: ("shared", GENERIC_SHARED),
    GENERIC_PARAM >> _WINDOW_BITS: ("param", GENERIC_PARAM),
    GENERIC_LOCAL >> _WINDOW_BITS: ("local", GENERIC_LOCAL),
}
_WIDEST = 16  # bytes of one access
_STRONG = {"volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"}


def order_of(inst: Inst) -> Order | None:
    """Returns what a strong access orders, with cta if its scope is only its block; None for a weak access."""
    parts = set(inst.parts)
    if inst.op not in ("atom", "red") and not parts & _STRONG:
        return None
    order = {"acquire", "release"} if "acq_rel" in parts else parts & {"acquire", "release"}
    order |= parts & {"cta"}
    return frozenset(order | {"rmw"} if inst.op in ("atom", "red") else order)


def _by_space(addresses: np.ndarray) -> list[tuple[str, np.ndarray | None, np.ndarray]]:
    """Returns generic addresses as [(space, which of them or None for all, addresses in that space)]."""
    windows = addresses >> _WINDOW_BITS
    first = int(windows[0])
    if (windows == first).all():
        space, start = _GENERIC.get(first, ("global", 0))
        return [(space, None, addresses - start if start else addresses)]
    parts = []
    for window in np.unique(windows):
        chosen = np.nonzero(windows == window)[0]
        space, start = _GENERIC.get(int(window), ("global", 0))
        parts.append((space, chosen, addresses[chosen] - start))
    return parts


def load_words(
    machine: Machine, ix: Any, space: str, addresses: np.ndarray, nbytes: int, order: Order | None = None
) -> np.ndarray:
    """Loads one aligned word for every thread."""
    if space == "generic":
        parts = _by_space(addresses)
        if parts[0][1] is None:
            return load_words(machine, ix, parts[0][0], parts[0][2], nbytes, order)
        words = np.empty((len(addresses), 2) if nbytes == 16 else len(addresses), unsigned(min(nbytes, 8)))
        for part, chosen, inside in parts:
            words[chosen] = load_words(machine, machine.threads[ix][chosen], part, inside, nbytes, order)
        return words
    if space in ("shared", "shared::cluster"):
        offset = machine.shared.resolve(ix, addresses, nbytes, space == "shared::cluster")
        return machine.shared.load(ix, offset, nbytes, order)
    _check_alignment(machine, ix, space, addresses, nbytes)
    if space in ("global", "const"):
        try:
            parts = machine.memory.locate(addresses, nbytes, "read")
            words = machine.memory.load(parts, nbytes, machine.check_uninit)
        except AccessError as error:
            machine.fault(error.problem, ix, error.index)
        if machine.global_race is not None and space == "global":
            machine.global_race.read(machine.threads[ix], parts, nbytes, order)
        return words
    if space == "local":
        return _word_view(machine.local.reshape(-1), nbytes).take(_local_index(machine, ix, addresses, nbytes), axis=0)
    if space == "param":
        bad = (addresses < 0) | (addresses + nbytes > machine.params_nbytes)
        if bad.any():
            k = int(np.argmax(bad))
            machine.fault(
                f"parameter access out of bounds: {nbytes} bytes at offset {int(addresses[k])} of "
                f"{machine.params_nbytes} bytes of arguments",
                ix,
                k,
            )
        return _word_view(machine.params, nbytes).take(addresses // nbytes, axis=0)
    raise PtxError(f"loads from {space} are not implemented")


def store_words(
    machine: Machine,
    ix: Any,
    space: str,
    addresses: np.ndarray,
    nbytes: int,
    words: np.ndarray,
    order: Order | None = None,
) -> None:
    if space == "generic":
        for part, chosen, inside in _by_space(addresses):
            threads = ix if chosen is None else machine.threads[ix][chosen]
            store_words(machine, threads, part, inside, nbytes, words if chosen is None else words[chosen], order)
        return
    if space in ("shared", "shared::cluster"):
        offset = machine.shared.resolve(ix, addresses, nbytes, space == "shared::cluster")
        machine.shared.store(ix, offset, nbytes, words, order)
        return
    _check_alignment(machine, ix, space, addresses, nbytes)
    if space == "global":
        try:
            parts = machine.memory.locate(addresses, nbytes, "write")
        except AccessError as error:
            machine.fault(error.problem, ix, error.index)
        if machine.global_race is not None:
            machine.global_race.write(machine.threads[ix], parts, nbytes, order)
        machine.memory.store(parts, nbytes, words)
    elif space == "local":
        _word_view(machine.local.reshape(-1), nbytes)[_local_index(machine, ix, addresses, nbytes)] = words
    else:
        raise PtxError(f"stores to {space} are not implemented")


def _word_view(data: np.ndarray, nbytes: int) -> np.ndarray:
    return data.view(np.uint64).reshape(-1, 2) if nbytes == 16 else data.view(unsigned(nbytes))


def _check_alignment(machine: Machine, ix: Any, space: str, addresses: np.ndarray, nbytes: int) -> None:
    crooked = addresses & (nbytes - 1)
    if np.count_nonzero(crooked):
        k = int(np.argmax(crooked != 0))
        where = f"0x{int(addresses[k]):x}"
        if space == "global":
            try:
                buffer = machine.memory.find(int(addresses[k]))
                where += f", offset {int(addresses[k]) - buffer.address} of {buffer.name}"
            except AccessError:
                where += ", outside of every buffer"
        machine.fault(f"misaligned {space} access: {nbytes} bytes at {where}", ix, k)


def _local_index(machine: Machine, ix: Any, addresses: np.ndarray, nbytes: int) -> np.ndarray:
    size = machine.local.shape[1]
    bad = (addresses < 0) | (addresses + nbytes > size)
    if bad.any():
        k = int(np.argmax(bad))
        machine.fault(f"local access out of bounds: {nbytes} bytes at {int(addresses[k])} of {size}", ix, k)
    return (machine.threads[ix] * size + addresses) // nbytes


def _access(machine: Machine, inst: Inst, pointer: Operand, values: Operand) -> tuple[str, tuple[Operand, ...], int]:
    """Returns the state space of a load or store, its registers, and the bytes of each register."""
    space, size = space_of(inst), WIDTH[inst.type] // 8
    base = pointer.base if isinstance(pointer, Addr) else pointer
    if space == "param" and isinstance(base, Sym):
        # Arguments of inlined functions are variables in local memory.
        space = machine.kernel.variables[base.name].space
    items = values.items if isinstance(values, Vec) else (values,)
    if len(items) * size > _WIDEST:
        raise PtxError(f"an access of {len(items) * size} bytes is not implemented")
    return space, items, size


@plain("ld", "ldu", allow=f"{SPACES} {CACHE_MODIFIERS} v2 v4")
def _load(machine: Machine, inst: Inst) -> Plain:
    space, items, size = _access(machine, inst, inst.args[1], inst.args[0])
    # Only integers are widened by their sign; other types are bits.
    ty = inst.type if inst.type[0] in "su" else f"b{8 * size}"
    targets = [machine.destination(item, ty) for item in items]
    order = order_of(inst)
    pointer, dtype, count = inst.args[1], NUMPY[ty], len(items)
    if space == "param" and isinstance(pointer, Addr) and isinstance(pointer.base, Sym):
        return _load_argument(machine, pointer, targets, dtype)
    addresses = address(machine, pointer)
    if count == 1:
        (target,) = targets

        def run(ix: Any) -> None:
            target[ix] = load_words(machine, ix, space, addresses(ix), size, order).view(dtype)

        return run

    def run_vector(ix: Any) -> None:
        values = columns(load_words(machine, ix, space, addresses(ix), size * count, order), size, count).view(dtype)
        for k, target in enumerate(targets):
            target[ix] = values[:, k]

    return run_vector


def _load_argument(machine: Machine, pointer: Addr, targets: list[Any], dtype: type) -> Plain:
    start = machine.symbol_address(pointer.base.name) + pointer.offset
    nbytes = len(targets) * np.dtype(dtype).itemsize
    if start + nbytes > machine.params_nbytes:
        raise PtxError(f"parameter access out of bounds: bytes {start} to {start + nbytes} of {machine.params_nbytes}")
    values = machine.params[start : start + nbytes].view(dtype)

    def run(ix: Any) -> None:
        for target, value in zip(targets, values, strict=True):
            target[ix] = value

    return run


@plain("st", allow=f"{SPACES} {CACHE_MODIFIERS} v2 v4")
def _store(machine: Machine, inst: Inst) -> Plain:
    space, items, size = _access(machine, inst, inst.args[0], inst.args[1])
    sources = [bits_of(machine, item, inst.type) for item in items]
    addresses = address(machine, inst.args[0])
    nbytes, order = size * len(items), order_of(inst)

    def run(ix: Any) -> None:
        words = joined([source[ix] for source in sources])
        store_words(machine, ix, space, addresses(ix), nbytes, words, order)

    return run


def bits_of(machine: Machine, operand: Operand, ty: str) -> Any:
    """Returns the row of an operand as unsigned bits; a constant is rounded to the type first."""
    bits = f"b{WIDTH[ty]}"
    if not isinstance(operand, Imm):
        return machine.source(operand, bits)
    value = machine.registers.constant(operand, ty)
    return machine.full(value.view(NUMPY[bits]), NUMPY[bits])
