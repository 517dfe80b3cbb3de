"""Results of random calls on NumPy against the references in float64."""

from __future__ import annotations

import random

import pytest
from support.random_calls import FEATURES
from support.random_numbers import NumericCall

OPERATIONS = ("forward", "backward", "backward", "jvp", "output_jvp", "backward_jvp", "double_backward", "decode")


@pytest.mark.sample(part=[0])
@pytest.mark.parametrize("part", range(20))
def test_results_of_random_calls(part):
    refused = 0
    for number in range(120 * part, 120 * (part + 1)):
        drawn = random.Random(number)
        features = tuple(drawn.sample(FEATURES, drawn.choice((0, 1, 2, 2, 3))))
        operation = OPERATIONS[number % len(OPERATIONS)]
        call = NumericCall(str(number), operation, features, on_hopper=drawn.random() < 0.5)
        print(call)
        call.check()
        refused += call.refused
    assert refused < 30


@pytest.mark.parametrize("operation", ["forward", "backward", "jvp", "double_backward", "decode"])
def test_a_wrong_result_is_found(operation, monkeypatch):
    """Checks that the last element of the first result counts."""
    from support.random_numbers import NUMPY

    class Wrong:
        def __getattr__(self, name):
            function = getattr(NUMPY.functions, name)

            def changed(*arrays, **keywords):
                results = function(*arrays, **keywords)
                if results[0].size:
                    results[0][(-1,) * results[0].ndim] += 1
                return results

            return changed

    call = NumericCall("one", operation, (), on_hopper=True)
    call.check()
    assert not call.refused
    with pytest.raises(AssertionError):
        call.check(NUMPY._replace(functions=Wrong()))
