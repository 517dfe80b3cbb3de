"""Compiled kernels on disk and in memory.

The cache looks for a kernel in memory, in the user's own folder, and in the folders that others fill. A kernel that is
in none of them is compiled and stored in the user's own folder. Everything that is read from disk is checked:
``system/folders.py`` checks who can write to it, ``entries.py`` its checksum. The driver loads the bytes that were
checked. Entries are written under a temporary name and renamed, so that processes may race. A lock file per kernel
keeps all processes but one from compiling it; no result depends on the lock.

A call waits for all its kernels at once. Meanwhile others can be compiled that a later call will need, in threads that
nothing waits for: `attention` starts those of its backward.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from ..families.operations import OPERATIONS
from ..settings import cache_dir, cache_limit, cache_path
from ..system.folders import UntrustedError, read_file, replace_file, trusted_folder, warn_once
from ..system.locks import file_lock, new_lock
from .compiler import CompiledKernel, compilations, compile_options, compile_source, nvrtc_build
from .costs import check_cost, warn_of_cost
from .entries import LOCK, SUFFIX, clear_folder, decode, encode, kernel_sizes, limit_folder
from .source import KernelSource, render_kernel
from .spec import KernelSpec

__all__ = [
    "cache_state",
    "cached_kernel",
    "cached_kernels",
    "clear_cache",
    "entry_path",
    "kernels_in_memory",
    "meanwhile",
]

_log = logging.getLogger("fa2cupy")
_SCHEMA = 3
_LONGEST_COMPILATION_S = 60.0
_locks: dict[KernelSpec, threading.Lock] = {}
_kernels: dict[tuple[KernelSpec, Path], CompiledKernel] = {}


class _Meanwhile:
    """What to compile while a call waits for its kernels.

    All threads share it, because an attribute of `threading.local` takes several times as long to set. The wait of
    another thread's call may therefore be used, or none.

    Attributes
    ----------
    specs : callable or None
        Gives the kernels. It is called only if a call waits; where it fails, nothing is compiled ahead.
    """

    specs: Callable[[], Sequence[KernelSpec]] | None = None


meanwhile = _Meanwhile()


def cached_kernel(spec: KernelSpec) -> CompiledKernel:
    """The compiled kernel: from memory, else from disk, else compiled and stored.

    Threads and processes that need the same kernel at the same time wait for one compilation; different kernels are
    compiled in parallel.
    """
    kernel = _kept(spec)
    warn_of_cost(spec, kernel)
    return kernel


def _kept(spec: KernelSpec) -> CompiledKernel:
    directory = cache_dir()
    with _locks.setdefault(spec, new_lock()):
        kernel = _kernels.get((spec, directory)) or _from_disk_or_compiler(spec, directory)
        _kernels[spec, directory] = kernel
        return kernel


def cached_kernels(
    specs: Sequence[KernelSpec], jobs: int | None = None, done: Callable[[], object] | None = None
) -> list[CompiledKernel]:
    """Several kernels: up to `jobs` (default: all) are read or compiled at a time, and `done` is called after each."""
    for spec in specs:
        check_cost(spec)
    missing = _missing(specs)
    if done is None and not missing:
        return [cached_kernel(spec) for spec in specs]  # no threads
    level = logging.INFO if jobs is None else logging.DEBUG  # a call's, or as many as `precompile` has
    _log.log(level, "waiting for %d kernel%s: %s", len(missing), "s"[len(missing) == 1 :], ", ".join(map(str, missing)))
    start, free = time.perf_counter(), _free_cpus() - sum(map(_is_long, missing))
    pool = ThreadPoolExecutor(jobs or len(specs))
    try:
        kernels = [pool.submit(cached_kernel, spec) for spec in specs]
        if free > 0:
            _compile_ahead(free)
        for kernel in as_completed(kernels):
            kernel.result()
            if done is not None:
                done()
    finally:  # after an error or Ctrl-C, cancels pending kernels and does not wait for running ones
        pool.shutdown(wait=False, cancel_futures=True)
    _log.log(level, "waited %.2f s", time.perf_counter() - start)
    if free <= 0:
        _compile_ahead(max(_free_cpus(), 1))
    return [kernel.result() for kernel in kernels]


def _missing(specs: Sequence[KernelSpec]) -> list[KernelSpec]:
    """The kernels that are not in memory."""
    directory = cache_dir()
    return [spec for spec in specs if (spec, directory) not in _kernels]


def _is_long(spec: KernelSpec) -> bool:
    """True if the kernel takes seconds to compile, and not a tenth of one."""
    return OPERATIONS[spec.operation].is_tiled


def _free_cpus() -> int:
    """The CPUs of this process without those that compile, and without one for all else, which a call must not miss."""
    return _cpus() - compilations() - 1


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _compile_ahead(jobs: int) -> None:
    """Starts threads that find or compile what `meanwhile` asks for, `jobs` kernels at a time."""
    specs = meanwhile.specs
    if specs is None:
        return
    try:
        missing = sorted(_missing(specs()), key=_is_long, reverse=True)
        left = iter(missing)
        for _ in range(min(jobs, len(missing))):
            # A daemon, which the end of the process does not wait for; an executor's threads are none.
            threading.Thread(target=_compile_left, args=(left,), name="fa2cupy-ahead", daemon=True).start()
    except Exception as error:  # the call that needs the kernels will raise it
        _log.debug("nothing is compiled ahead: %s", error)


def _compile_left(left: Iterator[KernelSpec]) -> None:
    for spec in left:
        try:
            _kept(spec)
        except Exception as error:  # the call that needs the kernel will compile it again, and raise
            _log.debug("%s was not compiled ahead: %s", spec, error)


def kernels_in_memory() -> dict[KernelSpec, CompiledKernel]:
    """The kernels that this process has used since it began, or since the cache was cleared."""
    return {spec: kernel for (spec, _), kernel in list(_kernels.items())}  # other threads add to them


def _from_disk_or_compiler(spec: KernelSpec, directory: Path) -> CompiledKernel:
    check_cost(spec)
    source = render_kernel(spec)
    key = _key(source)
    kernel = _find(directory, key, spec)
    if kernel is not None:
        return kernel
    folder = _own_folder(directory, create=True)
    with _one_process(folder, key):
        kernel = _read(folder, key, spec, log_level=logging.DEBUG)  # another process may have stored it since
        if kernel is None:
            with _interrupts_deferred():
                kernel = compile_source(source)
                _write(folder, key, kernel)
                _kernels[spec, directory] = kernel
    return kernel


def entry_path(spec: KernelSpec) -> Path:
    """The path of a kernel in the user's own folder. The file need not exist."""
    return cache_dir() / f"{_key(render_kernel(spec))}{SUFFIX}"


def clear_cache() -> int:
    """Deletes all compiled kernels from disk and memory.

    Kernels that calls of this process have used stay loaded. Folders in ``FA2CUPY_CACHE_PATH`` stay as they are.

    Returns
    -------
    int
        Number of kernels deleted from disk.
    """
    _kernels.clear()
    folder = _own_folder(cache_dir())
    return clear_folder(folder) if folder else 0


def cache_state() -> dict[str, object]:
    """Folders, numbers and sizes of compiled kernels, for a bug report."""
    sizes, refused = _state(cache_dir())
    shared = {str(folder): _state(folder, shared=True) for folder in cache_path()}
    return {
        "cache_dir": str(cache_dir()),
        "cache_refused": refused,
        "cached_kernels": len(sizes),
        "cached_bytes": sum(sizes),
        "cache_limit": cache_limit(),
        "cache_path": {folder: refused or f"{len(sizes)} kernels" for folder, (sizes, refused) in shared.items()},
    }


def _state(directory: Path, *, shared: bool = False) -> tuple[list[int], str | None]:
    """The sizes of a folder's kernels, and the reason why the folder is not used, or None."""
    try:
        folder = trusted_folder(directory, shared=shared)
    except OSError as error:
        return [], str(error)
    return (kernel_sizes(folder) if folder else []), None


def _key(source: KernelSource) -> str:
    parts = (_SCHEMA, nvrtc_build(), compile_options(source.spec.arch), source.text)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _find(directory: Path, key: str, spec: KernelSpec) -> CompiledKernel | None:
    kernel = _read(_own_folder(directory), key, spec)
    for shared in cache_path():
        kernel = kernel or _read(_shared_folder(shared), key, spec, shared=True)
    return kernel


def _own_folder(directory: Path, *, create: bool = False) -> Path | None:
    try:
        return trusted_folder(directory, create=create)
    except UntrustedError as error:
        instead = (
            "set FA2CUPY_CACHE_DIR to a folder that only you can write to; folders that others fill are for "
            "FA2CUPY_CACHE_PATH"
        )
        what = f"compiled kernels are neither read from {directory} nor stored there, because {error.advice(instead)}"
        warn_once(directory, what)
    except OSError as error:
        if create:
            _warn_unwritable(directory, error)
    return None


def _shared_folder(directory: Path) -> Path | None:
    try:
        return trusted_folder(directory, shared=True)
    except UntrustedError as error:
        advice = error.advice("name another folder")
        what = f"FA2CUPY_CACHE_PATH: compiled kernels are not read from {directory}, because {advice}"
        warn_once(("FA2CUPY_CACHE_PATH", directory), what)
    except OSError as error:
        _log.info("FA2CUPY_CACHE_PATH: %s cannot be read: %s", directory, error)
    return None


def _read(
    folder: Path | None, key: str, spec: KernelSpec, *, shared: bool = False, log_level: int = logging.WARNING
) -> CompiledKernel | None:
    if folder is None:
        return None
    path = folder / f"{key}{SUFFIX}"
    try:
        kernel = decode(key, read_file(path, shared=shared), spec)
    except UntrustedError as error:
        _log.log(log_level, "cache entry %s in %s is not used: %s", key[:12], folder, error)
        return None
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        _log.log(log_level, "cache entry %s in %s is damaged (%s); it is compiled anew", key[:12], folder, error)
        return None
    if not shared:
        with contextlib.suppress(OSError):
            os.utime(path)  # `limit_folder` deletes the least recently used kernels
    return kernel


def _write(folder: Path | None, key: str, kernel: CompiledKernel) -> None:
    if folder is None:
        return
    data = encode(key, kernel)
    try:
        replace_file(folder / f"{key}{SUFFIX}", data)
    except OSError as error:
        _warn_unwritable(folder, error)
    else:
        limit_folder(folder, len(data))


def _warn_unwritable(directory: Path, error: OSError) -> None:
    warn_once(
        directory,
        f"compiled kernels cannot be stored in {directory} ({error.strerror or error}), so that every process "
        "compiles them again; set FA2CUPY_CACHE_DIR to a folder that is writable and has room",
    )


@contextlib.contextmanager
def _one_process(folder: Path | None, key: str) -> Iterator[None]:
    """Waits while another process compiles the kernel, up to a time limit."""
    with contextlib.ExitStack() as stack:
        if folder is not None:
            try:
                stack.enter_context(file_lock(folder / f"{LOCK}{key}", _LONGEST_COMPILATION_S, remove=True))
            except TimeoutError:
                _log.info("another process has been compiling %s for long; it is compiled here, too", key[:12])
        yield


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Defers Ctrl-C to the end of the body: NVRTC does not stop for it, and an interrupt would only lose its result."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupts = []
    signal.signal(signal.SIGINT, lambda *_: interrupts.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupts:
            raise KeyboardInterrupt
