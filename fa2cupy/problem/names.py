"""The values of arguments that are names, for type checkers and for the checks of calls."""

from __future__ import annotations

from typing import Literal, TypeAlias

__all__ = ["Layout", "Method", "Operation", "Order", "Precision", "Scheme"]

#: Order of the axes of inputs and results.
Layout: TypeAlias = Literal["bshd", "bhsd"]
#: Method of a backward.
Method: TypeAlias = Literal["single_pass", "two_pass", "one_tile"]
#: Arithmetic of float32 data on a GPU.
Precision: TypeAlias = Literal["ieee", "split"]
#: A kernel whose tile callers can choose.
Operation: TypeAlias = Literal["forward", "backward", "backward_dq", "backward_dkdv", "backward_one_tile"]
#: What travels between ranks.
Scheme: TypeAlias = Literal["heads", "gather", "hybrid"]
#: Which rows of a sequence a rank has.
Order: TypeAlias = Literal["zigzag", "contiguous"]
