"""Temporary device memory of a call: workspaces and copies of arrays.

CuPy's allocator provides it. It is freed when the call returns, before the kernels end, because CuPy's pool reuses
memory only for later work of the same stream. A call that is captured into a CUDA graph runs at every launch of the
graph, when the pool may have given that memory to other work. Its temporary memory therefore belongs to the graph: in a
capturing stream, ``cudaMallocAsync`` and ``cudaFreeAsync`` become nodes of the graph. Results belong to the caller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import cupy
from cupy.cuda import runtime

__all__ = ["allocator_of", "is_capturing", "temporaries"]

_LEGACY_STREAMS = (0, 1)  # no graph can capture them; asking about them is an error while another stream captures


def is_capturing(stream: int | None = None) -> bool:
    """True if a graph captures the work of the stream at this address; by default, of the current one."""
    if stream is None:
        stream = cupy.cuda.get_current_stream().ptr
    return stream not in _LEGACY_STREAMS and bool(runtime.streamIsCapturing(stream))


def allocator_of(stream: int) -> Callable[[int], cupy.cuda.MemoryPointer]:
    """The allocator of temporary memory for the current stream, which is given by its address."""
    return cupy.cuda.malloc_async if is_capturing(stream) else cupy.cuda.alloc


def temporaries() -> contextlib.AbstractContextManager:
    """A context in which new arrays are temporary memory."""
    if is_capturing():
        return cupy.cuda.using_allocator(cupy.cuda.malloc_async)
    return contextlib.nullcontext()
