"""The cache of compiled kernels: hits, misses, damaged entries, its size, and failures of the disk."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import logging
import multiprocessing
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.recorded_warnings import warnings_of

import fa2cupy
from fa2cupy import TileConfig
from fa2cupy.gpu import launch
from fa2cupy.jit import cache, entries
from fa2cupy.jit.cache import cached_kernel, entry_path
from fa2cupy.jit.compiler import CompiledKernel, compile_source, nvrtc_build, nvrtc_version
from fa2cupy.jit.entries import clear_folder
from fa2cupy.jit.source import KernelSource, render_kernel
from fa2cupy.jit.spec import KernelSpec
from fa2cupy.settings import cache_dir, tuning_file
from fa2cupy.system import folders

pytest.importorskip("cupy", reason="kernels are compiled by the NVRTC that CuPy loads", exc_type=ImportError)

# The kernel that compiles fastest, for two head dimensions.
SPEC = KernelSpec("delta", None, "sm_80", "float16", 64, False, TileConfig(16, 1, 4))
OTHER = dataclasses.replace(SPEC, head_dim=32)
TIMEOUT = 120  # for threads and processes that would otherwise wait for ever


@pytest.fixture
def compilations(isolated_cache, monkeypatch):
    """Provides the list of specs that NVRTC has been called for, with an empty cache."""
    specs = []

    def counting(source: KernelSource):
        specs.append(source.spec)
        return compile_source(source)

    monkeypatch.setattr(cache, "compile_source", counting)
    return specs


def forget_memory() -> None:
    """Forgets the kernels in memory, as in a new process: they are on disk only."""
    cache._kernels.clear()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --------------------------------------------------------------------------------------------------------- hit and miss


def test_first_request_compiles_and_leaves_one_entry(compilations, isolated_cache):
    kernel = cached_kernel(SPEC)
    assert compilations == [SPEC]
    path = entry_path(SPEC)
    assert names(isolated_cache) == [path.name]
    assert path.read_bytes().endswith(b"\n" + kernel.cubin)
    assert kernel.symbol == SPEC.symbol


def test_second_request_is_answered_from_memory(compilations):
    kernel = cached_kernel(SPEC)
    entry_path(SPEC).unlink()  # a look at the disk would not find it
    assert cached_kernel(SPEC) is kernel
    assert compilations == [SPEC]


def test_a_new_process_finds_the_whole_kernel_on_disk(compilations):
    compiled = cached_kernel(SPEC)
    forget_memory()
    assert cached_kernel(SPEC) == compiled
    assert compilations == [SPEC]


def test_other_kernels_are_other_entries(compilations, isolated_cache):
    assert cached_kernel(SPEC).cubin != cached_kernel(OTHER).cubin
    assert compilations == [SPEC, OTHER]
    assert len(names(isolated_cache)) == 2


def test_another_cache_folder_is_another_cache(compilations, monkeypatch, tmp_path):
    cached_kernel(SPEC)
    monkeypatch.setenv("FA2CUPY_CACHE_DIR", str(tmp_path / "second"))
    cached_kernel(SPEC)
    assert compilations == [SPEC, SPEC]


@pytest.mark.parametrize("changed", ("text", "options", "architecture", "NVRTC", "schema"))
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
    elif changed == "NVRTC":  # by its patch release only
        monkeypatch.setattr(cache, "nvrtc_build", lambda: "another")
    else:
        monkeypatch.setattr(cache, "_SCHEMA", "another")
    cached_kernel(spec)
    assert compilations == [SPEC, spec]


def test_the_build_of_nvrtc_tells_patch_releases_apart():
    build = nvrtc_build()
    assert re.search(rf"V{'.'.join(map(str, nvrtc_version()))}\.\d+\b", build)
    nvrtc_build.cache_clear()
    assert nvrtc_build() == build


def test_what_was_verified_is_what_the_driver_gets(fake_compiler, monkeypatch):
    import cupy

    loaded = []

    class Module:
        load = staticmethod(loaded.append)
        get_function = staticmethod(lambda symbol: f"function {symbol}")

    monkeypatch.setattr(cupy.cuda.function, "Module", Module)
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: 0)
    launch._load_kernel.cache_clear()
    cached_kernel(SPEC)
    forget_memory()
    verified = cached_kernel(SPEC).cubin
    clear_folder(entry_path(SPEC).parent)  # as another process could
    assert launch.load_kernel(SPEC) == f"function {SPEC.symbol}"
    assert loaded == [verified]
    launch._load_kernel.cache_clear()


def test_a_lookup_does_not_hash_the_machine_code():
    class Bytes(bytes):
        def __hash__(self):
            raise AssertionError("hashed")

    hash(CompiledKernel(SPEC, Bytes(b"code"), 24, 0, 8, "log", 0.5))


# ------------------------------------------------------------------------------------------------------ damaged entries


def with_report(key: str, data: bytes, report: bytes) -> bytes:
    """Returns the entry with another report and the right checksum."""
    body = report + b"\n" + data.split(b"\n", 2)[2]
    digest = hashlib.sha256(key.encode() + body).hexdigest()
    return f"fa2cupy-kernel {digest}\n".encode() + body


def report_of(data: bytes) -> bytes:
    return data.split(b"\n", 2)[1]


DAMAGES = {
    "nothing": lambda key, data: b"",
    "no text": lambda key, data: b"\xff\xfe\x00",
    "half a header": lambda key, data: data[:40],
    "header alone": lambda key, data: data[: data.index(b"\n") + 1],
    "truncated report": lambda key, data: data[:120],
    "truncated machine code": lambda key, data: data[:-100],
    "changed machine code": lambda key, data: data[:-1] + b"x",
    "something after it": lambda key, data: data + b"\0",
    "report that is no text": lambda key, data: with_report(key, data, b"\xff\xfe"),
    "report that is a list": lambda key, data: with_report(key, data, b"[1, 2]"),
    "report that is a number": lambda key, data: with_report(key, data, b"7"),
    "report without registers": lambda key, data: with_report(
        key, data, report_of(data).replace(b'"registers"', b'"register"')
    ),
    "deeply nested report": lambda key, data: with_report(key, data, b"[" * 100_000),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_rebuilt_with_one_log_line(damage, fake_compiler, caplog):
    good = cached_kernel(SPEC)
    path = entry_path(SPEC)
    whole = path.read_bytes()
    assert with_report(path.stem, whole, report_of(whole)) == whole
    path.write_bytes(DAMAGES[damage](path.stem, whole))
    forget_memory()
    with caplog.at_level(logging.WARNING, logger="fa2cupy"):
        rebuilt = cached_kernel(SPEC)
    assert rebuilt == good
    assert fake_compiler == [SPEC, SPEC]
    (record,) = caplog.records
    assert path.stem[:12] in record.getMessage()

    caplog.clear()
    forget_memory()
    assert cached_kernel(SPEC) == good  # the entry is whole again
    assert fake_compiler == [SPEC, SPEC]
    assert not caplog.records


def test_every_bit_of_an_entry_is_under_the_checksum():
    key = "0" * 64
    kernel = CompiledKernel(SPEC, b"\x7fELF \n code", 24, 0, 8, "line\nline", 0.5)
    data = entries.encode(key, kernel)
    assert entries.decode(key, data, SPEC) == kernel
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="checksum"):
            entries.decode(key, bytes(flipped), SPEC)


def test_an_entry_under_the_name_of_another_is_damaged(fake_compiler, caplog):
    cached_kernel(SPEC)
    entry_path(SPEC).rename(entry_path(OTHER))
    assert cached_kernel(OTHER).symbol == OTHER.symbol
    assert fake_compiler == [SPEC, OTHER]
    assert "checksum" in caplog.text


def test_an_entry_that_cannot_be_read_is_replaced_without_a_word(fake_compiler, caplog, monkeypatch):
    cached_kernel(SPEC)
    entry_path(SPEC).chmod(0)
    real = os.open

    def open_as_a_user(path, flags, *mode):  # root would read it
        if not flags & os.O_CREAT and not os.stat(path).st_mode & 0o400:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, flags, *mode)

    monkeypatch.setattr(folders.os, "open", open_as_a_user)
    forget_memory()
    cached_kernel(SPEC)
    forget_memory()
    cached_kernel(SPEC)
    assert fake_compiler == [SPEC, SPEC]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# --------------------------------------------------------------------------------------- folders that cannot be written


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

    monkeypatch.setattr(folders.os, "fdopen", FullFile)


def create_nothing(monkeypatch):
    real = os.open

    def open_only(path, flags, *mode):
        return (full_disk if flags & os.O_CREAT else real)(path, flags, *mode)

    monkeypatch.setattr(folders.os, "open", open_only)


UNWRITABLE = {
    "full disk when creating": create_nothing,
    "full disk when writing": write_nothing,
    "full disk when renaming": lambda monkeypatch: monkeypatch.setattr(folders.os, "replace", full_disk),
}


@pytest.mark.parametrize("failure", UNWRITABLE)
def test_on_a_full_disk_kernels_work_with_one_warning_and_nothing_is_left(
    failure, compilations, isolated_cache, monkeypatch
):
    UNWRITABLE[failure](monkeypatch)
    messages = warnings_of(lambda: [cached_kernel(SPEC), cached_kernel(OTHER), cached_kernel(SPEC)])
    assert compilations == [SPEC, OTHER]
    # A compilation that another test interrupted may still run, and fail on this disk, too, in another folder.
    (message,) = (message for message in messages if str(isolated_cache) in message)
    for part in ("No space left on device", "FA2CUPY_CACHE_DIR"):
        assert part in message
    assert names(isolated_cache) == []


def test_where_no_folder_can_be_made_kernels_work_with_one_warning(compilations, tmp_path, monkeypatch, caplog):
    # Nobody can write below a regular file, not even root.
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
        context.Process(target=compile_when_all_are_ready, args=(str(isolated_cache), barrier, results))
        for _ in range(3)
    ]
    for racer in racers:
        racer.start()
    cubins = {results.get(timeout=TIMEOUT) for _ in racers}
    for racer in racers:
        racer.join(TIMEOUT)
    assert [racer.exitcode for racer in racers] == [0, 0, 0]
    assert len(names(isolated_cache)) == 1
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


# --------------------------------------------------------------------------------------------------- size of the folder


def spec_number(number: int) -> KernelSpec:
    return dataclasses.replace(SPEC, head_dim=8 * number)


@pytest.fixture
def megabytes(fake_compiler, monkeypatch):
    """Sets a limit of 4 MiB and makes each kernel take about 1 MiB."""
    monkeypatch.setenv("FA2CUPY_CACHE_LIMIT", "4")
    compile_small = cache.compile_source
    monkeypatch.setattr(
        cache, "compile_source", lambda source: dataclasses.replace(compile_small(source), cubin=bytes(1024**2 - 1024))
    )


def used_at(path: Path, seconds_ago: float) -> None:
    now = time.time() - seconds_ago
    os.utime(path, (now, now))


def test_kernels_that_were_used_longest_ago_make_room(megabytes, isolated_cache):
    for number in range(1, 5):
        cached_kernel(spec_number(number))
        used_at(entry_path(spec_number(number)), 1000 - number)
    forget_memory()
    cached_kernel(spec_number(1))  # used again
    cached_kernel(spec_number(5))
    left = [number for number in range(1, 6) if entry_path(spec_number(number)).exists()]
    assert left == [1, 4, 5]  # down to fifteen sixteenths of the limit
    assert fa2cupy.info()["cached_bytes"] <= fa2cupy.info()["cache_limit"] == 4 * 1024**2


def test_a_folder_that_is_just_full_keeps_all(monkeypatch, tmp_path):
    monkeypatch.setattr(entries, "cache_limit", lambda: 300)
    files = [tmp_path / f"{name * 64}{entries.SUFFIX}" for name in "abcd"]
    for number, file in enumerate(files, start=1):
        file.write_bytes(bytes(100))
        entries.limit_folder(tmp_path, 100)
        assert sum(file.exists() for file in files) == (number if number < 4 else 2)  # then down to fifteen sixteenths


def test_a_nearly_full_folder_never_exceeds_its_limit(monkeypatch, tmp_path):
    """Other processes have filled the folder. A write has up to twice the bytes written between two listings."""
    limit, rng = 1600, np.random.default_rng(1)
    monkeypatch.setattr(entries, "cache_limit", lambda: limit)

    def write(nbytes: int) -> None:
        (tmp_path / f"{rng.bytes(32).hex()}{entries.SUFFIX}").write_bytes(bytes(nbytes))

    def total() -> int:
        return sum(file.stat().st_size for file in tmp_path.iterdir())

    write(limit - 50)
    for _ in range(100):
        nbytes = int(rng.integers(1, 200))
        write(nbytes)
        entries.limit_folder(tmp_path, nbytes)
        assert total() <= limit


def test_what_other_processes_write_is_noticed_after_a_sixteenth_of_the_limit(monkeypatch, tmp_path):
    monkeypatch.setattr(entries, "cache_limit", lambda: 1600)
    entries.limit_folder(tmp_path, 0)
    (tmp_path / f"{'a' * 64}{entries.SUFFIX}").write_bytes(bytes(2000))
    for number in range(10):
        (tmp_path / f"{number:064x}{entries.SUFFIX}").write_bytes(bytes(10))
        entries.limit_folder(tmp_path, 10)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) == 100


def test_older_versions_and_what_stopped_processes_left_go_first(megabytes, isolated_cache):
    isolated_cache.mkdir()
    older = isolated_cache / f"{'a' * 64}.cubin"
    older.write_bytes(bytes(1024**2))
    names = (".new-stale", ".new-fresh", ".lock-held", "mine.bin")
    stale, fresh, held, mine = (isolated_cache / name for name in names)
    for path in (stale, fresh, held, mine):
        path.write_bytes(b"something")
    for path in (stale, mine):
        used_at(path, 7200)
    for number in range(1, 5):
        cached_kernel(spec_number(number))
        used_at(entry_path(spec_number(number)), 1000 - number)
    assert not older.exists() and not stale.exists()
    assert fresh.exists() and held.exists() and mine.exists()
    assert all(entry_path(spec_number(number)).exists() for number in (2, 3, 4))


def test_the_folder_is_not_looked_through_at_each_write(fake_compiler, monkeypatch):
    looks = []
    scandir = os.scandir
    monkeypatch.setattr(entries.os, "scandir", lambda folder: (looks.append(folder), scandir(folder))[1])
    for number in range(1, 9):
        cached_kernel(spec_number(number))
    assert len(looks) == 1


@pytest.mark.parametrize(("limit", "kept"), (("0", 6), ("4", 4), ("x", 6), ("-1", 6)))
def test_no_limit_is_zero_and_a_wrong_one_is_one_warning(limit, kept, megabytes, monkeypatch):
    monkeypatch.setenv("FA2CUPY_CACHE_LIMIT", limit)
    specs = [spec_number(number) for number in range(1, 7)]
    messages = warnings_of(lambda: [cached_kernel(spec) for spec in specs])
    assert fa2cupy.info()["cached_kernels"] <= kept
    assert kept == 4 or fa2cupy.info()["cached_kernels"] == kept
    assert len(messages) == (limit in ("x", "-1"))
    assert all("FA2CUPY_CACHE_LIMIT" in message and limit in message for message in messages)


# ----------------------------------------------------------------------------------------------- clearing, and settings


def test_clearing_deletes_kernels_and_nothing_else(compilations, isolated_cache):
    cached_kernel(SPEC)
    cached_kernel(OTHER)
    others = ("tuning.json", "notes.txt", "mine.cubin", "no-kernel.json")
    for name in others:
        (isolated_cache / name).write_text("mine")
    (isolated_cache / "folder").mkdir()
    assert fa2cupy.info()["cached_kernels"] >= 2

    assert fa2cupy.clear_cache() == 2
    assert names(isolated_cache) == sorted([*others, "folder"])
    cached_kernel(SPEC)
    assert compilations == [SPEC, OTHER, SPEC]  # memory is cleared, too


def test_clearing_removes_what_stopped_processes_and_older_versions_left(isolated_cache):
    isolated_cache.mkdir()
    older = "0123456789abcdef" * 4
    for name in (".new-abcdefgh", f".lock-{older}", f"{older}.cubin", f"{older}.json"):
        (isolated_cache / name).write_bytes(b"half a cubin")
    assert fa2cupy.clear_cache() == 1
    assert names(isolated_cache) == []


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
    for ignored in ("", "relative", "./relative"):  # as the XDG specification says
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        monkeypatch.setenv("XDG_CONFIG_HOME", ignored)
        assert cache_dir() == tmp_path / "home" / ".cache" / "fa2cupy"
        assert tuning_file() == tmp_path / "home" / ".config" / "fa2cupy" / "tuning.json"


def test_without_a_home_folder_there_is_a_cache_folder_of_this_user_all_the_same(monkeypatch, tmp_path):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("FA2CUPY_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert cache_dir() == tmp_path / f"fa2cupy-{os.getuid()}" / "fa2cupy"
    assert tuning_file() == cache_dir() / "tuning.json"
    monkeypatch.delenv("TMPDIR")
    assert cache_dir() == Path(f"/tmp/fa2cupy-{os.getuid()}/fa2cupy")


def test_dump_folder_gets_source_machine_code_and_log(compilations, monkeypatch, tmp_path):
    monkeypatch.setenv("FA2CUPY_DUMP_DIR", str(tmp_path / "dump"))
    kernel = cached_kernel(SPEC)
    stem = f"{SPEC.symbol}.{SPEC.arch}"
    assert names(tmp_path / "dump") == [f"{stem}.cu", f"{stem}.cubin", f"{stem}.log"]
    assert (tmp_path / "dump" / f"{stem}.cu").read_text() == render_kernel(SPEC).text
    assert (tmp_path / "dump" / f"{stem}.cubin").read_bytes() == kernel.cubin
    assert "registers" in (tmp_path / "dump" / f"{stem}.log").read_text()


@pytest.mark.parametrize("obstacle", ("a file", "a full disk"))
def test_a_dump_folder_that_takes_nothing_is_one_warning_and_no_failure(obstacle, compilations, monkeypatch, tmp_path):
    folder = tmp_path / "dump"
    if obstacle == "a file":
        folder.touch()
    else:
        folder.mkdir()
        real = os.replace
        monkeypatch.setattr(folders.os, "replace", lambda a, b: full_disk() if Path(b).parent == folder else real(a, b))
    monkeypatch.setenv("FA2CUPY_DUMP_DIR", str(folder))
    (message,) = warnings_of(lambda: [cached_kernel(SPEC), cached_kernel(OTHER)])
    assert compilations == [SPEC, OTHER]
    for part in ("FA2CUPY_DUMP_DIR", str(folder), "writable"):
        assert part in message


def test_a_dump_does_not_follow_a_link_that_somebody_has_put_there(compilations, monkeypatch, tmp_path):
    folder, precious = tmp_path / "dump", tmp_path / "precious"
    folder.mkdir()
    precious.write_text("mine")
    (folder / f"{SPEC.symbol}.{SPEC.arch}.log").symlink_to(precious)
    monkeypatch.setenv("FA2CUPY_DUMP_DIR", str(folder))
    cached_kernel(SPEC)
    assert precious.read_text() == "mine"


COMPILE_ONE = (
    "from fa2cupy import TileConfig; from fa2cupy.jit.cache import cached_kernel; "
    "from fa2cupy.jit.spec import KernelSpec; "
    "cached_kernel(KernelSpec('delta', None, 'sm_80', 'float16', 64, False, TileConfig(16, 1, 4)))"
)


def test_the_log_says_what_is_compiled_when_asked_and_is_silent_otherwise(run_python, tmp_path):
    talking = run_python(COMPILE_ONE, FA2CUPY_LOG="info", FA2CUPY_CACHE_DIR=str(tmp_path / "first"))
    assert "fa2cupy: compiled delta" in talking.stderr
    assert "registers" in talking.stderr
    silent = run_python(COMPILE_ONE, FA2CUPY_CACHE_DIR=str(tmp_path / "second"))
    assert silent.stdout + silent.stderr == ""


def test_a_log_level_that_does_not_exist_is_a_remark_and_no_failure(run_python, tmp_path):
    result = run_python(COMPILE_ONE, FA2CUPY_LOG="loud", FA2CUPY_CACHE_DIR=str(tmp_path))
    assert "FA2CUPY_LOG" in result.stderr
    assert "loud" in result.stderr.lower()
