"""Messages of NumPy arrays between processes, by mpi4py."""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .messages import CommunicationError, HostMemory, Messages, split_own

__all__ = ["MpiTransport"]

_SHORT_S, _POLL_S = 1e-3, 1e-4
#: The tags of arrays, of the reason why a rank has failed, and of the news that a process ends.
_ARRAYS, _FAILED, _ENDED = 0, 1, 2
_LONGEST_REASON = 1000
#: Requests that are not done when a call has failed, and their memory: MPI may use it until the process ends.
_in_flight: list[Any] = []
_transports: list[MpiTransport] = []


class MpiTransport(HostMemory):
    """Messages by an intracommunicator of mpi4py: see `fa2cupy.distributed.transport.messages.Transport`.

    Messages are sent from and received in memory of the transport: if a call fails, MPI may use it later.

    A process that ends tells the other ranks, whose waits for it end. After a failure it then waits for the others to
    end, too, and ends the job if one of them does not: MPI_Finalize would wait for it for ever.

    Parameters
    ----------
    communicator : mpi4py.MPI.Intracomm
        It is duplicated, so that the caller's messages are not mixed up with those of the package.
    timeout : float
        Seconds that a rank waits for its messages, and after a failure for the other ranks to end.
    """

    def __init__(self, communicator: Any, timeout: float):
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._communicator = communicator.Dup()
        self.rank, self.size = communicator.Get_rank(), communicator.Get_size()
        self._timeout = timeout
        self._others = [peer for peer in range(self.size) if peer != self.rank]
        self._ended: set[int] = set()
        self._has_failed = False
        if not _transports:
            atexit.register(_leave)
        _transports.append(self)

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
        outgoing = [(_bytes(np.array(array)), peer) for array, peer in sends]
        landing = [(np.empty(array.nbytes, np.uint8), peer) for array, peer in recvs]
        requests: list[Any] = []
        with self._errors():
            try:
                for array, peer in landing:
                    requests.append(self._communicator.Irecv(array, peer, _ARRAYS))
                for array, peer in outgoing:
                    requests.append(self._communicator.Isend(array, peer, _ARRAYS))
                self._wait(requests, {peer for _, peer in (*sends, *recvs)})
            except BaseException:
                _in_flight.append((requests, outgoing, landing))
                for request in requests[: len(landing)]:
                    request.Cancel()
                raise
        for target, source in copies:
            target[...] = source
        for (target, _), (found, _) in zip(recvs, landing, strict=True):
            _bytes(target)[...] = found

    def _wait(self, requests: Sequence[Any], peers: set[int]) -> None:
        start = time.monotonic()
        while not self._mpi.Request.Testall(requests):
            self.check()
            # All that an ended process had sent is here: it has waited until its messages were received.
            if (gone := peers & self._gone()) and not self._mpi.Request.Testall(requests):
                raise CommunicationError(
                    f"rank {self.rank} waits for messages of ranks {sorted(gone)}, which have ended"
                )
            waited = time.monotonic() - start
            if waited > self._timeout:
                raise CommunicationError(
                    f"rank {self.rank} has waited {self._timeout:g} s for messages of ranks {sorted(peers)}, "
                    "one of which has ended, is late or makes another call"
                )
            if waited > _SHORT_S:  # short waits are not worth a sleep
                time.sleep(_POLL_S)

    def check(self) -> None:
        """Raises CommunicationError if another rank has said that it has failed."""
        with self._errors():
            if news := self._news(_FAILED):
                rank, text = news
                raise CommunicationError(f"rank {self.rank} cannot go on: rank {rank} has failed with {text}")

    def end(self, reason: str) -> None:
        """Tells the other ranks."""
        self._has_failed = True
        self._tell(_FAILED, reason[:_LONGEST_REASON])

    def leave(self) -> None:
        """Tells the other ranks that this process ends."""
        self._tell(_ENDED, "")

    def join(self) -> None:
        """Waits for the other processes to end, after a failure; ends the job if one of them does not."""
        end = time.monotonic() + self._timeout
        while self._has_failed and len(self._gone()) < len(self._others):
            if time.monotonic() > end:
                late = sorted({*self._others} - self._ended)
                print(
                    f"fa2cupy.distributed: a call has failed, and rank {self.rank} has waited {self._timeout:g} s for "
                    f"ranks {late} to end: it ends the job",
                    file=sys.stderr,
                    flush=True,
                )
                self._mpi.COMM_WORLD.Abort(1)
                return
            time.sleep(_POLL_S)

    def _tell(self, tag: int, text: str) -> None:
        data = np.frombuffer(text.encode(errors="replace"), np.uint8)
        _in_flight.extend((self._communicator.Isend(data, peer, tag), data) for peer in self._others)

    def _news(self, tag: int) -> tuple[int, str] | None:
        """The rank and text of a message with this tag, if there is one."""
        status = self._mpi.Status()
        if not self._communicator.Iprobe(self._mpi.ANY_SOURCE, tag, status):
            return None
        rank, text = status.Get_source(), np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
        self._communicator.Recv(text, rank, tag)
        return rank, bytes(text).decode(errors="replace")

    def _gone(self) -> set[int]:
        """The ranks whose processes end."""
        while news := self._news(_ENDED):
            self._ended.add(news[0])
        return self._ended

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._mpi.Exception as error:
            raise CommunicationError(f"rank {self.rank}: MPI has failed: {error}") from error


def _leave() -> None:
    """Is called when the process ends, before mpi4py calls MPI_Finalize."""
    mpi = _transports[0]._mpi
    if not mpi.Is_finalized():
        for transport in _transports:
            with contextlib.suppress(mpi.Exception):
                transport.leave()
        for transport in _transports:
            transport.join()


def _bytes(array: Any) -> np.ndarray:
    """A contiguous array as bytes, which MPI takes whatever the dtype."""
    return array.reshape(-1).view(np.uint8)
