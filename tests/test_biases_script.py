"""The section biases of the benchmark without a GPU, from checks to files, tables and pages."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

import benchmark
import numpy as np
import pytest
from common import biases, measure, peers
from measured import features, rows
from support.fake_timing import FakeGpu, HastyGpu, needs_cupy
from support.fake_torch import FakeTensor, use_fake_torch

import fa2cupy
from fa2cupy.errors import UnsupportedProblemError
from fa2cupy.families.device import DeviceInfo


def shrunk(case: biases.BiasCase) -> biases.BiasCase:
    """Returns a case on few rows, with the same number of leading axes."""
    problem = dataclasses.replace(case.problem, batch=6, seqlen=12, num_heads=2, head_dim=16)
    return dataclasses.replace(case, problem=problem, leading=(1, 6) if case.work == "pair" else (6,))


@pytest.fixture
def small_biases(monkeypatch):
    """Leaves one size of each kind of work, in several blocks of sequences."""
    several = [one for one in biases.bias_cases() if one[0].work != "pair" or one[0].problem.seqlen == 256]
    monkeypatch.setattr(benchmark, "bias_cases", lambda: [[shrunk(case) for case in one] for one in several])
    monkeypatch.setattr(biases, "BLOCK_ELEMENTS", 2 * 12**2)
    monkeypatch.setattr(biases.fa2cupy, "backward", reproducible(fa2cupy.backward))


def reproducible(function):
    """Returns a backward that takes every deterministic call."""

    def backward(*arrays, deterministic=None, **options):
        return function(*arrays, **options)

    return backward


@pytest.fixture
def torch(monkeypatch):
    return use_fake_torch(monkeypatch)


@pytest.fixture
def cuequivariance(torch, monkeypatch):
    """Provides cuEquivariance's functions by their signatures, computed by NumPy."""

    def options(bias, mask, scale):
        assert bias.dtype == "float32" and bias.shape[:2] == (1, 1)
        if mask is not None:
            assert mask.dtype == "bool" and mask.shape[2:4] == (1, 1)
        padding = {} if mask is None else {"key_padding_mask": np.asarray(mask)[:, :, 0, 0]}
        return {"bias": np.asarray(bias), "softmax_scale": scale, "layout": "bhsd", **padding}

    def triangle_attention(q, k, v, bias, mask=None, scale=None, return_aux=False, *, kv_lengths=None):
        assert return_aux and all(x.flags.c_contiguous for x in (q, k, v))
        o, lse = fa2cupy.forward(*map(np.asarray, (q, k, v)), **options(bias, mask, scale))
        return o.view(FakeTensor), lse.view(FakeTensor), None

    def triangle_attention_bwd(d_o, o, q, k, v, bias, mask, actual_s_kv, lse, scale):
        assert actual_s_kv is None
        arrays = map(np.asarray, (q, k, v, o, lse, d_o))
        found = fa2cupy.backward(*arrays, return_dbias=True, **options(bias, mask, scale))
        return [x.view(FakeTensor) for x in found]

    torch.ops.cuequivariance = SimpleNamespace(triangle_attention_bwd=triangle_attention_bwd)
    monkeypatch.setitem(sys.modules, "cuequivariance_ops_torch", SimpleNamespace(__version__="1.2+ops"))
    package = SimpleNamespace(triangle_attention=triangle_attention)
    monkeypatch.setitem(sys.modules, "cuequivariance_torch", package)
    monkeypatch.setattr(peers.importlib.metadata, "version", lambda name: f"1.2 of {name}")
    return torch.ops.cuequivariance


EFFICIENT, WRITTEN_OUT, CUEQUIVARIANCE = (
    "torch efficient",
    "torch written out",
    "cuequivariance 1.2 of cuequivariance_torch",
)


def run_section(tmp_path, *extra, gpu=None):
    options = benchmark.parse_arguments(["--sections", "biases", "--rounds", "1", *extra])
    return benchmark.run(options, gpu or HastyGpu(), tmp_path)


def test_biases_from_checks_to_files(small_biases, cuequivariance, tmp_path, capsys):
    gpu = FakeGpu()
    run = run_section(tmp_path, gpu=gpu)
    assert not run.failures and not run.rows
    assert [path.name for path in tmp_path.iterdir()] == ["biases.csv"]
    made = measure.read_csv(tmp_path / "biases.csv")
    assert tuple(made[0]) == biases.COLUMNS
    kinds = {
        (work, dtype): ("plain", "bias", "bias, padding") if work == "pair" else ("plain", "bias")
        for work, dtype in (*(("pair", dtype) for dtype in ("bfloat16", "float32")),
                            *((work, "bfloat16") for work in ("sequences", "windows", "full")))
    }  # fmt: skip
    expected = set()
    for (work, dtype), names in kinds.items():
        for feature in names:
            providers = ["fa2cupy", EFFICIENT]
            providers += [CUEQUIVARIANCE] if work != "full" and feature != "plain" else []
            providers += [WRITTEN_OUT] if work == "windows" else []
            expected |= {(work, dtype, feature, operation, one) for operation in biases.OPERATIONS for one in providers}
    columns = ("work", "dtype", "feature", "operation", "provider")
    assert {tuple(row[name] for name in columns) for row in made} == expected and len(made) == len(expected)
    assert all((row["ratio"] == "1") is (row["provider"] != "fa2cupy") for row in made)
    with_cost = [row for row in made if row["over_plain"]]
    assert {(row["provider"], row["feature"]) for row in with_cost} == {
        ("fa2cupy", "bias"), ("fa2cupy", "bias, padding")
    }  # fmt: skip
    one = next(row for row in made if (row["feature"], row["operation"]) == ("bias", "default"))
    assert float(one["tflops"]) == pytest.approx(5 * 2 * 6 * 2 * 12**2 * 16 / 2e-3 / 1e12, rel=1e-4)
    symbols = {spec.symbol for spec in gpu.compiled}
    assert any("_bias_dbias_key_padding_mask" in one for one in symbols) and any("full_dbias" in one for one in symbols)
    told = capsys.readouterr().out
    assert f"with cuequivariance_torch {CUEQUIVARIANCE[15:]}, cuequivariance_ops_torch 1.2+ops" in told
    assert told.count("| pair of 6 x 12, float32 | 1.00 / 1.00 / 1.00 | 1.00 / 1.00 / 1.00 |") == 3
    assert benchmark.main(["--plot-only", str(tmp_path / "biases.csv")]) == 0
    assert capsys.readouterr().out.startswith("cost:\n| forward / default / deterministic | bias | bias, padding |\n")


def test_a_call_that_is_refused_is_an_empty_cell(small_biases, tmp_path, monkeypatch, capsys):
    taken = biases.fa2cupy.backward

    def backward(*arrays, deterministic=None, return_dbias=False, **options):
        if deterministic and return_dbias:
            raise UnsupportedProblemError("deterministic: not with return_dbias")
        return taken(*arrays, return_dbias=return_dbias, **options)

    monkeypatch.setattr(biases.fa2cupy, "backward", backward)
    run = run_section(tmp_path, "--peers")
    assert not run.failures
    made = measure.read_csv(tmp_path / "biases.csv")
    assert {row["feature"] for row in made if row["operation"] == "deterministic"} == {"plain"}
    told = capsys.readouterr().out
    assert "bfloat16 d=16 seqlen=12 batch=6 heads=2 full deterministic: without ours: deterministic: not with" in told
    assert "| windows of 6 x 12, bfloat16 | 1.00 / 1.00 / - |" in told


@pytest.mark.parametrize(
    ("name", "result", "text"),
    [("forward", 0, "o: "), ("forward", 1, "lse: "), *(("backward", i, f"d{'qkv'[i]}: ") for i in range(3)),
     ("backward", 3, "dbias: ")],
)  # fmt: skip
def test_wrong_results_are_reported_and_not_timed(small_biases, tmp_path, monkeypatch, name, result, text):
    function = getattr(biases.fa2cupy, name)

    def wrong(*arrays, **options):
        found = function(*arrays, **options)
        if "bias" in options:
            last = (..., slice(-1, None), slice(None), *(slice(None),) * (result == 3))  # of the axis of heads
            found[result][last] += 1
        return found

    monkeypatch.setattr(biases.fa2cupy, name, wrong)
    run = run_section(tmp_path, "--peers")
    operations = {"forward"} if name == "forward" else {"default", "deterministic"}
    own = [
        one for one in run.failures if (" full forward: " in one or " causal forward: " in one) == (name == "forward")
    ]
    assert own and all(one.startswith("WRONG: ") and f": {text}" in one for one in own)
    made = measure.read_csv(tmp_path / "biases.csv")
    assert {row["feature"] for row in made if row["operation"] in operations} == {"plain"}


def test_a_gradient_of_a_bias_that_lacks_a_block_of_sequences_is_wrong(small_biases, tmp_path, monkeypatch):
    function = biases.fa2cupy.backward

    def backward(*arrays, **options):
        found = function(*arrays, **options)
        if "bias" in options and options["bias"].shape[-4] == 1:
            part = [x[..., :1, :, :, :] if x.ndim > 3 else x for x in arrays]
            lse = arrays[4][..., :1, :, :]
            part[4] = lse
            padding = {k: v[..., :1, :] for k, v in options.items() if k == "key_padding_mask"}
            found[3][...] -= function(*part, **options | padding)[3]
        return found

    monkeypatch.setattr(biases.fa2cupy, "backward", backward)
    run = run_section(tmp_path, "--peers")
    assert run.failures and all("dbias: " in one for one in run.failures)
    assert not any("full (" in one for one in run.failures)


def test_peers_that_are_wrong_or_refuse_are_left_out(
    small_biases, cuequivariance, torch, tmp_path, monkeypatch, capsys
):
    right = cuequivariance.triangle_attention_bwd

    def wrong(*arguments):
        *gradients, dbias = right(*arguments)
        return (*gradients, dbias * 2)

    def refuse(*arguments):
        raise RuntimeError("no room")

    cuequivariance.triangle_attention_bwd = wrong
    torch.ops.aten._scaled_dot_product_efficient_attention = refuse
    run = run_section(tmp_path)
    assert run.failures and all(f"{CUEQUIVARIANCE}: result 3 differs" in one for one in run.failures)
    made = measure.read_csv(tmp_path / "biases.csv")
    assert {row["operation"] for row in made if row["provider"] == CUEQUIVARIANCE} == {"forward"}
    assert EFFICIENT not in {row["provider"] for row in made}
    assert "without torch efficient: no room" in capsys.readouterr().out


def test_without_cuequivariance_its_cells_are_empty(small_biases, torch, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "cuequivariance_torch", None)
    monkeypatch.setitem(sys.modules, "cuequivariance_ops_torch", None)
    assert not run_section(tmp_path, "--peers", "efficient", "cuequivariance").failures
    providers = {row["provider"] for row in measure.read_csv(tmp_path / "biases.csv")}
    assert providers == {"fa2cupy", EFFICIENT}
    assert "without cuequivariance: " in capsys.readouterr().out


def test_the_sizes_of_biases():
    works = list(biases.bias_cases())
    assert len(works) == 2 * 4 + 3
    for cases in works:
        problem = cases[0].problem
        assert {case.problem for case in cases} == {problem}
        assert len({case.feature for case in cases}) == len(cases) == (3 if cases[0].work == "pair" else 2)
        assert int(np.prod(cases[0].leading)) == problem.batch
    pair = works[0][2]
    assert (pair.leading, pair.problem.shape) == ((1, 256), (256, 256, 4, 32))
    xp = SimpleNamespace(random=np.random, asarray=np.asarray)
    own = {name: pair.with_axes(x).shape for name, x in pair.options(xp, 0).items() if name != "causal"}
    assert own == {"bias": (1, 1, 4, 256, 256), "key_padding_mask": (1, 256, 256)}


@needs_cupy
@pytest.mark.matrix
@pytest.mark.parametrize("operation", ("forward", "default"))
def test_kernels_of_biases_are_foretold(operation, monkeypatch):
    """Checks that calls with all leading axes launch the kernels that are compiled ahead."""
    from support import fake_gpu
    from support.fake_cupy import place

    device = DeviceInfo.named("sm_90")
    works = [one for one in biases.bias_cases() if one[0].problem.dtype == "bfloat16"]
    for case in (case for cases in works for case in cases if case.problem.seqlen not in (384, 512)):
        small = dataclasses.replace(case, problem=dataclasses.replace(case.problem, batch=2, num_heads=2))
        small = dataclasses.replace(small, leading=(*case.leading[:-1], 2))
        with fake_gpu.fake_gpu(monkeypatch, device, run=lambda launch: None) as launched:
            q, k, v, do = (place(small.with_axes(x)) for x in small.inputs(np))
            options = {
                name: place(small.with_axes(x)) if isinstance(x, np.ndarray) else x
                for name, x in small.options(np, 0).items()
            }
            o, lse = fake_gpu.forward(q, k, v, **options)
            if operation == "default":
                launched.clear()
                gradients = {f"return_{name}": True for name in small.gradients}
                fake_gpu.backward(q, k, v, o, lse, do, **gradients, **options)
        call = "forward" if operation == "forward" else "backward"
        assert tuple(stage.spec for stage in launched) == small.kernels(device, call).specs, case


def test_the_page_says_how_biases_are_measured_and_has_their_numbers(
    small_biases, cuequivariance, tmp_path, monkeypatch
):
    monkeypatch.setattr(rows, "_read", rows._read.__wrapped__)
    monkeypatch.setattr(rows, "SCRIPTS", tmp_path)
    assert features.biases().startswith("They have not been measured on this card yet: `python")
    folder = tmp_path / "results" / "h200"
    folder.mkdir(parents=True)
    assert not run_section(folder).failures
    text = features.biases()
    assert f"cuDNN 9.19 and {CUEQUIVARIANCE}:" in " ".join(text.split())
    assert "The time of PyTorch's memory-efficient operator over ours:" in text
    assert text.count("| full of 6 x 12, bfloat16 | 1.00 / 1.00 / 1.00 |") == 2
