"""Reports of what the compiler makes of tiles: the rows, the compilers' processes, and mistakes."""

from __future__ import annotations

import dataclasses
import inspect
import os
import time

import pytest

import fa2cupy
from fa2cupy import TileConfig, UnsupportedProblemError, compile_report, inspection, legal_configs
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.sm80 import SM80
from fa2cupy.jit import processes
from fa2cupy.jit.processes import Report, compile_all
from fa2cupy.jit.spec import KernelSpec
from fa2cupy.plan.specs import default_specs

TILE = TileConfig(64, 64, 4)


@pytest.fixture
def compiled(monkeypatch):
    """Replaces the compilers; gives the specs that they get, and a way to have them fail."""
    specs = []

    def compile_all(given, jobs, done=None):
        specs.extend(given)
        return [Report(128, 8, 1.5) if spec.tile.b_c < 96 else Report(failure="refused: no") for spec in given]

    monkeypatch.setattr(inspection, "check_arch", lambda arch: None)
    monkeypatch.setattr(processes, "compile_all", compile_all)
    return specs


def test_a_row_has_what_a_tile_takes(compiled):
    device = DeviceInfo.named("sm_80")
    good, bad = compile_report("forward", head_dim=60, arch="sm_80", configs=[TILE, TileConfig(64, 96, 4)])
    assert (good.tile, good.registers, good.spill_bytes, good.seconds, good.failure) == (TILE, 128, 8, 1.5, "")
    assert good.shared_memory_bytes == 3 * 64 * 64 * 2  # Q, K and V
    assert good.resident_blocks == min(65536 // (128 * 128), 164 * 1024 // (24 * 1024 + 1024), 2048 // 128)
    assert good.occupancy == good.resident_blocks * 128 / device.threads_per_multiprocessor
    assert (bad.failure, bad.resident_blocks, bad.occupancy) == ("refused: no", 0, 0)
    assert good.kernel == KernelSpec("forward", SM80, "sm_80", "float16", 64, False, TILE)
    assert "kernel=" not in repr(good) and "occupancy=0.25" in repr(good)


def test_the_tiles_are_those_that_can_be_fast(compiled):
    """Checks both reasons against their definitions."""
    device = DeviceInfo.named("sm_86")
    rows = compile_report("backward", dtype="float32", head_dim=128, arch="sm_86", family="simt")
    promising = [row.tile for row in rows]
    assert promising == legal_configs(
        "backward", dtype="float32", head_dim=128, arch="sm_86", family="simt", promising=True
    )
    legal = legal_configs("backward", dtype="float32", head_dim=128, arch="sm_86", family="simt")
    shared = {
        row.tile: row.shared_memory_bytes + device.reserved_shared_memory
        for row in compile_report("backward", dtype="float32", head_dim=128, arch="sm_86", family="simt", configs=legal)
    }
    room = device.shared_memory_per_multiprocessor
    assert promising == [
        tile
        for tile in legal
        if shared[tile] * tile.blocks_per_sm <= room and room // shared[tile] * tile.num_warps >= 4
    ]
    assert 0 < len(promising) < len(legal)


def test_the_numbers_of_tiles_are_those_of_the_docstring():
    numbers = [len(legal_configs("forward", head_dim=64, arch="sm_80", promising=one)) for one in (True, False)]
    assert "{} of {} tiles".format(*numbers) in inspect.getdoc(legal_configs)


@pytest.mark.parametrize("operation", ["forward", "backward", "backward_dq", "backward_dkdv"])
@pytest.mark.parametrize("features", [(), ("window", "softcap"), ("cu_seqlens", "bias")], ids="-".join)
def test_kernels_are_those_of_calls(operation, features, compiled):
    method = {"forward": None, "backward": "single_pass"}.get(operation, "two_pass")
    of_calls = default_specs(DeviceInfo.named("sm_80"), "float16", 60, True, method, features=features)
    expected = next(spec for spec in of_calls if spec.operation == operation)
    options = {"head_dim": 60, "causal": True, "arch": "sm_80", "features": features}
    (row,) = compile_report(operation, configs=expected.tile, **options)
    assert row.kernel == expected and compiled == [expected]


def test_a_function_is_part_of_the_kernel(compiled):
    (row,) = compile_report(
        "forward", arch="sm_90", configs=TileConfig(128, 64, 12, 2), score_mod=lambda s, b, h, q, k: s * q
    )
    assert "score_mod" in str(row.kernel)
    (row,) = compile_report(
        "forward", dtype="float32", arch="sm_90", features=("block_mask",), configs=TileConfig(32, 32, 4)
    )
    assert row.kernel.family_name == "simt", "kernels of parts take no map"


WRONG = {
    "operation": (("sideways",), {}, ValueError, "operation: expected one of"),
    "delta": (("delta",), {}, ValueError, "operation: expected one of"),
    "arch": (("forward",), {"arch": "sm_8"}, UnsupportedProblemError, "arch: 'sm_8' is not known"),
    "dtype": (("forward",), {"dtype": "int8"}, UnsupportedProblemError, "dtype: expected"),
    "head_dim": (("forward",), {"head_dim": 0}, ValueError, "head_dim: expected at least 1"),
    "family": (("forward",), {"family": "sm70"}, ValueError, "family: expected one of"),
    "features": (("forward",), {"features": "windows"}, ValueError, "features: expected .*did you mean 'window'"),
    "several calls": (("forward",), {"features": [(), ("window",)]}, ValueError, "features: expected those of one"),
    "illegal tile": (("forward",), {"configs": TileConfig(7, 64, 4)}, ValueError, "configs: 7x64, .* is not legal for"),
    "no tile": (("forward",), {"configs": [(64, 64, 4)]}, TypeError, "configs: expected a TileConfig .* got tuple"),
    "by operation": (("forward",), {"configs": {"forward": TILE}}, TypeError, "configs: expected .* got str"),
    "jobs": (("forward",), {"jobs": 0}, ValueError, "jobs: expected at least 1"),
    "causal": (("forward",), {"causal": 1}, TypeError, "causal: expected a bool"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_mistakes_are_refused_before_anything_is_compiled(mistake, compiled):
    arguments, options, error, match = WRONG[mistake]
    with pytest.raises(error, match=match):
        compile_report(*arguments, **{"arch": "sm_80", **options})
    assert not compiled


def test_without_a_compiler_it_says_so(monkeypatch):
    def check_arch(arch):
        raise fa2cupy.KernelCompileError("compiling a kernel needs CuPy")

    monkeypatch.setattr(inspection, "check_arch", check_arch)
    with pytest.raises(fa2cupy.KernelCompileError, match="needs CuPy"):
        compile_report("forward", arch="sm_80", configs=TILE)


# ----------------------------------------------------------------------------------------------------------- processes


def compile_or_die(spec):
    if spec.tile.b_r == 64:
        os.abort()
    if spec.tile.b_r == 128:
        raise ValueError("ptxas did not like it")
    return Report(registers=spec.tile.b_r)


def compile_forever(spec):
    time.sleep(600)


def specs_with(*heights):
    return [
        KernelSpec("forward", SM80, "sm_80", "float16", 64, False, dataclasses.replace(TILE, b_r=b_r))
        for b_r in heights
    ]


def test_a_crashing_compiler_is_one_report():
    specs = specs_with(32, 64, 128, 16)
    done = []
    reports = compile_all(specs, 2, lambda: done.append(1), compile_or_die)
    assert [report.registers for report in reports] == [32, 0, 0, 16]
    assert "compiler crashed (exit code -" in reports[1].failure
    assert reports[2].failure == "refused: ptxas did not like it"
    assert len(done) == len(specs)


def test_a_compiler_that_hangs_is_ended():
    (report,) = compile_all(specs_with(32), 1, task=compile_forever, timeout_s=1.0)
    assert report.failure == "took longer than 1 s"


def test_an_interrupt_waits_for_no_compiler():
    def interrupt():
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        compile_all(specs_with(32, 16), 2, interrupt, task=compile_some)
    assert time.monotonic() - start < 60


def compile_some(spec):
    return Report() if spec.tile.b_r == 32 else time.sleep(600)
