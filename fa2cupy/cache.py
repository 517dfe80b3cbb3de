"""Compiled kernels on disk and in memory.

An entry is two files named by the key: ``<key>.cubin``, which the driver loads as it is, and ``<key>.json`` with its
checksum and the compiler's report, written last. Both are written under another name and renamed, so that processes may
race: the loser overwrites an entry with the same bytes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import tempfile
import threading
import warnings
from pathlib import Path

from .compiler import CompiledKernel, compile_options, compile_source, nvrtc_version
from .settings import cache_dir
from .source import KernelSource, render_kernel
from .spec import KernelSpec

__all__ = ["cached_kernel", "clear_cache", "entry_path"]

_log = logging.getLogger("fa2cupy")
_SCHEMA = 2
_UNFINISHED = ".new-"  # what stays of a process that was stopped while it wrote
_locks: dict[KernelSpec, threading.Lock] = {}


def cached_kernel(spec: KernelSpec) -> CompiledKernel:
    """The compiled kernel: from memory, else from disk, else compiled and stored.

    Threads that ask for the same kernel at once wait for one compilation; different kernels are compiled side by side.
    """
    with _locks.setdefault(spec, threading.Lock()):
        return _cached_kernel(spec, cache_dir())


@functools.lru_cache(maxsize=None)
def _cached_kernel(spec: KernelSpec, directory: Path) -> CompiledKernel:
    source = render_kernel(spec)
    key = _key(source)
    kernel = _read(directory, key)
    if kernel is None:
        kernel = compile_source(source)
        _write(directory, key, kernel)
    return kernel


def entry_path(spec: KernelSpec) -> Path:
    """The cubin file of a kernel, whether it exists or not."""
    return cache_dir() / f"{_key(render_kernel(spec))}.cubin"


def clear_cache() -> int:
    """Deletes all compiled kernels from disk and memory.

    Kernels that calls of this process have used stay loaded.

    Returns
    -------
    int
        Number of kernels deleted from disk.
    """
    _cached_kernel.cache_clear()
    count = 0
    entries = [path for suffix in ("cubin", "json") for path in cache_dir().glob(f"*.{suffix}") if len(path.stem) == 64]
    for path in [*entries, *cache_dir().glob(f"{_UNFINISHED}*")]:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            count += path.suffix == ".cubin"
    return count


def _key(source: KernelSource) -> str:
    parts = (_SCHEMA, nvrtc_version(), compile_options(source.spec.arch), source.text)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _read(directory: Path, key: str) -> CompiledKernel | None:
    try:
        report = json.loads((directory / f"{key}.json").read_text(encoding="utf-8"))
        cubin = (directory / f"{key}.cubin").read_bytes()
        if hashlib.sha256(cubin).hexdigest() != report.pop("sha256"):
            raise ValueError("checksum differs")
        return CompiledKernel(cubin=cubin, path=directory / f"{key}.cubin", **report)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        _log.warning("cache entry %s in %s is damaged (%s); it is compiled anew", key[:12], directory, error)
        return None


def _write(directory: Path, key: str, kernel: CompiledKernel) -> None:
    report = {
        "sha256": hashlib.sha256(kernel.cubin).hexdigest(),
        "symbol": kernel.symbol,
        "registers": kernel.registers,
        "spill_bytes": kernel.spill_bytes,
        "stack_bytes": kernel.stack_bytes,
        "log": kernel.log,
        "seconds": kernel.seconds,
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _replace(directory / f"{key}.cubin", kernel.cubin)
        _replace(directory / f"{key}.json", json.dumps(report).encode())
    except OSError as error:
        _warn_unwritable(directory, error)


def _replace(path: Path, data: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=_UNFINISHED)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


_warned_about: set[Path] = set()


def _warn_unwritable(directory: Path, error: OSError) -> None:
    if directory not in _warned_about:
        _warned_about.add(directory)
        warnings.warn(
            f"compiled kernels cannot be stored in {directory} ({error.strerror or error}), so that every process "
            "compiles them again; set FA2CUPY_CACHE_DIR to a folder that is writable and has room",
            stacklevel=2,
        )
