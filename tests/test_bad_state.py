"""Incomplete installations: each reports what to do, or works without the missing part."""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path

import pytest
from support import CHECKOUT
from support.pages import PAGES

import fa2cupy
from fa2cupy import TileConfig
from fa2cupy.errors import KernelCompileError, KernelLaunchError
from fa2cupy.gpu import launch
from fa2cupy.jit import entries
from fa2cupy.jit.compiler import compile_source, nvrtc_build
from fa2cupy.jit.source import kernel_directory, render_kernel
from fa2cupy.jit.spec import KernelSpec

SPEC = KernelSpec("delta", None, "sm_80", "float16", 64, False, TileConfig(16, 1, 4))

# Scripts that hide the real CuPy: no CuPy at all, or one that fails to import.
WITHOUT_CUPY = "import sys; sys.modules['cupy'] = None\n"
BROKEN_CUPY = """
import importlib.abc, sys
class Broken(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "cupy":
            raise ImportError("libcudart.so.12: cannot open shared object file")
sys.meta_path.insert(0, Broken())
"""
#: Of few kernels: the first one has the error.
FEW = {"head_dims": 64, "causal": True, "methods": "two_pass", "decode": False}
PRECOMPILE = f"""
import fa2cupy
try:
    fa2cupy.precompile("sm_80", **{FEW})
except fa2cupy.KernelCompileError as error:
    print(error)
"""


@pytest.fixture
def nvrtc():
    """Provides CuPy's NVRTC module, in which tests replace functions."""
    pytest.importorskip("cupy", exc_type=ImportError)
    from cupy.cuda import nvrtc

    return nvrtc


# -------------------------------------------------------------------------------------------------------------- no CuPy


def test_without_cupy_numpy_arrays_work(run_python):
    pytest.importorskip("fa2cupy.cpu")
    result = run_python(
        WITHOUT_CUPY
        + """
import numpy as np, fa2cupy
q, k, v, do = np.random.default_rng(0).standard_normal((4, 1, 33, 2, 16), dtype=np.float32)
o, backprop = fa2cupy.attention(q, k, v, causal=True)
print(all(np.isfinite(x).all() for x in (o, *backprop(do))), o.shape)
"""
    )
    assert result.stdout == "True (1, 33, 2, 16)\n"


def test_without_cupy_compiling_says_what_to_install(run_python):
    message = run_python(WITHOUT_CUPY + PRECOMPILE).stdout
    assert "CuPy" in message
    assert "not installed" in message
    assert "pip install '.[cuda12]'" in message


def test_a_cupy_that_does_not_import_is_not_called_missing(run_python):
    message = run_python(BROKEN_CUPY + PRECOMPILE).stdout
    assert "libcudart.so.12: cannot open shared object file" in message
    assert "not installed" not in message


@pytest.mark.skipif(not (CHECKOUT / "setup.cfg").is_file(), reason="not in a checkout")
def test_nobody_is_told_to_install_from_an_index_that_does_not_have_the_package():
    files = [path for folder in ("fa2cupy", "scripts", "tests") for path in (CHECKOUT / folder).rglob("*.py")]
    files = [*(CHECKOUT / page for page in PAGES), *(path for path in files if path != Path(__file__))]
    assert not [path for path in files if re.search(r"pip install[^\n&]*\bfa2cupy\b", path.read_text(encoding="utf-8"))]


@pytest.mark.sample(state=(BROKEN_CUPY,))
@pytest.mark.parametrize("state", (WITHOUT_CUPY, BROKEN_CUPY), ids=("missing", "broken"))
def test_info_answers_without_cupy(run_python, state):
    result = run_python(state + "import fa2cupy, json; print(json.dumps(fa2cupy.info()))")
    assert '"device": "none' in result.stdout
    assert "pip install" in result.stdout


@pytest.mark.sample(state=(WITHOUT_CUPY,))
@pytest.mark.parametrize("state", (WITHOUT_CUPY, BROKEN_CUPY), ids=("missing", "broken"))
def test_what_is_only_arithmetic_works_without_cupy(run_python, state):
    result = run_python(state + "import fa2cupy; print(len(fa2cupy.legal_configs('forward', arch='sm_90')) > 10)")
    assert result.stdout == "True\n"


# ------------------------------------------------------------------------------------------------------------- no NVRTC


def test_without_nvrtc_compiling_says_what_to_install(nvrtc, isolated_cache, monkeypatch):
    def missing():
        raise RuntimeError('Failure finding "libnvrtc.so.12"')

    monkeypatch.setattr(nvrtc, "getVersion", missing)
    with pytest.raises(KernelCompileError, match="pip install nvidia-cuda-nvrtc-cu12") as caught:
        fa2cupy.precompile("sm_80", **FEW)
    assert "libnvrtc.so.12" in str(caught.value)
    assert "pip install" in fa2cupy.info()["nvrtc"]


def test_an_older_cupy_that_finds_no_nvrtc_is_told_which_one_is_needed(nvrtc, isolated_cache, monkeypatch):
    import cupy

    def missing():
        raise RuntimeError("CuPy failed to load libnvrtc.so.12")

    monkeypatch.setattr(nvrtc, "getVersion", missing)
    monkeypatch.setattr(cupy, "__version__", "13.6.0")
    with pytest.raises(KernelCompileError, match=r"this is CuPy 13\.6\.0; fa2cupy needs CuPy 14 .*bfloat16") as caught:
        fa2cupy.precompile("sm_80", **FEW)
    assert "pip install '.[cuda12]'" in str(caught.value)
    assert "nvidia-cuda-nvrtc" not in str(caught.value), "which CuPy 13 does not look for"


def test_an_nvrtc_that_compiles_nothing_says_why(nvrtc, isolated_cache, monkeypatch):
    # A wheel that lacks its second library fails like this.
    def refuse(*_):
        raise nvrtc.NVRTCError(7)

    monkeypatch.setattr(nvrtc, "compileProgram", refuse)
    monkeypatch.setattr(nvrtc, "getProgramLog", lambda _: "failed to open libnvrtc-builtins.so.12.9")
    nvrtc_build.cache_clear()
    with pytest.raises(KernelCompileError, match="failed to open libnvrtc-builtins"):
        fa2cupy.precompile("sm_80", **FEW)


def test_a_home_folder_that_cannot_be_made_is_not_called_a_missing_nvrtc(run_python):
    pytest.importorskip("cupy", exc_type=ImportError)
    result = run_python(PRECOMPILE, HOME="/proc/nobody", CUPY_CACHE_DIR="/proc/nobody/cupy")
    assert "pip install" not in result.stdout
    assert "/proc/nobody" in result.stdout
    assert "set CUPY_CACHE_DIR" in result.stdout


def test_an_nvrtc_too_old_for_the_architecture_says_so(nvrtc, monkeypatch):
    monkeypatch.setattr(nvrtc, "getSupportedArchs", lambda: [70, 75])
    with pytest.raises(KernelCompileError, match=r"for sm_80: it is too old: .*pip install -U '\.\[cuda12\]'"):
        compile_source(render_kernel(SPEC))


def test_an_nvrtc_too_new_for_the_architecture_says_so(nvrtc, monkeypatch):
    monkeypatch.setattr(nvrtc, "getSupportedArchs", lambda: [90, 100])
    with pytest.raises(KernelCompileError, match=r"for sm_80: CUDA 12 is the last .*cupy-cuda13x.*'\.\[cuda12\]'"):
        compile_source(render_kernel(SPEC))


# --------------------------------------------------------------------------------------------------- no GPU, old driver


@pytest.fixture
def no_gpu(nvrtc, monkeypatch):
    """Makes CuPy find no device, as it does in CI."""
    from cupy.cuda import runtime

    class NoDevice(runtime.CUDARuntimeError):
        def __init__(self):
            RuntimeError.__init__(self, "cudaErrorNoDevice: no CUDA-capable device is detected")

    def refuse(*_):
        raise NoDevice

    for name in ("getDevice", "getDeviceProperties", "driverGetVersion"):
        monkeypatch.setattr(runtime, name, refuse)


def test_info_answers_without_a_gpu(no_gpu):
    answer = fa2cupy.info()
    assert "no CUDA-capable device" in answer["device"]
    assert "no CUDA-capable device" in answer["driver"]
    assert answer["nvrtc"][0].isdigit()


@pytest.mark.parametrize(
    "call", (lambda: fa2cupy.legal_configs("forward"), fa2cupy.precompile), ids=("legal", "precompile")
)
def test_without_a_gpu_what_needs_one_says_how_to_do_without(no_gpu, call):
    with pytest.raises(RuntimeError, match="arch") as caught:
        call()
    assert "no CUDA-capable device" in str(caught.value)


def test_info_answers_while_another_process_empties_the_cache(isolated_cache, monkeypatch):
    class Vanished:
        name = f"{'0' * 64}.kernel"
        path = str(isolated_cache / name)

        def stat(self, **_):
            raise FileNotFoundError

    isolated_cache.mkdir()
    monkeypatch.setattr(entries.os, "scandir", lambda folder: contextlib.nullcontext([Vanished()]))
    assert fa2cupy.info()["cached_bytes"] == fa2cupy.info()["cached_kernels"] == 0


def test_a_driver_that_refuses_the_machine_code_is_reported_with_advice(nvrtc, monkeypatch):
    import cupy
    from cupy.cuda import driver, runtime

    class Refused(driver.CUDADriverError):
        def __init__(self):
            RuntimeError.__init__(self, "CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image is available")

    def refuse(*_, **__):
        raise Refused

    monkeypatch.setattr(runtime, "getDevice", lambda: 0)
    monkeypatch.setattr(runtime, "driverGetVersion", lambda: 11040)
    monkeypatch.setattr(cupy.cuda.function, "Module", refuse)
    with pytest.raises(KernelLaunchError, match=r"the driver \(for CUDA 11\.4\) does not load delta") as caught:
        launch.load_kernel(SPEC)
    assert "CUDA_ERROR_NO_BINARY_FOR_GPU" in str(caught.value)
    assert "update it" in str(caught.value)


# -------------------------------------------------------------------------------------------------------------- no Unix


def test_without_what_only_unix_has_kernels_and_tiles_are_kept(run_python, tmp_path):
    result = run_python(
        """
import jinja2, numpy, os, sys, types
for name in ("fcntl", "grp", "pwd"):
    sys.modules[name] = None
for name in ("fork", "geteuid", "getuid", "register_at_fork", "O_NOFOLLOW", "O_NONBLOCK"):
    delattr(os, name)
locked = []
sys.modules["msvcrt"] = types.SimpleNamespace(LK_NBLCK=2, locking=lambda *arguments: locked.append(arguments[1:]))

from fa2cupy import TileConfig, clear_cache
from fa2cupy.jit import cache
from fa2cupy.families import tuning
from fa2cupy.jit.compiler import CompiledKernel
from fa2cupy.families.device import DeviceInfo
from fa2cupy.families.family import Kernel
from fa2cupy.families.sm80 import SM80
from fa2cupy.jit.spec import KernelSpec
spec = KernelSpec("delta", None, "sm_80", "float16", 64, False, TileConfig(16, 1, 4))
cache.nvrtc_build, cache.compile_options = (lambda: "build"), (lambda arch: ())
cache.compile_source = lambda source: CompiledKernel(source.spec, b"code", 24, 0, 0, "", 0.5)
kernel = cache.cached_kernel(spec)
cache._kernels.clear()
cache.compile_source = None
print(cache.cached_kernel(spec) == kernel, clear_cache())
arguments = (SM80, Kernel("forward", "float16", 64, 64), False, DeviceInfo.named("sm_90"))
tuning.save_tuned_tile(*arguments, TileConfig(64, 48, 4))
print(tuning.tuned_tile(*arguments), locked)
""",
        FA2CUPY_CACHE_DIR=str(tmp_path / "cache"),
        XDG_CONFIG_HOME=str(tmp_path / "config"),
    )
    assert result.stdout == f"True 1\n{TileConfig(64, 48, 4)} [(2, 1), (2, 1)]\n"


# --------------------------------------------------------------------------------------------------------- no templates


def test_without_the_templates_rendering_says_how_to_get_them(run_python, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(Path(fa2cupy.__file__).parent, bare / "fa2cupy", ignore=shutil.ignore_patterns("kernels"))
    result = run_python(
        """
import fa2cupy.jit.source
try:
    fa2cupy.jit.source.kernel_directory()
except FileNotFoundError as error:
    print(error)
""",
        PYTHONPATH=str(bare),
    )
    assert "templates" in result.stdout
    assert str(bare / "kernels") in result.stdout
    assert "reinstall fa2cupy" in result.stdout


def test_templates_lie_beside_the_package_or_in_it():
    package = Path(fa2cupy.__file__).resolve().parent
    assert kernel_directory() in (package / "kernels", package.parent / "kernels")


def test_importing_loads_neither_cupy_nor_torch(run_python):
    result = run_python("import fa2cupy, sys; print(sorted({'cupy', 'torch'} & set(sys.modules)))")
    assert result.stdout == "[]\n"
