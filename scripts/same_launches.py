"""Checks that a change keeps what calls queue: compares the kernels, records and copies of fixed calls with a record.

    python scripts/same_launches.py before.json                       makes the calls; needs no GPU and computes nothing
    python scripts/same_launches.py after.json --against before.json  the same, then lists the calls that differ
    python scripts/same_launches.py before.json --tree FOLDER         the calls of another checkout

Run it before and after a change to the preparation of calls, or to ``fa2cupy.distributed``, that is to keep what
reaches the driver. A record has, for each call, rank and stream, the kernels with their blocks and all members of their
records, copies and messages with their places, and the signals and events that order them. Addresses are replaced by
names of arrays; memory that a call allocates has numbers. The sources of the kernels are compared apart from the calls,
by digests that ignore comments: see ``same_code.py`` for their machine code.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from common.recorded_cupy import DEVICES, captured, communicators, install, named, placed, recorder
from common.records import add_record_arguments

#: Ranks of the calls on several GPUs, on two hosts.
SIZE, PER_HOST = 4, 2
DTYPES = ("float16", "bfloat16", "float32", "float64")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a call differs from that of `--against`, or is not in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_record_arguments(parser, "the record")
    parser.add_argument("--tree", metavar="FOLDER", help="a checkout, instead of the one of the script")
    parser.add_argument("--calls", nargs="+", metavar="TEXT", help="only calls whose names have all of these texts")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="only calls with one of these names")
    parser.add_argument("--ignore-order", action="store_true", help="do not compare signals and waits for events")
    options = parser.parse_args(arguments)
    install()
    if options.tree:
        sys.path.insert(0, str(Path(options.tree).resolve()))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FA2CUPY_CACHE_DIR"] = folder
        os.environ["FA2CUPY_CACHE_PATH"] = os.environ["XDG_CONFIG_HOME"] = ""
        after = {
            "calls": dict(records(options.calls or (), options.names)),
            "kernels": dict(sorted(recorder.kernels.items())),
        }
    options.out.write_text(_lines(after) + "\n", encoding="utf-8")
    print(f"{len(after['calls'])} calls, written to {options.out}")
    return 0 if options.against is None else compare(options.against, after, ("order",) if options.ignore_order else ())


def _lines(value: Any, depth: int = 0) -> str:
    """JSON with a line for each entry of a stream."""
    inner = "\n" + " " * (depth + 1)
    if isinstance(value, list) and value:
        return f"[{inner}" + f",{inner}".join(map(json.dumps, value)) + "]"
    if isinstance(value, dict) and value:
        texts = (f"{json.dumps(key)}: {_lines(one, depth + 1)}" for key, one in value.items())
        return f"{{{inner}" + f",{inner}".join(texts) + "}"
    return json.dumps(value)


def compare(before: Mapping[str, Any], after: Mapping[str, Any], ignored: Sequence[str] = ()) -> int:
    """Prints the calls and kernels that differ or are new, with the first difference; returns 1 if there are any."""
    differing = 0
    for name, ranks in after["calls"].items():
        found = next(_differences(before["calls"].get(name), ranks, ignored), None)
        if found is not None:
            differing += 1
            print(f"differs: {name}: {found}" if name in before["calls"] else f"new: {name}")
    sources = [name for name, digest in after["kernels"].items() if before["kernels"].get(name, digest) != digest]
    for name in sources:
        print(f"another source: {name}")
    print(
        f"{len(after['calls']) - differing} calls are the same, {differing} differ, {len(sources)} sources of kernels"
    )
    return 1 if differing or sources else 0


def _differences(before: Any, after: Any, ignored: Sequence[str], path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yields where two records differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys((*before, *after)):
            if key not in ignored:
                yield from _differences(before.get(key), after.get(key), ignored, (*path, key))
    elif isinstance(before, list) and isinstance(after, list):
        for number, (old, new) in enumerate(itertools.zip_longest(before, after)):
            yield from _differences(old, new, ignored, (*path, str(number)))
    elif before != after:
        yield f"{' / '.join(path)}: {before} before, {after} after"


def records(texts: Sequence[str], names: Sequence[str] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the record of each call by its name."""
    for call in itertools.chain(on_one_gpu(), on_several_gpus()):
        if all(text in call.name for text in texts) and (names is None or call.name in names):
            yield call.name, call.record()
            recorder.release()


# ------------------------------------------------------------------------------------------------------------- arrays


def array(name: str, shape: tuple[int, ...], dtype: str = "float16", values: Any = 0) -> Any:
    """An array on the current device."""
    of_host = np.array(values, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    return placed(name, np.broadcast_to(of_host, shape) if values == 0 else np.full(shape, of_host))


def wide(dtype: str) -> str:
    """The dtype of sums."""
    return "float64" if dtype == "float64" else "float32"


class Sizes(NamedTuple):
    """Those of a problem."""

    batch: int = 2
    rows: int = 300
    keys: int = 420
    heads: int = 4
    heads_kv: int = 2
    head_dim: int = 64
    dtype: str = "float16"
    is_packed: bool = False
    layout: str = "bshd"

    def inputs(self, *names: str) -> list[Any]:
        """The arrays of these names."""
        return [self._input(name) for name in names]

    def _input(self, name: str) -> Any:
        batch = () if self.is_packed else (self.batch,)
        rows, heads = (self.keys, self.heads_kv) if name in ("k", "v") else (self.rows, self.heads)
        if name in ("lse", "delta", "dlse"):
            return array(name, (*batch, heads, rows), wide(self.dtype))
        own = (rows, heads) if self.layout == "bshd" or self.is_packed else (heads, rows)
        return array(name, (*batch, *own, self.head_dim), self.dtype)

    def feature(self, name: str) -> dict[str, Any]:
        """Keywords of a feature."""
        batch, heads, rows, keys = self.batch, self.heads, self.rows, self.keys
        of_scores = {
            "bias": (batch, heads, rows, keys),
            "bias of keys": (batch, 1, 1, keys),
            "mask": (batch, 1, rows, keys),
        }
        if name == "several":
            return {key: x for one in ("causal", "window", "padding", "sink") for key, x in self.feature(one).items()}
        if name == "packed":
            ends = np.array([0, 100, 100, 220, min(rows, keys)], "int32")
            cu = {f"cu_seqlens_{side}": placed(f"cu_seqlens_{side}", ends) for side in "qk"}
            return {**cu, "max_seqlen_q": 120, "max_seqlen_k": 120}
        kind, _, rest = name.partition(" of ")
        if kind in ("bias", "mask"):
            dtype = "bool" if kind == "mask" else wide(self.dtype) if rest else self.dtype
            return {kind: array(kind, of_scores[name], dtype)}
        return {
            "causal": lambda: {"causal": True},
            "window": lambda: {"window": (100, 20)},
            "softcap": lambda: {"softcap": 30.0},
            "alibi": lambda: {"alibi_slopes": array("alibi_slopes", (heads,), wide(self.dtype))},
            "padding": lambda: {"key_padding_mask": array("key_padding_mask", (batch, keys), "bool")},
            "sink": lambda: {"sink": array("sink", (heads,), wide(self.dtype))},
            "dropout": lambda: {"dropout_p": 0.25, "seed": 1234567},
            "function": self._function,
            "block mask": self._block_mask,
        }[name]()

    def _function(self) -> dict[str, Any]:
        from fa2cupy import mods

        table = array("table", (32, self.heads), wide(self.dtype))
        return {"score_mod": mods.t5_relative(32), "score_args": (table,), "mask_mod": mods.causal()}

    def _block_mask(self) -> dict[str, Any]:
        import fa2cupy

        tiles = np.tri(-(-self.rows // 128), -(-self.keys // 128), dtype=bool)[None, None]
        states = placed("states", tiles)
        return {"block_mask": fa2cupy.BlockMask(states, self.rows, self.keys)}


FEATURES = (
    "causal", "window", "softcap", "alibi", "bias", "bias of keys", "mask", "padding", "sink", "dropout", "function",
    "block mask", "several",
)  # fmt: skip


# --------------------------------------------------------------------------------------------------------- on one GPU


class Call(NamedTuple):
    """A call with the name that stands for it in records."""

    name: str
    record: Callable[[], dict[str, Any]]


def on_one_gpu() -> Iterator[Call]:
    """Yields calls on one GPU."""
    for device, dtype in itertools.product(range(len(DEVICES)), DTYPES):
        for dim, features in itertools.product((40, 64, 128, 256), ((), ("causal",))):
            yield of_device(device, both, Sizes(head_dim=dim, dtype=dtype), features)
        if DEVICES[device]["major"] < 8:
            continue  # all of its kernels are those of an older family, which other devices have, too
        for feature in FEATURES[1:]:
            yield of_device(device, both, Sizes(dtype=dtype), (feature,))
        yield of_device(device, both, Sizes(dtype=dtype, rows=420, is_packed=True), ("packed", "causal"))
        yield of_device(device, both, Sizes(dtype=dtype, layout="bhsd"), ("causal",), layout="bhsd")
        yield of_device(device, both, Sizes(8, 1024, 1024, 16, 16, 128, dtype), ("causal",))
        yield of_device(device, both, Sizes(1, 64, 8192, 8, 8, 128, dtype), ())
        for how in ({"method": "two_pass"}, {"method": "single_pass"}, {"deterministic": True}, {"num_splits": 3}):
            yield of_device(device, both, Sizes(dtype=dtype), (), **how)
        for call in (given_delta, strided, in_graph, decode, merge):
            yield of_device(device, call, Sizes(dtype=dtype), ())
    for device, precision in itertools.product(range(2), ("ieee", "split")):
        for dim, features in itertools.product((64, 128, 256), ((), ("causal",), ("bias",))):
            sizes = Sizes(head_dim=dim, dtype="float32")
            yield of_device(device, both, sizes, features, precision=precision)
    yield of_device(0, tile_states, Sizes(), ())


def of_device(device: int, call: Callable[..., None], sizes: Sizes, features: Sequence[str], **options: Any) -> Call:
    """A call on one GPU."""
    usual = Sizes()._asdict()
    own = [f"{key} {value}" for key, value in sizes._asdict().items() if value != usual[key] and key != "dtype"]
    own += [*features, *(f"{name}={value}" for name, value in options.items())]
    name = ", ".join([DEVICES[device]["name"].decode(), call.__name__, sizes.dtype, *own])

    def record() -> dict[str, Any]:
        from fa2cupy import UnsupportedProblemError

        with recorder.rank(0, device):
            try:
                call(sizes, **options, **{key: x for one in features for key, x in sizes.feature(one).items()})
            except UnsupportedProblemError:
                return {"is refused": True, "rank 0": recorder.record(0)}
            return {"rank 0": recorder.record(0)}

    return Call(name, record)


def both(sizes: Sizes, **options: Any) -> None:
    """Makes a forward and a backward."""
    import fa2cupy

    of_backward = {name: options.pop(name) for name in ("method", "deterministic") if name in options}
    arrays = sizes.inputs("q", "k", "v", "o", "lse", "do")
    named(fa2cupy.forward(*arrays[:3], **options), "new o", "new lse")
    extra = {f"return_d{name}": True for name in ("bias", "sink") if name in options}
    if "score_mod" in options:
        extra["return_dscore_args"] = True
    named(fa2cupy.backward(*arrays, **options, **of_backward, **extra), "dq", "dk", "dv", "extra 1", "extra 2")


def given_delta(sizes: Sizes) -> None:
    """Makes a delta and backwards that take it, and the gradient of lse."""
    import fa2cupy

    arrays = sizes.inputs("q", "k", "v", "o", "lse", "do")
    delta, dlse = fa2cupy.delta(arrays[3], arrays[5]), *sizes.inputs("dlse")
    named([delta], "delta")
    for given in ({"delta": delta}, {"dlse": dlse}, {"delta": delta, "dlse": dlse}):
        named(fa2cupy.backward(*arrays, **given), "dq", "dk", "dv")


def strided(sizes: Sizes) -> None:
    """Makes calls on arrays that kernels take, and on those that they do not take, with and without `out`."""
    import fa2cupy

    q, k, v = sizes.inputs("q", "k", "v")
    together = array("together", (*q.shape[:3], 3 * sizes.head_dim), sizes.dtype)
    odd = array("odd", (*q.shape[:3], sizes.head_dim + 1), sizes.dtype)
    out = *sizes.inputs("o"), None
    for one in (together[..., : sizes.head_dim], odd[..., 1:]):
        named(fa2cupy.forward(one, k, v), "o", "lse")
        named(fa2cupy.forward(one, k, v, out=out), "o", "lse")
    do, o, lse = sizes.inputs("do", "o", "lse")
    out = odd[..., 1:], None, None
    named(fa2cupy.backward(q, k[..., ::-1], v, o, lse, do, out=out), "dq", "dk", "dv")


def in_graph(sizes: Sizes) -> None:
    """Makes calls that a graph captures."""
    both(sizes)
    recorder.forget()
    with captured():
        both(sizes)
        strided(sizes)


def decode(sizes: Sizes) -> None:
    """Makes calls with a cache: contiguous or in pages, with rows to append, and with features."""
    import fa2cupy

    heads, dim, dtype = sizes.heads_kv, sizes.head_dim, sizes.dtype
    for rows, batch, keys in ((1, 2, 512), (4, 3, 8192), (1, 64, 4096)):
        q = array("q", (batch, rows, sizes.heads, dim), dtype)
        lengths = array("cache_seqlens", (batch,), "int32", 100)
        k, v = (array(name, (batch, rows, heads, dim), dtype) for name in ("k", "v"))
        caches = [array(name, (batch, keys, heads, dim), dtype) for name in ("k_cache", "v_cache")]
        pages = [array(name, (batch * keys // 256, 256, heads, dim), dtype) for name in ("k_cache", "v_cache")]
        table = array("block_table", (batch, keys // 256), "int32")
        sink = array("sink", (sizes.heads,), wide(dtype))
        for given, how in (
            (caches, {}),
            (caches, {"k": k, "v": v}),
            (pages, {"k": k, "v": v, "block_table": table}),
            (caches, {"window": (100, 0), "softcap": 20.0, "sink": sink}),
            (caches, {"num_splits": 1}),
        ):
            named(fa2cupy.decode(q, *given, lengths, **how), "o", "lse")


def merge(sizes: Sizes) -> None:
    """Merges results."""
    import fa2cupy

    o, lse = sizes.inputs("o", "lse")
    parts = array("o_parts", (3, *o.shape), sizes.dtype), array("lse_parts", (3, *lse.shape), wide(sizes.dtype))
    named(fa2cupy.merge(*parts), "new o", "new lse")
    named(fa2cupy.merge(*parts, out=(o, lse)), "new o", "new lse")


def tile_states(sizes: Sizes) -> None:
    """Makes a sparse map of a function."""
    import fa2cupy
    from fa2cupy import mods

    like = array("like", (1,))
    found = fa2cupy.block_mask(mods.causal(), (), 1, sizes.heads, sizes.rows, sizes.keys, like=like)
    named([found.states], "states")


# ----------------------------------------------------------------------------------------------------- on several GPUs


def on_several_gpus() -> Iterator[Call]:
    """Yields calls of several ranks, by copies to each other's memory and by NCCL."""
    few = Sizes(2, 512, 512, 16, 8, 64)
    for scheme, by_copies in itertools.product(("heads", "gather", "hybrid"), (True, False)):
        for dtype in ("float16", "float32"):
            yield of_ranks(few._replace(dtype=dtype), by_copies, ("causal",), scheme=scheme)
        for features in ((), *((feature,) for feature in FEATURES[1:]), ("alibi", "causal")):
            yield of_ranks(few, by_copies, features, scheme=scheme)
        yield of_ranks(few._replace(layout="bhsd"), by_copies, ("causal",), scheme=scheme, layout="bhsd")
        yield of_ranks(few._replace(batch=1), by_copies, ("causal",), scheme=scheme)
        yield of_ranks(few, by_copies, ("causal",), scheme=scheme, order="contiguous", head_groups=2)
        yield of_ranks(few, by_copies, ("causal",), scheme=scheme, deterministic=True, head_groups=1)
        yield of_ranks(few._replace(is_packed=True), by_copies, ("packed", "causal"), scheme=scheme)
        yield of_ranks(few._replace(rows=1024), by_copies, ("window",), scheme=scheme)
        yield of_ranks(few, by_copies, ("causal",), scheme=scheme, is_captured=True)
        yield of_ranks(Sizes(1, 16384, 16384, 32, 8, 16), by_copies, ("causal",), scheme=scheme)
        yield of_ranks(Sizes(1, 131072, 131072, 32, 32, 8), by_copies, ("causal",), scheme=scheme)
    for by_copies in (True, False):
        yield of_ranks(few, by_copies, ("causal",))


def of_ranks(whole: Sizes, by_copies: bool, features: Sequence[str], is_captured: bool = False, **options: Any) -> Call:
    """A forward and a backward by all ranks, twice, and the second one is recorded: the first allocates windows."""
    import fa2cupy.distributed as dist
    from fa2cupy import UnsupportedProblemError

    own = whole._replace(rows=whole.rows // SIZE, keys=whole.keys // SIZE)
    sizes = f"{whole.batch} x {whole.rows} x {whole.heads} / {whole.heads_kv} x {whole.head_dim}, {whole.dtype}"
    texts = [*features, *(f"{name}={value}" for name, value in options.items()), *["captured"] * is_captured]
    name = ", ".join([f"{SIZE} ranks", "copies" if by_copies else "messages", sizes, *texts])

    def calls(comm: Any) -> None:
        of_backward = {key: options[key] for key in ("deterministic",) if key in options}
        keywords = {key: x for key, x in options.items() if key not in of_backward}
        keywords |= {key: x for one in features for key, x in whole.feature(one).items()}
        for key in ("bias", "mask"):
            if key in keywords and keywords[key].shape[-2] > 1:
                batch, heads, _, keys = keywords[key].shape
                keywords[key] = array(key, (batch, heads, own.rows, keys), str(keywords[key].dtype))
        extra = {f"return_d{key}": True for key in ("bias", "sink") if key in keywords}
        arrays = own.inputs("q", "k", "v", "o", "lse", "do")
        named(dist.forward(comm, *arrays[:3], **keywords), "new o", "new lse")
        found = dist.backward(comm, *arrays, **keywords, **of_backward, **extra)
        named(found, "dq", "dk", "dv", "extra 1", "extra 2")
        if extra:
            named([dist.total(comm, found[3])], "total")

    def of_rank(communicator: Any) -> dict[str, Any]:
        rank = communicator.rank_id()
        with recorder.rank(rank):
            comm = dist.Communicator.from_nccl(communicator, ranks_per_host=PER_HOST, timeout=60)
            try:
                calls(comm)
                recorder.forget()
                with captured() if is_captured else contextlib.nullcontext():
                    calls(comm)
            except UnsupportedProblemError:
                return {"is refused": True}
            return recorder.record(rank)

    def record() -> dict[str, Any]:
        recorder.shares_memory = by_copies
        with ThreadPoolExecutor(SIZE) as pool:
            found = list(pool.map(of_rank, communicators(SIZE)))
        return {f"rank {rank}": one for rank, one in enumerate(found)}

    return Call(name, record)


if __name__ == "__main__":
    sys.exit(main())
