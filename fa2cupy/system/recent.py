"""A cache of the entries that were used last."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from .locks import new_lock

__all__ = ["RecentlyUsed"]

_Value = TypeVar("_Value")


class RecentlyUsed(Generic[_Value]):
    """Values by key; when it is full, a new value replaces one that was not used for long. Threads can share it.

    The oldest entry is dropped, unless it was read since it last was the oldest: then it goes to the end of the queue
    (second-chance replacement). Reading an entry therefore takes no lock and changes no order.

    Parameters
    ----------
    size : int
        Largest number of entries.
    """

    def __init__(self, size: int):
        self._size = size
        self._entries: dict[Hashable, _Entry[_Value]] = {}
        self._lock = new_lock()

    def get(self, key: Hashable) -> _Value | None:
        """The value of a key, or None."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry.was_read = True
        return entry.value

    def put(self, key: Hashable, value: _Value) -> _Value:
        """Keeps a value, unless another thread has done so: returns the one that is kept."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                while len(self._entries) >= self._size:
                    self._drop_one()
                entry = self._entries[key] = _Entry(value)
            return entry.value

    def _drop_one(self) -> None:
        oldest = next(iter(self._entries))
        entry = self._entries.pop(oldest)
        if entry.was_read:
            entry.was_read = False
            self._entries[oldest] = entry

    def clear(self) -> None:
        """Drops all entries."""
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)


class _Entry(Generic[_Value]):
    __slots__ = ("value", "was_read")

    def __init__(self, value: _Value):
        self.value, self.was_read = value, False
