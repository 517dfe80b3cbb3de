"""The implementations of the benchmark: fa2cupy, PyTorch's attention operators, and attention written out in CuPy.

All compute on the same memory: PyTorch gets CuPy's arrays through DLPack, and both launch on the default stream.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from common.measure import (
    DEFAULT,
    DETERMINISTIC,
    TRAINING,
    Candidate,
    Gpu,
    Problem,
    Tensors,
    backward_options,
    rotating,
)
from common.twice_written_out import TwiceWrittenOut
from language_model.arrays import CupyArrays

import fa2cupy
from fa2cupy.families.choice import Choice, choose
from fa2cupy.families.device import DeviceInfo
from fa2cupy.problem.checks import problem_from_arrays
from fa2cupy.problem.options import CallOptions

__all__ = [
    "DEFAULT_OPERATIONS",
    "FLOAT64_PEERS",
    "HEAD_DIM_PEERS",
    "OPERATIONS",
    "PEERS",
    "SECOND_ORDER_PEERS",
    "WIDE_PEERS",
    "Fa2cupy",
    "TorchPeer",
    "available_peers",
    "default_choice",
]

#: ``single_pass`` and ``two_pass`` are the two backward methods; a peer's ``two_pass`` and ``deterministic`` are its
#: deterministic mode, if it has one.
OPERATIONS = ("forward", "single_pass", "two_pass")

#: Operations of a caller who names no method.
DEFAULT_OPERATIONS = ("forward", DEFAULT, DETERMINISTIC)

_HALF = ("float16", "bfloat16")


def default_choice(
    device: DeviceInfo,
    problem: Problem,
    operation: str = DEFAULT,
    precision: str | None = None,
    *,
    queries: int | None = None,
    **features,
) -> Choice:
    """Returns the choice for a call that leaves it open; `features` are keywords of the call.

    The call has all queries, or only the last `queries`.
    """
    scalar = np.zeros((), problem.numpy_dtype)
    q, k, v = (np.broadcast_to(scalar, shape) for shape in (problem.shape, problem.shape_kv, problem.shape_v))
    attention = problem_from_arrays(q[:, -(queries or 0) :], k, v, causal=problem.causal, **features)
    call = "forward" if operation == "forward" else "backward"
    how = {} if call == "forward" else backward_options(operation)
    options = CallOptions(causal=problem.causal, precision=precision, **how)
    return choose(call, attention, device, attention.contiguous_strides(), options, is_launched=False)


class Fa2cupy:
    """The package through its public functions: Delta and the conversion of dQ are part of a backward."""

    name = "fa2cupy"
    family: str | None = None

    def __init__(self, gpu: Gpu, precision: str | None = None):
        self.gpu, self.precision = gpu, precision

    def candidate(self, problem: Problem, sets: Sequence[Tensors], operation: str) -> Candidate:
        """Binds the operation to rotating inputs. A backward's o and lse are computed here, outside of the timing."""
        shared = {"causal": problem.causal, "precision": self.precision, "family": self.family}
        forward = functools.partial(fa2cupy.forward, **shared)
        if operation == "forward":
            return Candidate(self.name, rotating(forward, [(t.q, t.k, t.v) for t in sets]))
        if operation == TRAINING:

            def step(q, k, v, do) -> tuple:
                _, backprop = fa2cupy.attention(q, k, v, **shared)
                return backprop(do)

            return Candidate(self.name, rotating(step, [(t.q, t.k, t.v, t.do) for t in sets]))
        backward = functools.partial(fa2cupy.backward, **shared, **backward_options(operation))
        saved = [(t.q, t.k, t.v, *forward(t.q, t.k, t.v), t.do) for t in sets]
        return Candidate(self.name, rotating(backward, saved))

    def arrays(self, operation: str, results: tuple) -> tuple:
        """Returns ``(o,)`` or ``(dq, dk, dv)`` from the results of a call."""
        return results[:1] if operation == "forward" else results

    def peak_bytes(self, call: Callable[[], object]) -> int:
        """Returns the peak bytes that a call allocates, its results included."""
        return self.gpu.peak_bytes(call)

    def captured(self, call: Callable[[], tuple]) -> Callable[[], tuple]:
        """Returns the launch of a CUDA graph of a call that has been made before; it returns the call's results."""
        return self.gpu.captured(call)

    def tile(self, problem: Problem, operation: str) -> str:
        """Returns the tiles of a call as text, after the method if the operation does not name it."""
        if operation == TRAINING:
            return ""
        choice = default_choice(self.gpu.info, problem, operation, self.precision)
        method, tiles = choice.method, choice.tiles
        text = "; ".join(f"{name} {tile}" if len(tiles) > 1 else str(tile) for name, tile in tiles.items())
        return text if operation in OPERATIONS else f"{method}: {text}"


class Simt(Fa2cupy):
    """Our kernels for CUDA cores, beside those that a call has by default."""

    name = "fa2cupy simt"
    family = "simt"

    def supports(self, problem: Problem, operation: str) -> bool:
        """Returns True: they take every call."""
        return True

    def release(self) -> None:
        """Does nothing: `Gpu.release` frees CuPy's memory."""


class _Peer:
    """Common part of the peers: `forward` and `backward` are what a subclass adds."""

    name: str
    operations: tuple[str, ...] = (*OPERATIONS, DEFAULT, DETERMINISTIC)
    dtypes: tuple[str, ...] = _HALF

    def supports(self, problem: Problem, operation: str) -> bool:
        """Returns True if the comparison makes sense; the operator may still refuse it."""
        return operation in (*self.operations, TRAINING) and problem.dtype in self.dtypes

    def candidate(self, problem: Problem, sets: Sequence[Tensors], operation: str) -> Candidate:
        """Does the same as `Fa2cupy.candidate`."""
        inputs = [tuple(map(self.own, (t.q, t.k, t.v, t.do))) for t in sets]
        forward = functools.partial(self.forward, problem.causal)
        if operation == "forward":
            return Candidate(self.name, rotating(forward, [(q, k, v) for q, k, v, _ in inputs]))
        if operation == TRAINING:

            def step(q, k, v, do) -> tuple:
                return self.backward(problem.causal, q, k, v, do, forward(q, k, v))

            return Candidate(self.name, rotating(step, inputs))
        saved = [(q, k, v, do, forward(q, k, v)) for q, k, v, do in inputs]
        mode = self.deterministic if operation in ("two_pass", DETERMINISTIC) else contextlib.nullcontext
        return Candidate(self.name, rotating(functools.partial(self.backward, problem.causal), saved), mode)


class TorchPeer(_Peer):
    """An operator of PyTorch. It takes and returns (batch, heads, seqlen, head_dim): a transposed view, no copy.

    The operators of FlashAttention-2 and cuDNN take fewer heads of k and v as they are.
    """

    def __init__(self, gpu: Gpu):
        import torch

        if not torch.cuda.is_available():
            raise ImportError("this PyTorch has no CUDA device")
        self.torch, self.xp = torch, gpu.xp

    def own(self, array):
        """Returns CuPy's array as an argument of the operator."""
        return self.tensor(array).transpose(1, 2)

    def arrays(self, operation: str, results: tuple) -> tuple:
        """Does the same as `Fa2cupy.arrays`."""
        some = results[:1] if operation == "forward" else results[:3]
        return tuple(self.array(tensor.transpose(1, 2)) for tensor in some)

    def tensor(self, array):
        """Returns CuPy's array as a tensor. bfloat16 is passed as int16, because DLPack does not know ml_dtypes."""
        torch = self.torch
        if array.dtype.name == "bfloat16":
            return torch.from_dlpack(array.view(self.xp.int16)).view(torch.bfloat16)
        return torch.from_dlpack(array)

    def array(self, tensor):
        """Returns a tensor as CuPy's array."""
        if tensor.dtype == self.torch.bfloat16:
            import ml_dtypes

            return self.xp.from_dlpack(tensor.view(self.torch.int16)).view(ml_dtypes.bfloat16)
        return self.xp.from_dlpack(tensor)

    def peak_bytes(self, call: Callable[[], object]) -> int:
        """Does the same as `Fa2cupy.peak_bytes`, for PyTorch's allocator."""
        cuda = self.torch.cuda
        before = cuda.memory_allocated()
        cuda.reset_peak_memory_stats()
        call()
        return cuda.max_memory_allocated() - before

    def captured(self, call: Callable[[], tuple]) -> Callable[[], tuple]:
        """Does the same as `Fa2cupy.captured`."""
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            results = call()

        def launch() -> tuple:
            graph.replay()
            return results

        return launch

    def release(self) -> None:
        """Gives unused memory back to the driver."""
        self.torch.cuda.empty_cache()

    @contextlib.contextmanager
    def deterministic(self) -> Iterator[None]:
        """Sets PyTorch's deterministic mode, without its filling of every new array with NaN, which would be timed."""
        torch = self.torch
        filled = torch.utils.deterministic.fill_uninitialized_memory
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)
            torch.utils.deterministic.fill_uninitialized_memory = filled


class TorchFlash(TorchPeer):
    """FlashAttention-2 as PyTorch ships it."""

    name = "torch flash"

    def forward(self, causal: bool, q, k, v) -> tuple:
        """Calls the operator."""
        return self.torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)

    def backward(self, causal: bool, q, k, v, do, forward: tuple) -> tuple:
        """Calls the operator with the results of the forward."""
        o, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = forward
        return self.torch.ops.aten._scaled_dot_product_flash_attention_backward(
            do, q, k, v, o, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset
        )


class TorchCudnn(TorchPeer):
    """cuDNN's attention through PyTorch, which has no deterministic mode for it: ``two_pass`` is the ordinary mode."""

    name = "torch cudnn"

    def forward(self, causal: bool, q, k, v) -> tuple:
        """Calls the operator."""
        return self.torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)

    def backward(self, causal: bool, q, k, v, do, forward: tuple) -> tuple:
        """Calls the operator with the results of the forward."""
        o, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = forward
        return self.torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, o, lse, seed, offset, None, cum_q, cum_k, max_q, max_k, 0.0, causal
        )

    def deterministic(self) -> contextlib.AbstractContextManager:
        """Keeps the ordinary mode."""
        return contextlib.nullcontext()


class TorchEfficient(TorchPeer):
    """xFormers' memory-efficient attention in PyTorch: its only fused operator for float32.

    In 16 bits, where the others are faster, it is beside calls that the flash operator does not take: those whose v has
    another head_dim, and those of more than 256 columns.
    """

    name = "torch efficient"
    dtypes = (*_HALF, "float32")

    def supports(self, problem: Problem, operation: str) -> bool:
        """Does the same as for other operators."""
        is_of_flash = problem.dtype != "float32" and problem.head_dim_v is None and problem.head_dim <= 256
        return super().supports(problem, operation) and not is_of_flash

    def forward(self, causal: bool, q, k, v) -> tuple:
        """Calls the operator."""
        return self.torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)

    def backward(self, causal: bool, q, k, v, do, forward: tuple) -> tuple:
        """Calls the operator with the results of the forward."""
        o, lse, seed, offset = forward
        return self.torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            do, q, k, v, None, o, lse, seed, offset, 0.0, [True, True, True, False], causal
        )


class TorchMath(TorchPeer):
    """The formulas in PyTorch's own products and elementwise kernels: its only operator for float64, of any head_dim.

    It keeps P for a backward by autograd, and is deterministic as it is.
    """

    name = "torch math"
    operations = ("forward", DEFAULT)
    dtypes = (*_HALF, "float64")

    def own(self, array):
        """Returns CuPy's array as an argument that autograd differentiates by."""
        return super().own(array).requires_grad_()

    def arrays(self, operation: str, results: tuple) -> tuple:
        """Does the same as `Fa2cupy.arrays`."""
        return super().arrays(operation, tuple(tensor.detach() for tensor in results))

    def forward(self, causal: bool, q, k, v) -> tuple:
        """Calls the operator and keeps what autograd needs."""
        attention = self.torch.nn.attention
        with attention.sdpa_kernel(attention.SDPBackend.MATH):
            return (self.torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal),)

    def backward(self, causal: bool, q, k, v, do, forward: tuple) -> tuple:
        """Returns the gradients of the forward's result."""
        return self.torch.autograd.grad(forward, (q, k, v), do, retain_graph=True)


class FlashAttention4(TorchPeer):
    """FlashAttention-4 of the package flash-attn-4, below its autograd function."""

    name = "flash-attn 4"

    def __init__(self, gpu: Gpu):
        super().__init__(gpu)
        from flash_attn.cute import interface

        self._interface, self._is_deterministic = interface, False
        print(f"with flash-attn-4 {importlib.metadata.version('flash-attn-4')}")

    def own(self, array):
        """Returns CuPy's array as a tensor, in the same layout."""
        return self.tensor(array)

    def arrays(self, operation: str, results: tuple) -> tuple:
        """Does the same as `Fa2cupy.arrays`."""
        return tuple(map(self.array, results[:1] if operation == "forward" else results[:3]))

    def forward(self, causal: bool, q, k, v, **window) -> tuple:
        """Calls the kernel and keeps lse."""
        return self._interface._flash_attn_fwd(q, k, v, causal=causal, return_lse=True, **window)

    def backward(self, causal: bool, q, k, v, do, forward: tuple, **window) -> tuple:
        """Calls the kernels with the results of the forward."""
        o, lse, *_ = forward
        how = {"causal": causal, "deterministic": self._is_deterministic, **window}
        return self._interface._flash_attn_bwd(q, k, v, o, do, lse, **how)

    @contextlib.contextmanager
    def deterministic(self) -> Iterator[None]:
        """Sets the deterministic mode of its backward."""
        self._is_deterministic = True
        try:
            yield
        finally:
            self._is_deterministic = False


class CupyUnfused(_Peer):
    """Attention through a written-out score matrix, as one writes it in CuPy; softmax in float32 or wider."""

    name = "cupy unfused"
    operations = ("forward", "single_pass", DEFAULT)
    dtypes = ("float16", "bfloat16", "float32", "float64")
    max_scores = 6.25e8

    def __init__(self, gpu: Gpu):
        self.gpu, self.xp = gpu, gpu.xp

    def supports(self, problem: Problem, operation: str) -> bool:
        """Returns True up to a size of the score matrices; beyond, a call takes longer than all others together."""
        scores = problem.batch * problem.num_heads * problem.seqlen**2
        fits = scores <= self.max_scores and problem.heads_kv == problem.num_heads
        return super().supports(problem, operation) and fits

    def own(self, array):
        """Returns a view of shape (batch, heads, seqlen, head_dim)."""
        return array.transpose(0, 2, 1, 3)

    def arrays(self, operation: str, results: tuple) -> tuple:
        """Does the same as `Fa2cupy.arrays`."""
        return tuple(self.own(a) for a in (results[:1] if operation == "forward" else results))

    def peak_bytes(self, call: Callable[[], object]) -> int:
        """Does the same as `Fa2cupy.peak_bytes`."""
        return self.gpu.peak_bytes(call)

    def release(self) -> None:
        """Does nothing: `Gpu.release` frees CuPy's memory."""

    def forward(self, causal: bool, q, k, v) -> tuple:
        """Returns the output, and P, which a backward needs."""
        xp, seqlen, wide = self.xp, q.shape[2], self._wide(q)
        scaled = self._scale(q, q.shape[-1])
        scores = xp.matmul(scaled, k.swapaxes(2, 3)).astype(wide, copy=False)
        if causal:
            scores += xp.triu(xp.full((seqlen, seqlen), -xp.inf, wide), 1)
        scores -= scores.max(axis=-1, keepdims=True)
        xp.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        probabilities = scores.astype(q.dtype, copy=False)
        return xp.matmul(probabilities, v), probabilities

    def backward(self, causal: bool, q, k, v, do, forward: tuple) -> tuple:
        """Returns the gradients from P, which contains the mask."""
        xp, p = self.xp, forward[1]
        dp = xp.matmul(do, v.swapaxes(2, 3)).astype(self._wide(q), copy=False)
        dp -= (dp * p).sum(axis=-1, keepdims=True)
        dp *= p
        ds = dp.astype(q.dtype, copy=False)
        dq, dk = xp.matmul(ds, k), xp.matmul(ds.swapaxes(2, 3), q)
        return self._scale(dq, q.shape[-1]), self._scale(dk, q.shape[-1]), xp.matmul(p.swapaxes(2, 3), do)

    @staticmethod
    def _wide(array) -> str:
        return "float64" if array.dtype == "float64" else "float32"

    @staticmethod
    def _scale(array, head_dim: int):
        # The result of a product with a Python number need not be bfloat16 again.
        return (array * head_dim**-0.5).astype(array.dtype, copy=False)


class CupyTwice(_Peer):
    """Attention and its derivatives written out in CuPy: products by cuBLAS, softmax in float32 or wider.

    `jvp` computes P; the others have P, and what it changes by, from before.
    """

    name = "cupy written out"
    dtypes = CupyUnfused.dtypes
    operations = ("jvp", "backward_jvp", "double_backward")
    max_scores = 1.2e9

    def __init__(self, gpu: Gpu):
        self.gpu, self.xp = gpu, gpu.xp
        self._products: dict[str, Callable] = {}
        self.release()

    def supports(self, problem: Problem, operation: str) -> bool:
        """Returns True up to a size of the score matrices, of which it has several at a time."""
        fits = problem.batch * problem.num_heads * problem.seqlen**2 <= self.max_scores
        return super().supports(problem, operation) and fits

    def call(self, problem: Problem, operation: str, sets: Sequence) -> Callable[[], tuple]:
        """Binds the operation to rotating inputs, as stacks of matrices."""
        product = self._product(problem)
        self._shape = problem.batch, problem.num_heads, problem.seqlen, -1
        if self._sets is not sets:
            self._sets, self._stacks, self._made = sets, [type(one)(*map(self._stack, one)) for one in sets], []

        def made(q, k, v) -> TwiceWrittenOut:
            return TwiceWrittenOut(self.xp, q, k, v, problem.causal, product)

        def jvp(q, k, v, *moved) -> tuple:
            call = made(q, k, v)
            return call.o, call.jvp(*moved)[0]

        def backward_jvp(call, one) -> tuple:
            return call.backward_jvp(one.do, one.qt, one.kt, one.vt, one.ot, one.lset)

        def double_backward(call, one) -> tuple:
            ot, lset = call.jvp(one.qt, one.kt, one.vt)
            return *call.backward_jvp(one.do, one.qt, one.kt, one.vt, ot, lset), ot

        if operation == "jvp":
            return rotating(jvp, [(one.q, one.k, one.v, one.qt, one.kt, one.vt) for one in self._stacks])
        if not self._made:
            self._made = [made(one.q, one.k, one.v) for one in self._stacks]
            for call, one in zip(self._made, self._stacks, strict=True):
                call.jvp(one.qt, one.kt, one.vt)
        function = backward_jvp if operation == "backward_jvp" else double_backward
        return rotating(function, list(zip(self._made, self._stacks, strict=True)))

    def _stack(self, array):
        flat = array.swapaxes(1, 2) if array.ndim == 4 else array
        return self.xp.ascontiguousarray(flat).reshape(-1, *flat.shape[2:])

    def _product(self, problem: Problem) -> Callable | None:
        """Returns the product of stacks; cupy.matmul has none of bfloat16."""
        if problem.dtype != "bfloat16" or self.xp is np:
            return None
        if problem.dtype not in self._products:
            self._products[problem.dtype] = CupyArrays(problem.dtype).matmul
        return self._products[problem.dtype]

    def arrays(self, operation: str, results: tuple) -> tuple:
        """Does the same as `Fa2cupy.arrays`, for all results but lse and lset."""
        return tuple(array.reshape(*self._shape).swapaxes(1, 2) for array in results)

    def peak_bytes(self, call: Callable[[], object]) -> int:
        """Does the same as `Fa2cupy.peak_bytes`."""
        return self.gpu.peak_bytes(call)

    def release(self) -> None:
        """Drops what it has of the last inputs."""
        self._sets: Sequence | None = None
        self._stacks: list = []
        self._made: list[TwiceWrittenOut] = []


class JvpFlashAttention(TorchPeer):
    """The Triton kernel of the package jvp_flash_attention for PyTorch, below its autograd function: forward mode.

    It takes contiguous (batch, heads, seqlen, head_dim).
    """

    name = "jvp_flash_attention"
    operations = ("jvp",)

    def __init__(self, gpu: Gpu):
        super().__init__(gpu)
        from jvp_flash_attention.jvp_attention import JVPAttn

        self._forward = JVPAttn.forward
        print(f"with jvp_flash_attention {importlib.metadata.version('jvp_flash_attention')}")

    def call(self, problem: Problem, operation: str, sets: Sequence) -> Callable[[], tuple]:
        """Binds the kernel to rotating inputs."""
        inputs = [
            tuple(self.own(x).contiguous() for x in (one.q, one.k, one.v, one.qt, one.kt, one.vt)) for one in sets
        ]

        def jvp(*tensors) -> tuple:
            with self.torch.no_grad():
                o, context = self._forward(*tensors, None, 0.0, problem.causal)
            return o, context[0]

        return rotating(jvp, inputs)

    def arrays(self, operation: str, results: tuple) -> tuple:
        """Returns o and ot."""
        return tuple(self.array(tensor.transpose(1, 2)) for tensor in results)


PEERS = {"flash": TorchFlash, "cudnn": TorchCudnn, "efficient": TorchEfficient, "unfused": CupyUnfused}
#: The peers of the section head_dims.
HEAD_DIM_PEERS = {**{name: PEERS[name] for name in ("flash", "cudnn", "efficient")}, "flash4": FlashAttention4}
#: Those of the section second_order.
SECOND_ORDER_PEERS = {"written_out": CupyTwice, "jvp_flash": JvpFlashAttention}
#: Those of the section wide.
WIDE_PEERS = {"efficient": TorchEfficient, "math": TorchMath}
#: Those of the section float64.
FLOAT64_PEERS = {"simt": Simt, "unfused": CupyUnfused, "math": TorchMath}


def available_peers(gpu: Gpu, names: Sequence[str], kinds: Mapping[str, type] = PEERS) -> list:
    """Returns the named peers that can be imported; says in one line why others drop out."""
    peers, missing = [], {}
    for name in names:
        try:
            peers.append(kinds[name](gpu))
        except (ImportError, OSError) as error:  # OSError: a CUDA library of PyTorch's does not load
            missing.setdefault(str(error), []).append(name)
    for reason, dropped in missing.items():
        print(f"without {', '.join(dropped)}: {reason}")
    for torch in {peer.torch for peer in peers if isinstance(peer, TorchPeer)}:
        print(f"with PyTorch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    return peers
