"""Features that change scores: windows, caps, biases, masks and sinks, and their gradients."""

from __future__ import annotations

import dataclasses

from fa2cupy import TileConfig

from .mutant import Mutant
from .problems import HOPPER_COLUMNS, ONE_GROUP, PAIRS, Problem

VECTORS = Problem(feature="bias", lengths=(69, 104))  # all rows of scores begin on 16 bytes
OF_ANOTHER_ROW = (
    "params_.mask_strides.offset(batch_, head_, row, column)",
    "params_.mask_strides.offset(batch_, head_, 0, column)",
)
HELD_BIAS = Problem(feature="bias", lengths=(70, 104), hopper_tile=ONE_GROUP)
HELD_TRANSPOSED = Problem(feature="bias", lengths=(70, 136), hopper_tile=TileConfig(64, 128, 12, 2))
HELD_MASK = Problem(feature="mask", lengths=(70, 112), hopper_tile=ONE_GROUP)
HELD_TRANSPOSED_MASK = Problem(feature="mask", lengths=(70, 144), hopper_tile=TileConfig(64, 128, 12, 2))

MUTANTS = (
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
        "column = min_of(key, last_key_of<Spec>(params_));\n            if constexpr (kReadsBias)",
        "column = key;\n            if constexpr (kReadsBias)",
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
        "mbarrier_wait(memory_.full_start(group_), starts_.parity());",
        "",
        "race",
        HELD_BIAS,
    ),
    Mutant(
        "bias in shared memory overwritten while it is read",
        "forward",
        "mbarrier_wait(memory_.empty_start(group_), starts_.parity() ^ 1);",
        "",
        "deadlock",
        HELD_BIAS,
    ),
    Mutant(
        "bias in shared memory of the first key tile",
        "forward",
        "tile.batch(), group_ * kGroupRows, block, lane)",
        "tile.batch(), group_ * kGroupRows, 0, lane)",
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
        "lane / 16 * 8, chunk + lane / 8 % 2)",
        "lane / 16 * 8, chunk)",
        "numbers",
        HELD_TRANSPOSED,
    ),
    Mutant(
        "transposed mask in shared memory of rows past the last one for the next head",
        "backward_dkdv",
        "is_last ? own_.tiles.begin : step.tile + 1}",
        "step.tile + 1}",
        "numbers",
        HELD_TRANSPOSED_MASK,
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
)
