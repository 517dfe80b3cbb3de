"""Bank conflicts of shared memory: 32 banks of 4 bytes, of which a wavefront reaches each once."""

from __future__ import annotations

import numpy as np

_BANKS, _WORD = 32, 4


class BankCounter:
    """Counts wavefronts of the accesses of warps. Bulk copies, TMA and wgmma are no accesses of warps.

    Attributes
    ----------
    phases : int
        Wavefronts that would do without conflicts: 128 bytes of adjacent lanes each.
    wavefronts : int
        Those that it takes.
    """

    def __init__(self) -> None:
        self.phases = self.wavefronts = 0

    def count(self, threads: np.ndarray, offset: np.ndarray, nbytes: int) -> None:
        """Counts an access of `nbytes` by each thread."""
        words = max(1, nbytes // _WORD)
        phase = np.repeat(threads // (_BANKS // words), words)
        word = (offset[:, None] // _WORD + np.arange(words)).ravel()
        reached = np.unique(np.stack([phase, word]), axis=1)  # lanes that read the same word share a wavefront
        banks, of_bank = np.unique(np.stack([reached[0], reached[1] % _BANKS]), axis=1, return_counts=True)
        begins = np.flatnonzero(np.diff(banks[0], prepend=-1))
        self.phases += len(begins)
        self.wavefronts += int(np.maximum.reduceat(of_bank, begins).sum())
