"""PyTorch's FlexAttention, compiled, as a peer for features that are functions of scores and of masks."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from common.feature_cases import Case
from common.function_cases import (
    BLOCK,
    CAP,
    DILATION,
    FIRST,
    FRAME,
    FUNCTIONS,
    IMAGE_WIDTH,
    NEAR,
    RADIUS,
    TILE,
    TILES,
    WINDOW,
    distance_buckets,
)
from common.measure import Candidate, Gpu, Tensors, taking_turns
from common.peers import TorchPeer

__all__ = ["FUNCTION_PEERS", "FlexAttention", "FlexFlash", "FlexFunctions"]


class FlexAttention(TorchPeer):
    """``torch.compile`` of ``flex_attention`` with PyTorch's own choice of tiles.

    The forward runs without autograd. The backward runs through autograd, on the graph of an untimed forward.
    """

    name = "torch flex"
    features = ("softcap", "alibi", "window1023")
    #: Options of the call, such as its backend.
    kernel_options: ClassVar[Mapping[str, object] | None] = None
    #: The case of the last reset of the compiler, by any of these peers: a reset drops what others have compiled.
    _latest: ClassVar[Case | None] = None

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
        if case != FlexAttention._latest:
            torch._dynamo.reset()  # the number of variants of a function that it compiles is limited
            FlexAttention._latest = case
        score_mod, visible, batch = self._functions(case, options)
        block_mask = self._module.create_block_mask(visible, batch, None, seqlen, seqlen, device="cuda")
        compiled = torch.compile(self._module.flex_attention, dynamic=False, fullgraph=True)
        how = {"score_mod": score_mod, "block_mask": block_mask, "kernel_options": self.kernel_options}
        return lambda q, k, v: compiled(q, k, v, **how)

    def _functions(self, case: Case, options: Mapping[str, object]) -> tuple[Callable | None, Callable, int | None]:
        """Returns the function of scores, that of the mask, and the batch size if the mask depends on the sequence."""
        score_mod = None
        if case.feature == "softcap":
            score_mod = _softcap(self.torch, options["softcap"])
        elif case.feature == "alibi":
            score_mod = _alibi(self.torch.from_dlpack(options["alibi_slopes"]))
        return score_mod, _causal if case.window is None else _windowed(case.window), None


class FlexFlash(FlexAttention):
    """The same on the kernels of FlashAttention-4, of the package flash-attn-4. They refuse some functions."""

    name = "torch flex flash"
    kernel_options: ClassVar = {"BACKEND": "FLASH"}

    def __init__(self, gpu: Gpu):
        super().__init__(gpu)
        import flash_attn.cute  # noqa: F401

        print(f"with FlexAttention on flash-attn-4 {importlib.metadata.version('flash-attn-4')}")


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
        arrays = [torch.from_dlpack(array) for array in options["mask_args"]]
        return None, _MASKS[name](*arrays), case.problem.batch if arrays else None


class FlexFlashFunctions(FlexFlash, FlexFunctions):
    """The functions of `common.function_cases` on the kernels of FlashAttention-4."""


#: The peers of the section functions.
FUNCTION_PEERS = {"flex": FlexFunctions, "flex_flash": FlexFlashFunctions}


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
        return _is_near(rows, RADIUS) & _is_near(columns, RADIUS)

    return visible


def _prefix(lengths) -> Callable:
    def visible(b, h, i, j):
        return (i >= j) | (j < lengths[b])

    return visible


def _document(ids) -> Callable:
    number = _flat(ids)

    def visible(b, h, i, j):
        return number(b, i) == number(b, j)

    return visible


def _tree(ends) -> Callable:
    end = _flat(ends)

    def visible(b, h, i, j):
        return (i >= j) & (i < end(b, j))

    return visible


def _block_diffusion(half) -> Callable:
    half = int(half[0])

    def visible(b, h, i, j):
        block_i, block_j = i % half // BLOCK, j % half // BLOCK
        noisy = (i < half) & (j < half) & (block_i == block_j)
        return noisy | ((j >= half) & ((block_j < block_i) | ((i >= half) & (block_i == block_j))))

    return visible


def _first_and_window() -> Callable:
    def visible(b, h, i, j):
        return (i >= j) & ((i - j <= WINDOW) | (j < FIRST))

    return visible


def _frames() -> Callable:
    def visible(b, h, i, j):
        return _is_near(i // FRAME - j // FRAME, 1)

    return visible


def _tiles_of_tokens() -> Callable:
    def visible(b, h, i, j):
        i, j = i // TILE, j // TILE
        times, rows = i // TILES**2 - j // TILES**2, i // TILES % TILES - j // TILES % TILES
        return _is_near(times, 1) & _is_near(rows, 1) & _is_near(i % TILES - j % TILES, 1)

    return visible


def _shared_prompt(answers) -> Callable:
    answer = _flat(answers)

    def visible(b, h, i, j):
        return (i >= j) & ((answer(b, j) == 0) | (answer(b, i) == answer(b, j)))

    return visible


def _causal_document(ids) -> Callable:
    number = _flat(ids)

    def visible(b, h, i, j):
        return (i >= j) & (number(b, i) == number(b, j))

    return visible


def _global_and_near(marks) -> Callable:
    mark = _flat(marks)

    def visible(b, h, i, j):
        return (mark(b, i) > 0) | (mark(b, j) > 0) | _is_near(i - j, NEAR)

    return visible


def _is_near(difference, distance: int):
    return (difference <= distance) & (difference >= -distance)


def _flat(numbers) -> Callable:
    """Returns a reader of the numbers of tokens with one index: the FLASH backend is slow with two."""
    flat, length = numbers.reshape(-1), numbers.shape[1]
    return lambda b, i: flat[b * length + i]


#: Functions that take the arrays of a mask and return the mask.
_MASKS = {
    "causal": lambda: _causal, "sliding_window": lambda: _windowed(WINDOW), "dilated_window": _dilated,
    "neighborhood_2d": _neighborhood, "prefix_lm": _prefix, "document": _document, "tree": _tree,
    "block_diffusion": _block_diffusion, "first_and_window": _first_and_window, "frames": _frames,
    "tiles_of_tokens": _tiles_of_tokens, "shared_prompt": _shared_prompt, "causal_document": _causal_document,
    "global_and_near": _global_and_near,
}  # fmt: skip
