"""The operators of a step: counted FLOPs, bytes and launches; and from traces, what takes its time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from fp8bench import units
from fp8bench.analysis.tapes import Taped, TapeRow, intensity_of, share_of, side_by_side
from fp8bench.model import PhaseCount, Tape
from fp8bench.model.codec import encode
from fp8bench.report.columns import Col, Cols, table
from fp8bench.report.data.plain import Rows
from fp8bench.report.elements import Elements, Field, Page, Part, Table, Text, Tone, items_of
from fp8bench.report.page.section import PRECISION, Material, section, table_of_cases, titled_panels
from fp8bench.report.panels import CaseValue, together
from fp8bench.report.words.naming import join_words, phase_words

_WIDTHS = (8, 4, 32)
_LEGEND = (
    "declared: FLOPs that the suite declares; unknown: calls of operators without a formula, which have no FLOPs here",
    "8 bits, 4 bits, 32 bits: the share of FLOPs whose factors have elements of this width",
    "operators: FLOPs, then bytes read and written in the number of calls; (b): in the backward pass",
)
_OF_CSV = (
    "setting",
    "tape",
    "phase",
    "operator",
    "backward",
    "inputs",
    "outputs",
    "calls",
    "flops",
    "bytes",
    "path",
    "launches",
)


def remarks(tape: Tape) -> list[str]:
    unknown = together((operator.operator, operator.calls) for operator in tape.operators if operator.flops is None)
    lines = [f"unknown x {sum(calls)}: {operator} has no formula" for operator, calls in unknown.items()]
    if tape.unwritten:
        lines.append(f"{tape.unwritten} tensors were written by no operator of torch: what else ran is not counted")
    if tape.fused:
        return [*lines, tape.fused]
    return lines


def _remarks_of(taped: Iterable[tuple[str, Tape]]) -> Iterator[str]:
    """Yields each remark once, with the names of its cases."""
    names_by_remark: dict[str, list[str]] = {}
    for name, tape in taped:
        for remark in remarks(tape):
            names_by_remark.setdefault(remark, []).append(name)
    for remark, names in names_by_remark.items():
        yield f"{join_words(names)}: {remark}"


def page_of(title: str, taped: Sequence[Taped]) -> Page:
    parts = []
    for place, (setting, cases) in enumerate(together((case.setting, case) for case in taped).items()):
        parts.append(Part(f"setting-{place}", setting, tuple(_elements(cases))))
    return Page(title, "", tuple(parts), _LEGEND)


def _elements(taped: Sequence[Taped]) -> Elements:
    with_tape = []
    words = []
    for case in taped:
        if case.tape is None:
            words.append(f"{case.mode}: no tape: {case.why}")
        else:
            with_tape.append(_Counts(case, case.tape))
    if with_tape:
        cols: Cols[_Counts] = [Col("tape", "case.mode"), *_count_cols()]
        cols.insert(2, Col("declared", lambda row: row.case.declared or None, show=units.count))
        for bits in _WIDTHS:
            share = partial(lambda bits, row: share_of(row.value, bits) or None, bits)
            cols.append(Col(f"{bits} bits", share, show=units.percent))
        yield table("counts", "", cols, with_tape)
        rows = side_by_side([row.value for row in with_tape])
        if rows:
            yield _operators([row.case.mode for row in with_tape], rows)
    yield from items_of([*words, *_remarks_of((row.case.mode, row.value) for row in with_tape)])


class _Counts(NamedTuple):
    """A row of the table of counts, with the attributes that `_count_cols` shows."""

    case: Taped
    value: Tape


def _count_cols() -> Iterator[Col[Any]]:
    """Yields the columns for rows whose value is a step's tape or the counts of a phase."""

    def intensity(row: Any) -> float | None:
        counts: Tape | PhaseCount = row.value
        if isinstance(counts, Tape):
            return intensity_of(counts)
        if counts.flops and counts.bytes:
            return counts.flops / counts.bytes
        return None

    flops = "of products, forward and backward; a product of M x K by K x N has 2MNK"
    yield Col("FLOPs", lambda row: row.value.flops or None, show=units.count, hint=flops)
    moved = "read and written, each tensor once a call, as if nothing were cached"
    yield Col("bytes", "value.bytes", unit="B", hint=moved)
    yield Col("FLOP/B", intensity, show=units.count)
    yield Col("launches", "value.launches", show=str, hint="operators that start at least one kernel")
    unknown = "calls of operators without a formula, whose FLOPs are not counted"
    yield Col("unknown", lambda row: row.value.unknown or None, show=str, hint=unknown)


def _operators(modes: Sequence[str], rows: Sequence[TapeRow]) -> Table:
    cols: Cols[TapeRow] = [
        Col("phase", lambda row: phase_words(row.phase), shared=True),
        Col(
            "operator",
            lambda row: row.operator + (" (b)" if row.backward else ""),
            tone=lambda row: Tone.STRONG if row.differs else Tone.PLAIN,
        ),
    ]
    cols += [Col(mode, partial(_sums, place=place), number=True) for place, mode in enumerate(modes)]
    return table("operators", "", cols, rows)


def _sums(row: TapeRow, place: int) -> str | None:
    sums = row.sums[place]
    if not sums.calls:
        return None
    flops = "unknown, " if sums.flops is None else f"{units.count(sums.flops, 'FLOP')}, " if sums.flops else ""
    return f"{flops}{units.size(sums.bytes)} in {sums.calls}"


def tape_rows(taped: Sequence[Taped]) -> Rows:
    """FLOPs, bytes and launches are those of one call; unknown FLOPs are empty."""
    return _OF_CSV, chain.from_iterable(map(_operator_rows, taped))


def _operator_rows(case: Taped) -> Iterator[dict[str, Any]]:
    for operator in case.tape.operators if case.tape is not None else ():
        shapes = {"inputs": " ".join(operator.inputs), "outputs": " ".join(operator.outputs)}
        yield encode(operator) | {"setting": case.setting, "tape": case.mode} | shapes


@section("tape", "Operators of a step", 77)
def tape_section(material: Material) -> Elements:
    """Counted operator by operator in an untimed step; `fp8bench show RUN --tape` has the operators."""

    def phase(row: CaseValue[Tape | PhaseCount]) -> Field | str:
        if isinstance(row.value, PhaseCount):
            return phase_words(row.value.phase)
        return Field("step", tone=Tone.STRONG)

    cols = [PRECISION, Col("phase", phase), *_count_cols()]
    for title, panel in titled_panels(material):
        tapes = []
        rows = []
        for case in panel.members:
            tape = case.record.tape
            if tape is None or not tape.phases:
                continue
            counts: list[Tape | PhaseCount] = [tape]
            # Phases in which nothing ran would only lengthen the table.
            counts += [phase for phase in tape.phases if phase.flops or phase.bytes or phase.launches or phase.unknown]
            tapes.append((case.name, tape))
            rows.append((case, counts))
        yield from table_of_cases(f"tape-{panel.suite}", f"{title}: counts of a step, by phase", cols, rows)
        yield from items_of(_remarks_of(tapes))


@section("traces", "Traces", 130)
def traces_section(material: Material) -> Elements:
    """Traces of a few steps of each case, in a pass that is not timed. Recording makes steps longer."""
    runs = [entry.run for entry in material.entries]
    traced = [run for run in runs if any(record.trace for record in run.records)]
    folders = [run.request.trace for run in traced if run.request.trace]
    if traced:
        place = f"The traces are in {join_words(folders)}, one folder per case. " if folders else ""
        yield Text(
            f"{place}ui.perfetto.dev and chrome://tracing open them; so does TensorBoard with torch-tb-profiler, whose "
            "page needs internet access in the browser."
        )
