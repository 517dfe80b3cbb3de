"""PTX text of a module: its variables, functions and source files. kernel_parser makes instructions of the bodies."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from .errors import PtxError
from .syntax import Kernel, Var
from .text import closing, parse_variable, split_list, without_comments

__all__ = ["Function", "Program"]

_HEAD = re.compile(r"((?:\.(?:visible|weak|extern|common)\s+)*)\.(entry|func)\b")
_LINE = re.compile(r"\.(version|target|address_size|file|loc|pragma)\b[^\n]*")
_FILE = re.compile(r"^\s*\.file\s+(\d+)\s+\"([^\"]*)\"", re.M)
_SPACE = re.compile(r"[\s;}]*")


@dataclass
class Function:
    name: str
    entry: bool
    params: list[Var]
    returns: list[Var]
    body: str
    directives: str


class Program:
    """All kernels and module-level variables of one PTX text."""

    def __init__(self, ptx: str) -> None:
        self.variables: dict[str, Var] = {}
        self.functions: dict[str, Function] = {}
        # NVRTC puts the working folder before the names that #line gives.
        self.files = {number: name.removeprefix(os.getcwd() + os.sep) for number, name in _FILE.findall(ptx)}
        text = without_comments(ptx)
        position = 0
        while (position := _SPACE.match(text, position).end()) < len(text):
            position = self._declaration(text, position)

    def kernel(self, name: str) -> Kernel:
        """Returns the kernel's instructions, with the device functions it calls inlined."""
        from .kernel_parser import KernelParser

        function = self.functions.get(name)
        if function is None or not function.entry:
            entries = [f.name for f in self.functions.values() if f.entry]
            raise PtxError(f"no kernel {name!r}; the module has {entries}")
        return KernelParser(self, function).parse()

    def _declaration(self, text: str, start: int) -> int:
        """Reads the declaration that begins at `start`; returns where it ends."""
        if match := _LINE.match(text, start):
            return match.end()
        if text.startswith(".section", start):
            return closing(text, text.index("{", start), "{}")
        if match := _HEAD.match(text, start):
            return self._function(text, match.end(), match[2] == "entry")
        end = text.find(";", start)
        variable = parse_variable(text[start : end if end >= 0 else len(text)])
        self.variables[variable.name] = variable
        return end + 1

    def _function(self, text: str, start: int, entry: bool) -> int:
        start = re.compile(r"\s*(?:\.attribute\([^)]*\)\s*)?").match(text, start).end()
        returns, start = self._parameters(text, start)
        match = re.compile(r"\s*([$\w]+)\s*").match(text, start)
        params, start = self._parameters(text, match.end())
        body, semicolon = text.find("{", start), text.find(";", start)
        if body < 0 or 0 <= semicolon < body:  # only declared
            return semicolon + 1
        end = closing(text, body, "{}")
        directives, statements = text[start:body], text[body + 1 : end - 1]
        self.functions[match[1]] = Function(match[1], entry, params, returns, statements, directives)
        return end

    @staticmethod
    def _parameters(text: str, start: int) -> tuple[list[Var], int]:
        if text[start] != "(":
            return [], start
        end = closing(text, start, "()")
        return [parse_variable(item) for item in split_list(text[start + 1 : end - 1])], end
