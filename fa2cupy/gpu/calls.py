"""Calls on CuPy arrays: what they are prepared from, and how. ``signatures.py`` prepares each kind once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import cupy
import numpy as np

from ..plan import tensor_maps as tma
from ..problem.arguments import check_outputs, unpack_out
from ..families.device import DeviceInfo
from .device_memory import temporaries
from ..errors import INSTALL_CUDA, UnsupportedProblemError
from ..families.choice import OPERATIONS_OF, Family, choose_family, choose_method, method_of_dbias
from ..problem.feature_checks import extra_gradients, split_features
from ..problem.features import OFFSETS
from ..plan.calls import plan_backward, plan_delta, plan_forward
from ..plan.planner import Strides, why_not_sm90
from .prepared import AdaptedCall, Arguments, KernelCall, Outputs, takes_rows
from ..problem.attention import AttentionProblem
from ..problem.score_strides import contiguous_score_strides, feature_strides
from .signatures import call, hashable

__all__ = ["backward", "delta", "forward"]

_FORWARD = Arguments(("q", "k", "v"), (), ("o", "lse"))
_DELTA = Arguments(("o", "do"), (), ("delta",))
_DBIAS_SUM = "dbias_accum"
_SOURCES = {"dbias": "bias", _DBIAS_SUM: "bias", "dsink": "sink"}
_BACKWARD = Arguments(("q", "k", "v", "o", "lse", "do", "delta"), ("delta",), ("dq", "dk", "dv"))


def forward(q, k, v, causal, softmax_scale, layout, out, config, family, features=None):
    """`fa2cupy.forward` on CuPy arrays."""
    o, lse = (None, None) if out is None else unpack_out(out, ("o", "lse"))
    options = (causal, softmax_scale, layout, hashable(config), family)
    if not features:
        return call(_prepare_forward, _FORWARD, (q, k, v, o, lse), (*options, (), ()))
    names, arrays, settings, seed = split_features(features)
    arguments = _FORWARD.with_inputs(names)
    return call(_prepare_forward, arguments, (q, k, v, *arrays, o, lse), (*options, names, settings), seed, settings)


def delta(o, do, layout, out):
    """`fa2cupy.delta` on CuPy arrays."""
    return call(_prepare_delta, _DELTA, (o, do, out), (layout,))[0]


def backward(
    q, k, v, o, lse, do, causal, softmax_scale, given_delta, method, deterministic, layout, out, config, family,
    dlse=None, return_dbias=False, return_dsink=False, features=None,
):  # fmt: skip
    """`fa2cupy.backward` on CuPy arrays."""
    inputs = (q, k, v, o, lse, do, given_delta)
    options = (causal, softmax_scale, method, deterministic, layout, hashable(config), family)
    if not features and dlse is None and return_dbias is False and return_dsink is False:
        results = (None, None, None) if out is None else unpack_out(out, ("dq", "dk", "dv"))
        return call(_prepare_backward, _BACKWARD, (*inputs, *results), (*options, (), (), ()))
    if _alike(given_delta, dlse):
        with cupy.cuda.Device(given_delta.data.device_id), temporaries():
            inputs, dlse = (*inputs[:6], given_delta - dlse), None
    more = tuple(extra_gradients(features or {}, return_dbias, return_dsink))
    names, arrays, settings, seed = split_features({**(features or {}), "dlse": dlse})
    arguments = _BACKWARD.with_inputs(names)._replace(results=(*_BACKWARD.results, *more))
    results = unpack_out(out, arguments.results)
    arrays = (*inputs, *arrays, *results)
    return call(_prepare_backward, arguments, arrays, (*options, names, settings, more), seed, settings)


def _alike(given_delta, dlse) -> bool:
    """Whether both are there and fit each other, so that one can be subtracted from the other."""
    both = isinstance(given_delta, cupy.ndarray) and isinstance(dlse, cupy.ndarray)
    if not both or given_delta.data.device_id != dlse.data.device_id:
        return False
    return (given_delta.shape, given_delta.dtype) == (dlse.shape, dlse.dtype)


def _prepare_forward(arguments: Arguments, arrays: tuple, options: tuple) -> Callable:
    q, k, v, *given, o, lse = arrays
    causal, softmax_scale, layout, config, family, names, settings = options
    features = dict(settings) | {name: x for name, x in zip(names, given, strict=True) if x is not None}
    problem = AttentionProblem.from_arrays(
        q, k, v, causal=causal, softmax_scale=softmax_scale, layout=layout, **features
    )
    ordinal, device = _device(arrays, arguments)
    outputs = (("o", problem.o_shape, q.dtype), ("lse", problem.lse_shape, np.dtype(problem.accumulator_dtype)))
    check_outputs(outputs, (o, lse))
    row = choose_family("forward", problem.dtype, device, family, problem.needs)
    offsets = tuple(features.get(name) for name in OFFSETS)
    if not _direct(row, problem, (q, k, v, o), (lse, *offsets)):

        def run(copies):
            own = dict(settings) | dict(zip(names, copies[3:], strict=True))
            return forward(*copies[:3], causal, problem.softmax_scale, layout, None, config, family, own)

        return AdaptedCall(run, row, problem, arguments, outputs, arrays)
    strides = _strides(problem, outputs, q=q, k=k, v=v, o=o) | feature_strides(features)
    plan = plan_forward(problem, device, strides, config, _usable_family(row, family, problem, strides, ("forward",)))
    return KernelCall(plan, ordinal, arguments, outputs, arrays)


def _prepare_delta(arguments: Arguments, arrays: tuple, options: tuple) -> Callable:
    o, do, out = arrays
    (layout,) = options
    problem = AttentionProblem.from_outputs(o, do, layout=layout)
    ordinal, device = _device(arrays, arguments)
    outputs = (("delta", problem.lse_shape, np.dtype(problem.accumulator_dtype)),)
    check_outputs(outputs, (out,))
    row = choose_family("delta", problem.dtype, device)
    if not _direct(row, problem, (o, do), (out,)):
        return AdaptedCall(lambda copies: (delta(*copies, layout, None),), row, problem, arguments, outputs, arrays)
    plan = plan_delta(problem, device, _strides(problem, outputs, o=o, dout=do))
    return KernelCall(plan, ordinal, arguments, outputs, arrays)


def _prepare_backward(arguments: Arguments, arrays: tuple, options: tuple) -> Callable:
    causal, softmax_scale, method, deterministic, layout, config, family, names, settings, more = options
    q, k, v, o, lse, do, given_delta, *rest = arrays
    given, results = rest[: len(names)], rest[len(names) :]
    features = dict(settings) | {name: x for name, x in zip(names, given, strict=True) if x is not None}
    dlse = features.pop("dlse", None)
    problem = AttentionProblem.from_arrays(
        q, k, v, causal=causal, softmax_scale=softmax_scale, layout=layout, **features
    )
    problem.check_backward_inputs(o, lse, do, given_delta, dlse)
    ordinal, device = _device(arrays, arguments)
    outputs = (("dq", problem.q_shape, q.dtype), ("dk", problem.k_shape, q.dtype), ("dv", problem.v_shape, q.dtype))
    wide = np.dtype(problem.accumulator_dtype)
    like = {name: features[_SOURCES[name]] for name in more}
    outputs += tuple((n, a.shape, wide if n == _DBIAS_SUM else a.dtype) for n, a in like.items())
    check_outputs(outputs, tuple(results))
    given_names = tuple("dbias" if name == _DBIAS_SUM else name for name in more)
    extra = (*(("dlse",) if dlse is not None else ()), *given_names)
    row = choose_family("backward", problem.dtype, device, family, (*problem.needs, *extra))

    def method_on(family_name: str) -> str:
        chosen = choose_method(family_name, problem, method, deterministic)
        if "dbias" in given_names:
            return method_of_dbias(row, chosen, deterministic, problem, features["bias"])
        return chosen

    usual_method = method_on(row.name)
    dq, dk, dv = results[:3]
    offsets = tuple(features.get(name) for name in OFFSETS)
    dsink = results[3 + more.index("dsink")] if "dsink" in more else None
    if "dbias" in more or not _direct(
        row, problem, (q, k, v, o, do, dq, dk, dv), (lse, given_delta, dlse, dsink, *offsets)
    ):
        # dbias is summed in the accumulators' dtype, and rounded where it is delivered.
        inner = tuple(_DBIAS_SUM if name == "dbias" else name for name in more)
        scale = problem.softmax_scale
        inner_options = (causal, scale, method, deterministic, layout, config, family, names, settings, inner)
        inner_arguments = arguments._replace(results=(*_BACKWARD.results, *inner))

        def run(copies):
            seed = copies[7 + names.index("seed")] if "seed" in names else None
            own = tuple(None if name == "seed" else x for name, x in zip(arguments.inputs, copies, strict=True))
            none = (None,) * len(inner_arguments.results)
            return call(_prepare_backward, inner_arguments, (*own, *none), inner_options, seed, settings)

        return AdaptedCall(run, row, problem, arguments, outputs, arrays)
    strides = _strides(problem, outputs[:3], q=q, k=k, v=v, o=o, dout=do, dq=dq, dk=dk, dv=dv)
    strides |= feature_strides(features)
    if _DBIAS_SUM in more:
        strides[_DBIAS_SUM] = contiguous_score_strides(features["bias"].shape)
    family = _usable_family(row, family, problem, strides, OPERATIONS_OF[usual_method])
    plan = plan_backward(
        problem, device, strides, method_on(family or row.name), config, family, with_delta=given_delta is None, more=extra
    )
    return KernelCall(plan, ordinal, arguments, outputs, arrays)


def _usable_family(
    row: Family, family: str | None, problem: AttentionProblem, strides: Mapping[str, Strides], operations: tuple[str, ...]
) -> str | None:
    """The caller's family, or the one to insist on where Hopper's kernels cannot take the problem or an array."""
    if row.name != "sm90":
        return family
    if not tma.is_available():
        if family == "sm90":
            raise UnsupportedProblemError(f"family 'sm90' needs cuda-bindings: {INSTALL_CUDA}")
        return "sm80"
    if family is None and any(why_not_sm90(operation, problem, strides) for operation in operations):
        return "sm80"
    return family


def _device(arrays: tuple, arguments: Arguments) -> tuple[int, DeviceInfo]:
    first = arrays[0].data.device_id
    for name, array in zip(arguments.names, arrays, strict=True):
        if array is not None and array.data.device_id != first:
            like = f"device {first} like {arguments.inputs[0]}"
            raise ValueError(f"{name}: expected an array on {like}, got device {array.data.device_id}")
    with cupy.cuda.Device(first):
        return first, DeviceInfo.current()


def _strides(problem: AttentionProblem, outputs: Outputs, **tensors) -> dict[str, tuple[int, int, int]]:
    shapes = {name: shape for name, shape, _ in outputs}
    return {
        name: problem.kernel_strides(shapes[name]) if array is None else problem.kernel_strides(array.shape, array.strides)
        for name, array in tensors.items()
    }


def _direct(family: Family, problem: AttentionProblem, tensors: tuple, statistics: tuple) -> bool:
    """Whether the kernels take all arrays as they are (None stands for one that will be allocated)."""
    return (
        problem.head_dim % family.head_dim_step == 0
        and problem.head_dim_v is None
        and all(a is None or takes_rows(family, a) for a in tensors)
        and all(a is None or a.size == 0 or a.flags.c_contiguous for a in statistics)
    )
