"""Context parallelism of PyTorch, with cuDNN's attention, beside the schemes of `fa2cupy.distributed`."""

from __future__ import annotations

import datetime
import importlib
from types import ModuleType

from common.measure import Gpu
from common.peers import TorchPeer

__all__ = ["TorchRing", "TorchRingWork"]

#: Names of the module, by the version of PyTorch.
_MODULES = (
    "torch.distributed.tensor.experimental._context_parallel._attention",
    "torch.distributed.tensor.experimental._attention",
)
_TIMEOUT_S = 120.0


class TorchRing(TorchPeer):
    """The ring of PyTorch in its zigzag order, which gives a rank the rows that it has in ours.

    Parameters
    ----------
    gpu : Gpu
    rank, size : int
    port : int
        Port of this host on which rank 0 waits for the others: all ranks make the object together.
    """

    name = "torch ring"

    def __init__(self, gpu: Gpu, rank: int, size: int, port: int):
        super().__init__(gpu)
        import torch.distributed as group
        from torch.distributed.device_mesh import init_device_mesh

        self.calls = _context_parallel()
        self.calls._cp_options.enable_load_balance = True
        device = self.torch.device("cuda", rank)
        self.torch.cuda.set_device(device)
        group.init_process_group(
            "nccl",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=_TIMEOUT_S),
            device_id=device,
        )
        self.mesh = init_device_mesh("cuda", (size,))


class TorchRingWork:
    """Forward and backward on a rank's rows, with the methods of `rank.Work`.

    Parameters
    ----------
    ring : TorchRing
    arrays : sequence of ndarray
        CuPy's q, k, v and do of this rank, which are copied to the layout of PyTorch.
    """

    def __init__(self, ring: TorchRing, arrays):
        self._ring = ring
        self._q, self._k, self._v, self._do = (ring.own(array).contiguous() for array in arrays)
        self._saved = self.forward()

    def forward(self) -> tuple:
        """Returns all that the backward needs."""
        more = {"attn_bias": None, "compute_log_sumexp": True, "is_causal": True}
        call = self._ring.calls._scaled_dot_product_ring_cudnn_attention
        return call(self._ring.mesh, self._q, self._k, self._v, **more)

    def backward(self) -> tuple:
        """Returns the gradients, from the results of the first forward."""
        return self._backward(self._saved)

    def training(self) -> tuple:
        """Returns o, dq, dk and dv of a forward and its backward."""
        results = self.forward()
        return (results[0], *self._backward(results))

    def arrays(self) -> tuple:
        """Returns o, dq, dk and dv as CuPy's arrays."""
        return tuple(self._ring.array(tensor.transpose(1, 2)) for tensor in self.training())

    def _backward(self, results: tuple) -> tuple:
        o, lse, cum_q, cum_k, max_q, max_k, seed, offset = results[:8]
        call = self._ring.calls._scaled_dot_product_ring_cudnn_attention_backward
        inputs = (self._do, self._q, self._k, self._v, o, lse, seed, offset, None)
        return call(self._ring.mesh, *inputs, cum_q, cum_k, max_q, max_k, 0.0, True)[:3]


def _context_parallel() -> ModuleType:
    """Returns the module of PyTorch that has the ring.

    Raises
    ------
    ImportError
        This version has none.
    """
    for name in _MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if hasattr(module, "_scaled_dot_product_ring_cudnn_attention"):
            return module
    raise ImportError("this PyTorch has no context parallelism with cuDNN")
