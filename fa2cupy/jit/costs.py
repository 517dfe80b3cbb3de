"""What the caller's functions cost in kernels: those that cost much are warned of or refused."""

from __future__ import annotations

from ..errors import UnsupportedProblemError
from ..system.folders import warn_once
from .compiler import CompiledKernel
from .spec import KernelSpec

__all__ = ["check_cost", "warn_of_cost"]

#: The costs, as of `Program.cost`, beyond which users are warned, and beyond which kernels are not compiled. On one
#: core, a forward for compute capability 9.0 took 13 s with two sin (800), 26 s with 20 np.where with a % each (940),
#: 29 s with 20 tanh (2000), 52 s with 1000 additions and multiplications (1000), 21 s with T5's 2048 buckets (380) and
#: above 160 s with 20 sin (8000); without a function it takes 1 s. A backward took 29 s with one sin and its cos (800).
_COSTLY, _MOST_COSTLY = 500, 2500
#: The ready-made functions spill up to 640 bytes.
_MANY_SPILLED_BYTES = 2048
_CHEAPER = (
    "compute what depends on positions or heads alone once, and pass it as an array in score_args or mask_args; sin, "
    "cos, powers, // and % cost most"
)


def check_cost(spec: KernelSpec) -> None:
    """Raises UnsupportedProblemError for functions with which a kernel would take minutes to compile."""
    cost = _cost(spec)
    if cost > _MOST_COSTLY:
        raise UnsupportedProblemError(
            f"{_names(spec)}: the kernel of {spec.operation} would take minutes to compile, as it has "
            f"{cost / _MOST_COSTLY:.1f} times the largest number of operations; {_CHEAPER}; NumPy arrays have no limit"
        )


def warn_of_cost(spec: KernelSpec, kernel: CompiledKernel) -> None:
    """Warns, once for each kernel, of functions that take long to compile or for which registers are spilled."""
    if spec.functions and (_cost(spec) > _COSTLY or kernel.spill_bytes > _MANY_SPILLED_BYTES):
        cost = f"{kernel.seconds:.1f} s to compile, {kernel.registers} registers, {kernel.spill_bytes} bytes spilled"
        warn_once(spec, f"{_names(spec)}: the kernel of {spec.operation} costs {cost}; {_CHEAPER}")


def _cost(spec: KernelSpec) -> int:
    has_slope, has_gradients = spec.operation.startswith("backward"), "dscore_args" in spec.features
    return sum(function.program.cost(has_slope, has_gradients) for function in spec.functions)


def _names(spec: KernelSpec) -> str:
    return " and ".join(f"{one.program.role} ({one.program.place})" for one in spec.functions)
