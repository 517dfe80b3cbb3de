"""Threads of calls on NumPy arrays: BLAS has one while a call runs, and results do not depend on their number."""

from __future__ import annotations

import multiprocessing
import threading

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController, threadpool_limits

import fa2cupy
from fa2cupy import TileConfig, mods
from fa2cupy.cpu import threads
from fa2cupy.cpu.threads import BLAS, in_threads
from fa2cupy.distributed import simulate
from fa2cupy.testing import make_inputs


def blas_threads() -> list[int]:
    return [library.num_threads for library in ThreadpoolController().select(user_api="blas").lib_controllers]


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    """BLAS has two threads, and a call of any size uses them."""
    monkeypatch.setattr(threads, "_FEW", 0)
    with threadpool_limits(2, user_api="blas"):
        if blas_threads() != [2]:
            pytest.skip("NumPy's BLAS has no number of threads that can be set")
        yield


@pytest.mark.parametrize("bias_shape", [(3, 4, 20, 30), (4, 20, 30), (20, 30), (3, 1, 1, 30)])
@pytest.mark.parametrize("method", ["single_pass", "two_pass"])
def test_results_do_not_depend_on_the_number_of_threads(bias_shape, method):
    """Also gradients that are sums over heads and sequences, and the parts of a head with several tiles of queries."""
    rng = np.random.default_rng(0)
    q, k, v, do = make_inputs("float32", batch=3, seqlen_q=20, seqlen_k=30, num_heads=4, num_heads_kv=2, head_dim=8)
    features = {"bias": rng.standard_normal(bias_shape, dtype="float32"), "sink": rng.standard_normal(4, dtype="f4")}
    features |= {"score_mod": mods.alibi(), "score_args": (rng.standard_normal(4, dtype="float32"),)}
    features["config"] = TileConfig(4, 16, 1)
    wanted = {"return_dbias": True, "return_dsink": True, "return_dscore_args": True}

    def results() -> list[bytes]:
        o, lse = fa2cupy.forward(q, k, v, **features)
        gradients = fa2cupy.backward(q, k, v, o, lse, do, **features, **wanted, method=method)
        return [x.tobytes() for x in (o, lse, fa2cupy.delta(o, do), *gradients)]

    found = results()
    for number in (1, 3):
        with threadpool_limits(number, user_api="blas"):
            assert results() == found


def test_blas_has_one_thread_within_calls_and_its_own_after_them():
    with BLAS as outside:
        assert outside == 2 and blas_threads() == [1]
        with BLAS as outside:
            assert outside == 2 and blas_threads() == [1]
        assert blas_threads() == [1]
    assert blas_threads() == [2]


def test_of_calls_that_overlap_the_last_one_restores_blas():
    first, second = BLAS, BLAS
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert blas_threads() == [1]
    second.__exit__(None, None, None)
    assert blas_threads() == [2]


def test_items_are_in_threads_and_their_results_in_order():
    together = threading.Barrier(2, timeout=20)

    def work(item: int) -> tuple[int, str]:
        together.wait()  # the other item is in another thread
        return item, threading.current_thread().name

    (first, name), (second, other) = in_threads(work, [0, 1], 1)
    assert (first, second) == (0, 1) and name != other and "fa2cupy" in name


def test_an_error_comes_when_nothing_runs_any_more():
    """Otherwise threads would write to results after the caller has them back."""
    failed, running = threading.Event(), []

    def work(item: int) -> None:
        if item == 0:
            failed.set()
            raise IndexError("of the first")
        failed.wait(20)
        running.append(item)
        np.linalg.inv(np.eye(300))
        running.remove(item)

    with pytest.raises(IndexError, match="of the first"):
        in_threads(work, range(8), 1)
    assert not running and blas_threads() == [2]


def test_a_call_within_a_call_takes_no_thread_that_waits_for_it():
    """Both threads of the pool would wait for a third one."""
    found = in_threads(lambda item: in_threads(lambda x: x + 1, [item, 10 * item], 1), [1, 2], 1)
    assert found == [[2, 11], [3, 21]]


def test_warnings_of_numpy_are_off_in_threads():
    with np.errstate(all="raise"):
        assert in_threads(lambda x: float(np.log(np.float32(x))), [0.0, 0.0], 1) == [-np.inf, -np.inf]


def test_ranks_have_one_thread_of_blas_each():
    assert simulate(2, lambda comm: blas_threads()) == [[1], [1]]
    assert blas_threads() == [2]


def _in_a_child(connection, arrays) -> None:
    connection.send(fa2cupy.forward(*arrays)[0].tobytes())


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own():
    arrays = make_inputs("float32", seqlen_q=8, num_heads=4, head_dim=8)[:3]
    expected = fa2cupy.forward(*arrays)[0].tobytes()
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_in_a_child, args=(there, arrays), daemon=True)
    with BLAS:  # the child's count of calls begins at 0
        child.start()
    assert here.poll(20), "the child waits for threads of its parent"
    assert here.recv() == expected
    child.join(20)
