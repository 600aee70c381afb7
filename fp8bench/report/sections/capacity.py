"""The largest batches that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator

from fp8bench import units
from fp8bench.report.blocks import Panel
from fp8bench.report.capacities import EMULATED, beyond, place_of, searched, sentences, share_within, show_batch, title
from fp8bench.report.elements import Column, Element, Field, Part, Table, Text, Tone
from fp8bench.report.material import Material
from fp8bench.report.naming import titled_panels
from fp8bench.report.section import Section, sections
from fp8bench.report.standing import emulated


@sections.register("capacity")
class Capacities(Section):
    """A table for each suite that was asked, and a sentence for each precision."""

    name = "capacity"
    summary = "the largest batch of every precision that fits into memory, and the first that does not"
    rank = 95

    def build(self, material: Material) -> Part | None:
        found = [
            element
            for number, (name, panel) in enumerate(titled_panels(material))
            for element in _panel(name, panel, number)
        ]
        if not found:
            return None
        lead = (
            "By running it: a state and two steps of the largest batch fit, and of the next one they do not. What "
            "counts are tensors that torch allocates, from preparing on."
        )
        return Part(self.name, "Largest batch", tuple(found), lead)


def _panel(name: str, panel: Panel, number: int) -> Iterator[Element]:
    found = list(searched(panel))
    if not found:
        return
    columns = (
        Column("case"), Column("largest", number=True), Column(f"vs {panel.reference}", number=True, unit="x"),
        Column("tokens a step", number=True), Column("peak memory", number=True, unit="B"),
        Column("does not fit"),
    )  # fmt: skip
    rows = []
    for group, result, capacity in found:
        share = share_within(group, result)
        versus = EMULATED if emulated(result) else units.speed_up(share)
        tone = Tone.DOUBT if emulated(result) else Tone.PLAIN
        rows.append((
            Field(f"{place_of(panel, group, capacity)} {result.mode}".strip(), tone=tone),
            Field(show_batch(capacity), capacity.batch, tone),
            Field(versus, share, tone),
            Field(units.whole(capacity.tokens) if capacity.tokens else units.NONE, capacity.tokens or None, tone),
            Field(units.size(capacity.peak), capacity.peak, tone),
            Field(beyond(capacity)),
        ))  # fmt: skip
    yield Table(f"capacity-{panel.case.workload}-{number}", f"{name}: {title(found[0][2])}", columns, tuple(rows))
    yield from (Text(text) for text in sentences(panel))
