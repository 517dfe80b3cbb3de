"""Packed sequences that start late, code for older GPUs, strides, extreme scores, long sums, roundings."""

from __future__ import annotations

import functools

from support.simulated_problems import at_level, jumping
from support.strided_arrays import gapped

from .mutant import Mutant
from .problems import ONE_GROUP, PAIRS, Problem, with_nan, without_keys

AHEAD = Problem(lengths=(109, 139), rows_ahead=70)
#: Expressions that round a number to a bit less than the dtype has.
A_BIT_LESS = {
    "float16": "__uint_as_float((__float_as_uint({}) + 0x2000u) & 0xffffc000u)",
    "bfloat16": "__uint_as_float((__float_as_uint({}) + 0x10000u) & 0xfffe0000u)",
}

MUTANTS = (
    # Edges: packed sequences that start late, code for older GPUs, strides, extreme scores, long sums, roundings
    Mutant(
        "a tile ahead of the first sequence",
        "forward",
        "return tile >= 0 && tile < ceil_div(length, rows_of_tile);",
        "return tile < ceil_div(length, rows_of_tile);",
        "numbers",
        AHEAD,
    ),
    Mutant(
        "rows ahead of the first sequence taken for its own",
        "clear_backward",
        "return row >= first && row - first < length;",
        "return row - first < length;",
        "unwritten",
        AHEAD,
    ),
    Mutant(
        "before sm_90: dbias in pairs of one key",
        "backward_dq",
        "atomicAdd(address + 1, odd);",
        "atomicAdd(address + 1, even);",
        "numbers",
        Problem(feature="bias of heads", batch=2, lengths=PAIRS, device="sm_80"),
    ),
    Mutant(
        "before sm_90: dQ in the order of sm_90",
        "backward",
        "add_global(address + e * kElementStride, x[e]);",
        "add_global(address + e, x[e]);",
        "numbers",
        Problem(device="sm_80", feature="window", causal=False),
    ),
    Mutant(
        "bias in pairs that are no neighbours",
        "forward",
        "params_.bias_strides.column == 1 && is_even",
        "is_even",
        "uninitialised",
        Problem(feature="bias", lengths=PAIRS, view=gapped),
    ),
    Mutant(
        "mask in pairs that are no neighbours",
        "forward",
        "params_.mask_strides.column == 1 && is_even",
        "is_even",
        "uninitialised",
        Problem(feature="mask", lengths=PAIRS, view=gapped),
    ),
    Mutant(
        "a row shift of the softmax that no score has been",
        "forward",
        "row_shift[i] = -infinity<Real>();",
        "row_shift[i] = 0;",
        "numbers",
        Problem(scores=functools.partial(at_level, score=-24.0)),
    ),
    Mutant(
        "a P that float16 does not hold",
        "forward",
        "kLargestShare = 4096.0f;",
        "kLargestShare = 262144.0f;",
        "numbers",
        Problem(lengths=(67, 96), causal=False, scores=functools.partial(jumping, most=17.5)),
    ),
    Mutant(
        "queries before the first key are read",
        "backward",
        "if (!is_first || common::end_of_hidden_rows<Spec>(params) <= 0) return;",
        "return;",
        "numbers",
        Problem(lengths=(94, 37), scores=functools.partial(with_nan, rows=slice(94 - 37))),
    ),
    Mutant(
        "dO of a row without a key is kept",
        "backward",
        "clear_row<DoTile>(smem + kDo + slot * kStageBytes, row);",
        "",
        "numbers",
        without_keys(),
    ),
    Mutant(
        "a tile is read before rows without a key are cleared",
        "backward",
        "if (is_hidden(row)) clear(row);\n    block_barrier();",
        "if (is_hidden(row)) clear(row);",
        "race",
        without_keys(),
    ),
    Mutant(
        "delta of a row without a key",
        "backward_dkdv",
        "return hidden ? 0.0f : -params.delta[first + row];",
        "return valid ? -params.delta[first + row] : 0.0f;",
        "numbers",
        without_keys(),
    ),
    Mutant(
        "simt: dO of a row without a key is kept",
        "backward_dkdv",
        "clear_hidden_tile<Spec, RowsV>(params, do_tile, lse_tile, lane);",
        "",
        "numbers",
        without_keys(dtype="float32", head_dim=24, lengths=(21, 27)),
    ),
    Mutant(
        "simt: dO of a row without a key is kept in one pass",
        "backward",
        "clear_hidden_rows<Scores, RowsV>(do_rows + own_v, lse, lane);",
        "",
        "numbers",
        without_keys(dtype="float32", head_dim=24, lengths=(21, 27)),
    ),
    Mutant(
        "dsink of a row without a key, and of a sink that is none",
        "dsink",
        "if (lse == -infinity<Accum>()) continue;",
        "",
        "numbers",
        Problem("float32", 24, (40, 9), feature="sink of one head"),
    ),
    Mutant(
        "dsink of as many rows as a block has threads",
        "dsink",
        "row < params.seqlen_q; row += blockDim.x",
        "row < min_of(params.seqlen_q, static_cast<int32>(blockDim.x)); row += blockDim.x",
        "numbers",
        Problem("float32", 24, (301, 9), feature="sink", causal=False),
    ),
    *(
        Mutant(
            f"{name}: operands with a bit less",
            operation,
            "{ word[n8][i] = pack<Element>(even, odd); }",
            "{{ word[n8][i] = pack<Element>({}, {}); }}".format(
                *(A_BIT_LESS[dtype].format(x) for x in ("even", "odd"))
            ),
            "root mean square",
            Problem(dtype, 64, (133, 150), causal=False, hopper_tile=tile),
        )
        for name, dtype, operation, tile in (
            ("sm80", "bfloat16", "forward", None),
            ("sm80 in float16", "float16", "forward", None),
            ("sm90", "bfloat16", "forward", ONE_GROUP),
            ("sm80 backward", "bfloat16", "backward_dkdv", None),
        )
    ),
)
