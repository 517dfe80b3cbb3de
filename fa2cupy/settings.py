"""The environment variables of the package, with their defaults."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from .system.folders import warn_once

__all__ = ["cache_dir", "cache_limit", "cache_path", "configure_logging", "dump_directory", "tuning_file"]

_MIB = 1024**2
_DEFAULT_LIMIT_MIB = 1024


def cache_dir() -> Path:
    """Folder of the compiled kernels.

    ``FA2CUPY_CACHE_DIR`` if set, else ``fa2cupy`` in the user's cache folder (``$XDG_CACHE_HOME`` or ``~/.cache``).
    The first compilation creates it. Only the user can access it.

    Returns
    -------
    pathlib.Path
    """
    chosen = os.environ.get("FA2CUPY_CACHE_DIR")
    return Path(chosen).absolute() if chosen else _user_folder("XDG_CACHE_HOME", ".cache") / "fa2cupy"


def cache_path() -> list[Path]:
    """Shared cache folders that are searched after `cache_dir`: ``FA2CUPY_CACHE_PATH``, a list like ``PATH``."""
    return [Path(each).absolute() for each in os.environ.get("FA2CUPY_CACHE_PATH", "").split(os.pathsep) if each]


def cache_limit() -> int | None:
    """Largest size of `cache_dir` in bytes, from ``FA2CUPY_CACHE_LIMIT`` in MiB (default 1024; 0 is no limit, None)."""
    chosen = os.environ.get("FA2CUPY_CACHE_LIMIT") or str(_DEFAULT_LIMIT_MIB)
    if not chosen.isdecimal():
        text = f"FA2CUPY_CACHE_LIMIT: expected a number of MiB (0 is no limit), got {chosen!r}"
        warn_once(text, f"{text}; {_DEFAULT_LIMIT_MIB} is used instead")
        return _DEFAULT_LIMIT_MIB * _MIB
    return int(chosen) * _MIB or None


def tuning_file() -> Path:
    """Path of the user's tuning file, which ``scripts/sweep.py --save`` writes. It need not exist."""
    return _user_folder("XDG_CONFIG_HOME", ".config") / "fa2cupy" / "tuning.json"


def dump_directory() -> Path | None:
    """Folder for rendered sources, cubins and logs: ``FA2CUPY_DUMP_DIR``; None if it is not set."""
    chosen = os.environ.get("FA2CUPY_DUMP_DIR")
    return Path(chosen) if chosen else None


def configure_logging() -> None:
    """Prints log messages of the package on stderr, from the level in ``FA2CUPY_LOG`` (such as ``info``) up."""
    level = os.environ.get("FA2CUPY_LOG", "").upper()
    if not level:
        return
    logger = logging.getLogger("fa2cupy")
    if not isinstance(logging.getLevelName(level), int):
        logger.warning("FA2CUPY_LOG: %r is not a level; use debug, info, warning or error", level)
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("fa2cupy: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level)


def _user_folder(variable: str, default: str) -> Path:
    chosen = _absolute(variable)  # the XDG specification says to ignore relative paths
    if chosen:
        return chosen
    try:
        return Path.home() / default
    except RuntimeError:  # no home folder, as for a container's user without an entry in passwd
        return (_absolute("TMPDIR") or Path("/tmp")) / f"fa2cupy-{os.getuid()}"


def _absolute(variable: str) -> Path | None:
    path = Path(os.environ.get(variable, ""))
    return path if path.is_absolute() else None
