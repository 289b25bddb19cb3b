"""Atoll trains one model on many machines that cannot reach each other; they meet in an object store."""

from __future__ import annotations

__version__ = "0.1.0"
