"""The objects that a function computes with while it is traced: symbols of numbers and vectors, and arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin as _Operators

from .expressions import BOOL, FLOAT, INT, Graph, Node, RefusalError
from .places import current_place
from .primitives import PRIMITIVES

__all__ = ["ArgumentSymbol", "Symbol", "is_array"]

#: Operations by ufunc, and those ufuncs that are the same operation of exchanged operands.
_UFUNCS = {getattr(np, row.function): name for name, row in PRIMITIVES.items() if row.rule != "where"}
_EXCHANGED = {np.greater: "less", np.greater_equal: "less_equal"}
_KNOWN = ", ".join(
    sorted({row.function for row in PRIMITIVES.values()} | {"clip", "dot", "greater", "greater_equal", "sum"})
)
_BRANCH = (
    "a symbol has no truth value; write np.where(condition, x, y) in place of if and else, & | ~ in place of and, or "
    "and not, np.minimum(x, y) in place of min(x, y), and (a <= x) & (x < b) in place of a <= x < b"
)
_NUMBER = (
    "a symbol is no number of Python; write np.exp(x) in place of math.exp(x), x.astype(int) in place of int(x), and "
    "pass arrays and lists that are indexed as arguments (score_args, mask_args)"
)
_ARRAY = "arrays are passed as arguments (score_args, mask_args), not through the closure or a global name"
_TYPES = {int: INT, float: FLOAT, bool: BOOL, "int": INT, "float": FLOAT, "bool": BOOL, np.int32: INT, np.bool_: BOOL}


def is_array(value: object) -> bool:
    """True for an array of any library that has axes."""
    if isinstance(value, np.ndarray | np.generic):
        return value.ndim > 0
    return hasattr(type(value), "__cuda_array_interface__") or hasattr(type(value), "__dlpack__")


class Symbol(_Operators):
    """A number of the function that is not known yet, or a vector of them.

    Parameters
    ----------
    graph : Graph
    node : Node
    """

    def __init__(self, graph: Graph, node: Node):
        self._graph = graph
        self.node = node

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **options: object) -> Symbol:
        if method != "__call__" or options:
            what = f"np.{ufunc.__name__}.{method}" if method != "__call__" else f"{next(iter(options))}="
            raise RefusalError(f"{what} cannot be compiled; write plain calls of {_KNOWN}")
        if ufunc in _EXCHANGED:
            return self.apply(_EXCHANGED[ufunc], *inputs[::-1])
        if ufunc is np.positive:
            return self
        if ufunc is np.matmul:
            return self._dot(*inputs)
        if ufunc not in _UFUNCS:
            raise RefusalError(f"np.{ufunc.__name__} cannot be compiled; there are {_KNOWN}")
        return self.apply(_UFUNCS[ufunc], *inputs)

    def __array_function__(
        self, function: Callable[..., Any], types: object, inputs: tuple[Any, ...], options: dict[str, Any]
    ) -> Symbol:
        if function not in _FUNCTIONS:
            raise RefusalError(f"np.{function.__name__} cannot be compiled; there are {_KNOWN}")
        try:
            return _FUNCTIONS[function](self, *inputs, **options)
        except TypeError as error:
            if isinstance(error, RefusalError):
                raise
            raise RefusalError(f"np.{function.__name__} with these arguments cannot be compiled") from error

    def sum(self) -> Symbol:
        """The sum of a vector."""
        if not self.node.varies:
            raise RefusalError("sum() is of a vector: an argument that is indexed for all axes but its last one")
        return Symbol(self._graph, self._graph.total(self.node, self.node.axes))

    def astype(self, dtype: object) -> Symbol:
        """The number as int (cut off towards 0, the nearest int32 if out of range, 0 for NaN), float or bool."""
        kind = _TYPES.get(dtype) if isinstance(dtype, type | str) else None
        if kind is None:
            raise RefusalError("astype takes int, float or bool")
        return Symbol(self._graph, self._graph.cast(self.node, kind))

    def number(self, value: object) -> Symbol:
        """The symbol of a number."""
        return Symbol(self._graph, self._node_of(value))

    def apply(self, op: str, *inputs: object) -> Symbol:
        """The result of an operation of `PRIMITIVES` on symbols and numbers."""
        return Symbol(self._graph, self._graph.apply(op, *map(self._node_of, inputs)))

    def _node_of(self, value: object) -> Node:
        if isinstance(value, Symbol):
            return value.node
        if isinstance(value, ArgumentSymbol):
            raise RefusalError(
                f"{value.name} has {value.rank} axes; write {value.name}[{', '.join('bhqk'[: value.rank])}]"
            )
        if isinstance(value, np.ndarray) and value.ndim == 0:
            value = value[()]
        if isinstance(value, bool | np.bool_):
            return self._graph.constant(bool(value))
        if isinstance(value, int | np.integer):
            return self._graph.constant(int(value))
        if isinstance(value, float | np.floating):
            return self._graph.constant(float(value))
        if is_array(value):
            raise RefusalError(_ARRAY)
        raise RefusalError(f"expected a symbol or a number, got {type(value).__name__}")

    def _where(self, condition: object, x: object, y: object) -> Symbol:
        return self.apply("where", condition, x, y)

    def _clip(self, x: object, low: object = None, high: object = None) -> Symbol:
        clipped = self.apply("maximum", x, low) if low is not None else Symbol(self._graph, self._node_of(x))
        return self.apply("minimum", clipped, high) if high is not None else clipped

    def _dot(self, *vectors: object) -> Symbol:
        if len(vectors) != 2 or not all(isinstance(x, Symbol) and x.node.varies for x in vectors):
            raise RefusalError("np.dot is of two vectors: arguments that are indexed for all axes but their last one")
        return self.apply("multiply", *vectors).sum()

    def _sum(self, vector: object) -> Symbol:
        return Symbol(self._graph, self._node_of(vector)).sum()

    def __bool__(self) -> NoReturn:
        raise RefusalError(_BRANCH)

    def __index__(self) -> NoReturn:
        raise RefusalError(_NUMBER)

    __int__ = __float__ = __complex__ = __index__

    def __array__(self, *_: object, **__: object) -> NoReturn:
        raise RefusalError(f"a symbol is no array. {_ARRAY[0].upper()}{_ARRAY[1:]}; functions are {_KNOWN}")

    def __iter__(self) -> Iterator[NoReturn]:
        raise RefusalError("a symbol cannot be iterated; write .sum() or np.dot for a vector")

    def __getitem__(self, index: object) -> NoReturn:
        raise RefusalError("a symbol cannot be indexed; index an argument for all its axes at once, as in table[h, q]")

    # x += y gives another symbol, as for Python's numbers; the mixin's would write to x.
    __iadd__, __isub__, __imul__ = _Operators.__add__, _Operators.__sub__, _Operators.__mul__
    __itruediv__, __ifloordiv__, __imod__ = _Operators.__truediv__, _Operators.__floordiv__, _Operators.__mod__
    __ipow__, __iand__, __ior__, __ixor__ = (
        _Operators.__pow__,
        _Operators.__and__,
        _Operators.__or__,
        _Operators.__xor__,
    )


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Symbol]] = {
    np.where: Symbol._where,
    np.clip: Symbol._clip,
    np.dot: Symbol._dot,
    np.sum: Symbol._sum,
}


class ArgumentSymbol(_Operators):
    """An array that the function gets, to be indexed.

    Parameters
    ----------
    graph : Graph
    number : int
        Its place among the arrays.
    kind : str
        Kind of its elements.
    rank : int
        Number of its axes, at least 1.
    name : str
        Name of the function's parameter.
    """

    def __init__(self, graph: Graph, number: int, kind: str, rank: int, name: str):
        self._graph, self._number, self._kind = graph, number, kind
        self.rank, self.name = rank, name

    def __array_ufunc__(self, *_: object, **__: object) -> NoReturn:
        self.refuse_whole()

    def refuse_whole(self) -> NoReturn:
        """Raises the error for an array that is used without an index."""
        places = ", ".join(["b", "h", "q", "k", *"k" * self.rank][: self.rank])
        raise RefusalError(f"{self.name} has {self.rank} axes; write {self.name}[{places}]")

    def __getitem__(self, index: object) -> Symbol:
        indices = index if isinstance(index, tuple) else (index,)
        if len(indices) == self.rank and isinstance(indices[-1], slice) and indices[-1] == slice(None):
            indices = indices[:-1]
        if not self.rank - 1 <= len(indices) <= self.rank:
            wanted = f"{self.rank} indices for an element, or {self.rank - 1} for a vector along the last axis"
            raise RefusalError(f"{self.name}: expected {wanted}, got {len(indices)}")
        nodes = [self._index(one) for one in indices]
        if len(indices) < self.rank:
            nodes.append(self._graph.position())
        return Symbol(self._graph, self._graph.element(self._number, self._kind, tuple(nodes), current_place()))

    def _index(self, index: object) -> Node:
        if isinstance(index, Symbol):
            if index.node.kind == FLOAT:
                raise RefusalError(f"{self.name}: an index is an int; write np.floor(x).astype(int)")
            return self._graph.cast(index.node, INT)
        if isinstance(index, slice) or index is None or index is Ellipsis:
            raise RefusalError(f"{self.name}: indices are ints; only the last one can be a whole axis, ':'")
        try:
            number = operator.index(index)  # type: ignore[arg-type]
        except TypeError:
            raise RefusalError(f"{self.name}: an index is an int, got {type(index).__name__}") from None
        if number < 0:
            raise RefusalError(f"{self.name}: the index {number} is outside; indices count from the start")
        return self._graph.constant(number)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # the protocols that NumPy asks for
            raise AttributeError(name)
        raise RefusalError(f"{self.name}.{name} is not known here; pass numbers such as lengths through the closure")

    def __len__(self) -> NoReturn:
        raise RefusalError(f"{self.name} has no length here; pass it through the closure as an int")

    def __iter__(self) -> Iterator[NoReturn]:
        raise RefusalError(f"{self.name} cannot be iterated; index it, and sum vectors with .sum() or np.dot")

    def __bool__(self) -> NoReturn:
        raise RefusalError(_BRANCH)
