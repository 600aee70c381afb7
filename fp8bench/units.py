"""The only place where a number becomes text.

Inside the program everything is seconds, bytes and plain ratios; one call here picks the unit for a reader.
"""

from __future__ import annotations

import math

_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_SI = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_BINARY = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
NONE = "-"


def significant(value: float, digits: int = 3) -> str:
    """A number with so many significant digits, never in exponent form below a million."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    rounded = round(value, digits - 1 - magnitude)
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{rounded:.{decimals}f}"


def seconds(value: float | None, digits: int = 3) -> str:
    """A duration: 0.0243 -> '24.3 ms'."""
    if value is None:
        return NONE
    for scale, unit in _TIME:
        if abs(value) >= scale * 0.9995:
            return f"{significant(value / scale, digits)} {unit}"
    return f"{significant(value / 1e-9, digits)} ns" if value else "0 s"


def count(value: float | None, unit: str = "", digits: int = 3) -> str:
    """A count with an SI prefix: 84300 tok/s -> '84.3 ktok/s'."""
    if value is None:
        return NONE
    for scale, prefix in _SI:
        if abs(value) >= scale * 0.9995:
            return f"{significant(value / scale, digits)} {prefix}{unit}".rstrip()
    return f"{significant(value, digits)} {unit}".rstrip()


def size(value: int | None) -> str:
    """Bytes in binary units: 1610612736 -> '1.50 GiB'."""
    if value is None:
        return NONE
    for scale, unit in _BINARY:
        if abs(value) >= scale:
            return f"{value} B" if unit == "B" else f"{significant(value / scale)} {unit}"
    return "0 B"


def percent(share: float | None, decimals: int = 1) -> str:
    """A share as percent: 0.123 -> '12.3%'."""
    return NONE if share is None else f"{100 * share:.{decimals}f}%"


def ratio(value: float | None) -> str:
    """A ratio of times: 1.0312 -> '1.031x'."""
    return NONE if value is None else f"{value:.3f}x"


def relative_error(value: float | None) -> str:
    """A relative error: always two digits and an exponent, '1.2e-03'."""
    return NONE if value is None else f"{value:.1e}"
