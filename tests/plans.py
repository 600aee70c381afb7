"""Plans as tests read them."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fp8bench.model.planned import Group, PlannedCase


def cases_of(plan: Iterable[Group]) -> list[PlannedCase]:
    """All planned cases of a plan, group by group."""
    return list(chain.from_iterable(group.cases for group in plan))
