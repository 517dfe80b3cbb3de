"""The parameter record of a launch: one list of fields gives both the C struct and its bytes."""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from ..families.family import Family
from ..families.operations import OPERATIONS
from ..families.records import ARRIVALS, EXCEPTIONS, split_record
from ..functions.tracing import BoundFunction
from ..problem.features import FEATURES
from ..problem.strides import AnyStrides

__all__ = [
    "COUNTERS",
    "ITEMS",
    "TILE_COUNTER",
    "Field",
    "ParamLayout",
    "argument_arrays",
    "gradient_arrays",
    "param_layout",
]

#: The pointer to a persistent kernel's tile counter. It is the last pointer, and not a buffer of the call.
TILE_COUNTER = "tile_counter"
#: Pointers to counters, which are zero between launches, and the numbers of ints there. `ARRIVALS` has two for each of
#: the most blocks of a launch (``kernels/decode/partials.cuh``).
COUNTERS = {TILE_COUNTER: 2, ARRIVALS: 2 * 1024}

# kind: (C declaration, struct format). `real` is the accumulator type: float, or double for float64 data.
_KINDS = {
    "input_map": ("TensorMap {name}", "128s"),
    "output_map": ("TensorMap {name}", "128s"),
    "counter": ("int32* {name}", "Q"),
    "input": ("const Element* {name}", "Q"),
    "output": ("Element* {name}", "Q"),
    "in_place": ("Element* {name}", "Q"),
    "input_accum": ("const Accum* {name}", "Q"),
    "input_int": ("const int32* {name}", "Q"),
    "output_int": ("int32* {name}", "Q"),
    "input_parts": ("const float16* {name}", "Q"),
    "output_parts": ("float16* {name}", "Q"),
    "input_bool": ("const bool* {name}", "Q"),
    "input_bytes": ("const uint8* {name}", "Q"),
    "output_bytes": ("uint8* {name}", "Q"),
    "per_call": ("uint64 {name}", "Q"),
    "output_accum": ("Accum* {name}", "Q"),
    "strides": ("Strides {name}", "qqq"),
    "score_strides": ("ScoreStrides {name}", "qqqq"),
    "neighborhood": ("Neighborhood {name}", "22i"),
    "size": ("int64 {name}", "q"),
    "real": ("Accum {name}", "f"),
    "int": ("int32 {name}", "i"),
    "word": ("uint32 {name}", "I"),
    "copied_matrices": ("CopiedMatrices {name}", "q" + "5q2I" * 64),
    "summed_arrays": ("SummedArrays {name}", "6I" + "5q" * 65),
}
#: C++ types of the elements of arrays that the caller's functions read, by dtype.
ITEMS = {
    "float16": "float16", "bfloat16": "bfloat16", "float32": "float", "float64": "double", "bool": "bool",
    "int8": "signed char", "int16": "short", "int32": "int32", "int64": "int64",
    "uint8": "unsigned char", "uint16": "uint16", "uint32": "uint32", "uint64": "uint64",
}  # fmt: skip
_ITEM_KINDS = {f"items_{dtype}": (f"const {item}* {{name}}", "Q") for dtype, item in ITEMS.items()}
#: Strides and lengths of these arrays, by the number of their axes.
_LAYOUT_KINDS = {f"array{rank}": (f"ArrayLayout<{rank}> {{name}}", "qq" * rank) for rank in range(1, 33)}
#: Strides of an array over the scores, by the number of terms; NumPy has up to 64 axes.
_NESTED_KINDS = {
    f"score_strides{terms}": (f"NestedScoreStrides<{terms}> {{name}}", "qqq" + "qIi" * terms) for terms in range(1, 62)
}
_KINDS |= _ITEM_KINDS | _LAYOUT_KINDS | _NESTED_KINDS
_MAPS = ("input_map", "output_map")
_FRONT = (
    *_MAPS, "counter", "input", "output", "in_place", "input_accum", "output_accum", "input_int", "output_int",
    "input_bool", "input_bytes", "output_bytes", "input_parts", "output_parts", "per_call", *_ITEM_KINDS,
)  # fmt: skip


@dataclass(frozen=True)
class Field:
    """One member of the record: its C name and its kind, a key of `_KINDS`."""

    name: str
    kind: str

    @property
    def declaration(self) -> str:
        """The member as C++ declares it, without the semicolon."""
        return _KINDS[self.kind][0].format(name=self.name)


class ParamLayout:
    """The record of one kind of kernel.

    Tensor maps and pointers come first, so that a warm launch replaces only the front. Strides, sizes, reals and ints
    follow; in this order C adds padding only at the end.

    Attributes
    ----------
    fields : tuple of Field
    pointers : tuple of str
        Names of the members in the front: tensor maps, then pointers and the numbers that are new in each call.
    maps : tuple of str
        Names of the tensor maps among them.
    pointer_packer : struct.Struct
        Packs the front: 128 bytes for each tensor map, 8 for each other member.
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

    def pack_constants(self, values: Mapping[str, float | AnyStrides]) -> bytes:
        """The bytes after the pointers. `values` must have exactly the names of the members that are not pointers."""
        if set(values) != {f.name for f in self._constants}:
            raise KeyError(f"the record has {[f.name for f in self._constants]}, got {list(values)}")
        flat: list[float] = []
        for field in self._constants:
            value = values[field.name]
            flat += value if isinstance(value, tuple) else (value,)
        return self._packer.pack(*flat) + self._padding


def argument_arrays(function: BoundFunction) -> list[tuple[str, str, int]]:
    """The members of a record for a function's arrays, such as ``"score_args0"``: name, dtype and number of axes."""
    program = function.program
    kinds = zip(function.dtypes, program.arguments, strict=True)
    return [
        (f"{program.arguments_name}{number}", dtype, argument.rank) for number, (dtype, argument) in enumerate(kinds)
    ]


def gradient_arrays(function: BoundFunction) -> list[tuple[str, int]]:
    """The members for the gradients of a score function's arrays, such as ``"dscore_args0"``: name and axes."""
    program = function.program
    floats = program.floats if program.role == "score_mod" else ()
    return [(f"d{program.arguments_name}{number}", program.arguments[number].rank) for number in floats]


@functools.lru_cache(maxsize=None)
def param_layout(
    operation: str,
    family: Family | None,
    dtype: str,
    features: tuple[str, ...] = (),
    is_split: bool = False,
    is_fallback: bool = False,
    functions: tuple[BoundFunction, ...] = (),
    batch_terms: int = 0,
) -> ParamLayout:
    """The record of kernels of this operation, family and dtype. Features add members to each of its parts."""
    record = OPERATIONS[operation].record
    if record is None:
        assert family is not None, f"each family has its own record of {operation}"
        record = family.record(operation)
    pointers, strides, reals, ints, sizes, score_strides = split_record(record) if is_split else record
    rows = [FEATURES[feature] for feature in features]
    arrays = {name: array for row in rows for name, array in row.arrays.items()}
    values = [Field(name, kind) for row in rows for name, kind in row.values.items()]
    front = [Field(*pointer.split(":")) for pointer in pointers.split()]
    if "given_lse" in features:  # the kernel computes lse again, before it reads it
        front = [Field("lse", "output_accum") if field.name == "lse" else field for field in front]
    counters = [field for field in front if field.kind == "counter"]
    fields = [field for field in front if field.kind != "counter"]
    kinds = {name: array.kind for name, array in arrays.items()}
    if "wide_bias" in features:
        kinds |= {name: "input_accum" for name in ("bias", "bias_tangent") if name in kinds}
    elif "full_dbias" in features:
        kinds["dbias"] = "output"
    fields += [Field(name, kind) for name, kind in kinds.items()]
    arguments = [array for function in functions for array in argument_arrays(function)]
    gradients = [array for function in functions for array in gradient_arrays(function)]
    gradients = gradients if "dscore_args" in features else []
    fields += [Field(name, f"items_{dtype}") for name, dtype, _ in arguments]
    fields += [Field(name, "output_accum") for name, _ in gradients]
    if is_fallback:
        fields.append(Field(EXCEPTIONS, "input_int"))
    fields += [Field(name, "per_call") for row in rows for name in row.per_call]
    fields += counters
    fields += [Field(f"{name}_strides", "strides") for name in strides]
    kind_of_strides = f"score_strides{batch_terms or ''}"
    over_scores = [name for name, array in arrays.items() if array.axes is not None]
    fields += [Field(f"{name}_strides", kind_of_strides) for name in (*over_scores, *score_strides)]
    layouts = [*((name, rank) for name, _, rank in arguments), *gradients]
    fields += [Field(f"{name}_strides", f"array{rank}") for name, rank in layouts if rank]
    fields += [Field(name, "size") for name in sizes]
    fields += [Field(name, "real") for name in reals]
    fields += [field for field in values if field.kind == "real"]
    fields += [Field(name, "int") for name in ints]
    fields += [field for field in values if field.kind != "real"]
    return ParamLayout(tuple(fields), double=dtype == "float64")
