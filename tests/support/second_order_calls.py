"""Calls of second order on a simulated GPU or another one, and their check against the references in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType

import ml_dtypes
import numpy as np
from support import fake_gpu
from support.fake_cupy import FakeArray, place
from support.feature_cases import accumulator, extras, numbers
from support.traced_cases import on_gpu

from fa2cupy import TileConfig, reference
from fa2cupy.families.device import DeviceInfo
from fa2cupy.numerics.second_order import SecondOrder
from fa2cupy.problem.checks import problem_from_arrays
from fa2cupy.problem.features import complete
from fa2cupy.problem.tangents import Tangents
from fa2cupy.testing import Expectation, make_inputs

#: Tiles for which a few dozen rows are several tiles: of CUDA cores, and of tensor cores for 16-bit data and float64.
TILE, TILE_16, TILE_64 = TileConfig(16, 16, 2), TileConfig(16, 16, 1, 2), TileConfig(16, 16, 1)
#: By the family whose kernels they test: the dtype of calls, and the GPU on which they have these kernels.
FAMILIES = {"simt": ("float64", "sm_100"), "sm80": ("bfloat16", "sm_80"), "sm80_float64": ("float64", "sm_90")}
PACKED = {
    "cu_seqlens_q": np.array([0, 20, 20, 37], "int32"),
    "cu_seqlens_k": np.array([1, 20, 25, 50], "int32"),
    "causal": True,
}


def curved(score, b, h, q, k, table):
    return np.sin(score) * table[h] + 0.3 * np.where(q > k, score**2, np.tanh(score))


#: Keywords with a function whose first and second derivatives are not constant.
CURVED = {"score_mod": curved, "score_args": (np.array([0.7, -0.4]),), "softcap": 0.8}


def _small_tile(dtype: str) -> TileConfig:
    if dtype in ("float16", "bfloat16"):
        return TILE_16
    return TILE_64 if dtype == "float64" and DeviceInfo.current().float64_tensor_rate > 1 else TILE


def _placed(x: object) -> object:
    return place(x) if isinstance(x, np.ndarray) and not isinstance(x, FakeArray) else x


class _Naive(SecondOrder):
    """The formulas, with products of as many rows as those of calls, which have the rows of all heads of a group."""

    first = 0  # of the terms of products, from which they are added up

    def _product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        # Of few rows, BLAS may sum in parts, with a third of the error.
        rows = np.tile(a, (self.problem.heads_per_group, 1))
        return super()._product(np.roll(rows, -self.first, axis=1), np.roll(b, -self.first, axis=0))[: len(a)]


class Call:
    """A call and a direction. Its results are compared with the reference's.

    The methods with the names of functions call these in a library, by default on the simulated GPU.
    """

    #: The number of orders of sums over which the largest error of the formulas is taken.
    orders = 1

    def __init__(
        self,
        lengths: tuple[int, int] = (21, 27),
        heads: tuple[int, int] = (2, 1),
        head_dim: int = 8,
        head_dim_v: int | None = None,
        *,
        batch: int = 1,
        dtype: str = "float64",
        tile: TileConfig | None = None,
        default_tiles: bool = False,
        **options,
    ):
        sizes = {"seqlen_q": lengths[0], "seqlen_k": lengths[1], "num_heads": heads[0], "num_heads_kv": heads[1]}
        sizes |= {"batch": batch, "head_dim": head_dim, "head_dim_v": head_dim_v}
        self.arrays = dict(zip(("q", "k", "v", "do"), make_inputs(dtype, **sizes), strict=True))
        self.direction = dict(zip(("q", "k", "v", "do"), make_inputs(dtype, **sizes, seed=5), strict=True))
        if "cu_seqlens_q" in options:
            for arrays in (self.arrays, self.direction):
                arrays |= {name: array[0] for name, array in arrays.items()}
        lse_shape = self.arrays["q"].shape[:-1]
        lse_shape = (*lse_shape[:-2], lse_shape[-1], lse_shape[-2])
        for seed, given in enumerate((self.arrays, self.direction)):
            given["dlse"] = numbers(lse_shape, accumulator(dtype), seed)
        self.options = options = self._in_precision(options, dtype)
        self.tile = None if default_tiles else tile or _small_tile(dtype)
        self.work = accumulator(dtype)
        for name in ("bias", "sink"):
            if name in options:
                self.direction[name] = numbers(options[name].shape, options[name].dtype, 3)

    @staticmethod
    def _in_precision(options: dict, dtype: str) -> dict:
        """The options with arrays of float64 in the precision of lse."""

        def cast(x: object) -> object:
            is_wide = isinstance(x, np.ndarray) and x.dtype == "float64"
            return tuple(map(cast, x)) if isinstance(x, tuple) else x.astype(accumulator(dtype)) if is_wide else x

        return {name: cast(x) for name, x in options.items()}

    def jvp(self, library: ModuleType | None = None, **more) -> tuple:
        more |= self._of_features("{}_tangent")
        return self._call("jvp", library, *self._of_qkv(self.arrays), *self._of_qkv(self.direction), **more)

    def check_jvp(self) -> None:
        self._check(self.checked_jvp(), self.jvp(reference)[2:], self.naive_jvp)

    def checked_jvp(self) -> list[np.ndarray]:
        """Checks O and lse, and returns their tangents."""
        o, lse, *tangents = map(np.asarray, self.jvp())
        Expectation(*self._of_qkv(self.arrays), **self.options).check(o=o, lse=lse)
        return tangents

    def naive_jvp(self, order: int = 0) -> tuple:
        """The tangents by the formulas in the call's precision."""
        _, naive, _ = self._naive(order)
        return naive["ot"], naive["lset"]

    def backward_jvp(self, library: ModuleType | None = None, **more) -> tuple:
        x, y = self.arrays, self.direction
        of_outputs = self._moved_outputs
        given = (*self._of_qkv(x), *of_outputs[:2], x["do"], *self._of_qkv(y), *of_outputs[2:], y.get("do"))
        more |= self._of_features("{}_tangent") | self._switches
        return self._call("backward_jvp", library, *given, **self._of_lse(more, "dlset"))

    def double_backward(self, library: ModuleType | None = None, **more) -> tuple:
        given = (*self._of_qkv(self.arrays), *self._moved_outputs[:2], self.arrays["do"])
        more = self._of_lse(more) | self._of_features("gd{}") | self._switches
        return self._call("double_backward", library, *given, *self._of_qkv(self.direction), **more)

    def check_backward_jvp(self) -> None:
        self._check(self.backward_jvp(), self.backward_jvp(reference), self.naive_backward_jvp)

    def naive_backward_jvp(self, order: int = 0) -> tuple:
        """The results of the formulas in the call's precision."""
        naive, arrays, tangents = self._naive(order)
        arrays |= dict(zip(("o", "lse", "ot", "lset"), self._moved_outputs, strict=True))
        return naive.backward_jvp(arrays, tangents, self._extra)

    def naive_double_backward(self, order: int = 0) -> tuple:
        """The results of the formulas in the call's precision."""
        naive, arrays, tangents = self._naive(order)
        arrays = {name: array for name, array in arrays.items() if name not in ("dot", "dlset")}
        arrays |= dict(zip(("o", "lse"), self._moved_outputs[:2], strict=True))
        return naive.double_backward(arrays, tangents, self._extra)

    def check_double_backward(self) -> None:
        exact = self.double_backward(reference)
        found, noise = self.double_backward(), 0.0
        if "dsink" in self._extra and self.arrays["q"].itemsize == 2:
            # dsink' = -sum(P_sink delta') + ..., and delta' = rowsum(do o') is made of the rounded result.
            eps = float(ml_dtypes.finfo(self.arrays["q"].dtype).eps) / 2
            rounding = eps * np.abs(exact[3] * self.arrays["do"].astype("float64")).sum(axis=-1)
            lse = self._moved_outputs[1]
            share = np.exp(self.options["sink"][:, None] - np.where(lse == -np.inf, np.inf, lse))
            by_heads = rounding if self.options.get("layout") == "bhsd" else rounding.swapaxes(-1, -2)
            noise = np.where(share > 0, share * by_heads, 0).sum(axis=-1).max(initial=0)
        self._check(found, exact, self.naive_double_backward, noise)

    def check_hidden_rows(self, name: str = "backward_jvp") -> None:
        """Checks that rows without a key contribute nothing, even if they have NaN: the first 8."""
        wanted = getattr(self, name)()
        for arrays in (self.arrays, self.direction):
            for one in ("q", "do"):
                arrays[one][:, :8] = np.nan
        for one, other in zip(getattr(self, name)(), wanted, strict=True):
            np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=0, atol=0)

    def check_hidden_rows_twice(self) -> None:
        """The same of `double_backward`."""
        self.check_hidden_rows("double_backward")

    @functools.cached_property
    def _moved_outputs(self) -> tuple:
        """The results of `jvp` as callers have them: of the reference, rounded."""
        dtypes = (self.arrays["q"].dtype, self.work) * 2
        return tuple(array.astype(dtype) for array, dtype in zip(self.jvp(reference), dtypes, strict=True))

    def _of_features(self, name: str) -> dict:
        return {name.format(one): self.direction[one] for one in ("bias", "sink") if one in self.direction}

    def _of_lse(self, more: dict, *names: str) -> dict:
        given = {name: self.arrays[name] for name in ("dlse",) if name in self.arrays}
        given |= {name: self.direction["dlse"] for name in names if "dlse" in self.direction}
        return given | more

    def _naive(self, order: int) -> tuple[SecondOrder, dict, Tangents]:
        """The formulas in the call's precision, or float32, and the arrays and tangents of the call."""
        options = {**self.options}
        complete(options)
        problem = problem_from_arrays(*self._of_qkv(self.arrays), **options)
        rounded = self.arrays["q"].dtype if self.arrays["q"].itemsize == 2 else "float32"
        naive = _Naive(problem, options, self.arrays["q"], "float32", rounded)
        naive.first = 7 * order
        with np.errstate(divide="ignore"):  # rows without a key
            o, lse = naive.forward(*self._of_qkv(self.arrays))
        arrays, tangents = self.arrays | {"o": o, "lse": lse}, self._tangents()
        ot, lset = naive.jvp(arrays, tangents)
        arrays |= {"ot": ot, "lset": lset, "dot": self.direction.get("do"), "dlset": self.direction.get("dlse")}
        return naive, arrays, tangents

    @property
    def _switches(self) -> dict:
        return {name: True for name in extras(self.options) if name != "return_dscore_args"}

    @property
    def _extra(self) -> dict:
        """The bias and the sink whose gradients are asked for, by the names of these."""
        return {f"d{one}": self.options[one] for one in ("bias", "sink") if f"return_d{one}" in self._switches}

    def _tangents(self) -> Tangents:
        return Tangents(*(self.direction.get(name) for name in Tangents._fields))

    @staticmethod
    def _of_qkv(arrays: dict) -> tuple:
        return tuple(arrays.get(name) for name in "qkv")

    def on_gpu(self, name: str, arrays: tuple, more: dict) -> tuple:
        """Calls a function of the GPU with the options of the call and more keywords."""
        more = {name: _placed(x) for name, x in more.items()}
        return getattr(fake_gpu, name)(*map(_placed, arrays), **on_gpu(self.options), **more, config=self.tile)

    def _call(self, name: str, library: ModuleType | None, *arrays: np.ndarray | None, **more) -> tuple:
        if library is None:
            return self.on_gpu(name, arrays, more)
        return getattr(library, name)(*arrays, **self.options, **more)

    def _check(self, results: Sequence, exact: tuple, naive: Callable[[int], tuple], noise: float = 0.0) -> None:
        """Checks tangents in float64 against exact ones, others by the errors of the formulas in their precision.

        `noise` is added to the bound of the last result: what the rounding of other results of the call may change.
        """
        results = tuple(map(np.asarray, results))
        assert {one.dtype for one in results} <= {self.arrays["q"].dtype, np.dtype(self.work)}
        if self.work == "float64":
            for one, other in zip(results, exact, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11)
            return
        # Where terms cancel, as with a single key, errors are those of sums of numbers of the size of 1.
        rounding = 1e-6 if self.arrays["q"].itemsize > 2 else 1e-5
        more = [rounding * max(abs(other).max(initial=0), 1.0) for other in exact]
        more[-1] += noise
        errors, allowed = _largest_errors(results, exact), np.zeros(len(exact))
        for order in range(self.orders):
            allowed = np.maximum(allowed, _largest_errors(naive(order), exact))
            bounds = 3 * allowed + more
            if (errors <= bounds).all():
                return
        raise AssertionError(f"errors of {errors} exceed the bounds of {bounds}")


def _largest_errors(results: tuple, exact: tuple) -> np.ndarray:
    pairs = zip(results, exact, strict=True)
    return np.array([abs(x.astype("float64") - other).max(initial=0) for x, other in pairs])


def packed_call(**options) -> Call:
    return Call((40, 52), (4, 2), **PACKED, **options)
