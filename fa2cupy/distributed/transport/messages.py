"""What transports have in common: groups of messages, and texts that all ranks exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

from ...problem.array_types import Array
from .windows import Window

__all__ = [
    "CommunicationError",
    "HostMemory",
    "Messages",
    "Transport",
    "all_texts",
    "check_heads",
    "head_of",
    "split_own",
    "without_text",
]

_LONGEST_TEXT, _MOST_NUMBERS = 1 << 24, 1 << 30

#: Contiguous arrays, each with the rank that it goes to or comes from.
Messages: TypeAlias = "Sequence[tuple[Array, int]]"


class CommunicationError(RuntimeError):
    """A rank failed or did not answer in time, so that the results of a call are not there."""


class Transport(Protocol):
    """Messages between ranks.

    Attributes
    ----------
    rank, size : int
    waits_for_host : bool
        True if `exchange` returns when the messages have arrived. Messages are otherwise queued on CuPy's current
        stream, and reading one on the host synchronises with the GPU.
    window_bytes : int
        Bytes of this rank's memory that the others write.
    """

    rank: int
    size: int
    waits_for_host: bool

    @property
    def window_bytes(self) -> int:
        """See the docstring of the class."""

    def exchange(self, sends: Messages, recvs: Messages) -> None:
        """Sends and receives a group of arrays. Messages between two ranks arrive in the order they were sent."""

    def announce(self, head: np.ndarray, own: Array, landing: Array) -> None:
        """Sends the head of a call ahead of its messages, if the ranks do not compare the call.

        Parameters
        ----------
        head, own : ndarray, shape (8,)
            The bytes of `head_of` the call, on the host and where messages are sent from.
        landing : ndarray, shape (size, 8)
            Where the heads of the ranks arrive.
        """

    def watch(self, event: Any = None) -> None:
        """Is called when all messages of a call have been queued.

        Parameters
        ----------
        event : cupy.cuda.Event, optional
            When they have arrived. By default, when all is done that the current stream has been given.
        """

    def check(self) -> None:
        """Raises CommunicationError if messages can travel no more, as far as this rank knows."""

    def end(self, reason: str) -> None:
        """Ends what is under way, after a failure, and tells the other ranks where that is possible."""

    def window(self, is_captured: bool) -> Window | None:
        """The memory of this rank that the others write; None where they cannot. All ranks call it together.

        Parameters
        ----------
        is_captured : bool
            True while a CUDA graph captures a call, when no memory can be shared that is not shared already.
        """

    def empty_bytes(self, nbytes: int) -> Any:
        """An array of bytes that messages can be received in."""

    def to_buffer(self, data: np.ndarray) -> Any:
        """Bytes of the host as an array that can be sent."""

    def to_host(self, buffer: Any) -> np.ndarray:
        """A received array of bytes on the host."""


class HostMemory:
    """What transports of NumPy arrays have in common: `exchange` returns when messages have arrived."""

    waits_for_host = True
    window_bytes = 0

    def announce(self, head: np.ndarray, own: Any, landing: Any) -> None:
        """Nothing: the ranks compare each call."""

    def watch(self, event: Any = None) -> None:
        """Nothing: all messages have arrived."""

    def window(self, is_captured: bool) -> None:
        """None: messages are copies already."""

    def empty_bytes(self, nbytes: int) -> Any:
        """An array of bytes."""
        return np.empty(nbytes, np.uint8)

    def to_buffer(self, data: np.ndarray) -> Any:
        """The array itself."""
        return data

    def to_host(self, buffer: Any) -> np.ndarray:
        """The array itself."""
        return buffer


def split_own(rank: int, sends: Messages, recvs: Messages) -> tuple[list[tuple[Array, Array]], Messages, Messages]:
    """The messages of a rank to itself, as pairs (target, source), and those between ranks, without empty arrays."""
    own = zip(
        [array for array, peer in recvs if peer == rank], [array for array, peer in sends if peer == rank], strict=True
    )
    copies = [(target, source) for target, source in own if source.size]
    others = [[pair for pair in pairs if pair[1] != rank and pair[0].size] for pairs in (sends, recvs)]
    return copies, others[0], others[1]


def head_of(number: int, kind: int) -> np.ndarray:
    """The bytes of the first message of a call between two ranks.

    Parameters
    ----------
    number : int
        That of the call.
    kind : int
        The length of a text; what `without_text` returns for a call in which the ranks compare none.
    """
    return np.array([number % _MOST_NUMBERS, kind], np.int32).view(np.uint8)


def without_text(description: int) -> int:
    """The kind of a call that the ranks have agreed on before, from the number of its description."""
    return -1 - description % _MOST_NUMBERS


def check_heads(rank: int, own: np.ndarray, heads: Sequence[np.ndarray]) -> list[int]:
    """The kinds of the calls that the ranks make, by rank.

    Raises
    ------
    CommunicationError
        A rank makes another call than this one, as far as that can be seen without texts.
    """
    number, kind = own.view(np.int32).tolist()
    found = [head.view(np.int32).tolist() for head in heads]
    for peer, (other, other_kind) in enumerate(found):
        if other != number:
            raise CommunicationError(
                f"rank {rank} makes its call {number} on this communicator, and rank {peer} its call {other}: one of "
                "them has made another number of calls, and these do not belong together"
            )
        if other_kind != kind and (min(kind, other_kind) < 0 or other_kind > _LONGEST_TEXT):
            raise CommunicationError(
                f"ranks {rank} and {peer} make different calls, and at least one of them is one that all ranks have "
                "agreed on before"
            )
    return [one for _, one in found]


def all_texts(transport: Transport, text: str, number: int = 0) -> list[str]:
    """The texts of all ranks, by rank.

    Raises
    ------
    CommunicationError
        The text of a rank belongs to a call with another number.
    """
    data = np.frombuffer(text.encode(), np.uint8)
    head = head_of(number, len(data))
    lengths = check_heads(transport.rank, head, _all_bytes(transport, head, [len(head)] * transport.size))
    try:
        return [bytes(found).decode() for found in _all_bytes(transport, data, lengths)]
    except UnicodeDecodeError as error:
        raise CommunicationError(f"rank {transport.rank} has received what is no text: {error}") from error


def _all_bytes(transport: Transport, data: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    own = transport.to_buffer(data)
    peers = [peer for peer in range(transport.size) if peer != transport.rank]
    buffers = {peer: transport.empty_bytes(lengths[peer]) for peer in peers}
    transport.exchange([(own, peer) for peer in peers], [(buffers[peer], peer) for peer in peers])
    return [data if peer == transport.rank else transport.to_host(buffers[peer]) for peer in range(transport.size)]
