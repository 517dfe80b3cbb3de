"""What to write in place of an argument that a call cannot take: the ends of messages.

All of it runs once a check has failed, so that it may take time.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np

from .dtypes import ACCUMULATOR, DTYPES

__all__ = [
    "NO_ROWS",
    "Absent",
    "ArrayRow",
    "as_dtype",
    "explains_absence",
    "moved",
    "refusal",
    "scalar_of",
    "third_derivative",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: Where arguments come from, for those that are missing.
_ORIGINS = {
    **dict.fromkeys(("o", "lse"), "o, lse = fa2cupy.forward(q, k, v, ...), with the same options"),
    "do": "it is the gradient for o",
    **dict.fromkeys(("qt", "kt", "vt"), "it is the tangent, or None where the array does not change"),
    **dict.fromkeys(("ot", "lset"), "_, _, ot, lset = fa2cupy.jvp(q, k, v, qt, kt, vt, ...), with the same options"),
    **dict.fromkeys(("gdq", "gdk", "gdv"), "it is the gradient for that gradient, or None where there is none"),
    **dict.fromkeys(("k", "v"), "those of a packed array are views such as qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]"),
    "lse_parts": "with a list of results (o, lse), write merge(*zip(*results))",
    "cache_seqlens": 'it has the rows of each sequence in the cache, at first zeros(batch, "int32")',
    "mask_args": "it is () for a function without arrays",
    "seqlen_k": "mask_args comes second, and is () for a function without arrays",
    "num_warps": "such as num_warps=4; fa2cupy.legal_configs lists the tiles of a kernel",
}

#: The kinds of arguments that are no features; those of all others are that of q.
_KINDS = {
    **dict.fromkeys(("lse", "lse_parts", "lset", "delta", "dlse", "dlset", "sink_tangent", "gdsink"), "input_accum"),
    **dict.fromkeys(("cache_seqlens", "block_table"), "input_int"),
    "tiles": "input_bool",
}
_DTYPES = {"input_bool": "bool", "input_int": "int32"}
#: The array for one number, which `str.format` gets with the dtype.
_OF_NUMBER = {
    "do": "full_like(o, {})",
    "dlse": "full_like(lse, {})",
    "cache_seqlens": 'full(batch, {}, "{}")',
    "x": "asarray({})",
}
#: The same for arrays of features: those of lse's dtype have a number for each head.
_OF_KIND = {"input": 'asarray({}, "{}")', "input_accum": 'full(num_heads, {}, "{}")'}
#: The kinds of memory by the numbers of DLPack that NumPy and CuPy read.
_HOST_MEMORY, _DEVICE_MEMORY = (1, 3), (2, 13)
#: Classes whose objects stand for arrays while a library records or traces what is computed with them.
_TAPES = ("Box", "Tracer")
#: Where objects of a tape hold their arrays.
_HELD_IN = ("_value", "data", "value", "array")


class ArrayRow(Protocol):
    """The part of a `FeatureArray`, whose module imports this one, that messages read."""

    @property
    def kind(self) -> str:
        """The kind of the kernels' pointer, from which the dtype follows."""

    @property
    def function(self) -> str:
        """The keyword of a function that does the same; empty if there is none."""


NO_ROWS: Mapping[str, ArrayRow] = {}


class Absent:
    """The value of a positional argument that a caller has left out.

    Parameters
    ----------
    name : str
    call : str
        The function and its arguments.
    """

    def __init__(self, name: str, call: str):
        self.name, self.call = name, call

    def text(self, given: Mapping[str, object]) -> str:
        """The message, for the arrays of a call by name."""
        name = self.name
        if name == "do" and _shape(given.get("lse")) == _shape(given.get("o")) is not None:
            name = "lse"  # the gradient was passed in its place
        origin = f": {_ORIGINS[name]}" if name in _ORIGINS else ""
        return f"{name}: it is missing in {self.call}{origin}"


def explains_absence(function: _Function) -> _Function:
    """Gives required arguments that a caller leaves out an `Absent`, for which checks have a text of their own.

    Python's error does not say where an argument comes from. The signature does not change.
    """
    signature = inspect.signature(function)
    positional = [one for one in signature.parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
    required = [one.name for one in positional if one.default is one.empty and one.name != "self"]
    name = function.__qualname__.removesuffix(".__init__")
    call = f"{name}({', '.join(required)})"
    described: Any = function
    described.__signature__ = signature
    described.__defaults__ = (*(Absent(one, call) for one in required), *(described.__defaults__ or ()))
    return function


def refusal(name: str, value: object, given: Mapping[str, object], rows: Mapping[str, ArrayRow] = NO_ROWS) -> str:
    """The message for a value that is no array of NumPy or CuPy.

    Parameters
    ----------
    name : str
    value : object
    given : mapping
        All arguments of the call that are to be arrays, by name.
    rows : mapping, optional
        The rows of those that belong to features.
    """
    if isinstance(value, Absent):
        return value.text(given)
    kind = type(value).__qualname__
    if type(value).__module__ != "builtins":
        kind = f"{type(value).__module__}.{kind}"
    expected = f"{name}: expected a numpy.ndarray or cupy.ndarray, got {'None' if value is None else kind}"
    hint = _hint(name, value, given, rows) if _is_expression(name) else ""
    return f"{expected}; {hint}" if hint else expected


def third_derivative(error: TypeError, call: str, arrays: Iterable[object]) -> TypeError:
    """The error of a call that has second derivatives alone: if an array is that of a tape, one that says so."""
    if not any(_is_on_tape(array) for array in arrays):
        return error
    return TypeError(
        f"{call}: it is a second derivative of attention, and there are no third ones: its arguments must be plain "
        f"arrays ({str(error).partition(';')[0]})"
    )


def _is_on_tape(value: object) -> bool:
    """True for an object that stands for an array while a library records what is computed with it."""
    return any(one.__name__ in _TAPES for one in type(value).__mro__) or _attribute(value, "requires_grad") is True


def _hint(name: str, value: object, given: Mapping[str, object], rows: Mapping[str, ArrayRow]) -> str:
    """The end of the message; empty if there is none."""
    if value is None:
        return _ORIGINS.get(name, "")
    if _is_on_tape(value):
        return _wrapped(name, value)
    device = _dlpack_device(value)
    if device is not None or _has(value, "__dlpack__"):
        return _without_copy(name, value, device)
    if _has(value, "__cuda_array_interface__"):
        return f"convert it with cupy.asarray({name}), which copies nothing"
    if any(_is_array(_attribute(value, one)) for one in _HELD_IN):
        return _wrapped(name, value)
    library, dtype = _kind_of_array(name, given, rows)
    libraries = (library,) if any(map(_is_array, given.values())) else ("numpy", "cupy")
    is_free = name == "x" or name.startswith(("score_args", "mask_args"))
    written = name if is_free else f'{name}, "{dtype}"'
    if isinstance(value, list | tuple) and not name.startswith("o_parts") and not any(map(_is_array, value)):
        return f"convert it with {' or '.join(f'{one}.asarray({written})' for one in libraries)}"
    return _of_scalar(name, value, f"{library}.", dtype, rows)


def _of_scalar(name: str, value: Any, library: str, dtype: str, rows: Mapping[str, ArrayRow]) -> str:
    """The same for what is neither an array nor like one."""
    row = rows.get(name)
    if isinstance(value, list | tuple):
        return _ORIGINS["lse_parts"] if name.startswith("o_parts") else f"pass one of its arrays, such as {name}[0]"
    if callable(value):
        if name == "lse":
            return "fa2cupy.attention returns (o, backprop), and with return_lse=True (o, lse, backprop)"
        return f"a function is passed as {row.function}" if row is not None and row.function else ""
    if isinstance(value, int | float | np.generic) and not isinstance(value, bool):
        if name.startswith(("score_args", "mask_args")):
            return f"write {library}asarray({value}), or the number in the function"
        written = _OF_NUMBER.get(name, "" if row is None else _OF_KIND.get(row.kind, ""))
        return f"write {library}{written.format(value, dtype)}" if written else ""
    if isinstance(value, str) and value == "causal":
        return "write causal=True"
    if _has(value, "__next__"):
        return f"write list({name})"
    return f'convert it with {library}asarray({name}, "{dtype}")' if _has(value, "__array__") else ""


def _kind_of_array(name: str, given: Mapping[str, object], rows: Mapping[str, ArrayRow]) -> tuple[str, str]:
    """The library of the call's arrays, and the dtype of this one."""
    like: Any = next(filter(_is_array, given.values()), None)
    library = "numpy" if like is None or isinstance(like, np.ndarray) else "cupy"
    dtype = like.dtype.name if like is not None and like.dtype.name in DTYPES else "float32"
    own = name.partition("[")[0]
    kind = rows[own].kind if own in rows else _KINDS.get(own, "input")
    return library, ACCUMULATOR[dtype] if kind == "input_accum" else _DTYPES.get(kind, dtype)


def _without_copy(name: str, value: Any, device: tuple[int, int] | None) -> str:
    """How to convert an array of another library, whose memory is on this device."""
    if device is None:
        return f"convert it with cupy.from_dlpack({name}) or numpy.from_dlpack({name}), which copy nothing"
    if device[0] in _DEVICE_MEMORY:
        return f"convert it with cupy.from_dlpack({name}), which copies nothing"
    if device[0] not in _HOST_MEMORY:
        return f"its memory, on DLPack's device {device[0]}, is none of NumPy or CuPy: copy it to the host first"
    if str(_attribute(value, "dtype")) == "torch.bfloat16":  # NumPy's from_dlpack has no bfloat16
        return f"convert it with {name}.view(torch.int16).numpy().view(ml_dtypes.bfloat16), which copies nothing"
    if str(_attribute(value, "dtype")) == "bfloat16":
        return f"convert it with numpy.asarray({name})"
    return f"convert it with numpy.from_dlpack({name}), which copies nothing"


def _wrapped(name: str, value: object) -> str:
    """What to write for an object that records the operations on an array, or stands for one."""
    if _attribute(value, "requires_grad") is True and _has(value, "__dlpack__"):
        plain = _without_copy(f"{name}.detach()", value, _dlpack_device(value)).removeprefix("convert it with ")
    else:
        held = [one for one in _HELD_IN if _is_array(_attribute(value, one)) and not one.startswith("_")]
        plain = f"{name}.{held[0]}" if held else ""
    return (
        'to differentiate through the call, make it a primitive of that library (docs/autograd.md, "Autograd recipes")'
        + (f"; without a gradient, write {plain}" if plain else "")
    )


def as_dtype(name: str, dtype: np.dtype, wanted: str) -> str:
    """The end of the message for an array of this dtype: the expression with the wanted one, if values are kept."""
    if not _is_expression(name) or dtype.kind == "c":
        return ""
    bits = f"{name}.view(ml_dtypes.bfloat16) if these are the bits of bfloat16, else "
    return f'; write {bits if dtype.name in ("uint16", "int16") else ""}{name}.astype("{wanted}")'


def moved(name: str, library: str) -> str:
    """The end of the message for an array of the other library; empty for results."""
    if not _is_expression(name):
        return ""
    return f"; write {name}.get()" if library == "numpy" else f"; write cupy.asarray({name})"


def scalar_of(name: str, value: Any, kind: str) -> str:
    """The end of the message for a number or bool: the expression of the wanted kind, if the value has one."""
    if not re.fullmatch(r"\w+", name):
        return ""
    if getattr(value, "size", 0) == 1 and hasattr(value, "item"):
        return f"; write {kind}({name})" if value.ndim == 0 else f"; write {kind}({name}.item())"
    if kind == "int" and isinstance(value, float) and value.is_integer():
        return f"; write {name}={int(value)}"
    return ""


def _is_expression(name: str) -> bool:
    """True for an argument and an element of one, False for results, which must not go to a converted copy."""
    return re.fullmatch(r"\w+(\[\d+\])?", name) is not None


def _is_array(value: object) -> bool:
    cupy = sys.modules.get("cupy")
    return isinstance(value, np.ndarray) or (cupy is not None and isinstance(value, cupy.ndarray))


def _shape(value: Any) -> tuple[int, ...] | None:
    return value.shape if _is_array(value) else None


def _has(value: object, protocol: str) -> bool:
    """True if the class has it: asking an object may raise any error, as a tensor of PyTorch with a gradient does."""
    return hasattr(type(value), protocol)


def _attribute(value: object, name: str) -> object:
    """An attribute of an object of an unknown class, whose code may raise any error; then None."""
    try:
        return getattr(value, name, None)
    except Exception:
        return None


def _dlpack_device(value: Any) -> tuple[int, int] | None:
    """The kind and the number of the device of an array's memory, as DLPack defines them; None if it does not tell."""
    if not _has(value, "__dlpack_device__"):
        return None
    try:
        kind, number = value.__dlpack_device__()
        return int(kind), int(number)
    except Exception:
        return None
