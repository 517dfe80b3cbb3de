"""The arrays of each kind of call: their names, in the order in which they are passed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..problem.arguments import array_backend, output_name
from ..problem.function_checks import ARGUMENTS

if TYPE_CHECKING:
    import cupy

__all__ = ["Arguments", "arguments_of", "function_arguments", "kernel_name"]

#: By call: its inputs, those inputs that may be None, and its results.
_ARRAYS = {
    "forward": (("q", "k", "v"), (), ("o", "lse")),
    "delta": (("o", "do"), (), ("delta",)),
    "backward": (("q", "k", "v", "o", "lse", "do", "delta"), ("delta",), ("dq", "dk", "dv")),
    "decode": (
        ("q", "k_cache", "v_cache", "cache_seqlens", "k", "v", "block_table"),
        ("k", "v", "block_table"),
        ("o", "lse"),
    ),
    "merge": (("o_parts", "lse_parts"), (), ("o", "lse")),
}


def kernel_name(name: str) -> str:
    """The kernels' name of an array: ``do`` is a C++ keyword, and ``score_args[0]`` no name."""
    return "dout" if name == "do" else name.replace("[", "").replace("]", "")


def function_arguments(named: Mapping[str, cupy.ndarray | None]) -> dict[str, tuple[cupy.ndarray | None, ...]]:
    """The arrays of the caller's functions, which are numbered, as the keywords that they come from."""
    return {
        keyword: tuple(array for name, array in named.items() if name.startswith(keyword))
        for keyword in ARGUMENTS.values()
    }


class Arguments:
    """The arrays of one kind of call.

    `arguments_of` makes one object for each kind of call, so that objects are compared and hashed by identity.

    Attributes
    ----------
    call : str
        A key of the table.
    inputs : tuple of str
        The arrays that the call reads.
    optional : tuple of str
        The inputs that may be None.
    results : tuple of str
    names : tuple of str
        The inputs, then the results.
    """

    def __init__(self, call: str, inputs: tuple[str, ...], optional: tuple[str, ...], results: tuple[str, ...]):
        self.call = call
        self.inputs = inputs
        self.optional = optional
        self.results = results
        self.names = (*inputs, *results)

    def named(self, arrays: tuple[cupy.ndarray | None, ...]) -> dict[str, cupy.ndarray | None]:
        """The arrays by name."""
        return dict(zip(self.names, arrays, strict=True))

    def label(self, name: str) -> str:
        """The name of an array in error messages."""
        return name if name in self.inputs else output_name(name)

    def check_backend(self, arrays: tuple[cupy.ndarray | None, ...]) -> None:
        """Raises TypeError unless all arrays are CuPy's; results and optional inputs may be None."""
        labelled = {self.label(name): array for name, array in self.named(arrays).items()}
        may_be_none = (*self.optional, *map(output_name, self.results))
        optional = {label: labelled.pop(label) for label in may_be_none}
        array_backend(labelled, optional)


@functools.lru_cache(maxsize=None)
def arguments_of(call: str, features: tuple[str, ...] = (), gradients: tuple[str, ...] = ()) -> Arguments:
    """The arrays of a kind of call.

    Parameters
    ----------
    call : {"forward", "delta", "backward", "decode", "merge"}
    features : tuple of str, optional
        Further inputs, all optional.
    gradients : tuple of str, optional
        Further results.
    """
    inputs, optional, results = _ARRAYS[call]
    return Arguments(call, (*inputs, *features), (*optional, *features), (*results, *gradients))
