"""Simulated ranks: threads of one process that make calls together, on NumPy arrays."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..cpu.threads import BLAS
from ..problem.arguments import check_int
from .communicator import Communicator, check_ranks_per_host, check_timeout
from .transport.messages import CommunicationError
from .transport.threads import ThreadTransport, World

__all__ = ["simulate"]

#: Seconds that `simulate` waits for its ranks after an interrupt.
_PATIENCE_S = 5.0
_POLL_S = 0.1

_Result = TypeVar("_Result")


def simulate(
    size: int, work: Callable[[Communicator], _Result], *, ranks_per_host: int | None = None, timeout: float = 60.0
) -> list[_Result]:
    """Runs ranks as threads of this process, on NumPy arrays: for tests and to try things out.

    Parameters
    ----------
    size : int
        Number of ranks.
    work : callable
        ``work(comm)`` is called once for each rank, in a thread of its own.
    ranks_per_host : int, optional
        Simulates several hosts with so many ranks each.
    timeout : float, optional
        Seconds that a rank waits for messages of the others.

    Returns
    -------
    list
        What `work` has returned, by rank.

    Raises
    ------
    BaseException
        The error of the first rank that failed. The others end, too: their next call or wait raises
        `CommunicationError`, as it does where the caller is interrupted (``KeyboardInterrupt``).

    Notes
    -----
    Until all ranks have ended, BLAS has one thread for the matrix products of each.

    Examples
    --------
    >>> simulate(3, lambda comm: comm.rank**2)
    [0, 1, 4]
    """
    size = check_int("size", size)
    if size < 1:
        raise ValueError(f"size: expected at least 1 rank, got {size}")
    if not callable(work):
        raise TypeError(f"work: expected a function of a communicator, got {type(work).__name__}")
    if ranks_per_host is not None:
        check_ranks_per_host(ranks_per_host, size)
    world = World(size, check_timeout(timeout))
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            results[rank] = work(Communicator(rank, size, ThreadTransport(world, rank), None, ranks_per_host))
        except BaseException as error:  # raised below, in the caller's thread
            errors.append(error)
            world.fail(rank, f"{type(error).__name__}: {error}")

    # Daemons do not delay the end of the process.
    threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    with BLAS:
        try:
            for thread in threads:
                thread.start()
            _join(threads, math.inf)
        except BaseException as error:
            world.fail(None, type(error).__name__)
            _join(threads, time.monotonic() + _PATIENCE_S)
            raise
    if errors:
        # Ranks that only waited for one that failed say less than that one.
        raise next((error for error in errors if not isinstance(error, CommunicationError)), errors[0])
    return results


def _join(threads: Sequence[threading.Thread], end: float) -> None:
    """Waits for threads in short steps: a wait without end cannot be interrupted everywhere."""
    for thread in threads:
        while thread.is_alive() and time.monotonic() < end:
            thread.join(_POLL_S)
