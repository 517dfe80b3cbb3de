"""Decoding by its kernels, executed without a GPU."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

pytest.importorskip("cupy")

from support.decode_cases import BORDERS, DOMINANT_BLOCK, DOMINANT_WARP, WHOLE_PAGES, WINDOWS, Case, check
from support.fake_cupy import place
from support.fake_gpu import decode as decode_on_gpu
from support.fake_gpu import fake_gpu, forward
from support.launch_record import stage_values
from support.simulator import simulated_gpu
from support.strided_arrays import packed

import fa2cupy
from fa2cupy.errors import UnsupportedProblemError
from fa2cupy.families.device import DeviceInfo
from fa2cupy.testing import Expectation, make_inputs

pytestmark = pytest.mark.simulated

H100 = DeviceInfo.named("sm_90")
#: A device with so few blocks that each has steps of several jobs, and jobs are cut.
FEW = dataclasses.replace(H100, multiprocessors=2)
#: A device with more blocks than parts that are merged at once.
MANY = dataclasses.replace(DeviceInfo.named("sm_80"), multiprocessors=23)
#: One with seven clusters of eight blocks.
CLUSTERS = dataclasses.replace(H100, multiprocessors=64)


def on_device(q, k_cache, v_cache, lengths, view=place, **options):
    """Runs `decode` of NumPy arrays on the simulated device. New rows come back in the caches."""
    caches = view(k_cache), view(v_cache)
    if np.shares_memory(k_cache, v_cache):
        caches = caches[0], caches[0][..., : v_cache.shape[-1]]
    placed = {name: place(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    if "softmax_scale" in placed:
        placed["scale"] = placed.pop("softmax_scale")
    if "v" in placed and np.shares_memory(options["k"], options["v"]):
        placed["v"] = placed["k"][..., : v_cache.shape[-1]]
    results = decode_on_gpu(view(q), *caches, place(lengths), **placed)
    k_cache[...], v_cache[...] = caches
    return results


@pytest.fixture
def launched(monkeypatch):
    with simulated_gpu(monkeypatch, FEW) as stages:
        yield stages
        assert {stage.spec.operation for stage in stages} <= {"decode"}


@pytest.mark.sample(dtype=("float16",), pair=((40, 72),))
@pytest.mark.parametrize("pair", ((40, 72), (8, 136), (136, 8), (128, 64), (64, 128), (192, 128), (256, 128)), ids=str)
@pytest.mark.parametrize("dtype", ("float16", "float32", "float64"))
def test_v_with_a_head_dim_of_its_own(launched, dtype, pair):
    sizes = {"head_dim": pair[0], "head_dim_v": pair[1]}
    check(on_device, Case(dtype, (0, 1, 65, 200), heads=(2, 1), page_size=16, num_new=1, **sizes))
    check(functools.partial(on_device, view=packed), Case(dtype, (17, 130), heads=(6, 2), seqlen_q=3, **sizes))
    assert {(stage.spec.head_dim, stage.spec.head_dim_v) for stage in launched} == {pair}


#: Pairs beyond 256 columns, in the last of which v is the first columns of k.
WIDE_PAIRS = ((512, 512), (320, 264), (512, 64), (64, 512), (576, 512))


@pytest.mark.sample(dtype=("bfloat16",), pair=((576, 512),))
@pytest.mark.parametrize("pair", WIDE_PAIRS, ids=str)
@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32"))
def test_more_than_256_columns(launched, dtype, pair):
    sizes = {"head_dim": pair[0], "head_dim_v": pair[1] if pair[1] != pair[0] else None}
    check(on_device, Case(dtype, (0, 1, 65, 200), heads=(20, 1), page_size=16, num_new=1, **sizes))
    options = {"window": (100, 0), "sink": True, "alibi_slopes": "batch"}
    check(on_device, Case(dtype, (17, 130), heads=(6, 2), seqlen_q=3, layout="bhsd", **sizes), **options)
    assert {(stage.spec.head_dim, stage.spec.head_dim_v or stage.spec.head_dim) for stage in launched} == {pair}


#: Calls of latent attention, and the rows, warps and cluster of their tiles; everyday tests take the first three.
LATENT = {"head_dim": 576, "head_dim_v": 512}
LATENT_CALLS = (
    (Case("bfloat16", (70, 0, 130), heads=(128, 1), page_size=48, num_new=3, **LATENT), {}, FEW, (64, 8, 1)),
    (Case("float16", (17, 330), heads=(16, 1), num_new=1, **LATENT), {"sink": True}, H100, (16, 8, 8)),
    (Case("bfloat16", (5, 0, 200), heads=(16, 1), seqlen_q=2, num_new=2, **LATENT), {"causal": True}, FEW, (32, 12, 1)),
    (Case("bfloat16", (17, 200), heads=(16, 1), layout="bhsd", **LATENT), {}, FEW, (16, 12, 1)),
    (
        Case("float16", (9, 330), heads=(26, 2), seqlen_q=3, page_size=16, **LATENT),
        {"window": (100, 0), "sink": True, "alibi_slopes": "batch"},
        FEW,
        (64, 8, 1),
    ),
    (Case("bfloat16", (1300,), heads=(40, 1), **LATENT), {}, CLUSTERS, (64, 8, 8)),
    (Case("bfloat16", (600, 20), heads=(24, 2), seqlen_q=4, **LATENT), {"window": (90, 0)}, CLUSTERS, (64, 8, 8)),
)


@pytest.mark.sample(case=[case for case, *_ in LATENT_CALLS[:3]])
@pytest.mark.parametrize(("case", "options", "device", "wanted"), LATENT_CALLS, ids=lambda one: str(one)[:60])
def test_latent_attention_on_hopper(monkeypatch, case, options, device, wanted):
    with simulated_gpu(monkeypatch, device, seed=1) as launched:
        check(on_device, case, **options)
    specs = {stage.spec for stage in launched}
    assert {spec.folder for spec in specs} == {"sm90_latent"}
    assert {(spec.tile.b_r, spec.tile.num_warps, spec.tile.cluster) for spec in specs} == {wanted}


#: Calls, and the cluster and the keys of their tiles; everyday tests take the first four.
CLUSTERED = (
    (Case("bfloat16", (1,), head_dim=128, heads=(8, 1)), {}, (8, 128)),
    (Case("float16", (37, 0, 300, 129), head_dim=40, heads=(4, 2), page_size=16, num_new=3), {}, (2, 128)),
    (Case("bfloat16", (3333,), head_dim=64, heads=(8, 1), seqlen_q=4, num_new=4), {"causal": True}, (8, 64)),
    (
        Case("float16", (700,), head_dim=24, heads=(3, 1), seqlen_q=3, page_size=48, num_new=2),
        {"window": (100, 0), "sink": True, "softcap": 3.0, "alibi_slopes": "batch"},
        (8, 128),
    ),
    (Case("bfloat16", (2100,), head_dim=128, heads=(8, 1)), {}, (8, 64)),
    (Case("bfloat16", (1000,), head_dim=64, head_dim_v=128, heads=(16, 1), seqlen_q=2), {"sink": True}, (8, 128)),
    (Case("bfloat16", (1900, 400), heads=(8, 2), seqlen_q=7, num_new=7), {"causal": True}, (8, 128)),
)


@pytest.mark.sample(case=[case for case, *_ in CLUSTERED[:4]])
@pytest.mark.parametrize("case, options, wanted", CLUSTERED, ids=str)
def test_clusters_that_divide_few_jobs(monkeypatch, case, options, wanted):
    with simulated_gpu(monkeypatch, CLUSTERS, seed=1) as launched:
        check(on_device, case, **options)
    assert {(stage.spec.tile.cluster, stage.spec.tile.b_c) for stage in launched} == {wanted}


@pytest.mark.sample(dtype=("bfloat16",), head_dim=(40,))
@pytest.mark.parametrize("head_dim", (8, 16, 40, 64, 96, 128, 160, 256))
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_tensor_cores_at_every_head_dim(launched, dtype, head_dim):
    page_size = 16 if head_dim % 64 else None
    for case in (
        Case(dtype, (0, 1, 63, 64, 65, 200), head_dim=head_dim, heads=(2, 1), page_size=page_size, num_new=1),
        Case(dtype, (17, 130), head_dim=head_dim, heads=(6, 2), seqlen_q=3, page_size=page_size),
    ):
        check(on_device, case)


@pytest.mark.sample(head_dim=(59,))
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("float32", d) for d in (1, 32, 59, 128, 250)] + [("float64", d) for d in (32, 111, 256)]
)
def test_ieee_arithmetic_at_every_head_dim(launched, dtype, head_dim):
    for case in (
        Case(dtype, (0, 1, 31, 33, 90), head_dim=head_dim, heads=(2, 1), page_size=16, num_new=1),
        Case(dtype, (17, 80), head_dim=head_dim, heads=(6, 2), seqlen_q=3, num_new=2),
    ):
        check(on_device, case)


#: The last head_dim with two tiles of keys and values in shared memory, by GPU and dtype.
LAST_HEAD_DIMS = {
    ("sm_75", "float32"): 192, ("sm_75", "float64"): 96, ("sm_80", "float16"): 256, ("sm_80", "float32"): 256,
    ("sm_80", "float64"): 256, ("sm_86", "float16"): 256, ("sm_86", "float32"): 256, ("sm_89", "float64"): 160,
}  # fmt: skip


def around_the_last() -> list[tuple[str, str, int]]:
    """Returns the last head_dim of each GPU and dtype, the next one, and one of the smaller ones in turn."""
    head_dims = (64, 96, 128, 160, 192, 256)
    cases = []
    for i, ((arch, dtype), last) in enumerate(LAST_HEAD_DIMS.items()):
        place = head_dims.index(last)
        cases += [(arch, dtype, head_dim) for head_dim in (*head_dims[place : place + 2], head_dims[i % place])]
    return cases


@pytest.mark.matrix
@pytest.mark.parametrize(("arch", "dtype", "head_dim"), around_the_last())
def test_tiles_for_less_shared_memory(monkeypatch, arch, dtype, head_dim):
    device = dataclasses.replace(DeviceInfo.named(arch), multiprocessors=3)
    case = Case(dtype, (0, 200), head_dim=head_dim, heads=(6, 2), seqlen_q=3, num_new=1)
    with simulated_gpu(monkeypatch, device) as launched:
        if head_dim <= LAST_HEAD_DIMS[arch, dtype]:
            check(on_device, case)
            assert {stage.spec.arch for stage in launched} == {arch}
        else:
            wanted = f"bytes of shared memory for a block; head_dim up to {LAST_HEAD_DIMS[arch, dtype]} has one$"
            with pytest.raises(UnsupportedProblemError, match=wanted):
                check(on_device, case)


@pytest.mark.sample(num_new=(21,), layout=("bshd",))
@pytest.mark.parametrize("page_size", [None, 16, 48])
@pytest.mark.parametrize("num_new", [0, 1, 21])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_appended_rows_and_pages(launched, layout, num_new, page_size):
    """Checks new rows behind those of the cache: within 16 keys of a warp, at their end and across several tiles."""
    lengths = (0, 15, 16, 60, 64, 100)
    check(on_device, Case("float16", lengths, num_new=num_new, page_size=page_size, layout=layout, seqlen_q=2))


@pytest.mark.matrix
@pytest.mark.parametrize(("seqlen_q", "heads"), [(1, (8, 8)), (4, (8, 1)), (5, (8, 1)), (9, (4, 1)), (17, (4, 2))])
@pytest.mark.parametrize("causal", [False, True])
def test_groups_of_rows(launched, causal, seqlen_q, heads):
    """Checks one tile of 16 or 32 rows, whole and ragged, several tiles, and sequences with fewer keys than queries."""
    case = Case("float16", (0, 3, 70, 130), seqlen_q=seqlen_q, heads=heads, num_new=1)
    check(on_device, case, causal=causal)


@pytest.mark.sample(dtype=("float16",), options=WINDOWS[2:4])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("options", WINDOWS, ids=str)
def test_windows_and_lengths_around_borders_of_tiles(launched, dtype, options):
    check(on_device, dataclasses.replace(BORDERS, dtype=dtype), **options)


@pytest.mark.parametrize("num_new", [0, 1])
def test_nothing_is_read_behind_the_last_whole_page(launched, num_new):
    """Neither its rows nor the entries of the block table."""
    check(on_device, dataclasses.replace(WHOLE_PAGES, num_new=num_new))


@pytest.mark.sample(dtype=("float16",))
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_each_part_of_a_merge_in_turn_is_the_dominant_one(monkeypatch, dtype):
    warps, blocks = DOMINANT_WARP, DOMINANT_BLOCK
    if dtype == "float32":  # whose tiles have 4 warps of 16 keys
        warps = dataclasses.replace(warps, dtype=dtype, lengths=(64,) * 4, dominant=16)
        blocks = dataclasses.replace(blocks, dtype=dtype, lengths=(256,) * 4, dominant=64)
    with simulated_gpu(monkeypatch, MANY) as launched:
        check(on_device, warps)
        check(on_device, blocks)
        assert launched[0].spec.tile.b_c == len(warps.lengths) * warps.dominant
        assert launched[1].spec.tile.b_c == blocks.dominant and launched[1].blocks == 16


EVERYTHING = {"window": (90, 0), "softcap": 3.0, "alibi_slopes": "batch", "sink": True}


@pytest.mark.sample(dtype=("float16",), options=(EVERYTHING,))
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    "options",
    [
        {"window": (10, None), "causal": False},
        {"window": (3, 1), "causal": False},
        {"window": (70, 70)},
        {"softcap": 2.0},
        {"alibi_slopes": "head"},
        {"alibi_slopes": "batch", "causal": False},
        {"sink": True},
        {"softmax_scale": -0.3},
        {"softmax_scale": -0.3, "softcap": 2.0, "alibi_slopes": "head"},
        EVERYTHING,
    ],
    ids=str,
)
def test_features(launched, dtype, options):
    check(on_device, Case(dtype, (0, 5, 200), seqlen_q=3, num_new=1, page_size=16), **options)
    check(on_device, Case(dtype, (0, 3, 64, 300), seqlen_q=6, heads=(6, 1)), **options)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_merges_in_two_levels(monkeypatch, dtype):
    """Checks jobs with more blocks than parts that are merged at once, in groups with a smaller last one."""
    with simulated_gpu(monkeypatch, MANY) as launched:
        lengths = (22 * 128 - 3 if dtype == "float16" else 37 * 32 - 3,)
        head_dim = 128 if dtype == "float16" else 160
        check(on_device, Case(dtype, lengths, heads=(2, 1), head_dim=head_dim), sink=True)
        check(on_device, Case(dtype, (lengths[0] - 70, 60), heads=(2, 1), head_dim=head_dim, seqlen_q=2), sink=True)
        assert all(stage.blocks > 16 for stage in launched)


@pytest.mark.sample(seed=(1,))
@pytest.mark.parametrize("seed", [None, 1])
def test_a_block_ends_the_last_group_of_a_job_and_begins_the_next_job(monkeypatch, seed):
    """Groups of ceil(sqrt(21)) = 5 of the 21 parts would leave the last part in a group of its own."""
    device = dataclasses.replace(H100, multiprocessors=12)
    with simulated_gpu(monkeypatch, device, seed=seed) as launched:
        check(on_device, Case("float32", (41 * 64 - 3, 4 * 64 - 5), heads=(1, 1), head_dim=59))
        assert [stage.blocks for stage in launched] == [24]


@pytest.mark.sample(case=[0])
@pytest.mark.parametrize("case", range(4))
def test_few_jobs_of_several_lengths_have_stretches_of_their_own(monkeypatch, case):
    """At most half as many jobs as blocks, cut where a longest stretch fits, of lengths with and without remainders."""
    cases = (
        (Case("float16", (700, 0, 41, 1029), heads=(4, 2), num_new=2), {}),
        (Case("float16", (1, 2500, 3), heads=(8, 1), head_dim=64, page_size=16), {}),
        (Case("bfloat16", (900, 300), heads=(6, 2), seqlen_q=7, head_dim=128), {"causal": True, "window": (400, 0)}),
        (Case("float32", tuple(range(5, 3000, 700)), heads=(2, 1)), {"sink": True}),
    )
    with simulated_gpu(monkeypatch, MANY, seed=1):
        check(on_device, cases[case][0], **cases[case][1])


@pytest.mark.matrix
@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_jobs_have_small_blocks(launched, head_dim):
    check(on_device, Case("float16", (60, 70, 3, 200), heads=(4, 2), head_dim=head_dim))
    check(on_device, Case("float16", (200,), heads=(4, 2), head_dim=head_dim))
    assert [stage.spec.tile.num_warps for stage in launched] == [4, 8]


@pytest.mark.matrix
def test_without_counters_no_job_is_cut(monkeypatch):
    """Calls captured after all counters are taken have none: each block has the jobs that begin in its stretch."""
    for device in (FEW, MANY):
        with monkeypatch.context() as patch, simulated_gpu(patch, device, with_counter=False):
            check(on_device, Case("float16", (0, 5, 200, 64), page_size=16, num_new=1))
            check(on_device, Case("float16", (700, 3), heads=(1, 1)))


@pytest.mark.sample(seed=(0,))
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_warps(monkeypatch, seed):
    with simulated_gpu(monkeypatch, FEW, seed=seed):
        check(on_device, Case("float16", (0, 1, 200, 90), num_new=1, page_size=16, seqlen_q=2))
        check(on_device, Case("float32", (0, 1, 150), num_new=1, head_dim=59))


@pytest.mark.matrix
def test_results_do_not_depend_on_other_sequences_order_of_blocks(monkeypatch):
    """Checks that two launches with different orders of blocks have the same bits."""
    case = Case("bfloat16", (200, 90, 333), num_new=1, page_size=16)
    found = []
    for seed in (None, 5):
        with monkeypatch.context() as patch, simulated_gpu(patch, FEW, seed=seed):
            q, *caches, lengths, options = case.arguments()
            found.append(on_device(q, *caches, lengths, **options))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one.view(f"u{one.itemsize}"), other.view(f"u{other.itemsize}"))


@pytest.mark.sample(dtype=("float16",))
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_one_split_gives_a_sequence_the_same_bits_beside_any_others(monkeypatch, dtype):
    """Where jobs are cut, the cuts move: that gives other bits."""
    case = Case(dtype, (333, 64, 200), num_new=1, page_size=16, heads=(4, 1))
    q, k_cache, v_cache, lengths, options = case.arguments()
    table = options.pop("block_table")

    def found(sequences, device, num_splits):
        rows = {name: x[sequences] for name, x in options.items()} | {"block_table": table[sequences]}
        with monkeypatch.context() as patch, simulated_gpu(patch, device) as launched:
            caches = k_cache.copy(), v_cache.copy()
            o, _ = on_device(q[sequences], *caches, lengths[sequences], num_splits=num_splits, **rows)
        return o[0].tobytes(), launched[0].spec.tile

    others = ((slice(0, 1), FEW), (slice(0, 3), FEW), (slice(0, 3), MANY))
    assert len({found(*other, num_splits=1) for other in others}) == 1
    assert len({found(*other, num_splits=None) for other in others}) > 1


def test_lengths_and_pages_are_clamped(monkeypatch):
    """The host cannot check them, so kernels must not read or write outside the cache for any values."""
    with simulated_gpu(monkeypatch, FEW):
        case = Case("float16", (40, 79, 0), num_new=1, page_size=16, capacity=80)
        clamped = check(on_device, case)
        q, k_cache, v_cache, _, options = case.arguments()
        given = on_device(q, k_cache, v_cache, np.array([40, 1000, -7], "int32"), **options)
        for one, other in zip(clamped, given, strict=True):
            np.testing.assert_array_equal(one, other)
        q, k_cache, v_cache, lengths, options = Case("float16", (40, 64, 0), page_size=16).arguments()
        options["block_table"][:] = [[10**6], [-5], [0]]
        on_device(q, np.zeros_like(k_cache), np.zeros_like(v_cache), lengths, **options)


def test_arrays_between_others(launched):
    check(lambda *a, **o: on_device(*a, view=packed, **o), Case("float16", (5, 70), num_new=1))


def test_arrays_on_odd_addresses(launched):
    """q and new rows are copied; a cache that is not aligned is an error."""

    def shifted_by_one(*arrays, **options):
        q, k_cache, v_cache, lengths = map(place, arrays)
        wide = {name: place(np.zeros((*x.shape[:-1], 40), x.dtype))[..., 3:35] for name, x in options.items()}
        odd_q = place(np.zeros((*q.shape[:-1], 40), q.dtype))[..., 3:35]
        odd_q[...] = q
        for name, x in options.items():
            wide[name][...] = x
        odd_lengths = place(np.repeat(lengths, 2))[::2]
        results = decode_on_gpu(odd_q, k_cache, v_cache, odd_lengths, **wide)
        arrays[1][...], arrays[2][...] = k_cache, v_cache
        with pytest.raises(
            ValueError, match="^v_cache: expected contiguous rows that start on 16 bytes, because a cache"
        ):
            odd = place(np.zeros((*v_cache.shape[:-1], 40), q.dtype))[..., 3:35]
            decode_on_gpu(q, k_cache, odd, lengths)
        return results

    check(shifted_by_one, Case("float16", (5, 70), num_new=1))


def test_out(launched):
    case = Case("float16", (5, 70))
    q, k_cache, v_cache, lengths, _ = case.arguments()
    out = place(np.empty_like(q)), place(np.empty((2, 4, 1), "float32"))
    o, lse = decode_on_gpu(*map(place, (q, k_cache, v_cache, lengths)), out=out)
    assert o.ctypes.data == out[0].ctypes.data and lse.ctypes.data == out[1].ctypes.data


def test_empty_calls(launched):
    for case in (Case("float16", ()), Case("float16", (3, 4), seqlen_q=0, num_new=1), Case("float16", (0, 0))):
        check(on_device, case)


def test_a_head_dim_whose_rows_are_not_aligned_is_refused(launched):
    q, k_cache, v_cache, lengths, _ = Case("float16", (3,), head_dim=36).arguments()
    with pytest.raises(
        fa2cupy.UnsupportedProblemError, match="^k_cache: for float16 a head_dim that is a multiple of 8"
    ):
        decode_on_gpu(*map(place, (q, k_cache, v_cache, lengths)))


def test_the_grid_does_not_depend_on_lengths(launched):
    """The whole launch is the same, so that a graph that has captured it may be launched with other lengths."""
    for lengths in ((1, 2), (60, 64)):
        q, k_cache, v_cache, given, _ = Case("float16", lengths, capacity=64).arguments()
        on_device(q, k_cache, v_cache, given)
    one, other = launched
    assert one == other
    assert stage_values(one)["seqlen_k"] == 64


# -------------------------------------------------------------------------------------------- forwards with few queries


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_forward_with_few_queries_runs_the_same_kernel(launched, dtype):
    for lengths, heads, head_dim_v, options in (
        ((1, 200), (4, 1), 64, {"causal": True}),
        ((4, 130), (4, 1), 40, {"causal": True, "layout": "bhsd"}),
        ((3, 70), (2, 2), 64, {"window": (30, 0)}),
        ((5, 2), (2, 1), 64, {"causal": True}),
        ((2, 0), (2, 1), 64, {}),
    ):
        layout = options.get("layout", "bshd")
        sizes = {"seqlen_q": lengths[0], "seqlen_k": lengths[1], "num_heads": heads[0], "num_heads_kv": heads[1]}
        q, k, v, _ = (
            place(x) for x in make_inputs(dtype, batch=2, head_dim=64, head_dim_v=head_dim_v, layout=layout, **sizes)
        )
        o, lse = forward(q, k, v, **options)
        Expectation(q, k, v, **options).check(o=o, lse=lse)
    assert [stage.spec.head_dim_v for stage in launched] == [None, 40, None, None, None]


def test_other_forwards_do_not(monkeypatch):
    """Checks many queries, features that the kernel does not have, packed sequences, and choices of the caller."""
    with fake_gpu(monkeypatch, run=lambda launch: None) as launched:
        for lengths, options in (
            ((33, 40), {}),
            ((3, 40), {"mask": place(np.ones((3, 40), bool))}),
            ((3, 40), {"dropout_p": 0.5, "seed": 1}),
            ((3, 40), {"num_splits": 2}),
            ((3, 40), {"family": "sm80"}),
        ):
            q, k, v, _ = (place(x) for x in make_inputs("float16", seqlen_q=lengths[0], seqlen_k=lengths[1]))
            forward(q, k, v, **options)
        q, k, v, _ = (place(x[0]) for x in make_inputs("float16", seqlen_q=3, seqlen_k=40))
        ends = {"cu_seqlens_q": 3, "cu_seqlens_k": 40}
        forward(q, k, v, **{name: place(np.array([0, end], "int32")) for name, end in ends.items()})
    assert launched[-1].spec.features == ("cu_seqlens",)
    assert {stage.spec.operation for stage in launched} <= {"forward", "merge_forward", "clear_forward"}
