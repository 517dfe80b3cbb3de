"""mpi4py's MPI between threads of this process: requests read and write their buffers when messages meet, as in MPI."""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from types import SimpleNamespace

import numpy as np

#: Longer messages are read from the sender's memory when they are received.
EAGER_BYTES = 64


class MpiError(RuntimeError):
    """``MPI.Exception``."""


class FakeRequest:
    """A message that is sent or received. Only a copied message keeps its buffer alive."""

    def __init__(self, buffer: np.ndarray, peer: int, tag: int, is_done: bool = False):
        self.address, self.nbytes, self._copy = buffer.ctypes.data, buffer.nbytes, buffer if is_done else None
        self.peer, self.tag, self.is_done = peer, tag, is_done

    def Cancel(self) -> None:
        self.tag, self.is_done = None, True


class FakeMpi(SimpleNamespace):
    """``mpi4py.MPI``.

    Attributes
    ----------
    before_test : callable
        Is called whenever a thread tests its requests.
    """

    Exception, BYTE, ANY_SOURCE = MpiError, 1, -1

    def __init__(self, size: int):
        super().__init__(size=size, lock=threading.RLock(), before_test=lambda: None)
        self.sent, self.posted = (defaultdict(list) for _ in range(2))  # by context and receiver
        self.Request = SimpleNamespace(Testall=self._test_all)
        self.Status = FakeStatus

    def _test_all(self, requests) -> bool:
        self.before_test()
        with self.lock:
            return all(request.is_done for request in requests)

    def Is_finalized(self) -> bool:
        return True

    def communicator(self, rank: int) -> FakeCommunicator:
        return FakeCommunicator(self, rank, (0,))


class FakeStatus:
    """``MPI.Status``."""

    source, nbytes = -1, 0

    def Get_source(self) -> int:
        return self.source

    def Get_count(self, datatype) -> int:
        return self.nbytes


class FakeCommunicator:
    """``MPI.Intracomm``."""

    def __init__(self, mpi: FakeMpi, rank: int, context: tuple):
        self._mpi, self._rank, self._context, self._duplicates = mpi, rank, context, 0

    def Dup(self) -> FakeCommunicator:
        self._duplicates += 1
        return FakeCommunicator(self._mpi, self._rank, (*self._context, self._duplicates))

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._mpi.size

    def Isend(self, buffer, dest: int, tag: int = 0) -> FakeRequest:
        is_eager = buffer.nbytes <= EAGER_BYTES
        request = FakeRequest(np.array(buffer) if is_eager else buffer, self._rank, tag, is_eager)
        with self._mpi.lock:
            posted = self._mpi.posted[self._context, dest]
            found = next((one for one in posted if (one.peer, one.tag) == (self._rank, tag)), None)
            if found is None:
                self._mpi.sent[self._context, dest].append(request)
            else:
                posted.remove(found)
                _meet(request, found)
        return request

    def Irecv(self, buffer, source: int, tag: int = 0) -> FakeRequest:
        request = FakeRequest(buffer, source, tag)
        with self._mpi.lock:
            sent = self._mpi.sent[self._context, self._rank]
            found = next((one for one in sent if (one.peer, one.tag) == (source, tag)), None)
            if found is None:
                self._mpi.posted[self._context, self._rank].append(request)
            else:
                sent.remove(found)
                _meet(found, request)
        return request

    def Iprobe(self, source: int, tag: int, status: FakeStatus) -> bool:
        with self._mpi.lock:
            for one in self._mpi.sent[self._context, self._rank]:
                if one.tag == tag:
                    status.source, status.nbytes = one.peer, one.nbytes
                    return True
        return False

    def Recv(self, buffer, source: int, tag: int) -> None:
        assert self.Irecv(buffer, source, tag).is_done


def _meet(sent: FakeRequest, received: FakeRequest) -> None:
    if sent.nbytes > received.nbytes:
        raise MpiError("MPI_ERR_TRUNCATE: message truncated")
    ctypes.memmove(received.address, sent.address, sent.nbytes)
    sent.is_done = received.is_done = True
