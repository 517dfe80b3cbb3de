"""Functions whose numbers change between calls, and functions that are made anew for each call."""

from __future__ import annotations

import functools
import gc
import math
import sys
import threading
import types

import numpy as np
import pytest
from support.fake_cupy import place
from support.fake_gpu import fake_gpu, forward

import fa2cupy
from fa2cupy import api, mods
from fa2cupy import distributed as dist
from fa2cupy.functions import tracing
from fa2cupy.functions.state import state_of
from fa2cupy.functions.tracing import ArgumentKind, trace
from fa2cupy.gpu import calls as gpu_calls
from fa2cupy.gpu import signatures
from fa2cupy.problem.function_checks import program_of
from fa2cupy.system.recent import RecentlyUsed
from fa2cupy.testing import make_inputs

CASES = {}
FACTOR = 1.0
SETTINGS = types.ModuleType("settings")
HOLDER = types.SimpleNamespace()


def case(make):
    """Adds a case: a function that multiplies scores by a number, and what sets the number."""
    CASES[make.__name__] = make
    return make


def of_a_global(score, b, h, q, k):
    return score * FACTOR


def set_global(factor):
    global FACTOR
    FACTOR = factor


def helper(score):
    return of_a_global(score, 0, 0, 0, 0)


@case
def module_global():
    return of_a_global, set_global


@case
def global_of_a_helper():
    return (lambda score, b, h, q, k: helper(score)), set_global


@case
def global_of_an_inner_function():
    def function(score, b, h, q, k):
        return next(x * y for x, y in [(score, FACTOR)])

    return function, set_global


@case
def closure():
    factor = 1.0

    def function(score, b, h, q, k):
        return score * factor

    def change(new):
        nonlocal factor
        factor = new

    return function, change


@case
def helper_in_a_closure():
    function, change = closure()
    return (lambda *given: function(*given)), change


class Layer:
    shared = 1.0

    def __init__(self):
        self.factor = 1.0

    def change(self, factor):
        self.factor = factor

    def score(self, score, b, h, q, k):
        return score * self.factor

    __call__ = score

    def of_class(self, score, b, h, q, k):
        return score * self.shared

    @classmethod
    def change_class(cls, factor):
        cls.shared = factor

    @classmethod
    def class_score(cls, score, b, h, q, k):
        return score * cls.shared

    @staticmethod
    def static_score(score, b, h, q, k):
        return score * Layer.shared


class EqualLayer(Layer):
    def __eq__(self, other):
        return isinstance(other, EqualLayer)

    def __hash__(self):
        return 1


@case
def bound_method():
    layer = Layer()
    return layer.score, layer.change


@case
def callable_object():
    layer = Layer()
    return layer, layer.change


@case
def callable_objects_that_are_equal():
    layers = [EqualLayer(), EqualLayer()]

    def function(score, b, h, q, k):
        return layers[0](score, b, h, q, k)

    def change(factor):
        layers.reverse()
        layers[0].factor = factor

    return function, change


@case
def attribute_of_a_class():
    Layer.shared = 1.0
    return Layer().of_class, Layer.change_class


@case
def class_method():
    Layer.shared = 1.0
    return Layer.class_score, Layer.change_class


@case
def static_method():
    Layer.shared = 1.0
    return Layer.static_score, Layer.change_class


@case
def partial_of_a_list():
    numbers = [1.0]
    function = functools.partial(lambda numbers, score, b, h, q, k: score * numbers[0], numbers)
    return function, lambda factor: numbers.__setitem__(0, factor)


@case
def partial_of_a_global():
    return functools.partial(lambda unused, *given: of_a_global(*given), 0), set_global


@case
def wrapped():
    return functools.wraps(of_a_global)(lambda *given: of_a_global(*given)), set_global


@case
def element_of_a_list():
    numbers = [1.0]
    return (lambda score, b, h, q, k: score * numbers[0]), lambda factor: numbers.__setitem__(0, factor)


@case
def element_of_nested_containers():
    numbers = {"scores": ([1.0],)}
    change = lambda factor: numbers["scores"][0].__setitem__(0, factor)  # noqa: E731
    return (lambda score, b, h, q, k: score * numbers["scores"][0][0]), change


@case
def value_of_a_dict():
    numbers = {"factor": 1.0}
    return (lambda score, b, h, q, k: score * numbers["factor"]), lambda factor: numbers.update(factor=factor)


@case
def number_of_numpy():
    function, change = closure()
    return function, lambda factor: change(np.float32(factor))


@case
def array_without_axes():
    number = np.array(1.0)
    return (lambda score, b, h, q, k: score * number), lambda factor: number.fill(factor)


@case
def attribute_of_an_object():
    HOLDER.factor = 1.0
    return (lambda score, b, h, q, k: score * HOLDER.factor), lambda factor: setattr(HOLDER, "factor", factor)


@case
def attribute_of_a_module():
    SETTINGS.factor = 1.0
    return (lambda score, b, h, q, k: score * SETTINGS.factor), lambda factor: setattr(SETTINGS, "factor", factor)


@case
def attribute_of_a_function():
    def function(score, b, h, q, k):
        return score * function.factor

    function.factor = 1.0
    return function, lambda factor: setattr(function, "factor", factor)


@case
def globals_by_their_dict():
    return (lambda score, b, h, q, k: score * of_a_global.__globals__["FACTOR"]), set_global


@case
def imported_within():
    sys.modules["settings_of_a_test"] = SETTINGS
    SETTINGS.factor = 1.0

    def function(score, b, h, q, k):
        from settings_of_a_test import factor

        return score * factor

    return function, lambda factor: setattr(SETTINGS, "factor", factor)


@case
def default():
    def function(score, b, h, q, k, factor=1.0):
        return score * factor

    return function, lambda factor: setattr(function, "__defaults__", (factor,))


@case
def keyword_default():
    def function(score, b, h, q, k, *, factor=1.0):
        return score * factor

    return function, lambda factor: function.__kwdefaults__.update(factor=factor)


@case
def mutable_default():
    def function(score, b, h, q, k, numbers=[1.0]):  # noqa: B006
        return score * numbers[0]

    return function, lambda factor: function.__defaults__[0].__setitem__(0, factor)


@case
def code():
    def function(score, b, h, q, k):
        return score * 1.0

    def change(factor):
        source = f"def function(score, b, h, q, k):\n    return score * {factor!r}"
        made = {}
        exec(source, made)
        function.__code__ = made["function"].__code__

    return function, change


@case
def iterator():
    numbers = [1.0]
    return (lambda score, b, h, q, k: score * next(iter(numbers))), lambda factor: numbers.__setitem__(0, factor)


@case
def another_helper():
    one = lambda score: score * 1.0  # noqa: E731

    def function(score, b, h, q, k):
        return one(score)

    def change(factor):
        nonlocal one
        one = lambda score: score * factor  # noqa: E731

    return function, change


SHAPES = {"batch": 1, "seqlen_q": 5, "seqlen_k": 6, "num_heads": 2, "head_dim": 8}
OLD, NEW = 1.0, 50.0


def check_each_call_has_the_number_of_its_time(name: str, kept: bool, run) -> None:
    """`run(function)` returns what a call gives, and a function that gives its gradients."""

    def plain(factor):
        return run(lambda score, b, h, q, k: score * factor)

    (o_old, old), (o_new, new) = plain(OLD), plain(NEW)
    gradients_old, gradients_new = old(), new()
    assert o_old != o_new and gradients_old != gradients_new
    function, change = CASES[name]()
    change(OLD)
    o, backprop = run(function)
    assert o == o_old
    if not kept:
        del backprop
        gc.collect()
    change(NEW)
    o, after = run(function)
    assert o == o_new
    assert after() == gradients_new
    if kept:
        assert backprop() == gradients_old, "the gradient is that of another call"
    change(OLD)
    assert run(function)[0] == o_old


@pytest.mark.usefixtures("small_heap")
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_changed_number_counts_on_numpy(name, kept):
    q, k, v, do = make_inputs("float32", **SHAPES)

    def run(function):
        o, backprop = fa2cupy.attention(q, k, v, score_mod=function)
        return o.tobytes(), lambda: [x.tobytes() for x in backprop(do)]

    check_each_call_has_the_number_of_its_time(name, kept, run)


@pytest.mark.usefixtures("small_heap")
@pytest.mark.sample(name=("bound_method", "helper_in_a_closure", "element_of_nested_containers"))
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_changed_number_counts_on_the_gpu(monkeypatch, name, kept):
    q, k, v, do = map(place, make_inputs("float32", **SHAPES))
    monkeypatch.setattr(api, "backend_of", lambda name, array: gpu_calls)
    with fake_gpu(monkeypatch, "sm_80", run=lambda launch: None) as launched:

        def specs(call, *given):
            launched.clear()
            result = call(*given)
            return result, [stage.spec for stage in launched]  # with their programs

        def run(function):
            (_, backprop), found = specs(lambda: fa2cupy.attention(q, k, v, score_mod=function))
            return found, lambda: specs(backprop, do)[1]

        check_each_call_has_the_number_of_its_time(name, kept, run)


@pytest.mark.parametrize("name", CASES)
def test_a_changed_number_counts_for_masks(name):
    function, change = CASES[name]()

    def text() -> str:
        return trace("mask_mod", lambda b, h, q, k: function(q, b, h, q, k) > 3 * k, ()).text

    change(OLD)
    first = text()
    change(NEW)
    assert text() != first
    change(OLD)
    assert text() == first


def test_a_map_of_a_function_that_has_changed_is_refused():
    layer = Layer()
    layer.mask = types.MethodType(lambda self, b, h, q, k: q - k < self.factor, layer)
    q, k, v, _ = make_inputs("float32", **SHAPES)
    sparse = fa2cupy.block_mask(layer.mask, (), 1, 2, 5, 6, tile=(2, 2))
    fa2cupy.forward(q, k, v, mask_mod=layer.mask, block_mask=sparse)
    layer.factor = 2.0
    with pytest.raises(ValueError, match="the map was made from another function than mask_mod"):
        fa2cupy.forward(q, k, v, mask_mod=layer.mask, block_mask=sparse)


@pytest.mark.parametrize("scheme", ["heads", "gather"])
def test_a_changed_number_counts_on_several_ranks(scheme):
    inputs = make_inputs("float64", **SHAPES | {"seqlen_q": 8, "seqlen_k": 8})

    def work(comm):
        q, k, v, do = (comm_part(comm, x) for x in inputs)

        def run(function):
            o, backprop = dist.attention(comm, q, k, v, scheme=scheme, score_mod=function)
            return o, lambda: backprop(do)

        layer = Layer()
        layer.score = types.MethodType(lambda self, s, b, h, q, k: s * self.factor + h * q, layer)
        results = []
        for factor in (OLD, NEW):
            layer.factor = factor
            o, backprop = run(layer.score)
            wanted, gradients = run(lambda s, b, h, q, k: s * factor + h * q)
            np.testing.assert_array_equal(o, wanted)
            results += zip(backprop(), gradients(), strict=True)
            layer.factor = 3.0
            results += zip(backprop(), gradients(), strict=True)
        for found, expected in results:
            np.testing.assert_array_equal(found, expected)

    dist.simulate(2, work, timeout=20)


def comm_part(comm, array):
    """Returns a rank's half of the rows."""
    rows = array.shape[1] // comm.size
    return array[:, comm.rank * rows : (comm.rank + 1) * rows].copy()


# ----------------------------------------------------------------------------------------------------------- the states


@pytest.mark.parametrize(
    ("one", "other"), [(0.0, -0.0), (True, 1), (1, 1.0), (np.float32(1), np.float64(1)), (1, "1"), ((1,), [1])]
)
def test_values_that_are_equal_but_compute_differently_have_different_states(one, other):
    def made(x):
        return lambda score, b, h, q, k: (score, x)

    assert state_of(made(one)) != state_of(made(other))
    assert state_of(made(one)) == state_of(made(one)) is not None


def written_with_much(score, b, h, q, k, t):
    """Uses what functions have: keywords, comprehensions, inner functions, loops, conditions on numbers, indices."""

    def inner(x, *, factor=2.0):
        return x * factor if FACTOR > 0 else x

    total = score
    for number in range(len([1, 2])):
        total = total + inner(score, factor=1.5) * sum([n * 0.5 for n in (1, 2)]) + t[h, number]
    near, (lowest, highest) = abs(q - k) < 3, (0, 7)
    return np.where(near, np.clip(total, a_min=lowest, a_max=highest), max(lowest, highest) * math.pi + np.inf)


@pytest.mark.parametrize(
    "function",
    [written_with_much, helper, mods.t5_relative(), mods.document, mods.neighborhood_2d(7, 2), mods.softcap(3.0)],
)
def test_plain_functions_have_a_state(function):
    assert state_of(function) == state_of(function) is not None


def test_dicts_of_the_same_shape_have_different_states():
    def made(first, second):
        numbers, others = {"a": first, "b": [first]}, {"a": second, "b": [second]}
        return lambda score, b, h, q, k: score * numbers["a"] * others["b"][0]

    states = {state_of(made(x, y)) for x in (1.0, 2.0, 3) for y in (1.0, 2.0, 3)}
    assert len(states) == 9 and None not in states


def test_a_long_list_has_no_state_and_is_not_compared_at_each_call():
    def made(numbers):
        return lambda score, b, h, q, k: score * numbers[0]

    assert state_of(made([1.0] * 4096)) == state_of(made([1.0] * 4096)) is not None
    assert state_of(made([1.0] * 4097)) is None


def test_functions_that_call_each_other_have_a_state():
    def even(score, n):
        return score if n == 0 else odd(score, n - 1)

    def odd(score, n):
        return -even(score, n - 1)

    function = lambda score, b, h, q, k: even(score, 3) + odd(score, 1)  # noqa: E731
    assert state_of(function) == state_of(function) is not None


@pytest.mark.parametrize("function", [Layer(), Layer().score, functools.partial(of_a_global, 0), Layer.class_score])
def test_objects_and_methods_have_no_state(function):
    assert state_of(function) is None


def test_a_deep_container_or_a_circle_has_no_state():
    numbers: list = []
    numbers.append(numbers)
    deep: tuple = ()
    for _ in range(10_000):
        deep = (deep,)
    circle = lambda score, b, h, q, k: (score, numbers)  # noqa: E731
    assert state_of(circle) == state_of(circle)
    assert state_of(lambda score, b, h, q, k: (score, deep)) is None


def test_a_function_that_changes_while_it_is_traced_is_traced_again():
    count = 0

    def function(score, b, h, q, k):
        nonlocal count
        count += 1
        return score * count

    texts = [trace("score_mod", function, ()).text for _ in range(3)]
    assert len(set(texts)) == 3


# ----------------------------------------------------------------------------------------- functions that are made anew


def test_functions_made_anew_are_prepared_once_and_evict_nothing(monkeypatch):
    q, k, v, _ = map(place, make_inputs("float16", **SHAPES))
    traced = []
    original = tracing._traced
    monkeypatch.setattr(tracing, "_traced", lambda *given: traced.append(1) or original(*given))
    with fake_gpu(monkeypatch, "sm_80", run=lambda launch: None) as launched:
        forward(q, k, v)
        plain = signatures._prepared._entries.copy()
        for number in range(5000):
            cap = 20 + number // 2500  # a lambda in the loop of a caller
            forward(q, k, v, score_mod=lambda score, b, h, q, k: cap * np.tanh(score / cap + (q > k)))
        assert len(traced) == 2
        for _ in range(100):
            forward(q, k, v, score_mod=Layer().score)
        assert len(traced) == 102
        assert len(signatures._prepared) == 1 + 2 * 2 + 1  # by the state and by the program; methods have no state
        assert plain.items() <= signatures._prepared._entries.items()
        assert len({stage.spec for stage in launched}) == 4


def test_functions_that_are_traced_anew_share_programs():
    T = (ArgumentKind(1, "float"),)
    layer = Layer()
    layer.bias = lambda score, b, h, q, k, t: score + t[h] * layer.factor
    bound = types.MethodType(lambda self, *given: self.bias(*given), layer)
    first = trace("score_mod", bound, T)
    assert trace("score_mod", bound, T) is first
    layer.factor = 2.0
    assert trace("score_mod", bound, T) != first
    assert trace("score_mod", bound, (ArgumentKind(2, "float"),)[:0] or T) != first


def test_prepared_calls_are_evicted_one_at_a_time(monkeypatch):
    q, k, v, _ = map(place, make_inputs("float16", **SHAPES))
    with fake_gpu(monkeypatch, "sm_80", run=lambda launch: None):
        monkeypatch.setattr(signatures, "_prepared", RecentlyUsed(8))
        forward(q, k, v)
        (used,) = signatures._prepared._entries
        for number in range(1, 60):
            forward(q, k, v, scale=float(number))
            forward(q, k, v)
            assert len(signatures._prepared) == min(number + 1, 8)
            assert used in signatures._prepared._entries


def test_the_entry_that_was_not_used_for_longest_makes_room():
    cache: RecentlyUsed = RecentlyUsed(3)
    for key in "abc":
        assert cache.put(key, key.upper()) == key.upper()
    assert cache.put("a", "other") == "A"
    assert cache.get("a") == "A"
    cache.put("d", "D")
    assert [cache.get(key) for key in "abcd"] == ["A", None, "C", "D"]
    cache.put("e", "E")  # all have been read: the oldest goes
    assert len(cache) == 3 and cache.get("e") == "E"
    cache.clear()
    assert len(cache) == 0 and cache.get("e") is None


def test_threads_share_a_cache():
    cache: RecentlyUsed = RecentlyUsed(16)
    wrong = []

    def use(first: int) -> None:
        for number in range(first, first + 3000):
            key = number * 7919 % 64
            found = cache.get(key)
            if found is None:
                found = cache.put(key, key)
            if found != key or len(cache) > 16:
                wrong.append((key, found))

    threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong


# ------------------------------------------------------------------------------------------------- checks of each call


class Elsewhere:
    """The part of ``cupy.ndarray`` that checks use; no ndarray of NumPy."""

    def __init__(self, shape, dtype="float32"):
        self.shape, self.dtype, self.ndim = shape, np.dtype(dtype), len(shape)


@pytest.mark.parametrize(
    ("arrays", "kind", "match"),
    [
        (((3, 4), (3, 5)), ValueError, r"^score_args\[1\]: expected a last axis of 4 like score_args\[0\], got 5"),
        (((3, 257), (3, 257)), ValueError, r"^score_args\[0\]: vectors of up to 256 elements are summed, got 257"),
        (((3, 4), (4,)), TypeError, r"np.dot is of two vectors"),
    ],
)
def test_arrays_of_a_later_call_are_checked_on_every_library(monkeypatch, arrays, kind, match):
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(ndarray=Elsewhere))

    def function(score, b, h, q, k, x, y):
        return score + np.dot(x[h], y[h])

    for _ in range(2):
        assert program_of("score_mod", function, [Elsewhere((3, 4)), Elsewhere((3, 4))]).loops == [(0, 1)]
        assert program_of("score_mod", function, [Elsewhere((3, 256)), Elsewhere((2, 256))]).loops == [(0, 1)]
        with pytest.raises(kind, match=match):
            program_of("score_mod", function, [Elsewhere(shape) for shape in arrays])
        with pytest.raises(TypeError, match=r"score_args\[1\]: expected bools, ints, or floats"):
            program_of("score_mod", function, [Elsewhere((3, 4)), Elsewhere((3, 4), "complex64")])
