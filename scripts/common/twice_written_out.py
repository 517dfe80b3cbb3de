"""Attention and its derivatives up to the second as a user writes them out, with whole score matrices.

A call keeps P, and `TwiceWrittenOut.jvp` what P changes by, as a tape would: later derivatives compute neither again.
The arrays have two axes (row, column) behind those of a stack, such as (batch, head).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["TwiceWrittenOut"]


class TwiceWrittenOut:
    """Attention to q, k and v of one shape, with the methods of `fa2cupy.typing.Backprop`.

    Parameters
    ----------
    xp : module
        NumPy or CuPy.
    q, k, v : ndarray, shape (..., seqlen, head_dim)
    causal : bool, optional
    product : callable, optional
        ``product(a, b)`` of two stacks of matrices. Sums of 16-bit data are wider; its result has the dtype of the
        operands or float32.

    Attributes
    ----------
    o, lse : ndarray
    """

    def __init__(
        self, xp: Any, q: Any, k: Any, v: Any, causal: bool = False, product: Callable[..., Any] | None = None
    ):
        self._xp, self._inputs = xp, (q, k, v)
        self._product = product or xp.matmul
        self._scale = q.shape[-1] ** -0.5
        self._wide = "float64" if q.dtype == "float64" else "float32"
        s = self._widened(q, k)
        s *= self._scale
        if causal:
            s += xp.triu(xp.full(s.shape[-2:], -xp.inf, self._wide), 1)
        top = s.max(axis=-1, keepdims=True)
        s -= top
        xp.exp(s, out=s)
        total = s.sum(axis=-1, keepdims=True)
        s /= total
        self._p = s.astype(q.dtype, copy=False)
        self.lse = (top + xp.log(total))[..., 0]
        self.o = self._rounded(self._product(self._p, v))

    def __call__(self, do: Any) -> tuple[Any, Any, Any]:
        """Returns dq, dk and dv."""
        q, k, _ = self._inputs
        ds = self._dp(do)
        ds *= self._p
        ds = self._rounded(ds)
        dq, dk = self._product(ds, k), self._product(_turned(ds), q)
        return self._scaled(dq), self._scaled(dk), self._rounded(self._product(_turned(self._p), do))

    def jvp(self, qt: Any, kt: Any, vt: Any) -> tuple[Any, Any]:
        """Returns ot and lset; a tangent may be None."""
        q, k, v = self._inputs
        t = None if qt is None else self._widened(qt, k)
        if kt is not None:
            t = self._widened(q, kt) if t is None else self._xp.add(t, self._widened(q, kt), out=t)
        if t is None:
            t = self._xp.zeros(self._p.shape, self._wide)
        t *= self._scale
        t *= self._p
        lset = t.sum(axis=-1, keepdims=True)
        t -= lset * self._p
        self._change = self._rounded(t)
        ot = self._product(self._change, v)
        if vt is not None:
            ot = ot + self._product(self._p, vt)
        return self._rounded(ot), lset[..., 0]

    def backward_jvp(
        self, do: Any, qt: Any, kt: Any, vt: Any, ot: Any, lset: Any, dot: Any = None
    ) -> tuple[Any, Any, Any]:
        """Returns dqt, dkt and dvt, after a `jvp` along the same direction."""
        q, k, v = self._inputs
        dp = self._dp(do)
        dst = self._xp.zeros_like(dp) if vt is None else self._widened(do, vt)
        if dot is not None:
            dst += self._widened(dot, v)
        dst -= self._row_sums(do, ot) + (0 if dot is None else self._row_sums(dot, self.o))
        dst *= self._p
        dst += dp * self._change
        dp *= self._p
        ds, dst = self._rounded(dp), self._rounded(dst)
        of_q, of_k = self._product(dst, k), self._product(_turned(dst), q)
        if kt is not None:
            of_q = of_q + self._product(ds, kt)
        if qt is not None:
            of_k = of_k + self._product(_turned(ds), qt)
        of_v = self._product(_turned(self._change), do)
        if dot is not None:
            of_v = of_v + self._product(_turned(self._p), dot)
        return self._scaled(of_q), self._scaled(of_k), self._rounded(of_v)

    def _dp(self, do: Any) -> Any:
        """Returns dP - delta."""
        dp = self._widened(do, self._inputs[2])
        dp -= self._row_sums(do, self.o)
        return dp

    def _row_sums(self, a: Any, b: Any) -> Any:
        return (a.astype(self._wide) * b.astype(self._wide)).sum(axis=-1, keepdims=True)

    def _widened(self, a: Any, b: Any) -> Any:
        return self._product(a, _turned(b)).astype(self._wide, copy=False)

    def _rounded(self, array: Any) -> Any:
        return array.astype(self._inputs[0].dtype, copy=False)

    def _scaled(self, array: Any) -> Any:
        return self._rounded(array.astype(self._wide, copy=False) * self._scale)


def _turned(array: Any) -> Any:
    return array.swapaxes(-1, -2)
