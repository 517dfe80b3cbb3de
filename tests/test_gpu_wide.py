"""On a GPU: head dimensions beyond 256 against the float64 reference."""

from __future__ import annotations

import numpy as np
import pytest
from support.feature_cases import extras, gradient_names, options_of
from support.traced_cases import on_gpu

import fa2cupy
from fa2cupy import TileConfig
from fa2cupy.testing import Expectation, make_inputs

cp = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

HALF = ("float16", "bfloat16")
PAIRS = ((512, 512), (384, 384), (320, 264), (512, 256), (64, 512), (509, 301))
#: Names of `feature_cases.options_of`.
FEATURES = (
    ("window", "softcap", "alibi by batch", "sink"),
    ("mask of rows", "padding", "dropout"),
    ("bias of heads",),
    ("mask of whole rows",),
)


def check(inputs: tuple, num_splits: int | None = None, **options) -> None:
    """Checks the results of the forward and of the backward, by each method that has kernels."""
    q, k, v, do = inputs
    expected = Expectation(*inputs, **options)
    o, lse = fa2cupy.forward(q, k, v, out=expected.unwritten("o", "lse"), num_splits=num_splits, **options)
    expected.check(o=o, lse=lse)
    more, is_half = extras(options), q.dtype.name in HALF
    methods = ("two_pass",) if is_half else ("single_pass", "two_pass")
    for method in methods:
        shares = num_splits if is_half else None
        gradients = fa2cupy.backward(q, k, v, o, lse, do, method=method, num_splits=shares, **more, **options)
        expected.check(spec=method, **dict(zip(gradient_names(options, more), gradients, strict=True)))


def draw(dtype: str, lengths: tuple[int, int], pair: tuple[int, int], **sizes) -> tuple:
    sizes = {"batch": 2, "num_heads": 4, "num_heads_kv": 2, **sizes}
    rows = {"seqlen_q": lengths[0], "seqlen_k": lengths[1]}
    return make_inputs(dtype, head_dim=pair[0], head_dim_v=pair[1], **rows, **sizes, xp=cp)


@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("dtype", (*HALF, "float32", "float64"))
def test_plain(dtype, pair, causal):
    for lengths in ((300, 217), (129, 513)):
        check(draw(dtype, lengths, pair), causal=causal)
        if dtype in HALF:
            check(draw(dtype, lengths, pair, batch=1), num_splits=3, causal=causal)


@pytest.mark.parametrize("names", FEATURES, ids=" ".join)
@pytest.mark.parametrize("pair", [(512, 512), (320, 264)], ids=str)
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_features(dtype, pair, names):
    lengths = (170, 230)
    sizes = {"batch": 2, "num_heads": 4, "seqlen_q": lengths[0], "seqlen_k": lengths[1]}
    given = {key: value for name in names for key, value in options_of(name, dtype, sizes).items()}
    check(draw(dtype, lengths, pair), **on_gpu(given, cp.asarray))


@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_packed_sequences(dtype):
    offsets = [cp.asarray(np.array(ends, "int32")) for ends in ([3, 90, 90, 168], [0, 50, 110, 197])]
    inputs = tuple(x[0] for x in draw(dtype, (170, 200), (512, 320), batch=1))
    check(inputs, causal=True, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1])


@pytest.mark.parametrize("tile", [TileConfig(64, 48, 12, 2), TileConfig(128, 32, 12, 2)], ids=str)
@pytest.mark.parametrize("pair", [(512, 256), (384, 384), (320, 264), (264, 40)], ids=str)
def test_blocks_and_clusters_of_hopper_have_the_same_results_whenever_they_are_called(pair, tile):
    if cp.cuda.Device().compute_capability != "90":
        pytest.skip("a tile of sm90")
    for lengths, causal in (((2000, 1500), False), ((1500, 2000), True), ((700, 129), True), ((3, 5000), False)):
        q, k, v, do = draw("bfloat16", lengths, pair)
        options = {"causal": causal, "config": tile, "family": "sm90", "num_splits": 1}
        o, lse = fa2cupy.forward(q, k, v, **options)
        Expectation(q, k, v, do, causal=causal).check(o=o, lse=lse)
        for _ in range(5):
            assert all(x.tobytes() == y.tobytes() for x, y in zip((o, lse), fa2cupy.forward(q, k, v, **options)))


@pytest.mark.parametrize("pair", [(512, 512), (512, 256), (384, 384), (320, 264), (40, 264)], ids=str)
def test_gradients_of_hopper_have_the_same_results_whenever_they_are_called(pair):
    if cp.cuda.Device().compute_capability != "90":
        pytest.skip("a tile of sm90")
    for lengths, causal in (((2000, 1500), False), ((1500, 2000), True), ((700, 129), True), ((3, 5000), False)):
        q, k, v, do = draw("bfloat16", lengths, pair)
        options = {"causal": causal, "family": "sm90", "method": "two_pass"}
        o, lse = fa2cupy.forward(q, k, v, causal=causal)
        for num_splits in (1, 3):
            gradients = fa2cupy.backward(q, k, v, o, lse, do, num_splits=num_splits, **options)
            Expectation(q, k, v, do, causal=causal).check(**dict(zip(("dq", "dk", "dv"), gradients, strict=True)))
            for _ in range(5):
                again = fa2cupy.backward(q, k, v, o, lse, do, num_splits=num_splits, **options)
                assert all(x.tobytes() == y.tobytes() for x, y in zip(gradients, again, strict=True))


def test_results_are_the_same_bit_for_bit():
    q, k, v, do = draw("bfloat16", (1000, 900), (512, 512))
    first = None
    for _ in range(3):
        o, lse = fa2cupy.forward(q, k, v, causal=True)
        results = [x.tobytes() for x in (o, lse, *fa2cupy.backward(q, k, v, o, lse, do, causal=True))]
        assert first is None or results == first
        first = results
