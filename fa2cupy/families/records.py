"""Parameter records of kernels, without the members that features add.

`fa2cupy.jit.params` derives the C struct and its bytes from them.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["LENGTHS", "POINTER_RECORDS", "SCALES", "SCHEDULE", "Record"]


class Record(NamedTuple):
    """The members of a record.

    Attributes
    ----------
    pointers : str
        Tensor maps and pointers as ``name:kind``, separated by spaces.
    strides : tuple of str
        Tensors whose strides the record has.
    reals, ints : tuple of str
        Names of floating-point and integer members.
    """

    pointers: str
    strides: tuple[str, ...] = ()
    reals: tuple[str, ...] = ()
    ints: tuple[str, ...] = ()


#: Integer members of all tiled kernels: sizes of the problem, and the schedule of the grid.
LENGTHS = ("num_heads", "heads_per_group", "seqlen_q", "seqlen_k")
SCHEDULE = ("num_tiles", "scheduled_heads", "batch", "heads_per_section")
#: Factors of kernels of gradients: from products to scores in base 2, and from dS to dQ and dK.
SCALES = ("scale_log2", "softmax_scale")

_BACKWARD_INPUTS = "q:input k:input v:input dout:input lse:input_accum delta:input_accum"


def _of_gradients(outputs: str, *strides: str) -> Record:
    return Record(f"{_BACKWARD_INPUTS} {outputs}", ("q", "k", "v", "dout", *strides), SCALES, LENGTHS + SCHEDULE)


#: Records of tiled kernels that read and write through pointers and strides.
POINTER_RECORDS = {
    "forward": Record(
        "q:input k:input v:input o:output lse:output_accum",
        ("q", "k", "v", "o"),
        ("scale_log2",),
        LENGTHS + SCHEDULE,
    ),
    "backward": _of_gradients("dq:output dk:output dv:output", "dq", "dk", "dv"),
    "backward_dq": _of_gradients("dq:output", "dq"),
    "backward_dkdv": _of_gradients("dk:output dv:output", "dk", "dv"),
    # The backward whose dQ is summed in a workspace.
    "backward_to_workspace": _of_gradients("dq_accum:output_accum dk:output dv:output", "dk", "dv"),
}
