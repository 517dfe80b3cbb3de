"""The environment variables, all of them."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

__all__ = ["cache_dir", "configure_logging", "dump_directory", "tuning_file"]


def cache_dir() -> Path:
    """Folder of the compiled kernels.

    ``FA2CUPY_CACHE_DIR`` if set, else ``fa2cupy`` in the user's cache folder (``$XDG_CACHE_HOME`` or ``~/.cache``).
    It is created by the first compilation.

    Returns
    -------
    pathlib.Path
    """
    chosen = os.environ.get("FA2CUPY_CACHE_DIR")
    return Path(chosen).absolute() if chosen else _user_folder("XDG_CACHE_HOME", ".cache") / "fa2cupy"


def tuning_file() -> Path:
    """The user's own tile choices, as ``scripts/sweep.py --save`` writes them; need not exist."""
    return _user_folder("XDG_CONFIG_HOME", ".config") / "fa2cupy" / "tuning.json"


def dump_directory() -> Path | None:
    """Where rendered sources, cubins and logs are written, or None: ``FA2CUPY_DUMP_DIR``."""
    chosen = os.environ.get("FA2CUPY_DUMP_DIR")
    return Path(chosen) if chosen else None


def configure_logging() -> None:
    """Prints the package's log lines on stderr from the level in ``FA2CUPY_LOG`` (such as ``info``) up."""
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
    chosen = os.environ.get(variable)
    try:
        return Path(chosen) if chosen else Path.home() / default
    except RuntimeError:  # no home folder: a container user without an entry in passwd
        return Path(tempfile.gettempdir())
