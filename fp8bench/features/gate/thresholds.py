"""Decides how much worse a figure must be to matter: by a share, and by an absolute amount.

Share and amount must both be exceeded. A time of microseconds may double without harm, and an error of 1e-7 may vary
by half. Each metric has default thresholds, which a file of rules overrides for suites, cases and figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from fp8bench.errors import UsageError
from fp8bench.model import Comparison
from fp8bench.model.specs import find_metric_spec


@dataclass(frozen=True)
class FigureThreshold:
    """A figure is worse if its ratio exceeds 1 + `relative` and its difference exceeds `smallest`, which is in the
    figure's unit.
    """

    relative: float
    smallest: float
    ignored: bool = False


@dataclass(frozen=True)
class ThresholdRule:
    """One line of a thresholds file: patterns (with * and ?) for the cases and figures to which it applies, and their
    thresholds. A threshold of None keeps the default. `place` names the file.
    """

    case: str
    metric: str
    relative: float | None = None
    smallest: float | None = None
    unit: str = ""
    ignored: bool = False
    place: str = ""

    def matches(self, figure: Comparison) -> bool:
        return (
            _matches_pattern(self.case, figure.suite) or _matches_pattern(self.case, figure.case)
        ) and _matches_pattern(self.metric, figure.metric)


ThresholdRules = tuple[ThresholdRule, ...]


def find_threshold(figure: Comparison, rules: ThresholdRules = ()) -> FigureThreshold:
    """Returns the threshold of the first rule that matches the figure. If the rule omits a field, the default of the
    metric applies.
    """
    default_relative, default_smallest = find_metric_spec(figure.metric).threshold
    rule = find_threshold_rule(figure, rules)
    if rule is None:
        return FigureThreshold(default_relative, default_smallest)
    # Reject a number in a different unit, because it would silently be wrong by powers of ten.
    if rule.unit and rule.unit != figure.unit and rule.smallest is not None:
        raise UsageError(
            f"{rule.place}: smallest is in {rule.unit}, and {figure.metric} of {figure.case} is in "
            f"{figure.unit or 'no unit'}. Give a number in its unit, or name other figures."
        )
    return FigureThreshold(
        default_relative if rule.relative is None else rule.relative,
        default_smallest if rule.smallest is None else rule.smallest,
        rule.ignored,
    )


def find_threshold_rule(figure: Comparison, rules: ThresholdRules) -> ThresholdRule | None:
    return next((rule for rule in rules if rule.matches(figure)), None)


def check_rules(rules: ThresholdRules, comparisons: tuple[Comparison, ...], file: str) -> list[str]:
    unused_rules = [rule for rule in rules if not any(map(rule.matches, comparisons))]
    # A single unused rule may belong to a different suite. If all rules of a file are unused, this is a mistake.
    if rules and comparisons and len(unused_rules) == len(rules):
        example_comparison = comparisons[0]
        raise UsageError(
            f"{file}: no rule in it matches any of the {len(comparisons)} figures. "
            f"Match suites or case ids with * and ?; for example, a case is {example_comparison.case}, its suite "
            f"{example_comparison.suite}, a figure {example_comparison.metric}."
        )
    return [f"{rule.place}: {rule.case!r} {rule.metric!r} matches no figure" for rule in unused_rules]


def _matches_pattern(pattern: str, name: str) -> bool:
    """Returns whether a name matches a pattern with * and ?. Brackets in the pattern stand for themselves, because
    case ids contain brackets.
    """
    return fnmatchcase(name, pattern.replace("[", "[[]"))
