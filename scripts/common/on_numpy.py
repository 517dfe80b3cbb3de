"""The section numpy of benchmark.py: calls on NumPy arrays beside attention written out, and PyTorch's CPU operator."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import threadpoolctl
from common.measure import Candidate, progress, write_csv
from common.written_out import WrittenOut, by_sequence, decode

import fa2cupy
from fa2cupy import mods
from fa2cupy.problem import philox

__all__ = ["CASES", "COLUMNS", "cpu_name", "numpy_table", "run_numpy"]

COLUMNS = (
    "cpu", "cores", "date", "numpy", "blas", "blas_threads", "busy", "load", "case", "batch", "seqlen", "num_heads",
    "num_heads_kv", "head_dim", "operation", "provider", "ms_median", "ms_min", "ms_max", "ratio",
)  # fmt: skip
#: Batch, length, heads and head_dim, in float32.
SHAPES = ((1, 2048, 8, 64), (4, 512, 8, 64))
#: Batch, length, heads, K/V heads and head_dim of caches.
CACHES = ((1, 2048, 8, 8, 64), (4, 512, 8, 8, 64), (8, 2048, 8, 2, 64))
PAGE_SIZE = 16
OURS, WRITTEN, TORCH = "fa2cupy", "numpy", "torch"
BUCKETS, CAP, DROPOUT_P = 32, 30.0, 0.1
_CHECKED = 1e-4  # of the largest element of a result
#: A sample is the mean over calls that take about so long together.
_SAMPLE_S = 0.05

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class _Inputs:
    """What all implementations of one case get: q, k, v, do, keywords of ours and of `WrittenOut`, PyTorch's mask."""

    arrays: Arrays
    ours: dict[str, Any]
    written: dict[str, Any]
    attn_mask: np.ndarray | None = None


def _hidden(seqlen: int, sees: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    return ~sees(np.arange(seqlen)[:, None], np.arange(seqlen))


def _documents(batch: int, seqlen: int) -> np.ndarray:
    """Returns the number of each token's document: eight of unequal lengths in each sequence."""
    starts = np.sort(np.random.default_rng(1).choice(np.arange(1, seqlen), (7,), replace=False))
    return np.tile(np.searchsorted(starts, np.arange(seqlen), side="right").astype("int32"), (batch, 1))


def _inputs(case: str, shape: tuple[int, ...]) -> _Inputs:  # noqa: C901 (a list of cases)
    batch, seqlen, heads, _ = shape
    rng = np.random.default_rng(0)
    arrays = tuple(rng.standard_normal((4, *shape), dtype="float32"))
    if case == "plain":
        return _Inputs(arrays, {}, {})
    if case == "causal":
        return _Inputs(arrays, {"causal": True}, {"hidden": _hidden(seqlen, lambda q, k: k <= q)})
    if case == "window":
        left = seqlen // 8
        hidden = _hidden(seqlen, lambda q, k: (k <= q) & (q - left <= k))
        return _Inputs(arrays, {"window": (left, 0)}, {"hidden": hidden})
    if case == "softcap":
        return _Inputs(arrays, {"softcap": CAP}, {"softcap": np.float32(CAP)})
    if case == "alibi":
        slopes = (2.0 ** -np.arange(1, heads + 1)).astype("float32")
        return _Inputs(arrays, {"alibi_slopes": slopes}, {"slopes": slopes})
    if case == "bias":
        bias = rng.standard_normal((1, heads, seqlen, seqlen), dtype="float32")
        return _Inputs(arrays, {"bias": bias}, {"bias": bias}, bias)
    if case == "mask":
        mask = (rng.random((batch, 1, seqlen, seqlen), dtype="float32") < 0.9) | np.eye(seqlen, dtype=bool)
        return _Inputs(arrays, {"mask": mask}, {"hidden": ~mask}, mask)
    if case == "padding":
        seen = np.arange(seqlen) < seqlen - seqlen * (1 + np.arange(batch))[:, None] // (4 * batch)
        whole = seen[:, None, None]
        return _Inputs(arrays, {"key_padding_mask": seen}, {"hidden": ~whole}, whole)
    if case == "sink":
        sink = np.linspace(-1, 2, heads, dtype="float32")
        return _Inputs(arrays, {"sink": sink}, {"sink": sink})
    if case == "dropout":
        kept = np.float32(1 / (1 - DROPOUT_P))
        draw = np.random.default_rng(0)
        written = {"draw": lambda size: (draw.random(size, dtype="float32") >= DROPOUT_P) * kept}
        return _Inputs(arrays, {"dropout_p": DROPOUT_P, "seed": 1}, written)
    if case == "packed":
        total = batch * seqlen
        offsets = np.array([0, total // 8, total // 2, total * 5 // 8, total], "int32")
        packed = tuple(x.reshape(total, *x.shape[2:]) for x in arrays)
        lengths = {f"{name}_{side}": x for side in "qk" for name, x in (("cu_seqlens", offsets),)}
        return _Inputs(packed, lengths, {"offsets": offsets.tolist()})
    if case == "score_mod table":
        table_ = rng.standard_normal((BUCKETS, heads), dtype="float32")
        mod = mods.t5_relative(BUCKETS)
        q, k = np.arange(seqlen)[:, None], np.arange(seqlen)
        numbers = np.arange(BUCKETS, dtype="float32")[:, None]
        buckets = mod(0.0, 0, 0, q, k, numbers).astype("int64")
        return _Inputs(arrays, {"score_mod": mod, "score_args": (table_,)}, {"table": table_, "buckets": buckets})
    if case == "score_mod softcap":
        return _Inputs(arrays, {"score_mod": mods.softcap(CAP)}, {"softcap": np.float32(CAP)})
    ids = _documents(batch, seqlen)
    ours = {"mask_mod": mods.document, "mask_args": (ids,)}
    if case == "block_mask":
        ours["block_mask"] = fa2cupy.block_mask(mods.document, (ids,), batch, heads, seqlen, seqlen, like=ids)
    return _Inputs(arrays, ours, {"hidden": ~(ids[:, None, :, None] == ids[:, None, None, :])})


CASES = (
    "plain", "causal", "window", "softcap", "alibi", "bias", "mask", "padding", "sink", "dropout", "packed",
    "score_mod table", "score_mod softcap", "mask_mod", "block_mask", "decode", "decode pages",
)  # fmt: skip
#: The cases that PyTorch's operator takes.
TORCH_CASES = ("plain", "causal", "bias", "mask", "padding")


def _ours(inputs: _Inputs, case: str) -> tuple[Callable[[], Arrays], Callable[[], Arrays]]:
    q, k, v, do = inputs.arrays
    o, lse = fa2cupy.forward(q, k, v, **inputs.ours)
    gradient = {"bias": "return_dbias", "sink": "return_dsink", "score_mod table": "return_dscore_args"}.get(case)
    wanted = {gradient: True} if gradient else {}
    return (
        lambda: fa2cupy.forward(q, k, v, **inputs.ours)[:1],
        lambda: fa2cupy.backward(q, k, v, o, lse, do, **inputs.ours, **wanted),
    )


def _torch(inputs: _Inputs, case: str) -> tuple[Callable[[], Arrays], Callable[[], Arrays]]:
    import torch

    q, k, v, do = (torch.from_numpy(x).transpose(1, 2) for x in inputs.arrays)
    mask = None if inputs.attn_mask is None else torch.from_numpy(inputs.attn_mask)
    needs = [x.detach().requires_grad_() for x in (q, k, v)]
    if case == "bias":
        needs.append(mask.detach().requires_grad_())
    call = torch.nn.functional.scaled_dot_product_attention
    graph = call(*needs[:3], attn_mask=needs[3] if case == "bias" else mask, is_causal=case == "causal")

    def forward() -> Arrays:
        with torch.no_grad():
            return (call(q, k, v, attn_mask=mask, is_causal=case == "causal").transpose(1, 2).numpy(),)

    def backward() -> Arrays:
        found = torch.autograd.grad(graph, needs, do, retain_graph=True)
        return (*(x.transpose(1, 2).numpy() for x in found[:3]), *(x.numpy() for x in found[3:]))

    return forward, backward


def _keep_of_ours(shape: tuple[int, ...]) -> np.ndarray:
    """Returns the factors of dropout that ours draws."""
    batch, heads, *rows = shape
    whole = (slice(0, heads), *(slice(0, length) for length in rows))
    drawn = np.stack([philox.kept(DROPOUT_P, 1, b, *whole) for b in range(batch)])
    return drawn * np.float32(philox.dropout_scale(DROPOUT_P))


def _attention(case: str, shape: tuple[int, ...], torch: bool) -> Iterator[tuple[str, dict[str, Callable[[], Arrays]]]]:
    """Yields operations with the calls of all implementations, checked."""
    inputs = _inputs(case, shape)
    kind: Any = by_sequence if case == "packed" else WrittenOut
    written = kind(*inputs.arrays, **inputs.written)
    calls = {OURS: _ours(inputs, case), WRITTEN: (written.forward, written.backward)}
    checked = kind(*inputs.arrays, **{**inputs.written, "draw": _keep_of_ours}) if case == "dropout" else written
    if torch and case in TORCH_CASES:
        calls[TORCH] = _torch(inputs, case)
    for number, operation in enumerate(("forward", "backward")):
        expected = (checked.forward, checked.backward)[number]()
        for name, both in calls.items():
            if name != WRITTEN:
                _check(f"{case} {shape} {operation}: {name}", both[number](), expected)
        if case == "dropout":
            written.forward()
        yield operation, {name: both[number] for name, both in calls.items()}


def _decoding(case: str, shape: tuple[int, ...]) -> Iterator[tuple[str, dict[str, Callable[[], Arrays]]]]:
    batch, seqlen, heads, heads_kv, head_dim = shape
    rng = np.random.default_rng(0)
    q = rng.standard_normal((batch, 1, heads, head_dim), dtype="float32")
    caches = rng.standard_normal((2, batch, seqlen, heads_kv, head_dim), dtype="float32")
    lengths = np.full(batch, seqlen, "int32")
    pages: dict[str, Any] = {}
    if case == "decode pages":
        caches = caches.reshape(2, -1, PAGE_SIZE, heads_kv, head_dim)
        pages = {"block_table": rng.permutation(caches.shape[1]).astype("int32").reshape(batch, -1)}
    calls: dict[str, Callable[[], Arrays]] = {
        OURS: lambda: fa2cupy.decode(q, *caches, lengths, **pages)[:1],
        WRITTEN: lambda: (decode(q, *caches, lengths, **pages),),
    }
    _check(f"{case} {shape}", calls[OURS](), calls[WRITTEN]())
    yield "forward", calls


def _check(what: str, found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        error = float(abs(one.reshape(other.shape) - other).max() / abs(other).max())
        if not error < _CHECKED:
            raise AssertionError(f"{what}: an error of {error:.3g} of the largest element")


def _seconds(call: Callable[[], object], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def _by_turns(calls: dict[str, Callable[[], Arrays]], rounds: int, rng: random.Random) -> dict[str, list[float]]:
    """Returns the milliseconds of each implementation by round; they take turns in shuffled order."""
    candidates = [Candidate(name, call) for name, call in calls.items()]
    repeats = {one.name: max(1, round(_SAMPLE_S / _seconds(one.call, 1))) for one in candidates}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for one in rng.sample(candidates, len(candidates)):
            times[one.name].append(1e3 * _seconds(one.call, repeats[one.name]))
    return times


def cpu_name() -> str:
    """Returns the name of the processor, with the number of cores that this process may use."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line for line in lines if line.startswith("model name")).partition(":")[2]
        return " ".join(name.replace("(R)", "").split())
    return platform.processor() or platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _spin() -> None:
    while True:
        pass


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    """Keeps so many other processes busy."""
    spinning = [multiprocessing.get_context("spawn").Process(target=_spin, daemon=True) for _ in range(count)]
    for process in spinning:
        process.start()
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.join()


def _stamp(busy: int) -> dict[str, object]:
    (blas, *_) = threadpoolctl.ThreadpoolController().select(user_api="blas").info() or [{}]
    return {
        "cpu": cpu_name(),
        "cores": _cores(),
        "date": datetime.date.today().isoformat(),
        "numpy": np.__version__,
        "blas": f"{blas.get('internal_api', '')} {blas.get('version', '')}".strip(),
        "blas_threads": blas.get("num_threads", ""),
        "busy": busy,
    }


def run_numpy(
    cases: Sequence[str],
    rounds: int,
    path: Path,
    busy: Sequence[int] = (0, 2),
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    caches: Sequence[tuple[int, ...]] = CACHES,
) -> list[str]:
    """Measures all cases and writes the rows after each; returns the failures.

    Parameters
    ----------
    busy : sequence of int
        Numbers of other processes that keep cores busy; all is measured with each.
    """
    failures: list[str] = []
    rows: list[dict[str, object]] = []
    rng = random.Random(0)
    torch = _has_torch()
    work = [
        (count, case, shape)
        for count in busy
        for case in cases
        for shape in (caches if case.startswith("decode") else shapes)
    ]
    with progress(len(work), "numpy") as bar:
        for count, case, shape in work:
            is_cache = case.startswith("decode")
            try:
                with _busy(count):
                    for operation, calls in _decoding(case, shape) if is_cache else _attention(case, shape, torch):
                        times = _by_turns(calls, rounds, rng)
                        sizes = shape if is_cache else (*shape[:3], *shape[2:])
                        row = {**_stamp(count), "load": f"{os.getloadavg()[0]:.1f}", "case": case}
                        row |= dict(zip(("batch", "seqlen", "num_heads", "num_heads_kv", "head_dim"), sizes))
                        rows += _rows({**row, "operation": operation}, times)
            except AssertionError as error:
                failures.append(f"WRONG: {error}")
            write_csv(path, COLUMNS, rows)
            bar.update()
    print("", *numpy_table(rows), "", sep="\n")
    return failures


def _has_torch() -> bool:
    try:
        import torch
    except ImportError:
        return False
    torch.set_num_threads(_cores())
    return True


def _rows(row: dict[str, object], times: dict[str, list[float]]) -> list[dict[str, object]]:
    found = []
    for name, samples in times.items():
        one = {**row, "provider": name, "ms_median": statistics.median(samples)}
        one |= {"ms_min": min(samples), "ms_max": max(samples)}
        if name != OURS:
            one["ratio"] = statistics.median(a / b for a, b in zip(samples, times[OURS], strict=True))
        found.append(one)
    return found


def numpy_table(rows: Sequence[dict[str, object]]) -> list[str]:
    """Returns the times of written-out NumPy and PyTorch over ours, by case and shape, as lines."""
    found: dict[tuple, dict[tuple, str]] = {}
    columns: dict[tuple, None] = {}
    for row in rows:
        if row["provider"] == OURS:
            continue
        sizes = " x ".join(str(row[name]) for name in ("batch", "seqlen"))
        place = (row["case"], sizes, row["operation"])
        column = (row["provider"], int(row["busy"]))  # type: ignore[call-overload]
        columns[column] = None
        found.setdefault(place, {})[column] = f"{float(row['ratio']):.2f}"  # type: ignore[arg-type]
    heads = [f"{name}{', busy' if busy else ''}" for name, busy in columns]
    lines = [f"{'time over ours':42s}" + "".join(f"{head:>14s}" for head in heads)]
    for (case, sizes, operation), ratios in found.items():
        lines.append(f"{case:18s}{sizes:12s}{operation:12s}" + "".join(f"{ratios.get(x, ''):>14s}" for x in columns))
    return lines
