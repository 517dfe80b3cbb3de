"""What a call asks for besides plain attention: one row for each feature.

The order of the arithmetic, the same everywhere:

    S = softmax_scale * Q K^T
    S = softcap * tanh(S / softcap)                                    softcap
    S = S - slope * |i + seqlen_k - seqlen_q - j|                      alibi_slopes
    S = S + bias                                                       bias
    S = -inf where hidden                                              causal, window, mask, key_padding_mask, lengths
    lse = log(sum_j exp(S_j) + exp(sink))                              sink
    O = (keep * exp(S - lse)) V                                        dropout; keep is 0 or 1 / (1 - dropout_p)

and backward, with delta = rowsum(dO * O) - dlse,

    dV = (keep * P)^T dO          dS = P * (keep * dO V^T - delta)     dsink = -sum_i exp(sink - lse_i) delta_i
    dbias = dS, summed to the bias's shape          dQ, dK from dS * (1 - tanh^2(S / softcap))

How a feature is added
----------------------
1. Its keywords in `FeatureKeywords`, a field of `FeatureSettings` for what is no array, and a row of `FEATURES` with its
   check. The public functions, the references and `fa2cupy.testing` hand keywords through and stay; the row gives the key
   of a kernel and its record what they need. Its name in ``choices.py`` and an example of it in ``plan/specs.py``, so that
   its kernels can be compiled ahead, and in ``families/operations.py``, if it concerns other kernels than scores do.
2. The formula in ``numerics/formulas.py``, whole, and in ``cpu/scores.py``, on a tile. Both keep to the order above.
3. In CUDA one shared header, on the fragment contract: ``tile_range.cuh`` if pairs of tiles drop out, ``mask.cuh`` if
   pairs of elements do, ``score_mod.cuh`` if scores change, ``online_softmax.cuh`` if the sum does, ``sequence.cuh`` if
   a block works on other rows. Main loops stay. Without the flag PTX must stay, too: what the record has of a feature
   is named in templates on the record alone, so that a kernel without it cannot touch it.

A score function of the user's own is such a row whose flag carries the text of two device functions, the score and its
derivative; it sits where softcap sits, and `HeadTerms.apply` gives the derivative back as it does for softcap. A
block-sparse map is a row with two arrays, the offsets and the numbers of the tiles of each row of tiles: it changes
`Head.key_tiles` and `Head.query_tiles` of ``cpu/tiles.py`` and ``tile_range.cuh``, and nothing else.

Words: `features` are names of rows, `keywords` what a caller gives for them, `settings` the checked values that are no arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict

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
from .philox import dropout_scale, dropout_threshold
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
    """The keywords of features, for type checkers; `fa2cupy.forward` says what they mean."""

    window: tuple[int | None, int | None] | None
    softcap: float | None
    alibi_slopes: object
    bias: object
    mask: object
    key_padding_mask: object
    sink: object
    dropout_p: float
    seed: int | None
    cu_seqlens_q: object
    cu_seqlens_k: object
    max_seqlen_q: int | None
    max_seqlen_k: int | None


class Sizes(NamedTuple):
    """What the numbers of a record depend on besides the settings.

    Attributes
    ----------
    seqlen_q, seqlen_k : int
    band : tuple of (int or None)
        How far left and right of the diagonal a key may be.
    softmax_scale : float
    """

    seqlen_q: int
    seqlen_k: int
    band: tuple[int | None, int | None]
    softmax_scale: float


@dataclass(frozen=True)
class FeatureSettings:
    """The features of one call, checked, without its arrays: what plans and kernels may depend on.

    Attributes
    ----------
    window : tuple of (int or None)
        Keys visible to the left and to the right of the diagonal; None is no limit.
    softcap : float or None
    dropout_p : float
    seed : int
        Below 2**64.
    num_sequences : int or None
        Packed sequences; None if the arrays are not packed.
    max_seqlen_q, max_seqlen_k : int
        No packed sequence is longer.
    arrays : tuple of str
        Which of `ARRAY_KEYWORDS` the call has.
    wide_bias : bool
        The bias has the dtype of lse, where that is not q's.
    """

    window: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    dropout_p: float = 0.0
    seed: int = 0
    num_sequences: int | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    arrays: tuple[str, ...] = ()
    wide_bias: bool = False

    @property
    def features(self) -> tuple[str, ...]:
        """The rows of `FEATURES` that a kernel must have. A feature at its neutral value is none."""
        return tuple(name for name, feature in FEATURES.items() if feature.is_used(self))

    def record(self, sizes: Sizes) -> dict[str, int | float]:
        """The numbers of the features that travel in a kernel's record."""
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
        Of the pointer in the record: a key of the table in ``jit/params.py``.
    check : callable or None
        Raises TypeError or ValueError for an array, by name, that does not fit a problem with its settings. None if it is
        no keyword of `FeatureKeywords`, or if the feature's own check sees to it.
    is_over_scores : bool
        It lies over the scores, and comes with four strides, 0 where it repeats.
    """

    kind: str
    check: Callable[[str, object, Problem], None] | None = None
    is_over_scores: bool = True


def _nothing(*_) -> dict:
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
        Whether settings ask for it.
    check : callable
        From keywords and the problem to the settings that they ask for; raises for what does not fit.
    arrays : dict of FeatureArray
        Pointers of the record.
    values : dict of str
        Numbers of the record, with their kinds.
    numbers : callable
        From settings and `Sizes` to the values.
    per_call : tuple of str
        64-bit numbers that are new in each call, and travel with the pointers.
    registers : int
        How much of a thread's registers it takes in the inner loop of a backward: 0 none, 1 some, 2 many.
    """

    flag: str
    is_used: Callable[[FeatureSettings], bool]
    check: Callable[[Mapping[str, object], Problem], dict[str, object]] = _nothing
    arrays: Mapping[str, FeatureArray] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    numbers: Callable[[FeatureSettings, Sizes], dict[str, int | float]] = _nothing
    per_call: tuple[str, ...] = ()
    registers: int = 0


def _window_limits(settings: FeatureSettings, sizes: Sizes) -> dict[str, int | float]:
    """No limit of the band is one that these lengths do not reach."""
    left, right = sizes.band
    return {
        "window_left": sizes.seqlen_k if left is None else min(left, sizes.seqlen_k),
        "window_right": sizes.seqlen_q if right is None else min(right, sizes.seqlen_q),
    }


def _cap_numbers(settings: FeatureSettings, sizes: Sizes) -> dict[str, int | float]:
    return {} if settings.softcap is None else softcap_values(settings.softcap, sizes.softmax_scale)


def _slope_scale(settings: FeatureSettings, sizes: Sizes) -> dict[str, int | float]:
    """From slopes to a kernel's own units of scores, which it has where a positive factor makes scores of them."""
    base2 = _cap_numbers(settings, sizes).get("capped_log2", sizes.softmax_scale * math.log2(math.e))
    return {"alibi_scale": math.log2(math.e) / base2 if base2 > 0 else 0.0}


def _dropout_numbers(settings: FeatureSettings, sizes: Sizes) -> dict[str, int | float]:
    probability = settings.dropout_p
    return {"dropout_threshold": dropout_threshold(probability), "dropout_scale": dropout_scale(probability)}


def _packed_numbers(settings: FeatureSettings, sizes: Sizes) -> dict[str, int | float]:
    return {
        "max_seqlen_q": min(settings.max_seqlen_q, sizes.seqlen_q),
        "max_seqlen_k": min(settings.max_seqlen_k, sizes.seqlen_k),
        "total_q": sizes.seqlen_q,
        "total_k": sizes.seqlen_k,
        "num_sequences": settings.num_sequences or 0,
    }


#: All features by name, in the order in which their members stand in a record.
FEATURES = {
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
    # The bias has the accumulators' dtype.
    "wide_bias": Feature("kWideBias", lambda settings: settings.wide_bias, check=check_wide_bias),
    # The gradient of the bias, which a backward has on request.
    "dbias": Feature("kDbias", _never, arrays={"dbias_accum": FeatureArray("output_accum")}),
    "mask": Feature("kMask", _has("mask"), arrays={"mask": FeatureArray("input_bool", check_broadcast)}, registers=2),
    "key_padding_mask": Feature(
        "kKeyPadding",
        _has("key_padding_mask"),
        arrays={"key_padding_mask": FeatureArray("input_bool", check_key_padding)},
    ),
    "sink": Feature("kSink", _has("sink"), arrays={"sink": FeatureArray("input_accum", check_sink)}),
    "dropout_p": Feature(
        "kDropout",
        lambda settings: settings.dropout_p > 0,
        check=check_dropout,
        values={"dropout_threshold": "word", "dropout_scale": "real"},
        numbers=_dropout_numbers,
        per_call=("seed",),
        registers=2,
    ),
    # The gradient for lse, which a backward may be given.
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

#: Keywords that are arrays.
ARRAY_KEYWORDS = tuple(
    name for feature in FEATURES.values() for name in feature.arrays if name in FeatureKeywords.__annotations__
)


def feature_arrays(keywords: Mapping[str, object]) -> dict[str, object]:
    """The arrays among the keywords of features."""
    return {name: keywords[name] for name in ARRAY_KEYWORDS if keywords.get(name) is not None}


def features_in_registers(least: int) -> tuple[str, ...]:
    """The features that take at least so much of a thread's registers, as `Feature.registers` counts."""
    return tuple(name for name, feature in FEATURES.items() if feature.registers >= least)
