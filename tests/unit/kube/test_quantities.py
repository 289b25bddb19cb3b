"""Quantities of Kubernetes."""

from __future__ import annotations

import pytest

from atoll.kube import quantities


@pytest.mark.parametrize(
    ("text", "value"),
    [("4", 4), ("500m", 0.5), ("16Gi", 16 << 30), ("1.5G", 1.5e9), ("1e3", 1000), (".5", 0.5), ("64Mi", 64 << 20)],
)
def test_parsing(text, value):
    assert quantities.is_quantity(text)
    assert quantities.parsed(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "4 Gi", "16GB", "-1", "0", "x", 4, None])
def test_what_is_no_quantity(text):
    assert not quantities.is_quantity(text)


@pytest.mark.parametrize(("cpus", "text"), [(4, "4"), (0.5, "500m"), (7.5, "7500m"), (0.0001, "1m"), (0.1, "100m")])
def test_cores(cpus, text):
    assert quantities.of_cpus(cpus) == text


@pytest.mark.parametrize(("gib", "text"), [(16, "16Gi"), (30.5, "31232Mi"), (1 / 1024**2, "1Ki"), (0.1, "107374183")])
def test_memory(gib, text):
    assert quantities.of_gib(gib) == text
    assert quantities.parsed(text) >= gib * 2**30 - 1e-3
