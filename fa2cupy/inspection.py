"""Inspection of tiles, of what the compiler makes of them, and of the installation."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from ._version import __version__
from .errors import KernelCompileError
from .families.device import DeviceInfo, current_device
from .families.family import Family, Kernel
from .families.operations import METHODS, OPERATIONS, SEVERAL, TILED
from .families.registry import FAMILIES, family_of_kernel
from .families.tile import TileConfig
from .families.tile_choice import candidate_tiles, check_tile, is_promising
from .jit.cache import cache_state
from .jit.compiler import check_arch, nvrtc_version
from .jit.costs import check_cost
from .jit.spec import KernelSpec
from .plan.specs import layout_of_kernel
from .problem.arguments import check_bool
from .problem.array_types import AnyArray
from .problem.choices import check_dtype, check_head_dim, check_jobs, feature_combinations, one_or_many
from .problem.features import FeatureKeywords
from .problem.keywords import NoKeywords, check_keywords, takes
from .problem.names import Operation
from .settings import tuning_file
from .system.progress import progress as progress_bar

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .jit.processes import Report

__all__ = ["TileReport", "compile_report", "info", "legal_configs"]


@takes(NoKeywords)
def legal_configs(
    operation: Operation,
    *,
    dtype: npt.DTypeLike = "float16",
    head_dim: int = 128,
    head_dim_v: int | None = None,
    arch: str | None = None,
    family: str | None = None,
    promising: bool = False,
    **unknown: Unpack[NoKeywords],
) -> list[TileConfig]:
    """The legal tiles of a kernel on a device.

    Parameters
    ----------
    operation : {"forward", "backward", "backward_dq", "backward_dkdv", "backward_one_tile"}
        The kernel: ``backward`` is that of ``single_pass``, the next two are those of ``two_pass``, and the
        last one is that of ``one_tile``.
    dtype : str or dtype, optional
    head_dim : int, optional
        Columns of q and k.
    head_dim_v : int, optional
        Columns of v if they differ.
    arch : str, optional
        Architecture such as ``"sm_86"``; the current device by default.
    family : str, optional
        Kernel family; by default the best one for the device and dtype.
    promising : bool, optional
        True leaves out tiles that cannot be fast: a multiprocessor's shared memory holds fewer than their
        ``blocks_per_sm`` blocks, so that the compiler limits registers for nothing, or it has room for fewer than 4
        warps, one for each of its schedulers. Sweeps try the others, for example 418 of 512 tiles of the forward in
        float16 at head_dim 64 on an A100.

    Returns
    -------
    list of TileConfig
        The tiles whose shape the kernel supports and whose accumulators, shared memory and threads fit the device: none
        where it does not hold head_dim, such as ``backward`` beyond 256 columns of 16 bits. The compiler may still
        spill registers for some of them; `compile_report` shows which.

    Raises
    ------
    TypeError, ValueError
        `operation` or `family` does not exist, or `dtype`, `head_dim` or `head_dim_v` is not valid.
    UnsupportedProblemError
        head_dim is above 512, or no family supports the dtype on the device.
    RuntimeError
        There is no device, and `arch` does not name one.

    Examples
    --------
    >>> len(legal_configs("forward", head_dim=64, arch="sm_90")) > 10
    True
    """
    check_keywords("fa2cupy.legal_configs", unknown)
    kernel, device = _checked(operation, dtype, head_dim, head_dim_v, arch)
    check_bool("promising", promising)
    own = family_of_kernel(operation, kernel.dtype, device, family, columns=(kernel.head_dim, kernel.head_dim_v))
    columns, columns_v = own.head_dims(kernel.head_dim, kernel.head_dim_v)
    return _legal_tiles(own, kernel._replace(head_dim=columns, head_dim_v=columns_v), device, promising=promising)


def _checked(
    operation: str, dtype: npt.DTypeLike, head_dim: int, head_dim_v: int | None, arch: str | None
) -> tuple[Kernel, DeviceInfo]:
    if operation not in TILED:
        hints = {**METHODS, "fwd": ("forward",), "bwd": METHODS["single_pass"]}
        meant = hints.get(operation, ()) if isinstance(operation, str) else ()
        hint = f"; {operation!r} is {' and '.join(map(repr, meant))}" if meant else ""
        if isinstance(operation, str) and operation in {*OPERATIONS, *SEVERAL}:
            hint = "; its tiles are no choice, and fa2cupy.precompile returns what the compiler makes of them"
        raise ValueError(f"operation: expected one of {list(TILED)}, got {operation!r}{hint}")
    device = current_device("arch='sm_90'") if arch is None else DeviceInfo.named(arch)
    columns_v = None if head_dim_v is None else check_head_dim(head_dim_v, "head_dim_v")
    dtype, columns = check_dtype(dtype), check_head_dim(head_dim)
    return Kernel(operation, dtype, columns, columns_v or columns), device


def _legal_tiles(family: Family, kernel: Kernel, device: DeviceInfo, *, promising: bool) -> list[TileConfig]:
    return [
        tile
        for tile in candidate_tiles(family)
        if family.why_illegal(kernel, tile, device) is None
        and (not promising or is_promising(family, kernel, tile, device))
    ]


@dataclass(frozen=True)
class TileReport:
    """A tile of a kernel, and what the compiler has made of it.

    Attributes
    ----------
    tile : TileConfig
    registers : int
        Registers per thread.
    spill_bytes : int
        Bytes of spill stores and spill loads per thread.
    shared_memory_bytes : int
        Bytes of dynamic shared memory per block.
    resident_blocks : int
        Blocks that a multiprocessor can hold at a time.
    occupancy : float
        Threads of these blocks over the most threads that a multiprocessor can hold, from 0 to 1.
    seconds : float
        Duration of the compilation, also where an earlier one has left the kernel in the disk cache.
    failure : str
        Why the kernel could not be compiled; registers, blocks, occupancy and seconds are then 0. Empty if it could.
    kernel : KernelSpec
        The kernel with this tile, in all that its machine code depends on.
    """

    tile: TileConfig
    registers: int
    spill_bytes: int
    shared_memory_bytes: int
    resident_blocks: int
    occupancy: float
    seconds: float
    failure: str
    kernel: KernelSpec = field(repr=False)


@takes(NoKeywords)
def compile_report(
    operation: Operation,
    *,
    dtype: npt.DTypeLike = "float16",
    head_dim: int = 128,
    head_dim_v: int | None = None,
    causal: bool = False,
    features: str | Iterable[str] = (),
    score_mod: Callable[..., Any] | None = None,
    score_args: Sequence[AnyArray] = (),
    mask_mod: Callable[..., Any] | None = None,
    mask_args: Sequence[AnyArray] = (),
    arch: str | None = None,
    family: str | None = None,
    configs: TileConfig | Iterable[TileConfig] | None = None,
    jobs: int | None = None,
    progress: bool = False,
    **unknown: Unpack[NoKeywords],
) -> list[TileReport]:
    """Compiles a kernel with many tiles, and reports what each one takes of a multiprocessor. Needs no GPU.

    The compilers run in processes of their own, so that one that crashes or hangs is a row of the report. The kernels
    stay in the disk cache.

    Parameters
    ----------
    operation, dtype, head_dim, head_dim_v
        The kernel, as for `legal_configs`.
    causal : bool, optional
    features : str or iterable of str, optional
        Features that the kernel has, all combined, by their names in `precompile`. A bias has the dtype of q.
    score_mod, score_args, mask_mod, mask_args : optional
        As for `precompile`.
    arch, family : str, optional
        As for `legal_configs`.
    configs : TileConfig or iterable of TileConfig, optional
        The tiles; by default those of ``legal_configs(..., promising=True)``.
    jobs : int, optional
        Number of kernels that are compiled at a time; one per CPU by default.
    progress : bool, optional
        Shows a progress bar on stderr.

    Returns
    -------
    list of TileReport
        One row for each tile, in their order.

    Raises
    ------
    TypeError, ValueError
        An argument is not as described above, or a tile of `configs` is not legal.
    UnsupportedProblemError
        The architecture is unknown, or has no such kernel.
    KernelCompileError
        NVRTC is missing, or too old or too new for the architecture.
    RuntimeError
        There is no device, and `arch` does not name one.

    See Also
    --------
    legal_configs : The tiles alone.
    precompile : All kernels of a call, with one tile.

    Examples
    --------
    >>> from fa2cupy import TileConfig
    >>> (row,) = compile_report("forward", head_dim=64, arch="sm_80", configs=TileConfig(64, 64, num_warps=4))
    >>> row.spill_bytes, row.shared_memory_bytes, row.resident_blocks, row.occupancy
    (0, 24576, 3, 0.1875)

    All tiles that can be fast, in minutes:

    >>> rows = compile_report("forward", head_dim=64, arch="sm_80", progress=True)  # doctest: +SKIP
    >>> [row.tile for row in rows if row.spill_bytes == 0 and row.occupancy >= 0.25]  # doctest: +SKIP
    """
    check_keywords("fa2cupy.compile_report", unknown)
    kernel, device = _checked(operation, dtype, head_dim, head_dim_v, arch)
    check_bool("causal", causal)
    check_bool("progress", progress)
    (names, *others), jobs = feature_combinations(features), check_jobs(jobs)
    if others:
        raise ValueError(f"features: expected those of one call, got those of {1 + len(others)}")
    functions: FeatureKeywords = {
        "score_mod": score_mod, "score_args": score_args, "mask_mod": mask_mod, "mask_args": mask_args
    }  # fmt: skip
    layout = layout_of_kernel(kernel, device, causal, family, features=names, functions=functions)
    kernel = Kernel.of(operation, layout.problem)
    if configs is None:
        tiles = _legal_tiles(layout.family, kernel, device, promising=True)
    else:
        tiles = one_or_many(configs)
        for tile in tiles:
            if not isinstance(tile, TileConfig):
                raise TypeError(f"configs: expected a TileConfig or several, got {type(tile).__name__}")
            check_tile("configs", tile, layout.family, kernel, device)
    specs = [layout.tiled(operation, tile).spec for tile in tiles]
    for spec in specs:
        check_cost(spec)
        check_arch(spec.arch)
    from .jit.processes import compile_all  # it imports what nothing else needs

    jobs = jobs or os.cpu_count() or 1
    if progress:
        with progress_bar(len(specs), "compiling") as bar:
            reports = compile_all(specs, jobs, bar.update)
    else:
        reports = compile_all(specs, jobs)
    return [_row(device, spec, report) for spec, report in zip(specs, reports, strict=True)]


def _row(device: DeviceInfo, spec: KernelSpec, report: Report) -> TileReport:
    threads, shared = spec.tile.num_threads, spec.shared_memory_bytes
    blocks = 0 if report.failure else device.resident_blocks(threads, report.registers, shared)
    return TileReport(
        tile=spec.tile,
        registers=report.registers,
        spill_bytes=report.spill_bytes,
        shared_memory_bytes=shared,
        resident_blocks=blocks,
        occupancy=blocks * threads / device.threads_per_multiprocessor,
        seconds=report.seconds,
        failure=report.failure,
        kernel=spec,
    )


def info() -> dict[str, object]:
    """Versions, device, cache and families, for a bug report.

    Returns
    -------
    dict
    """
    return {
        "fa2cupy": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in ("numpy", "jinja2", "ml_dtypes", "cuda-bindings")},
        "cupy": _version("cupy-cuda12x") or _version("cupy-cuda13x") or _version("cupy"),
        "nvrtc": _nvrtc(),
        "driver": _driver(),
        "device": _device(),
        **cache_state(),
        "tuning_file": str(tuning_file()) if tuning_file().exists() else None,
        "families": _families(),
    }


def _families() -> dict[str, tuple[str, ...]]:
    """The dtypes of each public name."""
    dtypes: dict[str, tuple[str, ...]] = {}
    for one in FAMILIES:
        dtypes[one.public_name] = tuple(dict.fromkeys(dtypes.get(one.public_name, ()) + one.dtypes))
    return dtypes


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _nvrtc() -> str:
    try:
        return ".".join(map(str, nvrtc_version()))
    except KernelCompileError as error:
        return str(error)


def _driver() -> str:
    try:
        from cupy.cuda import runtime

        version = runtime.driverGetVersion()
        return f"for CUDA {version // 1000}.{version % 1000 // 10}" if version else "none"
    except Exception as error:  # no CuPy or no driver, for any reason, is part of the report
        return f"none ({error})"


def _device() -> str:
    try:
        device = DeviceInfo.current()
        return f"{device.name} ({device.arch})"
    except Exception as error:  # as above
        return f"none ({error})"
