"""Tangents of the forward and of the backward: references against differences, NumPy against references, properties."""

from __future__ import annotations

import tracemalloc
from types import ModuleType

import numpy as np
import pytest
from support import CHECKOUT
from support.feature_cases import booleans, extras, numbers
from support.pages import python_blocks

import fa2cupy
from fa2cupy import mods, reference
from fa2cupy.cpu import second_order
from fa2cupy.numerics.second_order import SecondOrder
from fa2cupy.problem.checks import problem_from_arrays
from fa2cupy.problem.tangents import Tangents
from fa2cupy.testing import make_inputs

pytestmark = pytest.mark.filterwarnings("error")

SIZES = {"batch": 2, "seqlen_q": 5, "seqlen_k": 6, "num_heads": 2, "num_heads_kv": 1, "head_dim": 3, "head_dim_v": 2}
STEP = 1e-5
CAUSAL = mods.causal()


def curved(score, b, h, q, k, table):
    return np.sin(score) * table[h] + 0.3 * np.where(q > k, score**2, np.tanh(score))


#: Keywords by what is tested; ``"all"`` has everything that changes the formulas.
CASES = {
    "plain": {"softmax_scale": 0.9},
    "rows without keys": {"mask": np.arange(5)[:, None] % 2 == np.zeros(6)},
    "all": {
        "causal": True,
        "window": (4, 3),
        "softcap": 1.1,
        "alibi_slopes": np.array([0.4, -0.1]),
        "bias": numbers((1, 2, 5, 6), "float64"),
        "mask": booleans((2, 1, 5, 6)),
        "key_padding_mask": np.arange(6) < np.array([[6], [5]]),
        "sink": np.array([0.3, -0.5]),
        "dropout_p": 0.3,
        "seed": 5,
        "score_mod": curved,
        "score_args": (np.array([0.7, -0.4]),),
    },
    "functions": {
        "score_mod": curved,
        "score_args": (np.array([0.7, -0.4]),),
        "mask_mod": CAUSAL,
        "block_mask": fa2cupy.block_mask(CAUSAL, (), 1, 1, 5, 6, tile=(2, 2)),
    },
    "packed": {
        "cu_seqlens_q": np.array([0, 4, 4, 8], "int32"),
        "cu_seqlens_k": np.array([1, 4, 5, 8], "int32"),
        "causal": True,
        "softcap": 0.8,
        "sink": np.array([0.3, -np.inf]),
        "bias": numbers((3, 1, 1, 8), "float64"),
    },
}


class Call:
    """A call in float64 with arrays, and a direction in which all of them change."""

    def __init__(self, name: str):
        options = CASES[name]
        q, k, v, do = make_inputs("float64", **SIZES)
        if "cu_seqlens_q" in options:
            q, k, v, do = (array.reshape(-1, *array.shape[2:])[:8] for array in (q, k, v, do))
        self.changing = ("bias", "sink")
        self.options = {name: value for name, value in options.items() if name not in self.changing}
        self.switches = {name: True for name in extras(options) if name != "return_dscore_args"}
        self.arrays = {"q": q, "k": k, "v": v, "do": do}
        self.arrays["dlse"] = numbers(reference.forward(q, k, v, **options)[1].shape, "float64")
        self.arrays |= {name: options[name] for name in self.changing if name in options}

    def direction(self, seed: int) -> dict:
        """Returns an array for each of the call's."""
        return {name: numbers(array.shape, "float64", 10 * seed + len(name)) for name, array in self.arrays.items()}

    def moved(self, direction: dict, distance: float) -> dict:
        return {name: array + distance * direction[name] for name, array in self.arrays.items()}

    def keywords(self, arrays: dict) -> dict:
        return self.options | {name: arrays[name] for name in self.changing if name in arrays}

    def forward(self, arrays: dict, library: ModuleType = reference) -> tuple:
        return library.forward(arrays["q"], arrays["k"], arrays["v"], **self.keywords(arrays))

    def backward(self, arrays: dict, library: ModuleType = reference) -> tuple:
        given = (arrays[name] for name in "qkv")
        results = self.forward(arrays, library)
        keywords = self.keywords(arrays) | self.switches
        return library.backward(*given, *results, arrays["do"], dlse=arrays["dlse"], **keywords)

    def jvp(self, direction: dict, library: ModuleType = reference) -> tuple:
        """Returns ot and lset."""
        return self._jvp(direction, library)[2:]

    def _jvp(self, direction: dict, library: ModuleType) -> tuple:
        given = (*(self.arrays[name] for name in "qkv"), *(direction.get(name) for name in "qkv"))
        return library.jvp(*given, **self._tangents(direction), **self.keywords(self.arrays))

    def _tangents(self, direction: dict) -> dict:
        return {f"{name}_tangent": direction[name] for name in self.changing if name in direction}

    def backward_jvp(self, direction: dict, library: ModuleType = reference) -> tuple:
        x, keywords = self.arrays, self.keywords(self.arrays) | self.switches
        o, lse, ot, lset = self._jvp(direction, library)
        given = (x["q"], x["k"], x["v"], o, lse, x["do"], *(direction.get(name) for name in "qkv"), ot, lset)
        more = {"dot": direction.get("do"), "dlse": x["dlse"], "dlset": direction.get("dlse")}
        return library.backward_jvp(*given, **more, **self._tangents(direction), **keywords)

    def double_backward(self, direction: dict, library: ModuleType = reference) -> tuple:
        x, keywords = self.arrays, self.keywords(self.arrays) | self.switches
        given = (x["q"], x["k"], x["v"], *self.forward(x, library), x["do"], *(direction.get(name) for name in "qkv"))
        more = {f"gd{name}": direction[name] for name in self.changing if name in direction}
        return library.double_backward(*given, dlse=x["dlse"], **more, **keywords)


@pytest.fixture(params=CASES)
def call(request) -> Call:
    return Call(request.param)


def without(direction: dict, *names: str) -> dict:
    return {name: array for name, array in direction.items() if name not in names}


def assert_differences(results: tuple, after: tuple, before: tuple) -> None:
    for result, one, other in zip(results, after, before, strict=True):
        is_finite = np.isfinite(one)  # lse of rows without a key is -inf
        difference = np.where(is_finite, one, 0) - np.where(is_finite, other, 0)
        np.testing.assert_allclose(result, difference / (2 * STEP), atol=1e-8)


def test_tangents_of_the_reference_are_differences(call):
    direction = call.direction(1)
    near = [call.forward(call.moved(direction, distance)) for distance in (STEP, -STEP)]
    assert_differences(call.jvp(direction), *near)


def test_tangents_of_gradients_of_the_reference_are_differences(call):
    direction = call.direction(1)
    near = [call.backward(call.moved(direction, distance)) for distance in (STEP, -STEP)]
    assert_differences(call.backward_jvp(direction), *near)


def test_second_tangents_of_the_reference_are_differences(call):
    given = (call.arrays, call.direction(1), call.direction(2))
    arrays, moved, further = (tuple(one[name] for name in "qkv") for one in given)
    options = call.keywords(call.arrays)

    def near(distance: float) -> tuple:
        at = (x + distance * y for x, y in zip(arrays, further, strict=True))
        return reference.jvp(*at, *moved, **options)[2:]

    assert_differences(reference.second_jvp(*arrays, *moved, *further, **options), near(STEP), near(-STEP))


def test_the_double_backward_of_the_reference_is_the_gradient_of_the_backward(call):
    """Checks it by differences along a direction: of the sum of gradients, each times its cotangent."""
    cotangents, direction = without(call.direction(1), "do", "dlse"), call.direction(2)

    def total(distance: float) -> float:
        names = ("q", "k", "v", *(name for name in call.changing if name in call.arrays))
        gradients = call.backward(call.moved(direction, distance))
        return sum(float((cotangents[name] * one).sum()) for name, one in zip(names, gradients, strict=True))

    gq, gk, gv, gdo, gdlse, *more = call.double_backward(cotangents)
    named = {"q": gq, "k": gk, "v": gv, "do": gdo, "dlse": gdlse}
    named |= dict(zip((name for name in call.changing if name in call.arrays), more, strict=True))
    found = sum(float((named[name] * array).sum()) for name, array in direction.items())
    assert found == pytest.approx((total(STEP) - total(-STEP)) / (2 * STEP), abs=1e-7)


# ------------------------------------------------------------------------------------------------------- properties


def inner(results: tuple, others: tuple) -> float:
    return sum(float((one * other).sum()) for one, other in zip(results, others, strict=True))


def of_inputs(call: Call, direction: dict) -> tuple:
    """Returns the arrays of a direction in the order of the results of `backward`."""
    return tuple(array for name, array in direction.items() if name in ("q", "k", "v", *call.changing))


def test_second_derivatives_are_symmetric(call):
    """Checks <u, H w> = <w, H u> for the Hessian of <o, do> + <lse, dlse>."""
    u, w = (without(call.direction(seed), "do", "dlse") for seed in (1, 2))
    one, other = (inner(of_inputs(call, x), call.backward_jvp(y)) for x, y in ((u, w), (w, u)))
    assert one == pytest.approx(other, rel=1e-10)


def test_tangents_are_linear(call):
    u, w = call.direction(1), call.direction(2)
    both = {name: 0.5 * u[name] - 3 * w[name] for name in u}
    for function in (call.jvp, call.backward_jvp, call.double_backward):
        for one, other, sum_of_both in zip(function(u), function(w), function(both), strict=True):
            np.testing.assert_allclose(sum_of_both, 0.5 * one - 3 * other, atol=1e-10)


def test_no_tangents_and_zeros_give_exact_zeros(call):
    for direction in ({}, {name: np.zeros_like(array) for name, array in call.arrays.items()}):
        for function in (call.jvp, call.backward_jvp, call.double_backward):
            assert not any(result.any() for result in function(direction))


def test_each_missing_tangent_counts_as_zeros(call):
    for name in call.arrays:
        direction = without(call.direction(1), name)
        filled = direction | {name: np.zeros_like(call.arrays[name])}
        for function in (call.jvp, call.backward_jvp, call.double_backward):
            for one, other in zip(function(direction), function(filled), strict=True):
                np.testing.assert_allclose(one, other, atol=1e-12)


def test_the_double_backward_is_the_tangent_of_the_backward(call):
    direction = without(call.direction(1), "do", "dlse")
    gq, gk, gv, gdo, gdlse, *more = call.double_backward(direction)
    wanted = (*call.backward_jvp(direction), *call.jvp(direction))
    for one, other in zip((gq, gk, gv, *more, gdo, gdlse), wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


# ------------------------------------------------------------------------------------------------------------- NumPy


def all_results(call: Call, direction: dict, library: ModuleType) -> tuple:
    return (
        *call.jvp(direction, library),
        *call.backward_jvp(direction, library),
        *call.double_backward(without(direction, "do", "dlse"), library),
    )


def assert_reference(call: Call, direction: dict) -> None:
    for one, other in zip(all_results(call, direction, fa2cupy), all_results(call, direction, reference), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11)


def test_numpy_gives_the_numbers_of_the_reference(call):
    direction = call.direction(1)
    for given in (direction, *({name: array} for name, array in direction.items()), {}):
        assert_reference(call, given)


def test_the_closure_of_attention_has_the_three_functions(call):
    x, direction = call.arrays, call.direction(1)
    given, moved = (x["q"], x["k"], x["v"]), tuple(direction[name] for name in "qkv")
    # Options that choose kernels are those of the forward and of the backward.
    options = call.keywords(x) | call.switches | {"method": "two_pass"}
    o, lse, backprop = fa2cupy.attention(*given, **options, return_lse=True)
    tangents = {f"{name}_tangent": direction[name] for name in call.changing if name in direction}
    cotangents = {f"gd{name}": direction[name] for name in call.changing if name in direction}
    out = np.full_like(o, np.nan), np.full_like(lse, np.nan)
    ot, lset = backprop.jvp(*moved, **tangents, out=out)
    assert ot is out[0] and lset is out[1]
    found = (o, lse, ot, lset)
    found += backprop.backward_jvp(
        x["do"], *moved, ot, lset, dot=direction["do"], dlse=x["dlse"], dlset=direction["dlse"], **tangents
    )
    found += backprop.double_backward(x["do"], *moved, dlse=x["dlse"], **cotangents)
    wanted = call.forward(x, fa2cupy) + all_results(call, direction, fa2cupy)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_given_results_are_not_computed_again(call, monkeypatch):
    direction = call.direction(1)
    wanted = call._jvp(direction, fa2cupy)
    monkeypatch.setattr(second_order, "attend", None)  # cannot be called
    given = (*(call.arrays[name] for name in "qkv"), *(direction[name] for name in "qkv"))
    more = call._tangents(direction) | call.keywords(call.arrays)
    found = fa2cupy.jvp(*given, o=wanted[0], lse=wanted[1], **more)
    assert found[0] is wanted[0] and found[1] is wanted[1]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_gradients_of_arrays_of_functions_have_no_derivatives():
    call = Call("functions")
    q, k, v, do = (call.arrays[name] for name in ("q", "k", "v", "do"))
    o, lse, backprop = fa2cupy.attention(q, k, v, **call.options, return_dscore_args=True, return_lse=True)
    moved = backprop.jvp(q, k, v)
    message = "^return_dscore_args: gradients of the arrays of score functions have no second derivatives"
    with pytest.raises(fa2cupy.UnsupportedProblemError, match=message):
        backprop.backward_jvp(do, q, k, v, *moved)
    with pytest.raises(fa2cupy.UnsupportedProblemError, match=message):
        backprop.double_backward(do, q, k, v)


def test_tiles_that_do_not_divide(call, monkeypatch):
    monkeypatch.setattr(second_order, "default_tile", lambda *_, **__: (2, 4))
    assert_reference(call, call.direction(1))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_errors_are_bounded_by_those_of_the_formulas_in_the_same_precision(dtype):
    sizes = {"seqlen_q": 70, "seqlen_k": 90, "num_heads": 4, "num_heads_kv": 2, "head_dim": 24}
    q, k, v, do = make_inputs(dtype, **sizes)
    qt, kt, vt, dot = make_inputs(dtype, **sizes, seed=5)
    options = {"causal": True, "softcap": 2.0}
    o, lse, ot, lset = fa2cupy.jvp(q, k, v, qt, kt, vt, **options)
    found = (ot, *fa2cupy.backward_jvp(q, k, v, o, lse, do, qt, kt, vt, ot, lset, dot, **options))
    found += fa2cupy.double_backward(q, k, v, o, lse, do, qt, kt, vt, **options)

    def formulas(work: str, rounded) -> tuple:
        problem = problem_from_arrays(q, k, v, **options)
        naive, direction = SecondOrder(problem, options, q, work, rounded), Tangents(qt, kt, vt, None, None)
        o, lse = naive.forward(q, k, v)
        arrays = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "do": do}
        ot, lset = naive.jvp(arrays, direction)
        moved = {**arrays, "ot": ot, "lset": lset, "dot": dot}
        return ot, *naive.backward_jvp(moved, direction, {}), *naive.double_backward(arrays, direction, {})

    for result, exact, naive in zip(found, formulas("float64", "float64"), formulas("float32", q.dtype), strict=True):
        assert result.dtype == q.dtype
        error, allowed = (abs(x.astype("float64") - exact).max() for x in (result, naive))
        assert error <= 3 * allowed + 1e-5 * abs(exact).max()


@pytest.fixture(scope="module")
def recipe() -> dict:
    """Returns the names of the recipe for autograd in docs/autograd.md, without its examples."""
    pytest.importorskip("autograd")
    names = {"np": np, "fa2cupy": fa2cupy}
    blocks = [block.text for block in python_blocks("docs/autograd.md") if "@primitive" in block.text]
    assert len(blocks) == 2
    for text in blocks:
        exec(text, names)
    return names


@pytest.mark.skipif(not (CHECKOUT / "docs").is_dir(), reason="not in a checkout")
@pytest.mark.parametrize("name", CASES)
def test_the_recipe_passes_the_check_of_autograd_itself(recipe, name):
    call = Call(name)
    options = call.keywords(call.arrays)
    q, k, v = (call.arrays[name] for name in "qkv")
    is_finite = np.isfinite(fa2cupy.forward(q, k, v, **options)[1])

    def loss(q, k, v):
        o, lse = recipe["attention"](q, k, v, **options)
        lse = recipe["anp"].where(is_finite, lse, 0.0)
        return recipe["anp"].sum(recipe["anp"].sin(2 * o)) + recipe["anp"].sum(lse**2)

    np.random.seed(0)  # autograd draws directions
    recipe["check_grads"](loss, (0, 1, 2), modes=["fwd", "rev"], order=2)(q, k, v)


#: Positional arguments.
ARGUMENTS = {
    "jvp": ("q", "k", "v", "qt", "kt", "vt"),
    "backward_jvp": ("q", "k", "v", "o", "lse", "do", "qt", "kt", "vt", "ot", "lset", "dot"),
    "double_backward": ("q", "k", "v", "o", "lse", "do", "gdq", "gdk", "gdv"),
}


class TestCalls:
    """Arrays and arguments of the three functions on NumPy."""

    @pytest.fixture
    def arrays(self) -> dict:
        q, k, v, do = make_inputs("float32", seqlen_q=4, seqlen_k=6, num_heads=4, num_heads_kv=2, head_dim=8)
        qt, kt, vt, dot = make_inputs(
            "float32", seqlen_q=4, seqlen_k=6, num_heads=4, num_heads_kv=2, head_dim=8, seed=1
        )
        given = {"q": q, "k": k, "v": v, "do": do, "qt": qt, "kt": kt, "vt": vt, "dot": dot}
        given["o"], given["lse"], given["ot"], given["lset"] = fa2cupy.jvp(q, k, v, qt, kt, vt)
        return given | {"gdq": qt, "gdk": kt, "gdv": vt}

    @staticmethod
    def call(name: str, arrays: dict, **options) -> tuple:
        return getattr(fa2cupy, name)(*(arrays[one] for one in ARGUMENTS[name]), **options)

    @pytest.mark.parametrize(
        ("name", "changed", "options", "message"),
        [
            ("jvp", {"qt": np.zeros((1, 4, 4, 7), "float32")}, {}, "qt: expected shape .* to match q"),
            ("jvp", {"kt": np.zeros((1, 6, 2, 8))}, {}, "kt: expected dtype float32 to match k, got float64"),
            ("jvp", {"vt": [0.0]}, {}, "vt: expected a numpy.ndarray or cupy.ndarray, got list"),
            ("jvp", {}, {"bias_tangent": np.zeros(6, "float32")}, "bias_tangent: there is no bias; pass that"),
            (
                "jvp",
                {},
                {"sink": np.zeros(4, "float32"), "sink_tangent": np.zeros(2, "float32")},
                "sink_tangent: expected",
            ),
            ("jvp", {}, {"out": (None, None)}, r"out: expected a tuple \(o, lse, ot, lset\)"),
            (
                "jvp",
                {},
                {"o": np.zeros((1, 4, 4, 8), "float32")},
                "lse: expected .* got None; o, lse = fa2cupy.forward",
            ),
            (
                "jvp",
                {},
                {"lse": np.zeros((1, 4, 4), "float32")},
                "o: expected .* got None; o, lse = fa2cupy.forward",
            ),
            (
                "jvp",
                {},
                {"o": np.zeros((1, 4, 4, 8), "float32"), "lse": np.zeros((1, 4, 4))},
                "lse: expected dtype float32 to match q, got float64",
            ),
            (
                "jvp",
                {},
                {"o": 1, "lse": 2, "out": (np.zeros(1), None, None, None)},
                r"out \(o\): it is not written if o is given",
            ),
            ("backward_jvp", {"ot": np.zeros((1, 4, 4, 1), "float32")}, {}, "ot: expected shape .* to match o"),
            (
                "backward_jvp",
                {"ot": None},
                {},
                "ot: expected a numpy.ndarray .* got None; _, _, ot, lset = fa2cupy.jvp",
            ),
            ("backward_jvp", {"lset": np.zeros((1, 4, 4))}, {}, "lset: expected dtype float32 to match lse"),
            ("backward_jvp", {"dot": np.zeros((1, 4, 8), "float32")}, {}, "dot: expected shape .* to match o"),
            ("backward_jvp", {}, {"dlset": np.zeros((1, 4, 1), "float32")}, "dlset: expected shape .* to match lse"),
            ("backward_jvp", {}, {"return_dsink": True}, "return_dsink: there is no sink"),
            ("backward_jvp", {}, {"out": (None,)}, r"out: expected a tuple \(dqt, dkt, dvt\)"),
            ("double_backward", {"gdq": np.zeros((1, 4), "float32")}, {}, "gdq: expected shape .* to match q"),
            ("double_backward", {}, {"gdsink": np.zeros(4, "float32")}, "gdsink: there is no sink"),
            ("double_backward", {"do": None}, {}, "do: expected a numpy.ndarray .* got None"),
            ("double_backward", {}, {"return_dscore_args": True}, "unexpected keyword argument 'return_dscore_args'"),
            ("double_backward", {}, {"method": "two_pass"}, "unexpected keyword argument 'method'"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_errors_name_the_argument(self, arrays, name, changed, options, message):
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            self.call(name, arrays | changed, **options)

    def test_a_missing_argument_and_where_it_comes_from(self, arrays):
        with pytest.raises(TypeError, match=r"^qt: it is missing in jvp\(q, k, v, qt, kt, vt\): it is the tangent, or"):
            fa2cupy.jvp(arrays["q"], arrays["k"], arrays["v"])
        given = (arrays[name] for name in ARGUMENTS["backward_jvp"][:9])
        with pytest.raises(TypeError, match="^ot: it is missing in backward_jvp.* fa2cupy.jvp"):
            fa2cupy.backward_jvp(*given)

    def test_sums_that_kernels_add_in_any_order_are_not_deterministic(self, arrays):
        options = {"bias": np.zeros(6, "float32"), "return_dbias": True, "deterministic": True}
        for name in ("backward_jvp", "double_backward"):
            with pytest.raises(fa2cupy.UnsupportedProblemError, match="^return_dbias: "):
                self.call(name, arrays, **options)

    @pytest.mark.parametrize("name", ["jvp", "backward_jvp", "double_backward"])
    def test_out_has_the_results(self, arrays, name):
        wanted = self.call(name, arrays)
        out = tuple(np.full_like(one, np.nan) for one in wanted)
        found = self.call(name, arrays, out=out)
        assert all(one is given for one, given in zip(found, out, strict=True))
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, other)
        overlapping = (arrays["q"], *out[1:])
        with pytest.raises(ValueError, match=r"^out \(\w+\): overlaps "):
            self.call(name, arrays, out=overlapping)

    @pytest.mark.parametrize("name", ["jvp", "backward_jvp", "double_backward"])
    def test_layouts_and_ranks_agree(self, arrays, name):
        wanted = self.call(name, arrays, causal=True)
        swapped = {key: x.swapaxes(1, 2) if x.ndim == 4 else x for key, x in arrays.items()}
        for one, other in zip(self.call(name, swapped, causal=True, layout="bhsd"), wanted, strict=True):
            np.testing.assert_allclose(one.swapaxes(1, 2) if one.ndim == 4 else one, other, atol=1e-6)
        single = {key: x[0] for key, x in arrays.items()}
        for one, other in zip(self.call(name, single, causal=True), wanted, strict=True):
            np.testing.assert_array_equal(one, other[0])

    @pytest.mark.parametrize("name", ["backward_jvp", "double_backward"])
    def test_rows_without_keys_contribute_nothing_even_if_they_have_nan(self, arrays, name):
        few = {key: x[:, :2] if key in ("k", "v", "kt", "vt", "gdk", "gdv") else x for key, x in arrays.items()}
        inputs = (few[one] for one in ARGUMENTS["jvp"])
        few["o"], few["lse"], few["ot"], few["lset"] = fa2cupy.jvp(*inputs, causal=True)
        assert not few["ot"][:, :2].any() and not few["lset"][..., :2].any()
        wanted = self.call(name, few, causal=True)
        for key in ("q", "do", "qt", "dot", "gdq"):
            few[key] = few[key].copy()
            few[key][:, :2] = np.nan
        for one, other in zip(self.call(name, few, causal=True), wanted, strict=True):
            np.testing.assert_array_equal(one, other)

    @pytest.mark.parametrize("library", [fa2cupy, reference], ids=["numpy", "reference"])
    def test_tangents_of_a_bias_are_ignored_for_hidden_keys_even_if_they_are_nan(self, arrays, library):
        hidden = np.arange(6) > np.arange(4)[:, None] + 2
        zeros = np.zeros((4, 6), "float32")
        given = (arrays[one] for one in ARGUMENTS["jvp"])
        *_, ot, lset = library.jvp(*given, causal=True, bias=zeros, bias_tangent=np.where(hidden, np.nan, zeros))
        assert np.isfinite(ot).all() and np.isfinite(lset).all()

    @pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 3), (3, 0), (1, 1), (0, 0)])
    def test_short_sequences(self, seqlen_q, seqlen_k):
        q, k, v, do = make_inputs("float64", seqlen_q=seqlen_q, seqlen_k=seqlen_k, num_heads=1, head_dim=4)
        for library in (fa2cupy, reference):
            o, lse, ot, lset = library.jvp(q, k, v, q, k, v)
            gradients = library.backward_jvp(q, k, v, o, lse, do, q, k, v, ot, lset)
            for one, like in zip((ot, lset, *gradients), (o, lse, q, k, v), strict=True):
                assert one.shape == like.shape
                if (seqlen_q, seqlen_k) != (1, 1):
                    assert not one.any()
        if (seqlen_q, seqlen_k) == (1, 1):  # P is 1 and does not change
            np.testing.assert_allclose(ot, v, atol=1e-12)

    def test_memory_is_linear_in_the_length(self):
        q, k, v, do = make_inputs("float32", seqlen_q=4096, num_heads=1, head_dim=8)
        score_matrix = 4 * 4096**2
        tracemalloc.start()
        try:
            o, lse, ot, lset = fa2cupy.jvp(q, k, v, q, k, v, causal=True)
            fa2cupy.backward_jvp(q, k, v, o, lse, do, q, k, v, ot, lset, do, causal=True)
            fa2cupy.double_backward(q, k, v, o, lse, do, q, k, v, causal=True)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < score_matrix / 6
