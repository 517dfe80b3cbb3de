"""Calls the caller's function with symbols, and returns what it computes as a `Program`."""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..system.locks import new_lock
from ..system.recent import RecentlyUsed
from .built_in import KnownMask, is_shift, known_mask, soft_cap_of
from .derivatives import Scatter, derivative, scatters
from .expressions import BOOL, FLOAT, INT, Graph, Node, RefusalError, reachable
from .places import place_of_definition, place_of_error
from .state import Unchanging, state_of
from .symbols import ArgumentSymbol, Symbol, is_array
from .terms import Terms, costly_parts_of, position_terms_of, score_terms_of
from .text import curvature_text, mask_text, score_text

__all__ = ["MAX_LOOP", "ArgumentKind", "BoundFunction", "Program", "argument_kind", "trace"]

#: Inputs by role, after which the arguments follow.
_INPUTS = {
    "score_mod": {"score": FLOAT, "b": INT, "h": INT, "q": INT, "k": INT},
    "mask_mod": {"b": INT, "h": INT, "q": INT, "k": INT},
}
_KINDS = {"b": BOOL, "i": INT, "u": INT}
_FLOATS = ("float16", "bfloat16", "float32", "float64")
#: The longest vector that np.dot and .sum() take.
MAX_LOOP = 256
#: Costs of operations in additions: those of sin, tanh and % from times of NVRTC, others after their instructions.
_COSTS = {
    "sin": 400,
    "cos": 400,
    "tanh": 100,
    "power": 100,
    "remainder": 40,
    "floor_divide": 40,
    "log1p": 30,
    "sum": 20,
}
_COSTS |= dict.fromkeys(("divide", "sqrt", "exp", "exp2", "log", "element"), 10)
#: Kernels have the text of a pair so many times more often than that of a term.
_SHARING = 4
_differentiating = new_lock()
#: The module of functions that users need not write.
_READY_MADE = f"{__name__.partition('.')[0]}.mods"
#: The most operations of a text that is repeated for each element of a fragment.
_SHORT = 16


class ArgumentKind(NamedTuple):
    """All that a program depends on of an argument."""

    rank: int
    kind: str


class Program(Unchanging):
    """A traced function. Programs are equal if their texts are.

    Attributes
    ----------
    role : {"score_mod", "mask_mod"}
    arguments : tuple of ArgumentKind
    graph : Graph
    result : Node
        The score, or the truth value.
    slope : Node or None
        The derivative of the score by the score that the function gets; None if it is 0.
    place : str
        The line at which the function begins, for messages.
    known : KnownMask or None
        What a mask function computes, where kernels can do without it; None for other functions.
    """

    def __init__(
        self,
        role: str,
        arguments: tuple[ArgumentKind, ...],
        graph: Graph,
        result: Node,
        place: str,
        known: KnownMask | None = None,
    ):
        self.place, self.known = place, known
        self.role, self.arguments, self.graph, self.result = role, arguments, graph, result
        self.arguments_name = role.replace("mod", "args")
        graph.is_differentiated = True
        # Before `scatters`: the order of nodes is that of operands and statements in the text.
        self.slope = derivative(graph, result, graph.input("score", FLOAT)) if role == "score_mod" else None

    @functools.cached_property
    def scatters(self) -> list[Scatter]:
        """The derivatives of the score by the elements that it reads of floating-point arguments."""
        with _differentiating:  # several threads would give nodes the same number
            return scatters(self.graph, self.result, self.floats) if self.role == "score_mod" else []

    @functools.cached_property
    def curvature(self) -> Node | None:
        """The second derivative of the score by the score that the function gets; None if it is 0."""
        _ = self.text  # its nodes come first: the order of their numbers is that of operands and statements
        with _differentiating:
            score = self.graph.input("score", FLOAT)
            return None if self.slope is None else derivative(self.graph, self.slope, score)

    @property
    def floats(self) -> tuple[int, ...]:
        """The floating-point arguments."""
        return tuple(number for number, argument in enumerate(self.arguments) if argument.kind == FLOAT)

    @functools.cached_property
    def text(self) -> str:
        """CUDA C++: see ``text.py``. It depends on the function's expression and the kinds of its arguments alone."""
        if self.role == "mask_mod":
            return mask_text(self.result, self.terms)
        return score_text(self.result, self.slope, self.scatters, self.terms)

    @functools.cached_property
    def curvature_text(self) -> str:
        """What kernels of second order have besides."""
        return "" if self.role == "mask_mod" else curvature_text(self.result, self.curvature, self.terms)

    @functools.cached_property
    def terms(self) -> Terms:
        """What of a mask function depends on one position, and of a score function on q - k or on no position."""
        if self.role == "mask_mod":
            return position_terms_of(self.result)
        return score_terms_of([self.result] if self.slope is None else [self.result, self.slope])

    def depends_on(self, name: str) -> bool:
        """True if the result depends on an input: the score, b, h, q or k."""
        return name in self.result.inputs

    @functools.cached_property
    def reads_by_position(self) -> bool:
        """True if the result depends on elements of arguments at the query's or the key's position, as documents do."""
        return any(node.op == "element" and node.moves for node in reachable([self.result]))

    @functools.cached_property
    def is_short(self) -> bool:
        """True if a kernel may repeat the text for every element of a fragment.

        Besides its terms, it has few operations, no sum, and reads no element that depends on the query or the key.
        """
        nodes = self.terms.besides(self.result)
        if any(node.op == "sum" or (node.op == "element" and node.moves) for node in nodes):
            return False
        return sum(node.op not in ("input", "constant") for node in nodes) <= _SHORT

    @property
    def is_cheap(self) -> bool:
        """True if kernels evaluate it at least as fast as they compare the ends of intervals, such as a window.

        It is short, and no part of it that depends on one position costs more than an addition of ints.
        """
        return self.is_short and not any(costly_parts_of(self.result))

    @property
    def adds(self) -> bool:
        """True if the derivative by the score is 1."""
        return self.slope is not None and self.slope.is_constant and self.slope.value == 1

    @functools.cached_property
    def shifts(self) -> bool:
        """True if a score function adds something that does not depend on the score."""
        return self.role == "score_mod" and is_shift(self.result)

    @functools.cached_property
    def adds_little(self) -> bool:
        """True if a score function adds something that takes few operations and no registers for terms of distances."""
        return self.shifts and self.is_short and not self.terms.of_distance

    @functools.cached_property
    def soft_cap(self) -> float | None:
        """The cap if a score function is that of ``softcap=``."""
        return soft_cap_of(self.result) if self.role == "score_mod" else None

    @functools.cached_property
    def loops(self) -> list[tuple[int, ...]]:
        """The arguments over whose last axes each loop runs."""
        return [node.value for node in reachable([self.result]) if node.op == "sum" and isinstance(node.value, tuple)]

    def cost(self, has_slope: bool, has_gradients: bool) -> int:
        """About the time that a compiler takes for it in a kernel, in that of an addition.

        Parameters
        ----------
        has_slope, has_gradients : bool
            Whether the kernel has the derivative by the score, and those by elements of arrays.
        """
        roots = [self.result]
        if has_slope and self.slope is not None:
            roots.append(self.slope)
        for scatter in self.scatters if has_gradients else ():
            roots += [*scatter.indices, scatter.derivative]
        of_pairs = self.terms.besides(*roots)
        terms = set(reachable(roots)).difference(of_pairs)
        return sum(map(_cost, of_pairs)) + sum(map(_cost, terms)) // _SHARING

    def check_lengths(self, arrays: Sequence[Any]) -> None:
        """Raises ValueError unless the vectors of each loop have the same length, of at most `MAX_LOOP`."""
        for axes in self.loops:
            lengths = {f"{self.arguments_name}[{axis}]": arrays[axis].shape[-1] for axis in axes}
            first = next(iter(lengths.values()))
            for name, length in lengths.items():
                if length != first:
                    raise ValueError(
                        f"{name}: expected a last axis of {first} like {next(iter(lengths))}, got {length}"
                    )
                if length > MAX_LOOP:
                    raise ValueError(f"{name}: vectors of up to {MAX_LOOP} elements are summed, got {length}")

    def __call__(self, *given: Any) -> Any:
        """The result for other symbols and arrays, within another function."""
        inputs, arrays = dict(zip(_INPUTS[self.role], given, strict=False)), given[len(_INPUTS[self.role]) :]
        found: dict[Node, Any] = {}
        for node in reachable([self.result]):
            operands = [found[x] for x in node.operands]
            if node.op == "input":
                found[node] = inputs[str(node.value)]
            elif node.op == "constant":
                found[node] = given[0].number(node.value)
            elif node.op == "position":
                found[node] = slice(None)
            elif node.op == "element":
                assert isinstance(node.value, int)
                array = arrays[node.value]
                found[node] = array[tuple(operands)] if operands else array
            elif node.op == "sum":
                found[node] = operands[0].sum()
            elif node.op.startswith("as_"):
                found[node] = operands[0].astype(node.kind)
            else:
                found[node] = given[0].apply(node.op, *operands)
        return found[self.result]

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Program) and (self.role, self.arguments, self.text) == (
            other.role,
            other.arguments,
            other.text,
        )

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:  # each call with the function looks it up
        return hash((self.role, self.text))

    @property
    def digest(self) -> str:
        """A short name of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:8]

    def __repr__(self) -> str:
        return f"Program({self.role}, {self.digest})"


def _cost(node: Node) -> int:
    return 0 if node.op in ("input", "constant", "position") else _COSTS.get(node.op, 1)


class BoundFunction(NamedTuple):
    """A program and all that a kernel must know of its arrays.

    Attributes
    ----------
    program : Program
    dtypes : tuple of str
    lengths : tuple of int
        Of each array the length of its last axis, if a loop runs over it; else 0.
    """

    program: Program
    dtypes: tuple[str, ...]
    lengths: tuple[int, ...]


def argument_kind(name: str, array: Any) -> ArgumentKind:
    """The rank and the kind of an array. Raises TypeError for a dtype that functions do not take."""
    kind = _kind_of(array.dtype)
    if kind is None:
        raise TypeError(f"{name}: expected bools, ints, or floats of dtype {', '.join(_FLOATS)}, got {array.dtype}")
    return ArgumentKind(array.ndim, kind)


@functools.lru_cache(maxsize=None)  # the name of a dtype takes several microseconds
def _kind_of(dtype: np.dtype) -> str | None:
    return FLOAT if dtype.name in _FLOATS else _KINDS.get(dtype.kind)


#: Programs by role, kinds of arguments and the state of their function.
_programs: RecentlyUsed[Program] = RecentlyUsed(1024)
#: Programs by their expressions, which functions without a state share.
_shared: RecentlyUsed[Program] = RecentlyUsed(1024)


def trace(role: str, function: object, arguments: tuple[ArgumentKind, ...]) -> Program:
    """The program of a function for some kinds of arguments, traced if it is not known what it computes (`state_of`).

    Parameters
    ----------
    role : {"score_mod", "mask_mod"}
    function : callable
        Or a program, which is returned.
    arguments : tuple of ArgumentKind

    Raises
    ------
    TypeError
        The function has the wrong number of parameters, does what cannot be compiled, or returns the wrong kind. The
        text names the role, the line and what to write instead.
    """
    if isinstance(function, Program):
        if (function.role, function.arguments) != (role, arguments):
            raise TypeError(f"{role}: expected a function, got {function}, traced for other arguments")
        return function
    if not callable(function):
        raise TypeError(f"{role}: expected a function or None, got {type(function).__name__}{_instead(role, function)}")
    state = state_of(function)
    if state is None:
        return _traced(role, function, arguments)
    key = (role, arguments, state)
    program = _programs.get(key)
    if program is None:
        program = _traced(role, function, arguments)
        if state_of(function) == state:  # else it has changed meanwhile
            _programs.put(key, program)
    return program


def _traced(role: str, function: Callable[..., Any], arguments: tuple[ArgumentKind, ...]) -> Program:
    graph = Graph()
    inputs = _INPUTS[role]
    names = _parameters(role, function, len(inputs) + len(arguments))[len(inputs) :]
    for name, value in _outside_values(function):
        if is_array(value):
            wanted = f"arrays are passed as arguments, {role.replace('mod', 'args')}, not through the closure"
            raise TypeError(f"{role}: {name} is an array; {wanted} ({place_of_definition(function)})")
    symbols: list[Symbol | ArgumentSymbol] = [Symbol(graph, graph.input(name, kind)) for name, kind in inputs.items()]
    for number, (name, (rank, kind)) in enumerate(zip(names, arguments, strict=True)):
        if rank:
            symbols.append(ArgumentSymbol(graph, number, kind, rank, name))
        else:
            symbols.append(Symbol(graph, graph.element(number, kind, (), place_of_definition(function))))
    try:
        result = function(*symbols)
    except (TypeError, AttributeError, IndexError) as error:
        hint = "" if isinstance(error, RefusalError) else "; symbols take Python's operators and NumPy's functions"
        raise TypeError(f"{role}: {error}{hint} ({place_of_error(error)})") from error
    try:
        node = _result(role, graph, result)
        place = place_of_definition(function)
        known = known_mask(function, node)
        key = (role, arguments, place, node.number, known, graph.content())  # ahead of the nodes of derivatives
        return _shared.get(key) or _shared.put(key, Program(role, arguments, graph, node, place, known))
    except RefusalError as error:
        raise TypeError(f"{role}: {error} ({place_of_definition(function)})") from error


def _parameters(role: str, function: Callable[..., Any], number: int) -> list[str]:
    """The names of a function's first parameters."""
    try:
        signature = inspect.signature(function)
        signature.bind(*range(number))
    except ValueError:  # no signature, as some built-in functions have none
        return [f"argument {index}" for index in range(number)]
    except TypeError as error:
        raise TypeError(_wrong_parameters(role, function, list(signature.parameters), number)) from error
    names = [one.name for one in signature.parameters.values() if one.kind is not one.VAR_POSITIONAL]
    return [*names, *(f"argument {index}" for index in range(len(names), number))][:number]


def _instead(role: str, value: object) -> str:
    """The end of the message for what is no function."""
    if type(value).__name__ == "BlockMask":
        return "; it is passed beside the function that it was made from, not in its place"
    of_arrays = {"mask_mod": "; write mask= for an array", "score_mod": "; write bias= for an array"}
    return of_arrays[role] if is_array(value) else ""


def _wrong_parameters(role: str, function: Callable[..., Any], names: Sequence[str], number: int) -> str:
    """The message for a function of parameters `names` that is to be called with `number` symbols."""
    args, positions = role.replace("mod", "args"), ["b", "h", "q", "k"]
    arrays = number - len(_INPUTS[role])
    expected = ", ".join((*_INPUTS[role], f"*{args}"))
    wanted = f"{role}: expected a function of {number} parameters ({expected})"
    got, place = f"({', '.join(names)})", f" ({place_of_definition(function)})"
    is_maker = False
    if getattr(function, "__module__", None) == _READY_MADE:
        maker, _, inner = function.__qualname__.partition(".<locals>.")
        got, place = f"mods.{maker}{'(...)' if inner else ''}", ""
        is_maker = not {*positions} <= {*names}
    if is_maker:
        hint = f"; write {role}={got}(...), which makes the function"
    elif role == "mask_mod" and names[1:5] == positions:
        hint = "; write score_mod= for a function of scores"
    elif role == "score_mod" and names[:4] == positions:
        hint = "; write mask_mod= for a function of positions alone"
    elif len(names) > number:
        missing = names[number:]
        passed = ", ".join((*["..."] * arrays, *missing)) + "," * (len(missing) + arrays == 1)
        hint = f"; pass an array for {' and for '.join(missing)}, {args}=({passed})"
    else:
        hint = ""
    return f"{wanted}, got {got}{hint}{place}"


def _outside_values(function: Callable[..., Any]) -> Iterator[tuple[str, object]]:
    """The names that a function takes from its closure and from its module, and their values."""
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a name that has no value yet
            continue
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL" and instruction.argval in function.__globals__:
            yield instruction.argval, function.__globals__[instruction.argval]


def _result(role: str, graph: Graph, result: object) -> Node:
    """The node of what a function returned."""
    if isinstance(result, Symbol):
        node = result.node
    elif isinstance(result, bool | int | float | np.generic):
        node = graph.constant(result.item() if isinstance(result, np.generic) else result)
    else:
        what = "the array itself" if isinstance(result, ArgumentSymbol) else type(result).__name__
        raise RefusalError(f"expected a {'score' if role == 'score_mod' else 'truth value'} to be returned, got {what}")
    if node.varies:
        raise RefusalError("a vector is returned; write .sum() or np.dot of it")
    if role == "mask_mod" and node.kind != BOOL:
        raise RefusalError(f"expected a truth value to be returned, got {node.kind}; write x != 0")
    if role == "score_mod" and node.kind == BOOL:
        raise RefusalError("expected a score to be returned, got bool; write np.where(condition, score, -np.inf)")
    return node if role == "mask_mod" else graph.cast(node, FLOAT)
