"""Forwards whose blocks keep a bias on chip for several sequences that share it, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    ways = [one for one in kept_biases(family, problem, device, options) if problem.seqlen_k <= one.keys]
    for way in ways:
        tiles = problem.batch * problem.num_heads * -(-problem.seqlen_q // way.tile.b_r)
        at_a_time = family.sequences_of_tile(Kernel.of("forward", with_kept_bias(problem, way.keys)), way.tile)
        resident = way.tile.blocks_per_sm * at_a_time * device.multiprocessors
        if way.keys == ways[0].keys and tiles >= _LEAST_TILES * resident:
            return way
    return None


def kept_biases(
    family: Family, problem: AttentionProblem, device: DeviceInfo, options: CallOptions
) -> Iterator[KeptBias]:
    """All ways in which the blocks of forwards with a problem's features keep the bias, that of the fewest keys first.

    Several sequences at a time, for which calls may have too few tiles, come before one. Parameters are those of
    `kept_bias`.
    """
    features = problem.features
    is_of_tiles = any(FEATURES[name].acts_on == "tiles" for name in features)
    if "bias" not in features or "wide_bias" in features or is_of_tiles or (options.num_splits or 1) > 1:
        return
    for keys in family.kept_keys:
        for tile in _tiles(family, with_kept_bias(problem, keys), device, options):
            yield KeptBias(keys, tile)


def with_kept_bias(problem: AttentionProblem, keys: int) -> AttentionProblem:
    """The problem of a forward whose blocks keep the bias of so many keys."""
    return problem.with_settings(replace(problem.settings, kept_bias=keys))


def _tiles(family: Family, problem: AttentionProblem, device: DeviceInfo, options: CallOptions) -> Iterable[TileConfig]:
    """The caller's tile, or else the first for a kept bias of so many keys, of several sequences and of one."""
    kernel, requested = Kernel.of("forward", problem), requested_tile("forward", options.config)
    if requested is not None:
        return [requested] if family.takes(kernel, requested, device) else []
    columns = max(map(family.padded_head_dim, (kernel.head_dim, kernel.head_dim_v)))
    rows = family.tiles["forward"]
    applying = (row for row in rows if "kept_bias" in row.features and columns <= row.head_dim)
    applying = (row for row in applying if kernel.kept_keys <= row.most_seqlen_k)
    tiles = (row.tile for row in applying if not row.least_saving or saves(row, rows, problem))
    found: dict[bool, TileConfig] = {}
    for tile in tiles:
        if family.takes(kernel, tile, device):
            found.setdefault(family.sequences_of_tile(kernel, tile) > 1, tile)
    return found.values()
