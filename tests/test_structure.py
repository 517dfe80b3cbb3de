"""Rules for imports, checked in the sources."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from support import CHECKOUT

TESTS = CHECKOUT / "tests"


def imported_names(source: str) -> set[str]:
    """Returns the dotted names of all that a source imports, at its top or in a function."""
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
    """Checks that neither tests nor the code that they share import a test; shared code is in support/."""
    files = list(TESTS.rglob("*.py"))
    tests = {path.stem for path in files if path.match("test_*.py")} | {"conftest"}
    assert Path(__file__).stem in tests

    def of_tests(path: Path) -> set[str]:
        return {name for name in imported_names(path.read_text(encoding="utf-8")) if tests & set(name.split("."))}

    assert not {f"{path.relative_to(TESTS)} imports {name}" for path in files for name in of_tests(path)}


# -------------------------------------------------------------------------------------------- the floors of the package


PACKAGE = CHECKOUT / "fa2cupy"

#: Folders and modules of the package, lowest first. Those on the same floor do not import from each other.
FLOORS = (
    {"_version", "errors"},
    {"system"},
    {"settings", "functions"},
    {"problem"},
    {"families", "numerics"},
    {"jit", "cpu", "typing"},
    {"plan"},
    {"gpu"},
    {"backends", "lengths", "mods", "reference"},
    {"api", "ahead", "inspection", "second_order", "sparse", "testing"},
    {"closure"},
    {"distributed", "demo"},
    {"scaleout"},
    {"cli"},
    {"__init__", "__main__"},
)
#: The same for the rooms of ``distributed``.
FLOORS_OF_RANKS = (
    {"local"},
    {"transport"},
    {"communicator"},
    {"movers"},
    {"call"},
    {"schemes", "rows", "totals", "simulation"},
    {"api"},
    {"__init__"},
)


def modules() -> dict[str, Path]:
    """Returns all modules by their dotted name below the package; a folder has the name of its ``__init__``."""
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}


def imports_of(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Returns the modules of the package that a module imports, at its top or in a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = name.split(".")[: -node.level]
        base += node.module.split(".") if node.module else []
        for alias in node.names:
            named = ".".join([*base, alias.name])
            candidates = (named, f"{named}.__init__", ".".join(base), ".".join([*base, "__init__"]))
            found.add(next(one for one in candidates if one in known))
    return found


@pytest.fixture(scope="module")
def arrows() -> dict[str, set[str]]:
    """Returns the imports of each module of the package."""
    known = modules()
    return {name: imports_of(name, path, known) for name, path in known.items()}


def room_of(module: str) -> str:
    return module.split(".")[0]


def below(arrows: dict[str, set[str]], room: str) -> dict[str, set[str]]:
    """Returns the imports between the modules of a room, by their names in it."""
    front = f"{room}."
    return {
        name.removeprefix(front): {other.removeprefix(front) for other in others if other.startswith(front)}
        for name, others in arrows.items()
        if name.startswith(front)
    }


@pytest.fixture(params=[None, "distributed"])
def house(request, arrows) -> tuple[tuple[set[str], ...], dict[str, set[str]]]:
    """Returns the floors of the package, or of one of its rooms, and the imports of the modules there."""
    return (FLOORS, arrows) if request.param is None else (FLOORS_OF_RANKS, below(arrows, request.param))


def test_imports_of_the_package_are_found(arrows):
    assert "jit.spec" in arrows["plan.stages"]
    assert "gpu.calls" in arrows["backends"], "an import within a function"
    assert "problem.dtypes" in arrows["problem.attention"], "a module from its folder"
    assert "distributed.__init__" in arrows["__init__"], "a folder"
    assert not [name for name in arrows if name.startswith("kernels")]


def test_every_room_has_a_floor(house):
    floors, arrows = house
    rooms = {room_of(name) for name in arrows}
    assert rooms == set().union(*floors)
    assert sum(map(len, floors)) == len(rooms)


def test_arrows_go_down(house):
    floors, arrows = house
    floor_of = {room: number for number, floor in enumerate(floors) for room in floor}
    between = {(name, other) for name, others in arrows.items() for other in others if room_of(name) != room_of(other)}
    assert between
    up = {(name, other) for name, other in between if floor_of[room_of(other)] >= floor_of[room_of(name)]}
    assert not up


def test_there_are_no_import_circles(arrows):
    """Checks circles within a room, too: modules that import none of the rest are removed until none remains."""
    left = dict(arrows)
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert not left


def test_the_package_is_imported_by_relative_names_alone():
    absolute = {
        f"{name} imports {other}"
        for name, path in modules().items()
        for other in imported_names(path.read_text(encoding="utf-8"))
        if other.split(".")[0] == "fa2cupy"
    }
    assert not absolute
