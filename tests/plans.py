"""Plans as tests read them."""

from __future__ import annotations

from collections.abc import Iterable

from fp8bench.model.planned import Group, PlannedCase


def cases_of(plan: Iterable[Group]) -> list[PlannedCase]:
    """All planned cases of a plan, group by group."""
    cases: list[PlannedCase] = []
    for group in plan:
        cases += group.cases
    return cases
