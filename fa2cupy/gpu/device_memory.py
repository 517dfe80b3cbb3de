"""Device memory that a call needs besides its inputs and results: workspaces, and copies of arrays.

It comes from CuPy's allocator and goes back when the call returns, before the kernels end: CuPy's pool hands memory only to
later work of the same stream. A call that is captured into a CUDA graph runs whenever the graph is launched, beside whatever
that memory belongs to by then. What it needs is memory of the graph instead: in a capturing stream, ``cudaMallocAsync`` and
``cudaFreeAsync`` become nodes of the graph. Results are the caller's, as ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import cupy
from cupy.cuda import runtime

__all__ = ["allocator_of", "is_capturing", "temporaries"]

_LEGACY_STREAMS = (0, 1)  # which no graph can capture, and the runtime must not be asked about while one does


def is_capturing(stream: int) -> bool:
    """Whether work on a stream, given by its address, goes into a graph."""
    return stream not in _LEGACY_STREAMS and bool(runtime.streamIsCapturing(stream))


def allocator_of(stream: int) -> Callable:
    """What allocates memory for work on the current stream, of this address, that the call frees."""
    return cupy.cuda.malloc_async if is_capturing(stream) else cupy.cuda.alloc


def temporaries() -> contextlib.AbstractContextManager:
    """A context in which all new arrays are such memory."""
    if is_capturing(cupy.cuda.get_current_stream().ptr):
        return cupy.cuda.using_allocator(cupy.cuda.malloc_async)
    return contextlib.nullcontext()
