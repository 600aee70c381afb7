"""The table of what a step's memory is for at its highest point, and a sentence for each precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fp8bench import units
from fp8bench.model import MemoryUse
from fp8bench.report.blocks import Panel, Result, ResultGroup
from fp8bench.report.layout import INDENT, Column, Paint, Row, SectionRow, table, wrap
from fp8bench.report.legend import MEMORY_TITLES, PHASE_TITLES
from fp8bench.report.memories import highest_in, roles_in, roles_of, sentences, share_of, use_of
from fp8bench.report.naming import named_cases

# What others count, by the field that holds it.
_COUNTED: tuple[tuple[str, Callable[[MemoryUse], int | None]], ...] = (
    ("reserved", lambda use: use.reserved),
    ("process", lambda use: use.process),
    ("resident", lambda use: use.resident),
)


def tells(panel: Panel) -> bool:
    """Whether memory is for more than one thing in any case of a panel."""
    return any(len(roles_of(one)) > 1 for one in panel.results)


def counted(results: Sequence[Result]) -> list[tuple[str, Callable[[MemoryUse], int | None]]]:
    """Of what others count, what is known of any case."""
    uses = [use for one in results if (use := use_of(one.record)) is not None]
    return [(name, count) for name, count in _COUNTED if any(count(use) is not None for use in uses)]


def memory_table(panel: Panel, width: int, paint: Paint) -> list[str]:
    """A title with the unit, a row for each case, and the sentences; no lines where the roles tell nothing."""
    if not tells(panel):
        return []
    roles, others = roles_in(panel.results), counted(panel.results)
    uses = [use for one in panel.results if (use := use_of(one.record)) is not None]
    scale, unit = units.binary_unit(max(use.peak for use in uses))

    def shown(size: int | None) -> str:
        if not size:
            return units.NONE
        return units.significant(size / scale) if size / scale >= 0.01 else "<0.01"

    columns = [
        Column("case"), Column("peak", right=True), Column(f"vs {panel.reference or 'reference'}", right=True),
        *(Column(MEMORY_TITLES[role], right=True) for role in roles), Column("in"),
        *(Column(name, right=True) for name, _ in others),
    ]  # fmt: skip
    rows: list[Row | SectionRow] = []
    for group in panel.groups:
        known = [(one, use) for one in group.results if (use := use_of(one.record)) is not None]
        if known and len(panel.groups) > 1:
            rows.append(SectionRow(panel.place(group)))
        for one, use in known:
            parts = roles_of(one)
            counts = [shown(count(use)) for _, count in others]
            cells = (shown(use.peak), _share(group, one), *(shown(parts.get(role)) for role in roles), _phase(use))
            rows.append(Row((one.mode, *cells, *counts)))
    said = [line for text in sentences(panel, named_cases(panel)) for line in wrap(text, width, INDENT, INDENT)]
    title = f"memory at the highest point of a step, in {unit}"
    return [*wrap(title, width, hang=INDENT), *table(columns, rows, width, paint), *said]


def _share(group: ResultGroup, result: Result) -> str:
    return units.ratio(share_of(group, result))


def _phase(use: MemoryUse) -> str:
    phase = next(iter(highest_in(use)), units.NONE)
    return PHASE_TITLES.get(phase, phase)
