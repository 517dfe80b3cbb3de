"""Which scheme a call takes, what it refuses, and into how many groups its heads are divided.

heads     each rank gets all rows of its share of the heads (all-to-all), makes one call, and sends the results back
gather    each rank gets the keys that its queries see (all-gather), and makes a call for each of its two chunks
ring      each rank meets the keys of one other rank at a time, and merges the results in float32
"""

from __future__ import annotations

import numbers

from ..errors import UnsupportedProblemError
from ..problem.attention import AttentionProblem
from .orders import RowOrder

__all__ = ["SCHEMES", "check_scheme", "groups_of", "is_positional", "scheme_of"]

SCHEMES = ("heads", "gather", "ring")

#: The features that need neither positions nor arrays of the whole sequence.
_OF_RING = ("softcap",)
#: The features that depend on the positions of queries and keys, besides the limits of windows.
_POSITIONAL = ("alibi_slopes", "dropout_p", "score_mod", "mask_mod")
#: Keys from which on messages of one group pass while another group is computed.
_MANY_KEYS = 65536
_DROPOUT_BLOCK = 16


def scheme_of(scheme: object, problem: AttentionProblem, size: int) -> str:
    """The caller's scheme, or for None the one that the number of heads allows."""
    if scheme is None:
        return "heads" if _divides(problem, size) else "gather"
    if scheme not in SCHEMES:
        raise ValueError(f"scheme: expected None, {', '.join(map(repr, SCHEMES))}, got {scheme!r}")
    return str(scheme)


def _divides(problem: AttentionProblem, size: int) -> bool:
    return problem.num_heads_kv % size == 0


def check_scheme(scheme: str, problem: AttentionProblem, queries: RowOrder, on_gpu: bool) -> None:
    """Raises unless the scheme can make the call."""
    size = queries.size
    if size == 1:
        return
    if scheme == "heads":
        if not _divides(problem, size):
            raise ValueError(
                f"k: scheme='heads' needs a number of heads that is a multiple of the {size} ranks, got "
                f"{problem.num_heads_kv}; take scheme='gather'"
            )
    elif scheme == "gather":
        _check_gather(problem, queries, on_gpu)
    else:
        _check_ring(problem)


def _check_gather(problem: AttentionProblem, queries: RowOrder, on_gpu: bool) -> None:
    settings = problem.settings
    for name, is_given in (("cu_seqlens_q", problem.is_packed), ("block_mask", settings.block_mask is not None)):
        if is_given:
            raise UnsupportedProblemError(
                f"{name}: it is for scheme='heads' alone, which needs a number of heads of k that is a multiple of "
                f"the {queries.size} ranks, got {problem.num_heads_kv}"
            )
    if "alibi_slopes" in settings.arrays and problem.band[1] != 0:
        raise UnsupportedProblemError(
            "alibi_slopes: scheme='gather' takes them with causal=True or window=(left, 0); take scheme='heads'"
        )
    rows = queries.chunks(0)[0].whole.stop
    if on_gpu and settings.dropout_p and rows % _DROPOUT_BLOCK:
        multiple = _DROPOUT_BLOCK * queries.seqlen // rows
        raise UnsupportedProblemError(
            f"dropout_p: scheme='gather' takes chunks of a multiple of {_DROPOUT_BLOCK} rows on a GPU, got {rows}; "
            f"pad the sequence to a multiple of {multiple}, or take scheme='heads'"
        )


def _check_ring(problem: AttentionProblem) -> None:
    refused = [name for name in problem.features if name not in _OF_RING]
    if refused:
        raise UnsupportedProblemError(
            f"{refused[0]}: scheme='ring' takes causal, softmax_scale and softcap; take 'heads' or 'gather'"
        )
    if problem.causal and problem.seqlen_q != problem.seqlen_k:
        raise UnsupportedProblemError(
            f"causal: scheme='ring' takes as many queries as keys, got {problem.seqlen_q} and {problem.seqlen_k}; "
            "take 'heads' or 'gather'"
        )


def is_positional(problem: AttentionProblem) -> bool:
    """True if results depend on the positions of queries, so that neighbouring chunks cannot be one call."""
    return problem.band != (None, None) or any(name in problem.features for name in _POSITIONAL)


def groups_of(scheme: str, problem: AttentionProblem, size: int, given: object, has_extras: bool) -> int:
    """Groups of K/V heads: those of the caller, or as many as were fastest in the measurements of the README.

    Gradients of the arrays of features are summed over heads, in one group.
    """
    heads = problem.num_heads_kv // size if scheme == "heads" else problem.num_heads_kv
    if given is not None:
        if isinstance(given, bool) or not isinstance(given, numbers.Integral):
            raise TypeError(f"head_groups: expected None or an int, got {type(given).__name__}")
        if int(given) < 1 or heads % int(given):
            raise ValueError(f"head_groups: expected a divisor of the {heads} K/V heads of a rank, got {given}")
        if scheme == "ring" and int(given) > 1:
            raise ValueError("head_groups: scheme='ring' has no groups of heads")
    if has_extras or scheme == "ring":
        return 1
    if given is not None:
        return int(given)
    wanted = 1 if problem.seqlen_k < _MANY_KEYS else 2 if scheme == "heads" else 4
    return next(count for count in range(wanted, 0, -1) if heads % count == 0) if heads else 1
