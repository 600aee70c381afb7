"""Finds jumps of magnitudes. Magnitudes are compared in octaves (powers of two)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

from fp8bench.features.train.values import LayerReading

# A jump needs this many earlier values, and is above or below all of them by this factor.
_MIN_EARLIER, _MIN_FACTOR = 4, 4.0


def compute_finite_log2(magnitudes: Iterable[float]) -> list[float]:
    """Returns log2 of each magnitude that is positive and finite."""
    return [math.log2(magnitude) for magnitude in magnitudes if 0 < magnitude < math.inf]


def usable_scale(reading: LayerReading) -> float:
    """Returns a reading's scale; 0 for a tensor of zeros, whose scale is always 1 and has no meaning."""
    return reading.scale if reading.amax else 0.0


def find_jump(value: float, earlier: Sequence[float], limit: float) -> float:
    """Returns how many octaves a value is above the median of earlier values; negative if it is below. Ignores earlier
    values that are 0 or not finite. Returns 0 for less than `limit` octaves, and for a value that is not at least two
    octaves above all earlier values, or below all of them.
    """
    # A jump is above or below all earlier values. Compare with the last one first, because this takes the least time.
    if not earlier or not 0 < value < math.inf or earlier[-1] / _MIN_FACTOR < value < earlier[-1] * _MIN_FACTOR:
        return 0.0
    earlier_octaves = compute_finite_log2(earlier)
    if len(earlier_octaves) < _MIN_EARLIER:
        return 0.0
    octave_distance = math.log2(value) - median(earlier_octaves)
    octaves_beyond_earlier_values = (
        math.log2(value) - max(earlier_octaves) if octave_distance > 0 else min(earlier_octaves) - math.log2(value)
    )
    return (
        octave_distance
        if abs(octave_distance) >= limit and octaves_beyond_earlier_values >= math.log2(_MIN_FACTOR)
        else 0.0
    )
