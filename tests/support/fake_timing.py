"""A fake GPU on host memory, on which every call takes the same time, and made-up rows of the benchmark."""

from __future__ import annotations

import dataclasses
import importlib.util

import benchmark
import numpy as np
import pytest
from common import measure, peers

from fa2cupy.families.device import DeviceInfo

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
needs_cupy = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="compiling needs CuPy")


class FakeGpu:
    """NumPy in the place of CuPy, and a clock on which every call takes 2 ms."""

    name, driver, xp = "NVIDIA Test GPU", "0.0", np
    info = dataclasses.replace(DeviceInfo.named("sm_90"), l2_bytes=1)

    def tensors(self, problem, count):
        rng = np.random.default_rng(0)
        shapes = (problem.shape, problem.shape_kv, problem.shape_v, problem.shape_o)
        drawn = [[rng.standard_normal(shape).astype(problem.numpy_dtype) for shape in shapes] for _ in range(count)]
        return [measure.Tensors(*arrays) for arrays in drawn]

    def address(self, array):
        return array.ctypes.data

    def elapsed_ms(self, call, repeats):
        call()
        return 2.0

    elapsed_host_ms = elapsed_ms

    def captured(self, call):
        return call

    def peak_bytes(self, call):
        return sum(array.nbytes for array in call()) + 100

    def synchronize(self):
        pass

    release = synchronize

    def precompile(self, problems, operations, features=((),), family=None, second_order=False):
        self.precompiled = list(problems), operations, features, family

    def compile(self, specs):
        self.compiled = set(specs)


class HastyGpu(FakeGpu):
    """A fake GPU that skips the calls that it times."""

    def elapsed_ms(self, call, repeats):
        return 2.0


def made_up_rows():
    for problem in benchmark.speed_problems(["float16", "float32"], [64, 128], [2048, 4096]):
        for operation in peers.OPERATIONS:
            for speed, provider in enumerate(("torch flash", "torch cudnn", "fa2cupy"), start=2):
                row = {"gpu": "Test GPU", "driver": "0.0", "date": "2026-01-01", **problem.columns()}
                row.update(operation=operation, provider=provider, ms_median=1.0)
                yield {**row, "tflops": 100.0 * speed, "ratio": 4 / speed if provider != "fa2cupy" else ""}
