"""Special registers: the position of a thread, the sizes around it, clocks and lane masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import PtxError

if TYPE_CHECKING:
    from .machine import Machine

__all__ = ["special_register"]

_CLOCKS = ("clock", "clock64", "clock_hi", "globaltimer", "globaltimer_lo", "globaltimer_hi")
_MULTIPROCESSORS = 132


class _ClockRow:
    """The row of %clock and its like, which count executed instructions."""

    def __init__(self, machine: Machine, dtype: type, shift: int) -> None:
        self.machine, self.dtype, self.shift = machine, dtype, shift

    def __getitem__(self, ix: Any) -> np.ndarray:
        count = self.machine.executed >> self.shift & (1 << (8 * np.dtype(self.dtype).itemsize)) - 1
        return np.full(len(self.machine.threads[ix]), count, self.dtype)


def special_register(machine: Machine, name: str, dtype: type) -> Any:
    """Returns the row of %name."""
    base, _, axis = name[1:].partition(".")
    if base in _CLOCKS:
        return _ClockRow(machine, dtype, 32 if base.endswith("_hi") else 0)
    if base == "ctaid":  # a view, because it is filled anew for every batch; the next, for every launch
        return machine.block_index["xyz".index(axis)].view(dtype)
    if base == "nctaid":
        return machine.grid_size["xyz".index(axis)].view(dtype)
    return np.ascontiguousarray(np.broadcast_to(_value(machine, base, axis), len(machine.threads))).astype(dtype)


def _value(machine: Machine, base: str, axis: str) -> Any:
    thread = machine.threads % machine.padded_threads
    rank = machine.block_of % machine.cluster_size
    by_axis = {
        "tid": lambda k: _coordinate(thread, machine.block, k),
        "ntid": lambda k: machine.block[k],
        "cluster_ctaid": lambda k: _coordinate(rank, machine.kernel.cluster, k),
        "cluster_nctaid": lambda k: machine.kernel.cluster[k],
    }
    scalar = {
        "laneid": lambda: thread & 31,
        "warpid": lambda: thread >> 5,
        "nwarpid": lambda: machine.padded_threads // 32,
        "smid": lambda: 0,
        "gridid": lambda: 0,
        "nsmid": lambda: _MULTIPROCESSORS,
        "cluster_ctarank": lambda: rank,
        "cluster_nctarank": lambda: machine.cluster_size,
        "is_explicit_cluster": lambda: machine.cluster_size > 1,
        "dynamic_smem_size": lambda: machine.dynamic_bytes,
        "total_smem_size": lambda: machine.shared.nbytes,
    }
    if base in by_axis and axis in ("x", "y", "z"):
        return by_axis[base]("xyz".index(axis))
    if base in scalar and not axis:
        return scalar[base]()
    if base.startswith("lanemask_"):
        lane = (thread & 31).astype(np.uint64)
        equal = np.uint64(1) << lane
        less = equal - np.uint64(1)
        masks = {"lt": less, "le": less | equal, "eq": equal, "gt": ~(less | equal), "ge": ~less}
        if base[9:] in masks:
            return masks[base[9:]] & np.uint64(0xFFFFFFFF)
    raise PtxError(f"special register %{base}{'.' + axis if axis else ''} is not implemented")


def _coordinate(index: np.ndarray, extent: tuple[int, int, int], axis: int) -> np.ndarray:
    return index // (1, extent[0], extent[0] * extent[1])[axis] % extent[axis]
