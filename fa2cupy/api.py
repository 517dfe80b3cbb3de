"""The public functions. Each checks which kind of arrays came and hands over to that backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .backends import backend_of
from .families.tile import TileConfig
from .problem.keywords import check_keywords, takes_features
from .problem.options import CallOptions

if TYPE_CHECKING:
    from typing import Unpack

    from .problem.features import FeatureKeywords

__all__ = ["backward", "delta", "forward"]


@takes_features
def forward(
    q,
    k,
    v,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    layout: str = "bshd",
    out: tuple | None = None,
    config: TileConfig | Mapping[str, TileConfig] | None = None,
    family: str | None = None,
    **keywords: Unpack[FeatureKeywords],
):
    """Exact attention without the score matrix: ``softmax(softmax_scale * q k^T) v``.

    Parameters
    ----------
    q : ndarray, shape (batch, seqlen_q, num_heads, head_dim)
        Queries: a NumPy or CuPy array of float16, bfloat16 (``ml_dtypes.bfloat16``), float32 or float64, head_dim up to
        256. Axes may be left out from the front: (seqlen_q, num_heads, head_dim) and (seqlen_q, head_dim) give results
        of the same rank.
    k, v : ndarray, shape (batch, seqlen_k, num_heads_kv, head_dim)
        Keys and values, of q's dtype and device. num_heads must be a multiple of num_heads_kv: query head ``h``
        reads K/V head ``h // (num_heads // num_heads_kv)`` (multi-head, grouped-query and multi-query attention). v
        may have a head_dim of its own, which then is o's. Views such as ``qkv[:, :, 0]`` of a packed array are
        taken as they are.
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
    o : ndarray, shape of q, with the columns of v
        Output, in q's dtype. A row without a visible key is 0.
    lse : ndarray, shape (batch, num_heads, seqlen_q)
        Natural logarithm of the sum of exponentials of the scaled, masked scores, features included, which
        `backward` needs; float32 (float64 for float64 data). A row without a visible key has ``-inf``, or the sink.

    Other Parameters
    ----------------
    window : tuple (left, right) of int or None
        Key ``j`` is visible to query ``i`` iff ``d - left <= j <= d + right`` with ``d = i + seqlen_k - seqlen_q``; None
        is no limit. With `causal`, both hold. Time grows with the window, not with seqlen_k.
    softcap : float
        Scores become ``softcap * tanh(scores / softcap)``, before biases and masks.
    alibi_slopes : ndarray, shape (num_heads,) or (batch, num_heads)
        ``-slope * abs(i + seqlen_k - seqlen_q - j)`` is added to the scores; slopes have either sign. dtype of lse; no
        gradient.
    bias : ndarray, broadcastable to (batch, num_heads, seqlen_q, seqlen_k)
        Added to the scores, in q's dtype or that of lse, and never expanded. ``-inf`` hides a key. Elements for keys
        that are hidden otherwise are ignored, NaN included.
    mask : ndarray of bool, broadcastable to (batch, num_heads, seqlen_q, seqlen_k)
        True where a key is visible.
    key_padding_mask : ndarray of bool, shape (batch, seqlen_k), or (seqlen_k,) where q has no batch axis
        True where a key is visible, to all queries and heads.
    sink : ndarray, shape (num_heads,)
        A logit for each query head that joins the softmax without a value, in the dtype of lse; ``-inf`` is none.
    dropout_p : float
        Probability, from 0 to below 1, that an element of the softmax is dropped; the others grow by ``1 / (1 - p)``.
        lse is that without dropout.
    seed : int
        Below 2**64; dropout needs it. What is dropped depends on it and on the element's place (batch, head, i, j)
        only: the same in `backward`, for any tile, method and device, bit for bit (see ``fa2cupy/philox.py``).
    cu_seqlens_q, cu_seqlens_k : ndarray of int32, shape (batch + 1,)
        Packed sequences: q, k and v have 3 axes, (total, num_heads, head_dim), and sequence ``b`` has the rows from
        ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``. lse has the shape (num_heads, total). All else holds for each
        sequence alone, with i and j counted from its start; rows of no sequence get 0, and ``-inf`` in lse. bias
        and masks have the shapes of a padded batch, with max_seqlen_q and max_seqlen_k.
    max_seqlen_q, max_seqlen_k : int
        No sequence is longer; by default the total, and no more than that if larger. NumPy raises ValueError for a
        sequence that is longer, and for offsets that do not grow or leave the arrays. On the GPU, which does not read
        offsets on the host, the rows of a sequence beyond the longest length are rows of no sequence.

    Raises
    ------
    TypeError
        Not NumPy or CuPy arrays, different or unknown dtypes, an option of the wrong type, an unknown keyword.
    ValueError
        Shapes, devices or values that do not fit; `out` is read-only or overlaps; `config` is not legal.
    UnsupportedProblemError
        head_dim above 256, or no kernel for the dtype or a feature on this GPU.
    KernelCompileError, KernelLaunchError
        NVRTC or the driver refused a kernel; the text says what to do.

    Notes
    -----
    FlashAttention-2 (Dao 2023), Algorithm 1: query tiles of B_r rows meet key tiles of B_c rows with an online softmax,
    so that memory beyond inputs and results is O(1). Scores, statistics and sums are float32 (float64 for float64).

    All features combine. Sources: windows, Beltagy et al. 2020 (Longformer); soft caps, Gemma Team 2024 (Gemma 2);
    ALiBi, Press et al. 2022; sinks, Xiao et al. 2024 and OpenAI 2025 (gpt-oss); dropout, Srivastava et al. 2014, with
    the Philox generator of Salmon et al. 2011.

    Strides are taken as they are while the last axis is contiguous and, for 16-bit data, rows start on 16 bytes;
    anything else is copied first, and so is 16-bit data whose head_dim is not a multiple of 8, and data whose v has a
    head_dim of its own. The work is queued on CuPy's current stream of the arrays' device, without a synchronisation;
    the first call of a kind compiles its kernel. On the GPU offsets are clamped to the arrays; decreasing offsets raise
    no error and give undefined results.

    Calls can be captured into a CUDA graph once a call of the same kind has loaded its kernels. Copies, and workspaces of
    `backward`, then are memory of the graph: it is allocated and freed by nodes of the graph, and held between launches by
    CUDA's memory pool for graphs, up to the largest amount that one call of the graph needs. Results are allocated as
    ever: keep them, like the inputs, for as long as the graph is launched, or pass `out`.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 128, 4, 64), dtype=np.float32)
    >>> o, lse = forward(q, k, v, causal=True)
    >>> o.shape, lse.shape
    ((2, 128, 4, 64), (2, 4, 128))
    """
    check_keywords(forward, keywords)
    options = CallOptions(causal, softmax_scale, layout, config, family)
    return backend_of("q", q).forward(q, k, v, out, options, keywords)


def delta(o, do, *, layout: str = "bshd", out=None):
    """Row sums of ``do * o``, which the softmax gradient subtracts from ``do v^T``.

    Parameters
    ----------
    o, do : ndarray, shape (batch, seqlen_q, num_heads, head_dim)
        Output of `forward`, packed or not, and the gradient that arrives for it.
    layout : {"bshd", "bhsd"}, optional
        As for `forward`.
    out : ndarray, optional
        Array to write the result to.

    Returns
    -------
    delta : ndarray, shape (batch, num_heads, seqlen_q)
        float32 (float64 for float64 data).

    Notes
    -----
    FlashAttention-2 (Dao 2023), Algorithm 2, line 4. `backward` computes it by itself unless given one. Errors are those
    of `forward`.
    """
    return backend_of("o", o).delta(o, do, out, CallOptions(layout=layout))


@takes_features
def backward(
    q,
    k,
    v,
    o,
    lse,
    do,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    delta=None,
    dlse=None,
    return_dbias: bool = False,
    return_dsink: bool = False,
    method: str | None = None,
    deterministic: bool = False,
    layout: str = "bshd",
    out: tuple | None = None,
    config: TileConfig | Mapping[str, TileConfig] | None = None,
    family: str | None = None,
    **keywords: Unpack[FeatureKeywords],
):
    """Gradients of `forward` for q, k and v.

    Parameters
    ----------
    q, k, v : ndarray
        As given to `forward`, with the same `causal`, `softmax_scale`, `layout` and features.
    o, lse : ndarray
        What `forward` returned.
    do : ndarray, shape of o
        Gradient for o.
    causal, softmax_scale, layout, **keywords
        As for `forward`.
    delta : ndarray, shape (batch, num_heads, seqlen_q), optional
        Result of `delta`, if it is at hand.
    dlse : ndarray, shape and dtype of lse, optional
        Gradient for lse, as of a z-loss or of merging partial results.
    return_dbias, return_dsink : bool, optional
        Also give the gradient of `bias`, of `sink`.
    method : {None, "single_pass", "two_pass"}, optional
        ``"single_pass"`` takes every tile once, and adds up one kind of gradient in memory atomically. ``"two_pass"``
        takes every tile twice, for dq and for dk and dv, without atomics or workspace. None takes the faster one.
    deterministic : bool, optional
        Only take a method whose results are equal, bit by bit, from run to run.
    out : tuple of (ndarray or None), optional
        Arrays ``(dq, dk, dv)``, and dbias and dsink if asked for, to write the results to. They must not overlap each
        other or an input; views such as ``dqkv[:, :, 0]`` of a packed array do not.
    config : TileConfig, or dict of TileConfig by operation, optional
        Tile of the kernel ``"backward"`` (single_pass), or of ``"backward_dq"`` and ``"backward_dkdv"`` (two_pass); one
        tile alone is for all of them.
    family : str, optional
        As for `forward`; it must have every kernel of the method.

    Returns
    -------
    dq, dk, dv : ndarray, shapes of q, k, v
        In their dtype. With fewer K/V heads than query heads, dk and dv are summed over the group in float32.
    dbias, dsink : ndarray, shapes and dtypes of bias, sink
        Those that were asked for. dbias is summed over repeated axes in lse's dtype, on the GPU atomically, and takes
        ``"two_pass"`` of 16-bit data there.

    Notes
    -----
    With P = exp(S - lse), dV = P^T dO, dP = dO V^T, dS = P * (dP - delta), dQ = softmax_scale dS K and
    dK = softmax_scale dS^T Q (FlashAttention-2, Dao 2023, Algorithm 2). dlse is subtracted from delta. What features
    add is at the top of ``fa2cupy/features.py``. Errors are those of `forward`.

    On the GPU a call holds, besides inputs and results, delta (4 bytes a row of a head, 8 for float64) unless it is given;
    in ``single_pass`` of 16-bit data a dq in float32, rows rounded up to whole tiles of up to 128 and head_dim to a multiple
    of 16; for `return_dbias` the sum of dbias in lse's dtype; and the copies that `forward` makes. A captured call holds
    the same in memory of its graph.

    ``two_pass`` is bit-reproducible, and so is NumPy. ``single_pass`` on the GPU depends on the method's atomics: for
    float16 and bfloat16 dk and dv are bit-reproducible and dq, added up in a float32 workspace of its size, is not; for
    float32 and float64 it is the other way round.
    """
    check_keywords(backward, keywords)
    options = CallOptions(
        causal, softmax_scale, layout, config, family, method, deterministic, return_dbias, return_dsink
    )
    return backend_of("q", q).backward(q, k, v, o, lse, do, delta, dlse, out, options, keywords)
