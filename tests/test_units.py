"""Numbers as text: no unit is left at '1000', nothing unknown reads as zero."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8bench import units
from fp8bench.model.specs import find_metric_spec
from tests.counts import for_each


def tokens(value: float | None) -> str:
    return units.count(value, "tok/s")


# A function and its text for a number; None is always a dash, and zero differs from nearly zero.
SHOWN: dict[Callable[..., str], list[tuple[float | None, str]]] = {
    units.format_significant_digits: [
        (0.0, "0"), (1.0, "1.00"), (-1.0, "-1.00"), (0.0243, "0.0243"), (0.9996, "1.00"), (9.996, "10.0"),
        (99.96, "100"), (999.6, "1000"), (123456.0, "123000"), (999999.0, "1.00e+06"), (1.5e7, "1.50e+07"),
        (1e-7, "1.00e-07"), (1.7976931348623157e308, "1.80e+308"), (5e-324, "4.94e-324"), (math.nan, "nan"),
        (math.inf, "inf"), (-math.inf, "-inf"),
    ],
    units.seconds: [
        (None, "-"), (0.0, "0 s"), (-0.0, "0 s"), (1.0, "1.00 s"), (0.0243, "24.3 ms"), (0.9996e-3, "1.00 ms"),
        (0.99949e-3, "999 us"), (0.9996, "1.00 s"), (999.6e-9, "1.00 us"), (3e-9, "3.00 ns"), (3e-12, "0.00300 ns"),
        (-0.0243, "-24.3 ms"), (3600.0, "3600 s"), (math.nan, "nan s"), (math.inf, "inf s"),
    ],
    units.joules: [
        (None, "-"), (0.0, "0 J"), (1.9, "1.90 J"), (0.9996e-3, "1.00 mJ"), (4.2e-9, "4.20 nJ"),
        (4e-12, "0.00400 nJ"), (999.6, "1.00 kJ"), (3e9, "3000 MJ"), (-0.5, "-500 mJ"), (math.nan, "nan J"),
    ],
    tokens: [
        (None, "-"), (0, "0 tok/s"), (999.4, "999 tok/s"), (999.6, "1.00 ktok/s"), (999_600, "1.00 Mtok/s"),
        (1.5e12, "1.50 Ttok/s"), (-84_300, "-84.3 ktok/s"), (0.5, "0.500 tok/s"), (math.nan, "nan tok/s"),
    ],
    units.size: [
        (None, "-"), (0, "0 B"), (1, "1 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1610612736, "1.50 GiB"),
        (2**20 - 1, "1.00 MiB"), (2**50, "1020 TiB"), (-1024, "-1.00 KiB"), (-3, "-3 B"), (math.nan, "nan B"),
    ],
    units.percent: [
        (None, "-"), (0.0, "0.0%"), (0.123, "12.3%"), (-0.0001, "0.0%"), (-0.01, "-1.0%"), (0.9996, "100.0%"),
        (math.nan, "nan%"),
    ],
    units.share: [
        (0.0, "-"), (1e-300, "<0.01%"), (9.9e-5, "<0.01%"), (1e-4, "0.01%"), (0.0025, "0.25%"), (0.0123, "1.2%"),
        (1.0, "100.0%"), (math.nan, "nan%"),
    ],
    units.whole: [
        (0, "0"), (7, "7"), (9999, "9999"), (10_000, "10.0 k"), (131_072, "131 k"), (1 << 40, "1.10 T"),
    ],
    units.ratio: [
        (None, "-"), (0.0, "0.000x"), (1.0312, "1.031x"), (0.0512, "0.0512x"), (0.0004, "0.000400x"),
        (12.345, "12.35x"), (123456.0, "123500x"), (math.inf, "infx"), (math.nan, "nanx"),
    ],
    units.relative_error: [
        (None, "-"), (0.0012, "1.2e-03"), (0.0, "0.0e+00"), (9.96e-4, "1.0e-03"), (math.nan, "nan"), (math.inf, "inf"),
    ],
    units.speed_up: [
        (None, "-"), (1.6197, "1.62x"), (0.9404, "0.940x"), (12.345, "12.3x"), (1.005026, "1.01x"), (math.inf, "infx"),
    ],
    units.clock: [
        (0.0, "0 s"), (0.4, "0 s"), (59.6, "1 min 00 s"), (192.4, "3 min 12 s"), (3599.7, "1 h 00 min"), (-1.0, "0 s"),
    ],
}  # fmt: skip


@for_each("function", SHOWN)
def test_numbers_as_text(function: Callable[[float | None], str]) -> None:
    for value, text in SHOWN[function]:
        assert function(value) == text, value
        assert function is not units.joules or units.describe(value, "J") == text, value


@for_each(("value", "digits", "text"), [(0.996e-3, 2, "1.0 ms"), (0.99951e-3, 4, "999.5 us")])
def test_seconds_round_up_across_units_at_any_precision(value: float, digits: int, text: str) -> None:
    assert units.seconds(value, digits) == text


@given(st.floats(1e-9, 0.9994))
def test_no_time_below_a_second_shows_a_thousand(value: float) -> None:
    number = float(units.seconds(value).split()[0])
    assert 1 <= number < 1000


def test_count_without_a_unit_has_no_trailing_blank() -> None:
    assert units.count(7) == "7.00"


@for_each(
    ("metric", "unit"),
    [
        ("sqnr_db", "dB"),
        ("underflow_percent", "%"),
        ("max_ulp", "ulp"),
        ("scale_lag_octaves", "octaves"),
        ("product_error", "ratio"),
        ("gradient_vanished", "ratio"),
        ("db", "ratio"),
        ("percent_of_it", "ratio"),
        ("relative_loss", "x"),
        ("cosine_loss", "ratio"),
    ],
)
def test_a_metric_says_its_unit_at_its_end(metric: str, unit: str) -> None:
    assert find_metric_spec(metric).unit == unit


@for_each(
    ("value", "unit", "text"),
    [
        (31.5567, "dB", "31.6 dB"),
        (-0.04, "dB", "0.0 dB"),
        (-3.0, "dB", "-3.0 dB"),
        (200.0, "dB", "exact"),
        (math.inf, "dB", "exact"),
        (None, "dB", "-"),
        (0.6412, "%", "0.64%"),
        (0.0, "%", "0%"),
        (1e-5, "%", "<0.01%"),
        (12.34, "%", "12.3%"),
        (-2.456, "%", "-2.5%"),
        (-1e-5, "%", "-<0.01%"),
        (None, "%", "-"),
        (0.5, "ulp", "0.500 ulp"),
        (2.5, "octaves", "2.50 octaves"),
        (0.024, "s", "24.0 ms"),
        (2048.0, "B", "2.00 KiB"),
        (None, "ulp", "-"),
        (0.0191, "J", "19.1 mJ"),
        (0.0191, "joules", "19.1 mJ"),
        (0.024, "seconds", "24.0 ms"),
        (1.5, "x", "1.500x"),
        (1.2e-3, "ratio", "1.2e-03"),
        (1234.0, "", "1230"),
        (2.5e12, "FLOP/s", "2.50 TFLOP/s"),
    ],
)
def test_measured_numbers_are_shown_by_their_units(value: float | None, unit: str, text: str) -> None:
    assert units.describe(value, unit) == text


def test_a_plain_ratio_is_shown_by_its_metric() -> None:
    assert find_metric_spec("gradient_vanished").format_value(0.25, "ratio") == "25.0%"
    assert find_metric_spec("gradient_vanished").format_value(0.0, "ratio") == "0%"
    assert find_metric_spec("relative_loss").format_value(1.000421, "x") == "1.00042x"
    assert (
        find_metric_spec("gradient_error").format_value(0.25, "ratio")
        == find_metric_spec("gradient_error").format_value(0.25, "")
        == "2.5e-01"
    )


def test_units_that_a_person_writes() -> None:
    known = units.list_typable_units()
    assert (known["mJ"], known["us"], known["MiB"], known["x"], known[""]) == (
        (1e-3, "J"),
        (1e-6, "s"),
        (float(1 << 20), "B"),
        (1.0, "x"),
        (1.0, ""),
    )


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_every_float_becomes_a_short_text(value: float) -> None:
    for function in (
        units.format_significant_digits,
        units.seconds,
        units.count,
        units.size,
        units.ratio,
        units.relative_error,
    ):
        assert re.fullmatch(r"\S{1,12}( \S{1,3})?", function(value)), function(value)


@for_each(
    ("text", "value"),
    [
        ("2GiB", 2 << 30),
        ("2gib", 2 << 30),
        ("2 GiB", 2 << 30),
        ("2G", 2 << 30),
        ("2GB", 2 * 10**9),
        ("512MB", 512 * 10**6),
        ("1.5G", 3 << 29),
        ("1.5GB", 1_500_000_000),
        (".5k", 512),
        ("4096", 4096),
        ("4096B", 4096),
        ("1T", 1 << 40),
        (" 1KiB ", 1024),
        ("0", 0),
        ("0.1KiB", 102),
        ("0.3GB", 300_000_000),
    ],
)
def test_sizes_are_read(text: str, value: int) -> None:
    assert units.parse_size(text) == value


@for_each(
    "text",
    [
        "",
        "G",
        "-1G",
        "+1G",
        "1e9",
        "1,5G",
        "1.G",
        "1GiBs",
        "1PiB",
        "1 G i B",
        "0x10",
        "\u0661G",
        "inf",
        "nan",
        "1..5G",
        "9" * 40,
    ],
)
def test_malformed_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected a size like 2GiB, 512MB or 1\.5G"):
        units.parse_size(text)


@given(st.integers(0, 1 << 49))
def test_bytes_read_as_themselves(value: int) -> None:
    assert units.parse_size(str(value)) == value
    assert units.parse_size(f"{value}KiB") == 1024 * value
