"""The arrays that calls on NumPy arrays write their results to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..problem.arguments import array_backend, check_outputs, check_overlap, output_name, unpack_out
from ..problem.checks import Result

__all__ = ["results_for"]


def results_for(
    results: Sequence[Result], out: tuple[np.ndarray | None, ...] | None, inputs: Mapping[str, np.ndarray]
) -> list[np.ndarray]:
    """The arrays for the results: those in `out`, checked, and new ones for None."""
    given = unpack_out(out, tuple(result.name for result in results))
    written = {
        output_name(result.name): array for result, array in zip(results, given, strict=True) if array is not None
    }
    if written:
        array_backend(inputs, written)
        check_outputs(results, given)
        check_overlap(written, inputs)
    return [
        np.empty(result.shape, result.dtype) if array is None else array
        for result, array in zip(results, given, strict=True)
    ]
