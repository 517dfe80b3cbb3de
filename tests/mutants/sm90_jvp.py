"""Tangents of the forward on Hopper: each product, term and wait is dropped once."""

from __future__ import annotations

import functools

import numpy as np
from support.feature_cases import numbers
from support.second_order_calls import CURVED
from support.second_order_on_hopper import CAUSAL, JVP_CHECKS, TWO_GROUPS, call_on_hopper
from support.simulated_problems import FEW_MULTIPROCESSORS

from fa2cupy import TileConfig

from .second_order import Mutant, dropped

HIDDEN = np.where(np.arange(70) < 8, -np.inf, 0.0).astype("float32")[:, None]
#: The calls that run mutants, by name.
CALLS = {
    "plain": {"lengths": (70, 101)},
    "causal": CAUSAL,
    "rising": {"lengths": (70, 101), "causal": False},
    "many": {"lengths": (400, 70), "heads": (4, 1)},
    "two groups": {**CAUSAL, "tile": TWO_GROUPS},
    "divided": {"lengths": (70, 101), "head_dim": 24, "head_dim_v": 200, "tile": TileConfig(64, 32, 12, 2)},
    "hidden": {"lengths": (70, 62), "causal": True},
    "hidden by bias": {"lengths": (70, 62), "bias": HIDDEN},
    "capped": {"softcap": 0.8},
    "curved": {"heads": (2, 1), **CURVED},
    "dropout": {"dropout_p": 0.3, "seed": 5},
    "bias": {"bias": numbers((1, 70, 75), "bfloat16")},
    "sink": {"heads": (2, 1), "sink": np.array([0.3, -0.5], "float32")},
}


def run(operation: str, call: str, patch: Mutant | None = None) -> None:
    """Makes a call and checks its results."""
    made = call_on_hopper(**CALLS[call])
    if call == "rising":
        made.arrays["k"] *= np.linspace(8, 0.1, 101).astype("bfloat16")[:, None, None]
    device = FEW_MULTIPROCESSORS if call == "many" else "sm_90"
    JVP_CHECKS[operation](made, patch, 8 * call.startswith("hidden"), device)


@functools.lru_cache(maxsize=None)
def check_unbroken(operation: str, call: str) -> None:
    run(operation, call)


#: The products, and the tangents that they read.
PRODUCTS = (
    ("(query + Shape::Base::kQueryBytes);", "(query);"),
    ("(tangents_, q_tangent, k);", "(tangents_, q_tangent, k_tangent);"),
    ("Base::template issue_rows<kD, Moved::kQuery>(tangents_, q, k_tangent);", ";"),
    ("(key + Shape::Base::kKeyBytes, 0);", "(key, 0);"),
    ("if constexpr (kHasT) add_keys(moved_, weighted_, v);",),
    ("if constexpr (Moved::kValue) add_keys(moved_, p_, v + Shape::Base::kValueBytes / 16);",),
    ("add_keys(moved_, p_, v + Shape::Base::kValueBytes / 16);", "add_keys(moved_, p_, v);"),
    ("smem, full, tile, params_.qt);", "smem, full, tile, params_.q);"),
    ("load_key(tile, block, params_.kt);", "load_key(tile, block, params_.k);"),
    ("load_value(tile, block, params_.vt);", "load_value(tile, block, params_.v);"),
    ("lse_tangent_[i] += even + odd;", "lse_tangent_[i] = even + odd;"),
    ("common::row_sum<4>(lse_tangent_[i])", "(lse_tangent_[i])"),
)

MUTANTS = (
    *(mutant for operation in JVP_CHECKS for mutant in dropped(operation, *PRODUCTS)),
    *dropped(
        "jvp",
        ("if constexpr (!kGiven) add_keys(output_, p_, v);",),
        (
            "* inverse[i];\n            lse_tangent_[i] += common::sink",
            ";\n            lse_tangent_[i] += common::sink",
        ),
        ("moved_.value[n][e] -= lse_tangent_[e / 2] * output_.value[n][e];", ";"),
        ("        multiply(moved_, inverse);\n",),
        ("            multiply(output_, inverse);\n",),
    ),
    *dropped(
        "jvp",
        ("            multiply(output_, rescale);\n",),
        ("            if constexpr (kHasMoved) multiply(moved_, rescale);\n",),
        ("lse_tangent_[i] *= rescale[i];", ";"),
        call="rising",
    ),
    *dropped(
        "output_jvp",
        ("moved_(i, 2 * n) -= lse_tangent_[i] * common::unpack_lo<Element>(pair);",),
        ("moved_(i, 2 * n + 1) -= lse_tangent_[i] * common::unpack_hi<Element>(pair);",),
        (": common::in_base2(natural);", ": natural;"),
    ),
    # Columns that two groups divide.
    *(
        mutant
        for operation in JVP_CHECKS
        for mutant in (
            *dropped(operation, ("part_ * kOwnPanels * Shape::kKeyPanelBytes;", "0;"), call="divided"),
            *dropped(
                operation,
                ("(part_ * kOwnPanels + (panel < kOfO", "((panel < kOfO"),
                call="divided",
                caught_by="unwritten",
            ),
        )
    ),
    *dropped("output_jvp", ("part_ * kOwnDv + Output::col", "Output::col"), call="divided"),
    *dropped(
        "jvp",
        ("box.address += part_ * (Shape::kOutputPanels / Shape::kDividers) * box.panel_bytes;",),
        call="divided",
        caught_by="race",
    ),
    # Features.
    *(
        mutant
        for operation in JVP_CHECKS
        for mutant in (
            *dropped(
                operation,
                ("common::drop<Spec>(p_, params_, score_tile(tile, block), weighted_);", ";"),
                ("((weighted.word[2 * s + n][i] &= kept), ...);",),
                ("p.word[2 * s + n][i] &= kept;",),
                ("inverse[i] *= common::kept_scale<Spec>(params_);",),
                call="dropout",
            ),
            *dropped(
                operation,
                ("common::move_scores<false, Spec>(scores_,", "if (false) common::move_scores<false, Spec>(scores_,"),
                call="curved",
            ),
            *dropped(operation, ("tangents(i, j) *= of_cap * slope;",), call="capped"),
            *dropped(operation, ("tangents(i, j) += mod.bias_tangent_at(query, key);", ";"), call="bias"),
            *dropped(
                operation, ("lse_tangent_[i] += common::sink_tangent_of<Spec>(params_, head, lse[i]);",), call="sink"
            ),
        )
    ),
    # Hidden keys, and rows that see none.
    *(
        mutant
        for operation in JVP_CHECKS
        for mutant in (
            *dropped(operation, ("        if (masked) mask(scores_, tile, block);\n",), call="causal"),
            *dropped(operation, ("if (scores_.value[n][e] == 0.0f) tangents_.value[n][e] = 0.0f;", ";"), call="hidden"),
        )
    ),
    *dropped("output_jvp", ("if constexpr (Shape::kClearsRows) clear_hidden_rows();",), call="hidden by bias"),
    # Waits and releases.
    *dropped(
        "jvp",
        (
            "mbarrier_wait(memory_.full_value(values_.slot()), values_.parity());\n        const uint32 first",
            "const uint32 first",
        ),
        ("mbarrier_wait(memory_.full_query(queries_.slot()), queries_.parity());",),
        ("mbarrier_wait(memory_.empty_key(stage), keys_.parity() ^ 1);",),
        ("mbarrier_wait(memory_.empty_value(stage), values_.parity() ^ 1);",),
        call="two groups",
        caught_by="race",
    ),
    *dropped(
        "jvp",
        ("wait_for_sums<1>();", "wait_for_sums<2>();"),
        ("            wgmma_wait<0>();\n            pin(tangents_);", "            pin(tangents_);"),
        caught_by="race",
    ),
    *dropped(
        "jvp",
        ("wgmma_wait<kWaitsOnce ? 0 : 1>();", "wgmma_wait<2>();"),
        caught_by="in flight",
    ),
    *dropped(
        "jvp",
        ("        if (is_last(keys, block)) release_query();\n",),
        call="many",
        caught_by="deadlock",
    ),
)
