"""The two tables of a panel: what each case costs, and where its time goes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from fp8bench import units
from fp8bench.model import CELL_PHASES, UNATTRIBUTED, Interval, Level, Measurement, Record, Status, Verdict, Work
from fp8bench.report.blocks import Panel, Result, ResultGroup
from fp8bench.report.layout import Column, Paint, Row, SectionRow, Tone, table
from fp8bench.report.legend import PHASE_TITLES
from fp8bench.report.standing import Standing, emulated, named_labels, standing

# The error a reader sees first, where a workload offers more than one: the most telling.
_MAIN_ERRORS = ("gradient_error", "product_error", "update_error", "output_error")
_ERROR_SUFFIX = "_error"
_SHARE_SUFFIX = "_vanished"
_WORDS = {Verdict.NONE: units.NONE, Verdict.EMULATED: "emulated: cost, not speed"}
_TONES = {
    Standing.FASTER: Tone.GOOD,
    Standing.SLOWER: Tone.BAD,
    Standing.DOUBTED: Tone.DOUBT,
    Standing.UNSURE: Tone.DOUBT,
    Standing.FAILED: Tone.STRONG,
    Standing.SKIPPED: Tone.QUIET,
    Standing.EMULATED: Tone.QUIET,
}
_NOT_MEASURED = {Status.SKIPPED: "skipped, see notes", Status.FAILED: "FAILED, see notes"}
# Verdict words are padded to this, so that the ratios after them stand in a column.
_VERDICT_WIDTH = len("verdict")


def main_error(panel: Panel) -> str:
    """The metric of the error column; '' if nothing in the panel has an error."""
    errors = [metric for metric in panel.metrics if metric.endswith(_ERROR_SUFFIX)]
    return next((metric for metric in (*_MAIN_ERRORS, *errors) if metric in errors), "")


def value_of(measurement: Measurement | None) -> float | None:
    """What one reads of a measurement's samples: the middle one."""
    return statistics.median(measurement.samples) if measurement and measurement.samples else None


def show_value(measurement: Measurement) -> str:
    """A measurement as text, by its unit."""
    value = value_of(measurement)
    if measurement.metric.endswith(_ERROR_SUFFIX):
        return units.relative_error(value)
    if measurement.metric.endswith(_SHARE_SUFFIX) and value is not None:
        return units.share(value) if value else "0%"
    return units.measured(value, measurement.unit)


def main_table(panel: Panel, width: int, paint: Paint) -> list[str]:
    """Case by case: time, ratio and verdict, throughput, error."""
    error = main_error(panel)
    versus = f"{'verdict':<{_VERDICT_WIDTH}}  time vs {panel.reference or 'reference'}"
    columns = [
        Column("case"), Column("how"), Column("best", right=True), Column("median", right=True),
        Column("spread", right=True), Column(versus), Column("throughput", right=True), Column("error", right=True),
    ]  # fmt: skip
    wanted = [True] * 6 + [any(_has_work(one.record) for one in panel.results), bool(error)]
    rows: list[Row | SectionRow] = []
    for group in panel.groups:
        rows += _section(panel, group, f"  noise floor (A/A): {noise_floor(group)}")
        for result in group.results:
            cells = _main_cells(result, error)
            tones = {versus: tone} if (tone := _TONES.get(standing(result))) else {}
            below = (f"labels: {', '.join(named_labels(result))}",) if result.labels else ()
            rows.append(Row(tuple(cell for cell, keep in zip(cells, wanted, strict=True) if keep), tones, below))
    return table([one for one, keep in zip(columns, wanted, strict=True) if keep], rows, width, paint)


def phases_table(panel: Panel, width: int, paint: Paint) -> list[str]:
    """The phases of each measured case as shares of its best case; no lines if nothing was measured."""
    measured = [result for result in panel.results if result.best]
    present = {name for result in measured for name, seconds in phases_of(result) if seconds or name == UNATTRIBUTED}
    names = sorted(present, key=lambda name: CELL_PHASES.index(name) if name in CELL_PHASES else len(CELL_PHASES))
    columns = [Column("case"), Column("best", right=True)]
    columns += [Column(PHASE_TITLES.get(name, name), right=True) for name in names]
    rows: list[Row | SectionRow] = []
    for group in panel.groups:
        shown = [result for result in group.results if result.best]
        rows += _section(panel, group) if shown else []
        rows += [Row((one.mode, _cost(one), *_shares(one, names))) for one in shown]
    return table(columns, rows, width, paint) if measured else []


def noise_floor(group: ResultGroup) -> str:
    """'+-0.6%', or the range where cases that sat apart have floors of their own; and why measuring ended."""
    return (floor_of(group.results) or "not measured") + _stopped(group)


def floor_of(results: Iterable[Result]) -> str:
    """The A/A floor of some cases, from the lowest to the highest; '' where none was measured."""
    floors = sorted(one.finding.floor for one in results if one.finding and one.finding.floor is not None)
    if not floors:
        return ""
    low, high = (f"+-{units.percent(floor)}" for floor in (floors[0], floors[-1]))
    return low if low == high else f"{low} to {high}"


def _stopped(group: ResultGroup) -> str:
    """Why measuring ended, which tells whether more time would help."""
    reasons = dict.fromkeys(one.record.stopped for one in group.results if one.record.stopped)
    return f"; {' / '.join(reasons)}" if reasons else ""


def _section(panel: Panel, group: ResultGroup, more: str = "") -> Sequence[SectionRow]:
    return (SectionRow(f"{panel.place(group)}{more}"),) if len(panel.groups) > 1 else ()


def _main_cells(result: Result, error: str) -> tuple[str, ...]:
    record, finding = result.record, result.finding
    how = record.support.level.value
    error_text = units.relative_error(value_of(record.measurement(error)))
    if record.status is not Status.OK:
        return result.mode, how, *[units.NONE] * 3, _NOT_MEASURED[record.status], units.NONE, error_text
    median = finding.median_seconds if finding else None
    spread = units.percent(finding.spread if finding else None)
    times = units.seconds(result.best), units.seconds(median), spread
    return result.mode, how, *times, _verdict(result), show_rate(rate_of(result)), error_text


def _cost(result: Result) -> str:
    """The best case; for an emulation with the word that keeps it from being read as a speed."""
    time = units.seconds(result.best)
    return f"{Level.EMULATED} {time}" if emulated(result) else time


def _verdict(result: Result) -> str:
    word, ratio = verdict_word(result), ratio_of(result)
    return f"{word:<{_VERDICT_WIDTH}}  {units.ratio(ratio.point)} {bounds(ratio)}" if ratio else word


def verdict_word(result: Result) -> str:
    """What stands in a case's verdict cell, '-' for none."""
    if emulated(result):  # whatever else is known of it: the time of an emulation is no speed
        return f"{Verdict.REFERENCE}, emulated" if result.record.is_reference else _WORDS[Verdict.EMULATED]
    return _WORDS.get(result.finding.verdict, result.finding.verdict.value) if result.finding else units.NONE


def ratio_of(result: Result) -> Interval | None:
    """Time over the reference's time; None for emulations, which have no speed."""
    return result.finding.ratio if result.finding and not emulated(result) else None


def bounds(ratio: Interval) -> str:
    """'[0.508, 0.515]', or that there is no interval."""
    if math.isinf(ratio.half_width):
        return "[no interval]"
    low, high = (units.ratio(bound).removesuffix("x") for bound in (ratio.low, ratio.high))
    return f"[{low}, {high}]"


def _has_work(record: Record) -> bool:
    return bool(_rates(record.work))


def rate_of(result: Result) -> tuple[float, str] | None:
    """Tokens, FLOP or bytes a second in the best case, with the unit; None for emulations, which have no speed."""
    rates = _rates(result.record.work)
    if not result.best or emulated(result) or not rates:
        return None
    amount, unit = rates[0]
    return amount / result.best, unit


def show_rate(rate: tuple[float, str] | None) -> str:
    return units.count(*rate) if rate else units.NONE


def _rates(work: Work) -> list[tuple[float, str]]:
    """What a step does by each count that applies, the most telling first."""
    counts = ((work.tokens, "tok/s"), (work.flops, "FLOP/s"), (work.bytes, "B/s"))
    return [(amount, unit) for amount, unit in counts if amount]


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
    seconds = dict(phases_of(result))
    cells = []
    for name in names:
        if name in result.finding.below_floor:
            cells.append("<")
        elif seconds.get(name) or name == UNATTRIBUTED:
            cells.append(units.percent(seconds.get(name, 0.0) / result.best))
        else:
            cells.append(units.NONE)
    return cells
