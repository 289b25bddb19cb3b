"""Amounts, counts and rates as people write them."""

from __future__ import annotations

import pytest

from atoll import units


@pytest.mark.parametrize(
    ("amount", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (80_580, "80.6 kB"), (999_600, "1.00 MB"), (123_456_789, "123 MB"),
     (4e9, "4.00 GB"), (9.999e9, "10.0 GB"), (99.99e9, "100 GB"), (280e9, "280 GB"), (5e18, "5000 PB"),
     (-1500, "-1.50 kB"), (float("nan"), "nan")],
)  # fmt: skip
def test_bytes_have_three_digits(amount, shown):
    assert units.size_text(amount) == shown


@pytest.mark.parametrize(
    ("written", "meant"),
    [("8B", 8e9), ("350M", 350e6), ("1.5b", 1.5e9), ("8e9", 8e9), ("124k", 124e3), ("70 B", 70e9), ("1_000", 1e3),
     ("1T", 1e12), (7, 7.0)],
)  # fmt: skip
def test_counts(written, meant):
    assert units.parse_count(written) == meant


@pytest.mark.parametrize(
    ("written", "meant"),
    [("64MiB", 64 << 20), ("500MB", 5e8), ("4k", 4e3), ("8388608", 8388608), ("2GB", 2e9), ("1gib", 1 << 30), (5, 5.0)],
)
def test_amounts(written, meant):
    assert units.parse_size(written) == meant


@pytest.mark.parametrize(
    ("written", "meant"),
    [("25Gbit", 25e9 / 8), ("25Gbit/s", 25e9 / 8), ("25Gbps", 25e9 / 8), ("400MB/s", 4e8), ("100Mbit", 12.5e6),
     ("1GiB/s", float(1 << 30)), ("10gb/s", 10e9 / 8), ("10GB", 10e9), ("800bit", 100.0), (3.0, 3.0)],
)  # fmt: skip
def test_rates_tell_bits_from_bytes(written, meant):
    assert units.parse_rate(written) == meant


@pytest.mark.parametrize("written", ["", "B", "8X", "eight", "-8B", "8BB", "nan"])
def test_what_is_no_count_is_refused_with_an_example(written):
    with pytest.raises(ValueError, match="350M"):
        units.parse_count(written)


@pytest.mark.parametrize("written", ["25", "25G", "fast", "-1Gbit", "25Gbyte/h"])
def test_a_rate_without_a_unit_is_refused(written):
    with pytest.raises(ValueError, match="`25Gbit`"):
        units.parse_rate(written)


@pytest.mark.parametrize("written", ["", "MiB", "4 potatoes", "-4k"])
def test_what_is_no_amount_is_refused(written):
    with pytest.raises(ValueError, match="64MiB"):
        units.parse_size(written)
