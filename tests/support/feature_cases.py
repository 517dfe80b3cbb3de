"""Arguments of every feature for given sizes, and one check of a whole call against the reference."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

import fa2cupy
from fa2cupy import TileConfig, reference
from fa2cupy.problem.feature_checks import extra_gradients
from fa2cupy.problem.function_checks import floating_arguments
from fa2cupy.testing import Expectation, make_inputs

METHODS = ("single_pass", "two_pass")
#: head_dim of q and of v: models', each the wider and padded on chip or not, and one much wider than the other.
HEAD_DIM_PAIRS = ((192, 128), (64, 128), (128, 64), (40, 72), (96, 64), (256, 128), (136, 8), (8, 136))
SIZES = {"batch": 2, "seqlen_q": 37, "seqlen_k": 53, "num_heads": 4, "num_heads_kv": 2, "head_dim": 16}


def accumulator(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def numbers(shape: tuple, dtype: str, seed: int = 7) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal(shape)
    return drawn.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def booleans(shape: tuple, seed: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).random(shape) < 0.7


def check_extreme_biases(call: Callable[..., tuple], q, k, v, bias: np.ndarray, **options) -> None:
    """Calls a forward with rows of a bias of bfloat16 that are infinite, or the lowest or highest finite number.

    Such rows have it for all keys, or for some. The first 30 rows and 91 keys are written to.
    """
    highest = float(ml_dtypes.finfo("bfloat16").max)
    bias[..., 3, :], bias[..., 5, :], bias[..., 6, :90], bias[..., 9, ::2] = -highest, -np.inf, -highest, -np.inf
    bias[..., 9, 1::2], bias[..., 12, :], bias[..., 27, [2, 90]] = -highest, highest, highest
    bias[..., 28, [2, 90]], bias[..., 29, 1] = np.inf, np.inf
    with np.errstate(invalid="ignore"):
        expected = reference.forward(q, k, v, bias=bias, **options)
    o, lse = (np.asarray(x, float) for x in call(q, k, v, bias=bias, **options))
    np.testing.assert_allclose(o, np.asarray(expected[0], float), atol=0.02)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-2, atol=1e-3)


def options_of(name: str, dtype: str, sizes: dict) -> dict:
    """Returns the keywords of one of the `ROWS`; `sizes` as for `make_inputs`."""
    batch, heads, rows, keys = sizes["batch"], sizes["num_heads"], sizes["seqlen_q"], sizes["seqlen_k"]
    wide = accumulator(dtype)
    padding = np.arange(keys) < np.array([keys - 5 - 3 * b for b in range(batch)])[:, None]
    return {
        "causal": lambda: {"causal": True},
        "window": lambda: {"window": (9, 4)},
        "window left": lambda: {"window": (7, None)},
        "window right": lambda: {"window": (None, 3)},
        "softcap": lambda: {"softcap": 0.8},
        "softcap large": lambda: {"softcap": 1e6},
        "alibi": lambda: {"alibi_slopes": np.linspace(0.4, -0.1, heads).astype(wide)},
        "alibi by batch": lambda: {"alibi_slopes": numbers((batch, heads), wide)},
        "bias": lambda: {"bias": numbers((batch, heads, rows, keys), dtype)},
        "bias of heads": lambda: {"bias": numbers((heads, rows, keys), wide)},
        "bias of keys": lambda: {"bias": numbers((batch, 1, 1, keys), dtype)},
        "bias of one row": lambda: {"bias": numbers((keys,), wide)},
        "bias of queries": lambda: {"bias": numbers((1, heads, rows, 1), dtype)},
        "mask": lambda: {"mask": booleans((batch, heads, rows, keys))},
        "mask of rows": lambda: {"mask": booleans((batch, 1, rows, keys))},
        "mask of whole rows": lambda: {"mask": np.arange(rows)[:, None] % 7 != np.full(keys, 2)},
        "padding": lambda: {"key_padding_mask": padding},
        "sink": lambda: {"sink": numbers((heads,), wide)},
        "sink of one head": lambda: {"sink": np.where(np.arange(heads) == 0, -np.inf, 0.5).astype(wide)},
        "dropout": lambda: {"dropout_p": 0.3, "seed": 0x123456789ABCDEF0},
    }[name]()


ROWS = (
    "causal", "window", "window left", "window right", "softcap", "softcap large", "alibi", "alibi by batch", "bias",
    "bias of heads", "bias of keys", "bias of one row", "bias of queries", "mask", "mask of rows", "padding", "sink",
    "dropout",
)  # fmt: skip


def keyword(name: str) -> str:
    """Returns the first word of a row's name, which two rows must not share to be combined."""
    return name.split()[0]


def extras(options: dict) -> dict:
    """Returns the switches of all gradients other than dq, dk and dv."""
    found = {f"return_d{name}": True for name in ("bias", "sink") if options.get(name) is not None}
    if options.get("score_mod") is not None and floating_arguments(options):
        found["return_dscore_args"] = True
    return found


def gradient_names(options: dict, switches: dict | None = None) -> tuple[str, ...]:
    """Returns the names of all results of `backward`; `switches` are those of `extras` that are on, by default all."""
    off = {f"return_d{name}": False for name in ("bias", "sink", "score_args")}
    return ("dq", "dk", "dv", *extra_gradients(options, **off | (extras(options) if switches is None else switches)))


def run(inputs: tuple, *, dlse=None, method: str | None = None, config: TileConfig | None = None, **options) -> dict:
    """Returns all results of a call by name, each written into an array of NaN."""
    q, k, v, do = inputs
    expected = Expectation(q, k, v, do, dlse=dlse, **options)
    more = extras(options)
    names = gradient_names(options)
    o, lse = fa2cupy.forward(q, k, v, **options, config=config, out=expected.unwritten("o", "lse"))
    gradients = fa2cupy.backward(
        q, k, v, o, lse, do, **options, **more, dlse=dlse, method=method, config=config, out=expected.unwritten(*names)
    )
    return {"o": o, "lse": lse, **dict(zip(names, gradients, strict=True))}


def check(inputs: tuple, *, dlse=None, config: TileConfig | None = None, **options) -> None:
    """Checks forward and both backward methods against the reference."""
    expected = Expectation(*inputs, dlse=dlse, **options)
    for method in METHODS:
        results = run(inputs, dlse=dlse, method=method, config=config, **options)
        expected.check(**results, spec=(method, config))


def inputs_of(dtype: str = "float64", **sizes) -> tuple:
    return make_inputs(dtype, **(SIZES | sizes))


def assert_bits_equal(results: dict, others: dict) -> None:
    assert results.keys() == others.keys()
    for name, result in results.items():
        np.testing.assert_array_equal(result, others[name], err_msg=name)


def assert_close(results: dict, others: dict, tolerance: float = 1e-12) -> None:
    assert results.keys() == others.keys()
    for name, result in results.items():
        np.testing.assert_allclose(result, others[name], rtol=tolerance, atol=tolerance, err_msg=name)
