"""Partial results over different keys, merged: on NumPy, and by the kernel, executed without a GPU."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cupy")

from mutants.mutant import replace_once
from support.fake_cupy import place
from support.fake_gpu import merge as merge_on_gpu
from support.simulator import simulated_gpu
from support.strided_arrays import shifted

import fa2cupy
from fa2cupy import reference
from fa2cupy.testing import Expectation, make_inputs

pytestmark = pytest.mark.filterwarnings("error")

DTYPES = ("float16", "bfloat16", "float32", "float64")


def parts_of(dtype: str, bounds: tuple[int, ...], layout: str = "bshd", head_dim: int = 64, **problem) -> tuple:
    """Returns q, k and v, and stacks of o and lse, each over the keys between two bounds."""
    sizes = {"seqlen_q": 5, "seqlen_k": bounds[-1], "num_heads": 4, "num_heads_kv": 2, "batch": 2}
    q, k, v, _ = make_inputs(dtype, head_dim=head_dim, layout=layout, **sizes)
    axis = 1 if layout == "bshd" else 2
    results = []
    for first, end in itertools.pairwise(bounds):
        keys = (slice(None),) * axis + (slice(first, end),)
        results.append(reference.forward(q, k[keys], v[keys], layout=layout, **problem))
    o, lse = (np.stack(parts) for parts in zip(*results, strict=True))
    return q, k, v, o.astype(q.dtype), lse.astype("float64" if dtype == "float64" else "float32")


def check(merge, dtype: str, layout: str = "bshd", head_dim: int = 64, bounds: tuple[int, ...] = (0, 7, 7, 30)) -> None:
    """Checks the merge of parts; a part without keys has NaN in its o."""
    q, k, v, o_parts, lse_parts = parts_of(dtype, bounds, layout, head_dim)
    o_parts[lse_parts[..., 0, 0, 0] == -np.inf] = np.nan
    expected = Expectation(q, k, v, layout=layout)
    o, lse = merge(o_parts, lse_parts, layout=layout)
    expected.check(o=o, lse=lse)


def check_dominant(merge, dtype: str) -> None:
    """Merges nine parts of nine rows; each row gets all its weight from another part."""
    rng = np.random.default_rng(0)
    o_parts = rng.standard_normal((9, 1, 9, 1, 8)).astype(dtype)
    lse_parts = rng.standard_normal((9, 1, 1, 9)).astype("float64" if dtype == "float64" else "float32")
    rows = np.arange(9)
    lse_parts[rows, 0, 0, rows] = 1000
    o, lse = merge(o_parts, lse_parts)
    np.testing.assert_array_equal(o[0, :, 0], o_parts[rows, 0, rows, 0])
    np.testing.assert_array_equal(lse, np.full((1, 1, 9), 1000))


@pytest.fixture
def merge_simulated(monkeypatch):
    """Yields a `merge` of NumPy arrays that runs the kernel."""

    def merge(o_parts, lse_parts, out=None, **options):
        given = out if out is None else tuple(None if x is None else x.view(type(place(x))) for x in out)
        return merge_on_gpu(place(o_parts), place(lse_parts), out=given, **options)

    with simulated_gpu(monkeypatch) as launched:
        yield merge
        assert [stage.spec.operation for stage in launched] == ["merge"] * len(launched)


class TestNumpy:
    @pytest.mark.parametrize("layout", ["bshd", "bhsd"])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_parts_give_what_all_keys_give(self, dtype, layout):
        check(fa2cupy.merge, dtype, layout)

    def test_a_sequence_of_arrays_is_merged_like_one_array(self):
        *_, o_parts, lse_parts = parts_of("float16", (0, 9, 30, 31))
        stacked = fa2cupy.merge(o_parts, lse_parts)
        for kind in (list, tuple):
            for one, other in zip(fa2cupy.merge(kind(o_parts), kind(lse_parts)), stacked, strict=True):
                np.testing.assert_array_equal(one, other)

    @pytest.mark.parametrize("shape", [(3, 4), (3, 2, 4), (2, 3, 2, 4)])
    def test_ranks(self, shape):
        rows = {2: shape[:1], 3: (2, 3), 4: (2, 2, 3)}[len(shape)]
        o, lse = fa2cupy.merge(np.ones((2, *shape)), np.zeros((2, *rows)))
        assert o.shape == shape
        np.testing.assert_allclose(o, 1)
        np.testing.assert_allclose(lse, np.full(rows, np.log(2)))

    @pytest.mark.parametrize("dtype", ["float16", "float64"])
    def test_each_part_in_turn_is_the_dominant_one(self, dtype):
        check_dominant(fa2cupy.merge, dtype)

    def test_rows_that_no_part_has_a_key_of(self):
        o, lse = fa2cupy.merge(np.full((3, 1, 2, 1, 4), np.nan), np.full((3, 1, 1, 2), -np.inf))
        assert not o.any() and (lse == -np.inf).all()

    def test_no_parts(self):
        o, lse = fa2cupy.merge(np.empty((0, 1, 2, 1, 4)), np.empty((0, 1, 1, 2)))
        assert not o.any() and (lse == -np.inf).all()

    def test_large_statistics_do_not_overflow(self):
        o, lse = fa2cupy.merge(np.array([[[1.0]], [[3.0]]]), np.array([[5000.0], [5000.0]]))
        np.testing.assert_allclose(o, [[2.0]])
        np.testing.assert_allclose(lse, [5000 + np.log(2)])

    def test_nan_is_not_lost(self):
        o, lse = fa2cupy.merge(np.ones((2, 1, 4)), np.array([[np.nan], [0.0]]))
        assert np.isnan(o).all() and np.isnan(lse).all()

    def test_out(self):
        *_, o_parts, lse_parts = parts_of("float32", (0, 9, 30))
        out = np.empty_like(o_parts[0]), np.empty_like(lse_parts[0])
        o, lse = fa2cupy.merge(o_parts, lse_parts, out=out)
        assert o is out[0] and lse is out[1]
        np.testing.assert_array_equal(o, fa2cupy.merge(o_parts, lse_parts)[0])


@pytest.mark.parametrize(
    ("o_parts", "lse_parts", "error", "text"),
    [
        (np.ones((2, 1, 3, 2, 4)), np.ones((2, 1, 3, 2)), ValueError, r"lse_parts: expected shape \(2, 1, 2, 3\)"),
        (np.ones((2, 1, 3, 2, 4)), np.ones((3, 1, 2, 3)), ValueError, r"lse_parts: expected shape \(2, 1, 2, 3\)"),
        (np.ones((2, 3, 4), "float16"), np.ones((2, 3)), TypeError, "lse_parts: expected dtype float32"),
        (np.ones((2, 3, 4), "int32"), np.ones((2, 3)), TypeError, "o_parts: expected dtype"),
        (np.ones((2, 4)), np.ones(2), ValueError, "o_parts: expected 2 or more axes of each part"),
        (np.ones(()), np.ones(2), ValueError, "o_parts: expected an axis of parts"),
        ([], [], ValueError, "o_parts: expected at least one part"),
        ([np.ones((3, 4)), np.ones((3, 5))], np.ones((2, 3)), ValueError, r"o_parts\[1\]: expected shape \(3, 4\)"),
        ([np.ones((3, 4)), None], np.ones((2, 3)), TypeError, r"o_parts\[1\]: expected a numpy.ndarray"),
        (np.ones((2, 3, 4)), None, TypeError, "lse_parts: expected a numpy.ndarray"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(o_parts, lse_parts, error, text):
    with pytest.raises(error, match=text):
        fa2cupy.merge(o_parts, lse_parts)


def test_results_may_not_overlap_parts():
    o_parts = np.ones((2, 3, 4))
    with pytest.raises(ValueError, match=r"out \(o\): overlaps o_parts"):
        fa2cupy.merge(o_parts, np.ones((2, 3)), out=(o_parts[0], None))


HIGHEST = "highest = maximum(highest, statistic[i].shift);"


@pytest.mark.simulated
class TestKernel:
    @pytest.mark.parametrize(
        ("dtype", "head_dim", "layout"),
        [
            ("float16", 64, "bshd"),
            ("bfloat16", 128, "bhsd"),
            ("float32", 59, "bshd"),
            ("float64", 32, "bhsd"),
            ("float16", 37, "bshd"),
            ("float16", 256, "bshd"),
            ("float16", 8, "bhsd"),
        ],
    )
    def test_parts_give_what_all_keys_give(self, merge_simulated, dtype, head_dim, layout):
        check(merge_simulated, dtype, layout, head_dim)

    @pytest.mark.parametrize("dtype", ["float16", "float64"])
    def test_more_parts_than_are_read_at_once(self, merge_simulated, dtype):
        check(merge_simulated, dtype, bounds=(0, 3, 7, 7, 12, 30, 30, 41, 60, 61, 75))

    @pytest.mark.parametrize("dtype", ["float16", "float64"])
    def test_each_part_in_turn_is_the_dominant_one(self, merge_simulated, dtype):
        check_dominant(merge_simulated, dtype)

    @pytest.mark.matrix
    @pytest.mark.parametrize(
        ("old", "new"),
        [
            (HIGHEST, HIGHEST.replace("[i]", "[0]")),
            (HIGHEST, "if (i + 1 < kAtOnce) " + HIGHEST),
            ("highest = maximum(highest, statistic_of(s).shift);", ";"),
            ("s = kAtOnce; s < num_parts; ++s", "s = kAtOnce; s < num_parts - 1; ++s"),
            ("int32 s = kAtOnce; s < num_parts", "int32 s = kAtOnce + 1; s < num_parts"),
            ("        read(first);\n", ""),
        ],
        ids=("first", "not the fourth", "first four", "not the last", "not the fifth", "the first four again"),
    )
    def test_a_kernel_that_forgets_a_part_is_caught(self, monkeypatch, old, new):
        def merge(o_parts, lse_parts):
            return merge_on_gpu(place(o_parts), place(lse_parts))

        with simulated_gpu(monkeypatch, patch=lambda spec, text: replace_once(spec, text, old, new)):
            with pytest.raises(AssertionError, match="Arrays are not equal|Mismatched elements"):
                check_dominant(merge, "float16")

    def test_a_late_part_with_a_large_statistic(self, merge_simulated):
        o_parts = np.repeat(np.arange(6, dtype="float32"), 8).reshape(6, 1, 1, 1, 8)
        lse_parts = np.array([0, 1, 2, 3, 4, 5000], "float32").reshape(6, 1, 1, 1)
        o, lse = merge_simulated(o_parts, lse_parts)
        assert (o == 5).all() and (lse == 5000).all()

    def test_arrays_that_are_not_contiguous(self, merge_simulated):
        *_, o_parts, lse_parts = parts_of("float16", (0, 9, 30))
        expected = fa2cupy.merge(o_parts, lse_parts)
        wide = np.full((2, *o_parts.shape[1:4], 72), np.nan, ml_dtypes.bfloat16).astype("float16")
        for start in (0, 3):  # rows aligned to 16 bytes, and not aligned
            view = place(wide)[..., start : start + 64]
            view[...] = o_parts
            o, lse = merge_on_gpu(view, place(lse_parts.swapaxes(2, 3)).swapaxes(2, 3))
            np.testing.assert_allclose(o.astype("float32"), expected[0].astype("float32"), rtol=2e-3, atol=1e-6)
            np.testing.assert_allclose(lse, expected[1], rtol=1e-6)

    def test_contiguous_parts_that_do_not_start_on_16_bytes(self, merge_simulated):
        *_, o_parts, lse_parts = parts_of("float16", (0, 9, 30))
        (o, lse), expected = merge_on_gpu(shifted(o_parts), place(lse_parts)), fa2cupy.merge(o_parts, lse_parts)
        np.testing.assert_allclose(o.astype("float32"), expected[0].astype("float32"), rtol=2e-3, atol=1e-6)
        np.testing.assert_allclose(lse, expected[1], rtol=1e-6)

    def test_rows_that_no_part_has_a_key_of(self, merge_simulated):
        o, lse = merge_simulated(np.full((3, 1, 2, 1, 8), np.nan, "float16"), np.full((3, 1, 1, 2), -np.inf, "float32"))
        assert not o.any() and (lse == -np.inf).all()

    def test_no_parts_and_no_rows(self, merge_simulated):
        o, lse = merge_simulated(np.empty((0, 1, 2, 1, 8), "float16"), np.empty((0, 1, 1, 2), "float32"))
        assert not o.any() and (lse == -np.inf).all()
        assert merge_simulated(np.empty((2, 1, 0, 1, 8)), np.empty((2, 1, 1, 0)))[0].size == 0

    def test_out(self, merge_simulated):
        *_, o_parts, lse_parts = parts_of("float32", (0, 9, 30))
        out = place(np.empty_like(o_parts[0])), place(np.empty_like(lse_parts[0]))
        o, _ = merge_simulated(o_parts, lse_parts, out=out)
        assert o.ctypes.data == out[0].ctypes.data
