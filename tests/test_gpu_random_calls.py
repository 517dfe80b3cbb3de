"""On a GPU: results of random calls against the references in float64.

A call is run with several sizes, strides and numbers, which mostly have the same kernels. The environment variable
``FA2CUPY_RANDOM_CALLS`` is the number of calls; by default they are few, since each compiles kernels of its own.
"""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
from support.random_calls import FEATURES
from support.random_numbers import Backend, NumericCall, memory_of

import fa2cupy

cp = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

OPERATIONS = (*("forward",) * 2, *("backward",) * 4, "jvp", "output_jvp", "backward_jvp", "double_backward", "decode")
NUMBER = int(os.environ.get("FA2CUPY_RANDOM_CALLS", "33"))
VARIANTS = 4


def placed(x: np.ndarray) -> cp.ndarray:
    """Returns an array on the GPU with the same strides."""
    if not x.size:
        return cp.asarray(x)
    memory, first = memory_of(x)
    return cp.ndarray(x.shape, x.dtype, cp.asarray(memory).data + first, x.strides)


GPU = Backend(fa2cupy, placed, lambda x: x.get())


@pytest.mark.parametrize("number", range(NUMBER))
def test_results_of_a_random_call(number):
    drawn = random.Random(number)
    features = tuple(drawn.sample(FEATURES, drawn.choice((0, 1, 2, 2, 3))))
    for variant in range(VARIANTS):
        operation = OPERATIONS[number % len(OPERATIONS)]
        call = NumericCall(str(number), operation, features, on_hopper=number % 2 == 0, variant=variant)
        print(call)
        call.check(GPU)
