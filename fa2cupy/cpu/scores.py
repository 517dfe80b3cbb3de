"""Features on a tile of scores on NumPy, between the two matrix products.

Tiles have a matrix for each K/V head, with a row for each (position, head of the group) and a column for each key. The
formulas are at the top of ``problem/features.py``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..functions.evaluation import add_elements, reduced
from ..functions.tracing import Program
from ..problem import philox
from ..problem.attention import AttentionProblem
from ..problem.block_mask import EMPTY, FULL
from ..problem.features import ARRAYS, feature_arrays
from ..problem.sequences import Sequence
from ..problem.strides import with_score_axes
from .diagonals import DiagonalPart, TileEvaluation, diagonal_sums, distances, spread
from .threads import in_threads

__all__ = ["NO_SLOPES", "BiasGradient", "HeadTerms", "ScoreTerms", "Slopes", "by_group"]


class Slopes(NamedTuple):
    """The derivatives of a tile's scores by the scaled products.

    Attributes
    ----------
    cap : ndarray or None
        The derivative of the soft cap by its input; None if it is 1.
    bend : ndarray or None
        The second derivative; None if it is 0 or has not been asked for.
    mod : TileEvaluation or None
        The caller's `score_mod`, with its derivatives by the products and by elements of its arrays.
    shape : tuple of int
        K/V heads, positions, heads of the group and keys of the tile.
    """

    cap: np.ndarray | None = None
    bend: np.ndarray | None = None
    mod: TileEvaluation | None = None
    shape: tuple[int, ...] = ()

    def apply(self, ds: np.ndarray, p: np.ndarray, sums: Mapping[str, np.ndarray]) -> None:
        """Turns the gradient of the scores into that of the products, in place; adds those of arrays to their sums.

        A function may have no finite derivative for hidden keys: dS stays 0 where P is 0.
        """
        if self.cap is not None:
            ds *= self.cap
        if self.mod is None:
            return
        tile, is_hidden = ds.reshape(self.shape), p.reshape(self.shape) == 0
        for part in self.mod.gradient_parts() if sums else ():
            product = tile * part.derivative
            np.copyto(product, 0, where=is_hidden)
            if isinstance(part, DiagonalPart):
                product = diagonal_sums(product)
            add_elements(sums[f"dscore_args[{part.argument}]"], part.indices, reduced(product, part.indices), np)
        slope = self.mod.slope()
        if slope.ndim or slope != 1:
            np.multiply(tile, slope, out=tile, where=~is_hidden)

    def by_products(self, p: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
        """First and second derivatives, 0 where P is 0; None if they are 1 and 0."""
        if self.mod is None:
            return self.cap, self.bend
        is_hidden = p.reshape(self.shape) == 0
        slope, curvature = (
            np.where(is_hidden, 0, x).reshape(p.shape) for x in (self.mod.slope(), self.mod.curvature())
        )
        if self.cap is None:
            return slope, curvature
        return self.cap * slope, self.bend * slope**2 + self.cap * curvature


NO_SLOPES = Slopes()


def by_group(heads: np.ndarray, size: int) -> np.ndarray:
    """A view (K/V head, position, head of the group, column) of an array (query head, position, column)."""
    return heads.reshape(len(heads) // max(1, size), size, *heads.shape[1:]).swapaxes(1, 2)


class ScoreTerms:
    """The features of a call, with their arrays as views of all scores: broadcast axes have stride 0.

    Parameters
    ----------
    problem : AttentionProblem
    keywords : mapping
        Keywords of features, checked.
    """

    def __init__(self, problem: AttentionProblem, keywords: Mapping[str, object]):
        shape = problem.broadcast_shape
        self.arguments: Mapping[str, Any] = {
            name: keywords.get(name.replace("mod", "args"), ()) for name in ("score_mod", "mask_mod")
        }
        self.block_mask: Any = keywords.get("block_mask")
        self.settings = problem.settings
        self.heads_per_group = problem.heads_per_group
        self.arrays = {
            name: np.broadcast_to(with_score_axes(name, array), shape)
            for name, array in feature_arrays(keywords).items()
            if ARRAYS[name].axes is not None
        }
        self.sink: Any = keywords.get("sink")


class HeadTerms:
    """The features of the query heads `group` of one sequence: those that share some K/V heads."""

    def __init__(self, terms: ScoreTerms, sequence: Sequence, group: slice):
        self.settings = terms.settings
        self.sequence = sequence
        self.group = group
        self.size = terms.heads_per_group
        # Of the axes (K/V head, position, head of the group).
        self.sink = None if terms.sink is None else by_group(terms.sink[group][:, None], self.size)
        self._arguments = terms.arguments
        self._block_mask = terms.block_mask
        self._states = None if terms.block_mask is None else terms.block_mask.part(sequence.number, group)
        place: Any = (*sequence.place, group)
        self._arrays = {name: by_group(array[place], self.size) for name, array in terms.arrays.items()}

    def apply(self, s: np.ndarray, queries: slice, keys: slice, is_curved: bool = False) -> Slopes:
        """Applies features to a tile of scaled products, in place; returns the derivatives of the scores by them.

        The second ones are among them if `is_curved`.
        """
        slope = bend = mod = None
        if self.settings.score_mod is not None:
            products = self.split(s).copy()  # s changes below
            mod = self._evaluation(self.settings.score_mod.program, queries, keys, s.dtype, score=products)
            s.reshape(products.shape)[...] = mod.result()
        if self.settings.softcap is not None:
            cap = np.asarray(self.settings.softcap, s.dtype)
            tanh = np.tanh(np.divide(s, cap, out=s), out=s)
            slope = 1 - tanh * tanh
            bend = -2 / cap * tanh * slope if is_curved else None
            s *= cap
        positions = self.positions(queries)
        tile = self.split(s)
        arrays = {name: array[:, positions, :, keys] for name, array in self._arrays.items()}
        if "alibi_slopes" in arrays:
            distance = abs(distances(positions, keys) + self.sequence.diagonal).astype(s.dtype)
            tile -= spread(arrays["alibi_slopes"][:, :1, :, :1] * distance, s.shape[2])
        if "bias" in arrays:
            tile += arrays["bias"].astype(s.dtype, copy=False)
        for name in ("mask", "key_padding_mask"):
            if name in arrays:
                np.copyto(tile, -np.inf, where=~arrays[name])
        self._apply_function_and_map(tile, queries, keys)
        return Slopes(slope, bend, mod, tile.shape)

    def _apply_function_and_map(self, tile: np.ndarray, queries: slice, keys: slice) -> None:
        """Hides what `mask_mod` and `block_mask` hide. The function is not evaluated where all tiles are full."""
        is_full = False
        if self._block_mask is not None:
            rows, columns = self._tile_numbers(queries, keys)
            states = self._states_of(queries, keys)
            is_full = self._block_mask.program is not None and states.min() == FULL
            if states.min() == EMPTY:
                hidden = (states == EMPTY)[:, rows - rows[0]][..., columns - columns[0]]
                np.copyto(tile, -np.inf, where=by_group(hidden, self.size))
        if self.settings.mask_mod is not None and not is_full:
            visible = self._evaluation(self.settings.mask_mod.program, queries, keys, tile.dtype).result()
            np.copyto(tile, -np.inf, where=~visible)

    def has_visible_tiles(self, queries: slice, keys: slice) -> bool:
        """False if all tiles of the map are empty there, for all heads of the group."""
        return self._states is None or bool(self._states_of(queries, keys).any())

    def _states_of(self, queries: slice, keys: slice) -> np.ndarray:
        """The states of the map's tiles that a tile meets: (head of the group, row of tiles, column)."""
        assert self._states is not None
        rows, columns = self._tile_numbers(queries, keys)
        return self._states[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]

    def _tile_numbers(self, queries: slice, keys: slice) -> tuple[np.ndarray, np.ndarray]:
        """The map's row of tiles of each position of a tile, and its column of each key."""
        positions = self.positions(queries)
        height, width = self._block_mask.tile
        return np.arange(positions.start, positions.stop) // height, np.arange(keys.start, keys.stop) // width

    def _evaluation(
        self, program: Program, queries: slice, keys: slice, dtype: np.dtype, **inputs: np.ndarray
    ) -> TileEvaluation:
        """A function on a tile of the axes of `split`."""
        return TileEvaluation(
            program,
            self._arguments[program.role],
            dtype,
            self.positions(queries),
            keys,
            b=self.sequence.number,
            h=np.arange(self.group.start, self.group.stop).reshape(-1, 1, self.size, 1),
            **inputs,
        )

    def keep(self, queries: slice, keys: slice, dtype: np.dtype) -> np.ndarray | None:
        """Factors of dropout for a tile of P: 0 or the inverse of the probability of being kept. None: no dropout."""
        probability = self.settings.dropout_p
        if not probability:
            return None
        heads, rows = (
            slice(first + part.start, first + part.stop)
            for first, part in zip(self.settings.dropout_origin, (self.group, self.positions(queries)), strict=True)
        )
        drawn = philox.kept(probability, self.settings.seed, self.sequence.number, heads, rows, keys)
        kept = by_group(drawn, self.size).reshape(-1, drawn.shape[1] * self.size, drawn.shape[2])
        return kept * np.asarray(philox.dropout_scale(probability), dtype)

    def split(self, tile: np.ndarray) -> np.ndarray:
        """A view (K/V head, position, head of the group, key) of a tile of scores."""
        return tile.reshape(len(tile), tile.shape[1] // max(1, self.size), self.size, tile.shape[2])

    def positions(self, queries: slice) -> slice:
        """The positions of a tile's rows."""
        return slice(queries.start // self.size, queries.stop // self.size)


class BiasGradient:
    """Sums tiles of dS into arrays of the bias's shape, so that dS is never held for all scores.

    Parameters
    ----------
    shape : tuple of int
        Shape of the bias.
    dtype : dtype
        Dtype of sums.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str):
        self._shape, self._dtype = (1,) * (4 - len(shape)) + shape, dtype
        # By place along the leading axes, first head and end of the heads, arrays of the axes (head, query, key). How
        # many heads are together depends on the length of the sequence.
        self._parts: dict[tuple[int, ...], np.ndarray] = {}

    def add(self, ds: np.ndarray, terms: HeadTerms, queries: slice, keys: slice) -> None:
        """Adds a tile of dS of one head."""
        split = terms.split(ds).swapaxes(1, 2)
        tile = split.reshape(-1, *split.shape[2:])
        *leading, heads, num_rows, num_columns = self._shape
        repeated = [length == 1 for length in (heads, num_rows, num_columns)]
        if any(repeated):
            tile = tile.sum(axis=tuple(axis for axis in range(3) if repeated[axis]), keepdims=True)
        index = (*terms.sequence.place[len(terms.sequence.place) - len(leading) :], terms.group.start)
        place = tuple(0 if length == 1 else i for length, i in zip((*leading, heads), index, strict=True))
        place = (*place, place[-1] + len(tile))
        if place not in self._parts:
            self._parts[place] = np.zeros((len(tile), num_rows, num_columns), self._dtype)
        rows, columns = (
            slice(0, 1) if once else part
            for once, part in zip(repeated[1:], (terms.positions(queries), keys), strict=True)
        )
        self._parts[place][:, rows, columns] += tile

    @staticmethod
    def store(sums: Collection[BiasGradient], dbias: np.ndarray) -> None:
        """Writes the sum of several, in their order."""
        whole = dbias[(None,) * (4 - dbias.ndim)]
        together = math.gcd(*(end for one in sums for place in one._parts for end in place[-2:]))
        by_place: dict[tuple[int, ...], list[np.ndarray]] = {}
        for one in sums:
            for (*leading, start, stop), part in one._parts.items():
                for head in range(start, stop, together):
                    own = part[head - start : head - start + together]
                    by_place.setdefault((*leading, head), []).append(own)

        def write(place: tuple[int, ...]) -> None:
            *leading, head = place
            index: Any = (*leading, slice(head, head + together))
            whole[index] = functools.reduce(np.add, by_place[place])

        if together * len(by_place) < math.prod(whole.shape[:-2]):
            whole[...] = 0  # some heads have no tile
        in_threads(write, list(by_place), whole.size)
