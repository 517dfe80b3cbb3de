"""The section wide of the benchmark without a GPU, from checks to files, tables and pages."""

from __future__ import annotations

import dataclasses

import benchmark
import pytest
from common import decoding, measure, peers, wide
from measured import rows, speed
from support.fake_timing import FakeGpu


@pytest.fixture
def small_wide(monkeypatch):
    """Shrinks rows and heads, and lets attention in CuPy stand for PyTorch's operators."""

    def problems():
        return [dataclasses.replace(one, seqlen=one.seqlen // 128, num_heads=1) for one in wide.wide_problems()]

    def cached():
        return [
            dataclasses.replace(one, lengths=(one.lengths[0] // 1024,) * len(one.lengths))
            for one in wide.latent_problems()
        ]

    monkeypatch.setattr(decoding, "_COPIED_BYTES", 1 << 12)
    monkeypatch.setattr(decoding, "host_microseconds", lambda gpu, calls, rounds: {calls[0].name: 20.0})
    monkeypatch.setattr(benchmark, "wide_problems", problems)
    monkeypatch.setattr(benchmark, "latent_problems", cached)
    monkeypatch.setattr(speed, "wide_problems", problems)
    monkeypatch.setattr(speed, "WIDE_SEQLENS", (16, 64))
    monkeypatch.setattr(benchmark, "WIDE_PEERS", {"efficient": peers.CupyUnfused})


def run_section(folder):
    options = benchmark.parse_arguments(["--sections", "wide", "--rounds", "1"])
    return benchmark.run(options, FakeGpu(), folder)


def test_wide_heads_from_checks_to_files_and_pages(small_wide, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rows, "_read", rows._read.__wrapped__)
    monkeypatch.setattr(rows, "SCRIPTS", tmp_path)
    assert speed.wide().startswith("They have not been measured on this card yet: `python")
    folder = tmp_path / "results" / "h200"
    folder.mkdir(parents=True)
    run = run_section(folder)
    assert not run.failures
    made = measure.read_csv(folder / "wide.csv")
    assert tuple(made[0]) == wide.COLUMNS
    ours = [row for row in made if row["provider"] == "fa2cupy"]
    assert len(ours) == 4 * 2 * 2 * 2 + 4 and all(float(row["tflops"]) > 0 for row in ours)
    latent = [row for row in ours if row["operation"] == "decode"]
    assert {(row["head_dim"], row["head_dim_v"], row["num_heads"]) for row in latent} == {
        ("576", "512", "16"), ("576", "512", "128")
    }  # fmt: skip
    assert float(latent[0]["tflops"]) == pytest.approx(2 * 64 * 4 * 16 * (576 + 512) / 2e-3 / 1e12, rel=1e-3)
    assert float(latent[0]["gbs"]) == pytest.approx(64 * 4 * 576 * 2 / 2e-3 / 1e9, abs=0.5)
    text = speed.wide()
    assert "| 512 / 256 | causal | 0 (1.00) / 0 (1.00) | 0 (1.00) / 0 (1.00) |" in text
    assert "| 128 | 64 x 4096 | 2.000 |" in text
    capsys.readouterr()
    assert benchmark.main(["--plot-only", str(folder / "wide.csv")]) == 0
    printed = capsys.readouterr().out
    assert "| 384/384, full | 1.00 / 1.00 | 1.00 / 1.00 |" in printed
    assert "decode 576/512, 128 heads, 1 x 32: 2.000 ms" in printed


def test_a_wrong_result_of_latent_attention_is_not_timed(small_wide, tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "_check", lambda gpu, problem, inputs: "an error of 1")
    run = run_section(tmp_path)
    assert len(run.failures) == 4 and all("an error of 1" in text for text in run.failures)
    assert {row["operation"] for row in measure.read_csv(tmp_path / "wide.csv")} == {"forward", "default"}
