"""What families that multiply pairs of float16 matrices have in common (``kernels/float32_parts``)."""

from __future__ import annotations

from collections.abc import Mapping

from ..problem.attention import AttentionProblem
from ..problem.strides import AnyStrides
from .family import Family
from .records import LENGTHS, PARTS, SCHEDULE, Record

__all__ = ["PARTS_RECORDS", "PRODUCTS_OF_PARTS", "Float32Parts", "row_bytes_of_parts"]

#: Products of float16 numbers that stand for one of float32 numbers.
PRODUCTS_OF_PARTS = 3

_SHORTEST = 128  # rows of q and of k
_PANEL_COLUMNS, _PANEL_ROW_BYTES = 64, 128

_INPUTS = (
    "q_parts:input_parts k_parts:input_parts v_parts:input_parts q_units:input_accum k_units:input_accum "
    "v_units:input_accum exceptions:input_int"
)
_GRADIENT_INPUTS = f"{_INPUTS} dout_parts:input_parts dout_units:input_accum lse:input_accum delta:input_accum"


def _record(pointers: str, *strides: str) -> Record:
    return Record(pointers, strides, ("softmax_scale",), (*LENGTHS, *SCHEDULE, *PARTS))


#: Records of tiled kernels that read parts, and write results through pointers and strides.
PARTS_RECORDS = {
    "forward": _record(f"{_INPUTS} o:output lse:output_accum", "o"),
    "backward": _record(f"{_GRADIENT_INPUTS} dk:output dv:output dq_accum:output_accum", "dk", "dv"),
    "backward_dq": _record(f"{_GRADIENT_INPUTS} dq:output", "dq"),
    "backward_dkdv": _record(f"{_GRADIENT_INPUTS} dk:output dv:output", "dk", "dv"),
}


def row_bytes_of_parts(head_dim: int, head_dim_v: int, *, is_forward: bool) -> tuple[int, int]:
    """The bytes of both parts of a row of q or k, and of v or dout (kernels/float32_parts/parts.cuh)."""
    if is_forward and 2 * max(head_dim, head_dim_v) <= _PANEL_COLUMNS:  # the parts share a panel
        return _PANEL_ROW_BYTES, _PANEL_ROW_BYTES
    row, row_v = (2 * -(-columns // _PANEL_COLUMNS) * _PANEL_ROW_BYTES for columns in (head_dim, head_dim_v))
    return row, row_v


class Float32Parts(Family):
    """A family for float32 whose operands are pairs of float16 matrices.

    Attributes
    ----------
    largest_head_dim : int
        The largest head_dim whose parts its kernels hold. Where v has another one, it may have as much, and both
        together twice as much.
    """

    dtypes = ("float32",)
    row_alignment = 1
    head_dim_step = 1
    column_step = 16  # a k-step of the tensor core; the panels in shared memory are wider
    has_natural_scores = True
    multiplies_parts = True
    features = tuple(name for name in Family.features if name != "block_mask")
    backward_owns = "keys"
    largest_head_dim: int

    def why_not(self, operation: str, problem: AttentionProblem, strides: Mapping[str, AnyStrides]) -> str | None:
        if not problem.heads_per_group:
            return "there is no query head"  # while K and V have heads, and gradients
        return None

    def why_not_columns(self, operation: str, head_dim: int, head_dim_v: int) -> str | None:
        most, why_not = self.largest_head_dim, super().why_not_columns(operation, head_dim, head_dim_v)
        if why_not:
            return why_not
        if self.padded_head_dim(head_dim_v) > most:
            return f"{'head_dim' if head_dim_v == head_dim else 'head_dim_v'}={head_dim_v} is above {most}"
        if self.padded_head_dim(head_dim) + self.padded_head_dim(head_dim_v) > 2 * most:
            return f"head_dim={head_dim} and head_dim_v={head_dim_v} are together above {2 * most}"
        return None

    def is_accurate(self, problem: AttentionProblem) -> bool:
        # Errors were measured from this length on. Tiles of shorter calls would be half empty.
        return min(problem.score_shape[2:]) >= _SHORTEST

    def record(self, operation: str) -> Record:
        return PARTS_RECORDS[operation]
