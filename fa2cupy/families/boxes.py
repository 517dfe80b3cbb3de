"""Kernels whose tiles are boxes of tokens, for mask functions of neighbourhoods."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from ..functions.built_in import Neighborhood
from ..problem.attention import AttentionProblem
from ..problem.boxes import Boxes, Grid, sequence_axis
from ..problem.options import CallOptions
from ..problem.strides import AnyStrides
from .device import DeviceInfo
from .family import Family, Kernel
from .tile import TileConfig, requested_tile

__all__ = ["Boxed", "boxed", "with_boxes", "with_grid"]

#: All that a call may have besides the function: what is made of it, and what only the kernel of delta reads.
_BESIDE_FUNCTION = {"mask_mod", "block_mask", "intervals", "dlse"}
#: The arrays of queries and of keys that kernels read and write by tensor maps.
_MAPPED = {"forward": (("q", "o"), ("k", "v")), "backward": (("q", "dout"), ("k", "v", "dk", "dv"))}
_MAX_LENGTH = 2**15  # along an axis: positions there have 16 bits
_MOST_STEPS = 2**20  # of a tile; kernels/common/neighborhood.cuh divides their numbers
_MAX_STRIDE = 2**40  # bytes; a limit of tensor maps


class Boxed(NamedTuple):
    """The boxes of a kernel, and the tile: their tokens."""

    boxes: Boxes
    tile: TileConfig


def boxed(
    operation: str,
    family: Family,
    problem: AttentionProblem,
    device: DeviceInfo,
    strides: Mapping[str, AnyStrides],
    options: CallOptions,
) -> Boxed | None:
    """The boxes of a kernel, or None if the function decides on single scores.

    Parameters
    ----------
    operation : {"forward", "backward"}
    family, problem, device
    strides : mapping
        Those of all tensors of the call.
    options : CallOptions
        Only `config` and `num_splits` are read.
    """
    grid = None if 0 in problem.score_shape or (options.num_splits or 1) > 1 else _grid_of(problem)
    if grid is None or not _are_mappable(operation, problem, strides):
        return None
    kernel, requested = Kernel.of(operation, problem), requested_tile(operation, options.config)
    owned = "keys" if family.owns(operation) == "keys" else "queries"
    columns = max(map(family.padded_head_dim, (kernel.head_dim, kernel.head_dim_v)))
    num_axes = max(axis for axis, length in enumerate(grid.lengths, 1) if length > 1 or axis == 1)
    found: list[tuple[float, Boxed]] = []
    for row in family.boxes:
        takes = requested in (None, row.tile) and family.takes(kernel, row.tile, device)
        is_of_grid = row.operation == operation and row.num_axes == num_axes
        if takes and is_of_grid and row.least_head_dim <= columns <= row.head_dim:
            for boxes in (Boxes(grid, shapes, owned) for shapes in row.shapes):
                scores = boxes.num_steps * row.tile.b_r * row.tile.b_c
                if max(boxes.steps) < _MOST_STEPS:
                    found.append((row.cost * scores, Boxed(boxes, row.tile)))
    return min(found, key=lambda one: one[0])[1] if found else None


def with_grid(problem: AttentionProblem) -> AttentionProblem:
    """The problem with sequences as long as the grid of its mask function, if that is one of neighborhoods.

    A grid of any number of rows gets as many as it has columns.
    """
    found = problem.settings.mask_mod and problem.settings.mask_mod.program.known
    if not isinstance(found, Neighborhood):
        return problem
    length = (found.outer or found.inner[0]) * math.prod(found.inner)
    return replace(problem, seqlen_q=length, seqlen_k=length)


def with_boxes(problem: AttentionProblem, boxes: Boxes) -> AttentionProblem:
    """The problem of kernels that have boxes in the place of the function and its map."""
    return problem.with_settings(replace(problem.settings, mask_mod=None, block_mask=None, boxes=boxes))


def _are_mappable(operation: str, problem: AttentionProblem, strides: Mapping[str, AnyStrides]) -> bool:
    """True if all arrays of queries, and all of keys, have the same coordinates in tensor maps of boxes."""
    sides = _MAPPED[operation]
    axes = [{sequence_axis(problem.sizes_of(name), strides[name])[:2] for name in side} for side in sides]
    reach = max(strides[name][1] for side in sides for name in side) * problem.seqlen_q * problem.itemsize
    return all(len(of_side) == 1 for of_side in axes) and reach < _MAX_STRIDE


def _grid_of(problem: AttentionProblem) -> Grid | None:
    """The grid of a call whose only feature is a mask function of neighbourhoods; None for other calls."""
    settings = problem.settings
    found = settings.mask_mod and settings.mask_mod.program.known
    is_given_map = settings.block_mask is not None and settings.block_mask.program is None
    if not isinstance(found, Neighborhood) or is_given_map or problem.causal:
        return None
    if not _BESIDE_FUNCTION.issuperset(problem.features):
        return None
    inner = math.prod(found.inner)
    if problem.seqlen_q != problem.seqlen_k or problem.seqlen_q % inner or len(found.sizes) > 3:
        return None
    outer = problem.seqlen_q // inner
    if found.outer not in (None, outer):
        return None
    if max((outer, *found.inner)) >= _MAX_LENGTH:
        return None
    more = 3 - len(found.sizes)
    lengths, before, sizes = (
        (*given[::-1], *[other] * more)
        for given, other in (((outer, *found.inner), 1), (found.before, 0), (found.sizes, 1))
    )
    return Grid(lengths, before, sizes, found.is_clamped)
