"""Attention on NumPy arrays as a user writes it out, with the scores of all heads at once: what ours is compared with.

`WrittenOut.forward` keeps P and whatever else `WrittenOut.backward` needs, as an autograd library's tape would: its
backward computes no score again. Elementwise steps work in place.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["WrittenOut", "by_sequence", "decode"]

Array = np.ndarray


class WrittenOut:
    """Attention to (batch, seqlen, heads, head_dim) with some features.

    Parameters
    ----------
    q, k, v, do : ndarray
    hidden : ndarray of bool, optional
        True for scores that are not seen, broadcastable to (batch, heads, seqlen_q, seqlen_k).
    softcap : float, optional
    bias : ndarray, optional
        Added to the scores; it has a gradient.
    slopes : ndarray, optional
        Of ALiBi.
    sink : ndarray, optional
    draw : callable, optional
        Draws the factors of dropout for a shape.
    table, buckets : ndarray, optional
        A table (bucket, head) that is added to the scores and has a gradient, and the bucket of each (query, key).
    """

    def __init__(self, q: Array, k: Array, v: Array, do: Array, **options: Any):
        self.q, self.k, self.v, self.do = (x.swapaxes(1, 2) for x in (q, k, v, do))
        self.scale = np.float32(q.shape[-1] ** -0.5)
        self.hidden, self.softcap, self.bias = (options.get(name) for name in ("hidden", "softcap", "bias"))
        self.slopes, self.sink, self.draw = (options.get(name) for name in ("slopes", "sink", "draw"))
        self.table, self.buckets = options.get("table"), options.get("buckets")

    def forward(self) -> tuple[Array, ...]:
        """Returns o."""
        s = (self.q * self.scale) @ self.k.swapaxes(2, 3)
        if self.softcap is not None:
            s /= self.softcap
            self.tanh = np.tanh(s, out=s)
            s = self.softcap * self.tanh
        if self.slopes is not None:
            s -= self.slopes[:, None, None] * abs(np.arange(s.shape[2])[:, None] - np.arange(s.shape[3])).astype("f4")
        if self.bias is not None:
            s += self.bias
        if self.table is not None:
            s += self.table.T[:, self.buckets]
        if self.hidden is not None:
            np.copyto(s, -np.inf, where=self.hidden)
        row_max = s.max(axis=3, keepdims=True)
        if self.sink is not None:
            row_max = np.maximum(row_max, self.sink[:, None, None])
        s -= row_max
        self.p = np.exp(s, out=s)
        total = self.p.sum(axis=3, keepdims=True)
        if self.sink is not None:
            self.share = np.exp(self.sink[:, None, None] - row_max)
            total += self.share
            self.share /= total
        self.p /= total
        self.dropped = self.p
        if self.draw is not None:
            self.keep = self.draw(s.shape)
            self.dropped = self.p * self.keep
        self.o = self.dropped @ self.v
        return (self.o.swapaxes(1, 2),)

    def backward(self) -> tuple[Array, ...]:
        """Returns dq, dk and dv, then the gradients of the bias, sink or table, after a `forward`."""
        delta = (self.do * self.o).sum(axis=3, keepdims=True)
        dv = self.dropped.swapaxes(2, 3) @ self.do
        ds = self.do @ self.v.swapaxes(2, 3)
        if self.draw is not None:
            ds *= self.keep
        ds -= delta
        ds *= self.p
        extra: list[Array] = []
        if self.bias is not None:
            extra.append(ds.sum(axis=0, keepdims=True))
        if self.sink is not None:
            extra.append(-(self.share * delta).sum(axis=(0, 2, 3)))
        if self.table is not None:
            of_head = ds.sum(axis=0).reshape(ds.shape[1], -1)
            flat = self.buckets.ravel()
            extra.append(np.stack([np.bincount(flat, one, len(self.table)) for one in of_head], axis=1))
        if self.softcap is not None:
            ds *= 1 - self.tanh * self.tanh
        dq = ds @ self.k
        dq *= self.scale
        dk = ds.swapaxes(2, 3) @ self.q
        dk *= self.scale
        return (*(x.swapaxes(1, 2) for x in (dq, dk, dv)), *extra)


class by_sequence:  # noqa: N801 (it stands for `WrittenOut`)
    """`WrittenOut` for packed sequences, one after the other; `offsets` are those of queries and keys."""

    def __init__(self, *arrays: Array, offsets: Sequence[int], **options: object):
        self.parts = [
            WrittenOut(*(x[None, start:stop] for x in arrays), **options) for start, stop in itertools.pairwise(offsets)
        ]

    def forward(self) -> tuple[Array, ...]:
        """Returns o."""
        return (np.concatenate([part.forward()[0][0] for part in self.parts]),)

    def backward(self) -> tuple[Array, ...]:
        """Returns dq, dk and dv."""
        found = [part.backward() for part in self.parts]
        return tuple(np.concatenate([one[number][0] for one in found]) for number in range(3))


def decode(q: Array, k_cache: Array, v_cache: Array, lengths: Array, **pages: Array) -> Array:
    """Returns o of queries (batch, seqlen_q, heads, head_dim) that see all rows of their sequence's cache.

    With ``block_table=`` the rows of a sequence are those of its pages.
    """
    table: Mapping[str, Array] = pages
    scale = np.float32(q.shape[-1] ** -0.5)
    o = np.empty_like(q)
    for b, length in enumerate(lengths.tolist()):
        k, v = k_cache[b : b + 1], v_cache[b : b + 1]
        if table:
            own = table["block_table"][b, : -(-length // k_cache.shape[1])]
            k, v = (x[own].reshape(1, -1, *x.shape[2:]) for x in (k_cache, v_cache))
        k, v = (x[0, :length].transpose(1, 2, 0) for x in (k, v))  # (kv head, head_dim, row)
        rows = (q[b] * scale).reshape(len(q[b]), len(k), -1, q.shape[-1]).transpose(1, 2, 0, 3)
        s = rows.reshape(len(k), -1, q.shape[-1]) @ k
        s -= s.max(axis=2, keepdims=True)
        p = np.exp(s, out=s)
        p /= p.sum(axis=2, keepdims=True)
        found = (p @ v.swapaxes(1, 2)).reshape(rows.shape)
        o[b] = found.transpose(2, 0, 1, 3).reshape(o[b].shape)
    return o
