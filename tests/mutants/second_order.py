"""The kernels of second order: each term of the formulas is dropped once."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import pytest
from support.feature_cases import numbers
from support.second_order_calls import CURVED, FAMILIES, Call
from support.simulator import simulated_gpu

from fa2cupy import TileConfig
from fa2cupy.jit.spec import KernelSpec

from .mutant import replace_once

#: The calls that run mutants, by name.
CALLS = {
    "plain": {},
    "causal": {"lengths": (37, 21), "causal": True},
    "dropout": {"dropout_p": 0.3, "seed": 5},
    "capped": {"softcap": 0.8},
    "bias": {"bias": numbers((2, 21, 27), "float64")},
    "capped bias": {"bias": numbers((2, 21, 27), "float64"), "softcap": 0.8},
    "sink": {"sink": np.array([0.3, -0.5])},
    "groups": {"heads": (4, 2)},
    "hidden": {"lengths": (20, 12), "causal": True},
    "hidden by bias": {"bias": np.where(np.arange(21) < 8, -np.inf, 0.0)[:, None]},
    "curved": CURVED,
    "warps": {"lengths": (70, 90), "tile": TileConfig(32, 32, 2, 2)},
    "sharers": {"lengths": (20, 37), "head_dim": 72, "head_dim_v": 24, "tile": TileConfig(16, 16, 2)},
    "sharers, hidden": {"lengths": (20, 12), "head_dim": 72, "tile": TileConfig(16, 16, 2), "causal": True},
    "large scores": {"lengths": (20, 70), "softmax_scale": 4.0},
    "one stage": {"lengths": (70, 90), "tile": TileConfig(32, 32, 2)},
    "wide": {"lengths": (37, 45), "head_dim": 264, "default_tiles": True},
    "wide, hidden": {
        "lengths": (21, 27),
        "head_dim": 264,
        "default_tiles": True,
        "bias": np.where(np.arange(21) < 8, -np.inf, 0.0)[:, None],
    },
    "wide bias": {"lengths": (20, 27), "head_dim": 264, "default_tiles": True, "bias": numbers((20, 27), "float64")},
    "wide v": {"lengths": (10, 12), "heads": (1, 1), "head_dim": 392, "head_dim_v": 512, "default_tiles": True},
}


@dataclass(frozen=True)
class Mutant:
    """A kernel, a change of its source, the error that must catch it, a key of `CALLS`, and a check of `Call`.

    `family` is a key of `FAMILIES`.
    """

    name: str
    operation: str
    old: str
    new: str
    caught_by: str = "numbers"
    call: str = "plain"
    check: str = "check_jvp"
    family: str = "simt"

    def __call__(self, spec: KernelSpec, text: str) -> str:
        """Returns the source, patched if it is this kernel's."""
        return replace_once(spec, text, self.old, self.new) if spec.operation == self.operation else text


def run(family: str, call: str, check: str, patch: Mutant | None = None) -> None:
    """Makes a call and checks its results."""
    dtype, device = FAMILIES[family]
    with pytest.MonkeyPatch.context() as monkeypatch, simulated_gpu(monkeypatch, device, patch=patch):
        getattr(Call(**CALLS[call], dtype=dtype), check)()


@functools.lru_cache(maxsize=None)
def check_unbroken(family: str, call: str, check: str) -> None:
    run(family, call, check)


def dropped(operation: str, *terms: tuple[str, ...], family: str = "simt", **how: str) -> list[Mutant]:
    """Returns a mutant for each text to leave out, or to replace by a second one."""
    name = f"{operation} of {family}" if family != "simt" else operation
    return [Mutant(f"{name}: {old}", operation, old, *(new or ("",)), family=family, **how) for old, *new in terms]


#: The kernels of tangents of gradients.
GRADIENTS = ("dq_jvp", "dkdv_jvp")
#: Barriers behind copies to shared memory, by their comments.
BARRIERS = (
    ("jvp", "Q, K and their tangents are there"),
    ("jvp", "V and its tangent are there"),
    ("dq_jvp", "Q, dO, V and their tangents are there"),
    ("dq_jvp", "K and its tangent are there"),
    ("dkdv_jvp", "K, V, dO, their tangents and the statistics are there"),
    ("dkdv_jvp", "Q and its tangent are there"),
)
#: Terms of the formulas that kernels of tangents of gradients share.
SHARED_TERMS = (
    ("if (x.moves()) Tile::add_dot", "if (false) Tile::add_dot"),
    ("if (y.moves()) Tile::add_dot", "if (false) Tile::add_dot"),
    ("tangents(i, j) *= natural_scale<Spec>(params);",),
    ("tangents(i, j) - lse_tangent(i, j);", "tangents(i, j);"),
    ("factor * ds(i, j) - of_row.delta;", "factor * ds(i, j);"),
    ("factor * ds_tangent(i, j) - of_row.delta_tangent;", "factor * ds_tangent(i, j);"),
    ("change * from_delta + probability * from_tangent", "probability * from_tangent"),
    ("change * from_delta + probability * from_tangent", "change * from_delta"),
    ("Tile::accumulate(sums, posted, y.rows, lane);",),
    ("Tile::accumulate(sums, posted, y.tangent(), lane);",),
)

#: Terms of the formulas in kernels of the sm80 family, whose scores stay products.
SM80 = (
    *(
        mutant
        for operation, check in (("jvp", "check_jvp"), ("output_jvp", "check_double_backward"))
        for mutant in (
            *dropped(
                operation,
                ("if (moves_x)", "if (false)"),
                ("if (moves_y)", "if (false)"),
                (
                    "const auto natural = kMovesProducts<Spec> ? scale * tangents(i, j)",
                    "const auto natural = kMovesProducts<Spec> ? tangents(i, j)",
                ),
                ("lse_tangent[m][i] += share;",),
                ("lse_tangent[m][i] += share;", "lse_tangent[m][i] = share;"),
                ("moved[m](i, j) -= lse_tangent[m][i] * output[m](i, j);", ";"),
                ("if (moved_keys.v != nullptr) accumulate<VTile>(moved, packed, v_moved, first_c16, lane);",),
                check=check,
                family="sm80",
            ),
            *dropped(
                operation,
                ("common::drop<Spec>(packed[m], params, score_tile);",),
                ("common::drop<Spec>(packed_tangents[m], params, score_tile);",),
                ("inverse_sum[m][i] *= common::kept_scale<Spec>(params);",),
                call="dropout",
                check=check,
                family="sm80",
            ),
            *dropped(
                operation,
                ("change += common::sink_tangent_of<Spec>(params, head, lse[m][i]);",),
                call="sink",
                check=check,
                family="sm80",
            ),
            Mutant(
                f"{operation} of sm80: no barrier",
                operation,
                "cp_async_wait<kStages - 2>();\n        }\n        __syncthreads();",
                "cp_async_wait<kStages - 2>();\n        }",
                "race",
                "warps",
                check,
                "sm80",
            ),
        )
    ),
    *dropped(
        "jvp",
        ("scale(moved[m], rescale);",),
        ("lse_tangent[m][i] *= rescale[i];", ";"),
        ("common::row_sum<4>(change) * inverse_sum[m][i]", "common::row_sum<4>(change)"),
        ("scale(moved[m], inverse_sum[m]);",),
        family="sm80",
    ),
    *dropped(
        "output_jvp",
        ("fma(scores(i, j), score_scale<Spec>(params), -lse(i, j))", "scores(i, j) * score_scale<Spec>(params)"),
        check="check_double_backward",
        family="sm80",
    ),
    *(
        mutant
        for operation in GRADIENTS
        for mutant in (
            *dropped(
                operation,
                ("if (moves_x)", "if (false)"),
                ("if (moves_y)", "if (false)"),
                ("fma(tangents(i, j), scale, -lse_tangent(i, j))", "scale * tangents(i, j)"),
                ("fma(tangents(i, j), scale, -lse_tangent(i, j))", "tangents(i, j) - lse_tangent(i, j)"),
                ("change * from_delta + probability * from_tangent", "probability * from_tangent"),
                ("change * from_delta + probability * from_tangent", "change * from_delta"),
                check="check_backward_jvp",
                family="sm80",
            ),
            *dropped(
                operation,
                ("factor * ds(i, j) - of_row.delta;", "factor * ds(i, j);"),
                ("factor * ds_tangent(i, j) - of_row.delta_tangent;", "factor * ds_tangent(i, j);"),
                call="dropout",
                check="check_backward_jvp",
                family="sm80",
            ),
        )
    ),
    *dropped(
        "dq_jvp",
        ("? -rows[m][i].delta : 0.0f", "? 0.0f : 0.0f"),
        ("? -rows[m][i].delta_tangent : 0.0f", "? 0.0f : 0.0f"),
        ("accumulate<KTile>(dq, packed_tangents, k, first_c16, lane);",),
        ("if (moved_keys.k != nullptr) accumulate<KTile>(dq, packed, k_moved, first_c16, lane);",),
        ("dq[m].value[n][e] *= params.softmax_scale;", ";"),
        check="check_backward_jvp",
        family="sm80",
    ),
    *dropped(
        "dq_jvp",
        ("write_dbias<Spec>(ds_tangent[m],", "write_dbias<Spec>(ds[m],"),
        call="bias",
        check="check_backward_jvp",
        family="sm80",
    ),
    *dropped(
        "dq_jvp",
        ("clear_row<QTile, 4>(smem + kQ, row, lane % 4);",),
        ("clear_row<DoTile, 4>(smem + kDo, row, lane % 4);",),
        ("clear_row<DoTile, 4>(smem + kDoMoved, row, lane % 4);",),
        call="hidden by bias",
        check="check_hidden_rows",
        family="sm80",
    ),
    *dropped(
        "output_jvp",
        ("clear_row<QTile, 4>(smem, row, lane % 4);",),
        call="hidden by bias",
        check="check_hidden_rows_twice",
        family="sm80",
    ),
    *dropped(
        "dkdv_jvp",
        ("? -row.delta : 0.0f", "? 0.0f : 0.0f"),
        ("? -row.delta_tangent : 0.0f", "? 0.0f : 0.0f"),
        ("accumulate<DoTile>(dv, packed_tangents, dout, part * kV16, lane);",),
        ("if (params.dot != nullptr) accumulate<DoTile>(dv, packed, dout_moved, part * kV16, lane);",),
        ("accumulate<QTile>(dk, packed_ds_tangents, q, part * kK16, lane);",),
        ("if (params.qt != nullptr) accumulate<QTile>(dk, packed_ds, q_moved, part * kK16, lane);",),
        ("dk, params.softmax_scale, params.dkt", "dk, 1.0f, params.dkt"),
        check="check_backward_jvp",
        family="sm80",
    ),
    *dropped(
        "dkdv_jvp",
        ("p(i, j) = keep ? probability : Real(0);", "p(i, j) = probability;"),
        ("changes(i, j) = keep ? change : Real(0);", "changes(i, j) = change;"),
        ("dv, common::kept_scale<Spec>(params),", "dv, 1.0f,"),
        call="dropout",
        check="check_backward_jvp",
        family="sm80",
    ),
    *dropped(
        "dkdv_jvp",
        ("where.head * params.heads_per_group, tiles.begin", "where.head, tiles.begin"),
        call="groups",
        check="check_backward_jvp",
        family="sm80",
    ),
    *dropped(
        "dkdv_jvp",
        ("clear_row<QTile>(slot + kQ, row);",),
        ("clear_row<QTile>(slot + kQMoved, row);",),
        ("clear_row<DoTile>(slot + kDo, row);",),
        ("clear_row<DoTile>(slot + kDoMoved, row);",),
        call="hidden",
        check="check_hidden_rows",
        family="sm80",
    ),
    *(
        Mutant(f"dkdv_jvp of sm80: no {what}", "dkdv_jvp", old, new, "race", call, "check_backward_jvp", "sm80")
        for what, old, new, call in (
            ("wait", "cp_async_wait<0>();\n            const Row* rows", "const Row* rows", "warps"),
            ("barrier", "    } else {\n        block_barrier();", "    } else {", "warps"),
            (
                "barrier before the only slot is filled",
                "block_barrier();\n                load_queries(step, slot);",
                "load_queries(step, slot);",
                "one stage",
            ),
        )
    ),
)

#: The columns that warps of 16-bit kernels have where they share rows, and results that lanes sum one after the other.
WIDE = (
    *dropped("jvp", ("warp % kParts * (kColumns / 16)", "0"), caught_by="race", call="wide", family="sm80"),
    *dropped(
        "output_jvp",
        ("kParts > 1 ? first_column : 0", "0"),
        call="wide",
        check="check_double_backward",
        family="sm80",
    ),
    *dropped(
        "dq_jvp",
        ("first_c16 = part * (kColumns / 16)", "first_c16 = 0"),
        caught_by="race",
        call="wide",
        check="check_backward_jvp",
        family="sm80",
    ),
    *dropped(
        "dq_jvp",
        ("if (part == 0) common::write_dbias", "common::write_dbias"),
        call="wide bias",
        check="check_backward_jvp",
        family="sm80",
    ),
    *dropped(
        "dkdv_jvp",
        ("(dv, packed_tangents, dout, part * kV16,", "(dv, packed_tangents, dout, 0,"),
        ("(dk, packed_ds_tangents, q, part * kK16,", "(dk, packed_ds_tangents, q, 0,"),
        call="wide",
        check="check_backward_jvp",
        family="sm80",
    ),
    *(
        mutant
        for operation, check in (("output_jvp", "check_double_backward"), ("dq_jvp", "check_backward_jvp"))
        for mutant in dropped(
            operation,
            ("if constexpr (kParts > 1) __syncthreads();",),
            caught_by="race",
            call="wide, hidden",
            check=check,
            family="sm80",
        )
    ),
    *dropped(
        "dkdv_jvp",
        ("sum<false, true>(params, smem);",),
        ("sum<true, false>(params, smem);",),
        caught_by="unwritten",
        call="wide v",
        check="check_backward_jvp",
    ),
)

#: Terms of the formulas, barriers and exchanges of warps in kernels of float64 on tensor cores.
FLOAT64 = (
    *(
        mutant
        for operation, check in (("jvp", "check_jvp"), ("output_jvp", "check_double_backward"))
        for mutant in (
            *dropped(
                operation,
                ("if (!kTransposed && x.moves) multiply_rows(sums, x.tangent, y.own, first, end);",),
                ("if (y.moves) multiply_rows(sums, x.own, y.tangent, first, end);",),
                ("lse_tangent[i] += share;",),
                ("add_products(moved, all_tangents, v_rows.own);",),
                ("if (v_rows.moves) add_products(moved, all_p, v_rows.tangent);",),
                ("moved.value[n][e] -= lse_tangent[e / 2] * output.value[n][e];", ";"),
                check=check,
                family="sm80_float64",
            ),
            *dropped(
                operation,
                ("common::drop<Spec>(p, params, score_tile);",),
                ("common::drop<Spec>(tangents, params, score_tile);",),
                ("inverse_sum[i] *= common::kept_scale<Spec>(params);",),
                call="dropout",
                check=check,
                family="sm80_float64",
            ),
            *dropped(
                operation,
                ("lse_tangent[i] += common::sink_tangent_of<Spec>(params, head, lse[i]);",),
                call="sink",
                check=check,
                family="sm80_float64",
            ),
            *dropped(
                operation,
                ("sharers.wait();  // P and P o T have been read",),
                ("__syncthreads();  // V, its tangent, P and P o T are there, K is free",),
                ("slots + which * RowWarps::kBytes", "slots"),
                caught_by="race",
                call="sharers",
                check=check,
                family="sm80_float64",
            ),
            *dropped(
                operation, ("total_of(of_tangents, lse_tangent);",), call="sharers", check=check, family="sm80_float64"
            ),
            *dropped(
                operation,
                ("__syncthreads();  // Q, K and their tangents are there, V is free",),
                (
                    "common::cp_async_wait_all();\n            __syncthreads();  // V, its",
                    "__syncthreads();  // V, its",
                ),
                caught_by="race",
                call="one stage",
                check=check,
                family="sm80_float64",
            ),
        )
    ),
    *dropped(
        "jvp",
        ("scale_rows(moved, factors);",),
        ("lse_tangent[i] *= factors[i] = of_rows[i];", "factors[i] = of_rows[i];"),
        call="large scores",
        family="sm80_float64",
    ),
    *dropped(
        "jvp", ("lse_tangent[i] *= inverse_sum[i];",), ("scale_rows(moved, inverse_sum);",), family="sm80_float64"
    ),
    *dropped(
        "output_jvp",
        ("q().clear_hidden_rows(sharers, warp_row, lse);",),
        call="hidden by bias",
        check="check_hidden_rows_twice",
        family="sm80_float64",
    ),
    *(
        mutant
        for operation in GRADIENTS
        for mutant in (
            *dropped(
                operation,
                (
                    f"if ({'' if operation == 'dkdv_jvp' else '!'}kTransposed && x.moves) multiply_rows",
                    "if (false) multiply_rows",
                ),
                ("if (y.moves) multiply_rows(sums, x.own, y.tangent, first, end);",),
                ("tangents(i, j) - lse_tangent(i, j);", "tangents(i, j);"),
                ("factor * ds(i, j) - of_row.delta;", "factor * ds(i, j);"),
                ("factor * ds_tangent(i, j) - of_row.delta_tangent;", "factor * ds_tangent(i, j);"),
                check="check_backward_jvp",
                family="sm80_float64",
            ),
            *dropped(
                operation,
                ("slots + which * RowWarps::kBytes", "slots"),
                caught_by="race",
                call="sharers",
                check="check_backward_jvp",
                family="sm80_float64",
            ),
        )
    ),
    *dropped(
        "dq_jvp",
        ("of_tangents.multiply_columns(dq, ds_tangent, k_columns.own);",),
        ("if (k_columns.moves) sharers.multiply_columns(dq, ds, k_columns.tangent);",),
        ("{params.softmax_scale, params.softmax_scale}", "{1.0, 1.0}"),
        check="check_backward_jvp",
        family="sm80_float64",
    ),
    *dropped(
        "dq_jvp",
        ("write_dbias<Spec>(ds_tangent,", "write_dbias<Spec>(ds,"),
        call="bias",
        check="check_backward_jvp",
        family="sm80_float64",
    ),
    *dropped(
        "dq_jvp",
        ("of_tangents.give(ds_tangent);\n            sharers.wait();", "of_tangents.give(ds_tangent);"),
        caught_by="race",
        call="sharers",
        check="check_backward_jvp",
        family="sm80_float64",
    ),
    *dropped(
        "dq_jvp",
        ("lse);\n                sharers.wait();", "lse);"),
        caught_by="race",
        call="sharers, hidden",
        check="check_backward_jvp",
        family="sm80_float64",
    ),
    *dropped(
        "dq_jvp",
        ("dout().clear_hidden_rows(sharers, warp_row, lse);",),
        ("if (moves_) sharers.template clear_hidden_rows", "if (false) sharers.template clear_hidden_rows"),
        call="hidden",
        check="check_hidden_rows",
        family="sm80_float64",
    ),
    *dropped(
        "dkdv_jvp",
        ("of_tangents.multiply_columns(dv, tangents, do_columns.own);",),
        ("if (do_columns.moves) sharers.multiply_columns(dv, p, do_columns.tangent);",),
        ("of_tangents.multiply_columns(dk, ds_tangent, q_columns.own);",),
        ("if (q_columns.moves) sharers.multiply_columns(dk, ds, q_columns.tangent);",),
        ("store<kHeadDim, kD>(dk, params.softmax_scale,", "store<kHeadDim, kD>(dk, 1.0,"),
        (
            "{params.lse, params.delta, params.lset, params.deltat}",
            "{params.lse, params.delta, params.deltat, params.lset}",
        ),
        check="check_backward_jvp",
        family="sm80_float64",
    ),
    *dropped(
        "dkdv_jvp",
        ("(dv, common::kept_scale<Spec>(params),", "(dv, 1.0,"),
        call="dropout",
        check="check_backward_jvp",
        family="sm80_float64",
    ),
    *dropped(
        "dkdv_jvp",
        ("position{head_kv * params.heads_per_group,", "position{head_kv,"),
        call="groups",
        check="check_backward_jvp",
        family="sm80_float64",
    ),
    *dropped(
        "dkdv_jvp",
        ("clear_hidden_rows(params, smem, dout(step.head), lane);",),
        ("clear_hidden_rows(params, smem, q(step.head), lane);",),
        ("if (moves_) sm80::clear_row", "if (false) sm80::clear_row"),
        call="hidden",
        check="check_hidden_rows",
        family="sm80_float64",
    ),
    *dropped(
        "dkdv_jvp",
        ("of_tangents.give(tangents);\n            sharers.wait();", "of_tangents.give(tangents);"),
        ("of_tangents.give(ds_tangent);\n            sharers.wait();", "of_tangents.give(ds_tangent);"),
        caught_by="race",
        call="sharers",
        check="check_backward_jvp",
        family="sm80_float64",
    ),
    *(
        mutant
        for operation, comment in (
            ("dq_jvp", "Q, dO, V and their tangents are there, K is free"),
            ("dq_jvp", "K and its tangent are there, V is free"),
            ("dkdv_jvp", "K, V, dO, their tangents and the statistics are there, Q is free"),
            ("dkdv_jvp", "Q and its tangent are there"),
            ("dkdv_jvp", "dO, its tangent, the statistics and P are free"),
        )
        for mutant in dropped(
            operation,
            (f"__syncthreads();  // {comment}", ";"),
            caught_by="race",
            call="one stage",
            check="check_backward_jvp",
            family="sm80_float64",
        )
    ),
)

MUTANTS = (
    *FLOAT64,
    *WIDE,
    *dropped(
        "jvp",
        ("if (x.moves()) Tile::add_dot", "if (false) Tile::add_dot"),
        ("if (y.moves()) Tile::add_dot", "if (false) Tile::add_dot"),
        ("tangents(i, j) *= natural_scale<Spec>(params);",),
        ("(kGiven ? lse_tangent[i] : lse_tangent[i] * rescale[i]) + share", "lse_tangent[i] + share"),
        ("(lse_tangent[i]) * inverse_sum[i]", "(lse_tangent[i])"),
        ("moved.scale(rescale);",),
        ("moved.scale(inverse_sum);",),
        ("moved.subtract(lse_tangent, output);",),
        ("Tile::accumulate(sums, posted, y.rows, lane);",),
        ("Tile::accumulate(sums, posted, y.tangent(), lane);",),
    ),
    *dropped(
        "jvp",
        ("common::drop<Spec>(p, params, score_tile);",),
        ("common::drop<Spec>(tangents, params, score_tile);",),
        ("inverse_sum[i] *= common::kept_scale<Spec>(params);",),
        ("(lse_tangent[i]) * inverse_sum[i]", "(lse_tangent[i]) * inverse_sum[i] * common::kept_scale<Spec>(params)"),
        call="dropout",
    ),
    *dropped("jvp", ("*= of_cap * slope;", "*= slope;"), ("*= of_cap * slope;", "*= of_cap;"), call="curved"),
    *dropped(
        "output_jvp",
        ("if (x.moves()) Tile::add_dot", "if (false) Tile::add_dot"),
        ("if (y.moves()) Tile::add_dot", "if (false) Tile::add_dot"),
        ("scores(i, j) - lse(i, j)", "scores(i, j)"),
        ("moved.subtract(lse_tangent, output);",),
        ("(kGiven ? lse_tangent[i] : lse_tangent[i] * rescale[i]) + share", "share"),
        ("Tile::accumulate(sums, posted, y.tangent(), lane);",),
        check="check_double_backward",
    ),
    *dropped(
        "output_jvp",
        ("inverse_sum[i] *= common::kept_scale<Spec>(params);",),
        ("common::drop<Spec>(p, params, score_tile);",),
        ("common::drop<Spec>(tangents, params, score_tile);",),
        call="dropout",
        check="check_double_backward",
    ),
    *(
        mutant
        for operation, check in (
            ("jvp", "check_jvp"),
            ("output_jvp", "check_double_backward"),
            ("dq_jvp", "check_backward_jvp"),
            ("dkdv_jvp", "check_backward_jvp"),
        )
        for family in FAMILIES
        for mutant in dropped(
            operation,
            ("tangents(i, j) += mod.bias_tangent_at(query, key);", ";"),
            ("params_.bias_tangent_strides.offset(batch_, head_,", "params_.bias_tangent_strides.offset(batch_, 0,"),
            call="bias",
            check=check,
            family=family,
        )
    ),
    *(
        mutant
        for operation, check in (("jvp", "check_jvp"), ("output_jvp", "check_double_backward"))
        for mutant in dropped(
            operation,
            ("lse_tangent[i] += common::sink_tangent_of<Spec>(params, head, lse[i]);",),
            ("params.sink_tangent_strides.offset(0, head,", "params.sink_tangent_strides.offset(0, 0,"),
            ("return exp_accurate(at_most_zero(sink - lse)) *", "return"),
            call="sink",
            check=check,
        )
    ),
    Mutant(
        "dq_jvp: dbias of the backward",
        "dq_jvp",
        "write_dbias<Spec>(ds_tangent,",
        "write_dbias<Spec>(ds,",
        call="bias",
        check="check_backward_jvp",
    ),
    Mutant(
        "dq_jvp: dbias of the products",
        "dq_jvp",
        "common::write_dbias<Spec>(ds_tangent, params, score_tile);\n            slopes.apply(ds, ds_tangent);",
        "slopes.apply(ds, ds_tangent);\n            common::write_dbias<Spec>(ds_tangent, params, score_tile);",
        call="capped bias",
        check="check_backward_jvp",
    ),
    *dropped(
        "dsink_jvp",
        ("Accum change = -params.lset[index];", "Accum change = 0;"),
        ("change += params.sink_tangent", "change = params.sink_tangent"),
        ("change += params", "change += 0 * params"),
        ("return change * params.delta[index] + params.deltat[index];", "return params.deltat[index];"),
        ("return change * params.delta[index] + params.deltat[index];", "return change * params.delta[index];"),
        call="sink",
        check="check_backward_jvp",
    ),
    *dropped(
        "delta_jvp",
        ("sum -= dlse_of<Spec>(params, index);\n            if (params.dlset", "if (params.dlset"),
        ("if (params.dlset != nullptr) tangent -= params.dlset[index];",),
        ("params.ot_strides), dout, lane", "params.ot_strides), o, lane"),
        ("if (params.dot != nullptr)", "if (false)"),
        check="check_backward_jvp",
    ),
    *(
        mutant
        for operation in GRADIENTS
        for family in FAMILIES
        for mutant in (
            *dropped(
                operation,
                ("keep ? kept_scale<Spec>(params) : Real(0)", "kept_scale<Spec>(params)"),
                ("keep ? kept_scale<Spec>(params) : Real(0)", "keep ? Real(1) : Real(0)"),
                call="dropout",
                check="check_backward_jvp",
                family=family,
            ),
            *dropped(
                operation,
                ("slope(i, j) * tangents(i, j) + bend(i, j) * ds(i, j);", "slope(i, j) * tangents(i, j);"),
                ("slope(i, j) * tangents(i, j) + bend(i, j) * ds(i, j);", "tangents(i, j) + bend(i, j) * ds(i, j);"),
                ("ds(i, j) *= slope(i, j);",),
                ("tangents(i, j) *= of_cap * slope;",),
                ("-2 * unit * capped * derivative(capped) *", "-2 * unit * capped *"),
                call="capped",
                check="check_backward_jvp",
                family=family,
            ),
            *dropped(
                operation,
                ("+ of_cap * curvature;", ";"),
                ("mod.second_derivative(capped) * slope * slope +", "mod.second_derivative(capped) * slope +"),
                ("mod.second_derivative(capped) * slope * slope +",),
                call="curved",
                check="check_backward_jvp",
                family=family,
            ),
        )
    ),
    *(
        mutant
        for operation in GRADIENTS
        for mutant in (
            *dropped(operation, *SHARED_TERMS, check="check_backward_jvp"),
            Mutant(
                f"{operation}: scale",
                operation,
                "dk, params.softmax_scale" if operation == "dkdv_jvp" else "dq, params.softmax_scale",
                "dk, Real(1)" if operation == "dkdv_jvp" else "dq, Real(1)",
                check="check_backward_jvp",
            ),
        )
    ),
    *dropped(
        "dkdv_jvp",
        ("p(i, j) = keep ? probability : Real(0);", "p(i, j) = probability;"),
        ("changes(i, j) = keep ? change : Real(0);", "changes(i, j) = change;"),
        ("WarpV::store(dv, common::kept_scale<Spec>(params)", "WarpV::store(dv, Real(1)"),
        call="dropout",
        check="check_backward_jvp",
    ),
    *dropped(
        "dkdv_jvp",
        ("head = head_kv * params.heads_per_group", "head = head_kv"),
        call="groups",
        check="check_backward_jvp",
    ),
    Mutant(
        "dkdv_jvp: no barrier, dO is free",
        "dkdv_jvp",
        "__syncthreads();  // dO, its tangent and the statistics are free",
        "",
        "race",
        check="check_backward_jvp",
    ),
    *(
        Mutant(f"{operation}: hidden rows, {old}", operation, old, new, call="hidden by bias", check=check)
        for operation, old, new, check in (
            ("output_jvp", "clear_hidden_rows<Scores, Rows>(q.rows + own, lse, lane);", ";", "check_hidden_rows_twice"),
            ("dq_jvp", "clear_hidden_rows<Scores, Rows>(q.rows + own, lse, lane);", "", "check_hidden_rows"),
        )
    ),
    *(
        Mutant(f"{operation}: hidden rows, {old}", operation, old, new, call="hidden", check="check_hidden_rows")
        for operation, old, new in (
            ("dq_jvp", "if (dout.moves()) clear_hidden_rows", "if (false) clear_hidden_rows"),
            ("dkdv_jvp", "clear_hidden_tile<Spec, Rows>(params, q.rows, lse_tile, lane);", ""),
            ("dkdv_jvp", "if (q.moves()) clear_hidden_tile", "if (false) clear_hidden_tile"),
            ("dkdv_jvp", "if (dout.moves()) clear_hidden_tile", "if (false) clear_hidden_tile"),
        )
    ),
    *(
        Mutant(
            f"{operation}: no {what}, {comment}",
            operation,
            old,
            new,
            "race",
            check="check_jvp" if operation == "jvp" else "check_backward_jvp",
        )
        for operation, comment in BARRIERS
        for what, old, new in (
            (
                "wait",
                f"wait_for_copies();\n            __syncthreads();  // {comment}",
                f"__syncthreads();  // {comment}",
            ),
            ("barrier", f"__syncthreads();  // {comment}", f"// {comment}"),
        )
    ),
    *SM80,
)
