"""Progress of long work: tqdm's bar on a terminal if tqdm is installed, else a line for each step."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["progress"]


class _Lines:
    """The methods of tqdm that are used; each prints a line."""

    def __init__(self, total: int, desc: str):
        self._done, self._total, self._desc = 0, total, desc

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def update(self, count: int = 1) -> None:
        self._done += count
        print(f"{self._desc} [{self._done}/{self._total}]", file=sys.stderr, flush=True)

    def write(self, text: str) -> None:
        print(text, flush=True)


def progress(total: int, desc: str) -> tqdm | _Lines:
    """A context manager that shows progress on stderr, with the methods ``update`` and ``write``."""
    if sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
        from tqdm import tqdm

        return tqdm(total=total, desc=desc)
    return _Lines(total, desc)
