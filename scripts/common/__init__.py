"""The code that the scripts share. After its import, ``fa2cupy`` is the one of this checkout, installed or not."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["ROOT", "SCRIPTS"]

SCRIPTS = Path(__file__).resolve().parent.parent
ROOT = SCRIPTS.parent

# First: an installed fa2cupy may be of another checkout, or of this one before a change.
sys.path.insert(0, str(ROOT))
