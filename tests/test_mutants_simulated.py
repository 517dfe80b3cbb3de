"""Each broken kernel of `mutants/` is caught, and without its patch passes the same check on the same problem."""

from __future__ import annotations

import pytest

pytest.importorskip("cupy")

from mutants import (
    dropout,
    edges,
    functions,
    scores,
    simt,
    sm80,
    sm80_float32,
    sm80_float64,
    sm90_backward,
    sm90_dq,
    sm90_float32,
    sm90_forward,
    splits,
)
from mutants.mutant import CATCHES, check_unbroken, run

pytestmark = [pytest.mark.simulated, pytest.mark.matrix]

TABLES = (
    sm90_forward,
    sm90_backward,
    sm90_dq,
    sm80,
    simt,
    scores,
    dropout,
    functions,
    splits,
    edges,
    sm90_float32,
    sm80_float32,
    sm80_float64,
)


@pytest.mark.parametrize("mutant", [one for table in TABLES for one in table.MUTANTS], ids=lambda mutant: mutant.name)
def test_a_broken_kernel_is_caught(mutant):
    check_unbroken(mutant.operation, mutant.problem)
    exception, text = CATCHES[mutant.caught_by]
    with pytest.raises(exception, match=text):
        run(mutant.operation, mutant.problem, mutant)
