"""Calls of fa2cupy.distributed in one process per GPU, compared with one call on one GPU."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import queue
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from support import ranks
from support.feature_cases import numbers, options_of

import fa2cupy
import fa2cupy.distributed as dist
from fa2cupy.testing import make_inputs

SIZES = {"batch": 2, "seqlen_q": 256, "seqlen_k": 256, "num_heads": 8, "num_heads_kv": 4, "head_dim": 64}
#: Packed sequences are one array. "groups" has several heads per rank on four GPUs. "functions" has chunks of 128 rows
#: there: its kernels have tiles of 96 keys, and which of them need a mask depends on where a block of 64 rows begins.
OTHER_SIZES = {
    "packed": {"batch": 1},
    "groups": {"num_heads": 16, "num_heads_kv": 8},
    "two head_dims": {"head_dim": 96, "head_dim_v": 64},
    "functions": {"seqlen_q": 1024, "seqlen_k": 1024},
}
DTYPE, TOLERANCE = "float16", 5e-3  # of the largest value: shares of gradients are rounded before they are summed
FEATURES = ("window", "softcap", "alibi", "bias", "bias of keys", "mask", "padding", "sink", "dropout", "functions")
CASES = (
    *((scheme, name) for scheme in ("heads", "gather", "hybrid") for name in ("causal", *FEATURES)),
    ("heads", "groups"), ("heads", "packed"), ("heads", "sparse"), ("heads", "two head_dims"),
    ("gather", "two head_dims"), ("heads", "second order"),
    *((scheme, "graph") for scheme in ("heads", "gather", "hybrid")),
)  # fmt: skip
#: What the last rank does while the others make calls on which all ranks have agreed before.
FAILURES = ("makes another call", "makes a call of another scheme", "ends", "is late")


def distance(score, b, h, q, k, table):
    return score + table[h, q] * (q - k) / 256


def document(b, h, q, k, ids):
    return ids[b, q] == ids[b, k]


def case_of(name: str) -> tuple[dict, dict]:
    """Returns sizes and keywords of a case, with NumPy arrays."""
    sizes = SIZES | OTHER_SIZES.get(name, {})
    rows = sizes["seqlen_q"]
    ids = np.repeat(np.arange(4, dtype="int32"), rows // 4)[None].repeat(sizes["batch"], axis=0)
    if name == "functions":
        of_functions = {"score_mod": distance, "score_args": (numbers((8, rows), "float32"),), "mask_mod": document}
        return sizes, {"causal": True, **of_functions, "mask_args": (ids,)}
    if name == "sparse":
        return sizes, {"mask_mod": document, "mask_args": (ids,)}
    if name in ("groups", "two head_dims"):
        return sizes, {"causal": True}
    if name == "packed":
        offsets = np.array([0, 5, 100, 100, 250], "int32")
        return sizes, {"causal": True, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    return sizes, {"causal": True} | options_of(name, DTYPE, sizes)


def compare(comm: dist.Communicator, scheme: str, name: str) -> str:
    """Returns what is wrong with a case on this rank; empty if nothing is."""
    if name == "graph":
        return compare_graph(comm, scheme)
    if name == "second order":
        return compare_second_order(comm)
    import cupy

    def on_device(x):
        if isinstance(x, tuple):
            return tuple(map(on_device, x))
        return cupy.asarray(x) if isinstance(x, np.ndarray) else x

    sizes, given = case_of(name)
    options = {key: on_device(x) for key, x in given.items()} | {"num_splits": 1}
    inputs = make_inputs(DTYPE, **sizes, xp=cupy)
    if name == "sparse":
        size = (sizes["batch"], 1, sizes["seqlen_q"], sizes["seqlen_k"])
        options["block_mask"] = fa2cupy.block_mask(document, options["mask_args"], *size)
    if name == "packed":
        inputs = tuple(x[0] for x in inputs)
    expected = ranks.whole_call(inputs, **options)
    how = {"scheme": scheme} | ({"head_groups": 2} if name == "groups" else {})
    for attempt in range(3):  # a message or a kernel that is too early once need not be so each time
        found = ranks.of_rank(comm, inputs, None, None, how, options)
        for key, wanted in expected.items():
            if key in ("o", "lse"):
                if not (found[key] == wanted).all():
                    return f"{key} of call {attempt} has other bits"
                continue
            finite = cupy.isfinite(wanted)
            error = abs(cupy.where(finite, found[key].astype("float64") - wanted, 0)).max()
            if not error <= TOLERANCE * abs(cupy.where(finite, wanted, 0).astype("float64")).max():
                return f"{key} of call {attempt} differs by {float(error):.2e}"
    return ""


def compare_graph(comm: dist.Communicator, scheme: str) -> str:
    """Captures a forward and its backward in a CUDA graph, and compares its results with those of plain calls."""
    import cupy

    options = {"causal": True, "scheme": scheme, "order": "zigzag"}

    def step() -> tuple:
        o, lse = dist.forward(comm, *given[:3], **options)
        return (o, lse, *dist.backward(comm, *given[:3], o, lse, given[3], deterministic=True, **options))

    drawn = [[dist.shard(comm, x) for x in make_inputs(DTYPE, **SIZES, xp=cupy, seed=n)] for n in range(3)]
    given = [x.copy() for x in drawn[0]]
    step()
    cupy.cuda.Device().synchronize()  # the stream of the capture does not wait for the current one
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        step()
        stream.begin_capture()
        results = step()
        graph = stream.end_capture()
        for number, inputs in enumerate((*drawn, drawn[0])):
            for target, source in zip(given, inputs, strict=True):
                target[...] = source
            expected = [x.copy() for x in step()]
            for x in results:
                x.fill(0)
            graph.launch()
            stream.synchronize()
            if not all((one == other).all() for one, other in zip(results, expected, strict=True)):
                return f"launch {number} has other bits"
    return ""


def compare_second_order(comm: dist.Communicator) -> str:
    """Compares tangents and second derivatives of ranks with those of one GPU, in float32, for all GPUs have these."""
    import cupy

    q, k, v, do = make_inputs("float32", **SIZES, xp=cupy)
    qt, kt, vt, dot = make_inputs("float32", **SIZES, xp=cupy, seed=1)
    arrays = {"q": q, "k": k, "v": v, "do": do, "qt": qt, "kt": kt, "vt": vt, "dot": dot}

    def results(functions: Any, own: dict, *comm: dist.Communicator) -> tuple:
        given, moved = (tuple(own[name] for name in names) for names in (("q", "k", "v"), ("qt", "kt", "vt")))
        o, lse, ot, lset = functions.jvp(*comm, *given, *moved, causal=True)
        options = {"causal": True, "deterministic": True}
        found = functions.backward_jvp(*comm, *given, o, lse, own["do"], *moved, ot, lset, own["dot"], **options)
        found += functions.double_backward(*comm, *given, o, lse, own["do"], *moved, **options)
        return (o, ot, *found)

    expected = results(fa2cupy, arrays)
    own = {name: dist.shard(comm, x) for name, x in arrays.items()}
    for attempt in range(3):
        found = results(dist, own, comm)
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            if not (dist.unshard(comm, one) == other).all():
                return f"result {number} of call {attempt} has other bits"
    return ""


def compare_failure(comm: dist.Communicator, how: str) -> str:
    """Lets the last rank leave the others alone: streams must still end, and the next call raises the error."""
    q, k, v = _first_calls(comm)
    is_last = comm.rank == comm.size - 1
    if is_last and how == "ends":
        return ""
    if is_last and how == "is late":
        time.sleep(8)  # the others have failed: their streams go on, with rows that have not come
    try:
        _go_on(comm, q, k, v, is_last, how)
    except dist.CommunicationError as error:
        return "" if "has waited" in str(error) or "have failed" in str(error) else str(error)
    return "no error"


def _first_calls(comm: dist.Communicator) -> list[Any]:
    """Makes the calls that `_go_on` repeats, and returns their arrays."""
    import cupy

    q, k, v = (dist.shard(comm, x) for x in make_inputs(DTYPE, **SIZES, xp=cupy)[:3])
    for scheme in ("heads", "gather", "hybrid"):
        for softcap in (1.0, 2.0):
            dist.forward(comm, q, k, v, softcap=softcap, scheme=scheme)
    cupy.cuda.Device().synchronize()
    return [q, k, v]


def _go_on(comm: dist.Communicator, q: Any, k: Any, v: Any, is_last: bool, how: str) -> None:
    import cupy

    for scheme in ("heads", "gather", "hybrid"):
        if is_last and how == "makes a call of another scheme":
            scheme = "hybrid" if scheme == "heads" else "heads"
        softcap = 2.0 if is_last and how == "makes another call" else 1.0
        dist.forward(comm, q, k, v, softcap=softcap, scheme=scheme)
    cupy.cuda.Device().synchronize()
    dist.forward(comm, q, k, v, softcap=1.0, scheme="heads")


def work(rank: int, size: int, port: int, cases: tuple, answers) -> None:
    """Runs in the process of one GPU: puts (rank, case, text) for each case."""
    try:
        comm = _communicator(rank, size, port, timeout=60.0)
        for case in cases:
            answers.put((rank, case, compare(comm, *case)))
    except BaseException:  # the parent fails the cases that are left
        answers.put((rank, None, traceback.format_exc()))


def compile_ahead(rank: int, size: int, port: int, cases: tuple, answers) -> None:
    """Like `work`: compiles the kernels of `fail`, whose ranks do not wait as long as compilers may take."""
    try:
        _first_calls(_communicator(rank, size, port, timeout=300.0))
        answers.put((rank, cases[0], ""))
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))


def fail(rank: int, size: int, port: int, cases: tuple, answers) -> None:
    """Like `work`, for one of `FAILURES`; the process ends at once."""
    try:
        text = compare_failure(_communicator(rank, size, port, timeout=3.0), cases[0])
    except BaseException:
        text = traceback.format_exc()
    answers.put((rank, cases[0], text))
    answers.close()
    answers.join_thread()
    os._exit(0)  # a rank that ends normally would tell NCCL


def _communicator(rank: int, size: int, port: int, timeout: float) -> dist.Communicator:
    import cupy

    cupy.cuda.Device(rank).use()
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return dist.Communicator.from_env(environment, ranks_per_host=max(1, size // 2), timeout=timeout)


@functools.cache
def results(
    size: int, cases: tuple = CASES, target: Callable[..., None] = work, patience: float = 300.0
) -> dict[Any, str]:
    """Returns what is wrong with each case on any rank; waits `patience` seconds for each answer."""
    found: dict[Any, str] = dict.fromkeys(cases, "")
    left = {(rank, case) for rank in range(size) for case in cases}
    for rank, case, text in _answers(size, cases, target, patience):
        if case is None:
            return {one: found[one] if (rank, one) not in left else text for one in cases}
        left.discard((rank, case))
        found[case] = found[case] or (text and f"rank {rank}: {text}")
    return {one: "no answer" if any((rank, one) in left for rank in range(size)) else found[one] for one in cases}


def _answers(size: int, cases: tuple, target: Callable[..., None], patience: float) -> Iterator[tuple]:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    own = [(rank, size, port, cases, answers) for rank in range(size)]
    processes = [context.Process(target=target, args=arguments, daemon=True) for arguments in own]
    for process in processes:
        process.start()
    try:
        with contextlib.suppress(queue.Empty):
            for _ in range(size * len(cases)):
                yield answers.get(timeout=patience)
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
