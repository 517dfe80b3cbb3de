"""The kernels on mma.sync: copies, masks and tile ranges, heads, the softmax, the backward; and Delta."""

from __future__ import annotations

from support.fake_cupy import place

from .mutant import Mutant
from .problems import Problem, without_keys

ONE_HEAD = Problem(heads=(1, 1))
GROUPS = Problem(heads=(4, 2))
FULL = Problem(causal=False)
MASKED_ROWS = Problem(lengths=(94, 37))
GROWING = Problem(lengths=(35, 128), causal=False, growing=True)
WIDE = Problem(head_dim=160)
WIDER = Problem(head_dim=264)
WIDER_GROWING = Problem(head_dim=264, lengths=(35, 320), causal=False, growing=True)
SECTIONS = Problem(lengths=(65, 65), batch=5, few_multiprocessors=True)
#: The source between the bound of a loop over 8-column tiles and its body.
EACH = "; ++n)\n#pragma unroll\n                    for (int e = 0; e < 4; ++e)"
ONE_TILE = Problem(lengths=(90, 29))
SHARED_BIAS = Problem(lengths=(30, 29), heads=(2, 2), batch=2, feature="bias of heads")
KEPT_BIAS = Problem(lengths=(30, 29), heads=(2, 2), batch=2, feature="bias", view=lambda bias: place(bias[:1]))
PAIR = Problem(head_dim=40, head_dim_v=72)
PAIR_WIDE = Problem(head_dim=40, head_dim_v=136)
PAIR_GROWING = Problem(head_dim=40, head_dim_v=72, growing=True)
PAIR_HIDDEN = without_keys(head_dim=40, head_dim_v=72)
PAIR_SHARES = Problem(head_dim=40, head_dim_v=72, num_splits=3)
PAIR_AHEAD = Problem(head_dim=40, head_dim_v=72, rows_ahead=3)
#: A kernel, a text, the head_dim of it that is exchanged for another, what catches the change, and the problem.
SWAPPED = (
    ("forward", "load_tile_async<VTile, kThreads, kHeadDimV>(slot", "kHeadDimV", "kHeadDim", "numbers", PAIR),
    ("forward", "v_address(slot + KTile::kBytes", "KTile", "VTile", "shared bounds", PAIR),
    ("forward", "store_rows<OTile, kM16, kHeadDimV>(smem, warp_row", "kHeadDimV", "kHeadDim", "unwritten", PAIR),
    ("forward", "n < kDv / 8; ++n)", "kDv", "kD", "numbers", PAIR_GROWING),
    ("forward", "AccumulatorTile<Spec::kBr, Spec::kHeadDimV>", "kHeadDimV", "kHeadDim", "uninitialised", PAIR_SHARES),
    ("forward", "v = slot + KTile::kBytes", "KTile", "VTile", "shared bounds", PAIR_WIDE),
    ("backward_dq", "load_tile_async<DoTile, kThreads, kHeadDimV>(", "kHeadDimV", "kHeadDim", "numbers", PAIR),
    ("backward_dq", "v_rows(slot + KTile::kBytes", "KTile", "VTile", "shared bounds", PAIR),
    ("backward_dq", "multiply<Element, kDv / 16>(", "kDv", "kD", "numbers", PAIR),
    ("backward_dq", "clear_row<DoTile, 4>(", "DoTile", "QTile", "race", PAIR_HIDDEN),
    ("backward_dkdv", "load_tile_async<VTile, kThreads, kHeadDimV>(", "kHeadDimV", "kHeadDim", "numbers", PAIR),
    (
        "backward_dkdv",
        "load_tile_async<DoTile, kThreads, kHeadDimV>(smem + kDo",
        "kHeadDimV",
        "kHeadDim",
        "numbers",
        PAIR,
    ),
    ("backward_dkdv", "clear_row<DoTile>(", "DoTile", "QTile", "numbers", PAIR_HIDDEN),
    ("backward_dkdv", "multiply<Element, Tiles::Own::kCols / 16>(", "Tiles::Own::kCols", "Shape::kD", "numbers", PAIR),
    ("backward_dkdv", "kProbability ? kHeadDimV : kHeadDim;", "kHeadDimV", "kHeadDim", "unwritten", PAIR),
    ("backward_dkdv", "kProbability ? 0 : VTile::kBytes", "VTile", "KTile", "race", PAIR),
    ("backward_dkdv", "kProbability * Shares::Dk::kElements", "Dk", "Dv", "bounds", PAIR_SHARES),
    ("sum_dkdv", "is_dv ? Dk::kElements", "Dk", "Dv", "numbers", PAIR_SHARES),
    ("sum_dkdv", "is_dv ? Spec::kHeadDimV / 8", "kHeadDimV", "kHeadDim", "unwritten", PAIR_SHARES),
    ("sum_dkdv", "is_dv ? Dv::offset", "Dv", "Dk", "numbers", PAIR_SHARES),
    ("clear_backward", "clear_row<Spec::kHeadDimV>(params.dv,", "kHeadDimV", "kHeadDim", "unwritten", PAIR_AHEAD),
)

MUTANTS = (
    *(
        Mutant(
            f"sm80: the other head_dim in {operation}, {text}",
            operation,
            text,
            text.replace(of, other),
            caught_by,
            problem,
        )
        for operation, text, of, other, caught_by, problem in SWAPPED
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
        "row_valid && (kHeadDim == Tile::kCols || chunk * kElements < kHeadDim);",
        "row_valid;",
        "bounds",
        Problem(head_dim=40, heads=(1, 1)),
    ),
    Mutant(
        "no row predicate on load",
        "backward",
        "row_valid = first_row + row >= begin && first_row + row < num_rows;",
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
        "slot(position) + KTile::kBytes, v, v_stride,",
        "slot(position) + KTile::kBytes, v, k_stride,",
        "uninitialised",
        Problem(packed="v"),
    ),
    Mutant(
        "o stored with the strides of q",
        "forward",
        "store_rows<OTile, kM16, kHeadDimV>(smem, warp_row, 0, output, o, params.o_strides.row",
        "store_rows<OTile, kM16, kHeadDimV>(smem, warp_row, 0, output, o, params.q_strides.row",
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
        f"kDv / 8{EACH} output[m].value[n][e] *= rescale[e / 2];",
        f"kDv / 8{EACH} output[m].value[n][e] *= rescale[0];",
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
        "lse[i] = empty ? -infinity<Real>() : natural(row_shift",
        "lse[i] = empty ? Real(0) : natural(row_shift",
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
        "write_p(p);\n                barrier_sync(barrier(), kGroupThreads);",
        "write_p(p);",
        "race",
        WIDE,
    ),
    Mutant(
        "no barrier before the partner's maximum",
        "forward",
        "stat[m][i]);\n        barrier_sync(barrier(), kGroupThreads);",
        "stat[m][i]);",
        "race",
        WIDE,
    ),
    Mutant(
        "each warp keeps its own vote",
        "forward",
        "kept = barrier_all(barrier(), kGroupThreads, fits);",
        "barrier_all(barrier(), kGroupThreads, fits);\nkept = __all_sync(common::kFullWarp, fits);",
        "deadlock",
        Problem(head_dim=160, lengths=(35, 320), causal=False, growing=True),
    ),
    # sm80: beyond 256 columns, where four warps share rows of O, and two those of a gradient
    Mutant("V taken with its K", "forward", "ring.acquire_second(position);", "", "race", WIDER),
    Mutant(
        "first keys in turns those of the next tile",
        "forward",
        "load_one<kTurns == Turns::kKeysFirst>(tiles.end - 1);",
        "load_one<kTurns == Turns::kKeysFirst>(tiles.end);",
        "numbers",
        WIDER,
    ),
    Mutant(
        "next keys where these are read",
        "backward_dq",
        "load_one<kTurns == Turns::kKeysFirst>(position - 1);",
        "load_one<kTurns != Turns::kKeysFirst>(position - 1);",
        "race",
        WIDER,
    ),
    Mutant(
        "maxima of two of four warps",
        "forward",
        "step < kSharers; step *= 2",
        "step < 2; step *= 2",
        "numbers",
        WIDER_GROWING,
    ),
    Mutant(
        "no barrier before the dS of the other part",
        "backward_dq",
        "barrier_sync(1 + group, kGroupThreads);\n                accumulate",
        "accumulate",
        "race",
        WIDER,
    ),
    Mutant(
        "columns of dQ from the first on",
        "backward_dq",
        "first_c16 = part * (kPartCols / 16);",
        "first_c16 = 0;",
        "numbers",
        WIDER,
    ),
    Mutant(
        "rows of the other part weighted by those of the first",
        "backward_dkdv",
        "first_row * 4 + lane % 4 * 8;",
        "lane % 4 * 8;",
        "numbers",
        WIDER,
    ),
    Mutant(
        "no barrier before the P of the other pair",
        "backward_dkdv",
        "barrier_sync(1 + kPairs + pair / kSharers * 2 + kProbability, 32 * kSharers);",
        "",
        "race",
        WIDER,
    ),
    Mutant(
        "columns of dK over those of the other pair",
        "backward_dkdv",
        "return part() * (Role",
        "return 0 * (Role",
        "race",
        WIDER,
    ),
    # sm80: the backward by key tiles
    Mutant(
        "no barrier at the top of an iteration",
        "backward",
        "cp_async_wait<0>();\n            query_tile_barrier(slot, t % 2, step.tile == tiles.begin);\n            if",
        "cp_async_wait<0>();\n            if",
        "race",
    ),
    Mutant(
        "dV leaves before the last dQ has read K",
        "backward",
        "if (steps > 0) Dq::add(*this, previous, (steps + 1) % 2);\n            block_barrier();",
        "if (steps > 0) Dq::add(*this, previous, (steps + 1) % 2);",
        "race",
    ),
    Mutant(
        "dQ of one tile from dS that is not there",
        "backward_one_tile",
        "block_barrier();\n                Dq::store(*this, step);",
        "Dq::store(*this, step);",
        "race",
        ONE_TILE,
    ),
    Mutant(
        "delta of one tile used before it is there",
        "backward_one_tile",
        "Statistics::take_delta(*this, t % 2);\n                block_barrier();",
        "Statistics::take_delta(*this, t % 2);",
        "race",
        ONE_TILE,
    ),
    Mutant(
        "no dQ for queries that see no key of one tile",
        "backward_one_tile",
        "            Dq::clear_unseen(*this);\n",
        "",
        "unwritten",
        ONE_TILE,
    ),
    Mutant(
        "rows of one tile that are not there",
        "backward_one_tile",
        "if (has_column && first_row + row < num_rows)",
        "if (has_column)",
        "bounds",
        ONE_TILE,
    ),
    Mutant(
        "columns of one tile that are not there",
        "backward_one_tile",
        "if (has_column && first_row",
        "if (first_row",
        "bounds",
        Problem(head_dim=24, lengths=(90, 29)),
    ),
    Mutant(
        "the next sequence that shares a bias over the results of the one before",
        "backward_one_tile_dbias",
        "one.template loop<kRoles...>();\n                block_barrier();",
        "one.template loop<kRoles...>();",
        "race",
        SHARED_BIAS,
    ),
    Mutant(
        "sums of dbias that do not begin at zero",
        "backward_one_tile_dbias",
        "if constexpr ((!kRoles || ...)) Dbias::clear(*this);",
        "",
        "uninitialised",
        SHARED_BIAS,
    ),
    Mutant(
        "a bias that sequences share where dS is written",
        "backward_one_tile_dbias",
        "(Block::kSumsDbias ? Block::kBias : Block::kDs)",
        "Block::kDs",
        "numbers",
        KEPT_BIAS,
    ),
    Mutant(
        "a bias that is not there",
        "backward_one_tile_dbias",
        "load_head<kRoles...>(!has_bias);",
        "load_head<kRoles...>(has_bias);",
        "uninitialised",
        KEPT_BIAS,
    ),
    Mutant("P taken before it is written", "backward_dkdv", "barrier_sync(1 + pair, 64);", "{}", "race"),
    Mutant("P never announced", "backward_dkdv", "barrier_arrive(1 + pair, 64);", "{}", "deadlock"),
    Mutant(
        "one buffer for the row statistics",
        "backward",
        "Statistics::store(*this, row_stat, (t + 1) % 2);",
        "Statistics::store(*this, row_stat, t % 2);",
        "race",
    ),
    Mutant(
        "row statistics past the end",
        "backward",
        "const bool valid = row < params.seqlen_q;\n        if (thread",
        "const bool valid = true;\n        if (thread",
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
    Mutant(
        "delta past the end",
        "delta",
        "(o, dout, lane, valid);\n        if (lane == 0 && valid)",
        "(o, dout, lane, valid);\n        if (lane == 0)",
        "bounds",
    ),
    Mutant("delta clears too little", "delta", "offset < bytes;", "offset + kBytes < bytes;", "unwritten"),
    Mutant("delta clears too much", "delta", "offset < bytes;", "offset <= bytes;", "bounds"),
    Mutant(
        "delta leaves shares",
        "delta",
        "clear_workspace(params.shares, params.shares_bytes);",
        "",
        "unwritten",
        Problem(num_splits=2),
    ),
)
