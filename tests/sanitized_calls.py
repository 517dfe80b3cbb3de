"""Every kernel once on small shapes, to be run under compute-sanitizer. No random numbers on the device and no checks:
the tool sees this package's kernels and little else."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cupy  # noqa: E402  (after the path is complete)

import fa2cupy  # noqa: E402
from fa2cupy.testing import make_inputs  # noqa: E402

#: (dtype, head_dim): a native and a padded dimension of each main loop.
KINDS = (
    ("float16", 64),
    ("bfloat16", 128),
    ("float16", 40),
    ("float16", 96),
    ("bfloat16", 160),
    ("float16", 256),
    ("float32", 64),
    ("float64", 80),
)


def main() -> None:
    """Forward, delta and both backward methods; ragged tiles, a diagonal, grouped heads, and rows that see nothing."""
    for dtype, head_dim in KINDS:
        for causal, (seqlen_q, seqlen_k) in ((False, (70, 150)), (True, (150, 130))):
            sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "num_heads": 2, "num_heads_kv": 1, "head_dim": head_dim}
            q, k, v, do = make_inputs(dtype, **sizes, xp=cupy)
            fa2cupy.forward(q, k, v, causal=causal)
            # The results of kernels that store by TMA count as never written, so that nobody is to read them.
            half = dtype in ("float16", "bfloat16")
            o, lse = fa2cupy.forward(q, k, v, causal=causal, family="sm80" if half else None)
            for method, family in itertools.product(("single_pass", "two_pass"), (None, "sm80")[: 1 + half]):
                fa2cupy.backward(q, k, v, o, lse, do, causal=causal, method=method, family=family)
    cupy.cuda.Device().synchronize()


if __name__ == "__main__":
    main()
