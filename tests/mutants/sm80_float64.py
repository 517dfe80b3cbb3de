"""float64 on mma.sync."""

from __future__ import annotations

import dataclasses

from fa2cupy import TileConfig

from .mutant import Mutant
from .problems import Problem

DOUBLES = Problem("float64", family="sm80", tile=TileConfig(32, 16, 2))
#: A row shift moves after keys have been added up.
GROWING_DOUBLES = dataclasses.replace(DOUBLES, causal=False, growing=True)
DOUBLES_BY_KEYS = dataclasses.replace(DOUBLES, tile=TileConfig(16, 32, 4, 2))
DOUBLES_IN_ONE_STAGE = dataclasses.replace(DOUBLES, tile=TileConfig(16, 32, 4))
DOUBLES_OF_PAIR = dataclasses.replace(DOUBLES, head_dim_v=32)

MUTANTS = (
    Mutant(
        "doubles: nobody waits for Q and K",
        "forward",
        "            common::cp_async_wait_all();\n            __syncthreads();  // Q and K are there, V is free\n",
        "            __syncthreads();\n",
        "race",
        DOUBLES,
    ),
    Mutant(
        "doubles: V over one that is in use",
        "forward",
        "            __syncthreads();  // Q and K are there, V is free\n",
        "",
        "race",
        DOUBLES,
    ),
    Mutant(
        "doubles: nobody waits for V",
        "forward",
        "            common::cp_async_wait_all();\n            __syncthreads();  // V is there, K is free\n",
        "            __syncthreads();\n",
        "race",
        DOUBLES,
    ),
    Mutant(
        "doubles: K over one that is in use",
        "forward",
        "            __syncthreads();  // V is there, K is free\n",
        "",
        "race",
        DOUBLES,
    ),
    Mutant(
        "doubles: accumulators in their own order as left operand",
        "forward",
        "{p.value[k][0], p.value[k][2], p.value[k][1], p.value[k][3]}",
        "{p.value[k][0], p.value[k][1], p.value[k][2], p.value[k][3]}",
        "numbers",
        DOUBLES,
    ),
    Mutant(
        "doubles: even columns stored as odd ones",
        "forward",
        "make_double2(x.value[n][2 * i], x.value[n][2 * i + 1])",
        "make_double2(x.value[n][2 * i + 1], x.value[n][2 * i])",
        "numbers",
        DOUBLES,
    ),
    Mutant(
        "doubles: another swizzle for reads than for copies",
        "forward",
        "(lane % 4 / 2 ^ Tile::swizzle(lane / 4)) << 4",
        "(lane % 4 / 2 ^ Tile::swizzle(lane / 4 & 3)) << 4",
        "numbers",
        DOUBLES,
    ),
    Mutant(
        "doubles: O keeps its row shift",
        "forward",
        "                softmax.update(scores, rescale);\n                scale_rows(output, rescale);\n",
        "                softmax.update(scores, rescale);\n",
        "numbers",
        GROWING_DOUBLES,
    ),
    Mutant(
        "doubles: P in float",
        "forward",
        "exp_of_parts(x, fma(power * r, y, power), low >> 6)",
        "exp_of_parts(x, static_cast<float>(fma(power * r, y, power)), low >> 6)",
        "numbers",
        DOUBLES,
    ),
    Mutant(
        "doubles: hidden keys count",
        "forward",
        "selp.b32 limit, %3, 0, nan;",
        "selp.b32 limit, %3, 0x3ff00000, nan;",
        "numbers",
        DOUBLES,
    ),
    Mutant(
        "doubles: kDv columns of Q",
        "forward",
        "multiply_rows<kD / 8>(",
        "multiply_rows<kDv / 8>(",
        "numbers",
        DOUBLES_OF_PAIR,
    ),
    Mutant(
        "doubles: nobody waits for dO and V",
        "backward_dq",
        "            common::cp_async_wait_all();\n            __syncthreads();  // Q, dO and V are there, K is free\n",
        "            __syncthreads();\n",
        "race",
        DOUBLES,
    ),
    Mutant(
        "doubles: K over one that dQ needs",
        "backward_dq",
        "            __syncthreads();  // Q, dO and V are there, K is free\n",
        "",
        "race",
        DOUBLES,
    ),
    Mutant(
        "doubles: V over one that dP needs",
        "backward_dq",
        "            __syncthreads();  // K is there, V is free\n",
        "",
        "race",
        DOUBLES,
    ),
    Mutant(
        "doubles: dS^T before its weights",
        "backward_dkdv",
        "            if constexpr (!kOfV) common::barrier_sync(1 + owner(), 64);\n",
        "",
        "uninitialised",
        DOUBLES_BY_KEYS,
    ),
    Mutant(
        "doubles: nobody waits for Q, dO and statistics",
        "backward_dkdv",
        "            block_barrier();  // Q, dO and statistics are there, the other slot and the weights are free\n",
        "",
        "uninitialised",
        DOUBLES_BY_KEYS,
    ),
    Mutant(
        "doubles: one stage over those in use",
        "backward_dkdv",
        "                block_barrier();  // dS^T is there, the slot is free\n",
        "",
        "race",
        DOUBLES_IN_ONE_STAGE,
    ),
    Mutant(
        "doubles: delta in the place of lse",
        "backward_dkdv",
        "statistic_at(t, 0, j)",
        "statistic_at(t, 1, j)",
        "numbers",
        DOUBLES_BY_KEYS,
    ),
)
