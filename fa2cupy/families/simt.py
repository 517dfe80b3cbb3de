"""The simt family: IEEE arithmetic in float32 and float64, with a grid of results in the registers of each lane.

Its kernels are the simplest, and the best ones to read first.
"""

from __future__ import annotations

from ..problem.dtypes import ITEMSIZE
from ..problem.features import FEATURES
from .family import Family, Kernel, TileRow, register_shortage, why_no_decode
from .records import POINTER_RECORDS, Record
from .tile import TileConfig

__all__ = ["SIMT", "Simt"]

_FLOAT, _DOUBLE = ("float32",), ("float64",)

#: For each kernel: the rows that a block owns, and those of a tile of its inner loop.
_OWN_AND_OTHER = {
    "forward": ("b_r", "b_c"),
    "backward": ("b_r", "b_c"),
    "backward_dq": ("b_r", "b_c"),
    "backward_dkdv": ("b_c", "b_r"),
    "dbias": ("b_r", "b_c"),
    "decode": ("b_r", "b_c"),
    "jvp": ("b_r", "b_c"),
    "output_jvp": ("b_r", "b_c"),
    "dq_jvp": ("b_r", "b_c"),
    "dkdv_jvp": ("b_c", "b_r"),
}
#: The most registers in which a lane holds a row of both gradients: with more columns, kernels sum one after the other.
_OF_BOTH_GRADIENTS = {"backward_dkdv": 224, "dkdv_jvp": 208}
#: The kernels whose rows those of tangents have, each with its tangent.
_MOVED = {"jvp": "forward", "output_jvp": "forward", "dq_jvp": "backward_dq", "dkdv_jvp": "backward_dkdv"}


class Simt(Family):
    """Kernels without tensor cores, whose blocks own query tiles in ``backward`` and add to dK and dV atomically."""

    name = "simt"
    operations = (*Family.operations, "dbias", "decode", *_MOVED)
    dtypes = ("float32", "float64")
    min_compute_capability = 60
    row_alignment = 1
    head_dim_step = 1
    most_columns = 512
    column_step = 32  # eight lanes share a row, with four columns each at a time
    backward_owns = "queries"
    has_natural_scores = True
    features = tuple(FEATURES)
    default_methods = ("single_pass", "two_pass")
    query_rows = (4, *Family.query_rows)
    key_rows = (4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
    warps = (1, 2, 4, 8)
    # For each head_dim: the tile for the most shared memory first.
    tiles = {
        "forward": (
            TileRow(64, TileConfig(128, 32, 4, 1, 2), dtypes=_FLOAT),
            TileRow(64, TileConfig(64, 32, 4, 1, 2), dtypes=_FLOAT),
            TileRow(64, TileConfig(64, 32, 4), dtypes=_FLOAT),
            TileRow(128, TileConfig(128, 64, 8), dtypes=_FLOAT),
            TileRow(128, TileConfig(128, 32, 8), dtypes=_FLOAT),
            TileRow(128, TileConfig(64, 32, 4), dtypes=_FLOAT),
            TileRow(128, TileConfig(32, 16, 4), dtypes=_FLOAT),
            TileRow(256, TileConfig(128, 32, 8), dtypes=_FLOAT),
            TileRow(256, TileConfig(64, 32, 4), dtypes=_FLOAT),
            TileRow(256, TileConfig(32, 16, 4), dtypes=_FLOAT),
            TileRow(256, TileConfig(16, 8, 4), dtypes=_FLOAT),
            TileRow(512, TileConfig(32, 32, 4), dtypes=_FLOAT),
            TileRow(512, TileConfig(32, 16, 4), dtypes=_FLOAT),
            TileRow(512, TileConfig(16, 8, 4), dtypes=_FLOAT),
            TileRow(512, TileConfig(8, 8, 2), dtypes=_FLOAT),
            TileRow(64, TileConfig(128, 32, 8), dtypes=_DOUBLE),
            TileRow(64, TileConfig(64, 32, 4), dtypes=_DOUBLE),
            TileRow(64, TileConfig(32, 16, 4), dtypes=_DOUBLE),
            TileRow(128, TileConfig(64, 32, 8), dtypes=_DOUBLE),
            TileRow(128, TileConfig(64, 16, 4), dtypes=_DOUBLE),
            TileRow(128, TileConfig(32, 16, 4), dtypes=_DOUBLE),
            TileRow(128, TileConfig(16, 8, 4), dtypes=_DOUBLE),
            TileRow(256, TileConfig(64, 16, 8), dtypes=_DOUBLE),
            TileRow(256, TileConfig(32, 16, 4), dtypes=_DOUBLE),
            TileRow(256, TileConfig(16, 8, 4), dtypes=_DOUBLE),
            TileRow(256, TileConfig(4, 8, 1), dtypes=_DOUBLE),
            TileRow(512, TileConfig(16, 16, 4), dtypes=_DOUBLE),
            TileRow(512, TileConfig(16, 8, 4), dtypes=_DOUBLE),
            TileRow(512, TileConfig(8, 8, 2), dtypes=_DOUBLE),
            TileRow(512, TileConfig(4, 8, 1), dtypes=_DOUBLE),
        ),
        # Their b_r is the most rows of a tile.
        "decode": (
            TileRow(64, TileConfig(16, 64, 4, 2, 2), dtypes=_FLOAT),
            TileRow(64, TileConfig(16, 64, 4, 2), dtypes=_FLOAT),
            TileRow(128, TileConfig(16, 64, 4, 2), dtypes=_FLOAT),
            TileRow(256, TileConfig(16, 32, 2, 2), dtypes=_FLOAT),
            TileRow(128, TileConfig(16, 32, 2, 2)),
            TileRow(256, TileConfig(8, 16, 1, 2)),
            TileRow(256, TileConfig(4, 16, 1, 2)),
            TileRow(512, TileConfig(16, 16, 1, 2), dtypes=_FLOAT),
            TileRow(576, TileConfig(4, 16, 1, 2), head_dim_v=512),
        ),
        "backward": (
            TileRow(64, TileConfig(64, 64, 4, 1, 2), dtypes=_FLOAT),
            TileRow(64, TileConfig(64, 32, 4, 1, 2), dtypes=_FLOAT),
            TileRow(64, TileConfig(64, 32, 4), dtypes=_FLOAT),
            TileRow(64, TileConfig(32, 32, 4), dtypes=_FLOAT),
            TileRow(128, TileConfig(64, 32, 4, 1, 2), dtypes=_FLOAT),
            TileRow(128, TileConfig(64, 32, 4), dtypes=_FLOAT),
            TileRow(128, TileConfig(32, 32, 4), dtypes=_FLOAT),
            TileRow(128, TileConfig(16, 16, 4), dtypes=_FLOAT),
            TileRow(256, TileConfig(64, 32, 8), dtypes=_FLOAT),
            TileRow(256, TileConfig(32, 32, 4), dtypes=_FLOAT),
            TileRow(256, TileConfig(16, 16, 4), dtypes=_FLOAT),
            TileRow(256, TileConfig(8, 8, 2), dtypes=_FLOAT),
            TileRow(512, TileConfig(16, 16, 4), dtypes=_FLOAT),
            TileRow(512, TileConfig(8, 8, 2), dtypes=_FLOAT),
            TileRow(512, TileConfig(4, 8, 1), dtypes=_FLOAT),
            TileRow(64, TileConfig(64, 16, 4, 1, 2), dtypes=_DOUBLE),
            TileRow(64, TileConfig(32, 32, 4), dtypes=_DOUBLE),
            TileRow(64, TileConfig(16, 16, 4), dtypes=_DOUBLE),
            TileRow(128, TileConfig(64, 32, 8), dtypes=_DOUBLE),
            TileRow(128, TileConfig(32, 32, 4), dtypes=_DOUBLE),
            TileRow(128, TileConfig(16, 16, 4), dtypes=_DOUBLE),
            TileRow(128, TileConfig(8, 8, 2), dtypes=_DOUBLE),
            TileRow(256, TileConfig(32, 16, 4), dtypes=_DOUBLE),
            TileRow(256, TileConfig(16, 16, 4), dtypes=_DOUBLE),
            TileRow(256, TileConfig(8, 8, 2), dtypes=_DOUBLE),
            TileRow(512, TileConfig(8, 8, 2), dtypes=_DOUBLE),
            TileRow(512, TileConfig(4, 8, 1), dtypes=_DOUBLE),
        ),
        "backward_dq": (
            TileRow(64, TileConfig(128, 32, 4, 1, 2), dtypes=_FLOAT),
            TileRow(64, TileConfig(64, 32, 4, 1, 2), dtypes=_FLOAT),
            TileRow(64, TileConfig(64, 32, 4), dtypes=_FLOAT),
            TileRow(64, TileConfig(32, 32, 4), dtypes=_FLOAT),
            TileRow(128, TileConfig(64, 32, 4, 1, 2), dtypes=_FLOAT),
            TileRow(128, TileConfig(64, 32, 4), dtypes=_FLOAT),
            TileRow(128, TileConfig(32, 32, 4), dtypes=_FLOAT),
            TileRow(128, TileConfig(16, 16, 4), dtypes=_FLOAT),
            TileRow(256, TileConfig(64, 32, 8), dtypes=_FLOAT),
            TileRow(256, TileConfig(32, 32, 4), dtypes=_FLOAT),
            TileRow(256, TileConfig(16, 16, 4), dtypes=_FLOAT),
            TileRow(256, TileConfig(8, 8, 2), dtypes=_FLOAT),
            TileRow(512, TileConfig(32, 16, 4), dtypes=_FLOAT),
            TileRow(512, TileConfig(16, 16, 4), dtypes=_FLOAT),
            TileRow(512, TileConfig(8, 8, 2), dtypes=_FLOAT),
            TileRow(512, TileConfig(4, 8, 1), dtypes=_FLOAT),
            TileRow(64, TileConfig(64, 16, 4, 1, 2), dtypes=_DOUBLE),
            TileRow(64, TileConfig(32, 32, 4, 1, 2), dtypes=_DOUBLE),
            TileRow(64, TileConfig(32, 32, 4), dtypes=_DOUBLE),
            TileRow(64, TileConfig(16, 16, 4), dtypes=_DOUBLE),
            TileRow(128, TileConfig(64, 32, 8), dtypes=_DOUBLE),
            TileRow(128, TileConfig(32, 32, 4), dtypes=_DOUBLE),
            TileRow(128, TileConfig(16, 16, 4), dtypes=_DOUBLE),
            TileRow(128, TileConfig(8, 8, 2), dtypes=_DOUBLE),
            TileRow(256, TileConfig(32, 16, 4), dtypes=_DOUBLE),
            TileRow(256, TileConfig(16, 16, 4), dtypes=_DOUBLE),
            TileRow(256, TileConfig(8, 8, 2), dtypes=_DOUBLE),
            TileRow(256, TileConfig(4, 8, 1), dtypes=_DOUBLE),
            TileRow(512, TileConfig(16, 8, 4), dtypes=_DOUBLE),
            TileRow(512, TileConfig(8, 8, 2), dtypes=_DOUBLE),
            TileRow(512, TileConfig(4, 8, 1), dtypes=_DOUBLE),
        ),
        "backward_dkdv": (
            TileRow(64, TileConfig(64, 128, 8), dtypes=_FLOAT),
            TileRow(64, TileConfig(32, 64, 4), dtypes=_FLOAT),
            TileRow(64, TileConfig(32, 32, 4), dtypes=_FLOAT),
            TileRow(128, TileConfig(32, 64, 4, 1, 2), dtypes=_FLOAT),
            TileRow(128, TileConfig(32, 64, 4), dtypes=_FLOAT),
            TileRow(128, TileConfig(32, 32, 4), dtypes=_FLOAT),
            TileRow(128, TileConfig(16, 16, 4), dtypes=_FLOAT),
            TileRow(256, TileConfig(32, 64, 8), dtypes=_FLOAT),
            TileRow(256, TileConfig(32, 32, 4), dtypes=_FLOAT),
            TileRow(256, TileConfig(16, 16, 4), dtypes=_FLOAT),
            TileRow(256, TileConfig(8, 8, 2), dtypes=_FLOAT),
            TileRow(512, TileConfig(16, 16, 4), dtypes=_FLOAT),
            TileRow(512, TileConfig(8, 8, 2), dtypes=_FLOAT),
            TileRow(512, TileConfig(8, 4, 1), dtypes=_FLOAT),
            TileRow(64, TileConfig(64, 64, 8), dtypes=_DOUBLE),
            TileRow(64, TileConfig(32, 32, 4, 1, 2), dtypes=_DOUBLE),
            TileRow(64, TileConfig(32, 32, 4), dtypes=_DOUBLE),
            TileRow(64, TileConfig(16, 16, 4), dtypes=_DOUBLE),
            TileRow(128, TileConfig(32, 64, 8), dtypes=_DOUBLE),
            TileRow(128, TileConfig(32, 32, 4), dtypes=_DOUBLE),
            TileRow(128, TileConfig(16, 16, 4), dtypes=_DOUBLE),
            TileRow(128, TileConfig(8, 8, 2), dtypes=_DOUBLE),
            TileRow(256, TileConfig(16, 32, 8), dtypes=_DOUBLE),
            TileRow(256, TileConfig(16, 16, 4), dtypes=_DOUBLE),
            TileRow(256, TileConfig(8, 8, 2), dtypes=_DOUBLE),
            TileRow(256, TileConfig(8, 4, 1), dtypes=_DOUBLE),
            TileRow(512, TileConfig(8, 8, 2), dtypes=_DOUBLE),
            TileRow(512, TileConfig(8, 4, 1), dtypes=_DOUBLE),
        ),
        "dbias": (
            TileRow(64, TileConfig(64, 64, 4, 1, 2), dtypes=_FLOAT),
            TileRow(64, TileConfig(64, 32, 4, 1, 2), dtypes=_FLOAT),
            TileRow(64, TileConfig(32, 32, 4), dtypes=_FLOAT),
            TileRow(128, TileConfig(64, 32, 4, 1, 2), dtypes=_FLOAT),
            TileRow(128, TileConfig(64, 32, 4), dtypes=_FLOAT),
            TileRow(128, TileConfig(16, 16, 4), dtypes=_FLOAT),
            TileRow(256, TileConfig(64, 32, 4), dtypes=_FLOAT),
            TileRow(256, TileConfig(32, 16, 4), dtypes=_FLOAT),
            TileRow(256, TileConfig(8, 8, 2), dtypes=_FLOAT),
            TileRow(512, TileConfig(16, 16, 4), dtypes=_FLOAT),
            TileRow(512, TileConfig(8, 8, 2), dtypes=_FLOAT),
            TileRow(512, TileConfig(4, 8, 1), dtypes=_FLOAT),
            TileRow(64, TileConfig(64, 32, 4), dtypes=_DOUBLE),
            TileRow(64, TileConfig(16, 16, 4), dtypes=_DOUBLE),
            TileRow(128, TileConfig(32, 32, 4), dtypes=_DOUBLE),
            TileRow(128, TileConfig(8, 8, 2), dtypes=_DOUBLE),
            TileRow(256, TileConfig(16, 16, 4), dtypes=_DOUBLE),
            TileRow(256, TileConfig(4, 8, 1), dtypes=_DOUBLE),
            TileRow(512, TileConfig(8, 8, 2), dtypes=_DOUBLE),
            TileRow(512, TileConfig(4, 8, 1), dtypes=_DOUBLE),
        ),
        **dict.fromkeys(
            ("jvp", "output_jvp"),
            (
                TileRow(64, TileConfig(64, 32, 4), dtypes=_FLOAT),
                TileRow(64, TileConfig(16, 16, 4), dtypes=_FLOAT),
                TileRow(128, TileConfig(64, 32, 4), dtypes=_FLOAT),
                TileRow(128, TileConfig(32, 16, 4), dtypes=_FLOAT),
                TileRow(128, TileConfig(8, 8, 1), dtypes=_FLOAT),
                TileRow(256, TileConfig(32, 16, 4), dtypes=_FLOAT),
                TileRow(256, TileConfig(8, 8, 2), dtypes=_FLOAT),
                TileRow(256, TileConfig(4, 8, 1), dtypes=_FLOAT),
                TileRow(512, TileConfig(16, 8, 4), dtypes=_FLOAT),
                TileRow(512, TileConfig(8, 8, 2), dtypes=_FLOAT),
                TileRow(512, TileConfig(4, 8, 1), dtypes=_FLOAT),
                TileRow(64, TileConfig(64, 16, 8), dtypes=_DOUBLE),
                TileRow(64, TileConfig(32, 16, 4), dtypes=_DOUBLE),
                TileRow(64, TileConfig(8, 8, 2), dtypes=_DOUBLE),
                TileRow(128, TileConfig(32, 16, 8), dtypes=_DOUBLE),
                TileRow(128, TileConfig(8, 8, 2), dtypes=_DOUBLE),
                TileRow(128, TileConfig(4, 8, 1), dtypes=_DOUBLE),
                TileRow(256, TileConfig(16, 16, 4), dtypes=_DOUBLE),
                TileRow(256, TileConfig(4, 8, 1), dtypes=_DOUBLE),
                TileRow(512, TileConfig(4, 8, 1), dtypes=_DOUBLE),
            ),
        ),
        "dq_jvp": (
            TileRow(64, TileConfig(64, 32, 4), dtypes=_FLOAT),
            TileRow(64, TileConfig(32, 32, 4), dtypes=_FLOAT),
            TileRow(64, TileConfig(16, 16, 4), dtypes=_FLOAT),
            TileRow(128, TileConfig(64, 32, 8), dtypes=_FLOAT),
            TileRow(128, TileConfig(32, 16, 4), dtypes=_FLOAT),
            TileRow(128, TileConfig(8, 8, 1), dtypes=_FLOAT),
            TileRow(256, TileConfig(32, 16, 4), dtypes=_FLOAT),
            TileRow(256, TileConfig(8, 8, 2), dtypes=_FLOAT),
            TileRow(256, TileConfig(4, 8, 1), dtypes=_FLOAT),
            TileRow(512, TileConfig(8, 8, 2), dtypes=_FLOAT),
            TileRow(512, TileConfig(4, 8, 1), dtypes=_FLOAT),
            TileRow(64, TileConfig(32, 32, 4), dtypes=_DOUBLE),
            TileRow(64, TileConfig(16, 16, 4), dtypes=_DOUBLE),
            TileRow(64, TileConfig(8, 8, 2), dtypes=_DOUBLE),
            TileRow(128, TileConfig(32, 16, 8), dtypes=_DOUBLE),
            TileRow(128, TileConfig(8, 8, 2), dtypes=_DOUBLE),
            TileRow(128, TileConfig(4, 8, 1), dtypes=_DOUBLE),
            TileRow(256, TileConfig(16, 8, 4), dtypes=_DOUBLE),
            TileRow(256, TileConfig(8, 8, 2), dtypes=_DOUBLE),
            TileRow(256, TileConfig(4, 8, 1), dtypes=_DOUBLE),
            TileRow(512, TileConfig(4, 8, 1), dtypes=_DOUBLE),
        ),
        "dkdv_jvp": (
            TileRow(64, TileConfig(32, 64, 4), dtypes=_FLOAT),
            TileRow(64, TileConfig(32, 32, 4), dtypes=_FLOAT),
            TileRow(64, TileConfig(16, 16, 4), dtypes=_FLOAT),
            TileRow(128, TileConfig(32, 64, 8), dtypes=_FLOAT),
            TileRow(128, TileConfig(16, 32, 4), dtypes=_FLOAT),
            TileRow(128, TileConfig(8, 8, 1), dtypes=_FLOAT),
            TileRow(256, TileConfig(16, 32, 4), dtypes=_FLOAT),
            TileRow(256, TileConfig(8, 8, 2), dtypes=_FLOAT),
            TileRow(256, TileConfig(8, 4, 1), dtypes=_FLOAT),
            TileRow(512, TileConfig(8, 8, 2), dtypes=_FLOAT),
            TileRow(512, TileConfig(8, 4, 1), dtypes=_FLOAT),
            TileRow(64, TileConfig(32, 32, 4), dtypes=_DOUBLE),
            TileRow(64, TileConfig(16, 16, 4), dtypes=_DOUBLE),
            TileRow(64, TileConfig(8, 8, 2), dtypes=_DOUBLE),
            TileRow(128, TileConfig(16, 32, 8), dtypes=_DOUBLE),
            TileRow(128, TileConfig(8, 8, 2), dtypes=_DOUBLE),
            TileRow(128, TileConfig(8, 4, 1), dtypes=_DOUBLE),
            TileRow(256, TileConfig(8, 16, 4), dtypes=_DOUBLE),
            TileRow(256, TileConfig(8, 8, 2), dtypes=_DOUBLE),
            TileRow(256, TileConfig(8, 4, 1), dtypes=_DOUBLE),
            TileRow(512, TileConfig(8, 4, 1), dtypes=_DOUBLE),
        ),
    }

    def record(self, operation: str) -> Record:
        return POINTER_RECORDS[operation]._replace(reals=("softmax_scale",))  # there are no scores in base 2

    def shared_memory_bytes(self, kernel: Kernel, tile: TileConfig) -> int:
        operation, dtype, head_dim, head_dim_v, _ = kernel
        element = ITEMSIZE[dtype]
        row, row_v = (self.padded_head_dim(n) * element + 16 for n in (head_dim, head_dim_v))
        own, other = (getattr(tile, name) for name in _OWN_AND_OTHER[operation])
        if operation == "decode":
            rows = 2 * own * row + tile.num_stages * other * (row + row_v)
            return rows + tile.num_warps * own * (16 + 8 + 2) * element
        posted = 0 if operation == "dbias" else own * (other + 8 + other % 16) * element
        moved, twice = (_MOVED[operation], 2) if operation in _MOVED else (operation, 1)
        own_v = 0 if moved == "forward" else own
        statistics = 2 * other * element if moved == "backward_dkdv" else 0
        return twice * ((own + other) * row + (own_v + other) * row_v + statistics) + posted

    def why_not_shape(self, kernel: Kernel, tile: TileConfig) -> str | None:
        operation, dtype, head_dim, head_dim_v, _ = kernel
        own_name, other_name = _OWN_AND_OTHER[operation]
        own, other = getattr(tile, own_name), getattr(tile, other_name)
        if operation == "decode":
            sums = (head_dim_v // 8 + 2 * 2) * ITEMSIZE[dtype] // 4
            return why_no_decode(tile, (4, 8, 16)) or register_shortage(own // 4 * sums, 40, tile)
        step = 4 * tile.num_warps
        if own % step or own // step not in (1, 2, 4, 8):
            return f"{own_name}={own} does not give each lane of {tile.num_warps} warps 1, 2, 4 or 8 rows"
        if other % 8 or other > 64:
            return f"{other_name}={other} is not a multiple of 8 up to 64"
        if operation == "backward" and (other % step or other // step not in (1, 2, 4, 8)):
            return f"b_c={other} does not give each lane of {tile.num_warps} warps 1, 2, 4 or 8 keys"
        if tile.num_stages != 1:
            return f"num_stages={tile.num_stages}: the simt family has one stage"
        columns = {"forward": head_dim_v, "jvp": 2 * head_dim_v, "output_jvp": head_dim_v, "dbias": 0}
        for name, most in _OF_BOTH_GRADIENTS.items():
            is_held = (head_dim + head_dim_v) // 8 * ITEMSIZE[dtype] // 4 <= most
            columns[name] = head_dim + head_dim_v if is_held else max(head_dim, head_dim_v)
        # S, or S and dP, and tangents or sums of dS; in float32, the sums over fewer columns as well.
        fragments = (1 if _MOVED.get(operation, operation) == "forward" else 2) * (2 if operation in _MOVED else 1)
        fragments += operation == "dbias"
        scores = other // 8 * (fragments + (dtype == "float32"))
        of_row = columns.get(operation, head_dim) // 8 + scores
        return register_shortage(own // step * of_row * ITEMSIZE[dtype] // 4, 24, tile)


SIMT = Simt()
