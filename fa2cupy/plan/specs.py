"""The kernels that calls use, found by planning small calls on the host."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ..errors import UnsupportedProblemError
from ..families.boxes import boxed, with_grid
from ..families.choice import Choice, choices_with_copies, choose
from ..families.device import DeviceInfo
from ..families.family import Kernel
from ..families.kept_bias import kept_biases
from ..families.operations import IN_ONE_LAUNCH, METHODS, ONE_TILE
from ..families.registry import choose_family, family_of_kernel, supporting_families
from ..families.tile import TileConfig, requested_tile
from ..families.tile_choice import choose_tile
from ..jit.spec import KernelSpec
from ..problem.attention import AttentionProblem
from ..problem.block_mask import MIXED, BlockMask, Intervals
from ..problem.checks import check_backward, check_forward, check_tile_states, problem_from_parts, with_band
from ..problem.decoding import check_decode
from ..problem.dtypes import ACCUMULATOR
from ..problem.features import EXAMPLE_ROWS, FEATURES, FeatureKeywords
from ..problem.function_checks import program_of
from ..problem.options import CallOptions
from ..problem.strides import AnyStrides, argument_layouts, contiguous_score_strides, feature_strides
from .decode import plan_decode
from .layout import StageLayout
from .plans import plan_backward, plan_forward, plan_gradient_tangents, plan_jvp, plan_merge, plan_tile_states

__all__ = [
    "OF_BACKWARD",
    "OF_TANGENTS",
    "decode_specs",
    "default_specs",
    "layout_of_kernel",
    "merge_spec",
    "second_order_specs",
]

_ROWS = EXAMPLE_ROWS
#: Features of the backward only: an array, and options.
OF_BACKWARD = ("dlse", "return_dbias", "return_dsink", "return_dscore_args")
#: Features of calls of second order only.
OF_TANGENTS = ("bias_tangent", "sink_tangent")
_NO_FUNCTIONS: FeatureKeywords = {}


def default_specs(
    device: DeviceInfo,
    dtype: str,
    head_dim: int,
    causal: bool,
    method: str | None = None,
    family: str | None = None,
    *,
    features: Sequence[str] = (),
    config: TileConfig | Mapping[str, TileConfig] | None = None,
    num_splits: int = 1,
    functions: FeatureKeywords = _NO_FUNCTIONS,
    head_dim_v: int | None = None,
) -> list[KernelSpec]:
    """The kernels of a forward, or those of a backward by one method.

    Parameters
    ----------
    device, dtype, head_dim, causal, method, family, config, num_splits
        Properties of the calls; all other options have their defaults. The kernels are the forward's if `method` is
        None.
    features : sequence of str, optional
        Features of the calls, all combined: names of `fa2cupy.problem.choices.CALL_KEYWORDS`, and
        ``"return_dscore_args"``. With a bias, the kernels are those for both of the dtypes that it may have, and with
        its gradient those for a full and a broadcast one.
    functions : mapping, optional
        Functions of the calls, and arrays like those that they will have: `score_mod`, `score_args`, `mask_mod`,
        `mask_args`. With ``"block_mask"`` among the features, the kernel that makes the map of `mask_mod` is among the
        kernels.
    head_dim_v : int, optional
        Columns of v if they differ.
    """
    call = "forward" if method is None else "backward"
    columns = head_dim, head_dim_v or head_dim
    head_dims = choose_family(call, dtype, device, family, columns=columns).head_dims(*columns)
    options = CallOptions(causal, config=config, family=family, method=method, num_splits=num_splits)
    specs: dict[KernelSpec, None] = {}
    plan_call = plan_backward if method else plan_forward
    problems = _problems(call, dtype, *head_dims, options, features, functions)
    for problem, strides in _of_lengths(call, method, device, config, problems):
        with contextlib.suppress(*([UnsupportedProblemError] if method == "one_tile" else [])):
            for choice in _choices(call, problem, device, strides, options):
                plan = plan_call(problem, device, strides, choice)
                specs.update(dict.fromkeys(stage.spec for stage in plan.stages))
    sparse = _maps(functions)[-1].layout if "block_mask" in features else None
    if sparse is not None and sparse.program is not None:
        problem = check_tile_states({"mask_args": (), **functions, "block_mask": sparse}).problem
        strides = {**argument_layouts(functions)}
        plan = plan_tile_states(problem, device, strides, choose("tile_states", problem, device, strides))
        specs.update(dict.fromkeys(stage.spec for stage in plan.stages))
    return list(specs)


def _choices(
    call: str, problem: AttentionProblem, device: DeviceInfo, strides: dict[str, AnyStrides], options: CallOptions
) -> Iterator[Choice]:
    """What is chosen for calls with a problem's features, which also depends on how many sequences share a bias."""
    if call == "backward" and problem.settings.sums_dbias:
        yield from _choices_of_dbias(problem, device, strides, options)
        return
    found = choices_with_copies(
        call, problem, device, lambda family: (family.padded(problem), strides), options, is_launched=False
    )
    yield from (choice for choice in found if choice is found[0] or options.method in IN_ONE_LAUNCH)
    if call == "forward":
        if not found[0].num_splits:  # calls that name no number of splits may have another tile
            yield dataclasses.replace(
                found[0], tiles={call: choose_tile(call, found[0].family, problem, device, options.config)}
            )
        for kept in kept_biases(found[0].family, problem, device, options):
            yield Choice(found[0].family, {call: kept.tile}, kept_keys=kept.keys)
    if options.method in (None, "single_pass"):
        of_grid = boxed(call, found[0].family, with_grid(problem), device, strides, options)
        if of_grid is not None:
            yield Choice(found[0].family, {call: of_grid.tile}, options.method, boxes=of_grid.boxes)


def _choices_of_dbias(
    problem: AttentionProblem, device: DeviceInfo, strides: dict[str, AnyStrides], options: CallOptions
) -> Iterator[Choice]:
    """All that may be chosen for backwards that sum the gradient of a bias."""
    ways = [options]
    if options.method == "two_pass" and not problem.settings.dscore_args:
        ways.append(options._replace(deterministic=True))
    for way in ways:
        for found in choices_with_copies(
            "backward", problem, device, lambda family: (family.padded(problem), strides), way, is_launched=False
        ):
            yield found
            if found.dbias is not None:
                yield dataclasses.replace(found, dbias=dataclasses.replace(found.dbias, num_splits=2))


def layout_of_kernel(
    kernel: Kernel,
    device: DeviceInfo,
    causal: bool,
    family: str | None = None,
    *,
    features: Sequence[str] = (),
    functions: FeatureKeywords = _NO_FUNCTIONS,
) -> StageLayout:
    """The layout of a call with a tiled kernel, which makes the kernel for any tile. A bias has the dtype of q.

    Other parameters are those of `default_specs`. The kernel's family and padded head dimensions are in the layout and
    its problem.
    """
    operation, dtype, head_dim, head_dim_v, _ = kernel
    call = "forward" if operation == "forward" else "backward"
    problem, strides = next(_problems(call, dtype, head_dim, head_dim_v, CallOptions(causal), features, functions))
    chosen = family_of_kernel(operation, dtype, device, family, tuple(problem.features), (head_dim, head_dim_v))
    problem = chosen.padded(problem)
    return StageLayout(problem, device, chosen, strides | problem.contiguous_strides())


def decode_specs(
    device: DeviceInfo,
    dtype: str,
    head_dim: int,
    head_dim_v: int | None = None,
    causal: bool = True,
    *,
    features: Sequence[str] = (),
) -> list[KernelSpec]:
    """The kernels of `fa2cupy.decode`, for all numbers of rows that query heads of a group and queries can make.

    They differ also between few sequences and many, and short and long ones. `features` are those that `decode` takes,
    all combined. Forwards with few queries have the same kernels.
    """
    specs: dict[KernelSpec, None] = {}
    family = choose_family("decode", dtype, device, columns=(head_dim, head_dim_v or head_dim))
    tiles = family.tiles["decode"]
    jobs = {1, *(math.ceil(row.least_jobs * device.multiprocessors) for row in tiles if row.least_jobs)}
    jobs |= {int(row.most_jobs * device.multiprocessors) + 1 for row in tiles if row.most_jobs < math.inf}
    clusters = {row.tile.cluster for row in tiles if row.tile.cluster > 1}
    jobs |= {device.resident_clusters(cluster) // 2 + 1 for cluster in clusters}  # from which on none is left over
    keys = {0, *(row.most_keys for row in tiles if row.most_keys < math.inf)}
    most_rows = max(32, *(row.tile.b_r for row in tiles))
    all_rows = [rows for rows in (1, 2, 4, 8, 16, 32, 64) if rows <= most_rows]
    for batch, most_keys, rows in itertools.product(sorted(jobs), sorted(keys), all_rows):
        length = max(_ROWS, int(most_keys * device.multiprocessors / batch) + 1)
        (keywords,) = _examples(features, dtype, {})
        q, k_cache = _array((batch, rows, 1, head_dim), dtype), _array((batch, length, 1, head_dim), dtype)
        v_cache = _array((batch, length, 1, head_dim_v or head_dim), dtype)
        arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": np.zeros(batch, "int32")}
        absent = dict.fromkeys(("k", "v", "block_table"))
        problem = check_decode({**arrays, **absent}, CallOptions(causal), keywords).problem
        strides: dict[str, AnyStrides] = dict.fromkeys(
            ("q", "k_cache", "v_cache", "k", "v", "o"), problem.kernel_strides(q.shape)
        )
        strides |= feature_strides(keywords)
        plan = plan_decode(problem, device, strides, choose("decode", problem, device, strides))
        specs[plan.stages[0].spec] = None
    return list(specs)


def second_order_specs(
    device: DeviceInfo,
    dtype: str,
    head_dim: int,
    causal: bool = False,
    family: str | None = None,
    *,
    features: Sequence[str] = (),
    functions: FeatureKeywords = _NO_FUNCTIONS,
    head_dim_v: int | None = None,
) -> list[KernelSpec]:
    """The kernels of `fa2cupy.jvp`, `backward_jvp` and `double_backward`.

    Parameters are those of `default_specs`. All of q, k and v have tangents, and dO has one in `backward_jvp`, which
    without it has the kernels of `double_backward`. The calls have no choice of a family: one of IEEE arithmetic stands
    for those whose lse needs not be computed again.
    """
    columns = head_dim, head_dim_v or head_dim
    head_dims = choose_family("jvp", dtype, device, family, columns=columns).head_dims(*columns)
    options = CallOptions(causal, family=family)
    moved: dict[str, Any] = {name: True for name in OF_TANGENTS if name in features}
    calls = (
        ("jvp", "qkv", plan_jvp),
        ("backward_jvp", "qkvo", plan_gradient_tangents),
        ("double_backward", "qkv", plan_gradient_tangents),
    )
    others = [name for name in features if name not in (*OF_TANGENTS, "return_dscore_args")]
    specs: dict[KernelSpec, None] = {}
    for problem, strides in _problems("backward", dtype, *head_dims, options, others, functions):
        strides |= {name: strides[name.removesuffix("_tangent")] for name in moved}
        for call, tangents, plan_call in calls:
            settings = dataclasses.replace(problem.settings, **moved, tangents=tangents)
            problem = problem.with_settings(settings)
            choice = choose(call, problem, device, strides, options, is_launched=False)
            plan = plan_call(problem, device, strides, choice)
            specs.update(dict.fromkeys(stage.spec for stage in plan.stages))
    return list(specs)


def merge_spec(device: DeviceInfo, dtype: str, head_dim: int) -> KernelSpec:
    """The kernel of `fa2cupy.merge`."""
    parts = _array((1, 1, 1, 1, head_dim), dtype)
    problem = problem_from_parts(parts, np.zeros((1, 1, 1, 1), ACCUMULATOR[dtype]))
    strides: dict[str, AnyStrides] = dict.fromkeys(("o_parts", "o"), problem.kernel_strides(problem.q_shape))
    choice = choose("merge", problem, device, strides, is_launched=False)
    return plan_merge(problem, device, strides, choice, 1, head_dim).stages[0].spec


def _problems(
    call: str,
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    options: CallOptions,
    features: Sequence[str],
    functions: FeatureKeywords,
) -> Iterator[tuple[AttentionProblem, dict[str, AnyStrides]]]:
    """Small calls with these features, and the strides of their arrays, for each kind of bias."""
    returned: dict[str, Any] = {name: True for name in OF_BACKWARD if name != "dlse" and name in features}
    options = options._replace(**returned)
    for keywords in _examples(features, dtype, functions):
        rows = (_ROWS, 1) if "cu_seqlens_q" in keywords else (1, _ROWS, 1)
        q, v = _array((*rows, head_dim), dtype), _array((*rows, head_dim_v), dtype)
        lse = _array((1, _ROWS) if "cu_seqlens_q" in keywords else (1, 1, _ROWS), ACCUMULATOR[dtype])
        arrays = {"q": q, "k": q, "v": v, "o": v, "do": v, "lse": lse}
        arrays |= {"dlse": lse} if "dlse" in features else {}
        problem = (check_forward if call == "forward" else check_backward)(arrays, options, keywords).problem
        strides: dict[str, AnyStrides] = {**problem.contiguous_strides()}
        strides |= feature_strides(keywords) | argument_layouts(functions)
        if problem.settings.dbias:
            strides["dbias"] = contiguous_score_strides((_ROWS, _ROWS))  # not all kernels take a broadcast row
        yield problem, strides
        of_keyword = with_band(problem, any_lengths=True)
        if of_keyword is not problem:
            yield of_keyword, strides


def _of_one_tile(
    device: DeviceInfo, problem: AttentionProblem, strides: dict[str, AnyStrides], config: object
) -> Iterator[tuple[AttentionProblem, dict[str, AnyStrides]]]:
    """Problems with as many keys as each of the tiles of ``one_tile`` has; with a dbias also of more queries."""
    families = supporting_families("backward", problem.dtype, device, None, problem.features)
    requested = requested_tile(ONE_TILE[0], config)
    tiles = [row.tile for family in families for name in ONE_TILE for row in family.tiles.get(name, ())]
    most = max((tile.b_r for tile in tiles), default=0)
    for keys in dict.fromkeys(tile.b_c for tile in ([requested] if requested else tiles)):
        for queries in (keys, most + 1) if problem.settings.sums_dbias else (keys,):
            yield dataclasses.replace(problem, seqlen_q=queries, seqlen_k=keys), strides


def _of_lengths(
    call: str,
    method: str | None,
    device: DeviceInfo,
    config: object,
    problems: Iterable[tuple[AttentionProblem, dict[str, AnyStrides]]],
) -> Iterator[tuple[AttentionProblem, dict[str, AnyStrides]]]:
    """The problems, and the same of other lengths where kernels have other tiles for them."""
    for problem, strides in problems:
        if method == "one_tile":
            yield from _of_one_tile(device, problem, strides, config)
            continue
        yield problem, strides
        if problem.is_packed or problem.settings.block_mask is not None:
            continue
        operations = tuple(itertools.chain(*METHODS.values())) if call == "backward" else (call,)
        operations += ("dbias",) if problem.settings.sums_dbias else ()
        for family in supporting_families(call, problem.dtype, device, None, problem.features):
            lengths: set[tuple[int, int]] = set()
            for row, following in itertools.chain(*(itertools.pairwise(family.tiles.get(x, ())) for x in operations)):
                lengths.update((tile.b_r, tile.b_c) for tile in (row.tile, following.tile) if row.least_saving)
                if row.most_seqlen_k < math.inf:  # the examples have fewer
                    lengths.add((_ROWS, int(row.most_seqlen_k) + 1))
            for rows, keys in sorted(lengths):
                yield dataclasses.replace(problem, seqlen_q=rows, seqlen_k=keys), strides


def _examples(features: Sequence[str], dtype: str, functions: FeatureKeywords) -> Iterator[FeatureKeywords]:
    """Keywords of calls with these features, for each kind of bias and map. Kernels do not depend on their values."""
    wide = ACCUMULATOR[dtype]
    dtypes = {"input": dtype, "input_accum": wide, "input_bool": "bool", "input_int": "int32"}
    keywords: Any = {**functions}
    for feature in (FEATURES[name] for name in features if name in FEATURES):
        for name, value in (feature.example or {}).items():
            array = feature.arrays.get(name)
            keywords[name] = value if array is None else _array(value, dtypes[array.kind])
    of_map: list[Any] = [{"block_mask": made} for made in _maps(functions)] if "block_mask" in features else [{}]
    of_bias: list[Any] = [{}]
    if "bias" in features:
        shapes = ((1, 1), (_ROWS, _ROWS)) if "return_dbias" in features else ((1, 1),)
        kinds = itertools.product(dict.fromkeys((dtype, wide)), shapes)
        of_bias = [{"bias": _array(shape, bias_dtype)} for bias_dtype, shape in kinds]
    for bias, made in itertools.product(of_bias, of_map):
        yield {**keywords, **bias, **made}


def _maps(functions: FeatureKeywords) -> list[BlockMask]:
    """Sparse maps of one tile: of the mask function, without intervals and with them, or given if there is none."""
    given = functions.get("mask_mod")
    if given is None:
        return [BlockMask(np.ones((1, 1, 1, 1), "bool"), _ROWS, _ROWS, tile=(_ROWS, _ROWS))]
    program = program_of("mask_mod", given, functions.get("mask_args", ()))
    states, side = np.full((1, 1, 1, 1), MIXED, "uint8"), np.zeros((1, 1, _ROWS, 4), "int32")
    made = functools.partial(BlockMask.of_states, states, _ROWS, _ROWS, (_ROWS, _ROWS), program)
    return [made(), made(intervals=Intervals(side, side))]


def _array(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.zeros(shape, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
