"""Units are strict, shown in both conventions, and survive printing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.sizing.units import (
    parse_bytes,
    parse_rate,
    parse_seconds,
    parse_tokens,
    print_bytes,
    print_tokens,
    show_bytes,
    show_rate,
    show_seconds,
)
from kvtier.types import KvtierError


@given(st.integers(0, 1 << 60))
def test_bytes_survive_printing(n):
    """parse(print(x)) == x for bytes."""
    assert parse_bytes(print_bytes(n)) == n


@given(st.integers(0, 1 << 60))
def test_tokens_survive_printing(n):
    """parse(print(x)) == x for tokens."""
    assert parse_tokens(print_tokens(n)) == n


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("64GiB", 68719476736),
        ("64 GB", 64_000_000_000),
        ("1.5TB", 1_500_000_000_000),
        ("512KiB", 524288),
        ("512kB", 512000),
        ("512KB", 512000),
        ("524,288", 524288),
        ("1_000GB", 10**12),
        ("0B", 0),
        ("81559MiB", 85520809984),
    ],
)
def test_bytes_are_read_as_written(text, n):
    """GB is 1e9 and GiB is 2^30, whatever anyone else prints."""
    assert parse_bytes(text) == n


@pytest.mark.parametrize("text", ["64G", "64g", "64gb", "GiB", "-1GB", "1e9", "64GiBs", "", "1 2GB", "1,5GB",
                                  "1,0000GB", "1__0GB"])  # fmt: skip
def test_unclear_bytes_are_refused_by_field(text):
    """A unit that could be read two ways is an error that names the field and what was expected."""
    with pytest.raises(KvtierError, match=r"host: expected bytes with a unit such as 64GiB") as caught:
        parse_bytes(text, "host")
    assert caught.value.field == "host"


def test_k_is_a_thousand_tokens_and_ki_1024():
    """128k is 128,000 tokens; 128Ki is 131,072; 128K is neither."""
    assert parse_tokens("128k") == 128_000
    assert parse_tokens("128Ki") == 131_072
    assert parse_tokens("1.5k") == 1500
    with pytest.raises(KvtierError, match="128Ki"):
        parse_tokens("128K")
    with pytest.raises(KvtierError, match="whole number"):
        parse_tokens("0.5")


def test_network_rates_count_bits():
    """100 Gbit/s are 12.5 GB/s."""
    assert parse_rate("100Gbps") == parse_rate("100 Gbit/s") == 12.5e9
    assert parse_rate("55GB/s") == 55e9
    assert parse_rate("7GiB/s") == 7 * 2**30
    with pytest.raises(KvtierError, match="link"):
        parse_rate("100", "link")


def test_times_need_a_unit():
    """2ms is two thousandths of a second; a bare number is refused."""
    assert parse_seconds("2ms") == 0.002
    assert parse_seconds("1d") == 86400
    with pytest.raises(KvtierError, match="time"):
        parse_seconds("2")


def test_sizes_are_shown_in_both_conventions():
    """What the seed calls 64 GB is 64.00 GiB and 68.72 GB."""
    assert show_bytes(68719476736) == "64.00 GiB = 68.72 GB"
    assert show_bytes(524288) == "512.00 KiB = 524.29 kB"
    assert show_bytes(3514.25) == "3.43 KiB = 3.51 kB"
    assert show_bytes(100) == "100 B"


def test_durations_and_rates_read_well():
    """Each in the unit that a person would choose."""
    assert [show_seconds(s) for s in (2e-6, 0.0859, 12.0, 300.0, 36000.0, 1e6, float("inf"))] == [
        "2 us", "85.9 ms", "12 s", "5 min", "10 h", "11.6 d", "without end",
    ]  # fmt: skip
    assert show_rate(12.5e9) == "12.5 GB/s"
    assert show_rate(3.35e12) == "3.35 TB/s"
