"""The forward on Hopper beyond 256 columns, whose two warp groups share their rows, executed without a GPU.

README.md of this folder has the checks of every launch.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

pytest.importorskip("cupy")

from mutants import sm90_shared_rows
from mutants.mutant import CATCHES, check_unbroken, run
from support.fake_cupy import place
from support.fake_gpu import forward
from support.feature_cases import options_of
from support.simulated_problems import FEW_MULTIPROCESSORS, HOPPER, draw, growing
from support.simulator import simulated_gpu
from support.traced_cases import on_gpu

import fa2cupy
from fa2cupy import TileConfig, mods
from fa2cupy.families.sm90 import SM90
from fa2cupy.testing import Expectation

pytestmark = pytest.mark.simulated

#: Tiles of one block and of a cluster of two.
ONE, TWO = TileConfig(64, 48, 12, 2), TileConfig(128, 32, 12, 2)
#: Calls: both head dimensions, rows and keys, the tile, and options of the call.
CALLS = {
    "one key tile": {"columns": (512, 512), "lengths": (3, 40), "tile": TWO},
    "two key tiles": {"columns": (320, 264), "lengths": (64, 96), "tile": ONE},
    "causal": {"columns": (512, 512), "lengths": (200, 260), "tile": TWO, "causal": True},
    "more queries": {"columns": (384, 384), "lengths": (210, 70), "tile": TWO, "causal": True, "dtype": "bfloat16"},
    "wide v": {"columns": (24, 512), "lengths": (70, 150), "tile": ONE, "dtype": "bfloat16"},
    "wide k": {"columns": (512, 136), "lengths": (130, 150), "tile": TWO, "causal": True},
    "batch": {"columns": (264, 264), "lengths": (70, 100), "tile": ONE, "batch": 2, "heads": (4, 2)},
    "window": {"columns": (320, 320), "lengths": (200, 330), "tile": TWO, "window": (70, 20)},
}


def check(
    columns: tuple[int, int],
    lengths: tuple[int, int],
    tile: TileConfig | None,
    *,
    dtype: str = "float16",
    heads: tuple[int, int] = (1, 1),
    batch: int = 1,
    change=tuple,
    num_splits: int = 1,
    **options,
) -> list:
    """Checks a forward, whose inputs `change` changes, and returns its stages."""
    device, order = options.pop("device", HOPPER), options.pop("order", None)
    q, k, v, _ = inputs = change(draw(dtype, lengths, columns[0], heads, head_dim_v=columns[1], batch=batch))
    expected = Expectation(*inputs, **options)
    with pytest.MonkeyPatch.context() as monkeypatch, simulated_gpu(monkeypatch, device, seed=order) as launched:
        o, lse = forward(q, k, v, config=tile, num_splits=num_splits, **on_gpu(options))
        expected.check(o=o, lse=lse)
        (stage,) = (stage for stage in launched if stage.spec.operation == "forward")
        assert stage.spec.family is SM90
        return launched


@pytest.mark.sample(name=("causal", "two key tiles"))
@pytest.mark.parametrize("name", CALLS)
def test_forward(name):
    check(**CALLS[name])


@pytest.mark.matrix
@pytest.mark.parametrize("tile", [ONE, TWO], ids=str)
def test_the_row_shift_rises_in_tiles_of_either_group(tile):
    check((320, 264), (70, 330), tile, change=lambda inputs: growing(inputs, slice(0, 40)))


@pytest.mark.matrix
@pytest.mark.parametrize("tile", [ONE, TWO], ids=str)
@pytest.mark.parametrize("order", [1, 2])
def test_any_order_of_the_warps_and_nan_in_rows_that_see_no_key(tile, order):
    def with_nan(inputs: tuple) -> tuple:
        inputs[0][:, :80] = np.nan  # rows that see no key
        return inputs

    check((264, 512), (200, 120), tile, change=with_nan, causal=True, order=order, device=FEW_MULTIPROCESSORS)


@pytest.mark.matrix
@pytest.mark.parametrize("tile", [ONE, TWO], ids=str)
def test_shares_of_the_keys(tile):
    check((320, 320), (130, 330), tile, num_splits=3, causal=True)


#: Calls of several query tiles for a cluster: an odd number, rows without keys, few visible keys, more shares than key
#: tiles, sequences without rows or keys.
MANY_TILES = {
    "odd": {"lengths": (330, 200), "causal": True, "heads": (3, 1)},
    "no keys": {"lengths": (300, 70), "causal": True, "heads": (2, 1)},
    "window": {"lengths": (400, 330), "window": (30, 5), "heads": (2, 1)},
    "shares": {"lengths": (300, 40), "num_splits": 5, "heads": (2, 1)},
    "packed": {"lengths": (300, 250), "causal": True, "heads": (2, 1)},
}


@pytest.mark.matrix
@pytest.mark.parametrize("order", [None, 1])
@pytest.mark.parametrize("name", MANY_TILES)
def test_one_cluster_takes_all_query_tiles_in_any_order_of_the_warps(name, order):
    how = {"order": order, "device": dataclasses.replace(HOPPER, multiprocessors=2), **MANY_TILES[name]}
    if name == "packed":
        ends = {"cu_seqlens_q": [0, 0, 130, 130, 131, 300], "cu_seqlens_k": [0, 60, 60, 200, 230, 250]}
        how |= {key: place(np.array(one, "int32")) for key, one in ends.items()}
        how["change"] = lambda inputs: tuple(place(x[0]) for x in inputs)
    check((264, 264), how.pop("lengths"), TWO, **how)


#: Features of calls, by their names in `feature_cases.options_of`: each alone, and all that do not exclude each other.
FEATURES = {
    **{name: (name,) for name in ("softcap", "alibi", "bias", "mask of whole rows", "padding", "sink", "dropout")},
    "all": ("causal", "window", "softcap", "alibi", "bias of heads", "mask of rows", "padding", "sink", "dropout"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", FEATURES)
def test_features(name):
    sizes = {"batch": 2, "num_heads": 2, "seqlen_q": 71, "seqlen_k": 77}
    given = {key: value for one in FEATURES[name] for key, value in options_of(one, "float16", sizes).items()}
    check((320, 264), (71, 77), None, heads=(2, 1), batch=2, **given)


@pytest.mark.matrix
@pytest.mark.parametrize("tile", [ONE, TWO], ids=str)
def test_maps_and_functions(tile):
    documents = np.sort(np.random.default_rng(3).integers(0, 3, (1, 170)), axis=1).astype("int32")
    given = fa2cupy.block_mask(mods.document, (documents,), 1, 2, 150, 170, tile=(tile.b_r, tile.b_c))
    asked = {"mask_mod": mods.document, "mask_args": (documents,), "block_mask": given}
    check((264, 328), (150, 170), tile, heads=(2, 1), **asked, score_mod=lambda s, b, h, q, k: s - 0.01 * abs(q - k))


@pytest.mark.matrix
@pytest.mark.parametrize("mutant", sm90_shared_rows.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_kernel_is_caught(mutant):
    check_unbroken(mutant.operation, mutant.problem)
    exception, text = CATCHES[mutant.caught_by]
    with pytest.raises(exception, match=text):
        run(mutant.operation, mutant.problem, mutant)
