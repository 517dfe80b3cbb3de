"""Key tiles that several blocks share, executed without a GPU.

A share has some heads of a group, or a range of queries, or no step at all; all shares are added up.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cupy")

from support.fake_cupy import place
from support.fake_gpu import backward
from support.launch_record import stage_values
from support.simulated_problems import draw, small_tiles
from support.simulator import simulated_gpu
from support.strided_arrays import gapped

from fa2cupy import TileConfig, reference
from fa2cupy.testing import Expectation

pytestmark = pytest.mark.simulated

METHODS = ("single_pass", "two_pass")
#: (family, head_dim, lengths): several tiles of each family's kernels.
SM80, SM80_WIDE, HOPPER = ("sm80", 64, (70, 90)), ("sm80", 160, (70, 90)), ("sm90", 64, (300, 200))
SMALL_OF_HOPPER = {"backward_dq": TileConfig(128, 32, 12, 2), "backward_dkdv": TileConfig(32, 128, 12, 2)}
HOPPER_TRANSPOSED, HOPPER_DIVIDED = ("sm90", 128, (200, 150)), ("sm90", 256, (140, 100))


def tiles_of(family: str, head_dim: int) -> dict[str, TileConfig] | None:
    """Returns small tiles for sm80 and for narrow heads of sm90, and None, for the default ones, for others."""
    if family == "sm80":
        return small_tiles("float16", head_dim)
    return SMALL_OF_HOPPER if head_dim <= 64 else None


def check(
    kernels: tuple,
    method: str,
    num_splits: int,
    *,
    heads=(2, 1),
    batch=1,
    dtype="float16",
    out=None,
    tiles: dict[str, TileConfig] | None = None,
    **problem,
) -> list[np.ndarray]:
    """Computes gradients from the reference's o and lse, checks them against float64 and returns them."""
    family, head_dim, lengths = kernels
    q, k, v, do = draw(dtype, lengths, head_dim, heads, batch=batch)
    if "cu_seqlens_q" in problem:
        q, k, v, do = (place(x[0]) for x in (q, k, v, do))
    expected = Expectation(q, k, v, do, **problem)
    o, lse = reference.forward(q, k, v, **problem)
    o, lse = place(o.astype(q.dtype)), place(lse.astype(np.float32))
    options = {
        "config": tiles or tiles_of(family, head_dim),
        "family": family,
        "num_splits": num_splits,
        "method": method,
    }
    if out is not None:
        out = tuple(out(np.full_like(x, np.nan)) for x in (q, k, v))
    gradients = backward(q, k, v, o, lse, do, out=out, **options, **problem)
    expected.check(spec=(kernels, method, num_splits), **dict(zip(("dq", "dk", "dv"), gradients, strict=True)))
    return list(gradients)


@pytest.fixture
def launched(monkeypatch):
    with simulated_gpu(monkeypatch) as stages:
        yield stages


@pytest.mark.sample(kernels=(SM80, HOPPER), num_splits=(3,), method=("single_pass",))
@pytest.mark.parametrize(
    ("kernels", "num_splits", "causal"),
    (
        (SM80, 3, True),
        (SM80, 16, False),
        (SM80_WIDE, 3, True),
        (HOPPER, 3, True),
        (HOPPER, 16, False),
        (HOPPER_TRANSPOSED, 3, True),
        (HOPPER_DIVIDED, 3, False),
    ),
    ids=str,
)
@pytest.mark.parametrize("method", METHODS)
def test_blocks_share_key_tiles(launched, kernels, method, num_splits, causal):
    """Checks shares of key tiles; 16 are more than the last key tiles have steps."""
    check(kernels, method, num_splits, causal=causal)
    tiled = next(stage for stage in launched if stage.spec.is_split)
    summed = launched[-1]
    assert summed.spec.operation == ("convert_gradients" if method == "single_pass" else "sum_dkdv")
    assert stage_values(tiled)["num_splits"] == num_splits
    assert stage_values(summed)["num_copies"] == (1 if method == "single_pass" else num_splits)


@pytest.mark.sample(tile=(TileConfig(32, 48, 6, 2),), method=("two_pass",))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tile", (TileConfig(32, 48, 6, 2), TileConfig(32, 16, 2, 2)), ids=str)
def test_key_tiles_that_are_no_multiple_of_32(launched, tile, method):
    """Checks sums whose blocks of 32 rows are cut by the end of a tile, and by the end of the keys."""
    config = dict.fromkeys(("backward", "backward_dkdv"), tile)
    check(("sm80", 16, (40, 2 * tile.b_c + 34)), method, 3, tiles=config, causal=True)


@pytest.mark.matrix
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kernels", (SM80, HOPPER_DIVIDED), ids=str)
def test_shares_of_groups_of_heads_and_batches(launched, kernels, method):
    """Checks two shares of three heads: the second begins in the middle of a head."""
    check(kernels, method, 2, heads=(6, 2), batch=2, causal=True, dtype="bfloat16", out=gapped)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kernels", "window"),
    ((SM80, (30, 5)), (SM80, (None, 17)), (SM80, (9, None)), (HOPPER, (9, None)), (HOPPER_TRANSPOSED, (30, 5))),
    ids=str,
)
@pytest.mark.parametrize("method", METHODS)
def test_shares_under_windows(launched, kernels, method, window):
    check(kernels, method, 3, window=window)


@pytest.mark.sample(kernels=(SM80,), method=("two_pass",))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kernels", (SM80, HOPPER), ids=str)
def test_shares_of_packed_sequences(launched, kernels, method):
    """Checks sequences with fewer keys than queries, without a query, and without a key; rows at the end are unused."""
    ends_q, ends_k = [0, 50, 50, 53, 68], [0, 20, 61, 61, 85]
    offsets = {"cu_seqlens_q": place(np.array(ends_q, "int32")), "cu_seqlens_k": place(np.array(ends_k, "int32"))}
    check(kernels, method, 4, causal=True, **offsets)


@pytest.mark.sample(kernels=(SM80,), method=("single_pass",))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kernels", (SM80, HOPPER), ids=str)
def test_the_sum_of_shares_scales_dv_under_dropout(launched, kernels, method):
    check(kernels, method, 2, causal=True, dropout_p=0.4, seed=7)


@pytest.mark.sample(kernels=(SM80,))
@pytest.mark.parametrize("kernels", (SM80, HOPPER), ids=str)
def test_two_pass_is_reproducible_whatever_the_order_of_warps(monkeypatch, kernels):
    found = []
    for seed in (1, 2):
        with simulated_gpu(monkeypatch, seed=seed):
            found.append(check(kernels, "two_pass", 3, causal=True))
    for first, second in zip(*found, strict=True):
        assert first.tobytes() == second.tobytes()


@pytest.mark.matrix
@pytest.mark.parametrize("kernels", (SM80, HOPPER, HOPPER_TRANSPOSED), ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_shares_with_a_bias(launched, kernels, method):
    """Checks rows aligned to 16 bytes, which Hopper's kernels copy a step ahead, from the first step of a share on."""
    lengths = (kernels[2][0], kernels[2][1] // 8 * 8)
    bias = np.random.default_rng(3).standard_normal((1, 3, *lengths)).astype("float16")
    check((*kernels[:2], lengths), method, 2, heads=(3, 1), bias=place(bias))
