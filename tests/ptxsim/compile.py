"""CUDA C++ to PTX, with the NVRTC that CuPy loads. Needs no GPU."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from fa2cupy.jit.compiler import nvrtc_build
from fa2cupy.system.folders import replace_file

__all__ = ["OPTIONS", "compile_ptx", "cuda_include"]

OPTIONS = ("-std=c++17", "-lineinfo")
#: Ranks that are threads of a process need the same kernels at the same time.
_one_at_a_time = threading.Lock()


def compile_ptx(source: str, arch: str = "compute_80", options: Sequence[str] = OPTIONS) -> str:
    """Compiles CUDA C++ to PTX text for a virtual architecture, which keeps NVRTC from assembling it.

    The text is kept in the folder FA2CUPY_CACHE_DIR, if there is one, as in the tests: compiling takes longer than a
    small launch, and the processes of a test run need the same kernels. Sources that include headers are compiled anew.

    Raises
    ------
    RuntimeError
        NVRTC refused the source; the text is its log.
    """
    folder = os.environ.get("FA2CUPY_CACHE_DIR")
    if not folder or any(option.startswith(("-I", "--include-path")) for option in options):
        return _compile(source, arch, options)
    key = hashlib.sha256(repr((nvrtc_build(), os.getcwd(), source, arch, tuple(options))).encode()).hexdigest()
    path = Path(folder, "ptx", key)
    with _one_at_a_time:
        try:
            return path.read_text()
        except FileNotFoundError:
            ptx = _compile(source, arch, options)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, ptx.encode())
    return ptx


def _compile(source: str, arch: str, options: Sequence[str]) -> str:
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
    """Returns the option that lets NVRTC find cuda_fp16.h and its like, which the project's own kernels do without."""
    from cuda.pathfinder import find_nvidia_header_directory

    directory = find_nvidia_header_directory("cudart")
    if directory is None:
        raise ModuleNotFoundError("CUDA's headers are not installed: pip install nvidia-cuda-runtime-cu12")
    return f"-I{directory}"
