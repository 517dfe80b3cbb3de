"""What of a function depends on less than a pair of positions.

A fragment has many pairs of a query and a key, but few queries, few keys and few distances between them, and one head.
Kernels evaluate the terms of a mask function that depend on the query or on the key alone once for each row and column
(``kernels/common/mask_function.cuh``), those of a score function that depend on q - k alone once for each diagonal
(``kernels/common/distance_terms.cuh``), and those that depend on no position once (``HeadTerms``,
``kernels/common/score_mod.cuh``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .distances import of_distance_alone
from .expressions import Node, reachable
from .linear import DISTANCE
from .primitives import PRIMITIVES

__all__ = ["Terms", "costly_parts_of", "position_terms_of", "score_terms_of"]

#: The most terms of a position or distance: a lane holds those of several in registers.
_MOST = 4
_POSITIONS = frozenset(("q", "k"))


class Terms(NamedTuple):
    """The terms of an expression.

    Attributes
    ----------
    of_q, of_k : tuple of Node
        They depend on the query but not on the key, and on the key but not on the query.
    of_distance : tuple of Node
        They depend on q - k.
    of_head : tuple of Node
        They depend on b and h at most.
    """

    of_q: tuple[Node, ...] = ()
    of_k: tuple[Node, ...] = ()
    of_distance: tuple[Node, ...] = ()
    of_head: tuple[Node, ...] = ()

    def besides(self, *results: Node) -> list[Node]:
        """The nodes of expressions that are no terms, nor parts of terms alone."""
        terms = set().union(*self)
        nodes = reachable(results, operands=lambda node: () if node in terms else node.operands)
        return [node for node in nodes if node not in terms]


def position_terms_of(result: Node) -> Terms:
    """The costly parts of an expression for one position, none if a position has too many for registers."""
    found = costly_parts_of(result)
    return found if max(map(len, found)) <= _MOST else Terms()


def costly_parts_of(result: Node) -> Terms:
    """The largest parts of an expression that depend on one position and cost more than an addition of ints."""
    costly: set[Node] = set()
    for node in reachable([result]):
        if node.moves and (_costs(node) or not costly.isdisjoint(node.operands)):
            costly.add(node)

    def is_term(node: Node) -> bool:
        return node in costly and len(node.inputs & _POSITIONS) == 1 and not node.varies

    def below(node: Node) -> tuple[Node, ...]:
        return () if is_term(node) or node.distance else node.operands

    found: dict[str, list[Node]] = {"q": [], "k": []}
    for node in reachable([result], operands=below):
        if is_term(node):
            (position,) = node.inputs & _POSITIONS
            found[position].append(node)
    return Terms(tuple(found["q"]), tuple(found["k"]))


def score_terms_of(roots: Sequence[Node]) -> Terms:
    """The largest parts of expressions that depend on q - k or on no position.

    They cost more than an addition of ints.
    """
    costly: set[Node] = set()
    for node in reachable(roots):
        if node.distance or not of_distance_alone([node]):
            continue
        is_distance = DISTANCE in node.depends
        if _costs(node) or any(x in costly and (DISTANCE in x.depends) == is_distance for x in node.operands):
            costly.add(node)

    def is_term(node: Node) -> bool:
        return node in costly and not node.varies

    nodes = reachable(roots, operands=lambda node: () if is_term(node) else node.operands)
    found: tuple[list[Node], list[Node]] = ([], [])
    for node in filter(is_term, nodes):
        found[DISTANCE in node.depends].append(node)
    of_head, of_distance = (tuple(terms) if len(terms) <= _MOST else () for terms in found)
    return Terms(of_distance=of_distance, of_head=of_head)


def _costs(node: Node) -> bool:
    """True for what reads memory, is a loop, or takes several instructions."""
    return node.op in ("element", "sum") or (node.op in PRIMITIVES and PRIMITIVES[node.op].rule in ("real", "whole"))
