"""The text: the source code of Python's own standard library, which is present wherever Python is."""

from __future__ import annotations

import hashlib
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from language_model.arrays import SetupError

__all__ = ["Corpus", "load_corpus", "training_windows", "zlib_bits_per_byte"]

# Packages that were installed later are not the standard library, although they lie in its folder.
_FOREIGN = {"site-packages", "dist-packages"}
#: A byte that source code cannot contain stands before every file.
_SEPARATOR = b"\0"


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on, and bytes of other files to measure on.

    Attributes
    ----------
    training, held_out : ndarray of uint8
        The files one after another, in the order of their paths, a zero byte before each.
    training_files, held_out_files : int
    """

    training: np.ndarray
    held_out: np.ndarray
    training_files: int
    held_out_files: int

    def __str__(self) -> str:
        return (
            f"{len(self.training):,} bytes of {self.training_files} files to train on, "
            f"{len(self.held_out):,} bytes of {self.held_out_files} files held out"
        )

    @property
    def fingerprint(self) -> str:
        """A digest that distinguishes this text from another Python version's."""
        return hashlib.sha256(self.training.tobytes() + self.held_out.tobytes()).hexdigest()

    def held_out_windows(self, context: int, count: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns the held-out bytes as windows.

        The targets of all windows are the held-out bytes except the first one, each exactly once.

        Parameters
        ----------
        context : int
            Bytes that a window predicts.
        count : int, optional
            Take this many windows, evenly spaced, instead of all.

        Returns
        -------
        windows : ndarray of uint8, shape (windows, context + 1)
            Each begins with the last byte of the previous one. The last one is padded with zeros.
        lengths : ndarray of int, shape (windows,)
            Number of real targets of each.
        """
        targets = len(self.held_out) - 1
        starts = np.arange(0, targets, context)
        if count is not None and count < len(starts):
            starts = starts[np.arange(count) * len(starts) // count]
        padded = np.concatenate([self.held_out, np.zeros(context, np.uint8)])
        return padded[starts[:, None] + np.arange(context + 1)], np.minimum(context, targets - starts)


def load_corpus(root: Path | None = None, held_out_share: float = 0.05) -> Corpus:
    """Reads all ``*.py`` files below a folder.

    Parameters
    ----------
    root : Path, optional
        The standard library of the Python that runs, by default.
    held_out_share : float, optional
        Share of the files that is held out. A hash of its path decides for each file.

    Raises
    ------
    SetupError
        There are not enough files for both parts.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    paths = sorted((path.relative_to(root).as_posix(), path) for path in root.rglob("*.py"))
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for name, path in paths:
        if _FOREIGN.isdisjoint(name.split("/")):
            share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
            parts[share < held_out_share].append(_SEPARATOR + path.read_bytes())
    if not all(parts.values()):
        raise SetupError(f"{root} does not have enough Python source files: is the standard library zipped?")
    training, held_out = (np.frombuffer(b"".join(parts[held]), np.uint8) for held in (False, True))
    return Corpus(training, held_out, len(parts[False]), len(parts[True]))


def zlib_bits_per_byte(data: np.ndarray) -> float:
    """Returns the bits per byte of zlib at its highest level, in one stream: its window reaches into earlier files."""
    return 8 * len(zlib.compress(data.tobytes(), 9)) / len(data)


def training_windows(length: int, context: int, batch: int, seed: int, step: int) -> np.ndarray:
    """Returns the starts of a step's windows. They depend only on seed and step, so that a resumed run is the same."""
    return np.random.default_rng([seed, step]).integers(0, length - context, batch)
