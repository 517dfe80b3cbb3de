"""Trains a byte-level GPT on the source code of Python's standard library: fa2cupy at its main job, on real input.

    python scripts/train_lm.py                              on the GPU, or a tiny model on NumPy where there is none
    python scripts/train_lm.py --preset tiny --device cpu   about two minutes of one core
    python scripts/train_lm.py --attention both             fused and unfused, one after the other
    python scripts/train_lm.py --dtype float32              the same model without a cast on the GPU
    python scripts/train_lm.py --resume runs/gpu-fused.npz  goes on exactly where Ctrl-C or --time-limit stopped a run
    python scripts/train_lm.py --ranks 2                    each context spread over two GPUs, or two threads on NumPy

Model, gradients and optimizer are in ``language_model/model.py`` and use the array module alone, with
``fa2cupy.attention`` for attention. With ``--attention unfused`` the same training, from the same weights on the same
bytes, goes through a written-out score matrix; ``both`` does one after the other and compares loss, memory and speed.

With ``--ranks`` the rows of every context are spread over several ranks (``fa2cupy.distributed``). Each rank has all
weights, and the gradients are averaged over ranks: the loss curve is that of one rank except for rounding.

Everything is measured in bits per byte. The baseline is zlib at level 9 on the held-out files in one stream. The model
gets them in windows of its context length, predicts each byte once, and knows nothing from before a window, while zlib
always sees the previous 32 KiB. Held-out figures during the training are for a few evenly spaced windows, the final one
for more, up to all of them; the output says for how many bytes.

After a training the model continues a few held-out bytes, with `fa2cupy.decode` and a cache of keys and values. The
output gives the bytes sampled in a second, with the cache and without it, from the whole context each time.

Written to ``--out``: a CSV of the curve and a checkpoint for each run, and a PNG of the curves.

On a CPU the matrix products take one thread, unless ``OPENBLAS_NUM_THREADS`` (or ``MKL_NUM_THREADS``) says otherwise:
more are faster on idle cores, for sizes above those of ``--preset tiny``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

if __name__ == "__main__" and "OMP_NUM_THREADS" not in os.environ:
    # BLAS reads these variables when NumPy loads it. Its threads spin while they wait for each other, in every product:
    # on cores that have other work, too, a small model takes ten times as long as with one thread.
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")

import numpy as np
from common.plots import can_plot
from common.ranks import communicator, free_ports
from language_model.arrays import Arrays, NumpyArrays, SetupError, select_arrays
from language_model.data import Corpus, load_corpus, zlib_bits_per_byte
from language_model.ranks import OneRank, SeveralRanks
from language_model.report import Result, plot_curves, report_lines
from language_model.sampling import sample_with_cache, sample_without_cache
from language_model.training import LOG_EVERY, Settings, Training

from fa2cupy import distributed as dist
from fa2cupy.cli import run_command
from fa2cupy.families.device import device_count

PRESETS = {
    # Two minutes of one core: enough to see the loss fall and the two attentions agree, not to pass zlib.
    "tiny": Settings(
        layers=3, heads=4, width=128, context=128, batch=8, steps=1000, learning_rate=4e-3, warmup=30,
        evaluate_every=100, evaluate_windows=64, final_windows=1024,
    ),
    # For an older GPU, or a night on a CPU.
    "small": Settings(
        layers=6, heads=4, width=256, context=1024, batch=16, steps=3000, learning_rate=2e-3, warmup=100,
        evaluate_every=100, evaluate_windows=64, final_windows=0,
    ),
    # 25 million weights, about 3.5 TFLOP a step: below zlib's line in a minute on an H100.
    "gpu": Settings(
        layers=8, heads=8, width=512, context=2048, batch=8, steps=700, learning_rate=1.5e-3, warmup=70,
        evaluate_every=50, evaluate_windows=64, final_windows=0,
    ),
}  # fmt: skip
_TIMEOUT_S = 300.0  # for a rank to wait for the others: the first calls compile
_NO_SIZES = ("attention", "deterministic", "dtype")
_SIZES = [field.name for field in dataclasses.fields(Settings) if field.name not in _NO_SIZES]


class Interrupt:
    """While entered, Ctrl-C only sets a flag, so that no step is left half done; a second one ends the program.

    A rank cannot stop alone: with several ranks `enabled` is False, and Ctrl-C ends them at once.
    """

    def __init__(self, enabled: bool):
        self.requested = False
        self._enabled = enabled

    def __enter__(self) -> Interrupt:
        if self._enabled:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: object) -> None:
        self.requested = True
        print("\nstopping after this step; once more to stop at once", file=sys.stderr)
        signal.signal(signal.SIGINT, self._before)

    def __exit__(self, *exception: object) -> None:
        if self._enabled:
            signal.signal(signal.SIGINT, self._before)


class Progress:
    """A progress bar on a terminal where tqdm is installed, a line now and then elsewhere."""

    seconds_between_lines = 10.0

    def __init__(self, label: str, done: int, total: int):
        self._label, self._total, self._printed, self._bar = label, total, -math.inf, None
        if sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
            from tqdm import tqdm

            self._bar = tqdm(desc=label, initial=done, total=total, unit="step", dynamic_ncols=True)

    def show(self, training: Training) -> None:
        """Shows loss and speed as of the last reading."""
        recent = np.mean(training.curve.losses[-LOG_EVERY:])
        text = f"loss {recent:.3f} bit/byte"
        if not math.isnan(training.tokens_per_second):
            text += f", {training.tokens_per_second:,.0f} tokens/s"
        if training.curve.held_out:
            text += f", held-out {training.curve.held_out[-1][2]:.3f}"
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(training.step - self._bar.n)
        elif time.monotonic() - self._printed >= self.seconds_between_lines or training.step == self._total:
            print(f"{self._label}: step {training.step}/{self._total}, {text}", flush=True)
            self._printed = time.monotonic()

    def close(self) -> None:
        """Leaves the bar as it is."""
        if self._bar is not None:
            self._bar.close()


def train(
    training: Training, checkpoint: Path, until: int, time_limit: float = math.inf, checkpoint_every: int = 500
) -> tuple[Result, bool]:
    """Trains up to a step or a time limit, or until Ctrl-C, with progress, evaluations and checkpoints.

    Returns
    -------
    result : Result
    interrupted : bool
        True if Ctrl-C ended the training.
    """
    settings, is_first = training.settings, training.ranks.is_first
    periods = (LOG_EVERY, settings.evaluate_every, checkpoint_every)
    progress = Progress(f"{settings.attention} attention", training.step, settings.steps) if is_first else None
    with Interrupt(enabled=training.ranks.size == 1) as interrupt:

        def over() -> bool:
            return interrupt.requested or training.seconds >= time_limit

        first = True
        while training.step < until and not over():
            # The first step runs alone: its time differs from the others', and memory is counted in it.
            stops = [training.step + 1] if first else [(training.step // p + 1) * p for p in periods]
            training.run_to(min(until, *stops), over)
            if first and is_first:
                training.arrays.peak_bytes()
            first = False
            if training.step % settings.evaluate_every == 0 or training.step == settings.steps:
                training.record_evaluation()
            if progress:
                progress.show(training)
            if is_first and training.step % checkpoint_every == 0:
                training.save(checkpoint)
        seconds = training.seconds
        if progress:
            progress.close()
            training.save(checkpoint)
        interrupted = interrupt.requested and training.step < until
        bits, evaluated = (None, 0) if interrupted else training.evaluate(settings.final_windows)
    speed, peak = training.tokens_per_second, training.arrays.peak_bytes() if is_first else 0
    return Result(settings, training.curve, seconds, bits, evaluated, speed, peak), interrupted


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line, and checks what argparse does not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--preset", choices=PRESETS, help="sizes (default: gpu if there is a GPU, else tiny)")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument("--attention", choices=("fused", "unfused", "both"), help="default: fused")
    parser.add_argument(
        "--compare", dest="attention", action="store_const", const="both", help="the same as --attention both"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="on a GPU (default: bfloat16)")
    parser.add_argument(
        "--deterministic", action="store_true", default=None, help="the same result every time on a GPU, too"
    )
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="GPUs, or threads on NumPy, that share a context"
    )
    parser.add_argument(
        "--time-limit", type=float, default=math.inf, metavar="SECONDS", help="stop training after this time"
    )
    parser.add_argument("--checkpoint-every", type=int, default=500, metavar="STEPS", help="default: %(default)s")
    parser.add_argument("--sample", type=int, default=256, metavar="N", help="bytes to sample (default: %(default)s)")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on from this checkpoint, with its settings")
    parser.add_argument("--out", type=Path, help="folder for results (default: runs, or that of the checkpoint)")
    sizes = parser.add_argument_group("instead of the preset's")
    for field in _SIZES:
        sizes.add_argument(f"--{field.replace('_', '-')}", type=float if field == "learning_rate" else int)
    options = parser.parse_args(arguments)
    given = [
        name
        for name in ("preset", "attention", "dtype", "deterministic", *_SIZES)
        if getattr(options, name) is not None
    ]
    if options.resume and given:
        parser.error(f"--resume takes its settings from the checkpoint: leave out --{given[0].replace('_', '-')}")
    if options.ranks > 1:
        for name, is_given in (
            ("--resume", options.resume),
            ("--time-limit", options.time_limit != math.inf),
            ("--attention " + str(options.attention), options.attention in ("unfused", "both")),
        ):
            if is_given:
                parser.error(f"--ranks: not together with {name}")
    for name in ("checkpoint_every", "ranks", *_SIZES):
        value = getattr(options, name)
        zero_is_allowed = name in ("seed", "final_windows")
        if value is not None and (value < 0 or (value == 0 and not zero_is_allowed)):
            parser.error(f"--{name.replace('_', '-')} must be positive, got {value}")
    if options.resume and not options.resume.is_file():
        parser.error(f"--resume: there is no file {options.resume}")
    return options


def plan_runs(
    options: argparse.Namespace, arrays: Arrays, corpus: Corpus, ranks: OneRank
) -> dict[str, Callable[[], Training]]:
    """Returns a function that begins each run, by the name of its files."""
    if options.resume:
        return {options.resume.stem: functools.partial(Training.load, options.resume, corpus, arrays)}
    preset = options.preset or ("tiny" if isinstance(arrays, NumpyArrays) else "gpu")
    names = ("dtype", "deterministic", *_SIZES)
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    kinds = ("fused", "unfused") if options.attention == "both" else (options.attention or "fused",)
    settings = [dataclasses.replace(PRESETS[preset], attention=kind, **given) for kind in kinds]
    suffix = "-float32" if options.dtype == "float32" else ""
    end = f"-{ranks.size}-ranks" if ranks.size > 1 else ""
    return {
        f"{preset}{suffix}-{s.attention}{end}": functools.partial(Training, s, corpus, arrays, ranks) for s in settings
    }


def sample_lines(training: Training, count: int) -> list[str]:
    """Returns a continuation of held-out bytes, and the speeds with a cache and, for fewer bytes, without."""
    context, held_out = training.settings.context, training.corpus.held_out
    count = min(count, context // 2)
    prompt = np.stack([held_out[start : start + min(64, context // 2)] for start in range(0, 4 * 64, 64)])
    model = training.whole_model()  # with several ranks, the first one samples alone
    cached = sample_with_cache(model, training.arrays, prompt, max(2, count))
    whole = sample_without_cache(model, training.arrays, prompt, max(2, min(count, 32)))
    return [
        f"a sample of {count} bytes behind {prompt.shape[1]}:",
        *(f"  | {line}" for line in cached.text.splitlines()),
        f"sampled with a cache: {cached.tokens_per_second:,.0f} tokens/s, without: {whole.tokens_per_second:,.0f}",
    ]


def run_all(
    plans: Mapping[str, Callable[[], Training]], folder: Path, time_limit: float, checkpoint_every: int, sampled: int
) -> dict[str, Result]:
    """Does one run after the other. The time limit is for the first; the second does as many steps.

    After each run, `sampled` bytes are sampled.
    """
    results: dict[str, Result] = {}
    for name, begin in plans.items():
        training, checkpoint = begin(), folder / f"{name}.npz"
        is_first = training.ranks.is_first
        if is_first:
            folder.mkdir(parents=True, exist_ok=True)
            print(f"{name}: {training.parameters.flat.size:,} weights, {training.settings}", flush=True)
        until = min([training.settings.steps, *(r.steps for r in results.values())])
        result, interrupted = train(training, checkpoint, until, math.inf if results else time_limit, checkpoint_every)
        if is_first and sampled and not interrupted:
            print(*sample_lines(training, sampled), sep="\n", flush=True)
        del training  # before the next one allocates
        results[name] = result
        if not is_first:
            continue
        result.curve.write_csv(folder / f"{name}.csv", result.settings.tokens_per_step)
        if result.steps < result.settings.steps:
            print(f"stopped at step {result.steps}; to go on: python scripts/train_lm.py --resume {checkpoint}")
        if interrupted:
            break
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if the training diverged and 2 if it could not begin."""
    options = parse_arguments(arguments)
    try:
        if options.ranks == 1:
            return run(options, OneRank())
        count = 0 if options.device == "cpu" else device_count()
        if count == 0 and options.device != "gpu":
            return run_simulated(options)
        if count < options.ranks:
            raise SetupError(f"--ranks: expected at most {count}, the number of GPUs, got {options.ranks}")
        return run_processes(options)
    except (SetupError, FloatingPointError) as error:
        print(f"train_lm.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, SetupError) else 1


def run(options: argparse.Namespace, ranks: OneRank) -> int:
    """Does the trainings of one rank; the first rank reports them."""
    folder = options.out or (options.resume.parent if options.resume else Path("runs"))
    dtype = Training.saved_settings(options.resume).dtype if options.resume else options.dtype or "bfloat16"
    arrays, corpus = select_arrays(options.device, dtype), load_corpus()
    line = zlib_bits_per_byte(corpus.held_out)
    if ranks.is_first:
        print(f"{arrays.device}; {corpus}; zlib -9 needs {line:.3f} bit/byte for the held-out files")
    plans = plan_runs(options, arrays, corpus, ranks)
    results = run_all(plans, folder, options.time_limit, options.checkpoint_every, options.sample)
    if not ranks.is_first:
        return 0
    print(*report_lines(list(results.values()), line, arrays.memory_meaning), sep="\n")
    first = next(iter(results))
    name = first if len(results) == 1 else first.removesuffix("-fused")
    if can_plot():
        title = f"Byte-level GPT on Python's standard library: {name} on {arrays.device}"
        plot_curves(folder / f"{name}.png", title, list(results.values()), line)
    print(f"written to {folder}")
    return 0


def run_simulated(options: argparse.Namespace) -> int:
    """Runs the ranks as threads on NumPy."""
    options.device = "cpu"
    return max(dist.simulate(options.ranks, lambda comm: run(options, SeveralRanks(comm)), timeout=_TIMEOUT_S))


def run_processes(options: argparse.Namespace) -> int:
    """Runs a process for each GPU; one that fails ends the others."""
    context = multiprocessing.get_context("spawn")
    (port,) = free_ports(1)
    processes = [context.Process(target=run_process, args=(options, rank, port)) for rank in range(options.ranks)]
    for process in processes:
        process.start()
    running, status = {process.sentinel: process for process in processes}, 0
    try:
        while running and status == 0:
            for ended in multiprocessing.connection.wait(list(running)):
                process = running.pop(ended)
                process.join()
                status = status or abs(process.exitcode)  # that of the first to fail
    finally:
        for process in running.values():  # after a failure or Ctrl-C
            process.terminate()
            process.join()
    return status


def run_process(options: argparse.Namespace, rank: int, port: int) -> None:
    """Trains in the process of one GPU, and exits with the status."""
    comm = communicator(rank, options.ranks, port, _TIMEOUT_S)
    try:
        sys.exit(run(options, SeveralRanks(comm)))
    except (SetupError, FloatingPointError) as error:
        print(f"train_lm.py: rank {rank}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, SetupError) else 1)


if __name__ == "__main__":
    sys.exit(run_command("train_lm.py", main))
