"""Dropout's generator against the published vectors, and its places against the definition written out in integers."""

from __future__ import annotations

import numpy as np
import pytest

from fa2cupy.problem.philox import dropout_scale, dropout_threshold, kept, philox4x32

# The known answers of philox4x32-10 in Random123 (kat_vectors): counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def written_out(counter: tuple, key: tuple) -> tuple:
    """Philox4x32-10 in Python's integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second % 2**32, (first >> 32) ^ c3 ^ k1, first % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter, key, result):
    words = philox4x32(tuple(np.array([word], "uint64") for word in counter), key)
    assert tuple(int(word[0]) for word in words) == result == written_out(counter, key)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.97])
def test_every_element_has_its_word(probability):
    seed, sequence, heads, queries, keys = (5 << 32) + 9, 3, slice(2, 4), slice(13, 50), slice(5, 41)
    drawn = kept(probability, seed, sequence, heads, queries, keys)
    assert drawn.shape == (2, 37, 36)
    for h, i, j in np.ndindex(drawn.shape):
        h, i, j = h + 2, i + 13, j + 5
        counter = (8 * (j // 16) + j % 8, 8 * (i // 16) + i % 8, h, sequence)
        word = written_out(counter, (9, 5))[2 * (i // 8 % 2) + j // 8 % 2]
        assert drawn[h - 2, i - 13, j - 5] == (word >= int(probability * 2**32 + 0.5))


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
    i = j = 2**31 - 5
    counter = (8 * (j // 16) + j % 8, 8 * (i // 16) + i % 8, 0, 2**20)
    assert drawn[0, -1, -1] == (written_out(counter, (2**32 - 1,) * 2)[2 * (i // 8 % 2) + j // 8 % 2] >= 2**31)


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.25, 0.5, 0.9])
def test_the_share_of_dropped_elements(probability):
    dropped = ~kept(probability, 17, 0, slice(0, 4), slice(0, 1024), slice(0, 1024))
    assert dropped.mean() == pytest.approx(probability, rel=0.01)
    # Neighbours, and the elements that share a call, are independent.
    below, beside = dropped[:, 8:] & dropped[:, :-8], dropped[:, :, 8:] & dropped[:, :, :-8]
    for both in (below, beside, dropped[1:] & dropped[:-1]):
        assert both.mean() == pytest.approx(probability**2, rel=0.1)


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


def test_the_threshold_itself_is_kept():
    word = written_out((0, 0, 0, 0), (3, 0))[0]
    first = slice(0, 1)
    assert kept(word / 2**32, 3, 0, first, first, first)[0, 0, 0]
    assert not kept((word + 1) / 2**32, 3, 0, first, first, first)[0, 0, 0]


def test_scale_and_threshold_fit_together():
    assert dropout_threshold(0.5) == 2**31
    assert dropout_scale(0.5) == 2
    assert dropout_threshold(1 - 1e-16) == 2**32 - 1
    assert dropout_threshold(1e-12) == 0
    assert dropout_scale(1e-12) == 1
    for probability in (0.1, 0.3, 1 / 3):
        assert dropout_scale(probability) * (1 - dropout_threshold(probability) / 2**32) == pytest.approx(1, rel=1e-15)
