"""The base class of kernel families. Each family is one module, and ``registry.py`` lists them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from ..problem.attention import AttentionProblem
from ..problem.boxes import BoxShapes
from ..problem.features import FEATURES
from ..problem.strides import AnyStrides
from .device import DeviceInfo
from .estimate import Costs
from .operations import METHODS, OF_DIRECTION, OPERATIONS, SEVERAL
from .records import Record
from .tile import TileConfig

__all__ = ["ANY_NEWER", "BoxRow", "Family", "Kernel", "TileRow", "register_shortage", "why_no_decode"]

#: A `max_compute_capability` that excludes no newer GPU.
ANY_NEWER = 10_000

_MAX_REGISTERS = 255  # of a thread, on all GPUs


class Kernel(NamedTuple):
    """Which kernel of a family is meant: what it needs and which tiles it can have depend on nothing else.

    Attributes
    ----------
    operation, dtype : str
    head_dim, head_dim_v : int
        Columns of q and k, and of v and o.
    kept_keys : int
        The most keys whose bias its blocks keep; 0 if they keep none.
    """

    operation: str
    dtype: str
    head_dim: int
    head_dim_v: int
    kept_keys: int = 0

    @classmethod
    def of(cls, operation: str, problem: AttentionProblem) -> Kernel:
        """The kernel for a problem."""
        kept_keys = problem.settings.kept_bias if operation == "forward" else 0
        return cls(operation, problem.dtype, problem.head_dim, problem.head_dim_v or problem.head_dim, kept_keys)


@dataclass(frozen=True)
class TileRow:
    """A default tile, and the problems to which it applies.

    Attributes
    ----------
    head_dim : int
        The largest head dimension, padded as `Family.padded_head_dim` does.
    tile : TileConfig
    measured : str
        GPU and date of the sweep that chose the tile. An empty one marks a tile that was computed and not measured: it
        fits, and keeps its accumulators in registers. Such rows of sm80 and simt are for GPUs with less shared memory.
    dtypes : tuple of str or None
        Dtypes to which the row applies; None is all of the family.
    features : tuple of str
        The row applies only to calls with at least one of these features. If empty, it applies to all calls.
    is_plain : bool
        True if the row applies only to calls without features.
    least_saving : float
        The row applies only to calls for which its tiles have fewer scores than those of the next row, by this factor
        at least: short sequences fill large tiles badly. It applies to all calls if 0, and to no packed one otherwise.
    least_jobs : float
        The row applies only to calls of ``decode`` with at least so many jobs for each multiprocessor. A block waits
        between two of them, and others on the multiprocessor go on meanwhile. Few jobs are cut into as many parts as
        there are blocks: one large block on each multiprocessor leaves the fewest parts to merge.
    most_jobs : float
        The row applies only to calls with at most so many jobs for each multiprocessor. The jobs of a forward are its
        query tiles: where they are few, small ones leave fewer multiprocessors idle.
    most_keys : float
        The row applies only to calls of ``decode`` whose jobs have at most so many keys for each multiprocessor. These
        are all rows of the cache, since the tile must not depend on lengths.
    most_rows : float
        The row applies only to calls of ``decode`` with at most so many rows, queries of the heads that share keys.
    most_seqlen_k : float
        The row applies only to calls with at most so many keys, or whose blocks keep the bias of at most so many; if
        finite, to no packed one.
    head_dim_v : int or None
        The largest of v, padded; None is that of q. Rows that have one stand behind those that serve equal head
        dimensions up to it.
    """

    head_dim: int
    tile: TileConfig
    measured: str = ""
    dtypes: tuple[str, ...] | None = None
    features: tuple[str, ...] = ()
    is_plain: bool = False
    least_jobs: float = 0
    head_dim_v: int | None = None
    least_saving: float = 0
    most_jobs: float = math.inf
    most_keys: float = math.inf
    most_rows: float = math.inf
    most_seqlen_k: float = math.inf


class BoxRow(NamedTuple):
    """A tile whose rows are boxes of tokens of a grid, and the calls to which it applies.

    Attributes
    ----------
    least_head_dim, head_dim : int
        The least and the largest head dimension.
    num_axes : int
        Axes of the grid.
    tile : TileConfig
    shapes : tuple of BoxShapes
        Boxes of as many tokens as the tile has. Sixteen tokens that follow each other in a box that a block owns are a
        box, too. The other boxes have multiples of eight tokens along x. With three axes, boxes of queries or of keys
        have several tokens along z.
    cost : float
        The time for a score, relative to that of other rows for the same operation and head dimensions.
    measured : str
        GPU and date.
    operation : str
        ``"forward"`` or ``"backward"``.
    """

    least_head_dim: int
    head_dim: int
    num_axes: int
    tile: TileConfig
    shapes: tuple[BoxShapes, ...]
    cost: float
    measured: str = ""
    operation: str = "forward"


class Family(ABC):
    """A set of kernels that share their main loops, and all properties that differ between families.

    Attributes
    ----------
    name : str
        Its module, its folder in ``kernels/`` and the namespace of its kernels.
    operations : tuple of str
        Operations that it has kernels for, in addition to those that all families share.
    dtypes : tuple of str
    min_compute_capability, max_compute_capability : int
        Oldest and newest GPU that runs it.
    row_alignment : int
        Alignment in bytes of the rows of q, k, v and the like.
    head_dim_step : int
        The kernels' head_dim is a multiple of this.
    column_step : int
        The columns that a row occupies on chip are a multiple of this.
    most_columns : int
        The most columns of q, k, v and the like that its kernels hold.
    more_columns : mapping of operation to int
        The same of kernels that hold more.
    only_columns : tuple of int or None
        The columns of q and k, and those of v, if its kernels hold no others.
    arch_suffix : str
        Suffix of the architecture's name: ``"a"`` if the code uses instructions of this architecture only.
    features : tuple of str
        The rows of `FEATURES` that its kernels implement.
    needs_positive_scale : bool
        True if its kernels rely on ``softmax_scale > 0``: scores then have the signs and the order of their products.
    has_natural_scores : bool
        True if its kernels compute scores and lse in natural units, and not in base 2.
    knows_tangents : bool
        True if its kernels of second order are compiled for the tangents that a call has. Others find null pointers.
    multiplies_parts : bool
        True if its kernels multiply parts of float32 data, which ``split_inputs`` makes.
    backward_owns : str
        The tiles that the blocks of ``backward`` own. With ``"queries"`` they add dK and dV to the results in place;
        with ``"keys"`` they add dQ to a workspace, which ``convert_dq`` reads.
    tiles : mapping of operation to tuple of TileRow
        Default tiles. A kernel takes the first row that applies, is legal on the device, and whose blocks fit the
        multiprocessor's shared memory as often as the tile's `blocks_per_sm` says.
    default_methods : tuple of str
        Methods of the backward. The default is the one with the shortest estimated time; without costs, the first that
        takes the call.
    clears_unlisted_keys : bool
        True if, under a sparse map, its kernels write no dk and dv of key tiles without a query: plans clear them.
    split_operations : tuple of str
        Operations whose work on a tile several blocks can share.
    kept_keys : tuple of int
        The numbers of keys for which it has forwards whose blocks keep the bias; empty if it has none.
    boxes : tuple of BoxRow
        The boxes of its kernels for mask functions of neighborhoods, of which those that cost least are taken.
    least_warps : int
        The compiler limits registers as if at least so many warps were on a multiprocessor.
    divides_rows : bool
        True if clusters of ``decode`` that are left over take a part of the rows, for which they read the keys again.
    costs : Costs or None
        The constants of estimated times, if there are any.
    query_rows, key_rows, warps : sequence of int
        Values of b_r, b_c and num_warps that a sweep tries.
    """

    name: str
    operations: tuple[str, ...] = ("forward", *METHODS["single_pass"], *METHODS["two_pass"])
    dtypes: tuple[str, ...]
    min_compute_capability: int
    max_compute_capability: int = ANY_NEWER
    row_alignment: int
    head_dim_step: int
    column_step: int
    most_columns: int = 256
    more_columns: Mapping[str, int] = MappingProxyType({})
    only_columns: tuple[int, int] | None = None
    arch_suffix: str = ""
    features: tuple[str, ...] = tuple(name for name in FEATURES if name not in ("given_lse", "kept_bias", "boxes"))
    needs_positive_scale: bool = False
    has_natural_scores: bool = False
    knows_tangents: bool = False
    multiplies_parts: bool = False
    backward_owns: str
    tiles: Mapping[str, tuple[TileRow, ...]]
    default_methods: tuple[str, ...]
    clears_unlisted_keys: bool = False
    split_operations: tuple[str, ...] = ()
    kept_keys: tuple[int, ...] = ()
    boxes: tuple[BoxRow, ...] = ()
    least_warps: int = 0
    divides_rows: bool = True
    costs: Costs | None = None
    query_rows: tuple[int, ...] = (8, 16, 32, 64, 96, 128, 192, 256)
    key_rows: tuple[int, ...] = (8, 16, 32, 64, 96, 128, 192, 256)
    warps: tuple[int, ...] = (2, 4, 8, 12, 16)

    @property
    def public_name(self) -> str:
        """The name for `family=` and messages, which the families of one architecture share: their dtypes differ."""
        return self.name.partition("_")[0]

    def __reduce__(self) -> str:
        return self.name.upper()  # the constant in its module: kernels' specs go to other processes

    # Problems that the family supports.

    def supports(self, operation: str, dtype: str, device: DeviceInfo, features: tuple[str, ...] = ()) -> bool:
        """True if the family has a kernel for the operation and dtype, with the features, on the device."""
        return (
            (operation in self.operations or OPERATIONS[operation].is_common)
            and set(features) <= set(self.features)
            and dtype in self.dtypes
            and self.min_compute_capability <= device.compute_capability <= self.max_compute_capability
        )

    def why_not_here(self) -> str | None:
        """The reason why this machine cannot run the family's calls, or None if it can."""
        return None

    def why_not(self, operation: str, problem: AttentionProblem, strides: Mapping[str, AnyStrides]) -> str | None:
        """The reason why a kernel cannot take a problem and its arrays, or None if it can."""
        return None

    def why_not_columns(self, operation: str, head_dim: int, head_dim_v: int) -> str | None:
        """The reason why the kernels of an operation or call do not hold so many columns, or None if they do."""
        if self.only_columns not in (None, (head_dim, head_dim_v)):
            return "head_dim={}, head_dim_v={} are not {} and {}".format(head_dim, head_dim_v, *self.only_columns)
        most = self.more_columns.get(operation, self.most_columns)
        for name, columns in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
            if columns > most:
                return f"{name}={columns} is above {most}"
        return None

    def methods_of(self, problem: AttentionProblem) -> tuple[str, ...]:
        """The methods of a backward that come into question where the caller names none."""
        return self.default_methods

    def is_accurate(self, problem: AttentionProblem) -> bool:
        """True if its results for a problem are known to be as accurate as those of the dtype's arithmetic."""
        return True

    def has_kernels(self, call: str) -> bool:
        """True if it has all kernels of a call, of a backward those of at least one method, for some GPU and dtype."""
        known = (*self.operations, *(name for name, operation in OPERATIONS.items() if operation.is_common))
        return any(set(method) <= set(known) for method in _methods_of(call))

    def supports_call(self, call: str, dtype: str, device: DeviceInfo, features: tuple[str, ...] = ()) -> bool:
        """True if it has all kernels of a call, of a backward those of at least one method."""
        return any(all(self.supports(name, dtype, device, features) for name in method) for method in _methods_of(call))

    def is_default_on(self, device: DeviceInfo) -> bool:
        """True unless families after it are faster on the device, so that only callers who ask for it get it."""
        return True

    @property
    def gpus(self) -> str:
        """The GPUs that run it, for messages."""
        newer = " or newer" if self.max_compute_capability == ANY_NEWER else ""
        return f"compute capability {self.min_compute_capability / 10}{newer}"

    def head_dims(self, head_dim: int, head_dim_v: int) -> tuple[int, int]:
        """The columns of q and v that the kernels have."""
        step = self.head_dim_step
        return -(-head_dim // step) * step, -(-head_dim_v // step) * step

    def padded(self, problem: AttentionProblem) -> AttentionProblem:
        """The problem with the columns that the kernels have. Columns of zeros change no product."""
        own = problem.head_dim, problem.head_dim_v or problem.head_dim
        columns, columns_v = taken = self.head_dims(*own)
        own_v = None if columns_v == columns else columns_v
        return problem if taken == own else replace(problem, head_dim=columns, head_dim_v=own_v)

    # Its kernels.

    @abstractmethod
    def record(self, operation: str) -> Record:
        """The parameter record of a kernel, without the members that features add."""

    def owns(self, operation: str) -> str | None:
        """The tiles that the blocks of a kernel own, as `Operation.owns`, or None if it computes no scores."""
        return self.backward_owns if operation == "backward" else OPERATIONS[operation].owns

    def kernel_features(self, operation: str, used: Mapping[str, object]) -> tuple[str, ...]:
        """The features that the kernel must have out of those that a call uses, in the order of `FEATURES`."""
        concerned = set(OPERATIONS[operation].features)
        if self.owns(operation) == "keys":
            concerned -= {"dbias", "full_dbias"}  # kernels that own queries write it
        if not self.knows_tangents:
            concerned -= set(OF_DIRECTION)
        return tuple(name for name in FEATURES if name in used and name in concerned)

    def method_with_dbias(self, method: str) -> str:
        """The method of a backward that returns dbias or dscore_args, which only kernels that own queries write."""
        return method if self.backward_owns == "queries" else "two_pass"

    # Resources of a tile.

    def padded_head_dim(self, head_dim: int) -> int:
        """Columns that a row occupies on chip."""
        return -(-head_dim // self.column_step) * self.column_step

    def blocks_of_tile(self, kernel: Kernel, tile: TileConfig) -> int:
        """The blocks, a cluster, that divide the keys of a tile among them."""
        return 1

    def sequences_of_tile(self, kernel: Kernel, tile: TileConfig) -> int:
        """The sequences whose tiles a block that keeps the bias processes at a time."""
        return 1

    def has_narrow_panels(self, kernel: Kernel, tile: TileConfig) -> bool:
        """True if rows in shared memory have 64 bytes, and not 128, for each of the boxes that TMA copies."""
        return False

    @abstractmethod
    def shared_memory_bytes(self, kernel: Kernel, tile: TileConfig) -> int:
        """Bytes of a block's dynamic shared memory; the kernels assert the same number."""

    def shared_memory_with(self, features: tuple[str, ...], kernel: Kernel, tile: TileConfig) -> int:
        """The same of a kernel with features, which may use memory that is left over but never need more."""
        return self.shared_memory_bytes(kernel, tile)

    @abstractmethod
    def why_not_shape(self, kernel: Kernel, tile: TileConfig) -> str | None:
        """The reason why a kernel cannot be compiled for this tile, or None if it can. Both head_dims are padded."""

    def why_illegal(self, kernel: Kernel, tile: TileConfig, device: DeviceInfo) -> str | None:
        """The reason why a kernel cannot have this tile on this device, or None if it can."""
        columns, columns_v = self.padded_head_dim(kernel.head_dim), self.padded_head_dim(kernel.head_dim_v)
        reason = self.why_not_shape(kernel._replace(head_dim=columns, head_dim_v=columns_v), tile)
        if reason:
            return reason
        if tile.num_threads > 1024:
            return f"num_warps={tile.num_warps} is more than the 32 of a block"
        if tile.cluster > 1 and (self.blocks_of_tile(kernel, tile) != tile.cluster or device.compute_capability < 90):
            return f"cluster={tile.cluster}: {kernel.operation} has no such clusters on {device.name}"
        needed = self.shared_memory_bytes(kernel, tile)
        if needed > device.shared_memory_per_block:
            available = device.shared_memory_per_block
            return f"it needs {needed} bytes of shared memory, {device.name} has {available} for a block"
        return None

    def fits_blocks(self, kernel: Kernel, tile: TileConfig, device: DeviceInfo) -> bool:
        """True if a multiprocessor's shared memory holds `tile.blocks_per_sm` blocks."""
        needed = self.shared_memory_bytes(kernel, tile) + device.reserved_shared_memory
        return needed * tile.blocks_per_sm <= device.shared_memory_per_multiprocessor

    def takes(self, kernel: Kernel, tile: TileConfig, device: DeviceInfo) -> bool:
        """True if a kernel can have this tile on this device, as many times at once as the tile says."""
        return self.why_illegal(kernel, tile, device) is None and self.fits_blocks(kernel, tile, device)


def _methods_of(call: str) -> tuple[tuple[str, ...], ...]:
    """The operations of which a family must have all, for each method of a call."""
    return tuple(METHODS.values()) if call == "backward" else (SEVERAL.get(call, (call,)),)


def register_shortage(accumulators: int, operands: int, tile: TileConfig) -> str | None:
    """The reason why a thread's registers do not suffice, or None if they do.

    `accumulators` are the registers of the tile itself, and `operands` a margin for operands and addresses. The
    compiler spills if both together exceed the registers of a thread.
    """
    available = min(_MAX_REGISTERS, 65536 // (tile.num_threads * tile.blocks_per_sm))
    if accumulators + operands > available:
        return f"its accumulators take {accumulators} of the {available} registers that a thread can have"
    return None


def why_no_decode(tile: TileConfig, rows: tuple[int, ...], keys: tuple[int, ...] = (16,)) -> str | None:
    """The reason why ``decode`` cannot have this tile, with one of these numbers of rows, and of keys for each warp."""
    if tile.b_r not in rows:
        return f"b_r={tile.b_r} is not one of {rows}"
    if tile.b_c not in [number * tile.num_warps for number in keys]:
        return f"b_c={tile.b_c} is not {' or '.join(map(str, keys))} keys for each of {tile.num_warps} warps"
    if not 2 <= tile.num_stages <= 8:
        return f"num_stages={tile.num_stages} is not from 2 to 8"
    return None
