"""How often 16-bit results that are sums over ranks are rounded: no sum has fewer bits than float32."""

from __future__ import annotations

import contextlib

import ml_dtypes
import numpy as np
import pytest
from support import ranks
from support.feature_cases import numbers

import fa2cupy
import fa2cupy.distributed as dist
from fa2cupy.testing import make_inputs

#: Enough shares for the rounding of partial sums to show.
SIZE, RANKS_PER_HOST = 16, 2
#: Root mean square of the errors, divided by that of rounding the exact result once. NumPy's backend computes in
#: float32, so that one call has 1.00. Rounded shares, whose squares add up to about the square of the result, have the
#: square root of 2: 1.32 to 1.62 for these inputs. Partial sums of 16 bits have 2.18 to 4.4.
ONCE, SHARES = 1.01, 1.75
RESULTS = ("o", "dq", "dk", "dv")
#: The results that are sums of rounded shares. "copies" stands for ranks that write each other's memory.
SUMS = {
    "heads": (),
    "heads copies": (),
    "gather": ("dk", "dv"),
    "gather copies": ("dk", "dv"),
    "hybrid": ("dk", "dv"),
}


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def roundings(found: np.ndarray, exact: np.ndarray) -> float:
    """Returns the errors of a result, divided by those of rounding the exact result once."""
    return rms(found.astype("float64") - exact) / rms(exact.astype(found.dtype).astype("float64") - exact)


def on_ranks(scheme: str, monkeypatch, work) -> object:
    """Returns what ``work(comm)`` returns on rank 0."""
    in_host = RANKS_PER_HOST if scheme == "hybrid" else None
    windows = ranks.thread_windows(monkeypatch) if "copies" in scheme else contextlib.nullcontext()
    with windows:
        return dist.simulate(SIZE, work, ranks_per_host=in_host, timeout=60)[0]


@pytest.mark.sample(causal=(False,), dtype=("bfloat16",), scheme=("heads", "gather", "hybrid"))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scheme", SUMS)
def test_shares_are_rounded_once_and_their_sum_once(scheme, dtype, causal, monkeypatch):
    heads = SIZE if "heads" in scheme else RANKS_PER_HOST
    inputs = make_inputs(dtype, seqlen_q=64, num_heads=heads, num_heads_kv=heads, head_dim=16)
    dlse = numbers((1, heads, 64), "float32")
    options = {"causal": causal, "scheme": scheme.removesuffix(" copies")}

    def work(comm):
        q, k, v, do = (dist.shard(comm, x) for x in inputs)
        o, lse = dist.forward(comm, q, k, v, **options)
        found = (o, *dist.backward(comm, q, k, v, o, lse, do, dlse=dist.shard(comm, dlse, axis=2), **options))
        return dist.unshard(comm, lse, axis=2), [dist.unshard(comm, x) for x in found]

    lse, found = on_ranks(scheme, monkeypatch, work)
    q, k, v, do = (x.astype("float64") for x in inputs)
    o, exact_lse = fa2cupy.forward(q, k, v, causal=causal)
    # o and lse are inputs of the backward as they are.
    given = (q, k, v, *(x.astype("float64") for x in (found[0], lse)), do)
    gradients = fa2cupy.backward(*given, dlse=dlse.astype("float64"), causal=causal)
    np.testing.assert_allclose(lse, exact_lse, atol=4e-6)
    errors = {name: roundings(*pair) for name, *pair in zip(RESULTS, found, (o, *gradients), strict=True)}
    assert all(error <= (SHARES if name in SUMS[scheme] else ONCE) for name, error in errors.items()), errors


@pytest.mark.sample(dtype=("bfloat16",))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scheme", ["heads", "gather", "hybrid"])
def test_gradients_of_a_bias_that_heads_share(scheme, dtype, monkeypatch):
    """In `heads` each rank has a share of each element, in `hybrid` each rank of a host, in `gather` one rank alone."""
    q, k, v, do = make_inputs(dtype, seqlen_q=64, num_heads=SIZE, num_heads_kv=SIZE, head_dim=8)
    bias = numbers((64, 64), dtype)

    def work(comm):
        own = [dist.shard(comm, x) for x in (q, k, v, do)]
        options = {"bias": dist.shard(comm, bias, axis=0), "scheme": scheme}
        o, lse = dist.forward(comm, *own[:3], **options)
        dbias = dist.backward(comm, *own[:3], o, lse, own[3], return_dbias=True, **options)[3]
        return [dist.unshard(comm, x, axis=axis) for x, axis in ((o, 1), (lse, 2), (dbias, 0))]

    found = on_ranks(scheme, monkeypatch, work)
    wide = [x.astype("float64") for x in (q, k, v, *found[:2], do)]
    exact = fa2cupy.backward(*wide, bias=bias.astype("float64"), return_dbias=True)[3]
    assert roundings(found[2], exact) <= (ONCE if scheme == "gather" else SHARES)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_totals_are_rounded_once(dtype):
    """Each share but the first is a quarter of a unit in the last place: adding it does not change a 16-bit sum."""
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    unit = float(ml_dtypes.finfo(dtype).eps)
    shares = np.full((SIZE, 40), unit / 4)
    shares[0] = 1 + unit * np.arange(40)
    exact = shares.sum(axis=0)
    for found in dist.simulate(SIZE, lambda comm: dist.total(comm, shares[comm.rank].astype(dtype)), timeout=60):
        np.testing.assert_array_equal(found.astype("float64"), exact.astype(dtype).astype("float64"))
