"""Plans of float32 calls on tensor cores: the stage that splits inputs into parts, and what it leaves to others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..families.choice import Choice
from ..families.float32_parts import row_bytes_of_parts
from ..families.records import EXCEPTIONS, EXTREMES
from ..families.tile import TileConfig
from ..problem.attention import AttentionProblem
from ..problem.dtypes import ITEMSIZE
from .layout import PART_ROWS, StageLayout
from .own_lse import OWN_LSE, with_given_lse, with_own_lse
from .stages import Stage, Workspace
from .tensor_maps import BOX_COLUMNS

__all__ = ["with_parts"]

_ROWS_OF_THREAD = 4


def with_parts(
    layout: StageLayout,
    tiled: Sequence[Stage],
    choice: Choice,
    added: Sequence[Workspace] = (),
    *,
    with_delta: bool = False,
) -> tuple[Stage, list[Stage], list[Workspace]]:
    """The stage that makes parts, those that multiply them and the fallback behind them, and their workspaces.

    The first stage also clears the workspace in `added`, to which others add, and computes delta if asked to.
    """
    problem, fallback = layout.problem, choice.fallback
    assert fallback is not None, f"{choice.family.name} leaves heads to a fallback"
    sides = {"q": "queries", "k": "keys", "v": "keys", **({"dout": "queries"} if choice.method else {})}
    row, row_v = row_bytes_of_parts(problem.head_dim, problem.columns_of("v"), is_forward=not choice.method)
    all_blocks, workspaces = 0, []
    values: dict[str, int] = {}
    for name, side in sides.items():
        heads = problem.num_heads if side == "queries" else problem.num_heads_kv
        blocks = problem.batch * heads * layout.num_strips(side)
        workspaces.append(Workspace(f"{name}_parts", blocks * PART_ROWS * (row if name in ("q", "k") else row_v)))
        workspaces.append(Workspace(f"{name}_units", blocks * ITEMSIZE["float32"]))
        all_blocks += blocks
    # For each K/V head a mark; the largest elements of the columns of q and k, what becomes the mark, and a count.
    marks = problem.batch * problem.num_heads_kv * ITEMSIZE["float32"]
    workspaces.append(Workspace(EXCEPTIONS, marks))
    columns = -(-problem.head_dim // BOX_COLUMNS) * BOX_COLUMNS
    workspaces.append(Workspace(EXTREMES, marks * (2 * columns + 2), stays_zero=True))
    if not any(stage.blocks for stage in tiled):
        all_blocks = 0  # nobody reads the parts
    operation = "split_gradients" if choice.method else "split_inputs"
    if choice.method:
        (cleared,) = added or [Workspace("dq_accum", 0)]
        values["dq_accum_bytes"] = cleared.nbytes
        workspaces += [] if added else [cleared]
        workspaces += [Workspace("delta", problem.statistics_bytes)] if with_delta else []
    split = layout.stage(operation, _tile(problem), all_blocks, (), is_split=False, **values)
    if choice.method and not with_delta:
        split = replace(split, renamed={"o": None, "delta": None})
    of_others = with_given_lse(problem) if choice.method else problem
    others = StageLayout(of_others, layout.device, fallback.family, layout.strides, is_fallback=True)
    left = [others.tiled(operation, tile) for operation, tile in fallback.tiles.items()]
    if choice.method:
        left = with_own_lse(left)
        workspaces.append(Workspace(OWN_LSE, problem.statistics_bytes))
    return split, [*tiled, *left], workspaces


def _tile(problem: AttentionProblem) -> TileConfig:
    """The tile of kernels that make parts: so many warps that a thread has eight columns of `_ROWS_OF_THREAD` rows."""
    columns = max(problem.columns_of("q"), problem.columns_of("v"))
    lanes = 1 << (-(-columns // 8) - 1).bit_length()  # that share a row
    return TileConfig(PART_ROWS, PART_ROWS, max(1, PART_ROWS * lanes // 32 // _ROWS_OF_THREAD))
