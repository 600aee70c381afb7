"""Student's t distribution: the spread of a mean whose own spread is known from a few runs only."""

from __future__ import annotations

import math
from functools import lru_cache

_TINY = 1e-300
_CLOSE = 1e-15
_MOST_TERMS = 1000


def p_value(statistic: float, freedom: float) -> float:
    """The chance of a value at least so far from 0, on either side, with so many degrees of freedom."""
    if math.isinf(statistic):
        return 0.0
    return _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + statistic * statistic))


@lru_cache(maxsize=256)
def quantile(level: float, freedom: float) -> float:
    """How far from 0 the share `level` of values reaches, on both sides together: 12.7 for 95% and 1 degree."""
    low, high = 0.0, 1.0
    while p_value(high, freedom) > 1 - level:
        high *= 2
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle, freedom) > 1 - level else (low, middle)
    return high


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by its continued fraction where that converges fast."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(front) * _fraction(a, b, x) / a


def _fraction(a: float, b: float, x: float) -> float:
    """Lentz's way through the fraction 1 / (1 + d1 / (1 + d2 / ...))."""
    c, d = 1.0, 1 / _not_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _MOST_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _not_zero(1 + term * d)
            c = _not_zero(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < _CLOSE:
            break
    return value


def _not_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
