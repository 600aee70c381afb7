"""What a rule says of itself has the figures by which it judges."""

from __future__ import annotations

import re
from typing import Any

from fp8bench.features.train.health.health import RULES
from fp8bench.features.train.health.steps import HealthRule

# In words, and what nothing that was rounded comes to.
UNSAID = ("falling", "exact")
# Of lines before the one that is judged.
COUNTS = ("keep", "again")


def figures_of(rule: type[HealthRule[Any]]) -> dict[str, float]:
    """The constants by which it judges."""
    own = {
        name: getattr(rule, name)
        for kind in rule.__mro__
        for name in vars(kind)
        if name[0] != "_" and name not in UNSAID
    }
    return {name: value for name, value in own.items() if type(value) in (int, float) and value not in (1, -1)}


def test_words_have_the_figures_by_which_the_rule_judges() -> None:
    """As numbers, or as shares; counts of what was before are told with or without the line that is judged."""
    for rule in RULES:
        assert rule.remedies and rule.because, rule.name
        words = f"{rule.looks_at} {rule.alarms_at}"
        told = {float(number) for number in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?", words)}
        missing = {
            name: value for name, value in figures_of(rule).items()
            if not {value, round(100 * value, 6), *((value + 1, value - 1) if name in COUNTS else ())} & told
        }  # fmt: skip
        assert not missing, rule.name
