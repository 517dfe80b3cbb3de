"""The way of a cold call through the package: how many files it goes through, and how often from one to another."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support import CHECKOUT

#: The most files and moves of a plain call until it renders kernels.
BOUNDS = {
    "forward": (27, 143),
    "delta": (18, 49),
    "backward": (28, 267),
    "decode": (21, 112),
    "merge": (18, 49),
}


@pytest.fixture(scope="module")
def counted(tmp_path_factory) -> dict[str, dict[str, int]]:
    pytest.importorskip("cupy")
    script = CHECKOUT / "tests" / "support" / "cold_calls.py"
    paths = os.pathsep.join((str(CHECKOUT), str(CHECKOUT / "tests"), os.environ.get("PYTHONPATH", "")))
    # Without a tuning file, like most users.
    environment = {**os.environ, "PYTHONPATH": paths, "XDG_CONFIG_HOME": str(tmp_path_factory.mktemp("config"))}
    command = [sys.executable, str(script), *BOUNDS]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("kind", BOUNDS)
def test_a_plain_call_goes_through_few_files(counted, kind):
    files, moves = BOUNDS[kind]
    assert counted[kind]["files"] <= files
    assert counted[kind]["moves"] <= moves
    assert counted[kind]["calls"] > counted[kind]["moves"] > counted[kind]["files"] > 10, "something has been counted"
