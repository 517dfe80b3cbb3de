"""Checks a call and agrees on it with the other ranks.

The checks are those of one call on the whole sequence: they run on shadows, arrays of the whole shapes without memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...families.choice import check_on_any_gpu
from ...families.tile import requested_tile
from ...numerics.arrays import is_on_host
from ...problem.arguments import OverlapCheck, array_backend, check_outputs, output_name, unpack_out
from ...problem.array_types import Array
from ...problem.attention import SOURCE_AXES, AttentionProblem
from ...problem.block_mask import BlockMask
from ...problem.checks import Request as WholeRequest
from ...problem.checks import Result, check_backward, check_forward, sizes_of
from ...problem.feature_checks import extra_gradients, is_seed
from ...problem.features import ARRAYS, feature_arrays
from ...problem.function_checks import function_arrays, program_of
from ...problem.options import CallOptions, requested_method
from ...problem.tangents import check_backward_jvp, check_double_backward, check_jvp, check_output_jvp
from ..communicator import Communicator, Stage
from .agreement import agree
from .choice import check_scheme, check_second_order, groups_of, ranks_with_heads, scheme_of
from .orders import RowOrder, check_order, divisor
from .parts import OVER_SCORES
from .second_order import CALLS, direction_of, tangents_of_features
from .splits import with_splits_of_whole

__all__ = ["OF_FEATURES", "OF_KEYS", "STATISTICS", "CallArguments", "Request", "checked"]

_CHECKED_EACH_TIME = frozenset(("score_mod", "score_args", "mask_mod", "mask_args", "block_mask"))
_MAX_REQUESTS = 4096
#: The arguments and results with a number for each row of queries, and those with rows of keys.
STATISTICS = frozenset(("lse", "delta", "dlse", "lset", "dlset", "gdlse"))
OF_KEYS = frozenset(("k", "v", "kt", "vt", "gdk", "gdv", "dk", "dv", "dkt", "dvt", "gk", "gv"))
#: The results that are no rows but shares of gradients of features, and these features. So are those of `score_args`.
OF_FEATURES = {
    **dict.fromkeys(("dbias", "dbiast", "gbias"), "bias"),
    **dict.fromkeys(("dsink", "dsinkt", "gsink"), "sink"),
}
_CHECKS: Mapping[str, Any] = {
    "forward": check_forward,
    "backward": check_backward,
    "jvp": check_jvp,
    "output_jvp": check_output_jvp,
    "backward_jvp": check_backward_jvp,
    "double_backward": check_double_backward,
}


@dataclass(frozen=True)
class CallArguments:
    """The arguments of a call on one rank.

    Attributes
    ----------
    call : {"forward", "backward", "jvp", "output_jvp", "backward_jvp", "double_backward"}
    arrays : dict of ndarray
        q, k, v, and the other arrays that are no keywords of features, by the arguments' names. Some may be None.
    out : tuple of (ndarray or None), or None
    options : CallOptions
    keywords : dict
        The keywords of features that are not None.
    scheme, order, head_groups
        As for `fa2cupy.distributed.forward`.
    """

    call: str
    arrays: Mapping[str, Any]
    out: Any
    options: CallOptions
    keywords: Mapping[str, Any]
    scheme: str | None = None
    order: str = "zigzag"
    head_groups: int | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The arrays that are not None, those of features included."""
        own = {name: array for name, array in self.arrays.items() if array is not None}
        if not self.keywords:  # most calls have no features
            return own
        return own | feature_arrays(self.keywords) | function_arrays(self.keywords)

    @property
    def features(self) -> dict[str, Any]:
        """The keywords of features, and their tangents."""
        return {**self.keywords, **tangents_of_features(self.call, self.arrays)}


@dataclass(frozen=True)
class Request:
    """A call that all ranks agree on.

    Attributes
    ----------
    problem : AttentionProblem
        The problem of the whole sequence, with the axes of the caller's arrays.
    results : tuple of Result
        The results of this rank.
    scheme : {"heads", "gather", "hybrid"}
    queries, keys : RowOrder
        The ranks' rows of q and of k.
    head_groups : int or None
        The caller's number of groups.
    groups : tuple of int
        K/V heads of each group of a rank. Groups are computed one after the other.
    options : CallOptions
        Those of the calls of parts.
    keywords : dict
        The keywords of features that are not None, and tangents of features; empty in the request of a signature.
    query_groups : tuple of slice
        The query heads of each group of a forward of ``"heads"``, if they are not those of `groups`.
    number : int
        Stands for all that the ranks agree on, from 1 to 2**32 - 1.
    signature : object
        Stands for all that another call must have in common with this one to be queued like it, and is equal to itself
        alone; None if each call is checked anew.
    """

    problem: AttentionProblem
    results: tuple[Result, ...]
    scheme: str
    queries: RowOrder
    keys: RowOrder
    head_groups: int | None
    groups: tuple[int, ...]
    options: CallOptions
    keywords: Mapping[str, Any]
    query_groups: tuple[slice, ...] = ()
    number: int = 1
    signature: object = None

    @property
    def with_rows(self) -> int:
        """The number of results that have rows of queries or keys. Those of features are behind them."""
        names = [result.name for result in self.results]
        return next((i for i, name in enumerate(names) if name in OF_FEATURES or "_args" in name), len(names))


def checked(comm: Communicator, arguments: CallArguments) -> Request:
    """The request of a call.

    Raises
    ------
    TypeError, ValueError, UnsupportedProblemError
        The arguments do not fit each other, or those of other ranks.
    """
    signature = _signature(arguments)
    try:
        known = None if signature is None else comm.requests.get(signature)
    except TypeError:  # an option that cannot be hashed is not legal: the checks will report it
        known = signature = None
    if known is not None:
        if arguments.out is not None:
            _check_overlap(
                arguments, known.results, unpack_out(arguments.out, tuple(one.name for one in known.results))
            )
        comm.stage = Stage.TOGETHER
        return known
    array_backend(arguments.given, rows=ARRAYS)
    request = _request(comm, arguments)
    description = _description(arguments) | {"ranks_per_host": str(comm.ranks_per_host)}
    request = replace(request, number=agree(comm, arguments.arrays["q"], description))
    if signature is not None:
        if len(comm.requests) >= _MAX_REQUESTS:
            comm.requests.clear()
        request = comm.requests[signature] = replace(request, keywords={}, signature=object())
    return request


def _signature(arguments: CallArguments) -> Hashable:
    """All that a call depends on, but for overlaps; None for calls that are checked each time.

    These are calls on NumPy arrays, whose ranks wait for each other anyway, and those with functions or sparse maps.
    """
    if is_on_host(arguments.arrays["q"]) or not _CHECKED_EACH_TIME.isdisjoint(arguments.keywords):
        return None
    out = () if arguments.out is None else arguments.out
    if not isinstance(out, tuple):
        return None
    values = {**arguments.arrays, **arguments.keywords}
    if is_seed(values.get("seed")):
        values["seed"] = 0  # no check depends on which
    how = (arguments.call, arguments.options, arguments.scheme, arguments.order, repr(arguments.head_groups))
    return (*how, *map(_kind, out), *values, *map(_kind, values.values()))


def _kind(value: Any) -> Hashable:
    """What a call depends on in an argument. Texts distinguish True, 1 and 1.0, which are equal."""
    if value is None:
        return None
    if hasattr(value, "dtype") and not isinstance(value, np.generic):
        memory: Any = getattr(value, "data", None)  # arrays of other libraries may have none; they are refused later
        place = (memory.device_id, memory.ptr & 15) if hasattr(memory, "device_id") else ()
        return type(value), value.shape, value.dtype, getattr(value, "strides", None), *place
    return repr(value)


def _request(comm: Communicator, arguments: CallArguments) -> Request:
    options, arrays = arguments.options, arguments.arrays
    order = check_order(arguments.order)
    requested_method(options.method, options.deterministic)
    requested_tile("forward", options.config)
    shadows, rows = _shadows(comm.size, order, arguments)
    keywords = _whole_keywords(arguments, shadows)
    whole = _whole_request(arguments, shadows, keywords, comm.size)
    problem = whole.problem
    check_on_any_gpu(arguments.call, problem, options)
    queries, keys = (RowOrder(order, comm.size, rows[name] * comm.size) for name in ("q", "k"))
    results = _own_results(whole.results, arguments)
    given = unpack_out(arguments.out, tuple(result.name for result in results))
    check_outputs(results, given)
    _check_overlap(arguments, results, given)
    if arguments.call in CALLS:
        scheme = check_second_order(arguments.call, arguments.scheme, problem, comm.size)
    else:
        scheme = scheme_of(arguments.scheme, problem, comm.size, comm.ranks_per_host)
    ranks = ranks_with_heads(scheme, comm.size, comm.ranks_per_host)
    check_scheme(scheme, problem, queries, ranks, on_gpu=not is_on_host(arrays["q"]))
    request = Request(problem, results, scheme, queries, keys, arguments.head_groups, (), options, arguments.features)
    has_gradients = len(results) > request.with_rows
    groups = groups_of(scheme, problem, ranks, arguments.head_groups, has_gradients)
    if not is_on_host(arrays["q"]) and arguments.call not in CALLS:
        options = with_splits_of_whole(arguments.call, problem, options, scheme, keywords)
    return replace(request, groups=groups, options=options)


def _shadows(size: int, order: str, arguments: CallArguments) -> tuple[dict[str, Any], dict[str, int]]:
    """Arrays of the whole shapes without memory, by name, and the rows that a rank has of q and k."""
    layout = arguments.options.layout
    shadows: dict[str, Any] = {}
    rows: dict[str, int] = {}
    is_packed = arguments.keywords.get("cu_seqlens_q") is not None
    direction = dict(zip(CALLS.get(arguments.call, ())[3:], ("bias", "sink"), strict=False))
    for name, array in arguments.arrays.items():
        if array is None:
            continue
        shape = list(array.shape)
        if name in direction:
            continue
        if name in STATISTICS:
            axis = array.ndim - 1
        else:
            sizes_of(name, array, layout)
            if array.ndim > 4:
                raise ValueError(
                    f"{name}: expected up to 4 axes on several ranks, got shape {array.shape}; reshape the axes in "
                    "front of those of a sequence to one"
                )
            axis = SOURCE_AXES[layout, array.ndim > 2][0]
        if array.ndim:
            length = shape[axis]
            step = divisor(order, size) // size
            if length % step:
                multiple = divisor(order, size)
                raise ValueError(
                    f"{name}: expected an even number of rows on each rank, for the two chunks of zigzag order, got "
                    f"{length}; pad the whole sequence to a multiple of {multiple}, that is to "
                    f"{-(-length * size // multiple) * multiple} rows, with fa2cupy.distributed.pad"
                )
            rows.setdefault(name, length)
            shape[axis] = length * size
        shadows[name] = _shadow(tuple(shape), array.dtype)
    of_features = {name: arguments.arrays[name] for name in direction if arguments.arrays[name] is not None}
    for name, array in (feature_arrays(arguments.keywords) | of_features).items():
        shape = list(array.shape)
        if direction.get(name, name) in OVER_SCORES and not is_packed and array.ndim > 1:
            shape[-2] = _whole_rows(name, array, rows["q"], size)
        shadows[name] = _shadow(tuple(shape), array.dtype)
    return shadows, rows


def _whole_rows(name: str, array: Array, rows: int, size: int) -> int:
    """The queries of an array over the scores on all ranks together; 1 if it is the same for all queries."""
    own = array.shape[-2]
    if size == 1 or own == 1 != rows:
        return own
    if rows == 1:
        raise ValueError(f"{name}: it needs at least 2 rows of q on each rank, got 1")
    if own != rows:
        raise ValueError(
            f"{name}: expected {rows} queries, those of this rank, or 1 for all of them, got shape {array.shape}; "
            f"fa2cupy.distributed.shard(comm, {name}, axis={array.ndim - 2}) takes them from the whole array"
        )
    return own * size


def _shadow(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.broadcast_to(np.zeros((), dtype), shape)


def _whole_keywords(arguments: CallArguments, shadows: Mapping[str, Any]) -> dict[str, Any]:
    keywords: dict[str, Any] = {name: shadows.get(name, value) for name, value in arguments.keywords.items()}
    for name in ("score_args", "mask_args"):
        if name in keywords and isinstance(keywords[name], tuple | list):
            keywords[name] = tuple(_shadow(array.shape, array.dtype) for array in keywords[name])
    if isinstance(keywords.get("block_mask"), BlockMask):
        keywords["block_mask"] = keywords["block_mask"].layout
    return keywords


def _whole_request(
    arguments: CallArguments, shadows: Mapping[str, Any], keywords: Mapping[str, Any], size: int
) -> WholeRequest:
    direction = (direction_of(arguments.call, shadows),) if arguments.call in CALLS else ()
    try:
        return _CHECKS[arguments.call](shadows, *direction, arguments.options, keywords)
    except ValueError as error:
        if size == 1:
            raise
        raise ValueError(f"{error} (shapes are those of the whole sequence: all {size} ranks together)") from error


def _own_results(results: tuple[Result, ...], arguments: CallArguments) -> tuple[Result, ...]:
    """The same results with the shapes that they have on this rank."""
    arrays, options = arguments.arrays, arguments.options
    q, v = arrays["q"], arrays["v"]
    batch, rows, heads, _ = sizes_of("q", q, options.layout)
    shapes = dict.fromkeys(("o", "ot", "gdo"), (*q.shape[:-1], v.shape[-1]))
    shapes |= dict.fromkeys(("lse", "lset", "gdlse"), (batch, heads, rows)[4 - q.ndim :])
    for source in ("q", "k", "v"):
        shapes |= dict.fromkeys((f"d{source}", f"d{source}t", f"g{source}"), arrays[source].shape)
    extra = extra_gradients(arguments.keywords, options.return_dbias, options.return_dsink, options.return_dscore_args)
    shapes |= {name: array.shape for name, array in extra.items()}
    shapes |= {name: arguments.keywords[of].shape for name, of in OF_FEATURES.items() if f"d{of}" in extra}
    return tuple(result._replace(shape=tuple(shapes[result.name])) for result in results)


def _check_overlap(arguments: CallArguments, results: tuple[Result, ...], given: tuple[Any, ...]) -> None:
    """Raises unless the caller's result arrays are of q's library and overlap neither inputs nor each other."""
    inputs = arguments.given
    written = {output_name(one.name): array for one, array in zip(results, given, strict=True) if array is not None}
    array_backend(inputs, written)
    arrays = {**inputs, **written}
    layouts = [(name, array.shape, array.strides, array.itemsize) for name, array in arrays.items()]
    check = OverlapCheck(layouts, range(len(inputs), len(arrays)))
    check([_address(array) for array in arrays.values()])


def _address(array: Any) -> int:
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def _description(arguments: CallArguments) -> dict[str, str]:
    """What each argument is. All ranks must have the same."""
    options = arguments.options._asdict()
    options["config"] = str(options["config"])
    found = {"call": arguments.call, "scheme": str(arguments.scheme), "order": arguments.order}
    found["head_groups"] = str(arguments.head_groups)
    found |= {name: repr(value) for name, value in options.items()}
    found |= {name: f"shape {array.shape}, dtype {array.dtype}" for name, array in arguments.given.items()}
    for name, value in arguments.keywords.items():
        if name in ("score_mod", "mask_mod"):
            found[name] = repr(program_of(name, value, arguments.keywords.get(name.replace("mod", "args"), ())))
        elif isinstance(value, BlockMask):
            found[name] = repr(value.layout)
        elif name not in found and name not in ("score_args", "mask_args"):
            found[name] = repr(value)
    if not is_on_host(arguments.arrays["q"]):
        # A new seed in each step would be a new description, whose comparison synchronises with the GPU.
        found.pop("seed", None)
    return found
