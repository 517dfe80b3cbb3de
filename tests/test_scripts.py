"""All scripts: run from a checkout that is not installed, and with wrong arguments."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import benchmark
import features
import gpu_check
import jinja2
import methods
import ml_dtypes
import numpy as np
import pytest
import same_code
import sweep
from common import ROOT, SCRIPTS, measure
from support.fake_timing import HAS_MATPLOTLIB

WITHOUT_SITE = (sys.executable, "-S")  # without site-packages, where fa2cupy may be installed


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """Links all that is installed beside NumPy and Jinja, except fa2cupy, into the folder that is PYTHONPATH."""
    folder = tmp_path_factory.mktemp("packages")
    for installed in {Path(module.__file__).parent.parent for module in (np, jinja2, ml_dtypes)}:
        for path in installed.iterdir():
            if "fa2cupy" not in path.name and not (folder / path.name).exists():
                (folder / path.name).symlink_to(path)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [*WITHOUT_SITE, "-c", "import numpy, fa2cupy"]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert "No module named 'fa2cupy'" in run.stderr
    return environment


@pytest.mark.sample(script=(SCRIPTS / "benchmark.py", SCRIPTS / "train_lm.py"))
@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_scripts_find_the_package_of_a_bare_checkout_from_anywhere(script, environment, tmp_path):
    command = [*WITHOUT_SITE, script, "--help"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(f"usage: {script.name}")


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="plots need matplotlib")
@pytest.mark.parametrize(
    ("script", "option"),
    [(benchmark, "--plot-only"), (methods, "--show"), (sweep, "--plot-only")],
    ids=["benchmark", "methods", "sweep"],
)
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"), ("", "it has no rows"), ("seqlen\n", "it has no rows"), (b"\x89PNG\0", "decode"),
        ("hello\nworld\n", "it has no '"), ("a" * 200_000, "field larger than field limit"),
    ],
    ids=["missing", "empty", "no rows", "picture", "other", "long"],
)  # fmt: skip
def test_plot_only_of_something_else_is_a_sentence(script, option, content, reason, tmp_path, capsys):
    path = tmp_path / "earlier.csv"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert script.main([option, str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"{option}: {path} cannot be shown as the CSV of an earlier run (")
    assert reason in told and told.count("\n") == 1
    assert not list(tmp_path.glob("*.png"))


def test_scripts_have_the_package_of_their_checkout_beside_another_one(tmp_path):
    other = tmp_path / "fa2cupy"
    other.mkdir()
    (other / "__init__.py").write_text("raise ImportError('the one that is installed')\n", encoding="utf-8")
    command = [sys.executable, SCRIPTS / "sweep.py", "--operation", "forward", "--arch", "sm_8"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.stderr.startswith("sweep.py: arch: 'sm_8' is not known"), run.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("{folder}/none/after.json", "out: expected a file in a folder that exists"),
        ("{folder}", "out: expected a file in a folder that exists"),
        ("{folder}/after.json --against {folder}/none.json", "--against: {folder}/none.json cannot be read as what an"),
        ("{folder}/after.json --against {folder}/text.json", "(Expecting value: line 1 column 1 (char 0))"),
    ],
)
def test_files_of_records_are_checked_before_the_work(arguments, text, tmp_path, capsys):
    (tmp_path / "text.json").write_text("text", encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        same_code.main(arguments.format(folder=tmp_path).split())
    assert ended.value.code == 2
    assert text.format(folder=tmp_path) in capsys.readouterr().err


PLOTTING = [path.stem for path in sorted(SCRIPTS.glob("*.py")) if '"--plot-only"' in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("name", PLOTTING)
def test_plot_only_draws_beside_the_csv_or_where_it_is_told_to(name, tmp_path, monkeypatch):
    script = importlib.import_module(name)
    drawn = []
    for draw in {"bar_panels", "heat_map", "line_panels"} & vars(script).keys():
        monkeypatch.setattr(script, draw, lambda path, *_: drawn.append(path.relative_to(tmp_path)))
    monkeypatch.setattr(script, "can_plot", lambda: True)
    measured = min((SCRIPTS / "results" / "h100-80gb-hbm3").glob(f"{name}*.csv"))
    source = tmp_path / "earlier" / measured.name
    source.parent.mkdir()
    shutil.copy(measured, source)
    assert script.main(["--plot-only", str(source)]) == 0
    beside, drawn[:] = list(drawn), []
    assert beside and {path.parent.name for path in beside} == {"earlier"}
    assert script.main(["--plot-only", str(source), "--out", str(tmp_path / "new" / "out")]) == 0
    assert drawn == [Path("new", "out", path.name) for path in beside]
    assert (tmp_path / "new" / "out").is_dir()


def test_a_closed_pipe_is_no_fault_of_the_csv():
    def show(rows):
        raise BrokenPipeError

    source = SCRIPTS / "results" / "h100-80gb-hbm3" / "models.csv"
    with pytest.raises(BrokenPipeError):
        measure.show_earlier(source, show)


def test_there_are_scripts_that_plot():
    assert len(PLOTTING) > 1


@pytest.mark.parametrize("section", ["features-peers", "functions", "models", "sparse", "float32"])
def test_plot_only_of_a_section_is_its_table(section, tmp_path, capsys):
    source = SCRIPTS / "results" / "h100-80gb-hbm3" / f"{section}.csv"
    assert benchmark.main(["--plot-only", str(source), "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("\n") > 4
    assert not list(tmp_path.iterdir())


def test_files_that_docstrings_of_scripts_name_exist():
    names = {path.name for path in ROOT.rglob("*.py")}
    missing, found = [], 0
    for path in SCRIPTS.rglob("*.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        for name in re.findall(r"[\w./<>-]+\.(?:py|csv|png|json|md|cuh?)\b", docstring):
            is_file = name.startswith(("scripts/", "tests/", "fa2cupy/", "kernels/")) and "<" not in name
            if is_file or name.endswith(".py"):
                found += 1
                if not (ROOT / name).exists() and not (path.parent / name).exists() and name not in names:
                    missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert not missing
    assert found > 20


@pytest.mark.parametrize(
    ("script", "arguments", "text"),
    [
        (sweep, "--operation forward --head-dim 999", "--head-dim: up to 512 is supported, got 999"),
        (sweep, "--operation forward --head-dim 0", "--head-dim: expected an int of at least 1, got '0'"),
        (sweep, "--operation forward --seqlen 0", "--seqlen: expected an int of at least 1, got '0'"),
        (sweep, "--operation forward --jobs -1", "--jobs: expected"),
        (methods, "--head-dims 64 600", "--head-dims: up to 512 is supported, got 600"),
        (methods, "--seqlens 0", "--seqlens: expected an int of at least 1, got '0'"),
        (methods, "--heads 16", "--heads: expected two numbers such as 16/2, got '16'"),
        (methods, "--heads 16/3", "--heads: 16 is not a multiple of 3"),
        (benchmark, "--head-dims 0", "--head-dims: expected an int of at least 1, got '0'"),
        (benchmark, "--rounds 0", "--rounds: expected an int of at least 1, got '0'"),
        (features, "--seqlens x", "--seqlens: expected an int of at least 1, got 'x'"),
        (same_code, "digests.json --jobs 0", "--jobs: expected an int of at least 1, got '0'"),
        (gpu_check, "--processes 0", "--processes: expected an int of at least 1, got '0'"),
    ],
)
def test_numbers_that_cannot_be_are_refused_by_name(script, arguments, text, capsys):
    with pytest.raises(SystemExit) as ended:
        script.main(arguments.split())
    assert ended.value.code == 2
    assert text in capsys.readouterr().err
