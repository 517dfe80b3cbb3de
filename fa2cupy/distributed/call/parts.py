"""The keywords of features for a part of the whole problem: some heads, neighbouring queries, and the first keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ...problem.array_types import Array
from ...problem.attention import AttentionProblem
from ...problem.block_mask import BlockMask, Intervals
from ...problem.features import ARRAY_KEYWORDS, ARRAYS, feature_arrays
from ...problem.function_checks import program_of
from ...problem.strides import with_score_axes
from .second_order import TANGENTS_OF_FEATURES

__all__ = ["OVER_SCORES", "Part", "needs_place", "of_part", "over_scores", "part_keywords"]

#: The arrays with an axis of queries: each rank has its own rows, unless it is the same for all.
OVER_SCORES = tuple(name for name in (*ARRAY_KEYWORDS, *TANGENTS_OF_FEATURES) if -2 in (ARRAYS[name].axes or ()))


class Part(NamedTuple):
    """A part of the scores that one call computes.

    Attributes
    ----------
    heads : slice
        Query heads.
    queries : slice
        Rows in the whole sequence.
    keys : int
        Number of keys from the first one on.
    """

    heads: slice
    queries: slice
    keys: int


def over_scores(keywords: Mapping[str, Any]) -> dict[str, Array]:
    """The biases and masks with all four axes: (batch, head, query, key), of length 1 where they are broadcast."""
    return {name: with_score_axes(name, keywords[name]) for name in OVER_SCORES if name in keywords}


def of_part(array: Array, heads: slice, rows: slice, keys: int) -> Array:
    """A view of a bias or a mask for some heads, rows and the first keys."""
    wanted = (slice(None), heads, rows, slice(0, keys))
    return array[tuple(slice(None) if length == 1 else part for length, part in zip(array.shape, wanted, strict=True))]


def needs_place(keywords: Mapping[str, Any], has_all_queries: bool) -> bool:
    """True if the caller's functions must be told where a part begins."""
    for role in ("score_mod", "mask_mod"):
        if role in keywords:
            program = program_of(role, keywords[role], keywords.get(role.replace("mod", "args"), ()))
            if not has_all_queries or program.depends_on("h"):
                return True
    return False


def part_keywords(
    problem: AttentionProblem,
    keywords: Mapping[str, Any],
    part: Part,
    scores: Mapping[str, Array],
    place: Array | None,
) -> dict[str, Any]:
    """The keywords of features for a part.

    Parameters
    ----------
    problem : AttentionProblem
        The whole problem.
    keywords : dict
        Those of the whole problem, and tangents of features.
    part : Part
    scores : dict of ndarray
        The part's biases and masks, with four axes.
    place : ndarray of int32, or None
        First head and first query, if the caller's functions must be told.
    """
    found = dict(keywords) | dict(scores)
    tangents = {name: keywords[name] for name in TANGENTS_OF_FEATURES if name in keywords}
    for name, array in (feature_arrays(keywords) | tangents).items():
        if name not in scores and ARRAYS[name].axes is not None:
            found[name] = _without_queries(name, array, problem, part)
    if problem.settings.dropout_p:
        found["dropout_origin"] = (part.heads.start, part.queries.start)
    if "window" in found and not problem.is_packed:
        found["window"] = _window(problem, part)
    _place_functions(found, part, place)
    return found


def _without_queries(name: str, array: Array, problem: AttentionProblem, part: Part) -> Array:
    """A part of an array without an axis of queries."""
    own = {-3: part.heads} if problem.is_packed else {-3: part.heads, -1: slice(0, part.keys)}
    axes = zip(ARRAYS[name].score_axes(array.ndim), array.shape, strict=True)
    return array[tuple([slice(None) if length == 1 else own.get(axis, slice(None)) for axis, length in axes])]


def _window(problem: AttentionProblem, part: Part) -> tuple[int | None, int | None] | None:
    """The window of a part, which counts from the diagonal of the part.

    The diagonal of a call ends at its last query and its last key. If a part has `further` keys behind the diagonal of
    the whole problem, the part's own diagonal lies that much further right.
    """
    left, right = problem.settings.window
    further = part.keys - (part.queries.stop + problem.seqlen_k - problem.seqlen_q)
    if part.keys == 0 or further < 0:
        return None  # no key is visible
    return None if left is None else left + further, None if right is None else max(0, right - further)


def _place_functions(keywords: dict[str, Any], part: Part, place: Array | None) -> None:
    for role in ("score_mod", "mask_mod"):
        if place is None or role not in keywords:
            continue
        args = role.replace("mod", "args")
        keywords[role] = _placed(role, keywords[role])
        keywords[args] = (*keywords.get(args, ()), place)
    sparse = keywords.get("block_mask")
    if isinstance(sparse, BlockMask):
        states, *intervals = (_of_heads(array, part.heads) for array in (sparse.states, *sparse.intervals))
        program = sparse.program
        if program is not None and place is not None:
            program = program_of("mask_mod", keywords["mask_mod"], keywords["mask_args"])
        lengths, arrays = sparse.layout[1:3], keywords.get("mask_args", ())
        made = keywords["block_mask"] = BlockMask.of_states(
            states, *lengths, sparse.tile, program, arrays, intervals=Intervals(*intervals)
        )
        made.kept = None  # it is one of this call


def _of_heads(array: Array | None, heads: slice) -> Array | None:
    """An array of a map for some heads."""
    return array if array is None or array.shape[1] == 1 else array[:, heads].copy()


def _placed(role: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function for a part: its last array has the part's first head and first query."""
    if role == "score_mod":

        def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any, *arrays: Any) -> Any:
            *own, place = arrays
            return function(score, b, h + place[0], q + place[1], k, *own)

        return score_mod

    def mask_mod(b: Any, h: Any, q: Any, k: Any, *arrays: Any) -> Any:
        *own, place = arrays
        return function(b, h + place[0], q + place[1], k, *own)

    return mask_mod
