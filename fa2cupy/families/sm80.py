"""The sm80 family: tensor cores through ``mma.sync``, on Ampere and newer GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..problem.attention import MAX_HEAD_DIM, AttentionProblem
from ..problem.strides import AnyStrides
from .estimate import BlockCost, Costs
from .family import Family, Kernel, TileRow, register_shortage, why_no_decode
from .one_tile import ONE_TILE_COSTS, ONE_TILE_ROWS
from .operations import ONE_TILE
from .records import POINTER_RECORDS, Record
from .tile import TileConfig

__all__ = ["SM80", "Sm80"]

_H100, _H200 = "NVIDIA H100 80GB HBM3, 2026-11-21", "NVIDIA H200, 2026-11-24"
_H200_LATER = "NVIDIA H200, 2026-11-28"
_H100_LATER, _H100_LAST = "NVIDIA H100 80GB HBM3, 2026-11-25", "NVIDIA H100 80GB HBM3, 2026-11-27"
#: Fitted like those of sm90. Only the number of splits follows from them.
_COSTS = Costs(
    blocks={
        "forward": {64: BlockCost(0.8, 2.0), 128: BlockCost(1.1, 2.0)},
        "backward": {64: BlockCost(3.6, 6.3), 128: BlockCost(3.43, 8.9), 256: BlockCost(4.36, 7.3)},
        "backward_dkdv": {64: BlockCost(2.8, 4.8), 128: BlockCost(2.64, 6.4), 256: BlockCost(4.0, 2.1)},
        **ONE_TILE_COSTS,
        "backward_dq": {64: BlockCost(2.4, 2.9), 128: BlockCost(2.17, 5.8), 256: BlockCost(2.46, 5.0)},
    },
    read_rows=1.2,
    merge=6.0,
    merge_rows=1.6,
    call=6.3,
    call_rows=0.15,
    convert=1.3,
    convert_rows=1.4,
    add=9.8,
    add_rows=17.8,
    copy=5.5,
    copy_rows=3.3,
    drift=0.1,
)

_WIDE, _WIDER = 128, 256  # for more columns, warps share their rows
#: Kernels that end at `_WIDER` columns, and what messages call them.
_UP_TO_256 = {"backward": "'single_pass'", **dict.fromkeys(ONE_TILE, "'one_tile'")}


class Sm80(Family):
    """Kernels of ``mma.sync``, ``ldmatrix`` and ``cp.async``, whose blocks own key tiles in ``backward``."""

    name = "sm80"
    operations = (*Family.operations, *ONE_TILE, "dbias", "decode", "jvp", "output_jvp", "dq_jvp", "dkdv_jvp")
    dtypes = ("float16", "bfloat16")
    min_compute_capability = 80
    row_alignment = 16
    head_dim_step = 8
    most_columns = 512
    column_step = 16  # a k-step of mma.sync
    backward_owns = "keys"
    default_methods = ("single_pass", "one_tile")
    split_operations = ("forward", "backward", "backward_dkdv")
    costs = _COSTS
    tiles = {
        "forward": (
            TileRow(32, TileConfig(128, 64, 4, 2, 3), _H100),
            TileRow(64, TileConfig(128, 128, 4, 2, 2), _H100),
            TileRow(64, TileConfig(128, 64, 4, 2, 2)),
            TileRow(96, TileConfig(128, 80, 4, 2, 2), _H100),
            TileRow(128, TileConfig(128, 64, 4, 2, 2), _H100),
            TileRow(128, TileConfig(128, 32, 4, 2, 2)),
            TileRow(128, TileConfig(128, 32, 4, 1, 2)),
            TileRow(192, TileConfig(128, 96, 8, 2), _H100),
            TileRow(256, TileConfig(128, 64, 8, 2), _H100),
            TileRow(256, TileConfig(128, 64, 8)),
            TileRow(256, TileConfig(64, 32, 4)),
            TileRow(512, TileConfig(64, 64, 4), _H200_LATER, head_dim_v=256),
            TileRow(512, TileConfig(64, 64, 8), _H200_LATER),
            TileRow(512, TileConfig(64, 32, 8)),
            TileRow(512, TileConfig(32, 32, 4)),
            TileRow(512, TileConfig(32, 32, 2), head_dim_v=256),
        ),
        # Their b_r is the most rows of a tile. Copies of 48 KiB or more are under way on a multiprocessor.
        "decode": (
            # Clusters merge the parts of few jobs. Those of 8 leave multiprocessors idle, which long caches need, and
            # narrow rows sooner: their blocks have half as many bytes under way.
            TileRow(128, TileConfig(32, 128, 8, 3, cluster=8), _H200_LATER, most_jobs=1 / 64, most_keys=16),
            TileRow(128, TileConfig(32, 64, 4, 3, cluster=8), _H200_LATER, most_jobs=1 / 64, most_keys=125),
            TileRow(64, TileConfig(32, 128, 8, 3, cluster=8), _H200_LATER, most_jobs=7 / 64, most_keys=250),
            TileRow(64, TileConfig(32, 128, 8, 3, cluster=2), _H200_LATER, least_jobs=1 / 32, most_jobs=1 / 8),
            TileRow(128, TileConfig(32, 128, 8, 3, cluster=8), _H200_LATER, most_jobs=7 / 64, most_keys=1000),
            TileRow(128, TileConfig(32, 128, 8, 3, cluster=2), _H200_LATER, least_jobs=1 / 32, most_jobs=1 / 8),
            # Where large blocks would have two jobs or one, small ones have parts of nearly one length.
            TileRow(64, TileConfig(32, 128, 4, 2, 3), _H100_LATER, least_jobs=1.01),
            TileRow(64, TileConfig(32, 64, 4, 4, 2), least_jobs=2),
            TileRow(128, TileConfig(32, 64, 4, 3, 2), _H200, least_jobs=1.01),
            TileRow(64, TileConfig(32, 256, 8, 3), _H100_LATER, least_jobs=0.25),
            TileRow(64, TileConfig(32, 128, 8, 5), _H200),
            TileRow(64, TileConfig(32, 128, 8, 4)),
            TileRow(64, TileConfig(32, 64, 4, 4)),
            TileRow(128, TileConfig(32, 128, 8, 3), _H200),
            TileRow(128, TileConfig(32, 128, 8, 2)),
            TileRow(128, TileConfig(32, 64, 4, 2)),
            TileRow(256, TileConfig(16, 64, 4, 3)),
            TileRow(256, TileConfig(16, 64, 4, 2)),
            TileRow(256, TileConfig(16, 32, 2, 2)),
            TileRow(512, TileConfig(16, 32, 4, 3)),
            TileRow(512, TileConfig(16, 32, 4, 2)),
            TileRow(512, TileConfig(16, 16, 2, 2)),
            TileRow(512, TileConfig(16, 32, 2, 2)),
            TileRow(512, TileConfig(16, 16, 1, 2)),
            TileRow(576, TileConfig(16, 64, 4, 2), head_dim_v=512),
            TileRow(576, TileConfig(16, 32, 2, 2), head_dim_v=512),
        ),
        "jvp": (
            TileRow(64, TileConfig(64, 64, 4, 2, 2)),
            TileRow(64, TileConfig(64, 32, 4, 2, 2)),
            TileRow(128, TileConfig(64, 32, 4, 2, 2)),
            TileRow(128, TileConfig(64, 32, 4, 1, 2)),
            TileRow(128, TileConfig(64, 32, 4, 2)),
            TileRow(256, TileConfig(64, 32, 8)),
            TileRow(256, TileConfig(64, 32, 4)),
            TileRow(256, TileConfig(32, 16, 4)),
            TileRow(256, TileConfig(32, 16, 2)),
            TileRow(512, TileConfig(32, 32, 8)),
            TileRow(512, TileConfig(32, 16, 8)),
            TileRow(512, TileConfig(16, 16, 4)),
            TileRow(512, TileConfig(32, 16, 4), head_dim_v=256),
            TileRow(512, TileConfig(16, 16, 2), head_dim_v=256),
            TileRow(512, TileConfig(32, 16, 2), head_dim_v=128),
            TileRow(512, TileConfig(16, 16, 1), head_dim_v=128),
        ),
        "output_jvp": (
            TileRow(64, TileConfig(128, 32, 4, 2), _H100_LAST),
            TileRow(128, TileConfig(64, 32, 4, 2, 2)),
            TileRow(128, TileConfig(64, 32, 4, 1, 2)),
            TileRow(128, TileConfig(64, 32, 4, 2)),
            TileRow(256, TileConfig(64, 32, 4)),
            TileRow(256, TileConfig(32, 16, 2)),
            TileRow(512, TileConfig(64, 16, 8)),
            TileRow(512, TileConfig(32, 16, 4)),
            TileRow(512, TileConfig(16, 16, 2)),
        ),
        "dq_jvp": (
            TileRow(64, TileConfig(64, 64, 4, 2), _H100_LAST),
            TileRow(128, TileConfig(64, 32, 4, 1, 2)),
            TileRow(128, TileConfig(64, 16, 4, 1, 2)),
            TileRow(128, TileConfig(64, 32, 4)),
            TileRow(256, TileConfig(64, 16, 4)),
            TileRow(256, TileConfig(32, 16, 2)),
            TileRow(512, TileConfig(32, 16, 4)),
            TileRow(512, TileConfig(16, 16, 2)),
        ),
        "dkdv_jvp": (
            TileRow(64, TileConfig(32, 64, 4, 2, 2)),
            TileRow(64, TileConfig(32, 64, 4)),
            TileRow(128, TileConfig(32, 128, 8), _H100_LAST),
            TileRow(128, TileConfig(16, 64, 4, 2)),
            TileRow(256, TileConfig(16, 64, 8)),
            TileRow(256, TileConfig(16, 32, 4)),
            TileRow(512, TileConfig(16, 32, 8)),
            TileRow(512, TileConfig(16, 16, 4)),
        ),
        "backward": (
            TileRow(32, TileConfig(64, 128, 8, 2, 2), _H100),
            TileRow(64, TileConfig(64, 64, 4, 2, 3), _H100),
            TileRow(64, TileConfig(64, 64, 4, 2, 2)),
            TileRow(64, TileConfig(32, 64, 4, 2, 2)),
            TileRow(128, TileConfig(64, 128, 8, 2), _H100),
            TileRow(128, TileConfig(64, 128, 8)),
            TileRow(128, TileConfig(32, 64, 4, 2)),
            TileRow(160, TileConfig(32, 64, 4, 2, 2), _H100),
            TileRow(256, TileConfig(64, 64, 8, 2), _H100),
            TileRow(256, TileConfig(32, 64, 8, 2)),
            TileRow(256, TileConfig(32, 64, 8)),
            TileRow(256, TileConfig(16, 32, 4)),
        ),
        "backward_dq": (
            TileRow(32, TileConfig(128, 32, 4, 2, 2), _H100),
            TileRow(64, TileConfig(128, 64, 4, 2, 2), _H100),
            TileRow(128, TileConfig(128, 32, 4, 2, 2), _H100),
            TileRow(128, TileConfig(64, 64, 4, 1, 2)),
            TileRow(128, TileConfig(64, 32, 4, 1, 2)),
            TileRow(192, TileConfig(64, 64, 4, 1, 2), _H100),
            TileRow(256, TileConfig(64, 32, 4, 1, 2), _H100),
            TileRow(256, TileConfig(32, 32, 2, 1, 2)),
            TileRow(256, TileConfig(32, 32, 2)),
            TileRow(512, TileConfig(64, 64, 8), _H200_LATER),
            TileRow(512, TileConfig(64, 32, 8), _H200_LATER),
            TileRow(512, TileConfig(32, 32, 4)),
            TileRow(512, TileConfig(16, 32, 2)),
            TileRow(512, TileConfig(64, 32, 4)),
            TileRow(512, TileConfig(32, 16, 2)),
        ),
        "backward_dkdv": (
            TileRow(32, TileConfig(64, 64, 4, 2, 4), _H100),
            TileRow(64, TileConfig(64, 64, 4, 2, 3), _H100),
            TileRow(64, TileConfig(64, 64, 4, 2, 2)),
            TileRow(64, TileConfig(32, 64, 4, 2, 2)),
            TileRow(96, TileConfig(64, 64, 4, 2, 2), _H100),
            TileRow(128, TileConfig(64, 128, 8, 2), _H100),
            TileRow(128, TileConfig(32, 64, 4, 2)),
            TileRow(160, TileConfig(32, 64, 4, 2, 2), _H100),
            TileRow(256, TileConfig(64, 64, 8, 2), _H100),
            TileRow(256, TileConfig(32, 64, 8)),
            TileRow(256, TileConfig(32, 32, 4)),
            TileRow(320, TileConfig(32, 48, 12, 2), _H200_LATER),
            TileRow(384, TileConfig(64, 32, 8), _H200_LATER),
            TileRow(512, TileConfig(64, 32, 8), _H200_LATER, head_dim_v=256),
            TileRow(512, TileConfig(32, 32, 8, 2), _H200_LATER),
            TileRow(512, TileConfig(32, 32, 8)),
            TileRow(512, TileConfig(32, 16, 4)),
        ),
        **ONE_TILE_ROWS,
        # They have not been swept. Several blocks on a multiprocessor hide each other's latencies.
        "dbias": (
            TileRow(64, TileConfig(64, 64, 4, 2, 3)),
            TileRow(64, TileConfig(64, 64, 4, 2, 2)),
            TileRow(128, TileConfig(64, 64, 4, 1, 3)),
            TileRow(128, TileConfig(64, 64, 4, 1, 2)),
            TileRow(128, TileConfig(64, 64, 4)),
            TileRow(256, TileConfig(64, 32, 4, 1, 2)),
            TileRow(256, TileConfig(64, 32, 4)),
            TileRow(512, TileConfig(64, 32, 4)),
            TileRow(512, TileConfig(32, 16, 2)),
        ),
    }

    def record(self, operation: str) -> Record:
        return POINTER_RECORDS["backward_to_workspace" if operation == "backward" else operation]

    def why_not(self, operation: str, problem: AttentionProblem, strides: Mapping[str, AnyStrides]) -> str | None:
        return _why_not_wider(Kernel.of(operation, problem))

    def methods_of(self, problem: AttentionProblem) -> tuple[str, ...]:
        is_wider = max(problem.head_dim, problem.columns_of("v")) > _WIDER
        return ("two_pass",) if is_wider else self.default_methods

    def head_dims(self, head_dim: int, head_dim_v: int) -> tuple[int, int]:
        taken = super().head_dims(head_dim, head_dim_v)
        if max(taken) <= _WIDER:
            return taken
        columns, columns_v = (-(-n // 32) * 32 if n <= _WIDE else n for n in taken)  # two warps share dK, and dV
        return columns, columns_v

    def padded_head_dim(self, head_dim: int) -> int:
        step = self.column_step * _most_sharers(head_dim)  # warps that share rows have a k-step each
        return -(-head_dim // step) * step

    def shared_memory_bytes(self, kernel: Kernel, tile: TileConfig) -> int:
        operation, _, head_dim, head_dim_v, _ = kernel
        row, row_v = 2 * self.padded_head_dim(head_dim), 2 * self.padded_head_dim(head_dim_v)
        b_r, b_c, both = tile.b_r, tile.b_c, row + row_v
        scores = 2 * b_r * b_c
        if operation == "forward":
            sharers, tiles = _sharers(head_dim_v, b_c), b_r * row + tile.num_stages * b_c * both
            # O is staged where Q and keys have been, but not where rows are exchanged.
            is_shared = sharers > 1
            return max(tiles + is_shared * scores, b_r * row_v) + is_shared * sharers * 4 * b_r
        if operation in ("jvp", "output_jvp"):
            return max(2 * b_r * row + 2 * tile.num_stages * b_c * both, b_r * row_v)
        if operation == "dq_jvp":
            return 2 * (b_r * both + tile.num_stages * b_c * both)
        if operation == "backward_dq":
            return b_r * both + tile.num_stages * b_c * both + (scores if head_dim > _WIDER else 0)
        if operation == "dbias":
            return tile.num_stages * (b_r + b_c) * both
        if operation == "decode":
            groups = tile.num_warps // _sharers_of_gradient(head_dim_v)
            own_v = 0 if head_dim > MAX_HEAD_DIM else row_v  # V of more columns is in K
            slot = max(b_c // groups * (row + own_v), 2 * 16 * row_v)  # K and V, or 16 rows of O
            share = tile.cluster * (8 * b_r + 16 * -(-b_r * -(-head_dim_v // 4) // tile.cluster))
            queries = 1 if tile.cluster > 1 else 2
            own = queries * b_r * row + groups * (tile.num_stages * slot + 8 * b_r)
            return own + (share if tile.cluster > 1 else 0)
        if operation == "dkdv_jvp":
            return 2 * (b_c * both + tile.num_stages * b_r * both) + 2 * 16 * b_r
        if operation in ONE_TILE:
            sums = 3 * scores if operation == "backward_one_tile_dbias" else 0  # and the bias
            exchanged = 0 if _has_both_roles(kernel, tile) else scores
            return (b_c + b_r) * both + scores + max(exchanged, b_r * row_v) + 4 * b_r * 4 + sums
        exchanged = scores if max(head_dim, head_dim_v) > _WIDER else 0
        by_keys = b_c * both + tile.num_stages * b_r * both + scores + exchanged + 4 * b_r * 4
        return {"backward": by_keys + 2 * scores, "backward_dkdv": by_keys}[operation]

    def blocks_of_tile(self, kernel: Kernel, tile: TileConfig) -> int:
        return tile.cluster if kernel.operation == "decode" else 1

    def why_not_shape(self, kernel: Kernel, tile: TileConfig) -> str | None:
        operation, _, head_dim, head_dim_v, _ = kernel
        why_not = _why_not_wider(kernel)
        if why_not:
            return why_not
        if operation == "forward":
            return _why_no_forward(tile, head_dim_v)
        if operation in ("jvp", "output_jvp"):
            return _why_no_jvp(tile, head_dim, head_dim_v, with_output=operation == "jvp")
        if operation == "backward_dq":
            return _why_no_dq(tile, head_dim)
        if operation == "dq_jvp":
            return _why_no_dq_jvp(tile, head_dim, head_dim_v)
        if operation == "dbias":
            return _why_no_query_rows(tile, 0, 3, most_stages=2)
        if operation == "decode":
            return _why_no_decode(tile, head_dim_v)
        if operation == "dkdv_jvp":
            return _why_no_dkdv_jvp(tile, head_dim, head_dim_v)
        if operation in ONE_TILE and tile.num_stages > 1:
            return f"num_stages={tile.num_stages} is more than 1"
        if operation in ONE_TILE and _has_both_roles(kernel, tile):
            return _why_no_one_tile(tile, head_dim, head_dim_v)
        with_dq = {"backward": True, **dict.fromkeys(ONE_TILE, True), "backward_dkdv": False}[operation]
        return _why_no_key_rows(tile, head_dim, head_dim_v, with_dq=with_dq)


def _why_not_wider(kernel: Kernel) -> str | None:
    """The reason why a kernel does not hold so many columns, or None if it does."""
    for name, columns in (("head_dim", kernel.head_dim), ("head_dim_v", kernel.head_dim_v)):
        if columns > _WIDER and kernel.operation in _UP_TO_256:
            return f"{name}={columns} is above the {_WIDER} of {_UP_TO_256[kernel.operation]}; use 'two_pass' or None"
    return None


def _most_sharers(columns: int) -> int:
    """The most warps of the forward that share rows of O with so many columns."""
    return 4 if columns > _WIDER else 2 if columns > _WIDE else 1


def _sharers(columns: int, keys: int) -> int:
    """The same in tiles of so many keys, of which four warps have 16 each, or two."""
    return 2 if keys % 64 and columns > _WIDE else _most_sharers(columns)


def _why_no_forward(tile: TileConfig, head_dim_v: int) -> str | None:
    if head_dim_v <= _WIDE:
        return _why_no_query_rows(tile, head_dim_v, 1)
    sharers = _sharers(head_dim_v, tile.b_c)
    groups = tile.num_warps // sharers
    if tile.b_c % (16 * sharers):
        return f"b_c={tile.b_c} is not a multiple of {16 * sharers}"
    if tile.num_warps % sharers or groups > 15 or tile.b_r % (16 * groups) or tile.b_r // groups not in (16, 32):
        return f"b_r={tile.b_r} does not give each {sharers} of {tile.num_warps} warps 16 or 32 rows"
    if tile.num_stages > 4:
        return f"num_stages={tile.num_stages} is more than 4"
    return register_shortage(tile.b_r // groups // 16 * (head_dim_v + tile.b_c) // (2 * sharers), 40, tile)


def _sharers_of_gradient(columns: int) -> int:
    """The warps that share rows of a gradient with so many columns, and of O in ``decode``."""
    return 2 if columns > _WIDER else 1


def _why_no_decode(tile: TileConfig, head_dim_v: int) -> str | None:
    sharers = _sharers_of_gradient(head_dim_v)
    if tile.num_warps % sharers:
        return f"num_warps={tile.num_warps} is not even"
    groups = tile.num_warps // sharers
    if groups > 15 and sharers > 1:
        return f"num_warps={tile.num_warps} is more than 30"
    why_not = why_no_decode(replace(tile, num_warps=groups), (16, 32), (16, 32))
    keys = tile.b_c // groups
    return why_not or register_shortage(tile.b_r // 16 * (head_dim_v // sharers + keys) // 2, 40, tile)


def _why_no_jvp(tile: TileConfig, head_dim: int, head_dim_v: int, *, with_output: bool) -> str | None:
    sharers = _most_sharers(head_dim_v) if with_output else _sharers_of_gradient(max(head_dim, head_dim_v))
    return _why_no_shared_rows(tile, sharers, (1 + with_output) * head_dim_v // sharers, 2)


def _why_no_dq_jvp(tile: TileConfig, head_dim: int, head_dim_v: int) -> str | None:
    sharers = _sharers_of_gradient(max(head_dim, head_dim_v))
    return _why_no_shared_rows(tile, sharers, head_dim // sharers, 4)


def _why_no_shared_rows(tile: TileConfig, sharers: int, columns: int, score_fragments: int) -> str | None:
    """The same as `_why_no_query_rows` of warps that share rows, with so many columns each, and compute all scores."""
    if tile.num_warps % sharers:
        return f"num_warps={tile.num_warps} is not a multiple of {sharers}"
    alone = replace(tile, num_warps=tile.num_warps // sharers, blocks_per_sm=sharers * tile.blocks_per_sm)
    return _why_no_query_rows(alone, columns, score_fragments)


def _why_no_dq(tile: TileConfig, head_dim: int) -> str | None:
    if head_dim <= _WIDER:
        return _why_no_query_rows(tile, head_dim, 2)
    if tile.num_warps % 2 or tile.num_warps > 30:
        return f"num_warps={tile.num_warps} is not an even number up to 30"
    if tile.b_c % 32:
        return f"b_c={tile.b_c} is not a multiple of 32"
    one_of_two = replace(tile, num_warps=tile.num_warps // 2, b_c=tile.b_c // 2, blocks_per_sm=2 * tile.blocks_per_sm)
    return _why_no_query_rows(one_of_two, head_dim // 2, 2)


def _why_no_query_rows(tile: TileConfig, columns: int, score_fragments: int, *, most_stages: int = 4) -> str | None:
    """The reason why kernels whose warps own rows of O or dQ cannot have this tile, or None if they can."""
    if tile.b_c % 16:
        return f"b_c={tile.b_c} is not a multiple of 16"
    if tile.b_r % (16 * tile.num_warps) or tile.b_r // tile.num_warps not in (16, 32, 64):
        return f"b_r={tile.b_r} does not give each of {tile.num_warps} warps 16, 32 or 64 rows"
    if tile.num_stages > most_stages:
        return f"num_stages={tile.num_stages} is more than {most_stages}"
    fragments = tile.b_r // tile.num_warps // 16
    return register_shortage(fragments * (columns + score_fragments * tile.b_c) // 2, 32, tile)


def _why_no_key_rows(tile: TileConfig, head_dim: int, head_dim_v: int, *, with_dq: bool) -> str | None:
    """The reason why kernels whose pairs of warps own rows of keys cannot have this tile, or None if they can."""
    sharers = _sharers_of_gradient(max(head_dim, head_dim_v))  # pairs of warps
    groups, most = tile.num_warps // (2 * sharers), 30 // sharers // (2 * sharers) * 2 * sharers
    if tile.num_warps % (2 * sharers) or tile.num_warps > most:
        return f"num_warps={tile.num_warps} is not a multiple of {2 * sharers} up to {most}"
    if tile.b_c % (16 * groups) or tile.b_c // groups not in (16, 32, 64):
        return f"b_c={tile.b_c} does not give each {2 * sharers} of {tile.num_warps} warps 16, 32 or 64 keys"
    if tile.b_r % (16 * sharers) or 2 * tile.b_r > tile.num_threads:
        return f"b_r={tile.b_r} is not a multiple of {16 * sharers} with two threads a row"
    if tile.num_stages > 2:
        return f"num_stages={tile.num_stages} is more than 2"
    if with_dq and not _dq_divides(tile, head_dim):
        return f"dQ of {tile.b_r} x {head_dim} does not divide among {tile.num_warps} warps"
    fragments = tile.b_c // groups // 16
    # One warp of a pair has dV, the other dK.
    return register_shortage(fragments * (max(head_dim, head_dim_v) + tile.b_r) // (2 * sharers), 32, tile)


def _has_both_roles(kernel: Kernel, tile: TileConfig) -> bool:
    """True if each warp of ``one_tile`` computes both gradients of its keys. The head_dims are padded."""
    return max(kernel.head_dim, kernel.head_dim_v) <= 64 and tile.b_c >= 16 * tile.num_warps


def _why_no_one_tile(tile: TileConfig, head_dim: int, head_dim_v: int) -> str | None:
    """The reason why kernels of ``one_tile`` whose warps compute both gradients cannot have this tile, or None."""
    if tile.b_c % (16 * tile.num_warps) or tile.b_c // tile.num_warps not in (16, 32):
        return f"b_c={tile.b_c} does not give each of {tile.num_warps} warps 16 or 32 keys"
    if tile.b_r % 16 or 2 * tile.b_r > tile.num_threads:
        return f"b_r={tile.b_r} is not a multiple of 16 with two threads a row"
    if not _dq_divides(tile, head_dim):
        return f"dQ of {tile.b_r} x {head_dim} does not divide among {tile.num_warps} warps"
    fragments = tile.b_c // tile.num_warps // 16
    return register_shortage(fragments * (head_dim + head_dim_v + 2 * tile.b_r) // 2, 0, tile)


def _why_no_dkdv_jvp(tile: TileConfig, head_dim: int, head_dim_v: int) -> str | None:
    widest = max(head_dim, head_dim_v)
    roles = 2 if widest > _WIDE else 1  # of warps that share keys
    sharers = _sharers_of_gradient(widest)
    owners = tile.num_warps // (roles * sharers)  # groups of warps that share keys
    if tile.num_warps % (roles * sharers):
        return f"num_warps={tile.num_warps} is not a multiple of {roles * sharers}"
    if tile.b_c % (16 * owners) or tile.b_c // owners not in (16, 32):
        return f"b_c={tile.b_c} does not give each of {tile.num_warps} warps 16 or 32 keys"
    if tile.b_r % 16 or tile.b_r > tile.num_threads:
        return f"b_r={tile.b_r} is not a multiple of 16 with a thread a row"
    if tile.num_stages > 2:
        return f"num_stages={tile.num_stages} is more than 2"
    columns = head_dim + head_dim_v if roles == 1 else widest // sharers
    return register_shortage(tile.b_c // owners // 16 * (columns + 4 * tile.b_r) // 2, 32, tile)


def _dq_divides(tile: TileConfig, head_dim: int) -> bool:
    """True if dQ divides into bands of 32 rows whose columns the warps share evenly, or into bands of 16 rows."""
    bands = tile.b_r // 32
    if tile.b_r % 32 == 0 and tile.num_warps % bands == 0 and (head_dim // 16) % (tile.num_warps // bands) == 0:
        return True
    return tile.num_warps % (tile.b_r // 16) == 0


SM80 = Sm80()
