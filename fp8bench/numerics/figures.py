"""The figures of a rounded tensor as a suite gives them: by names that say their unit, all of them finite.

A scale that comes from earlier steps has figures of its own: how it follows the tensor's largest magnitude.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fp8bench.formats.grids import Format
from fp8bench.numerics.tensor_error import Spread, TensorError
from fp8bench.units import EXACT_DB


@dataclass(frozen=True)
class ScaleCourse:
    """Octaves, step by step. A drift or lag that no number can give (a scale or an amax of 0) is left out.

    drift_t = |log2(s_t / s_(t-1))|: how far the scale moved. lag_t = log2(amax_t s_t / largest): above 0 the step's
    largest values saturate, below 0 that much of the format's range lies idle.
    """

    drift: tuple[float, ...]
    lag: tuple[float, ...]


def scale_course(scales: Sequence[float], amaxes: Sequence[float], fmt: Format) -> ScaleCourse:
    """The course of the scales s_t (an element is s_t times its value) and of the amaxes of the same steps."""
    if len(scales) != len(amaxes):
        raise ValueError(f"{len(scales)} scales cannot be those of {len(amaxes)} steps")
    drift = [_octaves(now, before) for before, now in itertools.pairwise(scales)]
    lag = [_octaves(amax * scale, fmt.largest) for scale, amax in zip(scales, amaxes, strict=True)]
    return ScaleCourse(
        tuple(abs(one) for one in drift if one is not None), tuple(one for one in lag if one is not None)
    )


def _octaves(above: float, below: float) -> float | None:
    ratio = above / below if below else math.inf
    return math.log2(ratio) if 0 < ratio < math.inf else None


def figures(found: TensorError, course: ScaleCourse | None = None) -> dict[str, float]:
    """By name; docs/numerics.md has the definitions. What a tensor does not have is left out.

    An SQNR is told as EXACT_DB at most: that is what one without any error is shown as. `course` is that of the scale,
    where it comes from earlier steps.
    """
    return {name: value for name, value in _figures(found, course) if value is not None}


def _figures(found: TensorError, course: ScaleCourse | None) -> Iterator[tuple[str, float | None]]:
    yield "sqnr_db", _capped(found.sqnr_db)
    yield from _spread("row", found.rows)
    yield from _spread("block", found.blocks)
    yield "relative_error", found.relative
    yield "max_ulp", found.max_ulp
    # A cosine next to 1 would lose its digits where it is shown; rounding may put it above.
    yield "cosine_loss", None if found.cosine is None else max(0.0, 1 - found.cosine)
    yield "slope", found.slope
    yield "underflow_percent", found.underflow_percent
    yield "underflow_nonzero_percent", found.underflow_nonzero_percent
    yield "saturation_percent", found.saturation_percent
    yield "subnormal_percent", found.subnormal_percent
    yield "not_finite_percent", found.not_finite_percent
    yield "utilisation_percent", None if found.utilisation is None else 100 * found.utilisation
    yield "dynamic_range_octaves", found.dynamic_range_octaves
    if course is not None:
        yield "scale_drift_octaves", max(course.drift, default=0.0)
        # That of the step that came nearest to overflow, or overflowed most.
        yield "scale_lag_octaves", max(course.lag, default=0.0)


def _spread(part: str, found: Spread | None) -> Iterator[tuple[str, float | None]]:
    yield f"sqnr_{part}_median_db", _capped(found.median_db) if found else None
    yield f"sqnr_{part}_p1_db", _capped(found.p1_db) if found else None


def _capped(decibels: float | None) -> float | None:
    return None if decibels is None else min(decibels, EXACT_DB)
