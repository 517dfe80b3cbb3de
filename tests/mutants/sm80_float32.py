"""float32 in float16 parts on mma.sync."""

from __future__ import annotations

import dataclasses

from .mutant import Mutant
from .problems import PARTS, PARTS_OF_GROUPS, PARTS_OF_PAIR, PARTS_OF_SMALL_GRADIENTS, PARTS_OF_UNITS

AMPERE_PARTS = dataclasses.replace(PARTS, device="sm_80")
AMPERE_PARTS_OF_GROUPS = dataclasses.replace(PARTS_OF_GROUPS, device="sm_80")
AMPERE_PARTS_OF_PAIR = dataclasses.replace(PARTS_OF_PAIR, device="sm_80")
#: A problem whose tiles have K and V, or Q and dO, in one stage each.
AMPERE_WIDE_PARTS = dataclasses.replace(PARTS_OF_GROUPS, head_dim=128, device="sm_80")

#: A kernel, a text, the head_dim of it that is exchanged for another, and what catches the change. Assertions of the
#: compiler catch it in tiles.
SWAPPED = (
    ("forward", "multiply_columns<kD / 16, false>(", "kD", "kDv", "race"),
    ("forward", "Output = QuadFragment<kDv / 8>", "kDv", "kD", "unwritten"),
    ("forward", "store_fragment<Spec::kHeadDimV>(output", "kHeadDimV", "kHeadDim", "unwritten"),
    ("backward_dq", "multiply_columns<kD / 16, false>(", "kD", "kDv", "numbers"),
    ("backward_dq", "multiply_columns_from<kDv / 16, false>(", "kDv", "kD", "numbers"),
    ("backward_dq", "store_fragment<Spec::kHeadDim>(dq", "kHeadDim", "kHeadDimV", "bounds"),
    ("backward_dkdv", "multiply_columns<kD / 16, true>(", "kD", "kDv", "numbers"),
    ("backward_dkdv", "multiply_columns_from<kDv / 16, true>(", "kDv", "kD", "numbers"),
    ("backward_dkdv", "Dv = QuadFragment<kDv / 8>", "kDv", "kD", "unwritten"),
    ("backward_dkdv", "store<Spec::kHeadDim>(dk", "kHeadDim", "kHeadDimV", "blocks"),
    ("backward_dkdv", "store<Spec::kHeadDimV>(dv", "kHeadDimV", "kHeadDim", "unwritten"),
)

MUTANTS = (
    Mutant(
        "sm80 parts: nobody waits for K",
        "forward",
        "            cp_async_wait<0>();\n            __syncthreads();  // K is there\n",
        "            __syncthreads();\n",
        "race",
        AMPERE_PARTS,
    ),
    Mutant(
        "sm80 parts: V over one that is in use",
        "forward",
        "            cp_async_wait<0>();\n            __syncthreads();  // K is there\n",
        "            cp_async_wait<0>();\n",
        "race",
        AMPERE_PARTS,
    ),
    Mutant(
        "sm80 parts: nobody waits for V",
        "forward",
        "            cp_async_wait<0>();\n            __syncthreads();  // V is there\n",
        "            __syncthreads();\n",
        "race",
        AMPERE_PARTS,
    ),
    Mutant(
        "sm80 parts: K over one that is in use",
        "forward",
        "            cp_async_wait<0>();\n            __syncthreads();  // V is there\n",
        "            cp_async_wait<0>();\n",
        "race",
        AMPERE_PARTS,
    ),
    Mutant(
        "sm80 parts: the first panel for all",
        "forward",
        " + c16 / kBlocks) * Tile::Panel::kBytes",
        ") * Tile::Panel::kBytes",
        "numbers",
        AMPERE_WIDE_PARTS,
    ),
    Mutant(
        "sm80 parts: high parts of both operands",
        "forward",
        "part * (kOfPart / kBlocks)",
        "0",
        "numbers",
        AMPERE_PARTS,
    ),
    Mutant(
        "sm80 parts: low parts of both operands",
        "forward",
        "b.of[part_of_product<!kLeftLowFirst>(t)][s]",
        "b.of[part_of_product<kLeftLowFirst>(t)][s]",
        "numbers",
        AMPERE_PARTS,
    ),
    Mutant(
        "sm80 parts: O without the unit of V",
        "forward",
        "const float unit[2] = {value_unit[c], value_unit[c]};",
        "const float unit[2] = {1 / kProbabilityScale, 1 / kProbabilityScale};",
        "numbers",
        AMPERE_PARTS,
    ),
    Mutant(
        "sm80 parts: units of the first block",
        "forward",
        "units[first_strip + row / kUnitRows]",
        "units[first_strip]",
        "numbers",
        dataclasses.replace(PARTS_OF_UNITS, device="sm_80"),
    ),
    Mutant(
        "sm80 parts: the parts of another head",
        "forward",
        "Layout::row_of(index, num_strips, first)",
        "Layout::row_of(0, num_strips, first)",
        "numbers",
        AMPERE_PARTS_OF_GROUPS,
    ),
    Mutant(
        "sm80 parts: O not rescaled",
        "forward",
        "            multiply_rows(output, rescale);\n",
        "",
        "numbers",
        AMPERE_PARTS,
    ),
    Mutant(
        "sm80 parts: the second chain in place of the first",
        "forward",
        "own = fma(product.value[h][e], factor[e / 2], own);",
        "own = product.value[h][e] * factor[e / 2];",
        "numbers",
        AMPERE_PARTS,
    ),
    Mutant(
        "sm80 parts: V over one whose dP is not there",
        "backward_dq",
        "            __syncthreads();\n            if (tile > tiles.begin) load_value(tile - 1);",
        "            if (tile > tiles.begin) load_value(tile - 1);",
        "race",
        AMPERE_PARTS,
    ),
    Mutant(
        "sm80 parts: K over one whose dQ is not there",
        "backward_dq",
        "                __syncthreads();\n                if (tile > tiles.begin) load_key(tile - 1);",
        "                if (tile > tiles.begin) load_key(tile - 1);",
        "race",
        AMPERE_WIDE_PARTS,
    ),
    Mutant(
        "sm80 parts: the next K in the slot of this one",
        "backward_dq",
        "return kK + tile % kStages * KeyTile::kBytes;",
        "return kK;",
        "race",
        AMPERE_PARTS,
    ),
    Mutant(
        "sm80 parts: dQ without the unit of K",
        "backward_dq",
        "{inverse[0] * key_unit[c], inverse[1] * key_unit[c]}",
        "{inverse[0], inverse[1]}",
        "numbers",
        AMPERE_PARTS,
    ),
    Mutant(
        "sm80 parts: dO of the same unit as Q",
        "backward_dq",
        "dout_unit = douts.unit(first_row + warp_row)",
        "dout_unit = query_unit",
        "numbers",
        dataclasses.replace(PARTS_OF_SMALL_GRADIENTS, device="sm_80"),
    ),
    Mutant(
        "sm80 parts: dO over one that is in use",
        "backward_dkdv",
        "                __syncthreads();\n                if (more) load_dout(next);",
        "                if (more) load_dout(next);",
        "race",
        AMPERE_PARTS,
    ),
    Mutant(
        "sm80 parts: Q over one that is in use",
        "backward_dkdv",
        "                __syncthreads();\n                if (more) load_query(next, t + 1);",
        "                if (more) load_query(next, t + 1);",
        "race",
        AMPERE_WIDE_PARTS,
    ),
    Mutant(
        "sm80 parts: statistics of the step before",
        "backward_dkdv",
        "store_row_stat(row_stat, t + 1);",
        "store_row_stat(row_stat, t);",
        "race",
        AMPERE_PARTS,
    ),
    Mutant(
        "sm80 parts: the first head of the group alone",
        "backward_dkdv",
        "same_head ? step.head : step.head + 1",
        "step.head",
        "numbers",
        AMPERE_PARTS_OF_GROUPS,
    ),
    Mutant(
        "sm80 parts: keys of the first warp",
        "backward_dkdv",
        "position{where.batch, step.head, first_query, where.tile * kBc + warp_key, lane}",
        "position{where.batch, step.head, first_query, where.tile * kBc, lane}",
        "numbers",
        AMPERE_PARTS,
    ),
    *(
        Mutant(
            f"sm80 parts: the other head_dim in {operation}, {text}",
            operation,
            text,
            text.replace(of, other),
            caught_by,
            AMPERE_PARTS_OF_PAIR,
        )
        for operation, text, of, other, caught_by in SWAPPED
    ),
)
