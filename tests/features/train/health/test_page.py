"""docs/health.md says of every rule what the class does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fp8bench.features.train.health.health import RULES
from fp8bench.features.train.health.steps import HealthRule
from tests.counts import for_each

PAGE = Path(__file__).resolve().parents[4] / "docs" / "health.md"
ROWS = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
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


def test_every_rule_has_a_row_with_its_remedies() -> None:
    wanted = [(f"`{rule.name}`", "; ".join(remedy.value for remedy in rule.remedies)) for rule in RULES]
    assert [(row[0], row[-1]) for row in ROWS] == wanted
    assert all(len(row) == 5 and all(row) for row in ROWS)


@for_each("rule", RULES, ids=lambda rule: rule.name)
def test_the_row_has_the_figures_by_which_the_rule_judges(rule: type[HealthRule[Any]]) -> None:
    """As numbers, or as shares; counts of what was before are told with or without the line that is judged."""
    _, window, threshold, _, _ = ROWS[RULES.index(rule)]
    told = {float(number) for number in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?", f"{window} {threshold}")}
    missing = {
        name: value for name, value in figures_of(rule).items()
        if not {value, round(100 * value, 6), *((value + 1, value - 1) if name in COUNTS else ())} & told
    }  # fmt: skip
    assert not missing
