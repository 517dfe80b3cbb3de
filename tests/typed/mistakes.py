"""Mistakes that type checkers find: all lines that end with a comment, and no others."""

import numpy as np

import fa2cupy
import fa2cupy.distributed as dist
from fa2cupy import mods

x = np.ones((1, 16, 2, 8), "float32")
o, lse = fa2cupy.forward(x, x, x)
_, backprop = fa2cupy.attention(x, x, x)

fa2cupy.forward([[1.0]], x, x)  # a list is no array
fa2cupy.forward(x, x, x, casual=True)  # misspelt
fa2cupy.forward(x, x, x, causal=1.5)  # no bool
fa2cupy.forward(x, x, x, layout="bsdh")  # no layout
fa2cupy.forward(x, x, x, precision="tf32")  # no arithmetic
fa2cupy.forward(x, x, x, window=128)  # a number for two
fa2cupy.forward(x, x, x, cu_seqlens_q=[0, 16])  # a list is no array
fa2cupy.forward(x, x, x, score_mod=mods.alibi(), score_args=np.ones(2))  # an array for a tuple of arrays
fa2cupy.forward(x, x, x, return_lse=True)  # another function's keyword
fa2cupy.backward(x, x, x, o, x)  # an array is missing
fa2cupy.backward(x, x, x, o, lse, x, method="three_pass")  # no method
fa2cupy.attention(x, x, x, out=(None, None))  # forward's keyword
o, lse, other = fa2cupy.attention(x, x, x)  # lse is not returned
backprop(x, [1.0])  # a list is no array
backprop(x, out=x)  # an array for a tuple of arrays
fa2cupy.decode(x, x, x, [9])  # a list is no array
fa2cupy.decode(x, x, x, x, dropout_p=0.1)  # forward's keyword
fa2cupy.precompile("sm_80", dtype="float16")  # misspelt
fa2cupy.legal_configs("backwards")  # no operation
mods.sliding_window("128")  # no int
dist.simulate(2, lambda comm: dist.forward(comm, x, x, x, scheme="ring"))  # no scheme
