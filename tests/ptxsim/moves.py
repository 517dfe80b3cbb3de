"""Moves between registers, and addresses between state spaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .decode import Plain, plain, space_of
from .errors import PtxError
from .load_store import bits_of
from .scalars import INT64, NUMPY, WIDTH
from .shared_memory import GENERIC_LOCAL, GENERIC_PARAM, GENERIC_SHARED, RANK_SHIFT, WINDOW
from .syntax import Addr, Imm, Inst, Sym, Vec

if TYPE_CHECKING:
    from .machine import Machine

__all__ = []

_WINDOWS = {"shared": GENERIC_SHARED, "local": GENERIC_LOCAL, "param": GENERIC_PARAM}
_SPACES = "global const shared shared::cta shared::cluster local param param::entry"


@plain("mov")
def _move(machine: Machine, inst: Inst) -> Plain:
    target, value = inst.args
    if isinstance(target, Vec):
        return _unpack(machine, inst)
    if isinstance(value, Vec):
        return _pack(machine, inst)
    # Values move as bits, because a float type would convert them.
    ty = "pred" if inst.type == "pred" else f"b{WIDTH[inst.type]}"
    if isinstance(value, (Sym, Addr)):
        ty = f"u{WIDTH[inst.type]}"
    destination = machine.destination(target, ty)
    is_number = isinstance(value, Imm) and isinstance(value.value, tuple)  # a float, with its written precision
    source = bits_of(machine, value, inst.type) if is_number else machine.source(value, ty)

    def run(ix: Any) -> None:
        destination[ix] = source[ix]

    return run


def _pack(machine: Machine, inst: Inst) -> Plain:
    items = inst.args[1].items
    width = WIDTH[inst.type] // len(items)
    sources = [machine.source(item, f"b{width}") for item in items]
    wide = NUMPY[f"u{WIDTH[inst.type]}"]
    destination = machine.destination(inst.args[0], f"u{WIDTH[inst.type]}")

    def run(ix: Any) -> None:
        value = sources[0][ix].astype(wide)
        for number, source in enumerate(sources[1:], start=1):
            value = value | source[ix].astype(wide) << wide(width * number)
        destination[ix] = value

    return run


def _unpack(machine: Machine, inst: Inst) -> Plain:
    items = inst.args[0].items
    width = WIDTH[inst.type] // len(items)
    destinations = [machine.destination(item, f"b{width}") for item in items]
    wide, narrow = NUMPY[f"u{WIDTH[inst.type]}"], NUMPY[f"u{width}"]
    source = machine.source(inst.args[1], f"u{WIDTH[inst.type]}")

    def run(ix: Any) -> None:
        value = source[ix]
        for number, destination in enumerate(destinations):
            destination[ix] = (value >> wide(width * number)).astype(narrow)

    return run


@plain("cvta", allow=f"to {_SPACES}")
def _convert_address(machine: Machine, inst: Inst) -> Plain:
    """Converts addresses; 32-bit ones have no window and stay as they are."""
    ty, space = inst.type, space_of(inst)
    if space == "shared::cluster":
        space = "shared"
    offset = _WINDOWS.get(space, 0) if WIDTH[ty] == 64 else 0
    offset = NUMPY[ty]((-offset if "to" in inst.parts else offset) & ((1 << WIDTH[ty]) - 1))
    destination, source = machine.destination(inst.args[0], ty), machine.source(inst.args[1], ty)

    def run(ix: Any) -> None:
        destination[ix] = source[ix] + offset

    return run


@plain("isspacep", allow=_SPACES)
def _is_in_space(machine: Machine, inst: Inst) -> Plain:
    space = space_of(inst)
    if space in ("const", "shared::cluster"):
        raise PtxError(f"isspacep.{space} is not implemented")
    start = _WINDOWS.get(space)
    destination, source = machine.destination(inst.args[0], "pred"), machine.source(inst.args[1], "u64")

    def run(ix: Any) -> None:
        value = source[ix]
        destination[ix] = value < GENERIC_SHARED if start is None else (value >= start) & (value < start + WINDOW)

    return run


@plain("mapa", allow="shared::cluster")
def _map_to_rank(machine: Machine, inst: Inst) -> Plain:
    ty = inst.type
    destination, source = machine.destination(inst.args[0], ty), machine.source(inst.args[1], ty)
    rank = machine.source(inst.args[2], "u32")
    window = 0 if "shared::cluster" in inst.parts else GENERIC_SHARED
    mask = (1 << RANK_SHIFT) - 1

    def run(ix: Any) -> None:
        offset = source[ix].astype(INT64) & mask
        value = (offset | (rank[ix].astype(INT64) + 1) << RANK_SHIFT) + window
        destination[ix] = value.astype(NUMPY[ty])

    return run
