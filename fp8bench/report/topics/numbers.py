"""What a lower precision costs in numbers: errors, what the data are, scales found from data, and a sampler's steps."""

from __future__ import annotations

import math
import re
import statistics
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from fp8bench import units
from fp8bench.errors import UsageError
from fp8bench.model import LayerScale, Measurement, TensorStatistics, Timing
from fp8bench.model.words import Phase
from fp8bench.registry import precisions
from fp8bench.report.case_status import is_emulated
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import (
    Element,
    Field,
    Table,
    Text,
    Tone,
)
from fp8bench.report.page.section import PRECISION, Material, section, table_of_cases, titled_panels
from fp8bench.report.panels import (
    NamedCase,
    Panel,
    error_name,
    show_value,
    together,
    value_of,
)
from fp8bench.report.topics.tensors import timed_panels
from fp8bench.report.words import legend
from fp8bench.report.words.naming import figure_words, join_words

# Measurements in these units are no errors.
_OTHER_UNITS = ("B", "s")
_SCALES: tuple[Col[tuple[NamedCase, LayerScale]], ...] = (
    PRECISION,
    Col("layer", lambda row: row[1].layer),
    Col("role", lambda row: row[1].role),
    Col("amax", lambda row: row[1].amax, number=True, hint="the largest magnitude that the scale comes from"),
    Col("scale", lambda row: row[1].scale, number=True, hint="what values are multiplied by"),
    Col("renewed", lambda row: row[1].renewals, number=True, show=units.whole,
        hint="times, by age or by saturation, since it was found"),
)  # fmt: skip


def data(panel: Panel, name: str = "data", suite: str = "") -> Iterator[Table]:
    """A row for each kind and role, over all groups; formats have a column if some value lies outside their range."""
    looked_at = [result.record.statistics for result in panel.results if result.record.statistics]
    by_name = together(((statistics.kind, statistics.role), statistics) for group in looked_at for statistics in group)
    worst = []
    for (kind, role), members in by_name.items():
        shares = together((name, pair) for member in members for name, *pair in member.outside)
        outside = tuple((name, *map(max, zip(*pairs, strict=True))) for name, pairs in shares.items())
        count, amax = max(member.count for member in members), max(member.amax for member in members)
        worst.append(TensorStatistics(kind, role, count, amax, outside))
    if not worst:
        return
    names = dict.fromkeys(name for statistics in worst for name, _, _ in statistics.outside)
    crossed = [name for name in names if any(any(shares_of(statistics, name)) for statistics in worst)]
    contained = ", ".join(name for name in names if name not in crossed)
    title = f"{suite}: " * bool(suite) + "data, before any scaling"
    title += f"; each figure is the largest of {len(looked_at)} groups" if len(looked_at) > 1 else ""
    title += f"; all within the range of {contained}" if contained else ""
    unit = dict.fromkeys(own.mode for own in panel.results if precisions.unit_scaled(own.record.case.precision))
    title += f"; {join_words([*unit])} has them near a deviation of 1 where it casts" if unit else ""
    beyond = "share above its largest / share that would become zero"
    cols: list[Col[TensorStatistics]] = [
        Col("data", name_of, hint="layer kind and role"),
        Col("values", lambda statistics: statistics.count, number=True, show=units.whole),
        Col("amax", lambda statistics: statistics.amax, number=True, hint="the largest magnitude"),
        *(Col(name, partial(_outside, name=name), number=True, hint=beyond) for name in crossed),
    ]
    yield table(name, title, cols, worst)


def name_of(statistics: TensorStatistics) -> str:
    """'mlp gradient'; one word if kind and role are the same."""
    words = statistics.kind if statistics.role in ("", statistics.kind) else f"{statistics.kind} {statistics.role}"
    return words.replace("_", " ")


def shares_of(statistics: TensorStatistics, name: str) -> tuple[float, float]:
    return next(((above, vanishing) for known, above, vanishing in statistics.outside if known == name), (0.0, 0.0))


def _outside(statistics: TensorStatistics, name: str) -> Field:
    pair = shares_of(statistics, name)
    return Field(" / ".join(units.share(share) for share in pair) if any(pair) else units.NONE, sum(pair))


@section("numbers", "What it costs in numbers", 100)
def numbers_section(material: Material) -> Iterator[Element]:
    """Errors against the reference that each suite names, relative: 0 is exact. An emulated precision is right here:
    its values are rounded as hardware would round them.
    """
    for title, panel in timed_panels(material):
        yield from _errors(title, panel)
    panels = titled_panels(material)
    tables = [made for title, panel in panels for made in data(panel, f"data-{panel.case.workload}", title)]
    if tables:
        yield Text("What the data are made of", Tone.STRONG)
        yield Text(f"{legend.DATA[:1].upper()}{legend.DATA[1:]}.")
    yield from tables


def _errors(title: str, panel: Panel) -> Iterator[Element]:
    by_mode = _by_mode(panel)
    if not by_mode:
        return
    shown = panel.error
    measured = ((case, case.result.record.measurement(shown)) for case in panel.members)
    marks = [
        (case, measurement, value)
        for case, measurement in measured
        if measurement and (value := value_of(measurement)) is not None
    ]
    yield _table(title, panel, by_mode)
    strange = [f"{case.name} ({value})" for case, _, value in marks if not math.isfinite(value)]
    if strange:
        yield Text(f"{title}: {figure_words(shown)} is no finite number in {join_words(strange)}.", Tone.BAD)


def _by_mode(panel: Panel) -> dict[str, dict[str, list[Measurement]]]:
    grouped_by_mode = together(
        (result.mode, (error_name(measurement), measurement))
        for result in panel.results
        for measurement in result.record.measurements
        if measurement.unit not in _OTHER_UNITS
        and value_of(measurement) is not None
        and not is_of_step(measurement.metric)
    )
    return {mode: together(members) for mode, members in grouped_by_mode.items()}


def _table(title: str, panel: Panel, by_mode: dict[str, dict[str, list[Measurement]]]) -> Table:
    supports = {result.mode: result.record.support for result in panel.results}
    by_metric = together(
        (metric, many) for own in by_mode.values() for metric, members in own.items() for many in members
    )
    cols: list[Col[tuple[str, dict[str, list[Measurement]]]]] = [
        Col("precision", lambda row: Field(row[0], hint=_summary(row[0]))),
        Col(
            "how",
            lambda row: Field(supports[row[0]].level.value, hint=supports[row[0]].reason),
            hint="native, or emulated in software",
        ),
        *(
            Col(
                metric,
                partial(_field, metric=metric),
                number=True,
                hint=next((member.description for member in members if member.description), ""),
            )
            for metric, members in by_metric.items()
        ),
    ]
    some = f", the smallest and the largest of {len(panel.groups)} groups" if len(panel.groups) > 1 else ""
    return table(f"errors-of-{panel.case.workload}", f"{title}: errors by precision{some}", cols, by_mode.items())


def _summary(mode: str) -> str:
    """'' for a map, and for what this version does not know."""
    try:
        precision = precisions.get(mode)
    except UsageError:
        return ""
    options, summary = mode.split(":")[1:] if precision.options else [], precision.summary
    return f"{summary} Here with {', '.join(options)}." if options else summary


def _field(row: tuple[str, dict[str, list[Measurement]]], metric: str) -> Field | None:
    """'2.9e-03', or '2.8e-03 to 3.0e-03'; NaN counts as the largest."""
    known = [(value, member) for member in row[1].get(metric, ()) if (value := value_of(member)) is not None]
    if not known:
        return None
    known.sort(key=lambda pair: (math.isnan(pair[0]), pair[0]))
    text = " to ".join(dict.fromkeys(show_value(member) for _, member in (known[0], known[-1])))
    worst = known[-1][0]
    return Field(text, worst, Tone.PLAIN if math.isfinite(worst) else Tone.BAD)


@section("scales", "Scales from data", 105)
def scales_section(material: Material) -> Iterator[Element]:
    """Found in untimed steps on a state of its own, and as they were after the last timed step. A scale is the largest
    value of its format over amax: what exceeds amax later saturates.
    """
    for title, panel in titled_panels(material):
        cases = ((case.name, [(case, scale) for scale in case.result.record.scales]) for case in panel.members)
        name, words = f"scales-{panel.case.workload}", "scales by layer and role"
        yield from table_of_cases(name, title, words, _SCALES, cases, "The run's file has them.")


_ERROR_KINDS = {
    "single": ("one step", "of one step, from the exact latent before it"),
    "single_floor": ("its floor", "the carrier's own products by another kernel: no precision is told from it"),
    "free": ("sampled", "sampled freely from the noise: errors of all steps before are in it"),
    "free_floor": ("its floor", "the same floor, sampled freely"),
}  # fmt: skip
_ERROR = re.compile(rf"({'|'.join(_ERROR_KINDS)})_step(\d+)_error")
READING = (
    "Errors of the latent are relative to the exact one. An error near its floor says nothing of a precision: other "
    "kernels of its carrier make as much. What one step costs is the precision's; what sampling makes of it is the "
    "trajectory's."
)


class SamplerStep(NamedTuple):
    """A step of a sampler; `seconds` is None if the marks of a model's step do not tell them apart."""

    case: NamedCase
    number: int
    seconds: float | None
    errors: Mapping[str, float]


def is_of_step(metric: str) -> bool:
    return _ERROR.fullmatch(metric) is not None


def step_seconds(timing: Timing) -> tuple[float, ...]:
    """The median over all calls of each part of a step that ends in ACCUMULATE (`Workload.part_ends`)."""
    calls = [call for slot in timing.slots for call in slot.calls_ns]
    blocks, phases = timing.segments.blocks, timing.segments.phases
    ends = [block for block, phase in zip(blocks, phases, strict=True) if phase == Phase.ACCUMULATE]
    if not calls or not ends or timing.varying:
        return ()
    parts = [min(bisect_left(ends, block), len(ends) - 1) for block in blocks]
    sums = [[0] * len(ends) for _ in calls]
    for call, own in zip(calls, sums, strict=True):
        for part, cell in zip(parts, call, strict=True):
            own[part] += cell
    return tuple(statistics.median(taken) / 1e9 for taken in zip(*sums, strict=True))


def _steps_of(case: NamedCase) -> list[SamplerStep]:
    record, errors = case.result.record, dict[int, dict[str, float]]()
    for measurement in record.measurements:
        known, value = _ERROR.fullmatch(measurement.metric), value_of(measurement)
        if known and value is not None:
            errors.setdefault(int(known[2]), {})[known[1]] = value
    seconds = step_seconds(record.timing) if errors and record.timing else ()
    times = seconds if len(seconds) == len(errors) else (None,) * len(errors)
    return [SamplerStep(case, number, time, errors[number]) for number, time in zip(sorted(errors), times, strict=True)]


def by_step(panel: Panel) -> Iterator[Element]:
    """A row for each step of each case; nothing without a sampler."""
    if steps := [step for case in panel.members for step in _steps_of(case)]:
        yield _steps_table(panel, steps)
        yield Text(READING)


def _steps_table(panel: Panel, rows: Sequence[SamplerStep]) -> Table:
    cols: list[Col[SamplerStep]] = [
        Col("group", lambda row: row.case.place, shared=True),
        Col("case", lambda row: row.case.result.mode),
        Col("step", lambda row: row.number, number=True, show=units.whole),
        # An emulation's time must not be read as a speed.
        Col(
            "time", lambda row: f"{'emulated ' * is_emulated(row.case.result)}{units.seconds(row.seconds)}", number=True
        ),
        *(
            Col(
                heading,
                partial(lambda name, row: row.errors.get(name), name),
                number=True,
                show=units.relative_error,
                hint=hint,
            )
            for name, (heading, hint) in _ERROR_KINDS.items()
        ),
    ]
    return table(f"by-step-of-{panel.case.workload}", "step by step of the sampler", cols, rows)


@section("by-step", "Step by step of a sampler", 101)
def by_step_section(material: Material) -> Iterator[Element]:
    for _, panel in timed_panels(material):
        yield from by_step(panel)
