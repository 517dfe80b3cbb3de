"""Sums over all ranks, for losses and the gradients of what all ranks have."""

from __future__ import annotations

from typing import Any, overload

import numpy as np

from ..numerics.arrays import array_module
from ..problem.arguments import array_backend
from ..problem.array_types import Array, ArrayT
from .call.agreement import agree, collective, messages_of
from .communicator import Communicator
from .transport.messages import Transport

__all__ = ["total"]

_WIDE = {"float16": "float32", "bfloat16": "float32"}


@overload
def total(comm: Communicator, x: np.generic) -> np.ndarray: ...
@overload
def total(comm: Communicator, x: ArrayT) -> ArrayT: ...
@collective
def total(comm: Communicator, x: Any) -> Any:
    """The sum of an array over all ranks, on each of them.

    Parameters
    ----------
    comm : Communicator
    x : ndarray or NumPy scalar
        This rank's share. All ranks have arrays of the same shape and dtype, and call this together.

    Returns
    -------
    ndarray, shape and dtype of x
        16-bit numbers are summed in float32 and rounded once. All ranks get the same bits: numbers are added up in the
        order of the ranks.

    Raises
    ------
    TypeError, ValueError
        `x` is no array of NumPy or CuPy, or its shape or dtype differs between ranks. All ranks raise the error.
    CommunicationError
        Another rank failed or does not answer in time. The communicator cannot be used any more.

    Examples
    --------
    >>> import numpy as np
    >>> from fa2cupy.distributed import simulate
    >>> simulate(3, lambda comm: total(comm, np.array([1.0, comm.rank])))[0]
    array([3., 3.])
    """
    if isinstance(x, np.generic):
        x = np.asarray(x)
    array_backend({"x": x})
    number = agree(comm, x, {"call": "total", "x": f"shape {x.shape}, dtype {x.dtype}"})
    with messages_of(comm, x, number) as transport:
        return _sum(comm, transport, x)


def _sum(comm: Communicator, transport: Transport, x: Array) -> Array:
    xp = array_module(x)
    own = xp.ascontiguousarray(x).reshape(-1)
    # Each rank sums one piece of the array, and sends the sum to all.
    step = -(-own.size // comm.size)
    pieces = [slice(min(peer * step, own.size), min((peer + 1) * step, own.size)) for peer in range(comm.size)]
    mine = pieces[comm.rank]
    peers = range(comm.size)
    landing = xp.empty((comm.size, mine.stop - mine.start), own.dtype)
    transport.exchange([(own[pieces[peer]], peer) for peer in peers], [(landing[peer], peer) for peer in peers])
    wide = _WIDE.get(own.dtype.name, own.dtype.name)
    added = landing[0].astype(wide)
    for share in landing[1:]:
        added += share.astype(wide, copy=False)
    rounded = added.astype(own.dtype, copy=False)
    whole = xp.empty(own.shape, own.dtype)
    transport.exchange([(rounded, peer) for peer in peers], [(whole[pieces[peer]], peer) for peer in peers])
    return whole.reshape(x.shape)
