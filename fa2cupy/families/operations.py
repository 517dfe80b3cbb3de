"""The operations: a table with one row for each entry file in ``kernels/``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..problem.block_mask import (
    COLUMN_INTERVALS,
    KEY_LISTS,
    LIST_STRIDES,
    MOST_INTERVALS,
    QUERY_LISTS,
    ROW_INTERVALS,
)
from ..problem.features import FEATURES
from .records import COLUMN_RISES, COPIED, EXTREMES, PARTS, ROW_RISES, SHARERS, SHARES, SUMMED, Record

__all__ = [
    "IN_ONE_LAUNCH",
    "IN_TWO_LAUNCHES",
    "METHODS",
    "OF_DIRECTION",
    "ONE_TILE",
    "ONE_TILE_DBIAS",
    "OPERATIONS",
    "SEVERAL",
    "TILED",
    "Operation",
]


@dataclass(frozen=True)
class Operation:
    """The work of a kernel, the same in all families.

    Attributes
    ----------
    name : str
        The entry file without its suffix.
    features : tuple of str
        Rows of `fa2cupy.problem.features.FEATURES` that change it. ``"cu_seqlens"`` marks kernels that support packed
        sequences.
    owns : str or None
        The tiles that the blocks of a tiled operation own: ``"queries"``, ``"keys"``, ``"both"``, or ``"pairs"`` for
        tiles of a bias; None if the families differ.
    num_warps : int or None
        Warps of a block; None for a tiled operation, whose tile says it.
    is_common : bool
        True if all families share its body, which then is in none of their folders.
    record : Record or None
        Its parameter record; None if the families differ.
    has_config : bool
        True if callers can choose the tile of a tiled operation.
    is_second_order : bool
        True if its kernels may need second derivatives of score functions.
    holds_keys : bool
        True if the key tile of a block has all keys of a sequence.
    """

    name: str
    features: tuple[str, ...]
    owns: str | None = None
    num_warps: int | None = None
    is_common: bool = False
    record: Record | None = None
    has_config: bool = True
    is_second_order: bool = False
    holds_keys: bool = False

    @cached_property
    def is_tiled(self) -> bool:
        """True if its tile is a parameter of the kernel."""
        return self.num_warps is None


#: The features of all kernels that compute scores.
_OF_SCORES = tuple(name for name, feature in FEATURES.items() if feature.acts_on is not None)
#: Those that choose no tiles, and those of them that leave no derivative to be multiplied.
_OF_ONE_TILE = tuple(name for name in _OF_SCORES if FEATURES[name].acts_on != "tiles")
_WITH_SUMS = tuple(name for name in _OF_ONE_TILE if not FEATURES[name].has_derivative)
_OF_DECODE = tuple(name for name, feature in FEATURES.items() if feature.in_decode)
#: Those of kernels that write the gradients of the bias and of the arrays of `score_mod`.
_OF_DBIAS = ("dbias", "full_dbias", "dscore_args")
#: Those of the tangents of q, k, v and dO, for families whose kernels depend on which ones a call has.
OF_DIRECTION = ("query_tangent", "key_tangent", "value_tangent", "dout_tangent")
#: Those of tangents of the forward.
_TANGENTS = ("bias_tangent", "sink_tangent", *OF_DIRECTION[:3])
#: Integer members of the kernels that write tile lists.
_OF_LISTS = (
    "num_heads", "heads_per_group", "seqlen_q", "seqlen_k", "band_left", "band_right", "num_lists", "list_heads",
    "list_tiles", *LIST_STRIDES, "map_batches", "map_heads", "map_rows", "map_columns", "map_b_r", "map_b_c",
    "has_other_function",
)  # fmt: skip
#: Results of the kernels that find intervals.
_OF_INTERVALS = " ".join(f"{name}:output_int" for name in (ROW_INTERVALS, COLUMN_INTERVALS, MOST_INTERVALS))
#: Integer members of the kernels that sum shares.
_KEY_SIDE = ("batch", "num_heads", "heads_per_group", "seqlen_k", "num_key_tiles", "num_copies")


class _Operations(dict[str, Operation]):
    """Operations by name, with an error that lists the names."""

    def __missing__(self, name: str) -> Operation:
        raise ValueError(f"operation: expected one of {list(self)}, got {name!r}")


#: All operations by name. ``backward`` is the one tiled kernel of ``single_pass``, the next two those of ``two_pass``.
OPERATIONS = _Operations(
    (operation.name, operation)
    for operation in (
        Operation("forward", (*_OF_SCORES, "sink", "given_lse", "kept_bias", "boxes"), owns="queries"),
        Operation("decode", _OF_DECODE, owns="queries", has_config=False),
        Operation("backward", (*_OF_SCORES, *_OF_DBIAS, "boxes")),
        Operation("backward_dq", (*_OF_SCORES, *_OF_DBIAS), owns="queries"),
        Operation("backward_dkdv", _OF_SCORES, owns="keys"),
        # The last two in one launch, which computes delta, too.
        Operation("backward_both", ("dlse",), owns="both", has_config=False),
        Operation(
            "backward_one_tile",
            (*_OF_ONE_TILE, "dlse"),
            owns="keys",
            holds_keys=True,
        ),
        # The same with the gradient of a bias that sequences share. Blocks own tiles of the bias.
        Operation(
            "backward_one_tile_dbias",
            (*_WITH_SUMS, "dlse", "dbias"),
            owns="pairs",
            has_config=False,
            holds_keys=True,
        ),
        # The gradient of a broadcast bias, where the others do not add it atomically.
        Operation("dbias", (*_OF_SCORES, "dbias", "full_dbias"), owns="pairs", has_config=False),
        # The tangents of the forward's results: with these results, and where they are given.
        Operation("jvp", (*_OF_SCORES, "sink", *_TANGENTS), owns="queries", has_config=False, is_second_order=True),
        Operation(
            "output_jvp", (*_OF_SCORES, "sink", *_TANGENTS), owns="queries", has_config=False, is_second_order=True
        ),
        # The tangents of the gradients, in two passes.
        Operation(
            "dq_jvp",
            (*_OF_SCORES, "bias_tangent", *OF_DIRECTION, "dbias", "full_dbias"),
            owns="queries",
            has_config=False,
            is_second_order=True,
        ),
        Operation(
            "dkdv_jvp",
            (*_OF_SCORES, "bias_tangent", *OF_DIRECTION),
            owns="keys",
            has_config=False,
            is_second_order=True,
        ),
        Operation(
            "delta_jvp",
            ("dlse",),
            num_warps=4,
            is_common=True,
            record=Record(
                "o:input dout:input ot:input dot:input dlset:input_accum delta:output_accum deltat:output_accum",
                ("o", "dout", "ot", "dot"),
                (),
                ("num_heads", "seqlen_q", "num_tiles"),
            ),
        ),
        Operation(
            "delta",
            ("dlse",),
            num_warps=4,
            is_common=True,
            record=Record(
                f"o:input dout:input delta:output_accum dq_accum:output_accum {SHARES}:output_accum",
                ("o", "dout"),
                (),
                ("num_heads", "seqlen_q", "num_tiles"),
                ("dq_accum_bytes", f"{SHARES}_bytes"),
            ),
        ),
        # The parts of float32 inputs, for families that multiply pairs of float16 numbers. Its tile has the warps
        # for the columns; these are those for 128.
        Operation(
            "split_inputs",
            ("cu_seqlens",),
            num_warps=8,
            is_common=True,
            record=Record(
                "q:input k:input v:input q_parts:output_parts k_parts:output_parts v_parts:output_parts "
                "q_units:output_accum k_units:output_accum v_units:output_accum exceptions:output_int "
                f"{EXTREMES}:output_int",
                ("q", "k", "v"),
                ("softmax_scale",),
                ("num_heads", "heads_per_group", "seqlen_q", "seqlen_k", "batch", *PARTS),
            ),
        ),
        # The same with dO, for a backward; rows of q and dO that see no key, by lse, are zeros. It computes delta, too.
        Operation(
            "split_gradients",
            ("cu_seqlens", "dlse"),
            num_warps=8,
            is_common=True,
            record=Record(
                "q:input k:input v:input o:input dout:input lse:input_accum q_parts:output_parts k_parts:output_parts "
                "v_parts:output_parts dout_parts:output_parts q_units:output_accum k_units:output_accum "
                "v_units:output_accum dout_units:output_accum delta:output_accum dq_accum:output_accum "
                f"exceptions:output_int {EXTREMES}:output_int",
                ("q", "k", "v", "o", "dout"),
                ("softmax_scale",),
                ("num_heads", "heads_per_group", "seqlen_q", "seqlen_k", "batch", *PARTS),
                ("dq_accum_bytes",),
            ),
        ),
        # The states of the tiles of a mask function.
        Operation(
            "tile_states",
            ("mask_mod",),
            num_warps=4,
            is_common=True,
            record=Record(
                f"states:output_bytes {_OF_INTERVALS} {ROW_RISES}:output_int {COLUMN_RISES}:output_int",
                (),
                (),
                ("num_heads", "seqlen_q", "seqlen_k", "map_rows", "map_columns"),
            ),
        ),
        # The intervals of its rows and columns, from where visibility begins and ends in them.
        Operation(
            "close_intervals",
            (),
            num_warps=4,
            is_common=True,
            record=Record(
                f"{_OF_INTERVALS} {ROW_RISES}:input_int {COLUMN_RISES}:input_int", (), (), ("num_rows", "num_columns")
            ),
        ),
        # Under a sparse map, the key tiles that blocks with query tiles visit, and the other way round.
        Operation(
            "list_keys",
            ("cu_seqlens",),
            num_warps=4,
            is_common=True,
            record=Record(f"block_mask:input_bytes {KEY_LISTS}:output_int", (), (), _OF_LISTS),
        ),
        Operation(
            "list_queries",
            ("cu_seqlens",),
            num_warps=4,
            is_common=True,
            record=Record(f"block_mask:input_bytes {QUERY_LISTS}:output_int", (), (), _OF_LISTS),
        ),
        # The order in which blocks take tiles with such lists.
        Operation(
            "order_keys",
            (),
            num_warps=4,
            is_common=True,
            record=Record(f"{KEY_LISTS}:output_int", (), (), ("num_lists", "list_tiles", "list_stride")),
        ),
        Operation(
            "order_queries",
            (),
            num_warps=4,
            is_common=True,
            record=Record(f"{QUERY_LISTS}:output_int", (), (), ("num_lists", "list_tiles", "list_stride")),
        ),
        # The gradient of the sink.
        Operation(
            "dsink",
            ("sink",),
            num_warps=8,
            is_common=True,
            record=Record(
                "lse:input_accum delta:input_accum dsink:output_accum", (), (), ("num_heads", "seqlen_q", "batch")
            ),
        ),
        # Its tangent.
        Operation(
            "dsink_jvp",
            ("sink", "sink_tangent"),
            num_warps=8,
            is_common=True,
            record=Record(
                "lse:input_accum delta:input_accum lset:input_accum deltat:input_accum dsink:output_accum",
                (),
                (),
                ("num_heads", "seqlen_q", "batch"),
            ),
        ),
        # dQ, converted from its workspace: families whose blocks own keys sum it there.
        Operation(
            "convert_dq",
            ("cu_seqlens", "boxes"),
            num_warps=8,
            record=Record(
                "dq_accum:input_accum dq:output", ("dq",), ("softmax_scale",), ("num_heads", "seqlen_q", "num_tiles")
            ),
        ),
        # O and lse, merged from the shares of a split forward.
        Operation(
            "merge_forward",
            ("cu_seqlens",),
            num_warps=4,
            is_common=True,
            record=Record(
                f"{SHARES}:input_accum o:output lse:output_accum",
                ("o",),
                (),
                ("num_heads", "seqlen_q", "num_tiles", "num_splits"),
            ),
        ),
        # The caller's partial results over different keys, merged.
        Operation(
            "merge",
            (),
            num_warps=4,
            is_common=True,
            record=Record(
                "o_parts:input lse_parts:input_accum o:output lse:output_accum",
                ("o_parts", "o"),
                (),
                ("num_heads", "seqlen_q", "batch", "num_parts"),
                ("part_stride",),
            ),
        ),
        # dK and dV of a split kernel, summed over the copies in the workspace: one for all shares, or one for each.
        Operation(
            "sum_dkdv",
            ("dropout_p", "cu_seqlens"),
            num_warps=8,
            is_common=True,
            record=Record(f"{SHARES}:input_accum dk:output dv:output", ("dk", "dv"), ("softmax_scale",), _KEY_SIDE),
        ),
        # dbias of a split kernel, summed over the shares of the sequences.
        Operation(
            "sum_dbias",
            ("wide_bias", "dbias", "full_dbias"),
            num_warps=8,
            is_common=True,
            record=Record(
                f"{SHARES}:input_accum",
                (),
                (),
                ("batch", "num_heads", "seqlen_q", "seqlen_k", "num_copies"),
                ("share_elements",),
                SHARERS,
            ),
        ),
        # The two together, for the split kernel of ``single_pass``.
        Operation(
            "convert_gradients",
            ("dropout_p", "cu_seqlens"),
            num_warps=8,
            record=Record(
                f"dq_accum:input_accum dq:output {SHARES}:input_accum dk:output dv:output",
                ("dq", "dk", "dv"),
                ("softmax_scale",),
                (*_KEY_SIDE, "seqlen_q", "num_tiles"),
            ),
        ),
        # Between the calls of several ranks: copies of many matrices, and sums of what calls or ranks have left.
        Operation("copy_matrices", (), num_warps=8, is_common=True, record=Record(f"{COPIED}:copied_matrices")),
        Operation("sum_arrays", (), num_warps=8, is_common=True, record=Record(f"{SUMMED}:summed_arrays")),
        # The results of rows outside all packed sequences.
        Operation(
            "clear_forward",
            ("cu_seqlens",),
            num_warps=4,
            is_common=True,
            record=Record("o:output lse:output_accum", ("o",), (), ("num_heads",)),
        ),
        Operation(
            "clear_backward",
            ("cu_seqlens",),
            num_warps=4,
            is_common=True,
            record=Record("dq:output dk:output dv:output", ("dq", "dk", "dv"), (), ("num_heads", "heads_per_group")),
        ),
    )
)

#: The tiled operations that have a ``config=``: its keys.
TILED = tuple(name for name, operation in OPERATIONS.items() if operation.is_tiled and operation.has_config)

#: The tiled operations of each method of the backward.
METHODS = {
    "single_pass": ("backward",),
    "two_pass": ("backward_dq", "backward_dkdv"),
    "one_tile": ("backward_one_tile",),
}
#: Those of methods in one launch, where a family has such a kernel.
IN_ONE_LAUNCH = {"two_pass": ("backward_both",)}
#: Those of calls in two launches, where registers do not hold the results of one.
IN_TWO_LAUNCHES = {"jvp": ("forward", "output_jvp")}
#: The kernels of ``one_tile``, without and with dbias of a broadcast bias.
ONE_TILE_DBIAS = "backward_one_tile_dbias"
ONE_TILE = (*METHODS["one_tile"], ONE_TILE_DBIAS)
#: The tiled operations of the calls that are given lse and have no methods.
SEVERAL = {
    "output_jvp": ("output_jvp",),
    "backward_jvp": ("dq_jvp", "dkdv_jvp"),
    "double_backward": ("output_jvp", "dq_jvp", "dkdv_jvp"),
}
