"""Programs as CUDA C++.

A score function becomes

    template <class Real> struct ScoreHeadTerms; struct DistanceTerms; struct ScoreHeadSums
    template <class Real, class Arguments>
    __device__ __forceinline__ ScoreHeadTerms<Real> score_head_terms(args, b, h)
    __device__ __forceinline__ DistanceTerms<Real> distance_terms(args, b, h, distance)
    __device__ __forceinline__ Real score_value(args, score, b, h, q, k, real_distance, of_head, of_distance)
    __device__ __forceinline__ Real score_value_and_slope(args, score, b, h, q, k, real_distance, of_head, of_distance,
                                                          slope)
    __device__ __forceinline__ void add_argument_gradients(args, score, b, h, q, k, gradient, sums)
    __device__ __forceinline__ void add_head_sums(args, b, h, lane, sums)

and a mask function

    template <class Real> struct QueryTerms; struct KeyTerms
    template <class Real, class Arguments>
    __device__ __forceinline__ QueryTerms<Real> query_terms(args, b, h, q)
    __device__ __forceinline__ KeyTerms<Real> key_terms(args, b, h, k)
    __device__ __forceinline__ bool is_visible(args, b, h, q, k, of_q, of_k)
    __device__ __forceinline__ bool is_visible(args, b, h, q, k)

of which the structures hold what depends on q - k, on one position or on none (``terms.py``). Sums are the gradients of
elements that all scores of a head read: each lane adds up its own, before a warp adds all of them to memory once. Real
is the type of scores.
``args`` has the members ``array0``, ``array1`` and so on, which ``element`` reads; ``gradient0`` and so on, to which
``add_element`` and ``add_element_of_warp`` add; and the constants ``kLength0`` and so on, lengths of last axes that
loops run over, and ``kFast``, true for data of 16 bits.
All functions that texts call are in ``kernels/common/traced.cuh``. Names are numbered in the order of the expression,
so that the text is a pure function of it: the kernel of a function is found on disk by other processes. What depends on
q - k alone is written in terms of it, also in terms of ``real_distance``, a ``RealDistance`` (``distances.py``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from .derivatives import Scatter
from .distances import DISTANCE, REAL_DISTANCE, in_distance, in_real_distance
from .expressions import BOOL, FLOAT, INT, Node, reachable
from .operations import OPERATIONS
from .terms import Terms

__all__ = ["mask_text", "score_text"]

_TYPES = {BOOL: "bool", INT: "int32", FLOAT: "Real"}
_POSITIONS = "int32 b, int32 h, int32 q, int32 k"
_INDENT = " " * 4


def mask_text(result: Node, terms: Terms) -> str:
    """The device functions of a mask function."""
    names = {node: f"of_q.term{i}" for i, node in enumerate(terms.of_q)}
    names |= {node: f"of_k.term{i}" for i, node in enumerate(terms.of_k)}
    of_pair, whole = _Body(given=names), _Body()
    of_pair.returns(result)
    inputs = f"const Arguments& args, {_POSITIONS}"
    rows, columns = (f"{name}_terms<Real>(args, b, h, {position})" for name, position in (("query", "q"), ("key", "k")))
    whole.lines.append(f"{_INDENT}return is_visible<Real>(args, b, h, q, k, {rows}, {columns});")
    return "\n".join(
        (
            *_terms_text("Query", "q", terms.of_q, "quad"),
            *_terms_text("Key", "k", terms.of_k, "quad"),
            _function(
                "bool", "is_visible", f"{inputs}, const QueryTerms<Real>& of_q, const KeyTerms<Real>& of_k", of_pair
            ),
            _function("bool", "is_visible", inputs, whole),
        )
    )


def _terms_text(name: str, position: str, terms: Sequence[Node], source: str) -> tuple[str, str]:
    """The structure of a position's terms, which a lane can receive from a quad or lane, and what evaluates them."""
    received = ", ".join(f"from_{source}(term{i}, {source})" for i in range(len(terms)))
    receives = (
        f"{_INDENT}__device__ __forceinline__ {name}Terms of_{source}(int {source}) const {{\n"
        f"{2 * _INDENT}return {{{received}}};\n{_INDENT}}}\n"
    )
    body = _Body(has_distance=position == DISTANCE)
    body.returns_all(terms)
    inputs = f"const Arguments& args, int32 b, int32 h, int32 {position}"
    function = _function(f"{name}Terms<Real>", f"{name.lower()}_terms", inputs, body)
    return _structure(f"{name}Terms", terms, receives), function


def _head_terms_text(terms: Sequence[Node]) -> tuple[str, str]:
    """The structure of a head's terms, and what evaluates them."""
    body = _Body()
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
    value, both = (_Body(has_real_distance=True, given=names) for _ in range(2))
    gradients, of_warp = _Body(), _Body()
    value.returns(result)
    both.assigns("slope", slope)
    both.returns(result)
    of_head = list(filter(_is_of_head, scatters))
    for scatter in itertools.filterfalse(_is_of_head, scatters):
        gradients.adds(scatter)
    for number, scatter in enumerate(of_head):
        gradients.adds_to(f"sums.sum{number}", scatter)
        of_warp.adds_sum(f"sums.sum{number}", scatter)
    members = "".join(f"{_INDENT}Real sum{number} = 0;\n" for number in range(len(of_head)))
    return "\n".join(
        (
            *_head_terms_text(terms.of_head),
            *_terms_text("Distance", DISTANCE, terms.of_distance, "lane"),
            _function("Real", "score_value", f"{inputs}, {given}", value),
            _function("Real", "score_value_and_slope", f"{inputs}, {given}, Real& slope", both),
            f"template <class Real>\nstruct ScoreHeadSums {{\n{members}}};\n",
            _function(
                "void", "add_argument_gradients", f"{inputs}, Real gradient, ScoreHeadSums<Real>& sums", gradients
            ),
            _function(
                "void",
                "add_head_sums",
                "const Arguments& args, int32 b, int32 h, int32 lane, const ScoreHeadSums<Real>& sums",
                of_warp,
            ),
        )
    )


def _is_of_head(scatter: Scatter) -> bool:
    """True if all scores of a head read the same element."""
    inputs = {node.value for node in reachable(scatter.indices) if node.op == "input"}
    return not scatter.axes and inputs <= {"b", "h"}


def _function(result: str, name: str, parameters: str, body: _Body) -> str:
    opening = f"template <class Real, class Arguments>\n__device__ __forceinline__ {result} {name}({parameters}) {{"
    return "\n".join((opening, *body.lines, "}\n"))


class _Body:
    """The statements of a function, each of which names one node. Those of `given` have names already.

    `has_real_distance` and `has_distance` tell what is a parameter of the function.
    """

    def __init__(
        self,
        has_real_distance: bool = False,
        has_distance: bool = False,
        given: Mapping[Node, str] = MappingProxyType({}),
    ) -> None:
        self.lines: list[str] = []
        self._given, self._names = given, dict(given)
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

    def adds_to(self, total: str, scatter: Scatter) -> None:
        """Adds `gradient` times a derivative to a variable."""
        self._define([scatter.derivative])
        self.lines.append(f"{_INDENT}{total} += {self._product(scatter, self._names)};")

    def adds_sum(self, total: str, scatter: Scatter) -> None:
        """Adds a variable of all lanes of a warp to an element of an argument's gradient."""
        self._define(scatter.indices)
        indices = self._indices(scatter, self._names)
        self.lines.append(f"{_INDENT}add_element_of_warp(args.gradient{scatter.argument}, {total}, lane{indices});")

    def _add(self, scatter: Scatter, names: Mapping[Node, str], indent: str) -> None:
        product, indices = self._product(scatter, names), self._indices(scatter, names)
        self.lines.append(f"{indent}add_element(args.gradient{scatter.argument}, {product}{indices});")

    def _product(self, scatter: Scatter, names: Mapping[Node, str]) -> str:
        return f"gradient * {self._name(scatter.derivative, names)}"

    def _indices(self, scatter: Scatter, names: Mapping[Node, str]) -> str:
        return "".join(f", {self._name(x, names)}" for x in scatter.indices)

    def _define(self, roots: Sequence[Node]) -> None:
        """Writes a statement for each node that has none yet, in the order of the expression.

        What a loop's index does not change is written before the loop.
        """
        nodes = reachable(roots, operands=self._written_operands)
        if not self._has_distance and any(node not in self._given and in_distance(node) for node in nodes):
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
        distance = self._in_distance(node)
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

    def _in_distance(self, node: Node) -> str | None:
        """The text of a node in terms of q - k, if it depends on nothing else."""
        in_real = in_real_distance(node) if self._has_real_distance else None
        return in_distance(node) if in_real is None else in_real

    def _written_operands(self, node: Node) -> tuple[Node, ...]:
        """The operands that occur in the text of a node."""
        return () if node in self._given or self._in_distance(node) is not None else node.operands

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
    if math.isnan(value):
        return "not_a_number<Real>()"
    if math.isinf(value):
        return "infinity<Real>()" if value > 0 else "(-infinity<Real>())"
    return f"Real({value!r})"
