"""The forward on Hopper: barriers between producer and consumers, the stores of O, numbers."""

from __future__ import annotations

import dataclasses

from fa2cupy import TileConfig

from .mutant import Mutant
from .problems import HOPPER_PANELS, HOPPER_TILES, ONE_GROUP, Problem

OUTPUT_IN_PARTS = Problem(head_dim=200, lengths=(70, 70), hopper_tile=TileConfig(128, 64, 12, 2))
HOPPER_GROWING = Problem(lengths=(35, 320), causal=False, growing=True, hopper_tile=ONE_GROUP)
HOPPER_CAPPED = dataclasses.replace(HOPPER_TILES, feature="softcap")
HOPPER_PAIR = Problem(head_dim=40, lengths=(200, 150), hopper_tile=ONE_GROUP, head_dim_v=72)
#: A text of the forward, the head_dim of it that is exchanged for another, and what catches the change.
SWAPPED = (
    ("load_keys<Shape::kPanelsV / Shape::kParts>(params_.v", "kPanelsV", "kPanels", "uninitialised"),
    ("load_keys<Shape::kPanels / Shape::kParts>(params_.k", "kPanels", "kPanelsV", "race"),
    ("key(kStages) + stage * Shape::kValueBytes", "kValueBytes", "kKeyBytes", "race"),
    ("values_.slot() * (Shape::kValueBytes / 16)", "kValueBytes", "kKeyBytes", "race"),
    ("n < kDv / 8; ++n)", "kDv", "kD", "numbers"),
    ("min_of(first + kPanelsAtOnce, Shape::kPanelsV)", "kPanelsV", "kPanels", "unwritten"),
)

MUTANTS = (
    *(
        Mutant(
            f"the other head_dim on Hopper, {text}", "forward", text, text.replace(of, other), caught_by, HOPPER_PAIR
        )
        for text, of, other, caught_by in SWAPPED
    ),
    # sm90: the barriers between producer and consumers
    Mutant(
        "no wait for K",
        "forward",
        "mbarrier_wait(memory_.full_key(keys_.slot()), keys_.parity());\n        if constexpr (kTakeTurns)",
        "if constexpr (kTakeTurns)",
        "uninitialised",
        HOPPER_TILES,
    ),
    Mutant(
        "no wait for V",
        "forward",
        "mbarrier_wait(memory_.full_value(values_.slot()), values_.parity());\n        issue_output(p);\n        if",
        "issue_output(p);\n        if",
        "uninitialised",
        HOPPER_TILES,
    ),
    Mutant(
        "no wait for Q",
        "forward",
        "keys.end - 1);\n        mbarrier_wait(memory_.full_query(queries_.slot()), queries_.parity());\n",
        "keys.end - 1);\n",
        "race",
        HOPPER_TILES,
    ),
    Mutant(
        "K over one that is in use",
        "forward",
        "mbarrier_wait(memory_.empty_key(stage), keys_.parity() ^ 1);",
        "",
        "race",
        HOPPER_TILES,
    ),
    Mutant(
        "K handed back before its scores are there",
        "forward",
        "wgmma_wait<1>();\n        pin(scores_);\n        release_key();",
        "release_key();\n        wgmma_wait<1>();\n        pin(scores_);",
        "race",
        HOPPER_TILES,
    ),
    Mutant(
        "O used before it is there",
        "forward",
        "wgmma_wait<0>();\n        pin(output_);\n        release_value();",
        "pin(output_);\n        release_value();",
        "in flight",
        HOPPER_TILES,
    ),
    Mutant(
        "the last V never comes",
        "forward",
        "load_value(tile, last);\n            if",
        "if",
        "deadlock",
        HOPPER_TILES,
    ),
    Mutant(
        "half of Q is not waited for",
        "forward",
        "mbarrier_arrive_expect(full, (kSequences<Spec> + sizeof...(tangent)) * kBytes);",
        "mbarrier_arrive_expect(full, kBytes / 2);",
        "race",
        HOPPER_PANELS,
    ),
    Mutant(
        "a tile's slot is never handed back",
        "forward",
        "        }\n        if (lane_ == 0) mbarrier_arrive(tile.empty);",
        "        }",
        "deadlock",
        Problem(lengths=(1000, 40), hopper_tile=ONE_GROUP),
    ),
    # sm90: the stores of O
    Mutant(
        "no proxy fence before the store of O",
        "forward",
        "async_proxy_fence();\n            __syncwarp();",
        "__syncwarp();",
        "proxy",
        HOPPER_TILES,
    ),
    Mutant(
        "O's box rewritten while it is stored",
        "forward",
        "if (lane_ == 0) tma_store_wait_read();\n        __syncwarp();",
        "",
        "race",
        HOPPER_TILES,
    ),
    Mutant(
        "O with another swizzle",
        "forward",
        "(n % 8 + lane / 16) ^ (row * kRowBytes / 128 % (kRowBytes / 16));",
        "(n % 8 + lane / 16);",
        "numbers",
        HOPPER_TILES,
    ),
    Mutant("the counter is not reset", "forward", "params.tile_counter[0] = 0;", "", "counter", HOPPER_TILES),
    Mutant(
        "the counter is reset without an order",
        "forward",
        "atom.acq_rel.gpu.global",
        "atom.relaxed.gpu.global",
        "blocks",
        HOPPER_TILES,
    ),
    Mutant(
        "the last to leave does not acquire the others' draws",
        "forward",
        "atom.acq_rel.gpu.global",
        "atom.release.gpu.global",
        "blocks",
        HOPPER_TILES,
    ),
    # sm90: the numbers
    Mutant(
        "K and V of another head",
        "forward",
        "tile.head / params_.heads_per_group",
        "0",
        "numbers",
        Problem(heads=(4, 2), hopper_tile=ONE_GROUP),
    ),
    Mutant(
        "every warp takes the rows of the first",
        "forward",
        "tile.first_row() + row_group() * kGroupRows + warp_ * 16;",
        "tile.first_row() + row_group() * kGroupRows;",
        "unwritten",
        HOPPER_TILES,
    ),
    Mutant(
        "V's panels in one place",
        "forward",
        "Shape::kGroupValueBytes,\n                                                           Shape::kKeyPanelBytes)",
        "Shape::kGroupValueBytes, 0)",
        "numbers",
        HOPPER_PANELS,
    ),
    Mutant(
        "O not rescaled",
        "forward",
        "if (__builtin_expect(!kept, 0)) multiply_output(rescale);",
        "",
        "numbers",
        HOPPER_GROWING,
    ),
    Mutant(
        "key tiles without the mask",
        "forward",
        "const bool masked = kRightLimit && !kMasksApart && needs_mask(keys, block);",
        "const bool masked = false;",
        "numbers",
        HOPPER_TILES,
    ),
    Mutant(
        "P of the last of an odd number of steps is not taken over",
        "forward",
        "p = other_p;\n                        break;",
        "break;",
        "numbers",
        HOPPER_TILES,
    ),
    Mutant(
        "P of an odd step under a soft cap is not taken over",
        "forward",
        "p = other_p;\n                --block;",
        "--block;",
        "numbers",
        HOPPER_CAPPED,
    ),
    Mutant(
        "a key tile of the mask is left to the loop without, under a soft cap",
        "forward",
        "for (; block >= keys.full_end; --block) masked_step",
        "for (; block > keys.full_end; --block) masked_step",
        "numbers",
        HOPPER_CAPPED,
    ),
    Mutant(
        "a group passes over its own keys",
        "forward",
        "max_of(own.end - first, 1)",
        "max_of(own.end - first - 1, 1)",
        "numbers",
        Problem(lengths=(200, 260), hopper_tile=TileConfig(192, 64, 16, 3)),
    ),
    # Steps that each lane must take for itself, and work that must be finished at the end
    Mutant(
        "one lane's proxy fence before the store of O",
        "forward",
        "async_proxy_fence();\n            __syncwarp();",
        "if (lane_ == 0) async_proxy_fence();\n            __syncwarp();",
        "proxy",
        HOPPER_TILES,
    ),
    Mutant(
        "O is stored before the warp has met",
        "forward",
        "async_proxy_fence();\n            __syncwarp();",
        "async_proxy_fence();",
        "lanes",
        HOPPER_TILES,
    ),
    Mutant(
        "the second part of O over the first one",
        "forward",
        "if (first > 0) wait_for_box();",
        "",
        "race",
        OUTPUT_IN_PARTS,
    ),
    Mutant(
        "O's box is written before the warp has met",
        "forward",
        "if (lane_ == 0) tma_store_wait_read();\n        __syncwarp();",
        "if (lane_ == 0) tma_store_wait_read();",
        "race",
        HOPPER_TILES,
    ),
    Mutant("no wait for the last store of O", "forward", "if (lane_ == 0) tma_store_wait();", "", "ends", HOPPER_TILES),
    Mutant("mbarriers unknown to TMA", "forward", "        mbarrier_init_fence();\n", "", "init fence", HOPPER_TILES),
    Mutant(
        "no fence before the scores",
        "forward",
        "pin(scores_);\n        wgmma_fence();",
        "pin(scores_);",
        "wgmma fence",
        HOPPER_TILES,
    ),
)
