"""FlashAttention-2 for CuPy and NumPy arrays: forward, Delta, backward and decoding as functions."""

from ._version import __version__
from .ahead import precompile
from .api import backward, decode, delta, forward, merge
from .closure import attention
from .errors import KernelCompileError, KernelLaunchError, UnsupportedProblemError
from .families.tile import TileConfig
from .inspection import info, legal_configs
from .jit.cache import clear_cache
from .lengths import cu_seqlens
from .settings import cache_dir, configure_logging

__all__ = [
    "KernelCompileError",
    "KernelLaunchError",
    "TileConfig",
    "UnsupportedProblemError",
    "__version__",
    "attention",
    "backward",
    "cache_dir",
    "clear_cache",
    "cu_seqlens",
    "decode",
    "delta",
    "forward",
    "info",
    "legal_configs",
    "merge",
    "precompile",
]
configure_logging()
