"""On a GPU: float32 on tensor cores, ``precision="split"``."""

from __future__ import annotations

import numpy as np
import pytest
from common.accuracy import KINDS, MIXTURES, check_promise, data, mixture, orders_of
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from support.feature_cases import HEAD_DIM_PAIRS, METHODS, ROWS, numbers, options_of

import fa2cupy
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.registry import FAMILIES
from fa2cupy.testing import Expectation, make_inputs

cp = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

GRADIENTS = ("dq", "dk", "dv")
LENGTHS = ((1, 1), (1, 147), (64, 64), (113, 203), (512, 256), (1023, 1024), (799, 3), (2048, 2048))
HEADS = ((2, 2), (4, 2), (3, 1))


#: The largest head_dim of the tests of each family.
LARGEST = {"sm90": 256, "sm80": 128}


def methods_of(family: str, head_dim: int) -> tuple[str, ...]:
    return METHODS if family == "sm90" and head_dim <= 128 else ("two_pass",)


def of_families(*head_dims: int) -> pytest.MarkDecorator:
    """Runs a test for each family and each head_dim that it takes."""
    cases = [(family, head_dim) for family in LARGEST for head_dim in head_dims if head_dim <= LARGEST[family]]
    return pytest.mark.parametrize(("family", "head_dim"), cases, indirect=["family"])


def of_methods(*head_dims: int) -> pytest.MarkDecorator:
    """Runs a test for each family, each head_dim that it takes, and each method that they have."""
    cases = [
        (family, method, head_dim)
        for family in LARGEST
        for head_dim in head_dims
        if head_dim <= LARGEST[family]
        for method in methods_of(family, head_dim)
    ]
    return pytest.mark.parametrize(("family", "method", "head_dim"), cases, indirect=["family"])


@pytest.fixture(scope="module")
def family(request) -> str:
    name = request.param
    of_name = (one for one in FAMILIES if one.public_name == name)
    if not any(one.supports("forward", "float32", DeviceInfo.current()) for one in of_name):
        pytest.skip(f"needs a GPU that runs {name}")
    for head_dim in (32, 59, 64, 96, 128, 160, 250, 256):
        if head_dim <= LARGEST[name]:
            fa2cupy.precompile(dtypes="float32", head_dims=(head_dim,), methods=methods_of(name, head_dim), family=name)
    return name


def run(inputs: tuple, family: str, *, dlse=None, **options) -> None:
    """Checks all results, written into arrays of NaN, with gradients by all methods."""
    q, k, v, do = inputs
    expected = Expectation(q, k, v, do, dlse=dlse, **options)
    how = {**options, "family": family}
    o, lse = fa2cupy.forward(q, k, v, out=expected.unwritten("o", "lse"), **how)
    for method in methods_of(family, max(q.shape[-1], v.shape[-1])):
        # Only two passes give dbias; one pass would run them for it.
        given = [name for name in ("bias", "sink") if name in options and (name, method) != ("bias", "single_pass")]
        more = {f"return_d{name}": True for name in given}
        names = (*GRADIENTS, *(f"d{name}" for name in given))
        out = expected.unwritten(*names)
        gradients = fa2cupy.backward(q, k, v, o, lse, do, dlse=dlse, out=out, method=method, **more, **how)
        results = {"o": o, "lse": lse, **dict(zip(names, gradients, strict=True))}
        expected.check(spec=f"{family}, {method}", **results)


def draw(lengths: tuple[int, int], heads: tuple[int, int], head_dim: int, batch: int = 2, **options) -> tuple:
    sizes = dict(zip(("seqlen_q", "seqlen_k", "num_heads", "num_heads_kv"), (*lengths, *heads), strict=True))
    return make_inputs("float32", batch=batch, head_dim=head_dim, xp=cp, **sizes, **options)


@pytest.mark.parametrize(
    ("family", "pair"),
    [(family, pair) for family, largest in LARGEST.items() for pair in HEAD_DIM_PAIRS if max(pair) <= largest],
    ids=str,
    indirect=["family"],
)
def test_two_head_dims(family, pair):
    for lengths, causal in (((200, 250), True), ((513, 130), False)):
        run(draw(lengths, (4, 2), pair[0], head_dim_v=pair[1]), family, causal=causal)


@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@of_families(32, 59, 64, 96, 128, 160, 250, 256)
def test_every_head_dim(family, head_dim, lengths, causal):
    run(draw(lengths, HEADS[head_dim % 3], head_dim), family, causal=causal)


@pytest.mark.parametrize("layout", ("bshd", "bhsd"))
@pytest.mark.parametrize("heads", HEADS, ids=("mha", "gqa", "mqa"))
@of_families(64, 256)
def test_head_groups_in_both_layouts(family, head_dim, heads, layout):
    run(draw((260, 390), heads, head_dim, batch=3, layout=layout), family, layout=layout, causal=True)


@pytest.mark.parametrize("name", [name for name in ROWS if not name.startswith("causal")])
@of_families(64, 128, 256)
def test_each_feature(family, head_dim, name):
    sizes = {"batch": 2, "num_heads": 4, "seqlen_q": 300, "seqlen_k": 430}
    given = options_of(name, "float32", sizes)
    if name == "alibi by batch":  # slopes of 1 make scores of 400, whose rounding alone is an error of 3e-5
        given["alibi_slopes"] *= np.float32(0.1)
    options = {key: cp.asarray(x) if isinstance(x, np.ndarray) else x for key, x in given.items()}
    dlse = cp.asarray(numbers((2, 4, 300), "float32"))
    run(draw((300, 430), (4, 2), head_dim), family, dlse=dlse, **options)


@of_families(64, 256)
def test_packed_sequences(family, head_dim):
    offsets = [cp.asarray(np.cumsum([3, *lengths]), "int32") for lengths in ((5, 0, 190, 4, 700), (9, 3, 150, 0, 650))]
    rows = [int(ends[-1]) + 2 for ends in offsets]
    inputs = tuple(x[0] for x in draw((rows[0], rows[1]), (4, 2), head_dim, batch=1))
    run(inputs, family, causal=True, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1])


@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("rows", (65, 128, 1000, 4096))
@pytest.mark.parametrize("kind", KINDS)
@of_methods(64, 128, 256)
def test_errors_are_those_of_float32(family, method, kind, head_dim, rows, causal):
    inputs = tuple(map(cp.asarray, data(kind, rows, head_dim)))
    q, k, v, do = inputs
    how = {"causal": causal, "family": family}
    o, lse = fa2cupy.forward(q, k, v, **how)
    gradients = fa2cupy.backward(q, k, v, o, lse, do, method=method, **how)
    results = {"o": o, **dict(zip(GRADIENTS, gradients, strict=True))}
    if kind == "subnormal":  # its products with small numbers are 0 in float32
        results = {name: results[name] for name in ("o", "dv")}
    check_promise(inputs, results, causal, orders_of(kind))


@pytest.mark.parametrize("kind", ("normal", "large scores", "positive"))
def test_one_pass_of_wide_rows_may_follow_a_forward_on_tensor_cores(kind):
    """CUDA cores compute the backward, with an lse of their own."""
    inputs = tuple(map(cp.asarray, data(kind, 1000, 256)))
    q, k, v, do = inputs
    o, lse = fa2cupy.forward(q, k, v)
    gradients = fa2cupy.backward(q, k, v, o, lse, do, method="single_pass")
    check_promise(inputs, dict(zip(GRADIENTS, gradients, strict=True)), False, orders_of(kind))


@pytest.mark.parametrize("growth", (4, 30, 300))
@pytest.mark.parametrize("heads", ((1, 1), (2, 1)))
def test_one_pass_of_wide_rows_may_follow_large_scores_on_tensor_cores(heads, growth):
    q, k, v, do = draw((200, 700), heads, 256, batch=1)
    k *= cp.linspace(growth, 0.01, 700, dtype="float32")[None, :, None, None]
    o, lse = fa2cupy.forward(q, k, v)
    gradients = fa2cupy.backward(q, k, v, o, lse, do, method="single_pass")
    for head in range(heads[0]):  # dk and dv of a group are sums over its heads
        one = tuple(x[:, :, h : h + 1] for x, h in ((q, head), (k, 0), (v, 0), (do, head)))
        if heads[0] > 1:
            check_promise(one, {"dq": gradients[0][:, :, head : head + 1]}, False)
        else:
            check_promise(one, dict(zip(GRADIENTS, gradients, strict=True)), False)


@pytest.mark.parametrize("growth", (1, 10, 100))
@of_methods(64, 128, 256)
def test_heads_that_only_the_backward_leaves_have_the_errors_of_float32(family, method, head_dim, growth):
    """dO alone has rows that parts do not represent well: CUDA cores compute gradients, with an lse of their own."""
    q, k, v, do = draw((200, 700), (1, 1), head_dim, batch=1)
    do[:, 5:9] *= 1e-5
    inputs = (q, k * cp.linspace(growth, growth / 4, 700, dtype="float32")[None, :, None, None], v, do)
    o, lse = fa2cupy.forward(*inputs[:3], family=family)
    gradients = fa2cupy.backward(*inputs[:3], o, lse, do, method=method, family=family)
    check_promise(inputs, dict(zip(GRADIENTS, gradients, strict=True)), False)


@of_methods(64, 128, 256)
def test_scores_that_keep_growing_leave_the_first_reference(family, method, head_dim):
    """Scores grow from tile to tile (the loop runs from the last key to the first) beyond the first row shift."""
    q, k, v, do = draw((200, 700), (1, 1), head_dim, batch=1)
    inputs = (q, k * cp.linspace(30, 0.01, 700, dtype="float32")[None, :, None, None], v, do)
    o, lse = fa2cupy.forward(*inputs[:3], family=family)
    gradients = fa2cupy.backward(*inputs[:3], o, lse, do, method=method, family=family)
    check_promise(inputs, {"o": o, **dict(zip(GRADIENTS, gradients, strict=True))}, False)


@pytest.mark.parametrize("turn", range(12))
def test_errors_are_those_of_float32_for_mixtures(turn):
    """Checks mixtures drawn by hypothesis, with default options.

    A turn draws its own, so that several can run at a time.
    """

    @seed(turn)
    @settings(max_examples=20, deadline=None, database=None)
    @given(
        how=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in MIXTURES.items()}),
        rows=st.integers(1, 2048),
        head_dim=st.sampled_from((59, 64, 128, 256)),
        causal=st.booleans(),
    )
    def run(how, rows, head_dim, causal):
        inputs = tuple(map(cp.asarray, mixture(turn, rows, head_dim, **how)))
        q, k, v, do = inputs
        o, lse = fa2cupy.forward(q, k, v, causal=causal)
        gradients = fa2cupy.backward(q, k, v, o, lse, do, causal=causal)
        check_promise(inputs, {"o": o, **dict(zip(GRADIENTS, gradients, strict=True))}, causal, orders_of("mixture"))

    run()


@of_methods(64)
@pytest.mark.parametrize("value", (np.inf, np.nan))
@pytest.mark.parametrize("name", ("q", "k", "v", "do"))
def test_infinities_and_nan_come_out_as_of_ieee_arithmetic(name, value, family, method, head_dim):
    inputs = dict(zip(("q", "k", "v", "do"), draw((260, 390), (4, 2), head_dim), strict=True))
    inputs[name][1, 200, -1, 7] = value
    q, k, v, do = inputs.values()
    results = []
    for one in (family, "simt"):
        o, lse = fa2cupy.forward(q, k, v, causal=True, family=one)
        results.append((o, lse, *fa2cupy.backward(q, k, v, o, lse, do, causal=True, family=one, method=method)))
    for split, ieee in zip(*results, strict=True):
        assert (cp.isnan(split) == cp.isnan(ieee)).all() and (cp.isinf(split) == cp.isinf(ieee)).all()


@of_methods(64)
def test_a_head_that_one_call_leaves_is_not_left_by_the_next_one(family, method, head_dim):
    """On two streams, whose marks do not meet."""
    q, k, v, do = draw((260, 390), (4, 2), head_dim)
    small = k.copy()
    small[:, 200, 1] *= np.float32(1e-5)
    options = {"causal": True, "family": family}
    o, lse = fa2cupy.forward(q, k, v, **options)
    dk = fa2cupy.backward(q, k, v, o, lse, do, method=method, **options)[1]
    for stream in (cp.cuda.Stream.null, cp.cuda.Stream(), cp.cuda.Stream.null):
        with stream:
            other, of_other = fa2cupy.forward(q, small, v, **options)
            fa2cupy.backward(q, small, v, other, of_other, do, method=method, **options)
            assert not cp.array_equal(other[:, :, 2:], o[:, :, 2:])
            assert cp.array_equal(fa2cupy.forward(q, k, v, **options)[0], o)
            assert cp.array_equal(fa2cupy.backward(q, k, v, o, lse, do, method=method, **options)[1], dk)


@of_families(128, 256)
def test_results_are_the_same_in_every_run(family, head_dim):
    q, k, v, do = draw((1000, 1100), (4, 2), head_dim)
    first = None
    for _ in range(5):
        how = {"causal": True, "family": family}
        o, lse = fa2cupy.forward(q, k, v, **how)
        results = (o, lse, *fa2cupy.backward(q, k, v, o, lse, do, deterministic=True, **how))
        if "single_pass" in methods_of(family, head_dim):
            results += fa2cupy.backward(q, k, v, o, lse, do, method="single_pass", **how)[1:]
        first = first or results
        assert all((x == y).all() for x, y in zip(first, results, strict=True))
