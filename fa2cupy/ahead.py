"""Compilation of kernels ahead of the calls that use them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from .errors import UnsupportedProblemError
from .families.device import DeviceInfo, current_device
from .families.operations import METHODS, OPERATIONS
from .families.registry import choose_family
from .families.simt import SIMT
from .families.tile import TileConfig, has_tile_of
from .jit.cache import cached_kernels
from .jit.compiler import CompiledKernel
from .jit.spec import KernelSpec
from .plan.ranks import specs_of_ranks
from .plan.specs import OF_BACKWARD, OF_TANGENTS, decode_specs, default_specs, merge_spec, second_order_specs
from .problem.arguments import check_bool
from .problem.array_types import AnyArray
from .problem.attention import MAX_HEAD_DIM, MAX_KEY_COLUMNS
from .problem.choices import check_dtype, check_head_dim, check_jobs, check_method, feature_combinations, one_or_many
from .problem.dtypes import ACCUMULATOR
from .problem.feature_checks import extra_gradients
from .problem.features import FeatureKeywords
from .problem.keywords import NoKeywords, check_keywords, takes
from .problem.names import Method
from .problem.options import METHOD_NAMES
from .system.progress import progress as progress_bar

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["precompile"]


@takes(NoKeywords)
def precompile(
    archs: str | Iterable[str] | None = None,
    *,
    dtypes: npt.DTypeLike | Iterable[npt.DTypeLike] = ("float16", "bfloat16"),
    head_dims: int | Iterable[int] = (64, 128),
    causal: bool | Iterable[bool] = (False, True),
    methods: Method | Iterable[Method] = METHOD_NAMES,
    features: str | Iterable[str] | Iterable[Iterable[str]] = (),
    score_mod: Callable[..., Any] | None = None,
    score_args: Sequence[AnyArray] = (),
    mask_mod: Callable[..., Any] | None = None,
    mask_args: Sequence[AnyArray] = (),
    return_dscore_args: bool = False,
    head_dim_v: int | None = None,
    config: TileConfig | Mapping[str, TileConfig] | None = None,
    family: str | None = None,
    decode: bool = True,
    second_order: bool = False,
    distributed: bool = False,
    jobs: int | None = None,
    progress: bool = False,
    **unknown: Unpack[NoKeywords],
) -> list[CompiledKernel]:
    """Compiles the kernels of calls into the disk cache, so that the calls need not wait for them. Needs no GPU.

    Parameters
    ----------
    archs : str or iterable of str, optional
        Architectures such as ``["sm_80", "sm_90"]``; by default that of the current device.
    dtypes, head_dims, causal, methods : optional
        One value or several each. The calls are the forward, the backward with each method, `decode` and `merge`, for
        every combination; ``methods=()`` leaves the backward out. Of several methods, those are left out that do not
        take a combination, such as ``"single_pass"`` beyond 256 columns of 16 bits, and ``"one_tile"`` always is. A
        head_dim of 513 to 576 has kernels of `decode` and `merge` alone, with `head_dim_v`.
    features : str, iterable of str, or iterable of those, optional
        Features of the calls, by keyword. ``("window", "softcap")`` are calls that have both;
        ``[(), ("window",), ("window", "sink")]`` are three kinds of calls, the first without features. The names are
        the keywords of `forward`, ``"cu_seqlens"`` for packed sequences, ``"dlse"``, ``"return_dbias"`` and
        ``"return_dsink"`` of `backward`, and ``"bias_tangent"`` and ``"sink_tangent"`` of `jvp`, which are the
        cotangents of `double_backward`, too. Kernels do not depend on the features' values. ``"block_mask"`` is a map
        of `mask_mod`, with intervals or without, or without that function one that the caller gives directly.
    score_mod, mask_mod : callable, optional
        Functions that all the calls have, as for `forward`: their kernels depend on what the functions compute.
    score_args, mask_args : sequence of numpy.ndarray, optional
        Arrays like those of the calls. Only dtypes and numbers of axes matter, and lengths of vectors that are summed.
    return_dscore_args : bool, optional
        True if the backward returns the gradients of `score_args`.
    head_dim_v : int, optional
        Columns of v if they differ from head_dim.
    config : TileConfig, or dict of TileConfig by operation, optional
        Tiles instead of the default ones, as for `forward` and `backward`.
    family : str, optional
        As for `forward`.
    decode : bool, optional
        False leaves out the kernels of `decode` and `merge`, as for training. Forwards of a few queries then wait for a
        compiler, too: they have the kernels of `decode`. There are two to six of these for each dtype, head_dim, mask
        and combination of features, and none for features that `decode` does not have, functions, `config` or `family`.
    second_order : bool, optional
        True adds the kernels of `jvp`, `backward_jvp` and `double_backward`. These calls have neither `config` nor
        `family`. Kernels of 16 bits on Hopper depend on which tangents a call has: the calls are those with all of q, k
        and v, with and without that of do.
    distributed : bool, optional
        True adds the kernels between the calls of several ranks: they copy matrices, and sum arrays of these dtypes and
        of that of lse.
    jobs : int, optional
        Number of kernels that are compiled at a time; one per CPU by default.
    progress : bool, optional
        Shows a progress bar on stderr.

    Returns
    -------
    list of CompiledKernel
        The kernels, with their registers, spills and compile times.

    Raises
    ------
    TypeError, ValueError
        An argument is not as described above, or `config` is not legal.
    UnsupportedProblemError
        An architecture is unknown, or has no kernel for a dtype or head_dim, by none of the methods.
    KernelCompileError
        NVRTC is missing, or refused a kernel.
    RuntimeError
        There is no device, and `archs` does not name any.

    Notes
    -----
    Kernels do not depend on lengths, numbers of heads or values, nor on `num_splits`, pages or appended rows, so that
    these kernels serve all such calls, with one exception: on Hopper, 16-bit calls with a ``softmax_scale`` below 1e-30
    or strides that are not positive, or without cuda-bindings, take the kernels of ``family="sm80"``. Calls with a bias
    in either of its dtypes are covered. Not covered are calls with several leading axes where a bias, a mask or slopes
    have some of these axes, so that no single stride leads from one sequence to the next: the first such call compiles.

    Examples
    --------
    >>> from fa2cupy import TileConfig
    >>> tile = TileConfig(b_r=64, b_c=64, num_warps=4)
    >>> one = {"dtypes": "float16", "head_dims": 64, "causal": True, "methods": ()}
    >>> kernel, *split = precompile("sm_80", **one, config=tile)  # doctest: +SKIP
    >>> kernel.registers, kernel.spill_bytes  # doctest: +SKIP
    (143, 0)
    """
    check_keywords("fa2cupy.precompile", unknown)
    here = archs is None
    devices = [current_device("archs='sm_90'")] if here else [DeviceInfo.named(arch) for arch in one_or_many(archs)]
    dtypes = [check_dtype(dtype) for dtype in one_or_many(dtypes)]
    columns_v = None if head_dim_v is None else check_head_dim(head_dim_v, "head_dim_v")
    with_decode = decode and config is None and family is None
    all_head_dims = _checked_head_dims(head_dims, columns_v, with_decode)
    head_dims = [head_dim for head_dim in all_head_dims if head_dim <= MAX_HEAD_DIM]
    masks, passes = one_or_many(causal), _passes(methods, config)
    for masked in masks:
        check_bool("causal", masked)
    check_bool("decode", decode)
    check_bool("second_order", second_order)
    check_bool("distributed", distributed)
    combinations, jobs = feature_combinations(features), check_jobs(jobs)
    functions: FeatureKeywords = {
        "score_mod": score_mod, "score_args": score_args, "mask_mod": mask_mod, "mask_args": mask_args
    }  # fmt: skip
    if extra_gradients(functions, False, False, return_dscore_args):
        combinations = [(*names, "return_dscore_args") for names in combinations]
    specs: dict[KernelSpec, None] = {}
    for device, dtype, head_dim, masked, names in itertools.product(devices, dtypes, head_dims, masks, combinations):
        how: dict[str, Any] = {"features": names, "config": config, "functions": functions, "head_dim_v": columns_v}
        specs |= dict.fromkeys(_of_passes(passes, device, dtype, head_dim, masked, family, **how))
    if with_decode:
        for kind in itertools.product(devices, dtypes, all_head_dims, masks):
            for names in combinations:
                specs |= dict.fromkeys(_of_few_queries(*kind, names, functions, columns_v))
        for device, dtype, columns in itertools.product(devices, dtypes, [columns_v] if columns_v else all_head_dims):
            specs[merge_spec(device, dtype, columns)] = None
    if second_order:
        kinds = itertools.product(devices, dtypes, head_dims, masks)
        specs |= dict.fromkeys(_of_second_order(kinds, combinations, functions, columns_v))
    specs |= dict.fromkeys(_of_ranks(devices if distributed else (), dtypes))
    jobs = jobs or os.cpu_count() or 1
    if not progress:
        return cached_kernels(list(specs), jobs)
    with progress_bar(len(specs), "compiling") as bar:
        return cached_kernels(list(specs), jobs, bar.update)


def _checked_head_dims(head_dims: Any, columns_v: int | None, with_decode: bool) -> list[int]:
    """The head_dims; those that only `decode` takes need a head_dim of v."""
    found = [check_head_dim(one, "head_dims", MAX_KEY_COLUMNS) for one in one_or_many(head_dims)]
    for one in found:
        if one > MAX_HEAD_DIM and not (with_decode and columns_v):
            raise UnsupportedProblemError(
                f"head_dims: up to {MAX_HEAD_DIM} is supported, and up to {MAX_KEY_COLUMNS} for decode of latent "
                f"attention, with head_dim_v={MAX_HEAD_DIM} or less, got {one}"
            )
    return found


def _of_passes(
    passes: Sequence[str | None],
    device: DeviceInfo,
    dtype: str,
    head_dim: int,
    causal: bool,
    family: str | None,
    **how: Any,
) -> list[KernelSpec]:
    """The kernels of the forward, and of backwards by the methods that take them, one at least.

    `how` has keywords of `default_specs`.
    """
    specs: list[KernelSpec] = []
    refusals: dict[str | None, UnsupportedProblemError] = {}
    for method in passes:
        try:
            for one in _families(device, dtype, method, family):
                for num_splits in _numbers_of_splits(device, dtype, method, one):
                    call = (device, dtype, head_dim, causal, method, one)
                    specs += default_specs(*call, num_splits=num_splits, **how)
        except UnsupportedProblemError as error:
            refusals[method] = error
    if refusals and (None in refusals or set(refusals) == set(passes) - {None, "one_tile"}):
        raise next(iter(refusals.values()))
    return specs


def _passes(methods: Any, config: object) -> list[str | None]:
    """The forward, None, and the methods of the backward; calls with tiles of others do not have ``one_tile``."""
    passes = [None, *map(check_method, one_or_many(methods))]
    if config is None or has_tile_of("one_tile", config):
        return passes
    return [method for method in passes if method != "one_tile"]


def _families(device: DeviceInfo, dtype: str, method: str | None, family: str | None) -> list[str | None]:
    """The families to compile for: short calls have IEEE arithmetic where longer ones multiply parts by default."""
    chosen = choose_family("backward" if method else "forward", dtype, device, family)
    return [family, SIMT.name] if family is None and chosen.multiplies_parts else [family]


def _of_few_queries(
    device: DeviceInfo,
    dtype: str,
    head_dim: int,
    causal: bool,
    names: tuple[str, ...],
    functions: FeatureKeywords,
    head_dim_v: int | None,
) -> list[KernelSpec]:
    """The kernels of `decode` with these features, none if it does not have them all or no tile fits the device."""
    features = [name for name in names if name not in (*OF_BACKWARD, *OF_TANGENTS)]
    known = OPERATIONS["decode"].features
    if not set(features) <= set(known) or any(functions.get(name) for name in ("score_mod", "mask_mod")):
        return []
    head_dims = choose_family("decode", dtype, device).head_dims(head_dim, head_dim_v or head_dim)
    try:
        return decode_specs(device, dtype, *head_dims, causal, features=features)
    except UnsupportedProblemError:
        if head_dim > MAX_HEAD_DIM:  # there are no others
            raise
        return []


def _of_second_order(
    kinds: Iterable[tuple[DeviceInfo, str, int, bool]],
    combinations: Sequence[tuple[str, ...]],
    functions: FeatureKeywords,
    head_dim_v: int | None,
) -> Iterator[KernelSpec]:
    """Yields the kernels of `jvp`, `backward_jvp` and `double_backward`."""
    for device, dtype, head_dim, causal in kinds:
        for names, family in itertools.product(combinations, _families(device, dtype, None, None)):
            call = (device, dtype, head_dim, causal, family)
            yield from second_order_specs(*call, features=names, functions=functions, head_dim_v=head_dim_v)


def _of_ranks(devices: Iterable[DeviceInfo], dtypes: Iterable[Any]) -> Iterator[KernelSpec]:
    """Yields the kernels between the calls of several ranks. Gradients of features may have the dtype of lse."""
    for device in devices:
        yield from specs_of_ranks(device.arch, dict.fromkeys((*dtypes, *[ACCUMULATOR[dtype] for dtype in dtypes])))


def _numbers_of_splits(device: DeviceInfo, dtype: str, method: str | None, family: str | None) -> tuple[int, ...]:
    """One, and two if the call has other kernels for them; these serve any larger number."""
    operations = METHODS[method] if method else ("forward",)
    chosen = choose_family("backward" if method else "forward", dtype, device, family)
    return (1,) if set(operations).isdisjoint(chosen.split_operations) else (1, 2)
