"""``fa2cupy``, also ``python -m fa2cupy``: a demonstration, a check of several GPUs, the installation, the cache."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence

from ._version import __version__
from .ahead import precompile
from .demo import run_demo
from .errors import UnsupportedProblemError
from .inspection import info
from .jit.cache import clear_cache
from .problem.choices import CALL_KEYWORDS
from .scaleout import run_scaleout
from .settings import cache_dir

__all__ = ["main", "run_command"]

_INTERRUPTED, _CLOSED_PIPE = 130, 141  # as shells report SIGINT and SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    options = _parser().parse_args(arguments)
    return run_command("fa2cupy", lambda: _run(options))


def run_command(name: str, command: Callable[[], int]) -> int:
    """Runs a command and returns its exit status, also if Ctrl-C or a closed pipe ends it."""
    try:
        status = command()
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        with contextlib.suppress(OSError):  # discards buffered output, which would fail again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED_PIPE


def _run(options: argparse.Namespace) -> int:
    try:
        return options.run(options)
    except (RuntimeError, UnsupportedProblemError) as error:  # no device, no compiler, or no kernel
        print(f"fa2cupy: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fa2cupy", description="FlashAttention-2 for CuPy and NumPy arrays.")
    parser.add_argument("--version", action="version", version=f"fa2cupy {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    demo = commands.add_parser("demo", help="run every operation, check it against float64, time it")
    demo.add_argument("--device", choices=("auto", "gpu", "cpu"), default="auto")
    demo.set_defaults(run=lambda options: run_demo(options.device))

    ranks = commands.add_parser(
        "scaleout", help="spread a sequence over the GPUs, or simulated ranks: check, efficiency"
    )
    ranks.add_argument("--device", choices=("auto", "gpu", "cpu"), default="auto")
    ranks.add_argument(
        "--ranks", type=int, metavar="N", help="GPUs (by default all), or simulated ranks (by default 4)"
    )
    ranks.add_argument("--rows", type=int, metavar="N", help="length of the sequence: 32768, on NumPy 512, by default")
    ranks.add_argument("--heads", type=int, default=32, metavar="N")
    ranks.add_argument("--heads-kv", type=int, default=8, metavar="N")
    ranks.set_defaults(run=_scaleout)

    show = commands.add_parser("info", help="versions, device, cache and families, for a bug report")
    show.set_defaults(run=_info)

    ahead = commands.add_parser("precompile", help="compile the kernels of calls into the disk cache; needs no GPU")
    ahead.add_argument("archs", nargs="*", help="such as sm_80 sm_90; by default that of the current device")
    ahead.add_argument("--dtypes", nargs="+", default=["float16", "bfloat16"], metavar="NAME")
    ahead.add_argument("--head-dims", nargs="+", type=int, default=[64, 128], metavar="N")
    ahead.add_argument("--head-dim-v", type=int, metavar="N", help="columns of v where they are not those of q and k")
    ahead.add_argument(
        "--features",
        nargs="*",
        action="append",
        metavar="NAME",
        help=f"features of the calls, which have them all; repeat it for other calls: {', '.join(CALL_KEYWORDS)}",
    )
    ahead.add_argument(
        "--no-decode",
        action="store_true",
        help="leave out decode, merge and forwards of a few queries, as for training",
    )
    ahead.add_argument(
        "--second-order", action="store_true", help="add the kernels of jvp, backward_jvp and double_backward"
    )
    ahead.add_argument("--distributed", action="store_true", help="add the kernels between the calls of several ranks")
    ahead.add_argument("--jobs", type=int, metavar="N", help="compilers at a time; one per CPU by default")
    ahead.set_defaults(run=_precompile)

    clear = commands.add_parser("clear-cache", help="delete all compiled kernels")
    clear.set_defaults(run=_clear_cache)
    return parser


def _scaleout(options: argparse.Namespace) -> int:
    try:
        return run_scaleout(options.device, options.ranks, options.rows, options.heads, options.heads_kv)
    except (ValueError, ImportError) as error:  # a number that does not fit, or no NCCL
        print(f"fa2cupy: {error}", file=sys.stderr)
        return 2


def _info(_: argparse.Namespace) -> int:
    for name, value in info().items():
        print(f"{name + ':':<16}{value}")
    return 0


def _precompile(options: argparse.Namespace) -> int:
    calls = {"dtypes": options.dtypes, "head_dims": options.head_dims, "head_dim_v": options.head_dim_v}
    calls |= {"decode": not options.no_decode, "second_order": options.second_order, "distributed": options.distributed}
    try:
        kernels = precompile(
            options.archs or None, **calls, features=options.features or (), jobs=options.jobs, progress=True
        )
    except ValueError as error:  # an argument that argparse does not check
        print(f"fa2cupy: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"fa2cupy: interrupted; what is compiled so far is kept in {cache_dir()}", file=sys.stderr)
        return _INTERRUPTED
    for kernel in kernels:
        spilled = f"{kernel.spill_bytes:5} bytes spilled"
        print(f"{kernel.symbol:<72}{kernel.registers:4} registers{spilled} {kernel.seconds:6.2f} s")
    print(f"{len(kernels)} kernels in {cache_dir()}")
    return 0


def _clear_cache(_: argparse.Namespace) -> int:
    print(f"{clear_cache()} kernels deleted from {cache_dir()}")
    return 0
