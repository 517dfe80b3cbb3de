"""Runs a script as Python does, and then notes the kernels that its process has used.

Its arguments are a folder for the note, the script, and the arguments of that.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    folder, *sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        # Only now: the script says from where fa2cupy is imported.
        sys.path.append(str(Path(__file__).resolve().parent.parent))
        from common.kernel_notes import note_kernels

        note_kernels(Path(folder))
