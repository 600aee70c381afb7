"""What a person at a terminal sees while a duel goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TextIO

from fp8bench.model import Case, Plan, Record
from fp8bench.report.live_line import LiveLine
from fp8bench.units import clock

_LEAST_SECONDS = 5.0


class DuelProgress:
    """An observer that is told of every sitting of a case too."""

    def __init__(self, stream: TextIO | None, environ: Mapping[str, str]) -> None:
        self._line = LiveLine(stream, environ)
        self._begun = time.monotonic()
        self._words = ""
        self._left = ""

    def starts(self) -> None:
        """Workers are started, which takes a while."""
        words = f"{self._words}{self._left}, " if self._words else ""
        self._line.show(f"{words}starting workers")

    def sits(self, sitting: int, sittings: int, place: int, cases: int) -> None:
        """A case sits, counted from 0."""
        self._words = f"sitting {sitting + 1}/{sittings}, case {place + 1}/{cases}"
        share = (sitting * cases + place) / (sittings * cases)
        spent = time.monotonic() - self._begun
        known = share > 0 and spent > _LEAST_SECONDS
        self._left = f", about {clock(spent * (1 - share) / share)} left" if known else ""
        self._line.show(f"{self._words}{self._left}")

    def planned(self, plan: Plan) -> None:
        return None

    def working(self, case: Case, doing: str, share: float) -> None:
        self._line.show(f"{self._words}{self._left}, {doing} {case.id}")

    def finished(self, record: Record) -> None:
        return None

    def close(self) -> None:
        """Erase the line."""
        self._line.close()
