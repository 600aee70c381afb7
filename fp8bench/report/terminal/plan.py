"""What a run would do, as text: for --dry-run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from fp8bench.model import DeviceFacts, Group, Plan, PlannedCase
from fp8bench.report.elements import Column, Field, Items, Page, Part, Table, Text
from fp8bench.report.panels import heading, merge_notes, shared_params, show_params


def page_of(plan: Plan, facts: Sequence[DeviceFacts], expected: str = "") -> Page:
    """Groups, cases, what the device makes of each precision, skips, notes, and what it is `expected` to take."""
    by_panel = groupby(plan, key=lambda group: (group.cases[0].case.workload, group.cases[0].case.device))
    parts = [part for _, members in by_panel for part in _panel(tuple(members), facts)]
    running = sum(planned.runs for group in plan for planned in group.cases)
    total = f"groups: {len(plan.groups)}; cases: {running} to measure, {plan.num_cases - running} skipped"
    words = filter(None, (*(f"note: {note}" for note in plan.notes), total, expected))
    ending = Part("ending", "", tuple(map(Text, words)))
    return Page("", "", (*parts, ending))


def _panel(groups: Sequence[Group], facts: Sequence[DeviceFacts]) -> Iterator[Part]:
    """The groups of one workload on one device."""
    case = groups[0].cases[0].case
    shared = shared_params([group.cases[0].case.params for group in groups])
    places = [show_params(pair for pair in group.cases[0].case.params if pair not in shared) for group in groups]
    lines = [f"{place or 'one group'}: {_cases(group)}" for group, place in zip(groups, places, strict=True)]
    lines += merge_notes(_skips(groups, places), len(groups))
    title = heading(case.workload, shared, case.device, facts)
    yield Part("panel", title, (_support_table(groups),))
    yield Part("groups", "", (Items(tuple(map(Text, lines))),))


def _support_table(groups: Sequence[Group]) -> Table:
    """One row for each precision: how the device does it, and why. What only some groups refuse is told below."""
    cases = [one for group in groups for one in group.cases]
    running = {one.case.mode for one in cases if one.runs}
    modes = dict.fromkeys((one.case.mode, one.support) for one in cases if one.runs or one.case.mode not in running)
    rows = tuple(tuple(map(Field, (mode, support.level.value, support.reason))) for mode, support in modes)
    return Table("support", "", (Column("case"), Column("how"), Column("why")), rows)


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
