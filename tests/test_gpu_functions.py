"""On a GPU: functions of scores in the kernels of every family, against the float64 reference."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from support.feature_cases import METHODS, accumulator, extras, gradient_names, numbers
from support.traced_cases import on_gpu, ready_made

import fa2cupy
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.family import Family
from fa2cupy.families.operations import METHODS as OF_METHOD
from fa2cupy.families.registry import FAMILIES
from fa2cupy.testing import Expectation, make_inputs

cp = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

#: (batch, num_heads, seqlen_q, seqlen_k)
SIZES = (2, 4, 300, 410)
NAMES = tuple(ready_made(*SIZES))
to_gpu = functools.partial(on_gpu, copied=cp.asarray)


def families_of(dtype: str) -> list[Family]:
    """Returns the families with kernels that have functions on this GPU."""
    device = DeviceInfo.current()
    return [one for one in FAMILIES if one.supports("forward", dtype, device, ("score_mod", "mask_mod"))]


def draw(dtype: str, head_dim: int, sizes: tuple = SIZES) -> tuple:
    batch, heads, rows, keys = sizes
    shape = {"batch": batch, "num_heads": heads, "num_heads_kv": 2, "seqlen_q": rows, "seqlen_k": keys}
    return make_inputs(dtype, head_dim=head_dim, xp=cp, **shape)


def check(inputs: tuple, families: list[Family], *, dlse=None, **options) -> None:
    """Checks forward and the methods of each family, written into NaN-filled arrays."""
    q, k, v, do = inputs
    device, dtype = DeviceInfo.current(), q.dtype.name
    expected = Expectation(q, k, v, do, dlse=dlse, **options)
    switches = extras(options)
    names = gradient_names(options)
    for family in families:
        own = {"family": family.public_name, **options}
        o, lse = fa2cupy.forward(q, k, v, out=expected.unwritten("o", "lse"), **own)
        expected.check(spec=family.public_name, o=o, lse=lse)
        for method in METHODS:
            if not all(family.supports(operation, dtype, device) for operation in OF_METHOD[method]):
                continue
            (dq, dk, dv) = fa2cupy.backward(q, k, v, o, lse, do, dlse=dlse, method=method, **own)
            expected.check(spec=(method, family.public_name), dq=dq, dk=dk, dv=dv)
        if switches:
            gradients = fa2cupy.backward(
                q, k, v, o, lse, do, dlse=dlse, out=expected.unwritten(*names), **switches, **own
            )
            expected.check(spec=("all", family.public_name), **dict(zip(names, gradients, strict=True)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wide", (False, True), ids=("16 bits", "float32"))
def test_ready_made_functions(wide, name):
    """Checks each function in one family of a dtype, in turn; its values are tested in all of them without a GPU."""
    index = NAMES.index(name)
    turn = index % 2
    dtype = "float32" if wide else ("float16", "bfloat16")[turn]
    families = families_of(dtype)
    case = ready_made(*SIZES)[name]
    check(draw(dtype, (64, 128)[turn]), [families[index // 2 % len(families)]], **to_gpu(case.options))


@pytest.mark.parametrize("name", ("t5_relative", "document"))
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("bfloat16", 64), ("float16", 192), ("bfloat16", 256), ("float64", 48)]
)
def test_other_main_loops(dtype, head_dim, name):
    case = ready_made(*SIZES, wide=accumulator(dtype))[name]
    check(draw(dtype, head_dim), families_of(dtype), **to_gpu(case.options))


def low_rank(score, b, h, q, k, x, y, ids, scale):
    return score * scale - np.where(ids[b, k] > 0, np.dot(x[b, h, q], y[h, k]), np.tanh(score))


@pytest.mark.long
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("head_dim", (64, 192))
def test_all_features_at_once(dtype, head_dim):
    """Checks derivatives of any sign beside dropout, arrays of all ranks, and functions of both kinds."""
    if dtype == "float32" and head_dim > 128:
        pytest.skip("16-bit kernels alone pass weights between warps beyond head_dim 128")
    batch, heads, rows, keys = SIZES
    arrays = (
        numbers((batch, heads, rows, 4), "float16"),
        numbers((heads, keys, 4), "float32"),
        np.arange(batch * keys).reshape(batch, keys) % 3,
        np.array(-0.7, "float32"),
    )
    options = {
        "score_mod": low_rank, "score_args": arrays, "causal": True, "window": (90, None), "softcap": 3.0,
        "alibi_slopes": numbers((heads,), "float32"), "bias": numbers((rows, keys), dtype),
        "mask": numbers((rows, keys), "float32") < 1.5, "sink": numbers((heads,), "float32"),
        "mask_mod": lambda b, h, q, k, t: (q + k + b) % t[h] != 0, "mask_args": (np.array([3, 5, 7, 9], "int8"),),
        "dropout_p": 0.25, "seed": 7,
    }  # fmt: skip
    dlse = cp.asarray(numbers((batch, heads, rows), "float32"))
    check(draw(dtype, head_dim), families_of(dtype), dlse=dlse, **to_gpu(options))


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_packed_sequences(dtype):
    """Positions count from the start of each sequence; one sequence has no queries."""
    offsets = {
        "cu_seqlens_q": np.array([0, 90, 90, 300], "int32"),
        "cu_seqlens_k": np.array([0, 130, 200, 410], "int32"),
    }
    ids = np.sort(np.random.default_rng(3).integers(0, 3, (3, 410)), axis=1)
    table = numbers((3, 4, 410), "float32")
    options = {
        "score_mod": lambda score, b, h, q, k, t: score + t[b, h, k], "score_args": (table,),
        "mask_mod": lambda b, h, q, k, ids: ids[b, q] == ids[b, k], "mask_args": (ids,), **offsets,
    }  # fmt: skip
    inputs = tuple(x[0] for x in draw(dtype, 64, (1, *SIZES[1:])))
    check(inputs, families_of(dtype), **to_gpu(options))


def test_a_call_has_the_numbers_of_its_time_and_its_gradient_those_of_its_forward():
    class Layer:
        cap = 1.0

        def score(self, score, b, h, q, k):
            return self.cap * np.tanh(score / self.cap) + h

    def plain(cap: float) -> list:
        o, backprop = fa2cupy.attention(q, k, v, score_mod=lambda s, b, h, q, k: cap * np.tanh(s / cap) + h, **options)
        return [o, *backprop(do)]

    q, k, v, do = draw("bfloat16", 64)
    options, layer = {"deterministic": True, "num_splits": 1}, Layer()
    wanted = {cap: plain(cap) for cap in (1.0, 50.0)}
    o, backprop = fa2cupy.attention(q, k, v, score_mod=layer.score, **options)
    layer.cap = 50.0
    other, other_backprop = fa2cupy.attention(q, k, v, score_mod=layer.score, **options)
    for cap, found in {1.0: [o, *backprop(do)], 50.0: [other, *other_backprop(do)]}.items():
        assert all((x == y).all() for x, y in zip(found, wanted[cap], strict=True))
    assert (o != other).any()
