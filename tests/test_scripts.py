"""The benchmark and the sweep, without a GPU: everything but the launches themselves."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import time
import types
from pathlib import Path
from types import SimpleNamespace

import benchmark
import compare
import features
import gpu_check
import jinja2
import methods
import ml_dtypes
import numpy as np
import pytest
import sweep
from common import (
    ROOT,
    SCRIPTS,
    check,
    checkout,
    decoding,
    feature_cases,
    flex,
    function_cases,
    measure,
    peers,
    plots,
    sparse,
    startup,
    tables,
)
from common.compile_pool import Report, compile_all
from common.measure import Candidate, Problem
from support.fake_torch import FakeTensor, fake_torch

import fa2cupy
from fa2cupy import legal_configs
from fa2cupy.families import tuning
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.sm80 import SM80
from fa2cupy.families.tile import TileConfig
from fa2cupy.jit.spec import KernelSpec

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
needs_cupy = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="compiling needs CuPy")


class FakeGpu:
    """NumPy in the place of CuPy, and a clock on which every call takes 2 ms."""

    name, driver, xp = "NVIDIA Test GPU", "0.0", np
    info = dataclasses.replace(DeviceInfo.named("sm_90"), l2_bytes=1)

    def tensors(self, problem, count):
        rng = np.random.default_rng(0)
        shapes = (problem.shape, problem.shape_kv, problem.shape_kv, problem.shape)
        drawn = [[rng.standard_normal(shape).astype(problem.numpy_dtype) for shape in shapes] for _ in range(count)]
        return [measure.Tensors(*arrays) for arrays in drawn]

    def address(self, array):
        return array.ctypes.data

    def elapsed_ms(self, call, repeats):
        call()
        return 2.0

    def peak_bytes(self, call):
        return sum(array.nbytes for array in call()) + 100

    def synchronize(self):
        pass

    release = synchronize

    def precompile(self, problems, operations, features=((),)):
        self.precompiled = list(problems), operations, features

    def compile(self, specs):
        self.compiled = set(specs)


class HastyGpu(FakeGpu):
    """Makes no call only to time it."""

    def elapsed_ms(self, call, repeats):
        return 2.0


# --- arithmetic -------------------------------------------------------------------------------------------------------


def test_flops_against_hand_numbers():
    problem = Problem("float16", 64, 2048, 8, 32, False)
    assert problem.flops("forward") == 274_877_906_944  # 4 * 8 * 32 * 2048^2 * 64
    assert problem.flops("single_pass") == problem.flops("two_pass") == 687_194_767_360  # 2.5 times as many
    assert problem.flops("backward_dq") == 412_316_860_416  # 3 products instead of 2
    assert problem.flops("backward_dkdv") == 549_755_813_888  # 4
    assert dataclasses.replace(problem, causal=True).flops("forward") == 137_438_953_472
    assert problem.tflops("forward", 1.0) == pytest.approx(274.878, rel=1e-5)


def test_sizes_of_the_speed_section():
    problems = list(benchmark.speed_problems(benchmark.DTYPES, benchmark.HEAD_DIMS, benchmark.SEQLENS))
    assert {p.batch * p.seqlen for p in problems if p.dtype != "float32"} == {16384}
    assert {p.batch * p.seqlen for p in problems if p.dtype == "float32"} == {4096}
    assert {p.head_dim: p.num_heads for p in problems} == {32: 64, 64: 32, 96: 21, 128: 16, 256: 8}
    assert len({p for p in problems if p.dtype == "float16"}) == 2 * 5 * 4


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


# --- checks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("causal", "heads_kv", "window"), [(False, None, None), (True, None, None), (True, 1, None), (True, 3, 20)]
)
@pytest.mark.parametrize("operation", dict.fromkeys((*peers.OPERATIONS, *peers.DEFAULT_OPERATIONS)))
def test_check_takes_right_results_and_refuses_wrong_ones(operation, causal, heads_kv, window, monkeypatch):
    # Blocks of rows smaller than the problem, so that the reference is put together from several.
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


# --- benchmark --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_benchmark(monkeypatch):
    monkeypatch.setattr(benchmark, "TOKENS", {"float16": 64, "bfloat16": 64, "float32": 32})
    monkeypatch.setattr(benchmark, "MODEL_DIM", 64)
    monkeypatch.setattr(benchmark, "MEMORY_PROBLEM", Problem("float16", 32, 100, 1, 1, False))
    monkeypatch.setattr(benchmark, "TRAINING_PROBLEMS", [Problem("bfloat16", 64, 40, 1, 1, True)])
    monkeypatch.setattr(measure.host_microseconds, "__defaults__", (2, 2, 2))


def small_options(*extra):
    options = ["--head-dims", "64", "--seqlens", "32", "64", "--sections", "speed", "memory", "host"]
    return benchmark.parse_arguments(
        ["--dtypes", "float16", "float32", "--rounds", "1", "--peers", "unfused", *options, *extra]
    )


def test_benchmark_from_checks_to_files(small_benchmark, tmp_path, capsys):
    run = benchmark.run(small_options(), FakeGpu(), tmp_path)
    assert not run.failures
    with (tmp_path / "benchmark.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == benchmark.COLUMNS
    timed = [row for row in rows if row["ms_median"]]
    assert {(row["provider"], row["operation"]) for row in timed} == {
        ("fa2cupy", "forward"), ("fa2cupy", "single_pass"), ("fa2cupy", "two_pass"),
        ("cupy unfused", "forward"), ("cupy unfused", "single_pass"),
    }  # fmt: skip
    assert all(row["ms_median"] == row["ms_min"] == row["ms_max"] == "2" for row in timed)
    assert all((row["ratio"] == "1") == (row["provider"] == "cupy unfused") for row in timed)
    assert all(bool(row["tile"]) == (row["provider"] == "fa2cupy") for row in rows)
    forward = next(row for row in timed if row["operation"] == "forward")
    assert float(forward["tflops"]) == pytest.approx(4 * 2 * 32**2 * 64 / 2e-3 / 1e12, rel=1e-4)
    assert int(forward["extra_bytes"]) == 100 + 2 * 32 * 4  # what the meter adds, and lse
    assert {row["seqlen"] for row in timed} == {"32", "64", "100"}
    assert all(float(row["host_us"]) > 0 for row in rows if not row["ms_median"])
    assert "TFLOP/s" in capsys.readouterr().out
    assert any("cupy unfused" in line and "worst  1.00" in line for line in benchmark.summary(run.rows))


def test_benchmark_aborts_rows_with_wrong_results(small_benchmark, tmp_path, monkeypatch, capsys):
    def verify(self, operation, **options):
        if operation == "single_pass":
            raise AssertionError("dq is off by a mile")

    monkeypatch.setattr(check.HeadCheck, "verify", verify)
    monkeypatch.setattr(measure, "Gpu", FakeGpu)
    arguments = [
        "--dtypes",
        "float16",
        "--head-dims",
        "64",
        "--seqlens",
        "64",
        "--rounds",
        "1",
        "--sections",
        "speed",
        "--peers",
    ]
    assert benchmark.main([*arguments, "--out", str(tmp_path)]) == 1
    assert "WRONG: float16 d=64 seqlen=64" in capsys.readouterr().err
    assert {row["operation"] for row in measure.read_csv(tmp_path / "benchmark.csv")} == {"forward", "two_pass"}


def test_benchmark_leaves_out_a_peer_that_is_wrong(small_benchmark, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(peers.CupyUnfused, "forward", lambda self, causal, q, k, v: (v * 2, None))
    options = small_options("--operations", "forward", "--sections", "speed")
    run = benchmark.run(options, FakeGpu(), tmp_path)
    assert {row["provider"] for row in run.rows} == {"fa2cupy"}
    assert len(run.failures) == 6 and all("cupy unfused: result 0 differs" in text for text in run.failures)
    assert run.failures[0] in capsys.readouterr().err


def test_benchmark_goes_on_without_a_peer_that_refuses(small_benchmark, tmp_path, monkeypatch, capsys):
    def refuse(self, causal, q, k, v):
        raise NotImplementedError("not on Sundays")

    monkeypatch.setattr(peers.CupyUnfused, "forward", refuse)
    run = benchmark.run(small_options("--operations", "forward", "--sections", "speed"), FakeGpu(), tmp_path)
    assert {row["provider"] for row in run.rows} == {"fa2cupy"} and not run.failures
    assert capsys.readouterr().out.count("without cupy unfused: not on Sundays") == 2  # once for each dtype


def test_training_steps_are_checked_and_timed_with_both_parts(small_benchmark, tmp_path):
    run = benchmark.run(small_options("--sections", "training"), FakeGpu(), tmp_path)
    assert not run.failures
    ours, theirs = measure.read_csv(tmp_path / "benchmark.csv")
    assert (ours["provider"], theirs["provider"], theirs["ratio"]) == ("fa2cupy", "cupy unfused", "1")
    assert ours["operation"] == theirs["operation"] == "training"
    assert float(ours["tflops"]) == pytest.approx(7 * 2 * 40**2 * 64 / 2 / 2e-3 / 1e12, rel=1e-4)


def test_startup_joins_both_processes(small_benchmark, tmp_path, monkeypatch, capsys):
    call = {"call": "forward", "new_kernels": 1, "compile_s_longest": 1.5, "compile_s_total": 1.5}
    answers = iter([[{**call, "milliseconds": 1600.0}], [{**call, "milliseconds": 50.0}]])
    caches = []

    def first_calls(problem, cache):
        caches.append(cache)
        return next(answers)

    monkeypatch.setattr(startup, "_first_calls", first_calls)
    run = benchmark.run(small_options("--sections", "startup"), FakeGpu(), tmp_path)
    assert not run.failures and len(set(caches)) == 1
    (row,) = measure.read_csv(tmp_path / "startup.csv")
    assert (row["first_call_ms_fresh"], row["first_call_ms_cached"], row["compile_s_longest"]) == ("1600", "50", "1.5")
    assert "50 ms from the disk cache" in capsys.readouterr().out


# --- compare ----------------------------------------------------------------------------------------------------------


class FakeCheckout:
    """A process in which a call takes 1 ms; where forwards are slow, 2 ms in the first pair and 1.5 ms in others."""

    slow_folder: Path | None = None
    pairs = 0

    def __init__(self, folder, cache):
        self.folder, self.cell = folder, None
        self.is_slow = folder == FakeCheckout.slow_folder
        FakeCheckout.pairs += self.is_slow

    def ask(self, question):
        if isinstance(question, int):
            slow = self.is_slow and self.cell.operation == "forward"
            return (2.0 if FakeCheckout.pairs == 1 else 1.5) if slow else 1.0
        self.cell = question
        return {"ms": 1.0, "sample": [1.0, 2.0 + self.is_slow / 64], "largest": 2.0, "gpu": "NVIDIA Test"}

    def close(self):
        pass


@pytest.fixture
def checkouts(monkeypatch, tmp_path):
    """An older checkout, in the place of whose processes there are fake ones."""
    (tmp_path / "before" / "fa2cupy").mkdir(parents=True)
    (tmp_path / "before" / "fa2cupy" / "__init__.py").touch()
    monkeypatch.setattr(compare, "Checkout", FakeCheckout)
    monkeypatch.setattr(compare, "find_gpu", lambda: "a GPU")
    monkeypatch.setattr(FakeCheckout, "slow_folder", compare.ROOT)
    monkeypatch.setattr(FakeCheckout, "pairs", 0)
    return tmp_path / "before"


def test_compare_measures_again_what_seems_slower(checkouts, tmp_path, monkeypatch, capsys):
    words = f"{checkouts} --cells d64.*2048.*causal --out {tmp_path}".split()
    assert compare.main(words) == 1
    rows = {row["cell"]: row for row in measure.read_csv(tmp_path / "compare.csv")}
    assert tuple(next(iter(rows.values()))) == compare.COLUMNS
    assert {row["before"] for row in rows.values()} == {"before"}
    slow = {name for name, row in rows.items() if row["pairs"] == "3"}
    assert slow == {name for name in rows if name.endswith("forward")}
    assert {"bfloat16 d64 2048 causal sink forward", "bfloat16 d64 2048 causal plain forward"} <= slow
    assert {rows[name]["ratio"] for name in slow} == {"1.5"} and {rows[name]["ratio_max"] for name in slow} == {"2"}
    assert "bfloat16 d64 2048 causal plain two_pass" in set(rows) - slow
    assert "1.0000 ->    1.5000 ms  1.500 (3 pairs)" in capsys.readouterr().out
    monkeypatch.setattr(FakeCheckout, "slow_folder", checkouts)
    assert compare.main(words) == 0


def test_compare_holds_results_against_each_other(checkouts, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "TOLERANCE", 2**-8)
    with pytest.raises(AssertionError, match=r"d64 512 plain forward: results differ by 0.0156, allowed are 0.00781"):
        compare.main(f"{checkouts} --cells d64.512.plain.forward --out {tmp_path}".split())


def test_compare_says_what_is_missing(checkouts, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        compare.main([str(tmp_path)])
    assert f"before: {tmp_path} is no checkout of fa2cupy" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        compare.main([str(checkouts), "--cells", "d65"])
    wanted = "--cells: 'd65' matches no name such as bfloat16 d32 512 plain forward"
    assert wanted in capsys.readouterr().err
    monkeypatch.setattr(compare, "find_gpu", lambda: None)
    assert compare.main([str(checkouts)]) == 2


@pytest.mark.parametrize("feature", ("", *compare.FEATURES))
def test_a_checkout_takes_every_call_that_is_compared(monkeypatch, feature):
    monkeypatch.setattr(checkout, "TOKENS", 64)
    monkeypatch.setattr(checkout, "MODEL_DIM", 32)
    rng = np.random.default_rng(0)
    shape = (64, 2, 16) if feature == "packed" else (2, 32, 2, 16)
    inputs = tuple(rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for _ in range(4))
    worker = object.__new__(checkout.Worker)
    worker._cupy, worker._package = np, fa2cupy
    worker._inputs = lambda cell: inputs
    for operation in ("forward", "two_pass", "default"):
        results = worker._bind(checkout.Cell("bfloat16", 16, 32, True, operation, feature))()
        assert [x.shape for x in results] == [shape] * (1 if operation == "forward" else 3)


# --- methods ----------------------------------------------------------------------------------------------------------


class SteeredGpu(FakeGpu):
    """A clock that the last call has set."""

    clock = 2.0

    def elapsed_ms(self, call, repeats):
        call()
        return self.clock


@pytest.fixture
def splitting(monkeypatch):
    """A GPU on which two splits take 2 ms, the default 3 ms and all others 4 ms; `two_pass` takes one split alone."""
    gpu = SteeredGpu()

    def split(function):
        def call(*arguments, num_splits=None, **options):
            if options.get("method") == "two_pass" and num_splits not in (None, 1):
                raise ValueError(f"num_splits: expected 1 with 'two_pass', got {num_splits}")
            gpu.clock = {None: 3.0, 2: 2.0}.get(num_splits, 4.0)
            return function(*arguments, **options)

        return call

    for name in ("forward", "backward"):
        monkeypatch.setattr(methods.fa2cupy, name, split(getattr(methods.fa2cupy, name)))
    for name, value in {"TILE_ROWS": 16, "WINDOW": 16, "SPLITS": (1, 2, 4)}.items():
        monkeypatch.setattr(methods, name, value)
    monkeypatch.setattr(measure, "Gpu", lambda: gpu)
    return gpu


#: A small sweep, as written on a command line: ruff's formatter puts each word of a list on a line.
SWEEP = "--head-dims 64 --heads 4/2 --batches 1 --seqlens 32 64 --queries 0"
ONE_SIZE = "--head-dims 64 --heads 2/1 --batches 1 --seqlens 32"


def test_methods_from_checks_to_files(splitting, tmp_path, capsys):
    assert methods.main(f"{SWEEP} --out {tmp_path}".split()) == 0
    rows = measure.read_csv(tmp_path / "methods.csv")
    assert tuple(rows[0]) == methods.COLUMNS
    defaults = [row for row in rows if row["method"] == "default"]
    names = ("operation", "num_heads", "num_heads_kv", "seqlen", "causal", "window")
    masks = [("32", "0", ""), ("32", "1", ""), ("64", "0", ""), ("64", "1", ""), ("64", "1", "16")]
    assert [tuple(row[name] for name in names) for row in defaults] == [
        (operation, "4", "2", *mask) for mask in masks for operation in ("forward", "backward")
    ]
    assert {row["loss"] for row in defaults} == {"0.5"} and {row["ms_median"] for row in defaults} == {"3"}
    assert {row["best"] for row in defaults} == {"2 splits", "single_pass, 2 splits"}
    assert {row["taken"] for row in defaults if row["operation"] == "backward"} == {"two_pass, 1 splits"}  # short ones
    longer = [row for row in rows if (row["operation"], row["seqlen"], row["window"]) == ("backward", "64", "")]
    choices = {(row["method"], row["num_splits"]) for row in longer}
    assert choices == {("default", ""), ("two_pass", "1"), *(("single_pass", splits) for splits in "124")}
    assert splitting.precompiled[1:] == (methods.METHODS, [(), ("window",)])
    told = capsys.readouterr().out
    assert "without two_pass, 2 splits: num_splits: expected 1 with 'two_pass', got 2" in told
    assert "10 beyond what is wanted (wanted: 3 % at most, 1 % on average)" in told
    assert (tmp_path / "methods.png").exists() == HAS_MATPLOTLIB
    if HAS_MATPLOTLIB:
        (tmp_path / "methods.png").unlink()
        assert methods.main(["--plot-only", str(tmp_path / "methods.csv")]) == 0 and (tmp_path / "methods.png").exists()
        assert "loses at most  50.0 %, on average  50.0 %" in capsys.readouterr().out


def test_methods_of_few_queries(splitting, tmp_path, capsys):
    words = f"{SWEEP} --only-queries --out {tmp_path}".replace("--queries 0", "--queries 4 8")
    assert methods.main(words.split()) == 0
    path = tmp_path / "methods.csv"
    rows = measure.read_csv(path)
    names = ("operation", "seqlen", "causal", "queries", "loss")
    assert [tuple(row[name] for name in names) for row in rows if row["method"] == "default"] == [
        ("forward", "32", "0", "4", "0.5"), ("forward", "32", "1", "4", "0.5"),
        ("forward", "64", "0", "4", "0.5"), ("forward", "64", "0", "8", "0.5"),
        ("forward", "64", "1", "4", "0.5"), ("forward", "64", "1", "8", "0.5"),
    ]  # fmt: skip
    assert "of few queries" in capsys.readouterr().out
    pairs = {row["causal"]: float(row["tflops"]) for row in rows if (row["queries"], row["num_splits"]) == ("8", "2")}
    assert pairs["1"] / pairs["0"] == pytest.approx((8 * 64 - 28) / (8 * 64), rel=1e-3)
    assert methods.main(["--judge", str(path)]) == 0
    assert {row["queries"] for row in measure.read_csv(path)} == {"4", "8"}


def test_methods_judge_the_present_default_by_earlier_times(splitting, tmp_path, monkeypatch, capsys):
    path = tmp_path / "methods.csv"
    assert methods.main(f"{SWEEP} --out {tmp_path}".split()) == 0
    before = measure.read_csv(path)
    for taken, loss in ((methods.Choice("single_pass", 2), "0"), (methods.Choice("single_pass", 3), "1")):
        monkeypatch.setattr(
            methods, "default_of", lambda device, cell, taken=taken: (
                taken if cell.operation == "backward" else methods.Choice(None, 2)
            )
        )  # fmt: skip
        assert methods.main(["--judge", str(path)]) == 0
        judged = measure.read_csv(path)
        own, others = ([r for r in judged if (r["method"] == "default") == is_own] for is_own in (True, False))
        assert others == [row for row in before if row["method"] != "default"]
        assert {row["loss"] for row in own if row["operation"] == "forward"} == {"0"}
        assert {row["loss"] for row in own if row["operation"] == "backward"} == {loss}  # 3 splits: the times of 4
        assert {row["taken"] for row in own if row["operation"] == "backward"} == {str(taken)}
    assert "loses at most 100.0 %" in capsys.readouterr().out
    assert methods.main(["--judge", str(tmp_path / "absent.csv")]) == 2
    assert capsys.readouterr().err.startswith("--judge: ")


def test_splits_leave_each_a_tile_and_do_not_fill_a_full_gpu_still_more():
    def splits(operation, seqlen, num_heads=8, num_heads_kv=1, window=None):
        cell = methods.Cell(operation, Problem("bfloat16", 128, seqlen, 1, num_heads, True, num_heads_kv), window)
        return [choice.num_splits for choice in cell.choices(multiprocessors=132) if choice.method != "two_pass"]

    assert splits("backward", 512) == [1, 2, 4, 8, 16]  # 4 tiles, each with 4 of the queries of 8 heads
    assert splits("backward", 512, num_heads_kv=8) == [1, 2, 4]
    assert splits("backward", 4096, num_heads_kv=8) == [1, 2]  # 256 blocks, for 528
    assert splits("forward", 512) == [1, 2, 4]
    assert splits("forward", 16384) == [1]
    assert splits("forward", 2048, window=128) == [1, 2]


def test_methods_measure_nothing_that_is_too_large():
    axes = (methods.OPERATIONS, methods.HEAD_DIMS, methods.HEADS, methods.BATCHES, methods.SEQLENS, methods.MASKS)
    cells = list(methods.all_cells(*axes, queries=()))
    assert max(cell.problem.batch * cell.problem.seqlen for cell in cells) == methods.MOST_TOKENS
    assert {cell.problem.seqlen for cell in cells} == set(methods.SEQLENS)
    assert {(cell.problem.num_heads, cell.problem.heads_kv) for cell in cells} == set(methods.HEADS)
    assert max(cell.flops for cell in cells if cell.operation == "forward") <= methods.MOST_FLOPS
    windowed = methods.Cell("forward", Problem("bfloat16", 64, 4096, 2, 4, True), 1023)
    assert windowed.flops == 4 * 2 * 4 * sum(min(i, 1023) + 1 for i in range(4096)) * 64


def test_methods_leave_out_what_is_wrong(splitting, tmp_path, monkeypatch, capsys):
    def verify(self, operation, **options):
        if self._problem.causal:
            raise AssertionError("dq is off by a mile")

    monkeypatch.setattr(check.HeadCheck, "verify", verify)
    arguments = f"{ONE_SIZE} --operations backward --masks full causal --out {tmp_path}"
    assert methods.main(arguments.split()) == 1
    assert "WRONG: backward bfloat16 d=64 seqlen=32 batch=1 heads=2/1 causal: dq is off" in capsys.readouterr().out
    assert {row["causal"] for row in measure.read_csv(tmp_path / "methods.csv")} == {"0"}


def test_methods_find_choices_that_give_other_results(splitting, tmp_path, monkeypatch, capsys):
    right = methods.fa2cupy.forward

    def forward(*arguments, num_splits=None, **options):
        o, lse = right(*arguments, num_splits=num_splits, **options)
        return (o * 2 if num_splits == 2 else o), lse

    monkeypatch.setattr(methods.fa2cupy, "forward", forward)
    arguments = f"{ONE_SIZE} --operations forward --masks full --out {tmp_path}"
    assert methods.main(arguments.split()) == 1
    assert "WRONG: forward" in capsys.readouterr().out and not (tmp_path / "methods.csv").exists()


# --- features ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_features(monkeypatch):
    for name, value in {"TOKENS": 256, "MODEL_DIM": 64, "LONGEST_SCORES": 128, "SMALL_TOKENS": 64}.items():
        monkeypatch.setattr(feature_cases, name, value)
    monkeypatch.setattr(features, "TOKENS", 256)


def feature_options(*extra):
    return features.parse_arguments(["--head-dims", "32", "--seqlens", "128", "256", "--rounds", "1", *extra])


class FakeFlex:
    """Ours once more, through what a peer has."""

    name, features = "torch flex", flex.FlexAttention.features
    supports = flex.FlexAttention.supports
    release = staticmethod(lambda: None)
    factor = 1

    def __init__(self, gpu):
        pass

    def candidate(self, case, sets, options, operation):
        q, k, v, do = case.arrays(sets[0])
        o, lse = features.fa2cupy.forward(q, k, v, **options[0])
        if operation == "forward":
            return Candidate(self.name, lambda: (o * self.factor,))
        return Candidate(self.name, lambda: features.fa2cupy.backward(q, k, v, o, lse, do, **options[0]))

    def arrays(self, operation, results):
        return results


def test_features_from_checks_to_files(small_features, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(features.PEERS, "flex", FakeFlex)
    run = features.run(feature_options("--families", "default", "sm80"), HastyGpu(), tmp_path)
    assert not run.failures
    rows = measure.read_csv(tmp_path / "features.csv")
    assert tuple(rows[0]) == features.COLUMNS
    ours = [row for row in rows if row["provider"] == "fa2cupy"]
    everywhere = {"plain", "softcap", "alibi", "padding", "sink", "dropout"}
    scores = {f"{name}{kind}" for name in ("bias", "dbias") for kind in ("", "_batch", "_full")}
    assert {row["feature"] for row in ours if row["seqlen"] == "128"} == {*everywhere, "mask", *scores}
    assert {row["feature"] for row in ours if row["seqlen"] == "256"} == {*everywhere, "window127"}
    assert {row["feature"] for row in ours if row["seqlen"] == "16"} == {"plain", "packed"}
    assert {row["operation"] for row in ours if row["feature"] == "dbias"} == {"backward"}
    families = {name: {row["family"] for row in ours if row["feature"] == name} for name in ("plain", "packed")}
    assert families == dict.fromkeys(("plain", "packed"), {"sm90", "sm80"})
    assert all((row["over_plain"] == "1") == (row["feature"] != "packed") for row in ours)
    theirs = [row for row in rows if row["provider"] == "torch flex"]
    assert {(row["feature"], row["operation"]) for row in theirs} == {
        (feature, operation) for feature in ("softcap", "alibi") for operation in ("forward", "backward")
    }
    assert {row["ratio"] for row in theirs} == {"1"}
    assert any("softcap" in line and "ratio" in line for line in features.summary(run.rows))


def test_features_that_are_wrong_are_not_timed(small_features, tmp_path, monkeypatch, capsys):
    right = features.fa2cupy.forward

    def forward(*arguments, softcap=None, **options):
        return right(*arguments, **options)

    monkeypatch.setattr(features.fa2cupy, "forward", forward)
    monkeypatch.setattr(measure, "Gpu", FakeGpu)
    monkeypatch.setitem(features.PEERS, "flex", FakeFlex)
    monkeypatch.setattr(FakeFlex, "factor", 2)
    arguments = ["--features", "softcap", "alibi", "--head-dims", "32", "--seqlens", "256", "--rounds", "1"]
    assert features.main([*arguments, "--out", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "WRONG: softcap bfloat16 d=32 seqlen=256" in told and "torch flex: result 0 differs" in told
    rows = measure.read_csv(tmp_path / "features.csv")
    assert {(row["feature"], row["operation"], row["provider"]) for row in rows} == {
        ("alibi", "forward", "fa2cupy"), ("alibi", "backward", "fa2cupy"), ("alibi", "backward", "torch flex"),
    }  # fmt: skip


def test_features_go_on_without_torch_and_with_what_fails(small_features, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)

    def no_room(xp, problem, seed):
        raise MemoryError("too large")

    monkeypatch.setitem(features.FEATURES, "sink", feature_cases.Feature(no_room))
    monkeypatch.setattr(features.FeatureBenchmark, "compile", lambda self, cases: None)
    run = features.run(feature_options("--features", "sink", "alibi"), FakeGpu(), tmp_path)
    assert {row["feature"] for row in run.rows} == {"alibi"} and len(run.failures) == 2
    assert "FAILED: sink bfloat16 d=32 seqlen=128 batch=2 heads=2 causal: MemoryError: too large" in run.failures
    assert capsys.readouterr().out.startswith("without flash, cudnn, efficient, flex: ")


@pytest.fixture
def operators(monkeypatch):
    """PyTorch's operators, computed by NumPy."""
    torch = fake_torch()

    def initialize(self, gpu):
        self.torch, self.xp = torch, np

    monkeypatch.setattr(peers.TorchPeer, "__init__", initialize)
    monkeypatch.setattr(peers.TorchPeer, "tensor", lambda self, array: array.view(FakeTensor))
    monkeypatch.setattr(peers.TorchPeer, "array", lambda self, tensor: np.asarray(tensor))
    monkeypatch.setattr(peers.TorchPeer, "peak_bytes", lambda self, call: FakeGpu().peak_bytes(lambda: call()[:1]))
    monkeypatch.setattr(peers.TorchPeer, "deterministic", contextlib.nullcontext)
    monkeypatch.setattr(peers.TorchPeer, "release", lambda self: None)
    return torch.ops.aten


def test_operators_have_the_features_that_they_are_asked_for(small_features, operators, tmp_path):
    run = features.run(feature_options("--peers", *features.OPERATORS), HastyGpu(), tmp_path)
    assert not run.failures
    both, scores = ("forward", "backward"), ("mask", "bias", "bias_batch", "bias_full")
    expected = {
        "torch flash": {(name, each) for name in ("dropout", "packed", "window127") for each in both}
        | {("alibi", "forward")},
        "torch cudnn": {(name, each) for name in ("dropout", "padding", *scores) for each in both},
    }
    gradients = {(name, "backward") for name in ("dbias", "dbias_batch", "dbias_full")}
    expected["torch efficient"] = expected["torch cudnn"] | gradients
    for name, pairs in expected.items():
        assert {(row["feature"], row["operation"]) for row in run.rows if row["provider"] == name} == pairs
    full = {row["batch"] for row in run.rows if row["feature"].endswith("_full")}
    assert full == {2}, "both sequences fit into the limit"
    assert any(line.startswith("| dropout | 1.00 / 1.00 | 1.00 / 1.00 |") for line in features.table(run.rows))


def test_bias_of_all_scores_has_as_many_sequences_as_fit(monkeypatch):
    cases = list(feature_cases.all_cases(feature_cases.FEATURES, (64, 128), (2048, 16384)))
    batches = {case.problem.head_dim: case.problem.batch for case in cases if case.feature == "dbias_full"}
    assert batches == {64: 4, 128: 8}
    for case in cases:
        if case.feature == "bias_full":
            assert case.problem.batch * case.problem.num_heads * case.problem.seqlen**2 * 2 <= 2**30
    assert {case.problem.seqlen for case in cases if "bias" in case.feature} == {2048}


def test_operator_that_is_wrong_is_found(small_features, operators, tmp_path, monkeypatch):
    right = operators._scaled_dot_product_efficient_attention_backward

    def wrong(*arguments, **options):
        *gradients, dbias = right(*arguments, **options)
        return (*gradients, None if dbias is None else dbias * 2)

    monkeypatch.setattr(operators, "_scaled_dot_product_efficient_attention_backward", wrong)
    options = feature_options("--peers", "efficient", "--features", "bias", "dbias")
    run = features.run(options, FakeGpu(), tmp_path)
    assert len(run.failures) == 1 and "torch efficient: result 3 differs" in run.failures[0]
    assert {row["feature"] for row in run.rows if row["provider"] == "torch efficient"} == {"bias"}


@needs_cupy
@pytest.mark.sample(family=(None,))
@pytest.mark.parametrize("family", (None, "sm80"))
@pytest.mark.parametrize("operation", ("forward", "backward"))
def test_kernels_of_features_are_foretold(operation, family, monkeypatch):
    """What is compiled ahead and checked is what calls take, at their own choice of method."""
    from support import fake_gpu
    from support.fake_cupy import place

    device = DeviceInfo.named("sm_90")
    for case in feature_cases.all_cases(feature_cases.FEATURES, (128,), (2048,)):
        if operation not in case.operations:
            continue
        # A call of the real length, of few heads and without its work.
        case = dataclasses.replace(case, problem=dataclasses.replace(case.problem, batch=2, num_heads=2))
        if case.feature == "packed":
            case = case.shrunk()
        with fake_gpu.fake_gpu(monkeypatch, device, run=lambda launch: None) as launched:
            q, k, v, do = map(place, case.inputs(np))
            options = {name: place(x) if isinstance(x, np.ndarray) else x for name, x in case.options(np, 0).items()}
            o, lse = fake_gpu.forward(q, k, v, family=family, **options)
            if operation == "backward":
                launched.clear()
                gradients = {f"return_{name}": True for name in case.gradients}
                fake_gpu.backward(q, k, v, o, lse, do, family=family, **gradients, **options)
        assert tuple(stage.spec for stage in launched) == case.kernels(device, operation, family).specs, case


def test_work_of_features_is_that_of_visible_pairs():
    problem = Problem("bfloat16", 64, 1024, 16, 32, True)
    pairs = sum(min(i, 127) + 1 for i in range(1024))
    assert feature_cases.Case("window127", problem).flops("forward") == 4 * 16 * 32 * pairs * 64
    packed = feature_cases.Case("packed", problem)
    assert packed.flops("forward") == 2 * 32 * sum(n * n for n in feature_cases.PACKED) * 64
    assert sum(feature_cases.PACKED) == feature_cases.TOKENS
    assert packed.arrays(*FakeGpu().tensors(problem, 1))[0].shape == (16384, 32, 64)


def test_missing_torch_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    available = peers.available_peers(FakeGpu(), list(peers.PEERS))
    assert [peer.name for peer in available] == ["cupy unfused"]
    assert capsys.readouterr().out.startswith("without flash, cudnn, efficient: ")


def test_benchmark_without_gpu_says_so(monkeypatch, capsys):
    def no_gpu():
        raise RuntimeError("no driver")

    monkeypatch.setattr(measure, "Gpu", no_gpu)
    assert benchmark.main([]) == 2
    assert "needs a CUDA GPU and CuPy: no driver" in capsys.readouterr().err


def made_up_rows():
    for problem in benchmark.speed_problems(["float16", "float32"], [64, 128], [2048, 4096]):
        for operation in peers.OPERATIONS:
            for speed, provider in enumerate(("torch flash", "torch cudnn", "fa2cupy"), start=2):
                row = {"gpu": "Test GPU", "driver": "0.0", "date": "2026-01-01", **problem.columns()}
                row.update(operation=operation, provider=provider, ms_median=1.0)
                yield {**row, "tflops": 100.0 * speed, "ratio": 4 / speed if provider != "fa2cupy" else ""}


@pytest.fixture
def small_models(monkeypatch):
    monkeypatch.setattr(benchmark, "MODELS", {"even": (2, 2, 32), "grouped": (4, 2, 64)})
    monkeypatch.setattr(benchmark, "MODEL_SIZES", ((1, 40), (2, 24)))


def test_models_from_checks_to_files(small_models, operators, tmp_path, monkeypatch, capsys):
    right = operators._scaled_dot_product_cudnn_attention

    def same_heads_only(query, key, *arguments):
        if query.shape[1] != key.shape[1]:
            raise RuntimeError("as many heads, please")
        return right(query, key, *arguments)

    monkeypatch.setattr(operators, "_scaled_dot_product_cudnn_attention", same_heads_only)
    gpu = FakeGpu()
    run = benchmark.run(benchmark.parse_arguments(["--sections", "models"]), gpu, tmp_path)
    assert not run.failures and not run.rows
    assert [path.name for path in tmp_path.iterdir()] == ["models.csv"], "the results of other sections stay"
    assert gpu.precompiled[1] == peers.OPERATIONS
    rows = measure.read_csv(tmp_path / "models.csv")
    assert tuple(rows[0]) == benchmark.MODEL_COLUMNS
    operations = ("forward", "default", "deterministic")
    heads = {"even": ("2", "2"), "grouped": ("4", "2")}
    assert {(row["model"], row["batch"], row["operation"], row["provider"]) for row in rows} == {
        (model, batch, operation, provider)
        for model in heads
        for batch in "12"
        for operation in operations
        for provider in ("fa2cupy", "torch flash", "torch cudnn")
        if provider != "torch cudnn" or model == "even"
    }
    assert all((row["num_heads"], row["num_heads_kv"]) == heads[row["model"]] for row in rows)
    tiles = {row["operation"]: row["tile"].split(":")[0] for row in rows if row["provider"] == "fa2cupy"}
    assert {tiles[name] for name in ("default", "deterministic")} == {"two_pass"}
    grouped = next(row for row in rows if (row["model"], row["operation"]) == ("grouped", "default"))
    assert float(grouped["tflops"]) == pytest.approx(5 * 2 * 4 * 40**2 / 2 * 64 / 2e-3 / 1e12, rel=1e-4)
    assert int(grouped["extra_bytes"]) == 100, "dk and dv are smaller than dq"
    told = capsys.readouterr().out
    assert "without torch cudnn: as many heads, please" in told
    assert "| grouped | 1.00 / 1.00 / 1.00 | 1.00 / 1.00 / 1.00 |" in told and "smallest: 1.00, " in told
    assert benchmark.main(["--plot-only", str(tmp_path / "models.csv")]) == 0
    assert capsys.readouterr().out.startswith("| forward / default / deterministic | 1 x 40 | 2 x 24 |\n")


def test_models_that_are_wrong_are_failures(small_models, tmp_path, monkeypatch):
    def verify(self, operation, **options):
        raise AssertionError("dq is off by a mile")

    monkeypatch.setattr(check.HeadCheck, "verify", verify)
    run = benchmark.run(benchmark.parse_arguments(["--sections", "models", "--peers"]), FakeGpu(), tmp_path)
    assert len(run.failures) == 2 * 2 * 3 and "WRONG: bfloat16 d=32 seqlen=40" in run.failures[0]


def test_float32_from_checks_to_files(operators, tmp_path, monkeypatch, capsys):
    asked, forward = [], peers.fa2cupy.forward

    def remembered(*inputs, **options):
        asked.append(options.get("precision"))
        return forward(*inputs, **options)

    monkeypatch.setattr(peers.fa2cupy, "forward", remembered)
    small = [measure.Problem("float32", 32, 64, 1, 2, causal) for causal in (False, True)]
    monkeypatch.setattr(benchmark, "precision_problems", lambda: small)
    run = benchmark.run(benchmark.parse_arguments(["--sections", "float32"]), FakeGpu(), tmp_path)
    assert not run.failures and not run.rows
    assert [path.name for path in tmp_path.iterdir()] == ["float32.csv"]
    rows = measure.read_csv(tmp_path / "float32.csv")
    assert tuple(rows[0]) == benchmark.PRECISION_COLUMNS
    assert {(row["precision"], row["causal"], row["operation"], row["provider"]) for row in rows} == {
        (precision, causal, operation, provider)
        for precision in benchmark.PRECISIONS
        for causal in "01"
        for operation in ("forward", "default", "deterministic")
        for provider in ("fa2cupy", "torch efficient")
    }
    assert set(benchmark.PRECISIONS) <= set(asked)
    assert "| split 32 causal | 1.00 / 1.00 / 1.00 |" in capsys.readouterr().out
    assert benchmark.main(["--plot-only", str(tmp_path / "float32.csv")]) == 0
    assert capsys.readouterr().out.startswith("| forward / default / deterministic | 64 |\n")


def test_the_sizes_of_float32():
    problems = list(benchmark.precision_problems())
    assert len(problems) == 18 and all(one.dtype == "float32" and one.batch * one.seqlen == 16384 for one in problems)


def test_sparse_from_checks_to_files(operators, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "sparse_problems", lambda: [Problem("float32", 16, 512, 1, 2, False)])
    monkeypatch.setattr(sparse, "MAP_SEQLEN", 512)
    run = benchmark.run(benchmark.parse_arguments(["--sections", "sparse"]), FakeGpu(), tmp_path)
    assert not run.failures and not run.rows
    assert [path.name for path in tmp_path.iterdir()] == ["sparse.csv"]
    rows = measure.read_csv(tmp_path / "sparse.csv")
    assert tuple(rows[0]) == sparse.COLUMNS
    calls = {(row["pattern"], row["operation"]) for row in rows if row["operation"] != "map"}
    assert calls == {(name, operation) for name in ("dense", *sparse.PATTERNS) for operation in sparse.OPERATIONS}
    for row in rows:  # every call takes 2 ms
        if row["operation"] in sparse.OPERATIONS:
            pairs = float(row["density"]) * 2 * 512**2
            assert float(row["tflops"]) == pytest.approx(measure.flops(row["operation"], pairs, 16) / 2e9, rel=1e-3)
            assert float(row["ratio"]) == pytest.approx(float(row["density"]), rel=1e-3)
    assert next(row["provider"] for row in rows if row["operation"] == "map") == "fa2cupy"
    assert "| forward / default | 16, 512 |" in capsys.readouterr().out
    assert benchmark.main(["--plot-only", str(tmp_path / "sparse.csv")]) == 0
    assert "| prefix-LM |" in capsys.readouterr().out


def test_sparse_reports_what_is_wrong(operators, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "sparse_problems", lambda: [Problem("float32", 16, 256, 1, 1, False)])
    monkeypatch.setattr(sparse, "MAP_SEQLEN", 256)
    monkeypatch.setattr(sparse, "PATTERNS", ("document",))
    monkeypatch.setattr(sparse.fa2cupy, "forward", lambda q, k, v, **options: (q, np.zeros((1, 1, 256), "float32")))
    run = benchmark.run(benchmark.parse_arguments(["--sections", "sparse"]), FakeGpu(), tmp_path)
    assert len(run.failures) == 1 and run.failures[0].startswith(
        "WRONG: float32 d=16 seqlen=256 batch=1 heads=1 full doc"
    )


def test_section_features_is_the_other_script_without_the_compiler(small_features, operators, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "PEER_FEATURES", ("bias", "softcap"))
    monkeypatch.setattr(features, "HEAD_DIMS", (32,))
    monkeypatch.setattr(features, "SEQLENS", (128,))
    run = benchmark.run(benchmark.parse_arguments(["--sections", "features"]), FakeGpu(), tmp_path)
    assert not run.failures
    assert [path.name for path in tmp_path.iterdir()] == ["features-peers.csv"]
    rows = measure.read_csv(tmp_path / "features-peers.csv")
    providers = {name: {row["provider"] for row in rows if row["feature"] == name} for name in ("bias", "softcap")}
    assert providers == {"bias": {"fa2cupy", "torch cudnn", "torch efficient"}, "softcap": {"fa2cupy"}}


def test_section_functions_is_beside_flex_attention_and_the_built_in_keywords(small_features, tmp_path, monkeypatch):
    class FakeFlexFunctions(FakeFlex):
        features = flex.FlexFunctions.features

    for name, value in {"TOKENS": 256, "MODEL_DIM": 64, "SEQLENS": (256,)}.items():
        monkeypatch.setattr(function_cases, name, value)
    monkeypatch.setattr(benchmark, "FlexFunctions", FakeFlexFunctions)
    monkeypatch.setattr(features, "HEAD_DIMS", (32,))
    run = benchmark.run(benchmark.parse_arguments(["--sections", "functions", "--rounds", "1"]), HastyGpu(), tmp_path)
    assert not run.failures
    rows = measure.read_csv(tmp_path / "functions.csv")
    assert {(row["feature"], row["operation"], row["provider"]) for row in rows} == {
        (name, operation, provider)
        for name in function_cases.FUNCTIONS
        for operation in ("forward", "backward")
        for provider in ("fa2cupy", "torch flex")
    }
    causal = {row["feature"]: row["causal"] for row in rows}
    assert {name for name in causal if causal[name] == "1"} == {"softcap", "alibi", "t5_relative"}


def test_functions_are_those_of_the_built_in_keywords():
    problem = measure.Problem("bfloat16", 64, 96, 1, 4, True)
    q, k, v, _ = (np.asarray(x, "float32") for x in feature_cases.Case("plain", problem).inputs(np))
    for name in ("softcap", "alibi"):
        case = function_cases.FunctionCase(name, problem)
        results = [features.fa2cupy.forward(q, k, v, **each.options(np, 0))[0] for each in (case, case.plain)]
        np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)


def test_visible_pairs_and_buckets_of_functions():
    problem = measure.Problem("bfloat16", 64, 4096, 2, 32, False)
    pairs = measure.visible_pairs(4096, function_cases.WINDOW)
    for name, expected in (("sliding_window", pairs), ("causal", 4096 * 4097 / 2), ("document", 16 * 256**2)):
        flops = function_cases.FunctionCase(name, problem).flops("forward")
        assert flops == pytest.approx(4 * 2 * 32 * expected * 64, rel=4e-3)
    buckets = function_cases.distance_buckets(200)
    assert buckets[200] == 0 and buckets[199] == 1 and buckets[201] == 17 and buckets.max() == buckets[-1] == 31


def test_models_have_the_heads_that_they_are_named_after():
    problems = [problem for _, problem in benchmark.model_problems()]
    assert len(problems) == 27 and all(problem.causal and problem.dtype == "bfloat16" for problem in problems)
    llama = dict(benchmark.model_problems())["llama3-70b-tp8"]
    assert (llama.num_heads, llama.heads_kv, llama.head_dim, llama.batch, llama.seqlen) == (8, 1, 128, 4, 4096)


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


def test_decoding_is_checked_timed_and_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(decoding, "_COPIED_BYTES", 1 << 12)

    class Peer:
        name = "torch flash"

        def own(self, array):
            return array

        def forward(self, causal, q, k, v):
            if q.shape[1] > 1:
                raise RuntimeError("no such shape")
            return (q,)

        def release(self):
            pass

    problems = [
        decoding.CachedProblem("2 x 70", (70, 70), (4, 2), 16, 1),
        decoding.CachedProblem("2 x 70", (70, 70), (4, 2), 16, 3),
        decoding.CachedProblem("ragged", (3, 40), (4, 1), 16, 1),
        decoding.CachedProblem("2 x 70", (70, 70), (4, 2), 16, 1, 16),
    ]
    path = tmp_path / "decode.csv"
    assert not decoding.run_decode(FakeGpu(), [Peer()], 2, 1.0, path, problems)
    rows = measure.read_csv(path)
    assert list(rows[0]) == list(decoding.COLUMNS)
    ours = [row for row in rows if row["provider"] == "fa2cupy"]
    assert [row["cache"] for row in ours] == ["2 x 70", "2 x 70", "ragged", "2 x 70"]
    assert float(ours[0]["us_median"]) == 2000 and all(row["host_us"] for row in ours)
    assert [row["ratio"] for row in rows if row["provider"] == "torch flash"] == ["1.000"]
    assert "| 16 | 4/2 | 1 | 2 x 70, pages of 16 |" in capsys.readouterr().out


def test_wrong_results_of_decoding_are_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "_COPIED_BYTES", 1 << 12)
    monkeypatch.setattr(decoding.fa2cupy, "decode", lambda q, *_, **__: (q, None))
    problem = decoding.CachedProblem("2 x 70", (70, 70), (4, 2), 16, 1)
    (failure,) = decoding.run_decode(FakeGpu(), [], 2, 1.0, tmp_path / "decode.csv", [problem])
    assert "an error of" in failure and not (tmp_path / "decode.csv").exists()


def test_the_cached_problems_are_those_that_are_promised():
    problems = list(decoding.cached_problems())
    assert {problem.head_dim for problem in problems} == {64, 128}
    assert {problem.page_size for problem in problems} == {None, 16, 64}
    assert max(problem.nbytes for problem in problems) == 128 * 8192 * 8 * 128 * 4


def test_gpu_check_runs_the_sections_that_a_change_is_held_to(monkeypatch, tmp_path):
    commands = []

    def run(command):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    assert gpu_check._run_benchmark(tmp_path) == "passed"
    ((_, script, *arguments),) = commands
    options = benchmark.parse_arguments(arguments)
    assert Path(script).name == "benchmark.py" and options.out == str(tmp_path)
    on_top = {"models", "features", "float32", "decode", "functions", "sparse"}
    assert set(options.sections) == set(benchmark.SECTIONS) - on_top


def test_csv_round_trip_and_summary(tmp_path):
    rows = list(made_up_rows())
    path = tmp_path / "benchmark.csv"
    measure.write_csv(path, benchmark.COLUMNS, rows)
    assert benchmark.summary(measure.read_csv(path)) == benchmark.summary(rows)
    assert benchmark.summary(rows)[0].split() == [
        "torch",
        "flash",
        "forward",
        "float16",
        "d=64",
        "worst",
        "2.00",
        "median",
        "2.00",
        "(4",
        "sizes)",
    ]


def test_the_table_has_speeds_and_the_ratios_measured_beside_them():
    rows = list(made_up_rows())
    for row in rows:
        if (row["provider"], row["operation"]) == ("torch cudnn", "two_pass"):
            row["ratio"] = 0.96
    table = tables.speed_table(rows, "float16", "torch cudnn")
    assert table[:2] == ["| | head_dim | seqlen 2048 | seqlen 4096 |", "|---|---|---|---|"]
    assert table[2] == "| forward | 64 | 400 (1.33) / 400 (1.33) | 400 (1.33) / 400 (1.33) |"
    assert table[6] == "| backward, `two_pass` | 64 | 400 (0.96) / 400 (0.96) | 400 (0.96) / 400 (0.96) |"
    assert len(table) == 8


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="modes of folders are POSIX")
def test_a_sweep_that_cannot_save_its_winner_says_why(tuning_folder, capsys):
    spec = KernelSpec("forward", "sm80", "sm_80", "float16", 64, False, TileConfig(64, 32, 4))
    device = DeviceInfo.named("sm_80")
    assert sweep.save(spec, device) == 0
    assert "saved 64x32" in capsys.readouterr().out
    tuning_folder.chmod(0o777)
    assert sweep.save(spec, device) == 1
    assert f"every user can write to {tuning_folder}" in capsys.readouterr().err


def test_the_table_of_the_readme_is_the_one_of_its_csv():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = re.search(r"are in \[benchmark\.csv\]\((\S+)\)", text)[1]
    table = tables.speed_table(measure.read_csv(ROOT / named), "float16", "torch cudnn")
    assert len(table) == 2 + 3 * len(benchmark.HEAD_DIMS)
    assert "\n".join(table) in text


def test_cudnn_is_timed_beside_two_pass_in_its_ordinary_mode():
    problem = Problem("float16", 64, 2048, 8, 32, True)
    peer = object.__new__(peers.TorchCudnn)
    assert all(peer.supports(problem, operation) for operation in peers.OPERATIONS)
    assert isinstance(peer.deterministic(), contextlib.nullcontext)


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="plots need matplotlib")
def test_plot_only(tmp_path, capsys):
    measure.write_csv(tmp_path / "benchmark.csv", benchmark.COLUMNS, made_up_rows())
    assert benchmark.main(["--plot-only", str(tmp_path / "benchmark.csv"), "--out", str(tmp_path / "plots")]) == 0
    for name in ("forward.png", "backward.png"):
        assert (tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG")
        assert str(tmp_path / "plots" / name) in capsys.readouterr().out or name == "backward.png"


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="plots need matplotlib")
def test_panels_are_in_the_order_of_numbers_and_none_is_empty(tmp_path, monkeypatch):
    figures = []
    new_figure = plots._new_figure
    monkeypatch.setattr(plots, "_new_figure", lambda *size: figures.append(new_figure(*size)) or figures[-1])
    head_dims = (32, 64, 128, 256, 96)  # as a file may have them, of which only some are there of float32
    rows = [
        {
            "gpu": "Test GPU", "date": "2026-01-01", "dtype": dtype, "head_dim": head_dim, "causal": causal, "batch": 1,
            "seqlen": benchmark.TOKENS[dtype], "operation": "forward", "provider": "fa2cupy", "tflops": 100.0,
        }
        for dtype, present in (("float16", head_dims), ("float32", (128, 64)))
        for head_dim in present
        for causal in (0, 1)
    ]  # fmt: skip
    benchmark.plot(rows, tmp_path)
    (figure,) = figures
    columns = [32, 64, 96, 128, 256]
    wanted = [f"head_dim {d}, float16 {mask}" for mask in ("full", "causal") for d in columns]
    wanted += [f"head_dim {d}, float32 {mask}" for mask in ("full", "causal") for d in (64, 128)]
    assert [axis.get_title() for axis in figure.axes] == wanted
    assert all(axis.axison and axis.patches for axis in figure.axes)
    lines = {axis.get_subplotspec().rowspan.start for axis in figure.axes}
    assert lines == {0, 1, 2}, "both masks of float32 are in one line"
    assert [axis.get_title() for axis in figure.axes if axis.get_ylabel()] == [wanted[i] for i in (0, 5, 10, 12)]


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="plots need matplotlib")
@pytest.mark.parametrize("script", [benchmark, methods], ids=["benchmark", "methods"])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"), ("", "it has no rows"), ("seqlen\n", "it has no rows"), (b"\x89PNG\0", "decode"),
        ("hello\nworld\n", "it has no '"), ("a" * 200_000, "field larger than field limit"),
    ],
    ids=["missing", "empty", "no rows", "picture", "other", "long"],
)  # fmt: skip
def test_plot_only_of_something_else_is_a_sentence(script, content, reason, tmp_path, capsys):
    path = tmp_path / "earlier.csv"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert script.main(["--plot-only", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"--plot-only: {path} cannot be shown as the CSV of an earlier run (")
    assert reason in told and told.count("\n") == 1
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="plots need matplotlib")
def test_plot_only_of_a_row_that_is_broken_is_a_sentence(tmp_path, capsys):
    measure.write_csv(tmp_path / "benchmark.csv", benchmark.COLUMNS, [{**row, "batch": "x"} for row in made_up_rows()])
    assert benchmark.main(["--plot-only", str(tmp_path / "benchmark.csv")]) == 2
    assert "invalid literal for int() with base 10: 'x'" in capsys.readouterr().err


def test_gpu_check_judges_each_part_of_the_sanitized_calls(monkeypatch, tmp_path):
    def run(command, **options):
        if "--tool" not in command:
            assert options["check"]
            return None
        errors = 3 if "memcheck" in command and command[-1] == "packed" else 0
        found = f"========= ERROR SUMMARY: {errors} errors"
        return subprocess.CompletedProcess(command, 9 if errors else 0, stdout=found, stderr="")

    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    monkeypatch.setattr(gpu_check.shutil, "which", lambda _: "compute-sanitizer")
    found = gpu_check._run_sanitizers(tmp_path)
    parts = re.search("PARTS = {(.*?)}", gpu_check.SANITIZED.read_text(encoding="utf-8"), re.DOTALL)[1]
    assert tuple(re.findall('"(.*?)"', parts)) == gpu_check.SANITIZED_PARTS
    each = {part: "3 errors" if part == "packed" else "0 errors" for part in gpu_check.SANITIZED_PARTS}
    assert found["memcheck"] == "; ".join(f"{part}: {text}" for part, text in each.items())
    assert found["initcheck"] == "0 errors" and found["racecheck"].startswith("0 errors; not judged: ")
    receipt = dict.fromkeys(gpu_check.STEPS, "skipped")
    assert gpu_check._passed(receipt | {"sanitizers": found | {"memcheck": "0 errors"}})
    assert not gpu_check._passed(receipt | {"sanitizers": found})


def test_short_runs_of_gpu_check_make_one_receipt(monkeypatch, tmp_path):
    """A step that breaks off leaves what earlier runs have noted of the same code."""
    versions = {"nvrtc": "13.0", "cupy": "14", "python": "3.12"}
    suite = {"passed": 3, "failed": 0, "skipped": 1, "seconds": 2}
    monkeypatch.setattr(gpu_check, "find_gpu", lambda: types.SimpleNamespace(name="Test GPU", driver="1"))
    monkeypatch.setattr(gpu_check, "info", lambda: versions)
    monkeypatch.setattr(gpu_check, "_compile_ahead", lambda: None)
    monkeypatch.setattr(gpu_check, "_run_sanitizers", lambda folder: {"memcheck": "0 errors"})
    monkeypatch.setattr(gpu_check, "_run_tests", lambda folder, marker, processes, more: suite)
    monkeypatch.setenv("FA2CUPY_CACHE_DIR", str(tmp_path / "cache"))
    run = ["--out", str(tmp_path), "--cache", str(tmp_path / "cache"), "--skip"]
    assert gpu_check.main([*run, "tests", "large", "isolated", "benchmark"]) == 0

    def killed(folder, marker, processes, more):
        if "not large" not in marker:
            raise KeyboardInterrupt
        return suite

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(gpu_check, "_run_tests", killed)
        gpu_check.main([*run, "sanitizers", "benchmark"])
    receipt = json.loads((tmp_path / "check.json").read_text())
    assert [receipt[step] for step in gpu_check.STEPS] == [
        suite, "not finished", "not finished", {"memcheck": "0 errors"}, "skipped",
    ]  # fmt: skip
    assert gpu_check.main([*run, "tests", "sanitizers", "benchmark"]) == 0
    receipt = json.loads((tmp_path / "check.json").read_text())
    assert [receipt[step] for step in gpu_check.STEPS] == [suite, suite, suite, {"memcheck": "0 errors"}, "skipped"]
    monkeypatch.setattr(gpu_check, "code_digest", lambda root: "other code")
    assert gpu_check.main([*run, *gpu_check.STEPS]) == 0
    receipt = json.loads((tmp_path / "check.json").read_text())
    assert {receipt[step] for step in gpu_check.STEPS} == {"skipped"}


def test_gpu_check_without_a_gpu_says_so(monkeypatch, capsys, tmp_path):
    def no_gpu():
        raise RuntimeError("no driver")

    monkeypatch.setattr(measure, "Gpu", no_gpu)
    assert gpu_check.main(["--out", str(tmp_path / "results")]) == 2
    assert capsys.readouterr().err == "this needs a CUDA GPU and CuPy: no driver\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [None, "", "[]", "{}", "# README"])
def test_gpu_check_verifies_receipts_only(content, tmp_path, capsys):
    path = tmp_path / "check.json"
    if content is not None:
        path.write_text(content)
    assert gpu_check.main(["--verify", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"--verify: {path} is not a receipt (") and told.count("\n") == 1
    path.write_text('{"digest": "0"}')
    assert gpu_check.main(["--verify", str(path)]) == 1
    assert "is about other code" in capsys.readouterr().out


# --- a checkout that is not installed ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packages_without_fa2cupy(tmp_path_factory) -> Path:
    """Everything that is installed beside NumPy and Jinja, but fa2cupy, in a folder for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("packages")
    for installed in {Path(module.__file__).parent.parent for module in (np, jinja2, ml_dtypes)}:
        for path in installed.iterdir():
            if "fa2cupy" not in path.name and not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_scripts_find_the_package_of_a_bare_checkout_from_anywhere(script, packages_without_fa2cupy, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(packages_without_fa2cupy)}
    command = [sys.executable, "-S"]  # without site-packages, where fa2cupy may be installed
    alone = [*command, "-c", "import numpy, fa2cupy"]
    run = subprocess.run(alone, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "No module named 'fa2cupy'" in run.stderr
    run = subprocess.run([*command, script, "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"usage: {script.name}")


# --- sweep ------------------------------------------------------------------------------------------------------------


@needs_cupy
def test_sweep_for_a_named_architecture(tmp_path, capsys):
    arguments = [
        "--arch",
        "sm_80",
        "--operation",
        "forward",
        "--head-dim",
        "64",
        "--b-r",
        "64",
        "--b-c",
        "64",
        "--warps",
        "4",
        "--stages",
        "1",
        "2",
        "--blocks",
        "1",
    ]
    assert sweep.main([*arguments, "--jobs", "2", "--out", str(tmp_path)]) == 0
    rows = measure.read_csv(tmp_path / "sweep-forward-float16-d64-s4096.csv")
    assert [(row["b_r"], row["b_c"], row["num_warps"], row["num_stages"]) for row in rows] == [
        ("64", "64", "4", "1"),
        ("64", "64", "4", "2"),
    ]
    tile_bytes = 64 * 64 * 2
    for row, tiles in zip(rows, (3, 5), strict=True):  # Q, and K and V once or twice
        registers, shared = int(row["registers"]), int(row["shared_bytes"])
        assert 64 <= registers <= 255 and int(row["spill_bytes"]) == 0 and row["status"] == "compiled"
        assert tiles * tile_bytes <= shared < (tiles + 1) * tile_bytes
        blocks = min(65536 // (-(-registers // 8) * 8 * 128), 164 * 1024 // (shared + 1024), 2048 // 128)
        assert float(row["occupancy"]) == pytest.approx(blocks * 128 / 2048, rel=1e-4)
    assert (tmp_path / "sweep-forward-float16-d64-s4096.png").exists() == HAS_MATPLOTLIB
    output = capsys.readouterr().out
    assert "shared memory" in output and measure.format_bytes(int(rows[0]["shared_bytes"])) in output


def compile_or_die(spec):
    if spec.tile.b_r == 64:
        os.abort()
    if spec.tile.b_r == 128:
        raise ValueError("ptxas did not like it")
    return Report(registers=spec.tile.b_r)


def compile_forever(spec):
    time.sleep(600)


def specs_with(*heights):
    return [KernelSpec("forward", "sm80", "sm_80", "float16", 64, False, TileConfig(b_r, 64, 4)) for b_r in heights]


def test_a_crashing_compiler_is_one_row():
    specs = specs_with(32, 64, 128, 16)
    advanced = []
    reports = compile_all(specs, 2, lambda: advanced.append(1), compile_or_die)
    assert [report.registers for report in reports] == [32, 0, 0, 16]
    assert "compiler crashed (exit code -" in reports[1].failure
    assert reports[2].failure == "refused: ptxas did not like it"
    assert len(advanced) == len(specs)
    row = sweep.Row(specs[1], reports[1], 0.0, reports[1].failure)
    problem = Problem("float16", 64, 4096, 4, 32, False)
    assert "compiler crashed" in sweep.table([row], problem)[1]
    assert sweep.as_record(row, problem, {})["status"] == reports[1].failure


def test_a_compiler_that_hangs_is_ended():
    (report,) = compile_all(specs_with(32), 1, lambda: None, compile_forever, timeout_s=1.0)
    assert report.failure == "took longer than 1 s"


def test_filters_and_pruning(capsys):
    base = ["--arch", "sm_80", "--operation", "forward", "--head-dim", "60"]
    device = DeviceInfo.named("sm_80")
    everything = sweep.choose_specs(sweep.parse_arguments([*base, "--all"]), device)
    assert {spec.tile for spec in everything} == set(legal_configs("forward", head_dim=64, arch="sm_80"))
    assert {spec.head_dim for spec in everything} == {64}
    pruned = sweep.choose_specs(sweep.parse_arguments(base), device)
    assert set(pruned) < set(everything)
    for spec in pruned:
        assert spec.tile.blocks_per_sm * (spec.shared_memory_bytes + 1024) <= device.shared_memory_per_multiprocessor
    some = sweep.choose_specs(sweep.parse_arguments([*base, "--max-configs", "5", "--warps", "4"]), device)
    assert len(some) == 5 and {spec.tile.num_warps for spec in some} == {4}
    assert sweep.main([*base, "--b-r", "7"]) == 1
    assert "no legal tile is left" in capsys.readouterr().err


def test_sweep_without_gpu_or_arch_says_what_to_do(monkeypatch, capsys):
    def no_gpu():
        raise RuntimeError("no driver")

    monkeypatch.setattr(sweep, "Gpu", no_gpu)
    assert sweep.main(["--operation", "forward"]) == 2
    assert "no GPU can be used (no driver); name an architecture" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--arch sm_75", "no kernel takes float16 on T4 (sm_75): that needs compute capability 8.0 or newer"),
        ("--arch sm_86 --family sm90", "family 'sm90' does not run on GeForce RTX 3090 (sm_86)"),
        ("--arch sm_86 --family sm70", "family: expected one of ['sm90', 'sm80', 'simt'], got 'sm70'"),
        ("--arch sm_8", "arch: 'sm_8' is not known; known are sm_70, "),
    ],
)
def test_sweep_of_what_there_is_not_is_a_sentence(arguments, text, capsys):
    assert sweep.main(["--operation", "forward", *arguments.split()]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"sweep.py: {text}") and told.count("\n") == 1


@pytest.mark.parametrize(
    ("script", "arguments", "text"),
    [
        (sweep, "--operation forward --head-dim 999", "--head-dim: up to 256 is supported, got 999"),
        (sweep, "--operation forward --head-dim 0", "--head-dim: expected an int of at least 1, got '0'"),
        (sweep, "--operation forward --seqlen 0", "--seqlen: expected an int of at least 1, got '0'"),
        (sweep, "--operation forward --jobs -1", "--jobs: expected"),
        (methods, "--head-dims 64 300", "--head-dims: up to 256 is supported, got 300"),
        (methods, "--seqlens 0", "--seqlens: expected an int of at least 1, got '0'"),
        (methods, "--heads 16", "--heads: expected two numbers such as 16/2, got '16'"),
        (methods, "--heads 16/3", "--heads: 16 is not a multiple of 3"),
        (benchmark, "--head-dims 0", "--head-dims: expected an int of at least 1, got '0'"),
        (benchmark, "--rounds 0", "--rounds: expected an int of at least 1, got '0'"),
        (features, "--seqlens x", "--seqlens: expected an int of at least 1, got 'x'"),
        (gpu_check, "--processes 0", "--processes: expected an int of at least 1, got '0'"),
    ],
)
def test_numbers_that_cannot_be_are_refused_by_name(script, arguments, text, capsys):
    with pytest.raises(SystemExit) as ended:
        script.main(arguments.split())
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


@needs_cupy
def test_sweep_for_turing(tmp_path, capsys):
    arguments = "--arch sm_75 --operation forward --dtype float32 --head-dim 32 --b-r 32 --b-c 32 --warps 8 --blocks 1"
    assert sweep.main([*arguments.split(), "--jobs", "1", "--out", str(tmp_path)]) == 0
    (row,) = measure.read_csv(tmp_path / "sweep-forward-float32-d32-s4096.csv")
    assert (row["arch"], row["family"], row["status"]) == ("sm_75", "simt", "compiled")
    assert "on T4 (sm_75)" in capsys.readouterr().out


@pytest.mark.parametrize("operation", sweep.METHODS)
def test_sweep_times_checks_and_saves(operation, tmp_path, monkeypatch, capsys, tuning_folder):
    """With a compiler, a launch and a clock that are made up: the faster of the right tiles wins."""
    launched = []

    def bind(plan, buffers):
        (stage,) = plan.stages
        assert stage.spec.operation == operation

        def kernel(addresses, stream):
            named = dict(zip(buffers, addresses, strict=True))
            launched.append({name: named[name] for name in stage.spec.params.pointers})
            gpu.clock = float(stage.spec.tile.b_r)
            if stage.spec.tile.b_c == 32:
                raise RuntimeError("launch failed")

        return (kernel,)

    class Clocked(FakeGpu):
        clock = 0.0

        def elapsed_ms(self, call, repeats):
            call()
            return self.clock

    gpu = Clocked()
    monkeypatch.setattr(sweep, "Gpu", lambda: gpu)
    monkeypatch.setattr(sweep, "bind_plan", bind)
    monkeypatch.setattr(sweep, "legal_configs", lambda *a, **k: legal_configs(*a, **{**k, "arch": "sm_90"}))
    monkeypatch.setattr(sweep, "compile_all", lambda specs, jobs, advance: [Report(registers=128)] * len(specs))
    monkeypatch.setattr(sweep, "TOKENS", {"float16": 96})
    monkeypatch.setattr(sweep, "MODEL_DIM", 64)
    filters = [
        "--b-r",
        "32",
        "64",
        "--b-c",
        "32",
        "64",
        "--stages",
        "1",
        "--blocks",
        "1",
        "--seqlen",
        "48",
        "--head-dim",
        "64",
        "--save",
        "--warps",
    ]
    warps = "2" if operation in ("forward", "backward_dq") else "4"
    assert sweep.main(["--operation", operation, "--family", "sm80", *filters, warps, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.csv")
    rows = {(row["b_r"], row["b_c"]): row for row in measure.read_csv(path)}
    assert {key: row["status"] for key, row in rows.items()} == {
        ("32", "32"): "launch failed", ("64", "32"): "launch failed", ("32", "64"): "ok", ("64", "64"): "ok",
    }  # fmt: skip
    assert rows["32", "64"]["ms_median"] == "32" and rows["32", "32"]["ms_median"] == ""
    assert all(all(table.values()) for table in launched)
    tuning._tuned_tiles.cache_clear()  # as in a new process
    saved = tuning.tuned_tile(operation, SM80, "float16", 64, False, gpu.info)
    assert (saved.b_r, saved.b_c) == (32, 64)
    assert "saved 32x64" in capsys.readouterr().out
