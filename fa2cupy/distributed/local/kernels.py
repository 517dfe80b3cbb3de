"""Launches of the kernels between attention calls, on the current device and CuPy's current stream."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Hashable
from typing import Any

from ...families.device import DeviceInfo
from ...jit.spec import KernelSpec

__all__ = ["Launch", "launch"]


class Launch:
    """A launch of a kernel whose record has no named pointers, to be repeated with other values.

    Parameters
    ----------
    spec_of : callable
        A function of `fa2cupy.plan.ranks`, and `kind` what it takes besides the architecture.
    kind : tuple
    blocks : int
    form : str
        The values of the record, as for `struct`, as far as it has content.
    """

    def __init__(self, spec_of: Callable[..., KernelSpec], kind: tuple[Hashable, ...], blocks: int, form: str):
        from cupy.cuda import driver, runtime

        function, threads, nbytes = _loaded(spec_of, kind, runtime.getDevice())
        self._buffer = ctypes.create_string_buffer(nbytes)
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self._buffer))
        self._record = ctypes.addressof(self._parameters)
        self._pack = functools.partial(struct.Struct(form).pack_into, self._buffer, 0)
        self._launch = functools.partial(driver.launchKernel, function.ptr, blocks, 1, 1, threads, 1, 1, 0)

    def __call__(self, stream: int, *values: Any) -> None:
        """Launches the kernel on the stream at this address."""
        self._pack(*values)
        self._launch(stream, self._record, 0)


def launch(spec_of: Callable[..., KernelSpec], kind: tuple[Hashable, ...], blocks: int, record: bytes) -> None:
    """Makes a `Launch` once, given the front of the record."""
    import cupy

    Launch(spec_of, kind, blocks, f"{len(record)}s")(cupy.cuda.get_current_stream().ptr, record)


@functools.lru_cache(maxsize=None)
def _loaded(spec_of: Callable[..., KernelSpec], kind: tuple[Hashable, ...], device: int) -> tuple[Any, int, int]:
    """The kernel as ``cupy.cuda.Function`` on the current device, whose number is `device`; its threads; its record."""
    from ...gpu.launch import load_kernel

    spec = spec_of(DeviceInfo.current().arch, *kind)
    return load_kernel(spec), spec.tile.num_threads, spec.params.nbytes
