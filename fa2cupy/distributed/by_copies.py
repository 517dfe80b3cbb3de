"""Which calls the ranks make by writing each other's memory, and into how many groups their heads are divided."""

from __future__ import annotations

from .parts import over_scores
from .requests import Request

__all__ = ["groups_of_copies", "takes"]

_SCHEMES = ("heads", "gather")
_RESULTS = ("o", "lse", "dq", "dk", "dv")
#: Rows of all query heads of a rank, from which on there are so many groups between the first and the last one. In
#: shorter calls the kernels of a part of the heads are slow. In longer ones memory counts, which is that of two groups.
_BETWEEN = ((1 << 20, 3), (1 << 18, 1))
#: Most matrices of an array: the copy of each takes a copy engine at least 5 us.
_MOST_MATRICES = 64


def takes(request: Request) -> bool:
    """True if all arrays that travel are few matrices.

    In ``"heads"``, arrays over the scores and gradients of features travel, too: by messages.
    """
    problem = request.problem
    matrices = problem.batch * (problem.num_heads if problem.layout == "bhsd" else 1)
    if request.scheme not in _SCHEMES or matrices > _MOST_MATRICES:
        return False
    return request.scheme == "gather" or not (_has_gradients(request) or over_scores(request.keywords))


def groups_of_copies(request: Request) -> tuple[int, ...]:
    """The K/V heads of each group of a rank, in groups of the caller, or with small ones at both ends.

    The first group's messages and the last one's results have no kernel to hide behind.
    """
    if request.head_groups is not None or _has_gradients(request):
        return request.groups
    problem, size = request.problem, request.queries.size
    heads = problem.num_heads_kv // (size if request.scheme == "heads" else 1)
    rows = problem.num_heads * problem.batch * problem.seqlen_q // size
    between = next((count for least, count in _BETWEEN if rows >= least), None)
    return (heads,) if between is None else _with_small_ends(heads, between)


def _with_small_ends(heads: int, between: int) -> tuple[int, ...]:
    """The numbers of heads of groups: an eighth in each of both ends, and others of about one size between these."""
    end = max(1, heads // 8)
    rest = heads - 2 * end
    if rest <= 0:
        return (1,) * heads
    count = min(between, rest)
    return (end, *(rest // count + (number < rest % count) for number in range(count)), end)


def _has_gradients(request: Request) -> bool:
    """True if gradients of features are asked for, which are summed over heads, in one group."""
    return any(result.name not in _RESULTS for result in request.results)
