"""The kernels of IEEE arithmetic on the CUDA cores."""

from __future__ import annotations

import dataclasses
import functools

from support.simulated_problems import at_level

from .mutant import Mutant
from .problems import Problem

SIMT = Problem("float32", 59, (21, 27))
SIMT_ALIGNED = Problem("float32", 60, (21, 27))  # rows are copied 16 bytes at a time
SIMT_LEVEL = Problem("float32", 40, (11, 29), heads=(1, 1), scores=functools.partial(at_level, score=90.0))
SIMT_GROUPS = Problem("float32", 59, (21, 27), heads=(4, 2))
#: The barriers after copies to shared memory, by their comments in the kernels.
SIMT_COPIES = (
    ("forward", "Q and K are there"),
    ("forward", "V is there"),
    ("backward_dq", "Q, dO and V are there"),
    ("backward_dq", "K is there"),
    ("backward_dkdv", "K, V, dO, lse and delta are there"),
    ("backward_dkdv", "Q is there"),
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
        "if (column + v < Rows::kHeadDim) atomicAdd",
        "atomicAdd",
        "bounds",
        SIMT,
    ),
    Mutant(
        "simt: no column predicate on sums of vectors",
        "backward",
        "if (column < Rows::kHeadDim) common::add_global",
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
    Mutant("simt: longer chains", "forward", "kSumsInLevels ? 8", "kSumsInLevels ? 32", "numbers", SIMT_LEVEL),
)
