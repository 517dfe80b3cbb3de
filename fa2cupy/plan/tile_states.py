"""The plan of a sparse map."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..families.device import DeviceInfo
from ..families.operations import OPERATIONS
from ..families.tile import TileConfig
from ..functions.tracing import BoundFunction
from ..jit.params import argument_arrays
from ..jit.spec import KernelSpec
from ..problem.strides import AnyStrides
from .stages import Plan, Stage

__all__ = ["plan_tile_states"]


def plan_tile_states(
    device: DeviceInfo,
    function: BoundFunction,
    strides: Sequence[AnyStrides],
    shape: tuple[int, int, int, int],
    lengths: tuple[int, int],
    tile: tuple[int, int],
) -> Plan:
    """The plan of a map: one kernel, with a block for each tile.

    Parameters
    ----------
    device : DeviceInfo
    function : BoundFunction
        The mask function.
    strides : sequence
        Strides and lengths of its arrays.
    shape : tuple of int
        (batch, heads, query tiles, key tiles).
    lengths, tile : tuple of int
        Queries and keys, of all and of a tile.
    """
    _, heads, rows, columns = shape
    num_warps = OPERATIONS["tile_states"].num_warps
    assert num_warps is not None, "blocks of all sizes of tiles are alike"
    own = TileConfig(*tile, num_warps)
    spec = KernelSpec("tile_states", None, device.arch, "float32", 1, False, own, ("mask_mod",), functions=(function,))
    names = (name for name, _, rank in argument_arrays(function) if rank)
    layouts = {f"{name}_strides": layout for name, layout in zip(names, filter(None, strides), strict=True)}
    sizes = {"num_heads": heads, "map_rows": rows, "map_columns": columns}
    sizes |= dict(zip(("seqlen_q", "seqlen_k"), lengths, strict=True))
    blocks = math.prod(shape)
    return Plan((Stage(spec, blocks, spec.params.pack_constants({**layouts, **sizes})),) if blocks else ())
