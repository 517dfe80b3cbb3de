"""Sections of the schedule: heads whose tiles are taken together, because what all of them read fits the L2 cache."""

from __future__ import annotations

from .device import DeviceInfo
from .problem import AttentionProblem

__all__ = ["groups_per_section"]


def groups_per_section(
    problem: AttentionProblem, device: DeviceInfo, bytes_read: int, bytes_added_to: int = 0
) -> int:
    """Of how many groups of heads the tiles are taken together: what is read and added to for each fits the L2 cache."""
    # Without a mask all tiles are equally long, and one head after the other reads the least memory.
    if not problem.causal:
        return 1
    groups = max(1, problem.batch * problem.num_heads_kv)
    # Sums fill more of the cache than their size (head_dim 64 at 2048: 16 heads a section 1.2 times as fast as 64).
    share = device.l2_bytes // 3 if bytes_added_to else device.l2_bytes * 5 // 8
    fitting = min(groups, max(1, share // max(1, bytes_read + bytes_added_to)))
    # A short last section starts its long tiles late, and the launch ends with most multiprocessors idle (up to a sixth
    # of the time). So of the sizes about as large, the one that divides the groups best.
    sizes = range(-(-3 * fitting // 4), min(groups, 3 * fitting // 2) + 1)
    return min(sizes, key=lambda size: (-groups % size / size, abs(size - fitting)))
