"""The row of a feature says what other modules need to know of it: who may name one, and what adding one takes."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import CHECKOUT
from support.made_up_feature import PLACES, patched_copy

import fa2cupy
from fa2cupy.families.operations import OF_DIRECTION
from fa2cupy.problem.features import FEATURES, OFFSETS, FeatureKeywords

# ---------------------------------------------------------------------------------------------- who may name a feature


#: Each feature has its row, its check, its two formulas, and its place in the signatures of the API.
OF_EACH = {"problem/features", "problem/feature_checks", "numerics/formulas", "cpu/scores", "api"}
#: The caller's functions are traced, called and rendered; with several GPUs they are told where a part begins.
_FUNCTIONS = {
    "ahead", "distributed/", "families/sm90_float32", "families/sm90_tiles", "families/tile_choice",
    "functions/tracing", "inspection", "jit/source", "problem/function_checks",
}  # fmt: skip
#: Gradients besides dq, dk and dv are results, which calls, plans and records have of their own.
_RESULTS = {"families/", "gpu/", "jit/", "plan/", "problem/"}
#: The bias and the sink have tangents, and so have their gradients.
_TANGENTS = {"cpu/second_order", "numerics/second_order"}
_OF_TANGENTS = {
    "distributed/api", "families/operations", "gpu/", "plan/specs", "problem/", "reference", "second_order", "typing",
}  # fmt: skip
#: The other modules that name a feature. A name that ends with "/" is a folder.
OTHERS = {
    "score_mod": {*_FUNCTIONS, "jit/params", "mods", "testing"},
    "window": {"distributed/", "families/sm90_tiles", "plan/layout"},
    "softcap": {"mods", "problem/function_checks", "problem/softcap"},
    "alibi_slopes": {"families/tile_choice"},
    "bias": {
        *_TANGENTS, "distributed/", "families/choice", "families/kept_bias", "families/sm90", "families/sm90_tiles",
        "jit/params", "plan/layout", "plan/specs", "testing",
    },
    "wide_bias": {"families/kept_bias", "families/operations", "jit/params"},
    "dbias": {*_RESULTS, "cpu/sums", "numerics/second_order", "distributed/", "numerics/comparison"},
    "full_dbias": _RESULTS - {"gpu/"},
    "dscore_args": {*_RESULTS, "numerics/comparison"},
    "bias_tangent": {*_OF_TANGENTS, "jit/params"},
    "sink_tangent": _OF_TANGENTS,
    **dict.fromkeys(OF_DIRECTION, {"families/operations"}),
    "dout_tangent": {"families/operations"},
    "mask": {"demo", "families/sm90", "families/sm90_tiles"},
    "key_padding_mask": {"problem/arguments"},
    "mask_mod": {
        *_FUNCTIONS, "families/boxes", "families/operations", "plan/", "problem/block_mask", "problem/checks", "sparse",
    },
    "block_mask": {
        "__init__", "distributed/", "families/", "gpu/", "plan/", "problem/block_mask", "problem/checks", "sparse",
    },
    "intervals": {
        "cpu/tile_states", "distributed/", "families/boxes", "families/tile_choice", "gpu/", "plan/",
        "problem/block_mask", "problem/checks", "sparse",
    },
    "given_lse": {"families/", "jit/params", "plan/", "problem/"},
    "kept_bias": {"families/", "plan/"},
    "boxes": {"families/", "jit/", "plan/"},
    "sink": {*_TANGENTS, "distributed/", "problem/tangents", "cpu/attention", "families/operations", "testing"},
    "dropout_p": {"distributed/", "families/operations", "problem/checks", "problem/philox"},
    "dlse": {
        *_TANGENTS, "closure", "cpu/attention", "distributed/", "families/boxes", "families/operations", "gpu/",
        "plan/", "problem/", "reference", "second_order", "testing", "typing",
    },
    "cu_seqlens": {
        "__init__", "distributed/", "families/operations", "families/sm90_tiles", "jit/source", "lengths", "plan/specs",
        "problem/sequences",
    },
}  # fmt: skip
#: The files of ``kernels/`` that ask for a feature by its constant of `Spec`.
KERNELS = {
    "score_mod": {"common/dbias.cuh", "common/score_mod.cuh", "common/tangents.cuh", "common/weights.cuh"},
    "window": {"common/mask.cuh", "common/tile_lists.cuh", "common/tile_range.cuh", "decode/"},
    "softcap": {
        "common/dbias.cuh", "common/score_mod.cuh", "common/softcap.cuh", "common/tangents.cuh", "common/weights.cuh",
    },
    "alibi_slopes": {"common/score_mod.cuh", "decode/"},
    "bias": {"common/bias_tile.cuh", "common/score_arrays.cuh", "common/score_mod.cuh"},
    "wide_bias": set(),
    "dbias": {"common/dbias.cuh", "common/score_mod.cuh", "common/weights.cuh"},
    "full_dbias": {"common/dbias.cuh"},
    "dscore_args": {"common/dbias.cuh", "common/score_mod.cuh"},
    "bias_tangent": {"common/tangents.cuh"},
    "sink_tangent": {"common/dsink.cuh", "common/tangents.cuh"},
    **dict.fromkeys(OF_DIRECTION, {"sm90/"}),
    "mask": {"common/mask_tile.cuh", "common/score_arrays.cuh", "common/score_mod.cuh"},
    "key_padding_mask": {"common/key_padding.cuh", "common/score_arrays.cuh", "common/score_mod.cuh"},
    "mask_mod": {"common/mask_function.cuh", "common/score_arrays.cuh", "common/score_mod.cuh"},
    "block_mask": {
        "common/dbias.cuh", "common/mask_function.cuh", "common/score_mod.cuh", "common/tile_lists.cuh",
        "common/tile_range.cuh",
    },
    "intervals": {"common/mask_function.cuh", "common/weights.cuh"},
    "given_lse": {"common/own_lse.cuh"},
    "kept_bias": {"common/bias_tile.cuh", "common/scores.cuh", "common/series.cuh"},
    "boxes": {"common/tile_range.cuh"},
    "sink": {"common/scores.cuh", "decode/"},
    "dropout_p": {"common/score_mod.cuh", "common/scores.cuh", "common/tangents.cuh", "common/weights.cuh"},
    "dlse": {"common/delta.cuh"},
    "cu_seqlens": {"common/", "float32_parts/", "sm80/", "sm90/"},
}  # fmt: skip
#: Names that are also ordinary words: of these, only a string that is nothing else counts.
WORDS = {"window", "mask", "bias"}


def names_in_python(text: str) -> set[str]:
    """Returns the identifiers of a module's code, its strings, and the words of these, but not those of docstrings."""
    tree = ast.parse(text)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    names = set()
    for node in ast.walk(tree):
        identifiers = {name for name in vars(node).values() if isinstance(name, str)}
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and id(node) not in docstrings:
                names |= {node.value, *(set(re.findall(r"\w+", node.value)) - WORDS)}
        else:
            names |= identifiers - WORDS
    return names


def names_in_cuda(text: str) -> set[str]:
    """Returns the constants of `Spec` that code asks for."""
    return set(re.findall(r"\bSpec::(k\w+)", re.sub(r"//.*", "", text)))


def test_names_are_found_in_code_alone():
    code = (
        '"""sink"""\n# sink\ndef f(alibi, *, softcap):\n    return g(x.cap, mask=1, dim=f"no sinks {softcap}, {2}")\n'
    )
    assert {"alibi", "softcap", "cap", "dim", "no", "sinks", "g", "x", "f"} <= names_in_python(code)
    assert not {"sink", "mask"} & names_in_python(code)
    assert "mask" in names_in_python('x["mask"]') and "mask" not in names_in_python('"a mask"')
    assert names_in_cuda("if (Spec::kSink || kMask) {}  // Spec::kBias") == {"kSink"}


def files_naming(names: set[str], found: dict[str, set[str]]) -> set[str]:
    return {file for file, inside in found.items() if names & inside}


def without(files: set[str], allowed: set[str]) -> set[str]:
    """Returns the files that are neither among those allowed nor in a folder among them."""
    folders = tuple(one for one in allowed if one.endswith("/"))
    return {file for file in files if file not in allowed and not file.startswith(folders)}


@pytest.fixture(scope="module")
def in_modules() -> dict[str, set[str]]:
    package = CHECKOUT / "fa2cupy"
    return {
        path.relative_to(package).with_suffix("").as_posix(): names_in_python(path.read_text(encoding="utf-8"))
        for path in package.rglob("*.py")
    }


@pytest.fixture(scope="module")
def in_kernels() -> dict[str, set[str]]:
    kernels = CHECKOUT / "kernels"
    return {
        path.relative_to(kernels).as_posix(): names_in_cuda(path.read_text(encoding="utf-8"))
        for path in kernels.rglob("*")
        if path.suffix in (".cu", ".cuh", ".j2")
    }


@pytest.mark.parametrize("feature", FEATURES)
def test_few_files_name_a_feature(feature, in_modules, in_kernels):
    """Checks that only these do, and that each entry of the tables still is one that does."""
    names = {feature, *(OFFSETS if feature == "cu_seqlens" else ())}
    modules, kernels = files_naming(names, in_modules), files_naming({FEATURES[feature].flag}, in_kernels)
    assert not without(modules, OF_EACH | OTHERS[feature]), "let it read the row of the feature"
    assert not without(kernels, KERNELS[feature])
    assert not [one for one in OTHERS[feature] if not modules - without(modules, {one})], "leave it out of OTHERS"
    assert not [one for one in KERNELS[feature] if not kernels - without(kernels, {one})], "leave it out of KERNELS"


def test_decode_has_the_keywords_of_its_features():
    own = inspect.signature(fa2cupy.decode).parameters.keys() & FeatureKeywords.__annotations__.keys()
    assert own == {name for name, feature in FEATURES.items() if feature.in_decode}


# --------------------------------------------------------------------------------------------------- a made-up feature


@pytest.fixture(scope="module")
def with_lift(tmp_path_factory) -> Path:
    """Provides a copy of the package and its kernels in which the feature exists."""
    folder = tmp_path_factory.mktemp("with_lift")
    patched_copy(folder)
    return folder


def run_with(folder: Path, *arguments: str) -> None:
    script = CHECKOUT / "tests" / "support" / "made_up_feature.py"
    path = os.pathsep.join((str(folder), str(CHECKOUT / "tests")))
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_feature_takes_its_row_two_formulas_and_one_header():
    assert {name for name in PLACES if not name.startswith("kernels/")} <= {f"fa2cupy/{name}.py" for name in OF_EACH}
    assert len([name for name in PLACES if name.startswith("kernels/")]) == 1


def test_a_made_up_feature_runs_on_numpy_and_simulated_ranks(with_lift):
    run_with(with_lift, "numpy")


@pytest.mark.simulated
@pytest.mark.sample(family=("simt",))
@pytest.mark.parametrize("family", ["simt", "sm80"])
def test_a_made_up_feature_runs_in_kernels(with_lift, family):
    pytest.importorskip("cupy")
    run_with(with_lift, "kernels", family)
