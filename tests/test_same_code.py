"""Digests of machine code: the changes of a kernel that they show, and those that they ignore."""

from __future__ import annotations

import itertools
import json

import pytest
import same_code

from fa2cupy.families.registry import FAMILIES
from fa2cupy.jit.compiler import compile_source
from fa2cupy.jit.source import KernelSource, kernel_directory, render_kernel
from fa2cupy.problem.features import FEATURES


@pytest.fixture(scope="module")
def kernel():
    """Returns the source of a small kernel and its digest."""
    pytest.importorskip("cupy", exc_type=ImportError)
    spec = next(spec for spec in same_code.fixed_specs(["simt"]) if spec.operation == "delta")
    source = render_kernel(spec)
    return source, same_code.code_digest(compile_source(source).cubin)


def digest_of(source: KernelSource, old: str, new: str) -> str:
    assert old in source.text
    return same_code.code_digest(compile_source(KernelSource(source.spec, source.text.replace(old, new))).cubin)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('extern "C"', '// a comment\n\nextern "C"'),
        ("kLanes", "kLanesOfRow"),
        ('extern "C"', '__device__ int unused() { return 1; }\nextern "C"'),
    ],
)
def test_lines_and_names_do_not_matter(kernel, old, new):
    source, digest = kernel
    assert digest_of(source, old, new) == digest


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("params.delta[index]", "params.delta[index + 1]"),
        ("__launch_bounds__(32 * fa2::Spec::kWarps)", "__launch_bounds__(64 * fa2::Spec::kWarps)"),
        ("int32 num_tiles;", "int32 num_tiles; int64 another;"),
    ],
    ids=("instructions", "threads", "parameters"),
)
def test_what_the_gpu_or_the_driver_acts_upon_matters(kernel, old, new):
    source, digest = kernel
    if old.startswith("int32"):
        text = source.text.replace("static_assert(sizeof(Params) ==", "static_assert(sizeof(Params) !=")
        source = KernelSource(source.spec, text)
    assert digest_of(source, old, new) != digest


def test_the_set_has_every_kernel_family_and_feature():
    specs = same_code.fixed_specs()
    assert {spec.operation for spec in specs} == {path.stem for path in kernel_directory().glob("*.cu")}
    assert {name for spec in specs for name in spec.features} == set(FEATURES)
    compiled = {(spec.folder, spec.operation, spec.dtype) for spec in specs}
    for family in FAMILIES:
        own = {(family.name, *pair) for pair in itertools.product(family.operations, family.dtypes)}
        assert own <= compiled


def test_differences_are_listed_and_are_a_failure(capsys):
    assert same_code.compare({"a": "1", "b": "2", "gone": "3"}, {"a": "1", "b": "2"}) == 0
    assert same_code.compare({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "differs: b",
        "new: c",
        "1 kernels have the same machine code, 1 differ",
    ]


def test_digests_are_written_and_compared(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(same_code, "digests", lambda specs, jobs: {"kernel": "1"})
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    assert same_code.main([str(before)]) == 0
    assert json.loads(before.read_text()) == {"kernel": "1"}
    assert same_code.main([str(after), "--against", str(before), "--families", "sm80"]) == 0
    monkeypatch.setattr(same_code, "digests", lambda specs, jobs: {"kernel": "2"})
    assert same_code.main([str(after), "--against", str(before)]) == 1
    assert "differs: kernel" in capsys.readouterr().out
