"""The first meeting of processes that know only an address: rank 0 passes a few numbers on."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Sequence

from .messages import CommunicationError

__all__ = ["broadcast"]

_RETRY_S = 0.05


def broadcast(
    rank: int, size: int, numbers: Sequence[int] | None, address: tuple[str, int], timeout: float
) -> Sequence[int]:
    """The numbers of rank 0, on all ranks.

    Parameters
    ----------
    rank, size : int
    numbers : sequence of int or None
        Those of rank 0; None on the others.
    address : tuple (host, port)
        Where rank 0 listens.
    timeout : float
        Seconds to wait for all ranks.

    Raises
    ------
    CommunicationError
        Not all ranks came, or rank 0 did not listen.
    """
    end = time.monotonic() + timeout
    if numbers is None:
        return _receive(rank, address, end, timeout)
    if size > 1:
        _send(size, numbers, address, end, timeout)
    return numbers


def _send(size: int, numbers: Sequence[int], address: tuple[str, int], end: float, timeout: float) -> None:
    missing = set(range(1, size))
    try:
        server = socket.create_server(address)
    except OSError as error:
        where = ":".join(map(str, address))
        raise CommunicationError(f"rank 0 cannot listen at {where} (MASTER_ADDR, MASTER_PORT): {error}") from error
    with server:
        while missing:
            server.settimeout(max(_RETRY_S, end - time.monotonic()))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                raise CommunicationError(
                    f"rank 0 has waited {timeout:g} s for ranks {sorted(missing)} to connect"
                ) from None
            with connection, contextlib.suppress(OSError, ValueError):
                connection.settimeout(max(_RETRY_S, min(5.0, end - time.monotonic())))
                with connection.makefile("rw", encoding="ascii") as lines:
                    found = int(lines.readline())
                    lines.write(json.dumps(list(numbers)) + "\n")
                    lines.flush()
                missing.discard(found)


def _receive(rank: int, address: tuple[str, int], end: float, timeout: float) -> Sequence[int]:
    while time.monotonic() < end:
        try:
            left = max(_RETRY_S, end - time.monotonic())
            with (
                socket.create_connection(address, timeout=left) as connection,
                connection.makefile("rw", encoding="ascii") as lines,
            ):
                lines.write(f"{rank}\n")
                lines.flush()
                return [int(number) for number in json.loads(lines.readline())]
        except (OSError, ValueError):  # rank 0 does not listen yet, or has ended the connection
            time.sleep(_RETRY_S)
    where = ":".join(map(str, address))
    raise CommunicationError(f"rank {rank} has tried for {timeout:g} s to reach rank 0 at {where}")
