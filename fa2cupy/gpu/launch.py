"""Loading compiled kernels into the driver, and launching them."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Hashable, Mapping, Sequence
from operator import getitem, itemgetter
from typing import TYPE_CHECKING, Any

from ..errors import INSTALL_CUDA, KernelLaunchError
from ..jit.cache import cached_kernel, cached_kernels
from ..jit.compiler import CompiledKernel
from ..jit.params import COUNTERS
from ..jit.spec import KernelSpec
from ..plan.stages import Plan, Stage
from ..system.locks import new_lock
from .counters import Counters, counters
from .tensor_maps import tensor_maps

if TYPE_CHECKING:
    import cupy

__all__ = ["ABSENT", "BoundStages", "bind_plan", "load_kernel"]

#: Stands for the name of an array that the call does not have. Its address is 0.
ABSENT = "absent"
#: The tensor map of such an array, by that address. No kernel reads it.
_NO_MAP: Mapping[int, bytes] = {0: bytes(128)}
#: Bytes to whose multiples records are aligned, relative to each other.
_ALIGNMENT = 64

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


class BoundStages:
    """Stages with their kernels loaded: called with the addresses of all buffers, they are launched on a stream.

    Their records lie one behind the other at a fixed address, so that a call packs tensor maps, pointers and constants
    of all of them at once, and then only calls the driver for each kernel. ``cuLaunchKernel`` copies a record before it
    returns; until then a lock keeps other threads from overwriting it.

    Parameters
    ----------
    stages : sequence of Stage
        At least one.
    positions : mapping of str to int
        Index into the addresses of a launch, by the names of the arrays, and of `ABSENT`.
    """

    def __init__(self, stages: Sequence[Stage], positions: Mapping[str, int]):
        from cupy.cuda import driver, runtime

        # What is packed: an address by its name, and by keys of their own what is added to the addresses.
        packed: list[Hashable] = []
        constants: dict[int, bytes] = {}
        maps: dict[tuple[int, str], tuple[Mapping[int, bytes], int]] = {}
        counted: dict[tuple[int, str], Counters] = {}
        form, offsets = "=", []
        for number, stage in enumerate(stages):
            layout = stage.spec.params
            for place, name in enumerate(layout.pointers):
                own, key = stage.renamed.get(name, name), (number, name)
                packed.append(key)
                if place < len(stage.maps):
                    tensor = stage.maps[place]
                    maps[key] = _NO_MAP if tensor is None else tensor_maps(tensor), positions[own or ABSENT]
                elif name in COUNTERS and own is not None:
                    counted[key] = counters(runtime.getDevice(), COUNTERS[name])
                    counted[key].reserve()
                else:
                    packed[-1] = own or ABSENT
            offsets.append(struct.calcsize(form))
            form += layout.pointer_packer.format[1:]
            if number < len(stages) - 1:  # nothing is packed behind the last pointers
                constants[number] = stage.constants
                packed.append(number)
                form += f"{len(stage.constants)}s{-layout.nbytes % _ALIGNMENT}x"
        added = enumerate((*constants, *maps, *counted), start=1 + max(positions.values()))
        places: dict[Hashable, int] = {**positions} | {key: place for place, key in added}
        indices = [places[key] for key in packed]
        self._pick = itemgetter(*indices) if indices[1:] else itemgetter(slice(indices[0], indices[0] + 1))
        self._constants = [*constants.values()]
        self._maps = [map_of for map_of, _ in maps.values()]
        # Without the last index, which has no map, itemgetter might give an element, not a tuple.
        self._mapped = itemgetter(*[place for _, place in maps.values()], 0)
        self._counters = [*counted.values()]
        last = bytes(struct.calcsize(form)) + stages[-1].constants
        self._records = ctypes.create_string_buffer(last, len(last))
        # Arguments that are the same in all launches are bound once: `partial` prepends them faster than Python code
        # passes them.
        self._pack = functools.partial(struct.Struct(form).pack_into, self._records, 0)
        start = ctypes.addressof(self._records)
        self._addresses = [(ctypes.c_void_p * 1)(start + offset) for offset in offsets]
        self._functions = [load_kernel(stage.spec) for stage in stages]  # keeps the modules loaded
        self._launches = []
        for stage, function, address in zip(stages, self._functions, self._addresses, strict=True):
            shape = (stage.blocks, 1, 1, stage.threads, 1, 1, stage.spec.shared_memory_bytes)
            launch = functools.partial(driver.launchKernel, function.ptr, *shape)
            self._launches.append((stage.spec, launch, ctypes.addressof(address)))
        self._lock = new_lock()

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Launches on the stream at this address."""
        spec = self._launches[0][0]
        try:
            values: list[Any] = [*addresses, *self._constants]
            if self._maps:
                values += map(getitem, self._maps, self._mapped(addresses))
            for one in self._counters:
                values.append(one.address(stream))
            with self._lock:
                self._pack(*self._pick(values))
                for spec, launch, record in self._launches:  # noqa: B007  (the error names it)
                    launch(stream, record, 0)
        except Exception as error:
            raise KernelLaunchError(f"{spec} could not be launched: {error}") from error


def bind_plan(plan: Plan, positions: Mapping[str, int]) -> tuple[BoundStages, ...]:
    """Compiles or finds the kernels of a plan, and loads them on the current device.

    Parameters
    ----------
    plan : Plan
    positions : mapping of str to int
        Index into the addresses of a launch, by the names of the arrays, and of `ABSENT`, from 0 to the last address.
    """
    cached_kernels(list(dict.fromkeys(stage.spec for stage in plan.stages)))  # side by side: some take NVRTC seconds
    return (BoundStages(plan.stages, positions),) if plan.stages else ()
