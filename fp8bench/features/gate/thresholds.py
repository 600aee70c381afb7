"""How much worse a figure must be to matter: by a share, and by an amount.

Both must be exceeded: a figure of microseconds may double without harm, and an error of 1e-7 varies by half. A metric's
spec has defaults; a file of rules may override them for suites, cases and figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from fp8bench.errors import UsageError
from fp8bench.model import Comparison
from fp8bench.model.specs import spec_of


@dataclass(frozen=True)
class Threshold:
    """A figure is worse if its ratio exceeds 1 + `relative` and its difference exceeds `smallest`, in the figure's
    unit."""

    relative: float
    smallest: float
    ignored: bool = False


@dataclass(frozen=True)
class ThresholdRule:
    """One line of a file: the figures that it applies to, by patterns with * and ?, and their thresholds. None keeps
    the default. `place` is its file and line."""

    case: str
    metric: str
    relative: float | None = None
    smallest: float | None = None
    unit: str = ""
    ignored: bool = False
    place: str = ""

    def fits(self, figure: Comparison) -> bool:
        return (_fits(self.case, figure.suite) or _fits(self.case, figure.case)) and _fits(self.metric, figure.metric)


Rules = tuple[ThresholdRule, ...]


def threshold_of(figure: Comparison, rules: Rules = ()) -> Threshold:
    """Returns the threshold of the first rule that matches the figure; fields that it omits come from the spec."""
    relative, smallest = spec_of(figure.metric).threshold
    rule = ruled_by(figure, rules)
    if rule is None:
        return Threshold(relative, smallest)
    # A number in a different unit would silently be off by powers of ten.
    if rule.unit and rule.unit != figure.unit and rule.smallest is not None:
        raise UsageError(
            f"{rule.place}: smallest is in {rule.unit}, and {figure.metric} of {figure.case} is in "
            f"{figure.unit or 'no unit'}. Give a number in its unit, or name other figures."
        )
    return Threshold(
        relative if rule.relative is None else rule.relative,
        smallest if rule.smallest is None else rule.smallest,
        rule.ignored,
    )


def ruled_by(figure: Comparison, rules: Rules) -> ThresholdRule | None:
    return next((rule for rule in rules if rule.fits(figure)), None)


def check_rules(rules: Rules, comparisons: tuple[Comparison, ...], file: str) -> list[str]:
    idle = [rule for rule in rules if not any(map(rule.fits, comparisons))]
    # One unused rule may be for another suite; a file of them is a mistake.
    if rules and comparisons and len(idle) == len(rules):
        some = comparisons[0]
        raise UsageError(
            f"{file}: none of its rules fits any of the {len(comparisons)} figures, so that it would change nothing. "
            f"A pattern is a suite's name or one of case ids, with * and ?; a case is {some.case}, its suite "
            f"{some.suite}, a figure {some.metric}."
        )
    return [f"{rule.place}: {rule.case!r} {rule.metric!r} fits no figure" for rule in idle]


def _fits(pattern: str, name: str) -> bool:
    """Matches with brackets escaped: case ids have them, and patterns would read them as a class of letters."""
    return fnmatchcase(name, pattern.replace("[", "[[]"))
