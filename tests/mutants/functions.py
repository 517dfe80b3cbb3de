"""The caller's functions: their derivatives, sums of gradients, and dropout after them."""

from __future__ import annotations

import dataclasses

from fa2cupy import TileConfig

from .mutant import Mutant
from .problems import Problem

FUNCTIONS = {
    name: Problem(function=name, head_dim=40, lengths=(40, 70))
    for name in ("bounded", "alibi", "t5_relative", "t5 of a decoder", "relative", "document")
}
IEEE_FUNCTIONS = {name: dataclasses.replace(problem, dtype="float32") for name, problem in FUNCTIONS.items()}
DROPPED_FUNCTION = dataclasses.replace(FUNCTIONS["bounded"], feature="dropout")

MUTANTS = (
    *(
        Mutant(f"{family} functions: {name}", operation, old, new, "numbers", problems[function])
        for family, problems in (("sm80", FUNCTIONS), ("simt", IEEE_FUNCTIONS))
        for name, operation, function, old, new in (
            ("the derivative is 1", "backward_dq", "bounded", "slope = t6;", "slope = 1;"),
            (
                "the derivative lacks an inner factor",
                "backward_dkdv",
                "bounded",
                "slope = t6;",
                "slope = Real(0.8) * t4;",
            ),
            ("the derivative of tanh is 1 - tanh", "backward_dkdv", "bounded", "t3 = t2 * t2", "t3 = t2"),
            (
                "another head's slope",
                "forward",
                "alibi",
                "score_head_terms<Real>(score_args_of(params), batch, head)",
                "score_head_terms<Real>(score_args_of(params), batch, 0)",
            ),
            (
                "the gradient of an argument has the other sign",
                "backward_dq",
                "alibi",
                "sum0 += gradient * t4",
                "sum0 += gradient * t3",
            ),
            ("the gradient of another head's slope", "backward_dq", "alibi", "sum0, lane, h)", "sum0, lane, 0)"),
            ("the gradient of a slope is that of one lane", "backward_dq", "alibi", "x = row_sum<32>(x);", ""),
            (
                "all lanes add the sum of a warp",
                "backward_dq",
                "alibi",
                "(lane == 0) atomicAdd(sums",
                "(true) atomicAdd(sums",
            ),
            ("a lane's sums are not new", "backward_dq", "alibi", "Real sum0 = 0;", "Real sum0 = 1;"),
            (
                "the gradient of a table in another bucket",
                "backward_dq",
                "t5_relative",
                "tile.batch, tile.head, at.query, at.key, gradient, sums);",
                "tile.batch, tile.head, at.query, at.key + 1, gradient, sums);",
            ),
            (
                "a run begins with the sum of the one before",
                "backward_dq",
                "t5_relative",
                "element = next;\n        sum = 0;",
                "element = next;",
            ),
            (
                "a run is lost when another begins",
                "backward_dq",
                "t5_relative",
                "if (element) atomicAdd(element, sum);",
                "",
            ),
            (
                "the last runs of a warp are taken for those of one element",
                "backward_dq",
                "t5_relative",
                "!element || reinterpret_cast<uint64>(element) == of_first",
                "true",
            ),
            (
                "the last run of a warp is that of one lane",
                "backward_dq",
                "t5 of a decoder",
                "const Real of_warp = row_sum<32>(sum);",
                "const Real of_warp = sum;",
            ),
            (
                "all lanes add the last run of a warp",
                "backward_dq",
                "t5 of a decoder",
                "if (lane == first) atomicAdd",
                "if (element) atomicAdd",
            ),
            (
                "a run is taken for one of a whole tile",
                "backward_dq",
                "t5_relative",
                "is_of_tile = __all_sync(kFullWarp, is_same);",
                "is_of_tile = true;",
            ),
            (
                "a run of a whole tile lacks the tile's last distances",
                "backward_dq",
                "t5_relative",
                "kWarpRows + kWarpCols - 1, lane",
                "kWarpCols - kWarpRows, lane",
            ),
            (
                "a run of a whole tile begins before the tile",
                "backward_dq",
                "t5 of a decoder",
                "first_query - first_key - (kWarpCols - 1)",
                "first_query - first_key - 2 * kWarpCols",
            ),
            (
                "no dQ beside the gradients of arguments",
                "backward_dq",
                "t5_relative",
                "ds(i, j) = gradient * slope;",
                "ds(i, j) = 0;",
            ),
            (
                "visible keys from the next one on",
                "forward",
                "document",
                "first.query + queries, first.key + keys))",
                "first.query + queries, first.key + keys + 1))",
            ),
            (
                "hidden keys in the backward",
                "backward_dkdv",
                "document",
                "first.query + queries, first.key + keys))",
                "first.query + queries, first.key + keys) && false)",
            ),
        )
    ),
    *(
        Mutant(f"sm80 functions: {name}", operation, old, new, "numbers", FUNCTIONS["relative"])
        for name, operation, old, new in (
            ("the distance of a row below", "forward", "first_(15 - lane_ / 4", "first_(14 - lane_ / 4"),
            ("the distance of the first column", "forward", "+ lane_ % 4 * 2)", ")"),
            ("terms of the lane's last distance", "forward", "lane_ < begin ? own_", "false ? own_"),
            ("terms of the distance before", "backward", "before_[j % 2] = pair.row[0];", ""),
            ("q - k in the place of k - q", "forward", "kTransposed ? further : -further", "further"),
            ("k - q in the place of q - k", "backward_dkdv", "kTransposed ? further : -further", "-further"),
            ("terms of the other row", "backward_dq", "of_distance[n8 % 2].row[i]", "of_distance[n8 % 2].row[1 - i]"),
            ("terms of the other columns", "backward", "of_distance[n8 % 2].row[i]", "of_distance[0].row[i]"),
        )
    ),
    Mutant(
        "sm90 functions: one that scales is taken for one that adds",
        "backward",
        "(!Spec::kScoreMod || (score_args_arrays::kShifts && !Spec::kAlibi))",
        "true",
        "numbers",
        dataclasses.replace(FUNCTIONS["bounded"], hopper_tile=TileConfig(128, 128, 12, 2)),
    ),
    Mutant(
        "sm90 functions: the head of the tile before",
        "forward",
        "static_cast<Terms&>(*this) = common::head_terms<Spec>(params_, Base::batch(tile), tile.head());",
        "static_cast<Terms&>(*this) = common::head_terms<Spec>(params_, Base::batch(tile), 0);",
        "numbers",
        dataclasses.replace(FUNCTIONS["alibi"], hopper_tile=TileConfig(64, 64, 8, 2, 2)),
    ),
    Mutant(
        "sm80 functions: dropout drawn for the other column",
        "backward_dkdv",
        "dropout.keeps(draws.item[word], e)",
        "dropout.keeps(draws.item[word], 1 - e)",
        "numbers",
        DROPPED_FUNCTION,
    ),
    Mutant(
        "sm80 functions: dropout marks nothing",
        "backward_dq",
        "with_lowest_bit(weight, !keep)",
        "with_lowest_bit(weight, false)",
        "numbers",
        DROPPED_FUNCTION,
    ),
    Mutant(
        "sm90 functions: dropout drawn for another tile",
        "backward_dkdv",
        "first_key + Fragment::row(0, lane), s);",
        "first_key + Fragment::row(0, lane), 0);",
        "numbers",
        dataclasses.replace(DROPPED_FUNCTION, head_dim=136, hopper_tile=TileConfig(64, 64, 12, 2)),
    ),
)
