"""Maps values to pixels: scales with readable ticks, limits on what is drawn, and texts.

Everything else is in the table below a chart. The page uses the reader's font, so widths are those of a wide font
(DejaVu Sans).
"""

from __future__ import annotations

import html
import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from fp8bench import units
from fp8bench.report.elements import ChartAxis, ChartPoint, Mark

# Values closer than this, relative to their size, count as equal: ticks between them would look the same.
_ALIKE = 1e-9
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_STRIDES = (1, 2, 3, 5, 10, 20, 25, 50, 100, 200, 500, 1000, 2000, 5000)
# The smallest range of an axis of ratios: small differences must not look large.
_LEAST_RATIO = 1.1
# Smaller numbers without a unit are errors, and read better as 8.0e-04.
_EXPONENT_BELOW = 0.01


@dataclass(frozen=True)
class Scale:
    """Maps `low` to pixel `start`, and `high` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    unit: str = ""

    def at(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        share = value - self.low
        length = self.high - self.low
        if self.log:
            # If the quotient overflows, use a difference of logarithms.
            quotient = value / self.low
            share = math.log(quotient) if quotient < math.inf else math.log(value) - math.log(self.low)
            length = math.log(self.high) - math.log(self.low)
        return self.start + share / length * (self.end - self.start)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        values = _log_ticks(self.low, self.high, most, self.unit) if self.log else []
        if len(values) < 2:
            values = _linear_ticks(self.low, self.high, most, self.unit)
        return list(zip(values, _texts(values, self.unit, self.log), strict=True))


def fit_scale(
    values: Iterable[float], start: float, end: float, log: bool = False, unit: str = "", pad: float = 0.0
) -> Scale:
    """Returns a scale for these values, with the share `pad` of the whole as margin on either side."""
    ordered = sorted(values) or [1.0]
    low = ordered[0]
    high = ordered[-1]
    size = max(abs(low), abs(high))
    if log:
        middle = (math.log(high) + math.log(low)) / 2
        half = (math.log(high) - math.log(low)) / 2
        least = math.log(_LEAST_RATIO) if unit == "x" else 1e-6
        half = max(half, least) * (1 + 2 * pad)
        low = _exp_within_bounds(middle - half)
        high = _exp_within_bounds(middle + half)
    elif high - low > max(_ALIKE * size, 1e-290):
        low, high = low - pad * (high - low), high + pad * (high - low)
    elif size > 1e-289:
        low = low - size / 10
        high = high + size / 10
    else:
        low = 0.0
        high = 1.0
    return Scale(low, high, start, end, log, unit)


def _exp_within_bounds(logarithm: float) -> float:
    return math.exp(min(max(logarithm, -700.0), 700.0))


def write_value(value: float, axis: ChartAxis) -> str:
    if axis.show is not None:
        return axis.show(value)
    return show_number(value, axis.unit)


def show_number(value: float, unit: str) -> str:
    if unit == "%":
        return _plain(units.significant(value)) + "%"
    if unit:
        return units.describe(value, unit)
    if value and abs(value) < _EXPONENT_BELOW:
        return units.relative_error(value)
    if abs(value) < 1e18:
        return units.count(value)
    return _plain(units.significant(value))


def _linear_ticks(low: float, high: float, most: int, unit: str) -> list[float]:
    rough = (high - low) / max(1, most)
    if unit == "B" and rough >= 1:
        # Sizes are read in powers of two.
        step = 2.0 ** math.ceil(math.log2(rough))
    else:
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in _STEPS if factor * power >= rough * (1 - _ALIKE))
    first = math.ceil(low / step - 1e-6)
    last = math.floor(high / step + 1e-6)
    return [number * step for number in range(first, last + 1)]


def _log_ticks(low: float, high: float, most: int, unit: str) -> list[float]:
    """Returns powers of two for ratios near 1, otherwise 1-2-5 or powers of ten; none if that gives too few."""
    first = math.log10(low)
    last = math.log10(high)
    # The number of doublings along the axis decides the ticks.
    octaves = (last - first) / math.log10(2)
    if unit == "x" and octaves <= 3.2 and low > 0.2:
        if octaves >= 1.3:
            return _ratio_ticks(low, high)
        return []
    # Less than a factor of five: linear ticks read better.
    if last - first < 0.7:
        return []
    ticks: list[float] = []
    for power in range(math.floor(first), math.ceil(last) + 1):
        ticks += [digit * 10.0**power for digit in (1, 2, 5)]
    ticks = [value for value in ticks if low * (1 - _ALIKE) <= value <= high * (1 + _ALIKE)]
    if len(ticks) <= most:
        return ticks
    # Too many: take every n-th power of ten.
    rough = (last - first) / max(1, most)
    stride = next(number for number in _STRIDES if number >= rough)
    numbers = range(math.ceil(first / stride - 1e-9), math.floor(last / stride + 1e-9) + 1)
    return [10.0 ** (number * stride) for number in numbers]


def _ratio_ticks(low: float, high: float) -> list[float]:
    """Returns powers of two, and from 0.75 up values between them."""
    ticks: list[float] = []
    for power in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1):
        between = 1.5 * 2.0**power
        ticks += [2.0**power, between] if between >= 0.75 else [2.0**power]
    return [value for value in ticks if low <= value <= high]


def _texts(values: Sequence[float], unit: str, log: bool) -> list[str]:
    """Formats the values with the fewest digits that distinguish them and are exact."""
    size = max((abs(value) for value in values), default=0.0)
    sizes = values if log else [size] * len(values)
    exact = [_number(_tick(value, unit, 15, size)) for value, size in zip(values, sizes, strict=True)]
    texts: list[str] = []
    for digits in range(2, 13):
        texts = [_tick(value, unit, digits, size) for value, size in zip(values, sizes, strict=True)]
        # Fewer digits may distinguish ticks but be wrong: 0.13x for 0.125x.
        is_right = all(map(_is_close, map(_number, texts), exact))
        if is_right and len(set(texts)) == len(texts):
            break
    return texts


def _is_close(number: float, exact: float) -> bool:
    return math.isclose(number, exact, rel_tol=1e-6)


def _number(text: str) -> float:
    match = re.match(r"-?[\d.]+(?:e[+-]?\d+)?", text)
    if match:
        return float(match.group())
    return 0.0


def _tick(value: float, unit: str, digits: int, size: float) -> str:
    if unit in ("x", "%"):
        return _plain(units.significant(value, digits)) + unit
    if size and (unit == units.RATIO or (not unit and not _EXPONENT_BELOW <= abs(size) < 1e18)):
        if value:
            return _plain(f"{value:.{digits - 1}e}")
        return "0"
    # The ticks of a linear axis share a unit: 0.5, 1 and 1.5 ms, not 500 us and 1 ms.
    scales = units.scales_of("" if unit == units.RATIO else unit)
    scale, name = next((scale for scale in scales if abs(size) >= scale[0] * (1 - _ALIKE)), scales[-1])
    return f"{_plain(units.significant(value / scale, digits))} {name}".rstrip()


def _plain(number: str) -> str:
    """Removes trailing zeros: '2.50' -> '2.5', '1.00e-07' -> '1e-07'."""
    number = re.sub(r"(\.\d*?)0+(?=\D|$)", r"\1", number)
    return re.sub(r"\.(?=\D|$)", "", number)


BARS = 25
ROWS = 25
PLACES = 200
SERIES = 8
LABELS = 12
POINTS = 400
# The maximum number of marks of lines that can be hovered and tabbed to.
POINTED = 120

# Beyond these, differences and steps between ticks overflow.
_SMALLEST = 1e-300
_LARGEST = 1e300


def drawable(value: float | None, log: bool = False) -> bool:
    """Whether a value has a place on an axis: finite, not absurd, and above zero if the axis is logarithmic."""
    if value is None or not math.isfinite(value) or abs(value) > _LARGEST:
        return False
    return value >= _SMALLEST or not log


ELLIPSIS = "\u2026"

# Widths in units of the font size; other letters are as wide as a digit.
_WIDTHS = {
    **dict.fromkeys("ijl'", 0.3),
    **dict.fromkeys(" .,:;/\\|IJ", 0.34),
    **dict.fromkeys("ft()[]r-!", 0.41),
    **dict.fromkeys('"`*?_', 0.53),
    **dict.fromkeys("cszLF", 0.58),
    **dict.fromkeys("ABCKPRVXYZ", 0.7),
    **dict.fromkeys("DGHNOQU&", 0.79),
    **dict.fromkeys("w=+<>#~^\u00d7\u00b1", 0.84),
    **dict.fromkeys("mMW%@\u2026\u2014", 1.0),
}
# All digits have the same width; most letters are close to that.
_DIGIT = 0.64
# Letters outside of ASCII, and those of East Asian scripts.
_OTHER = 0.75
_WIDE = 1.3
# Bold letters are wider by this factor.
_BOLD = 1.21
# Control characters, halves of surrogate pairs and non-characters are forbidden in XML and HTML, even escaped. Marks
# that reverse the order of letters would make a name read as another.
FORBIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_SPACES = re.compile(r"\s+")


def width(text: str, size: float, bold: bool = False) -> float:
    wide = 0.0
    for letter in text:
        if letter.isascii() or letter in _WIDTHS:
            wide += _WIDTHS.get(letter, _DIGIT)
        elif not (unicodedata.combining(letter) or unicodedata.category(letter) in ("Cf", "Mn", "Me")):
            wide += _WIDE if unicodedata.east_asian_width(letter) in "WF" else _OTHER
    return wide * size * (_BOLD if bold else 1.0)


def cut_to_room(text: str, room: float, size: float, bold: bool = False) -> str:
    """Returns one line of at most `room` pixels, shortened in the middle, because ends distinguish names."""
    text = _SPACES.sub(" ", text).strip()
    if width(text, size, bold) <= room + 0.01:
        return text
    room = max(0.0, room - width(ELLIPSIS, size, bold))
    num_last = _fitting(text[::-1], room / 2, size, bold)
    # Both ends are kept: the first letters name the suite, the last ones the size.
    end = text[len(text) - num_last :]
    num_first = _fitting(text, room - width(end, size, bold), size, bold)
    return text[:num_first].rstrip() + ELLIPSIS + end.lstrip()


def _fitting(text: str, room: float, size: float, bold: bool) -> int:
    widths = (width(letter, size, bold) for letter in text)
    return sum(end <= room for end in accumulate(widths))


def escape(text: str) -> str:
    """Escapes a text for XML and HTML, between tags and in quotes; line ends survive in an attribute."""
    # XML forbids these even as character references: a parser would reject the whole drawing.
    clean = FORBIDDEN.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))
    return html.escape(clean, quote=True).replace("\n", "&#10;")


def ends(mark: Mark, log: bool = False) -> list[float]:
    return _drawable_ends((mark.low, mark.high), log)


def x_ends(point: ChartPoint) -> list[float]:
    return _drawable_ends((point.x_low, point.x_high), False)


def _drawable_ends(bounds: Sequence[float | None], log: bool) -> list[float]:
    """Returns both bounds, the lower first; nothing if either cannot be drawn."""
    ends = [value for value in bounds if value is not None and drawable(value, log)]
    if len(ends) == 2:
        return sorted(ends)
    return []


def mark_hint(mark: Mark, axis: ChartAxis, *names: str) -> str:
    """Returns 'name, label: 0.512x [0.508x, 0.515x]', followed by the mark's hint on another line."""
    text = write_value(mark.value, axis)
    if interval := ends(mark):
        text += f" [{', '.join(write_value(end, axis) for end in interval)}]"
    return make_hint(", ".join(dict.fromkeys(filter(None, (*names, mark.label)))), text, mark.hint)


def make_hint(name: str, value: str, words: str = "") -> str:
    """Returns the description of a mark: a line for screen readers, then what hovering shows as well."""
    line = f"{name}: {value}" if name else value
    return line if words in ("", line) else f"{line}\n{words}"
