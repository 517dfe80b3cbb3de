"""On a GPU: float32 on tensor cores, ``precision="split"``."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from support.feature_cases import ROWS, numbers, options_of
from support.float32_data import KINDS, MIXTURES, check_promise, data, mixture, orders_of

import fa2cupy
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.operations import METHODS
from fa2cupy.testing import Expectation, make_inputs

cp = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

GRADIENTS = ("dq", "dk", "dv")
LENGTHS = ((1, 1), (1, 147), (64, 64), (113, 203), (512, 256), (1023, 1024), (799, 3), (2048, 2048))
HEADS = ((2, 2), (4, 2), (3, 1))


@pytest.fixture(scope="module", autouse=True)
def _device():
    if DeviceInfo.current().compute_capability != 90:
        pytest.skip("needs a GPU of compute capability 9.0")
    fa2cupy.precompile(dtypes="float32", head_dims=(32, 59, 64, 96, 128), family="sm90")
    fa2cupy.precompile(dtypes="float32", head_dims=(160, 250, 256), methods="two_pass", family="sm90")


def methods_of(head_dim: int) -> tuple[str, ...]:
    return ("two_pass",) if head_dim > 128 else tuple(METHODS)


def run(inputs: tuple, *, dlse=None, **options) -> None:
    """All results, written into arrays of NaN; the gradients by each method."""
    q, k, v, do = inputs
    expected = Expectation(q, k, v, do, dlse=dlse, **options)
    how = {**options, "family": "sm90"}
    o, lse = fa2cupy.forward(q, k, v, out=expected.unwritten("o", "lse"), **how)
    for method in methods_of(q.shape[-1]):
        # Two passes alone give dbias, and would run for it in one pass, too.
        given = [name for name in ("bias", "sink") if name in options and (name, method) != ("bias", "single_pass")]
        more = {f"return_d{name}": True for name in given}
        names = (*GRADIENTS, *(f"d{name}" for name in given))
        out = expected.unwritten(*names)
        gradients = fa2cupy.backward(q, k, v, o, lse, do, dlse=dlse, out=out, method=method, **more, **how)
        results = {"o": o, "lse": lse, **dict(zip(names, gradients, strict=True))}
        expected.check(spec=f"split, {method}", **results)


def draw(lengths: tuple[int, int], heads: tuple[int, int], head_dim: int, batch: int = 2, **options) -> tuple:
    sizes = dict(zip(("seqlen_q", "seqlen_k", "num_heads", "num_heads_kv"), (*lengths, *heads), strict=True))
    return make_inputs("float32", batch=batch, head_dim=head_dim, xp=cp, **sizes, **options)


@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("head_dim", (32, 59, 64, 96, 128, 160, 250, 256))
def test_every_head_dim(head_dim, lengths, causal):
    run(draw(lengths, HEADS[head_dim % 3], head_dim), causal=causal)


@pytest.mark.parametrize("layout", ("bshd", "bhsd"))
@pytest.mark.parametrize("heads", HEADS, ids=("mha", "gqa", "mqa"))
@pytest.mark.parametrize("head_dim", (64, 256))
def test_head_groups_in_both_layouts(head_dim, heads, layout):
    run(draw((260, 390), heads, head_dim, batch=3, layout=layout), layout=layout, causal=True)


@pytest.mark.parametrize("name", [name for name in ROWS if not name.startswith("causal")])
@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_each_feature(head_dim, name):
    sizes = {"batch": 2, "num_heads": 4, "seqlen_q": 300, "seqlen_k": 430}
    given = options_of(name, "float32", sizes)
    if name == "alibi by batch":  # slopes of 1 make scores of 400, whose rounding alone is an error of 3e-5
        given["alibi_slopes"] *= np.float32(0.1)
    options = {key: cp.asarray(x) if isinstance(x, np.ndarray) else x for key, x in given.items()}
    dlse = cp.asarray(numbers((2, 4, 300), "float32"))
    run(draw((300, 430), (4, 2), head_dim), dlse=dlse, **options)


@pytest.mark.parametrize("head_dim", (64, 256))
def test_packed_sequences(head_dim):
    offsets = [cp.asarray(np.cumsum([3, *lengths]), "int32") for lengths in ((5, 0, 190, 4, 700), (9, 3, 150, 0, 650))]
    rows = [int(ends[-1]) + 2 for ends in offsets]
    inputs = tuple(x[0] for x in draw((rows[0], rows[1]), (4, 2), head_dim, batch=1))
    run(inputs, causal=True, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1])


@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("rows", (65, 128, 1000, 4096))
@pytest.mark.parametrize(("method", "head_dim"), [(name, size) for size in (64, 128, 256) for name in methods_of(size)])
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_those_of_float32(method, kind, head_dim, rows, causal):
    inputs = tuple(map(cp.asarray, data(kind, rows, head_dim)))
    q, k, v, do = inputs
    o, lse = fa2cupy.forward(q, k, v, causal=causal, precision="split")
    gradients = fa2cupy.backward(q, k, v, o, lse, do, causal=causal, precision="split", method=method)
    results = {"o": o, **dict(zip(GRADIENTS, gradients, strict=True))}
    if kind == "subnormal":  # whose products with anything small are nothing in float32
        results = {name: results[name] for name in ("o", "dv")}
    check_promise(inputs, results, causal, orders_of(kind))


@pytest.mark.parametrize("turn", range(12))
def test_errors_are_those_of_float32_for_mixtures(turn):
    """Drawn by hypothesis, and computed as a caller has it who says nothing. A turn draws its own, so that several can
    run at a time."""

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


@pytest.mark.parametrize(("method", "head_dim"), [(name, size) for size in (64, 256) for name in methods_of(size)])
@pytest.mark.parametrize("value", (np.inf, np.nan))
@pytest.mark.parametrize("name", ("q", "k", "v", "do"))
def test_infinities_and_nan_come_out_as_of_ieee_arithmetic(name, value, method, head_dim):
    inputs = dict(zip(("q", "k", "v", "do"), draw((260, 390), (4, 2), head_dim), strict=True))
    inputs[name][1, 200, -1, 7] = value
    q, k, v, do = inputs.values()
    results = []
    for precision in ("split", "ieee"):
        o, lse = fa2cupy.forward(q, k, v, causal=True, precision=precision)
        how = {"causal": True, "precision": precision, "method": method if precision == "split" else "two_pass"}
        results.append((o, lse, *fa2cupy.backward(q, k, v, o, lse, do, **how)))
    for split, ieee in zip(*results, strict=True):
        assert (cp.isnan(split) == cp.isnan(ieee)).all() and (cp.isinf(split) == cp.isinf(ieee)).all()


@pytest.mark.parametrize("head_dim", (128, 256))
def test_results_are_the_same_in_every_run(head_dim):
    q, k, v, do = draw((1000, 1100), (4, 2), head_dim)
    first = None
    for _ in range(5):
        o, lse = fa2cupy.forward(q, k, v, causal=True, precision="split")
        how = {"causal": True, "precision": "split"}
        by_default = fa2cupy.backward(q, k, v, o, lse, do, **how)  # whose dq is added up by atomics, up to 128
        results = (o, lse, *by_default[1:], *fa2cupy.backward(q, k, v, o, lse, do, deterministic=True, **how))
        first = first or results
        assert all((x == y).all() for x, y in zip(first, results, strict=True))
