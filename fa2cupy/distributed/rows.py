"""The rows of a rank, as users see them: positions, shards of whole arrays, and whole arrays of shards."""

from __future__ import annotations

import numpy as np

from ..numerics.arrays import array_module
from ..problem.arguments import array_backend, check_int
from ..problem.array_types import Array, ArrayT
from ..problem.block_mask import check_length
from ..problem.names import Order
from .call.agreement import agree, collective, messages_of
from .call.orders import RowOrder, check_order, divisor
from .communicator import Communicator, check_communicator

__all__ = ["pad", "padded_length", "positions", "shard", "unshard"]


def padded_length(comm: Communicator, seqlen: int, *, order: Order = "zigzag") -> int:
    """The smallest length, at least `seqlen`, that the ranks can divide.

    Parameters
    ----------
    comm : Communicator
    seqlen : int
    order : {"zigzag", "contiguous"}, optional
        As for `fa2cupy.distributed.forward`.

    Returns
    -------
    int
        A multiple of the number of ranks, in zigzag order of twice that.
    """
    check_communicator(comm)
    comm.check()
    multiple = divisor(check_order(order), comm.size)
    return -(-check_length("seqlen", seqlen) // multiple) * multiple


def pad(comm: Communicator, x: ArrayT, *, axis: int = 1, value: float = 0, order: Order = "zigzag") -> ArrayT:
    """A whole array with further elements at its end, so that the ranks can divide it.

    Under a causal mask no query sees the keys behind it, so that padded rows change no other row; without one, hide
    them with `key_padding_mask`. Losses must leave padded rows out: give their labels a value of their own.

    Parameters
    ----------
    comm : Communicator
    x : ndarray
        The whole array.
    axis : int, optional
        The axis of the sequence.
    value : number, optional
        The further elements.
    order : {"zigzag", "contiguous"}, optional
        As for `fa2cupy.distributed.forward`.

    Returns
    -------
    ndarray
        The array itself, if its length is right.
    """
    check_communicator(comm)
    axis = _checked_axis(x, axis)
    length = padded_length(comm, x.shape[axis], order=order)
    if length == x.shape[axis]:
        return x
    xp = array_module(x)
    padded = xp.full((*x.shape[:axis], length, *x.shape[axis + 1 :]), value, x.dtype)
    padded[_along(axis, slice(0, x.shape[axis]))] = x
    return padded


def positions(comm: Communicator, seqlen: int, *, order: Order = "zigzag") -> np.ndarray:
    """The positions of this rank's rows in the whole sequence: for tokens, labels and rotary angles.

    Parameters
    ----------
    comm : Communicator
    seqlen : int
        Length of the whole sequence.
    order : {"zigzag", "contiguous"}, optional
        As for `fa2cupy.distributed.forward`.

    Returns
    -------
    ndarray of int64, shape (seqlen // size,)
        A NumPy array.

    Raises
    ------
    ValueError
        The ranks cannot divide the length.

    Examples
    --------
    >>> from fa2cupy.distributed import simulate
    >>> [positions(comm, 8).tolist() for comm in simulate(2, lambda comm: comm)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    check_communicator(comm)
    comm.check()
    rows = _row_order("seqlen", comm, seqlen, order)
    return np.concatenate([np.arange(chunk.whole.start, chunk.whole.stop) for chunk in rows.chunks(comm.rank)])


def shard(comm: Communicator, x: ArrayT, *, axis: int = 1, order: Order = "zigzag") -> ArrayT:
    """Takes this rank's rows of a whole array, without messages.

    Parameters
    ----------
    comm : Communicator
    x : ndarray
        The whole array, of any dtype.
    axis : int, optional
        The axis of the sequence.
    order : {"zigzag", "contiguous"}, optional
        As for `fa2cupy.distributed.forward`.

    Returns
    -------
    ndarray
        A copy of ``x[..., positions(comm, x.shape[axis]), ...]``.

    Raises
    ------
    ValueError
        The ranks cannot divide the length.
    """
    check_communicator(comm)
    comm.check()
    axis = _checked_axis(x, axis)
    rows = _row_order(f"x (axis {axis})", comm, x.shape[axis], order)
    parts = [x[_along(axis, chunk.whole)] for chunk in rows.chunks(comm.rank)]
    return array_module(x).concatenate(parts, axis=axis)


@collective
def unshard(comm: Communicator, x: ArrayT, *, axis: int = 1, order: Order = "zigzag") -> ArrayT:
    """The whole array of all ranks' rows, on each rank: the reverse of `shard`.

    Parameters
    ----------
    comm : Communicator
    x : ndarray
        This rank's rows. All ranks have arrays of the same shape and dtype.
    axis : int, optional
        The axis of the sequence.
    order : {"zigzag", "contiguous"}, optional
        As for `fa2cupy.distributed.forward`.

    Returns
    -------
    ndarray

    Raises
    ------
    TypeError, ValueError
        `x` is no array of NumPy or CuPy; a rank has an odd number of rows in zigzag order; shapes, dtypes or options
        differ between ranks. All ranks raise the error.
    CommunicationError
        Another rank failed or does not answer in time. The communicator cannot be used any more.
    """
    axis = _checked_axis(x, axis)
    rows = _row_order(f"x (axis {axis})", comm, x.shape[axis] * comm.size, order)
    kind = f"shape {x.shape}, dtype {x.dtype}"
    number = agree(comm, x, {"call": "unshard", "x": kind, "axis": str(axis), "order": order})
    xp = array_module(x)
    own: Array = xp.ascontiguousarray(x)
    landing = xp.empty((comm.size, *own.shape), own.dtype)
    peers = range(comm.size)
    with messages_of(comm, x, number) as transport:
        transport.exchange([(own, peer) for peer in peers], [(landing[peer], peer) for peer in peers])
    whole = xp.empty((*x.shape[:axis], rows.seqlen, *x.shape[axis + 1 :]), x.dtype)
    for peer in peers:
        for chunk in rows.chunks(peer):
            whole[_along(axis, chunk.whole)] = landing[peer][_along(axis, chunk.local)]
    return whole


def _row_order(name: str, comm: Communicator, seqlen: int, order: str) -> RowOrder:
    multiple = divisor(check_order(order), comm.size)
    seqlen = check_length(name, seqlen)
    if seqlen % multiple:
        padded = -(-seqlen // multiple) * multiple
        raise ValueError(
            f"{name}: expected a length that is a multiple of {multiple}, for {comm.size} ranks in {order} order, got "
            f"{seqlen}; pad it to {padded} with fa2cupy.distributed.pad"
        )
    return RowOrder(order, comm.size, seqlen)


def _checked_axis(x: Array, axis: int) -> int:
    array_backend({"x": x})
    axis = check_int("axis", axis)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis: expected one of the {x.ndim} axes of x, got {axis}")
    return axis % x.ndim


def _along(axis: int, rows: slice) -> tuple[slice, ...]:
    """The index of some rows along an axis."""
    return (*(slice(None),) * axis, rows)
