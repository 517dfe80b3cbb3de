"""Processes that know only an address meet there, in spite of strangers, other jobs, silence and slowness."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from fa2cupy.distributed import CommunicationError, Communicator
from fa2cupy.distributed.transport import rendezvous
from fa2cupy.distributed.transport.launch import Launch
from fa2cupy.distributed.transport.rendezvous import broadcast

IDENTIFIER = bytes(range(128, 256))
REFUSED = b"\0"
HELLO_BYTES = rendezvous._HELLO.size + rendezvous._PROOF_BYTES


def free_port(host: str = "127.0.0.1") -> int:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        return server.getsockname()[1]


@pytest.fixture
def job() -> Launch:
    """Provides what rank 0 of two knows."""
    return Launch(0, 2, port=free_port(), token="job")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def begin(pool: ThreadPoolExecutor, job: Launch, timeout: float = 20.0) -> Future:
    """Starts rank 0, and returns when it listens."""
    call = pool.submit(broadcast, job, IDENTIFIER, timeout)
    connect(job).close()
    return call


def connect(job: Launch) -> socket.socket:
    for _ in range(400):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((job.host, job.port), timeout=10.0)
        time.sleep(0.01)
    raise AssertionError("rank 0 does not listen")


def everything(connection: socket.socket) -> bytes:
    """What comes until the other side ends the connection."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while more := connection.recv(4096):
            found += more
    return found


def meet(pool: ThreadPoolExecutor, job: Launch, rank_0: Future) -> None:
    """The ranks meet, whatever else has happened."""
    others = [pool.submit(broadcast, job._replace(rank=rank), None, 10.0) for rank in range(1, job.size)]
    assert [call.result(15) for call in (*others, rank_0)] == [IDENTIFIER] * job.size


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ranks_get_the_bytes_of_rank_0(size, job, pool):
    # Rank 0 comes last: the others try again until it listens.
    job = job._replace(size=size)
    others = [pool.submit(broadcast, job._replace(rank=rank), None, 10.0) for rank in range(1, size)]
    time.sleep(0.1)
    assert broadcast(job, IDENTIFIER, 10.0) == IDENTIFIER
    assert [call.result() for call in others] == [IDENTIFIER] * (size - 1)


def test_communicators_meet_with_the_token_of_their_environment(monkeypatch, pool):
    monkeypatch.setattr(
        "fa2cupy.distributed.transport.nccl.connect",
        lambda rank, size, share, timeout: share(None if rank else IDENTIFIER),
    )
    environment = {"WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}

    def of_rank(rank: int, token: str) -> Communicator:
        variables = {**environment, "RANK": str(rank), "FA2CUPY_JOB_TOKEN": token}
        return Communicator.from_env(variables, timeout=10.0)

    rank_0 = pool.submit(of_rank(0, "mine")._device)
    with pytest.raises(CommunicationError, match="another token"):
        of_rank(1, "yours")._device()
    assert of_rank(1, "mine")._device() == IDENTIFIER == rank_0.result()


# ------------------------------------------------------------------------------------------------- what connects


@pytest.mark.parametrize("text", [b"1\n", b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", b"\0" * 4096])
def test_a_stranger_is_told_why_it_gets_nothing(text, job, pool):
    rank_0 = begin(pool, job)
    with connect(job) as stranger:
        stranger.sendall(text)
        heard = everything(stranger)
    assert IDENTIFIER not in heard
    if len(text) < HELLO_BYTES:  # the end of a connection with unread bytes can overtake what was sent before
        assert b"what connected is no rank of fa2cupy.distributed" in heard
    meet(pool, job, rank_0)


def test_a_rank_of_another_job_is_refused(job, pool, caplog):
    rank_0 = begin(pool, job)
    with pytest.raises(CommunicationError, match=r"rank 1: rank 0 at 127.0.0.1:\d+ has refused.*FA2CUPY_JOB_TOKEN"):
        broadcast(job._replace(rank=1, token="another job"), None, 10.0)
    assert "rank 0 has refused a connection from 127.0.0.1: rank 1 has another token" in caplog.text
    meet(pool, job, rank_0)


@pytest.mark.parametrize(("size", "rank"), [(4, 1), (4, 3), (1000, 1)])
def test_ranks_of_another_world_size_are_refused(size, rank, job, pool):
    rank_0 = begin(pool, job)
    with pytest.raises(CommunicationError, match=f"WORLD_SIZE: .* got 2 on rank 0 and {size} on rank {rank}"):
        broadcast(job._replace(rank=rank, size=size), None, 10.0)
    meet(pool, job, rank_0)


def test_a_rank_that_is_there_is_not_replaced(job, pool):
    job = job._replace(size=3)
    rank_0 = begin(pool, job)
    assert broadcast(job._replace(rank=1), None, 10.0) == IDENTIFIER
    with pytest.raises(
        CommunicationError, match="RANK: two processes have 1; .* a MASTER_PORT and a FA2CUPY_JOB_TOKEN"
    ):
        broadcast(job._replace(rank=1), None, 10.0)
    assert broadcast(job._replace(rank=2), None, 10.0) == IDENTIFIER == rank_0.result(5)


def test_a_rank_that_has_not_got_the_bytes_can_come_again(job, pool):
    rank_0 = begin(pool, job)
    with connect(job) as first:
        first.sendall(hello_of(job._replace(rank=1), first))
        assert first.recv(1) == b"\1"
        time.sleep(0.05)
        assert not rank_0.done(), "a rank is there when it says that it has the bytes"
    meet(pool, job, rank_0)


@pytest.mark.parametrize("rank", [0, 2, 2**32 - 1])
def test_a_rank_that_cannot_be_is_refused(rank, job, pool):
    rank_0 = begin(pool, job)
    with connect(job) as client:
        client.sendall(hello_of(job._replace(rank=rank), client))
        heard = everything(client)
    assert heard.startswith(REFUSED) and b"RANK: expected 1 to 1 besides rank 0" in heard
    meet(pool, job, rank_0)


def hello_of(launch: Launch, connection: socket.socket) -> bytes:
    """What a rank answers to rank 0's greeting."""
    greeting = connection.recv(24, socket.MSG_WAITALL)
    hello = rendezvous._HELLO.pack(rendezvous._MAGIC, bytes(16), launch.rank, launch.size)
    return hello + rendezvous._proof(launch, b"rank", greeting[8:], hello)


def test_what_was_heard_once_does_not_open_the_door_again(job, pool):
    job = job._replace(size=3)
    rank_0 = begin(pool, job)
    with connect(job) as rank:
        heard = hello_of(job._replace(rank=1), rank)
    with connect(job) as listener:
        listener.recv(24, socket.MSG_WAITALL)
        listener.sendall(heard)
        assert everything(listener).startswith(REFUSED)
    meet(pool, job, rank_0)


def test_silent_clients_hold_up_nobody(job, pool):
    job = job._replace(size=4)
    rank_0 = begin(pool, job)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(job)) for _ in range(150)]  # more than rank 0 keeps
        assert len(everything(silent[0])) == 24, "a greeting, and the end of the connection"
        half = stack.enter_context(connect(job))
        half.sendall(rendezvous._MAGIC)
        start = time.monotonic()
        meet(pool, job, rank_0)
        assert time.monotonic() - start < 5.0


def test_slow_clients_hold_up_nobody_and_the_time_is_that_of_the_whole(job, pool):
    stop = threading.Event()

    def dribble() -> None:
        with connect(job) as client, contextlib.suppress(OSError):
            for byte in rendezvous._MAGIC + bytes(60):
                client.sendall(bytes([byte]))
                if stop.wait(0.05):
                    return

    job = job._replace(size=3)
    start = time.monotonic()
    rank_0 = begin(pool, job, timeout=1.2)
    slow = [pool.submit(dribble) for _ in range(3)]
    assert broadcast(job._replace(rank=1), None, 10.0) == IDENTIFIER
    assert not rank_0.done()
    with pytest.raises(CommunicationError, match=r"rank 0 has waited 1.2 s for ranks \[2\] to connect"):
        rank_0.result(10)
    assert time.monotonic() - start < 3.0
    stop.set()
    for call in slow:
        call.result()


def test_long_messages_are_not_read(job, pool):
    rank_0 = begin(pool, job)
    with connect(job) as client, pytest.raises(OSError):
        for _ in range(2000):
            client.sendall(rendezvous._MAGIC + bytes(2**16))
    meet(pool, job, rank_0)


def test_what_was_refused_is_in_the_last_error(job, pool):
    rank_0 = begin(pool, job, timeout=1.0)
    with pytest.raises(CommunicationError, match="WORLD_SIZE"):
        broadcast(job._replace(rank=1, size=3), None, 10.0)
    with pytest.raises(CommunicationError, match=r"for ranks \[1\] to connect .*; refused: 127.0.0.1: WORLD_SIZE"):
        rank_0.result(10)


# ---------------------------------------------------------------------------------------------- what is connected to


@contextlib.contextmanager
def server_of(job: Launch, serve: Callable[[socket.socket], object]) -> Iterator[None]:
    """Listens in rank 0's place."""
    with socket.create_server((job.host, job.port)) as server:

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection, contextlib.suppress(OSError):
                        serve(connection)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_another_service_is_not_rank_0(job):
    with server_of(job, lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")):
        with pytest.raises(CommunicationError, match=r"what listens at .* \(MASTER_ADDR, MASTER_PORT\) is not rank 0"):
            broadcast(job._replace(rank=1), None, 10.0)


@pytest.mark.parametrize("length", [0, 128, 65535])
def test_who_does_not_know_the_token_is_not_rank_0(length, job):
    def pretend(connection: socket.socket) -> None:
        connection.sendall(rendezvous._MAGIC + bytes(16))
        connection.recv(HELLO_BYTES, socket.MSG_WAITALL)
        connection.sendall(struct.pack("!?H32s", True, length, b"\1" * 32) + bytes(length))

    with server_of(job, pretend), pytest.raises(CommunicationError, match="does not know the token of this job"):
        broadcast(job._replace(rank=1), None, 10.0)


@pytest.mark.parametrize("text", [b"", rendezvous._MAGIC + bytes(16)])
def test_a_slow_or_silent_server_holds_a_rank_until_the_end_of_its_time(text, job):
    def dribble(connection: socket.socket) -> None:
        for byte in text + bytes(0 if not text else 60):
            connection.sendall(bytes([byte]))
            time.sleep(0.05)
        if not text:
            connection.settimeout(5.0)
            connection.recv(1)

    start = time.monotonic()
    with server_of(job, dribble), pytest.raises(CommunicationError, match="rank 1 has tried for 0.5 s to reach rank 0"):
        broadcast(job._replace(rank=1), None, 0.5)
    assert time.monotonic() - start < 5.0


def test_a_server_that_accepts_nobody(job):
    """Connections wait in a full queue, as they do for a host that does not answer."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(socket.create_server((job.host, job.port), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((job.host, job.port))
        start = time.monotonic()
        with pytest.raises(CommunicationError, match=r"rank 1 has tried for 0.2 s .* at last: timed out"):
            broadcast(job._replace(rank=1), None, 0.2)
        assert time.monotonic() - start < 5.0


def test_a_connection_that_ends_is_tried_again(job, pool):
    with server_of(job, lambda connection: None):
        other = pool.submit(broadcast, job._replace(rank=1), None, 10.0)
        time.sleep(0.1)
    assert broadcast(job, IDENTIFIER, 10.0) == IDENTIFIER == other.result()


# ------------------------------------------------------------------------------------------------ hosts, ports, time


def test_ranks_that_do_not_come_are_named(job):
    with pytest.raises(CommunicationError, match=r"rank 0 has waited 0.2 s for ranks \[1, 2\] to connect"):
        broadcast(job._replace(size=3), IDENTIFIER, 0.2)
    with pytest.raises(CommunicationError, match=r"rank 1 has tried for 0.2 s to reach rank 0 at 127.0.0.1:.*refused"):
        broadcast(job._replace(rank=1), None, 0.2)


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_hosts_of_ipv6(host, pool):
    try:
        port = free_port("::1")
    except OSError:
        pytest.skip("this host has no IPv6")
    job = Launch(0, 3, host=host, port=port)
    meet(pool, job, pool.submit(broadcast, job, IDENTIFIER, 10.0))
    if ":" in host:
        with pytest.raises(CommunicationError, match=re.escape(f"to reach rank 0 at [::1]:{port} ")):
            broadcast(job._replace(rank=1), None, 0.1)


def addresses_of(monkeypatch, found: list) -> None:
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, port, **options: [(family, socket.SOCK_STREAM, 6, "", address) for family, address in found],
    )


def test_all_addresses_of_a_name_are_tried(job, monkeypatch, pool):
    """Rank 0 has the second one alone; the first one is a documentation address, which nobody has."""
    rank_0 = begin(pool, job)
    addresses_of(monkeypatch, [(socket.AF_INET, ("127.0.0.2", job.port)), (socket.AF_INET, ("127.0.0.1", job.port))])
    meet(pool, job._replace(host="node0"), rank_0)


def test_rank_0_listens_at_all_addresses_of_a_name(job, monkeypatch, pool):
    addresses_of(monkeypatch, [(socket.AF_INET, (host, job.port)) for host in ("192.0.2.1", "127.0.0.1", "127.0.0.2")])
    rank_0 = pool.submit(broadcast, job._replace(host="node0", size=3), IDENTIFIER, 10.0)
    monkeypatch.undo()
    for rank, host in ((1, "127.0.0.1"), (2, "127.0.0.2")):
        assert broadcast(job._replace(rank=rank, size=3, host=host), None, 10.0) == IDENTIFIER
    assert rank_0.result() == IDENTIFIER


@pytest.mark.parametrize("rank", [0, 1])
def test_an_unknown_host_is_named_soon(rank, job, monkeypatch, caplog):
    def unknown(*arguments, **options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(rendezvous, "_RESOLVE_S", 0.2)
    start = time.monotonic()
    what = rf"rank {rank} has found no address of the host 'nowhere' in 0.2 s \(Name or service.*; set MASTER_ADDR"
    with pytest.raises(CommunicationError, match=what):
        broadcast(job._replace(rank=rank, host="nowhere"), None if rank else IDENTIFIER, 600.0)
    assert time.monotonic() - start < 5.0
    assert "MASTER_ADDR: there is no address of the host 'nowhere'" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_host_that_becomes_known_is_found(job, monkeypatch, pool):
    known, find = threading.Event(), socket.getaddrinfo

    def find_later(*arguments, **options):
        if not known.is_set():
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return find(*arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", find_later)
    calls = [pool.submit(broadcast, job._replace(rank=rank), None if rank else IDENTIFIER, 10.0) for rank in (0, 1)]
    time.sleep(0.1)
    known.set()
    assert [call.result() for call in calls] == [IDENTIFIER] * 2


@pytest.mark.parametrize("host", ["a..b", "x" * 70])
def test_what_is_no_name_of_a_host(host, job):
    with pytest.raises(ValueError, match=f"MASTER_ADDR: '{host}' is no name of a host"):
        broadcast(job._replace(rank=1, host=host), None, 10.0)


def test_a_port_that_is_taken(job, pool):
    rank_0 = begin(pool, job)
    what = r"rank 0 cannot listen at 127.0.0.1:\d+ .*another process listens there.*choose a free port.*MASTER_PORT"
    with pytest.raises(CommunicationError, match=what):
        broadcast(job._replace(token="another job"), IDENTIFIER, 10.0)
    meet(pool, job, rank_0)


def test_an_address_of_another_host(job):
    with pytest.raises(CommunicationError, match=r"cannot listen at 192.0.2.1:\d+ .*must be an address of the host on"):
        broadcast(job._replace(host="192.0.2.1"), IDENTIFIER, 10.0)
