"""From a problem to the kernels that solve it: stages, in order, and the workspaces between them. Pure arithmetic, no GPU."""

from __future__ import annotations

from collections.abc import Mapping

from ..families.device import DeviceInfo
from .planner import Planner, Strides
from ..problem.attention import AttentionProblem
from .stages import Plan, Stage, Workspace
from ..families.tiles import TileConfig, padded_head_dim

__all__ = ["Plan", "Stage", "Workspace", "plan_backward", "plan_delta", "plan_forward"]

_DELTA_WARPS = 4
_CONVERT_WARPS = 8
_DSINK_WARPS = 8
_CLEAR_WARPS = 4


def plan_forward(
    problem: AttentionProblem,
    device: DeviceInfo,
    strides: Mapping[str, Strides],
    config: TileConfig | Mapping[str, TileConfig] | None = None,
    family: str | None = None,
) -> Plan:
    """One stage. `strides` has ``q``, ``k``, ``v`` and ``o``."""
    planner = Planner("forward", problem, device, strides, family)
    stage = planner.by_query_tiles("forward", planner.tile("forward", config))
    return _plan(*_clear_rest("clear_forward", problem, device, strides), stage)


def plan_delta(problem: AttentionProblem, device: DeviceInfo, strides: Mapping[str, Strides]) -> Plan:
    """One stage. `strides` has ``o`` and ``dout``."""
    return _plan(_delta_stage(Planner("delta", problem, device, strides, None)))


def plan_backward(
    problem: AttentionProblem,
    device: DeviceInfo,
    strides: Mapping[str, Strides],
    method: str,
    config: TileConfig | Mapping[str, TileConfig] | None = None,
    family: str | None = None,
    with_delta: bool = True,
    more: tuple[str, ...] = (),
) -> Plan:
    """The stages of a scheme, delta first unless the caller has it. `strides` has q, k, v, o, dout, dq, dk, dv.

    `more` names what there is besides: ``"dlse"`` to take in, ``"dbias"`` and ``"dsink"`` to give.
    """

    def planner_of(operation: str) -> Planner:
        return Planner(operation, problem, device, strides, family, more)

    rows = problem.batch * problem.num_heads * problem.seqlen_q
    stages, workspaces = [], []
    if with_delta:
        stages.append(_delta_stage(Planner("delta", problem, device, strides, None, more)))
        workspaces.append(Workspace("delta", rows * (8 if problem.dtype == "float64" else 4)))
    if "dsink" in more:
        planner = Planner("dsink", problem, device, strides, None, more)
        stages.append(planner.stage("dsink", TileConfig(1, 1, _DSINK_WARPS), problem.num_heads))
    cleared = ("dbias_accum",) if "dbias" in more else ()
    stages += _clear_rest("clear_backward", problem, device, strides)
    if method == "two_pass":
        by_queries, by_keys = planner_of("backward_dq"), planner_of("backward_dkdv")
        stages.append(by_queries.by_query_tiles("backward_dq", by_queries.tile("backward_dq", config)))
        stages.append(by_keys.by_key_tiles("backward_dkdv", by_keys.tile("backward_dkdv", config)))
        return _plan(*stages, workspaces=workspaces, cleared=cleared)
    planner = planner_of("backward")
    tile = planner.tile("backward", config)
    if planner.family == "simt":
        stages.append(planner.by_query_tiles("backward", tile))
        return _plan(*stages, workspaces=workspaces, cleared=tuple(dict.fromkeys(("dk", "dv", *cleared))))
    stages.append(planner.by_key_tiles("backward", tile))
    num_tiles = planner.num_tiles(2, tile.b_r)
    all_tiles = problem.batch * problem.num_heads * num_tiles
    columns = padded_head_dim(planner.family, problem.head_dim)
    workspaces.append(Workspace("dq_accum", all_tiles * tile.b_r * columns * 4))
    convert = TileConfig(tile.b_r, tile.b_c, _CONVERT_WARPS)
    stages.append(planner.stage("convert_dq", convert, all_tiles, num_tiles=num_tiles))
    return _plan(*stages, workspaces=workspaces, cleared=("dq_accum", *cleared))


def _delta_stage(planner: Planner) -> Stage:
    problem = planner.problem
    vector = 8 if problem.itemsize == 2 else 1
    lanes = min(32, 1 << max(2, (-(-problem.head_dim // vector) - 1).bit_length()))
    rows_per_block = 32 * _DELTA_WARPS // lanes
    num_tiles = -(-problem.seqlen_q // rows_per_block)
    tile = TileConfig(rows_per_block, 1, _DELTA_WARPS)
    return planner.stage("delta", tile, problem.batch * problem.num_heads * num_tiles, num_tiles=num_tiles)


def _clear_rest(
    operation: str, problem: AttentionProblem, device: DeviceInfo, strides: Mapping[str, Strides]
) -> list[Stage]:
    """What writes the rows that are of no packed sequence, which is for the device to find out."""
    if not problem.is_packed:
        return []
    tile = TileConfig(1, 1, _CLEAR_WARPS)
    rows = problem.seqlen_q if operation == "clear_forward" else max(problem.seqlen_q, problem.seqlen_k)
    planner = Planner(operation, problem, device, strides, None)
    return [planner.stage(operation, tile, -(-rows // tile.num_threads) if problem.num_heads else 0)]


def _plan(*stages: Stage, workspaces: list[Workspace] | None = None, cleared: tuple[str, ...] = ()) -> Plan:
    return Plan(tuple(s for s in stages if s.blocks), tuple(workspaces or ()), cleared)
