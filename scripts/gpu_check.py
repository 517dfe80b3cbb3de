"""The one command for a machine with a GPU: tests, sanitizers and benchmark, with a receipt.

    python scripts/gpu_check.py                    everything, one step after the other
    python scripts/gpu_check.py --skip benchmark   without the timings; what an earlier run noted of them stays
    python scripts/gpu_check.py --processes 6      tests side by side (pytest-xdist)
    python scripts/gpu_check.py --cache FOLDER     with kernels that are compiled already, of this very code
    python scripts/gpu_check.py --verify scripts/results/h200/check.json     needs no GPU

Writes ``scripts/results/<gpu>/check.json``: the device, driver and compiler, how many tests passed, failed and were
skipped, and what each tool of compute-sanitizer found. Tests of large arrays (``large``) and those that need two GPUs
(``several_gpus``) are counted apart; the others run once more with each array alone in pages of its own (``isolated``,
by ``pytest --isolate``). With ``--processes`` they take turns with the GPUs of the machine.

Each step is noted in the receipt when it ends, and what other runs have noted stays: short runs, one after the other or
at a time, make one receipt. A suite that is broken off goes on with the same command: the outcomes of its tests are
noted beside the receipt until it has ended. ``--verify`` says which steps are about the code of this checkout, and
returns 0 if all that were run are. Tests are about ``fa2cupy/`` and ``kernels/``, without comments, docstrings and
formatting. Sanitizers and timings are about the kernels that they ran, which are listed in ``check-sanitizers.json``
and ``check-benchmark.json``: the default tiles, and their sources or their machine code. Commit these files with the
change that they check.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import ROOT, SCRIPTS
from common.digests import code_digest
from common.measure import Gpu, find_gpu, positive_int, results_folder
from common.outcomes import counts_of, keep_outcomes_of
from common.receipt import NOT_RUN, kernels_of, note_steps, verify

from fa2cupy import info, precompile
from fa2cupy.cli import run_command

STEPS = ("tests", "large", "several_gpus", "isolated", "sanitizers", "benchmark")
#: Steps that run pytest: its marker, and further options.
SUITES = {
    "tests": ("gpu and not large and not several_gpus", ()),
    "large": ("gpu and large", ()),
    "several_gpus": ("gpu and several_gpus", ()),
    "isolated": ("gpu and not large and not several_gpus", ("--isolate",)),
}
# Kernels that a tool of compute-sanitizer cannot judge. In the sm80 kernels of dK and dV two roles of warps reach the
# block's barrier at different instructions and hand P over with bar.arrive: PTX allows both, racecheck does not model
# the second and synccheck reports the first. With bar.sync in place of bar.arrive racecheck finds nothing, and with one
# loop for both roles synccheck finds nothing; either costs up to 15 % of the speed.
NOT_MODELLED = ("fa2_backward_sm80", "fa2_backward_dkdv_sm80", "fa2_backward_one_tile")
# Nor can synccheck judge the sm80 kernel of dK' and dV' beyond 128 columns: its roles reach the block's barrier at
# different instructions, too.
TWO_LOOPS = ("fa2_dkdv_jvp_sm80_bf16_d256", "fa2_dkdv_jvp_sm80_bf16_d264v328")
# In the sm90 kernels one lane arrives at an mbarrier for its warp. racecheck treats accesses of the other lanes before
# that as unordered with those behind the barrier. With all lanes arriving it finds nothing: in the float32 kernels, in
# those of dK' and dV' (44 hazards without), in that of dbias (10 without; consumers and producer), and in forwards that
# keep a bias (6 without). Three have been read only: blocks of both passes in one launch, which are those of the second
# and of dQ; forwards that start from a bias in the producers' copies (4), whose barriers are those of the backward; and
# dQ beyond 256 columns, where a group hands dS over to another (36, each of 31 lanes in 32).
ONE_LANE_ARRIVES = (
    "fa2_backward_sm90", "fa2_backward_dkdv_sm90", "fa2_backward_both_sm90", "fa2_dkdv_jvp_sm90", "fa2_dbias_sm90",
    "bias_kept_bias", "fa2_forward_sm90_bf16_d32_r128_c64_w12_s3_b2_bias", "fa2_backward_dq_sm90_bf16_d320",
    "fa2_backward_dq_sm90_fp16_d512",
)  # fmt: skip
# racecheck reported V in the causal float64 forward of more than 128 columns, when two warps that moved their row shift
# passed one more barrier of their own than those that did not. Its copy and its reads have a barrier of the whole block
# between them, in machine code, too, and the interpreter of the tests, which finds a missing one, found nothing. Both
# pass as many barriers now, and the kernel is judged. Of decode of latent attention, whose producers pass none of the
# barriers of those that multiply, it reports the O that these exchange, and the flag of a job's last block: one thread
# stores it right before a barrier of the whole block (BAR.SYNC 0), and all load it right behind.
UNEQUAL_BARRIERS = ("fa2_decode_sm90_bf16_d576v512_r16_c64_w12",)
# racecheck stops with an internal error in a process that runs a kernel of clusters without judging it, even if it is
# to judge no kernel at all. What it reports of that kernel is what ONE_LANE_ARRIVES says.
NOT_RUN_BY = {"racecheck": ("pairs", "shared-rows")}
TOOLS = {
    "memcheck": (),
    "initcheck": (),
    "racecheck": NOT_MODELLED + ONE_LANE_ARRIVES + UNEQUAL_BARRIERS,
    "synccheck": NOT_MODELLED + TWO_LOOPS,
}
# Head dimensions of the tests. Their kernels are compiled ahead on all CPUs.
NATIVE_HEAD_DIMS = (32, 40, 64, 80, 96, 112, 128, 160, 192, 224, 256)
DTYPES = ("float16", "bfloat16", "float32", "float64")
SECONDS_FOR_A_TOOL = 480  # beside tests
#: Parts of tests/support/sanitized_calls.py. They run in parallel: a tool uses little of the GPU and one CPU.
SANITIZED_PARTS = (
    "plain", "features", "pairs", "shared-rows", "functions", "short", "both", "packed", "sparse", "boxes",
    "float32-59", "float32-128", "float32-250", "float32-96-64", "float64", "decode", "second-order-float32",
    "second-order-float64", "second-order-bfloat16", "copies",
)  # fmt: skip
# Sections of the benchmark that check a change. The others only compare with peers, and would take the check beyond ten
# minutes.
BENCHMARK_SECTIONS = ("speed", "training", "memory", "host", "startup")
SANITIZED = ROOT / "tests" / "support" / "sanitized_calls.py"
NOTED_RUN = SCRIPTS / "common" / "noted_run.py"
_CLEAN = re.compile(r"0 (errors|hazards)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the steps; returns 0 if nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip", nargs="+", choices=STEPS, default=[], metavar="STEP", help=f"of {', '.join(STEPS)}")
    parser.add_argument("--processes", type=positive_int, default=1, metavar="N", help="for the tests; default: 1")
    parser.add_argument("--out", metavar="DIR", help="default: scripts/results/<gpu>")
    parser.add_argument(
        "--cache", metavar="FOLDER", help="for compiled kernels; default: an empty one, deleted at the end"
    )
    parser.add_argument("--verify", metavar="CHECK_JSON", help="only compare a receipt with this checkout")
    options = parser.parse_args(arguments)
    if options.verify:
        try:
            return 0 if verify(Path(options.verify), ROOT) else 1
        except (OSError, ValueError) as error:
            print(f"--verify: {options.verify} is not a receipt ({error})", file=sys.stderr)
            return 2
    gpu = find_gpu()
    if gpu is None:
        return 2

    # Neither folder can supply kernels of older code: kernels are found by a digest of their complete text.
    given = options.cache and contextlib.nullcontext(options.cache)
    with given or tempfile.TemporaryDirectory(prefix="fa2cupy-check-") as cache:
        os.environ["FA2CUPY_CACHE_DIR"] = os.path.abspath(cache)
        return _check(options, gpu)


def _check(options: argparse.Namespace, gpu: Gpu) -> int:
    folder = results_folder(gpu.name, options.out)
    versions = info() | {"device": gpu.name, "driver": gpu.driver}
    path, code = folder / "check.json", {"code": code_digest(ROOT)}
    steps: dict[str, Callable[[Path, Path], object]] = {
        name: functools.partial(_run_tests, suite=name, processes=options.processes) for name in SUITES
    }
    steps |= {"sanitizers": _run_sanitizers, "benchmark": _run_benchmark}
    if not {"tests", "isolated"} <= set(options.skip):
        _compile_ahead()
    own = [name for name in STEPS if name not in options.skip]
    note_steps(path, STEPS, {})
    results = {}
    for name in own:
        note_steps(path, STEPS, {name: "not finished"})
        with tempfile.TemporaryDirectory(prefix="fa2cupy-kernels-") as notes:
            found, about = steps[name](folder, Path(notes)), code
            if name not in SUITES:
                about = kernels_of(path, name, Path(notes))
            elif code_digest(ROOT) != code["code"]:
                found, about = "not finished: fa2cupy/ or kernels/ changed meanwhile", {}
            results[name] = found
        step = {"found": found, "date": datetime.date.today().isoformat()}
        step |= {one: versions[one] for one in ("device", "driver", "nvrtc", "cupy", "python")}
        note_steps(path, STEPS, {name: step | about if about else found})
    print(path.read_text(encoding="utf-8"))
    return 0 if all(_passed(found) for found in results.values()) else 1


def _run_tests(folder: Path, _: Path, suite: str, processes: int) -> dict[str, int] | str:
    marker, more = SUITES[suite]
    # Tests of large arrays need a GPU's memory for themselves, those of several GPUs all of these.
    parallel = ["-n", str(processes), "--dist", "worksteal"] if processes > 1 and "not large" in marker else []
    outcomes = folder / f"check-{suite}.outcomes"
    keep_outcomes_of(code_digest(ROOT, "tests"), outcomes)
    options = [f"--outcomes={outcomes}", *more, *parallel]  # one word: pytest takes a path for a place of tests
    status = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", marker, *options], cwd=ROOT).returncode
    # 1: tests failed. 5: no test was left, since an earlier run ended behind the last one.
    if status not in (0, 1, 5):
        return f"not finished: pytest ended with {status}"
    found = counts_of(outcomes)
    outcomes.unlink()
    return found


def _compile_ahead() -> None:
    half = {"dtypes": ("float16", "bfloat16"), "head_dims": NATIVE_HEAD_DIMS}
    wide = {"head_dims": (*NATIVE_HEAD_DIMS, 59, 111)}
    twice = {"methods": (), "second_order": True, "dtypes": DTYPES, "head_dims": (32, 64, 128, 256)}
    calls = (
        half,
        half | {"family": "sm80"},  # the fallback on Hopper
        wide | {"dtypes": ("float32", "float64")},
        wide | {"dtypes": "float64", "family": "simt"},  # the second opinion
        twice | {"features": [(), ("dlse",)]},
    )
    print("compiling kernels of the tests", flush=True)
    # Side by side, because one process of compilers leaves half of many CPUs idle.
    with ProcessPoolExecutor(len(calls), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_precompile, calls))


def _precompile(call: dict[str, Any]) -> None:
    precompile(**call, decode=False)  # whose tests have few of the head dimensions


def _run_sanitizers(_: Path, notes: Path) -> dict[str, str] | str:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        return f"{NOT_RUN}compute-sanitizer is not on the PATH"
    # The first runs have no tool: they note the kernels, and bring those that were not compiled ahead into the disk
    # cache.
    runs = [(tool, part) for tool in TOOLS for part in SANITIZED_PARTS if part not in NOT_RUN_BY.get(tool, ())]
    with ThreadPoolExecutor(len(runs)) as pool:
        commands = [[sys.executable, str(NOTED_RUN), str(notes), str(SANITIZED), part] for part in SANITIZED_PARTS]
        list(pool.map(functools.partial(subprocess.run, check=True), commands))
        found = dict(zip(runs, pool.map(lambda run: _sanitize(sanitizer, *run), runs), strict=True))
    return {tool: _summary(tool, {part: found[one, part] for one, part in runs if one == tool}) for tool in TOOLS}


def _summary(tool: str, found: Mapping[str, str]) -> str:
    """Returns what a tool found, part by part if the parts differ."""
    texts = set(found.values())
    text = texts.pop() if len(texts) == 1 else "; ".join(f"{part}: {one}" for part, one in found.items())
    others = {"not judged": TOOLS[tool], "not run": NOT_RUN_BY.get(tool, ())}
    return "; ".join([text, *(f"{name}: {', '.join(those)}" for name, those in others.items() if those)])


def _sanitize(sanitizer: str, tool: str, part: str) -> str:
    # initcheck has to see the kernels that wrote the inputs, too. memcheck would report an API error for each function
    # that cuda-bindings asks for and the driver lacks.
    options = ["--report-api-errors", "no"] if tool == "memcheck" else []
    options += [] if tool == "initcheck" else ["--kernel-name", "kernel_substring=fa2_"]
    for name in TOOLS[tool]:
        options += ["--kernel-name-exclude", f"kernel_substring={name}"]
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", *options, sys.executable, str(SANITIZED), part]
    start = time.perf_counter()
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_FOR_A_TOOL)
    except subprocess.TimeoutExpired:
        return f"did not end within {SECONDS_FOR_A_TOOL} seconds"
    print(f"{tool}, {part}: {time.perf_counter() - start:.0f} s", flush=True)
    summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", run.stdout)
    if run.returncode not in (0, 9) or not summary:
        return f"did not run: {run.stdout[-500:]}{run.stderr[-500:]}"
    if run.returncode:
        print(run.stdout[:4000], flush=True)
    return summary[-1]


def _run_benchmark(folder: Path, notes: Path) -> str:
    command = [sys.executable, str(NOTED_RUN), str(notes), str(SCRIPTS / "benchmark.py"), "--out", str(folder)]
    return "passed" if subprocess.run([*command, "--sections", *BENCHMARK_SECTIONS]).returncode == 0 else "failed"


def _passed(found: object) -> bool:
    if isinstance(found, dict):
        return found["failed"] == 0 if "failed" in found else all(map(_CLEAN.match, found.values()))
    return found == "passed" or str(found).startswith(NOT_RUN)


if __name__ == "__main__":
    sys.exit(run_command("gpu_check.py", main))
