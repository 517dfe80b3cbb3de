"""Tables from the rows of a CSV: each number is that of a row, without further arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

__all__ = ["ratio_table", "smallest_ratio", "speed_table"]

_OURS = "fa2cupy"
_TITLES = {"forward": "forward", "single_pass": "backward, `single_pass`", "two_pass": "backward, `two_pass`"}


def speed_table(rows: Iterable[Mapping[str, str]], dtype: str, peer: str) -> list[str]:
    """Returns our TFLOP/s and, in parentheses, the ratio of a peer: full / causal, by head_dim and seqlen.

    Parameters
    ----------
    rows : iterable of mapping
        Rows of the section speed of benchmark.csv.
    dtype : str
    peer : str
        The peer of the ratio, which is its time over ours.
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


def ratio_table(rows: Iterable[Mapping[str, object]], line: str, column: str, operations: Sequence[str]) -> list[str]:
    """Returns the best peer's time over ours, of each operation: above 1, ours is faster.

    Parameters
    ----------
    rows : iterable of mapping
        Rows of peers have a ``ratio``; the others are skipped.
    line, column : str
        Names of the columns of `rows` that become the table's lines and columns, in the order of `rows`.
    operations : sequence of str
        Operations in the order of a cell; "-" is one without a peer, and a cell without any is empty.
    """
    best = _best_ratios(rows, line, column)
    lines, columns = (list(dict.fromkeys(key[place] for key in best)) for place in (0, 1))
    table = [f"| {' / '.join(operations)} | {' | '.join(columns)} |", f"|{'---|' * (1 + len(columns))}"]
    for name in lines:
        ratios = [[best.get((name, size, operation)) for operation in operations] for size in columns]
        cells = [" / ".join(f"{one[0]:.2f}" if one else "-" for one in cell) if any(cell) else "" for cell in ratios]
        table.append(f"| {name} | {' | '.join(cells)} |")
    return table


def smallest_ratio(rows: Iterable[Mapping[str, object]], line: str, column: str) -> list[str]:
    """Returns the smallest number of `ratio_table` and its place, as a line."""
    best = _best_ratios(rows, line, column)
    if not best:
        return ["no peer was measured"]
    (name, size, operation), (ratio, peer) = min(best.items(), key=lambda item: item[1])
    return [f"smallest: {ratio:.2f}, {operation} of {name} at {size} beside {peer}"]


def _best_ratios(
    rows: Iterable[Mapping[str, object]], line: str, column: str
) -> dict[tuple[str, str, str], tuple[float, str]]:
    """Returns the least ratio and its peer, by line, column and operation."""
    best: dict[tuple[str, str, str], tuple[float, str]] = {}
    for row in rows:
        if row.get("ratio"):
            key = (str(row[line]), str(row[column]), str(row["operation"]))
            found = (float(row["ratio"]), str(row["provider"]))
            best[key] = min(best.get(key, found), found)
    return best
