"""Functions with which kernels take long to compile or spill registers: users are told, or refused before minutes."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
from support.recorded_warnings import warnings_of
from support.traced_cases import ready_made

import fa2cupy
from fa2cupy import TileConfig, UnsupportedProblemError, mods, precompile
from fa2cupy.families.simt import SIMT
from fa2cupy.functions.tracing import trace
from fa2cupy.jit import cache, costs
from fa2cupy.jit.cache import cached_kernel
from fa2cupy.jit.compiler import compile_source
from fa2cupy.jit.source import render_kernel
from fa2cupy.jit.spec import KernelSpec
from fa2cupy.problem.function_checks import bound_function
from fa2cupy.testing import make_inputs


def sines(number):
    def nested_sines(s, b, h, q, k):
        for _ in range(number):
            s = np.sin(s)
        return s

    return nested_sines


def remainders(number):
    def hidden_by_remainders(b, h, q, k):
        visible = q >= k
        for divisor in range(3, number + 3):
            visible = visible & np.where((q * k + divisor) % divisor == 1, q < k, k < 100)
        return visible

    return hidden_by_remainders


def spec_of(function, arrays=(), operation="forward", features=(), role="score_mod") -> KernelSpec:
    own = (bound_function(role, function, arrays),)
    return KernelSpec(
        operation, SIMT, "sm_80", "float32", 64, False, TileConfig(16, 16, 4), (role, *features), functions=own
    )


ONE = {"archs": "sm_90", "dtypes": "float16", "head_dims": 64, "causal": False, "methods": ()}


@pytest.mark.parametrize(
    ("role", "function", "name"),
    [("score_mod", sines(50), "nested_sines"), ("mask_mod", remainders(1000), "hidden_by_remainders")],
)
def test_what_would_take_minutes_is_refused_and_runs_on_numpy(fake_compiler, role, function, name):
    with pytest.raises(UnsupportedProblemError) as caught:
        precompile(**ONE, **{role: function})
    text = str(caught.value)
    assert text.startswith(f"{role} ({__file__}:") and f"def {name}" in text
    assert "would take minutes to compile" in text and "as an array in score_args or mask_args" in text
    assert not fake_compiler
    q, k, v, do = make_inputs("float64", batch=1, seqlen_q=3, seqlen_k=4, num_heads=1, head_dim=4)
    o, backprop = fa2cupy.attention(q, k, v, **{role: function})
    assert np.isfinite(o).all() and all(np.isfinite(x).all() for x in backprop(do))


def test_gradients_count_where_a_kernel_has_them(fake_compiler):
    def function(s, b, h, q, k, t):
        for number in range(15):
            s = s + np.sin(t[q, k] * number) * t[k, number]
        return s

    arrays = (np.zeros((4, 4), "float32"),)
    found = [costs._cost(spec_of(function, arrays, *more)) for more in ((), ("backward",))]
    found += [costs._cost(spec_of(function, arrays, "backward", ("dscore_args",)))]
    assert 6000 < found[0] <= found[1] < 7000 < found[2]
    with_one = lambda s, b, h, q, k: np.sin(s)  # noqa: E731
    assert [costs._cost(spec_of(with_one, (), one)) for one in ("forward", "backward")] == [400, 800]


def test_a_long_program_is_refused_by_its_number_of_operations(fake_compiler):
    def deep(s, b, h, q, k):
        for number in range(3000):
            s = s * 1.5 + number
        return s

    with pytest.raises(UnsupportedProblemError, match=r"2\.4 times the largest number of operations"):
        cached_kernel(spec_of(deep))
    assert "score_value" in trace("score_mod", deep, ()).text


@pytest.mark.parametrize("name", ready_made(1, 1, 8, 8))
def test_ready_made_functions_are_compiled_without_a_word(fake_compiler, name):
    own = ready_made(1, 1, 8, 8)[name]
    features = ("dscore_args",) if own.role == "score_mod" and own.arrays and own.arrays[0].dtype.kind == "f" else ()
    spec = spec_of(own.function, own.arrays, "backward", features, own.role)
    assert warnings_of(lambda: cached_kernel(spec)) == []
    assert fake_compiler == [spec]


def test_what_depends_on_distances_alone_costs_less(fake_compiler):
    def waves(s, b, h, q, k, t):
        return s + sum(t[h, number] * np.sin((q - k) * (0.1 * number)) for number in range(1, 17))

    table = (np.zeros((2, 17), "float32"),)
    assert len(warnings_of(lambda: cached_kernel(spec_of(waves, table, "backward")))) == 1
    buckets = (np.zeros((2048, 2), "float32"),)
    assert warnings_of(lambda: cached_kernel(spec_of(mods.t5_relative(2048, 4096), buckets))) == []


def test_what_takes_long_is_warned_of_once(fake_compiler):
    spec = spec_of(sines(2), (), "backward")
    found = warnings_of(lambda: [cached_kernel(spec) for _ in range(3)])
    cache._kernels.clear()  # it is on disk
    found += warnings_of(lambda: cached_kernel(spec))
    (text,) = found
    assert text.startswith(f"score_mod ({__file__}:") and "def nested_sines" in text
    assert "the kernel of backward costs 0.5 s to compile, 24 registers, 0 bytes spilled; compute what" in text


@pytest.mark.parametrize(("spilled", "count"), [(2048, 0), (2049, 1)])
@pytest.mark.parametrize("from_disk", [False, True])
def test_spills_are_warned_of_whether_the_kernel_is_new_or_on_disk(
    fake_compiler, monkeypatch, spilled, count, from_disk
):
    spec = spec_of(lambda s, b, h, q, k: 1.5 * s)
    original = cache.compile_source
    monkeypatch.setattr(
        cache, "compile_source", lambda source: dataclasses.replace(original(source), spill_bytes=spilled)
    )
    if from_disk:
        warnings_of(lambda: cached_kernel(spec))
        cache._kernels.clear()
        costs.warn_once.__globals__["_warned_about"].clear()
    found = warnings_of(lambda: cached_kernel(spec))
    assert len(found) == count and all(f"{spilled} bytes spilled" in text for text in found)
    plain = dataclasses.replace(spec, features=(), functions=())
    assert warnings_of(lambda: cached_kernel(plain)) == [], "kernels without functions are the package's own"


def test_the_log_names_the_function_of_a_kernel(caplog):
    pytest.importorskip("cupy", reason="kernels are compiled by the NVRTC that CuPy loads", exc_type=ImportError)
    own = (bound_function("mask_mod", remainders(1), ()),)
    tile = TileConfig(16, 16, 8)
    spec = KernelSpec("tile_states", None, "sm_80", "float32", 1, False, tile, ("mask_mod",), functions=own)
    with caplog.at_level(logging.INFO, logger="fa2cupy"):
        kernel = compile_source(render_kernel(spec))
    (record,) = caplog.records
    text = record.getMessage()
    assert f"s: {kernel.registers} registers, {kernel.spill_bytes} bytes spilled, with mask_mod ({__file__}:" in text
    assert text.endswith("def hidden_by_remainders(b, h, q, k):)")
