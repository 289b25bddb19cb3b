"""Quantities as Kubernetes writes them: `500m`, `2`, `16Gi`."""

from __future__ import annotations

import math
from fractions import Fraction

_SUFFIXES = {
    "": Fraction(1), "m": Fraction(1, 1000), "k": Fraction(10**3), "M": Fraction(10**6), "G": Fraction(10**9),
    "T": Fraction(10**12), "Ki": Fraction(2**10), "Mi": Fraction(2**20), "Gi": Fraction(2**30), "Ti": Fraction(2**40),
}  # fmt: skip


def parse(quantity: str | int) -> Fraction:
    text = str(quantity)
    number = text.rstrip("mkMGTKi")
    return Fraction(number) * _SUFFIXES[text[len(number) :]]


def in_units(quantity: str | int, divisor: str | int) -> str:
    """How often the divisor fits, rounded up, as the downward API gives it. A divisor of 0 means 1."""
    return str(math.ceil(parse(quantity) / (parse(divisor) or 1)))
