"""Plans of all calls but `fa2cupy.decode`: the stages in order, and the workspaces between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..families.boxes import with_boxes
from ..families.choice import Choice
from ..families.device import DeviceInfo
from ..families.kept_bias import with_kept_bias
from ..families.operations import ONE_TILE_DBIAS, OPERATIONS
from ..families.records import COLUMN_RISES, ROW_RISES, SHARES
from ..families.tile import TileConfig
from ..jit.params import gradient_arrays
from ..problem.attention import AttentionProblem
from ..problem.block_mask import COLUMN_INTERVALS, MOST_INTERVALS, ROW_INTERVALS
from ..problem.dtypes import ITEMSIZE
from ..problem.strides import AnyStrides
from .dbias import one_tile_dbias, with_dbias
from .decode import plan_few_queries
from .float32_parts import with_parts
from .layout import StageLayout
from .own_lse import OWN_LSE, with_given_lse, with_own_lse
from .stages import Plan, Stage, Workspace

__all__ = [
    "plan_backward",
    "plan_delta",
    "plan_forward",
    "plan_gradient_tangents",
    "plan_jvp",
    "plan_merge",
    "plan_output_jvp",
    "plan_tile_states",
]

#: The workspaces that the kernel of delta can clear. They have no bytes in calls that do not need them.
_CLEARED_BY_DELTA = (Workspace("dq_accum", 0), Workspace(SHARES, 0))


def plan_forward(
    problem: AttentionProblem, device: DeviceInfo, strides: Mapping[str, AnyStrides], choice: Choice
) -> Plan:
    """The plan of `fa2cupy.forward`. `strides` has ``q``, ``k``, ``v``, ``o`` and the features' arrays."""
    if "decode" in choice.tiles:
        return plan_few_queries(problem, device, strides, choice)
    if choice.kept_keys:
        problem = with_kept_bias(problem, choice.kept_keys)
    problem = _tiled_problem(problem, choice)
    layout = StageLayout(problem, device, choice.family, strides)
    tile, num_splits = choice.tiles["forward"], choice.num_splits.get("forward", 1)
    lists, of_lists = layout.lists(choice.tiles)
    stages = [*_clear_unused(layout, "clear_forward"), *lists, layout.tiled("forward", tile, num_splits)]
    if choice.family.multiplies_parts:
        split, stages, workspaces = with_parts(layout, stages, choice)
        return _plan([split, *stages], workspaces)
    if num_splits == 1:
        return _plan(stages, of_lists)
    stage, workspace = _merge_forward(layout, tile, num_splits)
    return _plan([*stages, stage], [*of_lists, workspace])


def plan_jvp(problem: AttentionProblem, device: DeviceInfo, strides: Mapping[str, AnyStrides], choice: Choice) -> Plan:
    """The plan of `fa2cupy.jvp`. `strides` has those of `plan_forward`, ``qt``, ``kt``, ``vt`` and ``ot``."""
    layout = StageLayout(problem, device, choice.family, strides)
    lists, of_lists = layout.lists(choice.tiles)
    tiled = [layout.tiled(operation, tile) for operation, tile in choice.tiles.items()]
    stages = [*_clear_unused(layout, "clear_forward"), *lists, *tiled]
    return _plan(stages, of_lists, ["ot", "lset"] if problem.is_packed else [])


def plan_output_jvp(
    problem: AttentionProblem, device: DeviceInfo, strides: Mapping[str, AnyStrides], choice: Choice
) -> Plan:
    """The plan of `fa2cupy.jvp` for given o and lse. `strides` are those of `plan_jvp`."""
    layout, tiled, workspaces = _with_given_results(problem, device, strides, choice)
    lists, of_lists = layout.lists(choice.tiles)
    return _plan([*lists, *tiled], [*workspaces, *of_lists], ["ot", "lset"] if problem.is_packed else [])


def plan_gradient_tangents(
    problem: AttentionProblem, device: DeviceInfo, strides: Mapping[str, AnyStrides], choice: Choice
) -> Plan:
    """The plan of `fa2cupy.backward_jvp`, or of `fa2cupy.double_backward` if the choice has ``output_jvp``.

    `strides` has those of q, k, v, o, dout and of their tangents, without that of dout if the call has none, of dqt,
    dkt and dvt, and of the features' arrays.
    """
    strides = {"dot": (0, 0, 0), **strides}
    layout, tiled, workspaces = _with_given_results(problem, device, strides, choice)
    workspaces += [Workspace(name, problem.statistics_bytes) for name in ("delta", "deltat")]
    results = ["dqt", "dkt", "dvt"]
    delta = _of_rows(layout, "delta_jvp")
    if "output_jvp" in choice.tiles:
        absent = {"dot": None, "dlset": None}
        tiled = [replace(stage, renamed={**stage.renamed, "dot": None}) for stage in tiled]
        delta = replace(delta, renamed=absent)
        if not problem.settings.dlse:  # else it is a result
            workspaces.append(Workspace("lset", problem.statistics_bytes))
        results += ["ot", "lset"]
    # delta' is made of the results of all kernels but the last two.
    lists, of_lists = layout.lists(choice.tiles)
    stages = [*lists, *tiled[:-2], delta, *tiled[-2:]]
    if problem.settings.dsink:
        stages.append(layout.stage("dsink_jvp", _tile_of("dsink_jvp"), problem.num_heads))
    # Rows of no sequence are nobody's; nor are keys that a sparse map does not list.
    skips_keys = problem.settings.block_mask is not None and choice.family.clears_unlisted_keys
    cleared = results if problem.is_packed else ["dkt", "dvt"] if skips_keys else []
    return _plan(stages, [*workspaces, *of_lists], [*cleared, *_cleared_dbias(problem)])


def _with_given_results(
    problem: AttentionProblem, device: DeviceInfo, strides: Mapping[str, AnyStrides], choice: Choice
) -> tuple[StageLayout, list[Stage], list[Workspace]]:
    """The layout, tiled stages and workspaces of a call that gets lse, which some families compute again."""
    if "forward" not in choice.tiles:
        layout = StageLayout(problem, device, choice.family, strides)
        return layout, [layout.tiled(operation, tile) for operation, tile in choice.tiles.items()], []
    layout = StageLayout(with_given_lse(problem), device, choice.family, strides)
    tiled = with_own_lse([layout.tiled(operation, tile) for operation, tile in choice.tiles.items()])
    return layout, tiled, [Workspace(OWN_LSE, problem.statistics_bytes)]


def plan_delta(
    problem: AttentionProblem, device: DeviceInfo, strides: Mapping[str, AnyStrides], choice: Choice
) -> Plan:
    """The plan of `fa2cupy.delta`. `strides` has ``o`` and ``dout``."""
    return _plan([_delta(StageLayout(problem, device, choice.family, strides))], _CLEARED_BY_DELTA)


def plan_merge(
    problem: AttentionProblem,
    device: DeviceInfo,
    strides: Mapping[str, AnyStrides],
    choice: Choice,
    num_parts: int,
    part_stride: int,
) -> Plan:
    """The plan of `fa2cupy.merge`. `strides` has ``o_parts``, of one part, and ``o``; parts are `part_stride` apart."""
    layout = StageLayout(problem, device, choice.family, strides)
    tile = _tile_of("merge", 32 * _num_warps("merge") // _lanes_of_row(problem))
    rows = problem.batch * problem.num_heads * problem.seqlen_q
    return _plan([layout.stage("merge", tile, -(-rows // tile.b_r), num_parts=num_parts, part_stride=part_stride)])


def plan_tile_states(
    problem: AttentionProblem, device: DeviceInfo, strides: Mapping[str, AnyStrides], choice: Choice
) -> Plan:
    """The plan of `fa2cupy.block_mask`: a block for each tile. `strides` has the layouts of the function's arrays."""
    sparse = problem.settings.block_mask
    assert sparse is not None, "the map to make"
    layout = StageLayout(problem, device, choice.family, strides)
    tile, blocks, (*_, rows, columns) = _tile_of("tile_states", *sparse.tile), math.prod(sparse.shape), sparse.shape
    states = layout.stage("tile_states", tile, blocks, map_rows=rows, map_columns=columns)
    found = (ROW_INTERVALS, COLUMN_INTERVALS, MOST_INTERVALS)
    if not any(sparse.intervals):
        return _plan([replace(states, renamed=dict.fromkeys((*found, ROW_RISES, COLUMN_RISES)))])
    num_rows, num_columns = (problem.batch * problem.num_heads * n for n in (problem.seqlen_q, problem.seqlen_k))
    rises = [Workspace(ROW_RISES, 4 * num_rows), Workspace(COLUMN_RISES, 4 * num_columns)]
    tile = _tile_of("close_intervals")
    blocks = -(-(num_rows + num_columns) // tile.num_threads)
    closes = layout.stage("close_intervals", tile, blocks, num_rows=num_rows, num_columns=num_columns)
    return _plan([states, closes], rises, (*found, ROW_RISES, COLUMN_RISES))


def plan_backward(
    problem: AttentionProblem,
    device: DeviceInfo,
    strides: Mapping[str, AnyStrides],
    choice: Choice,
    *,
    with_delta: bool = True,
    shares_delta: bool = False,
) -> Plan:
    """The plan of `fa2cupy.backward`.

    Parameters
    ----------
    problem, device, choice
    strides : mapping
        Strides of q, k, v, o, dout, dq, dk, dv and the features' arrays, and of dbias if the call returns it.
    with_delta : bool, optional
        If True, the call computes delta; else the caller passes it.
    shares_delta : bool, optional
        True if stages that are not of this plan read delta, too.
    """
    if choice.dbias is not None:
        of_tiled, others = problem.with_settings(replace(problem.settings, dbias=False)), replace(choice, dbias=None)
        plan = plan_backward(of_tiled, device, strides, others, with_delta=with_delta, shares_delta=True)
        return with_dbias(plan, problem, device, strides, choice.dbias, _tile_of("sum_dbias"))
    problem = _tiled_problem(problem, choice)
    settings = problem.settings
    has_own_lse = "forward" in choice.tiles
    layout = StageLayout(with_given_lse(problem) if has_own_lse else problem, device, choice.family, strides)
    tiled: list[Stage] = []
    workspaces: list[Workspace] = []
    added: list[Workspace] = []  # to which kernels add
    cleared = [] if choice.owns_dbias else _cleared_dbias(problem)
    if settings.dscore_args:
        cleared += [name for function in settings.functions for name, _ in gradient_arrays(function)]
    for operation, tile in choice.tiles.items():
        found, of_kernel, of_sums = _with_sums(layout, operation, tile, choice.num_splits.get(operation, 1))
        tiled += found
        workspaces += of_kernel
        added += of_sums
        if operation == "backward" and choice.family.backward_owns == "queries":
            cleared += ["dk", "dv"]
    if has_own_lse:
        tiled = with_own_lse(tiled)
        workspaces.append(Workspace(OWN_LSE, problem.statistics_bytes))
    if settings.block_mask is not None and choice.family.clears_unlisted_keys:
        cleared += ["dk", "dv"]
    stages: list[Stage] = []
    if choice.family.multiplies_parts:
        is_computed = with_delta and not problem.is_packed  # whose rows between sequences are no block's
        split, tiled, of_parts = with_parts(layout, tiled, choice, added, with_delta=is_computed)
        stages, added, with_delta = [split], [], with_delta and not is_computed
        workspaces += of_parts
    if choice.method == "one_tile":
        computes_delta = with_delta and not (shares_delta or settings.dsink)
        renamed: dict[str, str | None] = {"delta" if computes_delta else "o": None}
        tiled[0] = replace(tiled[0], renamed={**tiled[0].renamed, **renamed})
        with_delta = with_delta and not computes_delta
        cleared += ["dq"] if 0 in layout.problem.sizes_of("k") else []
    if with_delta and "backward_both" not in choice.tiles:
        stages.append(_delta(layout, added))
        workspaces.append(Workspace("delta", problem.statistics_bytes))
        names = {workspace.name for workspace in workspaces}
        workspaces += [workspace for workspace in _CLEARED_BY_DELTA if workspace.name not in names]
    if not stages or not stages[0].blocks:
        cleared += [workspace.name for workspace in added]
    if settings.dsink:
        stages.append(layout.stage("dsink", _tile_of("dsink"), problem.num_heads))
    stages += _clear_unused(layout, "clear_backward")
    lists, of_lists = layout.lists(choice.tiles)
    return _plan([*stages, *lists, *tiled], [*workspaces, *of_lists], cleared)


def _tiled_problem(problem: AttentionProblem, choice: Choice) -> AttentionProblem:
    """The problem of the tiled kernels, which may have boxes of tokens in the place of a mask function."""
    return problem if choice.boxes is None else with_boxes(problem, choice.boxes)


def _with_sums(
    layout: StageLayout, operation: str, tile: TileConfig, num_splits: int
) -> tuple[list[Stage], list[Workspace], list[Workspace]]:
    """A tiled kernel of a backward with the stage that sums what it leaves; workspaces, and those to which it adds."""
    if operation == ONE_TILE_DBIAS:
        stages, shares = one_tile_dbias(layout, tile, num_splits, _tile_of("sum_dbias"))
        return stages, [shares], []
    if operation == "backward_both":
        return [layout.both(tile)], [], []
    kernel = layout.tiled(operation, tile, num_splits)
    if num_splits > 1 or (operation == "backward" and layout.family.backward_owns == "keys"):
        sums = _Sums(layout, operation, tile, num_splits)
        return [kernel, sums.stage()], sums.workspaces, sums.added
    return [kernel], [], []


def _cleared_dbias(problem: AttentionProblem) -> list[str]:
    """The gradient of the bias, if it must be zero before kernels write it."""
    settings = problem.settings
    # A full dbias is stored by the blocks that own its rows; rows and keys beyond a packed sequence are nobody's, nor
    # are tiles that a sparse map leaves out.
    is_partial = problem.is_packed or settings.block_mask is not None
    return ["dbias"] if settings.dbias and (not settings.full_dbias or is_partial) else []


def _delta(layout: StageLayout, cleared: Sequence[Workspace] = ()) -> Stage:
    """The stage that computes delta, and clears workspaces of the stages after it."""
    sizes = {workspace.name: workspace.nbytes for workspace in (*_CLEARED_BY_DELTA, *cleared)}
    return _of_rows(layout, "delta", **{f"{name}_bytes": nbytes for name, nbytes in sizes.items()})


def _of_rows(layout: StageLayout, operation: str, **values: int) -> Stage:
    """The stage of a kernel that computes a number for each row of o."""
    problem = layout.problem
    tile = _tile_of(operation, 32 * _num_warps(operation) // _lanes_of_row(problem))
    num_tiles = -(-problem.seqlen_q // tile.b_r)
    blocks = problem.batch * problem.num_heads * num_tiles
    return layout.stage(operation, tile, blocks, (), is_split=False, num_tiles=num_tiles, **values)


class _Sums:
    """The sums of a kernel that owns keys: their workspaces, and the stage that makes gradients of them.

    ``backward`` adds dQ to a workspace, in tiles of queries. Blocks that share key tiles leave dK and dV in another
    one, in tiles of keys: those of ``backward`` add to one copy, and the others have copies of their own, so that the
    sum is bit-reproducible.
    """

    def __init__(self, layout: StageLayout, operation: str, tile: TileConfig, num_splits: int):
        problem = layout.problem
        self._layout, self._tile = layout, tile
        self._with_dq, self._with_shares = operation == "backward", num_splits > 1
        self._num_copies = 1 if self._with_dq else num_splits
        self._num_tiles = layout.num_tiles("queries", tile.b_r)
        self._num_key_tiles = layout.num_tiles("keys", tile.b_c)
        self._query_tiles = problem.batch * problem.num_heads * self._num_tiles
        self._key_tiles = problem.batch * problem.num_heads_kv * self._num_key_tiles

    @property
    def workspaces(self) -> list[Workspace]:
        """The sum of dQ has the columns of the family's kernels, the shares have multiples of 16."""
        problem = self._layout.problem
        itemsize = ITEMSIZE[problem.accumulator_dtype]
        of_query_tile = self._tile.b_r * self._layout.family.padded_head_dim(problem.head_dim) * itemsize
        columns = sum(-(-problem.columns_of(name) // 16) * 16 for name in ("dk", "dv"))
        of_key_tile = self._tile.b_c * columns * itemsize
        workspaces = [Workspace("dq_accum", self._query_tiles * of_query_tile)] if self._with_dq else []
        if self._with_shares:
            workspaces.append(Workspace(SHARES, self._num_copies * self._key_tiles * of_key_tile))
        return workspaces

    @property
    def added(self) -> list[Workspace]:
        """The workspaces to which kernels add. They must be zero before that."""
        return self.workspaces if self._with_dq else []

    def stage(self) -> Stage:
        """The stage that reads the workspaces. A block has a tile of dQ, or 32 rows of dK or dV."""
        blocks, values = 0, {}
        operation = "convert_dq"
        if self._with_dq:
            blocks += self._query_tiles
            values["num_tiles"] = self._num_tiles
        if self._with_shares:
            operation = "convert_gradients" if self._with_dq else "sum_dkdv"
            blocks += self._key_tiles * -(-self._tile.b_c // 32) * 2
            values |= {"num_key_tiles": self._num_key_tiles, "num_copies": self._num_copies}
        tile = _tile_of(operation, self._tile.b_r if self._with_dq else 1, self._tile.b_c)
        return self._layout.stage(operation, tile, blocks, (), is_split=False, **values)


def _merge_forward(layout: StageLayout, tile: TileConfig, num_splits: int) -> tuple[Stage, Workspace]:
    """The stage that merges the shares of O and lse, and their workspace. A block merges 16 rows."""
    problem = layout.problem
    num_tiles = layout.num_tiles("queries", tile.b_r)
    tiles = problem.batch * problem.num_heads * num_tiles
    columns = -(-problem.columns_of("o") // 16) * 16
    merged = _tile_of("merge_forward", b_r=tile.b_r)
    stage = layout.stage("merge_forward", merged, tiles * tile.b_r // 16, num_tiles=num_tiles, num_splits=num_splits)
    return stage, Workspace(SHARES, num_splits * tiles * tile.b_r * (columns + 1) * ITEMSIZE["float32"])


def _clear_unused(layout: StageLayout, operation: str) -> list[Stage]:
    """The stage that clears rows outside all packed sequences; only the device knows the offsets."""
    problem = layout.problem
    if not problem.is_packed:
        return []
    tile = _tile_of(operation)
    rows = problem.seqlen_q if operation == "clear_forward" else max(problem.seqlen_q, problem.seqlen_k)
    return [layout.stage(operation, tile, -(-rows // tile.num_threads) if problem.num_heads else 0)]


def _lanes_of_row(problem: AttentionProblem) -> int:
    """The lanes that share a row of o in kernels of one pass over it. Each has 16 bytes, or one element at a time."""
    columns = problem.head_dim_v or problem.head_dim
    vector = 8 if problem.itemsize == 2 and columns % 8 == 0 else 1
    return min(32, 1 << max(2, (-(-columns // vector) - 1).bit_length()))


def _tile_of(operation: str, b_r: int = 1, b_c: int = 1) -> TileConfig:
    """The tile of a kernel whose number of warps is fixed."""
    return TileConfig(b_r, b_c, _num_warps(operation))


def _num_warps(operation: str) -> int:
    num_warps = OPERATIONS[operation].num_warps
    assert num_warps is not None, f"the tile of {operation} is a choice"
    return num_warps


def _plan(stages: Iterable[Stage], workspaces: Iterable[Workspace] = (), cleared: Iterable[str] = ()) -> Plan:
    return Plan(tuple(stage for stage in stages if stage.blocks), tuple(workspaces), tuple(cleared))
