"""The one exception of the interpreter, which gathers on its way up where in the kernel it happened."""

from __future__ import annotations

__all__ = ["AccessError", "PtxError"]


class PtxError(Exception):
    """Anything the interpreter complains about: unknown syntax, bad accesses, races, deadlocks.

    Attributes
    ----------
    problem : str
        What is wrong, without the place.
    thread : int or None
        The thread it happened to, as a number within the batch; the machine turns it into coordinates.
    """

    def __init__(self, problem: str, thread: int | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.thread = thread


class AccessError(PtxError):
    """A bad access of one element of a vector of addresses; `index` says which."""

    def __init__(self, problem: str, index: int = 0) -> None:
        super().__init__(problem)
        self.index = index
