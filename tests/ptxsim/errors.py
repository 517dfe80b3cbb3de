"""The exceptions of the interpreter; the machine adds where in the kernel they happened."""

from __future__ import annotations

__all__ = ["AccessError", "PtxError"]


class PtxError(Exception):
    """Anything the interpreter complains about: unknown syntax, bad accesses, races, deadlocks.

    Attributes
    ----------
    problem : str
        The problem, without the place.
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
