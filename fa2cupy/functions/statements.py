"""Expressions as statements of CUDA C++. Each statement names one node.

Names are numbered in the order of the expression, so that the text is a pure function of it: other processes find the
kernel of a function on disk. What depends on q - k alone is written in terms of it (``distances.py``). All functions
that statements call are in ``kernels/common/traced.cuh``.

Where a comparison, a floor or an int follows from floats, a last bit decides: sums, products and quotients are then
rounded one by one, as on NumPy. Elsewhere the compiler makes FMAs, and a reciprocal replaces a constant divisor.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from .distances import in_distance, in_real_distance
from .expressions import BOOL, FLOAT, INT, Node, integral_exponent, reachable, reciprocal
from .linear import DISTANCE
from .primitives import PRIMITIVES

__all__ = ["INDENT", "TYPES", "Statements", "rounded_nodes"]

INDENT = " " * 4
#: Types of C++ by kind; Real is the type of scores.
TYPES = {BOOL: "bool", INT: "int32", FLOAT: "Real"}
_DECIDING = {name for name, row in PRIMITIVES.items() if row.rule == "compare"} | {"floor", "as_int", "as_bool"}


def rounded_nodes(root: Node) -> frozenset[Node]:
    """The floats of an expression from which a comparison, a floor or an int follows."""
    deciding = [node for node in reachable([root]) if node.op in _DECIDING]
    nodes = reachable([x for node in deciding for x in node.operands if x.kind == FLOAT])
    return frozenset(node for node in nodes if node.kind == FLOAT)


class Statements:
    """The statements of a function or of a block in it.

    Parameters
    ----------
    rounded : frozenset of Node
        Nodes whose operations are rounded one by one.
    has_distance, has_real_distance : bool
        Whether q - k and the ``RealDistance`` are parameters of the function.
    given : mapping of Node to str
        The nodes that have names already.

    Attributes
    ----------
    lines : list of str
    """

    def __init__(
        self,
        rounded: frozenset[Node],
        has_distance: bool = False,
        has_real_distance: bool = False,
        given: Mapping[Node, str] = MappingProxyType({}),
    ) -> None:
        self.lines: list[str] = []
        self._rounded, self._names, self._count = rounded, dict(given), 0
        self._has_distance, self._has_real_distance, self._is_loop = has_distance, has_real_distance, False

    def values(self, nodes: Sequence[Node]) -> list[str]:
        """Defines nodes; returns their names or literals."""
        self.define(nodes)
        return [self._name(x) for x in nodes]

    def define(self, nodes: Sequence[Node]) -> None:
        """Writes a statement for each node of expressions that has none yet, but outside a loop not for its nodes."""
        missing = [x for x in reachable(nodes, operands=self._written_operands) if x not in self._names]
        if not self._has_distance and any(x.distance for x in missing):
            self._has_distance = True
            self.lines.append(f"const int32 {DISTANCE} = q - k;")
        for node in missing:
            if (node.varies and not self._is_loop) or node.op in ("input", "constant", "position"):
                continue
            text = self._sum(node) if node.op == "sum" else self._expression(node)
            if node.op != "sum" and text != DISTANCE:
                name = self._new_name()
                self.lines.append(f"const {TYPES[node.kind]} {name} = {text};")
                text = name
            self._names[node] = text

    @contextlib.contextmanager
    def block(self, opening: str, closing: str = "}", has_distance: bool = False) -> Iterator[Statements]:
        """The statements of a block, which may use all names before it. Its own are not used again."""
        inner = copy.copy(self)
        inner.lines, inner._names = [], dict(self._names)
        inner._has_distance |= has_distance
        yield inner
        self.lines += [opening, *(INDENT + line for line in inner.lines), closing]
        self._count = inner._count

    @contextlib.contextmanager
    def loop(self, axes: tuple[int, ...]) -> Iterator[Statements]:
        """The statements of a loop over the last axes of arguments. What does not vary in it has been defined."""
        with self.block(f"for (int32 j = 0; j < Arguments::kLength{axes[0]}; ++j) {{") as inner:
            inner._is_loop = True
            yield inner

    def _sum(self, node: Node) -> str:
        """Writes the loop of a sum, and returns the name of its variable."""
        total = self._new_name()
        self.lines.append(f"{TYPES[node.kind]} {total} = 0;")
        assert isinstance(node.value, tuple)
        with self.loop(node.value) as inner:
            (term,) = inner.values(node.operands)
            inner.lines.append(
                f"{total} = wrapped_sum({total}, {term});" if node.kind == INT else f"{total} += {term};"
            )
        return total

    def _expression(self, node: Node) -> str:
        distance = self._in_distance(node)
        if distance is not None:
            return distance
        operands = [self._name(x) for x in node.operands]
        if node.op == "element":
            return f"element<{TYPES[node.kind]}>({', '.join((f'args.array{node.value}', *operands))})"
        if node.op == "as_bool":
            return f"{operands[0]} != 0"
        if node.op == "as_int" and node.operands[0].kind == FLOAT:
            return f"truncated({operands[0]})"
        if node.op in ("as_int", "as_float"):
            return f"static_cast<{TYPES[node.kind]}>({operands[0]})"
        return self._primitive_text(node).format(*operands)

    def _primitive_text(self, node: Node) -> str:
        """The text of a primitive operation, with places for its operands."""
        primitive, is_rounded = PRIMITIVES[node.op], node in self._rounded
        if node.op == "multiply" and is_rounded:
            return "rounded_product({0}, {1})"
        if node.op == "divide" and not is_rounded:
            factor = reciprocal(node.operands[1])
            return primitive.text if factor is None else f"{{0}} * {_real(factor)}"
        if node.op == "power" and (exponent := integral_exponent(node.operands[1])) is not None:
            return f"power_of<{exponent}, {'true' if is_rounded else 'false'}>({{0}})"
        return primitive.wrapping if node.bounds.wraps and primitive.wrapping else primitive.text

    def _in_distance(self, node: Node) -> str | None:
        """The text of a node in terms of q - k, if it depends on nothing else."""
        # Beyond 2^24, a distance in floating point is not rounded as an int that is converted.
        in_real = in_real_distance(node) if self._has_real_distance and node not in self._rounded else None
        return in_distance(node) if in_real is None else in_real

    def _written_operands(self, node: Node) -> tuple[Node, ...]:
        """The operands that occur in the text of a node."""
        return () if node in self._names or self._in_distance(node) is not None else node.operands

    def _name(self, node: Node) -> str:
        """The name or the literal of a node."""
        if node.op == "input":
            return str(node.value)
        if node.op == "position":
            return "j"
        return _literal(node) if node.is_constant else self._names[node]

    def _new_name(self) -> str:
        self._count += 1
        return f"t{self._count}"


def _literal(node: Node) -> str:
    value = node.value
    if node.kind == BOOL:
        return "true" if value else "false"
    assert isinstance(value, int | float)
    if node.kind == INT:
        return f"int32({value})" if value < 0 else f"{value}"
    return _real(value)


def _real(value: float) -> str:
    if math.isnan(value):
        return "not_a_number<Real>()"
    if math.isinf(value):
        return "infinity<Real>()" if value > 0 else "(-infinity<Real>())"
    return f"Real({value!r})"
