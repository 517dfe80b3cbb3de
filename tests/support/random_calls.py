"""Random calls: operations, dtypes, sizes, strides, features alone and together, options and maps.

`RandomCall` has arrays without numbers, for the fake GPU; random_numbers.py adds numbers, and checks results.
"""

from __future__ import annotations

import math
import random
from typing import Any

import ml_dtypes
import numpy as np
from support import fake_gpu
from support.fake_cupy import FakeArray
from support.launch_record import Launch
from support.traced_cases import on_gpu, ready_made

import fa2cupy
from fa2cupy.problem.block_mask import MOST_INTERVALS
from fa2cupy.problem.dtypes import ACCUMULATOR, DTYPES
from fa2cupy.problem.options import METHOD_NAMES

__all__ = ["FEATURES", "RandomCall"]

ARCHS = ("sm_75", "sm_80", "sm_80", "sm_89", "sm_90", "sm_90", "sm_100", "sm_120")
COLUMNS = (7, 8, 16, 24, 32, 40, 48, 63, *(64,) * 4, 72, 80, 96, 112, *(128,) * 4, 160, 192, 200, 256, 264, 320, 512)
LATENT = 576, 512  # columns of a cache, and of those of them that are its values
LENGTHS = (1, 2, 16, 17, 64, 100, 128, 200, 256, 300, 512, 1000, 1024, 2048, 4096)
LARGEST = 4_000_000  # elements of an array
PACKED = 3  # sequences
DIRECTION = {"qt": "q", "kt": "k", "vt": "v", "bias_tangent": "bias", "sink_tangent": "sink"}
COTANGENTS = {"gdq": "q", "gdk": "k", "gdv": "v", "gdbias": "bias", "gdsink": "sink"}
#: Further arrays of operations, by the names of those that they are like. Those that are not needed may be None.
LIKE = {
    "backward": {"do": "o", "delta": "lse", "dlse": "lse"},
    "jvp": DIRECTION,
    "output_jvp": DIRECTION,
    "backward_jvp": {"do": "o", **DIRECTION, "ot": "o", "lset": "lse", "dot": "do", "dlse": "lse", "dlset": "lse"},
    "double_backward": {"do": "o", "dlse": "lse", **COTANGENTS},
}
NEEDED = ("do", "ot", "lset")
SWITCHES = {"return_dbias": "bias", "return_dsink": "sink", "return_dscore_args": "score_args"}
OF_DECODE = ("window", "softcap", "alibi_slopes", "sink")
FEATURES = (*OF_DECODE, "bias", "mask", "key_padding_mask", "dropout", "score_mod", "mask_mod", "tiles")


class RandomCall:
    """A call that depends on its parameters alone.

    Parameters
    ----------
    seed : str
    operation : str
        A function of `support.fake_gpu`, or ``"output_jvp"``: `jvp` of given results.
    features : tuple of str
        Some of `FEATURES`, of which `decode` has `OF_DECODE` alone. A third of the calls has others, too.
    on_hopper : bool
        True for data of 16 bits on Hopper, which has the most kernels; False for any dtype on any GPU.

    Attributes
    ----------
    arch : str
        The GPU that the call is for.
    arguments : dict
        The arguments by name. `draw` adds them; elements of arrays are unwritten.
    """

    columns: tuple[int, ...] = COLUMNS
    lengths: tuple[int, ...] = LENGTHS
    lengths_of_caches: tuple[int, ...] = (64, 100, 1024, 4096, 32768)
    placed = staticmethod(on_gpu)
    leading: tuple[tuple[int, ...], ...] = ((1,), (1,), (2,), (3,), (64,), (2, 3))
    largest = LARGEST

    def __init__(self, seed: str, operation: str, features: tuple[str, ...], *, on_hopper: bool):
        self._random = self._of_sizes = random.Random(seed)
        self._any = self._random.choice
        self.operation, self._features, self._on_hopper = operation, features, on_hopper
        self.arch = "sm_90" if on_hopper else self._any(ARCHS)
        self.arguments: dict[str, Any] = {}

    def __str__(self) -> str:
        arguments = (f"{name}={_brief(value)}" for name, value in self.arguments.items())
        return f"{self.operation} on {self.arch}: {', '.join(arguments)}"

    def __call__(self) -> None:
        """Calls the operation on the current fake GPU."""
        getattr(fake_gpu, self.operation.removeprefix("output_"))(**self.arguments)

    def draw(self) -> None:
        """Adds the arguments; makes maps on the current fake GPU."""
        decodes = self.operation == "decode"
        self._dtype = self._any(DTYPES[:2] if self._on_hopper else DTYPES[2:] if self.arch == "sm_75" else DTYPES)
        self._wide = ACCUMULATOR[self._dtype]
        self._packed = not decodes and self._often(0.15)
        self._layout = "bhsd" if not self._packed and self._often(0.25) else "bshd"
        self._draw_sizes(decodes)
        (self._add_cache if decodes else self._add_tensors)()
        more = self._random.sample(FEATURES, self._any((0, 0, 0, 0, 1, 3)))
        for name in dict.fromkeys((*self._features, *more)):
            if not decodes or name in OF_DECODE:
                self.arguments |= getattr(self, f"_{name}")()
        self._add_options()
        if not decodes:
            self._add_directions()

    def run(self, launch: Launch) -> None:
        """Stands for a kernel. It writes only how many intervals a map has, on which later kernels depend."""
        if launch.pointers.get(MOST_INTERVALS):
            launch.array(MOST_INTERVALS)[...] = self._any((2, 3)), self._any((2, 3))

    def _often(self, probability: float) -> bool:
        return self._random.random() < probability

    # ------------------------------------------------------------------------------------------------ sizes and tensors

    def _draw_sizes(self, decodes: bool) -> None:
        """Draws sizes until the tensors are small enough."""
        one = self._of_sizes.choice
        elements = self.largest + 1
        while elements > self.largest:
            self._draw_columns(decodes)
            self._heads_kv = one((1, 2, 4, 8))
            self._heads = self._heads_kv * one((1, 1, 2, 4, 8))
            self._leading = (PACKED,) if self._packed else one(self.leading)
            self._queries = one(self.lengths)
            self._keys = self._queries if self._of_sizes.random() < 0.6 else one(self.lengths)
            if decodes:
                self._leading, self._queries = (self._leading or (1,))[:1], one((1, 1, 2, 4, 8, 33))
                self._keys = one(self.lengths_of_caches)
            rows = max(self._queries * self._heads, self._keys * self._heads_kv)
            elements = math.prod(self._leading) * rows * max(self._columns, self._columns_v)

    def _draw_columns(self, decodes: bool) -> None:
        self._columns = self._any(self.columns)
        self._columns_v = self._columns if self._often(0.7) else self._any(self.columns)
        if decodes:
            self._columns, self._columns_v = self._any((LATENT, (self._columns, self._columns_v)))

    def _array(self, shape: tuple[int, ...], dtype: object, job: str = "") -> np.ndarray:
        """Returns an array whose rows may be parts of longer ones; its job may decide on its numbers."""
        dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        longer = shape[-1] + self._any((0, 0, 0, 0, 0, 0, 0, 0, 8, 1))
        return FakeArray((*shape[:-1], longer), dtype)[..., : shape[-1]]

    def _tensor(self, axes: tuple[int, ...], length: int, heads: int, columns: int) -> np.ndarray:
        rows = (heads, length) if self._layout == "bhsd" else (length, heads)
        return self._array((*axes, *rows, columns), self._dtype)

    def _add_tensors(self) -> None:
        axes = () if self._packed else self._leading
        self.arguments["q"] = self._tensor(axes, self._queries, self._heads, self._columns)
        for name, columns in (("k", self._columns), ("v", self._columns_v)):
            self.arguments[name] = self._tensor(axes, self._keys, self._heads_kv, columns)
        if self.operation not in ("forward", "jvp"):
            self.arguments["o"] = self._tensor(axes, self._queries, self._heads, self._columns_v)
            self.arguments["lse"] = self._array((*axes, self._heads, self._queries), self._wide)
        for side, length in (("q", self._queries), ("k", self._keys)) if self._packed else ():
            self.arguments[f"cu_seqlens_{side}"] = self._array((PACKED + 1,), "int32", f"ends_{side}")
            self.arguments[f"max_seqlen_{side}"] = length

    def _add_cache(self) -> None:
        """Adds the arguments of `decode`, with pages or without; values may be columns of the keys."""
        (batch,), paged = self._leading, self._often(0.3)
        page = self._any((16, 64, 128)) if paged else self._keys
        pages = -(-self._keys // page)

        def keys_and_values(number: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
            keys = self._tensor((number,), rows, self._heads_kv, self._columns)
            if shared:
                return keys, keys[..., : self._columns_v]
            return keys, self._tensor((number,), rows, self._heads_kv, self._columns_v)

        shared = self._columns_v < self._columns and self._often(0.8)
        self.arguments["q"] = self._tensor((batch,), self._queries, self._heads, self._columns)
        self.arguments |= zip(("k_cache", "v_cache"), keys_and_values(batch * pages, page), strict=True)
        self.arguments["cache_seqlens"] = self._array((batch,), "int32", "lengths")
        if paged:
            self.arguments["block_table"] = self._array((batch, pages), "int32", "pages")
        if not shared and self._often(0.3):
            self.arguments |= zip("kv", keys_and_values(batch, self._queries), strict=True)

    # --------------------------------------------------------------------------- features: each returns its arguments

    def _window(self) -> dict:
        return {"window": self._any(((64, 0), (3, 3), (None, 5), (100, None), (0, 0), (1000, 0)))}

    def _softcap(self) -> dict:
        return {"softcap": self._any((2.0, 30.0))}

    def _alibi_slopes(self) -> dict:
        return {"alibi_slopes": self._array((*self._any(((), self._leading)), self._heads), self._wide, "slopes")}

    def _sink(self) -> dict:
        return {"sink": self._array((self._heads,), self._wide, "sink")}

    def _over_scores(self, dtype: str, job: str) -> np.ndarray:
        """Returns an array with some axes of the scores; it repeats along the others, as it must if it is large."""
        sizes, one = self._of_sizes, (*self._leading, self._heads, self._queries, self._keys)
        shape = [1 if sizes.random() < 0.3 else size for size in one]
        while math.prod(shape) > LARGEST:
            shape[sizes.randrange(len(shape))] = 1
        return self._array(tuple(shape[sizes.randrange(len(shape)) if sizes.random() < 0.3 else 0 :]), dtype, job)

    def _bias(self) -> dict:
        return {"bias": self._over_scores(self._any((self._dtype, self._wide)), "bias")}

    def _mask(self) -> dict:
        return {"mask": self._over_scores("bool", "mask")}

    def _key_padding_mask(self) -> dict:
        return {"key_padding_mask": self._array((*self._leading, self._keys), "bool", "mask")}

    def _dropout(self) -> dict:
        return {"dropout_p": 0.1, "seed": 3}

    def _function(self, role: str) -> dict:
        """Returns a function of `fa2cupy.mods`, or one that it does not have, and its arrays."""
        lengths = max(self._queries, 1), max(self._keys, 1)
        cases = ready_made(max(math.prod(self._leading), 1), self._heads, *lengths, self._wide).values()
        return self.placed(self._any([case for case in cases if case.role == role]).options)

    def _score_mod(self) -> dict:
        return self._function("score_mod")

    def _mask_mod(self) -> dict:
        """Returns a function, its map, or both."""
        function = self._function("mask_mod")
        if self._often(0.4):
            return function
        sizes = math.prod(self._leading), self._heads, self._queries, self._keys
        sparse = fa2cupy.block_mask(*function.values(), *sizes, like=self.arguments["q"])
        return {"block_mask": sparse, **(function if self._often(0.5) else {})}

    def _tiles(self) -> dict:
        """Returns a map without a function."""
        tile = self._any(((128, 128), (64, 64), (128, 64), (16, 16)))
        tiles = -(-self._queries // tile[0]), -(-self._keys // tile[1])
        sequences = self._any(((), (1, 1), (1, self._heads), (math.prod(self._leading), 1)))
        shown = self._array((*sequences, *tiles), "bool")
        return {"block_mask": fa2cupy.BlockMask(shown, self._queries, self._keys, tile)}

    # ----------------------------------------------------------------------------------------- options, further results

    def _add_options(self) -> None:
        options: dict[str, Any] = {"layout": self._layout}
        if self._often(0.4):
            options["causal"] = self.operation != "decode" or self._any((True, False))
        if self._often(0.1):
            options["softmax_scale"] = self._any((0.5, -0.5))
        if self._often(0.1):
            options["family"] = self._any(("sm80", "sm90", "simt"))
        if self._dtype == "float32" and self.operation != "decode" and self._often(0.4):
            options["precision"] = self._any(("ieee", "split"))
        if self.operation == "forward" and self._often(0.1):
            options["num_splits"] = self._any((1, 2, 5))
        if self.operation == "backward" and self._often(0.3):
            options["method"] = self._any(METHOD_NAMES)
        if "backward" in self.operation and self._often(0.2):
            options["deterministic"] = True
        self.arguments |= options

    def _add_directions(self) -> None:
        """Adds arrays that are like others, and switches of further gradients."""
        given = self.arguments
        for name, source in LIKE.get(self.operation, {}).items():
            if source in given:
                is_given = name in NEEDED or self._often(0.7)
                given[name] = self._array(given[source].shape, given[source].dtype) if is_given else None
        for name, source in SWITCHES.items():
            if "do" in given and source in given and self._often(0.7):
                given[name] = True


def _brief(value: object) -> object:
    """Returns an argument for messages: of arrays, dtype, shape and strides."""
    if isinstance(value, fa2cupy.BlockMask):
        return value.layout
    if isinstance(value, tuple):
        return tuple(map(_brief, value))
    return f"{value.dtype}{list(value.shape)} by {list(value.strides)}" if isinstance(value, np.ndarray) else value
