"""An interpreter of the PTX that NVRTC makes of a kernel, in Python and NumPy, without a GPU.

It computes the results of the kernel and reports errors that a GPU hides: accesses outside of a buffer, reads of
unwritten memory, races between warps and between blocks, missing waits and fences, barriers that never complete.
tests/README.md says what is modelled.

    module = ptxsim.Module(ptx)
    memory = ptxsim.Memory()
    x = memory.alloc(array, "x")
    y = memory.empty(array.shape, array.dtype, "y")
    module.launch("kernel", grid=1, block=128, args=[x, y], memory=memory, race_check=True)
    memory.read(y)
"""

from .errors import PtxError
from .machine import Machine
from .memory import Memory
from .module import Module
from .tensor_map import tensor_map

__all__ = ["Machine", "Memory", "Module", "PtxError", "tensor_map"]
