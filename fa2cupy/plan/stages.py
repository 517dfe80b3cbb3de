"""The parts of a plan: launches, the memory that they need, and the buffers to clear."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..jit.spec import KernelSpec
from .tensor_maps import TensorLayout

__all__ = ["Plan", "Stage", "Workspace"]


@dataclass(frozen=True)
class Stage:
    """One kernel launch, complete except for its pointers.

    Attributes
    ----------
    spec : KernelSpec
    blocks : int
    constants : bytes
        Bytes of the parameter record after the pointers.
    maps : tuple of (TensorLayout or None)
        Layouts of the arrays whose tensor maps are in the record; None for a tangent that the call does not have.
    renamed : mapping of str to (str or None)
        Arrays that the kernel knows by another name than the call: that of the call by the kernel's; None for arrays
        that the call does not have.
    """

    spec: KernelSpec
    blocks: int
    constants: bytes
    maps: tuple[TensorLayout | None, ...] = ()
    renamed: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def threads(self) -> int:
        """Threads in a block."""
        return self.spec.tile.num_threads


@dataclass(frozen=True)
class Workspace:
    """Device memory that a call needs beyond its inputs and outputs; of no bytes where a kernel could use some.

    Attributes
    ----------
    name : str
    nbytes : int
    stays_zero : bool
        True if a kernel finds it zero and leaves it zero, so that the next call can have the same memory.
    """

    name: str
    nbytes: int
    stays_zero: bool = False


@dataclass(frozen=True)
class Plan:
    """The work of a call, in order: clear buffers, then launch kernels.

    Attributes
    ----------
    stages : tuple of Stage
        Launches in order. A stage without blocks (an empty problem) is left out.
    workspaces : tuple of Workspace
    cleared : tuple of str
        Workspaces and outputs that must be zero before the first stage.
    """

    stages: tuple[Stage, ...]
    workspaces: tuple[Workspace, ...] = ()
    cleared: tuple[str, ...] = ()
