"""README.md and the pages of docs/: their Python runs, and the files and commands that they name exist."""

from __future__ import annotations

import re

import pytest
from support import CHECKOUT
from support.pages import PAGES, python_blocks, run_page

from fa2cupy import cli

pytestmark = pytest.mark.skipif(not (CHECKOUT / "docs").is_dir(), reason="not in a checkout")

RUN = [page for page in PAGES if page != "README.md" and python_blocks(page)]


def text_of(page: str) -> str:
    return (CHECKOUT / page).read_text(encoding="utf-8")


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


def test_every_page_is_in_the_index():
    listed = re.findall(r"^(\w+)$", text_of("docs/index.md"), re.MULTILINE)
    assert sorted(["docs/index.md", *(f"docs/{name}.md" for name in listed)]) == PAGES[1:]
