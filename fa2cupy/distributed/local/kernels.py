"""Launches of the kernels between attention calls, on the current device and CuPy's current stream."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Hashable
from typing import Any

from ...families.device import DeviceInfo
from ...jit.spec import KernelSpec

__all__ = ["launch"]


def launch(spec_of: Callable[..., KernelSpec], kind: tuple[Hashable, ...], blocks: int, record: bytes) -> None:
    """Launches a kernel whose record has no named pointers.

    Parameters
    ----------
    spec_of : callable
        A function of `fa2cupy.plan.ranks`, and `kind` what it takes besides the architecture.
    kind : tuple
    blocks : int
    record : bytes
        The front of the record, as far as it has content.
    """
    import cupy
    from cupy.cuda import driver, runtime

    function, threads, nbytes = _loaded(spec_of, kind, runtime.getDevice())
    buffer = ctypes.create_string_buffer(record, nbytes)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))
    stream = cupy.cuda.get_current_stream().ptr
    driver.launchKernel(function.ptr, blocks, 1, 1, threads, 1, 1, 0, stream, ctypes.addressof(parameters), 0)


@functools.lru_cache(maxsize=None)
def _loaded(spec_of: Callable[..., KernelSpec], kind: tuple[Hashable, ...], device: int) -> tuple[Any, int, int]:
    """The kernel as ``cupy.cuda.Function`` on the current device, whose number is `device`; its threads; its record."""
    from ...gpu.launch import load_kernel

    spec = spec_of(DeviceInfo.current().arch, *kind)
    return load_kernel(spec), spec.tile.num_threads, spec.params.nbytes
