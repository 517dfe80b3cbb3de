"""The picture of the README: four panels of TFLOP/s beside peers, drawn from the CSVs."""

from __future__ import annotations

from pathlib import Path

from benchmark import SEQLENS
from common.plots import length_name, titled_bars
from measured.rows import CARD, OURS, rows_of

__all__ = ["draw"]

#: Colors of the bars, in their order.
_COLORS = {
    OURS: "#d1301f",
    "cuDNN": "#7a7a7a",
    "FlashAttention-2": "#4c78a8",
    "FlexAttention": "#7aa874",
    "PyTorch's context parallelism": "#b79bc4",
}
_NAMES = {OURS: OURS, "torch cudnn": "cuDNN", "torch flash": "FlashAttention-2", "torch flex": "FlexAttention"}
_NAMES |= {"torch flex flash": "FlexAttention", "heads": OURS, "torch ring": "PyTorch's context parallelism"}
_FUNCTIONS = {
    "document": "documents",
    "sliding_window": "window",
    "softcap": "soft cap",
    "alibi": "ALiBi",
    "t5_relative": "T5",
}

_Bars = dict[str, dict[str, float]]


def _bars(name: str, provider: str, place: str, labels: dict[object, str], **wanted: object) -> _Bars:
    """Returns the most TFLOP/s by the name of a provider and the label of a place, in the order of `labels`."""
    bars: _Bars = {}
    for key, label in labels.items():
        for row in rows_of(name, **wanted, **{place: key, provider: tuple(_NAMES)}):
            of_name = bars.setdefault(_NAMES[row[provider]], {})
            of_name[label] = max(of_name.get(label, 0.0), float(row["tflops"]))
    return bars


def draw(path: Path) -> None:
    """Draws the picture."""

    def plain(operation: str) -> _Bars:
        lengths = {seqlen: length_name(seqlen) for seqlen in SEQLENS}
        wanted = {"operation": operation, "dtype": "bfloat16", "head_dim": 128, "causal": 1}
        return _bars("benchmark.csv", "provider", "seqlen", lengths, **wanted)

    functions = {"head_dim": 128, "seqlen": 8192, "operation": "forward"}
    lengths = {seqlen: length_name(seqlen) for seqlen in (32768, 131072)}
    ranks = {"operation": "training", "num_heads": 16, "num_heads_kv": 16, "ranks": 4}
    panels = {
        "forward, causal, by length": plain("forward"),
        "backward, causal, by length": plain("single_pass"),
        "functions of masks and scores, forward, length 8192": _bars(
            "functions.csv", "provider", "feature", _FUNCTIONS, **functions
        ),
        "training on four H100, causal, by length": _bars("scaleout.csv", "scheme", "seqlen", lengths, **ranks),
    }
    title = f"{CARD}, bfloat16, head_dim 128"
    titled_bars(path, title, "TFLOP/s", _COLORS, panels)
