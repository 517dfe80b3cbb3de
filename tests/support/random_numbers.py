"""Random calls with numbers: their results, of NumPy or of a GPU, against the references in float64."""

from __future__ import annotations

import ctypes
import math
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from support.decode_cases import last_products
from support.feature_cases import gradient_names
from support.random_calls import COTANGENTS, DIRECTION, PACKED, RandomCall
from support.second_order_calls import Call
from support.traced_cases import on_gpu

import fa2cupy
from fa2cupy import UnsupportedProblemError, reference
from fa2cupy.numerics.formulas import Formulas
from fa2cupy.problem.attention import MAX_HEAD_DIM
from fa2cupy.problem.checks import problem_from_arrays
from fa2cupy.problem.features import complete
from fa2cupy.problem.keywords import ScoreKeywords
from fa2cupy.testing import Expectation

__all__ = ["NUMPY", "Backend", "NumericCall", "memory_of"]

#: Keywords that change no exact result.
SCORE_KEYWORDS = tuple(ScoreKeywords.__annotations__)
OPTIONS = ("family", "precision", "num_splits", "method", "deterministic", "config", "delta")


class Backend(NamedTuple):
    """What computes.

    Attributes
    ----------
    functions : module
    placed : callable
        Returns an array of the backend with the numbers and the strides of one of NumPy.
    fetched : callable
        Returns the array of NumPy of a result.
    """

    functions: Any
    placed: Callable[[np.ndarray], Any]
    fetched: Callable[[Any], np.ndarray]


NUMPY = Backend(fa2cupy, lambda x: x, lambda x: x)


def memory_of(x: np.ndarray) -> tuple[np.ndarray, int]:
    """Returns the bytes of an array, with those between its rows, and where its first element is."""
    ends = [(length - 1) * stride for length, stride in zip(x.shape, x.strides, strict=True)]
    before, behind = -sum(min(end, 0) for end in ends), sum(max(end, 0) for end in ends) + x.itemsize
    return np.frombuffer(ctypes.string_at(x.ctypes.data - before, before + behind), np.uint8), before


class NumericCall(RandomCall):
    """A call of few elements.

    Parameters
    ----------
    seed, operation, features, on_hopper
        As for `RandomCall`.
    variant : int, optional
        Calls that differ by it alone differ by sizes, strides and numbers, and mostly have the same kernels.

    Attributes
    ----------
    refused : bool
        Whether the backend says, naming an argument, that it does not take the call.
    """

    columns = (
        *(5, 7, 8, 16, 24, 31, 32, 40, 63), *(64,) * 3, 72, 80, 96, 100, 128, 128, 160, 192, 250, 256, 264, 320, 512
    )  # fmt: skip
    lengths = (0, 1, 2, 3, 15, 16, 17, 33, 64, 65, 70, 100, 128, 129, 150, 200, 257, 300)
    lengths_of_caches = (1, 17, 64, 100, 150, 300)
    leading = ((), (0,), (1,), (1,), (1,), (2,), (2,), (3,), (5,), (2, 3), (1, 2, 1))
    largest = 60_000
    placed = staticmethod(lambda options: options)

    def __init__(self, seed: str, operation: str, features: tuple[str, ...], *, on_hopper: bool, variant: int = 0):
        super().__init__(seed, operation, features, on_hopper=on_hopper)
        self.name = f"NumericCall({seed!r}, {operation!r}, {features!r}, on_hopper={on_hopper}, variant={variant})"
        self._of_sizes = random.Random(f"{seed} {variant}")
        self._rng = np.random.default_rng(list(f"{seed} {variant}".encode()))
        self._columns = 0
        self.refused = False
        self.draw()

    def __str__(self) -> str:
        return f"{self.name}.check()\n  {super().__str__()}"

    # ------------------------------------------------------------------------------------------- sizes and numbers

    def _draw_columns(self, decodes: bool) -> None:
        if not self._columns:
            super()._draw_columns(decodes)

    def _add_tensors(self) -> None:
        """Of packed sequences, the longest lengths are not those of the arrays."""
        super()._add_tensors()
        for side in "qk" if self._packed else ():
            longest = int(np.diff(self.arguments[f"cu_seqlens_{side}"]).max())
            total = self.arguments[side].shape[0]
            bound = self._of_sizes.choice((longest, longest, longest + 3, total, total + 5))
            self.arguments[f"max_seqlen_{side}"] = bound
            if side == "q":
                self._queries = bound
            else:
                self._keys = bound

    def _array(self, shape: tuple[int, ...], dtype: object, job: str = "") -> np.ndarray:
        dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        if job.startswith("ends"):
            return self._ends(self.arguments[job[-1]].shape[0])
        if job == "lengths":
            return self._of_caches(shape)
        if job == "pages":
            return self._rng.permutation(math.prod(shape)).astype("int32").reshape(shape)
        return self._arranged(self._numbers(shape, dtype, job))

    def _ends(self, total: int) -> np.ndarray:
        low, high = (0, total) if self._chance(0.5) else sorted(self._rng.integers(0, total + 1, 2))
        ends = np.sort(self._rng.integers(low, high + 1, PACKED + 1))
        ends[0], ends[-1] = low, high
        return ends.astype("int32")

    def _of_caches(self, shape: tuple[int, ...]) -> np.ndarray:
        return self._rng.integers(0, self._keys + 1, shape).astype("int32")

    def _numbers(self, shape: tuple[int, ...], dtype: np.dtype, job: str) -> np.ndarray:
        rng, one = self._rng, self._of_sizes.choice
        if dtype.kind == "b":
            found = rng.random(shape) < one((0.7, 0.9, 0.3, 0.02, 1.0, 0.0))
            return found & (rng.random((*shape[:-1], 1)) < one((1.0, 0.8)))
        found = rng.standard_normal(shape) * one((1, 1, 1, 1, 0.1, 2))
        if job == "slopes":
            found *= one((0.1, 0.5))
        if job in ("bias", "sink") and self._chance(0.4):
            found[rng.random(shape) < one((0.1, 0.5))] = -np.inf
            if job == "bias" and found.ndim > 1:
                found[rng.random(shape[:-1]) < 0.1] = -np.inf
        return found.astype(dtype)

    def _arranged(self, x: np.ndarray) -> np.ndarray:
        """Returns the numbers in memory of other strides, or repeated along an axis by a stride of 0."""
        if x.ndim == 0 or self._chance(0.5):
            return x
        axis = self._of_sizes.randrange(x.ndim)
        way = self._of_sizes.choice(("longer", "gapped", "reversed", "permuted", "fortran", "repeated", "read-only"))
        if way == "longer":
            wide = np.zeros((*x.shape[:-1], x.shape[-1] + self._of_sizes.choice((1, 8))), x.dtype)
            found = wide[..., : x.shape[-1]]
        elif way == "gapped":
            wide = np.zeros(tuple(2 * n if number == axis else n for number, n in enumerate(x.shape)), x.dtype)
            found = wide[(*(slice(None),) * axis, slice(None, None, 2))]
        elif way == "reversed":
            found = np.flip(np.zeros(x.shape, x.dtype), axis)
        elif way == "permuted":
            order = self._of_sizes.sample(range(x.ndim), x.ndim)
            found = np.zeros([x.shape[number] for number in order], x.dtype).transpose(np.argsort(order))
        elif way == "fortran":
            found = np.zeros(x.shape, x.dtype, order="F")
        elif way == "repeated" and x.shape[axis]:
            return np.broadcast_to(np.take(x, [0], axis), x.shape)
        else:
            x.flags.writeable = False
            return x
        found[...] = x
        return found

    def _chance(self, probability: float) -> bool:
        return self._of_sizes.random() < probability

    # ------------------------------------------------------------------------------------------ what must not be read

    def draw(self) -> None:
        """Adds the arguments, with NaN in rows of no sequence, in rows of caches behind these, and in hidden biases."""
        super().draw()
        given = self.arguments
        for name, x in given.items():
            side = "q" if name in ("do", "dot", "o", "ot") or "lse" in name or name == "delta" else name.strip("gdt")
            if self._packed and isinstance(x, np.ndarray) and side in "qkv" and name != "sink":
                first, *_, last = given[f"cu_seqlens_{'q' if side == 'q' else 'k'}"]
                rows = x.T if x.ndim == 2 else x
                _fill(rows, slice(None, first))
                _fill(rows, slice(last, None))
        if self.operation == "decode":
            self._fill_caches()
        elif given.get("bias") is not None and self._chance(0.5):
            _fill(given["bias"], self._hidden_biases())

    def _fill_caches(self) -> None:
        table = self.arguments.get("block_table")
        for name in ("k_cache", "v_cache"):
            cache = _rows_first(self.arguments[name], self._layout)
            for number, length in enumerate(self.arguments["cache_seqlens"]):
                if table is None:
                    _fill(cache, (number, slice(length, None)))
                for place, page in enumerate(() if table is None else table[number]):
                    _fill(cache, (page, slice(max(length - place * cache.shape[1], 0), None)))

    def _hidden_biases(self) -> np.ndarray:
        """Returns which elements of the bias are for keys alone that are hidden by other means."""
        score = {name: x for name, x in self.arguments.items() if name in SCORE_KEYWORDS}
        others = {name: x for name, x in score.items() if name != "bias"}
        q, k, v = (self.arguments[name] for name in "qkv")
        complete(others)
        problem = problem_from_arrays(q, k, v, **others)
        formulas = Formulas(problem, others, q, "float64", "float64")
        seen = np.zeros(problem.broadcast_shape, bool)
        for part in formulas._heads():
            rows, keys = part.sequence.seqlen_q, part.sequence.seqlen_k
            visible = formulas._visible(np.arange(rows)[:, None], np.arange(keys), part)
            seen[(*part.sequence.place, part.head)][:rows, :keys] = True if visible is None else visible
        bias = self.arguments["bias"]
        shape = (1,) * (seen.ndim - bias.ndim) + bias.shape
        axes = tuple(axis for axis, length in enumerate(shape) if length == 1)
        return ~seen.any(axis=axes, keepdims=True).reshape(bias.shape)

    # --------------------------------------------------------------------------------------------------- the check

    def check(self, backend: Backend = NUMPY) -> None:
        """Checks results by the rules of the tests of each operation."""
        given = dict(self.arguments)
        inputs = {name: given.pop(name) for name in "qkv" if name in given and self.operation != "decode"}
        try:
            with np.errstate(all="ignore"):
                if self.operation == "decode":
                    self._check_decode(backend, given)
                elif self.operation in ("forward", "backward"):
                    self._check_first_order(backend, inputs, given)
                else:
                    call = GivenCall(backend, self.operation, inputs, given)
                    call.has_bounds = self._keys > 2 or call.work == "float64"
                    call.check()
        except (TypeError, ValueError, UnsupportedProblemError) as error:
            named = re.match(r"\w+", str(error))
            if named is None or named[0] not in (*self.arguments, "family", "head_dim"):
                raise
            self.refused = True
            self.why = str(error)

    def _check_first_order(self, backend: Backend, inputs: dict, given: dict) -> None:
        options = {name: given.pop(name) for name in OPTIONS if name in given}
        switches = {name: given.pop(name) for name in tuple(given) if name.startswith("return_")}
        do, dlse = given.pop("do", None), given.pop("dlse", None)
        for name in ("o", "lse"):
            given.pop(name, None)
        expected = Expectation(*inputs.values(), do, dlse=dlse, **given)
        placed = _placed(backend, given)
        q, k, v = (backend.placed(x) for x in inputs.values())
        of_forward = {
            name: options[name] for name in ("family", "precision", "num_splits", "config") if name in options
        }
        if self.operation == "forward":
            of_forward["out"] = tuple(map(backend.placed, self._outputs(*expected.unwritten("o", "lse"))))
        o, lse = backend.functions.forward(q, k, v, **placed, **of_forward)
        expected.check(o=backend.fetched(o), lse=backend.fetched(lse))
        if self.operation == "forward":
            return
        do_placed = backend.placed(do)
        if options.pop("delta", None) is not None:
            options["delta"] = backend.functions.delta(o, do_placed, layout=given.get("layout", "bshd"))
        if dlse is not None:
            options["dlse"] = backend.placed(dlse)
        score = {name: x for name, x in given.items() if name not in ("causal", "layout", "softmax_scale")}
        names = gradient_names(score, switches)
        if self._chance(0.3):
            hidden = backend.fetched(lse) == -np.inf
            hidden_rows = hidden if given.get("layout") == "bhsd" else hidden.swapaxes(-1, -2)
            q, do_placed = (backend.placed(_filled(x, hidden_rows)) for x in (inputs["q"], do))
            if dlse is not None:
                options["dlse"] = backend.placed(_filled(dlse, hidden))
        out = tuple(map(backend.placed, self._outputs(*expected.unwritten(*names))))
        results = backend.functions.backward(q, k, v, o, lse, do_placed, **placed, **options, **switches, out=out)
        found = {name: backend.fetched(x) for name, x in zip(names, results, strict=True)}
        if q.dtype.itemsize == 2 and self._cancel(inputs, do, dlse, given):
            found = {name: x for name, x in found.items() if name == "dv"}
        expected.check(**found)

    def _cancel(self, inputs: dict, do: np.ndarray, dlse: np.ndarray | None, given: dict) -> bool:
        """True if dQ and dK are rounding errors of o alone or nearly, as of rows with one key: these have no bound."""
        if ("dropout_p" in given or "sink" in given) and self._keys < 8:
            return True
        exact = reference.forward(**inputs, **given)
        dq = reference.backward(**inputs, **dict(zip(("o", "lse"), exact, strict=True)), do=do, dlse=dlse, **given)[0]
        return abs(dq).max(initial=0) < 1e-9

    def _outputs(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """Returns arrays for results, some with other strides, whose elements have memory of their own."""
        return [x if _has_own_elements(x) else x.copy() for x in map(self._arranged, arrays)]

    def _check_decode(self, backend: Backend, given: dict) -> None:
        """Checks each sequence as a call of its own."""
        table, layout = given.get("block_table"), given["layout"]
        given["cache_seqlens"] = lengths = np.minimum(given["cache_seqlens"], self._room(given))
        options = {name: given.pop(name) for name in SCORE_KEYWORDS if name in given and name != "layout"}
        given = {name: x for name, x in given.items() if name not in OPTIONS or name == "num_splits"}
        names = [name for name in ("q", "k_cache", "v_cache", "k", "v") if name in given]
        rows = {name: _rows_first(given[name], layout).copy() for name in names}  # those of caches are written to
        o, lse = self._decoded(backend, given, options)
        for number, length in enumerate(lengths):
            own = slice(number, number + 1)
            keys, values = (
                (rows[name][own] if table is None else rows[name][table[number]].reshape(1, -1, *rows[name].shape[2:]))
                for name in ("k_cache", "v_cache")
            )
            keys, values = (
                np.concatenate([whole[:, :length], *([rows[new][own]] if new in rows else [])], axis=1)
                for whole, new in ((keys, "k"), (values, "v"))
            )
            of_one, queries = {"causal": True, **options}, rows["q"][own]
            if "alibi_slopes" in options and options["alibi_slopes"].ndim == 2:
                of_one["alibi_slopes"] = options["alibi_slopes"][own]
            if queries.shape[-1] > MAX_HEAD_DIM:  # the reference has the last products as a bias
                if "softcap" in options:
                    continue
                scale = options.get("softmax_scale", queries.shape[-1] ** -0.5)
                of_one |= {"softmax_scale": scale, "bias": last_products(queries, keys, scale)}
                queries, keys = queries[..., :MAX_HEAD_DIM], keys[..., :MAX_HEAD_DIM]
            found = {"o": _rows_first(o, layout)[own], "lse": lse[own]}
            Expectation(queries, keys, values, **of_one).check(spec=number, **found)

    def _room(self, given: dict) -> int:
        """Returns how many rows of a sequence may be in the cache before new ones."""
        new = given["k"].shape[1 if given["layout"] == "bshd" else 2] if "k" in given else 0
        table, cache = given.get("block_table"), _rows_first(given["k_cache"], given["layout"])
        capacity = cache.shape[1] * (1 if table is None else table.shape[1])
        if new > capacity:
            raise ValueError(f"k: {new} rows are more than the cache has")
        return capacity - new

    def _decoded(self, backend: Backend, given: dict, options: dict) -> tuple[np.ndarray, np.ndarray]:
        shares = np.shares_memory(given["k_cache"], given["v_cache"])
        placed = {name: backend.placed(x) if isinstance(x, np.ndarray) else x for name, x in (given | options).items()}
        if shares:
            placed["v_cache"] = placed["k_cache"][..., : given["v_cache"].shape[-1]]
        return tuple(map(backend.fetched, backend.functions.decode(**placed)))


class GivenCall(Call):
    """A call of second order with given arrays, and the check of `Call` for it."""

    orders = 8  # a result of one number, or most of whose error is by one product, has a small error in some orders

    def __init__(self, backend: Backend, operation: str, inputs: dict, given: dict):
        self.backend, self.operation = backend, operation
        names = COTANGENTS if operation == "double_backward" else DIRECTION
        of_fields = {"bias": "bias", "sink": "sink"}
        self.switches = {name: given.pop(name) for name in tuple(given) if name.startswith("return_")}
        self.switches.pop("return_dscore_args", None)
        self.direction = {of_fields.get(own, own): given.pop(name, None) for name, own in names.items()}
        self.direction |= {"do": given.pop("dot", None), "dlse": given.pop("dlset", None)}
        self.arrays = inputs | {name: given.pop(name, None) for name in ("do", "dlse")}
        for arrays in (self.arrays, self.direction):
            for name in [name for name, x in arrays.items() if x is None]:
                del arrays[name]
        self.own = {"deterministic": True} if given.pop("deterministic", False) and "backward" in operation else {}
        for name in ("o", "lse", "ot", "lset", *OPTIONS):
            given.pop(name, None)
        self.options, self.work = given, "float64" if inputs["q"].dtype == "float64" else "float32"
        self.tile = None

    def check(self) -> None:
        """Checks the results of the operation, those of `jvp` also if it is given o and lse."""
        getattr(self, f"check_{self.operation.removeprefix('output_')}")()

    @property
    def _switches(self) -> dict:
        return self.switches

    def _check(self, results: Sequence, exact: tuple, naive: Callable[[int], tuple], noise: float = 0.0) -> None:
        """Of rows that see one key, all terms cancel: only float64 has a bound for them."""
        if self.has_bounds:
            super()._check(results, exact, naive, noise)

    def on_gpu(self, name: str, arrays: tuple, more: dict) -> tuple:
        """Calls a function of the backend."""
        placed = [None if x is None else self.backend.placed(np.asarray(x)) for x in arrays]
        more = {key: self.backend.placed(x) if isinstance(x, np.ndarray) else x for key, x in more.items()}
        options = _placed(self.backend, self.options) | more | (self.own if "backward" in name else {})
        if self.operation == "output_jvp":
            of_forward = {key: x for key, x in options.items() if not key.endswith("tangent")}
            options |= zip(("o", "lse"), self.backend.functions.forward(*placed[:3], **of_forward), strict=True)
        return tuple(map(self.backend.fetched, getattr(self.backend.functions, name)(*placed, **options)))


def _has_own_elements(x: np.ndarray) -> bool:
    return x.flags.writeable and all(s or n < 2 for s, n in zip(x.strides, x.shape, strict=True))


def _fill(x: np.ndarray, index: Any) -> None:
    """Writes NaN to some elements, if each has memory of its own."""
    if _has_own_elements(x):
        x[index] = np.nan


def _filled(x: np.ndarray, index: np.ndarray) -> np.ndarray:
    found = x.copy()
    found[index] = np.nan
    return found


def _rows_first(x: np.ndarray, layout: str) -> np.ndarray:
    return x if layout == "bshd" else x.swapaxes(1, 2)


def _placed(backend: Backend, options: dict) -> dict:
    return options if backend is NUMPY else on_gpu(options, backend.placed)
