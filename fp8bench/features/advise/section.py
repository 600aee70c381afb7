"""Makes the report section that recommends precisions, with the answers to the three questions of `AdviceQuestion`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fp8bench.features.advise.basis import AdviceBasis
from fp8bench.features.advise.decide import advise
from fp8bench.features.advise.view import advice_items, make_question_tables
from fp8bench.model.run import BENCH
from fp8bench.report.elements import Element, Text, Tone
from fp8bench.report.page.section import Material, section


@section("advice", "Which precision to use", 35)
def advice_section(material: Material) -> Iterator[Element]:
    """Answers each question with this machine's figure; yes favours the lower precision. `fp8bench advise RUN --all`
    adds the rows that the figures come from, and uses the studies and trainings of the store."""
    for run_number, entry in enumerate(material.entries):
        if entry.run.request.suite == BENCH:  # `bench` compares callables, not precisions
            continue
        advice = advise(AdviceBasis(entry.run, entry.findings))
        if not advice.answers:
            continue
        if entry.label:
            yield Text(entry.label, Tone.STRONG)
        yield advice_items(advice)
        for table in make_question_tables(advice, everything=False):
            yield replace(table, name=f"{table.name}-{run_number}")
