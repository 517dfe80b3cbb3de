"""Attention of sequences whose rows are spread over several GPUs or processes (sequence or context parallelism).

All ranks call these functions together, each with its own rows. CuPy arrays travel by copy engines and NCCL; NumPy
arrays by MPI, or between simulated ranks.
"""

# Each folder uses those behind it: schemes/ says which part of which array goes where, call/ has what each call goes
# through, movers/ carry the parts as copies or as messages, transport/ gets bytes to other ranks, and local/ is what a
# rank does by itself.
from .api import attention, backward, backward_jvp, double_backward, forward, jvp
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
    "backward_jvp",
    "double_backward",
    "forward",
    "jvp",
    "pad",
    "padded_length",
    "positions",
    "shard",
    "simulate",
    "total",
    "unshard",
]
