"""The training of the language model: settings, steps, evaluation, checkpoints."""

from __future__ import annotations

import copy
import csv
import dataclasses
import json
import math
import os
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from language_model.arrays import Arrays, SetupError
from language_model.data import Corpus, training_windows
from language_model.model import Adam, ModelConfig, Parameters, Transformer, cross_entropy, unfused_attention
from language_model.ranks import OneRank

__all__ = ["LOG_EVERY", "Curve", "Settings", "Training"]

#: Steps between readings of the loss, because a reading waits for the device. A point of a curve is their mean.
LOG_EVERY = 10
_LAST_LEARNING_RATE = 0.05  # of the highest


@dataclass(frozen=True)
class Settings:
    """All that a run's result depends on, besides the text."""

    layers: int
    heads: int
    width: int
    context: int
    batch: int
    steps: int
    learning_rate: float
    warmup: int
    evaluate_every: int
    evaluate_windows: int
    final_windows: int
    seed: int = 0
    attention: str = "fused"
    deterministic: bool = False
    dtype: str = "bfloat16"  # on a GPU; that of NumPy's arrays is float32

    @property
    def tokens_per_step(self) -> int:
        """Bytes that a step predicts."""
        return self.batch * self.context

    def learning_rate_at(self, step: int) -> float:
        """Returns the learning rate: linear warm-up, then half a cosine; `step` counts from 1."""
        if step <= self.warmup:
            return self.learning_rate * step / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.learning_rate * (_LAST_LEARNING_RATE + (1 - _LAST_LEARNING_RATE) * cosine)


@dataclass
class Curve:
    """The measurements of a run so far.

    Attributes
    ----------
    losses : list of float
        Training loss of every step, in bits per byte.
    times : list of (step, seconds)
        Wall time since the start, evaluations included.
    held_out : list of (step, seconds, bits per byte)
    """

    losses: list[float] = field(default_factory=list)
    times: list[tuple[int, float]] = field(default_factory=list)
    held_out: list[tuple[int, float, float]] = field(default_factory=list)

    def points(self) -> list[tuple[int, float, float]]:
        """Returns (step, seconds, mean training loss since the previous point)."""
        starts = [0, *(step for step, _ in self.times)]
        return [
            (step, seconds, float(np.mean(self.losses[start:step])))
            for start, (step, seconds) in zip(starts, self.times, strict=False)
        ]

    def write_csv(self, path: Path, tokens_per_step: int) -> None:
        """Writes a row for each reading of the training loss, with the evaluation after the same step, if any."""
        rows = {step: [step, step * tokens_per_step, f"{s:.3f}", f"{loss:.5f}", ""] for step, s, loss in self.points()}
        for step, _, bits in self.held_out:
            rows[step][4] = f"{bits:.5f}"
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["step", "tokens", "seconds", "train_bits_per_byte", "held_out_bits_per_byte"])
            writer.writerows(rows.values())


class Training:
    """A model in training.

    Attributes
    ----------
    step : int
        Steps done.
    curve : Curve
        Losses are those of all ranks.
    """

    def __init__(self, settings: Settings, corpus: Corpus, arrays: Arrays, ranks: OneRank | None = None):
        self.ranks = ranks or OneRank()
        rows = self.ranks.rows(settings.context)
        self._rows = rows if isinstance(rows, slice) else arrays.xp.asarray(rows)
        if self.ranks.is_first:
            arrays.start_memory_count()
        self.settings, self.corpus, self.arrays = settings, corpus, arrays
        config = ModelConfig(settings.layers, settings.heads, settings.width, settings.context)
        self.parameters = Parameters(config, arrays, settings.seed)
        self.model = Transformer(config, arrays, self.parameters, self._choose_attention(self.ranks))
        self.model.positions = self._rows
        self.optimizer = Adam(arrays, self.parameters)
        self.step = 0
        self.curve = Curve()
        self._text = arrays.xp.asarray(corpus.training)
        self._unread_losses: list = []
        self._start = time.perf_counter()
        self._timed_seconds, self._timed_steps, self._warm = 0.0, 0, False

    @property
    def seconds(self) -> float:
        """Wall time of the run, evaluations and what came before a checkpoint included."""
        return time.perf_counter() - self._start

    @property
    def tokens_per_second(self) -> float:
        """Speed of the training steps of this process, without evaluations and the first step, which compiles."""
        return (
            self._timed_steps * self.settings.tokens_per_step / self._timed_seconds if self._timed_steps else math.nan
        )

    def run_to(self, step: int, stop: Callable[[], bool] = lambda: False) -> None:
        """Trains up to a step, or until `stop` says so, and waits for the device.

        Raises
        ------
        FloatingPointError
            The loss is no longer a number.
        """
        first, start = self.step, time.perf_counter()
        while self.step < step and not stop():
            self._advance()
        self._read_losses()
        if self._warm:
            self._timed_seconds += time.perf_counter() - start
            self._timed_steps += self.step - first
        self._warm = True

    def _advance(self) -> None:
        xp, context = self.arrays.xp, self.settings.context
        starts = training_windows(len(self._text), context, self.settings.batch, self.settings.seed, self.step)
        windows = self._text[xp.asarray(starts)[:, None] + xp.arange(context + 1)]
        ids, targets = windows[:, :-1][:, self._rows], windows[:, 1:][:, self._rows]
        logits, backprop = self.model(ids)
        losses, loss_backprop = cross_entropy(xp, logits, targets.reshape(-1))
        backprop(loss_backprop())  # of the mean over this rank's rows
        if self.ranks.size > 1:
            gradient = self.parameters.flat_gradient
            gradient[...] = self.ranks.total(gradient) / self.ranks.size
        self.step += 1
        self.optimizer.update(self.step, self.settings.learning_rate_at(self.step))
        self._unread_losses.append(self.ranks.total(losses.mean()) / self.ranks.size)

    def _read_losses(self) -> None:
        if not self._unread_losses:
            return
        losses = self.arrays.to_host(self.arrays.xp.stack(self._unread_losses)).astype(float) / math.log(2)
        self._unread_losses.clear()
        self.curve.losses.extend(losses.tolist())
        self.curve.times.append((self.step, self.seconds))
        if not np.isfinite(losses).all():
            raise FloatingPointError(f"the loss is no longer a number at step {self.step}: try a lower --learning-rate")

    def evaluate(self, windows: int) -> tuple[float, int]:
        """Returns the bits per byte on held-out windows, evenly spaced (0: all), and the number of bytes predicted."""
        xp, context, batch = self.arrays.xp, self.settings.context, self.settings.batch
        texts, lengths = self.corpus.held_out_windows(context, windows or None)
        sums = []
        for start in range(0, len(texts), batch):
            text = xp.asarray(texts[start : start + batch])
            logits = self.model(text[:, :-1][:, self._rows])[0]
            losses = cross_entropy(xp, logits, text[:, 1:][:, self._rows].reshape(-1))[0].reshape(len(text), -1)
            real = xp.arange(context)[self._rows] < xp.asarray(lengths[start : start + batch])[:, None]
            sums.append((losses * real).sum())
        total = self.arrays.to_host(self.ranks.total(xp.stack(sums))).astype(float).sum()
        return total / math.log(2) / lengths.sum(), int(lengths.sum())

    def record_evaluation(self) -> float:
        """Adds `evaluate` on the fixed windows to the curve, as a point."""
        bits, _ = self.evaluate(self.settings.evaluate_windows)
        self.curve.held_out.append((self.step, self.seconds, bits))
        return bits

    def whole_model(self) -> Transformer:
        """Returns the model, with the same weights, for whole contexts: one rank can call it without the others."""
        model = copy.copy(self.model)
        model.attention, model.positions = self._choose_attention(OneRank()), slice(0, self.settings.context)
        return model

    def save(self, path: Path) -> None:
        """Writes a checkpoint. An interrupted write leaves the previous one in place."""
        state = {name: self.arrays.to_host(array) for name, array in self._state().items()}
        curve = {name: np.array(values, float) for name, values in dataclasses.asdict(self.curve).items()}
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            np.savez(
                file,
                settings=json.dumps(dataclasses.asdict(self.settings)),
                text=self.corpus.fingerprint,
                step=self.step,
                seconds=self.seconds,
                **state,
                **curve,
            )
        os.replace(temporary, path)

    @classmethod
    def load(cls, path: Path, corpus: Corpus, arrays: Arrays) -> Training:
        """Returns the training of a checkpoint, which goes on as if it had never stopped.

        Raises
        ------
        SetupError
            It is no checkpoint, or one of another text.
        """
        try:
            return cls._load(path, corpus, arrays)
        except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
            raise SetupError(f"{path} is not a checkpoint of train_lm.py, or a damaged one ({error})") from error

    @staticmethod
    def saved_settings(path: Path) -> Settings:
        """Returns the settings of a checkpoint. Raises like `load`."""
        try:
            with np.load(path) as saved:
                return Settings(**json.loads(str(saved["settings"])))
        except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
            raise SetupError(f"{path} is not a checkpoint of train_lm.py, or a damaged one ({error})") from error

    @classmethod
    def _load(cls, path: Path, corpus: Corpus, arrays: Arrays) -> Training:
        archive = np.load(path)
        if isinstance(archive, np.ndarray):
            raise ValueError("it is a single array")
        with archive as saved:
            if str(saved["text"]) != corpus.fingerprint:
                raise SetupError(
                    f"{path} was trained on the standard library of another Python: resume it with that one"
                )
            training = cls(Settings(**json.loads(str(saved["settings"]))), corpus, arrays)
            for name, array in training._state().items():
                array[...] = arrays.xp.asarray(saved[name])
            training.parameters.refresh()
            training.step = int(saved["step"])
            training.curve = Curve(
                saved["losses"].tolist(),
                [(int(step), seconds) for step, seconds in saved["times"]],
                [(int(step), seconds, bits) for step, seconds, bits in saved["held_out"]],
            )
            training._start -= float(saved["seconds"])
        return training

    def _state(self) -> dict[str, object]:
        return {"weights": self.parameters.flat, "mean": self.optimizer.mean, "square": self.optimizer.square}

    def _choose_attention(self, ranks: OneRank) -> Callable:
        if self.settings.attention == "unfused":
            return unfused_attention(self.arrays)
        return ranks.attention(deterministic=self.settings.deterministic)
