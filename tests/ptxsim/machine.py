"""The machine: the threads of a batch of blocks, and the scheduler that runs one group of them after another.

Groups are the threads at one program counter. A register is a NumPy row over all threads of the batch, so one Python
step executes an instruction for a whole group. The group with the smallest program counter comes first, so that
diverged warps meet again; no group starves. Between two control instructions a group runs a list of plain closures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from . import instructions  # noqa: F401  (fills the table that build() looks into)
from .banks import BankCounter
from .barriers import Barriers
from .decode import build
from .errors import PtxError
from .global_race import GlobalRaceDetector
from .mbarrier import Mbarriers
from .memory import Memory
from .race import RaceDetector
from .registers import RegisterFile
from .shared_memory import SharedMemory
from .syntax import Inst, Kernel
from .wgmma_registers import WgmmaRegisters

if TYPE_CHECKING:
    from .module import Module

__all__ = ["Machine", "Options"]

_FAR = 1 << 60
_STARVING = 400  # rounds that a group may wait while others run

Trace = Callable[["Machine", Inst, np.ndarray], None]


@dataclass(frozen=True)
class Options:
    """How a launch runs; see Module.launch."""

    check_uninit: bool = True
    trace: Trace | None = None
    seed: int | None = None
    max_rounds: int = 5_000_000
    block_races: bool = True
    cuts_sums: bool = False
    counts_banks: bool = False


class Machine:
    """Runs batches of blocks of a kernel, of one launch after another.

    Attributes
    ----------
    threads : numpy.ndarray
        Numbers of all threads of the batch, block after block, each padded to whole warps.
    block_of, warp_of : numpy.ndarray
        For each thread, its block and its warp within the batch.
    block_index, grid_size : numpy.ndarray
        %ctaid of each thread, filled for every batch, and %nctaid, for every launch.
    """

    def __init__(
        self,
        module: Module,
        kernel: Kernel,
        memory: Memory,
        block: tuple[int, int, int],
        dynamic_bytes: int,
        num_blocks: int,
        race_check: bool,
    ) -> None:
        self.module, self.kernel, self.memory, self.block = module, kernel, memory, block
        self.params_nbytes = max((param.offset + param.nbytes for param in kernel.params), default=0)
        self.params = np.zeros(-(-max(self.params_nbytes, 16) // 16) * 16, np.uint8)
        self.dynamic_bytes = dynamic_bytes
        self.num_blocks = num_blocks
        self._used = 0  # threads of the previous launch
        self.uses_memory_of_module = False  # decoded instructions contain its addresses
        self.num_threads = block[0] * block[1] * block[2]
        self.padded_threads = -(-self.num_threads // 32) * 32
        self.cluster_size = kernel.cluster[0] * kernel.cluster[1] * kernel.cluster[2]
        self.threads = np.arange(self.padded_threads * num_blocks)
        self.num_warps = len(self.threads) // 32
        self.warp_of = self.threads >> 5
        self.block_of = self.threads // self.padded_threads
        self.block_index, self.grid_size = np.zeros((2, 3, len(self.threads)), np.uint32)

        self.registers = RegisterFile(self, kernel.registers)
        self.source, self.destination = self.registers.source, self.registers.destination
        self.full = self.registers.full
        self.shared = SharedMemory(self, {**kernel.variables, **module.program.variables}, dynamic_bytes)
        self.local = np.zeros((len(self.threads), -(-max(kernel.local_bytes, 16) // 16) * 16), np.uint8)
        self.race = RaceDetector(self) if race_check else None
        self.global_race: GlobalRaceDetector | None = None  # of a launch
        self.barriers = Barriers(self)
        self.mbarriers = Mbarriers(self)
        multiplies = any(inst.op == "wgmma" for inst in kernel.insts)
        self.wgmma_registers = WgmmaRegisters(self) if race_check and multiplies else None
        self._decode()

    def begin(self, memory: Memory, grid: tuple[int, int, int], params: bytes, options: Options) -> None:
        """Begins a launch, with nothing left of the previous one."""
        self.memory, self.grid, self._options = memory, grid, options
        self.params[: len(params)] = np.frombuffer(params, np.uint8)
        self.grid_size[:] = np.array(grid, np.uint32)[:, None]
        self.check_uninit, self.cuts_sums = options.check_uninit, options.cuts_sums
        self.executed = self.thread_instructions = 0
        self.banks = BankCounter() if options.counts_banks else None
        if self.race is not None and options.block_races:
            self.global_race = GlobalRaceDetector(self, self.race, grid[0] * grid[1] * grid[2])
        self._random = None if options.seed is None else np.random.default_rng(options.seed)
        used, self._used = self._used, min(self.num_blocks, grid[0] * grid[1] * grid[2]) * self.padded_threads
        if used:
            for rows in self.registers.rows.values():
                rows[:, :used] = 0
            self.local[:used] = 0

    def take_apart(self) -> None:
        """Frees the arrays of an unused machine, whose parts refer to it and wait for the garbage collector."""
        vars(self).clear()

    def _decode(self) -> None:
        self._steps: list[Callable] = []
        is_control = []
        for inst in self.kernel.insts:
            try:
                step, ends = build(self, inst)
            except PtxError as error:
                raise PtxError(f"cannot decode: {error.problem}{self._place(inst)}") from None
            except Exception as error:
                raise PtxError(f"cannot decode: {type(error).__name__}: {error}{self._place(inst)}") from error
            self._steps.append(step)
            is_control.append(ends)
        # For every instruction, the next one that is a control instruction.
        self._stop = [0] * len(is_control)
        following = len(is_control) - 1
        for pc in range(len(is_control) - 1, -1, -1):
            following = pc if is_control[pc] else following
            self._stop[pc] = following

    def symbol_address(self, name: str) -> int:
        """Returns the address of a symbol in its own state space."""
        if name in self.shared.offsets:
            return self.shared.offsets[name]
        variable = self.kernel.variables.get(name) or self.module.program.variables.get(name)
        if variable is None:
            raise PtxError(f"unknown symbol {name}")
        if variable.space in ("global", "const"):
            self.uses_memory_of_module = True
            return self.module.global_address(name, self.memory)
        return variable.offset

    # Reports

    def fault(self, problem: str, ix: Any, k: int = 0) -> NoReturn:
        """Raises for the k-th of the selected threads."""
        raise PtxError(problem, int(self.threads[ix][k]))

    def where(self, thread: int) -> str:
        t, (x, y, _) = int(thread) % self.padded_threads, self.block
        block = ",".join(str(int(c)) for c in self.block_index[:, thread])
        return f"thread ({t % x},{t // x % y},{t // (x * y)}) of block ({block})"

    def _place(self, inst: Inst) -> str:
        return f"\n  in kernel {self.kernel.name}, {inst.source or '?'}: {inst.shown()}"

    def _located(self, error: PtxError, inst: Inst, threads: np.ndarray) -> PtxError:
        who = self.where(threads[0] if error.thread is None else error.thread)
        if error.thread is None and len(threads) > 1:
            who = f"one of {len(threads)} threads, the first is {who}"
        return PtxError(f"{error.problem}\n  by {who}{self._place(inst)}", error.thread)

    def _deadlock(self) -> NoReturn:
        waiting = [
            ("for other lanes of their warp", pc, np.concatenate(threads)) for pc, threads in self._parked.items()
        ]
        waiting += self.barriers.waiting() + self.mbarriers.waiting()
        lines = []
        for what, pc, threads in waiting:
            inst = self.kernel.insts[pc]
            lines.append(
                f"{len(threads)} threads wait {what}, at {inst.source or '?'}: {inst.shown(80)}; "
                f"the first is {self.where(threads[0])}"
            )
        raise PtxError("\n  ".join([f"deadlock in kernel {self.kernel.name}", *lines]))

    def _endless(self) -> NoReturn:
        pc = min(self._pending)
        inst, thread = self.kernel.insts[pc], self._pending[pc][0][0]
        raise PtxError(
            f"no end after {self._options.max_rounds} scheduling rounds; does a loop wait for something outside of "
            f"this batch of blocks?\n  by {self.where(thread)}{self._place(inst)}"
        )

    # Scheduling

    def push(self, pc: int, threads: np.ndarray) -> None:
        """Lets these threads go on at pc."""
        if not len(threads):
            return
        groups = self._pending.get(pc)
        if groups is None:
            self._pending[pc] = [threads]
            self._born[pc] = self._rounds
        else:
            groups.append(threads)

    def park(self, pc: int, threads: np.ndarray) -> None:
        """Lets these threads wait at pc for other lanes of their warp; called once for an executed instruction."""
        waiting = self._parked.pop(pc, None)
        if waiting is None:
            self._parked[pc] = [threads]
        else:  # others wait there already: look at all of them together
            for group in (*waiting, threads):
                self.push(pc, group)

    def split_converged(self, threads: np.ndarray, mask: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns the threads of warps with all running lanes (those of the mask) here, and the others."""
        if len(threads) % 32 == 0:
            first = threads[::32]
            if not np.count_nonzero(first & 31) and not np.count_nonzero(threads[31::32] - first != 31):
                return threads, threads[:0]
        warps = threads >> 5
        here = np.bincount(warps, np.left_shift(1, threads & 31), self.num_warps).astype(np.int64)[warps]
        needed = self.alive_lanes[warps]
        if mask is not None:
            needed = needed & mask.astype(np.int64)
        ready = (here & needed) == needed
        return threads[ready], threads[~ready]

    def selection(self, threads: np.ndarray) -> Any:
        """Returns a slice if the numbers are consecutive, which NumPy handles faster."""
        first = int(threads[0])
        return slice(first, first + len(threads)) if int(threads[-1]) - first + 1 == len(threads) else threads

    def retire(self, threads: np.ndarray) -> None:
        """Ends these threads."""
        self._alive[threads] = False
        np.subtract.at(self.alive_lanes, self.warp_of[threads], np.left_shift(1, threads & 31))
        self.alive_in_block -= np.bincount(self.block_of[threads], minlength=self.num_blocks)
        if self.race is not None:
            self._check_ends(threads)
        self.barriers.threads_retired()
        for pc in list(self._parked):  # the rest of a warp may be complete without them
            for group in self._parked.pop(pc):
                self.push(pc, group)

    def _check_ends(self, threads: np.ndarray) -> None:
        """Checks that nothing that these threads have begun, or that their blocks wait for, is in flight."""
        self.race.check_end(threads)
        if self.wgmma_registers is not None:
            self.wgmma_registers.check_end(threads)
        blocks = self.block_of[threads]
        for block in np.unique(blocks[self.alive_in_block[blocks] == 0]).tolist():
            self.race.check_block_end(block, int(threads[blocks == block][0]))

    def run(self, first_block: int, count: int) -> None:
        """Executes blocks first_block to first_block + count - 1 of the grid to their end."""
        self._reset(first_block, count)
        pending, born, stop, insts = self._pending, self._born, self._stop, self.kernel.insts
        with np.errstate(all="ignore"):
            while pending:
                self._rounds += 1
                if self._rounds > self._options.max_rounds:
                    self._endless()
                pc = self._next_pc()
                groups = pending.pop(pc)
                del born[pc]
                if pc in self._parked:
                    groups = groups + self._parked.pop(pc)
                threads = groups[0]
                if len(groups) > 1:
                    threads = np.concatenate(groups)
                    threads.sort()
                # The group runs up to the next control instruction, or to another group that waits to be joined.
                end = stop[pc]
                limit = min((other for other in pending if other > pc), default=_FAR) if pending else _FAR
                self._run_group(pc, min(end, limit), end if end < limit else -1, threads, insts)
            if self._alive.any():
                self._deadlock()

    def _run_group(self, pc: int, end: int, control_pc: int, threads: np.ndarray, insts: list[Inst]) -> None:
        """Runs plain instructions from pc to end, then the control instruction at control_pc unless it is negative."""
        steps, trace, ix, at = self._steps, self._options.trace, self.selection(threads), pc
        try:
            registers = self.wgmma_registers
            effect = None if registers is None else registers.effect(pc, end + (control_pc >= 0))
            careful = effect is not None and registers.conflicts(effect)
            if trace is None and not careful:
                for at in range(pc, end):
                    steps[at](ix)
            else:
                for at in range(pc, end):
                    if trace is not None:
                        trace(self, insts[at], threads)
                    if careful:
                        registers.check(at, ix)
                    steps[at](ix)
            if effect is not None:
                registers.touch(effect, threads)
            count = end - pc
            if control_pc >= 0:
                at, count = control_pc, count + 1
                if careful:
                    registers.check(at, ix)
                if trace is not None:
                    trace(self, insts[at], threads)
                steps[at](threads)
            else:
                self.push(end, threads)
            self.executed += count
            self.thread_instructions += count * len(threads)
        except PtxError as error:
            raise self._located(error, insts[at], threads) from None
        except Exception as error:
            problem = f"the interpreter failed, {type(error).__name__}: {error}"
            raise self._located(PtxError(problem), insts[at], threads) from error

    def _next_pc(self) -> int:
        pending = self._pending
        if len(pending) == 1:
            return next(iter(pending))
        if self._random is not None and self._random.random() < 0.5:
            return list(pending)[self._random.integers(len(pending))]
        if self._rounds % 8 == 0:
            oldest = min(self._born, key=self._born.__getitem__)
            if self._rounds - self._born[oldest] > _STARVING:
                return oldest
        return min(pending)

    def _reset(self, first_block: int, count: int) -> None:
        for number in range(count):
            start = number * self.padded_threads
            index = np.array(self.block_coordinates(first_block + number), np.uint32)
            self.block_index[:, start : start + self.padded_threads] = index[:, None]
        self.shared.reset(count)
        self.barriers.reset()
        self.mbarriers.reset()
        for checker in (self.race, self.wgmma_registers):
            if checker is not None:
                checker.reset()
        if self.global_race is not None:
            self.global_race.begin(first_block)
        self._pending: dict[int, list[np.ndarray]] = {}
        self._born: dict[int, int] = {}
        self._parked: dict[int, list[np.ndarray]] = {}
        self._rounds = 0
        self._alive = (self.threads % self.padded_threads < self.num_threads) & (self.block_of < count)
        running = self.threads[self._alive]
        lanes = np.bincount(self.warp_of[running], np.left_shift(1, running & 31), self.num_warps)
        self.alive_lanes = lanes.astype(np.int64)
        self.alive_in_block = np.bincount(self.block_of[running], minlength=self.num_blocks)
        self.push(0, running)

    def block_coordinates(self, number: int) -> tuple[int, int, int]:
        """Returns %ctaid of a block of the grid; the blocks of a cluster follow one another."""
        (gx, gy, _), (cx, cy, cz) = self.grid, self.kernel.cluster
        cluster, rank = divmod(number, self.cluster_size)
        gx, gy = gx // cx, gy // cy
        return (
            cluster % gx * cx + rank % cx,
            cluster // gx % gy * cy + rank // cx % cy,
            cluster // (gx * gy) * cz + rank // (cx * cy),
        )
