"""What conform has found, as text: a line for each precision, then each cast and product that differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8bench import units
from fp8bench.model import DeviceFacts
from fp8bench.model.codec import encode
from fp8bench.model.promises import Conformity, Difference, ModeConformity
from fp8bench.report.data.plain import json_line
from fp8bench.report.elements import Column, Field, Items, Page, Part, Table, Text, Tone
from fp8bench.report.panels import together
from fp8bench.report.words.naming import listed

_LEGEND = (
    "order: every element is what a sum of the same products in another order is rounded to; it conforms",
    "rounding: each is the exact result's neighbour, and not always the nearest one",
    "overflow: what lies beyond the largest number becomes something else (NaN, infinity, the largest)",
    "layout: rows, columns or a whole operand stand in another place; scale: a factor that should not be there",
    "accumulation: sums as if kept in fewer bits than the recipe says (its option accumulator)",
    "unexplained: none of these explains all elements that differ",
    "at most: numbers of the result's own dtype in between, of a cast steps of its format",
)


def page_of(facts: DeviceFacts, found: Sequence[ModeConformity]) -> Page:
    """Of one device."""
    different = [one for mode in found for one in mode.found if one.difference not in (None, Difference.NONE)]
    parts = [Part("summary-of-modes", "", (_summary(found),))]
    if different:
        parts.append(Part("differences", "", (_differences(different),)))
    undone = list(_undone(found))
    if undone:
        parts.append(Part("undone", "not done here", (Items(tuple(map(Text, undone))),)))
    parts.append(Part("summary", "", (Text(_verdict(found), _tone(all(one.conforms for one in found))),)))
    return Page(
        f"native against emulated on {facts.key} ({facts.name}, torch {facts.torch})", "", tuple(parts), _LEGEND
    )


def _tone(conforms: bool) -> Tone:
    return Tone.GOOD if conforms else Tone.BAD


def _summary(found: Sequence[ModeConformity]) -> Table:
    columns = (
        Column("precision"), Column("here"), Column("compared", number=True), Column("same bits", number=True),
        Column("order", number=True), Column("not the same", number=True), Column("not done", number=True),
    )  # fmt: skip
    rows = []
    for mode in found:
        kinds = [one.difference for one in mode.found]
        counts = (
            sum(kind is not None for kind in kinds), kinds.count(Difference.NONE), kinds.count(Difference.ORDER),
            sum(kind is not None and not kind.conforms for kind in kinds), kinds.count(None),
        )  # fmt: skip
        numbers = [Field(str(count) if count else units.NONE) for count in counts]
        numbers[3] = Field(numbers[3].text, tone=Tone.BAD if counts[3] else Tone.PLAIN)
        rows.append((Field(mode.mode), Field(mode.support.level.value), *numbers))
    return Table("modes", "", columns, tuple(rows))


def _differences(different: Sequence[Conformity]) -> Table:
    columns = (
        Column("precision"), Column("what"), Column("shape"), Column("difference"), Column("differ", number=True),
        Column("at most", number=True), Column("first"), Column("why", below=True),
    )  # fmt: skip
    rows = []
    for one in different:
        assert one.difference is not None and one.first is not None
        place = ",".join(map(str, one.first.place))
        first = f"[{place}] {one.first.native:.6g}, emulated {one.first.emulated:.6g}"
        share = f"{units.whole(one.count)} of {units.whole(one.total)}"
        tone = Tone.PLAIN if one.difference.conforms else Tone.BAD
        rows.append((
            Field(one.mode), Field(one.what), Field(one.shape), Field(one.difference.value, tone=tone), Field(share),
            Field(units.significant(one.largest)), Field(first), Field(one.why),
        ))  # fmt: skip
    return Table("differences", "what is not the same bit by bit", columns, tuple(rows))


def _undone(found: Sequence[ModeConformity]) -> Iterator[str]:
    """A line for each mode and reason."""
    for mode in found:
        reasons = together((one.why, one.what) for one in mode.found if one.difference is None)
        for why, whats in reasons.items():
            yield f"{mode.mode}, {listed(list(dict.fromkeys(whats)), 4)}: {why}"


def _verdict(found: Sequence[ModeConformity]) -> str:
    different = [mode.mode for mode in found if not mode.conforms]
    compared = [mode.mode for mode in found if mode.compared]
    if different:
        return f"{listed(different)} {'does' if len(different) == 1 else 'do'} not give what the emulation gives"
    if not compared:
        return "nothing could be compared"
    return f"{listed(compared, 20)}: the emulation gives what the kernels give, up to the order of sums"


def as_json(facts: DeviceFacts, found: Sequence[ModeConformity]) -> str:
    """The document on one line: every cast and product, with what explains its difference."""
    modes = [{**encode(one), "conforms": one.conforms} for one in found]
    return json_line({"device": encode(facts), "conforms": all(one.conforms for one in found), "modes": modes})
