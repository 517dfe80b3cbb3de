"""Kernels compiled ahead: the calls that use them, the command line, progress, and interruptions."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import Future

import numpy as np
import pytest
from support.feature_cases import METHODS, accumulator, booleans, inputs_of, numbers

import fa2cupy
from fa2cupy import BlockMask, TileConfig, UnsupportedProblemError, ahead, cli
from fa2cupy.families import dbias, estimate, float32_parts
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.sm80 import SM80
from fa2cupy.jit import cache
from fa2cupy.jit.compiler import CompiledKernel
from fa2cupy.jit.spec import KernelSpec
from fa2cupy.problem.choices import CALL_KEYWORDS
from fa2cupy.problem.features import FeatureKeywords
from fa2cupy.system import progress as progress_module

FIXED = {"batch": 2, "seqlen_q": 37, "seqlen_k": 53, "num_heads": 4, "num_heads_kv": 2}


@pytest.fixture
def listed(monkeypatch):
    """Provides `precompile` as a function that returns a set of specs and compiles nothing."""
    monkeypatch.setattr(cache, "cached_kernel", lambda spec: spec)

    def specs_of(*arguments, **options) -> set[KernelSpec]:
        specs = fa2cupy.precompile(*arguments, **options)
        assert len(set(specs)) == len(specs)
        return set(specs)

    return specs_of


# --------------------------------------------------------------------------------------- kernels of calls with features

# (device, dtype, family): each family in the dtypes whose kernels differ in more than the type.
KINDS = (
    ("sm_90", "float16", None), ("sm_90", "bfloat16", "sm80"), ("sm_86", "bfloat16", None), ("sm_75", "float32", None),
    ("sm_90", "float64", None),
)  # fmt: skip

CALLS = (
    (), *((name,) for name in CALL_KEYWORDS if not name.startswith("return") and not name.endswith("tangent")),
    ("bias", "return_dbias"), ("sink", "return_dsink"), ("window", "softcap", "sink", "return_dsink", "cu_seqlens"),
    ("mask", "dropout_p", "dlse"), ("alibi_slopes", "key_padding_mask", "bias", "return_dbias", "cu_seqlens", "dlse"),
    CALL_KEYWORDS,
)  # fmt: skip
#: Further kinds of calls of second order.
MOVED = (
    ("bias", "bias_tangent"), ("sink", "sink_tangent"), ("bias", "sink", "bias_tangent", "return_dbias", "cu_seqlens"),
    ("softcap", "sink", "sink_tangent", "return_dsink", "dropout_p"),
)  # fmt: skip


def call_options(names: tuple[str, ...], dtype: str, bias_dtype: str, kind_of_bias: str) -> tuple[dict, dict]:
    """Returns the keywords of a forward with these features, and the additional ones of a backward."""
    batch, rows, keys, heads, _ = FIXED.values()
    packed, wide = "cu_seqlens" in names, accumulator(dtype)
    if packed:  # three sequences in one batch
        batch, rows, keys = 3, 20, 30
    shapes = {"full": (batch, heads, rows, keys), "of heads": (heads, 1, keys), "of sequences": (batch, 1, 1, keys)}
    shapes["of pairs"] = heads, rows, keys
    options = {
        "window": {"window": (9, 4)},
        "softcap": {"softcap": 20.0},
        "alibi_slopes": {"alibi_slopes": np.linspace(0.02, 0.4, heads).astype(wide)},
        "bias": {"bias": numbers(shapes[kind_of_bias], bias_dtype)},
        "mask": {"mask": booleans((batch, 1, rows, keys))},
        "key_padding_mask": {"key_padding_mask": booleans((batch, keys))},
        "sink": {"sink": numbers((heads,), wide)},
        "dropout_p": {"dropout_p": 0.1, "seed": 5},
        "cu_seqlens": {
            "cu_seqlens_q": np.array([0, 10, 17, 37], "int32"), "max_seqlen_q": 20,
            "cu_seqlens_k": np.array([0, 30, 30, 53], "int32"), "max_seqlen_k": 30,
        },
    }  # fmt: skip
    forward = {key: value for name in names for key, value in options.get(name, {}).items()}
    backward = {name: True for name in names if name.startswith("return_")}
    if "dlse" in names:
        shape = (heads, FIXED["seqlen_q"]) if packed else (batch, heads, FIXED["seqlen_q"])
        backward["dlse"] = numbers(shape, wide)
    return forward, backward


def launched_by(monkeypatch, kind: tuple, names: tuple[str, ...], *more, **options) -> set[KernelSpec]:
    """Returns the kernels that calls with these features launch: causal or not, all methods, and each kind of bias.

    Parameters are those of `launched_once`.
    """
    if "return_dbias" not in names:
        return launched_once(monkeypatch, kind, names, *more, **options)
    specs = set()
    monkeypatch.setattr(estimate, "_STEPS_OF_SHARE", 0)  # two sequences are enough for two shares
    # Short sequences and others, and biases that few scores share and that many do.
    for rows, atomics in ((FIXED["seqlen_q"], 10**12), (128, 0), (128, 10**12)):
        with monkeypatch.context() as patch:
            patch.setattr(dbias, "atomics_of", lambda *_, atomics=atomics: atomics)
            patch.setitem(FIXED, "seqlen_q", rows)
            specs |= launched_once(patch, kind, names, *more, **options)
    return specs


def launched_once(
    monkeypatch,
    kind: tuple,
    names: tuple[str, ...],
    head_dim: int,
    head_dim_v: int | None,
    functions: dict | None = None,
    *,
    second_order: bool = False,
) -> set[KernelSpec]:
    """Returns the kernels that calls of one length launch.

    If `functions` has keywords of functions, the calls have them, too, and return all gradients of their arrays. With
    `second_order`, calls of second order are made besides.
    """
    pytest.importorskip("cupy", exc_type=ImportError)
    from support import fake_gpu
    from support.fake_cupy import place
    from support.traced_cases import on_gpu

    from fa2cupy.families import sm90

    arch, dtype, family = kind
    monkeypatch.setattr(sm90, "_can_encode_maps", lambda: True)
    specs = set()
    inputs = inputs_of(dtype, **FIXED, head_dim=head_dim, head_dim_v=head_dim_v)
    if "cu_seqlens" in names:
        inputs = tuple(array[0] for array in inputs)
    q, k, v, do = map(place, inputs)
    kinds = ("full", "of heads", "of sequences") if "return_dbias" in names else ("of heads",)
    for *kind_of_bias, causal in itertools.product({dtype, accumulator(dtype)}, kinds, (False, True)):
        forward, backward = (
            {key: place(x) if isinstance(x, np.ndarray) else x for key, x in options.items()}
            for options in call_options(names, dtype, *kind_of_bias)
        )
        if "block_mask" in names:
            rows, keys = (forward.get(f"max_seqlen_{side}", FIXED[f"seqlen_{side}"]) for side in "qk")
            forward["block_mask"] = BlockMask(place(np.ones((1, 1), bool)), rows, keys)
        if functions:
            forward |= on_gpu(functions)
            backward["return_dscore_args"] = True
        with fake_gpu.fake_gpu(monkeypatch, arch, run=lambda launch: None) as launched:
            for num_splits in (1,) if dtype not in ("float16", "bfloat16") else (1, 3):
                shared = {"causal": causal, "family": family, "num_splits": num_splits, **forward}
                o, lse = fake_gpu.forward(q, k, v, **shared)
                ways = [{"method": method} for method in (None, *METHODS)]
                if "return_dbias" in names and not functions:
                    ways += [{"deterministic": True}, {"deterministic": True, "num_splits": None}]
                for way in ways:
                    fake_gpu.backward(q, k, v, o, lse, do, **{**shared, **way}, **backward)
            if second_order:
                backward.pop("return_dscore_args", None)
                call_second_order(q, k, v, do, names, {"causal": causal, **forward}, backward)
        specs |= {stage.spec for stage in launched}
    return specs


def launched_with_kept_bias(
    monkeypatch, kind: tuple, names: tuple[str, ...], head_dim: int, head_dim_v: int | None
) -> set[KernelSpec]:
    """Returns the kernels of forwards of all lengths for which blocks keep a bias that sequences share."""
    from support import fake_gpu
    from support.fake_cupy import place

    from fa2cupy.families import kept_bias
    from fa2cupy.families.sm90 import SM90

    arch, dtype, family = kind
    if "bias" not in names or "cu_seqlens" in names or arch != "sm_90" or dtype not in SM90.dtypes or family == "sm80":
        return set()
    monkeypatch.setattr(kept_bias, "_LEAST_TILES", 0)
    with fake_gpu.fake_gpu(monkeypatch, arch, run=lambda launch: None) as launched:
        # The others leave parts of tiles empty.
        for most, empty, causal in itertools.product(SM90.kept_keys, (0, 127), (False, True)):
            keys = max(1, most - empty)
            sizes = {"batch": 8, "seqlen_q": keys, "seqlen_k": keys, "num_heads": 1, "num_heads_kv": 1}
            q, k, v, _ = map(place, inputs_of(dtype, **sizes, head_dim=head_dim, head_dim_v=head_dim_v))
            options = {"window": (9, 4)} if "window" in names else {}
            options |= {"sink": place(numbers((1,), "float32"))} if "sink" in names else {}
            fake_gpu.forward(q, k, v, causal=causal, bias=place(numbers((keys, keys), dtype)), **options)
    return {stage.spec for stage in launched}


def launched_of_few_tiles(
    monkeypatch, kind: tuple, names: tuple[str, ...], head_dim: int, head_dim_v: int | None
) -> set[KernelSpec]:
    """Returns the kernels of plain forwards of few query tiles that name no number of splits."""
    from support import fake_gpu
    from support.fake_cupy import place

    arch, dtype, family = kind
    if arch != "sm_90" or dtype not in ("float16", "bfloat16") or family == "sm80" or not set(names) <= {"dlse"}:
        return set()
    with fake_gpu.fake_gpu(monkeypatch, arch, run=lambda launch: None) as launched:
        sizes = {"batch": 1, "seqlen_q": 300, "seqlen_k": 300, "num_heads": 2, "num_heads_kv": 2}
        q, k, v, _ = map(place, inputs_of(dtype, **sizes, head_dim=head_dim, head_dim_v=head_dim_v))
        for causal in (False, True):
            fake_gpu.forward(q, k, v, causal=causal)
    return {stage.spec for stage in launched}


def launched_in_one_launch(
    monkeypatch, kind: tuple, names: tuple[str, ...], head_dim: int, head_dim_v: int | None
) -> set[KernelSpec]:
    """Returns the kernels of backwards of self-attention that need one launch."""
    from support import fake_gpu
    from support.fake_cupy import place

    arch, dtype, family = kind
    if (
        arch != "sm_90"
        or dtype not in ("float16", "bfloat16")
        or family == "sm80"
        or not set(names) <= {"dlse", "sink"}
    ):
        return set()
    sizes = FIXED | {"seqlen_k": FIXED["seqlen_q"], "num_heads_kv": FIXED["num_heads"]}
    q, k, v, do = map(place, inputs_of(dtype, **sizes, head_dim=head_dim, head_dim_v=head_dim_v))
    forward, backward = (
        {key: place(x) if isinstance(x, np.ndarray) else x for key, x in options.items()}
        for options in call_options(names, dtype, dtype, "of heads")
    )
    o, lse = place(np.zeros(do.shape, q.dtype)), place(np.zeros((*q.shape[:1], q.shape[2], q.shape[1]), "float32"))
    with fake_gpu.fake_gpu(monkeypatch, arch, run=lambda launch: None) as launched:
        for causal in (False, True):
            fake_gpu.backward(q, k, v, o, lse, do, causal=causal, method="two_pass", **forward, **backward)
    return {stage.spec for stage in launched if stage.spec.operation == "backward_both"}


def launched_by_one_tile(
    monkeypatch,
    kind: tuple,
    names: tuple[str, ...],
    head_dim: int,
    head_dim_v: int | None,
    functions: dict | None = None,
) -> set[KernelSpec]:
    """Returns the kernels of backwards whose keys fill each of the key tiles of `one_tile`."""
    from support import fake_gpu
    from support.fake_cupy import place
    from support.traced_cases import on_gpu

    arch, dtype, family = kind
    if dtype not in SM80.dtypes or not {"cu_seqlens", "block_mask"}.isdisjoint(names):
        return set()
    specs = set()
    for rows, bias_dtype, causal in itertools.product((64, 128), {dtype, accumulator(dtype)}, (False, True)):
        sizes = {"batch": 2, "seqlen_q": rows, "seqlen_k": rows, "num_heads": 2, "num_heads_kv": 2}
        with monkeypatch.context() as patch:
            for name, size in sizes.items():
                patch.setitem(FIXED, name, size)
            forward, backward = (
                {key: place(x) if isinstance(x, np.ndarray) else x for key, x in options.items()}
                for options in call_options(names, dtype, bias_dtype, "of pairs")
            )
        if functions:
            forward |= on_gpu(functions)
            backward["return_dscore_args"] = True
        q, k, v, do = map(place, inputs_of(dtype, **sizes, head_dim=head_dim, head_dim_v=head_dim_v))
        with fake_gpu.fake_gpu(monkeypatch, arch, run=lambda launch: None) as launched:
            shared = {"causal": causal, "family": family, **forward}
            o, lse = fake_gpu.forward(q, k, v, **shared)
            launched.clear()
            fake_gpu.backward(q, k, v, o, lse, do, method="one_tile", **shared, **backward)
        specs |= {stage.spec for stage in launched}
    return specs


def call_second_order(q, k, v, do, names: tuple[str, ...], forward: dict, backward: dict) -> None:
    """Calls the functions of second order; the options are those of `call_options`. Each array is its own tangent."""
    from support import fake_gpu

    moved = {name: forward[name] for name in ("bias", "sink") if f"{name}_tangent" in names}
    tangents, more = {f"{name}_tangent": array for name, array in moved.items()}, forward | backward
    o, lse, ot, lset = fake_gpu.jvp(q, k, v, q, k, v, **forward, **tangents)
    for dot, dlset in ((None, None), (do, lse)):
        fake_gpu.backward_jvp(q, k, v, o, lse, do, q, k, v, ot, lset, dot, dlset=dlset, **more, **tangents)
    cotangents = {f"gd{name}": array for name, array in moved.items()}
    fake_gpu.double_backward(q, k, v, o, lse, do, q, k, v, **more, **cotangents)


@pytest.mark.sample(kind=KINDS[:1], names=CALLS[:-1])
@pytest.mark.parametrize("names", CALLS, ids=lambda names: "+".join(names) or "plain")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(filter(None, kind)))
def test_calls_use_exactly_the_kernels_that_are_compiled_ahead_for_their_features(listed, monkeypatch, kind, names):
    arch, dtype, family = kind
    ahead_of_calls = listed(arch, dtypes=dtype, head_dims=60, features=names, family=family, decode=False)
    kept = launched_with_kept_bias(monkeypatch, kind, names, 60, None)
    kept |= launched_of_few_tiles(monkeypatch, kind, names, 60, None)
    kept |= launched_in_one_launch(monkeypatch, kind, names, 60, None)
    kept |= launched_by_one_tile(monkeypatch, kind, names, 60, None)
    assert launched_by(monkeypatch, kind, names, 60, None) | kept == ahead_of_calls


@pytest.mark.sample(head_dim=(40,))
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 40), (40, 60), (60, 64)])
@pytest.mark.parametrize("names", [(), ("window", "bias", "return_dbias", "sink")], ids=("plain", "more"))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(filter(None, kind)))
def test_kernels_for_v_of_its_own_head_dim_are_compiled_ahead(listed, monkeypatch, kind, names, head_dim, head_dim_v):
    arch, dtype, family = kind
    options = {"features": names, "head_dims": head_dim, "head_dim_v": head_dim_v, "family": family, "decode": False}
    kept = launched_with_kept_bias(monkeypatch, kind, names, head_dim, head_dim_v)
    kept |= launched_of_few_tiles(monkeypatch, kind, names, head_dim, head_dim_v)
    kept |= launched_in_one_launch(monkeypatch, kind, names, head_dim, head_dim_v)
    kept |= launched_by_one_tile(monkeypatch, kind, names, head_dim, head_dim_v)
    assert launched_by(monkeypatch, kind, names, head_dim, head_dim_v) | kept == listed(arch, dtypes=dtype, **options)


def test_every_feature_of_calls_can_be_compiled_ahead():
    names = {"cu_seqlens" if name[:3] in ("cu_", "max") else name for name in FeatureKeywords.__annotations__}
    names -= {"seed", "score_mod", "score_args", "mask_mod", "mask_args"}  # kernels depend on functions
    others = {"dlse", "return_dbias", "return_dsink", "bias_tangent", "sink_tangent"}
    assert names | others == set(CALL_KEYWORDS)


@pytest.mark.parametrize("names", [(), ("window", "bias", "return_dbias", "cu_seqlens")], ids=("alone", "with more"))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(filter(None, kind)))
def test_calls_with_functions_use_exactly_the_kernels_that_are_compiled_ahead(listed, monkeypatch, kind, names):
    """Checks arrays of the same dtypes and numbers of axes, and vectors of the same length."""

    def scored(score, b, h, q, k, table, x):
        return score + table[h, k % 5] * x[b, q].sum()

    def hidden(b, h, q, k, ids):
        return ids[b, q] == ids[b, k]

    def functions(*shapes: tuple) -> dict:
        table, x, ids = (np.zeros(shape, dtype) for shape, dtype in zip(shapes, ("float16", "float32", "int32")))
        return {"score_mod": scored, "score_args": (table, x), "mask_mod": hidden, "mask_args": (ids,)}

    arch, dtype, family = kind
    examples = functions((1, 1), (1, 1, 7), (1, 1))
    kind_of_calls = {"dtypes": dtype, "head_dims": 60, "features": names, "family": family, "decode": False}
    ahead_of_calls = listed(arch, **kind_of_calls, **examples, return_dscore_args=True)
    own = functions((4, 5), (3, 60, 7), (3, 60))
    short = launched_by_one_tile(monkeypatch, kind, names, 60, None, own)
    assert launched_by(monkeypatch, kind, names, 60, None, own) | short == ahead_of_calls
    assert any("dscore_args" in spec.features for spec in ahead_of_calls)


@pytest.mark.sample(kind=(("sm_90", "float32", None),), names=((), *MOVED))
@pytest.mark.parametrize("names", CALLS + MOVED, ids=lambda names: "+".join(names) or "plain")
@pytest.mark.parametrize(
    "kind",
    [("sm_90", "float32", None), ("sm_75", "float32", None), ("sm_90", "float64", None), ("sm_80", "bfloat16", None)],
    ids=lambda kind: "-".join(filter(None, kind)),
)
def test_calls_of_second_order_use_exactly_the_kernels_that_are_compiled_ahead(listed, monkeypatch, kind, names):
    """Checks calls whose lse is computed again, and others: float32 on tensor cores takes the long ones by default."""
    check_second_order(listed, monkeypatch, kind, names, 60, None)


def test_kernels_of_second_order_for_functions_and_two_head_dims_are_compiled_ahead(listed, monkeypatch):
    table = np.zeros((4, 5), "float32")
    functions = {
        "score_mod": lambda score, b, h, q, k, table: np.sin(score) * table[h, k % 5], "score_args": (table,),
        "mask_mod": fa2cupy.mods.dilated_window(9, 2),
    }  # fmt: skip
    check_second_order(listed, monkeypatch, ("sm_90", "float32", None), ("softcap",), 40, 64, functions)


def check_second_order(listed, monkeypatch, kind, names, head_dim, head_dim_v, functions=None) -> None:
    arch, dtype, _ = kind
    given = {"dtypes": dtype, "head_dims": head_dim, "head_dim_v": head_dim_v, "features": names, "decode": False}
    given |= {**functions, "return_dscore_args": True} if functions else {}
    launched = set()
    for shortest in (1, 1000):
        with monkeypatch.context() as patch:
            patch.setattr(float32_parts, "_SHORTEST", shortest)
            launched |= launched_by(patch, kind, names, head_dim, head_dim_v, functions, second_order=True)
    ahead_of_calls = listed(arch, **given, second_order=True)
    assert launched <= ahead_of_calls
    added = ahead_of_calls - listed(arch, **given)
    assert added <= launched
    assert {"jvp", "output_jvp", "delta_jvp", "dq_jvp", "dkdv_jvp"} <= {spec.operation for spec in added}


# ---------------------------------------------------------------------------------- after it no drawn call compiles


class DrawnCalls:
    """Calls of one dtype, head_dim and combination of features, made on a fake GPU whose kernels do nothing."""

    def __init__(self, rng: np.random.Generator, dtype: str, head_dim: int, names: tuple[str, ...]):
        self.rng, self.dtype, self.head_dim, self.names = rng, dtype, head_dim, names
        self.is_half = dtype in ("float16", "bfloat16")
        self.is_packed = "cu_seqlens" in names

    def one_of(self, *values):
        return values[self.rng.integers(len(values))]

    def array(self, *shape, dtype=None):
        from support.fake_cupy import FakeArray

        return FakeArray(shape, inputs_of(self.dtype, **FIXED, head_dim=8)[0].dtype if dtype is None else dtype)

    def sizes(self) -> None:
        """Draws the sizes of a call: few rows for many sequences, or many."""
        self.batch = self.one_of(1, 2, 3, 17, 40)
        self.heads_kv, group = self.one_of(1, 2, 3), self.one_of(1, 2, 4, 5, 16)
        self.heads = self.heads_kv * group
        longest = 3 if self.batch * self.heads > 100 else 9
        lengths = (1, 2, 3, 7, 16, 33, 64, 129, 300)[:longest]
        self.rows, self.keys = self.one_of(*lengths), self.one_of(*lengths, 130)
        self.layout = self.one_of("bshd", "bhsd")
        if self.is_packed:  # so many sequences in all rows
            self.sequences, self.batch = self.batch, 1

    def laid_out(self, rows: int, heads: int, batch: int | None = None):
        batch = self.batch if batch is None else batch
        shape = (batch, rows, heads) if self.layout == "bshd" else (batch, heads, rows)
        return self.array(*shape[self.is_packed :], self.head_dim)

    def features(self) -> dict:
        wide = accumulator(self.dtype)
        options = {
            "window": {"window": self.one_of((9, 4), (None, 0), (3, None))},
            "softcap": {"softcap": 20.0},
            "alibi_slopes": {"alibi_slopes": self.array(self.heads, dtype=wide)},
            "sink": {"sink": self.array(self.heads, dtype=wide)},
            "bias": {"bias": self.array(self.heads, 1, self.keys)},
        }
        if self.is_packed:
            ends = self.array(self.sequences + 1, dtype="int32")
            options["cu_seqlens"] = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        return {key: value for name in self.names for key, value in options[name].items()}

    def attention(self) -> None:
        from support import fake_gpu

        q, o = self.laid_out(self.rows, self.heads), self.laid_out(self.rows, self.heads)
        k, v = self.laid_out(self.keys, self.heads_kv), self.laid_out(self.keys, self.heads_kv)
        num_splits = self.one_of(None, None, 1, 2, 7, 16) if self.is_half else self.one_of(None, 1)
        options = {"causal": self.one_of(False, True), "layout": self.layout, "num_splits": num_splits}
        options |= {"precision": self.one_of(None, "ieee")} if self.dtype == "float32" else {}
        options |= self.features()
        _, lse = fake_gpu.forward(q, k, v, **options)
        method = self.one_of(None, *METHODS)
        how = {"deterministic": self.one_of(False, True)} if method != "single_pass" else {}
        fake_gpu.backward(q, k, v, o, lse, o.copy(), method=method, **how, **options)

    def decode(self) -> None:
        from support import fake_gpu

        q, pages = self.laid_out(self.rows, self.heads), self.one_of(None, 16, 48)
        new = self.one_of(0, 0, 1, self.rows)
        options = {"k": self.laid_out(new, self.heads_kv), "v": self.laid_out(new, self.heads_kv)} if new else {}
        if pages is None:
            caches = (self.laid_out(self.keys + new, self.heads_kv) for _ in "kv")
        else:
            columns = -(-(self.keys + new) // pages)
            options["block_table"] = self.array(self.batch, columns, dtype="int32")
            caches = (self.laid_out(pages, self.heads_kv, self.batch * columns) for _ in "kv")
        options |= {"causal": self.one_of(False, True), "num_splits": self.one_of(None, 1), "layout": self.layout}
        fake_gpu.decode(q, *caches, self.array(self.batch, dtype="int32"), **options, **self.features())

    def merge(self) -> None:
        from support import fake_gpu

        shape, wide = (3, self.batch, self.rows, self.heads), accumulator(self.dtype)
        fake_gpu.merge(self.array(*shape, self.head_dim), self.array(3, self.batch, *shape[:1:-1], dtype=wide))


KINDS_OF_CALLS = ((), ("window", "softcap"), ("alibi_slopes", "sink"), ("bias",), ("window", "cu_seqlens"))


@pytest.mark.sample(arch=("sm_90",), dtype=("bfloat16",), names=((), ("alibi_slopes", "sink")))
@pytest.mark.parametrize("names", KINDS_OF_CALLS, ids="+".join)
@pytest.mark.parametrize(
    ("arch", "dtype", "head_dim"),
    [
        ("sm_90", "bfloat16", 64), ("sm_90", "float32", 60), ("sm_80", "float16", 128), ("sm_80", "float32", 64),
        ("sm_86", "float16", 256), ("sm_75", "float32", 128), ("sm_89", "float64", 192), ("sm_120", "bfloat16", 40),
    ],
)  # fmt: skip
def test_no_call_compiles_after_it(listed, monkeypatch, arch, dtype, head_dim, names):
    """Draws forwards, backwards, calls of decode and merges, for GPUs with few and many multiprocessors."""
    pytest.importorskip("cupy", exc_type=ImportError)
    from support.fake_gpu import fake_gpu

    from fa2cupy.families import sm90

    monkeypatch.setattr(sm90, "_can_encode_maps", lambda: True)
    ahead_of_calls = listed(arch, dtypes=dtype, head_dims=head_dim, features=names)
    drawn = DrawnCalls(np.random.default_rng(head_dim), dtype, head_dim, names)
    decodes = {"bias", "cu_seqlens"}.isdisjoint(names)
    for multiprocessors in (7, 132):
        device = dataclasses.replace(DeviceInfo.named(arch), multiprocessors=multiprocessors)
        with fake_gpu(monkeypatch, device, run=lambda launch: None) as launched:
            for _ in range(12):
                drawn.sizes()
                with contextlib.suppress(UnsupportedProblemError):  # shared memory, or features that decode has not
                    drawn.attention()
                if decodes:
                    with contextlib.suppress(UnsupportedProblemError):
                        drawn.decode()
                drawn.merge()
        assert {stage.spec for stage in launched} <= ahead_of_calls
        operations = {stage.spec.operation for stage in launched}
        fits = (arch, dtype) != ("sm_89", "float64")  # which has too little shared memory
        assert {"forward", "merge"} <= operations and ("decode" in operations) == (decodes and fits)


def test_several_combinations_are_several_kinds_of_calls(listed):
    common = {"dtypes": "float16", "head_dims": 64}
    plain, both, sink = (listed("sm_80", **common, features=names) for names in ((), ("window", "softcap"), "sink"))
    assert plain != both != sink != plain
    assert listed("sm_80", **common, features=[(), ("softcap", "window"), ["sink"]]) == plain | both | sink
    assert listed("sm_80", **common, features=[]) == listed("sm_80", **common, features=[()]) == plain


def test_one_value_is_as_good_as_a_list_of_one(listed):
    lists = listed(["sm_80"], dtypes=["float16"], head_dims=[64], causal=[True], methods=["two_pass"])
    assert listed("sm_80", dtypes="float16", head_dims=64, causal=True, methods="two_pass") == lists
    whole = {spec.operation for spec in lists if not spec.is_split}
    assert whole == {"forward", "merge_forward", "delta", "backward_dq", "backward_dkdv", "sum_dkdv", "decode", "merge"}
    assert {spec.operation for spec in lists if spec.is_split} == {"forward", "backward_dkdv"}
    assert listed("sm_80", dtypes=np.float16, head_dims=np.array([64]), causal=np.True_, methods="two_pass") == lists


def test_of_several_methods_those_are_left_out_that_do_not_take_a_head_dim(listed):
    one = {"dtypes": "bfloat16", "head_dims": 512, "causal": True}
    by_default = listed("sm_90", **one)
    assert by_default == listed("sm_90", **one, methods="two_pass")
    assert {spec.operation for spec in by_default} >= {"forward", "backward_dq", "backward_dkdv", "decode", "merge"}
    assert by_default < listed("sm_90", **{**one, "head_dims": (64, 512)}, methods=("single_pass", "two_pass"))
    for methods in ("single_pass", ("single_pass", "one_tile")):
        with pytest.raises(UnsupportedProblemError, match="head_dim=512 is above the 256 of 'single_pass'; use 'two_"):
            listed("sm_90", **one, methods=methods)


def test_wide_keys_have_kernels_of_decode_alone(listed):
    one = {"dtypes": "bfloat16", "head_dims": 576, "head_dim_v": 512}
    found = listed("sm_90", **one)
    assert {spec.operation for spec in found} == {"decode", "merge"}
    both = listed("sm_90", **{**one, "head_dims": (64, 576)})
    assert found < both and both - found == listed("sm_90", **{**one, "head_dims": 64}) - found
    message = (
        "^head_dims: up to 512 is supported, and up to 576 for decode of latent attention, with head_dim_v=512 or le"
    )
    for more in ({"head_dim_v": None}, {"decode": False}, {"config": TileConfig(16, 64, 4, 2)}, {"family": "sm80"}):
        with pytest.raises(UnsupportedProblemError, match=message):
            listed("sm_90", **one | more)
    with pytest.raises(UnsupportedProblemError, match=r"^head_dim: no default tile of decode \(sm80\) at head_dim 576"):
        listed("sm_86", **one)


def test_a_tile_of_ones_own_is_compiled_instead_of_the_default(listed):
    tile = TileConfig(64, 48, 4)
    one = {"dtypes": "float16", "head_dims": 64, "causal": True}
    assert {(spec.operation, spec.is_split): spec.tile for spec in listed("sm_80", **one, methods=(), config=tile)} == {
        ("forward", False): tile,
        ("forward", True): tile,
        ("merge_forward", False): TileConfig(64, 1, 4),
    }
    by_operation = {spec.operation: spec.tile for spec in listed("sm_80", **one, config={"backward_dq": tile})}
    assert by_operation["backward_dq"] == tile != by_operation["forward"]
    with pytest.raises(ValueError, match="^config: 64x48, 3 warps, 1 stages is not legal for forward at head_dim 64"):
        listed("sm_80", **one, methods=(), config=TileConfig(64, 48, 3))


WRONG = {
    "arch unknown": ("sm_8", {}, UnsupportedProblemError, "^arch: 'sm_8' is not known; known are sm_70, "),
    "arch number": ([80], {}, TypeError, "^arch: expected a str such as 'sm_90', got int"),
    "arch too old": ("sm_75", {}, UnsupportedProblemError, r"^no kernel takes float16 on T4 \(sm_75\)"),
    "dtype": ("sm_80", {"dtypes": "fp16"}, ValueError, "^dtype: expected float16, bfloat16, .* or float64, got 'fp16'"),
    "dtype int8": ("sm_80", {"dtypes": ["int8"]}, UnsupportedProblemError, "^dtype: expected float16, .* got int8"),
    "head_dim 0": ("sm_80", {"head_dims": 0}, ValueError, "^head_dims: expected at least 1, got 0"),
    "head_dim 600": ("sm_80", {"head_dims": (64, 600)}, UnsupportedProblemError, "^head_dims: up to 512 is supported"),
    "head_dim float": ("sm_80", {"head_dims": 64.0}, TypeError, "^head_dims: expected an int, got float"),
    "head_dim_v": ("sm_80", {"head_dim_v": -1}, ValueError, "^head_dim_v: expected at least 1, got -1"),
    "causal": ("sm_80", {"causal": [0, 1]}, TypeError, "^causal: expected a bool, got int; write causal=False"),
    "method": ("sm_80", {"methods": ["onepass"]}, ValueError, "^methods: expected 'single_pass', .*, got 'onepass'"),
    "method None": (
        "sm_80",
        {"methods": None},
        ValueError,
        "^methods: expected 'single_pass', 'two_pass' or 'one_tile', got None",
    ),
    "decode": ("sm_80", {"decode": 1}, TypeError, "^decode: expected a bool, got int; write decode=True"),
    "second_order": ("sm_80", {"second_order": 1}, TypeError, "^second_order: expected a bool, got int; write sec"),
    "jobs negative": ("sm_80", {"jobs": -1}, ValueError, "^jobs: expected at least 1, or None for one per CPU, got -1"),
    "jobs float": ("sm_80", {"jobs": 2.0}, TypeError, "^jobs: expected an int or None, got float"),
    "feature": ("sm_80", {"features": "dropout"}, ValueError, "^features: expected .* did you mean 'dropout_p'"),
    "feature dbias": ("sm_80", {"features": ["dbias"]}, ValueError, "got 'dbias'; did you mean 'return_dbias'"),
    "feature number": ("sm_80", {"features": 3}, TypeError, "^features: expected a str, got int"),
    "features mixed": ("sm_80", {"features": ["sink", ("mask",)]}, TypeError, "^features: expected names for one call"),
    "gradient alone": ("sm_80", {"features": "return_dsink"}, ValueError, "^features: 'return_dsink' needs 'sink'"),
    "tangent alone": ("sm_80", {"features": "bias_tangent"}, ValueError, "^features: 'bias_tangent' needs 'bias' be"),
    "gradient of no function": (
        "sm_80",
        {"return_dscore_args": True},
        ValueError,
        "^return_dscore_args: there is no score",
    ),
    "function": (
        "sm_80",
        {"mask_mod": lambda q, k: q > k},
        TypeError,
        "^mask_mod: expected a function of 4 parameters",
    ),
    "arrays": ("sm_80", {"score_args": (np.zeros(3),)}, ValueError, "^score_args: there is no score_mod"),
    "family": ("sm_80", {"family": "sm90"}, UnsupportedProblemError, "^family 'sm90' does not run on A100"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_what_cannot_be_compiled_is_refused_before_anything_is(listed, mistake):
    archs, options, error, match = WRONG[mistake]
    with pytest.raises(error, match=match) as caught:
        listed(archs, **options)
    assert caught.type is error


def test_a_kernel_is_printed_without_its_machine_code():
    spec = KernelSpec("forward", SM80, "sm_80", "float16", 64, True, TileConfig(64, 32, 4))
    kernel = CompiledKernel(spec, b"\x7fELF" * 10_000, 168, 0, 0, "ptxas info" * 1000, 1.5)
    assert repr(kernel) == (
        "<CompiledKernel forward (sm80 for sm_80, float16, head_dim 64, causal, 64x32, 4 warps, 1 stages): "
        "168 registers, 0 bytes spilled, compiled in 1.50 s>"
    )
    assert kernel.symbol == spec.symbol


# ------------------------------------------------------------------------------------------- progress and interruptions


class CountedBar:
    """A progress bar that counts its updates."""

    def __init__(self, total: int, desc: str):
        self.total, self.desc, self.done = total, desc, 0

    def __enter__(self):
        return self

    def __exit__(self, *exception: object) -> None:
        self.closed = True

    def update(self) -> None:
        self.done += 1


def test_kernels_of_ranks_are_for_calls_of_ranks(listed):
    one = {"dtypes": ["float16", "float64"], "head_dims": 64, "methods": ()}
    added = listed(["sm_80", "sm_90"], **one, distributed=True) - listed(["sm_80", "sm_90"], **one)
    kinds = {(spec.arch, spec.operation, spec.dtype, spec.head_dim) for spec in added}
    copies = {("copy_matrices", "float32", word) for word in (16, 8, 4, 2, 1)}
    sums = {("sum_arrays", *kind) for kind in (("float16", 8), ("float32", 4), ("float64", 2))}
    singles = {("sum_arrays", dtype, 1) for dtype in ("float16", "float32", "float64")}
    assert kinds == {(arch, *kind) for arch in ("sm_80", "sm_90") for kind in copies | sums | singles}


def test_progress_is_shown_on_request_only(listed, monkeypatch, capsys):
    bars = []
    monkeypatch.setattr(ahead, "progress_bar", lambda *arguments: bars.append(CountedBar(*arguments)) or bars[-1])
    one = {"dtypes": "float16", "head_dims": 64}
    specs = listed("sm_80", **one)
    assert not bars
    assert listed("sm_80", **one, progress=True) == specs
    assert (bars[0].total, bars[0].done, bars[0].closed) == (len(specs), len(specs), True)
    assert capsys.readouterr() == ("", "")


def test_where_there_is_no_terminal_progress_is_lines(capsys):
    with progress_module.progress(2, "compiling") as bar:
        bar.update()
        bar.update()
    assert capsys.readouterr().err == "compiling [1/2]\ncompiling [2/2]\n"


def test_an_error_ends_the_work_that_has_not_begun(monkeypatch):
    begun = []

    def fail(spec):
        begun.append(spec)
        time.sleep(0.01)
        raise fa2cupy.KernelCompileError("NVRTC refused it")

    monkeypatch.setattr(cache, "cached_kernel", fail)
    with pytest.raises(fa2cupy.KernelCompileError, match="NVRTC refused it"):
        fa2cupy.precompile(["sm_80", "sm_86"], jobs=1, decode=False)
    assert len(begun) < 40, "of more than a hundred"


def test_ctrl_c_is_one_line_and_the_shells_status(monkeypatch, capsys):
    def interrupt(futures: list[Future]):
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "as_completed", interrupt)
    monkeypatch.setattr(cache, "cached_kernel", lambda spec: spec)
    assert cli.main(["precompile", "sm_80", "--dtypes", "float16", "--head-dims", "64"]) == 130
    told = capsys.readouterr()
    assert told.err.startswith("fa2cupy: interrupted; what is compiled so far is kept in ")
    assert told.err.count("\n") == 1
    assert told.out == ""


@pytest.mark.parametrize("error", [RuntimeError, ValueError, fa2cupy.KernelCompileError])
def test_scripts_keep_the_tracebacks_of_what_should_not_happen(error, capsys):
    def interrupt():
        raise KeyboardInterrupt

    def fail():
        raise error("unforeseen")

    assert cli.run_command("sweep.py", interrupt) == 130
    assert capsys.readouterr().err == "sweep.py: interrupted\n"
    with pytest.raises(error, match="unforeseen"):
        cli.run_command("sweep.py", fail)
    assert cli.run_command("sweep.py", lambda: 3) == 3


@pytest.mark.matrix
@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c_in_a_process(tmp_path):
    pytest.importorskip("cupy", exc_type=ImportError)
    command = [sys.executable, "-m", "fa2cupy", "precompile", "sm_80", "--jobs", "1"]
    environment = {**os.environ, "FA2CUPY_CACHE_DIR": str(tmp_path)}
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs of shells ignore it
    )  # fmt: skip
    assert re.fullmatch(r"compiling \[1/\d+\]\n", process.stderr.readline())
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert err.endswith(f"fa2cupy: interrupted; what is compiled so far is kept in {tmp_path}\n")


@pytest.mark.skipif(os.name == "nt", reason="pipes")
def test_a_reader_that_has_seen_enough_gets_no_traceback(run_python):
    script = """
import subprocess, sys
command = [sys.executable, "-u", "-m", "fa2cupy", "info"]
process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
process.stdout.close()
print(process.stderr.read(), process.wait())
"""
    assert run_python(script).stdout == "b'' 141\n"


# ----------------------------------------------------------------------------------------------------- the command line


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"fa2cupy {fa2cupy.__version__}\n"


def command_line(monkeypatch, arguments: str) -> dict:
    """Returns the arguments that the command line passes to `precompile`."""
    asked = {}
    monkeypatch.setattr(cli, "precompile", lambda archs, **options: asked.update(archs=archs, **options) or [])
    assert cli.main(["precompile", *arguments.split()]) == 0
    return asked


def test_options_of_the_command_line(monkeypatch):
    assert command_line(monkeypatch, "")["archs"] is None
    asked = command_line(monkeypatch, "sm_80 sm_90 --dtypes float32 --head-dims 64 96 --head-dim-v 32 --jobs 3")
    assert asked == {
        "archs": ["sm_80", "sm_90"], "dtypes": ["float32"], "head_dims": [64, 96], "head_dim_v": 32, "features": (),
        "decode": True, "second_order": False, "distributed": False, "jobs": 3, "progress": True,
    }  # fmt: skip
    assert command_line(monkeypatch, "sm_80 --second-order")["second_order"] is True
    assert command_line(monkeypatch, "sm_80 --no-decode")["decode"] is False
    asked = command_line(monkeypatch, "sm_80 --features window softcap --features --features sink")
    assert asked["features"] == [["window", "softcap"], [], ["sink"]]


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        ("sm_80 --head-dims 0", 2, "head_dims: expected at least 1, got 0"),
        ("sm_80 --jobs -1", 2, "jobs: expected at least 1"),
        ("sm_80 --features dropout", 2, "did you mean 'dropout_p'"),
        ("sm_75", 1, "no kernel takes float16 on T4 (sm_75)"),
        ("sm_8", 1, "arch: 'sm_8' is not known"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(arguments, status, text, capsys):
    assert cli.main(["precompile", *arguments.split()]) == status
    told = capsys.readouterr().err
    assert told.startswith("fa2cupy: ")
    assert told.count("\n") == 1
    assert text in told
