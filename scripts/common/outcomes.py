"""Outcomes of tests, noted one by one, so that a run of a suite goes on where an earlier one was broken off."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

__all__ = ["OutcomeNotes", "counts_of", "keep_outcomes_of"]


class OutcomeNotes:
    """A plugin of pytest that notes the outcome of each test in a file, and leaves out those that passed before.

    Parameters
    ----------
    path : Path
        It need not exist.
    done : list of str, optional
        The tests to leave out; by default, those that the file says have passed or were skipped. Workers of
        pytest-xdist, which must agree on the tests, get this list from the controller.
    notes : bool, optional
        False in a worker: the controller gets all reports.
    """

    def __init__(self, path: Path, done: list[str] | None = None, notes: bool = True):
        self.done = (
            [name for name, (outcome, _) in _read(path).items() if outcome != "failed"] if done is None else done
        )
        self._path, self._notes = path, notes
        self._open: dict[str, tuple[str, float]] = {}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselects the tests that are done."""
        done = set(self.done)
        left_out = [item for item in items if item.nodeid in done]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item.nodeid not in done]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes a test after its last phase, or when its process has died."""
        if not self._notes:
            return
        outcome, seconds = self._open.pop(report.nodeid, ("passed", 0.0))
        outcome = report.outcome if outcome == "passed" else outcome
        seconds += report.duration
        if report.when in ("setup", "call"):
            self._open[report.nodeid] = outcome, seconds
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([report.nodeid, outcome, round(seconds, 3)]) + "\n")


def keep_outcomes_of(code: str, path: Path) -> None:
    """Makes the file begin with the digest of the code that the outcomes are about; those of other code are dropped."""
    first = json.dumps({"code": code}) + "\n"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if not text.startswith(first):
        path.write_text(first, encoding="utf-8")
    elif not text.endswith("\n"):  # a process was killed while it wrote
        path.write_text(text[: text.rindex("\n") + 1], encoding="utf-8")


def counts_of(path: Path) -> dict[str, int]:
    """How many tests have passed, failed and were skipped, and the seconds that they took, one after the other."""
    outcomes = _read(path).values()
    found = Counter(outcome for outcome, _ in outcomes)
    seconds = round(sum(seconds for _, seconds in outcomes))
    return {**{name: found[name] for name in ("passed", "failed", "skipped")}, "seconds": seconds}


def _read(path: Path) -> dict[str, tuple[str, float]]:
    """The last outcome of each test."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    noted = [json.loads(line) for line in lines if line.startswith("[")]
    return {name: (outcome, seconds) for name, outcome, seconds in noted}
