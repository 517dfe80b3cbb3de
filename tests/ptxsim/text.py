"""Pieces of PTX text: brackets, lists, constants and declarations of variables."""

from __future__ import annotations

import re
import struct

from .errors import PtxError
from .scalars import WIDTH
from .syntax import Imm, Var

__all__ = ["closing", "parse_constant", "parse_variable", "split_list", "without_comments"]

_VARIABLE = re.compile(
    r"\.(global|const|shared|local|param)\b"
    r"((?:\s*\.align\s+\d+|\s*\.(?:ptr|space|attribute\([^)]*\)))*)\s*((?:\.v[24])?)\s*"
    r"\.(\w+)\s+((?:\.ptr(?:\s*\.\w+)?(?:\s*\.align\s+\d+)?)?)\s*([$%\w]+)\s*((?:\[[^\]]*\])*)\s*(?:=\s*(.*))?$",
    re.S,
)


_BRACKET = re.compile(r"[{\[(]")
_COMMAS_AND_BRACKETS = re.compile(r"[{}\[\](),]")
_FLOAT, _DOUBLE = re.compile(r"(-?)0[fF]([0-9a-fA-F]{8})"), re.compile(r"(-?)0[dD]([0-9a-fA-F]{16})")
_INTEGER = re.compile(r"(-?)(0[xX][0-9a-fA-F]+|0[bB][01]+|[0-9]+)U?")
_DECIMAL = re.compile(r"-?[0-9]+\.[0-9]*([eE][-+]?[0-9]+)?")


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*", "", re.sub(r"/\*.*?\*/", " ", text, flags=re.S))


def closing(text: str, start: int, pair: str) -> int:
    """Returns the index just after the bracket that closes the one at `start`; `pair` is "{}" or "()"."""
    depth = 0
    for match in re.compile("[" + re.escape(pair) + "]").finditer(text, start):
        depth += 1 if match[0] == pair[0] else -1
        if depth == 0:
            return match.end()
    raise PtxError(f"unbalanced {pair[0]} in the PTX text")


def split_list(text: str) -> list[str]:
    """Splits at the commas that are outside of all brackets."""
    if not _BRACKET.search(text):
        items = [item.strip() for item in text.split(",")]
        return items if items[-1] else items[:-1]
    items, depth, start = [], 0, 0
    for match in _COMMAS_AND_BRACKETS.finditer(text):
        character = match[0]
        if character in "{[(":
            depth += 1
        elif character in "}])":
            depth -= 1
        elif depth == 0:
            items.append(text[start : match.start()].strip())
            start = match.end()
    last = text[start:].strip()
    return [*items, last] if last else items


def parse_constant(text: str) -> Imm | None:
    """Returns an integer or floating-point constant; None for anything else."""
    if match := _FLOAT.fullmatch(text):
        return Imm(("f32", int(match[2], 16) ^ (1 << 31 if match[1] else 0)))
    if match := _DOUBLE.fullmatch(text):
        return Imm(("f64", int(match[2], 16) ^ (1 << 63 if match[1] else 0)))
    if match := _INTEGER.fullmatch(text):
        digits = match[2]
        octal = len(digits) > 1 and digits.isdigit() and digits[0] == "0"
        value = int(digits, 8 if octal else 0)
        return Imm(-value if match[1] else value)
    if _DECIMAL.fullmatch(text):
        return Imm(("f64", int.from_bytes(struct.pack("<d", float(text)), "little")))
    return None


def parse_variable(text: str) -> Var:
    """Parses a declaration of a variable or a parameter."""
    match = _VARIABLE.search(text.strip())
    if not match:
        raise PtxError(f"cannot parse the declaration: {' '.join(text.split())[:200]}")
    space, attributes, vector, ty, _, name, dimensions, initial = match.groups()
    element = max(WIDTH.get(ty, 32) // 8, 1)
    count = int(vector[2:]) if vector else 1
    alignment = re.search(r"\.align\s+(\d+)", attributes)
    align = int(alignment[1]) if alignment else element * count
    for extent in re.findall(r"\[([^\]]*)\]", dimensions):
        count *= int(extent) if extent.strip() else 0
    data, references = None, []
    if initial is not None:
        data, references = _initial_bytes(initial, element)
        data = data.ljust(count * element, b"\0")
    return Var(name, space, align, count * element, data, element, references)


def _initial_bytes(text: str, element: int) -> tuple[bytes, list[tuple[int, str]]]:
    data, references = b"", []
    for item in split_list(text.replace("{", "").replace("}", "")):
        constant = parse_constant(item)
        value = constant.value if constant else 0
        if constant is None:
            references.append((len(data), item))
        bits = value[1] if isinstance(value, tuple) else value
        data += (bits & ((1 << (8 * element)) - 1)).to_bytes(element, "little")
    return data, references
