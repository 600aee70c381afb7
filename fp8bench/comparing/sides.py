"""One side of a comparison: runs, and what each of them saw of every case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fp8bench.model import Case, Finding, Record, Run, Status

Seen = tuple[Run, Mapping[str, Finding]]


@dataclass(frozen=True)
class Sighting:
    """What one run saw of one case."""

    run: Run
    record: Record
    finding: Finding | None
    reference: str = ""

    @property
    def version(self) -> str:
        return self.record.case.version


@dataclass(frozen=True)
class Side:
    """Runs that count as one, and what they saw by case id; the newest sighting of a case stands last."""

    name: str
    runs: tuple[Run, ...]
    sightings: Mapping[str, tuple[Sighting, ...]] = field(default_factory=dict)

    @property
    def cases(self) -> dict[str, Case]:
        """The cases by id, each as its newest run has it."""
        return {name: seen[-1].record.case for name, seen in self.sightings.items()}

    @property
    def measured(self) -> bool:
        """Whether any case came to a number."""
        return any(one.record.status is Status.OK for seen in self.sightings.values() for one in seen)


def side_of(name: str, seen: Sequence[Seen]) -> Side:
    """The side that some runs make, with what their samples say."""
    ordered = sorted(seen, key=lambda pair: pair[0].started)
    sightings: dict[str, list[Sighting]] = {}
    for run, findings in ordered:
        leads = {one.case.setting: one.case.mode for one in run.records if one.is_reference}
        for record in run.records:
            lead = leads.get(record.case.setting, "")
            sighting = Sighting(run, record, findings.get(record.case.id), lead)
            sightings.setdefault(record.case.id, []).append(sighting)
    return Side(name, tuple(run for run, _ in ordered), {key: tuple(value) for key, value in sightings.items()})
