"""A fleet's machines beside each other, as elements for whatever shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fp8bench import units
from fp8bench.analysis.fleet.found import Figure, FleetReport, Kind
from fp8bench.analysis.fleet.outliers import FALSE_ALARMS, LEAST_MACHINES
from fp8bench.report.elements import Axis, Bars, Column, Element, Field, Items, Mark, Table, Text, Tone

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
    columns = (
        Column("machine"), Column("kind"), Column("runs", number=True), Column("whole cells", number=True),
        Column("failed cases", number=True), Column("time", number=True, hint="median case beside its kind's"),
        Column("problem"),
    )  # fmt: skip
    rows = []
    for one in report.machines:
        why = ", ".join(dict.fromkeys(alarm.what.value for alarm in report.alarms if alarm.machine == one.name))
        change = units.change(1 + one.change) if one.change is not None else units.NONE
        rows.append((
            Field(one.name), Field(", ".join(one.kinds)), Field(str(one.runs)),
            Field(f"{one.whole} of {report.settings}", one.whole), Field(str(one.failed)), Field(change, one.change),
            Field(why or units.NONE, tone=Tone.BAD if why else Tone.PLAIN),
        ))  # fmt: skip
    return Table("machines", "", columns, tuple(rows))


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
