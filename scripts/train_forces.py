"""Trains an energy whose forces are in the loss: second derivatives of attention, in linear memory.

    python scripts/train_forces.py                                   on the GPU, or small on NumPy where there is none
    python scripts/train_forces.py --dtype float64
    python scripts/train_forces.py --particles 4096 --attention fused

Particles attend to each other, and a network of sines makes of their positions the energy of the whole. Its forces are
the negative gradient by the positions. The loss has the squared errors of both, against a sum of soft pair potentials,
so that its gradient by the weights is made of second derivatives of attention.

No tape is needed for them. With u, the gradient of the loss for the forces, the gradient of that part of the loss is
the derivative of the energy's gradient by the weights along u: forward over reverse. A layer has four functions for it,
`forward` and `backward` for the energy and its forces, then `jvp` and `backward_jvp` along u. Those of attention are
``backprop``, ``backprop.jvp`` and ``backprop.backward_jvp`` of `fa2cupy.attention`; the tangent of the energy's own
gradient brings in the errors of the energies.

With ``--attention both`` the same training, from the same weights on the same particles, goes through `fa2cupy` and
through whole score matrices. The output compares losses, time and memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from common.measure import positive_int
from common.twice_written_out import TwiceWrittenOut

import fa2cupy
from fa2cupy.cli import run_command
from fa2cupy.families.device import device_count

FUSED, UNFUSED = "fused", "written out"
_ENERGY, _FORCE = 0.1, 1.0  # of both in the loss


class _Dense:
    """A matrix of weights; `gradient` is that of the loss."""

    def __init__(self, draw: Callable[..., Any], rows: int, columns: int, scale: float = 1.0):
        self.weight = draw(rows, columns) * (scale / rows**0.5)

    def forward(self, x: Any) -> Any:
        self._x = x
        return x @ self.weight

    def backward(self, dy: Any) -> Any:
        self._dy = dy
        return dy @ self.weight.T

    def jvp(self, xt: Any) -> Any:
        self._xt = xt
        return xt @ self.weight

    def backward_jvp(self, dyt: Any) -> Any:
        x, dy, xt, flat = self._x, self._dy, self._xt, (-1, self.weight.shape[1])
        rows = (-1, self.weight.shape[0])
        self.gradient = xt.reshape(rows).T @ dy.reshape(flat) + x.reshape(rows).T @ dyt.reshape(flat)
        return dyt @ self.weight.T


class _Sine:
    """The sine of each element."""

    def __init__(self, xp: Any):
        self._xp = xp

    def forward(self, x: Any) -> Any:
        self._y, self._slope = self._xp.sin(x), self._xp.cos(x)
        return self._y

    def backward(self, dy: Any) -> Any:
        self._dy = dy
        return self._slope * dy

    def jvp(self, xt: Any) -> Any:
        self._xt = xt
        return self._slope * xt

    def backward_jvp(self, dyt: Any) -> Any:
        return self._slope * dyt - self._y * self._xt * self._dy


class _Attention:
    """Attention of all particles to all; its input has q, k and v side by side."""

    def __init__(self, xp: Any, heads: int, attend: Callable[..., tuple[Any, Any]]):
        self._xp, self._heads, self._attend = xp, heads, attend

    def _split(self, qkv: Any) -> list[Any]:
        shaped = qkv.reshape(*qkv.shape[:2], 3, self._heads, -1)
        return [shaped[:, :, number] for number in range(3)]

    def _joined(self, arrays: Sequence[Any]) -> Any:
        return self._xp.stack(arrays, axis=2).reshape(*arrays[0].shape[:2], -1)

    def forward(self, qkv: Any) -> Any:
        self._o, self._backprop = self._attend(*self._split(qkv))
        return self._o.reshape(*qkv.shape[:2], -1)

    def backward(self, do: Any) -> Any:
        self._do = do.reshape(self._o.shape)
        return self._joined(self._backprop(self._do))

    def jvp(self, qkvt: Any) -> Any:
        self._moved = self._split(qkvt)
        self._moved += self._backprop.jvp(*self._moved)
        return self._moved[3].reshape(*qkvt.shape[:2], -1)

    def backward_jvp(self, dot: Any) -> Any:
        return self._joined(self._backprop.backward_jvp(self._do, *self._moved, dot.reshape(self._o.shape)))


class _Chain:
    """Layers one after the other, around which their input may be added to the result."""

    def __init__(self, *layers: Any, residual: bool = False):
        self.layers, self._residual = layers, residual

    def _through(self, name: str, x: Any) -> Any:
        y = x
        for layer in self.layers if name in ("forward", "jvp") else reversed(self.layers):
            y = getattr(layer, name)(y)
        return x + y if self._residual else y

    def forward(self, x: Any) -> Any:
        return self._through("forward", x)

    def backward(self, dy: Any) -> Any:
        return self._through("backward", dy)

    def jvp(self, xt: Any) -> Any:
        return self._through("jvp", xt)

    def backward_jvp(self, dyt: Any) -> Any:
        return self._through("backward_jvp", dyt)

    def dense(self) -> list[_Dense]:
        """Returns the layers that have weights."""
        inner = [layer.dense() if isinstance(layer, _Chain) else [layer] for layer in self.layers]
        return [layer for part in inner for layer in part if isinstance(layer, _Dense)]


class Energy:
    """The model, and the loss of a step.

    Parameters
    ----------
    xp : module
        NumPy or CuPy.
    attend : callable
        As `fa2cupy.attention`.
    options : namespace
        The sizes, dtype and seed.
    """

    def __init__(self, xp: Any, attend: Callable[..., tuple[Any, Any]], options: argparse.Namespace):
        self._xp, width = xp, options.width
        random = np.random.default_rng(options.seed)

        def draw(*shape: int) -> Any:
            return xp.asarray(random.standard_normal(shape).astype(options.dtype))

        blocks = []
        for _ in range(options.layers):
            attention = _Attention(xp, options.heads, attend)
            blocks.append(
                _Chain(_Dense(draw, width, 3 * width), attention, _Dense(draw, width, width, 0.5), residual=True)
            )
            blocks.append(_Chain(_Dense(draw, width, width), _Sine(xp), _Dense(draw, width, width, 0.5), residual=True))
        # A fourth coordinate, which is 1, gives the sines phases.
        self.net = _Chain(_Dense(draw, 4, width, 2.0), _Sine(xp), *blocks, _Dense(draw, width, 1, 0.1))

    def loss(self, x: Any, energy: Any, forces: Any) -> float:
        """Returns the loss for positions (batch, particle, 3), and sets the gradients of all weights."""
        xp, (batch, particles, _) = self._xp, x.shape
        ones = xp.ones((batch, particles, 1), x.dtype)
        error = self.net.forward(xp.concatenate((x, ones), axis=2)).sum(axis=(1, 2)) - energy
        of_forces = self.net.backward(ones)[..., :3] + forces  # the gradient is -F
        loss = _ENERGY / batch / particles * (error**2).sum() + _FORCE / x.size * (of_forces**2).sum()
        self.net.jvp(xp.concatenate((2 * _FORCE / x.size * of_forces, 0 * ones), axis=2))
        of_energy = (2 * _ENERGY / batch / particles * error)[:, None, None]
        self.net.backward_jvp(of_energy * ones)
        return float(loss)


class Adam:
    """Adam (Kingma and Ba 2014) for the weights of a model."""

    def __init__(self, xp: Any, layers: Sequence[_Dense], rate: float):
        self._xp, self._layers, self._rate, self._step = xp, layers, rate, 0
        self._means = [(xp.zeros_like(layer.weight), xp.zeros_like(layer.weight)) for layer in layers]

    def update(self) -> None:
        """Makes a step."""
        self._step += 1
        first, second = 1 - 0.9**self._step, 1 - 0.999**self._step
        for layer, (mean, square) in zip(self._layers, self._means, strict=True):
            mean += 0.1 * (layer.gradient - mean)
            square += 0.001 * (layer.gradient**2 - square)
            layer.weight -= self._rate * (mean / first) / (self._xp.sqrt(square / second) + 1e-8)


def pair_energies(xp: Any, x: Any) -> tuple[Any, Any]:
    """Returns the energies of particles, 8 exp(-r^2 / 2) over their number for each pair, and the forces."""
    energy, forces = xp.zeros(len(x)), xp.zeros_like(x)
    for number, one in enumerate(x):
        squares = (one**2).sum(axis=1)
        near = 8 / len(one) * xp.exp(one @ one.T - 0.5 * (squares[:, None] + squares))
        energy[number] = 0.5 * near.sum()  # a particle and itself have a constant energy
        forces[number] = near.sum(axis=1, keepdims=True) * one - near @ one
    return energy, forces


def particles(xp: Any, options: argparse.Namespace, step: int) -> tuple[Any, Any, Any]:
    """Draws positions in a cube; returns them with energies and forces."""
    random = np.random.default_rng((options.seed, step))
    x = xp.asarray(random.uniform(-2, 2, (options.batch, options.particles, 3)))
    return tuple(array.astype(options.dtype) for array in (x, *pair_energies(xp, x)))


def written_out(xp: Any) -> Callable[..., tuple[Any, Any]]:
    """Returns a function like `fa2cupy.attention` that has whole score matrices."""

    def stacks(arrays: Sequence[Any]) -> list[Any]:
        return [None if x is None else x.swapaxes(1, 2) for x in arrays]

    class Backprop:
        def __init__(self, *inputs: Any):
            self._call = TwiceWrittenOut(xp, *stacks(inputs))
            self.o = self._call.o.swapaxes(1, 2)

        def __call__(self, do: Any) -> list[Any]:
            return stacks(self._call(*stacks([do])))

        def jvp(self, *moved: Any) -> tuple[Any, Any]:
            ot, lset = self._call.jvp(*stacks(moved))
            return ot.swapaxes(1, 2), lset

        def backward_jvp(self, *arrays: Any) -> list[Any]:
            *before, lset, dot = arrays
            return stacks(self._call.backward_jvp(*stacks(before), lset, *stacks([dot])))

    def attend(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        backprop = Backprop(q, k, v)
        return backprop.o, backprop

    return attend


def peak_bytes(xp: Any, call: Callable[[], object]) -> int:
    """Returns the bytes that a call allocates at its peak."""
    if xp is np:
        tracemalloc.start()
        try:
            call()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    pool = xp.cuda.MemoryPool()  # it gives nothing back by itself, so that its size is the peak
    with xp.cuda.using_allocator(pool.malloc):
        call()
    return pool.total_bytes()


def train(xp: Any, name: str, options: argparse.Namespace) -> tuple[list[float], float, int]:
    """Trains; returns the loss and the milliseconds of the steps (their median), and the bytes of one."""
    model = Energy(xp, fa2cupy.attention if name == FUSED else written_out(xp), options)
    adam, losses, times = Adam(xp, model.net.dense(), options.rate), [], []
    for step in range(options.steps):
        given = particles(xp, options, step)
        start = time.perf_counter()
        losses.append(model.loss(*given))  # a number of Python: the GPU has computed it, but not all gradients
        adam.update()
        if xp is not np:
            xp.cuda.get_current_stream().synchronize()
        times.append(1000 * (time.perf_counter() - start))
        if step % max(1, options.steps // 10) == 0 or step == options.steps - 1:
            print(f"{name:12s}step {step:5d}  loss {losses[-1]:.6f}", flush=True)
    return losses, statistics.median(times), peak_bytes(xp, lambda: model.loss(*given))


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--attention", choices=("fused", "written-out", "both"), default="both")
    add("--device", choices=("auto", "cpu", "gpu"), default="auto")
    add("--dtype", choices=("float32", "float64"), default="float32")
    add("--particles", type=positive_int, metavar="N", help="default: 2048 on a GPU, 128 on NumPy")
    add("--batch", type=positive_int, default=4, metavar="N")
    add("--layers", type=positive_int, default=2, metavar="N")
    add("--width", type=positive_int, metavar="N", help="default: 512 on a GPU, 32 on NumPy")
    add("--heads", type=positive_int, metavar="N", help="default: 8 on a GPU, 4 on NumPy")
    add("--steps", type=positive_int, default=100, metavar="N")
    add("--rate", type=float, help="of Adam; default: 0.001 on a GPU, 0.005 on NumPy")
    add("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.device == "auto":
        options.device = "gpu" if device_count() else "cpu"
    defaults = {"particles": (128, 2048), "width": (32, 512), "heads": (4, 8), "rate": (5e-3, 1e-3)}
    for name, values in defaults.items():
        setattr(options, name, getattr(options, name) or values[options.device == "gpu"])
    if options.width % options.heads:
        parser.error(f"--width: expected a multiple of the {options.heads} heads, got {options.width}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a loss is not finite, and 2 without a GPU that was asked for."""
    options = parse_arguments(arguments)
    if options.device == "gpu" and not device_count():
        print("train_forces.py: there is no GPU", file=sys.stderr)
        return 2
    xp: Any = np
    if options.device == "gpu":
        import cupy as xp
    names = {"fused": (FUSED,), "written-out": (UNFUSED,), "both": (FUSED, UNFUSED)}[options.attention]
    results = {name: train(xp, name, options) for name in names}
    print(f"{options.batch} x {options.particles} particles, {options.heads} heads, {options.dtype}")
    for name, (losses, milliseconds, held) in results.items():
        print(
            f"{name:12s}last loss {losses[-1]:.6f}  {milliseconds:9.2f} ms a step  {held / 2**20:9.1f} MiB at its peak"
        )
    if len(results) == 2:
        (ours, fast, small), (theirs, slow, large) = (results[name] for name in names)
        furthest = max(abs(one - other) / other for one, other in zip(ours, theirs, strict=True))
        print(
            f"largest difference of losses {furthest:.1e}; written out takes {slow / fast:.2f} times as long and "
            f"{large / small:.2f} times the memory"
        )
    return 0 if all(np.isfinite(losses).all() for losses, *_ in results.values()) else 1


if __name__ == "__main__":
    sys.exit(run_command("train_forces.py", main))
