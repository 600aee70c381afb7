"""The two main tables of a panel: what each case costs, and where its time goes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from fp8bench import units
from fp8bench.model import CELL_PHASES, UNATTRIBUTED, Level, Measurement, Status
from fp8bench.model.specs import REPLAY, TIME, spec_of
from fp8bench.report import case_status
from fp8bench.report.elements import Column, Field, Table, Tone
from fp8bench.report.metric_columns import with_figures
from fp8bench.report.panels import Figures, Panel, Result, ResultGroup
from fp8bench.report.words.legend import PHASE_TITLES

# The error a reader sees first, where a workload offers more than one: the most telling.
_MAIN_ERRORS = ("gradient_error", "product_error", "update_error", "output_error")
_ERROR_SUFFIX = "_error"


def main_error(panel: Panel) -> str:
    """The metric of the error column; '' if nothing in the panel has an error."""
    errors = [metric for metric in panel.metrics if metric.endswith(_ERROR_SUFFIX)]
    return next((metric for metric in (*_MAIN_ERRORS, *errors) if metric in errors), "")


def value_of(measurement: Measurement | None) -> float | None:
    """What one reads of a measurement's samples: the middle one."""
    return statistics.median(measurement.samples) if measurement and measurement.samples else None


def show_value(measurement: Measurement) -> str:
    """A measurement as text, by its unit."""
    return spec_of(measurement.metric).shown(value_of(measurement), measurement.unit)


def main_table(panel: Panel) -> Table:
    """Case by case: verdict, speed-up, times, error, throughput. What has no room left is told last."""
    error = main_error(panel)
    columns = {
        "group": Column("group", shared=True), "case": Column("case"), "verdict": Column("verdict"),
        "speed-up": Column("speed-up"), "best": Column("best", number=True), "median": Column("median", number=True),
        "replayed": Column("replayed", number=True),
        "error": Column("error", number=True), "spread": Column("spread", number=True),
        "throughput": Column("throughput", number=True), "labels": Column("labels", below=True),
    }  # fmt: skip
    floors = len(panel.groups) > 1
    rows = [
        _main_fields(one, Figures(group, one), error)
        | {"group": Field(f"{panel.place(group)}  noise floor (A/A): {noise_floor(group)}" if floors else "")}
        for group, one in panel.members
    ]
    silent = {"speed-up", "throughput", "error", "replayed"} & {
        name for name in columns if all(row[name].text == units.NONE for row in rows)
    }
    shown = [name for name in columns if name not in silent]
    fields = tuple(tuple(row[name] for name in shown) for row in rows)
    return with_figures(Table("cases", "", tuple(columns[name] for name in shown), fields), panel.members)


def phases_table(panel: Panel) -> Table | None:
    """The phases of each measured case as shares of its best case; None if nothing was measured."""
    measured = [(group, result) for group, result in panel.members if result.best]
    if not measured:
        return None
    present = {name for _, one in measured for name, seconds in phases_of(one) if seconds or name == UNATTRIBUTED}
    names = sorted(present, key=lambda name: CELL_PHASES.index(name) if name in CELL_PHASES else len(CELL_PHASES))
    columns = (Column("group", shared=True), Column("case"), Column("best", number=True),
               *(Column(PHASE_TITLES.get(name, name), number=True) for name in names))  # fmt: skip
    rows = tuple(
        tuple(map(Field, (panel.place(group), one.mode, _cost(one), *_shares(one, names)))) for group, one in measured
    )
    return Table("phases", "phases, as shares of the best case", columns, rows)


def noise_floor(group: ResultGroup) -> str:
    """'+-0.6%', or the range where cases that sat apart have floors of their own; and why measuring ended."""
    reasons = dict.fromkeys(one.record.stopped for one in group.results if one.record.stopped)
    return "; ".join(filter(None, (floor_of(group.results) or "not measured", " / ".join(reasons))))


def floor_of(results: Iterable[Result]) -> str:
    """The A/A floor of some cases, from the lowest to the highest; '' where none was measured."""
    floors = (one.finding.floor for one in results if one.finding and one.finding.floor is not None)
    return units.span(floors, lambda floor: f"+-{units.percent(floor)}")


def _main_fields(result: Result, figures: Figures, error: str) -> dict[str, Field]:
    finding = result.finding
    known = result.record.status is Status.OK
    tone = Tone.STRONG if case_status.standing(result) is case_status.Standing.FAILED else case_status.tone_of(result)
    labels = ", ".join(case_status.named_labels(result)) if known else ""
    why = finding.why if finding and finding.judged else ""
    return {
        "case": Field(result.mode),
        "verdict": Field(case_status.status_words(result), tone=tone),
        "speed-up": Field(case_status.show_speed_up(result) or units.NONE, tone=tone),
        "best": Field(units.seconds(figures[TIME].best if known else None)),
        "median": Field(units.seconds(figures[TIME].value if known else None)),
        "replayed": Field(units.seconds(figures[REPLAY].best if known else None)),
        "error": Field(units.relative_error(figures[error].value)),
        "spread": Field(units.percent(finding.spread if finding and known else None)),
        "throughput": Field(figures.shown(figures.rate) if known else units.NONE),
        "labels": Field("\n".join(filter(None, (f"labels: {labels}" if labels else "", why)))),
    }


def _cost(result: Result) -> str:
    """The best case; for an emulation with the word that keeps it from being read as a speed."""
    time = units.seconds(result.best)
    return f"{Level.EMULATED} {time}" if case_status.emulated(result) else time


def phases_of(result: Result) -> tuple[tuple[str, float], ...]:
    """Best-case seconds by phase; what is unattributed is worked out where it is not given."""
    finding = result.finding
    if finding is None or finding.best_seconds is None:
        return ()
    if any(name == UNATTRIBUTED for name, _ in finding.phases):
        return finding.phases
    rest = finding.best_seconds - sum(seconds for _, seconds in finding.phases)
    return (*finding.phases, (UNATTRIBUTED, max(0.0, rest)))


def _shares(result: Result, names: Sequence[str]) -> list[str]:
    """One cell a phase: its share, '<' if it is below the clock's floor, '-' if the step has no such phase."""
    assert result.finding is not None and result.best
    shares = {name: seconds / result.best for name, seconds in phases_of(result) if seconds or name == UNATTRIBUTED}
    below = dict.fromkeys(result.finding.below_floor, "<")
    return [below.get(name, units.percent(shares.get(name))) for name in names]
