"""Digests of code without its comments, docstrings and formatting: Python by its syntax tree, CUDA by its tokens."""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from pathlib import Path

__all__ = ["code_digest", "cuda_tokens", "python_text", "rendered_digest"]

_CHARACTER = r"(?<!\w)'(?:\\.|[^'\\\n])*'"  # a digit before the quote is that of 1'000
_COMMENT = r"//[^\n]*|/\*.*?\*/"
_DIRECTIVE = r"^[ \t]*#[^\n]*"
_WORD = r"\.?\d(?:[eEpP][+-]|[\w.'])*|\w+"
_SIGN = r"<<=|>>=|->\*|\.\.\.|::|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||##|[-+*/%&|^]=|\S"
#: What Jinja acts upon. A statement begins like a comment of C++, and a string of C++ may have tags with strings.
_TAG = r"\{%.*?%\}|\{\{.*?\}\}"
_STATEMENT = r"^[ \t]*//%[^\n]*"


class _Grammar:
    """The patterns of CUDA C++, or of a template."""

    def __init__(self, is_template: bool):
        inner, tags = (f"{_TAG}|", f"|{_TAG}|{_STATEMENT}") if is_template else ("", "")
        whole = rf'\w*"(?:{inner}\\.|[^"\\\n])*"|{_CHARACTER}{tags}'
        flags = re.MULTILINE | re.DOTALL
        self.comments = re.compile(rf"({whole})|{_COMMENT}" + (r"|\{#.*?#\}" if is_template else ""), flags)
        self.tokens = re.compile(f"{whole}|{_DIRECTIVE}|{_WORD}|{_SIGN}", flags)
        self.parts = re.compile(rf"{whole}|\s+|{_WORD}|{_SIGN}", flags)


_GRAMMARS = {is_template: _Grammar(is_template) for is_template in (False, True)}
_LINE = re.compile(r"^#line .*\n", re.MULTILINE)


def code_digest(root: Path, *more: str) -> str:
    """Returns the sha256 over names and contents of the package and the templates, and of the code in more folders."""
    digest = hashlib.sha256()
    files = (path for folder in ("fa2cupy", "kernels", *more) for path in (root / folder).rglob("*"))
    for path in sorted(p for p in files if p.suffix in (".py", ".cu", ".cuh", ".j2")):
        text = path.read_text(encoding="utf-8")
        content = python_text(text) if path.suffix == ".py" else _cuda_text(text, path.suffix != ".cuh")
        digest.update(f"{path.relative_to(root).as_posix()}\0{content}\0\0".encode())
    return digest.hexdigest()


def rendered_digest(source: str) -> str:
    """Returns the sha256 over the tokens of a kernel's flattened source, without the lines of its files."""
    digest = hashlib.sha256()
    for part in _LINE.split(source):  # most are headers that kernels share
        digest.update(_cuda_text(part, False).encode())
    return digest.hexdigest()


def python_text(source: str) -> str:
    """Returns the syntax tree as a text that all versions of Python agree upon."""
    return _text_of(ast.parse(source))


def _text_of(node: object) -> str:
    if isinstance(node, ast.Constant):
        return repr(node.value)
    if isinstance(node, ast.AST):
        fields = ((name, getattr(node, name, None)) for name in node._fields)
        # Later versions of Python add fields, which are empty in code of earlier ones.
        given = (f"{name}={_text_of(value)}" for name, value in fields if value is not None and value != [])
        return f"{type(node).__name__}({', '.join(given)})"
    if isinstance(node, list):
        return f"[{', '.join(_text_of(one) for one in node if not _is_docstring(one))}]"
    return repr(node)


def _is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def cuda_tokens(source: str, is_template: bool) -> list[str]:
    """Returns the tokens of CUDA C++. A line of the preprocessor is one token, and a tag of Jinja is as it is written.

    Where it cannot tell, it takes formatting for a difference: it never takes a difference for formatting.
    """
    grammar = _GRAMMARS[is_template]

    def kept(found: re.Match) -> str:
        is_rendered = is_template and not found[0].startswith("{#") and re.search(r"\{[%{]", found[0])
        return found[0] if found[1] or is_rendered else " "

    def directive(line: str) -> str:
        # Its end matters, and where blanks are: F(x) and F (x) define two kinds of macros.
        return "".join(" " if part.isspace() else part for part in grammar.parts.findall(line)) + "\n"

    tokens = map(str.strip, grammar.tokens.findall(grammar.comments.sub(kept, source.replace("\\\n", ""))))
    return [directive(token) if token.startswith("#") else token for token in tokens]


@functools.lru_cache(maxsize=4096)
def _cuda_text(source: str, is_template: bool) -> str:
    return "".join(f"{token}\0" for token in cuda_tokens(source, is_template))
