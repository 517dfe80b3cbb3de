"""The stages of the kernel that owns tiles of a broadcast bias, behind those of the other gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..families.dbias import DbiasOwner
from ..families.device import DeviceInfo
from ..families.records import SHARERS, SHARES
from ..families.tile import TileConfig
from ..problem.attention import AttentionProblem
from ..problem.dtypes import ITEMSIZE
from ..problem.strides import AnyStrides, contiguous_like, sharers_of
from .layout import StageLayout
from .own_lse import OWN_LSE, with_given_lse, with_own_lse
from .stages import Plan, Stage, Workspace

__all__ = ["one_tile_dbias", "with_dbias"]


def with_dbias(
    plan: Plan,
    problem: AttentionProblem,
    device: DeviceInfo,
    strides: Mapping[str, AnyStrides],
    owner: DbiasOwner,
    of_sum: TileConfig,
) -> Plan:
    """The plan of a backward with the kernel that owns tiles of a broadcast bias behind its stages.

    Parameters
    ----------
    plan : Plan
        That of the other gradients.
    problem, device, strides
    owner : DbiasOwner
    of_sum : TileConfig
        That of the kernel that sums the shares of its blocks.
    """
    shape, of_result = problem.score_shape, strides["dbias"]
    if 0 in shape:
        return replace(plan, cleared=(*plan.cleared, "dbias"))
    # It stores its sums as other kernels store the elements of a full dbias; those of shares are not rounded yet.
    stored = problem.with_settings(replace(problem.settings, full_dbias=True, dscore_args=False))
    summed = stored.with_settings(replace(stored.settings, full_dbias=False))
    tile, num_splits = owner.tile, owner.num_splits
    sharers, (of_share, share_elements) = sharers_of(of_result, shape[0]), contiguous_like(of_result, shape)
    strides = {**strides, **dict(zip(SHARERS, (sharers.owned, sharers.shared), strict=True))}
    layout = StageLayout(stored, device, owner.family, strides)
    workspaces = {workspace.name: workspace for workspace in plan.workspaces}
    stages, added = layout.lists({"dbias": tile})
    if owner.lse_tile is not None:
        again = StageLayout(with_given_lse(stored), device, owner.family, strides)
        stages += with_own_lse([again.tiled("forward", owner.lse_tile)])
        workspaces[OWN_LSE] = Workspace(OWN_LSE, problem.statistics_bytes)
    renamed: dict[str, str | None] = {"lse": OWN_LSE} if OWN_LSE in workspaces else {}
    if num_splits == 1:
        stages.append(replace(layout.dbias(tile, sharers.num_shared, 1, share_elements), renamed=renamed))
    else:
        shares = StageLayout(summed, device, owner.family, {**strides, "dbias": of_share})
        split = shares.dbias(tile, sharers.num_shared, num_splits, share_elements)
        stages.append(replace(split, renamed={**renamed, "dbias": None}))
        stage, workspace = _sum(layout, num_splits, share_elements, of_sum)
        stages.append(stage)
        added.append(workspace)
    # Other stages of the plan have workspaces of these names.
    own = {workspace.name: f"{workspace.name}_of_dbias" for workspace in added}
    workspaces |= {own[workspace.name]: replace(workspace, name=own[workspace.name]) for workspace in added}
    stages = [replace(stage, renamed={**stage.renamed, **own}) for stage in stages]
    return replace(plan, stages=(*plan.stages, *stages), workspaces=(*workspaces.values(),))


def one_tile_dbias(
    layout: StageLayout, tile: TileConfig, num_splits: int, of_sum: TileConfig
) -> tuple[list[Stage], Workspace]:
    """The kernel of ``one_tile`` that sums dbias of a broadcast bias, the sum of its blocks' shares, and these.

    Parameters
    ----------
    layout : StageLayout
    tile : TileConfig
        That of the kernel.
    num_splits : int
        The number of blocks that share the sequences of a bias.
    of_sum : TileConfig
        That of the kernel that sums their shares.
    """
    of_result, shape = layout.strides["dbias"], layout.problem.score_shape
    sharers, (of_share, share_elements) = sharers_of(of_result, shape[0]), contiguous_like(of_result, shape)
    strides = {**layout.strides, **dict(zip(SHARERS, (sharers.owned, sharers.shared), strict=True))}
    shares = StageLayout(layout.problem, layout.device, layout.family, {**strides, "dbias": of_share})
    kernel = shares.one_tile_dbias(tile, sharers.num_shared, num_splits, share_elements)
    settings = replace(layout.problem.settings, full_dbias=True)
    stored = StageLayout(layout.problem.with_settings(settings), layout.device, layout.family, strides)
    stage, workspace = _sum(stored, num_splits, share_elements, of_sum)
    return [replace(kernel, renamed={"dbias": None}), stage], workspace


def _sum(layout: StageLayout, num_splits: int, share_elements: int, tile: TileConfig) -> tuple[Stage, Workspace]:
    """The stage that sums the shares of dbias, and their workspace."""
    problem = layout.problem
    sizes = dict(zip(("batch", "num_heads", "seqlen_q", "seqlen_k"), problem.score_shape, strict=True))
    sizes |= {"num_copies": num_splits, "share_elements": share_elements}
    stage = layout.stage("sum_dbias", tile, -(-share_elements // tile.num_threads), (), is_split=False, **sizes)
    return stage, Workspace(SHARES, num_splits * share_elements * ITEMSIZE[problem.accumulator_dtype])
