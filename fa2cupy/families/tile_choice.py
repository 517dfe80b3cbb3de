"""The choice of a kernel's tile: the caller's, the one in the user's tuning file, or a default from a family's rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from ..errors import UnsupportedProblemError
from ..problem.attention import AttentionProblem
from ..problem.dtypes import ITEMSIZE
from .device import DeviceInfo
from .family import Family, Kernel, TileRow
from .operations import OPERATIONS
from .tile import TileConfig, requested_tile
from .tuning import tuned_tile

__all__ = [
    "candidate_tiles",
    "check_tile",
    "choose_tile",
    "decode_tile",
    "default_tile",
    "is_promising",
    "saves",
    "why_not_map",
]


def choose_tile(
    operation: str,
    family: Family,
    problem: AttentionProblem,
    device: DeviceInfo,
    config: object = None,
    *,
    for_any_batch: bool = False,
) -> TileConfig:
    """The tile of one kernel: the caller's, else that of the user's tuning file, else the family's default.

    `for_any_batch` is that of `default_tile`.

    Raises
    ------
    TypeError, ValueError
        `config` is not None, a TileConfig or a mapping, or not legal for the kernel on the device.
    UnsupportedProblemError
        No default tile fits the device.
    """
    requested, layout = requested_tile(operation, config), problem.settings.block_mask
    kernel = Kernel.of(operation, problem)
    if requested is not None:
        check_tile("config", requested, family, kernel, device)
        if not _holds_keys(operation, requested, problem):
            raise ValueError(f"config: {operation} needs a tile with all {problem.seqlen_k} keys, got {requested}")
        if layout is not None and not layout.takes(requested.b_r, requested.b_c):
            raise ValueError(
                f"block_mask: without a function, the map's tiles {layout.tile} must be multiples of those of "
                f"{operation}, got {requested} in config"
            )
        return requested
    tuned = tuned_tile(family, kernel, problem.causal, device)
    if (
        tuned is not None
        and _holds_keys(operation, tuned, problem)
        and (layout is None or _suits_map(family, operation, problem, tuned))
    ):
        return tuned
    return default_tile(family, operation, problem, device, for_any_batch=for_any_batch)


def _holds_keys(operation: str, tile: TileConfig, problem: AttentionProblem) -> bool:
    """True unless the tile of a block must have all keys of a sequence, or all its scores, and has not."""
    row = OPERATIONS[operation]
    holds_queries = row.owns != "pairs" or problem.seqlen_q <= tile.b_r
    return not row.holds_keys or (problem.seqlen_k <= tile.b_c and holds_queries)


def check_tile(name: str, tile: TileConfig, family: Family, kernel: Kernel, device: DeviceInfo) -> None:
    """Raises ValueError if a kernel cannot have a tile that the argument `name` requests."""
    reason = family.why_illegal(kernel, tile, device)
    if reason:
        at = f"head_dim {kernel.head_dim}"
        at += "" if kernel.head_dim_v == kernel.head_dim else f", head_dim_v {kernel.head_dim_v}"
        raise ValueError(f"{name}: {tile} is not legal for {kernel.operation} at {at}: {reason}")


def is_promising(family: Family, kernel: Kernel, tile: TileConfig, device: DeviceInfo) -> bool:
    """True if a legal tile can be fast.

    The blocks fit for which it limits registers, and at least 4 warps, one for each scheduler of a multiprocessor.
    """
    needed = family.shared_memory_bytes(kernel, tile)
    warps = device.resident_blocks(tile.num_threads, 1, needed) * tile.num_warps
    return warps >= 4 and family.fits_blocks(kernel, tile, device)


def default_tile(
    family: Family, operation: str, problem: AttentionProblem, device: DeviceInfo, *, for_any_batch: bool = False
) -> TileConfig:
    """The first row of `tiles` that applies.

    Parameters
    ----------
    family, operation, problem, device
    for_any_batch : bool, optional
        True if the tile must be the same beside other sequences.

    Raises
    ------
    UnsupportedProblemError
        No row applies.
    """
    tile = _first_applying(family, operation, problem, device, for_any_batch=for_any_batch)
    if tile is not None:
        return tile
    remedies = [f"head_dim up to {n} has one" for n in _narrower(family, operation, problem, device)]
    if OPERATIONS[operation].has_config and _legal_tiles(family, Kernel.of(operation, problem), device):
        remedies.append("config= takes any of fa2cupy.legal_configs")
    of_v = "" if problem.head_dim_v is None else f", head_dim_v {problem.head_dim_v}"
    raise UnsupportedProblemError(
        f"head_dim: no default tile of {operation} ({family.public_name}) at head_dim {problem.head_dim}{of_v}, "
        f"{problem.dtype} fits {device.name}, which has {device.shared_memory_per_block} bytes of shared memory for a "
        f"block{''.join(f'; {remedy}' for remedy in remedies)}"
    )


def _narrower(family: Family, operation: str, problem: AttentionProblem, device: DeviceInfo) -> Iterator[int]:
    """Yields the most columns of q and v for which a kernel has a default tile, if it has one for fewer."""
    own, step = (problem.head_dim, problem.columns_of("v")), family.column_step
    for most in range((max(own) - 1) // step * step, 0, -step):
        columns, columns_v = (min(n, most) for n in own)
        narrower = family.padded(replace(problem, head_dim=columns, head_dim_v=columns_v))
        if _first_applying(family, operation, narrower, device, for_any_batch=False):
            yield most
            return


def _first_applying(
    family: Family, operation: str, problem: AttentionProblem, device: DeviceInfo, *, for_any_batch: bool
) -> TileConfig | None:
    kernel = Kernel.of(operation, problem)
    columns, columns_v = family.padded_head_dim(kernel.head_dim), family.padded_head_dim(kernel.head_dim_v)
    used, function = set(problem.features), problem.settings.score_mod
    if problem.settings.block_mask is not None:
        used.discard("mask_mod")  # it is evaluated for mixed tiles alone, beside the main loop
    if function is not None and function.program.adds_little and ITEMSIZE[problem.dtype] == 2:
        used = used - {"score_mod"} | {"alibi_slopes"}  # it needs no more registers than ALiBi
    applying: Iterator[TileConfig] = (
        row.tile
        for row in family.tiles[operation]
        if columns <= row.head_dim
        and columns_v <= (row.head_dim_v or row.head_dim)
        and (row.dtypes is None or problem.dtype in row.dtypes)
        and (not row.features or not used.isdisjoint(row.features))
        and not (row.is_plain and problem.features)
        and (not row.least_saving or saves(row, family.tiles[operation], problem))
        and (row.most_seqlen_k == math.inf or (problem.seqlen_k <= row.most_seqlen_k and not problem.is_packed))
        and _holds_keys(operation, row.tile, problem)
        and _suits_jobs(operation, row, problem, device, for_any_batch=for_any_batch)
        and family.takes(kernel, row.tile, device)
    )
    if problem.settings.block_mask is not None:
        applying = iter(_tiles_for_map(family, kernel, problem, device, applying))
    return next(applying, None)


def decode_tile(
    family: Family, problem: AttentionProblem, device: DeviceInfo, *, for_any_batch: bool = False
) -> TileConfig:
    """The tile of ``decode``: the default one, with as few rows as hold those of a K/V head.

    Parameters are those of `default_tile`.

    Raises
    ------
    UnsupportedProblemError
        No row of `tiles` applies.
    """
    tile = default_tile(family, "decode", problem, device, for_any_batch=for_any_batch)
    kernel, rows = Kernel.of("decode", problem), problem.heads_per_group * problem.seqlen_q
    # Clusters that are left over take half of the rows, which their blocks merge in half the time.
    divides = tile.cluster > 1 and family.divides_rows
    clusters = device.resident_clusters(tile.cluster) if divides else 0
    while family.why_illegal(kernel, half := replace(tile, b_r=tile.b_r // 2), device) is None:
        if rows > half.b_r and _jobs("decode", problem, half) > clusters:
            break
        tile = half
    return tile


def why_not_map(family: Family, operation: str, problem: AttentionProblem, device: DeviceInfo) -> str | None:
    """The reason why no tile of a kernel suits the map of a problem, as the end of a sentence; None if one does."""
    layout = problem.settings.block_mask
    if layout is None or layout.program is not None:
        return None
    legal = {(tile.b_r, tile.b_c) for tile in _legal_tiles(family, Kernel.of(operation, problem), device)}
    if not legal or any(layout.takes(*sizes) for sizes in legal):
        return None  # without a legal tile, there is another reason
    least = sorted(one for one in legal if not any(_divides(other, one) for other in legal - {one}))
    multiples = ", ".join(map(str, least))
    return (
        f"has no tile of {operation} within the {layout.tile} of block_mask: without a function, a map has tiles "
        f"of multiples of {multiples}"
    )


def _tiles_for_map(
    family: Family, kernel: Kernel, problem: AttentionProblem, device: DeviceInfo, applying: Iterable[TileConfig]
) -> list[TileConfig]:
    """The tiles for a problem's map, best first. Where no default tile will do, it is the largest of all."""
    layout = problem.settings.block_mask
    assert layout is not None, "the call has a map"
    taken = [tile for tile in applying if layout.takes(tile.b_r, tile.b_c)]
    if taken:
        return sorted(taken, key=lambda tile: not _suits_map(family, kernel.operation, problem, tile))
    legal = [tile for tile in _legal_tiles(family, kernel, device) if layout.takes(tile.b_r, tile.b_c)]
    return sorted(legal, key=lambda tile: -tile.b_r * tile.b_c)


def _suits_map(family: Family, operation: str, problem: AttentionProblem, tile: TileConfig) -> bool:
    """True if a kernel's tiles lie within those of a problem's map, or do well with larger ones.

    The tiles that its blocks own may be larger if the map has a function. More steps are then masked, but fewer pairs
    beside the pattern are visited: on an H100, forwards with tiles of 192 queries at head_dim 64 take 0.75 to 0.98 of
    the time that they take with the map's 128. It is 0.92 to 0.98 for documents of any length, but 1.13 to 1.26 for
    documents that begin with tiles of the map, all of which are full: where the kernel reads arrays of what is visible,
    the map's tiles are kept. It does not with intervals, of which larger tiles take 0.85 to 0.92 of the time on an
    H200, and 1.03 with documents of 100 rows. Functions of scores that need many registers spill them in larger tiles.
    """
    layout, function = problem.settings.block_mask, problem.settings.score_mod
    assert layout is not None, "the call has a map"
    if layout.divides(tile.b_r, tile.b_c):
        return True
    owns_queries = family.owns(operation) == "queries"
    has_intervals = layout.intervals[0 if owns_queries else 1]
    if layout.program is None or (layout.program.reads_by_position and not has_intervals):
        return False
    if function is not None and not function.program.adds_little:
        return False
    rows, columns = layout.tile
    return columns % tile.b_c == 0 if owns_queries else rows % tile.b_r == 0


@lru_cache(maxsize=256)  # a family has up to 18,000 candidates
def _legal_tiles(family: Family, kernel: Kernel, device: DeviceInfo) -> tuple[TileConfig, ...]:
    return tuple(tile for tile in candidate_tiles(family) if family.takes(kernel, tile, device))


def candidate_tiles(family: Family) -> Iterator[TileConfig]:
    """The tiles that a sweep tries, legal or not."""
    stages = blocks_per_sm = (1, 2, 3, 4)
    return itertools.starmap(
        TileConfig, itertools.product(family.query_rows, family.key_rows, family.warps, stages, blocks_per_sm)
    )


def _divides(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """True if tiles of the size `other` consist of tiles of the size `one`."""
    return other[0] % one[0] == 0 and other[1] % one[1] == 0


def saves(row: TileRow, rows: Sequence[TileRow], problem: AttentionProblem) -> bool:
    """True if the tiles of a row have so much fewer scores than those of the next one that it applies."""
    if problem.is_packed:
        return False

    def scores(tile: TileConfig) -> int:
        return -(-problem.seqlen_q // tile.b_r) * tile.b_r * -(-problem.seqlen_k // tile.b_c) * tile.b_c

    return scores(rows[rows.index(row) + 1].tile) >= row.least_saving * scores(row.tile)


def _suits_jobs(
    operation: str, row: TileRow, problem: AttentionProblem, device: DeviceInfo, *, for_any_batch: bool
) -> bool:
    """True if a call has as many rows, jobs and keys as the row is for."""
    if problem.seqlen_q * problem.heads_per_group > row.most_rows:
        return False
    if not row.least_jobs and row.most_jobs == math.inf:
        return True
    if for_any_batch:
        return False
    jobs = _jobs(operation, problem, row.tile) / device.multiprocessors
    return row.least_jobs <= jobs <= row.most_jobs and jobs * problem.seqlen_k <= row.most_keys


def _jobs(operation: str, problem: AttentionProblem, tile: TileConfig) -> int:
    """The query tiles of a call; in ``decode``, those of the rows of all heads that share keys."""
    if operation == "decode":
        return problem.batch * problem.num_heads_kv * -(-problem.seqlen_q * problem.heads_per_group // tile.b_r)
    return problem.batch * problem.num_heads * -(-problem.seqlen_q // tile.b_r)
