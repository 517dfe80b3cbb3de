"""The sweep of tiles, without a GPU."""

from __future__ import annotations

import os
import time

import pytest
import sweep
from common import measure
from common.compile_pool import Report, compile_all
from common.measure import Problem
from support.fake_timing import HAS_MATPLOTLIB, FakeGpu, needs_cupy

from fa2cupy import legal_configs
from fa2cupy.families import tuning
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.sm80 import SM80
from fa2cupy.families.tile import TileConfig
from fa2cupy.jit.spec import KernelSpec


@pytest.mark.matrix
@needs_cupy
def test_sweep_for_a_named_architecture(tmp_path, capsys):
    arguments = [
        "--arch",
        "sm_80",
        "--operation",
        "forward",
        "--head-dim",
        "64",
        "--b-r",
        "64",
        "--b-c",
        "64",
        "--warps",
        "4",
        "--stages",
        "1",
        "2",
        "--blocks",
        "1",
    ]
    assert sweep.main([*arguments, "--jobs", "2", "--out", str(tmp_path)]) == 0
    rows = measure.read_csv(tmp_path / "sweep-forward-float16-d64-s4096.csv")
    assert [(row["b_r"], row["b_c"], row["num_warps"], row["num_stages"]) for row in rows] == [
        ("64", "64", "4", "1"),
        ("64", "64", "4", "2"),
    ]
    tile_bytes = 64 * 64 * 2
    for row, tiles in zip(rows, (3, 5), strict=True):  # Q, and K and V once or twice
        registers, shared = int(row["registers"]), int(row["shared_bytes"])
        assert 64 <= registers <= 255 and int(row["spill_bytes"]) == 0 and row["status"] == "compiled"
        assert tiles * tile_bytes <= shared < (tiles + 1) * tile_bytes
        blocks = min(65536 // (-(-registers // 8) * 8 * 128), 164 * 1024 // (shared + 1024), 2048 // 128)
        assert float(row["occupancy"]) == pytest.approx(blocks * 128 / 2048, rel=1e-4)
    assert (tmp_path / "sweep-forward-float16-d64-s4096.png").exists() == HAS_MATPLOTLIB
    output = capsys.readouterr().out
    assert "shared memory" in output and measure.format_bytes(int(rows[0]["shared_bytes"])) in output


def compile_or_die(spec):
    if spec.tile.b_r == 64:
        os.abort()
    if spec.tile.b_r == 128:
        raise ValueError("ptxas did not like it")
    return Report(registers=spec.tile.b_r)


def compile_forever(spec):
    time.sleep(600)


def specs_with(*heights):
    return [KernelSpec("forward", SM80, "sm_80", "float16", 64, False, TileConfig(b_r, 64, 4)) for b_r in heights]


def test_a_crashing_compiler_is_one_row():
    specs = specs_with(32, 64, 128, 16)
    advanced = []
    reports = compile_all(specs, 2, lambda: advanced.append(1), compile_or_die)
    assert [report.registers for report in reports] == [32, 0, 0, 16]
    assert "compiler crashed (exit code -" in reports[1].failure
    assert reports[2].failure == "refused: ptxas did not like it"
    assert len(advanced) == len(specs)
    row = sweep.Row(specs[1], reports[1], 0.0, reports[1].failure)
    problem = Problem("float16", 64, 4096, 4, 32, False)
    assert "compiler crashed" in sweep.table([row], problem)[1]
    assert sweep.as_record(row, problem, {})["status"] == reports[1].failure


def test_a_compiler_that_hangs_is_ended():
    (report,) = compile_all(specs_with(32), 1, lambda: None, compile_forever, timeout_s=1.0)
    assert report.failure == "took longer than 1 s"


def test_filters_and_pruning(capsys):
    base = ["--arch", "sm_80", "--operation", "forward", "--head-dim", "60"]
    device = DeviceInfo.named("sm_80")
    everything = sweep.choose_specs(sweep.parse_arguments([*base, "--all"]), device)
    assert {spec.tile for spec in everything} == set(legal_configs("forward", head_dim=64, arch="sm_80"))
    assert {spec.head_dim for spec in everything} == {64}
    pruned = sweep.choose_specs(sweep.parse_arguments(base), device)
    assert set(pruned) < set(everything)
    for spec in pruned:
        assert spec.tile.blocks_per_sm * (spec.shared_memory_bytes + 1024) <= device.shared_memory_per_multiprocessor
    some = sweep.choose_specs(sweep.parse_arguments([*base, "--max-configs", "5", "--warps", "4"]), device)
    assert len(some) == 5 and {spec.tile.num_warps for spec in some} == {4}
    assert sweep.main([*base, "--b-r", "7"]) == 1
    assert "no legal tile is left" in capsys.readouterr().err


def test_sweep_without_gpu_or_arch_says_what_to_do(monkeypatch, capsys):
    def no_gpu():
        raise RuntimeError("no driver")

    monkeypatch.setattr(sweep, "Gpu", no_gpu)
    assert sweep.main(["--operation", "forward"]) == 2
    assert "no GPU can be used (no driver); name an architecture" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--arch sm_75", "no kernel takes float16 on T4 (sm_75): that needs compute capability 8.0 or newer"),
        ("--arch sm_86 --family sm90", "family 'sm90' does not run on GeForce RTX 3090 (sm_86)"),
        ("--arch sm_86 --family sm70", "family: expected one of ['sm90', 'sm80', 'simt'], got 'sm70'"),
        ("--arch sm_8", "arch: 'sm_8' is not known; known are sm_70, "),
    ],
)
def test_sweep_of_what_there_is_not_is_a_sentence(arguments, text, capsys):
    assert sweep.main(["--operation", "forward", *arguments.split()]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"sweep.py: {text}") and told.count("\n") == 1


@pytest.mark.matrix
@needs_cupy
def test_sweep_for_turing(tmp_path, capsys):
    arguments = "--arch sm_75 --operation forward --dtype float32 --head-dim 32 --b-r 32 --b-c 32 --warps 8 --blocks 1"
    assert sweep.main([*arguments.split(), "--jobs", "1", "--out", str(tmp_path)]) == 0
    (row,) = measure.read_csv(tmp_path / "sweep-forward-float32-d32-s4096.csv")
    assert (row["arch"], row["family"], row["status"]) == ("sm_75", "simt", "compiled")
    assert "on T4 (sm_75)" in capsys.readouterr().out


@pytest.mark.sample(operation=("forward",))
@pytest.mark.parametrize("operation", sweep.METHODS)
def test_sweep_times_checks_and_saves(operation, tmp_path, monkeypatch, capsys, tuning_folder):
    """Checks a sweep with a fake compiler, launch and clock: the faster of the correct tiles wins."""
    launched = []

    def bind(plan, buffers):
        (stage,) = plan.stages
        assert stage.spec.operation == operation

        def kernel(addresses, stream):
            named = dict(zip(buffers, addresses, strict=True))
            launched.append({name: named[name] for name in stage.spec.params.pointers})
            gpu.clock = float(stage.spec.tile.b_r)
            if stage.spec.tile.b_c == 32:
                raise RuntimeError("launch failed")

        return (kernel,)

    class Clocked(FakeGpu):
        clock = 0.0

        def elapsed_ms(self, call, repeats):
            call()
            return self.clock

    gpu = Clocked()
    monkeypatch.setattr(sweep, "Gpu", lambda: gpu)
    monkeypatch.setattr(sweep, "bind_plan", bind)
    monkeypatch.setattr(sweep, "legal_configs", lambda *a, **k: legal_configs(*a, **{**k, "arch": "sm_90"}))
    monkeypatch.setattr(sweep, "compile_all", lambda specs, jobs, advance: [Report(registers=128)] * len(specs))
    monkeypatch.setattr(sweep, "TOKENS", {"float16": 96})
    monkeypatch.setattr(sweep, "MODEL_DIM", 64)
    filters = [
        "--b-r",
        "32",
        "64",
        "--b-c",
        "32",
        "64",
        "--stages",
        "1",
        "--blocks",
        "1",
        "--seqlen",
        "48",
        "--head-dim",
        "64",
        "--save",
        "--warps",
    ]
    warps = "2" if operation in ("forward", "backward_dq") else "4"
    assert sweep.main(["--operation", operation, "--family", "sm80", *filters, warps, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.csv")
    rows = {(row["b_r"], row["b_c"]): row for row in measure.read_csv(path)}
    assert {key: row["status"] for key, row in rows.items()} == {
        ("32", "32"): "launch failed", ("64", "32"): "launch failed", ("32", "64"): "ok", ("64", "64"): "ok",
    }  # fmt: skip
    assert rows["32", "64"]["ms_median"] == "32" and rows["32", "32"]["ms_median"] == ""
    assert all(all(table.values()) for table in launched)
    tuning._tuned_tiles.cache_clear()  # the state of a new process
    saved = tuning.tuned_tile(operation, SM80, "float16", 64, False, gpu.info)
    assert (saved.b_r, saved.b_c) == (32, 64)
    assert "saved 32x64" in capsys.readouterr().out


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="modes of folders are POSIX")
def test_a_sweep_that_cannot_save_its_winner_says_why(tuning_folder, capsys):
    spec = KernelSpec("forward", SM80, "sm_80", "float16", 64, False, TileConfig(64, 32, 4))
    device = DeviceInfo.named("sm_80")
    assert sweep.save(spec, device) == 0
    assert "saved 64x32" in capsys.readouterr().out
    tuning_folder.chmod(0o777)
    assert sweep.save(spec, device) == 1
    assert f"every user can write to {tuning_folder}" in capsys.readouterr().err
