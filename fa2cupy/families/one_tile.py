"""What the kernels of ``one_tile`` take: their blocks have all keys of a sequence."""

from __future__ import annotations

from collections.abc import Mapping

from ..problem.attention import AttentionProblem
from ..problem.features import FEATURES
from ..problem.strides import AnyStrides, atomics_of
from .family import Family
from .operations import OPERATIONS

__all__ = ["why_not_one_tile"]


def why_not_one_tile(
    family: Family, operation: str, problem: AttentionProblem, strides: Mapping[str, AnyStrides]
) -> str | None:
    """The reason why no tile of a kernel has all keys of a sequence, if it must; None if one has."""
    row = OPERATIONS[operation]
    if not row.holds_keys:
        return None
    others = [name for name in OPERATIONS["forward"].features if name in problem.features and FEATURES[name].acts_on]
    lacking = [name for name in others if name not in row.features]
    if lacking:
        return f"a block does not have all keys with {', '.join(lacking)}"
    tiles = [one.tile for one in family.tiles[operation]]
    most = max(tile.b_c for tile in tiles)
    if problem.seqlen_k > most:
        return f"its {problem.seqlen_k} keys are more than the {most} of a tile"
    if row.owns == "keys":
        return None
    if "dbias" not in strides or not atomics_of(strides["dbias"], problem.score_shape):
        return "the bias does not have an element for each query and key"
    if problem.heads_per_group > 1:
        return "several query heads share keys"
    most = max(tile.b_r for tile in tiles)
    return f"its {problem.seqlen_q} queries are more than the {most} of a tile" if problem.seqlen_q > most else None
