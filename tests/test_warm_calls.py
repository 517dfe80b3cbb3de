"""Warm calls: the plan that a call finds is the one that it would prepare itself, after any other call."""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cupy")

from support.fake_cupy import FakeArray, current_device, place
from support.fake_gpu import backward, decode, fake_gpu, forward
from support.feature_cases import numbers
from support.launch_record import Launch
from support.option_pairs import option_pairs
from support.strided_arrays import gapped, shifted

import fa2cupy
from fa2cupy import BlockMask, TileConfig, api, mods, second_order
from fa2cupy.families.sm90_float32 import Sm90Float32
from fa2cupy.gpu import calls as gpu_calls
from fa2cupy.gpu import prepare, signatures
from fa2cupy.problem import function_checks
from fa2cupy.problem.block_mask import MIXED
from fa2cupy.problem.features import FeatureKeywords
from fa2cupy.problem.function_checks import bound_function
from fa2cupy.system.recent import RecentlyUsed

#: As many heads as rows, so that both layouts are legal.
BATCH, ROWS, HEADS, COLUMNS = 3, 16, 16, 64
SCORES = (BATCH, HEADS, ROWS, ROWS)


class Calls:
    """A GPU that only records the launches of kernels."""

    def __init__(self, monkeypatch, device: str | tuple = "sm_90"):
        self._seen: list[tuple] = []
        self._callers: set[int] = set()
        self.context = fake_gpu(monkeypatch, device, self._launch)

    def _launch(self, launch: Launch) -> None:
        taken = {name for name, address in launch.pointers.items() if address in self._callers}
        self._seen.append((launch.stage, launch.cleared, taken, launch._per_call))

    def of(self, operation: str, arrays: dict, **options) -> list[tuple]:
        """Returns the stages of a call, the caller's arrays that each got as they are, and the form of the results."""
        self._seen.clear()
        given = [
            x for x in (*arrays.values(), *options.values(), *(options.get("out") or ())) if isinstance(x, FakeArray)
        ]
        self._callers = {x.ctypes.data for x in given}
        if operation == "forward":
            results = forward(*(arrays[name] for name in ("q", "k", "v")), **options)
        elif operation == "decode":
            results = decode(*(arrays[name] for name in DECODED), **options)
        else:
            results = backward(*(arrays[name] for name in ("q", "k", "v", "o", "lse", "do")), **options)
        return [*self._seen, [(x.shape, x.strides, x.dtype, x.device_id) for x in results]]


def moves_of(function) -> int:
    """Returns the calls of the package's Python functions in a call, without those of the fake GPU."""
    package, count = str(Path(fa2cupy.__file__).parent), 0

    def note(frame, event, _) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(package)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.fixture
def calls(monkeypatch):
    made = Calls(monkeypatch)
    with made.context:
        yield made


def arrays_of(dtype: str = "float16", wide: str = "float32") -> dict[str, FakeArray]:
    shape = (BATCH, ROWS, HEADS, COLUMNS)
    names = {"q": shape, "k": shape, "v": shape, "o": shape, "lse": (BATCH, HEADS, ROWS), "do": shape}
    return {
        name: place(numbers(shape, wide if name == "lse" else dtype, n))
        for n, (name, shape) in enumerate(names.items())
    }


def packed(arrays: dict[str, FakeArray]) -> dict[str, FakeArray]:
    return {name: place(x[0]) for name, x in arrays.items()}


OFFSETS = {f"cu_seqlens_{side}": np.array([0, 5, 9, 16], "int32") for side in "qk"}

#: Options of both calls and the two values that differ, by keyword. Both are of one type where possible.
OPTIONS = option_pairs(SCORES) | {
    "dropout_p": ({"seed": 1}, 0.5, 0.25),
    "cu_seqlens_q": (OFFSETS, OFFSETS["cu_seqlens_q"], np.array([0, 1, 5, 9, 16], "int32")),
    "cu_seqlens_k": (OFFSETS, OFFSETS["cu_seqlens_k"], np.array([0, 1, 5, 9, 16], "int32")),
    "max_seqlen_q": (OFFSETS, 8, 9),
    "max_seqlen_k": (OFFSETS, 8, 9),
}  # fmt: skip
#: Calls that do not differ: a backward reads no sink unless its gradient is asked for, and that of so few keys is
#: deterministic in any case.
SAME = (("sink", "backward"), ("deterministic", "backward"))
#: Keywords of backward alone.
OF_BACKWARD = ("method", "deterministic", "return_dbias", "return_dsink", "delta", "dlse")
CASES = [
    (name, op) for name in OPTIONS for op in ("forward", "backward") if op == "backward" or name not in OF_BACKWARD
]


def test_a_warm_call_of_second_order_makes_hardly_more_moves_than_one_of_first_order(calls, monkeypatch):
    for module in (api, second_order):
        monkeypatch.setattr(module, "backend_of", lambda name, array: gpu_calls)
    given = arrays_of("float32")
    q, k, v, o, lse, do = (given[name] for name in ("q", "k", "v", "o", "lse", "do"))
    timed = {
        "forward": lambda: fa2cupy.forward(q, k, v),
        "jvp": lambda: fa2cupy.jvp(q, k, v, q, k, v),
        "backward": lambda: fa2cupy.backward(q, k, v, o, lse, do, method="two_pass"),
        "backward_jvp": lambda: fa2cupy.backward_jvp(q, k, v, o, lse, do, q, k, v, o, lse),
    }
    for function in timed.values():
        function()
    moves = {name: moves_of(function) for name, function in timed.items()}
    assert 0 < moves["jvp"] <= moves["forward"] + 3
    assert 0 < moves["backward_jvp"] <= moves["backward"] + 4


def test_every_keyword_has_its_case():
    own = inspect.signature(fa2cupy.backward).parameters.values()
    keywords = {one.name for one in own if one.kind is one.KEYWORD_ONLY} | FeatureKeywords.__annotations__.keys()
    keywords -= {"score_args", "mask_args", "return_dscore_args", "block_mask"}  # some have tests of their own
    assert OPTIONS.keys() == keywords - {"out"}  # an array or several


def both_calls(name: str) -> tuple[dict, list[dict]]:
    """Returns the arrays, and the options of the two calls."""
    shared, *values = OPTIONS[name]
    arrays = arrays_of("float32" if name == "precision" else "float16")
    arrays = packed(arrays) if "cu_seqlens_q" in shared else arrays
    options = [{**shared, name: value} for value in values]
    if name.startswith("cu_seqlens"):  # both must be of equal length
        options[1] = dict.fromkeys(OFFSETS, values[1])
    renamed = [{"scale" if key == "softmax_scale" else key: x for key, x in given.items()} for given in options]
    return arrays, [
        {key: place(x) if isinstance(x, np.ndarray) else x for key, x in given.items()} for given in renamed
    ]


@pytest.mark.parametrize(("name", "operation"), CASES)
def test_a_call_with_another_option_does_not_take_the_plan_of_the_other(calls, name, operation, monkeypatch):
    # Without this, calls as short as these have the same plan for every precision.
    monkeypatch.setattr(Sm90Float32, "is_accurate", lambda self, problem: True)
    arrays, options = both_calls(name)
    check_each_is_itself(calls, operation, [(arrays, given) for given in options], differ=(name, operation) not in SAME)


def check_each_is_itself(calls: Calls, operation: str, both: list[tuple[dict, dict]], differ: bool = True) -> None:
    """Checks that two calls have the same plans after each other as alone, and that they `differ`."""

    def found(arrays: dict, options: dict) -> list:
        if "block_mask" in options:
            options["block_mask"].kept.clear()  # else only the first call writes lists
        return calls.of(operation, arrays, **options)

    cold = []
    for arrays, options in both:
        signatures._prepared.clear()
        cold.append(found(arrays, options))
    assert (cold[0] != cold[1]) == differ, "nothing can be told of two calls that are the same"
    for order in ((0, 1, 0, 1), (1, 0)):
        signatures._prepared.clear()
        for index in order:
            assert found(*both[index]) == cold[index]


# --------------------------------------------------------------------------------------------------------------- arrays


def all_arrays(operation: str, is_packed: bool) -> tuple[dict[str, FakeArray], dict]:
    """Returns arrays and keywords of a call, without delta: with it o is not read, and dlse is subtracted."""
    arrays = packed(arrays_of()) if is_packed else arrays_of()
    names = ("alibi_slopes", "bias", "mask", "key_padding_mask", "sink")
    options = {name: next(x for x in reversed(OPTIONS[name]) if isinstance(x, np.ndarray)) for name in names}
    if is_packed:
        options |= OFFSETS
    if operation == "backward":
        dlse = OPTIONS["dlse"][2]
        options |= {"dlse": dlse[0] if is_packed else dlse}
        results = [arrays[name] for name in ("q", "k", "v")]
    else:
        arrays = {name: arrays[name] for name in ("q", "k", "v")}
        results = [arrays["q"], np.empty(((HEADS, ROWS) if is_packed else (BATCH, HEADS, ROWS)), "float32")]
    options = {name: place(x) for name, x in options.items()}
    return arrays, options | {"out": tuple(place(np.empty_like(x)) for x in results)}


def with_one_changed(arrays: dict, options: dict, name: str, change) -> tuple[dict, dict]:
    if name.startswith("out "):
        index = int(name.split()[1])
        out = options["out"]
        return arrays, {**options, "out": (*out[:index], change(out[index]), *out[index + 1 :])}
    given = arrays if name in arrays else options
    changed = {**given, name: change(given[name])}
    return (changed, options) if name in arrays else (arrays, changed)


def array_of(arrays: dict, options: dict, name: str) -> FakeArray:
    return options["out"][int(name.split()[1])] if name.startswith("out ") else (arrays | options)[name]


def places() -> list[tuple[str, bool, str]]:
    """Returns (operation, is_packed, name) for each array of calls with a batch, and for some of packed calls."""
    found = []
    for operation in ("forward", "backward"):
        for is_packed in (False, True):
            arrays, options = all_arrays(operation, is_packed)
            names = [*arrays, *(name for name in options if name != "out")]
            names += [f"out {index}" for index in range(len(options["out"]))]
            found += [(operation, is_packed, name) for name in names if not is_packed or name in (*OFFSETS, "lse", "q")]
    return found


PLACES = places()
#: Arrays whose rows kernels may need aligned to 16 bytes; others may have any address.
TENSORS = ("q", "k", "v", "o", "do")


def is_tensor(operation: str, name: str) -> bool:
    return name in TENSORS or (name.startswith("out ") and (operation, name) != ("forward", "out 1"))


def apart(x: np.ndarray) -> FakeArray:
    """Returns x with its rows further apart, and the elements of a row side by side."""
    wide = place(np.empty((*x.shape[:-1], x.shape[-1] + 16), x.dtype))
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def half_aligned(x: np.ndarray) -> FakeArray:
    """Returns a copy that is aligned to 8 bytes, and not to 16."""
    return shifted(x, 8 // x.itemsize)


@pytest.mark.sample(change=(apart, half_aligned))
@pytest.mark.parametrize("change", (gapped, apart, shifted, half_aligned), ids=lambda change: change.__name__)
@pytest.mark.parametrize(("operation", "is_packed", "name"), PLACES)
def test_an_array_that_lies_elsewise_does_not_take_the_plan_of_the_other(calls, operation, is_packed, name, change):
    arrays, options = all_arrays(operation, is_packed)
    before = array_of(arrays, options, name)
    both = [(arrays, options), with_one_changed(arrays, options, name, change)]
    after = array_of(*both[1], name)
    moved = after.strides != before.strides or (change in (shifted, half_aligned) and is_tensor(operation, name))
    # A backward reads no sink unless its gradient is asked for.
    check_each_is_itself(calls, operation, both, differ=moved and (operation, name) != ("backward", "sink"))


OTHER_DTYPES = {"float16": "int16", "float32": "int32", "bool": "int8", "int32": "uint32"}


@pytest.mark.parametrize(("operation", "is_packed", "name"), PLACES)
def test_an_array_of_a_dtype_that_is_refused_is_refused_after_an_equal_call(calls, operation, is_packed, name):
    arrays, options = all_arrays(operation, is_packed)
    calls.of(operation, arrays, **options)
    arrays, options = with_one_changed(arrays, options, name, lambda x: x.view(OTHER_DTYPES[x.dtype.name]))
    with pytest.raises(TypeError, match="expected dtype"):
        calls.of(operation, arrays, **options)


@pytest.mark.parametrize(("operation", "is_packed", "name"), PLACES)
def test_an_array_of_a_device_that_is_refused_is_refused_after_an_equal_call(calls, operation, is_packed, name):
    arrays, options = all_arrays(operation, is_packed)
    calls.of(operation, arrays, **options)
    array_of(arrays, options, name).device_id = 1
    with pytest.raises(ValueError, match="expected an array on device"):
        calls.of(operation, arrays, **options)


def delta_of(shape: tuple[int, ...] = SCORES[:3]) -> dict[str, FakeArray]:
    return {"delta": place(numbers(shape, "float32"))}


@pytest.mark.parametrize("change", (gapped, apart), ids=lambda change: change.__name__)
def test_a_delta_that_lies_elsewise_does_not_take_the_plan_of_the_other(calls, change):
    arrays, options = arrays_of(), delta_of()
    check_each_is_itself(calls, "backward", [(arrays, options), with_one_changed(arrays, options, "delta", change)])


@pytest.mark.parametrize("name", ("delta", "dlse"))
def test_a_delta_and_a_dlse_of_two_devices_are_refused_and_not_subtracted(calls, name):
    arrays, options = arrays_of(), {**delta_of(), "dlse": delta_of()["delta"]}
    calls.of("backward", arrays, **options)
    options[name].device_id = 1
    with pytest.raises(ValueError, match=f"^{name}: expected an array on device 0 like q, got device 1"):
        calls.of("backward", arrays, **options)


@pytest.mark.parametrize(("operation", "is_packed", "name"), PLACES)
def test_an_array_of_a_shape_that_is_refused_is_refused_after_an_equal_call(calls, operation, is_packed, name):
    arrays, options = all_arrays(operation, is_packed)
    calls.of(operation, arrays, **options)
    arrays, options = with_one_changed(arrays, options, name, lambda x: x[:-1])  # keeps the strides
    with pytest.raises(ValueError, match="expected (shape|a shape|at least|.*device)|batch"):
        calls.of(operation, arrays, **options)


@pytest.mark.parametrize("operation", ("forward", "backward"))
def test_each_dtype_has_its_own_plan(calls, operation):
    """Checks dtypes with equal strides: float16 and bfloat16 have them, and the others are spaced to have them."""
    dtypes = {"float16": "float32", ml_dtypes.bfloat16: "float32", "float32": "float32", "float64": "float64"}
    given = []
    for dtype, wide in dtypes.items():
        arrays = arrays_of(dtype, wide)
        tensors = [name for name in arrays if name != "lse"]
        for name in tensors:
            step = 8 // arrays[name].itemsize
            spaced = place(np.empty((BATCH, ROWS, HEADS, COLUMNS * step), dtype))
            arrays[name] = spaced[..., :COLUMNS]
        given.append(arrays)
    assert len({arrays["q"].strides[:3] for arrays in given}) == 1
    cold = []
    for arrays in given:
        signatures._prepared.clear()
        cold.append(calls.of(operation, arrays))
    specs = [{stage.spec.dtype for stage, *_ in seen[:-1]} for seen in cold]
    assert specs == [{"float16"}, {"bfloat16"}, {"float32"}, {"float64"}]
    signatures._prepared.clear()
    for _ in range(2):
        assert [calls.of(operation, arrays) for arrays in given] == cold


@pytest.mark.parametrize("operation", ("forward", "backward"))
def test_arrays_of_another_device_have_a_plan_of_their_own(monkeypatch, operation):
    calls = Calls(monkeypatch, ("sm_90", "sm_80"))
    with calls.context:
        arrays = arrays_of()
        with current_device(1):
            others = arrays_of()
        check_each_is_itself(calls, operation, [(arrays, {}), (others, {})])


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({**OFFSETS, "max_seqlen_q": 1}, {"max_seqlen_q": True}),
        ({**OFFSETS, "max_seqlen_k": 16}, {"max_seqlen_k": 16.0}),
        ({"dropout_p": 0.5, "seed": 1}, {"seed": True}),
        ({"dropout_p": 0.5, "seed": 1}, {"seed": 1.0}),
        ({"bias": numbers(SCORES, "float16"), "return_dbias": True}, {"return_dbias": 1}),
        ({"sink": numbers((HEADS,), "float32"), "return_dsink": False}, {"return_dsink": 0}),
    ],
    ids=lambda options: ", ".join(f"{name}={x}" for name, x in options.items() if not isinstance(x, np.ndarray)),
)
def test_an_equal_number_of_a_type_that_is_refused_is_refused_after_the_call(calls, options, wrong):
    """Checks numbers beside arrays; tests/test_gpu_calls.py has those that forward takes without arrays."""
    arrays = packed(arrays_of()) if "cu_seqlens_q" in options else arrays_of()
    options = {name: place(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    for _ in range(2):
        calls.of("backward", arrays, **options)
        with pytest.raises(TypeError, match=f"^{next(iter(wrong))}: expected"):
            calls.of("backward", arrays, **(options | wrong))


def alike(**names: str) -> dict[str, FakeArray]:
    """Returns arrays by keyword that are the same in all but the keyword."""
    shapes = {"heads": (HEADS,), "scores": SCORES, "q": (BATCH, ROWS, HEADS, COLUMNS)}
    dtypes = {"heads": "float32", "scores": "float16", "q": "float16"}
    return {name: place(numbers(shapes[kind], dtypes[kind])) for name, kind in names.items()}


@pytest.mark.parametrize(
    ("operation", "one", "other"),
    [
        ("forward", alike(alibi_slopes="heads"), alike(sink="heads")),
        ("backward", alike(alibi_slopes="heads"), alike(sink="heads")),
        ("backward", {**alike(bias="scores", sink="heads"), "return_dbias": True}, {"return_dsink": True}),
        ("backward", {"out": (alike(q="q")["q"], None, None)}, {"out": (None, alike(q="q")["q"], None)}),
        ("backward", delta_of(), {"dlse": delta_of()["delta"]}),
    ],
    ids=("slopes or a sink", "slopes or a sink backward", "dbias or dsink", "dq or dk given", "delta or dlse"),
)
def test_what_an_array_is_for_is_part_of_the_call(calls, operation, one, other):
    """Checks arrays of equal shapes and dtypes that two calls use for different things."""
    if "bias" in one:
        other = {"bias": one["bias"], "sink": one["sink"], **other}
    check_each_is_itself(calls, operation, [(arrays_of(), one), (arrays_of(), other)])


def map_of(tile: tuple[int, int], shape: tuple[int, ...], function=None) -> BlockMask:
    """Returns a map of the calls' scores, of a function if there is one."""
    states = place(np.full(shape, MIXED, "uint8"))
    program = None if function is None else bound_function("mask_mod", function, ()).program
    return BlockMask.of_states(states, ROWS, ROWS, tile, program)


#: Two maps of each kind, and what calls with them have in common. The states of most have the same shape.
MAPS = {
    "queries of a tile": (map_of((8, 8), (1, 1, 2, 2)), map_of((12, 8), (1, 1, 2, 2)), {}),
    "keys of a tile": (
        map_of((8, 8), (1, 1, 2, 2), mods.causal(1)), map_of((8, 12), (1, 1, 2, 2), mods.causal(1)),
        {"mask_mod": mods.causal(1)},
    ),
    "one of a function": (
        map_of((8, 8), (1, 1, 2, 2), mods.causal(1)), map_of((8, 8), (1, 1, 2, 2)), {"mask_mod": mods.causal(1)},
    ),
    "heads": (map_of((8, 8), (1, 1, 2, 2)), map_of((8, 8), (1, HEADS, 2, 2)), {}),
    "sequences": (map_of((8, 8), (1, 1, 2, 2)), map_of((8, 8), (BATCH, 1, 2, 2)), {}),
}  # fmt: skip


@pytest.mark.parametrize("operation", ("forward", "backward"))
@pytest.mark.parametrize("case", MAPS)
def test_a_call_with_another_map_does_not_take_the_plan_of_the_other(calls, case, operation):
    *maps, shared = MAPS[case]
    arrays = arrays_of("float32")
    check_each_is_itself(calls, operation, [(arrays, {"block_mask": own, **shared}) for own in maps])


#: Arrays of functions: two of each kind. Kernels have the lengths and strides of their axes, and their dtypes.
ARGUMENTS = {
    "lengths": (numbers((4, 4), "float32"), numbers((4, 5), "float32")),
    "strides": (numbers((4, 4), "float32"), numbers((4, 8), "float32")[:, ::2]),
    "dtype": (numbers((4, 4), "float32"), numbers((4, 4), "float16")),
}


@pytest.mark.parametrize("role", ("score_mod", "mask_mod"))
@pytest.mark.parametrize("operation", ("forward", "backward"))
@pytest.mark.parametrize("case", ARGUMENTS)
def test_a_function_with_another_array_does_not_take_the_plan_of_the_other(calls, case, operation, role):
    def score_mod(score, b, h, q, k, table):
        return score + table[q % 4, k % 4]

    def mask_mod(b, h, q, k, table):
        return table[q % 4, k % 4] > 0

    function = {"score_mod": score_mod, "mask_mod": mask_mod}[role]
    options = [{role: function, role.replace("mod", "args"): (_in_place(x),)} for x in ARGUMENTS[case]]
    check_each_is_itself(calls, operation, [(arrays_of(), given) for given in options])


def _in_place(x: np.ndarray) -> FakeArray:
    """Returns a copy that keeps gaps between columns."""
    whole = place(x if x.base is None else x.base)
    return whole if x.base is None else whole[:, ::2]


# --------------------------------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize(("name", "operation"), CASES)
def test_a_call_on_copies_launches_what_the_call_on_their_originals_does(calls, name, operation):
    arrays, options = both_calls(name)
    elsewhere = {**arrays, **{name: gapped(arrays[name]) for name in ("q", "k", "v")}}
    for given in options:
        direct = [stage for stage, *_ in calls.of(operation, arrays, **given)[:-1]]
        *launches, _ = calls.of(operation, elsewhere, **given)
        assert [stage for stage, *_ in launches] == direct
        assert all(not taken & {"q", "k", "v"} for _, _, taken, _ in launches)


# ------------------------------------------------------------------------------------------- how many, and what is kept


def test_seeds_travel_with_the_call_and_prepare_nothing(calls):
    q = arrays_of()
    for seed in (1, 2**64 - 1, 0, 1):
        for operation in ("forward", "backward"):
            *stages, _ = calls.of(operation, q, dropout_p=0.5, seed=seed)
            seeds = [per_call["seed"] for *_, per_call in stages if per_call]
            assert seeds and set(seeds) == {seed}
    assert len(signatures._prepared) == 2


def test_what_is_prepared_does_not_fill_the_memory(calls, monkeypatch):
    monkeypatch.setattr(signatures, "_prepared", RecentlyUsed(3))
    arrays = arrays_of()
    for scale in range(1, 20):
        calls.of("forward", arrays, scale=scale)
        assert 1 <= len(signatures._prepared) <= 3


def test_a_dict_of_tiles_that_its_owner_changes_is_another_one(calls):
    arrays, config = arrays_of(), {"forward": TileConfig(64, 32, 4)}
    one = calls.of("forward", arrays, config=config, family="sm80")
    config["forward"] = TileConfig(64, 64, 4)
    other = calls.of("forward", arrays, config=config, family="sm80")
    assert [seen[0][0].spec.tile.b_c for seen in (one, other)] == [32, 64]


# ------------------------------------------------------------------------------------------------------------- decoding

DECODED = ("q", "k_cache", "v_cache", "cache_seqlens")
#: The options of decode, in the form of `OPTIONS`.
OF_DECODE = {
    "causal": ({}, True, False),
    "softmax_scale": ({}, 0.5, 0.25),
    "layout": ({}, "bshd", "bhsd"),
    "k": ({}, None, numbers((BATCH, 1, HEADS, COLUMNS), "float16")),
    "v": ({}, None, numbers((BATCH, 1, HEADS, COLUMNS), "float16")),
    "block_table": ({}, np.zeros((BATCH, 1), "int32"), np.zeros((BATCH, 2), "int32")),
    "window": ({}, (3, 0), (4, 0)),
    "softcap": ({}, 2.0, 3.0),
    "alibi_slopes": ({}, numbers((HEADS,), "float32"), numbers((BATCH, HEADS), "float32")),
    "sink": ({}, None, numbers((HEADS,), "float32")),
    "num_splits": ({}, None, 1),
}


def decode_arrays(dtype: str = "float16") -> dict[str, FakeArray]:
    """Returns the arrays of a decode; the cache can be used as one of pages, too."""
    shape = (BATCH, ROWS, HEADS, COLUMNS)
    arrays = {name: numbers(shape, dtype, n) for n, name in enumerate(DECODED[:3])}
    return {name: place(x) for name, x in (arrays | {"cache_seqlens": np.full(BATCH, 7, "int32")}).items()}


def all_decode_arrays() -> tuple[dict[str, FakeArray], dict]:
    """Returns the arrays of a call, and those in its keywords."""
    names = ("k", "v", "block_table", "alibi_slopes", "sink")
    options = {name: place(OF_DECODE[name][2]) for name in names}
    shapes = (BATCH, ROWS, HEADS, COLUMNS), (BATCH, HEADS, ROWS)
    out = tuple(place(numbers(shape, dtype)) for shape, dtype in zip(shapes, ("float16", "float32"), strict=True))
    return decode_arrays(), options | {"out": out}


DECODE_PLACES = (*DECODED, "k", "v", "block_table", "alibi_slopes", "sink", "out 0", "out 1")


def test_every_keyword_of_decode_has_its_case():
    own = inspect.signature(fa2cupy.decode).parameters.values()
    assert OF_DECODE.keys() == {one.name for one in own if one.kind is one.KEYWORD_ONLY} - {"out"}


@pytest.mark.parametrize("name", [name for name in OF_DECODE if name not in ("k", "v")])
def test_a_decode_with_another_option_does_not_take_the_plan_of_the_other(calls, name):
    _, *values = OF_DECODE[name]
    keyword = "scale" if name == "softmax_scale" else name
    both = [{keyword: place(x) if isinstance(x, np.ndarray) else x} for x in values]
    check_each_is_itself(calls, "decode", [(decode_arrays(), given) for given in both])


def test_a_decode_with_a_table_or_new_rows_does_not_take_the_plan_of_one_without(calls):
    arrays, options = all_decode_arrays()
    rows = {name: options[name] for name in ("k", "v")}
    two = {name: place(numbers((BATCH, 2, HEADS, COLUMNS), "float16")) for name in rows}
    table = {"block_table": options["block_table"]}
    for one, other in (({}, rows), (rows, two), ({}, table), (rows, rows | table)):
        check_each_is_itself(calls, "decode", [(arrays, one), (arrays, other)])


@pytest.mark.parametrize("name", ("k", "v"))
def test_rows_for_one_cache_only_are_refused_after_a_call_with_both(calls, name):
    arrays, options = decode_arrays(), {key: place(OF_DECODE[key][2]) for key in ("k", "v")}
    calls.of("decode", arrays, **options)
    with pytest.raises(ValueError, match=f"^{name}: rows are appended to both caches"):
        calls.of("decode", arrays, **(options | {name: None}))


def test_slopes_are_not_taken_for_a_sink_of_the_same_shape(calls):
    check_each_is_itself(
        calls, "decode", [(decode_arrays(), alike(alibi_slopes="heads")), (decode_arrays(), alike(sink="heads"))]
    )


@pytest.mark.parametrize("given", ((True, False), (False, True), (True, True)), ids=("o", "lse", "both"))
def test_a_decode_into_the_callers_arrays_does_not_take_the_plan_of_one_that_allocates(calls, given):
    arrays, options = all_decode_arrays()
    out = tuple(x if is_given else None for x, is_given in zip(options["out"], given, strict=True))
    check_each_is_itself(calls, "decode", [(arrays, {}), (arrays, {"out": out})])


@pytest.mark.sample(change=(apart, half_aligned))
@pytest.mark.parametrize("change", (gapped, apart, shifted, half_aligned), ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", [name for name in DECODE_PLACES if not name.endswith("_cache")])
def test_an_array_of_decode_that_lies_elsewise_does_not_take_the_plan_of_the_other(calls, name, change):
    arrays, options = all_decode_arrays()
    before = array_of(arrays, options, name)
    both = [(arrays, options), with_one_changed(arrays, options, name, change)]
    after = array_of(*both[1], name)
    moved = after.strides != before.strides or (change in (shifted, half_aligned) and name in ("q", "k", "v", "out 0"))
    check_each_is_itself(calls, "decode", both, differ=moved)


@pytest.mark.parametrize("name", ("k_cache", "v_cache"))
def test_a_cache_that_lies_elsewise_does_not_take_the_plan_of_the_other(calls, name):
    arrays = decode_arrays()
    check_each_is_itself(calls, "decode", [(arrays, {}), (arrays | {name: apart(arrays[name])}, {})])
    for change in (gapped, shifted, half_aligned):
        with pytest.raises(ValueError, match=f"^{name}: expected contiguous rows that start on 16 bytes"):
            calls.of("decode", arrays | {name: change(arrays[name])})


@pytest.mark.parametrize("name", DECODE_PLACES)
def test_an_array_of_decode_that_is_refused_is_refused_after_an_equal_call(calls, name):
    changes = (
        (lambda x: x.view(OTHER_DTYPES[x.dtype.name]), TypeError, "expected dtype"),
        (lambda x: x[:-1], ValueError, "expected (shape|a shape)"),  # keeps the strides
    )
    for change, error, text in changes:
        arrays, options = all_decode_arrays()
        calls.of("decode", arrays, **options)
        arrays, options = with_one_changed(arrays, options, name, change)
        with pytest.raises(error, match=text):
            calls.of("decode", arrays, **options)
    arrays, options = all_decode_arrays()
    calls.of("decode", arrays, **options)
    array_of(arrays, options, name).device_id = 1
    with pytest.raises(ValueError, match="expected an array on device"):
        calls.of("decode", arrays, **options)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"causal": True}, {"causal": 1}),
        ({"scale": 1.0}, {"scale": True}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"window": (1, 0)}, {"window": (True, False)}),
        ({"window": (1, 0)}, {"window": (1.0, 0)}),
    ],
    ids=str,
)
def test_an_equal_number_of_a_type_that_decode_refuses_is_refused_after_the_call(calls, options, wrong):
    name = next(iter(wrong)).replace("scale", "softmax_scale")
    for _ in range(2):
        calls.of("decode", decode_arrays(), **options)
        with pytest.raises(TypeError, match=f"^{name}"):
            calls.of("decode", decode_arrays(), **wrong)


def test_each_dtype_of_decode_has_its_own_plan(calls):
    cold = []
    given = [decode_arrays(dtype) for dtype in ("float16", ml_dtypes.bfloat16)]  # equal strides
    for arrays in given:
        signatures._prepared.clear()
        cold.append(calls.of("decode", arrays))
    assert [seen[0][0].spec.dtype for seen in cold] == ["float16", "bfloat16"]
    for order in ((0, 1, 0, 1), (1, 0)):
        signatures._prepared.clear()
        assert [calls.of("decode", given[index]) for index in order] == [cold[index] for index in order]


def test_a_decode_on_another_device_has_a_plan_of_its_own(monkeypatch):
    calls = Calls(monkeypatch, ("sm_90", "sm_80"))
    with calls.context:
        arrays = decode_arrays()
        with current_device(1):
            others = decode_arrays()
        check_each_is_itself(calls, "decode", [(arrays, {}), (others, {})])


def test_lengths_and_arrays_of_the_same_layout_prepare_nothing(calls):
    for length in range(ROWS):
        arrays = decode_arrays()
        arrays["cache_seqlens"][...] = length
        calls.of("decode", arrays)
    assert len(signatures._prepared) == 1


@pytest.mark.parametrize(
    "keywords",
    ({}, {"causal": False, "softmax_scale": 0.5}, {"window": (5, 0), "softcap": 2.0}, {"out": "both"}),
    ids=("plain", "options", "features", "out"),
)
def test_a_warm_decode_prepares_nothing_and_allocates_results_and_one_workspace(calls, monkeypatch, keywords):
    """Checks the whole call, from the public function on."""
    monkeypatch.setattr(api, "backend_of", lambda name, array: gpu_calls)
    arrays, out = decode_arrays(), all_decode_arrays()[1]["out"]
    keywords = {"out": out} if "out" in keywords else keywords
    first = fa2cupy.decode(*arrays.values(), **keywords)
    monkeypatch.setattr(signatures, "prepare", None)  # cannot be called
    cupy, made = prepare.cupy, []
    original = FakeArray.__new__
    monkeypatch.setattr(FakeArray, "__new__", lambda *given: made.append(given) or original(*given))
    for stream in (0, 77, 0):
        monkeypatch.setattr(cupy, "stream", stream)
        made.clear(), cupy.workspaces.clear(), cupy.launches.clear()
        results = fa2cupy.decode(*arrays.values(), **keywords)
        assert cupy.launches == [(0, stream)]
        assert len(cupy.workspaces) == 1 and len(made) == (0 if "out" in keywords else 2)
        assert all((x is y) == ("out" in keywords) for x, y in zip(results, first, strict=True))


def test_a_captured_decode_takes_the_graphs_workspace_and_returns_memory_of_the_caller(calls, monkeypatch):
    cupy, arrays = prepare.cupy, decode_arrays()
    calls.of("decode", arrays)
    monkeypatch.setattr(cupy, "stream", 77)
    monkeypatch.setattr(cupy, "capturing", {77})
    cupy.workspaces.clear()
    results = decode(*arrays.values())
    assert [allocator for allocator, *_ in cupy.workspaces] == ["graph"]
    assert {x.allocator for x in results} == {"pool"} and len(signatures._prepared) == 1


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"score_args": None}, TypeError, "^score_args: expected a tuple of arrays, got NoneType"),
        (
            {"score_args": "rows"},
            TypeError,
            r"^score_args: expected a tuple of arrays, got FakeArray; write score_args=",
        ),
        ({"score_mod": None}, ValueError, "^score_args: there is no score_mod"),
        ({"score_mod": None, "score_args": 3}, TypeError, "^score_args: expected a tuple of arrays, got int"),
        ({"score_args": ()}, TypeError, "^score_mod: expected a function of 5 parameters"),
        ({"score_args": "complex"}, TypeError, r"^score_args\[0\]: expected bools, ints, or floats"),
        ({"score_args": "empty"}, ValueError, r"^score_args\[0\]: expected at least one element, got shape \(0,\)"),
    ],
)
def test_functions_that_are_known_refuse_what_new_ones_do(calls, options, kind, match):
    def function(score, b, h, q, k, slopes):
        return score - slopes[h]

    arrays = arrays_of()
    legal = {"score_mod": function, "score_args": (place(numbers((HEADS,), "float32")),)}
    given = {
        "rows": place(numbers((1, HEADS), "float32")),  # each row alone would be legal
        "complex": (place(np.zeros(HEADS, "complex64")),),
        "empty": (place(np.zeros(0, "float32")),),
    }
    wrong = {name: given[x] if isinstance(x, str) else x for name, x in options.items()}
    for _ in range(2):
        calls.of("forward", arrays, **legal)
        with pytest.raises(kind, match=match):
            calls.of("forward", arrays, **(legal | wrong))


def test_a_warm_call_looks_for_no_program_and_keeps_no_function_alive(calls, monkeypatch, small_heap):
    def doubled(score, b, h, q, k):
        return 2 * score

    arrays = arrays_of()
    first = calls.of("forward", arrays, score_mod=doubled)
    monkeypatch.setattr(function_checks, "program_of", None)  # cannot be called
    assert calls.of("forward", arrays, score_mod=doubled) == first
    alive = weakref.ref(doubled)
    del doubled
    gc.collect()
    assert alive() is None


def test_functions_that_cannot_be_hashed_are_traced_by_each_call_and_share_a_prepared_one(calls):
    class Scaled:
        __hash__ = None

        def __call__(self, score, b, h, q, k):
            return 2 * score

    arrays = arrays_of()
    first = calls.of("forward", arrays, score_mod=Scaled())
    assert calls.of("forward", arrays, score_mod=Scaled()) == first
    assert len(signatures._prepared) == 1
