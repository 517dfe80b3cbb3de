"""Checks that a change keeps the machine code: compares digests of a fixed set of kernels with those of an earlier run.

    python scripts/same_code.py before.json                       compiles and writes digests; needs no GPU
    python scripts/same_code.py after.json --against before.json  the same, then lists the kernels that differ

Run it before a change to ``kernels/`` that is to keep the machine code, and after it. A digest covers the instructions,
the constants and what the driver is told of a kernel (registers, shared memory, parameters), and neither names nor line
numbers: comments, names and the order of declarations do not matter.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import struct
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import common  # noqa: F401  (makes fa2cupy importable in a checkout that is not installed)
import numpy as np

from fa2cupy import mods
from fa2cupy.cli import run_command
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.family import Family
from fa2cupy.families.operations import METHODS as OPERATIONS_OF
from fa2cupy.families.operations import OPERATIONS
from fa2cupy.families.registry import family_named
from fa2cupy.inspection import default_specs
from fa2cupy.jit.compiler import compile_source
from fa2cupy.jit.source import render_kernel
from fa2cupy.jit.spec import KernelSpec
from fa2cupy.plan.specs import decode_specs, merge_spec
from fa2cupy.problem.choices import CALL_KEYWORDS, check_jobs
from fa2cupy.system.progress import progress

#: (architecture, dtype, family, head dimensions of plain calls).
FAMILIES = (
    ("sm_90", "float16", "sm90", (40, 64, 96, 128, 256)),
    ("sm_90", "float32", "sm90", (40, 64, 128, 256)),
    ("sm_80", "bfloat16", "sm80", (40, 64, 96, 128, 256)),
    ("sm_80", "float32", "simt", (40, 64, 128, 256)),
    ("sm_80", "float64", "simt", (64,)),
)
METHODS = (None, *OPERATIONS_OF)
OF_DECODE = OPERATIONS["decode"].features
OF_BACKWARD = ("dlse", "return_dbias", "return_dsink")
ACTED_UPON = (".text", ".nv.info", ".nv.constant", ".nv.shared")
ADDRESSES = ".nv.constant4"  # of variables, among them each static constexpr member
NO_BITS = 8  # SHT_NOBITS: a section with a size and without content
SIZED = 4  # EIFMT_SVAL: an attribute whose value follows; those of other formats have it in the place of the size
OF_SYMBOLS = (0x0A, 0x11, 0x12, 0x23, 0x2F)  # EIATTR_: sizes of frames and stacks, registers, by symbol
OF_BOTH = tuple(name for name in CALL_KEYWORDS if name not in (*OF_BACKWARD, "block_mask"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a kernel differs from that of `--against`, or is not in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="JSON file for the digests")
    parser.add_argument("--against", metavar="JSON", help="what an earlier run wrote")
    parser.add_argument("--families", nargs="+", choices=sorted({family for *_, family, _ in FAMILIES}), metavar="NAME")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="kernels compiled side by side")
    options = parser.parse_args(arguments)
    before = json.loads(Path(options.against).read_text(encoding="utf-8")) if options.against else None
    specs = list(dict.fromkeys(fixed_specs(options.families)))
    after = digests(specs, check_jobs(options.jobs) or 1)
    Path(options.out).write_text(json.dumps(after, indent=1) + "\n", encoding="utf-8")
    print(f"{len(after)} kernels, written to {options.out}")
    return 0 if before is None else compare(before, after)


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


def fixed_specs(families: Sequence[str] | None = None) -> Iterator[KernelSpec]:
    """Yields the kernels of plain calls, calls with one feature, and calls with all of them, for each family."""
    for arch, dtype, family, head_dims in FAMILIES:
        if families and family not in families:
            continue
        device, kernels = DeviceInfo.named(arch), family_named(family, dtype)
        yield from specs_without_gradient(device, kernels, dtype, head_dims)
        for method in METHODS:
            if not set(operations_of(method)) <= set(kernels.operations):
                continue
            own = OF_BOTH + (OF_BACKWARD if method else ())
            if "dbias" not in kernels.features:
                own = tuple(name for name in own if name != "return_dbias")
            for head_dim, causal in itertools.product(head_dims, (False, True)):
                if kernels.multiplies_parts and head_dim > 128 and method == "single_pass":
                    continue  # it has no such kernel
                yield from default_specs(device, dtype, head_dim, causal, method, family)
                if kernels.split_operations and causal:
                    yield from default_specs(device, dtype, head_dim, causal, method, family, num_splits=2)
            if "block_mask" in kernels.features:
                table = np.zeros((32, 1), "float32")
                functions = {"score_mod": mods.t5_relative(32), "score_args": (table,), "mask_mod": mods.causal()}
                features = ("block_mask", *(("return_dscore_args",) if method == "two_pass" else ()))
                how = {"features": features, "functions": functions}
                yield from default_specs(device, dtype, 64, False, method, family, **how)
            if dtype != "float64":
                for features in (*((name,) for name in OF_BOTH), own):
                    yield from default_specs(device, dtype, 64, True, method, family, features=features)


def specs_without_gradient(
    device: DeviceInfo, kernels: Family, dtype: str, head_dims: Sequence[int]
) -> Iterator[KernelSpec]:
    """Yields the kernels of merges and, for families that have it, of decoding."""
    for head_dim in head_dims:
        yield merge_spec(device, dtype, head_dim)
        if "decode" in kernels.operations:
            yield from decode_specs(device, dtype, head_dim)
    if "decode" in kernels.operations:
        yield from decode_specs(device, dtype, 64, features=OF_DECODE)


def operations_of(method: str | None) -> tuple[str, ...]:
    """Returns the tiled operations of a forward, or of a backward by a method."""
    return ("forward",) if method is None else OPERATIONS_OF[method]


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
