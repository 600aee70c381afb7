"""One side of a comparison: runs, what each of them saw of every case, and what they were measured under.

Where that differs between sides, something else than the code may be why a number changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fp8bench.model import Case, Finding, Record, Run, Scalar, Status
from fp8bench.model.run import SWITCH, SWITCHES_SET

# What changes from minute to minute, is what is being compared, or is said by another fact (asv_python).
_PASSING = frozenset({"load_1min", "commit", "commit_date", "commit_unknown", "dirty", "interpreter", SWITCHES_SET})
# Of runs from before every switch was recorded. Of what one side alone has recorded nobody can say that it differs.
_OLDER = frozenset({
    "torch_threads", "torch_interop_threads", "float32_matmul_precision", "deterministic",
    "fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction",
})  # fmt: skip
# Which machine it is, for the series of a history as well: its entry in ~/.asv-machine.json, else the host's name.
_MACHINE = "asv_machine"
# Times on different ones of these are times of different things.
_HARDWARE = frozenset({_MACHINE, "asv_cpu", "asv_arch", "asv_num_cpu", "cpu_count", "cpu_affinity"})
_ASKED = ("seed", "quick", "rounds", "budget", "isolation", "data")

Seen = tuple[Run, Mapping[str, Finding]]


@dataclass(frozen=True)
class Sighting:
    """What one run saw of one case."""

    run: Run
    record: Record
    finding: Finding | None
    reference: str = ""


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
        return any(one.record.status is Status.OK for seen in self.sightings.values() for one in seen)


def side_of(name: str, seen: Sequence[Seen]) -> Side:
    ordered = sorted(seen, key=lambda pair: pair[0].started)
    sightings: dict[str, list[Sighting]] = {}
    for run, findings in ordered:
        leads = {one.case.setting: one.case.mode for one in run.records if one.is_reference}
        for record in run.records:
            lead = leads.get(record.case.setting, "")
            sighting = Sighting(run, record, findings.get(record.case.id), lead)
            sightings.setdefault(record.case.id, []).append(sighting)
    return Side(name, tuple(run for run, _ in ordered), {key: tuple(value) for key, value in sightings.items()})


@dataclass(frozen=True)
class Differing:
    """A fact that is not the same on both sides, in words. `hardware` says that times do not compare for it."""

    name: str
    before: str
    after: str
    hardware: bool = False


def differing(before: Sequence[Run], after: Sequence[Run]) -> tuple[Differing, ...]:
    old, new = _all_facts(before), _all_facts(after)
    names = [name for name in {**old, **new} if old.get(name) != new.get(name) and not _told_once(name, old, new)]
    found = [
        Differing(name, _shown(old.get(name, [])), _shown(new.get(name, [])), _is_hardware(name)) for name in names
    ]
    return tuple(sorted(found, key=lambda one: not one.hardware))


def _told_once(name: str, *sides: Mapping[str, object]) -> bool:
    return (name in _OLDER or name.startswith(SWITCH)) and not all(name in side for side in sides)


Machine = tuple[tuple[str, Scalar | None], ...]


def machine_of(run: Run) -> Machine:
    """What a run was measured on, its name first: runs that differ here are not put together."""
    return tuple(sorted((pair for pair in _facts(run) if _is_hardware(pair[0])), key=lambda pair: pair[0] != _MACHINE))


def machine_words(machines: Iterable[Machine]) -> list[str]:
    """'box' and 'other'; behind a name that several have, what they differ in: 'box (asv_cpu Xeon)'."""
    known = list(dict.fromkeys(machines))
    found = []
    for one in known:
        alike = [other for other in known if other[0] == one[0]]
        own = ", ".join(f"{pair[0]} {pair[1]}" for pair in one if any(pair not in other for other in alike))
        found.append(f"{one[0][1]} ({own})" if own else str(one[0][1]))
    return found


def _is_hardware(name: str) -> bool:
    return name in _HARDWARE or name.startswith("device ")


def _all_facts(runs: Sequence[Run]) -> dict[str, list[Scalar | None]]:
    found: dict[str, dict[Scalar | None, None]] = {}
    for run in runs:
        for name, value in _facts(run):
            found.setdefault(name, {})[value] = None
    return {name: sorted(values, key=str) for name, values in found.items()}


def _facts(run: Run) -> Iterator[tuple[str, Scalar | None]]:
    facts = run.environment.facts
    for name, value in {**facts, _MACHINE: facts.get(_MACHINE) or facts.get("machine")}.items():
        if name not in _PASSING:
            yield name, value
    for name in _ASKED:
        yield f"asked: {name}", getattr(run.request, name)
    for device in run.devices:
        yield (
            f"device {device.key}",
            f"{device.name}, {device.memory_bytes >> 20} MiB" if device.accelerated else device.name,
        )
        if device.accelerated:
            yield f"driver's cuda of {device.key}", device.cuda or device.hip


def _shown(values: Sequence[Scalar | None]) -> str:
    """'2.13.0', 'none', '2.12.0 and 2.13.0'."""
    return " and ".join("none" if value is None else " ".join(str(value).split()) for value in values) or "none"
