"""The fleet that a run is of: which machines measured cells of its plan, side by side, and which are named."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fp8bench.features.fleet import view as fleets
from fp8bench.features.fleet.machines import FleetReport
from fp8bench.features.fleet.report import fleet_of
from fp8bench.model import Run
from fp8bench.report.elements import Element, Text
from fp8bench.report.material import Material
from fp8bench.report.page.section import Section, sections
from fp8bench.report.words.naming import fact


@sections.register("fleet")
class Fleet(Section):
    """Nothing of runs that are no cells of a plan."""

    name = "fleet"
    title = "Fleet"
    lead = (
        "All runs of the plan in this store. Only machines of a kind, with the same hardware, software and settings, "
        "are held against each other; the same seed has to give the same bits on them."
    )
    rank = 99

    def gathered(self, runs: Sequence[Run], store: Path) -> FleetReport | None:
        return fleet_of(runs, store)

    def elements(self, material: Material) -> Iterator[Element]:
        report = material.gathered.get(self.name)
        if not isinstance(report, FleetReport):
            return
        if material.alone:
            run = material.entries[0].run
            number = run.cell.rpartition("/")[2]
            yield Text(f"This run is cell {number} of plan {run.fleet_plan}, measured on {fact(run, 'machine')}.")
        named = fleets.named(report)
        caption = "Machines that stand out"
        yield named if isinstance(named, Text) else replace(named, name="fleet-named", caption=caption)
        yield replace(fleets.machines(report), name="fleet-machines", caption="Machines")
        yield from fleets.charts(report)
        yield replace(fleets.kinds(report), name="fleet-kinds", caption="Kinds of machines")
        cases = fleets.cases(report)
        yield replace(cases, name="fleet-cases", caption="Cases, machine beside machine", main=False, folded=True)
        yield from fleets.coverage(report)
