"""The one command for a machine with a GPU: tests, sanitizers and benchmark, with a receipt.

    python scripts/gpu_check.py                    everything: about ten minutes on an H100
    python scripts/gpu_check.py --skip benchmark   without the timings

Writes ``scripts/results/<gpu>/check.json``: the device, driver and compiler, how many tests passed, failed and were
skipped, what each tool of compute-sanitizer found, and a digest of ``fa2cupy/`` and ``kernels/``, so that a receipt can be
held against the code that it is about (``--verify`` does). Commit it with the change that it checks.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from _measure import ROOT, Gpu, results_folder

from fa2cupy import info

STEPS = ("tests", "sanitizers", "benchmark")
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
SANITIZED = ROOT / "tests" / "sanitized_calls.py"


def main() -> int:
    """Runs the steps; returns 0 if nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip", nargs="+", choices=STEPS, default=[])
    parser.add_argument("--out", help="folder for the results")
    parser.add_argument("--verify", metavar="CHECK_JSON", help="only compare a receipt's digest with this checkout")
    options = parser.parse_args()
    if options.verify:
        return _verify(Path(options.verify))

    gpu = Gpu()
    folder = results_folder(gpu.name, options.out)
    versions = info()
    receipt = {
        "date": datetime.date.today().isoformat(),
        "device": gpu.name,
        "driver": gpu.driver,
        "nvrtc": versions["nvrtc"],
        "cupy": versions["cupy"],
        "python": versions["python"],
        "digest": code_digest(ROOT),
    }
    if "tests" not in options.skip:
        receipt["tests"] = _run_tests(folder)
    if "sanitizers" not in options.skip:
        receipt["sanitizers"] = _run_sanitizers()
    if "benchmark" not in options.skip:
        command = [sys.executable, str(ROOT / "scripts" / "benchmark.py"), "--out", str(folder)]
        receipt["benchmark"] = "passed" if subprocess.run(command).returncode == 0 else "failed"
    (folder / "check.json").write_text(json.dumps(receipt, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(receipt, indent=2))
    return 0 if _passed(receipt) else 1


def code_digest(root: Path) -> str:
    """sha256 over names and contents of the package and the templates."""
    digest = hashlib.sha256()
    files = (path for folder in ("fa2cupy", "kernels") for path in (root / folder).rglob("*"))
    for path in sorted(p for p in files if p.suffix in (".py", ".cu", ".cuh", ".j2")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _verify(path: Path) -> int:
    same = json.loads(path.read_text(encoding="utf-8"))["digest"] == code_digest(ROOT)
    print(f"{path} is about {'this code' if same else 'other code'}")
    return 0 if same else 1


def _run_tests(folder: Path) -> dict[str, object]:
    report = folder / "tests.xml"
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={report}"], cwd=ROOT)
    suite = next(ElementTree.parse(report).iter("testsuite"))
    report.unlink()
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    return {
        "passed": counts["tests"] - failed - counts["skipped"],
        "failed": failed,
        "skipped": counts["skipped"],
        "seconds": round(time.perf_counter() - start),
    }


def _run_sanitizers() -> dict[str, str]:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        return {tool: "not run: compute-sanitizer is not on the PATH" for tool in TOOLS}
    results = {}
    # Once without a tool: kernels are then in the disk cache, and the tools need not wait for the compiler.
    subprocess.run([sys.executable, str(SANITIZED)], check=True)
    for tool in TOOLS:
        options = ["--tool", tool, "--kernel-name", "kernel_substring=fa2_", "--error-exitcode", "9"]
        run = subprocess.run([sanitizer, *options, sys.executable, str(SANITIZED)], capture_output=True, text=True)
        summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (.*)", run.stdout)
        results[tool] = summary[-1] if run.returncode in (0, 9) and summary else f"did not run: {run.stdout[-500:]}{run.stderr[-500:]}"
        print(f"{tool}: {results[tool]}", flush=True)
        if run.returncode:
            print(run.stdout[:4000], flush=True)
    return results


def _passed(receipt: dict) -> bool:
    return (
        receipt.get("tests", {}).get("failed", 0) == 0
        and all(re.match(r"0 (errors|hazards)|not run", text) for text in receipt.get("sanitizers", {}).values())
        and receipt.get("benchmark") != "failed"
    )


if __name__ == "__main__":
    sys.exit(main())
