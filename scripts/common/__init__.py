"""The code that the scripts share. Importing it makes ``fa2cupy`` importable in a checkout that is not installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

__all__ = ["ROOT", "SCRIPTS"]

SCRIPTS = Path(__file__).resolve().parent.parent
ROOT = SCRIPTS.parent

if importlib.util.find_spec("fa2cupy") is None:
    sys.path.insert(0, str(ROOT))
