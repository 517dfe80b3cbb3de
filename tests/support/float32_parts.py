"""float32 matrices as scaled pairs of float16 matrices, in the order of kernels/float32_parts/parts.cuh."""

from __future__ import annotations

import numpy as np

from fa2cupy.jit.spec import KernelSpec

__all__ = ["columns_of_part", "in_parts", "joined_parts", "split_parts", "units_of"]

_ROWS, _COLUMNS, _CHUNK = 64, 64, 8  # rows of a unit, columns of a panel, elements of 16 bytes


def units_of(largest: np.ndarray) -> np.ndarray:
    """Returns the units of blocks with these largest magnitudes."""
    return np.where(largest > 0, np.ldexp(1.0, np.frexp(largest)[1] - 14), 1.0).astype(np.float32)


def in_parts(scaled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the high and the low parts of matrices that are divided by their units."""
    high = scaled.astype(np.float16)
    return high, (scaled - high).astype(np.float16)


def columns_of_part(spec: KernelSpec, columns: int) -> int:
    """Returns the columns of each part of an operand with so many columns, in the memory of this kernel."""
    if spec.operation in ("forward", "split_inputs") and 2 * max(spec.head_dim, spec.head_dim_v or 0) <= _COLUMNS:
        return _COLUMNS // 2  # both share a panel
    return -(-columns // _COLUMNS) * _COLUMNS


def split_parts(x: np.ndarray, num_blocks: int, of_part: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the parts and units of x (batch, row, head, column), padded with zeros to whole parts and row blocks."""
    batch, rows, heads, columns = x.shape
    padded = np.zeros((batch * heads, num_blocks * _ROWS, of_part), np.float32)
    padded[:, :rows, :columns] = x.swapaxes(1, 2).reshape(-1, rows, columns)
    units = units_of(abs(padded.reshape(batch * heads, num_blocks, -1)).max(axis=2))
    return _swizzled(np.concatenate(in_parts(padded / units.repeat(_ROWS, axis=1)[:, :, None]), axis=2)), units


def joined_parts(parts: np.ndarray, units: np.ndarray, shape: tuple[int, int, int, int], of_part: int) -> np.ndarray:
    """Returns matrices of a shape (batch, row, head, column) from the memory of their parts and units."""
    batch, rows, heads, columns = shape
    blocks = len(units.reshape(batch * heads, -1)[0])
    chunks = parts.reshape(batch * heads, -1, blocks * _ROWS, _COLUMNS // _CHUNK, _CHUNK)
    panels = np.take_along_axis(chunks, _order(blocks * _ROWS), axis=3).astype(np.float32)
    whole = panels.swapaxes(1, 2).reshape(batch, heads, -1, 2, of_part).sum(axis=3)
    whole = whole * units.reshape(batch, heads, blocks).repeat(_ROWS, axis=2)[..., None]
    return whole[:, :, :rows, :columns].swapaxes(1, 2)


def _swizzled(parts: np.ndarray) -> np.ndarray:
    """Reorders [head][row][column] to [head][panel][row][64], with 16-byte chunks permuted in each row."""
    heads, rows, columns = parts.shape
    panels = parts.reshape(heads, rows, columns // _COLUMNS, _COLUMNS).swapaxes(1, 2)
    chunks = panels.reshape(heads, -1, rows, _COLUMNS // _CHUNK, _CHUNK)
    return np.take_along_axis(chunks, _order(rows), axis=3)


def _order(rows: int) -> np.ndarray:
    """Returns the permutation of the eight chunks of each row, which is its own inverse."""
    return (np.arange(8) ^ np.arange(rows)[:, None] % 8)[None, None, :, :, None]
