"""The features that calls can add to plain attention: a table with one row for each.

The order of the arithmetic is the same everywhere:

    S = softmax_scale * Q K^T
    S = score_mod(S, b, h, i, j, *score_args)                          score_mod
    S = softcap * tanh(S / softcap)                                    softcap
    S = S - slope * |i + seqlen_k - seqlen_q - j|                      alibi_slopes
    S = S + bias                                                       bias
    S = -inf where hidden                                              causal, window, mask, key_padding_mask, mask_mod,
                                                                       block_mask, lengths
    lse = log(sum_j exp(S_j) + exp(sink))                              sink
    O = (keep * exp(S - lse)) V                                        dropout; keep is 0 or 1 / (1 - dropout_p)

and in the backward, with delta = rowsum(dO * O) - dlse:

    dV = (keep * P)^T dO          dS = P * (keep * dO V^T - delta)     dsink = -sum_i exp(sink - lse_i) delta_i
    dbias = dS, summed to the bias's shape          dS = dS * (1 - tanh^2(S / softcap))
    dscore_args = dS * (derivatives of score_mod by the elements that it reads), summed to the arrays' shapes
    dQ, dK from dS * (derivative of score_mod by the score)

How a feature is added
----------------------
1. Add its keywords to `FeatureKeywords`, a field for each keyword that is no array to `FeatureSettings`, and a row with
   its checks to `FEATURES`. The row also defines the feature's part of a kernel's key and record. The public functions,
   the references and `fa2cupy.testing` pass keywords on and do not change. Add the name to ``problem/choices.py`` and
   an example to ``plan/specs.py``, so that its kernels can be compiled ahead. If it concerns other kernels than those
   of scores, name it in their rows of ``families/operations.py``.
2. Add the formula to ``numerics/formulas.py``, for whole matrices, and to ``cpu/scores.py``, for a tile. Both keep to
   the order above.
3. Add the CUDA code to one shared header, which works on fragments of any family: ``tile_range.cuh`` if pairs of tiles
   are skipped, ``mask.cuh`` if pairs of elements are hidden, ``score_mod.cuh`` if scores change, ``online_softmax.cuh``
   if the sum changes, ``sequence.cuh`` if the rows of a block change. The main loops do not change, and the PTX of
   kernels without the flag must not change. To ensure this, only templates on the record name the members of a feature:
   they cannot be instantiated for a record without them.

Terms: `features` are names of rows, `keywords` the caller's arguments for them, and `settings` the checked values of
the keywords that are no arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

from ..functions.tracing import BoundFunction
from .array_types import Array
from .block_mask import KEY_LISTS, LIST_STRIDES, QUERY_LISTS, BlockMask, MapLayout, check_block_mask
from .feature_checks import (
    OFFSETS,
    Problem,
    check_broadcast,
    check_cap,
    check_dropout,
    check_key_padding,
    check_packed,
    check_sink,
    check_slopes,
    check_wide_bias,
    check_window,
)
from .function_checks import check_mask_mod, check_score_mod
from .philox import dropout_scale, dropout_threshold, first_query_word
from .softcap import softcap_values

__all__ = [
    "ARRAY_KEYWORDS",
    "FEATURES",
    "NO_SETTINGS",
    "OFFSETS",
    "Feature",
    "FeatureArray",
    "FeatureKeywords",
    "FeatureSettings",
    "Sizes",
    "feature_arrays",
    "features_in_registers",
]


class FeatureKeywords(TypedDict, total=False):
    """The keywords of features and their types. `fa2cupy.forward` describes them."""

    window: tuple[int | None, int | None] | None
    softcap: float | None
    alibi_slopes: Array | None
    bias: Array | None
    mask: Array | None
    key_padding_mask: Array | None
    sink: Array | None
    dropout_p: float
    seed: int | None
    cu_seqlens_q: Array | None
    cu_seqlens_k: Array | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    score_mod: Callable[..., Any] | None
    score_args: Sequence[Array]
    mask_mod: Callable[..., Any] | None
    mask_args: Sequence[Array]
    block_mask: BlockMask | None


class Sizes(NamedTuple):
    """The inputs of the numbers of a record that are not settings.

    Attributes
    ----------
    seqlen_q, seqlen_k : int
    band : tuple of (int or None)
        Number of visible keys left and right of the diagonal; None is no limit.
    softmax_scale : float
    """

    seqlen_q: int
    seqlen_k: int
    band: tuple[int | None, int | None]
    softmax_scale: float


@dataclass(frozen=True)
class FeatureSettings:
    """The checked settings of the features of one call. Plans and kernels depend on them, but not on the arrays.

    Attributes
    ----------
    score_mod, mask_mod : BoundFunction or None
        The traced functions.
    block_mask : MapLayout or None
        The layout of the sparse map.
    window : tuple of (int or None)
        Number of visible keys left and right of the diagonal; None is no limit.
    softcap : float or None
    dropout_p : float
    seed : int
        Below 2**64.
    dropout_origin : tuple of int
        Head and query that the first ones of the call are for dropout: a call may be a part of another one.
    num_sequences : int or None
        Number of packed sequences; None if the arrays are not packed.
    max_seqlen_q, max_seqlen_k : int
        Upper bounds of the lengths of packed sequences.
    arrays : tuple of str
        The keywords among `ARRAY_KEYWORDS` that the call has.
    wide_bias : bool
        True if the bias has the dtype of lse and q has another one.
    """

    score_mod: BoundFunction | None = None
    mask_mod: BoundFunction | None = None
    block_mask: MapLayout | None = None
    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    dropout_p: float = 0.0
    seed: int = 0
    dropout_origin: tuple[int, int] = (0, 0)
    num_sequences: int | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    arrays: tuple[str, ...] = ()
    wide_bias: bool = False

    @property
    def features(self) -> tuple[str, ...]:
        """The rows of `FEATURES` that a kernel must have. Features at their neutral values are left out."""
        return tuple(name for name, feature in FEATURES.items() if feature.is_used(self))

    @property
    def functions(self) -> tuple[BoundFunction, ...]:
        """The functions of the call."""
        return tuple(one for one in (self.score_mod, self.mask_mod) if one is not None)

    def record(self, sizes: Sizes) -> dict[str, int | float]:
        """The numbers of the features in a kernel's record."""
        found: dict[str, int | float] = {}
        for name in self.features:
            found |= FEATURES[name].numbers(self, sizes)
        return found


NO_SETTINGS = FeatureSettings()


class FeatureArray(NamedTuple):
    """An array that kernels read or write for a feature.

    Attributes
    ----------
    kind : str
        Kind of the pointer in the record: a key of the table in ``jit/params.py``.
    check : callable or None
        Takes the name, the array and the problem with its settings, and raises TypeError or ValueError if the array
        does not fit. None if the array is no keyword of `FeatureKeywords`, or if the feature's `check` includes it.
    is_over_scores : bool
        True if the array is broadcast over the scores; its record then has four strides, 0 along repeated axes.
    """

    kind: str
    check: Callable[[str, Array, Problem], None] | None = None
    is_over_scores: bool = True


def _nothing(*_: object) -> dict[str, Any]:
    return {}


def _never(settings: FeatureSettings) -> bool:
    return False


def _has(array: str) -> Callable[[FeatureSettings], bool]:
    return lambda settings: array in settings.arrays


@dataclass(frozen=True)
class Feature:
    """One row of the table.

    Attributes
    ----------
    flag : str
        The constant of `Spec` in C++, false in a kernel without the feature.
    is_used : callable
        Takes settings; returns True if a kernel for them must have the feature.
    check : callable
        Takes the keywords and the problem; returns fields of `FeatureSettings`, and raises TypeError or ValueError for
        arguments that do not fit.
    arrays : dict of FeatureArray
        Pointers of the record.
    values : dict of str
        Kinds of the record's numbers, by name.
    numbers : callable
        Takes settings and `Sizes`; returns these numbers.
    per_call : tuple of str
        64-bit numbers that change from call to call and are passed with the pointers.
    registers : int
        Demand for registers in the inner loop of a backward: 0 none, 1 some, 2 many.
    """

    flag: str
    is_used: Callable[[FeatureSettings], bool]
    check: Callable[[Mapping[str, Any], Problem], dict[str, Any]] = _nothing
    arrays: Mapping[str, FeatureArray] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    numbers: Callable[[FeatureSettings, Sizes], dict[str, int | float]] = _nothing
    per_call: tuple[str, ...] = ()
    registers: int = 0


def _window_limits(settings: FeatureSettings, sizes: Sizes) -> dict[str, int | float]:
    """The limits of the band. No limit becomes one that exceeds these lengths."""
    left, right = sizes.band
    return {
        "window_left": sizes.seqlen_k if left is None else min(left, sizes.seqlen_k),
        "window_right": sizes.seqlen_q if right is None else min(right, sizes.seqlen_q),
    }


def _cap_numbers(settings: FeatureSettings, sizes: Sizes) -> dict[str, int | float]:
    # The scores of a function of the caller's are scaled already.
    scale = sizes.softmax_scale if settings.score_mod is None else 1.0
    return {} if settings.softcap is None else softcap_values(settings.softcap, scale)


def _slope_scale(settings: FeatureSettings, sizes: Sizes) -> dict[str, int | float]:
    """The factor from slopes to the units in which kernels add up scores.

    It is 0 if the factor from these units to scores in base 2 is not positive: kernels then add up scores in base 2.
    """
    base2 = _cap_numbers(settings, sizes).get("capped_log2", sizes.softmax_scale * math.log2(math.e))
    return {"alibi_scale": math.log2(math.e) / base2 if base2 > 0 else 0.0}


def _dropout_numbers(settings: FeatureSettings, sizes: Sizes) -> dict[str, int | float]:
    threshold = dropout_threshold(settings.dropout_p)
    in_both_halves = threshold << 16 | threshold  # kernels compare the draws of two elements at a time
    head, query = settings.dropout_origin
    return {
        "dropout_threshold": in_both_halves,
        "dropout_scale": dropout_scale(settings.dropout_p),
        "dropout_head": head,
        "dropout_query_word": first_query_word(query),
    }


def _packed_numbers(settings: FeatureSettings, sizes: Sizes) -> dict[str, int | float]:
    return {
        "max_seqlen_q": min(settings.max_seqlen_q, sizes.seqlen_q),
        "max_seqlen_k": min(settings.max_seqlen_k, sizes.seqlen_k),
        "total_q": sizes.seqlen_q,
        "total_k": sizes.seqlen_k,
        "num_sequences": settings.num_sequences or 0,
    }


#: All features by name, in the order of their members in a record.
FEATURES = {
    "score_mod": Feature(
        "kScoreMod", lambda settings: settings.score_mod is not None, check=check_score_mod, registers=2
    ),
    "window": Feature(
        "kWindow",
        lambda settings: settings.window != (None, None),
        check=check_window,
        values={"window_left": "int", "window_right": "int"},
        numbers=_window_limits,
    ),
    "softcap": Feature(
        "kSoftcap",
        lambda settings: settings.softcap is not None,
        check=check_cap,
        values=dict.fromkeys(softcap_values(1.0, 1.0), "real"),
        numbers=_cap_numbers,
        registers=1,
    ),
    "alibi_slopes": Feature(
        "kAlibi",
        _has("alibi_slopes"),
        arrays={"alibi_slopes": FeatureArray("input_accum", check_slopes)},
        values={"alibi_scale": "real"},
        numbers=_slope_scale,
        registers=1,
    ),
    "bias": Feature("kBias", _has("bias"), arrays={"bias": FeatureArray("input", check_broadcast)}, registers=2),
    # A bias in the accumulators' dtype.
    "wide_bias": Feature("kWideBias", lambda settings: settings.wide_bias, check=check_wide_bias),
    # The gradient of the bias, which `return_dbias` requests, and whether the bias is a full one: then each element of
    # dbias belongs to one score, and is stored in the bias's dtype instead of added up in the accumulators'.
    "dbias": Feature("kDbias", _never, arrays={"dbias": FeatureArray("output_accum")}),
    "full_dbias": Feature("kFullDbias", _never),
    # The gradients of the arrays of `score_mod`, which `return_dscore_args` requests.
    "dscore_args": Feature("kDscoreArgs", _never),
    "mask": Feature("kMask", _has("mask"), arrays={"mask": FeatureArray("input_bool", check_broadcast)}, registers=2),
    "key_padding_mask": Feature(
        "kKeyPadding",
        _has("key_padding_mask"),
        arrays={"key_padding_mask": FeatureArray("input_bool", check_key_padding)},
    ),
    "mask_mod": Feature("kMaskMod", lambda settings: settings.mask_mod is not None, check=check_mask_mod, registers=2),
    # Plans make the lists for the tiles of each kernel; their strides depend on these.
    "block_mask": Feature(
        "kBlockMask",
        lambda settings: settings.block_mask is not None,
        check=check_block_mask,
        arrays=dict.fromkeys((KEY_LISTS, QUERY_LISTS), FeatureArray("input_int", is_over_scores=False)),
        values=dict.fromkeys(LIST_STRIDES, "int"),
    ),
    # The lse of other arithmetic, which a backward is given and computes again in its own.
    "given_lse": Feature("kGivenLse", _never, arrays={"given_lse": FeatureArray("input_accum", is_over_scores=False)}),
    "sink": Feature("kSink", _has("sink"), arrays={"sink": FeatureArray("input_accum", check_sink)}),
    "dropout_p": Feature(
        "kDropout",
        lambda settings: settings.dropout_p > 0,
        check=check_dropout,
        values={
            "dropout_threshold": "word",
            "dropout_scale": "real",
            "dropout_head": "int",
            "dropout_query_word": "word",
        },
        numbers=_dropout_numbers,
        per_call=("seed",),
        registers=2,
    ),
    # The gradient for lse, an optional argument of the backward.
    "dlse": Feature("kDlse", _never, arrays={"dlse": FeatureArray("input_accum", is_over_scores=False)}),
    "cu_seqlens": Feature(
        "kVarlen",
        lambda settings: settings.num_sequences is not None,
        check=check_packed,
        arrays=dict.fromkeys(OFFSETS, FeatureArray("input_int", is_over_scores=False)),
        values=dict.fromkeys(("max_seqlen_q", "max_seqlen_k", "total_q", "total_k", "num_sequences"), "int"),
        numbers=_packed_numbers,
    ),
}


#: The keywords that are arrays.
ARRAY_KEYWORDS = tuple(
    name for feature in FEATURES.values() for name in feature.arrays if name in FeatureKeywords.__annotations__
)


def feature_arrays(keywords: Mapping[str, Any]) -> dict[str, Array]:
    """The arrays among the keywords of features, without those that are None."""
    return {name: keywords[name] for name in ARRAY_KEYWORDS if keywords.get(name) is not None}


def features_in_registers(least: int) -> tuple[str, ...]:
    """The features whose `Feature.registers` is at least this."""
    return tuple(name for name, feature in FEATURES.items() if feature.registers >= least)
