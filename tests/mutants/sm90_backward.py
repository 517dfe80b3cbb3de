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

OF_KEYS = {"lengths": (150, 70), "heads": (1, 1), "hopper_tile": TileConfig(64, 128, 12, 2)}
OF_DIVIDED = {"lengths": (150, 70), "heads": (1, 1), "hopper_tile": TileConfig(64, 64, 12, 2)}
PAIR = Problem(head_dim=40, head_dim_v=72, **OF_KEYS)
PAIR_NARROW_V = Problem(head_dim=72, head_dim_v=40, **OF_KEYS)
PAIR_SHARES = Problem(head_dim=40, head_dim_v=72, num_splits=2, **OF_KEYS)
DIVIDED_PAIR = Problem(head_dim=8, head_dim_v=136, **OF_DIVIDED)
DIVIDED_NARROW_V = Problem(head_dim=136, head_dim_v=8, **OF_DIVIDED)
DIVIDED_HIDDEN = without_keys(head_dim=8, head_dim_v=136, **OF_DIVIDED)
DIVIDED_SHARES = Problem(head_dim=8, head_dim_v=136, num_splits=2, **OF_DIVIDED)
# A key tile has two blocks. Each owns every second step; in PAIRED_ONCE, the second block owns none.
PAIRED_TILE = TileConfig(64, 128, 12, 2)
PAIRED = Problem(head_dim=136, head_dim_v=8, lengths=(330, 150), heads=(1, 1), hopper_tile=PAIRED_TILE)
PAIRED_HEADS = Problem(head_dim=136, head_dim_v=8, lengths=(300, 200), heads=(2, 1), hopper_tile=PAIRED_TILE)
PAIRED_ONCE = Problem(head_dim=8, head_dim_v=136, lengths=(60, 120), heads=(1, 1), hopper_tile=PAIRED_TILE)
# The first tile of the second head has rows to clear, and is the third one in its stage.
PAIRED_CLEARS = Problem(head_dim=136, head_dim_v=8, lengths=(400, 250), heads=(2, 1), hopper_tile=PAIRED_TILE, seed=1)
PAIRED_SHARES = Problem(head_dim=136, head_dim_v=8, lengths=(330, 150), num_splits=2, hopper_tile=PAIRED_TILE)
#: A kernel, a text, the part of it that names the other head_dim instead, what catches the change, and the problem.
SWAPPED = (
    ("backward", "load_keys<Shape::kPanels, Shape::kBlocks>(maps_.k", "kPanels,", "kPanelsV,", "race", DIVIDED_PAIR),
    ("backward_dkdv", "load_keys<Shape::kPanelsV, 1>(maps_.v", "kPanelsV", "kPanels", "uninitialised", DIVIDED_PAIR),
    ("backward", "(barrier, kPanelsOf<kQ> *", "kPanelsOf<kQ>", "Shape::kPanels", "deadlock", DIVIDED_NARROW_V),
    ("backward_dkdv", "panel < kPanelsOf<kQ>;", "kPanelsOf<kQ>", "Shape::kPanels", "deadlock", DIVIDED_PAIR),
    ("backward", "kQ ? Shape::kPanels : Shape::kPanelsV", "kPanelsV", "kPanels", "uninitialised", DIVIDED_PAIR),
    ("backward", "i < kChunks * kPanelsOf<kLse>;", "kPanelsOf<kLse>", "Shape::kPanels", "numbers", DIVIDED_HIDDEN),
    (
        "backward",
        "return key() + Shape::kBlocks * Shape::kKeyBytes;",
        "kKeyBytes",
        "kValueBytes",
        "race",
        DIVIDED_NARROW_V,
    ),
    ("backward", "value() + Shape::kValueBytes", "kValueBytes", "kKeyBytes", "race", DIVIDED_PAIR),
    ("backward", "+ stage * Shape::kQueryBytes;", "kQueryBytes", "kDoutBytes", "race", DIVIDED_NARROW_V),
    ("backward_dkdv", "+ stage * Shape::kDoutBytes;", "kDoutBytes", "kQueryBytes", "race", DIVIDED_PAIR),
    ("backward", "kFromLse, kD, Shape", "kD", "kDv", "numbers", PAIR_NARROW_V),
    ("backward", "kFromDelta, kDv>(", "kDv", "kD", "numbers", PAIR),
    ("backward", "query_operand_ + query,", "+ query", "+ dout", "numbers", PAIR),
    ("backward", "dout_operand_ + dout,", "+ dout", "+ query", "numbers", PAIR),
    ("backward_dkdv", "dout_operand_ + dout + kQueryRows", "+ dout", "+ query", "numbers", PAIR),
    ("backward_dkdv", "query_operand_ + query + kQueryRows);\n            wgmma", "+ query", "+ dout", "numbers", PAIR),
    ("backward", "QuadFragment<kD / 8> dk_;", "kD", "kDv", "race", PAIR),
    ("backward", "QuadFragment<kDv / 8> dv_;", "kDv", "kD", "unwritten", PAIR),
    ("backward", "kColumns = kProbability ? Shape::kD :", "kD", "kDv", "numbers", DIVIDED_NARROW_V),
    ("backward", ": Shape::kDv;\n        Base::template issue", "kDv", "kD", "numbers", DIVIDED_PAIR),
    ("backward", "of_scores = kProbability ? query : dout", ": dout", ": query", "numbers", DIVIDED_PAIR),
    ("backward", "of_gradient = kProbability ? dout", "dout", "query", "numbers", DIVIDED_PAIR),
    ("backward_dkdv", "(kProbability ? Shape::kDv : Shape::kD) / 8", "kDv", "kD", "unwritten", DIVIDED_PAIR),
    ("backward_dkdv", "Shape::kDv : Shape::kD) / 8", ": Shape::kD)", ": Shape::kDv)", "unwritten", DIVIDED_NARROW_V),
    ("backward", "panel < ceil_div(kN8 * 8,", "kN8 * 8", "Shape::kD", "unwritten", DIVIDED_PAIR),
    ("backward", "using Workspace = DqWorkspace<kBr, kD>", "kD", "Shape::kDv", "bounds", DIVIDED_PAIR),
    ("backward", "column % Shape::kPanelColumns * 2", "column % Shape::kPanelColumns", "0", "numbers", PAIR),
    ("backward", "kIsDv * Shares::Dk::kElements", "Dk", "Dv", "bounds", DIVIDED_SHARES),
    ("backward_dkdv", "AccumulatorTile<Spec::kBc, 8 * kN8>", "8 * kN8", "kD", "uninitialised", PAIR_SHARES),
    ("backward_dkdv", "ShareWorkspace<Spec::kBc, kD, kDv, kDq>", "kD, kDv", "kDv, kD", "blocks", DIVIDED_SHARES),
)

#: Of a pair of blocks: what is broken, a text and what stands in its place, what catches it, and the problem.
PAIRED_MUTANTS = (
    ("both blocks have the same keys", "kKeysOfBlock<Spec>,\n", "0,\n", "blocks", PAIRED),
    ("each block has a tile of its own", "blockIdx.x / kBlocksOfTile<Spec>", "blockIdx.x", "bounds", PAIRED),
    (
        "the blocks do not wait for each other's barriers",
        "cluster_sync();\n        else",
        ";\n        else",
        "init",
        PAIRED,
    ),
    (
        "the other block's keys are one's own",
        "own_.first_key ^ block * Shape::kBc",
        "own_.first_key",
        "numbers",
        PAIRED,
    ),
    ("the other block's dS with one's own K", "s / (kBc / 16) * (Shape::kKeyBytes / 16)", "0", "numbers", PAIRED),
    ("dS is sent over the other block's", "ds(0) + Shape::kDsPanelBytes", "ds(0)", "race", PAIRED),
    (
        "dS is not waited for",
        "mbarrier_arrive_expect(full, Shape::kSentDsBytes)",
        "mbarrier_arrive(full)",
        "uninitialised",
        PAIRED,
    ),
    ("dS is sent without a fence", "async_proxy_fence();\n            if constexpr", "if constexpr", "proxy", PAIRED),
    (
        "dS is written before the last is sent",
        "mbarrier_wait(memory_.empty_ds(buffer), written_",
        "(void)(written_",
        "deadlock",
        PAIRED,
    ),
    (
        "the sender is not told",
        "mbarrier_arrive_there(in_block(rank_ ^ 1, memory_",
        "(void)(in_block(rank_ ^ 1, memory_",
        "deadlock",
        PAIRED,
    ),
    ("dQ of the other block's steps", "Shape::kPair && stages_.turn % 2 != Base::rank_;", "false;", "deadlock", PAIRED),
    (
        "steps of the other block are not walked",
        "if constexpr (Shape::kPair) Base::walk_to(step);",
        "",
        "bounds",
        PAIRED,
    ),
    (
        "no way back from the first tile",
        "tiles_to_walk_ = -tiles_ahead_of(own_.first_step());",
        "",
        "bounds",
        PAIRED_HEADS,
    ),
    ("the last dQ of the other block", "!Shape::kPair || !skips_dq_", "true", "deadlock", PAIRED),
    ("dV into V while it is read", "kWithDq && !(Shape::kPair && kProbability)", "kWithDq", "race", PAIRED_ONCE),
    ("dK into K while it is read", "Shape::kPair ? read_.previous().previous() : ", "", "race", PAIRED),
    (
        "a stage is loaded while the other block reads it",
        "== Shape::template kLoader<kQ> ? 2 : 1",
        "== 2 ? 2 : 1",
        "race",
        PAIRED,
    ),
    (
        "the loader is not told",
        "if (Shape::kMulticast && rank_ != kLoader && lane_ == 0)",
        "if (false)",
        "deadlock",
        PAIRED,
    ),
    (
        "a block sees a tile with rows to clear before the other one has released the tile that it replaces",
        """if (!clears || (Shape::kMulticast && !loads_for_both<kQ>())) return;
        mbarrier_arrive(full);
        if constexpr (Shape::kMulticast) mbarrier_arrive_there(in_block(1 - Shape::template kLoader<kQ>, full));""",
        "if (clears) mbarrier_arrive(full);",
        "race",
        PAIRED_CLEARS,
    ),
    ("a block loads for itself", "own_.queries.load_to(3,", "own_.queries.load_to(1,", "deadlock", PAIRED),
    ("shares of both blocks in one place", "row16 + rank_ * (kBc / 16)", "row16", "numbers", PAIRED_SHARES),
)

#: Two blocks of a multiprocessor take a tile's queries in two parts: what is broken, a text and what stands in its
#: place, what catches it, and the problem.
OF_PARTS = {"head_dim": 24, "hopper_tile": TileConfig(64, 128, 12, 2, 2)}
PARTS = Problem(lengths=(330, 150), **OF_PARTS)
PARTS_FROM_BIAS = Problem(feature="bias", lengths=(200, 152), causal=False, **OF_PARTS)
PARTS_HIDDEN = without_keys(lengths=(200, 150), causal=False, **OF_PARTS)
PARTS_MUTANTS = (
    ("the mask of the first part", "tile.position.first_query += part * kPartQueries;", "", "numbers", PARTS),
    ("dS of the second part over the first", "kPart * kPartQueries + lane_ % 8", "lane_ % 8", "uninitialised", PARTS),
    ("statistics of the first part", "statistic + part * kPartQueries *", "statistic + 0 *", "numbers", PARTS),
    ("queries of the first part", "kPart * Shape::kPartQueries * Shape::kPanelRowBytes / 16", "0", "numbers", PARTS),
    ("dS handed over after its first part", "if constexpr (kPart + 1 < Shape::kParts) return;", "", "deadlock", PARTS),
    ("dO handed back after the first part", "if constexpr (kIsLastPart) arrive(", "arrive(", "deadlock", PARTS),
    (
        "rows without a key of wide panels",
        "constexpr uint32 kChunks = Shape::kPanelRowBytes / 16;",
        "constexpr uint32 kChunks = 8;",
        "race",
        PARTS_HIDDEN,
    ),
    ("gradients of wide panels", "(row * kRowBytes / 128 % (kRowBytes / 16))", "(row & 7)", "race", PARTS),
)

PARTS_FROM_BIAS_MUTANTS = (
    ("the bias of the first part", "kPart * kPartQueries * Tile::kRowBytes", "0", "numbers", PARTS_FROM_BIAS),
    (
        "the bias handed back after the first part",
        "if constexpr (kPart + 1 == Shape::kParts) {",
        "if constexpr (true) {",
        "race",
        PARTS_FROM_BIAS,
    ),
)

MUTANTS = (
    *(
        Mutant(f"{who} on Hopper: {what}", operation, text, instead, caught_by, problem)
        for who, operation, table in (
            ("in parts", "backward", PARTS_MUTANTS),
            ("in parts", "backward_dkdv", PARTS_FROM_BIAS_MUTANTS),  # one pass with the gradient of a bias runs two
            ("a pair", "backward", PAIRED_MUTANTS),
        )
        for what, text, instead, caught_by, problem in table
    ),
    *(
        Mutant(
            f"the other head_dim on Hopper in {operation}, {text.partition(chr(10))[0]}",
            operation,
            text,
            text.replace(of, other),
            caught_by,
            problem,
        )
        for operation, text, of, other, caught_by, problem in SWAPPED
    ),
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
        "            if (lane == 0) load_queries<kLse>(stage, own, place, clears);\n",
        "if (lane == 0) load_queries<kLse>(stage, own, place, clears);\n"
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
        "if constexpr (kIsLastPart) arrive(memory_.empty_dout(stage));",
        "",
        "deadlock",
        HOPPER_ROWS,
    ),
    Mutant(
        "no proxy fence behind dS",
        "backward",
        "async_proxy_fence();\n            if constexpr (!Shape::kPair)",
        "if constexpr (!Shape::kPair)",
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
        "if constexpr (kPart == 0) mbarrier_wait(memory_.empty_ds(buffer), written_.parity() ^ 1);",
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
        Problem(head_dim=160, lengths=(310, 100), hopper_tile=TileConfig(48, 64, 12, 3), seed=3),
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
        "x[i] = kLse && x[i] == -common::infinity<float>() ? x[i] : times<kLse>(x[i], factor);",
        "x[i] = times<kLse>(x[i], factor);",
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
        "step.tile == own_.tiles.begin ? query_tiles() - own_.tiles.end + own_.tiles.begin + 1 : 1",
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
        "Shape::kDqByRows ? 0 : kGroup * Shape::kFirstDqColumns",
        "0",
        "numbers",
        HOPPER_COLUMNS,
    ),
    Mutant(
        "divided: both groups add the same columns",
        "backward",
        "kProbability ? Shape::kFirstDqColumns : 0,",
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
