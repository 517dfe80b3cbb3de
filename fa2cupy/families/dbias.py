"""The gradient of a broadcast bias: by atomics of the tiled kernels, or by a kernel that owns tiles of the bias."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ..errors import UnsupportedProblemError
from ..problem.attention import AttentionProblem
from ..problem.strides import AnyStrides, atomics_of, contiguous_like, has_aligned_rows, sharers_of
from .device import DeviceInfo
from .estimate import OwnedTiles, owner_splits
from .family import Family
from .registry import FAMILIES
from .tile import TileConfig
from .tile_choice import choose_tile, why_not_map

__all__ = ["DbiasOwner", "splits_of_dbias", "tiles_of_bias", "time_of_dbias", "ways_of_dbias"]


@dataclass(frozen=True)
class DbiasOwner:
    """The kernel that owns tiles of a broadcast bias.

    Attributes
    ----------
    family : Family
    tile : TileConfig
    num_splits : int
        The number of blocks that share the sequences of a tile.
    lse_tile : TileConfig or None
        That of a forward that computes lse again, in the family's arithmetic, where it needs that.
    """

    family: Family
    tile: TileConfig
    num_splits: int = 1
    lse_tile: TileConfig | None = None


def ways_of_dbias(
    family: Family,
    problem: AttentionProblem,
    device: DeviceInfo,
    strides: Mapping[str, AnyStrides],
    runs: Callable[[Family], bool],
    *,
    deterministic: bool,
) -> list[DbiasOwner | None]:
    """The kernels that may compute the gradient of a broadcast bias; None leaves it to the tiled kernels' atomics.

    A call that need not be deterministic leaves it to them unless the costs of both are known. One that must has no way
    if no kernel owns tiles for the problem.

    Parameters
    ----------
    family : Family
        That of the tiled kernels.
    problem, device, strides
    runs : callable
        True for a family whose kernel takes the problem and its arrays.
    deterministic : bool
    """
    if deterministic:
        owner = _owner(family, problem, device, strides, runs)
        return [] if owner is None else [owner]
    if family.costs is None or not family.costs.dbias or 0 in problem.score_shape or "dbias" not in strides:
        return [None]
    owner = _owner(family, problem, device, strides, runs)
    return [None, owner] if owner is not None and owner.family is family else [None]


def _owner(
    family: Family,
    problem: AttentionProblem,
    device: DeviceInfo,
    strides: Mapping[str, AnyStrides],
    runs: Callable[[Family], bool],
) -> DbiasOwner | None:
    """The kernel beside tiled kernels of a family; None if there is none.

    It is of that family or, where that has none for the problem, of the first one behind it that has.
    """
    found = next(_owners(family, problem, device, runs), None)
    if found is None:
        return None
    owner, tile = found
    splits = 1
    if "dbias" in strides and 0 not in problem.score_shape:
        splits = owner_splits(_work(problem, device, strides, tile))
    lse_tile = choose_tile("forward", owner, problem, device) if family.multiplies_parts else None
    return DbiasOwner(owner, tile, splits, lse_tile)


def _owners(
    family: Family, problem: AttentionProblem, device: DeviceInfo, runs: Callable[[Family], bool]
) -> Iterator[tuple[Family, TileConfig]]:
    for one in FAMILIES[FAMILIES.index(family) :]:
        if (
            one.supports("dbias", problem.dtype, device, problem.features)
            and runs(one)
            and why_not_map(one, "dbias", problem, device) is None
        ):
            with contextlib.suppress(UnsupportedProblemError):
                yield one, choose_tile("dbias", one, problem, device)


def _work(
    problem: AttentionProblem, device: DeviceInfo, strides: Mapping[str, AnyStrides], tile: TileConfig
) -> OwnedTiles:
    """The tiles of a bias, and the steps for each."""
    sequences, heads, rows, keys = problem.score_shape
    shared, tiles = sharers_of(strides["dbias"], sequences).num_shared, tiles_of_bias(problem, strides, tile)
    steps = sequences * heads * -(-rows // tile.b_r) * -(-keys // tile.b_c)
    return OwnedTiles(device.multiprocessors * tile.blocks_per_sm, tiles, shared, steps // max(1, tiles * shared))


def splits_of_dbias(
    problem: AttentionProblem, device: DeviceInfo, strides: Mapping[str, AnyStrides], tile: TileConfig
) -> int:
    """The number of blocks that share the sequences of a tile of a bias in the estimated fastest kernel."""
    return owner_splits(_work(problem, device, strides, tile))


def tiles_of_bias(problem: AttentionProblem, strides: Mapping[str, AnyStrides], tile: TileConfig) -> int:
    """The tiles of a bias that blocks own, by the strides of dbias."""
    of_bias = strides["dbias"]
    sequences, heads, rows, keys = problem.score_shape
    in_tiles = sequences, heads, -(-rows // tile.b_r), -(-keys // tile.b_c)
    return contiguous_like(of_bias, in_tiles)[1]


def time_of_dbias(
    family: Family,
    owner: DbiasOwner | None,
    problem: AttentionProblem,
    device: DeviceInfo,
    strides: Mapping[str, AnyStrides],
) -> float:
    """The estimated time that the gradient of a broadcast bias adds to a family's tiled kernels, in microseconds."""
    if owner is None:
        costs = family.costs
        assert costs is not None, f"{family.name} has several choices, and no costs"
        added = costs.add_dbias if has_aligned_rows(strides["dbias"]) else costs.add_dbias_singly
        return added * atomics_of(strides["dbias"], problem.score_shape) / 1e6
    of_owner = owner.family.costs
    if of_owner is None:
        return 0.0  # there is no other way
    steps = _work(problem, device, strides, owner.tile).time(owner.num_splits)
    return steps * of_owner.step_of_owner(problem, owner.tile)
