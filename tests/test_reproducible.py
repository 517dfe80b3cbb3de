"""The table of docs/accuracy.md of what is reproducible: on NumPy, in plans, and in the interpreter."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support import plans
from support.decode_cases import Case

import fa2cupy
from fa2cupy.families.choice import choose
from fa2cupy.families.device import DeviceInfo
from fa2cupy.problem.attention import AttentionProblem
from fa2cupy.problem.options import CallOptions
from fa2cupy.testing import make_inputs

DTYPES = ("float16", "bfloat16", "float32", "float64")
SIZES = {"seqlen_q": 70, "seqlen_k": 90, "num_heads": 4, "num_heads_kv": 2, "head_dim": 24}


def bits(*arrays) -> list[bytes]:
    return [np.ascontiguousarray(array).tobytes() for array in arrays]


# ---------------------------------------------------------------------------------------------------------------- NumPy


def results_of(q, k, v, do, method: str, **options) -> tuple:
    o, lse = fa2cupy.forward(q, k, v, causal=True, **options)
    gradients = fa2cupy.backward(q, k, v, o, lse, do, causal=True, method=method, **options)
    return o, lse, fa2cupy.delta(o, do), *gradients


@pytest.mark.parametrize("method", ["single_pass", "two_pass"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_gives_a_sequence_the_same_bits_in_each_call(dtype, method):
    inputs = make_inputs(dtype, batch=7, **SIZES)
    among_others = [x[3] for x in results_of(*inputs, method)]
    assert bits(*results_of(*(x[3] for x in inputs), method)) == bits(*among_others)
    assert bits(*results_of(*(x[3:5] for x in inputs), method)) == bits(*(x[3:5] for x in results_of(*inputs, method)))


@pytest.mark.parametrize("method", ["single_pass", "two_pass"])
def test_numpy_gives_a_packed_sequence_the_same_bits(method):
    inputs = [x[0] for x in make_inputs("float32", batch=1, **SIZES)]
    several = {f"cu_seqlens_{side}": np.array([0, 9, 40, SIZES[f"seqlen_{side}"]], "int32") for side in "qk"}
    alone = {f"cu_seqlens_{side}": np.array([0, SIZES[f"seqlen_{side}"] - 40], "int32") for side in "qk"}
    o, lse, delta, dq, dk, dv = results_of(*inputs, method, **several)
    last = results_of(*(x[40:] for x in inputs), method, **alone)
    assert bits(*last) == bits(o[40:], lse[:, 40:], delta[:, 40:], dq[40:], dk[40:], dv[40:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before", [(700, 3, 90), (200, 200, 200)])
def test_numpy_decodes_a_sequence_to_the_same_bits(dtype, before):
    def decoded(sequences):
        q, k_cache, v_cache, lengths, options = Case(dtype, before, num_new=1, heads=(4, 1)).arguments()
        q, k_cache, v_cache, lengths = (x[sequences] for x in (q, k_cache, v_cache, lengths))
        new = {name: x[sequences] for name, x in options.items()}
        return bits(*(x[0] for x in fa2cupy.decode(q, k_cache, v_cache, lengths, **new)))

    assert decoded(slice(0, 1)) == decoded(slice(0, 3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_merges_parts_in_their_order(dtype):
    """A sum of NumPy's adds up the parts of one row pairwise, and those of several rows one by one."""
    rng = np.random.default_rng(0)
    o_parts = rng.standard_normal((16, 5, 3, 2, 8)).astype(make_inputs(dtype)[0].dtype)
    lse_parts = rng.standard_normal((16, 5, 2, 3)).astype("float64" if dtype == "float64" else "float32")
    o, lse = fa2cupy.merge(o_parts, lse_parts)
    for batch, row, head in itertools.product(range(5), range(3), range(2)):
        b, r, h = slice(batch, batch + 1), slice(row, row + 1), slice(head, head + 1)
        assert bits(*fa2cupy.merge(o_parts[:, b, r, h], lse_parts[:, b, h, r])) == bits(o[b, r, h], lse[b, h, r])


# ---------------------------------------------------------------------------------------------------------------- plans

GPUS = ("sm_70", "sm_80", "sm_86", "sm_90", "sm_120")
ALONE = {"num_splits": 1}


def dtypes_on(device: str) -> tuple[str, ...]:
    return DTYPES[2:] if device == "sm_70" else DTYPES[1:]


def stages_of(method: str | None, device: str, dtype: str, batch: int, lengths: tuple, heads: tuple, **options) -> list:
    """Returns the kernels of a forward, or of a backward by a method, with what they know of splits."""
    problem = AttentionProblem(dtype, batch, *lengths, *heads, 64, True, 0.125, "bshd", 4)
    given = problem, DeviceInfo.named(device), problem.contiguous_strides()
    plan = plans.forward_plan(*given, **options) if method is None else plans.backward_plan(*given, method, **options)
    return [stage.spec for stage in plan.stages]


@pytest.mark.parametrize("device", GPUS)
@pytest.mark.parametrize("method", [None, "two_pass", "single_pass"])
def test_one_split_takes_the_same_kernels_beside_any_sequences(device, method):
    """A block then has all of a tile's work, in an order that its kernel fixes."""
    for dtype, lengths in itertools.product(dtypes_on(device), ((1, 300), (40, 5000), (128, 128), (2000, 2000))):
        alone, *others = (stages_of(method, device, dtype, batch, lengths, (8, 2), **ALONE) for batch in (1, 7, 1000))
        assert all(stages == alone for stages in others)
        assert not any(spec.is_split or spec.operation == "decode" for spec in alone)


def test_by_default_the_number_of_splits_depends_on_the_batch():
    """Otherwise the test above would say nothing."""
    for dtype, method, lengths in (("float16", None, (512, 8192)), ("float16", "two_pass", (2048, 2048))):
        few, many = (stages_of(method, "sm_90", dtype, batch, lengths, (4, 1), num_splits=None) for batch in (1, 64))
        assert few != many and any(spec.is_split for spec in few) and not any(spec.is_split for spec in many)


@pytest.mark.parametrize("device", GPUS)
def test_one_split_takes_the_same_kernel_of_decode_beside_any_sequences(device):
    for dtype, num_splits in itertools.product(dtypes_on(device), (1, None)):
        options, tiles = CallOptions(num_splits=num_splits), set()
        for batch in (1, 2, 40, 3000):
            problem = AttentionProblem(dtype, batch, 1, 4096, 8, 2, 64, True, 0.125, "bshd", 4)
            tiles.add(choose("decode", problem, DeviceInfo.named(device), {}, options).tiles["decode"])
        assert num_splits is None or len(tiles) == 1
        assert num_splits == 1 or dtype != "bfloat16" or device not in ("sm_80", "sm_90") or len(tiles) > 1


# ---------------------------------------------------------------------------------------------------------- interpreter


@pytest.mark.simulated
@pytest.mark.sample(family=("sm80",), is_packed=(False,))
@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("family", ["simt", "sm80", "sm90"])
def test_kernels_give_a_sequence_the_same_bits_beside_any_others(monkeypatch, family, is_packed):
    """And with the blocks and warps in another order: forward and two_pass, and single_pass without its atomics."""
    pytest.importorskip("cupy")
    from support.fake_cupy import place
    from support.fake_gpu import backward, forward
    from support.simulated_problems import HOPPER, small_tiles
    from support.simulator import simulated_gpu

    dtype = "float32" if family == "simt" else "float16"
    inputs = make_inputs(dtype, batch=2, seqlen_q=35, seqlen_k=50, num_heads=2, num_heads_kv=1, head_dim=24)
    options = {"causal": True, "family": family, **ALONE}
    if family != "sm90":
        options["config"] = small_tiles(dtype, 24)

    def found(batch, seed):
        """Returns the results of the last sequence of so many."""
        arrays, own, rows = [x[2 - batch :] for x in inputs], dict(options), (slice(None),) * 2
        if is_packed:
            arrays = [x.reshape(-1, *x.shape[2:]) for x in arrays]
            lengths = (("cu_seqlens_q", 35), ("cu_seqlens_k", 50))
            own |= {name: place(np.arange(batch + 1, dtype="int32") * length) for name, length in lengths}
            rows = slice(-35, None), slice(-50, None)
        q, k, v, do = map(place, arrays)
        with monkeypatch.context() as patch, simulated_gpu(patch, HOPPER, seed=seed):
            o, lse = forward(q, k, v, **own)
            single, two = (backward(q, k, v, o, lse, do, **own, method=x) for x in ("single_pass", "two_pass"))
        exact = (single[0],) if family == "simt" else single[1:]
        results = [(o, 0), *((x, int(x.shape == k.shape)) for x in (*exact, *two))]
        own_lse = lse[:, -35:] if is_packed else lse[-1]
        return bits(own_lse, *(x[rows[side]] if is_packed else x[-1] for x, side in results))

    assert found(1, None) == found(2, 3)
