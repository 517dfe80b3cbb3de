"""Compiles flattened source to a cubin with NVRTC, and reads the compiler's report."""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from ..errors import INSTALL_CUDA, KernelCompileError
from ..settings import dump_directory
from ..system.folders import replace_file, warn_once
from ..system.locks import ForkGate, new_lock
from .source import KernelSource
from .spec import KernelSpec

__all__ = [
    "CompiledKernel",
    "check_arch",
    "compilations",
    "compile_options",
    "compile_source",
    "nvrtc_build",
    "nvrtc_version",
]

_log = logging.getLogger("fa2cupy")

# CuPy's first NVRTC call loads the library (two with CUDA 13) and is not thread-safe.
_loading = new_lock()
_in_nvrtc = ForkGate()

_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class CompiledKernel:
    """The machine code of one kernel, and the compiler's report.

    Attributes
    ----------
    spec : KernelSpec
        The kernel: its operation, family, arch, dtype, head_dim, causal, tile and features.
    cubin : bytes
    registers : int
        Registers per thread.
    spill_bytes : int
        Bytes of spill stores and spill loads per thread.
    stack_bytes : int
        Bytes of local memory per thread: spilled registers, and arrays that are indexed at run time.
    log : str
        NVRTC's program log.
    seconds : float
        Duration of the compilation.
    """

    spec: KernelSpec
    cubin: bytes = field(hash=False)
    registers: int
    spill_bytes: int
    stack_bytes: int
    log: str = field(hash=False)
    seconds: float

    @property
    def symbol(self) -> str:
        """Name of the kernel in the cubin, as profilers show it."""
        return self.spec.symbol

    def __repr__(self) -> str:
        report = f"{self.registers} registers, {self.spill_bytes} bytes spilled, compiled in {self.seconds:.2f} s"
        return f"<CompiledKernel {self.spec}: {report}>"


def _nvrtc() -> ModuleType:
    try:
        from cupy.cuda import nvrtc

        with _loading, _in_nvrtc:
            nvrtc.getVersion()
    except ModuleNotFoundError as error:
        raise KernelCompileError(f"compiling a kernel needs CuPy, which is not installed: {INSTALL_CUDA}") from error
    except Exception as error:  # CuPy reports a missing shared library in several ways
        if isinstance(error, OSError) and error.filename is not None:
            raise KernelCompileError(
                f"CuPy cannot be imported, because it cannot make a cache folder of its own ({error}): set "
                "CUPY_CACHE_DIR, or HOME, to a folder that is writable"
            ) from error
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
    major, minor = _nvrtc().getVersion()
    return major, minor


@functools.lru_cache(maxsize=None)
def nvrtc_build() -> str:
    """The patch release and build number of NVRTC, from the header of PTX that it writes.

    Patch releases compile differently, and ``nvrtcGetVersion`` does not distinguish them. Compiling the empty program
    takes 20 ms, once in a process. The header depends on the build alone, not on the package that NVRTC comes in.
    """
    nvrtc = _nvrtc()
    with _in_nvrtc:
        program = nvrtc.createProgram("", "empty.cu", (), ())
        try:
            nvrtc.compileProgram(program, ())
            ptx = nvrtc.getPTX(program).decode()
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise KernelCompileError(f"NVRTC cannot compile an empty program: {log or error}") from error
        finally:
            nvrtc.destroyProgram(program)
    return ptx.partition(".version")[0]


def compile_options(arch: str) -> tuple[str, ...]:
    """The options of NVRTC. The kernels include no CUDA header, so there is no include path."""
    options = [f"-arch={arch}", "-std=c++17", "--ptxas-options=-v"]
    if dump_directory() is not None:  # profilers show the dumped source; lines make a cubin four times as large
        options.append("-lineinfo")
    if nvrtc_version() >= (12, 9):  # NVRTC has its own cache from here on, whose hits have an empty log
        options.append("--no-cache")
    return tuple(options)


def compile_source(source: KernelSource) -> CompiledKernel:
    """Compiles a kernel for the architecture of its spec.

    Raises
    ------
    KernelCompileError
        NVRTC is missing or too old for the architecture, or it refused the source.
    """
    spec = source.spec
    nvrtc = _nvrtc()
    check_arch(spec.arch)
    options = compile_options(spec.arch)
    start = time.perf_counter()
    with _in_nvrtc:
        program = nvrtc.createProgram(source.text, f"{spec.symbol}.cu", (), ())
        try:
            try:
                nvrtc.compileProgram(program, options)
            except nvrtc.NVRTCError as error:
                raise KernelCompileError(_failure(source, options, nvrtc.getProgramLog(program))) from error
            log = nvrtc.getProgramLog(program)
            # CuPy strips the last byte, a zero, as the end of a string; disassemblers refuse an ELF file without it.
            cubin = nvrtc.getCUBIN(program) + b"\0"
        finally:
            nvrtc.destroyProgram(program)
    seconds = time.perf_counter() - start

    registers = _REGISTERS.search(log)
    spills = _SPILLS.search(log)
    kernel = CompiledKernel(
        spec=spec,
        cubin=cubin,
        registers=int(registers[1]) if registers else 0,
        spill_bytes=int(spills[2]) + int(spills[3]) if spills else 0,
        stack_bytes=int(spills[1]) if spills else 0,
        log=log,
        seconds=seconds,
    )
    functions = "".join(f", with {one.program.role} ({one.program.place})" for one in spec.functions)
    report = f"{kernel.registers} registers, {kernel.spill_bytes} bytes spilled"
    _log.info("compiled %s in %.2f s: %s%s", spec, seconds, report, functions)
    _dump(source, kernel)
    return kernel


def compilations() -> int:
    """The number of threads that are in NVRTC."""
    return _in_nvrtc.inside


@atexit.register
def _end_inside_nvrtc() -> None:
    """Lets the process end without destructors of libraries if a thread is in NVRTC, which crashes after its own."""
    if compilations() and sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.fflush(None)
        libc.on_exit(libc._exit, None)  # called first of all, with the process's exit status


def check_arch(arch: str) -> None:
    """Raises KernelCompileError if NVRTC is missing, or cannot compile for an architecture."""
    known = _nvrtc().getSupportedArchs()
    if int(re.sub(r"\D", "", arch)) not in known:
        raise KernelCompileError(f"NVRTC {_version()} cannot compile for {arch}: {_which_cuda(arch, known)}")


def _version() -> str:
    return ".".join(map(str, nvrtc_version()))


def _which_cuda(arch: str, known: Sequence[int]) -> str:
    if int(re.sub(r"\D", "", arch)) < min(known):
        return (
            f"CUDA 12 is the last with GPUs older than sm_{min(known)}: pip uninstall cupy-cuda13x, then, in the "
            "checkout of fa2cupy, pip install '.[cuda12]'"
        )
    return (
        "it is too old: in the checkout of fa2cupy, pip install -U '.[cuda12]', or, with a driver for CUDA 13, "
        "pip uninstall cupy-cuda12x and pip install '.[cuda13]'"
    )


def _dump(source: KernelSource, kernel: CompiledKernel) -> None:
    _write_dump(source, ".cu", source.text.encode())
    _write_dump(source, ".cubin", kernel.cubin)
    _write_dump(source, ".log", kernel.log.encode())


def _write_dump(source: KernelSource, suffix: str, data: bytes) -> Path | None:
    """Writes a file to ``FA2CUPY_DUMP_DIR``; returns its path, or None if that is unset or not writable."""
    directory = dump_directory()
    if directory is None:
        return None
    path = directory / f"{source.spec.symbol}.{source.spec.arch}{suffix}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(path, data)
    except OSError as error:
        warn_once(
            ("FA2CUPY_DUMP_DIR", directory),
            f"FA2CUPY_DUMP_DIR: nothing can be written to {directory} ({error.strerror or error}); set it to a folder "
            "that is writable and has room",
        )
        return None
    return path


def _failure(source: KernelSource, options: tuple[str, ...], log: str) -> str:
    path = _write_dump(source, ".cu", source.text.encode())
    where = f"the source is in {path}" if path else "set FA2CUPY_DUMP_DIR to have the source written there"
    return f"NVRTC {_version()} refused {source.spec}\noptions: {' '.join(options)}\n{where}\n{log}"
