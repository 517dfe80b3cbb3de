"""Several blocks for a tile (num_splits): shares of the backward and of the forward, and their sums."""

from __future__ import annotations

import dataclasses

from support.simulated_problems import dominant

from fa2cupy import TileConfig

from .mutant import Mutant
from .problems import ONE_GROUP, Problem

SHARES = Problem(lengths=(37, 230), num_splits=3)
DOMINANT_SHARES = Problem(lengths=(37, 288), num_splits=3, batch=3, causal=False, scores=dominant)
HOPPER_SHARES = Problem(lengths=(37, 330), num_splits=3, hopper_tile=ONE_GROUP)
HOPPER_SHARES_AHEAD = Problem(lengths=(109, 139), rows_ahead=70, num_splits=3, hopper_tile=ONE_GROUP)
HOPPER_MANY_SHARES = Problem(lengths=(170, 200), num_splits=8, hopper_tile=ONE_GROUP)
HOPPER_SHARES_OF_GROUPS = Problem(lengths=(300, 330), num_splits=6, hopper_tile=TileConfig(192, 64, 16, 3))
SPLIT_48 = Problem(lengths=(40, 130), num_splits=2, tile=TileConfig(32, 48, 6, 2))
SPLIT = Problem(heads=(6, 2), num_splits=2)  # the second share begins in the middle of a head
HOPPER_SPLIT = Problem(heads=(3, 1), lengths=(390, 260), hopper_tile=TileConfig(128, 128, 12, 2), num_splits=2)
LARGEST = "shift[i] = maximum(shift[i], share_lse[s * between_shares + 8 * i]);"

MUTANTS = (
    # shares of key tiles
    Mutant(
        "a share that ends with the tile",
        "backward",
        "return {begin, min_of(begin + most, steps)};",
        "return {begin, steps};",
        "numbers",
        SPLIT,
    ),
    Mutant(
        "a share that begins with the head",
        "backward",
        "Spec::kSplit && head == first_step().head ? first_step().tile : tiles.begin",
        "tiles.begin",
        "deadlock",
        HOPPER_SPLIT,
    ),
    Mutant(
        "a share that ends with the head",
        "backward_dkdv",
        "return head == limits.end.head ? limits.end.tile : tiles.end;",
        "return tiles.end;",
        "deadlock",
        HOPPER_SPLIT,
    ),
    Mutant(
        "the workspace of dQ from the group's first step",
        "backward",
        "const QueryStep step = own_.at(own_.first_step());",
        "const QueryStep step = {own_.first_query_head, own_.tiles.begin};",
        "numbers",
        HOPPER_SPLIT,
    ),
    Mutant(
        "the masked query tiles of a share to the end of the range",
        "backward",
        "const int32 masked_end = Spec::kSplit ? min_of(own.tiles.full_begin, end) : own.tiles.full_begin;",
        "const int32 masked_end = own.tiles.full_begin;",
        "deadlock",
        HOPPER_SPLIT,
    ),
    Mutant(
        "shares with copies where they are added",
        "backward",
        "if constexpr (kAdds) copy /= params.num_splits;",
        "",
        "bounds",
        SPLIT,
    ),
    Mutant(
        "shares without a step that leave nothing",
        "backward_dkdv",
        "Shares::put_zeros(Shares::template of_block<Spec>(params, tile_index<Spec>()));",
        "",
        "uninitialised",
        dataclasses.replace(HOPPER_SPLIT, num_splits=16),
    ),
    Mutant(
        "dK in the place of dV",
        "backward",
        "Shares::template of_block<Spec>(params) + kProbability * Shares::Dk::kElements",
        "Shares::template of_block<Spec>(params)",
        "numbers",
        SPLIT,
    ),
    Mutant(
        "one share for all",
        "sum_dkdv",
        "copy < params.num_copies",
        "copy < 1",
        "numbers",
        SPLIT,
    ),
    Mutant(
        "rows of the next sixteen",
        "sum_dkdv",
        "if (row + 8 * i >= left) continue;",
        "",
        "bounds",
        SPLIT,
    ),
    Mutant(
        "rows of the next key tile",
        "sum_dkdv",
        "min_of(rows.length, Spec::kBc) - first_row",
        "rows.length - first_row",
        "blocks",
        SPLIT_48,
    ),
    Mutant(
        "key tiles of whole blocks of 32 rows",
        "sum_dkdv",
        "kRow32s = ceil_div(Spec::kBc, 32)",
        "kRow32s = Spec::kBc / 32",
        "bounds",
        SPLIT_48,
    ),
    Mutant(
        "dV without the scale of what dropout keeps",
        "sum_dkdv",
        "static_cast<float>(kept_scale<Spec>(params))",
        "1.0f",
        "numbers",
        dataclasses.replace(SPLIT, feature="dropout"),
    ),
    Mutant(
        "dK without the scale",
        "sum_dkdv",
        ": params.softmax_scale;\n\n        const int64 between_copies",
        ": 1.0f;\n\n        const int64 between_copies",
        "numbers",
        SPLIT,
    ),
    # Several blocks for a query tile
    Mutant(
        "all shares weigh the same",
        "merge_forward",
        "weight[i] = exp2_approx((share_lse[8 * i] - shift[i]) * static_cast<float>(kLog2e));",
        "weight[i] = 1.0f;",
        "numbers",
        SHARES,
    ),
    Mutant(
        "lse of the largest share alone",
        "merge_forward",
        "shift[i] + log(total[i])",
        "shift[i]",
        "numbers",
        SHARES,
    ),
    Mutant(
        "weights beside those of the first share",
        "merge_forward",
        LARGEST,
        "shift[i] = maximum(shift[i], share_lse[8 * i]);",
        "numbers",
        DOMINANT_SHARES,
    ),
    Mutant(
        "weights beside those of all shares but the last",
        "merge_forward",
        LARGEST,
        "if (s + 1 < params.num_splits) " + LARGEST,
        "numbers",
        DOMINANT_SHARES,
    ),
    Mutant(
        "a row that no share sees a key of",
        "merge_forward",
        "shift[i] = shift[i] == -infinity<float>() ? 0.0f : shift[i];",
        ";",
        "numbers",
        Problem(lengths=(94, 37), num_splits=2),
    ),
    Mutant(
        "a sink in every share",
        "forward",
        "if (Spec::kSplit && share > 0) return -infinity<Real>();",
        "",
        "numbers",
        Problem(lengths=(37, 230), num_splits=3, feature="sink"),
    ),
    *(
        Mutant(
            f"{name}: every share begins with the first key tile",
            "forward",
            "tiles.begin += steps.begin;",
            "",
            "numbers",
            problem,
        )
        for name, problem in (("sm80", SHARES), ("sm90", HOPPER_SHARES))
    ),
    Mutant(
        "sm80: shares one over the other",
        "forward",
        "(head * params.num_tiles + where.tile) * kTileElements",
        "where.tile * kTileElements",
        "blocks",
        SHARES,
    ),
    Mutant(
        "sm90: shares one over the other",
        "forward",
        "head * params.num_splits + share",
        "head * params.num_splits",
        "blocks",
        HOPPER_SHARES,
    ),
    Mutant(
        "shares of a sequence where those of another are",
        "forward",
        "tile += packed_axis<false>(params).template first_tile<Spec::kBr>(where.batch);",
        ";",
        "uninitialised",
        HOPPER_SHARES_AHEAD,
    ),
    Mutant(
        "sm80: columns of a pair's second warp over those of its first",
        "forward",
        "Shares::put(own, output[m], group_row / 16 + m, part * kPartChunks, lane);",
        "Shares::put(own, output[m], group_row / 16 + m, 0, lane);",
        "uninitialised",
        Problem(head_dim=160, lengths=(37, 130), num_splits=3),
    ),
    Mutant(
        "sm90: an empty share has no key tile",
        "forward",
        "max_of(keys.end, Spec::kSplit ? keys.begin + 1 : 1)",
        "max_of(keys.end, 1)",
        "deadlock",
        HOPPER_MANY_SHARES,
    ),
    Mutant(
        "sm90: masked by the positions of another share",
        "forward",
        "if constexpr (Spec::kSplit) block += tile.first_key_tile();\n            common::mask_scores",
        "common::mask_scores",
        "numbers",
        HOPPER_SHARES,
    ),
    Mutant(
        "sm90: a group goes on behind the share",
        "forward",
        "if constexpr (Spec::kSplit) skipped = max_of(skipped, 0);",
        "",
        "deadlock",
        HOPPER_SHARES_OF_GROUPS,
    ),
    Mutant(
        "sm90: a share's slot is never handed back",
        "forward",
        "__syncwarp();\n        if (lane_ == 0) mbarrier_arrive(tile.empty);",
        "",
        "deadlock",
        HOPPER_MANY_SHARES,
    ),
    Mutant(
        "sm90: a share of the tile before the next",
        "forward",
        "if (is_last) break;\n            tile = next;",
        "if (is_last) break;",
        "numbers",
        HOPPER_MANY_SHARES,
    ),
)
