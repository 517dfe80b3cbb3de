"""The agreement of all ranks on a call, before its first message: a call that differs would never end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from .communicator import Communicator
from .messages import all_texts

__all__ = ["ERROR", "agree"]

#: The name of a rank's own error in its description of a call.
ERROR = "error"


def agree(comm: Communicator, array: object, description: Mapping[str, str]) -> None:
    """Compares the descriptions of a call by all ranks.

    Messages of NumPy arrays wait for the other ranks anyway, so that each call is compared. Those of CuPy arrays do
    not: a description is compared once, because the comparison synchronises with the GPU.

    Parameters
    ----------
    comm : Communicator
    array : object
        An array of the call's library, or what the caller has passed in its place.
    description : mapping of str
        What each argument is, by its name; under `ERROR`, the error that this rank will raise.

    Raises
    ------
    ValueError
        An argument differs between ranks, or another rank has an error. The text names argument and ranks.
    """
    if comm.size == 1:
        return
    transport = comm.transport_of(array)
    text = json.dumps(description)
    if not transport.waits_for_host and ERROR not in description:
        if text in comm.agreed:
            return
        comm.agreed.add(text)
    everyones = [json.loads(one) for one in all_texts(transport, text)]
    if ERROR in description:
        return
    _check_errors([one.get(ERROR) for one in everyones])
    names = dict.fromkeys(name for one in everyones for name in one)
    for name in names:
        _check_alike(name, [one.get(name, "absent") for one in everyones])


def _check_errors(errors: Sequence[str | None]) -> None:
    for rank, error in enumerate(errors):
        if error is not None:
            raise ValueError(f"rank {rank} cannot make this call: {error}")


def _check_alike(name: str, values: Sequence[str]) -> None:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    if len(ranks) > 1:
        found = "; ".join(f"{value} on {_named(some)}" for value, some in ranks.items())
        raise ValueError(f"{name}: expected the same on all ranks, got {found}")


def _named(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
