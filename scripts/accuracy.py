"""Measures the errors of float64, by kinds of data, beside those of the formulas written out with cuBLAS.

    python scripts/accuracy.py            a minute on an H100, most of it on the host

Exact results are those of NumPy's ``longdouble``, with 11 bits more than float64, of one head with few queries or keys
(`SIZES`). Each family and method computes all kinds of data. Rows are in accuracy.csv: ``error`` and ``usual`` are the
largest errors of ours and of the formulas, relative to the largest exact result, and ``ratio`` the one over the other,
at the size and mask where it is largest. ``of_allowed`` is the largest share of the error that docs/accuracy.md
promises: twice that of the formulas for o, three times for gradients, and what the rounding of lse costs them.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import NamedTuple

from common.accuracy import KINDS, Promise, data, orders_of, part
from common.measure import find_gpu, progress, results_folder, stamp_of, write_csv

import fa2cupy
from fa2cupy.cli import run_command
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.operations import METHODS
from fa2cupy.families.registry import FAMILIES

COLUMNS = (
    "gpu", "driver", "date", "dtype", "data", "head_dim", "seqlen_q", "seqlen_k", "causal", "family", "method",
    "result", "error", "usual", "ratio", "of_allowed",
)  # fmt: skip
HEAD_DIMS = (64, 128)
#: Queries, keys, and whether the mask is causal.
SIZES = ((65, 65, True), (300, 300, False), (300, 300, True), (48, 2048, True), (2048, 48, False))
GRADIENTS = ("dq", "dk", "dv")
_ROUNDING = 2.0**-53  # of the largest result: the formulas may have a smaller error by chance


class Kernels(NamedTuple):
    """The kernels of a call: the public name of a family, and the method of the backward."""

    family: str
    method: str


def kernels_of(device: DeviceInfo) -> list[Kernels]:
    """Returns the kernels that a device has for float64."""
    return [
        Kernels(family.public_name, method)
        for family in FAMILIES
        for method, operations in METHODS.items()
        if all(family.supports(operation, "float64", device) for operation in ("forward", *operations))
    ]


def results_of(inputs: tuple, causal: bool, kernels: Kernels) -> dict[str, object]:
    """Returns o and the gradients."""
    q, k, v, do = inputs
    how = {"causal": causal, "family": kernels.family}
    o, lse = fa2cupy.forward(q, k, v, **how)
    gradients = fa2cupy.backward(q, k, v, o, lse, do, method=kernels.method, **how)
    return {"o": o, **dict(zip(GRADIENTS, gradients, strict=True))}


def names_of(kind: str) -> tuple[str, ...]:
    """Returns the results that are compared: dq and dk of subnormal do are sums of few units of the smallest number."""
    return ("o", "dv") if kind == "subnormal" else ("o", *GRADIENTS)


def problems(xp: ModuleType, kind: str, head_dim: int) -> Iterator[tuple[tuple, bool]]:
    """Yields inputs of each size, and whether the mask is causal."""
    for queries, keys, causal in SIZES:
        drawn = part(data(kind, max(queries, keys), head_dim, "float64"), queries, keys)
        yield tuple(map(xp.asarray, drawn)), causal


def measure(xp: ModuleType, kind: str, head_dim: int, all_kernels: Sequence[Kernels]) -> list[dict[str, object]]:
    """Returns a row for each result of all kernels, that of the size with the largest ratio."""
    rows: dict[tuple, dict[str, object]] = {}
    for inputs, causal in problems(xp, kind, head_dim):
        promise = Promise(inputs, causal, orders_of(kind))
        sizes = {"seqlen_q": inputs[0].shape[1], "seqlen_k": inputs[1].shape[1], "causal": int(causal)}
        for kernels in all_kernels:
            results = results_of(inputs, causal, kernels)
            for name, error in promise.errors({one: results[one] for one in names_of(kind)}).items():
                row = {"dtype": "float64", "data": kind, "head_dim": head_dim, **sizes, **kernels._asdict()}
                usual = max(error.usual, _ROUNDING * error.largest)
                row |= {"result": name, "error": error.own / error.largest, "usual": usual / error.largest}
                row |= {"ratio": error.own / usual, "of_allowed": error.own / error.allowed}
                before = rows.get((kernels, name), row)
                larger = max(before, row, key=lambda one: one["ratio"])
                rows[kernels, name] = larger | {"of_allowed": max(before["of_allowed"], row["of_allowed"])}
    return list(rows.values())


def accuracy_table(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Returns the largest ratio of each result, by data and kernels."""
    ratios: dict[tuple[str, ...], float] = {}
    for row in rows:
        key = (str(row["data"]), f"{row['family']}, {row['method']}", str(row["result"]))
        ratios[key] = max(ratios.get(key, 0.0), float(str(row["ratio"])))
    kinds, kernels, results = (list(dict.fromkeys(key[place] for key in ratios)) for place in range(3))
    table = [f"| {' / '.join(results)} | {' | '.join(kernels)} |", f"|{'---|' * (1 + len(kernels))}"]
    for kind in kinds:
        found = [[ratios.get((kind, one, name)) for name in results] for one in kernels]
        cells = (" / ".join("-" if one is None else f"{one:.2f}" for one in cell) for cell in found)
        table.append(f"| {kind} | {' | '.join(cells)} |")
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", metavar="DIR", help="default: scripts/results/<gpu>")
    options = parser.parse_args(arguments)
    gpu = find_gpu()
    if gpu is None:
        return 2
    path, work = results_folder(gpu.name, options.out) / "accuracy.csv", list(itertools.product(KINDS, HEAD_DIMS))
    all_kernels, stamp, rows = kernels_of(gpu.info), stamp_of(gpu), []
    with progress(len(work), "accuracy") as bar:
        for kind, head_dim in work:
            rows += [stamp | row for row in measure(gpu.xp, kind, head_dim, all_kernels)]
            write_csv(path, COLUMNS, rows)
            bar.update()
    print(*accuracy_table(rows), f"written to {path}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_command("accuracy.py", main))
