"""How often results of 16 bits are rounded where they are sums over ranks: no sum has fewer bits than float32."""

from __future__ import annotations

import contextlib

import ml_dtypes
import numpy as np
import ptxsim
import pytest
from support import ranks
from support.feature_cases import numbers
from support.ptxsim_kernels import cuda_module

import fa2cupy
import fa2cupy.distributed as dist
from fa2cupy.distributed.call import sums
from fa2cupy.testing import make_inputs

#: So many shares that rounding each partial sum shows.
SIZE, RANKS_PER_HOST = 16, 2
#: Root mean square of the errors over that of rounding the exact result once. The arithmetic of NumPy's backend is that
#: of float32, so that one call has 1.00. Rounded shares, whose squares add up to about that of the result, make it the
#: square root of 2: 1.32 to 1.62 for these inputs. With partial sums of 16 bits it is 2.18 to 4.4.
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
    """Returns the errors of a result in units of those of rounding the exact one once."""
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
    """In `heads` each rank has a share of each element, in `hybrid` each of a host, in `gather` one rank has it all."""
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
    """Each share but the first is a quarter of a unit in the last place, by which a sum of 16 bits does not grow."""
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    unit = float(ml_dtypes.finfo(dtype).eps)
    shares = np.full((SIZE, 40), unit / 4)
    shares[0] = 1 + unit * np.arange(40)
    exact = shares.sum(axis=0)
    for found in dist.simulate(SIZE, lambda comm: dist.total(comm, shares[comm.rank].astype(dtype)), timeout=60):
        np.testing.assert_array_equal(found.astype("float64"), exact.astype(dtype).astype("float64"))


# ----------------------------------------------------------------------------------------------------- kernels of sums

_TYPES = {"float16": "__half", "bfloat16": "__nv_bfloat16", "float32": "float", "float64": "double"}
_TYPES["uint64"] = "unsigned long long"


class Elementwise:
    """``cupy.ElementwiseKernel`` in the interpreter."""

    def __init__(self, reads: str, writes: str, body: str, name: str):
        self._parameters = [one.strip().split() for one in f"{reads}, {writes}".split(",")]
        self._body = body

    def __call__(self, *arrays: np.ndarray) -> None:
        target = arrays[-1]
        shapes = [x if "raw" in words else np.broadcast_to(x, target.shape) for x, words in self._pairs(arrays)]
        types = {words[-2]: _TYPES[x.dtype.name] for x, words in self._pairs(arrays)}
        names = [words[-1] for _, words in self._pairs(arrays)]
        used = [f"{words[-2]}& {words[-1]} = all_{words[-1]}[i];" for words in self._parameters if "raw" not in words]
        source = "\n".join(
            (
                "#include <cuda_fp16.h>\n#include <cuda_bf16.h>",
                *(f"using {letter} = {name};" for letter, name in types.items()),
                'extern "C" __global__ void run(',
                ", ".join(f"{words[-2]}* all_{words[-1]}" for words in self._parameters),
                ") {\n    const int i = blockIdx.x;",
                *used,
                f"{self._body};\n}}",
            )
        )
        memory = ptxsim.Memory()
        copies = [memory.alloc(np.ascontiguousarray(x), name) for x, name in zip(shapes, names, strict=True)]
        cuda_module(source, headers=True).launch("run", grid=target.size, block=1, args=copies, memory=memory)
        target[...] = memory.read(copies[-1]).view(target.dtype).reshape(target.shape)

    def _pairs(self, arrays):
        return zip(arrays, self._parameters, strict=True)


@pytest.fixture
def interpreted(monkeypatch):
    """Lets arrays of NumPy take the kernels of those of CuPy."""
    pytest.importorskip("cupy")
    monkeypatch.setattr(sums, "is_on_host", lambda array: False)
    monkeypatch.setattr(sums, "_kernel", Elementwise)


@pytest.mark.simulated
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
class TestKernels:
    @pytest.mark.parametrize("in_words", [False, True])
    def test_of_sums_of_shares(self, dtype, in_words, interpreted, monkeypatch):
        shares, target = numbers((9, 3, 8), dtype), numbers((3, 8), dtype)
        expected = shares[0].astype("float32")
        for share in shares[1:]:
            expected += share.astype("float32")
        if in_words:
            monkeypatch.setattr(sums, "in_words", lambda *arrays: [x.view("uint64") for x in arrays])
        sums.sum_into(target, list(shares), "float32")
        np.testing.assert_array_equal(target, expected.astype(target.dtype))

    def test_of_sums_of_two(self, dtype, interpreted):
        total, share = numbers((3, 5), "float32"), numbers((3, 5), dtype, seed=8)
        expected = total + share.astype("float32")
        sums.add(total, share)
        np.testing.assert_array_equal(total, expected)
