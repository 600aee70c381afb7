"""A run, or a plan, as text for a terminal: panels of tables, what they mean, what did not go well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fp8bench import units
from fp8bench.model import DeviceFacts, Finding, Label, Level, Run, Status, Verdict
from fp8bench.report import legend
from fp8bench.report.blocks import Panel, Result, heading, merge_notes, panels_of
from fp8bench.report.capacity_table import capacity_table
from fp8bench.report.data_table import data_table
from fp8bench.report.energies import absences, doubts_within, figures_of, ratio_within
from fp8bench.report.energy_table import energy_table
from fp8bench.report.layout import INDENT, MIN_WIDTH, Paint, Tone, painter, wrap
from fp8bench.report.memories import PEAK
from fp8bench.report.memory_table import counted, memory_table, tells
from fp8bench.report.plan_text import render_plan as render_plan
from fp8bench.report.run_facts import missing_of, notes_of
from fp8bench.report.standing import emulated
from fp8bench.report.tables import main_error, main_table, noise_floor, phases_table, show_value
from fp8bench.report.tensor_panels import about_tensors
from fp8bench.report.tensor_text import LEGEND, tensor_lines


def render(run: Run, findings: Mapping[str, Finding], width: int = 100, color: bool = False) -> str:
    """The report of a run; `findings` by case id. No line is wider than `width` (40 at least).

    Without colour the text depends on nothing but its arguments.
    """
    width = max(width, MIN_WIDTH)
    paint = painter(color)
    panels = panels_of(run, findings)
    lines: list[str] = []
    for panel in panels:
        lines += [*_panel(panel, run.devices, width, paint), ""]
    if not panels:
        lines += ["Nothing was measured.", ""]
    lines += [*_legend(panels, width, paint), *_ending(run, width, paint)]
    return "\n".join(lines) + "\n"


def _panel(panel: Panel, devices: Sequence[DeviceFacts], width: int, paint: Paint) -> list[str]:
    title = wrap(heading(panel.case.workload, panel.shared, panel.case.device, devices), width, hang=INDENT)
    lines = [paint(line, Tone.STRONG) for line in title]
    if about_tensors(panel):
        lines += ["", *tensor_lines(panel, width, paint)]
    else:
        lines += [*wrap(_reference_line(panel), width, INDENT, INDENT), "", *main_table(panel, width, paint)]
        phases = phases_table(panel, width, paint)
        lines += ["", "phases, as shares of the best case", *phases] if phases else []
        energy = energy_table(panel, width, paint)
        lines += ["", *energy] if energy else []
        memory = memory_table(panel, width, paint)
        lines += ["", *memory] if memory else []
    capacity = capacity_table(panel, width, paint)
    lines += ["", *capacity] if capacity else []
    data = data_table(panel, width, paint)
    if data:
        lines += ["", *data]
    numbers = [] if about_tensors(panel) else _numbers(panel)
    if numbers:
        lines += ["", "numbers"]
    lines += [line for text in numbers for line in wrap(text, width, INDENT, INDENT)]
    notes = merge_notes(_notes(panel), len(panel.groups))
    if notes:
        lines += ["", "notes"]
    return lines + [line for text in notes for line in wrap(text, width, INDENT, INDENT)]


def _reference_line(panel: Panel) -> str:
    """What the others are held against; the noise floor too where one line can say it for all."""
    measured = any(result.record.is_reference for result in panel.results)
    reference = panel.reference if measured else f"none ({panel.reference or 'none planned'} was not measured)"
    floor = f"; noise floor (A/A): {noise_floor(panel.groups[0])}" if len(panel.groups) == 1 else ""
    return f"reference: {reference}{floor}"


def _numbers(panel: Panel) -> list[str]:
    """Measurements beside the main error, and ratios by medians, a line for each metric and group."""
    lines = []
    elsewhere = _told_elsewhere(panel)
    for group in panel.groups:
        by_metric: dict[str, list[str]] = {}
        for result in group.results:
            for one in result.record.measurements:
                if one.metric == elsewhere:
                    continue
                label = f"{one.metric} ({one.phase})" if one.phase else one.metric
                how = " (emulated)" if one.unit == "B" and emulated(result) else ""
                by_metric.setdefault(label, []).append(f"{result.mode} {show_value(one)}{how}")
        medians = [
            f"{one.mode} {units.ratio(one.finding.median_ratio)}"
            for one in group.results
            if one.finding and one.finding.median_ratio is not None and not emulated(one)
        ]
        if medians:
            by_metric[f"time vs {panel.reference} by medians"] = medians
        place = f" at {panel.place(group)}" if len(panel.groups) > 1 else ""
        others = {label: texts for label, texts in by_metric.items() if label != main_error(panel)}
        lines += [f"{label}{place}: {', '.join(texts)}" for label, texts in others.items()]
    return lines


def _notes(panel: Panel) -> Iterable[tuple[str, str, str]]:
    """(about, text, place) of everything that was skipped, failed or has no clear verdict."""
    for group in panel.groups:
        place = panel.place(group)
        for result in group.results:
            record, finding = result.record, result.finding
            if record.status is not Status.OK:
                word = "FAILED" if record.status is Status.FAILED else record.status.value
                yield f"{result.mode} {word}", record.reason, place
                continue
            if finding is not None and finding.why:
                word = "no verdict" if finding.verdict is Verdict.NONE else finding.verdict.value
                yield f"{result.mode} {word}", finding.why, place
            if Label.EAGER_QUANTISER in result.labels and not about_tensors(panel):
                yield f"{result.mode} {Label.EAGER_QUANTISER}", result.reason(Label.EAGER_QUANTISER), place
            if record.detail:  # it was timed, but something else about it could not be had
                yield result.mode, record.detail, place
        for modes, doubt in [] if about_tensors(panel) else doubts_within(group):
            yield modes, doubt, place


def _legend(panels: Sequence[Panel], width: int, paint: Paint) -> list[str]:
    """A line for every word of the report that needs one, and only for those that occur."""
    timed = [panel for panel in panels if not about_tensors(panel)]
    results = [result for panel in timed for result in panel.results]
    tensors = [LEGEND] if len(timed) < len(panels) else []
    looked_at = any(result.record.statistics for panel in panels for result in panel.results)
    data = [legend.DATA] if looked_at else []
    if not any(result.best for result in results):
        return _quiet([*tensors, *data] if tensors else [], width, paint)
    lines = [legend.BEST, *_ratio_legends(timed), legend.PHASES]
    if any(result.finding and result.finding.below_floor for result in results):
        lines.append(legend.BELOW_FLOOR)
    if any(result.finding and result.finding.hard for result in results):
        lines.append(legend.HARD)
    if any(emulated(result) and result.best for result in results):
        lines.append(legend.EMULATED)
    lines += [
        *_error_legends(timed),
        *_number_legends(timed),
        *_energy_legends(timed),
        *_memory_legends(timed),
        *tensors,
        *data,
    ]
    seen = {label for result in results for label in result.labels}
    lines += [f"{label}: {legend.LABELS[label]}" for label in Label if label in seen]
    return _quiet(lines, width, paint)


def _quiet(legends: Sequence[str], width: int, paint: Paint) -> list[str]:
    """Under their heading, if there are any."""
    if not legends:
        return []
    text = ["how to read this", *(line for one in legends for line in wrap(one, width, INDENT, INDENT))]
    return [*(paint(line, Tone.QUIET) for line in text), ""]


def _ratio_legends(panels: Sequence[Panel]) -> list[str]:
    """The ratio's meaning by reference, and the rule of verdicts, if there is a ratio."""
    lines = []
    for reference in dict.fromkeys(panel.reference for panel in panels):
        compared = [_ratio_level(one) for panel in panels if panel.reference == reference for one in panel.results]
        levels = sorted({level for level in compared if level is not None})
        if levels:
            shown = "/".join(units.percent(level).replace(".0%", "%") for level in levels)
            lines.append(legend.time_versus(reference, shown))
    return [*lines, legend.VERDICT] if lines else []


def _ratio_level(result: Result) -> float | None:
    if result.finding is None or result.finding.ratio is None or result.record.support.level is Level.EMULATED:
        return None
    return result.finding.ratio.level


def _error_legends(panels: Sequence[Panel]) -> list[str]:
    """What the error column holds; with the suites where it is not the same in all."""
    suites: dict[str, list[str]] = {}
    for panel in panels:
        metric = main_error(panel)
        measured = [one.record.measurement(metric) for one in panel.results]
        described = next((one.description for one in measured if one and one.description), "relative, 0 is exact")
        if metric:
            suites.setdefault(f"{metric} ({described})", []).append(panel.case.workload)
    if len(suites) == 1:
        return [f"error: {next(iter(suites))}"]
    return [f"error of {', '.join(dict.fromkeys(names))}: {words}" for words, names in suites.items()]


def _number_legends(panels: Sequence[Panel]) -> list[str]:
    """What stands under 'numbers', where a measurement says so itself."""
    described = {
        f"{one.metric}: {one.description}"
        for panel, shown in ((panel, (main_error(panel), _told_elsewhere(panel))) for panel in panels)
        for result in panel.results
        for one in result.record.measurements
        if one.description and one.metric not in shown
    }
    return sorted(described)


def _told_elsewhere(panel: Panel) -> str:
    """The metric that has a table of its own; '' where it has none."""
    return PEAK if tells(panel) else ""


def _memory_legends(panels: Sequence[Panel]) -> list[str]:
    """What the memory tables hold, where there are any."""
    told = [panel for panel in panels if tells(panel)]
    others = dict.fromkeys(name for panel in told for name, _ in counted(panel.results))
    known = "; ".join(f"{name}: {legend.MEMORY_COUNTED[name]}" for name in others)
    return list(filter(None, (legend.MEMORY, known))) if told else []


def _energy_legends(panels: Sequence[Panel]) -> list[str]:
    """What the energy tables hold, where there are any."""
    found = [(panel, group, one) for panel in panels for group in panel.groups for one in group.results]
    found = [(panel, group, one) for panel, group, one in found if figures_of(one) is not None]
    if not found:
        return []
    compared = dict.fromkeys(panel.reference for panel, group, one in found if ratio_within(group, one) is not None)
    cost = [legend.ENERGY_EMULATED] if any(emulated(one) for _, _, one in found) else []
    return [legend.ENERGY, *map(legend.energy_versus, compared), *cost]


def _ending(run: Run, width: int, paint: Paint) -> list[str]:
    """Plan notes, troubles, how much of the plan has a record, and where the run is kept."""
    lines = [line for note in notes_of(run) for line in wrap(f"note: {note}", width, hang=INDENT)]
    lines += [line for text in absences(run) for line in wrap(text, width, hang=INDENT)]
    for trouble in run.troubles:
        lines += [paint(line, Tone.DOUBT) for line in wrap(f"trouble: {trouble}", width, hang=INDENT)]
    missing = missing_of(run)
    if missing:
        lines += wrap(missing, width, hang=INDENT)
    kept = f"stored in {run.path}" if run.path else "this run was not stored"
    return lines + wrap(kept, width, hang=INDENT)
