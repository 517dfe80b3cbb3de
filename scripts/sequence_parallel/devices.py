"""The device of a rank: NumPy for a simulated one, or its GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from common.measure import Gpu, Problem


class HostDevice:
    """NumPy, for simulated ranks."""

    xp, dtype, head_dim = np, "float64", 16
    #: The longest sequence that is compared with one call.
    whole_rows = 64
    #: Seconds of work before the timing, and the most timed calls of one scheme.
    warm_s, most_calls = 0.0, 2

    def __init__(self, rank: int):
        self._rng = np.random.default_rng(rank)

    def draw(self, problem: Problem) -> list:
        """Draws standard normal q, k, v and do."""
        shapes = (problem.shape, problem.shape_kv, problem.shape_kv, problem.shape)
        return [self._rng.standard_normal(shape) for shape in shapes]

    def mark(self) -> float:
        """Returns a point in time, for `milliseconds`."""
        return time.perf_counter()

    def milliseconds(self, start: float, stop: float) -> float:
        """Returns the milliseconds between two marks."""
        return 1e3 * (stop - start)

    def to_host(self, array) -> np.ndarray:
        """Returns the array as NumPy's."""
        return array

    def extra_bytes(self, call: Callable[[], tuple]) -> int | None:
        """Returns None: nothing is counted."""
        return None

    def captured(self, call: Callable[[], tuple]) -> Callable[[], None] | None:
        """Returns None: there are no graphs."""
        return None

    def release(self) -> None:
        """Does nothing: no memory is kept."""


class GpuDevice:
    """The GPU of a rank, with the methods of `HostDevice`."""

    dtype, head_dim, whole_rows = "bfloat16", 128, 32768
    warm_s, most_calls = 1.5, 15
    #: Rows that are drawn together, in float32.
    _STEP = 32768

    def __init__(self, rank: int):
        self.gpu = Gpu()
        self.xp = self.gpu.xp
        self._random = self.xp.random.RandomState(rank)

    def draw(self, problem: Problem) -> list:
        """Draws standard normal q, k, v and do."""
        arrays = []
        for shape in (problem.shape, problem.shape_kv, problem.shape_kv, problem.shape):
            array = self.xp.empty(shape, problem.numpy_dtype)
            for start in range(0, problem.seqlen, self._STEP):
                part = array[:, start : start + self._STEP]
                drawn = self._random.standard_normal(part.shape, dtype=self.xp.float32)
                part[...] = drawn.astype(problem.numpy_dtype)
            arrays.append(array)
        return arrays

    def mark(self):
        """Records an event on the current stream."""
        event = self.xp.cuda.Event()
        event.record()
        return event

    def milliseconds(self, start, stop) -> float:
        """Waits for the second of two marks and returns the milliseconds between them."""
        stop.synchronize()
        return self.xp.cuda.get_elapsed_time(start, stop)

    def to_host(self, array) -> np.ndarray:
        """Returns the array as NumPy's."""
        return array.get()

    def extra_bytes(self, call: Callable[[], tuple]) -> int | None:
        """Returns the peak bytes of the pool in a call, beyond its results."""
        results = []

        def counted() -> None:
            results.append(sum(array.nbytes for array in call()))

        return max(0, self.gpu.peak_bytes(counted) - results[0])

    def captured(self, call: Callable[[], tuple]) -> Callable[[], tuple]:
        """Returns the launch of a CUDA graph of a call that has been made before."""
        return self.gpu.captured(call)

    def release(self) -> None:
        """Gives unused memory of the pool back."""
        self.gpu.synchronize()
        self.gpu.release()
