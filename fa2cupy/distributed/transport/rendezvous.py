"""The first meeting of processes that know only an address: rank 0 passes a few bytes on.

Anybody can connect to a port. Rank 0 and another rank therefore prove to each other that they know the token of the
job: each sends an HMAC, with the token as its key, of random numbers that both have chosen. The token itself is never
sent, and a proof that others have heard cannot be used again. What rank 0 passes on is not encrypted.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import secrets
import selectors
import socket
import struct
import time
from typing import Any

from .launch import JOB_TOKEN, Launch
from .messages import CommunicationError

__all__ = ["broadcast"]

# Rank 0 greets with the magic and a nonce, a rank says hello with a proof, rank 0 replies with a text, and the rank
# ends with one byte.
_MAGIC = b"fa2cupy1"
_NONCE_BYTES = 16
_PROOF_BYTES = 32
_HELLO = struct.Struct(f"!{len(_MAGIC)}s{_NONCE_BYTES}sII")  # rank, size
_REPLY = struct.Struct(f"!?H{_PROOF_BYTES}s")  # whether the rank is accepted, length of the text
_DONE = b"\1"
_MAX_TEXT = 1024
_MAX_CLIENTS = 128  # that have connected and are not done
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 0.5
_ATTEMPT_S = 10.0  # for a connection and its answer: rank 0 answers at once
_RESOLVE_S = 30.0
_log = logging.getLogger("fa2cupy")


def broadcast(launch: Launch, own: bytes | None, timeout: float) -> bytes:
    """The bytes of rank 0, on all ranks.

    Parameters
    ----------
    launch : Launch
    own : bytes or None
        Those of rank 0, at most 1024; None on the others.
    timeout : float
        Seconds for all of it. Only the search for an unknown host can take longer, if a name server does not answer.

    Raises
    ------
    CommunicationError
        Not all ranks came, rank 0 cannot listen or did not, or it belongs to another job.
    ValueError
        MASTER_ADDR is no name of a host.
    """
    end = time.monotonic() + timeout
    if launch.rank:
        return _receive(launch, end, timeout)
    if own is None or len(own) > _MAX_TEXT:
        raise ValueError(f"own: expected at most {_MAX_TEXT} bytes on rank 0")
    if launch.size > 1:
        with contextlib.ExitStack() as stack:
            servers = [stack.enter_context(server) for server in _listen(launch, end)]
            with contextlib.closing(_Reception(launch, own)) as reception:
                reception.serve(servers, end, timeout)
    return own


class _Client:
    """A connection of rank 0."""

    def __init__(self, connection: socket.socket, host: str):
        self.connection, self.host = connection, host
        self.nonce = secrets.token_bytes(_NONCE_BYTES)
        self.heard = b""
        self.rank: int | None = None  # once it has been accepted


class _Reception:
    """What rank 0 does: it serves all connections side by side, so that none waits for another."""

    def __init__(self, launch: Launch, text: bytes):
        self._launch, self._text = launch, text
        self._missing = set(range(1, launch.size))
        self._nonces: dict[int, bytes] = {}  # of the ranks that have been accepted: a process keeps its own
        self._clients: dict[socket.socket, _Client] = {}  # the oldest first
        self._refusals: dict[str, None] = {}
        self._selector = selectors.DefaultSelector()

    def close(self) -> None:
        """Ends all connections."""
        for client in list(self._clients.values()):
            self._drop(client)
        self._selector.close()

    def serve(self, servers: list[socket.socket], end: float, timeout: float) -> None:
        """Returns when every rank has said that it has the text."""
        for server in servers:
            server.setblocking(False)
            self._selector.register(server, selectors.EVENT_READ)
        while self._missing:
            left = end - time.monotonic()
            if left <= 0:
                refused = "".join(f"; refused: {text}" for text in self._refusals)
                raise CommunicationError(
                    f"rank 0 has waited {timeout:g} s for ranks {sorted(self._missing)} to connect to "
                    f"{self._launch.where} (MASTER_ADDR, MASTER_PORT){refused}"
                )
            for key, _ in self._selector.select(left):
                if key.data is None:
                    self._accept(key.fileobj)
                elif key.data.connection in self._clients:  # it may have been dropped since
                    self._hear(key.data)

    def _accept(self, server: Any) -> None:
        try:
            connection, address = server.accept()
        except (BlockingIOError, ConnectionError):  # the client is gone
            return
        except OSError:  # too many open files
            self._drop_oldest()
            return
        if len(self._clients) >= _MAX_CLIENTS:
            self._drop_oldest()
        connection.setblocking(False)
        client = self._clients[connection] = _Client(connection, address[0])
        self._selector.register(connection, selectors.EVENT_READ, client)
        self._send(client, _MAGIC + client.nonce)

    def _drop_oldest(self) -> None:
        if self._clients:
            self._drop(next(iter(self._clients.values())))
        else:
            time.sleep(_FIRST_PAUSE_S)

    def _drop(self, client: _Client) -> None:
        if client.rank in self._missing:
            self._nonces.pop(client.rank, None)  # its process may be started again
        del self._clients[client.connection]
        self._selector.unregister(client.connection)
        client.connection.close()

    def _send(self, client: _Client, message: bytes) -> None:
        """Sends a message that fits the empty buffer of a connection, and ends the connection if it does not fit."""
        try:
            sent = client.connection.send(message)
        except OSError:
            sent = 0
        if sent < len(message):
            self._drop(client)

    def _hear(self, client: _Client) -> None:
        try:
            wanted = _HELLO.size + _PROOF_BYTES - len(client.heard) if client.rank is None else 1
            heard = client.connection.recv(wanted)
        except BlockingIOError:
            return
        except OSError:
            heard = b""
        if client.rank is not None or not heard:
            if heard == _DONE:
                self._missing.discard(client.rank)
            self._drop(client)
            return
        client.heard += heard
        if not _MAGIC.startswith(client.heard[: len(_MAGIC)]):
            self._refuse(client, "what connected is no rank of fa2cupy.distributed, or of another version")
        elif len(client.heard) == _HELLO.size + _PROOF_BYTES:
            self._answer(client, client.heard[: _HELLO.size], client.heard[_HELLO.size :])

    def _answer(self, client: _Client, hello: bytes, proof: bytes) -> None:
        _, nonce, rank, size = _HELLO.unpack(hello)
        another = f"if it is one of another job, give each job a MASTER_PORT and a {JOB_TOKEN} of its own"
        if not hmac.compare_digest(proof, _proof(self._launch, b"rank", client.nonce, hello)):
            why_not = (
                f"rank {rank} has another token of the job than rank 0; {another}; if it is one of this job, set "
                f"{JOB_TOKEN} to the same text on all ranks"
            )
        elif size != self._launch.size:
            why_not = (
                "WORLD_SIZE: expected the same on all ranks, got "
                f"{self._launch.size} on rank 0 and {size} on rank {rank}; {another}"
            )
        elif not 1 <= rank < size:
            why_not = f"RANK: expected 1 to {size - 1} besides rank 0, got {rank}"
        elif self._nonces.setdefault(rank, nonce) != nonce:
            why_not = f"RANK: two processes have {rank}; {another}"
        else:
            client.rank = rank
            text = self._text
            proof = _proof(self._launch, b"rank 0", nonce + client.nonce, text)
            self._send(client, _REPLY.pack(True, len(text), proof) + text)
            return
        self._refuse(client, why_not)

    def _refuse(self, client: _Client, text: str) -> None:
        told = f"{client.host}: {text}"
        if told not in self._refusals and len(self._refusals) < 8:
            self._refusals[told] = None
            _log.warning("rank 0 has refused a connection from %s", told)
        data = text.encode()[:_MAX_TEXT]
        self._send(client, _REPLY.pack(False, len(data), b"") + data)
        if client.connection in self._clients:
            self._drop(client)


def _proof(launch: Launch, side: bytes, nonces: bytes, text: bytes) -> bytes:
    """Proves that a side knows the token, to the other side, which has chosen one of the numbers."""
    return hmac.digest(launch.token.encode("utf-8", "surrogateescape"), side + nonces + text, "sha256")


def _listen(launch: Launch, end: float) -> list[socket.socket]:
    """Listens at all addresses of this host that MASTER_ADDR stands for: ranks may try any of them first."""
    servers: list[socket.socket] = []
    reason: OSError | None = None
    for family, address in _addresses(launch, end):
        try:
            servers.append(socket.create_server(address, family=family))
        except OSError as error:
            reason = error
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                break
    else:
        if servers:
            return servers
    for server in servers:
        server.close()
    assert reason is not None
    if reason.errno == errno.EADDRINUSE:
        advice = (
            "another process listens there, such as rank 0 of another job or torchrun itself: choose a free port for "
            "all ranks, with MASTER_PORT or Communicator.from_env({**os.environ, 'MASTER_PORT': '29501'})"
        )
    elif reason.errno == errno.EADDRNOTAVAIL:
        advice = "MASTER_ADDR must be an address of the host on which rank 0 runs"
    else:
        advice = "set MASTER_ADDR and MASTER_PORT, on all ranks, to an address and a port where rank 0 may listen"
    raise CommunicationError(
        f"rank 0 cannot listen at {launch.where} (MASTER_ADDR, MASTER_PORT): {reason.strerror or reason}; {advice}"
    ) from reason


def _addresses(launch: Launch, end: float) -> list[tuple[socket.AddressFamily, Any]]:
    """The addresses of MASTER_ADDR, as pairs (family, address); a name may become known while a job starts."""
    wait = min(_RESOLVE_S, end - time.monotonic())
    last = time.monotonic() + wait
    told = False
    while True:
        try:
            found = socket.getaddrinfo(launch.host, launch.port, type=socket.SOCK_STREAM)
            return list(dict.fromkeys((family, address) for family, _, _, _, address in found))
        except UnicodeError as error:
            raise ValueError(f"MASTER_ADDR: {launch.host!r} is no name of a host ({error})") from error
        except OSError as error:
            if time.monotonic() >= last:
                raise CommunicationError(
                    f"rank {launch.rank} has found no address of the host {launch.host!r} in {wait:.3g} s "
                    f"({error.strerror or error}); set MASTER_ADDR, on all ranks, to a name or an address of rank "
                    "0's host"
                ) from error
            if not told:
                _log.warning(
                    "MASTER_ADDR: there is no address of the host %r (%s); rank %d tries again for %.3g s",
                    launch.host,
                    error.strerror or error,
                    launch.rank,
                    wait,
                )
                told = True
            time.sleep(max(0.0, min(_LAST_PAUSE_S, last - time.monotonic())))


def _receive(launch: Launch, end: float, timeout: float) -> bytes:
    nonce, pause = secrets.token_bytes(_NONCE_BYTES), _FIRST_PAUSE_S
    reason: OSError | None = None
    while time.monotonic() < end:
        for family, address in _addresses(launch, end):
            attempt_end = min(end, time.monotonic() + _ATTEMPT_S)
            try:
                with socket.socket(family, socket.SOCK_STREAM) as connection:
                    connection.settimeout(_left(attempt_end))
                    connection.connect(address)
                    return _ask(connection, launch, nonce, attempt_end)
            except OSError as error:  # rank 0 does not listen yet, or the connection has ended
                reason = error
        time.sleep(max(0.0, min(pause, end - time.monotonic())))
        pause = min(1.5 * pause, _LAST_PAUSE_S)
    raise CommunicationError(
        f"rank {launch.rank} has tried for {timeout:g} s to reach rank 0 at {launch.where} (MASTER_ADDR, MASTER_PORT), "
        f"at last: {reason}; rank 0 must have this address and make the same call"
    )


def _ask(connection: socket.socket, launch: Launch, nonce: bytes, end: float) -> bytes:
    """What rank 0 passes on.

    Raises
    ------
    CommunicationError
        It refuses this rank, or it is not rank 0 of this job.
    OSError
        The connection has ended, or the time is up.
    """
    if _exactly(connection, len(_MAGIC), end) != _MAGIC:
        raise CommunicationError(
            f"rank {launch.rank}: what listens at {launch.where} (MASTER_ADDR, MASTER_PORT) is not rank 0 of "
            "fa2cupy.distributed, or has another version; choose a free port of rank 0's host for all ranks"
        )
    other = _exactly(connection, _NONCE_BYTES, end)
    hello = _HELLO.pack(_MAGIC, nonce, launch.rank, launch.size)
    connection.sendall(hello + _proof(launch, b"rank", other, hello))
    is_accepted, length, proof = _REPLY.unpack(_exactly(connection, _REPLY.size, end))
    text = _exactly(connection, length, end)
    if not is_accepted:
        raise CommunicationError(
            f"rank {launch.rank}: rank 0 at {launch.where} has refused this rank: {text.decode(errors='replace')}"
        )
    if not hmac.compare_digest(proof, _proof(launch, b"rank 0", nonce + other, text)):
        raise CommunicationError(
            f"rank {launch.rank}: what listens at {launch.where} (MASTER_ADDR, MASTER_PORT) does not know the token of "
            f"this job; give the job a MASTER_PORT of its own, and all of its ranks the same {JOB_TOKEN}"
        )
    connection.sendall(_DONE)
    return text


def _exactly(connection: socket.socket, count: int, end: float) -> bytes:
    found = b""
    while len(found) < count:
        connection.settimeout(_left(end))
        more = connection.recv(count - len(found))
        if not more:
            raise ConnectionError("the connection has ended")
        found += more
    return found


def _left(end: float) -> float:
    """Seconds that are left.

    Raises
    ------
    TimeoutError
        None are.
    """
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("there was no answer")
    return left
