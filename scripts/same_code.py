"""Checks that a change keeps the machine code: compares digests of a fixed set of kernels with those of an earlier run.

    python scripts/same_code.py before.json                       compiles and writes digests; needs no GPU
    python scripts/same_code.py after.json --against before.json  the same, then lists the kernels that differ

Run it before a change to ``kernels/`` that is to keep the machine code, and after it. A digest covers the instructions,
the constants and what the driver is told of a kernel (registers, shared memory, parameters), and neither names nor line
numbers: comments, names and the order of declarations do not matter.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import struct
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from common.measure import positive_int
from common.records import add_record_arguments

from fa2cupy import UnsupportedProblemError, mods
from fa2cupy.cli import run_command
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.family import Family
from fa2cupy.families.operations import METHODS as OPERATIONS_OF
from fa2cupy.families.operations import OPERATIONS
from fa2cupy.families.registry import FAMILIES
from fa2cupy.jit.compiler import compile_source
from fa2cupy.jit.source import render_kernel
from fa2cupy.jit.spec import KernelSpec
from fa2cupy.plan.ranks import specs_of_ranks
from fa2cupy.plan.specs import OF_BACKWARD, OF_TANGENTS, decode_specs, default_specs, merge_spec, second_order_specs
from fa2cupy.problem.choices import CALL_KEYWORDS
from fa2cupy.problem.dtypes import DTYPES
from fa2cupy.system.progress import progress

#: Head dimensions of plain calls, some of them not of every family, and those of calls in the further dtypes of one.
HEAD_DIMS, FEW_HEAD_DIMS = (40, 64, 96, 128, 256), (64,)
OLDEST = 80  # architecture of families that run on older ones, too
METHODS = (None, *OPERATIONS_OF)
OF_RESULTS = tuple(name for name in CALL_KEYWORDS if name in OF_BACKWARD)
OF_BOTH = tuple(name for name in CALL_KEYWORDS if name not in (*OF_RESULTS, *OF_TANGENTS, "block_mask"))
ACTED_UPON = (".text", ".nv.info", ".nv.constant", ".nv.shared")
ADDRESSES = ".nv.constant4"  # of variables, among them each static constexpr member
NO_BITS = 8  # SHT_NOBITS: a section with a size and without content
SIZED = 4  # EIFMT_SVAL: an attribute whose value follows; those of other formats have it in the place of the size
OF_SYMBOLS = (0x0A, 0x11, 0x12, 0x23, 0x2F)  # EIATTR_: sizes of frames and stacks, registers, by symbol


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a kernel differs from that of `--against`, or is not in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_record_arguments(parser, "the digests")
    families = sorted({one.name for one in FAMILIES})
    parser.add_argument("--families", nargs="+", choices=families, metavar="NAME", help=f"of {', '.join(families)}")
    parser.add_argument("--jobs", type=positive_int, metavar="N", help="compilers at a time; one per CPU by default")
    options = parser.parse_args(arguments)
    after = digests(fixed_specs(options.families), options.jobs or os.cpu_count() or 1)
    options.out.write_text(json.dumps(after, indent=1) + "\n", encoding="utf-8")
    print(f"{len(after)} kernels, written to {options.out}")
    return 0 if options.against is None else compare(options.against, after)


def compare(before: dict[str, str], after: dict[str, str]) -> int:
    """Prints the kernels that differ or are new; returns 1 if there are any."""
    differing = [name for name in after if before.get(name, after[name]) != after[name]]
    missing = [name for name in after if name not in before]
    for name in differing:
        print(f"differs: {name}")
    for name in missing:
        print(f"new: {name}")
    print(f"{len(after) - len(differing) - len(missing)} kernels have the same machine code, {len(differing)} differ")
    return 1 if differing or missing else 0


def fixed_specs(families: Sequence[str] | None = None) -> list[KernelSpec]:
    """The kernels of plain calls, calls with one feature, and calls with all of them, for each family.

    Further dtypes of a family have the plain calls of few head dimensions: their kernels are of the same code. Kernels
    that several families share are compiled for one architecture.
    """
    found: dict[KernelSpec, KernelSpec] = {}
    for family in FAMILIES:
        if families and family.name not in families:
            continue
        device = DeviceInfo.named(f"sm_{max(family.min_compute_capability, OLDEST)}")
        first, *others = family.dtypes
        specs = [of_family(device, family, first, HEAD_DIMS), of_features(device, family, first)]
        specs += [of_family(device, family, dtype, FEW_HEAD_DIMS) for dtype in others]
        for spec in itertools.chain(*specs):
            is_shared = spec.is_fallback or OPERATIONS[spec.operation].is_common
            found.setdefault(dataclasses.replace(spec, arch="any") if is_shared else spec, spec)
    if not families:
        found |= {spec: spec for spec in specs_of_ranks(f"sm_{OLDEST}", DTYPES)}
    return list(found.values())


def of_family(device: DeviceInfo, family: Family, dtype: str, head_dims: Sequence[int]) -> Iterator[KernelSpec]:
    """Yields the kernels of calls without features."""
    for head_dim, causal, method in itertools.product(head_dims, (False, True), METHODS):
        if has_method(family, method):
            yield from kernels_of(device, dtype, head_dim, causal, method, family.public_name)
            if family.split_operations and causal:
                yield from kernels_of(device, dtype, head_dim, causal, method, family.public_name, num_splits=2)
    if "dbias" in family.operations:
        for method in (method for method in ("two_pass", "one_tile") if has_method(family, method)):
            with_dbias = kernels_of(
                device, dtype, 64, True, method, family.public_name, features=("bias", "return_dbias")
            )
            yield from (spec for spec in with_dbias if "dbias" in spec.operation)
    for head_dim in head_dims:
        yield merge_spec(device, dtype, head_dim)
        if "decode" in family.operations:
            yield from decode_specs(device, dtype, *columns_of_decode(family, head_dim))
        if family.has_kernels("jvp"):
            yield from second_order_specs(device, dtype, head_dim, causal=True)


def of_features(device: DeviceInfo, family: Family, dtype: str) -> Iterator[KernelSpec]:
    """Yields the kernels of calls with one feature, of calls with all, and of those with functions and a map."""
    table = np.zeros((32, 1), "float32")
    functions = {"score_mod": mods.t5_relative(32), "score_args": (table,), "mask_mod": mods.causal()}
    for method in (method for method in METHODS if has_method(family, method)):
        results = [name for name in OF_RESULTS if method and (name != "return_dbias" or "dbias" in family.features)]
        for features in (*((name,) for name in OF_BOTH), (*OF_BOTH, *results)):
            yield from kernels_of(device, dtype, 64, True, method, family.public_name, features=features)
        if "block_mask" in family.features:
            features = ("block_mask", *(("return_dscore_args",) if method == "two_pass" else ()))
            yield from kernels_of(
                device, dtype, 64, False, method, family.public_name, features=features, functions=functions
            )
    for shape in ((64, 64), (16, 32, 32)) if family.boxes else ():
        neighborhood = mods.neighborhood(shape, (5,) * len(shape))
        for head_dim, method in itertools.product((64, 128), (None, "single_pass")):
            functions = {"mask_mod": neighborhood}
            yield from kernels_of(device, dtype, head_dim, False, method, family.public_name, functions=functions)
    if "decode" in family.operations:
        yield from decode_specs(device, dtype, *columns_of_decode(family, 64), features=OPERATIONS["decode"].features)
    if family.has_kernels("jvp"):
        features = ("bias", "sink", "softcap", "dropout_p", *OF_TANGENTS, "return_dbias", "return_dsink")
        yield from second_order_specs(device, dtype, 64, causal=True, features=features)


def columns_of_decode(family: Family, head_dim: int) -> tuple[int, int]:
    """Returns the columns of k and v in a cache: those of latent attention for a family that has no others."""
    return (head_dim, head_dim) if family.why_not_columns("decode", head_dim, head_dim) is None else (576, 512)


def has_method(family: Family, method: str | None) -> bool:
    """True if a family has kernels of a forward, for None, or of a method of the backward."""
    return set(OPERATIONS_OF[method] if method else ("forward",)) <= set(family.operations)


def kernels_of(*call: Any, **how: Any) -> list[KernelSpec]:
    """The kernels of a call: those of `default_specs`, or none where the family has none for this head dimension."""
    try:
        return default_specs(*call, **how)
    except UnsupportedProblemError:
        return []


def digests(specs: Sequence[KernelSpec], jobs: int) -> dict[str, str]:
    """Returns the digest of each kernel by its description."""

    def one(spec: KernelSpec) -> str:
        return code_digest(compile_source(render_kernel(spec)).cubin)

    found: dict[str, str] = {}
    with ThreadPoolExecutor(jobs) as pool, progress(len(specs), "compiling") as bar:
        for spec, digest in zip(specs, pool.map(one, specs), strict=True):
            found[f"{spec} on {spec.arch}"] = digest
            bar.update()
    return found


def code_digest(cubin: bytes) -> str:
    """Returns the sha256 of the sections of a cubin that the GPU and the driver act upon."""
    digest = hashlib.sha256()
    for section in sorted(sections(cubin), key=lambda section: section.name):
        if section.name.startswith(ACTED_UPON) and not section.name.startswith(ADDRESSES):
            kind = section.name.partition("fa2_")[0]
            content = attributes(section.content) if kind.startswith(".nv.info") else section.content
            digest.update(f"{kind} {section.registers} {section.size} ".encode() + content)
    return digest.hexdigest()


class Section(NamedTuple):
    """A section of an ELF file. The sections of code note how many registers a thread has."""

    name: str
    content: bytes
    size: int
    registers: int


def sections(elf: bytes) -> Iterator[Section]:
    """Yields the sections of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry_bytes, count, names_index = struct.unpack_from("<3H", elf, 58)
    entries = [struct.unpack_from("<2I4Q2I", elf, table + entry_bytes * index) for index in range(count)]
    names = entries[names_index][4]
    for name, kind, _, _, offset, size, _, info in entries:
        text = elf[names + name : elf.index(b"\0", names + name)].decode()
        content = b"" if kind == NO_BITS else elf[offset : offset + size]
        yield Section(text, content, size, info >> 24 if text.startswith(".text") else 0)


def attributes(info: bytes) -> bytes:
    """Returns the attributes of a kernel (format, number, size, value) without the symbols that begin some values."""
    found, at = b"", 0
    while at < len(info):
        layout, number, size = struct.unpack_from("<2BH", info, at)
        value = info[at + 4 : at + 4 + size] if layout == SIZED else b""
        found += info[at : at + 4] + (value[4:] if number in OF_SYMBOLS else value)
        at += 4 + len(value)
    return found


if __name__ == "__main__":
    sys.exit(run_command("same_code.py", main))
