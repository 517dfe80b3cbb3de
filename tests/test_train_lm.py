"""The language model of scripts/train_lm.py: gradients, both attentions, checkpoints, the script from end to end."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import train_lm
from common import SCRIPTS
from language_model.arrays import CupyArrays, NumpyArrays, SetupError
from language_model.data import Corpus, load_corpus, zlib_bits_per_byte
from language_model.model import ModelConfig, Parameters, Transformer, _gelu_gradient, cross_entropy, unfused_attention
from language_model.ranks import SeveralRanks
from language_model.sampling import sample_with_cache, sample_without_cache
from language_model.training import LOG_EVERY, Curve, Settings, Training

import fa2cupy
from fa2cupy import distributed as dist

SMALL = Settings(
    layers=2, heads=2, width=32, context=48, batch=4, steps=10, learning_rate=3e-3, warmup=3, evaluate_every=5,
    evaluate_windows=3, final_windows=5,
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("small_heap")  # each training collects garbage


@pytest.fixture(autouse=True)
def _no_tracing_after_a_test():
    """Ends the tracing that a training begins: one that does not finish a step leaves it on, and all code is slow."""
    yield
    tracemalloc.stop()


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """Loads a small part of the standard library, so that tests do not read all of it."""
    package = importlib.util.find_spec("email").submodule_search_locations[0]
    return load_corpus(Path(package), held_out_share=0.2)


def train(settings: Settings, corpus: Corpus, steps: int) -> Training:
    training = Training(settings, corpus, NumpyArrays())
    training.run_to(steps)
    training.arrays.peak_bytes()
    return training


@pytest.mark.parametrize("attention", ["fused", "unfused"])
def test_gradients_against_finite_differences(attention):
    arrays = NumpyArrays(np.float64)
    config = ModelConfig(layers=2, heads=2, width=12, context=7)
    parameters = Parameters(config, arrays, seed=1)
    model = Transformer(
        config, arrays, parameters, fa2cupy.attention if attention == "fused" else unfused_attention(arrays)
    )
    rng = np.random.default_rng(0)
    windows = rng.integers(0, 256, (3, config.context + 1), np.uint8)

    def evaluate():
        logits, backprop = model(windows[:, :-1])
        losses, loss_backprop = cross_entropy(np, logits, windows[:, 1:].reshape(-1))
        return losses.mean(), backprop, loss_backprop

    _, backprop, loss_backprop = evaluate()
    backprop(loss_backprop())
    for name, weight in parameters.operand.items():
        direction, saved, step = rng.standard_normal(weight.shape), weight.copy(), 1e-5
        weight += step * direction
        above = evaluate()[0]
        weight -= 2 * step * direction
        below = evaluate()[0]
        weight[...] = saved
        derivative = (parameters.gradient[name] * direction).sum()
        assert (above - below) / (2 * step) == pytest.approx(derivative, rel=1e-6, abs=1e-9), name


def test_fused_and_unfused_train_alike(corpus):
    fused, unfused = (
        train(dataclasses.replace(SMALL, attention=kind), corpus, SMALL.steps) for kind in ("fused", "unfused")
    )
    # The losses may agree to the last bit for so short a context; these are still two computations.
    assert fused.model.attention.func is fa2cupy.attention
    assert "unfused" in unfused.model.attention.__qualname__
    np.testing.assert_allclose(fused.curve.losses, unfused.curve.losses, rtol=1e-4)


@pytest.mark.matrix
def test_loss_falls_below_that_of_byte_frequencies(corpus):
    settings = dataclasses.replace(train_lm.PRESETS["tiny"], layers=2, width=64, context=64, batch=8, steps=60)
    training = train(settings, corpus, settings.steps)
    share = np.bincount(corpus.held_out, minlength=256) / len(corpus.held_out)
    entropy = -(share[share > 0] * np.log2(share[share > 0])).sum()
    bits, evaluated = training.evaluate(windows=40)
    assert evaluated == 40 * settings.context
    assert bits < 0.92 * entropy


@pytest.mark.matrix
def test_a_resumed_run_is_the_same_run(corpus, tmp_path):
    whole = train(SMALL, corpus, SMALL.steps)
    train(SMALL, corpus, 5).save(tmp_path / "half.npz")
    resumed = Training.load(tmp_path / "half.npz", corpus, NumpyArrays())
    assert (resumed.step, resumed.settings) == (5, SMALL)
    resumed.run_to(SMALL.steps)
    resumed.arrays.peak_bytes()
    assert resumed.curve.losses == whole.curve.losses
    np.testing.assert_array_equal(resumed.parameters.flat, whole.parameters.flat)
    np.testing.assert_array_equal(resumed.optimizer.square, whole.optimizer.square)
    assert [path.name for path in tmp_path.iterdir()] == ["half.npz"]


def test_a_checkpoint_of_another_text_is_refused(corpus, tmp_path):
    train(SMALL, corpus, 1).save(tmp_path / "other.npz")
    changed = dataclasses.replace(corpus, held_out=corpus.held_out[:-1])
    with pytest.raises(SetupError, match="another Python"):
        Training.load(tmp_path / "other.npz", changed, NumpyArrays())


@pytest.fixture(scope="module")
def checkpoint(corpus, tmp_path_factory) -> bytes:
    """Returns the bytes of a checkpoint after one step."""
    path = tmp_path_factory.mktemp("checkpoint") / "good.npz"
    train(SMALL, corpus, 1).save(path)
    return path.read_bytes()


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04", "array", "archive", "shapes", "settings", "cut"])
def test_junk_is_no_checkpoint(content, checkpoint, short_corpus, tmp_path, capsys):
    path = tmp_path / "junk.npz"
    path.write_bytes(checkpoint)
    with np.load(path) as saved:
        good = dict(saved)
    if content == "array":
        with path.open("wb") as file:
            np.save(file, np.arange(3))
    elif content == "archive":
        np.savez(path, hello=1)
    elif content == "shapes":
        np.savez(path, **{**good, "weights": good["weights"][:-1]})
    elif content == "settings":
        np.savez(path, **{**good, "settings": '{"layers": 1, "hello": 2}'})
    else:
        path.write_bytes(path.read_bytes()[:-200] if content == "cut" else content)
    assert train_lm.main(["--device", "cpu", "--resume", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"train_lm.py: {path} is not a checkpoint of train_lm.py, or a damaged one (")
    assert told.count("\n") == 1


@pytest.mark.matrix
def test_a_loss_that_is_no_number_ends_the_training(corpus):
    training = Training(SMALL, corpus, NumpyArrays())
    training.parameters.flat[:] = np.nan
    with pytest.raises(FloatingPointError, match="step 1"):
        training.run_to(1)
    training.arrays.peak_bytes()


def test_windows_predict_every_held_out_byte_once(corpus):
    windows, lengths = corpus.held_out_windows(100)
    targets = np.concatenate([window[1 : 1 + length] for window, length in zip(windows, lengths, strict=True)])
    np.testing.assert_array_equal(targets, corpus.held_out[1:])
    np.testing.assert_array_equal(windows[1:, 0], windows[:-1, -1])
    few, _ = corpus.held_out_windows(100, 4)
    assert len(few) == 4
    np.testing.assert_array_equal(few[0], windows[0])


@pytest.mark.matrix
def test_padding_does_not_count(corpus):
    corpus = dataclasses.replace(corpus, held_out=corpus.held_out[:1000])
    training = Training(SMALL, corpus, NumpyArrays())
    bits, evaluated = training.evaluate(0)
    training.arrays.peak_bytes()
    assert evaluated == len(corpus.held_out) - 1
    windows, lengths = corpus.held_out_windows(SMALL.context)
    assert lengths[-1] < SMALL.context
    total = 0.0
    for window, length in zip(windows, lengths, strict=True):
        logits = training.model(window[None, :-1])[0]
        total += cross_entropy(np, logits, window[1:])[0][:length].sum()
    assert bits == pytest.approx(total / np.log(2) / evaluated, rel=1e-5)


def test_the_corpus_is_split_by_file(corpus):
    package = Path(importlib.util.find_spec("email").submodule_search_locations[0])
    sizes = [path.stat().st_size + 1 for path in package.rglob("*.py")]
    assert len(corpus.training) + len(corpus.held_out) == sum(sizes)
    assert corpus.training_files + corpus.held_out_files == len(sizes)
    assert 0.5 < zlib_bits_per_byte(corpus.held_out) < 4


def test_too_little_text_is_refused(tmp_path):
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "module.py").write_text("x = 1\n")
    with pytest.raises(SetupError, match="not have enough"):
        load_corpus(tmp_path)


def test_learning_rate_rises_and_falls():
    rates = [SMALL.learning_rate_at(step) for step in range(1, SMALL.steps + 1)]
    assert rates[:3] == pytest.approx([1e-3, 2e-3, 3e-3])
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(0.05 * SMALL.learning_rate)


def test_curve_rows(tmp_path):
    curve = Curve([4.0, 3.0, 2.0], [(1, 0.5), (3, 1.5)], [(3, 1.6, 2.25)])
    assert curve.points() == [(1, 0.5, 4.0), (3, 1.5, 2.5)]
    curve.write_csv(tmp_path / "curve.csv", 100)
    rows = list(csv.reader((tmp_path / "curve.csv").open()))
    assert rows[1:] == [["1", "100", "0.500", "4.00000", ""], ["3", "300", "1.500", "2.50000", "2.25000"]]


SIZES = ["--device", "cpu", "--preset", "tiny", "--layers", "1", "--heads", "2", "--width", "16", "--context", "32"]
SIZES += ["--batch", "2", "--evaluate-every", "10", "--final-windows", "4"]


@pytest.fixture
def short_corpus(corpus, monkeypatch):
    monkeypatch.setattr(train_lm, "load_corpus", lambda: corpus)


@pytest.mark.matrix
def test_both_attentions_in_one_report(short_corpus, tmp_path, capsys):
    assert train_lm.main([*SIZES, "--steps", "20", "--attention", "both", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "largest distance of the two curves" in printed
    assert "zlib's line was not reached" in printed
    for kind in ("fused", "unfused"):
        rows = list(csv.DictReader((tmp_path / f"tiny-{kind}.csv").open()))
        assert [int(row["step"]) for row in rows] == [1, LOG_EVERY, 2 * LOG_EVERY]
        assert float(rows[-1]["held_out_bits_per_byte"]) > 0
    if importlib.util.find_spec("matplotlib") is not None:
        assert (tmp_path / "tiny.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.matrix
def test_without_matplotlib_there_is_still_a_csv(short_corpus, tmp_path, capsys, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    assert train_lm.main([*SIZES, "--steps", "2", "--out", str(tmp_path)]) == 0
    assert "pip install matplotlib" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny-fused.csv", "tiny-fused.npz"]


@pytest.mark.matrix
def test_ctrl_c_saves_and_resume_goes_on(short_corpus, tmp_path, capsys, monkeypatch):
    handler = signal.getsignal(signal.SIGINT)  # not Python's own if a shell started the tests in the background
    assert train_lm.main([*SIZES, "--steps", "12", "--out", str(tmp_path / "whole")]) == 0
    advance = Training._advance

    def interrupted_advance(self):
        if self.step == 6:
            signal.raise_signal(signal.SIGINT)
        advance(self)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "_advance", interrupted_advance)
        assert train_lm.main([*SIZES, "--steps", "12", "--out", str(tmp_path / "parts")]) == 0
    assert "stopped at step 7" in capsys.readouterr().out
    assert train_lm.main(["--device", "cpu", "--resume", str(tmp_path / "parts" / "tiny-fused.npz")]) == 0
    states = [np.load(tmp_path / folder / "tiny-fused.npz") for folder in ("whole", "parts")]
    for name in ("weights", "mean", "square", "losses"):
        np.testing.assert_array_equal(states[0][name], states[1][name])
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.matrix
def test_a_time_limit_stops_the_first_run_and_sets_the_length_of_the_second(short_corpus, tmp_path, capsys):
    arguments = [*SIZES, "--steps", "100000", "--time-limit", "0.5", "--compare", "--out", str(tmp_path)]
    assert train_lm.main(arguments) == 0
    steps = [len(np.load(tmp_path / f"tiny-{kind}.npz")["losses"]) for kind in ("fused", "unfused")]
    assert steps[0] == steps[1] < 100000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be positive"),
        (["--resume", "nowhere.npz"], "there is no file nowhere.npz"),
        (["--resume", "nowhere.npz", "--batch", "3"], "leave out --batch"),
        (["--resume", "nowhere.npz", "--compare"], "leave out --attention"),
        (["--ranks", "0"], "--ranks must be positive"),
        (["--ranks", "2", "--compare"], "--ranks: not together with --attention both"),
        (["--ranks", "2", "--time-limit", "3"], "--ranks: not together with --time-limit"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit):
        train_lm.main(arguments)
    assert message in capsys.readouterr().err


def test_sizes_that_do_not_fit(short_corpus, tmp_path, capsys):
    assert train_lm.main(["--device", "cpu", "--width", "30", "--heads", "4", "--out", str(tmp_path)]) == 2
    assert "width must be a multiple of twice the heads (8), got 30" in capsys.readouterr().err


@pytest.mark.matrix
def test_blas_has_one_thread_unless_the_environment_says_otherwise(tmp_path):
    """Checks numbers that NumPy's BLAS reads when it is loaded; a test can see them only from within the process."""
    spy = "import os, sys, numpy; print(os.environ.get('OPENBLAS_NUM_THREADS'), file=sys.stderr)"
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "__init__.py").write_text(f"{spy}\nraise SystemExit(0)\n")
    (tmp_path / "train_lm.py").write_text((SCRIPTS / "train_lm.py").read_text())
    clean = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    script, imported = [str(tmp_path / "train_lm.py")], ["-c", "import train_lm"]
    for arguments, own, threads in (
        (script, {}, "1"), (script, {"OPENBLAS_NUM_THREADS": "3"}, "3"), (script, {"OMP_NUM_THREADS": "2"}, "None"),
        (imported, {}, "None"),
    ):  # fmt: skip
        environment = {**clean, **own, "PYTHONPATH": str(tmp_path)}
        run = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=True)
        assert run.stderr == f"{threads}\n"


@pytest.mark.matrix
def test_runs_from_another_folder_as_a_script(tmp_path):
    command = [sys.executable, str(SCRIPTS / "train_lm.py"), *SIZES, "--steps", "1"]
    environment = {**os.environ, "PYTHONPATH": str(Path(fa2cupy.__file__).resolve().parent.parent)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "runs" / "tiny-fused.csv").exists()


@pytest.fixture
def cupy_arrays():
    """Yields CuPy's arrays, and then restores the memory pool of the other tests."""
    import cupy

    yield CupyArrays()
    cupy.cuda.set_allocator(cupy.get_default_memory_pool().malloc)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_products_on_the_gpu_are_those_of_cublas(cupy_arrays, dtype):
    own = CupyArrays(dtype)
    assert own.dtype.name == dtype and own._product == own._blas_product


@pytest.mark.gpu
def test_pointwise_functions_are_one_kernel_on_the_gpu(cupy_arrays):
    assert isinstance(cupy_arrays.pointwise(_gelu_gradient), cupy_arrays.xp._core.fusion.Fusion)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("attention", ["fused", "unfused"])
def test_the_gpu_trains_like_numpy(attention, dtype, corpus, cupy_arrays):
    settings = dataclasses.replace(SMALL, attention=attention, steps=20, dtype=dtype)
    on_host = train(settings, corpus, settings.steps)
    on_device = Training(settings, corpus, CupyArrays(dtype))
    on_device.run_to(settings.steps)
    assert on_device.arrays.peak_bytes() > 0
    tolerance = 0.02 if dtype == "bfloat16" else 1e-3
    np.testing.assert_allclose(on_device.curve.losses, on_host.curve.losses, rtol=tolerance)


# ------------------------------------------------------------------------------------------------------------- sampling


def test_a_cache_samples_what_the_whole_context_does():
    arrays = NumpyArrays(np.float64)
    config = ModelConfig(layers=2, heads=2, width=16, context=24)
    model = Transformer(config, arrays, Parameters(config, arrays, seed=1), fa2cupy.attention)
    prompt = np.random.default_rng(0).integers(0, 256, (3, 7), np.uint8)
    cached = sample_with_cache(model, arrays, prompt, 10)
    whole = sample_without_cache(model, arrays, prompt, 10)
    np.testing.assert_array_equal(cached.ids, whole.ids)
    assert cached.ids.shape == (3, 17) and (cached.ids[:, :7] == prompt).all()
    assert cached.tokens_per_second > 0 and isinstance(cached.text, str)
    assert model.attention is fa2cupy.attention and model.positions == slice(0, 24), "training goes on as before"


@pytest.mark.matrix
def test_a_training_ends_with_a_sample(corpus):
    training = train(SMALL, corpus, 2)
    lines = train_lm.sample_lines(training, 5)
    assert lines[0] == "a sample of 5 bytes behind 24:"
    assert re.fullmatch(r"sampled with a cache: [\d,]+ tokens/s, without: [\d,]+", lines[-1])


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_have_the_curve_of_one(corpus, ranks):
    """Checks also that all ranks agree, to the last bit of the weights."""
    one = train(SMALL, corpus, SMALL.steps)
    wanted = one.evaluate(SMALL.final_windows)

    def run(comm):
        training = Training(SMALL, corpus, NumpyArrays(), SeveralRanks(comm))
        training.run_to(SMALL.steps)
        found = training.evaluate(SMALL.final_windows)
        if training.ranks.is_first:
            training.arrays.peak_bytes()
        return training.curve.losses, training.parameters.flat, found

    (losses, weights, (bits, count)), *others = dist.simulate(ranks, run)
    assert losses == pytest.approx(one.curve.losses, rel=1e-4)
    assert (bits, count) == (pytest.approx(wanted[0], rel=1e-4), wanted[1])
    for other in others:
        assert other[0] == losses and np.array_equal(other[1], weights) and other[2] == (bits, count)


@pytest.mark.matrix
def test_ranks_of_threads_report_once(short_corpus, tmp_path, capsys, monkeypatch):
    """Runs the command of docs/performance.md with other sizes; the run ends with all that it does by default."""
    monkeypatch.setattr(train_lm, "_TIMEOUT_S", 20.0)
    assert train_lm.main([*SIZES, "--steps", "4", "--out", str(tmp_path)]) == 0
    of_one = capsys.readouterr().out
    assert train_lm.main([*SIZES, "--steps", "4", "--ranks", "2", "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert told.count("weights, Settings(") == 1 and told.count("written to") == 1
    assert (tmp_path / "tiny-fused-2-ranks.csv").read_text().count("\n") == 3
    if importlib.util.find_spec("matplotlib") is not None:
        assert (tmp_path / "tiny-fused-2-ranks.png").read_bytes().startswith(b"\x89PNG")
    samples = [[line for line in text.splitlines() if line.startswith("  | ")] for text in (of_one, told)]
    assert samples[0] == samples[1] and samples[0] and told.count("sampled with a cache") == 1


@pytest.mark.matrix
def test_ranks_as_the_readme_shows_them(tmp_path):
    """Trains few steps, in a process: the rest of the command line is that of docs/performance.md."""
    command = [sys.executable, str(SCRIPTS / "train_lm.py"), "--ranks", "2", "--device", "cpu", "--steps", "2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(fa2cupy.__file__).resolve().parent.parent)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    assert "sampled with a cache" in run.stdout
    assert (tmp_path / "runs" / "tiny-fused-2-ranks.csv").exists()


def test_a_context_that_ranks_do_not_divide(short_corpus, tmp_path, capsys):
    assert train_lm.main([*SIZES, "--ranks", "5", "--out", str(tmp_path)]) == 2
    assert "the context must be a multiple of 10 for 5 ranks" in capsys.readouterr().err


def test_more_ranks_than_gpus(monkeypatch, capsys):
    monkeypatch.setattr(train_lm, "device_count", lambda: 1)
    assert train_lm.main(["--ranks", "2"]) == 2
    assert capsys.readouterr().err == "train_lm.py: --ranks: expected at most 1, the number of GPUs, got 2\n"
