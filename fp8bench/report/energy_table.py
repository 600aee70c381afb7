"""The table of what a step of each case takes in joules, and its device in watts."""

from __future__ import annotations

from collections.abc import Sequence

from fp8bench import units
from fp8bench.analysis.energy import Demand, EnergyFigures
from fp8bench.report.blocks import Panel, Result, ResultGroup
from fp8bench.report.energies import (
    PER_WORDS,
    figures_of,
    named_source,
    ratio_within,
    show_ratio,
    show_windows,
    sources_of,
)
from fp8bench.report.layout import INDENT, Column, Paint, Row, SectionRow, Tone, table, wrap
from fp8bench.report.standing import emulated

# Words are padded to this, so that the ratios after them stand in a column.
_WORD_WIDTH = len(Demand.UNCLEAR)
_TONES = {Demand.LESS: Tone.GOOD, Demand.MORE: Tone.BAD, Demand.UNCLEAR: Tone.DOUBT}
_EMULATED = "emulated: cost"


def energy_table(panel: Panel, width: int, paint: Paint) -> list[str]:
    """A title that names the source, and a row for each case with windows; no lines where there is none."""
    sources = sources_of(panel.results)
    if not sources:
        return []
    versus = f"energy vs {panel.reference or 'reference'}"
    rows: list[Row | SectionRow] = []
    counts = _counts(panel)
    for group in panel.groups:
        found = [(one, figures) for one in group.results if (figures := figures_of(one)) is not None]
        if found and len(panel.groups) > 1:
            rows.append(SectionRow(panel.place(group)))
        rows += [_row(group, one, figures, versus, counts, len(sources) > 1) for one, figures in found]
    columns = [
        Column("case"), Column("energy", right=True), Column(versus), Column("net", right=True),
        *(Column(f"per {PER_WORDS[name]}", right=True) for name in counts),
        Column("power", right=True), Column("idle", right=True), Column("windows"), Column("clock", right=True),
        *([Column("source")] if len(sources) > 1 else []),
    ]  # fmt: skip
    return [*wrap(_title(sources), width, hang=INDENT), *table(columns, rows, width, paint)]


def _title(sources: Sequence[str]) -> str:
    if len(sources) == 1:
        return f"energy of a step, by {named_source(sources[0])}"
    return f"energy of a step; sources differ, and their figures do not compare ({', '.join(sources)})"


def _counts(panel: Panel) -> list[str]:
    """The counts of work that any case has a figure for, the most telling alone."""
    found = {name for one in panel.results if (figures := figures_of(one)) is not None for name, _ in figures.per[:1]}
    return [name for name in PER_WORDS if name in found]


def _row(
    group: ResultGroup, result: Result, found: EnergyFigures, versus: str, counts: Sequence[str], named: bool
) -> Row:
    per = dict(found.per)
    ratio = ratio_within(group, result)
    word = "reference" if result.record.is_reference else _EMULATED if emulated(result) else units.NONE
    cells = (
        result.mode,
        units.joules(found.gross.middle),
        f"{ratio.demand:<{_WORD_WIDTH}}  {show_ratio(ratio)}" if ratio else word,
        units.joules(found.net.middle if found.net else None),
        *(units.joules(per.get(name)) for name in counts),
        units.count(found.watts, "W"),
        units.count(found.idle, "W"),
        show_windows(found),
        units.count(found.sm_clock, "Hz"),
        *([found.source] if named else []),
    )
    return Row(cells, {versus: _TONES[ratio.demand]} if ratio else {})
