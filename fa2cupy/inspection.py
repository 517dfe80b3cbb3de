"""Inspection of legal tiles and of the installation."""

from __future__ import annotations

import platform
from importlib import metadata

import numpy.typing as npt

from ._version import __version__
from .errors import KernelCompileError
from .families.device import DeviceInfo, current_device
from .families.operations import TILED
from .families.registry import FAMILIES, family_of_kernel
from .families.tile import TileConfig
from .families.tile_choice import candidate_tiles
from .jit.cache import cache_state
from .jit.compiler import nvrtc_version
from .problem.choices import check_dtype, check_head_dim
from .settings import tuning_file

__all__ = ["info", "legal_configs"]


def legal_configs(
    operation: str,
    *,
    dtype: npt.DTypeLike = "float16",
    head_dim: int = 128,
    arch: str | None = None,
    family: str | None = None,
) -> list[TileConfig]:
    """The legal tiles of a kernel on a device.

    Parameters
    ----------
    operation : {"forward", "backward", "backward_dq", "backward_dkdv"}
        The kernel: ``backward`` is that of ``single_pass``, the other two are those of ``two_pass``.
    dtype : str or dtype, optional
    head_dim : int, optional
    arch : str, optional
        Architecture such as ``"sm_86"``; the current device by default.
    family : str, optional
        Kernel family; by default the best one for the device and dtype.

    Returns
    -------
    list of TileConfig
        The tiles whose shape the kernel supports and whose accumulators, shared memory and threads fit the device. The
        compiler may still spill registers for some of them; a sweep shows which.

    Raises
    ------
    TypeError, ValueError
        `operation` or `family` does not exist, or `dtype` or `head_dim` is not valid.
    UnsupportedProblemError
        head_dim is above 256, or no family supports the dtype on the device.
    RuntimeError
        There is no device, and `arch` does not name one.

    Examples
    --------
    >>> len(legal_configs("forward", head_dim=64, arch="sm_90")) > 10
    True
    """
    if operation not in TILED:
        raise ValueError(f"operation: expected one of {list(TILED)}, got {operation!r}")
    dtype, head_dim = check_dtype(dtype), check_head_dim(head_dim)
    device = current_device("arch='sm_90'") if arch is None else DeviceInfo.named(arch)
    kernels = family_of_kernel(operation, dtype, device, family)
    return [
        tile for tile in candidate_tiles(kernels) if not kernels.why_illegal(operation, dtype, head_dim, tile, device)
    ]


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
        dtypes[one.public_name] = dtypes.get(one.public_name, ()) + one.dtypes
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
