"""What a rule of the checklist is: a question about a mode in a setting, and how what was measured here answers it.

A `yes` always speaks for the lower precision. No rule has a figure of another machine in it: what was not measured here
is said to be so, with the command that would measure it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fp8bench import units
from fp8bench.features.advise.basis import Basis, Beside, Trained
from fp8bench.features.advise.values import Answer, Ground, Met
from fp8bench.features.train.verdicts.curves import Curve, Key, curves_of
from fp8bench.features.train.verdicts.judging import Gap, gap_of
from fp8bench.model import Interval


@dataclass(frozen=True)
class Told:
    """What was found out: whether the question is met, the figure that decides it, and what it rests on."""

    met: Met
    figure: str
    grounds: tuple[Ground, ...] = ()


# What a rule finds out: what it is Told, or why that was not measured here; None where the question makes no sense.
Asked = Callable[[Beside, Basis], Told | str | None]


@dataclass(frozen=True)
class Rule:
    """One row of the checklist.

    `measure` is the command that would answer it where nothing does ({again} is what measured the case): where
    a precision is emulated none does, of a question that is `of_speed` or what a step takes. `why` says what it is for.
    """

    name: str
    question: str
    ask: Asked
    measure: str
    why: str
    of_speed: bool = True

    def answer(self, one: Beside, basis: Basis) -> Answer | None:
        """What it says of a case; None where the question makes no sense there."""
        told = self.ask(one, basis)
        case = one.record.case
        if told is None:
            return None
        if isinstance(told, Told):
            return Answer(self.name, self.question, case.setting, case.mode, told.met, told.figure, told.grounds)
        how = self.measure.format(**_words(one))
        how = "" if self.of_speed and one.emulated else how
        return Answer(self.name, self.question, case.setting, case.mode, Met.UNKNOWN, told, measure=how)


# What low precision is held against, and what that itself is.
_WIDE = frozenset({"bf16", "fp16", "tf32"})


def _words(one: Beside) -> dict[str, str]:
    """What measured a case, and how more is asked for. A profile has options where a suite has axes."""
    case = one.record.case
    params = dict(case.params)
    reference = one.lead.case.mode if one.lead is not None else "bf16"
    words = {"mode": case.mode, "make": "MODULE:make", "high": reference}
    if "make" not in params:
        again = f"fp8bench suite {case.workload} --dtypes {reference},{case.mode}"
        return {**words, "again": again, "compiled": "--set compile=no,yes", "larger": "--set batch=1,4,16",
                "study": f"fp8bench sensitivity --dtype {case.mode} --reference {reference}"}  # fmt: skip
    forward = " --forward" if params.get("pass") == "forward" else ""
    again = f"fp8bench profile {params['make']}{forward} --dtypes {case.mode}"
    words |= {"make": str(params["make"]), "high": "fp32" if case.precision in _WIDE else "bf16"}
    return {**words, "again": again, "compiled": "--compile", "larger": "with a function that gives a larger batch",
            "study": f"fp8bench sensitivity {params['make']} --dtype {case.mode}"}  # fmt: skip


def met_above(gain: Interval, least: float) -> Met:
    """Whether all of an interval lies at or above a bound, below it, or on both sides."""
    return Met.YES if gain.low >= least else Met.NO if gain.high < least else Met.UNCLEAR


def amdahl(share: float, ratio: float) -> float:
    """Amdahl's law: the step's speed-up where a share of it takes `ratio` of its time."""
    left = 1 - share + share * ratio
    return 1 / left if left > 0 else math.inf


def mapped(one: Interval, by: Callable[[float], float]) -> Interval:
    """What an interval becomes by a function that only rises."""
    return Interval(by(one.point), by(one.low), by(one.high), one.level)


def times(gain: Interval) -> str:
    """'1.62x [1.60, 1.64]'; one number where that is all there is."""
    low, high = units.significant(gain.low), units.significant(gain.high)
    return units.speed_up(gain.point) + (f" [{low}, {high}]" if low != high else "")


def part(share: Interval) -> str:
    """'54% [52%, 55%]'."""
    low, high = units.percent(share.low, 0), units.percent(share.high, 0)
    middle = units.percent(share.point, 0)
    return middle if low == high else f"{middle} [{low}, {high}]"


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
