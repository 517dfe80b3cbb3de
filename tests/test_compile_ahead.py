"""What a call's wait for the compiler is used for: kernels side by side, those of a backward, and a log of it."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import threading

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cupy")

from support.fake_cupy import FakeArray, place
from support.fake_gpu import fake_gpu
from support.feature_cases import numbers

import fa2cupy
from fa2cupy import KernelCompileError, api, closure, mods
from fa2cupy.families.operations import ONE_TILE
from fa2cupy.gpu import calls as gpu_calls
from fa2cupy.gpu import prepared
from fa2cupy.jit import cache
from fa2cupy.jit.cache import cached_kernel, cached_kernels, meanwhile
from fa2cupy.jit.source import KernelSource
from fa2cupy.system.folders import warn_once

BATCH, ROWS, HEADS = 2, 48, 4
TIMEOUT = 60


@pytest.fixture
def compiled(fake_compiler, monkeypatch):
    """The specs that a fake compiler has been called for, by calls on a fake H100 whose arrays are CuPy's."""
    for module in (api, closure):
        monkeypatch.setattr(module, "backend_of", lambda name, array: gpu_calls)
    monkeypatch.setattr(cache, "_cpus", lambda: 3)
    with fake_gpu(monkeypatch, run=lambda launch: None):
        bind = prepared.bind_plan

        def bind_plan(plan, positions):
            cached_kernels(list(dict.fromkeys(stage.spec for stage in plan.stages)))
            return bind(plan, positions)

        monkeypatch.setattr(prepared, "bind_plan", bind_plan)
        yield fake_compiler
        end_ahead()


def end_ahead() -> None:
    """Waits for the threads that compile ahead, and for those of calls that have raised."""
    for thread in threading.enumerate():
        if thread.name.startswith(("fa2cupy-ahead", "ThreadPoolExecutor")):
            thread.join(TIMEOUT)
            assert not thread.is_alive()


def arrays(dtype="float16", head_dim=64, head_dim_v=None, heads_kv=HEADS, shape=(BATCH, ROWS)) -> list[FakeArray]:
    sizes = ((HEADS, head_dim), (heads_kv, head_dim), (heads_kv, head_dim_v or head_dim))
    return [place(numbers((*shape, *size), dtype, n)) for n, size in enumerate(sizes)]


def operations(specs) -> list[str]:
    return [spec.operation for spec in specs]


def refuse(monkeypatch, condition) -> None:
    """Makes the compiler refuse the kernels that fulfil a condition."""
    compile_source = cache.compile_source

    def refusing(source):
        if condition(source.spec):
            raise KernelCompileError("not today")
        return compile_source(source)

    monkeypatch.setattr(cache, "compile_source", refusing)


# --------------------------------------------------------------------------------------------------------- the backward


def rises(score, b, h, q, k):
    return score * 2 + q


def scaled(score, b, h, q, k, scales):
    return score * scales[h]


SCORES = (BATCH, HEADS, ROWS, ROWS)
#: Arrays and keywords of calls.
CALLS = {
    "plain": ({}, {}),
    "causal bfloat16": ({"dtype": ml_dtypes.bfloat16}, {"causal": True}),
    "128 columns": ({"head_dim": 128}, {"deterministic": True}),
    "float32": ({"dtype": "float32"}, {"precision": "split"}),
    "ieee": ({"dtype": "float32"}, {"precision": "ieee"}),
    "float64": ({"dtype": "float64"}, {}),
    "padded": ({"head_dim": 36}, {}),
    "v of its own": ({"head_dim": 64, "head_dim_v": 32}, {}),
    "groups": ({"heads_kv": 2}, {"method": "single_pass"}),
    "two passes": ({}, {"method": "two_pass", "window": (3, 0)}),
    "heads first": ({"shape": (BATCH, HEADS)}, {"layout": "bhsd"}),
    "leading axes": ({"shape": (2, 2, ROWS)}, {}),
    "one sequence": ({"shape": (ROWS,)}, {"num_splits": 1}),
    "family": ({}, {"family": "sm80", "softcap": 3.0}),
    "features": (
        {},
        {
            "bias": numbers(SCORES, "float16"), "return_dbias": True, "sink": numbers((HEADS,), "float32"),
            "return_dsink": True, "dropout_p": 0.5, "seed": 7,
        },
    ),
    "broadcast bias": ({}, {"bias": numbers(SCORES[2:], "float32"), "return_dbias": True}),
    "functions": ({}, {"score_mod": rises, "mask_mod": mods.causal()}),
    "arguments": (
        {},
        {
            "score_mod": scaled, "score_args": (numbers((HEADS,), "float32"),), "return_dscore_args": True,
        },
    ),
    "packed": (
        {"shape": (ROWS,)},
        {"cu_seqlens_q": np.array([0, 9, ROWS], "int32"), "cu_seqlens_k": np.array([0, 9, ROWS], "int32")},
    ),
}  # fmt: skip


def keywords_of(case: str) -> dict:
    def placed(x):
        if isinstance(x, tuple):
            return tuple(map(placed, x))
        return place(x) if isinstance(x, np.ndarray) else x

    return {name: placed(x) for name, x in CALLS[case][1].items()}


@pytest.mark.parametrize("case", CALLS)
def test_the_kernels_that_a_forward_asks_for_are_those_that_its_backward_takes(compiled, case):
    given, keywords = arrays(**CALLS[case][0]), keywords_of(case)
    o, backprop = fa2cupy.attention(*given, **keywords)
    end_ahead()
    ahead = set(compiled)
    assert {"backward", "backward_dq", "backward_both", *ONE_TILE} & set(operations(compiled))
    backprop(place(np.ones_like(o)))
    assert set(compiled) == ahead
    assert len(compiled) == len(ahead)


def test_the_backward_is_compiled_while_the_forward_waits(compiled, monkeypatch):
    compile_source, begun = cache.compile_source, threading.Event()

    def waiting(source):
        if source.spec.operation == "forward":
            assert begun.wait(TIMEOUT)
        begun.set()
        return compile_source(source)

    monkeypatch.setattr(cache, "compile_source", waiting)
    fa2cupy.attention(*arrays())


@pytest.mark.parametrize("cpus", (1, 2))
def test_without_a_free_cpu_the_backward_is_compiled_behind_the_forward(compiled, monkeypatch, cpus):
    compile_source = cache.compile_source

    def slow(source):
        if source.spec.operation == "forward":
            threading.Event().wait(0.2)
        return compile_source(source)

    monkeypatch.setattr(cache, "compile_source", slow)
    monkeypatch.setattr(cache, "_cpus", lambda: cpus)
    fa2cupy.attention(*arrays())
    assert compiled[0].operation == "forward"
    end_ahead()
    assert len(compiled) > 1


def test_only_as_many_kernels_as_there_are_free_cpus_are_compiled_ahead_at_a_time(compiled, monkeypatch):
    started = []
    monkeypatch.setattr(cache.threading.Thread, "start", lambda thread: started.append(thread.name), raising=True)
    monkeypatch.setattr(meanwhile, "specs", lambda: [dataclasses.replace(SPEC, head_dim=8 * n) for n in range(1, 6)])
    for free in (1, 3, 9):
        started.clear()
        cache._compile_ahead(free)
        assert started == ["fa2cupy-ahead"] * min(free, 5)


def test_kernels_that_compile_fast_take_no_cpu_and_come_last(fake_compiler, monkeypatch):
    """Checks three CPUs: a forward with a merge leaves one, on which the long one of three kernels is the first."""
    ahead = [dataclasses.replace(SPEC, operation=name) for name in ("delta", "backward_dq", "convert_dq")]
    begun = []
    monkeypatch.setattr(cache, "_cpus", lambda: 3)
    monkeypatch.setattr(cache, "_compile_left", lambda left: begun.append([*left]))
    monkeypatch.setattr(cache, "render_kernel", lambda spec: KernelSource(spec, spec.operation))
    monkeypatch.setattr(meanwhile, "specs", lambda: ahead)
    cached_kernels([dataclasses.replace(SPEC, operation=name) for name in ("forward", "merge_forward")])
    end_ahead()
    assert [spec.operation for spec in begun[0]] == ["backward_dq", "delta", "convert_dq"]
    assert len(begun) == 1


def test_a_forward_alone_and_a_warm_call_ask_for_nothing(compiled, monkeypatch):
    asked = []
    monkeypatch.setattr(closure, "_kernels_of_backward", lambda *inputs, **keywords: asked.append(inputs) or [])
    given = arrays()
    fa2cupy.forward(*given)
    fa2cupy.attention(*given)
    assert not asked and meanwhile.specs is None
    fa2cupy.attention(*given, causal=True)
    fa2cupy.attention(*given, causal=True)
    assert len(asked) == 1 and meanwhile.specs is None
    with pytest.raises(TypeError):
        fa2cupy.attention(*given[:2], None)
    assert meanwhile.specs is None


def test_kernels_on_disk_are_not_compiled_again(compiled):
    given = arrays()
    fa2cupy.attention(*given)[1](given[0])
    end_ahead()
    once = list(compiled)
    cache._kernels.clear()
    prepared_anew = arrays(shape=(BATCH, ROWS + 1))
    fa2cupy.attention(*prepared_anew)
    end_ahead()
    assert compiled == once


def test_errors_are_those_of_the_backward_and_come_with_it(compiled, monkeypatch):
    refuse(monkeypatch, lambda spec: spec.operation != "forward")
    given = arrays()
    _, backprop = fa2cupy.attention(*given)
    end_ahead()
    with pytest.raises(KernelCompileError, match="not today"):
        backprop(given[0])


def test_a_backward_that_cannot_be_planned_does_not_keep_its_forward_from_running(compiled, monkeypatch):
    def fail(*inputs, **keywords):
        raise fa2cupy.UnsupportedProblemError("no such backward")

    monkeypatch.setattr(gpu_calls, "kernels_of_backward", fail)
    fa2cupy.attention(*arrays())
    assert operations(compiled) == ["forward"]


def test_warnings_of_a_kernel_are_left_to_the_call_that_uses_it(fake_compiler, monkeypatch):
    monkeypatch.setattr(cache, "warn_of_cost", lambda spec, kernel: warn_once(spec, "it costs much"))
    monkeypatch.setattr(meanwhile, "specs", lambda: [SPEC])
    cache._compile_ahead(1)
    end_ahead()
    assert fake_compiler == [SPEC]
    with pytest.warns(UserWarning, match="it costs much"):
        cached_kernel(SPEC)
    assert fake_compiler == [SPEC]


SPEC = cache.KernelSpec("delta", None, "sm_80", "float16", 64, False, fa2cupy.TileConfig(16, 1, 4))


# ------------------------------------------------------------------------------------------------------------ processes

INSIDE = """
import ctypes, threading
from fa2cupy.jit import compiler

entered = threading.Event()

def work():
    with compiler._in_nvrtc:
        entered.set()
        threading.Event().wait()

ctypes.CDLL(None).on_exit(ctypes.CDLL(None).abort, None)  # as destructors below a thread do
threading.Thread(target=work, daemon=True).start()
entered.wait()
print("the end", end="")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only there libraries are destroyed below running threads")
def test_a_process_that_ends_while_a_thread_compiles_neither_waits_nor_crashes(run_python):
    assert run_python(INSIDE).stdout == "the end"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_child_that_is_forked_meanwhile_gets_the_kernel(fake_compiler, monkeypatch):
    compile_source, begun = cache.compile_source, threading.Event()

    def slow(source):
        begun.set()
        threading.Event().wait(0.3)
        return compile_source(source)

    monkeypatch.setattr(cache, "compile_source", slow)
    monkeypatch.setattr(meanwhile, "specs", lambda: [SPEC])
    cache._compile_ahead(1)
    assert begun.wait(TIMEOUT)
    child = os.fork()
    if not child:
        os._exit(cached_kernel(SPEC).symbol != SPEC.symbol)
    end_ahead()
    assert os.waitpid(child, 0)[1] == 0
    assert fake_compiler == [SPEC]


# -------------------------------------------------------------------------------------------------------------- the log


def test_the_log_says_what_a_call_waits_for_and_how_long(fake_compiler, caplog):
    other = dataclasses.replace(SPEC, head_dim=32)
    with caplog.at_level(logging.INFO, logger="fa2cupy"):
        cached_kernels([SPEC])
        cached_kernels([SPEC, other])
        cached_kernels([SPEC, other])
    third = dataclasses.replace(SPEC, head_dim=16)
    cached_kernels([third], jobs=1)  # as of `precompile`
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == f"waiting for 1 kernel: {SPEC}"
    assert lines[2] == f"waiting for 1 kernel: {other}"
    assert [line.split()[0] for line in lines] == ["waiting", "waited"] * 2
    assert all(line.endswith(" s") for line in lines[1::2])
