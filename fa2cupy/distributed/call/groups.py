"""Which calls the ranks make by writing each other's memory, and into how many groups their heads are divided there."""

from __future__ import annotations

import itertools
from dataclasses import replace

from .choice import neighbours
from .parts import over_scores
from .requests import OF_FEATURES, Request

__all__ = ["groups_of_copies", "of_copies", "query_groups", "takes_copies"]

#: The schemes whose ranks write each other's memory.
_BY_COPIES = ("heads", "gather")
#: Bounds of the rows of all query heads of a rank. With fewer rows than the first, there is one group, because kernels
#: of a part of the heads are slow. From the second on, the groups of ``"gather"`` have one size, because its memory is
#: that of two groups, and the moves that no kernel hides take a small part of the time.
_FEW_ROWS, _MANY_ROWS = 1 << 17, 1 << 20
#: The least rows of a group's query heads in one call: as many tiles as a large GPU has multiprocessors.
_LEAST_ROWS = 1 << 14
#: A number of keys, times the query heads of a K/V head, for each other rank. From it on, kernels of ``"gather"`` take
#: so much longer than the moves of their keys that small groups cost more than they hide.
_LONG_KERNELS = 1 << 16
#: Most matrices of an array that travels by copies: each takes a copy engine at least 5 us.
_MOST_MATRICES = 64
#: Most bytes of biases, masks and dbias that other ranks write to a rank: what they write for each other stays
#: allocated as long as the communicator, and memory of messages goes back to CuPy's pool.
_MOST_BYTES_OF_SCORES = 1 << 30


def takes_copies(request: Request) -> bool:
    """True if the ranks may write each other's memory: if all arrays that travel are few matrices, one per sequence."""
    problem = request.problem
    matrices = problem.batch * (problem.num_heads if problem.layout == "bhsd" else 1)
    is_small = matrices <= _MOST_MATRICES and _bytes_of_scores(request) <= _MOST_BYTES_OF_SCORES
    return request.scheme in _BY_COPIES and is_small


def _bytes_of_scores(request: Request) -> int:
    """The bytes of biases and masks that travel to a rank in ``"heads"``, and of the rows of dbias that come back."""
    if request.scheme != "heads" or request.problem.is_packed:
        return 0
    returned = {OF_FEATURES.get(result.name) for result in request.results}
    return sum(
        array.nbytes * (1 if array.shape[1] > 1 else request.queries.size) * (1 + (name in returned))
        for name, array in over_scores(request.keywords).items()
        if array.shape[2] > 1
    )


def of_copies(request: Request) -> Request:
    """The same call in the groups of heads that are fastest by copies."""
    request = replace(request, groups=groups_of_copies(request))
    if request.scheme == "heads" and len(request.results) == 2:
        request = replace(request, query_groups=query_groups(request))
    return request


def groups_of_copies(request: Request) -> tuple[int, ...]:
    """The K/V heads of each group of a rank: those of the caller's groups, or as was fastest when measured.

    The first group's messages and the last one's results have no kernel to hide behind: where they take long beside
    kernels, small groups are at both ends of a large one.
    """
    problem, size = request.problem, request.queries.size
    all_rows = problem.num_heads * problem.batch * problem.seqlen_q // size
    is_long = request.scheme == "gather" and all_rows >= _MANY_ROWS
    if request.head_groups is not None or _has_gradients(request) or is_long:
        return request.groups
    if request.scheme == "heads":
        heads, rows = problem.num_heads_kv // size, problem.seqlen_q
    else:
        heads, rows = problem.num_heads_kv, request.queries.local // len(request.queries.chunks(0))
    if all_rows < _FEW_ROWS or heads == 1:
        return (heads,)
    if request.scheme == "gather" and problem.heads_per_group * problem.seqlen_k >= _LONG_KERNELS * (size - 1):
        return (-(-heads // 2), heads // 2)
    return _with_small_ends(heads, problem.batch * problem.heads_per_group * rows)


def query_groups(request: Request) -> tuple[slice, ...]:
    """The query heads of each group of a forward of ``"heads"``, among those of a rank.

    If the request has one or two groups, the query heads of a K/V head are divided, too, so that the first and the last
    group have about an eighth of the query heads. A backward cannot do so, because it sums over the query heads of a
    K/V head.
    """
    problem, groups, ratio = request.problem, request.groups, request.problem.heads_per_group
    heads, rows = ratio * sum(groups), problem.batch * problem.seqlen_q
    if request.head_groups is not None or len(groups) > 2 or heads * rows < _FEW_ROWS:
        return neighbours([ratio * group for group in groups])
    return tuple(part for group in neighbours(_with_small_ends(heads, rows)) for part in _of_kv_heads(group, ratio))


def _of_kv_heads(heads: slice, ratio: int) -> list[slice]:
    """Divides neighbouring query heads into all those of some K/V heads, and some of those of a K/V head."""
    first = min(-(-heads.start // ratio) * ratio, heads.stop)
    last = max(first, heads.stop // ratio * ratio)
    return [slice(*pair) for pair in itertools.pairwise(sorted({heads.start, first, last, heads.stop}))]


def _with_small_ends(heads: int, rows: int) -> tuple[int, ...]:
    """The heads of each group: about an eighth at each end, but not too few rows. A head has `rows`."""
    end = max(-(-heads // 8), -(-_LEAST_ROWS // rows))
    rest = heads - 2 * end
    return (heads,) if rest < 0 else (end, rest, end) if rest else (end, end)


def _has_gradients(request: Request) -> bool:
    """True if gradients of features are asked for, which are summed over heads, in one group."""
    return len(request.results) > request.with_rows
