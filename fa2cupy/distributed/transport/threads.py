"""Simulated ranks: threads of one process, whose messages are copies of NumPy arrays in queues."""

from __future__ import annotations

import queue
import time

import numpy as np

from .messages import CommunicationError, HostMemory, Messages, split_own

__all__ = ["ThreadTransport", "World"]

_POLL_S = 0.05


class World:
    """What the ranks share: a queue for each pair of them, and the first failure.

    Parameters
    ----------
    size : int
    timeout : float
        Seconds that a rank waits for a message.
    """

    def __init__(self, size: int, timeout: float):
        self.size = size
        self.timeout = timeout
        self.queues: list[list[queue.Queue[np.ndarray]]] = [[queue.Queue() for _ in range(size)] for _ in range(size)]
        self._failures: list[tuple[int | None, str]] = []

    def fail(self, rank: int | None, reason: str) -> None:
        """Ends the waits of all ranks, and refuses their next calls. The rank is None for the caller of `simulate`."""
        self._failures.append((rank, reason))

    def check(self, rank: int) -> None:
        """Raises CommunicationError on a rank if another one has failed."""
        if self._failures:
            failed, reason = self._failures[0]
            who = "the caller of simulate" if failed is None else f"rank {failed}"
            raise CommunicationError(f"rank {rank} cannot go on: {who} has failed with {reason}")


class ThreadTransport(HostMemory):
    """Messages between threads of a process: see `fa2cupy.distributed.transport.messages.Transport`."""

    def __init__(self, world: World, rank: int):
        self.rank, self.size = rank, world.size
        self._world = world

    def check(self) -> None:
        """Raises CommunicationError if a rank has failed."""
        self._world.check(self.rank)

    def end(self, reason: str) -> None:
        """Tells the other ranks. Messages are copies in queues that nobody reads any more."""
        self._world.fail(self.rank, reason)

    def exchange(self, sends: Messages, recvs: Messages) -> None:
        """Sends copies, then waits for all messages that are to be received."""
        copies, sends, recvs = split_own(self.rank, sends, recvs)
        for array, peer in sends:
            self._world.queues[self.rank][peer].put(np.array(array))
        for target, source in copies:
            target[...] = source
        for target, peer in recvs:
            message = self._receive(peer)
            if message.nbytes != target.nbytes:
                raise CommunicationError(
                    f"rank {self.rank} expected {target.nbytes} bytes of rank {peer}, got {message.nbytes}: "
                    "the ranks make different calls"
                )
            target.reshape(-1).view(np.uint8)[...] = message.reshape(-1).view(np.uint8)

    def _receive(self, peer: int) -> np.ndarray:
        world = self._world
        end = time.monotonic() + world.timeout
        while True:
            try:
                return world.queues[peer][self.rank].get(timeout=_POLL_S)
            except queue.Empty:
                world.check(self.rank)
                if time.monotonic() > end:
                    raise CommunicationError(
                        f"rank {self.rank} has waited {world.timeout:g} s for a message of rank {peer}, "
                        "which has ended, is late or makes another call"
                    ) from None
