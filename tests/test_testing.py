"""The rule for results: correct ones pass, and every kind of planted error fails with a helpful text."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from support.fake_timing import needs_cupy

import fa2cupy
from fa2cupy import ahead, api, closure, inspection, lengths, reference, testing
from fa2cupy.distributed import api as distributed_api
from fa2cupy.distributed import rows, simulation, totals
from fa2cupy.families import tile as tiles
from fa2cupy.testing import Expectation, assert_within_baseline, check_delta, check_gradients, make_inputs

DTYPES = ["float16", "bfloat16", "float32", "float64"]
NAMES = ["o", "lse", "dq", "dk", "dv"]


def right_results(dtype: str, **options):
    """Returns an expectation, and the best results: those of the reference, rounded to their dtypes."""
    q, k, v, do = make_inputs(dtype, seqlen_q=24, seqlen_k=40, num_heads=4, num_heads_kv=2, head_dim=16)
    expected = Expectation(q, k, v, do, **options)
    o, lse = reference.forward(q, k, v, **options)
    gradients = reference.backward(q, k, v, o, lse, do, **options)
    results = {name: a.astype(q.dtype) for name, a in zip(("o", "dq", "dk", "dv"), (o, *gradients), strict=True)}
    return expected, results | {"lse": lse.astype(expected.problem.accumulator_dtype)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_rounded_to_the_dtype_passes(dtype):
    expected, results = right_results(dtype, causal=True)
    report = expected.check(**results)
    assert set(report) == set(NAMES)
    for name, comparison in report.items():
        assert comparison.name == name
        assert 0 <= comparison.error <= comparison.allowed
        assert comparison.percent == pytest.approx(100 * comparison.error / comparison.allowed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_one_wrong_element_fails(name, dtype):
    expected, results = right_results(dtype)
    allowed = expected.check(**results)[name].allowed
    wrong = results[name].copy()
    index = (0, 1, 2) if name == "lse" else (0, 1, 0, 2)
    wrong[index] = float(wrong[index]) + 2 * allowed + 0.02 * abs(float(wrong[index]))
    with pytest.raises(AssertionError, match=rf"worst: {name}\[{', '.join(map(str, index))}\]"):
        expected.check(**{name: wrong})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_element_that_is_not_finite_fails(name, value):
    expected, results = right_results("float16")
    results[name][0, 0, 0] = value
    with pytest.raises(AssertionError, match=f"^{name}: "):
        expected.check(**results)


@pytest.mark.parametrize("name", NAMES)
def test_an_unwritten_element_fails(name):
    expected, results = right_results("bfloat16")
    (output,) = expected.unwritten(name)
    assert output.shape == results[name].shape
    assert output.dtype == results[name].dtype
    assert np.isnan(output.astype("float32")).all()
    output.flat[1:] = results[name].flat[1:]
    with pytest.raises(AssertionError, match=f"not finite: 1 NaN and 0 inf of {output.size}; in the reference 0 NaN"):
        expected.check(**{name: output})


@pytest.mark.parametrize(
    ("dtype", "factor"), [("float16", 1.02), ("bfloat16", 1.1), ("float32", 1.0001), ("float64", 1 + 1e-10)]
)
@pytest.mark.parametrize("name", ["o", "dq", "dk", "dv"])
def test_a_scaled_result_fails(name, dtype, factor):
    expected, results = right_results(dtype)
    scaled = (results[name].astype("float64") * factor).astype(results[name].dtype)
    with pytest.raises(AssertionError, match=f"^{name}: error"):
        expected.check(**{name: scaled})


@pytest.mark.parametrize(
    ("dtype", "shift"), [("float16", 2e-4), ("bfloat16", 2e-4), ("float32", 1e-4), ("float64", 1e-10)]
)
def test_a_shifted_lse_fails(dtype, shift):
    expected, results = right_results(dtype)
    results["lse"] += shift
    with pytest.raises(AssertionError, match="^lse: error"):
        expected.check(lse=results["lse"])


def test_masked_rows_must_match_in_place():
    q, k, v, do = make_inputs("float16", seqlen_q=6, seqlen_k=3, head_dim=8)
    expected = Expectation(q, k, v, do, causal=True)
    o, lse = fa2cupy.forward(q, k, v, causal=True)
    assert (lse[..., :3] == -np.inf).all()
    expected.check(o=o, lse=lse)
    for row, value in ((0, 0.0), (0, np.inf), (0, np.nan), (4, -np.inf)):
        wrong = lse.copy()
        wrong[0, 0, row] = value
        with pytest.raises(AssertionError, match=rf"worst: lse\[0, 0, {row}\] is {value:.8g} instead of"):
            expected.check(lse=wrong)


def test_nan_where_the_reference_has_nan_is_right():
    q, k, v, do = make_inputs("float32", seqlen_q=6, head_dim=8)
    q[0, 2, 1, 3] = np.nan
    expected = Expectation(q, k, v, do)
    o, _ = fa2cupy.forward(q, k, v)
    assert np.isnan(o[0, 2, 1]).all()
    assert expected.check(o=o)["o"].error < 1e-5
    with pytest.raises(AssertionError, match="8 NaN and 0 inf$"):
        expected.check(o=np.nan_to_num(o))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_large_scores_relax_lse_and_not_more(dtype):
    q, k, v, _ = make_inputs(dtype, seqlen_q=20, head_dim=64, magnitude=5)
    expected = Expectation(q, k, v)
    lse = reference.forward(q, k, v)[1].astype("float32")
    assert abs(lse).max() > 32
    assert expected.check(lse=lse + np.float32(5e-4))["lse"].allowed == 1e-3
    with pytest.raises(AssertionError, match="^lse: "):
        expected.check(lse=lse + np.float32(2e-3))


def test_a_failure_tells_all():
    expected, results = right_results("float16", causal=True)
    right = float(results["dk"][0, 7, 1, 3])
    results["dk"][0, 7, 1, 3] = 1000
    baseline_error = expected.check(dq=results["dq"])["dq"].baseline_error
    with pytest.raises(AssertionError) as failure:
        expected.check(dk=results["dk"], spec=fa2cupy.TileConfig(64, 32, 4))
    text = str(failure.value)
    assert baseline_error > 0
    assert str(expected.problem) in text
    assert "seqlen_q=24" in text
    assert "spec: 64x32, 4 warps" in text
    assert "dk[0, 7, 1, 3] is 1000 instead of" in text
    assert float(text.split("instead of ")[1].split()[0]) == pytest.approx(right, rel=1e-3)
    assert "% of the allowed" in text
    assert "the baseline's error is" in text
    assert "0 NaN and 0 inf of 1280" in text


def test_wrong_shapes_and_dtypes_fail():
    expected, results = right_results("float16")
    with pytest.raises(AssertionError, match="^o: expected float16 of shape"):
        expected.check(o=results["o"].astype("float32"))
    with pytest.raises(AssertionError, match=r"^dk: expected .* \(1, 40, 2, 16\), got float16 of \(1, 40, 2, 15\)"):
        expected.check(dk=results["dk"][..., :15])
    with pytest.raises(AssertionError, match="^lse: expected float32"):
        expected.check(lse=results["lse"].astype("float64"))


def test_the_allowed_error_follows_the_baseline():
    problem = Expectation(*make_inputs("float16", seqlen_q=2, num_heads=1, head_dim=2)).problem
    wanted = np.full((1, 2, 1, 2), 4.0)
    baseline = (wanted + 0.5).astype("float16")
    for name, factor in (("o", 2), ("dq", 3), ("dk", 3), ("dv", 3)):
        comparison = assert_within_baseline(name, wanted.astype("float16"), wanted, baseline, problem=problem)
        assert comparison.allowed == pytest.approx(factor * 0.5 + 4e-5)
        assert comparison.baseline_error == 0.5
    # An overflow of the baseline gives no bound, and excuses no error.
    baseline[0, 0, 0, 0] = np.inf
    with pytest.raises(AssertionError, match="^o: error 1.50e"):
        assert_within_baseline("o", (wanted + 1.5).astype("float16"), wanted, baseline, problem=problem)


@pytest.mark.parametrize(("dtype", "factor"), [("float16", 1.006), ("bfloat16", 1.04), ("float32", 1.00003)])
@pytest.mark.parametrize("name", ["dbias", "dsink"])
def test_gradients_of_a_bias_and_of_sinks_are_held_as_closely(name, dtype, factor):
    q, k, v, do = make_inputs(dtype, seqlen_q=24, seqlen_k=40, num_heads=4, num_heads_kv=2, head_dim=16)
    bias = np.random.default_rng(1).standard_normal((4, 1, 40)).astype(q.dtype)
    features = {"bias": bias, "sink": np.linspace(0, 3, 4, dtype="float32"), "softcap": 2.0, "causal": True}
    expected = Expectation(q, k, v, do, **features)
    o, lse = fa2cupy.forward(q, k, v, **features)
    results = fa2cupy.backward(q, k, v, o, lse, do, **features, return_dbias=True, return_dsink=True)
    named = dict(zip(("dq", "dk", "dv", "dbias", "dsink"), results, strict=True))
    expected.check(**named)
    wrong = (named[name].astype("float64") * factor).astype(named[name].dtype)
    with pytest.raises(AssertionError, match=f"^{name}: error"):
        expected.check(**{name: wrong})
    with pytest.raises(AssertionError, match=f"^{name}: expected .* got float64"):
        expected.check(**{name: named[name].astype("float64")})
    (unwritten,) = expected.unwritten(name)
    assert unwritten.shape == named[name].shape
    with pytest.raises(AssertionError, match=f"^{name}: error inf"):
        expected.check(**{name: unwritten})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_delta(dtype, layout):
    o, _, _, do = make_inputs(dtype, batch=2, seqlen_q=9, num_heads=3, head_dim=40, layout=layout)
    delta = fa2cupy.delta(o, do, layout=layout)
    assert check_delta(o, do, delta, layout=layout).percent <= 100
    delta[1, 2, 8] *= 1.001
    with pytest.raises(AssertionError, match=r"worst: delta\[1, 2, 8\]"):
        check_delta(o, do, delta, layout=layout)


def test_inputs_are_reproducible_and_as_asked():
    sizes = {"batch": 2, "seqlen_q": 3, "seqlen_k": 0, "num_heads": 4, "num_heads_kv": 1, "head_dim": 5}
    first, second = make_inputs("bfloat16", **sizes), make_inputs("bfloat16", **sizes)
    other = make_inputs("bfloat16", **sizes, seed=1)
    assert [a.shape for a in first] == [(2, 3, 4, 5), (2, 0, 1, 5), (2, 0, 1, 5), (2, 3, 4, 5)]
    assert all(a.dtype.name == "bfloat16" for a in first)
    np.testing.assert_array_equal(first[0], second[0])
    assert (first[0] != other[0]).any()
    assert make_inputs(**sizes, layout="bhsd")[0].shape == (2, 4, 3, 5)
    assert make_inputs(seqlen_q=1000, magnitude=8)[0].std() == pytest.approx(8, rel=0.05)


@pytest.mark.parametrize(
    "module",
    [
        *(testing, api, ahead, closure, lengths, tiles, distributed_api, rows, simulation, totals),
        pytest.param(inspection, marks=needs_cupy),  # it compiles
    ],
    ids=lambda module: module.__name__,
)
def test_docstring_examples(module):
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


def coarser(x: np.ndarray) -> np.ndarray:
    """Rounds bfloat16 numbers to one bit less."""
    return ((x.view("uint16") + 1) & 0xFFFE).astype("uint16").view(x.dtype)


class TestRootMeanSquare:
    """Excessive roundings that no single error shows."""

    SIZES = {"seqlen_q": 150, "seqlen_k": 170, "num_heads": 1, "head_dim": 64}

    @staticmethod
    def results(dtype: str, broken: str = "") -> tuple[Expectation, dict]:
        """Returns the results of a kernel that rounds P and dS once; `broken` is a matrix that it rounds too often."""
        inputs = make_inputs(dtype, **TestRootMeanSquare.SIZES)
        expected = Expectation(*inputs)
        q, k, v, do = (x[0, :, 0].astype("float64") for x in inputs)
        kind = inputs[0].dtype
        bfloat16 = make_inputs("bfloat16", seqlen_q=1)[0].dtype

        def rounded(name: str, x: np.ndarray) -> np.ndarray:
            if name == broken:
                x = coarser(x.astype(kind)) if dtype == "bfloat16" else x.astype(bfloat16).astype(kind)
            return x.astype(kind).astype("float64")

        s = q @ k.T / 8
        if broken == "S":
            s = s.astype(kind).astype("float64")
        p = np.exp(s - s.max(axis=1, keepdims=True))
        total = p.sum(axis=1, keepdims=True)
        o = (rounded("P", p) @ v / total).astype(kind)
        p /= total
        ds = rounded("dS", p * (do @ v.T - (do * o.astype("float64")).sum(axis=1, keepdims=True)))
        matrices = {"o": o, "dq": ds @ k / 8, "dk": ds.T @ q / 8, "dv": rounded("P", p).T @ do}
        return expected, {name: x.astype(kind)[None, :, None] for name, x in matrices.items()}

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_one_rounding_of_each_operand_passes(self, dtype):
        expected, results = self.results(dtype)
        for comparison in expected.check(**results).values():
            assert 0 < comparison.rms <= comparison.rms_allowed < np.inf

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @pytest.mark.parametrize(
        ("broken", "name"), [("P", "o"), ("P", "dv"), ("S", "o"), ("S", "dv"), ("dS", "dq"), ("dS", "dk")]
    )
    def test_another_rounding_fails(self, dtype, broken, name):
        expected, results = self.results(dtype, broken)
        with pytest.raises(
            AssertionError, match=rf"^{name}: error .*\n  (root mean square .* % of the allowed|problem)"
        ):
            expected.check(**{name: results[name]})

    def test_of_a_peaked_softmax_the_given_o_has_most_of_the_error(self):
        q, k, v, do = make_inputs("float16", seqlen_q=70, seqlen_k=330)
        q *= q.dtype.type(8)
        o, lse = fa2cupy.forward(q, k, v)
        dq, dk, _ = fa2cupy.backward(q, k, v, o, lse, do)
        comparisons = Expectation(q, k, v, do).check(dq=dq, dk=dk)
        assert {comparison.rms_allowed for comparison in comparisons.values()} == {np.inf}

    @pytest.mark.parametrize(
        "sizes",
        [
            {"seqlen_k": 63},
            {"seqlen_q": 1, "seqlen_k": 80, "num_heads": 1, "head_dim": 8},
            {"seqlen_q": 7, "head_dim": 128},
        ],
        ids=str,
    )
    def test_few_keys_errors_or_rows_have_no_bound(self, sizes):
        q, k, v, _ = make_inputs("float16", **sizes)
        o, _ = fa2cupy.forward(q, k, v)
        assert Expectation(q, k, v).check(o=o)["o"].rms_allowed == np.inf


class TestFiniteDifferences:
    """`check_gradients`, of a loss of attention with two results."""

    options = {"causal": True, "softcap": 5.0}

    def loss(self, q, k, v):
        o, lse = fa2cupy.forward(q, k, v, **self.options)
        return (o * self.weights).sum() + (lse**2).sum()

    @pytest.fixture
    def case(self) -> tuple:
        """Provides arrays and their gradients."""
        *inputs, self.weights = make_inputs(
            "float64", seqlen_q=20, seqlen_k=31, num_heads_kv=1, head_dim=8, magnitude=3
        )
        _, lse, backprop = fa2cupy.attention(*inputs, return_lse=True, **self.options)
        return tuple(inputs), backprop(self.weights, 2 * lse)

    def test_right_gradients_pass(self, case):
        errors = check_gradients(self.loss, *case)
        assert len(errors) == 3 and 0 < max(errors) < 1e-8

    @pytest.mark.parametrize("index", range(3))
    @pytest.mark.parametrize("value", (1e-4, np.nan))
    def test_one_wrong_element_fails(self, case, index, value):
        case[1][index][0, 3, 0, 2] += value * np.linalg.norm(case[1][index])
        with pytest.raises(AssertionError, match=rf"^gradients\[{index}\] differs from finite differences by "):
            check_gradients(self.loss, *case)

    def test_a_gradient_that_should_not_be_zero_fails(self, case):
        inputs, (_, *others) = case
        with pytest.raises(AssertionError, match=r"^gradients\[0\]"):
            check_gradients(self.loss, inputs, (np.zeros_like(inputs[0]), *others))

    def test_differences_are_relative_to_the_size_of_an_array(self):
        x = np.full(50, 1e8)
        assert max(check_gradients(lambda x: (x**3).sum() / 1e16, (x,), (3 * x**2 / 1e16,))) < 1e-8
        assert check_gradients(lambda x, y: (x * y).sum(), (0 * x, x), (x, 0 * x)) == [pytest.approx(0, abs=1e-8), 0]

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"gradients": ()}, ValueError, "gradients: expected 1 of them, as many as arrays, got 0"),
            (
                {"arrays": (np.ones(3, "f4"),)},
                ValueError,
                r"arrays\[0\]: finite differences are compared in float64, got f",
            ),
            ({"gradients": (np.ones(3, "f4"),)}, ValueError, r"gradients\[0\]: finite differences are compared in"),
            ({"gradients": (np.ones(4),)}, ValueError, r"gradients\[0\]: expected shape \(3,\), got \(4,\)"),
            ({"arrays": ([1.0],)}, TypeError, r"arrays\[0\]: "),
            ({"directions": 0}, ValueError, "directions: expected at least 1, got 0"),
        ],
        ids=str,
    )
    def test_bad_arguments_are_named(self, change, error, message):
        arguments = {"loss": np.sum, "arrays": (np.ones(3),), "gradients": (np.ones(3),)} | change
        with pytest.raises(error, match=f"^{message}"):
            check_gradients(**arguments)
