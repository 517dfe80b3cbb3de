"""The check of a GPU and its receipt, without a GPU."""

from __future__ import annotations

import json
import re
import subprocess
import types
from pathlib import Path

import benchmark
import gpu_check
import pytest
from common import measure


def test_gpu_check_runs_the_sections_that_a_change_is_held_to(monkeypatch, tmp_path):
    commands = []

    def run(command):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    assert gpu_check._run_benchmark(tmp_path) == "passed"
    ((_, script, *arguments),) = commands
    options = benchmark.parse_arguments(arguments)
    assert Path(script).name == "benchmark.py" and options.out == str(tmp_path)
    on_top = {"models", "features", "float32", "decode", "functions", "calls", "sparse"}
    assert set(options.sections) == set(benchmark.SECTIONS) - on_top


def test_gpu_check_judges_each_part_of_the_sanitized_calls(monkeypatch, tmp_path):
    def run(command, **options):
        if "--tool" not in command:
            assert options["check"]
            return None
        errors = 3 if "memcheck" in command and command[-1] == "packed" else 0
        found = f"========= ERROR SUMMARY: {errors} errors"
        return subprocess.CompletedProcess(command, 9 if errors else 0, stdout=found, stderr="")

    monkeypatch.setattr(gpu_check.subprocess, "run", run)
    monkeypatch.setattr(gpu_check.shutil, "which", lambda _: "compute-sanitizer")
    found = gpu_check._run_sanitizers(tmp_path)
    parts = re.search("PARTS = {(.*?)}", gpu_check.SANITIZED.read_text(encoding="utf-8"), re.DOTALL)[1]
    assert tuple(re.findall('"(.*?)"', parts)) == gpu_check.SANITIZED_PARTS
    each = {part: "3 errors" if part == "packed" else "0 errors" for part in gpu_check.SANITIZED_PARTS}
    assert found["memcheck"] == "; ".join(f"{part}: {text}" for part, text in each.items())
    assert found["initcheck"] == "0 errors" and found["racecheck"].startswith("0 errors; not judged: ")
    receipt = dict.fromkeys(gpu_check.STEPS, "skipped")
    assert gpu_check._passed(receipt | {"sanitizers": found | {"memcheck": "0 errors"}})
    assert not gpu_check._passed(receipt | {"sanitizers": found})


def test_short_runs_of_gpu_check_make_one_receipt(monkeypatch, tmp_path):
    """A step that is interrupted keeps the records of earlier runs of the same code."""
    versions = {"nvrtc": "13.0", "cupy": "14", "python": "3.12"}
    suite = {"passed": 3, "failed": 0, "skipped": 1, "seconds": 2}
    monkeypatch.setattr(gpu_check, "find_gpu", lambda: types.SimpleNamespace(name="Test GPU", driver="1"))
    monkeypatch.setattr(gpu_check, "info", lambda: versions)
    monkeypatch.setattr(gpu_check, "_compile_ahead", lambda: None)
    monkeypatch.setattr(gpu_check, "_run_sanitizers", lambda folder: {"memcheck": "0 errors"})
    monkeypatch.setattr(gpu_check, "_run_tests", lambda folder, marker, processes, more: suite)
    monkeypatch.setenv("FA2CUPY_CACHE_DIR", str(tmp_path / "cache"))
    run = ["--out", str(tmp_path), "--cache", str(tmp_path / "cache"), "--skip"]
    assert gpu_check.main([*run, "tests", "large", "several_gpus", "isolated", "benchmark"]) == 0

    def killed(folder, marker, processes, more):
        if "not large" not in marker:
            raise KeyboardInterrupt
        return suite

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(gpu_check, "_run_tests", killed)
        gpu_check.main([*run, "sanitizers", "benchmark"])
    receipt = json.loads((tmp_path / "check.json").read_text())
    assert [receipt[step] for step in gpu_check.STEPS] == [
        suite, "not finished", "not finished", "not finished", {"memcheck": "0 errors"}, "skipped",
    ]  # fmt: skip
    assert gpu_check.main([*run, "tests", "sanitizers", "benchmark"]) == 0
    receipt = json.loads((tmp_path / "check.json").read_text())
    assert [receipt[step] for step in gpu_check.STEPS] == [
        suite, suite, suite, suite, {"memcheck": "0 errors"}, "skipped",
    ]  # fmt: skip

    def beside_another_run(folder):
        gpu_check.main([*run, "tests", "large", "isolated", "sanitizers", "benchmark"])
        return {"memcheck": "0 errors in the second run"}

    with monkeypatch.context() as patch:
        patch.setattr(gpu_check, "_run_sanitizers", beside_another_run)
        patch.setattr(gpu_check, "_run_tests", lambda folder, marker, processes, more: {**suite, "passed": 4})
        assert gpu_check.main([*run, "tests", "large", "several_gpus", "isolated", "benchmark"]) == 0
    receipt = json.loads((tmp_path / "check.json").read_text())
    assert receipt["several_gpus"]["passed"] == 4 and receipt["tests"]["passed"] == 3
    assert receipt["sanitizers"] == {"memcheck": "0 errors in the second run"}
    monkeypatch.setattr(gpu_check, "code_digest", lambda root: "other code")
    assert gpu_check.main([*run, *gpu_check.STEPS]) == 0
    receipt = json.loads((tmp_path / "check.json").read_text())
    assert {receipt[step] for step in gpu_check.STEPS} == {"skipped"}


def test_gpu_check_without_a_gpu_says_so(monkeypatch, capsys, tmp_path):
    def no_gpu():
        raise RuntimeError("no driver")

    monkeypatch.setattr(measure, "Gpu", no_gpu)
    assert gpu_check.main(["--out", str(tmp_path / "results")]) == 2
    assert capsys.readouterr().err == "this needs a CUDA GPU and CuPy: no driver\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [None, "", "[]", "{}", "# README"])
def test_gpu_check_verifies_receipts_only(content, tmp_path, capsys):
    path = tmp_path / "check.json"
    if content is not None:
        path.write_text(content)
    assert gpu_check.main(["--verify", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"--verify: {path} is not a receipt (") and told.count("\n") == 1
    path.write_text('{"digest": "0"}')
    assert gpu_check.main(["--verify", str(path)]) == 1
    assert "is about other code" in capsys.readouterr().out
