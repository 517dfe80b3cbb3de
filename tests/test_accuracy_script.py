"""The script that measures the errors of float64, without a GPU."""

from __future__ import annotations

import accuracy
import numpy as np
import pytest
from common import measure
from common.accuracy import Promise, data
from support.fake_timing import FakeGpu

import fa2cupy


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(measure, "Gpu", FakeGpu)
    monkeypatch.setattr(accuracy, "KINDS", ("normal", "outliers"))
    monkeypatch.setattr(accuracy, "HEAD_DIMS", (16,))
    monkeypatch.setattr(accuracy, "SIZES", ((20, 20, True), (8, 60, True), (60, 8, False)))


def test_from_the_kinds_of_data_to_a_table(small, tmp_path, capsys):
    assert accuracy.main(["--out", str(tmp_path)]) == 0
    rows = measure.read_csv(tmp_path / "accuracy.csv")
    assert tuple(rows[0]) == accuracy.COLUMNS
    assert {(row["family"], row["method"]) for row in rows} >= {("sm80", "two_pass"), ("simt", "single_pass")}
    assert len(rows) == 2 * 4 * len(accuracy.kernels_of(FakeGpu.info))
    assert all(float(row["usual"]) >= 1.1e-16 and 0 < float(row["of_allowed"]) < 1 for row in rows)
    for row in rows:
        assert float(row["ratio"]) == pytest.approx(float(row["error"]) / float(row["usual"]), rel=1e-3)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| o / dq / dk / dv | sm80, ") and lines[2].startswith("| normal | ")


def test_a_table_has_the_largest_ratio_of_all_sizes(small, monkeypatch):
    right = accuracy.results_of

    def wrong_beside_few_keys(inputs, causal, kernels):
        found = right(inputs, causal, kernels)
        return found | {"dv": found["dv"] + 1e-9} if inputs[1].shape[1] == 8 else found

    monkeypatch.setattr(accuracy, "results_of", wrong_beside_few_keys)
    rows = accuracy.measure(np, "normal", 16, [accuracy.Kernels("simt", "two_pass")])
    (row,) = (row for row in rows if row["result"] == "dv")
    assert (row["seqlen_q"], row["seqlen_k"]) == (60, 8) and row["ratio"] > 1e5
    assert all(row["ratio"] < 4 for row in rows if row["result"] != "dv")


def test_a_result_that_was_rounded_to_float32_breaks_the_promise():
    inputs = data("normal", 40, 16, "float64")
    o, _ = fa2cupy.forward(*inputs[:3])
    promise = Promise(inputs, causal=False)
    promise.check({"o": o})
    with pytest.raises(AssertionError):
        promise.check({"o": o.astype("float32").astype("float64")})


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    def no_gpu():
        raise RuntimeError("no driver")

    monkeypatch.setattr(measure, "Gpu", no_gpu)
    assert accuracy.main([]) == 2
    assert "needs a CUDA GPU and CuPy: no driver" in capsys.readouterr().err
