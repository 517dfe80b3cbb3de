"""The sweep of tiles, without a GPU."""

from __future__ import annotations

import dataclasses
import os

import pytest
import sweep
from common import measure, plots
from common.measure import Problem
from support.fake_timing import HAS_MATPLOTLIB, FakeGpu, needs_cupy

from fa2cupy import TileReport, compile_report, inspection, legal_configs
from fa2cupy.families import tuning
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.family import Kernel
from fa2cupy.families.sm80 import SM80
from fa2cupy.families.tile import TileConfig
from fa2cupy.jit import processes
from fa2cupy.jit.processes import Report
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


def kernel_with(b_r: int, b_c: int = 64, num_warps: int = 4) -> KernelSpec:
    return KernelSpec("forward", SM80, "sm_80", "float16", 64, False, TileConfig(b_r, b_c, num_warps))


def row_of(kernel: KernelSpec, *samples: float, failure: str = "", registers: int = 128) -> sweep.Row:
    shared, device = kernel.shared_memory_bytes, DeviceInfo.named("sm_80")
    blocks = device.resident_blocks(kernel.tile.num_threads, registers, shared) if registers else 0
    report = TileReport(kernel.tile, registers, 0, shared, blocks, 0.25, 1.5, failure, kernel)
    return sweep.Row(report, failure or "compiled", samples)


PROBLEM = Problem("float16", 64, 4096, 4, 32, False)


def test_a_row_of_two_head_dims_is_read_back(tmp_path):
    pair = dataclasses.replace(kernel_with(64), head_dim=192, head_dim_v=128)
    problem = sweep.problem_of(pair, 4096)
    assert (problem.shape[-1], problem.shape_o[-1]) == (192, 128)
    for kernel in (pair, kernel_with(64)):
        written = sweep.as_record(row_of(kernel), problem, {})
        measure.write_csv(tmp_path / "rows.csv", list(written), [written])
        (record,) = measure.read_csv(tmp_path / "rows.csv")
        assert sweep.row_of(record).report.kernel == kernel
    del record["head_dim_v"]  # as in records of sweeps before
    assert sweep.row_of(record).report.kernel == kernel_with(64)


def test_a_compiler_that_crashed_is_one_row():
    row = row_of(kernel_with(64), failure="compiler crashed (exit code -6)")
    assert "compiler crashed" in sweep.table([row], PROBLEM)[1]
    assert sweep.as_record(row, PROBLEM, {})["status"] == "compiler crashed (exit code -6)"


def test_filters(capsys):
    base = ["--arch", "sm_80", "--operation", "forward", "--head-dim", "60"]
    everything = sweep.choose_tiles(sweep.parse_arguments([*base, "--all"]))
    assert everything == legal_configs("forward", head_dim=60, arch="sm_80")
    assert sweep.choose_tiles(sweep.parse_arguments(base)) == legal_configs(
        "forward", head_dim=60, arch="sm_80", promising=True
    )
    some = sweep.choose_tiles(sweep.parse_arguments([*base, "--max-configs", "5", "--warps", "4"]))
    assert len(some) == 5 and {tile.num_warps for tile in some} == {4}
    assert sweep.main([*base, "--b-r", "7"]) == 1
    assert "no legal tile is left" in capsys.readouterr().err


def test_a_row_is_read_as_it_was_written():
    tried = [
        row_of(kernel_with(64), 2.0),
        row_of(kernel_with(128)),
        row_of(kernel_with(64, 32), failure="refused", registers=0),
    ]
    for row in tried:
        record = {name: str(value) for name, value in sweep.as_record(row, PROBLEM, {}).items()}
        found = sweep.row_of(record)
        assert (found.status, found.samples, found.report) == (row.status, row.samples, row.report)


@pytest.mark.parametrize("default", [TileConfig(128, 64, 8), TileConfig(256, 32, 8), None])
def test_the_winner_and_the_default_are_marked(default, monkeypatch, tmp_path):
    rows = [row_of(kernel_with(64), 2.0), row_of(kernel_with(128), 3.0), row_of(kernel_with(128, 64, 8), 4.0)]
    assert [line.endswith("  the default") for line in sweep.table(rows, PROBLEM, default)[1:]] == [
        False, False, default == TileConfig(128, 64, 8),
    ]  # fmt: skip
    drawn = []
    monkeypatch.setattr(sweep, "heat_map", lambda *arguments: drawn.append(arguments))
    sweep.plot(rows, PROBLEM, tmp_path, DeviceInfo.named("sm_80"), default)
    ((*_, cells, marks),) = drawn
    assert set(cells) == {(64, 64), (128, 64)} and cells[128, 64][1].startswith("4w")
    assert marks == {"fastest: 64x64, 4 warps, 1 stages": (64, 64)} | (
        {f"default: {default}": (default.b_r, default.b_c)} if default else {}
    )
    sweep.plot([row_of(kernel_with(64))], PROBLEM, tmp_path, DeviceInfo.named("sm_80"), default)
    assert not [label for label in drawn[-1][-1] if "fastest" in label], "nothing was timed"


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="plots need matplotlib")
def test_marks_of_cells_that_exist_are_drawn(tmp_path, monkeypatch):
    legends = []
    figure = plots.new_figure(1, 1)
    monkeypatch.setattr(type(figure), "legend", lambda self, **_: legends.append(self.axes[0].patches))
    cells = {(64, 64): (1.0, "4w"), (128, 64): (2.0, "8w")}
    plots.heat_map(tmp_path / "a.png", "title", "unit", cells, {"default": (256, 64)})
    plots.heat_map(tmp_path / "b.png", "title", "unit", cells, {"default": (64, 64), "fastest": (64, 64)})
    ((outer, inner),) = legends
    assert outer.get_x() < inner.get_x() and outer.get_width() > inner.get_width()


def test_sweep_without_gpu_or_arch_says_what_to_do(monkeypatch, capsys):
    def no_gpu():
        raise RuntimeError("no driver")

    monkeypatch.setattr(measure, "Gpu", no_gpu)
    assert sweep.main(["--operation", "forward"]) == 2
    told = capsys.readouterr().err
    assert (
        told.startswith("this needs a CUDA GPU and CuPy: no driver; or name an architecture") and told.count("\n") == 1
    )


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
    monkeypatch.setattr(sweep, "find_gpu", lambda _: gpu)
    monkeypatch.setattr(sweep, "bind_plan", bind)
    monkeypatch.setattr(sweep, "legal_configs", lambda *a, **k: legal_configs(*a, **{**k, "arch": "sm_90"}))
    monkeypatch.setattr(sweep, "compile_report", lambda **k: compile_report(**{**k, "arch": "sm_90"}))
    monkeypatch.setattr(inspection, "check_arch", lambda arch: None)
    monkeypatch.setattr(processes, "compile_all", lambda specs, *_: [Report(registers=128)] * len(specs))
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
    saved = tuning.tuned_tile(SM80, Kernel(operation, "float16", 64, 64), False, gpu.info)
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
