"""Messages of NumPy arrays between processes, by mpi4py."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from .messages import CommunicationError, HostMemory, Messages, split_own

__all__ = ["MpiTransport"]

_SHORT_S, _POLL_S = 1e-3, 1e-4


class MpiTransport(HostMemory):
    """Messages by an intracommunicator of mpi4py: see `fa2cupy.distributed.messages.Transport`.

    Parameters
    ----------
    communicator : mpi4py.MPI.Intracomm
        It is duplicated, so that the caller's messages are not mixed up with those of the package.
    timeout : float
        Seconds that a rank waits for its messages.
    """

    def __init__(self, communicator: Any, timeout: float):
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._communicator = communicator.Dup()
        self.rank, self.size = communicator.Get_rank(), communicator.Get_size()
        self._timeout = timeout

    def ranks_per_host(self) -> int | None:
        """The number of ranks of each host; None unless it is the same for all, and their ranks are neighbours."""
        host = self._communicator.Split_type(self._mpi.COMM_TYPE_SHARED)
        size, number = host.Get_size(), host.Get_rank()
        host.Free()
        regular = self.size % size == 0 and number == self.rank % size
        sizes = self._communicator.allgather(size if regular else 0)
        return size if set(sizes) == {size} else None

    def exchange(self, sends: Messages, recvs: Messages) -> None:
        """Starts all messages and waits for them."""
        copies, sends, recvs = split_own(self.rank, sends, recvs)
        peers = sorted({peer for _, peer in (*sends, *recvs)})
        requests = [self._communicator.Irecv(_bytes(array), peer) for array, peer in recvs]
        requests += [self._communicator.Isend(_bytes(array), peer) for array, peer in sends]
        for target, source in copies:
            target[...] = source
        start = time.monotonic()
        while not self._mpi.Request.Testall(requests):
            waited = time.monotonic() - start
            if waited > self._timeout:
                raise CommunicationError(
                    f"rank {self.rank} has waited {self._timeout:g} s for messages of ranks {peers}, "
                    "one of which has ended, is late or makes another call"
                )
            if waited > _SHORT_S:  # short waits are not worth a sleep
                time.sleep(_POLL_S)


def _bytes(array: Any) -> np.ndarray:
    """A contiguous array as bytes, which MPI takes whatever the dtype."""
    return array.reshape(-1).view(np.uint8)
