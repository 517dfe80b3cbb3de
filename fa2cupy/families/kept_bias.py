"""Forwards whose blocks keep a bias on chip for several sequences that share it, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from ..problem.attention import AttentionProblem
from ..problem.features import FEATURES
from ..problem.options import CallOptions
from ..problem.strides import ScoreStrides, sharers
from .device import DeviceInfo
from .family import Family, Kernel
from .tile import TileConfig, requested_tile
from .tile_choice import saves

__all__ = ["KeptBias", "kept_bias", "kept_biases", "with_kept_bias"]

#: Fewer sequences that share a bias do not pay for the memory in which a block keeps it, nor do fewer query tiles for
#: each block: their series would be too short.
_LEAST_SHARERS, _LEAST_TILES = 8, 2


class KeptBias(NamedTuple):
    """The most keys whose bias a block keeps, and the tile."""

    keys: int
    tile: TileConfig


def kept_bias(
    family: Family, problem: AttentionProblem, device: DeviceInfo, strides: ScoreStrides, options: CallOptions
) -> KeptBias | None:
    """How the blocks of a forward with a bias keep it, or None if they do not.

    Parameters
    ----------
    family, problem, device
    strides : tuple of int
        Those of the bias.
    options : CallOptions
        Only `config` and `num_splits` are read.
    """
    if sharers(strides, problem.batch) < _LEAST_SHARERS or 0 in problem.score_shape:
        return None
    found = next((one for one in kept_biases(family, problem, device, options) if problem.seqlen_k <= one.keys), None)
    if found is None:
        return None
    tiles = problem.batch * problem.num_heads * -(-problem.seqlen_q // found.tile.b_r)
    return found if tiles >= _LEAST_TILES * found.tile.blocks_per_sm * device.multiprocessors else None


def kept_biases(
    family: Family, problem: AttentionProblem, device: DeviceInfo, options: CallOptions
) -> Iterator[KeptBias]:
    """All ways in which the blocks of forwards with a problem's features keep the bias, that of the fewest keys first.

    Parameters are those of `kept_bias`.
    """
    features = problem.features
    is_of_tiles = any(FEATURES[name].acts_on == "tiles" for name in features)
    if "bias" not in features or "wide_bias" in features or is_of_tiles or (options.num_splits or 1) > 1:
        return
    for keys in family.kept_keys:
        tile = _tile(family, with_kept_bias(problem, keys), device, options)
        if tile is not None:
            yield KeptBias(keys, tile)


def with_kept_bias(problem: AttentionProblem, keys: int) -> AttentionProblem:
    """The problem of a forward whose blocks keep the bias of so many keys."""
    return problem.with_settings(replace(problem.settings, kept_bias=keys))


def _tile(family: Family, problem: AttentionProblem, device: DeviceInfo, options: CallOptions) -> TileConfig | None:
    """The caller's tile, or else the first of those for a kept bias that holds so many keys."""
    kernel, requested = Kernel.of("forward", problem), requested_tile("forward", options.config)
    if requested is not None:
        return requested if family.takes(kernel, requested, device) else None
    columns = max(map(family.padded_head_dim, (kernel.head_dim, kernel.head_dim_v)))
    rows = family.tiles["forward"]
    applying = (row for row in rows if "kept_bias" in row.features and columns <= row.head_dim)
    tiles = (row.tile for row in applying if not row.least_saving or saves(row, rows, problem))
    return next((tile for tile in tiles if family.takes(kernel, tile, device)), None)
