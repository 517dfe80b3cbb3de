"""The choice of family, method and tiles for a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..errors import UnsupportedProblemError
from ..problem.attention import AttentionProblem
from ..problem.boxes import Boxes
from ..problem.options import MAX_SPLITS, CallOptions, requested_method
from ..problem.strides import AnyStrides
from .boxes import boxed
from .dbias import DbiasOwner, splits_of_dbias, time_of_dbias, ways_of_dbias
from .device import ARCHITECTURES, DeviceInfo
from .estimate import Costs, backward_time, forward_splits, split_candidates
from .family import Family, Kernel
from .kept_bias import kept_bias
from .one_tile import why_not_one_tile
from .operations import IN_ONE_LAUNCH, IN_TWO_LAUNCHES, METHODS, ONE_TILE_DBIAS, OPERATIONS, SEVERAL
from .registry import FAMILIES, supporting_families
from .simt import SIMT
from .tile import TileConfig, has_tile_of, requested_tile
from .tile_choice import choose_tile, decode_tile, default_tile, why_not_map

__all__ = ["Choice", "check_on_any_gpu", "choices_with_copies", "choose", "choose_with_copies"]

_DEFAULTS = CallOptions()

#: Gives the problem and the strides that kernels of a family get.
_Taken = Callable[[Family], tuple[AttentionProblem, Mapping[str, AnyStrides]]]


@dataclass(frozen=True)
class Choice:
    """The family, tiles and method of a call.

    Attributes
    ----------
    family : Family
        The family of all tiled kernels.
    tiles : mapping of operation to TileConfig
        The tiles of the tiled kernels, in the order of their launches. A backward with one of ``"forward"`` computes
        lse again, in its own arithmetic.
    method : str or None
        The method of a backward, else None.
    num_splits : mapping of operation to int
        The number of blocks that share the work on a tile, where it is more than one.
    fallback : Choice or None
        The kernels of the heads for which those of `family` would not be accurate enough; None computes all heads.
    kept_keys : int
        The most keys whose bias the blocks of a forward keep; 0 if they keep none.
    boxes : Boxes or None
        The boxes of tokens that are the tiles of the kernels, in the place of a mask function.
    dbias : DbiasOwner or None
        The kernel that owns tiles of a broadcast bias. None if the tiled kernels add dbias atomically, or if there is
        no such dbias.
    """

    family: Family
    tiles: Mapping[str, TileConfig]
    method: str | None = None
    num_splits: Mapping[str, int] = field(default_factory=dict)
    fallback: Choice | None = None
    kept_keys: int = 0
    boxes: Boxes | None = None
    dbias: DbiasOwner | None = None

    @property
    def owns_dbias(self) -> bool:
        """True if blocks own tiles of a broadcast bias, so that dbias is not summed in its place by atomics."""
        return self.dbias is not None or ONE_TILE_DBIAS in self.tiles


def choose(
    call: str,
    problem: AttentionProblem,
    device: DeviceInfo,
    strides: Mapping[str, AnyStrides],
    options: CallOptions = _DEFAULTS,
    *,
    is_launched: bool = True,
) -> Choice:
    """The same for arrays that kernels of any family take as they are, but for the head_dim.

    Parameters
    ----------
    call, problem, device
        As for `choose_with_copies`.
    strides : mapping
        Strides of all tensors of the call, by the kernels' names.
    options, is_launched
        As for `choose_with_copies`.
    """
    return choose_with_copies(
        call, problem, device, lambda family: (family.padded(problem), strides), options, is_launched=is_launched
    )


def choose_with_copies(
    call: str,
    problem: AttentionProblem,
    device: DeviceInfo,
    taken_by: _Taken,
    options: CallOptions = _DEFAULTS,
    *,
    is_launched: bool = True,
) -> Choice:
    """The family, method and tiles of all kernels of a call.

    All tiled kernels of a call are of one family: the first that supports the problem with its features, and whose
    kernels for the method, which depends on the family, take the arrays or the copies that are made of them.

    Parameters
    ----------
    call : {"forward", "delta", "backward", "decode", "merge", "tile_states", "jvp", "output_jvp", "backward_jvp",
            "double_backward"}
    problem : AttentionProblem
    device : DeviceInfo
    taken_by : callable
        Gives the problem and the strides of all tensors, by the kernels' names, that kernels of a family get.
    options : CallOptions, optional
        Only `family`, `method`, `deterministic`, `config`, `num_splits` and `precision` are read.
    is_launched : bool, optional
        False if the kernels are only compiled, and will not run on this machine.

    Raises
    ------
    TypeError, ValueError
        An option is not legal.
    UnsupportedProblemError
        No family, or not the requested one, takes the call.
    """
    return choices_with_copies(call, problem, device, taken_by, options, is_launched=is_launched)[0]


def choices_with_copies(
    call: str,
    problem: AttentionProblem,
    device: DeviceInfo,
    taken_by: _Taken,
    options: CallOptions = _DEFAULTS,
    *,
    is_launched: bool = True,
) -> list[Choice]:
    """All choices that come into question for a call, the one with the shortest estimated time first.

    Parameters and exceptions are those of `choose_with_copies`.
    """
    if call == "forward" and options._replace(causal=False, softmax_scale=None, layout="bshd") == _DEFAULTS:
        choice = _choice_of_few_queries(problem, device, taken_by)
        if choice is not None:
            return [choice]
    refusals = []
    families = supporting_families(call, problem.dtype, device, options.family, problem.features, options.precision)
    for family in families:
        problem, strides = taken_by(family)
        if call == "decode":
            is_last = family is families[-1]
            if not is_last and family.why_not_columns(call, problem.head_dim, problem.columns_of("v")):
                continue
            tile = decode_tile(family, problem, device, for_any_batch=options.num_splits is not None)
            return [Choice(family, {"decode": tile})]
        owners = _ways_of_dbias(call, family, problem, device, strides, options, is_launched)
        if options.deterministic and problem.settings.sums_dbias and not any(owners):
            why = why_not_map(family, "dbias", problem, device) if "dbias" in family.operations else None
            refusals.append(f"family {family.public_name!r} {why or 'has no kernel of dbias for this problem'}")
        choices: list[Choice] = []
        for owner in owners:
            of_tiled = problem
            if owner is not None:
                of_tiled = problem.with_settings(replace(problem.settings, dbias=False))
            found, reasons = _choices_of(family, call, of_tiled, device, strides, options, is_launched)
            # Blocks with all keys sum dbias as they go; a kernel that follows them computes all scores again.
            sums_dbias = any(ONE_TILE_DBIAS in choice.tiles for choice in choices)
            found = [choice for choice in found if not (sums_dbias and choice.method == "one_tile")]
            choices += [replace(choice, dbias=owner) for choice in found]
            refusals += [f"family {family.public_name!r} {reason}" for reason in dict.fromkeys(reasons)]
        if choices:
            return _by_time(choices, problem, device, strides)
    refusal = "; ".join(refusals)
    raise UnsupportedProblemError(f"{'num_splits: ' if 'num_splits' in refusal else ''}{refusal}")


def check_on_any_gpu(call: str, problem: AttentionProblem, options: CallOptions) -> None:
    """Raises the error of a call for which no GPU has kernels: calls on NumPy arrays do not take it either.

    Parameters are those of `choose`. Arrays are taken to be contiguous, and tiles are those of the kernels: NumPy has
    `config` for smaller ones, too.
    """
    layout = problem.settings.block_mask
    is_given_map = layout is not None and layout.program is None
    if (options.family, options.num_splits, options.precision) == (None, None, None) and not is_given_map:
        return

    def contiguous(family: Family) -> tuple[AttentionProblem, Mapping[str, AnyStrides]]:
        padded = family.padded(problem)
        return padded, padded.contiguous_strides()

    options = options._replace(config=None)
    first: UnsupportedProblemError | None = None
    for arch in sorted(ARCHITECTURES, key=lambda arch: arch != "sm_90"):
        try:
            choose_with_copies(call, problem, ARCHITECTURES[arch], contiguous, options, is_launched=False)
            return
        except UnsupportedProblemError as error:
            first = first or error
    assert first is not None, "there are GPUs"
    raise first


def _choices_of(
    family: Family,
    call: str,
    problem: AttentionProblem,
    device: DeviceInfo,
    strides: Mapping[str, AnyStrides],
    options: CallOptions,
    is_launched: bool,
) -> tuple[list[Choice], list[str]]:
    """The choices of a family, by methods and splits, and the reasons why other methods are none."""
    choices: list[Choice] = []
    reasons: list[str] = []
    ways = _ways(family, problem, options) if call == "backward" else _ways_of_others(call)
    for method, names in ways:
        if choices and names == IN_TWO_LAUNCHES.get(call):
            break
        operations = [operation for operation in names if OPERATIONS[operation].is_tiled]
        reason = (
            _why_not(family, operations, problem, strides, is_launched)
            or _why_not_split(family, operations, options)
            or _why_not_by_default(family, operations, problem, device, options)
        )
        if reason is not None:
            reasons.append(reason)
            continue
        may_keep = call == "forward" and "bias" in strides and family.kept_keys
        kept = kept_bias(family, problem, device, strides["bias"], options) if may_keep else None
        if kept is not None:
            choices.append(Choice(family, {call: kept.tile}, kept_keys=kept.keys))
            continue
        may_box = names in (("forward",), ("backward",)) and problem.settings.functions and family.boxes
        of_grid = boxed(names[0], family, problem, device, strides, options) if may_box else None
        if of_grid is not None:
            choices.append(Choice(family, {call: of_grid.tile}, method, boxes=of_grid.boxes))
            continue
        try:
            of_any_batch = options.num_splits is not None
            tiles = {
                name: choose_tile(name, family, problem, device, options.config, for_any_batch=of_any_batch)
                for name in operations
            }
            if call in ("backward", *SEVERAL) and _needs_own_lse(
                family, problem, device, strides, options, is_launched
            ):
                tiles = {"forward": choose_tile("forward", family, problem, device), **tiles}
        except UnsupportedProblemError as error:
            is_only = options.method == method and not problem.settings.sums_dbias
            if (method, names) == ways[-1] and not choices and (method != "one_tile" or is_only):
                raise
            reasons.append(str(error))
            continue
        if problem.settings.block_mask is not None:
            tiles = _of_one_list(family, tiles)
        if ONE_TILE_DBIAS in tiles:
            splits = splits_of_dbias(problem, device, strides, tiles[ONE_TILE_DBIAS])
            choices.append(Choice(family, tiles, method, {ONE_TILE_DBIAS: splits}))
            continue
        fallback = _fallback(call, method, family, problem, device)
        choices += _splits(Choice(family, tiles, method, fallback=fallback), problem, device, options)
    return choices, reasons


def _of_one_list(family: Family, tiles: Mapping[str, TileConfig]) -> dict[str, TileConfig]:
    """Tiles for kernels that follow the lists of a sparse map, of which a call has one for each side.

    The last kernel of a side needs the most shared memory, so that the others can have its tile.
    """
    last = {family.owns(name): tile for name, tile in tiles.items()}
    return {name: last[family.owns(name)] for name in tiles}


def _choice_of_few_queries(problem: AttentionProblem, device: DeviceInfo, taken_by: _Taken) -> Choice | None:
    """The kernel of ``decode`` for a forward with few queries, or None if it has too many.

    The kernel takes it if the queries of all heads of a group are rows of one tile. Then it reads keys and values once,
    and divides them among all multiprocessors; a forward reads them once for each query head. Both are bound by memory
    there.
    """
    if problem.is_packed or not set(problem.features) <= set(OPERATIONS["decode"].features):
        return None
    columns = problem.head_dim, problem.columns_of("v")
    for family in FAMILIES:
        has_it = family.supports("decode", problem.dtype, device) and "decode" in family.operations
        if has_it and family.why_not_columns("decode", *columns) is None:
            problem, _ = taken_by(family)
            try:
                most = default_tile(family, "decode", problem, device).b_r
            except UnsupportedProblemError:
                return None
            is_one_tile = 0 < problem.seqlen_q * problem.heads_per_group <= most
            return Choice(family, {"decode": decode_tile(family, problem, device)}) if is_one_tile else None
    return None


def _fallback(
    call: str, method: str | None, family: Family, problem: AttentionProblem, device: DeviceInfo
) -> Choice | None:
    """The kernels of IEEE arithmetic that compute heads which parts of float32 data do not represent well.

    Those of `two_pass` overwrite the gradients of these heads. That of `single_pass` adds to zeros in dK and dV.
    """
    if not family.multiplies_parts or call not in ("forward", "backward"):
        return None
    operations = METHODS[method] if method else (call,)
    return Choice(SIMT, {name: choose_tile(name, SIMT, problem, device) for name in operations}, method)


def _ways_of_dbias(
    call: str,
    family: Family,
    problem: AttentionProblem,
    device: DeviceInfo,
    strides: Mapping[str, AnyStrides],
    options: CallOptions,
    is_launched: bool,
) -> list[DbiasOwner | None]:
    """The kernels beside the tiled ones that may compute the gradient of a broadcast bias; None if it needs none."""
    if call != "backward" or not problem.settings.dbias or problem.settings.full_dbias:
        return [None]

    def runs(one: Family) -> bool:
        return _why_not(one, ("dbias",), problem, strides, is_launched) is None

    may_be_one_tile = options.method == "one_tile" or _adds_one_tile(family, options)
    is_requested = options.method == "one_tile" or has_tile_of("one_tile", options.config)
    is_one_tile = may_be_one_tile and is_requested and not problem.settings.dscore_args
    ways = ways_of_dbias(family, problem, device, strides, runs, deterministic=options.deterministic or is_one_tile)
    return [*[None] * (may_be_one_tile and None not in ways), *ways]


def _needs_own_lse(
    family: Family,
    problem: AttentionProblem,
    device: DeviceInfo,
    strides: Mapping[str, AnyStrides],
    options: CallOptions,
    is_launched: bool,
) -> bool:
    """True if a backward of IEEE arithmetic gets the lse of a forward that multiplies parts."""
    if family is not SIMT or problem.dtype != "float32" or options.family is not None or options.precision == "ieee":
        return False
    of_forward = CallOptions(precision=options.precision)
    return choose("forward", problem, device, strides, of_forward, is_launched=is_launched).family.multiplies_parts


def _splits(choice: Choice, problem: AttentionProblem, device: DeviceInfo, options: CallOptions) -> list[Choice]:
    """The choice with every number of splits that comes into question."""
    operation = next((name for name in choice.tiles if name in choice.family.split_operations), None)
    if operation is None or 0 in problem.score_shape:
        return [choice]
    tile = choice.tiles[operation]
    if options.num_splits is not None:
        numbers = [int(options.num_splits)]
    elif choice.method is None:
        of_tile = choice.family.blocks_of_tile(Kernel.of(operation, problem), tile)
        numbers = [forward_splits(_costs(choice), problem, device, tile, MAX_SPLITS, of_tile)]
        if numbers != [1]:  # shares of another tile have other bits, and parts of a distributed call have fewer jobs
            whole = choose_tile(operation, choice.family, problem, device, options.config, for_any_batch=True)
            if whole != tile:
                return _splits(replace(choice, tiles={operation: whole}), problem, device, options)
    else:
        numbers = split_candidates(operation, problem, tile, MAX_SPLITS)
    return [replace(choice, num_splits={operation: n} if n > 1 else {}) for n in numbers]


def _by_time(
    choices: Sequence[Choice], problem: AttentionProblem, device: DeviceInfo, strides: Mapping[str, AnyStrides]
) -> list[Choice]:
    """The choices of a family, that with the shortest estimated time first; without costs in their order."""
    family = choices[0].family
    if len(choices) == 1 or family.costs is None:
        return list(choices)
    costs = family.costs
    tiles = {name: tile for choice in choices for name, tile in choice.tiles.items() if name in costs.clusters}
    blocks = {name: family.blocks_of_tile(Kernel.of(name, problem), tile) for name, tile in tiles.items()}

    def time(choice: Choice) -> float:
        has_owner = choice.dbias is not None
        tiled = backward_time(
            costs, problem, device, choice.tiles, choice.num_splits, blocks, has_owner=has_owner, boxes=choice.boxes
        )
        if "dbias" not in strides or problem.settings.full_dbias or ONE_TILE_DBIAS in choice.tiles:
            return tiled
        return tiled + time_of_dbias(family, choice.dbias, problem, device, strides)

    return sorted(choices, key=time)


def _costs(choice: Choice) -> Costs:
    costs = choice.family.costs
    assert costs is not None, f"{choice.family.name} has several choices, and no costs"
    return costs


def _why_not_by_default(
    family: Family, operations: Sequence[str], problem: AttentionProblem, device: DeviceInfo, options: CallOptions
) -> str | None:
    """The reason why a family does not take a problem unasked, as the end of a sentence; None if it does."""
    if options.config is None:
        reason = next(filter(None, (why_not_map(family, name, problem, device) for name in operations)), None)
        if reason is not None:
            return reason
    is_requested = options.family is not None or options.precision == "split"
    if not is_requested and not family.is_accurate(problem):
        return "is not known to be as accurate as float32 arithmetic for this problem"
    return None


def _why_not_split(family: Family, operations: Sequence[str], options: CallOptions) -> str | None:
    """The reason why a family cannot share tiles as the caller requests, as the end of a sentence; None if it can."""
    if (options.num_splits or 1) > 1 and operations and set(operations).isdisjoint(family.split_operations):
        return f"has no kernels for num_splits={options.num_splits}, only for 1"
    return None


def _adds_one_tile(family: Family, options: CallOptions) -> bool:
    """True if ``one_tile`` comes into question beside the method that a caller's wishes imply.

    A deterministic call that names a number of splits has bits that do not depend on the sequences beside one, but how
    many there are decides between ``one_tile`` and ``two_pass``: it takes ``two_pass``.
    """
    return options.method is None and options.num_splits is None and "one_tile" in family.default_methods


def _methods(family: Family, problem: AttentionProblem, options: CallOptions) -> tuple[str, ...]:
    """The methods that come into question."""
    requested = requested_method(options.method, options.deterministic)
    methods = (requested,) if requested else family.methods_of(problem)
    if options.deterministic and _adds_one_tile(family, options):
        methods = (*methods, "one_tile")
    if options.method is None and options.config is not None and not has_tile_of("one_tile", options.config):
        methods = tuple(method for method in methods if method != "one_tile")
    settings = problem.settings
    if settings.dbias or settings.dscore_args:
        sums_in_blocks = "one_tile" in methods and settings.sums_dbias and not settings.dscore_args
        with_atomics = dict.fromkeys(map(family.method_with_dbias, methods))
        if settings.sums_dbias and (options.deterministic or (options.method == "one_tile" and sums_in_blocks)):
            with_atomics = {}
        # The kernel that sums dbias has a tile of its own. A requested one is for that beside which another sums it.
        sums_in_blocks &= requested_tile("backward_one_tile", options.config) is None
        methods = (*with_atomics, *["one_tile"] * sums_in_blocks)
    return methods


def _ways(family: Family, problem: AttentionProblem, options: CallOptions) -> list[tuple[str, tuple[str, ...]]]:
    """The methods that come into question, each with its operations: without requested tiles, also in one launch."""
    methods = _methods(family, problem, options)
    of_dbias = {"one_tile": (ONE_TILE_DBIAS,)} if problem.settings.sums_dbias else {}
    ways = [(method, of_dbias.get(method, METHODS[method])) for method in methods]
    if options.config is None:
        both = [(method, IN_ONE_LAUNCH[method]) for method in methods if method in IN_ONE_LAUNCH]
        ways = [way for way in both if set(way[1]) <= set(family.operations)] + ways
    return ways


def _ways_of_others(call: str) -> list[tuple[None, tuple[str, ...]]]:
    """The same of calls that have no methods, best first."""
    ways = [(None, SEVERAL.get(call, (call,)))]
    return [*ways, (None, IN_TWO_LAUNCHES[call])] if call in IN_TWO_LAUNCHES else ways


def _why_not(
    family: Family,
    operations: Sequence[str],
    problem: AttentionProblem,
    strides: Mapping[str, AnyStrides],
    is_launched: bool,
) -> str | None:
    """The reason why a family cannot run these kernels, as the end of a sentence; None if it can."""
    lacking = family.why_not_here() if is_launched and operations else None
    if lacking:
        return lacking
    columns = problem.head_dim, problem.columns_of("v")
    for operation in operations:
        if operation not in family.operations:
            return f"has no kernel of {operation}"
        reason = (
            family.why_not_columns(operation, *columns)
            or why_not_one_tile(family, operation, problem, strides)
            or family.why_not(operation, problem, strides)
        )
        if reason:
            return f"for this problem: {reason}"
    return None
