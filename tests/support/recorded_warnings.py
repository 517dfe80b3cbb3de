"""The warnings of a call."""

from __future__ import annotations

import warnings
from collections.abc import Callable


def warnings_of(function: Callable[[], object]) -> list[str]:
    """Texts of all warnings, repeated ones included."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(warning.message) for warning in caught]
