"""When a precision does harm: from which step of a training on, and in which kind of step it gains nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fp8bench.analysis.advice.basis import Trained
from fp8bench.analysis.learning.curves import Curve, Key, curves_of
from fp8bench.analysis.learning.judging import Gap, gap_of

# A training is looked at in so many parts, each long enough to have a mean loss.
PARTS = 10
_LEAST_STEPS = 5 * PARTS


class Harm(NamedTuple):
    """An arm's loss lies surely above its reference's from this share of the steps on; the gap of the last part."""

    begins: float
    gap: Gap
    steps: int


def harm_of(trained: Trained, arm: str) -> Harm | None:
    """None where it does not, or no part before it is without: then no other time to begin is known."""
    training = trained.kept.training
    steps = training.request.steps
    if steps < _LEAST_STEPS:
        return None
    curves = curves_of(trained.kept.lines, steps)
    gaps = [gap_of(found) for part in range(PARTS) if (found := _gaps(curves, trained.found.reference, arm, part))]
    sure = [gap is not None and gap.decides is not None and gap.decides.low > 0 for gap in gaps]
    if len(gaps) < PARTS or not sure[-1]:
        return None
    first = PARTS - 1
    while first and sure[first - 1]:
        first -= 1
    last = gaps[-1]
    return Harm(first / PARTS, last, steps) if first and last is not None else None


def _gaps(curves: Mapping[Key, Curve], reference: str, arm: str, part: int) -> list[float]:
    """Of each seed that has both, the mean loss of one part of the steps over the reference's."""
    pairs = [
        (_mean(own, part), _mean(curves[arm, seed], part))
        for (name, seed), own in curves.items() if name == reference and (arm, seed) in curves
    ]  # fmt: skip
    return [after / before - 1 for before, after in pairs if math.isfinite(after) and before > 0]


def _mean(curve: Curve, part: int) -> float:
    losses: Sequence[float] = curve.losses[curve.steps * part // PARTS : curve.steps * (part + 1) // PARTS]
    return math.fsum(losses) / len(losses) if losses and curve.whole else math.nan
