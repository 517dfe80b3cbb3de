"""The ranks of a sequence-parallel call, and how they reach each other."""

from __future__ import annotations

import contextlib
import enum
import json
import numbers
import os
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from ..numerics.arrays import is_on_host
from ..problem.arguments import check_int
from ..system.locks import new_lock
from ..system.recent import RecentlyUsed
from .local.prepared import PreparedCall
from .transport.launch import launch_of
from .transport.messages import CommunicationError, Transport, all_texts

__all__ = ["Communicator", "Stage", "check_communicator"]

_TIMEOUT_S = 600.0
_MOST_PREPARED = 256


class Stage(enum.Enum):
    """How far a call has come. It decides what an exception means for the communicator."""

    #: The ranks have not compared their arguments: the others are told, and can go on.
    OWN = enum.auto()
    #: Messages are under way: the communicator fails.
    TOGETHER = enum.auto()
    #: All ranks refuse the call, and can go on.
    REFUSED = enum.auto()


class Communicator:
    """One rank of several that call `fa2cupy.distributed` together.

    All ranks make the same calls in the same order, each on its own rows. It is made by `from_mpi`, `from_env` or
    `from_nccl`, or passed to the functions that `fa2cupy.distributed.simulate` runs.

    A communicator is open or failed. Calls that all ranks refuse leave it open. Whatever else ends a call early (a
    timeout, an error of another rank, ``KeyboardInterrupt``) makes it a failed one: messages of that call may be under
    way, and further calls raise `CommunicationError` at once. It tells the other ranks where it can: by MPI, between
    simulated ranks, and between GPUs that write each other's memory. Elsewhere their time runs out. Make a new one to
    go on.

    One thread at a time can make a call.

    Attributes
    ----------
    rank : int
        Number of this rank, from 0.
    size : int
        Number of ranks.
    ranks_per_host : int
        Number of ranks that fast links connect, for the scheme ``"hybrid"``: those of a host are neighbours.
    window_bytes : int
        Bytes of this rank's GPU memory that the other ranks write in calls of ``"heads"`` and ``"gather"``. They stay
        allocated as long as the communicator.

    Parameters
    ----------
    rank, size : int
    host : Transport or None
        Messages of NumPy arrays.
    device : callable or None
        Makes the messages of CuPy arrays, at the first of them: all ranks call it together.
    ranks_per_host : int or None
        None if all ranks are on one host.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        host: Transport | None = None,
        device: Callable[[], Transport] | None = None,
        ranks_per_host: int | None = None,
    ):
        self.rank = rank
        self.size = size
        self.ranks_per_host = size if ranks_per_host is None else check_ranks_per_host(ranks_per_host, size)
        self._host = host
        self._device = device
        self._made: Transport | None = None
        self._failure: str | None = None
        #: Held by the call that is under way.
        self.turn = new_lock()
        self.stage = Stage.OWN
        #: The calls so far, the one that is under way included. It is the same on all ranks.
        self.number = 0
        #: Descriptions of the calls that all ranks have agreed on.
        self.agreed: set[str] = set()
        #: Memory of the calls that CUDA graphs have captured, which use it at each launch.
        self.captured: list[list[Any]] = []
        #: Calls on CuPy arrays that have been checked, by all that the checks depend on.
        self.requests: dict[Hashable, Any] = {}
        #: Those that are queued as they were recorded, by the same and the size of the window whose addresses they use.
        self.prepared: RecentlyUsed[PreparedCall] = RecentlyUsed(_MOST_PREPARED)

    @classmethod
    def from_mpi(
        cls, communicator: Any, *, ranks_per_host: int | None = None, timeout: float = _TIMEOUT_S
    ) -> Communicator:
        """The ranks of a communicator of mpi4py.

        NumPy arrays travel by MPI. CuPy arrays travel by NCCL: its communicator is made at the first call with CuPy
        arrays, on the device that is current then, and MPI passes its identifier on.

        Parameters
        ----------
        communicator : mpi4py.MPI.Intracomm
            Such as ``MPI.COMM_WORLD``. It is duplicated: all ranks call this together.
        ranks_per_host : int, optional
            By default as MPI tells, if all hosts have equally many neighbouring ranks.
        timeout : float, optional
            Seconds that a rank waits for messages of the others before it raises `CommunicationError`. Its process then
            waits as long for the others to end, before it ends the job by ``MPI_Abort``.

        Raises
        ------
        ImportError
            mpi4py is missing.
        """
        if not hasattr(communicator, "Dup"):
            got = type(communicator).__name__
            raise TypeError(f"communicator: expected one of mpi4py, such as MPI.COMM_WORLD, got {got}")
        try:
            from .transport.mpi import MpiTransport

            transport = MpiTransport(communicator, check_timeout(timeout))
        except ImportError as error:
            raise ImportError(f"Communicator.from_mpi needs mpi4py: pip install mpi4py mpich ({error})") from error

        def device() -> Transport:
            from .transport.nccl import connect

            def broadcast(own: Any) -> Any:
                return json.loads(all_texts(transport, json.dumps(None if own is None else list(own)))[0])

            return connect(transport.rank, transport.size, broadcast, timeout)

        if ranks_per_host is None:
            ranks_per_host = transport.ranks_per_host()
        return cls(transport.rank, transport.size, transport, device, ranks_per_host)

    @classmethod
    def from_nccl(
        cls,
        communicator: Any,
        rank: int | None = None,
        size: int | None = None,
        *,
        ranks_per_host: int | None = None,
        timeout: float = _TIMEOUT_S,
    ) -> Communicator:
        """The ranks of a communicator of NCCL, for CuPy arrays.

        Parameters
        ----------
        communicator : cupy.cuda.nccl.NcclCommunicator, cupyx.distributed.NCCLBackend or nccl.core.Communicator
            The last one is of nccl4py.
        rank, size : int, optional
            The communicator's, if it does not tell them itself.
        ranks_per_host : int, optional
            By default all ranks are on one host.
        timeout : float, optional
            As for `from_env`.

        Raises
        ------
        TypeError
            The communicator is of another kind, or does not tell its rank or size.
        """
        from .transport.nccl import wrap

        transport = wrap(communicator, rank, size, check_timeout(timeout))
        return cls(transport.rank, transport.size, None, lambda: transport, ranks_per_host)

    @classmethod
    def from_env(
        cls,
        environment: Mapping[str, str] | None = None,
        *,
        ranks_per_host: int | None = None,
        timeout: float = _TIMEOUT_S,
    ) -> Communicator:
        """The ranks that a launcher has started, for CuPy arrays: one process for each GPU.

        RANK and WORLD_SIZE are those of torchrun; the variables of Open MPI, MPICH and Slurm are read where they are
        missing. The process with rank 0 listens at MASTER_ADDR (``127.0.0.1`` by default) and MASTER_PORT (29500) and
        passes NCCL's identifier on, to processes of the same job: those with the same FA2CUPY_JOB_TOKEN, by default
        the launcher's name of the job. NCCL's communicator is made at the first call, on the device that is current
        then.

        Parameters
        ----------
        environment : mapping of str, optional
            Instead of ``os.environ``.
        ranks_per_host : int, optional
            By default that of the launcher's variables (torchrun's is LOCAL_WORLD_SIZE); without them, all ranks are on
            one host.
        timeout : float, optional
            Seconds after which a rank gives up a call, whose messages then end with an error: see docs/several_gpus.md.

        Raises
        ------
        ValueError
            The variables are missing or have no meaning.
        """
        given = os.environ if environment is None else environment
        check_timeout(timeout)
        launch = launch_of(given)

        def device() -> Transport:
            from .transport.nccl import connect
            from .transport.rendezvous import broadcast

            return connect(launch.rank, launch.size, lambda own: broadcast(launch, own, timeout), timeout)

        in_host = launch.ranks_per_host if ranks_per_host is None else ranks_per_host
        return cls(launch.rank, launch.size, None, device, in_host)

    def takes_host(self, array: object) -> bool:
        """True if an array travels by the messages of NumPy arrays, False if by those of CuPy arrays.

        Raises
        ------
        TypeError
            The communicator has no messages for it.
        """
        if is_on_host(array):
            if self._host is None:
                raise TypeError(
                    "NumPy arrays travel by MPI, and this communicator has NCCL alone; make it with "
                    "Communicator.from_mpi, or simulate ranks with fa2cupy.distributed.simulate"
                )
            return True
        if self._device is None:
            raise TypeError(
                "simulated ranks have NumPy arrays, got a cupy.ndarray; make the communicator of NCCL or MPI"
            )
        return False

    def transport_of(self, array: object) -> Transport:
        """The messages for arrays of this array's library. Raises TypeError if there are none."""
        return self._transport(self.takes_host(array))

    def _transport(self, of_host: bool) -> Transport:
        if of_host:
            assert self._host is not None, "asked for before"
            return self._host
        if self._made is None:
            assert self._device is not None, "asked for before"
            self._made = self._device()
        return self._made

    def texts(self, text: str) -> list[str]:
        """The texts of all ranks in this call. They travel apart from CuPy arrays if there is another way."""
        return all_texts(self._transport(self._host is not None), text, self.number)

    def check(self) -> None:
        """Raises CommunicationError if the communicator has failed. Any thread may ask."""
        if self._failure is not None:
            raise CommunicationError(f"an earlier call on this communicator failed: {self._failure}")

    def begin(self) -> None:
        """Notes that a call begins. Raises CommunicationError if this rank has failed or heard that another one has."""
        self.stage = Stage.TOGETHER
        self.check()
        for transport in self._transports():
            transport.check()
        self.number += 1
        self.stage = Stage.OWN

    def fail(self, error: BaseException) -> None:
        """Makes it a failed communicator, ends what is under way, and tells the other ranks where it can."""
        if self._failure is None:
            self._failure = f"{type(error).__name__}: {error}"
            for transport in self._transports():
                with contextlib.suppress(Exception):  # the error says more
                    transport.end(self._failure)

    def _transports(self) -> list[Transport]:
        return [transport for transport in (self._host, self._made) if transport is not None]

    @property
    def window_bytes(self) -> int:
        """Bytes of this rank's GPU memory that the other ranks write: as many as the largest call so far needed."""
        return 0 if self._made is None else self._made.window_bytes

    def __repr__(self) -> str:
        return f"<Communicator: rank {self.rank} of {self.size}>"


def check_communicator(comm: object) -> None:
    """Raises TypeError unless it is a communicator."""
    if not isinstance(comm, Communicator):
        hint = "it comes before the arrays; " if hasattr(comm, "dtype") else ""
        raise TypeError(
            f"comm: expected a fa2cupy.distributed.Communicator, got {type(comm).__name__}; {hint}make it with "
            "Communicator.from_env, from_mpi or from_nccl, or let fa2cupy.distributed.simulate(size, work) pass one "
            "to work(comm) on each of its ranks"
        )


def check_timeout(timeout: object) -> float:
    """Raises TypeError or ValueError unless it is a positive number of seconds."""
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise TypeError(f"timeout: expected a number of seconds, got {type(timeout).__name__}")
    seconds = float(timeout)
    if not seconds > 0:
        raise ValueError(f"timeout: expected a positive number of seconds, got {timeout}")
    return seconds


def check_ranks_per_host(ranks_per_host: object, size: int) -> int:
    """Raises TypeError or ValueError unless the ranks can be divided among hosts."""
    number = check_int("ranks_per_host", ranks_per_host)
    if number < 1 or size % number:
        raise ValueError(f"ranks_per_host: expected a divisor of the {size} ranks, got {number}")
    return number
