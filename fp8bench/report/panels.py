"""Which records a reader sees together: a panel is the groups that share one table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import NamedTuple, TypeVar

from fp8bench import units
from fp8bench.analysis.metric import Metric, Reference
from fp8bench.model import (
    UNATTRIBUTED,
    Case,
    DeviceFacts,
    Finding,
    Label,
    Measurement,
    Params,
    Record,
    Run,
)
from fp8bench.model.specs import ENERGY, LOSS_ERROR, STEP, Better, spec_of
from fp8bench.protocols.axes import QUIET

# More places than this are counted in a note.
_MOST_PLACES = 3
K = TypeVar("K")
V = TypeVar("V")
# The error shown first if a workload has several: the most telling.
_MAIN_ERRORS = ("gradient_error", "product_error", "update_error", "output_error")
_ERROR_SUFFIX = "_error"


def together(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Values by key, in the order in which keys are first met."""
    by_key: dict[K, list[V]] = {}
    for key, value in pairs:
        by_key.setdefault(key, []).append(value)
    return by_key


@dataclass(frozen=True)
class Result:
    """A case's record, and what its samples say (None without samples)."""

    record: Record
    finding: Finding | None

    @property
    def mode(self) -> str:
        return self.record.case.mode

    @property
    def best(self) -> float | None:
        return self.finding.best_seconds if self.finding else None

    @property
    def spread(self) -> float | None:
        return self.finding.spread if self.finding else None

    @property
    def labels(self) -> tuple[Label, ...]:
        return self.finding.labels if self.finding else ()

    def reason(self, label: Label) -> str:
        return dict(self.finding.label_reasons).get(label, "") if self.finding else ""


@dataclass(frozen=True)
class ResultGroup:
    """The results of one group, in the order of the plan, and the mode of its reference ('' without one).

    `place` are the parameters that tell it from the others of its panel: 'm=256 n=256'; '' where there is but one.
    `error` is the panel's error that is shown first; '' if it has none.
    """

    results: tuple[Result, ...]
    reference: str
    place: str = ""
    error: str = ""

    @property
    def case(self) -> Case:
        return self.results[0].record.case

    @property
    def lead(self) -> Result | None:
        return next((result for result in self.results if result.mode == self.reference), None)


class _Member(NamedTuple):
    group: ResultGroup
    result: Result


class NamedCase(_Member):
    """A result with its group, its figures, and its name within their panel."""

    @cached_property
    def figures(self) -> Figures:
        return Figures(*self)

    @property
    def suite(self) -> str:
        return self.result.record.case.workload

    @property
    def error(self) -> float | None:
        """Its value of the error that is shown first."""
        return value_of(self.result.record.measurement(self.group.error))

    @property
    def place(self) -> str:
        return self.group.place

    @property
    def name(self) -> str:
        """'m=256 n=256 bf16'; the precision alone if there is one group."""
        return f"{self.group.place} {self.result.mode}".strip()


@dataclass(frozen=True)
class Panel:
    """Neighbouring groups of one workload and device with one reference: they share columns."""

    groups: tuple[ResultGroup, ...]

    @property
    def case(self) -> Case:
        return self.groups[0].case

    @property
    def reference(self) -> str:
        return self.groups[0].reference

    @property
    def error(self) -> str:
        return self.groups[0].error

    @cached_property
    def members(self) -> tuple[NamedCase, ...]:
        return tuple(NamedCase(group, result) for group in self.groups for result in group.results)

    @property
    def results(self) -> tuple[Result, ...]:
        return tuple(result for _, result in self.members)

    def known(self, of: Callable[[Result], V | None]) -> list[tuple[ResultGroup, Result, V]]:
        return [(group, result, value) for group, result in self.members if (value := of(result)) is not None]

    @cached_property
    def shared(self) -> Params:
        return shared_params([group.case.params for group in self.groups])

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        return tuple(
            dict.fromkeys(measurement.metric for result in self.results for measurement in result.record.measurements)
        )


def metrics_within(group: ResultGroup, result: Result) -> Iterator[Metric]:
    from fp8bench.analysis.metrics import metrics_of  # heavy, and the door knows panels

    lead = group.lead
    return metrics_of(result.record, result.finding, Reference(lead.record, lead.labels) if lead is not None else None)


class Figures(dict[str, Metric]):
    """The figures of a case's whole step, those of single ranks left out, by name; missing ones have no value.

    A suite may name a figure of its own like one of ours: a step's energy is the one with a source, and else the first
    counts.
    """

    def __init__(self, group: ResultGroup, result: Result) -> None:
        super().__init__()
        # Rates are unsound if only the suite has seen its work, or if other work was seen.
        unseen = result.record.tape is None and result.record.ceiling is None and Label.FEW_SAMPLES in result.labels
        self._sound = not unseen and not {Label.WORK_MISMATCH, Label.NO_WORK, Label.ABOVE_CEILING} & {*result.labels}
        for metric in metrics_within(group, result):
            of_all = metric.phase == STEP
            if of_all and (metric.name != ENERGY or metric.source):
                self.setdefault(metric.name, metric)

    def __missing__(self, name: str) -> Metric:
        return Metric(spec_of(name))

    @property
    def rate(self) -> Metric:
        """How much is done in a second of the best case, by the first count that its work has.

        Without a value if that is not sound.
        """
        rates = (name for name, metric in self.items() if metric.better is Better.HIGHER and metric.unit.endswith("/s"))
        rate = self[next(rates, "") if self._sound else ""]
        return rate if rate.best is None else replace(rate, value=rate.best)


def panels_of(run: Run, findings: Mapping[str, Finding]) -> tuple[Panel, ...]:
    planned = {group.setting: group.cases[group.reference].case.mode for group in run.plan}
    by_setting = together((record.case.setting, Result(record, findings.get(record.case.id))) for record in run.records)
    groups = []
    for setting, results in by_setting.items():  # the planned reference counts if nothing was measured
        leads = (result.mode for result in results if result.record.is_reference)
        groups.append(ResultGroup(tuple(results), next(leads, planned.get(setting, ""))))
    alike = groupby(groups, key=lambda group: (group.case.workload, group.case.device, group.reference))
    return tuple(Panel(_place_groups(tuple(members))) for _, members in alike)


def _place_groups(groups: Sequence[ResultGroup]) -> tuple[ResultGroup, ...]:
    """Gives groups their places and error; a quiet axis that other groups set is named, too: 'cache=hot'."""
    results = (result for group in groups for result in group.results)
    metrics = dict.fromkeys(measurement.metric for result in results for measurement in result.record.measurements)
    errors = [metric for metric in metrics if metric.endswith(_ERROR_SUFFIX)]
    error = next((metric for metric in (*_MAIN_ERRORS, *errors) if metric in errors), "")
    shared = shared_params([group.case.params for group in groups])
    named = {name for group in groups for name, _ in group.case.params} - {name for name, _ in shared}
    placed = []
    for group in groups:
        own = dict(pair for pair in group.case.params if pair not in shared)
        usual = {name: value for name, value in QUIET.items() if name in named and name not in own}
        words = show_params([*own.items(), *usual.items()]) or ("as usual" if len(groups) > 1 else "")
        placed.append(replace(group, place=words, error=error))
    return tuple(placed)


def shared_params(all_params: Sequence[Params]) -> Params:
    return tuple(pair for pair in all_params[0] if all(pair in params for params in all_params))


def show_params(params: Iterable[tuple[str, object]]) -> str:
    return " ".join(f"{name}={value}" for name, value in params)


def heading(workload: str, shared: Params, device: str, devices: Sequence[DeviceFacts]) -> str:
    """'gemm product=forward on cpu (AMD EPYC, torch 2.13.0)'."""
    facts = next((device_facts for device_facts in devices if device_facts.key == device), None)
    named = f"{device} ({facts.name}, torch {facts.torch})" if facts else device
    return " ".join(part for part in (workload, show_params(shared), "on", named) if part)


def merge_notes(notes: Iterable[tuple[str, str, str]], num_places: int) -> list[str]:
    """One line for each text, with the places it came from.

    A note is (what it is about, the text, the place).
    """
    places = together(((about, text), place) for about, text, place in notes)
    return [
        f"- {about}{_where(where, num_places)}: {text}" if text else f"- {about}{_where(where, num_places)}"
        for (about, text), where in places.items()
    ]


def _where(places: Sequence[str], num_places: int) -> str:
    if num_places == 1:
        return ""
    if len(places) == num_places:
        return f" in all {num_places} groups"
    return f" at {'; '.join(places)}" if len(places) <= _MOST_PLACES else f" in {len(places)} of {num_places} groups"


def value_of(measurement: Measurement | None) -> float | None:
    """The median of a measurement's samples."""
    return statistics.median(measurement.samples) if measurement and measurement.samples else None


def show_value(measurement: Measurement) -> str:
    return spec_of(measurement.metric).shown(value_of(measurement), measurement.unit)


def error_name(measurement: Measurement) -> str:
    """'gradient error (gemm)': its words and phase. A loss of a single batch is marked: it is right by chance now and
    then.
    """
    is_one_draw = measurement.metric == LOSS_ERROR and len(measurement.samples) == 1
    remark = measurement.phase or ("one draw" if is_one_draw else "")
    words = measurement.metric.replace("_", " ")
    return f"{words} ({remark})" if remark else words


def floor_of(results: Iterable[Result]) -> str:
    """The range of the A/A floors of some cases; '' if none was measured."""
    floors = (result.finding.floor for result in results if result.finding and result.finding.floor is not None)
    return units.span(floors, lambda floor: f"+-{units.percent(floor)}")


def phases_of(result: Result) -> tuple[tuple[str, float], ...]:
    """Best-case seconds by phase, with the unattributed rest if it is not given."""
    finding = result.finding
    if finding is None or finding.best_seconds is None:
        return ()
    if any(name == UNATTRIBUTED for name, _ in finding.phases):
        return finding.phases
    rest = finding.best_seconds - sum(seconds for _, seconds in finding.phases)
    return (*finding.phases, (UNATTRIBUTED, max(0.0, rest)))
