"""A demonstration: every operation that this machine can run, checked against float64 and timed."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypedDict

import numpy as np

from . import api
from .cpu.calls import default_tile
from .errors import KernelCompileError
from .families.device import DeviceInfo
from .families.operations import TILED
from .families.registry import FAMILIES
from .jit.cache import cached_kernel
from .jit.compiler import nvrtc_version
from .plan.specs import default_specs
from .problem.array_types import Array
from .problem.names import Method
from .problem.options import METHOD_NAMES
from .testing import Comparison, Expectation, check_delta, make_inputs

__all__ = ["run_demo"]


class _Size(TypedDict):
    """Sizes of the arrays."""

    batch: int
    seqlen_q: int
    num_heads: int
    head_dim: int


_TENSOR_CORE_SIZE: _Size = {"batch": 2, "seqlen_q": 2048, "num_heads": 8, "head_dim": 128}
_SIMT_SIZE: _Size = {"batch": 1, "seqlen_q": 1024, "num_heads": 4, "head_dim": 64}
_CPU_SIZE: _Size = {"batch": 1, "seqlen_q": 512, "num_heads": 4, "head_dim": 64}
_TOOLCHAIN_ARCHS = ("sm_80", "sm_90")


@dataclass(frozen=True)
class _Measurement:
    """One row of the table. `work` is a number of floating-point operations, 0 for operations limited by memory."""

    operation: str
    dtype: str
    causal: bool
    kernels: str
    comparisons: tuple[Comparison, ...]
    compile_seconds: float | None
    milliseconds: float
    work: float

    def __str__(self) -> str:
        worst = max(self.comparisons, key=lambda comparison: comparison.percent)
        compiled = f"{self.compile_seconds:.2f} s" if self.compile_seconds is not None else "-"
        rate = f"{self.work / self.milliseconds / 1e9:.3g}" if self.work else "-"
        return (
            f"{self.operation:<22}{self.dtype:<10}{'causal' if self.causal else 'full':<8}{self.kernels:<50}"
            f"{worst.error:8.1e} of {worst.allowed:.1e} ({worst.name:>5})"
            f"{compiled:>10}{self.milliseconds:9.3f} ms{rate:>9}"
        )


_HEADER = (
    f"{'operation':<22}{'dtype':<10}{'mask':<8}{'family and tile (b_r x b_c)':<50}"
    f"{'max error of the allowed':<27}{'compile':>10}{'time':>12}{'TFLOP/s':>9}"
)


def run_demo(device: str = "auto") -> int:
    """Prints the table; returns 0 if every result was within its allowed error.

    Parameters
    ----------
    device : {"auto", "gpu", "cpu"}
    """
    reason = _why_no_gpu()
    if device == "gpu" and reason:
        print(f"There is no GPU to use: {reason}")
        return 1
    if device != "cpu" and not reason:
        import cupy

        info = DeviceInfo.current()
        print(f"{info.name} ({info.arch}), NVRTC {'.'.join(map(str, nvrtc_version()))}")
        supported = [dtype for one in FAMILIES for dtype in one.dtypes if one.supports("forward", dtype, info)]
        return _print_table(list(dict.fromkeys(supported)), cupy, info)
    print(
        "The NumPy backend, as asked."
        if device == "cpu"
        else f"No GPU here ({reason}): the NumPy backend runs instead."
    )
    return _print_table(["float32", "float64", "float16", "bfloat16"], np, None) or _show_toolchain()


def _why_no_gpu() -> str | None:
    try:
        DeviceInfo.current()
    except Exception as error:  # without CuPy, driver or device, for any reason, NumPy runs instead
        return str(error)
    return None


def _print_table(dtypes: list[str], xp: ModuleType, info: DeviceInfo | None) -> int:
    print(_HEADER)
    try:
        for dtype, causal in itertools.product(dtypes, (False, True)):
            for measurement in _measure(dtype, causal, xp, info):
                print(measurement, flush=True)
    except AssertionError as error:
        print(f"WRONG RESULT\n  {error}")
        return 1
    print("All results are within their allowed errors.")
    return 0


def _measure(dtype: str, causal: bool, xp: ModuleType, info: DeviceInfo | None) -> Iterator[_Measurement]:
    size = _CPU_SIZE if info is None else _TENSOR_CORE_SIZE if dtype in ("float16", "bfloat16") else _SIMT_SIZE
    q, k, v, do = make_inputs(dtype, **size, xp=xp)
    expected = Expectation(q, k, v, do, causal=causal)
    product = 2 * size["batch"] * size["num_heads"] * size["seqlen_q"] ** 2 * size["head_dim"] / (2 if causal else 1)
    clock = _host_milliseconds if info is None else _device_milliseconds

    def row(
        operation: str,
        call: Callable[[], object],
        comparisons: tuple[Comparison, ...],
        products: int,
        method: str | None = None,
    ) -> _Measurement:
        kernels, seconds = _kernels(operation, dtype, size["head_dim"], causal, method, info)
        return _Measurement(
            f"{operation} {method or ''}", dtype, causal, kernels, comparisons, seconds, clock(call), products * product
        )

    out = expected.unwritten("o", "lse")
    o, lse = api.forward(q, k, v, causal=causal, out=out)
    comparisons = tuple(expected.check(o=o, lse=lse).values())
    yield row("forward", lambda: api.forward(q, k, v, causal=causal), comparisons, 2)

    comparison = check_delta(o, do, api.delta(o, do))
    yield row("delta", lambda: api.delta(o, do), (comparison,), 0)

    for method in METHOD_NAMES:

        def backward(method: Method = method, **options: Any) -> tuple[Array, ...]:
            return api.backward(q, k, v, o, lse, do, causal=causal, method=method, **options)

        dq, dk, dv = backward(out=expected.unwritten("dq", "dk", "dv"))
        comparisons = tuple(expected.check(dq=dq, dk=dk, dv=dv).values())
        yield row("backward", backward, comparisons, 5, method)


def _kernels(
    operation: str, dtype: str, head_dim: int, causal: bool, method: str | None, info: DeviceInfo | None
) -> tuple[str, float | None]:
    """Family and tiles of a call, and the seconds that the compilation of its kernels took; None for NumPy."""
    if info is None:
        b_r, b_c = default_tile()
        return ("numpy" if operation == "delta" else f"numpy {b_r} x {b_c}"), None
    specs = default_specs(info, dtype, head_dim, causal, "two_pass" if operation == "delta" else method)
    if operation == "delta":
        specs = [spec for spec in specs if spec.operation == "delta"]
    seconds = sum(cached_kernel(spec).seconds for spec in specs)
    tiled = [spec for spec in specs if spec.operation in TILED and not spec.is_fallback]
    tiles = [str(spec.tile) for spec in tiled]
    family = (tiled or specs)[0].family_name
    return f"{family} {'; '.join(tile.split(',')[0] for tile in tiles) if len(tiles) > 1 else ''.join(tiles)}", seconds


def _host_milliseconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def _device_milliseconds(call: Callable[[], object], calls: int = 10) -> float:
    import cupy

    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    start.record()
    for _ in range(calls):
        call()
    stop.record()
    stop.synchronize()
    return cupy.cuda.get_elapsed_time(start, stop) / calls


def _show_toolchain() -> int:
    """Compiles kernels for two architectures and two dtypes, which needs CuPy and NVRTC but no GPU."""
    try:
        print(f"NVRTC {'.'.join(map(str, nvrtc_version()))} compiles, for GPUs that are not here:")
        for arch, dtype in itertools.product(_TOOLCHAIN_ARCHS, ("float16", "float32")):
            for spec in default_specs(DeviceInfo.named(arch), dtype, 64, True):
                kernel = cached_kernel(spec)
                print(f"  {kernel.symbol} for {spec.arch}: {kernel.registers} registers, {kernel.seconds:.2f} s")
    except KernelCompileError as error:
        print(f"Kernels cannot be compiled here: {error}")
        return 1
    return 0
