"""The calls of `fa2cupy.distributed`: those of the package with a communicator in front, on a rank's rows."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, overload

from ..backends import backend_of
from ..closure import Functions, with_backprop
from ..numerics.arrays import array_module
from ..problem.arguments import unpack_out
from ..problem.array_types import Array, ArrayT
from ..problem.conversions import explains_absence
from ..problem.feature_checks import is_seed
from ..problem.keywords import check_keywords, options_of, takes
from ..second_order import out_of_tangents
from ..typing import (
    Backprop,
    RankBackwardKeywords,
    RankForwardKeywords,
    RankKeywords,
    RankScoreKeywords,
    RankSecondOrderKeywords,
)
from .call.agreement import collective
from .call.choice import check_capture
from .call.groups import takes_copies
from .call.operands import Operands, result_views
from .call.requests import CallArguments, Request, checked
from .call.run import Run
from .call.second_order import CALLS, call_backend
from .communicator import Communicator, Stage
from .local.lanes import device_streams, is_captured
from .local.prepared import PreparedCall
from .schemes import gather, heads, hybrid

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attention", "backward", "backward_jvp", "double_backward", "forward", "jvp"]

_SCHEMES: dict[str, ModuleType] = {"heads": heads, "gather": gather, "hybrid": hybrid}


@takes(RankForwardKeywords)
@collective
@explains_absence
def forward(
    comm: Communicator,
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    out: tuple[ArrayT | None, ...] | None = None,
    **keywords: Unpack[RankForwardKeywords],
) -> tuple[ArrayT, ArrayT]:
    """`fa2cupy.forward` of a sequence whose rows are spread over several ranks.

    Parameters
    ----------
    comm : Communicator
        All ranks call this together, with the same shapes, dtypes and options.
    q, k, v : ndarray
        This rank's rows, as `shard` takes them from the whole arrays; otherwise as for `fa2cupy.forward`. q may have
        another number of rows than k and v.
    causal, softmax_scale, layout, config, family, num_splits, precision
        As for `fa2cupy.forward` on the whole sequence.
    out : tuple of (ndarray or None), optional
        Arrays ``(o, lse)`` to write this rank's results to.
    scheme : {None, "heads", "gather", "hybrid"}, optional
        ``"heads"``: each rank gets all rows of its share of the heads (all-to-all); the number of K/V heads must be a
        multiple of the number of ranks. ``"gather"``: each rank gets the keys that its queries see (all-gather).
        ``"hybrid"``: ``"heads"`` among the ranks of a host, and ``"gather"`` among those of all hosts that have the
        same heads; the number of K/V heads must be a multiple of ``comm.ranks_per_host``. None is ``"hybrid"`` with
        several hosts of several ranks, where it is possible, else ``"heads"`` where that is, and else ``"gather"``.
    order : {"zigzag", "contiguous"}, optional
        Which rows a rank has. ``"zigzag"``: the sequence has two equal chunks for each rank, and rank r has chunk r
        from the start and chunk r from the end, so that causal work is the same on all ranks. ``"contiguous"``: the
        sequence has one chunk for each rank.
    head_groups : int, optional
        Into how many groups a rank's K/V heads are divided: a divisor of their number. Groups are computed one after
        the other, while the messages of the next one travel.

    Returns
    -------
    o : ndarray, shape of q, with the columns of v
    lse : ndarray, shape (batch, num_heads, rows of this rank)
        As from `fa2cupy.forward`, for this rank's rows.

    Other Parameters
    ----------------
    bias, mask : ndarray
        With this rank's queries (``shard(comm, bias, axis=-2)``) and all keys; or with one query, which stands for all,
        and then the same array on all ranks.
    alibi_slopes, sink, key_padding_mask, cu_seqlens_q, cu_seqlens_k, score_args, mask_args, block_mask
        Those of the whole sequence, the same on all ranks. Packed arrays are divided without regard to the ends of
        their sequences.
    window, softcap, dropout_p, seed, max_seqlen_q, max_seqlen_k, score_mod, mask_mod
        As for `fa2cupy.forward`; b, h, q and k of functions are those of the whole sequence.

    Raises
    ------
    TypeError, ValueError
        As for `fa2cupy.forward`. Also if an argument differs between ranks (the text names the argument and the ranks),
        or if the ranks cannot divide the rows, or the heads for ``"heads"`` and ``"hybrid"``. If one rank raises an
        error, all do, and can go on.
    UnsupportedProblemError
        ``"gather"`` and ``"hybrid"`` have no packed sequences, no `block_mask`, and ALiBi only with causal or a window
        without keys on the right; on a GPU, dropout only in chunks of a multiple of 16 rows.
    CommunicationError
        Another rank has failed or does not answer in time, or an earlier call on the communicator has failed. The
        communicator cannot be used any more then, nor after any other exception that ends a call:
        ``KeyboardInterrupt``, or a lack of memory.
    RuntimeError
        Another thread makes a call on the communicator.

    Notes
    -----
    o and lse equal those of one call on the whole sequence, bit for bit, and dropout drops the same: one call computes
    each row, with the same key tiles. In ``"gather"`` and ``"hybrid"``, a call has a chunk of the rows, and equal bits
    need chunks of whole query tiles: on a GPU, of a multiple of 128 rows; on NumPy, by default of 256 rows divided by
    the query heads of a group (`config` changes that), and a BLAS whose products do not depend on the number of rows.
    In other chunks a block of rows may begin elsewhere, and key tiles that need a mask for some rows of a block are
    computed in another way than those that need none. Calls on a GPU have the `num_splits` of one call on the whole
    sequence.

    Memory beyond inputs and results, without the kernels' own, for e bytes per element, N rows of all ranks, W ranks, H
    query heads, h K/V heads of d columns and G groups of heads: ``"heads"`` takes N / W (4 H + 6 h) d e. ``"gather"``
    takes at most 2 N h d e, and 2 N h d e min(2, G) / G with G groups of one size; a backward takes two to three times
    that in addition, for shares of gradients. ``"hybrid"`` takes what ``"heads"`` takes and, with R ranks in a host,
    what ``"gather"`` takes for h / R heads and W / R ranks. NCCL's messages are packed if they are not contiguous, and
    unpacked if there are several sequences: that takes the memory of a group's messages once or twice. In ``"heads"``
    and ``"hybrid"``, a rank also has all rows of its heads' biases and masks. MPI's messages are copied on both ranks.
    Memory that the ranks write for each other stays allocated as long as the communicator (``comm.window_bytes``).

    On GPUs of one host, the ranks of ``"heads"`` and ``"gather"`` write each other's memory (CUDA IPC) with copy
    engines, beside the kernels; in ``"heads"``, a kernel writes the first rows and the last results. Calls with more
    than 64 sequences (in layout ``"bhsd"``, sequences times heads), calls of ``"heads"`` with more than 1 GiB of biases
    and masks on a rank, and calls of ``"hybrid"`` use NCCL, on a stream of the highest priority: its blocks wait for a
    multiprocessor that no kernel occupies. A call has four streams for computing besides the caller's. Only the first
    call with new shapes or options waits for the GPU: in it the ranks compare their arguments, and notice a rank that
    makes another call. If all ranks have agreed on their arguments before, such a rank is noticed when the calls are
    done, or when the time is up. A failure on a GPU that comes after a call has returned is printed, and the next call
    raises it: the results of the last calls are not there.

    All ranks together can capture a call into a CUDA graph, after a call of the same kind: its host time is then that
    of a launch. The memory of captured calls beyond their results is kept as long as the communicator, and launches
    have no timeout. Launches and calls of ``"heads"`` and ``"gather"`` write the same memory: make them on one stream,
    or let streams wait for each other. Functions of scores cannot be captured.

    Sources: DeepSpeed-Ulysses, Jacobs et al. 2023 (``"heads"``); the all-gather of Llama 3, 2024 (``"gather"``);
    two levels, Fang and Zhao 2024, USP (``"hybrid"``); the zigzag order of Zhu's ring-flash-attention, 2024.

    Examples
    --------
    >>> import numpy as np
    >>> import fa2cupy
    >>> import fa2cupy.distributed as dist
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 64, 4, 16), dtype=np.float32)
    >>> def work(comm):
    ...     o, lse = dist.forward(comm, *(dist.shard(comm, x) for x in (q, k, v)), causal=True)
    ...     return dist.unshard(comm, o)
    >>> np.allclose(dist.simulate(4, work)[0], fa2cupy.forward(q, k, v, causal=True)[0], atol=1e-6)
    True
    """
    return _results(comm, _arguments("forward", {"q": q, "k": k, "v": v}, out, keywords))


@takes(RankBackwardKeywords)
@collective
@explains_absence
def backward(
    comm: Communicator,
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
    **keywords: Unpack[RankBackwardKeywords],
) -> tuple[ArrayT, ...]:
    """`fa2cupy.backward` of a sequence whose rows are spread over several ranks.

    Parameters
    ----------
    comm : Communicator
    q, k, v : ndarray
        Those of the call of `forward`, and so are `causal`, `softmax_scale`, `layout`, `order` and features.
    o, lse, do : ndarray
        This rank's results of `forward`, and the gradient for o.
    delta, dlse : ndarray, shape of lse, optional
        As for `fa2cupy.backward`, for this rank's rows.
    return_dbias, return_dsink, return_dscore_args : bool, optional
        Also returns the gradient of `bias`, of `sink`, and of the floating-point arrays in `score_args`.
    method, deterministic, config, family, num_splits, precision
        As for `fa2cupy.backward`.
    scheme, order, head_groups
        As for `forward`; the schemes of forward and backward may differ.
    out : tuple of (ndarray or None), optional
        Arrays for this rank's results.

    Returns
    -------
    dq, dk, dv : ndarray, shapes of q, k, v
        The whole gradients of this rank's rows.
    dbias : ndarray, shape of bias
        That of this rank's queries. For a bias that is the same for all queries, or for packed sequences, this rank's
        share.
    dsink, *dscore_args : ndarray
        This rank's shares.

    Raises
    ------
    TypeError, ValueError, UnsupportedProblemError, CommunicationError
        As for `forward`.

    Notes
    -----
    The gradient of an array that all ranks have is the sum of their shares. So is the gradient of a model's weights,
    because a rank sees only its own tokens: a training loop sums all of them at once.

    dq, dk and dv of ``"heads"`` are those of one call bit for bit, if the method is reproducible. ``"gather"`` rounds
    each rank's share of dk and dv to their dtype and sums the shares once, in float32, in the order of the ranks;
    ``"hybrid"`` does so with the shares of each host. With ``deterministic=True`` results are equal from run to run.

    With `return_dbias` and a bias that has rows, ``"heads"`` needs memory of the size of a rank's dbias: once, and
    twice where the ranks write each other's memory, which they do if bias and dbias together have at most 1 GiB.

    Memory beyond inputs and results, as for `forward`: ``"heads"`` twice q, k, v, do, dq, dk and dv of a rank;
    ``"gather"`` that of the forward, and ``4 N h d e min(2, G) / G`` for its own shares and those from other ranks;
    ``"hybrid"`` the sum of both levels, as in the forward.
    """
    arrays = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "do": do, "delta": delta, "dlse": dlse}
    return _results(comm, _arguments("backward", arrays, out, keywords))


@overload
def attention(
    comm: Communicator,
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    return_lse: Literal[False] = False,
    **keywords: Unpack[RankBackwardKeywords],
) -> tuple[ArrayT, Backprop[ArrayT]]: ...
@overload
def attention(
    comm: Communicator,
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    return_lse: Literal[True],
    **keywords: Unpack[RankBackwardKeywords],
) -> tuple[ArrayT, ArrayT, Backprop[ArrayT]]: ...
@takes(RankBackwardKeywords)
@collective
@explains_absence
def attention(
    comm: Communicator,
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    *,
    return_lse: bool = False,
    **keywords: Unpack[RankBackwardKeywords],
) -> tuple[Any, ...]:
    """`forward`, and its gradient as a closure: `fa2cupy.attention` on several ranks.

    Parameters
    ----------
    comm, q, k, v
        As for `forward`.
    return_lse : bool, optional
        Also returns lse.
    **keywords
        Those of `forward` and of `backward`, but for `out`, `delta` and `dlse`.

    Returns
    -------
    o : ndarray
    lse : ndarray
        Only with `return_lse`.
    backprop : callable
        ``backprop(do, dlse=None, *, out=None)`` returns the results of `backward`. All ranks call it together. It keeps
        q, k, v, o, lse and the arrays of features alive, and nothing that came from other ranks. Its methods are
        `jvp`, `backward_jvp` and `double_backward` (`fa2cupy.typing.Backprop`).

    Raises
    ------
    TypeError, ValueError, UnsupportedProblemError, CommunicationError
        As for `forward` and `backward`.
    """
    check_keywords("fa2cupy.distributed.attention", keywords)
    functions = Functions(inspect.unwrap(forward), backward, jvp, backward_jvp, double_backward)
    return with_backprop(functions, (comm, q, k, v), keywords, return_lse)


@takes(RankScoreKeywords)
@collective
@explains_absence
def jvp(
    comm: Communicator,
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    qt: ArrayT | None,
    kt: ArrayT | None,
    vt: ArrayT | None,
    *,
    o: ArrayT | None = None,
    lse: ArrayT | None = None,
    bias_tangent: ArrayT | None = None,
    sink_tangent: ArrayT | None = None,
    out: tuple[ArrayT | None, ...] | None = None,
    **keywords: Unpack[RankScoreKeywords],
) -> tuple[ArrayT, ArrayT, ArrayT, ArrayT]:
    """`fa2cupy.jvp` of a sequence whose rows are spread over several ranks.

    Parameters
    ----------
    comm, q, k, v, causal, softmax_scale, layout, order, head_groups, **keywords
        As for `forward`.
    qt, kt, vt : ndarray or None
        This rank's rows of the direction.
    o, lse : ndarray, optional
        This rank's results of `forward`, which are then not computed again.
    bias_tangent, sink_tangent : ndarray, optional
        As bias and sink.
    scheme : {None, "heads"}, optional
        The number of K/V heads must be a multiple of the number of ranks.
    out : tuple of (ndarray or None), optional
        Arrays ``(o, lse, ot, lset)`` for this rank's results.

    Returns
    -------
    o, lse, ot, lset : ndarray
        As from `fa2cupy.jvp`, for this rank's rows.

    Raises
    ------
    TypeError, ValueError, CommunicationError
        As for `forward`.
    UnsupportedProblemError
        Another scheme than ``"heads"``, or a number of K/V heads that the ranks cannot divide.

    Notes
    -----
    The arrays travel as in `forward`: q, k, v and the tangents that there are to the ranks that have the heads, and the
    results back.
    """
    arrays = {"q": q, "k": k, "v": v, "qt": qt, "kt": kt, "vt": vt}
    arrays |= {"bias_tangent": bias_tangent, "sink_tangent": sink_tangent}
    arguments = _arguments("jvp", arrays, out, keywords)
    if o is None and lse is None:
        return _results(comm, arguments)
    arguments = replace(arguments, call="output_jvp", arrays={**arrays, "o": o, "lse": lse}, out=out_of_tangents(out))
    ot, lset = _results(comm, arguments)
    found: Any = o, lse, ot, lset
    return found


@takes(RankSecondOrderKeywords)
@collective
@explains_absence
def backward_jvp(
    comm: Communicator,
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    o: ArrayT,
    lse: ArrayT,
    do: ArrayT,
    qt: ArrayT | None,
    kt: ArrayT | None,
    vt: ArrayT | None,
    ot: ArrayT,
    lset: ArrayT,
    dot: ArrayT | None = None,
    *,
    dlse: ArrayT | None = None,
    dlset: ArrayT | None = None,
    bias_tangent: ArrayT | None = None,
    sink_tangent: ArrayT | None = None,
    out: tuple[ArrayT | None, ...] | None = None,
    **keywords: Unpack[RankSecondOrderKeywords],
) -> tuple[ArrayT, ...]:
    """`fa2cupy.backward_jvp` of a sequence whose rows are spread over several ranks.

    Parameters
    ----------
    comm, q, k, v, o, lse, do, dlse, causal, softmax_scale, layout, order, head_groups, **keywords
        As for `backward`.
    qt, kt, vt, ot, lset, bias_tangent, sink_tangent, scheme
        As for `jvp`, and this rank's results of it.
    dot, dlset : ndarray, shapes of o and lse, optional
        This rank's rows of the tangents of do and dlse.
    return_dbias, return_dsink : bool, optional
        Also returns the tangents of the gradients of `bias` and of `sink`.
    deterministic : bool, optional
        As for `fa2cupy.backward_jvp`.
    out : tuple of (ndarray or None), optional
        Arrays for this rank's results.

    Returns
    -------
    dqt, dkt, dvt : ndarray, shapes of q, k, v
        Those of this rank's rows.
    dbiast, dsinkt : ndarray
        Rows and shares, as from `backward`.

    Raises
    ------
    TypeError, ValueError, UnsupportedProblemError, CommunicationError
        As for `jvp`.
    """
    arrays = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "do": do, "qt": qt, "kt": kt, "vt": vt, "ot": ot}
    arrays |= {"lset": lset, "dot": dot, "dlse": dlse, "dlset": dlset}
    arrays |= {"bias_tangent": bias_tangent, "sink_tangent": sink_tangent}
    return _results(comm, _arguments("backward_jvp", arrays, out, keywords))


@takes(RankSecondOrderKeywords)
@collective
@explains_absence
def double_backward(
    comm: Communicator,
    q: ArrayT,
    k: ArrayT,
    v: ArrayT,
    o: ArrayT,
    lse: ArrayT,
    do: ArrayT,
    gdq: ArrayT | None,
    gdk: ArrayT | None,
    gdv: ArrayT | None,
    *,
    dlse: ArrayT | None = None,
    gdbias: ArrayT | None = None,
    gdsink: ArrayT | None = None,
    out: tuple[ArrayT | None, ...] | None = None,
    **keywords: Unpack[RankSecondOrderKeywords],
) -> tuple[ArrayT, ...]:
    """`fa2cupy.double_backward` of a sequence whose rows are spread over several ranks.

    Parameters
    ----------
    comm, q, k, v, o, lse, do, dlse, causal, softmax_scale, layout, order, head_groups, **keywords
        As for `backward`.
    gdq, gdk, gdv : ndarray or None
        Gradients of the loss for this rank's rows of dq, dk and dv.
    gdbias, gdsink : ndarray, optional
        Gradients for dbias, with the rows of bias, and for the whole dsink, the same on all ranks.
    return_dbias, return_dsink : bool, optional
        Also returns the gradients of `bias` and of `sink`.
    deterministic : bool, optional
        As for `fa2cupy.double_backward`.
    scheme
        As for `jvp`.
    out : tuple of (ndarray or None), optional
        Arrays for this rank's results.

    Returns
    -------
    gq, gk, gv, gdo, gdlse : ndarray
        As from `fa2cupy.double_backward`, for this rank's rows; gdlse only with dlse.
    gbias, gsink : ndarray
        Rows and shares, as from `backward`.

    Raises
    ------
    TypeError, ValueError, UnsupportedProblemError, CommunicationError
        As for `jvp`.
    """
    arrays = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "do": do, "gdq": gdq, "gdk": gdk, "gdv": gdv}
    arrays |= {"dlse": dlse, "gdbias": gdbias, "gdsink": gdsink}
    return _results(comm, _arguments("double_backward", arrays, out, keywords))


def _arguments(call: str, arrays: Mapping[str, Any], out: Any, keywords: Any) -> CallArguments:
    of_ranks = {name: keywords.pop(name) for name in RankKeywords.__annotations__ if name in keywords}
    options = options_of(f"fa2cupy.distributed.{call}", keywords)
    given = {name: value for name, value in keywords.items() if value is not None}
    return CallArguments(call, arrays, out, options, given, **of_ranks)


def _results(comm: Communicator, arguments: CallArguments) -> Any:
    """Checks a call, allocates its results and runs it."""
    if comm.size == 1:
        return _alone(arguments)
    request = checked(comm, arguments)
    q = arguments.arrays["q"]
    if captured := is_captured(q):
        comm.stage = Stage.REFUSED  # all ranks capture a call together
        check_capture(arguments.keywords)
        comm.stage = Stage.TOGETHER
    given = unpack_out(arguments.out, tuple([result.name for result in request.results]))
    xp = array_module(q)
    out = tuple(
        [
            xp.ndarray(result.shape, result.dtype) if array is None else array
            for result, array in zip(request.results, given, strict=True)
        ]
    )
    if request.signature is not None and not captured:
        values = _values(arguments, request, out)
        prepared = _prepared(comm, request, arguments, values)
        if prepared is not None:
            prepared(values.values(), *device_streams(q))
            return out
    run = Run(comm, replace(request, keywords=arguments.features), q)
    try:
        _queue(run, arguments, out, comm.number)
    except BaseException:
        run.abandon()
        raise
    return out


def _queue(run: Run, arguments: CallArguments, out: tuple[Array, ...], number: int) -> None:
    """Queues the call of the communicator with this number."""
    operands = Operands.of(arguments.arrays, arguments.options.layout)
    names = tuple([result.name for result in run.request.results])
    views = result_views(names, out, arguments.options.layout, arguments.arrays["q"].ndim)
    getattr(_SCHEMES[run.request.scheme], arguments.call)(run, run.mover(number), operands, views)
    run.finish()


def _values(arguments: CallArguments, request: Request, out: tuple[Array, ...]) -> dict[str, Any]:
    """What a prepared call takes: arrays, results and a seed by name."""
    values = arguments.given
    if is_seed(arguments.keywords.get("seed")):
        values["seed"] = int(arguments.keywords["seed"])
    return values | {f"out {result.name}": array for result, array in zip(request.results, out, strict=True)}


def _prepared(
    comm: Communicator, request: Request, arguments: CallArguments, values: Mapping[str, Any]
) -> PreparedCall | None:
    """The call as it was recorded, or is now; None if its arrays travel by messages."""
    found = comm.prepared.get((request.signature, comm.window_bytes))
    if found is not None:
        return found
    if not takes_copies(replace(request, keywords=arguments.features)):
        return None
    if comm.transport_of(arguments.arrays["q"]).window(False) is None:
        return None
    call = PreparedCall(values)
    symbols = call.symbols
    arrays = {name: symbols.get(name) for name in arguments.arrays}
    keywords = {name: symbols.get(name, value) for name, value in arguments.keywords.items()}
    arguments = replace(arguments, arrays=arrays, keywords=keywords)
    request = replace(request, keywords=arguments.features)
    out = tuple([symbols[f"out {result.name}"] for result in request.results])
    _queue(Run(comm, request, arrays["q"], call), arguments, out, comm.number)
    return comm.prepared.put((request.signature, comm.window_bytes), call)


def _alone(arguments: CallArguments) -> tuple[Array, ...]:
    """The call of a single rank, which has the whole sequence."""
    arrays, options = arguments.arrays, arguments.options
    backend = backend_of("q", arrays["q"])
    if arguments.call in CALLS:
        return call_backend(backend, arguments.call, arrays, arguments.out, options, arguments.keywords)
    return getattr(backend, arguments.call)(*arrays.values(), arguments.out, options, arguments.keywords)
