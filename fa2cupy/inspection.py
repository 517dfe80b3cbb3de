"""What there is: legal tiles, kernels compiled ahead, and the state of the installation."""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

from ._version import __version__
from .cache import cache_state, cached_kernel
from .compiler import CompiledKernel, nvrtc_version
from .device import DeviceInfo
from .errors import KernelCompileError
from .families import FAMILIES, choose_family
from .plan import plan_backward, plan_forward
from .problem import AttentionProblem
from .settings import tuning_file
from .spec import KernelSpec
from .tiles import OPERATIONS, TileConfig, why_illegal

__all__ = ["default_specs", "info", "legal_configs", "precompile"]

_TILE_ROWS = (8, 16, 32, 64, 96, 128, 192, 256)
_QUERY_ROWS = {"sm90": range(16, 257, 16)}  # b_r of families that take more of them
_KEY_ROWS = {"sm90": range(48, 257, 16)}  # b_c of families that take more of them
_WARPS = (2, 4, 8, 12, 16)
_STAGES = (1, 2, 3, 4)
_BLOCKS_PER_SM = (1, 2, 3, 4)


def legal_configs(
    operation: str,
    *,
    dtype: str = "float16",
    head_dim: int = 128,
    arch: str | None = None,
    family: str | None = None,
) -> list[TileConfig]:
    """The tiles that a kernel can have on a device.

    Parameters
    ----------
    operation : {"forward", "backward", "backward_dq", "backward_dkdv"}
        Which kernel: ``backward`` is the one of ``single_pass``, the other two those of ``two_pass``.
    dtype : str, optional
    head_dim : int, optional
    arch : str, optional
        Architecture such as ``"sm_86"``; the current device by default.
    family : str, optional
        Kernel family; by default the one that the device and dtype call for.

    Returns
    -------
    list of TileConfig
        Those whose shape the kernel supports and whose accumulators, shared memory and threads fit the device. Whether
        one also compiles without spills is for a sweep to find out.

    Raises
    ------
    ValueError
        `operation` or `family` does not exist.
    UnsupportedProblemError
        No family has the dtype on the device.
    RuntimeError
        There is no device, and `arch` does not name one.

    Examples
    --------
    >>> len(legal_configs("forward", head_dim=64, arch="sm_90")) > 10
    True
    """
    if operation not in OPERATIONS:
        raise ValueError(f"operation: expected one of {list(OPERATIONS)}, got {operation!r}")
    device = DeviceInfo.named(arch) if arch else _current_device("arch='sm_90'")
    name = choose_family(operation, dtype, device, family).name
    tiles = itertools.product(
        _QUERY_ROWS.get(name, _TILE_ROWS), _KEY_ROWS.get(name, _TILE_ROWS), _WARPS, _STAGES, _BLOCKS_PER_SM
    )
    return [tile for tile in itertools.starmap(TileConfig, tiles) if not why_illegal(operation, name, dtype, head_dim, tile, device)]


def default_specs(
    device: DeviceInfo, dtype: str, head_dim: int, causal: bool, method: str | None = None, family: str | None = None
) -> list[KernelSpec]:
    """The kernels that calls with default options use: the forward's, or those of a backward method."""
    step = choose_family("forward" if method is None else "backward", dtype, device, family).head_dim_step
    padded = -(-head_dim // step) * step
    problem = AttentionProblem(dtype, 1, 128, 128, 1, 1, padded, causal, 1.0, "bshd", 4)
    contiguous = problem.kernel_strides(problem.q_shape)
    strides = dict.fromkeys(("q", "k", "v", "o", "dout", "dq", "dk", "dv"), contiguous)
    if method is None:
        plan = plan_forward(problem, device, strides, family=family)
    else:
        plan = plan_backward(problem, device, strides, method, family=family)
    return [stage.spec for stage in plan.stages]


def precompile(
    archs: Iterable[str] | None = None,
    *,
    dtypes: Iterable[str] = ("float16", "bfloat16"),
    head_dims: Iterable[int] = (64, 128),
    causal: Iterable[bool] = (False, True),
    methods: Iterable[str] = ("single_pass", "two_pass"),
    jobs: int | None = None,
) -> list[CompiledKernel]:
    """Compiles the default kernels into the disk cache, so that no later call waits. Needs no GPU.

    Parameters
    ----------
    archs : iterable of str, optional
        Such as ``["sm_80", "sm_90"]``; the current device's by default.
    dtypes, head_dims, causal, methods : iterable, optional
        The calls to prepare: the forward, and the backward by each method, for every combination.
    jobs : int, optional
        Kernels compiled side by side; one per CPU by default.

    Returns
    -------
    list of CompiledKernel
        Each with its registers, spills and compile time.

    Raises
    ------
    KernelCompileError
        NVRTC is missing, or refused a kernel.
    RuntimeError
        There is no device, and `archs` does not name any.
    """
    devices = [_current_device("archs=['sm_90']")] if archs is None else [DeviceInfo.named(arch) for arch in archs]
    specs = dict.fromkeys(
        spec
        for device, dtype, head_dim, masked, method in itertools.product(
            devices, dtypes, head_dims, causal, (None, *methods)
        )
        for spec in default_specs(device, dtype, head_dim, masked, method)
    )
    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        return list(pool.map(cached_kernel, specs))


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
        "families": {row.name: row.dtypes for row in FAMILIES},
    }


def _current_device(instead: str) -> DeviceInfo:
    try:
        return DeviceInfo.current()
    except Exception as error:  # CuPy absent, or without a driver
        raise RuntimeError(f"there is no CUDA device to look at ({error}); name an architecture: {instead}") from error


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
    except Exception as error:  # CuPy absent, or without a driver: both are answers here
        return f"none ({error})"


def _device() -> str:
    try:
        device = DeviceInfo.current()
        return f"{device.name} ({device.arch})"
    except Exception as error:  # as above
        return f"none ({error})"
