"""Calls of second order on a simulated GPU, and their check against the references in float64."""

from __future__ import annotations

import numpy as np
from support import fake_gpu
from support.fake_cupy import FakeArray, place
from support.traced_cases import on_gpu

from fa2cupy import TileConfig, reference
from fa2cupy.numerics.second_order import SecondOrder
from fa2cupy.problem.checks import problem_from_arrays
from fa2cupy.problem.tangents import Tangents
from fa2cupy.testing import make_inputs

#: A tile for which a few dozen rows are several tiles.
TILE = TileConfig(16, 16, 2)
PACKED = {
    "cu_seqlens_q": np.array([0, 20, 20, 37], "int32"),
    "cu_seqlens_k": np.array([1, 20, 25, 50], "int32"),
    "causal": True,
}


def curved(score, b, h, q, k, table):
    return np.sin(score) * table[h] + 0.3 * np.where(q > k, score**2, np.tanh(score))


#: Keywords with a function whose first and second derivatives are not constant.
CURVED = {"score_mod": curved, "score_args": (np.array([0.7, -0.4]),), "softcap": 0.8}


class Call:
    """A call and a direction. Its results are compared with the reference's."""

    def __init__(
        self,
        lengths: tuple[int, int] = (21, 27),
        heads: tuple[int, int] = (2, 1),
        head_dim: int = 8,
        head_dim_v: int | None = None,
        *,
        batch: int = 1,
        dtype: str = "float64",
        tile: TileConfig = TILE,
        **options,
    ):
        sizes = {"seqlen_q": lengths[0], "seqlen_k": lengths[1], "num_heads": heads[0], "num_heads_kv": heads[1]}
        sizes |= {"batch": batch, "head_dim": head_dim, "head_dim_v": head_dim_v}
        self.arrays = dict(zip(("q", "k", "v", "do"), make_inputs(dtype, **sizes), strict=True))
        self.direction = dict(zip(("q", "k", "v", "do"), make_inputs(dtype, **sizes, seed=5), strict=True))
        if "cu_seqlens_q" in options:
            for arrays in (self.arrays, self.direction):
                arrays |= {name: array[0] for name, array in arrays.items()}
        self.options, self.tile = options, tile

    def jvp(self, library=fake_gpu, **more) -> tuple:
        return self._call("jvp", library, *self._of_qkv(self.arrays), *self._of_qkv(self.direction), **more)

    def check_jvp(self) -> None:
        problem = problem_from_arrays(*self._of_qkv(self.arrays), **self.options)
        naive = SecondOrder(problem, self.options, self.arrays["q"], "float32", "float32")
        o, lse = naive.forward(*self._of_qkv(self.arrays))
        of_jvp = naive.jvp(self.arrays | {"o": o, "lse": lse}, Tangents(*self._of_qkv(self.direction), None, None))
        self._check(self.jvp(), self.jvp(reference), (o, lse, *of_jvp))

    @staticmethod
    def _of_qkv(arrays: dict) -> tuple:
        return tuple(arrays.get(name) for name in "qkv")

    def _call(self, name: str, library, *arrays: np.ndarray | None, **more) -> tuple:
        options = self.options
        if library is fake_gpu:
            arrays = tuple(None if x is None else x if isinstance(x, FakeArray) else place(x) for x in arrays)
            options = on_gpu(options) | {"config": self.tile}
        return getattr(library, name)(*arrays, **options, **more)

    def _check(self, results: tuple, exact: tuple, naive: tuple) -> None:
        """Checks results in float64 against exact ones, in float32 by the errors of the formulas in this precision."""
        for one, other, formula in zip(map(np.asarray, results), exact, naive, strict=True):
            assert one.dtype == self.arrays["q"].dtype
            if one.dtype == "float64":
                np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11)
            elif one.size:
                visible = np.isfinite(other)  # lse of rows without a key is -inf
                error, allowed = (abs(x.astype("float64") - other)[visible].max() for x in (one, formula))
                assert error <= 3 * allowed + 1e-6 * abs(other[visible]).max()


def packed_call(**options) -> Call:
    return Call((40, 52), (4, 2), **PACKED, **options)
