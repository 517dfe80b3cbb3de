"""Plans: the kernels that a call launches, with their grid, memory and record. Needs no GPU."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import struct

import numpy as np
import pytest
from support import plans

from fa2cupy import TileConfig
from fa2cupy.errors import UnsupportedProblemError
from fa2cupy.families.choice import choose
from fa2cupy.families.device import ARCHITECTURES, DeviceInfo
from fa2cupy.families.operations import TILED
from fa2cupy.jit.compiler import compile_source
from fa2cupy.jit.source import KernelSource, render_kernel
from fa2cupy.jit.spec import KernelSpec
from fa2cupy.plan.plans import plan_backward
from fa2cupy.plan.schedule import series_values
from fa2cupy.plan.specs import default_specs
from fa2cupy.plan.stages import Plan, Stage
from fa2cupy.problem.attention import AttentionProblem
from fa2cupy.problem.checks import problem_from_arrays
from fa2cupy.problem.features import FeatureSettings
from fa2cupy.problem.options import CallOptions
from fa2cupy.problem.strides import score_strides, sharers

H100 = DeviceInfo.named("sm_90")
DTYPES = ("float16", "bfloat16", "float32", "float64")
TENSORS = ("q", "k", "v", "o", "dout", "dq", "dk", "dv")
STRIDES = {name: (8000 * n, 800 * n, 80 * n) for n, name in enumerate(TENSORS, start=1)}

BASE = AttentionProblem(
    dtype="float16",
    batch=3,
    seqlen_q=300,
    seqlen_k=500,
    num_heads=8,
    num_heads_kv=2,
    head_dim=64,
    causal=False,
    softmax_scale=0.25,
    layout="bshd",
    rank=4,
)


def problem(**changes) -> AttentionProblem:
    return dataclasses.replace(BASE, **changes)


def forward_plan(
    device: DeviceInfo = H100,
    config: TileConfig | None = None,
    family: str | None = None,
    num_splits: int | None = None,
    **changes,
) -> Plan:
    return plans.forward_plan(problem(**changes), device, STRIDES, config, family, num_splits)


def backward_plan(
    method: str, device: DeviceInfo = H100, with_delta: bool = True, family: str | None = None, **changes
) -> Plan:
    return plans.backward_plan(problem(**changes), device, STRIDES, method, family=family, with_delta=with_delta)


def ieee(dtype: str) -> str | None:
    """Returns the IEEE family for float32, which other families compute as well; else None."""
    return "simt" if dtype == "float32" else None


def operations(plan: Plan) -> list[str]:
    return [stage.spec.operation for stage in plan.stages]


def workspace_sizes(plan: Plan) -> dict[str, int]:
    """Returns the sizes of the workspaces that are not empty."""
    return {workspace.name: workspace.nbytes for workspace in plan.workspaces if workspace.nbytes}


def record(stage: Stage) -> dict[str, object]:
    """Returns the members of a record behind its pointers, unpacked."""
    values, offset = {}, 0
    for field in stage.spec.params.fields[len(stage.spec.params.pointers) :]:
        real = "d" if stage.spec.dtype == "float64" else "f"
        code = {"strides": "3q", "size": "q", "real": real, "int": "i"}[field.kind]
        unpacked = struct.unpack_from(f"={code}", stage.constants, offset)
        values[field.name] = unpacked if field.kind == "strides" else unpacked[0]
        offset += struct.calcsize(f"={code}")
    return values


# --------------------------------------------------------------------------------------------------------------- stages


def test_forward_is_one_launch_with_a_block_for_each_query_tile_of_each_head():
    plan = forward_plan(family="sm80")
    (stage,) = plan.stages
    assert (stage.spec.operation, stage.spec.family_name, stage.spec.arch) == ("forward", "sm80", "sm_90")
    assert stage.blocks == -(-300 // stage.spec.tile.b_r) * 8 * 3
    assert stage.threads == 32 * stage.spec.tile.num_warps
    assert (plan.workspaces, plan.cleared) == ((), ())


def test_forward_on_hopper_is_one_launch_with_a_block_for_each_multiprocessor_or_tile():
    for batch, causal in itertools.product((1, 50), (False, True)):
        plan = forward_plan(batch=batch, causal=causal)
        (stage,) = plan.stages
        tiles = -(-300 // stage.spec.tile.b_r) * 8 * batch
        assert (stage.spec.operation, stage.spec.family_name, stage.spec.arch) == ("forward", "sm90", "sm_90a")
        assert stage.blocks == min(tiles, H100.multiprocessors * stage.spec.tile.blocks_per_sm)
        assert (plan.workspaces, plan.cleared) == ((), ())


def test_tensor_maps_say_where_the_rows_lie_and_how_many_are_copied_at_a_time():
    (stage,) = forward_plan().stages
    q, k, v, o = stage.maps
    tile = stage.spec.tile
    assert stage.spec.params.maps == ("q", "k", "v", "o")
    assert (q.sizes, k.sizes) == ((64, 300, 8, 3), (64, 500, 2, 3))
    assert (q.strides, v.strides) == ((2 * 800, 2 * 80, 2 * 8000), (2 * 2400, 2 * 240, 2 * 24000))
    assert [m.box[1] for m in stage.maps] == [tile.b_r, tile.b_c, tile.b_c, 16]
    # An axis of length 1 may have any stride.
    alone = plans.forward_plan(problem(batch=1, num_heads_kv=1), H100, {**STRIDES, "k": (0, 64, 0)}).stages[0].maps[1]
    assert alone.sizes == (64, 500, 1, 1) and alone.strides == (128, 16, 16)


@pytest.mark.parametrize("num_splits", (2, 16))
@pytest.mark.parametrize(("head_dim", "columns"), ((64, 64), (72, 80)))
@pytest.mark.parametrize("family", ("sm80", "sm90"))
def test_a_split_forward_has_a_block_for_each_share_and_merges_them(family, head_dim, columns, num_splits):
    plan = forward_plan(family=family, num_splits=num_splits, head_dim=head_dim)
    forward, merge = plan.stages
    rows = forward.spec.tile.b_r
    tiles = -(-300 // rows) * 8 * 3
    assert (forward.spec.operation, forward.spec.family_name, forward.spec.is_split) == ("forward", family, True)
    values = record(forward)
    assert (values["num_heads"], values["scheduled_heads"], values["num_splits"]) == (8, 8 * num_splits, num_splits)
    most = H100.multiprocessors * forward.spec.tile.blocks_per_sm if family == "sm90" else math.inf
    assert forward.blocks == min(tiles * num_splits, most)
    assert {"o", "lse"}.isdisjoint(forward.spec.params.pointers) and "o_strides" not in values

    assert (merge.spec.operation, merge.spec.family_name, merge.spec.is_split) == ("merge_forward", "common", False)
    assert merge.blocks == tiles * rows // 16 and merge.spec.tile.b_r == rows
    assert record(merge)["num_splits"] == num_splits
    (workspace,) = plan.workspaces
    assert (workspace.name, workspace.nbytes) == ("shares", num_splits * tiles * (rows * columns + rows) * 4)
    assert plan.cleared == ()


@pytest.mark.parametrize("family", ("sm80", "sm90"))
def test_one_share_is_the_forward_without_a_workspace(family):
    many = {"family": family, "batch": 100}  # few query tiles have a tile of their own
    assert forward_plan(num_splits=1, **many) == forward_plan(**many)


def packed(**changes) -> dict[str, object]:
    settings = FeatureSettings(
        num_sequences=5, max_seqlen_q=90, max_seqlen_k=120, arrays=("cu_seqlens_q", "cu_seqlens_k")
    )
    return {"batch": 1, "settings": dataclasses.replace(settings, **changes)}


@pytest.mark.parametrize("family", ("sm80", "sm90"))
def test_packed_sequences_have_tiles_for_all_rows_and_one_more_each(family):
    clear, stage = forward_plan(family=family, causal=True, **packed()).stages
    assert (clear.spec.operation, clear.spec.family_name, clear.blocks) == (
        "clear_forward",
        "common",
        -(-300 // clear.threads),
    )
    values = record(stage)
    assert values["num_tiles"] == 300 // stage.spec.tile.b_r + 5 and values["batch"] == 1
    wanted = {"max_seqlen_q": 90, "max_seqlen_k": 120, "total_q": 300, "total_k": 500, "num_sequences": 5}
    assert {name: values[name] for name in wanted} == wanted
    for method in ("single_pass", "two_pass"):
        plan = backward_plan(method, causal=True, **packed())
        assert operations(plan)[:2] == ["delta", "clear_backward"]
        assert plan.cleared == ()
        assert all(
            record(s)["num_tiles"] == 300 // s.spec.tile.b_r + 5 for s in plan.stages if "dq" in s.spec.operation
        )


def test_maps_of_packed_sequences_are_those_of_any_lengths():
    q, k, v, o = forward_plan(**packed()).stages[1].maps
    assert (q.sizes, k.sizes) == ((64, 2**30, 8, 301, 2**30 + 1), (64, 2**30, 2, 501, 2**30 + 1))
    assert q.strides == (2 * 800, 2 * 80, 2 * 800, 2**34 - 2 * 800)
    assert forward_plan(**packed(max_seqlen_q=7)).stages[1].maps == (q, k, v, o)


def test_without_packed_rows_nothing_is_launched():
    for changes in (packed(num_sequences=0), {**packed(), "seqlen_q": 0}):
        assert [op for op in operations(forward_plan(**changes)) if op != "clear_forward"] == []
    assert operations(forward_plan(**packed(num_sequences=0))) == ["clear_forward"]
    assert operations(forward_plan(**packed(), num_heads=0, num_heads_kv=0)) == []
    assert {s.spec.family_name for s in forward_plan(**packed(max_seqlen_k=0)).stages} == {"common", "sm90"}


# ----------------------------------------------------------------------------------------------- the size of workspaces


def parts_plan(method: str | None, **changes) -> Plan:
    """Plans a call of float32 on Hopper's tensor cores; the method None is the forward."""
    one = problem(**{"dtype": "float32", "head_dim": 72, **changes})
    if method is None:
        return plans.forward_plan(one, H100, STRIDES, family="sm90")
    return plans.backward_plan(one, H100, STRIDES, method, family="sm90")


@pytest.mark.parametrize(
    ("changes", "q_strips", "k_strips"),
    [
        ({}, 3 * 8 * 6, 3 * 2 * 8),  # 300 queries fill three tiles of 128 rows, and 500 keys four
        ({"seqlen_q": 384, "seqlen_k": 513}, 3 * 8 * 6, 3 * 2 * 10),
        ({"seqlen_k": 0}, 3 * 8 * 6, 3 * 2 * 2),  # a query tile still reads a key tile
        (packed(num_sequences=5), 8 * (4 + 5 + 1), 2 * (7 + 5 + 1)),
        (packed(num_sequences=1), 8 * (4 + 1 + 1), 2 * (7 + 1 + 1)),
    ],
)
@pytest.mark.parametrize("method", (None, "single_pass", "two_pass"))
def test_parts_have_strips_of_64_rows_that_fill_whole_tiles(method, changes, q_strips, k_strips):
    plan = parts_plan(method, **changes)
    sizes, of_block = workspace_sizes(plan), 2 * 64 * 128 * 2  # two parts of 64 rows of two panels of float16 numbers
    blocks = {"q": q_strips, "k": k_strips, "v": k_strips, **({"dout": q_strips} if method else {})}
    for name, number in blocks.items():
        assert (sizes[f"{name}_parts"], sizes[f"{name}_units"]) == (number * of_block, number * 4)
    batch = changes.get("batch", BASE.batch)
    assert (sizes["exceptions"], sizes["extremes"]) == (batch * 2 * 4, batch * 2 * (2 * 128 + 2) * 4)
    split = next(stage for stage in plan.stages if stage.spec.operation.startswith("split_"))
    assert split.blocks == sum(blocks.values())
    own = {
        name: record(stage)[name] for stage in plan.stages for name in ("q_strips", "k_strips") if name in record(stage)
    }
    assert own == {"q_strips": q_strips // (8 * batch), "k_strips": k_strips // (2 * batch)}


def test_there_are_blocks_of_parts_for_sequences_of_any_lengths():
    """A sequence begins a block of 64 rows, by `first_part_row` of kernels/float32_parts/parts.cuh, and fills tiles."""
    most = 0
    for total in (*range(1, 67), 128, 129, 300):
        plan = parts_plan(None, **packed(num_sequences=3), seqlen_q=total, seqlen_k=total)
        blocks = next(record(stage)["q_strips"] for stage in plan.stages if stage.spec.operation == "split_inputs")
        for first, second in itertools.combinations_with_replacement(sorted({0, 1, 63, 64, 65, total - 1, total}), 2):
            ends = [0, min(first, total), min(second, total), total]
            for number, (begin, end) in enumerate(itertools.pairwise(ends)):
                used = begin // 64 + number + 2 * -(-(end - begin) // 128)
                assert used <= blocks, ends
                most += used == blocks
    assert most


@pytest.mark.parametrize(("method", "copies"), (("single_pass", 1), ("two_pass", 3)))
@pytest.mark.parametrize(("family", "head_dim"), (("sm80", 72), ("sm90", 72), ("sm80", 64), ("sm90", 256)))
def test_the_shares_of_a_split_backward_have_a_copy_for_each_or_one_for_all(family, head_dim, method, copies):
    one, columns = problem(head_dim=head_dim), -(-head_dim // 16) * 16
    plan = plans.backward_plan(one, H100, STRIDES, method, family=family, num_splits=3)
    (split,) = (stage for stage in plan.stages if stage.spec.is_split)
    keys = split.spec.tile.b_c
    tiles = -(-500 // keys) * 2 * 3
    assert workspace_sizes(plan)["shares"] == copies * tiles * 2 * keys * columns * 4
    summed, rows = plan.stages[-1], split.spec.tile.b_r
    assert record(summed)["num_copies"] == copies
    of_dq = -(-300 // rows) * 8 * 3 if method == "single_pass" else 0
    assert summed.blocks == of_dq + tiles * -(-keys // 32) * 2
    if of_dq:
        columns = {"sm80": {72: 80, 64: 64}, "sm90": {72: 80, 256: 256}}[family][head_dim]
        assert workspace_sizes(plan)["dq_accum"] == of_dq * rows * columns * 4


def test_sums_over_key_tiles_that_are_no_multiple_of_32_have_a_block_for_the_rest():
    for method, operation in (("single_pass", "backward"), ("two_pass", "backward_dkdv")):
        config = {operation: TileConfig(32, 48, 6, 2)}
        plan = plans.backward_plan(problem(), H100, STRIDES, method, config, "sm80", num_splits=2)
        of_dq = -(-300 // 32) * 8 * 3 if method == "single_pass" else 0
        assert plan.stages[-1].blocks == of_dq + -(-500 // 48) * 2 * 3 * 2 * 2


# --------------------------------------------------------------------------------------- what features do to the stages


WITH_SCORES = STRIDES | {"sink": (0, 1, 0, 0), **dict.fromkeys(("bias", "dbias"), (0, 0, 500, 1))}


def with_gradients(dtype: str, method: str, **settings) -> Plan:
    """Plans a backward with a window, a sink and a bias, and with dlse, dbias and dsink."""
    wanted = dict.fromkeys(("dlse", "dbias", "dsink"), True)
    features = FeatureSettings(window=(9, 4), arrays=("bias", "sink"), **wanted, **settings)
    of_call = problem(dtype=dtype, causal=True, settings=features)
    family = "simt" if dtype == "float32" else None  # only simt gives dbias in one pass
    return plans.backward_plan(of_call, H100, WITH_SCORES, method, family=family)


@pytest.mark.parametrize(
    ("dtype", "method"), [("float16", "two_pass"), ("float32", "two_pass"), ("float32", "single_pass")]
)
def test_each_stage_has_the_features_that_are_its_own(dtype, method):
    """Checks dlse in delta, a sink in lse and its own gradient, and dbias in kernels whose blocks own query tiles."""
    scores = {"window", "bias"}
    wanted = {
        "delta": {"dlse"},
        "dsink": {"sink"},
        "backward": {*scores, "dbias"},
        "backward_dq": {*scores, "dbias"},
        "backward_dkdv": scores,
    }
    plan = with_gradients(dtype, method)
    assert {stage.spec.operation: set(stage.spec.features) for stage in plan.stages} == {
        op: wanted[op] for op in operations(plan)
    }
    forward = plans.forward_plan(problem(settings=FeatureSettings(arrays=("sink",))), H100, WITH_SCORES)
    assert [stage.spec.features for stage in forward.stages] == [("sink",)]


@pytest.mark.parametrize(
    ("dtype", "method"), [("float16", "two_pass"), ("float32", "two_pass"), ("float32", "single_pass")]
)
def test_what_gradients_are_added_to_is_cleared(dtype, method):
    wanted = {"dk", "dv", "dbias"} if method == "single_pass" else {"dbias"}
    assert set(with_gradients(dtype, method).cleared) == wanted
    assert set(with_gradients(dtype, method, full_dbias=True).cleared) == wanted - {"dbias"}


@pytest.mark.parametrize("wide", (False, True))
def test_a_full_gradient_is_stored_in_the_dtype_of_the_bias(wide):
    def kind(**settings) -> str:
        (stage,) = (s for s in with_gradients("float16", "two_pass", wide_bias=wide, **settings).stages if is_dq(s))
        return next(field.kind for field in stage.spec.params.fields if field.name == "dbias")

    def is_dq(stage: Stage) -> bool:
        return stage.spec.operation == "backward_dq"

    assert kind() == "output_accum"
    assert kind(full_dbias=True) == ("output_accum" if wide else "output")


def test_rows_outside_packed_sequences_have_a_gradient_of_zero():
    of_call = problem(**packed(arrays=("bias", "cu_seqlens_q", "cu_seqlens_k"), dbias=True, full_dbias=True))
    plan = plans.backward_plan(of_call, H100, WITH_SCORES, "two_pass")
    assert plan.cleared == ("dbias",)


def test_the_gradient_of_a_sink_has_a_block_for_each_query_head():
    (stage,) = (stage for stage in with_gradients("float16", "two_pass").stages if stage.spec.operation == "dsink")
    assert stage.blocks == BASE.num_heads > BASE.num_heads_kv


def test_a_causal_window_is_compiled_as_a_window_that_ends_at_the_diagonal():
    for stage in with_gradients("float16", "two_pass").stages[2:]:
        assert not stage.spec.causal
        left, right = struct.unpack_from("=2i", stage.constants, offset_of(stage, "window_left"))
        assert (left, right) == (9, 0)


def offset_of(stage: Stage, name: str) -> int:
    """Returns the offset of a member in the constants of a record."""
    sizes = {"strides": 24, "score_strides": 32, "size": 8, "real": 4, "int": 4, "word": 4}
    fields = stage.spec.params.fields[len(stage.spec.params.pointers) :]
    return sum(sizes[field.kind] for field in itertools.takewhile(lambda field: field.name != name, fields))


TOTALS = {"q": 400, "k": 600}
EITHER_METHOD = ("single_pass", "two_pass")


def packed_stages(dtype: str, method: str | None, offsets: dict[str, list[int]], **longest: int) -> list[Stage]:
    """Returns the stages of an unsplit call whose offsets are arrays; the method None is the forward."""
    q, k = (np.zeros((rows, 2, 64), "float16" if dtype == "float16" else dtype) for rows in TOTALS.values())
    arrays = {f"cu_seqlens_{side}": np.array(values, "int32") for side, values in offsets.items()}
    of_call = problem_from_arrays(q, k, k, **arrays, **longest)
    strides = dict.fromkeys(TENSORS, of_call.kernel_strides(q.shape))
    if method is None:
        return list(plans.forward_plan(of_call, H100, strides, family=ieee(dtype), num_splits=1).stages)
    return list(plans.backward_plan(of_call, H100, strides, method, family=ieee(dtype)).stages)


def packed_calls() -> list[tuple[str, str | None]]:
    return [(dtype, method) for dtype in ("float16", "float32", "float64") for method in (None, *EITHER_METHOD)]


def lengths_in(stage: Stage) -> tuple[int, int] | None:
    values = record(stage)
    return (values["max_seqlen_q"], values["max_seqlen_k"]) if "max_seqlen_q" in values else None


@pytest.mark.parametrize(("dtype", "method"), packed_calls())
def test_offsets_of_one_element_are_no_sequence_and_what_is_left_is_cleared(dtype, method):
    stages = packed_stages(dtype, method, {"q": [0], "k": [0]})
    assert [stage.spec.operation for stage in stages] == (
        ["clear_forward"] if method is None else ["delta", "clear_backward"]
    )
    clear = stages[-1]
    assert record(clear)["num_sequences"] == 0
    assert clear.blocks * clear.threads >= (TOTALS["q"] if method is None else max(TOTALS.values()))


@pytest.mark.parametrize(("dtype", "method"), packed_calls())
def test_offsets_are_for_the_device_to_read(dtype, method):
    """Checks that a plan depends neither on the start of the first sequence nor on lengths above the promised ones."""
    wanted = packed_stages(dtype, method, {"q": [0, 10, 400], "k": [0, 20, 600]}, max_seqlen_q=30, max_seqlen_k=40)
    for offsets in ({"q": [5, 10, 400], "k": [3, 20, 600]}, {"q": [0, 0, 400], "k": [0, 1, 600]}):
        assert packed_stages(dtype, method, offsets, max_seqlen_q=30, max_seqlen_k=40) == wanted


@pytest.mark.parametrize(
    ("longest", "in_record"),
    [
        ({}, (400, 600)),
        ({"max_seqlen_q": 7, "max_seqlen_k": 9}, (7, 9)),
        ({"max_seqlen_q": 401, "max_seqlen_k": 601}, (400, 600)),
        ({"max_seqlen_q": 600, "max_seqlen_k": 400}, (400, 400)),
        ({"max_seqlen_q": 10**9}, (400, 600)),
        ({"max_seqlen_k": 0}, (400, 0)),
    ],
    ids=str,
)
@pytest.mark.parametrize(("dtype", "method"), packed_calls())
def test_the_longest_length_is_what_was_promised_and_at_most_the_total(dtype, method, longest, in_record):
    offsets = {"q": [0, 10, 400], "k": [0, 20, 600]}
    stages = packed_stages(dtype, method, offsets, **longest)
    in_records = {lengths_in(stage) for stage in stages} - {None}
    assert in_records == {in_record}
    # No grid depends on the longest length: kernels cut off sequences that are longer than promised.
    assert [stage.blocks for stage in stages] == [stage.blocks for stage in packed_stages(dtype, method, offsets)]


@pytest.mark.parametrize(("dtype", "method"), packed_calls())
def test_there_are_tiles_for_sequences_of_any_lengths(dtype, method):
    """Checks the number of tiles. Each sequence starts a new tile: lengths of one row above a tile need the most."""
    for ends in (
        [0, 400],
        [0, 1, 400],
        [*range(401)],
        [0, 129, 129, 258, 387, 400],
        [*range(0, 390, 65), 400],
        [0, 0, 400],
    ):
        offsets = {"q": ends, "k": [end if end < 400 else 600 for end in ends]}
        for stage in packed_stages(dtype, method, offsets):
            values = record(stage)
            if stage.spec.operation not in TILED and stage.spec.operation != "convert_dq":
                continue
            by_keys = stage.spec.family.owns(stage.spec.operation) == "keys"
            side, rows = ("k", stage.spec.tile.b_c) if by_keys else ("q", stage.spec.tile.b_r)
            needed = sum(-(-(b - a) // rows) for a, b in itertools.pairwise(offsets[side]))
            assert needed <= values["num_tiles"] <= needed + len(ends)


ODD_STRIDES = {
    "reversed": (8000, -800, 80),
    "unaligned": (8000, 804, 80),
    "broadcast": (8000, 800, 0),
    "far": (2**39, 800, 80),
}


@pytest.mark.parametrize("name", ("q", "k", "v", "o"))
@pytest.mark.parametrize("strides", ODD_STRIDES.values(), ids=ODD_STRIDES)
def test_strides_that_tma_does_not_take_fall_back_to_sm80(strides, name):
    (stage,) = plans.forward_plan(problem(), H100, {**STRIDES, name: strides}).stages
    assert (stage.spec.family_name, stage.spec.arch, stage.maps) == ("sm80", "sm_90", ())
    assert record(stage)[f"{name}_strides"] == strides
    with pytest.raises(UnsupportedProblemError, match=f"'sm90'.*{name} is not for TMA, a stride of"):
        plans.forward_plan(problem(), H100, {**STRIDES, name: strides}, family="sm90")


@pytest.mark.parametrize(
    "changes", ({"seqlen_k": 0}, *({"softmax_scale": scale} for scale in (0.0, -1.0, 1e-31))), ids=str
)
def test_problems_that_the_hopper_kernels_do_not_know_fall_back_to_sm80(changes):
    (stage,) = forward_plan(**changes).stages
    assert stage.spec.family_name == "sm80"
    with pytest.raises(UnsupportedProblemError, match="'sm90'"):
        forward_plan(family="sm90", **changes)


@pytest.mark.parametrize(
    ("scale", "cap", "named"),
    (
        (1e39, None, "softmax_scale|scale_log2"),
        (-1e39, None, "softmax_scale|scale_log2"),
        (0.1, 1e39, "softcap_log2"),
        (0.1, 1e-40, "scale_over_softcap"),
        (1e-200, 1e200, "softcap_log2"),
    ),
)
def test_factors_that_float32_does_not_hold_are_refused(scale, cap, named):
    def changes(dtype: str) -> dict[str, object]:
        return {"dtype": dtype, "softmax_scale": scale, "settings": FeatureSettings(softcap=cap)}

    for dtype in ("float16", "float32"):
        told = rf"^softmax_scale={re.escape(str(scale))}: for {dtype}, .* ({named})"
        with pytest.raises(UnsupportedProblemError, match=told):
            forward_plan(**changes(dtype))
    assert forward_plan(**changes("float64")).stages


def hopper_dq(config: TileConfig | None = None, **changes) -> Stage:
    """Returns the stage of the dQ kernel of `two_pass` on Hopper."""
    _, stage, _ = plans.backward_plan(problem(**changes), H100, STRIDES, "two_pass", config).stages
    return stage


def test_dq_on_hopper_is_one_launch_with_a_block_for_each_multiprocessor_or_tile():
    for batch, causal in itertools.product((1, 50), (False, True)):
        stage = hopper_dq(batch=batch, causal=causal)
        tiles = -(-300 // stage.spec.tile.b_r) * 8 * batch
        assert (stage.spec.operation, stage.spec.family_name, stage.spec.arch) == ("backward_dq", "sm90", "sm_90a")
        assert stage.blocks == min(tiles, H100.multiprocessors * stage.spec.tile.blocks_per_sm)
        assert (record(stage)["num_tiles"], record(stage)["softmax_scale"]) == (tiles // 8 // batch, 0.25)


def test_the_record_of_dq_on_hopper_has_tensor_maps():
    stage = hopper_dq()
    tile = stage.spec.tile
    names = stage.spec.params.maps
    assert names == ("q", "k", "v", "dout", "dq")
    assert stage.spec.params.pointers == (*names, "lse", "delta", "tile_counter")
    assert [m.box[1] for m in stage.maps] == [tile.b_r, tile.b_c, tile.b_c, tile.b_r, 16]
    assert [m.sizes[1:3] for m in stage.maps] == [(300, 8), (500, 2), (500, 2), (300, 8), (300, 8)]
    for name, layout in zip(names, stage.maps, strict=True):
        batch, row, head = STRIDES[name]
        assert layout.strides == (2 * row, 2 * head, 2 * batch)


@pytest.mark.parametrize("name", ("q", "k", "v", "dout", "dq"))
def test_dq_falls_back_to_sm80_where_an_array_of_its_own_is_not_for_tma(name):
    for strides in ODD_STRIDES.values():
        stage = plans.backward_plan(problem(), H100, {**STRIDES, name: strides}, "two_pass").stages[1]
        assert (stage.spec.operation, stage.spec.family_name, stage.maps) == ("backward_dq", "sm80", ())
        assert record(stage)[f"{name}_strides"] == strides
    assert (
        plans.backward_plan(problem(softmax_scale=0.0), H100, STRIDES, "two_pass").stages[1].spec.family_name == "sm80"
    )
    # Only another kernel of the call has a tensor map of dk, but all of them are of one family.
    strides = {**STRIDES, "dk": (8000, -800, 80)}
    assert {s.spec.family_name for s in plans.backward_plan(problem(), H100, strides, "two_pass").stages} == {
        "common",
        "sm80",
    }
    strides = {**STRIDES, "o": (8000, -800, 80)}
    assert plans.backward_plan(problem(), H100, strides, "two_pass").stages[1].spec.family_name == "sm90"


def test_delta_is_one_launch_with_a_row_for_every_group_of_lanes():
    for dtype, head_dim in itertools.product(DTYPES, (8, 16, 64, 104, 256)):
        (stage,) = plans.delta_plan(problem(dtype=dtype, head_dim=head_dim), H100, STRIDES).stages
        assert (stage.spec.operation, stage.spec.family_name) == ("delta", "common")
        assert stage.blocks == -(-300 // stage.spec.tile.b_r) * 8 * 3
        assert stage.threads % stage.spec.tile.b_r == 0
        assert stage.threads // stage.spec.tile.b_r <= 32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_delta", (True, False))
def test_two_pass_has_a_launch_by_query_tiles_and_one_by_key_tiles_and_needs_nothing_else(dtype, with_delta):
    plan = backward_plan("two_pass", dtype=dtype, with_delta=with_delta, family=ieee(dtype))
    assert operations(plan) == ["delta"] * with_delta + ["backward_dq", "backward_dkdv"]
    dq, dkdv = plan.stages[-2:]
    assert dq.blocks == -(-300 // dq.spec.tile.b_r) * 8 * 3
    assert dkdv.blocks == -(-500 // dkdv.spec.tile.b_c) * 2 * 3  # the heads of K and V
    assert list(workspace_sizes(plan)) == ["delta"] * with_delta
    assert plan.cleared == ()


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_single_pass_on_tensor_cores_adds_dq_up_in_a_workspace_that_delta_clears_and_converts_it(dtype):
    plan = backward_plan("single_pass", dtype=dtype)
    assert operations(plan) == ["delta", "backward", "convert_dq"]
    delta, main, convert = plan.stages
    assert main.blocks == -(-500 // main.spec.tile.b_c) * 2 * 3
    assert convert.blocks == -(-300 // main.spec.tile.b_r) * 8 * 3
    assert convert.spec.tile.b_r == main.spec.tile.b_r  # the layout of the workspace depends on b_r
    assert not convert.spec.causal  # or it would be compiled twice
    of_dq = convert.blocks * main.spec.tile.b_r * 64 * 4
    assert workspace_sizes(plan) == {"delta": 3 * 8 * 300 * 4, "dq_accum": of_dq}
    assert plan.cleared == ()
    assert (record(delta)["dq_accum_bytes"], record(delta)["shares_bytes"]) == (of_dq, 0)


def test_single_pass_of_parts_is_the_default_and_kernels_of_two_pass_store_what_it_leaves():
    plan = plans.backward_plan(problem(dtype="float32", head_dim=59), H100, STRIDES, None, family="sm90")
    kernels = [(stage.spec.operation, stage.spec.is_fallback) for stage in plan.stages]
    split, main, convert = plan.stages[:3]
    assert kernels[:3] == [(name, False) for name in ("split_gradients", "backward", "convert_dq")]
    assert kernels[3:] == [("backward", True)]
    assert main.blocks == -(-500 // main.spec.tile.b_c) * 2 * 3
    assert convert.blocks == -(-300 // main.spec.tile.b_r) * 8 * 3
    of_dq = convert.blocks * main.spec.tile.b_r * 64 * 4
    assert workspace_sizes(plan)["dq_accum"] == of_dq == record(split)["dq_accum_bytes"]
    assert plan.cleared == () and split.renamed == {} and "delta" in workspace_sizes(plan)
    assert [one.name for one in plan.workspaces if one.stays_zero] == ["extremes"]
    given = plans.backward_plan(
        problem(dtype="float32", head_dim=59), H100, STRIDES, None, family="sm90", with_delta=False
    )
    assert (
        given.cleared == ()
        and given.stages[0].renamed == {"o": None, "delta": None}
        and "delta" not in workspace_sizes(given)
    )


@pytest.mark.parametrize(
    ("device", "head_dim", "method", "more", "has_own"),
    (
        ("sm_90", 200, "single_pass", {}, True),
        ("sm_90", 200, "single_pass", {"precision": "ieee"}, False),
        ("sm_90", 200, "single_pass", {"family": "simt"}, False),
        ("sm_90", 200, "two_pass", {}, False),
        ("sm_90", 128, "single_pass", {}, False),
        ("sm_80", 64, "single_pass", {}, True),
        ("sm_86", 64, "single_pass", {}, False),
    ),
)
def test_a_backward_of_ieee_arithmetic_computes_lse_again_after_a_forward_in_parts(
    device, head_dim, method, more, has_own
):
    """Checks that lse is recomputed: that of other arithmetic would make all weights of a row too large or small."""
    one, gpu = problem(dtype="float32", head_dim=head_dim), DeviceInfo.named(device)
    options = CallOptions(method=method, **more)
    choice = choose("backward", one, gpu, STRIDES, options, is_launched=False)
    plan = plan_backward(one, gpu, STRIDES, choice)
    of_simt = [stage for stage in plan.stages if stage.spec.family_name == "simt"]
    assert [stage.spec.operation for stage in of_simt].count("forward") == has_own
    for stage in of_simt:
        is_first = stage is of_simt[0]
        wanted = {"given_lse": "lse", "lse": "own_lse", "o": None} if is_first else {"lse": "own_lse"}
        assert stage.renamed == (wanted if has_own or choice.family.multiplies_parts else {})
    others = [stage for stage in plan.stages if stage not in of_simt]
    assert not any(stage.renamed for stage in others)
    assert workspace_sizes(plan).get("own_lse") == (3 * 8 * 300 * 4 if of_simt[0].renamed else None)


@pytest.mark.parametrize("family", ("sm80", "sm90"))
def test_delta_clears_the_shares_of_single_pass(family):
    plan = plans.backward_plan(problem(), H100, STRIDES, "single_pass", family=family, num_splits=2)
    sizes = workspace_sizes(plan)
    cleared = {name: record(plan.stages[0])[f"{name}_bytes"] for name in ("dq_accum", "shares")}
    assert cleared == {name: sizes[name] for name in cleared} and all(cleared.values())
    assert plan.cleared == ()


def test_workspaces_are_cleared_ahead_where_no_kernel_computes_delta():
    def plan(**options) -> Plan:
        return plans.backward_plan(problem(**options.pop("changes", {})), H100, STRIDES, "single_pass", **options)

    assert plan(with_delta=False).cleared == ("dq_accum",)
    assert plan(with_delta=False, num_splits=2).cleared == ("dq_accum", "shares")
    without_queries = plan(changes={"seqlen_q": 0})
    assert operations(without_queries) == ["backward"] and without_queries.cleared == ("dq_accum",)


@pytest.mark.parametrize("causal", (False, True))
def test_single_pass_on_hopper_has_a_block_for_each_key_tile_and_maps_of_what_it_copies(causal):
    plan = backward_plan("single_pass", batch=50, causal=causal)
    delta, main, convert = plan.stages
    assert [stage.spec.family_name for stage in plan.stages] == ["common", "sm90", "sm90"]
    assert [stage.spec.arch for stage in plan.stages] == ["sm_90", "sm_90a", "sm_90a"]
    tile = main.spec.tile
    assert main.blocks == -(-500 // tile.b_c) * 2 * 50 > H100.multiprocessors
    assert main.spec.params.maps == ("q", "k", "v", "dout", "dk", "dv")
    assert [m.box[1] for m in main.maps] == [tile.b_r, tile.b_c, tile.b_c, tile.b_r, 16, 16]
    queries, keys = (64, 300, 8, 50), (64, 500, 2, 50)
    assert [m.sizes for m in main.maps] == [queries, keys, keys, queries, keys, keys]
    assert main.maps[3].strides == tuple(2 * STRIDES["dout"][axis] for axis in (1, 2, 0))


@pytest.mark.parametrize("name", ("q", "k", "v", "dout", "dk", "dv"))
@pytest.mark.parametrize("strides", ODD_STRIDES.values(), ids=ODD_STRIDES)
@pytest.mark.parametrize("method", ("single_pass", "two_pass"))
def test_gradients_that_tma_does_not_take_fall_back_to_sm80(method, strides, name):
    plan = plans.backward_plan(problem(), H100, {**STRIDES, name: strides}, method)
    by_keys = next(stage for stage in plan.stages if stage.spec.operation in ("backward", "backward_dkdv"))
    assert (by_keys.spec.family_name, by_keys.maps) == ("sm80", ())
    assert "sm90" not in {stage.spec.family_name for stage in plan.stages}
    with pytest.raises(UnsupportedProblemError, match=f"'sm90'.*{name} is not for TMA, a stride of"):
        plans.backward_plan(problem(), H100, {**STRIDES, name: strides}, method, family="sm90")


@pytest.mark.parametrize("name", ("o", "dq"))
def test_what_is_read_and_written_without_tma_may_lie_as_it_likes_on_hopper(name):
    plan = plans.backward_plan(problem(), H100, {**STRIDES, name: ODD_STRIDES["reversed"]}, "single_pass")
    assert [stage.spec.family_name for stage in plan.stages] == ["common", "sm90", "sm90"]


@pytest.mark.parametrize(
    "changes", ({"seqlen_q": 0}, *({"softmax_scale": scale} for scale in (0.0, -1.0, 1e-31))), ids=str
)
def test_problems_that_the_hopper_backward_does_not_know_fall_back_to_sm80(changes):
    for method in ("single_pass", "two_pass"):
        assert "sm90" not in {stage.spec.family_name for stage in backward_plan(method, **changes).stages}


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("float64", 8)])
def test_single_pass_on_simt_adds_to_cleared_dk_and_dv(dtype, itemsize):
    plan = backward_plan("single_pass", dtype=dtype, family="simt")
    assert operations(plan) == ["delta", "backward"]
    main = plan.stages[1]
    assert main.blocks == -(-300 // main.spec.tile.b_r) * 8 * 3
    assert workspace_sizes(plan) == {"delta": 3 * 8 * 300 * itemsize}
    assert plan.cleared == ("dk", "dv")


def test_a_delta_of_the_callers_is_not_computed_again():
    for method in ("single_pass", "two_pass"):
        plan = backward_plan(method, with_delta=False)
        assert "delta" not in operations(plan)
        assert "delta" not in [workspace.name for workspace in plan.workspaces]


@pytest.mark.parametrize("dtype", ("float16", "float64"))
def test_batch_heads_lengths_strides_and_scale_do_not_change_what_is_compiled(dtype):
    other = {"batch": 7, "seqlen_q": 1, "seqlen_k": 4096, "num_heads": 5, "num_heads_kv": 5, "softmax_scale": 3.0}
    for causal in (False, True):
        for method in ("single_pass", "two_pass"):
            plans = [backward_plan(method, dtype=dtype, causal=causal, **changes) for changes in ({}, other)]
            assert [s.spec for s in plans[0].stages] == [s.spec for s in plans[1].stages]
            assert [s.constants for s in plans[0].stages] != [s.constants for s in plans[1].stages]


def test_nothing_grows_with_the_product_of_the_lengths():
    for dtype, method in itertools.product(DTYPES, ("single_pass", "two_pass")):
        nbytes = [
            sum(w.nbytes for w in backward_plan(method, dtype=dtype, seqlen_q=length, seqlen_k=length).workspaces)
            for length in (4096, 8192)
        ]
        assert nbytes[0] < nbytes[1] <= 2 * nbytes[0]


# ------------------------------------------------------------------------------------------------------- empty problems


EMPTY = {
    "batch": {"batch": 0},
    "heads": {"num_heads": 0, "num_heads_kv": 0},
    "queries and keys": {"seqlen_q": 0, "seqlen_k": 0},
}


@pytest.mark.parametrize("dtype", ("float16", "float32"))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("empty", EMPTY)
def test_where_all_results_are_empty_nothing_is_launched(empty, causal, dtype):
    changes = {**EMPTY[empty], "causal": causal, "dtype": dtype}
    assert forward_plan(**changes).stages == ()
    for method in ("single_pass", "two_pass"):
        plan = backward_plan(method, **changes)
        assert plan.stages == ()
        assert sum(workspace.nbytes for workspace in plan.workspaces) == 0


@pytest.mark.parametrize("dtype", ("float16", "float32"))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("method", ("single_pass", "two_pass"))
@pytest.mark.parametrize("no_queries", ({"seqlen_q": 0}, {"num_heads": 0}), ids=("length", "heads"))
def test_without_queries_dk_and_dv_are_still_written(method, causal, dtype, no_queries):
    assert forward_plan(causal=causal, dtype=dtype, **no_queries).stages == ()
    plan = backward_plan(method, causal=causal, dtype=dtype, **no_queries)
    written = {name for stage in plan.stages for name in stage.spec.params.pointers}
    assert {"dk", "dv"} <= written | set(plan.cleared)


@pytest.mark.parametrize("dtype", ("float16", "float32"))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("method", ("single_pass", "two_pass"))
def test_without_keys_o_and_dq_are_still_written(method, causal, dtype):
    assert operations(forward_plan(causal=causal, dtype=dtype, seqlen_k=0)) == ["forward"]
    plan = backward_plan(method, causal=causal, dtype=dtype, seqlen_k=0)
    assert "dq" in {name for stage in plan.stages for name in stage.spec.params.pointers}


# ----------------------------------------------------------------------------------- the order in which tiles are taken


def blocks_of(stage: Stage) -> list[tuple[int, int, int]]:
    """Returns (tile, head, batch) of every block, by the arithmetic of kernels/common/schedule.cuh."""
    values = record(stage)
    tiles, heads, section_heads = values["num_tiles"], values["scheduled_heads"], values["heads_per_section"]
    found = []
    for block in range(tiles * heads * values["batch"]):  # persistent blocks draw the later numbers from a counter
        section, rank = divmod(block, section_heads * tiles)
        first = section * section_heads
        in_section = min(section_heads, values["batch"] * heads - first)
        tile, head = divmod(rank, in_section)
        found.append((tile, (first + head) % heads, (first + head) // heads))
    return found


def scheduled(plan: Plan) -> list[Stage]:
    return [stage for stage in plan.stages if "heads_per_section" in record(stage)]


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("multiprocessors", (1, 7, 16, 132))
def test_every_tile_of_every_head_is_taken_once_whatever_the_sections(causal, multiprocessors):
    device = dataclasses.replace(H100, multiprocessors=multiprocessors)
    for plan in (
        forward_plan(device, causal=causal),
        forward_plan(device, causal=causal, num_splits=3),
        backward_plan("two_pass", device, causal=causal),
        backward_plan("single_pass", device, causal=causal),
    ):
        for stage in scheduled(plan):
            values = record(stage)
            everything = itertools.product(
                range(values["num_tiles"]), range(values["scheduled_heads"]), range(values["batch"])
            )
            assert sorted(blocks_of(stage)) == sorted(everything)


def test_without_a_mask_one_head_follows_the_other():
    (stage,) = forward_plan(seqlen_q=4096).stages
    assert record(stage)["heads_per_section"] == BASE.heads_per_group
    order = [(batch, head // BASE.heads_per_group) for _, head, batch in blocks_of(stage)]
    assert order == sorted(order)


@pytest.mark.parametrize("family", ("sm80", "sm90"))
@pytest.mark.parametrize("causal", (False, True))
def test_the_shares_of_a_head_are_in_the_section_of_the_head(family, causal):
    whole, split = (record(forward_plan(family=family, causal=causal, num_splits=n).stages[0]) for n in (1, 5))
    assert split["heads_per_section"] == 5 * whole["heads_per_section"]


def test_under_a_mask_a_section_has_whole_groups_by_the_columns_of_their_heads():
    many = {"num_heads": 4096, "num_heads_kv": 1024, "seqlen_q": 512, "seqlen_k": 512, "causal": True}
    device = dataclasses.replace(H100, multiprocessors=128)
    for head_dim, groups in ((64, 64), (128, 32), (256, 16)):
        (stage,) = forward_plan(device, head_dim=head_dim, **many).stages
        assert record(stage)["heads_per_section"] == 4 * groups
        by_keys = {
            s.spec.operation: s
            for m in ("single_pass", "two_pass")
            for s in backward_plan(m, device, head_dim=head_dim, **many).stages
        }
        assert record(by_keys["backward_dq"])["heads_per_section"] == 4 * groups
        assert record(by_keys["backward_dkdv"])["heads_per_section"] == groups // 2
        assert record(by_keys["backward"])["heads_per_section"] == groups // 8


@pytest.mark.parametrize(
    ("seqlen", "dtype", "heads", "splits", "section"),
    [
        (131072, "float16", (8, 2), 4, 1), (131072, "float16", (4, 4), 1, 1), (32768, "float16", (16, 4), 4, 1),
        (16384, "float16", (8, 2), 4, 2), (8192, "float16", (8, 2), 4, 4), (4096, "float16", (8, 2), 4, 8),
        (8192, "float16", (16, 16), 1, 4), (16384, "float32", (4, 4), 1, 2),
    ],
)  # fmt: skip
def test_heads_that_blocks_add_to_at_a_time_fit_in_the_cache(seqlen, dtype, heads, splits, section):
    """Q, dO and the sums of dQ of 131072 rows take 128 MiB, those of 8192 rows 8 MiB; the H100 has 50 MiB."""
    lengths = {"seqlen_q": seqlen, "seqlen_k": seqlen, "head_dim": 128}
    numbers = {"batch": 1, "num_heads": heads[0], "num_heads_kv": heads[1]}
    call = problem(dtype=dtype, causal=True, **lengths, **numbers)
    plan = plans.backward_plan(call, H100, STRIDES, "single_pass", num_splits=splits)
    stage = next(stage for stage in plan.stages if stage.spec.operation == "backward")
    assert record(stage)["heads_per_section"] == section


@pytest.mark.parametrize("seqlen", (512, 2048, 4096, 16384))
@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_under_a_mask_no_section_is_a_short_one(head_dim, seqlen):
    heads = {"num_heads": 2048 // head_dim, "num_heads_kv": 2048 // head_dim, "batch": 16384 // seqlen}
    changes = {"seqlen_q": seqlen, "seqlen_k": seqlen, "head_dim": head_dim, "causal": True, **heads}
    for family in ("sm80", "sm90"):
        values = record(forward_plan(family=family, **changes).stages[0])
        assert values["num_heads"] * values["batch"] % values["heads_per_section"] == 0


@pytest.mark.parametrize("groups", (1, 7, 13, 97))
def test_where_no_size_divides_the_groups_the_last_section_misses_little(groups):
    device = dataclasses.replace(H100, multiprocessors=10)
    heads = {"num_heads": groups, "num_heads_kv": groups, "batch": 1, "causal": True, "head_dim": 64}
    section = record(forward_plan(device, num_splits=1, **heads).stages[0])["heads_per_section"]  # about five
    assert section in range(1, 8) and -groups % section <= section / 4


@pytest.mark.parametrize("arch", [arch for arch, device in ARCHITECTURES.items() if device.compute_capability >= 80])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (2**20, 1), (2**20, 0), (0, 2**20), (1, 2**20)])
def test_block_arithmetic_stays_in_32_bits(arch, seqlen_q, seqlen_k):
    device = DeviceInfo.named(arch)
    changes = {
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "causal": True,
        "num_heads": 64,
        "num_heads_kv": 1,
        "head_dim": 8,
    }
    for plan in (
        forward_plan(device, **changes),
        backward_plan("two_pass", device, **changes),
        backward_plan("single_pass", device, **changes),
    ):
        for stage in scheduled(plan):
            values = record(stage)
            assert values["heads_per_section"] * values["num_tiles"] < 2**31
            assert values["num_tiles"] * values["scheduled_heads"] * values["batch"] + stage.blocks < 2**31


# ----------------------------------------------------------------------------------------------------------- the record


def every_layout() -> list:
    """Returns one kernel for each record, that is for each operation, family and accumulator."""
    found = {}
    for dtype, method in itertools.product(DTYPES, (None, "single_pass", "two_pass")):
        for spec in default_specs(H100, dtype, 32, False, method):
            found.setdefault((spec.operation, spec.family_name, "float64" if dtype == "float64" else "float32"), spec)
    split = [stage.spec for family in ("sm80", "sm90") for stage in forward_plan(family=family, num_splits=2).stages]
    return list(found.values()) + list(dict.fromkeys(split))


def layout_id(spec) -> str:
    return f"{spec.operation}-{spec.family_name}-{spec.dtype}{'-split' if spec.is_split else ''}"


def compile_checks(spec: KernelSpec, checks: str) -> None:
    """Compiles static assertions behind the headers of a kernel, without the kernel, which would take longer."""
    head, kernel, _ = render_kernel(spec).text.partition('extern "C" __global__')
    compile_source(KernelSource(spec, f"{head}{checks}{kernel} void {spec.symbol}() {{}}\n"))


@pytest.mark.parametrize("spec", every_layout(), ids=layout_id)
def test_bytes_of_the_record_lie_where_the_c_struct_has_its_members(spec):
    pytest.importorskip("cupy", exc_type=ImportError)
    layout = spec.params
    constants = layout.fields[len(layout.pointers) :]
    real = struct.unpack("=d" if spec.dtype == "float64" else "=f", b"\x01" * (8 if spec.dtype == "float64" else 4))[0]
    marked = {"strides": (0x0101010101010101,) * 3, "size": 0x0101010101010101, "real": real, "int": 0x01010101}
    zero = {"strides": (0, 0, 0), "size": 0, "real": 0.0, "int": 0}

    sizes = {name: 128 if name in layout.maps else 8 for name in layout.pointers}
    offsets = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
    for field in constants:
        packed = layout.pack_constants({f.name: (marked if f is field else zero)[f.kind] for f in constants})
        assert layout.pointer_packer.size + len(packed) == layout.nbytes
        offsets[field.name] = layout.pointer_packer.size + packed.index(1)
        sizes[field.name] = packed.count(1)

    # NVRTC has no offsetof; this is the expansion of the macro in its front end.
    checks = [
        f"static_assert(__INTADDR__(&static_cast<fa2::Params*>(0)->{name}) == {offset});\n"
        f"static_assert(sizeof(fa2::Params::{name}) == {sizes[name]});"
        for name, offset in offsets.items()
    ]
    compile_checks(spec, "\n".join(checks) + "\n")


@pytest.mark.parametrize("spec", every_layout(), ids=layout_id)
def test_a_record_with_a_missing_or_unknown_value_is_refused(spec):
    layout = spec.params
    values = {f.name: (0, 0, 0) if f.kind == "strides" else 0 for f in layout.fields[len(layout.pointers) :]}
    layout.pack_constants(values)
    with pytest.raises(KeyError, match="unknown"):
        layout.pack_constants({**values, "unknown": 1})
    values.popitem()
    with pytest.raises(KeyError):
        layout.pack_constants(values)


@pytest.mark.parametrize("dtype", ("float16", "float64"))
def test_the_record_says_what_the_problem_says(dtype):
    device = DeviceInfo.named("sm_80")  # its records have strides, not tensor maps
    plans = [forward_plan(device, dtype=dtype)]
    plans += [backward_plan(method, device, dtype=dtype) for method in ("single_pass", "two_pass")]
    expected = {
        "scale_log2": 0.25 * math.log2(math.e),
        "softmax_scale": 0.25,
        "num_heads": 8,
        "heads_per_group": 4,
        "seqlen_q": 300,
        "seqlen_k": 500,
        "batch": 3,
        **{f"{name}_strides": strides for name, strides in STRIDES.items()},
    }
    seen = set()
    for stage in (stage for plan in plans for stage in plan.stages):
        values = record(stage)
        for name in values.keys() & expected.keys():
            assert values[name] == pytest.approx(expected[name], rel=1e-6)
        seen |= values.keys()
    unused = {"scale_log2"} if dtype == "float64" else set()  # float64 uses natural exponentials
    assert seen >= expected.keys() - unused


@pytest.mark.parametrize("family", ("sm80", "sm90"))
@pytest.mark.parametrize("head_dim", (40, 64, 104, 136, 256))
def test_the_kernels_have_the_workspace_of_dq_in_the_planned_size(head_dim, family):
    pytest.importorskip("cupy", exc_type=ImportError)
    plan = plans.backward_plan(problem(head_dim=head_dim), H100, STRIDES, "single_pass", family=family)
    _, main, convert = plan.stages
    per_tile = workspace_sizes(plan)["dq_accum"] // 4 // convert.blocks
    check = f"static_assert(fa2::{family}::ConvertDq<fa2::Spec>::Workspace::kTileElements == {per_tile});\n"
    compile_checks(convert.spec, check)
    shape = {"sm80": "Backward<fa2::Spec>", "sm90": "BackwardShape<fa2::Spec, true>"}[family]
    check = (
        f"using Main = fa2::{family}::{shape};\n"
        f"static_assert(fa2::{family}::DqWorkspace<Main::kBr, Main::kD>::kTileElements == {per_tile});\n"
    )
    compile_checks(main.spec, check)


@pytest.mark.parametrize("family", ("sm80", "sm90"))
@pytest.mark.parametrize("head_dim", (40, 64, 136, 256))
def test_the_kernels_have_the_workspace_of_shares_in_the_planned_size(head_dim, family):
    pytest.importorskip("cupy", exc_type=ImportError)
    plan = forward_plan(family=family, num_splits=3, head_dim=head_dim)
    for stage in plan.stages:
        tiles = record(stage)["num_tiles"] * BASE.num_heads * BASE.batch
        check = f"static_assert(fa2::common::OutputShares<fa2::Spec>::kTileElements * {3 * tiles * 4}ll == "
        check += f"{plan.workspaces[0].nbytes});\n"
        compile_checks(stage.spec, check)


def test_two_launches_differ_in_nothing_but_what_the_caller_changed():
    first, second = (record(forward_plan(seqlen_k=length).stages[0]) for length in (500, 501))
    assert {name for name in first if first[name] != second[name]} == {"seqlen_k"}


# ------------------------------------------------------------------------------------------ series that share a bias


@pytest.mark.parametrize(("batch", "shared"), [(256, 256), (4096, 4096), (24, 8), (7, 7)])
@pytest.mark.parametrize("causal", (False, True))
def test_series_of_sequences_have_all_of_them(batch, shared, causal):
    """They fill the blocks evenly; under a causal mask, blocks draw several, because query tiles differ in length."""
    call, tile = problem(causal=causal, batch=batch), TileConfig(64, 64, 8, 2, 3)
    values = series_values(call, H100, tile, 4, shared)
    of_bias = -(-shared // values["series_length"])
    assert values["num_series"] == batch // shared * of_bias and values["sharers"] == shared
    blocks, tiles = 3 * H100.multiprocessors, 4 * call.num_heads
    if causal and values["series_length"] > 1:
        assert batch * tiles >= values["series_length"] * blocks * 4
    elif batch >= 256:
        rounds = -(-values["num_series"] * tiles // blocks)
        assert rounds * values["series_length"] <= 1.3 * batch * tiles / blocks


def test_sequences_share_a_bias_up_to_its_first_leading_axis():
    def of(shape, *leading):
        return sharers(score_strides("bias", np.zeros(shape, "float16"), leading), math.prod(leading))

    assert of((4, 8, 8), 2, 3) == 6 and of((1, 4, 8, 8), 2, 3) == 6
    assert of((2, 1, 4, 8, 8), 2, 3) == 3 and of((3, 4, 8, 8), 2, 3) == 1 and of((2, 3, 4, 8, 8), 2, 3) == 1
    assert of((5, 1, 2, 1, 4, 8, 8), 5, 3, 2, 7) == 7
