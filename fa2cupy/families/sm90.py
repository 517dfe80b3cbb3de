"""The sm90 family: Hopper's wgmma and TMA, with producer and consumer warp groups."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ..errors import INSTALL_CUDA
from ..problem.attention import AttentionProblem
from ..problem.features import changes_of_scores, features_of_scores
from ..problem.strides import AnyStrides
from .family import Family, Kernel
from .operations import METHODS, OF_DIRECTION, ONE_TILE, OPERATIONS
from .records import Record
from .sm80 import SM80
from .sm90_records import MAPPED, RECORDS
from .sm90_tiles import BOXES, COSTS, OF_JVP, OF_WIDER, SHARED_BYTES, TILES
from .tile import TileConfig

__all__ = ["SM90", "Sm90"]

_NARROW = 32  # columns of the panels of several sequences, and of the kernel of dbias
_LEAST_SCALE = 1e-30  # kernels divide biases, slopes and lse by the scale, in float32
_LEAST_WARPS = 12  # of a multiprocessor: with fewer, threads would start with more registers than they have later
_WIDE = 128  # for a larger head_dim, a warp group's registers hold only one of dK and dV
_WIDER = 256  # for a larger one, two warp groups have the same rows, and no kernel computes all gradients
_SHARING = ("forward", "backward_dq", "backward_dkdv")  # kernels for them
_MOST_OF_BOTH = 1024  # rows of a head whose delta a block of both passes keeps
_MOST_COLUMNS_OF_BOTH = 64  # wider heads have other tiles in each pass
_MAX_STRIDE = 2**40  # bytes; a limit of tensor maps
_OF_TANGENTS = (*OF_JVP, "dq_jvp", "dkdv_jvp")


class Sm90(Family):
    """Kernels for sm_90a only. The blocks of ``backward`` own key tiles; the other kernels are persistent."""

    name = "sm90"
    operations = (*Family.operations, "backward_both", *ONE_TILE, "dbias", *_OF_TANGENTS)
    dtypes = ("float16", "bfloat16")
    min_compute_capability = max_compute_capability = 90
    row_alignment = 16
    head_dim_step = 8
    more_columns = MappingProxyType(dict.fromkeys(_SHARING, 512))
    column_step = 16  # a k-step of wgmma; the panels in shared memory are wider
    arch_suffix = "a"
    clears_unlisted_keys = True
    needs_positive_scale = True
    knows_tangents = True
    backward_owns = "keys"
    default_methods = ("single_pass", "two_pass", "one_tile")
    split_operations = ("forward", "backward", "backward_dkdv")
    features = (*Family.features, "kept_bias", "boxes")
    kept_keys = (64, 128, 256, 384, 512, 768)  # beyond, few blocks have room for the bias
    boxes = BOXES
    least_warps = _LEAST_WARPS
    costs = COSTS
    tiles = TILES
    query_rows = tuple(range(16, 257, 16))
    key_rows = tuple(range(32, 257, 16))

    def why_not_here(self) -> str | None:
        return None if _can_encode_maps() else f"needs cuda-bindings: {INSTALL_CUDA}"

    def why_not(self, operation: str, problem: AttentionProblem, strides: Mapping[str, AnyStrides]) -> str | None:
        if not problem.softmax_scale >= _LEAST_SCALE:
            return f"softmax_scale={problem.softmax_scale} is below {_LEAST_SCALE:.1e}"
        head_dim = max(problem.head_dim, problem.head_dim_v or 0)
        if operation == "backward_both" and not _has_equal_sides(problem):
            return "backward_both is for plain and short self-attention"
        if operation in METHODS["two_pass"] and head_dim > _WIDER:
            beside = set(self.kernel_features(operation, dict.fromkeys(problem.features))).difference(OF_WIDER)
            if beside:
                return f"{operation} of head_dim {head_dim}, above {_WIDER}, has no {', '.join(sorted(beside))}"
        if operation == "dkdv_jvp" and head_dim > _WIDE:
            return f"registers do not hold the tangents of dk and dv of head_dim {head_dim}, only up to {_WIDE}"
        if 0 in problem.sizes_of("k" if self.owns(operation) == "keys" else "q"):
            return None  # the kernel is not launched
        for name in MAPPED[operation]:
            if name in problem.absent:
                continue
            reason = _why_not_mappable(problem.sizes_of(name), strides[name], problem.itemsize)
            if reason:
                return f"{name} is not for TMA, {reason}"
        return None

    def record(self, operation: str) -> Record:
        return RECORDS[operation]

    def shared_memory_bytes(self, kernel: Kernel, tile: TileConfig) -> int:
        most = OF_DIRECTION if kernel.operation in _OF_TANGENTS else ()  # tangents need more
        return self.shared_memory_with(most, kernel, tile)

    def shared_memory_with(self, features: tuple[str, ...], kernel: Kernel, tile: TileConfig) -> int:
        operation, _, head_dim, head_dim_v, _ = kernel
        array = _held_array(features)
        if operation in ONE_TILE:
            return SM80.shared_memory_with(features, kernel, tile)
        if _shares_rows(kernel):
            from .sm90_shared_rows import shared_bytes

            return shared_bytes(kernel, tile)
        if operation == "forward":
            return _forward_bytes(kernel, tile, array)
        if operation == "backward_dq":
            return _dq_bytes(head_dim, head_dim_v, tile, array)
        if operation == "backward_both":
            keys = _backward_bytes(head_dim, head_dim_v, tile, array, with_dq=False)
            return max(keys + 4 * _MOST_OF_BOTH, _dq_bytes(head_dim, head_dim_v, tile, array))
        if operation == "dbias":
            return _dbias_bytes(head_dim, head_dim_v, tile, keeps_bias=changes_of_scores(features) == ("bias",))
        moved = [name in features for name in OF_DIRECTION]
        if operation in OF_JVP:
            return _jvp_bytes(operation, head_dim, head_dim_v, tile, moved)
        if operation == "dq_jvp":
            return _dq_bytes(head_dim, head_dim_v, tile, None, moved)
        if operation == "dkdv_jvp":
            return _dkdv_jvp_bytes(head_dim, head_dim_v, tile, moved)
        with_dq = {"backward": True, "backward_dkdv": False}[operation]
        return _backward_bytes(head_dim, head_dim_v, tile, array, with_dq=with_dq)

    def blocks_of_tile(self, kernel: Kernel, tile: TileConfig) -> int:
        if _shares_rows(kernel):
            return tile.b_r // 64 if kernel.operation == "forward" else 1
        # The same as in kernels/sm90/backward_shape.cuh.
        return 2 if kernel.operation == "backward" and _is_pair(kernel.head_dim, kernel.head_dim_v, tile) else 1

    def sequences_of_tile(self, kernel: Kernel, tile: TileConfig) -> int:
        return _sequences(kernel, tile)

    def has_narrow_panels(self, kernel: Kernel, tile: TileConfig) -> bool:
        if kernel.operation == "dbias":
            return max(kernel.head_dim, kernel.head_dim_v) <= _NARROW
        if kernel.operation in ("backward", "backward_dkdv"):
            return _has_resident_pair(tile)
        return kernel.operation == "forward" and _sequences(kernel, tile) > 1

    def why_not_shape(self, kernel: Kernel, tile: TileConfig) -> str | None:
        operation, _, head_dim, head_dim_v, _ = kernel
        if operation in ONE_TILE:
            return SM80.why_not_shape(kernel, tile)
        if _shares_rows(kernel):
            from .sm90_shared_rows import why_not_shape

            return why_not_shape(kernel, tile)
        if operation == "forward":
            return _why_no_forward(tile, head_dim_v, _sequences(kernel, tile))
        if operation == "backward_dq":
            return _why_no_dq(tile, head_dim)
        if operation == "backward_both":
            return _why_no_dq(tile, head_dim) or _why_no_backward(tile, head_dim, head_dim_v, with_dq=False)
        if operation == "dbias":  # the accumulators of S and dP, and the sums
            return _why_no_query_rows(tile, 0, 3 * tile.b_c // 2, 32, blocks={1: (1, 2), 2: (1,), 3: (1,)})
        if operation in OF_JVP:
            return _why_no_jvp(operation, tile, head_dim_v)
        if operation == "dq_jvp":
            return _why_no_dq_jvp(tile, head_dim)
        if operation == "dkdv_jvp":
            return _why_no_dkdv_jvp(tile, head_dim, head_dim_v)
        with_dq = {"backward": True, "backward_dkdv": False}[operation]
        return _why_no_backward(tile, head_dim, head_dim_v, with_dq=with_dq)


def _has_equal_sides(problem: AttentionProblem) -> bool:
    """True if both passes of a backward fit in one launch: their tiles are as many, and nothing changes scores."""
    rows, columns = problem.seqlen_q, problem.head_dim_v or problem.head_dim
    is_plain = not problem.settings.dsink and set(problem.features).isdisjoint(OPERATIONS["backward_dq"].features)
    same = rows == problem.seqlen_k and problem.num_heads == problem.num_heads_kv and columns == problem.head_dim
    return is_plain and same and columns <= _MOST_COLUMNS_OF_BOTH and rows <= _MOST_OF_BOTH


@functools.lru_cache(maxsize=None)
def _can_encode_maps() -> bool:
    """True if cuda-bindings can encode tensor maps. If not, warns once and names the package to install."""
    try:
        from cuda.bindings import driver

        driver.cuTensorMapEncodeTiled  # noqa: B018  (absent before CUDA 12)
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"cuda-bindings cannot be used ({error}), so that calls run on the kernels for older GPUs, at about half "
            f"the speed: {INSTALL_CUDA}",
            stacklevel=2,
        )
        return False
    return True


def _why_not_mappable(sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> str | None:
    """The reason why TMA cannot take an array with these sizes and element strides, or None if it can."""
    if 0 in sizes:
        return "it is empty"
    for size, stride in zip(sizes, strides, strict=True):
        nbytes = stride * itemsize
        if size > 1 and (nbytes <= 0 or nbytes % 16 or nbytes >= _MAX_STRIDE):
            return f"a stride of {nbytes} bytes is not a positive multiple of 16 below 2**40"
    return None


def _held_array(features: Sequence[str]) -> str | None:
    """The array over scores that warps copy to shared memory where that has room for it, or None."""
    # The same as in kernels/common/held_array.cuh.
    of_scores = features_of_scores(features) if features else ()
    return of_scores[0] if of_scores in (("bias",), ("mask",)) else None


def _held_bytes(array: str | None, queries: int, keys: int) -> int:
    """Shared memory of the tiles of an array that the warps of a block hold, each with this many keys in a row."""
    if array is None:
        return 0
    if array == "mask":
        return queries * keys * 9 // 8  # kernels/common/mask_tile.cuh: bytes, and bits
    # kernels/common/bias_tile.cuh: rows are padded unless their chunks of 16 bytes can be permuted.
    return queries * (2 * keys + (0 if keys == 16 or keys % 64 == 0 else 16))


def _most_bytes(tile: TileConfig) -> int:
    """Shared memory that a block can have beside the others of a multiprocessor; each has 1024 bytes of the system."""
    return (SHARED_BYTES + 1024) // tile.blocks_per_sm - 1024


def _row_bytes(head_dim: int, head_dim_v: int, *, is_narrow: bool = False) -> tuple[int, int]:
    """Shared memory of a row of k, and of v: panels of 64 columns, or one of 32."""
    if is_narrow:
        return 2 * _NARROW, 2 * _NARROW
    return -(-head_dim // 64) * 128, -(-head_dim_v // 64) * 128


# Kernels that own queries.


def _forward_bytes(kernel: Kernel, tile: TileConfig, array: str | None) -> int:
    """Dynamic shared memory of the forward."""
    # The same as in kernels/sm90/forward_shape.cuh: O has a buffer, or two panels, and Q a second one, if they fit.
    most = _most_bytes(tile)
    _, _, head_dim, head_dim_v, kept_keys = kernel
    sequences = _sequences(kernel, tile)
    row_of_panel = 128 if sequences == 1 else sequences * 2 * _NARROW
    row, row_v = -(-head_dim // 64) * row_of_panel, -(-head_dim_v // 64) * row_of_panel
    queries, output, panel = (tile.b_r * n for n in (row, row_v, row_of_panel))
    barriers = 8 * (4 + 4 * tile.num_stages + 2 * 4) + 4 * 32 + 4 * tile.num_threads
    fixed = 1024 + tile.num_stages * tile.b_c * (row + row_v) + barriers
    held = _held_bytes("bias" if kept_keys else array, tile.b_r, tile.b_c) * max(1, -(-kept_keys // tile.b_c))
    if array == "bias" and not kept_keys:  # the producer loads it for each group, with two barriers
        held += tile.b_r // 64 * 2 * 8
    if kept_keys or fixed + queries + held <= most:
        fixed += held
    fixed += queries
    pieces = [2 * panel] if row_v > 2 * 128 else []
    if head_dim_v != head_dim:
        pieces = [max(0, most - fixed) // panel * panel]
    besides = (output + queries, output, *pieces, 0)
    return next((fixed + n for n in besides if fixed + n <= most), fixed)


def _shares_rows(kernel: Kernel) -> bool:
    """True if two consumer groups of a kernel have the same rows, each with half of the columns of O."""
    return kernel.operation in _SHARING and max(kernel.head_dim, kernel.head_dim_v) > _WIDER


def _dividers(tile: TileConfig) -> int:
    """The multiplying warp groups that have the same rows, of kernels in which they divide the columns of v then."""
    return max(1, (tile.num_warps // 4 - 1) // max(1, tile.b_r // 64))


def _jvp_bytes(operation: str, head_dim: int, head_dim_v: int, tile: TileConfig, moved: Sequence[bool]) -> int:
    """Dynamic shared memory of the tangents of the forward. `moved`: which of q, k and v have tangents."""
    # The same as in kernels/sm90/jvp_shape.cuh: O and O' have as many panels as fit, and Q and Q' second buffers.
    dividers = _dividers(tile)
    row, row_v = _row_bytes(head_dim, -(-head_dim_v // (64 * dividers)) * 64 * dividers)
    q, k, v = (n * (1 + moves) for n, moves in zip((row, row, row_v), moved, strict=False))
    queries, results, panel = tile.b_r * q, tile.b_r * row_v * (2 if operation == "jvp" else 1), tile.b_r * 128
    barriers = 8 * (4 + 4 * tile.num_stages + 2 * 4) + 4 * 32 + 4 * tile.num_threads
    needed = 1024 + tile.num_stages * tile.b_c * (k + v) + barriers + queries
    free = max(0, _most_bytes(tile) - needed)
    if free >= results + queries:
        return needed + results + queries
    pieces = max(free // (panel * dividers), dividers - 1) * panel * dividers
    return needed + min(results, pieces)


def _why_no_jvp(operation: str, tile: TileConfig, head_dim_v: int) -> str | None:
    """The reason why tangents of the forward cannot have this tile, or None if they can."""
    dividers = _dividers(tile)
    columns = head_dim_v if dividers == 1 else -(-head_dim_v // 128) * 64
    # The accumulators of O and O', or of O', and of S and T.
    accumulators = columns // (1 if operation == "jvp" else 2) + tile.b_c
    return _why_no_query_rows(tile, columns, accumulators, 40, dividers)


def _dq_bytes(
    head_dim: int,
    head_dim_v: int,
    tile: TileConfig,
    array: str | None,
    moved: Sequence[bool] = (False, False, False, False),
) -> int:
    """Dynamic shared memory of the kernels of dQ and of its tangent. `moved`: which of q, k, v and dO have tangents."""
    # The same as in kernels/sm90/backward_dq_shape.cuh: dQ has a buffer, and Q and dO a second one, if they fit.
    row, row_v = _row_bytes(head_dim, head_dim_v)
    q, k, v, dout = (n * (1 + moves) for n, moves in zip((row, row, row_v, row_v), moved, strict=True))
    output, queries, panel = tile.b_r * row, tile.b_r * (q + dout), tile.b_r * 128
    fixed = 1024 + 8 * (8 + 4 * tile.num_stages + 2 * 4) + 4 * 32 + queries
    most = _most_bytes(tile)
    two_and_two = tile.num_stages == 2 and fixed + 2 * tile.b_c * (k + v) <= most
    fixed += tile.b_c * (tile.num_stages * k + (2 if two_and_two else tile.num_stages - 1) * v)
    held = _held_bytes(array, tile.b_r, tile.b_c)
    if fixed + held <= most:
        fixed += held
    pieces = [] if head_dim_v == head_dim else [max(0, most - fixed) // panel * panel]
    besides = (output + queries, output, *pieces, 0)
    return next((fixed + n for n in besides if fixed + n <= most), fixed)


def _sequences(kernel: Kernel, tile: TileConfig) -> int:
    """The sequences whose tiles a block that keeps the bias processes at a time."""
    # As in kernels/sm90/query_tile.cuh. Fewer keys were not measured.
    is_small = tile.b_r == 64 and max(kernel.head_dim, kernel.head_dim_v) <= _NARROW
    return max(1, tile.num_warps // 4 - 1) if kernel.kept_keys > 128 and is_small else 1


def _why_no_forward(tile: TileConfig, head_dim_v: int, sequences: int) -> str | None:
    """The reason why the forward cannot have this tile, or None if it can."""
    accumulators = head_dim_v // 2 + tile.b_c // 2 + tile.b_c // 4
    blocks = {1: (1, 2, 3, 4), 2: (1, 2), 3: (1,), 4: (1,)}
    return _why_no_query_rows(tile, head_dim_v, accumulators, 25, sequences, blocks)


def _why_no_dq(tile: TileConfig, head_dim: int) -> str | None:
    """The reason why the dQ kernel cannot have this tile, or None if it can."""
    # The accumulators of dQ, S and dP. dS shares theirs where registers are scarce.
    return _why_no_query_rows(tile, head_dim, head_dim // 2 + tile.b_c, 32)


def _why_no_dq_jvp(tile: TileConfig, head_dim: int) -> str | None:
    """The reason why the kernel of the tangent of dQ cannot have this tile, or None if it can."""
    # The accumulators of dQ', S, T, dP and dP'.
    return _why_no_query_rows(tile, head_dim, head_dim // 2 + 2 * tile.b_c, 32)


def _why_no_query_rows(
    tile: TileConfig,
    columns: int,
    accumulators: int,
    operands: int,
    dividers: int = 1,
    blocks: Mapping[int, tuple[int, ...]] = MappingProxyType({1: (2,), 2: (1,), 3: (1,)}),
) -> str | None:
    """The reason why a kernel cannot have this tile, or None if it can.

    `dividers` is the number of warp groups for each 64 rows, and `blocks` has those that a multiprocessor can have, by
    the number of multiplying warp groups of each.
    """
    groups = tile.b_r // 64 * dividers
    if tile.b_r % 64 or groups > max(3, dividers) or tile.num_warps != 4 * (groups + 1):
        return (
            f"b_r={tile.b_r} and num_warps={tile.num_warps} are not 64 rows for each of up to three warp groups of "
            "4 warps, and one more that loads"
        )
    if tile.b_c % 16 or tile.b_c > 256:
        return f"b_c={tile.b_c} is not a multiple of 16 up to 256"
    if not 2 <= tile.num_stages <= 4:
        return f"num_stages={tile.num_stages} is not from 2 to 4"
    if tile.blocks_per_sm not in blocks[groups]:
        numbers = "; ".join(f"{' or '.join(map(str, some))} of {count}" for count, some in blocks.items())
        return (
            f"blocks_per_sm={tile.blocks_per_sm} with {groups} multiplying warp groups: by these groups, a "
            f"multiprocessor has as many blocks as {numbers}"
        )
    at_entry, available = _registers(tile, groups)
    if max(columns, tile.b_c) // 2 + 30 > at_entry:
        return f"one product's operands do not fit in the {at_entry} registers that a thread starts with"
    if accumulators + operands > available:
        return f"its accumulators take {accumulators} of the {available} registers that a thread can have"
    return None


def _registers(tile: TileConfig, groups: int) -> tuple[int, int]:
    """Registers of a thread at the start, and those of consumers after setmaxnreg."""
    # The same as in kernels/sm90/query_tile_shape.cuh.
    blocks = max(tile.blocks_per_sm, -(-_LEAST_WARPS // tile.num_warps))
    at_entry = 65536 // (32 * tile.num_warps * blocks) // 8 * 8
    of_producer = 32 if groups > 2 else 24
    return at_entry, min(240, (at_entry * (groups + 1) - of_producer) // groups // 8 * 8)


def _dbias_bytes(head_dim: int, head_dim_v: int, tile: TileConfig, *, keeps_bias: bool) -> int:
    """Dynamic shared memory of the kernel that owns tiles of a bias, which keeps its tile if that fits."""
    # The same as in kernels/sm90/dbias_shape.cuh.
    most = _most_bytes(tile)
    rows = sum(_row_bytes(head_dim, head_dim_v, is_narrow=max(head_dim, head_dim_v) <= _NARROW))
    stage = (tile.b_r + tile.b_c) * rows + 8 * tile.b_r + 32 + 16 * -(-tile.b_c // 128) + 2 * 8
    needed, held = 1024 + tile.num_stages * stage, _held_bytes("bias", tile.b_r, tile.b_c)
    return needed + held if keeps_bias and needed + held <= most else needed


# Kernels that own keys.


def _backward_bytes(head_dim: int, head_dim_v: int, tile: TileConfig, array: str | None, *, with_dq: bool) -> int:
    """Dynamic shared memory of the kernels that own keys."""
    # The same as in kernels/sm90/backward_shape.cuh. Two groups that compute dV and dK exchange P.
    is_narrow = _has_resident_pair(tile)
    row, row_v = _row_bytes(head_dim, head_dim_v, is_narrow=is_narrow)
    rows, keys = row + row_v, tile.b_c  # rows: of K and V, or of Q and dO
    pair = 0
    if _is_pair(head_dim, head_dim_v, tile):  # K of the other block, and a tile of dS that is sent
        keys //= 2
        pair = keys * (row + 2 * tile.b_r)
    widest, scores = max(head_dim, head_dim_v), 2 * 2 * tile.b_r * keys
    as_step = widest <= (_WIDE if with_dq else 64)  # statistics enter as a k-step, multiplied by a tile of ones
    queries = tile.num_stages * tile.b_r * (rows + 2 * (32 if as_step else 4)) + 64 * 32 * as_step
    exchanged = with_dq + (widest > _WIDE)
    needed = 1024 + keys * rows + queries + exchanged * scores + pair + 8 * (2 + 4 * tile.num_stages + 12)
    if array == "bias":  # the producer loads that of 64 keys at a time, with two barriers
        held = keys // 64 * (_held_bytes(array, tile.b_r, 64) + 16)
    else:
        held = 0 if is_narrow else keys // 16 * _held_bytes(array, tile.b_r, 16)  # a warp's tile has 16 keys
    most = _most_bytes(tile)
    return needed + held if needed + held <= most else needed


def _has_resident_pair(tile: TileConfig) -> bool:
    """True if a multiprocessor has two blocks that own keys, whose panels are narrow."""
    return tile.blocks_per_sm == 2


def _is_pair(head_dim: int, head_dim_v: int, tile: TileConfig) -> bool:
    """True if two blocks divide the keys of a tile."""
    return max(head_dim, head_dim_v) > _WIDE and tile.b_c == 128


def _dkdv_jvp_bytes(head_dim: int, head_dim_v: int, tile: TileConfig, moved: Sequence[bool]) -> int:
    """Dynamic shared memory of the tangents of dK and dV. `moved`: which of q, k, v and dO have tangents."""
    # The same as in kernels/sm90/dkdv_jvp_shape.cuh.
    row, row_v = _row_bytes(head_dim, head_dim_v)
    q, k, v, dout = (n * (1 + moves) for n, moves in zip((row, row, row_v, row_v), moved, strict=True))
    stage = tile.b_r * (q + dout + 2 * 8)
    return 1024 + tile.b_c * (k + v) + tile.num_stages * stage + 8 * (4 + 4 * tile.num_stages)


def _why_no_keys(tile: TileConfig, keys: int, groups: str, blocks: int = 1) -> str | None:
    """The reason why a block cannot own the keys of a tile with these warps, or None if it can."""
    if tile.b_c != keys or tile.num_warps != 12 or not 1 <= tile.blocks_per_sm <= blocks:
        some = "one block" if blocks == 1 else "one or two blocks"
        return (
            f"b_c={tile.b_c}, num_warps={tile.num_warps} and blocks_per_sm={tile.blocks_per_sm} are not {some} of "
            f"{keys} keys, a warp group of 4 warps for {groups}, and one more that loads"
        )
    return None


def _why_no_dkdv_jvp(tile: TileConfig, head_dim: int, head_dim_v: int) -> str | None:
    """The reason why the tangents of dK and dV cannot have this tile, or None if they can."""
    reason = _why_no_keys(tile, 128, "each 64 keys")
    if reason:
        return reason
    if tile.b_r % 16 or tile.b_r > 64:
        return f"b_r={tile.b_r} is not a multiple of 16 up to 64"
    if not 2 <= tile.num_stages <= 4:
        return f"num_stages={tile.num_stages} is not from 2 to 4"
    accumulators = 2 * tile.b_r + (head_dim + head_dim_v) // 2  # of S, T, dP and dP', dK' and dV'
    if accumulators > 192:
        return f"its accumulators take {accumulators} of the 192 registers that a thread has for them"
    return None


def _why_no_backward(tile: TileConfig, head_dim: int, head_dim_v: int, *, with_dq: bool) -> str | None:
    """The reason why the kernels that own keys cannot have this tile, or None if they can."""
    is_divided = max(head_dim, head_dim_v) > _WIDE
    keys, groups = (64, "dV and one for dK") if is_divided else (128, "each 64 keys")
    if with_dq and _is_pair(head_dim, head_dim_v, tile):
        keys = 128
    reason = _why_no_keys(tile, keys, groups, 2 if max(head_dim, head_dim_v) <= _NARROW else 1)
    if reason:
        return reason
    if _has_resident_pair(tile) and tile.b_r != 64:
        return f"b_r={tile.b_r} with two blocks of a multiprocessor is not 64"
    if tile.b_r % 16 or tile.b_r > 128:
        return f"b_r={tile.b_r} is not a multiple of 16 up to 128"
    # Halves of up to 64 columns are for pairs: 128 rows take more than there is with a wider V.
    of_columns = (64, 128) if head_dim != head_dim_v or _has_resident_pair(tile) else (128,)
    if with_dq and (tile.b_r != 64 if is_divided else head_dim <= 64 and tile.b_r not in of_columns):
        return f"dQ of b_r={tile.b_r} rows does not divide between two warp groups"
    if with_dq and tile.b_r == 128 and head_dim > 64:
        return f"dQ of b_r={tile.b_r} rows by 64 columns is more than a warp group multiplies"
    if not 2 <= tile.num_stages <= 4:
        return f"num_stages={tile.num_stages} is not from 2 to 4"
    accumulators = tile.b_r + (max(head_dim, head_dim_v) if is_divided else head_dim + head_dim_v) // 2
    if accumulators > 208:
        return f"its accumulators take {accumulators} of the 208 registers that a thread has for them"
    return None


SM90 = Sm90()
