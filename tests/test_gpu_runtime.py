"""On a GPU: reproducibility, streams, graphs, threads, devices and memory."""

from __future__ import annotations

import concurrent.futures
import threading

import numpy as np
import pytest

import fa2cupy
from fa2cupy.testing import Expectation, make_inputs

cp = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

RUNS = 250


def inputs_of(dtype: str = "float16", **options) -> tuple:
    """Inputs on the GPU."""
    return make_inputs(dtype, **{"batch": 2, "seqlen_q": 300, "num_heads": 4, "num_heads_kv": 2} | options, xp=cp)


def bits(array):
    """The array as integers, so that equal means equal bit by bit."""
    return array.view({2: "uint16", 4: "uint32", 8: "uint64"}[array.itemsize])


@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32", "float64"))
@pytest.mark.parametrize("head_dim", (64, 96, 128, 192, 256))
def test_the_same_call_gives_the_same_bits_250_times(dtype, head_dim):
    q, k, v, do = inputs_of(dtype, head_dim=head_dim)
    o, lse = fa2cupy.forward(q, k, v, causal=True)
    both = {method: fa2cupy.backward(q, k, v, o, lse, do, causal=True, method=method) for method in ("single_pass", "two_pass")}
    # What single_pass adds up atomically is not promised: dq of 16-bit data, dk and dv of the others.
    promised = (1, 2) if dtype in ("float16", "bfloat16") else (0,)
    different = cp.zeros((), "int64")
    out = [cp.empty_like(x) for x in (o, lse, *both["two_pass"])]
    for _ in range(RUNS):
        for x in out:
            x.fill(np.nan)
        fa2cupy.forward(q, k, v, causal=True, out=(out[0], out[1]))
        fa2cupy.backward(q, k, v, o, lse, do, causal=True, deterministic=True, out=tuple(out[2:]))
        for a, b in zip((o, lse, *both["two_pass"]), out, strict=True):
            different += (bits(a) != bits(b)).sum()
        fa2cupy.backward(q, k, v, o, lse, do, causal=True, method="single_pass", out=tuple(out[2:]))
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
    """With memory at hand for it, so that nothing but ours could make the device known to the thread."""
    q, k, v, do = inputs_of(dtype, seqlen_q=90)
    wanted = fa2cupy.forward(q, k, v)
    out = [tuple(cp.empty_like(x) for x in wanted) for _ in range(2)]
    cp.cuda.Device().synchronize()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for result in [threads.submit(fa2cupy.forward, q, k, v, out=x) for x in out]:
            for ours, theirs in zip(result.result(), wanted, strict=True):
                assert cp.array_equal(ours, theirs)


def test_arrays_of_a_device_that_is_not_current():
    if cp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two CUDA devices")
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


@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_memory_beyond_the_results_does_not_grow_with_the_square(dtype):
    """lse, delta and (for 16-bit single_pass) one float32 dq; a score matrix of this length would be 8 GB or more."""
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
        fa2cupy.forward(q, k, v, causal=True, out=(results[0], lse))
        forward_bytes = max(0, peak - before)
        for method in ("single_pass", "two_pass"):
            fa2cupy.backward(q, k, v, results[0], lse, do, causal=True, method=method, out=tuple(results[1:]))
    rows = 4 * seqlen
    workspace = 64 * rows if dtype == "float16" else 0
    assert forward_bytes == 0
    assert 0 < peak - before <= rows + workspace + 4096
