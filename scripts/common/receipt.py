"""The receipt of ``gpu_check.py``: what each step found, where and when, and which code that is about.

A step that ran tests is about all code, without comments, docstrings and formatting. One that ran sanitizers or timings
is about its kernels, which a file beside the receipt lists. A step that was not run, or did not finish, is a sentence.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .digests import code_digest
from .kernel_notes import together, why_others

__all__ = ["NOT_RUN", "SKIPPED", "kernels_of", "note_steps", "read_receipt", "verify"]

SKIPPED, NOT_RUN = "skipped", "not run: "


def read_receipt(path: Path) -> dict[str, Any]:
    """Returns the steps of a receipt.

    Raises
    ------
    OSError, ValueError
        It cannot be read, or is none, or one of an older format.
    """
    receipt = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(receipt, dict) or not receipt:
        raise ValueError("it names no steps")
    if "digest" in receipt:
        raise ValueError("its format is older, with one digest for all steps; they must be run again")
    for name, step in receipt.items():
        is_run = isinstance(step, dict) and {"found", "date"} <= {*step} and ("code" in step) != ("kernels" in step)
        if not is_run and not isinstance(step, str):
            raise ValueError(f"{name} does not say what it found in which code")
    return receipt


def note_steps(path: Path, names: Sequence[str], steps: Mapping[str, object]) -> None:
    """Notes steps beside what earlier runs have noted of the others, of whatever code; `names` are those of all."""
    try:
        before = read_receipt(path)
    except (OSError, ValueError):
        before = {}
    receipt = {name: steps.get(name, before.get(name, SKIPPED)) for name in names}
    written = path.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps(receipt, indent=2) + "\n", encoding="utf-8")
    written.replace(path)


def kernels_of(path: Path, step: str, notes: Path) -> dict[str, str]:
    """Writes the file with the kernels of a step; returns what the step notes of it, nothing if there are none."""
    noted = together(notes)
    if not noted:
        return {}
    content = json.dumps(noted, indent=0) + "\n"
    _kernel_file(path, step).write_text(content, encoding="utf-8")
    return {"kernels": _sha256(content)}


def verify(path: Path, root: Path) -> bool:
    """Prints which steps are about the code of a checkout; returns True if all that were run are, and one was.

    Raises
    ------
    OSError, ValueError
        As `read_receipt`.
    """
    about_this = []
    for name, step in read_receipt(path).items():
        if isinstance(step, str):
            print(f"{name}: {step}")
            if step != SKIPPED and not step.startswith(NOT_RUN):
                about_this.append(False)
            continue
        why = _why_other_code(path, name, step, root)
        print(f"{name}: about {f'other code: {why}' if why else 'this code'} ({step['date']}, {step['found']})")
        about_this.append(not why)
    return bool(about_this) and all(about_this)


def _why_other_code(path: Path, name: str, step: Mapping[str, Any], root: Path) -> str:
    if "code" in step:
        return "" if step["code"] == code_digest(root) else "fa2cupy/ or kernels/ differ"
    try:
        content = _kernel_file(path, name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        return f"its kernels are unknown ({error})"
    if _sha256(content) != step["kernels"]:
        return f"its kernels are unknown ({_kernel_file(path, name).name} is of another run)"
    return why_others(json.loads(content))


def _kernel_file(path: Path, step: str) -> Path:
    return path.with_name(f"{path.stem}-{step}.json")


def _sha256(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()
