"""The benchmark of features, and further sections of the main benchmark, without a GPU."""

from __future__ import annotations

import dataclasses
import re
import sys
from types import SimpleNamespace

import benchmark
import features
import numpy as np
import pytest
from common import check, decoding, feature_cases, flex, function_cases, measure, peers, second_order, sparse
from common.measure import Candidate, Problem
from support.fake_timing import FakeGpu, HastyGpu, needs_cupy
from support.fake_torch import FakeTensor, use_fake_torch

import fa2cupy
from fa2cupy.families.device import DeviceInfo


@pytest.fixture
def small_features(monkeypatch):
    for name, value in {"TOKENS": 256, "MODEL_DIM": 64, "LONGEST_SCORES": 128, "SMALL_TOKENS": 64}.items():
        monkeypatch.setattr(feature_cases, name, value)
    monkeypatch.setattr(features, "TOKENS", 256)


def feature_options(*extra):
    return features.parse_arguments(["--head-dims", "32", "--seqlens", "128", "256", "--rounds", "1", *extra])


class FakeFlex:
    """A peer that calls fa2cupy."""

    name, features = "torch flex", flex.FlexAttention.features
    supports = flex.FlexAttention.supports
    release = staticmethod(lambda: None)
    factor = 1

    def __init__(self, gpu):
        pass

    def candidate(self, case, sets, options, operation):
        q, k, v, do = case.arrays(sets[0])
        o, lse = features.fa2cupy.forward(q, k, v, **options[0])
        if operation == "forward":
            return Candidate(self.name, lambda: (o * self.factor,))
        return Candidate(self.name, lambda: features.fa2cupy.backward(q, k, v, o, lse, do, **options[0]))

    def arrays(self, operation, results):
        return results


def test_features_from_checks_to_files(small_features, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(features.PEERS, "flex", FakeFlex)
    run = features.run(feature_options("--families", "default", "sm80"), HastyGpu(), tmp_path)
    assert not run.failures
    rows = measure.read_csv(tmp_path / "features.csv")
    assert tuple(rows[0]) == features.COLUMNS
    ours = [row for row in rows if row["provider"] == "fa2cupy"]
    everywhere = {"plain", "softcap", "alibi", "padding", "sink", "dropout"}
    scores = {f"{name}{kind}" for name in ("bias", "dbias") for kind in ("", "_batch", "_full")}
    assert {row["feature"] for row in ours if row["seqlen"] == "128"} == {*everywhere, "mask", *scores}
    assert {row["feature"] for row in ours if row["seqlen"] == "256"} == {*everywhere, "window127"}
    assert {row["feature"] for row in ours if row["seqlen"] == "16"} == {"plain", "packed"}
    assert {row["operation"] for row in ours if row["feature"] == "dbias"} == {"backward"}
    families = {name: {row["family"] for row in ours if row["feature"] == name} for name in ("plain", "packed")}
    assert families == dict.fromkeys(("plain", "packed"), {"sm90", "sm80"})
    assert all((row["over_plain"] == "1") == (row["feature"] != "packed") for row in ours)
    theirs = [row for row in rows if row["provider"] == "torch flex"]
    assert {(row["feature"], row["operation"]) for row in theirs} == {
        (feature, operation) for feature in ("softcap", "alibi") for operation in ("forward", "backward")
    }
    assert {row["ratio"] for row in theirs} == {"1"}
    assert any("softcap" in line and "ratio" in line for line in features.summary(run.rows))


def test_features_that_are_wrong_are_not_timed(small_features, tmp_path, monkeypatch, capsys):
    right = features.fa2cupy.forward

    def forward(*arguments, softcap=None, **options):
        return right(*arguments, **options)

    monkeypatch.setattr(features.fa2cupy, "forward", forward)
    monkeypatch.setattr(measure, "Gpu", FakeGpu)
    monkeypatch.setitem(features.PEERS, "flex", FakeFlex)
    monkeypatch.setattr(FakeFlex, "factor", 2)
    arguments = ["--features", "softcap", "alibi", "--head-dims", "32", "--seqlens", "256", "--rounds", "1"]
    assert features.main([*arguments, "--out", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "WRONG: softcap bfloat16 d=32 seqlen=256" in told and "torch flex: result 0 differs" in told
    rows = measure.read_csv(tmp_path / "features.csv")
    assert {(row["feature"], row["operation"], row["provider"]) for row in rows} == {
        ("alibi", "forward", "fa2cupy"), ("alibi", "backward", "fa2cupy"), ("alibi", "backward", "torch flex"),
    }  # fmt: skip


def test_features_go_on_without_torch_and_with_what_fails(small_features, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)

    def no_room(xp, problem, seed):
        raise MemoryError("too large")

    monkeypatch.setitem(features.FEATURES, "sink", feature_cases.Feature(no_room))
    monkeypatch.setattr(features.FeatureBenchmark, "compile", lambda self, cases: None)
    run = features.run(feature_options("--features", "sink", "alibi"), FakeGpu(), tmp_path)
    assert {row["feature"] for row in run.rows} == {"alibi"} and len(run.failures) == 2
    assert "FAILED: sink bfloat16 d=32 seqlen=128 batch=2 heads=2 causal: MemoryError: too large" in run.failures
    assert capsys.readouterr().out.startswith("without flash, cudnn, efficient, flash4, flex, flex_flash: ")


@pytest.fixture
def operators(monkeypatch):
    """Provides PyTorch's operators, computed by NumPy."""
    return use_fake_torch(monkeypatch).ops.aten


@pytest.mark.matrix
def test_operators_have_the_features_that_they_are_asked_for(small_features, operators, flash4, tmp_path):
    run = features.run(feature_options("--peers", *features.OPERATORS), HastyGpu(), tmp_path)
    assert not run.failures
    both, scores = ("forward", "backward"), ("mask", "bias", "bias_batch", "bias_full")
    expected = {
        "torch flash": {(name, each) for name in ("dropout", "packed", "window127") for each in both}
        | {("alibi", "forward")},
        "torch cudnn": {(name, each) for name in ("dropout", "padding", *scores) for each in both},
        "flash-attn 4": {("window127", each) for each in both},
    }
    gradients = {(name, "backward") for name in ("dbias", "dbias_batch", "dbias_full")}
    expected["torch efficient"] = expected["torch cudnn"] | gradients
    for name, pairs in expected.items():
        assert {(row["feature"], row["operation"]) for row in run.rows if row["provider"] == name} == pairs
    full = {row["batch"] for row in run.rows if row["feature"].endswith("_full")}
    assert full == {2}, "both sequences fit into the limit"
    assert any(line.startswith("| dropout | 1.00 / 1.00 | 1.00 / 1.00 |") for line in features.table(run.rows))


def test_bias_of_all_scores_has_as_many_sequences_as_fit(monkeypatch):
    cases = list(feature_cases.all_cases(feature_cases.FEATURES, (64, 128), (2048, 16384)))
    batches = {case.problem.head_dim: case.problem.batch for case in cases if case.feature == "dbias_full"}
    assert batches == {64: 4, 128: 8}
    for case in cases:
        if case.feature == "bias_full":
            assert case.problem.batch * case.problem.num_heads * case.problem.seqlen**2 * 2 <= 2**30
    assert {case.problem.seqlen for case in cases if "bias" in case.feature} == {2048}


def test_operator_that_is_wrong_is_found(small_features, operators, tmp_path, monkeypatch):
    right = operators._scaled_dot_product_efficient_attention_backward

    def wrong(*arguments, **options):
        *gradients, dbias = right(*arguments, **options)
        return (*gradients, None if dbias is None else dbias * 2)

    monkeypatch.setattr(operators, "_scaled_dot_product_efficient_attention_backward", wrong)
    options = feature_options("--peers", "efficient", "--features", "bias", "dbias")
    run = features.run(options, FakeGpu(), tmp_path)
    assert len(run.failures) == 1 and "torch efficient: result 3 differs" in run.failures[0]
    assert {row["feature"] for row in run.rows if row["provider"] == "torch efficient"} == {"bias"}


@needs_cupy
@pytest.mark.matrix
@pytest.mark.parametrize("family", (None, "sm80"))
@pytest.mark.parametrize("operation", ("forward", "backward"))
def test_kernels_of_features_are_foretold(operation, family, monkeypatch):
    """Checks that calls, with the default method, launch the kernels that are compiled ahead and checked."""
    from support import fake_gpu
    from support.fake_cupy import place

    device = DeviceInfo.named("sm_90")
    for case in feature_cases.all_cases(feature_cases.FEATURES, (128,), (2048,)):
        if operation not in case.operations:
            continue
        # The call has the real length, but few heads, and does no work.
        case = dataclasses.replace(case, problem=dataclasses.replace(case.problem, batch=2, num_heads=2))
        if case.feature == "packed":
            case = case.shrunk()
        with fake_gpu.fake_gpu(monkeypatch, device, run=lambda launch: None) as launched:
            q, k, v, do = map(place, case.inputs(np))
            options = {name: place(x) if isinstance(x, np.ndarray) else x for name, x in case.options(np, 0).items()}
            o, lse = fake_gpu.forward(q, k, v, family=family, **options)
            if operation == "backward":
                launched.clear()
                gradients = {f"return_{name}": True for name in case.gradients}
                fake_gpu.backward(q, k, v, o, lse, do, family=family, **gradients, **options)
        assert tuple(stage.spec for stage in launched) == case.kernels(device, operation, family).specs, case


@pytest.mark.matrix
def test_work_of_features_is_that_of_visible_pairs():
    problem = Problem("bfloat16", 64, 1024, 16, 32, True)
    pairs = sum(min(i, 127) + 1 for i in range(1024))
    assert feature_cases.Case("window127", problem).flops("forward") == 4 * 16 * 32 * pairs * 64
    packed = feature_cases.Case("packed", problem)
    assert packed.flops("forward") == 2 * 32 * sum(n * n for n in feature_cases.PACKED) * 64
    assert sum(feature_cases.PACKED) == feature_cases.TOKENS
    assert packed.arrays(*FakeGpu().tensors(problem, 1))[0].shape == (16384, 32, 64)


def test_missing_torch_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    available = peers.available_peers(FakeGpu(), list(peers.PEERS))
    assert [peer.name for peer in available] == ["cupy unfused"]
    assert capsys.readouterr().out.startswith("without flash, cudnn, efficient: ")


@pytest.fixture
def small_models(monkeypatch):
    """Has sequences that `one_tile` does not take."""
    monkeypatch.setattr(benchmark, "MODELS", {"even": (2, 2, 32), "grouped": (4, 2, 64)})
    monkeypatch.setattr(benchmark, "MODEL_SIZES", ((1, 140), (2, 132)))


@pytest.mark.matrix
def test_models_from_checks_to_files(small_models, operators, tmp_path, monkeypatch, capsys):
    right = operators._scaled_dot_product_cudnn_attention

    def same_heads_only(query, key, *arguments):
        if query.shape[1] != key.shape[1]:
            raise RuntimeError("as many heads, please")
        return right(query, key, *arguments)

    monkeypatch.setattr(operators, "_scaled_dot_product_cudnn_attention", same_heads_only)
    gpu = FakeGpu()
    run = benchmark.run(benchmark.parse_arguments(["--sections", "models"]), gpu, tmp_path)
    assert not run.failures and not run.rows
    assert [path.name for path in tmp_path.iterdir()] == ["models.csv"], "the results of other sections stay"
    assert gpu.precompiled[1] == peers.OPERATIONS
    rows = measure.read_csv(tmp_path / "models.csv")
    assert tuple(rows[0]) == benchmark.MODEL_COLUMNS
    operations = ("forward", "default", "deterministic")
    heads = {"even": ("2", "2"), "grouped": ("4", "2")}
    assert {(row["model"], row["batch"], row["operation"], row["provider"]) for row in rows} == {
        (model, batch, operation, provider)
        for model in heads
        for batch in "12"
        for operation in operations
        for provider in ("fa2cupy", "torch flash", "torch cudnn")
        if provider != "torch cudnn" or model == "even"
    }
    assert all((row["num_heads"], row["num_heads_kv"]) == heads[row["model"]] for row in rows)
    tiles = {row["operation"]: row["tile"].split(":")[0] for row in rows if row["provider"] == "fa2cupy"}
    assert (tiles["default"], tiles["deterministic"]) == ("single_pass", "two_pass")
    grouped = next(row for row in rows if (row["model"], row["operation"]) == ("grouped", "default"))
    assert float(grouped["tflops"]) == pytest.approx(5 * 2 * 4 * 140**2 / 2 * 64 / 2e-3 / 1e12, rel=1e-4)
    assert int(grouped["extra_bytes"]) == 100, "dk and dv are smaller than dq"
    told = capsys.readouterr().out
    assert "without torch cudnn: as many heads, please" in told
    assert "| grouped | 1.00 / 1.00 / 1.00 | 1.00 / 1.00 / 1.00 |" in told and "smallest: 1.00, " in told
    assert benchmark.main(["--plot-only", str(tmp_path / "models.csv")]) == 0
    assert capsys.readouterr().out.startswith("| forward / default / deterministic | 1 x 140 | 2 x 132 |\n")


@pytest.fixture
def small_steps(monkeypatch):
    monkeypatch.setattr(benchmark, "SMALL_HEADS", (2, 3))
    monkeypatch.setattr(benchmark, "SMALL_SIZES", ((1, 40), (2, 24)))


def test_small_steps_as_calls_and_as_graphs(small_steps, operators, tmp_path, monkeypatch, capsys):
    captured = []

    def capture(self, call):
        if self.name == "torch cudnn":
            raise RuntimeError("not in a graph")
        captured.append(call)
        return call

    monkeypatch.setattr(peers.TorchPeer, "captured", capture)
    run = benchmark.run(benchmark.parse_arguments(["--sections", "small"]), FakeGpu(), tmp_path)
    assert not run.failures and len(captured) == 4 * benchmark.SMALL_SETS
    rows = measure.read_csv(tmp_path / "small.csv")
    assert tuple(rows[0]) == benchmark.SMALL_COLUMNS
    assert {(row["num_heads"], row["batch"], row["operation"], row["provider"]) for row in rows} == {
        (heads, batch, launched, provider)
        for heads in "23"
        for batch in "12"
        for launched in ("calls", "graph")
        for provider in ("fa2cupy", "torch flash", "torch cudnn")
        if (launched, provider) != ("graph", "torch cudnn")
    }
    assert all(row["tile"].startswith("one_tile: ") for row in rows if row["provider"] == "fa2cupy")
    told = capsys.readouterr().out
    assert "without torch cudnn: not in a graph" in told and "| 3 heads | 1.00 / 1.00 | 1.00 / 1.00 |" in told
    assert benchmark.main(["--plot-only", str(tmp_path / "small.csv")]) == 0
    assert capsys.readouterr().out.startswith("| calls / graph | 1 x 40 | 2 x 24 |\n")


def test_small_steps_whose_graph_is_wrong_are_failures(small_steps, tmp_path, monkeypatch):
    monkeypatch.setattr(FakeGpu, "captured", lambda self, call: lambda: tuple(2 * x for x in call()))
    run = benchmark.run(benchmark.parse_arguments(["--sections", "small", "--peers"]), FakeGpu(), tmp_path)
    assert len(run.failures) == 4 and "graph: result 0 differs" in run.failures[0]
    assert {row["operation"] for row in measure.read_csv(tmp_path / "small.csv")} == {"calls"}


def test_models_that_are_wrong_are_failures(small_models, tmp_path, monkeypatch):
    def verify(self, operation, **options):
        raise AssertionError("dq is off by a mile")

    monkeypatch.setattr(check.HeadCheck, "verify", verify)
    run = benchmark.run(benchmark.parse_arguments(["--sections", "models", "--peers"]), FakeGpu(), tmp_path)
    assert len(run.failures) == 2 * 2 * 3 and "WRONG: bfloat16 d=32 seqlen=140" in run.failures[0]


def test_models_have_the_heads_that_they_are_named_after():
    problems = [problem for _, problem in benchmark.model_problems()]
    assert len(problems) == 27 and all(problem.causal and problem.dtype == "bfloat16" for problem in problems)
    llama = dict(benchmark.model_problems())["llama3-70b-tp8"]
    assert (llama.num_heads, llama.heads_kv, llama.head_dim, llama.batch, llama.seqlen) == (8, 1, 128, 4, 4096)


def test_float32_from_checks_to_files(operators, tmp_path, monkeypatch, capsys):
    asked, forward = [], peers.fa2cupy.forward

    def remembered(*inputs, **options):
        asked.append(options.get("precision"))
        return forward(*inputs, **options)

    monkeypatch.setattr(peers.fa2cupy, "forward", remembered)
    small = [measure.Problem("float32", 32, 64, 1, 2, causal) for causal in (False, True)]
    monkeypatch.setattr(benchmark, "precision_problems", lambda: small)
    run = benchmark.run(benchmark.parse_arguments(["--sections", "float32"]), FakeGpu(), tmp_path)
    assert not run.failures and not run.rows
    assert [path.name for path in tmp_path.iterdir()] == ["float32.csv"]
    rows = measure.read_csv(tmp_path / "float32.csv")
    assert tuple(rows[0]) == benchmark.PRECISION_COLUMNS
    assert {(row["precision"], row["causal"], row["operation"], row["provider"]) for row in rows} == {
        (precision, causal, operation, provider)
        for precision in benchmark.PRECISIONS
        for causal in "01"
        for operation in ("forward", "default", "deterministic")
        for provider in ("fa2cupy", "torch efficient")
    }
    assert set(benchmark.PRECISIONS) <= set(asked)
    assert "| split 32 causal | 1.00 / 1.00 / 1.00 |" in capsys.readouterr().out
    assert benchmark.main(["--plot-only", str(tmp_path / "float32.csv")]) == 0
    assert capsys.readouterr().out.startswith("| forward / default / deterministic | 64 |\n")


@pytest.fixture
def flash4(monkeypatch):
    """Provides FlashAttention-4, computed by NumPy; is the list of the flag `deterministic` of its backwards."""
    deterministic = []

    def options(causal, window_size_left=None, window_size_right=None):
        assert window_size_right == (None if window_size_left is None else 0)
        window = {} if window_size_left is None else {"window": (window_size_left, 0)}
        return {"causal": causal, **window}

    def backward(q, k, v, o, do, lse, *, causal, deterministic, **window):
        found.append(deterministic)
        return peers.fa2cupy.backward(*map(np.asarray, (q, k, v, o, lse, do)), **options(causal, **window))

    def forward(q, k, v, *, causal, return_lse, **window):
        assert return_lse
        return *peers.fa2cupy.forward(*map(np.asarray, (q, k, v)), **options(causal, **window)), None, None, None

    found = deterministic
    kernels = SimpleNamespace(interface=SimpleNamespace(_flash_attn_fwd=forward, _flash_attn_bwd=backward))
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(cute=kernels))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", kernels)
    monkeypatch.setattr(peers.importlib.metadata, "version", lambda name: f"1.2 of {name}")
    return found


@pytest.mark.parametrize("has_flash4", (True, False), ids=("beside FlashAttention-4", "without it"))
def test_head_dims_from_checks_to_files(operators, tmp_path, monkeypatch, capsys, flash4, has_flash4):
    if not has_flash4:
        monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    flash = operators._scaled_dot_product_flash_attention

    def equal_head_dims_only(query, key, value, *arguments):
        if query.shape[-1] != value.shape[-1]:
            raise RuntimeError("one head_dim, please")
        return flash(query, key, value, *arguments)

    monkeypatch.setattr(operators, "_scaled_dot_product_flash_attention", equal_head_dims_only)
    pair, equal = ("bfloat16", 48, 40, 1, 2, True), ("bfloat16", 32, 40, 1, 2, True)
    small = [measure.Problem(*pair, head_dim_v=32), measure.Problem(*equal)]
    monkeypatch.setattr(benchmark, "head_dim_problems", lambda: small)
    gpu = FakeGpu()
    run = benchmark.run(benchmark.parse_arguments(["--sections", "head_dims"]), gpu, tmp_path)
    assert not run.failures and not run.rows
    assert [path.name for path in tmp_path.iterdir()] == ["head_dims.csv"]
    assert gpu.precompiled[:2] == (small, peers.OPERATIONS)
    rows = measure.read_csv(tmp_path / "head_dims.csv")
    assert tuple(rows[0]) == benchmark.HEAD_DIM_COLUMNS
    both = {"fa2cupy", "torch cudnn", *(("flash-attn 4",) if has_flash4 else ())}
    providers = {("48", "32"): {*both, "torch efficient"}, ("32", "32"): {*both, "torch flash"}}
    assert {(row["head_dim"], row["head_dim_v"], row["operation"], row["provider"]) for row in rows} == {
        (*columns, operation, provider)
        for columns, names in providers.items()
        for operation in ("forward", "default", "deterministic")
        for provider in names
    }
    products = {"forward": 48 + 32, "default": 3 * 48 + 2 * 32, "deterministic": 3 * 48 + 2 * 32}
    for row in rows:
        if row["head_dim"] == "48":
            flops = 2 * 2 * 40**2 / 2 * products[row["operation"]]
            assert float(row["tflops"]) == pytest.approx(flops / 2e-3 / 1e12, rel=1e-4)
    assert not has_flash4 or (set(flash4) == {False, True} and flash4.index(True) > flash4.index(False))
    told = capsys.readouterr().out
    assert "without torch flash: one head_dim, please" in told
    assert ("without flash4: " in told) is not has_flash4
    assert ("with flash-attn-4 1.2 of flash-attn-4" in told) is has_flash4
    assert "| bfloat16 48/32, 2 heads, causal | 1.00 / 1.00 / 1.00 |" in told
    assert benchmark.main(["--plot-only", str(tmp_path / "head_dims.csv")]) == 0
    assert capsys.readouterr().out.startswith("| forward / default / deterministic | 1 x 40 |\n")


def test_float64_from_checks_to_files(operators, tmp_path, monkeypatch, capsys):
    small = [measure.Problem("float64", 16, 40, 1, 2, causal) for causal in (False, True)]
    monkeypatch.setattr(benchmark, "float64_problems", lambda: small)
    monkeypatch.setattr(benchmark, "FLOAT64_LONGEST", 90)
    gpu, families = FakeGpu(), []
    monkeypatch.setattr(gpu, "precompile", lambda *_, family=None: families.append(family))
    forward, asked = peers.fa2cupy.forward, []
    monkeypatch.setattr(
        peers.fa2cupy, "forward", lambda *x, **how: asked.append(how.get("family")) or forward(*x, **how)
    )
    run = benchmark.run(benchmark.parse_arguments(["--sections", "float64"]), gpu, tmp_path)
    assert not run.failures and not run.rows and families == [None, "simt"] and {None, "simt"} <= set(asked)
    assert [path.name for path in tmp_path.iterdir()] == ["float64.csv"]
    rows = measure.read_csv(tmp_path / "float64.csv")
    assert tuple(rows[0]) == benchmark.FLOAT64_COLUMNS
    ours = {"fa2cupy", "fa2cupy simt"}
    others = {"cupy unfused", "torch math"}
    assert {(row["seqlen"], row["causal"], row["operation"], row["provider"]) for row in rows} == {
        *(("40", mask, "deterministic", name) for mask in "01" for name in ours),
        *(("40", mask, one, name) for mask in "01" for one in ("forward", "default") for name in ours | others),
        *(("90", "0", one, "fa2cupy") for one in ("forward", "default")),
    }
    assert all((row["ratio"] == "1") is (row["provider"] != "fa2cupy") for row in rows)
    assert "| 16 causal | 1.00 / 1.00 / 1.00 |" in capsys.readouterr().out
    assert benchmark.main(["--plot-only", str(tmp_path / "float64.csv")]) == 0
    assert capsys.readouterr().out.startswith("| forward / default / deterministic | 40 |\n")


@pytest.fixture
def small_second_order(monkeypatch):
    small = [measure.Problem(dtype, 16, 40, 1, 2, True) for dtype in ("bfloat16", "float64")]
    monkeypatch.setattr(benchmark, "second_order_problems", lambda: small)
    monkeypatch.setattr(benchmark, "LONGEST", 90)
    monkeypatch.setattr(second_order, "BLOCK_ELEMENTS", 800)  # several blocks of queries
    monkeypatch.setattr(measure.host_microseconds, "__defaults__", (2, 2, 2))


def test_second_order_from_checks_to_files(operators, small_second_order, tmp_path, monkeypatch, capsys):
    def jvp(q, k, v, qt, kt, vt, mask, dropout_p, causal):
        assert (mask, dropout_p) == (None, 0.0) and all(x.flags.c_contiguous for x in (q, k, v, qt, kt, vt))
        arrays = map(np.asarray, (q, k, v, qt, kt, vt))
        o, _, ot, _ = fa2cupy.jvp(*arrays, causal=causal, layout="bhsd")
        return o.view(FakeTensor), (ot.view(FakeTensor), "what its backward needs")

    package = SimpleNamespace(JVPAttn=SimpleNamespace(forward=jvp))
    monkeypatch.setitem(sys.modules, "jvp_flash_attention", SimpleNamespace(jvp_attention=package))
    monkeypatch.setitem(sys.modules, "jvp_flash_attention.jvp_attention", package)
    monkeypatch.setattr(peers.importlib.metadata, "version", lambda name: f"1.2 of {name}")
    gpu = FakeGpu()
    run = benchmark.run(benchmark.parse_arguments(["--sections", "second_order"]), gpu, tmp_path)
    assert not run.failures and not run.rows
    assert [path.name for path in tmp_path.iterdir()] == ["second_order.csv"]
    assert len(gpu.precompiled[0]) == 3
    rows = measure.read_csv(tmp_path / "second_order.csv")
    assert tuple(rows[0]) == second_order.COLUMNS
    names = tuple(second_order.OPERATIONS)
    assert names == ("jvp", "backward_jvp", "double_backward")
    both = ("fa2cupy", "cupy written out")
    assert {(row["dtype"], row["seqlen"], row["operation"], row["provider"]) for row in rows} == {
        *((dtype, "40", name, one) for dtype in ("bfloat16", "float64") for name in names for one in both),
        ("bfloat16", "40", "jvp", "jvp_flash_attention"),
        *(("bfloat16", "90", name, "fa2cupy") for name in names),
    }
    ours = {row["operation"]: row for row in rows if row["provider"] == "fa2cupy"}
    assert [ours[name]["share"] for name in names] == ["3", "2", "2.4"]  # all calls take the same time here
    assert {row["times"] for row in ours.values()} == {"1"}
    assert all((row["ratio"] == "1") is (row["provider"] != "fa2cupy") for row in rows)
    assert float(ours["backward_jvp"]["tflops"]) == pytest.approx(2 * 90**2 * 10 * 128 / 2e-3 / 1e12, rel=1e-4)
    told = capsys.readouterr().out
    assert "with jvp_flash_attention 1.2 of jvp_flash_attention" in told
    assert "| float64 16 causal | 1.00 / 1.00 / 1.00 |" in told
    assert benchmark.main(["--plot-only", str(tmp_path / "second_order.csv")]) == 0
    assert capsys.readouterr().out.startswith("| jvp / backward_jvp / double_backward | 40 | 90 |\n")


@pytest.mark.parametrize(("name", "result"), [("jvp", 2), ("backward_jvp", 1), ("double_backward", 3)])
def test_wrong_results_of_second_order_are_reported_and_not_timed(
    small_second_order, tmp_path, monkeypatch, name, result
):
    function = getattr(fa2cupy, name)

    def wrong(*arrays, **options):
        found = function(*arrays, **options)
        found[result][-1, -1] += 1
        return found

    monkeypatch.setattr(second_order.fa2cupy, name, wrong)
    run = benchmark.run(benchmark.parse_arguments(["--sections", "second_order", "--peers"]), FakeGpu(), tmp_path)
    assert len(run.failures) == 3
    assert all(re.search(rf"WRONG: .* second order: {name} \w+ differs from float64", text) for text in run.failures)
    assert not measure.read_csv(tmp_path / "second_order.csv")


def test_a_peer_with_wrong_derivatives_is_left_out(small_second_order, tmp_path, monkeypatch):
    right = peers.TwiceWrittenOut.jvp
    monkeypatch.setattr(peers.TwiceWrittenOut, "jvp", lambda self, qt, kt, vt: right(self, qt, None, vt))
    run = benchmark.run(benchmark.parse_arguments(["--sections", "second_order"]), FakeGpu(), tmp_path)
    assert len(run.failures) == 2 * 3
    assert all("cupy written out: result" in text for text in run.failures)
    assert {row["provider"] for row in measure.read_csv(tmp_path / "second_order.csv")} == {"fa2cupy"}


def test_the_sizes_of_second_order():
    problems = list(second_order.second_order_problems())
    assert len(set(problems)) == len(problems) == 3 * 2 * 2 + 2 * 2 * 2 * 2
    assert all(one.num_heads * one.head_dim == 2048 for one in problems)
    tokens = {"bfloat16": 16384, "float32": 4096, "float64": 4096}
    assert all(one.batch * one.seqlen == tokens[one.dtype] for one in problems)
    written_out = peers.CupyTwice(FakeGpu())
    assert {one.seqlen for one in problems if written_out.supports(one, "jvp")} == {2048, 4096}
    assert all(written_out.supports(one, "jvp") for one in problems if one.seqlen < 16384)


def test_the_sizes_of_float64():
    problems = list(benchmark.float64_problems())
    assert len(set(problems)) == 5 * 4 * 2
    assert all((one.dtype, one.batch, one.num_heads) == ("float64", 1, 8) for one in problems)
    unfused = peers.CupyUnfused(FakeGpu())
    assert all(unfused.supports(one, "default") for one in problems)


def test_results_in_float64_are_compared_with_all_digits():
    """Differences of float64 rounding pass, and those of float32 do not."""
    problem = measure.Problem("float64", 16, 40, 1, 2, False)
    x = FakeGpu().tensors(problem, 1)[0].q
    check.check_equal(problem, [x], [x * (1 + 1e-14)])
    with pytest.raises(AssertionError, match="differs from fa2cupy's by 6e-08"):
        check.check_equal(problem, [x], [x + 6e-8 * abs(x).max()])


def test_the_sizes_of_head_dims():
    problems = list(benchmark.head_dim_problems())
    assert len(set(problems)) == len(problems) and all(one.head_dim != one.head_dim_v for one in problems)
    widest = {(one.seqlen, one.causal) for one in problems if (one.head_dim, one.head_dim_v) == (256, None)}
    assert widest == {(seqlen, causal) for seqlen in (2048, 16384) for causal in (False, True)}
    deepseek = [one for one in problems if (one.head_dim, one.head_dim_v, one.dtype) == (192, 128, "bfloat16")]
    assert {(one.num_heads, one.causal, one.batch, one.seqlen) for one in deepseek} == {
        (heads, causal, 1, seqlen) for heads in (128, 16) for causal in (False, True) for seqlen in (2048, 8192)
    }


def test_the_sizes_of_float32():
    problems = list(benchmark.precision_problems())
    assert len(problems) == 18 and all(one.dtype == "float32" and one.batch * one.seqlen == 16384 for one in problems)


@pytest.mark.matrix
def test_sparse_from_checks_to_files(operators, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "sparse_problems", lambda: [Problem("float32", 16, 512, 1, 2, False)])
    monkeypatch.setattr(sparse, "MAP_SEQLEN", 512)
    run = benchmark.run(benchmark.parse_arguments(["--sections", "sparse"]), FakeGpu(), tmp_path)
    assert not run.failures and not run.rows
    assert [path.name for path in tmp_path.iterdir()] == ["sparse.csv"]
    rows = measure.read_csv(tmp_path / "sparse.csv")
    assert tuple(rows[0]) == sparse.COLUMNS
    calls = {(row["pattern"], row["operation"]) for row in rows if row["operation"] != "map"}
    assert calls == {(name, operation) for name in ("dense", *sparse.PATTERNS) for operation in sparse.OPERATIONS}
    for row in rows:  # every call takes 2 ms
        if row["operation"] in sparse.OPERATIONS:
            pairs = float(row["density"]) * 2 * 512**2
            assert float(row["tflops"]) == pytest.approx(measure.flops(row["operation"], pairs, 16) / 2e9, rel=1e-3)
            assert float(row["ratio"]) == pytest.approx(float(row["density"]), rel=1e-3)
    assert next(row["provider"] for row in rows if row["operation"] == "map") == "fa2cupy"
    assert {row["pattern"] for row in rows if row["over_evaluated"] == "1"} == {"13 x 13", "5 x 5 x 5"}
    assert {row["over_evaluated"] for row in rows} == {"", "1"}
    assert "| forward / default | 16, 512 |" in capsys.readouterr().out
    assert benchmark.main(["--plot-only", str(tmp_path / "sparse.csv")]) == 0
    assert "| prefix-LM |" in capsys.readouterr().out


def test_sparse_reports_what_is_wrong(operators, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "sparse_problems", lambda: [Problem("float32", 16, 256, 1, 1, False)])
    monkeypatch.setattr(sparse, "MAP_SEQLEN", 256)
    monkeypatch.setattr(sparse.fa2cupy, "forward", lambda q, k, v, **options: (q, np.zeros((1, 1, 256), "float32")))
    run = benchmark.run(
        benchmark.parse_arguments(["--sections", "sparse", "--patterns", "document"]), FakeGpu(), tmp_path
    )
    assert len(run.failures) == 1 and run.failures[0].startswith(
        "WRONG: float32 d=16 seqlen=256 batch=1 heads=1 full doc"
    )


def test_section_features_is_the_other_script_without_the_compiler(small_features, operators, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "PEER_FEATURES", ("bias", "softcap"))
    monkeypatch.setattr(features, "HEAD_DIMS", (32,))
    monkeypatch.setattr(features, "SEQLENS", (128,))
    run = benchmark.run(benchmark.parse_arguments(["--sections", "features"]), FakeGpu(), tmp_path)
    assert not run.failures
    assert [path.name for path in tmp_path.iterdir()] == ["features-peers.csv"]
    rows = measure.read_csv(tmp_path / "features-peers.csv")
    providers = {name: {row["provider"] for row in rows if row["feature"] == name} for name in ("bias", "softcap")}
    assert providers == {"bias": {"fa2cupy", "torch cudnn", "torch efficient"}, "softcap": {"fa2cupy"}}


@pytest.mark.matrix
def test_section_functions_is_beside_flex_attention_and_the_built_in_keywords(
    small_features, tmp_path, monkeypatch, capsys
):
    class FakeFlexFunctions(FakeFlex):
        features = flex.FlexFunctions.features

    class FakeFlexFlash(FakeFlexFunctions):
        name = flex.FlexFlash.name

        def candidate(self, case, sets, options, operation):
            if case.feature == "alibi":
                raise RuntimeError("no functions of scores, please")
            return super().candidate(case, sets, options, operation)

    for name, value in {"TOKENS": 256, "MODEL_DIM": 64, "SEQLENS": (256,)}.items():
        monkeypatch.setattr(function_cases, name, value)
    monkeypatch.setattr(benchmark, "FUNCTION_PEERS", {"flex": FakeFlexFunctions, "flex_flash": FakeFlexFlash})
    monkeypatch.setattr(features, "HEAD_DIMS", (32,))
    run = benchmark.run(benchmark.parse_arguments(["--sections", "functions", "--rounds", "1"]), HastyGpu(), tmp_path)
    assert not run.failures
    rows = measure.read_csv(tmp_path / "functions.csv")
    assert {(row["feature"], row["operation"], row["provider"]) for row in rows} == {
        (name, operation, provider)
        for name in function_cases.FUNCTIONS
        for operation in ("forward", "backward")
        for provider in ("fa2cupy", "torch flex", "torch flex flash")
        if (name, provider) != ("alibi", "torch flex flash")
    }
    assert "without torch flex flash: RuntimeError: no functions of scores, please" in capsys.readouterr().out
    causal = {row["feature"]: row["causal"] for row in rows}
    assert {name for name in causal if causal[name] == "1"} == {"softcap", "alibi", "t5_relative"}


def test_functions_are_those_of_the_built_in_keywords():
    problem = measure.Problem("bfloat16", 64, 96, 1, 4, True)
    q, k, v, _ = (np.asarray(x, "float32") for x in feature_cases.Case("plain", problem).inputs(np))
    for name in ("softcap", "alibi", "causal", "sliding_window"):
        is_mask = function_cases.FUNCTIONS[name].role == "mask_mod"
        case = function_cases.FunctionCase(name, dataclasses.replace(problem, causal=not is_mask))
        assert case.plain.problem == problem and "mask_mod" not in case.plain.options(np, 0)
        results = [features.fa2cupy.forward(q, k, v, **each.options(np, 0))[0] for each in (case, case.plain)]
        np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)


def written_out(name, seqlen, numbers):
    """Returns a mask of `function_cases`, put together from its rows and blocks; `numbers` are those of its array."""
    visible, causal = np.zeros((seqlen, seqlen), bool), np.tri(seqlen, dtype=bool)
    places = np.arange(seqlen)
    if name == "tree":  # a token's parent is the last one before it whose descendants have not ended
        path = []
        for token in places:
            path = [*(one for one in path if numbers[one] > token), token]
            visible[token, path] = True
    elif name == "block_diffusion":
        noisy, clean = np.split(places.reshape(-1, function_cases.BLOCK), 2)
        for number, (own, same) in enumerate(zip(noisy, clean, strict=True)):
            visible[np.ix_(own, own)] = True
            visible[np.ix_(own, clean[:number].ravel())] = True
            visible[np.ix_(same, clean[: number + 1].ravel())] = True
    elif name == "first_and_window":
        visible = causal & ~np.tri(seqlen, k=-function_cases.WINDOW - 1, dtype=bool)
        visible[:, : function_cases.FIRST] |= causal[:, : function_cases.FIRST]
    elif name == "frames":
        for start in range(0, seqlen, function_cases.FRAME):
            near = slice(max(0, start - function_cases.FRAME), start + 2 * function_cases.FRAME)
            visible[start : start + function_cases.FRAME, near] = True
    elif name == "tiles_of_tokens":
        grid = np.stack(np.unravel_index(np.arange(seqlen // 64), (seqlen // 1024, 4, 4)))
        near = abs(grid[:, :, None] - grid[:, None]).max(axis=0) <= 1
        visible = np.kron(near, np.ones((64, 64), bool))
    elif name in ("shared_prompt", "causal_document"):
        for number in np.unique(numbers):
            (own,) = np.nonzero(numbers == number)
            visible[np.ix_(own, own)] = True
        visible[:, numbers == 0] |= name == "shared_prompt"
        visible &= causal
    elif name == "global_and_near":
        visible = np.tri(seqlen, k=512, dtype=bool) & np.tri(seqlen, k=512, dtype=bool).T
        visible[numbers > 0] = visible[:, numbers > 0] = True
    return visible


@pytest.mark.parametrize("name", [name for name, row in function_cases.FUNCTIONS.items() if row.role == "mask_mod"])
def test_masks_are_those_that_are_written_out_and_those_of_torch(name):
    """Masks of `mods` have tests of their own: here they are compared with those that FlexAttention gets, only."""
    problem = measure.Problem("float32", 8, 2048, 2, 1, False)
    case, row = function_cases.FunctionCase(name, problem), function_cases.FUNCTIONS[name]
    arrays, (queries, keys) = row.arrays(problem), np.ogrid[:2048, :2048]
    seen = row.function(1, 0, queries, keys, *arrays)
    np.testing.assert_array_equal(seen, flex._MASKS[name](*arrays)(1, 0, queries, keys))
    if row.function.__module__ == function_cases.__name__:
        expected = written_out(name, 2048, arrays[0][-1] if arrays else None)
        np.testing.assert_array_equal(seen, expected)
        assert 0 < expected.sum() < 0.6 * expected.size and expected.diagonal().all()
        q, k, v, _ = case.inputs(np)
        results = [fa2cupy.forward(q, k, v, **how)[0] for how in (case.options(np, 0), {"mask": expected})]
        np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)


def test_visible_pairs_and_buckets_of_functions():
    problem = measure.Problem("bfloat16", 64, 4096, 2, 32, False)
    pairs = measure.visible_pairs(4096, function_cases.WINDOW)
    for name, expected in (("sliding_window", pairs), ("causal", 4096 * 4097 / 2), ("document", 16 * 256**2)):
        flops = function_cases.FunctionCase(name, problem).flops("forward")
        assert flops == pytest.approx(4 * 2 * 32 * expected * 64, rel=4e-3)
    buckets = function_cases.distance_buckets(200)
    assert buckets[200] == 0 and buckets[199] == 1 and buckets[201] == 17 and buckets.max() == buckets[-1] == 31


def test_decoding_is_checked_timed_and_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(decoding, "_COPIED_BYTES", 1 << 12)

    class Peer:
        name = "torch flash"

        def own(self, array):
            return array

        def forward(self, causal, q, k, v):
            if q.shape[1] > 1:
                raise RuntimeError("no such shape")
            return (q,)

        def release(self):
            pass

    problems = [
        decoding.CachedProblem("2 x 70", (70, 70), (4, 2), 16, 1),
        decoding.CachedProblem("2 x 70", (70, 70), (4, 2), 16, 3),
        decoding.CachedProblem("ragged", (3, 40), (4, 1), 16, 1),
        decoding.CachedProblem("2 x 70", (70, 70), (4, 2), 16, 1, 16),
    ]
    monkeypatch.setattr(decoding, "host_microseconds", lambda gpu, calls, rounds: {calls[0].name: 20.0})
    path = tmp_path / "decode.csv"
    assert not decoding.run_decode(FakeGpu(), [Peer()], 2, 1.0, path, problems)
    rows = measure.read_csv(path)
    assert list(rows[0]) == list(decoding.COLUMNS)
    ours = [row for row in rows if row["provider"] == "fa2cupy"]
    assert [row["cache"] for row in ours] == ["2 x 70", "2 x 70", "ragged", "2 x 70"]
    assert float(ours[0]["us_median"]) == 2000 and all(row["host_us"] for row in ours)
    assert [row["ratio"] for row in rows if row["provider"] == "torch flash"] == ["1.000"]
    assert "| 16 | 4/2 | 1 | 2 x 70, pages of 16 |" in capsys.readouterr().out


def test_wrong_results_of_decoding_are_not_timed(tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "_COPIED_BYTES", 1 << 12)
    monkeypatch.setattr(decoding.fa2cupy, "decode", lambda q, *_, **__: (q, None))
    problem = decoding.CachedProblem("2 x 70", (70, 70), (4, 2), 16, 1)
    (failure,) = decoding.run_decode(FakeGpu(), [], 2, 1.0, tmp_path / "decode.csv", [problem])
    assert "an error of" in failure and not (tmp_path / "decode.csv").exists()


def test_the_cached_problems_are_those_that_are_promised():
    problems = list(decoding.cached_problems())
    assert {problem.head_dim for problem in problems} == {64, 128}
    assert {problem.page_size for problem in problems} == {None, 16, 64}
    assert max(problem.nbytes for problem in problems) == 128 * 8192 * 8 * 128 * 4


def test_parts_of_sections_are_named_by_head_dim_and_length(monkeypatch):
    options = benchmark.parse_arguments(["--head-dims", "64", "--seqlens", "4096", "8192"])
    asked = [(one.head_dim, one.seqlen) for one in sparse.sparse_problems() if benchmark.is_asked(options, one)]
    assert asked == [(64, 4096), (64, 8192)]
    everything = benchmark.parse_arguments(["--quick"])
    assert all(benchmark.is_asked(everything, one) for one in sparse.sparse_problems())


def test_grids_of_neighborhoods_are_those_that_are_promised(monkeypatch):
    shapes = []
    monkeypatch.setattr(sparse.fa2cupy.mods, "neighborhood", lambda *given: shapes.append(given))
    for name, seqlen in (("13 x 13", 4096), ("13 x 13 evaluated", 16384), ("5 x 5 x 5", 16384)):
        sparse.neighborhood_of(name, seqlen)
    assert shapes == [((64, 64), (13, 13)), ((128, 128), (13, 13)), ((16, 32, 32), (5, 5, 5))]


def test_backends_of_flex_attention_name_their_kernels_and_share_a_reset_of_the_compiler(operators, monkeypatch):
    """A reset in the middle of a case would make PyTorch compile again what is being timed."""
    asked, resets = [], []
    module = SimpleNamespace(
        create_block_mask=lambda *given, device: given[1:], flex_attention=lambda *tensors, **how: asked.append(how)
    )
    first, second = (object.__new__(kind) for kind in flex.FUNCTION_PEERS.values())
    for peer in (first, second):
        peer._module, peer._case, peer._function = module, None, None
        peer.torch = SimpleNamespace(
            _dynamo=SimpleNamespace(reset=lambda: resets.append(len(asked))),
            compile=lambda function, *, dynamic, fullgraph: function,
            from_dlpack=lambda array: array,
            no_grad=None,
        )
    monkeypatch.setattr(flex.FlexAttention, "_latest", None)
    problem = Problem("float32", 8, 64, 1, 1, False)
    sets = FakeGpu().tensors(problem, 1)
    for name in ("tree", "frames"):
        case = function_cases.FunctionCase(name, problem)
        candidates = [peer.candidate(case, sets, [case.options(np, 0)], "forward") for peer in (first, second)]
        for candidate in candidates:
            candidate.call()
        assert [candidate.name for candidate in candidates] == ["torch flex", "torch flex flash"]
    assert resets == [0, 2]
    assert [how["kernel_options"] for how in asked] == [None, {"BACKEND": "FLASH"}] * 2
    assert [how["block_mask"] for how in asked] == [(1, None, 64, 64)] * 2 + [(None, None, 64, 64)] * 2
