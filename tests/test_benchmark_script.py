"""The grid of the benchmark without a GPU, from checks to files, tables and plots."""

from __future__ import annotations

import csv
import json
from subprocess import CompletedProcess

import benchmark
import pytest
from common import check, function_calls, measure, peers, plots, startup, tables
from common.measure import Problem
from support.fake_timing import HAS_MATPLOTLIB, FakeGpu, made_up_rows


def test_sizes_of_the_speed_section():
    problems = list(benchmark.speed_problems(benchmark.DTYPES, benchmark.HEAD_DIMS, benchmark.SEQLENS))
    assert {p.batch * p.seqlen for p in problems if p.dtype != "float32"} == {16384}
    assert {p.batch * p.seqlen for p in problems if p.dtype == "float32"} == {4096}
    assert {p.head_dim: p.num_heads for p in problems} == {32: 64, 64: 32, 96: 21, 128: 16, 256: 8}
    assert len({p for p in problems if p.dtype == "float16"}) == 2 * 5 * 4


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
    tiled = [row for row in rows if row["operation"] not in ("jvp", "backward_jvp")]
    assert all(bool(row["tile"]) == (row["provider"] == "fa2cupy") for row in tiled)
    assert [row["operation"] for row in rows if row not in tiled and row["host_us"]] == ["jvp", "backward_jvp"]
    forward = next(row for row in timed if row["operation"] == "forward")
    assert float(forward["tflops"]) == pytest.approx(4 * 2 * 32**2 * 64 / 2e-3 / 1e12, rel=1e-4)
    assert int(forward["extra_bytes"]) == 100 + 2 * 32 * 4  # 100 bytes of the fake meter, and lse
    assert {row["seqlen"] for row in timed} == {"32", "64", "100"}
    assert all(float(row["host_us"]) > 0 for row in rows if not row["ms_median"])
    assert "TFLOP/s" in capsys.readouterr().out
    assert any("cupy unfused" in line and "worst  1.00" in line for line in benchmark.summary(run.rows))


@pytest.mark.matrix
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


def test_startup_joins_both_processes_and_has_the_backward_of_attention_in_others(
    small_benchmark, tmp_path, monkeypatch, capsys
):
    compiled = {"new_kernels": 1, "compile_s_longest": 1.5, "compile_s_total": 1.5}
    asked = []

    def first_calls(problem, calls, cache):
        asked.append((problem.head_dim, calls, cache))
        milliseconds = problem.head_dim + (1600 if asked.count(asked[-1]) == 1 else 50)
        return [{"call": call, "milliseconds": milliseconds, **compiled} for call in calls]

    monkeypatch.setattr(startup, "_first_calls", first_calls)
    run = benchmark.run(small_options("--sections", "startup"), FakeGpu(), tmp_path)
    assert not run.failures
    assert asked[::2] == asked[1::2] and len({cache for *_, cache in asked}) == 4  # two processes with each cache
    rows = measure.read_csv(tmp_path / "startup.csv")
    assert [row["call"] for row in rows] == ["forward", "single_pass", "two_pass", "attention"] * 2
    fresh, cached = ([row[f"first_call_ms_{kind}"] for row in rows] for kind in ("fresh", "cached"))
    assert (fresh, cached) == (["1664"] * 4 + ["1728"] * 4, ["114"] * 4 + ["178"] * 4)
    assert {row["compile_s_longest"] for row in rows} == {"1.5"}
    assert "114 ms from the disk cache" in capsys.readouterr().out


def test_the_process_of_first_calls_tells_the_times_of_each(monkeypatch, capsys):
    monkeypatch.setattr(startup, "Gpu", FakeGpu)
    calls = ("forward", "single_pass", "two_pass", "attention")
    startup._child("float32", "32", "1", *calls)
    found = json.loads(capsys.readouterr().out)
    assert tuple(row["call"] for row in found) == calls
    assert all(row["milliseconds"] > 0 for row in found)


def test_calls_of_functions_are_measured_beside_plain_ones_in_processes_of_their_own(
    small_benchmark, tmp_path, monkeypatch, capsys
):
    caches, asked = [], []

    def answer(module, arguments, cache):
        caches.append(cache)
        asked.append(arguments)
        grown = 0 if arguments[0] == "plain" else 3.5
        return {"forward": (1.5, 16.0 + grown), "backward": (2.5, 30.0 + 2 * grown)}

    monkeypatch.setattr(function_calls, "answer_of", answer)
    run = benchmark.run(small_options("--sections", "calls"), FakeGpu(), tmp_path)
    assert not run.failures and len(set(caches)) == len(caches)
    assert asked == [(name, d) for d in ("64", "128") for name in ("plain", *function_calls.NAMES)]
    rows = measure.read_csv(tmp_path / "function-calls.csv")
    assert {(row["feature"] == "plain", row["operation"], row["growth_us"]) for row in rows} == {
        (True, "forward", "0"), (True, "backward", "0"), (False, "forward", "3.5"), (False, "backward", "7"),
    }  # fmt: skip
    assert {row["first_s"] for row in rows} == {"1.5", "2.5"}
    assert "alibi           d=64  forward   first 1.50 s, host 19.5 us, +3.5 us beside none" in capsys.readouterr().out


def test_a_process_of_calls_that_fails_is_reported(small_benchmark, tmp_path, monkeypatch):
    monkeypatch.setattr(startup.subprocess, "run", lambda *a, **k: CompletedProcess(a, 1, stdout="", stderr="no GPU"))
    run = benchmark.run(small_options("--sections", "calls"), FakeGpu(), tmp_path)
    assert run.failures == ["FAILED: the process that times first calls failed:\nno GPU"]


@pytest.mark.parametrize("name", ("plain", "alibi", "document"))
def test_the_process_of_calls_tells_the_times_of_both(name, monkeypatch, capsys):
    monkeypatch.setattr(function_calls, "Gpu", FakeGpu)
    monkeypatch.setattr(function_calls, "call_problem", lambda head_dim: Problem("float32", head_dim, 32, 1, 2, True))
    monkeypatch.setattr(
        function_calls, "host_microseconds", lambda gpu, candidates: {x.name: 1.0 * len(x.call()) for x in candidates}
    )
    function_calls._child(name, "64")
    found = json.loads(capsys.readouterr().out)
    assert {operation: host for operation, (first, host) in found.items()} == {"forward": 2, "backward": 3}
    assert all(first > 0 for first, host in found.values())


def test_benchmark_without_gpu_says_so(monkeypatch, capsys):
    def no_gpu():
        raise RuntimeError("no driver")

    monkeypatch.setattr(measure, "Gpu", no_gpu)
    assert benchmark.main([]) == 2
    assert "needs a CUDA GPU and CuPy: no driver" in capsys.readouterr().err


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


@pytest.mark.matrix
@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="plots need matplotlib")
def test_plot_only(tmp_path, capsys):
    measure.write_csv(tmp_path / "benchmark.csv", benchmark.COLUMNS, made_up_rows())
    assert benchmark.main(["--plot-only", str(tmp_path / "benchmark.csv"), "--out", str(tmp_path / "plots")]) == 0
    for name in ("forward.png", "backward.png"):
        assert (tmp_path / "plots" / name).read_bytes().startswith(b"\x89PNG")
        assert str(tmp_path / "plots" / name) in capsys.readouterr().out or name == "backward.png"


@pytest.mark.matrix
@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="plots need matplotlib")
def test_panels_are_in_the_order_of_numbers_and_none_is_empty(tmp_path, monkeypatch):
    figures = []
    new_figure = plots.new_figure
    monkeypatch.setattr(plots, "new_figure", lambda *size: figures.append(new_figure(*size)) or figures[-1])
    head_dims = (32, 64, 128, 256, 96)  # in any order, as in a file; float32 has only some
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
def test_plot_only_of_a_row_that_is_broken_is_a_sentence(tmp_path, capsys):
    measure.write_csv(tmp_path / "benchmark.csv", benchmark.COLUMNS, [{**row, "batch": "x"} for row in made_up_rows()])
    assert benchmark.main(["--plot-only", str(tmp_path / "benchmark.csv")]) == 2
    assert "invalid literal for int() with base 10: 'x'" in capsys.readouterr().err
