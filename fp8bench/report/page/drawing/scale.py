"""From values to places on the sheet, and the ticks a person would write."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fp8bench import units

# Values closer than this, relative to their size, are drawn as equal: ticks between them would read alike.
_ALIKE = 1e-9
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_STRIDES = (1, 2, 3, 5, 10, 20, 25, 50, 100, 200, 500, 1000, 2000, 5000)
# Ratios that differ by less than this are not made to look as if they differed by much.
_LEAST_RATIO = 1.1
# From so many octaves on, powers of ten read better than powers of two.
_MANY_OCTAVES = 14
# Numbers without a unit that are smaller than this are errors, and read better as 8.0e-4.
_EXPONENT_BELOW = 0.01
# Units that the ticks of a linear axis have in common: 0.5, 1 and 1.5 ms, not 500 us and 1 ms.
_PREFIXES = {
    "s": ((1.0, " s"), (1e-3, " ms"), (1e-6, " us"), (1e-9, " ns")),
    "B": ((2.0**40, " TiB"), (2.0**30, " GiB"), (2.0**20, " MiB"), (2.0**10, " KiB"), (1.0, " B")),
    "J": ((1e6, " MJ"), (1e3, " kJ"), (1.0, " J"), (1e-3, " mJ"), (1e-6, " uJ"), (1e-9, " nJ")),
    "": ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k"), (1.0, " ")),
}


@dataclass(frozen=True)
class Scale:
    """`low` stands at `start` and `high` at `end`, in pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False
    unit: str = ""

    def at(self, value: float) -> float:
        """Where a value stands; one beyond an end stands at the end."""
        value = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(value / self.low) if value / self.low < math.inf else math.log(value) - math.log(self.low)
            share /= math.log(self.high) - math.log(self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        values = _log_ticks(self.low, self.high, most, self.unit) if self.log else []
        if len(values) < 2:
            values = _linear_ticks(self.low, self.high, most, self.unit)
        return list(zip(values, _texts(values, self.unit, self.log), strict=True))


def fitted(
    values: Iterable[float], start: float, end: float, log: bool = False, unit: str = "", pad: float = 0.0
) -> Scale:
    """A scale with room for these values; `pad` is what is added on either side, as a share of the whole."""
    found = sorted(values)
    low, high = (found[0], found[-1]) if found else (1.0, 1.0)
    if log:
        middle, half = (math.log(high) + math.log(low)) / 2, (math.log(high) - math.log(low)) / 2
        half = max(half, math.log(_LEAST_RATIO) if unit == "x" else 1e-6) * (1 + 2 * pad)
        low, high = _bounded(middle - half), _bounded(middle + half)
    elif high - low <= max(_ALIKE * (size := max(abs(low), abs(high))), 1e-290):
        low, high = (low - size / 10, high + size / 10) if size > 1e-289 else (0.0, 1.0)
    else:
        low, high = low - pad * (high - low), high + pad * (high - low)
    return Scale(low, high, start, end, log, unit)


def _bounded(logarithm: float) -> float:
    return math.exp(min(max(logarithm, -700.0), 700.0))


def shown(value: float, unit: str) -> str:
    if unit == "%":
        return _plain(units.significant(value)) + "%"
    if unit:
        return units.shown(value, unit)
    if value and abs(value) < _EXPONENT_BELOW:
        return _short_exponent(units.relative_error(value))
    return units.count(value) if abs(value) < 1e18 else _plain(units.significant(value))


def _linear_ticks(low: float, high: float, most: int, unit: str) -> list[float]:
    rough = (high - low) / max(1, most)
    if unit == "B" and rough >= 1:
        step = 2.0 ** math.ceil(math.log2(rough))
    else:
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in _STEPS if factor * power >= rough * (1 - _ALIKE))
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    return [number * step for number in range(first, last + 1)]


def _log_ticks(low: float, high: float, most: int, unit: str) -> list[float]:
    """Powers of two for ratios and sizes, 1-2-5 or powers of ten for others; none where that makes too few."""
    first, last = math.log10(low), math.log10(high)
    octaves = (last - first) / math.log10(2)
    if unit == "x" and octaves <= 3.2:
        return _few_ratios(low, high) if octaves >= 1.3 else []
    if unit == "B" or (unit == "x" and octaves < _MANY_OCTAVES):
        return _powers(2.0, low, high, most) if octaves >= 1.6 else []
    if last - first < 1:
        return []
    fine = [digit * 10.0**power for power in range(math.floor(first), math.ceil(last)) for digit in (1, 2, 5)]
    fine = [value for value in fine if low * (1 - _ALIKE) <= value <= high * (1 + _ALIKE)]
    return fine if len(fine) <= most else _powers(10.0, low, high, most)


def _few_ratios(low: float, high: float) -> list[float]:
    """Powers of two, and from 0.75 up what lies between them."""
    first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
    values = [factor * 2.0**power for power in range(first, last + 1) for factor in (1.0, 1.5)]
    return [value for value in values if low <= value <= high and (value >= 0.75 or math.log2(value).is_integer())]


def _powers(base: float, low: float, high: float, most: int) -> list[float]:
    """Powers of a base at whole strides, 1 among them where it is on the axis."""
    first, last = math.log(low) / math.log(base), math.log(high) / math.log(base)
    rough = (last - first) / max(1, most)
    stride = next(one for one in _STRIDES if one >= rough)
    numbers = range(math.ceil(first / stride - 1e-9), math.floor(last / stride + 1e-9) + 1)
    return [base ** (number * stride) for number in numbers]


def _texts(values: Sequence[float], unit: str, log: bool) -> list[str]:
    size = max((abs(value) for value in values), default=0.0)
    texts: list[str] = []
    exact = [_number(_tick(value, unit, 15, value if log else size)) for value in values]
    for digits in range(2, 13):
        texts = [_tick(value, unit, digits, value if log else size) for value in values]
        # Fewer digits may tell ticks apart and still be wrong: 0.13x for 0.125x.
        right = all(
            math.isclose(_number(text), number, rel_tol=1e-6) for text, number in zip(texts, exact, strict=True)
        )
        if right and len(set(texts)) == len(texts):
            break
    return texts


def _number(text: str) -> float:
    found = re.match(r"-?[\d.]+(?:e[+-]?\d+)?", text)
    return float(found.group()) if found else 0.0


def _tick(value: float, unit: str, digits: int, size: float) -> str:
    if unit in ("x", "%"):
        return _plain(units.significant(value, digits)) + unit
    if size and not unit and not _EXPONENT_BELOW <= abs(size) < 1e18:
        return _plain(f"{value:.{digits - 1}e}") if value else "0"
    prefixes = _PREFIXES[unit]
    scale, name = next((prefix for prefix in prefixes if abs(size) >= prefix[0] * (1 - _ALIKE)), prefixes[-1])
    return _plain(units.significant(value / scale, digits)) + name.rstrip()


def _plain(number: str) -> str:
    """Without zeros that say nothing: '2.50' -> '2.5', '1.00e-07' -> '1e-7'."""
    number = re.sub(r"(\.\d*?)0+(?=\D|$)", r"\1", number)
    number = re.sub(r"\.(?=\D|$)", "", number)
    return _short_exponent(number)


def _short_exponent(number: str) -> str:
    """'1.2e-03' -> '1.2e-3'."""
    return re.sub(r"e([+-])0*(\d)", lambda found: f"e{found[1].strip('+')}{found[2]}", number)
