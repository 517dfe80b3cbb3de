"""The user's tuning file: tiles in a JSON file that ``scripts/sweep.py --save`` writes and new problems look up."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import warnings
from pathlib import Path
from typing import Any

from ..settings import tuning_file
from ..system.folders import UntrustedError, read_file, replace_file, trusted_folder, warn_once
from ..system.locks import file_lock
from .device import DeviceInfo
from .family import Family, Kernel
from .tile import TileConfig

__all__ = ["save_tuned_tile", "tuned_tile"]

_LONGEST_SAVE_S = 10.0
_INSTEAD = "set XDG_CONFIG_HOME to a folder that only you can write to"


class _DamagedError(ValueError):
    """The tuning file is not a JSON object."""


def _key(family: Family, kernel: Kernel, causal: bool, device: DeviceInfo) -> str:
    operation, dtype, head_dim, head_dim_v, _ = kernel
    columns = str(head_dim) if head_dim_v == head_dim else f"{head_dim}v{head_dim_v}"
    return f"{device.name}/{family.public_name}/{operation}/{dtype}/{columns}/{'causal' if causal else 'full'}"


def _location() -> Path:
    """The path of the tuning file, with symbolic links resolved."""
    return Path(os.path.realpath(tuning_file()))


def _read(file: Path) -> dict[str, Any]:
    """The entries, not checked yet; none if there is no file."""
    try:
        entries = json.loads(read_file(file).decode())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise _DamagedError(f"{file} is not a tuning file ({error})") from error
    if not isinstance(entries, dict):
        raise _DamagedError(f"{file} is not a tuning file (its entries have no names)")
    return entries


def _read_or_set_aside(file: Path) -> dict[str, Any]:
    """The entries; a damaged file is renamed and counts as empty."""
    try:
        return _read(file)
    except _DamagedError as error:
        names = (f"{file.name}.damaged-{number}" for number in itertools.count(1))
        kept = next(path for path in map(file.with_name, names) if not path.exists())
        os.replace(file, kept)
        warnings.warn(f"{error}; it is kept as {kept.name}, and another one is written", stacklevel=3)
        return {}


@functools.lru_cache(maxsize=1)
def _tuned_tiles() -> dict[str, TileConfig]:
    """The entries that are tiles. The file is read once in a process, because every new problem looks tiles up."""
    path = tuning_file()
    try:
        if not path.exists():
            return {}
        file = _location()
        folder = trusted_folder(file.parent)
        entries = _read(folder / file.name) if folder else {}
    except UntrustedError as error:
        warnings.warn(f"{path} is not used, because {error.advice(_INSTEAD)}", stacklevel=2)
        return {}
    except NotADirectoryError:
        return {}
    except _DamagedError as error:
        warnings.warn(f"{error}; default tiles are used. Delete it or write it anew.", stacklevel=2)
        return {}
    except OSError as error:
        warnings.warn(f"{path} cannot be read ({error.strerror or error}); default tiles are used", stacklevel=2)
        return {}
    tiles = {}
    for key, fields in entries.items():
        try:
            tiles[key] = TileConfig(**fields)
        except (TypeError, ValueError) as error:
            warnings.warn(f"{path}: the entry {key!r} is no tile ({error}); delete it or save it anew", stacklevel=2)
    return tiles


def tuned_tile(family: Family, kernel: Kernel, causal: bool, device: DeviceInfo) -> TileConfig | None:
    """The user's tile for this kernel on this device, or None if there is none or it is not legal."""
    key = _key(family, kernel, causal, device)
    tile = _tuned_tiles().get(key)
    if tile is None:
        return None
    reason = family.why_illegal(kernel, tile, device)
    if reason:
        what = f"{tuning_file()}: the entry {key!r} is not legal ({tile}: {reason})"
        warn_once((tuning_file(), key), f"{what}; the default tile is used. Delete the entry or save it anew.")
        return None
    return tile


def save_tuned_tile(family: Family, kernel: Kernel, causal: bool, device: DeviceInfo, tile: TileConfig) -> None:
    """Adds or replaces one entry of the tuning file. This process uses it for new problems.

    Other entries are kept, even if they are no tiles. A damaged file is kept under another name, with a warning.

    Raises
    ------
    PermissionError
        Other users can write to the file or its folder.
    TimeoutError
        Another process keeps the file locked.
    """
    target = _location()
    file = trusted_folder(target.parent, create=True) / target.name
    try:
        with file_lock(file.with_name(f"{file.name}.lock"), _LONGEST_SAVE_S):
            entries = _read_or_set_aside(file)
            entries[_key(family, kernel, causal, device)] = dataclasses.asdict(tile)
            replace_file(file, (json.dumps(entries, indent=2, sort_keys=True) + "\n").encode())
    except TimeoutError as error:
        raise TimeoutError(
            f"another process has been saving to {file} for {_LONGEST_SAVE_S:.0f} s; end it and save again"
        ) from error
    _tuned_tiles.cache_clear()
