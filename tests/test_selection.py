"""The selection of tests, the parts of the matrix, the GPUs of workers, and what a run tells before its end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from support import CHECKOUT

pytestmark = pytest.mark.matrix

#: A file that has tests of the matrix and others, and imports little.
FILE = "tests/test_distributed_races.py"


def collect(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", FILE, *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True)


def names(*arguments: str) -> set[str]:
    run = collect(*arguments)
    assert run.returncode == 0, run.stdout
    return {line for line in run.stdout.splitlines() if "::" in line}


def test_each_test_of_the_matrix_is_of_one_part():
    parts = [names("-m", "matrix", "--part", f"{part}/3") for part in range(3)]
    assert all(parts)
    assert sum(map(len, parts)) == len(set().union(*parts))
    assert set().union(*parts) == names("-m", "matrix")


def test_what_is_not_of_the_matrix_is_of_every_part():
    assert names("--part", "1/3") == names() != set()


@pytest.mark.parametrize("part", ["3/3", "1", "-1/3", "1/0", "a/b"])
def test_a_part_that_cannot_be_is_refused(part):
    run = collect(f"--part={part}")
    assert run.returncode == 4
    assert f"expected K/N with 0 <= K < N, got '{part}'" in run.stderr


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=("alone", "two workers"))
def test_failures_are_named_before_the_end(workers, tmp_path):
    """The failure may be in any phase of a test; the summary names it once more."""
    shutil.copy(CHECKOUT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_one.py").write_text(
        "import pytest\n"
        "@pytest.fixture\n"
        "def broken():\n    raise OSError\n"
        "def test_right():\n    pass\n"
        "def test_wrong():\n    assert False\n"
        "def test_not_set_up(broken):\n    pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path), *workers]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    told = [line for line in run.stdout.splitlines() if line.startswith("failed: ")]
    assert sorted(told) == ["failed: test_one.py::test_not_set_up", "failed: test_one.py::test_wrong"]
    assert run.stdout.index("failed: ") < run.stdout.index("= FAILURES =")


@pytest.mark.parametrize(
    ("chosen", "options", "seen"),
    [
        (None, ("-n", "3", "--dist", "worksteal"), {"0", "1", "2"}),
        ("5,7", ("-n", "3", "--dist", "worksteal"), {"5", "7"}),
        ("1", ("-n", "2", "--dist", "worksteal"), {"1"}),
        ("5,7", ("-n", "2"), {"5,7"}),  # all tests on the GPU are in one process
        ("5,7", (), {"5,7"}),
    ],
)
def test_workers_that_share_the_tests_take_turns_with_the_gpus(chosen, options, seen, tmp_path):
    shutil.copy(CHECKOUT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "cupy.py").write_text(  # with three GPUs
        "import os\n"
        "class cuda:\n"
        "    class runtime:\n"
        "        def getDeviceCount():\n"
        "            return len(os.environ.get('CUDA_VISIBLE_DEVICES', '0,1,2').split(','))\n"
    )
    (tmp_path / "test_one.py").write_text(
        "import os, time, pytest\n"
        "@pytest.mark.gpu\n"
        "@pytest.mark.parametrize('number', range(12))\n"
        "def test_some(number):\n"
        "    open(f'{number}.txt', 'w').write(os.environ.get('CUDA_VISIBLE_DEVICES', ''))\n"
        "    time.sleep(0.1)\n"
        "@pytest.mark.gpu\n"
        "@pytest.mark.several_gpus\n"
        "def test_several():\n    pass\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(CHECKOUT)))}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    environment |= {"CUDA_VISIBLE_DEVICES": chosen} if chosen else {}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", *options]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert {path.read_text() for path in tmp_path.glob("*.txt")} == seen
    assert ("needs two GPUs" in run.stdout) is all("," not in one for one in seen)


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=("alone", "two workers"))
def test_files_for_gpus_are_skipped_whole_without_one(workers, tmp_path):
    shutil.copy(CHECKOUT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "cupy.py").write_text(
        "class cuda:\n    class runtime:\n        def getDeviceCount():\n            return 0\n"
    )
    for name in ("one", "two"):
        (tmp_path / f"test_{name}.py").write_text(
            "import pytest\npytestmark = pytest.mark.gpu\ndef test_it():\n    pass\n"
        )
    (tmp_path / "test_three.py").write_text(
        "import pytest\ndef test_it():\n    pass\n@pytest.mark.gpu\ndef test_on_a_gpu():\n    pass\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), str(CHECKOUT)))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *workers]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 passed, 3 skipped" in run.stdout
    assert "skipped files of tests: 2 (no CUDA device: the driver reports none)" in run.stdout
