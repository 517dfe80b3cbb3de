"""The check of a GPU and its receipt, without a GPU."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import benchmark
import gpu_check
import pytest
from common import measure, outcomes, receipt


def test_gpu_check_runs_the_sections_that_a_change_is_held_to(monkeypatch, tmp_path):
    commands = []

    def run(command):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    assert gpu_check._run_benchmark(tmp_path, tmp_path / "notes") == "passed"
    ((_, noted_run, notes, script, *arguments),) = commands
    assert Path(noted_run).is_file() and notes == str(tmp_path / "notes")
    options = benchmark.parse_arguments(arguments)
    assert Path(script).name == "benchmark.py" and options.out == str(tmp_path)
    on_top = {
        "models",
        "features",
        "float32",
        "head_dims",
        "float64",
        "decode",
        "functions",
        "calls",
        "sparse",
        "second_order",
        "biases",
        "small",
        "wide",
    }
    assert set(options.sections) == set(benchmark.SECTIONS) - on_top


def test_gpu_check_judges_each_part_of_the_sanitized_calls(monkeypatch, tmp_path):
    def run(command, **options):
        assert all({"racecheck", part} - set(command) for part in ("pairs", "shared-rows"))  # it cannot run clusters
        if "--tool" not in command:
            assert options["check"] and command[1:3] == [str(gpu_check.NOTED_RUN), str(tmp_path)]
            return None
        errors = 3 if "memcheck" in command and command[-1] == "packed" else 0
        found = f"========= ERROR SUMMARY: {errors} errors"
        return subprocess.CompletedProcess(command, 9 if errors else 0, stdout=found, stderr="")

    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    monkeypatch.setattr(gpu_check.shutil, "which", lambda _: "compute-sanitizer")
    found = gpu_check._run_sanitizers(tmp_path, tmp_path)
    parts = re.search("PARTS = {(.*?)}", gpu_check.SANITIZED.read_text(encoding="utf-8"), re.DOTALL)[1]
    assert tuple(re.findall('"([^"]*)":', parts)) == gpu_check.SANITIZED_PARTS
    each = {part: "3 errors" if part == "packed" else "0 errors" for part in gpu_check.SANITIZED_PARTS}
    assert found["memcheck"] == "; ".join(f"{part}: {text}" for part, text in each.items())
    assert found["initcheck"] == "0 errors" and re.fullmatch(
        "0 errors; not judged: .*; not run: pairs, shared-rows", found["racecheck"]
    )
    assert gpu_check._passed(found | {"memcheck": "0 errors"}) and not gpu_check._passed(found)
    monkeypatch.setattr(gpu_check.shutil, "which", lambda _: None)
    assert gpu_check._passed(gpu_check._run_sanitizers(tmp_path, tmp_path))


def test_short_runs_of_gpu_check_make_one_receipt(monkeypatch, tmp_path):
    """A step stays in the receipt, with the code that it is about, until it begins anew."""
    suite = {"passed": 3, "failed": 0, "skipped": 1, "seconds": 2}
    versions = {"device": "Test GPU", "driver": "1", "nvrtc": "13.0", "cupy": "14", "python": "3.12"}
    monkeypatch.setattr(gpu_check, "find_gpu", lambda: types.SimpleNamespace(name="Test GPU", driver="1"))
    monkeypatch.setattr(gpu_check, "info", lambda: versions | {"device": "Test GPU (sm_90)", "families": {}})
    monkeypatch.setattr(gpu_check, "_compile_ahead", lambda: None)
    monkeypatch.setattr(gpu_check, "code_digest", lambda root, *more: "first code")
    monkeypatch.setenv("FA2CUPY_CACHE_DIR", str(tmp_path / "cache"))

    def sanitizers(found: str, listed: str):
        def run(folder, notes):
            note = {"nvrtc": "a build", "tiles": {}, "kernels": {listed: "source machine"}}
            (notes / "1.json").write_text(json.dumps(note))
            return {"memcheck": found}

        return run

    def suites(result: dict, killed: str = "none"):
        def run(folder, notes, suite, processes):
            if suite == killed:
                raise KeyboardInterrupt
            return result

        return run

    def check(*steps: str) -> int:
        skipped = [name for name in gpu_check.STEPS if name not in steps]
        return gpu_check.main(["--out", str(tmp_path), "--cache", str(tmp_path / "cache"), "--skip", *skipped])

    def noted() -> dict:
        return json.loads((tmp_path / "check.json").read_text())

    def told(*steps: str) -> list:
        return [step if isinstance(step, str) else step["found"] for step in map(noted().get, steps)]

    assert check() == 0 and noted() == dict.fromkeys(gpu_check.STEPS, "skipped")
    monkeypatch.setattr(gpu_check, "_run_sanitizers", sanitizers("0 errors", "a kernel"))
    assert check("sanitizers") == 0
    assert tuple(noted()) == gpu_check.STEPS
    first = noted()["sanitizers"]
    kernels = (tmp_path / "check-sanitizers.json").read_bytes()
    assert {name: first[name] for name in versions} == versions and first["found"] == {"memcheck": "0 errors"}
    assert first["kernels"] == hashlib.sha256(kernels).hexdigest() and json.loads(kernels)["kernels"].keys() == {
        "a kernel"
    }

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(gpu_check, "_run_tests", suites(suite, killed="large"))
        check("tests", "large", "several_gpus", "isolated")
    assert told(*gpu_check.STEPS) == [suite, "not finished", "skipped", "skipped", {"memcheck": "0 errors"}, "skipped"]
    assert noted()["sanitizers"] == first and noted()["tests"]["code"] == "first code"

    monkeypatch.setattr(gpu_check, "code_digest", lambda root, *more: "other code")
    monkeypatch.setattr(gpu_check, "_run_tests", suites(suite | {"failed": 1}))
    assert check("large", "several_gpus") == 1
    assert check() == 0
    assert [noted()[name]["code"] for name in ("tests", "large", "several_gpus")] == [
        "first code", "other code", "other code",
    ]  # fmt: skip
    assert noted()["sanitizers"] == first

    def beside_another_run(folder, notes):
        check("several_gpus")
        return sanitizers("0 errors in the second run", "another kernel")(folder, notes)

    monkeypatch.setattr(gpu_check, "_run_sanitizers", beside_another_run)
    monkeypatch.setattr(gpu_check, "_run_tests", suites(suite | {"passed": 4}))
    assert check("sanitizers") == 0
    assert told("several_gpus", "tests") == [suite | {"passed": 4}, suite]
    assert told("sanitizers") == [{"memcheck": "0 errors in the second run"}]
    assert noted()["sanitizers"]["kernels"] != first["kernels"]

    def while_code_changes(folder, notes, suite, processes):
        monkeypatch.setattr(gpu_check, "code_digest", lambda root, *more: "newer code")
        return suites(suite)(folder, notes, suite, processes)

    monkeypatch.setattr(gpu_check, "_run_tests", while_code_changes)
    assert check("large") == 1
    assert told("large") == ["not finished: fa2cupy/ or kernels/ changed meanwhile"]


@pytest.mark.sample(workers=(0,))
@pytest.mark.parametrize("workers", [0, 2])
def test_a_suite_that_was_broken_off_goes_on(workers, tmp_path):
    """Tests that have passed or were skipped are left out; those that failed, died or were running begin anew."""
    tests, path = tmp_path / "test_four.py", tmp_path / "check-tests.outcomes"
    tests.write_text(
        "import os, pathlib, pytest\n"
        "good = pathlib.Path(__file__).with_name('good')\n"
        "def test_one(): pass\n"
        "def test_two(): pytest.skip('not here')\n"
        "def test_three(): assert good.exists()\n"
        "@pytest.fixture\n"
        "def ending():\n"
        "    yield\n"
        "    assert good.exists()\n"
        "def test_four(ending): pass\n"
    )
    folders = [str(gpu_check.ROOT / name) for name in (".", "scripts", "tests")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "--rootdir", str(tmp_path), str(tests)]
    command += ["--outcomes", str(path), *(["-n", str(workers), "--dist", "worksteal"] if workers else [])]

    def run() -> tuple[int, int]:
        ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
        return ended.returncode, sum(line.startswith("[") for line in path.read_text().splitlines())

    outcomes.keep_outcomes_of("this code", path)
    assert run() == (1, 4)
    counts = outcomes.counts_of(path)
    assert counts == {"passed": 1, "failed": 2, "skipped": 1, "seconds": counts["seconds"]}
    with path.open("a") as file:
        file.write('["test_four.py::test_fo')  # a process was killed while it wrote
    (tmp_path / "good").touch()
    outcomes.keep_outcomes_of("this code", path)
    ended, _ = run()
    assert ended == 0 and outcomes.counts_of(path)["passed"] == 3 and outcomes.counts_of(path)["failed"] == 0
    assert run()[0] == 5  # nothing was left
    outcomes.keep_outcomes_of("other code", path)
    assert not any(outcomes.counts_of(path).values())


@pytest.mark.parametrize("before", ["", "[]", '{"digest": "0", "tests": {"passed": 3}}'])
def test_what_is_no_receipt_is_not_kept(before, tmp_path):
    path = tmp_path / "check.json"
    path.write_text(before)
    receipt.note_steps(path, gpu_check.STEPS, {"large": "not finished"})
    assert json.loads(path.read_text()) == dict.fromkeys(gpu_check.STEPS, "skipped") | {"large": "not finished"}


def test_the_receipt_can_lie_outside_the_checkout(monkeypatch, tmp_path):
    monkeypatch.setitem(gpu_check.SUITES, "tests", ("gpu and not gpu", ()))
    monkeypatch.setenv("PYTEST_ADDOPTS", "--ignore-glob=*/test_[!l]*")  # few files
    assert gpu_check._run_tests(tmp_path, tmp_path, "tests", 1) == dict.fromkeys(
        ("passed", "failed", "skipped", "seconds"), 0
    )


def test_gpu_check_without_a_gpu_says_so(monkeypatch, capsys, tmp_path):
    def no_gpu():
        raise RuntimeError("no driver")

    monkeypatch.setattr(measure, "Gpu", no_gpu)
    assert gpu_check.main(["--out", str(tmp_path / "results")]) == 2
    assert capsys.readouterr().err == "this needs a CUDA GPU and CuPy: no driver\n"
    assert not list(tmp_path.iterdir())
