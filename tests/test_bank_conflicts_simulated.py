"""Bank conflicts of shared memory, counted without a GPU."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cupy")

from mutants.mutant import replace_once
from ptxsim.banks import BankCounter
from support.fake_cupy import place
from support.fake_gpu import backward, forward
from support.feature_cases import numbers
from support.simulated_problems import draw
from support.simulator import simulated_gpu

from fa2cupy.jit.spec import KernelSpec

pytestmark = pytest.mark.simulated

ONE_TILE, BOTH = ("one_tile",), ("single_pass", "two_pass")
#: The GPU, dtype, head_dim, that of v, length, methods of the backward, and whether there is a bias.
CALLS = [
    *(("sm_90", "bfloat16", d, None, 200, BOTH, False) for d in (32, 64, 96, 128, 192, 256)),
    ("sm_90", "bfloat16", 192, 128, 200, BOTH, False),
    *(("sm_90", "bfloat16", d, None, 200, BOTH, True) for d in (32, 64, 128)),
    *(("sm_90", "float32", d, None, 150, BOTH, False) for d in (64, 128)),
    *(("sm_90", "bfloat16", d, None, 64, ONE_TILE, biased) for d in (32, 64, 128) for biased in (False, True)),
    *(("sm_80", "float16", d, None, 150, BOTH, False) for d in (32, 64, 128, 256)),
    *(("sm_80", "float32", d, None, 70, BOTH, False) for d in (64, 128)),
    *(("sm_80", "float64", d, None, 70, BOTH, False) for d in (64, 128)),
]
EVERYDAY = [call for call in CALLS if call[:2] == ("sm_90", "bfloat16") and call[2] <= 64 and call[4] == 64]


def largest_share(spec: KernelSpec) -> float:
    """Returns the share of wavefronts that may be due to conflicts. Those of TMA and wgmma are not counted."""
    on_hopper = spec.family_name == "sm90"
    if on_hopper and spec.operation in ("backward", "backward_both", "backward_dkdv"):
        # A lane of the producer writes 32 adjacent bytes of statistics, half of them at a time.
        return 0.37 if spec.operation == "backward_dkdv" else 0.2
    if on_hopper and spec.operation in ("backward_dq", "dbias"):
        return 0.07  # of the bias, or of sums
    if spec.operation.startswith("split_"):
        return 0.18  # these kernels wait for global memory
    if spec.operation.startswith("backward_one_tile"):
        return 0.08 if spec.head_dim > 64 else 0.06  # lanes that share a row of O and dO read every other chunk of it
    return 0.04 if spec.operation == "forward" and spec.dtype == "float64" else 0.0


@pytest.mark.parametrize(
    "call", [call if call in EVERYDAY else pytest.param(call, marks=pytest.mark.matrix) for call in CALLS], ids=str
)
def test_kernels_have_few_bank_conflicts(monkeypatch, call):
    device, dtype, head_dim, head_dim_v, length, methods, biased = call
    banks: dict[KernelSpec, tuple[int, int]] = {}
    options = {"bias": place(numbers((1, 1, length, length), dtype))} if biased else {"causal": methods is BOTH}
    with simulated_gpu(monkeypatch, device, banks=banks):
        q, k, v, do = draw(dtype, (length, length), head_dim, head_dim_v=head_dim_v)
        o, lse = forward(q, k, v, **options)
        for method in methods:
            backward(q, k, v, o, lse, do, method=method, **options)
        if biased:
            backward(q, k, v, o, lse, do, deterministic=True, return_dbias=True, **options)
    shares = {spec: 1 - phases / wavefronts for spec, (phases, wavefronts) in banks.items() if wavefronts}
    assert {str(spec): share for spec, share in shares.items() if share > largest_share(spec)} == {}


def test_rows_without_swizzle_are_caught(monkeypatch):
    banks: dict[KernelSpec, tuple[int, int]] = {}

    def patch(spec: KernelSpec, text: str) -> str:
        return replace_once(spec, text, "kSwizzleMask = kPeriod - 1;", "kSwizzleMask = 0;")

    with simulated_gpu(monkeypatch, "sm_80", banks=banks, patch=patch):
        forward(*draw("float16", (70, 70), 64)[:3])
    ((phases, wavefronts),) = banks.values()
    assert wavefronts > 2 * phases


@pytest.mark.parametrize(
    ("offsets", "nbytes", "wanted"),
    [
        (np.arange(32) * 4, 4, (1, 1)),
        (np.arange(32) * 8, 4, (1, 2)),
        (np.arange(32) * 128, 4, (1, 32)),
        (np.zeros(32, int), 4, (1, 1)),  # all lanes get the same word
        (np.arange(32) * 8, 8, (2, 2)),
        (np.arange(32) * 16, 16, (4, 4)),
        (np.arange(32) * 32, 16, (4, 8)),
        (np.arange(32) * 2, 2, (1, 1)),
    ],
)
def test_wavefronts_of_an_access(offsets, nbytes, wanted):
    counter = BankCounter()
    counter.count(np.arange(32), offsets, nbytes)
    assert (counter.phases, counter.wavefronts) == wanted
