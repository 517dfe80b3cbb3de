"""Gradients whose warp groups share their rows: what they hand over, rings of panels, rows that see no key."""

from __future__ import annotations

import functools

from fa2cupy import TileConfig

from .mutant import Mutant
from .problems import Problem, with_nan

DQ = Problem(head_dim=320, head_dim_v=264, heads=(1, 1), lengths=(70, 200), hopper_tile=TileConfig(64, 32, 12, 2))
DQ_WIDEST = Problem(head_dim=512, heads=(1, 1), lengths=(70, 200), hopper_tile=TileConfig(64, 32, 12, 2))
DKDV = Problem(head_dim=320, head_dim_v=264, heads=(1, 1), lengths=(200, 70), hopper_tile=TileConfig(32, 64, 12, 2))
DKDV_HIDDEN = Problem(
    head_dim=264,
    heads=(1, 1),
    lengths=(200, 70),
    scores=functools.partial(with_nan, rows=slice(0, 130)),
    hopper_tile=TileConfig(32, 64, 12, 2),
)
#: Name, operation, old text, new text, what catches it, problem.
CHANGES = (
    (
        "dS written over V that is in use",
        "backward_dq",
        "barrier_sync(Rows::kOwnBarrier + part_, kGroupThreads);",
        "",
        "race",
        DQ,
    ),
    (
        "V loaded over dS that is not fenced",
        "backward_dq",
        "if constexpr (Shape::kMovesExchange) async_proxy_fence();",
        "",
        "proxy",
        DQ,
    ),
    (
        "the panel with dS released by its writer",
        "backward_dq",
        "release_passing(kHalf, Shape::kPassingPanels - 1);",
        "release_passing(kHalf, Shape::kPassingPanels);",
        "deadlock",
        DQ_WIDEST,
    ),
    (
        "the panel with dS never released",
        "backward_dq",
        "if constexpr (Shape::kMovesExchange) own().release_exchange();",
        "",
        "deadlock",
        DQ,
    ),
    (
        "K is not waited for",
        "backward_dq",
        "mbarrier_wait(memory_.full_kept(stage, part), scored_.parity());",
        "",
        "uninitialised",
        DQ,
    ),
    (
        "both groups have the first columns of K",
        "backward_dq",
        "memory_.kept(stage, part_ * Shape::kOwnPanels)",
        "memory_.kept(stage)",
        "race",
        DQ,
    ),
    ("dO is not waited for", "backward_dq", "mbarrier_wait(memory_.full_second(), rows_.parity());", "", "race", DQ),
    (
        "V handed back before dP is there",
        "backward_dq",
        "wgmma_wait<0>();\n        pin(derivatives_);",
        "wgmma_wait<1>();\n        pin(derivatives_);",
        "in flight",
        DQ,
    ),
    ("the rows of the gradient's warps", "backward_dq", "row + 16 * own().warp_,", "row,", "unwritten", DQ),
    (
        "dK over what dV still reads",
        "backward_dkdv",
        "mbarrier_wait(of_dv.empty_rows(), 0);",
        "",
        "race",
        DKDV,
    ),
    (
        "dK over dV that TMA still reads",
        "backward_dkdv",
        "tma_store_wait_read();",
        "",
        "race",
        DKDV,
    ),
    (
        "statistics are not waited for",
        "backward_dkdv",
        "mbarrier_wait(memory_.full_statistics(scored_.slot()), scored_.parity());",
        "",
        "uninitialised",
        DKDV,
    ),
    (
        "rows that see no key are not cleared",
        "backward_dkdv",
        "hides |= is_valid && x.lse[i] == -common::infinity<float>();",
        "",
        "numbers",
        DKDV_HIDDEN,
    ),
    (
        "cleared rows are not fenced",
        "backward_dkdv",
        "async_proxy_fence();\n        __syncwarp();\n        if (lane_ == 0) mbarrier_arrive(full);",
        "__syncwarp();\n        if (lane_ == 0) mbarrier_arrive(full);",
        "proxy",
        DKDV_HIDDEN,
    ),
    (
        "a group visits the other's queries",
        "backward_dkdv",
        "if (part > 0) advance(step_, own_);",
        "",
        "numbers",
        DKDV,
    ),
)
MUTANTS = tuple(Mutant(*change) for change in CHANGES)
