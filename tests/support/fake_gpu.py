"""A GPU made of NumPy: calls of gpu.py run on host memory, and their stages from their records.

Here they do by the formulas what the kernel would, in simulator.py they execute the kernel. Strides, records,
workspaces and the choice of copies are then tested where there is no GPU.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator

from support.fake_cupy import FakeCupy, current_ordinal
from support.kernel_formulas import run_formulas
from support.launch_record import Launch

from fa2cupy import device_memory, gpu, prepared, signatures
from fa2cupy.device import DeviceInfo
from fa2cupy.plan import Plan, Stage


def forward(q, k, v, *, causal=False, scale=None, layout="bshd", out=None, config=None, family=None, **features):
    """`gpu.forward` by keyword."""
    return gpu.forward(q, k, v, causal, scale, layout, out, config, family, features)


def backward(
    q, k, v, o, lse, do, *, causal=False, scale=None, delta=None, method=None, deterministic=False, layout="bshd",
    out=None, config=None, family=None, dlse=None, return_dbias=False, return_dsink=False, **features,
):
    """`gpu.backward` by keyword."""
    return gpu.backward(
        q, k, v, o, lse, do, causal, scale, delta, method, deterministic, layout, out, config, family, dlse,
        return_dbias, return_dsink, features,
    )  # fmt: skip


@contextlib.contextmanager
def fake_gpu(
    monkeypatch, device: DeviceInfo | str | tuple = "sm_90", run: Callable[[Launch], None] = run_formulas
) -> Iterator[list[Stage]]:
    """Makes gpu.py run on the host, with one device or those of a tuple; gives the list of the stages that were launched."""
    launched: list[Stage] = []
    devices = device if isinstance(device, tuple) else (device,)
    infos = [x if isinstance(x, DeviceInfo) else DeviceInfo.named(x) for x in devices]

    def bind_plan(plan: Plan, buffers: tuple[str, ...]):
        loaded_on = current_ordinal()

        def bound(stage: Stage):
            def launch(addresses: list[int], stream: int) -> None:
                assert current_ordinal() == loaded_on, f"a kernel of device {loaded_on} is launched on {current_ordinal()}"
                cupy.launches.append((loaded_on, stream))
                launched.append(stage)
                run(Launch(plan, stage, dict(zip(buffers, addresses, strict=True))))

            return launch

        return tuple(map(bound, plan.stages))

    cupy = FakeCupy()
    for module in (gpu, prepared, device_memory):
        monkeypatch.setattr(module, "cupy", cupy)
    monkeypatch.setattr(device_memory, "runtime", types.SimpleNamespace(streamIsCapturing=cupy.is_capturing))
    monkeypatch.setattr(prepared, "runtime", types.SimpleNamespace(getDevice=current_ordinal, free=lambda pointer: None))
    monkeypatch.setattr(prepared, "bind_plan", bind_plan)
    monkeypatch.setattr(DeviceInfo, "current", classmethod(lambda cls: infos[current_ordinal()]))
    monkeypatch.setattr(signatures, "_prepared", {})
    yield launched
