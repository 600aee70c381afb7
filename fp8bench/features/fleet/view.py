"""Shows the machines of a fleet next to each other, and the states of a plan's cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from fp8bench import units
from fp8bench.features.fleet.machines import (
    MIN_MACHINES,
    MIN_OUTLIER_CHANGE,
    OUTLIER_DEVIATIONS,
    FleetFigure,
    FleetReport,
    Machine,
    MachineAlarm,
    MachineKind,
)
from fp8bench.model.run import CellState, CellStatus, FleetPlan
from fp8bench.report.columns import Col, table
from fp8bench.report.data.plain import PlainRows
from fp8bench.report.elements import Element, Field, Page, Part, Table, Text, TextList, Tone
from fp8bench.report.panels import together

LEGEND = (
    "kind: machines with the same hardware, software and settings; only such machines are compared with each other",
    "time of a case: each machine has its median call; shown are their median over the kind, fastest and slowest",
    "time of a machine: its time over the median time of its kind, in its median case",
    (
        f"slow, fast: off the median of the kind by more than {units.percent(MIN_OUTLIER_CHANGE, 0)} "
        f"and {OUTLIER_DEVIATIONS:.0f} median absolute deviations (MADs)"
    ),
    f"times: outliers are named only in kinds of at least {MIN_MACHINES} machines",
)


def _make_outliers_table(report: FleetReport) -> Table | Text:
    # If no times were compared, "No machine stands out" alone would be misleading.
    if not report.alarms and not any(kind.deviations for kind in report.kinds):
        return Text(f"No machine stands out; times were not compared: no kind has {MIN_MACHINES} machines with them.")
    if not report.alarms:
        return Text("No machine stands out.", Tone.GOOD)
    cols: list[Col[MachineAlarm]] = [
        Col("machine", "machine"),
        Col("problem", "what", tone=lambda alarm: Tone.BAD),
        Col("why", "words", below=True),
    ]
    return table("named", "", cols, report.alarms)


def _machines_table(report: FleetReport) -> Table:
    # Each machine has one row, even if it has several problems.
    problems_by_machine = _describe_machine_problems(report)
    cols: list[Col[Machine]] = [
        Col("machine", "name"),
        Col("kind", lambda machine: ", ".join(machine.kinds)),
        Col("runs", lambda machine: str(machine.runs), number=True),
        Col(
            "whole cells",
            lambda machine: Field(f"{machine.whole} of {report.settings}", machine.whole),
            number=True,
        ),
        Col("failed cases", lambda machine: str(machine.failed), number=True),
        Col("time", "ratio", show=units.ratio, hint="median case over its kind's"),
        Col(
            "MADs",
            "score",
            show=lambda score: f"{score:+.1f}",
            hint="distance from the median of its kind, in median absolute deviations",
        ),
        Col(
            "problem",
            lambda machine: problems_by_machine.get(machine.name),
            tone=lambda machine: Tone.BAD if machine.name in problems_by_machine else Tone.PLAIN,
        ),
    ]
    return table("machines", "", cols, report.machines)


def _make_machine_kinds_table(report: FleetReport) -> Table:
    cols: list[Col[MachineKind]] = [
        Col("kind", "name"),
        Col("machines", lambda kind: str(len(kind.machines)), number=True),
        Col("hardware", _hardware_name),
        Col("torch", lambda kind: dict(kind.software).get("torch")),
        Col("times", lambda kind: "compared" if kind.deviations else f"needs {MIN_MACHINES} machines"),
        Col("differs from A in", lambda kind: "; ".join(kind.differs), below=True),
    ]
    return table("kinds", "", cols, report.kinds)


def _hardware_name(kind: MachineKind) -> str:
    # Equal GPUs are named once. A machine without GPUs is named by its processor.
    devices = [value for name, value in kind.hardware if name.startswith("device ")]
    return " + ".join(dict.fromkeys(devices)) or dict(kind.hardware).get("asv_cpu", units.NONE)


def _make_fleet_cases_table(report: FleetReport) -> Table:
    figures = sorted(report.figures, key=lambda figure: figure.case)
    # Times of other kinds of machines are divided by those of the first kind, which has the most machines.
    figures_of_first_kind = {figure.case: figure for figure in figures if figure.kind == report.kinds[0].name}

    def compare_with_first(figure: FleetFigure) -> float | None:
        reference = figures_of_first_kind.get(figure.case, figure)
        is_comparable = reference is not figure and figure.kind not in report.why_not
        return figure.median_seconds / reference.median_seconds if is_comparable else None

    cols: list[Col[FleetFigure]] = [
        Col("case", "case"),
        Col("kind", "kind"),
        Col("machines", lambda figure: str(len(figure.seconds)), number=True),
        Col("time", "median_seconds", unit="s"),
        Col("fastest", lambda figure: min(figure.seconds.values()), unit="s"),
        Col("slowest", lambda figure: max(figure.seconds.values()), unit="s"),
        Col("to A", compare_with_first, show=units.ratio, unit="x"),
        Col("not compared for", lambda figure: report.why_not.get(figure.kind, ""), below=True),
    ]
    return table("cases", "", cols, figures, main=True)


def _yield_coverage_elements(report: FleetReport) -> Iterator[Element]:
    complete_cell_count = report.settings - len(report.lacking)
    yield Text(f"{complete_cell_count} of {report.settings} cells were measured completely by at least one machine.")
    yield TextList(tuple(Text(f"measured by no machine: {setting}", Tone.DOUBT) for setting in report.lacking))
    yield TextList(tuple(Text(sentence, Tone.DOUBT) for sentence in report.excluded))


_TONE_BY_CELL_STATUS = {CellStatus.DONE: Tone.GOOD, CellStatus.FAILED: Tone.BAD, CellStatus.DAMAGED: Tone.BAD}
_STATUS_LEGEND = (
    "begun: a run was interrupted; the next worker resumes it if machine and software are the same",
    "damaged: files of the cell changed after they were written; a worker measures it again and keeps the files",
    "took: the duration of the last attempt, with the start of its process",
)


def describe_cell_problems(state: CellState) -> str:
    return "; ".join(filter(None, (state.why, *state.damage)))


def describe_status_counts(states: Sequence[CellState]) -> str:
    counts = Counter(state.status for state in states)
    # Use the order of the enum, so that the text does not depend on the order of cells.
    return ", ".join(f"{counts[status]} {status}" for status in CellStatus if counts[status])


def status_page(plan: FleetPlan, states: Sequence[CellState]) -> Page:
    cols: list[Col[CellState]] = [
        Col("cell", lambda state: str(state.number), number=True),
        Col("setting", "cell.setting"),
        Col("status", "status", tone=lambda state: _TONE_BY_CELL_STATUS.get(state.status, Tone.PLAIN)),
        Col("run", lambda state: state.run or None),
        Col("machine", lambda state: state.machine or None),
        Col("attempts", lambda state: str(len(state.attempts)), number=True),
        Col("took", lambda state: units.seconds(state.attempts[-1].seconds) if state.attempts else None, number=True),
        Col("why", describe_cell_problems, below=True),
    ]
    elements = table("cells", "", cols, states), Text(f"{describe_status_counts(states)}.")
    return Page(
        f"plan {plan.id}: {plan.request.suite} in {len(plan.cells)} cells",
        "",
        (Part("cells", "", elements),),
        _STATUS_LEGEND,
    )


CASE_COLUMNS = ("kind", "machine", "case", "seconds", "ratio", "named_for")


def list_fleet_rows(report: FleetReport) -> PlainRows:
    """Returns a row for each case on each machine."""
    problems_by_machine = _describe_machine_problems(report)
    rows = []
    for figure in report.figures:
        # Sort machines by name, so that rows do not depend on the order of runs.
        for machine, seconds in sorted(figure.seconds.items()):
            ratio_to_median_seconds = seconds / figure.median_seconds
            rows.append(
                (
                    figure.kind,
                    machine,
                    figure.case,
                    seconds,
                    ratio_to_median_seconds,
                    problems_by_machine.get(machine, ""),
                )
            )
    return CASE_COLUMNS, rows


def _describe_machine_problems(report: FleetReport) -> dict[str, str]:
    problems_by_machine = together((alarm.machine, alarm.what.value) for alarm in report.alarms)
    # Several alarms of a machine may be about the same problem.
    return {machine: ", ".join(dict.fromkeys(names)) for machine, names in problems_by_machine.items()}


def report_page(report: FleetReport, name: str) -> Page:
    # Machines that stand out come first, because most users need nothing else.
    parts = [
        Part("named", "Machines that stand out", (_make_outliers_table(report),)),
        Part("machines", "Machines", (_machines_table(report),)),
        Part("kinds", "Kinds of machines", (_make_machine_kinds_table(report),)),
        Part("cases", "Cases side by side", (_make_fleet_cases_table(report),)),
        Part("coverage", "Coverage and exclusions", tuple(_yield_coverage_elements(report))),
    ]
    return Page(f"fleet report: {name}", "", tuple(parts), LEGEND)
