"""Estimates of how long a call takes. They decide on a backward's method and on the number of splits.

A launch is modelled as list scheduling: the blocks, longest first, go to the first multiprocessor that is free. A block
takes a fixed time and a time for each step, a pair of tiles. The blocks of a cluster, which divide a tile, count as one
on as many multiprocessors. What the stages around the tiled kernels take grows with the rows. The constants of a family
were fitted to the times of ``scripts/methods.py``.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from ..problem.attention import AttentionProblem
from ..problem.boxes import Boxes
from ..problem.dtypes import ITEMSIZE
from .device import DeviceInfo
from .operations import OPERATIONS
from .tile import TileConfig

__all__ = [
    "BlockCost",
    "Costs",
    "OwnedTiles",
    "backward_time",
    "forward_splits",
    "owner_splits",
    "split_candidates",
]

#: Shares have workspaces of their own in kernels without atomics. More than this many copies of O, or of dK and dV, are
#: made only where all of them are smaller than `_SMALL_BYTES`.
_MOST_COPIES, _SMALL_BYTES = 4, 64 << 20
#: With at least so many keys for each query, few blocks are shorter than the others, and blocks do not drift apart. The
#: first number is for short heads, which follow each other faster: those of a block fit in half of the L2 cache.
_EQUAL_BLOCKS_OF_SHORT_HEADS, _EQUAL_BLOCKS = 8, 2
#: What a block that owns a tile of a bias does beside its steps takes as long as so many steps, and so does the sum of
#: its share.
_STEPS_BESIDE, _STEPS_OF_SHARE = 4, 6
_MOST_WAVES = 8  # of such blocks, if they divide sequences
_LAUNCHES_MORE = 2  # of a backward by several launches
_ASSIGNED_SINGLY = 8  # up to so many blocks for each slot, the schedule is simulated block by block


_Cost = TypeVar("_Cost")


class BlockCost(NamedTuple):
    """The time of a block of a kernel.

    Attributes
    ----------
    step : float
        Microseconds for a million products of a query, a key and a column, on a multiprocessor of its own.
    start : float
        Microseconds before the first and after the last step.
    """

    step: float
    start: float


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The constants of a family, in microseconds; `_rows` are those of a million elements.

    Those that are 0 by default are of no use to a family without `split_operations`, or are the same for all methods.

    Attributes
    ----------
    blocks : mapping of operation to mapping of int to BlockCost
        By the largest head_dim to which they apply.
    clusters : mapping of operation to BlockCost
        Of tiles that the blocks of a cluster divide.
    read_rows : float
        Reading K and V from memory, which no schedule makes shorter; elements of k.
    merge, merge_rows : float
        Merging the shares of a forward; elements of the tiles of q, for each share.
    call, call_rows : float
        Delta, and what every backward takes; elements of q.
    launch : float
        What a launch behind another one of the call takes, also of the host's time: methods differ in their number.
    both, both_step : float
        Delta of the rows that a block reads, where both passes of ``two_pass`` run side by side; of those of a step of
        a block that owns keys.
    convert, convert_rows : float
        Clearing and converting the workspace of dQ; elements of q.
    add, add_rows : float
        Clearing and converting the workspace to which shares are added; elements of k.
    copy, copy_rows : float
        Summing the copies of shares; elements of k, for each copy.
    dbias : mapping of int to float
        Products of the kernel that owns tiles of a bias, by the largest head_dim to which they apply, as
        `BlockCost.step`; empty if calls that need not be deterministic leave dbias to atomics.
    dbias_step : float
        What a step of that kernel takes beside its products.
    add_dbias, add_dbias_singly : float
        Atomic additions to a broadcast dbias, a million of them; where rows do not begin at multiples of 16 bytes.
    drift : float
        Growth of a step of ``single_pass``, for each doubling of a block's heads beyond two, if the heads do not fit
        in the L2 cache; beyond one, if one head does not. Under a causal mask blocks of different lengths drift apart
        and work on different heads. Where keys are many times as many as queries, most blocks have the same length.
    """

    blocks: Mapping[str, Mapping[int, BlockCost]]
    clusters: Mapping[str, BlockCost] = field(default_factory=dict)
    read_rows: float = 0.0
    merge: float = 0.0
    merge_rows: float = 0.0
    call: float = 0.0
    call_rows: float = 0.0
    launch: float = 0.0
    both: float = 0.0
    both_step: float = 0.0
    convert: float
    convert_rows: float
    add: float = 0.0
    add_rows: float = 0.0
    copy: float = 0.0
    copy_rows: float = 0.0
    dbias: Mapping[int, float] = field(default_factory=dict)
    dbias_step: float = 0.0
    add_dbias: float = 0.0
    add_dbias_singly: float = 0.0
    drift: float = 0.0

    def of_block(self, operation: str, problem: AttentionProblem, blocks_of_tile: int = 1) -> BlockCost:
        """The cost of a block of a kernel, whose structure depends on the wider head_dim."""
        if blocks_of_tile > 1:
            return self.clusters[operation]
        return _of_widest(self.blocks[operation], problem)

    def step_of_owner(self, problem: AttentionProblem, tile: TileConfig) -> float:
        """The time of a step of a block that owns a tile of a bias; without own constants, that of ``backward_dq``."""
        rows = self.dbias or {limit: cost.step for limit, cost in self.blocks["backward_dq"].items()}
        products = BlockCost(_of_widest(rows, problem), 0.0)
        return self.dbias_step + _step(products, tile, problem.mean_head_dim)


def _of_widest(rows: Mapping[int, _Cost], problem: AttentionProblem) -> _Cost:
    """The row of the wider head_dim."""
    widest = max(problem.head_dim, problem.head_dim_v or 0)
    return rows[min((limit for limit in rows if widest <= limit), default=max(rows))]


def forward_splits(
    costs: Costs,
    problem: AttentionProblem,
    device: DeviceInfo,
    tile: TileConfig,
    most: int,
    blocks_of_tile: int = 1,
) -> int:
    """How many blocks or clusters, up to `most`, share a query tile's keys in the estimated fastest forward."""
    sequences = _Sequences.of(problem)
    steps = sequences.steps_of_queries(tile)
    heads = sequences.number * problem.num_heads
    rows = sum(steps.values()) * tile.b_r * heads * problem.mean_head_dim / 1e6
    keys = problem.batch * problem.seqlen_k * problem.num_heads_kv * problem.mean_head_dim / 1e6
    cost = costs.of_block("forward", problem, blocks_of_tile)
    step = _step(cost, tile, problem.mean_head_dim)

    def time(splits: int) -> float:
        shares = _shares(steps, 1, splits, heads)
        kernel = max(_time_of_blocks(cost, step, shares, device, tile, blocks_of_tile), costs.read_rows * keys)
        return kernel + (costs.merge + costs.merge_rows * rows * splits if splits > 1 else 0.0)

    slots = device.multiprocessors * tile.blocks_per_sm // blocks_of_tile
    if sum(steps.values()) * heads > _ASSIGNED_SINGLY * slots:
        return 1  # so many blocks fill the slots evenly; shares of them read more keys at a time
    most = min(most, _most_copies(4e6 * rows), max(steps, default=0))
    return min(range(1, max(1, most) + 1), key=time)


def split_candidates(operation: str, problem: AttentionProblem, tile: TileConfig, most: int) -> list[int]:
    """The numbers of splits that are worth an estimate: powers of two, and those that divide the heads of a group."""
    group = problem.heads_per_group
    numbers = sorted({1, 2, 4, 8, 16, *(n for n in range(1, group + 1) if group % n == 0)})
    if operation == "backward":  # adds all shares to one copy
        return [n for n in numbers if n <= most]
    copy = 8 * problem.batch * problem.num_heads_kv * (problem.seqlen_k + tile.b_c) * problem.mean_head_dim
    return [n for n in numbers if n <= min(most, _most_copies(copy))]


def _most_copies(copy_bytes: float) -> int:
    return max(_MOST_COPIES, int(_SMALL_BYTES // max(1, copy_bytes)))


def backward_time(
    costs: Costs,
    problem: AttentionProblem,
    device: DeviceInfo,
    tiles: Mapping[str, TileConfig],
    num_splits: Mapping[str, int],
    blocks_of_tile: Mapping[str, int],
    *,
    has_owner: bool = False,
    boxes: Boxes | None = None,
) -> float:
    """The estimated time of a backward in microseconds.

    Parameters
    ----------
    costs : Costs
    problem, device
    tiles : mapping of operation to TileConfig
        The tiles of the method's kernels.
    num_splits, blocks_of_tile : mapping of operation to int
        Where they are more than one. The blocks of a tile are a cluster.
    has_owner : bool, optional
        True if a kernel that owns tiles of a bias follows. It reads delta, so that no method is one launch.
    boxes : Boxes, optional
        The boxes of tokens that are the tiles. Without them, all tiles in the band of the problem are counted.
    """
    sequences = _Sequences.of(problem)
    queries = problem.batch * problem.seqlen_q * problem.num_heads * problem.mean_head_dim / 1e6
    keys = problem.batch * problem.seqlen_k * problem.num_heads_kv * problem.mean_head_dim / 1e6
    if "backward_both" in tiles:
        return _time_of_both(costs, problem, device, tiles["backward_both"])
    is_one_launch = not has_owner and any(OPERATIONS[operation].holds_keys for operation in tiles)
    time = costs.call + costs.call_rows * queries + (0 if is_one_launch else _LAUNCHES_MORE * costs.launch)
    for operation, tile in tiles.items():
        # Blocks that own tiles of a bias do all of the work on the heads that share them, one after the other.
        splits = 1 if OPERATIONS[operation].owns == "pairs" else num_splits.get(operation, 1)
        blocks = blocks_of_tile.get(operation, 1)
        cost = costs.of_block(operation, problem, blocks)
        step = _step(cost, tile, problem.mean_head_dim) / blocks
        if operation == "backward":
            time += costs.convert + costs.convert_rows * queries
            step *= _drift(costs, problem, device, splits)
        if splits > 1 and operation == "backward":
            time += costs.add + costs.add_rows * keys
        elif splits > 1:
            time += costs.copy + costs.copy_rows * keys * splits
        if operation == "backward_dq":
            steps = _times(sequences.steps_of_queries(tile), problem.num_heads * sequences.number)
        else:
            steps = _shares(
                boxes.steps if boxes else sequences.steps_of_keys(tile),
                problem.heads_per_group,
                splits,
                problem.num_heads_kv * sequences.number,
            )
        time += _time_of_blocks(cost, step, steps, device, tile, blocks)
    return time


def _time_of_both(costs: Costs, problem: AttentionProblem, device: DeviceInfo, tile: TileConfig) -> float:
    """The estimated time of a backward whose blocks of both passes run side by side, in microseconds."""
    sequences = _Sequences.of(problem)
    heads, columns = problem.num_heads * sequences.number, problem.mean_head_dim
    blocks: Counter[float] = Counter()
    sides = {"backward_dkdv": sequences.steps_of_keys(tile), "backward_dq": sequences.steps_of_queries(tile)}
    for operation, steps in sides.items():
        cost = costs.of_block(operation, problem)
        step = _step(cost, tile, columns)
        for count, number in steps.items():
            of_delta = costs.both + (costs.both_step * count if operation == "backward_dkdv" else 0.0)
            blocks[of_delta + cost.start + step * count] += number * heads
    return _makespan(blocks, device.multiprocessors * tile.blocks_per_sm, tile.blocks_per_sm)


def _step(cost: BlockCost, tile: TileConfig, head_dim: int) -> float:
    """The time of a step of a block beside the others on its multiprocessor."""
    return cost.step * tile.b_r * tile.b_c * head_dim / 1e6 * tile.blocks_per_sm


def _time_of_blocks(
    cost: BlockCost,
    step: float,
    steps: Mapping[int, int],
    device: DeviceInfo,
    tile: TileConfig,
    blocks_of_tile: int = 1,
) -> float:
    """The time of a kernel. `steps`: how many blocks, or clusters, have how many."""
    blocks = {cost.start + step * count: number for count, number in steps.items()}
    slots = device.multiprocessors * tile.blocks_per_sm // blocks_of_tile
    return _makespan(blocks, slots, tile.blocks_per_sm)


def heads_in_cache(problem: AttentionProblem, device: DeviceInfo) -> int:
    """The query heads whose rows of ``single_pass`` fit in the L2 cache together; at least one."""
    return max(1, device.l2_bytes // max(1, _bytes_of_head(problem, problem.typical_seqlen_q)))


def _bytes_of_head(problem: AttentionProblem, rows: int) -> int:
    """Bytes of Q, dO and of the sums of dQ."""
    of_row = problem.itemsize * (problem.head_dim + problem.columns_of("dout"))
    return rows * (of_row + ITEMSIZE[problem.accumulator_dtype] * problem.head_dim)


def _drift(costs: Costs, problem: AttentionProblem, device: DeviceInfo, splits: int) -> float:
    """The factor by which blocks that drift apart slow down each other's steps."""
    heads = problem.heads_per_group / splits
    of_head = _bytes_of_head(problem, problem.seqlen_q)
    left, right = problem.band
    is_short = 2 * of_head * problem.heads_per_group <= device.l2_bytes
    keys = (_EQUAL_BLOCKS_OF_SHORT_HEADS if is_short else _EQUAL_BLOCKS) * problem.seqlen_q
    # With a window, or far more keys than queries, all blocks but the outer ones are equally long.
    has_equal_blocks = right is None or left is not None or problem.seqlen_k >= keys
    harmless = 1 if of_head > device.l2_bytes else 2
    if has_equal_blocks or heads <= harmless or of_head * problem.batch * problem.num_heads <= device.l2_bytes:
        return 1.0
    return 1 + costs.drift * math.log2(heads / harmless)


class OwnedTiles(NamedTuple):
    """The tiles of a bias that blocks own.

    Attributes
    ----------
    slots : int
        Blocks that are resident at the same time.
    tiles : int
    sequences : int
        Those that share a tile, and that blocks can divide.
    steps : int
        Tiles of scores of a sequence that share it.
    """

    slots: int
    tiles: int
    sequences: int
    steps: int

    def time(self, splits: int) -> int:
        """The time of the kernel in steps if so many blocks divide the sequences of a tile."""
        waves = -(-self.tiles * splits // self.slots)
        beside = _STEPS_BESIDE + _STEPS_OF_SHARE * (splits > 1)
        return waves * (-(-self.sequences // splits) * self.steps + beside)


def owner_splits(work: OwnedTiles) -> int:
    """The number of blocks that divide the sequences that share a tile of a bias in the estimated fastest kernel."""
    most = max(1, min(work.sequences, _MOST_WAVES * work.slots // work.tiles))
    return min(range(1, most + 1), key=work.time)


class _Sequences(NamedTuple):
    """The sequences of a problem, all of one length: of packed ones the host knows only the number and the total."""

    number: int
    seqlen_q: int
    seqlen_k: int
    left: int  # visible keys before the diagonal key, and after it
    right: int

    @classmethod
    def of(cls, problem: AttentionProblem) -> _Sequences:
        left, right = problem.band
        number, _, _, longest_k = problem.score_shape
        rows = problem.typical_seqlen_q
        if problem.is_packed:
            number = -(-problem.seqlen_q // max(1, rows))
        keys = min(longest_k, -(-problem.seqlen_k // max(1, number))) if problem.is_packed else problem.seqlen_k
        unlimited = rows + keys
        return cls(number, rows, keys, unlimited if left is None else left, unlimited if right is None else right)

    def steps_of_keys(self, tile: TileConfig) -> Counter[int]:
        """How many key tiles see how many query tiles."""
        diagonal = self.seqlen_k - self.seqlen_q
        return self._steps(
            self.seqlen_k, tile.b_c, self.seqlen_q, tile.b_r, -diagonal - self.right, self.left - diagonal
        )

    def steps_of_queries(self, tile: TileConfig) -> Counter[int]:
        """How many query tiles see how many key tiles."""
        diagonal = self.seqlen_k - self.seqlen_q
        return self._steps(
            self.seqlen_q, tile.b_r, self.seqlen_k, tile.b_c, diagonal - self.left, diagonal + self.right
        )

    @staticmethod
    def _steps(own: int, own_rows: int, other: int, other_rows: int, before: int, after: int) -> Counter[int]:
        """Row i sees the other side's rows from i + before to i + after."""
        steps: Counter[int] = Counter()
        for first in range(0, own, own_rows):
            last = min(first + own_rows, own) - 1
            begin, end = max(0, first + before) // other_rows, -(-max(0, min(last + after + 1, other)) // other_rows)
            steps[max(0, end - begin)] += 1
        return steps


def _times(steps: Counter[int], number: int) -> Counter[int]:
    return Counter({count: tiles * number for count, tiles in steps.items()})


def _shares(steps: Counter[int], heads: int, splits: int, number: int) -> Counter[int]:
    """The steps of the shares of all key tiles; empty shares cost nothing."""
    shares: Counter[int] = Counter()
    for count, tiles in steps.items():
        whole = count * heads
        most = -(-whole // splits)
        if most == 0:
            shares[0] += tiles * number
            continue
        full, rest = divmod(whole, most)
        shares[most] += full * tiles * number
        if rest:
            shares[rest] += tiles * number
    return shares


def _makespan(blocks: Mapping[float, int], slots: int, blocks_per_sm: int = 1) -> float:
    """When the last block ends. `blocks`: how many blocks take how long beside others on their multiprocessor."""
    number = sum(blocks.values())
    if number == 0:
        return 0.0
    longest, shortest = max(blocks), min(blocks)
    if number <= slots:
        if longest == shortest and number * blocks_per_sm > slots:
            return longest  # somewhere two run side by side to the end
        # The last blocks of a multiprocessor run alone: on average they have had half of the others beside them.
        total = sum(time * count for time, count in blocks.items())
        return max(total / slots, longest * (blocks_per_sm + 1) / (2 * blocks_per_sm))
    if number > _ASSIGNED_SINGLY * slots:
        if longest == shortest:
            return -(-number // slots) * longest
        return max(longest, sum(time * count for time, count in blocks.items()) / slots + shortest / 2)
    ends = [0.0] * slots
    for time in _each(blocks):
        heapq.heapreplace(ends, ends[0] + time)
    return max(ends)


def _each(blocks: Mapping[float, int]) -> Iterable[float]:
    """All blocks, longest first."""
    for time in sorted(blocks, reverse=True):
        for _ in range(blocks[time]):
            yield time
