"""Which calls the ranks make by writing each other's memory, and into how many groups their heads are divided."""

from __future__ import annotations

from .parts import over_scores
from .requests import Request

__all__ = ["groups_of_copies", "takes"]

_SCHEMES = ("heads", "gather")
_RESULTS = ("o", "lse", "dq", "dk", "dv")
#: Groups, and the rows of all query heads of a rank from which on their kernels are about as fast as one of all heads.
#: The first group's messages and the last one's results have no kernel to hide behind. In ``"gather"`` a group has two
#: kernels, and each of its shares is summed by one more.
_GROUPS = {"heads": ((4, 1 << 19), (3, 3 << 17), (2, 1 << 18)), "gather": ((4, 1 << 20), (2, 1 << 18))}
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
    possible = (count for count, least in _GROUPS[request.scheme] if rows >= least and heads_kv % count == 0)
    return next(possible, 1)


def _has_gradients(request: Request) -> bool:
    """True if gradients of features are asked for, which are summed over heads, in one group."""
    return any(result.name not in _RESULTS for result in request.results)
