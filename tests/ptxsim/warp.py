"""Warp-level operations: shuffles, votes, matches, reductions, and the waiting for the lanes that take part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from .decode import Control, Plain, control, plain
from .errors import PtxError
from .scalars import INT64, REDUCTIONS
from .syntax import Inst, Pair

if TYPE_CHECKING:
    from .machine import Machine

__all__ = ["when_converged"]


def when_converged(machine: Machine, inst: Inst, mask: Any, work: Control, moves_on: bool = True) -> Control:
    """Returns the closure of an instruction that waits for the lanes of the mask (without a mask, all running ones)."""

    def run(threads: np.ndarray) -> None:
        ready, waiting = machine.split_converged(threads, None if mask is None else mask[threads])
        if len(waiting):
            machine.park(inst.pc, waiting)
        if len(ready):
            work(ready)
            if moves_on:
                machine.push(inst.pc + 1, ready)

    return run


@control("shfl.sync", allow="up down bfly idx")
def _shuffle(machine: Machine, inst: Inst) -> Control:
    target, value = machine.destination(inst.args[0], "b32"), machine.source(inst.args[1], "b32")
    valid = machine.destination(inst.args[0].second, "pred") if isinstance(inst.args[0], Pair) else None
    lane_row, clamp_row, mask = (machine.source(arg, "u32") for arg in inst.args[2:5])
    mode = inst.parts[1]

    def work(threads: np.ndarray) -> None:
        lane = threads & 31
        operand, clamp = lane_row[threads].astype(INT64) & 31, clamp_row[threads].astype(INT64)
        segment = (clamp >> 8) & 31
        limit = (lane & segment) | (clamp & 31 & ~segment)
        if mode == "up":
            other = lane - operand
            inside = other >= limit
        else:
            other = {
                "down": lambda: lane + operand,
                "bfly": lambda: lane ^ operand,
                "idx": lambda: (lane & segment) | (operand & ~segment),
            }[mode]()
            inside = other <= limit
        target[threads] = value[threads - lane + np.where(inside, other, lane)]
        if valid is not None:
            valid[threads] = inside

    return when_converged(machine, inst, mask, work)


def _lanes(machine: Machine, threads: np.ndarray, chosen: np.ndarray | None = None) -> np.ndarray:
    """Returns for each thread the bits of the lanes of its warp that are here (and chosen)."""
    warps, bits = threads >> 5, np.left_shift(1, threads & 31)
    return np.bincount(warps, bits if chosen is None else bits * chosen, machine.num_warps).astype(INT64)[warps]


@control("vote.sync", allow="all any uni ballot")
def _vote(machine: Machine, inst: Inst) -> Control:
    target = machine.destination(inst.args[0], inst.type)
    predicate, mask = machine.source(inst.args[1], "pred"), machine.source(inst.args[2], "u32")
    decide = {
        "ballot": lambda true, here: true,
        "any": lambda true, here: true != 0,
        "all": lambda true, here: true == here,
        "uni": lambda true, here: (true == here) | (true == 0),
    }[inst.parts[1]]

    def work(threads: np.ndarray) -> None:
        members = mask[threads].astype(INT64)
        true = _lanes(machine, threads, predicate[threads]) & members
        target[threads] = decide(true, _lanes(machine, threads) & members)

    return when_converged(machine, inst, mask, work)


@plain("activemask")
def _active_mask(machine: Machine, inst: Inst) -> Plain:
    target = machine.destination(inst.args[0], "b32")

    def run(ix: Any) -> None:
        target[ix] = _lanes(machine, machine.threads[ix])

    return run


def _by_warp(threads: np.ndarray) -> Iterator[np.ndarray]:
    """Yields for each warp which of the threads are its own."""
    warps = threads >> 5
    for warp in np.unique(warps):
        yield np.nonzero(warps == warp)[0]


@control("match", allow="sync any all")
def _match(machine: Machine, inst: Inst) -> Control:
    target = machine.destination(inst.args[0], "b32")
    agreed = machine.destination(inst.args[0].second, "pred") if isinstance(inst.args[0], Pair) else None
    value, mask = machine.source(inst.args[1], inst.type), machine.source(inst.args[2], "u32")

    def work(threads: np.ndarray) -> None:
        for chosen in _by_warp(threads):
            mine = threads[chosen]
            bits, values = np.left_shift(1, mine & 31), value[mine]
            same = values[:, None] == values[None, :]
            if "any" in inst.parts:
                target[mine] = (same * bits).sum(1)
                continue
            target[mine] = bits.sum() if same.all() else 0
            if agreed is not None:
                agreed[mine] = same.all()

    return when_converged(machine, inst, mask, work)


@control("redux", allow="sync add min max and or xor")
def _reduce(machine: Machine, inst: Inst) -> Control:
    reduce = REDUCTIONS[inst.parts[1]].reduce
    if inst.type == "f32":
        raise PtxError("redux of floating-point numbers is not implemented")
    target, value = machine.destination(inst.args[0], inst.type), machine.source(inst.args[1], inst.type)

    def work(threads: np.ndarray) -> None:
        values = value[threads]
        for chosen in _by_warp(threads):
            target[threads[chosen]] = reduce(values[chosen], dtype=values.dtype)

    return when_converged(machine, inst, machine.source(inst.args[2], "u32"), work)


@control("elect", allow="sync")
def _elect(machine: Machine, inst: Inst) -> Control:
    lane = machine.destination(inst.args[0].first, "b32")
    elected, mask = machine.destination(inst.args[0].second, "pred"), machine.source(inst.args[1], "u32")

    def work(threads: np.ndarray) -> None:
        for chosen in _by_warp(threads):
            mine = threads[chosen]
            lane[mine] = mine[0] & 31
            elected[mine] = mine == mine[0]

    return when_converged(machine, inst, mask, work)
