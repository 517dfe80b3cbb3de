"""Calls with arrays that the kernels do not take: they run on copies, and copy the results back."""

from __future__ import annotations

from collections.abc import Callable, Collection

import cupy

from ..problem.attention import ROWS_OF
from ..problem.checks import Result
from .arguments import KERNEL_NAMES, Arguments
from .device_memory import is_capturing, temporaries
from .prepared import KernelCall

__all__ = ["CopyingCall"]


class CopyingCall:
    """A prepared call that runs another one on copies.

    Parameters
    ----------
    inner : KernelCall
        Takes the copies, and allocates results of its own.
    arguments : Arguments
    results : tuple of Result
        What the caller gets.
    copied : collection of str
        The arrays that `inner` does not take.
    head_dim : int
        Columns of the copies.
    check_overlap : callable
        Raises ValueError for addresses at which arrays overlap.
    """

    def __init__(
        self,
        inner: KernelCall,
        arguments: Arguments,
        results: tuple[Result, ...],
        copied: Collection[str],
        head_dim: int,
        check_overlap: Callable[[list[int]], None],
    ):
        self.inner = inner
        self.results = results
        self.head_dim = head_dim
        self.check_overlap = check_overlap
        self.first_result = len(arguments.inputs)
        self.copied = [(position, name) for position, name in enumerate(arguments.inputs) if name in copied]

    def __call__(self, arrays: tuple, addresses: list[int]) -> tuple:
        self.check_overlap(addresses)
        with cupy.cuda.Device(self.inner.ordinal):
            given = arrays[self.first_result :]
            if is_capturing(cupy.cuda.get_current_stream().ptr):
                # All that is allocated from here on is the graph's; results are not.
                kinds = zip(self.results, given, strict=True)
                given = tuple(
                    [cupy.ndarray(kind.shape, kind.dtype) if array is None else array for kind, array in kinds]
                )
            with temporaries():
                return self._run(arrays[: self.first_result], addresses, given)

    def _run(self, inputs: tuple, addresses: list[int], given: tuple) -> tuple:
        inputs, addresses = list(inputs), addresses[: self.first_result]
        for position, name in self.copied:
            if inputs[position] is not None:
                inputs[position] = self._copy(name, inputs[position])
                addresses[position] = inputs[position].data.ptr
        none = (None,) * len(self.results)
        found = self.inner((*inputs, *none), [*addresses, *[0] * len(none)])
        return tuple([self._deliver(*parts) for parts in zip(self.results, found, given, strict=True)])

    def _copy(self, name: str, array):
        if ROWS_OF.get(KERNEL_NAMES.get(name, name)) not in ("queries", "keys"):
            return cupy.ascontiguousarray(array)
        if self.head_dim == array.shape[-1]:
            return array.copy(order="C")
        padded = cupy.zeros((*array.shape[:-1], self.head_dim), array.dtype)
        padded[..., : array.shape[-1]] = array
        return padded

    @staticmethod
    def _deliver(kind: Result, found, given):
        result = found if found.shape == kind.shape else found[..., : kind.shape[-1]]
        if given is None:
            return cupy.ascontiguousarray(result.astype(kind.dtype, copy=False))
        given[...] = result
        return given
