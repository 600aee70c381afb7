"""What each case sustains, beside its time in slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp8bench.report.elements import Element, Table
from fp8bench.report.material import Material
from fp8bench.report.page.section import Section, sections
from fp8bench.report.tensor_panels import timed_panels
from fp8bench.report.terminal.figures import sustained


@sections.register("sustained")
class SustainedTimes(Section):
    """Nothing where nobody asked for it."""

    name = "sustained"
    title = "Sustained"
    lead = (
        "Each case ran for seconds at a time, in balanced orders, after it had run until clock and temperature stood "
        "still (or for half as long where the device tells neither). The speed-up is by rounds of turns."
    )
    rank = 96

    def elements(self, material: Material) -> Iterator[Element]:
        for title, panel in timed_panels(material):
            for table in sustained(panel):
                assert isinstance(table, Table)
                yield replace(table, name=f"sustained-{panel.case.workload}", caption=title)
