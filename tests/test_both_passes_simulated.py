"""Both passes of a backward in one launch on Hopper, executed without a GPU."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cupy")

from mutants import sm90_both
from mutants.mutant import CATCHES
from support.strided_arrays import gapped

pytestmark = pytest.mark.simulated


@pytest.mark.parametrize("call", sm90_both.CALLS)
def test_both_passes(call):
    """Checks ragged edges, lengths of one tile, delta with dlse and given by the caller, heads and layouts."""
    sm90_both.results_of(call)


def test_results_are_strided():
    """Checks that what lies between the rows of results is not written."""
    sm90_both.results_of("causal", out=gapped)


def test_the_bits_are_the_same_in_any_order_of_warps():
    first, second = (sm90_both.results_of("causal", seed=seed) for seed in (1, 2))
    assert all(np.array_equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.matrix
@pytest.mark.parametrize(("call", "mutant"), sm90_both.MUTANTS, ids=lambda one: getattr(one, "name", one))
def test_a_broken_kernel_is_caught(call, mutant):
    sm90_both.check_unbroken(call)
    exception, text = CATCHES[mutant.caught_by]
    with pytest.raises(exception, match=text):
        sm90_both.results_of(call, mutant)


@pytest.mark.parametrize("call", ("causal", "heads", "dlse", "delta"))
def test_the_bits_are_those_of_two_launches(call):
    """A call with `num_splits=1` has the same bits beside other sequences, which may change the number of launches."""
    # Tiles may differ: the sums are those of tensor cores, bit by bit.
    one, two = (sm90_both.results_of(call, in_one=in_one, cuts_sums=True) for in_one in (True, False))
    assert all(np.array_equal(x.view("uint16"), y.view("uint16")) for x, y in zip(one, two, strict=True))
