"""The public functions. Each checks which kind of arrays came and hands over to that backend."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping

import numpy as np

from . import cpu
from .arguments import array_backend
from .tiles import TileConfig

__all__ = ["attention", "backward", "delta", "forward"]


def _backend(name: str, array):
    if isinstance(array, np.ndarray):
        return cpu
    cupy = sys.modules.get("cupy")
    if cupy is None or not isinstance(array, cupy.ndarray):
        array_backend({name: array})  # says how to convert it
    return _gpu()


@functools.lru_cache(maxsize=None)
def _gpu():
    # Imported at first use: NumPy users need no CuPy, and CuPy is there once someone has an array of it.
    from . import gpu

    return gpu


def forward(
    q, k, v, *,
    causal: bool = False,
    softmax_scale: float | None = None,
    layout: str = "bshd",
    out: tuple | None = None,
    config: TileConfig | Mapping[str, TileConfig] | None = None,
    family: str | None = None,
):
    """Exact attention without the score matrix: ``softmax(softmax_scale * q k^T) v``.

    Parameters
    ----------
    q : ndarray, shape (batch, seqlen_q, num_heads, head_dim)
        Queries: a NumPy or CuPy array of float16, bfloat16 (``ml_dtypes.bfloat16``), float32 or float64, head_dim up to
        256. Axes may be left out from the front: (seqlen_q, num_heads, head_dim) and (seqlen_q, head_dim) give results
        of the same rank.
    k, v : ndarray, shape (batch, seqlen_k, num_heads_kv, head_dim)
        Keys and values, of q's dtype and device. num_heads must be a multiple of num_heads_kv: query head ``h`` reads
        K/V head ``h // (num_heads // num_heads_kv)`` (multi-head, grouped-query and multi-query attention).
    causal : bool, optional
        Key ``j`` is visible to query ``i`` iff ``j <= i + seqlen_k - seqlen_q``: aligned to the bottom right.
    softmax_scale : float, optional
        Factor of the scores, any finite number; ``head_dim ** -0.5`` by default.
    layout : {"bshd", "bhsd"}, optional
        ``"bhsd"`` takes and gives (batch, heads, seqlen, head_dim).
    out : tuple of (ndarray or None), optional
        Arrays ``(o, lse)`` to write the results to. They must not overlap each other or an input.
    config : TileConfig, or dict of TileConfig by operation, optional
        Tile of the kernel instead of the default; see `legal_configs`. NumPy takes ``b_r`` and ``b_c`` from it.
    family : str, optional
        Kernel family (``"sm90"``, ``"sm80"``, ``"simt"``) instead of the one that the device, dtype and strides call
        for; for tests and sweeps. NumPy ignores it.

    Returns
    -------
    o : ndarray, shape of q
        Output, in q's dtype. A row without a visible key is 0.
    lse : ndarray, shape (batch, num_heads, seqlen_q)
        Natural logarithm of the sum of exponentials of the scaled, masked scores, which `backward` needs; float32
        (float64 for float64 data). A row without a visible key has ``-inf``.

    Raises
    ------
    TypeError
        Not NumPy or CuPy arrays, different or unknown dtypes, an option of the wrong type.
    ValueError
        Shapes, devices or values that do not fit; `out` is read-only or overlaps; `config` is not legal.
    UnsupportedProblemError
        head_dim above 256, or no kernel for the dtype on this GPU.
    KernelCompileError, KernelLaunchError
        NVRTC or the driver refused a kernel; the text says what to do.

    Notes
    -----
    FlashAttention-2 (Dao 2023), Algorithm 1: query tiles of B_r rows meet key tiles of B_c rows with an online softmax,
    so that memory beyond inputs and results is O(1). Scores, statistics and sums are float32 (float64 for float64 data).

    Strides are taken as they are while the last axis is contiguous and, for 16-bit data, rows start on 16 bytes; anything
    else is copied first, and so is 16-bit data whose head_dim is not a multiple of 8. The work is queued on CuPy's
    current stream of the arrays' device, without a synchronisation; the first call of a kind compiles its kernel.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 128, 4, 64), dtype=np.float32)
    >>> o, lse = forward(q, k, v, causal=True)
    >>> o.shape, lse.shape
    ((2, 128, 4, 64), (2, 4, 128))
    """
    return _backend("q", q).forward(q, k, v, causal, softmax_scale, layout, out, config, family)


def delta(o, do, *, layout: str = "bshd", out=None):
    """Row sums of ``do * o``, which the softmax gradient subtracts from ``do v^T``.

    Parameters
    ----------
    o, do : ndarray, shape (batch, seqlen_q, num_heads, head_dim)
        Output of `forward`, and the gradient that arrives for it.
    layout : {"bshd", "bhsd"}, optional
        As for `forward`.
    out : ndarray, optional
        Array to write the result to.

    Returns
    -------
    delta : ndarray, shape (batch, num_heads, seqlen_q)
        float32 (float64 for float64 data).

    Raises
    ------
    TypeError, ValueError, UnsupportedProblemError, KernelCompileError, KernelLaunchError
        As for `forward`.

    Notes
    -----
    FlashAttention-2 (Dao 2023), Algorithm 2, line 4. `backward` computes it by itself unless given one.
    """
    return _backend("o", o).delta(o, do, layout, out)


def backward(
    q, k, v, o, lse, do, *,
    causal: bool = False,
    softmax_scale: float | None = None,
    delta=None,
    method: str | None = None,
    deterministic: bool = False,
    layout: str = "bshd",
    out: tuple | None = None,
    config: TileConfig | Mapping[str, TileConfig] | None = None,
    family: str | None = None,
):
    """Gradients of `forward` for q, k and v.

    Parameters
    ----------
    q, k, v : ndarray
        As given to `forward`, with the same `causal`, `softmax_scale` and `layout`.
    o, lse : ndarray
        What `forward` returned.
    do : ndarray, shape of q
        Gradient for o.
    causal, softmax_scale, layout
        As for `forward`.
    delta : ndarray, shape (batch, num_heads, seqlen_q), optional
        Result of `delta`, if it is at hand.
    method : {None, "single_pass", "two_pass"}, optional
        ``"single_pass"`` takes every tile once, and adds up one kind of gradient in memory atomically. ``"two_pass"``
        takes every tile twice, for dq and for dk and dv, without atomics or workspace. None takes the faster one.
    deterministic : bool, optional
        Only take a method whose results are equal, bit by bit, from run to run.
    out : tuple of (ndarray or None), optional
        Arrays ``(dq, dk, dv)`` to write the results to. They must not overlap each other or an input.
    config : TileConfig, or dict of TileConfig by operation, optional
        Tile of the kernel ``"backward"`` (single_pass), or of ``"backward_dq"`` and ``"backward_dkdv"`` (two_pass); one
        tile alone is for all of them.
    family : str, optional
        As for `forward`; it must have every kernel of the method.

    Returns
    -------
    dq, dk, dv : ndarray, shapes of q, k, v
        In their dtype. With fewer K/V heads than query heads, dk and dv are summed over the group in float32.

    Raises
    ------
    TypeError, ValueError, UnsupportedProblemError, KernelCompileError, KernelLaunchError
        As for `forward`.

    Notes
    -----
    With P = exp(S - lse), dV = P^T dO, dP = dO V^T, dS = P * (dP - delta), dQ = softmax_scale dS K and
    dK = softmax_scale dS^T Q (FlashAttention-2, Dao 2023, Algorithm 2).

    ``two_pass`` is bit-reproducible, and so is NumPy. ``single_pass`` on the GPU depends on the method's atomics: for
    float16 and bfloat16 dk and dv are bit-reproducible and dq, added up in a float32 workspace of its size, is not; for
    float32 and float64 it is the other way round.
    """
    return _backend("q", q).backward(
        q, k, v, o, lse, do, causal, softmax_scale, delta, method, deterministic, layout, out, config, family
    )


def attention(
    q, k, v, *,
    causal: bool = False,
    softmax_scale: float | None = None,
    layout: str = "bshd",
    method: str | None = None,
    deterministic: bool = False,
    config: Mapping[str, TileConfig] | None = None,
    family: str | None = None,
) -> tuple[object, Callable]:
    """`forward`, and its gradient as a closure: the style of layer libraries.

    Parameters
    ----------
    q, k, v, causal, softmax_scale, layout, family
        As for `forward`.
    method, deterministic
        As for `backward`.
    config : dict of TileConfig by operation, optional
        As for `forward` and `backward`.

    Returns
    -------
    o : ndarray
        As from `forward`.
    backprop : callable
        ``backprop(do)`` gives ``(dq, dk, dv)``. It keeps q, k, v, o and lse alive.

    Raises
    ------
    TypeError, ValueError, UnsupportedProblemError, KernelCompileError, KernelLaunchError
        As for `forward` and `backward`.

    Examples
    --------
    >>> import numpy as np
    >>> q, k, v, do = np.random.default_rng(0).standard_normal((4, 1, 64, 2, 32), dtype=np.float32)
    >>> o, backprop = attention(q, k, v, causal=True)
    >>> dq, dk, dv = backprop(do)
    """
    shared = {"causal": causal, "softmax_scale": softmax_scale, "layout": layout, "config": config, "family": family}
    o, lse = forward(q, k, v, **shared)

    def backprop(do):
        return backward(q, k, v, o, lse, do, method=method, deterministic=deterministic, **shared)

    return o, backprop
