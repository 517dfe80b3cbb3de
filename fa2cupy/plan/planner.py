"""One stage of a plan: its family and tile, its grid, its record and its tensor maps. Pure arithmetic, no GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping

from . import tensor_maps as tma
from ..families.device import DeviceInfo
from ..errors import UnsupportedProblemError
from ..families.choice import choose_family, choose_tile
from ..problem.features import KERNEL_NEEDS
from ..jit.params import TILE_COUNTER, param_layout
from ..problem.attention import AttentionProblem
from .schedule import COLUMNS_BY_KEYS, COLUMNS_BY_QUERIES, COLUMNS_WITH_DQ, groups_per_section
from ..jit.spec import KernelSpec
from .stages import Stage
from ..families.tiles import OPERATIONS, TileConfig

__all__ = ["Planner", "Strides", "why_not_sm90"]

_LOG2_E = math.log2(math.e)
_COMMON = ("delta", "dsink", "clear_forward", "clear_backward")  # operations that all families share
_ON_PACKED = ("convert_dq", "clear_forward", "clear_backward")  # operations besides the tiled ones that know sequences
_OF_QUERIES = ("q", "o", "dout", "dq")  # tensors that have their rows
_BY_KEYS = ("backward", "backward_dkdv")  # operations of sm90 whose blocks own key tiles

#: Element strides of the batch, row and head axes.
Strides = tuple[int, int, int]


def why_not_sm90(operation: str, problem: AttentionProblem, strides: Mapping[str, Strides]) -> str | None:
    """The reason why Hopper's kernel of an operation cannot take a problem and its arrays, or None if it can."""
    if not problem.softmax_scale > 0:
        return f"softmax_scale={problem.softmax_scale} is not positive"
    if 0 in _sizes(problem, "k" if operation in _BY_KEYS else "q"):
        return None  # nothing will be launched
    for name in param_layout(operation, "sm90", problem.dtype).maps:
        reason = tma.why_not_mappable(_sizes(problem, name), strides[name], problem.itemsize)
        if reason:
            return f"{name} is not for TMA, {reason}"
    return None


def _sizes(problem: AttentionProblem, name: str) -> tuple[int, int, int]:
    """Of the batch, row and head axes of a tensor."""
    if name in _OF_QUERIES:
        return problem.batch, problem.seqlen_q, problem.num_heads
    return problem.batch, problem.seqlen_k, problem.num_heads_kv


class Planner:
    """Shared state of the planning of one call."""

    def __init__(
        self, operation: str, problem: AttentionProblem, device: DeviceInfo, strides: Mapping[str, Strides],
        family: str | None, more: tuple[str, ...] = (),
    ):  # fmt: skip
        self.problem = problem
        self.more = more
        self.device = device
        self.strides = strides
        needs = self._features(operation)
        row = choose_family(operation, problem.dtype, device, family, needs)
        reason = why_not_sm90(operation, problem, strides) if row.name == "sm90" else None
        if reason and family:
            raise UnsupportedProblemError(f"family 'sm90' for this problem: {reason}")
        if reason:
            row = choose_family(operation, problem.dtype, device, "sm80", needs)
        self.family = row.name
        self.arch_suffix = row.arch_suffix

    def _features(self, operation: str) -> tuple[str, ...]:
        """What the operation's kernel must have. A sink is in lse, and concerns the backward's products no more."""
        has_all = operation in OPERATIONS
        used = {
            **dict.fromkeys(self.problem.needs, has_all),
            "cu_seqlens": self.problem.is_packed and (has_all or operation in _ON_PACKED),
            "sink": "sink" in self.problem.needs and operation in ("forward", "dsink"),
            "dlse": "dlse" in self.more and operation == "delta",
            "dbias": "dbias" in self.more and self._owns_queries(operation),
        }
        return tuple(name for name in KERNEL_NEEDS if used.get(name))

    def _owns_queries(self, operation: str) -> bool:
        return operation == "backward_dq" or (operation == "backward" and self.problem.itemsize > 2)

    def tensor_layout(self, name: str, box_rows: int) -> tma.TensorLayout:
        problem = self.problem
        sizes = _sizes(problem, name)
        array = (problem.dtype, sizes, self.strides[name], problem.head_dim, problem.itemsize, box_rows)
        return (tma.packed_layout if problem.is_packed else tma.tensor_layout)(*array)

    def tile(self, operation: str, config: TileConfig | Mapping[str, TileConfig] | None) -> TileConfig:
        return choose_tile(operation, self.family, self.problem, self.device, config)

    def stage(
        self, operation: str, tile: TileConfig, blocks: int, maps: tuple[tma.TensorLayout, ...] = (), **values: object
    ) -> Stage:
        problem = self.problem
        tiled = operation in OPERATIONS
        family = "common" if operation in _COMMON else self.family
        arch = self.device.arch + self.arch_suffix
        features = self._features(operation)
        causal = problem.causal and tiled and "window" not in features  # whose right limit then is the diagonal
        spec = KernelSpec(operation, family, arch, problem.dtype, problem.head_dim, causal, tile, features)
        available = {
            **{f"{name}_strides": strides for name, strides in self.strides.items()},
            "scale_log2": problem.softmax_scale * _LOG2_E,
            "softmax_scale": problem.softmax_scale,
            "num_heads": problem.num_heads,
            "heads_per_group": problem.heads_per_group,
            "seqlen_q": problem.seqlen_q,
            "seqlen_k": problem.seqlen_k,
            "batch": problem.batch,
            **problem.feature_values,
            **values,
        }
        constants = spec.params.pack_constants(
            {f.name: available[f.name] for f in spec.params.fields if f.name not in spec.params.pointers}
        )
        return Stage(spec, blocks, constants, maps)

    def num_tiles(self, axis: int, rows: int) -> int:
        """Tiles of a head along an axis of the scores; of packed sequences, each starts with a tile of its own."""
        problem = self.problem
        if not problem.is_packed:
            return -(-problem.score_shape[axis] // rows)
        total = (problem.seqlen_q, problem.seqlen_k)[axis - 2]
        sequences = problem.score_shape[0]
        return total // rows + sequences if total and sequences else 0

    def by_query_tiles(self, operation: str, tile: TileConfig) -> Stage:
        """A stage whose blocks own query tiles: all tiles of a head read that head's K and V."""
        problem = self.problem
        num_tiles = self.num_tiles(2, tile.b_r)
        section = groups_per_section(problem, self.device, COLUMNS_BY_QUERIES) * problem.heads_per_group
        return self._scheduled(operation, tile, num_tiles, problem.num_heads, section)

    def by_key_tiles(self, operation: str, tile: TileConfig) -> Stage:
        """A stage whose blocks own key tiles: all tiles of a head read the group's Q and dO, and some add to its dQ."""
        problem = self.problem
        num_tiles = self.num_tiles(3, tile.b_c)
        columns = COLUMNS_WITH_DQ if operation == "backward" else COLUMNS_BY_KEYS
        section = groups_per_section(problem, self.device, columns)
        return self._scheduled(operation, tile, num_tiles, problem.num_heads_kv, section)

    def _scheduled(
        self, operation: str, tile: TileConfig, num_tiles: int, heads: int, section: int
    ) -> Stage:
        layout = param_layout(operation, self.family, self.problem.dtype)
        blocks = num_tiles * heads * self.problem.batch
        if TILE_COUNTER in layout.pointers:  # as many as can run at a time, which stay and share the tiles out
            blocks = min(blocks, self.device.multiprocessors * tile.blocks_per_sm)
        return self.stage(
            operation,
            tile,
            blocks,
            tuple(self.tensor_layout(name, _box_rows(name, tile)) for name in layout.maps),
            num_tiles=num_tiles,
            scheduled_heads=heads,
            heads_per_section=max(1, section),
        )


def _box_rows(name: str, tile: TileConfig) -> int:
    # Results are stored by each warp.
    return {"q": tile.b_r, "dout": tile.b_r, "k": tile.b_c, "v": tile.b_c}.get(name, 16)
