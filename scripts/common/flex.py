"""PyTorch's FlexAttention, compiled, as a peer for features that are functions of scores and of masks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from common.feature_cases import Case
from common.function_cases import (
    CAP,
    DILATION,
    FUNCTIONS,
    IMAGE_WIDTH,
    RADIUS,
    WINDOW,
    distance_buckets,
)
from common.measure import Candidate, Gpu, Tensors, taking_turns
from common.peers import TorchPeer

__all__ = ["FlexAttention", "FlexFunctions"]


class FlexAttention(TorchPeer):
    """``torch.compile`` of ``flex_attention`` with PyTorch's own choice of tiles.

    The forward runs without autograd. The backward runs through autograd, on the graph of an untimed forward.
    """

    name = "torch flex"
    features = ("softcap", "alibi", "window1023")

    def __init__(self, gpu: Gpu):
        super().__init__(gpu)
        import torch._dynamo
        import torch._functorch.config
        from torch.nn.attention import flex_attention

        self._module = flex_attention
        # Otherwise a compiled backward may run only once on the tensors that its forward saved.
        torch._functorch.config.donated_buffer = False
        self._case, self._function = None, None

    def supports(self, case: Case, operation: str) -> bool:
        """Returns True if the comparison makes sense."""
        return case.feature in self.features

    def candidate(
        self, case: Case, sets: Sequence[Tensors], options: Sequence[Mapping[str, object]], operation: str
    ) -> Candidate:
        """Binds the operation to rotating inputs. The first one of a case makes the mask and resets the compiler."""
        if case != self._case:
            self._case, self._function = None, None
            self._function, self._case = self._compiled(case, options[0]), case
        torch, function = self.torch, self._function
        inputs = [tuple(map(self.own, case.arrays(tensors))) for tensors in sets]
        if operation == "forward":
            calls = [lambda q=q, k=k, v=v: (function(q, k, v),) for q, k, v, _ in inputs]
            return Candidate(self.name, taking_turns(calls), torch.no_grad)
        calls = []  # of a backward
        for q, k, v, do in inputs:
            leaves = tuple(tensor.detach().requires_grad_() for tensor in (q, k, v))
            with torch.enable_grad():
                o = function(*leaves)
            calls.append(functools.partial(torch.autograd.grad, o, leaves, do, retain_graph=True))
        return Candidate(self.name, taking_turns(calls))

    def _compiled(self, case: Case, options: Mapping[str, object]) -> Callable:
        """Returns a function of q, k and v."""
        torch, seqlen = self.torch, case.problem.seqlen
        torch._dynamo.reset()  # the number of variants of a function that it compiles is limited
        score_mod, visible, batch = self._functions(case, options)
        block_mask = self._module.create_block_mask(visible, batch, None, seqlen, seqlen, device="cuda")
        compiled = torch.compile(self._module.flex_attention, dynamic=False, fullgraph=True)
        return lambda q, k, v: compiled(q, k, v, score_mod=score_mod, block_mask=block_mask)

    def _functions(self, case: Case, options: Mapping[str, object]) -> tuple[Callable | None, Callable, int | None]:
        """Returns the function of scores, that of the mask, and the batch size if the mask depends on the sequence."""
        score_mod = None
        if case.feature == "softcap":
            score_mod = _softcap(self.torch, options["softcap"])
        elif case.feature == "alibi":
            score_mod = _alibi(self.torch.from_dlpack(options["alibi_slopes"]))
        return score_mod, _causal if case.window is None else _windowed(case.window), None


class FlexFunctions(FlexAttention):
    """FlexAttention with the functions of `common.function_cases`, written for PyTorch."""

    features = tuple(FUNCTIONS)

    def _functions(self, case: Case, options: Mapping[str, object]) -> tuple[Callable | None, Callable, int | None]:
        """Returns the same for a function of `FUNCTIONS`."""
        torch, name = self.torch, case.feature
        if FUNCTIONS[name].role == "score_mod":
            arrays = [torch.from_dlpack(array) for array in options["score_args"]]
            if name == "t5_relative":
                longest = case.problem.seqlen
                return _relative(*arrays, torch.from_numpy(distance_buckets(longest)).cuda(), longest), _causal, None
            return _softcap(torch, CAP) if name == "softcap" else _alibi(*arrays), _causal, None
        visible = {"causal": lambda: _causal, "sliding_window": lambda: _windowed(WINDOW), **_MASKS}[name]
        arrays = [torch.from_dlpack(array) for array in options["mask_args"]]
        return None, visible(*arrays), case.problem.batch if arrays else None


def _causal(b, h, i, j):
    return i >= j


def _windowed(left: int) -> Callable:
    def visible(b, h, i, j):
        return (i >= j) & (i - j <= left)

    return visible


def _softcap(torch, cap: float) -> Callable:
    def score_mod(score, b, h, i, j):
        return cap * torch.tanh(score / cap)

    return score_mod


def _alibi(slopes) -> Callable:
    def score_mod(score, b, h, i, j):
        return score + slopes[h] * (j - i)  # where a key is visible, the distance is i - j

    return score_mod


def _relative(table, buckets, longest: int) -> Callable:
    def score_mod(score, b, h, i, j):
        return score + table[buckets[j - i + longest], h]

    return score_mod


def _dilated() -> Callable:
    def visible(b, h, i, j):
        return (i >= j) & (i - j <= DILATION * WINDOW) & ((i - j) % DILATION == 0)

    return visible


def _neighborhood() -> Callable:
    def visible(b, h, i, j):
        rows, columns = i // IMAGE_WIDTH - j // IMAGE_WIDTH, i % IMAGE_WIDTH - j % IMAGE_WIDTH
        return (rows.abs() <= RADIUS) & (columns.abs() <= RADIUS)

    return visible


def _prefix(lengths) -> Callable:
    def visible(b, h, i, j):
        return (i >= j) | (j < lengths[b])

    return visible


def _document(ids) -> Callable:
    def visible(b, h, i, j):
        return ids[b, i] == ids[b, j]

    return visible


#: Functions that take the arrays of a mask and return the mask.
_MASKS = {
    "dilated_window": _dilated, "neighborhood_2d": _neighborhood, "prefix_lm": _prefix, "document": _document,
}  # fmt: skip
