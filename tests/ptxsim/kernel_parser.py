"""The parser that makes a flat list of instructions from a kernel's body.

Scopes ({ ... } with registers, labels and variables of their own) are resolved to rows of the register file and to
places in the list; device functions are inlined where they are called, so that the machine needs no call stack.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

from .errors import PtxError
from .parser import Function, Program
from .scalars import WIDTH
from .syntax import Addr, Imm, Inst, Kernel, Operand, Pair, Reg, Sink, Special, Sym, Var, Vec
from .text import closing, parse_constant, parse_variable, split_list

__all__ = ["KernelParser"]

# The beginning of a statement: a brace, a place in the source, a label, or none of them.
_BEGINNING = re.compile(r"[\s;]*(?:(?P<brace>\{)|(?P<loc>\.loc[\t ])|(?P<label>[$%A-Za-z_][\w$]*)\s*:(?!:))?")
_COLON = re.compile(r":(?<!::)(?!:)")
_NAME = re.compile(r"[$%A-Za-z_][\w$]*")
_LONGEST_LABEL = 1000
_ADDRESS = re.compile(r"^(.*?)\s*([+-]\s*-?\s*(?:0x[0-9a-fA-F]+|\d+))?$")
_PREDICATE = re.compile(r"@\s*(!?)\s*([$%\w]+)\s+")
_SYMBOL_AND_OFFSET = re.compile(r"[$\w]+\s*[+-]\s*\d+$")
_DECLARED = (".shared", ".local", ".param", ".global", ".const")
_WITHOUT_EFFECT = (".pragma", ".callprototype", ".alias")


def _end(text: str, mark: str, start: int) -> int:
    """Returns the next place of the mark, or the end of the text."""
    end = text.find(mark, start)
    return end if end >= 0 else len(text)


@lru_cache(maxsize=None)
def _op_and_parts(opcode: str) -> tuple[str, tuple[str, ...]]:
    op, *parts = opcode.split(".")
    return op, tuple(parts)


class _Scope:
    """Names between a pair of braces, and those around them."""

    def __init__(self, outer: _Scope | None) -> None:
        self.outer = outer
        self.registers: dict[str, Reg] = {}
        self.labels: dict[str, str] = {}
        self.variables: dict[str, str] = {}
        self.declared: list[str] = []  # names and prefixes in all of these
        self.operands: dict[str, Operand] = {}  # parsed before

    def find(self, table: str, name: str) -> Any:
        scope: _Scope | None = self
        while scope is not None:
            if name in getattr(scope, table):
                return getattr(scope, table)[name]
            scope = scope.outer
        return None


class KernelParser:
    def __init__(self, program: Program, function: Function) -> None:
        self.program, self.function = program, function
        self.insts: list[Inst] = []
        self.label_pcs: dict[str, int] = {}
        self.registers = {0: 0, 16: 0, 32: 0, 64: 0}
        self.variables: dict[str, Var] = {}
        self.local_bytes = 0
        self.source = ""
        self._sources: dict[str, str] = {}  # by .loc directives, which recur many times
        self._unique = 0
        self._last_label = ""
        self._jump_tables: dict[str, list[str]] = {}
        self._calls: list[str] = []

    def parse(self) -> Kernel:
        root, end = _Scope(None), 0
        for param in self.function.params:
            param.offset = -(-end // param.align) * param.align
            end = param.offset + param.nbytes
            self.variables[param.name] = param
            root.variables[param.name] = param.name
        self._body(self.function.body, root, None)
        self._emit("exit", (), None, "exit")
        for pc, inst in enumerate(self.insts):
            inst.pc = pc
            if inst.op == "bra":
                inst.target = self._label_pc(inst.args[0])
            elif inst.op == "brx":
                inst.table = [self.label_pcs[label] for label in self._jump_tables[inst.args[1].name]]
        cluster = self._directive(r"reqnctapercluster") or ()
        return Kernel(
            name=self.function.name,
            params=self.function.params,
            insts=self.insts,
            registers=self.registers,
            variables=self.variables,
            local_bytes=self.local_bytes,
            cluster=((*cluster, 1, 1, 1))[:3],
            max_threads=self._directive(r"(?:max|req)ntid"),
        )

    def _directive(self, name: str) -> tuple[int, ...] | None:
        match = re.search(rf"\.{name}\s+([\d,\s]+)", self.function.directives)
        return tuple(int(x) for x in match[1].replace(",", " ").split()) if match else None

    def _label_pc(self, label: Operand) -> int:
        if not isinstance(label, Sym) or label.name not in self.label_pcs:
            raise PtxError(f"branch to an unknown label {label}")
        return self.label_pcs[label.name]

    def _unique_name(self, name: str) -> str:
        self._unique += 1
        return f"{name}#{self._unique}"

    # Statements

    def _body(self, text: str, scope: _Scope, return_label: str | None) -> None:
        """Parses everything between a pair of braces; `ret` of an inlined function is a jump to `return_label`."""
        self._declare_labels(text, scope)
        position = 0
        while True:
            beginning = _BEGINNING.match(text, position)
            position = beginning.end()
            match beginning.lastgroup:
                case "brace":
                    end = closing(text, position - 1, "{}")
                    self._body(text[position : end - 1], _Scope(scope), return_label)
                    position = end
                case "loc":
                    end = _end(text, "\n", position)
                    self.source = self._source(text[position:end])
                    position = end
                case "label":
                    self._last_label = scope.labels[beginning["label"]]
                    self.label_pcs[self._last_label] = len(self.insts)
                case _ if position == len(text):
                    return
                case _:
                    end = _end(text, ";", position)
                    self._statement(text[position:end].strip(), text, scope, return_label)
                    position = end + 1

    def _statement(self, text: str, body: str, scope: _Scope, return_label: str | None) -> None:
        """Parses a statement of the body."""
        if text.startswith(".reg"):
            self._declare_registers(text, body, scope)
        elif text.startswith(_DECLARED):
            self._declare_variable(text, scope)
        elif text.startswith(".branchtargets"):
            self._jump_tables[self._last_label] = [scope.find("labels", name) for name in split_list(text[14:])]
        elif not text.startswith(_WITHOUT_EFFECT):
            self._instruction(" ".join(text.split()), scope, return_label)

    def _source(self, loc: str) -> str:
        """Returns file:line of a .loc directive, and the place where the function of that line was inlined."""
        if loc in self._sources:
            return self._sources[loc]
        fields = loc.replace(",", " ").split()
        where = f"{self.program.files.get(fields[0], '?')}:{fields[1]}"
        if "inlined_at" in fields:
            at = fields.index("inlined_at")
            where += f" (inlined at {self.program.files.get(fields[at + 1], '?')}:{fields[at + 2]})"
        self._sources[loc] = where
        return where

    def _declare_labels(self, text: str, scope: _Scope) -> None:
        """Declares the labels of this scope, without inner ones, in advance because branches go forward, too."""
        depth = counted = 0
        for colon in _COLON.finditer(text):
            end = colon.start()
            depth += text.count("{", counted, end) - text.count("}", counted, end)
            counted = end
            if depth == 0:
                near = max(0, end - _LONGEST_LABEL)
                statement = max(near - 1, *(text.rfind(mark, near, end) for mark in "\n;{}:")) + 1
                name = text[statement:end].strip()
                if _NAME.fullmatch(name):
                    scope.labels[name] = self._unique_name(name)
                    scope.declared.append(name)

    def _declare_registers(self, text: str, body: str, scope: _Scope) -> None:
        """Gives rows to registers that the body names, one in ten of those that NVRTC declares; they stay in order."""
        match = re.match(r"\.reg\s*\.(\w+)\s+(.*)$", text, re.S)
        if not match or match[1] not in WIDTH:
            raise PtxError(f"cannot parse {text}")
        width = 0 if match[1] == "pred" else max(WIDTH[match[1]], 16)
        for name in split_list(match[2]):
            names = [name]
            if several := re.match(r"([$%\w]+)<(\d+)>$", name):
                name, count = several[1], int(several[2])
                numbers = sorted({int(number) for number in re.findall(rf"{re.escape(name)}(\d+)", body)})
                names = [f"{name}{number}" for number in numbers if number < count]
            scope.declared.append(name)
            for row, register in enumerate(names, start=self.registers[width]):
                scope.registers[register] = scope.operands[register] = Reg(width, row, register)
            self.registers[width] += len(names)

    def _declare_variable(self, text: str, scope: _Scope) -> None:
        variable = parse_variable(text)
        name = scope.variables[variable.name] = self._unique_name(variable.name)
        self.variables[name] = variable
        scope.declared.append(variable.name)
        if variable.space in ("local", "param"):  # arguments of calls live in local memory
            variable.space = "local"
            variable.offset = -(-self.local_bytes // variable.align) * variable.align
            self.local_bytes = variable.offset + variable.nbytes
        elif variable.space != "shared":
            self.program.variables[name] = variable

    def _instruction(self, text: str, scope: _Scope, return_label: str | None) -> None:
        predicate, rest = None, text
        if match := _PREDICATE.match(text):
            register = self._register(match[2], scope)
            if register is None:
                raise PtxError(f"unknown predicate in: {text}")
            predicate, rest = replace(register, negated=True) if match[1] else register, text[match.end() :]
        opcode, _, operands = rest.partition(" ")
        name = opcode.partition(".")[0]
        if name == "call":
            self._call(operands, scope, predicate, text)
        elif name == "ret" and return_label is not None:
            self._emit("bra", (Sym(return_label),), predicate, text)
        else:
            args = tuple(self._operand(item, scope) for item in split_list(operands))
            self._emit(opcode, args, predicate, text)

    def _emit(self, opcode: str, args: tuple[Operand, ...], predicate: Reg | None, text: str) -> None:
        op, parts = _op_and_parts(opcode)
        self.insts.append(Inst(op, parts, args, predicate, text, self.source))

    def _call(self, operands: str, scope: _Scope, predicate: Reg | None, text: str) -> None:
        items = split_list(operands)
        returns = split_list(items.pop(0)[1:-1]) if items[0].startswith("(") else []
        function = self.program.functions.get(items[0])
        if function is None:
            self._emit("call", (Sym(items[0]),), predicate, text)
            return
        if predicate is not None:
            raise PtxError(f"a predicated call is not implemented: {text}")
        if function.name in self._calls:
            raise PtxError(f"recursion is not implemented: {text}")
        args = split_list(items[1][1:-1]) if len(items) > 1 else []
        end = self._unique_name("$return")
        inner = _Scope(None)
        for formal, actual in [*zip(function.params, args, strict=True), *zip(function.returns, returns, strict=True)]:
            variable = scope.find("variables", actual)
            if variable is None:
                raise PtxError(f"an argument of the call is no .param variable: {text}")
            inner.variables[formal.name] = variable
        self._calls.append(function.name)
        self._body(function.body, inner, end)
        self._calls.pop()
        self.label_pcs[end] = len(self.insts)

    # Operands

    def _register(self, name: str, scope: _Scope) -> Reg | None:
        return None if name[0] in "-0123456789" else scope.find("registers", name)

    def _operand(self, text: str, scope: _Scope) -> Operand:
        # Many instructions, each in its own braces, have the same long list of registers: it is kept in an outer scope.
        while scope.outer is not None and not any(name in text for name in scope.declared):
            scope = scope.outer
        operand = scope.operands.get(text)
        if operand is None:
            operand = self._new_operand(text, scope)
            if isinstance(operand, (Reg, Imm, Vec)):
                scope.operands[text] = operand
        return operand

    def _new_operand(self, text: str, scope: _Scope) -> Operand:
        if text == "_":
            return Sink()
        if text[0] in "{(":
            return Vec(tuple(self._operand(item, scope) for item in split_list(text[1:-1])))
        if text[0] == "[":
            first, *extra = split_list(text[1:-1])
            return self._address(first, tuple(self._operand(item, scope) for item in extra), scope)
        if text[0] == "!":
            return replace(self._operand(text[1:].strip(), scope), negated=True)
        if "|" in text:
            first, second = text.split("|")
            return Pair(self._operand(first.strip(), scope), self._operand(second.strip(), scope))
        known = self._register(text, scope) or parse_constant(text)
        if known is not None:
            return known
        if text[0] == "%":
            return Special(text)
        if _SYMBOL_AND_OFFSET.match(text):
            return self._address(text, (), scope)
        return Sym(scope.find("variables", text) or scope.find("labels", text) or text)

    def _address(self, text: str, extra: tuple[Operand, ...], scope: _Scope) -> Addr:
        match = _ADDRESS.match(text)
        offset = int((match[2] or "0").replace(" ", "").replace("+-", "-"), 0)
        return Addr(self._operand(match[1], scope) if match[1] else None, offset, extra)
