"""The properties of a GPU that the choice of tiles, compilation and occupancy depend on."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from ..errors import UnsupportedProblemError

__all__ = ["ARCHITECTURES", "DeviceInfo", "current_device", "device_count"]

_FLOAT16_RATES = {"sm_80": 16}
_FLOAT64_TENSOR_RATES = {"sm_80": 2, "sm_90": 2}
#: Cards of compute capability 8.6 and 8.9 whose tensor cores add in float32 at full speed. Those of GeForce cards, and
#: of a few others (A10G, L40), do so at half of it. Only the name tells them apart: the driver has no such attribute.
_PROFESSIONAL_CARDS = frozenset(
    (
        *("A10", "A40", "RTX A4000", "RTX A4500", "RTX A5000", "RTX A5500", "RTX A6000"),
        *("L4", "L40S", "RTX 4000 Ada Generation", "RTX 4500 Ada Generation", "RTX 5000 Ada Generation"),
        "RTX 6000 Ada Generation",
    )
)


@dataclass(frozen=True)
class DeviceInfo:
    """A GPU: one of this machine, or an example of an architecture.

    Attributes
    ----------
    name : str
        As the driver reports it, or the GPU's common name.
    arch : str
        Compiler name of the compute capability, such as ``"sm_90"``.
    multiprocessors : int
    shared_memory_per_block, shared_memory_per_multiprocessor : int
        Bytes; the first is the opt-in maximum of dynamic shared memory.
    registers_per_multiprocessor, threads_per_multiprocessor : int
    l2_bytes : int
        Size of the L2 cache.
    """

    name: str
    arch: str
    multiprocessors: int
    shared_memory_per_block: int
    shared_memory_per_multiprocessor: int
    registers_per_multiprocessor: int
    threads_per_multiprocessor: int
    l2_bytes: int

    @functools.cached_property
    def compute_capability(self) -> int:
        """Major times ten plus minor: 90 for ``sm_90``."""
        return int(self.arch.removeprefix("sm_"))

    @functools.cached_property
    def float16_rate(self) -> int:
        """Throughput of ``mma.sync`` for float16 with sums in float32, over that of the CUDA cores' float32 FMA.

        By NVIDIA's data sheets; 0 where it is not known.
        """
        if self.arch in ("sm_86", "sm_89"):
            return 4 if self.name.removeprefix("NVIDIA ") in _PROFESSIONAL_CARDS else 2
        return _FLOAT16_RATES.get(self.arch, 0)

    @functools.cached_property
    def float64_tensor_rate(self) -> int:
        """Throughput of ``mma.sync`` for float64, over that of the CUDA cores' float64 FMA, by NVIDIA's data sheets."""
        return _FLOAT64_TENSOR_RATES.get(self.arch, 1)

    @functools.cached_property
    def reserved_shared_memory(self) -> int:
        """Bytes of a multiprocessor's shared memory that the system reserves for each resident block."""
        return _reserved_bytes(self.arch)

    @classmethod
    def current(cls) -> DeviceInfo:
        """The CUDA device that is current in this thread. Properties are queried once per device."""
        from cupy.cuda import runtime

        return _query(runtime.getDevice())

    @classmethod
    def named(cls, arch: str) -> DeviceInfo:
        """A typical GPU of an architecture (``"sm_80"``, ``"sm_90"``, ...), for work without such a GPU."""
        if not isinstance(arch, str):
            raise TypeError(f"arch: expected a str such as 'sm_90', got {type(arch).__name__}{_meant(arch)}")
        name = arch.removesuffix("a")
        if name not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise UnsupportedProblemError(f"arch: {arch!r} is not known; known are {known}{_meant(arch)}")
        return ARCHITECTURES[name]

    def resident_clusters(self, size: int) -> int:
        """Clusters of this size that are resident at a time, of blocks that each take a multiprocessor.

        A cluster lies within a group of multiprocessors (a GPC), of which some remain over. According to
        ``cuOccupancyMaxActiveClusters`` an H200, with 132 multiprocessors, holds 15 clusters of 8 blocks, 30 of 4, and
        66 of 2; groups of other GPUs of the kind may be smaller.
        """
        return (self.multiprocessors * 7 // 8 if size > 2 else self.multiprocessors) // size

    def resident_blocks(self, threads: int, registers: int, shared_memory: int) -> int:
        """Blocks that a multiprocessor holds, as the CUDA C++ Programming Guide computes them (compute capabilities).

        Parameters
        ----------
        threads : int
            Threads of a block.
        registers : int
            Registers of a thread.
        shared_memory : int
            Bytes of shared memory of a block, static ones included.
        """
        warps = -(-threads // 32)
        registers_per_warp = -(-max(registers, 1) * 32 // 256) * 256
        return min(
            self.threads_per_multiprocessor // (warps * 32),
            self.registers_per_multiprocessor // (registers_per_warp * warps),
            self.shared_memory_per_multiprocessor // max(1, shared_memory + self.reserved_shared_memory),
            32,
        )


def _meant(arch: object) -> str:
    """The end of a message: the architecture that another spelling, a compute capability or a GPU's name stands for."""
    text = str(arch).lower()
    number = re.fullmatch(r"(?:sm|compute|cc)?[_ ]?(\d+)\.?(\d?)[af]?", text)
    named = [one.arch for one in ARCHITECTURES.values() if len(text) > 1 and text in one.name.lower()]
    found = [f"sm_{number[1]}{number[2]}"] if number else named
    return f"; did you mean {found[0]!r}?" if found and found[0] in ARCHITECTURES else ""


def device_count() -> int:
    """The number of GPUs that CuPy can use."""
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount()
    except Exception:  # without CuPy or a driver, for any reason, there is no GPU
        return 0


def current_device(instead: str) -> DeviceInfo:
    """The current device. If there is none, the error suggests the argument `instead`."""
    try:
        return DeviceInfo.current()
    except Exception as error:  # CuPy absent, or without a driver
        raise RuntimeError(f"there is no CUDA device to look at ({error}); name an architecture: {instead}") from error


@functools.lru_cache(maxsize=None)
def _query(ordinal: int) -> DeviceInfo:
    from cupy.cuda import runtime

    properties = runtime.getDeviceProperties(ordinal)
    return DeviceInfo(
        name=properties["name"].decode(),
        arch=f"sm_{properties['major']}{properties['minor']}",
        multiprocessors=properties["multiProcessorCount"],
        shared_memory_per_block=properties["sharedMemPerBlockOptin"],
        shared_memory_per_multiprocessor=properties["sharedMemPerMultiprocessor"],
        registers_per_multiprocessor=properties["regsPerMultiprocessor"],
        threads_per_multiprocessor=properties["maxThreadsPerMultiProcessor"],
        l2_bytes=properties["l2CacheSize"],
    )


def _reserved_bytes(arch: str) -> int:
    # 1 KiB since Ampere (CUDA C++ Programming Guide, compute capabilities).
    return 1024 if int(arch.removeprefix("sm_")) >= 80 else 0


def _architecture(arch: str, name: str, multiprocessors: int, shared_kib: int, threads: int, l2_mib: int) -> DeviceInfo:
    # A block can use all of a multiprocessor's shared memory except for the reserved part.
    shared, l2_bytes = shared_kib * 1024, l2_mib * 1024**2
    return DeviceInfo(name, arch, multiprocessors, shared - _reserved_bytes(arch), shared, 65536, threads, l2_bytes)


#: One well-known GPU for each architecture. GPUs before Ampere have the simt family only.
ARCHITECTURES = {
    info.arch: info
    for info in (
        _architecture("sm_70", "V100", 80, 96, 2048, 6),
        _architecture("sm_75", "T4", 40, 64, 1024, 4),
        _architecture("sm_80", "A100", 108, 164, 2048, 40),
        _architecture("sm_86", "GeForce RTX 3090", 82, 100, 1536, 6),
        _architecture("sm_89", "GeForce RTX 4090", 128, 100, 1536, 72),
        _architecture("sm_90", "H100", 132, 228, 2048, 50),
        _architecture("sm_100", "B200", 148, 228, 2048, 126),
        _architecture("sm_103", "B300", 148, 228, 2048, 126),
        _architecture("sm_120", "GeForce RTX 5090", 170, 100, 1536, 96),
        _architecture("sm_121", "GB10", 48, 100, 1536, 24),
    )
}
