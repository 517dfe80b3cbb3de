"""A launch read back from its record: the arrays and numbers that a kernel is given."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence

import ml_dtypes
import numpy as np
from ptxsim.tensor_map import TensorMap, driver_tensor_map
from support.float32_parts import columns_of_part, joined_parts

from fa2cupy.families.records import COLUMN_RISES, EXCEPTIONS, EXTREMES, PARTIALS, ROW_RISES, SHARES
from fa2cupy.gpu.tensor_maps import encode_arguments
from fa2cupy.jit.spec import KernelSpec
from fa2cupy.plan.stages import Plan, Stage
from fa2cupy.plan.tensor_maps import TensorLayout
from fa2cupy.problem.attention import ROWS_OF, WITH_COLUMNS_OF_V
from fa2cupy.problem.block_mask import (
    COLUMN_INTERVALS,
    INTERVAL_STRIDES,
    KEY_LISTS,
    MOST_INTERVALS,
    QUERY_LISTS,
    ROW_INTERVALS,
)
from fa2cupy.problem.boxes import sequence_axis
from fa2cupy.problem.features import ARRAY_KEYWORDS, OFFSETS

TILE_COUNTER = "tile_counter"  # a pointer of the record that is no array of the call
PARTS = tuple(f"{name}_{kind}" for name in ("q", "k", "v", "dout") for kind in ("parts", "units"))  # of float32 inputs
ADDED = ("dq_accum", SHARES)  # workspaces of tiles to which kernels add
CACHES = ("k_cache", "v_cache")  # caches of decoding, which are read and written
_OF_DECODE = (*CACHES, "k", "v", "cache_seqlens", "block_table")
INTERVALS = {ROW_INTERVALS: "seqlen_q", COLUMN_INTERVALS: "seqlen_k"}
RISES = (ROW_RISES, COLUMN_RISES)
WORKSPACES = (*ADDED, EXCEPTIONS, EXTREMES, PARTIALS, *PARTS, KEY_LISTS, QUERY_LISTS, *RISES)


class Launch:
    """One launch: its unpacked record, and views of the arrays that the record names.

    Attributes
    ----------
    stage : Stage
    pointers : dict
        Addresses by the record's names, including arrays that its tensor maps describe.
    maps : dict
        Layouts of the tensor maps by name; None for a tangent that the call does not have.
    values : dict
        The record's other members, and the strides of the arrays that the maps describe.
    cleared : tuple of str
        Arrays that are zero before the plan's first stage.
    left_zero : tuple of str
        Those of them that a kernel leaves zero.
    before_fallback : bool
        True if kernels of IEEE arithmetic write some heads of its results after it.
    """

    def __init__(self, plan: Plan, stage: Stage, addresses: dict[str, int]):
        self.stage, self.spec = stage, stage.spec
        self.left_zero = tuple(workspace.name for workspace in plan.workspaces if workspace.stays_zero)
        self.cleared = (*plan.cleared, *self.left_zero)
        self.before_fallback = any(one.spec.is_fallback for one in plan.stages) and not self.spec.is_fallback
        layout = self.spec.params
        self._kinds = kinds = {field.name: field.kind for field in layout.fields}
        self.pointers = {
            name: addresses[name] for name in layout.pointers if kinds[name] not in ("counter", "per_call")
        }
        self._per_call = {name: addresses[name] for name in layout.pointers if kinds[name] == "per_call"}
        self.maps = dict(zip(layout.maps, stage.maps, strict=True))
        self.values = stage_values(stage)
        for name, tensor in self.maps.items():
            row, head, batch = (0, 0, 0) if tensor is None else (stride // 2 for stride in tensor.strides[:3])
            if "neighborhood" in self.values:  # one axis stands for heads and sequences
                steps = self.values["neighborhood"][-4:]
                steps = steps[2:] if ROWS_OF[name] == "keys" else steps[:2]
                head, batch = (step * tensor.strides[3] // 2 for step in steps)
            self.values[f"{name}_strides"] = (batch, row, head)
        heads = self.values.get("scheduled_heads") or self.values.get("num_heads", 1)
        per_batch = self.values.get("num_tiles", 1) * heads
        if self.spec.operation == "merge_forward":  # blocks of 16 rows
            per_batch *= self.spec.tile.b_r // 16
        self.packed = "cu_seqlens" in self.spec.features
        self.batch = 1 if self.packed else self.values.get("batch", stage.blocks // per_batch)
        assert len(self.record(addresses)) == layout.nbytes
        self._wide = np.dtype("float64" if self.spec.dtype == "float64" else "float32")
        self._workspaces = {workspace.name: workspace.nbytes for workspace in plan.workspaces}
        for name, tensor in self.maps.items():
            if tensor is not None:
                check_map(tensor, self.array(name))

    def record(
        self,
        addresses: Mapping[str, int],
        encode: Callable[[TensorLayout, int], bytes] = lambda layout, address: bytes(128),
    ) -> bytes:
        """Returns the kernel's record with other addresses and an encoder of tensor maps; no tile counter is 0."""
        front = {name: (self._per_call | addresses).get(name, 0) for name in self.spec.params.pointers}
        for name, layout in self.maps.items():
            front[name] = bytes(128) if layout is None else encode(layout, front[name])
        return self.spec.params.pointer_packer.pack(*front.values()) + self.stage.constants

    def _rows(self, side: str) -> int:
        return self.values[f"total_{side}" if self.packed else f"seqlen_{side}"]

    def array(self, name: str) -> np.ndarray:
        """Returns the array of a pointer: (batch, row, head, column), or (batch, head, row) for lse and delta.

        The result is None for an array that the call does not have.
        """
        if self.spec.operation == "decode" and name in _OF_DECODE:
            return self._array_of_decode(name)
        if name in WORKSPACES:
            kind = self._kinds[name].partition("_")[2]
            dtype = np.dtype({"parts": "float16", "int": "int32"}.get(kind, self._wide))
            nbytes = self._workspaces.get(self.stage.renamed.get(name) or name, 0)
            return memory_at(self.pointers[name], (nbytes // dtype.itemsize,), None, dtype)
        if name in ("block_mask", "states"):
            return memory_at(self.pointers[name], self._map_shape(), None, np.dtype("uint8"))
        if name in (*INTERVALS, MOST_INTERVALS):
            return memory_at(self.pointers[name], self._interval_shape(name), None, np.dtype("int32"))
        of_keys = ROWS_OF.get(name) == "keys"
        if name not in self.pointers and f"{name}_parts" in self.pointers:
            return self._joined(name, "k" if of_keys else "q")
        heads, rows = self.values["num_heads"], self._rows("k" if of_keys else "q")
        heads //= self.values["heads_per_group"] if of_keys else 1
        if self._kinds[name].startswith("items_") or name.startswith("dscore_args"):
            return self._argument(name)
        if name in OFFSETS:
            return memory_at(self.pointers[name], (self.values["num_sequences"] + 1,), None, np.dtype("int32"))
        if ROWS_OF.get(name) == "statistics" or name in ("dlse", "dlset", "lse_parts", "dsink"):
            parts = (self.values["num_parts"],) if name == "lse_parts" else ()
            shape = (heads,) if name == "dsink" else (*parts, self.batch, heads, rows)
            return memory_at(self.pointers[name], shape, None, self._wide)
        dtype = np.dtype(ml_dtypes.bfloat16 if self.spec.dtype == "bfloat16" else self.spec.dtype)
        if name in (*ARRAY_KEYWORDS, "dbias", "bias_tangent", "sink_tangent"):
            dtype = {"input": dtype, "output": dtype, "input_bool": np.dtype(bool)}.get(self._kinds[name], self._wide)
            return self._over_scores(name, dtype)
        if dtype.itemsize == 2 and self.columns_of(name) % 8 == 0:
            assert self.pointers[name] % 16 == 0 and all(s % 8 == 0 for s in self.values[f"{name}_strides"]), name
        batch, row, head = (stride * dtype.itemsize for stride in self.values[f"{name}_strides"])
        shape = (self.batch, rows, heads, self.columns_of(name))
        if name == "o_parts":
            strides = (self.values["part_stride"] * dtype.itemsize, batch, row, head, dtype.itemsize)
            return memory_at(self.pointers[name], (self.values["num_parts"], *shape), strides, dtype)
        return memory_at(self.pointers[name], shape, (batch, row, head, dtype.itemsize), dtype)

    def _over_scores(self, name: str, dtype: np.dtype) -> np.ndarray | None:
        """Returns an array over the scores, with all axes of these, of length 1 where it is repeated."""
        values, leading = self.values, [self.batch]
        *outer, head, row, column = values[f"{name}_strides"]
        if self.spec.batch_terms:
            head, row, column, *terms = values[f"{name}_strides"]
            leading, outer = leading_axes(self.batch, terms)
        sizes = (*leading, values["num_heads"], self._rows("q"), values.get("seqlen_k"))
        if self.packed:
            sizes = tuple(values[n] for n in ("num_sequences", "num_heads", "max_seqlen_q", "max_seqlen_k"))
        strides = tuple(stride * dtype.itemsize for stride in (*outer, head, row, column))
        shape = tuple(size if stride else 1 for size, stride in zip(sizes, strides, strict=True))
        return memory_at(self.pointers[name], shape, strides, dtype)

    def _array_of_decode(self, name: str) -> np.ndarray | None:
        """Returns a cache, the rows to append, the lengths or the block table; None if the call does not have it."""
        values = self.values
        if name in ("cache_seqlens", "block_table"):
            shape = (self.batch, values["pages_per_sequence"])[: 1 + (name == "block_table")]
            return memory_at(self.pointers[name], shape, None, np.dtype("int32"))
        sizes = (values["num_pages"], values["page_size"]) if name in CACHES else (self.batch, values["seqlen_new"])
        shape = (*sizes, values["num_heads"] // values["heads_per_group"], self.columns_of(name))
        dtype = np.dtype(ml_dtypes.bfloat16 if self.spec.dtype == "bfloat16" else self.spec.dtype)
        batch, row, head = (stride * dtype.itemsize for stride in values[f"{name}_strides"])
        return memory_at(self.pointers[name], shape, (batch, row, head, dtype.itemsize), dtype)

    def columns_of(self, name: str) -> int:
        """Returns the columns of a tensor."""
        of_v = self.spec.head_dim_v if name in WITH_COLUMNS_OF_V else None
        return of_v or self.spec.head_dim

    def written_rows(self, cache: np.ndarray) -> np.ndarray:
        """Returns True for each (page, row) of a decoding cache that the call may read: below a sequence's length."""
        lengths, table = self.array("cache_seqlens"), self.array("block_table")
        pages, size = cache.shape[:2]
        written = np.zeros((pages, size), bool)
        for number in range(self.batch):
            own = [number] if table is None else np.clip(table[number], 0, pages - 1)
            for index, page in enumerate(own):
                written[page, : max(0, self._rows_of(number, lengths) - index * size)] = True
        return written

    def used_entries(self, table: np.ndarray) -> np.ndarray:
        """Returns True for each entry of a block table with a row of its sequence, the appended ones included."""
        lengths = self.array("cache_seqlens")
        ends = np.array([self._rows_of(number, lengths) for number in range(self.batch)]) + self.values["seqlen_new"]
        return np.arange(table.shape[1]) * self.values["page_size"] < ends[:, None]

    def _rows_of(self, number: int, lengths: np.ndarray | None) -> int:
        """Returns the rows of a sequence in the cache."""
        room = self.values["seqlen_k"] - self.values["seqlen_new"]
        return room if lengths is None else min(max(int(lengths[number]), 0), room)

    def _map_shape(self) -> tuple[int, ...]:
        """Returns the shape of the states of a sparse map's tiles."""
        tiles = self.values["map_rows"], self.values["map_columns"]
        if "map_batches" in self.values:
            return self.values["map_batches"], self.values["map_heads"], *tiles
        heads = self.values["num_heads"]
        return self.stage.blocks // (heads * np.prod(tiles)), heads, *tiles

    def _interval_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of the intervals of a sparse map, or of their largest numbers.

        Kernels that read intervals know the sizes of one side alone, and read no other.
        """
        if name == MOST_INTERVALS:
            return (2,)
        if self.spec.operation == "close_intervals":
            return self.values["num_rows" if name == ROW_INTERVALS else "num_columns"], 4
        if self.spec.operation == "tile_states":
            return *self._map_shape()[:2], self.values[INTERVALS[name]], 4
        if self.spec.owns_keys != (name == COLUMN_INTERVALS):
            return 0, 4
        batch, head, rows = (self.values[stride] for stride in INTERVAL_STRIDES)
        batches = self.values["num_sequences"] if self.packed else self.batch
        return batches if batch else 1, self.values["num_heads"] if head else 1, rows, 4

    def _argument(self, name: str) -> np.ndarray:
        """Returns an array of the caller's function, or its gradient; the record has the layout of its axes, if any."""
        kind = self._kinds[name]
        dtype = self._wide if kind == "output_accum" else kind.removeprefix("items_")
        layout = self.values.get(f"{name}_strides", ())
        strides, shape = layout[: len(layout) // 2], layout[len(layout) // 2 :]
        items = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        return memory_at(self.pointers[name], shape, tuple(stride * items.itemsize for stride in strides), items)

    def _joined(self, name: str, side: str) -> np.ndarray:
        """Returns an input joined from its parts; packed sequences are refused, as their parts lie elsewhere."""
        assert not self.packed
        heads = self.values["num_heads"] // (self.values["heads_per_group"] if side == "k" else 1)
        shape = (self.batch, self.values[f"seqlen_{side}"], heads, self.columns_of(name))
        of_part = columns_of_part(self.spec, shape[-1])
        return joined_parts(self.array(f"{name}_parts"), self.array(f"{name}_units"), shape, of_part)


def leading_axes(batch: int, terms: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns lengths and strides of the leading axes of an array over the scores, from its terms in a record."""
    triples = zip(terms[::3], terms[1::3], terms[2::3], strict=True)
    distances = {round(2 ** (31 + shift) / factor): distance for distance, factor, shift in triples if factor}
    lengths, strides = [], []
    for divisor, end in itertools.pairwise(sorted({1, *distances, batch})):
        inner = lengths[0] * strides[0] if lengths else 0
        lengths.insert(0, end // divisor)
        strides.insert(0, inner + distances.get(divisor, 0))
    return lengths, strides


def check_map(layout: TensorLayout, array: np.ndarray) -> None:
    """Checks a tensor map of a (batch, row, head, column) array against the requirements of driver and hardware.

    The driver must accept it. It must begin at the array's first element, because a load of a box without an element
    of the tensor touches the map's address. The places inside of its axes, as far as kernels ask for them, must be
    those of the array and nothing else.
    """
    address = array.ctypes.data
    tensor = TensorMap(bytes(driver_tensor_map(*encode_arguments(layout, address))))
    assert tensor.address == address and tensor.box == layout.box
    assert layout.box[0] in (32, 64) and 1 in (layout.box[-1], layout.box[-2])
    batch, rows, heads, columns = array.shape
    if tensor.rank == 4:
        assert tensor.dims == (columns, rows, heads, batch)
        places = [((0, r, h, b), (b, r, h)) for b in (0, batch - 1) for r in (0, rows - 1) for h in (0, heads - 1)]
    elif math.prod(tensor.dims[1:4]) == rows:
        # Tokens of a grid, and an axis for heads and sequences; see kernels/common/neighborhood.cuh.
        axis = sequence_axis((batch, rows, heads), [stride // array.itemsize for stride in array.strides])
        corners = itertools.product(*({0, length - 1} for length in (*tensor.dims[1:4], heads, batch)))
        _, x_length, y_length, _, _ = tensor.dims
        assert tensor.dims[4] == axis.at(heads - 1, batch - 1) + 1
        places = [((0, x, y, z, axis.at(h, b)), (b, (z * y_length + y) * x_length + x, h)) for x, y, z, h, b in corners]
    else:
        # A sequence of n rows that ends before row `end` ends with the row axis; see kernels/sm90/tma_rows.cuh.
        far = 2**30
        assert tensor.dims == (columns, far, heads, rows + 1, far + 1)
        sequences = [(n, end) for end in (1, (rows + 1) // 2, rows) for n in (1, end)]
        places = [
            ((0, far - n + i, h, end, far), (0, end - n + i, h))
            for n, end in sequences for i in (0, n - 1) for h in (0, heads - 1)
        ]  # fmt: skip
    for coordinates, index in places:
        offset = sum(c * s for c, s in zip(coordinates, tensor.strides, strict=True)) % 2**64
        assert offset == (array[index].ctypes.data - address) % 2**64, (layout, coordinates)


def stage_values(stage: Stage) -> dict[str, object]:
    """Returns the members of a stage's record that are not pointers."""
    return dict(_unpack(stage.spec, stage.constants))


def _unpack(spec: KernelSpec, data: bytes) -> Iterator[tuple[str, object]]:
    real = "=d" if spec.dtype == "float64" else "=f"
    offset = 0
    for field in spec.params.fields[len(spec.params.pointers) :]:
        code = {"strides": "=qqq", "score_strides": "=qqqq", "size": "=q", "real": real, "int": "=i", "word": "=I"}
        code["neighborhood"] = "=22i"
        if field.kind.removeprefix("score_strides").isdecimal():
            own = "=qqq" + "qIi" * int(field.kind.removeprefix("score_strides"))
        else:
            own = code[field.kind] if field.kind in code else "=" + "qq" * int(field.kind.removeprefix("array"))
        values = struct.unpack_from(own, data, offset)
        offset += struct.calcsize(own)
        yield field.name, values if len(values) > 1 else values[0]


class _Memory:
    def __init__(self, address: int, shape: tuple, strides: tuple | None, dtype: np.dtype):
        typestr = dtype.str if dtype.kind != "V" and dtype.num < 256 else "<u2"
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": typestr,
        }


def memory_at(address: int, shape: tuple, strides: tuple | None, dtype: np.dtype) -> np.ndarray | None:
    """Returns a view of the memory at an address, which it does not keep alive; None for an absent array."""
    if address == 0 and 0 not in shape:
        return None
    array = np.asarray(_Memory(address, shape, strides, dtype))
    return array if array.dtype == dtype else array.view(dtype)
