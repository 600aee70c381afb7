"""The report's section on a fleet: which machines measured cells of the plan, and which stand out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp8bench.features.fleet.report import fleet_of
from fp8bench.features.fleet.view import report_page
from fp8bench.report.elements import Element, Table, Text
from fp8bench.report.page.section import Material, section
from fp8bench.report.words.naming import fact


@section("fleet", "Fleet", 99)
def fleet_section(material: Material) -> Iterator[Element]:
    """All runs of the plan in this store. Only machines with the same hardware, software and settings are compared
    with each other.
    """
    runs, store = [entry.run for entry in material.entries], material.store
    report = fleet_of(runs, store) if store is not None else None
    if report is None:
        return
    if material.alone:
        run = material.entries[0].run
        number = run.cell.rpartition("/")[2]
        yield Text(f"This run is cell {number} of plan {run.fleet_plan}, measured on {fact(run, 'machine')}.")
    for part in report_page(report, "", drawn=True).parts:
        for element in part.elements:
            if isinstance(element, Table):
                folded = part.name == "cases"
                yield replace(element, name=f"fleet-{part.name}", caption=part.title, main=False, folded=folded)
            else:
                yield element
