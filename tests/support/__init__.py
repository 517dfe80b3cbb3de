"""Helpers that several test modules share. They import no test module."""

from __future__ import annotations

from pathlib import Path

__all__ = ["CHECKOUT"]

CHECKOUT = Path(__file__).resolve().parent.parent.parent
