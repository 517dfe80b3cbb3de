"""What a call asks for besides plain attention, and what each such feature needs of a kernel.

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
1. A keyword in `FeatureOptions` and its check in ``feature_checks.py``, whose result is a field of `Features` or a
   name in `Features.arrays`. The public functions, the references and `fa2cupy.testing` hand keywords through and stay.
   Its name in ``choices.py`` and an example of it in ``call_specs.py``, so that its kernels can be compiled ahead.
2. A row in `KERNEL_NEEDS`: the flag that the compiler must know (``spec.py`` puts it into the key and ``spec.cuh.j2``
   into `Spec`), the arrays and numbers that only the launch knows (``params.py`` appends them to the record, and a
   kernel without the flag keeps its record, and so its cubin, as it is).
3. The formula in ``formulas.py``, whole, and in ``cpu_scores.py``, on a tile. Both keep to the order above.
4. In CUDA one shared header, on the fragment contract: ``tile_range.cuh`` if pairs of tiles drop out, ``mask.cuh`` if
   pairs of elements do, ``score_mod.cuh`` if scores change, ``online_softmax.cuh`` if the sum does, ``sequence.cuh`` if
   a block works on other rows. Main loops stay. Without the flag PTX must stay, too: what the record has of a feature
   is named in templates on the record alone, so that a kernel without it cannot touch it.
5. The feature's name in `Family.features` of the families whose kernels have it. Until then they refuse it by name.

A score function of the user's own is such a row whose flag carries the text of two device functions, the score and its
derivative; it sits where softcap sits, and `HeadTerms.apply` gives the derivative back as it does for softcap. A
block-sparse map is a row with two arrays, the offsets and the numbers of the tiles of each row of tiles: it changes
`Head.key_tiles` and `Head.query_tiles` here and ``tile_range.cuh`` there, and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

from .philox import dropout_scale, dropout_threshold
from .softcap import softcap_values

__all__ = [
    "ARRAY_FEATURES", "KERNEL_NEEDS", "NO_FEATURES", "OFFSETS", "FeatureOptions", "Features", "KernelNeeds",
    "features_in_registers",
]  # fmt: skip


class FeatureOptions(TypedDict, total=False):
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


#: Keywords that are arrays.
ARRAY_FEATURES = ("alibi_slopes", "bias", "mask", "key_padding_mask", "sink", "cu_seqlens_q", "cu_seqlens_k")

#: Those of them that say where packed sequences start.
OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")


class KernelNeeds(NamedTuple):
    """What a kernel needs for a feature.

    Attributes
    ----------
    flag : str
        The constant of `Spec` in C++, false in a kernel without the feature.
    arrays : tuple of str
        Pointers of the record. Those that are broadcast over scores come with four strides, 0 where they repeat.
    values : tuple of str
        Numbers of the record, as `Features.record` gives them.
    per_call : tuple of str
        64-bit numbers that are new in each call, and travel with the pointers.
    registers : int
        How much of a thread's registers it takes in the inner loop of a backward: 0 none, 1 some, 2 many.
    """

    flag: str
    arrays: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    per_call: tuple[str, ...] = ()
    registers: int = 0


KERNEL_NEEDS = {
    "window": KernelNeeds("kWindow", (), ("window_left", "window_right")),
    "softcap": KernelNeeds("kSoftcap", (), tuple(softcap_values(1.0, 1.0)), registers=1),
    "alibi_slopes": KernelNeeds("kAlibi", ("alibi_slopes",), ("alibi_scale",), registers=1),
    "bias": KernelNeeds("kBias", ("bias",), registers=2),
    "wide_bias": KernelNeeds("kWideBias"),
    "dbias": KernelNeeds("kDbias", ("dbias_accum",)),
    "mask": KernelNeeds("kMask", ("mask",), registers=2),
    "key_padding_mask": KernelNeeds("kKeyPadding", ("key_padding_mask",)),
    "sink": KernelNeeds("kSink", ("sink",)),
    "dropout_p": KernelNeeds("kDropout", (), ("dropout_threshold", "dropout_scale"), ("seed",), registers=2),
    "dlse": KernelNeeds("kDlse", ("dlse",)),
    "cu_seqlens": KernelNeeds(
        "kVarlen",
        ("cu_seqlens_q", "cu_seqlens_k"),
        ("max_seqlen_q", "max_seqlen_k", "total_q", "total_k", "num_sequences"),
    ),
}


def features_in_registers(least: int) -> tuple[str, ...]:
    """The features that take at least so much of a thread's registers, as `KernelNeeds.registers` counts."""
    return tuple(name for name, need in KERNEL_NEEDS.items() if need.registers >= least)


@dataclass(frozen=True)
class Features:
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
        Which of `ARRAY_FEATURES` the call has.
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
    def needs(self) -> tuple[str, ...]:
        """Keys of `KERNEL_NEEDS`: what a kernel must have. A feature at its neutral value needs nothing."""
        used = {
            **dict.fromkeys(self.arrays, True),
            "wide_bias": self.wide_bias,
            "window": self.window != (None, None),
            "softcap": self.softcap is not None,
            "dropout_p": self.dropout_p > 0,
            "cu_seqlens": self.num_sequences is not None,
        }
        return tuple(name for name in KERNEL_NEEDS if used.get(name))

    @property
    def flags(self) -> tuple[str, ...]:
        """The constants that a kernel is compiled with."""
        return tuple(KERNEL_NEEDS[name].flag for name in self.needs)

    def record(
        self, seqlen_q: int, seqlen_k: int, band: tuple[int | None, int | None], softmax_scale: float
    ) -> dict[str, int | float]:
        """The numbers that travel in the record. No limit of the band is one that these lengths do not reach."""
        left, right = band
        capping = {} if self.softcap is None else softcap_values(self.softcap, softmax_scale)
        # From slopes to a kernel's own units of scores, which it has where a positive factor makes scores of them.
        base2 = capping.get("capped_log2", softmax_scale * math.log2(math.e))
        available = {
            **capping,
            "window_left": seqlen_k if left is None else min(left, seqlen_k),
            "window_right": seqlen_q if right is None else min(right, seqlen_q),
            "alibi_scale": math.log2(math.e) / base2 if base2 > 0 else 0.0,
            "dropout_threshold": dropout_threshold(self.dropout_p),
            "dropout_scale": dropout_scale(self.dropout_p),
            "max_seqlen_q": min(self.max_seqlen_q, seqlen_q),
            "max_seqlen_k": min(self.max_seqlen_k, seqlen_k),
            "total_q": seqlen_q,
            "total_k": seqlen_k,
            "num_sequences": self.num_sequences,
        }
        return {name: available[name] for need in self.needs for name in KERNEL_NEEDS[need].values}


NO_FEATURES = Features()
