"""Locks between threads, which are free in a forked child, and locks between processes."""

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
    fcntl = None  # type: ignore[assignment]  # _try_lock checks it

__all__ = ["ForkGate", "file_lock", "new_lock"]

_POLL_S = 0.05
_LONGEST_FORK_S = 60.0
_BUSY = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)

_thread_locks: weakref.WeakSet = weakref.WeakSet()
_open_lock_files: set[int] = set()


def new_lock() -> threading.Lock:
    """A lock that is released in a forked child, because the thread that holds it does not exist there."""
    lock = threading.Lock()
    _thread_locks.add(lock)
    return lock


class ForkGate:
    """A section that a fork waits for: any number of threads can be in it, but none while the process forks.

    NVRTC has internal locks. A child that inherits a held one deadlocks in its first compilation, and no function of
    NVRTC resets it.

    Attributes
    ----------
    inside : int
        The number of threads in it.
    """

    def __init__(self) -> None:
        self._reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._close, after_in_parent=self._open, after_in_child=self._reset)

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._forks)
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            if self.inside:  # not in a child that was forked from inside the section
                self.inside -= 1
            self._changed.notify_all()

    def _reset(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self.inside = self._forks = 0

    def _close(self) -> None:
        self._changed.acquire()
        self._forks += 1
        # The timeout ends the wait of a fork from inside the section, as by a signal handler.
        self._changed.wait_for(lambda: not self.inside, _LONGEST_FORK_S)

    def _open(self) -> None:
        self._forks -= 1
        self._changed.notify_all()
        self._changed.release()


@contextlib.contextmanager
def file_lock(path: Path, timeout_s: float, *, remove: bool = False) -> Iterator[None]:
    """Excludes other processes from the body. The operating system releases the lock of a process that dies.

    If the file cannot be locked (a read-only folder, some network file systems), the body runs without a lock.

    Parameters
    ----------
    path : pathlib.Path
        The file that is locked; created if it does not exist.
    timeout_s : float
    remove : bool, optional
        Deletes the file at the end. A process that waited for the deleted file can then run at the same time as one
        that created it again, so that this is only for locks that avoid duplicate work.

    Raises
    ------
    TimeoutError
        Another process holds the lock for longer than `timeout_s`.
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
            if remove and descriptor in _open_lock_files:  # the lock of a forked child's parent stays
                with contextlib.suppress(OSError):
                    os.unlink(path)
    finally:
        if descriptor in _open_lock_files:  # false in a child that was forked from inside the body
            _open_lock_files.discard(descriptor)
            os.close(descriptor)


def _wait_for(descriptor: int, deadline: float) -> None:
    """Returns with the lock, or without one if the file system does not support locks."""
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
        lock._at_fork_reinit()  # the standard library does the same with its locks
    # The lock is held until all processes that share the open file have closed it.
    for descriptor in _open_lock_files:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _open_lock_files.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
