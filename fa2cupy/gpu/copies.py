"""Calls with arrays that the kernels cannot take: they run on copies, and copy the results back."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import cupy

from ..problem.checks import Result
from .arguments import TENSORS, Arguments
from .device_memory import is_capturing, temporaries
from .prepared import KernelCall, NotBoundError, binds

__all__ = ["CopyingCall"]


class CopyingCall:
    """A prepared call that runs another one on copies.

    Parameters
    ----------
    inner : KernelCall
        The call that takes the copies. It allocates the results that are copied, and those that the caller does not
        give.
    arguments : Arguments
    results : tuple of Result
        The results that the caller gets.
    copied : collection of str
        The inputs and results that `inner` cannot take as they are, by name.
    columns_of : callable
        The columns of the copy of a tensor, by its name.
    check_overlap : callable
        Raises ValueError if arrays at the given addresses overlap.
    """

    def __init__(
        self,
        inner: KernelCall,
        arguments: Arguments,
        results: tuple[Result, ...],
        copied: Collection[str],
        columns_of: Callable[[str], int],
        check_overlap: Callable[[list[int]], None],
    ):
        self.inner = inner
        self.results = results
        self.columns_of = columns_of
        self.check_overlap = check_overlap
        self.first_result = len(arguments.inputs)
        self.copied = [(position, name) for position, name in enumerate(arguments.names) if name in copied]

    def __call__(
        self, arrays: tuple[cupy.ndarray | None, ...], addresses: list[int], sparse: Any = None
    ) -> tuple[cupy.ndarray, ...]:
        """The results: see `KernelCall`."""
        if binds():
            raise NotBoundError
        self.check_overlap(addresses)
        with cupy.cuda.Device(self.inner.ordinal):
            given = arrays[self.first_result :]
            if is_capturing(cupy.cuda.get_current_stream().ptr):
                # The allocations below belong to the graph; results belong to the caller.
                kinds = zip(self.results, given, strict=True)
                given = tuple(
                    [cupy.ndarray(kind.shape, kind.dtype) if array is None else array for kind, array in kinds]
                )
            with temporaries():
                return self._run(list(arrays), list(addresses), given, sparse)

    def _run(
        self,
        taken: list[cupy.ndarray | None],
        addresses: list[int],
        given: tuple[cupy.ndarray | None, ...],
        sparse: Any,
    ) -> tuple[cupy.ndarray, ...]:
        for position, name in self.copied:
            array = taken[position]
            if array is not None:
                copy = taken[position] = self._copy(name, array) if position < self.first_result else None
                addresses[position] = 0 if copy is None else copy.data.ptr
        found = self.inner(tuple(taken), addresses, sparse)
        return tuple([self._deliver(*parts) for parts in zip(self.results, found, given, strict=True)])

    def _copy(self, name: str, array: cupy.ndarray) -> cupy.ndarray:
        if name not in TENSORS:
            return cupy.ascontiguousarray(array)
        columns = self.columns_of(name)
        if columns == array.shape[-1]:
            return array.copy(order="C")
        padded = cupy.zeros((*array.shape[:-1], columns), array.dtype)
        padded[..., : array.shape[-1]] = array
        return padded

    @staticmethod
    def _deliver(kind: Result, found: cupy.ndarray, given: cupy.ndarray | None) -> cupy.ndarray:
        if found is given:
            return found
        result = found if found.shape == kind.shape else found[..., : kind.shape[-1]]
        if given is None:
            return cupy.ascontiguousarray(result.astype(kind.dtype, copy=False))
        given[...] = result
        return given
