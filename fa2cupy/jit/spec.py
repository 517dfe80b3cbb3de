"""The key of a compiled kernel."""

from __future__ import annotations

from dataclasses import dataclass

from ..families.choice import family_named
from ..families.operations import operation_named
from ..families.tile import TileConfig
from ..problem.features import FEATURES
from .params import ParamLayout, param_layout

__all__ = ["CPP_NAMES", "KernelSpec"]

#: dtype: (C++ name, name in kernel symbols)
CPP_NAMES = {
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
        Name of the family, or ``"common"`` where all families share the kernel.
    arch : str
        What NVRTC compiles for, such as ``"sm_90"``, or ``"sm_90a"`` for what only this one architecture has.
    dtype : str
    head_dim : int
    causal : bool
    tile : TileConfig
    features : tuple of str
        Keys of `FEATURES`.
    """

    operation: str
    family: str
    arch: str
    dtype: str
    head_dim: int
    causal: bool
    tile: TileConfig
    features: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not operation_named(self.operation).is_common:
            family_named(self.family)

    @property
    def folder(self) -> str:
        """Folder of the kernel's body, and its namespace."""
        return "common" if operation_named(self.operation).is_common else family_named(self.family).folder

    @property
    def needs_positive_scale(self) -> bool:
        """Whether the kernel is launched for positive softmax scales only."""
        return self.family != "common" and family_named(self.family).needs_positive_scale

    @property
    def symbol(self) -> str:
        """Name of the kernel in the cubin, made to be read in a profile."""
        name = f"fa2_{self.operation}_{self.family}_{CPP_NAMES[self.dtype][1]}_d{self.head_dim}"
        name += f"_r{self.tile.b_r}_c{self.tile.b_c}_w{self.tile.num_warps}_s{self.tile.num_stages}"
        name += f"_b{self.tile.blocks_per_sm}" if self.tile.blocks_per_sm > 1 else ""
        return "_".join((name, *(["causal"] if self.causal else []), *self.features))

    @property
    def shared_memory_bytes(self) -> int:
        """Dynamic shared memory of a launch."""
        if not operation_named(self.operation).is_tiled:
            return 0
        family = family_named(self.family)
        return family.shared_memory_bytes(self.operation, self.dtype, self.head_dim, self.tile)

    @property
    def params(self) -> ParamLayout:
        """The record that the kernel takes."""
        return param_layout(self.operation, self.family, self.dtype, self.features)

    @property
    def flags(self) -> dict[str, bool]:
        """The constants that say which features the kernel has."""
        return {need.flag: name in self.features for name, need in FEATURES.items()}

    def __str__(self) -> str:
        causal = "".join(f", {name}" for name in (*(["causal"] if self.causal else []), *self.features))
        return f"{self.operation} ({self.family} for {self.arch}, {self.dtype}, head_dim {self.head_dim}{causal}, {self.tile})"
