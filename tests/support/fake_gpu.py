"""A GPU made of NumPy: calls of fa2cupy.gpu run on host memory, and their stages from their records.

This tests strides, records, workspaces and the choice of copies without a GPU. By default a stage computes the formulas
of its kernel; in simulator.py it executes the kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import types
from collections.abc import Callable, Iterator, Mapping

from support.fake_cupy import FakeArray, FakeCupy, current_ordinal
from support.kernel_formulas import run_formulas
from support.launch_record import Launch

from fa2cupy import sparse
from fa2cupy.cpu import calls as cpu_calls
from fa2cupy.families.device import DeviceInfo
from fa2cupy.gpu import calls, copies, device_memory, kept_lists, prepare, prepared, signatures
from fa2cupy.gpu.launch import ABSENT
from fa2cupy.plan.stages import Plan, Stage
from fa2cupy.problem.features import complete
from fa2cupy.problem.options import CallOptions, call_options, hashable_config
from fa2cupy.problem.tangents import Tangents
from fa2cupy.system.recent import RecentlyUsed


def forward(q, k, v, *, out=None, **keywords):
    """Calls `fa2cupy.gpu.calls.forward` by keyword."""
    return calls.forward(q, k, v, out, _options(keywords), keywords)


def delta(o, do, *, layout="bshd", out=None):
    """Calls `fa2cupy.gpu.calls.delta` by keyword."""
    return calls.delta(o, do, out, call_options(layout=layout))


def decode(q, k_cache, v_cache, cache_seqlens, *, k=None, v=None, block_table=None, out=None, **keywords):
    """Calls `fa2cupy.gpu.calls.decode` by keyword."""
    keywords = {"causal": True, **keywords}
    return calls.decode(q, k_cache, v_cache, cache_seqlens, k, v, block_table, out, _options(keywords), keywords)


def merge(o_parts, lse_parts, *, layout="bshd", out=None):
    """Calls `fa2cupy.gpu.calls.merge` by keyword."""
    return calls.merge(o_parts, lse_parts, out, call_options(layout=layout))


def backward(q, k, v, o, lse, do, *, delta=None, dlse=None, out=None, **keywords):
    """Calls `fa2cupy.gpu.calls.backward` by keyword."""
    return calls.backward(q, k, v, o, lse, do, delta, dlse, out, _options(keywords), keywords)


def jvp(q, k, v, qt, kt, vt, *, o=None, lse=None, bias_tangent=None, sink_tangent=None, out=None, **keywords):
    """Calls `fa2cupy.gpu.calls.jvp` by keyword, or `output_jvp` given o and lse, which then returns ot and lset."""
    tangents, options = Tangents(qt, kt, vt, bias_tangent, sink_tangent), _options(keywords)
    if o is None:
        return calls.jvp(q, k, v, tangents, out, options, keywords)
    return calls.output_jvp((q, k, v), {"o": o, "lse": lse}, tangents, out, options, keywords)


def backward_jvp(
    q, k, v, o, lse, do, qt, kt, vt, ot, lset, dot=None, *, bias_tangent=None, sink_tangent=None, out=None, **keywords
):
    """Calls `fa2cupy.gpu.calls.backward_jvp` by keyword."""
    tangents = Tangents(qt, kt, vt, bias_tangent, sink_tangent)
    results = {"o": o, "lse": lse, "do": do, "ot": ot, "lset": lset, "dot": dot}
    results |= {name: keywords.pop(name, None) for name in ("dlse", "dlset")}
    return calls.backward_jvp((q, k, v), results, tangents, out, _options(keywords), keywords)


def double_backward(q, k, v, o, lse, do, gdq, gdk, gdv, *, dlse=None, gdbias=None, gdsink=None, out=None, **keywords):
    """Calls `fa2cupy.gpu.calls.double_backward` by keyword."""
    results = {"o": o, "lse": lse, "do": do, "dlse": dlse}
    cotangents = Tangents(gdq, gdk, gdv, gdbias, gdsink)
    return calls.double_backward((q, k, v), results, cotangents, out, _options(keywords), keywords)


#: Options by the keywords of these functions.
_OPTIONS = {"scale": "softmax_scale", **{name: name for name in CallOptions._fields}}


def _options(keywords: dict) -> CallOptions:
    """Takes the options out of the keywords of a call; those of features are left."""
    if "block_mask" in keywords:
        complete(keywords)
    given = {_OPTIONS[name]: keywords.pop(name) for name in tuple(keywords) if name in _OPTIONS}
    return call_options(**given | {"config": hashable_config(given.get("config"))})


@contextlib.contextmanager
def fake_gpu(
    monkeypatch, device: DeviceInfo | str | tuple = "sm_90", run: Callable[[Launch], None] = run_formulas
) -> Iterator[list[Stage]]:
    """Makes fa2cupy.gpu run on the host, with one device or those of a tuple; gives the stages that were launched."""
    launched: list[Stage] = []
    devices = device if isinstance(device, tuple) else (device,)
    infos = [x if isinstance(x, DeviceInfo) else DeviceInfo.named(x) for x in devices]

    def bind_plan(plan: Plan, positions: Mapping[str, int]):
        loaded_on = current_ordinal()

        def bound(stage: Stage):
            def launch(addresses: list[int], stream: int) -> None:
                assert current_ordinal() == loaded_on, (
                    f"a kernel of device {loaded_on} is launched on {current_ordinal()}"
                )
                cupy.launches.append((loaded_on, stream))
                launched.append(stage)
                names = {name: stage.renamed.get(name, name) or ABSENT for name in (*positions, *stage.renamed)}
                run(Launch(plan, stage, {name: addresses[positions[own]] for name, own in names.items()}))

            return launch

        return tuple(map(bound, plan.stages))

    cupy = FakeCupy()
    for module in (calls, copies, device_memory, kept_lists, prepare, prepared):
        monkeypatch.setattr(module, "cupy", cupy)
    monkeypatch.setattr(device_memory, "runtime", types.SimpleNamespace(streamIsCapturing=cupy.is_capturing))
    monkeypatch.setattr(device_memory, "_zeros", {})
    runtime = types.SimpleNamespace(
        getDevice=current_ordinal,
        free=lambda pointer: None,
        memsetAsync=lambda pointer, value, nbytes, stream: ctypes.memset(pointer, value, nbytes),
    )
    monkeypatch.setattr(prepared, "runtime", runtime)
    monkeypatch.setattr(prepared, "bind_plan", bind_plan)
    monkeypatch.setattr(DeviceInfo, "current", classmethod(lambda cls: infos[current_ordinal()]))
    monkeypatch.setattr(signatures, "_prepared", RecentlyUsed(4096))
    monkeypatch.setattr(sparse, "backend_of", lambda name, array: calls if isinstance(array, FakeArray) else cpu_calls)
    yield launched
