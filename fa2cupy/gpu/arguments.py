"""Which arrays a kind of call has, by name and in the order in which they are passed."""

from __future__ import annotations

import functools

from ..problem.arguments import array_backend, output_name

__all__ = ["KERNEL_NAMES", "Arguments", "arguments_of"]

#: Kernels' names of arrays where they differ: C++ keeps ``do`` for itself, and dbias is a sum before it is rounded.
KERNEL_NAMES = {"do": "dout", "dbias": "dbias_accum"}

#: Of each call: what it reads, which of that may be None, and its results.
_ARRAYS = {
    "forward": (("q", "k", "v"), (), ("o", "lse")),
    "delta": (("o", "do"), (), ("delta",)),
    "backward": (("q", "k", "v", "o", "lse", "do", "delta"), ("delta",), ("dq", "dk", "dv")),
}


class Arguments:
    """The arrays of a call: what it reads, which of that may be None, and its results.

    There is one object for each kind of call, which is compared and hashed by identity: `arguments_of` makes it.
    """

    def __init__(self, call: str, inputs: tuple[str, ...], optional: tuple[str, ...], results: tuple[str, ...]):
        self.call = call
        self.inputs = inputs
        self.optional = optional
        self.results = results
        self.names = (*inputs, *results)

    def named(self, arrays: tuple) -> dict[str, object]:
        """The arrays by name."""
        return dict(zip(self.names, arrays, strict=True))

    def label(self, name: str) -> str:
        """How messages call an array."""
        return name if name in self.inputs else output_name(name)

    def check_backend(self, arrays: tuple) -> None:
        """All are CuPy arrays."""
        labelled = {self.label(name): array for name, array in self.named(arrays).items()}
        may_be_none = (*self.optional, *map(output_name, self.results))
        optional = {label: labelled.pop(label) for label in may_be_none}
        array_backend(labelled, optional)


@functools.lru_cache(maxsize=None)
def arguments_of(call: str, features: tuple[str, ...] = (), gradients: tuple[str, ...] = ()) -> Arguments:
    """The arrays of a call.

    Parameters
    ----------
    call : {"forward", "delta", "backward"}
    features : tuple of str, optional
        Further arrays that it reads.
    gradients : tuple of str, optional
        Further results.
    """
    inputs, optional, results = _ARRAYS[call]
    return Arguments(call, (*inputs, *features), (*optional, *features), (*results, *gradients))
