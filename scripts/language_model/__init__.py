"""The byte-level GPT of train_lm.py: arrays, text, model, training and report."""

import common  # noqa: F401  (makes fa2cupy importable in a checkout that is not installed)
