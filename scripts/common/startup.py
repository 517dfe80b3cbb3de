"""The cost of first calls: compilation, the disk cache and loading. Run as a module, this is the measured process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from common import SCRIPTS
from common.measure import Gpu, Problem

__all__ = ["COLUMNS", "answer_of", "measure_startup"]

COLUMNS = (
    "gpu", "driver", "date", "dtype", "head_dim", "causal", "call", "new_kernels", "compile_s_longest",
    "compile_s_total", "first_call_ms_fresh", "first_call_ms_cached",
)  # fmt: skip
#: The calls of each process: "attention" is its forward and backward together.
_PROCESSES = (("forward", "single_pass", "two_pass"), ("attention",))


def measure_startup(problem: Problem) -> list[dict[str, object]]:
    """Returns a row for each call: its first time in a process with an empty disk cache, and in the next process."""
    rows = []
    for calls in _PROCESSES:
        with tempfile.TemporaryDirectory(prefix="fa2cupy-startup-") as cache:
            fresh, cached = (_first_calls(problem, calls, cache) for _ in range(2))
        rows += [
            {**first, "first_call_ms_fresh": first["milliseconds"], "first_call_ms_cached": second["milliseconds"]}
            for first, second in zip(fresh, cached, strict=True)
        ]
    return rows


def _first_calls(problem: Problem, calls: Sequence[str], cache: str) -> list[dict[str, object]]:
    arguments = (problem.dtype, str(problem.head_dim), str(int(problem.causal)), *calls)
    return answer_of("common.startup", arguments, cache)


def answer_of(module: str, arguments: Sequence[str], cache: str) -> Any:
    """Runs a module in a process of its own, with a folder for compiled kernels; returns what its last line says."""
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, "FA2CUPY_CACHE_DIR": cache}
    run = subprocess.run(command, cwd=SCRIPTS, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"the process that times first calls failed:\n{run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def _child(dtype: str, head_dim: str, causal: str, *calls: str) -> None:
    import fa2cupy
    from fa2cupy.jit.cache import kernels_in_memory

    gpu = Gpu()
    problem = Problem(dtype, int(head_dim), 1024, 1, 2, causal == "1")
    (tensors,) = gpu.tensors(problem, 1)  # starts the CUDA context and CuPy's own kernels, which are not ours to count
    gpu.synchronize()
    inputs = (tensors.q, tensors.k, tensors.v)
    rows, seen, saved = [], 0, ()
    for call in calls:
        start = time.perf_counter()
        if call == "forward":
            saved = fa2cupy.forward(*inputs, causal=problem.causal)
        elif call == "attention":
            _, backprop = fa2cupy.attention(*inputs, causal=problem.causal)
            backprop(tensors.do)
        else:
            fa2cupy.backward(*inputs, *saved, tensors.do, causal=problem.causal, method=call)
        gpu.synchronize()
        elapsed = time.perf_counter() - start
        new = [*kernels_in_memory().values()][seen:]
        seen += len(new)
        seconds = [kernel.seconds for kernel in new]
        rows.append(
            {
                "call": call,
                "new_kernels": len(new),
                "compile_s_longest": max(seconds, default=0.0),
                "compile_s_total": sum(seconds),
                "milliseconds": elapsed * 1e3,
            }
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    _child(*sys.argv[1:])
