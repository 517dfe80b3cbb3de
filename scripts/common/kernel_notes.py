"""Notes of the kernels that a process has used, and whether they are those of this checkout.

A kernel is noted as the JSON of its spec, with digests of its source's tokens and of its machine code. The spec is
enough to render its source again, so that most comparisons compile nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import same_code

from fa2cupy.errors import KernelCompileError
from fa2cupy.families.registry import FAMILIES
from fa2cupy.families.tile import TileConfig
from fa2cupy.functions.tracing import ArgumentKind, BoundFunction, trace
from fa2cupy.jit.cache import kernels_in_memory
from fa2cupy.jit.compiler import compile_source, nvrtc_build
from fa2cupy.jit.source import render_kernel
from fa2cupy.jit.spec import KernelSpec
from fa2cupy.problem.boxes import BoxShapes

from .digests import rendered_digest

__all__ = ["note_kernels", "spec_of", "text_of", "together", "why_others"]

_DIGITS = 16


def note_kernels(folder: Path) -> None:
    """Writes a file with the kernels of this process."""
    found = kernels_in_memory()
    digests = {spec: [_source_digest(spec), _machine_digest(kernel.cubin)] for spec, kernel in found.items()}
    kernels = {text_of(spec): " ".join(both) for spec, both in digests.items()}
    note = {"nvrtc": _nvrtc(), "tiles": _tiles(found), "kernels": kernels}
    (folder / f"{os.getpid()}.json").write_text(json.dumps(note), encoding="utf-8")


def together(folder: Path) -> dict[str, object]:
    """Returns the notes of several processes as one; an empty one if there are none."""
    notes = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    if not notes:
        return {}
    parts = {name: dict(sorted(item for note in notes for item in note[name].items())) for name in ("tiles", "kernels")}
    return {"nvrtc": notes[0]["nvrtc"], **parts}


def why_others(note: Mapping[str, Any]) -> str:
    """Returns why the noted kernels are not those of this code; an empty text if they are.

    Kernels whose sources differ are compiled if NVRTC is the noted one: their machine code may be the same.
    """
    if not note["kernels"]:
        return "it lists no kernels"
    specs, differing = [], []
    for text, digests in note["kernels"].items():
        source, machine = digests.split()
        try:
            spec = spec_of(text)
            if _source_digest(spec) != source:
                differing.append((spec, machine))
        except Exception as error:  # of any type: this code may have something else where the spec names a kernel
            return f"there is no such kernel as {text} ({error})"
        specs.append(spec)
    tiles = _tiles(specs)
    retuned = [kernel for kernel, digest in note["tiles"].items() if tiles.get(kernel) != digest]
    if retuned:
        return f"default tiles differ, those of {', '.join(retuned)}"
    if not differing:
        return ""
    sources = f"the sources of {len(differing)} in {len(specs)} kernels differ"
    if note["nvrtc"] != _nvrtc():
        return f"{sources}, such as {differing[0][0]}, and the machine code needs the NVRTC that the step had"
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        codes = pool.map(_compiled_digest, (spec for spec, _ in differing))
        for (spec, machine), code in zip(differing, codes, strict=True):
            if code != machine:
                pool.shutdown(wait=False, cancel_futures=True)
                return f"{sources}, and the machine code of {spec}"
    return ""


def _source_digest(spec: KernelSpec) -> str:
    return rendered_digest(render_kernel(spec).text)[:_DIGITS]


def _machine_digest(cubin: bytes) -> str:
    return same_code.code_digest(cubin)[:_DIGITS]


def _compiled_digest(spec: KernelSpec) -> str:
    try:
        return _machine_digest(compile_source(render_kernel(spec)).cubin)
    except KernelCompileError:
        return ""


def _nvrtc() -> str:
    try:
        return " ".join(nvrtc_build().replace("/", "").split())
    except KernelCompileError:
        return ""


def _tiles(specs: Iterable[KernelSpec]) -> dict[str, str]:
    """Returns digests of the default tiles of kernels: others would be other kernels in the same calls."""
    kernels = {(spec.operation, spec.family, spec.dtype) for spec in specs if spec.family is not None}
    found = {}
    for operation, family, dtype in kernels:
        text = repr([dataclasses.replace(row, measured="") for row in family.tiles.get(operation, ())])
        found[f"{operation} ({family.name}, {dtype})"] = hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
    return dict(sorted(found.items()))


def text_of(spec: KernelSpec) -> str:
    """Returns a spec as JSON, without what has its default."""
    defaults = {field.name: field.default for field in dataclasses.fields(spec)}
    given = {name: getattr(spec, name) for name, default in defaults.items() if getattr(spec, name) != default}
    given |= {"family": spec.family and spec.family.name, "tile": dataclasses.astuple(spec.tile)}
    if spec.functions:
        given["functions"] = [_values_of(function) for function in spec.functions]
    return json.dumps(given, separators=(",", ":"))


def spec_of(text: str) -> KernelSpec:
    """Returns the spec of a text. Raises an error of any type if this code has no such kernel."""
    given, families = json.loads(text), {None: None, **{one.name: one for one in FAMILIES}}
    given["family"] = families[given["family"]]
    given |= {"tile": TileConfig(*given["tile"]), "features": tuple(given.get("features", ()))}
    if "boxes" in given:
        given["boxes"] = BoxShapes(*map(tuple, given["boxes"]))
    return KernelSpec(**given | {"functions": tuple(map(_function_of, given.get("functions", ())))})


class _Noted:
    """Stands for an input or a result of a program. It lists the calls of its methods after the inputs."""

    def __init__(self, calls: list, place: int):
        self._calls, self.place = calls, place

    def __getattr__(self, method: str) -> Callable[..., _Noted]:
        return functools.partial(self._call, method)

    def __getitem__(self, indices: tuple) -> _Noted:
        return self._call("__getitem__", *indices)

    def _call(self, method: str, *values: object) -> _Noted:
        encoded = (None if isinstance(x, slice) else [x.place] if isinstance(x, _Noted) else x for x in values)
        self._calls.append((method, self.place, *encoded))
        return _Noted(self._calls, len(self._calls) - 1)


def _values_of(function: BoundFunction) -> dict[str, object]:
    """Returns what `_function_of` makes the function of: calls of what NumPy and symbols have, and no nodes."""
    program = function.program
    inputs = {"score_mod": 5, "mask_mod": 4}[program.role] + len(program.arguments)
    calls: list[Any] = [None] * inputs
    result = program(*(_Noted(calls, number) for number in range(inputs)))
    values = {"role": program.role, "arguments": program.arguments, "calls": calls[inputs:], "result": result.place}
    return values | {"dtypes": function.dtypes, "lengths": function.lengths}


def _function_of(values: Mapping[str, Any]) -> BoundFunction:
    def function(*inputs: Any) -> Any:
        found = list(inputs)
        for method, number, *encoded in values["calls"]:
            operands = [slice(None) if x is None else found[x[0]] if isinstance(x, list) else x for x in encoded]
            of = found[number]
            found.append(of[tuple(operands)] if method == "__getitem__" else getattr(of, method)(*operands))
        return found[values["result"]]

    program = trace(values["role"], function, tuple(ArgumentKind(*kind) for kind in values["arguments"]))
    return BoundFunction(program, tuple(values["dtypes"]), tuple(values["lengths"]))
