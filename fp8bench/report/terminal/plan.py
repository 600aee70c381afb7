"""What a run would do, as text: for --dry-run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from fp8bench.model import DeviceFacts, Group, Level, Plan, Support
from fp8bench.report.columns import Col, table
from fp8bench.report.elements import Page, Part, Table, Text
from fp8bench.report.panels import heading, merge_notes, shared_params, show_params
from fp8bench.report.terminal.layout import list_of
from fp8bench.report.words.naming import listed

# Of more suites and devices a table says what they would do.
_MOST_IN_FULL = 2


def page_of(plan: Plan, facts: Sequence[DeviceFacts], expected: str = "") -> Page:
    by_panel = groupby(plan, key=lambda group: (group.cases[0].case.workload, group.cases[0].case.device))
    panels = [tuple(members) for _, members in by_panel]
    if len(panels) > _MOST_IN_FULL:
        parts = [_overview(panels)]
    else:
        parts = [part for members in panels for part in _panel(members, facts)]
    running = sum(planned.runs for group in plan for planned in group.cases)
    total = f"groups: {len(plan.groups)}; cases: {running} to measure, {plan.num_cases - running} skipped"
    words = filter(None, (*(f"note: {note}" for note in plan.notes), total, expected))
    ending = Part("ending", "", tuple(map(Text, words)))
    return Page("", "", (*parts, ending))


def _overview(panels: Sequence[Sequence[Group]]) -> Part:
    cols: list[Col[Sequence[Group]]] = [
        Col("suite", lambda groups: groups[0].cases[0].case.workload),
        Col("on", lambda groups: groups[0].cases[0].case.device),
        Col("groups", len, number=True, show=str),
        Col("cases", lambda groups: sum(case.runs for group in groups for case in group.cases), number=True, show=str),
        Col("skipped", lambda groups: sum(not case.runs for group in groups for case in group.cases) or None,
            number=True, show=str),
        Col("native", lambda groups: _modes(groups, Level.NATIVE)),
        Col("emulated", lambda groups: _modes(groups, Level.EMULATED)),
    ]  # fmt: skip
    words = "Name one suite to see its groups, and why what is skipped is skipped."
    return Part("overview", "what would be measured", (table("overview", "", cols, panels), Text(words)))


def _modes(groups: Sequence[Group], level: Level) -> str:
    cases = (case for group in groups for case in group.cases if case.runs and case.support.level is level)
    return listed(list(dict.fromkeys(case.case.mode for case in cases)))


def _panel(groups: Sequence[Group], facts: Sequence[DeviceFacts]) -> Iterator[Part]:
    case = groups[0].cases[0].case
    shared = shared_params([group.cases[0].case.params for group in groups])
    places = [show_params(pair for pair in group.cases[0].case.params if pair not in shared) for group in groups]
    lines = []  # 'one group: fp32 (reference), bf16; skip nvfp4'
    for group, place in zip(groups, places, strict=True):
        marks = {group.reference: " (reference)"}
        named = [
            (planned_case.runs, planned_case.case.mode + marks.get(number, ""))
            for number, planned_case in enumerate(group.cases)
        ]
        names, skips = (", ".join(name for runs, name in named if runs is wanted) for wanted in (True, False))
        said = "; ".join(filter(None, (names, f"skip {skips}" if skips else "")))
        lines.append(f"{place or 'one group'}: {said}")
    skipped = [
        (f"{planned_case.case.mode} skipped", planned_case.skip, place)
        for group, place in zip(groups, places, strict=True)
        for planned_case in group.cases
        if not planned_case.runs
    ]
    lines += merge_notes(skipped, len(groups))
    title = heading(case.workload, shared, case.device, facts)
    yield Part("panel", title, (_support_table(groups),))
    yield from list_of("groups", "", lines)


def _support_table(groups: Sequence[Group]) -> Table:
    """One row for each precision: how the device does it, and why. What only some groups refuse is told below."""
    cases = [case for group in groups for case in group.cases]
    running = {case.case.mode for case in cases if case.runs}
    modes = dict.fromkeys(
        (case.case.mode, case.support) for case in cases if case.runs or case.case.mode not in running
    )
    cols: list[Col[tuple[str, Support]]] = [
        Col("case", lambda row: row[0]), Col("how", lambda row: row[1].level.value),
        Col("why", lambda row: row[1].reason),
    ]  # fmt: skip
    return table("support", "", cols, modes)
