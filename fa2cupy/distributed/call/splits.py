"""The number of splits of the calls of parts: that of one call on the whole sequence, so that all bits are equal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...families.choice import choose_with_copies
from ...families.device import DeviceInfo
from ...families.family import Family
from ...problem.attention import AttentionProblem
from ...problem.options import CallOptions, requested_method
from ...problem.strides import AnyStrides, argument_layouts, feature_strides

__all__ = ["with_splits_of_whole"]


def with_splits_of_whole(
    call: str,
    problem: AttentionProblem,
    options: CallOptions,
    scheme: str,
    keywords: Mapping[str, Any],
) -> CallOptions:
    """The options of the calls of parts on the current GPU.

    Parameters
    ----------
    call : {"forward", "backward"}
    problem : AttentionProblem
        That of the whole sequence.
    options : CallOptions
    scheme : str
    keywords : mapping
        Those of features, with arrays of the shapes for the whole sequence.
    """
    if options.num_splits is not None or not _has_bits_of_whole(call, options, scheme) or 0 in problem.score_shape:
        return options
    own = feature_strides(keywords) | argument_layouts(keywords)

    def contiguous(family: Family) -> tuple[AttentionProblem, dict[str, AnyStrides]]:
        padded = family.padded(problem)
        return padded, {**padded.contiguous_strides(), **own}

    choice = choose_with_copies(call, problem, DeviceInfo.current(), contiguous, options)
    if "decode" in choice.tiles:
        return options
    return options._replace(num_splits=max(choice.num_splits.values(), default=1))


def _has_bits_of_whole(call: str, options: CallOptions, scheme: str) -> bool:
    """True if the results of parts are to be those of one call, bit for bit.

    Gradients equal those of one call only in ``"heads"``, and only if the order of sums is the same from run to run.
    """
    if call == "forward":
        return True
    return scheme == "heads" and requested_method(options.method, options.deterministic) == "two_pass"
