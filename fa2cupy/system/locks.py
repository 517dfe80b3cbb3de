"""Locks between threads, which a fork must not leave held for ever, and between processes."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

__all__ = ["ForkGate", "file_lock", "new_lock"]

_POLL_S = 0.05
_LONGEST_FORK_S = 60.0
_BUSY = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)

_thread_locks: weakref.WeakSet = weakref.WeakSet()
_open_lock_files: set[int] = set()


def new_lock() -> threading.Lock:
    """A lock that is free in a forked child, where the thread that held it does not exist."""
    lock = threading.Lock()
    _thread_locks.add(lock)
    return lock


class ForkGate:
    """A section that a fork waits for: any number of threads may be in it, but none while the process forks.

    NVRTC has locks of its own. A child that inherits one that is held hangs in its first compilation, and nobody can
    reset it from outside.
    """

    def __init__(self) -> None:
        self._reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._close, after_in_parent=self._open, after_in_child=self._reset)

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._forks)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def _reset(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._inside = self._forks = 0

    def _close(self) -> None:
        self._changed.acquire()
        self._forks += 1
        # The limit is for a fork from inside the section, by a signal handler.
        self._changed.wait_for(lambda: not self._inside, _LONGEST_FORK_S)

    def _open(self) -> None:
        self._forks -= 1
        self._changed.notify_all()
        self._changed.release()


@contextlib.contextmanager
def file_lock(path: Path, timeout_s: float, *, remove: bool = False) -> Iterator[None]:
    """Keeps other processes out of the body; the system releases the lock of a process that dies.

    Where files cannot be locked (a read-only folder, some network file systems) the body runs all the same.

    Parameters
    ----------
    path : pathlib.Path
        The file that is locked; created if need be.
    timeout_s : float
    remove : bool, optional
        Deletes the file at the end. A process that waited for the deleted file may then run beside one that has created
        it anew: only for locks that spare work.

    Raises
    ------
    TimeoutError
        Another process holds the lock for longer than that.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError:
        yield
        return
    _open_lock_files.add(descriptor)
    try:
        _wait_for(descriptor, time.monotonic() + timeout_s)
        try:
            yield
        finally:
            if remove:
                with contextlib.suppress(OSError):
                    os.unlink(path)
    finally:
        if descriptor in _open_lock_files:  # not in a child that was forked in between
            _open_lock_files.discard(descriptor)
            os.close(descriptor)


def _wait_for(descriptor: int, deadline: float) -> None:
    """Returns with the lock, or without where the file system has none."""
    while True:
        try:
            _try_lock(descriptor)
            return
        except OSError as error:
            if error.errno not in _BUSY:
                return
        if time.monotonic() >= deadline:
            raise TimeoutError("another process holds the lock")
        time.sleep(_POLL_S)


def _try_lock(descriptor: int) -> None:
    if fcntl is not None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    else:
        import msvcrt

        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)


def _after_fork_in_child() -> None:
    for lock in list(_thread_locks):
        lock._at_fork_reinit()  # as the standard library does with its own
    # While a child has the file open, the lock outlives its owner.
    for descriptor in _open_lock_files:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _open_lock_files.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
