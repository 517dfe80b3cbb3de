"""The warnings of a call."""

from __future__ import annotations

import warnings
from collections.abc import Callable


def warnings_of(function: Callable[[], object]) -> list[str]:
    """Returns the texts of all warnings, including repeated ones."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(warning.message) for warning in caught]
