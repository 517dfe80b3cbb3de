"""The wheel: it is built, installed into an empty folder and run from another one."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

import pytest
from support import CHECKOUT

import fa2cupy

KERNELS = CHECKOUT / "kernels"
FOLDERS = ("docs", "fa2cupy", "kernels", "scripts", "tests")

pytestmark = pytest.mark.skipif(not (CHECKOUT / "setup.cfg").is_file(), reason="not in a checkout")


def files_of(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def has_setuptools() -> bool:
    return (
        importlib.util.find_spec("setuptools") is not None and int(metadata.version("setuptools").split(".")[0]) >= 77
    )


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory):
    """Copies the checkout, because a build leaves files in its tree and would use those of an earlier one."""
    tree = tmp_path_factory.mktemp("source")
    for name in FOLDERS:
        shutil.copytree(CHECKOUT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tree / "tests" / "__pycache__").mkdir()
    (tree / "tests" / "__pycache__" / "left_over.pyc").touch()
    for name in ("setup.cfg", "pyproject.toml", "LICENSE", "README.md", "MANIFEST.in"):
        if (CHECKOUT / name).exists():
            shutil.copy(CHECKOUT / name, tree)
    return tree


@pytest.fixture(scope="module")
def wheel(source_tree, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    # Without an installed setuptools, pip fetches it.
    isolation = ["--no-build-isolation"] if has_setuptools() else []
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        folder,
        *isolation,
        source_tree,
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode and re.search("No matching distribution found for setuptools", result.stderr):
        pytest.skip("neither setuptools>=77 nor a package index is at hand to build with")
    assert result.returncode == 0, result.stderr
    (built,) = folder.glob("*.whl")
    return built


def read_metadata(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (path for path in archive.namelist() if path.endswith(f".dist-info/{name}"))
        return archive.read(path).decode()


@pytest.fixture(scope="module")
def headers(wheel):
    return HeaderParser().parsestr(read_metadata(wheel, "METADATA"))


@pytest.fixture(scope="module")
def requirements(headers) -> dict[str, set[str]]:
    """Returns the names of required projects by extra; those of the core have an empty name."""
    found = {extra: set() for extra in headers.get_all("Provides-Extra")} | {"": set()}
    for requirement in headers.get_all("Requires-Dist"):
        extra = re.search(r'extra == "(\w+)"', requirement)
        found[extra[1] if extra else ""].add(re.match(r"[\w-]+", requirement)[0].lower().replace("_", "-"))
    return found


@pytest.fixture(scope="module")
def run_installed(wheel, tmp_path_factory):
    """Returns a function that runs a script with the installed wheel, outside the checkout."""
    target, elsewhere = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("elsewhere")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, wheel]
    subprocess.run(install, check=True, capture_output=True)

    def run(script: str) -> str:
        # Dependencies come from this environment; fa2cupy itself must come from the wheel.
        script = f"import fa2cupy\nassert fa2cupy.__file__.startswith({str(target)!r}), fa2cupy.__file__\n{script}"
        environment = {**os.environ, "PYTHONPATH": str(target)}
        result = subprocess.run(
            [sys.executable, "-c", script], cwd=elsewhere, env=environment, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


def test_wheel_has_the_package_every_template_and_the_license_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = {f"fa2cupy/{name}" for name in files_of(CHECKOUT / "fa2cupy")}
    expected |= {f"fa2cupy/kernels/{name}" for name in files_of(KERNELS)}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.fixture(scope="module")
def unpacked_sdist(source_tree, tmp_path_factory):
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("sdist")
    script = f"import setuptools.build_meta as build; print(build.build_sdist({str(folder)!r}))"
    subprocess.run([sys.executable, "-c", script], cwd=source_tree, check=True, capture_output=True)
    (sdist,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(sdist, folder / "unpacked")
    (root,) = (folder / "unpacked").iterdir()
    return root


@pytest.mark.matrix
def test_sdist_has_the_same_files(unpacked_sdist):
    for name in FOLDERS:
        assert files_of(unpacked_sdist / name) == files_of(CHECKOUT / name)
        assert not list((unpacked_sdist / name).rglob("*.pyc"))
    for name in ("setup.cfg", "pyproject.toml", "LICENSE", "README.md", "MANIFEST.in"):
        assert (unpacked_sdist / name).is_file()


@pytest.mark.matrix
def test_tests_of_an_sdist_find_what_they_import(unpacked_sdist):
    names = ("test_scripts.py", "test_train_lm.py", "test_ptxsim_core.py", "test_feature_arguments.py")
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, *(f"tests/{name}" for name in names)], cwd=unpacked_sdist, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout


def test_requirements_are_those_that_the_readme_promises(requirements):
    assert requirements[""] == {"numpy", "jinja2", "ml-dtypes", "threadpoolctl"}
    assert requirements["cuda12"] == {
        "cupy-cuda12x",
        "nvidia-cuda-nvrtc-cu12",
        "nvidia-cuda-runtime-cu12",
        "cuda-bindings",
    }
    assert requirements["cuda13"] == {"cupy-cuda13x", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "cuda-bindings"}
    assert requirements["nccl12"] == {"nvidia-nccl-cu12"}
    assert requirements["nccl13"] == {"nvidia-nccl-cu13"}
    assert requirements["mpi"] == {"mpi4py", "mpich"}
    assert requirements["test"] == {"pytest", "pytest-xdist", "hypothesis"}
    assert requirements["lint"] == {"basedpyright", "clang-format", "mypy", "ruff"}
    assert requirements["docs"] == {"sphinx", "numpydoc", "myst-parser", "furo", "autograd", "thinc"}
    assert set(requirements) == {"", "cuda12", "cuda13", "nccl12", "nccl13", "mpi", "test", "lint", "docs", "bench"}


def test_metadata(headers):
    assert headers["Requires-Python"] == ">=3.10"
    assert headers["License"] == "MIT"
    assert headers["Author"] and headers["Author"] in (CHECKOUT / "LICENSE").read_text(encoding="utf-8")
    addresses = dict(address.split(", ") for address in headers.get_all("Project-URL"))
    pages = "".join(page.read_text(encoding="utf-8") for page in (CHECKOUT / "README.md", *CHECKOUT.glob("docs/*.md")))
    assert addresses and not [url for url in addresses.values() if url not in pages], "no address is invented"
    classifiers = headers.get_all("Classifier")
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.10"} <= set(classifiers)


def test_the_command_is_the_one_of_the_module(wheel):
    assert read_metadata(wheel, "entry_points.txt").split("\n") == [
        "[console_scripts]",
        "fa2cupy = fa2cupy.cli:main",
        "",
    ]


def test_nothing_requires_torch(requirements):
    assert not {name for names in requirements.values() for name in names if "torch" in name}


def test_installed_wheel_renders_kernels_from_its_own_templates(run_installed):
    output = run_installed(
        """
from fa2cupy.families.device import DeviceInfo
from fa2cupy.plan.specs import default_specs
from fa2cupy.jit.source import kernel_directory, render_kernel
from pathlib import Path
assert kernel_directory() == Path(fa2cupy.__file__).parent / "kernels"
for dtype in ("float16", "float32"):
    for method in (None, "single_pass", "two_pass"):
        for spec in default_specs(DeviceInfo.named("sm_90"), dtype, 64, True, method):
            print(render_kernel(spec).digest)
"""
    )
    # Both methods have the same kernel that computes delta: in float32 it is that of the parts.
    assert len(set(output.split())) == len(output.split()) - 2


def test_installed_wheel_attends_on_numpy_arrays(run_installed):
    output = run_installed(
        """
import numpy as np
q, k, v = np.random.default_rng(0).standard_normal((3, 1, 100, 2, 32), dtype=np.float32)
o, lse = fa2cupy.forward(q, k, v)
p = np.exp(np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(32) - lse[..., None])
print(np.abs(p.sum(-1) - 1).max() < 1e-5, np.abs(np.einsum("bhqk,bkhd->bqhd", p, v) - o).max() < 1e-5)
"""
    )
    assert output == "True True\n"


@pytest.mark.matrix
def test_installed_wheel_has_its_command_line(run_installed):
    output = run_installed(
        """
import subprocess, sys
from pathlib import Path
for command in ([sys.executable, "-m", "fa2cupy"], [Path(fa2cupy.__file__).parents[1] / "bin" / "fa2cupy"]):
    done = subprocess.run([*command, "info"], capture_output=True, text=True)
    print(done.returncode, done.stdout.splitlines()[0].split(), done.stderr)
"""
    )
    assert output == 2 * f"0 ['fa2cupy:', '{fa2cupy.__version__}'] \n"


MODULES = ("distributed", "reference", "testing")


def test_modules_are_found_without_an_import_of_their_own(run_installed):
    output = run_installed(
        f"""
import sys
early = [name for name in {MODULES} if "fa2cupy." + name in sys.modules]
listed = [name for name in {MODULES} if name in dir(fa2cupy)]
print(early, len(listed), fa2cupy.testing.make_inputs.__name__, fa2cupy.reference.forward.__name__)
print(fa2cupy.distributed.simulate(2, lambda comm: comm.rank))
from fa2cupy import *
print(testing is fa2cupy.testing, distributed is sys.modules["fa2cupy.distributed"])
"""
    )
    assert output == "[] 3 make_inputs forward\n[0, 1]\nTrue True\n"


def test_a_misspelt_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'fa2cupy' has no attribute 'foward'"):
        fa2cupy.foward
    assert dir(fa2cupy) == sorted(fa2cupy.__all__)


def test_a_bare_checkout_finds_its_templates_from_anywhere(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", "import fa2cupy.jit.source; print(fa2cupy.jit.source.kernel_directory())"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == str(KERNELS)


def test_build_file_says_only_what_pip_and_the_linters_need():
    """Checks that metadata is only in setup.cfg."""
    lines = (CHECKOUT / "pyproject.toml").read_text().splitlines()
    tables = [line.strip("[]").split(".")[:2] for line in lines if line.startswith("[")]
    assert {".".join(table) for table in tables} == {"build-system", "tool.ruff", "tool.mypy"}
