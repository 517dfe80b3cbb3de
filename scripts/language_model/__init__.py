"""The byte-level GPT of train_lm.py: arrays, text, model, training and report."""

import common  # noqa: F401  (fa2cupy is then the one of this checkout)
