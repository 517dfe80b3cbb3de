"""Options of the public functions: each reaches the backend, under its own name."""

from __future__ import annotations

import inspect
import types

import numpy as np
import pytest
from support.feature_cases import METHODS, inputs_of, numbers, run

import fa2cupy
from fa2cupy import api, closure
from fa2cupy.cpu import calls as cpu
from fa2cupy.problem.options import CallOptions, call_options
from fa2cupy.testing import make_inputs


def keywords_of(function) -> set[str]:
    """Returns the keywords of a function."""
    parameters = inspect.signature(function).parameters.values()
    return {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}


class Spy:
    """A function that is called with whatever arguments it gets, and keeps them by name."""

    def __init__(self, function, result):
        self._signature, self._result = inspect.signature(function), result
        self.arguments: dict[str, object] = {}

    def __call__(self, *args, **kwargs):
        bound = self._signature.bind(*args, **kwargs).arguments
        keywords = bound.pop("keywords", None) or {}
        assert not bound.keys() & keywords.keys()
        self.arguments = {**bound, **keywords}
        return self._result


# ----------------------------------------------------------------------------------------- from attention to the others


class Option:
    """A value that no other keyword has."""

    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return f"the {self.name} of the call"


@pytest.fixture
def both(monkeypatch) -> dict[str, Spy]:
    """Replaces the functions that attention calls with spies, and returns the spies."""
    spies = {"forward": Spy(api.forward, ("the o", "the lse")), "backward": Spy(api.backward, "the gradients")}
    for name, spy in spies.items():
        monkeypatch.setattr(closure, name, spy)
    return spies


#: Keywords that attention itself evaluates.
SWITCHES = ("return_dbias", "return_dsink", "return_dscore_args", "return_lse")


@pytest.mark.parametrize("return_lse", (False, True))
@pytest.mark.parametrize("value", (False, True))
def test_attention_hands_every_keyword_on(both, value, return_lse):
    options = {name: Option(name) for name in keywords_of(closure.attention) if name not in SWITCHES}
    options |= {"return_dbias": value, "return_dsink": value, "return_dscore_args": False}  # True would need arrays
    options |= {"method": "two_pass", "deterministic": value}
    o, *lse, backprop = closure.attention("q", "k", "v", **options, return_lse=return_lse)
    assert (o, lse) == ("the o", ["the lse"] if return_lse else [])
    of_forward, of_backward = keywords_of(api.forward) - {"out"}, keywords_of(api.backward) - {"out", "delta", "dlse"}
    assert options.keys() == of_forward | of_backward, "a keyword that attention does not have, or has for itself"
    assert both["forward"].arguments == {"q": "q", "k": "k", "v": "v", **{n: options[n] for n in of_forward}}
    for call, given in (
        (lambda: backprop("do"), {"dlse": None, "out": None}),
        (lambda: backprop("do", "dlse"), {"dlse": "dlse", "out": None}),
        (lambda: backprop("do", dlse="x", out="the results"), {"dlse": "x", "out": "the results"}),
    ):
        assert call() == "the gradients"
        arrays = {"q": "q", "k": "k", "v": "v", "o": "the o", "lse": "the lse", "do": "do", **given}
        assert both["backward"].arguments == {**arrays, **{n: options[n] for n in of_backward}}


def test_backprop_writes_gradients_into_views_of_a_packed_array():
    q, k, v, do = inputs_of("float32")
    _, backprop = fa2cupy.attention(q, k, k, return_dsink=True, sink=numbers((q.shape[2],), "float32"))
    wanted = backprop(do)
    dkv = np.full((*k.shape[:2], 2, *k.shape[2:]), np.nan, "float32")
    given = (None, dkv[:, :, 0], dkv[:, :, 1], np.full(q.shape[2], np.nan, "float32"))
    found = backprop(do, out=given)
    for x, y, z in zip(found, wanted, given, strict=True):
        np.testing.assert_array_equal(x, y)
        assert z is None or x is z
    with pytest.raises(ValueError, match="^out \\(dv\\): overlaps out \\(dk\\) in memory"):
        backprop(do, out=(None, dkv[:, :, 0], dkv[:, :, 0], None))


@pytest.mark.parametrize(
    ("options", "text"),
    (
        ({"method": "three_pass"}, "method: expected None, 'single_pass', 'two_pass' or 'one_tile', got 'three_pass'"),
        ({"deterministic": 1}, "deterministic: expected a bool"),
        ({"method": "single_pass", "deterministic": True}, "method: 'single_pass' adds atomically"),
    ),
)
def test_attention_refuses_options_of_the_backward_before_the_forward_runs(both, options, text):
    with pytest.raises((TypeError, ValueError), match=text):
        closure.attention("q", "k", "v", **options)
    assert not both["forward"].arguments


def test_attention_checks_an_option_that_equals_a_legal_one(both):
    closure.attention("q", "k", "v", deterministic=True)
    with pytest.raises(TypeError, match="deterministic: expected a bool, got int"):
        closure.attention("q", "k", "v", deterministic=1)


@pytest.mark.parametrize(
    "function", (closure.attention, api.forward, api.backward), ids=lambda function: function.__name__
)
def test_a_keyword_that_the_functions_share_has_the_same_default_in_each(function):
    for one in inspect.signature(function).parameters.values():
        for other in (api.forward, api.backward):
            shared = inspect.signature(other).parameters.get(one.name)
            assert shared is None or shared.default == one.default, one.name


# ------------------------------------------------------------------------------- from the public functions to a backend


@pytest.mark.parametrize("operation", ("forward", "delta", "backward"))
def test_the_backends_are_called_with_every_argument_under_its_name(operation, monkeypatch):
    public = getattr(api, operation)
    spy = Spy(getattr(cpu, operation), "the results")
    monkeypatch.setattr(api, "backend_of", lambda name, array: types.SimpleNamespace(**{operation: spy}))
    arrays = [
        name for name, one in inspect.signature(public).parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    options = {name: Option(name) for name in keywords_of(public)}
    assert public(*arrays, **options) == "the results"
    wanted = {**{name: name for name in arrays}, **options}
    if operation == "backward":
        wanted["given_delta"] = wanted.pop("delta")
    given = spy.arguments.pop("options")
    assert given == CallOptions(**{name: options[name] for name in CallOptions._fields if name in options})
    assert spy.arguments == {name: x for name, x in wanted.items() if name not in CallOptions._fields}


@pytest.mark.parametrize(("one", "other"), [(True, 1), (False, 0), (1.0, 1), (0.5, np.float64(0.5))], ids=str)
def test_options_are_equal_only_if_their_types_are(one, other):
    for make in (CallOptions, call_options):
        assert one == other and len({make(causal=one), make(causal=other), make(causal=one)}) == 2
        assert make(causal=one) == make(causal=one) != make(causal=other)
        assert make(causal=one)._replace(causal=other) == make(causal=other)


def test_equal_options_are_one_object_unless_they_cannot_be_hashed():
    one = call_options(causal=True, softmax_scale=0.5)
    assert one is call_options(softmax_scale=0.5, layout="bshd", causal=True)
    assert one is not call_options(causal=True, softmax_scale=0.25)
    unhashable = call_options(causal=[True], layout="bhsd")
    assert unhashable == CallOptions([True], layout="bhsd")
    with pytest.raises(TypeError, match="misspelt"):
        call_options(misspelt=True)


@pytest.mark.parametrize("operation", ("forward", "delta", "backward"))
def test_the_backends_take_the_same_arguments_in_the_same_order(operation):
    pytest.importorskip("cupy")
    from fa2cupy.gpu import calls as gpu

    mine, other = (list(inspect.signature(getattr(module, operation)).parameters) for module in (cpu, gpu))
    assert mine == other


# ------------------------------------------------------------------------------- gradients of a bias, deterministically

SIZES = {"batch": 2, "seqlen_q": 5, "seqlen_k": 7, "num_heads": 4, "num_heads_kv": 2, "head_dim": 16}
FULL = (2, 4, 5, 7)
BROADCAST = [
    (1, 4, 5, 7), (2, 1, 5, 7), (2, 4, 1, 7), (2, 4, 5, 1), (4, 5, 7), (5, 7), (7,), (1, 1, 1, 1), (),
]  # fmt: skip


@pytest.fixture
def launched(monkeypatch):
    """Yields the launched stages; their kernels do nothing."""
    pytest.importorskip("cupy")
    from support.fake_gpu import fake_gpu

    with fake_gpu(monkeypatch, run=lambda launch: None) as stages:
        yield stages


def gradients(dtype: str, shape: tuple[int, ...], sizes: dict = SIZES, **options) -> tuple:
    from support.fake_cupy import place
    from support.fake_gpu import backward

    q, k, v, do = (place(x) for x in make_inputs(dtype, **sizes))
    lse = place(np.zeros((sizes["batch"], sizes["num_heads"], sizes["seqlen_q"]), "float32"))
    if "cu_seqlens_q" in options:
        (q, k, v, do), lse = (place(x[0]) for x in (q, k, v, do)), place(lse[0])
        options = {name: place(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    return backward(q, k, v, do, lse, do, bias=place(numbers(shape, dtype)), return_dbias=True, **options)


@pytest.mark.parametrize("family", ("simt", "sm80", "sm90"))
@pytest.mark.parametrize("shape", BROADCAST, ids=str)
def test_a_gradient_that_is_summed_has_a_kernel_of_its_own_where_it_must_not_vary(launched, family, shape):
    dtype = "float32" if family == "simt" else "float16"
    assert gradients(dtype, shape, family=family, deterministic=True)[3].shape == shape
    writing = [stage.spec.operation for stage in launched if "dbias" in stage.spec.features]
    assert writing in (["dbias"], ["dbias", "sum_dbias"])
    launched.clear()
    assert gradients(dtype, shape, family=family)[3].shape == shape
    assert not any("dbias" in stage.spec.operation for stage in launched)


@pytest.mark.parametrize("family", ("simt", "sm80", "sm90"))
def test_a_gradient_of_which_each_element_is_one_scores_is_not_refused(launched, family):
    dtype = "float32" if family == "simt" else "float16"
    gradients(dtype, FULL, family=family, deterministic=True)
    for axis, name in enumerate(("batch", "num_heads", "seqlen_q", "seqlen_k")):
        for length in (0, 1):
            sizes = SIZES | {name: length} | ({"num_heads_kv": length} if name == "num_heads" else {})
            shape = (*FULL[:axis], length, *FULL[axis + 1 :])
            # Hopper's kernels take no empty array: calls with one fall back.
            gradients(dtype, shape, sizes, family=family if length else None, deterministic=True)
    assert all(stage.spec.operation != "backward" or family == "simt" for stage in launched)


def test_of_packed_sequences_each_has_a_gradient_of_its_own(launched):
    offsets = {f"cu_seqlens_{side}": np.array([0, 2, n], "int32") for side, n in (("q", 5), ("k", 7))}
    longest = {"max_seqlen_q": 3, "max_seqlen_k": 5}
    sizes = SIZES | {"batch": 1}
    gradients("float16", (2, 4, 3, 5), sizes, **offsets, **longest, deterministic=True)
    assert not any("dbias" in stage.spec.operation for stage in launched)
    for shape in ((1, 4, 3, 5), (2, 4, 1, 5), (2, 4, 3, 1), (4, 3, 5)):
        gradients("float16", shape, sizes, **offsets, **longest, deterministic=True)
        assert "dbias" in launched[-1].spec.operation


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", BROADCAST[:4], ids=str)
def test_numpy_sums_in_one_order(shape, method):
    inputs = inputs_of("float32", **SIZES)
    bias = numbers(shape, "float32")
    results = run(inputs, bias=bias, method=method)
    o, lse = fa2cupy.forward(*inputs[:3], bias=bias)
    again = fa2cupy.backward(*inputs[:3], o, lse, inputs[3], bias=bias, method=method, return_dbias=True)
    np.testing.assert_array_equal(again[3], results["dbias"])
    if method == "two_pass":
        how = {"bias": bias, "deterministic": True, "return_dbias": True, "family": "sm90"}
        np.testing.assert_array_equal(fa2cupy.backward(*inputs[:3], o, lse, inputs[3], **how)[3], results["dbias"])
