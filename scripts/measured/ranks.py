"""Several GPUs, and the training of a language model."""

from __future__ import annotations

from measured.rows import Row, is_measured, pair, paragraphs, rows_of, sentence, source, span, table
from measured.speed import tokens_per_second

__all__ = ["language_model", "scaleout"]

_NAME, _DOCUMENTS = "scaleout.csv", "scaleout-documents.csv"
_SIZES = ((32768, 32, 8), (32768, 16, 16), (131072, 32, 8), (131072, 16, 16), (524288, 32, 8), (1048576, 16, 4))
_SCHEMES = ("heads", "gather", "hybrid")


def _of(size: tuple[int, int, int], ranks: int, scheme: str, operation: str = "training") -> Row | None:
    seqlen, heads, heads_kv = size
    wanted = {"seqlen": seqlen, "num_heads": heads, "num_heads_kv": heads_kv, "ranks": ranks, "scheme": scheme}
    try:
        (row,) = rows_of(_NAME, operation=operation, **wanted)
    except LookupError:
        return None
    return row


def _length(rows: int) -> str:
    return f"{rows // 1024}k" if rows < 2**20 else f"{rows // 2**20}M"


def _percents(values: list[float | None]) -> str:
    return f"{pair([one and 100 * one for one in values], '.1f')} %" if any(values) else ""


def scaleout() -> str:
    """The efficiency of schemes on two and four GPUs, and PyTorch's context parallelism beside them."""
    lines = []
    for size in _SIZES:
        rows = {scheme: [_of(size, ranks, scheme) for ranks in (2, 4)] for scheme in (*_SCHEMES, "torch ring")}
        cells = [_percents([row and float(row["efficiency"]) for row in rows[scheme]]) for scheme in _SCHEMES]
        both = zip(rows["heads"], rows["torch ring"], strict=True)
        over = [theirs and ours and float(theirs["ms_median"]) / float(ours["ms_median"]) for ours, theirs in both]
        lines.append((_length(size[0]), f"{size[1]}/{size[2]}", *cells, pair(over)))
    head = ("rows", "heads", *(f'`"{scheme}"`, two / four' for scheme in _SCHEMES), "PyTorch over ours")
    graph = {
        scheme: _percents([float(_of(_SIZES[0], n, scheme, "graph")["efficiency"]) for n in (2, 4)])
        for scheme in ("heads", "gather")
    }
    largest = [float(_of(_SIZES[-1], 4, scheme)["extra_bytes"]) / 2**30 for scheme in ("heads", "gather")]
    host = {
        (scheme, operation): span(
            (float(row["host_ms"]) for row in rows_of(_NAME, scheme=scheme, operation=operation, seqlen=32768)), ".1f"
        )
        for scheme in ("heads", "gather")
        for operation in ("forward", "backward")
    }
    queued = span((float(row["host_ms"]) for row in rows_of(_NAME, operation="graph")), ".2f")
    return paragraphs(
        source(_NAME, "python scripts/scaleout.py --full"),
        table(head, lines),
        sentence(
            f"Forward and backward in one CUDA graph, with 32/8 heads and 32k rows, reach {graph['heads']} on two "
            f'and four GPUs in `"heads"` and {graph["gather"]} in `"gather"`. On four GPUs, 1M rows of 16/4 heads '
            f'need {largest[0]:.1f} GiB beyond a rank\'s own arrays in `"heads"`, and {largest[1]:.1f} GiB in '
            f'`"gather"`. At 32k rows the host takes {host["heads", "forward"]} ms for a forward and '
            f'{host["heads", "backward"]} ms for a backward in `"heads"`, {host["gather", "forward"]} and '
            f'{host["gather", "backward"]} ms in `"gather"`, and {queued} ms for a graph of both.'
        ),
        *_documents(),
    )


def _documents() -> list[str]:
    """The efficiency of packed documents on two GPUs, if it has been measured."""
    if not is_measured(_DOCUMENTS):
        return []
    wanted = {"seqlen": 131072, "num_heads": 32, "ranks": 2}
    both = [rows_of(_DOCUMENTS, operation=operation, **wanted)[0] for operation in ("forward", "backward")]
    text = f"{both[0]['documents']} documents of any lengths, packed in 128k rows of 32/8 heads"
    return [
        source(_DOCUMENTS, "python scripts/scaleout.py --ranks 2 --rows 131072 --documents 64", ""),
        sentence(f'{text}, reach {_percents([float(row["efficiency"]) for row in both])} in `"heads"` on two GPUs.'),
    ]


def language_model() -> str:
    """The speed and the losses of scripts/train_lm.py."""
    speeds = {name: tokens_per_second(f"train_lm-{name}.csv") for name in ("fused", "unfused")}
    ranks = {1: "train_lm-1-rank.csv", 2: "train_lm-2-ranks.csv", 4: "train_lm-4-ranks.csv"}
    curves = {count: rows_of(name) for count, name in ranks.items()}
    training, held_out = (
        max(
            abs(float(a[column]) - float(b[column]))
            for count in (2, 4)
            for a, b in zip(curves[1], curves[count], strict=True)
            if a[column]
        )
        for column in ("train_bits_per_byte", "held_out_bits_per_byte")
    )
    last = {name: rows_of(f"train_lm-{name}.csv")[-1] for name in speeds}
    difference = abs(float(last["fused"]["held_out_bits_per_byte"]) - float(last["unfused"]["held_out_bits_per_byte"]))
    return sentence(
        f"After {last['fused']['step']} steps, {float(last['fused']['seconds']):.0f} s, the model has "
        f"{float(last['fused']['held_out_bits_per_byte']):.2f} bits per held-out byte. The same training with a "
        f"written-out score matrix ends {difference:.3f} bits beside it, at {speeds['unfused'] / speeds['fused']:.2f} "
        f"times the speed. With two and four ranks the training loss of 100 steps is that of one within {training:.3f} "
        f"bits per byte, and that of held-out text within {held_out:.3f}. A context of 2048 bytes is too short to gain "
        f"from several: one rank takes {tokens_per_second(ranks[1]):,.0f} tokens in a second, two take "
        f"{tokens_per_second(ranks[2]):,.0f} and four {tokens_per_second(ranks[4]):,.0f}."
    )
