"""Several ranks: how far apart they are, over the rounds too, and what they send beside what that costs in error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp8bench.analysis.ranks import round_times, skew
from fp8bench.report.elements import Axis, Element, Lines, Mark, Point, Scatter, Table
from fp8bench.report.material import Material
from fp8bench.report.page.section import Section, sections
from fp8bench.report.panels import Panel
from fp8bench.report.ranks import ranks, wire_costs
from fp8bench.report.words.naming import titled_panels

# A longer table is for who asks: its charts stand above it.
_MOST_ROWS = 16
# Fewer say nothing that the table does not; float32 beside them would leave no room for differences.
_LEAST_WAYS = 4
_ALL_BUT_EXACT_DB = 100.0


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
            yield from _costs(number, panel)
            yield from _over_time(number, panel)
            for element in ranks(panel):
                if not isinstance(element, Table):
                    yield element
                    continue
                caption, long = f"{title}: {element.caption}", len(element.rows) > _MOST_ROWS
                yield replace(element, name=f"{element.name}-{number}", caption=caption, folded=long)


def _costs(number: int, panel: Panel) -> Iterator[Scatter]:
    """Bytes on the wire beside the error, of each collective that has more than one way."""
    for collective, costs in wire_costs(panel).items():
        shown = [one for one in costs if one.sqnr < _ALL_BUT_EXACT_DB]
        if len(shown) < _LEAST_WAYS:
            continue
        points = tuple(Point(one.way, one.words, one.wire, one.sqnr, hint=one.hint) for one in shown)
        description = (
            f"What a rank sends in a step of {collective}, and the signal-to-noise ratio of what it gets: further left "
            "is less to send, further up a smaller error. What keeps more than 100 dB is left out."
        )
        yield Scatter(f"wire-{collective}-{number}", f"{collective}: bytes on the wire beside the error", description,
                      Axis("sent by a rank", "B", log=True), Axis("SQNR in dB"), points)  # fmt: skip


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
