"""Estimates that choose methods and splits: work counted against the mask, and the schedule played block by block."""

from __future__ import annotations

import dataclasses
import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.launch_record import stage_values
from support.plans import backward_plan

from fa2cupy import TileConfig
from fa2cupy.families import estimate
from fa2cupy.families.choice import Choice, choose
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.sm80 import SM80
from fa2cupy.families.sm80_float64 import SM80_FLOAT64
from fa2cupy.families.sm90 import SM90
from fa2cupy.problem.attention import AttentionProblem
from fa2cupy.problem.features import FeatureSettings
from fa2cupy.problem.options import MAX_SPLITS, CallOptions

H100 = DeviceInfo.named("sm_90")
TENSORS = ("q", "k", "v", "o", "dout", "dq", "dk", "dv")
LIMIT = st.none() | st.integers(0, 60)


def problem(heads=(16, 16), seqlen=2048, batch=1, head_dim=128, causal=True, dtype="bfloat16") -> AttentionProblem:
    return AttentionProblem(dtype, batch, seqlen, seqlen, *heads, head_dim, causal, 0.1, "bshd", 4)


def chosen(call: AttentionProblem, device: DeviceInfo = H100, **options):
    strides = {name: call.kernel_strides(call.shape_of(name)) for name in TENSORS}
    return choose("backward", call, device, strides, CallOptions(**options), is_launched=False)


def splits(call: AttentionProblem, device: DeviceInfo = H100, **options) -> int:
    return max(chosen(call, device, **options).num_splits.values(), default=1)


# ------------------------------------------------------------------------------------------------------------ the model


@given(st.integers(1, 90), st.integers(1, 90), LIMIT, LIMIT, st.integers(1, 20), st.integers(1, 20))
def test_steps_are_the_pairs_of_tiles_with_a_visible_pair(seqlen_q, seqlen_k, left, right, b_r, b_c):
    call = dataclasses.replace(problem(causal=False), seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    call = call.with_settings(FeatureSettings(window=(left, right)))
    tile = TileConfig(b_r, b_c, 4)
    distance = np.arange(seqlen_k) - np.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)
    visible = np.ones(distance.shape, bool)
    visible &= distance >= -left if left is not None else True
    visible &= distance <= right if right is not None else True
    rows = np.logical_or.reduceat(visible, range(0, seqlen_q, b_r), axis=0)
    pairs = np.logical_or.reduceat(rows, range(0, seqlen_k, b_c), axis=1)
    sequences = estimate._Sequences.of(call)
    for found, exact in (
        (sequences.steps_of_keys(tile), pairs.sum(0)),
        (sequences.steps_of_queries(tile), pairs.sum(1)),
    ):
        # Steps go from the first to the last visible tile; tiles without a visible pair may have none.
        assert sum(count * steps for steps, count in found.items()) == exact.sum()
        assert sum(found.values()) == len(exact)


@given(st.dictionaries(st.integers(0, 50), st.integers(1, 9), max_size=6), st.integers(1, 20), st.integers(1, 16))
def test_shares_are_the_steps_divided_as_the_kernels_divide_them(steps, heads, number):
    shares = estimate._shares(estimate.Counter(steps), heads, number, 3)
    expected = estimate.Counter()
    for count, tiles in steps.items():
        most = -(-count * heads // number)
        own = [min(most, count * heads - begin) for begin in range(0, count * heads, most)] if most else [0]
        for share in own:
            expected[share] += 3 * tiles
    assert shares == expected


@given(st.dictionaries(st.floats(0.5, 50), st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 12))
def test_the_last_block_ends_when_a_list_schedule_ends(blocks, slots):
    ends = [0.0] * slots
    for time in sorted((time for time, count in blocks.items() for _ in range(count)), reverse=True):
        heapq.heapreplace(ends, ends[0] + time)
    found = estimate._makespan(blocks, slots)
    if sum(blocks.values()) <= 8 * slots:
        assert found == pytest.approx(max(ends))
    else:  # so many blocks are not assigned one by one
        assert found == pytest.approx(max(ends), rel=0.25)


# ---------------------------------------------------------------------------------------------------------- the choices


@pytest.mark.parametrize("family", ("sm90", "sm80"))
def test_few_key_tiles_are_shared_until_they_fill_the_gpu(family):
    one_head = problem(heads=(8, 1))
    assert splits(one_head, family=family) >= 8
    assert splits(one_head, dataclasses.replace(H100, multiprocessors=8), family=family) <= 2
    assert splits(problem(batch=16), family=family) == 1
    assert splits(problem(heads=(1, 1), seqlen=4096, causal=False), family=family) >= 2  # ranges of queries


class TestForwardSplits:
    """The default number of shares of a forward on 132 multiprocessors."""

    TILES = {"sm90": TileConfig(128, 128, 12, 2), "sm80": TileConfig(128, 64, 4, 2, 2)}

    def shares(self, seqlen_q: int, seqlen_k: int, heads: tuple[int, int], family: str = "sm90", **window) -> int:
        call = dataclasses.replace(problem(heads=heads), seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        settings, costs = FeatureSettings(**window), (SM90 if family == "sm90" else SM80).costs
        return estimate.forward_splits(costs, call.with_settings(settings), H100, self.TILES[family], MAX_SPLITS)

    def test_keys_are_shared_where_query_tiles_leave_multiprocessors_idle(self):
        assert self.shares(1, 16384, (8, 1)) == self.shares(128, 16384, (8, 1)) == 16
        assert self.shares(1, 16384, (40, 1)) == 3  # as many as 132 multiprocessors take at a time
        assert self.shares(1, 16384, (8, 1), "sm80") == 16 and self.shares(1, 16384, (40, 1), "sm80") == 5

    def test_the_last_of_several_rounds_is_made_shorter(self):
        assert self.shares(1, 65536, (140, 1)) > 1 == self.shares(1, 65536, (132, 1))
        assert self.shares(1, 65536, (270, 1), "sm80") > 1 == self.shares(1, 65536, (264, 1), "sm80")

    def test_what_merging_costs_more_than_it_saves_stays_whole(self):
        assert self.shares(1, 256, (8, 1)) == self.shares(2048, 2048, (8, 1)) == self.shares(4096, 4096, (16, 16)) == 1
        assert self.shares(1, 16384, (8, 1), window=(255, 0)) == 1

    def test_many_blocks_are_not_shared(self):
        """Measured on an H100: 194 ms for 64k queries of 8/2 heads against 512k keys, with four shares 277."""
        assert self.shares(65536, 524288, (8, 2)) == self.shares(65536, 458752, (8, 2)) == 1

    def test_reading_the_keys_takes_the_same_time_for_any_number(self):
        assert self.shares(128, 16384, (90, 1)) > 1 == self.shares(128, 16384, (90, 90))

    @pytest.mark.parametrize("heads", (17, 140, 280, 540))
    def test_copies_of_large_results_are_few(self, heads):
        for family, seqlen_q in itertools.product(("sm80", "sm90"), (1, 512, 2048)):
            copy = 4 * heads * -(-seqlen_q // 128) * 128 * 128
            assert self.shares(seqlen_q, 65536, (heads, 1), family) <= max(4, (64 << 20) // copy)

    def test_of_nothing(self):
        assert self.shares(0, 16384, (8, 8)) == self.shares(1, 0, (8, 8)) == 1


def test_heads_that_do_not_fit_in_the_cache_have_blocks_of_their_own():
    """Q, dO and dQ of a head of 64k rows are larger than the L2 cache, those of 32k rows are not."""
    assert splits(problem((16, 4), 32768), method="single_pass") == 2
    for group in (4, 8):
        assert splits(problem((2 * group, 2), 65536), method="single_pass") == group
    few_queries = dataclasses.replace(problem((8, 2), 65536), seqlen_k=262144)  # all blocks are in step
    assert splits(few_queries, method="single_pass") == 1


def test_short_heads_drift_apart_though_keys_are_more():
    """Measured on an H100, 32/8 heads, both chunks of a rank of four: 8.5 to 9.1 ms, with two shares 7.6 to 7.7."""
    for keys in (8192, 16384, 28672):
        few_queries = dataclasses.replace(problem((32, 8), 4096), seqlen_k=keys)
        assert splits(few_queries, method="single_pass") == 2
    for queries, keys in ((4096, 32768), (8192, 16384), (8192, 32768)):
        few_queries = dataclasses.replace(problem((32, 8), queries), seqlen_k=keys)
        assert splits(few_queries, method="single_pass") == 1


def test_what_the_caller_asks_for_is_taken():
    for number in (1, 3, MAX_SPLITS):
        assert splits(problem(batch=16), num_splits=number) == number
        assert splits(problem(heads=(8, 1)), num_splits=number, deterministic=True) == number


def test_a_family_without_split_kernels_says_so():
    call = problem(dtype="float64")
    assert splits(call) == splits(call, num_splits=1) == 1
    reason = "has no kernels for num_splits=2, only for 1"
    with pytest.raises(Exception, match=f"^num_splits: .*family 'sm80' {reason}; family 'simt' {reason}$"):
        splits(call, num_splits=2)


@pytest.mark.parametrize(
    ("heads", "seqlen_q", "seqlen_k", "is_single"),
    [(8, 512, 512, True), (8, 8192, 8192, True), (1, 4096, 4096, True), (1, 8192, 64, False), (2, 8192, 256, False)],
)
def test_float64_takes_two_passes_where_key_tiles_are_few(heads, seqlen_q, seqlen_k, is_single):
    call = problem((heads, heads), seqlen_q, causal=False, dtype="float64")
    call = dataclasses.replace(call, seqlen_k=seqlen_k)
    of_keys, of_queries = TileConfig(32, 64, 8), TileConfig(64, 16, 4)
    tiles = ({"backward": of_keys}, {"backward_dq": of_queries, "backward_dkdv": of_keys})
    single, double = (estimate.backward_time(SM80_FLOAT64.costs, call, H100, one, {}, {}) for one in tiles)
    assert (single < double) is is_single


@pytest.mark.parametrize(("seqlen", "method"), [(2048, "two_pass"), (8192, "single_pass")])
@pytest.mark.parametrize("causal", (False, True))
def test_pairs_of_blocks_take_one_pass_where_it_is_long_enough(seqlen, method, causal):
    """Measured on an H200, 192/128 with 128 heads: 0.94 to 0.97 of the speed of two passes, and 1.06."""
    call = dataclasses.replace(problem((128, 128), seqlen, head_dim=192, causal=causal), head_dim_v=128)
    assert chosen(call).method == method


def test_a_cluster_takes_as_many_multiprocessors_as_it_has_blocks():
    costs = estimate.Costs(
        blocks={"backward": {128: estimate.BlockCost(1.0, 1.0)}},
        clusters={"backward": estimate.BlockCost(2.0, 2.0)},
        convert=0.0,
        convert_rows=0.0,
    )

    def time(key_tiles: int, blocks: int) -> float:
        call = dataclasses.replace(problem((1, 1), 1000, causal=False, head_dim=100), seqlen_k=100 * key_tiles)
        tiles = {"backward": TileConfig(100, 100, 4)}
        return estimate.backward_time(costs, call, four, tiles, {}, {"backward": blocks})

    four = dataclasses.replace(H100, multiprocessors=4)
    assert [time(n, 1) for n in (1, 4, 5)] == pytest.approx([11, 11, 22])
    assert [time(n, 2) for n in (1, 2, 3)] == pytest.approx([12, 12, 24])


@pytest.mark.parametrize("seqlen", (2048, 65536))
def test_the_workspace_of_shares_is_one_copy_or_bounded(seqlen):
    call = problem(heads=(64, 1), seqlen=seqlen)
    strides = {name: call.kernel_strides(call.shape_of(name)) for name in TENSORS}
    copy = 2 * 4 * seqlen * 128
    for method, most in (("single_pass", copy), ("two_pass", max(4 * copy, 64 << 20))):
        plan = backward_plan(call, H100, strides, method, num_splits=None)
        nbytes = {workspace.name: workspace.nbytes for workspace in plan.workspaces}["shares"]
        assert 0 < nbytes <= most
        assert stage_values(plan.stages[0])["shares_bytes"] == (nbytes if method == "single_pass" else 0)


def test_empty_problems_have_one_block_for_a_tile():
    for changes in ({"seqlen_q": 0}, {"seqlen_k": 0}, {"batch": 0}):
        call = dataclasses.replace(problem(heads=(8, 1)), **changes)
        assert splits(call) == splits(call, num_splits=4) == 1


def test_packed_sequences_are_estimated_by_their_number_and_total():
    def packed(sequences: int) -> AttentionProblem:
        call = problem(heads=(8, 8), seqlen=16384)
        return call.with_settings(FeatureSettings(num_sequences=sequences, max_seqlen_q=16384, max_seqlen_k=16384))

    assert chosen(packed(1)).method == "single_pass" and chosen(packed(256)).method == "two_pass"


# -------------------------------------------------------------------------------------------------- gradients of biases


BIAS_OF_PAIRS = (0, 512 * 512, 512, 1)


def chosen_of_bias(call: AttentionProblem, strides: tuple, device: DeviceInfo = H100, **options) -> Choice:
    call = call.with_settings(FeatureSettings(arrays=("bias",), dbias=True))
    of_call = {name: call.kernel_strides(call.shape_of(name)) for name in TENSORS} | {"bias": strides, "dbias": strides}
    return choose("backward", call, device, of_call, CallOptions(**options), is_launched=False)


def way_of_dbias(
    batch: int, strides: tuple, deterministic: bool, dtype: str = "bfloat16", device: DeviceInfo = H100
) -> tuple[str | None, bool]:
    """Returns the method, and True if a kernel owns tiles of the bias."""
    call = problem((4, 4), 512, batch, 32, False, dtype)
    choice = chosen_of_bias(call, strides, device, deterministic=deterministic)
    return choice.method, choice.owns_dbias


@pytest.mark.parametrize(
    ("batch", "strides", "deterministic", "wanted"),
    [
        (512, BIAS_OF_PAIRS, False, ("single_pass", True)),
        (512, BIAS_OF_PAIRS, True, ("two_pass", True)),
        (2, BIAS_OF_PAIRS, False, ("two_pass", False)),  # too few share it
        (512, (0, 512, 0, 1), False, ("two_pass", False)),  # warps sum over rows before they add
    ],
)
def test_the_kernel_that_owns_tiles_of_a_bias_is_chosen_where_many_scores_share_it(
    batch, strides, deterministic, wanted
):
    assert way_of_dbias(batch, strides, deterministic) == wanted


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("seqlen", [16, 49, 64])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_blocks_that_have_all_keys_sum_dbias_as_they_go(head_dim, seqlen, deterministic):
    """On an H200, 512 to 4096 windows take 1.2 to 1.6 times as long if another kernel computes their scores again."""
    call = problem((6, 6), seqlen, 4096, head_dim, False)
    choice = chosen_of_bias(call, (0, seqlen**2, seqlen, 1), deterministic=deterministic)
    assert list(choice.tiles) == ["backward_one_tile_dbias"] and choice.dbias is None


@pytest.mark.parametrize("options", [{"method": "one_tile"}, {}, {"deterministic": True}], ids=["method", "", "bits"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_requested_tile_of_one_tile_is_taken_beside_a_kernel_of_dbias(arch, options):
    call, tile = problem((6, 6), 64, 4096, 32, False), TileConfig(64, 64, 4, 1, 2)
    options = options | {"config": {"backward_one_tile": tile}}
    choice = chosen_of_bias(call, (0, 64 * 64, 64, 1), DeviceInfo.named(arch), **options)
    assert choice.tiles == {"backward_one_tile": tile} and choice.owns_dbias


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_requested_tile_of_a_kernel_that_a_family_lacks_changes_nothing(arch, dtype):
    call, config = problem((4, 4), 512, 64, 32, False, dtype), {"backward_one_tile": TileConfig(64, 64, 4, 1, 2)}
    plain, choice = (chosen_of_bias(call, BIAS_OF_PAIRS, DeviceInfo.named(arch), config=one) for one in (None, config))
    assert choice == plain and not choice.owns_dbias


@pytest.mark.parametrize(("dtype", "arch"), [("float32", "sm_90"), ("float32", "sm_80"), ("bfloat16", "sm_80")])
def test_kernels_without_measured_costs_own_tiles_of_a_bias_in_deterministic_calls_alone(dtype, arch):
    device = DeviceInfo.named(arch)
    assert way_of_dbias(512, BIAS_OF_PAIRS, False, dtype, device)[1] is False
    assert way_of_dbias(512, BIAS_OF_PAIRS, True, dtype, device) == ("two_pass", True)


@given(st.integers(1, 300), st.integers(1, 2000), st.integers(1, 900), st.integers(1, 9))
def test_blocks_that_divide_the_sequences_of_a_bias_are_worth_their_sums(slots, tiles, sequences, steps):
    work = estimate.OwnedTiles(slots, tiles, sequences, steps)
    number = estimate.owner_splits(work)
    assert 1 <= number <= sequences
    assert work.time(number) <= work.time(1)
