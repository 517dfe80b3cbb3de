"""Bytes with flags for those that were written, and global memory: named buffers with gaps between them."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from math import prod

import numpy as np

from .errors import AccessError, PtxError
from .scalars import unsigned

__all__ = ["Buffer", "ByteStore", "Memory", "Part", "columns", "joined"]

_GAP = 1 << 20
_BASE = 0x10_0000_0000
_ALIGNMENT = 512  # of cudaMalloc
_ONES = {n: unsigned(n)(int.from_bytes(b"\1" * n, "little")) for n in (1, 2, 4, 8)}
_ONES[16] = _ONES[8]


def columns(words: np.ndarray, size: int, count: int) -> np.ndarray:
    """Returns words as rows of `count` elements of `size` bytes."""
    return words.view(unsigned(size)).reshape(-1, count)


def joined(values: Sequence[np.ndarray]) -> np.ndarray:
    """Returns one wide word of each thread's elements, the opposite of `columns`."""
    count, size = len(values), values[0].itemsize
    if count == 1:
        return values[0]
    rows = np.empty((len(values[0]), count), values[0].dtype)
    for column, value in enumerate(values):
        rows[:, column] = value
    return rows.view(np.uint64).reshape(-1, 2) if count * size == 16 else rows.view(unsigned(count * size))[:, 0]


class ByteStore:
    """Bytes that are gathered and scattered as aligned words of 1, 2, 4, 8 or 16 bytes.

    Attributes
    ----------
    data : numpy.ndarray of uint8
    written : numpy.ndarray of uint8 or None
        1 where a byte was written; None if all count as written.
    """

    def __init__(self, nbytes: int, tracked: bool) -> None:
        padded = max(-(-nbytes // 16) * 16, 16)
        self.data = np.zeros(padded, np.uint8)
        self.written = np.zeros(padded, np.uint8) if tracked else None
        self._words = self._word_views(self.data)
        self._flags = self._word_views(self.written) if tracked else {}

    @staticmethod
    def _word_views(data: np.ndarray) -> dict[int, np.ndarray]:
        views = {n: data.view(unsigned(n)) for n in (1, 2, 4, 8)}
        views[16] = views[8].reshape(-1, 2)  # rows of two: NumPy has no integers of 128 bits
        return views

    def words(self, nbytes: int) -> np.ndarray:
        return self._words[nbytes]

    def gather(self, offset: np.ndarray, nbytes: int) -> np.ndarray:
        return self._words[nbytes].take(offset // nbytes, axis=0)

    def scatter(self, offset: np.ndarray, nbytes: int, words: np.ndarray) -> None:
        index = offset // nbytes
        self._words[nbytes][index] = words
        if self._flags:
            self._flags[nbytes][index] = _ONES[nbytes]

    def unwritten(self, offset: np.ndarray, nbytes: int) -> int | None:
        """Returns the index of the first of these words that was not written entirely; None if all were."""
        return self.unwritten_words(offset // nbytes, nbytes) if self._flags else None

    def unwritten_words(self, number: np.ndarray, nbytes: int) -> int | None:
        """Returns the same for words that are given by their numbers."""
        if not self._flags:
            return None
        missing = self._flags[nbytes].take(number, axis=0) != _ONES[nbytes]
        if not np.count_nonzero(missing):
            return None
        return int(np.argmax(missing if nbytes < 16 else missing.any(1)))


class Buffer(ByteStore):
    """One mapped array."""

    def __init__(self, address: int, array: np.ndarray, name: str, tracked: bool) -> None:
        super().__init__(array.nbytes, tracked)
        self.address, self.name = address, name
        self.shape, self.dtype, self.nbytes = array.shape, array.dtype, array.nbytes
        self.data[: self.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def array(self) -> np.ndarray:
        return self.data[: self.nbytes].view(self.dtype).reshape(self.shape)


Part = tuple[Buffer, np.ndarray | None, np.ndarray]  # a buffer, which addresses are in it (None: all), their offsets


class Memory:
    """The global memory of one simulated device."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._buffers: list[Buffer] = []
        self._next = _BASE
        self.symbols: dict[tuple[object, str], int] = {}  # (module, variable): address

    def alloc(self, data: np.ndarray, name: str = "") -> int:
        """Copies an array to the device and returns its address; every byte counts as written."""
        return self.map(np.asarray(data), name, tracked=False)

    def empty(self, shape: int | tuple[int, ...], dtype: type = np.uint8, name: str = "") -> int:
        """Returns the address of a new buffer, whose bytes a kernel must write before they are read."""
        count = prod(shape) if isinstance(shape, tuple) else int(shape)
        rubbish = np.full(count * np.dtype(dtype).itemsize, 0xCB, np.uint8)
        return self.map(rubbish.view(dtype).reshape(shape), name, tracked=True)

    def map(self, data: np.ndarray, name: str, *, tracked: bool, align: int = _ALIGNMENT, at: int | None = None) -> int:
        """Maps a copy of an array; `at` is a fixed address, for parts of an array larger than the host's memory."""
        address = -(-self._next // align) * align if at is None else at
        buffer = Buffer(address, data, name or f"buffer{len(self._buffers)}", tracked)
        place = bisect.bisect(self._starts, address)
        ends = [b.address + b.nbytes for b in self._buffers[max(place - 1, 0) : place]]
        if any(end > address for end in ends) or any(
            n < address + buffer.nbytes for n in self._starts[place : place + 1]
        ):
            raise PtxError(f"{buffer.name} at 0x{address:x} overlaps another buffer")
        self._next = max(self._next, address + len(buffer.data) + _GAP)
        self._starts.insert(place, address)
        self._buffers.insert(place, buffer)
        return address

    def read(self, address: int) -> np.ndarray:
        """Returns a live view of the buffer that begins at this address, with its original shape and type."""
        buffer = self.find(int(address))
        if buffer.address != int(address):
            raise PtxError(f"0x{int(address):x} is inside of {buffer.name}, not its start")
        return buffer.array()

    def written(self, address: int) -> np.ndarray:
        """Returns which bytes of an `empty` buffer have been written."""
        buffer = self.find(int(address))
        return np.ones(buffer.nbytes, bool) if buffer.written is None else buffer.written[: buffer.nbytes].view(bool)

    def find(self, address: int, nbytes: int = 1, access: str = "access") -> Buffer:
        """Returns the buffer that holds all these bytes."""
        number = bisect.bisect_right(self._starts, address) - 1
        if number < 0:
            raise AccessError(f"global {access} of {nbytes} bytes at 0x{address:x}: out of bounds, below every buffer")
        buffer = self._buffers[number]
        offset = address - buffer.address
        if offset + nbytes > buffer.nbytes:
            raise AccessError(
                f"global {access} of {nbytes} bytes at 0x{address:x} is out of bounds: at offset {offset} of "
                f"{buffer.name}, which has {buffer.nbytes} bytes"
            )
        return buffer

    def part_of(self, buffer: Buffer, address: int) -> Buffer:
        """Returns the buffer that holds the byte if it is of the same array, which may be mapped in parts."""
        part = self._buffers[max(bisect.bisect_right(self._starts, address) - 1, 0)]
        return part if part.name == buffer.name else buffer

    def load(self, parts: Sequence[Part], nbytes: int, check_written: bool) -> np.ndarray:
        """Loads a word from every address that was located."""
        for buffer, chosen, offset in parts:
            bad = buffer.unwritten(offset, nbytes) if check_written else None
            if bad is not None:
                raise AccessError(
                    f"read of uninitialised global memory: {nbytes} bytes at 0x{buffer.address + int(offset[bad]):x}, "
                    f"offset {int(offset[bad])} of {buffer.name}, which has {buffer.nbytes} bytes",
                    bad if chosen is None else int(chosen[bad]),
                )
        if len(parts) == 1:
            return parts[0][0].gather(parts[0][2], nbytes)
        count = sum(len(offset) for _, _, offset in parts)
        words = np.empty((count, 2) if nbytes == 16 else count, unsigned(min(nbytes, 8)))
        for buffer, chosen, offset in parts:
            words[chosen] = buffer.gather(offset, nbytes)
        return words

    def store(self, parts: Sequence[Part], nbytes: int, words: np.ndarray) -> None:
        for buffer, chosen, offset in parts:
            buffer.scatter(offset, nbytes, words if chosen is None else words[chosen])

    def read_bytes(self, address: int, nbytes: int, check_written: bool = True) -> np.ndarray:
        """Returns a run of bytes, as bulk copies read it."""
        buffer = self.find(address, nbytes, "read")
        start = address - buffer.address
        if check_written and buffer.written is not None and not buffer.written[start : start + nbytes].all():
            raise PtxError(f"bulk read of uninitialised global memory: {buffer.name}[{start}:{start + nbytes}]")
        return buffer.data[start : start + nbytes]

    def write_bytes(self, address: int, data: np.ndarray) -> None:
        buffer = self.find(address, len(data), "write")
        start = address - buffer.address
        buffer.data[start : start + len(data)] = data
        if buffer.written is not None:
            buffer.written[start : start + len(data)] = 1

    def locate(self, addresses: np.ndarray, nbytes: int, access: str) -> list[Part]:
        """Returns the buffers of the addresses, all of which must be in bounds."""
        number = bisect.bisect_right(self._starts, int(addresses.min())) - 1
        buffer = self._buffers[max(number, 0)]
        if number >= 0 and int(addresses.max()) + nbytes <= buffer.address + buffer.nbytes:
            return [(buffer, None, addresses - buffer.address)]
        owner = np.searchsorted(np.array(self._starts), addresses, side="right") - 1
        ends = np.array([b.address + b.nbytes for b in self._buffers])
        bad = (owner < 0) | (addresses + nbytes > ends[owner])
        if bad.any():
            index = int(np.argmax(bad))
            try:
                self.find(int(addresses[index]), nbytes, access)
            except AccessError as error:
                error.index = index
                raise
        parts = []
        for number in np.unique(owner):
            chosen = np.nonzero(owner == number)[0]
            parts.append((self._buffers[number], chosen, addresses[chosen] - self._buffers[number].address))
        return parts
