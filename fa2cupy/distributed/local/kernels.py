"""Launches of the kernels between attention calls, on the current device and CuPy's current stream."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np

from ...families.device import DeviceInfo
from ...jit.spec import KernelSpec

__all__ = ["Launch", "Work", "launch"]


class Work(NamedTuple):
    """What a launch takes besides a stream.

    Attributes
    ----------
    spec_of : callable
        A function of `fa2cupy.plan.ranks`, and `kind` what it takes besides the architecture.
    kind : tuple
    blocks : int
    front : bytes
        The record, as far as it has content.
    places : tuple of int
        Where the front has addresses, in words of 8 bytes.
    """

    spec_of: Callable[..., KernelSpec]
    kind: tuple[Hashable, ...]
    blocks: int
    front: bytes
    places: tuple[int, ...]

    @property
    def addresses(self) -> list[int]:
        """Those in the front."""
        found: list[int] = np.frombuffer(self.front, np.int64)[[*self.places]].tolist()
        return found


class Launch:
    """A launch of a kernel whose record has no named pointers, to be repeated with other addresses in its record.

    Parameters
    ----------
    work : Work
    """

    def __init__(self, work: Work):
        from cupy.cuda import driver, runtime

        function, threads, nbytes = _loaded(work.spec_of, work.kind, runtime.getDevice())
        record = np.zeros(nbytes, np.uint8)
        record[: len(work.front)] = np.frombuffer(work.front, np.uint8)
        self._words, self._places = record.view(np.int64), np.array(work.places)
        self._parameters = (ctypes.c_void_p * 1)(record.ctypes.data)
        self._address = ctypes.addressof(self._parameters)
        self._launch = functools.partial(driver.launchKernel, function.ptr, work.blocks, 1, 1, threads, 1, 1, 0)

    def move(self, addresses: np.ndarray) -> None:
        """Replaces the addresses in the record."""
        self._words[self._places] = addresses

    def __call__(self, stream: int) -> None:
        """Launches the kernel on the stream at this address."""
        self._launch(stream, self._address, 0)


def launch(work: Work) -> None:
    """Makes a `Launch` once, on CuPy's current stream."""
    import cupy

    Launch(work)(cupy.cuda.get_current_stream().ptr)


@functools.lru_cache(maxsize=None)
def _loaded(spec_of: Callable[..., KernelSpec], kind: tuple[Hashable, ...], device: int) -> tuple[Any, int, int]:
    """The kernel as ``cupy.cuda.Function`` on the current device, whose number is `device`; its threads; its record."""
    from ...gpu.launch import load_kernel

    spec = spec_of(DeviceInfo.current().arch, *kind)
    return load_kernel(spec), spec.tile.num_threads, spec.params.nbytes
