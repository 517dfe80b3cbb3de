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

in kernels of second order also

    __device__ __forceinline__ Real score_curvature(args, score, b, h, q, k, real_distance, of_head, of_distance)

and a mask function

    template <class Real> struct QueryTerms; struct KeyTerms
    template <class Real, class Arguments>
    __device__ __forceinline__ QueryTerms<Real> query_terms(args, b, h, q)
    __device__ __forceinline__ KeyTerms<Real> key_terms(args, b, h, k)
    __device__ __forceinline__ bool is_visible(args, b, h, q, k, of_q, of_k)
    __device__ __forceinline__ bool is_visible(args, b, h, q, k)

The structures of terms hold what depends on q - k, on one position or on none (``terms.py``). Sums are gradients that a
lane has not yet added to memory: one sum for an element that all scores of a head read, and a run (``RunSum``) for the
element that the lane's last scores have read. An atomic addition for each score would round once for each, and wait for
all others at the same address. Real is the type of scores; ``real_distance`` is a ``RealDistance``.
``args`` has the arrays ``array0``, ``array1`` and so on, which ``element`` reads; ``gradient0`` and so on, to which
statements, ``add_element_of_warp`` and runs add; the constants ``kLength0`` and so on, lengths of last axes that loops
run over; and the constant ``kFast``, true for data of 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from .derivatives import Scatter
from .distances import REAL_DISTANCE, of_distance_alone
from .expressions import Node
from .linear import DISTANCE
from .statements import INDENT, TYPES, Statements, rounded_nodes
from .terms import Terms

__all__ = ["curvature_text", "mask_text", "score_text"]

_OF_HEAD = "const Arguments& args, int32 b, int32 h"
_OF_PAIR = f"{_OF_HEAD}, int32 q, int32 k"
_OF_SCORE = "const Arguments& args, Real score, int32 b, int32 h, int32 q, int32 k"
_WITH_TERMS = (
    f"{_OF_SCORE}, const RealDistance<Real>& {REAL_DISTANCE}, const ScoreHeadTerms<Real>& of_head, "
    "const DistanceTerms<Real>& of_distance"
)


def mask_text(result: Node, terms: Terms) -> str:
    """The device functions of a mask function."""
    names = {node: f"of_q.term{i}" for i, node in enumerate(terms.of_q)}
    names |= {node: f"of_k.term{i}" for i, node in enumerate(terms.of_k)}
    rounded = rounded_nodes(result)
    of_terms = f"{_OF_PAIR}, const QueryTerms<Real>& of_q, const KeyTerms<Real>& of_k"
    rows, columns = (f"{name}_terms<Real>(args, b, h, {position})" for name, position in (("query", "q"), ("key", "k")))
    return "\n".join(
        (
            *_terms_text("query", terms.of_q, rounded, "q", "quad"),
            *_terms_text("key", terms.of_k, rounded, "k", "quad"),
            _function("bool", "is_visible", of_terms, _returned(result, Statements(rounded, given=names))),
            _function(
                "bool", "is_visible", _OF_PAIR, [f"return is_visible<Real>(args, b, h, q, k, {rows}, {columns});"]
            ),
        )
    )


def score_text(result: Node, slope: Node | None, scatters: Sequence[Scatter], terms: Terms) -> str:
    """The device functions of a score function: its values, its derivative and the gradients of its arguments."""
    names = _names_of(terms)
    # Comparisons of derivatives alone choose between those of two sides: they decide nothing about values.
    rounded = rounded_nodes(result)
    value, both = (Statements(rounded, has_real_distance=True, given=names) for _ in range(2))
    both.lines.append(f"slope = {'0' if slope is None else both.values([slope])[0]};")
    return "\n".join(
        (
            *_terms_text("score_head", terms.of_head, rounded),
            *_terms_text("distance", terms.of_distance, rounded, DISTANCE, "lane"),
            _function("Real", "score_value", _WITH_TERMS, _returned(result, value)),
            _function("Real", "score_value_and_slope", f"{_WITH_TERMS}, Real& slope", _returned(result, both)),
            *_sums_text(scatters, rounded),
        )
    )


def curvature_text(result: Node, curvature: Node | None, terms: Terms) -> str:
    """The device function of the second derivative of a score function, after those of `score_text`."""
    statements = Statements(rounded_nodes(result), has_real_distance=True, given=_names_of(terms))
    lines = ["return 0;"] if curvature is None else _returned(curvature, statements)
    return _function("Real", "score_curvature", _WITH_TERMS, lines)


def _names_of(terms: Terms) -> dict[Node, str]:
    """The members of the terms of a score function, by what they hold."""
    names = {node: f"of_distance.term{i}" for i, node in enumerate(terms.of_distance)}
    return names | {node: f"of_head.term{i}" for i, node in enumerate(terms.of_head)}


def _sums_text(scatters: Sequence[Scatter], rounded: frozenset[Node]) -> tuple[str, ...]:
    """The structure of the sums of gradients, and what begins them, adds to them and adds them to memory."""
    beginning, gradients, ending = (Statements(rounded) for _ in range(3))
    members = []
    for number, scatter in enumerate(scatters):
        if scatter.axes:
            roots = [*scatter.indices, scatter.derivative]
            gradients.define(roots)
            gradients.lines.append("#pragma unroll 1")  # once for each element of a tile it would be much code
            with gradients.loop(scatter.axes) as loop:
                loop.define(roots)
                (part,) = loop.values([scatter.derivative])
                loop.lines.append(f"const Real part = gradient * {part};")
                loop.lines.append(f"atomicAdd({_element(scatter, loop)}, part);")
            continue
        (part,) = gradients.values([scatter.derivative])
        if all(node.inputs <= {"b", "h"} for node in scatter.indices):  # all scores of a head read the same element
            members.append(f"Real sum{number} = 0;")
            gradients.lines.append(f"sums.sum{number} += gradient * {part};")
            total = ", ".join((f"sums.sum{number}", "lane", *ending.values(scatter.indices)))
            ending.lines.append(f"add_element_of_warp(args.gradient{scatter.argument}, {total});")
            continue
        run = f"run{number}"
        members.append(f"RunSum<Real> {run};")
        if of_distance_alone(scatter.indices):  # the run of a tile's scores, if all their distances read one element
            begin = f"sums.{run}.begin(lowest, distances, lane, [&](int32 {DISTANCE}) {{"
            with beginning.block(begin, "});", has_distance=True) as block:
                block.lines.append(f"return {_element(scatter, block)};")
        with gradients.block(f"if (!sums.{run}.is_of_tile) {{") as block:
            block.lines.append(f"sums.{run}.move_to({_element(scatter, block)});")
        gradients.lines.append(f"sums.{run}.sum += gradient * {part};")
        ending.lines.append(f"sums.{run}.end(lane);")
    sums = "GradientSums<Real>& sums"
    return (
        _structure("GradientSums", members),
        _function(
            "void", "begin_sums", f"{_OF_HEAD}, int32 lowest, int32 distances, int32 lane, {sums}", beginning.lines
        ),
        _function("void", "add_argument_gradients", f"{_OF_SCORE}, Real gradient, {sums}", gradients.lines),
        _function("void", "end_sums", f"{_OF_HEAD}, int32 lane, const {sums}", ending.lines),
    )


def _element(scatter: Scatter, statements: Statements) -> str:
    """The address of an element of an argument's gradient."""
    return f"args.gradient{scatter.argument}.at({', '.join(statements.values(scatter.indices))})"


def _terms_text(
    name: str, terms: Sequence[Node], rounded: frozenset[Node], position: str = "", source: str = ""
) -> tuple[str, str]:
    """The structure of the terms of a position, and what evaluates them. A lane can receive them from a `source`."""
    structure = f"{name.title().replace('_', '')}Terms"
    members = [f"{TYPES[node.kind]} term{i};" for i, node in enumerate(terms)]
    if source:
        received = ", ".join(f"from_{source}(term{i}, {source})" for i in range(len(terms)))
        opening = f"__device__ __forceinline__ {structure} of_{source}(int {source}) const {{"
        members += [opening, f"{INDENT}return {{{received}}};", "}"]
    statements = Statements(rounded, has_distance=position == DISTANCE)
    parts = ", ".join(statements.values(terms))
    inputs = f"{_OF_HEAD}, int32 {position}" if position else _OF_HEAD
    evaluation = [*statements.lines, f"return {{{parts}}};"]
    return _structure(structure, members), _function(f"{structure}<Real>", f"{name}_terms", inputs, evaluation)


def _returned(result: Node, statements: Statements) -> list[str]:
    (value,) = statements.values([result])
    return [*statements.lines, f"return {value};"]


def _structure(name: str, members: Sequence[str]) -> str:
    return "\n".join(("template <class Real>", f"struct {name} {{", *(INDENT + x for x in members), "};\n"))


def _function(result: str, name: str, parameters: str, lines: Sequence[str]) -> str:
    opening = f"template <class Real, class Arguments>\n__device__ __forceinline__ {result} {name}({parameters}) {{"
    return "\n".join((opening, *(INDENT + line for line in lines), "}\n"))
