"""Threads of calls: heads are dealt to threads, and BLAS has one thread while a call runs.

Tiles are small for a matrix product of several threads. They would wait for each other after each of thousands of
products, and on a machine with other work each time until the scheduler gives a core back.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import numpy as np
from threadpoolctl import ThreadpoolController

__all__ = ["BLAS", "in_threads"]

Item = TypeVar("Item")
Found = TypeVar("Found")

#: Items of fewer multiplications than this are not worth a thread.
_FEW = 2**20


class _Blas:
    """A context with one thread of BLAS; its value is the number of threads that BLAS has outside of it.

    The number belongs to the process: of calls that overlap, the first one changes it and the last one restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._threads = 1

    @functools.cached_property
    def _controller(self) -> ThreadpoolController:
        return ThreadpoolController().select(user_api="blas")  # it searches the process's libraries: milliseconds

    def __enter__(self) -> int:
        with self._lock:
            if not self._calls:
                numbers = [library.num_threads for library in self._controller.lib_controllers]
                self._threads = max(numbers) if numbers else os.cpu_count() or 1
                self._limit = self._controller.limit(limits=1) if self._threads > 1 else None
            self._calls += 1
            return self._threads

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._calls -= 1
            if not self._calls and self._limit is not None:
                self._limit.restore_original_limits()


BLAS = _Blas()
_thread = threading.local()


@functools.lru_cache(maxsize=None)
def _pool(threads: int) -> ThreadPoolExecutor:
    def begin() -> None:
        _thread.is_of_pool = True

    return ThreadPoolExecutor(threads, thread_name_prefix="fa2cupy", initializer=begin)


def in_threads(work: Callable[[Item], Found], items: Sequence[Item], multiplications: float) -> list[Found]:
    """What `work` returns for each item, without NumPy's warnings.

    There are as many threads as BLAS had. All items are finished or cancelled when the function returns or raises; the
    error is that of the first item that failed.

    Parameters
    ----------
    work : callable
    items : sequence
    multiplications : float
        Those of all items: a few are not worth threads.
    """

    def quietly(item: Item) -> Found:
        with np.errstate(all="ignore"):
            return work(item)

    with BLAS as threads:
        if threads == 1 or len(items) < 2 or multiplications < _FEW * len(items) or hasattr(_thread, "is_of_pool"):
            return [quietly(item) for item in items]
        futures = [_pool(threads).submit(quietly, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)


def _forget() -> None:
    """Threads do not outlive a fork, and a lock may have been held by one of them."""
    _pool.cache_clear()
    BLAS.__init__()  # type: ignore[misc]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
