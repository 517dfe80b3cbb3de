"""The tangents of dK and dV on Hopper: each product, term and wait is dropped once."""

from __future__ import annotations

import functools

from support.feature_cases import numbers
from support.second_order_calls import CURVED, PACKED
from support.second_order_on_hopper import call_on_hopper, check_alone, without_rows

from fa2cupy import TileConfig

from .second_order import Mutant, dropped

#: The calls that run mutants, by name. A tile of 64 queries multiplies K by Q and by Q' apart.
CALLS = {
    "plain": {},
    "causal": {"lengths": (70, 150), "causal": True},
    "apart": {"tile": TileConfig(64, 128, 12, 3), "given": "qkv"},
    "no v": {"given": "qko"},
    "many": {"lengths": (130, 20), "heads": (2, 1)},
    "groups": {"heads": (4, 2)},
    "packed": {"lengths": (40, 52), "heads": (4, 2), **PACKED},
    "pair": {"head_dim": 40, "head_dim_v": 72},
    "hidden": {"lengths": (70, 62), "causal": True},
    "capped": {"softcap": 0.8},
    "curved": {"heads": (2, 1), **CURVED},
    "dropout": {"dropout_p": 0.3, "seed": 5},
    "bias": {"bias": numbers((1, 70, 40), "bfloat16")},
}
#: The checks by name.
CHECKS = {
    "numbers": lambda call, patch: check_alone("dkdv_jvp", call, patch),
    "hidden": lambda call, patch: without_rows("dkdv_jvp", call, 8, patch),
}


def run(call: str, check: str, patch: Mutant | None = None) -> None:
    """Makes a call and checks its results."""
    sizes = {"lengths": (70, 40), "tile": TileConfig(32, 128, 12, 2)}
    CHECKS[check](call_on_hopper(**sizes | CALLS[call]), patch)


@functools.lru_cache(maxsize=None)
def check_unbroken(call: str, check: str) -> None:
    run(call, check)


def _dropped(*terms: tuple[str, ...], **how: str) -> list[Mutant]:
    return dropped("dkdv_jvp", *terms, **{"check": "numbers", **how})


MUTANTS = (
    # The products, and the tangents that they read.
    *_dropped(
        ("if constexpr (kOwnMoves) multiply<true>(rest_, own_tangent, other);", "rest_.fill(0.0f);"),
        ("multiply<true>(rest_, own_tangent, other);", "multiply<true>(rest_, own, other);"),
        ("multiply<!kOwnMoves>(rest_, own, other_tangent);", ";"),
        ("if constexpr (kBoth) moved = first_", "if constexpr (false) moved = first_"),
        ("kBoth ? moved + rest_.value[2 * s + n][e]", "kBoth ? rest_.value[2 * s + n][e]"),
        ("maps_.kt, memory_.key_tangent()", "maps_.k, memory_.key_tangent()"),
        ("maps_.vt, memory_.value_tangent()", "maps_.v, memory_.value_tangent()"),
        ("kQ ? maps_.qt : maps_.dot", "kQ ? maps_.q : maps_.dot"),
        ("kQ ? maps_.qt : maps_.dot", "kQ ? maps_.qt : maps_.dout"),
        ("wgmma_gradient(x, tangents[s].k16(0), rows + along_rows(s));", ";"),
        ("wgmma_gradient(x, weights[s].k16(0), rows + along_rows(kSteps + s));", ";"),
        ("rows + along_rows(kSteps + s)", "rows + along_rows(s)"),
        ("Base::store_gradient(dk_, params_.softmax_scale,", "Base::store_gradient(dk_, 1.0f,"),
    ),
    *_dropped(("multiply<!kOwnMoves>(rest_, own, other_tangent);", ";"), call="apart"),
    *_dropped(("if constexpr (kBoth) moved = first_", "if constexpr (false) moved = first_"), call="no v"),
    # The formulas.
    *_dropped(
        ("statistic = kQ ? common::in_base2(lse)", "statistic = kQ ? lse"),
        ("kQ ? common::in_base2(lse) : params_.delta[index];", "kQ ? common::in_base2(lse) : 0.0f;"),
        ("(kQ ? params_.lset : params_.deltat)[index]", "(kQ ? 0.0f : params_.deltat[index])"),
        ("(kQ ? params_.lset : params_.deltat)[index]", "(kQ ? params_.lset[index] : 0.0f)"),
        ("rounded_tangent[s].set(ds_tangent);", "rounded_tangent[s].set(ds);"),
        ("rounded_ds[s].set(ds);", "rounded_ds[s].set(ds_tangent);"),
        (
            "round_kept(rounded_changes[s], changes[s], kept_of_step);",
            "round_kept(rounded_changes[s], p[s], kept_of_step);",
        ),
        ("round_kept(rounded[s], p[s], kept_of_step);", "round_kept(rounded[s], changes[s], kept_of_step);"),
        (
            "take_changes<Spec>(p[s], changes[s], params_, [&](int, int j) { return lse.tangent[j]; });",
            "take_changes<Spec>(p[s], changes[s], params_, [&](int, int) { return 0.0f; });",
        ),
    ),
    *_dropped(("{Base::template needs_mask<kMasked>(step), false}", "{false, false}"), call="causal"),
    *_dropped(("tile.shifted(16 * s, 0)", "tile"), call="causal"),
    *_dropped(("tile.shifted(16 * s, 0)", "tile"), call="bias"),
    *_dropped(
        ("slopes[s].apply(ds, ds_tangent);", ";"),
        ("slopes[s].apply(ds, ds_tangent);", "{ Scores copy = ds; slopes[s].apply(copy, ds_tangent); }"),
        call="capped",
    ),
    *_dropped(("slopes[s].apply(ds, ds_tangent);", ";"), call="curved"),
    *_dropped(
        ("kept(i, 2 * n) ? x.value[n][2 * i] : 0.0f", "x.value[n][2 * i]"),
        ("kept(i, 2 * n + 1) ? x.value[n][2 * i + 1] : 0.0f", "x.value[n][2 * i + 1]"),
        ("Base::store_gradient(dv_, common::kept_scale<Spec>(params_),", "Base::store_gradient(dv_, 1.0f,"),
        call="dropout",
    ),
    # Rows that see no key.
    *_dropped(
        ("if (lse == -common::infinity<float>()) return true;", ""),
        ("lane < kChunks * (1 + kMoves<kQ>)", "lane < kChunks"),
        ("clear_rows<kQ>(rows_of<kQ>(stage), 32 * i, hidden[i], lane);", ";"),
        call="hidden",
        check="hidden",
    ),
    # Waits, fences and releases.
    *_dropped(("                async_proxy_fence();\n",), call="hidden", check="hidden", caught_by="proxy"),
    *_dropped(
        ("mbarrier_wait(memory_.full_key(), 0);",),
        ("if (is_first_) mbarrier_wait(memory_.full_value(), 0);",),
        ("barrier_sync(Base::kStoreBarrier + kGroup, kGroupThreads);",),
        caught_by="race",
    ),
    *_dropped(
        ("mbarrier_wait(memory_.full_query(stage), parity);",),
        ("mbarrier_wait(memory_.full_dout(stage), parity);",),
        caught_by="uninitialised",
    ),
    *_dropped(
        ("mbarrier_wait(kQ ? memory_.empty_query(stage) : memory_.empty_dout(stage), ring.parity() ^ 1);",),
        ("wgmma_wait<0>();\n        pin(dk_);", "wgmma_wait<1>();\n        pin(dk_);"),
        ("wgmma_wait<1>();\n        pin(dv_);", "wgmma_wait<2>();\n        pin(dv_);"),
        call="many",
        caught_by="race",
    ),
    *_dropped(
        ("wgmma_wait<0>();\n        of_scores.pin();", "wgmma_wait<1>();\n        of_scores.pin();"),
        ("wgmma_wait<1>();\n        of_derivatives.pin();", "wgmma_wait<2>();\n        of_derivatives.pin();"),
        caught_by="in flight",
    ),
    *_dropped(
        ("arrive(memory_.empty_dout(stage));",),
        ("arrive(memory_.empty_query(stage));",),
        call="many",
        caught_by="deadlock",
    ),
)
