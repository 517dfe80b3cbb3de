"""``python -m fa2cupy``: a demonstration, the state of the installation, and the kernel cache."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .cache import clear_cache
from .demo import run_demo
from .errors import UnsupportedProblemError
from .inspection import info, precompile
from .settings import cache_dir

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (RuntimeError, UnsupportedProblemError) as error:  # no device, no compiler, or no kernel for what was asked
        print(f"fa2cupy: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fa2cupy", description="FlashAttention-2 for CuPy and NumPy arrays.")
    commands = parser.add_subparsers(required=True, metavar="command")

    demo = commands.add_parser("demo", help="run every operation, check it against float64, time it")
    demo.add_argument("--device", choices=("auto", "gpu", "cpu"), default="auto")
    demo.set_defaults(run=lambda options: run_demo(options.device))

    show = commands.add_parser("info", help="versions, device, cache and families, for a bug report")
    show.set_defaults(run=_info)

    ahead = commands.add_parser("precompile", help="compile the default kernels into the disk cache; needs no GPU")
    ahead.add_argument("archs", nargs="*", help="such as sm_80 sm_90; by default that of the current device")
    ahead.add_argument("--dtypes", nargs="+", default=["float16", "bfloat16"])
    ahead.add_argument("--head-dims", nargs="+", type=int, default=[64, 128])
    ahead.add_argument("--jobs", type=int)
    ahead.set_defaults(run=_precompile)

    clear = commands.add_parser("clear-cache", help="delete all compiled kernels")
    clear.set_defaults(run=_clear_cache)
    return parser


def _info(_: argparse.Namespace) -> int:
    for name, value in info().items():
        print(f"{name + ':':<16}{value}")
    return 0


def _precompile(options: argparse.Namespace) -> int:
    kernels = precompile(options.archs or None, dtypes=options.dtypes, head_dims=options.head_dims, jobs=options.jobs)
    for kernel in kernels:
        print(f"{kernel.symbol:<72}{kernel.registers:4} registers{kernel.spill_bytes:5} bytes spilled {kernel.seconds:6.2f} s")
    print(f"{len(kernels)} kernels in {cache_dir()}")
    return 0


def _clear_cache(_: argparse.Namespace) -> int:
    print(f"{clear_cache()} kernels deleted from {cache_dir()}")
    return 0
