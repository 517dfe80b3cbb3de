"""Types of the public names: a user's program that type checkers pass, and mistakes that they find."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from support import CHECKOUT
from support.keyword_functions import FUNCTIONS, positional_arguments

pytest.importorskip("cupy")

import fa2cupy
import fa2cupy.distributed as dist
from fa2cupy import mods, reference, testing, typing
from fa2cupy.families.operations import TILED
from fa2cupy.problem.choices import check_method
from fa2cupy.problem.features import FeatureKeywords

TYPED = CHECKOUT / "tests" / "typed"


def mypy() -> list[str]:
    cache = CHECKOUT / ".mypy_cache" / "typed"
    return ["mypy", "--config-file", "mypy.ini", "--cache-dir", str(cache), "program.py", "mistakes.py"]


def pyright() -> list[str]:
    return ["basedpyright", "--pythonpath", sys.executable]


@pytest.mark.matrix  # .ci/run has a step for it
@pytest.mark.parametrize("command", [mypy, pyright], ids=lambda command: command.__name__)
def test_checkers_find_the_mistakes_and_nothing_else(command):
    name, *arguments = command()
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install '.[lint]'")
    program = str(Path(sys.executable).with_name(name))
    run = subprocess.run([program, *arguments], cwd=TYPED, capture_output=True, text=True)
    assert run.returncode == 1, run.stdout + run.stderr
    errors = re.findall(r"(\w+\.py):(\d+)(?::\d+)?(?: -|:) (?:error|warning)", run.stdout)
    lines = (TYPED / "mistakes.py").read_text(encoding="utf-8").splitlines()
    mistakes = [("mistakes.py", str(number)) for number, line in enumerate(lines, 1) if "  # " in line]
    assert len(mistakes) >= 12
    assert sorted(set(errors)) == sorted(mistakes), run.stdout


def test_the_program_runs():
    runpy.run_path(str(TYPED / "program.py"))["on_numpy"]()


def test_the_program_has_every_public_name():
    modules = {"fa2cupy": fa2cupy, "dist": dist, "mods": mods, "reference": reference, "testing": testing}
    used = set()
    for node in ast.walk(ast.parse((TYPED / "program.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            folder = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            used |= {f"{folder}{one.name}" for one in node.names}
    public = {f"{name}.{one}" for name, module in modules.items() for one in module.__all__}
    assert public | {f"fa2cupy.typing.{one}" for one in typing.__all__} <= used


# ------------------------------------------------------------------------------------------------------- signatures


SIGNED = FUNCTIONS | {
    f"fa2cupy.distributed.{name}": getattr(dist, name)
    for name in ("forward", "backward", "attention", "jvp", "backward_jvp", "double_backward")
}


@pytest.mark.parametrize("name", SIGNED)
def test_a_signature_has_every_keyword_by_its_name(name):
    parameters = inspect.signature(SIGNED[name]).parameters
    assert {"causal", "layout", *FeatureKeywords.__annotations__} < parameters.keys()
    assert not [one for one in parameters.values() if one.kind is one.VAR_KEYWORD]
    assert parameters["layout"].annotation == "Layout" and parameters["layout"].default == "bshd"
    assert parameters["window"].annotation == "tuple[int | None, int | None] | None"
    assert parameters["mask_args"].default == ()


@pytest.mark.parametrize("name", [name for name in SIGNED if "distributed" not in name])
def test_defaults_are_what_a_call_without_them_has(name):
    """Checks that a call with all defaults of the signature is the one that has none of them."""
    arrays = positional_arguments(testing.make_inputs("float32", seqlen_q=5, head_dim=4))
    do, function, parameters = arrays["do"], SIGNED[name], inspect.signature(SIGNED[name]).parameters.values()
    inputs = [arrays[one.name] for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    options = {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}
    for one, other in zip(results(function(*inputs), do), results(function(*inputs, **options), do), strict=True):
        np.testing.assert_array_equal(one, other)


def results(returned, do: np.ndarray) -> list:
    """Returns the numbers that a function returned, those of `backprop` and of an `Expectation` included."""
    if isinstance(returned, testing.Expectation):
        return [*returned._forward["o"][:2], *returned._backward["dq"][:2]]
    values = list(returned.values()) if isinstance(returned, dict) else list(returned)
    return [*values[:-1], *values[-1](do)] if callable(values[-1]) else values


def test_defaults_of_ranks_are_what_a_call_without_them_has(monkeypatch):
    made = []
    monkeypatch.setattr(dist.api, "_results", lambda comm, arguments: made.append(arguments) or ("o", "lse"))
    parameters = inspect.signature(dist.forward).parameters.values()
    options = {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}

    def work(comm):
        dist.forward(comm, "q", "k", "v")
        dist.forward(comm, "q", "k", "v", **options)

    dist.simulate(1, work)
    one, other = made
    assert (one.options, one.scheme, one.order, one.head_groups) == (
        other.options, other.scheme, other.order, other.head_groups
    )  # fmt: skip
    assert set(other.keywords.values()) == {0.0, ()}  # the defaults of dropout_p, score_args and mask_args


def test_names_of_types_are_those_that_calls_take():
    assert get_args(typing.Operation) == TILED
    assert [check_method(name) for name in get_args(typing.Method)] == list(get_args(typing.Method))
    q, k, v, _ = testing.make_inputs("float32", seqlen_q=4, num_heads=4, head_dim=4)
    for layout in get_args(typing.Layout):
        fa2cupy.forward(q, k, v, layout=layout)
    for precision in get_args(typing.Precision):
        fa2cupy.forward(q, k, v, precision=precision)

    def work(comm):
        for scheme in get_args(typing.Scheme):
            for order in get_args(typing.Order):
                dist.forward(comm, q[:, :2], k[:, :2], v[:, :2], scheme=scheme, order=order)

    dist.simulate(4, work, ranks_per_host=2)
