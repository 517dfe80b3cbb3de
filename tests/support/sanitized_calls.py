"""Calls of every kernel on small shapes, to be run under compute-sanitizer.

There are no random numbers on the device and no checks, so that the tool sees little besides this package's kernels.

    python sanitized_calls.py            everything
    python sanitized_calls.py plain      one of PARTS
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS.parent), str(TESTS)]  # the checkout comes before a package that is installed

import cupy
import numpy as np
from support.decode_cases import Case
from support.feature_cases import booleans, extras, numbers, options_of
from support.second_order_calls import CURVED
from support.traced_cases import on_gpu, ready_made

import fa2cupy
from fa2cupy.distributed.local.copy_kernel import copy_matrices
from fa2cupy.distributed.local.matrices import Matrix
from fa2cupy.distributed.local.sums import sum_into
from fa2cupy.problem.dtypes import ACCUMULATOR
from fa2cupy.testing import make_inputs

#: (dtype, head_dim), or (dtype, head_dim, head_dim_v): a native and a padded dimension of each main loop, and pairs.
KINDS = (
    ("float16", 64),
    ("bfloat16", 128),
    ("bfloat16", 24),
    ("float16", 40),
    ("float16", 96),
    ("bfloat16", 160),
    ("float16", 256),
    ("bfloat16", 320),
    ("float32", 64),
    ("float32", 320),
    ("float16", 40, 72),
    ("float16", 512, 96),
    ("float32", 72, 40),
)
#: Features that are compiled into the same kernels, and the (dtype, head_dim) that these are called on.
FEATURES = (("window", "softcap", "alibi by batch", "sink"), ("mask of rows", "padding", "dropout"), ("bias of heads",))
FEATURE_KINDS = (("float16", 64), ("bfloat16", 128), ("float16", 256), ("float32", 64))
#: What clusters compute.
PAIR = ("bfloat16", 192, 128)
#: head_dim, or head_dim and that of v, of float64, and of tangents: one and two warps for the gradients of a key in
# float64, wide, a pair. A head_dim that is padded comes besides.
COLUMNS = ((64,), (128,), (256,), (40, 72))


def columns_of(head_dim: int, head_dim_v: int | None = None) -> dict[str, int | None]:
    """Returns keywords of `make_inputs`."""
    return {"head_dim": head_dim, "head_dim_v": head_dim_v}


def pairs() -> None:
    """Calls what clusters compute, plain and with features."""
    plain((PAIR,))
    with_features((PAIR,))


def shared_rows() -> None:
    """Calls what warp groups that share rows compute: features of forwards, shares of tiles, packed sequences."""
    sizes = {"batch": 2, "num_heads": 2, "seqlen_q": 150, "seqlen_k": 230}
    offsets = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), cupy.asarray(np.array([3, 90, 90, 150], np.int32)))
    for columns in ((320, 264), (512, 512)):
        q, k, v, do = make_inputs("bfloat16", **sizes, num_heads_kv=1, **columns_of(*columns), xp=cupy)
        # The tool considers results that TMA stores as unwritten, so no other kernel may read them.
        o, lse = fa2cupy.forward(q, k, v, family="sm80", num_splits=1)
        for causal, num_splits in itertools.product((False, True), (1, 3)):
            fa2cupy.forward(q, k, v, causal=causal, num_splits=num_splits)
            fa2cupy.backward(q, k, v, o, lse, do, causal=causal, num_splits=num_splits)
        fa2cupy.backward(q, k, v, o, lse, do, window=(30, 5))
        fa2cupy.forward(*(x[0] for x in (q, k, v)), **offsets, causal=True)
        fa2cupy.backward(*(x[0] for x in (q, k, v, o, lse, do)), **offsets, causal=True)
        for names in FEATURES:
            given = {key: value for name in names for key, value in options_of(name, "bfloat16", sizes).items()}
            fa2cupy.forward(q, k, v, **on_gpu(given, cupy.asarray))


def plain(kinds: tuple = KINDS) -> None:
    """Calls forward, delta and both backward methods: ragged tiles, a diagonal, grouped heads, rows that see no key."""
    for dtype, *columns in kinds:
        for causal, (seqlen_q, seqlen_k) in ((False, (70, 150)), (True, (150, 130))):
            sizes = {
                "seqlen_q": seqlen_q,
                "seqlen_k": seqlen_k,
                "num_heads": 2,
                "num_heads_kv": 1,
                **columns_of(*columns),
            }
            q, k, v, do = make_inputs(dtype, **sizes, xp=cupy)
            half = dtype in ("float16", "bfloat16")
            if not half or max(columns) <= 256:  # `shared_rows` has the others
                fa2cupy.forward(q, k, v, causal=causal, num_splits=1)
            # The tool considers results that TMA stores as unwritten, so no other kernel may read them.
            o, lse = fa2cupy.forward(q, k, v, causal=causal, family="sm80" if half else None, num_splits=1)
            splits = (1, 3) if causal and (dtype, *columns) in (*FEATURE_KINDS, PAIR) and half else (1,)
            for family, num_splits in itertools.product((None, "sm80")[: 1 + half], splits):
                how = {"causal": causal, "family": family, "num_splits": num_splits}
                if num_splits > 1:
                    fa2cupy.forward(q, k, v, **how)
                for method in ("single_pass", "two_pass")[half and max(columns) > 256 :]:
                    fa2cupy.backward(q, k, v, o, lse, do, method=method, **how)


def both() -> None:
    """Calls backwards of self-attention that need one launch, with delta of their own and with the caller's."""
    for (dtype, head_dim), length in itertools.product((("float16", 64), ("bfloat16", 40)), (70, 300)):
        sizes = {"seqlen_q": length, "seqlen_k": length, "num_heads": 2, "head_dim": head_dim}
        q, k, v, do = make_inputs(dtype, **sizes, xp=cupy)
        for causal in (False, True):
            o, lse = forward_by_threads(q, k, v, dtype, {"causal": causal})
            for given in ({}, {"dlse": lse}, {"delta": fa2cupy.delta(o, do)}):
                fa2cupy.backward(q, k, v, o, lse, do, causal=causal, method="two_pass", **given)


def of_float64() -> None:
    """Calls float64 on tensor cores, where the GPU has them for it, and on CUDA cores: plain, with features, packed."""
    sizes = {"batch": 2, "num_heads": 2, "seqlen_q": 150, "seqlen_k": 130}
    offsets = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), cupy.asarray(np.array([3, 90, 90, 130], np.int32)))
    for columns in ((50,), *COLUMNS):
        q, k, v, do = make_inputs("float64", **sizes, num_heads_kv=1, **columns_of(*columns), xp=cupy)
        for family, causal in ((None, False), (None, True), ("simt", True)):
            check_calls(q, k, v, do, "float64", {"causal": causal}, family)
    q, k, v, do = make_inputs("float64", **sizes, num_heads_kv=1, head_dim=64, xp=cupy)
    for names in FEATURES:
        given = {key: value for name in names for key, value in options_of(name, "float64", sizes).items()}
        check_calls(q, k, v, do, "float64", on_gpu(given, cupy.asarray))
    ids = cupy.asarray(np.repeat(np.arange(5, dtype="int32"), 30)[None].repeat(2, axis=0))
    made = fa2cupy.block_mask(fa2cupy.mods.document, (ids,), 2, 2, 150, 130, tile=(64, 64))
    own = {"mask_mod": fa2cupy.mods.document, "mask_args": (ids,), "block_mask": made}
    check_calls(q, k, v, do, "float64", own)
    check_calls(*(x[0] for x in (q, k, v, do)), "float64", {**offsets, "causal": True})


def decoding() -> None:
    """Decodes from a cache with pages and new rows, and from one that is cut among blocks, and merges two results.

    On Hopper, both have clusters of blocks. Sequences that are many have none.
    """
    kinds = (("float16", 64), ("bfloat16", 128), ("float32", 64), PAIR, ("float32", 40, 72), ("bfloat16", 512))
    for dtype, *columns in (*kinds, ("bfloat16", 576, 512)):
        for case in (
            Case(dtype, (0, 17, 900), page_size=16, num_new=1, seqlen_q=2, **columns_of(*columns)),
            Case(dtype, (20_000,), heads=(8, 1), **columns_of(*columns)),
            Case(dtype, tuple(range(40, 1400, 70)), **columns_of(*columns)),
            *([Case(dtype, (700, 90), heads=(64, 1), **columns_of(*columns))] if columns[0] > 512 else []),
        ):
            q, k_cache, v_cache, lengths, options = case.arguments()
            keywords = {name: cupy.asarray(x) for name, x in options.items()}
            caches = [cupy.asarray(k_cache), cupy.asarray(v_cache)]
            if case.has_values_in_keys:
                caches[1] = caches[0][..., : case.head_dim_v]
                keywords |= {"v": keywords["k"][..., : case.head_dim_v]} if case.num_new else {}
            o, lse = fa2cupy.decode(cupy.asarray(q), *caches, cupy.asarray(lengths), **keywords)
            fa2cupy.merge([o, o], [lse, lse])


def of_parts(*columns: int) -> None:
    """Calls float32 on tensor cores: plain, with features, packed, and with a head that is left to the fallback."""
    sizes = {"batch": 2, "num_heads": 4, "seqlen_q": 150, "seqlen_k": 130}
    offsets = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), cupy.asarray(np.array([3, 90, 90, 130], np.int32)))
    for names in ((), *FEATURES):
        q, k, v, do = make_inputs("float32", **sizes, num_heads_kv=2, **columns_of(*columns), xp=cupy)
        given = {key: value for name in names for key, value in options_of(name, "float32", sizes).items()}
        options = {key: cupy.asarray(x) if isinstance(x, np.ndarray) else x for key, x in given.items()}
        k[0, 5, 1, 3] = 1e9
        check_parts(q, k, v, do, {"causal": not names, **options})
        if not names:
            check_parts(*(x[0] for x in (q, k, v, do)), {**offsets, "causal": True})


def check_parts(q, k, v, do, options: dict) -> None:
    """Calls forward and all backward methods of the families that the GPU runs."""
    capability, is_wide = int(cupy.cuda.Device().compute_capability), max(q.shape[-1], v.shape[-1]) > 128
    methods = {"sm90": ("single_pass", "two_pass")[is_wide:]} if capability == 90 else {}
    if capability >= 80 and not is_wide:
        methods["sm80"] = ("two_pass",)
    for family, names in methods.items():
        o, lse = fa2cupy.forward(q, k, v, family=family, **options)
        for method in names:
            fa2cupy.backward(q, k, v, o, lse, do, family=family, method=method, **options)


def with_features(kinds: tuple) -> None:
    """Calls every feature, with its gradient if it has one."""
    sizes = {"batch": 2, "num_heads": 2, "seqlen_q": 150, "seqlen_k": 130}
    for (dtype, *columns), names in itertools.product(kinds, FEATURES):
        q, k, v, do = make_inputs(dtype, **sizes, num_heads_kv=1, **columns_of(*columns), xp=cupy)
        given = {key: value for name in names for key, value in options_of(name, dtype, sizes).items()}
        options = {key: cupy.asarray(x) if isinstance(x, np.ndarray) else x for key, x in given.items()}
        check_calls(q, k, v, do, dtype, options)


def with_settings() -> None:
    """Calls every feature, and biases that leading axes share."""
    with_features(FEATURE_KINDS)
    sizes = {"batch": 2, "num_heads": 2, "seqlen_q": 150, "seqlen_k": 130}
    for dtype, head_dim in FEATURE_KINDS[::3]:  # two leading axes, each of which one of the arrays has
        made = make_inputs(dtype, **sizes | {"batch": 6}, num_heads_kv=1, head_dim=head_dim, xp=cupy)
        q, k, v, do = (x.reshape(2, 3, *x.shape[1:]) for x in made)
        bias, mask = numbers((2, 1, 2, 150, 130), dtype), booleans((3, 1, 150, 130))
        of_pairs = {"bias": cupy.asarray(bias)}
        check_calls(q, k, v, do, dtype, of_pairs)
        o, lse = forward_by_threads(q, k, v, dtype, of_pairs)
        fa2cupy.backward(q, k, v, o, lse, do, deterministic=True, return_dbias=True, **of_pairs)
        check_calls(q, k, v, do, dtype, {"bias": cupy.asarray(bias), "mask": cupy.asarray(mask)})
    # So many sequences share a bias that forwards keep it, of rows on 16 bytes and of others, for several at a time.
    for keys, head_dim in ((88, 32), (90, 32), (90, 64)):
        sizes = {
            "batch": 600,
            "num_heads": 2,
            "num_heads_kv": 2,
            "seqlen_q": 70,
            "seqlen_k": keys,
            "head_dim": head_dim,
        }
        inputs, bias = make_inputs("bfloat16", **sizes, xp=cupy), cupy.asarray(numbers((2, 70, keys), "bfloat16"))
        fa2cupy.forward(*inputs[:3], bias=bias)
        check_calls(*(x[:2] for x in inputs), "bfloat16", {"bias": bias})


def short() -> None:
    """Calls backwards whose blocks have all keys: rows that see no key, features, and dbias that sequences share."""
    for (dtype, head_dim), family in itertools.product((("float16", 64), ("bfloat16", 32)), (None, "sm80")):
        for seqlen_q, seqlen_k in ((150, 120), (60, 50)):
            sizes = {"batch": 9, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "num_heads": 2, "head_dim": head_dim}
            bias = cupy.asarray(numbers((2, seqlen_q, seqlen_k), dtype))
            for num_heads_kv, options in itertools.product(
                (1, 2), ({}, {"bias": bias}, {"bias": bias, "softcap": 5.0})
            ):
                q, k, v, do = make_inputs(dtype, **sizes, num_heads_kv=num_heads_kv, xp=cupy)
                o, lse = forward_by_threads(q, k, v, dtype, {"causal": True, **options})
                how = {"method": "one_tile", "causal": True, "family": family, **options, **extras(options)}
                fa2cupy.backward(q, k, v, o, lse, do, dlse=lse, **how)
                if family is None and options.keys() == {"bias"}:
                    padding = {"key_padding_mask": cupy.arange(seqlen_k) < 30 + 9 * cupy.arange(9)[:, None]}
                    for method in ("single_pass", "two_pass"):
                        fa2cupy.backward(q, k, v, o, lse, do, method=method, **padding, **options)
                    own = {"deterministic": True, "return_dbias": True}
                    fa2cupy.backward(q, k, v, o, lse, do, **own, **padding, **options)


def with_functions() -> None:
    """Calls a function of scores whose table has a gradient, and one that hides keys."""
    cases = ready_made(2, 2, 150, 130)
    for (dtype, head_dim), name in itertools.product(FEATURE_KINDS, ("t5_relative", "document")):
        q, k, v, do = make_inputs(
            dtype, batch=2, seqlen_q=150, seqlen_k=130, num_heads=2, num_heads_kv=1, head_dim=head_dim, xp=cupy
        )
        check_calls(q, k, v, do, dtype, on_gpu(cases[name].options, cupy.asarray))


def packed() -> None:
    """Calls packed sequences, one of them empty."""
    offsets = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), cupy.asarray(np.array([3, 90, 90, 230], np.int32)))
    for dtype, head_dim in FEATURE_KINDS:
        inputs = make_inputs(dtype, seqlen_q=240, seqlen_k=240, num_heads=2, head_dim=head_dim, xp=cupy)
        check_calls(*(x[0] for x in inputs), dtype, {**offsets, "causal": True})


def sparse() -> None:
    """Calls the kernels that make a sparse map, list its tiles and visit them."""
    sizes = {"batch": 2, "num_heads": 2, "seqlen_q": 250, "seqlen_k": 230}
    ids = cupy.asarray(np.repeat(np.arange(5, dtype="int32"), 50)[None].repeat(2, axis=0))
    for dtype, head_dim in FEATURE_KINDS:
        q, k, v, do = make_inputs(dtype, **sizes, num_heads_kv=1, head_dim=head_dim, xp=cupy)
        made = fa2cupy.block_mask(fa2cupy.mods.document, (ids,), 2, 2, 250, 230, tile=(64, 64))
        own = {"mask_mod": fa2cupy.mods.document, "mask_args": (ids,), "block_mask": made}
        check_calls(q, k, v, do, dtype, own)
        many = fa2cupy.mods.dilated_window(100, 3)  # more than two intervals
        made = fa2cupy.block_mask(many, (), 2, 2, 250, 230, tile=(64, 64), like=q)
        check_calls(q, k, v, do, dtype, {"mask_mod": many, "block_mask": made})
        given = fa2cupy.BlockMask(cupy.asarray(np.eye(2, dtype=bool)), 250, 230)
        check_calls(q, k, v, do, dtype, {"block_mask": given, "causal": True})


def boxes() -> None:
    """Calls kernels whose tiles are boxes of tokens, which do not divide the grids."""
    for shape, windows in (((13, 19), (5, 7)), ((5, 9, 7), (3, 5, 3))):
        mask, length = fa2cupy.mods.neighborhood(shape, windows), math.prod(shape)
        for dtype, head_dim in itertools.product(("float16", "bfloat16"), (64, 128)):
            sizes = {"seqlen_q": length, "seqlen_k": length, "num_heads": 2, "num_heads_kv": 1}
            q, k, v, do = make_inputs(dtype, batch=2, head_dim=head_dim, xp=cupy, **sizes)
            o, lse = fa2cupy.forward(q, k, v, mask_mod=mask)
            fa2cupy.backward(q, k, v, o, lse, do, mask_mod=mask, method="single_pass")


def second_order(dtype: str) -> None:
    """Calls forward mode and second derivatives: plain, with tangents of features, with functions and a map, packed."""
    sizes = {"num_heads": 2, "seqlen_q": 150, "seqlen_k": 130}
    offsets = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), cupy.asarray(np.array([3, 90, 90, 130], np.int32)))
    mask = fa2cupy.mods.causal()
    made = fa2cupy.block_mask(mask, (), 1, 1, 150, 130, tile=(64, 64), like=offsets["cu_seqlens_q"])
    # Results with rows of 50 elements of 16 bits are copied, and the tool considers what TMA has stored as unwritten.
    padded = (40,) if dtype == "bfloat16" else (50,)
    wide = ((264, 328),) if dtype == "bfloat16" else ()
    for columns in (padded, *COLUMNS, *wide):
        inputs = make_inputs(dtype, **sizes, num_heads_kv=1, **columns_of(*columns), xp=cupy)
        check_tangents(*inputs, {"causal": True})
    inputs = make_inputs(dtype, **sizes, batch=2, num_heads_kv=1, head_dim=64, xp=cupy)
    for names in FEATURES:
        given = {k: x for name in names for k, x in options_of(name, dtype, sizes | {"batch": 2}).items()}
        check_tangents(*inputs, on_gpu(given, cupy.asarray))
    check_tangents(*inputs, {**on_gpu(CURVED, cupy.asarray), "mask_mod": mask, "block_mask": made})
    check_tangents(*(x[0] for x in inputs), {**offsets, "causal": True})


def check_tangents(q, k, v, do, options: dict) -> None:
    """Calls the three functions. Each array is its own tangent."""
    moved = {name: options[name] for name in ("bias", "sink") if name in options}
    tangents = {f"{name}_tangent": x for name, x in moved.items()}
    more = {name: True for name in extras(options) if name != "return_dscore_args"}
    # The tool considers results that TMA stores as unwritten, and other kernels read o and tangents of it.
    o, ot, gdo = (cupy.asarray(np.zeros(do.shape, do.dtype)) for _ in range(3))
    _, lse, _, lset = fa2cupy.jvp(q, k, v, q, k, v, **options, **tangents, out=(o, None, ot, None))
    given = (q, k, v, o, lse, do)
    fa2cupy.backward_jvp(*given, q, k, v, ot, lset, do, dlse=lse, dlset=lset, **options, **more, **tangents)
    out = (None, None, None, gdo, *(None for _ in more))
    cotangents = {f"gd{name}": x for name, x in moved.items()}
    fa2cupy.double_backward(*given, q, k, v, **options, **more, **cotangents, out=out)


def copied() -> None:
    """Copies matrices of rows of 37 words, of each size, and sums arrays by words of several elements and of one."""
    for word in (16, 8, 4, 2, 1):
        source, target = (cupy.asarray(np.zeros((90, 40 * word), np.uint8)) for _ in range(2))
        one = Matrix(target.data.ptr, 40 * word, source.data.ptr, 40 * word, 37 * word, 90)
        copy_matrices([one._replace(height=50), one._replace(target=one.target + 60 * 40 * word, height=30)])
    for dtype, columns in itertools.product(("float16", "bfloat16", "float32", "float64"), (64, 59)):
        shares, *_ = make_inputs(dtype, batch=6, seqlen_q=90, num_heads=4, head_dim=columns, xp=cupy)
        sum_into(shares[0, :, 1:], [share[:, :3] for share in shares[1:]], ACCUMULATOR[dtype])


def check_calls(q, k, v, do, dtype: str, options: dict, family: str | None = None) -> None:
    """Calls forward and both backward methods."""
    fa2cupy.forward(q, k, v, **options, family=family)
    o, lse = forward_by_threads(q, k, v, dtype, options, family)
    for method in ("single_pass", "two_pass"):
        fa2cupy.backward(q, k, v, o, lse, do, **options, **extras(options), method=method, family=family)


def forward_by_threads(q, k, v, dtype: str, options: dict, family: str | None = None) -> tuple:
    """Calls the forward of a family without TMA, whose stores initcheck does not see: a backward reads o and lse."""
    return fa2cupy.forward(q, k, v, **options, family="sm80" if dtype in ("float16", "bfloat16") else family)


PARTS = {
    "plain": plain, "features": with_settings, "pairs": pairs, "shared-rows": shared_rows,
    "functions": with_functions, "short": short,
    "both": both, "packed": packed, "sparse": sparse, "boxes": boxes,
    "float32-59": functools.partial(of_parts, 59), "float32-128": functools.partial(of_parts, 128),
    "float32-250": functools.partial(of_parts, 250), "float32-96-64": functools.partial(of_parts, 96, 64),
    "float64": of_float64, "decode": decoding,
    "second-order-float32": functools.partial(second_order, "float32"),
    "second-order-float64": functools.partial(second_order, "float64"),
    "second-order-bfloat16": functools.partial(second_order, "bfloat16"), "copies": copied,
}  # fmt: skip

if __name__ == "__main__":
    for name in sys.argv[1:] or PARTS:
        PARTS[name]()
    cupy.cuda.Device().synchronize()
