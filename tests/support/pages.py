"""Runs the Python of README.md and docs/: blocks of a page in their order, in one namespace.

docs/contributing.md describes the marks, which are comments above a block.
"""

from __future__ import annotations

import doctest
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

from . import CHECKOUT

__all__ = ["PAGES", "Block", "python_blocks", "run_page"]

#: README.md and every page of docs/, by its name in a checkout.
PAGES = [
    path.relative_to(CHECKOUT).as_posix() for path in (CHECKOUT / "README.md", *sorted(CHECKOUT.glob("docs/*.md")))
]

_KINDS = ("needs", "run by", "without a GPU")
_MARK = re.compile(rf"<!-- ({'|'.join(_KINDS)}) (.*) -->")
_BLOCK = re.compile(r"^((?:<!-- [^\n]* -->\n)*)```(python|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FOLDER_OF_COMMANDS = str(Path(sys.executable).parent)  # of mpiexec, where pip has installed it


@dataclass(frozen=True)
class Block:
    """A block of Python, and its marks."""

    page: str
    line: int  # that of the first line of Python in the page
    language: str
    text: str
    needs: tuple[str, ...] = ()  # "gpu", "gpus" (two of them), or modules
    run_by: tuple[str, ...] = ()  # the command of a block that is a program of its own
    changes: tuple[tuple[str, str], ...] = ()  # what is shorter where there is no GPU: (shown, instead)

    def text_on(self, gpus: int) -> str:
        """Returns the Python that runs: without a GPU NumPy takes the place of CuPy."""
        if gpus:
            return self.text
        text = self.text
        for shown, instead in self.changes:
            assert shown in text, f"{self.page}:{self.line}: the block does not have {shown!r}"
            text = text.replace(shown, instead)
        return re.sub(r"\bimport cupy\b( as)?", lambda found: f"import numpy as{'' if found[1] else ' cupy'}", text)

    def why_not(self, gpus: int) -> str | None:
        """Returns what is missing to run the block."""
        for name in self.needs:
            if name in ("gpu", "gpus"):
                if gpus < 1 + (name == "gpus"):
                    return "a GPU" if name == "gpu" else "two GPUs"
            elif importlib.util.find_spec(name) is None:
                return f"the module {name}"
        if self.run_by and _command(self.run_by[0]) is None:
            return f"the command {self.run_by[0]}"
        return None


def python_blocks(page: str) -> list[Block]:
    """Returns the blocks of a page in their order."""
    text = (CHECKOUT / page).read_text(encoding="utf-8")
    blocks = []
    for found in _BLOCK.finditer(text):
        marks = [_MARK.fullmatch(line) for line in found[1].splitlines()]
        assert all(marks), f"{page}: one of these is no mark of a block: {found[1]}"
        values = {kind: [mark[2] for mark in marks if mark[1] == kind] for kind in _KINDS}
        blocks.append(
            Block(
                page,
                1 + text.count("\n", 0, found.start(3)),
                found[2],
                found[3],
                needs=tuple(name for value in values["needs"] for name in value.split()),
                run_by=tuple(word for value in values["run by"] for word in value.split()),
                changes=tuple(tuple(value.split(" is ")) for value in values["without a GPU"]),
            )
        )
    return blocks


def run_page(page: str, gpus: int) -> dict[str, object]:
    """Runs the blocks of a page and returns their names; a block that lacks something is only compiled.

    Parameters
    ----------
    page : str
        One of `PAGES`.
    gpus : int
        Number of GPUs that the blocks may use; 0 runs them on NumPy.
    """
    names: dict[str, object] = {"__name__": Path(page).stem}
    for block in python_blocks(page):
        text = block.text_on(gpus)
        missing = block.why_not(gpus)
        if block.language == "pycon":
            if missing is None:
                _run_session(block, text, names)
        else:
            # Tracebacks, and the errors of traced functions, have the page's lines.
            code = compile("\n" * (block.line - 1) + text, str(CHECKOUT / page), "exec")
            if missing is None and block.run_by:
                _run_program(block, text)
            elif missing is None:
                exec(code, names)
        if missing is not None:
            warnings.warn(f"{page}:{block.line} was not run: it needs {missing}", stacklevel=2)
    return names


def _run_session(block: Block, text: str, names: dict[str, object]) -> None:
    """Runs the lines that begin with ``>>>`` and compares what they print."""
    session = doctest.DocTestParser().get_doctest(text, names, block.page, block.page, block.line - 1)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    result = runner.run(session, out=report.append, clear_globs=False)
    assert not result.failed, "".join(report)
    names.update(session.globs)


def _run_program(block: Block, text: str) -> None:
    """Runs a block as a program in the working folder, by the command of its mark."""
    program = Path(f"{Path(block.page).stem}_{block.line}.py").resolve()
    program.write_text(text, encoding="utf-8")
    command = [_command(word) or word for word in block.run_by]
    # Open MPI refuses to start as root, whom containers run tests as, unless it is told twice.
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment = {**os.environ, **as_root, "PYTHONPATH": str(CHECKOUT)}
    result = subprocess.run([*command, program], env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"{block.page}:{block.line}\n{result.stdout}\n{result.stderr}"


def _command(name: str) -> str | None:
    if name == "python":
        return sys.executable
    return shutil.which(name, path=os.pathsep.join((_FOLDER_OF_COMMANDS, os.environ.get("PATH", ""))))
