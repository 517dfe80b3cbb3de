"""Sections of the schedule: heads whose tiles are taken together. More fill a launch, fewer share what they read."""

from __future__ import annotations

from ..families.device import DeviceInfo
from ..problem.attention import AttentionProblem

__all__ = ["COLUMNS_BY_KEYS", "COLUMNS_BY_QUERIES", "COLUMNS_WITH_DQ", "groups_per_section"]

# With a causal mask, how many columns (heads times head_dim) a section of heads has for each multiprocessor. The tiles of
# more heads fill a launch more evenly; of fewer, more blocks read the same rows at about the same time, which then come
# from the L2 cache. The fastest on an H100 from seqlen 512 to 16384, whether or not all rows of a section fit that cache;
# sums of dQ are read and written, and want far fewer.
COLUMNS_BY_QUERIES, COLUMNS_BY_KEYS, COLUMNS_WITH_DQ = 32, 16, 4


def groups_per_section(problem: AttentionProblem, device: DeviceInfo, columns_per_multiprocessor: int) -> int:
    """Of how many groups of heads the tiles are taken together."""
    # Without a mask all tiles are equally long, and one head after the other reads the least memory.
    if not problem.causal:
        return 1
    groups = max(1, problem.batch * problem.num_heads_kv)
    columns = columns_per_multiprocessor * device.multiprocessors
    fitting = min(groups, max(1, columns // max(1, problem.head_dim)))
    # A short last section starts its long tiles late, and the launch ends with most multiprocessors idle (up to a sixth
    # of the time). So of the sizes about as large, the one that divides the groups best.
    sizes = range(-(-3 * fitting // 4), min(groups, 3 * fitting // 2) + 1)
    return min(sizes, key=lambda size: (-groups % size / size, abs(size - fitting)))
