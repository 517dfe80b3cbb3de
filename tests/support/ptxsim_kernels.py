"""Helpers of the interpreter's own tests, which compile small CUDA kernels to modules without a GPU."""

from __future__ import annotations

import functools

import pytest
from ptxsim import Module, PtxError
from ptxsim.compile import OPTIONS, compile_ptx, cuda_include

__all__ = ["cuda_module", "report_of"]


@functools.cache
def cuda_module(source: str, arch: str = "compute_80", options: tuple[str, ...] = (), headers: bool = False) -> Module:
    """Compiles with NVRTC, or skips the test with the reason; `headers` gives it cuda_fp16.h and its like."""
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
        if headers:
            options += (cuda_include(),)
    except ImportError as error:
        pytest.skip(f"needs CuPy with NVRTC and CUDA's headers: {error}")
    except Exception as error:  # CuPy reports a missing shared library in several ways
        pytest.skip(f"NVRTC cannot be loaded: {error}")
    return Module(compile_ptx(source, arch, OPTIONS + options))


def report_of(launch, *args, **options) -> str:
    """Returns the interpreter's report of a launch that must fail."""
    with pytest.raises(PtxError) as caught:
        launch(*args, **options)
    return str(caught.value)
