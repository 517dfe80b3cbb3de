"""Calls with sparse maps beside our own without one, and the making of maps beside PyTorch's ``create_block_mask``."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from common.measure import DEFAULT, Candidate, Gpu, Problem, Tensors, flops, rotating, rotating_inputs, time_in_rounds
from common.tables import ratio_table

import fa2cupy
from fa2cupy.testing import Expectation

__all__ = ["COLUMNS", "MAP_SEQLEN", "PATTERNS", "SparseBenchmark", "sparse_problems", "sparse_table"]

COLUMNS = (
    "gpu", "driver", "date", "dtype", "head_dim", "seqlen", "batch", "num_heads", "causal", "pattern", "density",
    "operation", "provider", "ms_median", "ms_min", "ms_max", "tflops", "ratio", "over_evaluated",
)  # fmt: skip
#: Ends the names of patterns whose function kernels do not know: they decide on each score of mixed tiles.
EVALUATED = " evaluated"
PATTERNS = (
    "document", "window1024", "dilated", "prefix-LM", "random 0.1", "random 0.5", "13 x 13", f"13 x 13{EVALUATED}",
    "5 x 5 x 5", f"5 x 5 x 5{EVALUATED}",
)  # fmt: skip
OPERATIONS = ("forward", DEFAULT)
HEAD_DIMS, SEQLENS, MODEL_DIM, DOCUMENTS = (64, 128), (4096, 8192, 16384), 2048, 16
TILE = 128
#: The length of the maps that are made.
MAP_SEQLEN = 131072
DENSE = "dense"


class Sparse(NamedTuple):
    """A pattern: the keywords of calls, with its map."""

    options: Mapping[str, Any]

    @property
    def density(self) -> float:
        """Fraction of the tiles that calls visit."""
        return self.options["block_mask"].density


def sparse_problems() -> Iterator[Problem]:
    """Yields the sizes: one sequence in bfloat16, not causal, so that the map alone hides keys."""
    for head_dim, seqlen in itertools.product(HEAD_DIMS, SEQLENS):
        yield Problem("bfloat16", head_dim, seqlen, 1, MODEL_DIM // head_dim, False)


def document_ids(xp, seqlen: int) -> object:
    """Returns the document of each position: lengths differ, and only the first document begins with a tile."""
    starts = np.sort(np.random.default_rng(0).choice(np.arange(1, seqlen), DOCUMENTS - 1, replace=False))
    return xp.asarray(np.searchsorted(starts, np.arange(seqlen), side="right").astype("int32")[None])


def pattern_of(name: str, xp, seqlen: int, like: object) -> Sparse:
    """Returns a pattern, its arrays and its map on the device of `like`."""
    if name.startswith("random"):
        tiles = np.random.default_rng(0).random((seqlen // TILE, seqlen // TILE)) < float(name.split()[1])
        np.fill_diagonal(tiles, True)
        return Sparse({"block_mask": fa2cupy.BlockMask(xp.asarray(tiles), seqlen, seqlen)})
    function, arrays = {
        "document": lambda: (fa2cupy.mods.document, (document_ids(xp, seqlen),)),
        "window1024": lambda: (fa2cupy.mods.sliding_window(1024, 0), ()),
        "dilated": lambda: (fa2cupy.mods.dilated_window(2048, 4), ()),
        "prefix-LM": lambda: (fa2cupy.mods.prefix_lm, (xp.asarray(np.array([seqlen // 4], "int32")),)),
    }.get(name, lambda: (neighborhood_of(name, seqlen), ()))()
    sparse = fa2cupy.block_mask(function, arrays, 1, 1, seqlen, seqlen, like=like)
    return Sparse({"mask_mod": function, "mask_args": arrays, "block_mask": sparse})


def neighborhood_of(name: str, seqlen: int) -> Callable[..., Any]:
    """Returns the mask of windows such as ``5 x 5 x 5`` in a grid; its axes but the first are equal powers of two."""
    window = tuple(map(int, name.removesuffix(EVALUATED).split(" x ")))
    sides = (2 ** (seqlen.bit_length() // len(window)),) * (len(window) - 1)
    known = fa2cupy.mods.neighborhood((seqlen // math.prod(sides), *sides), window)

    def evaluated(b, h, q, k):
        return known(b, h, q, k)

    return evaluated if name.endswith(EVALUATED) else known


class SparseBenchmark:
    """The section sparse: rows and failures so far."""

    def __init__(
        self, gpu: Gpu, stamp: Mapping[str, object], rounds: int, budget_ms: float, patterns: Sequence[str] = PATTERNS
    ):
        self.gpu, self.stamp, self.rounds, self.budget_ms, self.patterns = gpu, stamp, rounds, budget_ms, patterns
        self.rows: list[dict[str, object]] = []
        self.failures: list[str] = []
        self._rng = random.Random(0)

    def measure(self, problem: Problem, write: Callable[[str], object] = print) -> None:
        """Measures every pattern of one size, in turns with the calls without a map.

        ``tflops`` counts the pairs of the tiles that are visited; ``ratio`` is that number over the one without a map.
        ``over_evaluated`` is the time of the same pattern with an unknown function over that of a known one.
        """
        self.gpu.release()
        sets = rotating_inputs(self.gpu, problem)
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # most of the time is that of compilers
            made = pool.map(functools.partial(self._made, problem, sets[0]), self.patterns)
            patterns = dict(zip(self.patterns, made, strict=True))
        right = {name: one for name, one in patterns.items() if self._is_right(problem, name, sets[0], one)}
        everything = {DENSE: Sparse({})} | right
        for operation in OPERATIONS:
            candidates = [Candidate(name, calls_of(operation, sets, one)) for name, one in everything.items()]
            for candidate in candidates:
                candidate.call()
            times = time_in_rounds(self.gpu, candidates, self.rounds, self.budget_ms, self._rng)
            for name, samples in times.items():
                density = 1.0 if name == DENSE else everything[name].density
                row = {**self.stamp, **problem.columns(), "pattern": name, "density": density}
                row |= {"operation": operation, "provider": "fa2cupy", "ms_median": statistics.median(samples)}
                row |= {"ms_min": min(samples), "ms_max": max(samples)}
                pairs = density * problem.batch * problem.num_heads * problem.seqlen**2
                row["tflops"] = flops(operation, pairs, problem.head_dim) / row["ms_median"] / 1e9
                own_share = (theirs * density / our for theirs, our in zip(times[DENSE], samples, strict=True))
                row["ratio"] = statistics.median(own_share)
                beside = times.get(f"{name}{EVALUATED}", ())
                if beside:
                    row["over_evaluated"] = statistics.median(a / b for a, b in zip(beside, samples, strict=True))
                self.rows.append(row)
                write(f"  {problem}  {operation:10s}{name:20s}{row['ms_median']:9.3f} ms {row['tflops']:7.1f} TFLOP/s "
                      f"of {density:.2f} of the tiles, {row['ratio']:.2f} of the dense kernel's"
                      + (f", {row['over_evaluated']:.2f} times as fast as evaluated" if beside else ""))  # fmt: skip

    def measure_maps(self, write: Callable[[str], object] = print) -> None:
        """Times the making of the map of documents, and of PyTorch's if it can be imported."""
        seqlen = MAP_SEQLEN
        ids = document_ids(self.gpu.xp, seqlen)
        ours = fa2cupy.block_mask(fa2cupy.mods.document, (ids,), 1, 1, seqlen, seqlen)
        candidates = [
            Candidate("fa2cupy", lambda: (fa2cupy.block_mask(fa2cupy.mods.document, (ids,), 1, 1, seqlen, seqlen),))
        ]
        candidates += torch_maps(ids, seqlen, ours, write)
        times = time_in_rounds(self.gpu, candidates, self.rounds, self.budget_ms, self._rng)
        for name, samples in times.items():
            row = {**self.stamp, "seqlen": seqlen, "pattern": "document", "density": ours.density, "operation": "map"}
            row |= {"provider": name, "ms_median": statistics.median(samples)}
            row |= {"ms_min": min(samples), "ms_max": max(samples)}
            self.rows.append(row)
            write(f"  a map of {seqlen} x {seqlen} (document): {name} {row['ms_median']:.2f} ms")

    def _made(self, problem: Problem, tensors: Tensors, name: str) -> Sparse:
        """Returns a pattern whose kernels are compiled, those of the check among them."""
        self.gpu.synchronize()  # makes the device's context that of this thread
        sparse = pattern_of(name, self.gpu.xp, problem.seqlen, tensors.q)
        with contextlib.suppress(Exception):  # the check reports it
            for own in (tensors, one_head(tensors)):
                results_of(own, sparse)
        return sparse

    def _is_right(self, problem: Problem, name: str, tensors: Tensors, sparse: Sparse) -> bool:
        """Compares one head's results with float64."""
        own = one_head(tensors)
        try:
            expected = Expectation(own.q, own.k, own.v, own.do, **sparse.options)
            expected.check(**results_of(own, sparse))
        except (
            Exception
        ) as error:  # a wrong result, or any failure to get one: this pattern is lost, the others are not
            kind = "WRONG" if isinstance(error, AssertionError) else "FAILED"
            self.failures.append(f"{kind}: {problem} {name}: {error}")
            return False
        return True


def one_head(tensors: Tensors) -> Tensors:
    """Returns the first head of the inputs."""
    return Tensors(*(array[:, :, :1] for array in (tensors.q, tensors.k, tensors.v, tensors.do)))


def results_of(tensors: Tensors, sparse: Sparse) -> dict[str, Any]:
    """Returns all results of a forward and its backward, by name."""
    inputs = tensors.q, tensors.k, tensors.v
    o, lse = fa2cupy.forward(*inputs, **sparse.options)
    dq, dk, dv = fa2cupy.backward(*inputs, o, lse, tensors.do, **sparse.options)
    return {"o": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def calls_of(operation: str, sets: Sequence[Tensors], sparse: Sparse) -> Callable[[], tuple]:
    """Binds an operation to rotating inputs."""
    if operation == "forward":
        return rotating(lambda q, k, v: fa2cupy.forward(q, k, v, **sparse.options), [(x.q, x.k, x.v) for x in sets])
    inputs = [(x.q, x.k, x.v, *fa2cupy.forward(x.q, x.k, x.v, **sparse.options), x.do) for x in sets]
    return rotating(lambda *arrays: fa2cupy.backward(*arrays, **sparse.options), inputs)


def torch_maps(ids: object, seqlen: int, ours: fa2cupy.BlockMask, write: Callable[[str], object]) -> list[Candidate]:
    """Binds ``create_block_mask`` of the same function, compiled and not."""
    try:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask
    except ImportError:
        return []
    own = torch.from_dlpack(ids)

    def visible(b, h, q, k):
        return own[0, q] == own[0, k]

    found = []
    for compiles in (True, False):

        def make(compiles: bool = compiles) -> tuple:
            return (create_block_mask(visible, None, None, seqlen, seqlen, device="cuda", _compile=compiles),)

        try:
            (theirs,) = make()
        except Exception as error:  # the whole mask may not fit in memory
            write(
                f"  create_block_mask{', compiled' if compiles else ''}: {(str(error).splitlines() or ['failed'])[0]}"
            )
            continue
        tiles = int(theirs.kv_num_blocks.sum()) + int(theirs.full_kv_num_blocks.sum())
        if tiles != round(ours.density * ours.states.size):
            write(f"  create_block_mask has {tiles} tiles, ours {round(ours.density * ours.states.size)}")
        found.append(Candidate(f"torch create_block_mask{' compiled' if compiles else ''}", make))
    return found


def sparse_table(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Returns the share of the dense kernel's TFLOP/s by pattern and size: forward, backward."""
    calls = [
        {**row, "size": f"{row['head_dim']}, {row['seqlen']}"}
        for row in rows
        if row["operation"] in OPERATIONS and row["pattern"] != DENSE
    ]
    return ratio_table(calls, "pattern", "size", OPERATIONS)
