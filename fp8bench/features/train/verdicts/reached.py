"""How many steps, tokens and seconds arms take to a loss on held-out text that was named ahead: `--until`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fp8bench.features.train.values import Arm
from fp8bench.features.train.verdicts.curves import Curve, Key, gap_of
from fp8bench.model import Interval


@dataclass(frozen=True)
class ReachedLoss:
    """When an arm came to the loss in a seed: where a straight line between two looks does for the first time.

    None where it did not; `seconds` also of an emulated arm, whose time says nothing.
    """

    seed: int
    steps: float | None
    tokens: float | None
    seconds: float | None


@dataclass(frozen=True)
class ArmReached:
    """An arm in every seed. `times` are its steps as a multiple of the reference's, the mean of their logarithms over
    the `both` seeds in which either came to the loss, with the interval of 95% where these are two or more."""

    arm: str
    seeds: tuple[ReachedLoss, ...]
    both: int = 0
    times: float | None = None
    interval: Interval | None = None

    @property
    def arrived(self) -> int:
        return sum(place.steps is not None for place in self.seeds)


def reached_by(
    arms: Sequence[Arm], reference: str, curves: Mapping[Key, Curve], seeds: Sequence[int], loss: float
) -> tuple[ArmReached, ...]:
    """Of these arms in these seeds; the reference among them has no multiple."""
    found = {
        arm.name: [_in_seed(curves.get((arm.name, seed)), seed, loss, arm.native) for seed in seeds] for arm in arms
    }
    return tuple(_beside(name, own, found[reference] if name != reference else []) for name, own in found.items())


def _in_seed(curve: Curve | None, seed: int, loss: float, native: bool) -> ReachedLoss:
    step = None if curve is None else _first_at(curve.held_out, loss)
    if curve is None or step is None:
        return ReachedLoss(seed, None, None, None)
    timed = [row.seconds for row in curve.rows if row.seconds > 0]
    seconds = step * statistics.median(timed) if timed and native else None
    return ReachedLoss(seed, step, step * curve.rows[0].tokens, seconds)


def _first_at(looks: Mapping[int, float], loss: float) -> float | None:
    before: tuple[int, float] | None = None
    for step, value in sorted(looks.items()):
        if value <= loss:
            if before is None or not math.isfinite(before[1]):
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - value)
        before = step, value
    return None


def _beside(arm: str, own: Sequence[ReachedLoss], reference: Sequence[ReachedLoss]) -> ArmReached:
    logs = [
        math.log(new.steps / old.steps)
        for old, new in zip(reference, own, strict=False) if new.steps and old.steps
    ]  # fmt: skip
    mean = gap_of(logs)
    if mean is None:
        return ArmReached(arm, tuple(own))
    point, shown = math.exp(mean.point), mean.shown
    ends = Interval(point, math.exp(shown.low), math.exp(shown.high), shown.level) if shown else None
    return ArmReached(arm, tuple(own), len(logs), point, ends)
