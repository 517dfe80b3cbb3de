"""On a GPU: the accuracy that is promised for float64, of every family and method."""

from __future__ import annotations

import accuracy
import pytest
from common.accuracy import KINDS, Promise, orders_of

import fa2cupy
from fa2cupy.families.device import DeviceInfo

cp = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def kernels_here() -> list[accuracy.Kernels]:
    found = accuracy.kernels_of(DeviceInfo.current())
    for family, method in found:
        fa2cupy.precompile(dtypes="float64", head_dims=accuracy.HEAD_DIMS, methods=method, family=family, decode=False)
    return found


@pytest.mark.parametrize("head_dim", accuracy.HEAD_DIMS)
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_those_of_the_formulas(kernels_here, kind, head_dim):
    for inputs, causal in accuracy.problems(cp, kind, head_dim):
        promise = Promise(inputs, causal, orders_of(kind))
        for kernels in kernels_here:
            results = accuracy.results_of(inputs, causal, kernels)
            for name, error in promise.errors({one: results[one] for one in accuracy.names_of(kind)}).items():
                assert error.own <= error.allowed, (name, kernels, inputs[0].shape, inputs[1].shape, causal)
