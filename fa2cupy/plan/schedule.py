"""Sections of the schedule: groups of heads whose tiles are scheduled together.

Larger sections fill a launch more evenly; smaller ones reuse more of what they read from the L2 cache.
"""

from __future__ import annotations

from ..families.device import DeviceInfo
from ..families.tile import TileConfig
from ..problem.attention import AttentionProblem

__all__ = [
    "COLUMNS_BY_KEYS",
    "COLUMNS_BY_QUERIES",
    "COLUMNS_WITH_DQ",
    "groups_per_section",
    "orders_tiles",
    "series_values",
    "shares_per_section",
]

# Columns (heads times head_dim) of a section for each multiprocessor, where tiles differ. With fewer heads in a
# section, more blocks read the same rows at about the same time, so that the L2 cache serves them. These values were
# the fastest with a causal mask on an H100 from seqlen 512 to 16384, also where the rows of a section exceed the L2
# cache; other maps were not swept. Kernels that add to dQ both read and write it, and are fastest with far smaller
# sections.
COLUMNS_BY_QUERIES, COLUMNS_BY_KEYS, COLUMNS_WITH_DQ = 32, 16, 4
# Shares of key tiles that are scheduled together, for each K/V head: more of them work on more query heads at a time.
_SHARES = 8
# The most sequences of a series, the time to load the bias relative to that of one of its query tiles, and the least
# series for each block under a causal mask, where query tiles differ in length.
_LONGEST_SERIES, _START_OF_SERIES, _LEAST_SERIES = 64, 0.5, 4
# Up to so many blocks for each multiprocessor are one section: each of several would end with idle multiprocessors.
_BLOCKS_OF_ONE_SECTION = 2


def orders_tiles(problem: AttentionProblem) -> bool:
    """True if the tiles of a head are scheduled in the order of their lists' lengths, the longest first."""
    return problem.settings.block_mask is not None and not problem.is_packed


def _tiles_differ(problem: AttentionProblem) -> bool:
    """True if some tiles take longer than others, and come first."""
    return problem.causal or orders_tiles(problem)


def groups_per_section(
    problem: AttentionProblem, device: DeviceInfo, columns: int, least: int = 1, most: int | None = None
) -> int:
    """Number of K/V-head groups whose tiles are scheduled together.

    Parameters
    ----------
    problem, device
    columns : int
        Columns of a section for each multiprocessor.
    least, most : int
        Approximate limits of the number, if there are so many groups.
    """
    # Where all tiles take equally long, one head after the other reads the least memory.
    if not _tiles_differ(problem):
        return 1
    groups = max(1, problem.batch * problem.num_heads_kv)
    fitting = columns * device.multiprocessors // max(1, problem.mean_head_dim)
    fitting = min(groups, max(1, least, fitting if most is None else min(most, fitting)))
    # A short last section starts its long tiles late, and most multiprocessors are then idle at the end of the launch
    # (up to a sixth of the time). The size is therefore the one, from 3/4 to 3/2 of `fitting`, that divides the groups
    # best.
    sizes = range(-(-3 * fitting // 4), min(groups, 3 * fitting // 2) + 1)
    return min(sizes, key=lambda size: (-groups % size / size, abs(size - fitting)))


def shares_per_section(
    problem: AttentionProblem, device: DeviceInfo, groups: int, num_tiles: int, num_splits: int, most: int | None = None
) -> int:
    """Number of scheduled heads, shares of K/V heads, in a section of `groups` groups.

    If groups are fewer than `most`, it is at most that, as a power of two.
    """
    heads = problem.batch * problem.num_heads_kv * num_splits
    if _tiles_differ(problem) and heads * num_tiles <= _BLOCKS_OF_ONE_SECTION * device.multiprocessors:
        return heads
    shares = _SHARES if most is None else min(_SHARES, 1 << (most.bit_length() - 1))  # a power of two
    return min(groups * num_splits, max(groups, shares))


def series_values(
    problem: AttentionProblem, device: DeviceInfo, tile: TileConfig, num_tiles: int, shared: int, at_a_time: int = 1
) -> dict[str, int]:
    """Members of the record of a forward whose blocks keep the bias, which every `shared` sequences share.

    A series (``kernels/common/series.cuh``) has as many sequences as let the blocks finish first, which process
    `at_a_time` of them at a time.
    """
    slots = device.multiprocessors * tile.blocks_per_sm
    tiles = num_tiles * problem.num_heads

    def number(length: int) -> int:
        return problem.batch // shared * -(-shared // length)

    def time(length: int) -> float:
        return -(-number(length) * tiles // slots) * (-(-length // at_a_time) + _START_OF_SERIES)

    most = min(shared, _LONGEST_SERIES)
    if problem.causal or problem.band != (None, None):
        most = min(most, max(1, problem.batch * tiles // (_LEAST_SERIES * slots)))
    length = min(range(1, most + 1), key=time)
    return {"sharers": shared, "series_length": length, "num_series": number(length)}
