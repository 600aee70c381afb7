"""Which records a reader sees together: a panel is the groups that share one table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby
from typing import Generic, NamedTuple, TypeVar

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
    Scalar,
)
from fp8bench.model.specs import ENERGY, LOSS_ERROR, STEP, Better, spec_of
from fp8bench.protocols.axes import QUIET

# More places than this are counted in a note.
_MOST_PLACES = 3
K = TypeVar("K")
V = TypeVar("V")
# The error shown first if a workload has several: the most informative.
_MAIN_ERRORS = ("gradient_error", "product_error", "update_error", "output_error")
_ERROR_SUFFIX = "_error"
# Parameters that are shown without their name, because the value is self-explanatory.
_BY_VALUE = frozenset({"size", "make", "part", "operation", "limit", "collective"})


def together(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Values by key, in the order in which keys are first met."""
    by_key: dict[K, list[V]] = {}
    for key, value in pairs:
        by_key.setdefault(key, []).append(value)
    return by_key


def join_parts(*parts: str, by: str = ", ") -> str:
    """'a, b' of 'a', '' and 'b'."""
    return by.join(filter(None, parts))


@dataclass(frozen=True)
class Result:
    """A case's record, and the finding from its samples (None without samples)."""

    record: Record
    finding: Finding | None

    @property
    def mode(self) -> str:
        return self.record.case.mode

    @property
    def is_ok(self) -> bool:
        return self.record.is_ok

    @property
    def is_reference(self) -> bool:
        return self.record.is_reference

    @property
    def is_emulated(self) -> bool:
        return self.record.support.is_emulated

    @property
    def best(self) -> float | None:
        if self.finding:
            return self.finding.best_seconds
        return None

    @property
    def spread(self) -> float | None:
        if self.finding:
            return self.finding.spread
        return None

    @property
    def labels(self) -> tuple[Label, ...]:
        if self.finding:
            return self.finding.labels
        return ()

    def reason(self, label: Label) -> str:
        if self.finding:
            return dict(self.finding.label_reasons).get(label, "")
        return ""


@dataclass(frozen=True)
class ResultGroup:
    """The results of one group, in the order of the plan, and the mode of its reference ('' without one).

    `place` are the parameters that distinguish it in its panel, as '256 x 256 x 64'; '' for a single group.
    `error` is the metric of the error that is shown first; '' if there is none.
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
        """The result of the reference."""
        return next((result for result in self.results if result.mode == self.reference), None)

    @cached_property
    def members(self) -> tuple[NamedCase, ...]:
        return tuple(NamedCase(result.record, result.finding, self) for result in self.results)


@dataclass(frozen=True)
class NamedCase(Result):
    """A result with its group, its figures, and its name within their panel."""

    group: ResultGroup

    @cached_property
    def figures(self) -> Figures:
        return Figures(self)

    @property
    def lead(self) -> Result | None:
        return self.group.lead

    @property
    def suite(self) -> str:
        return self.record.case.workload

    @property
    def error(self) -> float | None:
        """Its value of the error that is shown first."""
        return value_of(self.record.measurement(self.group.error))

    @property
    def place(self) -> str:
        return self.group.place

    @property
    def name(self) -> str:
        """'256 x 256 x 64 bf16'; the precision alone if there is one group."""
        return f"{self.place} {self.mode}".strip()


class CaseValue(NamedTuple, Generic[V]):
    """A row of a table: a case, and what the table shows of it."""

    case: NamedCase
    value: V


Cases = Sequence[NamedCase]
FindingsById = Mapping[str, Finding]


@dataclass(frozen=True)
class Panel:
    """Neighbouring groups of one workload and device with one reference: they share columns."""

    groups: tuple[ResultGroup, ...]

    @property
    def case(self) -> Case:
        return self.groups[0].case

    @property
    def suite(self) -> str:
        return self.case.workload

    @property
    def device(self) -> str:
        return self.case.device

    @property
    def reference(self) -> str:
        return self.groups[0].reference

    @property
    def error(self) -> str:
        return self.groups[0].error

    @cached_property
    def members(self) -> tuple[NamedCase, ...]:
        return tuple(chain.from_iterable(group.members for group in self.groups))

    @cached_property
    def measurements(self) -> list[Measurement]:
        measurements: list[Measurement] = []
        for case in self.members:
            measurements += case.record.measurements
        return measurements

    def find_values(self, of: Callable[[Result], V | None]) -> list[CaseValue[V]]:
        """Returns the cases that have such a value, with it."""
        return [CaseValue(case, value) for case in self.members if (value := of(case)) is not None]

    @cached_property
    def shared(self) -> Params:
        return shared_params([group.case.params for group in self.groups])

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(measurement.metric for measurement in self.measurements))


def metrics_within(case: NamedCase) -> Iterator[Metric]:
    from fp8bench.analysis.metrics import metrics_of  # slow to import, and every command imports this module

    # Ratios are against the group's reference, which may not have been measured.
    lead = case.lead
    return metrics_of(case.record, case.finding, Reference(lead.record, lead.labels) if lead is not None else None)


class Figures(dict[str, Metric]):
    """The figures of a case's whole step, those of single ranks left out, by name; missing ones have no value.

    A suite's figure may have the name of a built-in one: of energies the one with a source counts, else the first.
    """

    def __init__(self, case: NamedCase) -> None:
        super().__init__()
        # A rate is unsound if the work was only declared and not checked, or if the check found different work.
        unchecked = case.record.tape is None and case.record.ceiling is None and Label.FEW_SAMPLES in case.labels
        self._sound = not unchecked and not {Label.WORK_MISMATCH, Label.NO_WORK, Label.ABOVE_CEILING} & {*case.labels}
        for metric in metrics_within(case):
            if metric.phase == STEP and (metric.name != ENERGY or metric.source):
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
        if rate.best is None:
            return rate
        return replace(rate, value=rate.best)


def panels_of(run: Run, findings: FindingsById) -> tuple[Panel, ...]:
    # 1. Results by setting, each group with its reference: the planned one if nothing was measured.
    planned = {group.setting: group.cases[group.reference].case.mode for group in run.plan}
    by_setting = together((record.case.setting, Result(record, findings.get(record.case.id))) for record in run.records)
    groups = []
    for setting, results in by_setting.items():
        references = (result.mode for result in results if result.record.is_reference)
        groups.append(ResultGroup(tuple(results), next(references, planned.get(setting, ""))))
    # 2. Neighbours that can share a table.
    panels = groupby(groups, key=lambda group: (group.case.workload, group.case.device, group.reference))
    return tuple(Panel(_place_groups(tuple(members))) for _, members in panels)


def _place_groups(groups: Sequence[ResultGroup]) -> tuple[ResultGroup, ...]:
    """Gives groups their places and error; a quiet axis that other groups set is named, too: 'cache hot'."""
    # Places depend on the neighbours: a parameter that all share is in the heading.
    panel = Panel(tuple(groups))
    errors = [metric for metric in panel.metrics if metric.endswith(_ERROR_SUFFIX)]
    error = next((metric for metric in (*_MAIN_ERRORS, *errors) if metric in errors), "")
    all_params = [dict(group.case.params) for group in groups]
    names = set().union(*all_params) - dict(panel.shared).keys()
    placed = []
    for group, params in zip(groups, all_params, strict=True):
        specific = [pair for pair in params.items() if pair not in panel.shared]
        # A quiet axis is only stored where somebody set it: the others have its usual value.
        usual = [pair for pair in QUIET.items() if pair[0] in names and pair[0] not in params]
        words = describe_params([*specific, *usual]) or ("as usual" if len(groups) > 1 else "")
        placed.append(replace(group, place=words, error=error))
    return tuple(placed)


def shared_params(all_params: Sequence[Params]) -> Params:
    shared = all_params[0]
    for params in all_params[1:]:
        shared = tuple(pair for pair in shared if pair in params)
    return shared


def show_params(params: Iterable[tuple[str, object]]) -> str:
    return " ".join(f"{name}={value}" for name, value in params)


def describe_params(params: Iterable[tuple[str, Scalar]], usual: Collection[tuple[str, Scalar]] = ()) -> str:
    """'nano, 2 x 96 tokens', '256 x 256 x 64, cache cold': parameters in words, without those that are as usual."""
    named = {}
    for name, value in params:
        if name in _BY_VALUE or (name, value) not in usual:
            is_path = ":" in str(value)
            named[name] = str(value) if is_path else str(value).replace("_", " ")
    words = [named.pop(name) for name in list(named) if name in _BY_VALUE]
    if {"m", "n", "k"} <= named.keys():
        words.append(" x ".join(named.pop(name) for name in ("m", "n", "k")))
    if {"batch", "sequence"} <= named.keys():
        words.append(f"{named.pop('batch')} x {named.pop('sequence')} tokens")
    for name, value in named.items():
        link = "=" if len(name) == 1 else " "
        label = name.replace("_", " ")
        words.append(label if value == "yes" else f"{label}{link}{value}")
    return ", ".join(words)


def heading(workload: str, shared: Params, device: str, devices: Sequence[DeviceFacts]) -> str:
    """'gemm product=forward on cpu (AMD EPYC, torch 2.13.0)'."""
    place = device
    for facts in devices:
        if facts.key == device:
            place = f"{device} ({facts.name}, torch {facts.torch})"
    return join_parts(workload, show_params(shared), "on", place, by=" ")


def merge_notes(notes: Iterable[tuple[str, str, str]], num_places: int) -> list[str]:
    """One line for each text, with the places it came from.

    A note is (what it is about, the text, the place).
    """
    places_by_note = together(((about, text), place) for about, text, place in notes)
    lines = []
    for (about, text), places in places_by_note.items():
        line = f"- {about}{_describe_places(places, num_places)}"
        lines.append(f"{line}: {text}" if text else line)
    return lines


def _describe_places(places: Sequence[str], num_places: int) -> str:
    if num_places == 1:
        return ""
    if len(places) == num_places:
        return f" in all {num_places} groups"
    if len(places) <= _MOST_PLACES:
        return f" at {'; '.join(places)}"
    return f" in {len(places)} of {num_places} groups"


def value_of(measurement: Measurement | None) -> float | None:
    """The median of a measurement's samples."""
    if measurement and measurement.samples:
        return statistics.median(measurement.samples)
    return None


def show_value(measurement: Measurement) -> str:
    return spec_of(measurement.metric).to_text(value_of(measurement), measurement.unit)


def error_name(measurement: Measurement) -> str:
    """'gradient error (gemm)': its words and phase; a loss of a single batch is marked."""
    # With one batch a loss is right by chance now and then.
    is_one_draw = measurement.metric == LOSS_ERROR and len(measurement.samples) == 1
    remark = measurement.phase or ("one draw" if is_one_draw else "")
    words = measurement.metric.replace("_", " ")
    if remark:
        return f"{words} ({remark})"
    return words


def floor_of(results: Iterable[Result]) -> str:
    """The range of the A/A floors of some cases; '' if none was measured."""
    floors = (result.finding.floor for result in results if result.finding and result.finding.floor is not None)
    return units.span(floors, lambda floor: f"+-{units.percent(floor)}")


def phases_of(result: Result) -> tuple[tuple[str, float], ...]:
    """Best-case seconds by phase, with the unattributed rest if it is not given."""
    finding = result.finding
    if finding is None or finding.best_seconds is None:
        return ()
    # Runs of earlier versions stored phases without the rest.
    if any(name == UNATTRIBUTED for name, _ in finding.phases):
        return finding.phases
    unattributed = finding.best_seconds - sum(seconds for _, seconds in finding.phases)
    return (*finding.phases, (UNATTRIBUTED, max(0.0, unattributed)))
