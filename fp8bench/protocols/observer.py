"""Who is told how a run goes along."""

from __future__ import annotations

from typing import Protocol

from fp8bench.model import Case, Plan, Record


class Observer(Protocol):
    """Told how a run goes along; measuring code reports here and never prints."""

    def planned(self, plan: Plan) -> None:
        """The plan stands."""

    def working(self, case: Case, doing: str, share: float) -> None:
        """A case is being worked on; `share` of its group's time has gone."""

    def finished(self, record: Record) -> None:
        """A record is complete."""


class SilentObserver:
    """An observer that ignores everything."""

    def planned(self, plan: Plan) -> None:
        return None

    def working(self, case: Case, doing: str, share: float) -> None:
        return None

    def finished(self, record: Record) -> None:
        return None
