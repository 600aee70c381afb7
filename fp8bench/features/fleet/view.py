"""A fleet's machines beside each other, as elements for whatever shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING

from fp8bench import units
from fp8bench.features.fleet.machines import Alarm, Figure, FleetReport, Kind, Machine
from fp8bench.features.fleet.odd import FALSE_ALARMS, LEAST_MACHINES
from fp8bench.model.codec import encode
from fp8bench.model.fleet import CellState, CellStatus, FleetPlan
from fp8bench.report.columns import Col, table
from fp8bench.report.data.plain import csv_text, json_line
from fp8bench.report.elements import Axis, Bars, Column, Element, Field, Items, Mark, Page, Part, Table, Text, Tone

if TYPE_CHECKING:
    import pandas as pd


_HONEST = units.percent(1 - FALSE_ALARMS, 0)
LEGEND = (
    "kind: machines with the same hardware, software and settings; only these are held against each other one by one",
    "time of a case: the median call of each machine, and of these the median over a kind, the fastest and the slowest",
    "time of a machine: how far it is from the median of its kind, in the median of its cases",
    f"slow, fast: further from that median than in {_HONEST} of reports by chance; a spread is 1.48 median deviations",
    "slow from: a machine that takes this much longer than the median of its kind would be listed as slow",
    "bits: of a fixed set of operations by dtype, and every error of a case; the same seed has to give the same",
)


def named(report: FleetReport) -> Table | Text:
    """Machines that stand out, and by what."""
    if not report.alarms:
        return Text("No machine stands out.", Tone.GOOD)
    columns = Column("machine"), Column("problem"), Column("why", below=True)
    rows = tuple((Field(one.machine), Field(one.what, tone=Tone.BAD), Field(one.words)) for one in report.alarms)
    return Table("named", "", columns, rows)


def machines(report: FleetReport) -> Table:
    """A row a machine."""
    named = named_for(report)
    cols: list[Col[Machine]] = [
        Col("machine", lambda one: one.name),
        Col("kind", lambda one: ", ".join(one.kinds)),
        Col("runs", lambda one: str(one.runs), number=True),
        Col("whole cells", lambda one: Field(f"{one.whole} of {report.settings}", one.whole), number=True),
        Col("failed cases", lambda one: str(one.failed), number=True),
        Col("time", lambda one: one.change, number=True, show=lambda change: units.change(1 + change),
            hint="median case beside its kind's"),
        Col("problem", lambda one: named.get(one.name), tone=lambda one: Tone.BAD if one.name in named else Tone.PLAIN),
    ]  # fmt: skip
    return table("machines", "", cols, report.machines)


def charts(report: FleetReport) -> Iterator[Bars]:
    """How far each machine is from its kind, where enough are of one."""
    groups = []
    for figure in report.figures:
        marks = tuple(
            Mark(name, 1 + one.change, tone=Tone.BAD if one.odd else Tone.PLAIN)
            for name, one in sorted(figure.deviations.items())
        ) if not figure.case else ()  # fmt: skip
        if marks:
            groups.append((f"kind {figure.kind}", marks))
    if groups:
        words = "Each machine's time in its median case over the median of its kind, which is 1. Red: an outlier."
        yield Bars(
            "deviations", "Time over that of the kind's median", words, Axis("time ratio", "x"), tuple(groups), 1.0
        )


def kinds(report: FleetReport) -> Table:
    """A row a kind, and in what it differs from the first."""
    columns = (
        Column("kind"), Column("machines", number=True), Column("hardware"), Column("torch"),
        Column("slow from", number=True, hint=f"would be listed from there on; needs {LEAST_MACHINES} machines"),
        Column("differs from A in", below=True),
    )  # fmt: skip
    rows = tuple(
        (
            Field(one.name), Field(str(len(one.machines))), Field(_hardware_of(one)),
            Field(dict(one.software).get("torch", units.NONE)),
            Field(units.change(1 + one.seen_from) if one.seen_from is not None else f"needs {LEAST_MACHINES} machines"),
            Field("; ".join(one.differs)),
        )
        for one in report.kinds
    )  # fmt: skip
    return Table("kinds", "", columns, rows)


def _hardware_of(kind: Kind) -> str:
    """Its devices, else its processor."""
    told = [value for name, value in kind.hardware if name.startswith("device ")]
    return " + ".join(dict.fromkeys(told)) or dict(kind.hardware).get("asv_cpu", units.NONE)


def cases(report: FleetReport) -> Table:
    """A row a case on a kind."""
    columns = (
        Column("case"), Column("kind"), Column("machines", number=True), Column("time", number=True, unit="s"),
        Column("fastest", number=True, unit="s"), Column("slowest", number=True, unit="s"),
        Column("to A", number=True, unit="x"), Column("not compared for", below=True),
    )  # fmt: skip
    first = {one.case: one for one in report.figures if one.case and one.kind == report.kinds[0].name}
    figures = sorted((one for one in report.figures if one.case), key=lambda one: one.case)
    return Table("cases", "", columns, tuple(_case(one, first, report.why_not) for one in figures), main=True)


def _case(figure: Figure, first: Mapping[str, Figure], why_not: Mapping[str, str]) -> tuple[Field, ...]:
    own, lead = figure.seconds.values(), first.get(figure.case)
    why = why_not.get(figure.kind, "")
    ratio = figure.middle / lead.middle if lead is not None and lead is not figure and not why else None
    middle, low, high = figure.middle, min(own), max(own)
    return (
        Field(figure.case), Field(figure.kind), Field(str(len(own))), Field(units.seconds(middle), middle),
        Field(units.seconds(low), low), Field(units.seconds(high), high),
        Field(units.ratio(ratio) if ratio is not None else units.NONE, ratio), Field(why),
    )  # fmt: skip


def coverage(report: FleetReport) -> Iterator[Element]:
    """What nobody has measured, and what is in no figure."""
    whole = report.settings - len(report.lacking)
    yield Text(f"{whole} of {report.settings} cells were measured completely by at least one machine.")
    yield Items(tuple(Text(f"by no machine: {setting}", Tone.DOUBT) for setting in report.lacking))
    yield Items(tuple(Text(words, Tone.DOUBT) for words in report.excluded))


KIND_COLUMNS = ("kind", "machines", "of", "field", "value")


@dataclass(frozen=True)
class FleetFrames:
    """A report of a fleet and its tables, each made when it is first asked for; docs/outputs.md says what their columns
    hold."""

    report: FleetReport

    @cached_property
    def cases(self) -> pd.DataFrame:
        """A row for each case on each machine, as the CSV has them."""
        import pandas as pd

        return pd.DataFrame(case_rows(self.report), columns=list(CASE_COLUMNS))

    @cached_property
    def machines(self) -> pd.DataFrame:
        """A row a machine, with what it is named for."""
        import pandas as pd

        names, named = [field.name for field in fields(Machine)], named_for(self.report)
        rows = [{name: getattr(one, name) for name in names} for one in self.report.machines]
        frame = pd.DataFrame(rows, columns=names)
        return frame.assign(
            kinds=[", ".join(one.kinds) for one in self.report.machines],
            named_for=[named.get(one.name, "") for one in self.report.machines],
        )

    @cached_property
    def kinds(self) -> pd.DataFrame:
        """A row for each field by which a kind of machines is told from others."""
        import pandas as pd

        rows = [
            (kind.name, ", ".join(kind.machines), of, name, value)
            for kind in self.report.kinds
            for of, pairs in (("hardware", kind.hardware), ("software", kind.software))
            for name, value in pairs
        ]
        return pd.DataFrame(rows, columns=list(KIND_COLUMNS))

    @cached_property
    def alarms(self) -> pd.DataFrame:
        """A row for each thing that a machine is named for."""
        import pandas as pd

        names = [field.name for field in fields(Alarm)]
        return pd.DataFrame([(one.machine, one.what.value, one.words) for one in self.report.alarms], columns=names)


_TONES = {CellStatus.DONE: Tone.GOOD, CellStatus.FAILED: Tone.BAD}
_LEGEND = (
    "begun: a run was cut off, and is resumed by the next worker where machine and software are the same",
    "took: seconds of the last attempt, the start of its process included",
)


def counts_of(states: Sequence[CellState]) -> str:
    """'2 done, 1 waiting'."""
    counts = Counter(one.status for one in states)
    return ", ".join(f"{counts[status]} {status}" for status in CellStatus if counts[status])


def status_page(plan: FleetPlan, states: Sequence[CellState]) -> Page:
    """A row a cell, and the counts."""
    columns = (
        Column("cell", number=True), Column("setting"), Column("status"), Column("run"), Column("machine"),
        Column("attempts", number=True), Column("took", number=True), Column("why", below=True),
    )  # fmt: skip
    rows = tuple(
        (
            Field(str(one.number)), Field(one.cell.setting), Field(one.status, tone=_TONES.get(one.status, Tone.PLAIN)),
            Field(one.run or units.NONE), Field(one.machine or units.NONE), Field(str(len(one.attempts))),
            Field(units.seconds(one.attempts[-1].seconds) if one.attempts else units.NONE), Field(one.why),
        )
        for one in states
    )  # fmt: skip
    cases: Counter[str] = Counter()
    for one in states:
        cases.update(dict(one.cases))
    machines = sorted({one.machine for one in states if one.machine})
    planned = sum(len(cell.cases) for cell in plan.cells)
    covered = f"Of {planned} cases {cases.get('ok', 0)} were measured" + "".join(
        f", {cases[status]} {status}" for status in ("skipped", "failed") if cases[status]
    ) + (f", on {', '.join(machines)}" if machines else "")  # fmt: skip
    title = f"plan {plan.id}: {plan.request.suite} in {len(plan.cells)} cells"
    return Page(
        title,
        "",
        (Part("cells", "", (Table("cells", "", columns, rows), Text(f"{counts_of(states)}."), Text(f"{covered}."))),),
        _LEGEND,
    )


CASE_COLUMNS = ("kind", "machine", "case", "seconds", "change", "score", "odd", "named_for")


def report_json(report: FleetReport) -> str:
    """Everything."""
    return json_line(encode(report))


def report_csv(report: FleetReport) -> str:
    """A row for each case on each machine, with '' as the case for the middle over all of them."""
    return csv_text(CASE_COLUMNS, list(case_rows(report)))


def named_for(report: FleetReport) -> dict[str, str]:
    """What each machine that is named is named for, in words with commas."""
    named: dict[str, dict[str, None]] = {}
    for alarm in report.alarms:
        named.setdefault(alarm.machine, {})[alarm.what.value] = None
    return {machine: ", ".join(words) for machine, words in named.items()}


def case_rows(report: FleetReport) -> Iterator[dict[str, object]]:
    """Of every case on every machine, and of its middle over all cases."""
    named = named_for(report)
    for figure in report.figures:
        for machine in sorted({*figure.seconds, *figure.deviations}):
            one = figure.deviations.get(machine)
            yield {
                "kind": figure.kind, "machine": machine, "case": figure.case, "seconds": figure.seconds.get(machine),
                "change": one.change if one else None, "score": one.score if one else None,
                "odd": one.odd if one else None, "named_for": named.get(machine, ""),
            }  # fmt: skip


_COLUMNS = ("plan", "cell", "setting", "status", "run", "machine", "attempts", "seconds", "why")


def status_json(plan: FleetPlan, states: Sequence[CellState]) -> str:
    """The plan, and every cell with its attempts."""
    return json_line({"plan": encode(plan), "cells": [encode(one) for one in states]})


def status_csv(plan: FleetPlan, states: Sequence[CellState]) -> str:
    """A row a cell; `seconds` are those of its last attempt."""
    rows = [
        {
            "plan": plan.id, "cell": one.number, "setting": one.cell.setting, "status": one.status.value,
            "run": one.run, "machine": one.machine, "attempts": len(one.attempts),
            "seconds": one.attempts[-1].seconds if one.attempts else None, "why": one.why,
        }
        for one in states
    ]  # fmt: skip
    return csv_text(_COLUMNS, rows)


def report_page(report: FleetReport, name: str, drawn: bool = False) -> Page:
    """What is named, then what it rests on; charts too where they can be `drawn`."""
    shown = tuple(charts(report)) if drawn else ()
    parts = [
        Part("named", "Machines that stand out", (named(report),)),
        Part("machines", "Machines", (machines(report), *shown)),
        Part("kinds", "Kinds of machines", (kinds(report),)),
        Part("cases", "Cases side by side", (cases(report),)),
        Part("coverage", "Coverage and exclusions", tuple(coverage(report))),
    ]
    return Page(f"fleet report: {name}", "", tuple(parts), LEGEND)
