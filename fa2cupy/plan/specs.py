"""Which kernels calls use, found out by planning a small one on the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import ml_dtypes
import numpy as np

from ..families.device import DeviceInfo
from ..families.choice import choose_family, method_of_dbias
from .calls import plan_backward, plan_forward
from ..problem.attention import AttentionProblem
from ..problem.score_strides import contiguous_score_strides, feature_strides
from ..jit.spec import KernelSpec
from ..families.tiles import TileConfig

__all__ = ["default_specs"]

_ROWS = 128
#: Features of a call that are not keywords of `AttentionProblem.from_arrays`: what plans call them.
_OF_BACKWARD = {"dlse": "dlse", "return_dbias": "dbias", "return_dsink": "dsink"}


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
) -> list[KernelSpec]:
    """The kernels that calls use: the forward's, or those of a backward method.

    Parameters
    ----------
    device, dtype, head_dim, causal, method, family, config
        Of the calls, whose other options are the default ones.
    features : sequence of str, optional
        What they have besides, all together: of `fa2cupy.choices.CALL_FEATURES`. A bias may have either of its dtypes.
    """
    step = choose_family("forward" if method is None else "backward", dtype, device, family).head_dim_step
    padded = -(-head_dim // step) * step
    specs: dict[KernelSpec, None] = {}
    for options in _examples(features, dtype):
        q = _array((_ROWS, 1, padded) if "cu_seqlens_q" in options else (1, _ROWS, 1, padded), dtype)
        problem = AttentionProblem.from_arrays(q, q, q, causal=causal, **options)
        rows = problem.kernel_strides(problem.q_shape)
        strides = dict.fromkeys(("q", "k", "v", "o", "dout", "dq", "dk", "dv"), rows) | feature_strides(options)
        if method is None:
            plan = plan_forward(problem, device, strides, config, family)
        else:
            more, scheme = tuple(name for feature, name in _OF_BACKWARD.items() if feature in features), method
            if "dbias" in more:
                row = choose_family("backward", dtype, device, family, (*problem.needs, *more))
                scheme = method_of_dbias(row, method, False, problem, options["bias"])
                strides["dbias_accum"] = contiguous_score_strides(options["bias"].shape)
            plan = plan_backward(problem, device, strides, scheme, config, family, more=more)
        specs.update(dict.fromkeys(stage.spec for stage in plan.stages))
    return list(specs)


def _examples(features: Sequence[str], dtype: str) -> Iterator[dict[str, object]]:
    """Keywords of calls with these features. Kernels do not depend on the values."""
    wide = "float64" if dtype == "float64" else "float32"
    offsets = np.array([0, _ROWS], "int32")
    values = {
        "window": {"window": (1, 1)},
        "softcap": {"softcap": 1.0},
        "alibi_slopes": {"alibi_slopes": _array((1,), wide)},
        "mask": {"mask": _array((1, 1), "bool")},
        "key_padding_mask": {"key_padding_mask": _array((1, _ROWS), "bool")},
        "sink": {"sink": _array((1,), wide)},
        "dropout_p": {"dropout_p": 0.5, "seed": 0},
        "cu_seqlens": {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets},
    }
    options = {name: value for feature in features for name, value in values.get(feature, {}).items()}
    if "bias" not in features:
        yield options
        return
    for bias_dtype in dict.fromkeys((dtype, wide)):
        yield {**options, "bias": _array((1, 1), bias_dtype)}


def _array(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.zeros(shape, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
