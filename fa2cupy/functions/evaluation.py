"""Values and derivatives of programs on NumPy and CuPy arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from .derivatives import Scatter
from .expressions import BOOL, FLOAT, INT, Node, reachable
from .primitives import PRIMITIVES, truncated
from .tracing import Program

__all__ = ["Evaluation", "GradientPart", "add_elements", "reduced"]

#: For programs of up to so many nodes, all values of a tile are kept for the derivatives.
_MANY = 1000


class GradientPart(NamedTuple):
    """Derivatives of scores by elements of an argument, for a tile of scores.

    Attributes
    ----------
    argument : int
    indices : tuple of ndarray
        The elements, broadcastable to the tile.
    derivative : ndarray
        Broadcastable to the tile.
    """

    argument: int
    indices: tuple[Any, ...]
    derivative: Any


class Evaluation:
    """A program on a tile of scores. What value and derivatives have in common is computed once.

    Parameters
    ----------
    program : Program
    arguments : sequence of ndarray
        The arrays of the function.
    dtype : dtype
        Dtype of floats.
    xp : module
        ``numpy`` or ``cupy``.
    **inputs : ndarray
        The score and the positions b, h, q and k, broadcastable to the tile.

    Raises
    ------
    IndexError
        The function reads outside an array of NumPy. On CuPy arrays indices are clamped.
    """

    def __init__(self, program: Program, arguments: Sequence[Any], dtype: Any, xp: ModuleType, **inputs: Any):
        self._program, self._arguments, self._xp = program, arguments, xp
        self._dtypes = {BOOL: np.dtype(bool), INT: np.dtype("int32"), FLOAT: np.dtype(dtype)}
        self._inputs = inputs
        self._values: dict[Node, Any] = {}

    def result(self) -> Any:
        """The score or the truth value, broadcastable to the tile."""
        return self.value(self._program.result)

    def slope(self) -> Any:
        """The derivative of the score, broadcastable to the tile."""
        return self._value_or_zero(self._program.slope)

    def curvature(self) -> Any:
        """The second derivative of the score, broadcastable to the tile."""
        return self._value_or_zero(self._program.curvature)

    def _value_or_zero(self, node: Node | None) -> Any:
        return self._xp.asarray(0, self._dtypes[FLOAT]) if node is None else self.value(node)

    def gradient_parts(self) -> Iterator[GradientPart]:
        """The derivatives by the elements that the function reads of floating-point arguments."""
        for scatter in self._program.scatters:
            yield from self._parts_of(scatter)

    def value(self, node: Node) -> Any:
        """The value of a node, broadcastable to the tile."""
        self._define([node], frees=len(self._program.graph) > _MANY)
        return self._values[node]

    def _parts_of(self, scatter: Scatter) -> Iterator[GradientPart]:
        roots = [*scatter.indices, scatter.derivative]
        self._define(roots)
        for values in self._steps(scatter.axes, roots) if scatter.axes else (self._values,):
            *indices, derivative = (values[node] for node in roots)
            bounded = self._within(self._arguments[scatter.argument], scatter.argument, indices, None)
            yield GradientPart(scatter.argument, bounded, derivative)

    def _operands(self, node: Node) -> tuple[Node, ...]:
        """The nodes that `_result_of` needs."""
        return node.operands

    def _result_of(self, node: Node) -> Any:
        return self._sum(node) if node.op == "sum" else self._computed(node, self._values)

    def _define(self, roots: Sequence[Node], frees: bool = False) -> None:
        """Computes what is not known yet. With `frees`, values are dropped after the last of their uses in it."""
        nodes = reachable(roots, operands=lambda node: () if node in self._values else self._operands(node))
        uses = Counter(x for node in nodes for x in self._operands(node)) if frees else Counter()
        uses.update(roots)
        for node in nodes:
            if node in self._values or node.varies:
                continue
            self._values[node] = self._result_of(node)
            for x in self._operands(node) if frees else ():
                uses[x] -= 1
                if not uses[x]:
                    self._values.pop(x, None)  # the index of a loop has none

    def _sum(self, node: Node) -> Any:
        (term,) = node.operands
        assert isinstance(node.value, tuple)
        total = self._xp.asarray(0, self._dtypes[node.kind])
        for values in self._steps(node.value, [term]):
            total = total + values[term]
        return total

    def _steps(self, axes: tuple[int, ...], roots: Sequence[Node]) -> Iterator[Mapping[Node, Any]]:
        """The values of all nodes, for each index of a loop."""
        nodes = reachable(roots, operands=lambda node: node.operands if node.varies else ())
        for index in range(self._arguments[axes[0]].shape[-1]):
            values = {node: self._values[node] for node in nodes if not node.varies}
            for node in nodes:
                if node.op == "position":
                    values[node] = self._xp.asarray(index, self._dtypes[INT])
                elif node.varies:
                    values[node] = self._computed(node, values)
            yield values

    def _computed(self, node: Node, values: Mapping[Node, Any]) -> Any:
        dtype = self._dtypes[node.kind]
        if node.op == "constant":
            return self._xp.asarray(node.value, dtype)
        if node.op == "input":
            assert isinstance(node.value, str)
            return self._xp.asarray(self._inputs[node.value], dtype)
        operands = [values[x] for x in node.operands]
        if node.op == "element":
            assert isinstance(node.value, int)
            array = self._arguments[node.value]
            place = self._program.graph.places[node]
            return array[self._within(array, node.value, operands, place)].astype(dtype, copy=False)
        if node.op == "as_int" and node.operands[0].kind == FLOAT:
            return truncated(operands[0], self._xp)
        if node.op in ("as_bool", "as_int", "as_float"):
            return operands[0].astype(dtype)
        return getattr(self._xp, PRIMITIVES[node.op].function)(*operands)

    def _within(self, array: Any, argument: int, indices: Sequence[Any], place: str | None) -> tuple[Any, ...]:
        """Indices, checked on NumPy and clamped on CuPy. `place` is None if they have been checked."""
        if self._xp is not np:
            return tuple(
                self._xp.clip(index, 0, length - 1) for index, length in zip(indices, array.shape, strict=True)
            )
        for axis, (index, length) in enumerate(zip(indices, array.shape, strict=True)):
            if place is not None and np.size(index) and not (np.min(index) >= 0 and np.max(index) < length):
                bad = np.min(index) if np.min(index) < 0 else np.max(index)
                name = f"{self._program.arguments_name}[{argument}]"
                raise IndexError(f"{name}: index {bad} is outside of axis {axis} of shape {array.shape} ({place})")
        return tuple(indices)


def reduced(tile: Any, indices: Sequence[Any]) -> Any:
    """A tile, summed along the axes along which indices do not vary."""
    axes = tuple(
        axis for axis in range(-tile.ndim, 0) if all(index.ndim < -axis or index.shape[axis] == 1 for index in indices)
    )
    return tile.sum(axis=axes, keepdims=True)


def add_elements(total: Any, indices: tuple[Any, ...], tile: Any, xp: ModuleType) -> None:
    """Adds a tile, which has been reduced, to the elements of an array at indices."""
    if not indices:
        total[...] += tile.sum()
        return
    shape = np.broadcast_shapes(tile.shape, *(index.shape for index in indices))
    indices, tile = tuple(xp.broadcast_to(index, shape) for index in indices), xp.broadcast_to(tile, shape)
    if xp is np:  # np.add.at takes several times as long
        places = np.ravel_multi_index(indices, total.shape).ravel()
        total += np.bincount(places, tile.ravel(), total.size).reshape(total.shape).astype(total.dtype, copy=False)
    else:
        xp.add.at(total, indices, tile)
