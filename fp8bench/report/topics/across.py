"""Runs side by side: the same case in each of them, as far as it is the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fp8bench import units
from fp8bench.model import Params
from fp8bench.report.case_status import doubts, emulated
from fp8bench.report.elements import Axis, Bars, Column, Element, Field, Mark, Table, Text, Tone
from fp8bench.report.material import Material
from fp8bench.report.page.charts import lasting
from fp8bench.report.page.section import Section, sections
from fp8bench.report.panels import Result, shared_params, show_params
from fp8bench.report.words.naming import listed, many

NO_VERDICT = "measured at different times: no verdict (cross-run)"
_COST = "emulated: cost, not speed"


@dataclass(frozen=True)
class _Key:
    """What makes two cases the same but for the device: workload, its version, parameters in any order, mode."""

    workload: str
    version: str
    same: frozenset[tuple[str, str]]
    mode: str
    params: Params = field(compare=False)


# By key, then by column.
_Found = dict[_Key, dict[int, Result]]


@sections.register("across")
class Across(Section):
    """Several runs: only like with like."""

    name = "across"
    title = "Across runs"
    lead = (
        "The best time of each case, and its speed-up over the first column: above 1x is faster. The runs were "
        "measured at different times, so a speed-up says nothing of how sure it is: no verdict (cross-run)."
    )
    rank = 35

    def elements(self, material: Material) -> Iterator[Element]:
        if len(material.entries) < 2:
            return
        titles, found = _collect(material)
        shared = {key: results for key, results in found.items() if len(results) > 1}
        lonely = len(found) - len(shared)
        if not shared:
            yield Text("No case was timed in more than one of these runs.")
            return
        settings = _settings(list(shared))
        yield _table(titles, shared, settings)
        if lonely:
            yield Text(f"{many(lonely, 'timed case')} {'is' if lonely == 1 else 'are'} in one of them only.")
        yield from _charts(titles, shared, settings)


def _collect(material: Material) -> tuple[list[str], _Found]:
    """The columns, one for each run and device, and the timed cases that stand in them."""
    titles: list[str] = []
    found: _Found = {}
    for entry in material.entries:
        devices = list(dict.fromkeys(panel.case.device for panel in entry.panels))
        first = len(titles)
        titles += [f"{entry.label} {device}" if len(devices) > 1 else entry.label for device in devices]
        for panel in entry.panels:
            for result in panel.results:
                case = result.record.case
                same = frozenset((name, repr(value)) for name, value in case.params)
                key = _Key(case.workload, case.version, same, case.mode, case.params)
                if lasting(result):
                    found.setdefault(key, {})[first + devices.index(case.device)] = result
    return titles, found


def _settings(keys: Sequence[_Key]) -> dict[_Key, str]:
    """What tells the cases of a workload apart; their versions too where there are several."""
    settings = {}
    for workload in dict.fromkeys(key.workload for key in keys):
        members = [key for key in keys if key.workload == workload]
        shared = shared_params([key.params for key in members])
        versions = len({key.version for key in members}) > 1
        for key in members:
            words = show_params(pair for pair in key.params if pair not in shared)
            settings[key] = f"{words} version {key.version}".strip() if versions else words
    return settings


def _table(titles: Sequence[str], found: _Found, settings: dict[_Key, str]) -> Table:
    columns = [Column("precision"), Column("suite"), Column("setting")]
    for number, title in enumerate(titles):
        columns.append(Column(title, number=True, unit="s", hint="best time"))
        columns += [Column("speed-up", number=True, unit="x", hint=f"over {titles[0]}")] if number else []
    rows = []
    for key, results in found.items():
        row = [Field(key.mode), Field(key.workload), Field(settings[key] or units.NONE, hint=show_params(key.params))]
        for number in range(len(titles)):
            row += [_time(results.get(number)), *([_faster(results, number)] if number else [])]
        rows.append(tuple(row))
    return Table("across-table", "Best time of each case", tuple(columns), tuple(rows))


def _time(result: Result | None) -> Field:
    if result is None:
        return Field(units.NONE, hint="not timed in this run")
    cost = emulated(result)
    hints = [*([_COST] if cost else []), *doubts(result)]
    return Field(units.seconds(result.best), result.best, Tone.DOUBT if cost else Tone.PLAIN, "; ".join(hints))


def _faster(results: dict[int, Result], number: int) -> Field:
    """Of speeds alone: what emulating costs here and there is no comparison of devices."""
    speed, doubted = _speed(results, number)
    return Field(units.NONE) if speed is None else Field(units.speed_up(speed), speed, hint=_because(doubted))


def _because(doubted: Sequence[str]) -> str:
    return "; ".join([NO_VERDICT, *doubted])


def _speed(results: dict[int, Result], number: int) -> tuple[float | None, Sequence[str]]:
    """How many times as fast as in the first column, and why to doubt it; None where one of them has no speed."""
    first, own = results.get(0), results.get(number)
    if first is None or own is None or emulated(first) or emulated(own) or not first.best or not own.best:
        return None, ()
    return first.best / own.best, list(dict.fromkeys([*doubts(first), *doubts(own)]))


def _charts(titles: Sequence[str], found: _Found, settings: dict[_Key, str]) -> Iterator[Bars]:
    """Speed against the first column, a heading a case; none where nothing has a speed in both."""
    groups = []
    for key, results in found.items():
        marks = tuple(
            Mark(title, speed, tone=Tone.DOUBT if why else Tone.PLAIN, hint=_because(why))
            for number, title in list(enumerate(titles))[1:]
            for speed, why in [_speed(results, number)]
            if speed is not None
        )
        if marks:
            groups.append((" ".join(filter(None, (key.workload, settings[key], key.mode))), marks))
    if not groups:
        return
    speeds = [mark.value for _, marks in groups for mark in marks]
    description = (
        f"{listed(titles[1:])} against {titles[0]}, in {many(len(groups), 'case')}: "
        f"from {units.speed_up(min(speeds))} to {units.speed_up(max(speeds))}; {NO_VERDICT}."
    )
    title, axis = f"Speed against {titles[0]}, without a verdict", Axis(f"times as fast as {titles[0]}", "x")
    yield Bars("across-chart", title, description, axis, tuple(groups), 1.0)
