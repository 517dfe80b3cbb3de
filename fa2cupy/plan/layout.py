"""Makes the stages of a plan: grid, parameter record and tensor maps of each kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import UnsupportedProblemError
from ..families.dbias import tiles_of_bias
from ..families.device import DeviceInfo
from ..families.estimate import heads_in_cache
from ..families.family import Family, Kernel
from ..families.operations import OPERATIONS
from ..families.records import SHARERS
from ..families.tile import TileConfig
from ..jit.params import TILE_COUNTER, param_layout
from ..jit.spec import KernelSpec
from ..problem.attention import ROWS_OF, WITH_COLUMNS_OF_V, AttentionProblem
from ..problem.boxes import Boxes, Lengths, sequence_axis
from ..problem.features import FEATURES
from ..problem.strides import AnyStrides, num_terms, recorded_strides, sharers
from .schedule import (
    COLUMNS_BY_KEYS,
    COLUMNS_BY_QUERIES,
    COLUMNS_WITH_DQ,
    groups_per_section,
    orders_tiles,
    series_values,
    shares_per_section,
)
from .stages import Stage, Workspace
from .tensor_maps import BOX_COLUMNS, TensorLayout, box_layout, packed_layout, tensor_layout
from .tile_lists import (
    LIST_OPERATIONS,
    LIST_WARPS,
    ListLayout,
    interval_strides,
    list_layout,
    list_values,
    list_workspaces,
    of_side,
)

__all__ = ["PART_ROWS", "StageLayout"]

#: Rows that share a unit, and the most rows of a tile of parts.
PART_ROWS, LARGEST_TILE = 64, 128

_LOG2_E = math.log2(math.e)
#: Numbers from here on may overflow.
_LARGEST_FLOAT32 = 3.4028e38


def _own_box(name: str, boxes: Boxes) -> Lengths:
    """The box of a tensor map: warps store results by themselves, 16 rows at a time."""
    own: Lengths = getattr(boxes.shapes, ROWS_OF[name])
    if name not in ("o", "dk", "dv"):
        return own
    width, height, _ = own
    x = min(16, width)
    y = min(16 // x, height)
    return x, y, 16 // (x * y)


class StageLayout:
    """Lays out the stages of one call.

    Parameters
    ----------
    problem, device
    family : Family
        Family of the kernels that are not common to all families.
    strides : mapping
        Strides of the tensors and of the features' arrays, by the kernels' names.
    is_fallback : bool, optional
        True if its tiled kernels compute only the heads that others left.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        device: DeviceInfo,
        family: Family,
        strides: Mapping[str, AnyStrides],
        *,
        is_fallback: bool = False,
    ):
        self.is_fallback = is_fallback
        self.problem = problem
        self.device = device
        self.family = family
        self.strides = strides
        self.used_features = dict.fromkeys(problem.features)

    def num_tiles(self, side: str, rows: int) -> int:
        """Tiles of a head along the queries or keys. No tile has rows of two packed sequences."""
        problem, axis = self.problem, {"queries": 2, "keys": 3}[side]
        boxes = problem.settings.boxes
        if boxes is not None and boxes.owned == side:
            return math.prod(boxes.along)
        if not problem.is_packed:
            return -(-problem.score_shape[axis] // rows)
        total = problem.seqlen_q if side == "queries" else problem.seqlen_k
        sequences = problem.score_shape[0]
        return total // rows + sequences if total and sequences else 0

    def num_strips(self, side: str) -> int:
        """The strips, rows that share a unit, of the parts of a head (kernels/float32_parts/parts.cuh).

        They fill whole tiles, and at least one: a query tile that sees no key reads one all the same.
        """
        problem, tile_blocks = self.problem, LARGEST_TILE // PART_ROWS
        if problem.is_packed:
            total = problem.seqlen_q if side == "queries" else problem.seqlen_k
            return total // PART_ROWS + problem.score_shape[0] - 1 + tile_blocks
        return tile_blocks * max(1, self.num_tiles(side, LARGEST_TILE))

    def tiled(self, operation: str, tile: TileConfig, num_splits: int = 1) -> Stage:
        """A kernel whose blocks own tiles of queries or keys, or shares of them.

        All query tiles of a head read the head's K and V. All key tiles read the group's Q and dO; those of
        ``single_pass`` also add to its dQ. The shares of a tile are scheduled like the tiles of further heads.
        """
        problem = self.problem
        side = "queries" if self.family.owns(operation) == "queries" else "keys"
        if side == "queries":
            heads, rows, columns = problem.num_heads, tile.b_r, COLUMNS_BY_QUERIES
        else:
            heads, rows = problem.num_heads_kv, tile.b_c
            columns = COLUMNS_WITH_DQ if operation == "backward" else COLUMNS_BY_KEYS
        num_tiles = self.num_tiles(side, rows)
        if side == "queries":
            scheduled = problem.heads_per_group * num_splits
            # With fewer query tiles than multiprocessors a section leaves some of them idle.
            filling = -(-self.device.multiprocessors // max(1, num_tiles * scheduled))
            section = scheduled * groups_per_section(problem, self.device, columns, filling)
        else:
            # Blocks that fall out of step, as beside other work, keep the rows that they share in the L2 cache only if
            # the heads that they work on fit there.
            most = heads_in_cache(problem, self.device) if operation == "backward" else None
            section = groups_per_section(problem, self.device, columns, most=most)
            section = shares_per_section(problem, self.device, section, num_tiles, num_splits, most)
        heads *= num_splits
        is_split, kernel = num_splits > 1, Kernel.of(operation, problem)
        values: dict[str, Any] = {
            "num_tiles": num_tiles,
            "scheduled_heads": heads,
            "heads_per_section": max(1, section),
        }
        keeps_bias = "kept_bias" in self.used_features  # only then has a forward narrow panels
        is_narrow = (keeps_bias or side == "keys") and self.family.has_narrow_panels(kernel, tile)
        if keeps_bias:
            at_a_time = self.family.sequences_of_tile(kernel, tile)
            shared = sharers(self.strides["bias"], problem.batch)
            values |= series_values(problem, self.device, tile, num_tiles, shared, at_a_time)
        record = param_layout(operation, self.family, problem.dtype, is_split=is_split)
        blocks = num_tiles * heads * values.get("num_series", problem.batch)
        of_tile = self.family.blocks_of_tile(kernel, tile)
        if TILE_COUNTER in record.pointers:  # a persistent kernel: as many blocks as are resident at the same time
            blocks = min(blocks, self.device.multiprocessors * tile.blocks_per_sm // of_tile)
        blocks *= of_tile
        b_r, b_c = (tile.b_r // of_tile, tile.b_c) if side == "queries" else (tile.b_r, tile.b_c // of_tile)
        maps = tuple(self._map(name, b_r, b_c, is_narrow=is_narrow) for name in record.maps)
        if is_split:
            values["num_splits"] = num_splits
        if "block_mask" in self.used_features:
            values |= list_layout(problem, side, tile).strides
        return self.stage(operation, tile, blocks, maps, is_split=is_split, **values)

    def both(self, tile: TileConfig) -> Stage:
        """The kernel whose first blocks own key tiles, and whose others own as many query tiles of the same heads."""
        problem, operation = self.problem, "backward_both"
        num_tiles, heads = self.num_tiles("keys", tile.b_c), problem.num_heads
        values = {"num_tiles": num_tiles, "scheduled_heads": heads, "heads_per_section": problem.batch * heads}
        maps = [
            self._map(name, tile.b_r, tile.b_c) for name in param_layout(operation, self.family, problem.dtype).maps
        ]
        layout = StageLayout(problem, self.device, self.family, {**self.strides, "dout_rows": self.strides["dout"]})
        blocks = 2 * num_tiles * heads * problem.batch
        stage = layout.stage(operation, tile, blocks, tuple(maps), is_split=False, **values)
        return replace(stage, renamed={"dout_rows": "dout", TILE_COUNTER: None})

    def dbias(self, tile: TileConfig, num_shared: int, num_splits: int, share_elements: int) -> Stage:
        """The kernel whose blocks own tiles of a broadcast bias, which so many sequences share."""
        _, _, rows, keys = self.problem.score_shape
        values = {"bias_rows": rows, "bias_columns": keys, "shared_sequences": num_shared}
        values |= {"share_elements": share_elements} | ({"num_splits": num_splits} if num_splits > 1 else {})
        if "block_mask" in self.used_features:
            values |= list_layout(self.problem, "queries", tile).strides
        blocks, is_split = tiles_of_bias(self.problem, self.strides, tile) * num_splits, num_splits > 1
        record = param_layout("dbias", self.family, self.problem.dtype, is_split=is_split)
        is_narrow = self.family.has_narrow_panels(Kernel.of("dbias", self.problem), tile)
        maps = tuple(self._map(name, tile.b_r, tile.b_c, is_narrow=is_narrow) for name in record.maps)
        return self.stage("dbias", tile, blocks, maps, is_split=is_split, **values)

    def one_tile_dbias(self, tile: TileConfig, num_shared: int, num_splits: int, share_elements: int) -> Stage:
        """The kernel whose blocks own tiles of a broadcast bias, with all gradients of the heads that share them."""
        blocks = tiles_of_bias(self.problem, self.strides, tile) * num_splits
        values = {"shared_sequences": num_shared, "num_splits": num_splits, "share_elements": share_elements}
        return self.stage("backward_one_tile_dbias", tile, blocks, (), is_split=False, **values)

    def lists(self, tiles: Mapping[str, TileConfig]) -> tuple[list[Stage], list[Workspace]]:
        """The kernels that write and order the lists of tiled kernels, given by their tiles, and the workspaces.

        Kernels that own tiles of the same side have the same tile.
        """
        if "block_mask" not in self.used_features:
            return [], []
        stages: list[Stage] = []
        layouts: dict[str, ListLayout] = {}
        sides = {"keys" if self.family.owns(tiled) == "keys" else "queries": tile for tiled, tile in tiles.items()}
        for side, tile in sides.items():
            writes, orders, _ = LIST_OPERATIONS[side]
            lists = layouts[side] = list_layout(self.problem, side, tile)
            own, blocks = TileConfig(tile.b_r, tile.b_c, LIST_WARPS), -(-lists.num_lists // LIST_WARPS)
            values = list_values(self.problem, lists)
            stages.append(self.stage(writes, own, blocks, (), is_split=False, **values))
            if orders_tiles(self.problem):
                stages.append(self.stage(orders, TileConfig(1, 1, LIST_WARPS), blocks, (), is_split=False, **values))
        return stages, list_workspaces(layouts)

    def stage(
        self,
        operation: str,
        tile: TileConfig,
        blocks: int,
        maps: tuple[TensorLayout | None, ...] = (),
        *,
        is_split: bool = False,
        **values: Any,
    ) -> Stage:
        """A kernel with its grid. `values` are the members of its record that depend on the grid."""
        problem, row = self.problem, OPERATIONS[operation]
        features = self.family.kernel_features(operation, self.used_features)
        is_fallback = self.is_fallback and row.is_tiled
        if is_fallback and self.family.owns(operation) == "queries":  # it computes lse again ahead of gradients
            of_lse = self.family.kernel_features("forward", self.used_features)
            features = tuple(name for name in FEATURES if name in features or name in of_lse)
        if "intervals" in features:
            side = "keys" if self.family.owns(operation) == "keys" else "queries"
            features = of_side(features, problem, side)
            values |= interval_strides(problem, side)
        # With a window, its right limit stands for the causal mask.
        causal = problem.causal and row.is_tiled and "window" not in features
        family = None if row.is_common else self.family
        arch = self.device.arch + (family.arch_suffix if family else "")
        functions = tuple(one for one in problem.settings.functions if one.program.role in features)
        head_dim, head_dim_v = self._head_dims(operation)
        arrays = {name: array for feature in features for name, array in FEATURES[feature].arrays.items()}
        names = [name for name, array in arrays.items() if array.axes is not None]
        names += SHARERS if row.owns == "pairs" or operation == "sum_dbias" else ()
        over_scores = {name: self.strides[name] for name in names}
        batch_terms = max(map(num_terms, over_scores.values()), default=0)
        spec = KernelSpec(
            operation,
            family,
            arch,
            problem.dtype,
            head_dim,
            causal,
            tile,
            features,
            is_split,
            is_fallback,
            functions,
            head_dim_v,
            batch_terms,
            problem.settings.kept_bias if "kept_bias" in features else 0,
            problem.settings.boxes.shapes if problem.settings.boxes is not None and row.is_tiled else None,
        )
        if problem.settings.boxes is not None:
            values["neighborhood"] = self._numbers_of(problem.settings.boxes)
        available: dict[str, float | AnyStrides] = {
            **{f"{name}_strides": strides for name, strides in self.strides.items()},
            **{f"{name}_strides": recorded_strides(strides, batch_terms) for name, strides in over_scores.items()},
            "scale_log2": problem.softmax_scale * _LOG2_E,
            "softmax_scale": problem.softmax_scale,
            "num_heads": problem.num_heads,
            "heads_per_group": problem.heads_per_group,
            "seqlen_q": problem.seqlen_q,
            "seqlen_k": problem.seqlen_k,
            "batch": problem.batch,
            "q_strips": self.num_strips("queries"),
            "k_strips": self.num_strips("keys"),
            **problem.feature_values,
            **values,
        }
        record = spec.params
        found = {field.name: available[field.name] for field in record.fields if field.name not in record.pointers}
        try:
            return Stage(spec, blocks, record.pack_constants(found), maps)
        except OverflowError as error:
            large = (name for name, x in found.items() if isinstance(x, float) and abs(x) > _LARGEST_FLOAT32)
            raise UnsupportedProblemError(
                f"softmax_scale={problem.softmax_scale}: for {problem.dtype}, float32 does not hold {', '.join(large)}"
            ) from error

    def _map(self, name: str, queries: int, keys: int, *, is_narrow: bool = False) -> TensorLayout | None:
        problem = self.problem
        if name in problem.absent:
            return None
        sizes, strides = problem.sizes_of(name), self.strides[name]
        if problem.settings.boxes is not None:
            box = _own_box(name, problem.settings.boxes)
            lengths, columns = problem.settings.boxes.grid.lengths, problem.columns_of(name)
            return box_layout(problem.dtype, sizes, strides, columns, problem.itemsize, lengths, box)
        # Warps store results by themselves, in boxes of 16 rows.
        of_queries = dict.fromkeys(("q", "dout", "qt", "dot"), queries)
        box_rows = (of_queries | dict.fromkeys(("k", "v", "kt", "vt"), keys)).get(name, 16)
        layout = packed_layout if problem.is_packed else tensor_layout
        whole = layout(problem.dtype, sizes, strides, problem.columns_of(name), problem.itemsize, box_rows)
        return replace(whole, box=(BOX_COLUMNS // 2 if is_narrow else BOX_COLUMNS, *whole.box[1:]))

    def _numbers_of(self, boxes: Boxes) -> tuple[int, ...]:
        """The ``Neighborhood`` of a record (``kernels/common/neighborhood.cuh``)."""
        numbers: list[int] = []
        grid = boxes.grid
        for axis, (length, before, size) in enumerate(zip(grid.lengths, grid.before, grid.sizes, strict=True)):
            numbers += [length, boxes.along[axis], before, size, *grid.limits(axis)]
        for name in ("q", "k"):
            numbers += sequence_axis(self.problem.sizes_of(name), self.strides[name])[:2]
        return tuple(numbers)

    def _head_dims(self, operation: str) -> tuple[int, int | None]:
        """The columns of a kernel's tensors: of those with as many as q, and as v if there are both and they differ."""
        problem, record = self.problem, OPERATIONS[operation].record
        if record is not None:
            of_v = [name in WITH_COLUMNS_OF_V for name in record.strides]
            if all(of_v) or not any(of_v):
                return (any(of_v) and problem.head_dim_v) or problem.head_dim, None
        return problem.head_dim, problem.head_dim_v
