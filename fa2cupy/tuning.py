"""The user's own tile choices: a JSON file that ``scripts/sweep.py --save`` writes and every call consults."""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings

from .device import DeviceInfo
from .settings import tuning_file
from .tiles import TileConfig, why_illegal

__all__ = ["save_tuned_tile", "tuned_tile"]


def _key(operation: str, family: str, dtype: str, head_dim: int, causal: bool, device: DeviceInfo) -> str:
    return f"{device.name}/{family}/{operation}/{dtype}/{head_dim}/{'causal' if causal else 'full'}"


@functools.lru_cache(maxsize=1)
def _tuned_tiles() -> dict[str, TileConfig]:
    # Read once in a process: a call looks up, it never searches.
    path = tuning_file()
    try:
        return {key: TileConfig(**fields) for key, fields in json.loads(path.read_text(encoding="utf-8")).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        warnings.warn(f"{path} is not a tuning file ({error}); default tiles are used. Delete it or write it anew.", stacklevel=2)
        return {}


def tuned_tile(
    operation: str, family: str, dtype: str, head_dim: int, causal: bool, device: DeviceInfo
) -> TileConfig | None:
    """The user's tile for this kernel on this device, if there is one and it is legal."""
    tile = _tuned_tiles().get(_key(operation, family, dtype, head_dim, causal, device))
    if tile is None or why_illegal(operation, family, dtype, head_dim, tile, device):
        return None
    return tile


def save_tuned_tile(
    operation: str, family: str, dtype: str, head_dim: int, causal: bool, device: DeviceInfo, tile: TileConfig
) -> None:
    """Adds or replaces one entry of the tuning file; calls of this process use it from the next new problem on."""
    path = tuning_file()
    entries = {key: dataclasses.asdict(value) for key, value in _tuned_tiles().items()}
    entries[_key(operation, family, dtype, head_dim, causal, device)] = dataclasses.asdict(tile)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".json.new")
    temporary.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    temporary.replace(path)
    _tuned_tiles.cache_clear()
