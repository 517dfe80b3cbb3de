"""Records of what calls queue: the changes that they show, and those that they do not depend on."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import same_launches
from common import ROOT, SCRIPTS

#: A call on one GPU, and one of ranks that a graph captures.
CALLS = (
    "A100, both, float16, causal",
    "4 ranks, copies, 2 x 512 x 16 / 8 x 64, float16, causal, scheme=heads, captured",
)
#: The stand-ins of CuPy are for a process of its own.
TWICE = """
import sys
from same_launches import main
before, after, *calls = sys.argv[1:]
assert main([before, "--names", *calls]) == 0
assert main([after, "--names", *calls, "--against", before]) == 0
"""


def run(*command, cwd) -> subprocess.CompletedProcess:
    path = {"PYTHONPATH": f"{SCRIPTS}:{':'.join(sys.path)}"}
    return subprocess.run([sys.executable, *command], cwd=cwd, env=path, capture_output=True, text=True)


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """Provides the folder of a record of this checkout, which has been compared with one of the same calls again."""
    pytest.importorskip("cupy", exc_type=ImportError)
    folder = tmp_path_factory.mktemp("records")
    found = run("-c", TWICE, folder / "record", folder / "again", *CALLS, cwd=folder)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.splitlines()[2:] == ["2 calls are the same, 0 differ, 0 sources of kernels"]
    return folder


def test_a_constant_of_a_record(before, tmp_path):
    for folder in ("fa2cupy", "kernels"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "fa2cupy" / "jit" / "params.py"
    text, packed = path.read_text(encoding="utf-8"), "self._packer.pack(*flat)"
    assert packed in text
    path.write_text(text.replace(packed, "self._packer.pack(*flat[:-1], flat[-1] + 1)"), encoding="utf-8")
    arguments = (tmp_path / "after", "--tree", tmp_path, "--against", before / "record", "--names", CALLS[0])
    found = run(SCRIPTS / "same_launches.py", *arguments, cwd=tmp_path)
    assert found.returncode == 1, found.stderr
    differs, counts = found.stdout.splitlines()[1:]
    assert differs.startswith(f"differs: {CALLS[0]}: rank 0 / launches / caller / 0 / launch / record / ")
    assert counts == "0 calls are the same, 1 differ, 0 sources of kernels"


def record(**changes) -> dict:
    streams = {"launches": {"caller": [{"launch": {"kernel": "a"}}]}, "moves": {"caller": [{"copy": {"of": "q"}}]}}
    ranks = {"rank 0": {**streams, "order": {"caller": [{"wait": "side", "after": 1}]}, **changes}}
    return {"calls": {"call": ranks}, "kernels": {"a": "1"}}


@pytest.mark.parametrize(
    ("after", "texts"),
    [
        (record(), []),
        (record(moves={"caller": [{"copy": {"of": "q + 64"}}]}), ["moves / caller / 0 / copy / of: q before, q + 64"]),
        (record(moves={}), ["moves / caller: [{'copy': {'of': 'q'}}] before, None after"]),
        (record(launches={"caller": []}), ["launches / caller / 0: {'launch': {'kernel': 'a'}} before, None after"]),
        (record(order={}), ["order / caller: [{'wait': 'side', 'after': 1}] before, None after"]),
        (record() | {"kernels": {"a": "2"}}, ["another source: a"]),
        (record() | {"calls": {"other": {"rank 0": {}}}}, ["new: other"]),
    ],
)  # fmt: skip
def test_differences(after, texts, capsys):
    assert same_launches.compare(record(), after) == bool(texts)
    told = capsys.readouterr().out
    assert all(text in told for text in texts)
    order_alone = after["calls"].get("call") == record(order={})["calls"]["call"]
    assert same_launches.compare(record(), after, ignored=("order",)) == (bool(texts) and not order_alone)
