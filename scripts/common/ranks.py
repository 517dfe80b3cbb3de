"""Processes of several GPUs of one host."""

from __future__ import annotations

import contextlib
import os
import socket

import fa2cupy.distributed as dist

__all__ = ["communicator", "free_ports"]


def free_ports(count: int) -> list[int]:
    """Returns unused ports of this host."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


def communicator(
    rank: int, ranks: int, port: int, timeout: float, ranks_per_host: int | None = None
) -> dist.Communicator:
    """Selects the GPU with the number of the rank, and returns the communicator of its process."""
    import cupy

    cupy.cuda.Device(rank).use()
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return dist.Communicator.from_env(environment, ranks_per_host=ranks_per_host, timeout=timeout)
