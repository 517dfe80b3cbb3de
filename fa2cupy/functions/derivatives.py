"""Derivatives of expressions, found forward: from the variable to the result.

np.where then selects between derivatives. Found backward, they would be multiplied by 0 in the branch that is not
taken, which is NaN where the derivative of that branch is infinite.

The chain rule still multiplies. In a product of derivatives 0 outweighs what is not finite: ``np.sqrt(x)`` of an x that
does not change has the derivative 0 at x = 0, and so have ``x * np.sqrt(x)`` and the exponent of 0 ** y.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .expressions import FLOAT, Graph, Node, reachable

__all__ = ["Scatter", "derivative", "scatters"]


class Scatter(NamedTuple):
    """The derivative of an expression by the elements of an argument that it reads at one place.

    Attributes
    ----------
    argument : int
    indices : tuple of Node
    derivative : Node
    axes : tuple of int
        The arguments over whose last axes indices and derivative run; empty if there is one element.
    """

    argument: int
    indices: tuple[Node, ...]
    derivative: Node
    axes: tuple[int, ...]


def derivative(
    graph: Graph, result: Node, variable: Node, users: Mapping[Node, Sequence[Node]] | None = None
) -> Node | None:
    """The derivative of a float expression by a node, or None if it is 0 everywhere.

    Sums do not depend on a `variable` that varies in their loop: there it is another element. `users` are the nodes of
    the expression that have a node as an operand, for several derivatives of it.
    """
    if users is None:
        users = _users(result)
    found: dict[Node, Node | None] = {variable: graph.constant(1.0)}
    for node in reachable([variable], operands=lambda node: tuple(users.get(node, ()))):
        if node in found:
            continue
        parts = [found.get(x) for x in node.operands]
        if node.kind != FLOAT or all(part is None for part in parts):
            found[node] = None
        elif node.op == "sum":
            (term,) = parts
            assert term is not None and isinstance(node.value, tuple)
            found[node] = None if variable.varies else graph.total(term, node.value)
        else:
            found[node] = _RULES[node.op](graph, node, parts) if node.op in _RULES else None
    return found.get(result)


def _users(result: Node) -> dict[Node, list[Node]]:
    users: dict[Node, list[Node]] = {}
    for node in reachable([result]):
        for operand in node.operands:
            users.setdefault(operand, []).append(node)
    return users


def scatters(graph: Graph, result: Node, arguments: Sequence[int]) -> list[Scatter]:
    """The derivatives of an expression by the elements that it reads of some floating-point arguments."""
    nodes, users = reachable([result]), _users(result)
    elements = [x for x in nodes if x.op == "element" and x.value in arguments]
    found = []
    for element in elements:
        assert isinstance(element.value, int)
        if not element.varies:
            whole = derivative(graph, result, element, users)
            if whole is not None:
                found.append(Scatter(element.value, element.operands, whole, ()))
            continue
        for loop in (x for x in nodes if x.op == "sum"):
            (term,) = loop.operands
            outer = derivative(graph, result, loop, users)
            inner = derivative(graph, term, element)
            if outer is not None and inner is not None:
                assert isinstance(loop.value, tuple)
                product = _times(graph, outer, inner, is_steep=True)
                assert product is not None
                found.append(Scatter(element.value, element.operands, product, loop.value))
    return found


_Parts = Sequence["Node | None"]
_Rule = Callable[[Graph, Node, _Parts], "Node | None"]


def _added(graph: Graph, x: Node | None, y: Node | None, op: str = "add") -> Node | None:
    if y is None:
        return x
    if x is None:
        return y if op == "add" else graph.apply("negative", y)
    return graph.apply(op, x, y)


def _times(graph: Graph, factor: Node, part: Node | None, is_steep: bool = False) -> Node | None:
    """The product of a factor and a derivative: 0 where the factor is 0 and the derivative is not finite.

    With `is_steep`, also where it is the other way round: a function that may have a finite value where its slope, the
    factor, is not finite. Elsewhere such a slope is that of a value that is not finite either, and nothing is to be
    saved.
    """
    if part is None:
        return None
    product = graph.apply("multiply", factor, part)
    for zero, other in ((factor, part), (part, factor))[: 1 + is_steep]:
        if other.grows and not _is_never_zero(zero):
            product = graph.apply("where", graph.number("equal", zero, 0.0), graph.constant(0.0), product)
    return product


def _is_never_zero(node: Node) -> bool:
    """True for constants other than 0, and for signs."""
    return all(x.is_constant and x.value != 0 for x in (node.operands[1:] if node.op == "where" else (node,)))


def _selected(graph: Graph, condition: Node, x: Node | None, y: Node | None) -> Node:
    zero = graph.constant(0.0)
    return graph.apply("where", condition, zero if x is None else x, zero if y is None else y)


def _product(graph: Graph, node: Node, parts: _Parts) -> Node | None:
    (x, y), (dx, dy) = node.operands, parts
    return _added(graph, _times(graph, y, dx), _times(graph, x, dy))


def _quotient(graph: Graph, node: Node, parts: _Parts) -> Node | None:
    (_, y), (dx, dy) = node.operands, parts
    above = _added(graph, dx, _times(graph, node, dy), "subtract")
    return None if above is None else graph.apply("divide", above, y)


def _power(graph: Graph, node: Node, parts: _Parts) -> Node | None:
    (x, y), (dx, dy) = node.operands, parts
    of_base = of_exponent = None
    if dx is not None:
        coefficient = _times(graph, y, graph.apply("power", x, graph.number("subtract", y, 1.0)))
        assert coefficient is not None
        of_base = _times(graph, coefficient, dx, is_steep=True)
    if dy is not None:  # for x = 0, y = 0 as well, where the slope has no limit
        log = _selected(graph, graph.number("equal", x, 0.0), None, graph.apply("log", x))
        of_exponent = _times(graph, graph.apply("multiply", node, log), dy, is_steep=True)
    return _added(graph, of_base, of_exponent)


def _extremum(comparison: str) -> _Rule:
    def rule(graph: Graph, node: Node, parts: _Parts) -> Node | None:
        x, y = node.operands
        return _selected(graph, graph.apply(comparison, x, y), *parts)

    return rule


def _chain(slope: Callable[[Graph, Node, Node], Node], is_steep: bool = False) -> _Rule:
    """The rule of a function of one operand, from its derivative at (operand, result)."""

    def rule(graph: Graph, node: Node, parts: _Parts) -> Node | None:
        return _times(graph, slope(graph, node.operands[0], node), parts[0], is_steep)

    return rule


def _sign(g: Graph, x: Node, _: Node) -> Node:
    return g.apply("where", g.number("less", x, 0.0), g.constant(-1.0), g.constant(1.0))


#: Rules by operation; all others have the derivative 0.
_RULES: Mapping[str, _Rule] = {
    "add": lambda g, node, parts: _added(g, parts[0], parts[1]),
    "subtract": lambda g, node, parts: _added(g, parts[0], parts[1], "subtract"),
    "multiply": _product,
    "divide": _quotient,
    "power": _power,
    "negative": lambda g, node, parts: None if parts[0] is None else g.apply("negative", parts[0]),
    "absolute": _chain(_sign),
    "minimum": _extremum("less_equal"),
    "maximum": lambda g, node, parts: _extremum("less_equal")(g, node, parts[::-1]),
    "exp": _chain(lambda g, x, y: y),
    "exp2": _chain(lambda g, x, y: g.number("multiply", y, math.log(2))),
    "log": _chain(lambda g, x, y: g.apply("divide", g.constant(1.0), x)),
    "log1p": _chain(lambda g, x, y: g.apply("divide", g.constant(1.0), g.number("add", x, 1.0))),
    "tanh": _chain(lambda g, x, y: g.apply("subtract", g.constant(1.0), g.apply("multiply", y, y))),
    "sqrt": _chain(lambda g, x, y: g.apply("divide", g.constant(0.5), y), is_steep=True),
    "sin": _chain(lambda g, x, y: g.apply("cos", x)),
    "cos": _chain(lambda g, x, y: g.apply("negative", g.apply("sin", x))),
    "where": lambda g, node, parts: _selected(g, node.operands[0], parts[1], parts[2]),
}
