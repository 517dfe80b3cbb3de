"""float64 on tensor cores, executed without a GPU: calls against the reference, and the exponential alone."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cupy")

from common.accuracy import KINDS, Promise, data, orders_of
from ptxsim import Memory
from support.fake_cupy import place
from support.fake_gpu import backward, forward
from support.feature_cases import METHODS, options_of
from support.ptxsim_kernels import cuda_module
from support.simulated_problems import draw, growing
from support.simulator import simulated_gpu
from support.traced_cases import on_gpu, ready_made

from fa2cupy import BlockMask, TileConfig
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.family import Kernel
from fa2cupy.families.operations import TILED
from fa2cupy.families.sm80_float64 import SM80_FLOAT64
from fa2cupy.jit.source import kernel_directory
from fa2cupy.testing import Expectation, make_inputs

pytestmark = pytest.mark.simulated

SMALL = {
    "forward": TileConfig(32, 16, 2),
    "backward_dq": TileConfig(32, 16, 2),
    "backward_dkdv": TileConfig(16, 32, 4, 2),
    "backward": TileConfig(16, 32, 4, 2),
}
LARGER = {
    "forward": TileConfig(32, 32, 2),
    "backward_dq": TileConfig(32, 32, 2),
    "backward_dkdv": TileConfig(32, 32, 4, 1),
    "backward": TileConfig(32, 32, 4, 1),
}
#: Warps that do not share their keys, and one of more warps than columns of dQ to divide.
BY_KEYS = (TileConfig(32, 32, 2, 1), TileConfig(16, 32, 2, 2), TileConfig(16, 64, 8, 1))
#: Of more than 128 columns, which two warps share.
WIDE = {
    "forward": TileConfig(32, 16, 4),
    "backward_dq": TileConfig(16, 16, 2),
    "backward_dkdv": TileConfig(16, 16, 4),
    "backward": TileConfig(16, 16, 4),
}
LARGER_WIDE = {
    "forward": TileConfig(32, 32, 4),
    "backward_dq": TileConfig(32, 32, 4),
    "backward_dkdv": TileConfig(32, 32, 8),
    "backward": TileConfig(16, 32, 8, 2),
}
#: More and fewer keys than queries, and fewer than a tile; a causal mask hides all keys of some rows.
LENGTHS = ((37, 51), (70, 37), (1, 5))
FEATURES = (
    "window",
    "softcap",
    "alibi",
    "bias",
    "mask",
    "mask of whole rows",
    "padding",
    "sink",
    "dropout",
)  # fmt: skip


@pytest.fixture(params=["sm_90", "sm_80"])
def launched(request, monkeypatch):
    """Provides the stages that were launched, on a GPU with m16n8k8 and on one without."""
    with simulated_gpu(monkeypatch, request.param) as stages:
        yield stages


def check(inputs: tuple, launched: list, method: str, tiles: dict = SMALL, **options) -> None:
    """Checks all results of a forward and a backward, and that the family computed them."""
    q, k, v, do = inputs
    expected = Expectation(*inputs, **options)
    o, lse = forward(q, k, v, family="sm80", config=tiles, **options)
    expected.check(o=o, lse=lse)
    more = {f"return_d{name}": True for name in ("bias", "sink") if name in options}
    if method == "single_pass":
        more.pop("return_dbias", None)
    gradients = backward(q, k, v, o, lse, do, family="sm80", method=method, config=tiles, **more, **options)
    names = ("dq", "dk", "dv", *(name.removeprefix("return_") for name in more))
    expected.check(**dict(zip(names, gradients, strict=True)))
    families = {stage.spec.family for stage in launched if stage.spec.operation in TILED}
    assert families == {SM80_FLOAT64}


@pytest.mark.sample(lengths=((37, 51),), causal=(True,))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_lengths(launched, method, lengths, causal):
    check(draw("float64", lengths, 64), launched, method, causal=causal)


@pytest.mark.sample(launched=("sm_90",), method=("single_pass",), head_dim=(50,))
@pytest.mark.parametrize("head_dim", (2, 8, 50, 128))
@pytest.mark.parametrize("method", METHODS)
def test_head_dims(launched, method, head_dim):
    check(draw("float64", (37, 51), head_dim), launched, method, LARGER, causal=True)


@pytest.mark.sample(launched=("sm_90",), method=("single_pass",), pair=((24, 80),))
@pytest.mark.parametrize("pair", ((64, 32), (24, 80)), ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_two_head_dims(launched, method, pair):
    check(draw("float64", (37, 51), pair[0], head_dim_v=pair[1]), launched, method)


@pytest.mark.sample(launched=("sm_90",))
def test_two_warps_share_rows_of_128_columns(launched):
    """Checks a head_dim that two warps do not divide evenly."""
    check(
        draw("float64", (37, 51), 72),
        launched,
        "two_pass",
        SMALL | {"forward": LARGER_WIDE["forward"], "backward_dq": LARGER_WIDE["backward_dq"]},
        causal=True,
    )


@pytest.mark.sample(launched=("sm_90",))
@pytest.mark.parametrize("head_dim", (72, 128))
def test_scores_do_not_depend_on_the_warps_that_share_rows(launched, head_dim):
    """Else P of the gradients would not be that of lse. With one key, lse is its score."""
    inputs = draw("float64", (37, 1), head_dim)[:3]
    alone, shared = (forward(*inputs, family="sm80", config=tiles["forward"])[1] for tiles in (SMALL, WIDE))
    np.testing.assert_array_equal(alone.get(), shared.get())


def test_o_is_a_sum_of_sums(launched):
    """Checks the sum of a large value and many small ones, each of which it would not change."""
    q, k, v, _ = draw("float64", (3, 64), 16)
    q[...], v[:, :48], v[:, 48:] = 0.0, 1.0, 0.0
    v[:, -1] = 2.0**53
    o, _ = forward(q, k, v, family="sm80", config=SMALL["forward"])
    np.testing.assert_array_equal(o.get() * 64 - 2.0**53, 48.0)


@pytest.mark.sample(launched=("sm_90",), tile=BY_KEYS[:1], operation=("backward",))
@pytest.mark.parametrize("tile", BY_KEYS, ids=str)
@pytest.mark.parametrize("operation", ("backward", "backward_dkdv"))
def test_tiles_of_keys(launched, operation, tile):
    """Checks two query heads for a K/V head, and more key tiles than one, which all add to dQ."""
    method = "single_pass" if operation == "backward" else "two_pass"
    check(draw("float64", (70, 90), 48, (2, 1)), launched, method, SMALL | {operation: tile})


@pytest.mark.sample(launched=("sm_90",), pair=((136, 200),), method=("two_pass",))
@pytest.mark.parametrize("pair", ((256, 256), (192, 128), (64, 256), (256, 16), (136, 200)), ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_wide_heads(launched, method, pair):
    check(draw("float64", (37, 51), pair[0], head_dim_v=pair[1]), launched, method, WIDE, causal=True)


@pytest.mark.matrix
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_wide_heads_in_larger_tiles(launched, method, lengths):
    check(draw("float64", lengths, 136, head_dim_v=64), launched, method, LARGER_WIDE)


@pytest.mark.sample(launched=("sm_90",), head_dim=(160,))
@pytest.mark.parametrize("head_dim", (64, 160))
def test_scores_that_raise_the_row_shift(launched, head_dim):
    """Checks rows whose shift must move in some tiles, beside rows whose shift may stay."""
    tiles = SMALL if head_dim <= 128 else WIDE
    check(growing(draw("float64", (37, 90), head_dim), slice(3, 9)), launched, "two_pass", tiles)


def check_feature(feature: str, launched: list, method: str, tiles: dict, head_dim: int) -> None:
    sizes = {"batch": 2, "seqlen_q": 37, "seqlen_k": 53, "num_heads": 4, "num_heads_kv": 2, "head_dim": head_dim}
    inputs = tuple(place(x) for x in make_inputs("float64", **sizes))
    options = options_of(feature, "float64", sizes)
    options = {key: place(x) if isinstance(x, np.ndarray) else x for key, x in options.items()}
    check(inputs, launched, method, tiles, **options)


@pytest.mark.sample(launched=("sm_90",), method=("single_pass",), feature=("softcap", "dropout"))
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("method", METHODS)
def test_features(launched, method, feature):
    check_feature(feature, launched, method, SMALL, 16)


@pytest.mark.matrix
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("method", METHODS)
def test_features_of_wide_heads(launched, method, feature):
    check_feature(feature, launched, method, WIDE, 136)


@pytest.mark.matrix
@pytest.mark.parametrize("operation", SMALL)
def test_every_default_tile(monkeypatch, operation):
    """Checks each tile at the largest head_dim of its row for which it fits."""
    method = "single_pass" if operation == "backward" else "two_pass"
    device = DeviceInfo.named("sm_90")
    for row in SM80_FLOAT64.tiles[operation]:
        fitting = (
            head_dim
            for head_dim in range(row.head_dim, 0, -16)
            if SM80_FLOAT64.takes(Kernel(operation, "float64", head_dim, head_dim), row.tile, device)
        )
        lengths = (row.tile.b_r + 3, row.tile.b_c + row.tile.b_r // 2 + 5)
        with simulated_gpu(monkeypatch, "sm_90") as launched:
            inputs = draw("float64", lengths, next(fitting), (1, 1))
            check(inputs, launched, method, {operation: row.tile}, causal=True)


@pytest.mark.matrix
@pytest.mark.parametrize("method", METHODS)
def test_packed_sequences(launched, method):
    """Checks sequences without queries and without keys, and rows of none."""
    offsets = {"cu_seqlens_q": [3, 3, 24, 64, 64], "cu_seqlens_k": [0, 30, 30, 81, 90]}
    inputs = tuple(place(x[0]) for x in draw("float64", (70, 90), 32))
    check(inputs, launched, method, causal=True, **{name: place(np.array(x, "int32")) for name, x in offsets.items()})


@pytest.mark.matrix
@pytest.mark.parametrize("name", ("prefix_lm", "relative"))
@pytest.mark.parametrize("method", METHODS)
def test_maps_and_functions(launched, method, name):
    """Checks heads of one group with different tiles, and query tiles and key tiles without any."""
    tiles = np.random.default_rng(2).random((2, 4, 2, 3)) < 0.6
    tiles[0, :, 0], tiles[-1, ..., -1] = False, False
    options = {"block_mask": BlockMask(tiles, 45, 70, (32, 32))} | ready_made(2, 4, 45, 70, "float64")[name].options
    check(draw("float64", (45, 70), 16, (4, 2), batch=2), launched, method, **on_gpu(options))


@pytest.mark.sample(launched=("sm_90",), kind=("large scores",))
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_those_of_the_formulas(launched, kind):
    inputs = tuple(map(place, data(kind, 70, 16, "float64")))
    q, k, v, do = inputs
    promise, how = Promise(inputs, True, orders_of(kind)), {"causal": True, "family": "sm80", "config": SMALL}
    o, lse = forward(q, k, v, **how)
    for method in METHODS:
        gradients = backward(q, k, v, o, lse, do, method=method, **how)
        promise.check({"o": o, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))})


EXPONENTIALS = r"""
#include "sm80_float64/exponential.cuh"
extern "C" __global__ void exponentials(const double* x, double* y, double* by_table, int count) {
  extern __shared__ __align__(128) char smem[];
  fa2::sm80_float64::store_powers<256>(fa2::common::shared_address(smem), threadIdx.x);
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    y[i] = fa2::common::exp_accurate(x[i]);
    by_table[i] = fa2::sm80_float64::exp_by_table(x[i]);
  }
}
"""


@pytest.mark.parametrize("by_table", (False, True))
def test_exponentials(by_table):
    rng, memory = np.random.default_rng(0), Memory()
    payloads = np.array([0x7FF8000000000001, 0xFFF8000000000001], np.uint64).view(np.float64)
    edges = [0.0, -0.0, 5e-324, -707.9, 707.9, -708.0, -1e300, -np.inf, np.nan, *payloads]
    x = np.concatenate([edges, rng.uniform(-40, 0, 8000), rng.uniform(-1, 1, 4000), rng.uniform(-700, 700, 4000)])
    results = [memory.empty(x.shape, np.float64, name) for name in ("y", "by_table")]
    module = cuda_module(EXPONENTIALS, options=(f"-I{kernel_directory()}",))
    arguments = [memory.alloc(x, "x"), *results, len(x)]
    module.launch("exponentials", 1, 256, arguments, memory=memory, dynamic_smem=512)
    got = memory.read(results[by_table])
    special = [0.0, 0.0, 0.0, np.nan, np.nan, np.nan]
    np.testing.assert_array_equal(got[5 : len(edges)], special)
    got, x = np.delete(got, np.s_[5 : len(edges)]), np.delete(x, np.s_[5 : len(edges)])
    exact = np.exp(x.astype(np.longdouble))
    error = np.abs(got - exact) / np.spacing(exact.astype(np.float64))
    assert error.max() <= 1.25
