"""Plans of the three calls: the stages in order, and the workspaces between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..families.choice import Choice
from ..families.device import DeviceInfo
from ..families.operations import OPERATIONS
from ..families.records import SHARES
from ..families.tile import TileConfig
from ..problem.attention import AttentionProblem
from ..problem.dtypes import itemsize
from ..problem.strides import AnyStrides
from .layout import StageLayout
from .stages import Plan, Stage, Workspace

__all__ = ["plan_backward", "plan_delta", "plan_forward"]


def plan_forward(
    problem: AttentionProblem, device: DeviceInfo, strides: Mapping[str, AnyStrides], choice: Choice
) -> Plan:
    """The plan of `fa2cupy.forward`. `strides` has ``q``, ``k``, ``v``, ``o`` and the features' arrays."""
    layout = StageLayout(problem, device, choice.family, strides)
    tile, num_splits = choice.tiles["forward"], choice.num_splits.get("forward", 1)
    stages = [*_clear_unused(layout, "clear_forward"), layout.tiled("forward", tile, num_splits)]
    if num_splits == 1:
        return _plan(stages)
    stage, workspace = _merge_forward(layout, tile, num_splits)
    return _plan([*stages, stage], [workspace])


def plan_delta(
    problem: AttentionProblem, device: DeviceInfo, strides: Mapping[str, AnyStrides], choice: Choice
) -> Plan:
    """The plan of `fa2cupy.delta`. `strides` has ``o`` and ``dout``."""
    return _plan([_delta(StageLayout(problem, device, choice.family, strides))])


def plan_backward(
    problem: AttentionProblem,
    device: DeviceInfo,
    strides: Mapping[str, AnyStrides],
    choice: Choice,
    *,
    extras: tuple[str, ...] = (),
    with_delta: bool = True,
) -> Plan:
    """The plan of `fa2cupy.backward`.

    Parameters
    ----------
    problem, device, choice
    strides : mapping
        Strides of q, k, v, o, dout, dq, dk, dv and the features' arrays, and of dbias_accum for ``"dbias"``.
    extras : tuple of str, optional
        The subset of ``"dlse"``, an input, and ``"dbias"`` and ``"dsink"``, results, that the call has.
    with_delta : bool, optional
        If True, the first stage computes delta; else the caller passes it.
    """
    layout = StageLayout(problem, device, choice.family, strides, extras)
    stages: list[Stage] = []
    workspaces: list[Workspace] = []
    cleared = ["dbias_accum"] if "dbias" in extras else []
    if with_delta:
        rows = problem.batch * problem.num_heads * problem.seqlen_q
        stages.append(_delta(layout))
        workspaces.append(Workspace("delta", rows * itemsize(problem.accumulator_dtype)))
    if "dsink" in extras:
        stages.append(layout.stage("dsink", _tile_of("dsink"), problem.num_heads))
    stages += _clear_unused(layout, "clear_backward")
    for operation, tile in choice.tiles.items():
        num_splits = choice.num_splits.get(operation, 1)
        stages.append(layout.tiled(operation, tile, num_splits))
        if num_splits > 1:
            # Without dQ, shares have copies of their own, so that their sum is bit-reproducible.
            adds = operation == "backward"
            stage, workspace = _sum_dkdv(layout, tile, 1 if adds else num_splits)
            stages.append(stage)
            workspaces.append(workspace)
            cleared += [SHARES] if adds else []
    tile = choice.tiles.get("backward")
    if tile is not None and choice.family.backward_owns == "queries":
        cleared += ["dk", "dv"]
    elif tile is not None:
        stage, workspace = _convert_dq(layout, tile)
        stages.append(stage)
        workspaces.append(workspace)
        cleared.append("dq_accum")
    return _plan(stages, workspaces, cleared)


def _delta(layout: StageLayout) -> Stage:
    problem = layout.problem
    vector = 8 if problem.itemsize == 2 else 1
    lanes = min(32, 1 << max(2, (-(-problem.head_dim // vector) - 1).bit_length()))
    tile = _tile_of("delta", 32 * _num_warps("delta") // lanes)
    num_tiles = -(-problem.seqlen_q // tile.b_r)
    return layout.stage("delta", tile, problem.batch * problem.num_heads * num_tiles, num_tiles=num_tiles)


def _convert_dq(layout: StageLayout, tile: TileConfig) -> tuple[Stage, Workspace]:
    """The stage that rounds dQ from its workspace, which lies in query tiles of the backward, and that workspace."""
    problem = layout.problem
    num_tiles = layout.num_tiles("queries", tile.b_r)
    blocks = problem.batch * problem.num_heads * num_tiles
    columns = layout.family.padded_head_dim(problem.head_dim)
    stage = layout.stage("convert_dq", _tile_of("convert_dq", tile.b_r, tile.b_c), blocks, num_tiles=num_tiles)
    return stage, Workspace("dq_accum", blocks * tile.b_r * columns * itemsize("float32"))


def _merge_forward(layout: StageLayout, tile: TileConfig, num_splits: int) -> tuple[Stage, Workspace]:
    """The stage that merges the shares of O and lse, and their workspace. A block merges 16 rows."""
    problem = layout.problem
    num_tiles = layout.num_tiles("queries", tile.b_r)
    tiles = problem.batch * problem.num_heads * num_tiles
    columns = -(-problem.head_dim // 16) * 16
    merged = _tile_of("merge_forward", b_r=tile.b_r)
    stage = layout.stage("merge_forward", merged, tiles * tile.b_r // 16, num_tiles=num_tiles, num_splits=num_splits)
    return stage, Workspace(SHARES, num_splits * tiles * tile.b_r * (columns + 1) * itemsize("float32"))


def _sum_dkdv(layout: StageLayout, tile: TileConfig, num_copies: int) -> tuple[Stage, Workspace]:
    """The stage that sums copies of dK and dV, and their workspace. A block sums 16 rows of one gradient."""
    problem = layout.problem
    num_tiles = layout.num_tiles("keys", tile.b_c)
    tiles = problem.batch * problem.num_heads_kv * num_tiles
    blocks, columns = tiles * tile.b_c // 16 * 2, -(-problem.head_dim // 16) * 16
    summed = _tile_of("sum_dkdv", b_c=tile.b_c)
    stage = layout.stage("sum_dkdv", summed, blocks, num_tiles=num_tiles, num_copies=num_copies)
    return stage, Workspace(SHARES, num_copies * tiles * 2 * tile.b_c * columns * itemsize("float32"))


def _clear_unused(layout: StageLayout, operation: str) -> list[Stage]:
    """The stage that clears rows outside all packed sequences; only the device knows the offsets."""
    problem = layout.problem
    if not problem.is_packed:
        return []
    tile = _tile_of(operation)
    rows = problem.seqlen_q if operation == "clear_forward" else max(problem.seqlen_q, problem.seqlen_k)
    return [layout.stage(operation, tile, -(-rows // tile.num_threads) if problem.num_heads else 0)]


def _tile_of(operation: str, b_r: int = 1, b_c: int = 1) -> TileConfig:
    """The tile of a kernel whose number of warps is fixed."""
    return TileConfig(b_r, b_c, _num_warps(operation))


def _num_warps(operation: str) -> int:
    num_warps = OPERATIONS[operation].num_warps
    assert num_warps is not None, f"the tile of {operation} is a choice"
    return num_warps


def _plan(stages: Iterable[Stage], workspaces: Iterable[Workspace] = (), cleared: Iterable[str] = ()) -> Plan:
    return Plan(tuple(stage for stage in stages if stage.blocks), tuple(workspaces), tuple(cleared))
