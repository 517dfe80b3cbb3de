"""The section numpy of the benchmark: every case is checked against attention written out, measured and written."""

from __future__ import annotations

import functools

import benchmark
import numpy as np
import pytest
from common import measure, on_numpy

import fa2cupy

SIZES = {"shapes": ((2, 32, 2, 8),), "caches": ((2, 32, 4, 2, 8),)}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(on_numpy, "_SAMPLE_S", 0)
    monkeypatch.setattr(on_numpy, "_has_torch", lambda: False)


def test_every_case_is_checked_and_measured(tmp_path, capsys):
    path = tmp_path / "numpy.csv"
    assert not on_numpy.run_numpy(on_numpy.CASES, 1, path, busy=(0,), **SIZES)
    rows = measure.read_csv(path)
    assert tuple(rows[0]) == on_numpy.COLUMNS
    assert {row["case"] for row in rows} == set(on_numpy.CASES)
    assert len(rows) == 2 * (2 * len(on_numpy.CASES) - 2), "ours and written out; decode has no backward"
    assert all((float(row["ratio"]) > 0) if row["provider"] == "numpy" else not row["ratio"] for row in rows)
    assert benchmark.main(["--plot-only", str(path)]) == 0
    assert "block_mask" in capsys.readouterr().out


def test_a_wrong_result_is_reported_and_not_measured(tmp_path, monkeypatch):
    def wrong(*arrays, **options):
        return (np.zeros_like(arrays[0]), None)

    monkeypatch.setattr(fa2cupy, "decode", wrong)
    monkeypatch.setattr(benchmark, "run_numpy", functools.partial(on_numpy.run_numpy, busy=(0,), **SIZES))
    monkeypatch.setattr(benchmark, "CASES", ("plain", "decode"))
    assert benchmark.main(["--sections", "numpy", "--rounds", "1", "--out", str(tmp_path)]) == 1
    assert {row["case"] for row in measure.read_csv(tmp_path / "numpy.csv")} == {"plain"}
