"""Progress of work that takes minutes: tqdm's bar on a terminal where that is installed, else a line for each step."""

from __future__ import annotations

import importlib.util
import sys

__all__ = ["progress"]


class _Lines:
    """The part of tqdm's interface that is used, as plain lines."""

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


def progress(total: int, desc: str):
    """A progress bar on stderr with ``update`` and ``write``, to be used in a ``with``."""
    if sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
        from tqdm import tqdm

        return tqdm(total=total, desc=desc)
    return _Lines(total, desc)
