"""The figures of a rounded tensor as a suite gives them: by names that say their unit, all of them finite."""

from __future__ import annotations

from collections.abc import Iterator

from fp8bench.numerics.scale_course import ScaleCourse
from fp8bench.numerics.tensor_error import Spread, TensorError
from fp8bench.units import EXACT_DB


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
        yield "scale_drift_octaves", course.most_drift
        yield "scale_lag_octaves", course.most_lag


def _spread(part: str, found: Spread | None) -> Iterator[tuple[str, float | None]]:
    yield f"sqnr_{part}_median_db", _capped(found.median_db) if found else None
    yield f"sqnr_{part}_p1_db", _capped(found.p1_db) if found else None


def _capped(decibels: float | None) -> float | None:
    return None if decibels is None else min(decibels, EXACT_DB)
