"""The scales that came from data, where a run asked for them."""

from __future__ import annotations

from collections.abc import Iterator

from fp8bench import units
from fp8bench.model import LayerScale
from fp8bench.report.blocks import Panel
from fp8bench.report.elements import Column, Element, Field, Part, Table, Text
from fp8bench.report.material import Material
from fp8bench.report.naming import NamedCase, listed, named_cases, titled_panels
from fp8bench.report.section import Section, sections

# Of a table; cases beyond are named, and have their scales in the run's file.
MOST_ROWS = 300


@sections.register("scales")
class Scales(Section):
    """A table for each panel: what every layer's tensors were multiplied by, and how often that was renewed."""

    name = "scales"
    summary = "the scales from data by layer and role, and how often they were renewed"
    rank = 105

    def build(self, material: Material) -> Part | None:
        elements = [element for title, panel in titled_panels(material) for element in _panel(title, panel)]
        if not elements:
            return None
        return Part(
            self.name,
            "Scales from data",
            tuple(elements),
            "Found in untimed steps on a state of its own, and as they were after the last timed step. A scale is the "
            "largest value of its format over amax: what exceeds amax later saturates.",
        )


def _panel(title: str, panel: Panel) -> Iterator[Element]:
    cases = [case for case in named_cases(panel) if case.result.record.scales]
    rows: list[tuple[Field, ...]] = []
    left_out = []
    for case in cases:
        scales = case.result.record.scales
        if rows and len(rows) + len(scales) > MOST_ROWS:
            left_out.append(case.name)
        else:
            rows += [_row(case, one) for one in scales]
    if not rows:
        return
    columns = (
        Column("case"),
        Column("layer"),
        Column("role"),
        Column("amax", number=True, hint="the largest magnitude that the scale comes from"),
        Column("scale", number=True, hint="what values are multiplied by"),
        Column("renewed", number=True, hint="times, by age or by saturation, since it was found"),
    )
    yield Table(f"scales-{panel.case.workload}", f"{title}: scales by layer and role", columns, tuple(rows))
    if left_out:
        yield Text(f"{title}: not shown, for want of room: {listed(left_out)}. The run's file has them.")


def _row(case: NamedCase, one: LayerScale) -> tuple[Field, ...]:
    return (
        Field(case.name),
        Field(one.layer),
        Field(one.role),
        Field(units.significant(one.amax), one.amax),
        Field(units.significant(one.scale), one.scale),
        Field(units.whole(one.renewals), float(one.renewals)),
    )
