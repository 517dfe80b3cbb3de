"""Renders the source of a kernel: Jinja fills in the values, then every local header is inlined once."""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import jinja2

from ..families.operations import OPERATIONS
from ..functions.tracing import Program, trace
from ..problem.attention import ROWS_OF
from ..problem.boxes import BoxShapes
from ..problem.features import FEATURES, features_of_scores
from .params import ITEMS, argument_arrays, gradient_arrays
from .spec import CPP_NAMES, KernelSpec

__all__ = ["KernelSource", "kernel_directory", "render_kernel"]

_NO_BOXES = BoxShapes((1, 1, 1), (1, 1, 1))
_INCLUDE = re.compile(r'^[ \t]*#include "([^"]+)"[ \t]*$')


@dataclass(frozen=True)
class KernelSource:
    """The complete source of a kernel: the machine code depends on it, on NVRTC and on its options alone."""

    spec: KernelSpec
    text: str

    @property
    def digest(self) -> str:
        """sha256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()


@functools.lru_cache(maxsize=None)
def kernel_directory() -> Path:
    """The folder of the templates: in the installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for directory in (package / "kernels", package.parent / "kernels"):
        if (directory / "forward.cu").is_file():
            return directory
    raise FileNotFoundError(
        f"the kernel templates are neither in {package / 'kernels'} nor in {package.parent / 'kernels'}; "
        "reinstall fa2cupy (in its checkout, pip install --force-reinstall --no-deps .)"
    )


@functools.lru_cache(maxsize=None)
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(kernel_directory()),
        line_statement_prefix="//%",
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )


def render_kernel(spec: KernelSpec) -> KernelSource:
    """The flattened source of a kernel.

    Entry files and ``.j2`` headers are templates; other headers are plain CUDA C++. ``#line`` directives make the
    compiler's messages name the files in ``kernels/`` and their lines.
    """
    layout = spec.params
    values = {
        "symbol": spec.symbol,
        "family": spec.folder,
        "element": CPP_NAMES[spec.dtype][0],
        "head_dim": spec.head_dim,
        "head_dim_v": spec.head_dim_v or spec.head_dim,
        "causal": str(spec.causal).lower(),
        "positive_scale": str(spec.needs_positive_scale).lower(),
        "is_split": str(spec.is_split).lower(),
        "is_fallback": str(spec.is_fallback).lower(),
        "owns_keys": spec.owns_keys,
        "natural_scores": str(spec.has_natural_scores).lower(),
        "flags": {flag: str(value).lower() for flag, value in spec.flags.items()},
        "score_features": len(features_of_scores(spec.features)),
        "may_hide_rows": str(any(FEATURES[name].may_hide_rows for name in spec.features)).lower(),
        "b_r": spec.tile.b_r,
        "b_c": spec.tile.b_c,
        "num_warps": spec.tile.num_warps,
        "num_stages": spec.tile.num_stages,
        "blocks_per_sm": spec.tile.blocks_per_sm,
        "least_warps": spec.family.least_warps if spec.family else 0,
        "kept_keys": spec.kept_keys,
        "boxes": spec.boxes or _NO_BOXES,
        "blocks_of_tile": spec.blocks_of_tile,
        "cluster": f"__cluster_dims__({spec.blocks_of_tile}, 1, 1)" if spec.blocks_of_tile > 1 else "",
        "shared_bytes": spec.shared_memory_bytes,
        "fields": layout.fields,
        "params_bytes": layout.nbytes,
        # TMA reads tensor maps from the parameter itself, so the compiler must not copy the record.
        "grid_constant": "__grid_constant__ " if layout.maps else "",
        "functions": [_function_values(role, spec) for role in ("score_mod", "mask_mod")],
        "scheduled_batch": "num_series" if spec.kept_keys else "batch",
        "scheduled": any(f.name == "heads_per_section" for f in layout.fields),
    }
    if "cu_seqlens" in spec.features and OPERATIONS[spec.operation].is_tiled:
        pointers = [name for name in layout.pointers if name in ROWS_OF and name not in layout.maps]
        values |= {
            "by_queries": [name for name in pointers if ROWS_OF[name] == "queries"],
            "by_keys": [name for name in pointers if ROWS_OF[name] == "keys"],
            "statistics": [name for name in pointers if ROWS_OF[name] == "statistics"],
        }
    lines: list[str] = []
    _append_file(f"{spec.operation}.cu", values, lines, set())
    return KernelSource(spec, "\n".join(lines) + "\n")


def _function_values(role: str, spec: KernelSpec) -> dict[str, object]:
    """What ``common/functions.cuh.j2`` has of a role: the caller's function, or one that changes nothing."""
    function = next((one for one in spec.functions if one.program.role == role), None)
    arrays: list[dict[str, object]] = []
    gradients: list[dict[str, object]] = []
    if function is not None:
        for (name, dtype, rank), length in zip(argument_arrays(function), function.lengths, strict=True):
            arrays.append({**_member(name, f"const {ITEMS[dtype]}", rank), "length": length})
        if "dscore_args" in spec.features:
            gradients = [_member(name, "Accum", rank) for name, rank in gradient_arrays(function)]
    program = _neutral(role) if function is None else function.program
    return {
        "name": program.arguments_name,
        "arrays": arrays,
        "gradients": dict(zip(program.floats, gradients, strict=False)),
        "is_short": program.is_short,
        "adds": program.adds,
        "shifts": program.shifts,
        "text": program.text,
        "curvature": program.curvature_text if OPERATIONS[spec.operation].is_second_order else "",
    }


def _member(name: str, item: str, rank: int) -> dict[str, object]:
    """A ``TracedArray`` of a member of the record."""
    members = [f"params.{name}", *([f"params.{name}_strides"] if rank else [])]
    return {"item": item, "rank": rank, "members": ", ".join(members)}


@functools.lru_cache(maxsize=None)
def _neutral(role: str) -> Program:
    if role == "score_mod":
        return trace(role, lambda score, b, h, q, k: score, ())
    return trace(role, lambda b, h, q, k: True, ())


def _append_file(name: str, values: dict[str, object], lines: list[str], seen: set[str]) -> None:
    seen.add(name)
    if name.endswith((".cu", ".j2")):
        text = _environment().get_template(name).render(values)
    else:
        text = (kernel_directory() / name).read_text(encoding="utf-8")
    lines.append(f'#line 1 "kernels/{name}"')
    for number, line in enumerate(text.splitlines(), start=1):
        include = _INCLUDE.match(line)
        if include is None:
            if line.strip() != "#pragma once":
                lines.append(line)
            else:
                lines.append("")
        else:
            if include[1] not in seen:
                _append_file(include[1], values, lines, seen)
            lines.append(f'#line {number + 1} "kernels/{name}"')
