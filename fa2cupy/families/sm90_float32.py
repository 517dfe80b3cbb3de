"""The sm90 family for float32: products of float16 parts on Hopper's wgmma."""

from __future__ import annotations

from collections.abc import Mapping

from ..problem.attention import AttentionProblem
from ..problem.features import FEATURES, NOT_ON_HOPPER, features_in_registers
from ..problem.strides import AnyStrides
from .family import Family, TileRow
from .records import LENGTHS, PARTS, SCHEDULE, Record
from .tile import TileConfig

__all__ = ["SM90_FLOAT32", "Sm90Float32"]

_LARGEST_HEAD_DIM = 128
_SHORTEST = 128  # rows of q and of k
_SHARED_BYTES = 227 * 1024  # the most that a block can have

#: For each kernel, the side whose rows its warp groups own, and the other side.
_SIDES = {
    "forward": ("b_r", "b_c"),
    "backward": ("b_c", "b_r"),
    "backward_dq": ("b_r", "b_c"),
    "backward_dkdv": ("b_c", "b_r"),
}

_INPUTS = (
    "q_parts:input_parts k_parts:input_parts v_parts:input_parts q_units:input_accum k_units:input_accum "
    "v_units:input_accum exceptions:input_int"
)
_GRADIENT_INPUTS = f"{_INPUTS} dout_parts:input_parts dout_units:input_accum lse:input_accum delta:input_accum"
_INTS = (*LENGTHS, *SCHEDULE, *PARTS)
_RECORDS = {
    "forward": Record(f"{_INPUTS} o:output lse:output_accum tile_counter:counter", ("o",), ("softmax_scale",), _INTS),
    "backward": Record(
        f"{_GRADIENT_INPUTS} dk:output dv:output dq_accum:output_accum", ("dk", "dv"), ("softmax_scale",), _INTS
    ),
    "backward_dq": Record(f"{_GRADIENT_INPUTS} dq:output tile_counter:counter", ("dq",), ("softmax_scale",), _INTS),
    "backward_dkdv": Record(f"{_GRADIENT_INPUTS} dk:output dv:output", ("dk", "dv"), ("softmax_scale",), _INTS),
}


class Sm90Float32(Family):
    """Kernels for sm_90a only, whose operands are pairs of float16 matrices (``kernels/sm90_float32/parts.cuh``)."""

    name = "sm90"
    folder = "sm90_float32"
    dtypes = ("float32",)
    min_compute_capability = max_compute_capability = 90
    row_alignment = 1
    head_dim_step = 1
    arch_suffix = "a"
    has_natural_scores = True
    multiplies_parts = True
    features = tuple(name for name in FEATURES if name not in (*NOT_ON_HOPPER, "dbias", "full_dbias"))
    backward_owns = "keys"
    default_methods = ("single_pass",)
    query_rows = (64, 128)
    key_rows = (64, 128)
    # Two consumer warp groups of 4 warps have 64 rows each, and one more loads.
    tiles = {
        "forward": (
            TileRow(64, TileConfig(128, 128, 12, 2)),
            TileRow(128, TileConfig(128, 64, 12, 2), features=features_in_registers(1)),
            TileRow(128, TileConfig(128, 128, 12, 1)),
        ),
        "backward": (TileRow(64, TileConfig(64, 128, 12, 2)), TileRow(128, TileConfig(64, 128, 12, 1))),
        "backward_dq": (TileRow(64, TileConfig(128, 128, 12, 2)), TileRow(128, TileConfig(128, 64, 12, 2))),
        "backward_dkdv": (TileRow(128, TileConfig(64, 128, 12, 2)),),
    }

    def why_not(self, operation: str, problem: AttentionProblem, strides: Mapping[str, AnyStrides]) -> str | None:
        if self.padded_head_dim(problem.head_dim) > _LARGEST_HEAD_DIM:
            return f"head_dim={problem.head_dim} is above {_LARGEST_HEAD_DIM}"
        if not problem.heads_per_group:
            return "there is no query head"  # while K and V have heads, and gradients
        return None

    def is_accurate(self, problem: AttentionProblem) -> bool:
        # Errors were measured from this length on. Tiles of shorter calls would be half empty.
        return min(problem.score_shape[2:]) >= _SHORTEST

    def record(self, operation: str) -> Record:
        return _RECORDS[operation]

    def padded_head_dim(self, head_dim: int) -> int:
        return -(-head_dim // 16) * 16  # a k-step of wgmma; the panels in shared memory are wider

    def shared_memory_bytes(self, operation: str, dtype: str, head_dim: int, tile: TileConfig) -> int:
        # The same as in kernels/sm90_float32/query_tile_shape.cuh and backward_dkdv_shape.cuh: panels of 64 columns of
        # two parts. The operand that is used second has one stage where that many of the first do not fit.
        row = 2 * -(-head_dim // 64) * 128
        if _SIDES[operation][0] == "b_c":
            own, other = 2 * tile.b_c * row, tile.b_r * row
            fixed = 8 * (2 + 4 * tile.num_stages) + tile.num_stages * 2 * 4 * tile.b_r
            if operation == "backward":  # two warp groups have dS, units of it, and barriers
                fixed += 2 * (2 * tile.b_r * 128 + 4 * 4 + 2 * 8)
        else:
            operands = {"forward": 1, "backward_dq": 2}[operation]
            own, other = operands * tile.b_r * row, tile.b_c * row
            fixed = 8 * (4 * operands + 4 * tile.num_stages + 2 * 4) + 4 * 32
        first = 1024 + own + tile.num_stages * other + fixed
        both = first + tile.num_stages * other
        return both if both <= _SHARED_BYTES else first + other

    def why_not_shape(self, operation: str, dtype: str, head_dim: int, tile: TileConfig) -> str | None:
        if head_dim > _LARGEST_HEAD_DIM:
            return f"head_dim={head_dim} is above the {_LARGEST_HEAD_DIM} whose parts fit shared memory"
        own, other = _SIDES[operation]
        rows, others = getattr(tile, own), getattr(tile, other)
        if (rows, tile.num_warps) != (128, 12):
            return (
                f"{own}={rows} and num_warps={tile.num_warps} are not 64 rows for each of two warp groups of 4 warps, "
                "and one more that loads"
            )
        if others not in ((64,) if own == "b_c" else (64, 128)):
            return f"{other}={others} is not 64{'' if own == 'b_c' else ' or 128'}"
        if tile.num_stages > 4:
            return f"num_stages={tile.num_stages} is more than 4"
        if tile.blocks_per_sm != 1:
            return f"blocks_per_sm={tile.blocks_per_sm}: a multiprocessor has one block"
        return None


SM90_FLOAT32 = Sm90Float32()
