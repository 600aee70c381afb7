"""A device that cannot be asked, and why."""

from __future__ import annotations

from fp8bench.samplers import nvml_queries as queries
from fp8bench.samplers.nvml_queries import Query
from fp8bench.samplers.readings import Read, Readings, Unavailable


class AbsentDevice:
    """Answers every question with the same reason."""

    def __init__(self, why: str) -> None:
        self._why = Unavailable(why)

    def facts(self) -> Readings:
        return self._all(queries.FACTS)

    def state(self) -> Readings:
        return self._all(queries.STATE)

    def violations(self) -> Readings:
        return self._all(queries.VIOLATIONS)

    def glance(self) -> Readings:
        return self._all(queries.RESTLESS)

    def restless(self) -> Readings:
        return self._all(queries.RESTLESS)

    def process_memory(self, pid: int | None = None) -> Read:
        return self._why

    def close(self) -> None:
        return None

    def _all(self, wanted: tuple[Query, ...]) -> Readings:
        return {query.name: self._why for query in wanted}
