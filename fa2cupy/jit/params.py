"""The parameter record of a launch: one field list that yields both the C struct and the bytes for it."""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from ..families.choice import family_named
from ..families.operations import operation_named
from ..problem.features import KERNEL_NEEDS

__all__ = ["TILE_COUNTER", "Field", "ParamLayout", "param_layout"]

#: The pointer of a persistent kernel's counter: the last one, and no buffer of the call's.
TILE_COUNTER = "tile_counter"

# kind: (C declaration, struct format). `real` is the accumulator type: float, or double for float64 data.
_KINDS = {
    "input_map": ("TensorMap {name}", "128s"),
    "output_map": ("TensorMap {name}", "128s"),
    "counter": ("int32* {name}", "Q"),
    "input": ("const Element* {name}", "Q"),
    "output": ("Element* {name}", "Q"),
    "input_accum": ("const Accum* {name}", "Q"),
    "input_int": ("const int32* {name}", "Q"),
    "input_bool": ("const bool* {name}", "Q"),
    "per_call": ("uint64 {name}", "Q"),
    "output_accum": ("Accum* {name}", "Q"),
    "strides": ("Strides {name}", "qqq"),
    "score_strides": ("ScoreStrides {name}", "qqqq"),
    "real": ("Accum {name}", "f"),
    "int": ("int32 {name}", "i"),
    "word": ("uint32 {name}", "I"),
}
_STRIDES = ("strides", "score_strides")
_MAPS = ("input_map", "output_map")
_FRONT = (*_MAPS, "counter", "input", "output", "input_accum", "output_accum", "input_int", "input_bool", "per_call")


@dataclass(frozen=True)
class Field:
    """One member of the record: its C name and its kind, a key of the table above."""

    name: str
    kind: str

    @property
    def declaration(self) -> str:
        """The member as C++ declares it, without the semicolon."""
        return _KINDS[self.kind][0].format(name=self.name)


class ParamLayout:
    """The record of one kind of kernel.

    Tensor maps and pointers come first, so that a warm launch replaces only the front; then strides, reals and ints, an
    order in which C adds no padding but at the end.

    Attributes
    ----------
    fields : tuple of Field
    pointers : tuple of str
        Names of the members that stand for memory: those of `maps`, then the pointers.
    maps : tuple of str
        Names of those that are tensor maps.
    pointer_packer : struct.Struct
        Packs them: 128 bytes of a map, an address.
    nbytes : int
        ``sizeof`` the C struct.
    """

    def __init__(self, fields: tuple[Field, ...], double: bool):
        self.fields = fields
        front = [f for f in fields if f.kind in _FRONT]
        self.pointers = tuple(f.name for f in front)
        self.maps = tuple(f.name for f in front if f.kind in _MAPS)
        self.pointer_packer = struct.Struct("=" + "".join(_KINDS[f.kind][1] for f in front))
        self._constants = fields[len(self.pointers) :]
        formats = "".join(_KINDS[f.kind][1] for f in self._constants)
        self._packer = struct.Struct("=" + (formats.replace("f", "d") if double else formats))
        alignment = 64 if self.maps else 8
        self._padding = bytes(-(self.pointer_packer.size + self._packer.size) % alignment)
        self.nbytes = self.pointer_packer.size + self._packer.size + len(self._padding)

    def pack_constants(self, values: Mapping[str, object]) -> bytes:
        """The bytes behind the pointers. `values` has exactly the names of the members that are not pointers."""
        if set(values) != {f.name for f in self._constants}:
            raise KeyError(f"the record has {[f.name for f in self._constants]}, got {list(values)}")
        flat: list[object] = []
        for field in self._constants:
            value = values[field.name]
            flat.extend(value) if field.kind in _STRIDES else flat.append(value)
        return self._packer.pack(*flat) + self._padding


#: The kinds of what features add: of arrays, which come with strides over scores, and of numbers.
_FEATURE_ARRAYS = {
    "alibi_slopes": "input_accum",
    "bias": "input",
    "mask": "input_bool",
    "key_padding_mask": "input_bool",
    "sink": "input_accum",
    "dbias_accum": "output_accum",
    "dlse": "input_accum",
    "cu_seqlens_q": "input_int",
    "cu_seqlens_k": "input_int",
}
_CONTIGUOUS = ("dlse", "cu_seqlens_q", "cu_seqlens_k")  # arrays that need no strides
_FEATURE_VALUES = {
    "window_left": "int",
    "window_right": "int",
    **dict.fromkeys(KERNEL_NEEDS["softcap"].values + KERNEL_NEEDS["alibi_slopes"].values, "real"),
    "dropout_threshold": "word",
    "dropout_scale": "real",
    **dict.fromkeys(("max_seqlen_q", "max_seqlen_k", "total_q", "total_k", "num_sequences"), "int"),
}


@functools.lru_cache(maxsize=None)
def param_layout(operation: str, family: str, dtype: str, features: tuple[str, ...] = ()) -> ParamLayout:
    """The record that kernels of this operation, family and dtype take, with what features add to each of its parts."""
    pointers, strides, reals, ints = operation_named(operation).record or family_named(family).record(operation)
    arrays = [name for feature in features for name in KERNEL_NEEDS[feature].arrays]
    values = [Field(name, _FEATURE_VALUES[name]) for feature in features for name in KERNEL_NEEDS[feature].values]
    front = [Field(*pointer.split(":")) for pointer in pointers.split()]
    counters = [field for field in front if field.kind == "counter"]
    fields = [field for field in front if field.kind != "counter"]
    kinds = _FEATURE_ARRAYS | ({"bias": "input_accum"} if "wide_bias" in features else {})
    fields += [Field(name, kinds[name]) for name in arrays]
    fields += [Field(name, "per_call") for feature in features for name in KERNEL_NEEDS[feature].per_call]
    fields += counters
    fields += [Field(f"{name}_strides", "strides") for name in strides]
    fields += [Field(f"{name}_strides", "score_strides") for name in arrays if name not in _CONTIGUOUS]
    fields += [Field(name, "real") for name in reals]
    fields += [field for field in values if field.kind == "real"]
    fields += [Field(name, "int") for name in ints]
    fields += [field for field in values if field.kind != "real"]
    return ParamLayout(tuple(fields), double=dtype == "float64")
