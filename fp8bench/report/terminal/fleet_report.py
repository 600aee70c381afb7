"""A fleet's machines beside each other, as a page for terminal and browser."""

from __future__ import annotations

from fp8bench.analysis.fleet.found import FleetReport
from fp8bench.report import fleets
from fp8bench.report.elements import Page, Part


def page_of(report: FleetReport, name: str, charts: bool = False) -> Page:
    """What is named, then what it rests on; `charts` for who can draw them."""
    drawn = tuple(fleets.charts(report)) if charts else ()
    parts = [
        Part("named", "Machines that stand out", (fleets.named(report),)),
        Part("machines", "Machines", (fleets.machines(report), *drawn)),
        Part("kinds", "Kinds of machines", (fleets.kinds(report),)),
        Part("cases", "Cases side by side", (fleets.cases(report),)),
        Part("coverage", "Coverage and exclusions", tuple(fleets.coverage(report))),
    ]
    return Page(f"fleet report: {name}", "", tuple(parts), fleets.LEGEND)
