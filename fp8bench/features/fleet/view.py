"""Shows the machines of a fleet side by side, and the states of its cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from fp8bench import units
from fp8bench.features.fleet.machines import (
    LEAST_CHANGE,
    LEAST_MACHINES,
    LIMIT,
    FleetFigure,
    FleetReport,
    Machine,
    MachineAlarm,
    MachineKind,
)
from fp8bench.model.run import CellState, CellStatus, FleetPlan
from fp8bench.report.columns import Col, table
from fp8bench.report.data.plain import Rows
from fp8bench.report.elements import Element, Field, Items, Page, Part, Table, Text, Tone
from fp8bench.report.panels import together

LEGEND = (
    "kind: machines with the same hardware, software and settings; only these are compared with each other",
    "time of a case: the median call of each machine; of these the median over the kind, the fastest and the slowest",
    "time of a machine: its time over the median of its kind, in its median case",
    f"slow, fast: more than {LIMIT:.0f} median absolute deviations (MADs) from the median of its kind, and more than "
    + units.percent(LEAST_CHANGE, 0),
    f"times: outliers are named only in kinds of at least {LEAST_MACHINES} machines",
)


def _outliers(report: FleetReport) -> Table | Text:
    # Silence because nothing was compared must not read like silence because all is well.
    if not report.alarms and not any(kind.deviations for kind in report.kinds):
        return Text(f"No machine stands out; times were not compared: no kind has {LEAST_MACHINES} machines with them.")
    if not report.alarms:
        return Text("No machine stands out.", Tone.GOOD)
    cols: list[Col[MachineAlarm]] = [
        Col("machine", lambda alarm: alarm.machine),
        Col("problem", lambda alarm: alarm.what, tone=lambda alarm: Tone.BAD),
        Col("why", lambda alarm: alarm.words, below=True),
    ]
    return table("named", "", cols, report.alarms)


def _machines(report: FleetReport) -> Table:
    # A machine may have several problems, and has one row.
    problems = _problems_by_machine(report)
    cols: list[Col[Machine]] = [
        Col("machine", lambda machine: machine.name),
        Col("kind", lambda machine: ", ".join(machine.kinds)),
        Col("runs", lambda machine: str(machine.runs), number=True),
        Col("whole cells", lambda machine: Field(f"{machine.whole} of {report.settings}", machine.whole), number=True),
        Col("failed cases", lambda machine: str(machine.failed), number=True),
        Col("time", lambda machine: machine.ratio, show=units.ratio, hint="median case over its kind's"),
        Col(
            "MADs",
            lambda machine: machine.score,
            show=lambda score: f"{score:+.1f}",
            hint="distance from the median of its kind, in median absolute deviations",
        ),
        Col(
            "problem",
            lambda machine: problems.get(machine.name),
            tone=lambda machine: Tone.BAD if machine.name in problems else Tone.PLAIN,
        ),
    ]
    return table("machines", "", cols, report.machines)


def _kinds(report: FleetReport) -> Table:
    cols: list[Col[MachineKind]] = [
        Col("kind", lambda kind: kind.name),
        Col("machines", lambda kind: str(len(kind.machines)), number=True),
        Col("hardware", _hardware_of),
        Col("torch", lambda kind: dict(kind.software).get("torch")),
        Col("times", lambda kind: "compared" if kind.deviations else f"needs {LEAST_MACHINES} machines"),
        Col("differs from A in", lambda kind: "; ".join(kind.differs), below=True),
    ]
    return table("kinds", "", cols, report.kinds)


def _hardware_of(kind: MachineKind) -> str:
    # Several equal GPUs are named once; without any, the processor stands for the machine.
    devices = [value for name, value in kind.hardware if name.startswith("device ")]
    return " + ".join(dict.fromkeys(devices)) or dict(kind.hardware).get("asv_cpu", units.NONE)


def _cases(report: FleetReport) -> Table:
    figures = sorted(report.figures, key=lambda figure: figure.case)
    # Ratios to the first kind, which has most machines.
    first = {figure.case: figure for figure in figures if figure.kind == report.kinds[0].name}

    def compare_with_first(figure: FleetFigure) -> float | None:
        reference = first.get(figure.case, figure)
        is_comparable = reference is not figure and figure.kind not in report.why_not
        return figure.middle / reference.middle if is_comparable else None

    cols: list[Col[FleetFigure]] = [
        Col("case", lambda figure: figure.case),
        Col("kind", lambda figure: figure.kind),
        Col("machines", lambda figure: str(len(figure.seconds)), number=True),
        Col("time", lambda figure: figure.middle, unit="s"),
        Col("fastest", lambda figure: min(figure.seconds.values()), unit="s"),
        Col("slowest", lambda figure: max(figure.seconds.values()), unit="s"),
        Col("to A", compare_with_first, show=units.ratio, unit="x"),
        Col("not compared for", lambda figure: report.why_not.get(figure.kind, ""), below=True),
    ]
    return table("cases", "", cols, figures, main=True)


def _coverage(report: FleetReport) -> Iterator[Element]:
    complete = report.settings - len(report.lacking)
    yield Text(f"{complete} of {report.settings} cells were measured completely by at least one machine.")
    yield Items(tuple(Text(f"measured by no machine: {setting}", Tone.DOUBT) for setting in report.lacking))
    yield Items(tuple(Text(words, Tone.DOUBT) for words in report.excluded))


_TONES = {CellStatus.DONE: Tone.GOOD, CellStatus.FAILED: Tone.BAD, CellStatus.DAMAGED: Tone.BAD}
_LEGEND = (
    "begun: a run was cut off; the next worker resumes it if machine and software are the same",
    "damaged: its files have changed since they were written; a worker measures it again and leaves them unchanged",
    "took: the duration of the last attempt, with the start of its process",
)


def describe_problems(state: CellState) -> str:
    return "; ".join(filter(None, (state.why, *state.damage)))


def describe_counts(states: Sequence[CellState]) -> str:
    counts = Counter(state.status for state in states)
    # In the order of statuses, independent of the order of cells.
    return ", ".join(f"{counts[status]} {status}" for status in CellStatus if counts[status])


def status_page(plan: FleetPlan, states: Sequence[CellState]) -> Page:
    cols: list[Col[CellState]] = [
        Col("cell", lambda state: str(state.number), number=True),
        Col("setting", lambda state: state.cell.setting),
        Col("status", lambda state: state.status, tone=lambda state: _TONES.get(state.status, Tone.PLAIN)),
        Col("run", lambda state: state.run or None),
        Col("machine", lambda state: state.machine or None),
        Col("attempts", lambda state: str(len(state.attempts)), number=True),
        Col("took", lambda state: units.seconds(state.attempts[-1].seconds) if state.attempts else None, number=True),
        Col("why", describe_problems, below=True),
    ]
    elements = table("cells", "", cols, states), Text(f"{describe_counts(states)}.")
    return Page(
        f"plan {plan.id}: {plan.request.suite} in {len(plan.cells)} cells", "", (Part("cells", "", elements),), _LEGEND
    )


CASE_COLUMNS = ("kind", "machine", "case", "seconds", "ratio", "named_for")


def report_rows(report: FleetReport) -> Rows:
    """Returns a row for each case on each machine."""
    problems = _problems_by_machine(report)
    rows = []
    for figure in report.figures:
        # Machines sorted by name, independent of the order of runs.
        for machine, seconds in sorted(figure.seconds.items()):
            relative = seconds / figure.middle
            rows.append((figure.kind, machine, figure.case, seconds, relative, problems.get(machine, "")))
    return CASE_COLUMNS, rows


def _problems_by_machine(report: FleetReport) -> dict[str, str]:
    problems = together((alarm.machine, alarm.what.value) for alarm in report.alarms)
    # The same problem in several kinds is listed once.
    return {machine: ", ".join(dict.fromkeys(words)) for machine, words in problems.items()}


def report_page(report: FleetReport, name: str) -> Page:
    # Machines that stand out come first: most readers need nothing else.
    parts = [
        Part("named", "Machines that stand out", (_outliers(report),)),
        Part("machines", "Machines", (_machines(report),)),
        Part("kinds", "Kinds of machines", (_kinds(report),)),
        Part("cases", "Cases side by side", (_cases(report),)),
        Part("coverage", "Coverage and exclusions", tuple(_coverage(report))),
    ]
    return Page(f"fleet report: {name}", "", tuple(parts), LEGEND)
