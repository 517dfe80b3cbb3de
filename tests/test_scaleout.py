"""``python -m fa2cupy scaleout``."""

from __future__ import annotations

import multiprocessing
import queue
import types

import pytest

from fa2cupy import cli, scaleout


def test_simulated_ranks_are_checked(capsys, monkeypatch):
    monkeypatch.setattr(scaleout, "_ITERATIONS", 1)
    assert (
        cli.main(["scaleout", "--device", "cpu", "--ranks", "2", "--rows", "64", "--heads", "4", "--heads-kv", "2"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 simulated ranks on NumPy, float64, causal, 64 rows, 4/2 heads of 32."
    assert [line.split()[0] for line in lines[3:5]] == ["heads", "gather"]
    assert lines[5] == "All results are within 1e-12."


def test_heads_that_cannot_be_divided_are_left_out(capsys, monkeypatch):
    monkeypatch.setattr(scaleout, "_ITERATIONS", 1)
    assert scaleout.run_scaleout("cpu", 3, 48, 4, 2) == 0
    assert "heads " not in [line[:6] for line in capsys.readouterr().out.splitlines()[3:]]


def test_a_wrong_result_is_reported(capsys, monkeypatch):
    monkeypatch.setattr(scaleout, "_ITERATIONS", 1)
    right = scaleout.ranks_api.forward

    def wrong(comm, *arrays, scheme, **options):
        o, lse = right(comm, *arrays, scheme=scheme, **options)
        return (o + 1e-3 if scheme == "gather" else o), lse

    monkeypatch.setattr(scaleout.ranks_api, "forward", wrong)
    assert scaleout.run_scaleout("cpu", 2, 32, 2, 2) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "WRONG RESULT"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "4", "--rows", "99"], "multiple of 8, for 4 ranks in zigzag order, got 99; pad it to 104"),
        (["--ranks", "-1"], "--ranks: expected at least 1, got -1"),
    ],
)
def test_numbers_that_do_not_fit(arguments, message, capsys):
    assert cli.main(["scaleout", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_without_the_gpus_that_are_asked_for(capsys, monkeypatch):
    for count, there in ((0, "there is none"), (1, "there is one")):
        monkeypatch.setattr(scaleout, "device_count", lambda: count)
        assert scaleout.run_scaleout("gpu") == 1
        assert there in capsys.readouterr().out
    monkeypatch.setattr(scaleout, "device_count", lambda: 2)
    assert scaleout.run_scaleout("gpu", ranks=4) == 2
    assert "--ranks: expected at most 2, the number of GPUs, got 4" in capsys.readouterr().out


class TestGpus:
    """The table of GPUs from the answers of their processes."""

    LINES = (
        [scaleout._Measurement("heads", 1e-3, True, [10.0, 12.0, 11.0], [9.0, 9.0, 9.9])],
        [scaleout._Measurement("heads", 2e-3, True, [11.0, 10.0, 11.0], [9.9, 9.9, 9.0])],
    )

    def test_efficiency_is_that_of_the_slowest_rank(self, capsys, monkeypatch):
        monkeypatch.setattr(scaleout, "device_count", lambda: 2)
        monkeypatch.setattr(scaleout, "_on_gpus", lambda ranks, size: list(self.LINES))
        assert scaleout.run_scaleout() == 0
        row = capsys.readouterr().out.splitlines()[2].split()
        assert row[:2] == ["heads", "2.0e-03"] and row[4:6] == ["11.00", "ms"] and row[-2:] == ["90.0", "%"]

    def test_a_process_that_fails_ends_the_command(self):
        answers = multiprocessing.get_context("spawn").Queue()
        answers.put((1, "Traceback: no NCCL"))
        with pytest.raises(RuntimeError, match="rank 1 failed:\nTraceback: no NCCL"):
            scaleout._answers(2, answers, [])

    def test_a_process_that_dies_ends_the_command(self):
        def nothing(timeout):
            raise queue.Empty

        silent = types.SimpleNamespace(get=nothing)
        dead = [types.SimpleNamespace(exitcode=code) for code in (None, -9)]
        with pytest.raises(RuntimeError, match=r"the processes of ranks \[1\] have ended"):
            scaleout._answers(2, silent, dead)
