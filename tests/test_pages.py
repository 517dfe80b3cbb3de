"""README.md and the pages of docs/: their Python runs, their numbers are measured, and what they name exists."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import traceback
from pathlib import Path
from types import ModuleType

import pages
import pytest
import support.pages
from common import measure, second_order
from measured import picture, ranks, rows, speed
from support import CHECKOUT
from support.keyword_functions import FUNCTIONS
from support.pages import PAGES, python_blocks, run_page

import fa2cupy
from fa2cupy import cli
from fa2cupy.errors import INSTALL_CUDA
from fa2cupy.problem.features import FeatureKeywords

pytestmark = pytest.mark.skipif(not (CHECKOUT / "docs").is_dir(), reason="not in a checkout")

RUN = [page for page in PAGES if python_blocks(page)]


def text_of(page: str) -> str:
    return (CHECKOUT / page).read_text(encoding="utf-8")


@pytest.fixture
def run_text(tmp_path, monkeypatch):
    """Runs a made-up page without a GPU."""
    monkeypatch.setattr(support.pages, "CHECKOUT", tmp_path)
    monkeypatch.chdir(tmp_path)

    def run(text: str) -> dict:
        (tmp_path / "some.md").write_text(text)
        return run_page("some.md", gpus=0)

    return run


def test_blocks_of_a_page_run_in_one_namespace_without_a_gpu(run_text):
    names = run_text(
        "text\n```python\nimport cupy\nx = cupy.ones(3)\n```\n"
        "<!-- without a GPU 1000 is 2 -->\n```python\nimport cupy as xp, os\ny = xp.zeros(1000)\n```\n"
        "```pycon\n>>> float(x.sum() + y.size)\n5.0\n>>> z = 1\n```\n"
        "```bash\nnothing here runs\n```\n"
        "<!-- run by python -->\n```python\nopen('made', 'w').close()\n```\n"
    )
    assert names["y"].shape == (2,) and names["z"] == 1
    assert Path("made").exists()


def test_a_block_that_lacks_something_is_compiled_and_a_warning_says_so(run_text):
    with pytest.warns(UserWarning, match=r"some\.md:3 was not run: it needs the module no_such_module"):
        names = run_text("<!-- needs no_such_module -->\n```python\nx = 1\n```\n```python\ny = 2\n```\n")
    assert "x" not in names and names["y"] == 2
    with pytest.raises(SyntaxError):
        run_text("<!-- needs gpu -->\n```python\nx = \n```\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```pycon\n>>> 1 + 1\n3\n```\n", "Expected:\n    3\nGot:\n    2"),
        ("<!-- need gpu -->\n```python\n```\n", "no mark of a block"),
        ("<!-- without a GPU 3 is 2 -->\n```python\nx = 1\n```\n", "the block does not have '3'"),
        ("<!-- run by python -->\n```python\nraise SystemExit('it failed')\n```\n", "it failed"),
    ],
)
def test_what_is_wrong_with_a_page_is_an_error(run_text, text, message):
    with pytest.raises(AssertionError, match=re.escape(message)):
        run_text(text)


def test_tracebacks_have_the_lines_of_the_page(run_text):
    with pytest.raises(ZeroDivisionError) as raised:
        run_text("\n\n```python\nx = 0\n1 / x\n```\n")
    last = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert (Path(last.filename).name, last.lineno) == ("some.md", 5)


@pytest.mark.parametrize("page", RUN)
def test_its_python_runs_on_numpy(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_page(page, gpus=0)


@pytest.mark.gpu
@pytest.mark.parametrize("page", RUN)
def test_its_python_runs_on_a_gpu(page, tmp_path, monkeypatch):
    import cupy

    monkeypatch.chdir(tmp_path)
    run_page(page, gpus=cupy.cuda.runtime.getDeviceCount())


@pytest.mark.parametrize("page", PAGES)
def test_files_that_it_links_exist(page):
    folder = (CHECKOUT / page).parent
    links = {link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text_of(page)) if "://" not in link}
    assert not [link for link in links if not (folder / link).exists()]


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_package_are_understood(page):
    for command in re.findall(r"python -m fa2cupy ([a-z][^#`&|\n]*)", text_of(page)):
        cli._parser().parse_args(command.split())  # exits where it does not understand


@pytest.mark.parametrize("page", PAGES)
def test_scripts_that_its_commands_start_exist(page):
    scripts = set(re.findall(r"\b(?:python |`)(scripts/\w+\.py)", text_of(page)))
    assert not [script for script in scripts if not (CHECKOUT / script).is_file()]


def test_measured_parts_are_those_of_the_csvs():
    """`python scripts/pages.py` writes them."""
    texts = {page: text_of(page) for page in PAGES}
    assert [page for page, text in texts.items() if pages.rewritten(text) != text] == []
    marked = re.findall(r"^<!-- measured: (.*) -->\n\n.", "".join(texts.values()), re.MULTILINE)
    assert set(marked) == set(pages.PARTS)
    assert len(marked) == len(re.findall(r"^<!-- end of ", "".join(texts.values()), re.MULTILINE))


def test_a_section_without_a_csv_says_how_it_is_measured_and_one_with_it_has_its_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "_read", rows._read.__wrapped__)
    monkeypatch.setattr(rows, "SCRIPTS", tmp_path)
    assert speed.second_order().startswith("They have not been measured on this card yet: `python")
    folder = tmp_path / "results" / "h200"
    folder.mkdir(parents=True)
    made = []
    for operation in second_order.OPERATIONS:
        row = {"gpu": "Some GPU", "date": "2026-01-02", "dtype": "bfloat16", "head_dim": 64, "causal": 1}
        row |= {"operation": operation, "ms_median": 7.0, "tflops": 321.0, "peak_bytes": 2**21}
        ours = {**row, "provider": "fa2cupy", "share": 0.75}
        made += [{**ours, "seqlen": seqlen} for seqlen in (2048, second_order.LONGEST)]
        made.append({**row, "seqlen": 2048, "provider": "cupy written out", "ratio": 4.5})
    measure.write_csv(folder / "second_order.csv", second_order.COLUMNS, made)
    text = speed.second_order()
    assert "Some GPU, 2026-01-02, beside formulas written out in CuPy: [second_order.csv]" in text
    assert "| bfloat16 64 causal | 321 (0.75) / 321 (0.75) / 321 (0.75) |" in text
    assert "| bfloat16 64 causal | 4.50 / 4.50 / 4.50 |" in text
    assert "one head of 131072 rows, head_dim 64, takes 7 ms and 2 MiB, results included." in text


def test_what_older_files_do_not_have_is_on_pages_when_newer_ones_have_it(monkeypatch):
    read = rows._read.__wrapped__

    def newer(name):
        found = [] if name.startswith("scaleout-") else read(name)
        copied = {"gpu": rows.CARD, "date": "2026-01-02", "provider": "fa2cupy"}
        if name == "functions.csv":
            of_causal = {"over_plain": "0.98", "ratio": "1.02"}
            named = [row | of_causal if row["feature"] == "causal" else row for row in found]
            flash = [{**row, "ratio": "1.01"} for row in named if row["provider"] == "torch flex flash"]
            return [row for row in (*flash, *named) if row["feature"] != "tree"]
        if name == "scaleout-documents.csv":
            sizes = {"seqlen": "131072", "num_heads": "32", "ranks": "2", "documents": "64", "efficiency": "0.96"}
            found = [{**copied, **sizes, "operation": one} for one in ("forward", "backward")]
        return found

    monkeypatch.setattr(rows, "_read", newer)
    monkeypatch.setattr(ranks, "is_measured", lambda name: True)
    text = pages.PARTS["FlexAttention, functions"]()
    assert f"| causal |{' 1.01 / 1.01 |' * 4}" in text and "tree of ancestors" not in text
    assert "and the causal mask at 0.98 / 0.98 of that of `causal`" in " ".join(text.split())
    assert "64 documents of any lengths, packed in 128k rows of 32/8 heads, reach 96.0 / 96.0 %" in " ".join(
        pages.PARTS["scaleout"]().split()
    )


def test_the_picture_has_a_peer_in_each_panel(monkeypatch):
    drawn = []
    monkeypatch.setattr(picture, "titled_bars", lambda *all_of: drawn.append(all_of[-1]))
    picture.draw(CHECKOUT / "docs" / "speed.png")
    ((*panels,),) = (drawn[0].values(),)
    assert len(panels) == 4
    for bars in panels:
        assert len(bars) > 1 and bars["fa2cupy"]
        assert all(series.keys() == bars["fa2cupy"].keys() for series in bars.values())


def test_the_commands_that_compile_ahead_are_understood(monkeypatch):
    asked = []
    monkeypatch.setattr(cli, "precompile", lambda archs, **options: asked.append((archs, options)) or [])
    for command in re.findall(r"^python -m fa2cupy (precompile[^#\n]*)", text_of("docs/cache.md"), re.MULTILINE):
        assert cli.main(command.split()) == 0
    switches = ("features", "decode", "second_order", "distributed")
    assert [(archs, *map(options.get, switches)) for archs, options in asked] == [
        (["sm_80", "sm_90"], (), True, False, False),
        (["sm_90"], (), False, False, False),
        (["sm_90"], [["window", "sink"], ["cu_seqlens", "dlse"]], True, False, False),
        (["sm_90"], (), True, True, False),
        (["sm_90"], (), True, False, True),
    ]


def test_the_listing_of_modules_has_each_once():
    text = text_of("docs/architecture.md")
    listing = text[text.index("\nfa2cupy/\n") : text.index("\nkernels/\n")]
    modules = [path.name for path in (CHECKOUT / "fa2cupy").rglob("*.py") if not path.name.startswith("_")]
    assert sorted(re.findall(r"[\w*]+\.py\b", listing)) == sorted(modules)


def test_every_keyword_that_is_given_for_those_of_other_libraries_exists():
    text = text_of("docs/coming_from.md")
    table = text[text.index("| flash-attn | `scaled_dot") : text.index("In `mask` and `key_padding_mask`")]
    ours = [line.split("|")[3] for line in table.splitlines()[2:] if line]
    known = {*FeatureKeywords.__annotations__, *fa2cupy.__all__, "lse"}
    for function in FUNCTIONS.values():
        known |= set(inspect.signature(function).parameters)
    words = {re.match(r"\(?(\w+)", word)[1] for cell in ours for word in re.findall(r"`([^`]+)`", cell)}
    assert len(words) > 10
    assert words <= known


def test_messages_that_are_quoted_are_those_of_the_package():
    """Compares what stands between the dots with the texts of the sources."""
    texts = set()
    for path in (CHECKOUT / "fa2cupy").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        texts |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    quoted = "".join(re.findall(r"^```text\n(.*?)^```$", text_of("docs/install.md"), re.MULTILINE | re.DOTALL))
    pieces = {piece.strip(": ") for piece in re.split(r"\.\.\.|\n", quoted.replace(INSTALL_CUDA, "..."))}
    assert len(pieces) > 20
    assert [piece for piece in pieces if not any(piece in text for text in texts)] == []


@pytest.mark.parametrize(
    "name", ("fa2cupy", "fa2cupy.mods", "fa2cupy.distributed", "fa2cupy.testing", "fa2cupy.reference", "fa2cupy.typing")
)
def test_the_reference_has_every_public_name(name):
    text = text_of("docs/api.md")
    described = set()
    for module, block in re.findall(r"^\.\. currentmodule:: (\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if module == name:
            described |= set(
                re.findall(r"^\.\. (?:auto(?:function|class|exception|data)|py:data):: (\S+)$", block, re.MULTILINE)
            )
    public = set(importlib.import_module(name).__all__)
    modules = {one for one in public if isinstance(getattr(importlib.import_module(name), one), ModuleType)}
    assert described == public - modules - {"__version__"}
    assert all(f"## {name}.{module}\n" in text for module in modules)


def test_every_page_is_in_the_index():
    listed = re.findall(r"^(\w+)$", text_of("docs/index.md"), re.MULTILINE)
    assert sorted(["docs/index.md", *(f"docs/{name}.md" for name in listed)]) == PAGES[1:]
