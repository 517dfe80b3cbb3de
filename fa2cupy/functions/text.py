"""Programs as CUDA C++.

A score function becomes

    template <class Real> struct ScoreHeadTerms; struct DistanceTerms; struct GradientSums
    template <class Real, class Arguments>
    __device__ __forceinline__ ScoreHeadTerms<Real> score_head_terms(args, b, h)
    __device__ __forceinline__ DistanceTerms<Real> distance_terms(args, b, h, distance)
    __device__ __forceinline__ Real score_value(args, score, b, h, q, k, real_distance, of_head, of_distance)
    __device__ __forceinline__ Real score_value_and_slope(args, score, b, h, q, k, real_distance, of_head, of_distance,
                                                          slope)
    __device__ __forceinline__ void begin_sums(args, b, h, lowest, distances, lane, sums)
    __device__ __forceinline__ void add_argument_gradients(args, score, b, h, q, k, gradient, sums)
    __device__ __forceinline__ void end_sums(args, b, h, lane, sums)

and a mask function

    template <class Real> struct QueryTerms; struct KeyTerms
    template <class Real, class Arguments>
    __device__ __forceinline__ QueryTerms<Real> query_terms(args, b, h, q)
    __device__ __forceinline__ KeyTerms<Real> key_terms(args, b, h, k)
    __device__ __forceinline__ bool is_visible(args, b, h, q, k, of_q, of_k)
    __device__ __forceinline__ bool is_visible(args, b, h, q, k)

of which the structures hold what depends on q - k, on one position or on none (``terms.py``). Sums are gradients that a
lane has not yet added to memory: of elements that all scores of a head read, and of the element that its last scores
have read, a run (``RunSum``). An atomic addition for each score would round once for each, and wait for all others at
the same address. Real is the type of scores.
``args`` has the members ``array0``, ``array1`` and so on, which ``element`` reads; ``gradient0`` and so on, to which
``add_element``, ``add_element_of_warp`` and runs add; and the constants ``kLength0`` and so on, lengths of last axes
that loops run over, and ``kFast``, true for data of 16 bits.
All functions that texts call are in ``kernels/common/traced.cuh``. Names are numbered in the order of the expression,
so that the text is a pure function of it: the kernel of a function is found on disk by other processes. What depends on
q - k alone is written in terms of it, also in terms of ``real_distance``, a ``RealDistance`` (``distances.py``).

Where a comparison, a floor or an int follows from floats, a last bit decides: sums, products and quotients are then
rounded one by one, as on NumPy. Elsewhere the compiler makes FMAs, and a reciprocal replaces a constant divisor.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from .derivatives import Scatter
from .distances import REAL_DISTANCE, in_distance, in_real_distance, of_distance_alone
from .expressions import BOOL, FLOAT, INT, Node, integral_exponent, reachable, reciprocal
from .linear import DISTANCE
from .operations import OPERATIONS
from .terms import Terms

__all__ = ["mask_text", "score_text"]

_TYPES = {BOOL: "bool", INT: "int32", FLOAT: "Real"}
_POSITIONS = "int32 b, int32 h, int32 q, int32 k"
_INDENT = " " * 4
_DECIDING = {name for name, row in OPERATIONS.items() if row.rule == "compare"} | {"floor", "as_int", "as_bool"}


def mask_text(result: Node, terms: Terms) -> str:
    """The device functions of a mask function."""
    names = {node: f"of_q.term{i}" for i, node in enumerate(terms.of_q)}
    names |= {node: f"of_k.term{i}" for i, node in enumerate(terms.of_k)}
    rounded = _rounded_nodes([result])
    of_pair, whole = _Body(rounded, given=names), _Body(rounded)
    of_pair.returns(result)
    inputs = f"const Arguments& args, {_POSITIONS}"
    rows, columns = (f"{name}_terms<Real>(args, b, h, {position})" for name, position in (("query", "q"), ("key", "k")))
    whole.lines.append(f"{_INDENT}return is_visible<Real>(args, b, h, q, k, {rows}, {columns});")
    return "\n".join(
        (
            *_terms_text("Query", "q", terms.of_q, "quad", rounded),
            *_terms_text("Key", "k", terms.of_k, "quad", rounded),
            _function(
                "bool", "is_visible", f"{inputs}, const QueryTerms<Real>& of_q, const KeyTerms<Real>& of_k", of_pair
            ),
            _function("bool", "is_visible", inputs, whole),
        )
    )


def _rounded_nodes(roots: Sequence[Node]) -> frozenset[Node]:
    """The floats from which a comparison, a floor or an int follows."""
    deciding = [node for node in reachable(roots) if node.op in _DECIDING]
    nodes = reachable([x for node in deciding for x in node.operands if x.kind == FLOAT])
    return frozenset(node for node in nodes if node.kind == FLOAT)


def _terms_text(
    name: str, position: str, terms: Sequence[Node], source: str, rounded: frozenset[Node]
) -> tuple[str, str]:
    """The structure of a position's terms, which a lane can receive from a quad or lane, and what evaluates them."""
    received = ", ".join(f"from_{source}(term{i}, {source})" for i in range(len(terms)))
    receives = (
        f"{_INDENT}__device__ __forceinline__ {name}Terms of_{source}(int {source}) const {{\n"
        f"{2 * _INDENT}return {{{received}}};\n{_INDENT}}}\n"
    )
    body = _Body(rounded, has_distance=position == DISTANCE)
    body.returns_all(terms)
    inputs = f"const Arguments& args, int32 b, int32 h, int32 {position}"
    function = _function(f"{name}Terms<Real>", f"{name.lower()}_terms", inputs, body)
    return _structure(f"{name}Terms", terms, receives), function


def _head_terms_text(terms: Sequence[Node], rounded: frozenset[Node]) -> tuple[str, str]:
    """The structure of a head's terms, and what evaluates them."""
    body = _Body(rounded)
    body.returns_all(terms)
    function = _function("ScoreHeadTerms<Real>", "score_head_terms", "const Arguments& args, int32 b, int32 h", body)
    return _structure("ScoreHeadTerms", terms), function


def _structure(name: str, terms: Sequence[Node], methods: str = "") -> str:
    members = "".join(f"{_INDENT}{_TYPES[node.kind]} term{i};\n" for i, node in enumerate(terms))
    return f"template <class Real>\nstruct {name} {{\n{members}{methods}}};\n"


def score_text(result: Node, slope: Node | None, scatters: Sequence[Scatter], terms: Terms) -> str:
    """The device functions of a score function: its values, its derivative and the gradients of its arguments."""
    names = {node: f"of_distance.term{i}" for i, node in enumerate(terms.of_distance)}
    names |= {node: f"of_head.term{i}" for i, node in enumerate(terms.of_head)}
    inputs = f"const Arguments& args, Real score, {_POSITIONS}"
    given = (
        f"const RealDistance<Real>& {REAL_DISTANCE}, const ScoreHeadTerms<Real>& of_head, "
        "const DistanceTerms<Real>& of_distance"
    )
    # Comparisons of derivatives alone choose between those of two sides: they decide nothing about values.
    rounded = _rounded_nodes([result])
    value, both = (_Body(rounded, has_real_distance=True, given=names) for _ in range(2))
    beginning, gradients, ending = (_Body(rounded) for _ in range(3))
    value.returns(result)
    both.assigns("slope", slope)
    both.returns(result)
    members = []
    for number, scatter in enumerate(scatters):
        if scatter.axes:
            gradients.adds_in_loop(scatter)
        elif _is_of_head(scatter):
            members.append(f"{_INDENT}Real sum{number} = 0;\n")
            gradients.adds_to_sum(f"sums.sum{number}", scatter)
            ending.adds_sum(f"sums.sum{number}", scatter)
        else:
            members.append(f"{_INDENT}RunSum<Real> run{number};\n")
            if of_distance_alone(scatter.indices):
                beginning.begins_run(f"sums.run{number}", scatter)
            gradients.adds_to_run(f"sums.run{number}", scatter)
            ending.ends_run(f"sums.run{number}")
    return "\n".join(
        (
            *_head_terms_text(terms.of_head, rounded),
            *_terms_text("Distance", DISTANCE, terms.of_distance, "lane", rounded),
            _function("Real", "score_value", f"{inputs}, {given}", value),
            _function("Real", "score_value_and_slope", f"{inputs}, {given}, Real& slope", both),
            f"template <class Real>\nstruct GradientSums {{\n{''.join(members)}}};\n",
            _function(
                "void",
                "begin_sums",
                "const Arguments& args, int32 b, int32 h, int32 lowest, int32 distances, int32 lane, "
                "GradientSums<Real>& sums",
                beginning,
            ),
            _function(
                "void", "add_argument_gradients", f"{inputs}, Real gradient, GradientSums<Real>& sums", gradients
            ),
            _function(
                "void",
                "end_sums",
                "const Arguments& args, int32 b, int32 h, int32 lane, const GradientSums<Real>& sums",
                ending,
            ),
        )
    )


def _is_of_head(scatter: Scatter) -> bool:
    """True if all scores of a head read the same element."""
    return all(node.inputs <= {"b", "h"} for node in scatter.indices)


def _function(result: str, name: str, parameters: str, body: _Body) -> str:
    opening = f"template <class Real, class Arguments>\n__device__ __forceinline__ {result} {name}({parameters}) {{"
    return "\n".join((opening, *body.lines, "}\n"))


class _Body:
    """The statements of a function, each of which names one node. Those of `given` have names already.

    Operations of `rounded` are rounded one by one. `has_real_distance` and `has_distance` tell what is a parameter of
    the function.
    """

    def __init__(
        self,
        rounded: frozenset[Node],
        has_real_distance: bool = False,
        has_distance: bool = False,
        given: Mapping[Node, str] = MappingProxyType({}),
    ) -> None:
        self.lines: list[str] = []
        self._names, self._rounded = dict(given), rounded
        self._count = 0
        self._has_distance, self._has_real_distance = has_distance, has_real_distance

    def returns(self, result: Node) -> None:
        """Returns an expression."""
        self._define([result])
        self.lines.append(f"{_INDENT}return {self._name(result, self._names)};")

    def returns_all(self, results: Sequence[Node]) -> None:
        """Returns expressions as the members of a structure."""
        self._define(results)
        self.lines.append(f"{_INDENT}return {{{', '.join(self._name(x, self._names) for x in results)}}};")

    def assigns(self, name: str, value: Node | None) -> None:
        """Assigns an expression, or 0 for None."""
        self._define([] if value is None else [value])
        self.lines.append(f"{_INDENT}{name} = {'0' if value is None else self._name(value, self._names)};")

    def adds_in_loop(self, scatter: Scatter) -> None:
        """Adds `gradient` times a derivative to the elements of an argument's gradient that a loop runs over."""
        roots = [*scatter.indices, scatter.derivative]
        self._define(roots)
        self.lines.append(f"{_INDENT}#pragma unroll 1")  # once for each element of a tile it would be much code
        names = self._begin_loop(scatter.axes, roots)
        product, indices = self._product(scatter, names), self._indices(scatter, names)
        self.lines.append(f"{2 * _INDENT}add_element(args.gradient{scatter.argument}, {product}{indices});")
        self.lines.append(f"{_INDENT}}}")

    def adds_to_sum(self, total: str, scatter: Scatter) -> None:
        """Adds `gradient` times a derivative to a sum."""
        self._define([scatter.derivative])
        self.lines.append(f"{_INDENT}{total} += {self._product(scatter, self._names)};")

    def adds_sum(self, total: str, scatter: Scatter) -> None:
        """Adds the sums of all lanes of a warp to an element of an argument's gradient."""
        self._define(scatter.indices)
        indices = self._indices(scatter, self._names)
        self.lines.append(f"{_INDENT}add_element_of_warp(args.gradient{scatter.argument}, {total}, lane{indices});")

    def begins_run(self, run: str, scatter: Scatter) -> None:
        """Begins the run of a tile's scores if all their distances read one element."""
        inner = self._inner()
        inner._has_distance = True
        element = inner._element(scatter)
        self.lines.append(f"{_INDENT}{run}.begin(lowest, distances, lane, [&](int32 {DISTANCE}) {{")
        self._takes(inner)
        self.lines += [f"{2 * _INDENT}return {element};", f"{_INDENT}}});"]

    def adds_to_run(self, run: str, scatter: Scatter) -> None:
        """Adds `gradient` times a derivative to the run of an element, which may end that of another."""
        self._define([scatter.derivative])
        inner = self._inner()
        element = inner._element(scatter)
        self.lines.append(f"{_INDENT}if (!{run}.is_of_tile) {{")
        self._takes(inner)
        self.lines += [f"{2 * _INDENT}{run}.move_to({element});", f"{_INDENT}}}"]
        self.lines.append(f"{_INDENT}{run}.sum += {self._product(scatter, self._names)};")

    def ends_run(self, run: str) -> None:
        """Adds the runs of all lanes of a warp to memory."""
        self.lines.append(f"{_INDENT}{run}.end(lane);")

    def _inner(self) -> _Body:
        """A block within these statements, which can use their names."""
        inner = copy.copy(self)
        inner.lines, inner._names = [], dict(self._names)
        return inner

    def _takes(self, inner: _Body) -> None:
        """Takes the statements of a block; the names in it are not used again."""
        self.lines += [f"{_INDENT}{line}" for line in inner.lines]
        self._count = inner._count

    def _element(self, scatter: Scatter) -> str:
        """The address of an element of an argument's gradient."""
        self._define(scatter.indices)
        indices = ", ".join(self._name(x, self._names) for x in scatter.indices)
        return f"args.gradient{scatter.argument}.at({indices})"

    def _product(self, scatter: Scatter, names: Mapping[Node, str]) -> str:
        return f"gradient * {self._name(scatter.derivative, names)}"

    def _indices(self, scatter: Scatter, names: Mapping[Node, str]) -> str:
        return "".join(f", {self._name(x, names)}" for x in scatter.indices)

    def _define(self, roots: Sequence[Node]) -> None:
        """Writes a statement for each node that has none yet, in the order of the expression.

        What a loop's index does not change is written before the loop.
        """
        nodes = reachable(roots, operands=self._written_operands)
        if not self._has_distance and any(node not in self._names and in_distance(node) for node in nodes):
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
        added = self._name(term, names)
        total_text = f"{total} = wrapped_sum({total}, {added})" if node.kind == INT else f"{total} += {added}"
        self.lines += [f"{2 * _INDENT}{total_text};", f"{_INDENT}}}"]
        self._names[node] = total

    def _begin_loop(self, axes: tuple[int, ...], roots: Sequence[Node]) -> dict[Node, str]:
        """Opens a loop with the nodes that vary in it; returns the names of these and of all before."""
        self.lines.append(f"{_INDENT}for (int32 j = 0; j < Arguments::kLength{axes[0]}; ++j) {{")
        names = dict(self._names)
        for node in reachable(roots, operands=lambda node: node.operands if node.varies else ()):
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
        distance = self._in_distance(node)
        if distance is not None:
            return distance
        operands = [self._name(x, names) for x in node.operands]
        if node.op == "element":
            return f"element<{_TYPES[node.kind]}>({', '.join((f'args.array{node.value}', *operands))})"
        if node.op == "as_bool":
            return f"{operands[0]} != 0"
        if node.op == "as_int" and node.operands[0].kind == FLOAT:
            return f"truncated({operands[0]})"
        if node.op in ("as_int", "as_float"):
            return f"static_cast<{_TYPES[node.kind]}>({operands[0]})"
        return self._operation_text(node).format(*operands)

    def _operation_text(self, node: Node) -> str:
        """The text of an operation, with places for its operands."""
        operation, is_rounded = OPERATIONS[node.op], node in self._rounded
        if node.op == "multiply" and is_rounded:
            return "rounded_product({0}, {1})"
        if node.op == "divide" and not is_rounded:
            factor = reciprocal(node.operands[1])
            return operation.text if factor is None else f"{{0}} * {_real(factor)}"
        if node.op == "power" and (exponent := integral_exponent(node.operands[1])) is not None:
            return f"power_of<{exponent}, {'true' if is_rounded else 'false'}>({{0}})"
        return operation.wrapping if node.bounds.wraps and operation.wrapping else operation.text

    def _in_distance(self, node: Node) -> str | None:
        """The text of a node in terms of q - k, if it depends on nothing else."""
        # Beyond 2^24, a distance in floating point is not rounded as an int that is converted.
        in_real = in_real_distance(node) if self._has_real_distance and node not in self._rounded else None
        return in_distance(node) if in_real is None else in_real

    def _written_operands(self, node: Node) -> tuple[Node, ...]:
        """The operands that occur in the text of a node."""
        return () if node in self._names or self._in_distance(node) is not None else node.operands

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
