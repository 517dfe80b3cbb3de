"""On a GPU: forward mode and second derivatives against the references in float64, and properties of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.feature_cases import HEAD_DIM_PAIRS, ROWS, accumulator, numbers, options_of
from support.second_order_calls import CURVED, Call
from support.traced_cases import on_gpu, ready_made

import fa2cupy
from fa2cupy import mods
from fa2cupy.families.device import DeviceInfo
from fa2cupy.plan.specs import second_order_specs
from fa2cupy.testing import make_inputs

cp = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

DTYPES = ("float16", "bfloat16", "float32", "float64")
HEAD_DIMS = (32, 64, 128, 256)
LENGTHS = ((113, 203), (300, 170), (1, 147))
#: (num_heads, num_heads_kv): multi-head, grouped-query, multi-query
HEADS = ((2, 2), (4, 2), (3, 1))
FUNCTIONS = ("jvp", "backward_jvp", "double_backward")
#: Features of calls, with tangents of all that can have one.
FEATURES = (
    *((name, "dlse") for name in ("window", "softcap", "alibi_slopes", "mask", "key_padding_mask", "dropout_p")),
    ("bias", "bias_tangent", "return_dbias", "dlse"),
    ("sink", "sink_tangent", "return_dsink", "dlse"),
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _compiled_ahead():
    # Kernels are compiled on all cores; one after the other, in the order of the tests, they would take minutes.
    common = {"methods": (), "decode": False, "second_order": True}
    fa2cupy.precompile(dtypes=DTYPES, head_dims=HEAD_DIMS, features=[(), ("dlse",)], **common)
    fa2cupy.precompile(dtypes=DTYPES, head_dims=48, features=FEATURES, **common)
    fa2cupy.precompile(dtypes=DTYPES, head_dims=64, features=("cu_seqlens", "dlse"), **common)


class OnGpu(Call):
    """A call on the GPU, written into arrays of NaN."""

    def on_gpu(self, name: str, arrays: tuple, more: dict) -> tuple:
        """Returns NumPy arrays, or those of `out`."""
        more = {key: cp.asarray(x) if isinstance(x, np.ndarray) else x for key, x in more.items()}
        given = tuple(None if x is None else cp.asarray(x) for x in arrays)
        options = on_gpu(self.options, cp.asarray) | more
        results = getattr(fa2cupy, name)(*given, **options)
        if "out" in more:
            return results
        out = tuple(cp.full_like(x, cp.nan) for x in results)
        again = getattr(fa2cupy, name)(*given, **options, out=out)
        assert all(one is other for one, other in zip(again, out, strict=True))
        return tuple(x.get() for x in out)


def check(*sizes, **options) -> None:
    call = OnGpu(*sizes, **options)
    call.check_jvp()
    call.check_backward_jvp()
    call.check_double_backward()


@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_are_bounded(dtype, head_dim, causal):
    for lengths, heads in zip(LENGTHS, HEADS, strict=True):
        check(lengths, heads, head_dim, dtype=dtype, causal=causal, batch=2)


@pytest.mark.parametrize("pair", HEAD_DIM_PAIRS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_head_dims(dtype, pair):
    check((200, 170), (4, 2), *pair, dtype=dtype, causal=True)


@pytest.mark.parametrize("pair", ((512, 512), (264, 328), (40, 512), (512, 40)), ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_than_256_columns(dtype, pair):
    check((200, 170), (4, 2), *pair, dtype=dtype, causal=True)
    bias = np.where(np.arange(200) < 40, -np.inf, 0.3)[:, None]
    check((200, 170), (2, 1), *pair, dtype=dtype, bias=bias)


@pytest.mark.parametrize("head_dim", (64, 128, 256))
@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_around_the_tiles(dtype, head_dim):
    tiles = {spec.tile for spec in second_order_specs(DeviceInfo.current(), dtype, head_dim)}
    for size in sorted({size for tile in tiles for size in (tile.b_r, tile.b_c) if size > 1}):
        for length in (size - 1, size, size + 1, 3 * size + 7):
            check((length, length), (1, 1), head_dim, dtype=dtype, causal=True)


@pytest.mark.parametrize("lengths", [(0, 3), (3, 0), (0, 0), (1, 1), (1, 40), (40, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_short_sequences(dtype, lengths):
    check(lengths, (2, 1), 64, dtype=dtype, causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_missing_tangents_count_as_zeros(dtype):
    names = ("q", "k", "v", "do", "dlse")
    for given in ((), *itertools.combinations(names, 1), *itertools.combinations(names, 4)):
        call = OnGpu((70, 90), (4, 2), 64, dtype=dtype, causal=True)
        call.direction = {name: call.direction[name] for name in given}
        call.check_jvp()
        call.check_backward_jvp()
        call.check_double_backward()
    call = OnGpu((70, 90), (4, 2), 64, dtype=dtype, causal=True)
    del call.arrays["dlse"]
    call.check_backward_jvp()
    call.check_double_backward()


# ---------------------------------------------------------------------------------------------------------- features


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (dtype, name)
        for dtype, name in itertools.product(DTYPES, ROWS)
        # The gradient of a bias of queries is zero but for rounding errors, which have no bound but in float64.
        if dtype == "float64" or name != "bias of queries"
    ],
)
def test_each_feature(dtype, name):
    """Checks also tangents of biases and sinks, and those of their gradients."""
    for lengths in LENGTHS:
        sizes = {"batch": 2, "num_heads": 4, "seqlen_q": lengths[0], "seqlen_k": lengths[1]}
        check(lengths, (4, 2), 48, dtype=dtype, batch=2, **options_of(name, dtype, sizes))


@pytest.mark.parametrize("head_dim", (64, 192))
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_features_at_once(dtype, head_dim):
    sizes = {"batch": 2, "num_heads": 4, "seqlen_q": 160, "seqlen_k": 190}
    rows = ("window", "softcap", "alibi by batch", "bias of heads", "mask of rows", "padding", "sink", "dropout")
    options = {key: value for row in rows for key, value in options_of(row, dtype, sizes).items()}
    check((160, 190), (4, 2), head_dim, dtype=dtype, batch=2, **options | {"window": (90, 40)})


@pytest.mark.parametrize("name", ready_made(2, 4, 113, 203))
def test_each_function(name):
    case = ready_made(2, 4, 113, 203, wide="float64")[name]
    check((113, 203), (4, 2), 64, batch=2, **case.options)


@pytest.mark.parametrize("has_map", (False, True), ids=("", "map"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_second_derivatives_of_functions_and_maps(dtype, has_map):
    mask = mods.causal(32)
    options = CURVED | {"mask_mod": mask}
    if has_map:
        options["block_mask"] = fa2cupy.block_mask(mask, (), 1, 1, 170, 203, tile=(64, 64))
    check((170, 203), (2, 1), 64, dtype=dtype, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_maps_without_a_function(dtype):
    given = fa2cupy.BlockMask(np.array([[True, False], [False, False], [True, True]]), 330, 250)
    check((330, 250), (2, 1), 64, dtype=dtype, block_mask=given)


# --------------------------------------------------------------------------------------------------- packed sequences

SEQUENCES = ((5, 9), (0, 3), (150, 70), (4, 0), (1, 200), (0, 0), (1, 1), (128, 128))


def packed(dtype: str, **options) -> OnGpu:
    """Returns a call whose rows of no sequence, which must not affect results, are NaN: the first 3, the last 40."""
    ends_q, ends_k = (np.cumsum([3, *lengths]).astype("int32") for lengths in zip(*SEQUENCES, strict=True))
    offsets = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k}
    call = OnGpu((int(ends_q[-1]) + 40, int(ends_k[-1]) + 40), (4, 2), 64, dtype=dtype, **offsets, **options)
    for arrays in (call.arrays, call.direction):
        for name, ends in {"q": ends_q, "k": ends_k, "v": ends_k, "do": ends_q}.items():
            arrays[name][:3] = arrays[name][ends[-1] :] = np.nan
        arrays["dlse"][:, :3] = arrays["dlse"][:, ends_q[-1] :] = np.nan
    return call


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (60, 30), "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_sequences(dtype, options):
    for more in ({}, {"max_seqlen_q": 150, "max_seqlen_k": 200}):
        call = packed(dtype, **options, **more)
        call.check_jvp()
        call.check_backward_jvp()
        call.check_double_backward()


def test_packed_sequences_with_tangents_of_a_bias_and_a_sink():
    _, keys = (3 + sum(lengths) + 40 for lengths in zip(*SEQUENCES, strict=True))
    bias, sink = numbers((len(SEQUENCES), 1, 1, keys), "float64"), np.array([0.3, -np.inf, 0.1, 0.2])
    call = packed("float64", bias=bias, sink=sink)
    call.check_jvp()
    call.check_backward_jvp()
    call.check_double_backward()


# ------------------------------------------------------------------------------------------------------- properties


def draw(dtype: str, lengths: tuple[int, int], head_dim: int = 64, heads: tuple[int, int] = (4, 2), **more) -> tuple:
    sizes = {"seqlen_q": lengths[0], "seqlen_k": lengths[1], "num_heads": heads[0], "num_heads_kv": heads[1]}
    return make_inputs(dtype, **sizes, head_dim=head_dim, xp=cp, **more)


def all_results(inputs: tuple, direction: tuple, **options) -> tuple:
    """Returns the results of the three functions, each from those of the one before."""
    (q, k, v, do), (qt, kt, vt, dot) = inputs, direction
    score = {name: x for name, x in options.items() if name not in ("deterministic", "return_dsink")}
    o, lse, ot, lset = fa2cupy.jvp(q, k, v, qt, kt, vt, **score)
    tangents = fa2cupy.backward_jvp(q, k, v, o, lse, do, qt, kt, vt, ot, lset, dot, **options)
    return (o, lse, ot, lset, *tangents, *fa2cupy.double_backward(q, k, v, o, lse, do, qt, kt, vt, **options))


def inner(some: tuple, others: tuple) -> float:
    return sum(float((x.astype("float64") * y).sum()) for x, y in zip(some, others, strict=True))


@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-13)])
def test_second_derivatives_are_symmetric(dtype, tolerance, causal):
    """Checks <u, H w> = <w, H u> for the Hessian of <o, do>, against the length of what is multiplied."""
    inputs = draw(dtype, (300, 420))
    u, w = (draw(dtype, (300, 420), seed=seed)[:3] for seed in (1, 2))
    of_u, of_w = (all_results(inputs, (*x, None), causal=causal, softcap=2.0)[4:7] for x in (u, w))
    length = (inner(u, u) * inner(of_w, of_w)) ** 0.5
    assert abs(inner(u, of_w) - inner(w, of_u)) <= tolerance * length


def test_the_double_backward_is_the_tangent_of_the_backward():
    inputs, direction = draw("float64", (200, 333)), draw("float64", (200, 333), seed=1)
    _, _, ot, _, *results = all_results(inputs, (*direction[:3], None), causal=True)
    for one, other in zip(results[3:], (*results[:3], ot), strict=True):
        assert float(abs(one - other).max()) <= 1e-12


def test_tangents_are_differences():
    """Checks forward and backward on the GPU, moved along the direction and back."""
    inputs, direction, step = draw("float64", (130, 170)), draw("float64", (130, 170), seed=1), 1e-5

    def gradients(distance: float) -> tuple:
        q, k, v, do = (x + distance * xt for x, xt in zip(inputs, direction, strict=True))
        o, lse = fa2cupy.forward(q, k, v, softcap=1.5)
        return (o, lse, *fa2cupy.backward(q, k, v, o, lse, do, softcap=1.5))

    found = all_results(inputs, direction, softcap=1.5)[2:7]
    for one, ahead, behind in zip(found, gradients(step), gradients(-step), strict=True):
        assert float(abs(one - (ahead - behind) / (2 * step)).max()) <= 1e-8


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_give_exact_zeros(dtype):
    inputs = draw(dtype, (200, 170))
    zeros = tuple(map(cp.zeros_like, inputs))
    for direction in (zeros, (None,) * 4):
        assert not any(x.any() for x in all_results(inputs, direction, causal=True, softcap=2.0)[2:])


@pytest.mark.parametrize("name", ("backward_jvp", "double_backward"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_keys_contribute_nothing_even_if_they_have_nan(dtype, name):
    OnGpu((150, 142), (2, 1), 64, dtype=dtype, causal=True).check_hidden_rows(name)
    # A bias without axes that its gradient is summed over: sums of several blocks have another order in each run.
    bias = np.where((np.arange(150) < 8)[:, None], -np.inf, numbers((1, 2, 150, 142), "float64"))
    OnGpu((150, 142), (2, 1), 64, dtype=dtype, bias=bias).check_hidden_rows(name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_keys_have_no_tangents_even_if_they_have_nan(dtype):
    call = OnGpu((150, 142), (2, 1), 64, dtype=dtype, causal=True)
    for arrays in (call.arrays, call.direction):
        arrays["q"][:, :8] = np.nan
    _, _, ot, lset = call.jvp()
    assert not ot[:, :8].any() and not lset[..., :8].any()
    assert np.isfinite(ot).all() and np.isfinite(lset).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", (64, 256))
def test_results_can_be_repeated_bit_for_bit(dtype, head_dim):
    """Checks also that `deterministic` takes the same kernels: all sums are of one block each."""
    inputs, direction = (draw(dtype, (700, 900), head_dim, seed=seed) for seed in (0, 1))
    options = {"causal": True, "sink": cp.asarray(numbers((4,), accumulator(dtype))), "return_dsink": True}
    first = all_results(inputs, direction, **options)
    for more in ({}, {"deterministic": True}):
        for one, other in zip(first, all_results(inputs, direction, **options, **more), strict=True):
            assert one.tobytes() == other.tobytes()


# ----------------------------------------------------------------------------------------------------------- arrays


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_in_arrays_of_the_caller(dtype, name):
    call = OnGpu((90, 110), (4, 2), 64, dtype=dtype, causal=True)
    wanted = getattr(call, name)()
    for gaps in range(len(wanted)):
        out = [cp.full_like(cp.asarray(x), cp.nan) for x in wanted]
        out[gaps] = cp.stack([out[gaps]] * 2, axis=-1)[..., 0]
        found = getattr(call, name)(out=tuple(out))
        for one, given, other in zip(found, out, wanted, strict=True):
            assert one is given
            np.testing.assert_array_equal(one.get(), other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_and_ranks_agree(dtype):
    inputs, direction = draw(dtype, (90, 110)), draw(dtype, (90, 110), seed=1)
    wanted = all_results(inputs, direction, causal=True)
    heads_first = (tuple(x.swapaxes(1, 2) for x in arrays) for arrays in (inputs, direction))
    for one, other in zip(all_results(*heads_first, causal=True, layout="bhsd"), wanted, strict=True):
        assert cp.array_equal(one.swapaxes(1, 2) if one.ndim == 4 else one, other)
    single = (tuple(x[0] for x in arrays) for arrays in (inputs, direction))
    for one, other in zip(all_results(*single, causal=True), wanted, strict=True):
        assert cp.array_equal(one, other[0])


@pytest.mark.parametrize("is_packed", (False, True), ids=("", "packed"))
def test_results_that_are_given_are_not_computed_again(is_packed):
    inputs, direction = draw("float64", (300, 300)), draw("float64", (300, 300), seed=1)
    options: dict = {"causal": True}
    if is_packed:
        inputs, direction = (tuple(x[0] for x in arrays) for arrays in (inputs, direction))
        options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), cp.asarray([0, 70, 70, 290], dtype="int32"))
    arrays = (*inputs[:3], *direction[:3])
    o, lse, *wanted = fa2cupy.jvp(*arrays, **options)
    out = tuple(cp.full_like(x, cp.nan) for x in wanted)
    found = fa2cupy.jvp(*arrays, o=o, lse=lse, out=(None, None, *out), **options)
    assert all(one is other for one, other in zip(found, (o, lse, *out), strict=True))
    for one, other in zip(out, wanted, strict=True):
        cp.testing.assert_allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("is_packed", (False, True), ids=("", "packed"))
def test_calls_are_captured_in_a_graph(is_packed):
    """Code that reads offsets or waits for the device could not be captured."""
    inputs, direction = draw("float32", (300, 300)), draw("float32", (300, 300), seed=1)
    options: dict = {"causal": True}
    if is_packed:
        inputs, direction = (tuple(x[0] for x in arrays) for arrays in (inputs, direction))
        options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), cp.asarray([0, 70, 70, 290], dtype="int32"))
    (q, k, v, do), (qt, kt, vt, dot) = inputs, direction
    wanted = all_results(inputs, direction, **options)
    out = tuple(cp.full_like(x, cp.nan) for x in wanted)
    cp.cuda.Device().synchronize()  # what the graph reads and overwrites was queued in another stream
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        o, lse, ot, lset = fa2cupy.jvp(q, k, v, qt, kt, vt, **options, out=out[:4])
        fa2cupy.backward_jvp(q, k, v, o, lse, do, qt, kt, vt, ot, lset, dot, **options, out=out[4:7])
        fa2cupy.double_backward(q, k, v, o, lse, do, qt, kt, vt, **options, out=out[7:])
        graph = stream.end_capture()
        graph.launch()
    stream.synchronize()
    assert all(cp.array_equal(one, other) for one, other in zip(out, wanted, strict=True))


@pytest.mark.large
def test_sizes_beyond_32_bit_offsets():
    """More than 2**31 elements in arrays of query rows; the last rows have the bits of a call of few rows."""
    heads, head_dim, seqlen_k, few = 16, 128, 40, 128
    seqlen_q = 2**31 // (heads * head_dim) + 100
    if cp.cuda.Device().mem_info[0] < 60 * 2**30:
        pytest.skip("not enough free device memory")
    (q_few, k, v, _), (qt_few, kt, vt, _) = (
        draw("float32", (few, seqlen_k), head_dim, (heads, heads), seed=seed) for seed in (0, 1)
    )
    q, qt = (cp.tile(x, (1, seqlen_q // few + 1, 1, 1))[:, :seqlen_q] for x in (q_few, qt_few))
    assert q.size > 2**31
    last = slice(seqlen_q - few, None)
    some_q, some_qt = (cp.ascontiguousarray(x[:, last]) for x in (q, qt))
    o, lse, ot, lset = fa2cupy.jvp(q, k, v, qt, kt, vt)
    wanted = fa2cupy.jvp(some_q, k, v, some_qt, kt, vt)
    for one, other in zip((o[:, last], lse[..., last], ot[:, last], lset[..., last]), wanted, strict=True):
        assert cp.array_equal(one, other)
    # qt is also do, and the gradient for it overwrites ot, so that memory suffices.
    gq, _, _, gdo = fa2cupy.double_backward(q, k, v, o, lse, qt, qt, kt, vt, out=(None, None, None, ot))
    wanted = fa2cupy.double_backward(some_q, k, v, *wanted[:2], some_qt, some_qt, kt, vt)
    assert cp.array_equal(gq[:, last], wanted[0]) and cp.array_equal(gdo[:, last], wanted[3])
    cp.get_default_memory_pool().free_all_blocks()
