"""PyTorch's attention operators as peers for the features that they have.

Masks become biases of 0 and -inf in the dtype of q, outside of the timing: the operators take no other masks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from common.feature_cases import FEATURES, Case
from common.measure import Candidate, Tensors, taking_turns
from common.peers import TorchPeer

__all__ = ["CudnnFeatures", "EfficientFeatures", "FlashFeatures"]

_SCORES = tuple(name for name, feature in FEATURES.items() if feature.of_scores and not feature.gradients)
_GRADIENTS = tuple(name for name, feature in FEATURES.items() if "dbias" in feature.gradients)


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
        """Returns the bias or mask of a call, as (batch or 1, heads or 1, seqlen or 1, seqlen), or None."""
        if "bias" in options:
            return self.tensor(options["bias"])
        visible = options.get("mask")
        if "key_padding_mask" in options:
            visible = options["key_padding_mask"][:, None, None]
        if visible is None:
            return None
        hidden = self.xp.where(visible, self.xp.float32(0), self.xp.float32("-inf"))
        return self.tensor(hidden.astype(case.problem.numpy_dtype))


class FlashFeatures(_FeatureOperator):
    """FlashAttention-2 as PyTorch ships it, below `scaled_dot_product_attention`: windows and packed sequences, too.

    Its backward has no argument for ALiBi's slopes.
    """

    name = "torch flash"
    features = ("dropout", "packed", *(name for name, feature in FEATURES.items() if feature.window is not None))
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
        expanded = None if bias is None else bias.expand(batch, heads, seqlen, seqlen)
        wanted = [True, True, True, "dbias" in case.gradients]

        def forward() -> tuple:
            return aten._scaled_dot_product_efficient_attention(*inputs, expanded, True, dropout, True)

        def backward(do, saved: tuple) -> tuple:
            o, lse, seed, offset = saved
            *gradients, dbias = aten._scaled_dot_product_efficient_attention_backward(
                do, *inputs, expanded, o, lse, seed, offset, dropout, wanted, True
            )
            return (*gradients, dbias.sum_to_size(bias.shape)) if wanted[3] else tuple(gradients)

        return forward, backward
