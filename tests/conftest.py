"""Setup of all tests: the folders that they write to, skips without a GPU, the selection of the matrix, failures."""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Container, Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import fa2cupy
from fa2cupy.families import tuning
from fa2cupy.jit import cache, entries
from fa2cupy.jit.compiler import CompiledKernel
from fa2cupy.jit.source import KernelSource
from fa2cupy.system import folders

if TYPE_CHECKING:
    from common.outcomes import OutcomeNotes
    from xdist.workermanage import WorkerController

_SESSION_FOLDER = pytest.StashKey[tempfile.TemporaryDirectory]()
_OUTCOMES: pytest.StashKey[OutcomeNotes] = pytest.StashKey()
_NEEDS_A_GPU = " needs a GPU: "


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--isolate",
        action="store_true",
        help="on a GPU: each array alone in pages of its own, so that what is read or written outside of it faults",
    )
    parser.addoption(
        "--part",
        type=_part,
        default=(0, 1),
        metavar="K/N",
        help="of the matrix, part K of N, counted from 0; a test is always of the same part",
    )
    parser.addoption(
        "--outcomes",
        type=Path,
        metavar="FILE",
        help="notes the outcome of each test there, and leaves out those that it says have passed or were skipped",
    )


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise argparse.ArgumentTypeError(f"expected K/N with 0 <= K < N, got {text!r}")
    return int(part), int(parts)


def pytest_configure(config: pytest.Config) -> None:
    # The folder is made before collection, when parametrised tests look up tiles. Workers of pytest-xdist inherit the
    # controller's folder. Tests reuse the kernels compiled by earlier ones; set FA2CUPY_CACHE_DIR to keep them longer.
    is_worker = hasattr(config, "workerinput")
    if notes := config.getoption("--outcomes"):
        from common.outcomes import OutcomeNotes

        done = config.workerinput["done"] if is_worker else None
        config.stash[_OUTCOMES] = OutcomeNotes(notes, done, notes=not is_worker)
        config.pluginmanager.register(config.stash[_OUTCOMES])
    if is_worker:
        os.environ.update(config.workerinput.get("environment", {}))
        return
    config.pluginmanager.register(_Failures())
    folder = config.stash[_SESSION_FOLDER] = tempfile.TemporaryDirectory(prefix="fa2cupy-tests-")
    os.environ.setdefault("FA2CUPY_CACHE_DIR", os.path.join(folder.name, "cache"))
    os.environ["XDG_CONFIG_HOME"] = os.path.join(folder.name, "config")
    for variable in ("FA2CUPY_CACHE_PATH", "FA2CUPY_DUMP_DIR", "FA2CUPY_LOG"):
        os.environ.pop(variable, None)
    os.environ["FA2CUPY_CACHE_LIMIT"] = "65536"  # MiB: a suite on a GPU has more kernels than fit in the default
    # Workers, and the processes that tests start, would each compile the whole package and rewrite all assertions.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if getattr(config.option, "numprocesses", None):  # workers share the cores and have not loaded NumPy yet
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # With pytest-xdist (-n), "loadgroup" keeps the tests on the GPU in one process. If they are skipped, "worksteal"
    # keeps neighbouring tests together, which share kernels that the interpreter has parsed.
    if getattr(config.option, "dist", None) == "load":
        config.option.dist = "loadgroup" if _why_no_gpu() is None else "worksteal"


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_configure_node(node: WorkerController) -> None:
    """Workers that share the tests on the GPU take turns with the GPUs: each sees one."""
    if _OUTCOMES in node.config.stash:
        node.workerinput["done"] = node.config.stash[_OUTCOMES].done
    gpus = _visible_gpus()
    if len(gpus) > 1 and node.config.option.dist != "loadgroup":
        number = int(node.gateway.id.removeprefix("gw"))
        node.workerinput["environment"] = {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]}


def _visible_gpus() -> list[str]:
    """Returns the values of CUDA_VISIBLE_DEVICES that each show one of the GPUs."""
    count, _ = _count_gpus()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return (chosen.split(",") if chosen else [str(number) for number in range(count)])[:count]


class _Failures:
    """Says at once which tests fail in which phase, and why: a run that is broken off has no summary."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            print(f"\nfailed: {report.nodeid}\n{report.when}: {report.longreprtext[-2000:]}", flush=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _SESSION_FOLDER in config.stash:
        config.stash[_SESSION_FOLDER].cleanup()


class _Module(pytest.Module):
    """A file of tests; one that is marked as for GPUs is skipped whole without one: thousands of tests are not made."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        self.obj  # the import gives the module its marks
        if self.get_closest_marker("gpu") and (reason := _why_no_gpu()):
            pytest.skip(f"{self.path.name}{_NEEDS_A_GPU}{reason}")
        return super().collect()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    return _Module.from_parent(parent, path=module_path)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.stats.get("skipped", ())
    files = [report for report in reports if isinstance(report, pytest.CollectReport)]
    if files:
        reasons = {report.longrepr[2].rpartition(_NEEDS_A_GPU)[2] for report in files}
        terminalreporter.write_line(f"skipped files of tests: {len(files)} ({'; '.join(sorted(reasons))})")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if not all(_is_sampled(item, mark.kwargs) for mark in item.iter_markers("sample")):
            item.add_marker(pytest.mark.matrix)
    part, parts = config.getoption("--part")
    others = [item for item in items if item.get_closest_marker("matrix") and _part_of(item, parts) != part]
    if others:
        config.hook.pytest_deselected(items=others)
        left_out = set(others)
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: item.get_closest_marker("long") is None)  # others run beside them
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if config.pluginmanager.hasplugin("xdist"):
        for item in needing:
            item.add_marker(pytest.mark.xdist_group("gpu"))
    count, reason = _count_gpus() if needing else (0, None)
    for item in needing:
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif count < 2 and item.get_closest_marker("several_gpus"):
            item.add_marker(pytest.mark.skip(reason="needs two GPUs"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Makes tests without the garbage collector, which would scan a growing million of objects that all stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    # The interpreter keeps a million small objects for the kernels it has parsed, and makes hardly any garbage: at the
    # usual threshold the collector scans them over and over. Tests on the GPU need the collector to free GPU memory.
    if any(item.get_closest_marker("simulated") for item in session.items):
        gc.set_threshold(100_000, 20, 20)


def _part_of(item: pytest.Item, parts: int) -> int:
    """Returns the part of a test, derived from its name so that a new test does not move the others."""
    return zlib.crc32(item.nodeid.encode()) % parts


def _is_sampled(item: pytest.Item, values: dict[str, Container]) -> bool:
    """Returns True if each parameter that the mark names has one of the values that the mark gives."""
    parameters = item.callspec.params
    return all(parameters[name] in some for name, some in values.items())


@pytest.fixture(scope="session", autouse=True)
def _isolated_arrays(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--isolate") and _why_no_gpu() is None:
        from support import isolated_memory

        isolated_memory.install()


def _why_no_gpu() -> str | None:
    return _count_gpus()[1]


def _count_gpus() -> tuple[int, str | None]:
    """Returns the number of GPUs, and why there are none."""
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except ImportError as error:
        return 0, f"no CuPy: {error}"
    except Exception as error:  # CuPy is there and the driver is not: CUDARuntimeError, or a library that does not load
        return 0, f"no CUDA device: {error}"
    return count, None if count else "no CUDA device: the driver reports none"


@pytest.fixture
def small_heap():
    """Keeps objects of earlier tests out of garbage collections: a million of them would take a second."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def isolated_cache(tmp_path, monkeypatch):
    """An empty cache folder of this test alone, not created yet; nothing is remembered from other tests."""
    folder = tmp_path / "kernel-cache"
    monkeypatch.setenv("FA2CUPY_CACHE_DIR", str(folder))
    forget_cache()
    yield folder
    forget_cache()


def forget_cache() -> None:
    """Clears what a new process would not know: kernels in memory, and the folders that have been warned about."""
    cache._kernels.clear()
    entries._room.clear()
    folders._warned_about.clear()


@pytest.fixture
def fake_compiler(isolated_cache, monkeypatch):
    """Replaces the compiler by one that needs no time and no CuPy, with an empty cache; gives the compiled specs."""
    specs = []

    def compile_source(source: KernelSource) -> CompiledKernel:
        specs.append(source.spec)
        return CompiledKernel(source.spec, b"machine code \n" * 4, 24, 0, 8, "the log", 0.5)

    monkeypatch.setattr(cache, "nvrtc_build", lambda: "// NVRTC of the tests")
    monkeypatch.setattr(cache, "compile_options", lambda arch: (f"-arch={arch}",))
    monkeypatch.setattr(cache, "compile_source", compile_source)
    return specs


@pytest.fixture
def tuning_folder(tmp_path, monkeypatch):
    """An empty configuration folder, read anew."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    tuning._tuned_tiles.cache_clear()
    folders._warned_about.clear()
    yield tmp_path / "fa2cupy"
    tuning._tuned_tiles.cache_clear()


@pytest.fixture
def run_python(tmp_path):
    """Runs a script in a new process that imports the same fa2cupy, from another folder, and checks its exit status."""

    def run(script: str, **environment: str) -> subprocess.CompletedProcess:
        package = Path(fa2cupy.__file__).resolve().parent.parent
        result = subprocess.run(
            [sys.executable, "-c", script],
            cwd=tmp_path,  # a checkout in the working folder would come before PYTHONPATH
            env={**os.environ, "PYTHONPATH": str(package), **environment},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        return result

    return run
