"""Which calls the ranks make by writing each other's memory, and into how many groups their heads are divided."""

from __future__ import annotations

from .parts import over_scores
from .requests import Request

__all__ = ["groups_of_copies", "takes"]

_SCHEMES = ("heads", "gather")
_RESULTS = ("o", "lse", "dq", "dk", "dv")
#: Most groups: the first group's messages and the last one's results have no kernel to hide behind.
_MOST_GROUPS = 4
#: Rows of all query heads of a group, from which on its kernels are about as fast as those of all heads.
_ROWS_OF_GROUP = 1 << 17
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


def groups_of_copies(request: Request) -> int:
    """Groups of a rank's K/V heads: those of the caller, or as many as leave each enough work."""
    if request.head_groups is not None or _has_gradients(request):
        return request.groups
    problem, size = request.problem, request.queries.size
    heads_kv = problem.num_heads_kv // (size if request.scheme == "heads" else 1)
    rows = problem.num_heads * problem.batch * problem.seqlen_q // size
    most = min(_MOST_GROUPS, max(1, rows // _ROWS_OF_GROUP))
    return next(count for count in range(most, 0, -1) if heads_kv % count == 0)


def _has_gradients(request: Request) -> bool:
    """True if gradients of features are asked for, which are summed over heads, in one group."""
    return any(result.name not in _RESULTS for result in request.results)
