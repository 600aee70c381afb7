"""What a step does, as it was counted operator by operator: FLOPs, bytes and launches by phase."""

from __future__ import annotations

from collections.abc import Iterator

from fp8bench import units
from fp8bench.analysis.tapes import intensity_of, share_of
from fp8bench.model import PhaseCount, Tape
from fp8bench.report.elements import Column, Element, Field, Items, Text, Tone
from fp8bench.report.material import Material
from fp8bench.report.page.section import PRECISION, Row, Section, case_field, number, sections, table_of_cases
from fp8bench.report.words.naming import NamedCase, named_cases, phase_words, titled_panels
from fp8bench.report.words.tape import remarks

_COLUMNS = (
    PRECISION,
    Column("phase"),
    Column("FLOPs", number=True, hint="of products, forward and backward; a product of M x K by K x N has 2MNK"),
    Column("declared", number=True, hint="the FLOPs that the suite declares"),
    Column(
        "bytes", number=True, unit="B", hint="read and written, each tensor once a call, as if nothing lay in a cache"
    ),
    Column("FLOP/B", number=True, hint="FLOPs for each byte"),
    Column("launches", number=True, hint="operators that start a kernel at least"),
    Column("unknown", number=True, hint="calls of operators that have no formula, in no sum of FLOPs"),
    Column("8 bits", number=True, hint="the share of FLOPs that multiply elements so wide"),
    Column("4 bits", number=True, hint="the share of FLOPs that multiply elements so wide"),
    Column("32 bits", number=True, hint="the share of FLOPs that multiply elements so wide"),
)


@sections.register("tape")
class StepCounts(Section):
    """A table for each panel; operators stand in `show RUN --tape`."""

    name = "tape"
    title = "What a step does"
    lead = (
        "Counted operator by operator in an untimed step; nothing is declared by the suite but what says so. "
        "`fp8bench show RUN --tape` has the operators."
    )
    rank = 77

    def elements(self, material: Material) -> Iterator[Element]:
        for title, panel in titled_panels(material):
            cases = [(case, case.result.record.tape) for case in named_cases(panel)]
            taped = [(case, tape) for case, tape in cases if tape is not None and tape.phases]
            rows = ((case.name, list(_rows(case, tape))) for case, tape in taped)
            name = f"tape-{panel.case.workload}"
            yield from table_of_cases(name, title, "counts of a step, by phase", _COLUMNS, rows, "The CSV has them.")
            said = tuple(Text(f"{case.name}: {words}") for case, tape in taped for words in remarks(tape))
            yield from [Items(said)] if said else []


def _rows(case: NamedCase, tape: Tape) -> Iterator[Row]:
    """The step, then its phases."""
    shares = (number(share_of(tape, bits), units.percent) for bits in (8, 4, 32))
    declared = number(case.result.record.work.flops or None, units.count)
    yield case_field(case), Field("step", tone=Tone.STRONG), *_counts(tape, declared, intensity_of(tape)), *shares
    for one in tape.phases:
        per_byte = one.flops / one.bytes if one.flops and one.bytes else None
        counts = _counts(one, Field(units.NONE), per_byte)
        yield case_field(case), Field(phase_words(one.phase)), *counts, *[Field(units.NONE)] * 3


def _counts(one: Tape | PhaseCount, declared: Field, per_byte: float | None) -> Row:
    return (
        number(one.flops or None, units.count), declared, number(one.bytes, units.size), number(per_byte, units.count),
        number(one.launches, "{:,}".format), number(one.unknown, str),
    )  # fmt: skip
