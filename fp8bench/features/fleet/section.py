"""The report's section on a fleet: which machines measured cells of the plan, and which stand out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp8bench.features.fleet import view as fleets
from fp8bench.features.fleet.report import fleet_of
from fp8bench.report.elements import Element, Text
from fp8bench.report.page.section import Material, section
from fp8bench.report.words.naming import fact


@section("fleet", "Fleet", 99)
def fleet_section(material: Material) -> Iterator[Element]:
    """All runs of the plan in this store. Only machines of a kind, with the same hardware, software and settings, are
    held against each other; the same seed has to give the same bits on them.
    """
    runs, store = [entry.run for entry in material.entries], material.store
    report = fleet_of(runs, store) if store is not None else None
    if report is None:
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
