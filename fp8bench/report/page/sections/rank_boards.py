"""Several ranks at a glance, ahead of every case: a table for each collective, or of all ways of training together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp8bench.report.elements import Element, Text
from fp8bench.report.material import Material
from fp8bench.report.page.section import Section, sections
from fp8bench.report.rank_boards import boards, remarks
from fp8bench.report.words.naming import titled_panels


@sections.register("rank-boards")
class RankBoards(Section):
    """Nothing of cases that one process ran."""

    name = "rank-boards"
    title = "At a glance"
    lead = "The section Ranks has skew, waiting, overlap and efficiency."
    rank = 12

    def elements(self, material: Material) -> Iterator[Element]:
        panels = [one for one in titled_panels(material) if any(boards(one[1]))]
        for number, (title, panel) in enumerate(panels, 1):
            for table in boards(panel):
                caption = table.caption if len(panels) == 1 else f"{title}: {table.caption}"
                yield replace(table, name=f"{table.name}-{number}", caption=caption)
            yield from map(Text, remarks(panel))
