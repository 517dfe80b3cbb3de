"""Dropout's generator against published vectors, and its draw for each element against the definition in integers."""

from __future__ import annotations

import numpy as np
import pytest

from fa2cupy.problem.philox import dropout_scale, dropout_threshold, kept, philox4x32

# The known answers of philox4x32 in Random123 (kat_vectors): counter, key, and the result by the number of rounds.
KNOWN = [
    (
        (0, 0, 0, 0),
        (0, 0),
        {
            7: (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48),
            10: (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        },
    ),
    (
        (2**32 - 1,) * 4,
        (2**32 - 1,) * 2,
        {
            7: (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662),
            10: (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        },
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        {
            7: (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
            10: (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        },
    ),
]


def written_out(counter: tuple, key: tuple, rounds: int = 7) -> tuple:
    """Returns the result of Philox4x32, computed with Python's integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second % 2**32, (first >> 32) ^ c3 ^ k1, first % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def draw_of(sequence: int, head: int, i: int, j: int, key: tuple) -> int:
    """Returns the 16 bits of one element."""
    counter = (8 * (i // 16) + i % 8, 4 * (j // 16) + j % 8 // 2, head, sequence)
    word = written_out(counter, key)[2 * (i // 8 % 2) + j // 8 % 2]
    return (word >> 16 if j % 2 else word) % 2**16


def assert_share(elements: np.ndarray, probability: float) -> None:
    """Checks a share to five standard deviations of independent draws, plus the rounding of the probability."""
    deviation = np.sqrt(probability * (1 - probability) / elements.size)
    assert abs(elements.mean() - probability) < 5 * deviation + 2**-16


#: Number of values of each word of the counter in the test of uniformity, and the shape that selects its axis.
GRID = ((128, (-1, 1, 1, 1)), (128, (1, -1, 1, 1)), (4, (1, 1, -1, 1)), (2, (1, 1, 1, -1)))


@pytest.mark.parametrize("rounds", (7, 10))
@pytest.mark.parametrize(("counter", "key", "results"), KNOWN)
def test_known_answers(counter, key, results, rounds):
    words = philox4x32(tuple(np.array([word], "uint64") for word in counter), key, rounds)
    assert tuple(int(word[0]) for word in words) == results[rounds] == written_out(counter, key, rounds)


def test_seven_rounds_are_the_default():
    counter, key, results = KNOWN[0]
    words = philox4x32(tuple(np.array([word], "uint64") for word in counter), key)
    assert tuple(int(word[0]) for word in words) == results[7]


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.97])
def test_every_element_has_its_draw(probability):
    seed, sequence, heads, queries, keys = (5 << 32) + 9, 3, slice(2, 4), slice(13, 50), slice(5, 41)
    drawn = kept(probability, seed, sequence, heads, queries, keys)
    assert drawn.shape == (2, 37, 36)
    threshold = int(probability * 2**16 + 0.5)
    for h, i, j in np.ndindex(drawn.shape):
        draw = draw_of(sequence, h + 2, i + 13, j + 5, (9, 5))
        assert drawn[h, i, j] == (draw + threshold < 2**16)


def test_a_part_is_a_part_of_the_whole():
    whole = kept(0.4, 11, 0, slice(0, 3), slice(0, 70), slice(0, 90))
    for heads, queries, keys in (
        (slice(1, 2), slice(16, 32), slice(32, 48)),
        (slice(0, 3), slice(7, 70), slice(1, 2)),
        (slice(2, 3), slice(69, 70), slice(88, 90)),
    ):
        np.testing.assert_array_equal(kept(0.4, 11, 0, heads, queries, keys), whole[heads, queries, keys])
    assert kept(0.4, 11, 0, slice(0, 3), slice(8, 8), slice(0, 5)).shape == (3, 0, 5)


def test_large_indices_and_seeds():
    far = slice(2**31 - 20, 2**31 - 4)
    drawn = kept(0.5, 2**64 - 1, 2**20, slice(0, 1), far, far)
    assert drawn[0, -1, -1] == (draw_of(2**20, 0, 2**31 - 5, 2**31 - 5, (2**32 - 1,) * 2) < 2**15)


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.25, 0.5, 0.9])
def test_the_share_of_dropped_elements(probability):
    dropped = ~kept(probability, 17, 0, slice(0, 4), slice(0, 1024), slice(0, 1024))
    assert_share(dropped, probability)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_neighbours_are_independent(probability):
    """Checks also elements that share a call or a word, at these distances, and those of successive heads and seeds."""
    dropped = ~kept(probability, 17, 0, slice(0, 4), slice(0, 1024), slice(0, 1024))
    other_seed = ~kept(probability, 18, 0, slice(0, 4), slice(0, 1024), slice(0, 1024))
    for rows, columns in ((0, 1), (1, 0), (1, 1), (0, 2), (0, 8), (0, 9), (8, 0), (8, 1), (8, 8), (16, 0), (0, 16)):
        both = dropped[:, rows:, columns:] & dropped[:, : 1024 - rows, : 1024 - columns]
        assert_share(both, probability**2)
    # Only the two halves of the same word.
    assert_share(dropped[:, :, ::2] & dropped[:, :, 1::2], probability**2)
    assert_share(dropped[1:] & dropped[:-1], probability**2)
    assert_share(dropped & other_seed, probability**2)


def test_draws_are_uniform_in_all_their_bits():
    """Checks counts in 256 intervals and in 256 classes of the low bits, for both halves of all words."""
    words = philox4x32(tuple(np.arange(n, dtype="uint64").reshape(s) for n, s in GRID), (3, 1))
    for word in words:
        for shift in (0, 16):
            draws = (word.ravel() >> np.uint64(shift)).astype("int64") % 2**16
            for classes in (draws // 256, draws % 256):
                counts = np.bincount(classes, minlength=256)
                chi_square = ((counts - draws.size / 256) ** 2).sum() / (draws.size / 256)
                assert abs(chi_square - 255) < 5 * np.sqrt(2 * 255)


def test_every_part_of_the_place_and_the_seed_matters():
    first = kept(0.5, 1, 0, slice(0, 1), slice(0, 64), slice(0, 64))[0]
    others = [
        kept(0.5, 2, 0, slice(0, 1), slice(0, 64), slice(0, 64))[0],
        kept(0.5, 1 + 2**32, 0, slice(0, 1), slice(0, 64), slice(0, 64))[0],
        kept(0.5, 1, 1, slice(0, 1), slice(0, 64), slice(0, 64))[0],
        kept(0.5, 1, 0, slice(1, 2), slice(0, 64), slice(0, 64))[0],
        kept(0.5, 1, 0, slice(0, 1), slice(64, 128), slice(0, 64))[0],
        kept(0.5, 1, 0, slice(0, 1), slice(0, 64), slice(64, 128))[0],
        first.T,
    ]
    for other in others:
        assert 0.4 < (first == other).mean() < 0.6


@pytest.mark.parametrize("column", (0, 1))
def test_the_sum_that_just_carries_is_dropped(column):
    draw = draw_of(0, 0, 0, column, (3, 0))
    place = slice(0, 1), slice(0, 1), slice(column, column + 1)
    assert not kept((2**16 - draw) / 2**16, 3, 0, *place)[0, 0, 0]
    assert kept((2**16 - draw - 1) / 2**16, 3, 0, *place)[0, 0, 0]


def test_scale_and_threshold_fit_together():
    assert dropout_threshold(0.5) == 2**15
    assert dropout_scale(0.5) == 2
    for probability in (0.1, 0.3, 1 / 3):
        threshold = dropout_threshold(probability)
        assert abs(threshold / 2**16 - probability) <= 2**-17
        assert dropout_scale(probability) * (1 - threshold / 2**16) == pytest.approx(1, rel=1e-15)


def test_the_ends_of_the_probability():
    """Checks that rounding to 0 drops nothing, and rounding to 1 still keeps elements, so that the scale is finite."""
    everything = slice(0, 2), slice(0, 512), slice(0, 512)
    assert dropout_threshold(2.0**-18) == 0
    assert dropout_scale(2.0**-18) == 1
    assert kept(2.0**-18, 5, 0, *everything).all()
    assert dropout_threshold(2.0**-16) == 1
    assert dropout_threshold(1 - 1e-16) == 2**16 - 1
    assert dropout_scale(1 - 1e-16) == 2**16
    assert 0 < kept(1 - 1e-16, 5, 0, *everything).sum() < 30
