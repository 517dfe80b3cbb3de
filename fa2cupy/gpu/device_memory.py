"""Temporary device memory of a call: workspaces and copies of arrays.

CuPy's allocator provides it. It is freed when the call returns, before the kernels end, because CuPy's pool reuses
memory only for later work of the same stream. A call that is captured into a CUDA graph runs at every launch of the
graph, when the pool may have given that memory to other work. Its temporary memory therefore belongs to the graph: in a
capturing stream, ``cudaMallocAsync`` and ``cudaFreeAsync`` become nodes of the graph. Results belong to the caller.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import cupy
from cupy.cuda import runtime

__all__ = ["allocator_of", "is_capturing", "temporaries", "zeros"]

_LEGACY_STREAMS = (0, 1)  # no graph can capture them; asking about them is an error while another stream captures
_PER_THREAD_STREAM = 2  # an address that means a different stream in every thread

#: By device, stream and thread.
_zeros: dict[tuple[int, int, int], tuple[int, cupy.cuda.MemoryPointer]] = {}


def is_capturing(stream: int | None = None) -> bool:
    """True if a graph captures the work of the stream at this address; by default, of the current one."""
    if stream is None:
        stream = cupy.cuda.get_current_stream().ptr
    return stream not in _LEGACY_STREAMS and bool(runtime.streamIsCapturing(stream))


def allocator_of(stream: int) -> Callable[[int], cupy.cuda.MemoryPointer]:
    """The allocator of temporary memory for the current stream, which is given by its address."""
    return cupy.cuda.malloc_async if is_capturing(stream) else cupy.cuda.alloc


def zeros(nbytes: int, ordinal: int, stream: int) -> cupy.cuda.MemoryPointer:
    """Memory that is zero when a kernel of the current stream finds it, as the kernel leaves it zero, too.

    A stream has the same memory for all its calls, because they run one after the other. A graph has memory for each
    call, and clears it. The caller keeps the result until the launches are queued.
    """
    if is_capturing(stream):
        return _cleared(cupy.cuda.malloc_async(nbytes), nbytes)
    key = ordinal, stream, threading.get_ident() if stream == _PER_THREAD_STREAM else 0
    size, memory = _zeros.get(key, (0, None))
    if memory is None or size < nbytes:
        memory = _cleared(cupy.cuda.alloc(nbytes), nbytes)
        _zeros[key] = nbytes, memory  # the pool gives the smaller one to later work of the stream only
    return memory


def _cleared(memory: cupy.cuda.MemoryPointer, nbytes: int) -> cupy.cuda.MemoryPointer:
    memory.memset_async(0, nbytes)
    return memory


def temporaries() -> contextlib.AbstractContextManager:
    """A context in which new arrays are temporary memory."""
    if is_capturing():
        return cupy.cuda.using_allocator(cupy.cuda.malloc_async)
    return contextlib.nullcontext()
