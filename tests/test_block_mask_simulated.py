"""Sparse maps on a simulated GPU: the kernel that makes them, the lists, and the kernels that follow the lists."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

pytest.importorskip("cupy")

import ptxsim
from support.fake_cupy import place
from support.fake_gpu import backward, forward
from support.feature_cases import extras, gradient_names, numbers
from support.launch_record import Launch, memory_at
from support.simulated_problems import leave_out
from support.simulator import simulated_gpu
from support.traced_cases import by_function, on_gpu, ready_made

import fa2cupy
from fa2cupy import BlockMask, TileConfig, UnsupportedProblemError, mods
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.operations import TILED
from fa2cupy.gpu import calls
from fa2cupy.problem import block_mask
from fa2cupy.problem.block_mask import EMPTY, FULL, MIXED
from fa2cupy.testing import Expectation, make_inputs

pytestmark = pytest.mark.simulated

METHODS = ("single_pass", "two_pass")
BY_ROWS, BY_KEYS = TileConfig(32, 32, 2, 2), TileConfig(32, 32, 4, 2)
#: Small tiles by family; `LENGTHS` has sizes of scores with several of them.
TILES = {
    "simt": TileConfig(8, 8, 2),
    "sm80": {"forward": BY_ROWS, "backward_dq": BY_ROWS, "backward": BY_KEYS, "backward_dkdv": BY_KEYS},
    "sm90": {
        "forward": TileConfig(64, 64, 8, 2, 2), "backward_dq": TileConfig(64, 64, 8, 2, 2),
        "backward": TileConfig(128, 128, 12, 2), "backward_dkdv": TileConfig(64, 128, 12, 2),
    },
}  # fmt: skip
#: A tile of sm80 with more columns per lane than are evaluated at once.
WIDE = TileConfig(64, 64, 4)
LENGTHS = {"simt": (29, 37), "sm80": (90, 100), "sm90": (270, 290)}
DTYPES = {"simt": "float32", "sm80": "float16", "sm90": "bfloat16"}
#: A device with so few multiprocessors that a block takes several query tiles.
FEW = dataclasses.replace(DeviceInfo.named("sm_90"), multiprocessors=3)
HEADS = 4  # query heads, for two key heads
before_hopper = pytest.mark.sample(family=("simt", "sm80"))


@pytest.fixture
def launched(monkeypatch):
    with simulated_gpu(monkeypatch, FEW) as stages:
        yield stages


def shape_of(family: str) -> tuple[int, int, int, int]:
    return 2, HEADS, *LENGTHS[family]


def documents(family: str) -> np.ndarray:
    """Returns the document of each position; the last document has one key and no query."""
    longest = max(LENGTHS[family])
    ids = np.sort(np.random.default_rng(3).integers(0, 3, (2, longest)), axis=1)
    ids[:, LENGTHS[family][1] - 1 :] = 7
    return ids


def check(launched: list, family: str, *, methods=METHODS, inputs=None, num_splits=1, tiles=None, **options) -> None:
    """Checks all results of calls with a map, and that kernels of the family compute them, by its intervals if any."""
    rows, keys = LENGTHS[family]
    earlier = len(launched)
    sizes = {"batch": 2, "seqlen_q": rows, "seqlen_k": keys, "num_heads": HEADS, "num_heads_kv": 2, "head_dim": 24}
    inputs = inputs or make_inputs(DTYPES[family], **(sizes | ({"head_dim": 64} if family == "sm90" else {})))
    expected = Expectation(*inputs, **options)
    q, k, v, do = map(place, inputs)
    own = {**on_gpu(options), "config": tiles or TILES[family], "family": family}
    if family != "simt":
        own["num_splits"] = num_splits
    o, lse = forward(q, k, v, **own)
    expected.check(o=o, lse=lse)
    switches, names = extras(options), gradient_names(options)
    for method in methods:
        gradients = backward(q, k, v, o, lse, do, method=method, **own)
        expected.check(spec=method, **dict(zip(names[:3], gradients, strict=True)))
        if switches and method == "two_pass":
            gradients = backward(q, k, v, o, lse, do, method=method, **own, **switches)
            expected.check(spec=method, **dict(zip(names, gradients, strict=True)))
    specs = [stage.spec for stage in launched[earlier:] if stage.spec.operation in TILED]
    assert {spec.family_name for spec in specs} == {family}
    assert all("block_mask" in spec.features for spec in specs)
    intervals = options["block_mask"].layout.intervals
    for spec in specs:
        assert ("intervals" in spec.features) == intervals[spec.owns_keys]
        assert not (intervals[spec.owns_keys] and "mask_mod" in spec.features)


# ---------------------------------------------------------------------------------------------------------------- maps


#: Ready-made functions that kernels evaluate at least as fast as they compare intervals.
CHEAP = ("causal", "sliding_window", "dilated_window", "prefix_lm")


@pytest.mark.sample(tile=((16, 40), (5, 7)))
@pytest.mark.parametrize("tile", [(8, 8), (16, 40), (5, 7), (128, 128)])
@pytest.mark.parametrize("name", [name for name, case in ready_made(1, 1, 1, 1).items() if case.role == "mask_mod"])
def test_maps_are_those_of_numpy(launched, name, tile):
    case = ready_made(2, 3, 21, 75)[name]
    wanted = fa2cupy.block_mask(case.function, case.arrays, 2, 3, 21, 75, tile=tile)
    like = place(np.empty(1, "float32"))
    found = fa2cupy.block_mask(case.function, tuple(map(place, case.arrays)), 2, 3, 21, 75, tile=tile, like=like)
    np.testing.assert_array_equal(found.states, wanted.states)
    assert (found.layout, found.density, str(found)) == (wanted.layout, wanted.density, str(wanted))
    for own, other in zip(found.intervals, wanted.intervals, strict=True):
        np.testing.assert_array_equal(own, other)
    operations = ["tile_states"] if name in CHEAP else ["tile_states", "close_intervals"]
    assert [stage.spec.operation for stage in launched] == operations


def ends_of(visible: np.ndarray) -> np.ndarray | None:
    """Returns begin and end of up to two intervals in each row, or None if some row has more."""
    ends = np.zeros((len(visible), 4), int)
    for row, seen in enumerate(visible):
        (edges,) = np.nonzero(np.diff([False, *seen, False]))
        if len(edges) > 4:
            return None
        ends[row, : len(edges)] = edges
    return ends


def of_table(b, h, q, k, table):
    """A function with an element for each pair."""
    return table[h, q, k]


def tables_of_intervals(lengths: tuple[int, int]) -> dict[str, np.ndarray]:
    """Returns masks of two heads by what they show; all but the last have at most two intervals along some side."""
    rows, keys = (np.arange(n) for n in lengths)
    q, k = rows[:, None], keys
    rng = np.random.default_rng(7)
    begin, middle, end = (rng.integers(0, lengths[1] // 3 + 1, (lengths[0], 1)) + i * lengths[1] // 3 for i in range(3))
    two = (k < begin) | (k >= middle) & (k < end)
    odd = np.zeros(lengths, bool)
    odd[lengths[0] // 2, ::2] = True
    tables = {
        "two intervals in a row": two,
        "rows that begin at the first key or end at the last": (k >= middle) | (k < begin) & (q % 3 > 0),
        "nothing and everything": np.broadcast_to(q % 5 < 2, lengths),
        "one key": q == k,
        "a window": (k <= q + 9) & (k >= q - 4),
        "a prefix": (k <= q - 3) | (k < lengths[1] // 4),
        "two in rows, one in columns": (k < 3) & (q >= 3) | (abs(q - k) < 2) & (k >= 5),
        "three in one row": odd,
    }
    return {name: np.stack([table, np.roll(table, 1, axis=0)]) for name, table in tables.items()}


def check_intervals(table: np.ndarray, tile: tuple[int, int], like=place) -> BlockMask:
    """Checks the intervals of a map on the GPU, and of one on NumPy arrays, against those of the table."""
    wanted = [[ends_of(one) for one in side] for side in (table, table.swapaxes(1, 2))]
    for given in (table, like(table)):
        made = fa2cupy.block_mask(of_table, (given,), 1, *table.shape, tile=tile)
        for found, own in zip(made.intervals, wanted, strict=True):
            if any(one is None for one in own):
                assert found is None
            else:
                np.testing.assert_array_equal(found, [own])
    return made


@pytest.mark.sample(tile=((128, 128), (12, 33)))
@pytest.mark.parametrize("tile", [(8, 8), (16, 40), (12, 33), (128, 128)])
@pytest.mark.parametrize("name", tables_of_intervals((1, 1)))
def test_intervals(launched, name, tile):
    check_intervals(tables_of_intervals((37, 90))[name], tile)


def test_intervals_of_long_rows(launched):
    """Checks tiles of more keys than a warp evaluates at a time, and of more queries."""
    check_intervals(tables_of_intervals((140, 150))["two intervals in a row"], (140, 140))


def test_a_third_interval_is_found_across_tiles():
    """Checks intervals of which no tile has three: between tiles, and at their borders."""
    for places in ((0, 8, 16), (7, 9, 40), (7, 16, 31), (0, 15, 44)):
        table = np.zeros((1, 3, 45), bool)
        table[0, 1, list(places)] = True
        assert fa2cupy.block_mask(of_table, (table,), 1, 1, 3, 45, tile=(4, 8)).intervals.rows is None


def by_pairs(diagonal: int):
    """Returns a causal function of pairs of positions: a part of each position is a division."""
    return lambda b, h, q, k: k // 2 <= (q + diagonal) // 2


def windows(b, h, q, k):
    """Two windows: no part costs more than an addition, but there are many."""
    one = (k <= q + 3) & (k >= q - 3) & (k != 90) & (q != 91)
    return one | (k <= q + 40) & (k >= q + 30) & (k != 92) & (q != 93)


@pytest.mark.parametrize(
    ("function", "arrays", "keeps"),
    [
        (mods.causal(3), (), True),
        (mods.sliding_window(9, 4), (), True),
        (mods.prefix_lm, (np.array([7, 0]),), True),
        (lambda b, h, q, k, ends: k < ends[b, h] + q, (np.arange(6).reshape(2, 3),), True),
        (windows, (), False),
        (by_pairs(3), (), False),
        (lambda b, h, q, k: k <= 0.3 * q / (b + 1), (), False),
        (mods.document, (np.repeat([0, 1, 2], [9, 2, 30])[None].repeat(2, axis=0),), False),
        (lambda b, h, q, k, ends: k < ends[q], (np.arange(30),), False),
    ],
)  # fmt: skip
def test_functions_as_fast_as_intervals_are_kept(launched, function, arrays, keeps):
    for xp_array in (np.asarray, place):
        own, like = tuple(map(xp_array, arrays)), xp_array(np.empty(1))
        made = fa2cupy.block_mask(function, own, 2, 3, 30, 41, like=like)
        assert made.layout.intervals == (not keeps, not keeps)
    assert [stage.spec.operation for stage in launched] == ["tile_states", "close_intervals"][: 1 if keeps else 2]


def test_large_intervals_are_not_kept(launched, monkeypatch):
    monkeypatch.setattr(block_mask, "_LARGEST_INTERVALS", 16 * 66)
    like = place(np.empty(1, "float32"))
    for own in (None, like):
        assert fa2cupy.block_mask(by_pairs(0), (), 1, 1, 33, 33, like=own).layout.intervals == (True, True)
        assert fa2cupy.block_mask(by_pairs(0), (), 1, 1, 33, 34, like=own).layout.intervals == (False, False)


def test_captured_maps_keep_the_function(launched, monkeypatch):
    monkeypatch.setattr(calls, "is_captured", lambda array: True)
    ids = place(documents("simt"))
    sparse = fa2cupy.block_mask(mods.document, (ids,), *shape_of("simt"), tile=(8, 8))
    assert sparse.layout.intervals == (False, False)
    assert [stage.spec.operation for stage in launched] == ["tile_states"]


def test_one_element_decides(launched):
    """Checks the first and the last element of a tile, and of a tile that is cut by the end of the sequence."""
    like = place(np.empty(1, "float32"))
    for row, column in ((0, 0), (7, 32), (10, 33), (10, 65), (8, 33)):
        for hides in (False, True):

            def one(b, h, q, k, at, hides=hides):
                is_one = (q == at[0]) & (k == at[1])
                return ~is_one if hides else is_one

            where = (place(np.array([row, column], "int32")),)
            states = fa2cupy.block_mask(one, where, 1, 1, 11, 66, tile=(8, 33), like=like).states[0, 0]
            wanted = np.full(states.shape, FULL if hides else EMPTY)
            wanted[row // 8, column // 33] = MIXED
            np.testing.assert_array_equal(states, wanted)


def test_empty_maps_launch_nothing(launched):
    ids = place(np.zeros((1, 4), "int32"))
    assert fa2cupy.block_mask(mods.document, (ids,), 1, 1, 0, 4).shape == (1, 1, 0, 1)
    assert not launched


def test_an_array_that_changes_later_changes_no_map(launched):
    """Checks calls of one signature: with the map's array written over, without it, and with another one."""
    ids = documents("simt")
    sparse = fa2cupy.block_mask(mods.document, (place(ids),), *shape_of("simt"), tile=(8, 8))
    (copy,), array = sparse.arguments, sparse._copied[0]
    assert not np.shares_memory(copy, array)
    q, k, v, _ = make_inputs("float32", batch=2, seqlen_q=29, seqlen_k=37, num_heads=HEADS, head_dim=8)
    expected = Expectation(q, k, v, mask_mod=mods.document, mask_args=(ids,))
    q, k, v = map(place, (q, k, v))
    own = {"mask_mod": mods.document, "block_mask": sparse, "config": TILES["simt"], "family": "simt"}
    for arrays in ((array,), (), (copy,), (array[:],)):
        o, lse = forward(q, k, v, **own, mask_args=arrays)
        expected.check(o=o, lse=lse)
        array[...] = np.arange(37) // 3
    with pytest.raises(ValueError, match=r"^mask_args\[0\]: block_mask was made from another array"):
        forward(q, k, v, **own, mask_args=(place(ids),))


# --------------------------------------------------------------------------------------------------------------- lists


def lists_of(states: np.ndarray, visible, b_r: int, b_c: int, tile: tuple, lengths: tuple) -> dict:
    """Returns the state of each pair of a kernel's tiles, from states of the map and the visible pairs of a band."""
    rows, columns = (-(-n // size) for n, size in zip(lengths, (b_r, b_c), strict=True))
    found = {}
    for i in range(rows):
        for j in range(columns):
            q = np.arange(i * b_r, min((i + 1) * b_r, lengths[0]))
            k = np.arange(j * b_c, min((j + 1) * b_c, lengths[1]))
            own = states[np.ix_(np.unique(q // tile[0]), np.unique(k // tile[1]))]
            band = visible(q[:, None], k)
            whole = own.min() == FULL and band.all() and len(k) == b_c
            found[i, j] = EMPTY if own.max() == EMPTY or not band.any() else FULL if whole else MIXED
    return found


def check_lists(monkeypatch, options: dict, tile: tuple, patch=None) -> None:
    """Checks all entries of lists, in order: full key tiles before mixed ones, mixed query tiles before full ones.

    Tiles with the longest lists are scheduled first, and those with lists of one length in ascending order.
    """
    written = {}

    def keep(launch: Launch) -> None:
        if launch.spec.operation in ("order_keys", "order_queries"):
            (name,) = launch.spec.params.pointers
            values = launch.values
            shape = (values["num_lists"] // values["list_tiles"], values["list_tiles"], values["list_stride"])
            written[name] = memory_at(launch.pointers[name], shape, None, np.dtype("int32")).copy()

    lengths, group = (45, 53), 2
    rng = np.random.default_rng(1)
    rows, columns = (-(-n // size) for n, size in zip(lengths, tile, strict=True))
    states = rng.integers(0, 3, (1, 4, rows, columns)).astype("uint8")
    states[0, 1, 0], states[0, :, :, 1], states[0, 2] = EMPTY, EMPTY, EMPTY
    program = fa2cupy.block_mask(mods.causal(), (), 1, 1, 1, 1).program
    sparse = BlockMask.of_states(place(states), *lengths, tile, program)
    config = {"backward_dq": TileConfig(16, 8, 2), "backward_dkdv": TileConfig(8, 16, 2)}
    q, k, v, do = map(place, make_inputs("float32", seqlen_q=45, seqlen_k=53, num_heads=4, num_heads_kv=2, head_dim=8))
    lse = place(np.zeros((1, 4, 45), "float32"))
    own = {"block_mask": sparse, "mask_mod": mods.causal(), "method": "two_pass", "config": config, **options}
    leave_out(monkeypatch, "delta", "backward_dq", "backward_dkdv")
    with simulated_gpu(monkeypatch, after=keep, patch=patch):
        backward(q, k, v, q.copy(), lse, do, **own)
    diagonal = lengths[1] - lengths[0]
    left, right = options.get("window", (99, 0 if options else 99))

    def visible(query, key):
        return (key <= query + diagonal + right) & (key >= query + diagonal - left)

    for head in range(4):
        of_pairs = lists_of(states[0, head], visible, 16, 8, tile, lengths)
        for i in range(3):
            row = [of_pairs[i, j] for j in range(7)]
            full, mixed = ([j for j, state in enumerate(row) if state == kind] for kind in (FULL, MIXED))
            own = written["key_lists"][head, i]
            assert own[:2].tolist() == [len(full), len(full + mixed)]
            assert own[3 : 4 + own[1]].tolist() == [*full, *mixed, 7]
    for head in range(2):
        of_heads = [lists_of(states[0, group * head + g], visible, 8, 16, tile, lengths) for g in range(group)]
        for j in range(4):
            column = [(g << 24 | i, of_heads[g][i, j]) for g in range(group) for i in range(6)]
            mixed, full = ([entry for entry, state in column if state == kind] for kind in (MIXED, FULL))
            own = written["query_lists"][head, j]
            assert own[:2].tolist() == [len(mixed), len(full + mixed)]
            assert own[3 : 4 + own[1]].tolist() == [*mixed, *full, 6]
    for lists in written.values():
        for lengths_of_head, scheduled in zip(lists[..., 1], lists[..., 2], strict=True):
            assert scheduled.tolist() == np.argsort(-lengths_of_head, kind="stable").tolist()
    assert any((np.diff(lists[..., 2]) < 0).any() for lists in written.values()), "some tile comes earlier"


@pytest.mark.sample(tile=((12, 20),))
@pytest.mark.parametrize("tile", [(8, 8), (32, 16), (12, 20)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (9, 4)}])
def test_lists(monkeypatch, options, tile):
    check_lists(monkeypatch, options, tile)


# --------------------------------------------------------------------------------------------------------------- calls


@pytest.mark.matrix
@pytest.mark.parametrize("band", [{}, {"causal": True}, {"window": (40, 3)}])
@pytest.mark.parametrize("family", TILES)
@pytest.mark.parametrize("reads", [lambda sparse: sparse, by_function], ids=["intervals", "function"])
def test_maps_of_functions(launched, family, band, reads):
    own = {"mask_mod": mods.document, "mask_args": (documents(family),)}
    sparse = reads(fa2cupy.block_mask(mods.document, own["mask_args"], *shape_of(family), tile=(32, 64)))
    check(launched, family, **own, block_mask=sparse, **band)


def halves(b, h, q, k, sizes):
    """Block diffusion by blocks of several sizes: two intervals in rows and columns. The first queries see no key."""
    n, size = sizes[0, 0], sizes[1 + b, h]
    of_query, of_key = q % n // size, k % n // size
    noisy = (q < n) & (k < n) & (of_query == of_key)
    return (q > 3) & (noisy | (k >= n) & ((q < n) & (of_query > of_key) | (q >= n) & (of_query >= of_key)))


def by_ends(b, h, q, k, ends):
    """Two intervals of keys for each query, and many of queries for a key."""
    own = [ends[b % 2, h, q % 29, i] for i in range(4)]
    return (own[0] <= k) & (k < own[1]) | (own[2] <= k) & (k < own[3])


def by_ends_of_keys(b, h, q, k, ends):
    """The same with queries and keys exchanged."""
    return by_ends(b, h, k, q, ends)


def ends_for(function, family: str) -> tuple:
    longest, rng = max(LENGTHS[family]), np.random.default_rng(5)
    if function is halves:
        return (np.concatenate([np.full((1, HEADS), -(-longest // 2)), rng.integers(5, 30, (2, HEADS))]),)
    return (np.sort(rng.integers(0, longest + 1, (2, HEADS, 29, 4)), axis=-1),)


@pytest.mark.sample(family=("sm80",), method=("single_pass",))
@pytest.mark.parametrize(
    ("function", "intervals"), [(halves, (True, True)), (by_ends, (True, False)), (by_ends_of_keys, (False, True))]
)
@pytest.mark.parametrize("family", TILES)
@pytest.mark.parametrize("method", METHODS)
def test_two_intervals(launched, family, function, intervals, method):
    """Checks heads and sequences with intervals of their own, and maps that have those of one side alone."""
    own = {"mask_mod": function, "mask_args": ends_for(function, family)}
    sparse = fa2cupy.block_mask(function, own["mask_args"], *shape_of(family), tile=(64, 32))
    assert sparse.layout.intervals == intervals
    check(launched, family, **own, block_mask=sparse, methods=(method,), causal=function is not halves)


@pytest.mark.matrix
def test_tiles_that_do_not_divide_those_of_the_map(launched):
    """Checks tiles of 192 and 80 queries: a tile of the kernel meets several of the map."""
    rows, keys = LENGTHS["sm90"]
    tiles = {"forward": TileConfig(192, 64, 16, 2), "backward": TileConfig(80, 128, 12, 2)}
    inputs = make_inputs("bfloat16", batch=1, seqlen_q=rows, seqlen_k=keys, num_heads=2, num_heads_kv=1, head_dim=128)
    (sizes,) = ends_for(halves, "sm90")
    own = {"mask_mod": halves, "mask_args": (sizes[:2],)}
    sparse = fa2cupy.block_mask(halves, own["mask_args"], 1, 2, rows, keys)
    check(launched, "sm90", inputs=inputs, tiles=tiles, **own, block_mask=sparse, methods=("single_pass",))


@pytest.mark.matrix
@pytest.mark.parametrize("features", [{"softcap": 3.0}, {"dropout_p": 0.25, "seed": 3}, {"score_mod": mods.softcap(2)}])
@pytest.mark.parametrize("family", TILES)
def test_two_intervals_beside_features(launched, family, features):
    own = {"mask_mod": halves, "mask_args": ends_for(halves, family)}
    sparse = fa2cupy.block_mask(halves, own["mask_args"], *shape_of(family), tile=(64, 32))
    check(launched, family, **own, block_mask=sparse, **features)


def test_float64_intervals(launched):
    inputs = make_inputs("float64", batch=2, seqlen_q=29, seqlen_k=37, num_heads=HEADS, num_heads_kv=2, head_dim=8)
    own = {"mask_mod": halves, "mask_args": ends_for(halves, "simt")}
    sparse = fa2cupy.block_mask(halves, own["mask_args"], *shape_of("simt"), tile=(8, 16))
    check(launched, "simt", inputs=inputs, **own, block_mask=sparse, methods=("two_pass",))


def test_functions_with_intervals_share_kernels(launched):
    for function, arrays in ((by_pairs(5), ()), (by_pairs(-3), ()), (mods.document, (documents("simt"),))):
        sparse = fa2cupy.block_mask(function, arrays, *shape_of("simt"), tile=(8, 8))
        assert sparse.layout.intervals == (True, True)
        check(launched, "simt", mask_mod=function, mask_args=arrays, block_mask=sparse, methods=("two_pass",))
    for operation in ("forward", "backward_dq", "backward_dkdv"):
        assert len({stage.spec for stage in launched if stage.spec.operation == operation}) == 1


def near(b, h, q, k, x, keep):
    """A function with a float and an int of each position, and a truth value of the key."""
    return (keep[b, k] & (x[h, q] - 0.25 <= 2 * x[h, k])) | (q // 7 == k // 7) & (k <= q + 3)


def listed(b, h, q, k, table):
    """A function that reads an element for each pair."""
    return table[q % 5, k % 7] > 0


def arguments_of(function, family: str) -> tuple:
    longest, rng = max(LENGTHS[family]), np.random.default_rng(4)
    wide = "float64" if DTYPES[family] == "float64" else "float32"
    if function is listed:
        return (rng.integers(0, 2, (5, 7)),)
    return rng.standard_normal((HEADS, longest)).astype(wide), rng.random((2, longest)) < 0.5


@pytest.mark.sample(family=("sm80",), function=(near,), method=("single_pass",))
@pytest.mark.parametrize("function", [near, listed])
@pytest.mark.parametrize("family", TILES)
@pytest.mark.parametrize("method", METHODS)
def test_functions_of_several_positions(launched, family, function, method):
    own = {"mask_mod": function, "mask_args": arguments_of(function, family)}
    sparse = fa2cupy.block_mask(function, own["mask_args"], *shape_of(family), tile=(64, 32))
    check(launched, family, **own, block_mask=sparse, causal=True, methods=(method,))


@pytest.mark.matrix
def test_float64_terms(launched):
    inputs = make_inputs("float64", batch=2, seqlen_q=29, seqlen_k=37, num_heads=HEADS, num_heads_kv=2, head_dim=8)
    x, keep = arguments_of(near, "simt")
    own = {"mask_mod": near, "mask_args": (x.astype("float64"), keep)}
    sparse = fa2cupy.block_mask(near, own["mask_args"], *shape_of("simt"), tile=(8, 16))
    check(launched, "simt", inputs=inputs, **own, block_mask=sparse)


@pytest.mark.matrix
@pytest.mark.parametrize("function", [mods.causal(19), by_pairs(20), near])
def test_scores_that_grow_in_masked_tiles(launched, function):
    """Checks rows whose first tile is hidden wholly, and whose shift has to move in a tile that is masked."""
    rows, keys = LENGTHS["sm90"]
    q, k, v, do = make_inputs("bfloat16", batch=1, seqlen_q=rows, seqlen_k=keys, num_heads=2, head_dim=64)
    k *= np.linspace(9, 0.5, keys)[:, None, None].astype(k.dtype)
    arrays = () if function is not near else (arguments_of(near, "sm90")[0], arguments_of(near, "sm90")[1][:1])
    sparse = fa2cupy.block_mask(function, arrays, 1, 2, rows, keys, tile=(64, 64))
    check(launched, "sm90", inputs=(q, k, v, do), mask_mod=function, mask_args=arrays, block_mask=sparse, methods=())


def random_tiles(family: str, heads: int, tile: tuple, batch: int = 2) -> BlockMask:
    rows, columns = (-(-n // size) for n, size in zip(LENGTHS[family], tile, strict=True))
    tiles = np.random.default_rng(2).random((batch, heads, rows, columns)) < 0.4
    tiles[0, :, 0], tiles[-1, ..., -1] = False, False
    return BlockMask(tiles, *LENGTHS[family], tile)


@pytest.mark.matrix
@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("family", TILES)
def test_given_maps(launched, family, heads):
    """Checks empty rows and columns of tiles, and heads of one group with different tiles."""
    tile = {"simt": (8, 16), "sm80": (32, 32), "sm90": (128, 128)}[family]
    check(launched, family, block_mask=random_tiles(family, heads, tile))
    check(
        launched, family, block_mask=random_tiles(family, heads, tile), mask_mod=mods.causal(5), methods=("two_pass",)
    )


def test_lists_of_all_tiles(launched):
    """Checks lists that fill their memory, with the tile after the last."""
    rows, keys = LENGTHS["simt"]
    inputs = make_inputs("float32", seqlen_q=rows, seqlen_k=keys, num_heads=2, num_heads_kv=1, head_dim=8)
    tiles = np.ones((-(-rows // 8), -(-keys // 8)), bool)
    check(launched, "simt", inputs=inputs, methods=("two_pass",), block_mask=BlockMask(tiles, rows, keys, (8, 8)))


def test_lists_of_hopper(launched):
    """Checks full, mixed and empty tiles of small calls, and rows and columns of tiles without any."""
    inputs = make_inputs("bfloat16", seqlen_q=200, seqlen_k=270, num_heads=2, num_heads_kv=1, head_dim=8)
    tiles = np.array([[[1, 0, 0], [0, 1, 0]], [[0, 0, 0], [1, 1, 0]]], bool)
    sparse = BlockMask(tiles, 200, 270, (128, 128))
    check(launched, "sm90", inputs=inputs, block_mask=sparse, window=(200, 70), methods=("two_pass",))


def test_lists_are_kept_with_the_map(launched):
    """Checks that only the first call of a kind writes lists, and that results stay right, with other bands, too."""
    sparse = random_tiles("simt", 1, (8, 16))
    sizes = {"batch": 2, "seqlen_q": 29, "seqlen_k": 37, "num_heads": 2, "num_heads_kv": 1, "head_dim": 8}
    own = on_gpu({"block_mask": sparse})
    for band in ({}, {"causal": True}, {}, {"window": (9, 4)}, {"causal": True}):
        inputs = make_inputs("float32", **sizes)
        expected = Expectation(*inputs, block_mask=sparse, **band)
        q, k, v, do = map(place, inputs)
        more = {**own, **band, "config": TILES["simt"], "family": "simt"}
        o, lse = forward(q, k, v, **more)
        gradients = backward(q, k, v, o, lse, do, **more, method="two_pass")
        expected.check(o=o, lse=lse, **dict(zip(("dq", "dk", "dv"), gradients, strict=True)))
    operations = [stage.spec.operation for stage in launched]
    for name, number in (("list_keys", 6), ("order_keys", 6), ("list_queries", 3), ("order_queries", 3)):
        assert operations.count(name) == number
    assert operations.count("forward") == operations.count("backward_dq") == 5


@before_hopper
@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_blocks_that_share_tiles(launched, family):
    tile = {"sm80": (32, 32), "sm90": (128, 128)}[family]
    check(launched, family, block_mask=random_tiles(family, HEADS, tile), num_splits=3, causal=True)
    assert any(stage.spec.is_split for stage in launched)


@pytest.mark.matrix
@pytest.mark.parametrize(("family", "own"), [("sm80", 32), ("sm90", 64), ("sm90", 128)])
def test_wide_heads(launched, family, own):
    """Checks head_dim 136, for which kernels have other main loops, also where two blocks divide their keys."""
    rows, keys = LENGTHS[family]
    sizes = {"batch": 2, "seqlen_q": rows, "seqlen_k": keys, "num_heads": HEADS, "num_heads_kv": 2, "head_dim": 136}
    tiles = {"sm80": {**TILES["sm80"], "forward": TileConfig(32, 32, 4, 2)}}.get(
        family,
        {
            "forward": TileConfig(128, 64, 12, 2), "backward_dq": TileConfig(128, 32, 12, 2),
            "backward": TileConfig(64, own, 12, 2), "backward_dkdv": TileConfig(64, 64, 12, 2),
        },
    )  # fmt: skip
    inputs = make_inputs(DTYPES[family], **sizes)
    sparse = random_tiles(family, 1, {"sm80": (32, 32), "sm90": (128, own)}[family])
    check(launched, family, inputs=inputs, tiles=tiles, block_mask=sparse, causal=True)


@pytest.mark.matrix
@pytest.mark.parametrize("family", TILES)
def test_packed_sequences(launched, family):
    rows, keys = LENGTHS[family]
    offsets = {
        "cu_seqlens_q": np.array([0, rows // 3, rows // 3, rows], "int32"),
        "cu_seqlens_k": np.array([0, keys // 2, keys - 4, keys], "int32"),
        "max_seqlen_q": rows - rows // 3,
        "max_seqlen_k": keys // 2,
    }
    lengths = offsets["max_seqlen_q"], offsets["max_seqlen_k"]
    ids = np.sort(np.random.default_rng(3).integers(0, 3, (3, max(lengths))), axis=1)
    sparse = fa2cupy.block_mask(mods.document, (ids,), 3, HEADS, *lengths, tile=(16, 32))
    sizes = {"seqlen_q": rows, "seqlen_k": keys, "num_heads": HEADS, "num_heads_kv": 2, "head_dim": 64}
    inputs = tuple(x[0] for x in make_inputs(DTYPES[family], **sizes))
    check(
        launched, family, inputs=inputs, **offsets, mask_mod=mods.document, mask_args=(ids,), block_mask=sparse,
        causal=True,
    )  # fmt: skip


@pytest.mark.sample(method=("two_pass",))
@pytest.mark.parametrize("method", METHODS)
def test_a_map_of_one_sequence_is_that_of_all_packed_ones(launched, method):
    """Each sequence still has lists of its own, because lengths differ."""
    offsets = {
        "cu_seqlens_q": np.array([0, 12, 12, 29, 38], "int32"), "cu_seqlens_k": np.array([0, 20, 27, 30, 50], "int32"),
        "max_seqlen_q": 17, "max_seqlen_k": 20,
    }  # fmt: skip
    inputs = tuple(
        x[0] for x in make_inputs("float32", seqlen_q=38, seqlen_k=50, num_heads=4, num_heads_kv=2, head_dim=8)
    )
    tiles = np.array([[1, 0, 1], [0, 1, 1], [1, 1, 0]], bool)
    own = {"inputs": inputs, **offsets}
    check(launched, "simt", **own, block_mask=BlockMask(tiles, 17, 20, (8, 8)), causal=True, methods=(method,))
    for function in (mods.causal(3), by_pairs(3)):
        sparse = fa2cupy.block_mask(function, (), 1, 1, 17, 20, tile=(4, 12))
        check(launched, "simt", **own, block_mask=sparse, mask_mod=function, methods=())


@pytest.mark.matrix
@pytest.mark.parametrize("family", TILES)
@pytest.mark.parametrize("reads", [lambda sparse: sparse, by_function], ids=["intervals", "function"])
def test_other_features(launched, family, reads):
    rows, keys = LENGTHS[family]
    ids = documents(family)
    sparse = reads(fa2cupy.block_mask(mods.document, (ids,), *shape_of(family), tile=(32, 64)))
    options = {
        "softcap": 3.0, "alibi_slopes": numbers((HEADS,), "float32"), "sink": numbers((HEADS,), "float32"),
        "bias": numbers((2, HEADS, rows, keys), DTYPES[family]), "dropout_p": 0.25, "seed": 3,
    }  # fmt: skip
    own = {"mask_mod": mods.document, "mask_args": (ids,), "block_mask": sparse}
    check(launched, family, methods=("two_pass",), **own, **options)


def test_empty_tiles_are_not_read(launched):
    """Keys in tiles that no query sees may have any value, even NaN."""
    rows, keys = LENGTHS["simt"]
    q, k, v, do = make_inputs("float32", batch=1, seqlen_q=rows, seqlen_k=keys, num_heads=2, head_dim=8)
    tiles = np.zeros((4, 5), bool)
    tiles[:, 1:3] = True
    options = {"block_mask": BlockMask(place(tiles), rows, keys, (8, 8)), "config": TileConfig(8, 8, 2)}
    clean = [np.array(x) for x in forward(*map(place, (q, k, v)), **options)]
    k[:, :8], v[:, 24:] = np.nan, np.nan
    for found, wanted in zip(forward(*map(place, (q, k, v)), **options), clean, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_results_are_the_same_from_run_to_run(launched):
    own = on_gpu({"block_mask": random_tiles("sm80", HEADS, (32, 32)), "config": TILES["sm80"], "family": "sm80"})
    own |= {"causal": True, "num_splits": 3}
    rows, keys = LENGTHS["sm80"]
    inputs = make_inputs("float16", batch=2, seqlen_q=rows, seqlen_k=keys, num_heads=4, num_heads_kv=2, head_dim=24)
    q, k, v, do = map(place, inputs)
    o, lse = forward(q, k, v, **own)
    first, second = (backward(q, k, v, o, lse, do, deterministic=True, **own) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


# ------------------------------------------------------------------------------------------------------------ refusals


def test_what_is_refused(launched):
    q, k, v, do = map(place, make_inputs("float16", seqlen_q=64, seqlen_k=64, num_heads=2, head_dim=16))
    lse = place(np.zeros((1, 2, 64), "float32"))
    small = BlockMask(place(np.ones((4, 4), bool)), 64, 64, (16, 16))
    odd = BlockMask(place(np.ones((7, 7), bool)), 64, 64, (10, 10))
    longer = BlockMask(place(np.ones((1, 1), bool)), 64, 65)
    with pytest.raises(ValueError, match=r"^block_mask: without a function, the map's tiles \(16, 16\) must be mult"):
        forward(q, k, v, block_mask=small, config=BY_ROWS, family="sm80")
    for family in ("sm80", "sm90", None):
        match = r"no tile of forward within the \(10, 10\) of block_mask: .* tiles of multiples of \(32, 16\)$"
        with pytest.raises(UnsupportedProblemError, match=match if family != "sm90" else r"multiples of \(64, 32\),"):
            forward(q, k, v, block_mask=odd, family=family)
    of_bias = {"bias": place(np.zeros((64, 64), "float32")), "return_dbias": True, "block_mask": small}
    for operation, deterministic in (("backward_dq", False), ("dbias", True)):
        match = rf"no tile of {operation} within the \(16, 16\) of block_mask: .* tiles of multiples of \(32, 16\)"
        with pytest.raises(UnsupportedProblemError, match=match):
            backward(q, k, v, q, lse, do, **of_bias, deterministic=deterministic)
    with pytest.raises(ValueError, match="^block_mask: expected a map for 64 queries and 64 keys, got one for 64 and"):
        forward(q, k, v, block_mask=longer)
    with pytest.raises(ValueError, match="^block_mask: expected a map for heads of 2, or of 1 for all, got one for 3"):
        backward(q, k, v, q, lse, do, block_mask=BlockMask(place(np.ones((1, 3, 1, 1), bool)), 64, 64))
    with pytest.raises(TypeError, match="^block_mask: expected a fa2cupy.BlockMask or None, got FakeArray; write fa2"):
        forward(q, k, v, block_mask=place(np.ones((1, 1), bool)))
    elsewhere = BlockMask(place(np.ones((1, 1), bool)), 64, 64)
    elsewhere.states.device_id = 1
    with pytest.raises(ValueError, match="^block_mask: expected an array on device 0 like q, got device 1"):
        forward(q, k, v, block_mask=elsewhere)
    many = map(place, make_inputs("float16", seqlen_q=64, seqlen_k=64, num_heads=129, num_heads_kv=1, head_dim=8))
    whole = BlockMask(place(np.ones((1, 1), bool)), 64, 64)
    q, k, v, do = many
    with pytest.raises(UnsupportedProblemError, match="^block_mask: kernels take up to 128 query heads for a K/V head"):
        backward(q, k, v, q, place(np.zeros((1, 129, 64), "float32")), do, block_mask=whole)
    ids = place(np.zeros((1, 64), "int32"))
    ids.device_id = 1
    with pytest.raises(ValueError, match="^like: expected an array on device 1 like mask_args.0., got device 0"):
        fa2cupy.block_mask(mods.document, (ids,), 1, 1, 64, 64, like=q)
    with pytest.raises(ValueError, match=r"^mask_args\[0\]: expected at least one element, got shape \(0, 4\)"):
        fa2cupy.block_mask(mods.document, (place(np.zeros((0, 4), "int32")),), 1, 1, 64, 64)
    assert not launched


def test_kernels_of_float32_parts_leave_maps_to_those_without(launched):
    q, k, v, _ = map(place, make_inputs("float32", seqlen_q=128, seqlen_k=128, num_heads=1, head_dim=8))
    sparse = BlockMask(place(np.eye(8, dtype=bool)), 128, 128, (16, 16))
    forward(q, k, v, block_mask=sparse)
    assert launched[-1].spec.family_name == "simt"
    with pytest.raises(UnsupportedProblemError, match="^block_mask: family 'sm90' for forward with float32"):
        forward(q, k, v, block_mask=sparse, family="sm90")


# ------------------------------------------------------------------------------------------------------------- mutants

#: (kernel, text, replacement, name of the check in `CHECKS` that catches the mutant).
MUTANTS = {
    "hidden pairs are not seen": ("tile_states", "is_hidden |= seen != kAll;", "", "maps"),
    "visible pairs are not seen": ("tile_states", "is_seen |= seen != 0;", "", "maps"),
    "lanes read past the last key": (
        "tile_states", "min_of(keys + 32 * i + lane, end_key - 1)", "keys + 32 * i + lane", "maps",
    ),
    "a lane has one key only": ("tile_states", "min_of(keys + 32 * i + lane,", "min_of(keys + lane,", "maps"),
    "a warp leaves out a query": (
        "tile_states", "ceil_div(end_query - first_query, Spec::kWarps)", "(end_query - first_query) / Spec::kWarps",
        "edges",
    ),
    "a warp stops at its first kind": (
        "tile_states", "__any_sync(kFullWarp, is_seen) && __any_sync(kFullWarp, is_hidden)", "true", "captured maps",
    ),
    "no edge is looked for in mixed tiles": ("tile_states", "is_mixed && !params.row_intervals", "is_mixed", "edges"),
    "every tile begins with rises": ("tile_states", "keys > 0 && queries + lane", "false && queries + lane", "edges"),
    "every warp begins with rises": ("tile_states", "first_query > 0 ? seen_by", "false ? seen_by", "edges"),
    "the key ahead is that of the first row": ("tile_states", "ahead >> (query - queries) & 1", "ahead & 1", "edges"),
    "lanes forget the bit before theirs": ("tile_states", "before = bits >> 31;", "", "edges"),
    "no fall behind the last key": ("tile_states", "if (before && ends_row)", "if (false)", "edges"),
    "falls behind the last key of each tile": (
        "tile_states", "ends_row = end_key == params.seqlen_k &&", "ends_row =", "edges",
    ),
    "no fall behind the last query": (
        "tile_states", "if (above >> i & 1 && end_query", "if (false && end_query", "edges",
    ),
    "rows that see all keys do not end": ("tile_states", " || (before && ends_row))", ")", "edges"),
    "the first fall is the last": (
        "tile_states", "atomicMax(intervals + 3, last_fall)", "atomicMax(intervals + 3, kEnd - first_fall)", "edges",
    ),
    "a third interval in a tile is missed": (
        "tile_states", "atomicMax(params.most_intervals, kMostIntervals + 1)", "{}", "edges",
    ),
    "a third interval in a column is missed": (
        "tile_states", "atomicMax(params.most_intervals + 1, kMostIntervals + 1)", "{}", "edges",
    ),
    "a third interval in another tile is missed": (
        "close_intervals", "int32 count = kMostIntervals + 1", "int32 count = kMostIntervals", "edges",
    ),
    "a row has its only interval twice": ("close_intervals", "rises > 1 ? edges.z : 0", "edges.z", "edges"),
    "an end is inclusive": ("forward", "own.y - first_column", "own.y + 1 - first_column", "two"),
    "the second interval is not shown": (
        "forward", "visible.show(i, own.z - first_column, own.w - first_column);", "", "two",
    ),
    "intervals of other rows": ("forward", "first_row + Fragment::row(i, lane), params", "first_row, params", "two"),
    "rows past the end have intervals": (
        "forward", "min_of(first_row + Fragment::row(i, lane), params.interval_rows - 1)",
        "first_row + Fragment::row(i, lane)", "two",
    ),
    "all heads have the intervals of the first": (
        "forward", "(tile.head) * params.interval", "(0) * params.interval", "two",
    ),
    "all sequences have the intervals of the first": (
        "backward_dkdv", "(tile.batch) * params.interval", "(0) * params.interval", "two",
    ),
    "intervals of rows in place of columns": (
        "backward_dkdv", "kTransposed ? params.column_intervals", "kTransposed ? params.row_intervals", "two",
    ),
    "both columns of a lane or none": ("forward", "min_of(inside % 8, 2u)", "(inside % 8 ? 2u : 0u)", "two"),
    "bits past a word": ("forward", "ones(number - 32 * w)", "ones(number)", "wide"),
    "weights see all keys": ("backward_dkdv", "return !visible.at(i, j);", "return false;", "weights"),
    "intervals are not clipped by the ends of packed sequences": (
        "forward", "if (first_key + keys > end_key(first_query)) return false;", "", "packed",
    ),
    "mixed tiles count as full": ("list_keys", "lowest == kFull && ", "", "lists"),
    "tiles across the band count as full": ("list_queries", " && !crosses_band ? kFull", " ? kFull", "lists"),
    "the kinds change places": ("list_keys", "kFirstKind = kOfKeys ? kMixed : kFull", "kFirstKind = kMixed", "lists"),
    "a part is not in order": ("list_keys", "lanes & ((1u << lane) - 1)", "lanes & ~((2u << lane) - 1)", "lists"),
    "tiles have the states of their first": ("list_keys", "row <= last_row", "row <= first_row", "lists"),
    "all heads are the first": ("list_queries", "candidate / tiles << kTileBits", "0", "lists"),
    "the list has no end": (
        "list_keys", "list[kListHead + in_both] =", "if (in_both == 0) list[kListHead] =", "lists",
    ),
    "the shortest lists come first": ("order_keys", "of_other > length", "of_other < length", "lists"),
    "lists as long change places": ("order_keys", "other < index", "other > index", "lists"),
    "tiles of all heads are in one order": ("order_keys", "index - index % params.list_tiles", "0", "lists"),
    "shares of the forward are not in order": (
        "forward", "where = tile_in_order<Spec, false>(params, blockIdx.x)",
        "where = tile_of_block<false>(params.schedule(), blockIdx.x)", "shares",
    ),
    "shares of the backward are not in order": (
        "backward", "where = tile_in_order<Spec, true>(params, block)",
        "where = tile_of_block<false>(params.schedule(), block)", "shares",
    ),
    "shares are in the order of other heads": (
        "forward", "if constexpr (Spec::kSplit) head /= params.num_splits;", "", "shares",
    ),
    "other functions are not evaluated": ("list_keys", "!params.has_other_function && ", "", "results"),
    "the function is not evaluated": (
        "forward", "kMasksByMap = Spec::kBlockMask", "kMasksByMap = false", "results",
    ),
    "a short function has one row only": (
        "forward", "Fragment::col(j, 0), rows_[i], terms))", "Fragment::col(j, 0), rows_[0], terms))", "documents",
    ),
    "a short function is evaluated at the first row": (
        "forward", "row + Fragment::row(i, 0), column + Fragment::col(j, 0), rows",
        "row, column + Fragment::col(j, 0), rows", "short",
    ),
    "all quads evaluate the same columns": ("forward", "first += lane / 4 * ", "first += 0 * ", "documents"),
    "terms of the first quad": ("forward", "of_quad(j / kOwn)", "of_quad(0)", "documents"),
    "terms of the first column": ("forward", "own_[j % kOwn]", "own_[0]", "documents"),
    "terms of another lane of the quad": ("forward", "%1, %2, 0x31f,", "%1, %2, 0x01f,", "documents"),
    "queries are taken for keys": (
        "backward_dkdv", "head, column, row, of_column, of_row)", "head, row, column, of_column, of_row)", "transposed",
    ),
    "bits of the first columns only": ("forward", "bits[i] << first", "bits[i]", "bits"),
    "the first columns again": ("forward", "column += Fragment::col(kAtOnce, 0);", "", "bits"),
    "bits of other rows": ("forward", "word[i][j / 32] & 1u", "word[0][j / 32] & 1u", "bits"),
    "a shift that is too small is kept": ("forward", "if (!kept) {", "if (false) {", "shifts"),
    "O keeps its scale where the shift moves": (
        "forward", "p.set(scores_);\n            multiply_output(rescale);", "p.set(scores_);", "shifts",
    ),
    "keys past the end are not looked for": (
        "forward", "if (first_key + keys > end_key(first_query)) return false;", "", "end",
    ),
    "keys before the window are not looked for": (
        "forward", "return first_key >= this->first_key(first_query + queries - 1);", "return true;", "window",
    ),
    "masked tiles before the share": (
        "forward", "Spec::kSplit ? max_of(full_end, 0) : full_end", "full_end", "shares of Hopper",
    ),
}  # fmt: skip


def check_maps(monkeypatch, patch=None) -> None:
    for length, keys, tile in ((12, 45, (8, 40)), (12, 45, (4, 12)), (45, 170, (8, 150))):
        ids = np.repeat([0, 0, 0, 1], length)[None, :keys]
        wanted = fa2cupy.block_mask(mods.document, (ids,), 1, 1, 40, keys, tile=tile).states
        with simulated_gpu(monkeypatch, patch=patch):
            found = fa2cupy.block_mask(mods.document, (place(ids),), 1, 1, 40, keys, tile=tile).states
        np.testing.assert_array_equal(found, wanted)


def check_captured_maps(monkeypatch, patch=None) -> None:
    with monkeypatch.context() as own:
        own.setattr(calls, "is_captured", lambda array: True)
        check_maps(own, patch)


def check_edges(monkeypatch, patch=None) -> None:
    with simulated_gpu(monkeypatch, patch=patch):
        for table in tables_of_intervals((37, 90)).values():
            check_intervals(table, (12, 33))
        far = np.zeros((1, 40, 150), bool)
        far[0, 5:9, [3, 70, 149]] = True
        check_intervals(far, (8, 50))
        check_intervals(far.swapaxes(1, 2), (50, 8))
        check_intervals(tables_of_intervals((20, 150))["two intervals in a row"], (8, 150))
        check_intervals(tables_of_intervals((37, 80))["three in one row"].swapaxes(1, 2), (80, 12))


def check_two(monkeypatch, patch=None, **features) -> None:
    own = {"mask_mod": halves, "mask_args": ends_for(halves, "sm80")}
    sparse = fa2cupy.block_mask(halves, own["mask_args"], *shape_of("sm80"), tile=(64, 32))
    with simulated_gpu(monkeypatch, patch=patch) as launched:
        check(launched, "sm80", **own, block_mask=sparse, methods=("two_pass",), **features)


def check_wide(monkeypatch, patch=None) -> None:
    """Lanes with more columns than a word has bits."""
    ids = np.repeat([0, 1, 2], [150, 20, 100])[None]
    own = {"mask_mod": mods.document, "mask_args": (ids,)}
    sparse = fa2cupy.block_mask(mods.document, (ids,), 1, 2, 100, 270)
    inputs = make_inputs("bfloat16", batch=1, seqlen_q=100, seqlen_k=270, num_heads=2, num_heads_kv=1, head_dim=64)
    tiles = {"forward": TileConfig(64, 176, 8, 2, 2)}
    with simulated_gpu(monkeypatch, FEW, patch=patch) as launched:
        check(launched, "sm90", inputs=inputs, tiles=tiles, **own, block_mask=sparse, methods=())


def check_packed(monkeypatch, patch=None) -> None:
    with simulated_gpu(monkeypatch, patch=patch) as launched:
        test_packed_sequences(launched, "simt")


def check_results(monkeypatch, patch=None) -> None:
    sparse = random_tiles("simt", 1, (8, 16), batch=1)
    inputs = make_inputs("float32", seqlen_q=29, seqlen_k=37, num_heads=2, head_dim=8)
    expected = Expectation(*inputs, block_mask=sparse, mask_mod=mods.causal(5))
    own = {**on_gpu({"block_mask": sparse}), "mask_mod": mods.causal(5), "config": TILES["simt"]}
    with simulated_gpu(monkeypatch, patch=patch):
        o, lse = forward(*map(place, inputs[:3]), **own)
    expected.check(o=o, lse=lse)


def check_sm80(monkeypatch, patch=None, *, mask_mod, mask_args=(), **more) -> None:
    inputs = make_inputs("float16", seqlen_q=90, seqlen_k=100, num_heads=2, head_dim=8)
    own = {"mask_mod": mask_mod, "mask_args": mask_args, **more}
    sparse = by_function(fa2cupy.block_mask(mask_mod, mask_args, 1, 2, 90, 100, tile=(64, 64)))
    expected = Expectation(*inputs, block_mask=sparse, **own)
    with simulated_gpu(monkeypatch, patch=patch):
        o, lse = forward(*map(place, inputs[:3]), **on_gpu({"block_mask": sparse, **own}), config=WIDE, family="sm80")
    expected.check(o=o, lse=lse)


def check_dkdv(monkeypatch, patch=None) -> None:
    inputs = make_inputs("float16", seqlen_q=90, seqlen_k=100, num_heads=2, head_dim=8)
    own = {
        "mask_mod": mods.causal(5),
        "block_mask": by_function(fa2cupy.block_mask(mods.causal(5), (), 1, 2, 90, 100, tile=(64, 64))),
    }
    expected = Expectation(*inputs, **own)
    q, k, v, do = map(place, inputs)
    own |= {"config": TILES["sm80"], "family": "sm80"}
    with simulated_gpu(monkeypatch, patch=patch):
        o, lse = forward(q, k, v, **on_gpu(own))
        gradients = backward(q, k, v, o, lse, do, **on_gpu(own), method="two_pass")
    expected.check(spec="two_pass", **dict(zip(("dq", "dk", "dv"), gradients, strict=True)))


def check_shifts(monkeypatch, patch=None) -> None:
    with simulated_gpu(monkeypatch, FEW, patch=patch) as launched:
        test_scores_that_grow_in_masked_tiles(launched, mods.causal(19))


def check_shares(monkeypatch, patch=None) -> None:
    with simulated_gpu(monkeypatch, patch=patch) as launched:
        sparse = random_tiles("sm80", HEADS, (32, 32))
        check(launched, "sm80", block_mask=sparse, num_splits=3, methods=("single_pass",))


def check_hopper_shares(monkeypatch, patch=None) -> None:
    own = {"block_mask": random_tiles("sm90", HEADS, (128, 128)), "num_splits": 3, "causal": True}
    with simulated_gpu(monkeypatch, FEW, patch=patch) as launched:
        check(launched, "sm90", methods=(), **own)


CHECKS = {
    "shares": check_shares,
    "maps": check_maps,
    "captured maps": check_captured_maps,
    "edges": check_edges,
    "two": check_two,
    "wide": check_wide,
    "weights": functools.partial(check_two, softcap=3.0),
    "packed": check_packed,
    "lists": lambda monkeypatch, patch=None: check_lists(monkeypatch, {"causal": True}, (8, 8), patch),
    "results": check_results,
    "short": functools.partial(check_sm80, mask_mod=mods.causal(5)),
    "documents": functools.partial(check_sm80, mask_mod=mods.document, mask_args=(documents("sm80")[:1],)),
    "bits": functools.partial(check_sm80, mask_mod=listed, mask_args=arguments_of(listed, "sm80")),
    "transposed": check_dkdv,
    "shifts": check_shifts,
    "shares of Hopper": check_hopper_shares,
    # This function shows keys past the end.
    "end": functools.partial(check_sm80, mask_mod=mods.causal(20)),
    "window": functools.partial(check_sm80, mask_mod=mods.causal(5), window=(20, None)),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(monkeypatch, name):
    operation, old, new, caught_by = MUTANTS[name]

    def patch(spec, text: str) -> str:
        if spec.operation != operation:
            return text
        if text.count(old) != 1:  # no AssertionError, which would count as a caught mutant
            raise ValueError(f"{old!r} occurs {text.count(old)} times")
        return text.replace(old, new)

    check = CHECKS[caught_by]
    check(monkeypatch)
    with pytest.raises((AssertionError, ptxsim.PtxError)):
        check(monkeypatch, patch)
