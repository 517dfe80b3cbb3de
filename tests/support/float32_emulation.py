"""The arithmetic of `precision="split"` in NumPy, for sequences that are too long for the interpreter.

float32 matrices are two float16 parts, and products are added as Hopper's tensor cores add them. Matrices are those of
one head. Some query rows, or some keys, are computed against the whole other side.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from ptxsim.tensor_core_sums import HOPPER, add_products
from support.float32_parts import in_parts, units_of

__all__ = ["Head", "is_exception"]

_UNIT_ROWS = 64  # rows that share a unit; also those of a chunk of sums over rows
_STEP = 16  # columns or rows of an instruction
_PANEL, _WIDE = 64, 128  # columns of a panel, and of the widest rows that are not read in panels
_SPREAD, _LARGEST_TERM, _LARGEST_POWER = 12, 32.0, 50  # limits beyond which a head is an exception
_P_SCALE = np.float32(2**14)


class _Parts(NamedTuple):
    """x = unit * (parts[0] + parts[1]), with the float16 numbers of the parts as float32; a unit for each row."""

    unit: np.ndarray
    parts: tuple[np.ndarray, np.ndarray]

    def of(self, rows: slice) -> _Parts:
        return _Parts(self.unit[rows], (self.parts[0][rows], self.parts[1][rows]))


def _in_parts(scaled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    high, low = in_parts(scaled)
    return high.astype(np.float32), low.astype(np.float32)


def _exponent(x: np.ndarray) -> np.ndarray:
    """Returns the exponents of x; those of zeros are below all others."""
    return np.where(x == 0, -1000, np.frexp(x)[1] - 1)


def _split(x: np.ndarray) -> _Parts:
    """Splits x, with rows filled up with zeros to whole blocks and columns to whole steps."""
    rows, columns = x.shape
    x = np.pad(x, ((0, -rows % (2 * _UNIT_ROWS)), (0, -columns % _STEP)))
    blocks = x.reshape(-1, _UNIT_ROWS, x.shape[1])
    unit = np.repeat(units_of(abs(blocks).max(axis=(1, 2))), _UNIT_ROWS)
    return _Parts(unit, _in_parts(x / unit[:, None]))


def is_exception(head: Head) -> bool:
    """Returns True if the kernels leave the head to IEEE arithmetic."""
    for x in (head.q, head.k, head.v, head.do):
        for first in range(0, len(x), _UNIT_ROWS):
            block = abs(x[first : first + _UNIT_ROWS])
            largest = _exponent(block.max())
            if largest == -1000:
                continue
            lines = np.concatenate([block.max(axis=0), block.max(axis=1)])
            small = (lines != 0) & (_exponent(lines) + _SPREAD < largest)
            if small.any() or abs(largest) > _LARGEST_POWER:
                return True
    terms = abs(head.q).max(axis=0) * abs(head.k).max(axis=0) * head.scale
    return bool(terms.max() > _LARGEST_TERM)


def _low_first(parts: tuple, other: tuple) -> tuple:
    """Returns the pairs of parts to multiply, in the order of the instructions."""
    return ((parts[1], other[0]), (parts[0], other[1]), (parts[0], other[0]))


def _columns(left: np.ndarray, right: np.ndarray, steps: Iterable[int], total: np.ndarray) -> np.ndarray:
    for step in steps:
        at = slice(step * _STEP, (step + 1) * _STEP)
        total = add_products(HOPPER, total, left[:, at], right[:, at])
    return total


def _chains_of_scores(columns: int) -> list[range]:
    """Returns the steps of each chain of Q K^T: one chain, halves, or panels."""
    num_steps = columns // _STEP
    if columns > _WIDE:
        return _chains_of_dp(columns)
    first = -(-num_steps // 2) if columns > _PANEL else num_steps
    return [range(first), range(first, num_steps)][: 1 + (first < num_steps)]


def _chains_of_dp(columns: int) -> list[range]:
    """Returns the steps of each chain of dO V^T: one chain, or panels."""
    length = (_PANEL if columns > _WIDE else columns) // _STEP
    return [range(first, min(first + length, columns // _STEP)) for first in range(0, columns // _STEP, length)]


def _in_chains(queries: _Parts, keys: _Parts) -> np.ndarray:
    """Returns Q K^T without units."""
    totals = []
    for steps in _chains_of_scores(queries.parts[0].shape[1]):
        total = np.zeros((len(queries.unit), len(keys.unit)), np.float32)
        for left, right in _low_first(queries.parts, keys.parts):
            total = _columns(left, right, steps, total)
        totals.append(total)
    return sum(totals[1:], totals[0])


def _from_start(douts: _Parts, values: _Parts, start: np.ndarray) -> np.ndarray:
    """Returns dO V^T without units, added to `start`.

    The sum is brought back towards `start` for each further chain. Half of a chain's products of high parts come first,
    and half last.
    """
    small_1, small_2, large = _low_first(douts.parts, values.parts)
    total = start
    for chain, steps in enumerate(_chains_of_dp(douts.parts[0].shape[1])):
        half = len(steps) // 2
        if chain:
            total = (total.astype(np.float64) + 2.0 * start).astype(np.float32)
        total = _columns(*large, steps[:half], total)
        for pair in (small_1, small_2):
            total = _columns(*pair, steps, total)
        total = _columns(*large, steps[half:], total)
    return total


def _add_product(total: np.ndarray, weights: tuple, rows: _Parts, factor: np.ndarray | np.float32) -> np.ndarray:
    """Returns total + factor * weights rows; the sum of each chunk of rows starts from zero."""
    for first in range(0, len(rows.unit), _UNIT_ROWS):
        chunk, part = slice(first, first + _UNIT_ROWS), np.zeros_like(total)
        for left, right in _low_first(weights, rows.parts):
            part = _columns(left[:, chunk], right[chunk].T, range(_UNIT_ROWS // _STEP), part)
        total = (part.astype(np.float64) * (factor * rows.unit[first]) + total).astype(np.float32)
    return total


def _row_scale(x: np.ndarray) -> np.ndarray:
    """Returns the powers of two that bring the largest magnitude of each row into [2^13, 2^14)."""
    largest = abs(x).max(axis=1, keepdims=True)
    return np.ldexp(np.float32(1), 13 - np.maximum(_exponent(largest), 14 - 127))


def _exp(x: np.ndarray) -> np.ndarray:
    """Returns exponentials, rounded once: those of NumPy in float32 have errors that depend on the CPU."""
    return np.exp2((x * np.float32(np.log2(np.e))).astype(np.float64)).astype(np.float32)


def _filled(x: np.ndarray, number: int, value: float) -> np.ndarray:
    """Returns x as a column of `number` elements, filled up with `value`."""
    return np.pad(x, (0, number - len(x)), constant_values=np.float32(value))[:, None]


class Head:
    """The float32 matrices of a head, of shape (seqlen, head_dim), and the results that kernels compute from them.

    Rows and keys are slices that begin at a multiple of 64. Their ends may lie beyond the sequence.
    """

    def __init__(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, do: np.ndarray, *, causal: bool):
        self.q, self.k, self.v, self.do, self.causal = q, k, v, do, causal
        self.scale = np.float32(q.shape[1] ** -0.5)
        self._q, self._k, self._v, self._do = map(_split, (q, k, v, do))
        self._tile = 128 if q.shape[1] <= 64 else 64  # keys of a step of the forward, and of dQ

    def forward(self, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """Returns o and lse of query rows."""
        number = rows.stop - rows.start
        highest = np.full((number, 1), -np.inf, np.float32)
        total, o = np.zeros_like(highest), np.zeros((number, self._v.parts[0].shape[1]), np.float32)
        for first in range(len(self._k.unit) - self._tile, -1, -self._tile):
            keys = slice(first, first + self._tile)
            scores = self._scores(rows, keys)
            new = np.maximum(highest, scores.max(axis=1, keepdims=True))
            shift = np.where(np.isinf(new), np.float32(0), new)
            rescale, p = _exp(highest - shift), _exp(scores - shift)
            highest, total = new, total * rescale + p.sum(axis=1, keepdims=True)
            o = _add_product(o * rescale, _in_parts(p * _P_SCALE), self._v.of(keys), 1 / _P_SCALE)
        own = slice(0, len(self.q[rows]))
        return (o / total)[own, : self.v.shape[1]], (highest + np.log(total))[own, 0]

    def of_queries(self, rows: slice, lse: np.ndarray, delta: np.ndarray) -> np.ndarray:
        """Returns dq of query rows, from lse and delta of all queries."""
        number, columns = rows.stop - rows.start, self._k.parts[0].shape[1]
        shares = np.zeros((2, number, columns), np.float32)  # of two warp groups that take turns, beyond 128 columns
        for turn, first in enumerate(range(len(self._k.unit) - self._tile, -1, -self._tile)):
            keys, share = slice(first, first + self._tile), turn % 2 if columns > _WIDE else 0
            p, dp = self._factors_of_ds(rows, keys, lse, delta)
            scale = _row_scale(p * dp)
            shares[share] = _add_product(shares[share], _in_parts(p * dp * scale), self._k.of(keys), 1 / scale)
        return shares.sum(axis=0)[: len(self.q[rows]), : self.q.shape[1]] * self.scale

    def of_keys(self, keys: slice, lse: np.ndarray, delta: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns dk and dv of keys, from lse and delta of all queries."""
        dk = np.zeros((keys.stop - keys.start, self._k.parts[0].shape[1]), np.float32)
        dv = dk.copy()
        for first in range(0, len(self._q.unit), _UNIT_ROWS):
            rows = slice(first, first + _UNIT_ROWS)
            p, dp = (x.T for x in self._factors_of_ds(rows, keys, lse, delta))
            high, low = _in_parts(p * _P_SCALE)
            dv = _add_product(dv, (high, low), self._do.of(rows), 1 / _P_SCALE)
            # With two panels, registers do not keep P beside its parts, whose sum has 22 bits.
            ds = dp * ((high + low) / _P_SCALE if _PANEL < self.q.shape[1] <= _WIDE else p)
            scale = _row_scale(ds)
            dk = _add_product(dk, _in_parts(ds * scale), self._q.of(rows), 1 / scale)
        own, columns = slice(0, len(self.k[keys])), slice(0, self.q.shape[1])
        return dk[own, columns] * self.scale, dv[own, columns]

    def _scores(self, rows: slice, keys: slice) -> np.ndarray:
        q, k = self._q.of(rows), self._k.of(keys)
        unit = q.unit[:, None] * k.unit * self.scale
        scores = _in_chains(q, k) * unit
        query, key = np.arange(rows.start, rows.stop)[:, None], np.arange(keys.start, keys.stop)
        hidden = key >= len(self.k)
        if self.causal:
            hidden = hidden | (key > query + len(self.k) - len(self.q))
        return np.where(hidden, np.float32(-np.inf), scores)

    def _factors_of_ds(
        self, rows: slice, keys: slice, lse: np.ndarray, delta: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns P and dP - delta, whose product is dS."""
        number = rows.stop - rows.start
        lse, delta = _filled(lse[rows], number, np.inf), _filled(delta[rows], number, 0)
        p = _exp(self._scores(rows, keys) - lse)
        do, v = self._do.of(rows), self._v.of(keys)
        unit = do.unit[:, None] * v.unit
        chains = len(_chains_of_dp(v.parts[0].shape[1]))
        start = delta * np.float32(-0.5 / chains) / unit
        start = np.where(abs(start) < 2.0**100, start, np.float32(0))
        rest = (start.astype(np.float64) * ((2 * chains - 1) * unit) + delta).astype(np.float32)
        dp = _from_start(do, v, start)
        return p, (dp.astype(np.float64) * unit - rest).astype(np.float32)
