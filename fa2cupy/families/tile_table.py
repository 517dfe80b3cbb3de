"""Default tiles: data only.

A row serves head dimensions up to `head_dim` (of the family's padded size), and calls with one of its `features` only if
it has some. The first row of an operation wins that is
legal on the device and of which the device's shared memory holds as many blocks as the row counts on. `measured` names
the GPU and date of the sweep behind a row. Rows without one are by arithmetic (they fit, and keep their accumulators in
registers) and wait for a sweep: those of sm80 and simt are for GPUs with less shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from .tiles import TileConfig

__all__ = ["TILE_TABLE", "TileRow"]


@dataclass(frozen=True)
class TileRow:
    """One default: where it applies, the tile, and where it was measured."""

    family: str
    operation: str
    head_dim: int
    tile: TileConfig
    dtypes: tuple[str, ...] | None = None
    measured: str = ""
    features: tuple[str, ...] = ()


def _rows(
    family: str, operation: str, *rows: tuple, dtypes: tuple[str, ...] | None = None, features: tuple[str, ...] = ()
) -> list[TileRow]:
    return [
        TileRow(family, operation, head_dim, tile, dtypes, *(measured or ("",)), features)
        for head_dim, tile, *measured in rows
    ]


_H100, _H100_LATER = "NVIDIA H100 80GB HBM3, 2026-11-21", "NVIDIA H100 80GB HBM3, 2026-11-22"
#: Features that take registers where the backward has none to spare: with more queries at a time it would spill. (With a
#: window it would not, but compute more scores that are outside.)
_IN_REGISTERS = ("softcap", "alibi_slopes", "bias", "mask", "dropout_p")
_FLOAT, _DOUBLE = ("float32",), ("float64",)

TILE_TABLE: tuple[TileRow, ...] = (
    # b_r is 64 rows for each multiplying warp group; four more warps load.
    *_rows(
        "sm90",
        "forward",
        (32, TileConfig(192, 96, 16, 2)),
        (64, TileConfig(192, 128, 16, 3), _H100),
        (128, TileConfig(128, 128, 12, 2), _H100),
        (256, TileConfig(128, 64, 12, 2), _H100),
    ),
    *_rows(
        "sm90",
        "backward",
        (64, TileConfig(128, 128, 12, 2), _H100),
    ),
    *_rows("sm90", "backward", (128, TileConfig(64, 128, 12, 2), _H100_LATER), features=(*_IN_REGISTERS, "window")),
    *_rows(
        "sm90",
        "backward",
        (96, TileConfig(96, 128, 12, 2), _H100),
        (128, TileConfig(80, 128, 12, 2), _H100),
        (256, TileConfig(64, 64, 12, 2), _H100),
    ),
    *_rows(
        "sm90",
        "backward_dq",
        (64, TileConfig(64, 64, 8, 2, 2), _H100_LATER),
        (128, TileConfig(128, 64, 12, 2), _H100_LATER),
        (256, TileConfig(128, 32, 12, 2), _H100_LATER),
        features=("bias", "mask", "dropout_p"),
    ),
    *_rows(
        "sm90",
        "backward_dq",
        (64, TileConfig(64, 128, 8, 2, 2), _H100),
        (96, TileConfig(128, 96, 12, 3), _H100),
        (128, TileConfig(128, 128, 12, 2), _H100),
        (192, TileConfig(128, 64, 12, 3), _H100),
        (256, TileConfig(128, 64, 12, 2), _H100),
    ),
    *_rows(
        "sm90",
        "backward_dkdv",
        (64, TileConfig(128, 128, 12, 2), _H100),
    ),
    *_rows("sm90", "backward_dkdv", (128, TileConfig(64, 128, 12, 2), _H100_LATER), features=_IN_REGISTERS),
    *_rows(
        "sm90",
        "backward_dkdv",
        (112, TileConfig(96, 128, 12, 2), _H100),
        (128, TileConfig(80, 128, 12, 2), _H100),
        (192, TileConfig(96, 64, 12, 2), _H100),
        (256, TileConfig(64, 64, 12, 2), _H100),
    ),
    *_rows(
        "sm80",
        "forward",
        (32, TileConfig(128, 64, 4, 2, 3), _H100),
        (64, TileConfig(128, 128, 4, 2, 2), _H100),
        (64, TileConfig(128, 64, 4, 2, 2)),
        (96, TileConfig(128, 80, 4, 2, 2), _H100),
        (128, TileConfig(128, 64, 4, 2, 2), _H100),
        (128, TileConfig(128, 32, 4, 2, 2)),
        (128, TileConfig(128, 32, 4, 1, 2)),
        (192, TileConfig(128, 96, 8, 2), _H100),
        (256, TileConfig(128, 64, 8, 2), _H100),
        (256, TileConfig(128, 64, 8, 1)),
        (256, TileConfig(64, 32, 4, 1)),
    ),
    *_rows(
        "sm80",
        "backward",
        (32, TileConfig(64, 128, 8, 2, 2), _H100),
        (64, TileConfig(64, 64, 4, 2, 3), _H100),
        (64, TileConfig(64, 64, 4, 2, 2)),
        (64, TileConfig(32, 64, 4, 2, 2)),
        (128, TileConfig(64, 128, 8, 2), _H100),
        (128, TileConfig(64, 128, 8, 1)),
        (128, TileConfig(32, 64, 4, 2)),
        (160, TileConfig(32, 64, 4, 2, 2), _H100),
        (256, TileConfig(64, 64, 8, 2), _H100),
        (256, TileConfig(32, 64, 8, 2)),
        (256, TileConfig(32, 64, 8, 1)),
        (256, TileConfig(16, 32, 4, 1)),
    ),
    *_rows(
        "sm80",
        "backward_dq",
        (32, TileConfig(128, 32, 4, 2, 2), _H100),
        (64, TileConfig(128, 64, 4, 2, 2), _H100),
        (128, TileConfig(128, 32, 4, 2, 2), _H100),
        (128, TileConfig(64, 64, 4, 1, 2)),
        (128, TileConfig(64, 32, 4, 1, 2)),
        (192, TileConfig(64, 64, 4, 1, 2), _H100),
        (256, TileConfig(64, 32, 4, 1, 2), _H100),
        (256, TileConfig(32, 32, 2, 1, 2)),
        (256, TileConfig(32, 32, 2, 1)),
    ),
    *_rows(
        "sm80",
        "backward_dkdv",
        (32, TileConfig(64, 64, 4, 2, 4), _H100),
        (64, TileConfig(64, 64, 4, 2, 3), _H100),
        (64, TileConfig(64, 64, 4, 2, 2)),
        (64, TileConfig(32, 64, 4, 2, 2)),
        (96, TileConfig(64, 64, 4, 2, 2), _H100),
        (128, TileConfig(64, 128, 8, 2), _H100),
        (128, TileConfig(32, 64, 4, 2)),
        (160, TileConfig(32, 64, 4, 2, 2), _H100),
        (256, TileConfig(64, 64, 8, 2), _H100),
        (256, TileConfig(32, 64, 8, 1)),
        (256, TileConfig(32, 32, 4, 1)),
    ),
    # The backward of simt keeps to the picture of 32 x 32 tiles, four warps and eight rows a warp while registers allow.
    *_rows(
        "simt",
        "forward",
        (128, TileConfig(64, 32, 8, 1, 2), _H100),
        (256, TileConfig(32, 32, 8), _H100),
        (256, TileConfig(16, 16, 4)),
        dtypes=_FLOAT,
    ),
    *_rows(
        "simt",
        "forward",
        (64, TileConfig(32, 16, 4, 1, 3), _H100),
        (256, TileConfig(16, 16, 4, 1, 2), _H100),
        (256, TileConfig(16, 8, 4)),
        dtypes=_DOUBLE,
    ),
    *_rows(
        "simt",
        "backward",
        (64, TileConfig(32, 32, 4, 1, 4), _H100),
        (128, TileConfig(32, 32, 4, 1, 3), _H100),
        (256, TileConfig(32, 16, 4, 1, 2), _H100),
        (256, TileConfig(16, 16, 4)),
        (256, TileConfig(16, 8, 4)),
        dtypes=_FLOAT,
    ),
    *_rows(
        "simt",
        "backward",
        (64, TileConfig(32, 32, 4, 1, 3), _H100),
        (128, TileConfig(32, 16, 4, 1, 2), _H100),
        (256, TileConfig(8, 16, 4)),
        (256, TileConfig(16, 8, 4)),
        dtypes=_DOUBLE,
    ),
    *_rows(
        "simt",
        "backward_dq",
        (64, TileConfig(32, 32, 4, 1, 4), _H100),
        (128, TileConfig(32, 32, 4, 1, 3), _H100),
        (256, TileConfig(32, 16, 4, 1, 2), _H100),
        (256, TileConfig(16, 16, 4)),
        dtypes=_FLOAT,
    ),
    *_rows(
        "simt",
        "backward_dq",
        (64, TileConfig(32, 32, 4, 1, 3), _H100),
        (128, TileConfig(32, 16, 4, 1, 2), _H100),
        (256, TileConfig(8, 16, 4, 1, 2)),
        (256, TileConfig(16, 8, 4)),
        dtypes=_DOUBLE,
    ),
    *_rows(
        "simt",
        "backward_dkdv",
        (64, TileConfig(32, 32, 4, 1, 4), _H100),
        (128, TileConfig(32, 32, 4, 1, 3), _H100),
        (256, TileConfig(32, 32, 8), _H100),
        (256, TileConfig(16, 16, 4)),
        dtypes=_FLOAT,
    ),
    *_rows(
        "simt",
        "backward_dkdv",
        (64, TileConfig(32, 32, 4, 1, 2), _H100),
        (128, TileConfig(32, 16, 4, 1, 2), _H100),
        (256, TileConfig(16, 8, 4)),
        (256, TileConfig(8, 16, 4)),
        dtypes=_DOUBLE,
    ),
)
