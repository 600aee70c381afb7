"""The scales that came from data, where a run asked for them."""

from __future__ import annotations

from collections.abc import Iterator

from fp8bench import units
from fp8bench.model import LayerScale
from fp8bench.report.elements import Column, Element, Field, Part, Table, Text
from fp8bench.report.material import Material
from fp8bench.report.page.section import PRECISION, Section, case_field, sections, with_room
from fp8bench.report.panels import Panel
from fp8bench.report.words.naming import NamedCase, listed, named_cases, titled_panels

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
    cases = ((case.name, [_row(case, scale) for scale in case.result.record.scales]) for case in named_cases(panel))
    rows, left_out = with_room(cases, MOST_ROWS)
    if not rows:
        return
    columns = (
        PRECISION,
        Column("layer"),
        Column("role"),
        Column("amax", number=True, hint="the largest magnitude that the scale comes from"),
        Column("scale", number=True, hint="what values are multiplied by"),
        Column("renewed", number=True, hint="times, by age or by saturation, since it was found"),
    )
    yield Table(f"scales-{panel.case.workload}", f"{title}: scales by layer and role", columns, rows)
    if left_out:
        yield Text(f"{title}: not shown, for want of room: {listed(left_out)}. The run's file has them.")


def _row(case: NamedCase, one: LayerScale) -> tuple[Field, ...]:
    return (
        case_field(case),
        Field(one.layer),
        Field(one.role),
        Field(units.significant(one.amax), one.amax),
        Field(units.significant(one.scale), one.scale),
        Field(units.whole(one.renewals), float(one.renewals)),
    )
