"""Loading compiled kernels into the driver, and launching them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from operator import getitem, itemgetter
from typing import TYPE_CHECKING

from ..errors import INSTALL_CUDA, KernelLaunchError
from ..jit.cache import cached_kernel, cached_kernels
from ..jit.compiler import CompiledKernel
from ..jit.params import COUNTERS
from ..jit.spec import KernelSpec
from ..plan.stages import Plan, Stage
from ..system.locks import new_lock
from .counters import counters
from .tensor_maps import tensor_maps

if TYPE_CHECKING:
    import cupy

__all__ = ["ABSENT", "BoundStage", "bind_plan", "load_kernel"]

#: Stands for the name of an array that the call does not have. Its address is 0.
ABSENT = "absent"
#: The tensor map of such an array, by that address. No kernel reads it.
_NO_MAP = {0: bytes(128)}

_lock = new_lock()


def load_kernel(spec: KernelSpec) -> cupy.cuda.Function:
    """The kernel as a ``cupy.cuda.Function`` of the current device.

    Raises
    ------
    KernelLaunchError
        The driver refused the cubin or its amount of shared memory.
    """
    from cupy.cuda import runtime

    compiled = cached_kernel(spec)
    with _lock:
        return _load_kernel(compiled, spec, runtime.getDevice())


@functools.lru_cache(maxsize=None)
def _load_kernel(compiled: CompiledKernel, spec: KernelSpec, ordinal: int) -> cupy.cuda.Function:
    import cupy

    try:
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

    from ..jit.compiler import nvrtc_version

    driver = runtime.driverGetVersion()
    compiler = ".".join(map(str, nvrtc_version()))
    return (
        f"the driver (for CUDA {driver // 1000}.{driver % 1000 // 10}) does not load {spec}, "
        f"compiled by NVRTC {compiler}: {error}. If the driver is the older of the two, update it, or install the "
        f"extra of the driver's CUDA: {INSTALL_CUDA}"
    )


class BoundStage:
    """A stage with its kernel loaded: called with the addresses of all buffers, it launches on a stream.

    The record lies at a fixed address, so that a launch only packs tensor maps and pointers and calls the driver.
    ``cuLaunchKernel`` copies the record before it returns; until then a lock keeps other threads from overwriting it.

    Parameters
    ----------
    stage : Stage
    positions : mapping of str to int
        Index into the addresses of a launch, by the names of the arrays, and of `ABSENT`.
    """

    def __init__(self, stage: Stage, positions: Mapping[str, int]):
        from cupy.cuda import driver, runtime

        layout = stage.spec.params
        self._stage = stage
        self._function = load_kernel(stage.spec)  # keeps the module loaded
        absent = [name for name, own in stage.renamed.items() if own is None]
        names = [name for name in layout.pointers if name not in COUNTERS or name in absent]
        indices = [positions[stage.renamed.get(name, name) or ABSENT] for name in names]
        # With one index, itemgetter returns an element, not a tuple; with a slice, a sequence.
        self._pick = itemgetter(*indices) if indices[1:] else itemgetter(slice(indices[0], indices[0] + 1))
        self._maps = [_NO_MAP if tensor is None else tensor_maps(tensor) for tensor in stage.maps]
        needed = [ints for name, ints in COUNTERS.items() if name in layout.pointers and name not in absent]
        self._counters = counters(runtime.getDevice(), *needed) if needed else None
        if self._counters:
            self._counters.reserve()
        self._record = ctypes.create_string_buffer(bytes(layout.pointer_packer.size) + stage.constants, layout.nbytes)
        self._parameters = (ctypes.c_void_p * 1)(ctypes.addressof(self._record))
        self._parameters_address = ctypes.addressof(self._parameters)
        # Arguments that are the same in all launches are bound once: `partial` prepends them faster than Python code
        # passes them.
        self._pack = functools.partial(layout.pointer_packer.pack_into, self._record, 0)
        shape = (stage.blocks, 1, 1, stage.threads, 1, 1, stage.spec.shared_memory_bytes)
        self._launch = functools.partial(driver.launchKernel, self._function.ptr, *shape)
        self._lock = new_lock()

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Launches on the stream at this address."""
        try:
            front = self._pick(addresses)
            if self._maps:
                front = (*map(getitem, self._maps, front), *front[len(self._maps) :])
            if self._counters:
                front = (*front, self._counters.address(stream))
            with self._lock:
                self._pack(*front)
                self._launch(stream, self._parameters_address, 0)
        except Exception as error:
            raise KernelLaunchError(f"{self._stage.spec} could not be launched: {error}") from error


def bind_plan(plan: Plan, positions: Mapping[str, int]) -> tuple[BoundStage, ...]:
    """Compiles or finds the kernels of a plan, and loads them on the current device.

    Parameters
    ----------
    plan : Plan
    positions : mapping of str to int
        Index into the addresses of a launch, by the names of the arrays, and of `ABSENT`.
    """
    cached_kernels(list(dict.fromkeys(stage.spec for stage in plan.stages)))  # side by side: some take NVRTC seconds
    return tuple(BoundStage(stage, positions) for stage in plan.stages)
