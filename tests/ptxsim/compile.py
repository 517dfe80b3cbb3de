"""CUDA C++ to PTX, with the NVRTC that CuPy loads. Needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["OPTIONS", "compile_ptx", "cuda_include"]

OPTIONS = ("-std=c++17", "-lineinfo")


def compile_ptx(source: str, arch: str = "compute_80", options: Sequence[str] = OPTIONS) -> str:
    """PTX text of a CUDA C++ source for a virtual architecture, which keeps NVRTC from assembling it.

    Raises
    ------
    RuntimeError
        NVRTC refused the source; the text is its log.
    """
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(source, "kernel.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, (f"-arch={arch}", *options))
        except nvrtc.NVRTCError as error:
            raise RuntimeError(nvrtc.getProgramLog(program)) from error
        ptx = nvrtc.getPTX(program)
    finally:
        nvrtc.destroyProgram(program)
    return ptx.decode() if isinstance(ptx, bytes) else ptx


def cuda_include() -> str:
    """The option that lets NVRTC find cuda_fp16.h and its like, which the project's own kernels do without."""
    from cuda.pathfinder import find_nvidia_header_directory

    directory = find_nvidia_header_directory("cudart")
    if directory is None:
        raise ModuleNotFoundError("CUDA's headers are not installed: pip install nvidia-cuda-runtime-cu12")
    return f"-I{directory}"
