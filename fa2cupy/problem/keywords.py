"""Errors for unknown keywords, with a suggestion for misspelt ones and for those of other libraries."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from .features import FEATURES, FeatureKeywords

__all__ = ["check_keywords", "similar", "takes_features"]

_FEATURES = frozenset(FeatureKeywords.__annotations__)
_Function = TypeVar("_Function", bound=Callable[..., Any])
_RETURN_LSE = ("return_lse", "return_softmax_lse", "return_attn_probs", "return_residual", "return_aux")

#: Equivalents in this package of keywords of flash-attn, PyTorch, JAX, xFormers, FlashInfer, cuDNN and Transformers.
_ELSEWHERE = {
    "is_causal": "causal (aligned to the bottom right; PyTorch's is_causal to the top left, if lengths differ)",
    "use_causal_mask": "causal",
    **dict.fromkeys(("scale", "sm_scale", "scaling", "attn_scale"), "softmax_scale"),
    **{alias: text for feature in FEATURES.values() for alias, text in feature.aliases.items()},
    **dict.fromkeys(_RETURN_LSE, "o, lse = fa2cupy.forward(...), which always gives both"),
    **dict.fromkeys(
        ("enable_gqa", "num_kv_heads", "num_heads_kv", "num_key_value_groups"),
        "nothing: that query heads share K/V heads follows from the shapes",
    ),
    **dict.fromkeys(("output", "outs", "outputs", "result"), "out, a tuple of an array or None for each result"),
    **dict.fromkeys(("tensor_layout", "input_layout", "qkv_layout", "qkv_format"), "layout, 'bshd' or 'bhsd'"),
    **dict.fromkeys(
        ("block_table", "page_table", "cache_seqlens", "k_cache", "v_cache"),
        "something else: fa2cupy.decode takes a cache of keys and values",
    ),
    **dict.fromkeys(("q_descale", "k_descale", "v_descale"), "something else: there is no float8"),
}


#: The public functions that take the keywords of features, in the order of their definition.
_public_calls: list[Callable[..., Any]] = []


def takes_features(function: _Function) -> _Function:
    """Registers a public function, so that messages about an unknown keyword can name the function that has it."""
    _public_calls.append(function)
    return function


def check_keywords(function: Callable[..., Any], given: Mapping[str, object]) -> None:
    """Checks that all of `given`, the ``**keywords`` of a function, are keywords of features.

    Raises
    ------
    TypeError
        One is not; the text suggests a replacement and lists all keywords of the function.
    """
    if given.keys() <= _FEATURES:
        return
    unknown = next(name for name in given if name not in _FEATURES)
    keywords = [*_own_keywords(function), *FeatureKeywords.__annotations__]
    hint = _hint(function, unknown, given[unknown], keywords)
    all_of_them = f"The keywords of {_public_name(function)} are {', '.join(keywords)}"
    raise TypeError(f"unexpected keyword argument {unknown!r}{hint} {all_of_them}")


def similar(name: str, known: Iterable[str]) -> str | None:
    """The known name that contains `name` or is spelt like it; None if there is none."""
    known = list(known)
    lower = str(name).lower()
    if len(lower) > 3:
        containing = [one for one in known if lower in one]
        if containing:
            return containing[0]
    return next(iter(difflib.get_close_matches(lower, known, 1)), None)


def _own_keywords(function: Callable[..., Any]) -> list[str]:
    return [name for name, one in inspect.signature(function).parameters.items() if one.kind is one.KEYWORD_ONLY]


def _public_name(function: Callable[..., Any]) -> str:
    module = re.sub(r"\.(api|closure)$", "", function.__module__)
    return f"{module}.{function.__qualname__}"


def _is_distributed(function: Callable[..., Any]) -> bool:
    """True for a function of `fa2cupy.distributed`, which has functions of the same names."""
    return ".distributed." in function.__module__


def _hint(function: Callable[..., Any], name: str, value: object, keywords: list[str]) -> str:
    """The suggestion that ends the sentence about an unknown keyword."""
    if name in _RETURN_LSE and "return_lse" in keywords:
        return "; did you mean 'return_lse'?"
    if name.lower() in _ELSEWHERE:
        return f"; write {_converted(name.lower(), value) or _ELSEWHERE[name.lower()]}."
    others = [
        one for one in _public_calls if name in _own_keywords(one) and _is_distributed(one) == _is_distributed(function)
    ]
    if others:
        return f": it is one of {' and '.join(map(_public_name, others))}."
    close = similar(name, keywords)
    if close:
        return f"; did you mean {close!r}?"
    close = similar(name, _ELSEWHERE)
    return f"; write {_ELSEWHERE[close]}." if close else "."


def _converted(name: str, value: object) -> str | None:
    """The equivalent keyword with its converted value; None if the value has no equivalent."""
    if name == "window_size" and isinstance(value, tuple | list) and len(value) == 2:
        return f"window=({', '.join('None' if limit == -1 else repr(limit) for limit in value)})"
    if name == "sliding_window" and isinstance(value, int) and value > 0:
        return f"window=({value - 1}, 0)"
    if name == "attn_mask" and hasattr(value, "dtype"):
        return "mask=attn_mask" if value.dtype.kind == "b" else "bias=attn_mask"
    return None
