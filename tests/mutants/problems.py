"""The class of problems that broken kernels are run on, and problems that several tables share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from support.fake_cupy import place
from support.feature_cases import accumulator, options_of
from support.traced_cases import on_gpu, ready_made

from fa2cupy import TileConfig


@dataclass(frozen=True)
class Problem:
    """A problem for a kernel, with the tiles of `small_tiles` or, for the sm90 family, with `hopper_tile`."""

    dtype: str = "float16"
    head_dim: int = 64
    lengths: tuple[int, int] = (69, 99)
    heads: tuple[int, int] = (2, 1)
    batch: int = 1
    causal: bool = True
    few_multiprocessors: bool = False  # so that heads are scheduled in sections
    packed: str = ""  # name of an array that lies between others
    growing: bool = False  # scores that outgrow the softmax's row shift
    hopper_tile: TileConfig | None = None
    tile: TileConfig | None = None  # of sm80, for the kernels that own keys
    feature: str = ""  # its name in `feature_cases.options_of`
    view: Callable = place  # from the feature's arrays to those in memory
    function: str = ""  # its name in `traced_cases.ready_made`
    scores: Callable = tuple  # from inputs to inputs with other scores
    rows_ahead: int = 0  # unused rows before the only sequence
    device: str = ""  # instead of the device of the Hopper tests
    seed: int | None = None  # of an order of the warps
    num_splits: int | None = 1  # blocks that share a tile
    precision: str | None = None
    family: str = ""  # instead of the first one that has every operation; `tile` is then that of the kernel
    head_dim_v: int | None = None

    @property
    def features(self) -> dict:
        """The keywords of the feature and of the function, with arrays on the device."""
        function = {}
        if self.function:
            cases = ready_made(self.batch, self.heads[0], *self.lengths, wide=accumulator(self.dtype))
            function = on_gpu(cases[self.function].options)
        if not self.feature:
            return function
        sizes = {"batch": self.batch, "num_heads": self.heads[0]}
        sizes |= dict(zip(("seqlen_q", "seqlen_k"), self.lengths, strict=True))
        given = options_of(self.feature, self.dtype, sizes)
        return function | {name: self.view(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}

    @property
    def offsets(self) -> dict:
        """The offsets of packed sequences; empty if they are not packed."""
        names = ("cu_seqlens_q", "cu_seqlens_k")
        own = (place(np.array([self.rows_ahead, length], "int32")) for length in self.lengths)
        return dict(zip(names, own, strict=True)) if self.rows_ahead else {}


ONE_SEQUENCE = Problem()
PAIRS = (69, 98)  # lengths with which all rows of scores begin on even elements

# Problems of Hopper; the names of the last two are layouts of dQ in the workspace of a backward.
ONE_GROUP = TileConfig(64, 48, 8, 2, 2)
HOPPER_TILES = Problem(lengths=(200, 150), hopper_tile=ONE_GROUP)  # several tiles for a block
HOPPER_PANELS = Problem(head_dim=128, hopper_tile=TileConfig(128, 64, 12, 2))
HOPPER_COLUMNS = Problem(head_dim=96, lengths=(310, 150), hopper_tile=TileConfig(64, 128, 12, 2))
HOPPER_TRANSPOSED = Problem(head_dim=128, lengths=(390, 150), hopper_tile=TileConfig(80, 128, 12, 2))


def with_units(inputs: tuple) -> tuple:
    """Makes V larger from key 64 on, so that its blocks have different units."""
    inputs[2][:, 64:] *= 16
    return inputs


def with_small_gradients(inputs: tuple) -> tuple:
    inputs[3][...] *= np.float32(1e-7)
    return inputs


def with_nan(inputs: tuple, rows: slice) -> tuple:
    """Makes do NaN in rows that see no key."""
    inputs[3][:, rows] = np.nan
    return inputs


def without_keys(**problem) -> Problem:
    """Returns a problem whose mask hides every seventh row, with NaN there."""
    return Problem(feature="mask of whole rows", scores=functools.partial(with_nan, rows=slice(2, None, 7)), **problem)


# float32 in parts
PARTS = Problem("float32", 64, (200, 290), precision="split")
PARTS_OF_PAIR = Problem("float32", 40, (70, 140), (2, 2), precision="split", head_dim_v=72)
PARTS_OF_GROUPS = dataclasses.replace(PARTS, heads=(4, 2))
PARTS_OF_UNITS = dataclasses.replace(PARTS, scores=with_units)
PARTS_OF_SMALL_GRADIENTS = dataclasses.replace(PARTS, scores=with_small_gradients)
