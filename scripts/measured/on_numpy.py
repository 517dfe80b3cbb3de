"""Calls on NumPy arrays, measured on a CPU."""

from __future__ import annotations

from common import SCRIPTS
from common.measure import read_csv
from measured.rows import OURS, Row, pair, paragraphs, sentence, span, table

__all__ = ["numpy_calls"]

_NAMES = {"numpy": "NumPy written out", "torch": "PyTorch"}


def numpy_calls() -> str:
    """The times of attention written out in NumPy and of PyTorch's operator over ours, on idle and on busy cores."""
    (path,) = SCRIPTS.glob("results/*/numpy.csv")
    rows = read_csv(path)
    ratios = {_place(row): float(row["ratio"]) for row in rows if row["provider"] != OURS}
    columns = list(dict.fromkeys(place[3:] for place in ratios))
    lines = [
        (
            case,
            size,
            *(pair([ratios.get((case, size, one, *column)) for one in ("forward", "backward")]) for column in columns),
        )
        for case, size in dict.fromkeys(place[:2] for place in ratios)
    ]
    first = rows[0]
    dates = sorted({row["date"] for row in rows})
    return paragraphs(
        sentence(
            f"{first['cpu']}, {first['cores']} cores, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}, NumPy "
            f"{first['numpy']} with {first['blas']}: [numpy.csv](../scripts/results/{path.parent.name}/numpy.csv), "
            f"measured by `python scripts/benchmark.py --sections numpy` while the machine had a load of "
            f"{span((float(row['load']) for row in rows), '.1f')}."
        ),
        table(
            (
                "",
                "batch x length",
                *(f"{_NAMES[name]}{', busy cores' if busy != '0' else ''}" for name, busy in columns),
            ),
            lines,
        ),
    )


def _place(row: Row) -> tuple[str, str, str, str, str]:
    return (row["case"], f"{row['batch']} x {row['seqlen']}", row["operation"], row["provider"], row["busy"])
