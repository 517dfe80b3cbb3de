"""The rows of one card's CSVs, and the Markdown of what is said about them."""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Iterable, Sequence

from common import SCRIPTS
from common.measure import read_csv

__all__ = [
    "CARD",
    "OURS",
    "PEERS",
    "Row",
    "has_rows",
    "is_measured",
    "pair",
    "paragraphs",
    "percent",
    "ratios",
    "rows_of",
    "sentence",
    "source",
    "span",
    "table",
    "value",
]

#: The card of the pages, and what stood beside ours there.
CARD = "NVIDIA H200"
PEERS = "PyTorch 2.11 with cuDNN 9.19"
OURS = "fa2cupy"

Row = dict[str, str]


def _folder(name: str) -> str:
    """Returns the folder of a CSV: four GPUs of one host, and the training of models, were measured on another card."""
    return "h100-80gb-hbm3" if name.startswith(("scaleout.", "train_lm")) else "h200"


@functools.cache
def _read(name: str) -> list[Row]:
    return read_csv(SCRIPTS / "results" / _folder(name) / name)


def is_measured(name: str) -> bool:
    """Returns True if there is a CSV of this name."""
    return (SCRIPTS / "results" / _folder(name) / name).is_file()


def rows_of(name: str, **wanted: object) -> list[Row]:
    """Returns the rows of a CSV whose columns have the wanted values; a tuple means any of its values."""
    allowed = {
        column: [str(one) for one in (values if isinstance(values, tuple) else (values,))]
        for column, values in wanted.items()
    }
    found = [row for row in _read(name) if all(row[column] in values for column, values in allowed.items())]
    if not found:
        raise LookupError(f"{name} has no rows with {wanted}")
    return found


def has_rows(name: str, **wanted: object) -> bool:
    """Returns True if a CSV has a row with the wanted values."""
    try:
        return bool(rows_of(name, **wanted))
    except LookupError:
        return False


def value(name: str, column: str, **wanted: object) -> float:
    """Returns the number in the one row that has the wanted values."""
    found = rows_of(name, **wanted)
    if len(found) != 1:
        raise LookupError(f"{name} has {len(found)} rows with {wanted}")
    return float(found[0][column])


def ratios(name: str, **wanted: object) -> list[float]:
    """Returns the times of peers over ours."""
    return [float(row["ratio"]) for row in rows_of(name, **wanted) if row["ratio"]]


def span(values: Iterable[float], how: str = ".2f") -> str:
    """Returns the least and the largest of the values as text."""
    values = list(values)
    least, largest = (format(bound(values), how) for bound in (min, max))
    return least if least == largest else f"{least} to {largest}"


def pair(values: Sequence[float | None], how: str = ".2f") -> str:
    """Returns a cell such as ``1.30 / 1.28``; a missing value is a hyphen, and a cell without any is empty."""
    return " / ".join("-" if one is None else format(one, how) for one in values) if any(values) else ""


def percent(value: float, digits: int = 0) -> str:
    """Returns a share as text."""
    return f"{100 * value:.{digits}f} %"


def table(head: Sequence[object], lines: Iterable[Sequence[object]]) -> str:
    """Returns a table in Markdown."""
    head, *rows = ("|" + "".join(f" {cell} |" if cell != "" else " |" for cell in row) for row in (head, *lines))
    return "\n".join((head, f"|{'---|' * (head.count('|') - 1)}", *rows))


def paragraphs(*texts: str) -> str:
    """Returns the texts with empty lines between them."""
    return "\n\n".join(texts)


def sentence(text: str) -> str:
    """Returns a paragraph in lines of at most 120 characters, which do not break code."""
    kept = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), " ".join(text.split()))
    return textwrap.fill(kept, 120, break_long_words=False, break_on_hyphens=False).replace("\0", " ")


def source(name: str, command: str, peers: str = PEERS) -> str:
    """Returns the line below a part's heading: card, date, peers, file and command."""
    dates = sorted({row["date"] for row in rows_of(name)})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    beside = f", beside {peers}" if peers else ""
    (card,) = {row["gpu"] for row in rows_of(name)}
    link = f"[{name}](../scripts/results/{_folder(name)}/{name})"
    return sentence(f"{card}, {when}{beside}: {link}, measured by `{command}`.")
