"""What several test modules share. No test module is imported here."""

from __future__ import annotations

from pathlib import Path

__all__ = ["CHECKOUT"]

CHECKOUT = Path(__file__).resolve().parent.parent.parent
