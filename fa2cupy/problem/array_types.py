"""Types of array arguments. Only type checkers import CuPy for them.

CuPy has no types of its own: for a checker, its arrays are `Any`. Signatures of public functions therefore name
`CupyArray`, which lists and arrays of other libraries do not match, and the package's own code names `Array`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import numpy as np

if TYPE_CHECKING:
    import cupy

__all__ = ["AnyArray", "Array", "ArrayT", "CupyArray"]


class CupyArray(Protocol):
    """A ``cupy.ndarray`` for type checkers: what it has in common with no array of another library."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the elements."""

    @property
    def ndim(self) -> int:
        """Number of axes."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

    def get(self) -> np.ndarray[Any, Any]:
        """A copy in the memory of the host."""

    def astype(self, dtype: Any, order: Any = "K") -> Any:
        """A copy in another type."""

    def __getitem__(self, index: Any, /) -> Any: ...

    def __setitem__(self, index: Any, value: Any, /) -> None: ...


#: The type of all arrays of a call, and of its results: arrays of NumPy give arrays of NumPy, those of CuPy CuPy's.
ArrayT = TypeVar("ArrayT", np.ndarray[Any, Any], CupyArray)
#: An array of NumPy or of CuPy, where the others need not be of the same library for the checker.
AnyArray: TypeAlias = np.ndarray[Any, Any] | CupyArray
#: The same for the package's own code, with all that arrays can do.
Array: TypeAlias = "np.ndarray | cupy.ndarray"
