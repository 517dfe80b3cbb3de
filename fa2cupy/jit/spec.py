"""The key of a compiled kernel."""

from __future__ import annotations

from dataclasses import dataclass

from ..problem.features import KERNEL_NEEDS
from .params import ParamLayout, param_layout
from ..families.tiles import OPERATIONS, TileConfig, shared_memory_bytes

__all__ = ["DTYPES", "KernelSpec"]

#: dtype: (C++ name, name in kernel symbols)
DTYPES = {
    "float16": ("float16", "fp16"),
    "bfloat16": ("bfloat16", "bf16"),
    "float32": ("float", "fp32"),
    "float64": ("double", "fp64"),
}


@dataclass(frozen=True)
class KernelSpec:
    """Everything that the compiler must know of a kernel, and nothing else.

    Batch, heads, lengths, strides and the scale are not here: they travel in the parameter record, so that a training
    loop compiles once.

    Attributes
    ----------
    operation : str
        Entry file in ``kernels/``, such as ``"forward"``.
    family : str
        Folder of its body: ``"simt"``, ``"sm80"``, ``"sm90"``, or ``"common"`` where the families share it.
    arch : str
        What NVRTC compiles for, such as ``"sm_90"``, or ``"sm_90a"`` for what only this one architecture has.
    dtype : str
    head_dim : int
    causal : bool
    tile : TileConfig
    features : tuple of str
        Keys of `KERNEL_NEEDS`.
    """

    operation: str
    family: str
    arch: str
    dtype: str
    head_dim: int
    causal: bool
    tile: TileConfig
    features: tuple[str, ...] = ()

    @property
    def symbol(self) -> str:
        """Name of the kernel in the cubin, made to be read in a profile."""
        name = f"fa2_{self.operation}_{self.family}_{DTYPES[self.dtype][1]}_d{self.head_dim}"
        name += f"_r{self.tile.b_r}_c{self.tile.b_c}_w{self.tile.num_warps}_s{self.tile.num_stages}"
        name += f"_b{self.tile.blocks_per_sm}" if self.tile.blocks_per_sm > 1 else ""
        return "_".join((name, *(["causal"] if self.causal else []), *self.features))

    @property
    def shared_memory_bytes(self) -> int:
        """Dynamic shared memory of a launch."""
        if self.operation not in OPERATIONS:
            return 0
        return shared_memory_bytes(self.operation, self.family, self.dtype, self.head_dim, self.tile)

    @property
    def params(self) -> ParamLayout:
        """The record that the kernel takes."""
        return param_layout(self.operation, self.family, self.dtype, self.features)

    @property
    def flags(self) -> dict[str, bool]:
        """The constants that say which features the kernel has."""
        return {need.flag: name in self.features for name, need in KERNEL_NEEDS.items()}

    def __str__(self) -> str:
        causal = "".join(f", {name}" for name in (*(["causal"] if self.causal else []), *self.features))
        return (
            f"{self.operation} ({self.family} for {self.arch}, {self.dtype}, head_dim {self.head_dim}{causal}, {self.tile})"
        )
