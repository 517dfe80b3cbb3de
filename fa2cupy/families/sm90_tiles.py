"""What has been measured of the sm90 family: its tiles, and the constants of estimated times."""

from __future__ import annotations

from ..problem.boxes import BoxShapes, Lengths
from ..problem.features import FEATURES, features_in_registers, features_of_scores
from .estimate import BlockCost, Costs
from .family import BoxRow, TileRow
from .one_tile import ONE_TILE_COSTS, ONE_TILE_ROWS_OF_HOPPER
from .tile import TileConfig

__all__ = ["BOXES", "COSTS", "OF_JVP", "OF_WIDER", "SHARED_BYTES", "TILES"]

SHARED_BYTES = 227 * 1024  # the most that a block can have

_H100, _H100_LATER = "NVIDIA H100 80GB HBM3, 2026-11-21", "NVIDIA H100 80GB HBM3, 2026-11-22"
_H100_LAST, _H200 = "NVIDIA H100 80GB HBM3, 2026-11-27", "NVIDIA H200, 2026-11-27"
_H200_LATER, _H200_LAST = "NVIDIA H200, 2026-11-28", "NVIDIA H200, 2026-11-29"
_H100_SHORT = "NVIDIA H100 80GB HBM3, 2026-11-28"  # biases, and sequences of 256 rows and more
_H200_SHORT = "NVIDIA H200, 2026-11-28"  # sequences of 64 rows
#: 1 to 8 sequences of 128 to 2048 rows, 4 and 16 heads. These tiles have as many keys as those for more query tiles, so
#: that results have the same bits beside any other sequences.
_H200_SMALL = "NVIDIA H200, 2026-11-30"
#: Features that need registers in the inner loop, so that the backward with more queries at a time would spill. (With a
#: window it would not spill, but compute more scores outside the window.)
_IN_REGISTERS, _IN_MANY_REGISTERS = features_in_registers(1), features_in_registers(2)
#: The caller's functions, which the compiler evaluates for several elements side by side.
_FUNCTIONS = ("score_mod", "mask_mod")
#: The same, and arrays with an element for each pair of a query and a key.
_BY_POSITION = (*_FUNCTIONS, "bias", "mask")
#: Features of scores that a call with a bias may have beside it.
_BESIDE_BIAS = tuple(name for name in features_of_scores(FEATURES) if name != "bias")
#: With these, two blocks of a multiprocessor gain nothing, need more registers than they have, or were not timed.
_NOT_OF_TWO_BLOCKS = ("block_mask", *(name for name in _IN_MANY_REGISTERS if name != "bias"))
#: The row applies only where blocks keep the bias.
_KEPT_BIAS = ("kept_bias",)
#: The features of the kernels of gradients beyond 256 columns.
OF_WIDER = ("window", "cu_seqlens")
#: The kernels of tangents of the forward.
OF_JVP = ("jvp", "output_jvp")

#: Kernels that own queries have 64 rows for each consumer warp group, and four more warps that load.
TILES: dict[str, tuple[TileRow, ...]] = {
    "forward": (
        TileRow(32, TileConfig(64, 64, 20, 4), _H200_LATER, features=_KEPT_BIAS, most_seqlen_k=256),
        TileRow(32, TileConfig(64, 128, 16, 2), _H200_LATER, features=_KEPT_BIAS, least_saving=0.94),
        TileRow(32, TileConfig(64, 64, 20, 3), _H200_LATER, features=_KEPT_BIAS, most_seqlen_k=512),
        TileRow(32, TileConfig(64, 64, 20, 2), _H200_LATER, features=_KEPT_BIAS),
        TileRow(64, TileConfig(64, 64, 8, 2, 3), _H100_SHORT, features=_KEPT_BIAS),
        TileRow(64, TileConfig(64, 64, 8, 2, 2), _H100_SHORT, features=_KEPT_BIAS, least_saving=1.2),
        TileRow(64, TileConfig(128, 128, 12, 2), _H100_SHORT, features=_KEPT_BIAS),
        TileRow(32, TileConfig(192, 96, 16, 2), features=("mask",)),
        TileRow(32, TileConfig(128, 64, 12, 3, 2), _H200_LATER, features=("bias",)),
        TileRow(32, TileConfig(192, 96, 16, 2), features=_IN_REGISTERS),
        TileRow(32, TileConfig(64, 64, 8, 2, 3), _H200_SHORT, least_saving=1.5),
        TileRow(32, TileConfig(128, 64, 12, 3, 2), _H100_SHORT, least_saving=1.1),
        TileRow(32, TileConfig(192, 128, 16, 2), _H100_SHORT),
        TileRow(64, TileConfig(192, 96, 16, 3), features=_FUNCTIONS),
        TileRow(64, TileConfig(64, 128, 8, 2, 2), _H200_SMALL, is_plain=True, most_jobs=4, most_seqlen_k=2048),
        TileRow(64, TileConfig(192, 128, 16, 3), _H100),
        TileRow(64, TileConfig(128, 128, 12, 3), _H200_LAST, features=("block_mask",)),  # within the map's tiles
        TileRow(128, TileConfig(192, 128, 16, 2), _H200, head_dim_v=64),
        TileRow(128, TileConfig(64, 128, 8, 2), _H200_SMALL, is_plain=True, most_jobs=1, most_seqlen_k=2048),
        TileRow(128, TileConfig(128, 128, 12, 2), _H100),
        TileRow(192, TileConfig(128, 128, 12, 2), _H200, head_dim_v=128),
        TileRow(256, TileConfig(128, 64, 12, 3), _H200, head_dim_v=128),
        TileRow(160, TileConfig(128, 96, 12, 2), _H200),
        TileRow(256, TileConfig(128, 64, 12, 2), _H100),
        TileRow(384, TileConfig(128, 48, 12, 2), _H200_LATER),
        TileRow(512, TileConfig(128, 48, 12, 2), _H200_LATER, head_dim_v=256),
        TileRow(512, TileConfig(128, 32, 12, 2), _H200_LATER),
    ),
    "backward": (
        TileRow(32, TileConfig(128, 128, 12, 2), _H100, features=_NOT_OF_TWO_BLOCKS),
        TileRow(32, TileConfig(64, 128, 12, 2, 2), _H200_LAST, most_seqlen_k=1024),
        TileRow(64, TileConfig(128, 128, 12, 2), _H100),
        TileRow(128, TileConfig(64, 128, 12, 2), _H100_LATER, features=(*_IN_REGISTERS, "window", "block_mask")),
        TileRow(112, TileConfig(96, 128, 12, 2), _H200),
        TileRow(128, TileConfig(96, 128, 12, 2), _H200, head_dim_v=64),
        TileRow(128, TileConfig(80, 128, 12, 2), _H100),
        TileRow(64, TileConfig(64, 128, 12, 2), _H200, head_dim_v=128),
        TileRow(192, TileConfig(64, 128, 12, 2), _H200, head_dim_v=128),  # of two blocks
        TileRow(256, TileConfig(64, 64, 12, 2), _H100),
    ),
    "backward_dq": (
        TileRow(64, TileConfig(64, 64, 8, 2, 2), _H100_LATER, features=_IN_MANY_REGISTERS),
        TileRow(128, TileConfig(128, 64, 12, 2), _H100_LATER, features=_IN_MANY_REGISTERS),
        TileRow(256, TileConfig(128, 32, 12, 2), _H100_LATER, features=_IN_MANY_REGISTERS),
        TileRow(64, TileConfig(64, 128, 8, 2, 2), _H100),
        TileRow(96, TileConfig(128, 96, 12, 3), _H100),
        TileRow(128, TileConfig(128, 128, 12, 2), _H100),
        TileRow(192, TileConfig(128, 64, 12, 3), _H100),
        TileRow(256, TileConfig(128, 64, 12, 2), _H100),
        TileRow(384, TileConfig(64, 48, 12, 2), _H200_LAST),
        TileRow(512, TileConfig(64, 48, 12, 2), _H200_LAST, head_dim_v=256),
        TileRow(512, TileConfig(64, 32, 12, 2), _H200_LAST),
    ),
    "backward_dkdv": (
        TileRow(64, TileConfig(96, 128, 12, 2), features=_FUNCTIONS),
        TileRow(32, TileConfig(128, 128, 12, 2), _H100, features=_NOT_OF_TWO_BLOCKS),
        TileRow(32, TileConfig(64, 128, 12, 4, 2), _H200_LAST, most_seqlen_k=1024),
        TileRow(64, TileConfig(128, 128, 12, 2), _H100),
        TileRow(128, TileConfig(64, 128, 12, 2), _H100_LATER, features=_IN_REGISTERS),
        TileRow(112, TileConfig(96, 128, 12, 2), _H100),
        TileRow(128, TileConfig(96, 128, 12, 2), _H200, head_dim_v=64),
        TileRow(64, TileConfig(64, 128, 12, 2), _H200, head_dim_v=128),
        TileRow(128, TileConfig(80, 128, 12, 2), _H100),
        TileRow(192, TileConfig(96, 64, 12, 2), _H100),
        TileRow(256, TileConfig(64, 64, 12, 2), _H100),
        TileRow(384, TileConfig(48, 64, 12, 2), _H200_LAST),
        TileRow(512, TileConfig(48, 64, 12, 2), _H200_LAST, head_dim_v=256),
        TileRow(512, TileConfig(32, 64, 12, 2), _H200_LAST),
    ),
    "backward_both": (TileRow(64, TileConfig(128, 128, 12, 2)),),
    **ONE_TILE_ROWS_OF_HOPPER,
    "dbias": (
        TileRow(64, TileConfig(64, 64, 8, 3, 2), least_saving=1.2),
        TileRow(64, TileConfig(128, 64, 12, 3), features=_BESIDE_BIAS),
        TileRow(32, TileConfig(128, 128, 12, 4)),
        TileRow(64, TileConfig(128, 128, 12, 2)),
        TileRow(128, TileConfig(128, 64, 12, 2)),
        TileRow(192, TileConfig(64, 64, 8, 2)),
        TileRow(256, TileConfig(64, 32, 8, 2)),
    ),
    # For more than 128 columns of v, two warp groups have the same rows.
    **dict.fromkeys(
        OF_JVP,
        (
            TileRow(64, TileConfig(128, 64, 12, 2), features=_BY_POSITION),
            TileRow(128, TileConfig(128, 48, 12, 2), features=_BY_POSITION),
            TileRow(64, TileConfig(128, 128, 12, 2), _H100_LAST),
            TileRow(96, TileConfig(128, 80, 12, 2)),
            TileRow(128, TileConfig(128, 64, 12, 2), _H100_LAST),
            TileRow(256, TileConfig(64, 32, 12, 2)),
        ),
    ),
    "dq_jvp": (
        TileRow(64, TileConfig(128, 48, 12, 2), features=_IN_REGISTERS),
        TileRow(128, TileConfig(128, 32, 12, 2), features=_IN_REGISTERS),
        TileRow(64, TileConfig(128, 64, 12, 3), _H100_LAST),
        TileRow(128, TileConfig(128, 64, 12, 2), _H100_LAST),
    ),
    "dkdv_jvp": (
        TileRow(64, TileConfig(32, 128, 12, 3), features=_IN_REGISTERS),
        TileRow(64, TileConfig(64, 128, 12, 4), _H100_LAST),
        TileRow(128, TileConfig(16, 128, 12, 3), features=_IN_REGISTERS),
        TileRow(96, TileConfig(48, 128, 12, 2)),
        TileRow(128, TileConfig(32, 128, 12, 3), _H100_LAST),
    ),
}

#: Fitted to the times of scripts/methods.py on an H100 80GB HBM3, 2026-11-23, and an H200, 2026-11-27. Those of
#: gradients beyond 256 columns are fitted to times of their kernels with 2048 and 8192 rows, an H200, 2026-11-29.
COSTS = Costs(
    blocks={
        "forward": {128: BlockCost(0.58, 1.5), 256: BlockCost(0.379, 0.32)},
        "backward": {64: BlockCost(1.884, 4.4), 128: BlockCost(1.593, 8.44), 256: BlockCost(2.355, 11.6)},
        "backward_dq": {
            64: BlockCost(1.68, 3.44),
            128: BlockCost(1.161, 1.27),
            256: BlockCost(0.689, 5.0),
            512: BlockCost(1.7, 14.0),
        },
        **ONE_TILE_COSTS,
        "backward_dkdv": {
            64: BlockCost(1.256, 4.48),
            128: BlockCost(1.27, 9.18),
            256: BlockCost(1.563, 11.36),
            512: BlockCost(2.9, 9.0),
        },
    },
    # The starts are those of blocks. Steps are from times on the H200: 192/128 relative to ``two_pass``, and
    # 512 columns with 8192 rows.
    clusters={"forward": BlockCost(0.467, 1.5), "backward": BlockCost(2.12, 11.6)},
    read_rows=0.83,
    merge=2.0,
    merge_rows=2.0,
    call=0.47,
    call_rows=0.0434,
    launch=2.0,
    both=1.0,
    both_step=0.4,
    convert=0.935,
    convert_rows=5.31,
    add=5.134,
    add_rows=8.87,
    copy=10.32,
    copy_rows=2.989,
    # The kernel of dbias and atomics: an H200, 4 heads of 32 with 256 to 768 rows (the kernel: 2026-11-29), 12 of 64
    # with 1024, and 257 rows for additions one by one (2026-11-28). Those beyond head_dim 64 are predicted.
    dbias={32: 0.56, 64: 0.8, 128: 1.33, 256: 2.5},
    dbias_step=0.9,
    add_dbias=0.76,
    add_dbias_singly=3.7,
    drift=0.165,
)


def _shapes(queries: tuple[Lengths, ...], keys: tuple[Lengths, ...]) -> tuple[BoxShapes, ...]:
    return tuple(BoxShapes(one, other) for one in queries for other in keys)


_PLANES, _SPACES = ((8, 8, 1), (4, 16, 1), (16, 4, 1)), ((4, 4, 4), (8, 4, 2), (8, 2, 4))
_LARGE_PLANES, _LARGE_SPACES = ((16, 8, 1), (8, 16, 1)), ((4, 4, 8), (8, 8, 2), (8, 4, 4), (8, 2, 8))
_PLANES_OF_KEYS = ((16, 8, 1), (8, 16, 1), (32, 4, 1))
_SPACES_OF_KEYS = ((8, 8, 2), (16, 2, 4), (8, 4, 4), (8, 2, 8), (16, 4, 2))
_OWN_PLANES, _OWN_SPACES = ((16, 8, 1), (8, 16, 1)), ((8, 4, 4), (4, 8, 4), (4, 4, 8), (8, 8, 2))
#: The boxes of tokens of kernels with mask functions of neighborhoods. Small ones have fewer hidden scores, which
#: matters less where windows are large.
BOXES = (
    BoxRow(0, 64, 2, TileConfig(64, 128, 8, 2, 2), _shapes(_PLANES, _PLANES_OF_KEYS), 1.0, _H200_LATER),
    BoxRow(65, 128, 2, TileConfig(64, 64, 8, 2, 2), _shapes(_PLANES, ((8, 8, 1), (16, 4, 1))), 1.0, _H200_LATER),
    BoxRow(65, 128, 2, TileConfig(128, 128, 12, 2), _shapes(_LARGE_PLANES, _PLANES_OF_KEYS), 0.72, _H200_LATER),
    BoxRow(0, 64, 3, TileConfig(64, 128, 8, 2, 2), _shapes(_SPACES, _SPACES_OF_KEYS), 1.0, _H200_LATER),
    BoxRow(
        65,
        128,
        3,
        TileConfig(64, 64, 8, 2, 2),
        _shapes(_SPACES, ((8, 4, 2), (8, 2, 4), (8, 8, 1), (16, 2, 2))),
        1.0,
        _H200_LATER,
    ),
    BoxRow(65, 128, 3, TileConfig(128, 128, 12, 2), _shapes(_LARGE_SPACES, _SPACES_OF_KEYS), 0.72, _H200_LATER),
    *(
        BoxRow(least, most, axes, TileConfig(b_r, 128, 12, 2), _shapes(*shapes), 1.0, _H200_LATER, "backward")
        for least, most, axes, b_r, shapes in (
            (0, 64, 2, 128, (((16, 8, 1), (8, 16, 1)), _OWN_PLANES)),
            (65, 128, 2, 64, (((8, 8, 1), (16, 4, 1)), _OWN_PLANES)),
            (0, 64, 3, 128, (_SPACES_OF_KEYS, _OWN_SPACES)),
            (65, 128, 3, 64, (((8, 4, 2), (8, 2, 4), (8, 8, 1), (16, 2, 2)), _OWN_SPACES)),
        )
    ),
)
