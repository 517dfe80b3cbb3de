"""PyTorch's attention operators as peers for the features that they have.

Masks become biases of 0 and -inf in the dtype of q, outside of the timing: the operators take no other masks.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence

from common.biases import BIAS, BOTH, PLAIN, BiasCase
from common.feature_cases import FEATURES, Case
from common.measure import DETERMINISTIC, Candidate, Gpu, Tensors, taking_turns
from common.peers import FlashAttention4, TorchPeer

__all__ = ["BIAS_PEERS", "CudnnFeatures", "EfficientFeatures", "Flash4Features", "FlashFeatures"]

_SCORES = tuple(name for name, feature in FEATURES.items() if feature.of_scores and not feature.gradients)
_GRADIENTS = tuple(name for name, feature in FEATURES.items() if "dbias" in feature.gradients)
_WINDOWS = tuple(name for name, feature in FEATURES.items() if feature.window is not None)


class _FeatureOperator(TorchPeer):
    """Common part: a subclass binds the options of a case to the operators of a forward and of a backward."""

    features: tuple[str, ...]
    only_forward: tuple[str, ...] = ()

    def supports(self, case: Case, operation: str) -> bool:
        """Returns True if the operators have the feature."""
        return case.feature in self.features or (operation == "forward" and case.feature in self.only_forward)

    def candidate(
        self, case: Case, sets: Sequence[Tensors], options: Sequence[Mapping[str, object]], operation: str
    ) -> Candidate:
        """Binds the operation to rotating inputs. The forward of a backward is computed here."""
        calls = []
        for tensors, keywords in zip(sets, options, strict=True):
            q, k, v, do = map(self.own, case.arrays(tensors))
            forward, backward = self.operators(case, keywords, (q, k, v))
            calls.append(forward if operation == "forward" else functools.partial(backward, do, forward()))
        return Candidate(self.name, taking_turns(calls))

    def operators(self, case: Case, options: Mapping[str, object], inputs: tuple) -> tuple[Callable, Callable]:
        """Returns a forward without arguments, and a backward of do and the results of the forward."""
        raise NotImplementedError

    def _additive(self, case: Case, options: Mapping[str, object]):
        """Returns the bias, the mask or the sum of both, as (batch or 1, heads or 1, seqlen or 1, seqlen), or None."""
        bias, visible = options.get("bias"), options.get("mask")
        if "key_padding_mask" in options:
            visible = options["key_padding_mask"][:, None, None]
        if visible is None:
            return None if bias is None else self.tensor(bias)
        hidden = self.xp.where(visible, self.xp.float32(0), self.xp.float32("-inf"))
        if bias is not None:
            hidden = hidden + bias.astype("float32")
        return self.tensor(hidden.astype(case.problem.numpy_dtype, copy=False))


class FlashFeatures(_FeatureOperator):
    """FlashAttention-2 as PyTorch ships it, below `scaled_dot_product_attention`: windows and packed sequences, too.

    Its backward has no argument for ALiBi's slopes.
    """

    name = "torch flash"
    features = ("dropout", "packed", *_WINDOWS)
    only_forward = ("alibi",)

    def own(self, array):
        """Returns the array as a tensor: (batch, seqlen, heads, head_dim) or, packed, without the batch."""
        return self.tensor(array)

    def arrays(self, operation: str, results: tuple) -> tuple:
        """Does the same as `Fa2cupy.arrays`."""
        return tuple(map(self.array, results[:1] if operation == "forward" else results))

    def operators(self, case: Case, options: Mapping[str, object], inputs: tuple) -> tuple[Callable, Callable]:
        """Returns the forward and the backward of a case."""
        aten, longest = self.torch.ops.aten, options.get("max_seqlen_q", case.problem.seqlen)
        offsets = self.tensor(options["cu_seqlens_q"]) if case.feature == "packed" else None
        dropout, lengths = options.get("dropout_p", 0.0), (offsets, offsets, longest, longest)
        window = {} if case.window is None else {"window_size_left": case.window, "window_size_right": 0}
        slopes = {"alibi_slopes": self.tensor(options["alibi_slopes"])} if case.feature == "alibi" else {}

        def forward() -> tuple:
            return aten._flash_attention_forward(*inputs, *lengths, dropout, True, False, **window, **slopes)

        def backward(do, saved: tuple) -> tuple:
            o, lse, *generator, _ = saved
            return aten._flash_attention_backward(do, *inputs, o, lse, *lengths, dropout, True, *generator, **window)

        return forward, backward


class Flash4Features(_FeatureOperator, FlashAttention4):
    """FlashAttention-4 with windows."""

    features = _WINDOWS

    def operators(self, case: Case, options: Mapping[str, object], inputs: tuple) -> tuple[Callable, Callable]:
        """Returns the forward and the backward of a case."""
        window = {"window_size_left": case.window, "window_size_right": 0}
        forward = functools.partial(self.forward, True, *inputs, **window)
        return forward, lambda do, saved: self.backward(True, *inputs, do, saved, **window)


class CudnnFeatures(_FeatureOperator):
    """cuDNN's attention through PyTorch, which does not ask it for the gradient of a bias."""

    name = "torch cudnn"
    features = ("dropout", "padding", *_SCORES)

    def operators(self, case: Case, options: Mapping[str, object], inputs: tuple) -> tuple[Callable, Callable]:
        """Returns the forward and the backward of a case."""
        aten, bias, dropout = self.torch.ops.aten, self._additive(case, options), options.get("dropout_p", 0.0)

        def forward() -> tuple:
            return aten._scaled_dot_product_cudnn_attention(*inputs, bias, True, dropout, True, False)

        def backward(do, saved: tuple) -> tuple:
            o, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = saved
            return aten._scaled_dot_product_cudnn_attention_backward(
                do, *inputs, o, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout, True
            )

        return forward, backward


class EfficientFeatures(_FeatureOperator):
    """xFormers' memory-efficient attention in PyTorch, the only one of the three with the gradient of a bias.

    It takes a bias that is expanded to all heads and sequences and returns the gradient of that. The sum over broadcast
    axes is timed, as in ours.
    """

    name = "torch efficient"
    features = ("dropout", "padding", *_SCORES, *_GRADIENTS)

    def arrays(self, operation: str, results: tuple) -> tuple:
        """Does the same as `Fa2cupy.arrays`, and adds dbias if it was computed."""
        return (*super().arrays(operation, results), *map(self.array, results[3:] if operation != "forward" else ()))

    def operators(self, case: Case, options: Mapping[str, object], inputs: tuple) -> tuple[Callable, Callable]:
        """Returns the forward and the backward of a case."""
        aten, bias, dropout = self.torch.ops.aten, self._additive(case, options), options.get("dropout_p", 0.0)
        batch, seqlen, heads, _ = case.problem.shape
        expanded, causal = None if bias is None else bias.expand(batch, heads, seqlen, seqlen), case.problem.causal
        wanted = [True, True, True, "dbias" in case.gradients]

        def forward() -> tuple:
            return aten._scaled_dot_product_efficient_attention(*inputs, expanded, True, dropout, causal)

        def backward(do, saved: tuple) -> tuple:
            o, lse, seed, offset = saved
            *gradients, dbias = aten._scaled_dot_product_efficient_attention_backward(
                do, *inputs, expanded, o, lse, seed, offset, dropout, wanted, causal
            )
            return (*gradients, dbias.sum_to_size(options["bias"].shape)) if wanted[3] else tuple(gradients)

        return forward, backward


class EfficientBiases(EfficientFeatures):
    """The memory-efficient operator for the section biases.

    A mask and a bias are one array as large as all scores, which is made outside of the timing.
    """

    features = (PLAIN, BIAS, BOTH)

    def candidate(
        self, case: BiasCase, sets: Sequence[Tensors], options: Sequence[Mapping[str, object]], operation: str
    ) -> Candidate:
        """Does the same as for features, in PyTorch's deterministic mode if that is the operation."""
        found = super().candidate(case, sets, options, operation)
        return dataclasses.replace(found, mode=self.deterministic) if operation == DETERMINISTIC else found


class WrittenOutBiases(_FeatureOperator):
    """Windows with a bias as vision models write them in PyTorch, with the same products and kernels as autograd's.

    q, k, v and do are contiguous (window, head, row, column) before the timing. P is kept for a backward.
    """

    name = "torch written out"
    features = (PLAIN, BIAS)

    def supports(self, case: BiasCase, operation: str) -> bool:
        """Returns True for windows, whose score matrices are small."""
        return case.work == "windows" and super().supports(case, operation)

    def own(self, array):
        """Returns CuPy's array as a contiguous tensor."""
        return super().own(array).contiguous()

    def arrays(self, operation: str, results: tuple) -> tuple:
        """Does the same as `Fa2cupy.arrays`, and adds dbias if it was computed."""
        return (*super().arrays(operation, results), *map(self.array, results[3:] if operation != "forward" else ()))

    def operators(self, case: BiasCase, options: Mapping[str, object], inputs: tuple) -> tuple[Callable, Callable]:
        """Returns the forward and the backward of a case."""
        torch, bias, (q, k, v) = self.torch, self._additive(case, options), inputs
        scale = case.problem.head_dim**-0.5

        def forward() -> tuple:
            scores = torch.matmul(q * scale, k.transpose(2, 3))
            p = torch.softmax(scores if bias is None else scores + bias, -1)
            return torch.matmul(p, v), p

        def backward(do, saved: tuple) -> tuple:
            p = saved[1]
            ds = torch._softmax_backward_data(torch.matmul(do, v.transpose(2, 3)), p, -1, p.dtype)
            dq, dk = torch.matmul(ds, k) * scale, torch.matmul(ds.transpose(2, 3), q) * scale
            dbias = () if bias is None else (ds.sum_to_size(bias.shape),)
            return dq, dk, torch.matmul(p.transpose(2, 3), do), *dbias

        return forward, backward


class TriangleAttention(TorchPeer):
    """Triangle attention of cuEquivariance, below its autograd function.

    It takes contiguous (1, row, head, query, column), a bias in float32 and a mask for each row: copies are made
    outside of the timing. It has no deterministic mode: beside ours is its ordinary backward.
    """

    def __init__(self, gpu: Gpu):
        super().__init__(gpu)
        import cuequivariance_ops_torch
        import cuequivariance_torch

        version = importlib.metadata.version("cuequivariance_torch")
        self.name = f"cuequivariance {version}"
        self._forward = cuequivariance_torch.triangle_attention
        print(f"with cuequivariance_torch {version}, cuequivariance_ops_torch {cuequivariance_ops_torch.__version__}")

    def supports(self, case: BiasCase, operation: str) -> bool:
        """Returns True for a bias that all sequences share."""
        return case.is_shared and case.feature != PLAIN

    def own(self, array):
        """Returns CuPy's array as a contiguous tensor."""
        return self.tensor(self.xp.ascontiguousarray(array.swapaxes(1, 2))[None])

    def arrays(self, operation: str, results: tuple) -> tuple:
        """Does the same as `Fa2cupy.arrays`, and adds dbias."""
        some = results[:1] if operation == "forward" else results[:3]
        more = () if operation == "forward" else (self.array(results[3][0]),)
        return (*(self.array(tensor[0].transpose(1, 2)) for tensor in some), *more)

    def candidate(
        self, case: BiasCase, sets: Sequence[Tensors], options: Sequence[Mapping[str, object]], operation: str
    ) -> Candidate:
        """Binds the operation to rotating inputs. The forward of a backward is computed here."""
        operator, scale, calls = self.torch.ops.cuequivariance.triangle_attention_bwd, case.problem.head_dim**-0.5, []
        for tensors, keywords in zip(sets, options, strict=True):
            q, k, v, do = map(self.own, case.arrays(tensors))
            bias = self.tensor(keywords["bias"].astype("float32", copy=False)[None])
            mask = None
            if "key_padding_mask" in keywords:  # as bytes, which every version of DLPack knows
                visible = self.tensor(keywords["key_padding_mask"].view("uint8")).view(self.torch.bool)
                mask = visible[None, :, None, None]
            forward = functools.partial(self._forward, q, k, v, bias, mask, scale, True)
            if operation == "forward":
                calls.append(forward)
            else:
                o, lse, _ = forward()
                calls.append(functools.partial(operator, do, o, q, k, v, bias, mask, None, lse, scale))
        return Candidate(self.name, taking_turns(calls))


#: The peers of the section biases.
BIAS_PEERS = {"efficient": EfficientBiases, "cuequivariance": TriangleAttention, "written_out": WrittenOutBiases}
