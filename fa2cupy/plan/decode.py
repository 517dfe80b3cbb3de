"""The plans of `fa2cupy.decode` and of forwards with few queries: one launch that divides the work on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..errors import UnsupportedProblemError
from ..families.choice import Choice
from ..families.device import DeviceInfo
from ..families.records import ARRIVALS, PARTIALS
from ..jit.params import COUNTERS
from ..problem.attention import AttentionProblem, CacheShape
from ..problem.dtypes import ITEMSIZE
from ..problem.strides import AnyStrides
from .layout import StageLayout
from .stages import Plan, Workspace

__all__ = ["plan_decode", "plan_few_queries"]

_MOST_BLOCKS = COUNTERS[ARRIVALS] // 2
_MOST_STEPS = 2**31 - 1
_PARTIALS_OF_BLOCK = 3  # the same as in kernels/decode/partials.cuh


def plan_decode(
    problem: AttentionProblem,
    device: DeviceInfo,
    strides: Mapping[str, AnyStrides],
    choice: Choice,
    *,
    cuts_jobs: bool = True,
) -> Plan:
    """The plan of `fa2cupy.decode`.

    Parameters
    ----------
    problem, device
    strides : mapping
        Strides of q, k_cache, v_cache, k, v, o and the features' arrays.
    choice
    cuts_jobs : bool, optional
        False if one block has all keys of a sequence and K/V head. Its sums then do not depend on other sequences.

    Notes
    -----
    The grid must not depend on lengths, which change between the launches of a graph. It has as many blocks as are
    resident at the same time, or as the cache has tiles.
    """
    cache = problem.cache
    assert cache is not None, "decode has one"
    layout = StageLayout(problem, device, choice.family, strides)
    tile = choice.tiles["decode"]
    row_tiles = max(1, -(-problem.seqlen_q * problem.heads_per_group // tile.b_r))
    steps = problem.batch * problem.num_heads_kv * row_tiles * max(1, -(-cache.capacity // tile.b_c))
    if steps > _MOST_STEPS:
        raise UnsupportedProblemError(
            f"q, k_cache: {steps} pairs of tiles with {tile.b_r} query rows and {tile.b_c} keys are more than "
            f"{_MOST_STEPS}; take fewer sequences or queries for a call"
        )
    blocks = min(steps, device.multiprocessors * tile.blocks_per_sm, _MOST_BLOCKS)
    if tile.cluster > 1 and steps:
        jobs = problem.batch * problem.num_heads_kv * row_tiles
        clusters = min(steps // tile.cluster, device.resident_clusters(tile.cluster))
        blocks = jobs * tile.cluster * max(1, clusters // jobs)
    stage = layout.stage(
        "decode",
        tile,
        blocks,
        seqlen_new=cache.num_new,
        page_size=cache.page_size,
        pages_per_sequence=cache.pages_per_sequence,
        num_pages=cache.num_pages,
    )
    if not cuts_jobs:
        stage = replace(stage, renamed={ARRIVALS: None})
    columns = choice.family.padded_head_dim(problem.columns_of("o"))
    partial = tile.b_r * (columns + 2) * ITEMSIZE[problem.accumulator_dtype]
    return Plan((stage,) if blocks else (), (Workspace(PARTIALS, _PARTIALS_OF_BLOCK * blocks * partial),))


def plan_few_queries(
    problem: AttentionProblem, device: DeviceInfo, strides: Mapping[str, AnyStrides], choice: Choice
) -> Plan:
    """The plan of a forward with few queries: its keys are a cache in which all sequences have the same length."""
    of_kernel = {"k_cache": "k", "v_cache": "v"}
    absent = ("cache_seqlens", "k", "v", "block_table")
    cached = replace(problem, cache=CacheShape(problem.batch, problem.seqlen_k, 1, 0))
    named = {**strides, **{name: strides[own] for name, own in of_kernel.items()}}
    plan = plan_decode(cached, device, named, choice)
    renamed = {**dict.fromkeys(absent), **of_kernel}
    return replace(plan, stages=tuple(replace(stage, renamed=renamed) for stage in plan.stages))
