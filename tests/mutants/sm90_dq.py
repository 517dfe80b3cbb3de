"""dQ by query tiles on Hopper, two_pass's first kernel."""

from __future__ import annotations

from fa2cupy import TileConfig

from .mutant import Mutant
from .problems import HOPPER_PANELS, HOPPER_TILES, ONE_GROUP, Problem, without_keys

HOPPER_MASKED_ROWS = Problem(lengths=(200, 70), hopper_tile=ONE_GROUP)
HOPPER_SKIPPING = Problem(lengths=(300, 330), hopper_tile=TileConfig(192, 64, 16, 3))
HOPPER_ONE_WAY_OUT = Problem(head_dim=256, lengths=(200, 90), hopper_tile=TileConfig(128, 48, 12, 2))  # dQ through dO
HOPPER_PAIR = Problem(head_dim=40, lengths=(200, 150), hopper_tile=ONE_GROUP, head_dim_v=72)
HOPPER_NARROW_V = Problem(head_dim=72, lengths=(200, 150), hopper_tile=ONE_GROUP, head_dim_v=40)
HOPPER_PAIR_WITHOUT_KEYS = without_keys(head_dim=40, lengths=(330, 60), hopper_tile=ONE_GROUP, head_dim_v=72)
HOPPER_PAIR_IN_STEPS = Problem(  # dQ through dO
    head_dim=128, lengths=(260, 200), causal=False, hopper_tile=TileConfig(64, 80, 8, 3, 2), head_dim_v=64
)
#: A text of the kernel, the head_dim of it that is exchanged for another, what catches the change, and where.
SWAPPED = (
    ("load_rows<Shape::kPanels>(params_.q, smem, full, tile);", "kPanels", "kPanelsV", "race", HOPPER_PAIR),
    (
        "load_rows<Shape::kPanelsV>(params_.dout, smem, full, tile);",
        "kPanelsV",
        "kPanels",
        "uninitialised",
        HOPPER_PAIR,
    ),
    ("load_keys<Shape::kPanels / Shape::kParts>(params_.k", "kPanels", "kPanelsV", "race", HOPPER_PAIR),
    ("load_keys<Shape::kPanelsV / Shape::kParts>(params_.v", "kPanelsV", "kPanels", "uninitialised", HOPPER_PAIR),
    ("return base + buffer * Shape::kQueryBytes", "kQueryBytes", "kDoutBytes", "race", HOPPER_NARROW_V),
    ("kQueryBuffers) + buffer * Shape::kDoutBytes", "kDoutBytes", "kQueryBytes", "race", HOPPER_PAIR),
    ("+ stage * Shape::kKeyBytes", "kKeyBytes", "kValueBytes", "race", HOPPER_NARROW_V),
    ("key(kStages) + stage * Shape::kValueBytes", "kValueBytes", "kKeyBytes", "race", HOPPER_PAIR),
    ("multiply_rows<kD>(scores_", "kD", "Shape::kDv", "uninitialised", HOPPER_PAIR),
    ("multiply_rows<Shape::kDv>(dp_", "Shape::kDv", "kD", "numbers", HOPPER_PAIR),
    ("8 * max_of(kQueryPanels, kDoutPanels)", "kDoutPanels", "0", "numbers", HOPPER_PAIR_WITHOUT_KEYS),
    ("if (chunk < 8 * kQueryPanels) ", "kQueryPanels", "kDoutPanels", "race", HOPPER_PAIR_WITHOUT_KEYS),
    ("if (chunk < 8 * kDoutPanels)", "kDoutPanels", "kQueryPanels", "numbers", HOPPER_PAIR_WITHOUT_KEYS),
    ("n < kD / 8; ++n)", "kD", "Shape::kDv", "numbers", HOPPER_PAIR_IN_STEPS),
    ("kOutputPanels : Shape::kPanelsV;", "kPanelsV", "kPanels", "race", HOPPER_PAIR_IN_STEPS),
    ("if constexpr (kEnd < Shape::kPanels)", "kPanels", "kPanelsV", "unwritten", HOPPER_PAIR_IN_STEPS),
)

MUTANTS = (
    *(
        Mutant(f"dQ: the other head_dim, {text}", "backward_dq", text, text.replace(of, other), caught_by, problem)
        for text, of, other, caught_by, problem in SWAPPED
    ),
    Mutant(
        "dQ: a panel over one that is being stored",
        "backward_dq",
        "wait_for_box();\n            store_panels",
        "store_panels",
        "race",
        HOPPER_PAIR_IN_STEPS,
    ),
    # sm90: dQ
    Mutant(
        "dQ: no wait for Q",
        "backward_dq",
        "mbarrier_wait(memory_.full_query(queries_.slot()), queries_.parity());",
        "",
        "race",
        HOPPER_TILES,
    ),
    Mutant(
        "dQ: no wait for dO",
        "backward_dq",
        "mbarrier_wait(memory_.full_dout(queries_.slot()), queries_.parity());\n        issue_dp();",
        "issue_dp();",
        "race",
        Problem(lengths=(150, 200), hopper_tile=ONE_GROUP),  # with more queries, rows without a key wait for dO, too
    ),
    Mutant(
        "dQ: no wait for V",
        "backward_dq",
        "mbarrier_wait(memory_.full_value(values_.slot()), values_.parity());\n        multiply_rows",
        "multiply_rows",
        "race",
        HOPPER_TILES,
    ),
    Mutant(
        "dQ: rows without a key cleared while others' products read them",
        "backward_dq",
        "async_proxy_fence();\n        barrier_sync(Tiles::kOutputBarrier + group_, kGroupThreads);",
        "async_proxy_fence();",
        "race",
        HOPPER_MASKED_ROWS,
    ),
    Mutant(
        "dQ: no proxy fence behind the rows without a key",
        "backward_dq",
        "async_proxy_fence();\n        barrier_sync(Tiles::kOutputBarrier",
        "barrier_sync(Tiles::kOutputBarrier",
        "proxy",
        HOPPER_MASKED_ROWS,
    ),
    Mutant(
        "dQ: Q over one that is in use",
        "backward_dq",
        "mbarrier_wait(memory_.empty_query(queries_.slot()), queries_.parity() ^ 1);",
        "",
        "race",
        Problem(lengths=(1000, 40), hopper_tile=ONE_GROUP),
    ),
    Mutant(
        "dQ: as many stages of V as of K",
        "backward_dq",
        "RingPosition<Shape::kValueStages> values_;\n    RingPosition<kTileSlots> tiles_;\n\n  private:",
        "RingPosition<Shape::kStages> values_;\n    RingPosition<kTileSlots> tiles_;\n\n  private:",
        "race",
        HOPPER_SKIPPING,
    ),
    Mutant(
        "dQ: K handed back before dQ is there",
        "backward_dq",
        "wgmma_wait<kPending>();\n        pin(dq_);\n        pin(ds_);\n        release_key();",
        "release_key();\n        wgmma_wait<kPending>();\n        pin(dq_);\n        pin(ds_);",
        "race",
        HOPPER_TILES,
    ),
    Mutant(
        "dQ: the K of the next scores",
        "backward_dq",
        "memory_.key(keys_.slot()), Shape::kKeyPanelBytes)",
        "memory_.key(keys_.next().slot()), Shape::kKeyPanelBytes)",
        "race",
        HOPPER_TILES,
    ),
    Mutant(
        "dQ: dP used before it is there",
        "backward_dq",
        "wgmma_wait<0>();\n        pin(dp_);",
        "pin(dp_);",
        "in flight",
        HOPPER_TILES,
    ),
    Mutant(
        "dQ: V of what is passed over is kept",
        "backward_dq",
        "values_.parity());\n                release_value();",
        "values_.parity());\n                values_.advance();",
        "deadlock",
        HOPPER_SKIPPING,
    ),
    Mutant(
        "dQ: the group's other warps still read dO",
        "backward_dq",
        "barrier_sync(kOutputBarrier + group_, kGroupThreads);",
        "",
        "race",
        HOPPER_ONE_WAY_OUT,
    ),
    Mutant(
        "dQ: dO handed back before dQ has left through it",
        "backward_dq",
        "tma_store_wait_read();\n                mbarrier_arrive(memory_.empty_dout",
        "mbarrier_arrive(memory_.empty_dout",
        "race",
        HOPPER_ONE_WAY_OUT,
    ),
    Mutant(
        "dQ: no proxy fence before the store",
        "backward_dq",
        "async_proxy_fence();\n        __syncwarp();",
        "__syncwarp();",
        "proxy",
        HOPPER_TILES,
    ),
    Mutant(
        "dQ: rows without a key",
        "backward_dq",
        "has_none ? natural :",
        "false ? natural :",
        "numbers",
        HOPPER_MASKED_ROWS,
    ),
    Mutant(
        "dQ: lse past the end",
        "backward_dq",
        "const float natural = row < rows ? lse[row]",
        "const float natural = true ? lse[row]",
        "bounds",
        HOPPER_TILES,
    ),
    Mutant(
        "dQ: delta of one row for both",
        "backward_dq",
        "(p, dp, -minus_delta_[i], params_);",
        "(p, dp, -minus_delta_[0], params_);",
        "numbers",
        HOPPER_TILES,
    ),
    Mutant(
        "dQ: no scale", "backward_dq", "own().dq_.value[n][e] *= params_.softmax_scale;", ";", "numbers", HOPPER_TILES
    ),
    Mutant(
        "dQ: the panels of K in one place",
        "backward_dq",
        "memory_.key(keys_.slot()), Shape::kKeyPanelBytes)",
        "memory_.key(keys_.slot()), 0)",
        "numbers",
        HOPPER_PANELS,
    ),
)
