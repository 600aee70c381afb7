"""What to do, and the checklist that it comes from, filled in with the figures of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp8bench.features.advise.basis import Basis
from fp8bench.features.advise.decide import advised
from fp8bench.features.advise.view import advice_elements, checklist
from fp8bench.report.elements import Element, Text, Tone
from fp8bench.report.page.section import Material, section


@section("advice", "When to use FP8", 68)
def advice_section(material: Material) -> Iterator[Element]:
    """Each question with this machine's figure and the row that it rests on; yes speaks for the lower precision. No
    figure of another machine is used. fp8bench advise RUN adds studies and trainings of the store, and its --check
    measures what is predicted here.
    """
    for number, entry in enumerate(material.entries):
        found = advised(Basis(entry.run, entry.findings))
        if not found.answers:
            continue
        if entry.label:
            yield Text(entry.label, Tone.STRONG)
        yield from advice_elements(found, apart=False)
        for table in checklist(found, shared=False):
            yield replace(table, name=f"{table.name}-{number}", folded=True)
