"""Files of compiled kernels: their format, and the limit on the size of a folder.

An entry is one file. Its first line has a checksum of the key and of the rest of the file, which is a line of JSON with
the compiler's report, and the cubin. The checksum therefore detects renamed entries as well as flipped bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import operator
import os
import re
import time
from pathlib import Path

from ..settings import cache_limit
from ..system.folders import UNFINISHED
from .compiler import CompiledKernel
from .spec import KernelSpec

__all__ = ["LOCK", "SUFFIX", "clear_folder", "decode", "encode", "kernel_sizes", "limit_folder"]

SUFFIX = ".kernel"
LOCK = ".lock-"
_MAGIC = b"fa2cupy-kernel "
_REPORTED = ("registers", "spill_bytes", "stack_bytes", "log", "seconds")
_values_of = operator.itemgetter(*_REPORTED)
_KERNEL = re.compile(rf"[0-9a-f]{{64}}(\.cubin|{re.escape(SUFFIX)})")
_REST_OF_OLDER = re.compile(r"[0-9a-f]{64}\.json")  # older versions kept the report in a separate file
_STALE_S = 3600.0
_SHARE = 16  # the folder is listed again after 1 / _SHARE of the limit has been written

_room: dict[Path, int] = {}


def encode(key: str, kernel: CompiledKernel) -> bytes:
    """The content of the file of a kernel."""
    report = {name: getattr(kernel, name) for name in ("symbol", *_REPORTED)}
    body = json.dumps(report).encode() + b"\n" + kernel.cubin
    return _header(key, body) + body


def decode(key: str, data: bytes, spec: KernelSpec) -> CompiledKernel:
    """The kernel in the content of a file, whose spec the key was made of.

    Raises
    ------
    ValueError
        The content is not what `encode` returned for the key.
    """
    length = len(_header(key, b""))
    header, body = data[:length], data[length:]
    if header != _header(key, body):
        raise ValueError("its checksum differs")
    report, _, cubin = body.partition(b"\n")
    return CompiledKernel(spec, cubin, *_values_of(json.loads(report)))


def _header(key: str, body: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(key.encode() + body).hexdigest().encode() + b"\n"


def kernel_sizes(folder: Path) -> list[int]:
    """The size in bytes of each kernel in a folder. The folder need not exist."""
    return [status.st_size for path, status in _files(folder) if _KERNEL.fullmatch(path.name)]


def clear_folder(folder: Path) -> int:
    """Deletes all kernels and all leftovers of stopped processes; returns the number of kernels."""
    _room.pop(folder, None)
    count = 0
    for path, _ in _files(folder):
        with contextlib.suppress(OSError):
            path.unlink()
            count += bool(_KERNEL.fullmatch(path.name))
    return count


def limit_folder(folder: Path, written: int) -> None:
    """Deletes the least recently used kernels if a folder exceeds the limit. Called after each write.

    The folder is listed at the first write of a process, and then after each sixteenth of the limit.
    """
    limit = cache_limit()
    if limit is None:
        return
    left = _room.get(folder, 0) - written
    _room[folder] = left if left > 0 else _evict(folder, limit)


def _evict(folder: Path, limit: int) -> int:
    """Deletes kernels beyond the limit and stale leftovers; returns the bytes to write before the next listing."""
    files = _files(folder)
    total = sum(status.st_size for _, status in files)
    kept = limit - limit // _SHARE if total > limit else limit
    oldest = time.time() - _STALE_S
    files.sort(key=lambda file: (file[0].suffix == SUFFIX, file[1].st_mtime))  # files of older versions go first
    for path, status in files:
        finished = not path.name.startswith((UNFINISHED, LOCK))
        if total > kept if finished else status.st_mtime < oldest:
            with contextlib.suppress(OSError):
                path.unlink()
                total -= status.st_size
    return min(limit - total, limit // _SHARE)


def _files(folder: Path) -> list[tuple[Path, os.stat_result]]:
    """The files that the cache has written to a folder, finished or not."""
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            if _KERNEL.fullmatch(name) or _REST_OF_OLDER.fullmatch(name) or name.startswith((UNFINISHED, LOCK)):
                with contextlib.suppress(OSError):  # another process may have deleted it
                    found.append((Path(entry.path), entry.stat(follow_symlinks=False)))
    return found
