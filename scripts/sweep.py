"""Sweeps the template parameters: compiles, checks, times and tabulates every legal tile of one kernel.

    python scripts/sweep.py --operation forward --head-dim 128                  on this GPU
    python scripts/sweep.py --operation backward --head-dim 64 --causal --save  the winner becomes this GPU's default
    python scripts/sweep.py --operation forward --head-dim 64 --arch sm_86      without a GPU: the compiler's report
    python scripts/sweep.py --operation backward_dq --b-r 64 128 --warps 4      only some
    python scripts/sweep.py --plot-only CSV                                     the table and picture of an earlier one

``backward`` is the kernel of ``single_pass``; ``backward_dq`` and ``backward_dkdv`` are those of ``two_pass``. Only
that kernel is timed, without Delta or the conversion of dQ, and its TFLOP/s count the matrix products it really does.
A result is checked, one head against float64, at a length that is no multiple of any tile. Then all tiles are timed
once, and the best of them again in rounds. `fa2cupy.compile_report` gives the compiler's part of the table to your own
scripts. Writes sweep-<kernel>.csv and .png, where the fastest tile and the present default are marked.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.check import HeadCheck
from common.measure import (
    Candidate,
    Gpu,
    Problem,
    find_gpu,
    format_bytes,
    milliseconds,
    plots_folder,
    positive_int,
    progress,
    results_folder,
    rotating,
    rotating_inputs,
    show_earlier,
    supported_head_dim,
    time_in_rounds,
    write_csv,
)
from common.plots import can_plot, heat_map

import fa2cupy
from fa2cupy import KernelCompileError, TileReport, UnsupportedProblemError, compile_report, legal_configs
from fa2cupy.cli import run_command
from fa2cupy.families.choice import choose
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.operations import TILED
from fa2cupy.families.registry import family_of_kernel
from fa2cupy.families.tile import TileConfig
from fa2cupy.families.tile_choice import choose_tile
from fa2cupy.families.tuning import save_tuned_tile
from fa2cupy.gpu.launch import bind_plan
from fa2cupy.jit.spec import KernelSpec
from fa2cupy.plan.plans import plan_backward, plan_forward
from fa2cupy.plan.specs import layout_of_kernel
from fa2cupy.plan.stages import Plan
from fa2cupy.problem.checks import problem_from_arrays
from fa2cupy.problem.dtypes import DTYPES
from fa2cupy.problem.options import CallOptions

TOKENS = {"float16": 16384, "bfloat16": 16384, "float32": 4096, "float64": 2048}
MODEL_DIM = 2048
CHECK_SEQLEN = 601
FINALISTS = 8
DEFAULT_STREAM = 0  # its address; CuPy launches kernels and records events on it by default
FILTERS = {
    "--b-r": "b_r",
    "--b-c": "b_c",
    "--warps": "num_warps",
    "--stages": "num_stages",
    "--blocks": "blocks_per_sm",
}
METHODS = {"forward": "forward", "backward": "single_pass", "backward_dq": "two_pass", "backward_dkdv": "two_pass"}


@dataclass
class Row:
    """One tile and its results."""

    report: TileReport
    status: str
    samples: tuple[float, ...] = ()

    @property
    def ms(self) -> float:
        """Median of the samples."""
        return statistics.median(self.samples)


def kernel_of(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the keywords that describe the kernel of the sweep."""
    return {name: getattr(options, name) for name in ("operation", "dtype", "head_dim", "head_dim_v", "arch", "family")}


def choose_tiles(options: argparse.Namespace) -> list[TileConfig]:
    """Returns the tiles of the sweep, after all filters."""
    wanted = {name: getattr(options, name) for name in FILTERS.values()}
    tiles = [
        tile
        for tile in legal_configs(**kernel_of(options), promising=not options.all)
        if all(values is None or getattr(tile, name) in values for name, values in wanted.items())
    ]
    if options.max_configs and len(tiles) > options.max_configs:
        tiles = [tiles[i * len(tiles) // options.max_configs] for i in range(options.max_configs)]
    return tiles


def columns_of(kernel: KernelSpec) -> str:
    """Returns the head_dim of q, and that of v if it differs, for names and titles."""
    return f"{kernel.head_dim}" + ("" if kernel.head_dim_v is None else f"v{kernel.head_dim_v}")


def problem_of(kernel: KernelSpec, seqlen: int) -> Problem:
    """Returns the problem on which a kernel is timed."""
    batch, num_heads = max(1, TOKENS[kernel.dtype] // seqlen), max(1, MODEL_DIM // kernel.head_dim)
    return Problem(kernel.dtype, kernel.head_dim, seqlen, batch, num_heads, kernel.causal, head_dim_v=kernel.head_dim_v)


def default_of(spec: KernelSpec, device: DeviceInfo) -> TileConfig | None:
    """Returns the tile that calls have without a ``config=``; None if none fits the device."""
    layout = layout_of_kernel(spec.kernel, device, spec.causal, spec.family_name)
    try:
        return choose_tile(spec.operation, layout.family, layout.problem, device)
    except UnsupportedProblemError:
        return None


class KernelRunner:
    """Launches the kernel of the sweep, alone, on inputs that are prepared once."""

    def __init__(self, gpu: Gpu, problem: Problem, spec: KernelSpec):
        self.gpu, self.operation, self.family = gpu, spec.operation, spec.family_name
        xp = gpu.xp
        self._arrays = []
        for tensors in rotating_inputs(gpu, problem):
            q, k, v = tensors.q, tensors.k, tensors.v
            o, lse = fa2cupy.forward(q, k, v, causal=problem.causal, family=spec.family_name)
            arrays = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "dout": tensors.do}
            self._arrays.append({**arrays, "delta": fa2cupy.delta(o, tensors.do)})
        shapes = {"dq": problem.shape, "dk": problem.shape, "dv": problem.shape_v}
        outputs = {name: xp.zeros(shape, problem.numpy_dtype) for name, shape in shapes.items()}
        for arrays in self._arrays:
            arrays.update(outputs)
        first = self._arrays[0]
        self._problem = problem_from_arrays(first["q"], first["k"], first["v"], causal=problem.causal)
        self._strides = {
            name: self._problem.kernel_strides(first[name].shape, first[name].strides)
            for name in ("q", "k", "v", "o", "dout", "dq", "dk", "dv")
        }

    def candidate(self, tile: TileConfig) -> Candidate:
        """Binds the kernel with a tile. Repeated calls add to the same workspace: values change, the time does not."""
        arguments = (self._problem, self.gpu.info, self._strides)
        options = CallOptions(config={self.operation: tile}, family=self.family)
        if self.operation == "forward":
            plan = plan_forward(*arguments, choose("forward", *arguments, options))
        else:
            options = options._replace(method=METHODS[self.operation])
            plan = plan_backward(*arguments, choose("backward", *arguments, options), with_delta=False)
        stage = next(stage for stage in plan.stages if stage.spec.operation == self.operation)
        workspaces = {w.name: self.gpu.xp.zeros(w.nbytes, "uint8") for w in plan.workspaces}
        positions = {name: position for position, name in enumerate((*self._arrays[0], *workspaces))}
        (kernel,) = bind_plan(Plan((stage,)), positions)
        address = self.gpu.address
        own = [address(workspace) for workspace in workspaces.values()]
        tables = [([address(array) for array in arrays.values()] + own,) for arrays in self._arrays]

        def launch(addresses: list[int], _kept_alive=workspaces) -> None:
            kernel(addresses, DEFAULT_STREAM)

        return Candidate(str(tile), rotating(launch, tables))


def time_rows(gpu: Gpu, problem: Problem, rows: Sequence[Row], rounds: int) -> None:
    """Checks and times the compiled tiles; the fastest are timed again in turns."""
    compiled = [row for row in rows if not row.report.failure]
    if not compiled:
        return
    spec = compiled[0].report.kernel
    small = dataclasses.replace(problem, seqlen=CHECK_SEQLEN, batch=1, num_heads=2)
    check = HeadCheck(gpu.xp, small, *gpu.tensors(small, 1))
    runner = KernelRunner(gpu, problem, spec)
    with progress(len(compiled), "timing") as bar:
        for row in compiled:
            try:
                tile = row.report.tile
                check.verify(METHODS[spec.operation], config={spec.operation: tile}, family=spec.family_name)
                candidate = runner.candidate(tile)
                candidate.call()
                row.samples = (milliseconds(gpu, candidate.call, 10.0),)
                row.status = "ok"
            except Exception as error:  # a wrong result or a refused launch is this row's result
                row.status = " ".join(str(error).split())[:200]
            bar.update()
    finalists = sorted((row for row in compiled if row.status == "ok"), key=lambda row: row.ms)[:FINALISTS]
    candidates = [runner.candidate(row.report.tile) for row in finalists]
    times = time_in_rounds(gpu, candidates, rounds, 40.0, random.Random(0))
    for row, candidate in zip(finalists, candidates, strict=True):
        row.samples = tuple(times[candidate.name])


def as_record(row: Row, problem: Problem, stamp: dict[str, object]) -> dict[str, object]:
    """Returns a row for the CSV."""
    report, spec = row.report, row.report.kernel
    record = {
        **stamp,
        "arch": spec.arch,
        "family": spec.family_name,
        **{name: getattr(spec, name) for name in ("operation", "dtype", "head_dim")},
        "head_dim_v": spec.head_dim_v or spec.head_dim,
        "seqlen": problem.seqlen,
        "causal": int(spec.causal),
        **dataclasses.asdict(report.tile),
        "registers": report.registers,
        "spill_bytes": report.spill_bytes,
        "shared_bytes": report.shared_memory_bytes,
        "occupancy": report.occupancy,
        "compile_s": report.seconds,
        "status": " ".join(row.status.split()),
        "ms_median": "",
        "ms_min": "",
        "ms_max": "",
        "tflops": "",
    }
    if row.samples:
        record.update(ms_median=row.ms, ms_min=min(row.samples), ms_max=max(row.samples))
        record["tflops"] = problem.tflops(spec.operation, row.ms)
    return record


def row_of(record: Mapping[str, str]) -> Row:
    """Returns the row that `as_record` wrote to a CSV."""
    device = DeviceInfo.named(record["arch"])
    family = family_of_kernel(record["operation"], record["dtype"], device, record["family"])
    # CSVs of earlier runs may lack columns that have a default.
    columns = [
        one for one in dataclasses.fields(TileConfig) if one.default is dataclasses.MISSING or one.name in record
    ]
    tile = TileConfig(**{one.name: int(record[one.name]) for one in columns})
    numbers = (record["dtype"], int(record["head_dim"]), bool(int(record["causal"])))
    head_dim_v = record.get("head_dim_v", record["head_dim"])
    own_v = None if head_dim_v == record["head_dim"] else int(head_dim_v)
    kernel = KernelSpec(record["operation"], family, record["arch"], *numbers, tile, head_dim_v=own_v)
    registers, spilled, shared = (int(record[name]) for name in ("registers", "spill_bytes", "shared_bytes"))
    blocks = device.resident_blocks(tile.num_threads, registers, shared) if registers else 0
    failure = "" if registers else record["status"]
    resources = (registers, spilled, shared, blocks, float(record["occupancy"]))
    report = TileReport(tile, *resources, float(record["compile_s"]), failure, kernel)
    return Row(report, record["status"], (float(record["ms_median"]),) if record["ms_median"] else ())


def show(rows: Sequence[Row], seqlen: int, path: Path, device: DeviceInfo) -> None:
    """Prints the table and draws the picture."""
    kernel = rows[0].report.kernel
    problem, default = problem_of(kernel, seqlen), default_of(kernel, device)
    print(f"family {kernel.family_name}: {problem}; the default tile is {default}")
    print(*table(rows, problem, default), sep="\n")
    if can_plot():
        plot(rows, problem, path, device, default)


def show_records(records: Sequence[Mapping[str, str]], path: Path) -> None:
    """Shows an earlier sweep."""
    device = DeviceInfo.named(records[0]["arch"])
    device = dataclasses.replace(device, name=records[0]["gpu"] or device.name)
    show([row_of(record) for record in records], int(records[0]["seqlen"]), path, device)


def table(rows: Sequence[Row], problem: Problem, default: TileConfig | None = None) -> list[str]:
    """Returns the printed table: the fastest tiles first, or by tile if none was timed."""
    ordered = sorted(rows, key=lambda row: row.ms if row.samples else float("inf"))
    lines = ["  b_r  b_c warps stages blocks  registers  spilled  shared memory  occupancy         ms  TFLOP/s"]
    for row in ordered:
        tile, report = row.report.tile, row.report
        line = f"{tile.b_r:5d}{tile.b_c:5d}{tile.num_warps:6d}{tile.num_stages:7d}{tile.blocks_per_sm:7d}"
        if report.failure:
            lines.append(f"{line}  {' '.join(row.status.split())[:90]}")
            continue
        line += f"{report.registers:11d}{report.spill_bytes:7d} B{format_bytes(report.shared_memory_bytes):>15s}"
        line += f"{report.occupancy:11.1%}"
        if row.samples:
            line += f"{row.ms:12.4f}{problem.tflops(report.kernel.operation, row.ms):9.1f}"
        elif row.status != "compiled":
            line += f"  {row.status[:60]}"
        lines.append(line + ("  the default" if tile == default else ""))
    return lines


def plot(rows: Sequence[Row], problem: Problem, path: Path, device: DeviceInfo, default: TileConfig | None) -> None:
    """Draws the heat map: the best variant for each (b_r, b_c), by speed if any was timed, else by occupancy.

    The cell of the fastest tile is marked, and that of the default, of which another variant may be better.
    """
    timed = [row for row in rows if row.samples]
    shown = timed or [row for row in rows if not row.report.failure]
    cells: dict[tuple[int, int], tuple[float, str]] = {}
    for row in sorted(shown, key=lambda row: (row.report.spill_bytes == 0, row.report.occupancy)):
        tile = row.report.tile
        value = problem.tflops(row.report.kernel.operation, row.ms) if timed else 100 * row.report.occupancy
        text = f"{tile.num_warps}w {tile.num_stages}s {tile.blocks_per_sm}b"
        if not timed:
            text += f", {row.report.registers} reg"
        key = (tile.b_r, tile.b_c)
        if not timed or key not in cells or value > cells[key][0]:
            cells[key] = (value, text)
    if cells:
        spec = shown[0].report.kernel
        mask = "causal" if spec.causal else "full"
        kernel = f"{spec.operation}, {spec.dtype}, head_dim {columns_of(spec)}, {mask}"
        title = f"{kernel}, {device.name}\n(warps, stages, blocks)"
        marks = {f"default: {default}": (default.b_r, default.b_c)} if default else {}
        if timed:
            fastest = min(timed, key=lambda row: row.ms).report.tile
            marks[f"fastest: {fastest}"] = (fastest.b_r, fastest.b_c)
        heat_map(path, title, "TFLOP/s" if timed else "occupancy, % (without spills if possible)", cells, marks)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--operation", choices=TILED, help="the kernel")
    add("--dtype", choices=DTYPES, default="float16", help="default: %(default)s")
    add("--head-dim", type=supported_head_dim, default=128, metavar="N", help="default: %(default)s")
    add("--head-dim-v", type=supported_head_dim, metavar="N", help="columns of v if they differ")
    add("--seqlen", type=positive_int, default=4096, metavar="N", help="of the timed calls; default: %(default)s")
    add("--causal", action="store_true", help="the kernel with the causal mask")
    add("--family", metavar="NAME", help="kernel family; default: what the device and dtype call for")
    add("--arch", metavar="NAME", help="compile for an architecture such as sm_86, and time nothing")
    for option, name in FILTERS.items():
        add(option, dest=name, nargs="+", type=int, metavar="N", help=f"only these {name}")
    add("--all", action="store_true", help="also tiles that cannot be fast: too few blocks or warps fit")
    add("--max-configs", type=positive_int, metavar="N", help="at most so many, evenly spread")
    add("--jobs", type=positive_int, metavar="N", help="compilers at a time; one per CPU by default")
    add(
        "--rounds",
        type=positive_int,
        default=3,
        metavar="N",
        help=f"of timing the {FINALISTS} best; default: %(default)s",
    )
    add("--save", action="store_true", help="write the winner to the user's tuning file")
    add("--out", metavar="DIR", help="default: scripts/results/<gpu or arch>")
    add("--plot-only", metavar="CSV", help="show an earlier sweep; needs no GPU")
    options = parser.parse_args(arguments)
    if not options.operation and not options.plot_only:
        parser.error(f"--operation: name the kernel, one of {', '.join(TILED)}")
    if options.save and options.arch:
        parser.error("--save: nothing is timed with --arch, so there is no winner")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if not a single tile works."""
    options = parse_arguments(arguments)
    if options.plot_only:
        source, chosen = Path(options.plot_only), options.out
        picture = f"{source.stem}.png"
        return show_earlier(source, lambda records: show_records(records, plots_folder(source, chosen) / picture))
    gpu = None if options.arch else find_gpu("; or name an architecture to compile for, such as --arch sm_80")
    if gpu is None and not options.arch:
        return 2
    try:
        device = gpu.info if gpu else DeviceInfo.named(options.arch)
        tiles = choose_tiles(options)
        if not tiles:
            print("no legal tile is left; loosen the filters or pass --all", file=sys.stderr)
            return 1
        print(f"{len(tiles)} tiles of {options.operation} on {device.name} ({device.arch})", flush=True)
        described = kernel_of(options) | {"causal": options.causal}
        reports = compile_report(**described, configs=tiles, jobs=options.jobs, progress=True)
    except (ValueError, UnsupportedProblemError, KernelCompileError) as error:
        # no such architecture or family, no kernel for the dtype, or no compiler
        print(f"sweep.py: {error}", file=sys.stderr)
        return 2
    rows = [Row(report, report.failure or "compiled") for report in reports]
    problem = problem_of(reports[0].kernel, options.seqlen)
    stamp = {"gpu": device.name if gpu else "", "date": datetime.date.today().isoformat()}
    name = f"sweep-{options.operation}-{options.dtype}-d{columns_of(reports[0].kernel)}-s{problem.seqlen}"
    path = (
        results_folder(device.name if gpu else device.arch, options.out)
        / f"{name}{'-causal' if options.causal else ''}.csv"
    )
    try:
        if gpu:
            time_rows(gpu, problem, rows, options.rounds)
    finally:
        records = [as_record(row, problem, stamp) for row in rows]
        write_csv(path, list(records[0]), records)
    show(rows, problem.seqlen, path.with_suffix(".png"), device)
    print(f"written to {path}")
    if not gpu:
        return 0 if any(not row.report.failure for row in rows) else 1
    timed = [row for row in rows if row.samples]
    if not timed:
        print("not a single tile gives right results", file=sys.stderr)
        return 1
    return save(min(timed, key=lambda row: row.ms).report.kernel, device) if options.save else 0


def save(spec: KernelSpec, device: DeviceInfo) -> int:
    """Makes a tile the default for calls on this device; returns 0 if it could be saved."""
    try:
        save_tuned_tile(spec.family, spec.kernel, spec.causal, device, spec.tile)
    except OSError as error:  # somebody else can write to the folder, or saves to it just now
        print(f"--save: {error}", file=sys.stderr)
        return 1
    print(f"saved {spec.tile} as the default of {spec.operation} on this GPU")
    return 0


if __name__ == "__main__":
    sys.exit(run_command("sweep.py", main))
