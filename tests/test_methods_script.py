"""The sweep of methods and splits, without a GPU."""

from __future__ import annotations

import re

import methods
import pytest
from common import check, measure
from common.measure import Problem
from support.fake_timing import FakeGpu


class SteeredGpu(FakeGpu):
    """A GPU with a clock that the last call has set."""

    clock = 2.0

    def elapsed_ms(self, call, repeats):
        call()
        return self.clock


@pytest.fixture
def splitting(monkeypatch):
    """Returns a GPU on which two splits take 2 ms, the default 3 ms and others 4 ms; `two_pass` allows only one."""
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


@pytest.mark.matrix
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
    assert {row["taken"] for row in defaults if row["operation"] == "backward"} == {"one_tile, 1 splits"}, (
        "so few keys fit in one block"
    )
    longer = [row for row in rows if (row["operation"], row["seqlen"], row["window"]) == ("backward", "64", "")]
    choices = {(row["method"], row["num_splits"]) for row in longer}
    assert choices == {("default", ""), ("two_pass", "1"), *(("single_pass", splits) for splits in "124")}
    assert splitting.precompiled[1:3] == (methods.METHODS, [(), ("window",)])
    told = capsys.readouterr().out
    assert "without two_pass, 2 splits: num_splits: expected 1 with 'two_pass', got 2" in told
    assert "10 beyond what is wanted (wanted: 3 % at most, 1 % on average)" in told
    assert methods.main(["--show", str(tmp_path / "methods.csv")]) == 0
    assert "loses at most  50.0 %, on average  50.0 %" in capsys.readouterr().out


@pytest.mark.matrix
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
    assert re.search("of few queries +loses", capsys.readouterr().out)
    pairs = {row["causal"]: float(row["tflops"]) for row in rows if (row["queries"], row["num_splits"]) == ("8", "2")}
    assert pairs["1"] / pairs["0"] == pytest.approx((8 * 64 - 28) / (8 * 64), rel=1e-3)
    assert methods.main(["--judge", str(path)]) == 0
    assert {row["queries"] for row in measure.read_csv(path)} == {"4", "8"}


@pytest.mark.matrix
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
        assert {row["loss"] for row in own if row["operation"] == "backward"} == {loss}  # 3 splits get the time of 4
        assert {row["taken"] for row in own if row["operation"] == "backward"} == {str(taken)}
    assert "loses at most 100.0 %" in capsys.readouterr().out
    assert methods.main(["--judge", str(tmp_path / "absent.csv")]) == 2
    assert capsys.readouterr().err.startswith("--judge: ")


def test_splits_leave_each_a_tile_and_do_not_fill_a_full_gpu_still_more():
    def splits(operation, seqlen, num_heads=8, num_heads_kv=1, window=None):
        cell = methods.Cell(operation, Problem("bfloat16", 128, seqlen, 1, num_heads, True, num_heads_kv), window)
        return [choice.num_splits for choice in cell.choices(multiprocessors=132) if choice.method != "two_pass"]

    assert splits("backward", 512) == [1, 2, 4, 8, 16]  # 4 key tiles, each with 4 query tiles of 8 heads
    assert splits("backward", 512, num_heads_kv=8) == [1, 2, 4]
    assert splits("backward", 4096, num_heads_kv=8) == [1, 2]  # 256 blocks, of at most 528
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
