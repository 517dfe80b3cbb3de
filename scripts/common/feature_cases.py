"""The cases of scripts/features.py: features at the sizes of the benchmark, and the kernels that they take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from common.checkout import PACKED
from common.measure import Problem, Tensors, flops, visible_pairs

from fa2cupy.families.choice import choose
from fa2cupy.families.device import DeviceInfo
from fa2cupy.jit.spec import KernelSpec
from fa2cupy.plan.plans import plan_backward, plan_forward
from fa2cupy.problem.attention import AttentionProblem
from fa2cupy.problem.checks import problem_from_arrays, with_band
from fa2cupy.problem.options import CallOptions
from fa2cupy.problem.strides import (
    AnyStrides,
    argument_layouts,
    contiguous_score_strides,
    feature_strides,
    is_full,
)
from fa2cupy.testing import make_inputs

__all__ = ["FEATURES", "HEAD_DIMS", "SEQLENS", "Case", "Kernels", "all_cases"]

DTYPE, TOKENS, MODEL_DIM = "bfloat16", 16384, 2048
HEAD_DIMS = (64, 128)
SEQLENS = (2048, 16384)
#: Longest sequences with arrays as large as the scores, and the most bytes of such an array without broadcast axes.
LONGEST_SCORES, MOST_SCORE_BYTES = 2048, 2**30
#: Rows, heads and sequences of the cases that are compared with float64.
SMALL_TOKENS, SMALL_HEADS, SMALL_BATCH = 512, 2, 2

Options = dict[str, object]


class Feature(NamedTuple):
    """A feature alone, beside the causal mask.

    Attributes
    ----------
    options : callable
        The keywords, from an array module, a problem of any size and a seed.
    small : dict
        Keywords that differ on a small problem, so that the feature matters there.
    window : int or None
        Keys that are visible to the left of the diagonal.
    gradients : tuple of str
        Gradients of `fa2cupy.backward` besides dq, dk and dv.
    only_backward : bool
        True if the forward is that of another feature.
    of_scores : bool
        True if there is an array as large as the scores of one head or sequence.
    of_all_scores : bool
        True if there is an array as large as the scores of all heads and sequences.
    is_random : bool
        True if results depend on the generator of random numbers, which differs between implementations.
    """

    options: Callable[[object, Problem, int], Options] = lambda xp, problem, seed: {}
    small: Mapping[str, object] = {}
    window: int | None = None
    gradients: tuple[str, ...] = ()
    only_backward: bool = False
    of_scores: bool = False
    of_all_scores: bool = False
    is_random: bool = False


def _window(left: int) -> Feature:
    return Feature(lambda xp, problem, seed: {"window": (left, 0)}, {"window": (min(left, 200), 0)}, window=left)


def _slopes(xp, problem: Problem, seed: int) -> Options:
    """Returns 2^(-8 h / num_heads), h from 1 (Press et al. 2022)."""
    heads = np.arange(1, problem.num_heads + 1)
    return {"alibi_slopes": xp.asarray(2.0 ** (-8 * heads / problem.num_heads), "float32")}


def _padding(xp, problem: Problem, seed: int) -> Options:
    """Returns the mask of sequences that have at least three quarters of the length."""
    lengths = problem.seqlen - problem.seqlen * (1 + np.arange(problem.batch)) // (4 * problem.batch)
    return {"key_padding_mask": xp.asarray(np.arange(problem.seqlen) < lengths[:, None])}


def _mask(xp, problem: Problem, seed: int) -> Options:
    """Returns a mask of nine in ten keys for all heads; each query sees its own, as other implementations need."""
    shape = (problem.batch, 1, problem.seqlen, problem.seqlen)
    visible = xp.random.RandomState(seed).random_sample(shape) < 0.9
    visible |= xp.eye(problem.seqlen, dtype=bool)
    return {"mask": visible}


def _bias(by_batch: bool, by_head: bool) -> Callable[[object, Problem, int], Options]:
    """Returns a function that draws a bias, which is broadcast along batch or heads if that flag is False."""

    def options(xp, problem: Problem, seed: int) -> Options:
        leading = (problem.batch if by_batch else 1, problem.num_heads if by_head else 1)
        drawn = xp.random.RandomState(seed).standard_normal((*leading, problem.seqlen, problem.seqlen))
        return {"bias": drawn.astype("float32").astype(problem.numpy_dtype)}

    return options


def _sink(xp, problem: Problem, seed: int) -> Options:
    return {"sink": xp.asarray(np.linspace(-1, 2, problem.num_heads), "float32")}


def _offsets(problem: Problem) -> np.ndarray:
    """Returns the offsets of packed sequences: the lengths of `PACKED`, scaled to the number of tokens."""
    ends = np.cumsum((0, *PACKED)) * problem.batch * problem.seqlen
    return (ends // sum(PACKED)).astype("int32")


def _packed(xp, problem: Problem, seed: int) -> Options:
    offsets = _offsets(problem)
    longest = int(np.diff(offsets).max())
    lengths = {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return {"cu_seqlens_q": xp.asarray(offsets), "cu_seqlens_k": xp.asarray(offsets), **lengths}


_BIASES = {
    "": (_bias(False, True), {"of_scores": True}),
    "_batch": (_bias(True, False), {"of_scores": True}),
    "_full": (_bias(True, True), {"of_scores": True, "of_all_scores": True}),
}

FEATURES = {
    "plain": Feature(),
    "window127": _window(127),
    "window1023": _window(1023),
    "window4095": _window(4095),
    "softcap": Feature(lambda xp, problem, seed: {"softcap": 30.0}, {"softcap": 2.0}),
    "alibi": Feature(_slopes),
    "padding": Feature(_padding),
    "mask": Feature(_mask, of_scores=True),
    **{f"bias{kind}": Feature(options, **sizes) for kind, (options, sizes) in _BIASES.items()},
    **{
        f"dbias{kind}": Feature(options, gradients=("dbias",), only_backward=True, **sizes)
        for kind, (options, sizes) in _BIASES.items()
    },
    "sink": Feature(_sink, gradients=("dsink",)),
    "dropout": Feature(lambda xp, problem, seed: {"dropout_p": 0.1, "seed": 1 + seed}, is_random=True),
    "packed": Feature(_packed),
}


class Kernels(NamedTuple):
    """The choices of a call: method (empty in a forward), splits, the families of its kernels in words, and kernels."""

    method: str
    num_splits: int
    family: str
    specs: tuple[KernelSpec, ...]


@dataclass(frozen=True)
class Case:
    """A feature at one size. Packed sequences have as many tokens as the batch of equal lengths in `problem`."""

    feature: str
    problem: Problem
    small: bool = False

    @property
    def operations(self) -> tuple[str, ...]:
        """The measured operations."""
        return ("backward",) if FEATURES[self.feature].only_backward else ("forward", "backward")

    @property
    def gradients(self) -> tuple[str, ...]:
        """Gradients of a backward besides dq, dk and dv."""
        return FEATURES[self.feature].gradients

    @property
    def is_random(self) -> bool:
        """True if implementations draw different elements."""
        return FEATURES[self.feature].is_random

    @property
    def window(self) -> int | None:
        """Keys that are visible to the left of the diagonal."""
        return FEATURES[self.feature].window

    @property
    def small_tokens(self) -> int:
        """Rows of the case that is compared with float64."""
        return SMALL_TOKENS

    @property
    def plain(self) -> Case:
        """The plain call that it is compared to."""
        return dataclasses.replace(self, feature="plain")

    def options(self, xp, seed: int) -> Options:
        """Returns the keywords of the feature, causal among them."""
        feature = FEATURES[self.feature]
        changed = feature.small if self.small else {}
        return {"causal": self.problem.causal, **feature.options(xp, self.problem, seed), **changed}

    def arrays(self, tensors: Tensors) -> tuple:
        """Returns q, k, v and do as the call takes them."""
        shape = self.problem.shape
        if self.feature == "packed":
            shape = (shape[0] * shape[1], *shape[2:])
        return tuple(array.reshape(shape) for array in (tensors.q, tensors.k, tensors.v, tensors.do))

    def flops(self, operation: str) -> float:
        """Returns the floating-point operations on pairs that causal masks, windows and packed sequences leave."""
        problem, left = self.problem, self.window
        if self.feature == "packed":
            pairs = float((np.diff(_offsets(problem)).astype("float64") ** 2).sum()) / 2
        elif left is None:
            return problem.flops(operation)
        else:
            pairs = problem.batch * visible_pairs(problem.seqlen, left)
        return flops(operation, problem.num_heads * pairs, problem.head_dim)

    def shrunk(self) -> Case:
        """Returns the case on few tokens and heads, for float64. With the same method its kernels are the same."""
        batch = self.problem.batch if self.feature == "packed" else SMALL_BATCH
        sizes = {"batch": batch, "seqlen": max(1, self.small_tokens // batch), "num_heads": SMALL_HEADS}
        return dataclasses.replace(self, problem=dataclasses.replace(self.problem, **sizes), small=True)

    def inputs(self, xp) -> tuple:
        """Draws q, k, v and do, the same for each array module."""
        problem = self.problem
        sizes = {"seqlen_q": problem.seqlen, "head_dim": problem.head_dim}
        drawn = make_inputs(problem.dtype, batch=problem.batch, num_heads=problem.num_heads, **sizes, xp=xp)
        return self.arrays(Tensors(*drawn))

    def kernels(self, device: DeviceInfo, operation: str, family: str | None = None, **how) -> Kernels:
        """Returns the choices and the kernels of a call, without a call. `how` are options such as ``deterministic``.

        Raises
        ------
        UnsupportedProblemError
            The family does not have the feature.
        """
        small = self.shrunk()
        options = small.options(np, 0)
        attention = with_band(problem_from_arrays(*small.inputs(np)[:3], **options))
        strides = _strides(attention) | feature_strides(options) | argument_layouts(options)
        if operation == "backward":
            returned = dict.fromkeys(self.gradients, True)
            if "dbias" in returned:
                strides["dbias"] = contiguous_score_strides(options["bias"].shape)
                returned["full_dbias"] = is_full(options["bias"].shape, attention.score_shape)
            attention = attention.with_settings(dataclasses.replace(attention.settings, **returned))
        large = self._as_large(attention)
        asked = (large, device, strides | _strides(large), CallOptions(family=family, **how))
        choice = choose(operation, *asked, is_launched=False)
        if operation == "forward":
            plan = plan_forward(attention, device, strides, choice)
        else:
            plan = plan_backward(attention, device, strides, choice)
        specs = tuple(stage.spec for stage in plan.stages)
        return Kernels(
            choice.method or "", max(choice.num_splits.values(), default=1), choice.family.public_name, specs
        )

    def _as_large(self, attention: AttentionProblem) -> AttentionProblem:
        """Returns the shrunk problem with the sizes and the window of this one."""
        problem, batch, seqlen = self.problem, self.problem.batch, self.problem.seqlen
        if self.feature == "packed":
            longest = int(np.diff(_offsets(problem)).max())
            features = dataclasses.replace(attention.settings, max_seqlen_q=longest, max_seqlen_k=longest)
            batch, seqlen = 1, batch * seqlen
        else:
            window = attention.settings.window if self.window is None else (self.window, 0)
            features = dataclasses.replace(attention.settings, window=window)
        sizes = {"batch": batch, "seqlen_q": seqlen, "seqlen_k": seqlen}
        sizes |= {"num_heads": problem.num_heads, "num_heads_kv": problem.num_heads_kv or problem.num_heads}
        return dataclasses.replace(attention, **sizes, settings=features)

    def __str__(self) -> str:
        return f"{self.feature} {self.problem}"


def _strides(attention: AttentionProblem) -> dict[str, AnyStrides]:
    """Returns the strides of tensors in C order."""
    rows = attention.kernel_strides(attention.q_shape)
    return dict.fromkeys(("q", "k", "v", "o", "dout", "dq", "dk", "dv"), rows)


def all_cases(features: Sequence[str], head_dims: Sequence[int], seqlens: Sequence[int]) -> Iterator[Case]:
    """Yields the cases of each feature, those that share their inputs in succession."""
    for head_dim in head_dims:
        for seqlen in seqlens:
            problem = Problem(DTYPE, head_dim, seqlen, TOKENS // seqlen, MODEL_DIM // head_dim, True)
            for name in features:
                fits = (FEATURES[name].window or 0) + 1 < seqlen
                fits = fits and (seqlen <= LONGEST_SCORES or not FEATURES[name].of_scores)
                if fits and name != "packed" and not FEATURES[name].of_all_scores:
                    yield Case(name, problem)
            score_bytes = problem.num_heads * seqlen**2 * problem.numpy_dtype.itemsize
            fewer = dataclasses.replace(problem, batch=max(1, min(problem.batch, MOST_SCORE_BYTES // score_bytes)))
            for name in features:
                if FEATURES[name].of_all_scores and seqlen <= LONGEST_SCORES:
                    yield Case(name, fewer)
        if "packed" in features:
            seqlen = TOKENS // len(PACKED)
            problem = Problem(DTYPE, head_dim, seqlen, len(PACKED), MODEL_DIM // head_dim, True)
            yield Case("plain", problem)
            yield Case("packed", problem)
