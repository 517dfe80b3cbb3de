"""scripts/scaleout.py without GPUs: simulated ranks, and threads instead of one process per GPU."""

from __future__ import annotations

import importlib.util
import queue
import sys
import threading
import types
from functools import partial

import numpy as np
import pytest
import scaleout
from common import measure
from common.measure import TRAINING
from sequence_parallel import processes, rank
from sequence_parallel.devices import GpuDevice, HostDevice
from sequence_parallel.jobs import OPERATIONS, Job, Measurement, share_of
from sequence_parallel.torch_ring import TorchRingWork

import fa2cupy.distributed as dist
from fa2cupy.distributed.transport.threads import ThreadTransport, World

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="plots need matplotlib")


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    monkeypatch.setattr(scaleout, "can_plot", lambda: False)


def simulate(folder, *more: str) -> int:
    return scaleout.main(["--simulate", "--out", str(folder), "--heads", "4/2", *more])


def job(scheme: str, seqlen: int = 32) -> Job:
    return Job(measure.Problem("float64", 16, seqlen, 1, 4, True, 2), 2, scheme)


# --- simulated ranks --------------------------------------------------------------------------------------------------


def test_from_checks_to_files(tmp_path, capsys):
    assert simulate(tmp_path, "--rows", "64", "128") == 0
    rows = measure.read_csv(tmp_path / "scaleout.csv")
    assert tuple(rows[0]) == scaleout.COLUMNS
    keys = [(int(row["seqlen"]), row["scheme"], row["operation"]) for row in rows]
    schemes = [scheme for scheme in scaleout.SCHEMES if scheme != "hybrid"]  # two ranks do not have it
    assert keys == [(n, scheme, op) for n in (64, 128) for scheme in schemes for op in OPERATIONS]
    for row in rows:
        assert row["check"] == ("one call" if row["seqlen"] == "64" else "samples")
        assert row["equal"] == "1"
        assert float(row["error"]) < 1e-12
        ratio = float(row["alone_ms_median"]) / float(row["ms_median"])
        assert float(row["efficiency"]) == pytest.approx(ratio, rel=1e-3)
        assert 0 < float(row["host_ms"]) <= float(row["ms_max"])
        assert (row["ranks"], row["calls"], row["extra_bytes"]) == ("2", "2", "")
    assert "heads on 2 ranks" in capsys.readouterr().out


@pytest.mark.parametrize("rows", [64, 128])  # compared with one call, and with samples
def test_packed_documents_are_those_of_one_call(rows, tmp_path, monkeypatch, capsys):
    lengths = []
    right = rank.fa2cupy.forward

    def forward(q, k, v, *, cu_seqlens_q, max_seqlen_q, **options):
        lengths.append(np.diff(cu_seqlens_q))
        assert q.ndim == 3 and max_seqlen_q == lengths[-1].max()
        return right(q, k, v, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, **options)

    monkeypatch.setattr(rank, "fa2cupy", types.SimpleNamespace(forward=forward, backward=rank.fa2cupy.backward))
    assert simulate(tmp_path, "--rows", str(rows), "--documents", "5") == 0
    found = measure.read_csv(tmp_path / "scaleout-documents.csv")
    assert [(row["scheme"], row["operation"]) for row in found] == [("heads", one) for one in OPERATIONS]
    assert all(float(row["error"]) < 1e-12 and (row["equal"], row["documents"]) == ("1", "5") for row in found)
    assert all(len(one) == 5 and one.sum() == rows for one in lengths) and lengths
    share = (lengths[0].astype(float) ** 2).sum() / rows**2
    milliseconds = float(found[0]["ms_median"])
    whole = measure.Problem("float64", 16, rows, 1, 4, True, 2).tflops("forward", milliseconds)
    assert float(found[0]["tflops"]) == pytest.approx(share * whole / 2, rel=1e-3)
    assert "causal, 5 documents: forward" in capsys.readouterr().out


@pytest.mark.matrix
def test_graphs_are_timed_where_there_are_some(tmp_path, monkeypatch):
    monkeypatch.setattr(HostDevice, "captured", lambda device, call: call)
    assert simulate(tmp_path, "--rows", "64", "128") == 0
    rows = [row for row in measure.read_csv(tmp_path / "scaleout.csv") if row["operation"] == "graph"]
    assert [(row["seqlen"], row["scheme"]) for row in rows] == [("64", "heads"), ("64", "gather")]
    both = [row for row in measure.read_csv(tmp_path / "scaleout.csv") if row["operation"] == TRAINING]
    baseline = {row["scheme"]: row for row in both if row["seqlen"] == "64"}
    for row in rows:
        assert row["alone_ms_median"] == baseline[row["scheme"]]["alone_ms_median"] and float(row["tflops"]) > 0


@pytest.mark.parametrize(
    ("rows", "place", "name"),
    [(64, 0, "forward"), (128, 0, "forward"), (128, 1, "forward"), (128, 0, "backward"), (128, 2, "backward")],
)
def test_a_wrong_result_is_reported_and_not_timed(rows, place, name, tmp_path, monkeypatch, capsys):
    right = getattr(dist, name)

    def wrong(comm, *arrays, scheme, **options):
        results = list(right(comm, *arrays, scheme=scheme, **options))
        if scheme == "gather" and comm.rank == 1:  # both ranks must leave the job
            results[place] = results[place] + 1e-6
        return tuple(results)

    monkeypatch.setattr(dist, name, wrong)
    assert simulate(tmp_path, "--rows", str(rows)) == 1
    told = capsys.readouterr().out
    assert f"WRONG: gather on 2 ranks, float64 d=16 seqlen={rows}" in told and "1e-12 is allowed" in told
    assert {row["scheme"] for row in measure.read_csv(tmp_path / "scaleout.csv")} == {"heads"}


def test_a_result_that_is_not_a_number_is_wrong(tmp_path, monkeypatch, capsys):
    right = dist.backward

    def wrong(comm, *arrays, **options):
        results = right(comm, *arrays, **options)
        results[0][...] = np.nan
        return results

    monkeypatch.setattr(dist, "backward", wrong)
    assert simulate(tmp_path, "--rows", "64", "--schemes", "gather") == 1
    assert "WRONG: gather on 2 ranks" in capsys.readouterr().out
    assert not (tmp_path / "scaleout.csv").exists()


def test_repeated_calls_must_be_equal(tmp_path, monkeypatch, capsys):
    right, noise = dist.backward, np.random.default_rng(0)

    def noisy(comm, *arrays, **options):
        dq, dk, dv = right(comm, *arrays, **options)
        return dq, dk * (1 + 1e-14 * noise.random()), dv

    monkeypatch.setattr(dist, "backward", noisy)
    assert simulate(tmp_path, "--rows", "128", "--schemes", "heads") == 1
    assert "repeated calls differ" in capsys.readouterr().out


def test_a_job_that_fails_leaves_the_others(tmp_path, monkeypatch, capsys):
    right = dist.forward

    def failing(comm, *arrays, scheme, **options):
        if scheme == "heads":
            raise MemoryError("no memory")
        return right(comm, *arrays, scheme=scheme, **options)

    monkeypatch.setattr(dist, "forward", failing)
    assert simulate(tmp_path, "--rows", "64", "--schemes", "heads", "gather") == 1
    assert "FAILED: heads on 2 ranks, float64 d=16 seqlen=64 batch=1 heads=4/2 causal: MemoryError" in (
        capsys.readouterr().out
    )
    assert {row["scheme"] for row in measure.read_csv(tmp_path / "scaleout.csv")} == {"gather"}


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--ranks 1", "--ranks: expected at least 2, got 1"),
        ("--ranks x", "--ranks: expected an int of at least 1, got 'x'"),
        ("--ranks 8", "--ranks: expected at most 4, the number of GPUs, got 8"),
        ("--rows 0", "--rows: expected an int of at least 1, got '0'"),
        ("--rows 36 --ranks 4", "--rows: 36 is not a multiple of 8, two chunks for each of 4 ranks"),
        ("--rows 64 --full", "--full: not allowed with argument --rows"),
        ("--heads 16/3", "--heads: 16 is not a multiple of 3"),
        ("--heads 4/2 --ranks 4 --schemes heads", "--schemes: 'heads' needs a number of K/V heads"),
        ("--schemes all", "--schemes: invalid choice: 'all'"),
        ("--simulate", "--simulate: name a folder for its results with --out DIR"),
        ("--simulate --full --out x", "--full: simulated ranks have tiny problems"),
        ("--rows 32 --documents 33 --ranks 2", "--documents: 32 rows cannot be 33 documents"),
        ("--schemes gather --documents 2", "only 'heads' has documents"),
    ],
)
def test_arguments_that_cannot_be_are_refused_by_name(arguments, text, monkeypatch, capsys):
    monkeypatch.setattr(scaleout, "device_count", lambda: 4)
    with pytest.raises(SystemExit) as ended:
        scaleout.main(arguments.split())
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_without_several_gpus_it_says_so(monkeypatch, capsys):
    for count, there in ((0, "is none"), (1, "is one")):
        monkeypatch.setattr(scaleout, "device_count", lambda: count)
        assert scaleout.main([]) == 2
        told = capsys.readouterr().err
        assert told == f"this needs at least two CUDA GPUs, CuPy and NCCL, and there {there}; or --simulate\n"


def test_jobs_are_all_that_the_ranks_divide(monkeypatch):
    options = scaleout.argument_parser().parse_args(["--full", "--peers"])
    jobs = scaleout.all_jobs(options, scaleout.ranks_of(8), GpuDevice)
    assert {one.ranks for one in jobs} == {2, 4, 8}
    assert {one.problem.seqlen for one in jobs} == {32768, 131072, 524288, 1048576}
    narrow = [one.scheme for one in jobs if one.ranks == 8 and one.problem.heads_kv == 4]
    assert narrow == ["gather", "hybrid"] * 4
    assert len(jobs) == 4 * (3 * 2 + 3 * 3 + (3 * 3 - 1))  # two ranks have no hybrid
    assert scaleout.ranks_of(6) == [2, 4, 6]


@pytest.mark.parametrize(
    ("heads", "ranks", "share"),
    [((32, 8), 4, (8, 2)), ((16, 4), 8, (2, 1)), ((16, 16), 2, (8, 8)), ((32, 8), 3, None), ((16, 4), 32, None)],
)
def test_the_baseline_has_a_share_of_the_heads(heads, ranks, share):
    found = share_of(measure.Problem("bfloat16", 128, 4096, 1, heads[0], True, heads[1]), ranks)
    assert (found and (found.num_heads, found.heads_kv)) == share
    assert found is None or found.seqlen == 4096


# --- rows and pictures ------------------------------------------------------------------------------------------------


def made_up(scheme: str, seqlen: int, ranks: int) -> list[dict[str, object]]:
    calls = {"forward": [2.0, 3.0, 4.0], "backward": [5.0, 5.0, 5.0], "training": [7.0, 8.0, 12.0]}
    alone = {name: [0.9 * one for one in times] for name, times in calls.items()}
    one = Measurement("one call", 1e-3, True, 2**20, calls, alone, dict.fromkeys(calls, 0.5))
    slow = one._replace(times={**calls, "training": [8.0, 8.0, 8.0]}, host=dict.fromkeys(calls, 0.75))
    rows = scaleout.rows_of(job(scheme, seqlen)._replace(ranks=ranks), [one, slow])
    return [{"gpu": "Test GPU", "driver": "0.0", "date": "2026-01-01", **row} for row in rows]


def test_rows_have_the_times_of_the_slowest_rank():
    forward, backward, both = made_up("heads", 64, 2)
    assert (forward["ms_median"], backward["ms_median"]) == (3.0, 5.0)
    assert (both["ms_median"], both["ms_min"], both["ms_max"], both["calls"]) == (8.0, 8.0, 12.0, 3)
    assert both["efficiency"] == pytest.approx(0.9)
    assert both["host_ms"] == 0.75
    assert both["tflops"] == pytest.approx(7 * 64**2 * 4 * 16 / 2 / 8e-3 / 1e12)


@needs_matplotlib
def test_plot_only(tmp_path, monkeypatch, capsys):
    drawn = []
    monkeypatch.setattr(scaleout, "can_plot", lambda: True)
    draw = scaleout.line_panels
    monkeypatch.setattr(scaleout, "line_panels", lambda *all_of: drawn.append(all_of[-1]) or draw(*all_of))
    rows = [row for n in (4, 2) for scheme in ("heads", "gather") for s in (128, 64) for row in made_up(scheme, s, n)]
    measure.write_csv(tmp_path / "some.csv", scaleout.COLUMNS, rows)
    assert scaleout.main(["--plot-only", str(tmp_path / "some.csv")]) == 0
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"{tmp_path / 'some.png'}\n"
    (panels,) = drawn
    assert list(panels) == [("2 ranks", "heads 4/2"), ("4 ranks", "heads 4/2")]
    assert panels["2 ranks", "heads 4/2"]["gather"] == pytest.approx({64: 90.0, 128: 90.0})


@needs_matplotlib
@pytest.mark.parametrize(
    ("content", "reason"), [("hello\nworld\n", "it has no 'ranks'"), ("ranks\n", "it has no rows")]
)
def test_plot_only_of_something_else_is_a_sentence(content, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scaleout, "can_plot", lambda: True)
    path = tmp_path / "some.csv"
    path.write_text(content, encoding="utf-8")
    assert scaleout.main(["--plot-only", str(path)]) == 2
    assert reason in capsys.readouterr().err


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def ranks(monkeypatch):
    """Makes `on_gpus` use threads and NumPy; returns the world of each start by its port."""
    worlds: dict[str, World] = {}

    def from_env(environment, *, ranks_per_host, timeout):
        world = worlds.setdefault(environment["MASTER_PORT"], World(2, timeout))
        rank = int(environment["RANK"])
        return dist.Communicator(rank, 2, ThreadTransport(world, rank))

    class Process(threading.Thread):
        exitcode = None

        def __init__(self, target, args, daemon):
            super().__init__(target=target, args=args, daemon=daemon)

        def kill(self):
            for world in worlds.values():
                world.fail(0, "killed")

    class Device(HostDevice):
        gpu = None

    context = types.SimpleNamespace(Queue=queue.Queue, Process=Process)
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(Device=lambda rank: types.SimpleNamespace(use=int)))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(processes.multiprocessing, "get_context", lambda method: context)
    monkeypatch.setattr(dist.Communicator, "from_env", from_env)
    monkeypatch.setattr(processes, "GpuDevice", Device)
    monkeypatch.setattr(processes, "TIMEOUT_S", 20.0)
    monkeypatch.setattr(processes, "POLL_S", 0.02)
    return worlds


def test_ranks_measure_job_by_job(ranks):
    jobs = [job("heads"), job("gather")]
    found = list(processes.on_gpus(jobs))
    assert [one for one, _ in found] == jobs
    assert all([one.equal for one in by_rank] == [True, True] for _, by_rank in found)
    assert all(len(one.times["training"]) == 2 for _, by_rank in found for one in by_rank)
    assert len(ranks) == 1


def test_other_processes_go_on_after_a_failure(ranks, monkeypatch, capsys):
    right = rank.Rank.measure

    def failing(self, one):
        if one.scheme == "gather" and self.comm.rank == 1:
            raise MemoryError("out of memory\nin CuPy")
        return right(self, one)

    monkeypatch.setattr(rank.Rank, "measure", failing)
    jobs = [job("heads"), job("gather"), job("heads", 64)]
    found = dict(processes.on_gpus(jobs))
    assert list(found) == jobs
    assert found[jobs[1]].startswith("rank ")
    assert all(len(found[jobs[place]]) == 2 for place in (0, 2))
    assert len(ranks) == 2
    assert "out of memory" in capsys.readouterr().err


def test_ranks_that_do_not_reach_each_other_end_the_run(ranks, monkeypatch, tmp_path, capsys):
    def no_nccl(environment, *, ranks_per_host, timeout):
        raise ImportError("CuPy finds no NCCL")

    monkeypatch.setattr(dist.Communicator, "from_env", no_nccl)
    gpu = types.SimpleNamespace(name="Test GPU", driver="0.0", precompile=lambda *all_of: None)
    monkeypatch.setattr(scaleout, "find_gpu", lambda: gpu)
    monkeypatch.setattr(scaleout, "device_count", lambda: 2)
    arguments = ["--rows", "64", "--heads", "4/2", "--peers", "--out", str(tmp_path)]
    monkeypatch.setattr(GpuDevice, "dtype", "float64")
    assert scaleout.main(arguments) == 1
    assert ": ImportError: CuPy finds no NCCL" in capsys.readouterr().err.splitlines()[-1]


def test_a_process_that_dies_is_an_error():
    def nothing(timeout):
        raise queue.Empty

    dead = [types.SimpleNamespace(exitcode=code) for code in (None, -6)]
    with pytest.raises(processes.RankError, match=r"the processes of ranks \[1\] have ended") as raised:
        next(processes.collected(types.SimpleNamespace(get=nothing), dead, 1))
    assert not raised.value.is_setup


# --- PyTorch ----------------------------------------------------------------------------------------------------------


def test_without_torch_is_one_line(ranks, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    jobs = [job("heads"), job(scaleout.PEER), job("gather"), job(scaleout.PEER)]
    _, failed = scaleout.run(jobs, processes.on_gpus, {}, tmp_path / "scaleout.csv")
    assert failed == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("without")]
    assert len(told) == 1 and told[0].startswith("without torch ring on 2 ranks") and "torch" in told[0]
    assert {row["scheme"] for row in measure.read_csv(tmp_path / "scaleout.csv")} == {"heads", "gather"}


@pytest.mark.parametrize("is_right", [True, False])
def test_the_ring_of_torch_is_checked_and_timed(is_right, ranks, monkeypatch, tmp_path, capsys):
    class Ring:
        name = scaleout.PEER

        def __init__(self, gpu, rank, size, port):
            world = ranks.setdefault(str(port), World(size, 5.0))
            self.comm = dist.Communicator(rank, size, ThreadTransport(world, rank))

        def peak_bytes(self, call):
            return 1000 + sum(one.nbytes for one in call())

        def release(self):
            pass

    class RingWork(rank.Work):
        def __init__(self, ring, arrays):
            calls = [partial(call, ring.comm, scheme="gather") for call in (dist.forward, dist.backward)]
            super().__init__(*calls, arrays)

        def arrays(self):
            o, _, *gradients = self.training()
            return o if is_right else o + 1e-6, *gradients

    monkeypatch.setattr(processes, "TorchRing", Ring)
    monkeypatch.setattr(rank, "TorchRingWork", RingWork)
    rows, failed = scaleout.run([job(scaleout.PEER)], processes.on_gpus, {}, tmp_path / "scaleout.csv")
    assert failed == 0
    assert [row["extra_bytes"] for row in rows] == ([1000] * 3 if is_right else [])
    assert is_right or "its results are not ours" in capsys.readouterr().out


def test_the_operators_of_torch_get_their_arguments():
    calls = []

    class Tensor(str):
        def contiguous(self):
            return self

        def transpose(self, *axes):
            return Tensor(f"{self}^T")

    def forward(*arguments, **keywords):
        calls.append((arguments, keywords))
        return tuple(map(Tensor, ("o", "lse", "cum_q", "cum_k", "max_q", "max_k", "seed", "offset", "mask")))

    def backward(*arguments):
        calls.append(arguments)
        return tuple(map(Tensor, ("dq", "dk", "dv", "more")))

    operators = types.SimpleNamespace(
        _scaled_dot_product_ring_cudnn_attention=forward, _scaled_dot_product_ring_cudnn_attention_backward=backward
    )
    ring = types.SimpleNamespace(own=Tensor, array=str, mesh="mesh", calls=operators)
    work = TorchRingWork(ring, ("q", "k", "v", "do"))
    assert work.arrays() == ("o^T", "dq^T", "dk^T", "dv^T")
    assert calls[0][0] == ("mesh", "q", "k", "v") and calls[0][1]["is_causal"]
    places = ("cum_q", "cum_k", "max_q", "max_k")
    assert calls[-1] == ("mesh", "do", "q", "k", "v", "o", "lse", "seed", "offset", None, *places, 0.0, True)
    assert work.backward() == ("dq", "dk", "dv")
