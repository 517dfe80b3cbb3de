"""Functions of scores and sparse maps in calls on NumPy arrays, and the ready-made functions of fa2cupy.mods."""

from __future__ import annotations

import functools
import tracemalloc

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.feature_cases import (
    METHODS,
    ROWS,
    SIZES,
    accumulator,
    assert_bits_equal,
    assert_close,
    booleans,
    check,
    gradient_names,
    inputs_of,
    keyword,
    numbers,
    options_of,
    run,
)
from support.traced_cases import ready_made

import fa2cupy
from fa2cupy import BlockMask, TileConfig, block_mask, mods, reference
from fa2cupy.cpu import scores as cpu_scores
from fa2cupy.testing import Expectation, make_inputs

pytestmark = pytest.mark.filterwarnings("error")

TILE = TileConfig(16, 8, 1)
SHAPE = (SIZES["batch"], SIZES["num_heads"], SIZES["seqlen_q"], SIZES["seqlen_k"])
NAMES = tuple(ready_made(*SHAPE))


def case(name: str, dtype: str = "float64"):
    return ready_made(*SHAPE, wide=accumulator(dtype))[name]


def low_rank(score, b, h, q, k, x, y, scale):
    """Adds a learned bias of rank 4: takes vectors of two floating-point arrays of several axes, and a number."""
    return score * scale + np.dot(x[b, h, q], y[h, k])


def low_rank_options(dtype: str, shape: tuple = SHAPE) -> dict:
    batch, heads, rows, keys = shape
    arrays = (numbers((batch, heads, rows, 4), dtype), numbers((heads, keys, 4), dtype), numbers((), dtype))
    return {"score_mod": low_rank, "score_args": arrays}


def assert_same_output(inputs: tuple, options: dict, others: dict) -> None:
    o, wanted = (fa2cupy.forward(*inputs, **one)[0] for one in (options, others))
    np.testing.assert_allclose(o, wanted, rtol=0, atol=2e-6 if o.dtype == "float32" else 1e-13)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("divisor", [41, 49, 95])
def test_positions_at_multiples_of_a_divisor(dtype, divisor):
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 200, 1, 4)).astype(dtype) for _ in range(3))
    table, row, column = rng.standard_normal(8).astype(dtype), np.arange(200)[:, None], np.arange(200)

    def of_blocks(score, b, h, q, k, t):
        return score + t[np.floor(q / divisor).astype(int)] + t[(k / divisor).astype(int)] * (q / divisor == 1)

    bias = table[row // divisor] + table[column // divisor] * (row == divisor)
    assert_same_output((q, k, v), dict(score_mod=of_blocks, score_args=(table,)), dict(bias=bias[None, None]))
    near = {"mask_mod": lambda b, h, q, k: np.floor(q / divisor) == np.floor((k + divisor) / divisor)}
    visible = row // divisor == (column + divisor) // divisor
    assert_same_output((q, k, v), near, dict(mask=visible[None, None]))


def test_ints_of_numbers_out_of_range():
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((1, 20, 1, 4)) for _ in range(3))
    table, row, column = rng.standard_normal(8), np.arange(20)[:, None], np.arange(20)

    def clipped(score, b, h, q, k, t):
        near, far = (4.0 / abs(q - k)).astype(int), (1e10 * (q - k)).astype(int)
        return score + t[np.clip(near, 0, 7)] + t[np.clip(far, -3, 4) + 3]

    with np.errstate(divide="ignore"):
        near = np.where(row == column, 7, np.minimum(4.0 / abs(row - column), 7).astype(int))
    bias = table[near] + table[np.clip((row - column) * 10, -3, 4) + 3]
    assert_same_output((q, k, v), dict(score_mod=clipped, score_args=(table,)), dict(bias=bias[None, None]))


def test_positions_whose_sums_exceed_32_bits_are_refused():
    long = np.broadcast_to(np.zeros(8, "float32"), (1, 2**30 + 1, 1, 8))
    short = np.zeros((1, 1, 1, 8), "float32")
    with pytest.raises(fa2cupy.UnsupportedProblemError, match="^mask_mod: there may be up to 1073741824 positions"):
        fa2cupy.forward(short, long, long, mask_mod=mods.causal())
    with pytest.raises(fa2cupy.UnsupportedProblemError, match="^score_mod: there may be up to 1073741824 positions"):
        fa2cupy.forward(short, long, long, score_mod=mods.softcap(2.0))
    with pytest.raises(fa2cupy.UnsupportedProblemError, match="^mask_mod: there may be up to 1073741824 positions"):
        block_mask(mods.causal(), (), 1, 1, 1, 2**30 + 1)


# ------------------------------------------------------------------------------------------------ ready-made functions


@pytest.mark.sample(dtype=("float32",))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", NAMES)
def test_against_the_reference(name, dtype):
    check(inputs_of(dtype), config=TILE, **case(name, dtype).options)


@pytest.mark.parametrize("name", [name for name in NAMES if case(name).keyword])
def test_against_the_keyword_that_does_the_same(name):
    own = case(name)
    results = run(inputs_of(), config=TILE, **own.options)
    wanted = run(inputs_of(), config=TILE, **own.keyword)
    assert_close({one: results[one] for one in wanted}, wanted)


def plainly(mask, *arrays) -> np.ndarray:
    """Evaluates a mask element by element, in Python."""
    visible = np.zeros(SHAPE, bool)
    for b, h, q, k in np.ndindex(SHAPE):
        visible[b, h, q, k] = mask(b, h, q, k, *arrays)
    return visible


def is_neighbor(q: int, k: int, shape: tuple, kernel_size: tuple) -> bool:
    """Returns whether a key lies in the window that NATTEN gives a query: it begins or ends at a border if it must."""
    for query, key, length, size in zip(np.unravel_index(q, shape), np.unravel_index(k, shape), shape, kernel_size):
        first = max(query - size // 2, 0)
        if query + (size - 1) // 2 >= length:
            first = length - size
        if not first <= key < first + size:
            return False
    return True


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("causal", lambda b, h, q, k: k <= q + 16),
        ("sliding_window", lambda b, h, q, k: q + 16 - 9 <= k <= q + 16 + 4),
        ("dilated_window", lambda b, h, q, k: k in range(q, q - 21, -3)),
        ("neighborhood_2d", lambda b, h, q, k: max(abs(q // 7 - k // 7), abs(q % 7 - k % 7)) <= 2),
        ("neighborhood", lambda b, h, q, k: is_neighbor(q, k, (3, 5, 6), (2, 3, 5))),
        ("prefix_lm", lambda b, h, q, k, prefix: k < prefix[b] or k <= q),
        ("document", lambda b, h, q, k, ids: ids[b, q] == ids[b, k]),
    ],
)
def test_what_masks_hide(name, mask):
    own = case(name)
    visible = plainly(mask, *own.arrays)
    assert 0 < visible.mean() < 1
    assert_bits_equal(run(inputs_of(), **own.options), run(inputs_of(), mask=visible))


@pytest.mark.parametrize(
    ("shape", "kernel_size"),
    [
        ((20,), (7,)),
        ((20,), (20,)),
        ((6, 9), (3, 5)),
        ((6, 9), (6, 4)),
        ((3, 4, 5), (3, 3, 3)),
        ((2, 3, 2, 4), (1, 2, 2, 3)),
    ],
)
def test_windows_stay_inside_the_grid(shape, kernel_size):
    """Checks every pair, forward and backward, and that queries at borders see as many keys as others."""
    tokens = np.prod(shape)
    visible = np.array([[is_neighbor(q, k, shape, kernel_size) for k in range(tokens)] for q in range(tokens)])
    assert (visible.sum(axis=1) == np.prod(kernel_size)).all()
    own = {"mask_mod": mods.neighborhood(shape, kernel_size)}
    inputs = make_inputs("float64", batch=1, seqlen_q=tokens, num_heads=2, head_dim=8)
    assert_bits_equal(run(inputs, **own), run(inputs, mask=visible))
    sparse = block_mask(own["mask_mod"], (), 1, 2, tokens, tokens, tile=(8, 8))
    assert_close(run(inputs, **own, block_mask=sparse), run(inputs, mask=visible))


def test_tokens_behind_the_grid_are_hidden():
    sparse = block_mask(mods.neighborhood((3, 4), (2, 2)), (), 1, 1, 12, 20, tile=(1, 1))
    assert not sparse.states[..., 12:].any()


def t5_bucket(distance: int, num_buckets: int, max_distance: int, bidirectional: bool) -> int:
    """Returns Transformers' ``T5Attention._relative_position_bucket`` for the distance k - q."""
    bucket = 0
    if bidirectional:
        num_buckets //= 2
        bucket += (distance > 0) * num_buckets
        distance = abs(distance)
    else:
        distance = -min(distance, 0)
    exact = num_buckets // 2
    if distance < exact:
        return bucket + distance
    far = np.log(distance / exact) / np.log(max_distance / exact) * (num_buckets - exact)
    return bucket + min(exact + int(far + 1e-9), num_buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (16, 40)])
def test_t5_buckets(num_buckets, max_distance, bidirectional):
    sizes = {"batch": 1, "seqlen_q": 150, "seqlen_k": 150, "num_heads": 2, "head_dim": 4}
    table = numbers((num_buckets, 2), "float64")
    distances = np.arange(150) - np.arange(150)[:, None]
    buckets = np.vectorize(lambda d: t5_bucket(d, num_buckets, max_distance, bidirectional))(distances)
    bias = table[buckets].transpose(2, 0, 1)
    inputs = make_inputs("float64", **sizes)
    mod = mods.t5_relative(num_buckets, max_distance, bidirectional)
    results = run(inputs, score_mod=mod, score_args=(table,))
    wanted = run(inputs, bias=bias)
    dtable = np.zeros_like(table)
    np.add.at(dtable, buckets, wanted.pop("dbias").transpose(1, 2, 0))
    np.testing.assert_allclose(results.pop("dscore_args[0]"), dtable, rtol=1e-10, atol=1e-12)
    assert_close(results, wanted)


def test_the_same_numbers_give_the_same_function():
    assert mods.sliding_window(5) is mods.sliding_window(5)
    assert mods.sliding_window(5) is not mods.sliding_window(6)


# ------------------------------------------------------------------------------------------------------------ gradients


@pytest.mark.sample(dtype=("float16",))
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_arrays_of_several_axes_vectors_and_numbers(dtype):
    check(inputs_of(dtype), config=TILE, softcap=2.0, **low_rank_options(dtype))


@pytest.mark.parametrize("reference_too", [False, True])
def test_gradients_of_arrays_are_those_of_finite_differences(reference_too):
    module = reference if reference_too else fa2cupy
    q, k, v, do = inputs_of()
    options = low_rank_options("float64") | {"softcap": 3.0, "causal": True}
    function, arrays = options.pop("score_mod"), options.pop("score_args")
    dlse = numbers((2, 4, 37), "float64")

    def loss(moved: tuple) -> float:
        o, lse = module.forward(q, k, v, score_mod=function, score_args=moved, **options)
        return (o * do).sum() + (lse * dlse).sum()

    o, lse = module.forward(q, k, v, score_mod=function, score_args=arrays, **options)
    own = {"score_mod": function, "score_args": arrays, "return_dscore_args": True, "dlse": dlse}
    *_, dx, dy, dscale = module.backward(q, k, v, o, lse, do, **own, **options)
    for number, gradient in enumerate((dx, dy, dscale)):
        assert gradient.shape == arrays[number].shape
        way = numbers(gradient.shape, "float64", seed=number + 50)

        def moved(step, number=number, way=way):
            return tuple(np.asarray(x + step * way) if i == number else x for i, x in enumerate(arrays))

        finite = (loss(moved(1e-6)) - loss(moved(-1e-6))) / 2e-6
        np.testing.assert_allclose((gradient * way).sum(), finite, rtol=2e-7)


def test_gradients_of_masked_keys_are_zero_where_the_function_has_none():
    def rooted(score, b, h, q, k, t):
        return score * np.sqrt(q + 16 - k) + np.sqrt(t[h] + (q + 16 - k))

    arrays = (np.zeros(4),)
    results = run(inputs_of(), score_mod=rooted, score_args=arrays, window=(None, -1 + 1), mask=np.arange(53) < 50)
    q, k, v, do = inputs_of()
    strict = {"score_mod": rooted, "score_args": arrays, "mask_mod": lambda b, h, q, k: k < q + 16}
    o, lse = fa2cupy.forward(q, k, v, **strict)
    gradients = fa2cupy.backward(q, k, v, o, lse, do, **strict, return_dscore_args=True)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    assert not np.isfinite(results["dscore_args[0]"]).all(), "a visible key on the diagonal has an infinite derivative"


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_each_further_gradient_can_be_asked_for_alone(dtype):
    """Of a sink, a bias and the array of a function; a sink's alone raised KeyError on NumPy."""
    wide = accumulator(dtype)
    options = {"bias": numbers((20, 27), wide), "sink": numbers((4,), wide)}
    options |= {"score_mod": mods.alibi(), "score_args": (numbers((4,), wide),)}
    inputs = inputs_of(dtype, seqlen_q=20, seqlen_k=27)
    expected = Expectation(*inputs, **options)
    q, k, v, do = inputs
    o, lse = fa2cupy.forward(q, k, v, **options)
    for switch in ("return_dbias", "return_dsink", "return_dscore_args"):
        names = gradient_names(options, {switch: True})
        for method in METHODS:
            gradients = fa2cupy.backward(q, k, v, o, lse, do, **options, **{switch: True}, method=method)
            expected.check(spec=(switch, method), **dict(zip(names, gradients, strict=True)))


def test_methods_agree_and_the_gradient_has_the_dtype_of_its_array():
    options = low_rank_options("float16")
    first, second = (run(inputs_of("float32"), method=method, config=TILE, **options) for method in METHODS)
    assert_close(first, second, 1e-3)
    assert [first[f"dscore_args[{i}]"].dtype for i in range(3)] == ["float16"] * 3


def test_a_table_of_many_scores_is_summed_without_loss():
    sizes = {"batch": 1, "seqlen_q": 600, "seqlen_k": 600, "num_heads": 1, "head_dim": 8}
    q, k, v, do = make_inputs("float32", **sizes)
    own = {"score_mod": mods.t5_relative(4, 8), "score_args": (numbers((4, 1), "float32"),)}
    expected = fa2cupy.testing.Expectation(q, k, v, do, **own)
    o, lse = fa2cupy.forward(q, k, v, **own)
    *_, dtable = fa2cupy.backward(q, k, v, o, lse, do, **own, return_dscore_args=True)
    assert expected.check(**{"dscore_args[0]": dtable})["dscore_args[0]"].percent <= 100


# --------------------------------------------------------------------------------------------------------- combinations


@pytest.mark.matrix
@given(
    names=st.lists(st.sampled_from(ROWS), min_size=1, max_size=3, unique_by=keyword),
    score=st.sampled_from(["softcap", "alibi", "t5_relative", "low rank", None]),
    mask=st.sampled_from(["sliding_window", "document", "neighborhood_2d", None]),
    sparse=st.booleans(),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
    num_heads_kv=st.integers(1, 2),
    group=st.integers(1, 3),
    seqlen_q=st.integers(10, 40),
    seqlen_k=st.integers(10, 40),
    layout=st.sampled_from(["bshd", "bhsd"]),
    tile=st.builds(TileConfig, st.integers(1, 40), st.integers(1, 40), st.just(1)),
    map_tile=st.tuples(st.integers(1, 30), st.integers(1, 30)),
)
@settings(max_examples=100, deadline=None, derandomize=True, phases=[Phase.generate])
def test_combinations(names, score, mask, sparse, dtype, num_heads_kv, group, layout, tile, map_tile, **lengths):
    sizes = {"batch": 2, "num_heads": num_heads_kv * group, "num_heads_kv": num_heads_kv, "head_dim": 8, **lengths}
    shape = (2, sizes["num_heads"], lengths["seqlen_q"], lengths["seqlen_k"])
    cases = ready_made(*shape, wide=accumulator(dtype))
    options: dict = {"layout": layout}
    for name in names:
        options |= options_of(name, dtype, sizes)
    if score is not None:
        options |= low_rank_options(dtype, shape) if score == "low rank" else cases[score].options
    if mask is not None:
        options |= cases[mask].options
        if sparse:
            options["block_mask"] = block_mask(cases[mask].function, cases[mask].arrays, *shape, tile=map_tile)
    elif sparse:
        map_tile = -(-map_tile[0] // 32) * 32, -(-map_tile[1] // 16) * 16  # kernels of each dtype take such a map
        tiles = booleans((2, 1, -(-shape[2] // map_tile[0]), -(-shape[3] // map_tile[1])))
        options["block_mask"] = BlockMask(tiles, *shape[2:], map_tile)
    check(make_inputs(dtype, layout=layout, **sizes), config=tile, **options)


@pytest.mark.parametrize("method", METHODS)
def test_packed_sequences_are_those_of_each_alone(method):
    lengths_q, lengths_k = [7, 0, 20, 3], [9, 4, 16, 30]
    offsets = {
        "cu_seqlens_q": np.cumsum([0, *lengths_q], dtype="int32"),
        "cu_seqlens_k": np.cumsum([0, *lengths_k], dtype="int32"),
        "max_seqlen_q": 20,
        "max_seqlen_k": 30,
    }
    q, k, v, do = (x[0] for x in make_inputs("float64", seqlen_q=30, seqlen_k=59, num_heads=2, head_dim=8))
    ids = np.sort(np.random.default_rng(3).integers(0, 3, (4, 30)), axis=1)
    table = numbers((4, 2, 30), "float64")

    def own(score, b, h, q, k, table):
        return score * 1.5 + table[b, h, k]

    sparse = block_mask(mods.document, (ids,), 4, 2, 20, 30, tile=(4, 8))
    options = {"score_mod": own, "score_args": (table,), "mask_mod": mods.document, "mask_args": (ids,)}
    packed = {**options, **offsets, "block_mask": sparse}
    o, lse = fa2cupy.forward(q, k, v, **packed, config=TILE)
    results = fa2cupy.backward(q, k, v, o, lse, do, **packed, return_dscore_args=True, method=method, config=TILE)
    dtable = np.zeros_like(table)
    for b, (start_q, start_k) in enumerate(zip(offsets["cu_seqlens_q"], offsets["cu_seqlens_k"], strict=False)):
        if b == 4:
            break
        rows, keys = slice(start_q, start_q + lengths_q[b]), slice(start_k, start_k + lengths_k[b])
        single = options | {"score_args": (table[b : b + 1],), "mask_args": (ids[b : b + 1],)}
        alone = run((q[rows], k[keys], v[keys], do[rows]), **single)
        np.testing.assert_allclose(o[rows], alone["o"], rtol=1e-12, atol=1e-12)
        for name, result, part in zip(("dq", "dk", "dv"), results, (rows, keys, keys), strict=False):
            np.testing.assert_allclose(result[part], alone[name], rtol=1e-11, atol=1e-11)
        dtable[b] = alone["dscore_args[0]"][0]
    np.testing.assert_allclose(results[3], dtable, rtol=1e-11, atol=1e-11)


def test_lower_ranks_and_attention():
    q, k, v, do = (x[0] for x in inputs_of(batch=1))
    own = case("alibi").options
    o, backprop = fa2cupy.attention(q, k, v, **own, return_dscore_args=True)
    results = backprop(do)
    full = run(tuple(x[None] for x in (q, k, v, do)), **own)
    np.testing.assert_array_equal(o, full["o"][0])
    np.testing.assert_array_equal(results[0], full["dq"][0])
    np.testing.assert_array_equal(results[3], full["dscore_args[0]"])


def test_a_score_function_comes_ahead_of_all_other_features():
    doubled = {"score_mod": lambda score, b, h, q, k: 2 * score}
    options = {"softcap": 0.7, "alibi_slopes": np.array([0.1, 0.2, 0.3, 0.4]), "causal": True}
    scale = 16**-0.5
    assert_close(
        run(inputs_of(), softmax_scale=scale, **doubled, **options),
        run(inputs_of(), softmax_scale=2 * scale, **options),
    )


# ---------------------------------------------------------------------------------------------------------- sparse maps


def evaluated_elements(monkeypatch) -> list[int]:
    """Records the sizes of the tiles for which mask functions are evaluated."""
    sizes: list[int] = []
    evaluation = cpu_scores.TileEvaluation

    def counted(program, arguments, dtype, queries, keys, **inputs):
        if program.role == "mask_mod":
            heads = np.size(inputs["h"])
            sizes.append(heads * (queries.stop - queries.start) * (keys.stop - keys.start))
        return evaluation(program, arguments, dtype, queries, keys, **inputs)

    monkeypatch.setattr(cpu_scores, "TileEvaluation", counted)
    return sizes


@pytest.mark.sample(tile=((5, 7),))
@pytest.mark.parametrize("name", [name for name in NAMES if case(name).role == "mask_mod"])
@pytest.mark.parametrize("tile", [(16, 8), (5, 7), (37, 53), (64, 128)])
def test_a_map_changes_no_result(name, tile):
    own = case(name)
    sparse = block_mask(own.function, own.arrays, *SHAPE, tile=tile)
    assert_close(
        run(inputs_of(), config=TILE, **own.options, block_mask=sparse), run(inputs_of(), config=TILE, **own.options)
    )


def test_full_tiles_do_not_evaluate_the_function_and_empty_ones_are_not_read(monkeypatch):
    sizes = {"batch": 1, "seqlen_q": 64, "seqlen_k": 64, "num_heads": 1, "head_dim": 8}
    ids = np.repeat([0, 1], [32, 32])[None]
    sparse = block_mask(mods.document, (ids,), 1, 1, 64, 64, tile=(16, 16))
    q, k, v, _ = make_inputs("float64", **sizes)
    k[:, 32:] = np.nan  # not read by the first document's queries
    v[:, 32:] = np.nan
    evaluated = evaluated_elements(monkeypatch)
    own = {"mask_mod": mods.document, "mask_args": (ids,), "block_mask": sparse}
    o, _ = fa2cupy.forward(q, k, v, config=TileConfig(16, 16, 1), **own)
    assert not evaluated
    assert np.isfinite(o[:, :32]).all()
    causal = mods.causal()
    own = {"mask_mod": causal, "block_mask": block_mask(causal, (), 1, 1, 64, 64, tile=(16, 16))}
    fa2cupy.forward(q, k, v, config=TileConfig(16, 16, 1), **own)
    assert evaluated == [256] * 4, "the tiles on the diagonal"


def test_maps_of_tiles_are_masks():
    tiles = booleans((2, 4, 5, 7))
    sparse = BlockMask(tiles, 37, 53, (8, 8))
    mask = np.repeat(np.repeat(tiles, 8, axis=2), 8, axis=3)[:, :, :37, :53]
    assert_bits_equal(run(inputs_of(), config=TILE, block_mask=sparse), run(inputs_of(), config=TILE, mask=mask))
    with_function = run(inputs_of(), config=TILE, block_mask=sparse, mask_mod=mods.causal(16))
    assert_close(with_function, run(inputs_of(), config=TILE, mask=mask, causal=True))
    for shape in ((1, 4), (2, 1), ()):
        part = tiles[: shape[0], : shape[1]] if shape else tiles[0, 0]
        own = run(inputs_of(), config=TILE, block_mask=BlockMask(part, 37, 53, (8, 8)))
        whole = np.broadcast_to(part, tiles.shape)
        wanted = run(inputs_of(), config=TILE, block_mask=BlockMask(whole, 37, 53, (8, 8)))
        assert_bits_equal(own, wanted)


def test_an_array_that_changes_later_changes_no_map():
    """Checks calls with a map whose array was written over, so that full and empty tiles are others now."""
    ids = np.repeat([0, 1, 2], [20, 9, 24])[None].repeat(2, axis=0)
    own = {"mask_mod": mods.document, "mask_args": (ids,)}
    sparse = block_mask(mods.document, (ids,), *SHAPE, tile=(8, 8))
    wanted = run(inputs_of(), config=TILE, **own, block_mask=sparse)
    assert_close(wanted, run(inputs_of(), config=TILE, **own))
    ids[...] = np.arange(53) // 3
    assert_bits_equal(run(inputs_of(), config=TILE, **own, block_mask=sparse), wanted)
    q, k, v, do = inputs_of()
    o, backprop = fa2cupy.attention(q, k, v, config=TILE, **own, block_mask=sparse)
    ids[...] = 0
    assert_bits_equal({"o": o, "dq": backprop(do)[0]}, {name: wanted[name] for name in ("o", "dq")})
    np.testing.assert_allclose(reference.forward(q, k, v, **own, block_mask=sparse)[0], o, atol=1e-5)


@pytest.mark.parametrize("function", [{}, {"mask_mod": mods.document}], ids=("none", "the map's"))
def test_a_map_has_its_arrays(function):
    """Checks calls without arrays, with the map's copies, and with another view of the array that was copied."""
    own = case("document")
    sparse = block_mask(mods.document, own.arrays, *SHAPE, tile=(8, 8))
    wanted = run(inputs_of(), config=TILE, **own.options, block_mask=sparse)
    assert sparse.arguments[0] is not own.arrays[0]
    for arrays in ({}, {"mask_args": ()}, {"mask_args": sparse.arguments}, {"mask_args": [own.arrays[0][:]]}):
        assert_bits_equal(run(inputs_of(), config=TILE, **function, **arrays, block_mask=sparse), wanted)
        np.testing.assert_allclose(
            reference.forward(*inputs_of()[:3], **function, **arrays, block_mask=sparse)[0], wanted["o"], atol=1e-5
        )


def test_a_map_of_other_arrays_is_refused():
    ids, same = (np.repeat([0, 1, 2], [20, 9, 24])[None].repeat(2, axis=0) for _ in range(2))
    sparse = block_mask(mods.document, (ids,), *SHAPE, tile=(8, 8))
    q, k, v, do = inputs_of()
    o, lse = fa2cupy.forward(q, k, v, mask_mod=mods.document, mask_args=(ids,), block_mask=sparse)
    for other in (same, ids[::-1], ids[:, ::-1], ids.view("uint64")):
        own = {"mask_mod": mods.document, "mask_args": (other,), "block_mask": sparse}
        for call in (
            functools.partial(fa2cupy.forward, q, k, v),
            functools.partial(fa2cupy.backward, q, k, v, o, lse, do),
            functools.partial(fa2cupy.attention, q, k, v),
            functools.partial(fa2cupy.jvp, q, k, v, q, k, v),
            functools.partial(reference.forward, q, k, v),
        ):
            with pytest.raises(ValueError, match=r"^mask_args\[0\]: block_mask was made from another array"):
                call(**own)
    with pytest.raises(TypeError, match=r"^mask_args\[0\]: expected .* list"):
        fa2cupy.forward(q, k, v, mask_mod=mods.document, mask_args=(ids.tolist(),), block_mask=sparse)


def test_the_states_of_tiles():
    own = case("document")
    visible = own.arrays[0][:, :37, None] == own.arrays[0][:, None, :53]
    sparse = block_mask(mods.document, own.arrays, *SHAPE, tile=(8, 16))
    assert sparse.shape == (2, 1, 5, 4), "one row of tiles for all heads"
    states = np.concatenate([sparse.part(b, slice(0, 1)) for b in range(2)])
    for b, i, j in np.ndindex(2, 5, 4):
        tile = visible[b, 8 * i : 8 * i + 8, 16 * j : 16 * j + 16]
        assert states[b, i, j] == (2 if tile.all() else 1 if tile.any() else 0)
    assert sparse.density == (states > 0).mean()
    assert sparse.has_mixed_tiles
    for full, wanted in ((True, states == 2), (False, states == 1)):
        for side, table in (("queries", wanted), ("keys", wanted.swapaxes(1, 2))):
            offsets, indices = sparse.lists(side, full)
            assert offsets.shape == (2, 1, table.shape[1] + 1)
            for b, i in np.ndindex(table.shape[:2]):
                listed = indices[offsets[b, 0, i] : offsets[b, 0, i + 1]]
                assert listed.tolist() == np.flatnonzero(table[b, i]).tolist()


@pytest.mark.parametrize(("place", "state"), [((5, 7), 1), ((7, 0), 1), ((9, 3), 2)])
def test_one_element_makes_a_tile_mixed(place, state):
    row, column = place
    hidden = block_mask(lambda b, h, q, k: (q != row) | (k != column), (), 1, 1, 11, 13, tile=(8, 8))
    visible = block_mask(lambda b, h, q, k: (q == row) & (k == column), (), 1, 1, 11, 13, tile=(8, 8))
    assert hidden.part(0, slice(0, 1))[0, 0, 0] == state
    assert visible.part(0, slice(0, 1))[0, 0, 0] == state % 2
    assert hidden.density == 1
    assert visible.density == 1 / 4


def test_a_map_of_many_tiles_takes_no_memory_for_the_mask():
    tracemalloc.start()
    sparse = block_mask(mods.sliding_window(300), (), 3, 5, 8192, 8192)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sparse.shape == (1, 1, 64, 64)
    assert peak < 8192 * 8192 / 2, "half of a mask of bools"
    assert sparse.density == pytest.approx((64 + 63 + 62 + 61) / 64**2)


def test_what_a_map_shows():
    text = str(block_mask(mods.sliding_window(300), (), 1, 8, 640, 512))
    assert text.splitlines() == [
        "BlockMask 640 x 512 in tiles of 128 x 128, density 0.65",
        "+", "#+", "+#+", "++#+", " ++#",
    ]  # fmt: skip
    frames = block_mask(lambda b, h, q, k: q // 30 >= k // 30, (), 1, 1, 40, 40)
    assert repr(frames).endswith("density 1.00, intervals of rows and columns>")
    two = block_mask(lambda b, h, q, k: (k == q) | (k // 9 == 0) | (q > 30) & (k == 20), (), 1, 1, 40, 40)
    assert repr(two).endswith("density 1.00, intervals of columns>")
    assert repr(block_mask(lambda b, h, q, k: (q - k) % 2 == 0, (), 1, 1, 40, 40)).endswith("density 1.00>")
    assert repr(BlockMask(np.zeros((1, 1), bool), 3, 3)) == "<BlockMask 3 x 3 in tiles of 128 x 128, density 0.00>"
    large = str(block_mask(mods.causal(), (), 1, 1, 5000, 5000, tile=(10, 10))).splitlines()
    assert len(large) == 1 + 32
    assert {len(line) for line in large[1:]} == set(range(1, 33))
    assert str(BlockMask(np.zeros((0, 0), bool), 0, 0)).endswith("density 0.00")


def test_a_map_is_drawn():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    axes = block_mask(mods.causal(), (), 1, 1, 512, 512).plot()
    assert axes.get_images()[0].get_array().shape == (4, 4)
    assert axes.get_xlabel() == "key"
    matplotlib.pyplot.close(axes.figure)


# ------------------------------------------------------------------------------------------------------------ refusals


def zeros(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.zeros(shape, dtype)


CAUSAL_MAP = block_mask(mods.causal(), (), 2, 4, 37, 53)
WRONG = {
    "branch": ({"mask_mod": lambda b, h, q, k: q if q > k else k}, TypeError, "^mask_mod: a symbol has no truth value"),
    "mask args alone": ({"mask_args": (zeros(4),)}, ValueError, "^mask_args: there is no mask_mod"),
    "args None": ({"mask_mod": mods.prefix_lm, "mask_args": None}, TypeError, "^mask_args: expected a tuple of arr"),
    "args dtype": (
        {"score_mod": mods.alibi(), "score_args": (zeros(4, dtype="complex64"),)}, TypeError,
        r"^score_args\[0\]: expected bools, ints, or floats of dtype float16, .* got complex64",
    ),
    "args range": (
        {"mask_mod": mods.prefix_lm, "mask_args": (np.array([0, 2**31]),)}, ValueError,
        r"^mask_args\[0\]: functions have ints of 32 bits, and an element has more",
    ),
    "args shape": (
        {"mask_mod": mods.document, "mask_args": (zeros(2, 37, dtype="int32"),)}, IndexError,
        r"^mask_args\[0\]: index 52 is outside of axis 1 of shape \(2, 37\) .*return ids",
    ),
    "map lengths": (
        {"block_mask": BlockMask(zeros(1, 1, dtype="bool"), 37, 54)}, ValueError,
        "^block_mask: expected a map for 37 queries and 53 keys, got one for 37 and 54",
    ),
    "map heads": (
        {"block_mask": BlockMask(zeros(1, 3, 1, 1, dtype="bool"), 37, 53)}, ValueError,
        "^block_mask: expected a map for heads of 4, or of 1 for all, got one for 3",
    ),
    "map batch": (
        {"block_mask": BlockMask(zeros(3, 1, 1, 1, dtype="bool"), 37, 53)}, ValueError,
        "^block_mask: expected a map for batch of 2, or of 1 for all, got one for 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_bad_input(name):
    options, error, match = WRONG[name]
    q, k, v, do = inputs_of("float32")
    o, lse = fa2cupy.forward(q, k, v)
    untouched = name != "args shape"  # found only during the computation
    for call in (
        lambda out: fa2cupy.forward(q, k, v, **options, out=out[:2]),
        lambda out: fa2cupy.backward(q, k, v, o, lse, do, **options, out=(out[0], *out[2:])),
        lambda out: reference.forward(q, k, v, **options),
    ):
        out = tuple(np.full_like(array, 7) for array in (q, lse, k, v))
        with pytest.raises(error, match=match) as caught:
            call(out)
        assert caught.type is error
        assert not untouched or all((array == 7).all() for array in out)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({}, ValueError, "^return_dscore_args: there is no score_mod"),
        ({"score_mod": mods.softcap(2.0)}, ValueError, "^return_dscore_args: score_args has no floating-point array"),
        (
            {"score_mod": mods.alibi(), "score_args": (zeros(4),), "return_dscore_args": 1}, TypeError,
            "^return_dscore_args: expected a bool, got int",
        ),
    ],
)  # fmt: skip
def test_gradients_that_there_are_none_of(options, error, match):
    q, k, v, do = inputs_of("float32")
    o, lse = fa2cupy.forward(q, k, v)
    with pytest.raises(error, match=match):
        fa2cupy.backward(q, k, v, o, lse, do, **{"return_dscore_args": True} | options)
    with pytest.raises(error, match=match):
        fa2cupy.attention(q, k, v, **{"return_dscore_args": True} | options)


def test_results_do_not_overlap_arrays_of_functions():
    q, k, v, do = inputs_of("float32")
    slopes = zeros(4)
    own = {"score_mod": mods.alibi(), "score_args": (slopes,), "return_dscore_args": True}
    o, lse = fa2cupy.forward(q, k, v, score_mod=mods.alibi(), score_args=(slopes,))
    with pytest.raises(ValueError, match=r"^out \(dscore_args\[0\]\): overlaps score_args\[0\] in memory"):
        fa2cupy.backward(q, k, v, o, lse, do, **own, out=(None, None, None, slopes))
    with pytest.raises(TypeError, match=r"^out: expected a tuple \(dq, dk, dv, dscore_args\[0\]\) of arrays or None"):
        fa2cupy.backward(q, k, v, o, lse, do, **own, out=(None, None, None))


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (
            lambda: block_mask(mods.prefix_lm, (zeros(0, dtype="int32"),), 1, 1, 8, 8), ValueError,
            r"^mask_args\[0\]: expected at least one element",
        ),
        (lambda: BlockMask(zeros(1, 1, dtype="bool"), 3, -3), ValueError, "^seqlen_k: expected at least 0, got -3"),
        (lambda: CAUSAL_MAP.lists("rows", True), ValueError, "^side: expected 'queries' or 'keys', got 'rows'"),
    ],
)  # fmt: skip
def test_maps_that_cannot_be_made(make, error, match):
    with pytest.raises(error, match=match):
        make()
