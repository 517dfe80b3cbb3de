"""An allocator for CuPy that gives every array pages of its own, with unmapped addresses before and after them.

CuPy's pool puts arrays side by side, so that an access outside of one hits another and goes unnoticed. Here it faults.
Arrays lie alternately at the beginning and at the end of their pages. ``pytest --isolate`` uses this allocator.
"""

from __future__ import annotations

import collections
import threading
from dataclasses import dataclass

import cupy
from cuda.bindings import driver

__all__ = ["install"]

_ALIGNMENT = 16  # bytes that kernels may rely on; CuPy's own allocations are aligned to 512


@dataclass(frozen=True)
class _Island:
    """Mapped pages between two unmapped ones."""

    start: int
    nbytes: int


class _Islands:
    """All islands; freed ones are reused by later work of the same stream, like blocks of CuPy's pool."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[tuple, list[_Island]] = collections.defaultdict(list)
        self._used: dict[int, tuple[tuple, _Island]] = {}
        self._turn = 0

    def malloc(self, nbytes: int, ordinal: int) -> int:
        page = _page_bytes(ordinal)
        size = -(-max(nbytes, 1) // page) * page
        key = (ordinal, cupy.cuda.get_current_stream().ptr, size)
        with self._lock:
            self._turn += 1
            island = self._free[key].pop() if self._free[key] else self._map(size, page, ordinal)
            behind = size - -(-nbytes // _ALIGNMENT) * _ALIGNMENT
            address = island.start + (behind if self._turn % 2 else 0)
            self._used[address] = key, island
        return address

    def free(self, address: int, ordinal: int) -> None:
        with self._lock:
            key, island = self._used.pop(address)
            self._free[key].append(island)

    def _map(self, size: int, page: int, ordinal: int) -> _Island:
        cupy.cuda.runtime.free(0)  # a thread that has not used the device has no context
        properties = _properties(ordinal)
        result, memory = driver.cuMemCreate(size, properties, 0)
        if result == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            self._unmap_free()
            result, memory = driver.cuMemCreate(size, properties, 0)
        _check(result)
        start = int(_checked(driver.cuMemAddressReserve(size + 2 * page, 0, 0, 0))) + page
        _checked(driver.cuMemMap(start, size, 0, memory, 0))
        access = driver.CUmemAccessDesc()
        access.location = properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        _checked(driver.cuMemSetAccess(start, size, [access], 1))
        _checked(driver.cuMemRelease(memory))  # the mapping keeps it
        return _Island(start, size)

    def _unmap_free(self) -> None:
        cupy.cuda.Device().synchronize()
        for islands in self._free.values():
            while islands:
                island = islands.pop()
                _checked(driver.cuMemUnmap(island.start, island.nbytes))


def _properties(ordinal: int) -> driver.CUmemAllocationProp:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    return properties


def _page_bytes(ordinal: int) -> int:
    minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(_checked(driver.cuMemGetAllocationGranularity(_properties(ordinal), minimum)))


def _checked(results: tuple):
    result, *values = results
    _check(result)
    return values[0] if values else None


def _check(result: driver.CUresult) -> None:
    if result != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"isolated memory: {result.name}")


def install() -> None:
    """Replaces CuPy's allocator by this one."""
    islands = _Islands()
    cupy.cuda.set_allocator(cupy.cuda.PythonFunctionAllocator(islands.malloc, islands.free).malloc)
