"""Mask functions that compute what ``causal`` and ``window`` do: calls run as with the keyword."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cupy")

from support.fake_cupy import place
from support.fake_gpu import backward, fake_gpu, forward
from support.simulated_problems import HOPPER
from support.simulator import simulated_gpu

import fa2cupy
from fa2cupy import BlockMask, mods
from fa2cupy.plan.specs import default_specs
from fa2cupy.testing import Expectation, make_inputs

pytestmark = pytest.mark.simulated

#: The queries and keys of calls, and the key that query 0 is aligned with.
QUERIES, KEYS = 300, 340
DIAGONAL = KEYS - QUERIES
#: Makers of functions by a diagonal, and keywords that compute the same.
BANDS = {
    "causal": (mods.causal, {"causal": True}),
    "window": (lambda diagonal: mods.sliding_window(70, 5, diagonal), {"window": (70, 5)}),
    "another diagonal": (lambda diagonal: mods.sliding_window(70, 5, diagonal - 3), {"window": (73, 2)}),
    "a function of its own": (lambda diagonal: lambda b, h, q, k: abs(q + diagonal - k) < 10, {"window": (9, 9)}),
    "all behind": (lambda diagonal: lambda b, h, q, k: k > q + diagonal - 1, {"window": (0, None)}),
}
CALLS = {
    "forward": (forward, {}),
    "single_pass": (backward, {"method": "single_pass"}),
    "two_pass": (backward, {"method": "two_pass"}),
    "deterministic": (backward, {"deterministic": True}),
}


def arrays_of(call: str, seqlen_q=QUERIES, seqlen_k=KEYS):
    """Returns the arrays of a forward, or of a backward."""
    sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "num_heads": 4, "num_heads_kv": 2, "head_dim": 64}
    q, k, v, do = map(place, make_inputs("bfloat16", **sizes))
    return (q, k, v) if call == "forward" else (q, k, v, q, place(np.zeros((1, 4, seqlen_q), "float32")), do)


def specs_of(monkeypatch, call: str, arrays, *calls):
    """Returns the kernels that each of some calls launches, which differ in their keywords."""
    function, options = CALLS[call]
    found = []
    with fake_gpu(monkeypatch, HOPPER, lambda launch: None) as launched:
        for keywords in calls:
            del launched[:]
            function(*arrays, **options, **keywords)
            found.append([stage.spec for stage in launched])
    return found


def map_of(function, seqlen_q=QUERIES, seqlen_k=KEYS):
    """Returns the map of a function, whose states nothing reads."""
    program = fa2cupy.block_mask(function, (), 1, 1, 1, 1).program
    shape = (1, 1, -(-seqlen_q // 128), -(-seqlen_k // 128))
    return BlockMask.of_states(place(np.ones(shape, "uint8")), seqlen_q, seqlen_k, (128, 128), program)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("band", BANDS)
def test_kernels_are_those_of_the_keyword(monkeypatch, band, call):
    maker, keyword = BANDS[band]
    function, arrays = maker(DIAGONAL), arrays_of(call)
    others = {"softcap": 2.0, "sink": place(np.zeros(4, "float32"))}
    sparse = map_of(function)
    for more in ({}, others):
        wanted, *found = specs_of(
            monkeypatch, call, arrays,
            *({**own, **more} for own in (
                keyword, {"mask_mod": function}, {"mask_mod": function, "block_mask": sparse}, {"block_mask": sparse},
            )),
        )  # fmt: skip
        assert found == [wanted] * 3
        assert not any(spec.functions for spec in wanted)


@pytest.mark.parametrize("band", BANDS)
def test_other_calls_evaluate_the_function(monkeypatch, band):
    maker, _ = BANDS[band]
    function, (q, k, v) = maker(DIAGONAL), arrays_of("forward")
    own = {"mask_mod": function}
    tiles = BlockMask.of_states(place(np.full((1, 1, 3, 3), 2, "uint8")), QUERIES, KEYS, (128, 128), None)
    calls = (
        {"mask_mod": lambda b, h, q, k: k < q + DIAGONAL},
        {"mask_mod": lambda b, h, q, k: k <= q + DIAGONAL + 1},
        {"mask_mod": lambda b, h, q, k: k > q + DIAGONAL},
        {"mask_mod": lambda b, h, q, k: function(b, h, q, k) | (k == 0)},
        {**own, "block_mask": tiles},
        {**own, "causal": True},
        {**own, "window": (3, None)},
    )
    for specs in specs_of(monkeypatch, "forward", (q, k, v), *calls):
        assert any("mask_mod" in spec.features for spec in specs)
    offsets = {f"cu_seqlens_{side}": place(np.array([0, QUERIES], "int32")) for side in "qk"}
    packed = tuple(x[0] for x in arrays_of("forward", QUERIES, QUERIES))
    (specs,) = specs_of(monkeypatch, "forward", packed, {"mask_mod": maker(0), **offsets})
    assert any("mask_mod" in spec.features for spec in specs)


@pytest.mark.parametrize("band", BANDS)
def test_calls_have_kernels_that_are_compiled_ahead(monkeypatch, band):
    function = BANDS[band][0](DIAGONAL)
    ahead = {"features": ("block_mask",), "functions": {"mask_mod": function}}
    for call, method in (("forward", None), ("single_pass", "single_pass")):
        specs = default_specs(HOPPER, "bfloat16", 64, False, method, **ahead)
        for lengths in ((QUERIES, KEYS), (QUERIES, QUERIES)):  # some of the latter have the function
            arrays = arrays_of(call, *lengths)
            (found,) = specs_of(monkeypatch, call, arrays, {"block_mask": map_of(function, *lengths)})
            assert set(found) <= set(specs)


@pytest.mark.parametrize("lengths", [(QUERIES, KEYS), (200, 150)], ids=["more keys", "fewer keys"])
@pytest.mark.parametrize("band", BANDS)
def test_results(monkeypatch, band, lengths):
    maker, _ = BANDS[band]
    function = maker(lengths[1] - lengths[0])
    q, k, v, do = make_inputs("bfloat16", seqlen_q=lengths[0], seqlen_k=lengths[1], num_heads=2, head_dim=64)
    with simulated_gpu(monkeypatch, HOPPER) as launched:
        arrays = tuple(map(place, (q, k, v)))
        sparse = fa2cupy.block_mask(function, (), 1, 1, *lengths, like=arrays[0])
        del launched[:]
        o, lse = forward(*arrays, block_mask=sparse)
        gradients = backward(*arrays, o, lse, place(do), mask_mod=function, block_mask=sparse, method="single_pass")
    assert not any({"mask_mod", "block_mask"} & {*stage.spec.features} for stage in launched)
    results = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    Expectation(q, k, v, do, mask_mod=function).check(o=o, lse=lse, **results)
