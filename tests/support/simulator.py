"""The fake GPU of fake_gpu.py with stages that execute their kernels in ptxsim, an interpreter of PTX.

A stage is rendered and compiled as for a GPU, up to PTX, and launched with the same record, grid and shared memory.
Every array of the record gets its own memory there, which begins with its first element and ends with its last. Only
elements of the array count as initialised; those of an output do so only if the plan clears it. A kernel is therefore
stopped if it reads between the rows of a strided array, outside of the array, or an unwritten element. A launch must
write every element of an output and nothing else. If one kernel clears what others leave unwritten, this is checked
after both.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import ptxsim
from numpy.lib.stride_tricks import as_strided
from ptxsim.compile import compile_ptx
from ptxsim.tensor_map import driver_tensor_map
from support.fake_gpu import fake_gpu
from support.launch_record import CACHES, WORKSPACES, Launch, memory_at

from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.records import EXCEPTIONS
from fa2cupy.gpu.tensor_maps import encode_arguments
from fa2cupy.jit.compiler import compile_options, nvrtc_version
from fa2cupy.jit.params import COUNTERS
from fa2cupy.jit.source import render_kernel
from fa2cupy.jit.spec import KernelSpec
from fa2cupy.plan.stages import Stage
from fa2cupy.plan.tensor_maps import TensorLayout

__all__ = ["compiled_module", "simulated_gpu"]

#: A function from a kernel's spec and source to the source that is compiled instead.
Patch = Callable[[KernelSpec, str], str]


def _options(arch: str, quickly: bool) -> tuple[str, ...]:
    """Returns the package's options without those for the architecture and the assembler, with source lines."""
    options = tuple(o for o in compile_options(arch) if not o.startswith(("-arch=", "--ptxas-options", "-lineinfo")))
    options = (*options, "-lineinfo")
    return (*options, "--Ofast-compile=max") if quickly and nvrtc_version() >= (12, 9) else options


@functools.lru_cache(maxsize=64)
def _text_of(spec: KernelSpec) -> str:
    return render_kernel(spec).text


@functools.lru_cache(maxsize=64)
def compiled_module(text: str, arch: str, quickly: bool = False) -> ptxsim.Module:
    """Compiles source to a module with the package's options; `quickly` hardly optimises, if little of it runs."""
    return ptxsim.Module(compile_ptx(text, arch.replace("sm_", "compute_"), _options(arch, quickly)))


def _computes_nothing(launch: Launch) -> bool:
    """Returns True if a fallback kernel finds no head that is left to it and ends at once, as most of them do."""
    if not launch.spec.is_fallback:
        return False
    heads = launch.batch * launch.values["num_heads"] // launch.values["heads_per_group"]
    return not launch.array(EXCEPTIONS).view(np.int32)[:heads].any()


@contextlib.contextmanager
def simulated_gpu(
    monkeypatch,
    device: DeviceInfo | str = "sm_90",
    *,
    seed: int | None = None,
    patch: Patch | None = None,
    with_counter: bool = True,
    block_races: bool = True,
    cuts_sums: bool = False,
    banks: dict[KernelSpec, tuple[int, int]] | None = None,
    after: Callable[[Launch], None] = lambda launch: None,
) -> Iterator[list[Stage]]:
    """Makes fa2cupy.gpu run in the interpreter; gives the list of the stages that were launched.

    Parameters
    ----------
    monkeypatch : pytest.MonkeyPatch
    device : DeviceInfo or str, optional
        The GPU that kernels are chosen and compiled for.
    seed : int, optional
        Lets warps take turns at random.
    patch : callable, optional
        Function from a kernel's spec and source to the source that runs.
    with_counter : bool, optional
        True if persistent kernels get a tile counter.
    block_races : bool, optional
        True if blocks must not collide in global memory; they do if sequences share rows.
    cuts_sums : bool, optional
        True if tensor cores add bit by bit as the hardware does.
    banks : dict, optional
        Gets wavefronts of shared memory by kernel: without bank conflicts, and those that there are.
    after : callable, optional
        Called with every launch when its kernel has run.
    """

    partly_written: dict[int, np.ndarray] = {}

    def run(launch: Launch) -> None:
        text = _text_of(launch.spec)
        text = text if patch is None else patch(launch.spec, text)
        module = compiled_module(text, launch.spec.arch, _computes_nothing(launch))
        options = {"seed": seed, "block_races": block_races, "cuts_sums": cuts_sums, "counts_banks": banks is not None}
        _execute(launch, module, with_counter, partly_written, options)
        if banks is not None:
            banks[launch.spec] = module.stats["phases"], module.stats["wavefronts"]
        after(launch)

    with fake_gpu(monkeypatch, device, run) as launched:
        yield launched


def _execute(
    launch: Launch,
    module: ptxsim.Module,
    with_counter: bool,
    partly_written: dict[int, np.ndarray],
    options: Mapping[str, Any],
) -> None:
    """Runs a launch; `partly_written`: by address, the bytes written so far of arrays that several kernels write."""
    spec, memory = launch.spec, ptxsim.Memory()
    kinds = {field.name: field.kind for field in spec.params.fields}
    buffers = {}
    for name in launch.pointers:
        array = launch.array(name)
        if array is not None and array.size:
            written = partly_written.pop(launch.pointers[name], None)
            is_output = kinds[name].startswith("output")
            if name in CACHES:
                is_output, written = True, _bytes_of_rows(launch.written_rows(array), array)
            if name == "block_table":
                written = np.broadcast_to(launch.used_entries(array)[..., None], (*array.shape, array.itemsize))
            buffers[name] = _Buffer(memory, name, array, is_output, name in launch.cleared, written)
    # An empty array keeps its host address, which the interpreter does not know: nothing may be read there.
    addresses = {name: buffers[name].address if name in buffers else at for name, at in launch.pointers.items()}
    needed = {name: ints for name, ints in COUNTERS.items() if name in kinds}
    needed = {name: ints for name, ints in needed.items() if launch.stage.renamed.get(name, name) == name}
    counters = {name: memory.alloc(np.zeros(ints, np.int32), name) for name, ints in needed.items()}
    module.launch(
        spec.symbol,
        grid=launch.stage.blocks,
        block=launch.stage.threads,
        args=[launch.record({**addresses, **(counters if with_counter else {})}, _tensor_map)],
        dynamic_smem=spec.shared_memory_bytes,
        memory=memory,
        race_check=True,
        **options,
    )
    for name, buffer in buffers.items():
        written = buffer.finish(spec)
        if not buffer.is_output:
            continue
        if name in CACHES:
            continue
        is_partial = name in WORKSPACES or (spec.is_fallback and "given_lse" in spec.features and name == "lse")
        of_several = spec.operation.startswith("clear_") or is_partial or launch.before_fallback
        if of_several and spec.operation != "decode":  # which shares no workspace with other launches
            partly_written[launch.pointers[name]] = written
        if not of_several or launch.values.get(f"{name}_bytes"):
            buffer.check_complete(spec, written)
    for name in launch.left_zero:
        assert name not in buffers or not launch.array(name).any(), f"{spec}: the {name} are not left zero"
    for name, counter in counters.items():
        left = memory.read(counter)
        assert not left.any(), f"{spec}: the {name.replace('_', ' ')} is left at {left[left != 0]}"


def _bytes_of_rows(rows: np.ndarray, array: np.ndarray) -> np.ndarray:
    """Repeats values of (page, row) for each byte of a (page, row, head, column) array; bytes are the last axis."""
    return np.broadcast_to(rows[:, :, None, None, None], (*array.shape, array.itemsize))


def _tensor_map(layout: TensorLayout, address: int) -> bytes:
    """Returns the tensor map that the driver would make from the package's arguments."""
    return bytes(driver_tensor_map(*encode_arguments(layout, address)))


class _Buffer:
    """An array of the host, and its copy in the interpreter's memory."""

    def __init__(
        self,
        memory: ptxsim.Memory,
        name: str,
        array: np.ndarray,
        is_output: bool,
        cleared: bool,
        partly_written: np.ndarray | None,
    ):
        self.name, self.is_output = name, is_output
        self._shape, self._strides = (*array.shape, array.itemsize), (*array.strides, 1)
        self._host = memory_at(array.ctypes.data, self._shape, self._strides, np.dtype(np.uint8))
        reach = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
        below = -sum(min(0, r) for r in reach)  # bytes before the first element if a stride is negative
        nbytes = below + sum(max(0, r) for r in reach) + array.itemsize
        # The bytes before them keep the alignment of the address; like gaps, they are not initialised.
        self._first = (array.ctypes.data - below) % 512 + below
        base = memory.empty(self._first - below + nbytes, np.uint8, name)
        self.address = base + self._first
        self._bytes, self._initialised = memory.read(base), memory.written(base)
        self._owned = np.zeros(len(self._bytes), bool)
        self._of(self._owned)[...] = True
        self._of(self._bytes)[...] = self._host
        if partly_written is not None:
            self._of(self._initialised)[...] = partly_written
        elif cleared or not is_output:
            self._initialised[self._owned] = True

    def finish(self, spec: KernelSpec) -> np.ndarray:
        """Checks what the kernel has written, copies it to the host, and returns which bytes are written by now."""
        now = self._of(self._bytes)
        written = self._of(self._initialised)
        if not self.is_output:
            assert np.array_equal(self._host, now), f"{spec}: {self.name} is an input, and was written"
            return written
        stray = np.count_nonzero(self._initialised & ~self._owned)
        assert not stray, f"{spec}: {stray} bytes between the rows of {self.name} are written"
        self._host[...] = now
        return written

    def check_complete(self, spec: KernelSpec, written: np.ndarray) -> None:
        """Checks that every element is written."""
        missing = np.argwhere(~written.all(axis=-1))
        assert not len(missing), (
            f"{spec}: {len(missing)} elements of {self.name} are unwritten, first {missing[0].tolist()}"
        )

    def _of(self, flat: np.ndarray) -> np.ndarray:
        """Returns the array's bytes in memory of the same form; those of an element are the last axis."""
        return as_strided(flat[self._first :], self._shape, self._strides)
