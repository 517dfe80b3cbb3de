"""The cache of compiled kernels: what is found again, what is not, and what happens when the disk does not play along."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import multiprocessing
import os
import tempfile
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import fa2cupy
from fa2cupy import TileConfig, cache
from fa2cupy.cache import cached_kernel, entry_path
from fa2cupy.compiler import compile_source
from fa2cupy.settings import cache_dir, tuning_file
from fa2cupy.source import KernelSource, render_kernel
from fa2cupy.spec import KernelSpec

pytest.importorskip("cupy", reason="kernels are compiled by the NVRTC that CuPy loads", exc_type=ImportError)

# The kernel that compiles fastest, for two head dimensions.
SPEC = KernelSpec("delta", "common", "sm_80", "float16", 64, False, TileConfig(16, 1, 4))
OTHER = dataclasses.replace(SPEC, head_dim=32)
TIMEOUT = 120  # for threads and processes that would otherwise wait for ever


@pytest.fixture
def compilations(isolated_cache, monkeypatch):
    """The specs that NVRTC has been called for, in an empty cache."""
    specs = []

    def counting(source: KernelSource):
        specs.append(source.spec)
        return compile_source(source)

    monkeypatch.setattr(cache, "compile_source", counting)
    return specs


def forget_memory() -> None:
    """As in a new process: kernels are on disk only."""
    cache._cached_kernel.cache_clear()


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def warnings_of(function) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(warning.message) for warning in caught]


# ---------------------------------------------------------------------------------------------------------- hit and miss


def test_first_request_compiles_and_leaves_one_entry(compilations, isolated_cache):
    kernel = cached_kernel(SPEC)
    assert compilations == [SPEC]
    path = entry_path(SPEC)
    assert entries(isolated_cache) == [path.name, f"{path.stem}.json"]
    assert path.read_bytes() == kernel.cubin
    assert kernel.symbol == SPEC.symbol


def test_second_request_is_answered_from_memory(compilations):
    kernel = cached_kernel(SPEC)
    entry_path(SPEC).unlink()  # which a look at the disk would notice
    assert cached_kernel(SPEC) is kernel
    assert compilations == [SPEC]


def test_a_new_process_finds_the_whole_kernel_on_disk(compilations):
    compiled = cached_kernel(SPEC)
    forget_memory()
    found = cached_kernel(SPEC)
    assert compilations == [SPEC]
    assert found.path == entry_path(SPEC)
    assert dataclasses.replace(found, path=compiled.path) == compiled


def test_other_kernels_are_other_entries(compilations, isolated_cache):
    assert cached_kernel(SPEC).cubin != cached_kernel(OTHER).cubin
    assert compilations == [SPEC, OTHER]
    assert len(entries(isolated_cache)) == 4


def test_another_cache_folder_is_another_cache(compilations, monkeypatch, tmp_path):
    cached_kernel(SPEC)
    monkeypatch.setenv("FA2CUPY_CACHE_DIR", str(tmp_path / "second"))
    cached_kernel(SPEC)
    assert compilations == [SPEC, SPEC]


@pytest.mark.parametrize("changed", ("text", "options", "architecture", "NVRTC version", "schema"))
def test_the_key_depends_on_all_that_shapes_the_machine_code(changed, compilations, monkeypatch):
    spec = SPEC
    cached_kernel(spec)
    forget_memory()
    if changed == "text":
        text = render_kernel(SPEC).text + "// another comment\n"
        monkeypatch.setattr(cache, "render_kernel", lambda spec: KernelSource(spec, text))
    elif changed == "options":
        monkeypatch.setattr(cache, "compile_options", lambda arch: (f"-arch={arch}", "--another-option"))
    elif changed == "architecture":
        spec = dataclasses.replace(SPEC, arch="sm_90")
    elif changed == "NVRTC version":
        monkeypatch.setattr(cache, "nvrtc_version", lambda: (99, 9))
    else:
        monkeypatch.setattr(cache, "_SCHEMA", "another")
    cached_kernel(spec)
    assert compilations == [SPEC, spec]


# --------------------------------------------------------------------------------------------------------- damaged entries


def rewrite_report(path: Path, change) -> None:
    report = json.loads(path.read_text())
    change(report)
    path.write_text(json.dumps(report))


DAMAGES = {
    "truncated report": lambda cubin, report: report.write_text(report.read_text()[:20]),
    "empty report": lambda cubin, report: report.write_text(""),
    "report that is no text": lambda cubin, report: report.write_bytes(b"\xff\xfe\x00"),
    "report that is a list": lambda cubin, report: report.write_text("[1, 2]"),
    "report that is a number": lambda cubin, report: report.write_text("7"),
    "report without checksum": lambda cubin, report: rewrite_report(report, lambda fields: fields.pop("sha256")),
    "report without registers": lambda cubin, report: rewrite_report(report, lambda fields: fields.pop("registers")),
    "report with an unknown field": lambda cubin, report: rewrite_report(report, lambda fields: fields.update(new=1)),
    "truncated machine code": lambda cubin, report: cubin.write_bytes(cubin.read_bytes()[:-100]),
    "empty machine code": lambda cubin, report: cubin.write_bytes(b""),
    "changed machine code": lambda cubin, report: cubin.write_bytes(cubin.read_bytes()[:-1] + b"x"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_rebuilt_with_one_log_line(damage, compilations, caplog):
    good = cached_kernel(SPEC)
    cubin = entry_path(SPEC)
    DAMAGES[damage](cubin, cubin.with_suffix(".json"))
    forget_memory()
    with caplog.at_level(logging.WARNING, logger="fa2cupy"):
        rebuilt = cached_kernel(SPEC)
    assert rebuilt.cubin == good.cubin
    assert compilations == [SPEC, SPEC]
    (record,) = caplog.records
    assert cubin.stem[:12] in record.getMessage()

    caplog.clear()
    forget_memory()
    assert cached_kernel(SPEC).path == cubin  # the entry is whole again
    assert compilations == [SPEC, SPEC]
    assert not caplog.records


@pytest.mark.parametrize("missing", (".cubin", ".json"))
def test_half_an_entry_is_completed_without_a_word(missing, compilations, caplog):
    # What a process leaves that was stopped between its two files is no damage.
    cached_kernel(SPEC)
    entry_path(SPEC).with_suffix(missing).unlink()
    forget_memory()
    cached_kernel(SPEC)
    assert compilations == [SPEC, SPEC]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert entry_path(SPEC).with_suffix(missing).exists()


# --------------------------------------------------------------------------------------------- folders that take nothing


def full_disk(*_arguments, **_options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_nothing(monkeypatch):
    class FullFile:
        def __init__(self, descriptor, mode):
            self.file = open(descriptor, mode)  # noqa: SIM115

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        write = full_disk

    monkeypatch.setattr(cache.os, "fdopen", FullFile)


UNWRITABLE = {
    "full disk when creating": lambda monkeypatch: monkeypatch.setattr(tempfile, "mkstemp", full_disk),
    "full disk when writing": write_nothing,
    "full disk when renaming": lambda monkeypatch: monkeypatch.setattr(cache.os, "replace", full_disk),
}


@pytest.mark.parametrize("failure", UNWRITABLE)
def test_on_a_full_disk_kernels_work_with_one_warning_and_nothing_is_left(
    failure, compilations, isolated_cache, monkeypatch
):
    UNWRITABLE[failure](monkeypatch)
    messages = warnings_of(lambda: [cached_kernel(SPEC), cached_kernel(OTHER), cached_kernel(SPEC)])
    assert compilations == [SPEC, OTHER]
    (message,) = messages
    for part in (str(isolated_cache), "No space left on device", "FA2CUPY_CACHE_DIR"):
        assert part in message
    assert entries(isolated_cache) == []


def test_where_no_folder_can_be_made_kernels_work_with_one_warning(compilations, tmp_path, monkeypatch, caplog):
    # Below a regular file nobody can write, not even root.
    (tmp_path / "file").touch()
    monkeypatch.setenv("FA2CUPY_CACHE_DIR", str(tmp_path / "file" / "cache"))
    messages = warnings_of(lambda: [cached_kernel(SPEC), cached_kernel(OTHER)])
    assert compilations == [SPEC, OTHER]
    assert len(messages) == 1
    assert "FA2CUPY_CACHE_DIR" in messages[0]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]  # nothing is damaged
    assert fa2cupy.clear_cache() == 0
    assert fa2cupy.info()["cached_kernels"] == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_in_a_read_only_folder_kernels_work_with_one_warning(compilations, isolated_cache):
    isolated_cache.mkdir()
    isolated_cache.chmod(0o500)
    messages = warnings_of(lambda: [cached_kernel(SPEC), cached_kernel(OTHER)])
    assert compilations == [SPEC, OTHER]
    assert len(messages) == 1


# ------------------------------------------------------------------------------------------------ processes and threads


def compile_when_all_are_ready(folder: str, barrier, results) -> None:
    os.environ["FA2CUPY_CACHE_DIR"] = folder
    render_kernel(SPEC)
    barrier.wait(TIMEOUT)
    results.put(cached_kernel(SPEC).cubin)


def test_processes_that_race_for_an_entry_all_get_it_and_leave_it_whole(isolated_cache, compilations):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(3), context.Queue()
    racers = [
        context.Process(target=compile_when_all_are_ready, args=(str(isolated_cache), barrier, results)) for _ in range(3)
    ]
    for racer in racers:
        racer.start()
    cubins = {results.get(timeout=TIMEOUT) for _ in racers}
    for racer in racers:
        racer.join(TIMEOUT)
    assert [racer.exitcode for racer in racers] == [0, 0, 0]
    assert len(entries(isolated_cache)) == 2
    assert cubins == {cached_kernel(SPEC).cubin}
    assert compilations == []  # the entry that they left is good


def test_threads_that_ask_for_one_kernel_compile_it_once(compilations):
    barrier = threading.Barrier(8)

    def request(_):
        barrier.wait(TIMEOUT)
        return cached_kernel(SPEC)

    with ThreadPoolExecutor(8) as pool:
        kernels = list(pool.map(request, range(8)))
    assert compilations == [SPEC]
    assert all(kernel is kernels[0] for kernel in kernels)


def test_threads_that_ask_for_different_kernels_do_not_wait_for_each_other(isolated_cache, monkeypatch):
    both_compile = threading.Barrier(2)

    def meeting(source: KernelSource):
        both_compile.wait(TIMEOUT)  # breaks if the other thread is kept out
        return compile_source(source)

    monkeypatch.setattr(cache, "compile_source", meeting)
    with ThreadPoolExecutor(2) as pool:
        symbols = [kernel.symbol for kernel in pool.map(cached_kernel, (SPEC, OTHER))]
    assert symbols == [SPEC.symbol, OTHER.symbol]


def test_a_failed_compilation_is_tried_again(isolated_cache, monkeypatch):
    def refusing(source):
        raise fa2cupy.KernelCompileError("not today")

    with monkeypatch.context() as context:
        context.setattr(cache, "compile_source", refusing)
        with pytest.raises(fa2cupy.KernelCompileError, match="not today"):
            cached_kernel(SPEC)
    assert cached_kernel(SPEC).symbol == SPEC.symbol


# ------------------------------------------------------------------------------------------------- clearing, and settings


def test_clearing_deletes_kernels_and_nothing_else(compilations, isolated_cache):
    cached_kernel(SPEC)
    cached_kernel(OTHER)
    others = ("tuning.json", "notes.txt", "mine.cubin", "no-kernel.json")
    for name in others:
        (isolated_cache / name).write_text("mine")
    (isolated_cache / "folder").mkdir()
    assert fa2cupy.info()["cached_kernels"] >= 2

    assert fa2cupy.clear_cache() == 2
    assert entries(isolated_cache) == sorted([*others, "folder"])
    cached_kernel(SPEC)
    assert compilations == [SPEC, OTHER, SPEC]  # memory is cleared, too


def test_clearing_removes_what_stopped_processes_left(isolated_cache):
    isolated_cache.mkdir()
    (isolated_cache / ".new-abcdefgh").write_bytes(b"half a cubin")
    assert fa2cupy.clear_cache() == 0
    assert entries(isolated_cache) == []


def test_clearing_a_cache_that_is_not_there_is_fine(isolated_cache):
    assert fa2cupy.clear_cache() == 0
    assert not isolated_cache.exists()


def test_cache_folder_is_the_variable_then_the_users_cache_folder_then_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("FA2CUPY_CACHE_DIR", str(tmp_path / "chosen"))
    assert cache_dir() == tmp_path / "chosen"
    monkeypatch.delenv("FA2CUPY_CACHE_DIR")
    assert cache_dir() == tmp_path / "xdg" / "fa2cupy"
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # empty is unset, says the XDG specification
    assert cache_dir() == tmp_path / "home" / ".cache" / "fa2cupy"


def test_a_relative_cache_folder_stays_where_it_was_when_the_process_moves(compilations, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FA2CUPY_CACHE_DIR", "relative")
    cached_kernel(SPEC)
    forget_memory()
    assert cached_kernel(SPEC).path.is_absolute()


def test_without_a_home_folder_there_is_a_cache_folder_all_the_same(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("FA2CUPY_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert cache_dir().is_absolute()
    assert tuning_file().is_absolute()


def test_dump_folder_gets_source_machine_code_and_log(compilations, monkeypatch, tmp_path):
    monkeypatch.setenv("FA2CUPY_DUMP_DIR", str(tmp_path / "dump"))
    kernel = cached_kernel(SPEC)
    stem = f"{SPEC.symbol}.{SPEC.arch}"
    assert entries(tmp_path / "dump") == [f"{stem}.cu", f"{stem}.cubin", f"{stem}.log"]
    assert (tmp_path / "dump" / f"{stem}.cu").read_text() == render_kernel(SPEC).text
    assert (tmp_path / "dump" / f"{stem}.cubin").read_bytes() == kernel.cubin
    assert "registers" in (tmp_path / "dump" / f"{stem}.log").read_text()


COMPILE_ONE = "import fa2cupy; fa2cupy.precompile(['sm_80'], dtypes=['float16'], head_dims=[32], causal=[False], methods=[])"


def test_the_log_says_what_is_compiled_when_asked_and_is_silent_otherwise(run_python, tmp_path):
    talking = run_python(COMPILE_ONE, FA2CUPY_LOG="info", FA2CUPY_CACHE_DIR=str(tmp_path / "first"))
    assert "fa2cupy: compiled forward" in talking.stderr
    assert "registers" in talking.stderr
    silent = run_python(COMPILE_ONE, FA2CUPY_CACHE_DIR=str(tmp_path / "second"))
    assert silent.stdout + silent.stderr == ""


def test_a_log_level_that_does_not_exist_is_a_remark_and_no_failure(run_python, tmp_path):
    result = run_python(COMPILE_ONE, FA2CUPY_LOG="loud", FA2CUPY_CACHE_DIR=str(tmp_path))
    assert "FA2CUPY_LOG" in result.stderr
    assert "loud" in result.stderr.lower()
