"""On a GPU: mask functions of neighborhoods, whose tiles are boxes of tokens on Hopper, against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

import fa2cupy
from fa2cupy import mods
from fa2cupy.testing import Expectation, make_inputs

cp = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

#: Grids, and windows: kernel_size, or the radius of those that are cut off.
CASES = (
    ((40, 37), (13, 13)),
    ((21, 64), (8, 5)),
    ((33, 30), 4),
    ((9, 13, 11), (5, 5, 5)),
    ((4, 20, 17), (3, 9, 7)),
    ((16, 2, 33), (11, 2, 6)),
)


def function_of(shape: tuple[int, ...], windows: int | tuple[int, ...]):
    return mods.neighborhood_2d(shape[1], windows) if isinstance(windows, int) else mods.neighborhood(shape, windows)


def draw(shape: tuple[int, ...], dtype: str, head_dim: int, xp=cp) -> tuple:
    sizes = {"seqlen_q": math.prod(shape), "seqlen_k": math.prod(shape), "num_heads": 6, "num_heads_kv": 2}
    return make_inputs(dtype, batch=2, head_dim=head_dim, xp=xp, **sizes)


@pytest.mark.parametrize(("dtype", "head_dim"), [("bfloat16", 64), ("bfloat16", 128), ("float16", 72)])
@pytest.mark.parametrize(("shape", "windows"), CASES)
def test_each_query_sees_its_window(shape, windows, dtype, head_dim):
    q, k, v, do = draw(shape, dtype, head_dim)
    function = function_of(shape, windows)
    expected = Expectation(q, k, v, do, mask_mod=function)
    o, lse = fa2cupy.forward(q, k, v, mask_mod=function, out=expected.unwritten("o", "lse"))
    expected.check(o=o, lse=lse)
    for method in ("single_pass", "two_pass"):
        out = expected.unwritten("dq", "dk", "dv")
        gradients = fa2cupy.backward(q, k, v, o, lse, do, mask_mod=function, method=method, out=out)
        expected.check(**dict(zip(("dq", "dk", "dv"), gradients, strict=True)))


@pytest.mark.parametrize("shape", [(40, 37), (9, 13, 11)])
def test_a_map_adds_nothing_and_the_bits_are_the_same_in_each_run(shape):
    q, k, v, _ = draw(shape, "bfloat16", 64)
    function = mods.neighborhood(shape, (5,) * len(shape))
    sparse = fa2cupy.block_mask(function, (), 1, 1, q.shape[1], q.shape[1], like=q)
    first, lse = fa2cupy.forward(q, k, v, mask_mod=function)
    for options in ({"mask_mod": function}, {"mask_mod": function, "block_mask": sparse}, {"block_mask": sparse}):
        o, again = fa2cupy.forward(q, k, v, **options)
        np.testing.assert_array_equal(o.view("uint16").get(), first.view("uint16").get())
        np.testing.assert_array_equal(again.get(), lse.get())


def test_sequences_beside_one_are_not_in_its_result():
    q, k, v, _ = draw((9, 13, 11), "bfloat16", 128, xp=np)
    function = mods.neighborhood((9, 13, 11), (5, 5, 5))
    wanted, lse = fa2cupy.forward(*map(cp.asarray, (q, k, v)), mask_mod=function)
    k[0], v[0] = np.nan, np.inf
    o, again = fa2cupy.forward(*map(cp.asarray, (q, k, v)), mask_mod=function)
    np.testing.assert_array_equal(o[1].view("uint16").get(), wanted[1].view("uint16").get())
    np.testing.assert_array_equal(again[1].get(), lse[1].get())
    assert np.isnan(again[0].get()).all()
