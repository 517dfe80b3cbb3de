"""Loading compiled kernels into the driver, and launching them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from operator import itemgetter

import numpy as np

from .cache import cached_kernel
from .compiler import CompiledKernel
from .errors import KernelLaunchError
from .plan import Plan, Stage
from .spec import KernelSpec

__all__ = ["BoundStage", "bind_plan", "load_kernel"]

_lock = threading.Lock()


def load_kernel(spec: KernelSpec):
    """The kernel as a ``cupy.cuda.Function`` of the current device.

    Raises
    ------
    KernelLaunchError
        The driver does not take the cubin, or not its shared memory.
    """
    from cupy.cuda import runtime

    compiled = cached_kernel(spec)
    with _lock:
        return _load_kernel(compiled, spec, runtime.getDevice())


@functools.lru_cache(maxsize=None)
def _load_kernel(compiled: CompiledKernel, spec: KernelSpec, ordinal: int):
    import cupy

    try:
        if compiled.path is not None:
            function = cupy.RawModule(path=str(compiled.path)).get_function(compiled.symbol).kernel
        else:
            module = cupy.cuda.function.Module()
            module.load(compiled.cubin)
            function = module.get_function(compiled.symbol)
        if spec.shared_memory_bytes > 48 * 1024:
            attribute = cupy.cuda.driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            cupy.cuda.driver.funcSetAttribute(function.ptr, attribute, spec.shared_memory_bytes)
    except cupy.cuda.driver.CUDADriverError as error:
        raise KernelLaunchError(_load_failure(spec, error)) from error
    return function


def _load_failure(spec: KernelSpec, error: Exception) -> str:
    from cupy.cuda import runtime

    from .compiler import nvrtc_version

    driver = runtime.driverGetVersion()
    compiler = ".".join(map(str, nvrtc_version()))
    return (
        f"the driver (for CUDA {driver // 1000}.{driver % 1000 // 10}) does not load {spec}, compiled by NVRTC {compiler}: "
        f"{error}. If the driver is the older of the two, update it, or install the extra of the driver's CUDA version "
        "(pip install 'fa2cupy[cuda12]')"
    )


class BoundStage:
    """A stage with its kernel loaded: called with the addresses of all buffers, it launches on the current stream."""

    __slots__ = ("_block", "_constants", "_function", "_grid", "_pack", "_pick", "_shared", "_stage")

    def __init__(self, stage: Stage, buffers: tuple[str, ...]):
        layout = stage.spec.params
        self._stage = stage
        self._function = load_kernel(stage.spec)
        self._grid = (stage.blocks, 1, 1)
        self._block = (stage.threads, 1, 1)
        self._shared = stage.spec.shared_memory_bytes
        self._constants = stage.constants
        self._pack = layout.pointer_packer.pack
        self._pick = itemgetter(*[buffers.index(name) for name in layout.pointers])

    def __call__(self, addresses: Sequence[int]) -> None:
        # cuLaunchKernel copies the record, so that a call owns nothing afterwards and threads share nothing.
        record = np.void(self._pack(*self._pick(addresses)) + self._constants)
        try:
            self._function(self._grid, self._block, (record,), self._shared)
        except Exception as error:
            raise KernelLaunchError(f"{self._stage.spec} could not be launched: {error}") from error


def bind_plan(plan: Plan, buffers: tuple[str, ...]) -> tuple[BoundStage, ...]:
    """Compiles (or finds) and loads the kernels of a plan on the current device; `buffers` names the addresses."""
    return tuple(BoundStage(stage, buffers) for stage in plan.stages)
