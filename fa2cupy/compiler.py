"""NVRTC: from flattened source to a cubin, with what the compiler says about it."""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .errors import INSTALL_CUDA, KernelCompileError
from .settings import dump_directory
from .source import KernelSource

__all__ = ["CompiledKernel", "compile_options", "compile_source", "nvrtc_version"]

_log = logging.getLogger("fa2cupy")

# CuPy loads NVRTC at the first call, and of CUDA 13 a second library after it: who calls meanwhile does not find that.
_loading = threading.Lock()

_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class CompiledKernel:
    """Machine code, and the compiler's report on it.

    Attributes
    ----------
    symbol : str
    cubin : bytes
    registers : int
        Per thread.
    spill_bytes : int
        Stores and loads of registers that did not fit, per thread.
    stack_bytes : int
        Local memory per thread: spilled registers, and arrays that are indexed at run time.
    log : str
        NVRTC's program log.
    seconds : float
        What the compilation took.
    path : pathlib.Path or None
        The cubin's file, if it was read from the disk cache.
    """

    symbol: str
    cubin: bytes = field(repr=False)
    registers: int
    spill_bytes: int
    stack_bytes: int
    log: str = field(repr=False)
    seconds: float
    path: Path | None = None


def _nvrtc():
    try:
        from cupy.cuda import nvrtc

        with _loading:
            nvrtc.getVersion()
    except ModuleNotFoundError as error:
        raise KernelCompileError(f"compiling a kernel needs CuPy, which is not installed: {INSTALL_CUDA}") from error
    except Exception as error:  # CuPy reports a missing shared library in several ways
        raise KernelCompileError(f"CuPy or its NVRTC library cannot be loaded ({error}): {_how_to_load()}") from error
    return nvrtc


def _how_to_load() -> str:
    version = getattr(sys.modules.get("cupy"), "__version__", "")
    if version and int(version.split(".")[0]) < 14:
        return (
            f"this is CuPy {version}; fa2cupy needs CuPy 14 or newer, which takes bfloat16 arrays and finds CUDA's "
            f"libraries where pip installs them: {INSTALL_CUDA}"
        )
    return "pip install nvidia-cuda-nvrtc-cu12 (CUDA 12) or nvidia-cuda-nvrtc (CUDA 13), as CuPy was built for"


def nvrtc_version() -> tuple[int, int]:
    """Major and minor version of the NVRTC that CuPy loads."""
    return tuple(_nvrtc().getVersion())


def compile_options(arch: str) -> tuple[str, ...]:
    """What NVRTC is called with. The kernels include no CUDA header, so there is no include path."""
    options = (f"-arch={arch}", "-std=c++17", "-lineinfo", "--ptxas-options=-v")
    # Since 12.9 NVRTC may answer from a cache of its own, with an empty log.
    return options + ("--no-cache",) if nvrtc_version() >= (12, 9) else options


def compile_source(source: KernelSource) -> CompiledKernel:
    """Compiles for the spec's architecture.

    Raises
    ------
    KernelCompileError
        NVRTC is missing or too old for the architecture, or it refused the source.
    """
    spec = source.spec
    nvrtc = _nvrtc()
    version = ".".join(map(str, nvrtc_version()))
    known = nvrtc.getSupportedArchs()
    if int(re.sub(r"\D", "", spec.arch)) not in known:
        raise KernelCompileError(f"NVRTC {version} cannot compile for {spec.arch}: {_which_cuda(spec.arch, known)}")
    options = compile_options(spec.arch)
    start = time.perf_counter()
    program = nvrtc.createProgram(source.text, f"{spec.symbol}.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            raise KernelCompileError(_failure(source, options, version, nvrtc.getProgramLog(program))) from error
        log = nvrtc.getProgramLog(program)
        cubin = nvrtc.getCUBIN(program)
    finally:
        nvrtc.destroyProgram(program)
    seconds = time.perf_counter() - start

    registers = _REGISTERS.search(log)
    spills = _SPILLS.search(log)
    kernel = CompiledKernel(
        symbol=spec.symbol,
        cubin=cubin,
        registers=int(registers[1]) if registers else 0,
        spill_bytes=int(spills[2]) + int(spills[3]) if spills else 0,
        stack_bytes=int(spills[1]) if spills else 0,
        log=log,
        seconds=seconds,
    )
    _log.info("compiled %s in %.2f s: %d registers, %d bytes spilled", spec, seconds, kernel.registers, kernel.spill_bytes)
    if dump_directory() is not None:
        _dump(dump_directory(), source, kernel)
    return kernel


def _which_cuda(arch: str, known: Sequence[int]) -> str:
    if int(re.sub(r"\D", "", arch)) < min(known):
        return (
            f"CUDA 12 is the last with GPUs older than sm_{min(known)}: pip uninstall cupy-cuda13x, then, in the checkout "
            "of fa2cupy, pip install '.[cuda12]'"
        )
    return (
        "it is too old: in the checkout of fa2cupy, pip install -U '.[cuda12]', or, with a driver for CUDA 13, "
        "pip uninstall cupy-cuda12x and pip install '.[cuda13]'"
    )


def _dump(directory: Path, source: KernelSource, kernel: CompiledKernel) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"{source.spec.symbol}.{source.spec.arch}"
    (directory / f"{stem}.cu").write_text(source.text, encoding="utf-8")
    (directory / f"{stem}.cubin").write_bytes(kernel.cubin)
    (directory / f"{stem}.log").write_text(kernel.log, encoding="utf-8")


def _failure(source: KernelSource, options: tuple[str, ...], version: str, log: str) -> str:
    directory = dump_directory()
    where = "set FA2CUPY_DUMP_DIR to have the source written there"
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{source.spec.symbol}.{source.spec.arch}.cu"
        path.write_text(source.text, encoding="utf-8")
        where = f"the source is in {path}"
    return f"NVRTC {version} refused {source.spec}\noptions: {' '.join(options)}\n{where}\n{log}"
