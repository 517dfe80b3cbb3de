"""Data of all magnitudes in float32 and float64, and the accuracy that is promised for them.

Exact results of float32 data are in float64, those of float64 data in NumPy's ``longdouble``, which has 11 bits more on
x86. It is slow: `part` keeps few queries, or few keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "KINDS",
    "MIXTURES",
    "Error",
    "Promise",
    "check_promise",
    "data",
    "exact_results",
    "mixture",
    "orders_of",
    "part",
]

#: Kinds of data. The last four are exceptions of float32: heads that are left to IEEE arithmetic.
KINDS = (
    "normal", "large scores", "positive", "channels", "rows", "small values", "opposite magnitudes", "outliers",
    "spread channels", "spread rows", "subnormal",
)  # fmt: skip


def data(kind: str, rows: int, head_dim: int, dtype: str = "float32") -> tuple[np.ndarray, ...]:
    """Returns q, k, v and do of one head."""
    rng = np.random.default_rng(3)
    q, k, v, do = (rng.standard_normal((1, rows, 1, head_dim), dtype=dtype) for _ in range(4))
    if kind == "large scores":
        q *= 10
    elif kind == "positive":
        v, do = abs(v), abs(do)
    elif kind == "outliers":
        for x in (q, k, v, do):
            x[0, rows // 3, 0, head_dim // 2] = 1e4
    elif kind in ("channels", "spread channels"):
        channel = np.exp((3 if "spread" in kind else 1) * rng.standard_normal(head_dim, dtype=dtype))
        q, k = q * channel, k / channel
    elif kind in ("rows", "spread rows"):
        for x in (q, k, v, do):
            x *= np.exp((3 if "spread" in kind else 1) * rng.standard_normal((1, rows, 1, 1), dtype=dtype))
    elif kind == "small values":
        v, do = v * v.dtype.type(1e-9), do * v.dtype.type(1e-9)
    elif kind == "opposite magnitudes":
        q, k = q * q.dtype.type(1e-9), k * q.dtype.type(1e9)
    elif kind == "subnormal":
        do = do * do.dtype.type(1e-40 if dtype == "float32" else 1e-310)
    return q, k, v, do


def part(inputs: tuple, queries: int, keys: int) -> tuple:
    """Returns the last rows of q and do, and the first of k and v."""
    q, k, v, do = inputs
    return q[:, -queries:], k[:, :keys], v[:, :keys], do[:, -queries:]


#: Errors of o, relative to the largest result, that are allowed in any case; gradients may have twice as much.
_FLOORS = {"float32": 1e-6, "float64": 2e-15}

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

    The last three results of a wider dtype bound errors of gradients that naive arithmetic does not make, or avoids by
    chance. These errors come from rounding the lse that `backward` has, and dP and delta, which are equal if one key
    has all weight.
    """
    q, k, v, do = (x[0, :, 0].astype(dtype) for x in inputs)
    scale, shift = np.dtype(dtype).type(q.shape[1] ** -0.5), len(k) - len(q)
    scores = (q @ k.T) * scale
    if causal:
        scores = np.tril(scores, shift) + np.triu(np.full_like(scores, -np.inf), 1 + shift)
    highest = scores.max(axis=1, keepdims=True)
    p = np.exp(scores - highest)
    total = p.sum(axis=1, keepdims=True)
    p /= total
    o = p @ v
    dp, delta = do @ v.T, (do * o).sum(axis=1, keepdims=True)
    ds = p * (dp - delta)
    lse = (highest + np.log(total))[:, 0]
    results = {"o": o, "lse": lse, "dq": ds @ k * scale, "dk": ds.T @ q * scale, "dv": p.T @ do}
    if inputs[0].dtype == dtype:
        return results
    rounding = np.finfo(inputs[0].dtype.name).eps / 2
    q, k, do, lse, p, ds, dp, delta = (x.astype("float64") for x in (q, k, do, lse, p, ds, dp, delta))
    of_lse, of_ds = abs(lse)[:, None] * rounding, p * np.hypot(dp, delta) * rounding
    bounds = {
        "dq": (abs(ds) * of_lse @ abs(k) + np.sqrt(of_ds**2 @ k**2)) * scale,
        "dk": ((abs(ds) * of_lse).T @ abs(q) + np.sqrt((of_ds**2).T @ q**2)) * scale,
        "dv": (p * of_lse).T @ abs(do),
    }
    return results | {f"lost {name}": x for name, x in bounds.items()}


def exact_results(inputs: tuple, causal: bool) -> dict[str, Any]:
    """Returns the results of `_naive` in a wider dtype: o, lse, dq, dk, dv and bounds, without the axes of length 1."""
    if inputs[0].dtype == "float32":
        return _naive(inputs, "float64", causal)
    return _naive(tuple(map(_on_host, inputs)), "longdouble", causal)


def _on_host(x: Any) -> np.ndarray:
    return x.get() if hasattr(x, "get") else x


def orders_of(kind: str) -> int:
    """Returns the `orders` of `Promise` for a kind of data.

    If few elements outweigh all others, they have the largest error, and its size depends on chance: naive arithmetic
    with the columns in another order breaks the rule for one in ten of the mixtures.
    """
    return 8 if kind in ("outliers", "spread rows", "mixture") else 1


class Error(NamedTuple):
    """The largest error of a result.

    Attributes
    ----------
    own, usual : float
        Ours, and that of naive arithmetic in the dtype of the data.
    allowed : float
        What ours may be.
    largest : float
        The largest exact result.
    """

    own: float
    usual: float
    allowed: float
    largest: float


class Promise:
    """The promise for one head: errors of at most 2 (o) or 3 times (gradients) those of naive arithmetic, plus a floor.

    Naive arithmetic has no lse that is rounded to the dtype. This rounding alone may cost gradients more than all
    errors of naive arithmetic: scores of 100, made by one column, have few other errors. For a row with one key, dP and
    delta of naive arithmetic have equal rounding errors or not, depending on how its library adds up the columns. The
    floor covers both.

    Parameters
    ----------
    inputs : tuple of ndarray
        q, k, v and do.
    causal : bool
    orders : int, optional
        The number of column orders over which the largest error of naive arithmetic is taken (`orders_of`).
    """

    def __init__(self, inputs: tuple, causal: bool, orders: int = 1):
        self._exact, self._dtype = exact_results(inputs, causal), inputs[0].dtype.name
        self._plain = []
        for order in range(orders):
            rotated = _naive(tuple(np.roll(x, 7 * order, axis=-1) for x in inputs), self._dtype, causal)
            self._plain.append({name: np.roll(x, -7 * order, axis=-1) for name, x in rotated.items()})

    def errors(self, results: Mapping[str, Any]) -> dict[str, Error]:
        """Returns the errors of any of o, dq, dk and dv."""
        errors = {}
        for name, result in results.items():
            right = self._exact[name]
            of_all = (result[0, :, 0], *(x[name] for x in self._plain))
            own, *usual = (float(abs(self._beside_exact(x) - right).max()) for x in of_all)
            factor, floor = (2, _FLOORS[self._dtype]) if name == "o" else (3, 2 * _FLOORS[self._dtype])
            lost = 0.0 if name == "o" else float(self._exact[f"lost {name}"].max())
            largest = float(abs(right).max())
            errors[name] = Error(own, max(usual), factor * max(usual) + floor * largest + lost, largest)
        return errors

    def check(self, results: Mapping[str, Any]) -> None:
        """Raises AssertionError if a result has a larger error."""
        for name, error in self.errors(results).items():
            assert error.own <= error.allowed, (name, error)

    def _beside_exact(self, x: Any) -> Any:
        return x if self._dtype == "float32" else _on_host(x)


def check_promise(inputs: tuple, results: Mapping[str, Any], causal: bool, orders: int = 1) -> None:
    """Checks results that are the only ones for their inputs, as `Promise` does."""
    Promise(inputs, causal, orders).check(results)
