"""What the caller's function costs the host: its first call, which traces and compiles it, and each warm call.

Each function is measured in a process of its own: kernels that others have compiled, and memory that they have left in
CuPy's pool, would change both. Run as a module, this is the measured process.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping

from common.function_cases import FUNCTIONS
from common.measure import Candidate, Gpu, Problem, host_microseconds
from common.startup import answer_of

__all__ = ["COLUMNS", "NAMES", "measure_calls"]

COLUMNS = (
    "gpu", "driver", "date", "dtype", "head_dim", "seqlen", "batch", "num_heads", "causal", "feature", "operation",
    "first_s", "host_us", "growth_us",
)  # fmt: skip
PLAIN = "plain"
#: Functions of few operations and of many, with arrays and without, of scores and of masks.
NAMES = ("softcap", "alibi", "t5_relative", "dilated_window", "document")
HEAD_DIMS = (64, 128)
OPERATIONS = ("forward", "backward")


def call_problem(head_dim: int) -> Problem:
    """Returns the problem of the calls: tiny, so that the GPU is not waited for."""
    return Problem("bfloat16", head_dim, 512, 1, 4, True)


def measure_calls(stamp: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """Yields a row for each function, head_dim and operation.

    ``first_s`` is the time of the first call with an empty cache, until its results are there; ``host_us`` the host
    time of a warm one; ``growth_us`` what of it a call without a function does not take.
    """
    for head_dim in HEAD_DIMS:
        plain: dict[str, float] = {}
        for name in (PLAIN, *NAMES):
            with tempfile.TemporaryDirectory(prefix="fa2cupy-calls-") as cache:
                found = answer_of("common.function_calls", (name, str(head_dim)), cache)
            for operation in OPERATIONS:
                first, host = found[operation]
                plain.setdefault(operation, host)
                row = {**stamp, **call_problem(head_dim).columns(), "feature": name, "operation": operation}
                yield row | {"first_s": first, "host_us": host, "growth_us": host - plain[operation]}


def _child(name: str, head_dim: str) -> None:
    import fa2cupy

    gpu, problem = Gpu(), call_problem(int(head_dim))
    options: dict[str, object] = {"causal": problem.causal}
    if name != PLAIN:
        row = FUNCTIONS[name]
        arrays = tuple(map(gpu.xp.asarray, row.arrays(problem)))
        options |= {row.role: row.function, row.role.replace("mod", "args"): arrays}
    (x,) = gpu.tensors(problem, 1)  # starts the CUDA context and CuPy's own kernels, which are not ours to count
    gpu.synchronize()
    first: dict[str, float] = {}

    def timed(operation: str, call: Callable[[], tuple]) -> tuple:
        start = time.perf_counter()
        results = call()
        gpu.synchronize()
        first[operation] = time.perf_counter() - start
        return results

    def forward() -> tuple:
        return fa2cupy.forward(x.q, x.k, x.v, **options)

    o, lse = timed("forward", forward)

    def backward() -> tuple:
        return fa2cupy.backward(x.q, x.k, x.v, o, lse, x.do, **options)

    timed("backward", backward)
    host = host_microseconds(gpu, [Candidate("forward", forward), Candidate("backward", backward)])
    print(json.dumps({operation: (first[operation], host[operation]) for operation in OPERATIONS}))


if __name__ == "__main__":
    _child(*sys.argv[1:])
