"""The report of a run: the table, the PNG of the curves, and the distance of fused and unfused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common.plots import new_figure
from language_model.training import LOG_EVERY, Curve, Settings

__all__ = ["Result", "curve_difference", "plot_curves", "report_lines"]

_COLORS = {"fused": "#d1301f", "unfused": "#4c78a8"}


@dataclass(frozen=True)
class Result:
    """A finished or interrupted run.

    Attributes
    ----------
    seconds : float
        Wall time, the evaluations of the curve included.
    bits : float or None
        Held-out bits per byte at the end; None after Ctrl-C, to end without a wait.
    evaluated : int
        Number of bytes in that figure.
    """

    settings: Settings
    curve: Curve
    seconds: float
    bits: float | None
    evaluated: int
    tokens_per_second: float
    peak_bytes: int

    @property
    def attention(self) -> str:
        """``"fused"`` or ``"unfused"``."""
        return self.settings.attention

    @property
    def steps(self) -> int:
        """Steps done."""
        return len(self.curve.losses)


def report_lines(results: Sequence[Result], line: float, memory_meaning: str) -> list[str]:
    """Returns the table and its conclusions, line by line; `line` is zlib's."""
    lines = [
        f"{'attention':10} {'steps':>6} {'held-out bit/byte':>18} {'tokens/s':>10} {'peak memory':>12} {'seconds':>8}"
    ]
    for r in results:
        bits = "-" if r.bits is None else f"{r.bits:.3f}"
        memory = f"{r.peak_bytes / 2**20:,.0f} MiB"
        lines.append(
            f"{r.attention:10} {r.steps:6} {bits:>18} {r.tokens_per_second:10,.0f} {memory:>12} {r.seconds:8.1f}"
        )
    lines.append(f"{'zlib -9':10} {'':6} {line:18.3f}")
    lines.append(f"peak memory: {memory_meaning}")
    lines.extend(f"{r.attention}: {_verdict(r, line)}" for r in results)
    if len(results) == 2:
        training, held_out = curve_difference(*(r.curve for r in results))
        lines.append(
            f"largest distance of the two curves: training {training:.4f} (means of {LOG_EVERY} steps), "
            f"held-out {held_out:.4f} bit/byte"
        )
    return lines


def _verdict(result: Result, line: float) -> str:
    crossed = [(step, seconds) for step, seconds, bits in result.curve.held_out if bits < line]
    of = f" (final figure: {result.evaluated:,} held-out bytes)" if result.bits is not None else ""
    if crossed:
        step, seconds = crossed[0]
        return f"below zlib's line from step {step}, after {seconds:.0f} s{of}"
    return f"zlib's line was not reached in this run{of}"


def curve_difference(a: Curve, b: Curve) -> tuple[float, float]:
    """Returns the largest distance of the training curves (means of `LOG_EVERY` steps), and of the held-out curves."""
    count = min(len(a.losses), len(b.losses)) // LOG_EVERY * LOG_EVERY
    means = [np.reshape(curve.losses[:count], (-1, LOG_EVERY)).mean(axis=1) for curve in (a, b)]
    bits = [{step: value for step, _, value in curve.held_out} for curve in (a, b)]
    held_out = [abs(bits[0][step] - bits[1][step]) for step in bits[0].keys() & bits[1].keys()]
    return float(np.abs(means[0] - means[1]).max(initial=0)), max(held_out, default=0.0)


def plot_curves(path: Path, title: str, results: Sequence[Result], line: float) -> None:
    """Plots training and held-out curves by bytes seen and by time, with zlib's line. Needs matplotlib."""
    figure = new_figure(11, 4.6)
    figure.suptitle(title, fontsize=12)
    by_tokens, by_time = figure.subplots(1, 2, sharey=True)
    for place, r in enumerate(results):
        points, color = r.curve.points(), _COLORS[r.attention]
        losses, held_out = [loss for _, _, loss in points], [bits for _, _, bits in r.curve.held_out]
        millions = r.settings.tokens_per_step / 1e6
        # The first run is drawn wider, so that it shows on both sides of one that is drawn over it.
        widths = {"linewidth": 1.0 if place else 2.6, "alpha": 1.0 if place else 0.55}
        sizes = {"markersize": 3.5 if place else 7, "alpha": widths["alpha"]}
        for axis, x, x_held_out in (
            (by_tokens, [step * millions for step, _, _ in points], [s * millions for s, _, _ in r.curve.held_out]),
            (by_time, [s for _, s, _ in points], [s for _, s, _ in r.curve.held_out]),
        ):
            axis.plot(x, losses, color=color, label=f"{r.attention}, training", **widths)
            axis.plot(x_held_out, held_out, "o", color=color, label=f"{r.attention}, held-out", **sizes)
    for axis, label in ((by_tokens, "million bytes trained on"), (by_time, "seconds")):
        axis.axhline(
            line, color="black", linestyle="--", linewidth=1, label=f"zlib -9 on the held-out files: {line:.3f}"
        )
        axis.set_xlabel(label)
        axis.set_xlim(left=0)
        axis.grid(linewidth=0.4, alpha=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    by_tokens.set_ylabel("bits per byte")
    # The losses of the first steps are far above all others.
    lowest = min([line, *(bits for r in results for bits in r.curve.losses)])
    by_tokens.set_ylim(0.9 * lowest, max(3 * line, 1.5 * lowest))
    by_tokens.legend(frameon=False)
    figure.savefig(path, dpi=110)
