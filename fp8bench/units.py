"""Formats all numbers as text.

All other modules use seconds, bytes and plain ratios. Only the functions of this module convert a value to the unit
that a reader sees.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from decimal import Decimal

_SI_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_UNIT_SCALES = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")),
    "J": ((1e6, "MJ"), (1e3, "kJ"), (1.0, "J"), (1e-3, "mJ"), (1e-6, "uJ"), (1e-9, "nJ")),
}
_BINARY_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
NONE = "-"
RATIO = "ratio"
# The units that asv and stored series use, and the symbols that are shown for them.
_UNIT_SYMBOLS = {"seconds": "s", "bytes": "B", "joules": "J"}
# The highest SQNR (signal to quantisation noise) that is reported, in dB. It corresponds to a relative error of 1e-10.
# Values without any error also have this SQNR.
EXACT_SQNR_DB = 200.0


def parse_number(text: str) -> float:
    """Parses a number as people write it, also '2^10'. Returns NaN for other text."""
    base, power_sign, exponent = text.partition("^")
    try:
        # math.pow raises an error for a root of a negative number, while ** returns a complex number.
        return math.pow(float(base), float(exponent)) if power_sign else float(text)
    except (ValueError, OverflowError):
        return math.nan


def parse_number_or_text(text: str) -> float | str:
    """Returns a number if the text is one, otherwise the text."""
    number = parse_number(text)
    return text if math.isnan(number) else number


def get_unit_symbol(unit: str) -> str:
    """Returns the symbol that is shown for a unit: 'joules' -> 'J'. A unit without another symbol is unchanged."""
    return _UNIT_SYMBOLS.get(unit, unit)


def list_typable_units() -> dict[str, tuple[float, str]]:
    """Returns every unit that a user may type, by name, as a pair: its size in the stored unit, and the stored unit."""
    typed_units = {
        name: (float(scale), base) for base in (*_UNIT_SCALES, "B") for scale, name in list_unit_scales(base)
    }
    return {**typed_units, "x": (1.0, "x"), "": (1.0, "")}


def list_unit_scales(unit: str) -> Sequence[tuple[float, str]]:
    """Returns the scales of a unit with their symbols, the largest first: those in _UNIT_SCALES, or SI prefixes."""
    if unit == "B":
        return (*_BINARY_UNITS, (1, "B"))
    return _UNIT_SCALES.get(unit) or [(scale, f"{prefix}{unit}") for scale, prefix in _SI_PREFIXES]


def format_significant_digits(value: float, digits: int = 3) -> str:
    """Formats a number with `digits` significant digits. Numbers from a million up and below a millionth have an
    exponent.
    """
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    text = f"{value:.{digits - 1}e}"
    exponent = int(text.partition("e")[2])  # after rounding: 999.6 becomes 1.00e+03
    if not -6 <= exponent < 6:
        return text
    return f"{float(text):.{max(0, digits - 1 - exponent)}f}"


def _choose_unit_scale(value: float, digits: int, scales: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """Returns the largest scale in which the rounded value is at least 1, so that 0.9996 ms becomes '1.00 ms' and not
    '1000 us'.
    """
    min_value_rounded_to_one = 1 - 0.5 * 10.0**-digits
    return next((scale for scale in scales if abs(value) >= scale[0] * min_value_rounded_to_one), scales[-1])


def _format_with_unit(value: float | None, base: str, digits: int) -> str:
    if value is None:
        return NONE
    if value == 0 or not math.isfinite(value):
        return f"{format_significant_digits(value)} {base}"
    scale, unit = _choose_unit_scale(value, digits, _UNIT_SCALES[base])
    return f"{format_significant_digits(value / scale, digits)} {unit}"


def seconds(value: float | None, digits: int = 3) -> str:
    """Formats a duration: 0.0243 -> '24.3 ms'."""
    return _format_with_unit(value, "s", digits)


def joules(value: float | None) -> str:
    """Formats an energy: 0.0191 -> '19.1 mJ'."""
    return _format_with_unit(value, "J", 3)


def clock(value: float) -> str:
    """Formats a waiting time in whole seconds: 192.4 -> '3 min 12 s'."""
    total_seconds = max(0, round(value))
    minutes, remaining_seconds = divmod(total_seconds, 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {remaining_seconds:02d} s" if minutes else f"{remaining_seconds} s"


def moment(milliseconds: float | None) -> str:
    """Formats milliseconds since 1970 as '2026-01-05 12:00'. Returns 'unknown' for None, and for dates beyond the
    calendar.
    """
    if milliseconds is None:
        return "unknown"
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return "unknown"


def count(value: float | None, unit: str = "", digits: int = 3) -> str:
    """Formats a count with an SI prefix: 84300 tok/s -> '84.3 ktok/s'."""
    if value is None:
        return NONE
    scale, prefix = _choose_unit_scale(value, digits, _SI_PREFIXES) if math.isfinite(value) else (1.0, "")
    return f"{format_significant_digits(value / scale, digits)} {prefix}{unit}".rstrip()


def whole(value: int) -> str:
    """Formats a count, from 10,000 on with an SI prefix: 4096 -> '4096', 131072 -> '131 k'."""
    return str(value) if abs(value) < 10_000 else count(value)


def size(value: float | None) -> str:
    """Formats bytes in binary units: 1610612736 -> '1.50 GiB'."""
    if value is None:
        return NONE
    if math.isnan(value) or abs(value) < 1 << 10:
        return f"{value:.0f} B"
    scale, unit = _choose_unit_scale(value, 3, _BINARY_UNITS)
    return f"{format_significant_digits(value / scale)} {unit}"


def binary_unit(value: float) -> tuple[float, str]:
    """Returns one unit for all values of a column, chosen by its largest value: 1610612736 -> (1073741824, 'GiB')."""
    return _choose_unit_scale(value, 3, _BINARY_UNITS) if abs(value) >= 1 << 10 else (1.0, "B")


def parse_size(text: str) -> int:
    """Parses a size: '2GiB' -> 2147483648, '512MB' -> 512000000. K, M, G and T alone are binary. Raises ValueError
    for other text.
    """
    size_match = re.fullmatch(
        r"(\d{1,15}(?:\.\d{1,9})?|\.\d{1,9}) ?(?:([kmgt])(i?b)?|b)?", text.strip(), re.ASCII | re.IGNORECASE
    )
    if size_match is None:
        raise ValueError("expected a size like 2GiB, 512MB or 1.5G")
    number, prefix, suffix = size_match.groups()
    unit_base = 1000 if suffix is not None and suffix.lower() == "b" else 1024
    # Use Decimal, because a float would turn 4.1TB into 4099999999999 bytes.
    return int(Decimal(number) * unit_base ** (" kmgt".index(prefix.lower()) if prefix else 0))


def percent(share: float | None, decimals: int = 1) -> str:
    """Formats a share as a percentage: 0.123 -> '12.3%'."""
    if share is None:
        return NONE
    return f"{round(100 * share, decimals) + 0.0:.{decimals}f}%"  # + 0.0 avoids '-0.0%'


def share(value: float) -> str:
    """Formats a share with enough digits to distinguish a tiny share from zero: '-' (zero), '<0.01%', '0.25%',
    '12.3%'.
    """
    if value == 0:
        return NONE
    if value < 1e-4:
        return "<0.01%"
    return percent(value, 1 if value >= 0.01 else 2)


def ratio(value: float | None) -> str:
    """Formats a ratio of times: 1.0312 -> '1.031x'. A ratio below 0.1 gets three significant digits, a ratio of 10 or
    more gets four.
    """
    if value is None:
        return NONE
    if value == 0 or 0.1 <= abs(value) < 10:
        return f"{value:.3f}x"
    return f"{format_significant_digits(value, 3 if abs(value) < 0.1 else 4)}x"


def change(ratio: float | None) -> str:
    """Formats the ratio of a new value to an old value as a change: 1.0312 -> '+3.1%', 0.5 -> '-50.0%'. A ratio of ten
    or more is shown as a factor: 'x12.3'.
    """
    if ratio is None:
        return NONE
    if math.isnan(ratio) or ratio >= 10:
        return f"x{format_significant_digits(ratio)}"
    share = 100 * (ratio - 1)
    for decimals in (1, 2):
        if round(share, decimals):
            return f"{share:+.{decimals}f}%"
    return "0%" if share == 0 else f"{'+' if share > 0 else '-'}<0.01%"


def speed_up(value: float | None) -> str:
    """Formats a speed-up with three digits: 1.6197 -> '1.62x'."""
    return NONE if value is None else f"{format_significant_digits(value)}x"


def percentage(value: float | None) -> str:
    """Formats a number that is already in percent: 0.64 -> '0.64%', 0 -> '0%', almost zero -> '<0.01%'."""
    if value is None:
        return NONE
    return f"{'-' * (value < 0)}{share(abs(value) / 100)}" if value else "0%"


def decibels(value: float | None) -> str:
    """Formats a ratio of powers in decibels: 31.56 -> '31.6 dB', or 'exact' from EXACT_SQNR_DB on."""
    if value is None:
        return NONE
    return "exact" if value >= EXACT_SQNR_DB else f"{round(value, 1) + 0.0:.1f} dB"  # + 0.0 avoids '-0.0 dB'


def describe(value: float | None, unit: str, digits: int = 3) -> str:
    """Formats a number in its unit. `digits` applies only to times and energies."""
    if value is None:
        return NONE
    unit = get_unit_symbol(unit)
    if unit in _UNIT_SCALES:
        return _format_with_unit(value, unit, digits)
    formats: dict[str, Callable[[float], str]] = {
        "B": size,
        "x": ratio,
        RATIO: relative_error,
        "dB": decibels,
        "%": percentage,
        "": format_significant_digits,
        "ppm": lambda value: f"{format_significant_digits(value)} ppm",
    }
    return formats[unit](value) if unit in formats else count(value, unit)


def span(values: Iterable[float], show: Callable[[float], str]) -> str:
    """Formats the range of several values: '1.21x to 2.10x', or one text if the lowest and the highest value look
    equal. Returns '' without values.
    """
    numbers = list(values)
    return " to ".join(dict.fromkeys((show(min(numbers)), show(max(numbers))))) if numbers else ""


def relative_error(value: float | None) -> str:
    """Formats a relative error with two digits and an exponent: '1.2e-03'."""
    return NONE if value is None else f"{value:.1e}"
