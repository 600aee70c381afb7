"""The accuracy of lower precisions: errors, statistics of the data, scales found from data, and a sampler's steps."""

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
from typing import NamedTuple

from fp8bench import units
from fp8bench.model import LayerScale, Measurement, TensorStatistics, Timing
from fp8bench.model.words import Phase
from fp8bench.registry import precisions
from fp8bench.report.columns import Col, Cols, case_cols, table
from fp8bench.report.elements import Elements, Field, Table, Tables, Text, Tone
from fp8bench.report.page.section import PRECISION, Material, section, table_of_cases, titled_panels
from fp8bench.report.panels import (
    CaseValue,
    NamedCase,
    Panel,
    error_name,
    join_parts,
    show_value,
    together,
    value_of,
)
from fp8bench.report.topics.tensors import timed_panels
from fp8bench.report.words import legend
from fp8bench.report.words.naming import figure_words, join_words

# One precision's errors by name, a measurement for each case.
_Errors = dict[str, list[Measurement]]
# Measurements in these units are not errors.
_OTHER_UNITS = ("B", "s")
_SCALES: tuple[Col[CaseValue[LayerScale]], ...] = (
    PRECISION,
    Col("layer", "value.layer"),
    Col("role", "value.role"),
    Col("amax", "value.amax", number=True, hint="the largest magnitude that the scale comes from"),
    Col("scale", "value.scale", number=True, hint="what values are multiplied by"),
    Col("renewed", "value.renewals", show=units.whole, hint="how often, because of age or saturation"),
)


def data(panel: Panel, name: str = "data", suite: str = "") -> Tables:
    """A row for each kind and role, over all groups; formats have a column if some value lies outside their range."""
    # 1. The largest of each figure over all groups.
    all_statistics = [case.record.statistics for case in panel.members if case.record.statistics]
    by_name = together(((tensor.kind, tensor.role), tensor) for tensor in chain.from_iterable(all_statistics))
    worst = [_largest_of(tensors) for tensors in by_name.values()]
    if not worst:
        return
    # 2. Formats that hold all values are named in the caption, the others have a column.
    outside: dict[str, bool] = {}
    for tensor in worst:
        for fmt, above, vanishing in tensor.outside:
            outside[fmt] = outside.get(fmt, False) or bool(above or vanishing)
    contained = ", ".join(fmt for fmt, is_outside in outside.items() if not is_outside)
    unit_scaled = [case.mode for case in panel.members if precisions.unit_scaled(case.record.case.precision)]
    caption = join_parts(
        f"{suite}: " * bool(suite) + "data, before any scaling",
        f"each figure is the largest of {len(all_statistics)} groups" if len(all_statistics) > 1 else "",
        f"all within the range of {contained}" if contained else "",
        f"{join_words(unit_scaled)} has them near a deviation of 1 where it casts" if unit_scaled else "",
        by="; ",
    )
    cols: Cols[TensorStatistics] = [
        Col("data", name_of, hint="layer kind and role"),
        Col("values", "count", show=units.whole),
        Col("amax", "amax", number=True, hint="the largest magnitude"),
    ]
    hint = "share above its largest / share that would become zero"
    cols += [Col(fmt, partial(_outside, name=fmt), number=True, hint=hint) for fmt in outside if outside[fmt]]
    yield table(name, caption, cols, worst)


def _largest_of(tensors: Sequence[TensorStatistics]) -> TensorStatistics:
    """The largest of each figure, of one kind and role in several groups."""
    largest: dict[str, tuple[float, float]] = {}
    for tensor in tensors:
        for fmt, above, vanishing in tensor.outside:
            highest = largest.get(fmt, (above, vanishing))
            largest[fmt] = max(highest[0], above), max(highest[1], vanishing)
    return replace(
        tensors[0],
        count=max(tensor.count for tensor in tensors),
        amax=max(tensor.amax for tensor in tensors),
        outside=tuple((fmt, *shares) for fmt, shares in largest.items()),
    )


def name_of(statistics: TensorStatistics) -> str:
    """'mlp gradient'; one word if kind and role are the same."""
    words = statistics.kind if statistics.role in ("", statistics.kind) else f"{statistics.kind} {statistics.role}"
    return words.replace("_", " ")


def shares_of(statistics: TensorStatistics, name: str) -> tuple[float, float]:
    shares = {fmt: (above, vanishing) for fmt, above, vanishing in statistics.outside}
    return shares.get(name, (0.0, 0.0))


def _outside(statistics: TensorStatistics, name: str) -> Field:
    pair = shares_of(statistics, name)
    text = " / ".join(map(units.share, pair)) if any(pair) else units.NONE
    return Field(text, sum(pair))


@section("numbers", "Accuracy", 100)
def numbers_section(material: Material) -> Elements:
    """Errors relative to the reference that each suite names; 0 is exact. They are also right for emulated precisions,
    whose values are rounded as hardware would round them.
    """
    for title, panel in timed_panels(material):
        yield from _errors(title, panel)
    tables: list[Table] = []
    for title, panel in titled_panels(material):
        tables += data(panel, f"data-{panel.suite}", title)
    if tables:
        yield Text("The data", Tone.STRONG)
        yield Text(f"{legend.DATA[:1].upper()}{legend.DATA[1:]}.")
    yield from tables


def _errors(title: str, panel: Panel) -> Elements:
    by_mode = _by_mode(panel)
    if not by_mode:
        return
    yield _table(title, panel, by_mode)
    errors = [(case.name, case.error) for case in panel.members if case.error is not None]
    strange = [f"{name} ({error})" for name, error in errors if not math.isfinite(error)]
    if strange:
        yield Text(f"{title}: {figure_words(panel.error)} is not a finite number in {join_words(strange)}.", Tone.BAD)


def _by_mode(panel: Panel) -> dict[str, _Errors]:
    """Errors by precision and name, in all groups."""
    by_mode: dict[str, _Errors] = {}
    for case in panel.members:
        for measurement in case.record.measurements:
            is_error = measurement.unit not in _OTHER_UNITS and not is_of_step(measurement.metric)
            if is_error and value_of(measurement) is not None:
                errors = by_mode.setdefault(case.mode, {})
                errors.setdefault(error_name(measurement), []).append(measurement)
    return by_mode


def _table(title: str, panel: Panel, by_mode: dict[str, _Errors]) -> Table:
    levels = {case.mode: case.record.support.level.value for case in panel.members}
    hints: dict[str, str] = {}
    for errors in by_mode.values():
        for metric, measurements in errors.items():
            described = (measurement.description for measurement in measurements if measurement.description)
            # Suites describe a metric where it is measured first.
            hints[metric] = hints.get(metric) or next(described, "")
    cols: Cols[tuple[str, _Errors]] = [
        Col("precision", itemgetter(0)),
        Col("how", lambda row: levels[row[0]], hint="native, or emulated in software"),
    ]
    cols += [Col(metric, partial(_field, metric=metric), number=True, hint=hint) for metric, hint in hints.items()]
    span = f", the smallest and the largest of {len(panel.groups)} groups" if len(panel.groups) > 1 else ""
    return table(f"errors-of-{panel.suite}", f"{title}: errors by precision{span}", cols, by_mode.items())


def _field(row: tuple[str, _Errors], metric: str) -> Field | None:
    """'2.9e-03', or '2.8e-03 to 3.0e-03'; NaN counts as the largest."""
    values = [(value, error) for error in row[1].get(metric, ()) if (value := value_of(error)) is not None]
    if not values:
        return None
    values.sort(key=lambda pair: (math.isnan(pair[0]), pair[0]))
    (_, lowest), (worst, highest) = values[0], values[-1]
    text = " to ".join(dict.fromkeys((show_value(lowest), show_value(highest))))
    return Field(text, worst, Tone.PLAIN if math.isfinite(worst) else Tone.BAD)


@section("scales", "Scales from data", 105)
def scales_section(material: Material) -> Elements:
    """Found in untimed steps on a separate copy of the state, and shown as they were after the last timed step. A scale
    is the largest value of its format over amax: larger values saturate.
    """
    for title, panel in titled_panels(material):
        cases = [(case, case.record.scales) for case in panel.members]
        yield from table_of_cases(f"scales-{panel.suite}", f"{title}: scales by layer and role", _SCALES, cases)


_ERROR_KINDS = {
    "single": ("one step", "of one step, from the exact latent before it"),
    "single_floor": ("its floor", "the same products in the carrier, by another kernel: smaller errors mean nothing"),
    "free": ("sampled", "sampled from noise, with the errors of all steps before"),
    "free_floor": ("its floor", "the same floor, sampled from noise"),
}  # fmt: skip
_ERROR = re.compile(rf"({'|'.join(_ERROR_KINDS)})_step(\d+)_error")
READING = (
    "Errors of the latent are relative to the exact one. An error near its floor does not describe a precision: "
    "another kernel of the same carrier makes as large an error. The error of one step is the precision's; sampling "
    "adds up the errors of all steps before."
)


class SamplerStep(NamedTuple):
    """A step of a sampler; `seconds` is None if the marks do not separate its steps."""

    case: NamedCase
    number: int
    seconds: float | None
    errors: Mapping[str, float]


def is_of_step(metric: str) -> bool:
    return _ERROR.fullmatch(metric) is not None


def step_seconds(timing: Timing) -> tuple[float, ...]:
    """The median over all calls of each part of a step that ends in ACCUMULATE (`Workload.part_ends`)."""
    calls = list(chain.from_iterable(slot.calls_ns for slot in timing.slots))
    blocks = timing.segments.blocks
    ends = [block for block, phase in zip(blocks, timing.segments.phases, strict=True) if phase == Phase.ACCUMULATE]
    if not calls or not ends or timing.varying:
        return ()
    # Marks behind the last end belong to the last part.
    parts = [min(bisect_left(ends, block), len(ends) - 1) for block in blocks]
    sums_by_call = []
    for call in calls:
        sums = [0] * len(ends)
        for part, nanoseconds in zip(parts, call, strict=True):
            sums[part] += nanoseconds
        sums_by_call.append(sums)
    return tuple(statistics.median(nanoseconds) / 1e9 for nanoseconds in zip(*sums_by_call, strict=True))


def _steps_of(case: NamedCase) -> list[SamplerStep]:
    errors: dict[int, dict[str, float]] = {}
    for measurement in case.record.measurements:
        match = _ERROR.fullmatch(measurement.metric)
        value = value_of(measurement)
        if match and value is not None:
            errors.setdefault(int(match[2]), {})[match[1]] = value
    seconds = step_seconds(case.record.timing) if errors and case.record.timing else ()
    # Without a mark for each of the sampler's steps, their times are unknown.
    times = seconds if len(seconds) == len(errors) else (None,) * len(errors)
    return [SamplerStep(case, number, time, errors[number]) for number, time in zip(sorted(errors), times, strict=True)]


def by_step(panel: Panel) -> Elements:
    """A row for each step of each case; nothing without a sampler."""
    steps = list(chain.from_iterable(map(_steps_of, panel.members)))
    if steps:
        yield _steps_table(panel, steps)
        yield Text(READING)


def _steps_table(panel: Panel, rows: Sequence[SamplerStep]) -> Table:
    def seconds(row: SamplerStep) -> str:
        # An emulation's time must not be read as a speed.
        return "emulated " * row.case.is_emulated + units.seconds(row.seconds)

    def error(name: str) -> Col[SamplerStep]:
        heading, hint = _ERROR_KINDS[name]
        return Col(heading, lambda row: row.errors.get(name), show=units.relative_error, hint=hint)

    cols: Cols[SamplerStep] = [
        *case_cols(),
        Col("step", "number", show=units.whole),
        Col("time", seconds, number=True),
        *map(error, _ERROR_KINDS),
    ]
    return table(f"by-step-of-{panel.suite}", "step by step of the sampler", cols, rows)


@section("by-step", "Step by step of a sampler", 101)
def by_step_section(material: Material) -> Elements:
    for _, panel in timed_panels(material):
        yield from by_step(panel)
