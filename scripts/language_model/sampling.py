"""Text from a model: byte by byte with a cache of keys and values, or from the whole prefix each time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from language_model.arrays import Arrays
from language_model.model import ModelConfig, Transformer

import fa2cupy

__all__ = ["Sample", "sample_with_cache", "sample_without_cache"]

_TEMPERATURE = 0.8


class Sample(NamedTuple):
    """Sampled bytes.

    Attributes
    ----------
    ids : ndarray of uint8, shape (batch, prompt and sampled bytes)
    tokens_per_second : float
        Sampled bytes of all sequences over the time after the prompt.
    """

    ids: np.ndarray
    tokens_per_second: float

    @property
    def text(self) -> str:
        """The first sequence as text."""
        return self.ids[0].tobytes().decode("utf-8", "replace")


class _CachedAttention:
    """Attention of new bytes to all before them, whose keys and values it keeps; called once for each layer."""

    def __init__(self, config: ModelConfig, arrays: Arrays, batch: int):
        shape = (batch, config.context, config.heads, config.head_dim)
        self._caches = [[arrays.xp.empty(shape, arrays.dtype) for _ in "kv"] for _ in range(config.layers)]
        self._lengths = arrays.xp.zeros(batch, "int32")
        self._layer = 0

    def __call__(self, q, k, v, *, causal: bool) -> tuple[object, Callable]:
        o, _ = fa2cupy.decode(q, *self._caches[self._layer], self._lengths, k=k, v=v, causal=causal)
        self._layer += 1
        if self._layer == len(self._caches):
            self._layer = 0
            self._lengths += q.shape[1]
        return o, _no_gradient


def _no_gradient(gradient):
    raise NotImplementedError("decoding has no gradient")


@contextlib.contextmanager
def _attention_of(model: Transformer, attention: Callable) -> Iterator[None]:
    """Replaces the model's attention; at the end, restores it and the model's positions."""
    before = model.attention, model.positions
    model.attention = attention
    try:
        yield
    finally:
        model.attention, model.positions = before


def sample_with_cache(model: Transformer, arrays: Arrays, prompt: np.ndarray, count: int, seed: int = 0) -> Sample:
    """Samples `count` bytes after each prompt (batch, length), computing each byte's row of the model once."""
    ids, draw = prompt, _Draw(len(prompt), seed)
    with _attention_of(model, _CachedAttention(model.config, arrays, len(prompt))):
        new = prompt
        for number in range(count):
            if number == 1:
                start = time.perf_counter()
            model.positions = slice(ids.shape[1] - new.shape[1], ids.shape[1])
            logits, _ = model(arrays.xp.asarray(new))
            last = logits.reshape(len(prompt), new.shape[1], -1)[:, -1]
            new = draw(arrays.to_host(last))
            ids = np.concatenate([ids, new], axis=1)
        seconds = time.perf_counter() - start
    return Sample(ids, len(prompt) * (count - 1) / seconds)


def sample_without_cache(model: Transformer, arrays: Arrays, prompt: np.ndarray, count: int, seed: int = 0) -> Sample:
    """Samples the same from the whole context for each byte. Bytes after the prefix do not change the result."""
    batch, length = prompt.shape
    ids = np.zeros((batch, model.config.context), np.uint8)
    ids[:, :length] = prompt
    draw = _Draw(batch, seed)
    for number in range(count):
        if number == 1:
            start = time.perf_counter()
        logits, _ = model(arrays.xp.asarray(ids))
        last = logits.reshape(*ids.shape, -1)[:, length + number - 1]
        ids[:, length + number] = draw(arrays.to_host(last))[:, 0]
    seconds = time.perf_counter() - start
    return Sample(ids[:, : length + count], batch * (count - 1) / seconds)


class _Draw:
    """Draws a byte for each row of logits."""

    def __init__(self, batch: int, seed: int):
        self._rng, self._batch = np.random.default_rng(seed), batch

    def __call__(self, logits: np.ndarray) -> np.ndarray:
        """Returns bytes of the shape (batch, 1): the largest of the logits with Gumbel noise."""
        noise = self._rng.gumbel(size=logits.shape)
        return (logits / _TEMPERATURE + noise).argmax(axis=1).astype(np.uint8)[:, None]
