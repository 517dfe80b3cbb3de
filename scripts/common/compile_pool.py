"""Compilation in child processes, because some malformed inline PTX takes the compiler's whole process down."""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fa2cupy.jit.cache import cached_kernel
from fa2cupy.jit.spec import KernelSpec

__all__ = ["Report", "compile_all", "compile_to_cache"]

_context = multiprocessing.get_context("spawn")  # a forked child would inherit a CUDA context that it must not use


@dataclass(frozen=True)
class Report:
    """The result for one kernel; `failure` is empty if it compiled."""

    registers: int = 0
    spill_bytes: int = 0
    seconds: float = 0.0
    failure: str = ""


def compile_to_cache(spec: KernelSpec) -> Report:
    """Compiles into the disk cache, from which the parent loads."""
    kernel = cached_kernel(spec)
    return Report(kernel.registers, kernel.spill_bytes, kernel.seconds)


def compile_all(
    specs: Sequence[KernelSpec],
    jobs: int,
    advance: Callable[[], object],
    task: Callable[[KernelSpec], Report] = compile_to_cache,
    timeout_s: float = 180.0,
) -> list[Report]:
    """Compiles `jobs` kernels at a time; calls `advance` once for each, in this thread.

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
    try:
        with ThreadPoolExecutor(jobs) as pool:
            for report in pool.map(compile_one, specs):
                reports.append(report)
                advance()
    finally:
        for child in children:
            child.stop()
    return reports


class _Child:
    """A process that compiles the kernels that are sent to it, started with the first of them."""

    def __init__(self, task: Callable[[KernelSpec], Report], timeout_s: float):
        self._task, self._timeout_s = task, timeout_s
        self._process = self._connection = None

    def compile(self, spec: KernelSpec) -> Report:
        if self._process is None:
            self._start()
        try:
            self._connection.send(spec)
            if self._connection.poll(self._timeout_s):
                return self._connection.recv()
            failure = f"took longer than {self._timeout_s:.0f} s"
        except (EOFError, OSError):
            self._process.join()
            failure = f"compiler crashed (exit code {self._process.exitcode})"
        self.stop()
        return Report(failure=failure)

    def stop(self) -> None:
        """Ends the process, whatever it is doing."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = self._connection = None

    def _start(self) -> None:
        self._connection, theirs = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(theirs, self._task), daemon=True)
        self._process.start()
        theirs.close()  # the pipe then ends when the child dies


def _serve(connection, task: Callable[[KernelSpec], Report]) -> None:
    while True:
        try:
            spec = connection.recv()
        except EOFError:
            return
        try:
            report = task(spec)
        except Exception as error:  # the compiler's refusal is this kernel's result
            report = Report(failure=f"refused: {error}")
        connection.send(report)
