"""Tapes as text for a terminal: the counts of each, then operators by phase, the largest first, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from fp8bench import units
from fp8bench.analysis.tapes import Row, Sums, Taped, intensity_of, narrow_over_wide, share_of, side_by_side
from fp8bench.model import Tape
from fp8bench.report.elements import Column, Element, Field, Items, Page, Part, Table, Text, Tone
from fp8bench.report.panels import together
from fp8bench.report.words.naming import phase_words
from fp8bench.report.words.tape import remarks

_WIDTHS = (8, 4, 32)
_LEGEND = (
    "declared: FLOPs that the suite declares; unknown: calls of operators that have no formula, in no sum of FLOPs",
    "8 bits, 4 bits, 32 bits: the share of FLOPs that multiply elements so wide; 8/32: the first over the last",
    "operators: FLOPs, bytes read and written in so many calls; (b) in backward",
)


def page_of(title: str, taped: Sequence[Taped]) -> Page:
    """A part for each setting: its modes side by side."""
    parts = [
        Part(f"setting-{place}", setting, tuple(_elements(some, [])))
        for place, (setting, some) in enumerate(together((one.setting, one) for one in taped).items())
    ]
    return Page(title, "", tuple(parts), _LEGEND)


def page_against(title: str, taped: Sequence[Taped]) -> Page:
    """A part for each case: its tapes side by side, and of their operators those that are not alike."""
    parts = []
    for place, some in enumerate(together(((one.setting, one.mode), one) for one in taped).values()):
        differ = [Text("every operator is called as often, on as many bytes, in both")]
        parts.append(Part(f"case-{place}", f"{some[0].setting} {some[0].mode}", tuple(_elements(some, differ))))
    return Page(title, "", tuple(parts), _LEGEND)


def _elements(taped: Sequence[Taped], where_alike: list[Text]) -> list[Element]:
    """With something to say where all operators are alike, those that are alike are left out."""
    known = [(one, one.tape) for one in taped if one.tape is not None]
    found: list[Element] = []
    if known:
        rows = side_by_side([tape for _, tape in known])
        shown = [row for row in rows if row.differs] if where_alike and len(known) > 1 else rows
        found += [_counts(known), _operators(known, shown)] if shown else [_counts(known), *where_alike]
    words = [f"{one.name}: no tape: {one.why}" for one in taped if one.tape is None]
    words += [f"{one.name}: {remark}" for one, tape in known for remark in remarks(tape)]
    return [*found, Items(tuple(map(Text, words)))] if words else found


def _counts(known: Sequence[tuple[Taped, Tape]]) -> Table:
    """A row for each tape: its sums, and what follows from them."""
    titles = ("FLOPs", "declared", "bytes", "FLOP/B", "launches", "unknown", "8 bits", "4 bits", "32 bits", "8/32")
    rows = []
    for one, tape in known:
        shares = [units.percent(share_of(tape, bits)) for bits in _WIDTHS]
        words = (
            units.count(tape.flops), units.count(one.declared) if one.declared else units.NONE, units.size(tape.bytes),
            units.count(intensity_of(tape)), str(tape.launches), str(tape.unknown), *shares,
            units.ratio(narrow_over_wide(tape)),
        )  # fmt: skip
        rows.append((Field(one.name), *map(Field, words)))
    return Table("counts", "", (Column("tape"), *(Column(title, number=True) for title in titles)), tuple(rows))


def _operators(known: Sequence[tuple[Taped, Tape]], rows: Sequence[Row]) -> Table:
    columns = (
        Column("phase", shared=True), Column("operator"), *(Column(one.name or "now", number=True) for one, _ in known)
    )  # fmt: skip
    return Table("operators", "", columns, tuple(_row(row) for row in rows))


def _row(row: Row) -> tuple[Field, ...]:
    tone = Tone.STRONG if row.differs else Tone.PLAIN
    name = row.operator + (" (b)" if row.backward else "")
    return Field(phase_words(row.phase)), Field(name, tone=tone), *(Field(_sums(one)) for one in row.sums)


def _sums(one: Sums) -> str:
    """'1.43 GFLOP, 33.6 MiB in 36'."""
    if not one.calls:
        return units.NONE
    flops = "unknown, " if one.flops is None else f"{units.count(one.flops, 'FLOP')}, " if one.flops else ""
    return f"{flops}{units.size(one.bytes)} in {one.calls}"
