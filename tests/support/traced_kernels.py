"""Traced functions in the interpreter: a kernel with one warp for the scores of a query, made from a program's text."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import ptxsim
from support import CHECKOUT
from support.ptxsim_kernels import cuda_module

from fa2cupy.functions.tracing import Program

#: The folder of the headers that texts include.
HEADERS = CHECKOUT / "kernels"
_ITEMS = {"float16": "float16", "bfloat16": "bfloat16", "float32": "float", "float64": "double", "bool": "bool"}
_ITEMS |= {"int8": "signed char", "int16": "short", "int32": "int", "int64": "long long", "uint8": "unsigned char"}

_KERNEL = """
#include "common/traced.cuh"
namespace fa2::common {{
{text}
struct Arguments {{
    static constexpr bool kFast = {fast};
{members}
}};
}}  // namespace fa2::common
using namespace fa2;
using namespace fa2::common;
extern "C" __global__ void traced(const {real}* scores, {real}* values, {real}* slopes, bool* visible{pointers}) {{
    using Real = {real};
    constexpr int kHeads = {heads}, kQueries = {queries}, kKeys = {keys};
    int head = blockIdx.x, q = blockIdx.y;
    asm volatile("" : "+r"(head), "+r"(q));  // short numbers would be multiplied by what the interpreter does not know
    const int b = head / kHeads, h = head % kHeads;
{layouts}
    const Arguments args{{{fields}}};
    {begin}
    for (int k = threadIdx.x; k < kKeys; k += 32) {{
        const int i = (head * kQueries + q) * kKeys + k;
        // As in a fragment: from an element at another distance, and from there on.
        const RealDistance<Real> from_first{{Real(q - k - 5), 5}};
        {call}
    }}
    {end}
}}
"""
_CALLS = {
    "score_mod": "const auto of_head = score_head_terms<Real>(args, b, h);\n"
    "    const auto of_distance = distance_terms<Real>(args, b, h, q - k);\n"
    "    const Real value = score_value<Real>(args, scores[i], b, h, q, k, from_first, of_head, of_distance);\n"
    "    values[i] =\n"
    "        score_value_and_slope<Real>(args, scores[i], b, h, q, k, from_first, of_head, of_distance, slopes[i]);\n"
    "    if (value == value && value != values[i]) __trap();\n"
    "    add_argument_gradients<Real>(args, scores[i], b, h, q, k, Real(1) + Real(k % 3), sums);",
    "mask_mod": "visible[i] = is_visible<Real>(args, b, h, q, k);",
}
_SUMS = {
    "score_mod": {
        "begin": "GradientSums<Real> sums;\n"
        "    begin_sums<Real>(args, b, h, q - (kKeys - 1), kKeys, threadIdx.x, sums);",
        "end": "end_sums<Real>(args, b, h, threadIdx.x, sums);",
    },
    "mask_mod": {"begin": "", "end": ""},
}


def source_of(program: Program, arrays: tuple, shape: tuple, real: str, is_fast: bool = False) -> str:
    """Returns a kernel that runs all functions of a program's text on scores (batch, heads, queries, keys).

    `is_fast`: with the special functions of 16-bit data.
    """
    members, fields, pointers, layouts = [], [], [], []

    def pass_array(name: str, array: np.ndarray) -> None:
        fields.append(f"{{{name}, layout_of_{name}}}" if array.ndim else f"{{{name}}}")
        strides, lengths = ([*map(str, x)] for x in ([n // array.itemsize for n in array.strides], array.shape))
        if array.ndim:
            values = f"{{{{{', '.join(strides)}}}, {{{', '.join(lengths)}}}}}"
            layouts.append(f"    const ArrayLayout<{array.ndim}> layout_of_{name}{values};")

    floats = program.floats if program.role == "score_mod" else ()
    for number, array in enumerate(arrays):
        item = _ITEMS[array.dtype.name]
        members.append(f"    TracedArray<const {item}, {array.ndim}> array{number};")
        members.append(f"    static constexpr int32 kLength{number} = {array.shape[-1] if array.ndim else 1};")
        pointers.append(f"const {item}* array{number}")
        pass_array(f"array{number}", array)
    for number in floats:
        array = np.empty(arrays[number].shape)
        members.append(f"    TracedArray<{real}, {array.ndim}> gradient{number};")
        pointers.append(f"{real}* gradient{number}")
        pass_array(f"gradient{number}", array)
    return _KERNEL.format(
        text=program.text, members="\n".join(members), real=real, pointers="".join(f", {p}" for p in pointers),
        heads=shape[1], queries=shape[2], keys=shape[3], fields=", ".join(fields), layouts="\n".join(layouts),
        fast=str(is_fast).lower(), call=_CALLS[program.role], **_SUMS[program.role],
    )  # fmt: skip


def run_text(program: Program, arrays: tuple, scores: np.ndarray, is_fast: bool = False) -> tuple[np.ndarray, ...]:
    """Returns values, slopes, visibility, and gradients of arguments: sums of slopes times ``1 + k % 3``."""
    real = {"float32": "float", "float64": "double"}[scores.dtype.name]
    source = source_of(program, arrays, scores.shape, real, is_fast)
    module = cuda_module(source, "compute_80", (f"-I{HEADERS}",))
    memory = ptxsim.Memory()
    pointers = [memory.alloc(scores, "scores")]
    pointers += [memory.alloc(np.full_like(scores, np.nan), name) for name in ("values", "slopes")]
    pointers += [memory.alloc(np.zeros(scores.shape, bool), "visible")]
    inputs = [memory.alloc(array.ravel(order="K"), f"array{i}") for i, array in enumerate(arrays)]
    floats = program.floats if program.role == "score_mod" else ()
    sums = [memory.alloc(np.zeros(arrays[i].shape, scores.dtype), f"gradient{i}") for i in floats]
    batch, heads, queries, _ = scores.shape
    arguments = [*pointers, *inputs, *sums]
    module.launch("traced", grid=(batch * heads, queries), block=32, args=arguments, memory=memory)
    values, slopes, visible = (memory.read(pointer).reshape(scores.shape) for pointer in pointers[1:])
    gradients = [memory.read(one).reshape(arrays[i].shape) for one, i in zip(sums, floats, strict=True)]
    return values, slopes, visible, *gradients


def broken_headers(folder: Path, name: str, old: str, new: str) -> Path:
    """Returns a folder of headers, one of them with a text replaced; the text must occur in it once."""
    shutil.copytree(CHECKOUT / "kernels" / "common", folder / "common")
    text = (folder / "common" / name).read_text()
    if text.count(old) != 1:  # an AssertionError could count as a caught mutant
        raise ValueError(f"{old!r} occurs {text.count(old)} times in {name}")
    (folder / "common" / name).write_text(text.replace(old, new))
    return folder
