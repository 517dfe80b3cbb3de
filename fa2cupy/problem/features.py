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
1. Add its keywords to `FeatureKeywords`, a field for each keyword that is no array to `FeatureSettings`, and a row to
   `FEATURES`, with its check (``feature_checks.py``). The row also defines the feature's part of a kernel's key and
   record, its kernels that are compiled ahead, and what several GPUs make of it. All other modules read the row: public
   functions, references and `fa2cupy.testing` pass keywords on and do not change; describe them in ``api.py``. If it
   concerns other kernels than those of scores, name it in their rows of ``families/operations.py``.
2. Add the formula to ``numerics/formulas.py``, for whole matrices, and to ``cpu/scores.py``, for a tile. Both keep to
   the order above. A feature that is not linear in the products has its first and second derivative in their `Slopes`,
   from which ``second_order.py`` beside them makes tangents.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict

from ..functions.tracing import BoundFunction
from .array_types import AnyArray, Array
from .block_mask import (
    COLUMN_INTERVALS,
    INTERVAL_STRIDES,
    KEY_LISTS,
    LIST_STRIDES,
    QUERY_LISTS,
    ROW_INTERVALS,
    BlockMask,
    MapLayout,
    check_block_mask,
    function_of_map,
)
from .boxes import Boxes
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
    "ARRAYS",
    "ARRAY_KEYWORDS",
    "EXAMPLE_ROWS",
    "FEATURES",
    "KEYWORD_DEFAULTS",
    "NO_SETTINGS",
    "OFFSETS",
    "Feature",
    "FeatureArray",
    "FeatureKeywords",
    "FeatureSettings",
    "Sizes",
    "changes_of_scores",
    "complete",
    "feature_arrays",
    "features_in_registers",
    "features_of_scores",
]

#: Queries and keys of the examples in `FEATURES`.
EXAMPLE_ROWS = 128
#: The axes of the scores within a sequence, counted from the last one. Leading axes are in front of them.
_HEADS, _QUERIES, _KEYS = -3, -2, -1


class FeatureKeywords(TypedDict, total=False):
    """The keywords of features and their types. `fa2cupy.forward` describes them."""

    window: tuple[int | None, int | None] | None
    softcap: float | None
    alibi_slopes: AnyArray | None
    bias: AnyArray | None
    mask: AnyArray | None
    key_padding_mask: AnyArray | None
    sink: AnyArray | None
    dropout_p: float
    seed: int | None
    cu_seqlens_q: AnyArray | None
    cu_seqlens_k: AnyArray | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    score_mod: Callable[..., Any] | None
    score_args: Sequence[AnyArray]
    mask_mod: Callable[..., Any] | None
    mask_args: Sequence[AnyArray]
    block_mask: BlockMask | None


#: The defaults of those that are not None by default.
KEYWORD_DEFAULTS: Mapping[str, Any] = {"dropout_p": 0.0, "score_args": (), "mask_args": ()}


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
    dlse : bool
        True if a backward has a gradient for lse.
    bias_tangent, sink_tangent : bool
        True if a call of second order has a tangent of the bias, or of the sink.
    tangents : str
        The letters of q, k, v and o (for dO) whose tangents a call of second order has.
    dbias, dsink, dscore_args : bool
        True if a backward returns the gradient of the bias, of the sink, or of the arrays of `score_mod`.
    full_dbias : bool
        True if it returns that of a bias with an element for each score. Kernels that find it True store elements in
        the bias's dtype; others add up dbias in the accumulators' dtype, as the gradients of the arrays of `score_mod`.
    given_lse : bool
        True for the forward that computes lse again, in its own arithmetic, for a backward that is given one.
    kept_bias : int
        The most keys whose bias the blocks of a forward keep for several sequences that share it; 0 if they keep none.
    boxes : Boxes or None
        The boxes of tokens that a forward has as tiles, in the place of a mask function of neighborhoods.
    features : tuple of str
        The rows of `FEATURES` that a kernel must have. Features at their neutral values are left out.
    functions : tuple of BoundFunction
        The functions of the call.
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
    dlse: bool = False
    bias_tangent: bool = False
    sink_tangent: bool = False
    tangents: str = ""
    dbias: bool = False
    full_dbias: bool = False
    dsink: bool = False
    dscore_args: bool = False
    given_lse: bool = False
    kept_bias: int = 0
    boxes: Boxes | None = None
    features: tuple[str, ...] = field(init=False, repr=False, compare=False)
    functions: tuple[BoundFunction, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        used = tuple(name for name, feature in FEATURES.items() if feature.is_used(self))
        functions = tuple(one for one in (self.score_mod, self.mask_mod) if one is not None)
        object.__setattr__(self, "features", used)
        object.__setattr__(self, "functions", functions)

    @property
    def sums_dbias(self) -> bool:
        """True if scores share elements of the dbias that the call returns."""
        return self.dbias and not self.full_dbias

    def record(self, sizes: Sizes) -> dict[str, int | float]:
        """The numbers of the features in a kernel's record."""
        found: dict[str, int | float] = {}
        for name in self.features:
            found |= FEATURES[name].numbers(self, sizes)
        return found


class FeatureArray(NamedTuple):
    """An array that kernels read or write for a feature.

    Attributes
    ----------
    kind : str
        Kind of the pointer in the record: a key of the table in ``jit/params.py``.
    check : callable or None
        Takes the name, the array and the problem with its settings, and raises TypeError or ValueError if the array
        does not fit. None if the array is no keyword of `FeatureKeywords`, or if the feature's `check` includes it.
    axes : tuple of int, or None
        The axes of the scores (head, query, key) that the array's last axes stand for, counted from the last one; its
        other axes are leading ones. The array is broadcast over the scores, and the record has its strides along them,
        0 along repeated axes. None if the array is not broadcast.
    function : str
        The keyword of a function that does the same, for messages.
    """

    kind: str
    check: Callable[[str, Array, Problem], None] | None = None
    axes: tuple[int, ...] | None = (_HEADS, _QUERIES, _KEYS)
    function: str = ""

    def score_axes(self, rank: int) -> tuple[int, ...]:
        """The axes of the scores that an array of `rank` axes has, counted from the last one.

        Empty if it is not broadcast over the scores.
        """
        if self.axes is None:
            return ()
        further = rank - len(self.axes)
        return (*range(_HEADS - further, _HEADS), *self.axes) if further >= 0 else self.axes[-further:]


def _nothing(*_: object) -> dict[str, Any]:
    return {}


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
    completion : callable
        Takes the keywords, this feature's among them; returns those that it adds or replaces before any check.
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
    acts_on : str or None
        ``"scores"`` if kernels change, hide or drop single scores for it, ``"keys"`` if they hide whole keys,
        ``"tiles"`` if they choose what tiles of scores there are, None if nothing of these.
    has_derivative : bool
        True if scores are more than products and terms, so that gradients of products have a derivative as a factor.
    may_hide_rows : bool
        True if the values of its arrays or functions may hide all keys of a row.
    in_decode : bool
        True if `fa2cupy.decode` takes it.
    in_gather : str
        When ``scheme="gather"`` of several GPUs takes it: ``"always"``, ``"never"``, or ``"behind"`` if no query sees a
        key ahead of its own.
    is_positional : bool
        True if results depend on the positions of queries and keys in the sequence, besides the limits of the band.
    example : mapping or None
        Keywords of a call of one head and `EXAMPLE_ROWS` queries and keys with it, with shapes in place of arrays, from
        which `fa2cupy.precompile` plans; kernels do not depend on the values. None if it cannot be asked for by name.
    aliases : mapping of str
        Keywords of other libraries, and what to write instead.
    """

    flag: str
    is_used: Callable[[FeatureSettings], bool]
    check: Callable[[Mapping[str, Any], Problem], dict[str, Any]] = _nothing
    completion: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing
    arrays: Mapping[str, FeatureArray] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    numbers: Callable[[FeatureSettings, Sizes], dict[str, int | float]] = _nothing
    per_call: tuple[str, ...] = ()
    registers: int = 0
    acts_on: str | None = None
    has_derivative: bool = False
    may_hide_rows: bool = False
    in_decode: bool = False
    in_gather: str = "always"
    is_positional: bool = False
    example: Mapping[str, Any] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)


def _tangent(letter: str, flag: str) -> Feature:
    return Feature(flag, lambda settings: letter in settings.tangents)


def _window_limits(settings: FeatureSettings, sizes: Sizes) -> dict[str, int | float]:
    """The limits of the band. No limit becomes one that exceeds these lengths."""
    left, right = sizes.band
    return {
        "window_left": sizes.seqlen_k if left is None else min(left, sizes.seqlen_k),
        "window_right": sizes.seqlen_q if right is None else min(right, sizes.seqlen_q),
    }


def _cap_numbers(settings: FeatureSettings, sizes: Sizes) -> dict[str, int | float]:
    # The caller's function returns scores that are scaled already.
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
        "kScoreMod",
        lambda settings: settings.score_mod is not None,
        check=check_score_mod,
        registers=2,
        acts_on="scores",
        has_derivative=True,
        may_hide_rows=True,
        is_positional=True,
    ),
    "window": Feature(
        "kWindow",
        lambda settings: settings.window != (None, None),
        check=check_window,
        values={"window_left": "int", "window_right": "int"},
        numbers=_window_limits,
        acts_on="scores",
        in_decode=True,
        example={"window": (1, 1)},
        aliases={
            **dict.fromkeys(
                ("window_size", "local_window_size", "window_left"),
                "window=(left, right), with None for no limit where other libraries have -1",
            ),
            **dict.fromkeys(
                ("sliding_window", "sliding_window_size"),
                "window=(n - 1, 0) for the last n keys, the query's own among them",
            ),
        },
    ),
    "softcap": Feature(
        "kSoftcap",
        lambda settings: settings.softcap is not None,
        check=check_cap,
        values=dict.fromkeys(softcap_values(1.0, 1.0), "real"),
        numbers=_cap_numbers,
        registers=1,
        acts_on="scores",
        has_derivative=True,
        in_decode=True,
        example={"softcap": 1.0},
        aliases=dict.fromkeys(
            ("soft_cap", "logits_soft_cap", "logit_softcapping", "attn_logit_softcapping"),
            "softcap, with None for no cap where other libraries have 0",
        ),
    ),
    "alibi_slopes": Feature(
        "kAlibi",
        _has("alibi_slopes"),
        arrays={"alibi_slopes": FeatureArray("input_accum", check_slopes, (_HEADS,))},
        values={"alibi_scale": "real"},
        numbers=_slope_scale,
        registers=1,
        acts_on="scores",
        in_decode=True,
        in_gather="behind",
        is_positional=True,
        example={"alibi_slopes": (1,)},
        aliases=dict.fromkeys(("alibi", "alibi_bias", "slopes"), "alibi_slopes"),
    ),
    "bias": Feature(
        "kBias",
        _has("bias"),
        arrays={"bias": FeatureArray("input", check_broadcast, function="score_mod")},
        registers=2,
        acts_on="scores",
        may_hide_rows=True,
        example={"bias": (1, 1)},
        aliases=dict.fromkeys(("attn_bias", "attention_bias", "position_bias"), "bias"),
    ),
    # A bias in the accumulators' dtype.
    "wide_bias": Feature("kWideBias", lambda settings: settings.wide_bias, check=check_wide_bias, acts_on="scores"),
    # A bias that blocks keep on chip. Plans make the series of sequences that share it.
    "kept_bias": Feature(
        "kKeepsBias",
        lambda settings: settings.kept_bias > 0,
        values=dict.fromkeys(("sharers", "series_length", "num_series"), "int"),
    ),
    # Tiles that are boxes of tokens. Plans choose them in the place of a function of neighborhoods and its map.
    "boxes": Feature("kBoxes", lambda settings: settings.boxes is not None, values={"neighborhood": "neighborhood"}),
    "dbias": Feature("kDbias", lambda settings: settings.dbias, arrays={"dbias": FeatureArray("output_accum")}),
    "full_dbias": Feature("kFullDbias", lambda settings: settings.full_dbias),
    "bias_tangent": Feature(
        "kBiasTangent", lambda settings: settings.bias_tangent, arrays={"bias_tangent": FeatureArray("input")}
    ),
    "dscore_args": Feature("kDscoreArgs", lambda settings: settings.dscore_args),
    "query_tangent": _tangent("q", "kQueryTangent"),
    "key_tangent": _tangent("k", "kKeyTangent"),
    "value_tangent": _tangent("v", "kValueTangent"),
    "dout_tangent": _tangent("o", "kDoutTangent"),
    "mask": Feature(
        "kMask",
        _has("mask"),
        arrays={"mask": FeatureArray("input_bool", check_broadcast, function="mask_mod")},
        registers=2,
        acts_on="scores",
        may_hide_rows=True,
        example={"mask": (1, 1)},
        aliases=dict.fromkeys(
            ("attn_mask", "attention_mask"),
            "mask for bools, True where a key is visible (key_padding_mask if their shape is (batch, seqlen_k)), "
            "or bias for numbers that are added to the scores",
        ),
    ),
    "key_padding_mask": Feature(
        "kKeyPadding",
        _has("key_padding_mask"),
        arrays={"key_padding_mask": FeatureArray("input_bool", check_key_padding, (_KEYS,))},
        acts_on="keys",
        may_hide_rows=True,
        example={"key_padding_mask": (1, EXAMPLE_ROWS)},
        aliases={
            **dict.fromkeys(("padding_mask", "key_mask"), "key_padding_mask, of bools, True where a key is visible"),
            **dict.fromkeys(
                ("query_seq_lengths", "key_value_seq_lengths", "seqused_k"),
                "key_padding_mask=numpy.arange(seqlen_k) < lengths[:, None], or cu_seqlens_q and cu_seqlens_k on "
                "packed arrays",
            ),
        },
    ),
    "mask_mod": Feature(
        "kMaskMod",
        lambda settings: settings.mask_mod is not None,
        check=check_mask_mod,
        registers=2,
        acts_on="scores",
        may_hide_rows=True,
        is_positional=True,
    ),
    # Plans make the lists for the tiles of each kernel; their strides depend on these.
    "block_mask": Feature(
        "kBlockMask",
        lambda settings: settings.block_mask is not None,
        check=check_block_mask,
        completion=function_of_map,
        arrays=dict.fromkeys((KEY_LISTS, QUERY_LISTS), FeatureArray("input_int", axes=None)),
        values=dict.fromkeys(LIST_STRIDES, "int"),
        acts_on="tiles",
        may_hide_rows=True,
        in_gather="never",
        example={},  # a map depends on `mask_mod`, so that plans make it
    ),
    # The intervals of a map, in the place of `mask_mod`. Plans decide it for each kernel by the side that it owns.
    "intervals": Feature(
        "kIntervals",
        lambda settings: settings.block_mask is not None and any(settings.block_mask.intervals),
        arrays=dict.fromkeys((ROW_INTERVALS, COLUMN_INTERVALS), FeatureArray("input_int", axes=None)),
        values=dict.fromkeys(INTERVAL_STRIDES, "int"),
        acts_on="scores",
        may_hide_rows=True,
        in_gather="never",
    ),
    "given_lse": Feature(
        "kGivenLse",
        lambda settings: settings.given_lse,
        arrays={"given_lse": FeatureArray("input_accum", axes=None)},
    ),
    "sink": Feature(
        "kSink",
        _has("sink"),
        arrays={"sink": FeatureArray("input_accum", check_sink, (_HEADS,))},
        in_decode=True,
        example={"sink": (1,)},
        aliases=dict.fromkeys(("s_aux", "sinks", "learnable_sink", "attention_sink", "attention_sinks"), "sink"),
    ),
    "sink_tangent": Feature(
        "kSinkTangent",
        lambda settings: settings.sink_tangent,
        arrays={"sink_tangent": FeatureArray("input_accum", axes=(_HEADS,))},
    ),
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
        acts_on="scores",
        is_positional=True,
        example={"dropout_p": 0.5, "seed": 0},
        aliases={
            **dict.fromkeys(
                ("dropout", "dropout_rate", "attn_dropout", "attention_dropout"), "dropout_p, together with seed"
            ),
            **dict.fromkeys(("dropout_seed", "philox_seed", "rng_state", "generator"), "seed, an int"),
        },
    ),
    "dlse": Feature("kDlse", lambda settings: settings.dlse, arrays={"dlse": FeatureArray("input_accum", axes=None)}),
    "cu_seqlens": Feature(
        "kVarlen",
        lambda settings: settings.num_sequences is not None,
        check=check_packed,
        arrays=dict.fromkeys(OFFSETS, FeatureArray("input_int", axes=None)),
        values=dict.fromkeys(("max_seqlen_q", "max_seqlen_k", "total_q", "total_k", "num_sequences"), "int"),
        numbers=_packed_numbers,
        acts_on="tiles",
        in_gather="never",
        example=dict.fromkeys(OFFSETS, (2,)),
        aliases={
            "cu_seqlens": "cu_seqlens_q and cu_seqlens_k",
            **dict.fromkeys(("max_seqlen", "max_seq_len"), "max_seqlen_q and max_seqlen_k"),
        },
    ),
}

NO_SETTINGS = FeatureSettings()

#: The arrays of all features, by name.
ARRAYS = {name: array for feature in FEATURES.values() for name, array in feature.arrays.items()}
#: What keywords add to calls that have them.
_COMPLETIONS = {name: row.completion for name, row in FEATURES.items() if row.completion is not _nothing}
#: The keywords that are arrays.
ARRAY_KEYWORDS = tuple(name for name in ARRAYS if name in FeatureKeywords.__annotations__)


def complete(keywords: dict[str, Any]) -> None:
    """Adds to the keywords of a call what some of them imply: see `Feature.completion`."""
    for name, completion in _COMPLETIONS.items():
        if name in keywords:
            keywords.update(completion(keywords))


def feature_arrays(keywords: Mapping[str, Any]) -> dict[str, Array]:
    """The arrays among the keywords of features, without those that are None."""
    return {name: keywords[name] for name in ARRAY_KEYWORDS if keywords.get(name) is not None}


def features_in_registers(least: int) -> tuple[str, ...]:
    """The features whose `Feature.registers` is at least this."""
    return tuple(name for name, feature in FEATURES.items() if feature.registers >= least)


def features_of_scores(features: Iterable[str]) -> tuple[str, ...]:
    """Those of the features for which kernels change, hide or drop single scores."""
    return tuple(name for name in features if FEATURES[name].acts_on == "scores")


def changes_of_scores(features: Iterable[str]) -> tuple[str, ...]:
    """The same without those that only hide keys, by an array."""
    kinds = {name: {array.kind for array in FEATURES[name].arrays.values()} for name in features_of_scores(features)}
    return tuple(name for name, found in kinds.items() if found != {"input_bool"})
