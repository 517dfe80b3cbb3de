"""The backward on Hopper by key tiles, both methods: barriers, numbers, the conversion of dQ."""

from __future__ import annotations

from fa2cupy import TileConfig

from .mutant import Mutant
from .problems import HOPPER_COLUMNS, HOPPER_TRANSPOSED, Problem, without_keys

# Like HOPPER_COLUMNS and HOPPER_TRANSPOSED, these are ragged and long enough that every buffer is used again. In ROWS
# each group has its own keys, and dQ is by rows. In DIVIDED the groups are divided between dK and dV.
HOPPER_ROWS = Problem(lengths=(600, 150), causal=False, hopper_tile=TileConfig(128, 128, 12, 2))
HOPPER_DIVIDED = Problem(head_dim=256, lengths=(310, 100), hopper_tile=TileConfig(64, 64, 12, 2))
HOPPER_WITHOUT_KEYS = without_keys(lengths=(200, 150), causal=False, hopper_tile=TileConfig(128, 128, 12, 2))

MUTANTS = (
    # sm90: the backward's barriers
    Mutant(
        "no wait for Q, backward",
        "backward",
        "mbarrier_wait(memory_.full_query(stage), parity);\n        Base::template start_scores",
        "Base::template start_scores",
        "proxy",
        HOPPER_ROWS,
    ),
    Mutant(
        "no wait for dO",
        "backward_dkdv",
        "mbarrier_wait(memory_.full_dout(stage), parity);\n        Base::template start_scores",
        "Base::template start_scores",
        "uninitialised",
        HOPPER_TRANSPOSED,
    ),
    Mutant(
        "next query tile into the stage in use",
        "backward",
        "mbarrier_wait(kLse ? memory_.empty_query(stage) : memory_.empty_dout(stage), ring.parity() ^ 1);\n"
        "            if (lane == 0) load_queries<kLse>(stage, own, clears);\n",
        "if (lane == 0) load_queries<kLse>(stage, own, clears);\n"
        "            "
        "mbarrier_wait(kLse ? memory_.empty_query(stage) : memory_.empty_dout(stage), ring.parity() ^ 1);\n",
        "race",
        HOPPER_TRANSPOSED,
    ),
    Mutant(
        "next lse into the stage in use",
        "backward",
        "mbarrier_wait(kLse ? memory_.empty_query(stage) : memory_.empty_dout(stage), ring.parity() ^ 1);",
        "",
        "race",
        HOPPER_ROWS,
    ),
    Mutant(
        "dO is never handed back",
        "backward_dkdv",
        "pin(dv_);\n            arrive(memory_.empty_dout(stage));\n        }\n        wgmma_wait<0>();",
        "pin(dv_);\n        }\n        wgmma_wait<0>();",
        "deadlock",
        HOPPER_ROWS,
    ),
    Mutant(
        "no proxy fence behind dS",
        "backward",
        "async_proxy_fence();\n            mbarrier_arrive(memory_.full_ds(ring.slot()));",
        "mbarrier_arrive(memory_.full_ds(ring.slot()));",
        "proxy",
        HOPPER_COLUMNS,
    ),
    Mutant(
        "no wait for the other group's dS",
        "backward",
        "mbarrier_wait(memory_.full_ds(buffer), read_.parity());",
        "",
        "race",
        HOPPER_TRANSPOSED,
    ),
    Mutant(
        "dS rewritten while the other group multiplies it",
        "backward",
        "mbarrier_wait(memory_.empty_ds(buffer), written_.parity() ^ 1);",
        "",
        "race",
        HOPPER_COLUMNS,
    ),
    Mutant(
        "dQ added up before it is there",
        "backward",
        "wgmma_wait<1>();\n                pin(dq);\n                add_dq(dq, step);",
        "add_dq(dq, step);",
        "in flight",
        HOPPER_ROWS,
    ),
    Mutant(
        "gradients into K while it is read",
        "backward",
        "if constexpr (kWithDq)\n            Base::wait_for_last_dq();\n        else\n",
        "if constexpr (!kWithDq)\n",
        "race",
        HOPPER_TRANSPOSED,
    ),
    Mutant(
        "divided: no wait for P",
        "backward",
        "mbarrier_wait(memory_.full_p(exchanged_.slot()), exchanged_.parity());",
        "",
        "race",
        HOPPER_DIVIDED,
    ),
    Mutant(
        "divided: P rewritten before it is read",
        "backward_dkdv",
        "mbarrier_wait(memory_.empty_p(exchanged_.slot()), exchanged_.parity() ^ 1);",
        "",
        "race",
        # Caught only with more stages than buffers: a stage is not filled again before its P is read.
        Problem(head_dim=160, lengths=(310, 100), hopper_tile=TileConfig(48, 64, 12, 3)),
    ),
    Mutant(
        "divided: dV into V while it is read",
        "backward",
        "Base::wait_for_last_dq();\n        } else if",
        "} else if",
        "race",
        HOPPER_DIVIDED,
    ),
    # In HOPPER_COLUMNS, a tile has queries without a key.
    Mutant(
        "rows without a key cleared before they are there",
        "backward",
        "mbarrier_wait(landed<kLse>(), landed_parity);",
        "",
        "race",
        HOPPER_COLUMNS,
    ),
    Mutant(
        "no proxy fence behind the rows without a key",
        "backward_dkdv",
        "        async_proxy_fence();\n    }\n    // True if a query's first statistic",
        "    }\n    // True if a query's first statistic",
        "proxy",
        HOPPER_COLUMNS,
    ),
    Mutant(
        "rows of dO cleared by the lse of another tile",
        "backward",
        "if constexpr (!kLse) mbarrier_wait(memory_.full_query(stage), ring.parity());",
        "",
        "race",
        HOPPER_COLUMNS,
    ),
    # sm90: the backward's numbers
    Mutant(
        "lse in plain order",
        "backward_dkdv",
        "lane / 4 * 16 + lane % 4 * 2 + i / 2 * 8 + i % 2;",
        "4 * lane + i;",
        "numbers",
        HOPPER_TRANSPOSED,
    ),
    Mutant(
        "lse of 8 bits",
        "backward",
        "float mid = split(x), low = split(mid);",
        "split(x); float mid = 0.0f, low = 0.0f;",
        "numbers",
        HOPPER_TRANSPOSED,
    ),
    Mutant(
        "no proxy fence behind lse and delta",
        "backward",
        "x[i]);\n                async_proxy_fence();",
        "x[i]);",
        "proxy",
        HOPPER_TRANSPOSED,
    ),
    Mutant(
        "a row without a key is not known by its statistic",
        "backward_dkdv",
        "x[i] = kLse && x[i] == -common::infinity<float>() ? x[i] : x[i] * factor;",
        "x[i] = x[i] * factor;",
        "numbers",
        HOPPER_WITHOUT_KEYS,
    ),
    Mutant(
        "tiles without the mask",
        "backward_dkdv",
        "group.template step<true>",
        "group.template step<false>",
        "numbers",
        HOPPER_TRANSPOSED,
    ),
    Mutant(
        "dS with another swizzle",
        "backward",
        "chunk = (warp_ * 2 + lane_ / 8 % 2) ^ (lane_ % 8);",
        "chunk = warp_ * 2 + lane_ / 8 % 2;",
        "numbers",
        HOPPER_COLUMNS,
    ),
    Mutant(
        "dQ of all tiles to the first",
        "backward",
        "workspace_ += static_cast<int64>(tiles_to_walk_) * Workspace::kTileElements;",
        "",
        "numbers",
        HOPPER_ROWS,
    ),
    Mutant(
        "dQ of a head's first tile to one that sees none of the keys",
        "backward",
        "next.tile == own_.tiles.begin ? query_tiles() - own_.tiles.end + own_.tiles.begin + 1 : 1",
        "1",
        "numbers",
        Problem(lengths=(300, 300), heads=(4, 2), hopper_tile=TileConfig(128, 128, 12, 2)),
    ),
    Mutant(
        "dK without the scale", "backward", "(dk_, params_.softmax_scale,", "(dk_, 1.0f,", "numbers", HOPPER_COLUMNS
    ),
    Mutant(
        "query heads of another group",
        "backward",
        "where.head * params.heads_per_group,\n",
        "where.head,\n",
        "numbers",
        Problem(heads=(4, 2), hopper_tile=TileConfig(128, 128, 12, 2)),
    ),
    Mutant(
        "K's panels in one place, for dQ",
        "backward",
        "(Shape::kDqByRows ? 0 : kGroup) * Shape::kKeyPanelBytes",
        "0 * Shape::kKeyPanelBytes",
        "numbers",
        HOPPER_COLUMNS,
    ),
    Mutant(
        "divided: both groups add the same columns",
        "backward",
        "kProbability ? 2 : 0,",
        "0,",
        "numbers",
        HOPPER_DIVIDED,
    ),
    Mutant(
        "dQ's workspace read as if it were not transposed",
        "convert_dq",
        "packed(x[2 * g].item[2 * i + j], x[2 * g + 1].item[2 * i + j])",
        "packed(x[2 * g].item[2 * j + i], x[2 * g + 1].item[2 * j + i])",
        "numbers",
        HOPPER_TRANSPOSED,
    ),
)
