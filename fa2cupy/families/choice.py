"""The table of kernel families, and the choice of family, method and tile."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..problem.arguments import check_bool
from .device import DeviceInfo
from ..errors import UnsupportedProblemError
from ..problem.attention import AttentionProblem
from .tile_table import TILE_TABLE
from .tiles import OPERATIONS, TileConfig, fits_blocks, padded_head_dim, why_illegal
from .tuning import tuned_tile

__all__ = [
    "FAMILIES", "OPERATIONS_OF", "Family", "choose_family", "choose_method", "choose_tile", "method_of_dbias",
    "requested_tile",
]  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A set of kernels that share their main loops.

    Attributes
    ----------
    name : str
    operations : tuple of str
        What it has kernels for.
    dtypes : tuple of str
    min_compute_capability, max_compute_capability : int
        Oldest and newest GPU that runs it.
    row_alignment : int
        Bytes on whose multiples rows must start.
    head_dim_step : int
        What head_dim must be a multiple of.
    arch_suffix : str
        What its code needs behind the architecture's name: ``"a"`` for instructions that only this one has.
    features : tuple of str
        What its kernels have besides plain attention: of `AttentionProblem.needs`, and ``"dlse"``.
    """

    name: str
    operations: tuple[str, ...]
    dtypes: tuple[str, ...]
    min_compute_capability: int
    max_compute_capability: int
    row_alignment: int
    head_dim_step: int
    arch_suffix: str = ""
    features: tuple[str, ...] = ()

    def supports(self, operation: str, dtype: str, device: DeviceInfo, needs: tuple[str, ...] = ()) -> bool:
        """Whether the family has a kernel for the operation and dtype, with the features it needs, on the device."""
        return (
            operation in self.operations
            and set(needs) <= set(self.features)
            and dtype in self.dtypes
            and self.min_compute_capability <= device.compute_capability <= self.max_compute_capability
        )

    @property
    def gpus(self) -> str:
        """The GPUs that run it, in words."""
        newer = " or newer" if self.max_compute_capability == _ANY_NEWER else ""
        return f"compute capability {self.min_compute_capability / 10}{newer}"

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.dtypes)}; {self.gpus})"


_ALL = (*OPERATIONS, "delta", "dsink", "convert_dq", "clear_forward", "clear_backward")
_HOPPER = (*OPERATIONS, "convert_dq")
_ANY_NEWER = 10_000
_FEATURES = (
    "window", "softcap", "alibi_slopes", "bias", "wide_bias", "mask", "key_padding_mask", "sink", "dropout_p",
    "dlse", "dsink", "dbias", "head_dim_v", "cu_seqlens",
)  # fmt: skip

#: The first row that supports the operation and dtype on the device wins.
FAMILIES = (
    Family("sm90", _HOPPER, ("float16", "bfloat16"), 90, 90, row_alignment=16, head_dim_step=8, arch_suffix="a", features=_FEATURES),
    Family("sm80", _ALL, ("float16", "bfloat16"), 80, _ANY_NEWER, row_alignment=16, head_dim_step=8,
           features=_FEATURES),
    Family("simt", _ALL, ("float32", "float64"), 60, _ANY_NEWER, row_alignment=1, head_dim_step=1,
           features=_FEATURES),
)


#: The faster backward scheme of each family; of sm90 beyond the lengths below.
_DEFAULT_METHODS = {"sm90": "two_pass", "sm80": "single_pass", "simt": "two_pass", "numpy": "single_pass"}
#: Up to a head_dim, the fewest query rows for which sm90 is faster in one pass: without and with a causal mask. Measured by
#: scripts/methods.py; the number of heads does not matter.
_ONE_PASS_ON_SM90 = {64: (1024, 1024), 128: (1024, 2048)}
#: The most keys of a row's window for which it is not, however many rows there are: adding up dQ elsewhere costs a row the
#: same for few keys as for many.
_TWO_PASSES_ON_SM90 = 256
#: The kernels of each scheme.
OPERATIONS_OF = {"single_pass": ("backward",), "two_pass": ("backward_dq", "backward_dkdv")}
_WITHOUT_ATOMICS = ("numpy",)  # one thing at a time: both schemes give the same bits each time


def choose_method(family: str, problem: AttentionProblem, method: str | None, deterministic: bool) -> str:
    """The backward scheme: the caller's, else ``two_pass`` if results must not differ, else the faster one."""
    if method not in (None, "single_pass", "two_pass"):
        raise ValueError(f"method: expected None, 'single_pass' or 'two_pass', got {method!r}")
    check_bool("deterministic", deterministic)
    must_not_vary = deterministic and family not in _WITHOUT_ATOMICS
    if must_not_vary and method == "single_pass":
        raise ValueError("method: 'single_pass' adds atomically, so that it cannot be deterministic; use 'two_pass' or None")
    if method is not None or must_not_vary:
        return method or "two_pass"
    if family == "sm90":
        rows = next((rows for limit, rows in _ONE_PASS_ON_SM90.items() if problem.head_dim <= limit), None)
        is_narrow = None not in problem.band and sum(problem.band) < _TWO_PASSES_ON_SM90
        if rows is not None and problem.typical_seqlen_q >= rows[problem.causal] and not is_narrow:
            return "single_pass"
    return _DEFAULT_METHODS[family]


def method_of_dbias(row: Family, method: str, deterministic: bool, problem: AttentionProblem, bias) -> str:
    """dbias is added up by kernels that own query tiles. Where elements share a sum, that is atomic."""
    if deterministic and bias.size < math.prod(problem.score_shape):
        raise UnsupportedProblemError(
            f"return_dbias: for a bias that is broadcast, here {bias.shape}, it is summed atomically; not with deterministic"
        )
    return method if row.name == "simt" else "two_pass"


def choose_family(
    operation: str, dtype: str, device: DeviceInfo, family: str | None = None, needs: tuple[str, ...] = ()
) -> Family:
    """The row for an operation and dtype, with the features it `needs`, on a device; `family` insists on one by name.

    Raises
    ------
    ValueError
        `family` is not a family.
    UnsupportedProblemError
        No family, or not the one asked for, supports the operation and dtype on the device, or has the features.
    """
    names = [row.name for row in FAMILIES]
    if family is not None and family not in names:
        raise ValueError(f"family: expected one of {names}, got {family!r}")
    for row in FAMILIES:
        if family in (None, row.name) and row.supports(operation, dtype, device, needs):
            return row
    reason = _why_no_family(operation, dtype, device, family, needs)
    raise UnsupportedProblemError(f"{reason}. Families: {', '.join(map(str, FAMILIES))}")


def _why_no_family(operation: str, dtype: str, device: DeviceInfo, family: str | None, needs: tuple[str, ...]) -> str:
    rows = [row for row in FAMILIES if family in (None, row.name)]
    wanted = f"family {family!r}" if family else "no kernel family"
    if not any(operation in row.operations for row in rows):
        return f"{wanted} has no kernel of {operation}"
    rows = [row for row in rows if dtype in row.dtypes]
    if not rows:
        return f"{wanted} has no kernels for {dtype}"
    place = f"{device.name} ({device.arch})"
    if not any(row.supports(operation, dtype, device) for row in rows):
        if family:
            return f"{wanted} does not run on {place}: it needs {rows[0].gpus}"
        here = dict.fromkeys(d for row in FAMILIES for d in row.dtypes if row.supports(operation, d, device))
        others = " or ".join(here) or "none"
        return f"no kernel takes {dtype} on {place}: that needs {rows[-1].gpus}; here there is {others}"
    has_it = "does not have it" if family else "has it"
    missing = f"{', '.join(needs)}: {wanted} for {operation} with {dtype} on {place} {has_it}"
    return f"{missing}; NumPy arrays can have all features"


def requested_tile(operation: str, config: TileConfig | Mapping[str, TileConfig] | None) -> TileConfig | None:
    """The caller's tile for one kernel.

    Raises
    ------
    TypeError, ValueError
        `config` is not a TileConfig or a mapping from operations to them.
    """
    if isinstance(config, Mapping):
        unknown = [name for name in config if name not in OPERATIONS]
        if unknown:
            raise ValueError(f"config: {unknown} are no operations; those are {list(OPERATIONS)}")
        config = config.get(operation)
    if not isinstance(config, TileConfig | None):
        raise TypeError(f"config: expected a TileConfig or a dict of them by operation, got {type(config).__name__}")
    return config


def choose_tile(
    operation: str,
    family: str,
    problem: AttentionProblem,
    device: DeviceInfo,
    config: TileConfig | Mapping[str, TileConfig] | None = None,
) -> TileConfig:
    """The tile of one kernel: the caller's, else the user's tuning file's, else the table's.

    Raises
    ------
    TypeError, ValueError
        `config` is not a TileConfig (or mapping), or not legal for the kernel on the device.
    """
    arguments = (operation, family, problem.dtype, problem.head_dim)
    requested = requested_tile(operation, config)
    if requested is not None:
        reason = why_illegal(*arguments, requested, device)
        if reason:
            raise ValueError(f"config: {requested} is not legal for {operation} at head_dim {problem.head_dim}: {reason}")
        return requested
    tuned = tuned_tile(*arguments, problem.causal, device)
    if tuned is not None:
        return tuned
    for row in TILE_TABLE:
        if (
            (row.family, row.operation) == (family, operation)
            and padded_head_dim(family, problem.head_dim) <= row.head_dim
            and (row.dtypes is None or problem.dtype in row.dtypes)
            and (not row.features or not set(row.features).isdisjoint(problem.needs))
            and why_illegal(*arguments, row.tile, device) is None
            and fits_blocks(*arguments, row.tile, device)
        ):
            return row.tile
    raise UnsupportedProblemError(
        f"no default tile of {operation} ({family}) at head_dim {problem.head_dim}, {problem.dtype} fits "
        f"{device.name}, which has {device.shared_memory_per_block} bytes of shared memory for a block; config= takes "
        "any of fa2cupy.legal_configs"
    )
