"""Programs as CUDA C++.

A score function becomes

    template <class Real, class Arguments>
    __device__ __forceinline__ Real score_value(args, score, b, h, q, k)
    __device__ __forceinline__ Real score_value_and_slope(args, score, b, h, q, k, slope)
    __device__ __forceinline__ void add_argument_gradients(args, score, b, h, q, k, gradient)

and a mask function ``bool is_visible(args, b, h, q, k)``. Real is the type of scores. ``args`` has the members
``array0``, ``array1`` and so on, which ``element`` reads; ``gradient0`` and so on, to which ``add_element`` adds; and
the constants ``kLength0`` and so on, lengths of last axes that loops run over, and ``kFast``, true for data of 16 bits.
All functions that texts call are in ``kernels/common/traced.cuh``. Names are numbered in the order of the expression,
so that the text is a pure function of it: the kernel of a function is found on disk by other processes. What depends on
q - k alone is written in terms of it (``distances.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from .derivatives import Scatter
from .distances import DISTANCE, in_distance
from .expressions import BOOL, FLOAT, INT, Node, reachable
from .operations import OPERATIONS

__all__ = ["function_text"]

_TYPES = {BOOL: "bool", INT: "int32", FLOAT: "Real"}
_POSITIONS = "int32 b, int32 h, int32 q, int32 k"
_INDENT = " " * 4


def function_text(role: str, result: Node, slope: Node | None = None, scatters: Sequence[Scatter] = ()) -> str:
    """The device functions of a score function (with its derivatives) or of a mask function."""
    if role == "mask_mod":
        body = _Body()
        body.returns(result)
        return _function("bool", "is_visible", f"const Arguments& args, {_POSITIONS}", body)
    inputs = f"const Arguments& args, Real score, {_POSITIONS}"
    value, both, gradients = _Body(), _Body(), _Body()
    value.returns(result)
    both.assigns("slope", slope)
    both.returns(result)
    for scatter in scatters:
        gradients.adds(scatter)
    return "\n".join(
        (
            _function("Real", "score_value", inputs, value),
            _function("Real", "score_value_and_slope", f"{inputs}, Real& slope", both),
            _function("void", "add_argument_gradients", f"{inputs}, Real gradient", gradients),
        )
    )


def _function(result: str, name: str, parameters: str, body: _Body) -> str:
    opening = f"template <class Real, class Arguments>\n__device__ __forceinline__ {result} {name}({parameters}) {{"
    return "\n".join((opening, *body.lines, "}\n"))


class _Body:
    """The statements of a function, each of which names one node."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names: dict[Node, str] = {}
        self._count = 0
        self._has_distance = False

    def returns(self, result: Node) -> None:
        """Returns an expression."""
        self._define([result])
        self.lines.append(f"{_INDENT}return {self._name(result, self._names)};")

    def assigns(self, name: str, value: Node | None) -> None:
        """Assigns an expression, or 0 for None."""
        self._define([] if value is None else [value])
        self.lines.append(f"{_INDENT}{name} = {'0' if value is None else self._name(value, self._names)};")

    def adds(self, scatter: Scatter) -> None:
        """Adds `gradient` times a derivative to elements of an argument's gradient."""
        roots = [*scatter.indices, scatter.derivative]
        self._define(roots)
        if not scatter.axes:
            self._add(scatter, self._names, _INDENT)
            return
        self.lines.append(f"{_INDENT}#pragma unroll 1")  # once for each element of a tile it would be much code
        names = self._begin_loop(scatter.axes, roots)
        self._add(scatter, names, 2 * _INDENT)
        self.lines.append(f"{_INDENT}}}")

    def _add(self, scatter: Scatter, names: Mapping[Node, str], indent: str) -> None:
        indices = "".join(f", {self._name(x, names)}" for x in scatter.indices)
        product = f"gradient * {self._name(scatter.derivative, names)}"
        self.lines.append(f"{indent}add_element(args.gradient{scatter.argument}, {product}{indices});")

    def _define(self, roots: Sequence[Node]) -> None:
        """Writes a statement for each node that has none yet, in the order of the expression.

        What a loop's index does not change is written before the loop.
        """
        nodes = reachable(roots, operands=_written_operands)
        if not self._has_distance and any(in_distance(node) for node in nodes):
            self._has_distance = True
            self.lines.append(f"{_INDENT}const int32 {DISTANCE} = q - k;")
        for node in nodes:
            if node in self._names or node.varies or node.op in ("input", "constant"):
                continue
            if node.op == "sum":
                self._sum(node)
            else:
                self._statement(node, self._names, _INDENT)

    def _sum(self, node: Node) -> None:
        (term,) = node.operands
        total = self._new_name()
        self.lines.append(f"{_INDENT}{_TYPES[node.kind]} {total} = 0;")
        assert isinstance(node.value, tuple)
        names = self._begin_loop(node.value, [term])
        self.lines.append(f"{2 * _INDENT}{total} += {self._name(term, names)};")
        self.lines.append(f"{_INDENT}}}")
        self._names[node] = total

    def _begin_loop(self, axes: tuple[int, ...], roots: Sequence[Node]) -> dict[Node, str]:
        """Opens a loop with the nodes that vary in it; returns the names of these and of all before."""
        self.lines.append(f"{_INDENT}for (int32 j = 0; j < Arguments::kLength{axes[0]}; ++j) {{")
        names = dict(self._names)
        for node in reachable(roots, into_sums=False):
            if node.varies and node.op != "position":
                self._statement(node, names, 2 * _INDENT)
        return names

    def _statement(self, node: Node, names: dict[Node, str], indent: str) -> None:
        text = self._expression(node, names)
        if text == DISTANCE:
            names[node] = text
            return
        names[node] = self._new_name()
        self.lines.append(f"{indent}const {_TYPES[node.kind]} {names[node]} = {text};")

    def _expression(self, node: Node, names: Mapping[Node, str]) -> str:
        distance = in_distance(node)
        if distance is not None:
            return distance
        operands = [self._name(x, names) for x in node.operands]
        if node.op == "element":
            return f"element<{_TYPES[node.kind]}>({', '.join((f'args.array{node.value}', *operands))})"
        if node.op == "as_bool":
            return f"{operands[0]} != 0"
        if node.op in ("as_int", "as_float"):
            return f"static_cast<{_TYPES[node.kind]}>({operands[0]})"
        return OPERATIONS[node.op].text.format(*operands)

    def _name(self, node: Node, names: Mapping[Node, str]) -> str:
        """The name or the literal of a node."""
        if node.op == "input":
            return str(node.value)
        if node.op == "position":
            return "j"
        return _literal(node) if node.is_constant else names[node]

    def _new_name(self) -> str:
        self._count += 1
        return f"t{self._count}"


def _written_operands(node: Node) -> tuple[Node, ...]:
    """The operands that occur in the text of a node."""
    return node.operands if in_distance(node) is None else ()


def _literal(node: Node) -> str:
    value = node.value
    if node.kind == BOOL:
        return "true" if value else "false"
    assert isinstance(value, int | float)
    if node.kind == INT:
        return f"int32({value})" if value < 0 else f"{value}"
    if math.isnan(value):
        return "not_a_number<Real>()"
    if math.isinf(value):
        return "infinity<Real>()" if value > 0 else "(-infinity<Real>())"
    return f"Real({value!r})"
