"""The keywords of functions that state them in one table, and errors for others, with a suggestion.

Many functions share the keywords of attention. They declare ``**keywords`` of a TypedDict, which type checkers read;
`takes` makes of it the signature that ``help()``, IPython and Sphinx show. Arguments that are passed on under their own
names, such as `out`, are ordinary parameters.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypedDict, TypeVar

from .features import FEATURES, KEYWORD_DEFAULTS, FeatureKeywords, complete
from .options import CallOptions, ScoreOptions, call_options, hashable_config, kept_options

__all__ = ["OPTION_NAMES", "NoKeywords", "ScoreKeywords", "check_keywords", "options_of", "similar", "takes"]


class NoKeywords(TypedDict):
    """No keywords but those that a function declares: `check_keywords` has an error for others."""


class ScoreKeywords(ScoreOptions, FeatureKeywords, total=False):
    """The keywords on which scores depend. `fa2cupy.forward` describes them."""


#: The keywords that are neither arrays nor features.
OPTION_NAMES = frozenset(CallOptions._fields)
_NO_OPTIONS = call_options()
#: The defaults of keywords; it is None for the others.
_DEFAULTS: Mapping[str, Any] = {**CallOptions._field_defaults, **KEYWORD_DEFAULTS, "order": "zigzag"}
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
    **{
        name: f"something else: fa2cupy.decode takes {what}"
        for what, names in {
            "the pages of a cache as block_table": ("block_table", "page_table", "block_tables"),
            "lengths in a cache as cache_seqlens": ("cache_seqlens", "cache_lens", "kv_lens", "context_lens"),
            "a cache as k_cache and v_cache": ("k_cache", "v_cache", "kv_cache", "past_key_values"),
        }.items()
        for name in names
    },
    **dict.fromkeys(("q_descale", "k_descale", "v_descale"), "something else: there is no float8"),
}


class _Table(NamedTuple):
    """What a function takes: as ``**keywords``, and the options among these; by keyword alone; and all, in order."""

    keywords: frozenset[str]
    options: frozenset[str]
    listed: tuple[str, ...]
    parameters: tuple[str, ...]


#: By public names, such as ``fa2cupy.forward``: a test or a profiler may put another function in a function's place.
_tables: dict[str, _Table] = {}


def takes(table: Any) -> Callable[[_Function], _Function]:
    """Makes the signature of a function, or of a class, have the keywords of a TypedDict in place of ``**keywords``.

    Its options stand before the keywords that the function declares itself, and features behind them.
    """

    def place(one: inspect.Parameter) -> int:
        if one.kind is not one.KEYWORD_ONLY:
            return 0
        return 3 if one.name in FeatureKeywords.__annotations__ else 1 if one.name in table.__annotations__ else 2

    def with_signature(function: _Function) -> _Function:
        signature = inspect.signature(function)
        *own, _ = signature.parameters.values()
        taken = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS.get(name), annotation=hint.__forward_arg__
            )
            for name, hint in table.__annotations__.items()
        ]
        parameters = sorted([*own, *taken], key=place) if taken else own
        described: Any = function
        described.__signature__ = signature.replace(parameters=parameters)
        keywords = frozenset(table.__annotations__)
        listed = tuple(one.name for one in parameters if one.kind is one.KEYWORD_ONLY)
        module = re.sub(r"[.](api|closure|ahead|inspection|second_order|sparse)$", "", function.__module__)
        all_names = tuple(one.name for one in parameters)
        _tables[f"{module}.{function.__qualname__}"] = _Table(keywords, keywords & OPTION_NAMES, listed, all_names)
        return function

    return with_signature


def options_of(function: str, keywords: Any) -> CallOptions:
    """Checks the ``**keywords`` of a call of a function, by its public name, and takes its options out of them.

    The keywords of features are left, and completed.

    Raises
    ------
    TypeError
        One of them is no keyword of the function.
    ValueError
        A map is not one of the arrays of the call.
    """
    if not keywords:
        return _NO_OPTIONS
    table = _tables[function]
    if table.options.issuperset(keywords):  # most calls have no features
        try:
            found = kept_options(**keywords)
            keywords.clear()
            return found
        except TypeError:  # a dict of tiles cannot be hashed
            pass
    if not table.keywords.issuperset(keywords):
        check_keywords(function, keywords)
    given = {}
    for name in tuple(keywords):
        if name in table.options:
            given[name] = keywords.pop(name)
    if "config" in given:
        given["config"] = hashable_config(given["config"])
    complete(keywords)
    return call_options(**given)


def check_keywords(function: str, given: Mapping[str, object]) -> None:
    """Checks that all of `given`, the ``**keywords`` of a function, are keywords of its table.

    Raises
    ------
    TypeError
        One is not; the text suggests a replacement and lists all keywords of the function.
    """
    table = _tables[function]
    if table.keywords.issuperset(given):
        return
    unknown = next(name for name in given if name not in table.keywords)
    hint = _hint(function, unknown, given[unknown])
    all_of_them = f"The keywords of {function} are {', '.join(table.listed)}"
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


def _hint(function: str, name: str, value: object) -> str:
    """The suggestion that ends the sentence about an unknown keyword."""
    keywords = _tables[function].listed
    if name in _RETURN_LSE and "return_lse" in keywords:
        return "; did you mean 'return_lse'?"
    if name.lower() in _ELSEWHERE:
        return f"; write {_converted(name.lower(), value) or _ELSEWHERE[name.lower()]}."
    module = function.rpartition(".")[0]
    of_attention = {other: table for other, table in _tables.items() if table.keywords}
    others = [one for one, of in of_attention.items() if one.rpartition(".")[0] == module and name in of.listed]
    if others:
        *most, last = others
        return f": it is one of {', '.join(most)}{' and ' * bool(most)}{last}."
    close = similar(name, _tables[function].parameters)
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
