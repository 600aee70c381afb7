"""What a run would do, as text: for --dry-run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from fp8bench.model import DeviceFacts, Group, Plan, PlannedCase
from fp8bench.report.blocks import heading, merge_notes, shared_params, show_params
from fp8bench.report.layout import INDENT, MIN_WIDTH, Column, Row, painter, table, wrap


def render_plan(plan: Plan, facts: Sequence[DeviceFacts], width: int = 100) -> str:
    """Groups, cases, what the device makes of each precision, skips and notes; no line wider than `width`."""
    width = max(width, MIN_WIDTH)
    lines: list[str] = []
    for _, members in groupby(plan, key=lambda group: (group.cases[0].case.workload, group.cases[0].case.device)):
        lines += [*_panel(tuple(members), facts, width), ""]
    lines += [line for note in plan.notes for line in wrap(f"note: {note}", width, hang=INDENT)]
    running = sum(planned.runs for group in plan for planned in group.cases)
    total = f"groups: {len(plan.groups)}; cases: {running} to measure, {plan.num_cases - running} skipped"
    lines += wrap(total, width, hang=INDENT)
    return "\n".join(lines) + "\n"


def _panel(groups: Sequence[Group], facts: Sequence[DeviceFacts], width: int) -> list[str]:
    """The groups of one workload on one device."""
    case = groups[0].cases[0].case
    shared = shared_params([group.cases[0].case.params for group in groups])
    lines = wrap(heading(case.workload, shared, case.device, facts), width, hang=INDENT)
    lines += ["", *_support_table(groups, width), ""]
    places = [show_params(pair for pair in group.cases[0].case.params if pair not in shared) for group in groups]
    for group, place in zip(groups, places, strict=True):
        lines += wrap(f"{place or 'one group'}: {_cases(group)}", width, INDENT, INDENT)
    notes = merge_notes(_skips(groups, places), len(groups))
    return [*lines, *(line for note in notes for line in wrap(note, width, INDENT, INDENT))]


def _support_table(groups: Sequence[Group], width: int) -> list[str]:
    """One row for each precision: how the device does it, and why. What only some groups refuse is told below."""
    cases = [one for group in groups for one in group.cases]
    running = {one.case.mode for one in cases if one.runs}
    modes = dict.fromkeys((one.case.mode, one.support) for one in cases if one.runs or one.case.mode not in running)
    columns = [Column("case"), Column("how")]
    rows = [Row((mode, support.level.value), below=(support.reason,)) for mode, support in modes]
    if all(len(mode) + len(INDENT) * 3 + len("emulated") + len(one.reason) <= width for mode, one in modes):
        columns.append(Column("why"))
        rows = [Row((mode, support.level.value, support.reason)) for mode, support in modes]
    return table(columns, rows, width, painter(False))


def _cases(group: Group) -> str:
    """'fp32 (reference), bf16; skip nvfp4'."""
    names = [_name(one, index == group.reference) for index, one in enumerate(group.cases) if one.runs]
    skipped = [_name(one, index == group.reference) for index, one in enumerate(group.cases) if not one.runs]
    parts = [", ".join(names)] if names else []
    return "; ".join([*parts, f"skip {', '.join(skipped)}"] if skipped else parts)


def _name(planned: PlannedCase, is_reference: bool) -> str:
    return f"{planned.case.mode} (reference)" if is_reference else planned.case.mode


def _skips(groups: Sequence[Group], places: Sequence[str]) -> Iterable[tuple[str, str, str]]:
    """(about, reason, place) of every case that will not run."""
    for group, place in zip(groups, places, strict=True):
        for planned in group.cases:
            if not planned.runs:
                yield f"{planned.case.mode} skipped", planned.skip, place
