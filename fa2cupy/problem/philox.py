"""The definition of dropout: which probabilities are dropped, as a function of their position and the seed.

P_ij of sequence b (its number in the batch) and query head h is dropped iff ``draw(b, h, i, j) + threshold >= 2**16``,
where i and j count from the start of the sequence's queries and keys and

    threshold = min(round(dropout_p * 2**16), 2**16 - 1)         an unsigned 16-bit integer
    key       = (seed mod 2**32, seed div 2**32)                 two words, low first
    counter   = (8 * (i div 16) + i mod 8,                       word 0: which queries
                 4 * (j div 16) + j mod 8 div 2,                 word 1: which keys
                 h,                                              word 2: the query head, also with grouped K/V heads
                 b)                                              word 3
    word(b, h, i, j) = Philox4x32-7(counter, key)[2 * (i div 8 mod 2) + j div 8 mod 2]
    draw(b, h, i, j) = word(b, h, i, j) div 2**(16 * (j mod 2)) mod 2**16

so that the probability of being dropped is dropout_p rounded to a multiple of 2**-16: up to 2**-17 nothing is dropped,
and next to 1 one element in 2**16 is kept. Kept probabilities are multiplied by
``2**16 / (2**16 - threshold)``, the inverse of the probability of being kept, rounded to the accumulators' dtype.
Results are thus unbiased whatever the rounding of dropout_p.

The eight draws of a call serve the elements of rows i and i + 8 and columns j, j + 1, j + 8 and j + 9 (j even) of an
aligned tile of 16 x 16. In the accumulators of mma.sync and wgmma one thread holds these eight elements of a tile of S,
and needs one call for them. For a tile of S^T it needs half of the draws of each of two calls, and another thread the
other halves: each of the two makes one call, and they exchange halves (kernels/common/dropout.cuh). The mask
does not depend on the tile, the method, the family or the lengths. The forward and the backward compute the same mask,
and none is stored. A call that is a part of another one, as that of a rank of ``fa2cupy.distributed``, counts h and i
from an origin of its own (`FeatureSettings.dropout_origin`), so that the elements dropped are those of the whole call.

Philox is the counter-based generator of Salmon, Moraes, Dror and Shaw (2011), "Parallel random numbers: as easy as
1, 2, 3"; one round maps (c0, c1, c2, c3) to (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0)), and
between two rounds the key grows by (W0, W1). Seven rounds are the fewest that pass BigCrush; their default of ten has a
margin that dropout does not need. Dropout is that of Srivastava et al. (2014), on P after the softmax.
"""

from __future__ import annotations

from types import ModuleType
from typing import TypeAlias

import numpy as np

from .array_types import Array

__all__ = ["dropout_scale", "dropout_threshold", "first_query_word", "kept", "philox4x32"]

_ROUNDS = 7
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_DRAWS = 2**16

#: Four words of 32 bits each, as arrays of uint64 that are broadcast against each other.
Words: TypeAlias = tuple[Array, Array, Array, Array]


def dropout_threshold(dropout_p: float) -> int:
    """The threshold: an element is dropped if the sum of its draw and the threshold carries out of 16 bits."""
    return min(round(dropout_p * _DRAWS), _DRAWS - 1)


def dropout_scale(dropout_p: float) -> float:
    """The factor of the elements that are kept."""
    return _DRAWS / (_DRAWS - dropout_threshold(dropout_p))


def first_query_word(query: int) -> int:
    """What kernels add to word 0 of a counter, so that a call's first query counts as this one.

    Raises
    ------
    ValueError
        The query does not begin a block of 16, whose draws come from the same words.
    """
    if query % 16:
        raise ValueError(f"dropout_origin: expected a multiple of 16 queries on a GPU, got {query}")
    return query // 2


def philox4x32(counter: Words, key: tuple[int, int], rounds: int = _ROUNDS) -> Words:
    """Philox4x32, element by element.

    Parameters
    ----------
    counter : tuple of four ndarray of uint64
        Words below 2**32, of at least one axis; they are broadcast against each other.
    key : tuple of two int
        Words below 2**32.
    rounds : int, optional

    Returns
    -------
    tuple of four ndarray of uint64
        Words below 2**32.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        first, second = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (
            (second >> _HALF) ^ c1 ^ np.uint64(k0),
            second & _LOW,
            (first >> _HALF) ^ c3 ^ np.uint64(k1),
            first & _LOW,
        )
        k0, k1 = (k0 + _W0) % 2**32, (k1 + _W1) % 2**32
    return c0, c1, c2, c3


def kept(
    dropout_p: float,
    seed: int,
    sequence: int,
    heads: slice,
    queries: slice,
    keys: slice,
    xp: ModuleType = np,
) -> Array:
    """The mask of a tile of P: True where an element is kept, by the definition above.

    Parameters
    ----------
    dropout_p : float
    seed : int
    sequence : int
        b.
    heads, queries, keys : slice
        h, i and j: start and stop, no step.
    xp : module, optional
        ``numpy`` or ``cupy``.

    Returns
    -------
    ndarray of bool, shape (heads, queries, keys)
    """

    def words(numbers: Array | list[int], axis: int) -> Array:
        return xp.asarray(numbers, dtype="uint64").reshape([-1 if n == axis else 1 for n in range(3)])

    # Whole blocks of 16 x 16 that cover the tile; the tile is sliced out at the end.
    rows, columns = (slice(part.start // 16, -(-part.stop // 16)) for part in (queries, keys))
    counter = (
        words(np.arange(8 * rows.start, 8 * rows.stop), 1),
        words(np.arange(4 * columns.start, 4 * columns.stop), 2),
        words(np.arange(heads.start, heads.stop), 0),
        words([sequence], 0),
    )
    last_kept = np.uint16(_DRAWS - dropout_threshold(dropout_p) - 1)
    shape = (heads.stop - heads.start, rows.stop - rows.start, columns.stop - columns.start)
    # Word 2 a + b of [head, 8 y + r, 4 x + c] has the elements (16 y + 8 a + r, 16 x + 8 b + 2 c + e) of the head: as
    # bytes, those of four words side by side are copied as one number.
    whole = xp.empty((shape[0], shape[1], 2, 8, shape[2], 2), dtype="uint64")
    for number, word in enumerate(philox4x32(counter, (seed % 2**32, seed // 2**32))):
        is_kept = word.astype("<u4", order="C").view("<u2") <= last_kept
        whole[:, :, number // 2, :, :, number % 2] = is_kept.view("uint64").reshape(*shape[:2], 8, shape[2])
    whole = whole.view("bool").reshape(shape[0], 16 * shape[1], 16 * shape[2])
    first_row, first_column = queries.start - 16 * rows.start, keys.start - 16 * columns.start
    return whole[:, first_row:, first_column:][:, : queries.stop - queries.start, : keys.stop - keys.start]
