"""Tables of README.md, from the rows of a CSV: numbers in it are those that were measured, and nobody's arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["speed_table"]

_OURS = "fa2cupy"
_TITLES = {"forward": "forward", "single_pass": "backward, `single_pass`", "two_pass": "backward, `two_pass`"}


def speed_table(rows: Iterable[Mapping[str, str]], dtype: str, peer: str) -> list[str]:
    """TFLOP/s of ours and, in parentheses, the ratio measured beside it: full / causal, by head_dim and seqlen.

    Parameters
    ----------
    rows : iterable of mapping
        Of the section speed of benchmark.csv.
    dtype : str
    peer : str
        Whose time over ours is in parentheses.
    """
    speeds, ratios = {}, {}
    for row in rows:
        if row["dtype"] == dtype and row["operation"] in _TITLES and row["tflops"]:
            key = (row["operation"], int(row["head_dim"]), int(row["seqlen"]), bool(int(row["causal"])))
            if row["provider"] == _OURS:
                speeds[key] = float(row["tflops"])
            elif row["provider"] == peer:
                ratios[key] = float(row["ratio"])
    complete = {key for key in speeds if key in ratios and (*key[:3], not key[3]) in ratios}
    seqlens = sorted({key[2] for key in complete})
    lines = [
        f"| | head_dim | {' | '.join(f'seqlen {seqlen}' for seqlen in seqlens)} |",
        f"|{'---|' * (2 + len(seqlens))}",
    ]
    for operation, title in _TITLES.items():
        for number, head_dim in enumerate(sorted({key[1] for key in complete if key[0] == operation})):
            cells = []
            for seqlen in seqlens:
                keys = [(operation, head_dim, seqlen, causal) for causal in (False, True)]
                pair = [f"{speeds[key]:.0f} ({ratios[key]:.2f})" for key in keys if key in complete]
                cells.append(" / ".join(pair))
            lines.append(f"| {title if number == 0 else ''} | {head_dim} | {' | '.join(cells)} |")
    return lines
