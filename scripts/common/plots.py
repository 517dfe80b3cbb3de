"""The plots of the benchmark scripts. Without matplotlib there are none, and a line says so."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["bar_panels", "can_plot", "heat_map", "length_name", "line_panels", "new_figure", "titled_bars"]


def can_plot() -> bool:
    """Returns True if matplotlib is installed; says so if it is not."""
    if importlib.util.find_spec("matplotlib") is not None:
        return True
    print("no plots: matplotlib is not installed (pip install matplotlib)")
    return False


def new_figure(width: float, height: float):
    """Returns a figure of matplotlib, of this size in inches."""
    # pyplot is avoided, because it looks for a window system and keeps global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def length_name(rows: int) -> str:
    """Returns a length as text that fits below an axis: 16384, 32k, 1M."""
    if rows < 2**15 or rows % 1024:
        return str(rows)
    return f"{rows >> 20}M" if rows % 2**20 == 0 else f"{rows >> 10}k"


def bar_panels(
    path: Path,
    title: str,
    unit: str,
    colors: Mapping[str, str],
    panels: Mapping[tuple[str, str], Mapping[str, Mapping[int, float]]],
) -> None:
    """Draws lines of panels with grouped bars over the sequence length.

    `panels` maps (row label, column label) to series, and each series maps a sequence length to its height. The panels
    of a row stand in the order of the numbers in their column labels, the series in that of `colors`.
    """

    def draw(axis, series: Mapping[str, Mapping[int, float]]) -> None:
        _grouped_bars(axis, colors, {name: dict(sorted(heights.items())) for name, heights in series.items()})
        axis.set_xlabel("sequence length", fontsize=8)

    _panels(path, title, unit, panels, draw, tuple(colors))


def line_panels(
    path: Path, title: str, unit: str, level: float, panels: Mapping[tuple[str, str], Mapping[str, Mapping[int, float]]]
) -> None:
    """Draws the same panels with a line for each series, and one at `level`, on logarithmic sequence lengths."""
    names = dict.fromkeys(name for series in panels.values() for name in series)
    colours = {name: f"C{number}" for number, name in enumerate(names)}  # not every panel has all series

    def draw(axis, series: Mapping[str, Mapping[int, float]]) -> None:
        for name, heights in series.items():
            how = {"marker": "o", "markersize": 4, "color": colours[name], "label": name}
            axis.plot(list(heights), list(heights.values()), **how)
        axis.axhline(level, color="black", linewidth=0.8)
        seqlens = sorted({seqlen for heights in series.values() for seqlen in heights})
        axis.set_xscale("log", base=2)
        axis.set_xticks(seqlens, list(map(length_name, seqlens)), fontsize=8)
        axis.set_xticks([], minor=True)
        axis.set_xlabel("sequence length", fontsize=8)
        _finish(axis)

    _panels(path, title, unit, panels, draw)


def titled_bars(
    path: Path,
    title: str,
    unit: str,
    colors: Mapping[str, str],
    panels: Mapping[str, Mapping[str, Mapping[str, float]]],
) -> None:
    """Draws two panels a line with grouped bars: `panels` maps titles to series of bars by their labels."""
    figure = new_figure(10, 1.2 + 1.2 * len(panels))
    figure.suptitle(title, fontsize=12)
    for axis, (name, series) in zip(figure.subplots(-(-len(panels) // 2), 2).flat, panels.items(), strict=True):
        _grouped_bars(axis, colors, series)
        axis.set_title(name, fontsize=10)
        axis.set_ylabel(unit)
    _legend(figure, tuple(colors), 5)
    figure.savefig(path, dpi=100)


def _panels(path: Path, title: str, unit: str, panels: Mapping, draw: Callable, order: tuple[str, ...] = ()) -> None:
    lines = _lines_of(panels)
    width, height = 1.0 + 3.3 * max(map(len, lines)), 1.2 + 2.3 * len(lines)
    figure = new_figure(width, height)
    figure.suptitle(title, fontsize=13)
    parts = math.lcm(*map(len, lines))
    grid = figure.add_gridspec(len(lines), parts)
    first_of_row = {}
    for place, line in enumerate(lines):
        step = parts // len(line)  # a line with fewer panels than others has wider ones
        for number, (row, column) in enumerate(line):
            first = first_of_row.get(row)
            axis = figure.add_subplot(grid[place, number * step : (number + 1) * step], sharey=first)
            draw(axis, panels[row, column])
            axis.set_title(f"{column}, {row}", fontsize=10)
            axis.tick_params(labelleft=first is None)
            if first is None:
                axis.set_ylabel(unit)
                first_of_row[row] = axis
    _legend(figure, order, int(width / 2))
    figure.savefig(path, dpi=100)


def _legend(figure, order: tuple[str, ...], most: int) -> None:
    """Draws one legend for all panels, with at most so many names in a line."""
    handles = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    shown = [name for name in order or handles if name in handles]
    per_line = max(1, min(len(shown), most))
    figure.legend([handles[n] for n in shown], shown, loc="outside lower center", ncols=per_line, frameon=False)


def _lines_of(panels: Mapping[tuple[str, str], object]) -> list[list[tuple[str, str]]]:
    """Returns the panels line by line: a row, or several rows that together are not longer than the longest."""
    rows: dict[str, list[tuple[str, str]]] = {}
    for row, column in sorted(panels, key=lambda key: _by_number(key[1])):
        rows.setdefault(row, []).append((row, column))
    most = max(map(len, rows.values()))
    lines: list[list[tuple[str, str]]] = []
    for keys in (rows[row] for row in dict.fromkeys(row for row, _ in panels)):
        if lines and len(lines[-1]) + len(keys) <= most:
            lines[-1] += keys
        else:
            lines.append(keys)
    return lines


def _by_number(label: str) -> list[tuple[int, str]]:
    """Returns a key that sorts ``head_dim 64`` before ``head_dim 128``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", label)]


def _grouped_bars(axis, colors: Mapping[str, str], series: Mapping[str, Mapping[Any, float]]) -> None:
    """Draws the bars of each series, which are in the order of the axis."""
    groups = max(series.values(), key=len)  # the others lack some of them
    present = [name for name in colors if name in series]
    width = 0.84 / len(present)
    for place, name in enumerate(present):
        positions = [i - 0.42 + (place + 0.5) * width for i, group in enumerate(groups) if group in series[name]]
        heights = [series[name][group] for group in groups if group in series[name]]
        axis.bar(positions, heights, width * 0.94, color=colors[name], label=name)
    axis.set_xticks(range(len(groups)), list(map(str, groups)))
    _finish(axis)


def _finish(axis) -> None:
    axis.grid(axis="y", linewidth=0.4, alpha=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def heat_map(
    path: Path,
    title: str,
    unit: str,
    cells: Mapping[tuple[int, int], tuple[float, str]],
    marks: Mapping[str, tuple[int, int]],
) -> None:
    """Draws a grid over (b_r, b_c): `cells` gives each its value, which sets the colour, and the text below it.

    `marks` are cells with a frame, by the text of the legend.
    """
    from matplotlib.patches import Rectangle

    rows, columns = sorted({r for r, _ in cells}), sorted({c for _, c in cells})
    figure = new_figure(2.0 + 1.5 * len(columns), 1.6 + 0.9 * len(rows))
    axis = figure.subplots()
    nothing = float("nan")
    values = [[cells.get((r, c), (nothing, ""))[0] for c in columns] for r in rows]
    image = axis.imshow(values, cmap="viridis", aspect="auto")
    figure.colorbar(image, label=unit)
    for (b_r, b_c), (value, text) in cells.items():
        axis.text(
            columns.index(b_c),
            rows.index(b_r),
            f"{value:.4g}\n{text}",
            ha="center",
            va="center",
            fontsize=8,
            color="black" if image.norm(value) > 0.6 else "white",
        )
    axis.set_xticks(range(len(columns)), [str(c) for c in columns])
    axis.set_yticks(range(len(rows)), [str(r) for r in rows])
    for number, (label, (b_r, b_c)) in enumerate(marks.items()):
        if (b_r, b_c) in cells:
            inset = 0.03 + 0.05 * number  # frames of the same cell are one inside the other
            corner = (columns.index(b_c) - 0.5 + inset, rows.index(b_r) - 0.5 + inset)
            frame = {"color": ("black", "red")[number], "linestyle": ("--", "-")[number], "linewidth": 2.5}
            axis.add_patch(Rectangle(corner, 1 - 2 * inset, 1 - 2 * inset, fill=False, label=label, **frame))
    if axis.patches:
        figure.legend(loc="outside lower center", ncols=len(marks), frameon=False, fontsize=9)
    axis.set_xlabel("b_c (keys of a tile)")
    axis.set_ylabel("b_r (queries of a tile)")
    axis.set_title(title, fontsize=10)
    figure.savefig(path, dpi=110)
