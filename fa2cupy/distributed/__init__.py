"""Attention of sequences whose rows are spread over several GPUs or processes (sequence or context parallelism).

All ranks call these functions together, each with its own rows. Copy engines and NCCL carry CuPy arrays, and MPI, or
simulated ranks, NumPy arrays.
"""

from .api import attention, backward, forward
from .communicator import Communicator
from .rows import pad, padded_length, positions, shard, unshard
from .simulation import simulate
from .totals import total
from .transport.messages import CommunicationError

__all__ = [
    "CommunicationError",
    "Communicator",
    "attention",
    "backward",
    "forward",
    "pad",
    "padded_length",
    "positions",
    "shard",
    "simulate",
    "total",
    "unshard",
]
