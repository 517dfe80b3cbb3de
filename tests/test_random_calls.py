"""Kernels of random calls pass the front end of the compiler, which instantiates their templates.

A fake GPU notes which kernels a call would launch, and executes none. The front end takes 40 ms for one, so that every
pair of features meets in every operation, which is more than tests execute.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable

import pytest

pytest.importorskip("cupy")

from cupy.cuda import nvrtc
from support.fake_gpu import fake_gpu
from support.random_calls import FEATURES, RandomCall

from fa2cupy import UnsupportedProblemError
from fa2cupy.jit.compiler import compile_options
from fa2cupy.jit.source import render_kernel
from fa2cupy.jit.spec import KernelSpec

PAIRS = tuple(itertools.combinations(FEATURES, 2))
OPERATIONS = (
    *("forward",) * 3, *("backward",) * 3, "jvp", "output_jvp", "backward_jvp", "double_backward", "decode",
)  # fmt: skip
#: The calls of a pair: the operation, and whether it is one of 16 bits on Hopper.
CALLS = (*[(name, True) for name in OPERATIONS], *[(name, False) for name in dict.fromkeys(OPERATIONS)])


@functools.lru_cache(maxsize=None)
def errors_of_front_end(spec: KernelSpec, change: Callable[[str], str]) -> str:
    program = nvrtc.createProgram(change(render_kernel(spec).text), f"{spec.symbol}.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*compile_options(spec.arch), "--fdevice-syntax-only"))
    except nvrtc.NVRTCError as error:
        return nvrtc.getProgramLog(program) or str(error)
    finally:
        nvrtc.destroyProgram(program)
    return ""


def check_calls(monkeypatch, pair: tuple[str, str], change: Callable[[str], str] = str) -> None:
    """Checks calls with a pair of features; `change` changes the source of their kernels."""
    num_kernels = 0
    for number, (operation, on_hopper) in enumerate(CALLS):
        call = RandomCall(f"{pair} {number}", operation, pair, on_hopper=on_hopper)
        with monkeypatch.context() as patches, fake_gpu(patches, call.arch, call.run) as stages:
            try:
                call.draw()
                call()
            except (TypeError, ValueError, UnsupportedProblemError) as error:
                assert re.match(r"\w+", str(error))[0] in (*call.arguments, "family", "head_dim"), f"{call}\n{error}"
        for spec in dict.fromkeys(stage.spec for stage in stages):
            num_kernels += 1
            errors = errors_of_front_end(spec, change)
            assert not errors, f"{call}\n{spec}\n{errors}"
    assert num_kernels > len(CALLS) / 2


@pytest.mark.sample(pair=[("mask", "key_padding_mask")])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_calls_compile_or_name_an_argument(monkeypatch, pair):
    check_calls(monkeypatch, pair)


def test_a_name_from_two_bases_is_found(monkeypatch):
    """Hopper's forward had this fault; only kernels with both masks look the name up in both bases."""
    with pytest.raises(AssertionError, match="lane_.* is ambiguous"):
        check_calls(monkeypatch, ("mask", "key_padding_mask"), lambda source: source.replace("Base::lane_, ", ""))
