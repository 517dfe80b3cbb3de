"""What distinguishes two calls of several ranks: what ranks compare, and how each remembers that they have agreed."""

from __future__ import annotations

import inspect
import re
import threading
from collections import defaultdict

import numpy as np
import pytest

pytest.importorskip("cupy")

from support import ranks
from support.fake_cupy import place
from support.fake_gpu import fake_gpu
from support.fake_nccl import FakeCommunicator, FakeNccl, fake_streams
from support.feature_cases import assert_close, booleans, numbers
from support.launch_record import Launch
from support.option_pairs import option_pairs

import fa2cupy
import fa2cupy.distributed as dist
from fa2cupy.distributed.call import groups as groups_module
from fa2cupy.distributed.call import requests
from fa2cupy.distributed.call.run import Run
from fa2cupy.distributed.movers.by_messages import ByMessages
from fa2cupy.distributed.transport import nccl as nccl_module
from fa2cupy.families.sm90_float32 import Sm90Float32
from fa2cupy.problem.features import FeatureKeywords
from fa2cupy.testing import make_inputs

SIZE = 2
#: Sizes of one rank. It has as many heads as rows, so that both layouts are legal.
BATCH, ROWS, HEADS, COLUMNS = 2, 16, 16, 64
SCORES = (BATCH, HEADS, ROWS, SIZE * ROWS)
STATISTICS = (BATCH, HEADS, ROWS)

Options = dict[str, object]
CHECK = requests._request


class Ranks:
    """Ranks of a GPU that only records the launches of kernels."""

    def __init__(self, nccl: FakeNccl, cupy, ranks_per_host: tuple[int, int] = (SIZE, SIZE)):
        self._nccl, self._cupy, self._ranks_per_host = nccl, cupy, ranks_per_host
        self._launches: dict[int, list[tuple]] = defaultdict(list)
        self._checks: dict[int, int] = defaultdict(int)

    def launch(self, launch: Launch) -> None:
        self._launches[threading.get_ident()].append((launch.stage, launch.cleared, launch._per_call))

    def check(self, *arguments: object) -> object:
        """Checks a call that is not remembered."""
        self._checks[threading.get_ident()] += 1
        return CHECK(*arguments)

    def run(self, work) -> list:
        """Returns the results of ``work(comm)`` on all ranks, each with a new communicator."""

        def of_rank(world):
            one = FakeCommunicator(self._nccl, world.rank)
            return work(dist.Communicator.from_nccl(one, ranks_per_host=self._ranks_per_host[world.rank], timeout=20))

        return dist.simulate(SIZE, of_rank, timeout=20)

    def seen(self, comm, operation: str, arrays: dict, options: Options) -> tuple:
        """Makes a call; returns (stages, messages, form of the results) of this rank, and how often it was checked."""
        thread, log = threading.get_ident(), self._nccl.log
        self._checks[thread] = 0
        launches = self._launches[thread]
        launches.clear()
        start, caller = len(log), self._cupy.cuda.get_current_stream().ptr
        results = call(comm, operation, arrays, options)
        # Ranks compare calls on the caller's stream, and tell each other numbers of 8 bytes.
        messages = [
            (kind, peer, count)
            for rank, kind, peer, count, _, stream in log[start:]
            if rank == comm.rank and stream != caller and count > 8
        ]
        return (list(launches), messages, [(x.shape, x.strides, x.dtype) for x in results]), self._checks[thread]

    def calls(self, *calls: tuple[str, dict, Options]) -> list:
        """Returns what is `seen` of calls by one communicator after each other, on each rank."""
        return self.run(lambda comm: [self.seen(comm, *one) for one in calls])


def call(comm, operation: str, arrays: dict, options: Options) -> tuple:
    given = {name: tuple(map(placed, x)) if isinstance(x, tuple) else placed(x) for name, x in options.items()}
    return getattr(dist, operation)(comm, *(placed(x) for x in arrays.values()), **given)


class Foreign:
    """An array of another library."""

    def __init__(self, array: np.ndarray):
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim


def placed(x: object) -> object:
    """Returns an array on the GPU, and anything else as it is."""
    return place(x) if isinstance(x, np.ndarray) else x


@pytest.fixture
def pair(monkeypatch):
    """Provides the `Ranks`."""
    nccl = FakeNccl(SIZE)
    monkeypatch.setattr(nccl_module, "_module", lambda: nccl)
    # Without this, calls as short as these have the same plan for every precision.
    monkeypatch.setattr(Sm90Float32, "is_accurate", lambda self, problem: True)
    made: list[Ranks] = []
    with fake_gpu(monkeypatch, run=lambda launch: made[0].launch(launch)), fake_streams(monkeypatch) as cupy:
        made.append(Ranks(nccl, cupy))
        monkeypatch.setattr(requests, "_request", made[0].check)
        yield made[0]


def arrays_of(operation: str, dtype: str = "float16", rows: int = ROWS, keys: int = ROWS, columns: int = COLUMNS):
    """Returns a rank's arrays; `columns` are those of v."""
    q, k = (BATCH, rows, HEADS, COLUMNS), (BATCH, keys, HEADS, COLUMNS)
    shapes = {"q": q, "k": k, "v": (*k[:3], columns)}
    if operation == "backward":
        o = (*q[:3], columns)
        shapes |= {"o": o, "lse": (BATCH, HEADS, rows), "do": o}
    return {name: numbers(shape, "float32" if name == "lse" else dtype) for name, shape in shapes.items()}


def packed(arrays: dict) -> dict:
    return {name: x[0] for name, x in arrays.items()}


OFFSETS = {f"cu_seqlens_{side}": np.array([0, 5, 9, 32], "int32") for side in "qk"}
GATHER = {"scheme": "gather", "causal": True}


def scaled(score, b, h, q, k, factors):
    return score * factors[h]


#: Options of both calls and the two values that differ, by keyword.
OPTIONS: dict[str, tuple[Options, object, object]] = option_pairs(SCORES) | {
    "scheme": ({}, "heads", "gather"),
    "order": (GATHER, "zigzag", "contiguous"),
    "head_groups": ({}, 1, 2),
    "return_dscore_args": ({"score_mod": scaled, "score_args": (numbers((HEADS,), "float32"),)}, False, True),
    "dropout_p": ({"seed": 1}, 0.5, 0.0),
    "cu_seqlens_q": (OFFSETS, OFFSETS["cu_seqlens_q"], np.array([0, 1, 5, 9, 32], "int32")),
    "cu_seqlens_k": (OFFSETS, OFFSETS["cu_seqlens_k"], np.array([0, 1, 5, 9, 32], "int32")),
    "max_seqlen_q": (OFFSETS, 23, 24),
    "max_seqlen_k": (OFFSETS, 23, 24),
    "score_args": ({"score_mod": scaled}, (numbers((HEADS,), "float32"),), (numbers((HEADS + 1,), "float32"),)),
    "mask_args": (
        {"mask_mod": lambda b, h, q, k, ids: ids[q] == ids[k]},
        (np.zeros(SIZE * ROWS, "int32"),), (np.zeros(SIZE * ROWS + 1, "int32"),),
    ),
    "block_mask": (
        {}, fa2cupy.BlockMask(np.ones((1, 1, 1, 1), bool), SIZE * ROWS, SIZE * ROWS, (64, 64)),
        fa2cupy.BlockMask(np.ones((1, 1, 1, 1), bool), SIZE * ROWS, SIZE * ROWS, (128, 128)),
    ),
}  # fmt: skip
#: Keywords of backward alone.
OF_BACKWARD = ("method", "deterministic", "return_dbias", "return_dsink", "return_dscore_args", "delta", "dlse")
CASES = [(name, "backward" if name in OF_BACKWARD else "forward") for name in OPTIONS]


def test_every_keyword_has_its_case():
    own = inspect.signature(dist.backward).parameters.values()
    keywords = {one.name for one in own if one.kind is one.KEYWORD_ONLY} | FeatureKeywords.__annotations__.keys()
    assert OPTIONS.keys() == keywords - {"out"}  # each rank has its own


def both_calls(name: str, operation: str) -> list[tuple[str, dict, Options]]:
    """Returns the two calls, whose options differ."""
    shared, *values = OPTIONS[name]
    arrays = arrays_of(operation, "float32" if name == "precision" else "float16")
    # Both layouts have the same kernels with as many heads as rows, and one tile sums in one order in any case.
    if name in ("layout", "deterministic"):
        arrays = arrays_of(operation, rows=4 * ROWS, keys=4 * ROWS)
    arrays = packed(arrays) if "cu_seqlens_q" in shared else arrays
    options = [{**shared, name: value} for value in values]
    if name.startswith("cu_seqlens"):  # both must be of equal length
        options[1] = dict.fromkeys(OFFSETS, values[1])
    return [(operation, arrays, one) for one in options]


#: How often the first call is checked, then the second, and then the first again. Checks do not depend on the seed;
#: calls with functions are checked each time.
CHECKS = {
    "seed": (1, 0, 0),
    **dict.fromkeys(("score_mod", "score_args", "mask_mod", "mask_args", "return_dscore_args"), (1, 1, 1)),
}


class TestRequests:
    """A call that all ranks have agreed on is remembered, and is not taken for another one."""

    # A fake GPU has no sparse maps.
    @pytest.mark.parametrize(("name", "operation"), [case for case in CASES if case[0] != "block_mask"])
    def test_of_another_option(self, name, operation, pair):
        # dlse is subtracted from delta: all that follows is the same.
        checks = CHECKS.get(name, (1, 1, 0))
        check_each_is_itself(pair, both_calls(name, operation), checks, differ=name != "dlse")

    def test_of_an_equal_value_of_another_option(self, pair):
        both = [{name: numbers((HEADS,), "float32")} for name in ("sink", "alibi_slopes")]
        check_each_is_itself(pair, [("forward", arrays_of("forward"), options) for options in both])

    @pytest.mark.parametrize("operation", ["forward", "backward"])
    @pytest.mark.parametrize(
        "other",
        [{"dtype": "bfloat16"}, {"rows": 32}, {"keys": 32}, {"columns": 32}],
        ids=lambda other: next(iter(other)),
    )
    def test_of_other_arrays(self, other, operation, pair):
        check_each_is_itself(pair, [(operation, arrays_of(operation, **one), {}) for one in ({}, other)])

    def test_of_another_operation(self, pair):
        arrays = {name: arrays_of("forward")["q"] for name in "qkv"}
        with_statistics = arrays | {"o": arrays["q"], "lse": numbers(STATISTICS, "float32"), "do": arrays["q"]}
        check_each_is_itself(pair, [("forward", arrays, {}), ("backward", with_statistics, {})])

    def test_of_other_results(self, pair):
        arrays = arrays_of("forward")
        for out in ((np.zeros(arrays["q"].shape, "float32"), None), (None, np.zeros(STATISTICS, "float16"))):
            refused(pair, ("forward", arrays, {"out": (np.zeros_like(arrays["q"]), None)}), arrays, {"out": out})
        shape = (BATCH, ROWS, HEADS, COLUMNS // 2)
        given = {"out": (np.zeros_like(arrays["q"]), np.zeros(STATISTICS, "float32"))}
        for out in ((np.zeros(shape, "float16"), given["out"][1]), (given["out"][0], np.zeros((2, 16, 8), "float32"))):
            refused(pair, ("forward", arrays, given), arrays, {"out": out}, "expected shape")

    @pytest.mark.sample(change=("shape",))
    @pytest.mark.parametrize("change", ["dtype", "shape", "library"])
    @pytest.mark.parametrize("name", ["q", "k", "v", "o", "lse", "do", "dlse", "alibi_slopes", "bias", "mask", "sink"])
    def test_of_arrays_that_are_refused(self, name, change, pair):
        arrays = arrays_of("backward")
        names = ("dlse", "alibi_slopes", "bias", "mask", "sink")
        options = {key: next(x for x in OPTIONS[key][1:] if isinstance(x, np.ndarray)) for key in names}
        changed = dict(arrays | options)
        if change == "library":
            changed[name] = Foreign(changed[name])
        else:
            changed[name] = changed[name].astype("int64") if change == "dtype" else changed[name][..., :-1].copy()
        others = {key: changed[key] for key in arrays}, {key: changed[key] for key in options}
        match = {"dtype": "expected dtype", "shape": "expected|got", "library": "numpy|NumPy"}[change]
        refused(pair, ("backward", arrays, options), *others, match)


def check_each_is_itself(
    pair: Ranks,
    both: list[tuple[str, dict, Options]],
    checks: tuple[int, int, int] = (1, 1, 0),
    differ: bool = True,
) -> None:
    """Checks that each of two calls that differ does the same after the other one as with a new communicator."""
    cold = [[seen for ((seen, _),) in pair.calls(one)] for one in both]
    assert (cold[0] != cold[1]) == differ, "nothing can be told of two calls that are the same"
    for order, expected in (((0, 1, 0), checks), ((1, 0), checks[:2])):
        for rank, found in enumerate(pair.calls(*(both[index] for index in order))):
            assert [seen for seen, _ in found] == [cold[index][rank] for index in order]
            assert tuple(count for _, count in found) == expected


def refused(pair: Ranks, legal: tuple, arrays: dict, options: Options, match: str = "expected dtype") -> None:
    """Checks that a call is refused after a legal one."""

    def work(comm):
        pair.seen(comm, *legal)
        with pytest.raises((TypeError, ValueError), match=match):
            call(comm, legal[0], arrays, options)

    pair.run(work)


#: On a GPU the seed is not compared: a comparison waits for the GPU. Offsets of keys differ with those of queries.
NOT_COMPARED = ("seed", "cu_seqlens_k")


class TestAgreement:
    """A call that differs on one rank in any part raises an error on all ranks, which names it."""

    @pytest.mark.parametrize(("name", "operation"), [case for case in CASES if case[0] not in NOT_COMPARED])
    def test_on_options(self, name, operation, pair):
        check_is_named(pair, name, both_calls(name, operation))

    @pytest.mark.parametrize(
        ("name", "other"),
        [("q", {"dtype": "bfloat16"}), ("q", {"rows": 32}), ("k", {"keys": 32}), ("v", {"columns": 32})],
    )
    def test_on_arrays(self, name, other, pair):
        check_is_named(pair, name, [("forward", arrays_of("forward", **one), {}) for one in ({}, other)])

    def test_on_dtypes_of_features(self, pair):
        both = [{"bias": numbers(SCORES, dtype)} for dtype in ("float16", "float32")]
        check_is_named(pair, "bias", [("forward", arrays_of("forward"), options) for options in both])

    def test_on_operations(self, pair):
        forward = ("forward", arrays_of("forward"), {})
        check_is_named(pair, "call", [forward, ("backward", arrays_of("backward"), {})])

    def test_on_hosts(self, pair):
        pair._ranks_per_host = (1, 2)
        check_is_named(pair, "ranks_per_host", [("forward", arrays_of("forward"), {})] * 2)

    def test_on_seeds_of_numpy_arrays(self):
        whole = make_inputs("float32", seqlen_q=16, num_heads=2, num_heads_kv=2, head_dim=4)

        def work(comm):
            own = [dist.shard(comm, x) for x in whole[:3]]
            with pytest.raises(ValueError, match="^seed: expected the same on all ranks, got 5 on rank 0; 6 on rank 1"):
                dist.forward(comm, *own, dropout_p=0.1, seed=5 + comm.rank)

        dist.simulate(SIZE, work, timeout=10)

    def test_on_functions_by_what_they_compute(self):
        """As processes do, each rank has functions of its own; equal numbers make them equal."""
        whole = make_inputs("float64", seqlen_q=16, num_heads=2, num_heads_kv=2, head_dim=4)

        def work(comm, score_mod, mask_mod):
            own = [dist.shard(comm, x) for x in whole[:3]]
            return dist.unshard(comm, dist.forward(comm, *own, score_mod=score_mod, mask_mod=mask_mod)[0])

        def score_mod(factor):
            return lambda score, b, h, q, k: score * factor

        def mask_mod(distance):
            return lambda b, h, q, k: abs(q - k) < distance

        found = dist.simulate(SIZE, lambda comm: work(comm, score_mod(2.0), mask_mod(5)), timeout=10)
        expected, _ = fa2cupy.forward(*whole[:3], score_mod=score_mod(2.0), mask_mod=mask_mod(5))
        np.testing.assert_allclose(found[0], expected, atol=1e-12)
        with pytest.raises(ValueError, match="^score_mod: expected the same on all ranks"):
            dist.simulate(SIZE, lambda comm: work(comm, score_mod(2.0 + comm.rank), mask_mod(5)), timeout=10)
        with pytest.raises(ValueError, match="^mask_mod: expected the same on all ranks"):
            dist.simulate(SIZE, lambda comm: work(comm, score_mod(2.0), mask_mod(5 + comm.rank)), timeout=10)

    def test_on_the_same_error_twice(self, pair):
        pair.run(lambda comm: check_errors(lambda arrays: call(comm, "forward", arrays, {"softcap": 3.0}), comm.rank))

    def test_on_the_same_error_of_numpy_arrays_twice(self):
        def work(comm):
            check_errors(lambda arrays: dist.forward(comm, *arrays.values(), softcap=3.0), comm.rank)

        dist.simulate(SIZE, work, timeout=10)


def check_errors(forward, rank: int) -> None:
    """Checks that a rank that cannot make a call says so each time: the others wait for it each time."""
    arrays = arrays_of("forward")
    wrong = arrays | ({"k": arrays["k"][..., :8].copy()} if rank else {})
    for _ in range(2):
        match = "^k: expected shape" if rank else "^rank 1 cannot make this call: ValueError: k: expected"
        with pytest.raises(ValueError, match=match):
            forward(wrong)
    forward(arrays)


def check_is_named(pair: Ranks, name: str, both: list[tuple[str, dict, Options]]) -> None:
    """Checks the error of ranks that make two calls."""

    def work(comm):
        with pytest.raises(ValueError) as caught:
            call(comm, *both[comm.rank])
        return str(caught.value)

    for message in pair.run(work):
        assert re.match(rf"{name}(\[0\])?: expected the same on all ranks, got ", message), message


# ------------------------------------------------------------------------------------------------ what parts depend on

SMALL = {"batch": 2, "seqlen_q": 16, "seqlen_k": 16, "num_heads": 8, "num_heads_kv": 4, "head_dim": 4}


def of_head(score, b, h, q, k):
    return score + h * 0.25


def of_rows(score, b, h, q, k):
    return score + (q - k) * 0.25


def masks_of_head(b, h, q, k):
    return (q + k + h) % 3 != 0


def masks_of_rows(b, h, q, k):
    return (q + k) % 3 != 0


@pytest.mark.parametrize("mask_mod", [masks_of_head, masks_of_rows, None])
@pytest.mark.parametrize("score_mod", [of_head, of_rows, None])
@pytest.mark.parametrize("how", [{"scheme": "heads"}, {"scheme": "heads", "head_groups": 2}, {"scheme": "gather"}])
def test_each_function_knows_its_head(how, score_mod, mask_mod):
    inputs = make_inputs("float64", **SMALL)
    given = {"score_mod": score_mod, "mask_mod": mask_mod}
    options = {name: function for name, function in given.items() if function is not None}
    assert_close(ranks.on_ranks(2, inputs, how=how, **options), ranks.whole_call(inputs, **options))


@pytest.mark.parametrize("gradients", [("sink",), ("bias",), ("score_args",), ("sink", "bias", "score_args"), ()])
@pytest.mark.parametrize("scheme", ["heads", "gather"])
def test_gradients_of_features_where_copies_have_groups_of_several_sizes(scheme, gradients, monkeypatch):
    """Gradients of features are summed over all heads, in one group, as in calls of many rows."""
    inputs = make_inputs("float64", **SMALL | {"num_heads": 16, "num_heads_kv": 8})
    options: dict = {"causal": True}
    if "sink" in gradients:
        options["sink"] = numbers((16,), "float64")
    if "bias" in gradients:
        options["bias"] = numbers((16, 16, 16), "float64")
    if "score_args" in gradients:
        options |= {"score_mod": scaled, "score_args": (numbers((16,), "float64"),)}
    monkeypatch.setattr(groups_module, "_FEW_ROWS", 0)
    monkeypatch.setattr(groups_module, "_LEAST_ROWS", 1)
    monkeypatch.setattr(groups_module, "_LONG_KERNELS", 1 << 40)
    groups = []
    of_copies = groups_module.groups_of_copies
    monkeypatch.setattr(
        groups_module, "groups_of_copies", lambda request: groups.append(of_copies(request)) or groups[-1]
    )
    with ranks.thread_windows(monkeypatch):
        found = ranks.on_ranks(2, inputs, how={"scheme": scheme}, **options)
    assert_close(found, ranks.whole_call(inputs, **options))
    assert {len(one) for one in groups} == ({1, 3} if gradients else {3})


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("scheme", ["heads", "gather"])
def test_messages_take_groups_of_several_sizes_too(scheme, ratio, monkeypatch):
    """If a K/V head has 4 query heads, groups of "heads" have some of them."""
    inputs = make_inputs("float64", **SMALL | {"num_heads": 8 * ratio, "num_heads_kv": 8})
    options = {"causal": True, "bias": numbers((8 * ratio, 16, 16), "float64"), "mask": booleans((16, 16))}
    how = {"scheme": scheme, "head_groups": 1}
    expected = ranks.on_ranks(2, inputs, how=how, **options)
    sizes = []

    def by_messages(run, number):
        run.request = groups_module.of_copies(run.request)
        sizes.append(run.request.query_groups or run.request.groups)
        return ByMessages(run)

    monkeypatch.setattr(groups_module, "_FEW_ROWS", 0)
    monkeypatch.setattr(groups_module, "_LEAST_ROWS", 1)
    monkeypatch.setattr(groups_module, "_LONG_KERNELS", 1 << 40)
    monkeypatch.setattr(Run, "mover", by_messages)
    found = ranks.on_ranks(2, inputs, how={"scheme": scheme}, **options)
    assert max(map(len, sizes)) >= 3
    for name, result in found.items():
        np.testing.assert_array_equal(result, expected[name], err_msg=name)


class TestBiasesOfOneRow:
    def test_are_the_same_for_all_queries(self):
        inputs = make_inputs("float64", **SMALL)
        options = {"bias": numbers((8, 1, 16), "float64"), "mask": booleans((1, 16))}
        expected = ranks.whole_call(inputs, **options)
        for scheme in ("heads", "gather"):
            assert_close(ranks.on_ranks(2, inputs, how={"scheme": scheme}, **options), expected)

    @pytest.mark.parametrize("name", ["bias", "mask"])
    @pytest.mark.parametrize("rows", [1, 2])
    def test_cannot_be_told_from_a_ranks_own_where_each_has_one(self, name, rows):
        """If a rank has the whole array instead of its row, this is refused with the same words."""
        q, k, v, _ = make_inputs("float64", **SMALL | {"seqlen_q": 2})
        array = numbers((8, rows, 16), "float64") if name == "bias" else booleans((8, rows, 16))

        def work(comm):
            own = [dist.shard(comm, x, order="contiguous") for x in (q, k, v)]
            with pytest.raises(ValueError, match=f"^{name}: it needs at least 2 rows of q on each rank, got 1"):
                dist.forward(comm, *own, order="contiguous", **{name: array})

        dist.simulate(2, work, timeout=10)

    def test_without_an_axis_of_queries_can(self):
        q, k, v, _ = make_inputs("float64", **SMALL | {"seqlen_q": 2})
        bias = numbers((16,), "float64")

        def work(comm):
            own = [dist.shard(comm, x, order="contiguous") for x in (q, k, v)]
            return dist.unshard(comm, dist.forward(comm, *own, order="contiguous", bias=bias)[0], order="contiguous")

        np.testing.assert_allclose(dist.simulate(2, work)[0], fa2cupy.forward(q, k, v, bias=bias)[0], atol=1e-12)
