"""On a GPU: the table of docs/accuracy.md of what has the same bits, from run to run and beside other sequences."""

from __future__ import annotations

import pytest

import fa2cupy
from fa2cupy.families import choice
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.registry import family_of_kernel
from fa2cupy.testing import Expectation, make_inputs

cp = pytest.importorskip("cupy")
from fa2cupy.gpu import signatures

pytestmark = pytest.mark.gpu

RUNS = 20
#: Few tiles for a GPU: by default they are shared.
SIZES = {"seqlen_q": 600, "seqlen_k": 900, "num_heads": 4, "num_heads_kv": 2}
ALONE, DETERMINISTIC = {"num_splits": 1}, {"deterministic": True}
#: dtype and precision
ARITHMETIC = (("float16", None), ("bfloat16", None), ("float32", None), ("float32", "ieee"), ("float64", None))
ALL = ("dq", "dk", "dv")


def draw(dtype: str, batch: int, head_dim: int = 64) -> tuple:
    return make_inputs(dtype, batch=batch, head_dim=head_dim, xp=cp, **SIZES)


def of_single_pass(dtype: str, precision: str | None) -> tuple[str, ...]:
    """Returns the results of single_pass that are not added up by atomics if no tile is shared."""
    family = "simt" if precision == "ieee" else None
    kernels = family_of_kernel("backward", dtype, DeviceInfo.current(), family)
    return ("dk", "dv") if kernels.backward_owns == "keys" else ("dq",)


def bits(results) -> list[bytes]:
    return [result.tobytes() for result in results]


def results_of(inputs: tuple, precision: str | None, *, own: dict, names: tuple = ALL, **options) -> list[bytes]:
    """Returns o, lse, delta and the named gradients of the first sequence."""
    q, k, v, do = inputs
    how = {"causal": True, "precision": precision, **own}
    o, lse = fa2cupy.forward(q, k, v, **how)
    gradients = dict(zip(ALL, fa2cupy.backward(q, k, v, o, lse, do, **how, **options), strict=True))
    results = (o, lse, fa2cupy.delta(o, do), *(gradients[name] for name in names))
    return bits(result[0] for result in results)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "precision"),
    [*((head_dim, *arithmetic) for head_dim in (64, 128) for arithmetic in ARITHMETIC), (256, "float64", None)],
)
def test_from_run_to_run(head_dim, dtype, precision):
    """Checks rows of float64 that two warps share, too: those of 256 columns."""
    inputs = draw(dtype, 2, head_dim)
    single = {"method": "single_pass", "names": of_single_pass(dtype, precision)}
    for own, options in (({}, DETERMINISTIC), (ALONE, DETERMINISTIC), (ALONE, single)):
        first = results_of(inputs, precision, own=own, **options)
        for _ in range(RUNS):
            assert results_of(inputs, precision, own=own, **options) == first


@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("length", (1, 128, 300, 1000, 1024))
@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 40), ("bfloat16", 64)])
def test_one_launch_has_the_bits_of_several(monkeypatch, dtype, head_dim, length, causal):
    """Checks small backwards of self-attention, whose passes run side by side."""
    sizes = {"seqlen_q": length, "seqlen_k": length, "num_heads": 3, "head_dim": head_dim}
    q, k, v, do = make_inputs(dtype, batch=2, xp=cp, **sizes)
    how = {"causal": causal, **ALONE}
    o, lse = fa2cupy.forward(q, k, v, **how)
    dlse = cp.ones_like(lse)
    for given in ({}, {"delta": fa2cupy.delta(o, do)}, {"dlse": dlse}):
        expected = Expectation(q, k, v, do, causal=causal, dlse=given.get("dlse"))
        found = []
        for kernels in (choice.METHODS, choice.IN_ONE_LAUNCH):
            with monkeypatch.context() as patch:
                patch.setattr(choice, "METHODS", kernels)
                patch.setattr(choice, "IN_ONE_LAUNCH", {})
                signatures._prepared.clear()
                for _ in range(RUNS):
                    out = expected.unwritten("dq", "dk", "dv")
                    gradients = fa2cupy.backward(q, k, v, o, lse, do, **given, **how, method="two_pass", out=out)
                    found.append(bits(gradients))
                expected.check(**dict(zip(ALL, gradients, strict=True)))
        signatures._prepared.clear()
        assert all(one == found[0] for one in found)


@pytest.mark.parametrize(("dtype", "precision"), ARITHMETIC)
@pytest.mark.parametrize("head_dim", (64, 128))
def test_one_split_beside_others(head_dim, dtype, precision):
    inputs = draw(dtype, 30, head_dim)
    for options in (DETERMINISTIC, {"method": "single_pass", "names": of_single_pass(dtype, precision)}):
        alone = results_of(tuple(x[:1] for x in inputs), precision, own=ALONE, **options)
        for batch in (2, 7, 30):
            assert results_of(tuple(x[:batch] for x in inputs), precision, own=ALONE, **options) == alone


@pytest.mark.parametrize("dtype", ("bfloat16", "float64"))
def test_one_split_beside_others_that_are_packed(dtype):
    q, k, v, do = (x.reshape(-1, *x.shape[2:]) for x in draw(dtype, 9))

    def found(batch: int) -> list[bytes]:
        """Returns the results of the first sequence of so many."""
        rows, keys = SIZES["seqlen_q"], SIZES["seqlen_k"]
        ends = cp.arange(batch + 1, dtype="int32")
        own = {"cu_seqlens_q": ends * rows, "cu_seqlens_k": ends * keys, "causal": True, **ALONE}
        arrays = q[: batch * rows], k[: batch * keys], v[: batch * keys]
        o, lse = fa2cupy.forward(*arrays, **own)
        dq, dk, dv = fa2cupy.backward(*arrays, o, lse, do[: batch * rows], **own, **DETERMINISTIC)
        return bits((o[:rows], lse[:, :rows], dq[:rows], dk[:keys], dv[:keys]))

    assert found(1) == found(3) == found(9)


def test_by_default_other_sequences_change_the_bits():
    """Otherwise the tests above would pass without num_splits. Blocks share the keys of few queries."""
    q, k, v, _ = draw("bfloat16", 30)
    alone, among = (bits(x[0] for x in fa2cupy.forward(q[:n, :200], k[:n], v[:n])) for n in (1, 30))
    assert alone != among
    for _ in range(RUNS):
        assert bits(x[0] for x in fa2cupy.forward(q[:1, :200], k[:1], v[:1])) == alone


@pytest.mark.parametrize("causal", (False, True), ids=("full", "causal"))
@pytest.mark.parametrize("head_dim", (64, 128))
def test_small_query_tiles_beside_others(head_dim, causal):
    """Checks forwards whose tile depends on the batch, and whose keys are not shared."""
    if DeviceInfo.current().arch != "sm_90":
        pytest.skip("tiles of other GPUs do not depend on the batch")
    q, k, v, _ = draw("bfloat16", 30, head_dim)
    among = fa2cupy.forward(q, k, v, causal=causal)
    for batch in (1, 2, 7):
        for _ in range(RUNS):
            found = fa2cupy.forward(q[:batch], k[:batch], v[:batch], causal=causal)
            assert bits(found) == bits(x[:batch] for x in among)


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("lengths", ((700, 700, 700), (1500, 5, 900)))
def test_decode(dtype, lengths):
    batch = 60
    caches = [cp.asarray(x) for x in make_inputs(dtype, batch=batch, seqlen_q=1500, num_heads=2)[1:3]]
    q = make_inputs(dtype, batch=batch, seqlen_q=1, num_heads=8, seed=1, xp=cp)[0]
    given = cp.asarray([*lengths] * (batch // 3), "int32")

    def decoded(number: int, **options) -> list[bytes]:
        results = fa2cupy.decode(q[:number], *(x[:number] for x in caches), given[:number], **options)
        return bits(result[0] for result in results)

    for options in ({}, ALONE):
        first = decoded(3, **options)
        assert all(decoded(3, **options) == first for _ in range(RUNS))
    assert decoded(1, **ALONE) == decoded(3, **ALONE) == decoded(batch, **ALONE)


def test_merge():
    o_parts, lse_parts = (
        cp.random.default_rng(0).standard_normal(n, "float32") for n in ((9, 7, 5, 4, 64), (9, 7, 4, 5))
    )
    first = fa2cupy.merge(o_parts, lse_parts)
    for _ in range(RUNS):
        assert bits(fa2cupy.merge(o_parts, lse_parts)) == bits(first)
    assert bits(fa2cupy.merge(o_parts[:, 2:3], lse_parts[:, 2:3])) == bits(x[2:3] for x in first)


def test_gradients_of_a_sink_and_of_a_full_bias():
    q, k, v, do = draw("float16", 2)
    rng = cp.random.default_rng(0)
    bias = rng.standard_normal((2, 4, 600, 900), "float32").astype("float16")
    own = {"bias": bias, "sink": rng.standard_normal(4, "float32")}
    o, lse = fa2cupy.forward(q, k, v, **own)
    how = {"return_dbias": True, "return_dsink": True, **DETERMINISTIC, **own}
    first = bits(fa2cupy.backward(q, k, v, o, lse, do, **how))
    for _ in range(RUNS):
        assert bits(fa2cupy.backward(q, k, v, o, lse, do, **how)) == first


@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32", "float64"))
@pytest.mark.parametrize("shape", ((4, 600, 900), (7, 1, 600, 900), (4, 1, 900), (4, 600, 1), (1,)), ids=str)
def test_gradients_of_a_broadcast_bias(dtype, shape):
    q, k, v, do = draw(dtype, 7)
    bias = cp.random.default_rng(0).standard_normal(shape, "float32").astype(q.dtype)
    o, lse = fa2cupy.forward(q, k, v, bias=bias)
    how = {"bias": bias, "return_dbias": True, **DETERMINISTIC}
    first = fa2cupy.backward(q, k, v, o, lse, do, **how)
    Expectation(q, k, v, do, bias=bias).check(dbias=first[3])
    for _ in range(RUNS):
        assert bits(fa2cupy.backward(q, k, v, o, lse, do, **how)) == bits(first)


def test_deterministic_refuses_what_atomics_add_up():
    q, k, v, do = draw("float16", 2)
    table = cp.zeros((4, 1, 900), "float16")
    own = {"score_mod": lambda s, b, h, i, j, x: s + x[h, 0, j], "score_args": (table,)}
    o, lse = fa2cupy.forward(q, k, v, **own)
    with pytest.raises(fa2cupy.UnsupportedProblemError, match="not with deterministic"):
        fa2cupy.backward(q, k, v, o, lse, do, return_dscore_args=True, **DETERMINISTIC, **own)
