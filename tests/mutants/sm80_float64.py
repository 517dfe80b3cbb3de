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
#: A warp has keys of its own.
DOUBLES_OF_OWNERS = dataclasses.replace(DOUBLES, tile=TileConfig(32, 32, 2))
DOUBLES_APART = dataclasses.replace(DOUBLES_OF_OWNERS, causal=False)

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
    Mutant(
        "doubles: dQ before dS^T",
        "backward",
        "                block_barrier();  // dS^T is there, the slot is free\n",
        "",
        "race",
        DOUBLES_IN_ONE_STAGE,
    ),
    Mutant(
        "doubles: dS^T over one that dQ needs",
        "backward",
        "            block_barrier();  // Q, dO and statistics are there, the other slot and the weights are free\n",
        "",
        "race",
        DOUBLES_OF_OWNERS,
    ),
    Mutant(
        "doubles: dQ of the last step before its dS^T",
        "backward",
        "                block_barrier();  // the last dS^T is there\n",
        "",
        "race",
        DOUBLES_BY_KEYS,
    ),
    Mutant(
        "doubles: one buffer of dS^T for two steps",
        "backward",
        "kDs + t % kStages * DsTile::kBytes",
        "kDs",
        "race",
        DOUBLES_BY_KEYS,
    ),
    Mutant(
        "doubles: dQ of a step in the rows of the next one",
        "backward",
        "            previous = step;\n",
        "            previous = position;\n",
        "bounds",
        DOUBLES_BY_KEYS,
    ),
    Mutant(
        "doubles: dS for dS^T",
        "backward",
        "        p_transposed.load(0, k, a[0], a[2]);\n        p_transposed.load(1, k, a[1], a[3]);\n",
        "        p_transposed.load(0, k, a[0], a[1]);\n        p_transposed.load(1, k, a[2], a[3]);\n",
        "numbers",
        DOUBLES_BY_KEYS,
    ),
    Mutant(
        "doubles: dQ by the other columns of K",
        "backward",
        "AcrossRows<KTile>(smem + first16 * 128, lane)",
        "AcrossRows<KTile>(smem, lane)",
        "numbers",
        DOUBLES_IN_ONE_STAGE,
    ),
    Mutant(
        "doubles: even columns of dQ added to the odd ones",
        "backward",
        "Workspace::offset(0, n, e, 0)",
        "Workspace::offset(0, n, e ^ 1, 0)",
        "numbers",
        DOUBLES_BY_KEYS,
    ),
    Mutant(
        "doubles: blocks that start at other tiles go on to the next head too early",
        "backward",
        "            if (position.tile == start) ++position.head;\n",
        "            if (position.tile == tiles.begin) ++position.head;\n",
        "bounds",
        DOUBLES_APART,
    ),
    Mutant(
        "doubles: dQ in float",
        "backward",
        ", product.value[n][e]);",
        ", static_cast<float>(product.value[n][e]));",
        "numbers",
        DOUBLES_BY_KEYS,
    ),
    Mutant(
        "doubles: dQ without the scale",
        "convert_dq",
        "params.softmax_scale * workspace",
        "workspace",
        "numbers",
        DOUBLES_BY_KEYS,
    ),
    Mutant(
        "doubles: dQ to the first columns alone",
        "convert_dq",
        "rows.length, lane, 8 * n8)",
        "rows.length, lane)",
        "unwritten",
        DOUBLES_BY_KEYS,
    ),
)
