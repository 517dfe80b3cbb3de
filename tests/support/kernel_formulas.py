"""The formulas of kernels, computed on the arrays of a launch's record."""

from __future__ import annotations

import numpy as np
from support.float32_parts import columns_of_part, split_parts
from support.launch_record import ADDED, Launch

from fa2cupy import reference
from fa2cupy.families.records import SHARES


def run_formulas(launch: Launch) -> None:
    """Computes the results of a launch's kernel by the formulas."""
    _Formulas(launch).run()


class _Formulas:
    """The formulas of all kernels, by their operations."""

    def __init__(self, launch: Launch):
        self.launch, self.spec, self.values = launch, launch.spec, launch.values

    def run(self) -> None:
        if self.spec.is_fallback:
            return  # which finds no head that is left to it
        getattr(self, f"_{self.spec.operation}")()

    def _forward(self) -> None:
        q, k, v = self.launch.array("q"), self.launch.array("k"), self.launch.array("v")
        o, lse = reference.forward(q, k, v, causal=self.spec.causal, softmax_scale=self._scale())
        if "given_lse" in self.spec.features:
            self.launch.array("lse")[...] = lse
            return
        o_of_kernel, lse_of_kernel = (
            self._output_shares() if self.spec.is_split else map(self.launch.array, ("o", "lse"))
        )
        o_of_kernel[...], lse_of_kernel[...] = o, lse

    def _decode(self) -> None:
        """Computes a forward: all sequences have the same length, and there is no block table."""
        names = ("q", "k_cache", "v_cache")
        o, lse = reference.forward(*map(self.launch.array, names), causal=self.spec.causal, softmax_scale=self._scale())
        self.launch.array("o")[...], self.launch.array("lse")[...] = o, lse

    def _split_inputs(self, names: tuple[str, ...] = ("q", "k", "v")) -> None:
        for name in names:
            blocks = self.launch.values["k_strips" if name in ("k", "v") else "q_strips"]
            x = self.launch.array(name)
            parts, units = split_parts(x, blocks, columns_of_part(self.spec, x.shape[-1]))
            self.launch.array(f"{name}_parts")[...] = parts.ravel()
            self.launch.array(f"{name}_units")[...] = units.ravel()

    def _split_gradients(self) -> None:
        self._split_inputs(("q", "k", "v", "dout"))
        if self.launch.array("o") is not None:
            self._delta(("dq_accum",))

    def _merge_forward(self) -> None:
        self.launch.array("o")[...], self.launch.array("lse")[...] = self._output_shares()

    def _delta(self, cleared: tuple[str, ...] = ADDED) -> None:
        self.launch.array("delta")[...] = reference.delta(self.launch.array("o"), self.launch.array("dout"))
        for name in cleared:
            self.launch.array(name)[: self.launch.values[f"{name}_bytes"] // 4] = 0

    def _backward(self) -> None:
        gradients = self._gradients()
        if "dq" in self.launch.pointers:  # simt: dq is written, dk and dv are added to
            self.launch.array("dq")[...] = gradients[0]
            self.launch.array("dk")[...] += gradients[1]
            self.launch.array("dv")[...] += gradients[2]
        else:
            self._workspace()[...] += gradients[0]
            if self.spec.is_split:
                for shares, gradient in zip(self._shares(1), gradients[1:], strict=True):
                    shares[0] += gradient
            else:
                self.launch.array("dk")[...], self.launch.array("dv")[...] = gradients[1:]

    def _backward_dq(self) -> None:
        self.launch.array("dq")[...] = self._gradients()[0]

    def _backward_one_tile(self) -> None:
        for name, gradient in zip(("dq", "dk", "dv"), self._gradients(), strict=True):
            self.launch.array(name)[...] = gradient

    _backward_both = _backward_one_tile

    def _backward_dkdv(self) -> None:
        if self.spec.is_split:
            for shares, gradient in zip(self._shares(self.values["num_splits"]), self._gradients()[1:], strict=True):
                shares[0], shares[1:] = gradient, 0
        else:
            self.launch.array("dk")[...], self.launch.array("dv")[...] = self._gradients()[1:]

    def _convert_gradients(self) -> None:
        self._convert_dq()
        self._sum_dkdv()

    def _sum_dkdv(self) -> None:
        for name, shares in zip(("dk", "dv"), self._shares(self.values["num_copies"]), strict=True):
            self.launch.array(name)[...] = shares.sum(0)

    def _convert_dq(self) -> None:
        self.launch.array("dq")[...] = self._workspace()

    def _gradients(self) -> tuple:
        """Returns the gradients from lse and delta in memory, which the kernels use, too."""
        q, k, v, do = self.launch.array("q"), self.launch.array("k"), self.launch.array("v"), self.launch.array("dout")
        lse, delta, scale = self.launch.array("lse"), self.launch.array("delta"), self._scale()
        if delta is None:
            delta = reference.delta(self.launch.array("o"), self.launch.array("dout"))
            delta = delta - (self.launch.array("dlse") if "dlse" in self.launch.pointers else 0)
        group = self.values["heads_per_group"]
        q, k, v, do = (np.asarray(x, np.float64).transpose(0, 2, 1, 3) for x in (q, k, v, do))
        k, v = (np.repeat(x, group, axis=1) for x in (k, v))
        scores = scale * q @ k.swapaxes(2, 3)
        if self.spec.causal:
            rows, columns = scores.shape[2:]
            scores[..., np.arange(columns) > np.arange(rows)[:, None] + columns - rows] = -np.inf
        p = np.exp(scores - np.where(np.isinf(lse), np.inf, lse)[..., None])
        ds = p * (do @ v.swapaxes(2, 3) - delta[..., None])
        dk, dv = scale * ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ do
        dk, dv = (x.reshape(x.shape[0], x.shape[1] // group, group, *x.shape[2:]).sum(2) for x in (dk, dv))
        return tuple(x.transpose(0, 2, 1, 3) for x in (scale * ds @ k, dk, dv))

    def _jvp(self, written: tuple[str, ...] = ("o", "lse", "ot", "lset")) -> None:
        names = ("q", "k", "v", "qt", "kt", "vt")
        options = {"causal": self.spec.causal, "softmax_scale": self._scale()}
        found = reference.jvp(*map(self.launch.array, names), **options)
        for name, result in zip(("o", "lse", "ot", "lset"), found, strict=True):
            if name in written:
                self.launch.array(name)[...] = result

    def _output_jvp(self) -> None:
        self._jvp(("ot", "lset"))

    def _delta_jvp(self) -> None:
        names = ("o", "dout", "ot", "dot", "dlse", "dlset")
        o, do, ot, dot, dlse, dlset = (self.launch.array(n) if n in self.launch.pointers else None for n in names)
        tangent = reference.delta(ot, do) + (0 if dot is None else reference.delta(o, dot))
        self.launch.array("delta")[...] = reference.delta(o, do) - (0 if dlse is None else dlse)
        self.launch.array("deltat")[...] = tangent - (0 if dlset is None else dlset)

    def _dq_jvp(self) -> None:
        self.launch.array("dqt")[...] = self._tangents()[0]

    def _dkdv_jvp(self) -> None:
        self.launch.array("dkt")[...], self.launch.array("dvt")[...] = self._tangents()[1:]

    def _tangents(self) -> tuple:
        """Returns dqt, dkt and dvt from delta and its tangent in memory: as dlse they are, with o of zeros."""
        names = ("q", "k", "v", "dout", "qt", "kt", "vt", "dot", "lse", "lset", "delta", "deltat")
        q, k, v, do, qt, kt, vt, dot, lse, lset, delta, deltat = map(self.launch.array, names)
        options = {"causal": self.spec.causal, "softmax_scale": self._scale(), "dlse": -delta, "dlset": -deltat}
        zeros = np.zeros_like(do)
        return reference.backward_jvp(q, k, v, zeros, lse, do, qt, kt, vt, zeros, lset, dot, **options)

    def _scale(self) -> float:
        values = self.values
        return values["softmax_scale"] if "softmax_scale" in values else values["scale_log2"] / np.log2(np.e)

    def _shares(self, copies: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the copies of dk and those of dv in plain order, one behind the other."""
        heads, shares, begin = self.values["num_heads"] // self.values["heads_per_group"], self.launch.array(SHARES), 0
        found = []
        for name in ("dk", "dv"):
            shape = (copies, self.launch.batch, self.values["seqlen_k"], heads, self.launch.columns_of(name))
            found.append(shares[begin : begin + np.prod(shape)].reshape(shape))
            begin += np.prod(shape)
        return tuple(found)

    def _output_shares(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns O and lse of all shares together, in plain order, at the start of their workspace."""
        shares, batch = self.launch.array(SHARES), self.launch.batch
        rows, heads = self.values["seqlen_q"], self.values["num_heads"]
        columns = self.launch.columns_of("o")
        end = batch * rows * heads * columns
        o, lse = shares[:end], shares[end : end + batch * heads * rows]
        return o.reshape(batch, rows, heads, columns), lse.reshape(batch, heads, rows)

    def _workspace(self) -> np.ndarray:
        """Returns dq_accum in plain order; the order of the kernels does not matter here."""
        shape = (self.launch.batch, self.values["seqlen_q"], self.values["num_heads"], self.spec.head_dim)
        return self.launch.array("dq_accum")[: np.prod(shape)].reshape(shape)
