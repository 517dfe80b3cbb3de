"""What may import what, read from the sources."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from support import CHECKOUT

TESTS = CHECKOUT / "tests"


def imported_names(source: str) -> set[str]:
    """Dotted names of all that a source imports, at its top or in a function."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module or ''}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import test_a", "test_a"),
        ("import numpy, tests.test_a as a", "tests.test_a"),
        ("from test_a import b", "test_a.b"),
        ("def f():\n    if x:\n        from . import test_a", ".test_a"),
    ],
)
def test_imports_are_found_wherever_they_are(source, name):
    assert name in imported_names(source)


def test_no_test_is_imported():
    """Neither by another test nor by what tests share: support/ is for that."""
    files = list(TESTS.rglob("*.py"))
    tests = {path.stem for path in files if path.match("test_*.py")} | {"conftest"}
    assert Path(__file__).stem in tests

    def of_tests(path: Path) -> set[str]:
        return {name for name in imported_names(path.read_text(encoding="utf-8")) if tests & set(name.split("."))}

    assert not {f"{path.relative_to(TESTS)} imports {name}" for path in files for name in of_tests(path)}
