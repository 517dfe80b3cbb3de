"""The files of scripts that compare a checkout with what an earlier run wrote. Nothing here imports fa2cupy."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

__all__ = ["add_record_arguments"]


def add_record_arguments(parser: argparse.ArgumentParser, content: str) -> None:
    """Adds the arguments `out`, a path, and `against`, the content of an earlier file or None."""
    parser.add_argument("out", type=_new_file, help=f"JSON file for {content}")
    parser.add_argument("--against", type=_earlier_file, metavar="JSON", help="compare with what an earlier run wrote")


def _new_file(text: str) -> Path:
    """Parses the path of a file to write, which is not to fail after minutes of work."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, got {text!r}")
    return path


def _earlier_file(text: str) -> Any:
    try:
        return json.loads(Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be read as what an earlier run wrote ({error})") from error
