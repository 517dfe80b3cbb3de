"""On a GPU: every operation, family, dtype, head_dim and method against the float64 reference."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.feature_cases import HEAD_DIM_PAIRS

import fa2cupy
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.registry import FAMILIES
from fa2cupy.jit.cache import cached_kernel
from fa2cupy.plan.specs import default_specs
from fa2cupy.testing import Expectation, check_delta, make_inputs

cp = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

HALF, WIDE = ("float16", "bfloat16"), ("float32", "float64")
METHODS = ("single_pass", "two_pass")
HEAD_DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
LENGTHS = (
    (1, 1),
    (3, 3),
    (64, 1),
    (1, 147),
    (113, 203),
    (128, 217),
    (108, 256),
    (256, 512),
    (512, 256),
    (1023, 1024),
    (1024, 1023),
    (2048, 2048),
    (799, 3),
    (3, 799),
)
#: (num_heads, num_heads_kv): multi-head, grouped-query, multi-query
HEADS = ((2, 2), (4, 2), (3, 1))
#: Pairs of head_dims, each with a 16-bit dtype and with a wider one, and with each mask.
PAIRS = [
    (dtype, pair, (turn + place) % 2 == 0)
    for turn, pair in enumerate(HEAD_DIM_PAIRS)
    for place, dtype in enumerate((HALF[turn // 2 % 2], WIDE[turn // 2 % 2]))
]


@pytest.fixture(scope="module", autouse=True)
def _compiled_ahead():
    # Kernels are compiled on all cores; one after the other, in the order of the tests, they would take minutes.
    fa2cupy.precompile(dtypes=HALF, head_dims=HEAD_DIMS)
    fa2cupy.precompile(dtypes=WIDE, head_dims=(32, 59, 64, 111, 128, 256))
    device = DeviceInfo.current()
    kinds = [(dtype, head_dim, None, causal) for dtype in HALF for head_dim in HEAD_DIMS for causal in (False, True)]
    kinds += [(dtype, *pair, causal) for dtype, pair, causal in PAIRS]
    specs = {
        spec
        for dtype, head_dim, head_dim_v, causal in kinds
        for method, operation in ((None, "forward"), ("single_pass", "backward"), ("two_pass", "backward_dkdv"))
        for family in families_of(operation, dtype)
        for num_splits in ((1, 2) if head_dim_v and dtype in HALF else (1,))
        for spec in default_specs(
            device, dtype, head_dim, causal, method, family, num_splits=num_splits, head_dim_v=head_dim_v
        )
    }
    with ThreadPoolExecutor() as pool:
        list(pool.map(cached_kernel, specs))


def families_of(operation: str, dtype: str) -> list[str | None]:
    """Returns the families that the device can run, without those of float32 parts.

    The first is None, for the default family; the others are names. float32 has names only: `test_gpu_float32` has the
    families of parts.
    """
    device = DeviceInfo.current()
    found = [one for one in FAMILIES if one.supports(operation, dtype, device) and not one.multiplies_parts]
    names = [one.public_name for one in found]
    return names if dtype == "float32" else [None, *names[1:]]


def check(inputs: tuple, *, layout: str = "bshd", methods: tuple = METHODS, **options) -> Expectation:
    """Runs forward, delta and the backward by each method into NaN-filled arrays, and checks all results.

    Each is run with one block for a tile, and with three that share it where the family can.
    """
    q, k, v, do = inputs
    shared = {"layout": layout, **options}
    expected = Expectation(q, k, v, do, **shared)
    splits = (3, 1) if q.dtype.name in HALF else (1,)
    for family, num_splits in itertools.product(reversed(families_of("forward", q.dtype.name)), splits):
        out = expected.unwritten("o", "lse")
        o, lse = fa2cupy.forward(q, k, v, **shared, out=out, family=family, num_splits=num_splits)
        assert o is out[0] and lse is out[1]
        expected.check(spec=(family, num_splits), o=o, lse=lse)
    delta = fa2cupy.delta(o, do, layout=layout)
    check_delta(o, do, delta, layout=layout)
    for method in methods:
        given = delta if method == "two_pass" else None
        families = families_of("backward" if method == "single_pass" else "backward_dkdv", q.dtype.name)
        for family, num_splits in itertools.product(families, splits):
            out = expected.unwritten("dq", "dk", "dv")
            how = {"method": method, "family": family, "num_splits": num_splits}
            dq, dk, dv = fa2cupy.backward(q, k, v, o, lse, do, delta=given, out=out, **how, **shared)
            expected.check(spec=how, dq=dq, dk=dk, dv=dv)
    return expected


def draw(dtype: str, lengths: tuple, heads: tuple, head_dim: int, batch: int = 2, **options) -> tuple:
    """Returns inputs on the GPU."""
    return make_inputs(
        dtype,
        batch=batch,
        seqlen_q=lengths[0],
        seqlen_k=lengths[1],
        num_heads=heads[0],
        num_heads_kv=heads[1],
        head_dim=head_dim,
        xp=cp,
        **options,
    )


@pytest.mark.parametrize(("dtype", "pair", "causal"), PAIRS, ids=str)
def test_two_head_dims(dtype, pair, causal):
    for lengths, heads in (((300, 217), (4, 2)), ((129, 513), (3, 1))):
        check(draw(dtype, lengths, heads, pair[0], head_dim_v=pair[1]), causal=causal)


@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_is_within_the_baseline_error(dtype, head_dim, lengths, causal):
    heads = HEADS[(HEAD_DIMS.index(head_dim) + LENGTHS.index(lengths)) % 3]
    check(draw(dtype, lengths, heads, head_dim, batch=1 if max(lengths) > 1000 else 2), causal=causal)


@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("lengths", ((1, 1), (1, 147), (113, 203), (256, 130), (799, 3)), ids=str)
@pytest.mark.parametrize("head_dim", (32, 59, 64, 111, 128, 256))
@pytest.mark.parametrize("dtype", WIDE)
def test_ieee_arithmetic_is_right_to_its_last_digits(dtype, head_dim, lengths, causal):
    check(draw(dtype, lengths, HEADS[head_dim % 3], head_dim), causal=causal)


@pytest.mark.parametrize("heads", HEADS, ids=("mha", "gqa", "mqa"))
@pytest.mark.parametrize("layout", ("bshd", "bhsd"))
@pytest.mark.parametrize("dtype", (*HALF, *WIDE))
def test_head_groups_in_both_layouts(dtype, layout, heads):
    check(draw(dtype, (150, 170), heads, 64, layout=layout), layout=layout, causal=True)


@pytest.mark.parametrize("dtype", (*HALF, *WIDE))
@pytest.mark.parametrize("head_dim", (64, 128, 256))
@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
def test_lengths_around_the_tiles(dtype, head_dim, causal):
    device = DeviceInfo.current()
    tiles = {s.tile for method in (None, *METHODS) for s in default_specs(device, dtype, head_dim, causal, method)}
    for operation, method in (("forward", None), ("backward", "single_pass"), ("backward_dkdv", "two_pass")):
        for family in families_of(operation, dtype):
            tiles |= {s.tile for s in default_specs(device, dtype, head_dim, causal, method, family)}
    sizes = {size for tile in tiles for size in (tile.b_r, tile.b_c) if size > 1}
    for size in sorted(sizes):
        for length in (size - 1, size, size + 1, 3 * size + 7):
            check(draw(dtype, (length, length), (1, 1), head_dim, batch=1), causal=causal)


@pytest.mark.parametrize("operation", ("forward", "backward", "backward_dq", "backward_dkdv"))
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_every_kind_of_tile_gives_the_same_answer(dtype, operation):
    for family in families_of(operation, dtype):
        check_tiles(dtype, operation, family)


def check_tiles(dtype: str, operation: str, family: str | None) -> None:
    """Checks a handful of legal tiles, spread evenly over their list."""
    head_dim = 64
    legal = fa2cupy.legal_configs(operation, dtype=dtype, head_dim=head_dim, family=family)
    inputs = draw(dtype, (230, 190), (2, 1), head_dim)
    q, k, v, do = inputs
    expected = Expectation(q, k, v, do, causal=True)
    o, lse = fa2cupy.forward(q, k, v, causal=True)
    for tile in legal[:: max(1, len(legal) // 8)]:
        if operation == "forward":
            out = expected.unwritten("o", "lse")
            fa2cupy.forward(q, k, v, causal=True, config=tile, out=out, family=family)
            expected.check(spec=tile, o=out[0], lse=out[1])
        else:
            method = "single_pass" if operation == "backward" else "two_pass"
            out = expected.unwritten("dq", "dk", "dv")
            fa2cupy.backward(
                q, k, v, o, lse, do, causal=True, method=method, config={operation: tile}, out=out, family=family
            )
            expected.check(spec=tile, **dict(zip(("dq", "dk", "dv"), out, strict=True)))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_the_default_shares_tiles_and_can_be_repeated(dtype, head_dim):
    """Checks few heads and few queries: the sums of shares have the same bits in each run, without atomics."""
    for lengths, heads in (((1100, 1100), (8, 1)), ((5, 5000), (4, 2))):
        q, k, v, do = inputs = draw(dtype, lengths, heads, head_dim, batch=1)
        o, lse = fa2cupy.forward(q, k, v, causal=True)
        first = (o, lse, *fa2cupy.backward(q, k, v, o, lse, do, causal=True, deterministic=True))
        Expectation(*inputs, causal=True).check(**dict(zip(("o", "lse", "dq", "dk", "dv"), first, strict=True)))
        for _ in range(3):
            again = fa2cupy.forward(q, k, v, causal=True)
            again += fa2cupy.backward(q, k, v, o, lse, do, causal=True, deterministic=True)
            assert all(a.tobytes() == b.tobytes() for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("dtype", (*HALF, *WIDE))
@pytest.mark.parametrize("scale", (0.0, -0.2, 1.0, 3.0))
def test_any_finite_scale(dtype, scale):
    check(draw(dtype, (130, 150), (2, 2), 64), softmax_scale=scale, causal=True)


@pytest.mark.parametrize("dtype", (*HALF, *WIDE))
@pytest.mark.parametrize("causal", (False, True))
def test_large_slopes(dtype, causal):
    slopes = cp.array([98765.4, 0.1], "float64" if dtype == "float64" else "float32")
    check(draw(dtype, (130, 150), (2, 2), 64), alibi_slopes=slopes, causal=causal)


@pytest.mark.parametrize("dtype", (*HALF, *WIDE))
@pytest.mark.parametrize("head_dim", (64, 128, 256))
@pytest.mark.parametrize("magnitude", (4.0, 30.0))
def test_scores_that_keep_growing_leave_the_first_reference(dtype, head_dim, magnitude):
    """Scores grow from tile to tile (the loop runs from the last key to the first) beyond the first row shift."""
    q, k, v, do = draw(dtype, (200, 700), (2, 1), head_dim, batch=1)
    ramp = cp.linspace(magnitude, 0.01, 700, dtype="float32")[None, :, None, None]
    k = (k.astype("float32") * ramp).astype(k.dtype)
    check((q, k, v, do))


@pytest.mark.parametrize("dtype", (*HALF, *WIDE))
def test_rows_without_a_visible_key(dtype):
    q, k, v, do = draw(dtype, (200, 70), (2, 1), 64)
    o, lse = fa2cupy.forward(q, k, v, causal=True)
    assert (
        not cp.any(o[:, :130]) and bool(cp.all(lse[..., :130] == -cp.inf)) and bool(cp.all(cp.isfinite(lse[..., 130:])))
    )
    for method in METHODS:
        dq, dk, dv = fa2cupy.backward(q, k, v, o, lse, do, causal=True, method=method)
        assert not cp.any(dq[:, :130])
        assert bool(cp.all(cp.isfinite(dk.astype("float32")))) and bool(cp.all(cp.isfinite(dv.astype("float32"))))


@pytest.mark.parametrize("dtype", (*HALF, *WIDE))
@pytest.mark.parametrize("bad", (np.nan, np.inf))
@pytest.mark.parametrize("where", ("q", "k"))
def test_nan_and_infinity_come_out_as_nan(dtype, bad, where):
    q, k, v, do = draw(dtype, (140, 140), (1, 1), 64, batch=1)
    if where == "q":
        q[0, 100, 0, 3] = bad
        k[..., 3] = abs(
            k[..., 3]
        )  # scores of the row are then +inf or NaN; with -inf a finite number would be the right result
    else:
        k[0, 100, 0, 3] = bad
        q[..., 3] = abs(q[..., 3]) + cp.asarray(0.1).astype(q.dtype)
    o, lse = fa2cupy.forward(q, k, v)
    rows = slice(100, 101) if where == "q" else slice(None)
    assert bool(cp.all(cp.isnan(o[0, rows].astype("float32")))) and not bool(cp.any(cp.isfinite(lse[0, 0, rows])))
    if where == "q":
        rest = cp.delete(o[0, :, 0].astype("float32"), 100, axis=0)
        assert bool(cp.all(cp.isfinite(rest)))
    for method in METHODS:
        dq, _, _ = fa2cupy.backward(q, k, v, o, lse, do, method=method)
        assert bool(cp.all(cp.isnan(dq[0, rows].astype("float32"))))


@pytest.mark.parametrize("dtype", (*HALF, *WIDE))
@pytest.mark.parametrize("empty", ("batch", "heads", "seqlen_q", "seqlen_k"))
@pytest.mark.parametrize("method", METHODS)
def test_empty_sizes(dtype, empty, method):
    sizes = {"batch": 2, "heads": 2, "seqlen_q": 5, "seqlen_k": 7, empty: 0}
    dtype = make_inputs(dtype)[0].dtype
    q = cp.ones((sizes["batch"], sizes["seqlen_q"], sizes["heads"], 64), dtype)
    k = cp.ones((sizes["batch"], sizes["seqlen_k"], sizes["heads"], 64), dtype)
    o, lse = fa2cupy.forward(q, k, k, causal=True)
    assert o.shape == q.shape and lse.shape == (sizes["batch"], sizes["heads"], sizes["seqlen_q"])
    dq, dk, dv = fa2cupy.backward(q, k, k, o, lse, q, causal=True, method=method)
    assert dq.shape == q.shape and dk.shape == dv.shape == k.shape
    if empty == "seqlen_k":
        assert not cp.any(o) and bool(cp.all(lse == -cp.inf)) and not cp.any(dq)
    if empty == "seqlen_q":
        assert not cp.any(dk) and not cp.any(dv)


@pytest.mark.parametrize("rank", (2, 3))
@pytest.mark.parametrize("layout", ("bshd", "bhsd"))
@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_axes_left_out_give_results_of_the_same_rank(dtype, layout, rank):
    inputs = draw(dtype, (90, 110), (1, 1) if rank == 2 else (4, 2), 64, batch=1, layout=layout)
    inputs = tuple(x[0] if rank == 3 else x.reshape(-1, 64) for x in inputs)
    check(inputs, layout=layout, causal=True)


@pytest.mark.large
@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_sizes_beyond_32_bit_offsets(dtype):
    """More than 2**31 elements in q, o, do and dq; rows of a full attention are checked at the largest offsets."""
    heads, head_dim, seqlen_k = 16, 128, 40
    seqlen_q = 2**31 // (heads * head_dim) + 100
    if cp.cuda.Device().mem_info[0] < (34 if dtype == "float16" else 60) * 2**30:
        pytest.skip("not enough free device memory")
    k, v = draw(dtype, (seqlen_k, seqlen_k), (heads, heads), head_dim, batch=1)[1:3]
    few = draw(dtype, (128, 1), (heads, heads), head_dim, batch=1)
    q, do = (cp.tile(x, (1, seqlen_q // 128 + 1, 1, 1))[:, :seqlen_q] for x in (few[0], few[3]))
    assert q.size > 2**31
    o, lse = fa2cupy.forward(q, k, v)
    dq, _, _ = fa2cupy.backward(q, k, v, o, lse, do)
    for rows in (slice(0, 128), slice(seqlen_q - 128, None)):
        some = [cp.ascontiguousarray(x[:, rows]) for x in (q, do, o, dq)]
        expected = Expectation(some[0], k, v, some[1])
        expected.check(o=some[2], lse=cp.ascontiguousarray(lse[..., rows]), dq=some[3])
    cp.get_default_memory_pool().free_all_blocks()
