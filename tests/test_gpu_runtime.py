"""On a GPU: reproducibility, streams, graphs, threads, devices and memory."""

from __future__ import annotations

import concurrent.futures
import threading

import numpy as np
import pytest
from support.feature_cases import numbers, options_of

import fa2cupy
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.registry import choose_family
from fa2cupy.gpu import tensor_maps as tma
from fa2cupy.plan.specs import default_specs
from fa2cupy.testing import Expectation, make_inputs

cp = pytest.importorskip("cupy")
from fa2cupy.gpu import signatures

pytestmark = pytest.mark.gpu

RUNS = 250


def inputs_of(dtype: str = "float16", **options) -> tuple:
    """Returns inputs on the GPU."""
    return make_inputs(dtype, **{"batch": 2, "seqlen_q": 300, "num_heads": 4, "num_heads_kv": 2} | options, xp=cp)


def bits(array):
    """Returns the array as integers, so that equal means equal bit by bit."""
    return array.view({2: "uint16", 4: "uint32", 8: "uint64"}[array.itemsize])


def has_float32_parts(dtype: str) -> bool:
    """Returns True if the GPU multiplies float32 as pairs of float16 numbers."""
    return choose_family("forward", dtype, DeviceInfo.current()).multiplies_parts


@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32", "float64"))
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), ((64, None), (96, None), (128, None), (192, None), (192, 128), (256, None))
)
def test_the_same_call_gives_the_same_bits_250_times(dtype, head_dim, head_dim_v):
    q, k, v, do = inputs_of(dtype, head_dim=head_dim, head_dim_v=head_dim_v)
    o, lse = fa2cupy.forward(q, k, v, causal=True)
    # The bits of atomic sums of single_pass are not promised: dq on tensor cores (dk and dv, too, where blocks share
    # tiles), dk and dv elsewhere.
    once = {"causal": True, "method": "single_pass", "num_splits": 1}
    both = {
        "single_pass": fa2cupy.backward(q, k, v, o, lse, do, **once),
        "two_pass": fa2cupy.backward(q, k, v, o, lse, do, causal=True, method="two_pass"),
    }
    specs = default_specs(DeviceInfo.current(), dtype, head_dim, True, "single_pass", head_dim_v=head_dim_v)
    # Parts of float32 have a second kernel, for heads that they do not represent; these have none.
    family = next(spec.family for spec in specs if spec.operation == "backward")
    promised = (1, 2) if family.backward_owns == "keys" else (0,)
    different = cp.zeros((), "int64")
    out = [cp.empty_like(x) for x in (o, lse, *both["two_pass"])]
    for _ in range(RUNS):
        for x in out:
            x.fill(np.nan)
        fa2cupy.forward(q, k, v, causal=True, out=(out[0], out[1]))
        fa2cupy.backward(q, k, v, o, lse, do, causal=True, deterministic=True, out=tuple(out[2:]))
        for a, b in zip((o, lse, *both["two_pass"]), out, strict=True):
            different += (bits(a) != bits(b)).sum()
        fa2cupy.backward(q, k, v, o, lse, do, **once, out=tuple(out[2:]))
        for index in promised:
            different += (bits(both["single_pass"][index]) != bits(out[2 + index])).sum()
    assert int(different) == 0


def test_work_follows_the_current_stream():
    q, k, v, do = inputs_of(seqlen_q=1000)
    wanted = fa2cupy.forward(q, k, v)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(20):
            # On the default stream these calls would read the zeros, or o before it is written.
            copies = [cp.zeros_like(x) for x in (q, k, v)]
            cp.sort(cp.arange(10**6)[::-1])  # keeps the stream busy
            for copy, x in zip(copies, (q, k, v), strict=True):
                copy[...] = x
            o, lse = fa2cupy.forward(*copies)
            difference = abs(o.astype("float32") - wanted[0].astype("float32")).max()
    stream.synchronize()
    assert float(difference) == 0


def test_a_training_step_is_captured_in_a_graph_and_replayed():
    """Capture fails at any synchronisation or allocation outside of the pool, so there is none."""
    q, k, v, do = inputs_of(seqlen_q=200)
    o, lse = fa2cupy.forward(q, k, v, causal=True)
    results = [cp.empty_like(x) for x in (o, lse, q, k, v)]
    stream = cp.cuda.Stream(non_blocking=True)

    def step():
        fa2cupy.forward(q, k, v, causal=True, out=(results[0], results[1]))
        fa2cupy.backward(
            q, k, v, results[0], results[1], do, causal=True, deterministic=True, delta=delta, out=tuple(results[2:])
        )

    delta = cp.empty_like(lse)
    with stream:
        fa2cupy.delta(o, do, out=delta)
        step()
        stream.synchronize()
        stream.begin_capture()
        fa2cupy.forward(q, k, v, causal=True, out=(results[0], results[1]))
        fa2cupy.delta(results[0], do, out=delta)
        step()
        graph = stream.end_capture()
        fresh = inputs_of(seqlen_q=200, seed=5)
        for old, new in zip((q, k, v, do), fresh, strict=True):
            old[...] = new
        for x in results:
            x.fill(np.nan)
        graph.launch(stream)
        stream.synchronize()
    names = ("o", "lse", "dq", "dk", "dv")
    Expectation(q, k, v, do, causal=True).check(**dict(zip(names, results, strict=True)))


#: Captured calls that need memory: for workspaces, copies of arrays, and sums of gradients.
CAPTURED = {
    "plain": ("bfloat16", {"head_dim": 128}, {"causal": True}),
    "float32": ("float32", {"head_dim": 64}, {"causal": True}),
    "copies": ("float16", {"head_dim": 59}, {"causal": True}),
    "own head_dim of v": ("float16", {"head_dim": 64, "head_dim_v": 40}, {}),
    "copies of v": ("float16", {"head_dim": 64, "head_dim_v": 43}, {}),
    "features": (
        "float16", {"head_dim": 64},
        ("window", "softcap", "alibi by batch", "bias of heads", "mask of rows", "padding", "sink", "dropout"),
    ),
    "packed": ("bfloat16", {"head_dim": 64, "batch": 1}, "packed"),
}  # fmt: skip


def captured_case(name: str) -> tuple[tuple, dict, dict]:
    """Returns arrays, options of both calls, and those of the backward alone."""
    dtype, sizes, options = CAPTURED[name]
    inputs = inputs_of(dtype, **sizes)
    if options == "packed":
        ends = cp.asarray([0, 100, 100, 300], dtype="int32")
        return tuple(x[0] for x in inputs), {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "causal": True}, {}
    if isinstance(options, dict):
        return inputs, options, {}
    sizes = {"batch": 2, "num_heads": 4, "seqlen_q": 300, "seqlen_k": 300}
    given = {key: x for row in options for key, x in options_of(row, dtype, sizes).items()}
    dlse = cp.asarray(numbers((2, 4, 300), "float32"))
    given = {key: cp.asarray(x) if isinstance(x, np.ndarray) else x for key, x in given.items()}
    return inputs, given, {"return_dbias": True, "return_dsink": True, "dlse": dlse}


@pytest.mark.parametrize("method", ("single_pass", "two_pass"))
@pytest.mark.parametrize("name", CAPTURED)
def test_graphs_own_the_memory_of_captured_calls(name, method):
    """Replays a graph on two streams in turn, among other calls, while other arrays take the pool's free memory."""
    (q, k, v, do), options, more = captured_case(name)
    more = {**more, "method": method, "delta": fa2cupy.delta(*[fa2cupy.forward(q, k, v, **options)[0], do])}
    if name == "plain":
        del more["delta"]  # delta is a workspace then, too

    def step() -> tuple:
        o, lse = fa2cupy.forward(q, k, v, **options)
        return o, lse, *fa2cupy.backward(q, k, v, o, lse, do, **options, **more)

    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(2)]
    wanted = step()
    cp.cuda.Device().synchronize()
    with streams[0] as stream:
        step()
        stream.synchronize()
        stream.begin_capture()
        results = step()
        graph = stream.end_capture()
        # These blocks have all sizes that the pool would hand out again, on the stream that gave them back.
        others = [cp.full(size, 0x5A, "uint8") for size in (1 << n for n in range(9, 24)) for _ in range(6)]
        stream.synchronize()
    for turn in range(6):
        for x in results:
            with streams[turn % 2]:
                x.fill(np.nan)
        graph.launch(streams[turn % 2])
        with streams[1 - turn % 2]:
            again = step()
        graph.launch(streams[1 - turn % 2])
        for stream in streams:
            stream.synchronize()
        for x in (again, results):
            assert_equal_results(x, wanted, exact=method == "two_pass" and name != "features")
    assert all(bool((x == 0x5A).all()) for x in others), "a replay has written to memory that is not the graph's"


def assert_equal_results(results: tuple, wanted: tuple, exact: bool) -> None:
    for ours, theirs in zip(results, wanted, strict=True):
        if exact:
            assert bool((bits(ours) == bits(theirs)).all())
        else:  # atomic sums differ in their last bits
            ours, theirs = (x.astype("float32") for x in (ours, theirs))
            finite = cp.isfinite(theirs)
            assert bool((cp.isfinite(ours) == finite).all())
            difference = float(abs(ours - theirs)[finite].max())
            assert difference <= 2e-2 * float(abs(theirs)[finite].max())


#: 15 kinds of calls, each on 10 lengths, so that kernels, copies, maps and records of all kinds are prepared at once.
MIXED = [
    ("float16", 64, {}), ("float16", 64, {"causal": True}), ("bfloat16", 128, {"causal": True}), ("bfloat16", 128, {}),
    ("float16", 59, {"causal": True}), ("bfloat16", 192, {}), ("float16", 256, {"causal": True}), ("float32", 64, {}),
    ("float32", 40, {"causal": True}), ("float64", 64, {}), ("float16", 64, {"softcap": 5.0}),
    ("bfloat16", 64, {"window": (60, 10)}), ("float16", 64, "packed"), ("bfloat16", 128, "packed"),
    ("float32", 64, "packed"),
]  # fmt: skip


def mixed_calls() -> list:
    """Returns functions that give (o, lse, dq, dk, dv), with the same bits each time."""

    def call(dtype: str, head_dim: int, options: dict | str, length: int):
        inputs = inputs_of(dtype, seqlen_q=length, head_dim=head_dim, seed=length)
        if options == "packed":
            inputs = tuple(x[0] for x in inputs)
            ends = cp.asarray([0, length // 3, length // 2, length], dtype="int32")
            options = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        q, k, v, do = inputs

        def run() -> tuple:
            o, lse = fa2cupy.forward(q, k, v, **options)
            return o, lse, *fa2cupy.backward(q, k, v, o, lse, do, deterministic=True, **options)

        return run

    return [call(*kind, 20 + 17 * i + n) for n, kind in enumerate(MIXED) for i in range(10)]


@pytest.mark.long
def test_sixteen_threads_make_150_different_calls_at_once():
    """Nothing is prepared before; each round starts anew, and each thread takes the calls in an order of its own."""
    calls = mixed_calls()
    assert len(calls) == 150
    with concurrent.futures.ThreadPoolExecutor(len(MIXED)) as pool:  # kernels are compiled side by side
        list(pool.map(lambda call: call(), calls[:: len(calls) // len(MIXED)]))
    wanted = [call() for call in calls]
    cp.cuda.Device().synchronize()
    failures: list[object] = []

    def work(number: int, ready: threading.Barrier) -> None:
        try:
            order = np.random.default_rng(number).permutation(len(calls))
            with cp.cuda.Stream(non_blocking=True) as stream:
                different = cp.zeros(len(calls), "int64")
                ready.wait()
                for index in order.tolist():
                    for a, b in zip(calls[index](), wanted[index], strict=True):
                        different[index] += (bits(a) != bits(b)).sum()
                stream.synchronize()
                failures.extend((number, index) for index in cp.flatnonzero(different).tolist())
        except Exception as error:  # handed to the main thread, which fails the test with it
            failures.append(error)

    for round_ in range(4):
        signatures._prepared.clear()
        tma.tensor_maps.cache_clear()
        ready = threading.Barrier(16)
        threads = [threading.Thread(target=work, args=(16 * round_ + n, ready)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_threads_on_their_own_streams(dtype):
    """Half of the shapes are new to the process, so that threads also prepare, compile and load at once."""
    problems = [inputs_of(dtype, seqlen_q=100 + 13 * i, head_dim=(48, 72)[i % 2], seed=i) for i in range(8)]
    failures: list[Exception] = []

    def work(inputs):
        try:
            q, k, v, do = inputs
            with cp.cuda.Stream(non_blocking=True) as stream:
                expected = Expectation(q, k, v, do, causal=True)
                for _ in range(5):
                    o, lse = fa2cupy.forward(q, k, v, causal=True)
                    dq, dk, dv = fa2cupy.backward(q, k, v, o, lse, do, causal=True)
                    stream.synchronize()
                    expected.check(o=o, lse=lse, dq=dq, dk=dk, dv=dv)
        except Exception as error:  # handed to the main thread, which fails the test with it
            failures.append(error)

    cp.cuda.Device().synchronize()
    threads = [threading.Thread(target=work, args=(inputs,)) for inputs in problems]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_a_thread_that_has_not_used_the_device(dtype):
    """The results have memory before, so that only fa2cupy could make the device known to the thread."""
    q, k, v, do = inputs_of(dtype, seqlen_q=90)
    wanted = fa2cupy.forward(q, k, v)
    out = [tuple(cp.empty_like(x) for x in wanted) for _ in range(2)]
    cp.cuda.Device().synchronize()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for result in [threads.submit(fa2cupy.forward, q, k, v, out=x) for x in out]:
            for ours, theirs in zip(result.result(), wanted, strict=True):
                assert cp.array_equal(ours, theirs)


@pytest.mark.several_gpus
def test_arrays_of_a_device_that_is_not_current():
    q, k, v, do = inputs_of()
    wanted = fa2cupy.forward(q, k, v, causal=True)
    with cp.cuda.Device(1):
        others = [cp.asarray(x) for x in (q, k, v, do)]
    o, lse = fa2cupy.forward(*others[:3], causal=True)
    dq, dk, dv = fa2cupy.backward(*others[:3], o, lse, others[3], causal=True)
    assert {x.device.id for x in (o, lse, dq, dk, dv)} == {1} and cp.cuda.Device().id == 0
    assert bool(np.all(cp.asnumpy(o) == cp.asnumpy(wanted[0])))
    with pytest.raises(ValueError, match="k: expected an array on device 0"):
        fa2cupy.forward(q, others[1], v)


@pytest.mark.parametrize("num_splits", (1, None))
@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_memory_beyond_the_results_does_not_grow_with_the_square(dtype, num_splits, request):
    """A score matrix of this length would be 1 GB or more.

    Calls take delta, one float32 dq in single_pass on tensor cores, the arrays of pairs of float16 numbers and an lse
    of IEEE arithmetic for them, and at most four float32 copies of results if blocks share tiles.
    """
    if request.config.getoption("--isolate"):
        pytest.skip("measures CuPy's pool, which --isolate does without")
    seqlen = 65536 if dtype == "float16" else 16384
    q, k, v, do = make_inputs(dtype, seqlen_q=seqlen, num_heads=1, head_dim=64, xp=cp)
    results = [cp.empty_like(x) for x in (q, q, k, v)]
    lse = cp.empty((1, 1, seqlen), "float32")
    pool = cp.get_default_memory_pool()
    peak = 0

    class Peak(cp.cuda.MemoryHook):
        name = "peak"

        def malloc_postprocess(self, **_):
            nonlocal peak
            peak = max(peak, pool.used_bytes())

    before = pool.used_bytes()
    with Peak():
        fa2cupy.forward(q, k, v, causal=True, num_splits=num_splits, out=(results[0], lse))
        forward_bytes = max(0, peak - before)
        for method in ("single_pass", "two_pass"):
            options = {"method": method, "num_splits": num_splits, "out": tuple(results[1:])}
            fa2cupy.backward(q, k, v, results[0], lse, do, causal=True, **options)
    rows = 4 * seqlen
    parts = q.nbytes + 1024 if has_float32_parts(dtype) else 0  # and scales
    workspace = 64 * rows if dtype == "float16" or parts else 0
    tile = 192
    copy = 4 * 65 * (seqlen + tile) if dtype == "float16" and num_splits is None else 0  # of O and lse
    kept = 512 if parts else 0  # extremes: memory that stays zero, which a stream's first call makes for all
    assert forward_bytes <= 4 * copy + 3 * parts + 1024 + kept
    own_lse = rows if parts else 0
    assert 0 < peak - before <= rows + own_lse + workspace + 4 * 2 * copy + 4 * parts + 4096 + kept
