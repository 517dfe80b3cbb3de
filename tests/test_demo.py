"""`python -m fa2cupy demo` on a machine without a GPU, without its table of times."""

from __future__ import annotations

import pytest

from fa2cupy import demo
from fa2cupy.families.device import DeviceInfo

pytest.importorskip("cupy", reason="kernels are compiled by the NVRTC that CuPy loads", exc_type=ImportError)


@pytest.mark.matrix
def test_kernels_are_compiled_for_gpus_that_are_not_here(monkeypatch, capsys):
    monkeypatch.setattr(demo, "_print_table", lambda *_: 0)
    assert demo.run_demo("cpu") == 0
    _, _, *lines = capsys.readouterr().out.splitlines()
    kernels = [line.split(maxsplit=1)[0] for line in lines]
    assert all(any(kernel.startswith(f"fa2_forward_{family}_") for kernel in kernels) for family in ("sm80", "sm90"))
    assert all("registers" in line for line in lines)


@pytest.mark.sample(method=(None,))
@pytest.mark.parametrize("method", (None, "single_pass", "two_pass"))
def test_the_table_has_the_kernels_of_float32_on_tensor_cores(method):
    operation = "backward" if method else "forward"
    kernels, seconds = demo._kernels(operation, "float32", 64, True, method, DeviceInfo.named("sm_90"))
    assert kernels.startswith("sm90 ") and kernels.count("x") == (2 if method == "two_pass" else 1)
    assert seconds > 0
