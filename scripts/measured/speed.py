"""Plain calls: the grid of the benchmark, models, float32, the choice of method and splits, and training."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence

from accuracy import accuracy_table
from benchmark import (
    FLOAT64_HEAD_DIMS,
    FLOAT64_LONGEST,
    FLOAT64_SEQLENS,
    MODEL_SIZES,
    MODELS,
    PRECISION_HEAD_DIMS,
    PRECISION_SEQLENS,
    SEQLENS,
    SMALL_HEADS,
    SMALL_LAUNCHES,
    SMALL_SIZES,
    TRAINING_PROBLEMS,
    head_dim_problems,
)
from common.measure import format_bytes
from common.second_order import LONGEST as SECOND_ORDER_LONGEST
from common.second_order import second_order_table
from common.tables import speed_table
from common.wide import DECODE, latent_problems, wide_problems
from common.wide import OPERATIONS as WIDE_OPERATIONS
from common.wide import SEQLENS as WIDE_SEQLENS
from language_model.training import LOG_EVERY
from measured.rows import (
    CARD,
    OURS,
    PEERS,
    Row,
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
from methods import DEFAULT

__all__ = [
    "float32",
    "float32_training",
    "float64",
    "float64_errors",
    "grid",
    "head_dims",
    "memory",
    "methods",
    "models",
    "second_order",
    "short_calls",
    "small",
    "summary",
    "tokens_per_second",
    "training",
    "wide",
]

_BENCHMARK = "benchmark.csv"
_MODEL_NAMES = {
    "llama3-8b": "Llama 3 8B",
    "llama3-70b": "Llama 3 70B",
    "llama3-70b-tp8": "Llama 3 70B, a rank of 8",
    "qwen2.5-7b": "Qwen2.5 7B",
    "qwen3-0.6b": "Qwen3 0.6B",
    "mqa": "multi-query",
    "gemma2-9b": "Gemma 2 9B",
    "gpt-oss": "gpt-oss",
    "gpt2": "GPT-2",
}
_LONG = tuple(seqlen for seqlen in SEQLENS if seqlen >= 2048)
_HALVES = ("float16", "bfloat16")


def summary() -> str:
    """The README's sentence beside its picture."""

    def over(peer: str, operation: str) -> str:
        return span(ratios(_BENCHMARK, provider=peer, operation=operation, seqlen=_LONG, dtype=_HALVES), ".1f")

    return sentence(
        f"On an {CARD}, in 16 bits with 2048 rows or more and head_dim 32 to 256, cuDNN takes "
        f"{over('torch cudnn', 'forward')} times as long as the forward and {over('torch cudnn', 'single_pass')} times "
        f"as long as the backward that adds atomically, as cuDNN does. PyTorch's flash operator (FlashAttention-2) "
        f"takes {over('torch flash', 'forward')} and {over('torch flash', 'single_pass')} times as long."
    )


def grid() -> str:
    """TFLOP/s by head_dim and length, and the ratios of cuDNN and of FlashAttention-2."""

    def flash(operation: str) -> str:
        return span(ratios(_BENCHMARK, provider="torch flash", operation=operation, seqlen=_LONG, dtype=_HALVES), ".1f")

    return paragraphs(
        source(_BENCHMARK, "python scripts/benchmark.py"),
        "\n".join(speed_table(rows_of(_BENCHMARK), "float16", "torch cudnn")),
        sentence(
            f"From seqlen 2048 on, in float16 and bfloat16, PyTorch's flash operator (FlashAttention-2) takes "
            f"{flash('forward')} times as long as our forward and {flash('single_pass')} times as long as "
            f"`single_pass`; its deterministic mode takes {flash('two_pass')} times as long as `two_pass`."
        ),
        sentence(_spread()),
    )


def _spread() -> str:
    """Says how far the rounds of one measurement are apart."""
    ours = [row for row in rows_of(_BENCHMARK, provider=OURS, seqlen=_LONG) if row["ms_median"]]

    def excess(rows: Iterable[Row]) -> list[float]:
        return sorted(float(row["ms_max"]) / float(row["ms_median"]) - 1 for row in rows)

    def tenth(values: list[float]) -> float:
        return statistics.quantiles(values, n=10)[-1]

    short, long = (excess(row for row in ours if (row["seqlen"] == "16384") == is_long) for is_long in (False, True))
    return (
        f"The card throttles. In nine rows of ten the slowest round takes at most {percent(tenth(short))} longer than "
        f"the median, and at seqlen 16384 at most {percent(tenth(long))}."
    )


def training() -> str:
    """The attention of a training step."""
    lines = []
    for problem in TRAINING_PROBLEMS:
        wanted = {"operation": "training", "seqlen": problem.seqlen}
        speeds = [value(_BENCHMARK, "tflops", provider=name, **wanted) for name in (OURS, "torch cudnn", "torch flash")]
        over = [ratios(_BENCHMARK, provider=name, **wanted)[0] for name in ("torch cudnn", "torch flash")]
        lines.append(
            (problem.seqlen, f"{speeds[0]:.0f}", *(f"{s:.0f} ({r:.2f})" for s, r in zip(speeds[1:], over, strict=True)))
        )
    return table(("seqlen", "fa2cupy", "cuDNN", "FlashAttention-2"), lines)


def memory() -> str:
    """Bytes beyond inputs and results."""

    def extra(operation: str, **sizes: object) -> str:
        held = value(_BENCHMARK, "extra_bytes", provider=OURS, operation=operation, dtype="float16", **sizes)
        return f"{held / 2**20:.1f} MiB".replace(".0 ", " ")

    usual = {"head_dim": 128, "seqlen": 16384, "causal": 1}
    longest = {"seqlen": 65536}
    return sentence(
        f"With 16384 tokens and 16 heads of 128 that is {extra('forward', **usual)} in the forward, "
        f"{extra('single_pass', **usual)} in `single_pass` and {extra('two_pass', **usual)} in `two_pass`; with 65536 "
        f"tokens and 2 heads, {extra('forward', **longest)}, {extra('single_pass', **longest)} and "
        f"{extra('two_pass', **longest)}, where the scores of one head would take 8 GiB."
    )


def short_calls() -> str:
    """First calls, and the host's time of warm ones."""
    names = {"forward": "forward", "single_pass": "backward, `single_pass`", "two_pass": "backward, `two_pass`"}
    lines = []
    for operation, name in names.items():
        fresh, cached = (
            value("startup.csv", f"first_call_ms_{kind}", call=operation, head_dim=128) / 1000
            for kind in ("fresh", "cached")
        )
        host = [
            float(row["host_us"])
            for provider in (OURS, "torch flash", "torch cudnn")
            for row in rows_of(_BENCHMARK, operation=operation, provider=provider, seqlen=128, dtype="float16")
        ]
        lines.append((name, f"{fresh:.1f} s", f"{cached:.2f} s", *(f"{one:.0f} us" for one in host)))
    head = ("", "first call", "from the disk cache", "warm call", "of FlashAttention-2", "of cuDNN")
    parts = [source("startup.csv", "python scripts/benchmark.py --sections startup host"), table(head, lines)]
    wide = {"dtype": "float32", "seqlen": 128, "provider": OURS}
    forward, *backward = (value(_BENCHMARK, "host_us", operation=one, **wide) for one in names)
    both = " and ".join(f"{one:.0f}" for one in backward)
    parts.append(sentence(f"In float32 a warm forward takes {forward:.0f} us, and backwards take {both} us."))
    return paragraphs(*parts)


def small() -> str:
    """Times and ratios of training steps of small models, by launch, heads and size."""
    name = "small.csv"

    def cell(**wanted: object) -> str:
        micros = 1000 * value(name, "ms_median", provider=OURS, **wanted)
        return f"{micros:.1f} ({min(ratios(name, **wanted)):.2f})"

    lines = [
        (launch, heads, *(cell(operation=launch, num_heads=heads, batch=b, seqlen=n) for b, n in SMALL_SIZES))
        for launch, heads in itertools.product(SMALL_LAUNCHES, SMALL_HEADS)
    ]
    head = ("launched as", "heads", *(f"{batch} x {seqlen}" for batch, seqlen in SMALL_SIZES))
    return paragraphs(source(name, "python scripts/benchmark.py --sections small"), table(head, lines))


def models() -> str:
    """TFLOP/s and ratios by model and size."""
    operations = ("forward", "default", "deterministic")
    lines, least = [], dict.fromkeys(operations, float("inf"))
    for model, (heads, heads_kv, head_dim) in MODELS.items():
        cells = []
        for batch, seqlen in MODEL_SIZES:
            cell = []
            for operation in operations:
                wanted = {"model": model, "batch": batch, "seqlen": seqlen, "operation": operation}
                best = min(ratios("models.csv", **wanted))
                least[operation] = min(least[operation], best)
                cell.append(f"{value('models.csv', 'tflops', provider=OURS, **wanted):.0f} ({best:.2f})")
            cells.append(" / ".join(cell))
        lines.append((_MODEL_NAMES[model], f"{heads}/{heads_kv}", head_dim, *cells))
    head = ("", "heads of q / of k and v", "head_dim", *(f"{batch} x {seqlen}" for batch, seqlen in MODEL_SIZES))
    return paragraphs(
        source("models.csv", "python scripts/benchmark.py --sections models"),
        table(head, lines),
        sentence(f"The smallest ratios are {pair(list(least.values()))}."),
    )


def head_dims() -> str:
    """TFLOP/s and ratios by both head_dims, heads, mask and size."""
    name, operations = "head_dims.csv", ("forward", "default", "deterministic")
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for problem in head_dim_problems():
        columns_v = problem.head_dim_v or problem.head_dim
        wanted = {**problem.columns(), "head_dim_v": columns_v}
        if not has_rows(name, **wanted):
            continue
        cell = [
            f"{value(name, 'tflops', provider=OURS, operation=one, **wanted):.0f} "
            f"({min(ratios(name, operation=one, **wanted)):.2f})"
            for one in operations
        ]
        mask = "causal" if problem.causal else "full"
        line = f"{problem.head_dim} / {columns_v}", problem.dtype, str(problem.num_heads), mask
        cells.setdefault(line, {})[f"{problem.batch} x {problem.seqlen}"] = " / ".join(cell)
    sizes = list(dict.fromkeys(size for of_line in cells.values() for size in of_line))
    others = " and flash-attn-4 4.0.0b36" if any(row["provider"] == "flash-attn 4" for row in rows_of(name)) else ""
    return paragraphs(
        source(name, "python scripts/benchmark.py --sections head_dims", f"{PEERS}{others}"),
        table(
            ("head_dim of q / of v", "dtype", "heads", "mask", *sizes),
            [(*line, *(of_line.get(size, "") for size in sizes)) for line, of_line in cells.items()],
        ),
    )


def wide() -> str:
    """The same beyond 256 columns, and the speed of decoding latent attention beside that of a copy."""
    name, command = "wide.csv", "python scripts/benchmark.py --sections wide"
    if not is_measured(name):
        return sentence(f"They have not been measured on this card yet: `{command}` does it.")

    def cell(**wanted: object) -> str:
        found, speed = ratios(name, **wanted), value(name, "tflops", provider=OURS, **wanted)
        return f"{speed:.0f} ({min(found):.2f})" if found else f"{speed:.0f}"

    cells: dict[tuple[str, str], dict[int, str]] = {}
    for problem in wide_problems():
        columns_v = problem.head_dim_v or problem.head_dim
        wanted = {**problem.columns(), "head_dim_v": columns_v}
        line = f"{problem.head_dim} / {columns_v}", "causal" if problem.causal else "full"
        both = " / ".join(cell(operation=one, **wanted) for one in WIDE_OPERATIONS)
        cells.setdefault(line, {})[problem.seqlen] = both
    decoded = []
    for latent in latent_problems():
        wanted = {"operation": DECODE, "num_heads": latent.heads[0], "batch": len(latent.lengths), "provider": OURS}
        numbers = [value(name, column, **wanted) for column in ("ms_median", "gbs", "of_copy", "tflops")]
        shown = (format(number, how) for number, how in zip(numbers, (".3f", ".0f", ".2f", ".0f"), strict=True))
        decoded.append((latent.heads[0], latent.name, *shown))
    return paragraphs(
        source(name, command, "PyTorch 2.11"),
        table(
            ("head_dim of q / of v", "mask", *(f"seqlen {seqlen}" for seqlen in WIDE_SEQLENS)),
            [(*line, *(of_line[seqlen] for seqlen in WIDE_SEQLENS)) for line, of_line in cells.items()],
        ),
        "`decode` of latent attention, one query:",
        table(("query heads", "cache", "ms", "GB/s", "of a copy", "TFLOP/s"), decoded),
    )


def _by_operation(head_dims: Iterable[int], seqlens: Sequence[int], cell: Callable[..., str]) -> str:
    """Returns a table of lengths, with a line for each operation and head_dim. `cell` makes one of both masks."""
    titles = {"forward": "forward", "default": "backward", "deterministic": "backward, `deterministic=True`"}
    lines = []
    for operation, title in titles.items():
        for number, head_dim in enumerate(head_dims):
            cells = (
                " / ".join(cell(operation=operation, head_dim=head_dim, seqlen=seqlen, causal=mask) for mask in (0, 1))
                for seqlen in seqlens
            )
            lines.append(("" if number else title, head_dim, *cells))
    return table(("", "head_dim", *(f"seqlen {seqlen}" for seqlen in seqlens)), lines)


def float32() -> str:
    """Ratios of PyTorch's memory-efficient operator."""

    def cell(**wanted: object) -> str:
        (ratio,) = ratios("float32.csv", precision="split", **wanted)
        return f"{ratio:.3g}" if ratio >= 10 else f"{ratio:.2f}"

    def ieee(operation: str) -> str:
        spans = [
            span(ratios("float32.csv", precision="ieee", operation=operation, head_dim=d)) for d in PRECISION_HEAD_DIMS
        ]
        return ", ".join(spans)

    return paragraphs(
        source("float32.csv", "python scripts/benchmark.py --sections float32", "PyTorch 2.11"),
        _by_operation(PRECISION_HEAD_DIMS, PRECISION_SEQLENS, cell),
        sentence(
            f'Beside our kernels for CUDA cores (`precision="ieee"`, other GPUs), the operator takes '
            f"{ieee('forward')} times as long in the forward at head_dim 64, 128 and 256, and {ieee('default')} "
            "times as long in the backward."
        ),
    )


def float64() -> str:
    """TFLOP/s, and the ratios of the fastest other way to compute float64."""
    name = "float64.csv"

    def cell(**wanted: object) -> str:
        return f"{value(name, 'tflops', provider=OURS, **wanted):.1f} ({min(ratios(name, **wanted)):.2f})"

    long = tuple(seqlen for seqlen in FLOAT64_SEQLENS if seqlen >= 4096)

    def over(provider: str, operation: str) -> str:
        return span(ratios(name, provider=provider, operation=operation, seqlen=long), ".1f")

    shares = [
        float(two["ms_median"]) / float(one["ms_median"])
        for one, two in zip(
            rows_of(name, provider=OURS, operation="deterministic", seqlen=long),
            rows_of(name, provider=OURS, operation="default", seqlen=long),
            strict=True,
        )
    ]
    longest = {one: rows_of(name, seqlen=FLOAT64_LONGEST, operation=one)[0] for one in ("forward", "default")}
    speeds = [f"{float(row['tflops']):.1f}" for row in longest.values()]
    held = [f"{float(row['extra_bytes']) / 2**20:.0f} MiB" for row in longest.values()]
    return paragraphs(
        source(
            name,
            "python scripts/benchmark.py --sections float64",
            "our kernels for CUDA cores, attention written out in CuPy with cuBLAS, and PyTorch's math operator",
        ),
        _by_operation(FLOAT64_HEAD_DIMS, FLOAT64_SEQLENS, cell),
        sentence(
            f"From seqlen {long[0]} on, attention written out takes {over('cupy unfused', 'forward')} times as long as "
            f"the forward and {over('cupy unfused', 'default')} times as long as the backward, PyTorch's operator "
            f"{over('torch math', 'forward')} and {over('torch math', 'default')} times, and CUDA cores "
            f"{over('fa2cupy simt', 'forward')} and {over('fa2cupy simt', 'default')} times. `deterministic=True` has "
            f"{span(shares)} of the default's speed."
        ),
        sentence(
            f"One head of {FLOAT64_LONGEST} rows, head_dim 128: {speeds[0]} TFLOP/s in the forward and {speeds[1]} in "
            f"the backward, with {held[0]} and {held[1]} beyond inputs and results."
        ),
    )


def second_order() -> str:
    """TFLOP/s of tangents and second derivatives, their shares of the first order's, and ratios."""
    name, command = "second_order.csv", "python scripts/benchmark.py --sections second_order"
    if not is_measured(name):
        return sentence(f"They have not been measured on this card yet: `{command}` does it.")
    rows = rows_of(name)
    others = {row["provider"] for row in rows} - {OURS}
    tables = second_order_table(rows)
    middle = tables.index("")
    (longest,) = rows_of(name, seqlen=SECOND_ORDER_LONGEST, operation="double_backward")
    return paragraphs(
        source(name, command, " and ".join(sorted(others)).replace("cupy written out", "formulas written out in CuPy")),
        "\n".join(tables[:middle]),
        "The least time of the others over ours:",
        "\n".join(tables[middle + 1 :]),
        sentence(
            f"A double backward of one head of {SECOND_ORDER_LONGEST} rows, head_dim {longest['head_dim']}, takes "
            f"{float(longest['ms_median']):.0f} ms and {format_bytes(float(longest['peak_bytes']))}, results included."
        ),
    )


def float64_errors() -> str:
    """Errors of float64 over those of the formulas, by kinds of data."""
    name = "accuracy.csv"
    most = max(float(row["of_allowed"]) for row in rows_of(name))
    return paragraphs(
        source(name, "python scripts/accuracy.py", peers=""),
        "\n".join(accuracy_table(rows_of(name))),
        sentence(f"No error is above {most:.2f} of what is allowed."),
    )


def float32_training() -> str:
    """Tokens per second of a language model in float32."""
    contexts = (1024, 2048, 4096)
    lines = [
        (title, *(f"{tokens_per_second(f'train_lm-float32-{context}-{name}.csv') / 1000:.0f}" for context in contexts))
        for title, name in (("fused", "fused"), ("through a written-out score matrix", "unfused"))
    ]
    return table(("context", *contexts), lines)


def tokens_per_second(name: str) -> float:
    """Returns the median speed between two rows of a curve; the first has the compilers', some an evaluation's time."""
    curve = [(int(row["tokens"]), float(row["seconds"])) for row in rows_of(name) if int(row["step"]) >= LOG_EVERY]
    return statistics.median((b[0] - a[0]) / (b[1] - a[1]) for a, b in itertools.pairwise(curve))


def methods() -> str:
    """What the default of method and splits loses."""
    name = "methods.csv"
    losses = {
        operation: [float(row["loss"]) for row in rows_of(name, operation=operation, method=DEFAULT) if row["loss"]]
        for operation in ("forward", "backward")
    }
    few = [row for row in rows_of(name, operation="forward", method=DEFAULT) if row["loss"] and row["queries"]]

    def lost(operation: str) -> str:
        beyond = sorted((one for one in losses[operation] if one > 0.03), reverse=True)
        shown = ", ".join(f"{100 * one:.1f}" for one in beyond)
        mean = percent(statistics.mean(losses[operation]), 2)
        return f"{mean} on average, and more than 3 % in {len(beyond)} calls ({shown} %)"

    return paragraphs(
        source(name, "python scripts/methods.py", peers=""),
        sentence(
            f"The default is compared with the fastest choice of method and number of splits in the times of "
            f"{len(losses['forward'])} forwards, {len(few)} of them of 128 or 1024 queries against 1024 to 16384 "
            f"keys, and {len(losses['backward'])} backwards. In the forward it loses {lost('forward')}; in the "
            f"backward, {lost('backward')}."
        ),
    )
