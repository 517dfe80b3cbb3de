"""Mistakes that users make, and the messages: which argument it is, what was given, and what to write.

Below each piece of code is the beginning of the message, in one line or several; "..." stands for anything.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math  # noqa: F401  # the pieces of code name it
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cupy")

from support.fake_cupy import FakeArray, place
from support.fake_gpu import fake_gpu

import fa2cupy
import fa2cupy.distributed as dist  # noqa: F401
from fa2cupy import BlockMask, TileConfig, api, cli, mods, testing  # noqa: F401
from fa2cupy.cpu import calls as cpu_calls
from fa2cupy.gpu import calls as gpu_calls
from fa2cupy.problem.dtypes import ACCUMULATOR, DTYPES

# ------------------------------------------------------------------------------------- what the pieces of code may name


class Box:
    """Stands for an array, as the boxes of HIPS autograd do."""

    def __init__(self, array: np.ndarray):
        self._value = array


class Tracer:
    """Stands for an array that does not exist yet, as the tracers of JAX do."""


class Tensor:
    """An array of a tape of the user's own."""

    def __init__(self, array: np.ndarray):
        self.data = array


class Dlpack:
    """An array of a library that exchanges arrays by DLPack, in memory of a kind: 1 the host's, 2 a CUDA device's."""

    def __init__(self, device: int, dtype: str = "float32", requires_grad: bool = False):
        self._device, self.dtype, self.requires_grad = device, dtype, requires_grad

    def __dlpack__(self):
        raise RuntimeError("not to be called")

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0


class OnlyDlpack:
    def __dlpack__(self):
        raise RuntimeError("not to be called")


class Series:
    """An array of a library that NumPy converts, and that compares element by element."""

    def __array__(self):
        raise RuntimeError("not to be called")

    def __eq__(self, other: object):
        raise ValueError("the truth value of a Series is ambiguous")

    __hash__ = None


class OnlyCudaArrayInterface:
    @property
    def __cuda_array_interface__(self):
        raise RuntimeError("not to be called, as PyTorch's for a tensor with a gradient")


def score(s, b, h, q, k):
    return s


def bend(s, b, h, q, k, x):
    return s * x[h]


def mask(b, h, q, k):
    return k <= q


def command(*arguments: str) -> None:
    """Runs a command, and raises what it prints last."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        try:
            status = cli.main(arguments)
        except SystemExit as ended:
            status = ended.code
    assert status in (1, 2)
    raise RuntimeError(printed.getvalue().splitlines()[-1])


def transcript(text: str) -> dict[str, str]:
    """Returns the messages by their code."""
    found: dict[str, str] = {}
    code = ""
    for line in text.splitlines():
        if line.startswith("    "):
            found[code] = f"{found[code]} {line.strip()}".strip()
        elif line and not line.startswith("#"):
            code = line
            found[code] = ""
    return found


def names(own: Callable[[np.ndarray], np.ndarray]) -> dict[str, Any]:
    """Returns the names that the pieces of code use, with arrays of one library."""
    q, k, v, do = testing.make_inputs(batch=2, seqlen_q=8, num_heads=4, head_dim=16)
    o, lse = cpu_calls.forward(q, k, v, None, api.call_options(), {})
    k_cache, v_cache = np.zeros((2, 2, 32, 4, 16), "float32")
    arrays = {"q": q, "k": k, "v": v, "do": do, "o": o, "lse": lse, "p": q[0], "half": q.astype("float16")}
    arrays |= {"k_cache": k_cache, "v_cache": v_cache, "table": np.zeros((4, 8), "float32")}
    arrays |= {"offsets": np.array([0, 3, 8], "int32"), "n": np.array([5, 7], "int32")}
    found = {name: own(array) for name, array in arrays.items()}
    found["ones"] = lambda *shape, dtype="float32": own(np.ones(shape, dtype))
    found["tiles"] = BlockMask(own(np.ones((1, 1), bool)), 8, 8)
    found["ids"] = own(np.zeros((2, 8), "int32"))
    found["map_of_ids"] = fa2cupy.block_mask(mods.document, (found["ids"],), 2, 1, 8, 8)
    found["map_of_mask"] = fa2cupy.block_mask(mask, (), 1, 1, 8, 8, like=found["q"])
    return vars(fa2cupy) | globals() | found


# ------------------------------------------------------------------------------------------------------------ mistakes


#: Calls with arrays of either library.
ON_BOTH = transcript(
    r"""
# forward
forward(q)
    k: it is missing in forward(q, k, v): those of a packed array are views such as qkv[:, :, 0], qkv[:, :, 1], qkv[:,
    :, 2]
forward(q, k)
    v: it is missing in forward(q, k, v): those of a packed array are views such as qkv[:, :, 0], qkv[:, :, 1], qkv[:,
    :, 2]
forward(q.tolist(), k, v)
    q: ... got list; convert it with numpy.asarray(q, "float32") or cupy.asarray(q, "float32")
forward(q, k.tolist(), v)
    k: ... got list; convert it with numpy.asarray(k, "float32")
forward(None, k, v)
    q: ... got None
forward(q.astype(int), k, v)
    q: expected dtype float16, bfloat16, float32 or float64, got int64; write q.astype("float32")
forward(q, k.astype(int), v)
    k: expected dtype float32 to match q, got int64; write k.astype("float32")
forward(q.astype("float64"), k, v)
    k: expected dtype float64 to match q, got float32; write q.astype("float32"), or k.astype(q.dtype)
forward(q, k.astype("float64"), v)
    k: expected dtype float32 to match q, got float64; write k.astype("float32")
forward(q, k, v.astype("float16"))
    v: expected dtype float32 to match q, got float16; write v.astype("float32")
forward(q.astype("uint16"), k, v)
    q: expected dtype float16, bfloat16, float32 or float64, got uint16; write q.view(ml_dtypes.bfloat16) if these are
    the bits of bfloat16, else q.astype("float32")
forward(q.astype(complex), k, v)
    q: expected dtype float16, bfloat16, float32 or float64, got complex128
forward(q[0, 0, 0], k, v)
    q: expected 2 or more axes such as (batch, seqlen, heads, head_dim), got shape (16,)
forward(q[None], k, v)
    k: expected 5 axes like q, got shape (2, 8, 4, 16)
forward(q[0], k, v)
    k: expected 3 axes like q, got shape (2, 8, 4, 16)
forward(q, k[:1], v[:1])
    k: expected shape (2, seqlen_k, num_heads_kv, 16) to match q (2, 8, 4, 16), got (1, 8, 4, 16)
forward(q, k[..., :8], v)
    k: expected shape (2, seqlen_k, num_heads_kv, 16) to match q (2, 8, 4, 16), got (2, 8, 4, 8)
forward(q, k, v[:, :5])
    v: expected shape (2, 8, 4, 16) to match k, got (2, 5, 4, 16)
forward(q, k[:, :, :3], v[:, :, :3])
    k: the number of heads of q (4) must be a multiple of that of k and v, got 3
forward(*[ones(1, 4, 2, 600)] * 3)
    q: head_dim up to 512 is supported, got shape (1, 4, 2, 600)
forward(q, k, ones(2, 8, 4, 600))
    v: head_dim up to 512 is supported, got shape (2, 8, 4, 600)
forward(*[ones(1, 4, 2, 0)] * 3)
    q: head_dim must be at least 1, got shape (1, 4, 2, 0)
forward(q, k, v, causal=1)
    causal: expected a bool, got int; write causal=True
forward(q, k, v, causal="yes")
    causal: expected a bool, got str
forward(q, k, v, causal=np.array(True))
    causal: expected a bool, got ...; write bool(causal)
forward(q, k, v, is_causal=True)
    unexpected keyword argument 'is_causal'; write causal (aligned to the bottom right; PyTorch's is_causal to the top
    left, if lengths differ).
forward(q, k, v, casual=True)
    unexpected keyword argument 'casual'; did you mean 'causal'?
forward(q, k, v, scale=0.1)
    unexpected keyword argument 'scale'; write softmax_scale.
forward(q, k, v, softmax_scale="0.1")
    softmax_scale: expected a real number or None, got str
forward(q, k, v, softmax_scale=np.array(0.1))
    softmax_scale: expected a real number or None, got ...; write float(softmax_scale)
forward(q, k, v, softmax_scale=np.array([0.1]))
    softmax_scale: expected a real number or None, got ...; write float(softmax_scale.item())
forward(q, k, v, softmax_scale=float("nan"))
    softmax_scale: expected a finite number, got nan
forward(q, k, v, layout="BSHD")
    layout: expected 'bshd' or 'bhsd', got 'BSHD'; did you mean 'bshd'?
forward(q, k, v, layout="HND")
    layout: expected 'bshd' or 'bhsd', got 'HND'; did you mean 'bhsd'?
forward(q, k, v, layout="sbhd")
    layout: expected 'bshd' or 'bhsd', got 'sbhd'
forward(q, k, v, out=o)
    out: expected a tuple (o, lse) of arrays or None, got ...
forward(q, k, v, out=(o,))
    out: expected a tuple (o, lse) of arrays or None, got 1 elements
forward(q, k, v, out=(q, None))
    out (o): overlaps q in memory
forward(q, k, v, out=(o[:, :4], None))
    out (o): expected shape (2, 8, 4, 16) to match the result, got (2, 4, 4, 16)
forward(q, k, v[..., :8], out=(o, None))
    out (o): expected shape (2, 8, 4, 8) to match the result, got (2, 8, 4, 16)
forward(q, k, v, out=(o.astype("float64"), None))
    out (o): expected dtype float32 to match the result, got float64
forward(q, k, v, out=([], None))
    out (o): ... got list
forward(q, k, v, config=(64, 64))
    config: expected a TileConfig or a dict of them by operation, got tuple; write fa2cupy.TileConfig(64, 64,
    num_warps=4)
forward(q, k, v, config=(64, 64, 4))
    config: expected a TileConfig or a dict of them by operation, got tuple; write fa2cupy.TileConfig(64, 64, 4)
forward(q, k, v, config={"fwd": TileConfig(64, 64, 4)})
    config: ['fwd'] are no operations; those are ['forward', 'backward', 'backward_dq', 'backward_dkdv',
    'backward_one_tile']
forward(q, k, v, config={"backward": 64})
    config['backward']: expected a TileConfig, got int
forward(q, k, v, family="hopper")
    family: expected one of ['sm90', 'sm80', 'simt'], got 'hopper'
forward(q, k, v, family=["sm90"])
    family: expected one of ['sm90', 'sm80', 'simt'], got ['sm90']
forward(half, half, half, family="simt")
    family 'simt' has no kernels for float16
forward(*[ones(1, 8, 2, 16, dtype="float64")] * 3, family="sm90")
    family 'sm90' has no kernels for float64
forward(q, k, v, family="sm90", precision="ieee")
    family 'sm90' has no kernels for float32 with precision='ieee'
forward(q, k, v, num_splits=2)
    num_splits: family 'sm90' has no kernels for num_splits=2, only for 1; family 'simt' has no kernels for
    num_splits=2, only for 1
forward(q, k, v, num_splits=0)
    num_splits: expected None or 1 to 16, got 0
forward(q, k, v, num_splits="auto")
    num_splits: expected None or an int, got str
forward(q, k, v, num_splits=2.0)
    num_splits: expected None or an int, got float; write num_splits=2
forward(q, k, v, precision="high")
    precision: expected None, 'ieee' or 'split', got 'high'
forward(half, half, half, precision="split")
    precision: it is a choice for float32, got 'split' for float16
forward(q, k, v, method="two_pass")
    unexpected keyword argument 'method': it is one of fa2cupy.backward and fa2cupy.attention.
forward(q, k, v, deterministic=True)
    unexpected keyword argument 'deterministic': it is one of fa2cupy.backward, fa2cupy.backward_jvp,
    fa2cupy.double_backward and fa2cupy.attention.
forward(q, k, v, return_lse=True)
    unexpected keyword argument 'return_lse'; write o, lse = fa2cupy.forward(...), which always gives both.
forward(q, k, v, enable_gqa=True)
    unexpected keyword argument 'enable_gqa'; write nothing: that query heads share K/V heads follows from the shapes.
forward(q, k, v, block_table=n)
    unexpected keyword argument 'block_table'; write something else: fa2cupy.decode takes the pages of a cache as
    block_table.
forward(q, k, v, k_cache=k_cache)
    unexpected keyword argument 'k_cache'; write something else: fa2cupy.decode takes a cache as k_cache and v_cache.
forward(q, k, v, training=True)
    unexpected keyword argument 'training'.

# features of forward
forward(q, k, v, dropout_p=0.1)
    seed: dropout needs one, the same in forward and backward and another one for each step
forward(q, k, v, dropout_p=0.1, seed=-1)
    seed: expected an int from 0 to below 2**64, got -1
forward(q, k, v, dropout_p=0.1, seed=1.0)
    seed: expected an int, got float; write seed=1
forward(q, k, v, dropout_p=0.1, seed=np.array(3))
    seed: expected an int, got ...; write int(seed)
forward(q, k, v, dropout_p=0.1, seed=np.random.default_rng(0))
    seed: expected an int, got Generator
forward(q, k, v, dropout_p=10, seed=0)
    dropout_p: expected a number from 0 to below 1, got 10.0
forward(q, k, v, dropout_p=None)
    dropout_p: expected a real number, got NoneType
forward(q, k, v, window=128)
    window: expected a tuple (left, right), got int; write window=(128, 0) for keys up to the query's own
forward(q, k, v, window=(3, -1))
    window (right): expected at least 0, or None for no limit, got -1; write None where other libraries have -1
forward(q, k, v, window=(3.0, 0))
    window (left): expected an int or None, got float
forward(q, k, v, window=(3,))
    window: expected a tuple (left, right), got 1 elements
forward(q, k, v, window_size=(3, -1))
    unexpected keyword argument 'window_size'; write window=(3, None).
forward(q, k, v, sliding_window=4)
    unexpected keyword argument 'sliding_window'; write window=(3, 0).
forward(q, k, v, softcap=0)
    softcap: expected a positive number, or None for no cap, got 0.0
forward(q, k, v, softcap="30")
    softcap: expected a real number or None, got str
forward(q, k, v, softcap=np.array([30.0]))
    softcap: expected a real number or None, got ...; write float(softcap.item())
forward(q, k, v, alibi=True)
    unexpected keyword argument 'alibi'; write alibi_slopes.
forward(q, k, v, alibi_slopes=True)
    alibi_slopes: ... got bool
forward(q, k, v, alibi_slopes=[0.5, 0.25, 0.1, 0.05])
    alibi_slopes: ... got list; convert it with numpy.asarray(alibi_slopes, "float32")
forward(q, k, v, alibi_slopes=ones(4, dtype="float64"))
    alibi_slopes: expected dtype float32, got float64; write alibi_slopes.astype("float32")
forward(q, k, v, alibi_slopes=ones(3))
    alibi_slopes: expected a shape that can be broadcast to (batch, heads) = (2, 4), got (3,)
forward(q, k, v, bias=ones(8, 8, dtype="float64"))
    bias: expected dtype float32, got float64; write bias.astype("float32")
forward(q, k, v, bias=ones(8, 8, dtype=int))
    bias: expected dtype float32, got int64; write bias.astype("float32")
forward(q, k, v, bias=ones(8, 8, dtype=bool))
    bias: expected dtype float32, got bool; write mask=bias where True is a visible key
forward(q, k, v, bias=0.5)
    bias: ... got float; write numpy.asarray(0.5, "float32")
forward(q, k, v, bias=score)
    bias: ... got function; a function is passed as score_mod
forward(q, k, v, bias=ones(3, 8))
    bias: expected a shape that can be broadcast to (batch, heads, seqlen_q, seqlen_k) = (2, 4, 8, 8), got (3, 8)
forward(q, k, v, bias=ones(2, 8, 8))
    bias: expected a shape that can be broadcast to (batch, heads, seqlen_q, seqlen_k) = (2, 4, 8, 8), got (2, 8, 8);
    write bias[:, None] if its first axis is that of the batch
forward(q, k, v, mask=ones(8, 8))
    mask: expected dtype bool, got float32; write mask != 0 where ones are visible keys, or bias=mask where numbers
    are to be added to the scores
forward(q, k, v, mask=ones(2, 8, dtype=bool))
    mask: expected a shape that can be broadcast to (batch, heads, seqlen_q, seqlen_k) = (2, 4, 8, 8), got (2, 8);
    write mask[:, None, None] if its first axis is that of the batch
forward(q, k, v, mask="causal")
    mask: ... got str; write causal=True
forward(q, k, v, mask=mask)
    mask: ... got function; a function is passed as mask_mod
forward(q, k, v, attn_mask=ones(8, 8, dtype=bool))
    unexpected keyword argument 'attn_mask'; write mask=attn_mask.
forward(q, k, v, key_padding_mask=ones(2, 8, dtype=int))
    key_padding_mask: expected dtype bool, got int64; write key_padding_mask != 0 where ones are visible keys
forward(q, k, v, key_padding_mask=ones(2, 7, dtype=bool))
    key_padding_mask: expected a shape that can be broadcast to (batch, seqlen_k) = (2, 8), got (2, 7)
forward(q, k, v, key_padding_mask=[True] * 8)
    key_padding_mask: ... got list; convert it with numpy.asarray(key_padding_mask, "bool")
forward(q, k, v, sink=0.0)
    sink: ... got float; write numpy.full(num_heads, 0.0, "float32")
forward(q, k, v, sink=ones(2))
    sink: expected shape (4,) to match q and k, got (2,)
forward(q, k, v, sinks=ones(4))
    unexpected keyword argument 'sinks'; write sink.
forward(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    cu_seqlens_q: packed sequences need q, k and v of 3 axes (total, heads, head_dim), got 4
forward(p, p, p, cu_seqlens_q=offsets)
    cu_seqlens_k: packed sequences need it together with cu_seqlens_q
forward(p, p, p, cu_seqlens=offsets)
    unexpected keyword argument 'cu_seqlens'; write cu_seqlens_q and cu_seqlens_k.
forward(p, p, p, cu_seqlens_q=[0, 3, 8], cu_seqlens_k=[0, 3, 8])
    cu_seqlens_q: ... got list; convert it with numpy.asarray(cu_seqlens_q, "int32")
forward(p, p, p, cu_seqlens_q=(offsets, 5), cu_seqlens_k=(offsets, 5))
    cu_seqlens_q: ... got tuple; pass one of its arrays, such as cu_seqlens_q[0]
forward(p, p, p, cu_seqlens_q=offsets.astype("int64"), cu_seqlens_k=offsets)
    cu_seqlens_q: expected dtype int32, got int64; write cu_seqlens_q.astype("int32") or cumsum(..., dtype="int32"),
    or make them with fa2cupy.cu_seqlens
forward(p, p, p, cu_seqlens_q=offsets.astype("float32"), cu_seqlens_k=offsets)
    cu_seqlens_q: expected dtype int32, got float32; write cu_seqlens_q.astype("int32")
forward(p, p, p, cu_seqlens_q=offsets[:2], cu_seqlens_k=offsets)
    cu_seqlens_k: expected shape (2,) to match cu_seqlens_q, got (3,)
forward(p, p, p, cu_seqlens_q=offsets[None], cu_seqlens_k=offsets)
    cu_seqlens_q: expected shape (batch + 1,), got (1, 3)
forward(p, p, p, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=5.0)
    max_seqlen_q: expected an int or None, got float; write max_seqlen_q=5
forward(p, p, p, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=offsets[:1])
    max_seqlen_q: expected an int or None, got ...; write int(max_seqlen_q.item())
forward(q, k, v, max_seqlen_q=8)
    max_seqlen_q: is for packed sequences, which need cu_seqlens_q and cu_seqlens_k

# functions and maps
forward(q, k, v, score_mod=lambda s, b, h, q, k, t: s + t[h, q])
    score_mod: expected a function of 5 parameters (score, b, h, q, k, *score_args), got (s, b, h, q, k, t); pass an
    array for t, score_args=(t,)
forward(q, k, v, score_mod=lambda s, b, h, q, k, t, u: s, score_args=(table,))
    score_mod: expected a function of 6 parameters (score, b, h, q, k, *score_args), got (s, b, h, q, k, t, u); pass
    an array for u, score_args=(..., u)
forward(q, k, v, score_mod=score, score_args=(table,))
    score_mod: expected a function of 6 parameters (score, b, h, q, k, *score_args), got (s, b, h, q, k)
forward(q, k, v, score_mod=score, score_args=table)
    score_args: expected a tuple of arrays, got ...; write score_args=(array,)
forward(q, k, v, score_mod=score, score_args=0.5)
    score_args: expected a tuple of arrays, got float; it is () for a function without arrays
forward(q, k, v, score_mod=mods.alibi(), score_args=[[0.5, 0.25, 0.1, 0.05]])
    score_args[0]: ... got list; convert it with numpy.asarray(score_args[0])
forward(q, k, v, score_mod=lambda s, b, h, q, k, x: s * x, score_args=(0.5,))
    score_args[0]: ... got float; write numpy.asarray(0.5), or the number in the function
forward(q, k, v, score_args=(table,))
    score_args: there is no score_mod
forward(q, k, v, score_mod=mask)
    score_mod: expected a function of 5 parameters (score, b, h, q, k, *score_args), got (b, h, q, k); write mask_mod=
    for a function of positions alone
forward(q, k, v, mask_mod=score)
    mask_mod: expected a function of 4 parameters (b, h, q, k, *mask_args), got (s, b, h, q, k); write score_mod= for
    a function of scores
forward(q, k, v, mask_mod=mods.document)
    mask_mod: expected a function of 4 parameters (b, h, q, k, *mask_args), got mods.document; pass an array for ids,
    mask_args=(ids,)
forward(q, k, v, score_mod=mods.alibi())
    score_mod: expected a function of 5 parameters (score, b, h, q, k, *score_args), got mods.alibi(...); pass an
    array for slopes, score_args=(slopes,)
forward(q, k, v, score_mod=mods.alibi)
    score_mod: expected a function of 5 parameters (score, b, h, q, k, *score_args), got mods.alibi; write
    score_mod=mods.alibi(...), which makes the function
forward(q, k, v, score_mod=mods.softcap)
    score_mod: expected a function of 5 parameters (score, b, h, q, k, *score_args), got mods.softcap; write
    score_mod=mods.softcap(...), which makes the function
forward(q, k, v, mask_mod=mods.sliding_window)
    mask_mod: expected a function of 4 parameters (b, h, q, k, *mask_args), got mods.sliding_window; write
    mask_mod=mods.sliding_window(...), which makes the function
forward(q, k, v, score_mod=mods.sliding_window(3))
    score_mod: expected a function of 5 parameters (score, b, h, q, k, *score_args), got mods.sliding_window(...);
    write mask_mod= for a function of positions alone
forward(q, k, v, mask_mod=mods.softcap(3.0))
    mask_mod: expected a function of 4 parameters (b, h, q, k, *mask_args), got mods.softcap(...); write score_mod=
    for a function of scores
forward(q, k, v, score_mod="alibi")
    score_mod: expected a function or None, got str
forward(q, k, v, mask_mod=ones(8, 8, dtype=bool))
    mask_mod: expected a function or None, got ...; write mask= for an array
forward(q, k, v, mask_mod=tiles)
    mask_mod: expected a function or None, got BlockMask; it is passed beside the function that it was made from, not
    in its place
forward(q, k, v, mask_mod=lambda b, h, q, k: q - k)
    mask_mod: expected a truth value to be returned, got int; write x != 0
forward(q, k, v, mask_mod=lambda b, h, q, k: (q >= k) and (q - k < 5))
    mask_mod: a symbol has no truth value; write np.where(condition, x, y) in place of if and else, & | ~ in place of
    and, or and not, np.minimum(x, y) in place of min(x, y), and (a <= x) & (x < b) in place of a <= x < b
forward(q, k, v, mask_mod=lambda b, h, q, k: 0 <= q - k < 5)
    mask_mod: a symbol has no truth value; write np.where(condition, x, y) in place of if and else, & | ~ in place of
    and, or and not, np.minimum(x, y) in place of min(x, y), and (a <= x) & (x < b) in place of a <= x < b
forward(q, k, v, score_mod=lambda s, b, h, q, k: s if q > k else 0)
    score_mod: a symbol has no truth value; write np.where(condition, x, y) in place of if and else, & | ~ in place of
    and, or and not, np.minimum(x, y) in place of min(x, y), and (a <= x) & (x < b) in place of a <= x < b
forward(q, k, v, score_mod=lambda s, b, h, q, k: q > k)
    score_mod: expected a score to be returned, got bool; write np.where(condition, score, -np.inf)
forward(q, k, v, score_mod=lambda s, b, h, q, k: np.sinh(s))
    score_mod: np.sinh cannot be compiled; there are absolute, add, bitwise_and, bitwise_or, bitwise_xor, clip, cos,
    dot, equal, exp, exp2, floor, floor_divide, greater, greater_equal, invert, less, less_equal, log, log1p,
    logical_and, logical_not, logical_or, logical_xor, maximum, minimum, multiply, negative, not_equal, power,
    remainder, sin, sqrt, subtract, sum, tanh, true_divide, where
forward(q, k, v, score_mod=lambda s, b, h, q, k: math.exp(s))
    score_mod: a symbol is no number of Python; write np.exp(x) in place of math.exp(x), x.astype(int) in place of
    int(x), and pass arrays and lists that are indexed as arguments (score_args, mask_args)
forward(q, k, v, score_mod=lambda s, b, h, q, k, t: s + t, score_args=(table,))
    score_mod: t has 2 axes; write t[b, h]
forward(q, k, v, score_mod=lambda s, b, h, q, k, t: s + t[q], score_args=(ones(0),))
    score_args[0]: expected at least one element, got shape (0,)
forward(q, k, v, block_mask=ones(1, 1, dtype=bool))
    block_mask: expected a fa2cupy.BlockMask or None, got ...; write fa2cupy.BlockMask(tiles, seqlen_q, seqlen_k)
forward(q, k, v, block_mask=mask)
    block_mask: expected a fa2cupy.BlockMask or None, got function; pass the function as mask_mod, and the map that
    fa2cupy.block_mask makes of it as block_mask
forward(q, k, v, mask_mod=mods.document, mask_args=(ids.copy(),), block_mask=map_of_ids)
    mask_args[0]: block_mask was made from another array, of which it has a copy; pass that one, or no mask_args, or
    make a map of this one by fa2cupy.block_mask
forward(q, k, v, block_mask=map_of_mask, mask_mod=mods.causal(1))
    block_mask: the map was made from another function than mask_mod
forward(q[:, :5], k, v, block_mask=map_of_mask, mask_mod=mask)
    block_mask: expected a map for 5 queries and 8 keys, got one for 8 and 8
forward(q, k, v, block_mask=BlockMask(ones(2, 2, dtype=bool), 8, 8, (5, 7)))
    family 'simt' has no tile of forward within the (5, 7) of block_mask: without a function, a map has tiles of
    multiples of (4, 8)

# backward, delta and attention
backward(q, k, v, o, do)
    lse: it is missing in backward(q, k, v, o, lse, do): o, lse = fa2cupy.forward(q, k, v, ...), with the same options
backward(q, k, v, o, lse)
    do: it is missing in backward(q, k, v, o, lse, do): it is the gradient for o
backward(q, k, v, o=o, do=do)
    lse: it is missing in backward(q, k, v, o, lse, do): o, lse = fa2cupy.forward(q, k, v, ...), with the same options
backward(q, k, v, o, do, lse)
    lse: expected shape (2, 4, 8) to match q, got (2, 8, 4, 16); the order of arguments is q, k, v, o, lse, do
backward(q, k, v, lse, o, do)
    lse: expected shape (2, 4, 8) to match q, got (2, 8, 4, 16); the order of arguments is q, k, v, o, lse, do
backward(do, q, k, v, o, lse)
    lse: expected shape (2, 4, 8) to match q, got (2, 8, 4, 16); the order of arguments is q, k, v, o, lse, do
backward(q, k, v, (o, lse), do)
    o: ... got tuple; pass one of its arrays, such as o[0]
backward(q, k, v, o, None, do)
    lse: ... got None; o, lse = fa2cupy.forward(q, k, v, ...), with the same options
backward(q, k, v, o, lse, None)
    do: ... got None; it is the gradient for o
backward(q, k, v, o, lse, 1.0)
    do: ... got float; write numpy.full_like(o, 1.0)
backward(q, k, v, o, attention(q, k, v)[1], do)
    lse: ... got fa2cupy.closure._Backprop; fa2cupy.attention returns (o, backprop), and with return_lse=True (o, lse,
    backprop)
backward(q, k, v, o, lse, do.astype("float64"))
    do: expected dtype float32 to match q, got float64; write do.astype("float32")
backward(q, k, v, o, lse, do.astype(int))
    do: expected dtype float32 to match q, got int64; write do.astype("float32")
backward(q, k, v, o, lse.astype("float64"), do)
    lse: expected dtype float32 to match q, got float64; write lse.astype("float32")
backward(q, k, v, o, lse, do[:, :3])
    do: expected shape (2, 8, 4, 16) to match q, got (2, 3, 4, 16)
backward(q, k, v[..., :8], o, lse, do[..., :8])
    o: expected shape (2, 8, 4, 8) to match q and v, got (2, 8, 4, 16)
backward(q, k, v[..., :8], o[..., :8], lse, do)
    do: expected shape (2, 8, 4, 8) to match q and v, got (2, 8, 4, 16)
backward(q, k, v[..., :8], o[..., :8], lse, do[..., :8], out=(None, None, k + 0))
    out (dv): expected shape (2, 8, 4, 8) to match the result, got (2, 8, 4, 16)
backward(q, k, v[..., :8], o[..., :8], lse, do[..., :8], out=(None, v[..., :8] + 0, None))
    out (dk): expected shape (2, 8, 4, 16) to match the result, got (2, 8, 4, 8)
backward(q, k, v, o, lse.transpose(0, 2, 1), do)
    lse: expected shape (2, 4, 8) to match q, got (2, 8, 4)
backward(q, k, v, o, lse, do, method="single_pass", deterministic=True)
    method: 'single_pass' adds atomically on GPUs, so that it cannot be deterministic; use 'two_pass' or None
backward(q, k, v, o, lse, do, method="single")
    method: expected None, 'single_pass', 'two_pass' or 'one_tile', got 'single'
backward(q, k, v, o, lse, do, deterministic=1)
    deterministic: expected a bool, got int; write deterministic=True
backward(q, k, v, o, lse, do, return_dbias=True)
    return_dbias: there is no bias; pass that of the forward
backward(q, k, v, o, lse, do, return_dscore_args=True)
    return_dscore_args: there is no score_mod; pass that of the forward
backward(q, k, v, o, lse, do, return_dscore_args=True, score_mod=mods.alibi(), score_args=(n,))
    return_dscore_args: score_args has no floating-point array
backward(q, k, v, o, lse, do, return_dmask=True)
    unexpected keyword argument 'return_dmask'; did you mean 'return_dsink'?
double_backward(q, k, v, o, lse, do, q, k, v, return_dbias=True, deterministic=True, bias=ones(8, 8))
    return_dbias: for a bias that is broadcast, here (8, 8), GPUs sum it atomically in calls of second order; not with
    deterministic
backward(q, k, v, o, lse, do, return_dscore_args=True, deterministic=True, score_mod=bend, score_args=(ones(4),))
    return_dscore_args: GPUs sum them atomically; not with deterministic
backward(q, k, v, o, lse, do, dlse=0.1)
    dlse: ... got float; write numpy.full_like(lse, 0.1)
backward(q, k, v, o, lse, do, delta=o)
    delta: expected shape (2, 4, 8) to match q, got (2, 8, 4, 16)
backward(q, k, v, o, lse, do, out=(q, k, v))
    out (dq): overlaps q in memory
backward(q, k, v, o, lse, do, out=(None, None))
    out: expected a tuple (dq, dk, dv) of arrays or None, got 2 elements
backward(q, k, v, o, lse, do, family="hopper")
    family: expected one of ['sm90', 'sm80', 'simt'], got 'hopper'
backward(q, k, v, o, lse, do, num_splits=2)
    num_splits: family 'sm90' has no kernels for num_splits=2, only for 1; family 'simt' has no kernels for
    num_splits=2, only for 1
backward(q, k, v, o, lse, do, family="sm80", method="single_pass")
    family 'sm80' has no kernel of backward
delta(o)
    do: it is missing in delta(o, do): it is the gradient for o
delta(o, do.astype("float64"))
    do: expected dtype float32 to match o, got float64; write do.astype("float32")
delta(o.astype(int), do)
    o: expected dtype float16, bfloat16, float32 or float64, got int64; write o.astype("float32")
attention(q, k)
    v: it is missing in attention(q, k, v): those of a packed array are views such as qkv[:, :, 0], qkv[:, :, 1],
    qkv[:, :, 2]
attention(q, k, v, return_lse=1)
    return_lse: expected a bool, got int; write return_lse=True
attention(q, k, v, return_softmax_lse=True)
    unexpected keyword argument 'return_softmax_lse'; did you mean 'return_lse'?
attention(q, k, v, out=(None, None))
    unexpected keyword argument 'out': it is one of fa2cupy.forward, fa2cupy.backward, fa2cupy.jvp, fa2cupy.backward_jvp
    and fa2cupy.double_backward.
attention(q, k, v, method="single_pass", deterministic=True)
    method: 'single_pass' adds atomically on GPUs, so that it cannot be deterministic; use 'two_pass' or None
attention(q, k, v)[1](do[:, :2])
    do: expected shape (2, 8, 4, 16) to match q, got (2, 2, 4, 16)
attention(q, k, v)[1](1.0)
    do: ... got float; write numpy.full_like(o, 1.0)
attention(q, k, v)[1](do, do)
    dlse: expected shape (2, 4, 8) to match q, got (2, 8, 4, 16)

# merge and decode
merge(o)
    lse_parts: it is missing in merge(o_parts, lse_parts): with a list of results (o, lse), write
    merge(*zip(*results))
merge([(o, lse), (o, lse)])
    o_parts[0]: ... got tuple; with a list of results (o, lse), write merge(*zip(*results))
merge([(o, lse), (o, lse)], None)
    o_parts[0]: ... got tuple; with a list of results (o, lse), write merge(*zip(*results))
merge(*forward(p, p, p))
    lse_parts: expected shape (8, 4) to match o_parts (8, 4, 16), got (4, 8); o_parts has an axis of parts in front of
    those of o, which a single result has not
merge([o, o], [lse])
    lse_parts: expected shape (2, 2, 4, 8) to match o_parts, got (1, 2, 4, 8)
merge([o, o[:, :4]], [lse, lse])
    o_parts[1]: expected shape (2, 8, 4, 16) to match o_parts[0], got (2, 4, 4, 16)
merge([o, None], [lse, lse])
    o_parts[1]: ... got None
merge([], [])
    o_parts: expected at least one part, got an empty list
merge((x for x in (o, o)), [lse, lse])
    o_parts: ... got generator; write list(o_parts)
merge([o, o], [lse, lse], layout="bhsd")
    lse_parts: expected shape (2, 2, 8, 4) to match o_parts, got (2, 2, 4, 8)
decode(q, k_cache, v_cache)
    cache_seqlens: it is missing in decode(q, k_cache, v_cache, cache_seqlens): it has the rows of each sequence in
    the cache, at first zeros(batch, "int32")
decode(q, k_cache, v_cache, None)
    cache_seqlens: ... got None; it has the rows of each sequence in the cache, at first zeros(batch, "int32")
decode(q, k_cache, v_cache, [5, 7])
    cache_seqlens: ... got list; convert it with numpy.asarray(cache_seqlens, "int32")
decode(q, k_cache, v_cache, 5)
    cache_seqlens: ... got int; write numpy.full(batch, 5, "int32")
decode(q, k_cache, v_cache, n.astype("int64"))
    cache_seqlens: expected dtype int32, got int64; write cache_seqlens.astype("int32")
decode(q, k_cache, v_cache, n[:1])
    cache_seqlens: expected shape (2,) to match q, got (1,)
decode(q, k_cache, v_cache, n, dropout_p=0.1)
    unexpected keyword argument 'dropout_p': it is one of fa2cupy.forward, fa2cupy.backward, fa2cupy.jvp,
    fa2cupy.backward_jvp, fa2cupy.double_backward and fa2cupy.attention.
decode(q, k_cache, v_cache, n, mask=ones(8, 8, dtype=bool))
    unexpected keyword argument 'mask': it is one of fa2cupy.forward, fa2cupy.backward, fa2cupy.jvp,
    fa2cupy.backward_jvp, fa2cupy.double_backward and fa2cupy.attention.
decode(q, k_cache, v_cache, n, score_mod=score)
    unexpected keyword argument 'score_mod': it is one of fa2cupy.forward, fa2cupy.backward, fa2cupy.jvp,
    fa2cupy.backward_jvp, fa2cupy.double_backward and fa2cupy.attention.
decode(q, k_cache, v_cache, n, config=TileConfig(8, 8, 1))
    unexpected keyword argument 'config': it is one of fa2cupy.forward, fa2cupy.backward and fa2cupy.attention.
decode(q, k_cache, v_cache, n, window_size=(3, -1))
    unexpected keyword argument 'window_size'; write window=(3, None).
decode(q, k_cache, v_cache, n, page_table=n)
    unexpected keyword argument 'page_table'; write something else: fa2cupy.decode takes the pages of a cache as
    block_table.
decode(q, k_cache, v_cache, cache_seqlen=n)
    unexpected keyword argument 'cache_seqlen'; did you mean 'cache_seqlens'?
decode(q, k_cache, v_cache, n, num_splits=4)
    num_splits: expected None or 1, got 4
decode(q, k_cache, v_cache, n, causal=0)
    causal: expected a bool, got int; write causal=False
decode(q, k_cache, v_cache, n, k=k)
    v: rows are appended to both caches; pass it together with k
decode(q, k_cache, v_cache, n, k=k[:, 0], v=v[:, 0])
    k: expected shape (2, new rows, 4, 16) to match q and k_cache, got (2, 4, 16)
decode(q[:, 0], k_cache, v_cache, n)
    q: expected 4 axes, (batch, seqlen, heads, head_dim), got shape (2, 4, 16)
decode(q, k_cache[:1], v_cache[:1], n)
    k_cache: expected shape (2, rows, num_heads_kv, 16) to match q (2, 8, 4, 16), got (1, 32, 4, 16)
decode(q, k_cache, v_cache[:, :5], n)
    v_cache: expected shape (2, 32, 4, 16) to match k_cache, got (2, 5, 4, 16)
decode(q, k_cache, v_cache[..., :8], n, k=k, v=v)
    v: expected shape (2, 8, 4, 8) to match k and v_cache, got (2, 8, 4, 16)
decode(q, k_cache, v_cache[..., :8], n, out=(o, None))
    out (o): expected shape (2, 8, 4, 8) to match the result, got (2, 8, 4, 16)
decode(q, k_cache.astype("float16"), v_cache.astype("float16"), n)
    k_cache: expected dtype float32 to match q, got float16; write q.astype("float16")
decode(half[..., :12], *[ones(2, 32, 4, 12, dtype="float16")] * 2, n)
    k_cache: for float16 a head_dim that is a multiple of 8 is supported, got 12
decode(half, *[ones(2, 16, 4, 32, dtype="float16").swapaxes(1, 3)] * 2, n)
    k_cache: expected contiguous rows that start on 16 bytes, because a cache is not copied, got strides (4096, 2, 64,
    256)
decode(q, k_cache, k_cache, n, k=k, v=v)
    v_cache: overlaps k_cache in memory
decode(q, k_cache, v_cache, n, block_table=[[0], [1]])
    block_table: ... got list; convert it with numpy.asarray(block_table, "int32")
decode(q, k_cache, v_cache, n, block_table=n)
    block_table: expected shape (batch, pages of a sequence), got (2,)
decode(q, k_cache[:, :10], v_cache[:, :10], n, block_table=n[:, None])
    k_cache: expected pages of a multiple of 16 rows, got 10 (shape (2, 10, 4, 16))
"""
)

#: Functions without arrays, values that only NumPy reads, and arrays of other libraries.
ON_NUMPY = transcript(
    r"""
# values that are read on NumPy alone
forward(p, p, p, cu_seqlens_q=np.array([0, 5, 9], "int32"), cu_seqlens_k=offsets)
    cu_seqlens_q: expected offsets that grow from 0 to at most 8, got [0, 5, 9]
forward(p, p, p, cu_seqlens_q=np.array([0, 5, 3], "int32"), cu_seqlens_k=offsets)
    cu_seqlens_q: expected offsets that grow from 0 to at most 8, got [0, 5, 3]
forward(p, p, p, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=2)
    max_seqlen_q: a sequence has 5 rows, more than 2
forward(q, k, v, score_mod=lambda s, b, h, q, k, t: s + t[k, h], score_args=(table,))
    score_args[0]: index 7 is outside of axis 0 of shape (4, 8)
forward(np.ma.masked_array(q), k, v)
    q: expected an array without a mask of its own, got a numpy.ma.MaskedArray; pass numpy.ma.getdata of it, and hide
    keys with mask= or key_padding_mask=
decode(q, k_cache, v_cache, n + 100)
    cache_seqlens: expected lengths from 0 to 32, got 105 for sequence 0
decode(q, k_cache, v_cache, n - 100)
    cache_seqlens: expected lengths from 0 to 32, got -95 for sequence 0
decode(q, k_cache, v_cache, n + 20, k=k, v=v)
    cache_seqlens: expected lengths from 0 to 24 (of 32 rows, 8 are for k and v), got 25 for sequence 0
decode(q, k_cache, v_cache, n, block_table=np.array([[0], [9]], "int32"))
    block_table: expected numbers of the 2 pages of k_cache, from 0 on, got 9 at [1, 0]

# block_mask, BlockMask and TileConfig
block_mask(mask, 1, 1, 16, 16)
    mask_args: expected a tuple of arrays, got int; it is () for a function without arrays
block_mask(mask, (), 16, 16)
    seqlen_q: it is missing in block_mask(mask_mod, mask_args, batch, num_heads, seqlen_q, seqlen_k)
block_mask(mask, batch=1, num_heads=1, seqlen_q=16, seqlen_k=16)
    mask_args: it is missing in block_mask(mask_mod, mask_args, batch, num_heads, seqlen_q, seqlen_k): it is () for a
    function without arrays
block_mask(mask, None, 1, 1, 16, 16)
    mask_args: expected a tuple of arrays, got NoneType; it is () for a function without arrays
block_mask(mask, (), None, None, 16, 16)
    batch: expected an int, got NoneType
block_mask(mask, (), 1, 1, 16.0, 16)
    seqlen_q: expected an int, got float; write seqlen_q=16
block_mask(mask, (), 1, 1, -16, 16)
    seqlen_q: expected at least 0, got -16
block_mask(mods.document, np.zeros((1, 16), int), 1, 1, 16, 16)
    mask_args: expected a tuple of arrays, got ...; write mask_args=(array,)
block_mask(mods.document, (), 1, 1, 16, 16)
    mask_mod: expected a function of 4 parameters (b, h, q, k, *mask_args), got mods.document; pass an array for ids,
    mask_args=(ids,)
block_mask(mods.sliding_window, (), 1, 1, 16, 16)
    mask_mod: expected a function of 4 parameters (b, h, q, k, *mask_args), got mods.sliding_window; write
    mask_mod=mods.sliding_window(...), which makes the function
block_mask(score, (), 1, 1, 16, 16)
    mask_mod: expected a function of 4 parameters (b, h, q, k, *mask_args), got (s, b, h, q, k); write score_mod= for
    a function of scores
block_mask(mask, (), 1, 1, 16, 16, tile=64)
    tile: expected a tuple (queries, keys), got 64; write tile=(64, 64)
block_mask(mask, (), 1, 1, 16, 16, tile=(0, 4))
    tile: expected at least 1 query and 1 key, got (0, 4)
block_mask(mask, (), 1, 1, 16, 16, like="cupy")
    like: ... got str
block_mask(mask, (), 1, 1, 16, 16, tiles=(8, 8))
    unexpected keyword argument 'tiles'; did you mean 'tile'?
BlockMask(ones(2, 2, dtype=bool))
    seqlen_q: it is missing in BlockMask(tiles, seqlen_q, seqlen_k)
BlockMask([[True]], 8, 8)
    tiles: ... got list; convert it with numpy.asarray(tiles, "bool") or cupy.asarray(tiles, "bool")
BlockMask(ones(1, 1), 8, 8)
    tiles: expected dtype bool, got float32; write tiles != 0
BlockMask(ones(2, 2, dtype=bool), 8, 8)
    tiles: expected shape (batch, heads, 1, 1) for 8 queries and 8 keys in tiles of (128, 128), got (2, 2)
BlockMask(ones(1, 1, dtype=bool), 8, 8, 128)
    tile: expected a tuple (queries, keys), got 128; write tile=(128, 128)
BlockMask(ones(1, 1, dtype=bool), "8", 8)
    seqlen_q: expected an int, got str
TileConfig(128, 128)
    num_warps: it is missing in TileConfig(b_r, b_c, num_warps): such as num_warps=4; fa2cupy.legal_configs lists the
    tiles of a kernel
TileConfig(128, 128, 4.0)
    num_warps: expected a positive int, got 4.0
TileConfig(0, 128, 4)
    b_r: expected a positive int, got 0

# legal_configs and precompile
legal_configs("fwd")
    operation: expected one of ['forward', 'backward', 'backward_dq', 'backward_dkdv',
    'backward_one_tile'], got 'fwd'; 'fwd' is 'forward'
legal_configs("two_pass")
    operation: expected one of ['forward', 'backward', 'backward_dq', 'backward_dkdv',
    'backward_one_tile'], got 'two_pass'; 'two_pass' is
    'backward_dq' and 'backward_dkdv'
legal_configs("decode")
    operation: expected one of ['forward', 'backward', 'backward_dq', 'backward_dkdv',
    'backward_one_tile'], got 'decode'; its tiles are no
    choice, and fa2cupy.precompile returns what the compiler makes of them
legal_configs("backward_jvp")
    operation: expected one of ['forward', 'backward', 'backward_dq', 'backward_dkdv',
    'backward_one_tile'], got 'backward_jvp'; its tiles
    are no choice, and fa2cupy.precompile returns what the compiler makes of them
legal_configs("forward", arch="sm90")
    arch: 'sm90' is not known; ... ; did you mean 'sm_90'?
legal_configs("forward", arch="H100")
    arch: 'H100' is not known; ... ; did you mean 'sm_90'?
legal_configs("forward", arch=90)
    arch: expected a str such as 'sm_90', got int; did you mean 'sm_90'?
legal_configs("forward", arch="sm_99")
    arch: 'sm_99' is not known; ...
legal_configs("forward", dtype="fp16", arch="sm_90")
    dtype: expected float16, bfloat16, float32 or float64, got 'fp16'; did you mean 'float16'?
legal_configs("forward", dtype="bf16", arch="sm_90")
    dtype: expected float16, bfloat16, float32 or float64, got 'bf16'; did you mean 'bfloat16'?
legal_configs("forward", dtype=np.int32, arch="sm_90")
    dtype: expected float16, bfloat16, float32 or float64, got int32
legal_configs("forward", head_dim=64.0, arch="sm_90")
    head_dim: expected an int, got float; write head_dim=64
legal_configs("forward", head_dim=576, arch="sm_90")
    head_dim: up to 512 is supported, got 576
legal_configs("forward", arch="sm_90", family="hopper")
    family: expected one of ['sm90', 'sm80', 'simt'], got 'hopper'
legal_configs("forward", archs="sm_90")
    unexpected keyword argument 'archs'; did you mean 'arch'?
precompile("sm80")
    arch: 'sm80' is not known; ... ; did you mean 'sm_80'?
precompile("8.0")
    arch: '8.0' is not known; ... ; did you mean 'sm_80'?
precompile("a100")
    arch: 'a100' is not known; ... ; did you mean 'sm_80'?
precompile("sm_90", arch="sm_80")
    unexpected keyword argument 'arch'; did you mean 'archs'?
precompile("sm_90", dtype="float16")
    unexpected keyword argument 'dtype'; did you mean 'dtypes'?
precompile("sm_90", dtypes=["float16", "fp32"])
    dtype: expected float16, bfloat16, float32 or float64, got 'fp32'; did you mean 'float32'?
precompile("sm_90", head_dims="64")
    head_dims: expected an int, got str
precompile("sm_90", causal="both")
    causal: expected a bool, got str
precompile("sm_90", methods="fast")
    methods: expected 'single_pass', 'two_pass' or 'one_tile', got 'fast'
precompile("sm_90", features="windows")
    features: expected window, softcap, alibi_slopes, bias, mask, key_padding_mask, block_mask, sink, dropout_p,
    cu_seqlens, dlse, return_dbias, return_dsink, bias_tangent or sink_tangent, got 'windows'; did you mean 'window'?
precompile("sm_90", features="return_dbias")
    features: 'return_dbias' needs 'bias' beside it, got ('return_dbias',)
precompile("sm_90", features="sink_tangent")
    features: 'sink_tangent' needs 'sink' beside it, got ('sink_tangent',)
precompile("sm_90", return_dscore_args=True)
    return_dscore_args: there is no score_mod; pass that of the forward
precompile("sm_90", jobs=0)
    jobs: expected at least 1, or None for one per CPU, got 0
precompile("sm_90", config=(64, 64))
    config: expected a TileConfig or a dict of them by operation, got tuple; write fa2cupy.TileConfig(64, 64,
    num_warps=4)

# cu_seqlens, mods and testing
cu_seqlens()
    lengths: it is missing in cu_seqlens(lengths)
cu_seqlens(5)
    lengths: expected a sequence of ints or an ndarray, got int; write [5]
cu_seqlens([3.0, 5.0])
    lengths: expected integers, got dtype float64; write numpy.asarray(lengths, "int32")
cu_seqlens(np.ones(2))
    lengths: expected integers, got dtype float64; write lengths.astype("int32")
cu_seqlens([3, -5])
    lengths: expected at least 0, got -5
cu_seqlens(np.ones((2, 8), bool))
    lengths: expected shape (batch,), got (2, 8); of a mask, write mask.sum(axis=1)
cu_seqlens([[3], [5, 1]])
    lengths: expected shape (batch,), got sequences of several lengths
cu_seqlens(x for x in [3, 5])
    lengths: expected a sequence of ints or an ndarray, got generator; write list(lengths)
cu_seqlens(None)
    lengths: expected a sequence of ints or an ndarray, got NoneType
mods.sliding_window((3, 0))
    left: expected an int, got tuple
mods.sliding_window(3.5)
    left: expected an int, got float
mods.sliding_window(-1)
    left: expected at least 0, got -1
mods.softcap(0)
    cap: expected a number other than 0, got 0.0
mods.softcap("x")
    cap: expected a real number, got str
mods.alibi(ones(4))
    diagonal: expected a number, got ...; arrays are passed as score_args or mask_args
mods.dilated_window(3, 0)
    dilation: expected at least 1, got 0
mods.neighborhood_2d(0, 1)
    width: expected at least 1, got 0
mods.neighborhood((4, 6), (3, 7))
    kernel_size[1]: expected at most 6 like shape, got 7
mods.neighborhood((4, 6), (3,))
    kernel_size: expected 2 lengths like shape, got 1
mods.neighborhood((4, 6), 3)
    kernel_size: expected a tuple of an int for each axis, got 3
mods.neighborhood((4, 0), (1, 1))
    shape[1]: expected at least 1, got 0
mods.neighborhood((4, 6.0), (1, 1))
    shape[1]: expected an int, got float
mods.t5_relative(2)
    num_buckets: expected at least 4, got 2
mods.t5_relative(32, 4)
    max_distance: expected more than 8, the distances that have buckets of their own, got 4
testing.Expectation(q, k, v, casual=True)
    unexpected keyword argument 'casual'; did you mean 'causal'?
testing.Expectation(q, k, v).check(dq=q)
    do: gradients are compared for one; write Expectation(q, k, v, do, ...)
testing.Expectation(q, k, v).check(out=o)
    out: expected the name of a result, o, lse, dq, dk, dv
testing.Expectation(q, k, v).check(o=o.tolist())
    o: ... got list; convert it with numpy.asarray(o, "float32") or cupy.asarray(o, "float32")
testing.Expectation(q, k, v, do).check(delta=lse)
    delta: expected the name of a result, o, lse, dq, dk, dv; fa2cupy.testing.check_delta compares it
testing.Expectation(q, k, v).unwritten("o", "dx")
    dx: expected the name of a result, o, lse, dq, dk, dv
testing.make_inputs("fp16")
    dtype: expected float16, bfloat16, float32 or float64, got 'fp16'; did you mean 'float16'?
testing.make_inputs(head_dim=64.0)
    head_dim: expected an int, got float; write head_dim=64
testing.make_inputs(layout="sbhd")
    layout: expected 'bshd' or 'bhsd', got 'sbhd'
testing.make_inputs(xp="cupy")
    xp: expected the module numpy or cupy, got str

# distributed
dist.forward(2, q, k, v)
    comm: expected a fa2cupy.distributed.Communicator, got int; make it with Communicator.from_env, from_mpi or
    from_nccl, or let fa2cupy.distributed.simulate(size, work) pass one to work(comm) on each of its ranks
dist.forward(q, k, v)
    comm: expected a fa2cupy.distributed.Communicator, got ...; it comes before the arrays; make it with
    Communicator.from_env, from_mpi or from_nccl, or let fa2cupy.distributed.simulate(size, work) pass one to
    work(comm) on each of its ranks
dist.forward()
    comm: expected a fa2cupy.distributed.Communicator, got NoneType; make it with Communicator.from_env, from_mpi or
    from_nccl, or let fa2cupy.distributed.simulate(size, work) pass one to work(comm) on each of its ranks
dist.shard(2, q)
    comm: expected a fa2cupy.distributed.Communicator, got int; make it with Communicator.from_env, from_mpi or
    from_nccl, or let fa2cupy.distributed.simulate(size, work) pass one to work(comm) on each of its ranks
dist.positions(2, 8)
    comm: expected a fa2cupy.distributed.Communicator, got int; make it with Communicator.from_env, from_mpi or
    from_nccl, or let fa2cupy.distributed.simulate(size, work) pass one to work(comm) on each of its ranks
dist.padded_length(2, 8)
    comm: expected a fa2cupy.distributed.Communicator, got int; make it with Communicator.from_env, from_mpi or
    from_nccl, or let fa2cupy.distributed.simulate(size, work) pass one to work(comm) on each of its ranks
dist.total(q)
    comm: expected a fa2cupy.distributed.Communicator, got ...; it comes before the arrays; make it with
    Communicator.from_env, from_mpi or from_nccl, or let fa2cupy.distributed.simulate(size, work) pass one to
    work(comm) on each of its ranks
dist.simulate(1, lambda comm: dist.backward(comm, q, k, v, o, do))
    lse: it is missing in backward(comm, q, k, v, o, lse, do): o, lse = fa2cupy.forward(q, k, v, ...), with the same
    options
dist.simulate(2, lambda comm: dist.backward(comm, q, k, v, o, do))
    lse: it is missing in backward(comm, q, k, v, o, lse, do): o, lse = fa2cupy.forward(q, k, v, ...), with the same
    options
dist.simulate(2, lambda comm: dist.forward(comm, q.tolist(), k, v))
    q: ... got list; convert it with numpy.asarray(q, "float32")
dist.simulate(2, lambda comm: dist.forward(comm, q, k, v, casual=True))
    unexpected keyword argument 'casual'; did you mean 'causal'?
dist.simulate(2, lambda comm: dist.forward(comm, q, k, v, order="zig"))
    order: expected 'zigzag' or 'contiguous', got 'zig'
dist.simulate(2, lambda comm: dist.forward(comm, q, k, v, scheme="ulysses"))
    scheme: expected None, 'heads', 'gather', 'hybrid', got 'ulysses'
dist.simulate(2, lambda comm: dist.forward(comm, q, k, v, head_groups=1.0))
    head_groups: expected None or an int, got float; write head_groups=1
dist.simulate(2, lambda comm: dist.forward(comm, q, k, v, head_groups=3))
    head_groups: expected a divisor of the 2 K/V heads of a rank, got 3
dist.simulate(2, lambda comm: dist.forward(comm, q, k, v, family="hopper"))
    family: expected one of ['sm90', 'sm80', 'simt'], got 'hopper'
dist.simulate(2, lambda comm: dist.forward(comm, q[:, :5], k[:, :5], v[:, :5]))
    q: expected an even number of rows on each rank, for the two chunks of zigzag order, got 5; pad the whole sequence
    to a multiple of 4, that is to 12 rows, with fa2cupy.distributed.pad
dist.simulate(2, lambda comm: dist.forward(comm, q, k, v, mask=ones(3, 8, dtype=bool)))
    mask: expected 8 queries, those of this rank, or 1 for all of them, got shape (3, 8);
    fa2cupy.distributed.shard(comm, mask, axis=0) takes them from the whole array
dist.simulate(2, lambda comm: dist.attention(comm, q, k, v, deterministic=True, method="single_pass"))
    method: 'single_pass' adds atomically on GPUs, so that it cannot be deterministic; use 'two_pass' or None
dist.simulate(2, lambda comm: dist.forward(comm, q, k, v, causal=comm.rank == 0))
    causal: expected the same on all ranks, got True on rank 0; False on rank 1
dist.simulate(3, lambda comm: dist.forward(comm, q[:, :6], k[:, :6], v[:, :6], scheme="heads"))
    k: scheme='heads' needs a number of heads that is a multiple of the 3 ranks, got 4; take scheme='gather'
dist.simulate(2, lambda comm: dist.shard(comm, q, axis=7))
    axis: expected one of the 4 axes of x, got 7
dist.simulate(2, lambda comm: dist.shard(comm, q, axis=1.0))
    axis: expected an int, got float; write axis=1
dist.simulate(2, lambda comm: dist.positions(comm, 8.0))
    seqlen: expected an int, got float; write seqlen=8
dist.simulate(2, lambda comm: dist.positions(comm, 7))
    seqlen: expected a length that is a multiple of 4, for 2 ranks in zigzag order, got 7; pad it to 8 with
    fa2cupy.distributed.pad
dist.simulate(2, lambda comm: dist.padded_length(comm, "8"))
    seqlen: expected an int, got str
dist.simulate(2, lambda comm: dist.total(comm, 3.0))
    x: ... got float; write numpy.asarray(3.0)
dist.simulate(2, None)
    work: expected a function of a communicator, got NoneType
dist.simulate(2.0, lambda comm: 1)
    size: expected an int, got float; write size=2
dist.simulate(0, lambda comm: 1)
    size: expected at least 1 rank, got 0
dist.simulate(2, lambda comm: 1, timeout="5")
    timeout: expected a number of seconds, got str
dist.simulate(4, lambda comm: 1, ranks_per_host=3)
    ranks_per_host: expected a divisor of the 4 ranks, got 3
dist.Communicator.from_mpi(3)
    communicator: expected one of mpi4py, such as MPI.COMM_WORLD, got int
dist.Communicator.from_nccl(3, 0, 2)
    communicator: expected a cupy.cuda.nccl.NcclCommunicator, a cupyx.distributed.NCCLBackend or a
    nccl.core.Communicator, got builtins.int
dist.Communicator.from_env({})
    environment: expected the variables of a launcher (RANK and WORLD_SIZE; OMPI_COMM_WORLD_RANK and
    OMPI_COMM_WORLD_SIZE; PMI_RANK and PMI_SIZE; SLURM_PROCID and SLURM_NTASKS), and there are none
dist.Communicator.from_env({"RANK": "x", "WORLD_SIZE": "2"})
    RANK: expected an int, got 'x'
dist.Communicator.from_env({"RANK": "2", "WORLD_SIZE": "2"})
    RANK: expected 0 to 1, below WORLD_SIZE, got 2

# arrays of other libraries
forward(Box(q), k, v)
    q: ...Box; to differentiate through the call, make it a primitive of that library (docs/autograd.md, "Autograd
    recipes")
jvp(Box(q), k, v, q, None, None)
    q: ...Box; to differentiate through the call, make it a primitive of that library (docs/autograd.md, "Autograd
    recipes")
backward_jvp(q, k, v, o, lse, do, Box(q), None, None, o, lse)
    backward_jvp: it is a second derivative of attention, and there are no third ones: its arguments must be plain
    arrays (qt: expected a numpy.ndarray or cupy.ndarray, got ...Box)
double_backward(Box(q), k, v, o, lse, do, q, None, None)
    double_backward: it is a second derivative of attention, and there are no third ones: its arguments must be plain
    arrays (q: expected a numpy.ndarray or cupy.ndarray, got ...Box)
attention(q, k, v)[1].double_backward(do, Box(q), None, None)
    double_backward: it is a second derivative of attention, and there are no third ones: its arguments must be plain
    arrays (gdq: expected a numpy.ndarray or cupy.ndarray, got ...Box)
forward(Tensor(q), k, v)
    q: ...Tensor; to differentiate through the call, make it a primitive of that library (docs/autograd.md, "Autograd
    recipes"); without a gradient, write q.data
forward(Tracer(), k, v)
    q: ...Tracer; to differentiate through the call, make it a primitive of that library (docs/autograd.md, "Autograd
    recipes")
forward(Dlpack(1), k, v)
    q: ...Dlpack; convert it with numpy.from_dlpack(q), which copies nothing
forward(Dlpack(2), k, v)
    q: ...Dlpack; convert it with cupy.from_dlpack(q), which copies nothing
forward(Dlpack(10), k, v)
    q: ...Dlpack; its memory, on DLPack's device 10, is none of NumPy or CuPy: copy it to the host first
forward(Dlpack(1, dtype="torch.bfloat16"), k, v)
    q: ...Dlpack; convert it with q.view(torch.int16).numpy().view(ml_dtypes.bfloat16), which copies nothing
forward(Dlpack(2, requires_grad=True), k, v)
    q: ...Dlpack; to differentiate through the call, make it a primitive of that library (docs/autograd.md, "Autograd
    recipes"); without a gradient, write cupy.from_dlpack(q.detach()), which copies nothing
forward(OnlyDlpack(), k, v)
    q: ...OnlyDlpack; convert it with cupy.from_dlpack(q) or numpy.from_dlpack(q), which copy nothing
forward(OnlyCudaArrayInterface(), k, v)
    q: ...OnlyCudaArrayInterface; convert it with cupy.asarray(q), which copies nothing
forward(q, k, v, bias=Series())
    bias: ... Series; convert it with numpy.asarray(bias, "float32")
forward(q, k, v, sink=Dlpack(2))
    sink: ...Dlpack; convert it with cupy.from_dlpack(sink), which copies nothing
forward(q, k, v, out=(Dlpack(2), None))
    out (o): ...Dlpack

# command line
command("demo", "--device", "cuda")
    fa2cupy demo: error: argument --device: invalid choice: 'cuda' (choose from 'auto', 'gpu', 'cpu')
command("scaleout", "--ranks", "two")
    fa2cupy scaleout: error: argument --ranks: invalid int value: 'two'
command("precompile", "sm80")
    fa2cupy: arch: 'sm80' is not known; ... ; did you mean 'sm_80'?
command("precompile", "sm_80", "--dtypes", "fp16")
    fa2cupy: dtype: expected float16, bfloat16, float32 or float64, got 'fp16'; did you mean 'float16'?
command("precompile", "sm_80", "--features", "windows")
    fa2cupy: features: expected window, softcap, alibi_slopes, bias, mask, key_padding_mask, block_mask, sink,
    dropout_p, cu_seqlens, dlse, return_dbias, return_dsink, bias_tangent or sink_tangent, got 'windows'; did you mean
    'window'?
command("precompile", "sm_80", "--jobs", "0")
    fa2cupy: jobs: expected at least 1, or None for one per CPU, got 0
command("scaleout", "--ranks", "0")
    fa2cupy: --ranks: expected at least 1, got 0
command("compile")
    fa2cupy: error: argument command: invalid choice: 'compile' (choose from 'demo', 'scaleout', 'info', 'precompile',
    'clear-cache')
"""
)

#: Numbers and truth values of NumPy, which are taken wherever those of Python are.
TAKEN = transcript(
    r"""
forward(q, k, v, causal=np.True_, softmax_scale=np.float32(0.3), num_splits=np.int64(1))
forward(q, k, v, window=(np.int64(3), np.int32(0)), softcap=np.float32(30))
forward(q, k, v, dropout_p=np.float64(0.1), seed=np.uint64(2**63))
forward(p, p, p, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=np.int32(5), max_seqlen_k=np.int64(5))
forward(half, half, half, num_splits=np.int32(2), config=TileConfig(np.int64(16), np.int32(16), np.uint8(1)))
backward(q, k, v, o, lse, do, deterministic=np.True_, return_dbias=np.False_)
attention(q, k, v, return_lse=np.True_)
decode(q, k_cache, v_cache, n, num_splits=np.int64(1))
block_mask(mask, (), np.int64(1), np.int32(1), np.int64(16), np.uint16(16), tile=(np.int64(8), np.int64(8)))
BlockMask(ones(1, 1, dtype=bool), np.int64(8), np.int32(8))
legal_configs("forward", head_dim=np.int64(64), arch="sm_90")
mods.sliding_window(np.int64(3), right=np.int32(0))
mods.t5_relative(np.int64(32), np.int32(128), np.True_)
testing.make_inputs(head_dim=np.int64(8), seqlen_q=np.int32(3))
dist.simulate(np.int64(2), lambda comm: 1, timeout=np.float32(5), ranks_per_host=np.int64(1))
dist.simulate(2, lambda comm: dist.shard(comm, q, axis=np.int64(1)))
dist.simulate(2, lambda comm: dist.forward(comm, q, k, v, head_groups=np.int64(1), num_splits=np.int64(1)))
"""
)


def refuses(code: str, expected: str, found: dict[str, Any]) -> None:
    """Checks that a piece of code raises an error of a kind that users expect, with this beginning."""
    with pytest.raises((TypeError, ValueError, IndexError, RuntimeError, fa2cupy.UnsupportedProblemError)) as raised:
        eval(code, found)
    pattern = ".*".join(re.escape(piece.strip()) for piece in expected.split("..."))
    assert re.match(pattern, str(raised.value), re.DOTALL), f"{code}\n{raised.value}"


@pytest.fixture(scope="module")
def on_numpy() -> dict[str, Any]:
    return names(np.array)


@pytest.mark.parametrize("code", [*ON_BOTH, *ON_NUMPY])
def test_a_message_says_what_to_write(on_numpy, code):
    refuses(code, (ON_BOTH | ON_NUMPY)[code], on_numpy)


@pytest.fixture(scope="module")
def on_a_gpu():
    with pytest.MonkeyPatch.context() as patch:
        of_numpy = api.backend_of
        patch.setattr(api, "backend_of", lambda name, x: gpu_calls if isinstance(x, FakeArray) else of_numpy(name, x))
        with fake_gpu(patch, "sm_90", run=lambda launch: None) as launched:
            yield names(place), launched


@pytest.mark.parametrize("code", ON_BOTH)
def test_gpus_refuse_the_same(on_a_gpu, code):
    """Checks the text, and that nothing is launched: what runs on NumPy arrays runs on GPUs."""
    found, launched = on_a_gpu
    launched.clear()
    refuses(code, ON_BOTH[code], found)
    if not re.search(r".(attention|forward)\(", code) and not code.startswith("attention"):  # those run a forward first
        assert not launched


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except (TypeError, ValueError, fa2cupy.UnsupportedProblemError) as error:
        return f"{type(error).__name__}: {error}"
    return "taken"


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy_takes_the_options_that_gpus_take(on_numpy, on_a_gpu, dtype):
    """Checks all choices of kernels that callers can make, with the same text where there is none."""
    values = itertools.product(
        (None, "sm90", "sm80", "simt", "sm100"),
        (None, "ieee", "split"),
        (None, 2),
        (None, "single_pass"),
        (False, True),
    )
    outcomes = set()
    for family, precision, num_splits, method, deterministic in values:
        options = {"family": family, "precision": precision, "num_splits": num_splits}
        options |= {"method": method, "deterministic": deterministic}

        def call(found: dict[str, Any], options: dict[str, Any] = options) -> None:
            q, do = (found[name].astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype) for name in ("q", "do"))
            lse = found["lse"].astype(ACCUMULATOR[dtype])
            found["backward"](q, q, q, q, lse, do, **options)

        taken = outcome(lambda call=call: call(on_numpy))
        assert outcome(lambda call=call: call(on_a_gpu[0])) == taken, options
        outcomes.add(taken)
    assert "taken" in outcomes and len(outcomes) > 3


@pytest.mark.parametrize("code", TAKEN)
def test_numbers_of_numpy_are_taken(on_numpy, code):
    eval(code, on_numpy)
