"""Expressions: nodes of a graph in which equal expressions are one node, simplified when they are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .bounds import ANY_INT, LARGEST_INT, Bounds, bounds_of
from .linear import DISTANCE, Linear, linear_of
from .primitives import PRIMITIVES, truncated

__all__ = [
    "BOOL",
    "FLOAT",
    "INT",
    "Graph",
    "Node",
    "RefusalError",
    "integral_exponent",
    "is_power_of_two",
    "reachable",
    "reciprocal",
]

BOOL, INT, FLOAT = "bool", "int", "float"
_OF_DISTANCE = frozenset((DISTANCE,))

#: The reciprocal of a constant may replace a division by it between these magnitudes, in which float32 is normal.
_SMALLEST_FACTOR, _LARGEST_FACTOR = 2.0**-120, 2.0**120
#: The largest exponent of a power of ints.
_LARGEST_EXPONENT = 8
#: Operations that may have no finite result for finite operands.
_MAY_GROW = ("divide", "power", "log", "log1p", "sqrt", "exp", "exp2")
#: bool operands have the logical function of a bitwise one.
_OF_BOOLS = {
    "bitwise_and": "logical_and",
    "bitwise_or": "logical_or",
    "bitwise_xor": "logical_xor",
    "invert": "logical_not",
}


class RefusalError(TypeError):
    """A function does what cannot be compiled; the text says what to write instead."""


@dataclass(frozen=True, eq=False)
class Node:
    """An expression. Nodes are compared by identity: a graph has each of them once.

    Attributes
    ----------
    op : str
        A key of `PRIMITIVES`; ``"as_bool"``, ``"as_int"`` or ``"as_float"`` (an int of a float is cut off towards 0);
        ``"constant"``; ``"input"``, the score or a position; ``"element"`` of an argument, whose operands are the
        indices; ``"position"``, the index of a loop; or ``"sum"`` over a loop, whose operand is a term.
    kind : str
        `BOOL`, `INT` or `FLOAT`.
    operands : tuple of Node
    value : object
        The number of a constant, the name of an input, the number of an element's argument, and the arguments over
        whose last axes a sum runs.
    number : int
        Number in the order of creation. Operands have smaller numbers.
    varies : bool
        True if it depends on the index of a loop.
    axes : tuple of int
        The arguments over whose last axes it runs as a vector.
    bounds : Bounds
        Those of an int.
    grows : bool
        True if it may be infinite or NaN where the score and the elements of arguments are finite.
    linear : Linear or None
        See `linear_of`.
    distance : Linear or None
        The same, if it is q - k or k - q plus a constant.
    inputs : frozenset of str
        The inputs that it depends on: the score, b, h, q and k.
    depends : frozenset of str
        The same, with `DISTANCE` for q and k where it depends on q - k alone.
    """

    op: str
    kind: str
    operands: tuple[Node, ...] = field(repr=False)
    value: object
    number: int
    varies: bool
    axes: tuple[int, ...]
    bounds: Bounds
    grows: bool
    linear: Linear | None
    distance: Linear | None
    inputs: frozenset[str]
    depends: frozenset[str]

    @property
    def is_constant(self) -> bool:
        """True for a number."""
        return self.op == "constant"

    @property
    def moves(self) -> bool:
        """True if it depends on the query or the key."""
        return not self.inputs.isdisjoint(("q", "k"))


def _operands(node: Node) -> tuple[Node, ...]:
    return node.operands


def reachable(roots: Iterable[Node], operands: Callable[[Node], tuple[Node, ...]] = _operands) -> list[Node]:
    """All nodes that expressions consist of, operands first; `operands` gives those of a node that count."""
    found: dict[int, Node] = {}
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node.number not in found:
            found[node.number] = node
            waiting.extend(operands(node))
    return [found[number] for number in sorted(found)]


class Graph:
    """Makes nodes, each once.

    Attributes
    ----------
    places : dict of str by Node
        Line of the caller's function, for elements of arguments.
    is_differentiated : bool
        True when the caller's function is complete: constants of derivatives are folded in float64.
    """

    def __init__(self) -> None:
        self._nodes: dict[tuple[object, ...], Node] = {}
        self.places: dict[Node, str] = {}
        self.is_differentiated = False

    def __len__(self) -> int:
        return len(self._nodes)

    def content(self) -> tuple[object, ...]:
        """What nodes there are, and the lines of elements: graphs of equal content have equal expressions."""
        return *self._nodes, *self.places.values()

    def constant(self, value: bool | int | float) -> Node:
        """A number."""
        if isinstance(value, bool):
            return self._node("constant", BOOL, (), value)
        if isinstance(value, int):
            if not -LARGEST_INT - 1 <= value <= LARGEST_INT:
                raise RefusalError(f"ints have 32 bits, and {value} has more; write a float")
            return self._node("constant", INT, (), value)
        return self._node("constant", FLOAT, (), float(value))

    def input(self, name: str, kind: str) -> Node:
        """The score or a position, by its name."""
        return self._node("input", kind, (), name)

    def element(self, argument: int, kind: str, indices: tuple[Node, ...], place: str) -> Node:
        """An element of an argument. One index fewer than axes makes it a vector, with the loop's index as the last."""
        node = self._node("element", kind, indices, argument)
        self.places.setdefault(node, place)
        return node

    def position(self) -> Node:
        """The index of a loop."""
        return self._node("position", INT, (), None)

    def total(self, term: Node, axes: tuple[int, ...]) -> Node:
        """The sum of a term over the last axes of arguments, which have the same length."""
        kind = INT if term.kind == BOOL else term.kind
        return self._node("sum", kind, (self.cast(term, kind),), axes)

    def cast(self, node: Node, kind: str) -> Node:
        """The same value in another kind."""
        if node.kind == kind:
            return node
        if node.is_constant:
            number = node.value
            assert isinstance(number, bool | int | float)
            if kind == FLOAT:
                return self.constant(float(number))
            same = _in_every_dtype(bool if kind == BOOL else lambda x: truncated(x, np), (node,))
            if same is not None:
                return self.constant({BOOL: bool, INT: int}[kind](same))
        return self._node(f"as_{kind}", kind, (node,))

    def apply(self, op: str, *operands: Node) -> Node:
        """The result of an operation of `PRIMITIVES`, simplified."""
        if op == "power":
            return self._power(*operands)
        rule = PRIMITIVES[op].rule
        if rule == "bits" and all(x.kind == BOOL for x in operands):
            return self.apply(_OF_BOOLS[op], *operands)
        if rule in ("whole", "bits") and any(x.kind == FLOAT for x in operands):
            instead = {"floor_divide": "; write np.floor(x / y)", "remainder": "; write x - y * np.floor(x / y)"}
            raise RefusalError(f"{op} is for ints{instead.get(op, '')}")
        widest = FLOAT if any(x.kind == FLOAT for x in operands[rule == "where" :]) else INT
        if rule == "where" and all(x.kind == BOOL for x in operands):
            widest = BOOL
        wanted = {"real": FLOAT, "whole": INT, "bits": INT, "truth": BOOL}.get(rule, widest)
        kinds = [BOOL if rule == "where" and i == 0 else wanted for i in range(len(operands))]
        cast = tuple(self.cast(x, kind) for x, kind in zip(operands, kinds, strict=True))
        return self._simplified(op, cast, BOOL if rule == "compare" else wanted)

    def number(self, op: str, node: Node, number: float) -> Node:
        """The result of an operation on an expression and a number of its kind."""
        return self.apply(op, node, self.cast(self.constant(number), node.kind))

    def _power(self, base: Node, exponent: Node) -> Node:
        number = exponent.value if exponent.is_constant else None
        if isinstance(number, int | float) and number == 0.5:
            return self.apply("sqrt", base)
        kind = FLOAT if FLOAT in (base.kind, exponent.kind) else INT
        whole = integral_exponent(exponent)
        if whole is not None and (kind == INT or whole in (-1, 0, 1, 2)):  # np.power computes these of floats like this
            if whole < 0 and kind == INT:
                raise RefusalError("an int has no negative power; write 1.0 / x ** n")
            x = self.cast(base, kind)
            result = self.cast(self.constant(1), kind)
            for _ in range(abs(whole)):
                result = self.apply("multiply", result, x)
            return self.apply("divide", self.constant(1.0), result) if whole < 0 else result
        if kind == INT:
            raise RefusalError(
                f"a power of ints needs a constant exponent up to {_LARGEST_EXPONENT}; write (1.0 * x) ** y"
            )
        return self._simplified("power", (self.cast(base, FLOAT), self.cast(exponent, FLOAT)), FLOAT)

    def _simplified(self, op: str, operands: tuple[Node, ...], kind: str) -> Node:
        """An operation, or a simpler expression of the same bits in every dtype."""
        if all(x.is_constant for x in operands):
            dtypes = (np.float64,) if self.is_differentiated else _DTYPES
            same = _in_every_dtype(getattr(np, PRIMITIVES[op].function), operands, dtypes)
            if same is not None:
                return self.constant({BOOL: bool, INT: int, FLOAT: float}[kind](same))
        if op == "divide" and is_power_of_two(factor := reciprocal(operands[1])):
            assert factor is not None
            return self.number("multiply", operands[0], factor)
        if PRIMITIVES[op].commutes:
            operands = tuple(sorted(operands, key=lambda x: x.number))
        simpler = _SIMPLER[op](*operands) if op in _SIMPLER else None
        if simpler is None and op in ("less", "less_equal"):
            simpler = self._range(op, *operands)
        return self._node(op, kind, operands) if simpler is None else simpler

    def _range(self, op: str, x: Node, y: Node) -> Node | None:
        """``-y <= x <= y`` for ``abs(x) <= y`` of an int and a constant: compilers make one comparison of the two.

        The smallest int is its own magnitude.
        """
        if x.op != "absolute" or x.kind != INT or x.bounds.wraps or not y.is_constant:
            return None
        (number,) = x.operands
        assert isinstance(y.value, int)
        if y.value < 0:
            return self.constant(False)
        return self.apply("logical_and", self.apply(op, number, y), self.apply(op, self.constant(-y.value), number))

    def _node(self, op: str, kind: str, operands: tuple[Node, ...], value: object = None) -> Node:
        # repr separates -0.0 from 0.0, and makes NaN equal to itself.
        key = (op, kind, repr(value), *(x.number for x in operands))
        if key not in self._nodes:
            axes = {axis for x in operands for axis in x.axes}
            varies = op == "position" or any(x.varies for x in operands)
            if op == "element" and operands and operands[-1].op == "position":
                assert isinstance(value, int)
                axes.add(value)
            if op == "sum":
                axes, varies = set(), False
            bounds = bounds_of(op, value, [x.bounds for x in operands]) if kind == INT else _BOUNDS[kind]
            grows = kind == FLOAT and _grows(op, operands, value)
            linear = None if bounds.wraps else linear_of(op, kind, [x.linear for x in operands], value)
            distance = linear if linear and linear.factor else None
            # Operands know theirs: no question about a graph takes a walk through it for each of its nodes.
            own = frozenset((str(value),) if op == "input" else ())
            inputs = own.union(*[x.inputs for x in operands])
            depends = _OF_DISTANCE if distance else own.union(*[x.depends for x in operands])
            of_number = len(self._nodes), varies, tuple(sorted(axes)), bounds, grows, linear, distance, inputs, depends
            self._nodes[key] = Node(op, kind, operands, value, *of_number)
        return self._nodes[key]


_BOUNDS = {BOOL: Bounds(0, 1), FLOAT: ANY_INT}


def _grows(op: str, operands: tuple[Node, ...], value: object) -> bool:
    if op == "constant":
        return not math.isfinite(value)  # type: ignore[arg-type]
    if op == "power" and (integral_exponent(operands[1]) or 0) > 0:
        return operands[0].grows
    if op in _MAY_GROW and not (op == "divide" and reciprocal(operands[1]) is not None):
        return True
    return any(x.grows for x in operands)


#: The dtypes of floats.
_DTYPES = (np.float32, np.float64)


def _in_every_dtype(
    function: Callable[..., Any], operands: tuple[Node, ...], floats: tuple[type, ...] = _DTYPES
) -> bool | int | float | None:
    """A function of constants, if it has the same value for all dtypes of floats."""
    found = []
    for dtype in floats:
        dtypes = {BOOL: np.bool_, INT: np.int32, FLOAT: dtype}
        with np.errstate(all="ignore"):
            found.append(np.asarray(function(*(dtypes[x.kind](x.value) for x in operands))).item())
    return found[-1] if repr(found[0]) == repr(found[-1]) else None


def integral_exponent(node: Node) -> int | None:
    """The value of a constant that is a whole number of at most 8 in magnitude."""
    if not node.is_constant or node.value not in range(-_LARGEST_EXPONENT, _LARGEST_EXPONENT + 1):
        return None
    return int(node.value)  # type: ignore[call-overload]


def reciprocal(node: Node) -> float | None:
    """The reciprocal of a float constant that kernels may multiply by; None where it would be inaccurate."""
    if not node.is_constant or not isinstance(node.value, float):
        return None
    return 1 / node.value if _SMALLEST_FACTOR <= abs(node.value) <= _LARGEST_FACTOR else None


def is_power_of_two(number: float | None) -> bool:
    """True if a multiplication by a number rounds as the division by its reciprocal."""
    return number is not None and abs(math.frexp(number)[0]) == 0.5


def _is(node: Node, number: float) -> bool:
    # 0.0 + -0.0 is 0.0: of the two zeros of floats one is neutral in additions, the other one in subtractions.
    return node.is_constant and (node.value == number if node.kind == INT else repr(node.value) == repr(float(number)))


def _without(number: float, x: Node, y: Node) -> Node | None:
    """The other one of two operands if one is the neutral `number`."""
    if _is(y, number):
        return x
    return y if _is(x, number) else None


def _same(x: Node, y: Node) -> Node | None:
    return x if x is y else None


def _logical(neutral: bool, x: Node, y: Node) -> Node | None:
    for one, other in ((x, y), (y, x)):
        if one.is_constant:
            return other if one.value is neutral else one
    return _same(x, y)


def _where(condition: Node, x: Node, y: Node) -> Node | None:
    if condition.is_constant:
        return x if condition.value else y
    return _same(x, y)


#: Simpler expressions of the same bits, by operation. 0 * x is none: it is NaN where x is not finite.
_SIMPLER: Mapping[str, Callable[..., Node | None]] = {
    "add": lambda x, y: _without(-0.0, x, y),
    "subtract": lambda x, y: x if _is(y, 0) else None,
    "multiply": lambda x, y: _without(1, x, y),
    "floor_divide": lambda x, y: x if _is(y, 1) else None,
    "negative": lambda x: x.operands[0] if x.op == "negative" else None,
    "logical_not": lambda x: x.operands[0] if x.op == "logical_not" else None,
    "logical_and": lambda x, y: _logical(True, x, y),
    "logical_or": lambda x, y: _logical(False, x, y),
    "minimum": _same,
    "maximum": _same,
    "where": _where,
}
