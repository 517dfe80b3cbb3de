"""The README: its Python runs, on NumPy and small arrays, and the files that it names exist."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest
from support import CHECKOUT
from support.keyword_functions import FUNCTIONS

import fa2cupy
import fa2cupy.distributed as dist
from fa2cupy import cli
from fa2cupy.jit import cache
from fa2cupy.jit.compiler import CompiledKernel
from fa2cupy.jit.spec import KernelSpec
from fa2cupy.problem.features import FeatureKeywords

README = CHECKOUT / "README.md"

pytestmark = pytest.mark.skipif(not README.is_file(), reason="not in a checkout")


def test_its_python_runs(monkeypatch):
    compiled = []

    def cached_kernel(spec: KernelSpec) -> CompiledKernel:
        compiled.append(spec)
        return CompiledKernel(spec, b"", 168, 0, 0, "", 1.0)

    monkeypatch.setattr(cache, "cached_kernel", cached_kernel)
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    text = "\n".join(blocks)
    for shown, small in (
        ("import cupy,", "import numpy as cupy,"), ("(3, 4, 2048, 16, 128)", "(3, 2, 40, 4, 16)"),
        ("[700, 120, 1228]", "[7, 12, 21]"), ("(4, 4096, 16, 128)", "(2, 64, 4, 16)"),
        ("cupy.zeros(4,", "cupy.zeros(2,"),
        ("slice(0, 100), slice(100, 101), slice(101, 102)", "slice(0, 10), slice(10, 11), slice(11, 12)"),
    ):  # fmt: skip
        assert text.count(shown) == 1
        text = text.replace(shown, small)
    names: dict = {}
    exec(compile(text, str(README), "exec"), names)
    assert len(blocks) == 7
    one_rank = names["training_step"](
        dist.simulate(1, lambda comm: comm)[0], *(names[name] for name in ("tokens", "table", "weight"))
    )
    for rank in names["ranks"]:
        for found, expected in zip(rank, one_rank, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_array_equal(names["k_cache"][:, :12], names["k"][:, :12])
    assert names["sparse"].density == pytest.approx(1 / 3)
    assert names["dtable"].any()
    assert np.isfinite(names["dq"].astype("float32")).all()
    assert names["offsets"].tolist() == [0, 7, 19, 40]
    assert [spec.tile for spec in compiled if spec.operation == "forward"] == [names["tile"]] * 2  # whole, and split


def test_its_commands_are_understood(monkeypatch):
    asked = []
    monkeypatch.setattr(cli, "precompile", lambda archs, **options: asked.append((archs, options)) or [])
    text = README.read_text(encoding="utf-8")
    commands = re.findall(r"^    python -m fa2cupy (precompile[^#\n]*)", text, re.MULTILINE)
    for command in commands:
        assert cli.main(command.split()) == 0
    assert [(archs, *map(options.get, ("features", "decode", "distributed"))) for archs, options in asked] == [
        (["sm_80", "sm_90"], (), True, False),
        (["sm_90"], (), False, False),
        (["sm_90"], [["window", "sink"], ["cu_seqlens", "dlse"]], True, False),
        (["sm_90"], (), True, True),
    ]


def test_files_that_it_names_exist():
    text = README.read_text(encoding="utf-8")
    links = {link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link}
    assert links
    assert not [link for link in links if not (CHECKOUT / link).exists()]
    listing = text[text.index("    fa2cupy/\n") : text.index("    kernels/\n")]
    names = re.findall(r"[\w*]+\.py\b", listing)
    modules = [path.name for path in (CHECKOUT / "fa2cupy").rglob("*.py") if not path.name.startswith("_")]
    assert sorted(names) == sorted(modules), "each module once"


def test_every_keyword_that_it_gives_for_those_of_other_libraries_exists():
    text = README.read_text(encoding="utf-8")
    table = text[text.index("| flash-attn | `scaled_dot") : text.index("In `mask` and `key_padding_mask`")]
    ours = [line.split("|")[3] for line in table.splitlines()[2:] if line]
    known = {*FeatureKeywords.__annotations__, *fa2cupy.__all__, "lse"}
    for function in FUNCTIONS.values():
        known |= set(inspect.signature(function).parameters)
    words = {re.match(r"\(?(\w+)", word)[1] for cell in ours for word in re.findall(r"`([^`]+)`", cell)}
    assert len(words) > 10
    assert words <= known
