"""Kernels in the driver: loaded once for each device, given their shared memory, launched with their own record."""

from __future__ import annotations

import ctypes
import dataclasses
import struct
import threading
import types

import pytest
from support import plans

from fa2cupy import TileConfig
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.records import ARRIVALS
from fa2cupy.families.sm80 import SM80
from fa2cupy.gpu import counters, launch
from fa2cupy.jit.compiler import CompiledKernel
from fa2cupy.jit.spec import KernelSpec
from fa2cupy.plan.stages import Stage
from fa2cupy.problem.checks import problem_from_arrays
from fa2cupy.testing import make_inputs

pytest.importorskip("cupy")

LONGEST_S = 10.0  # limit for a step of a thread that normally takes no time


class FakeDriver:
    """A fake of the part of ``cupy.cuda`` that loads and launches kernels.

    Attributes
    ----------
    device : int
        The current device.
    loaded : list of (device, cubin)
    attributes : list of (function, attribute, value)
    launch : callable
        Called by each launch with the arguments of ``cuLaunchKernel``.
    """

    def __init__(self, monkeypatch):
        import cupy

        self.device, self.loaded, self.attributes = 0, [], []
        self.launch = lambda *arguments: None
        driver = self

        class Module:
            def load(self, cubin: bytes) -> None:
                self.number = len(driver.loaded)
                driver.loaded.append((driver.device, cubin))

            def get_function(self, symbol: str):
                return types.SimpleNamespace(ptr=1000 + self.number, symbol=symbol)

        monkeypatch.setattr(cupy.cuda.function, "Module", Module)
        monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: self.device)
        monkeypatch.setattr(cupy.cuda.driver, "funcSetAttribute", lambda *given: self.attributes.append(given))
        monkeypatch.setattr(cupy.cuda.driver, "launchKernel", lambda *arguments: self.launch(*arguments))
        monkeypatch.setattr(
            launch,
            "cached_kernel",
            lambda spec: CompiledKernel(spec, spec.symbol.encode(), 24, 0, 8, "the log", 0.5),
        )


@pytest.fixture
def driver(monkeypatch):
    launch._load_kernel.cache_clear()
    yield FakeDriver(monkeypatch)
    launch._load_kernel.cache_clear()


def spec_of(num_stages: int) -> KernelSpec:
    return KernelSpec("forward", SM80, "sm_80", "float16", 64, False, TileConfig(64, 64, 4, num_stages))


# -------------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize(("num_stages", "kib"), [(2, 40), (4, 72)])
def test_shared_memory_above_48_kib_is_asked_for(driver, num_stages, kib):
    """Checks tiles of 8 KiB: one of Q, and one of K and one of V for each stage."""
    spec = spec_of(num_stages)
    assert spec.shared_memory_bytes == kib * 1024
    function = launch.load_kernel(spec)
    max_dynamic_shared_size_bytes = 8  # CUfunction_attribute
    assert driver.attributes == ([(function.ptr, max_dynamic_shared_size_bytes, kib * 1024)] if kib > 48 else [])


@pytest.mark.parametrize("nbytes", (48 * 1024 - 16, 48 * 1024, 48 * 1024 + 1, 227 * 1024))
def test_48_kib_need_no_asking(driver, monkeypatch, nbytes):
    monkeypatch.setattr(KernelSpec, "shared_memory_bytes", property(lambda self: nbytes))
    function = launch.load_kernel(spec_of(2))
    assert [given[::2] for given in driver.attributes] == ([(function.ptr, nbytes)] if nbytes > 48 * 1024 else [])


def test_a_kernel_is_loaded_once_for_each_device(driver):
    found = []
    for driver.device in (0, 1, 0, 1):
        found.append(launch.load_kernel(spec_of(4)))
    assert found[0] is found[2] and found[1] is found[3] and found[0] is not found[1]
    assert driver.loaded == [(device, spec_of(4).symbol.encode()) for device in (0, 1)]
    assert [given[0] for given in driver.attributes] == [found[0].ptr, found[1].ptr]


def test_two_kernels_are_two_functions(driver):
    assert [launch.load_kernel(spec_of(n)).symbol for n in (2, 4)] == [spec_of(n).symbol for n in (2, 4)]


# ------------------------------------------------------------------------------------------------------------ launching

POSITIONS = {name: position for position, name in enumerate(("q", "k", "v", "o", "lse"))}


def stage_of(device: str, dtype: str = "float16") -> Stage:
    q, k, v, _ = make_inputs(dtype, batch=1, seqlen_q=70, num_heads=2, num_heads_kv=1)
    problem = problem_from_arrays(q, k, v)
    strides = {name: problem.kernel_strides(x.shape) for name, x in {"q": q, "k": k, "v": v, "o": q}.items()}
    (stage,) = plans.forward_plan(problem, DeviceInfo.named(device), strides).stages
    return stage


def pointers_of(arguments: tuple) -> tuple:
    """Returns the five pointers at the start of the record, given the arguments of ``cuLaunchKernel``."""
    record = ctypes.cast(arguments[9], ctypes.POINTER(ctypes.c_void_p))[0]
    return struct.unpack("=5Q", ctypes.string_at(record, 40))


def test_a_launch_has_the_grid_the_block_and_the_shared_memory_of_its_stage(driver):
    launched = []
    driver.launch = lambda *arguments: launched.append((*arguments[:9], pointers_of(arguments), arguments[10]))
    stage = stage_of("sm_80")
    launch.BoundStages([stage], POSITIONS)([10, 20, 30, 40, 50], 7)
    grid, block = (stage.blocks, 1, 1), (stage.spec.tile.num_threads, 1, 1)
    wanted = (1000, *grid, *block, stage.spec.shared_memory_bytes, 7, (10, 20, 30, 40, 50), 0)
    assert launched == [wanted] and stage.blocks > 1


def test_a_launch_takes_its_own_addresses_from_among_all(driver):
    launched = []
    driver.launch = lambda *arguments: launched.append(pointers_of(arguments))
    launch.BoundStages([stage_of("sm_80")], {"q": 5, "k": 3, "v": 2, "o": 6, "lse": 1, "workspace": 4})(
        [1, 2, 3, 4, 5, 6, 7], 0
    )
    assert launched == [(6, 4, 3, 7, 2)]


def test_a_stage_has_its_own_names_for_arrays_and_for_absent_ones(driver):
    launched = []
    driver.launch = lambda *arguments: launched.append(pointers_of(arguments))
    stage = dataclasses.replace(stage_of("sm_80"), renamed={"lse": "own_lse", "o": None})
    positions = {"q": 0, "k": 1, "v": 2, "o": 3, "lse": 4, "own_lse": 5, launch.ABSENT: 6}
    launch.BoundStages([stage], positions)([1, 2, 3, 4, 5, 6, 0], 0)
    assert launched == [(1, 2, 3, 0, 6)]


def test_a_stage_may_have_no_counters(driver, monkeypatch):
    """A decode whose jobs are not cut gets 0 in their place, the last of the record's pointers."""
    asked, launched = [], []
    counters_of = types.SimpleNamespace(reserve=lambda: None, address=lambda stream: 99)
    monkeypatch.setattr(launch, "counters", lambda *given: asked.append(given) or counters_of)
    problem = problem_from_arrays(*make_inputs("float16", seqlen_q=1, seqlen_k=300)[:3])
    (stage,) = plans.forward_plan(problem, DeviceInfo.named("sm_80"), problem.contiguous_strides()).stages
    names = stage.spec.params.pointers
    assert names[-1] == ARRIVALS

    def read(*arguments):
        record = ctypes.cast(arguments[9], ctypes.POINTER(ctypes.c_void_p))[0]
        launched.append(struct.unpack(f"={len(names)}Q", ctypes.string_at(record, 8 * len(names))))

    driver.launch = read
    positions = {name: number for number, name in enumerate((*names[:-1], launch.ABSENT))}
    for renamed in ({}, {ARRIVALS: None}):
        launch.BoundStages([dataclasses.replace(stage, renamed=renamed)], positions)([*range(1, len(names)), 0], 0)
    assert launched == [(*range(1, len(names)), last) for last in (99, 0)]
    assert asked == [(0, 2048)]


def test_stages_of_a_call_are_launched_in_order_each_with_its_own_record(driver):
    """Checks three stages, two of them with one kernel."""
    launched = []

    def read(*arguments):
        record = ctypes.cast(arguments[9], ctypes.POINTER(ctypes.c_void_p))[0]
        stage = stages[len(launched)]
        launched.append((arguments[0], arguments[1], ctypes.string_at(record, stage.spec.params.nbytes)))

    driver.launch = read
    stages = [dataclasses.replace(stage_of("sm_80", dtype), blocks=n) for n, dtype in ((3, "float16"), (5, "bfloat16"))]
    stages.append(dataclasses.replace(stages[0], blocks=7, renamed={"q": "o", "lse": None}))
    positions = {**POSITIONS, launch.ABSENT: 5}
    launch.BoundStages(stages, positions)([10, 20, 30, 40, 50, 0], 7)
    addresses = [(10, 20, 30, 40, 50), (10, 20, 30, 40, 50), (40, 20, 30, 40, 0)]
    assert [(blocks, record) for _, blocks, record in launched] == [
        (stage.blocks, struct.pack("=5Q", *front) + stage.constants)
        for stage, front in zip(stages, addresses, strict=True)
    ]
    assert launched[0][0] == launched[2][0] != launched[1][0]


def test_the_error_of_a_launch_names_its_kernel(driver):
    stages = [stage_of("sm_80"), stage_of("sm_80", "bfloat16")]
    calls = iter((None, RuntimeError("no more")))

    def refuse(*arguments):
        error = next(calls)
        if error:
            raise error

    driver.launch = refuse
    with pytest.raises(launch.KernelLaunchError, match="bfloat16, .* could not be launched: no more"):
        launch.BoundStages(stages, POSITIONS)([1, 2, 3, 4, 5], 0)


def test_a_record_may_have_a_single_pointer(driver):
    launched = []
    driver.launch = lambda *arguments: launched.append(pointers_of(arguments)[0])
    spec = KernelSpec("order_keys", None, "sm_80", "float32", 1, False, TileConfig(1, 1, 4))
    constants = spec.params.pack_constants({"num_lists": 1, "list_tiles": 1, "list_stride": 5})
    launch.BoundStages([Stage(spec, 1, constants)], {"q": 0, "key_lists": 1})([5, 7], 0)
    assert launched == [7]


def test_a_record_is_not_packed_while_another_thread_launches_it(driver):
    """Checks that the second thread waits until the launch returns, because the driver reads the record until then."""
    in_launch, calling, second_in_launch = (threading.Event() for _ in range(3))
    seen = {}

    def read_late(*arguments):
        if not in_launch.is_set():
            in_launch.set()
            assert calling.wait(LONGEST_S)
            second_in_launch.wait(0.3)  # far longer than a thread that does not wait needs
        else:
            second_in_launch.set()
        seen[arguments[8]] = pointers_of(arguments)

    driver.launch = read_late
    bound = launch.BoundStages([stage_of("sm_80")], POSITIONS)

    def second() -> None:
        calling.set()
        bound([10, 20, 30, 40, 50], 2)

    threads = [threading.Thread(target=bound, args=([1, 2, 3, 4, 5], 1)), threading.Thread(target=second)]
    threads[0].start()
    assert in_launch.wait(LONGEST_S)
    threads[1].start()
    for thread in threads:
        thread.join(LONGEST_S)
    assert seen == {1: (1, 2, 3, 4, 5), 2: (10, 20, 30, 40, 50)}


def test_a_launch_that_fails_leaves_the_stage_usable(driver):
    bound, launched = launch.BoundStages([stage_of("sm_80")], POSITIONS), []
    driver.launch = lambda *arguments: 1 / 0
    with pytest.raises(launch.KernelLaunchError, match="forward .* could not be launched: division by zero"):
        bound([1, 2, 3, 4, 5], 0)
    driver.launch = lambda *arguments: launched.append(pointers_of(arguments))
    bound([1, 2, 3, 4, 5], 0)
    assert launched == [(1, 2, 3, 4, 5)]


def test_counters_are_those_of_the_device_that_the_kernel_is_loaded_on(driver, monkeypatch):
    asked = []

    def counters_of(ordinal: int, ints: int):
        asked.append((ordinal, ints))
        return types.SimpleNamespace(reserve=lambda: None)

    monkeypatch.setattr(launch, "counters", counters_of)
    for driver.device in (1, 0):
        launch.BoundStages([stage_of("sm_90")], POSITIONS)
    assert asked == [(1, 2), (0, 2)]
    assert counters.counters(0, 2) is counters.counters(0, 2) is not counters.counters(1, 2)
    assert counters.counters(0, 2) is not counters.counters(0, 2048)
