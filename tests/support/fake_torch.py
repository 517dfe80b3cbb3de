"""PyTorch's attention operators, by their schemas, computed by this package on NumPy arrays.

The parameters have the names and the order of ATen's ``native_functions.yaml``, so that a call with swapped arguments
gives a wrong result or an error.
"""

from __future__ import annotations

import contextlib
from types import ModuleType, SimpleNamespace

import numpy as np
from common import peers
from support.fake_timing import FakeGpu

import fa2cupy

__all__ = ["FakeTensor", "fake_torch", "use_fake_torch"]


class FakeTensor(np.ndarray):
    """An array with the methods of a tensor that differ from NumPy's."""

    def transpose(self, first, second):
        return self.swapaxes(first, second)

    def requires_grad_(self):
        return self

    detach = requires_grad_

    def contiguous(self):
        return np.ascontiguousarray(self).view(FakeTensor)

    def expand(self, *shape):
        return np.broadcast_to(self, shape, subok=True)

    def sum_to_size(self, shape):
        axes = tuple(axis for axis, size in enumerate(shape) if size != self.shape[axis])
        return self.astype("float32").sum(axis=axes, keepdims=True).astype(self.dtype)


def fake_torch() -> ModuleType:
    """Returns a module with the operators of `_ATEN`."""
    torch = ModuleType("torch")
    torch.__version__ = "0"
    torch.ops = SimpleNamespace(aten=SimpleNamespace(**{function.__name__: function for function in _ATEN}))
    torch.backends = SimpleNamespace(cudnn=SimpleNamespace(version=lambda: 0))
    math = _MathOperator()
    attention = SimpleNamespace(sdpa_kernel=math.chosen, SDPBackend=SimpleNamespace(MATH="math"))
    functional = SimpleNamespace(scaled_dot_product_attention=math.forward)
    torch.nn = SimpleNamespace(attention=attention, functional=functional)
    torch.autograd = SimpleNamespace(grad=math.grad)
    torch.no_grad = contextlib.nullcontext
    torch.bool = np.bool_
    torch.matmul, torch.softmax, torch._softmax_backward_data = _matmul, _softmax, _softmax_backward_data
    return torch


def use_fake_torch(monkeypatch) -> ModuleType:
    """Gives all peers of PyTorch the fake module, on NumPy arrays, and returns it."""
    torch = fake_torch()

    def initialize(self, gpu):
        self.torch, self.xp = torch, np

    monkeypatch.setattr(peers.TorchPeer, "__init__", initialize)
    monkeypatch.setattr(peers.TorchPeer, "tensor", lambda self, array: array.view(FakeTensor))
    monkeypatch.setattr(peers.TorchPeer, "array", lambda self, tensor: np.asarray(tensor))
    monkeypatch.setattr(peers.TorchPeer, "peak_bytes", lambda self, call: FakeGpu().peak_bytes(lambda: call()[:1]))
    monkeypatch.setattr(peers.TorchPeer, "deterministic", contextlib.nullcontext)
    monkeypatch.setattr(peers.TorchPeer, "release", lambda self: None)
    return torch


def _matmul(input, other):
    wide = np.matmul(np.asarray(input, "float32"), np.asarray(other, "float32"))
    return wide.astype(input.dtype).view(FakeTensor)


def _softmax(input, dim):
    p = np.exp(np.asarray(input, "float32") - np.asarray(input.max(dim, keepdims=True), "float32"))
    return (p / p.sum(dim, keepdims=True)).astype(input.dtype).view(FakeTensor)


def _softmax_backward_data(grad_output, output, dim, input_dtype):
    grad, p = np.asarray(grad_output, "float32"), np.asarray(output, "float32")
    return (p * (grad - (grad * p).sum(dim, keepdims=True))).astype(input_dtype).view(FakeTensor)


class _MathOperator:
    """``scaled_dot_product_attention`` where its backend must have been chosen, and its gradients."""

    def __init__(self):
        self._backend, self._made = None, []

    @contextlib.contextmanager
    def chosen(self, backend):
        self._backend = backend
        yield
        self._backend = None

    def forward(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False):
        assert self._backend == "math"
        options = _options(is_causal, dropout_p, attn_mask, layout="bhsd")
        o, lse = _forward(query, key, value, options)
        self._made.append((o, lse, query, options))
        return o

    def grad(self, outputs, inputs, grad_outputs, retain_graph=None):
        (output,) = outputs
        assert retain_graph, "a call that is repeated"
        ((o, lse, query, options),) = (made for made in self._made if made[0] is output)
        assert query is inputs[0]
        return _backward(*inputs, o, lse, grad_outputs, options)


def _options(is_causal, dropout_p, bias=None, **more) -> dict:
    dropout = {"dropout_p": dropout_p, "seed": 99} if dropout_p else {}
    return {"causal": is_causal, **dropout, **({} if bias is None else {"bias": np.asarray(bias)}), **more}


def _forward(query, key, value, options: dict) -> list:
    return [result.view(FakeTensor) for result in fa2cupy.forward(*map(np.asarray, (query, key, value)), **options)]


def _backward(query, key, value, out, logsumexp, grad_out, options: dict) -> tuple:
    arrays = map(np.asarray, (query, key, value, out, logsumexp, grad_out))
    return tuple(gradient.view(FakeTensor) for gradient in fa2cupy.backward(*arrays, **options))


def _scaled_dot_product_flash_attention(
    query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
):
    assert not return_debug_mask
    o, lse = _forward(query, key, value, _options(is_causal, dropout_p, layout="bhsd"))
    return o, lse, None, None, query.shape[2], key.shape[2], "seed", "offset", None


def _scaled_dot_product_flash_attention_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed,
    philox_offset, *, scale=None,
):  # fmt: skip
    assert (cum_seq_q, cum_seq_k, max_q, max_k) == (None, None, query.shape[2], key.shape[2])
    assert (philox_seed, philox_offset) == ("seed", "offset")
    options = _options(is_causal, dropout_p, layout="bhsd")
    return _backward(query, key, value, out, logsumexp, grad_out, options)


def _scaled_dot_product_cudnn_attention(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *,
    scale=None,
):  # fmt: skip
    assert compute_log_sumexp and not return_debug_mask
    o, lse = _forward(query, key, value, _options(is_causal, dropout_p, attn_bias, layout="bhsd"))
    return o, lse, None, None, query.shape[2], key.shape[2], "seed", "offset", None


def _scaled_dot_product_cudnn_attention_backward(
    grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k, max_q,
    max_k, dropout_p, is_causal, *, scale=None,
):  # fmt: skip
    assert (cum_seq_q, cum_seq_k, max_q, max_k) == (None, None, query.shape[2], key.shape[2])
    assert (philox_seed, philox_offset) == ("seed", "offset")
    options = _options(is_causal, dropout_p, attn_bias, layout="bhsd")
    return _backward(query, key, value, out, logsumexp, grad_out, options)


def _scaled_dot_product_efficient_attention(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):
    assert compute_log_sumexp and query.shape[1] == key.shape[1]
    if attn_bias is not None:
        assert attn_bias.shape == (*query.shape[:3], key.shape[2])
    o, lse = _forward(query, key, value, _options(is_causal, dropout_p, attn_bias, layout="bhsd"))
    return o, lse, "seed", "offset"


def _scaled_dot_product_efficient_attention_backward(
    grad_out_, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p, grad_input_mask,
    is_causal=False, *, scale=None,
):  # fmt: skip
    assert (philox_seed, philox_offset) == ("seed", "offset") and grad_input_mask[:3] == [True] * 3
    options = _options(is_causal, dropout_p, attn_bias, layout="bhsd", return_dbias=grad_input_mask[3])
    gradients = _backward(query, key, value, out, logsumexp, grad_out_, options)
    return gradients if grad_input_mask[3] else (*gradients, None)


def _flash_attention_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None,
):  # fmt: skip
    assert not return_debug_mask
    lengths = (cum_seq_q, cum_seq_k, max_q, max_k)
    more = _flash_options(query, lengths, window_size_left, window_size_right)
    if alibi_slopes is not None:
        more["alibi_slopes"] = np.asarray(alibi_slopes)
    o, lse = _forward(query, key, value, _options(is_causal, dropout_p, **more))
    return o, lse, "rng_state", "unused", None


def _flash_attention_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    assert (rng_state, unused) == ("rng_state", "unused")
    more = _flash_options(query, (cum_seq_q, cum_seq_k, max_q, max_k), window_size_left, window_size_right)
    return _backward(query, key, value, out, logsumexp, grad_out, _options(is_causal, dropout_p, **more))


def _flash_options(query, lengths: tuple, left, right) -> dict:
    window = {} if left is None else {"window": (left, right)}
    if lengths[0] is None:
        assert query.ndim == 4 and lengths == (None, None, query.shape[1], query.shape[1])
        return window
    assert query.ndim == 3
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    arrays = (np.asarray(length) if isinstance(length, np.ndarray) else length for length in lengths)
    return {**window, **dict(zip(names, arrays, strict=True))}


_ATEN = (
    _scaled_dot_product_flash_attention,
    _scaled_dot_product_flash_attention_backward,
    _scaled_dot_product_cudnn_attention,
    _scaled_dot_product_cudnn_attention_backward,
    _scaled_dot_product_efficient_attention,
    _scaled_dot_product_efficient_attention_backward,
    _flash_attention_forward,
    _flash_attention_backward,
)
