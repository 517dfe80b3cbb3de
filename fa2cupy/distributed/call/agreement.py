"""All ranks agree on a call before its first message: ranks that make different calls would wait for ever."""

from __future__ import annotations

import contextlib
import functools
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from ...problem.array_types import Array
from ..communicator import Communicator, Stage, check_communicator
from ..local.lanes import is_captured
from ..transport.messages import CommunicationError, Transport, head_of, without_text

__all__ = ["agree", "collective", "messages_of"]

_ERROR = "error"
_Function = TypeVar("_Function", bound=Callable[..., Any])


def collective(function: _Function) -> _Function:
    """Makes a function one that all ranks call together, and that leaves the communicator either open or failed.

    If a rank raises an exception before the ranks have compared their arguments, it tells the others, which raise an
    error, too. An exception that all ranks raise leaves the communicator open. Any other one makes it a failed one.
    """

    @functools.wraps(function)
    def call(comm: Any = None, *arguments: Any, **keywords: Any) -> Any:
        check_communicator(comm)
        if comm.size == 1:
            return function(comm, *arguments, **keywords)
        if not comm.turn.acquire(blocking=False):
            raise RuntimeError(
                "comm: another call on this communicator is under way, in another thread or around this one; ranks "
                "make one call after the other: give each thread a communicator of its own"
            )
        try:
            comm.begin()
            return function(comm, *arguments, **keywords)
        except BaseException as error:
            if comm.stage is Stage.OWN and isinstance(error, Exception):
                _tell(comm, error)
            if comm.stage is not Stage.REFUSED or not isinstance(error, Exception):
                comm.fail(error)
            raise
        finally:
            comm.turn.release()

    return cast(_Function, call)


def _tell(comm: Communicator, error: Exception) -> None:
    """Tells the other ranks of this one's error, so that they do not wait for messages that never come."""
    try:
        _everyones(comm, {_ERROR: f"{type(error).__name__}: {error}"})
    except BaseException as failure:
        comm.fail(failure)
        if not isinstance(failure, Exception):
            raise
        # The caller gets its own error, and hears of this one in its next call.
    else:
        comm.stage = Stage.REFUSED


def agree(comm: Communicator, array: object, description: Mapping[str, str]) -> int:
    """Compares the descriptions of a call by all ranks. It is part of a `collective` function.

    Messages of NumPy arrays wait for the other ranks anyway, so each call is compared. Messages of CuPy arrays do not,
    and a comparison synchronises with the GPU: each description is compared once. It is remembered when all ranks have
    agreed on it, so that either all of them skip the next comparison, or none. A call that skips it begins with a
    message of its number (`Run.announce`): a rank that waits for a comparison finds this in place of a text, and fails.

    Parameters
    ----------
    comm : Communicator
    array : ndarray
        An array of the call's library.
    description : mapping of str
        What each argument is, by its name.

    Returns
    -------
    int
        Stands for the description, from 1 to 2**32 - 1.

    Raises
    ------
    ValueError
        An argument differs between ranks, or another rank has an error. The text names argument and ranks.
    """
    text = json.dumps(description)
    number = max(1, zlib.crc32(text.encode()))
    if comm.size == 1:
        return number
    on_host = comm.takes_host(array)
    if on_host or text not in comm.agreed:
        everyones = _everyones(comm, {**description, "array": "numpy" if on_host else "cupy"})
        comm.stage = Stage.REFUSED  # what is raised from here on is raised by all
        _check_errors([one.get(_ERROR) for one in everyones])
        for name in dict.fromkeys(name for one in everyones for name in one):
            _check_alike(name, [one.get(name, "absent") for one in everyones])
        if not on_host:
            comm.agreed.add(text)
    comm.stage = Stage.TOGETHER
    return number


@contextlib.contextmanager
def messages_of(comm: Communicator, array: Array, description: int) -> Iterator[Transport]:
    """The messages of a call that uses the caller's stream alone; `agree` has returned the number `description`."""
    transport = comm.transport_of(array)
    is_queued = not (transport.waits_for_host or is_captured(array))
    if is_queued:
        head = head_of(comm.number, without_text(description))
        landing = transport.empty_bytes(comm.size * len(head)).reshape(comm.size, len(head))
        transport.announce(head, transport.to_buffer(head), landing)
    yield transport
    if is_queued:
        transport.watch()


def _everyones(comm: Communicator, description: Mapping[str, str]) -> list[Any]:
    comm.stage = Stage.TOGETHER
    try:
        return [json.loads(text) for text in comm.texts(json.dumps(description))]
    except ValueError as error:
        raise CommunicationError(f"rank {comm.rank} has received what describes no call: {error}") from error


def _check_errors(errors: Sequence[str | None]) -> None:
    for rank, error in enumerate(errors):
        if error is not None:
            raise ValueError(f"rank {rank} cannot make this call: {error}")


def _check_alike(name: str, values: Sequence[str]) -> None:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    if len(ranks) > 1:
        found = "; ".join(f"{value} on {_named(some)}" for value, some in ranks.items())
        raise ValueError(f"{name}: expected the same on all ranks, got {found}")


def _named(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
