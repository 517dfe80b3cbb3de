"""Sparse maps of mask functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .backends import backend_of
from .problem.arguments import array_backend
from .problem.array_types import AnyArray
from .problem.block_mask import DEFAULT_TILE, BlockMask, MapLayout, check_length, check_tile
from .problem.conversions import explains_absence
from .problem.function_checks import check_positions, program_of
from .problem.keywords import NoKeywords, check_keywords, takes

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["block_mask"]


@takes(NoKeywords)
@explains_absence
def block_mask(
    mask_mod: Callable[..., Any],
    mask_args: Sequence[AnyArray],
    batch: int,
    num_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    *,
    tile: tuple[int, int] = DEFAULT_TILE,
    like: AnyArray | None = None,
    **unknown: Unpack[NoKeywords],
) -> BlockMask:
    """The sparse map of a mask function, for ``block_mask=`` of `fa2cupy.forward` and `fa2cupy.backward`.

    Calls with the map skip tiles without a visible key, and do not evaluate the function where all keys are visible.

    Parameters
    ----------
    mask_mod : callable
        ``mask_mod(b, h, q, k, *mask_args)``, as for `fa2cupy.forward`.
    mask_args : sequence of ndarray
        Its arrays; an empty tuple if there are none. The map has copies of them.
    batch, num_heads, seqlen_q, seqlen_k : int
        Sizes of the scores. With packed sequences, their number and the longest lengths.
    tile : tuple of int, optional
        Queries and keys of a tile.
    like : ndarray, optional
        An array, such as q, of the library and on the device that the map is for. A function without arrays needs it
        for CuPy; by default its map is for NumPy.

    Returns
    -------
    BlockMask
        It has one row of tiles for all sequences or all heads where the function does not depend on them.

    Raises
    ------
    TypeError, ValueError
        As for `fa2cupy.forward`; a size is negative.
    IndexError
        The function reads outside an array of NumPy.
    KernelCompileError, KernelLaunchError
        As for `fa2cupy.forward`.

    Notes
    -----
    The function is evaluated for all pairs of a query and a key, on NumPy in strips of a row of tiles, on the GPU by
    one kernel that is compiled for it. The mask is not formed: memory is that of the map, one byte for each tile, and
    on NumPy of a strip, that of the copies, and that of intervals.

    Where every query sees at most two intervals of keys, as under documents, frames or a shared prompt, the map keeps
    their ends, 16 bytes for each query, and the same for every key where at most two intervals of queries see it.
    Kernels on the GPU compare these in tiles that are visible in part, in place of the function, and so are compiled
    once for all such functions; `print` says which the map has. The proof counts where visibility begins and ends in
    each row and column. To know its outcome, this call waits for the GPU once. Functions that kernels evaluate at least
    as fast are kept: those of few additions and comparisons, such as windows and prefixes. So are those of maps whose
    intervals would take more than 256 MiB, or that a CUDA graph captures.

    A map shows its arrays as they are now. Calls with the map read its copies in tiles that are visible in part, so
    that what is written into an array later changes no result: make another map. They refuse `mask_args` other than
    the arrays that the map was made from, and need none. A CUDA graph that captures this call makes the map anew at
    each launch.

    Floats of the function are float32, also in a map for float64 data.

    Examples
    --------
    >>> import fa2cupy
    >>> print(block_mask(fa2cupy.mods.sliding_window(200), (), 1, 8, 512, 512))
    BlockMask 512 x 512 in tiles of 128 x 128, density 0.56
    +
    ++
    +++
     +++
    """
    check_keywords("fa2cupy.block_mask", unknown)
    program = program_of("mask_mod", mask_mod, mask_args)
    lengths = check_length("seqlen_q", seqlen_q), check_length("seqlen_k", seqlen_k)
    batch, num_heads = check_length("batch", batch), check_length("num_heads", num_heads)
    check_positions("mask_mod", (batch, num_heads, *lengths))
    tile = check_tile(tile)
    named = {f"mask_args[{number}]": array for number, array in enumerate(mask_args)}
    named |= {} if like is None else {"like": like}
    if named:
        array_backend(named)
    shape = (
        batch if program.depends_on("b") else 1,
        num_heads if program.depends_on("h") else 1,
        -(-lengths[0] // tile[0]),
        -(-lengths[1] // tile[1]),
    )
    name, first = next(iter(named.items()), ("like", np.empty(0)))
    layout = MapLayout(shape, *lengths, tile, program)
    backend = backend_of(name, first)
    copies = backend.copied(mask_args)
    states, intervals = backend.tile_states(layout, like, {"mask_mod": program, "mask_args": copies})
    return BlockMask.of_states(states, *lengths, tile, program, copies, mask_args, intervals)
