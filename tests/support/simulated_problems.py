"""Problems of the simulated tests: small tiles, scores for each branch of the softmax, and small devices."""

from __future__ import annotations

import dataclasses

import numpy as np
from support.fake_cupy import place
from support.fake_gpu import backward

from fa2cupy import TileConfig, reference
from fa2cupy.families.device import DeviceInfo
from fa2cupy.gpu import prepare
from fa2cupy.plan.plans import plan_backward
from fa2cupy.testing import Expectation, make_inputs

HALF = ("float16", "bfloat16")
#: A device whose sections have few heads.
FEW_MULTIPROCESSORS = dataclasses.replace(DeviceInfo.named("sm_90"), multiprocessors=4)
#: A device whose blocks take several tiles.
HOPPER = dataclasses.replace(DeviceInfo.named("sm_90"), multiprocessors=3)


def small_tiles(dtype: str, head_dim: int) -> dict[str, TileConfig]:
    """Returns tiles of 32 rows (sm80), or of 8 and 16 (simt), so that a few dozen rows are several tiles."""
    if dtype in HALF:
        by_rows, by_keys = TileConfig(32, 32, 2, 2), TileConfig(32, 32, 4, 2)
        if head_dim > 256:  # four warps share rows of O, two those of a gradient
            by_keys = TileConfig(32, 32, 8, 1)
            of_rows = {"forward": TileConfig(32, 64, 4, 1), "backward_dq": TileConfig(32, 32, 4, 1)}
            return {**of_rows, "backward_dkdv": by_keys}
        return {"forward": by_rows, "backward": by_keys, "backward_dq": by_rows, "backward_dkdv": by_keys}
    if head_dim <= 128:
        alone = TileConfig(16, 16, 2)
        return {
            "forward": TileConfig(16, 8, 2),
            "backward": TileConfig(8, 16, 2),
            "backward_dq": alone,
            "backward_dkdv": alone,
        }
    by_rows, by_keys = TileConfig(8, 16, 2), TileConfig(16, 8, 2)
    return {"forward": by_rows, "backward": by_rows, "backward_dq": by_rows, "backward_dkdv": by_keys}


def family_of(dtype: str) -> str:
    """Returns the family that has every operation; that of Hopper has its own tests."""
    return "sm80" if dtype in HALF else "simt"


def draw(
    dtype: str, lengths: tuple[int, int], head_dim: int, heads: tuple[int, int] = (2, 1), view=place, **options
) -> tuple:
    """Returns q, k, v and do on the simulated device."""
    sizes = {"seqlen_q": lengths[0], "seqlen_k": lengths[1], "num_heads": heads[0], "num_heads_kv": heads[1]}
    return tuple(view(x) for x in make_inputs(dtype, head_dim=head_dim, **sizes, **options))


def growing(inputs: tuple, rows: slice) -> tuple:
    """Makes the scores of some rows grow towards the middle of the keys, and returns the inputs.

    Whichever end a kernel starts from, the softmax's reference becomes too small for these scores, by more than any
    16-bit type could hold.
    """
    q, k, v, do = inputs
    direction = np.sign(np.asarray(q[0, 0, 0], np.float32))
    position = np.arange(k.shape[1]) / k.shape[1]
    k[...] = (6 * (1 - abs(position - 0.4))[None, :, None, None] * direction).astype(k.dtype)
    q[:, rows] = (2 * direction).astype(q.dtype)
    return q, k, v, do


def dominant(inputs: tuple) -> tuple:
    """Gives all weight in sequence i to the i-th of as many parts of the keys, and returns the inputs."""
    q, k, v, do = inputs
    direction = np.sign(np.asarray(q[0, 0, 0], np.float32))
    q[...] = (4 * direction).astype(q.dtype)
    for number, own in enumerate(np.array_split(np.arange(k.shape[1]), len(k))):
        k[number] *= np.asarray(0.1, k.dtype)
        k[number, own] += (40 / len(direction) ** 0.5 * direction).astype(k.dtype)  # scores of 160
    return q, k, v, do


def at_level(inputs: tuple, score: float) -> tuple:
    """Adds `score` to every score by means of the first column, and returns the inputs."""
    q, k, v, do = inputs
    q[..., 0], k[..., 0] = 4, score * q.shape[3] ** 0.5 / 4
    return q, k, v, do


def with_few_bits(inputs: tuple) -> tuple:
    """Rounds q and k so that float32 adds up their products exactly and rounds large scores only once."""
    q, k, v, do = inputs
    for x in (q, k):
        x[...] = np.round(x * x.dtype.type(64)) / x.dtype.type(64)
    return q, k, v, do


def jumping(inputs: tuple, most: float) -> tuple:
    """Makes scores small, except for those of the middle key, and returns the inputs.

    The exponential of the middle key grows with the row, from 2**0 to 2**most times as large as the others.
    """
    q, k, v, do = inputs
    q *= q.dtype.type(0.25)
    k[..., 0], k[:, k.shape[1] // 2] = 0, 0
    k[:, k.shape[1] // 2, :, 0] = 16
    steps = np.linspace(0, most, q.shape[1])
    q[..., 0] = (steps * np.log(2) * q.shape[3] ** 0.5 / 16)[None, :, None].astype(q.dtype)
    return q, k, v, do


def leave_out(monkeypatch, *operations: str) -> None:
    """Leaves kernels out of the backward, so that their results stay as they are."""

    def plan_others(*arguments, **options):
        whole = plan_backward(*arguments, **options)
        return dataclasses.replace(
            whole, stages=tuple(stage for stage in whole.stages if stage.spec.operation not in operations)
        )

    monkeypatch.setattr(prepare, "plan_backward", plan_others)


def dq_on_hopper(monkeypatch) -> None:
    """Limits `two_pass` to Hopper's dQ kernel, so that dK and dV stay unwritten."""
    leave_out(monkeypatch, "backward_dkdv")


def check_dq(inputs: tuple, *, config: TileConfig, out=None, scale=None, **problem) -> None:
    """Checks dQ, computed from the reference's o and lse: only delta comes from another kernel."""
    q, k, v, do = inputs
    expected = Expectation(q, k, v, do, softmax_scale=scale, **problem)
    o, lse = reference.forward(q, k, v, softmax_scale=scale, **problem)
    o, lse = place(o.astype(q.dtype)), place(lse.astype(np.float32))
    dq, _, _ = backward(
        q, k, v, o, lse, do, method="two_pass", config={"backward_dq": config}, out=out, scale=scale, **problem
    )
    expected.check(spec=config, dq=dq)
