"""Two checkouts compared, without a GPU."""

from __future__ import annotations

from pathlib import Path

import compare
import ml_dtypes
import numpy as np
import pytest
from common import checkout, measure

import fa2cupy


class FakeCheckout:
    """A process with calls of 1 ms; forwards of the slow folder take 2 ms in the first pair and 1.5 ms in others."""

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
    """Provides an older checkout, with fake processes instead of those of checkouts."""
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


def test_compare_has_each_feature_at_the_sizes_that_it_is_timed_at():
    cells = [cell for cell in compare.all_cells(["bfloat16"]) if cell.feature]
    assert len(cells) == len(set(cells)) and {cell.feature for cell in cells} == set(checkout.FEATURES) - {""}
    assert {cell.seqlen for cell in cells if cell.feature == "bias"} == {2048}
    assert {cell.seqlen for cell in cells if cell.feature == "score_mod"} == {2048, 16384}
    assert {cell.operation for cell in cells if cell.feature == "dbias"} == {"default"}


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


@pytest.mark.parametrize("feature", checkout.FEATURES)
def test_a_checkout_takes_every_call_that_is_compared(monkeypatch, feature):
    monkeypatch.setattr(checkout, "TOKENS", 64)
    monkeypatch.setattr(checkout, "MODEL_DIM", 32)
    rng = np.random.default_rng(0)
    shape = (64, 2, 16) if feature == "packed" else (2, 32, 2, 16)
    inputs = tuple(rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for _ in range(4))
    worker = object.__new__(checkout.Worker)
    worker._cupy, worker._package = np, fa2cupy
    worker._inputs = lambda cell: inputs
    of_keys = (2, 4, 2, 16) if feature == "few keys" else shape
    gradients = {"dbias": [(2, 32, 32)], "dscore_args": [(32, 2)]}.get(feature, [])
    for operation in ("forward", "two_pass", "default"):
        results = worker._bind(checkout.Cell("bfloat16", 16, 32, True, operation, feature))()
        wanted = [shape] if operation == "forward" else [shape, of_keys, of_keys, *gradients]
        assert [x.shape for x in results] == wanted
