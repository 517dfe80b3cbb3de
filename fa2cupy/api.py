"""The public functions. Each calls the backend of its arrays: NumPy's or CuPy's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .backends import backend_of
from .numerics.arrays import stacked
from .problem.array_types import ArrayT
from .problem.attention import MAX_HEAD_DIM
from .problem.conversions import explains_absence
from .problem.decoding import check_values_in_keys
from .problem.keywords import NoKeywords, check_keywords, options_of, takes
from .problem.names import Layout
from .problem.options import call_options
from .typing import BackwardKeywords, ForwardKeywords

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["backward", "decode", "delta", "forward", "merge"]


@takes(ForwardKeywords)
@explains_absence
def forward(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    out: tuple[ArrayT | None, ...] | None = None,
    **keywords: Unpack[ForwardKeywords],
) -> tuple[ArrayT, ArrayT]:
    """Exact attention without the score matrix: ``softmax(softmax_scale * q k^T) v``.

    Parameters
    ----------
    q : ndarray, shape (batch, seqlen_q, num_heads, head_dim)
        Queries: a NumPy or CuPy array of float16, bfloat16 (``ml_dtypes.bfloat16``), float32 or float64, head_dim up to
        512. The first axes may be omitted: (seqlen_q, num_heads, head_dim) and (seqlen_q, head_dim) give results of the
        same rank. An array (batch * heads, seqlen, head_dim) of other libraries is one of many rows and heads here.
        In place of batch there may be several leading axes, (..., seqlen_q, num_heads, head_dim), the same for all
        arrays and results; lse is then (..., num_heads, seqlen_q). The number of a sequence, for functions, dropout and
        `block_mask`, is its index along all of them, flattened in C order.
    k, v : ndarray, shape (batch, seqlen_k, num_heads_kv, head_dim)
        Keys and values, of q's dtype and device. num_heads must be a multiple of num_heads_kv: query head ``h``
        reads K/V head ``h // (num_heads // num_heads_kv)`` (multi-head, grouped-query and multi-query attention). v
        may have another head_dim than q and k, up to 512, too; o then has that of v. Views such as ``qkv[:, :, 0]`` of
        a packed array are not copied.
    causal : bool, optional
        Key ``j`` is visible to query ``i`` iff ``j <= i + seqlen_k - seqlen_q``: the mask is aligned to the bottom
        right.
    softmax_scale : float, optional
        Factor of the scores, any finite number; ``head_dim ** -0.5`` by default.
    layout : {"bshd", "bhsd"}, optional
        Order of the axes of inputs and results; ``"bhsd"`` is (batch, heads, seqlen, head_dim). Arrays in the other
        order fit, too: heads are then taken for rows.
    out : tuple of (ndarray or None), optional
        Arrays ``(o, lse)`` to write the results to. They must not overlap each other or an input.
    config : TileConfig, or dict of TileConfig by operation, optional
        Tile of the kernel instead of the default; see `legal_configs`. NumPy uses its ``b_r`` and ``b_c``.
    family : str, optional
        Kernel family (``"sm90"``, ``"sm80"``, ``"simt"``) instead of the best one for the device, dtype and strides;
        for tests and sweeps. NumPy refuses one that no GPU has for the call.
    num_splits : int, optional
        Number of blocks that share the work on a tile, 1 to 16, instead of the one that a model finds fastest. Several
        fill the GPU where tiles are few; their partial results are combined in a fixed order. With 1, the bits of a
        sequence's results do not depend on the sequences beside it; the model's number does. For float32 and float64,
        1 is the only number. NumPy checks it, and computes the same with each.
    precision : {None, "ieee", "split"}, optional
        Arithmetic of float32 data on the GPU. None multiplies on tensor cores where these have kernels, are faster and
        are as accurate as float32 arithmetic (see Notes), and elsewhere on CUDA cores. ``"ieee"`` always multiplies on
        CUDA cores; ``"split"`` on tensor cores, also for short sequences and on GPUs where they are slower. NumPy
        checks the value, and computes the same with each.

    Returns
    -------
    o : ndarray, shape of q, with the columns of v
        Output, in q's dtype. A row without a visible key is 0.
    lse : ndarray, shape (batch, num_heads, seqlen_q)
        Natural logarithm of the sum of exponentials of the scaled, masked scores, features included; float32 (float64
        for float64 data). `backward` needs it. A row without a visible key has ``-inf``, or the sink.

    Other Parameters
    ----------------
    window : tuple (left, right) of int or None
        Key ``j`` is visible to query ``i`` iff ``d - left <= j <= d + right`` with ``d = i + seqlen_k - seqlen_q``;
        None is no limit. With `causal`, a key must satisfy both conditions. Time grows with the window, not with
        seqlen_k.
    softcap : float
        Scores become ``softcap * tanh(scores / softcap)``, before biases and masks.
    alibi_slopes : ndarray, broadcastable to (..., num_heads)
        ``-slope * abs(i + seqlen_k - seqlen_q - j)`` is added to the scores, with slopes of either sign in the dtype of
        lse. There is no gradient for them.
    bias : ndarray, broadcastable to (..., num_heads, seqlen_q, seqlen_k)
        Added to the scores, in q's dtype or that of lse. It is broadcast by NumPy's rules, and neither expanded nor
        copied in memory, whatever its strides. ``-inf`` hides a key. The lowest finite number hides it only beside keys
        with a higher one: if all keys of a row have it, o is the mean of their values. Elements for keys that are
        hidden by other means are ignored, even if they are NaN.
    mask : ndarray of bool, broadcastable to (..., num_heads, seqlen_q, seqlen_k)
        True where a key is visible.
    key_padding_mask : ndarray of bool, broadcastable to (..., seqlen_k)
        True where a key is visible, to all queries and heads. Beside q without an axis of sequences, this and other
        arrays that are broadcast may have one of length 1.
    sink : ndarray, shape (num_heads,)
        A logit for each query head that takes part in the softmax but has no value row, in the dtype of lse; ``-inf``
        is no sink.
    dropout_p : float
        Probability, from 0 to below 1, that an element of the softmax is dropped, rounded to a multiple of ``2**-16``;
        the others are multiplied by ``1 / (1 - dropout_p)``, of the rounded number. lse is that without dropout.
    seed : int
        From 0 to below 2**64; dropout needs it. The dropped elements depend only on the seed and on their positions
        (batch, head, i, j), so that they are the same in `backward` and for every tile, method and device (see
        ``fa2cupy/problem/philox.py``).
    cu_seqlens_q, cu_seqlens_k : ndarray of int32, shape (batch + 1,)
        Packed sequences: q, k and v have 3 axes, (total, num_heads, head_dim), and sequence ``b`` has the rows from
        ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``. lse has the shape (num_heads, total). All other definitions apply to
        each sequence alone, with i and j counted from its start. Rows outside all sequences get 0, and ``-inf`` in lse.
        bias and masks have the shapes of a padded batch, with max_seqlen_q and max_seqlen_k.
    max_seqlen_q, max_seqlen_k : int
        Upper bounds of the lengths of sequences. The default is the total, and larger values count as the total. NumPy
        raises ValueError for longer sequences, and for offsets that decrease or leave the arrays. On the GPU, where
        offsets are not read on the host, the rows of a sequence beyond the bound count as rows outside all sequences.
    score_mod : callable
        ``score_mod(score, b, h, q, k, *score_args)`` returns a score in place of ``softmax_scale * q k^T``, ahead of
        all other features. `b` is the number of the sequence, `h` that of the query head, and `q` and `k` are
        positions, counted from the start of the sequence. See Notes; `fa2cupy.mods` has examples.
    score_args : tuple of ndarray
        The arrays of `score_mod`: of bools, of any integer dtype, or of float16, bfloat16, float32 or float64.
        `backward` has gradients for the last.
    mask_mod : callable
        ``mask_mod(b, h, q, k, *mask_args)`` returns a truth value: whether key `k` is visible to query `q`. By default
        it is the function of `block_mask`, if that has one.
    mask_args : tuple of ndarray
        The arrays of `mask_mod`. With a map of a function, they are those that the map was made from, or omitted; the
        call reads the map's copies of them.
    block_mask : BlockMask
        A sparse map of tiles, made by `fa2cupy.block_mask` from the same `mask_mod`, or given directly, of the library
        and on the device of q. Its first axis is 1 or the number of all sequences. Tiles without a visible key are not
        read, and `mask_mod` is not evaluated in those that are visible as a whole.

    Raises
    ------
    TypeError
        An argument is not a NumPy or CuPy array, or both are mixed; dtypes differ or are not supported; an option has
        the wrong type; a keyword is unknown.
    ValueError
        Shapes, devices or values do not fit; `out` is read-only or overlaps; `config` is not legal.
    IndexError
        A function reads outside an array, on NumPy.
    UnsupportedProblemError
        head_dim is above 512, no kernel supports the dtype or a feature on this GPU, or a function is too long for
        kernels.
    KernelCompileError, KernelLaunchError
        NVRTC or the driver refused a kernel; the text says what to do.

    Notes
    -----
    The algorithm is FlashAttention-2 (Dao 2023), Algorithm 1: for each query tile of B_r rows an online softmax runs
    over key tiles of B_c rows, so that memory beyond inputs and results is O(1). Scores, statistics and sums are
    float32 (float64 for float64 data). Where several blocks share a query tile (`num_splits`), there is a workspace
    for their partial results: ``head_dim + 1`` float32 numbers for each share, head and row of q, with the head_dim of
    v rounded up to a multiple of 16, and rows to whole tiles. By default there are at most four shares, or sixteen
    where all of them take less than 64 MiB.

    Where the queries of all heads that share a K/V head are at most 32 (16 beyond head_dim 128, and in float32 and
    float64), calls whose features `decode` has run its kernel, unless `config`, `family`, `num_splits` or `precision`
    choose another one: it reads each key and value once, and needs the workspace of a few rows for each block.

    On tensor cores a float32 matrix is multiplied as the scaled sum of two float16 matrices: by three of the four
    products of these, which are added up in float32 (Ootomo and Yokota 2022, with sums over keys cut into chunks of 64
    that are added up in float32). There are such kernels up to head_dim 128 for compute capability 8.0 or newer; 9.0
    has them for every head_dim, and up to 128 for ``"single_pass"``, too. ``precision=None`` takes them from 128 rows
    of q and of k on, as far as errors were measured, where tensor cores are more than three times as fast as CUDA
    cores: on 9.0, on 8.0, and on cards of 8.6 and 8.9 that add in float32 at full speed (see docs/accuracy.md). The
    largest errors are then at most twice (o) or three times (gradients) those of the formulas in float32, beside 1e-6
    and 2e-6 of the largest result; docs/accuracy.md has measurements. 64 rows share a scale: the last bits of a result
    may depend on rows that are hidden from it. K/V heads whose values two float16 numbers do not represent that well
    run on CUDA cores, at their speed; the GPU finds them without the host. A head is one of these if, among 64 rows of
    q, k, v or do, the largest value of a row or of a column is less than 2**-12 of the largest of all, or the largest
    of all is outside 2**-50 to 2**50, infinite or NaN; or if the largest values of a column of q and of k would make a
    score above 32. The call allocates the float16 matrices: as many bytes as q, k, v and do have, with head_dim rounded
    up to a multiple of 64 and lengths to one of 128.

    `score_mod` and `mask_mod` are called with symbols in place of numbers; the expressions that they return are
    evaluated for whole tiles, hidden keys included. Numbers that they read elsewhere, from their closure, their module
    or an object, are those of the time of the call of `forward` or `backward`; `attention` computes its gradient with
    those of its forward. Keep one plain function for all calls: it is called again only when a number that it reads
    has changed, as far as its closure, its defaults and its global names hold numbers, strings, tuples, lists and dicts
    of them, or other such functions. A bound method, a callable object, a ``functools.partial``, or a function that
    reads attributes of objects or of modules other than NumPy and math is called by every call, which takes up to a
    millisecond of host time. With another number a function is compiled into another kernel: pass a number that changes
    from step to step as an array. Functions can use Python's operators
    (``//`` and ``%`` of ints, with the rounding of Python), comparisons, ``& | ~``, elements such as ``table[h, k]`` of
    their arrays, ``x.astype(int)``, and NumPy's where, minimum, maximum, clip, abs, exp, exp2, log, log1p, tanh, sqrt,
    sin, cos, floor, power and logical functions. An array that is indexed for all its axes but the last one, such as
    ``x[b, q]``, is a vector of at most 256 elements, for ``.sum()`` and ``np.dot``. An index outside an array raises
    IndexError: np.clip keeps it inside. Derivatives are found from the expressions; comparisons, floor and ints have
    none. At a corner or a tie the derivative is one of those of the two sides; where a factor of the chain rule is 0
    and another one infinite, it is 0, as for ``np.sqrt(np.where(x > 0, x, 0))`` or the exponent of ``0 ** p``.

    Ints of functions have 32 bits and wrap around; there may be up to 2**30 positions. ``x.astype(int)`` cuts off
    towards 0, gives the nearest of these ints for a number out of range, and 0 for NaN. Floats have the dtype of lse:
    ``q / 49`` is a float32 number for float32 and 16-bit data, while NumPy makes a float64 number of an array of ints.
    Where a comparison, np.floor or an int follows, kernels round sums, products, quotients and square roots one by one
    and to the same bits as NumPy in that dtype, so that ``np.floor(q / 49)`` is exact at multiples. The other functions
    of NumPy, and powers of floats but 2, 1, 0.5, 0 and -1, have errors of a few last bits. Where no such operation
    follows, kernels may add a product without rounding it, and multiply by the reciprocal of a constant divisor.

    On the GPU a function is compiled into the kernels; functions with the same expression share them. An index outside
    an array is clamped, and the values of ints are not checked. A function whose kernels would take minutes to compile
    is refused. One whose kernels take long, or spill many registers, causes a warning, and ``FA2CUPY_LOG=info`` logs
    what each kernel costs.

    Kernels have tiles of their own. By default they divide the map's tiles, if a default tile does. Where a kernel's
    tile overlaps several of the map's, the function decides which keys are visible. The tiles of a map without a
    function must consist of whole tiles of the kernels; the error names those that do. The first call of a kind with a
    map writes lists of the tiles that it visits, which also follow from causal and window, and the map keeps them on
    the GPU: 4 bytes for each pair of tiles, once for all heads or sequences that share a map, and in `backward` once
    for each query head of a group. Kernels take the tiles with the longest lists first. Lists of packed sequences
    follow from their ends, too, so that each call writes them, and so does a captured call that is the first one.
    float32 data are then multiplied on CUDA cores.

    Hidden keys have the weight 0, and 0 times NaN is NaN: NaN or infinities in k and v of hidden keys reach o, dq and
    dk of the rows that share a tile with them. Clear such rows, as of padding. Rows outside packed sequences, and rows
    of a cache behind its lengths, are not read.

    All features can be combined. Sources: windows, Beltagy et al. 2020 (Longformer); soft caps, Gemma Team 2024 (Gemma
    2); ALiBi, Press et al. 2022; sinks, Xiao et al. 2024 and OpenAI 2025 (gpt-oss); dropout, Srivastava et al. 2014,
    with the Philox generator of Salmon et al. 2011.

    On the GPU, arrays are used in place if the last axis is contiguous and, for 16-bit data, rows are aligned to 16
    bytes. Other arrays are copied first, and so are 16-bit data whose head_dim is not a multiple of 8, and tensors with
    several leading axes that have no stride in common, such as ``q.swapaxes(0, 1)``. Biases and masks are never copied.
    Kernels take a v with another head_dim than q as it is. The work is queued on CuPy's current stream of the arrays'
    device, without a synchronisation; the first call of a kind compiles its kernel. Offsets are clamped to the arrays
    on the GPU; decreasing offsets raise no error there and give undefined results.

    Calls can be captured into a CUDA graph after a call of the same kind has loaded its kernels. Copies and workspaces
    are then memory of the graph: nodes of the graph allocate and free it, and CUDA's memory pool for graphs holds it
    between launches, up to the largest amount that one call of the graph needs. Results are allocated as in other
    calls: keep them, like the inputs, as long as the graph is launched, or pass `out`.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 128, 4, 64), dtype=np.float32)
    >>> o, lse = forward(q, k, v, causal=True)
    >>> o.shape, lse.shape
    ((2, 128, 4, 64), (2, 4, 128))
    """
    options = options_of("fa2cupy.forward", keywords)
    return backend_of("q", q).forward(q, k, v, out, options, keywords)


@explains_absence
def delta(o: ArrayT, do: ArrayT, *, layout: Layout = "bshd", out: ArrayT | None = None) -> ArrayT:
    """Row sums of ``do * o``, which the gradient of the softmax subtracts from ``do v^T``.

    Parameters
    ----------
    o, do : ndarray, shape (batch, seqlen_q, num_heads, head_dim)
        Output of `forward`, packed or not, and its gradient. Their head_dim is that of v.
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
    It is line 4 of Algorithm 2 of FlashAttention-2 (Dao 2023). `backward` computes it unless it is passed. Errors are
    those of `forward`.
    """
    return backend_of("o", o).delta(o, do, out, call_options(layout=layout))


@takes(BackwardKeywords)
@explains_absence
def backward(
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    o: ArrayT,
    lse: ArrayT,
    do: ArrayT,
    *,
    delta: ArrayT | None = None,
    dlse: ArrayT | None = None,
    out: tuple[ArrayT | None, ...] | None = None,
    **keywords: Unpack[BackwardKeywords],
) -> tuple[ArrayT, ...]:
    """Gradients of `forward` for q, k and v.

    Parameters
    ----------
    q, k, v : ndarray
        The arguments of `forward`. `causal`, `softmax_scale`, `layout` and features must be the same, too: gradients
        are wrong where they differ, or where an array has changed since.
    o, lse : ndarray
        The results of that call. Those of another one fit, and give wrong gradients.
    do : ndarray, shape of o
        Gradient for o.
    causal, softmax_scale, layout, **keywords
        As for `forward`.
    delta : ndarray, shape (batch, num_heads, seqlen_q), optional
        Result of `delta`, if the caller has it.
    dlse : ndarray, shape and dtype of lse, optional
        Gradient for lse, for example that of a z-loss or of merged partial results.
    return_dbias, return_dsink : bool, optional
        Also returns the gradient of `bias`, and of `sink`.
    return_dscore_args : bool, optional
        Also returns the gradients of the floating-point arrays in `score_args`, in their order.
    method : {None, "single_pass", "two_pass", "one_tile"}, optional
        ``"single_pass"`` computes every tile of scores once, and adds up dq, or dk and dv, in memory with atomics.
        ``"two_pass"`` computes every tile twice, for dq and for dk and dv, without atomics or a workspace.
        ``"one_tile"`` computes every tile once and adds nothing up in memory: a block has all keys of a sequence. It is
        for 16-bit data with up to 128 keys, 64 beyond head_dim 128, without packed lengths or a `block_mask`. None is
        the fastest one.
    deterministic : bool, optional
        Allows only methods whose results have the same bits from run to run. NumPy refuses the others, too, although
        its own always have. With ``num_splits=1`` the bits of a sequence's results do not depend on the sequences
        beside it, either.
    out : tuple of (ndarray or None), optional
        Arrays ``(dq, dk, dv)``, and dbias, dsink and dscore_args if requested, to write the results to. They must not
        overlap each other or an input; views such as ``dqkv[:, :, 0]`` and ``dqkv[:, :, 1]`` of a packed array do not
        overlap.
    config : TileConfig, or dict of TileConfig by operation, optional
        Tile of the kernel ``"backward"`` (single_pass), or tiles of ``"backward_dq"`` and ``"backward_dkdv"``
        (two_pass), or of ``"backward_one_tile"`` (one_tile); a single TileConfig applies to all of them. Without
        `method`, calls with tiles but none for ``"backward_one_tile"`` take one of the others. A tile for it is that of
        a kernel that does not sum the gradient of a broadcast bias: another one does.
    family : str, optional
        As for `forward`; the family must have every kernel of the method.
    num_splits : int, optional
        Number of blocks that share the work on a tile of keys, 1 to 16: the query heads of its group, and ranges of
        queries. None is the one that a model finds fastest. Their dk and dv are summed in float32, in ``two_pass`` in a
        fixed order, in ``single_pass`` by atomic additions. For float32 and float64, 1 is the only number. NumPy
        checks it, and computes the same with each.
    precision : {None, "ieee", "split"}, optional
        As for `forward`, and the same as there: weights of one arithmetic do not sum to 1 with the lse of another.

    Returns
    -------
    dq, dk, dv : ndarray, shapes of q, k, v
        Gradients in q's dtype. With fewer K/V heads than query heads, dk and dv are summed over the group in float32
        (float64 for float64 data).
    dbias, dsink : ndarray, shapes and dtypes of bias, sink
        The requested ones. dbias is summed over broadcast axes in lse's dtype: on the GPU with atomics, which imply
        ``"two_pass"`` in all families but ``"simt"``, or by a further kernel, which computes the scores once more and
        sums in a fixed order. `deterministic` takes that one, and so do calls with 16-bit data on Hopper for which it
        is estimated to be faster. ``"one_tile"`` has the sums in its own kernel, in a fixed order, if all sequences of
        up to 64 rows have as many K/V heads as query heads, and no softcap or function changes scores. Without
        broadcast axes dbias has the same bits from run to run in any case, and implies ``"two_pass"`` likewise.
    *dscore_args : ndarray, shapes and dtypes of the floating-point arrays in score_args
        If requested, one result for each of them, summed in lse's dtype (on NumPy in float64). On the GPU they are
        summed with atomics, which `deterministic` refuses, and imply ``"two_pass"`` in all families but ``"simt"``.

    Notes
    -----
    With P = exp(S - lse), dV = P^T dO, dP = dO V^T, dS = P * (dP - delta), dQ = softmax_scale dS K and
    dK = softmax_scale dS^T Q (FlashAttention-2, Dao 2023, Algorithm 2). dlse is subtracted from delta. The docstring of
    ``fa2cupy/problem/features.py`` has the terms that features add. Errors are those of `forward`.

    A row that sees no key, whose lse is -inf, contributes nothing to any gradient, even if q, do, dlse or delta are NaN
    there. Hide keys by a mask or a bias of -inf rather than by large numbers: the rounding of lse gives P a relative
    error of about ``abs(lse) * 2**-24`` (``2**-53`` for float64). An lse beyond about ``2**26`` (``2**55``), such as
    that of a row with a bias of -1e9 for all keys, has lost the logarithm of their number: P is at most 1, but the
    row's contributions may be too large by a factor of up to the number of its keys. For 16-bit data on the GPU they
    are 0 where lse is below -2.3e38, such as for the lowest float32.

    On the GPU a call allocates, in addition to results: delta, unless it is passed or ``one_tile`` needs no array of it
    (4 bytes for each row of a head, 8 for float64); in ``single_pass`` of 16-bit data, and of float32 data on tensor
    cores, a float32 dq, with rows rounded up to whole tiles of up to 128 and head_dim to a multiple of 16; where blocks
    share tiles of 16-bit data, float32 copies of dk and dv, rounded up alike: one in ``single_pass``, and `num_splits`
    in ``two_pass``, by default at most four, or sixteen where all of them take less than 64 MiB; for `return_dbias` of
    a broadcast bias the sum of dbias in lse's dtype, or from the further kernel as many copies as blocks share a tile
    of the bias, which they do where tiles are too few to fill the GPU; and the copies that `forward` makes. A captured
    call allocates the same as memory of its graph.

    Where CUDA cores compute gradients of float32 data that `forward` multiplies on tensor cores, they first compute lse
    again, into a workspace: with ``method="single_pass"`` where only ``"two_pass"`` has kernels for tensor cores; for
    dbias of a broadcast bias with `deterministic`; and for K/V heads that run on CUDA cores in the forward, or only in
    the backward because of the values of do. An lse of more keys than k has, such as that of `merge`, is taken as it
    is.

    ``two_pass`` and ``one_tile`` have the same bits from run to run, and so has NumPy. ``single_pass`` on the GPU has
    not, because the order of its atomic additions varies: on tensor cores, in dq, which is added up in a workspace of
    its size, and in dk and dv where blocks share tiles, which ``num_splits=1`` excludes; on CUDA cores in dk and dv.
    Its other results have the same bits. docs/accuracy.md has a table of that, also for a sequence alone and beside
    others.

    The default method and number of splits are those with the shortest time that a model estimates from the shapes. Its
    constants are fitted to times on an H100 (``fa2cupy/families/estimate.py``), those of float64 computed from its
    rates. For float32 on tensor cores it is ``single_pass``.
    """
    options = options_of("fa2cupy.backward", keywords)
    return backend_of("q", q).backward(q, k, v, o, lse, do, delta, dlse, out, options, keywords)


@explains_absence
def merge(
    o_parts: ArrayT | Sequence[ArrayT],
    lse_parts: ArrayT | Sequence[ArrayT],
    *,
    layout: Layout = "bshd",
    out: tuple[ArrayT | None, ...] | None = None,
) -> tuple[ArrayT, ArrayT]:
    """Combines results for the same queries over different keys into those over all of these keys.

    Parameters
    ----------
    o_parts : ndarray, shape (num_parts, batch, seqlen_q, num_heads, head_dim), or sequence of ndarray
        Results ``o`` of `forward` or `decode`, each over keys of its own: one array with an axis of parts in front, or
        a list or tuple of arrays, which are copied into one. As for `forward`, the axes of batch and heads may be
        omitted: that of sequences in a single result, ``merge(*forward(q, k, v))``, is taken for one of parts.
    lse_parts : ndarray, shape (num_parts, batch, num_heads, seqlen_q), or sequence of ndarray
        Their ``lse``. Where it is ``-inf``, the part has no key of the row, and its o is ignored, NaN included.
    layout : {"bshd", "bhsd"}, optional
        As for `forward`.
    out : tuple of (ndarray or None), optional
        Arrays ``(o, lse)`` to write the results to. They must not overlap each other or an input.

    Returns
    -------
    o : ndarray, shape (batch, seqlen_q, num_heads, head_dim)
        In the dtype of the parts. A row that no part has a key of is 0.
    lse : ndarray, shape (batch, num_heads, seqlen_q)
        float32 (float64 for float64 data); ``-inf`` for a row that no part has a key of.

    Raises
    ------
    TypeError, ValueError, UnsupportedProblemError
        As for `forward`.

    Notes
    -----
    With weights exp(lse_s - lse), lse = log(sum_s exp(lse_s)) and o = sum_s exp(lse_s - lse) o_s: the second half of
    attention with split keys (Dao et al. 2023, Flash-Decoding), of cascades over shared prefixes, and of keys that are
    spread over several GPUs. Sums are in lse's dtype and in the order of the parts, so that the bits of a
    row's results depend on its parts alone. A sink must be in one part only: passed in each, it would count several
    times.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 128, 4, 64), dtype=np.float32)
    >>> parts = [forward(q, k[:, keys], v[:, keys]) for keys in (slice(0, 50), slice(50, 128))]
    >>> o, lse = merge(*zip(*parts))
    >>> np.allclose(o, forward(q, k, v)[0], atol=1e-6)
    True
    """
    o_stack, lse_stack = stacked("o_parts", o_parts), stacked("lse_parts", lse_parts)
    return backend_of("o_parts", o_stack).merge(o_stack, lse_stack, out, call_options(layout=layout))


@takes(NoKeywords)
@explains_absence
def decode(
    q: ArrayT,
    k_cache: ArrayT,
    v_cache: ArrayT,
    cache_seqlens: ArrayT,
    *,
    k: ArrayT | None = None,
    v: ArrayT | None = None,
    block_table: ArrayT | None = None,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: ArrayT | None = None,
    sink: ArrayT | None = None,
    softmax_scale: float | None = None,
    layout: Layout = "bshd",
    out: tuple[ArrayT | None, ...] | None = None,
    num_splits: int | None = None,
    **unknown: Unpack[NoKeywords],
) -> tuple[ArrayT, ArrayT]:
    """Attention of a few new queries to a cache of keys and values, as in generation.

    Parameters
    ----------
    q : ndarray, shape (batch, seqlen_q, num_heads, head_dim)
        Queries, the last ``seqlen_q`` positions of each sequence: a NumPy or CuPy array of a dtype that `forward`
        takes.
    k_cache, v_cache : ndarray, shape (batch, rows, num_heads_kv, head_dim)
        Keys and values, of q's dtype and device; with `block_table`, pages of the shape (pages, page_size,
        num_heads_kv, head_dim), where page_size is a multiple of 16. num_heads must be a multiple of num_heads_kv, as
        for `forward`. v_cache, and `v` with it, may have another head_dim than q; o then has that of v_cache. head_dim
        may be up to 576, as in latent attention, if v_cache is ``k_cache[..., :n]`` with n up to 512, and `v` is
        ``k[..., :n]``: kernels of 16 bits then read each row once. Up to 512 such a view is read like any other array.
    cache_seqlens : ndarray of int32, shape (batch,)
        Number of rows of each sequence in the cache, those of `k` and `v` not included. Rows of the cache behind them
        are not read.
    k, v : ndarray, shape (batch, new rows, num_heads_kv, head_dim), optional
        Keys and values to append: they are written to the cache behind the rows of each sequence, and count as keys of
        this call. The caller adds their number to `cache_seqlens` before the next one. The caches are then outputs:
        they must be writable, each row needs memory of its own, and they must not overlap each other or another
        argument. Caches that are only read may do all of that, such as a prefix that is broadcast to all sequences.
        Pages that are written must belong to one sequence only: NumPy checks it; on the GPU, where `block_table` is not
        read on the host, rows of two sequences at one place overwrite each other in any order.
    block_table : ndarray of int32, shape (batch, pages of a sequence), optional
        The numbers of the pages that hold rows 0 to page_size - 1 of a sequence, the rows after these, and so on.
        Entries behind the last row of a sequence are not used.
    causal : bool, optional
        Key ``j`` is visible to query ``i`` iff ``j <= i + length - seqlen_q``, with the length of the sequence after
        new rows are appended.
    window, softcap, alibi_slopes, sink
        As for `forward`, with that length as seqlen_k.
    softmax_scale : float, optional
        Factor of the scores, any finite number; ``head_dim ** -0.5`` by default.
    layout : {"bshd", "bhsd"}, optional
        Order of the axes of all arrays; ``"bhsd"`` is (batch, heads, rows, head_dim), and (pages, num_heads_kv,
        page_size, head_dim) for the cache.
    out : tuple of (ndarray or None), optional
        Arrays ``(o, lse)`` to write the results to. They must not overlap each other or an input.
    num_splits : {None, 1}, optional
        With 1, one block has all keys of a sequence and K/V head, so that the bits of a sequence's results do not
        depend on other sequences. It is slower where sequences times K/V heads are fewer than the GPU's
        multiprocessors, or lengths are ragged. NumPy checks it; its results never depend on other sequences.

    Returns
    -------
    o : ndarray, shape of q
        Output, in q's dtype. A row without a visible key is 0.
    lse : ndarray, shape (batch, num_heads, seqlen_q)
        As from `forward`. `merge` combines it with results over other keys, such as those of a shared prefix.

    Raises
    ------
    TypeError, ValueError, UnsupportedProblemError, KernelCompileError, KernelLaunchError
        As for `forward`. On NumPy also ValueError for lengths that are negative or larger than the cache, and for
        entries of `block_table` that rows of a sequence need and that are not pages of `k_cache`, or that two sequences
        have where rows are written. On GPUs also
        UnsupportedProblemError where two tiles of keys and values do not fit in shared memory: in float64 beyond
        head_dim 256 on compute capability 8.0, 384 on 9.0 and 10.x, else 160 (96 on Turing, 64 on Pascal), in float32
        beyond 320 except on these three (192 on Turing, 160 on Pascal), and in 16 bits beyond 512 except there.

    Notes
    -----
    There is no gradient: `backward` differentiates `forward`, whose keys and values are arrays of one call.

    On the GPU the query heads that share a K/V head are rows of one tile, so that keys and values are read once for
    all of them, and the keys of all sequences are divided evenly among the blocks of one launch, which merge their
    results in a fixed order: results have the same bits from run to run, but the cuts depend on the lengths of all
    sequences, and bits with them. Lengths and pages are read on the device, and no call waits
    for the host. They may change between launches of a CUDA graph that has captured the call. There they cannot raise
    an error: lengths are clamped to the cache and pages to those that exist. Workspaces and streams are as for
    `forward`. Rows of the cache must be contiguous and, for 16-bit data, start on 16 bytes: a cache is never copied.

    Sources: split keys, Dao et al. 2023 (Flash-Decoding); pages, Kwon et al. 2023 (PagedAttention).

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> k_cache, v_cache = rng.standard_normal((2, 2, 256, 4, 64), dtype=np.float32)
    >>> q, k, v = rng.standard_normal((3, 2, 1, 4, 64), dtype=np.float32)
    >>> lengths = np.array([100, 17], "int32")
    >>> o, lse = decode(q, k_cache, v_cache, lengths, k=k, v=v)
    >>> lengths += 1
    >>> np.array_equal(k_cache[1, 17], k[1, 0])
    True
    """
    if unknown:
        check_keywords("fa2cupy.decode", unknown)
    given: dict[str, Any] = {}
    if not (window is None and softcap is None and alibi_slopes is None and sink is None):
        keywords = {"window": window, "softcap": softcap, "alibi_slopes": alibi_slopes, "sink": sink}
        given = {name: value for name, value in keywords.items() if value is not None}
    options = call_options(causal=causal, softmax_scale=softmax_scale, layout=layout, num_splits=num_splits)
    backend = backend_of("q", q)
    if q.ndim and q.shape[-1] > MAX_HEAD_DIM:
        check_values_in_keys({"k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v})
    return backend.decode(q, k_cache, v_cache, cache_seqlens, k, v, block_table, out, options, given)
