"""The tangent of dQ on Hopper: each product, term and wait is dropped once."""

from __future__ import annotations

import functools

from support.feature_cases import numbers
from support.second_order_calls import CURVED
from support.second_order_on_hopper import CAUSAL, TWO_GROUPS, call_on_hopper, check_alone, without_rows

from fa2cupy import TileConfig

from .second_order import Mutant, dropped

#: The calls that run mutants, by name.
CALLS = {
    "plain": {},
    "without dout": {"given": "qkv"},
    "two panels": {"head_dim": 72},
    "causal": CAUSAL,
    "many": {"lengths": (400, 70), "heads": (2, 1), "causal": False},
    "two groups": {**CAUSAL, "tile": TWO_GROUPS},
    "pair": {"lengths": (70, 75), "head_dim": 40, "head_dim_v": 72},
    "long": {"lengths": (70, 330)},
    "one stage of V": {"lengths": (70, 330), "head_dim": 128, "tile": TileConfig(128, 64, 12, 2)},
    "hidden": {"lengths": (70, 62), "causal": True},
    "capped": {"softcap": 0.8},
    "curved": {"heads": (2, 1), **CURVED},
    "dropout": {"dropout_p": 0.3, "seed": 5},
    "bias": {"bias": numbers((1, 70, 75), "bfloat16")},
    "capped bias": {"bias": numbers((1, 70, 75), "bfloat16"), "softcap": 0.8},
}
#: The checks by name.
CHECKS = {
    "numbers": lambda call, patch: check_alone("dq_jvp", call, patch),
    "hidden": lambda call, patch: without_rows("dq_jvp", call, 8, patch),
}


def run(call: str, check: str, patch: Mutant | None = None) -> None:
    """Makes a call and checks its results."""
    CHECKS[check](call_on_hopper(**CALLS[call]), patch)


@functools.lru_cache(maxsize=None)
def check_unbroken(call: str, check: str) -> None:
    run(call, check)


def _dropped(*terms: tuple[str, ...], **how: str) -> list[Mutant]:
    return dropped("dq_jvp", *terms, **{"check": "numbers", **how})


MUTANTS = (
    # The products, and the tangents that they read.
    *_dropped(
        ("<kD, Moved::kQuery, Moved::kKey, Moved::kKey>", "<kD, false, Moved::kKey, Moved::kKey>"),
        ("<Shape::kDv, Moved::kDout, Moved::kValue,", "<Shape::kDv, false, Moved::kValue,"),
        ("multiply<kColumns, kStride, false>(y, own, others + kKeyTangent / 16);", ";"),
        ("(y, own, others + kKeyTangent / 16);", "(y, own, others);"),
        ("(kJoins ? rest : y, own + tangent / 16, others)", "(kJoins ? rest : y, own, others)"),
        ("kStride, kMovesKeys && !kJoins>", "kStride, false>"),
        ("tangents_.value[n][e] += rest_.value[n][e];", "tangents_.value[n][e] = rest_.value[n][e];"),
        ("tangents_.value[n][e] += rest_.value[n][e];", ";"),
        ("Base::add_keys(dq_, ds_, k + kKeyTangent / 16);", ";"),
        ("Base::add_keys(dq_, ds_, k + kKeyTangent / 16);", "Base::add_keys(dq_, ds_, k);"),
        ("multiply_keys(dq_, ds_tangent_, k);", "wgmma_commit(); pin(dq_);"),
        ("multiply_keys(dq_, ds_tangent_, k);", "multiply_keys(dq_, ds_, k);"),
        ("smem, full, tile, params_.qt);", "smem, full, tile, params_.q);"),
        ("smem, full, tile, params_.dot);", "smem, full, tile, params_.dout);"),
        ("load_key(tile, block, params_.kt);", "load_key(tile, block, params_.k);"),
        ("load_value(tile, block, params_.vt);", "load_value(tile, block, params_.v);"),
        ("own().dq_.value[n][e] *= params_.softmax_scale;", ";"),
    ),
    *_dropped(
        ("kStride = Shape::kInterleaves ?", "kStride = !Shape::kInterleaves ?"),
        ("kTangent = Shape::kInterleaves ?", "kTangent = !Shape::kInterleaves ?"),
        call="two panels",
        caught_by="race",
    ),
    *_dropped(
        (
            "matrix_descriptor(memory_.key(keys_.slot()), Shape::kKeyStride);",
            "matrix_descriptor(memory_.key(keys_.slot()), Shape::kKeyPanelBytes);",
        ),
        call="two panels",
    ),
    # One product of a query tile by keys and their tangents.
    *_dropped(
        (
            "s == 0 ? wgmma_first_both(x, y, a, b) : wgmma_both(x, y, a, b);",
            "s == 0 ? wgmma_first_both(y, x, a, b) : wgmma_both(y, x, a, b);",
        ),
        call="without dout",
    ),
    # The formulas.
    *_dropped(
        ("common::in_base2(record.lse[at])", "record.lse[at]"),
        ("lse_tangent_[i] = valid ? record.lset[at] : 0.0f;", "lse_tangent_[i] = 0.0f;"),
        ("delta_[i] = valid ? record.delta[at] : 0.0f;", "delta_[i] = 0.0f;"),
        ("delta_tangent_[i] = valid ? record.deltat[at] : 0.0f;", "delta_tangent_[i] = 0.0f;"),
        ("ds_tangent_.set(dp_tangent_);", "ds_tangent_.set(dp_);"),
    ),
    *_dropped(("{masked, false}", "{false, false}"), call="causal"),
    *_dropped(
        ("slopes.apply(dp_, dp_tangent_);", ";"),
        ("slopes.apply(dp_, dp_tangent_);", "{ Scores ds = dp_; slopes.apply(ds, dp_tangent_); }"),
        call="capped",
    ),
    *_dropped(("slopes.apply(dp_, dp_tangent_);", ";"), call="curved"),
    *_dropped(("write_dbias<Spec>(dp_tangent_,", "write_dbias<Spec>(dp_,"), call="bias"),
    *_dropped(
        (
            "common::write_dbias<Spec>(dp_tangent_, record, where);\n        slopes.apply(dp_, dp_tangent_);",
            "slopes.apply(dp_, dp_tangent_);\n        common::write_dbias<Spec>(dp_tangent_, record, where);",
        ),
        call="capped bias",
    ),
    # Rows that see no key.
    *_dropped(
        ("return lse_[i] == common::infinity<float>();", "return false;"),
        ("kDoutPanels = Shape::kDoutBytes / Shape::kQueryPanelBytes", "kDoutPanels = Shape::kPanelsV"),
        call="hidden",
        check="hidden",
    ),
    # Waits and releases.
    *_dropped(
        (
            "mbarrier_wait(memory_.full_dout(queries_.slot()), queries_.parity());\n        differentiate",
            "differentiate",
        ),
        caught_by="race",
    ),
    *_dropped(
        ("mbarrier_wait(memory_.full_key(at.slot()), at.parity());",),
        (
            "mbarrier_wait(memory_.full_value(values_.slot()), values_.parity());\n        multiply_rows",
            "multiply_rows",
        ),
        ("mbarrier_wait(memory_.full_query(queries_.slot()), queries_.parity());",),
        ("mbarrier_wait(memory_.empty_key(stage), keys_.parity() ^ 1);",),
        call="two groups",
        caught_by="race",
    ),
    *_dropped(("wait_for_sums<1>();", "wait_for_sums<2>();"), call="long", caught_by="race"),
    *_dropped(
        ("mbarrier_wait(memory_.empty_value(stage), values_.parity() ^ 1);",),
        call="one stage of V",
        caught_by="race",
    ),
    *_dropped(
        ("wgmma_wait<0>();\n        pin(scores_);", "wgmma_wait<1>();\n        pin(scores_);"),
        ("wgmma_wait<0>();\n        pin(dp_);", "wgmma_wait<1>();\n        pin(dp_);"),
        caught_by="in flight",
    ),
    *_dropped(
        ("        if (is_last(keys, block)) release_query();\n",),
        (
            "            mbarrier_arrive(memory_.empty_dout(queries_.slot()));\n        common",
            "            ;\n        common",
        ),
        call="many",
        caught_by="deadlock",
    ),
)
