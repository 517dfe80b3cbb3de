"""The kernels of IEEE arithmetic on the CUDA cores."""

from __future__ import annotations

import dataclasses
import functools

from support.simulated_problems import at_level

from fa2cupy import TileConfig

from .mutant import Mutant
from .problems import Problem, without_keys

SIMT = Problem("float32", 59, (21, 27))
SIMT_ALIGNED = Problem("float32", 60, (21, 27))  # rows are copied 16 bytes at a time
SIMT_LEVEL = Problem("float32", 40, (11, 29), heads=(1, 1), scores=functools.partial(at_level, score=90.0))
SIMT_GROUPS = Problem("float32", 59, (21, 27), heads=(4, 2))
#: Lanes sum dV and then dK of so many columns.
SIMT_WIDE = Problem("float64", 456, (10, 12), (1, 1), head_dim_v=448, tile=TileConfig(8, 4, 1), family="simt")
#: The barriers after copies to shared memory, by their comments in the kernels.
SIMT_COPIES = (
    ("forward", "Q and K are there"),
    ("forward", "V is there"),
    ("backward_dq", "Q, dO and V are there"),
    ("backward_dq", "K is there"),
    ("backward_dkdv", "K, V, dO, lse and delta are there"),
    ("backward_dkdv", "Q is there"),
)
SIMT_PAIR = Problem("float32", 40, (21, 27), head_dim_v=72)
SIMT_PAIR_HIDDEN = without_keys(dtype="float32", head_dim=40, head_dim_v=72, lengths=(21, 27))
#: A kernel, a text, the head_dim of it that is exchanged for another, and what catches the change.
SWAPPED = (
    ("forward", "RowsV::template copy<kThreads, kBc>(tile", "RowsV", "Rows", "uninitialised"),
    ("forward", "v_tile + kBc * RowsV::", "RowsV", "Rows", "race"),
    (
        "backward_dq",
        "RowsV::template copy<kThreads, kBc>(tile, gmem, strides.row, key_tile * kBc, params.seqlen_k);\n        };\n"
        "        const auto mask = common::mask_of<Spec>(params);\n\n        // An lse",
        "RowsV",
        "Rows",
        "uninitialised",
    ),
    ("backward_dq", "RowsV::template copy<kThreads, kBr>(do_rows", "RowsV", "Rows", "uninitialised"),
    ("backward_dq", "WarpV::dot(ds", "WarpV", "Warp", "uninitialised"),
    ("backward_dq", " Warp::dot(p", "Warp", "WarpV", "uninitialised"),
    ("backward_dq", "own_v = warp * Warp::kOwn * RowsV::", "RowsV", "Rows", "uninitialised"),
    ("backward_dq", "do_rows + kBr * RowsV::", "RowsV", "Rows", "race"),
    ("backward_dq", "all_posted = v_tile + kBc * RowsV::", "RowsV", "Rows", "race"),
    ("backward", "clear_hidden_rows<Scores, RowsV>(", "RowsV", "Rows", "numbers"),
    ("backward", "add_to_keys<Spec::kHeadDimV>(", "kHeadDimV", "kHeadDim", "uninitialised"),
    ("backward", "add_to_keys<Spec::kHeadDim>(", "kHeadDim", "kHeadDimV", "uninitialised"),
    ("backward_dkdv", "RowsV::template copy<kThreads, kBc>(v_rows", "RowsV", "Rows", "uninitialised"),
    ("backward_dkdv", "RowsV::template copy<kThreads, kBr>(do_tile", "RowsV", "Rows", "uninitialised"),
    ("backward_dkdv", "WarpV::dot(ds", "WarpV", "Warp", "uninitialised"),
    ("backward_dkdv", " Warp::dot(p", "Warp", "WarpV", "uninitialised"),
    ("backward_dkdv", "own_v = warp * Warp::kOwn * RowsV::", "RowsV", "Rows", "uninitialised"),
    ("backward_dkdv", "v_rows + kBc * RowsV::", "RowsV", "Rows", "race"),
    ("backward_dkdv", "do_tile + kBr * RowsV::", "RowsV", "Rows", "race"),
    ("backward_dkdv", "clear_hidden_tile<Spec, RowsV>(", "RowsV", "Rows", "numbers"),
)

MUTANTS = (
    # simt
    Mutant(
        "simt: dropout of other elements",
        "forward",
        "query & 8 ? lower : upper",
        "query & 8 ? upper : lower",
        "numbers",
        dataclasses.replace(SIMT, feature="dropout"),
    ),
    *(
        Mutant(
            f"simt: no wait, {name}",
            operation,
            f"wait_for_copies();\n            __syncthreads();  // {name}",
            f"__syncthreads();  // {name}",
            "race",
            SIMT,
        )
        for operation, name in SIMT_COPIES
    ),
    *(
        Mutant(f"simt: no barrier, {name}", operation, f"__syncthreads();  // {name}", f"// {name}", "race", SIMT)
        for operation, name in (
            *SIMT_COPIES,
            ("backward", "P is there"),
            ("backward", "P is used"),
            ("backward", "dS is there"),
            ("backward_dkdv", "dO, lse, delta and what was posted are free"),
        )
    ),
    *(
        Mutant(
            f"simt: no column predicate on load{name}",
            "forward",
            "row < num_rows && column < kHeadDim);",
            "row < num_rows);",
            "bounds",
            problem,
        )
        for name, problem in (("", SIMT), (" of vectors", SIMT_ALIGNED))
    ),
    Mutant(
        "simt: no row predicate on load",
        "backward_dq",
        "row < num_rows && column < kHeadDim);",
        "column < kHeadDim);",
        "bounds",
        SIMT,
    ),
    Mutant("simt: no row predicate on store", "backward_dq", "if (row >= num_rows) break;", "", "bounds", SIMT),
    Mutant(
        "simt: no column predicate on store",
        "backward_dq",
        "if (column + v < kHeadDim) first[v]",
        "first[v]",
        "blocks",
        SIMT,
    ),
    Mutant(
        "simt: no column predicate on store of vectors",
        "backward_dq",
        "if (column < kHeadDim) *reinterpret_cast<Vec*>(first)",
        "*reinterpret_cast<Vec*>(first)",
        "blocks",
        SIMT_ALIGNED,
    ),
    Mutant(
        "simt: columns of another warp",
        "backward",
        "column = own_column + Keys::Sums::col(chunk + c, lane);",
        "column = Keys::Sums::col(chunk + c, lane);",
        "numbers",
        SIMT,
    ),
    Mutant("simt: no row predicate on sums", "backward", "if (key >= num_keys) break;", "", "bounds", SIMT),
    Mutant(
        "simt: no column predicate on sums",
        "backward",
        "if (column + v < kHeadDim) atomicAdd",
        "atomicAdd",
        "bounds",
        SIMT,
    ),
    Mutant(
        "simt: no column predicate on sums of vectors",
        "backward",
        "if (column < kHeadDim) common::add_global",
        "common::add_global",
        "bounds",
        SIMT_ALIGNED,
    ),
    Mutant(
        "simt: query heads of another group",
        "backward_dkdv",
        "int32 head = where.head * params.heads_per_group",
        "int32 head = where.head",
        "numbers",
        SIMT_GROUPS,
    ),
    *(
        Mutant(f"simt: no {name} of wide heads", "backward_dkdv", text, "", "unwritten", SIMT_WIDE)
        for name, text in (("dV", "sum<false, true>(params, smem);"), ("dK", "sum<true, false>(params, smem);"))
    ),
    Mutant(
        "simt: global sums overwritten",
        "backward",
        "atomicAdd(first + v, x.item[v]);",
        "first[v] = x.item[v];",
        "blocks",
        SIMT,
    ),
    Mutant("simt: dS without delta", "backward_dq", "(ds(i, j) - delta(i, j));", "ds(i, j);", "numbers", SIMT),
    Mutant(
        "simt: rescale of the first row for all",
        "forward",
        "fma(sum, factor[i], of_tile)",
        "fma(sum, factor[0], of_tile)",
        "numbers",
        SIMT,
    ),
    Mutant(
        "simt: one chain of additions",
        "forward",
        "kSumsInLevels = sizeof(Real) == 4;",
        "kSumsInLevels = false;",
        "numbers",
        SIMT_LEVEL,
    ),
    *(
        Mutant(
            f"simt: the other head_dim in {operation}, {text.partition(chr(10))[0]}",
            operation,
            text,
            text.replace(of, other),
            caught_by,
            SIMT_PAIR_HIDDEN if "hidden" in text else SIMT_PAIR,
        )
        for operation, text, of, other, caught_by in SWAPPED
    ),
    Mutant("simt: longer chains", "forward", "kSumsInLevels ? 8", "kSumsInLevels ? 32", "numbers", SIMT_LEVEL),
)
