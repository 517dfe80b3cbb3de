"""Sequence-parallel attention by simulated ranks, against one call on the whole sequence."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ranks
from support.feature_cases import assert_bits_equal, assert_close, booleans, numbers, options_of

import fa2cupy
import fa2cupy.distributed as dist
from fa2cupy import TileConfig, UnsupportedProblemError, mods
from fa2cupy.distributed import api
from fa2cupy.distributed.call.parts import Part, part_keywords
from fa2cupy.distributed.local.copies import word_layout
from fa2cupy.distributed.transport.threads import ThreadTransport
from fa2cupy.problem.checks import problem_from_arrays
from fa2cupy.testing import make_inputs

SCHEMES = ("heads", "gather", "hybrid")
SIZES = {"batch": 2, "seqlen_q": 48, "seqlen_k": 48, "num_heads": 8, "num_heads_kv": 4, "head_dim": 8}
TILE = TileConfig(16, 16, 1)
METHODS = ("single_pass", "two_pass")


def inputs_of(dtype: str = "float64", **sizes) -> tuple:
    return make_inputs(dtype, **(SIZES | sizes))


class TestAgainstOneCall:
    @pytest.mark.sample(size=(1, 3), causal=(True,))
    @pytest.mark.parametrize("order", ["zigzag", "contiguous"])
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("size", range(1, 9))
    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_every_scheme_and_number_of_ranks(self, scheme, size, causal, order):
        inputs = inputs_of(seqlen_q=4 * size, seqlen_k=4 * size, num_heads=2 * size, num_heads_kv=size)
        expected = ranks.whole_call(inputs, causal=causal)
        assert_close(ranks.on_ranks(size, inputs, causal=causal, how={"scheme": scheme, "order": order}), expected)

    @pytest.mark.parametrize("groups", [1, 2, 4])
    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_groups_of_heads(self, scheme, groups):
        inputs = inputs_of(num_heads=16, num_heads_kv=8)
        how = {"scheme": scheme, "head_groups": groups}
        assert_close(ranks.on_ranks(2, inputs, causal=True, how=how), ranks.whole_call(inputs, causal=True))

    @pytest.mark.sample(causal=(True,))
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(("rows", "keys"), [(24, 48), (48, 24), (8, 64), (64, 8)])
    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_queries_and_keys_of_other_lengths(self, scheme, rows, keys, causal):
        inputs = inputs_of(seqlen_q=rows, seqlen_k=keys)
        expected = ranks.whole_call(inputs, causal=causal)
        assert_close(ranks.on_ranks(4, inputs, causal=causal, how={"scheme": scheme}), expected)

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_without_sequences(self, scheme):
        found = ranks.on_ranks(4, inputs_of(batch=0), how={"scheme": scheme})
        assert {name: x.shape for name, x in found.items()} == {
            **dict.fromkeys(("o", "dq"), (0, 48, 8, 8)), "lse": (0, 8, 48), **dict.fromkeys(("dk", "dv"), (0, 48, 4, 8))
        }  # fmt: skip

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_without_keys(self, scheme):
        found = ranks.on_ranks(4, inputs_of(seqlen_k=0), how={"scheme": scheme})
        assert (found["lse"] == -np.inf).all()
        assert not (found["o"].any() or found["dq"].any())

    @pytest.mark.sample(rank=(2, 3))
    @pytest.mark.parametrize("layout", ["bshd", "bhsd"])
    @pytest.mark.parametrize("rank", [2, 3, 4])
    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_layouts_and_numbers_of_axes(self, scheme, rank, layout):
        inputs = inputs_of(batch=2 if rank == 4 else 1)
        if layout == "bhsd":
            inputs = tuple(np.ascontiguousarray(x.swapaxes(1, 2)) for x in inputs)
        if rank < 4:
            inputs = tuple(x[0] for x in inputs)
        if rank == 2:
            if scheme == "heads":
                pytest.skip("one head cannot be divided")
            inputs = tuple(np.ascontiguousarray(x[:, 0] if layout == "bshd" else x[0]) for x in inputs)
        expected = ranks.whole_call(inputs, causal=True, layout=layout)
        assert_close(ranks.on_ranks(2, inputs, causal=True, layout=layout, how={"scheme": scheme}), expected)

    @pytest.mark.parametrize(("method", "columns_v"), tuple(zip(METHODS, (5, 11), strict=True)))
    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_methods_scale_dlse_and_another_head_dim_of_v(self, scheme, method, columns_v):
        inputs = inputs_of(head_dim_v=columns_v)
        options = {
            "method": method,
            "softmax_scale": 0.7,
            "causal": True,
            "dlse": numbers((2, 8, 48), "float64", seed=3),
        }
        assert_close(ranks.on_ranks(4, inputs, how={"scheme": scheme}, **options), ranks.whole_call(inputs, **options))

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_results_go_into_the_callers_arrays(self, scheme):
        q, k, v, do = inputs_of()

        def work(comm):
            own = [dist.shard(comm, x) for x in (q, k, v, do)]
            o, lse = dist.forward(comm, *own[:3], scheme=scheme)
            gradients = dist.backward(comm, *own[:3], o, lse, own[3], scheme=scheme)
            out = np.full_like(np.stack(own[:1] * 2, axis=2), np.nan)  # views of a packed array
            given = (out[:, :, 0], np.full_like(lse, np.nan))
            assert dist.forward(comm, *own[:3], scheme=scheme, out=given)[0] is given[0]
            assert_bits_equal({"o": given[0], "lse": given[1]}, {"o": o, "lse": lse})
            packed = np.full((2, 24, 2, 4, 8), np.nan)
            dq = np.full_like(own[0], np.nan)
            found = dist.backward(
                comm, *own[:3], o, lse, own[3], scheme=scheme, out=(dq, packed[:, :, 0], packed[:, :, 1])
            )
            assert found[1].base is packed
            for one, other in zip(found, gradients, strict=True):
                np.testing.assert_array_equal(one, other)

        dist.simulate(2, work)

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_a_delta_that_the_caller_has(self, scheme):
        q, k, v, do = inputs_of()

        def work(comm):
            q_r, k_r, v_r, do_r = (dist.shard(comm, x) for x in (q, k, v, do))
            o, lse = dist.forward(comm, q_r, k_r, v_r, scheme=scheme)
            first = dist.backward(comm, q_r, k_r, v_r, o, lse, do_r, scheme=scheme)
            delta = fa2cupy.delta(o, do_r)
            second = dist.backward(comm, q_r, k_r, v_r, np.full_like(o, np.nan), lse, do_r, delta=delta, scheme=scheme)
            for one, other in zip(first, second, strict=True):
                np.testing.assert_array_equal(one, other)

        dist.simulate(2, work)

    def test_the_closure(self):
        q, k, v, do = inputs_of()
        bias, dlse = numbers((8, 48, 48), "float64"), numbers((2, 8, 48), "float64", seed=5)
        o, lse, backprop = fa2cupy.attention(q, k, v, causal=True, bias=bias, return_dbias=True, return_lse=True)
        expected = (o, lse, *backprop(do, dlse))

        def work(comm):
            own = [dist.shard(comm, x) for x in (q, k, v)]
            rows = dist.shard(comm, bias, axis=-2)
            options = {"causal": True, "bias": rows, "return_dbias": True}
            o, backprop = dist.attention(comm, *own, **options)
            assert len(backprop(dist.shard(comm, do))) == 4
            o, lse, backprop = dist.attention(comm, *own, **options, return_lse=True)
            packed = np.full((2, 24, 2, 4, 8), np.nan)
            views = (None, packed[:, :, 0], packed[:, :, 1], None)
            found = (o, lse, *backprop(dist.shard(comm, do), dist.shard(comm, dlse, axis=2), out=views))
            assert [x is y for x, y in zip(found[2:], views, strict=True)] == [False, True, True, False]
            axes = (1, 2, 1, 1, 1, 1)
            return [dist.unshard(comm, x, axis=axis) for x, axis in zip(found, axes, strict=True)]

        for found, wanted in zip(dist.simulate(2, work)[0], expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


FEATURES = (
    "window", "window left", "window right", "softcap", "alibi", "alibi by batch", "bias", "bias of heads",
    "bias of keys", "bias of one row", "bias of queries", "mask", "mask of rows", "padding", "sink", "dropout",
)  # fmt: skip


class TestFeatures:
    @pytest.mark.sample(size=(4,), causal=(True,))
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("size", [2, 4])
    @pytest.mark.parametrize("scheme", SCHEMES)
    @pytest.mark.parametrize("name", FEATURES)
    def test_each(self, name, scheme, size, causal):
        if name.startswith("alibi") and scheme != "heads" and not causal:
            pytest.skip("refused: see TestRefusals")
        inputs = inputs_of()
        options = {"causal": causal} | options_of(name, "float64", SIZES)
        assert_close(
            ranks.on_ranks(size, inputs, how={"scheme": scheme}, **options), ranks.whole_call(inputs, **options)
        )

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_all_together(self, scheme):
        inputs = inputs_of()
        options = {"causal": True, "dlse": numbers((2, 8, 48), "float64", seed=3)}
        for name in ("window left", "softcap", "alibi", "bias", "mask", "padding", "sink", "dropout"):
            options |= options_of(name, "float64", SIZES)
        assert_close(ranks.on_ranks(4, inputs, how={"scheme": scheme}, **options), ranks.whole_call(inputs, **options))

    @pytest.mark.sample(window=((5, 9), (None, 7)))
    @pytest.mark.parametrize("scheme", SCHEMES)
    @pytest.mark.parametrize(("rows", "keys"), [(24, 64), (64, 24)])
    @pytest.mark.parametrize("window", [(5, 0), (5, 9), (None, 7), (11, None), (0, 0)])
    def test_windows_of_other_lengths(self, window, rows, keys, scheme):
        inputs = inputs_of(seqlen_q=rows, seqlen_k=keys)
        expected = ranks.whole_call(inputs, window=window)
        assert_close(ranks.on_ranks(4, inputs, window=window, how={"scheme": scheme}), expected)

    def test_of_a_window_only_the_chunks_that_it_touches_travel(self, monkeypatch):
        exchange, sent = ThreadTransport.exchange, []

        def counted(transport, sends, recvs):
            sent.extend(x.shape for x, peer in sends if x.dtype == np.float64 and peer != transport.rank)
            exchange(transport, sends, recvs)

        monkeypatch.setattr(ThreadTransport, "exchange", counted)
        q, k, v, _ = inputs_of(batch=1, seqlen_q=64, seqlen_k=64)

        def work(comm):
            dist.forward(comm, *(dist.shard(comm, x) for x in (q, k, v)), scheme="gather", window=(8, 0))

        dist.simulate(4, work)
        # Each of the 8 chunks of 8 rows needs the previous one, except chunk 0, which has none, and chunk 4, which is
        # on the same rank as chunk 3. k and v take 6 messages each.
        assert sent == [(1, 8, 4, 8)] * 12

    @pytest.mark.parametrize("causal", [False, True])
    def test_packed_sequences(self, causal):
        inputs = tuple(x[0] for x in inputs_of(batch=1, seqlen_q=64, seqlen_k=64))
        offsets = np.array([0, 5, 5, 30, 61], "int32")
        options = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "causal": causal, "max_seqlen_q": 31}
        assert_close(ranks.on_ranks(4, inputs, **options), ranks.whole_call(inputs, **options))

    def test_packed_sequences_with_features(self):
        inputs = tuple(x[0] for x in inputs_of(batch=1))
        offsets = np.array([0, 20, 48], "int32")
        options = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 28, "max_seqlen_k": 28}
        sizes = SIZES | {"seqlen_q": 28, "seqlen_k": 28}
        for name in ("alibi by batch", "bias", "mask of rows", "padding", "sink", "dropout"):
            options |= options_of(name, "float64", sizes)
        options["window"] = (9, 4)
        assert_close(ranks.on_ranks(2, inputs, **options), ranks.whole_call(inputs, **options))

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_functions_of_scores_know_where_they_are(self, scheme):
        inputs = inputs_of()
        table, ids = numbers((8, 48), "float64"), np.repeat([0, 1, 2], 16)[None].repeat(2, axis=0)

        def score_mod(score, b, h, q, k, table, offset):
            return score + table[h, q] * (q - k) / 48 + offset

        def mask_mod(b, h, q, k, ids):
            return (ids[b, q] == ids[b, k]) | ((k + h) % 3 == 0)

        options = {
            "score_mod": score_mod,
            "score_args": (table, np.array(0.25)),
            "mask_mod": mask_mod,
            "mask_args": (ids,),
        }
        assert_close(ranks.on_ranks(4, inputs, how={"scheme": scheme}, **options), ranks.whole_call(inputs, **options))

    @pytest.mark.parametrize("by_head", [False, True])
    def test_sparse_maps(self, by_head):
        inputs = inputs_of()

        def mask_mod(b, h, q, k, least):
            return q - k >= (least[0] * h if by_head else least[0])

        least = np.array([8])
        sparse = fa2cupy.block_mask(mask_mod, (least,), 2, 8, 48, 48, tile=(8, 8))
        options = {"mask_mod": mask_mod, "mask_args": (least,)}
        wanted = ranks.whole_call(inputs, **options)
        least[...] = 0  # the map has a copy
        for own in (options, {}):
            assert_close(ranks.on_ranks(4, inputs, **own, block_mask=sparse), wanted)
        tiles = np.random.default_rng(0).random((1, 8 if by_head else 1, 6, 6)) < 0.5
        options = {"block_mask": fa2cupy.BlockMask(tiles, 48, 48, (8, 8))}
        assert_close(ranks.on_ranks(4, inputs, **options), ranks.whole_call(inputs, **options))

    def test_the_intervals_of_some_heads(self):
        q, ends = np.zeros((2, 48, 8, 4), "float32"), np.arange(16).reshape(2, 8)
        own = {"mask_mod": lambda b, h, q, k, ends: k < ends[b, h] + q // 2, "mask_args": (ends,)}
        own["block_mask"] = sparse = fa2cupy.block_mask(own["mask_mod"], (ends,), 2, 8, 48, 48)
        part = Part(slice(2, 5), slice(0, 48), 48)
        made = part_keywords(problem_from_arrays(q, q, q, **own), own, part, {}, None)["block_mask"]
        assert made.layout.intervals == (True, True)
        for found, whole in zip(made.intervals, sparse.intervals, strict=True):
            np.testing.assert_array_equal(found, whole[:, 2:5])

    def test_a_mask_of_the_library(self):
        inputs = inputs_of()
        options = {"mask_mod": mods.sliding_window(7)}
        assert_close(
            ranks.on_ranks(2, inputs, how={"scheme": "gather"}, **options), ranks.whole_call(inputs, **options)
        )


def tilted(score, b, h, q, k, table):
    return score * table[h] + 0.1 * score**2


class TestSecondOrder:
    """`jvp`, `backward_jvp` and `double_backward` by ranks, with a direction of all arrays."""

    SIZES = {**SIZES, "seqlen_q": 24, "seqlen_k": 32, "head_dim_v": 6}
    CASES = {
        "plain": {},
        "no keys behind": {"causal": True, "window": (9, 0), "softcap": 1.3, "dropout_p": 0.3, "seed": 4},
        "a bias with rows": {"bias": numbers((2, 8, 24, 32), "float64"), "sink": numbers((8,), "float64")},
        "a bias that heads share": {"bias": numbers((24, 32), "float64"), "causal": True},
        "a bias without rows": {"bias": numbers((8, 1, 32), "float64")},
        "functions": {"score_mod": tilted, "score_args": (numbers((8,), "float64"),), "mask_mod": mods.causal()},
        "packed": {
            "cu_seqlens_q": np.array([0, 5, 5, 24], "int32"),
            "cu_seqlens_k": np.array([0, 12, 20, 31], "int32"),
            "causal": True,
            "sink": numbers((8,), "float64"),
        },
    }

    @staticmethod
    def results(options: dict, given: dict, functions, comm=()) -> dict:
        """Returns all results by name: of one call, or of a rank with its rows."""
        of_features = [name for name in ("bias", "sink") if name in options]
        switches = {f"return_d{name}": True for name in of_features}
        tangents = {f"{name}_tangent": given[f"{name}_tangent"] for name in of_features}
        q, k, v, do, qt, kt, vt, dot, dlse, dlset = (
            given[name] for name in ("q", "k", "v", "do", "qt", "kt", "vt", "dot", "dlse", "dlset")
        )
        o, lse, ot, lset = functions.jvp(*comm, q, k, v, qt, kt, vt, **options, **tangents)
        moved = functions.backward_jvp(
            *comm, q, k, v, o, lse, do, qt, kt, vt, ot, lset, dot, dlse=dlse, dlset=dlset,
            **options, **switches, **tangents,
        )  # fmt: skip
        cotangents = {f"gd{name}": given[f"{name}_tangent"] for name in of_features}
        found = functions.double_backward(
            *comm, q, k, v, o, lse, do, qt, None, vt, dlse=dlse, **options, **switches, **cotangents
        )
        names = ("o", "lse", "ot", "lset", "dqt", "dkt", "dvt", *(f"d{name}t" for name in of_features))
        names += ("gq", "gk", "gv", "gdo", "gdlse", *(f"g{name}" for name in of_features))
        return dict(zip(names, (o, lse, ot, lset, *moved, *found), strict=True))

    def arrays(self, options: dict) -> dict:
        q, k, v, do = make_inputs("float64", **self.SIZES)
        if "cu_seqlens_q" in options:
            q, k, v, do = (x[0] for x in (q, k, v, do))
        lse = fa2cupy.forward(q, k, v, **options)[1]
        given = {"q": q, "k": k, "v": v, "do": do, "dlse": lse}
        given |= {name: options[name] for name in ("bias", "sink") if name in options}
        names = {"q": "qt", "k": "kt", "v": "vt", "do": "dot", "dlse": "dlset"}
        return given | {names.get(n, f"{n}_tangent"): numbers(x.shape, "float64", 7) for n, x in given.items()}

    @pytest.mark.parametrize("how", [{}, {"order": "contiguous", "head_groups": 2}], ids=["zigzag", "groups"])
    @pytest.mark.parametrize("size", [1, 2, 4])
    @pytest.mark.parametrize("name", CASES)
    def test_results_are_those_of_one_call(self, name, size, how):
        if how and size == 4:
            pytest.skip("one K/V head on a rank")
        options, rows = self.CASES[name], 0 if name == "packed" else 1
        given = self.arrays(options)
        order = {"order": how.get("order", "zigzag")}

        def axis(name: str, x) -> int | None:  # of rows that are spread over the ranks
            if "bias" in name:
                return -2 if x.ndim > 1 and x.shape[-2] > 1 else None
            return None if "sink" in name else -1 if "ls" in name else rows

        def work(comm):
            def own(name, x):
                at = axis(name, x) if hasattr(x, "shape") and ("seqlens" not in name) else None
                return x if at is None else dist.shard(comm, x, axis=at, **order)

            mine = {name: own(name, x) for name, x in given.items()}
            results = self.results({n: own(n, x) for n, x in options.items()} | how, mine, dist, (comm,))
            whole = {}
            for name, x in results.items():
                at = axis(name, x)
                whole[name] = dist.total(comm, x) if at is None else dist.unshard(comm, x, axis=at, **order)
            return whole

        expected = self.results(options, given, fa2cupy)
        assert_close(dist.simulate(size, work, timeout=20)[0], expected)

    def test_the_closure(self):
        given = self.arrays({})
        wanted = self.results({}, given, fa2cupy)

        def work(comm):
            own = {n: dist.shard(comm, x, axis=-1 if "ls" in n else 1) for n, x in given.items()}
            q, k, v, do, qt, kt, vt = (own[name] for name in ("q", "k", "v", "do", "qt", "kt", "vt"))
            o, backprop = dist.attention(comm, q, k, v)
            ot, lset = backprop.jvp(qt, kt, vt)
            dqt, *_ = backprop.backward_jvp(do, qt, kt, vt, ot, lset, own["dot"], dlse=own["dlse"], dlset=own["dlset"])
            gq, *_ = backprop.double_backward(do, qt, None, vt, dlse=own["dlse"])
            return {n: dist.unshard(comm, x) for n, x in {"o": o, "ot": ot, "dqt": dqt, "gq": gq}.items()}

        found = dist.simulate(2, work)[0]
        assert_close(found, {name: wanted[name] for name in found})

    def test_results_go_into_the_callers_arrays(self):
        given = self.arrays({})

        def work(comm):
            q, k, v, qt = (dist.shard(comm, given[name]) for name in ("q", "k", "v", "qt"))
            ot = np.full((*q.shape[:3], 6), np.nan)
            found = dist.jvp(comm, q, k, v, qt, None, None, out=(None, None, ot, None))
            assert found[2] is ot and np.isfinite(ot).all()

        dist.simulate(2, work)

    @pytest.mark.parametrize(
        ("size", "options", "match"),
        [
            (2, {"scheme": "gather"}, "^scheme: jvp is for 'heads' alone, got 'gather'"),
            (2, {"scheme": "hybrid"}, "^scheme: jvp is for 'heads' alone, got 'hybrid'"),
            (2, {"scheme": "ring"}, "^scheme: there is no 'ring' any more"),
            (8, {}, "^k: jvp is for scheme='heads' alone, which needs a number of heads of k that is a multiple of"),
            (2, {"qt": np.zeros((2, 12, 8, 7))}, "^qt: expected shape .* .shapes are those of the whole sequence"),
            (2, {"bias_tangent": np.zeros((16, 32))}, "^bias_tangent: there is no bias; pass that of the forward"),
            (2, {"return_dbias": True}, "^unexpected keyword argument 'return_dbias': it is one of"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_refusals(self, size, options, match):
        q, k, v, _ = make_inputs("float64", **(self.SIZES | {"seqlen_q": 16 * size, "seqlen_k": 16 * size}))

        def work(comm):
            own = [dist.shard(comm, x) for x in (q, k, v)]
            qt = options.get("qt", own[0])
            more = {name: x for name, x in options.items() if name != "qt"}
            with pytest.raises((TypeError, ValueError, UnsupportedProblemError), match=match):
                dist.jvp(comm, *own, qt, None, None, **more)

        dist.simulate(size, work)


class TestBits:
    """In `heads` and `gather` one call computes a row: with the tiles of the whole call, it has the same bits."""

    @pytest.mark.sample(dtype=("bfloat16",), name=("window", "dropout", "bias"))
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("name", ["plain", "window", "window left", "sink", "dropout", "bias", "mask"])
    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_o_and_lse_of_one_call(self, scheme, name, dtype):
        sizes = SIZES | {"seqlen_q": 128, "seqlen_k": 128}
        inputs = make_inputs(dtype, **sizes)
        options = {"causal": name != "window", "config": TILE} | (
            {} if name == "plain" else options_of(name, dtype, sizes)
        )
        expected = ranks.whole_call(inputs, **options)
        found = ranks.on_ranks(4, inputs, how={"scheme": scheme}, **options)
        exact = ("o", "lse", "dq", "dk", "dv") if scheme == "heads" else ("o", "lse", "dq")
        if scheme != "heads" and name == "window":
            # The query tiles of a key tile begin at its first row, which may be in another chunk. The row is then
            # computed in a product of another shape: whether its bits are equal depends on BLAS and the CPU.
            exact = ("o", "lse")
            dq, wanted = (x["dq"].astype("float64") for x in (found, expected))
            rounding = np.finfo("float32").eps if dtype == "float32" else 2.0**-7
            np.testing.assert_allclose(dq, wanted, rtol=rounding, atol=8 * np.finfo("float32").eps * abs(wanted).max())
        assert_bits_equal({n: found[n] for n in exact}, {n: expected[n] for n in exact})

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_errors_in_bfloat16_are_those_of_one_call(self, scheme):
        inputs = inputs_of("bfloat16", seqlen_q=256, seqlen_k=256, head_dim=16)
        truth = ranks.whole_call(tuple(x.astype("float64") for x in inputs), causal=True)
        one = ranks.whole_call(inputs, causal=True)
        found = ranks.on_ranks(4, inputs, causal=True, how={"scheme": scheme})
        for name in ("o", "dq", "dk", "dv"):
            ours, theirs = (np.linalg.norm(x[name].astype("float64") - truth[name]) for x in (found, one))
            assert ours <= 1.6 * theirs, name

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_dropout_drops_the_same_elements_for_any_number_of_ranks(self, scheme):
        ones = np.ones((1, 64, 8, 8))
        identity = np.broadcast_to(np.eye(64)[None, :, None], (1, 64, 8, 64)).copy()
        options = {"dropout_p": 0.4, "seed": 77}
        expected, _ = fa2cupy.forward(ones, ones, identity, **options)  # o is P after dropout
        for size in (2, 4):
            inputs = (ones, ones, identity, np.ones_like(identity))
            found = ranks.on_ranks(size, inputs, how={"scheme": scheme}, **options)["o"]
            np.testing.assert_array_equal(found != 0, expected != 0)


class TestImports:
    def test_the_package_does_not_import_it(self, run_python):
        run_python(
            "import sys, fa2cupy\n"
            "assert not {name for name in sys.modules if name.startswith('fa2cupy.distributed')}\n"
            "import fa2cupy.distributed\n"
            "assert not {'cupy', 'mpi4py', 'nccl'} & set(sys.modules)"
        )


class TestChoice:
    @pytest.mark.parametrize(("heads", "scheme"), [(4, "heads"), (6, "gather"), (2, "gather")])
    def test_heads_where_they_can_be_divided_and_else_gather(self, heads, scheme, monkeypatch):
        for other in SCHEMES:
            if other != scheme:
                monkeypatch.delitem(api._SCHEMES, other)
        inputs = inputs_of(num_heads=12, num_heads_kv=heads)
        assert_close(ranks.on_ranks(4, inputs, causal=True), ranks.whole_call(inputs, causal=True))

    @pytest.mark.parametrize(
        ("heads", "options", "scheme"),
        [
            (4, {}, "hybrid"),
            (2, {"window": (8, 0)}, "hybrid"),
            (3, {}, "gather"),
            (4, {"block_mask": fa2cupy.BlockMask(np.ones((3, 3), bool), 48, 48, (16, 16))}, "heads"),
            (4, {"alibi_slopes": np.linspace(0.1, 0.8, 12)}, "heads"),
        ],
    )
    def test_of_two_hosts(self, heads, options, scheme, monkeypatch):
        taken, requested = [], api.checked
        monkeypatch.setattr(api, "checked", lambda *call: taken.append(requested(*call)) or taken[-1])
        arrays = inputs_of(num_heads=12, num_heads_kv=heads)[:3]

        def work(comm):
            assert comm.ranks_per_host == 2
            o, _ = dist.forward(comm, *(dist.shard(comm, x) for x in arrays), **options)
            return dist.unshard(comm, o)

        found = dist.simulate(4, work, ranks_per_host=2)[0]
        np.testing.assert_allclose(found, fa2cupy.forward(*arrays, **options)[0], rtol=1e-12, atol=1e-12)
        assert {request.scheme for request in taken} == {scheme}

    @pytest.mark.parametrize("scheme", SCHEMES)
    @pytest.mark.parametrize("shape", [(2, 48), (1, 48), (48,), (2, 1)], ids=str)
    def test_axes_of_one_are_shared(self, scheme, shape):
        options = {
            "causal": True,
            "key_padding_mask": booleans(shape),
            "alibi_slopes": numbers((len(shape), 1), "float64"),
        }
        inputs = inputs_of()
        assert_close(ranks.on_ranks(4, inputs, how={"scheme": scheme}, **options), ranks.whole_call(inputs, **options))

    def test_one_rank_makes_the_plain_call(self):
        inputs = inputs_of(seqlen_q=7, seqlen_k=11)
        options = {"causal": True, "alibi_slopes": np.linspace(0.1, 0.8, 8)}
        for scheme in (None, *SCHEMES):
            found = ranks.on_ranks(1, inputs, how={"scheme": scheme}, **options)
            assert_bits_equal(found, ranks.whole_call(inputs, **options))


def refused(kind: type, match: str, size: int = 2, change=None, backward: bool = False, **options) -> None:
    """Checks that every rank raises this error."""
    q, k, v, do = inputs_of(num_heads_kv=options.pop("num_heads_kv", 4))
    messages = []

    def work(comm):
        own = {name: dist.shard(comm, x) for name, x in zip("qkv", (q, k, v), strict=True)}
        mine = dict(options)
        if change is not None:
            change(comm.rank, own, mine)
        with pytest.raises(kind) as caught:
            if backward:
                dist.backward(comm, *own.values(), own["q"], np.zeros((2, 8, 24)), own["q"], **mine)
            else:
                dist.forward(comm, *own.values(), **mine)
        messages.append(str(caught.value))

    dist.simulate(size, work, timeout=10)
    assert len(messages) == size
    assert all(match in message for message in messages), messages


class TestRefusals:
    def test_heads_that_cannot_be_divided_say_which_scheme_to_take(self):
        refused(ValueError, "scheme='heads' needs a number of heads", 4, scheme="heads", num_heads_kv=2)
        refused(ValueError, "take scheme='gather'", 4, scheme="heads", num_heads_kv=2)
        refused(ValueError, "a multiple of the 4 ranks of a host, got 2", 4, scheme="hybrid", num_heads_kv=2)

    def test_hosts_of_several_sizes(self):
        with pytest.raises(ValueError, match="ranks_per_host: expected a divisor of the 4 ranks, got 3"):
            dist.simulate(4, lambda comm: None, ranks_per_host=3)
        with pytest.raises(TypeError, match="ranks_per_host: expected an int, got float"):
            dist.simulate(4, lambda comm: None, ranks_per_host=2.0)

    def test_lengths_that_cannot_be_divided_say_what_to_pad_to(self):
        def odd(rank, own, options):
            own["q"] = own["q"][:, :23].copy()

        refused(ValueError, "pad the whole sequence to a multiple of 4, that is to 48 rows", change=odd)

    @pytest.mark.parametrize("scheme", ["gather", "hybrid"])
    def test_what_gather_has_not(self, scheme):
        slopes, takes = np.linspace(0.1, 0.8, 8), f"alibi_slopes: scheme={scheme!r} takes them with"
        refused(UnsupportedProblemError, takes, scheme=scheme, alibi_slopes=slopes)
        sparse, alone = fa2cupy.BlockMask(np.ones((3, 3), bool), 48, 48, (16, 16)), "it is for scheme='heads' alone"
        refused(UnsupportedProblemError, f"block_mask: {alone}", scheme=scheme, block_mask=sparse)

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"scheme": "rings"}, "scheme: expected None, 'heads', 'gather', 'hybrid', got 'rings'"),
            ({"scheme": "ring"}, "scheme: there is no 'ring' any more; take 'gather'"),
            ({"order": "striped"}, "order: expected 'zigzag' or 'contiguous'"),
            ({"head_groups": 3}, "head_groups: expected a divisor of the 2 K/V heads"),
            ({"layout": "sbhd"}, "layout: expected"),
            ({"window": (-1, 0)}, "window (left)"),
            ({"bias": np.zeros((48, 48))}, "shard(comm, bias, axis=0)"),
            ({"mask": np.zeros((24, 24), bool)}, "mask: expected a shape that can be broadcast"),
            ({"sink": np.zeros(4)}, "sink: expected shape (8,)"),
            ({"out": (np.zeros((2, 48, 8, 8)), None)}, "out (o): expected shape (2, 24, 8, 8)"),
        ],
    )
    def test_values(self, options, match):
        refused(ValueError, match, **options)

    def test_types(self):
        refused(TypeError, "is_causal", is_causal=True)
        refused(TypeError, "head_groups: expected None or an int", head_groups=1.0)
        refused(TypeError, "mask: expected dtype bool", mask=np.zeros((24, 48)))
        refused(TypeError, "dropout_origin", dropout_origin=(0, 0))

    def test_method_and_gradients(self):
        refused(ValueError, "method: expected", backward=True, method="fast")
        refused(ValueError, "return_dbias: there is no bias", backward=True, return_dbias=True)

    def test_results_that_overlap(self):
        def overlap(rank, own, options):
            options["out"] = (own["q"], None)

        refused(ValueError, "out (o): overlaps q", change=overlap)


class TestAgreement:
    """A call that differs on one rank raises the same error on all of them."""

    @pytest.mark.parametrize(
        ("name", "value", "match"),
        [
            ("causal", True, "causal: expected the same on all ranks, got False on ranks 0, 1, 3; True on rank 2"),
            ("softmax_scale", 0.5, "softmax_scale: expected the same on all ranks"),
            ("scheme", "gather", "scheme: expected the same on all ranks, got None on ranks 0, 1, 3; gather on rank 2"),
            ("order", "contiguous", "order: expected the same on all ranks"),
            ("window", (4, 4), "window: expected the same on all ranks, got absent on ranks 0, 1, 3; (4, 4) on rank 2"),
            ("seed", 9, "seed: expected the same on all ranks"),
            ("mask_mod", mods.causal(), "mask_mod: expected the same on all ranks"),
            ("sink", np.zeros(8), "sink: expected the same on all ranks, got absent on ranks 0, 1, 3; shape (8,)"),
        ],
    )
    def test_options(self, name, value, match):
        def work(comm):
            own = [dist.shard(comm, x) for x in inputs_of()[:3]]
            options = {name: value} if comm.rank == 2 else {}
            with pytest.raises(ValueError) as caught:
                dist.forward(comm, *own, **options)
            return str(caught.value)

        messages = dist.simulate(4, work, timeout=10)
        assert all(match in message for message in messages), messages

    def test_shapes_and_dtypes(self):
        def work(comm, change):
            own = [dist.shard(comm, x) for x in inputs_of()[:3]]
            if comm.rank == 1:
                own = [change(x) for x in own]
            with pytest.raises(ValueError) as caught:
                dist.forward(comm, *own)
            return str(caught.value)

        shorter = dist.simulate(2, lambda comm: work(comm, lambda x: x[:, :20].copy()), timeout=10)
        narrower = dist.simulate(2, lambda comm: work(comm, lambda x: x.astype("float32")), timeout=10)
        match = "q: expected the same on all ranks, got shape (2, 24, 8, 8), dtype float64 on rank 0; "
        assert all(match + "shape (2, 20, 8, 8), dtype float64 on rank 1" in message for message in shorter)
        assert all(match + "shape (2, 24, 8, 8), dtype float32 on rank 1" in message for message in narrower)

    def test_an_error_of_one_rank_is_named_on_the_others(self):
        def work(comm):
            own = [dist.shard(comm, x) for x in inputs_of()[:3]]
            if comm.rank == 1:
                own[1] = own[1][..., :4].copy()
            with pytest.raises(ValueError) as caught:
                dist.forward(comm, *own)
            return str(caught.value)

        messages = dist.simulate(3, work, timeout=10)
        assert messages[1].startswith("k: expected shape")
        assert all(f"rank 1 cannot make this call: ValueError: {messages[1]}" == messages[rank] for rank in (0, 2))

    def test_a_rank_without_an_array(self):
        def work(comm):
            own = [dist.shard(comm, x) for x in inputs_of()[:3]]
            if comm.rank == 1:
                own[0] = own[0].tolist()
            with pytest.raises((TypeError, ValueError)) as caught:
                dist.forward(comm, *own)
            return str(caught.value)

        messages = dist.simulate(2, work, timeout=10)
        assert messages[1].startswith("q: expected a numpy.ndarray or cupy.ndarray, got list")
        assert messages[0] == f"rank 1 cannot make this call: TypeError: {messages[1]}"

    def test_a_forward_and_a_backward_do_not_meet(self):
        def work(comm):
            q, k, v, do = (dist.shard(comm, x) for x in inputs_of())
            with pytest.raises(ValueError, match="call: expected the same on all ranks, got forward on rank 0"):
                if comm.rank == 0:
                    dist.forward(comm, q, k, v)
                else:
                    dist.backward(comm, q, k, v, q, np.zeros((2, 8, 24)), do)

        dist.simulate(2, work, timeout=10)

    def test_a_call_after_a_refused_one(self):
        """A refusal leaves no message behind."""

        def work(comm):
            own = [dist.shard(comm, x) for x in inputs_of()[:3]]
            with pytest.raises(ValueError, match="causal"):
                dist.forward(comm, *own, causal=comm.rank == 0)
            return dist.unshard(comm, dist.forward(comm, *own)[0])

        np.testing.assert_allclose(dist.simulate(2, work)[1], fa2cupy.forward(*inputs_of()[:3])[0], atol=1e-12)


class TestFailures:
    def test_a_rank_that_fails_ends_the_others(self):
        def work(comm):
            if comm.rank == 1:
                raise KeyError("of rank 1")
            dist.forward(comm, *(dist.shard(comm, x) for x in inputs_of()[:3]))

        with pytest.raises(KeyError, match="of rank 1"):
            dist.simulate(3, work)

    def test_a_late_rank_ends_the_others_with_a_message(self):
        def work(comm):
            if comm.rank == 1:
                return None
            with pytest.raises(dist.CommunicationError) as caught:
                dist.forward(comm, *(dist.shard(comm, x) for x in inputs_of()[:3]))
            return str(caught.value)

        (message, _) = dist.simulate(2, work, timeout=0.2)
        assert "rank 0 has waited 0.2 s for a message of rank 1, which has ended, is late" in message

    def test_a_communicator_is_not_used_after_a_failure(self, monkeypatch):
        def fail(*_):
            raise MemoryError("in the call")

        def work(comm):
            own = [dist.shard(comm, x) for x in inputs_of()[:3]]
            with pytest.raises(MemoryError):
                dist.forward(comm, *own)
            with pytest.raises(dist.CommunicationError, match="an earlier call .* failed: MemoryError: in the call"):
                dist.forward(comm, *own)

        monkeypatch.setattr("fa2cupy.cpu.calls.forward", fail)
        dist.simulate(2, work, timeout=10)

    @pytest.mark.parametrize("bad", [0, -1, True, "long"])
    def test_sizes_and_timeouts(self, bad):
        with pytest.raises((TypeError, ValueError), match="size"):
            dist.simulate(bad, lambda comm: None)
        with pytest.raises((TypeError, ValueError), match="timeout"):
            dist.simulate(2, lambda comm: None, timeout=bad)


class TestTotals:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int64"])
    @pytest.mark.parametrize("shape", [(), (0,), (2,), (7, 3)])
    def test_the_sum_of_all_ranks(self, shape, dtype):
        shares = numbers((4, *shape), "float64").astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        wide = {"float16": "float32", "bfloat16": "float32"}.get(dtype, dtype)
        expected = shares[0].astype(wide)
        for share in shares[1:]:
            expected = expected + share.astype(wide)
        for found in dist.simulate(4, lambda comm: dist.total(comm, shares[comm.rank])):
            assert found.dtype == shares.dtype
            np.testing.assert_array_equal(found, expected.astype(shares.dtype))

    def test_of_strided_arrays(self):
        whole = np.arange(24.0).reshape(2, 3, 4)
        found = dist.simulate(2, lambda comm: dist.total(comm, whole[comm.rank, :, ::2]))
        np.testing.assert_array_equal(found[0], whole.sum(axis=0)[:, ::2])


class TestRows:
    @pytest.mark.parametrize("order", ["zigzag", "contiguous"])
    @pytest.mark.parametrize("size", [1, 2, 3, 5])
    def test_shards_have_the_positions_and_unshard_puts_them_together(self, size, order):
        whole = numbers((3, 4 * size * 5, 2), "float64").astype(ml_dtypes.bfloat16)

        def work(comm):
            rows = dist.positions(comm, whole.shape[1], order=order)
            own = dist.shard(comm, whole, order=order)
            np.testing.assert_array_equal(own, whole[:, rows])
            np.testing.assert_array_equal(dist.shard(comm, whole, axis=-2, order=order), own)
            return rows, dist.unshard(comm, own, order=order), dist.unshard(comm, own, axis=-2, order=order)

        found = dist.simulate(size, work)
        assert sorted(np.concatenate([rows for rows, *_ in found])) == list(range(whole.shape[1]))
        for _, *wholes in found:
            for one in wholes:
                np.testing.assert_array_equal(one, whole)

    def test_ranks_in_zigzag_order_have_the_same_number_of_visible_pairs(self):
        work = [int((dist.positions(comm, 48) + 1).sum()) for comm in dist.simulate(4, lambda comm: comm)]
        assert len(set(work)) == 1

    def test_padding(self):
        (comm, *_) = dist.simulate(4, lambda comm: comm)
        assert dist.padded_length(comm, 30) == 32
        assert dist.padded_length(comm, 30, order="contiguous") == 32
        assert dist.padded_length(comm, 33, order="contiguous") == 36
        tokens = np.arange(60).reshape(2, 30)
        padded = dist.pad(comm, tokens, value=-1)
        np.testing.assert_array_equal(padded[:, :30], tokens)
        assert (padded[:, 30:] == -1).all() and padded.shape == (2, 32) and padded.dtype == tokens.dtype
        assert dist.pad(comm, padded) is padded
        with pytest.raises(ValueError, match="multiple of 8, for 4 ranks in zigzag order, got 30; pad it to 32"):
            dist.shard(comm, tokens)
        with pytest.raises(ValueError, match="seqlen: expected a length that is a multiple of 8"):
            dist.positions(comm, 31)
        with pytest.raises(ValueError, match="axis: expected one of the 2 axes"):
            dist.shard(comm, tokens, axis=2)
        with pytest.raises(TypeError, match="x: expected a numpy.ndarray"):
            dist.shard(comm, [1, 2])

    def test_padded_rows_change_no_other_row_under_a_causal_mask(self):
        q, k, v, do = inputs_of(seqlen_q=45, seqlen_k=45)
        o, lse = fa2cupy.forward(q, k, v, causal=True)
        do_padded = np.zeros((2, 48, 8, 8))
        do_padded[:, :45] = do

        def work(comm):
            own = [dist.shard(comm, dist.pad(comm, x)) for x in (q, k, v)]
            o_r, backprop = dist.attention(comm, *own, causal=True)
            found = (o_r, *backprop(dist.shard(comm, do_padded)))
            return [dist.unshard(comm, x)[:, :45] for x in found]

        expected = (o, *fa2cupy.backward(q, k, v, o, lse, do, causal=True))
        for found, wanted in zip(dist.simulate(4, work)[0], expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


@st.composite
def calls(draw):
    """Draws a number of ranks, sizes that it divides, a scheme, and options."""
    size, order = draw(st.integers(2, 5)), draw(st.sampled_from(["zigzag", "contiguous"]))
    scheme = draw(st.sampled_from(SCHEMES))
    unit = size * (2 if order == "zigzag" else 1)
    with_heads = {"heads": size, "gather": 1, "hybrid": ranks.ranks_per_host(size)}[scheme]
    per_rank = draw(st.integers(1, 2 if scheme == "heads" else 3))
    heads_kv = with_heads * per_rank
    sizes = {
        "batch": draw(st.integers(1, 2)),
        "seqlen_q": unit * draw(st.integers(0, 5)),
        "seqlen_k": unit * draw(st.integers(0, 5)),
        "num_heads": heads_kv * draw(st.integers(1, 3)),
        "num_heads_kv": heads_kv,
        "head_dim": draw(st.integers(1, 5)),
    }
    limit = st.none() | st.integers(0, 20)
    options = {"causal": draw(st.booleans()), "window": draw(st.none() | st.tuples(limit, limit))}
    if draw(st.booleans()):
        options |= {"dropout_p": 0.3, "seed": draw(st.integers(0, 2**64 - 1))}
    if draw(st.booleans()):
        options["sink"] = np.linspace(-1, 1, sizes["num_heads"])
    if options["causal"] and draw(st.booleans()):
        options["alibi_slopes"] = np.linspace(0.1, 0.5, sizes["num_heads"])
    how = {"scheme": scheme, "order": order, "head_groups": draw(st.sampled_from([None, 1, per_rank]))}
    return size, sizes, how, options


@settings(max_examples=40, deadline=None)
@given(calls())
def test_any_call_is_that_of_the_whole_sequence(call):
    size, sizes, how, options = call
    inputs = make_inputs("float64", **sizes)
    assert_close(ranks.on_ranks(size, inputs, how=how, **options), ranks.whole_call(inputs, **options), 1e-11)


class TestCopies:
    """Large arrays on a GPU are copied as words."""

    @settings(max_examples=200, deadline=None)
    @given(st.data())
    def test_words_are_the_elements(self, data):
        dtype = np.dtype(data.draw(st.sampled_from(["bool", "float16", "float32"])))
        shape = (*data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)), data.draw(st.integers(1, 24)))
        base = np.random.default_rng(0).integers(0, 2, [2 * n for n in shape]).astype(dtype)
        steps = [data.draw(st.sampled_from([1, 2])) for _ in shape[:-1]]
        first = data.draw(st.integers(0, shape[-1]))
        array = base[(*(slice(0, step * n, step) for step, n in zip(steps, shape, strict=False)), slice(first, None))]
        array = array[..., : shape[-1]]
        if data.draw(st.booleans()):
            array = array.swapaxes(0, array.ndim - 2)
        layout = word_layout(array.shape, array.strides, array.itemsize, array.ctypes.data)
        starts = [array.ctypes.data, *array.strides[:-1], array.shape[-1] * array.itemsize]
        assert (layout is None) == any(number % 8 for number in starts)
        if layout is not None:
            offset = array.ctypes.data - base.ctypes.data
            words = np.ndarray(layout[0], "uint64", base.data, offset, layout[1])
            np.testing.assert_array_equal(np.ascontiguousarray(words).view(dtype), array)

    def test_columns_apart_and_whole_words_stay_as_they_are(self):
        assert word_layout((4, 8), (32, 4), 2, 0) is None
        assert word_layout((4, 8), (64, 8), 8, 0) is None
