"""FlashAttention-2 for CuPy and NumPy arrays: forward, Delta, backward and decoding as functions."""

from . import mods
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
from .settings import cache_dir, configure_logging
from .sparse import block_mask

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
    "block_mask",
    "cache_dir",
    "clear_cache",
    "compile_report",
    "cu_seqlens",
    "decode",
    "delta",
    "forward",
    "info",
    "legal_configs",
    "merge",
    "mods",
    "precompile",
]
configure_logging()
