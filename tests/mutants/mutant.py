"""A mutant, the errors that can catch one, and the call that runs it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import ptxsim
import pytest
from support.fake_cupy import place
from support.fake_gpu import backward, forward
from support.feature_cases import extras, gradient_names
from support.simulated_problems import (
    FEW_MULTIPROCESSORS,
    HOPPER,
    check_dq,
    dq_on_hopper,
    draw,
    family_of,
    growing,
    leave_out,
    small_tiles,
)
from support.simulator import simulated_gpu
from support.strided_arrays import packed

from fa2cupy import TileConfig, reference
from fa2cupy.families.operations import ONE_TILE
from fa2cupy.jit.spec import KernelSpec
from fa2cupy.testing import Expectation

from .problems import ONE_SEQUENCE, Problem

#: The errors that catch a mutant: the exception and a pattern of its text.
CATCHES = {
    "race": (ptxsim.PtxError, "shared memory race"),
    "blocks": (ptxsim.PtxError, "global memory race"),
    "bounds": (ptxsim.PtxError, "is out of bounds: at offset"),
    "shared bounds": (ptxsim.PtxError, "shared access out of bounds"),
    "proxy": (ptxsim.PtxError, "without fence.proxy.async"),
    "in flight": (ptxsim.PtxError, "of an unfinished wgmma is accessed"),
    "ends": (ptxsim.PtxError, "the thread ends with a bulk copy from shared memory in flight"),
    "init": (ptxsim.PtxError, "is not initialised|before its initialisation"),
    "unread": (ptxsim.PtxError, "the block ends with a TMA load in flight"),
    "lanes": (ptxsim.PtxError, "through the async proxy by lane 0, without __syncwarp"),
    "init fence": (ptxsim.PtxError, "without fence.mbarrier_init"),
    "wgmma fence": (ptxsim.PtxError, "accessed before it without wgmma.fence"),
    "uninitialised": (ptxsim.PtxError, "uninitialised"),
    "deadlock": (ptxsim.PtxError, "deadlock"),
    "unwritten": (AssertionError, "elements of .* are unwritten"),
    "stray": (AssertionError, "between the rows of .* are written"),
    "input": (AssertionError, "is an input, and was written"),
    "counter": (AssertionError, "tile counter is left at"),
    "not zero": (AssertionError, "are not left zero"),
    "numbers": (AssertionError, "% of the allowed"),
    "misaligned": (ptxsim.PtxError, "misaligned global access"),
    "root mean square": (AssertionError, "root mean square .* % of the allowed"),
}


def replace_once(spec: KernelSpec, text: str, old: str, new: str) -> str:
    """Returns the source of a kernel with a text replaced that must occur in it once."""
    if text.count(old) != 1:  # an AssertionError could count as a caught mutant
        raise ValueError(f"{old!r} occurs {text.count(old)} times in the source of {spec}")
    return text.replace(old, new)


@dataclass(frozen=True)
class Mutant:
    """A kernel, a change of its source, and the error that must catch the change."""

    name: str
    operation: str
    old: str
    new: str
    caught_by: str
    problem: Problem = ONE_SEQUENCE
    of_fallback: bool = False

    def __call__(self, spec: KernelSpec, text: str) -> str:
        """Returns the source, patched if it is this kernel's."""
        if spec.operation != self.operation or spec.is_fallback != self.of_fallback:
            return text
        return replace_once(spec, text, self.old, self.new)


def of_key_tiles(operation: str) -> str:
    """Returns the method of a kernel that computes all gradients."""
    return "one_tile" if operation in ONE_TILE else "single_pass"


def with_one_tile(config: dict | None, operation: str) -> dict | None:
    """Returns the tiles of a call, with a small one for the kernel of `one_tile` that callers choose tiles of."""
    return {**config, operation: TileConfig(32, 32, 2)} if operation == "backward_one_tile" else config


def run(operation: str, problem: Problem, patch: Mutant | None = None) -> None:
    """Launches the kernel by a call, on inputs that no other kernel has touched, and checks its results."""
    sizes = {"batch": problem.batch, "head_dim_v": problem.head_dim_v}
    inputs = draw(problem.dtype, problem.lengths, problem.head_dim, problem.heads, **sizes)
    if problem.growing:
        growing(inputs, slice(0, 1))
    inputs = problem.scores(inputs)
    if problem.rows_ahead:
        inputs = tuple(place(x[0]) for x in inputs)
    q, k, v, do = (
        packed(x) if name == problem.packed else x for name, x in zip(("q", "k", "v", "do"), inputs, strict=True)
    )
    device = problem.device or (FEW_MULTIPROCESSORS if problem.few_multiprocessors else HOPPER)
    asked = {"causal": problem.causal, **problem.features, **problem.offsets}
    expected = Expectation(q, k, v, do, **asked)
    options = {
        **asked,
        "config": small_tiles(problem.dtype, max(problem.head_dim, problem.head_dim_v or 0)),
        "family": family_of(problem.dtype),
        "num_splits": problem.num_splits,
    }
    if problem.tile and not problem.family:
        options["config"] |= dict.fromkeys(("backward", "backward_dkdv"), problem.tile)
    reads = {"convert_dq": "backward", "sum_dkdv": "backward_dkdv", "merge_forward": "forward"}
    tiled = reads.get(operation, operation)
    if problem.family:
        options |= {"config": {tiled: problem.tile}, "family": problem.family}
    of_forward = operation in ("forward", "merge_forward", "split_inputs")
    if problem.precision:
        options |= {"config": None, "family": None, "precision": problem.precision}
    if problem.hopper_tile:  # the family may lack the other kernel of a method
        options["config"] = {tiled: problem.hopper_tile}
        options["family"] = "sm90" if of_forward else None
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        simulated_gpu(monkeypatch, device, seed=problem.seed, patch=patch),
    ):
        if operation == "backward_dq" and problem.hopper_tile:
            dq_on_hopper(monkeypatch)
            check_dq((q, k, v, do), config=problem.hopper_tile, **asked)
            return
        if of_forward:
            o, lse = forward(q, k, v, out=(packed(q), None) if problem.packed == "o" else None, **options)
            expected.check(o=o, lse=lse)
            return
        o, lse = reference.forward(q, k, v, **asked)
        o, lse = place(o.astype(q.dtype)), place(lse.astype(expected.problem.accumulator_dtype))
        two_pass = operation in ("backward_dq", "backward_dkdv", "sum_dkdv")
        method = "two_pass" if two_pass else of_key_tiles(operation)
        options["config"] = with_one_tile(options["config"], operation)
        of_others: tuple[str, ...] = ()  # results of the other pass, whose kernels are not launched
        if operation == "backward_dq":
            of_others = ("dk", "dv")
            leave_out(monkeypatch, "backward_dkdv", "sum_dkdv")
        elif two_pass:
            of_others = tuple(name for name in gradient_names(asked, extras(asked)) if name not in ("dk", "dv"))
            leave_out(monkeypatch, "backward_dq")
        switches = extras(asked)
        if method == "single_pass":
            switches.pop("return_dscore_args", None)  # with it, all families but simt would use two passes
        gradients = backward(q, k, v, o, lse, do, method=method, **switches, **options)
        results = dict(zip(gradient_names(asked, switches), gradients, strict=True))
        expected.check(**{name: result for name, result in results.items() if name not in of_others})


@functools.lru_cache(maxsize=None)
def check_unbroken(operation: str, problem: Problem) -> None:
    run(operation, problem)
