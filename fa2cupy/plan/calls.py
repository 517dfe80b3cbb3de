"""Plans of the three calls: the stages in order, and the workspaces between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..families.choice import Choice
from ..families.device import DeviceInfo
from ..families.operations import OPERATIONS
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
    return _plan([*_clear_unused(layout, "clear_forward"), layout.tiled("forward", choice.tiles["forward"])])


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
        Strides of q, k, v, o, dout, dq, dk, dv and the features' arrays, and of dbias for ``"dbias"``.
    extras : tuple of str, optional
        The subset of ``"dlse"``, an input, and ``"dbias"`` and ``"dsink"``, results, that the call has; and
        ``"full_dbias"`` if dbias has an element for each score (`fa2cupy.problem.strides.is_full`).
    with_delta : bool, optional
        If True, the first stage computes delta; else the caller passes it.
    """
    layout = StageLayout(problem, device, choice.family, strides, extras)
    stages: list[Stage] = []
    workspaces: list[Workspace] = []
    # A full dbias is stored by the blocks that own its rows; rows and keys beyond a packed sequence are nobody's.
    cleared = ["dbias"] if "dbias" in extras and ("full_dbias" not in extras or problem.is_packed) else []
    if with_delta:
        rows = problem.batch * problem.num_heads * problem.seqlen_q
        stages.append(_delta(layout))
        workspaces.append(Workspace("delta", rows * itemsize(problem.accumulator_dtype)))
    if "dsink" in extras:
        stages.append(layout.stage("dsink", _tile_of("dsink"), problem.num_heads))
    stages += _clear_unused(layout, "clear_backward")
    stages += [layout.tiled(operation, tile) for operation, tile in choice.tiles.items()]
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
