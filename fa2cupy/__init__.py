"""FlashAttention-2 for CuPy and NumPy arrays: forward, Delta, backward and decoding as functions."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from . import mods, typing
from ._version import __version__
from .ahead import precompile
from .api import backward, decode, delta, forward, merge
from .closure import attention
from .errors import KernelCompileError, KernelLaunchError, UnsupportedProblemError
from .families.tile import TileConfig
from .inspection import TileReport, compile_report, info, legal_configs
from .jit.cache import clear_cache
from .jit.compiler import CompiledKernel
from .lengths import cu_seqlens
from .problem.block_mask import BlockMask
from .second_order import backward_jvp, double_backward, jvp
from .settings import cache_dir, configure_logging
from .sparse import block_mask

if TYPE_CHECKING:
    from . import distributed, reference, testing

__all__ = [
    "BlockMask",
    "CompiledKernel",
    "KernelCompileError",
    "KernelLaunchError",
    "TileConfig",
    "TileReport",
    "UnsupportedProblemError",
    "__version__",
    "attention",
    "backward",
    "backward_jvp",
    "block_mask",
    "cache_dir",
    "clear_cache",
    "compile_report",
    "cu_seqlens",
    "decode",
    "delta",
    "distributed",
    "double_backward",
    "forward",
    "info",
    "jvp",
    "legal_configs",
    "merge",
    "mods",
    "precompile",
    "reference",
    "testing",
    "typing",
]
configure_logging()

if not TYPE_CHECKING:  # to a checker, a function of this name would provide every misspelt name

    def __getattr__(name: str) -> ModuleType:
        """Imports the modules that calls do not need, when they are first used."""
        if name in ("distributed", "reference", "testing"):
            return import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
