"""Groups the records of a run into panels. A panel is one or more groups of cases that share a table."""

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
    Case,
    DeviceFacts,
    Finding,
    Label,
    Measurement,
    Params,
    Record,
    Run,
    Scalar,
    Verdict,
)
from fp8bench.model.specs import ENERGY, LOSS_ERROR, STEP, Better, find_metric_spec
from fp8bench.protocols.axes import QUIET_AXIS_DEFAULTS

# A note names the settings that it applies to. If there are more than this, it only counts them.
_MAX_NAMED_SETTINGS = 3
K = TypeVar("K")
V = TypeVar("V")
# Error metrics by priority. If a workload has several of them, reports show the first one in this list.
_MAIN_ERROR_METRICS = ("gradient_error", "product_error", "update_error", "output_error")
_ERROR_METRIC_SUFFIX = "_error"
# Parameters that are shown without their name, because their values explain themselves.
_PARAMS_WITHOUT_NAME = frozenset({"size", "make", "part", "operation", "limit", "collective"})


def together(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Groups the values of (key, value) pairs by key. Keys are in the order in which they first occur."""
    values_by_key: dict[K, list[V]] = {}
    for key, value in pairs:
        values_by_key.setdefault(key, []).append(value)
    return values_by_key


# The metrics that all suites about tensors have.
SQNR_METRIC = "sqnr_db"
WORST_BLOCKS_METRIC = "sqnr_block_p1_db"
UNDERFLOW_METRIC = "underflow_percent"


def join_parts(*parts: str, separator: str = ", ") -> str:
    """Joins the texts that are not empty: 'a', '' and 'b' give 'a, b'."""
    return separator.join(filter(None, parts))


@dataclass(frozen=True)
class Result:
    """The record of a case, and its finding (verdict and figures). Without samples, the finding has no figures."""

    record: Record
    finding: Finding

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
    def best_seconds(self) -> float | None:
        return self.finding.best_seconds

    @property
    def labels(self) -> tuple[Label, ...]:
        return self.finding.labels

    def reason(self, label: Label) -> str:
        return dict(self.finding.label_reasons).get(label, "")

    def median(self, metric: str) -> float | None:
        """Returns the median of a metric's samples. Returns None if the metric was not measured."""
        return median_value(self.record.measurement(metric))


@dataclass(frozen=True)
class ResultGroup:
    """The results of one group of cases, in the order of the plan. `reference` is the mode of the reference, or ''.

    `setting_name` has the parameters that distinguish this group within its panel, as '256 x 256 x 64'. It is '' if the
    panel has one group. `error_metric` is the name of the group's main error, or ''.
    """

    results: tuple[Result, ...]
    reference: str
    setting_name: str = ""
    error_metric: str = ""

    @property
    def case(self) -> Case:
        return self.results[0].record.case

    @property
    def reference_result(self) -> Result | None:
        """The result of the group's reference, or None if the reference has no record."""
        return next((result for result in self.results if result.mode == self.reference), None)

    @cached_property
    def named_cases(self) -> tuple[NamedCase, ...]:
        return tuple(NamedCase(result.record, result.finding, self) for result in self.results)


@dataclass(frozen=True)
class NamedCase(Result):
    """A result (record and finding) with its group, its metrics, and the name of its case in the panel."""

    group: ResultGroup

    @cached_property
    def figures(self) -> StepFigures:
        return StepFigures(self)

    @property
    def reference_result(self) -> Result | None:
        return self.group.reference_result

    @property
    def suite(self) -> str:
        return self.record.case.workload

    @property
    def error_value(self) -> float | None:
        """The median of the group's main error in this case, or None if it was not measured."""
        return self.median(self.group.error_metric)

    @property
    def setting_name(self) -> str:
        return self.group.setting_name

    @property
    def name(self) -> str:
        """The setting and the mode, as '256 x 256 x 64 bf16', or the mode alone if the panel has one group."""
        return f"{self.setting_name} {self.mode}".strip()


def explain_missing_ratio(result: Result) -> str:
    """Returns why a case has no ratio to its reference, as 'reference' or 'emulated'. Otherwise returns a dash."""
    if result.is_reference:
        return "reference"
    return "emulated" if result.is_emulated else units.NONE


class CaseValue(NamedTuple, Generic[V]):
    """A row of a table: a case, and the value that the table shows for this case."""

    case: NamedCase
    value: V


Cases = Sequence[NamedCase]
FindingsById = Mapping[str, Finding]


@dataclass(frozen=True)
class Panel:
    """Neighbouring groups with the same workload, device and reference mode. They share the columns of a table."""

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
    def error_metric(self) -> str:
        return self.groups[0].error_metric

    @cached_property
    def named_cases(self) -> tuple[NamedCase, ...]:
        return tuple(chain.from_iterable(group.named_cases for group in self.groups))

    @cached_property
    def measurements(self) -> list[Measurement]:
        return list(chain.from_iterable(case.record.measurements for case in self.named_cases))

    def find_case_values(self, get_value: Callable[[Result], V | None]) -> list[CaseValue[V]]:
        """Returns each case with the result of `get_value`. Cases for which the result is None are left out."""
        return [CaseValue(case, value) for case in self.named_cases if (value := get_value(case)) is not None]

    @cached_property
    def common_params(self) -> Params:
        return shared_params([group.case.params for group in self.groups])

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(measurement.metric for measurement in self.measurements))

    @cached_property
    def is_timed(self) -> bool:
        """Whether the suite measures times. A suite about tensors measures only their errors."""
        return not {SQNR_METRIC, WORST_BLOCKS_METRIC, UNDERFLOW_METRIC} <= {*self.metrics}


def list_cases(panels: Iterable[Panel]) -> list[NamedCase]:
    return list(chain.from_iterable(panel.named_cases for panel in panels))


def find_device(devices: Iterable[DeviceFacts], key: str) -> DeviceFacts | None:
    return next((facts for facts in devices if facts.key == key), None)


def list_metrics(case: NamedCase) -> Iterator[Metric]:
    # this import is slow, and every command imports this module
    from fp8bench.analysis.metrics import iterate_case_metrics

    # Ratios need the result of the group's reference, which may be missing.
    result = case.reference_result
    reference = Reference(result.record, result.labels) if result is not None else None
    return iterate_case_metrics(case.record, case.finding, reference)


class StepFigures(dict[str, Metric]):
    """The metrics of a case's whole step by name, without those of single phases or ranks. A missing name gives a
    metric without a value.

    If two metrics have the same name, the first one is used. An energy without a source is left out.
    """

    def __init__(self, case: NamedCase) -> None:
        super().__init__()
        # Do not show a rate of work per second if the amount of work was declared but not checked, or contradicts the
        # check.
        is_work_unchecked = (
            case.record.tape is None and case.record.ceiling is None and Label.FEW_SAMPLES in case.labels
        )
        self._sound = not is_work_unchecked and not {Label.WORK_MISMATCH, Label.NO_WORK, Label.ABOVE_CEILING} & {
            *case.labels
        }
        for metric in list_metrics(case):
            if metric.phase == STEP and (metric.name != ENERGY or metric.source):
                self.setdefault(metric.name, metric)

    def __missing__(self, name: str) -> Metric:
        return Metric(find_metric_spec(name))

    @property
    def rate(self) -> Metric:
        """The work per second at the best-case step time, as tokens/s. It has no value if the declared amount of work
        is doubtful.
        """
        rates = (name for name, metric in self.items() if metric.better is Better.HIGHER and metric.unit.endswith("/s"))
        # The empty name gives a metric without a value.
        rate = self[next(rates, "") if self._sound else ""]
        return rate if rate.best is None else replace(rate, value=rate.best)


def group_into_panels(run: Run, findings: FindingsById) -> tuple[Panel, ...]:
    # 1. Group results by setting. If the reference of a group was not measured, take the reference from the plan.
    planned_references = {group.setting: group.cases[group.reference].case.mode for group in run.plan}
    records_by_setting = together((record.case.setting, record) for record in run.records)
    groups = []
    for setting, records in records_by_setting.items():
        results = [
            Result(record, findings.get(record.case.id) or Finding(record.case, Verdict.NONE)) for record in records
        ]
        reference_modes = (result.mode for result in results if result.is_reference)
        groups.append(ResultGroup(tuple(results), next(reference_modes, planned_references.get(setting, ""))))
    # 2. Combine neighbouring groups into a panel if they have the same suite, device and reference.
    panels = groupby(groups, key=lambda group: (group.case.workload, group.case.device, group.reference))
    return tuple(Panel(_name_group_settings(tuple(panel_groups))) for _, panel_groups in panels)


def _name_group_settings(groups: Sequence[ResultGroup]) -> tuple[ResultGroup, ...]:
    """Returns the groups with their setting names and the name of their main error.

    If only some groups have an optional parameter such as cache=cold, the other groups name its default: 'cache hot'.
    """
    # The panel's heading has the parameters that all groups share, so setting names leave them out.
    panel_of_groups = Panel(tuple(groups))
    error_metrics = [metric for metric in panel_of_groups.metrics if metric.endswith(_ERROR_METRIC_SUFFIX)]
    main_error_metric = next(
        (metric for metric in (*_MAIN_ERROR_METRICS, *error_metrics) if metric in error_metrics), ""
    )
    params_of_groups = [dict(group.case.params) for group in groups]
    varying_param_names = set().union(*params_of_groups) - dict(panel_of_groups.common_params).keys()
    groups_with_setting_names = []
    for group, params in zip(groups, params_of_groups, strict=True):
        differing_params = [pair for pair in params.items() if pair not in panel_of_groups.common_params]
        # Runs store an optional axis only if the user set it. Without a stored value, it has its default value.
        default_params = [
            pair for pair in QUIET_AXIS_DEFAULTS.items() if pair[0] in varying_param_names and pair[0] not in params
        ]
        # A group with only usual values still needs a name, next to the other groups.
        setting_name = describe_params([*differing_params, *default_params]) or ("as usual" if len(groups) > 1 else "")
        groups_with_setting_names.append(replace(group, setting_name=setting_name, error_metric=main_error_metric))
    return tuple(groups_with_setting_names)


def shared_params(all_params: Sequence[Params]) -> Params:
    return tuple(pair for pair in all_params[0] if all(pair in params for params in all_params))


def format_case_params(params: Iterable[tuple[str, object]]) -> str:
    return " ".join(f"{name}={value}" for name, value in params)


def describe_params(params: Iterable[tuple[str, Scalar]], left_out: Collection[tuple[str, Scalar]] = ()) -> str:
    """Returns parameters in words, as 'nano, 2 x 96 tokens' or '256 x 256 x 64, cache cold', except those in
    `left_out`.
    """
    text_by_param = {}
    for name, value in params:
        if name in _PARAMS_WITHOUT_NAME or (name, value) not in left_out:
            # The path of a callable, as 'net.py:make', keeps its underscores.
            is_path = ":" in str(value)
            text_by_param[name] = str(value) if is_path else str(value).replace("_", " ")
    param_phrases = [text_by_param.pop(name) for name in list(text_by_param) if name in _PARAMS_WITHOUT_NAME]
    if {"m", "n", "k"} <= text_by_param.keys():
        param_phrases.append(" x ".join(text_by_param.pop(name) for name in ("m", "n", "k")))
    if {"batch", "sequence"} <= text_by_param.keys():
        param_phrases.append(f"{text_by_param.pop('batch')} x {text_by_param.pop('sequence')} tokens")
    for name, value in text_by_param.items():
        name_value_separator = "=" if len(name) == 1 else " "
        readable_param_name = name.replace("_", " ")
        param_phrases.append(
            readable_param_name if value == "yes" else f"{readable_param_name}{name_value_separator}{value}"
        )
    return ", ".join(param_phrases)


def panel_heading(workload: str, params: Params, device: str, devices: Sequence[DeviceFacts]) -> str:
    """Returns the workload, parameters and device, as 'gemm product=forward on cpu (AMD EPYC, torch 2.13.0)'."""
    facts = find_device(devices, device)
    device_text = f"{device} ({facts.name}, torch {facts.torch})" if facts is not None else device
    return join_parts(workload, format_case_params(params), "on", device_text, separator=" ")


def merge_notes(notes: Iterable[tuple[str, str, str]], num_settings: int) -> list[str]:
    """Merges equal notes (subject, text, setting). Returns a line for each distinct note, with the settings to which it
    applies.
    """
    settings_by_note = together(((subject, text), setting) for subject, text, setting in notes)
    lines = []
    for (subject, text), settings in settings_by_note.items():
        line = f"- {subject}{_describe_settings(settings, num_settings)}"
        lines.append(f"{line}: {text}" if text else line)
    return lines


def _describe_settings(settings: Sequence[str], num_settings: int) -> str:
    if num_settings == 1:
        return ""
    if len(settings) == num_settings:
        return f" in all {num_settings} groups"
    if len(settings) <= _MAX_NAMED_SETTINGS:
        return f" at {'; '.join(settings)}"
    return f" in {len(settings)} of {num_settings} groups"


def median_value(measurement: Measurement | None) -> float | None:
    """Returns the median of a measurement's samples, or None without samples."""
    return statistics.median(measurement.samples) if measurement and measurement.samples else None


def show_measurement(measurement: Measurement) -> str:
    return find_metric_spec(measurement.metric).format_value(median_value(measurement), measurement.unit)


def error_name(measurement: Measurement) -> str:
    """Returns the metric of an error in words, followed by its phase, as 'gradient error (gemm)', or by 'one draw' if
    it is the error of a loss from a single batch.
    """
    # The loss of a single batch may have a small error by chance.
    is_single_batch_loss = measurement.metric == LOSS_ERROR and len(measurement.samples) == 1
    error_detail = measurement.phase or ("one draw" if is_single_batch_loss else "")
    metric_name = measurement.metric.replace("_", " ")
    if error_detail:
        return f"{metric_name} ({error_detail})"
    return metric_name


def show_noise_floors(results: Iterable[Result]) -> str:
    """Returns the range of the noise floors (A/A) of these cases, as '+-0.6%', or '' if none was measured."""
    noise_floors = (result.finding.floor for result in results if result.finding.floor is not None)
    return units.span(noise_floors, lambda floor: f"+-{units.percent(floor)}")
