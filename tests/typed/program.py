"""A user's program with every public name, which type checkers pass. `on_numpy` runs; the rest needs CuPy or NVRTC."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import cupy
import numpy as np

import fa2cupy
from fa2cupy import BlockMask, TileConfig, mods, reference, testing
from fa2cupy.typing import (
    AnyArray,
    ArrayT,
    Backprop,
    BackwardKeywords,
    CupyArray,
    FeatureKeywords,
    ForwardKeywords,
    Layout,
    Method,
    Operation,
    Order,
    Precision,
    RankBackwardKeywords,
    RankForwardKeywords,
    RankKeywords,
    RankScoreKeywords,
    RankSecondOrderKeywords,
    Scheme,
    ScoreKeywords,
    SecondOrderKeywords,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack, assert_type
else:

    def assert_type(value, kind):
        return value


dist = fa2cupy.distributed  # found without an import of its own
NumpyArray: TypeAlias = np.ndarray[Any, Any]

# ------------------------------------------------------------------------------------------------ layers of a library


class Layer:
    """Keeps what its backward needs."""

    backprop: Backprop[NumpyArray] | None = None

    def __init__(self, layout: Layout = "bshd", method: Method | None = None, precision: Precision | None = None):
        self.options: BackwardKeywords = {"causal": True, "layout": layout, "method": method, "precision": precision}

    def forward(self, qkv: NumpyArray) -> NumpyArray:
        o, self.backprop = fa2cupy.attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], **self.options)
        return o

    def backward(self, do: NumpyArray, dqkv: NumpyArray) -> None:
        assert self.backprop is not None
        self.backprop(do, out=(dqkv[:, :, 0], dqkv[:, :, 1], dqkv[:, :, 2]))


def layer(q: ArrayT, k: ArrayT, v: ArrayT, **options: Unpack[ForwardKeywords]) -> ArrayT:
    o, lse = fa2cupy.forward(q, k, v, **options)
    assert lse.shape[-1] == o.shape[1]
    return o


def z_loss(q: ArrayT, k: ArrayT, v: ArrayT) -> tuple[ArrayT, Callable[[ArrayT], tuple[ArrayT, ...]]]:
    o, lse, backprop = fa2cupy.attention(q, k, v, return_lse=True)
    return o, lambda do: backprop(do, dlse=lse)


def tilted(score: Any, b: Any, h: Any, q: Any, k: Any, slopes: Any) -> Any:
    return score - slopes[h] * abs(q - k)


def options(slopes: AnyArray) -> list[FeatureKeywords]:
    found: list[FeatureKeywords] = [
        {"window": (128, 0), "softcap": 30.0, "alibi_slopes": slopes, "sink": slopes},
        {"score_mod": tilted, "score_args": (slopes,), "mask_mod": mods.causal()},
        {"dropout_p": 0.1, "seed": 1},
    ]
    return found


def all_mods() -> list[Callable[..., Any]]:
    made = [mods.causal(), mods.sliding_window(16), mods.dilated_window(16, 2), mods.neighborhood_2d(8, 2)]
    made.append(mods.neighborhood((8, 8), (3, 3)))
    scores = [mods.softcap(30.0), mods.alibi(), mods.t5_relative(32, 128, bidirectional=False)]
    return [*made, *scores, mods.prefix_lm, mods.document]


# ----------------------------------------------------------------------------------------------------- calls on NumPy


def on_numpy() -> None:
    q, k, v, do = (np.ones((1, 16, 2, 8), "float32") for _ in range(4))
    slopes = np.ones(2, "float32")
    o, lse = fa2cupy.forward(q, k, v, causal=True, softmax_scale=0.3, out=(np.empty_like(q), None))
    assert_type(o, NumpyArray)
    assert_type(lse, NumpyArray)
    gradients = fa2cupy.backward(q, k, v, o, lse, do, causal=True, softmax_scale=0.3, delta=fa2cupy.delta(o, do))
    assert_type(gradients, tuple[NumpyArray, ...])
    dq, dk, dv = gradients
    o, lse, ot, lset = fa2cupy.jvp(q, k, v, q, None, v, causal=True, out=(None, None, np.empty_like(o), None))
    assert_type(lset, NumpyArray)
    second: SecondOrderKeywords = {"causal": True, "sink": slopes, "return_dsink": True}
    assert_type(
        fa2cupy.backward_jvp(q, k, v, o, lse, do, q, None, v, ot, lset, dot=do, **second), tuple[NumpyArray, ...]
    )
    assert_type(fa2cupy.double_backward(q, k, v, o, lse, do, dq, dk, None, **second), tuple[NumpyArray, ...])
    np.add(dq, np.add(dk, dv))
    for given in options(slopes):
        fa2cupy.forward(q, k, v, causal=True, **given)

    module = Layer(method="two_pass")
    qkv = np.ones((1, 16, 3, 2, 8), "float32")
    module.backward(module.forward(qkv), np.empty_like(qkv))
    layer(q, k, v, config=TileConfig(16, 16, num_warps=4), num_splits=1, family="sm80")
    out, gradient = z_loss(q, k, v)
    gradient(out)
    o, lse, backprop = fa2cupy.attention(q, k, v, return_lse=True)
    ot, lset = backprop.jvp(q, None, v, out=(np.empty_like(o), None))
    assert_type(backprop.backward_jvp(do, q, None, v, ot, lset, dlset=lset), tuple[NumpyArray, ...])
    assert_type(backprop.double_backward(do, dq, None, dv, dlse=lse), tuple[NumpyArray, ...])
    assert_type(fa2cupy.attention(q, k, v), tuple[NumpyArray, Backprop[NumpyArray]])

    offsets, longest = fa2cupy.cu_seqlens([5, 11])
    assert_type(longest, int)
    operation: fa2cupy.typing.Operation = "forward"
    assert fa2cupy.legal_configs(operation, arch="sm_80", promising=True)
    fa2cupy.forward(q[0], k[0], v[0], cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest)
    sparse = fa2cupy.block_mask(mods.causal(), (), 1, 2, 16, 16, tile=(8, 8))
    assert_type(sparse, BlockMask)
    fa2cupy.forward(q, k, v, mask_mod=mods.causal(), block_mask=sparse)
    BlockMask(np.ones((2, 2), bool), 16, 16, tile=(8, 8))
    parts = fa2cupy.forward(q, k[:, :8], v[:, :8]), fa2cupy.forward(q, k[:, 8:], v[:, 8:])
    assert_type(fa2cupy.merge([o for o, _ in parts], [lse for _, lse in parts])[0], NumpyArray)
    row = np.ones((1, 1, 2, 8), "float32")
    fa2cupy.decode(row, k, v, np.array([9], "int32"), k=row, v=row, window=(8, 0), sink=slopes)

    scores: ScoreKeywords = {"causal": True, "softcap": 5.0}
    exact, exact_lse = reference.forward(q, k, v, **scores)
    reference.backward(q, k, v, exact, exact_lse, do, **scores)
    exact, exact_lse, exact_ot, exact_lset = reference.jvp(q, k, v, q, None, v, **scores)
    reference.second_jvp(q, k, v, q, None, v, None, k, v, **scores)
    moved = exact_ot, exact_lset, do
    reference.backward_jvp(q, k, v, exact, exact_lse, do, q, None, v, *moved, **scores)
    reference.double_backward(q, k, v, exact, exact_lse, do, None, k, v, **scores)
    reference.baseline_backward(q, k, v, do, return_dsink=True, sink=slopes)
    reference.baseline_forward(q, k, v, layout="bshd")
    noise = reference.gradient_noise(q, k, v, exact, exact_lse, do)["dq"]
    expected = testing.Expectation(q, k, v, do, **scores)
    compared: dict[str, testing.Comparison] = expected.check(o=fa2cupy.forward(q, k, v, **scores)[0])
    assert compared["o"].percent < 100 and noise >= 0
    testing.check_delta(o, do, reference.delta(o, do).astype("float32"))
    testing.assert_within_baseline("o", o, exact, exact, noise=1.0, problem=expected.problem)
    a, b, c, _ = testing.make_inputs("float64", seqlen_q=4, xp=np)
    fa2cupy.forward(a, b, c)
    errors: list[float] = testing.check_gradients(lambda x: (x * x).sum(), (a,), [2 * a], directions=1)
    assert max(errors) < 1e-6

    cached: Path = fa2cupy.cache_dir()
    logging.info("%s: %s, %s", fa2cupy.__version__.split("."), cached, fa2cupy.info()["numpy"])
    assert sum(dist.simulate(2, on_rank)) > 0


def on_rank(comm: dist.Communicator) -> float:
    order: Order = "contiguous"
    scheme: Scheme = "gather"
    spread: RankKeywords = {"scheme": scheme, "order": order}
    length = dist.padded_length(comm, 15, order=order)
    whole = dist.pad(comm, np.ones((1, 15, 2, 8), "float32"), order=order)
    assert whole.shape[1] == length and dist.positions(comm, length, order=order)[0] == comm.rank * length // comm.size
    x = dist.shard(comm, whole, order=order)
    assert_type(x, NumpyArray)
    forward: RankForwardKeywords = {"causal": True, "scheme": scheme, "order": order}
    backward: RankBackwardKeywords = {"causal": True, "scheme": scheme, "order": order, "deterministic": True}
    o, lse = dist.forward(comm, x, x, x, **forward)
    assert_type(dist.backward(comm, x, x, x, o, lse, o, **backward), tuple[NumpyArray, ...])
    o, backprop = dist.attention(comm, x, x, x, softmax_scale=0.5, **spread)
    assert_type(backprop, Backprop[NumpyArray])
    o, lse, backprop = dist.attention(comm, x, x, x, return_lse=True, **backward)
    dq, *_ = backprop(o, dlse=lse, out=(np.empty_like(o), None, None))
    second_order: RankSecondOrderKeywords = {"causal": True, "scheme": "heads", "order": order, "deterministic": True}
    scores: RankScoreKeywords = {"causal": True, "scheme": "heads", "order": order}
    o, lse, ot, lset = dist.jvp(comm, x, x, x, x, None, None, **scores)
    dist.backward_jvp(comm, x, x, x, o, lse, o, x, None, None, ot, lset, **second_order)
    assert_type(dist.double_backward(comm, x, x, x, o, lse, o, x, None, None, **second_order), tuple[NumpyArray, ...])
    assert_type(dist.unshard(comm, o, order=order), NumpyArray)
    try:
        assert_type(dist.total(comm, dq), NumpyArray)
        return float(dist.total(comm, np.float32(1)))
    except dist.CommunicationError:
        raise


# ------------------------------------------------------------------------------------------------------ calls on CuPy


def on_cupy(q: cupy.ndarray) -> cupy.ndarray:
    k = cupy.zeros((1, 16, 2, 8), dtype="float16")
    o, lse = fa2cupy.forward(q, k, k, causal=True, bias=cupy.zeros((16, 16)), out=(cupy.empty_like(q), None))
    dq, dk, dv = fa2cupy.backward(q, k, k, o, lse, o, method="two_pass", causal=True)
    o, lse, backprop = fa2cupy.attention(q, k, k, return_lse=True)
    dq, dk, dv = backprop(o, lse, out=(dq, dk, None))
    offsets, _ = fa2cupy.cu_seqlens(cupy.asarray([16]))
    fa2cupy.forward(q[0], k[0], k[0], cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    fa2cupy.block_mask(mods.document, (cupy.zeros((1, 16), "int32"),), 1, 2, 16, 16, like=q)
    fa2cupy.decode(q[:, :1], k, k, cupy.asarray([9], "int32"), block_table=None)
    total: float = float((o * o).sum() + dv[0].sum())
    host: NumpyArray = fa2cupy.delta(o, o).get()
    print(total, host, layer(q, k, k, softmax_scale=None), z_loss(q, k, k))
    return o


def on_host(q: CupyArray) -> NumpyArray:
    return fa2cupy.forward(q, q, q)[0].get()


def communicators(comm: Any) -> list[dist.Communicator]:
    made = [dist.Communicator.from_mpi(comm), dist.Communicator.from_nccl(comm, 0, 1), dist.Communicator.from_env()]
    return [one for one in made if one.rank < one.size and one.window_bytes == 0]


# ----------------------------------------------------------------------------------------------------------- kernels


def compiled() -> list[fa2cupy.CompiledKernel]:
    operation: Operation = "backward_dq"
    tiles = fa2cupy.legal_configs(operation, dtype=np.float16, head_dim=64, arch="sm_90")
    rows: list[fa2cupy.TileReport] = fa2cupy.compile_report(operation, head_dim=64, arch="sm_90", configs=tiles[:1])
    print(rows[0].tile.b_r, rows[0].registers + 1)
    try:
        kernels = fa2cupy.precompile(["sm_80"], dtypes="float16", head_dims=64, methods=("two_pass",), mask_args=())
    except (fa2cupy.KernelCompileError, fa2cupy.KernelLaunchError, fa2cupy.UnsupportedProblemError):
        fa2cupy.clear_cache()
        raise
    return [kernel for kernel in kernels if kernel.spill_bytes == 0]


if __name__ == "__main__":
    on_numpy()
