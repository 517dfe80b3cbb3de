"""Compilation in child processes, because some malformed inline PTX takes the compiler's whole process down."""

from __future__ import annotations

import multiprocessing
import queue
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection

from .cache import cached_kernel
from .spec import KernelSpec

__all__ = ["Report", "compile_all", "compile_to_cache", "serve"]


@dataclass(frozen=True)
class Report:
    """The result for one kernel; `failure` is empty if it compiled."""

    registers: int = 0
    spill_bytes: int = 0
    seconds: float = 0.0
    failure: str = ""


def compile_to_cache(spec: KernelSpec) -> Report:
    """Compiles into the disk cache, from which other processes load."""
    kernel = cached_kernel(spec)
    return Report(kernel.registers, kernel.spill_bytes, kernel.seconds)


def compile_all(
    specs: Sequence[KernelSpec],
    jobs: int,
    done: Callable[[], object] | None = None,
    task: Callable[[KernelSpec], Report] = compile_to_cache,
    timeout_s: float = 180.0,
) -> list[Report]:
    """Compiles `jobs` kernels at a time; calls `done` after each, in this thread.

    A child compiles one kernel after the other, because its start takes longer than many kernels take to compile. It is
    replaced when it dies, or when a kernel takes longer than `timeout_s`.
    """
    jobs = max(1, min(jobs, len(specs)))
    children = [_Child(task, timeout_s) for _ in range(jobs)]
    idle: queue.SimpleQueue[_Child] = queue.SimpleQueue()
    for child in children:
        idle.put(child)

    def compile_one(spec: KernelSpec) -> Report:
        child = idle.get()
        try:
            return child.compile(spec)
        finally:
            idle.put(child)

    reports = []
    pool = ThreadPoolExecutor(jobs)
    try:
        for report in pool.map(compile_one, specs):
            reports.append(report)
            if done is not None:
                done()
    finally:  # after Ctrl-C, no compilation is waited for
        pool.shutdown(wait=False, cancel_futures=True)
        for child in children:
            child.stop()
    return reports


class _Child:
    """A process that compiles the kernels that are sent to it, started with the first of them."""

    def __init__(self, task: Callable[[KernelSpec], Report], timeout_s: float):
        self._task, self._timeout_s = task, timeout_s
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None

    def compile(self, spec: KernelSpec) -> Report:
        process, connection = self._running = self._running or _start()
        try:
            connection.send((self._task, spec))
            if connection.poll(self._timeout_s):
                return connection.recv()
            failure = f"took longer than {self._timeout_s:.0f} s"
        except (EOFError, OSError):
            failure = f"compiler crashed (exit code {process.wait()})"
        self.stop()
        return Report(failure=failure)

    def stop(self) -> None:
        """Ends the process, whatever it is doing."""
        if self._running is not None:
            (process, connection), self._running = self._running, None
            process.kill()
            process.wait()
            connection.close()


def _start() -> tuple[subprocess.Popen[bytes], Connection]:
    # A process of `multiprocessing` would run the caller's script again, unless that is written for it, or inherit a
    # CUDA context that it must not use.
    ours, theirs = multiprocessing.Pipe()
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve({theirs.fileno()})"
    with theirs:  # closed here, so that the pipe ends when the child dies
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is the parent's alone
        )
    return process, ours


def serve(descriptor: int) -> None:
    """Compiles what comes through a pipe until that ends: the work of a child."""
    with Connection(descriptor) as connection:
        while True:
            try:
                task, spec = connection.recv()
            except EOFError:
                return
            try:
                report = task(spec)
            except Exception as error:  # the compiler's refusal is this kernel's result
                report = Report(failure=f"refused: {error}")
            connection.send(report)
