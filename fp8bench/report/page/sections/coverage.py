"""How much of a model's products could be in low precision, and what not and why."""

from __future__ import annotations

from collections.abc import Iterator

from fp8bench.report.coverages import elements
from fp8bench.report.elements import Element
from fp8bench.report.material import Material
from fp8bench.report.page.section import Section, sections


@sections.register("coverage")
class Coverage(Section):
    """A table by kind of layer, and reasons, for each model of a profile."""

    name = "coverage"
    title = "Coverage"
    rank = 5
    lead = "Which of a model's products its cases make in another precision; counted in a step that nobody timed."

    def elements(self, material: Material) -> Iterator[Element]:
        for number, (_, panel) in enumerate(material.panels()):
            yield from elements(panel, number)
