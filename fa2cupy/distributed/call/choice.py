"""Which scheme a call takes, what it refuses, and into how many groups its heads are divided.

heads     each rank gets all rows of its share of the heads (all-to-all), makes one call, and sends the results back
gather    each rank gets the keys that its queries see (all-gather), and makes a call for each of its two chunks
hybrid    heads among the ranks of a host, and gather among those of all hosts that have the same heads

Parts of arrays travel by messages; in ``heads`` and ``gather`` on GPUs of one host, by copies to each other's memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import UnsupportedProblemError
from ...problem.arguments import check_int
from ...problem.attention import AttentionProblem
from ...problem.features import FEATURES
from .orders import RowOrder

__all__ = [
    "SCHEMES",
    "check_capture",
    "check_scheme",
    "check_second_order",
    "groups_of",
    "is_positional",
    "neighbours",
    "ranks_with_heads",
    "scheme_of",
]

SCHEMES = ("heads", "gather", "hybrid")

#: From this number of keys on, there are several groups: messages of one travel while another one is computed.
_MANY_KEYS = 65536
_DROPOUT_BLOCK = 16


def scheme_of(scheme: object, problem: AttentionProblem, size: int, ranks_per_host: int) -> str:
    """The caller's scheme, or for None the one that the number of heads and the features allow."""
    if scheme is None:
        several_hosts = 1 < ranks_per_host < size
        if several_hosts and _divides(problem, ranks_per_host) and _not_in_gather(problem) is None:
            return "hybrid"
        return "heads" if _divides(problem, size) else "gather"
    if scheme == "ring":
        raise ValueError("scheme: there is no 'ring' any more; take 'gather', which is faster and needs less memory")
    if scheme not in SCHEMES:
        raise ValueError(f"scheme: expected None, {', '.join(map(repr, SCHEMES))}, got {scheme!r}")
    return str(scheme)


def check_second_order(call: str, scheme: object, problem: AttentionProblem, size: int) -> str:
    """The scheme of a call of second order: ``"heads"``, or an error."""
    call = call.removeprefix("output_")
    if scheme not in (None, "heads"):
        scheme_of(scheme, problem, size, size)
        raise UnsupportedProblemError(f"scheme: {call} is for 'heads' alone, got {scheme!r}")
    if not _divides(problem, size):
        raise UnsupportedProblemError(
            f"k: {call} is for scheme='heads' alone, which needs a number of heads of k that is a multiple of the "
            f"{size} ranks, got {problem.num_heads_kv}"
        )
    return "heads"


def ranks_with_heads(scheme: str, size: int, ranks_per_host: int) -> int:
    """The number of ranks that the heads are divided among."""
    return {"heads": size, "hybrid": ranks_per_host}.get(scheme, 1)


def _divides(problem: AttentionProblem, ranks: int) -> bool:
    return problem.num_heads_kv % ranks == 0


def check_scheme(scheme: str, problem: AttentionProblem, queries: RowOrder, ranks: int, on_gpu: bool) -> None:
    """Raises unless the scheme can make the call. `ranks` is the number of ranks that the heads are divided among."""
    if queries.size == 1:
        return
    if not _divides(problem, ranks):
        where = "" if scheme == "heads" else " of a host"
        raise ValueError(
            f"k: scheme={scheme!r} needs a number of heads that is a multiple of the {ranks} ranks{where}, got "
            f"{problem.num_heads_kv}; take scheme='gather'"
        )
    if scheme in ("gather", "hybrid"):
        rows = queries if scheme == "gather" else queries.of_hosts(ranks)
        _check_gather(problem, rows, on_gpu, queries.size, scheme)


def _not_in_gather(problem: AttentionProblem) -> str | None:
    """A feature that ``"gather"`` cannot take; None if there is none."""
    refused = ("never", "behind") if problem.band[1] != 0 else ("never",)
    return next((name for when in refused for name in problem.features if FEATURES[name].in_gather == when), None)


def _check_gather(problem: AttentionProblem, queries: RowOrder, on_gpu: bool, size: int, scheme: str) -> None:
    refused = _not_in_gather(problem)
    if refused is not None and FEATURES[refused].in_gather == "behind":
        raise UnsupportedProblemError(
            f"{refused}: scheme={scheme!r} takes them with causal=True or window=(left, 0); take scheme='heads'"
        )
    if refused is not None:
        keyword = "cu_seqlens_q" if problem.is_packed else refused
        raise UnsupportedProblemError(
            f"{keyword}: it is for scheme='heads' alone, which needs a number of heads of k that is a multiple of "
            f"the {size} ranks, got {problem.num_heads_kv}"
        )
    rows = queries.chunks(0)[0].whole.stop
    if on_gpu and problem.settings.dropout_p and rows % _DROPOUT_BLOCK:
        multiple = _DROPOUT_BLOCK * queries.seqlen // rows
        raise UnsupportedProblemError(
            f"dropout_p: scheme={scheme!r} takes chunks of a multiple of {_DROPOUT_BLOCK} rows on a GPU, got {rows}; "
            f"pad the sequence to a multiple of {multiple}, or take scheme='heads'"
        )


def check_capture(keywords: Mapping[str, Any]) -> None:
    """Raises unless a CUDA graph can capture a call with these features."""
    for name in ("score_mod", "mask_mod"):
        if name in keywords:
            raise UnsupportedProblemError(f"{name}: calls on several GPUs cannot be captured into a CUDA graph with it")


def is_positional(problem: AttentionProblem) -> bool:
    """True if results depend on the positions of queries, so that neighbouring chunks cannot be one call."""
    return problem.band != (None, None) or any(FEATURES[name].is_positional for name in problem.features)


def groups_of(
    scheme: str, problem: AttentionProblem, ranks: int, given: object, has_gradients: bool
) -> tuple[int, ...]:
    """The K/V heads of each group of a rank: in as many groups as the caller wants, or as were fastest when measured.

    If the call returns gradients of the arrays of features, there is one group, because they are summed over heads.
    """
    heads = problem.num_heads_kv // ranks
    count = None if given is None else check_int("head_groups", given, "None or an int")
    if count is not None and (count < 1 or heads % count):
        raise ValueError(f"head_groups: expected a divisor of the {heads} K/V heads of a rank, got {count}")
    if has_gradients:
        count = 1
    elif count is None:
        wanted = 1 if problem.seqlen_k < _MANY_KEYS else 2 if scheme == "heads" else 4
        count = next(count for count in range(wanted, 0, -1) if heads % count == 0)
    return (heads // count,) * count


def neighbours(sizes: Sequence[int]) -> tuple[slice, ...]:
    """The heads of neighbouring groups of these sizes."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return tuple(slice(*pair) for pair in itertools.pairwise(ends))
