"""What a step does, as it was counted operator by operator: FLOPs, bytes and launches, and the operators themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8bench import units
from fp8bench.analysis.tapes import Row, Sums, Taped, intensity_of, narrow_over_wide, share_of, side_by_side
from fp8bench.model import PhaseCount, Tape
from fp8bench.model.codec import encode
from fp8bench.report.data.plain import csv_text, json_line
from fp8bench.report.elements import Column, Element, Field, Items, Page, Part, Table, Text, Tone
from fp8bench.report.material import Material, titled_panels
from fp8bench.report.page.section import PRECISION, Section, case_field, number, sections, table_of_cases
from fp8bench.report.panels import together
from fp8bench.report.words.naming import NamedCase, named_cases, phase_words

_WIDTHS = (8, 4, 32)
_LEGEND = (
    "declared: FLOPs that the suite declares; unknown: calls of operators that have no formula, in no sum of FLOPs",
    "8 bits, 4 bits, 32 bits: the share of FLOPs that multiply elements so wide; 8/32: the first over the last",
    "operators: FLOPs, bytes read and written in so many calls; (b) in backward",
)
_OF_CSV = (
    "setting", "tape", "phase", "operator", "backward", "inputs", "outputs", "calls", "flops", "bytes", "path",
    "launches",
)  # fmt: skip
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


def remarks(tape: Tape) -> list[str]:
    """What has no formula, what nobody saw written, and what a compiler fused."""
    unknown = together((one.operator, one.calls) for one in tape.operators if one.flops is None)
    found = [f"unknown x {sum(calls)}: {operator} has no formula" for operator, calls in unknown.items()]
    if tape.unwritten:
        found.append(f"{tape.unwritten} tensors were written by no operator of torch: what else ran is not counted")
    return [*found, tape.fused] if tape.fused else found


def page_of(title: str, taped: Sequence[Taped]) -> Page:
    """A part for each setting: its modes side by side."""
    parts = [
        Part(f"setting-{place}", setting, tuple(_elements(some, [])))
        for place, (setting, some) in enumerate(together((one.setting, one) for one in taped).items())
    ]
    return Page(title, "", tuple(parts), _LEGEND)


def page_against(title: str, taped: Sequence[Taped]) -> Page:
    """A part for each case: its tapes side by side, and of their operators those that are not alike."""
    parts = []
    for place, some in enumerate(together(((one.setting, one.mode), one) for one in taped).values()):
        differ = [Text("every operator is called as often, on as many bytes, in both")]
        parts.append(Part(f"case-{place}", f"{some[0].setting} {some[0].mode}", tuple(_elements(some, differ))))
    return Page(title, "", tuple(parts), _LEGEND)


def _elements(taped: Sequence[Taped], where_alike: list[Text]) -> list[Element]:
    """With something to say where all operators are alike, those that are alike are left out."""
    known = [(one, one.tape) for one in taped if one.tape is not None]
    found: list[Element] = []
    if known:
        rows = side_by_side([tape for _, tape in known])
        shown = [row for row in rows if row.differs] if where_alike and len(known) > 1 else rows
        found += [_counts(known), _operators(known, shown)] if shown else [_counts(known), *where_alike]
    words = [f"{one.name}: no tape: {one.why}" for one in taped if one.tape is None]
    words += [f"{one.name}: {remark}" for one, tape in known for remark in remarks(tape)]
    return [*found, Items(tuple(map(Text, words)))] if words else found


def _counts(known: Sequence[tuple[Taped, Tape]]) -> Table:
    """A row for each tape: its sums, and what follows from them."""
    titles = ("FLOPs", "declared", "bytes", "FLOP/B", "launches", "unknown", "8 bits", "4 bits", "32 bits", "8/32")
    rows = []
    for one, tape in known:
        shares = [units.percent(share_of(tape, bits)) for bits in _WIDTHS]
        words = (
            units.count(tape.flops), units.count(one.declared) if one.declared else units.NONE, units.size(tape.bytes),
            units.count(intensity_of(tape)), str(tape.launches), str(tape.unknown), *shares,
            units.ratio(narrow_over_wide(tape)),
        )  # fmt: skip
        rows.append((Field(one.name), *map(Field, words)))
    return Table("counts", "", (Column("tape"), *(Column(title, number=True) for title in titles)), tuple(rows))


def _operators(known: Sequence[tuple[Taped, Tape]], rows: Sequence[Row]) -> Table:
    columns = (
        Column("phase", shared=True), Column("operator"), *(Column(one.name or "now", number=True) for one, _ in known)
    )  # fmt: skip
    return Table("operators", "", columns, tuple(_row(row) for row in rows))


def _row(row: Row) -> tuple[Field, ...]:
    tone = Tone.STRONG if row.differs else Tone.PLAIN
    name = row.operator + (" (b)" if row.backward else "")
    return Field(phase_words(row.phase)), Field(name, tone=tone), *(Field(_sums(one)) for one in row.sums)


def _sums(one: Sums) -> str:
    """'1.43 GFLOP, 33.6 MiB in 36'."""
    if not one.calls:
        return units.NONE
    flops = "unknown, " if one.flops is None else f"{units.count(one.flops, 'FLOP')}, " if one.flops else ""
    return f"{flops}{units.size(one.bytes)} in {one.calls}"


def as_json(taped: Sequence[Taped]) -> str:
    """Every tape with its sums by phase and its operators."""
    return json_line({"tapes": [encode(one) for one in taped]})


def as_csv(taped: Sequence[Taped]) -> str:
    """FLOPs, bytes and launches are those of one call; FLOPs are empty where nobody knows them."""
    rows = [
        {
            **encode(operator), "setting": one.setting, "tape": one.name, "inputs": " ".join(operator.inputs),
            "outputs": " ".join(operator.outputs),
        }
        for one in taped if one.tape is not None for operator in one.tape.operators
    ]  # fmt: skip
    return csv_text(_OF_CSV, rows)


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


def _rows(case: NamedCase, tape: Tape) -> Iterator[tuple[Field, ...]]:
    """The step, then its phases."""
    shares = (number(share_of(tape, bits), units.percent) for bits in (8, 4, 32))
    declared = number(case.result.record.work.flops or None, units.count)
    yield case_field(case), Field("step", tone=Tone.STRONG), *_phase_counts(tape, declared, intensity_of(tape)), *shares
    for one in tape.phases:
        per_byte = one.flops / one.bytes if one.flops and one.bytes else None
        counts = _phase_counts(one, Field(units.NONE), per_byte)
        yield case_field(case), Field(phase_words(one.phase)), *counts, *[Field(units.NONE)] * 3


def _phase_counts(one: Tape | PhaseCount, declared: Field, per_byte: float | None) -> tuple[Field, ...]:
    return (
        number(one.flops or None, units.count), declared, number(one.bytes, units.size), number(per_byte, units.count),
        number(one.launches, "{:,}".format), number(one.unknown, str),
    )  # fmt: skip
