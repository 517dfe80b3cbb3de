"""Errors for unknown keywords: they name the keyword that was probably meant, and those that exist."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from support.feature_cases import inputs_of
from support.keyword_functions import FUNCTIONS, positional_arguments

import fa2cupy
from fa2cupy.problem import keywords
from fa2cupy.problem.features import FeatureKeywords
from fa2cupy.testing import Expectation


@pytest.fixture(scope="module")
def arguments() -> dict:
    return positional_arguments(inputs_of("float32"))


def call(name: str, arguments: dict, **options):
    function = FUNCTIONS[name]
    parameters = inspect.signature(function).parameters.values()
    return function(*[arguments[one.name] for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD], **options)


def told(name: str, arguments: dict, **options) -> str:
    with pytest.raises(TypeError) as caught:
        call(name, arguments, **options)
    assert caught.type is TypeError
    return str(caught.value)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_misspelt_keyword_and_all_that_the_function_has(name, arguments):
    text = told(name, arguments, casual=True)
    assert text.startswith(f"unexpected keyword argument 'casual'; did you mean 'causal'? The keywords of {name} are ")
    listed = text.rpartition(" are ")[2].split(", ")
    assert listed == [
        n for n, one in inspect.signature(FUNCTIONS[name]).parameters.items() if one.kind is one.KEYWORD_ONLY
    ]
    assert listed[-len(FeatureKeywords.__annotations__) :] == list(FeatureKeywords.__annotations__)
    assert {"causal", "softmax_scale", "layout", "window"} <= set(listed)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"Causal": True}, "did you mean 'causal'?"),
        ({"windo": (1, 1)}, "did you mean 'window'?"),
        ({"softmax_scal": 0.1}, "did you mean 'softmax_scale'?"),
        ({"is_causal": True}, "write causal (aligned to the bottom right; PyTorch's is_causal to the top left"),
        ({"scale": 0.1}, "write softmax_scale."),
        ({"sm_scale": 0.1}, "write softmax_scale."),
        ({"attn_mask": np.ones((37, 53), bool)}, "write mask=attn_mask."),
        ({"attn_mask": np.zeros((37, 53))}, "write bias=attn_mask."),
        ({"attn_mask": None}, "write mask for bools, True where a key is visible"),
        ({"attn_bias": 0}, "write bias."),
        ({"window_size": (-1, 0)}, "write window=(None, 0)."),
        ({"window_size": (127, -1)}, "write window=(127, None)."),
        ({"window_size": 128}, "write window=(left, right), with None for no limit where other libraries have -1."),
        ({"sliding_window": 128}, "write window=(127, 0)."),
        ({"sliding_window": 0}, "write window=(n - 1, 0) for the last n keys"),
        ({"dropout": 0.1}, "write dropout_p, together with seed."),
        ({"dropout_rate": 0.1}, "write dropout_p, together with seed."),
        ({"return_lse": True}, "write o, lse = fa2cupy.forward(...), which always gives both."),
        ({"return_softmax_lse": True}, "write o, lse = fa2cupy.forward(...), which always gives both."),
        ({"logits_soft_cap": 30.0}, "write softcap, with None for no cap"),
        ({"attn_logit_softcapping": 30.0}, "write softcap, with None for no cap"),
        ({"logit_softcap": 30.0}, "did you mean 'softcap'?"),
        ({"max_seqlen": 9}, "write max_seqlen_q and max_seqlen_k."),
        ({"cu_seqlens": 9}, "write cu_seqlens_q and cu_seqlens_k."),
        ({"enable_gqa": True}, "write nothing: that query heads share K/V heads follows from the shapes."),
        ({"output": None}, "write out, a tuple of an array or None for each result."),
        ({"padding_mask": None}, "write key_padding_mask, of bools"),
        ({"s_aux": None}, "write sink."),
        ({"block_table": None}, "write something else: fa2cupy.decode takes the pages of a cache as block_table."),
        ({"method": "two_pass"}, "it is one of fa2cupy.backward and fa2cupy.attention."),
        ({"dlse": None}, "it is one of fa2cupy.backward, fa2cupy.backward_jvp and fa2cupy.double_backward."),
    ],
    ids=str,
)
def test_what_may_have_been_meant(options, hint, arguments):
    (name,) = options
    text = told("fa2cupy.forward", arguments, **options)
    start = f"unexpected keyword argument {name!r}"
    assert text.startswith((f"{start}; {hint}", f"{start}: {hint}"))
    assert (
        "The keywords of fa2cupy.forward are causal, softmax_scale, layout, config, family, num_splits, precision, "
        "out, window, " in text
    )


def test_a_name_that_is_like_nothing_gets_the_list_alone(arguments):
    text = told("fa2cupy.backward", arguments, xyzzy=1)
    assert text.startswith("unexpected keyword argument 'xyzzy'. The keywords of fa2cupy.backward are causal, ")


def test_attention_has_no_out(arguments):
    """Checks that `out` is refused: `forward` would write results to it, and `backprop` then gradients."""
    out = (np.empty_like(arguments["o"]), np.empty_like(arguments["lse"]))
    text = told("fa2cupy.attention", arguments, out=out)
    assert text.startswith("unexpected keyword argument 'out': it is one of fa2cupy.forward, fa2cupy.backward, ")


def test_what_gives_lse_is_a_keyword_of_attention_alone(arguments):
    text = told("fa2cupy.attention", arguments, return_softmax_lse=True)
    assert text.startswith("unexpected keyword argument 'return_softmax_lse'; did you mean 'return_lse'? The keywords")
    with pytest.raises(TypeError, match="^return_lse: expected a bool, got int; write return_lse=True"):
        fa2cupy.attention(arguments["q"], arguments["k"], arguments["v"], return_lse=1)


def test_what_other_libraries_call_so_exists_here():
    known = set(FeatureKeywords.__annotations__)
    for function in FUNCTIONS.values():
        known |= set(inspect.signature(function).parameters)
    for name, advice in keywords._ELSEWHERE.items():
        assert name not in known - {"return_lse"}  # attention alone has return_lse
        if not advice.startswith(("nothing", "something", "o, lse")):
            assert advice.replace(",", " ").replace("=", " ").split()[0] in known, name


def test_problems_of_the_packages_own_are_checked_too(arguments):
    from fa2cupy.problem.checks import problem_from_arrays

    with pytest.raises(TypeError, match="^unexpected keyword argument 'windo'; did you mean 'window'"):
        problem_from_arrays(arguments["q"], arguments["k"], arguments["v"], windo=(1, 1))


def test_an_expectation_keeps_its_options(arguments):
    q, k, v = (arguments[name] for name in "qkv")
    options = {"causal": True, "softmax_scale": 0.3, "window": (3, None)}
    o, lse = fa2cupy.forward(q, k, v, **options)
    Expectation(q, k, v, **options).check(o=o, lse=lse)
