"""Kernels of decoding broken on purpose, each in one place, and each caught."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest

pytest.importorskip("cupy")

import ptxsim
from mutants import mutant
from support.decode_cases import BORDERS, DOMINANT_BLOCK, DOMINANT_WARP, WHOLE_PAGES, WINDOWS, Case, check
from support.fake_cupy import place
from support.fake_gpu import decode
from support.simulator import simulated_gpu

from fa2cupy.families.device import DeviceInfo
from fa2cupy.jit.spec import KernelSpec

pytestmark = [pytest.mark.simulated, pytest.mark.matrix]

#: The errors that catch a mutant; those named here are of decoding.
CATCHES = mutant.CATCHES | {
    "below": (ptxsim.PtxError, "out of bounds, below every buffer"),
    "counter": (AssertionError, "arrivals is left at"),
    "cache": (AssertionError, "Arrays are not equal"),
}

#: Devices: one with blocks that have parts of several jobs, one with enough blocks for two levels of merges.
FEW = dataclasses.replace(DeviceInfo.named("sm_90"), multiprocessors=2)
MANY = dataclasses.replace(DeviceInfo.named("sm_80"), multiprocessors=23)
AMPERE = dataclasses.replace(DeviceInfo.named("sm_80"), multiprocessors=2)
#: One with a block for each of five stretches of two jobs.
FIVE = dataclasses.replace(FEW, multiprocessors=5)
#: One with three clusters for a job.
CLUSTERS = dataclasses.replace(FEW, multiprocessors=34)

PAGED = Case("float16", (40, 90, 17), page_size=16, num_new=1)
MANY_SEQUENCES = Case("float16", (40, 90, 17, 33), page_size=16)  # a warp has 32 of its keys
DENSE = Case("float16", (200, 90), num_new=1)
LONG = Case("float16", (22 * 128 - 3,), heads=(2, 1), head_dim=128)
#: The long job has 21 of 24 blocks, the last of which begins the next job, too.
LONG_AND_SHORT = Case("float32", (83 * 32 - 3, 2 * 32 - 5, *11 * (5,)), heads=(1, 1), head_dim=160)
FEW_JOBS = Case("float16", (3333, 40), heads=(2, 1))
SIXTEEN = Case("float16", (70,), heads=(16, 1))
ONE_CLUSTER = Case("float16", (700,), heads=(8, 1), head_dim=16, num_new=1)
TWO_CLUSTERS = dataclasses.replace(ONE_CLUSTER, lengths=(2000,))
TOO_LONG = dataclasses.replace(DENSE, lengths=(91, 90), capacity=92)
WIDE = Case("float16", (90, 140), heads=(3, 1), head_dim=264)
LATENT = Case("float16", (90, 140), heads=(3, 1), head_dim=576, head_dim_v=512, page_size=16)
LATENT_HOPPER = dataclasses.replace(LATENT, heads=(24, 1), lengths=(400, 340))
LATENT_ROWS = dataclasses.replace(LATENT_HOPPER, heads=(40, 1))
LATENT_CLUSTERS = dataclasses.replace(LATENT_ROWS, lengths=(1400,))
PAIR = dataclasses.replace(PAGED, head_dim=40, head_dim_v=72)
PAIR_IEEE = dataclasses.replace(PAIR, dtype="float32")


@dataclass(frozen=True)
class Mutant:
    """A change of the kernel, and the check that must catch it."""

    name: str
    old: str
    new: str
    caught_by: str
    case: Case = DENSE
    options: tuple = ()
    lengths: tuple | None = None  # replace those of the case, which are then the clamped ones
    table: int | None = None  # replaces all entries of the block table
    device: DeviceInfo = FEW

    def __call__(self, spec: KernelSpec, text: str) -> str:
        return mutant.replace_once(spec, text, self.old, self.new)

    def run(self) -> None:
        def on_device(q, k_cache, v_cache, lengths, **options):
            caches = place(k_cache), place(v_cache)
            if self.case.has_values_in_keys:
                caches = caches[0], caches[0][..., : self.case.head_dim_v]
            if self.table is not None:
                options["block_table"] = np.full_like(options["block_table"], self.table)
            given = lengths if self.lengths is None else np.array(self.lengths, "int32")
            placed = {name: place(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
            results = decode(place(q), *caches, place(given), **placed)
            k_cache[...], v_cache[...] = caches
            return results

        if self.table is None:
            check(on_device, self.case, **dict(self.options))
        else:  # all sequences then read the same rows of one page, so that there is no expectation
            q, k_cache, v_cache, lengths, options = self.case.arguments()
            on_device(q, np.zeros_like(k_cache), np.zeros_like(v_cache), lengths, **options)


SINK = (("sink", True),)
CLOSE, FAR = tuple(WINDOWS[2].items()), tuple(WINDOWS[3].items())
HIGHEST = "highest = maximum(highest, statistic[i].shift);"
ARRIVAL = "atom.add.acq_rel.gpu"
SINK_OF_RESULTS = "sink = is_result ? sink_of(row) : -common::infinity<Accum>();"
MUTANTS = (
    Mutant("a page of the sequence before", "static_cast<int64>(batch) * params.pages_per_sequence + index",
           "static_cast<int64>(batch) * (params.pages_per_sequence - 1) + index", "uninitialised", PAGED),
    Mutant("the first page for all rows, new ones included", "params.pages_per_sequence + index]",
           "params.pages_per_sequence]",
           "cache", PAGED),
    Mutant("one page for all keys of a warp", "ahead[i] = place_of(params, segment.job.batch, key);",
           "ahead[i] = place_of(params, segment.job.batch, first);", "numbers", MANY_SEQUENCES),
    Mutant("rows of the first page behind it", "row = begin[i] + (key - i * kRowsTogether) * stride;",
           "row = begin[0] + key * stride;", "uninitialised",
           MANY_SEQUENCES),
    Mutant("rows counted through all pages", "key - index * params.page_size}", "key}", "uninitialised", PAGED),
    Mutant("pages that do not exist", "min_of(max_of(page, 0), params.num_pages - 1)", "page", "bounds",
           dataclasses.replace(PAGED, num_new=0), table=1000),
    Mutant("pages below the first", "min_of(max_of(page, 0), ", "min_of(page, ", "below",
           dataclasses.replace(PAGED, num_new=0), table=-1000),
    Mutant("the rest of the last page", "if (first + kKeys <= job.cached) {", "if (first <= job.cached) {",
           "uninitialised", PAGED),
    Mutant("new rows past the last", "return key < present ? new_k", "return true ? new_k", "bounds",
           dataclasses.replace(DENSE, num_new=2)),
    Mutant("a length beyond the cache", "min_of(max_of(params.cache_seqlens[batch], 0), room)",
           "max_of(params.cache_seqlens[batch], 0)", "bounds", TOO_LONG, lengths=(1000, 90)),
    Mutant("a negative length", "min_of(max_of(params.cache_seqlens[batch], 0), room)",
           "min_of(params.cache_seqlens[batch], room)", "bounds",
           dataclasses.replace(DENSE, lengths=(0, 90)), lengths=(-5, 90)),
    Mutant("no room for new rows", "const int32 room = params.seqlen_k - params.seqlen_new;",
           "const int32 room = params.seqlen_k;", "uninitialised", TOO_LONG, lengths=(1000, 90)),
    Mutant("new rows one place late", "place_of(params, job.batch, job.cached + row)",
           "place_of(params, job.batch, job.cached + row + 1)", "cache", dataclasses.replace(DENSE, capacity=300)),
    Mutant("new rows by every block", "segment.begin < segment.end && segment.end == job.steps)",
           "true)", "blocks", DENSE),
    Mutant("parts of equal weight", "weight = kExp(statistic[i].shift - shift);", "weight = 1;", "numbers"),
    Mutant("weights without their sum", "row.statistic.sum = fma(weight, statistic[i].sum, row.statistic.sum);",
           "row.statistic.sum = 1;", "numbers"),
    Mutant("lse without the shift", "Units::natural(merged.statistic.shift) + log", "log", "numbers"),
    Mutant("the sink in every part", SINK_OF_RESULTS, "sink = sink_of(row);", "numbers",
           LONG, SINK, device=MANY),
    Mutant("the sink in parts of blocks", SINK_OF_RESULTS, "sink = sink_of(row);", "numbers",
           DENSE, SINK),
    Mutant("O of warps that have not left it", "__syncthreads();  // statistics of all warps",
           "__syncwarp();  //", "race"),
    Mutant("nothing is released", ARRIVAL, "atom.add.acquire.gpu", "blocks"),
    Mutant("nothing is acquired", ARRIVAL, "atom.add.release.gpu", "blocks"),
    Mutant("arrival ahead of the other warps", "__syncthreads();  // all threads have written their items",
           "__syncwarp();  //", "blocks", Case("float16", (300,), heads=(8, 1), head_dim=64)),
    Mutant("a counter that stays", "if (last) *counter = 0;", "", "counter"),
    Mutant("no merge at all", "arrive(counter) == expected - 1;", "arrive(counter) == expected;", "unwritten"),
    Mutant("groups of other sizes", "(of_groups ? 3 * size : 3) * kPartialElements", "3 * kPartialElements",
           "uninitialised", LONG, device=MANY),
    Mutant("a group of one block", "return (count - 1) % size == 0 ? size + 1 : size;", "return size;", "blocks",
           LONG_AND_SHORT, device=dataclasses.replace(FEW, multiprocessors=24)),
    Mutant("queries before they are there", "__syncthreads();  // all of Q is there", "__syncwarp();  //", "race"),
    Mutant("keys before they are there", "kStages - 2>();\n            Warp::sync();", "kStages - 1>();", "race",
           dataclasses.replace(DENSE, lengths=(900, 90))),
    Mutant("a slot that is still read", "filled = taken;", "filled = taken == 0 ? kStages - 1 : taken - 1;",
           "uninitialised"),
    Mutant("steps of the block before again", "? position - job.start : 0", "? 0 : 0", "counter"),
    Mutant("every warp the same keys", "static_cast<int32>(threadIdx.x) / kGroupThreads * kKeys", "0", "numbers"),
    Mutant("heads of a group in another order", "packed - query * params.heads_per_group;",
           "params.heads_per_group - 1 - (packed - query * params.heads_per_group);", "numbers"),
    Mutant("rows that are queries", "of_queries.end_key(row / heads_per_group)", "of_queries.end_key(row)", "numbers",
           Case("float16", (90,), seqlen_q=3)),
    Mutant("a slope for all heads", "slopes.slope[first_row + i]", "slopes.slope[first_row]", "numbers", SIXTEEN,
           (("alibi_slopes", "head"),)),
    # Warps that share keys, and values in the first columns of keys
    Mutant("keys that the other sharer has not copied", "barrier_sync(1 + threadIdx.x / kThreads, kThreads);",
           "__syncwarp();", "race", WIDE),
    Mutant("columns of O of one sharer by both", "return kSharers > 1 ? threadIdx.x / 32 % kSharers : 0;", "return 0;",
           "race", WIDE),
    Mutant("values behind the keys that hold them", "(kValuesInKeys ? 0 : kKeyBytes), 0", "kKeyBytes, 0",
           "race", LATENT, device=AMPERE),
    Mutant("values in columns that end with them", "kValuesInKeys ? kD : kDv>", "kDv>", "numbers", LATENT,
           device=AMPERE),
    # Latent attention on Hopper
    Mutant("keys for wgmma without a fence", "cp_async_wait<kPending>();\n        sm90::async_proxy_fence();",
           "cp_async_wait<kPending>();", "proxy", LATENT_ROWS),
    Mutant("keys of producers without a fence", "filled_at(slot), turn);\n        sm90::async_proxy_fence();",
           "filled_at(slot), turn);", "proxy", LATENT_HOPPER),
    Mutant("keys before producers have copied them", "sm90::mbarrier_wait(filled_at(slot), turn);", "", "race",
           LATENT_HOPPER),
    Mutant("a slot that producers fill while it is read", "sm90::mbarrier_wait(free_at(slot), turn ^ 1);", "",
           "deadlock", LATENT_HOPPER),
    Mutant("P for wgmma without a fence", "value[2 * n + 1][1]));\n            sm90::async_proxy_fence();",
           "value[2 * n + 1][1]));", "proxy", LATENT_HOPPER),
    Mutant("rows of the first group of queries for both", "kAddsHalves ? 0 : group_ * kGroupRows * kPanelRowBytes",
           "0", "numbers", LATENT_ROWS),
    Mutant("the first half of columns for both", "kAddsHalves ? group_ * kPanelRowBytes / 2 : 0", "0", "numbers",
           LATENT_HOPPER),
    Mutant("halves of scores that are not there",
           "sync();\n#pragma unroll\n            for (int n = 0; n < kOwn; ++n) {",
           "group_sync();\n#pragma unroll\n            for (int n = 0; n < kOwn; ++n) {", "race", LATENT_HOPPER),
    Mutant("columns of the first group for both", "keys + group_ * kGroupPanels * KTile::kPanelBytes", "keys",
           "numbers", LATENT_HOPPER),
    Mutant("P in the rows of the first group", "row = group() * kGroupRows + lane() % 8", "row = lane() % 8", "race",
           LATENT_HOPPER),
    Mutant("keys of other warps", "chunk = 2 * warp() + lane() / 8 % 2", "chunk = lane() / 8 % 2", "race",
           LATENT_HOPPER),
    Mutant("P of the other group that is not there", "p.store(to);\n        sync();",
           "p.store(to);\n        group_sync();", "race", LATENT_HOPPER),
    Mutant("maxima that are not there", "highest[i]);\n        group_sync();", "highest[i]);\n        __syncwarp();",
           "race", LATENT_HOPPER),
    Mutant("the maximum of one warp's keys", "for (int w = 0; w < 4; ++w)\n                highest[i]",
           "for (int w = 0; w < 1; ++w)\n                highest[i]", "numbers", LATENT_HOPPER),
    Mutant("the sum of one warp's keys", "for (int w = 0; w < 4; ++w) sum", "for (int w = 0; w < 1; ++w) sum",
           "numbers", LATENT_HOPPER),
    Mutant("factors of the first rows for all", "(8 * n + lane() % 4 * 2) * 4, factor", "lane() % 4 * 2 * 4, factor",
           "numbers", LATENT_HOPPER),
    Mutant("shifts without a vote", "if (!sm80::barrier_all(kOfBoth, kThreads, fits)) return false;",
           "if (!sm80::barrier_all(kOfBoth, kThreads, true)) return false;", "numbers",
           dataclasses.replace(LATENT_HOPPER, lengths=(400, 400), page_size=None, dominant=192)),
    Mutant("a slot that wgmma reads", "Warp::sync();\n                load(segment, step + kStages);",
           "load(segment, step + kStages);", "race",
           dataclasses.replace(LATENT_CLUSTERS, heads=(16, 1), lengths=(6200,)), device=CLUSTERS),
    Mutant("no keys of the next step", "meanwhile();\n        sm90::wgmma_wait<0>();", "sm90::wgmma_wait<0>();",
           "uninitialised", LATENT_ROWS),
    Mutant("shares in slots whose keys others still read", "if (begin == 0) wait();  // nobody", "// nobody", "init",
           LATENT_CLUSTERS, device=CLUSTERS),
    Mutant("shares in the place of those of the turn before", "arrive();\n                wait();", "", "race",
           LATENT_CLUSTERS, device=CLUSTERS),
    Mutant("shares that have not arrived", "sm90::mbarrier_wait(arrived, begin / kRows % 2);", "", "race",
           LATENT_CLUSTERS, device=CLUSTERS),
    Mutant("shares for bulk copies without a fence",
           "put(slots + row * kColumns * 4, begin + row);\n            sm90::async_proxy_fence();",
           "put(slots + row * kColumns * 4, begin + row);", "proxy", LATENT_CLUSTERS, device=CLUSTERS),
    Mutant("statistics of the first rows for all", "shared_address(statistics + begin)", "shared_address(statistics)",
           "numbers", LATENT_CLUSTERS, device=CLUSTERS),
    Mutant("columns of the first block of a cluster for all", "rank * kColumns + i % kItemsOfRow", "i % kItemsOfRow",
           "blocks", LATENT_CLUSTERS, device=CLUSTERS),
    # Clusters
    Mutant("shares that are still sent", "wait();\n        const auto statistics",
           "__syncthreads();\n        const auto statistics", "uninitialised", ONE_CLUSTER, device=CLUSTERS),
    Mutant("shares of all blocks in one place", "rank * kShare + item / kCluster", "item / kCluster", "race",
           ONE_CLUSTER, device=CLUSTERS),
    Mutant("statistics of all blocks in one place", "rank * Spec::kBr + row", "row", "race",
           ONE_CLUSTER, device=CLUSTERS),
    Mutant("the last steps of few jobs", "begin + stretch + (index < longer)}", "begin + stretch}", "numbers",
           FEW_JOBS, device=FIVE),
    Mutant("few jobs begin at their first steps", "begin = index * stretch + min_of(index, longer)", "begin = 0",
           "numbers", FEW_JOBS, device=FIVE),
    Mutant("one block's steps for all", "begin = index * stretch + min_of(index, longer)",
           "begin = min_of(index, longer)", "numbers", dataclasses.replace(TWO_CLUSTERS, num_new=0), device=CLUSTERS),
    Mutant("new rows by blocks without steps", "segment.begin < segment.end && segment.end == job.steps",
           "segment.end == job.steps", "blocks", ONE_CLUSTER, device=CLUSTERS),
    Mutant("the first of two clusters alone", "const bool is_result = clusters == 1;", "const bool is_result = true;",
           "blocks", TWO_CLUSTERS, device=CLUSTERS),
    Mutant("one counter for all shares", "partials.params.arrivals + first, clusters",
           "partials.params.arrivals + first - rank, clusters", "blocks", TWO_CLUSTERS, device=CLUSTERS),
    Mutant("a share of another cluster", "share_at(first + s * kCluster) + kVector * i",
           "share_at(first) + kVector * i", "numbers", TWO_CLUSTERS, device=CLUSTERS),
    # Borders of tiles and of warps' keys
    Mutant("the last key that a window shows", "first_key + keys > first;", "first_key + keys > first + 1;", "numbers",
           BORDERS, CLOSE),
    Mutant("the first key of a warp, the last of all", "return first_key < end &&", "return first_key + 1 < end &&",
           "numbers", BORDERS),
    Mutant("a key after the first query's, without a mask", "first_key + keys > full_end ||",
           "first_key + keys > full_end + 1 ||", "numbers", BORDERS),
    Mutant("a key that the last query's window hides, without a mask", "first_key < full_first;",
           "first_key + 1 < full_first;", "numbers", BORDERS, FAR),
    Mutant("no mask where the last query sees all", "range{0, 0, mask.end_key(first_row), ",
           "range{0, 0, mask.end_key(last_row), ", "numbers", BORDERS),
    Mutant("no mask where the first query's window shows all", "range.full_first = mask.first_key(last_row);",
           "range.full_first = mask.first_key(first_row);", "numbers", BORDERS, FAR),
    Mutant("the keys of the last query's window", "range.first = mask.first_key(first_row);",
           "range.first = mask.first_key(last_row);", "numbers", BORDERS, CLOSE),
    Mutant("the first tile of the second query's window", "mask_of(length).first_key(0)) / Spec::kBc",
           "mask_of(length).first_key(1)) / Spec::kBc", "numbers", BORDERS, CLOSE),
    Mutant("tiles of a length less one", "max_of(ceil_div(length, Spec::kBc) - first, 1)",
           "max_of(ceil_div(length - 1, Spec::kBc) - first, 1)", "numbers", BORDERS),
    # The end of the last page
    Mutant("the entry behind the last page", "key < segment.job.cached) ahead", "key <= segment.job.cached) ahead",
           "uninitialised", WHOLE_PAGES),
    Mutant("the entry behind a full tile", "if (step < segment.end && key < segment.job.cached) ahead",
           "if (step < segment.end) ahead", "bounds", WHOLE_PAGES),
    # A head_dim of v in the place of that of q, and the other way round
    Mutant("columns of k for new rows of v", "column < Spec::kHeadDimV)", "column < Spec::kHeadDim)", "blocks",
           dataclasses.replace(PAIR, head_dim=72, head_dim_v=40)),
    Mutant("columns of v for new rows of k", "column < Spec::kHeadDim)", "column < Spec::kHeadDimV)", "blocks", PAIR),
    Mutant("v in the middle of a slot", "char* v = k + Warp::kKeyBytes;", "char* v = k + Warp::kSlotBytes / 2;",
           "uninitialised", PAIR),
    Mutant("v read from the end of v", "(kValuesInKeys ? 0 : kKeyBytes)", "(kValuesInKeys ? 0 : VTile::kBytes)",
           "uninitialised", PAIR),
    Mutant("columns of k for v", "load_rows_async<VTile, kThreads, Spec::kHeadDimV>",
           "load_rows_async<VTile, kThreads, Spec::kHeadDim>", "numbers", PAIR),
    Mutant("columns of k for o", "ceil_div(Spec::kHeadDimV, kVector)", "ceil_div(Spec::kHeadDim, kVector)",
           "unwritten", PAIR),
    Mutant("rows of k for v", "copy_rows<RowsV, 32, kKeys>", "copy_rows<Rows, 32, kKeys>", "uninitialised", PAIR_IEEE),
    Mutant("v read from the end of v, in IEEE arithmetic", "posted, k + kKeys * Rows::", "posted, k + kKeys * RowsV::",
           "uninitialised", PAIR_IEEE),
    # Parts that are far larger than others
    *(
        Mutant(f"weights beside those of the {place} part, {whose}", HIGHEST,
               f"highest = maximum(highest, statistic[{index}].shift);", "numbers", case, device=MANY)
        for whose, case, last in (("warps", DOMINANT_WARP, 7), ("blocks", DOMINANT_BLOCK, 3))
        for place, index in (("first", "0"), ("last", f"{last} < kAtOnce ? {last} : 0"))
    ),
    Mutant("a weight for the last warp beside all others", HIGHEST, "if (i + 1 < kAtOnce) " + HIGHEST, "numbers",
           DOMINANT_WARP, device=MANY),
    Mutant("no weight for the last warp", "for (int i = 0; i < kAtOnce; ++i) {\n            const Real weight",
           "for (int i = 0; i < kAtOnce - 1; ++i) {\n            const Real weight", "numbers", DOMINANT_WARP,
           device=MANY),
)  # fmt: skip


@pytest.mark.parametrize("broken", MUTANTS, ids=lambda broken: broken.name)
def test_it_is_caught(monkeypatch, broken):
    error, text = CATCHES[broken.caught_by]
    with monkeypatch.context() as patch, simulated_gpu(patch, broken.device):
        broken.run()
    with simulated_gpu(monkeypatch, broken.device, patch=broken), pytest.raises(error, match=text):
        broken.run()
