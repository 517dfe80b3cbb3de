"""The key of a compiled kernel."""

from __future__ import annotations

from dataclasses import dataclass

from ..families.family import Family, Kernel
from ..families.operations import OPERATIONS
from ..families.tile import TileConfig
from ..functions.tracing import BoundFunction
from ..problem.boxes import BoxShapes
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
    """Everything that the machine code of a kernel depends on, and nothing else.

    Batch, heads, lengths, strides and the scale are in the parameter record instead, so that a training loop compiles
    once.

    Attributes
    ----------
    operation : str
        Entry file in ``kernels/``, such as ``"forward"``.
    family : Family or None
        None where all families share the kernel.
    arch : str
        Architecture that NVRTC compiles for, such as ``"sm_90"``, or ``"sm_90a"`` for instructions that only this
        architecture has.
    dtype : str
    head_dim : int
    causal : bool
    tile : TileConfig
    features : tuple of str
        Keys of `fa2cupy.problem.features.FEATURES`.
    is_split : bool
        True if several blocks share the work on each tile.
    is_fallback : bool
        True if it computes only the heads that kernels of another family left to it.
    functions : tuple of BoundFunction
        The caller's functions that it evaluates.
    head_dim_v : int or None
        Columns of v and o in kernels that also have q or k; None if they have head_dim.
    batch_terms : int
        Terms of the distances between sequences in its arrays over the scores; 0 if each array has one stride
        (``problem/strides.py``).
    kept_keys : int
        The most keys whose bias its blocks keep; 0 if they keep none.
    boxes : BoxShapes or None
        The boxes of tokens that are its tiles.
    """

    operation: str
    family: Family | None
    arch: str
    dtype: str
    head_dim: int
    causal: bool
    tile: TileConfig
    features: tuple[str, ...] = ()
    is_split: bool = False
    is_fallback: bool = False
    functions: tuple[BoundFunction, ...] = ()
    head_dim_v: int | None = None
    batch_terms: int = 0
    kept_keys: int = 0
    boxes: BoxShapes | None = None

    @property
    def kernel(self) -> Kernel:
        """What its legal tiles depend on."""
        columns_v = self.head_dim_v or self.head_dim
        return Kernel(self.operation, self.dtype, self.head_dim, columns_v, self.kept_keys)

    @property
    def family_name(self) -> str:
        """Public name of the family, or ``"common"``."""
        return "common" if self.family is None else self.family.public_name

    @property
    def folder(self) -> str:
        """Folder and C++ namespace of the kernel's body."""
        return "common" if self.family is None else self.family.name

    @property
    def needs_positive_scale(self) -> bool:
        """True if the planner guarantees softmax_scale > 0 for the kernel's family."""
        return self.family is not None and self.family.needs_positive_scale

    @property
    def owns_keys(self) -> bool:
        """True if the kernel's blocks own tiles of keys."""
        return self.family is not None and self.family.owns(self.operation) == "keys"

    @property
    def has_natural_scores(self) -> bool:
        """True if the kernel computes scores and lse in natural units."""
        return self.family is not None and self.family.has_natural_scores

    @property
    def symbol(self) -> str:
        """Name of the kernel in the cubin, readable in a profile."""
        name = f"fa2_{self.operation}_{self.family_name}_{CPP_NAMES[self.dtype][1]}_d{self.head_dim}"
        name += "" if self.head_dim_v is None else f"v{self.head_dim_v}"
        name += f"_r{self.tile.b_r}_c{self.tile.b_c}_w{self.tile.num_warps}_s{self.tile.num_stages}"
        name += f"_b{self.tile.blocks_per_sm}" if self.tile.blocks_per_sm > 1 else ""
        name += f"_k{self.tile.cluster}" if self.tile.cluster > 1 else ""
        return "_".join((name, *self._variants))

    @property
    def shared_memory_bytes(self) -> int:
        """Dynamic shared memory of a block, in bytes."""
        if self.family is None or not OPERATIONS[self.operation].is_tiled:
            return 0
        return self.family.shared_memory_with(self.features, self.kernel, self.tile)

    @property
    def blocks_of_tile(self) -> int:
        """Blocks of a cluster, which share a tile."""
        return 1 if self.family is None else self.family.blocks_of_tile(self.kernel, self.tile)

    @property
    def params(self) -> ParamLayout:
        """The parameter record of the kernel."""
        kind = (self.operation, self.family, self.dtype, self.features, self.is_split, self.is_fallback)
        return param_layout(*kind, self.functions, self.batch_terms)

    @property
    def flags(self) -> dict[str, bool]:
        """The C++ constants that switch features on, by name."""
        return {feature.flag: name in self.features for name, feature in FEATURES.items()}

    def __str__(self) -> str:
        variants = "".join(f", {name}" for name in self._variants)
        columns = f"head_dim {self.head_dim}" + ("" if self.head_dim_v is None else f", head_dim_v {self.head_dim_v}")
        kernel = f"{self.family_name} for {self.arch}, {self.dtype}, {columns}{variants}, {self.tile}"
        return f"{self.operation} ({kernel})"

    @property
    def _variants(self) -> tuple[str, ...]:
        """What distinguishes the kernel from the plain one of its tile."""
        digests = (function.program.digest for function in self.functions)
        nested = [f"nested{self.batch_terms}"] if self.batch_terms else []
        kept = [f"kept{self.kept_keys}"] if self.kept_keys else []
        kept += [] if self.boxes is None else [str(self.boxes)]
        return (*(["causal"] if self.causal else []), *self.features, *digests, *nested, *kept, *self._roles)

    @property
    def _roles(self) -> tuple[str, ...]:
        return (*(["split"] if self.is_split else []), *(["fallback"] if self.is_fallback else []))
