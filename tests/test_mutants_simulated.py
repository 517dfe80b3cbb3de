"""Kernels broken on purpose, each in one place, and each caught: what the simulated tests are worth.

A mutant is a patch to the rendered source. It names what catches it: the interpreter (a race, an access out of bounds
or of uninitialised memory, a deadlock), the look at what was written, or the numerical rule. The kernel without the
patch passes the same check on the same problem.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

pytest.importorskip("cupy")

import ptxsim
from support.fake_cupy import place
from support.fake_gpu import backward, forward
from support.feature_cases import accumulator, extras, gradient_names, options_of
from support.simulated_problems import (
    FEW_MULTIPROCESSORS,
    HOPPER,
    at_level,
    check_dq,
    dq_on_hopper,
    draw,
    family_of,
    growing,
    jumping,
    leave_out,
    small_tiles,
)
from support.simulator import simulated_gpu
from support.strided_arrays import gapped, packed
from support.traced_cases import on_gpu, ready_made

from fa2cupy import TileConfig, reference
from fa2cupy.jit.spec import KernelSpec
from fa2cupy.testing import Expectation

pytestmark = [pytest.mark.simulated, pytest.mark.matrix]

#: What catches a mutant: the exception, and what its text says.
CATCHES = {
    "race": (ptxsim.PtxError, "shared memory race"),
    "blocks": (ptxsim.PtxError, "global memory race"),
    "bounds": (ptxsim.PtxError, "is out of bounds: at offset"),
    "proxy": (ptxsim.PtxError, "without fence.proxy.async"),
    "in flight": (ptxsim.PtxError, "of an unfinished wgmma is accessed"),
    "ends": (ptxsim.PtxError, "the thread ends with a bulk copy from shared memory in flight"),
    "lanes": (ptxsim.PtxError, "through the async proxy by lane 0, without __syncwarp"),
    "init fence": (ptxsim.PtxError, "without fence.mbarrier_init"),
    "wgmma fence": (ptxsim.PtxError, "accessed before it without wgmma.fence"),
    "uninitialised": (ptxsim.PtxError, "uninitialised"),
    "deadlock": (ptxsim.PtxError, "deadlock"),
    "unwritten": (AssertionError, "elements of .* are unwritten"),
    "stray": (AssertionError, "between the rows of .* are written"),
    "input": (AssertionError, "is an input, and was written"),
    "counter": (AssertionError, "tile counter is left at"),
    "numbers": (AssertionError, "% of the allowed"),
    "misaligned": (ptxsim.PtxError, "misaligned global access"),
    "root mean square": (AssertionError, "root mean square .* % of the allowed"),
}


@dataclass(frozen=True)
class Problem:
    """What a kernel is run on; the tiles are those of `small_tiles`, unless there is one here, for the sm90 family."""

    dtype: str = "float16"
    head_dim: int = 64
    lengths: tuple[int, int] = (69, 99)
    heads: tuple[int, int] = (2, 1)
    batch: int = 1
    causal: bool = True
    few_multiprocessors: bool = False  # so that heads are scheduled in sections
    packed: str = ""  # names of arrays that lie between others
    growing: bool = False  # scores that leave the softmax's row shift behind
    hopper_tile: TileConfig | None = None
    feature: str = ""  # as `feature_cases.options_of` calls it
    view: Callable = place  # how the feature's arrays lie
    function: str = ""  # as `traced_cases.ready_made` calls it
    scores: Callable = tuple  # from inputs to those with other scores
    rows_ahead: int = 0  # of no sequence, ahead of the one that the others are of
    device: str = ""  # instead of the one of the tests of Hopper's kernels
    num_splits: int | None = 1  # blocks that share a tile
    precision: str | None = None

    @property
    def features(self) -> dict:
        """The keywords of the feature and of the function, their arrays on the device."""
        function = {}
        if self.function:
            cases = ready_made(self.batch, self.heads[0], *self.lengths, wide=accumulator(self.dtype))
            function = on_gpu(cases[self.function].options)
        if not self.feature:
            return function
        sizes = {"batch": self.batch, "num_heads": self.heads[0]}
        sizes |= dict(zip(("seqlen_q", "seqlen_k"), self.lengths, strict=True))
        given = options_of(self.feature, self.dtype, sizes)
        return function | {name: self.view(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}

    @property
    def offsets(self) -> dict:
        """Those of packed sequences, if they are."""
        names = ("cu_seqlens_q", "cu_seqlens_k")
        own = (place(np.array([self.rows_ahead, length], "int32")) for length in self.lengths)
        return dict(zip(names, own, strict=True)) if self.rows_ahead else {}


@dataclass(frozen=True)
class Mutant:
    """A kernel, what is changed in it, and what must catch the change."""

    name: str
    operation: str
    old: str
    new: str
    caught_by: str
    problem: Problem = Problem()

    def __call__(self, spec: KernelSpec, text: str) -> str:
        """The source, patched if it is this kernel's."""
        if spec.operation != self.operation or spec.is_fallback:
            return text
        if text.count(self.old) != 1:  # no AssertionError, which could pass for a mutant that is caught
            raise ValueError(f"{self.old!r} occurs {text.count(self.old)} times in the source of {spec}")
        return text.replace(self.old, self.new)


PAIRS = (69, 98)  # whose scores have rows that all begin on even elements
VECTORS = Problem(feature="bias", lengths=(69, 104))  # whose scores have rows that all begin on 16 bytes
OF_ANOTHER_ROW = (
    "params_.mask_strides.offset(batch_, head_, row, column)",
    "params_.mask_strides.offset(batch_, head_, 0, column)",
)
ONE_HEAD = Problem(heads=(1, 1))
GROUPS = Problem(heads=(4, 2))
FULL = Problem(causal=False)
MASKED_ROWS = Problem(lengths=(94, 37))
GROWING = Problem(lengths=(35, 128), causal=False, growing=True)
WIDE = Problem(head_dim=160)
SECTIONS = Problem(lengths=(65, 65), batch=5, few_multiprocessors=True)
ONE_GROUP = TileConfig(64, 48, 8, 2, 2)
#: Functions of the caller's, in two families.
FUNCTIONS = {
    name: Problem(function=name, head_dim=40, lengths=(40, 70))
    for name in ("softcap", "alibi", "t5_relative", "document")
}
IEEE_FUNCTIONS = {name: dataclasses.replace(problem, dtype="float32") for name, problem in FUNCTIONS.items()}
DROPPED_FUNCTION = dataclasses.replace(FUNCTIONS["softcap"], feature="dropout")


def with_small_rows(inputs: tuple) -> tuple:
    """The rows of two blocks of V are small beside one that has next to no weight. No term of a score is above 32."""
    q, k, v, _ = inputs
    large = [0, -1]
    q[..., 0], k[:, large] = 1, 0
    k[:, large, :, 0] = -30 * q.shape[3] ** 0.5
    v[:, large] *= np.float32(1e10)
    return inputs


def with_units(inputs: tuple) -> tuple:
    """V grows with the key, so that its blocks have different units."""
    inputs[2][:, 64:] *= 16
    return inputs


def with_small_gradients(inputs: tuple) -> tuple:
    inputs[3][...] *= np.float32(1e-7)
    return inputs


PARTS = Problem("float32", 64, (200, 290), precision="split")
PARTS_OF_GROUPS = dataclasses.replace(PARTS, heads=(4, 2))
PIECES = dataclasses.replace(PARTS, head_dim=256, lengths=(150, 200))
PARTS_OF_SMALL_ROWS = dataclasses.replace(PARTS, scores=with_small_rows)
PARTS_OF_BIAS = dataclasses.replace(PARTS, feature="bias")
PARTS_OF_UNITS = dataclasses.replace(PARTS, scores=with_units)
PARTS_OF_SMALL_GRADIENTS = dataclasses.replace(PARTS, scores=with_small_gradients)
AMPERE_PARTS = dataclasses.replace(PARTS, device="sm_80")
AMPERE_PARTS_OF_GROUPS = dataclasses.replace(PARTS_OF_GROUPS, device="sm_80")
#: Whose tiles have K and V, or Q and dO, in one stage each.
AMPERE_WIDE_PARTS = dataclasses.replace(PARTS_OF_GROUPS, head_dim=128, device="sm_80")
WAIT_FOR_DP = "            wgmma_wait<0>();\n            pin(dp);\n"
RELEASE_DO = "            release_dout();\n"
HOPPER_TILES = Problem(lengths=(200, 150), hopper_tile=ONE_GROUP)  # several for a block
HELD_BIAS = Problem(feature="bias", lengths=(70, 104), hopper_tile=ONE_GROUP)
HELD_TRANSPOSED = Problem(feature="bias", lengths=(70, 136), hopper_tile=TileConfig(64, 128, 12, 2))
HELD_MASK = Problem(feature="mask", lengths=(70, 112), hopper_tile=ONE_GROUP)
HELD_TRANSPOSED_MASK = Problem(feature="mask", lengths=(70, 144), hopper_tile=TileConfig(64, 128, 12, 2))
HOPPER_PANELS = Problem(head_dim=128, hopper_tile=TileConfig(128, 64, 12, 2))
HOPPER_MASKED_ROWS = Problem(lengths=(200, 70), hopper_tile=ONE_GROUP)
HOPPER_SKIPPING = Problem(lengths=(300, 330), hopper_tile=TileConfig(192, 64, 16, 3))
OUTPUT_IN_PARTS = Problem(head_dim=200, lengths=(70, 70), hopper_tile=TileConfig(128, 64, 12, 2))
HOPPER_ONE_WAY_OUT = Problem(head_dim=256, lengths=(200, 90), hopper_tile=TileConfig(128, 48, 12, 2))  # through dO
HOPPER_GROWING = Problem(lengths=(35, 320), causal=False, growing=True, hopper_tile=ONE_GROUP)
# Ragged, and long enough that every buffer is used again: keys of a group of their own, dQ by rows, columns and
# transposed; and divided between dK and dV.
HOPPER_ROWS = Problem(lengths=(600, 150), causal=False, hopper_tile=TileConfig(128, 128, 12, 2))
HOPPER_COLUMNS = Problem(head_dim=96, lengths=(310, 150), hopper_tile=TileConfig(64, 128, 12, 2))
HOPPER_TRANSPOSED = Problem(head_dim=128, lengths=(390, 150), hopper_tile=TileConfig(80, 128, 12, 2))
HOPPER_DIVIDED = Problem(head_dim=256, lengths=(310, 100), hopper_tile=TileConfig(64, 64, 12, 2))
SIMT = Problem("float32", 59, (21, 27))
SIMT_ALIGNED = Problem("float32", 60, (21, 27))  # whose rows are copied 16 bytes at a time
SIMT_LEVEL = Problem("float32", 40, (11, 29), heads=(1, 1), scores=functools.partial(at_level, score=90.0))
SIMT_GROUPS = Problem("float32", 59, (21, 27), heads=(4, 2))
#: The barriers behind copies to shared memory, as comments name them.
SIMT_COPIES = (
    ("forward", "Q and K are there"),
    ("forward", "V is there"),
    ("backward_dq", "Q, dO and V are there"),
    ("backward_dq", "K is there"),
    ("backward_dkdv", "K, V, dO, lse and delta are there"),
    ("backward_dkdv", "Q is there"),
)

AHEAD = Problem(lengths=(109, 139), rows_ahead=70)
SHARES = Problem(lengths=(37, 230), num_splits=3)
MANY_SHARES = Problem(lengths=(70, 130), num_splits=8)
HOPPER_SHARES = Problem(lengths=(37, 330), num_splits=3, hopper_tile=ONE_GROUP)
HOPPER_SHARES_AHEAD = Problem(lengths=(109, 139), rows_ahead=70, num_splits=3, hopper_tile=ONE_GROUP)
HOPPER_MANY_SHARES = Problem(lengths=(170, 200), num_splits=8, hopper_tile=ONE_GROUP)
HOPPER_SHARES_OF_GROUPS = Problem(lengths=(300, 330), num_splits=6, hopper_tile=TileConfig(192, 64, 16, 3))
#: A number, rounded to a bit less than the dtype has.
SPLIT = Problem(heads=(6, 2), num_splits=2)  # the second share begins in the middle of a head
HOPPER_SPLIT = Problem(heads=(3, 1), lengths=(390, 260), hopper_tile=TileConfig(128, 128, 12, 2), num_splits=2)
A_BIT_LESS = {
    "float16": "__uint_as_float((__float_as_uint({}) + 0x2000u) & 0xffffc000u)",
    "bfloat16": "__uint_as_float((__float_as_uint({}) + 0x10000u) & 0xfffe0000u)",
}

#: Between the bound of a loop over 8-column tiles and its body.
EACH = "; ++n)\n#pragma unroll\n                    for (int e = 0; e < 4; ++e)"

MUTANTS = (
    # sm90: the barriers between producer and consumers
    Mutant(
        "no wait for K",
        "forward",
        "mbarrier_wait(memory_.full_key(keys_.slot()), keys_.parity());\n        if constexpr (kTakeTurns)",
        "if constexpr (kTakeTurns)",
        "uninitialised",
        HOPPER_TILES,
    ),
    Mutant(
        "no wait for V",
        "forward",
        "mbarrier_wait(memory_.full_value(values_.slot()), values_.parity());\n        issue_output(p);\n        if",
        "issue_output(p);\n        if",
        "uninitialised",
        HOPPER_TILES,
    ),
    Mutant(
        "no wait for Q",
        "forward",
        "skip_keys(keys);\n        mbarrier_wait(memory_.full_query(queries_.slot()), queries_.parity());\n"
        "        mbarrier_wait(memory_.full_key",
        "skip_keys(keys);\n        mbarrier_wait(memory_.full_key",
        "race",
        HOPPER_TILES,
    ),
    Mutant(
        "K over one that is in use",
        "forward",
        "mbarrier_wait(memory_.empty_key(stage), keys_.parity() ^ 1);",
        "",
        "race",
        HOPPER_TILES,
    ),
    Mutant(
        "K handed back before its scores are there",
        "forward",
        "wgmma_wait<1>();\n        pin(scores_);\n        release_key();",
        "release_key();\n        wgmma_wait<1>();\n        pin(scores_);",
        "race",
        HOPPER_TILES,
    ),
    Mutant(
        "O used before it is there",
        "forward",
        "wgmma_wait<0>();\n        pin(output_);\n        release_value();",
        "pin(output_);\n        release_value();",
        "in flight",
        HOPPER_TILES,
    ),
    Mutant(
        "the last V never comes",
        "forward",
        "load_value(tile, kHasBegin ? tile.first_key_tile : 0);\n            if",
        "if",
        "deadlock",
        HOPPER_TILES,
    ),
    Mutant(
        "half of Q is not waited for",
        "forward",
        "mbarrier_arrive_expect(full, Shape::kQueryBytes);",
        "mbarrier_arrive_expect(full, Shape::kQueryBytes / 2);",
        "race",
        HOPPER_PANELS,
    ),
    Mutant(
        "a tile's slot is never handed back",
        "forward",
        "        }\n        if (lane_ == 0) mbarrier_arrive(tile.empty);",
        "        }",
        "deadlock",
        Problem(lengths=(1000, 40), hopper_tile=ONE_GROUP),
    ),
    # sm90: the way out
    Mutant(
        "no proxy fence before the store of O",
        "forward",
        "async_proxy_fence();\n            __syncwarp();",
        "__syncwarp();",
        "proxy",
        HOPPER_TILES,
    ),
    Mutant(
        "O's box rewritten while it is stored",
        "forward",
        "if (lane_ == 0) tma_store_wait_read();\n        __syncwarp();",
        "",
        "race",
        HOPPER_TILES,
    ),
    Mutant(
        "O with another swizzle",
        "forward",
        "(n % 8 + lane / 16) ^ (row & 7);",
        "(n % 8 + lane / 16);",
        "numbers",
        HOPPER_TILES,
    ),
    Mutant("the counter is not reset", "forward", "params.tile_counter[0] = 0;", "", "counter", HOPPER_TILES),
    Mutant(
        "the counter is reset without an order",
        "forward",
        "atom.acq_rel.gpu.global",
        "atom.relaxed.gpu.global",
        "blocks",
        HOPPER_TILES,
    ),
    Mutant(
        "the last to leave does not acquire the others' draws",
        "forward",
        "atom.acq_rel.gpu.global",
        "atom.release.gpu.global",
        "blocks",
        HOPPER_TILES,
    ),
    # sm90: the numbers
    Mutant(
        "K and V of another head",
        "forward",
        "tile.head / params_.heads_per_group",
        "0",
        "numbers",
        Problem(heads=(4, 2), hopper_tile=ONE_GROUP),
    ),
    Mutant(
        "every warp takes the rows of the first",
        "forward",
        "tile.first_row() + group_ * kGroupRows + warp_ * 16;",
        "tile.first_row() + group_ * kGroupRows;",
        "unwritten",
        HOPPER_TILES,
    ),
    Mutant(
        "V's panels in one place",
        "forward",
        "matrix_descriptor(memory.value(0), Shape::kKeyPanelBytes)",
        "matrix_descriptor(memory.value(0), 0)",
        "numbers",
        HOPPER_PANELS,
    ),
    Mutant(
        "O not rescaled",
        "forward",
        "if (__builtin_expect(!kept, 0)) multiply_output(rescale);",
        "",
        "numbers",
        HOPPER_GROWING,
    ),
    Mutant(
        "a group passes over its own keys",
        "forward",
        "max_of(from_first(own.end), 1)",
        "max_of(from_first(own.end) - 1, 1)",
        "numbers",
        Problem(lengths=(200, 260), hopper_tile=TileConfig(192, 64, 16, 3)),
    ),
    # sm90: the backward's barriers
    Mutant(
        "no wait for Q, backward",
        "backward",
        "mbarrier_wait(memory_.full_query(stage), parity);\n        Base::template start_scores",
        "Base::template start_scores",
        "proxy",
        HOPPER_ROWS,
    ),
    Mutant(
        "no wait for dO",
        "backward_dkdv",
        "mbarrier_wait(memory_.full_dout(stage), parity);\n        Base::template start_scores",
        "Base::template start_scores",
        "uninitialised",
        HOPPER_TRANSPOSED,
    ),
    Mutant(
        "next query tile into the stage in use",
        "backward",
        "mbarrier_wait(memory_.empty_query(stage), ring.parity() ^ 1);\n            load_queries",
        "load_queries",
        "race",
        HOPPER_TRANSPOSED,
    ),
    Mutant(
        "next lse into the stage in use",
        "backward",
        "mbarrier_wait(kLse ? memory_.empty_query(stage) : memory_.empty_dout(stage), ring.parity() ^ 1);",
        "",
        "race",
        HOPPER_ROWS,
    ),
    Mutant(
        "dO is never handed back",
        "backward_dkdv",
        "pin(dv_);\n            arrive(memory_.empty_dout(stage));\n        }\n        wgmma_wait<0>();",
        "pin(dv_);\n        }\n        wgmma_wait<0>();",
        "deadlock",
        HOPPER_ROWS,
    ),
    Mutant(
        "no proxy fence behind dS",
        "backward",
        "async_proxy_fence();\n            mbarrier_arrive(memory_.full_ds(ring.slot()));",
        "mbarrier_arrive(memory_.full_ds(ring.slot()));",
        "proxy",
        HOPPER_COLUMNS,
    ),
    Mutant(
        "no wait for the other group's dS",
        "backward",
        "mbarrier_wait(memory_.full_ds(buffer), read_.parity());",
        "",
        "race",
        HOPPER_TRANSPOSED,
    ),
    Mutant(
        "dS rewritten while the other group multiplies it",
        "backward",
        "mbarrier_wait(memory_.empty_ds(buffer), written_.parity() ^ 1);",
        "",
        "race",
        HOPPER_COLUMNS,
    ),
    Mutant(
        "dQ added up before it is there",
        "backward",
        "wgmma_wait<1>();\n                pin(dq);\n                add_dq(dq, step);",
        "add_dq(dq, step);",
        "in flight",
        HOPPER_ROWS,
    ),
    Mutant(
        "gradients into K while it is read",
        "backward",
        "if constexpr (kWithDq)\n            Base::wait_for_last_dq();\n        else\n",
        "if constexpr (!kWithDq)\n",
        "race",
        HOPPER_TRANSPOSED,
    ),
    Mutant(
        "divided: no wait for P",
        "backward",
        "mbarrier_wait(memory_.full_p(exchanged_.slot()), exchanged_.parity());",
        "",
        "race",
        HOPPER_DIVIDED,
    ),
    Mutant(
        "divided: P rewritten before it is read",
        "backward_dkdv",
        "mbarrier_wait(memory_.empty_p(exchanged_.slot()), exchanged_.parity() ^ 1);",
        "",
        "deadlock",
        # Only with more stages than buffers: a stage is not filled again before its P is read.
        Problem(head_dim=160, lengths=(310, 100), hopper_tile=TileConfig(48, 64, 12, 3)),
    ),
    Mutant(
        "divided: dV into V while it is read",
        "backward",
        "Base::wait_for_last_dq();\n        } else if",
        "} else if",
        "race",
        HOPPER_DIVIDED,
    ),
    # sm90: the backward's numbers
    Mutant(
        "lse in plain order",
        "backward_dkdv",
        "lane / 4 * 16 + lane % 4 * 2 + i / 2 * 8 + i % 2;",
        "4 * lane + i;",
        "numbers",
        HOPPER_TRANSPOSED,
    ),
    Mutant(
        "lse of 8 bits",
        "backward",
        "float mid = split(x), low = split(mid);",
        "split(x); float mid = 0.0f, low = 0.0f;",
        "numbers",
        HOPPER_TRANSPOSED,
    ),
    Mutant(
        "no proxy fence behind lse and delta",
        "backward",
        "x[i]);\n                async_proxy_fence();",
        "x[i]);",
        "proxy",
        HOPPER_TRANSPOSED,
    ),
    Mutant(
        "rows past the end with an infinite P",
        "backward_dkdv",
        "x[i] = kLse && x[i] == -common::infinity<float>() ? x[i] : x[i] * factor;",
        "x[i] = x[i] * factor;",
        "numbers",
        HOPPER_ROWS,
    ),
    Mutant(
        "tiles without the mask",
        "backward_dkdv",
        "group.template step<true>",
        "group.template step<false>",
        "numbers",
        HOPPER_TRANSPOSED,
    ),
    Mutant(
        "dS with another swizzle",
        "backward",
        "chunk = (warp_ * 2 + lane_ / 8 % 2) ^ (lane_ % 8);",
        "chunk = warp_ * 2 + lane_ / 8 % 2;",
        "numbers",
        HOPPER_COLUMNS,
    ),
    Mutant(
        "dQ of all tiles to the first",
        "backward",
        "workspace_ += static_cast<int64>(tiles_to_walk_) * Workspace::kTileElements;",
        "",
        "numbers",
        HOPPER_ROWS,
    ),
    Mutant(
        "dQ of a head's first tile to one that sees none of the keys",
        "backward",
        "next.tile == own_.tiles.begin ? query_tiles() - own_.tiles.end + own_.tiles.begin + 1 : 1",
        "1",
        "numbers",
        Problem(lengths=(300, 300), heads=(4, 2), hopper_tile=TileConfig(128, 128, 12, 2)),
    ),
    Mutant(
        "dK without the scale", "backward", "(dk_, params_.softmax_scale,", "(dk_, 1.0f,", "numbers", HOPPER_COLUMNS
    ),
    Mutant(
        "query heads of another group",
        "backward",
        "where.head * params.heads_per_group,\n",
        "where.head,\n",
        "numbers",
        Problem(heads=(4, 2), hopper_tile=TileConfig(128, 128, 12, 2)),
    ),
    Mutant(
        "K's panels in one place, for dQ",
        "backward",
        "(Shape::kDqByRows ? 0 : kGroup) * Shape::kKeyPanelBytes",
        "0 * Shape::kKeyPanelBytes",
        "numbers",
        HOPPER_COLUMNS,
    ),
    Mutant(
        "divided: both groups add the same columns",
        "backward",
        "kProbability ? 2 : 0,",
        "0,",
        "numbers",
        HOPPER_DIVIDED,
    ),
    Mutant(
        "dQ's workspace read as if it were not transposed",
        "convert_dq",
        "packed(x[2 * g].item[2 * i + j], x[2 * g + 1].item[2 * i + j])",
        "packed(x[2 * g].item[2 * j + i], x[2 * g + 1].item[2 * j + i])",
        "numbers",
        HOPPER_TRANSPOSED,
    ),
    # sm90: dQ
    Mutant(
        "dQ: no wait for Q",
        "backward_dq",
        "mbarrier_wait(memory_.full_query(queries_.slot()), queries_.parity());",
        "",
        "race",
        HOPPER_TILES,
    ),
    Mutant(
        "dQ: no wait for dO",
        "backward_dq",
        "mbarrier_wait(memory_.full_dout(queries_.slot()), queries_.parity());",
        "",
        "race",
        HOPPER_TILES,
    ),
    Mutant(
        "dQ: no wait for V",
        "backward_dq",
        "mbarrier_wait(memory_.full_value(values_.slot()), values_.parity());\n        multiply_rows",
        "multiply_rows",
        "race",
        HOPPER_TILES,
    ),
    Mutant(
        "dQ: Q over one that is in use",
        "backward_dq",
        "mbarrier_wait(empty, queries_.parity() ^ 1);",
        "",
        "race",
        Problem(lengths=(1000, 40), hopper_tile=ONE_GROUP),
    ),
    Mutant(
        "dQ: as many stages of V as of K",
        "backward_dq",
        "RingPosition<Shape::kValueStages> values_;\n    RingPosition<kTileSlots> tiles_;\n\n  private:",
        "RingPosition<Shape::kStages> values_;\n    RingPosition<kTileSlots> tiles_;\n\n  private:",
        "deadlock",
        HOPPER_SKIPPING,
    ),
    Mutant(
        "dQ: K handed back before dQ is there",
        "backward_dq",
        "wgmma_wait<kPending>();\n        pin(dq_);\n        pin(ds_);\n        release_key();",
        "release_key();\n        wgmma_wait<kPending>();\n        pin(dq_);\n        pin(ds_);",
        "race",
        HOPPER_TILES,
    ),
    Mutant(
        "dQ: the K of the next scores",
        "backward_dq",
        "memory_.key(keys_.slot()), Shape::kKeyPanelBytes)",
        "memory_.key(keys_.next().slot()), Shape::kKeyPanelBytes)",
        "race",
        HOPPER_TILES,
    ),
    Mutant(
        "dQ: dP used before it is there",
        "backward_dq",
        "wgmma_wait<0>();\n        pin(dp_);",
        "pin(dp_);",
        "in flight",
        HOPPER_TILES,
    ),
    Mutant(
        "dQ: V of what is passed over is kept",
        "backward_dq",
        "values_.parity());\n                release_value();",
        "values_.parity());\n                values_.advance();",
        "deadlock",
        HOPPER_SKIPPING,
    ),
    Mutant(
        "dQ: the group's other warps still read dO",
        "backward_dq",
        "barrier_sync(kOutputBarrier + group_, kGroupThreads);",
        "",
        "race",
        HOPPER_ONE_WAY_OUT,
    ),
    Mutant(
        "dQ: dO handed back before dQ has left through it",
        "backward_dq",
        "tma_store_wait_read();\n                mbarrier_arrive(memory_.empty_dout",
        "mbarrier_arrive(memory_.empty_dout",
        "race",
        HOPPER_ONE_WAY_OUT,
    ),
    Mutant(
        "dQ: no proxy fence before the store",
        "backward_dq",
        "async_proxy_fence();\n        __syncwarp();",
        "__syncwarp();",
        "proxy",
        HOPPER_TILES,
    ),
    Mutant(
        "dQ: rows without a key",
        "backward_dq",
        "natural == -common::infinity<float>() ? natural :",
        "false ? natural :",
        "numbers",
        HOPPER_MASKED_ROWS,
    ),
    Mutant(
        "dQ: lse past the end",
        "backward_dq",
        "const bool valid = at < own.seqlen_q;",
        "const bool valid = true;",
        "bounds",
        HOPPER_TILES,
    ),
    Mutant(
        "dQ: delta of one row for both",
        "backward_dq",
        "(p, dp, -minus_delta_[i], params_);",
        "(p, dp, -minus_delta_[0], params_);",
        "numbers",
        HOPPER_TILES,
    ),
    Mutant("dQ: no scale", "backward_dq", "dq_.value[n][e] *= params_.softmax_scale;", ";", "numbers", HOPPER_TILES),
    Mutant(
        "dQ: the panels of K in one place",
        "backward_dq",
        "memory_.key(keys_.slot()), Shape::kKeyPanelBytes)",
        "memory_.key(keys_.slot()), 0)",
        "numbers",
        HOPPER_PANELS,
    ),
    # sm80: the ring of key tiles
    Mutant(
        "no barrier in the ring",
        "forward",
        "cp_async_wait<kStages - 2>();\n        }\n        __syncthreads();",
        "cp_async_wait<kStages - 2>();\n        }",
        "race",
    ),
    Mutant("no wait for the copy", "forward", "cp_async_wait<kStages - 2>();", "", "race"),
    Mutant(
        "wait for the tile before",
        "backward_dq",
        "cp_async_wait<kStages - 2>();",
        "cp_async_wait<kStages - 1>();",
        "race",
    ),
    Mutant(
        "next tile into the slot in use",
        "forward",
        "load(position - (kStages - 1));",
        "load(position - kStages);",
        "race",
    ),
    Mutant(
        "no wait where no key tile was",
        "forward",
        "cp_async_wait<0>();\n        __syncthreads();\n        store(params, where, share, softmax, output, smem",
        "store(params, where, share, softmax, output, smem",
        "race",
        MASKED_ROWS,
    ),
    # sm80: tiles in shared memory
    Mutant(
        "swizzle on one side",
        "forward",
        "chunk_ = (chunk ^ Tile::swizzle(row)) << 4;",
        "chunk_ = chunk << 4;",
        "numbers",
    ),
    Mutant(
        "no column predicate on load",
        "forward",
        "row_valid && (kHeadDim == Tile::kCols || chunk * 8 < kHeadDim);",
        "row_valid;",
        "bounds",
        Problem(head_dim=40, heads=(1, 1)),
    ),
    Mutant(
        "no row predicate on load",
        "backward",
        "row_valid = first_row + row < num_rows;",
        "row_valid = true;",
        "bounds",
        ONE_HEAD,
    ),
    Mutant(
        "no row predicate on store", "forward", "if (first_row + row < num_rows && (kHeadDim", "if ((kHeadDim", "bounds"
    ),
    Mutant(
        "k read with the strides of v",
        "forward",
        "(slot(position), k, k_stride,",
        "(slot(position), k, v_stride,",
        "bounds",
        Problem(packed="v"),
    ),
    Mutant(
        "v read with the strides of k",
        "forward",
        "KeyTile::kBytes, v, v_stride,",
        "KeyTile::kBytes, v, k_stride,",
        "uninitialised",
        Problem(packed="v"),
    ),
    Mutant(
        "o stored with the strides of q",
        "forward",
        "store_rows<QTile, kM16, kHeadDim>(smem, warp_row, 0, output, o, params.o_strides.row",
        "store_rows<QTile, kM16, kHeadDim>(smem, warp_row, 0, output, o, params.q_strides.row",
        "stray",
        Problem(heads=(1, 1), packed="o"),
    ),
    Mutant(
        "o written over q",
        "forward",
        "Element* o = params.o + params.o_strides.offset(where.batch, 0, where.head);",
        "Element* o = const_cast<Element*>(params.q) + params.q_strides.offset(where.batch, 0, where.head);",
        "input",
    ),
    # Masks and tile ranges
    Mutant(
        "causal mask one key too far",
        "forward",
        "query + diagonal + 1) : seqlen_k;",
        "query + diagonal + 2) : seqlen_k;",
        "numbers",
    ),
    Mutant("causal mask one query too far", "backward", "key - diagonal : 0;", "key - diagonal + 1 : 0;", "numbers"),
    Mutant(
        "ragged edge one key too far",
        "forward",
        "query + diagonal + 1) : seqlen_k;",
        "query + diagonal + 1) : seqlen_k + 1;",
        "numbers",
        FULL,
    ),
    Mutant(
        "last ragged tile left out", "backward_dq", "ceil_div(seen_by_any, kBc)};", "seen_by_any / kBc};", "numbers"
    ),
    Mutant(
        "diagonal from the top left",
        "forward",
        "query + diagonal + 1) : seqlen_k;",
        "query + 1) : seqlen_k;",
        "numbers",
    ),
    Mutant(
        "blocks of the last section miscounted",
        "forward",
        "const int32 tile = rank / heads;",
        "const int32 tile = rank / schedule.heads_per_section;",
        "bounds",
        SECTIONS,
    ),
    # Heads
    Mutant(
        "query heads dealt out to key heads in turn",
        "forward",
        "* kBr;\n        const int32 head_kv = where.head / params.heads_per_group;",
        "* kBr;\n        const int32 head_kv = where.head % (params.num_heads / params.heads_per_group);",
        "numbers",
        GROUPS,
    ),
    Mutant(
        "only the first head of a group",
        "backward_dkdv",
        "tiles_per_head * tiles.num_heads(params.heads_per_group);",
        "tiles_per_head;",
        "numbers",
    ),
    # The softmax
    Mutant(
        "sum not rescaled",
        "forward",
        "sum[i] = sum[i] * rescale[i] + share;",
        "sum[i] = sum[i] + share;",
        "numbers",
    ),
    Mutant(
        "output rescaled by the other row",
        "forward",
        f"kD / 8{EACH} output[m].value[n][e] *= rescale[e / 2];",
        f"kD / 8{EACH} output[m].value[n][e] *= rescale[0];",
        "numbers",
    ),
    Mutant(
        "no slow path",
        "forward",
        "if (!__all_sync(kFullWarp, attempt<kChains>(scores, to_base2, p, share))) return false;",
        "attempt<kChains>(scores, to_base2, p, share);",
        "numbers",
        GROWING,
    ),
    Mutant(
        "log-sum-exp of a row without keys",
        "forward",
        "lse[i] = empty ? -infinity<Real>() : row_shift",
        "lse[i] = empty ? Real(0) : row_shift",
        "numbers",
        MASKED_ROWS,
    ),
    Mutant(
        "-inf - (-inf)",
        "forward",
        "highest[i] == -infinity<Real>() ? Real(0) : highest[i];",
        "highest[i];",
        "numbers",
        MASKED_ROWS,
    ),
    Mutant(
        "last log-sum-exp not written",
        "forward",
        "if (lane % 4 == 0 && row < params.seqlen_q) lse[row]",
        "if (lane % 4 == 0 && row < params.seqlen_q - 1) lse[row]",
        "unwritten",
    ),
    # sm80: wide heads, where pairs of warps share rows
    Mutant(
        "no barrier before the partner's P",
        "forward",
        "write_p(p);\n                barrier_sync(barrier(), 64);",
        "write_p(p);",
        "race",
        WIDE,
    ),
    Mutant(
        "no barrier before the partner's maximum",
        "forward",
        "stat[m][i]);\n        barrier_sync(barrier(), 64);",
        "stat[m][i]);",
        "race",
        WIDE,
    ),
    Mutant(
        "each warp keeps its own vote",
        "forward",
        "kept = barrier_all(barrier(), 64, fits);",
        "barrier_all(barrier(), 64, fits);\nkept = __all_sync(common::kFullWarp, fits);",
        "deadlock",
        Problem(head_dim=160, lengths=(35, 320), causal=False, growing=True),
    ),
    # sm80: the backward by key tiles
    Mutant(
        "no barrier at the top of an iteration",
        "backward",
        "cp_async_wait<0>();\n            block_barrier();\n            if",
        "cp_async_wait<0>();\n            if",
        "race",
    ),
    Mutant(
        "dV leaves before the last dQ has read K",
        "backward",
        "if (steps > 0) add_dq(previous, (steps + 1) % 2);\n            block_barrier();",
        "if (steps > 0) add_dq(previous, (steps + 1) % 2);",
        "race",
    ),
    Mutant("P taken before it is written", "backward_dkdv", "barrier_sync(1 + pair, 64);", "", "race"),
    Mutant("P never announced", "backward_dkdv", "barrier_arrive(1 + pair, 64);", "", "deadlock"),
    Mutant(
        "one buffer for the row statistics",
        "backward",
        "store_row_stat(row_stat, (t + 1) % 2);",
        "store_row_stat(row_stat, t % 2);",
        "race",
    ),
    Mutant(
        "row statistics past the end",
        "backward",
        "const bool valid = row < params.seqlen_q;",
        "const bool valid = true;",
        "bounds",
    ),
    Mutant(
        "dK without the scale",
        "backward_dkdv",
        "common::kept_scale<Spec>(params) : params.softmax_scale;",
        "common::kept_scale<Spec>(params) : 1.0f;",
        "numbers",
    ),
    Mutant("dQ stored instead of added", "backward", "red.relaxed.gpu.global.add.v4.f32", "st.global.v4.f32", "blocks"),
    Mutant(
        "dQ without delta",
        "backward_dq",
        "common::kProductsFromDelta<Spec> ? minus_delta[m][e / 2] : 0.0f;",
        "0.0f;",
        "numbers",
    ),
    Mutant("dQ converted without the scale", "convert_dq", "params.softmax_scale * workspace", "workspace", "numbers"),
    Mutant("dQ converted past the end", "convert_dq", "if (row >= rows.length) continue;", "", "bounds"),
    Mutant("delta past the end", "delta", "if (lane == 0 && valid)", "if (lane == 0)", "bounds"),
    Mutant("delta clears too little", "delta", "offset < bytes;", "offset + kBytes < bytes;", "unwritten"),
    Mutant("delta clears too much", "delta", "offset < bytes;", "offset <= bytes;", "bounds"),
    Mutant(
        "delta leaves shares",
        "delta",
        "clear(params.shares, params.shares_bytes);",
        "",
        "unwritten",
        Problem(num_splits=2),
    ),
    # features
    Mutant(
        "window: one key more on the left",
        "forward",
        "return query + diagonal - window.left;",
        "return query + diagonal - window.left - 1;",
        "numbers",
        Problem(feature="window"),
    ),
    Mutant(
        "window: the first key tile is left out",
        "backward_dq",
        "first_row + diagonal - window.left) / kBc;",
        "first_row + diagonal - window.left) / kBc + 1;",
        "numbers",
        Problem(feature="window", causal=False),
    ),
    Mutant(
        "window: dQ of the next head where this one's ends",
        "backward",
        "query_tiles() - own_.tiles.end + own_.tiles.begin + 1",
        "own_.tiles.begin + 1",
        "numbers",
        dataclasses.replace(HOPPER_COLUMNS, feature="window", lengths=(310, 310), heads=(4, 2)),
    ),
    Mutant(
        "cap without its derivative",
        "backward_dkdv",
        "1 - tanh * tanh",
        "Real(1)",
        "numbers",
        Problem(feature="softcap"),
    ),
    Mutant(
        "bias past the last key",
        "forward",
        "column = min_of(key, last_key);",
        "column = key;",
        "bounds",
        Problem(feature="bias"),
    ),
    Mutant(
        "bias in pairs past the last key",
        "forward",
        "bool yes = key + kLastKey < params_.seqlen_k;",
        "bool yes = true;",
        "bounds",
        Problem(feature="bias", lengths=PAIRS),
    ),
    Mutant(
        "bias in shared memory read before it has arrived",
        "forward",
        "cp_async_wait_all();\n        __syncwarp();",
        "__syncwarp();",
        "race",
        HELD_BIAS,
    ),
    Mutant(
        "bias in shared memory of the key tile before",
        "forward",
        "own.score_tile(tile, block - 1)",
        "own.score_tile(tile, block)",
        "numbers",
        HELD_BIAS,
    ),
    Mutant(
        "bias in shared memory of one half of a k-step",
        "forward",
        "Tile::offset(row_, 2 * s + chunk_)",
        "Tile::offset(row_, 2 * s)",
        "numbers",
        HELD_BIAS,
    ),
    Mutant(
        "bias in shared memory from past the last key",
        "forward",
        "return max_of(0, min_of(16, 2 * (params.seqlen_k - key)));",
        "return 16;",
        "bounds",
        HELD_BIAS,
    ),
    Mutant(
        "transposed bias in shared memory of eight keys of sixteen",
        "backward_dkdv",
        "lane / 16 * 8, lane / 8 % 2)",
        "lane / 16 * 8, 0)",
        "numbers",
        HELD_TRANSPOSED,
    ),
    Mutant(
        "transposed bias in shared memory of rows past the last one for the next head",
        "backward_dkdv",
        "is_last ? own_.tiles.begin : step.tile + 1}",
        "step.tile + 1}",
        "numbers",
        HELD_TRANSPOSED,
    ),
    Mutant(
        "mask in shared memory read before it has arrived",
        "forward",
        "cp_async_wait_all();\n#pragma",
        "#pragma",
        "race",
        HELD_MASK,
    ),
    Mutant(
        "mask in shared memory from past the last key",
        "forward",
        "max_of(0, min_of(16, params.seqlen_k - key))",
        "16",
        "bounds",
        HELD_MASK,
    ),
    Mutant(
        "mask in shared memory of rows past the last one",
        "forward",
        "min_of(first_query + index / kChunks, last_row)",
        "first_query + index / kChunks",
        "bounds",
        HELD_MASK,
    ),
    Mutant(
        "mask in shared memory of one of a lane's two rows",
        "forward",
        "load_shared<uint16>(address + 8 * kRowBytes)",
        "load_shared<uint16>(address)",
        "numbers",
        HELD_MASK,
    ),
    Mutant(
        "mask in shared memory of half of the bytes",
        "forward",
        "* 0x00204081, bits, 4)",
        "* 0x00200081, bits, 4)",
        "numbers",
        HELD_MASK,
    ),
    Mutant(
        "transposed mask in shared memory of eight keys of sixteen",
        "backward_dkdv",
        "(16 * e + r % 2 * 8)",
        "(16 * e)",
        "numbers",
        HELD_TRANSPOSED_MASK,
    ),
    Mutant("mask of another row", "forward", *OF_ANOTHER_ROW, "numbers", Problem(feature="mask")),
    Mutant(
        "mask in pairs of another row", "forward", *OF_ANOTHER_ROW, "numbers", Problem(feature="mask", lengths=PAIRS)
    ),
    Mutant(
        "dbias past the last key",
        "backward_dq",
        "if (8 * n + e < left) atomicAdd",
        "if (row) atomicAdd",
        "bounds",
        Problem(feature="bias of heads", batch=2),
    ),
    Mutant(
        "dbias in pairs of one key",
        "backward_dq",
        '"f"(even), "f"(odd) :',
        '"f"(even), "f"(even) :',
        "numbers",
        Problem(feature="bias of heads", batch=2, lengths=PAIRS),
    ),
    Mutant(
        "dbias in fours of two keys",
        "backward_dq",
        "x[1][e] = odd ? second : received;",
        "x[1][e] = second;",
        "numbers",
        Problem(feature="bias of heads", batch=2, lengths=VECTORS.lengths),
    ),
    Mutant(
        "dbias in fours past the last row",
        "backward_dq",
        "queries >= 16 && keys >= 8 * kN8",
        "keys >= 8 * kN8",
        "bounds",
        Problem(feature="bias of heads", batch=2, lengths=VECTORS.lengths),
    ),
    Mutant(
        "full dbias of another row of the tile",
        "backward_dq",
        "T* row = first + strides.offset(0, 0, Fragment::row(i, lane), 0);",
        "T* row = first + strides.offset(0, 0, Fragment::row(0, lane), 0);",
        "unwritten",
        VECTORS,
    ),
    Mutant(
        "full dbias of other lanes of a quad",
        "backward_dq",
        "is_upper ? lower : upper, step",
        "is_upper ? upper : lower, step",
        "numbers",
        VECTORS,
    ),
    Mutant(
        "full dbias rounded in pairs of one key",
        "backward_dq",
        "pack<T>(ds.value[n + w][2 * i], ds.value[n + w][2 * i + 1])",
        "pack<T>(ds.value[n + w][2 * i], ds.value[n + w][2 * i])",
        "numbers",
        VECTORS,
    ),
    Mutant(
        "full dbias in vectors past the last key",
        "backward_dq",
        "if (is_wide && key + 8 <= end) {",
        "if (is_wide) {",
        "bounds",
        VECTORS,
    ),
    Mutant(
        "full dbias past the last key",
        "backward_dq",
        "if (key + e < end)",
        "if (key + e < 8 * kN8)",
        "bounds",
        Problem(feature="bias"),
    ),
    Mutant(
        "full dbias without zeros in tiles that are skipped",
        "backward_dq",
        "clear_keys(row, strides.column, end, params.seqlen_k, first.position.lane);",
        "",
        "unwritten",
        VECTORS,
    ),
    Mutant(
        "zeros of a full dbias in vectors alone",
        "backward_dq",
        "for (int32 key = begin + lane; key < end; key += 32) row[key * stride] = {};",
        "",
        "unwritten",
        Problem(feature="bias", lengths=PAIRS),
    ),
    Mutant(
        "dbias of one row of a warp",
        "backward_dq",
        "sum = column_sum<kLanes, kStep>(sum);",
        "",
        "numbers",
        Problem(feature="bias of keys"),
    ),
    Mutant(
        "sink without its share",
        "forward",
        "rescale + kExp(sink - shift);",
        "rescale;",
        "numbers",
        Problem(feature="sink"),
    ),
    Mutant(
        "dropout: a round less",
        "forward",
        "round < 7",
        "round < 6",
        "numbers",
        Problem(feature="dropout"),
    ),
    Mutant(
        "dropout of other elements: words",
        "forward",
        "draws.item[2 * i + n]",
        "draws.item[2 * n + i]",
        "numbers",
        Problem(feature="dropout"),
    ),
    Mutant(
        "dropout of other elements: halves of a word",
        "forward",
        "0xbb99",
        "0x99bb",
        "numbers",
        Problem(feature="dropout"),
    ),
    Mutant(
        "dropout of other elements: queries",
        "forward",
        "8 * (query / 16) + query % 8;",
        "8 * (query / 16) + query % 4;",
        "numbers",
        Problem(feature="dropout"),
    ),
    Mutant(
        "dropout of other elements: keys",
        "forward",
        "4 * (key / 16) + key % 8 / 2;",
        "4 * (key / 16) + key % 8;",
        "numbers",
        Problem(feature="dropout"),
    ),
    Mutant(
        "dropout of other elements: the next tile",
        "forward",
        "key_word(key) + 4 * s);",
        "key_word(key) + 8 * s);",
        "numbers",
        Problem(feature="dropout"),
    ),
    Mutant(
        "dropout: a carry from half to half",
        "forward",
        "(pair & 0x7fff7fffu) + (threshold & 0x7fff7fffu);",
        "pair + (threshold & 0x7fff7fffu);",
        "numbers",
        Problem(feature="dropout"),
    ),
    Mutant(
        "dropout: a threshold of 15 bits",
        "forward",
        "(pair & threshold) | ((pair | threshold) & sums);",
        "sums;",
        "numbers",
        Problem(feature="dropout"),
    ),
    Mutant(
        "dropout in dQ: halves of a word",
        "backward_dq",
        "(e == 0 ? pair << 16 : pair) <=",
        "(e == 1 ? pair << 16 : pair) <=",
        "numbers",
        Problem(feature="dropout"),
    ),
    Mutant(
        "dropout in S^T: the call of another query",
        "backward",
        "query_word(query) + 8 * s + odd",
        "query_word(query) + 8 * s",
        "numbers",
        Problem(feature="dropout"),
    ),
    Mutant(
        "dropout in S^T: the next tile",
        "backward",
        "query_word(query) + 8 * s + odd",
        "query_word(query) + 4 * s + odd",
        "numbers",
        Problem(feature="dropout"),
    ),
    Mutant(
        "dropout in S^T: halves of another lane",
        "backward",
        "__shfl_xor_sync(kFullWarp, theirs, 4);",
        "__shfl_xor_sync(kFullWarp, theirs, 8);",
        "numbers",
        Problem(feature="dropout"),
    ),
    Mutant(
        "dropout in S^T: one's own halves are sent",
        "backward",
        "odd ? 0x5410 : 0x7632",
        "odd ? 0x7632 : 0x5410",
        "numbers",
        Problem(feature="dropout"),
    ),
    Mutant(
        "dropout in S^T: received halves change places",
        "backward_dkdv",
        "0x3254 + 0x22 * b",
        "0x3276 - 0x22 * b",
        "numbers",
        Problem(feature="dropout"),
    ),
    Mutant(
        "dropout in S^T: its two tiles change places",
        "backward_dkdv",
        "result.item[2 * a + b] =",
        "result.item[2 * b + a] =",
        "numbers",
        Problem(feature="dropout"),
    ),
    Mutant(
        "dropout: P keeps what is dropped",
        "backward",
        "cvt.rn.relu.f16x2.f32",
        "cvt.rn.f16x2.f32",
        "numbers",
        Problem(feature="dropout"),
    ),
    Mutant(
        "dropout on Hopper: halves of another lane",
        "backward",
        "__shfl_xor_sync(kFullWarp, theirs, 4);",
        "__shfl_xor_sync(kFullWarp, theirs, 8);",
        "numbers",
        dataclasses.replace(HOPPER_TRANSPOSED, lengths=(170, 150), feature="dropout"),
    ),
    Mutant(
        "dropout on Hopper: the next tile",
        "forward",
        "key_word(key) + 4 * s);",
        "key_word(key) + 8 * s);",
        "numbers",
        dataclasses.replace(HOPPER_TILES, lengths=(80, 100), feature="dropout"),
    ),
    Mutant(
        "dropout: delta is dropped, too",
        "backward",
        "(dropped ? minus_delta : kept);",
        "(dropped ? Real(0) : kept);",
        "numbers",
        Problem(feature="dropout"),
    ),
    # simt
    Mutant(
        "simt: dropout of other elements",
        "forward",
        "query & 8 ? lower : upper",
        "query & 8 ? upper : lower",
        "numbers",
        dataclasses.replace(SIMT, feature="dropout"),
    ),
    *(
        Mutant(
            f"simt: no wait, {name}",
            operation,
            f"wait_for_copies();\n            __syncthreads();  // {name}",
            f"__syncthreads();  // {name}",
            "race",
            SIMT,
        )
        for operation, name in SIMT_COPIES
    ),
    *(
        Mutant(f"simt: no barrier, {name}", operation, f"__syncthreads();  // {name}", f"// {name}", "race", SIMT)
        for operation, name in (
            *SIMT_COPIES,
            ("backward", "P is there"),
            ("backward", "P is used"),
            ("backward", "dS is there"),
            ("backward_dkdv", "dO, lse, delta and what was posted are free"),
        )
    ),
    *(
        Mutant(
            f"simt: no column predicate on load{name}",
            "forward",
            "row < num_rows && column < kHeadDim);",
            "row < num_rows);",
            "bounds",
            problem,
        )
        for name, problem in (("", SIMT), (" of vectors", SIMT_ALIGNED))
    ),
    Mutant(
        "simt: no row predicate on load",
        "backward_dq",
        "row < num_rows && column < kHeadDim);",
        "column < kHeadDim);",
        "bounds",
        SIMT,
    ),
    Mutant("simt: no row predicate on store", "backward_dq", "if (row >= num_rows) break;", "", "bounds", SIMT),
    Mutant(
        "simt: no column predicate on store",
        "backward_dq",
        "if (column + v < kHeadDim) first[v]",
        "first[v]",
        "blocks",
        SIMT,
    ),
    Mutant(
        "simt: no column predicate on store of vectors",
        "backward_dq",
        "if (column < kHeadDim) *reinterpret_cast<Vec*>(first)",
        "*reinterpret_cast<Vec*>(first)",
        "blocks",
        SIMT_ALIGNED,
    ),
    Mutant(
        "simt: columns of another warp",
        "backward",
        "column = own_column + Keys::Sums::col(chunk + c, lane);",
        "column = Keys::Sums::col(chunk + c, lane);",
        "numbers",
        SIMT,
    ),
    Mutant("simt: no row predicate on sums", "backward", "if (key >= num_keys) break;", "", "bounds", SIMT),
    Mutant(
        "simt: no column predicate on sums",
        "backward",
        "if (column + v < Rows::kHeadDim) atomicAdd",
        "atomicAdd",
        "bounds",
        SIMT,
    ),
    Mutant(
        "simt: no column predicate on sums of vectors",
        "backward",
        "if (column < Rows::kHeadDim) common::add_global",
        "common::add_global",
        "bounds",
        SIMT_ALIGNED,
    ),
    Mutant(
        "simt: query heads of another group",
        "backward_dkdv",
        "int32 head = where.head * params.heads_per_group",
        "int32 head = where.head",
        "numbers",
        SIMT_GROUPS,
    ),
    Mutant(
        "simt: global sums overwritten",
        "backward",
        "atomicAdd(first + v, x.item[v]);",
        "first[v] = x.item[v];",
        "blocks",
        SIMT,
    ),
    Mutant("simt: dS without delta", "backward_dq", "(ds(i, j) - delta(i, j));", "ds(i, j);", "numbers", SIMT),
    Mutant(
        "simt: rescale of the first row for all",
        "forward",
        "fma(sum, factor[i], of_tile)",
        "fma(sum, factor[0], of_tile)",
        "numbers",
        SIMT,
    ),
    Mutant(
        "simt: one chain of additions",
        "forward",
        "kSumsInLevels = sizeof(Real) == 4;",
        "kSumsInLevels = false;",
        "numbers",
        SIMT_LEVEL,
    ),
    Mutant("simt: longer chains", "forward", "kSumsInLevels ? 8", "kSumsInLevels ? 32", "numbers", SIMT_LEVEL),
    # What lanes have to do each for itself, and what must be over in the end
    Mutant(
        "one lane's proxy fence before the store of O",
        "forward",
        "async_proxy_fence();\n            __syncwarp();",
        "if (lane_ == 0) async_proxy_fence();\n            __syncwarp();",
        "proxy",
        HOPPER_TILES,
    ),
    Mutant(
        "O is stored before the warp has met",
        "forward",
        "async_proxy_fence();\n            __syncwarp();",
        "async_proxy_fence();",
        "lanes",
        HOPPER_TILES,
    ),
    Mutant(
        "the second part of O over the first one",
        "forward",
        "if (first > 0) wait_for_box();",
        "",
        "race",
        OUTPUT_IN_PARTS,
    ),
    Mutant(
        "O's box is written before the warp has met",
        "forward",
        "if (lane_ == 0) tma_store_wait_read();\n        __syncwarp();",
        "if (lane_ == 0) tma_store_wait_read();",
        "race",
        HOPPER_TILES,
    ),
    Mutant("no wait for the last store of O", "forward", "if (lane_ == 0) tma_store_wait();", "", "ends", HOPPER_TILES),
    Mutant("mbarriers unknown to TMA", "forward", "        mbarrier_init_fence();\n", "", "init fence", HOPPER_TILES),
    Mutant(
        "no fence before the scores",
        "forward",
        "pin(scores_);\n        wgmma_fence();",
        "pin(scores_);",
        "wgmma fence",
        HOPPER_TILES,
    ),
    # Edges: packed sequences that start late, code for older GPUs, strides, extreme scores, long sums, roundings
    Mutant(
        "a tile ahead of the first sequence",
        "forward",
        "return tile >= 0 && tile < ceil_div(length, rows_of_tile);",
        "return tile < ceil_div(length, rows_of_tile);",
        "numbers",
        AHEAD,
    ),
    Mutant(
        "rows ahead of the first sequence taken for its own",
        "clear_backward",
        "return row >= first && row - first < length;",
        "return row - first < length;",
        "unwritten",
        AHEAD,
    ),
    Mutant(
        "before sm_90: dbias in pairs of one key",
        "backward_dq",
        "atomicAdd(address + 1, odd);",
        "atomicAdd(address + 1, even);",
        "numbers",
        Problem(feature="bias of heads", batch=2, lengths=PAIRS, device="sm_80"),
    ),
    Mutant(
        "before sm_90: dQ in the order of sm_90",
        "backward",
        "add_global(address + e * kElementStride, x[e]);",
        "add_global(address + e, x[e]);",
        "numbers",
        Problem(device="sm_80", feature="window", causal=False),
    ),
    Mutant(
        "bias in pairs that are no neighbours",
        "forward",
        "params_.bias_strides.column == 1 && is_even",
        "is_even",
        "uninitialised",
        Problem(feature="bias", lengths=PAIRS, view=gapped),
    ),
    Mutant(
        "mask in pairs that are no neighbours",
        "forward",
        "params_.mask_strides.column == 1 && is_even",
        "is_even",
        "uninitialised",
        Problem(feature="mask", lengths=PAIRS, view=gapped),
    ),
    Mutant(
        "a row shift of the softmax that no score has been",
        "forward",
        "row_shift[i] = -infinity<Real>();",
        "row_shift[i] = 0;",
        "numbers",
        Problem(scores=functools.partial(at_level, score=-24.0)),
    ),
    Mutant(
        "a P that float16 does not hold",
        "forward",
        "kLargestShare = 4096.0f;",
        "kLargestShare = 262144.0f;",
        "numbers",
        Problem(lengths=(67, 96), causal=False, scores=functools.partial(jumping, most=17.5)),
    ),
    Mutant(
        "dsink of as many rows as a block has threads",
        "dsink",
        "row < params.seqlen_q; row += blockDim.x",
        "row < min_of(params.seqlen_q, static_cast<int32>(blockDim.x)); row += blockDim.x",
        "numbers",
        Problem("float32", 24, (301, 9), feature="sink", causal=False),
    ),
    # shares of key tiles
    Mutant(
        "a share that ends with the tile",
        "backward",
        "return {begin, min_of(begin + most, steps)};",
        "return {begin, steps};",
        "numbers",
        SPLIT,
    ),
    Mutant(
        "a share that begins with the head",
        "backward",
        "Spec::kSplit && head == first_step().head ? first_step().tile : tiles.begin",
        "tiles.begin",
        "deadlock",
        HOPPER_SPLIT,
    ),
    Mutant(
        "a share that ends with the head",
        "backward_dkdv",
        "return head == limits.end.head ? limits.end.tile : tiles.end;",
        "return tiles.end;",
        "deadlock",
        HOPPER_SPLIT,
    ),
    Mutant(
        "the workspace of dQ from the group's first step",
        "backward",
        "const QueryStep step = own_.at(own_.first_step());",
        "const QueryStep step = {own_.first_query_head, own_.tiles.begin};",
        "numbers",
        HOPPER_SPLIT,
    ),
    Mutant(
        "the masked query tiles of a share to the end of the range",
        "backward",
        "const int32 masked_end = Spec::kSplit ? min_of(own.tiles.full_begin, end) : own.tiles.full_begin;",
        "const int32 masked_end = own.tiles.full_begin;",
        "deadlock",
        HOPPER_SPLIT,
    ),
    Mutant(
        "shares with copies where they are added",
        "backward",
        "if constexpr (kAdds) copy /= params.num_splits;",
        "",
        "bounds",
        SPLIT,
    ),
    Mutant(
        "shares without a step that leave nothing",
        "backward_dkdv",
        "Shares::put_zeros(Shares::of_block(params));",
        "",
        "uninitialised",
        dataclasses.replace(HOPPER_SPLIT, num_splits=16),
    ),
    Mutant(
        "dK in the place of dV",
        "backward",
        "Shares::of_block(params) + kProbability * Shares::kGradientElements",
        "Shares::of_block(params)",
        "numbers",
        SPLIT,
    ),
    Mutant(
        "one share for all",
        "sum_dkdv",
        "copy < params.num_copies",
        "copy < 1",
        "numbers",
        SPLIT,
    ),
    Mutant(
        "rows of the next sixteen",
        "sum_dkdv",
        "if (row + 8 * i >= left) continue;",
        "",
        "bounds",
        SPLIT,
    ),
    Mutant(
        "dV without the scale of what dropout keeps",
        "sum_dkdv",
        "static_cast<float>(kept_scale<Spec>(params))",
        "1.0f",
        "numbers",
        dataclasses.replace(SPLIT, feature="dropout"),
    ),
    Mutant(
        "dK without the scale",
        "sum_dkdv",
        ": params.softmax_scale;\n\n        const int64 between_copies",
        ": 1.0f;\n\n        const int64 between_copies",
        "numbers",
        SPLIT,
    ),
    # Several blocks for a query tile
    Mutant(
        "all shares weigh the same",
        "merge_forward",
        "weight[i] = exp2_approx((share_lse[8 * i] - shift[i]) * static_cast<float>(kLog2e));",
        "weight[i] = 1.0f;",
        "numbers",
        SHARES,
    ),
    Mutant(
        "lse of the largest share alone",
        "merge_forward",
        "shift[i] + log(total[i])",
        "shift[i]",
        "numbers",
        SHARES,
    ),
    Mutant(
        "a row that no share sees a key of",
        "merge_forward",
        "shift[i] = shift[i] == -infinity<float>() ? 0.0f : shift[i];",
        ";",
        "numbers",
        Problem(lengths=(94, 37), num_splits=2),
    ),
    Mutant(
        "a sink in every share",
        "forward",
        "if (Spec::kSplit && share > 0) return -infinity<Real>();",
        "",
        "numbers",
        Problem(lengths=(37, 230), num_splits=3, feature="sink"),
    ),
    *(
        Mutant(
            f"{name}: every share begins with the first key tile",
            "forward",
            "tiles.begin += steps.begin;",
            "",
            "numbers",
            problem,
        )
        for name, problem in (("sm80", SHARES), ("sm90", HOPPER_SHARES))
    ),
    Mutant(
        "sm80: shares one over the other",
        "forward",
        "(head * params.num_tiles + where.tile) * kTileElements",
        "where.tile * kTileElements",
        "blocks",
        SHARES,
    ),
    Mutant(
        "sm90: shares one over the other",
        "forward",
        "head * params.num_splits + share",
        "head * params.num_splits",
        "blocks",
        HOPPER_SHARES,
    ),
    Mutant(
        "shares of a sequence where those of another are",
        "forward",
        "tile += packed_axis<false>(params).template first_tile<Spec::kBr>(where.batch);",
        ";",
        "uninitialised",
        HOPPER_SHARES_AHEAD,
    ),
    Mutant(
        "sm80: columns of a pair's second warp over those of its first",
        "forward",
        "Shares::put(own, output[m], pair_row / 16 + m, half * kHalfChunks, lane);",
        "Shares::put(own, output[m], pair_row / 16 + m, 0, lane);",
        "uninitialised",
        Problem(head_dim=160, lengths=(37, 130), num_splits=3),
    ),
    Mutant(
        "sm90: an empty share has no key tile",
        "forward",
        "max_of(keys.end, Spec::kSplit ? keys.begin + 1 : 1)",
        "max_of(keys.end, 1)",
        "deadlock",
        HOPPER_MANY_SHARES,
    ),
    Mutant(
        "sm90: masked key tiles before the share",
        "forward",
        "max_of(key_tile - first, 0)",
        "key_tile - first",
        "race",
        HOPPER_MANY_SHARES,
    ),
    Mutant(
        "sm90: masked by the positions of another share",
        "forward",
        "if constexpr (Spec::kSplit) block += tile.first_key_tile();\n            common::mask_scores",
        "common::mask_scores",
        "numbers",
        HOPPER_SHARES,
    ),
    Mutant(
        "sm90: a group goes on behind the share",
        "forward",
        "if constexpr (Spec::kSplit) skipped = max_of(skipped, 0);",
        "",
        "deadlock",
        HOPPER_SHARES_OF_GROUPS,
    ),
    Mutant(
        "sm90: a share's slot is never handed back",
        "forward",
        "__syncwarp();\n        if (lane_ == 0) mbarrier_arrive(tile.empty);",
        "",
        "deadlock",
        HOPPER_MANY_SHARES,
    ),
    Mutant(
        "sm90: a share of the tile before the next",
        "forward",
        "tile = published();",
        ";",
        "numbers",
        HOPPER_MANY_SHARES,
    ),
    Mutant(
        "parts: rows that are not there",
        "split_inputs",
        "const bool valid = row < rows.length;",
        "const bool valid = true;",
        "bounds",
        PARTS,
    ),
    Mutant(
        "parts: the remainder of the low part alone",
        "split_inputs",
        "    x -= common::unpack_lo<float16>(part);",
        "    x = 0.0f;",
        "numbers",
        PARTS,
    ),
    Mutant(
        "parts: chunks as they come",
        "split_inputs",
        "(column % kPanelColumns / 8 ^ row % 8) * 8",
        "column % kPanelColumns",
        "numbers",
        PARTS,
    ),
    Mutant(
        "parts: exceptions are stored by several blocks",
        "split_inputs",
        "if (exception) atomicOr(&params.exceptions[head_kv], 1);",
        "if (exception) params.exceptions[head_kv] = 1;",
        "blocks",
        PARTS_OF_SMALL_ROWS,
    ),
    Mutant(
        "parts: small rows are no exception",
        "split_inputs",
        "bool exception = loses_bits(of_row, largest);",
        "bool exception = false;",
        "numbers",
        PARTS_OF_SMALL_ROWS,
    ),
    Mutant(
        "parts: a warp's largest element is the block's",
        "split_inputs",
        "for (int w = 0; w < Spec::kWarps; ++w) largest = max_of(largest, of_warps[w]);",
        "largest = of_warps[warp];",
        "numbers",
        PARTS,
    ),
    Mutant(
        "parts: nobody waits for the other warps' largest elements",
        "split_inputs",
        "        __syncthreads();\n        uint32 largest = 0;",
        "        uint32 largest = 0;",
        "race",
        PARTS,
    ),
    Mutant(
        "parts: K is released before S is there",
        "forward",
        "        wgmma_wait<0>();\n        scores = products.sum();\n        release_key();",
        "        release_key();\n        wgmma_wait<0>();\n        scores = products.sum();",
        "race",
        PARTS,
    ),
    Mutant(
        "parts: Q is not released",
        "forward",
        "if (is_last && lane_ == 0) mbarrier_arrive(memory_.empty_query(0));",
        "",
        "deadlock",
        PARTS,
    ),
    Mutant(
        "parts: a chunk of O is read in flight",
        "forward",
        "            wgmma_wait<0>();\n            pin(part);",
        "            pin(part);",
        "in flight",
        PARTS,
    ),
    Mutant(
        "parts: V may still be on its way",
        "forward",
        "        mbarrier_wait(memory_.full_value(values_.slot()), values_.parity());\n        add_product(",
        "        add_product(",
        "uninitialised",
        PARTS,
    ),
    Mutant(
        "parts: chunks have the first one's unit",
        "forward",
        "first_key_block_ + block * kChunks + c;",
        "first_key_block_ + block * kChunks;",
        "numbers",
        PARTS_OF_UNITS,
    ),
    Mutant(
        "parts: the producer overtakes the readers of V",
        "forward",
        "        mbarrier_wait(memory_.empty_value(value), values_.parity() ^ 1);",
        "",
        "race",
        PARTS,
    ),
    Mutant(
        "parts: the producer overtakes the readers of Q",
        "forward",
        "        mbarrier_wait(memory_.empty_query(0), queries_.parity() ^ 1);",
        "",
        "race",
        PARTS,
    ),
    Mutant(
        "parts: low parts of both operands",
        "forward",
        "part_of_product<kRowsAreKeys>(t) * (kRightPart / 16)",
        "part_of_product<!kRowsAreKeys>(t) * (kRightPart / 16)",
        "numbers",
        PARTS,
    ),
    Mutant(
        "parts: dP is read in flight",
        "backward_dq",
        WAIT_FOR_DP,
        "            pin(dp);\n",
        "in flight",
        PARTS,
    ),
    Mutant(
        "parts: dO is not released",
        "backward_dq",
        "        mbarrier_arrive(memory_.empty_dout(0));",
        "",
        "deadlock",
        PARTS,
    ),
    Mutant(
        "parts: dS as large as it comes",
        "backward_dq",
        "        row_scales(scores, scale, inverse);",
        "        scale[0] = scale[1] = inverse[0] = inverse[1] = 1.0f;",
        "numbers",
        PARTS_OF_SMALL_GRADIENTS,
    ),
    Mutant(
        "parts: the second chain of S is left out",
        "forward",
        "            add_rows(first_, second_, one);",
        "",
        "numbers",
        dataclasses.replace(PARTS, head_dim=128),
    ),
    Mutant(
        "parts: the start of dP stays in it",
        "backward_dq",
        "rest = fma(start, (2 * kChains - 1) * unit, delta);",
        "rest = delta;",
        "numbers",
        PARTS,
    ),
    Mutant(
        "parts: dO is released before dP is there",
        "backward_dkdv",
        f"{WAIT_FOR_DP}{RELEASE_DO}",
        f"{RELEASE_DO}{WAIT_FOR_DP}",
        "race",
        dataclasses.replace(PARTS_OF_GROUPS, head_dim=128),
    ),
    Mutant(
        "parts: nobody waits for K",
        "backward_dkdv",
        "            mbarrier_wait(memory_.full_key(), 0);",
        "",
        "race",
        PARTS,
    ),
    Mutant(
        "parts: the statistics of the first lane's queries",
        "backward_dkdv",
        "Scores::col(0, lane_) * 4 + ",
        "",
        "numbers",
        PARTS,
    ),
    Mutant(
        "parts: the queries of the group's first head alone",
        "backward_dkdv",
        "step(head_kv * params.heads_per_group + member, tile);",
        "step(head_kv * params.heads_per_group, tile);",
        "numbers",
        PARTS_OF_GROUPS,
    ),
    Mutant(
        "parts: statistics are stored over those of another step",
        "backward_dkdv",
        "            mbarrier_wait(empty, ring.parity() ^ 1);\n",
        "",
        "race",
        PARTS_OF_GROUPS,
    ),
    Mutant(
        "parts: the second panel again",
        "backward_dkdv",
        "rows + panel * (kBr * kPanelRowBytes / 16), panel,",
        "rows, panel,",
        "numbers",
        dataclasses.replace(PARTS, head_dim=128),
    ),
    Mutant(
        "parts: dQ of dS with a scale for each key",
        "backward",
        "factor[i] = common::pack<float16>(unit[i] * inverse, unit[i] * inverse);",
        "factor[i] = 0x3c003c00;",
        "numbers",
        PARTS,
    ),
    Mutant(
        "parts: dbias without zeros in tiles that are skipped",
        "backward_dq",
        "16, keys.begin * kBc, keys.end * kBc);",
        "16, keys.begin * kBc, params_.seqlen_k);",
        "unwritten",
        PARTS_OF_BIAS,
    ),
    Mutant(
        "parts: dbias of the tile before",
        "backward_dq",
        "return {tile.batch(), tile.head(), first_row(tile), block * kBc, lane_};",
        "return {tile.batch(), tile.head(), first_row(tile), max_of(block - 1, 0) * kBc, lane_};",
        "unwritten",
        PARTS_OF_BIAS,
    ),
    Mutant(
        "parts: the largest unit of a lane's own keys",
        "backward",
        "unit = max_of(unit, __shfl_xor_sync(common::kFullWarp, unit, mask));",
        ";",
        "numbers",
        PARTS_OF_SMALL_GRADIENTS,
    ),
    Mutant(
        "parts: units of dS are read before the other warps have given theirs",
        "backward",
        "        barrier_sync(kGroupBarrier + group_, kGroupThreads);\n",
        "",
        "race",
        PARTS,
    ),
    Mutant(
        "parts: dS is not fenced",
        "backward",
        "            async_proxy_fence();\n            mbarrier_arrive(memory_.full_ds(group));",
        "            mbarrier_arrive(memory_.full_ds(group));",
        "proxy",
        PARTS,
    ),
    Mutant(
        "parts: nobody waits for dS",
        "backward",
        "        mbarrier_wait(memory_.full_ds(group_), ds_.parity());\n",
        "",
        "race",
        PARTS,
    ),
    Mutant(
        "parts: dQ is added in flight",
        "backward",
        "                wgmma_wait<0>();\n            pin(product[panel]);",
        "                ;\n            pin(product[panel]);",
        "in flight",
        PARTS,
    ),
    Mutant(
        "parts: dQ of the first panel of K twice",
        "backward",
        "key_rows() + panel * kKeyPanel);",
        "key_rows());",
        "numbers",
        dataclasses.replace(PARTS, head_dim=128),
    ),
    Mutant(
        "parts: dQ without the unit of K",
        "backward",
        "store_ds(parts, inverse) * key_unit_;",
        "store_ds(parts, inverse);",
        "numbers",
        PARTS,
    ),
    Mutant(
        "parts: dQ of another query head",
        "backward",
        "common::first_workspace_tile<Spec>(params, where_.batch, head)",
        "common::first_workspace_tile<Spec>(params, where_.batch, where_.head)",
        "numbers",
        PARTS_OF_GROUPS,
    ),
    Mutant(
        "parts: Q is released before dK is there",
        "backward",
        "                wgmma_wait<1>();\n                pin(product);\n                release_query();",
        "                release_query();\n                wgmma_wait<1>();\n                pin(product);",
        "race",
        PARTS_OF_GROUPS,
    ),
    # sm90, beyond head_dim 128: parts in pieces
    *(
        Mutant(f"pieces: {name}", operation, old, new, caught_by, PIECES)
        for operation, name, old, new, caught_by in (
            (
                "forward",
                "one may still be on its way",
                "        mbarrier_wait(ring_.full(position_.slot()), position_.parity());\n",
                "",
                "uninitialised",
            ),
            (
                "forward",
                "one is released before S is there",
                "            wgmma_wait<0>();\n            pin(chain);\n            release();",
                "            release();\n            wgmma_wait<0>();\n            pin(chain);",
                "race",
            ),
            (
                "forward",
                "the producer overtakes the readers",
                "        mbarrier_wait(ring_.empty(slot), position_.parity() ^ 1);\n",
                "",
                "race",
            ),
            (
                "forward",
                "the low parts of another panel",
                "(part * Layout::kPanels + panel)",
                "(part * Layout::kPanels + panel * (1 - part))",
                "numbers",
            ),
            (
                "forward",
                "S without the panels behind the first",
                "            if (panel > 0) add_rows(x, next, one);",
                "",
                "numbers",
            ),
            (
                "forward",
                "S from the last panel's on",
                "wgmma_scores_in_place(y, a, b, never);",
                "wgmma_scores_in_place(y, a, b, !never);",
                "numbers",
            ),
            (
                "forward",
                "a panel of O from the last one's on",
                "wgmma_output_in_place(y, a, b, never);",
                "wgmma_output_in_place(y, a, b, !never);",
                "numbers",
            ),
            ("forward", "V of keys that a group skips is kept", "        rings_.values().skip();\n", "", "deadlock"),
            (
                "backward_dq",
                "both warp groups begin with the same key tile",
                "keys.end - 1 - turn",
                "keys.end - 1",
                "deadlock",
            ),
            (
                "backward_dq",
                "dQ of one warp group",
                "for (int e = 0; e < 4; ++e) x[e] += other[e];",
                "for (int e = 0; e < 0; ++e) x[e] += other[e];",
                "numbers",
            ),
            (
                "backward_dq",
                "dQ goes where Q is still read",
                "        barrier_sync(kSharersBarrier, 2 * kGroupThreads);  // both",
                "        // both",
                "race",
            ),
            (
                "backward_dq",
                "dQ is read before it is there",
                "        barrier_sync(kSharersBarrier, 2 * kGroupThreads);\n",
                "",
                "race",
            ),
            (
                "backward_dq",
                "dP goes on from the last panel's",
                "            if (panel > 0) start_next(x);\n",
                "",
                "numbers",
            ),
            (
                "backward_dq",
                "Q is loaded over a dQ that is not fenced",
                "        async_proxy_fence();\n        __syncwarp();\n        release_queries();",
                "        __syncwarp();\n        release_queries();",
                "proxy",
            ),
            ("backward_dkdv", "the group of dV keeps the Q of dK", "            queries_.skip();\n", "", "deadlock"),
            (
                "backward_dkdv",
                "nobody waits for statistics",
                "        mbarrier_wait(memory_.full_statistics(statistics_.slot()), statistics_.parity());\n",
                "",
                "race",
            ),
            (
                "backward_dkdv",
                "delta is released before it is read",
                "            Base::take_gradients(scores, dp, delta, units.dp);\n            release_statistics();",
                "            release_statistics();\n            Base::take_gradients(scores, dp, delta, units.dp);",
                "race",
            ),
            (
                "backward_dkdv",
                "the first panel of K and V alone",
                "left + along_columns<kLeftPanel>(panel * kStepsOfPanel + s)",
                "left + along_columns<kLeftPanel>(s)",
                "numbers",
            ),
        )
    ),
    Mutant(
        "parts: dQ of rows that are not there",
        "convert_dq",
        "if (row >= rows.length || column >= Spec::kHeadDim) continue;",
        "if (column >= Spec::kHeadDim) continue;",
        "bounds",
        PARTS,
    ),
    Mutant(
        "parts: pairs of dQ at any address",
        "convert_dq",
        "const bool in_pairs = reinterpret_cast<uint64>(dq) % 8 == 0 && params.dq_strides.row % 2 == 0;",
        "const bool in_pairs = true;",
        "misaligned",
        dataclasses.replace(PARTS, head_dim=59),
    ),
    Mutant(
        "sm80 parts: nobody waits for K",
        "forward",
        "            cp_async_wait<0>();\n            __syncthreads();  // K is there\n",
        "            __syncthreads();\n",
        "race",
        AMPERE_PARTS,
    ),
    Mutant(
        "sm80 parts: V over one that is in use",
        "forward",
        "            cp_async_wait<0>();\n            __syncthreads();  // K is there\n",
        "            cp_async_wait<0>();\n",
        "race",
        AMPERE_PARTS,
    ),
    Mutant(
        "sm80 parts: nobody waits for V",
        "forward",
        "            cp_async_wait<0>();\n            __syncthreads();  // V is there\n",
        "            __syncthreads();\n",
        "race",
        AMPERE_PARTS,
    ),
    Mutant(
        "sm80 parts: K over one that is in use",
        "forward",
        "            cp_async_wait<0>();\n            __syncthreads();  // V is there\n",
        "            cp_async_wait<0>();\n",
        "race",
        AMPERE_PARTS,
    ),
    Mutant(
        "sm80 parts: the first panel for all",
        "forward",
        " + c16 / kBlocks * Tile::Panel::kBytes",
        "",
        "numbers",
        AMPERE_WIDE_PARTS,
    ),
    Mutant(
        "sm80 parts: high parts of both operands",
        "forward",
        "part * Tile::kPartBytes",
        "0",
        "numbers",
        AMPERE_PARTS,
    ),
    Mutant(
        "sm80 parts: low parts of both operands",
        "forward",
        "b.of[part_of_product<!kLeftLowFirst>(t)][s]",
        "b.of[part_of_product<kLeftLowFirst>(t)][s]",
        "numbers",
        AMPERE_PARTS,
    ),
    Mutant(
        "sm80 parts: O without the unit of V",
        "forward",
        "const float unit[2] = {value_unit[c], value_unit[c]};",
        "const float unit[2] = {1 / kProbabilityScale, 1 / kProbabilityScale};",
        "numbers",
        AMPERE_PARTS,
    ),
    Mutant(
        "sm80 parts: units of the first block",
        "forward",
        "units[first_block + row / kUnitRows]",
        "units[first_block]",
        "numbers",
        dataclasses.replace(PARTS_OF_UNITS, device="sm_80"),
    ),
    Mutant(
        "sm80 parts: the parts of another head",
        "forward",
        "PartsLayout<Spec::kHeadDim>::row_of(index, num_blocks, first)",
        "PartsLayout<Spec::kHeadDim>::row_of(0, num_blocks, first)",
        "numbers",
        AMPERE_PARTS_OF_GROUPS,
    ),
    Mutant(
        "sm80 parts: O not rescaled",
        "forward",
        "            multiply_rows(output, rescale);\n",
        "",
        "numbers",
        AMPERE_PARTS,
    ),
    Mutant(
        "sm80 parts: the second chain in place of the first",
        "forward",
        "own = fma(product.value[h][e], factor[e / 2], own);",
        "own = product.value[h][e] * factor[e / 2];",
        "numbers",
        AMPERE_PARTS,
    ),
    Mutant(
        "sm80 parts: V over one whose dP is not there",
        "backward_dq",
        "            __syncthreads();\n            if (tile > tiles.begin) load_value(tile - 1);",
        "            if (tile > tiles.begin) load_value(tile - 1);",
        "race",
        AMPERE_PARTS,
    ),
    Mutant(
        "sm80 parts: K over one whose dQ is not there",
        "backward_dq",
        "                __syncthreads();\n                if (tile > tiles.begin) load_key(tile - 1);",
        "                if (tile > tiles.begin) load_key(tile - 1);",
        "race",
        AMPERE_WIDE_PARTS,
    ),
    Mutant(
        "sm80 parts: the next K in the slot of this one",
        "backward_dq",
        "return kK + tile % kStages * KeyTile::kBytes;",
        "return kK;",
        "race",
        AMPERE_PARTS,
    ),
    Mutant(
        "sm80 parts: dQ without the unit of K",
        "backward_dq",
        "{inverse[0] * key_unit[c], inverse[1] * key_unit[c]}",
        "{inverse[0], inverse[1]}",
        "numbers",
        AMPERE_PARTS,
    ),
    Mutant(
        "sm80 parts: dO of the same unit as Q",
        "backward_dq",
        "dout_unit = douts.unit(first_row + warp_row)",
        "dout_unit = query_unit",
        "numbers",
        dataclasses.replace(PARTS_OF_SMALL_GRADIENTS, device="sm_80"),
    ),
    Mutant(
        "sm80 parts: dO over one that is in use",
        "backward_dkdv",
        "                __syncthreads();\n                if (more) load_dout(next);",
        "                if (more) load_dout(next);",
        "race",
        AMPERE_PARTS,
    ),
    Mutant(
        "sm80 parts: Q over one that is in use",
        "backward_dkdv",
        "                __syncthreads();\n                if (more) load_query(next, t + 1);",
        "                if (more) load_query(next, t + 1);",
        "race",
        AMPERE_WIDE_PARTS,
    ),
    Mutant(
        "sm80 parts: statistics of the step before",
        "backward_dkdv",
        "store_row_stat(row_stat, t + 1);",
        "store_row_stat(row_stat, t);",
        "race",
        AMPERE_PARTS,
    ),
    Mutant(
        "sm80 parts: the first head of the group alone",
        "backward_dkdv",
        "same_head ? step.head : step.head + 1",
        "step.head",
        "numbers",
        AMPERE_PARTS_OF_GROUPS,
    ),
    Mutant(
        "sm80 parts: keys of the first warp",
        "backward_dkdv",
        "position{where.batch, step.head, first_query, where.tile * kBc + warp_key, lane}",
        "position{where.batch, step.head, first_query, where.tile * kBc, lane}",
        "numbers",
        AMPERE_PARTS,
    ),
    *(
        Mutant(f"{family} functions: {name}", operation, old, new, "numbers", problems[function])
        for family, problems in (("sm80", FUNCTIONS), ("simt", IEEE_FUNCTIONS))
        for name, operation, function, old, new in (
            ("the derivative is 1", "backward_dq", "softcap", "slope = t6;", "slope = 1;"),
            (
                "the derivative lacks an inner factor",
                "backward_dkdv",
                "softcap",
                "slope = t6;",
                "slope = Real(0.8) * t4;",
            ),
            ("the derivative of tanh is 1 - tanh", "backward_dkdv", "softcap", "t3 = t2 * t2", "t3 = t2"),
            (
                "another head's slope",
                "forward",
                "alibi",
                "x(i, j) * natural_scale<Spec>(params_), batch_, head_,",
                "x(i, j) * natural_scale<Spec>(params_), batch_, 0,",
            ),
            (
                "the gradient of an argument has the other sign",
                "backward_dq",
                "alibi",
                "gradient * t4, h)",
                "gradient * t3, h)",
            ),
            ("the gradient of another head's slope", "backward_dq", "alibi", "gradient * t4, h)", "gradient * t4, 0)"),
            (
                "the gradient of a table in another bucket",
                "backward_dq",
                "t5_relative",
                "tile.batch, tile.head, at.query, at.key, gradient);",
                "tile.batch, tile.head, at.query, at.key + 1, gradient);",
            ),
            (
                "no dQ beside the gradients of arguments",
                "backward_dq",
                "t5_relative",
                "ds(i, j) = gradient * slope;",
                "ds(i, j) = 0;",
            ),
            (
                "visible keys from the next one on",
                "forward",
                "document",
                "first.query + queries, first.key + keys))",
                "first.query + queries, first.key + keys + 1))",
            ),
            (
                "hidden keys in the backward",
                "backward_dkdv",
                "document",
                "first.query + queries, first.key + keys))",
                "first.query + queries, first.key + keys) && false)",
            ),
        )
    ),
    Mutant(
        "sm80 functions: dropout drawn for the other column",
        "backward_dkdv",
        "dropout.keeps(draws.item[word], e)",
        "dropout.keeps(draws.item[word], 1 - e)",
        "numbers",
        DROPPED_FUNCTION,
    ),
    Mutant(
        "sm80 functions: dropout marks nothing",
        "backward_dq",
        "with_lowest_bit(weight, !keep)",
        "with_lowest_bit(weight, false)",
        "numbers",
        DROPPED_FUNCTION,
    ),
    Mutant(
        "sm90 functions: dropout drawn for another tile",
        "backward_dkdv",
        "first_key + Fragment::row(0, lane), s);",
        "first_key + Fragment::row(0, lane), 0);",
        "numbers",
        dataclasses.replace(DROPPED_FUNCTION, head_dim=136, hopper_tile=TileConfig(64, 64, 12, 2)),
    ),
    *(
        Mutant(
            f"{name}: operands with a bit less",
            operation,
            "{ word[n8][i] = pack<Element>(even, odd); }",
            "{{ word[n8][i] = pack<Element>({}, {}); }}".format(
                *(A_BIT_LESS[dtype].format(x) for x in ("even", "odd"))
            ),
            "root mean square",
            Problem(dtype, 64, (133, 150), causal=False, hopper_tile=tile),
        )
        for name, dtype, operation, tile in (
            ("sm80", "bfloat16", "forward", None),
            ("sm80 in float16", "float16", "forward", None),
            ("sm90", "bfloat16", "forward", ONE_GROUP),
            ("sm80 backward", "bfloat16", "backward_dkdv", None),
        )
    ),
)


def run(operation: str, problem: Problem, patch: Mutant | None = None) -> None:
    """Calls what launches the kernel, on inputs that no other kernel has touched, and checks its results."""
    inputs = draw(problem.dtype, problem.lengths, problem.head_dim, problem.heads, batch=problem.batch)
    if problem.growing:
        growing(inputs, slice(0, 1))
    inputs = problem.scores(inputs)
    if problem.rows_ahead:
        inputs = tuple(place(x[0]) for x in inputs)
    q, k, v, do = (
        packed(x) if name == problem.packed else x for name, x in zip(("q", "k", "v", "do"), inputs, strict=True)
    )
    device = problem.device or (FEW_MULTIPROCESSORS if problem.few_multiprocessors else HOPPER)
    asked = {"causal": problem.causal, **problem.features, **problem.offsets}
    expected = Expectation(q, k, v, do, **asked)
    options = {
        **asked,
        "config": small_tiles(problem.dtype, problem.head_dim),
        "family": family_of(problem.dtype),
        "num_splits": problem.num_splits,
    }
    of_forward = operation in ("forward", "merge_forward", "split_inputs")
    if problem.precision:
        options |= {"config": None, "family": None, "precision": problem.precision}
    if problem.hopper_tile:  # the family need not have the other kernel of a method
        reads = {"convert_dq": "backward", "sum_dkdv": "backward_dkdv", "merge_forward": "forward"}
        tiled = reads.get(operation, operation)
        options["config"] = {tiled: problem.hopper_tile}
        options["family"] = "sm90" if of_forward else None
    with pytest.MonkeyPatch.context() as monkeypatch, simulated_gpu(monkeypatch, device, patch=patch):
        if operation == "backward_dq" and problem.hopper_tile:
            dq_on_hopper(monkeypatch)
            check_dq((q, k, v, do), config=problem.hopper_tile, **asked)
            return
        if of_forward:
            o, lse = forward(q, k, v, out=(packed(q), None) if problem.packed == "o" else None, **options)
            expected.check(o=o, lse=lse)
            return
        o, lse = reference.forward(q, k, v, **asked)
        o, lse = place(o.astype(q.dtype)), place(lse.astype(expected.problem.accumulator_dtype))
        two_pass = operation in ("backward_dq", "backward_dkdv", "sum_dkdv")
        method = "two_pass" if two_pass else "single_pass"
        of_others: tuple[str, ...] = ()  # results of the other pass, whose kernels are not launched
        if operation == "backward_dq":
            of_others = ("dk", "dv")
            leave_out(monkeypatch, "backward_dkdv", "sum_dkdv")
        elif two_pass:
            of_others = tuple(name for name in gradient_names(asked, extras(asked)) if name not in ("dk", "dv"))
            leave_out(monkeypatch, "backward_dq")
        switches = extras(asked)
        if not two_pass:
            switches.pop("return_dscore_args", None)  # with it, all kernels but those of simt would be of two passes
        gradients = backward(q, k, v, o, lse, do, method=method, **switches, **options)
        results = dict(zip(gradient_names(asked, switches), gradients, strict=True))
        expected.check(**{name: result for name, result in results.items() if name not in of_others})


@functools.lru_cache(maxsize=None)
def check_unbroken(operation: str, problem: Problem) -> None:
    run(operation, problem)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_broken_kernel_is_caught(mutant):
    check_unbroken(mutant.operation, mutant.problem)
    exception, text = CATCHES[mutant.caught_by]
    with pytest.raises(exception, match=text):
        run(mutant.operation, mutant.problem, mutant)
