"""Lines of the caller's function, for messages."""

from __future__ import annotations

import functools
import linecache
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, TracebackType

import numpy as np

__all__ = ["current_place", "place_of_definition", "place_of_error"]

_NOT_THE_CALLERS = (str(Path(__file__).parent), str(Path(np.__file__).parent))


def current_place() -> str:
    """The line of the caller's function that is being executed."""
    return _innermost(traceback.walk_stack(sys._getframe()))


def place_of_error(error: BaseException) -> str:
    """The line of the caller's function that raised an error."""
    found: TracebackType | None = error.__traceback__
    return _innermost(reversed(list(traceback.walk_tb(found))))


def place_of_definition(function: object) -> str:
    """The line at which a function begins; its name if it has no source."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return repr(function) if code is None else _shown(code.co_filename, code.co_firstlineno)


def _innermost(frames: Iterable[tuple[FrameType, int]]) -> str:
    for frame, line in frames:
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_THE_CALLERS):
            return _shown(file, line)
    return "unknown line"


def _shown(file: str, line: int) -> str:
    source = linecache.getline(file, line).strip()
    return f"{file}:{line}: {source}" if source else f"{file}:{line}"
