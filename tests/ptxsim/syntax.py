"""The parts of parsed PTX text: operands, instructions, variables, kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from .errors import PtxError
from .scalars import WIDTH

__all__ = [
    "Addr",
    "Imm",
    "Inst",
    "Kernel",
    "Operand",
    "Pair",
    "Reg",
    "Sink",
    "Special",
    "Sym",
    "Var",
    "Vec",
]


@dataclass(frozen=True)
class Reg:
    """A register: its row in the file of its width (0 for predicates, 16, 32, 64)."""

    width: int
    index: int
    name: str
    negated: bool = False


@dataclass(frozen=True)
class Imm:
    """A constant: an int, or ("f32" | "f64", bits)."""

    value: int | tuple[str, int]


@dataclass(frozen=True)
class Special:
    """%tid.x and its like."""

    name: str


@dataclass(frozen=True)
class Sym:
    """A label, a variable or a function."""

    name: str


@dataclass(frozen=True)
class Addr:
    """[base + offset], with the coordinates of a tensor copy."""

    base: Reg | Sym | Imm | Special | Addr | None
    offset: int = 0
    extra: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Vec:
    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """Two destinations, written a|b."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Sink:
    """The operand _, which takes an unused result."""


Operand = Reg | Imm | Special | Sym | Addr | Vec | Pair | Sink


@lru_cache(maxsize=None)
def _types_among(parts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part for part in parts if part in WIDTH)


@dataclass
class Inst:
    """One instruction; `parts` are the modifiers and types after the dots, `types` the scalar types among them."""

    op: str
    parts: tuple[str, ...]
    args: tuple[Operand, ...]
    predicate: Reg | None
    text: str
    source: str
    pc: int = -1
    target: int = -1
    table: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.types = _types_among(self.parts)

    @property
    def opcode(self) -> str:
        return ".".join((self.op, *self.parts))

    @property
    def type(self) -> str:
        """The last of the types, in which most instructions compute."""
        if not self.types:
            raise PtxError("an instruction without a type")
        return self.types[-1]

    def shown(self, limit: int = 160) -> str:
        """Returns the text, shortened in the middle if it is longer than the limit."""
        half = limit // 2
        return self.text if len(self.text) <= limit else f"{self.text[:half]} ... {self.text[-half:]}"


@dataclass
class Var:
    """A variable or a parameter; `references` are the places in `initial` that hold addresses of symbols."""

    name: str
    space: str
    align: int
    nbytes: int
    initial: bytes | None
    element: int
    references: list[tuple[int, str]] = field(default_factory=list)
    offset: int = 0


@dataclass
class Kernel:
    name: str
    params: list[Var]
    insts: list[Inst]
    registers: dict[int, int]
    variables: dict[str, Var]
    local_bytes: int
    cluster: tuple[int, int, int]
    max_threads: tuple[int, ...] | None
