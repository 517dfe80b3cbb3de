"""Features, score functions, sparse maps and decoding."""

from __future__ import annotations

from common.biases import bias_tables
from common.feature_cases import HEAD_DIMS, SEQLENS
from common.function_cases import SEQLENS as FUNCTION_SEQLENS
from measured.rows import (
    OURS,
    PEERS,
    has_rows,
    is_measured,
    pair,
    paragraphs,
    percent,
    ratios,
    rows_of,
    sentence,
    source,
    span,
    table,
    value,
)

__all__ = ["biases", "costs", "decode", "flex_functions", "flex_keywords", "function_calls", "maps", "peers"]

_PEERS, _FLEX, _BOTH = "features-peers.csv", ("torch flex", "torch flex flash"), ("forward", "backward")
_NAMES = {
    "window127": "window 127",
    "window1023": "window 1023",
    "softcap": "soft cap",
    "alibi": "ALiBi",
    "padding": "padding mask",
    "mask": "mask for each sequence",
    "bias": "bias for each head",
    "bias_batch": "bias for each sequence",
    "bias_full": "bias for each pair",
    "dbias": "its gradient, for each head",
    "dbias_batch": "its gradient, for each sequence",
    "dbias_full": "its gradient, for each pair",
    "sink": "sink",
    "dropout": "dropout",
}
_BIAS_PEERS = {
    "torch efficient": "PyTorch's memory-efficient operator",
    "torch written out": "the formulas written out in PyTorch",
}
_FUNCTIONS = {
    "causal": "causal",
    "sliding_window": "sliding window of 1023",
    "dilated_window": "dilated window of 4092, every fourth key",
    "neighborhood_2d": "2-D neighbourhood",
    "prefix_lm": "prefix-LM",
    "document": "16 documents of equal lengths",
    "causal_document": "16 documents of any length, causal",
    "shared_prompt": "16 answers to one prompt",
    "tree": "tree of ancestors",
    "block_diffusion": "block diffusion",
    "first_and_window": "first tokens and window",
    "frames": "frames that see their neighbours",
    "tiles_of_tokens": "3-D tiles of tokens",
    "global_and_near": "global tokens and two-sided window",
    "softcap": "soft cap",
    "alibi": "ALiBi",
    "t5_relative": "T5's relative positions",
}
_PATTERNS = {
    "document": "16 documents of any length",
    "window1024": "window of 1024",
    "dilated": "dilated window of 2048, every fourth key",
    "prefix-LM": "prefix-LM",
    "random 0.1": "tiles at random",
    "random 0.5": "tiles at random",
}
#: Windows and grids of neighbourhoods, by pattern and length.
_GRIDS = {
    ("13 x 13", 4096): "13 x 13 of 64 x 64",
    ("13 x 13", 16384): "13 x 13 of 128 x 128",
    ("5 x 5 x 5", 16384): "5 x 5 x 5 of 16 x 32 x 32",
}
_SIZES = [(head_dim, seqlen) for head_dim in HEAD_DIMS for seqlen in SEQLENS]
_FUNCTION_SIZES = [(head_dim, seqlen) for head_dim in HEAD_DIMS for seqlen in FUNCTION_SEQLENS]


def _titles(sizes: list[tuple[int, int]]) -> list[str]:
    return [f"head_dim {head_dim}, seqlen {seqlen}" for head_dim, seqlen in sizes]


def _cell(
    name: str, column: str, feature: str, size: tuple[int, int], provider: str | tuple[str, ...] = "", how: str = ".2f"
) -> str:
    """Returns a number of the forward and one of the backward; of several peers, the one of the fastest."""
    head_dim, seqlen = size
    found: list[float | None] = []
    for operation in _BOTH:
        wanted = {"feature": feature, "head_dim": head_dim, "seqlen": seqlen, "operation": operation}
        try:
            rows = rows_of(name, **wanted, **({"provider": provider} if provider else {}))
        except LookupError:
            rows = []
        found.append(min((float(row[column]) for row in rows if row[column]), default=None))
    return pair(found, how)


def _by_feature(column: str, provider: str = "") -> str:
    lines = [
        (title, *(_cell(_PEERS, column, name, size, provider) for size in _SIZES)) for name, title in _NAMES.items()
    ]
    return table(("", *_titles(_SIZES)), (line for line in lines if any(line[1:])))


def _packed(column: str, provider: str = "") -> list[str]:
    return [_cell(_PEERS, column, "packed", (head_dim, 1024), provider) for head_dim in HEAD_DIMS]


def costs() -> str:
    """The speed that a feature leaves."""
    narrow, wide = _packed("over_plain", OURS)
    return paragraphs(
        source(_PEERS, "python scripts/benchmark.py --sections features", ""),
        _by_feature("over_plain", OURS),
        sentence(
            f"Packed lengths cost nothing measurable: 16 sequences of 131 to 2557 rows run at {wide} of the "
            f"TFLOP/s of 16 equal ones ({narrow} at head_dim 64), and rows outside all sequences are cleared, "
            "not computed."
        ),
    )


def peers() -> str:
    """The fastest of PyTorch's operators beside ours."""
    narrow, wide = _packed("ratio")
    return paragraphs(
        source(_PEERS, "python scripts/benchmark.py --sections features"),
        _by_feature("ratio"),
        sentence(
            f"With packed lengths, FlashAttention-2's variable-length operator takes {narrow} (head_dim 64) and "
            f"{wide} (128) times as long."
        ),
    )


def biases() -> str:
    """The cost of biases that sequences share, and the ratios of each other implementation."""
    name, command = "biases.csv", "python scripts/benchmark.py --sections biases"
    if not is_measured(name):
        return sentence(f"They have not been measured on this card yet: `{command}` does it.")
    cost, *others = bias_tables(rows_of(name)).items()
    named = [provider for provider, _ in others if not provider.startswith("torch")]
    texts = [source(name, command, " and ".join((PEERS, *named))), "\n".join(cost[1])]
    for provider, lines in others:
        texts += [f"The time of {_BIAS_PEERS.get(provider, provider)} over ours:", "\n".join(lines)]
    return paragraphs(*texts)


def flex_keywords() -> str:
    """Compiled FlexAttention beside keywords."""
    lines = [
        (_NAMES[feature], *(_cell("features.csv", "ratio", feature, size, _FLEX) for size in _SIZES))
        for feature in ("window1023", "softcap", "alibi")
    ]
    return paragraphs(
        source("features.csv", "python scripts/features.py", "PyTorch 2.11"), table(("", *_titles(_SIZES)), lines)
    )


def flex_functions() -> str:
    """Compiled FlexAttention beside functions, and functions beside keywords."""
    name = "functions.csv"
    lines = [
        (title, *(_cell(name, "ratio", feature, size, _FLEX) for size in _FUNCTION_SIZES))
        for feature, title in _FUNCTIONS.items()
    ]

    def over(feature: str) -> str:
        """Returns the time of the keyword over that of the function; empty if older rows have none."""
        both = [
            span(float(row["over_plain"]) for row in rows_of(name, feature=feature, operation=one, provider=OURS))
            for one in _BOTH
        ]
        return " / ".join(both) if set(both) != {"1.00"} else ""

    masks = (("causal", "the causal mask", "causal"), ("sliding_window", "the sliding window", "window"))
    beside = [f", and {title} at {over(one)} of that of `{keyword}`" for one, title, keyword in masks if over(one)]
    return paragraphs(
        source(name, "python scripts/benchmark.py --sections functions", "PyTorch 2.11 and flash-attn-4 4.0.0b36"),
        table(("", *_titles(_FUNCTION_SIZES)), (line for line in lines if any(line[1:]))),
        sentence(
            f"FlexAttention compiles T5's function by neither backend at head_dim 64, and by Triton's alone at 128. "
            f"As functions, ALiBi runs at {over('alibi')} of the speed of `alibi_slopes`, and the soft cap "
            f"at {over('softcap')} of that of `softcap`{''.join(beside)}."
        ),
    )


def function_calls() -> str:
    """What functions cost the host."""
    name = "function-calls.csv"

    def first(operation: str, is_plain: bool) -> str:
        rows = rows_of(name, operation=operation)
        return span((float(r["first_s"]) for r in rows if (r["feature"] == "plain") == is_plain), ".1f")

    def growth(operation: str) -> str:
        rows = rows_of(name, operation=operation, head_dim=64)
        return span((float(row["growth_us"]) for row in rows if row["feature"] != "plain"), ".1f")

    return paragraphs(
        source(name, "python scripts/benchmark.py --sections calls", ""),
        sentence(
            f"The first call of a process with a function takes {first('forward', False)} s forward and "
            f"{first('backward', False)} s backward, and one without {first('forward', True)} s and "
            f"{first('backward', True)} s: compilers are loaded, and kernels compiled. Another process finds them "
            f"on disk. At head_dim 64 a warm call with a function takes the host {growth('forward')} us more "
            f"forward and {growth('backward')} us more backward."
        ),
    )


def maps() -> str:
    """The efficiency of sparse maps, and the time to make one."""
    name, lines = "sparse.csv", []
    for pattern, title in _PATTERNS.items():
        shares = [
            float(rows_of(name, pattern=pattern, seqlen=seqlen, operation="forward")[0]["density"])
            for seqlen in FUNCTION_SEQLENS
        ]
        cells = [
            pair([
                value(name, "ratio", pattern=pattern, head_dim=head_dim, seqlen=seqlen, operation=operation)
                for operation in ("forward", "default")
            ])
            for head_dim, seqlen in _FUNCTION_SIZES
        ]  # fmt: skip
        lines.append((title, " / ".join(percent(share) for share in shares), *cells))
    ours, theirs = (row["ms_median"] for row in rows_of(name, operation="map"))
    return paragraphs(
        source(name, "python scripts/benchmark.py --sections sparse"),
        table(("", f"visited, {' / '.join(map(str, FUNCTION_SEQLENS))}", *_titles(_FUNCTION_SIZES)), lines),
        sentence(
            f"Making the map of 16 documents in 131072 x 131072 takes {float(ours):.1f} ms, and "
            f"{float(theirs):.1f} ms with PyTorch's compiled `create_block_mask`."
        ),
        *_neighborhoods(name),
    )


def _neighborhoods(name: str) -> list[str]:
    """The speed of neighbourhoods that kernels know beside the evaluated function, if it has been measured."""
    if not all(has_rows(name, pattern=pattern, seqlen=seqlen) for pattern, seqlen in _GRIDS):
        return []

    def cell(pattern: str, seqlen: int, head_dim: int) -> str:
        wanted = {"pattern": pattern, "seqlen": seqlen, "head_dim": head_dim}
        return pair([value(name, "over_evaluated", operation=one, **wanted) for one in ("forward", "default")])

    lines = [(title, *(cell(*grid, head_dim) for head_dim in HEAD_DIMS)) for grid, title in _GRIDS.items()]
    text = "The time of neighbourhoods with an evaluated function and a map over that of those that kernels know:"
    return [sentence(text), table(("", *(f"head_dim {head_dim}" for head_dim in HEAD_DIMS)), lines)]


def decode() -> str:
    """Microseconds of decode, and the ratio of the faster operator."""
    name, lines = "decode.csv", []
    heads = [(32, 8), (8, 1)]
    columns = [(q, kv, queries) for q, kv in heads for queries in (1, 4)]
    ours = rows_of(name, provider=OURS, head_dim=128, page_size="")
    for cache in dict.fromkeys(row["cache"] for row in ours):
        cells = []
        for num_heads, _, queries in columns:
            wanted = {"head_dim": 128, "cache": cache, "num_heads": num_heads, "seqlen_q": queries, "page_size": ""}
            best = min(ratios(name, **wanted), default=None)
            time = value(name, "us_median", provider=OURS, **wanted)
            cells.append((f"{time:.1f}" if time < 100 else f"{time:.0f}") + (f" ({best:.2f})" if best else ""))
        lines.append((cache, *cells))
    head = ("cache", *(f"{q}/{kv} heads, {n} quer{'y' if n == 1 else 'ies'}" for q, kv, n in columns))

    def of_copy(head_dim: int) -> str:
        rows = rows_of(name, provider=OURS, head_dim=head_dim, page_size="")
        large = [row for row in rows if " (" not in row["cache"] and _bytes_read(row) > 2**26]
        return span(float(row["of_copy"]) for row in large)

    hosts = [float(row["host_us"]) for row in rows_of(name, provider=OURS) if row["host_us"]]
    return paragraphs(
        source(name, "python scripts/benchmark.py --sections decode"),
        table(head, lines),
        sentence(
            f"Calls of equal lengths that read more than 64 MiB reach {of_copy(128)} of the speed of a copy "
            f"({of_copy(64)} with head_dim 64). Shorter calls are bound by their launch, first loads and merge. A "
            f"call takes {span(hosts, '.0f')} us of host time."
        ),
    )


def _bytes_read(row: dict[str, str]) -> float:
    batch, rows = row["cache"].split(" x ")
    return 2 * 2 * int(batch) * int(rows) * int(row["num_heads_kv"]) * int(row["head_dim"])
