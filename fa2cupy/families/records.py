"""Parameter records of kernels, without the members that features add.

`fa2cupy.jit.params` derives the C struct and its bytes from them.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "ARRIVALS",
    "COLUMN_RISES",
    "COPIED",
    "EXCEPTIONS",
    "EXTREMES",
    "LENGTHS",
    "PARTIALS",
    "PARTS",
    "POINTER_RECORDS",
    "ROW_RISES",
    "SCALES",
    "SCHEDULE",
    "SHARERS",
    "SHARES",
    "SUMMED",
    "Record",
    "split_record",
]


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
    sizes : tuple of str
        Names of integer members of 64 bits.
    score_strides : tuple of str
        Further maps from indices of scores to offsets, beside those of the features' arrays.
    """

    pointers: str
    strides: tuple[str, ...] = ()
    reals: tuple[str, ...] = ()
    ints: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    score_strides: tuple[str, ...] = ()


#: The workspace of a split kernel. Every block leaves its share of a tile's results there.
SHARES = "shares"
#: The workspace and the counters of a kernel whose last block merges what others have left.
PARTIALS, ARRIVALS = "partials", "arrivals"
#: The workspaces with the number of intervals of each row and column of a map.
ROW_RISES, COLUMN_RISES = "row_rises", "column_rises"
#: The matrices that a launch copies, and the arrays that it sums.
COPIED, SUMMED = "copied", "summed"
#: The maps of the kernel ``dbias`` from sequences of a bias to those of the scores (``problem/strides.py``).
SHARERS = ("owned", "shared")
#: The results that shares replace.
_SHARED_RESULTS = ("o", "lse", "dk", "dv")

#: Integer members of all tiled kernels: sizes of the problem, and the schedule of the grid.
LENGTHS = ("num_heads", "heads_per_group", "seqlen_q", "seqlen_k")
SCHEDULE = ("num_tiles", "scheduled_heads", "batch", "heads_per_section")
#: Integer members of kernels that read parts of float32 data: the strips of a head, along the queries and the keys.
PARTS = ("q_strips", "k_strips")
#: The workspace with a number for each K/V head, not 0 if kernels that multiply parts leave it to the fallback, and the
#: one with what blocks find of a head until the last of them writes that number.
EXCEPTIONS, EXTREMES = "exceptions", "extremes"
#: Factors of kernels of gradients: from products to scores in base 2, and from dS to dQ and dK.
SCALES = ("scale_log2", "softmax_scale")


def split_record(record: Record) -> Record:
    """The record of the kernel when several blocks share the work on a tile: shares take the place of results."""
    kinds = dict(pointer.split(":") for pointer in record.pointers.split())
    # lse is a result of the forward, but an input of the backward.
    replaced = [name for name in _SHARED_RESULTS if kinds.get(name, "").startswith("output")]
    kept = [f"{name}:{kind}" for name, kind in kinds.items() if name not in replaced]
    strides = tuple(name for name in record.strides if name not in replaced)
    pointers = " ".join((*kept, f"{SHARES}:output_accum"))
    return record._replace(pointers=pointers, strides=strides, ints=(*record.ints, "num_splits"))


_BACKWARD_INPUTS = "q:input k:input v:input dout:input lse:input_accum delta:input_accum"


def _of_gradients(outputs: str, *strides: str) -> Record:
    return Record(f"{_BACKWARD_INPUTS} {outputs}", ("q", "k", "v", "dout", *strides), SCALES, LENGTHS + SCHEDULE)


def _of_tangents(outputs: str, *strides: str) -> Record:
    tangents = "qt:input kt:input vt:input dot:input lset:input_accum deltat:input_accum"
    return _of_gradients(f"{tangents} {outputs}", "qt", "kt", "vt", "dot", *strides)


#: Records of tiled kernels that read and write through pointers and strides.
POINTER_RECORDS = {
    "forward": Record(
        "q:input k:input v:input o:output lse:output_accum",
        ("q", "k", "v", "o"),
        ("scale_log2",),
        LENGTHS + SCHEDULE,
    ),
    # Tangents of inputs are null where the call has none.
    "jvp": Record(
        "q:input k:input v:input qt:input kt:input vt:input o:output lse:output_accum ot:output lset:output_accum",
        ("q", "k", "v", "qt", "kt", "vt", "o", "ot"),
        ("scale_log2",),
        LENGTHS + SCHEDULE,
    ),
    "output_jvp": Record(
        "q:input k:input v:input qt:input kt:input vt:input o:input lse:input_accum ot:output lset:output_accum",
        ("q", "k", "v", "qt", "kt", "vt", "o", "ot"),
        ("scale_log2",),
        LENGTHS + SCHEDULE,
    ),
    "dq_jvp": _of_tangents("dqt:output", "dqt"),
    "dkdv_jvp": _of_tangents("dkt:output dvt:output", "dkt", "dvt"),
    "backward": _of_gradients("dq:output dk:output dv:output", "dq", "dk", "dv"),
    "backward_dq": _of_gradients("dq:output", "dq"),
    "backward_dkdv": _of_gradients("dk:output dv:output", "dk", "dv"),
    # Either o or delta is null.
    "backward_one_tile": _of_gradients("o:input dq:output dk:output dv:output", "o", "dq", "dk", "dv"),
    # The same, and shares of dbias. Its strides are those of a share.
    "backward_one_tile_dbias": Record(
        f"{_BACKWARD_INPUTS} o:input dq:output dk:output dv:output {SHARES}:output_accum",
        ("q", "k", "v", "dout", "o", "dq", "dk", "dv"),
        SCALES,
        (*LENGTHS, "batch", "shared_sequences", "num_splits"),
        ("share_elements",),
        SHARERS,
    ),
    # The blocks own tiles of the bias, of so many rows and columns, which so many sequences share.
    "dbias": Record(
        _BACKWARD_INPUTS,
        ("q", "k", "v", "dout"),
        SCALES,
        (*LENGTHS, "batch", "bias_rows", "bias_columns", "shared_sequences"),
        ("share_elements",),
        SHARERS,
    ),
    # The cache is read, and new rows are written to it. `partials` are O and lse of blocks that share a tile of rows.
    "decode": Record(
        f"q:input k_cache:in_place v_cache:in_place cache_seqlens:input_int k:input v:input block_table:input_int "
        f"o:output lse:output_accum {PARTIALS}:output_accum {ARRIVALS}:counter",
        ("q", "k_cache", "v_cache", "k", "v", "o"),
        ("scale_log2",),
        (*LENGTHS, "batch", "seqlen_new", "page_size", "pages_per_sequence", "num_pages"),
    ),
    # The backward whose dQ is summed in a workspace.
    "backward_to_workspace": _of_gradients("dq_accum:output_accum dk:output dv:output", "dk", "dv"),
}
