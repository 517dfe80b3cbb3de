"""The measurements of scripts: counts of operations, rotation, turns, host time, and the check of results."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
from common import check, measure, peers, tables
from common.measure import Candidate, Problem
from support.fake_timing import FakeGpu, needs_cupy


def test_flops_against_hand_numbers():
    problem = Problem("float16", 64, 2048, 8, 32, False)
    assert problem.flops("forward") == 274_877_906_944  # 4 * 8 * 32 * 2048^2 * 64
    assert problem.flops("single_pass") == problem.flops("two_pass") == 687_194_767_360  # 2.5 times as many
    assert problem.flops("backward_dq") == 412_316_860_416  # 3 products instead of 2
    assert problem.flops("backward_dkdv") == 549_755_813_888  # 4 products
    assert dataclasses.replace(problem, causal=True).flops("forward") == 137_438_953_472
    assert problem.tflops("forward", 1.0) == pytest.approx(274.878, rel=1e-5)


def test_flops_of_two_head_dims_are_those_of_each_product():
    """S, dQ and dK have the columns of q; O, dP and dV those of v."""
    products = {"forward": (1, 1), "single_pass": (3, 2), "backward_dq": (2, 1), "backward_dkdv": (2, 2)}
    one = Problem("float16", 192, 64, 1, 1, False, head_dim_v=128)
    for operation, (of_q, of_v) in products.items():
        assert one.flops(operation) == 2 * 64**2 * (192 * of_q + 128 * of_v)
    assert one.input_bytes == 2 * 64 * (192 + 192 + 128) and one.tensor_bytes == 2 * 64 * 128


def test_inputs_rotate_beyond_twice_the_cache():
    assert measure.sets_beyond_cache(100, 1000) * 100 > 2000
    assert measure.sets_beyond_cache(10**9, 1000) == 2
    taken = []
    call = measure.rotating(taken.append, [(1,), (2,), (3,)])
    for _ in range(5):
        call()
    assert taken == [1, 2, 3, 1, 2]


def test_candidates_take_turns_in_every_round():
    order = []
    candidates = [Candidate(name, lambda name=name: order.append(name)) for name in "abc"]
    times = measure.time_in_rounds(FakeGpu(), candidates, 4, 10.0, random.Random(0))
    assert times == {name: [2.0] * 4 for name in "abc"}
    per_measurement = 3  # one call to find the repeats, one block to settle, one to measure
    rounds = [order[i : i + 3 * per_measurement] for i in range(0, len(order), 3 * per_measurement)]
    assert all(sorted(set(r)) == ["a", "b", "c"] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1


def test_host_time_is_that_of_one_call():
    candidates = [Candidate("sleep", lambda: time.sleep(1e-3))]
    microseconds = measure.host_microseconds(FakeGpu(), candidates, calls=2, batches=3)
    assert 1000 <= microseconds["sleep"] < 5000


def test_host_time_is_the_least_of_rounds(monkeypatch):
    medians = iter([5.0, 50.0, 4.0, 60.0, 9.0, 40.0])  # two candidates in turns, three rounds
    monkeypatch.setattr(measure, "_host_median", lambda *arguments: next(medians))
    candidates = [Candidate("a", lambda: ()), Candidate("b", lambda: ())]
    assert measure.host_microseconds(FakeGpu(), candidates, rounds=3) == {"a": 4.0, "b": 40.0}


def test_calls_are_queued_while_the_gpu_waits():
    class Pinned(bytearray):
        ptr = 4096

    launches = []

    def wait_for_flag(grid, block, arguments):
        launches.append((grid, block, arguments, memory[0]))

    memory = Pinned(b"\1\0\0\0")
    cuda = SimpleNamespace(alloc_pinned_memory=lambda size: memory)
    gate = measure._Gate(SimpleNamespace(RawKernel=lambda source, name: wait_for_flag, cuda=cuda))
    for _ in range(2):
        with contextlib.suppress(RuntimeError), gate.closed():
            assert memory[0] == 0
            raise RuntimeError("a call failed")
        assert memory[0] == 1, "else the GPU would wait for the whole of its time"
    assert launches == [((1,), (1,), (4096, gate._CYCLES), 0)] * 2


@needs_cupy
def test_the_gate_compiles():
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram(measure._Gate._SOURCE, "gate.cu", [], [])
    nvrtc.compileProgram(program, ("--gpu-architecture=compute_90",))
    assert b".visible .entry wait_for_flag(" in nvrtc.getPTX(program)


def test_short_calls_do_not_fill_the_queue():
    repeats = []
    gpu = FakeGpu()
    gpu.elapsed_ms = lambda call, count: repeats.append(count) or 0.001
    measure.milliseconds(gpu, lambda: (), 20.0)
    assert max(repeats) == measure.MOST_QUEUED


@pytest.mark.parametrize(
    ("name", "expected"),
    [("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"), ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"), ("sm_80", "sm-80")],
)
def test_device_names_become_folder_names(name, expected):
    assert measure.slug(name) == expected


def test_bytes_are_printed_with_units():
    assert [measure.format_bytes(n) for n in (100, 1536, 3 << 20, 5 << 30)] == ["100 B", "1.5 KiB", "3 MiB", "5 GiB"]


@pytest.mark.parametrize(
    ("causal", "heads_kv", "window"), [(False, None, None), (True, None, None), (True, 1, None), (True, 3, 20)]
)
@pytest.mark.parametrize("operation", dict.fromkeys((*peers.OPERATIONS, *peers.DEFAULT_OPERATIONS)))
def test_check_takes_right_results_and_refuses_wrong_ones(operation, causal, heads_kv, window, monkeypatch):
    # Blocks are smaller than the problem, so that the reference is put together from several of them.
    monkeypatch.setattr(check, "BLOCK_ELEMENTS", 1000)
    problem = Problem("float16", 32, 77, 2, 3, causal, heads_kv)
    head_check = check.HeadCheck(np, problem, *FakeGpu().tensors(problem, 1), window)
    head_check.verify(operation)
    name = "forward" if operation == "forward" else "backward"
    right = getattr(check.fa2cupy, name)

    def wrong(*arguments, out, **options):
        results = right(*arguments, out=out, **options)
        out[-1][(-1,) * out[-1].ndim] += 1
        return results

    monkeypatch.setattr(check.fa2cupy, name, wrong)
    with pytest.raises(AssertionError):
        head_check.verify(operation)


def test_check_refuses_unwritten_results(monkeypatch):
    problem = Problem("float32", 32, 40, 1, 1, False)
    head_check = check.HeadCheck(np, problem, *FakeGpu().tensors(problem, 1))
    monkeypatch.setattr(check.fa2cupy, "forward", lambda *arguments, out, **options: out)
    with pytest.raises(AssertionError, match="1280 NaN"):
        head_check.verify("forward")


def test_ratios_are_those_of_the_best_peer():
    rows = [
        {"model": model, "size": size, "operation": operation, "provider": provider, "ratio": ratio}
        for model, size, operation, provider, ratio in (
            ("a", "1", "forward", "fa2cupy", ""), ("a", "1", "forward", "slow", "2.5"),
            ("a", "1", "forward", "fast", "1.25"), ("b", "2", "backward", "slow", 0.5),
        )
    ]  # fmt: skip
    assert tables.ratio_table(rows, "model", "size", ("forward", "backward")) == [
        "| forward / backward | 1 | 2 |", "|---|---|---|", "| a | 1.25 / - |  |", "| b |  | - / 0.50 |",
    ]  # fmt: skip
    assert tables.smallest_ratio(rows, "model", "size") == ["smallest: 0.50, backward of b at 2 beside slow"]
    assert tables.smallest_ratio(rows[:1], "model", "size") == ["no peer was measured"]


def test_cudnn_is_timed_beside_two_pass_in_its_ordinary_mode():
    problem = Problem("float16", 64, 2048, 8, 32, True)
    peer = object.__new__(peers.TorchCudnn)
    assert all(peer.supports(problem, operation) for operation in peers.OPERATIONS)
    assert isinstance(peer.deterministic(), contextlib.nullcontext)
