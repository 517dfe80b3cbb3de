"""What a plan consists of: launches, the memory that they need, and what must be cleared."""

from __future__ import annotations

from dataclasses import dataclass

from ..jit.spec import KernelSpec
from .tensor_maps import TensorLayout

__all__ = ["Plan", "Stage", "Workspace"]


@dataclass(frozen=True)
class Stage:
    """One kernel launch, complete but for its pointers.

    Attributes
    ----------
    spec : KernelSpec
    blocks : int
    constants : bytes
        The record behind the pointers.
    maps : tuple of TensorLayout
        Of the arrays that the record has tensor maps of.
    """

    spec: KernelSpec
    blocks: int
    constants: bytes
    maps: tuple[TensorLayout, ...] = ()

    @property
    def threads(self) -> int:
        """Threads in a block."""
        return self.spec.tile.num_threads


@dataclass(frozen=True)
class Workspace:
    """Device memory that a call needs beyond its inputs and outputs."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """What a call does, in order: clear, then launch.

    Attributes
    ----------
    stages : tuple of Stage
        A stage without blocks (an empty problem) is left out.
    workspaces : tuple of Workspace
    cleared : tuple of str
        Workspaces and outputs that must be zero before the first stage.
    """

    stages: tuple[Stage, ...]
    workspaces: tuple[Workspace, ...] = ()
    cleared: tuple[str, ...] = ()
