"""Reports accuracy: errors by precision, statistics of the data, scales computed from the data, and the errors at each
step of a diffusion sampler.
"""

from __future__ import annotations

import math
import re
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

from fp8bench import units
from fp8bench.model import LayerScale, Measurement, TensorStatistics, Timing
from fp8bench.model.words import Phase
from fp8bench.registry import precisions
from fp8bench.report.columns import Col, ColumnList, case_columns, table
from fp8bench.report.elements import Elements, Field, Table, Tables, Text, Tone
from fp8bench.report.page.section import (
    PRECISION_COLUMN,
    Material,
    iterate_titled_panels,
    section,
    table_of_cases,
    timed_panels,
)
from fp8bench.report.panels import (
    CaseValue,
    NamedCase,
    Panel,
    error_name,
    join_parts,
    median_value,
    show_measurement,
    together,
)
from fp8bench.report.words import legend
from fp8bench.report.words.naming import join_words, make_figure_heading

# Maps the name of each error to its measurements in all cases with one precision.
_ErrorsByName = dict[str, list[Measurement]]
# Measurements in these units are sizes and times, and not error metrics.
_NON_ERROR_UNITS = ("B", "s")
_LAYER_SCALE_COLUMNS: tuple[Col[CaseValue[LayerScale]], ...] = (
    PRECISION_COLUMN,
    Col("layer", "value.layer"),
    Col("role", "value.role"),
    Col("amax", "value.amax", number=True, hint="the largest magnitude that the scale comes from"),
    Col("scale", "value.scale", number=True, hint="what values are multiplied by"),
    Col(
        "renewed",
        "value.renewals",
        show=units.whole,
        hint="how often the scale was renewed, because of age or saturation",
    ),
)


def make_tensor_range_tables(panel: Panel, name: str = "data", suite: str = "") -> Tables:
    """Yields a table of the tensors of a step by layer kind and role: size, largest magnitude, and the shares of values
    beyond the range of each format.

    A format has a column only if some value lies outside its range.
    """
    # 1. Find the largest value of each statistic over all groups.
    statistics_of_cases = [case.record.statistics for case in panel.named_cases if case.record.statistics]
    statistics_by_role = together(
        ((tensor.kind, tensor.role), tensor) for tensor in chain.from_iterable(statistics_of_cases)
    )
    largest_statistics = [_largest_statistics(tensors) for tensors in statistics_by_role.values()]
    if not largest_statistics:
        return
    # 2. If a format can hold all values, the caption names it. Each other format gets a column.
    outside_shares_of_tensors = chain.from_iterable(tensor.outside for tensor in largest_statistics)
    out_of_range_shares_by_format = together(
        (fmt, overflow or underflow) for fmt, overflow, underflow in outside_shares_of_tensors
    )
    range_covering_formats = ", ".join(fmt for fmt, shares in out_of_range_shares_by_format.items() if not any(shares))
    unit_scaled_modes = [case.mode for case in panel.named_cases if precisions.unit_scaled(case.record.case.precision)]
    caption = join_parts(
        f"{suite}: " * bool(suite) + "data, before any scaling",
        f"each figure is the largest of {len(statistics_of_cases)} groups" if len(statistics_of_cases) > 1 else "",
        f"all within the range of {range_covering_formats}" if range_covering_formats else "",
        f"in {join_words(unit_scaled_modes)}, cast tensors have deviations near 1" if unit_scaled_modes else "",
        separator="; ",
    )
    cols: ColumnList[TensorStatistics] = [
        Col("data", get_tensor_role, hint="layer kind and role"),
        Col("values", "count", show=units.whole),
        Col("amax", "amax", number=True, hint="the largest magnitude"),
    ]
    hint = "share of values above the format's largest / share that would become zero"
    cols += [
        Col(fmt, partial(_outside_shares_field, name=fmt), number=True, hint=hint)
        for fmt, shares in out_of_range_shares_by_format.items()
        if any(shares)
    ]
    yield table(name, caption, cols, largest_statistics)


def _largest_statistics(tensors: Sequence[TensorStatistics]) -> TensorStatistics:
    """Combines the statistics of tensors of the same kind and role. Returns the largest value of each statistic."""
    outside_shares_of_tensors = chain.from_iterable(tensor.outside for tensor in tensors)
    out_of_range_shares_by_format: dict[str, list[Any]] = {}
    for fmt in dict.fromkeys(fmt for fmt, _, _ in outside_shares_of_tensors):
        out_of_range_shares_by_format[fmt] = [find_shares_outside_format(tensor, fmt) for tensor in tensors]
    return replace(
        tensors[0],
        count=max(tensor.count for tensor in tensors),
        amax=max(tensor.amax for tensor in tensors),
        outside=tuple(
            (fmt, max(map(itemgetter(0), of_fmt)), max(map(itemgetter(1), of_fmt)))
            for fmt, of_fmt in out_of_range_shares_by_format.items()
        ),
    )


def get_tensor_role(statistics: TensorStatistics) -> str:
    """Returns the layer kind and the role of a tensor, as 'mlp gradient'. Equal words are not repeated."""
    name = statistics.kind if statistics.role in ("", statistics.kind) else f"{statistics.kind} {statistics.role}"
    return name.replace("_", " ")


def find_shares_outside_format(statistics: TensorStatistics, name: str) -> tuple[float, float]:
    out_of_range_shares_by_format = {fmt: (above, vanishing) for fmt, above, vanishing in statistics.outside}
    return out_of_range_shares_by_format.get(name, (0.0, 0.0))


def _outside_shares_field(statistics: TensorStatistics, name: str) -> Field:
    shares = find_shares_outside_format(statistics, name)
    text = " / ".join(map(units.share, shares)) if any(shares) else units.NONE
    return Field(text, sum(shares))


@section("numbers", "Accuracy", 100)
def numbers_section(material: Material) -> Elements:
    """Errors are relative to the reference that each suite names; 0 is exact. They are also right for emulated
    precisions, whose values are rounded as hardware would round them.
    """
    for title, panel in timed_panels(material):
        yield from _render_panel_errors(title, panel)
    titled_panels = iterate_titled_panels(material)
    table_elements = list(
        chain.from_iterable(
            make_tensor_range_tables(panel, f"data-{panel.suite}", title) for title, panel in titled_panels
        )
    )
    if table_elements:
        yield Text("The data", Tone.STRONG)
        yield Text(f"{legend.DATA_LEGEND[:1].upper()}{legend.DATA_LEGEND[1:]}.")
    yield from table_elements


def _render_panel_errors(title: str, panel: Panel) -> Elements:
    errors_by_mode = _errors_by_mode(panel)
    if not errors_by_mode:
        return
    yield _errors_table(title, panel, errors_by_mode)
    errors = [(case.name, case.error_value) for case in panel.named_cases if case.error_value is not None]
    not_finite = [f"{name} ({error})" for name, error in errors if not math.isfinite(error)]
    if not_finite:
        yield Text(
            f"{title}: {make_figure_heading(panel.error_metric)} is not a finite number in {join_words(not_finite)}.",
            Tone.BAD,
        )


def _errors_by_mode(panel: Panel) -> dict[str, _ErrorsByName]:
    """Returns the error measurements of all groups, by precision and then by error name."""
    errors_by_mode: dict[str, _ErrorsByName] = {}
    for case in panel.named_cases:
        for measurement in case.record.measurements:
            is_error_metric = measurement.unit not in _NON_ERROR_UNITS and not is_step_error_metric(measurement.metric)
            if is_error_metric and median_value(measurement) is not None:
                errors = errors_by_mode.setdefault(case.mode, {})
                errors.setdefault(error_name(measurement), []).append(measurement)
    return errors_by_mode


def _errors_table(title: str, panel: Panel, errors_by_mode: dict[str, _ErrorsByName]) -> Table:
    support_level_by_mode = {case.mode: case.record.support.level.value for case in panel.named_cases}
    hint_by_metric: dict[str, str] = {}
    for errors in errors_by_mode.values():
        for metric, measurements in errors.items():
            descriptions = (measurement.description for measurement in measurements if measurement.description)
            # Often only the first measurement of a metric has the metric's description, so look for it in all of them.
            hint_by_metric[metric] = hint_by_metric.get(metric) or next(descriptions, "")
    cols: ColumnList[tuple[str, _ErrorsByName]] = [
        Col("precision", itemgetter(0)),
        Col("how", lambda row: support_level_by_mode[row[0]], hint="native, or emulated in software"),
    ]
    cols += [
        Col(metric, partial(_error_field, metric=metric), number=True, hint=hint)
        for metric, hint in hint_by_metric.items()
    ]
    groups_text = f", the smallest and the largest of {len(panel.groups)} groups" if len(panel.groups) > 1 else ""
    return table(f"errors-of-{panel.suite}", f"{title}: errors by precision{groups_text}", cols, errors_by_mode.items())


def _error_field(row: tuple[str, _ErrorsByName], metric: str) -> Field | None:
    """Returns the lowest and the highest value of a precision's error, as '2.8e-03 to 3.0e-03'. NaN counts as the
    highest.
    """
    values = [(value, error) for error in row[1].get(metric, ()) if (value := median_value(error)) is not None]
    if not values:
        return None
    values.sort(key=lambda pair: (math.isnan(pair[0]), pair[0]))
    (_, lowest_error), (worst_error, highest_error) = values[0], values[-1]
    text = " to ".join(dict.fromkeys((show_measurement(lowest_error), show_measurement(highest_error))))
    return Field(text, worst_error, Tone.PLAIN if math.isfinite(worst_error) else Tone.BAD)


@section("scales", "Scales from data", 105)
def scales_section(material: Material) -> Elements:
    """Scales were found in untimed steps on a separate copy of the state. The table shows the scales after the last
    timed step. A scale is the largest value of its format divided by amax. Values larger than amax saturate.
    """
    for title, panel in iterate_titled_panels(material):
        cases = [(case, case.record.scales) for case in panel.named_cases]
        yield from table_of_cases(
            f"scales-{panel.suite}", f"{title}: scales by layer and role", _LAYER_SCALE_COLUMNS, cases
        )


_STEP_ERROR_HEADINGS = {
    "single": ("one step", "error of a single step that starts from the exact latent"),
    "single_floor": ("its floor", "difference between two kernels of the carrier: errors below it prove nothing"),
    "free": ("sampled", "error after sampling from noise, which includes the errors of earlier steps"),
    "free_floor": ("its floor", "difference between two kernels of the carrier, after sampling from noise"),
}  # fmt: skip
_STEP_ERROR_NAME_PATTERN = re.compile(rf"({'|'.join(_STEP_ERROR_HEADINGS)})_step(\d+)_error")
SAMPLER_LEGEND = (
    "Errors of the latent are relative to the exact one. An error near its floor does not describe a precision: "
    "another kernel of the same carrier makes as large an error. The error of one step is the precision's; sampling "
    "adds up the errors of all steps before."
)


class SamplerStepErrors(NamedTuple):
    """A step of a diffusion sampler with its errors. `seconds` is None if the time marks do not separate the steps."""

    case: NamedCase
    number: int
    seconds: float | None
    errors: Mapping[str, float]


def is_step_error_metric(metric: str) -> bool:
    return _STEP_ERROR_NAME_PATTERN.fullmatch(metric) is not None


def sampler_step_seconds(timing: Timing) -> tuple[float, ...]:
    """Returns the median seconds of each step of a diffusion sampler, over all calls. Each step ends with the phase
    ACCUMULATE.
    """
    calls = list(chain.from_iterable(slot.calls_ns for slot in timing.slots))
    blocks = timing.segments.blocks
    step_end_blocks = [
        block for block, phase in zip(blocks, timing.segments.phases, strict=True) if phase == Phase.ACCUMULATE
    ]
    # If calls differed in their phases, only sums were stored, which cannot be divided into steps.
    if not calls or not step_end_blocks or timing.varying:
        return ()
    # Time after the last ACCUMULATE counts towards the sampler's last step.
    step_index_by_block = [min(bisect_left(step_end_blocks, block), len(step_end_blocks) - 1) for block in blocks]
    step_nanoseconds_of_calls = []
    for call in calls:
        step_nanoseconds = [0] * len(step_end_blocks)
        for part, nanoseconds in zip(step_index_by_block, call, strict=True):
            step_nanoseconds[part] += nanoseconds
        step_nanoseconds_of_calls.append(step_nanoseconds)
    return tuple(statistics.median(nanoseconds) / 1e9 for nanoseconds in zip(*step_nanoseconds_of_calls, strict=True))


def _sampler_steps(case: NamedCase) -> list[SamplerStepErrors]:
    errors_by_step: dict[int, dict[str, float]] = {}
    for measurement in case.record.measurements:
        match = _STEP_ERROR_NAME_PATTERN.fullmatch(measurement.metric)
        value = median_value(measurement)
        if match and value is not None:
            errors_by_step.setdefault(int(match[2]), {})[match[1]] = value
    seconds = sampler_step_seconds(case.record.timing) if errors_by_step and case.record.timing else ()
    # The times can be assigned to steps only if there is exactly one time for each step of the sampler.
    seconds_by_step = seconds if len(seconds) == len(errors_by_step) else (None,) * len(errors_by_step)
    return [
        SamplerStepErrors(case, number, time, errors_by_step[number])
        for number, time in zip(sorted(errors_by_step), seconds_by_step, strict=True)
    ]


def sampler_elements(panel: Panel) -> Elements:
    """Yields a table with a row for each step of a diffusion sampler, and how to read the table. Without a sampler,
    yields nothing.
    """
    steps = list(chain.from_iterable(map(_sampler_steps, panel.named_cases)))
    if steps:
        yield _sampler_table(panel, steps)
        yield Text(SAMPLER_LEGEND)


def _sampler_table(panel: Panel, rows: Sequence[SamplerStepErrors]) -> Table:
    def show_seconds(row: SamplerStepErrors) -> str:
        # Mark the time of an emulation, because it must not be read as a speed.
        return "emulated " * row.case.is_emulated + units.seconds(row.seconds)

    def error_column(name: str) -> Col[SamplerStepErrors]:
        heading, hint = _STEP_ERROR_HEADINGS[name]
        return Col(heading, lambda row: row.errors.get(name), show=units.relative_error, hint=hint)

    cols: ColumnList[SamplerStepErrors] = [
        *case_columns(),
        Col("step", "number", show=units.whole),
        Col("time", show_seconds, number=True),
        *map(error_column, _STEP_ERROR_HEADINGS),
    ]
    return table(f"by-step-of-{panel.suite}", "the steps of the diffusion sampler, one by one", cols, rows)


@section("by-step", "The steps of a diffusion sampler", 101)
def by_step_section(material: Material) -> Elements:
    for _, panel in timed_panels(material):
        yield from sampler_elements(panel)
