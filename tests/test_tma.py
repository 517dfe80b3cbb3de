"""Tensor maps and tile counters, which a launch of the sm90 family puts into its record. Needs no GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import itertools
import struct
import sys
import threading
import types
import warnings
import weakref

import pytest
from support import plans
from support.fake_cupy import place
from support.fake_gpu import fake_gpu, forward

from fa2cupy.errors import KernelLaunchError
from fa2cupy.families import sm90
from fa2cupy.families.device import DeviceInfo
from fa2cupy.gpu import counters, launch
from fa2cupy.gpu import tensor_maps as tma
from fa2cupy.plan.tensor_maps import TensorLayout, packed_layout, tensor_layout
from fa2cupy.problem.checks import problem_from_arrays
from fa2cupy.testing import make_inputs

LAYOUT = TensorLayout("float16", (64, 300, 8, 3), (1024, 128, 307200), (64, 128, 1, 1))


def fake_encode(layout: TensorLayout, address: int) -> bytes:
    return struct.pack("=QQ112x", address, hash(layout) & 0xFFFFFFFF)


@pytest.fixture
def encoded(monkeypatch):
    """Yields the (layout, address) of all maps that were made."""
    made = []
    monkeypatch.setattr(tma, "encode", lambda *pair: made.append(pair) or fake_encode(*pair))
    tma.tensor_maps.cache_clear()
    yield made
    tma.tensor_maps.cache_clear()


# ----------------------------------------------------------------------------------------------------------------- maps


@pytest.mark.parametrize(
    ("sizes", "strides", "reason"),
    [
        ((2, 10, 4), (2560, 256, 64), None),
        ((1, 10, 1), (0, 64, 0), None),
        ((1, 10, 1), (-7, 64, 3), None),
        ((2, 0, 4), (0, 256, 64), "empty"),
        ((2, 10, 4), (2560, -256, 64), "stride of -512 bytes"),
        ((2, 10, 4), (2560, 256, 0), "stride of 0 bytes"),
        ((2, 10, 4), (2560, 256, 4), "stride of 8 bytes"),
        ((2, 10, 4), (2**39, 256, 64), "below 2"),
    ],
)
def test_tma_takes_positive_strides_of_16_bytes_below_a_tebibyte(sizes, strides, reason):
    found = sm90._why_not_mappable(sizes, strides, 2)
    assert found is None if reason is None else reason in found


def test_a_layout_is_innermost_first_and_has_legal_strides_where_they_mean_nothing():
    layout = tensor_layout("bfloat16", (3, 300, 8), (153600, 512, 64), 64, 2, 128)
    assert layout == dataclasses.replace(LAYOUT, dtype="bfloat16")
    assert tensor_layout("float16", (1, 1, 1), (0, 0, 0), 8, 2, 16).strides == (16, 16, 16)


@pytest.mark.parametrize("row_stride", [16, 1024, 2**34 - 16, 2**34, 2**34 + 16, 2**39 + 32], ids=hex)
def test_packed_maps_begin_at_the_array_whatever_the_stride(row_stride):
    packed = packed_layout("float16", (1, 300, 8), (0, row_stride // 2, 64), 64, 2, 128)
    column, row, head, end, wrap = packed.sizes
    assert (column, head, end) == (64, 8, 301) and packed.strides[:3] == (row_stride, 128, row_stride)
    assert all(0 < stride < 2**40 and stride % 16 == 0 for stride in packed.strides)
    start, length, i = 230, 40, 11
    offset = sum(n * s for n, s in zip((row - length + i, 0, start + length, wrap - 1), packed.strides, strict=True))
    assert offset % 2**64 == (start + i) * row_stride


def test_a_map_is_encoded_once_for_a_layout_and_an_address(encoded):
    maps = tma.tensor_maps(LAYOUT)
    assert maps is tma.tensor_maps(TensorLayout(*vars(LAYOUT).values()))
    assert maps[4096] == maps[4096] == fake_encode(LAYOUT, 4096) and maps[8192] != maps[4096]
    assert [address for _, address in encoded] == [4096, 8192]


def test_maps_of_ever_new_addresses_do_not_fill_the_memory(encoded):
    maps = tma.tensor_maps(LAYOUT)
    for address in range(0, 16 * 5000, 16):
        assert maps[address] == fake_encode(LAYOUT, address)
    assert len(maps) <= 256


PACKED_LAYOUT = packed_layout("bfloat16", (1, 300, 8), (0, 512, 64), 64, 2, 16)


@pytest.fixture
def driver():
    return pytest.importorskip("cuda.bindings.driver", exc_type=ImportError)


@pytest.mark.parametrize(
    ("layout", "dtype"), [(LAYOUT, "FLOAT16"), (PACKED_LAYOUT, "BFLOAT16")], ids=("batch", "packed")
)
def test_every_argument_of_the_driver_is_what_the_kernels_rely_on(driver, layout, dtype):
    kind, rank, address, *lists, interleave, swizzle, promotion, fill = tma.encode_arguments(layout, 0x7F0000001230)
    assert kind == getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{dtype}")
    assert (rank, address) == (len(layout.sizes), 0x7F0000001230)
    sizes, strides, box, steps = ([int(x) for x in numbers] for numbers in lists)
    assert (tuple(sizes), tuple(strides)) == (layout.sizes, layout.strides)
    assert tuple(box) == layout.box
    assert steps == [1] * rank
    assert interleave == driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE
    assert swizzle == driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
    assert promotion == driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B
    assert fill == driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE


@pytest.fixture
def encoding(driver, monkeypatch):
    """Makes the driver return 128 bytes, or the error that a test sets."""
    state = types.SimpleNamespace(result=driver.CUresult.CUDA_SUCCESS, arguments=None, content=bytes(range(128)))
    held = ctypes.create_string_buffer(state.content, 128)

    def encode(*arguments):
        state.arguments = arguments
        return state.result, types.SimpleNamespace(getPtr=lambda: ctypes.addressof(held))

    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode)
    return state


def test_a_map_is_the_128_bytes_that_the_driver_makes_of_the_arguments(encoding):
    assert tma.encode(LAYOUT, 4096) == encoding.content
    assert encoding.arguments == tma.encode_arguments(LAYOUT, 4096)


def test_a_map_that_the_driver_refuses_is_reported_with_its_layout(encoding, driver):
    encoding.result = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(KernelLaunchError, match=r"TensorLayout\(.*at 0x1000: CUDA_ERROR_INVALID_VALUE"):
        tma.encode(LAYOUT, 4096)


# ------------------------------------------------------------------------------------------------ without cuda-bindings


@pytest.fixture
def without_bindings(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    sm90._can_encode_maps.cache_clear()
    yield
    sm90._can_encode_maps.cache_clear()


def test_without_cuda_bindings_the_forward_falls_back_with_one_warning(without_bindings, monkeypatch):
    with fake_gpu(monkeypatch) as launched, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seqlen in (20, 30):
            q, k, v, _ = (place(x) for x in make_inputs("float16", seqlen_q=seqlen))
            forward(q, k, v)
        with pytest.raises(NotImplementedError, match="'sm90' needs cuda-bindings"):
            forward(q, k, v, causal=True, family="sm90")
    assert [stage.spec.family_name for stage in launched] == ["sm80", "sm80"]
    (warning,) = caught
    assert "pip install" in str(warning.message)


# ------------------------------------------------------------------------------------------------------------- counters


@dataclasses.dataclass(frozen=True)
class Memory:
    """An allocation that weak references can point to, to tell whether something keeps it."""

    ptr: int
    size: int


class FakeDevice:
    """A fake of cupy and cupy.cuda.runtime, as far as counters.py uses them."""

    def __init__(self) -> None:
        self.capturing: set[int] = set()
        self.memory: list[ctypes.Array] = []
        self.cleared: set[int] = set()  # addresses of memory that is cleared, but only in the order of stream 0
        self.alive: weakref.WeakSet = weakref.WeakSet()
        runtime = types.SimpleNamespace(
            streamIsCapturing=self._is_capturing,
            memset=self._memset,
            streamSynchronize=lambda stream: self.cleared.clear() if stream == 0 else None,
            getDevice=lambda: 0,
        )
        cuda = types.ModuleType("cupy.cuda")
        cuda.runtime, cuda.Memory = runtime, self._allocate
        self.modules = {"cupy": types.SimpleNamespace(cuda=cuda), "cupy.cuda": cuda}

    def _is_capturing(self, stream: int) -> bool:
        assert stream != 0, "the runtime fails if it is asked about the null stream while another one captures"
        return stream in self.capturing

    def _memset(self, address: int, value: int, nbytes: int) -> None:
        ctypes.memset(address, value, nbytes)
        self.cleared.add(address)

    def _allocate(self, nbytes: int) -> Memory:
        self.memory.append(ctypes.create_string_buffer(b"\xff" * nbytes, nbytes))
        own = Memory(ctypes.addressof(self.memory[-1]), nbytes)
        self.alive.add(own)
        return own


@pytest.fixture
def device(monkeypatch):
    fake = FakeDevice()
    for name, module in fake.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return fake


def test_a_stream_keeps_its_counter_and_shares_it_with_no_other(device):
    tiles = counters.Counters(2)
    addresses = [tiles.address(stream) for stream in (0, 1, 77, 0, 1, 77)]
    assert addresses[:3] == addresses[3:] and len(set(addresses)) == 3
    assert all(ctypes.string_at(address, 8) == bytes(8) for address in addresses)


def test_the_per_thread_stream_is_another_stream_in_every_thread(device):
    tiles = counters.Counters(2)
    found = [tiles.address(2)]
    thread = threading.Thread(target=lambda: found.append(tiles.address(2)))
    thread.start()
    thread.join()
    assert len(set(found)) == 2 and tiles.address(2) == found[0]


def test_every_captured_launch_has_a_counter_of_its_own_and_allocates_nothing(device):
    tiles = counters.Counters(2)
    tiles.reserve()
    eager = tiles.address(77)
    device.capturing.add(77)
    captured = [tiles.address(77) for _ in range(1023)]
    assert len({eager, *captured}) == 1024 and len(device.memory) == 1
    assert tiles.address(77) == 0  # no counter: tiles in a fixed order
    device.capturing.clear()
    assert tiles.address(77) == eager
    assert tiles.address(78) not in {eager, *captured} and len(device.memory) == 2


def test_counters_are_cleared_for_all_streams_and_never_freed(device):
    tiles = counters.Counters(2)
    tiles.reserve()
    for stream in range(100, 100 + 2 * len(tiles._free)):
        tiles.address(stream)
        assert not device.cleared  # other streams do not wait for stream 0
    gc.collect()
    assert len(device.alive) == len(device.memory) > 1


def test_counters_for_a_capture_are_reserved_while_half_of_them_are_left(device):
    tiles = counters.Counters(2)
    tiles.reserve()
    slots = len(tiles._free)
    for stream in range(100, 100 + slots // 2 + 1):
        tiles.address(stream)
    tiles.reserve()
    assert len(tiles._free) >= slots and len(device.memory) == 2


def test_counters_do_not_overlap_whatever_their_size(device):
    for ints in (2, 9, 2048):
        slots = counters.Counters(ints)
        addresses = sorted(slots.address(stream) for stream in range(100, 110))
        assert min(b - a for a, b in itertools.pairwise(addresses)) >= 4 * ints
        assert all(ctypes.string_at(address, 4 * ints) == bytes(4 * ints) for address in addresses)


# --------------------------------------------------------------------------------------------------------------- record


def test_a_launch_packs_maps_pointers_and_the_streams_counter(encoded, monkeypatch):
    cuda = pytest.importorskip("cupy.cuda", exc_type=ImportError)
    q, k, v, _ = make_inputs("float16", batch=2, seqlen_q=70, seqlen_k=90, num_heads=4, num_heads_kv=2)
    problem = problem_from_arrays(q, k, v)
    strides = {name: problem.kernel_strides(x.shape) for name, x in {"q": q, "k": k, "v": v, "o": q}.items()}
    (stage,) = plans.forward_plan(problem, DeviceInfo.named("sm_90"), strides).stages
    records = []
    nbytes = stage.spec.params.nbytes

    def launch_kernel(function, *arguments):
        record = ctypes.cast(arguments[-2], ctypes.POINTER(ctypes.c_void_p))[0]
        records.append((arguments[7], ctypes.string_at(record, nbytes)))

    monkeypatch.setattr(launch, "load_kernel", lambda spec: types.SimpleNamespace(ptr=1))
    monkeypatch.setattr(cuda.driver, "launchKernel", launch_kernel)
    tiles = types.SimpleNamespace(reserve=lambda: None, address=lambda stream: 1000 + stream)
    monkeypatch.setattr(launch, "counters", lambda ordinal, ints: tiles)
    monkeypatch.setattr(cuda.runtime, "getDevice", lambda: 0)
    bound = launch.BoundStages([stage], {"q": 0, "k": 1, "v": 2, "o": 3, "lse": 4})
    for addresses, stream in (([16, 32, 48, 64, 80], 0), ([160, 32, 48, 640, 800], 7)):
        bound(addresses, stream)
        launched_on, record = records[-1]
        assert launched_on == stream
        fronts = [record[128 * i : 128 * i + 128] for i in range(4)]
        assert fronts == [fake_encode(m, a) for m, a in zip(stage.maps, addresses, strict=False)]
        assert struct.unpack_from("=QQ", record, 512) == (addresses[4], 1000 + stream)
        assert record[528:] == stage.constants
    assert len(encoded) == 6  # four, and the two whose address is new
