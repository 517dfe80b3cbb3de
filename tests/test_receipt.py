"""The receipt of the check on a GPU: the changes of a checkout that make a step one of other code, without a GPU."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys

import gpu_check
import pytest
from common import SCRIPTS, kernel_notes, receipt
from common.digests import code_digest, cuda_tokens, python_text
from support import CHECKOUT
from support.traced_cases import EDGES, ready_made

from fa2cupy import mods
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.sm80 import SM80
from fa2cupy.jit import source
from fa2cupy.jit.compiler import compile_source
from fa2cupy.jit.source import render_kernel
from fa2cupy.plan.specs import default_specs
from fa2cupy.problem.function_checks import bound_function

DEVICE = DeviceInfo.named("sm_80")
#: A few files of the package, and all templates.
FILES = ("fa2cupy/jit/cache.py", "fa2cupy/families/sm80.py", "kernels")
STEPS = {"sanitizers": ("delta", "convert_dq"), "benchmark": ("delta",)}


# -------------------------------------------------------------------------------------------- what of a source matters


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1  # one\n", "x = 1\n"),
        ("def f(a, b):\n    return a\n", 'def f(\n    a,\n    b,\n):\n    """Doc."""\n\n    return (a)\n'),
        ('"""Module."""\nclass A:\n    x: int\n', 'class A:\n    """A."""\n    x: int\n    """An attribute."""\n'),
        ("x = 'a' 'b'\n", 'x = "ab"\n'),
        ("x = 1000\n", "x = 1_000\n"),
    ],
)
def test_comments_docstrings_and_formatting_of_python_do_not_matter(one, other):
    assert python_text(one) == python_text(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1\n", "x = 2\n"),
        ("x = 1\n", "x = 1.0\n"),
        ("x = 1\n", "x = True\n"),
        ("x = 'a'\n", "x = b'a'\n"),
        ("x = None\n", "x = 'None'\n"),
        ("x = [None]\n", "x = []\n"),
        ("x[1:]\n", "x[:1]\n"),
        ("def f(a): return a\n", "def f(a, /): return a\n"),
        ("def f(a=1): pass\n", "def f(*, a=1): pass\n"),
        ("if a:\n    b()\nc()\n", "if a:\n    b()\n    c()\n"),
        ("x = f'{a}'\n", "x = f'{a!r}'\n"),
        ("x = 'a # b'\n", "x = 'a'\n"),
        ("return_ = 'doc'\n", "'doc'\n"),
    ],
)
def test_all_else_of_python_matters(one, other):
    assert python_text(one) != python_text(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("int a; // one\n", "int   a;\n"),
        ("int a; // one \\\n two\nint b;", "int a;\nint b;\n"),
        ("int /* a\n b */ c;", "int c;"),
        ("f(a, b);", "f(\n    a,\n    b);"),
        ("#define X  1  // one\n", "#define X 1\n"),
        ("  #pragma unroll\nfor (;;)", "#pragma   unroll /* all */\n\nfor (;;)"),
        ("#define F(x) \\\n  x\n", "#define F(x) x\n"),
        ('s = "a";  // "b', 's = "a";'),
        ("n = 1'000; // it's\n", "n = 1'000;\n"),
        ("{# a\n b #}int a;", "int a;"),
        ("//% if a\nint b;\n//% endif\n", "  //% if a  \n    int b;  // one\n//% endif\n"),
    ],
)
def test_comments_and_formatting_of_cuda_do_not_matter(one, other):
    assert cuda_tokens(one, True) == cuda_tokens(other, True)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("int a;", "inta;"),
        ("a - -b", "a--b"),
        ("x = 1.0f;", "x = 1 .0f;"),
        ('s = "a  b";', 's = "a b";'),
        ('s = "a // b";', 's = "a";'),
        ('s = "\\"// b";', 's = "\\"";'),
        ("c = '\"'; // \"", "c = '\"'; d"),
        ("#define F(x) x\n", "#define F (x) x\n"),
        ('#define S "a  b"\n', '#define S "a b"\n'),
        ("#define X 1\n+ 2", "#define X 1 + 2"),
        ("//% if a\nint b;\n//% endif\n", "int b;\n"),
        ("//% if a\n", "//% if b\n"),
        ("int a = {{ x // 2 }};", "int a = {{ x // 4 }};"),
        ('s = "{{ "a  b" if c else "d" }}";', 's = "{{ "a b" if c else "d" }}";'),
        ("// {% if a %}\nint b;", "// {% if c %}\nint b;"),
        ("{% if a %}int b;{% endif %}", "int b;"),
    ],
)
def test_all_else_of_cuda_matters(one, other):
    assert cuda_tokens(one, True) != cuda_tokens(other, True)


def test_a_header_that_is_no_template_has_no_statements_of_one():
    assert cuda_tokens("//% if a\nint b;", False) == ["int", "b", ";"]


# ------------------------------------------------------------------------------------- changes of a checkout, by steps


@pytest.fixture(scope="module")
def kernels():
    """Returns two kernels by operation, compiled: a spec and its machine code."""
    pytest.importorskip("cupy", exc_type=ImportError)
    specs = {spec.operation: spec for spec in default_specs(DEVICE, "bfloat16", 40, False, "single_pass")}
    return {name: (specs[name], compile_source(render_kernel(specs[name]))) for name in STEPS["sanitizers"]}


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Provides a checkout that a test may change, whose templates the package renders."""
    root = tmp_path / "checkout"
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (CHECKOUT / name).is_dir() else shutil.copy)(CHECKOUT / name, root / name)
    monkeypatch.setattr(source, "kernel_directory", lambda: root / "kernels")
    monkeypatch.setattr(gpu_check, "ROOT", root)
    source._environment.cache_clear()
    yield root
    source._environment.cache_clear()


@pytest.fixture
def noted(checkout, kernels, tmp_path, monkeypatch):
    """Returns a receipt of the checkout with a suite and with both steps that note their kernels."""
    path, on = tmp_path / "check.json", {"date": "2026-01-02"}
    steps = {"tests": {"found": {"passed": 3}, **on, "code": code_digest(checkout)}, "large": "skipped"}
    for step, names in STEPS.items():
        monkeypatch.setattr(kernel_notes, "kernels_in_memory", lambda names=names: dict(kernels[one] for one in names))
        (tmp_path / step).mkdir()
        kernel_notes.note_kernels(tmp_path / step)
        steps[step] = {"found": "passed", **on, **receipt.kernels_of(path, step, tmp_path / step)}
    receipt.note_steps(path, tuple(steps), steps)
    return path


def change(file, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new, 1), encoding="utf-8")


def steps_of_this_code(path, capsys) -> set[str]:
    """Returns the steps that are about the code of the checkout, and checks the exit code."""
    code = gpu_check.main(["--verify", str(path)])
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines.pop("large") == "skipped" and all("(2026-01-02, " in line for line in lines.values())
    found = {name for name, line in lines.items() if line.startswith("about this code (")}
    assert set(lines) - found == {name for name, line in lines.items() if line.startswith("about other code: ")}
    assert code == (0 if found == set(lines) else 1)
    return found


ALL = {"tests", *STEPS}


@pytest.mark.parametrize(
    ("file", "old", "new", "of_this_code"),
    [
        ("kernels/common/delta.cuh", "        Accum sum = 0;", "// a comment\n\n        Accum  sum=0;", ALL),
        ("kernels/delta.cu", "#include", "{# a comment #}\n// another\n#include", ALL),
        ("fa2cupy/jit/cache.py", "_SCHEMA = 3", "_SCHEMA = (\n    3  # a comment\n)", ALL),
        ("fa2cupy/jit/cache.py", '"""Compiled kernels', '"""All compiled kernels', ALL),
        ("fa2cupy/jit/cache.py", "_SCHEMA = 3", "_SCHEMA = 4", set(STEPS)),
        ("kernels/common/delta.cuh", "Accum sum = 0;", "Accum sum = 1;", set()),
        ("kernels/delta.cu", "32 * fa2", "64 * fa2", set()),
        ("kernels/sm80/convert_dq.cuh", "16 * m16 + g", "16 * m16 + g + 1", {"benchmark"}),
        ("kernels/sm80/convert_dq.cuh", "16 * m16 + g", "16 * m16 + unknown", {"benchmark"}),
        ("kernels/sm90/forward.cuh", "#pragma once", "#pragma once\nstatic_assert(true);", set(STEPS)),
        # The tokens are others, the instructions are the same.
        ("kernels/sm80/convert_dq.cuh", "16 * m16 + g", "g + m16 * 16", set(STEPS)),
    ],
)
def test_a_change_is_one_of_the_steps_that_ran_it(checkout, noted, capsys, file, old, new, of_this_code):
    assert steps_of_this_code(noted, capsys) == ALL
    change(checkout / file, old, new)
    assert steps_of_this_code(noted, capsys) == of_this_code


def test_a_file_of_another_name_is_other_code(checkout, noted, capsys):
    (checkout / "fa2cupy" / "jit" / "cache.py").rename(checkout / "fa2cupy" / "jit" / "store.py")
    assert steps_of_this_code(noted, capsys) == set(STEPS)


def test_machine_code_is_compared_with_the_noted_compiler_alone(checkout, noted, capsys, monkeypatch):
    change(checkout / "kernels" / "sm80" / "convert_dq.cuh", "16 * m16 + g", "g + m16 * 16")
    monkeypatch.setattr(kernel_notes, "nvrtc_build", lambda: "// another build")
    monkeypatch.setattr(kernel_notes, "compile_source", None)
    assert gpu_check.main(["--verify", str(noted)]) == 1
    told = capsys.readouterr().out
    assert re.search(r"sanitizers: about other code: the sources of 1 in 2 kernels differ, such as convert_dq \(", told)
    assert "machine code needs the NVRTC that the step had" in told and "benchmark: about this code" in told


def test_kernels_that_cannot_be_compared_are_of_other_code(checkout, noted, capsys):
    listed = noted.with_name("check-benchmark.json")
    content = listed.read_text()
    listed.write_text(noted.with_name("check-sanitizers.json").read_text())  # all are of this code, and of another step
    assert steps_of_this_code(noted, capsys) == ALL - {"benchmark"}
    listed.unlink()
    assert steps_of_this_code(noted, capsys) == ALL - {"benchmark"}
    listed.write_text(content)
    (checkout / "kernels" / "convert_dq.cu").unlink()
    assert steps_of_this_code(noted, capsys) == {"benchmark"}


def test_other_default_tiles_are_other_kernels(monkeypatch):
    (spec,) = default_specs(DEVICE, "float16", 64, True)
    note = {"nvrtc": "", "tiles": kernel_notes._tiles([spec])}
    note["kernels"] = {kernel_notes.text_of(spec): f"{kernel_notes._source_digest(spec)} 0"}
    assert kernel_notes.why_others(note) == ""
    first, *others = SM80.tiles["forward"]
    monkeypatch.setitem(SM80.tiles, "forward", (dataclasses.replace(first, measured="another GPU"), *others))
    assert kernel_notes.why_others(note) == ""
    monkeypatch.setitem(SM80.tiles, "forward", (dataclasses.replace(first, head_dim=1), *others))
    assert kernel_notes.why_others(note) == "default tiles differ, those of forward (sm80, float16)"
    assert kernel_notes.why_others({**note, "kernels": {}, "tiles": {}}) == "it lists no kernels"


def test_specs_and_functions_are_read_back_from_their_notes():
    sizes = (2, 2, 150, 130)
    for case in ready_made(*sizes).values():
        for spec in default_specs(DEVICE, "float16", 64, True, "two_pass", functions=case.options, features=("sink",)):
            assert kernel_notes.spec_of(kernel_notes.text_of(spec)) == spec
    near = {"mask_mod": mods.neighborhood((20, 20), (7, 7))}
    spec = default_specs(DeviceInfo.named("sm_90"), "float16", 64, False, functions=near)[-1]
    assert spec.boxes and kernel_notes.spec_of(kernel_notes.text_of(spec)) == spec
    for function, _ in EDGES.values():
        bound = bound_function("score_mod", function, ())
        assert kernel_notes._function_of(json.loads(json.dumps(kernel_notes._values_of(bound)))) == bound


def test_a_noted_run_is_the_script_and_notes_its_kernels(kernels, tmp_path):
    script, (spec, _) = tmp_path / "script.py", kernels["delta"]
    script.write_text(
        f"import sys; sys.path.insert(0, {str(CHECKOUT)!r})\n"
        "import beside\n"
        "from fa2cupy.jit.cache import cached_kernel\n"
        "from fa2cupy.plan.specs import default_specs\n"
        "from fa2cupy.families.device import DeviceInfo\n"
        "specs = default_specs(DeviceInfo.named('sm_80'), 'bfloat16', 40, False, 'single_pass')\n"
        "cached_kernel(next(spec for spec in specs if spec.operation == 'delta'))\n"
        "sys.exit(len(sys.argv) if __name__ == '__main__' else 1)\n"
    )
    (tmp_path / "beside.py").touch()
    (tmp_path / "notes").mkdir()
    command = [sys.executable, SCRIPTS / "common" / "noted_run.py", tmp_path / "notes", script, "one", "two"]
    assert subprocess.run(command, env={**os.environ, "PYTHONPATH": ""}, cwd=tmp_path).returncode == 3
    note = kernel_notes.together(tmp_path / "notes")
    assert set(note["kernels"]) == {kernel_notes.text_of(spec)} and kernel_notes.why_others(note) == ""


# ----------------------------------------------------------------------------------------------- receipts that are none


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"), ("", "Expecting value"), ("[]", "it names no steps"), ("{}", "it names no steps"),
        ("# README", "Expecting value"), ('{"digest": "0", "tests": {}}', "its format is older"),
        ('{"tests": {"passed": 3}}', "tests does not say what it found in which code"),
        ('{"tests": 3}', "tests does not"),
        ('{"tests": {"found": 1, "date": "", "code": "0", "kernels": "0"}}', "tests does not"),
        ('{"tests": {"found": 1, "code": "0"}}', "tests does not"),
    ],
)  # fmt: skip
def test_gpu_check_verifies_receipts_only(content, reason, tmp_path, capsys):
    path = tmp_path / "check.json"
    if content is not None:
        path.write_text(content)
    assert gpu_check.main(["--verify", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"--verify: {path} is not a receipt (") and told.count("\n") == 1 and reason in told


@pytest.mark.parametrize("step", ["skipped", "not run: compute-sanitizer is not on the PATH", "not finished"])
def test_a_receipt_of_no_finished_step_is_about_no_code(step, tmp_path, capsys):
    path = tmp_path / "check.json"
    path.write_text(json.dumps({"sanitizers": step}))
    assert gpu_check.main(["--verify", str(path)]) == 1
    assert capsys.readouterr().out == f"sanitizers: {step}\n"
