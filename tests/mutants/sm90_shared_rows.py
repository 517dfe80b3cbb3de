"""The forward whose warp groups share their rows: what they hand over, parts of V, clusters."""

from __future__ import annotations

from fa2cupy import TileConfig

from .mutant import Mutant
from .problems import Problem

BLOCK = Problem(head_dim=320, head_dim_v=264, heads=(1, 1), lengths=(70, 200), hopper_tile=TileConfig(64, 48, 12, 2))
CLUSTER = Problem(head_dim=320, heads=(1, 1), lengths=(260, 300), hopper_tile=TileConfig(128, 64, 12, 2))
GROWING = Problem(
    head_dim=264,
    heads=(1, 1),
    lengths=(35, 320),
    causal=False,
    growing=True,
    hopper_tile=TileConfig(64, 48, 12, 2),
)
#: Name, old text, new text, what catches it, problem.
CHANGES = (
    ("no wait for the other group's P", "mbarrier_wait(barrier_, (turn_ + t) % 2);", "", "uninitialised", BLOCK),
    (
        "the groups do not take turns across the ends of rows",
        "turn_ += tiles;",
        "turn_ += round_up(tiles, 2);",
        "race",
        CLUSTER,
    ),
    (
        "O not rescaled by the other group's shift",
        "if (!__all_sync(common::kFullWarp, kept)) multiply_output(rescale);",
        "",
        "numbers",
        GROWING,
    ),
    (
        "O not rescaled by the own shift",
        "if (__builtin_expect(!kept, 0)) multiply_output(rescale);",
        "",
        "numbers",
        GROWING,
    ),
    (
        "row sums stay in their group",
        "own().softmax_.sum[i] = load_shared<float>(sum_address(i));",
        "",
        "numbers",
        BLOCK,
    ),
    (
        "K handed back before its scores are there",
        "wgmma_wait<kHasOther ? 1 : 0>();",
        "wgmma_wait<kHasOther ? 2 : 1>();",
        "race",
        BLOCK,
    ),
    (
        "K is not waited for",
        "mbarrier_wait(memory_.full_key(keys_.slot()), keys_.parity());",
        "",
        "race",
        BLOCK,
    ),
    (
        "both groups have the first columns of V",
        "memory_.value(stage) + part_ * Shape::kOwnPanels * Shape::kKeyPanelBytes",
        "memory_.value(stage)",
        "race",
        BLOCK,
    ),
    (
        "O over Q that is in use",
        "barrier_sync(kStoreBarrier, 2 * kGroupThreads);",
        "",
        "race",
        BLOCK,
    ),
    (
        "K over one that the other block reads",
        "if constexpr (Shape::kCluster > 1) mbarrier_arrive_there(in_block(rank_in_cluster() ^ 1, empty));",
        "if constexpr (Shape::kCluster > 1) mbarrier_arrive(empty);",
        "race",
        CLUSTER,
    ),
    (
        "each block loads all panels for both",
        "else if (rank_in_cluster() == panel % Shape::kCluster)",
        "else",
        "race",
        CLUSTER,
    ),
    (
        "both blocks have the first rows",
        "rank_in_cluster() * (Spec::kBr / Spec::kCluster)",
        "0",
        "numbers",
        CLUSTER,
    ),
)
MUTANTS = tuple(Mutant(name, "forward", old, new, caught_by, on) for name, old, new, caught_by, on in CHANGES)
