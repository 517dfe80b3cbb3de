"""A byte-level GPT with its gradients written out, on the array module alone.

Every layer is a function that returns its result and ``backprop``, its gradient as a closure: the style of
``fa2cupy.attention``. With B sequences of T bytes, N = B * T, width D and H heads of d = D / H:

    x = embedding[bytes]                                          (N, D)   residual stream, wide dtype
    each block:  x += attention(rotary(norm(x) W_qkv)) W_out               causal, D -> 3 D -> D
                 x += gelu(norm(x) W_up) W_down                            D -> 4 D -> D
    logits = norm(x) W_head                                       (N, 256)

All weights are matrices: norms have no gain (the matrix behind them has it in its rows), products have no bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from language_model.arrays import Arrays, SetupError

__all__ = ["Adam", "ModelConfig", "Parameters", "Transformer", "cross_entropy", "unfused_attention"]

_NORM_EPSILON = 1e-6
_ROTARY_BASE = 10000.0
_GELU = math.sqrt(2 / math.pi), 0.044715


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model.

    Raises
    ------
    SetupError
        `width` is not `heads` times an even number.
    """

    layers: int
    heads: int
    width: int
    context: int
    vocabulary: int = 256

    def __post_init__(self):
        if self.width % (2 * self.heads):
            raise SetupError(f"width must be a multiple of twice the heads ({2 * self.heads}), got {self.width}")

    @property
    def head_dim(self) -> int:
        """Columns of a head."""
        return self.width // self.heads

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Returns the shapes of all weights, in order."""
        shapes = {"embedding": (self.vocabulary, self.width)}
        for layer in range(self.layers):
            shapes[f"{layer}.qkv"] = (self.width, 3 * self.width)
            shapes[f"{layer}.out"] = (self.width, self.width)
            shapes[f"{layer}.up"] = (self.width, 4 * self.width)
            shapes[f"{layer}.down"] = (4 * self.width, self.width)
        shapes["head"] = (self.width, self.vocabulary)
        return shapes


class Parameters:
    """All weights, and their gradients, each in one flat array with a view for each matrix.

    Attributes
    ----------
    flat, flat_gradient : ndarray, wide dtype
        The arrays of the optimizer.
    weight : dict of ndarray
        The matrices in `flat`.
    operand : dict of ndarray
        The matrices in the dtype of matrix products, as of the last `refresh`.
    gradient : dict of ndarray
        The matrices in `flat_gradient`, where ``backprop`` of each layer writes.
    """

    def __init__(self, config: ModelConfig, arrays: Arrays, seed: int):
        xp, shapes = arrays.xp, config.shapes()
        self.flat = xp.asarray(
            np.concatenate(_initial_weights(config, np.random.default_rng(seed))).astype(arrays.wide)
        )
        self.flat_gradient = xp.zeros_like(self.flat)
        # If both dtypes are the same, these are the weights themselves.
        self._flat_operand = self.flat.astype(arrays.dtype, copy=False)
        self.weight = _views(self.flat, shapes)
        self.operand = _views(self._flat_operand, shapes)
        self.gradient = _views(self.flat_gradient, shapes)

    def refresh(self) -> None:
        """Brings `operand` up to date after `flat` has changed."""
        if self._flat_operand is not self.flat:
            self._flat_operand[...] = self.flat


def _initial_weights(config: ModelConfig, rng: np.random.Generator) -> list[np.ndarray]:
    weights = []
    for name, (rows, columns) in config.shapes().items():
        scale = 1.0 if name == "embedding" else rows**-0.5
        if name.endswith((".out", ".down")):
            scale /= math.sqrt(2 * config.layers)  # so that the residual stream does not grow with the number of layers
        weights.append(scale * rng.standard_normal(rows * columns))
    return weights


def _views(flat, shapes: dict[str, tuple[int, int]]) -> dict[str, object]:
    views, start = {}, 0
    for name, shape in shapes.items():
        views[name] = flat[start : start + math.prod(shape)].reshape(shape)
        start += math.prod(shape)
    return views


class Transformer:
    """The model.

    Parameters
    ----------
    config : ModelConfig
    arrays : Arrays
    parameters : Parameters
    attention : callable
        ``attention(q, k, v, causal=True) -> (o, backprop)`` on (batch, seqlen, heads, head_dim), such as
        ``fa2cupy.attention``.

    Attributes
    ----------
    positions : slice or ndarray of int
        Positions of the bytes that the model gets, in each sequence; by default the whole context.
    """

    def __init__(self, config: ModelConfig, arrays: Arrays, parameters: Parameters, attention: Callable):
        self.config, self.arrays, self.parameters, self.attention = config, arrays, parameters, attention
        self.positions = slice(0, config.context)
        self._gelu, self._gelu_gradient = arrays.pointwise(_gelu), arrays.pointwise(_gelu_gradient)
        half = config.head_dim // 2
        angles = np.arange(config.context)[:, None] * _ROTARY_BASE ** (-np.arange(half) / half)
        # (position, q or k, head, column)
        self._cos, self._sin = (
            arrays.xp.asarray(table.astype(arrays.wide)[:, None, None]) for table in (np.cos(angles), np.sin(angles))
        )

    def __call__(self, ids) -> tuple[object, Callable]:
        """Computes the logits for the byte after each.

        Parameters
        ----------
        ids : ndarray of uint8, shape (batch, bytes at the positions)

        Returns
        -------
        logits : ndarray, shape (batch * bytes, vocabulary)
            They have the wide dtype.
        backprop : callable
            ``backprop(dlogits)``, to be called once, writes the gradients of all weights.
        """
        x, backprop = self._embed(ids)
        backprops = [backprop]
        for layer in range(self.config.layers):
            for branch in (self._attention_branch, self._mlp_branch):
                y, backprop = branch(x, layer)
                x = x + y
                backprops.append(_through_residual(backprop))
        logits, backprop = self._head(x)
        backprops.append(backprop)

        def backprop_all(gradient):
            while backprops:  # what a layer kept is free as soon as its gradient is done
                gradient = backprops.pop()(gradient)

        return logits, backprop_all

    def _embed(self, ids) -> tuple[object, Callable]:
        ids = ids.reshape(-1).astype(np.int64)

        def backprop(dx):
            # A product with the one-hot matrix: cheap with 256 bytes, and unlike atomic sums the same every time.
            one_hot = _one_hot(self.arrays.xp, ids, self.config.vocabulary).astype(self.arrays.dtype)
            self.arrays.matmul(one_hot.T, self._operand(dx), out=self.parameters.gradient["embedding"])

        return self.parameters.weight["embedding"][ids], backprop

    def _attention_branch(self, x, layer: int) -> tuple[object, Callable]:
        wide, (heads, head_dim) = self.arrays.wide, (self.config.heads, self.config.head_dim)
        normed, norm_backprop = self._norm(x)
        qkv, qkv_backprop = self._linear(normed, f"{layer}.qkv")
        positions = self.positions
        count = positions.stop - positions.start if isinstance(positions, slice) else len(positions)
        qkv = qkv.reshape(-1, count, 3, heads, head_dim)
        qk = self._rotate(qkv[:, :, :2], self._sin)
        o, attention_backprop = self.attention(qk[:, :, 0], qk[:, :, 1], qkv[:, :, 2], causal=True)
        y, out_backprop = self._linear(o.reshape(len(x), -1), f"{layer}.out", wide)

        def backprop(dy):
            do = out_backprop(self._operand(dy)).reshape(o.shape)
            dqkv = self.arrays.xp.empty_like(qkv)
            dqkv[:, :, 0], dqkv[:, :, 1], dqkv[:, :, 2] = attention_backprop(do)
            dqkv[:, :, :2] = self._rotate(dqkv[:, :, :2], -self._sin)  # a rotation's gradient is the rotation back
            return norm_backprop(qkv_backprop(dqkv.reshape(len(x), -1), wide))

        return y, backprop

    def _mlp_branch(self, x, layer: int) -> tuple[object, Callable]:
        wide = self.arrays.wide
        normed, norm_backprop = self._norm(x)
        h, up_backprop = self._linear(normed, f"{layer}.up")
        activated = self._operand(self._gelu(h.astype(wide, copy=False)))
        y, down_backprop = self._linear(activated, f"{layer}.down", wide)

        def backprop(dy):
            dactivated = down_backprop(self._operand(dy), wide)
            dh = self._gelu_gradient(h.astype(wide, copy=False), dactivated)
            return norm_backprop(up_backprop(self._operand(dh), wide))

        return y, backprop

    def _head(self, x) -> tuple[object, Callable]:
        wide = self.arrays.wide
        normed, norm_backprop = self._norm(x)
        logits, head_backprop = self._linear(normed, "head", wide)
        return logits, lambda dlogits: norm_backprop(head_backprop(self._operand(dlogits), wide))

    def _linear(self, x, name: str, dtype: np.dtype | None = None) -> tuple[object, Callable]:
        """Returns x W, in `dtype`; its backprop takes a second argument, the dtype of dx."""
        matmul, weight = self.arrays.matmul, self.parameters.operand[name]

        def backprop(dy, dtype=None):
            matmul(x.T, dy, out=self.parameters.gradient[name])
            return matmul(dy, weight.T, dtype)

        return matmul(x, weight, dtype), backprop

    def _norm(self, x) -> tuple[object, Callable]:
        """Divides the rows of x by their root mean square."""
        xp, wide = self.arrays.xp, self.arrays.wide
        factor = 1 / xp.sqrt(xp.mean(xp.square(x), axis=1, keepdims=True) + _NORM_EPSILON)
        y = self._operand(x * factor)

        def backprop(dy):
            wide_y = y.astype(wide, copy=False)
            return factor * (dy - wide_y * xp.mean(dy * wide_y, axis=1, keepdims=True))

        return y, backprop

    def _rotate(self, x, sin):
        """Turns the pairs (column, column + head_dim / 2) of x by an angle that grows with the position (RoFormer)."""
        wide, half = self.arrays.wide, x.shape[-1] // 2
        first, second = (part.astype(wide, copy=False) for part in (x[..., :half], x[..., half:]))
        cos, sin = self._cos[self.positions], sin[self.positions]
        out = self.arrays.xp.empty(x.shape, self.arrays.dtype)
        out[..., :half] = first * cos - second * sin
        out[..., half:] = second * cos + first * sin
        return out

    def _operand(self, x):
        return x.astype(self.arrays.dtype, copy=False)


def _through_residual(backprop: Callable) -> Callable:
    return lambda dx: dx + backprop(dx)


def _gelu(xp, x):
    scale, cube = _GELU
    return 0.5 * x * (1 + xp.tanh(scale * (x + cube * x * x * x)))


def _gelu_gradient(xp, x, dy):
    scale, cube = _GELU
    t = xp.tanh(scale * (x + cube * x * x * x))
    return dy * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * scale * (1 + 3 * cube * x * x))


def _one_hot(xp, ids, size: int):
    return ids[:, None] == xp.arange(size, dtype=ids.dtype)


def cross_entropy(xp, logits, targets) -> tuple[object, Callable]:
    """Returns the negative log-likelihood of each target in nats, and the gradient of their mean.

    Parameters
    ----------
    xp : module
    logits : ndarray, shape (rows, classes)
    targets : ndarray of uint8, shape (rows,)

    Returns
    -------
    loss : ndarray, shape (rows,)
    backprop : callable
        ``backprop()`` returns the gradient of ``loss.mean()`` for the logits.
    """
    targets = targets.astype(np.int64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    exponentials = xp.exp(shifted)
    sums = exponentials.sum(axis=1, keepdims=True)
    of_target = xp.take_along_axis(shifted, targets[:, None], axis=1)

    def backprop():
        probabilities = exponentials / sums
        return (probabilities - _one_hot(xp, targets, logits.shape[1])) / len(logits)

    return (xp.log(sums) - of_target)[:, 0], backprop


def unfused_attention(arrays: Arrays) -> Callable:
    """Returns attention through the written-out score matrix, with the interface of ``fa2cupy.attention``.

    It keeps P, of size batch * heads * seqlen^2, for the backward pass.
    """
    xp, matmul, wide = arrays.xp, arrays.matmul, arrays.wide

    def attention(q, k, v, *, causal: bool) -> tuple[object, Callable]:
        batch, seqlen, heads, head_dim = q.shape
        scale = head_dim**-0.5

        def as_stack(x):
            return xp.ascontiguousarray(x.transpose(0, 2, 1, 3)).reshape(batch * heads, seqlen, head_dim)

        def from_stack(x):
            return xp.ascontiguousarray(x.reshape(batch, heads, seqlen, head_dim).transpose(0, 2, 1, 3))

        def row_sums(x, y):
            return (x.astype(wide, copy=False) * y.astype(wide, copy=False)).sum(axis=2, keepdims=True)

        q, k, v = map(as_stack, (q, k, v))
        s = matmul(q, k.swapaxes(1, 2), wide)
        s *= scale
        if causal:
            s += xp.triu(xp.full((seqlen, seqlen), -np.inf, wide), 1)
        s -= s.max(axis=2, keepdims=True)
        xp.exp(s, out=s)
        s /= s.sum(axis=2, keepdims=True)
        p = s.astype(arrays.dtype, copy=False)
        o = matmul(p, v)

        def backprop(do):
            do = as_stack(do)
            ds = matmul(do, v.swapaxes(1, 2), wide)
            ds -= row_sums(do, o)
            ds *= p.astype(wide, copy=False)
            ds *= scale
            ds = ds.astype(arrays.dtype, copy=False)
            return tuple(map(from_stack, (matmul(ds, k), matmul(ds.swapaxes(1, 2), q), matmul(p.swapaxes(1, 2), do))))

        return from_stack(o), backprop

    return attention


class Adam:
    """Adam (Kingma and Ba 2015) with decoupled weight decay (Loshchilov and Hutter 2019).

    The gradient is clipped by its norm over all weights. Nothing is read back to the host.
    """

    def __init__(
        self,
        arrays: Arrays,
        parameters: Parameters,
        betas: Sequence[float] = (0.9, 0.95),
        epsilon: float = 1e-8,
        weight_decay: float = 0.1,
        max_norm: float = 1.0,
    ):
        self.xp, self.parameters = arrays.xp, parameters
        self.betas, self.epsilon, self.weight_decay, self.max_norm = betas, epsilon, weight_decay, max_norm
        self.mean, self.square = arrays.xp.zeros_like(parameters.flat), arrays.xp.zeros_like(parameters.flat)

    def update(self, step: int, learning_rate: float) -> None:
        """Applies the gradients that `parameters` holds; `step` counts from 1."""
        xp, weights, gradient = self.xp, self.parameters.flat, self.parameters.flat_gradient
        norm = xp.sqrt(xp.sum(xp.square(gradient)))
        gradient *= xp.minimum(self.max_norm / (norm + 1e-12), 1)
        (beta, gamma), (mean, square) = self.betas, (self.mean, self.square)
        mean += (1 - beta) * (gradient - mean)
        square += (1 - gamma) * (xp.square(gradient) - square)
        scale = learning_rate / (1 - beta**step)
        weights *= 1 - learning_rate * self.weight_decay
        weights -= scale * mean / (xp.sqrt(square / (1 - gamma**step)) + self.epsilon)
        self.parameters.refresh()
