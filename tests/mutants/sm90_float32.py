"""float32 in float16 parts on Hopper: the split of inputs, the kernels, and those of wide heads in pieces."""

from __future__ import annotations

import dataclasses

import numpy as np

from .mutant import Mutant
from .problems import PARTS, PARTS_OF_GROUPS, PARTS_OF_SMALL_GRADIENTS, PARTS_OF_UNITS


def with_small_rows(inputs: tuple) -> tuple:
    """Makes V large at the first and the last key, whose weight is almost zero, so that other rows of V are small.

    No term of a score is above 32.
    """
    q, k, v, _ = inputs
    large = [0, -1]
    q[..., 0], k[:, large] = 1, 0
    k[:, large, :, 0] = -30 * q.shape[3] ** 0.5
    v[:, large] *= np.float32(1e10)
    return inputs


PIECES = dataclasses.replace(PARTS, head_dim=256, lengths=(150, 200))
PARTS_OF_SMALL_ROWS = dataclasses.replace(PARTS, scores=with_small_rows)
PARTS_OF_BIAS = dataclasses.replace(PARTS, feature="bias")
WAIT_FOR_DP = "            wgmma_wait<0>();\n            pin(dp);\n"
RELEASE_DO = "            release_dout();\n"

MUTANTS = (
    Mutant(
        "parts: rows that are not there",
        "split_inputs",
        "bool valid = row < rows.length;",
        "bool valid = true;",
        "bounds",
        PARTS,
    ),
    Mutant(
        "parts: the remainder of the low part alone",
        "split_inputs",
        "    x -= common::unpack_lo<float16>(part);",
        "    x = 0.0f;",
        "numbers",
        PARTS,
    ),
    Mutant(
        "parts: chunks as they come",
        "split_inputs",
        "(column % kPanelColumns / 8 ^ row % 8) * 8",
        "column % kPanelColumns",
        "numbers",
        PARTS,
    ),
    Mutant(
        "parts: exceptions are stored by several blocks",
        "split_inputs",
        "if (exception) atomicOr(&params.exceptions[head_kv], 1);",
        "if (exception) params.exceptions[head_kv] = 1;",
        "blocks",
        PARTS_OF_SMALL_ROWS,
    ),
    Mutant(
        "parts: small rows are no exception",
        "split_inputs",
        "bool exception = loses_bits(of_row, largest);",
        "bool exception = false;",
        "numbers",
        PARTS_OF_SMALL_ROWS,
    ),
    Mutant(
        "parts: a warp's largest element is the block's",
        "split_inputs",
        "for (int w = 0; w < Spec::kWarps; ++w) largest = max_of(largest, of_warps[w]);",
        "largest = of_warps[warp];",
        "numbers",
        PARTS,
    ),
    Mutant(
        "parts: nobody waits for the other warps' largest elements",
        "split_inputs",
        "        __syncthreads();\n        uint32 largest = 0;",
        "        uint32 largest = 0;",
        "race",
        PARTS,
    ),
    Mutant(
        "parts: K is released before S is there",
        "forward",
        "        wgmma_wait<0>();\n        scores = products.sum();\n        release_key();",
        "        release_key();\n        wgmma_wait<0>();\n        scores = products.sum();",
        "race",
        PARTS,
    ),
    Mutant(
        "parts: Q is not released",
        "forward",
        "if (is_last && lane_ == 0) mbarrier_arrive(memory_.empty_query(0));",
        "",
        "deadlock",
        PARTS,
    ),
    Mutant(
        "parts: a strip of O is read in flight",
        "forward",
        "            wgmma_wait<0>();\n            pin(part);",
        "            pin(part);",
        "in flight",
        PARTS,
    ),
    Mutant(
        "parts: V may still be on its way",
        "forward",
        "        mbarrier_wait(memory_.full_value(values_.slot()), values_.parity());\n        add_product(",
        "        add_product(",
        "uninitialised",
        PARTS,
    ),
    Mutant(
        "parts: strips have the first one's unit",
        "forward",
        "first_key_strip_ + block * kStrips + c;",
        "first_key_strip_ + block * kStrips;",
        "numbers",
        PARTS_OF_UNITS,
    ),
    Mutant(
        "parts: the producer overtakes the readers of V",
        "forward",
        "        mbarrier_wait(memory_.empty_value(value), values_.parity() ^ 1);",
        "",
        "race",
        PARTS,
    ),
    Mutant(
        "parts: the producer overtakes the readers of Q",
        "forward",
        "        mbarrier_wait(memory_.empty_query(0), queries_.parity() ^ 1);",
        "",
        "race",
        PARTS,
    ),
    Mutant(
        "parts: low parts of both operands",
        "forward",
        "part_of_product<kRowsAreKeys>(t) * (kRightPart / 16)",
        "part_of_product<!kRowsAreKeys>(t) * (kRightPart / 16)",
        "numbers",
        PARTS,
    ),
    Mutant(
        "parts: dP is read in flight",
        "backward_dq",
        WAIT_FOR_DP,
        "            pin(dp);\n",
        "in flight",
        PARTS,
    ),
    Mutant(
        "parts: dO is not released",
        "backward_dq",
        "        mbarrier_arrive(memory_.empty_dout(0));",
        "",
        "deadlock",
        PARTS,
    ),
    Mutant(
        "parts: dS as large as it comes",
        "backward_dq",
        "        row_scales(scores, scale, inverse);",
        "        scale[0] = scale[1] = inverse[0] = inverse[1] = 1.0f;",
        "numbers",
        PARTS_OF_SMALL_GRADIENTS,
    ),
    Mutant(
        "parts: the second chain of S is left out",
        "forward",
        "            add_rows(first_, second_, one);",
        "",
        "numbers",
        dataclasses.replace(PARTS, head_dim=128),
    ),
    Mutant(
        "parts: the start of dP stays in it",
        "backward_dq",
        "rest = fma(start, (2 * kChains - 1) * unit, delta);",
        "rest = delta;",
        "numbers",
        PARTS,
    ),
    Mutant(
        "parts: dO is released before dP is there",
        "backward_dkdv",
        f"{WAIT_FOR_DP}{RELEASE_DO}",
        f"{RELEASE_DO}{WAIT_FOR_DP}",
        "race",
        dataclasses.replace(PARTS_OF_GROUPS, head_dim=128),
    ),
    Mutant(
        "parts: nobody waits for K",
        "backward_dkdv",
        "            mbarrier_wait(memory_.full_key(), 0);",
        "",
        "race",
        PARTS,
    ),
    Mutant(
        "parts: the statistics of the first lane's queries",
        "backward_dkdv",
        "Scores::col(0, lane_) * 4 + ",
        "",
        "numbers",
        PARTS,
    ),
    Mutant(
        "parts: the queries of the group's first head alone",
        "backward_dkdv",
        "step(head_kv * params.heads_per_group + member, tile);",
        "step(head_kv * params.heads_per_group, tile);",
        "numbers",
        PARTS_OF_GROUPS,
    ),
    Mutant(
        "parts: statistics are stored over those of another step",
        "backward_dkdv",
        "            mbarrier_wait(empty, ring.parity() ^ 1);\n",
        "",
        "race",
        PARTS_OF_GROUPS,
    ),
    Mutant(
        "parts: the second panel again",
        "backward_dkdv",
        "rows + panel * (kBr * kPanelRowBytes / 16), panel,",
        "rows, panel,",
        "numbers",
        dataclasses.replace(PARTS, head_dim=128),
    ),
    Mutant(
        "parts: dQ of dS with a scale for each key",
        "backward",
        "factor[i] = common::pack<float16>(unit[i] * inverse, unit[i] * inverse);",
        "factor[i] = 0x3c003c00;",
        "numbers",
        PARTS,
    ),
    Mutant(
        "parts: dbias without zeros in tiles that are skipped",
        "backward_dq",
        "16, keys.begin * kBc, keys.end * kBc);",
        "16, keys.begin * kBc, params_.seqlen_k);",
        "unwritten",
        PARTS_OF_BIAS,
    ),
    Mutant(
        "parts: dbias of the tile before",
        "backward_dq",
        "return {tile.batch(), tile.head(), first_row(tile), block * kBc, lane_};",
        "return {tile.batch(), tile.head(), first_row(tile), max_of(block - 1, 0) * kBc, lane_};",
        "unwritten",
        PARTS_OF_BIAS,
    ),
    Mutant(
        "parts: the largest unit of a lane's own keys",
        "backward",
        "unit = max_of(unit, __shfl_xor_sync(common::kFullWarp, unit, mask));",
        ";",
        "numbers",
        PARTS_OF_SMALL_GRADIENTS,
    ),
    Mutant(
        "parts: units of dS are read before the other warps have given theirs",
        "backward",
        "        barrier_sync(kGroupBarrier + group_, kGroupThreads);\n",
        "",
        "race",
        PARTS,
    ),
    Mutant(
        "parts: dS is not fenced",
        "backward",
        "            async_proxy_fence();\n            mbarrier_arrive(memory_.full_ds(group));",
        "            mbarrier_arrive(memory_.full_ds(group));",
        "proxy",
        PARTS,
    ),
    Mutant(
        "parts: nobody waits for dS",
        "backward",
        "        mbarrier_wait(memory_.full_ds(group_), ds_.parity());\n",
        "",
        "race",
        PARTS,
    ),
    Mutant(
        "parts: dQ is added in flight",
        "backward",
        "                wgmma_wait<0>();\n            pin(product[panel]);",
        "                ;\n            pin(product[panel]);",
        "in flight",
        PARTS,
    ),
    Mutant(
        "parts: dQ of the first panel of K twice",
        "backward",
        "key_rows() + panel * kKeyPanel);",
        "key_rows());",
        "numbers",
        dataclasses.replace(PARTS, head_dim=128),
    ),
    Mutant(
        "parts: dQ without the unit of K",
        "backward",
        "store_ds(parts, inverse) * key_unit_;",
        "store_ds(parts, inverse);",
        "numbers",
        PARTS,
    ),
    Mutant(
        "parts: dQ of another query head",
        "backward",
        "common::first_workspace_tile<Spec>(params, where_.batch, head)",
        "common::first_workspace_tile<Spec>(params, where_.batch, where_.head)",
        "numbers",
        PARTS_OF_GROUPS,
    ),
    Mutant(
        "parts: Q is released before dK is there",
        "backward",
        "                wgmma_wait<1>();\n                pin(product);\n                release_query();",
        "                release_query();\n                wgmma_wait<1>();\n                pin(product);",
        "race",
        PARTS_OF_GROUPS,
    ),
    # sm90, beyond head_dim 128: parts in pieces
    *(
        Mutant(f"pieces: {name}", operation, old, new, caught_by, PIECES)
        for operation, name, old, new, caught_by in (
            (
                "forward",
                "one may still be on its way",
                "        mbarrier_wait(ring_.full(position_.slot()), position_.parity());\n",
                "",
                "uninitialised",
            ),
            (
                "forward",
                "one is released before S is there",
                "            wgmma_wait<0>();\n            pin(chain);\n            release();",
                "            release();\n            wgmma_wait<0>();\n            pin(chain);",
                "race",
            ),
            (
                "forward",
                "the producer overtakes the readers",
                "        mbarrier_wait(ring_.empty(slot), position_.parity() ^ 1);\n",
                "",
                "race",
            ),
            (
                "forward",
                "the low parts of another panel",
                "(part * Layout::kPanels + panel)",
                "(part * Layout::kPanels + panel * (1 - part))",
                "numbers",
            ),
            (
                "forward",
                "S without the panels behind the first",
                "            if (panel > 0) add_rows(x, next, one);",
                "",
                "numbers",
            ),
            (
                "forward",
                "S from the last panel's on",
                "wgmma_scores_in_place(y, a, b, never);",
                "wgmma_scores_in_place(y, a, b, !never);",
                "numbers",
            ),
            (
                "forward",
                "a panel of O from the last one's on",
                "wgmma_output_in_place(y, a, b, never);",
                "wgmma_output_in_place(y, a, b, !never);",
                "numbers",
            ),
            ("forward", "V of keys that a group skips is kept", "        rings_.values().skip();\n", "", "deadlock"),
            (
                "backward_dq",
                "both warp groups begin with the same key tile",
                "keys.end - 1 - turn",
                "keys.end - 1",
                "deadlock",
            ),
            (
                "backward_dq",
                "dQ of one warp group",
                "for (int e = 0; e < 4; ++e) x[e] += other[e];",
                "for (int e = 0; e < 0; ++e) x[e] += other[e];",
                "numbers",
            ),
            (
                "backward_dq",
                "dQ goes where Q is still read",
                "        barrier_sync(kSharersBarrier, 2 * kGroupThreads);  // both",
                "        // both",
                "race",
            ),
            (
                "backward_dq",
                "dQ is read before it is there",
                "        barrier_sync(kSharersBarrier, 2 * kGroupThreads);\n",
                "",
                "race",
            ),
            (
                "backward_dq",
                "dP goes on from the last panel's",
                "            if (panel > 0) start_next(x);\n",
                "",
                "numbers",
            ),
            (
                "backward_dq",
                "Q is loaded over a dQ that is not fenced",
                "        async_proxy_fence();\n        __syncwarp();\n        release_queries();",
                "        __syncwarp();\n        release_queries();",
                "proxy",
            ),
            ("backward_dkdv", "the group of dV keeps the Q of dK", "            queries_.skip();\n", "", "deadlock"),
            (
                "backward_dkdv",
                "nobody waits for statistics",
                "        mbarrier_wait(memory_.full_statistics(statistics_.slot()), statistics_.parity());\n",
                "",
                "race",
            ),
            (
                "backward_dkdv",
                "delta is released before it is read",
                "            Base::take_gradients(scores, dp, delta, units.dp);\n            release_statistics();",
                "            release_statistics();\n            Base::take_gradients(scores, dp, delta, units.dp);",
                "race",
            ),
            (
                "backward_dkdv",
                "the first panel of K and V alone",
                "left + along_columns<kLeftPanel>(panel * kStepsOfPanel + s)",
                "left + along_columns<kLeftPanel>(s)",
                "numbers",
            ),
        )
    ),
    Mutant(
        "parts: dQ of rows that are not there",
        "convert_dq",
        "if (row >= rows.length || column >= Spec::kHeadDim) continue;",
        "if (column >= Spec::kHeadDim) continue;",
        "bounds",
        PARTS,
    ),
    Mutant(
        "parts: pairs of dQ at any address",
        "convert_dq",
        "const bool in_pairs = reinterpret_cast<uint64>(dq) % 8 == 0 && params.dq_strides.row % 2 == 0;",
        "const bool in_pairs = true;",
        "misaligned",
        dataclasses.replace(PARTS, head_dim=59),
    ),
)
