"""Bad input: the right exception, a text that names the argument, and nothing written."""

from __future__ import annotations

import fractions

import numpy as np
import pytest

import fa2cupy
from fa2cupy import TileConfig, UnsupportedProblemError, reference
from fa2cupy.problem.attention import AttentionProblem
from fa2cupy.problem.checks import problem_from_arrays
from fa2cupy.testing import make_inputs

SIZES = {"batch": 2, "seqlen_q": 6, "seqlen_k": 9, "num_heads": 4, "num_heads_kv": 2, "head_dim": 8}
SENTINEL = 7
READS = {"forward": ("q", "k", "v"), "delta": ("o", "do"), "backward": ("q", "k", "v", "o", "lse", "do")}


class OnlyDlpack:
    def __dlpack__(self):
        raise RuntimeError("not to be called")


def arguments(dtype: str = "float32") -> dict:
    """Returns legal arrays for `backward`; `forward` and `delta` take some of them."""
    q, k, v, do = make_inputs(dtype, **SIZES)
    o, lse = fa2cupy.forward(q, k, v)
    return {"q": q, "k": k, "v": v, "o": o, "lse": lse, "do": do}


def call(operation: str, tensors: dict, out, **options):
    function = getattr(fa2cupy, operation)
    arrays = [tensors[name] for name in READS[operation]]
    return function(*arrays, out=out[0] if operation == "delta" else out, **options)


def outputs(operation: str, tensors: dict) -> tuple[np.ndarray, ...]:
    names = {"forward": ("q", "lse"), "delta": ("lse",), "backward": ("q", "k", "v")}[operation]
    return tuple(np.full_like(tensors[name], SENTINEL) for name in names)


def assert_refused(operation: str, error: type, match: str, options: dict | None = None, **changed) -> None:
    """Checks that the call raises exactly this error and does not write to its outputs."""
    tensors = arguments()
    out = outputs(operation, tensors)
    call(operation, tensors, out)  # the same call without the mistake is legal
    assert not any((array == SENTINEL).any() for array in out)
    out = outputs(operation, tensors)
    with pytest.raises(error, match=match) as raised:
        call(operation, tensors | changed, out, **(options or {}))
    assert raised.type is error
    assert all((array == SENTINEL).all() for array in out)


def zeros(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.zeros(shape, dtype)


# Wrong values of the tensor named first, and the error.
WRONG_TENSORS = {
    "q rank 1": (zeros(8), ValueError, r"^q: expected 2 or more axes .* got shape \(8,\)"),
    "q rank 5": (zeros(1, 2, 6, 4, 8), ValueError, r"^(k|do): expected (5 axes like q|shape \(1, 2, 6, 4, 8\))"),
    "q integer": (zeros(2, 6, 4, 8, dtype="int32"), TypeError, r"^q: expected dtype float16, .* got int32"),
    "q complex": (zeros(2, 6, 4, 8, dtype="complex64"), TypeError, r"^q: expected dtype .* got complex64"),
    "q no columns": (zeros(2, 6, 4, 0), ValueError, r"^q: head_dim must be at least 1"),
    "q other batch": (zeros(3, 6, 4, 8), ValueError, r"^k: expected shape \(3, .*seqlen_k.*, 8\) to match q"),
    "q heads no multiple": (zeros(2, 6, 5, 8), ValueError, r"^k: the number of heads of q \(5\) must be a multiple"),
    "q fewer heads": (zeros(2, 6, 1, 8), ValueError, r"^k: the number of heads of q \(1\) must be a multiple"),
    "k rank": (zeros(9, 2, 8), ValueError, r"^k: expected 4 axes like q, got shape \(9, 2, 8\)"),
    "k dtype": (zeros(2, 9, 2, 8, dtype="float16"), TypeError, r"^k: expected dtype float32 .* got float16"),
    "k head_dim": (zeros(2, 9, 2, 4), ValueError, r"^k: expected shape .* got \(2, 9, 2, 4\)"),
    "k no heads": (zeros(2, 9, 0, 8), ValueError, r"^v: expected shape|^k: expected at least one head"),
    "k transposed": (zeros(2, 2, 9, 8), ValueError, r"^v: expected shape|^k: the number of heads"),
    "v length": (zeros(2, 8, 2, 8), ValueError, r"^v: expected shape \(2, 9, 2, 8\) .* got \(2, 8, 2, 8\)"),
    "v heads": (zeros(2, 9, 1, 8), ValueError, r"^v: expected shape \(2, 9, 2, 8\) .* got \(2, 9, 1, 8\)"),
    "v no columns": (zeros(2, 9, 2, 0), ValueError, r"^v: head_dim must be at least 1"),
    "v too wide": (zeros(2, 9, 2, 520), UnsupportedProblemError, r"^v: head_dim up to 512 is supported"),
    "v dtype": (zeros(2, 9, 2, 8, dtype="float64"), TypeError, r"^v: expected dtype float32 .* got float64"),
    "o shape": (zeros(2, 6, 4, 4), ValueError, r"^(o|do): expected shape"),
    "o dtype": (zeros(2, 6, 4, 8, dtype="float16"), TypeError, r"^(o|do): expected dtype"),
    "do shape": (zeros(2, 5, 4, 8), ValueError, r"^do: expected shape \(2, 6, 4, 8\) .* got \(2, 5, 4, 8\)"),
    "do dtype": (zeros(2, 6, 4, 8, dtype="float64"), TypeError, r"^do: expected dtype float32 .* got float64"),
    "lse shape": (zeros(2, 6, 4), ValueError, r"^lse: expected shape \(2, 4, 6\) .* got \(2, 6, 4\)"),
    "lse dtype": (zeros(2, 4, 6, dtype="float64"), TypeError, r"^lse: expected dtype float32 .* got float64"),
}


@pytest.mark.parametrize("mistake", WRONG_TENSORS)
def test_shapes_and_dtypes(mistake):
    name = mistake.split()[0]
    array, error, match = WRONG_TENSORS[mistake]
    for operation in READS:
        if name in READS[operation]:
            assert_refused(operation, error, match, **{name: array})


@pytest.mark.parametrize("operation", ["forward", "delta", "backward"])
def test_head_dim_above_512_is_not_supported(operation):
    wide = {name: zeros(2, 6, 2, 520) for name in ("q", "k", "v", "o", "do")}
    name = "o" if operation == "delta" else "q"
    assert_refused(operation, UnsupportedProblemError, f"^{name}: head_dim up to 512 is supported, got shape", **wide)
    assert issubclass(UnsupportedProblemError, NotImplementedError)


@pytest.mark.parametrize("side", ["q", "k"])
def test_lengths_that_tiles_cannot_count_are_not_supported(side):
    """The limit is 2**31 - 2**16 rows, so that row numbers of the last tile are int32 for any tile size."""

    def problem(rows: int) -> AttentionProblem:
        sizes = {"q": 1, "k": 1, side: rows}
        q, k = (np.broadcast_to(zeros(1, 1, 1, 16), (1, n, 1, 16)) for n in sizes.values())
        return problem_from_arrays(q, k, k)

    longest = 2**31 - 2**16
    assert getattr(problem(longest), f"seqlen_{side}") == longest
    with pytest.raises(
        UnsupportedProblemError, match=f"^{side}: sequences of up to {longest} rows .*, got {longest + 1}"
    ):
        problem(longest + 1)


@pytest.mark.parametrize("operation", ["forward", "delta", "backward"])
def test_lists_are_no_arrays(operation):
    for name in READS[operation]:
        match = rf"^{name}: expected a numpy.ndarray or cupy.ndarray, got list; convert it with numpy\.asarray"
        assert_refused(operation, TypeError, match, **{name: [[1.0, 2.0]]})


@pytest.mark.parametrize("operation", ["forward", "delta", "backward"])
def test_arrays_with_a_mask_of_their_own(operation):
    """Without the error, the mask would be ignored silently."""
    tensors = arguments()
    for name in READS[operation]:
        masked = np.ma.masked_greater(tensors[name], 1.0)
        match = f"^{name}: expected an array without a mask of its own, got a numpy.ma.MaskedArray; .* mask= or key_pad"
        assert_refused(operation, TypeError, match, **{name: masked})
        if operation != "delta":
            with pytest.raises(TypeError, match=match):
                getattr(reference, operation)(*[(tensors | {name: masked})[n] for n in READS[operation]])


@pytest.mark.parametrize("operation", ["forward", "delta", "backward"])
def test_none_for_an_array_that_is_needed(operation):
    for name in READS[operation]:
        assert_refused(operation, TypeError, f"^{name}: expected a numpy.ndarray or cupy.ndarray", **{name: None})
    nothing = dict.fromkeys(READS[operation])
    assert_refused(operation, TypeError, "expected a numpy.ndarray or cupy.ndarray", **nothing)


def test_arrays_of_both_modules():
    cupy = pytest.importorskip("cupy")
    # The memory is not allocated: there may be no GPU, and nothing reads it.
    memory = cupy.cuda.UnownedMemory(1 << 30, 1 << 20, None, 0)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    for operation, names in READS.items():
        for name in names[1:]:
            other = cupy.ndarray(arguments()[name].shape, np.float32, pointer)
            match = f"^{name}: expected a numpy array like {names[0]}, got a cupy array"
            assert_refused(operation, TypeError, match, **{name: other})
    o = cupy.ndarray((2, 6, 4, 8), np.float32, pointer)
    tensors = arguments()
    with pytest.raises(TypeError, match=r"^out \(o\): expected a numpy array like q, got a cupy array"):
        fa2cupy.forward(tensors["q"], tensors["k"], tensors["v"], out=(o, None))


OPTIONS = {
    "causal number": ({"causal": 1}, TypeError, "^causal: expected a bool, got int; write causal=True$"),
    "causal zero": ({"causal": 0}, TypeError, "^causal: expected a bool, got int; write causal=False$"),
    "causal None": ({"causal": None}, TypeError, "^causal: expected a bool, got NoneType"),
    "scale nan": ({"softmax_scale": float("nan")}, ValueError, "^softmax_scale: expected a finite number, got nan"),
    "scale inf": ({"softmax_scale": -np.inf}, ValueError, "^softmax_scale: expected a finite number, got -inf"),
    "scale too large": ({"softmax_scale": 10**400}, ValueError, "^softmax_scale: expected a finite number"),
    "scale bool": ({"softmax_scale": True}, TypeError, "^softmax_scale: expected a real number or None, got bool"),
    "scale text": ({"softmax_scale": "0.1"}, TypeError, "^softmax_scale: expected a real number or None, got str"),
    "scale complex": ({"softmax_scale": 1j}, TypeError, "^softmax_scale: expected a real number or None, got complex"),
    "scale array": ({"softmax_scale": np.ones(1)}, TypeError, "^softmax_scale: expected a real number .* got ndarray"),
    "layout name": ({"layout": "sbhd"}, ValueError, "^layout: expected 'bshd' or 'bhsd', got 'sbhd'"),
    "layout None": ({"layout": None}, ValueError, "^layout: expected 'bshd' or 'bhsd', got None"),
    "layout list": ({"layout": ["bshd"]}, ValueError, "^layout: expected 'bshd' or 'bhsd'"),
    "config tuple": ({"config": (64, 64)}, TypeError, "^config: expected a TileConfig or .* got tuple"),
    "num_splits type": ({"num_splits": 2.0}, TypeError, "^num_splits: expected None or an int, got float"),
    "num_splits bool": ({"num_splits": True}, TypeError, "^num_splits: expected None or an int, got bool"),
    "num_splits zero": ({"num_splits": 0}, ValueError, "^num_splits: expected None or 1 to 16, got 0"),
    "num_splits many": ({"num_splits": 17}, ValueError, "^num_splits: expected None or 1 to 16, got 17"),
    "precision name": ({"precision": "fast"}, ValueError, "^precision: expected None, 'ieee' or 'split', got 'fast'"),
    "precision type": ({"precision": ["split"]}, ValueError, "^precision: expected None, 'ieee' or 'split'"),
    "config operation": ({"config": {"fwd": TileConfig(8, 8, 1)}}, ValueError, r"^config: \['fwd'\] are no operations"),
}
BACKWARD_OPTIONS = {
    "config value": ({"config": {"backward": 64}}, TypeError, r"^config\['backward'\]: expected a TileConfig, got int"),
    "second config": (
        {"config": {"backward_dq": TileConfig(8, 8, 1), "backward_dkdv": 8}, "method": "two_pass"},
        TypeError,
        r"^config\['backward_dkdv'\]: expected a TileConfig, got int",
    ),
    "method name": (
        {"method": "fast"},
        ValueError,
        "^method: expected None, 'single_pass', 'two_pass' or 'one_tile', got 'fast'",
    ),
    "method empty": (
        {"method": ""},
        ValueError,
        "^method: expected None, 'single_pass', 'two_pass' or 'one_tile', got ''",
    ),
    "method type": (
        {"method": ["two_pass"]},
        ValueError,
        "^method: expected None, 'single_pass', 'two_pass' or 'one_tile'",
    ),
    "deterministic": ({"deterministic": 1}, TypeError, "^deterministic: .*, got int; write deterministic=True"),
    "deterministic None": ({"deterministic": None}, TypeError, "^deterministic: expected a bool, got NoneType"),
    "delta shape": ({"delta": zeros(2, 4, 5)}, ValueError, r"^delta: expected shape \(2, 4, 6\) .* got \(2, 4, 5\)"),
    "delta dtype": ({"delta": zeros(2, 4, 6, dtype="float16")}, TypeError, "^delta: expected dtype float32 to match q"),
    "delta list": ({"delta": [0.0]}, TypeError, "^delta: expected a numpy.ndarray or cupy.ndarray, got list"),
}


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("mistake", OPTIONS)
def test_options(mistake, operation):
    options, error, match = OPTIONS[mistake]
    assert_refused(operation, error, match, options)


@pytest.mark.parametrize("mistake", BACKWARD_OPTIONS)
def test_options_of_backward(mistake):
    options, error, match = BACKWARD_OPTIONS[mistake]
    assert_refused("backward", error, match, options)


def test_precision_is_a_choice_for_float32():
    q = np.zeros((1, 4, 2, 8), "float64")
    with pytest.raises(ValueError, match="^precision: it is a choice for float32, got 'split' for float64"):
        fa2cupy.forward(q, q, q, precision="split")
    q = np.random.default_rng(0).standard_normal((1, 4, 2, 8), dtype=np.float32)
    plain = fa2cupy.forward(q, q, q)
    for precision in ("ieee", "split"):
        assert all((x == y).all() for x, y in zip(fa2cupy.forward(q, q, q, precision=precision), plain, strict=True))


def test_layout_of_delta():
    assert_refused("delta", ValueError, "^layout: expected 'bshd' or 'bhsd', got 'bsh'", {"layout": "bsh"})


@pytest.mark.parametrize("number", [fractions.Fraction(1, 3), np.float64(0.2), np.int64(1), 0])
def test_any_real_number_is_a_scale(number):
    tensors = arguments()
    o, _ = fa2cupy.forward(tensors["q"], tensors["k"], tensors["v"], softmax_scale=number)
    expected, _ = fa2cupy.forward(tensors["q"], tensors["k"], tensors["v"], softmax_scale=float(number))
    np.testing.assert_array_equal(o, expected)


@pytest.mark.parametrize("fields", [{"b_r": 0}, {"b_c": -8}, {"num_warps": 1.5}, {"num_stages": True}, {"b_r": "64"}])
def test_tiles_are_positive_integers(fields):
    (name,) = fields
    with pytest.raises(ValueError, match=f"^{name}: expected a positive int"):
        TileConfig(**{"b_r": 64, "b_c": 64, "num_warps": 4, **fields})


def out_of(operation: str, position: int, make) -> tuple[dict, tuple, list]:
    """Returns inputs, outputs with one replaced by `make(it)`, and those outputs that must stay unchanged."""
    tensors = arguments()
    out = list(outputs(operation, tensors))
    out[position] = make(out[position])
    return tensors, tuple(out), [array for array in out if isinstance(array, np.ndarray)]


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


WRONG_OUTPUTS = {
    "shape": (lambda a: np.full((1, *a.shape), SENTINEL, a.dtype), ValueError, "expected shape .* to match the result"),
    "dtype": (lambda a: a.astype("float64"), TypeError, "expected dtype float32 to match the result, got float64"),
    "read-only": (read_only, ValueError, "the array is read-only"),
    "shared elements": (
        lambda a: np.lib.stride_tricks.as_strided(a, strides=(0, *a.strides[1:])),
        ValueError,
        "elements share memory",
    ),
    "masked": (np.ma.masked_array, TypeError, "expected an array without a mask of its own"),
    "list": (lambda a: a.tolist(), TypeError, "expected a numpy.ndarray or cupy.ndarray, got list"),
    "dlpack": (lambda a: OnlyDlpack(), TypeError, "expected a numpy.ndarray or cupy.ndarray, got .*OnlyDlpack"),
}
RESULTS = [("forward", 0, "o"), ("forward", 1, "lse"), ("delta", 0, "delta")]
RESULTS += [("backward", position, name) for position, name in enumerate(("dq", "dk", "dv"))]


@pytest.mark.parametrize(("operation", "position", "name"), RESULTS, ids=[name for *_, name in RESULTS])
@pytest.mark.parametrize("mistake", WRONG_OUTPUTS)
def test_outputs(mistake, operation, position, name):
    make, error, match = WRONG_OUTPUTS[mistake]
    tensors, out, untouched = out_of(operation, position, make)
    with pytest.raises(error, match=match) as raised:
        call(operation, tensors, out)
    assert raised.type is error
    assert str(raised.value).startswith(("out", f"out ({name})"))
    assert all((array == SENTINEL).all() for array in untouched)


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_number_of_outputs(operation):
    tensors = arguments()
    out = outputs(operation, tensors)
    for wrong in (out[:-1], (*out, out[0]), (), out[0], {"o": out[0]}):
        with pytest.raises(TypeError, match=r"^out: expected a tuple \((o, lse|dq, dk, dv)\) of arrays or None, got"):
            call(operation, tensors, wrong)
    assert all((array == SENTINEL).all() for array in out)


class TestOverlap:
    """Outputs must not share an element with each other or an input; lying in one array is no reason to refuse."""

    @pytest.mark.parametrize("name", ["q", "k", "v"])
    def test_output_of_forward_is_an_input(self, name):
        tensors = arguments() | {"k": zeros(2, 6, 4, 8), "v": zeros(2, 6, 4, 8)}
        kept = tensors[name].copy()
        with pytest.raises(ValueError, match=rf"^out \(o\): overlaps {name} in memory"):
            fa2cupy.forward(tensors["q"], tensors["k"], tensors["v"], out=(tensors[name], None))
        np.testing.assert_array_equal(tensors[name], kept)

    @pytest.mark.parametrize("name", ["q", "o", "do"])
    def test_output_of_backward_is_an_input(self, name):
        tensors = arguments()
        kept = tensors[name].copy()
        with pytest.raises(ValueError, match=rf"^out \(dq\): overlaps {name} in memory"):
            call("backward", tensors, (tensors[name], None, None))
        np.testing.assert_array_equal(tensors[name], kept)

    def test_delta_over_lse_or_given_delta(self):
        tensors = arguments("float64")
        memory = np.full(2 * 4 * 6 * 8 * 2, SENTINEL, "float64")
        dq = memory[: 2 * 6 * 4 * 8].reshape(2, 6, 4, 8)
        delta = memory[7 : 7 + 2 * 4 * 6].reshape(2, 4, 6)
        with pytest.raises(ValueError, match=r"^out \(dq\): overlaps delta in memory"):
            call("backward", tensors, (dq, None, None), delta=delta)
        with pytest.raises(ValueError, match=r"^out \(dq\): overlaps lse in memory"):
            call("backward", tensors | {"lse": delta}, (dq, None, None))
        with pytest.raises(ValueError, match=r"^out \(delta\): overlaps o in memory"):
            call("delta", tensors | {"o": dq}, (delta,))
        assert (memory == SENTINEL).all()

    def test_outputs_over_each_other(self):
        tensors = arguments()
        memory = np.full((2, 9, 2, 16), SENTINEL, "float32")
        dk, dv = memory[..., :8], memory[..., 7:15]
        with pytest.raises(ValueError, match=r"^out \(dv\): overlaps out \(dk\) in memory"):
            call("backward", tensors, (None, dk, dv))
        with pytest.raises(ValueError, match=r"^out \(dv\): overlaps out \(dk\) in memory"):
            call("backward", tensors, (None, dk, dk[:, ::-1]))
        assert (memory == SENTINEL).all()

    def test_neighbours_in_one_array_are_fine(self):
        tensors = arguments()
        expected = call("backward", tensors, None)
        memory = np.full((2, 9, 2, 3, 8), SENTINEL, "float32")
        tensors["k"] = memory[:, :, :, 1]
        tensors["k"][...] = arguments()["k"]
        given = call("backward", tensors, (None, memory[:, :, :, 0], memory[:, :, :, 2]))
        for one, other in zip(given, expected, strict=True):
            np.testing.assert_array_equal(one, other)

    def test_empty_outputs_overlap_nothing(self):
        q, k, v, do = make_inputs(**SIZES | {"seqlen_k": 0})
        o, lse = fa2cupy.forward(q, k, v)
        dq, dk, dv = fa2cupy.backward(q, k, v, o, lse, do, out=(None, k.copy(), v.copy()))
        assert dk.shape == dv.shape == k.shape
        assert not dq.any()
