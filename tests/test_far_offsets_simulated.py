"""Arrays of more elements than 32 bits count, executed without a GPU and without their memory.

A problem of 2**28 heads is planned. Of each kernel, only the blocks that own the last head run. Arrays have only the
part of that head in the interpreter's memory, at the address that it has in the whole array: an offset that is computed
in 32 bits leads to unmapped memory.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable

import numpy as np
import ptxsim
import pytest

pytest.importorskip("cupy")

from ptxsim.tensor_map import driver_tensor_map
from support import decode_cases, plans
from support.feature_cases import accumulator, numbers
from support.launch_record import stage_values
from support.simulator import compiled_module

from fa2cupy import TileConfig, reference
from fa2cupy.families.choice import choose
from fa2cupy.families.device import DeviceInfo
from fa2cupy.gpu.tensor_maps import encode_arguments
from fa2cupy.jit.source import render_kernel
from fa2cupy.plan.decode import plan_decode
from fa2cupy.plan.stages import Plan, Stage
from fa2cupy.problem.attention import AttentionProblem
from fa2cupy.problem.decoding import check_decode
from fa2cupy.problem.features import ARRAY_KEYWORDS, OFFSETS, FeatureSettings
from fa2cupy.problem.options import CallOptions
from fa2cupy.testing import Expectation, make_inputs

pytestmark = pytest.mark.simulated

BATCH, HEADS = 2, 2**27
#: (dtype, rows, head_dim, tile of kernels by query tiles, of kernels by key tiles); lse has at least 2**33 elements.
FAMILIES = {
    "simt": ("float32", 32, 8, TileConfig(32, 32, 8), TileConfig(32, 32, 8)),
    "sm80": ("float16", 32, 24, TileConfig(32, 32, 2, 2), TileConfig(32, 32, 4, 2)),
    "sm90": ("float16", 48, 64, TileConfig(64, 48, 8, 2, 2), TileConfig(128, 128, 12, 2)),
}
#: Kernels of further structures, whose names begin with those of their families.
KERNELS = {
    **FAMILIES,
    "sm80 wide": ("float16", 32, 264, TileConfig(32, 64, 4), TileConfig(32, 32, 8)),
    "sm90 wide": ("float16", 15, 264, TileConfig(64, 32, 12, 2), TileConfig(32, 64, 12, 2)),
}
#: Columns of v beside those columns of q.
COLUMNS_OF_V = {"simt": 12, "sm80": 40, "sm90": 48}
_REACH = 2**44  # between the arrays' addresses
_FAR = 2**20  # stride in bytes from which the memory between elements is left out


class Far:
    """Arrays that exist in part, and launches of single blocks on them."""

    def __init__(self) -> None:
        self.memory = ptxsim.Memory()
        self.addresses: dict[str, int] = {}
        self._pieces: dict[str, list[tuple[tuple, int]]] = {}

    def put(
        self, name: str, part: np.ndarray, offset: int, strides: tuple | None = None, *, result: bool = False
    ) -> None:
        """Maps `part`, `offset` elements behind the start of its array, contiguous or with strides in elements."""
        strides = tuple(stride * part.itemsize for stride in strides) if strides else part.strides
        if name not in self.addresses:
            # A quarter behind multiples of the reach, one of which begins the window of generic shared addresses.
            self.addresses[name] = _REACH * (1 + len(self.addresses)) + _REACH // 4
            if offset:  # tensor maps begin at the first element
                self.memory.map(np.zeros(1, np.uint8), name, tracked=False, at=self.addresses[name])
        start = self.addresses[name] + offset * part.itemsize
        axes = [range(n) if stride >= _FAR else (slice(None),) for n, stride in zip(part.shape, strides, strict=True)]
        for index in itertools.product(*axes):
            piece = np.ascontiguousarray(part[index])
            assert piece.strides == tuple(stride for stride in strides if stride < _FAR)
            steps = sum(i * stride for i, stride in zip(index, strides, strict=True) if i != slice(None))
            address = self.memory.map(piece, name, tracked=result, at=start + steps)
            self._pieces.setdefault(name, []).append((index, address))

    def take(self, name: str, like: np.ndarray) -> np.ndarray:
        """Returns a result of the kernels, and checks that they have written all of it."""
        taken = np.empty_like(like)
        for index, address in self._pieces[name]:
            assert self.memory.written(address).all(), f"elements of {name}{index} are unwritten"
            taken[index] = self.memory.read(address).reshape(taken[index].shape)
        return taken

    def run(self, stage: Stage, blocks: range) -> None:
        """Runs the blocks that have these numbers in the grid."""
        spec = stage.spec
        front = {name: self.addresses.get(name, 0) for name in (*spec.params.pointers, *spec.params.maps)}
        for name, layout in zip(spec.params.maps, stage.maps, strict=True):
            front[name] = bytes(driver_tensor_map(*encode_arguments(layout, front[name])))
        record = spec.params.pointer_packer.pack(*front.values()) + stage.constants
        # Blocks that take several tiles advance by the number of blocks, which leads past the last tile.
        grid = max(stage.blocks, blocks.stop)
        compiled_module(render_kernel(spec).text, spec.arch).launch(
            spec.symbol, grid, stage.threads, [record], spec.shared_memory_bytes, self.memory, blocks=blocks
        )


def blocks_of_last_head(stage: Stage, rows: int, tile: int) -> range:
    """Returns the numbers of the blocks with its last rows, or with its `tile` if kernels have tiles of a sequence."""
    operation, values = stage.spec.operation, stage_values(stage)
    if operation == "dsink":
        return range(HEADS - 1, HEADS)
    if (operation, stage.spec.family_name) == ("convert_dq", "sm90"):
        return range(1)  # its first block has the last tile
    if operation in ("delta", "convert_dq"):
        return range(stage.blocks - -(-rows // stage.spec.tile.b_r), stage.blocks)
    heads, section = values["batch"] * values["scheduled_heads"], values["heads_per_section"]
    ahead = (heads - 1) // section * section
    if stage.spec.causal and not stage.spec.owns_keys:
        tile = values["num_tiles"] - 1 - tile  # the last tile has the most work, and comes first
    last = ahead * values["num_tiles"] + tile * (heads - ahead) + heads - ahead - 1
    return range(last, last + 1)


class Case:
    """A problem of a family, with the arrays of the last head of its last sequence."""

    def __init__(
        self,
        name: str,
        *,
        packed: bool = False,
        arrays: dict | None = None,
        more: tuple[str, ...] = (),
        head_dim_v: int | None = None,
    ):
        dtype, rows, head_dim, tile, by_keys = KERNELS[name]
        self.family, self.more = None if name == "sm90" else name.split()[0], more
        self.config = {"forward": tile, "backward_dq": tile, "backward": by_keys, "backward_dkdv": by_keys}
        columns = {"head_dim": head_dim, "head_dim_v": head_dim_v}
        self.inputs = make_inputs(dtype, seqlen_q=rows, num_heads=1, layout="bhsd", **columns)
        self.arrays = arrays or {}
        given = tuple(name for name in ARRAY_KEYWORDS if name in self.arrays)
        features = FeatureSettings(arrays=given, **dict.fromkeys(more, True))
        batch, total = (1, BATCH * rows) if packed else (BATCH, rows)
        if packed:
            features = dataclasses.replace(
                features, num_sequences=BATCH, max_seqlen_q=rows, max_seqlen_k=rows, arrays=(*features.arrays, *OFFSETS)
            )
        sizes = (batch, total, total, HEADS, HEADS, head_dim)
        rank = 3 if packed else 4
        self.problem = AttentionProblem(dtype, *sizes, True, head_dim**-0.5, "bhsd", rank, head_dim_v, features)

        def strides_of(tensor: str) -> tuple[int, int, int]:
            # Rows are far apart, too, except for Hopper, where TMA multiplies by strides.
            n = self.problem.columns_of(tensor)
            row, head = (n, total * n) if name.startswith("sm90") else (HEADS * n, n)
            return 0 if packed else HEADS * total * n, row, head

        self.strides = {x: strides_of(x) for x in ("q", "k", "v", "o", "dout", "dq", "dk", "dv")}
        self.strides |= {name: own for name, (_, own) in self.arrays.items()}
        self.device = DeviceInfo.named("sm_90")
        self.far = Far()
        self._end = batch * HEADS * total  # behind the rows of the last head, and of the last sequence
        q, k, v, do = self.inputs
        self.put(q=q, k=k, v=v)
        for name, (array, own) in self.arrays.items():
            axes = [axis for axis in (2, 3) if own[axis]]
            part = array.reshape([rows for _ in axes] or 1)
            self.far.put(
                name, part, (BATCH - 1) * own[0] + (HEADS - 1) * own[1], tuple(own[axis] for axis in axes) or None
            )
        if packed:
            for name in OFFSETS:
                self.far.put(name, np.arange(0, total + 1, rows, dtype="int32"), 0)
        self.tile = rows // tile.b_r + BATCH - 1 if packed else 0  # in a grid with spare tiles for sequences

    def put(self, *, results: bool = False, **rows: np.ndarray) -> None:
        """Maps the last head's rows of tensors and of statistics."""
        for name, array in rows.items():
            if array.ndim == 3:
                self.far.put(name, array.reshape(-1), self._end - array.size, result=results)
            else:
                batch, row, head = self.strides[name]
                at = (
                    (self.problem.batch - 1) * batch
                    + (self.problem.seqlen_q - array.shape[2]) * row
                    + (HEADS - 1) * head
                )
                self.far.put(name, array[0, 0], at, (row, 1), result=results)

    def run(self, stages: Iterable[Stage]) -> None:
        for stage in stages:
            if not stage.spec.operation.startswith("clear_"):
                self.far.run(stage, blocks_of_last_head(stage, self.inputs[0].shape[2], self.tile))

    def expectation(self, dlse: np.ndarray | None = None) -> Expectation:
        return Expectation(
            *self.inputs,
            dlse=dlse,
            layout="bhsd",
            causal=True,
            **{name: array for name, (array, _) in self.arrays.items()},
        )

    def results(self, **like: np.ndarray) -> dict[str, np.ndarray]:
        parts = {name: array[0, 0] if array.ndim == 4 else array.reshape(-1) for name, array in like.items()}
        return {name: self.far.take(name, part).reshape(like[name].shape) for name, part in parts.items()}

    def check_forward(self) -> None:
        q, _, _, do = self.inputs
        like = {"o": do, "lse": np.zeros(q.shape[:3], self.problem.accumulator_dtype)}
        self.put(results=True, **like)
        self.run(plans.forward_plan(self.problem, self.device, self.strides, self.config, self.family).stages)
        self.expectation().check(**self.results(**like))

    def put_workspace(self, plan: Plan) -> None:
        """Maps the last head's part of dq_accum, and the other parts that the last head's blocks of delta clear."""
        delta = plan.stages[0]
        all_elements = stage_values(delta)["dq_accum_bytes"] // 4
        if not all_elements:
            return
        heads, of_all_blocks = BATCH * HEADS, delta.blocks * delta.threads * 4
        cleared = np.full(of_all_blocks // heads, np.nan, "float32")
        for end in range(of_all_blocks, all_elements, of_all_blocks):
            self.far.put("dq_accum", cleared, end - cleared.size)
        last = np.zeros(all_elements // heads, "float32")
        last[-cleared.size :] = cleared
        self.far.put("dq_accum", last, all_elements - last.size)

    def check_backward(self, method: str) -> None:
        q, k, v, do = self.inputs
        wide = np.dtype(self.problem.accumulator_dtype)
        features = {name: array for name, (array, _) in self.arrays.items()}
        o, lse = reference.forward(q, k, v, layout="bhsd", causal=True, **features)
        self.put(o=o.astype(q.dtype), dout=do, lse=lse.astype(wide))
        self.put(results=True, delta=np.zeros(lse.shape, wide))
        like = {"dq": q, "dk": k, "dv": v}
        dlse = numbers(lse.shape, wide.name) if "dlse" in self.more else None
        if dlse is not None:
            self.put(dlse=dlse)
        adds_up = self.problem.itemsize > 2 and method == "single_pass"  # dk and dv in place, else dq in a workspace
        self.put(results=True, dq=np.empty_like(q))
        self.put(results=not adds_up, dk=np.zeros_like(k), dv=np.zeros_like(v))
        plan = plans.backward_plan(self.problem, self.device, self.strides, method, self.config, self.family)
        self.put_workspace(plan)
        if "dsink" in self.more:
            # A block of dsink has a head of both sequences; rows of the first sequence see no key.
            self.far.put("lse", np.full(lse.size, -np.inf, wide), (HEADS - 1) * lse.size)
            self.far.put("dsink", np.zeros(1, wide), HEADS - 1, result=True)
            like["dsink"] = np.zeros(1, wide)
        if "dbias" in self.more:
            bias, strides = self.arrays["bias"]
            self.far.put(
                "dbias",
                np.zeros(bias.shape, wide),
                (BATCH - 1) * strides[0] + (HEADS - 1) * strides[1],
                strides[2:],
            )
        self.run(plan.stages)
        results = self.results(**like)
        if "dbias" in self.more:
            results["dbias"] = self.far.take("dbias", np.zeros(bias.shape, wide))
        self.expectation(dlse).check(
            spec=method, **{n: x.astype(bias.dtype) if n == "dbias" else x for n, x in results.items()}
        )


def over_scores(name: str) -> dict[str, tuple[np.ndarray, tuple]]:
    """Returns arrays over scores for the last head, with strides that lead to offsets beyond 32 bits."""
    dtype, rows, *_ = FAMILIES[name]
    wide = accumulator(dtype)
    return {
        "alibi_slopes": (numbers((1, 1), wide), (2**33, 2**6, 0, 0)),
        "bias": (numbers((rows, rows), dtype), (2**39, 2**11, 2**32 + 2, 1)),
        "mask": (numbers((rows, rows), "float32", 3) < 0.7, (2**40, 2**6, 1, 2**31)),
        "key_padding_mask": (numbers((1, rows), "float32", 4) < 0.7, (2**33, 0, 0, 1)),
        "sink": (numbers((1,), wide), (0, 2**6, 0, 0)),
    }


@pytest.mark.parametrize("name", FAMILIES)
class TestTheLastHead:
    def test_forward(self, name):
        Case(name).check_forward()

    @pytest.mark.sample(method=("single_pass",))
    @pytest.mark.parametrize("method", ("single_pass", "two_pass"))
    def test_backward(self, name, method):
        Case(name).check_backward(method)

    def test_forward_of_two_head_dims(self, name):
        Case(name, head_dim_v=COLUMNS_OF_V[name]).check_forward()


@pytest.mark.matrix
def test_rows_of_more_than_256_columns():
    Case("sm80 wide").check_forward()
    Case("sm80 wide").check_backward("two_pass")


def test_wgmma_on_more_than_256_columns():
    Case("sm90 wide").check_forward()
    Case("sm90 wide").check_backward("two_pass")


@pytest.mark.sample(name=("sm80",), method=("single_pass",))
@pytest.mark.parametrize("method", ("single_pass", "two_pass"))
@pytest.mark.parametrize("name", FAMILIES)
def test_backward_of_two_head_dims(name, method):
    Case(name, head_dim_v=COLUMNS_OF_V[name]).check_backward(method)


#: Families with kernels that read arrays by the same lines as Hopper's, and packed sequences without tensor maps.
@pytest.mark.sample(name=("sm80",))
@pytest.mark.parametrize("name", ("simt", "sm80"))
class TestFeaturesOfTheLastHead:
    def test_forward(self, name):
        Case(name, arrays=over_scores(name)).check_forward()

    def test_backward(self, name):
        case = Case(name, arrays=over_scores(name), more=("dlse", "dsink", "dbias"))
        case.strides["dbias"] = case.strides["bias"]
        case.check_backward("two_pass")

    def test_packed_sequences(self, name):
        Case(name, packed=True).check_forward()
        Case(name, packed=True).check_backward("two_pass")


#: Calls of `fa2cupy.decode`, and the clusters of their tiles.
DECODED = {
    "sm90_latent": (decode_cases.Case("float16", (70, 20), heads=(16, 1), num_new=1, head_dim=576, head_dim_v=512), 1),
    "sm90_latent in clusters": (
        decode_cases.Case("float16", (70, 20), heads=(16, 1), num_new=1, head_dim=576, head_dim_v=512, page_size=16), 8
    ),
    "sm80": (decode_cases.Case("float16", (70, 20), heads=(6, 2), num_new=1, head_dim=40, page_size=16), 1),
}  # fmt: skip


def decode_far_apart(q, k_cache, v_cache, lengths, device, launched, **options) -> tuple[np.ndarray, np.ndarray]:
    """Runs `decode` of arrays whose pages or sequences, rows and heads are far apart; a block has whole sequences."""
    absent = dict.fromkeys(("k", "v", "block_table"))
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": lengths, **absent, **options}
    call = CallOptions(causal=True)
    problem, results = check_decode(arrays, call, {})
    o, lse = (np.empty(result.shape, result.dtype) for result in results)
    strides = dict.fromkeys(("q", "k_cache", "v_cache", "k", "v", "o"), (2**38, 2**31, 2**29))
    plan = plan_decode(problem, device, strides, choose("decode", problem, device, strides, call, is_launched=False))
    far, in_keys = Far(), np.shares_memory(k_cache, v_cache)
    for name, array in (arrays | {"o": o}).items():
        if array is not None and name in strides and not (in_keys and name in ("v", "v_cache")):
            far.put(name, array, 0, (*strides[name], 1), result=name == "o")
    if in_keys:
        far.addresses |= {"v_cache": far.addresses["k_cache"], "v": far.addresses["k"]}
    for name, array in (("cache_seqlens", lengths), ("block_table", arrays["block_table"]), ("lse", lse)):
        if array is not None:
            far.put(name, array, 0, result=name == "lse")
    (stage,) = plan.stages
    launched.append(stage.spec)
    far.run(stage, range(stage.blocks))
    for name, array in (("k_cache", k_cache), ("v_cache", v_cache))[: 1 if in_keys else 2]:
        array[...] = far.take(name, array)
    return far.take("o", o), far.take("lse", lse)


@pytest.mark.parametrize("name", DECODED)
def test_decode(name):
    case, cluster = DECODED[name]
    device = dataclasses.replace(DeviceInfo.named("sm_80" if name == "sm80" else "sm_90"), multiprocessors=64)
    device = device if cluster > 1 else dataclasses.replace(device, multiprocessors=8)
    launched: list = []
    decode_cases.check(functools.partial(decode_far_apart, device=device, launched=launched), case)
    assert [(spec.folder, spec.tile.cluster) for spec in launched] == [(name.split()[0], cluster)]
