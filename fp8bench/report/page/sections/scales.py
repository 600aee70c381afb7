"""The scales that came from data, where a run asked for them."""

from __future__ import annotations

from collections.abc import Iterator

from fp8bench import units
from fp8bench.model import LayerScale
from fp8bench.report.elements import Column, Element, Field
from fp8bench.report.material import Material
from fp8bench.report.page.section import PRECISION, Row, Section, case_field, number, sections, table_of_cases
from fp8bench.report.words.naming import NamedCase, named_cases, titled_panels

_COLUMNS = (
    PRECISION,
    Column("layer"),
    Column("role"),
    Column("amax", number=True, hint="the largest magnitude that the scale comes from"),
    Column("scale", number=True, hint="what values are multiplied by"),
    Column("renewed", number=True, hint="times, by age or by saturation, since it was found"),
)


@sections.register("scales")
class Scales(Section):
    """A table for each panel: what every layer's tensors were multiplied by, and how often that was renewed."""

    name = "scales"
    title = "Scales from data"
    lead = (
        "Found in untimed steps on a state of its own, and as they were after the last timed step. A scale is the "
        "largest value of its format over amax: what exceeds amax later saturates."
    )
    rank = 105

    def elements(self, material: Material) -> Iterator[Element]:
        for title, panel in titled_panels(material):
            cases = ((case.name, [_row(case, one) for one in case.result.record.scales]) for case in named_cases(panel))
            name, words = f"scales-{panel.case.workload}", "scales by layer and role"
            yield from table_of_cases(name, title, words, _COLUMNS, cases, "The run's file has them.")


def _row(case: NamedCase, one: LayerScale) -> Row:
    figures = (number(one.amax), number(one.scale), number(one.renewals, units.whole))
    return (case_field(case), Field(one.layer), Field(one.role), *figures)
