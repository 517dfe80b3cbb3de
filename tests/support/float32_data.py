"""Data with magnitudes that fit into float32 but not into float16, and the accuracy that is promised for them."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["KINDS", "MIXTURES", "check_promise", "data", "exact_results", "mixture", "orders_of"]

#: Kinds of data. The last four are exceptions: heads that are left to IEEE arithmetic.
KINDS = (
    "normal", "large scores", "positive", "channels", "rows", "small values", "opposite magnitudes", "outliers",
    "spread channels", "spread rows", "subnormal",
)  # fmt: skip


def data(kind: str, rows: int, head_dim: int) -> tuple[np.ndarray, ...]:
    """Returns q, k, v and do of one head."""
    rng = np.random.default_rng(3)
    q, k, v, do = (rng.standard_normal((1, rows, 1, head_dim), dtype=np.float32) for _ in range(4))
    if kind == "large scores":
        q *= 10
    elif kind == "positive":
        v, do = abs(v), abs(do)
    elif kind == "outliers":
        for x in (q, k, v, do):
            x[0, rows // 3, 0, head_dim // 2] = 1e4
    elif kind in ("channels", "spread channels"):
        channel = np.exp((3 if "spread" in kind else 1) * rng.standard_normal(head_dim, dtype=np.float32))
        q, k = q * channel, k / channel
    elif kind in ("rows", "spread rows"):
        for x in (q, k, v, do):
            x *= np.exp((3 if "spread" in kind else 1) * rng.standard_normal((1, rows, 1, 1), dtype=np.float32))
    elif kind == "small values":
        v, do = v * np.float32(1e-9), do * np.float32(1e-9)
    elif kind == "opposite magnitudes":
        q, k = q * np.float32(1e-9), k * np.float32(1e9)
    elif kind == "subnormal":
        do = do * np.float32(1e-40)
    return q, k, v, do


#: Arguments of `mixture`, from which hypothesis draws.
MIXTURES = {
    "sharpness": (0.1, 1.0, 10.0),
    "magnitudes": ((0, 0, 0), (9, 0, 0), (-12, -9, 12), (3, 12, -15), (0, -30, 0)),
    "positive": (False, True),
    "rows_spread": (0.0, 1.0, 3.0),
    "channels_spread": (0.0, 1.0, 3.0),
    "outlier": (1.0, 1e2, 1e4),
}


def mixture(seed: int, rows: int, head_dim: int, **how: Any) -> tuple[np.ndarray, ...]:
    """Returns q, k, v and do of one head, with several of the properties of `data` at a time.

    `magnitudes`: powers of ten of q and 1 / k, of v, and of do. `rows_spread` and `channels_spread`: standard
    deviations of logarithms; the channels of q and k are spread in opposite directions. `outlier`: the factor of one
    element of each matrix.
    """
    rng = np.random.default_rng(seed)
    q, k, v, do = (rng.standard_normal((1, rows, 1, head_dim)) for _ in range(4))
    if how["positive"]:
        v, do = abs(v), abs(do)
    channel = np.exp(how["channels_spread"] * rng.standard_normal(head_dim))
    q, k = q * channel * how["sharpness"], k / channel
    of_q, of_v, of_do = how["magnitudes"]
    for x, power in zip((q, k, v, do), (of_q, -of_q, of_v, of_do), strict=True):
        x *= np.exp(how["rows_spread"] * rng.standard_normal((1, rows, 1, 1))) * 10.0**power
        x[0, rng.integers(rows), 0, rng.integers(head_dim)] *= how["outlier"]
    return tuple(x.astype(np.float32) for x in (q, k, v, do))


def _naive(inputs: tuple, dtype: str, causal: bool) -> dict[str, Any]:
    """Computes the formulas with whole matrices, in one dtype, on the arrays' device.

    The last three results bound errors of gradients that naive arithmetic does not make, or avoids by chance. These
    errors come from rounding the lse that `backward` has, and dP and delta, which are equal if one key has all weight.
    """
    q, k, v, do = (x[0, :, 0].astype(dtype) for x in inputs)
    scale = np.dtype(dtype).type(q.shape[1] ** -0.5)
    scores = (q @ k.T) * scale
    if causal:
        scores = np.tril(scores) + np.triu(np.full_like(scores, -np.inf), 1)
    highest = scores.max(axis=1, keepdims=True)
    p = np.exp(scores - highest)
    total = p.sum(axis=1, keepdims=True)
    p /= total
    o = p @ v
    dp, delta = do @ v.T, (do * o).sum(axis=1, keepdims=True)
    ds = p * (dp - delta)
    lse = (highest + np.log(total))[:, 0]
    results = {"o": o, "lse": lse, "dq": ds @ k * scale, "dk": ds.T @ q * scale, "dv": p.T @ do}
    rounding = np.dtype(dtype).type(2.0**-24)
    of_lse, of_ds = abs(lse)[:, None] * rounding, p * np.hypot(dp, delta) * rounding
    bounds = {
        "dq": (abs(ds) * of_lse @ abs(k) + np.sqrt(of_ds**2 @ k**2)) * scale,
        "dk": ((abs(ds) * of_lse).T @ abs(q) + np.sqrt((of_ds**2).T @ q**2)) * scale,
        "dv": (p * of_lse).T @ abs(do),
    }
    return results | {f"lost {name}": x for name, x in bounds.items()}


def exact_results(inputs: tuple, causal: bool) -> dict[str, Any]:
    """Returns the results of `_naive` in float64: o, lse, dq, dk, dv and bounds, without the axes of length 1."""
    return _naive(inputs, "float64", causal)


def orders_of(kind: str) -> int:
    """Returns the `orders` of `check_promise` for a kind of data.

    If few elements outweigh all others, they have the largest error, and its size depends on chance: naive arithmetic
    with the columns in another order breaks the rule for one in ten of the mixtures.
    """
    return 8 if kind in ("outliers", "spread rows", "mixture") else 1


def check_promise(inputs: tuple, results: dict, causal: bool, orders: int = 1) -> None:
    """Checks that errors are at most 2 (o) or 3 times (gradients) those of naive float32 arithmetic, plus a floor.

    Naive arithmetic has no lse that is rounded to float32. This rounding alone may cost gradients more than all errors
    of naive arithmetic: scores of 100, made by one column, have few other errors. For a row with one key, dP and delta
    of naive arithmetic have equal rounding errors or not, depending on how its library adds up the columns. The floor
    covers both.
    `orders`: the number of column orders over which the largest error of naive arithmetic is taken (`orders_of`).
    """
    exact = _naive(inputs, "float64", causal)
    plain = []
    for order in range(orders):
        rotated = _naive(tuple(np.roll(x, 7 * order, axis=-1) for x in inputs), "float32", causal)
        plain.append({name: np.roll(x, -7 * order, axis=-1) for name, x in rotated.items()})
    for name, result in results.items():
        right = exact[name]
        factor, floor = (2, 1e-6) if name == "o" else (3, 2e-6)
        lost = 0.0 if name == "o" else float(exact[f"lost {name}"].max())
        error, *usual = (float(abs(x - right).max()) for x in (result[0, :, 0], *(x[name] for x in plain)))
        allowed = factor * max(usual) + floor * float(abs(right).max()) + lost
        assert error <= allowed, (name, error, max(usual), lost)
