"""Launches of the kernels between attention calls, on the current device and CuPy's current stream."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from ...families.device import DeviceInfo
from ...jit.spec import KernelSpec

__all__ = ["Launch", "launch"]


class Launch:
    """A launch of a kernel whose record has no named pointers, to be repeated with other values in its record.

    Parameters
    ----------
    spec_of : callable
        A function of `fa2cupy.plan.ranks`, and `kind` what it takes besides the architecture.
    kind : tuple
    blocks : int
    front : bytes
        The record, as far as it has content.

    Attributes
    ----------
    record : numpy.ndarray
        The bytes of the record.
    """

    def __init__(self, spec_of: Callable[..., KernelSpec], kind: tuple[Hashable, ...], blocks: int, front: bytes):
        from cupy.cuda import driver, runtime

        function, threads, nbytes = _loaded(spec_of, kind, runtime.getDevice())
        self.record = np.zeros(nbytes, np.uint8)
        self.record[: len(front)] = np.frombuffer(front, np.uint8)
        self._parameters = (ctypes.c_void_p * 1)(self.record.ctypes.data)
        self._address = ctypes.addressof(self._parameters)
        self._launch = functools.partial(driver.launchKernel, function.ptr, blocks, 1, 1, threads, 1, 1, 0)

    def __call__(self, stream: int) -> None:
        """Launches the kernel on the stream at this address."""
        self._launch(stream, self._address, 0)


def launch(spec_of: Callable[..., KernelSpec], kind: tuple[Hashable, ...], blocks: int, record: bytes) -> None:
    """Makes a `Launch` once, given the front of the record."""
    import cupy

    Launch(spec_of, kind, blocks, record)(cupy.cuda.get_current_stream().ptr)


@functools.lru_cache(maxsize=None)
def _loaded(spec_of: Callable[..., KernelSpec], kind: tuple[Hashable, ...], device: int) -> tuple[Any, int, int]:
    """The kernel as ``cupy.cuda.Function`` on the current device, whose number is `device`; its threads; its record."""
    from ...gpu.launch import load_kernel

    spec = spec_of(DeviceInfo.current().arch, *kind)
    return load_kernel(spec), spec.tile.num_threads, spec.params.nbytes
