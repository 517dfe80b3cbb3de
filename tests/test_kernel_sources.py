"""Rules for the text of the kernels: the features that the files of a family may name."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from fa2cupy.families.operations import OF_DIRECTION
from fa2cupy.problem.features import FEATURES

KERNELS = Path(__file__).parents[1] / "kernels"
PACKAGE = KERNELS.parent / "fa2cupy"

pytestmark = pytest.mark.skipif(not KERNELS.is_dir(), reason="not in a checkout")

#: Number of times that a file of a family names a feature. The list may only become shorter: features belong in the
#: headers of ``kernels/common``, which tell a family what a feature means for it (``common::kTakesWeights``).
NAMED = {
    ("sm80/convert_dq.cuh", "kVarlen"): 1,
    ("sm90/backward_shape.cuh", "kVarlen"): 1,
    ("sm90/dq_of_keys.cuh", "kVarlen"): 2,
    ("sm90/convert_dq.cuh", "kVarlen"): 1,
    ("sm90/dkdv_jvp.cuh", "kVarlen"): 1,
    ("sm90/forward_consumer.cuh", "kVarlen"): 1,
    ("sm90/forward_producer.cuh", "kVarlen"): 1,
    ("sm90/tma_rows.cuh", "kVarlen"): 2,
    ("sm90/query_tile_loop.cuh", "kVarlen"): 1,
    ("sm90/boxes.cuh", "kVarlen"): 1,
    ("sm90/query_tile.cuh", "kVarlen"): 2,
}


def features_named_in(folder: Path) -> Counter:
    """Counts the names of features in code by (file, flag or field of the record); comments may name features.

    The operands that have tangents do not count: by them families know which products there are.
    """
    flags = {feature.flag for name, feature in FEATURES.items() if name not in OF_DIRECTION}
    fields = {name for feature in FEATURES.values() for name in (*feature.arrays, *feature.values, *feature.per_call)}
    fields |= {f"{name}_strides" for feature in FEATURES.values() for name in feature.arrays}
    named: Counter = Counter()
    for path in sorted(p for family in ("simt", "sm80", "sm90") for p in (folder / family).iterdir()):
        code = re.sub(r"//[^%].*", "", path.read_text())
        for match in re.findall(r"\bSpec::(k\w+)", code):
            named[path.relative_to(folder).as_posix(), match] += match in flags
        for match in re.findall(r"\b(?:params|params_|launch|maps|maps_|own|record)\.(\w+)", code):
            named[path.relative_to(folder).as_posix(), match] += match in fields
    return +named


def cuda_in(source: str) -> list[str]:
    """Returns what a module has of CUDA: kernels in its texts, and names of CuPy's ways to compile some.

    Texts of traced functions are parts of kernels, which are rendered into them.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += re.findall(r'__global__|extern "C"', node.value)
        name = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "name", None)
        if name in ("RawKernel", "RawModule", "ElementwiseKernel", "ReductionKernel", "fuse"):
            found.append(name)
    return found


def test_kernels_are_in_their_folder():
    """All kernels then are rendered, compiled, checked, cached and loaded in one way."""
    found = {path: cuda_in(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    assert {path.name: cuda for path, cuda in found.items() if cuda} == {}


def test_kernels_in_a_module_are_found():
    source = """
import cupy
SOURCE = f'extern "C" __global__ void run({1}) {{}}'
def module(): return cupy.RawModule(code=SOURCE)
from cupy import ElementwiseKernel
"""
    assert sorted(cuda_in(source)) == ["ElementwiseKernel", "RawModule", "__global__", 'extern "C"']


def test_families_name_no_feature_but_those_of_the_list():
    assert features_named_in(KERNELS) == NAMED


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("if constexpr (Spec::kAlibi) {}", "kAlibi"),
        ("x *= params_.dropout_scale;", "dropout_scale"),
        ("y = params.bias + params.bias_strides.offset(0, 0, 0, 0);  // and its strides", "bias"),
    ],
)
def test_a_new_use_is_found(tmp_path, line, name):
    for family in ("simt", "sm80", "sm90"):
        (tmp_path / family).mkdir()
    (tmp_path / "simt" / "new.cuh").write_text(f"// Spec::kSink, params.sink\n{line}\n")
    assert ("simt/new.cuh", name) in features_named_in(tmp_path)
    assert not [key for key in features_named_in(tmp_path) if "ink" in key[1]]
