"""Which phases the charts of a page are made of: the same everywhere, so that a phase has one colour on all of it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from fp8bench.model import UNATTRIBUTED
from fp8bench.report.blocks import Result
from fp8bench.report.naming import phase_order
from fp8bench.report.tables import phases_of


def lasting(result: Result) -> bool:
    """Whether its best case is a length of time."""
    return result.best is not None and 0 < result.best < math.inf


def phase_parts(results: Iterable[Result]) -> list[str]:
    """The phases that any of these results has, in order, and what is unattributed."""
    found = {name for one in results if lasting(one) for name, seconds in phases_of(one) if 0 < seconds < math.inf}
    return sorted(found | {UNATTRIBUTED}, key=phase_order)
