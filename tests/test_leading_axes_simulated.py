"""Several leading axes in the kernels of every family, executed without a GPU.

Arrays over the scores repeat different leading axes, so that no single stride leads from a sequence to the next one.
Results must have the bits of a call with one leading axis and expanded arrays.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest

pytest.importorskip("cupy")

from mutants.mutant import CATCHES, replace_once
from support import fake_gpu
from support.fake_cupy import FakeArray, place
from support.fake_gpu import backward, delta, forward
from support.feature_cases import accumulator, booleans, numbers
from support.simulator import simulated_gpu

from fa2cupy import TileConfig, merge, reference
from fa2cupy.families.operations import TILED
from fa2cupy.testing import Expectation, check_delta

pytestmark = pytest.mark.simulated

LEADING = 2, 3
HEADS = 2
#: dtype, head_dim, queries and keys, family and device, by the name of kernels. Keys are multiples of 8, so that tiles
#: of biases are copied where kernels do so.
FAMILIES = {
    "simt": ("float32", 8, (9, 16), "simt", "sm_90"),
    "sm80": ("float16", 16, (20, 40), "sm80", "sm_80"),
    "sm90": ("bfloat16", 64, (70, 80), "sm90", "sm_90"),
    "sm80_float32": ("float32", 16, (20, 40), "sm80", "sm_80"),
    "sm90_float32": ("float32", 64, (24, 48), "sm90", "sm_90"),
    "sm80_float64": ("float64", 16, (20, 40), "sm80", "sm_80"),
}
ON_HOPPER = {
    "forward": TileConfig(64, 48, 8, 2, 2),
    "backward_dq": TileConfig(128, 32, 12, 2),
    "backward_dkdv": TileConfig(64, 128, 12, 2),
}
CONFIGS = {"simt": TileConfig(8, 8, 2), "sm80": TileConfig(32, 32, 2, 2), "sm90": ON_HOPPER}


def inputs(name: str, leading: tuple = LEADING) -> tuple:
    """Returns q, k, v and do, with one K/V head."""
    dtype, columns, (rows, keys), *_ = FAMILIES[name]
    sizes = ((rows, HEADS), (keys, 1), (keys, 1), (rows, HEADS))
    return tuple(place(numbers((*leading, *size, columns), dtype, seed)) for seed, size in enumerate(sizes))


def arrays(name: str, kind: str) -> dict:
    """Returns features with arrays over the scores; `kind` is one of `KINDS`."""
    dtype, _, (rows, keys), *_ = FAMILIES[name]
    first, last = LEADING
    wide, of_all = accumulator(dtype), (*LEADING, HEADS, rows, keys)
    visible = np.arange(keys) == 1

    def repeated(*strides: int) -> FakeArray:
        base = place(numbers((400 + rows * keys,), dtype, 5))[200:]
        return np.lib.stride_tricks.as_strided(base, of_all, [base.itemsize * n for n in strides], subok=True)

    def apart(array: np.ndarray) -> FakeArray:
        """Returns the numbers with 4 unused elements behind each of the first axis."""
        spaced = place(np.zeros((len(array), array[0].size + 4), array.dtype))
        spaced[:, :-4] = array.reshape(len(array), -1)
        strides = spaced.strides[0], *array.strides[1:]
        return np.lib.stride_tricks.as_strided(spaced, array.shape, strides, subok=True)

    return {
        "bias of pairs": lambda: {"bias": place(numbers((first, 1, HEADS, rows, keys), dtype, 5))},
        "bias of windows": lambda: {"bias": place(numbers((last, HEADS, rows, keys), wide, 5))},
        "bias of odd rows": lambda: {"bias": place(numbers((first, 1, 1, rows, keys + 1), dtype, 5))[..., :-1]},
        "bias of any strides": lambda: {"bias": repeated(-3, 17, 0, 1, -1)},
        "bias of keys": lambda: {"bias": place(numbers((last, 1, 1, keys), dtype, 5))},
        "mask": lambda: {"mask": place(booleans((first, 1, 1, rows, keys)) | visible)},
        "padding": lambda: {"key_padding_mask": place(booleans((last, keys)) | visible)},
        "mask and padding": lambda: {
            "mask": place(booleans((first, 1, 1, rows, keys)) | visible),
            "key_padding_mask": place(booleans((last, keys)) | visible),
        },
        "bias of odd distances": lambda: {"bias": apart(numbers((first, 1, HEADS, rows, keys), dtype, 5))},
        "mask of odd distances": lambda: {"mask": apart(booleans((first, 1, 1, rows, keys)) | visible)},
        "all": lambda: {
            "bias": place(numbers((last, 1, 1, keys), dtype, 5)),
            "mask": place(booleans((first, 1, 1, rows, keys)) | visible)[::-1],
            "key_padding_mask": place(booleans((*LEADING[:1], 1, keys)) | visible),
            "alibi_slopes": place(numbers((last, HEADS), wide, 6)),
            "sink": place(numbers((HEADS,), wide, 7)),
            "dropout_p": 0.2,
            "seed": 5,
        },
    }[kind]()


KINDS = (
    "bias of pairs", "bias of windows", "bias of odd rows", "bias of odd distances", "bias of any strides",
    "bias of keys", "mask", "mask of odd distances", "padding", "mask and padding", "all",
)  # fmt: skip
#: The terms of their distances between sequences, where they are not 2.
TERMS = dict.fromkeys(
    ("bias of pairs", "bias of odd rows", "bias of odd distances", "mask", "mask of odd distances"), 1
)


#: Families whose slow tests have few arrays read them as others do.
CASES = [(name, kind) for name in FAMILIES for kind in (KINDS if "_" not in name else ("bias of pairs", "all"))]


def flattened(options: dict, name: str) -> dict:
    """Returns the options of the same call with one leading axis, with arrays for each sequence."""
    _, _, (rows, keys), *_ = FAMILIES[name]
    inner = {
        "bias": (HEADS, rows, keys),
        "mask": (1, rows, keys),
        "key_padding_mask": (keys,),
        "alibi_slopes": (HEADS,),
    }

    def whole(array: np.ndarray, own: tuple) -> FakeArray:
        return place(np.broadcast_to(array, (*LEADING, *own)).reshape(math.prod(LEADING), *own))

    return {key: whole(value, inner[key]) if key in inner else value for key, value in options.items()}


def of_family(name: str) -> dict:
    return {"family": FAMILIES[name][3], "config": CONFIGS.get(name)}


@pytest.mark.sample(name=("sm80",), kind=("bias of pairs",))
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_bits_of_one_leading_axis(monkeypatch, name, kind):
    q, k, v, do = inputs(name)
    own, options = of_family(name), arrays(name, kind)
    with simulated_gpu(monkeypatch, FAMILIES[name][4]) as launched:
        o, lse = forward(q, k, v, **own, **options)
        found = (o, lse, *backward(q, k, v, o, lse, do, method="two_pass", **own, **options))
        assert {stage.spec.batch_terms for stage in launched if stage.spec.operation in TILED} == {TERMS.get(kind, 2)}
        flat_q, flat_k, flat_v, flat_do = (place(x.reshape(-1, *x.shape[2:])) for x in (q, k, v, do))
        own |= flattened(options, name)
        results = forward(flat_q, flat_k, flat_v, **own)
        results += backward(flat_q, flat_k, flat_v, *results, flat_do, method="two_pass", **own)
    for mine, other in zip(found, results, strict=True):
        assert mine.tobytes() == other.tobytes()


def check_gradients(name: str, options: dict, *, out: FakeArray | None = None) -> None:
    """Checks a call and all its gradients against the reference; `out` is for that of the bias."""
    q, k, v, do = inputs(name)
    own = of_family(name)
    expected = Expectation(q, k, v, do, **options)
    o, lse = forward(q, k, v, **own, **options)
    expected.check(o=o, lse=lse)
    check_delta(o, do, delta(o, do))
    more = [key for key in ("bias", "sink") if key in options]
    switches = {f"return_d{key}": True for key in more}
    given = (None, None, None, out) if out is not None else None
    found = backward(q, k, v, o, lse, do, method="two_pass", out=given, **switches, **own, **options)
    expected.check(**dict(zip(("dq", "dk", "dv", *(f"d{key}" for key in more)), found, strict=True)))


@pytest.mark.sample(name=("simt", "sm80"), kind=("bias of pairs",))
@pytest.mark.parametrize(("name", "kind"), [case for case in CASES if case[1].startswith(("bias", "all"))])
def test_gradients(monkeypatch, name, kind):
    """The gradient of a bias is summed over the axes that share it."""
    with simulated_gpu(monkeypatch, FAMILIES[name][4]):
        check_gradients(name, arrays(name, kind))


@pytest.mark.sample(name=("simt",))
@pytest.mark.parametrize("name", FAMILIES)
def test_a_full_dbias_of_any_strides(monkeypatch, name):
    dtype, _, (rows, keys), *_ = FAMILIES[name]
    shape = (*LEADING, HEADS, rows, keys)
    dbias = place(np.full((*shape[1::-1], *shape[2:]), np.nan, numbers((), dtype).dtype)).swapaxes(0, 1)[::-1]
    with simulated_gpu(monkeypatch, FAMILIES[name][4]) as launched:
        check_gradients(name, {"bias": place(numbers(shape, dtype)), "causal": True}, out=dbias)
        writing = [stage.spec for stage in launched if "full_dbias" in stage.spec.features]
        assert {spec.batch_terms for spec in writing} == {2}


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["simt", "sm80"])
def test_calls_of_second_order(monkeypatch, name):
    tensors, moved = inputs(name), [place(np.roll(x, 1, -1)) for x in inputs(name)]
    (q, k, v, do), (qt, kt, vt, dot) = tensors, moved
    options = arrays(name, "bias of pairs") | {"mask": arrays(name, "mask")["mask"]}
    tangent = place(np.roll(options["bias"], 1, 0))
    with simulated_gpu(monkeypatch, FAMILIES[name][4]):
        own = {"config": TileConfig(16, 16, 1, 2) if name == "sm80" else CONFIGS[name]}

        def results_of(library, own: dict) -> tuple:
            o, lse, *rest = library.jvp(q, k, v, qt, kt, vt, bias_tangent=tangent, **own, **options)
            given = q, k, v, o, lse, do, qt, kt, vt
            own = own | options | {"return_dbias": True}
            both = library.backward_jvp(*given, *rest, dot, bias_tangent=tangent, **own)
            return o, lse, *rest, *both, *library.double_backward(*given, gdbias=tangent, **own)

        found, wanted = results_of(fake_gpu, own), results_of(reference, {})
    for mine, exact in zip(found, wanted, strict=True):
        assert mine.shape == exact.shape
        allowed = (0.03 if name == "sm80" else 1e-5) * abs(exact).max()
        np.testing.assert_allclose(np.asarray(mine, "float64"), exact, rtol=0, atol=allowed)


def test_the_kernel_of_few_queries(monkeypatch):
    q, k, v, _ = (place(numbers((*LEADING, *size, 64), "float16", 1)) for size in ((1, 4), (40, 2), (40, 2), (1, 4)))
    slopes = place(numbers((3, 4), "float32"))
    with simulated_gpu(monkeypatch) as launched:
        o, lse = forward(q, k, v, alibi_slopes=slopes)
        Expectation(q, k, v, alibi_slopes=slopes).check(o=o, lse=lse)
    assert [(stage.spec.operation, stage.spec.batch_terms) for stage in launched] == [("decode", 2)]


@pytest.mark.parametrize("is_flat", [True, False])
def test_merged_parts(monkeypatch, is_flat):
    """Parts are an axis in front of the leading ones, whatever its stride."""
    parts = numbers((2, *LEADING, 9, HEADS, 16), "float16")
    lse_parts = place(numbers((2, *LEADING, HEADS, 9), "float32", 6))
    given = place(np.repeat(parts, 2, axis=0))[::2]
    if not is_flat:
        given = place(np.ascontiguousarray(parts.swapaxes(1, 2))).swapaxes(1, 2)
    with simulated_gpu(monkeypatch):
        found = fake_gpu.merge(given, lse_parts)
    for mine, wanted in zip(found, merge(parts, np.array(lse_parts)), strict=True):
        assert mine.shape == wanted.shape
        np.testing.assert_allclose(mine.astype("float32"), wanted.astype("float32"), atol=1e-3)


def test_what_is_copied(monkeypatch):
    """Tensors whose leading axes have no stride in common; biases and masks never."""
    launches = []
    first, last = LEADING
    q, k, v, do = inputs("simt")
    _, _, (rows, keys), *_ = FAMILIES["simt"]
    transposed = place(np.ascontiguousarray(q.swapaxes(0, 1))).swapaxes(0, 1)
    strided = place(np.repeat(k, 2, axis=1))[:, ::2]  # every second sequence: one stride for all
    repeated = np.broadcast_to(v[:1, :1], v.shape, subok=True)
    bias = np.broadcast_to(place(numbers((last, 1, 1, keys), "float32")), (*LEADING, HEADS, rows, keys), subok=True)
    mask = place(booleans((last, first, 1, rows, keys))).swapaxes(0, 1)[::-1, ::-1]
    out = place(np.zeros((*q.shape[1::-1], *q.shape[2:]), "float32")).swapaxes(0, 1)
    with fake_gpu.fake_gpu(monkeypatch, run=launches.append):
        o, lse = forward(transposed, strided, repeated, bias=bias, mask=mask, out=(out, None), family="simt")
        assert o is out
        pointers = launches[0].pointers
        given = {"q": transposed, "k": strided, "v": repeated, "bias": bias, "mask": mask, "o": out}
        assert {name for name, array in given.items() if pointers[name] != array.data.ptr} == {"q", "o"}
        backward(q, k, v, q, lse, do, bias=bias, mask=mask, family="simt", return_dbias=True)
        assert all(launch.pointers.get("bias", bias.data.ptr) == bias.data.ptr for launch in launches)


#: By name: the operation, the arrays, a change of the source, and the error that must catch it. Tiles of arrays are
#: those of Hopper, which holds them in shared memory.
MUTANTS = {
    "divisions without a shift": ("forward", "bias of pairs", ">> terms[t].shift)", ">> 0)", "bounds"),
    "divisions of half a number": (
        "forward",
        "bias of pairs",
        "__umulhi(2u * batch_index",
        "__umulhi(batch_index",
        "numbers",
    ),
    "one term only": (
        "forward",
        "mask and padding",
        "for (int t = 0; t < kTerms; ++t)\n            first",
        "for (int t = 0; t < 1; ++t)\n            first",
        "bounds",
    ),
    "dbias of the first sequence": (
        "backward_dq",
        "bias of pairs",
        "params.dbias_strides.offset(tile.batch, tile.head, first_query, first_key)",
        "params.dbias_strides.offset(0, tile.head, first_query, first_key)",
        "numbers",
    ),
    "distances that tiles of a bias are not aligned to": (
        "forward",
        "bias of odd distances",
        "bits |= terms[t].distance",
        "bits |= 0 * terms[t].distance",
        "misaligned",
    ),
    "distances that tiles of a mask are not aligned to": (
        "forward",
        "mask of odd distances",
        "bits |= terms[t].distance",
        "bits |= 0 * terms[t].distance",
        "misaligned",
    ),
}


@functools.lru_cache(maxsize=None)
def run_mutant(operation: str, kind: str, change: tuple[str, str] | None = None) -> None:
    def patch(spec, text: str) -> str:
        return text if change is None or spec.operation != operation else replace_once(spec, text, *change)

    name = "sm90" if "odd distances" in kind else "sm80"
    with pytest.MonkeyPatch.context() as monkeypatch, simulated_gpu(monkeypatch, FAMILIES[name][4], patch=patch):
        check_gradients(name, arrays(name, kind))


@pytest.mark.matrix
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_kernel_is_caught(mutant):
    operation, kind, old, new, caught_by = MUTANTS[mutant]
    run_mutant(operation, kind)
    exception, text = CATCHES[caught_by]
    with pytest.raises(exception, match=text):
        run_mutant(operation, kind, (old, new))
