"""Several ranks: how far apart they are, over the rounds too, and what they send beside what that costs in error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp8bench.analysis.ranks import round_times, skew
from fp8bench.report.elements import Axis, Element, Lines, Mark, Table
from fp8bench.report.material import Material
from fp8bench.report.page.section import Section, sections
from fp8bench.report.panels import Panel
from fp8bench.report.ranks import ranks
from fp8bench.report.words.naming import titled_panels


@sections.register("ranks")
class Ranks(Section):
    """Nothing of cases that one process ran."""

    name = "ranks"
    title = "Ranks"
    lead = (
        "A step is over when its slowest rank is. What a collective takes is the least that any rank was in it: the "
        "others waited for whoever came last."
    )
    rank = 98

    def elements(self, material: Material) -> Iterator[Element]:
        for number, (title, panel) in enumerate(titled_panels(material), 1):
            for element in ranks(panel):
                named = replace(element, name=f"{element.name}-{number}") if isinstance(element, Table) else element
                yield replace(named, caption=f"{title}: {named.caption}") if isinstance(named, Table) else named
            yield from _over_time(number, panel)


def _over_time(number: int, panel: Panel) -> Iterator[Lines]:
    """Each rank's median of a round, of the case whose ranks are furthest apart."""
    timed = [(group, one, one.record.timing) for group, one in panel.members if one.record.timing is not None]
    apart = [(skew(timing), group, result, timing) for group, result, timing in timed]
    told = [one for one in apart if one[0] is not None]
    if not told:
        return
    _, group, result, timing = max(told, key=lambda one: one[0] or 0.0)
    rounds = round_times(timing)
    where = " at ".join(filter(None, (result.mode, panel.place(group))))
    series = tuple(
        (f"rank {rank}", tuple(Mark(f"rank {rank}, round {place}", value) for place, value in enumerate(times, 1)))
        for rank, times in enumerate(rounds)
    )
    places = tuple(str(place) for place in range(1, len(rounds[0]) + 1))
    description = f"The step of each rank in each round of {where}, whose ranks are furthest apart."
    yield Lines(f"ranks-over-time-{number}", f"ranks over time: {where}", description, places=places,
                axis=Axis("step", "s"), series=series)  # fmt: skip
