"""Prepared calls of several GPUs: what a call queues, without the addresses of its arrays.

A call is recorded once, on arrays that have places instead of addresses: the number of an array of the caller, and an
offset. Nothing is queued meanwhile. A later call with arrays of the same layouts queues the same steps: it only adds
the addresses of its arrays.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .copies import copy, copy_parts, divided, works_of_copy
from .copy_kernel import works_of
from .kernels import Launch, Work
from .lanes import NUM_LANES, Lane
from .matrices import Matrix
from .sums import sum_into
from .sums import works_of as works_of_sum

__all__ = ["PreparedCall"]

#: A place is an address that no memory has. Its high bits are the number of an array, from 1 on. The others are the
#: offset from the last multiple of 16 in front of the array, and `_MIDDLE` more, because strides can be negative.
_BITS, _MIDDLE, _LOW_BITS = 56, 1 << 55, 15
_ALIGNMENT = 512  # bytes, like that of CuPy's allocations


class _Now(NamedTuple):
    """What the steps of a call take.

    Attributes
    ----------
    streams : sequence of cupy.cuda.Stream
        By lane.
    values : sequence
        By number: the memory of an array, or another value.
    addresses : sequence of int
        By number: the last multiple of 16 in front of an array. The first one is 0, which stays with what is no place.
    moved : numpy.ndarray
        The addresses in the records of launches.
    """

    streams: Sequence[Any]
    values: Sequence[Any]
    addresses: Sequence[int]
    moved: np.ndarray


_Step: TypeAlias = "Callable[[_Now], None]"
_Form: TypeAlias = "Callable[[_Now], Any]"


class PreparedCall:
    """A call that is recorded on lanes of its own, and then queued as often as wanted, by one thread at a time.

    Parameters
    ----------
    values : mapping
        The arrays of the call by name, and a seed, which is passed on as it is.

    Attributes
    ----------
    symbols : dict
        What stands for the values while the call is recorded.
    lanes : list of Lane
        That of the caller, and the others.
    """

    def __init__(self, values: Mapping[str, Any]):
        self.symbols = {
            name: _array(number, value.data.ptr & _LOW_BITS, value, value.data.device_id)
            if hasattr(value, "dtype")
            else _Symbol(number)
            for number, (name, value) in enumerate(values.items(), start=1)
        }
        self._device = next(x.data.device_id for x in values.values() if hasattr(x, "dtype"))
        self._arena, self._nbytes = 1 + len(values), 0
        self._steps: list[_Step] = []
        self._places = _Places()
        self.lanes = [_RecordedLane(self._steps, self._places, number) for number in range(NUM_LANES)]

    def empty(self, shape: tuple[int, ...], dtype: np.dtype | str) -> Any:
        """An array in the memory that each call allocates."""
        offset, dtype = self._nbytes, np.dtype(dtype)
        self._nbytes += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return _array(self._arena, offset, _Layout(shape, dtype), self._device)

    def __call__(self, values: Iterable[Any], streams: Sequence[Any], arena: Any) -> None:
        """Queues the call.

        Parameters
        ----------
        values : iterable
            In the order of those that it was recorded with.
        streams : sequence of cupy.cuda.Stream
            By lane. The first one is the current stream.
        arena : cupy.cuda.Stream
            Memory is allocated on it.
        """
        import cupy

        with arena:
            memory = cupy.cuda.alloc(self._nbytes)
        pointers = [None, *[x.data if hasattr(x, "dtype") else x for x in values], memory]
        addresses = [pointer.ptr & ~_LOW_BITS if hasattr(pointer, "ptr") else 0 for pointer in pointers]
        now = _Now(streams, pointers, addresses, self._places.addresses(addresses))
        try:
            for step in self._steps:
                step(now)
        except BaseException:
            for stream in streams[1:]:  # they may still use the memory of the call
                streams[0].wait_event(_event(stream))
            raise


class _Places:
    """The places in the records of all launches of a call: their addresses are found together."""

    def __init__(self) -> None:
        self._places: list[tuple[int, int]] = []

    def add(self, places: Iterable[int]) -> slice:
        """Notes places; returns which ones they are among all."""
        first = len(self._places)
        self._places += map(_relative, places)
        return slice(first, len(self._places))

    @functools.cached_property
    def _relative_places(self) -> np.ndarray:
        return np.array(self._places, np.int64).reshape(-1, 2).T.copy()

    def addresses(self, bases: Sequence[int]) -> np.ndarray:
        """The addresses, given those of arrays by number, when all places are noted."""
        numbers, offsets = self._relative_places
        return np.array(bases)[numbers] + offsets


class _Symbol(NamedTuple):
    """Stands for a value that is no array."""

    number: int


class _RecordedLane(Lane):
    """A lane that records: see `fa2cupy.distributed.local.lanes.Lane`."""

    def __init__(self, steps: list[_Step], places: _Places, number: int):
        self._steps, self._places, self._number = steps, places, number
        self._is_idle = True

    def _add(self, *steps: _Step) -> None:
        self._steps += steps
        self._is_idle = False

    def __call__(self, function: Callable[..., Any], *args: Any) -> None:
        if function is copy_parts:
            matrices, others = divided(*args)
            for pair in others:
                self(copy, *pair)
            self._launch(works_of(matrices))
            return
        works = _WORKS[function](*args) if function in _WORKS else None
        if works is not None:
            self._launch(works)
            return
        form, number = _form(args) or (lambda now: args), self._number

        def step(now: _Now) -> None:
            if number:
                with now.streams[number]:
                    function(*form(now))
            else:
                function(*form(now))

        self._add(step)

    def _launch(self, works: Iterable[Work]) -> None:
        self._add(*(_launch(self._number, self._places, work) for work in works))

    def kernels(self, function: Callable[..., Any], *args: Any) -> None:
        from ...gpu import calls

        found = calls.bound(function, *args)
        if found is None:
            self(function, *args)
            return
        (call, addresses), number = found, self._number
        places = [_relative(address) for address in addresses]

        def step(now: _Now) -> None:
            addresses = [now.addresses[of] + offset for of, offset in places]
            if number:
                with now.streams[number]:
                    call.queue(addresses)
            else:
                call.queue(addresses)

        self._add(step)

    def on_stream(self, function: Callable[..., Any], *args: Any) -> None:
        form, number = _form(args), self._number
        if form is None:
            self._add(lambda now: function(now.streams[number].ptr, *args))
        else:
            self._add(lambda now: function(now.streams[number].ptr, *form(now)))

    def record(self) -> _Recorded:
        event, number = _Recorded(), self._number
        if number and self._is_idle:  # the last call has ended
            event.reached_on.update(range(NUM_LANES))
        else:
            event.reached_on.add(number)
            self._add(lambda now: event.record(now.streams[number]))
        return event

    def wait(self, event: _Recorded) -> None:
        number = self._number
        if number not in event.reached_on:
            event.reached_on.add(number)
            event.is_used = True
            self._add(lambda now: now.streams[number].wait_event(event.event))

    def record_for(self, *uses: Callable[[Any], None]) -> _Recorded:
        recorded, number = _Recorded(), self._number

        def step(now: _Now) -> None:
            event = recorded.event = _event(now.streams[number])
            for use in uses:
                use(event)

        self._add(step)
        return recorded

    def wait_for(self, event_of: Callable[[], Any]) -> None:
        number = self._number

        def step(now: _Now) -> None:
            event = event_of()
            if event is not None:
                now.streams[number].wait_event(event)

        self._add(step)

    def join(self) -> None:
        """Nothing: results of a GPU are read on the caller's stream."""


class _Recorded:
    """An event that each call records anew: a wait is for what was recorded last when it is queued.

    Attributes
    ----------
    reached_on : set of int
        The lanes that need not wait for it: its own, and those that have waited.
    """

    is_used = False

    def __init__(self) -> None:
        self.reached_on: set[int] = set()

    @functools.cached_property
    def event(self) -> Any:
        import cupy

        return cupy.cuda.Event(disable_timing=True)

    def record(self, stream: Any) -> None:
        if self.is_used:
            self.event.record(stream)


def _event(stream: Any) -> Any:
    import cupy

    event = cupy.cuda.Event(disable_timing=True)
    event.record(stream)
    return event


class _Layout(NamedTuple):
    """What an array has besides memory; strides are None if it is contiguous."""

    shape: tuple[int, ...]
    dtype: np.dtype
    strides: tuple[int, ...] | None = None


def _array(number: int, offset: int, like: Any, device: int) -> Any:
    """An array at a place."""
    import cupy

    nbytes = math.prod(like.shape) * like.dtype.itemsize
    memory = cupy.cuda.UnownedMemory((number << _BITS) + _MIDDLE + offset, nbytes, None, device)
    return cupy.ndarray(like.shape, like.dtype, cupy.cuda.MemoryPointer(memory, 0), like.strides)


def _relative(address: int) -> tuple[int, int]:
    """The number of the array at a place, and the offset; 0 and the address for one that memory has."""
    number = address >> _BITS
    return (number, address - (number << _BITS) - _MIDDLE) if number > 0 else (0, address)


def _launch(lane: int, places: _Places, work: Work) -> _Step:
    """The launch of a kernel whose record has places."""
    launch, own = Launch(work), places.add(work.addresses)

    def step(now: _Now) -> None:
        launch.move(now.moved[own])
        launch(now.streams[lane].ptr)

    return step


#: What launches kernels that can be recorded, by function. It returns None for arguments with which the function does
#: something else.
_WORKS: Mapping[Any, Callable[..., Iterable[Work] | None]] = {copy: works_of_copy, sum_into: works_of_sum}


def _form(value: Any) -> _Form | None:
    """What makes a value of a call of one that was recorded; None if that is the same in all calls."""
    if isinstance(value, _Symbol):
        number = value.number
        return lambda now: now.values[number]
    if isinstance(value, Matrix):
        (to, to_offset), (of, of_offset) = _relative(value.target), _relative(value.source)
        return lambda now: value._replace(target=now.addresses[to] + to_offset, source=now.addresses[of] + of_offset)
    if type(value) in (tuple, list):
        return _sequence_form(value)
    if isinstance(value, dict):
        names, form = tuple(value), _sequence_form(tuple(value.values()))
        return form and (lambda now: dict(zip(names, form(now), strict=True)))
    return _array_form(value)


def _sequence_form(values: Sequence[Any]) -> _Form | None:
    forms = [_form(value) for value in values]
    if not any(forms):
        return None
    pairs, kind = list(zip(forms, values, strict=True)), list if isinstance(values, list) else tuple
    return lambda now: kind([value if form is None else form(now) for form, value in pairs])


def _array_form(array: Any) -> _Form | None:
    import cupy

    number, offset = _relative(array.data.ptr) if isinstance(array, cupy.ndarray) else (0, 0)
    if not number:
        return None
    shape, dtype, strides = array.shape, array.dtype, array.strides

    def form(now: _Now) -> Any:
        memory = now.values[number]
        return cupy.ndarray(shape, dtype, memory + (now.addresses[number] + offset - memory.ptr), strides)

    return form
