"""Maps values to pixels: scales with readable ticks, limits on the number of shapes, and texts with their widths.

Values that are not drawn are in the table below the chart. A reader's browser chooses the font, so text widths are
those of DejaVu Sans, a wide font.
"""

from __future__ import annotations

import html
import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product

from fp8bench import units
from fp8bench.report.elements import ChartAxis, ChartMark, ChartPoint

# Values count as equal if their relative difference is smaller than this, because ticks between them would look the
# same.
_RELATIVE_EQUALITY_TOLERANCE = 1e-9
_TICK_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_TICK_STRIDES = (1, 2, 3, 5, 10, 20, 25, 50, 100, 200, 500, 1000, 2000, 5000)
# An axis of ratios covers at least this range, so that small differences do not look large.
_MIN_RATIO_AXIS_RANGE = 1.1
# A smaller number without a unit is an error metric. It reads better with an exponent, as 8.0e-04.
_MIN_NUMBER_WITHOUT_EXPONENT = 0.01


@dataclass(frozen=True)
class AxisScale:
    """A linear or logarithmic axis that maps the value `low` to the pixel `start`, and `high` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    unit: str = ""

    def to_pixels(self, value: float) -> float:
        value, low, high = min(max(value, self.low), self.high), self.low, self.high
        if self.log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, max_ticks: int) -> list[tuple[float, str]]:
        values = _log_ticks(self.low, self.high, max_ticks, self.unit) if self.log else []
        if len(values) < 2:
            values = _linear_ticks(self.low, self.high, max_ticks, self.unit)
        return list(zip(values, _format_ticks(values, self.unit, self.log), strict=True))


def fit_axis_scale(
    values: Iterable[float], start: float, end: float, log: bool = False, unit: str = "", margin_share: float = 0.0
) -> AxisScale:
    """Returns a scale that includes all values. `margin_share` of the range is added at either end."""
    sorted_values = sorted(values) or [1.0]
    low = sorted_values[0]
    high = sorted_values[-1]
    magnitude = max(abs(low), abs(high))
    if log:
        log_axis_middle = (math.log(high) + math.log(low)) / 2
        half_log_axis_range = (math.log(high) - math.log(low)) / 2
        min_half_log_axis_range = math.log(_MIN_RATIO_AXIS_RANGE) if unit == "x" else 1e-6
        half_log_axis_range = max(half_log_axis_range, min_half_log_axis_range) * (1 + 2 * margin_share)
        low = _exp_without_overflow(log_axis_middle - half_log_axis_range)
        high = _exp_without_overflow(log_axis_middle + half_log_axis_range)
    elif high - low > max(_RELATIVE_EQUALITY_TOLERANCE * magnitude, 1e-290):
        low, high = low - margin_share * (high - low), high + margin_share * (high - low)
    # If all values are nearly equal, widen the range, because ticks need a range above 0.
    elif magnitude > 1e-289:
        low, high = low - magnitude / 10, high + magnitude / 10
    else:
        low, high = 0.0, 1.0
    return AxisScale(low, high, start, end, log, unit)


def _exp_without_overflow(logarithm: float) -> float:
    # math.exp overflows above 709.
    return math.exp(min(max(logarithm, -700.0), 700.0))


def show_axis_value(value: float, axis: ChartAxis) -> str:
    return axis.show(value) if axis.show is not None else show_number(value, axis.unit)


def show_number(value: float, unit: str) -> str:
    if unit == "%":
        return _strip_trailing_zeros(units.format_significant_digits(value)) + "%"
    if unit:
        return units.describe(value, unit)
    if value and abs(value) < _MIN_NUMBER_WITHOUT_EXPONENT:
        return units.relative_error(value)
    if abs(value) < 1e18:
        return units.count(value)
    return _strip_trailing_zeros(units.format_significant_digits(value))


def _linear_ticks(low: float, high: float, max_ticks: int, unit: str) -> list[float]:
    min_tick_step = (high - low) / max(1, max_ticks)
    if unit == "B" and min_tick_step >= 1:
        # Ticks of bytes are powers of two.
        tick_step = 2.0 ** math.ceil(math.log2(min_tick_step))
    else:
        power_of_ten = 10.0 ** math.floor(math.log10(min_tick_step))
        tick_step = next(
            factor * power_of_ten
            for factor in _TICK_STEPS
            if factor * power_of_ten >= min_tick_step * (1 - _RELATIVE_EQUALITY_TOLERANCE)
        )
    # The tolerance keeps a tick at either end in spite of rounding errors.
    first_tick_number = math.ceil(low / tick_step - 1e-6)
    last_tick_number = math.floor(high / tick_step + 1e-6)
    return [multiple * tick_step for multiple in range(first_tick_number, last_tick_number + 1)]


def _log_ticks(low: float, high: float, max_ticks: int, unit: str) -> list[float]:
    """Returns ticks for a logarithmic axis, or none if linear ticks read better.

    Ratios near 1 get powers of two. Other axes get 1, 2 and 5 times powers of ten, or powers of ten alone.
    """
    low_decimal_exponent = math.log10(low)
    high_decimal_exponent = math.log10(high)
    # how many times the value doubles from one end of the axis to the other
    num_value_doublings = (high_decimal_exponent - low_decimal_exponent) / math.log10(2)
    if unit == "x" and num_value_doublings <= 3.2 and low > 0.2:
        return _ratio_ticks(low, high) if num_value_doublings >= 1.3 else []
    # On an axis shorter than a factor of five, linear ticks read better.
    if high_decimal_exponent - low_decimal_exponent < 0.7:
        return []
    decimal_exponents = range(math.floor(low_decimal_exponent), math.ceil(high_decimal_exponent) + 1)
    tick_values = [digit * 10.0**power for power, digit in product(decimal_exponents, (1, 2, 5))]
    tick_values = [
        value
        for value in tick_values
        if low * (1 - _RELATIVE_EQUALITY_TOLERANCE) <= value <= high * (1 + _RELATIVE_EQUALITY_TOLERANCE)
    ]
    if len(tick_values) <= max_ticks:
        return tick_values
    # There are too many ticks, so use every n-th power of ten.
    min_tick_stride = (high_decimal_exponent - low_decimal_exponent) / max(1, max_ticks)
    stride = next(multiple for multiple in _TICK_STRIDES if multiple >= min_tick_stride)
    multiples = range(
        math.ceil(low_decimal_exponent / stride - 1e-9), math.floor(high_decimal_exponent / stride + 1e-9) + 1
    )
    return [10.0 ** (multiple * stride) for multiple in multiples]


def _ratio_ticks(low: float, high: float) -> list[float]:
    """Returns ticks for a logarithmic axis of ratios: the powers of two, and from 0.75 on also 1.5 times the powers of
    two.
    """
    tick_values: list[float] = []
    for power in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1):
        intermediate_tick_value = 1.5 * 2.0**power
        tick_values += [2.0**power, intermediate_tick_value] if intermediate_tick_value >= 0.75 else [2.0**power]
    return [value for value in tick_values if low <= value <= high]


def _format_ticks(values: Sequence[float], unit: str, log: bool) -> list[str]:
    """Formats the values of ticks with as few digits as possible. The texts must still be exact and differ from each
    other.
    """
    magnitudes = values if log else [max(map(abs, values), default=0.0)] * len(values)

    def format_values(digits: int) -> list[str]:
        return [
            _format_tick(value, unit, digits, magnitude) for value, magnitude in zip(values, magnitudes, strict=True)
        ]

    exact_values = list(map(_parse_number, format_values(15)))
    texts: list[str] = []
    for digits in range(2, 13):
        texts = format_values(digits)
        # With fewer digits, ticks may differ from each other but be inexact, as 0.13x for 0.125x.
        text_exactness_flags = map(partial(math.isclose, rel_tol=1e-6), map(_parse_number, texts), exact_values)
        if all(text_exactness_flags) and len(set(texts)) == len(texts):
            break
    return texts


def _parse_number(text: str) -> float:
    match = re.match(r"-?[\d.]+(?:e[+-]?\d+)?", text)
    return float(match.group()) if match else 0.0


def _format_tick(value: float, unit: str, digits: int, magnitude: float) -> str:
    if unit in ("x", "%"):
        return _strip_trailing_zeros(units.format_significant_digits(value, digits)) + unit
    if magnitude and (unit == units.RATIO or (not unit and not _MIN_NUMBER_WITHOUT_EXPONENT <= abs(magnitude) < 1e18)):
        return _strip_trailing_zeros(f"{value:.{digits - 1}e}") if value else "0"
    # All ticks of a linear axis have the same unit: 0.5, 1 and 1.5 ms, not 500 us and 1 ms.
    scales = units.list_unit_scales("" if unit == units.RATIO else unit)
    scale, name = next(
        (scale for scale in scales if abs(magnitude) >= scale[0] * (1 - _RELATIVE_EQUALITY_TOLERANCE)), scales[-1]
    )
    return f"{_strip_trailing_zeros(units.format_significant_digits(value / scale, digits))} {name}".rstrip()


def _strip_trailing_zeros(number_text: str) -> str:
    """Removes trailing zeros: '2.50' becomes '2.5', and '1.00e-07' becomes '1e-07'."""
    number_text = re.sub(r"(\.\d*?)0+(?=\D|$)", r"\1", number_text)
    return re.sub(r"\.(?=\D|$)", "", number_text)


MAX_BARS = 25
MAX_ROWS = 25
MAX_PLACES = 200
MAX_SERIES = 8
MAX_LABELS = 12
MAX_CHART_POINTS = 400
# At most this many marks of a line chart react to hovering and to the tab key.
MAX_HOVERABLE_MARKS = 120

# Values outside these bounds are not drawn, because their differences and the steps between ticks would overflow.
_MIN_DRAWABLE_VALUE = 1e-300
_MAX_DRAWABLE_VALUE = 1e300


def is_drawable(value: float | None, log: bool = False) -> bool:
    """Returns whether an axis can show a value: it is finite, not extreme, and positive if the axis is logarithmic."""
    if value is None or not math.isfinite(value) or abs(value) > _MAX_DRAWABLE_VALUE:
        return False
    return value >= _MIN_DRAWABLE_VALUE or not log


ELLIPSIS = "\u2026"

# Widths of letters in units of the font size. A letter that is not listed is as wide as a digit.
_LETTER_WIDTHS = {
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
# All digits have this width, and most letters are close to it.
_DIGIT_WIDTH = 0.64
# Estimated widths of letters outside of ASCII: of most letters, and of East Asian letters.
_DEFAULT_LETTER_WIDTH = 0.75
_EAST_ASIAN_WIDTH = 1.3
# Bold letters are wider than regular ones by this factor.
_BOLD_WIDTH_FACTOR = 1.21
# XML and HTML forbid control characters, halves of surrogate pairs and non-characters, even escaped. Marks that
# reverse the order of letters would make one name look like another.
FORBIDDEN_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_SPACES_PATTERN = re.compile(r"\s+")


def text_width(text: str, font_size: float, bold: bool = False) -> float:
    width = 0.0
    for letter in text:
        if letter.isascii() or letter in _LETTER_WIDTHS:
            width += _LETTER_WIDTHS.get(letter, _DIGIT_WIDTH)
        elif not (unicodedata.combining(letter) or unicodedata.category(letter) in ("Cf", "Mn", "Me")):
            width += _EAST_ASIAN_WIDTH if unicodedata.east_asian_width(letter) in "WF" else _DEFAULT_LETTER_WIDTH
    return width * font_size * (_BOLD_WIDTH_FACTOR if bold else 1.0)


def cut_to_width(text: str, max_width: float, font_size: float, bold: bool = False) -> str:
    """Returns the text on one line of at most `max_width` pixels. A long text is cut in the middle, because both ends
    matter.
    """
    text = _SPACES_PATTERN.sub(" ", text).strip()
    if text_width(text, font_size, bold) <= max_width + 0.01:
        return text
    max_width = max(0.0, max_width - text_width(ELLIPSIS, font_size, bold))
    end_letter_count = _count_letters_within_width(text[::-1], max_width / 2, font_size, bold)
    # Names often begin with the suite and end with the size, so keep both ends.
    visible_end_text = text[len(text) - end_letter_count :]
    num_kept_first_letters = _count_letters_within_width(
        text, max_width - text_width(visible_end_text, font_size, bold), font_size, bold
    )
    return text[:num_kept_first_letters].rstrip() + ELLIPSIS + visible_end_text.lstrip()


def _count_letters_within_width(text: str, max_width: float, font_size: float, bold: bool) -> int:
    letter_widths = (text_width(letter, font_size, bold) for letter in text)
    return sum(text_end <= max_width for text_end in accumulate(letter_widths))


def escape(text: str) -> str:
    """Escapes a text for XML and HTML, for use between tags and in quoted attributes. Line ends are kept."""
    # XML forbids these characters even as references, and a parser would reject the whole drawing.
    clean_text = FORBIDDEN_CHARACTERS.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))
    return html.escape(clean_text, quote=True).replace("\n", "&#10;")


def interval_ends(mark: ChartMark, log: bool = False) -> list[float]:
    return _sort_drawable_bounds((mark.low, mark.high), log)


def x_bounds(point: ChartPoint) -> list[float]:
    return _sort_drawable_bounds((point.x_low, point.x_high), False)


def _sort_drawable_bounds(bounds: Sequence[float | None], log: bool) -> list[float]:
    """Returns the ends of an interval in ascending order, or [] if an end is missing or cannot be drawn."""
    drawable_bounds = sorted(value for value in bounds if value is not None and is_drawable(value, log))
    return drawable_bounds if len(drawable_bounds) == 2 else []


def make_hover_text(mark: ChartMark, axis: ChartAxis, *names: str) -> str:
    """Returns the text shown when a mark is hovered over. Its first line has the names and the mark's label, value and
    interval, as 'name, label: 0.512x [0.508x, 0.515x]'. Its second line is `mark.hint`.
    """
    text = show_axis_value(mark.value, axis)
    if interval := interval_ends(mark):
        text += f" [{', '.join(show_axis_value(end, axis) for end in interval)}]"
    return make_hint(", ".join(dict.fromkeys(filter(None, (*names, mark.label)))), text, mark.hint)


def make_hint(name: str, value: str, details: str = "") -> str:
    """Returns the hint of a mark. Screen readers read its first line, and hovering shows the details as well."""
    line = f"{name}: {value}" if name else value
    return line if details in ("", line) else f"{line}\n{details}"
