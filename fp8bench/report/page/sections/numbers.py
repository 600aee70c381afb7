"""What a lower precision costs in numbers, and what the numbers are made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from fp8bench import units
from fp8bench.errors import UsageError
from fp8bench.model import Measurement
from fp8bench.registry import precisions
from fp8bench.report.elements import Axis, Bars, Column, Element, Field, Mark, Table, Text, Tone
from fp8bench.report.material import Material
from fp8bench.report.page.charts import grouped
from fp8bench.report.page.section import Section, number, sections
from fp8bench.report.panels import Panel, Result, together
from fp8bench.report.tensor_panels import timed_panels
from fp8bench.report.terminal.figures import name_of, shares_of, show_shares, summary
from fp8bench.report.terminal.tables import main_error, show_value, value_of
from fp8bench.report.words import legend
from fp8bench.report.words.naming import NamedCase, listed, named_cases, titled_panels

# Measurements in these units are no errors: memory and times have sections of their own.
_OTHER_UNITS = ("B", "s")


@sections.register("numbers")
class Numbers(Section):
    """Errors by metric and precision; values by layer kind and role, and the formats they do not fit."""

    name = "numbers"
    title = "What it costs in numbers"
    lead = (
        "Errors against the reference that each suite names, relative: 0 is exact. An emulated precision is right "
        "here: its values are rounded as hardware would round them."
    )
    rank = 100

    def elements(self, material: Material) -> Iterator[Element]:
        for title, panel in timed_panels(material):
            yield from _errors(title, panel)
        data = [element for title, panel in titled_panels(material) for element in _data(title, panel)]
        if data:
            yield Text("What the data are made of", Tone.STRONG)
            yield Text(f"{legend.DATA[:1].upper()}{legend.DATA[1:]}.")
        yield from data


def _errors(title: str, panel: Panel) -> Iterator[Element]:
    """The main error as bars, every error as a table."""
    by_mode = _by_mode(panel)
    if not by_mode:
        return
    shown = main_error(panel)
    found = ((case, case.result.record.measurement(shown)) for case in named_cases(panel))
    marks = [(case, one, value) for case, one in found if one and (value := value_of(one)) is not None]
    if sum(0 < value < math.inf for *_, value in marks) > 1:
        yield _bars(title, panel, shown, marks)
    yield _table(title, panel, by_mode)
    strange = [f"{case.name} ({value})" for case, _, value in marks if not math.isfinite(value)]
    if strange:
        yield Text(f"{title}: {shown} is no finite number in {listed(strange)}.", Tone.BAD)


def _by_mode(panel: Panel) -> dict[str, dict[str, list[Measurement]]]:
    """Measurements by precision and metric, one for each group that has it."""
    found = together(
        (result.mode, (f"{one.metric} ({one.phase})" if one.phase else one.metric, one))
        for result in panel.results
        for one in result.record.measurements
        if one.unit not in _OTHER_UNITS and value_of(one) is not None
    )
    return {mode: together(members) for mode, members in found.items()}


def _bars(title: str, panel: Panel, metric: str, found: Sequence[tuple[NamedCase, Measurement, float]]) -> Bars:
    groups = grouped(
        (
            case.place,
            Mark(case.result.mode, value, hint=f"{case.name}: {show_value(one)}, {case.result.record.support.level}"),
        )
        for case, one, value in found
    )
    finite = {case.result.mode: value for case, _, value in found if 0 < value < math.inf}
    ends = [choose(finite, key=lambda mode: finite[mode]) for choose in (min, max)]
    best, worst = (f"{mode} ({units.relative_error(finite[mode])})" for mode in ends)
    description = f"Smallest in {best}, largest in {worst}."
    exact = sum(value == 0 for *_, value in found)
    if exact:
        description += f" {exact} {'is' if exact == 1 else 'are'} exactly 0, which has no place on a logarithmic axis."
    axis = Axis(metric, log=True)
    return Bars(f"errors-{panel.case.workload}", f"{title}: {metric}", description, axis, groups)


def _table(title: str, panel: Panel, by_mode: dict[str, dict[str, list[Measurement]]]) -> Table:
    levels = {one.mode: one for one in panel.results}
    by_metric = together((metric, one) for found in by_mode.values() for metric, many in found.items() for one in many)
    columns = (
        Column("precision"),
        Column("how", hint="native, or emulated in software"),
        *(
            Column(metric, number=True, hint=next((one.description for one in members if one.description), ""))
            for metric, members in by_metric.items()
        ),
    )
    rows = tuple(
        (
            Field(mode, hint=_summary(levels[mode])),
            Field(levels[mode].record.support.level.value, hint=levels[mode].record.support.reason),
            *(_field(found.get(metric, ())) for metric in by_metric),
        )
        for mode, found in by_mode.items()
    )
    caption = f"{title}: errors by precision"
    if len(panel.groups) > 1:
        caption += f", the smallest and the largest of {len(panel.groups)} groups"
    return Table(f"errors-of-{panel.case.workload}", caption, columns, rows)


def _summary(result: Result) -> str:
    """A precision's formats in its own words, and the options it was given; '' for one that is not known here."""
    mode = result.record.case.precision
    try:
        summary = precisions.get(mode).summary
    except UsageError:
        return ""
    _, *options = mode.split(":")
    return f"{summary} Here with {', '.join(options)}." if options else summary


def _field(members: Sequence[Measurement]) -> Field:
    """'2.9e-03', or '2.8e-03 to 3.0e-03'; a value that is no number counts as the largest."""
    if not members:
        return Field(units.NONE)
    values = [(value, one) for one in members if (value := value_of(one)) is not None]
    ordered = sorted(values, key=lambda pair: (math.isnan(pair[0]), pair[0]))
    text = " to ".join(dict.fromkeys(show_value(one) for _, one in (ordered[0], ordered[-1])))
    worst = ordered[-1][0]
    return Field(text, worst, Tone.PLAIN if math.isfinite(worst) else Tone.BAD)


def _data(title: str, panel: Panel) -> Iterator[Element]:
    """Magnitudes by layer kind and role, and what lies outside of each format."""
    found = summary(panel)
    if found is None:
        return
    columns = (
        Column("data", hint="layer kind and role"),
        Column("values", number=True),
        Column("amax", number=True, hint="the largest magnitude"),
        *(
            Column(name, number=True, hint="share above its largest / share that would become zero")
            for name in found.crossed
        ),
    )
    rows = tuple(
        (
            Field(name_of(one)),
            number(one.count, units.whole),
            number(one.amax),
            *(Field(show_shares(one, name), sum(shares_of(one, name))) for name in found.crossed),
        )
        for one in found.worst
    )
    yield Table(f"data-{panel.case.workload}", f"{title}: {found.title}", columns, rows)
