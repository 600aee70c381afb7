"""How a tensor's scale follows its largest magnitude from step to step, where it comes from earlier steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from fp8bench.formats.grids import Format


@dataclass(frozen=True)
class ScaleCourse:
    """Octaves, step by step. A drift or lag that no number can give (a scale or an amax of 0) is left out.

    drift_t = |log2(s_t / s_(t-1))|: how far the scale moved. lag_t = log2(amax_t s_t / largest): above 0 the step's
    largest values saturate, below 0 that much of the format's range lies idle.
    """

    drift: tuple[float, ...]
    lag: tuple[float, ...]

    @property
    def most_drift(self) -> float:
        """0 where there was but one step."""
        return max(self.drift, default=0.0)

    @property
    def most_lag(self) -> float:
        """That of the step that came nearest to overflow, or overflowed most; 0 without steps."""
        return max(self.lag, default=0.0)


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
