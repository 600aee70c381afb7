"""What a step does, operator by operator: counted FLOPs, bytes and launches; and from traces, what takes its time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from fp8bench import units
from fp8bench.analysis.tapes import Taped, TapeRow, intensity_of, share_of, side_by_side
from fp8bench.model import PhaseCount, Tape
from fp8bench.model.codec import encode
from fp8bench.report.columns import Col, table
from fp8bench.report.data.plain import Rows
from fp8bench.report.elements import Element, Field, Items, Page, Part, Table, Text, Tone
from fp8bench.report.page.section import PRECISION, Material, section, table_of_cases, titled_panels
from fp8bench.report.panels import together
from fp8bench.report.words.naming import join_words, phase_words

_WIDTHS = (8, 4, 32)
_LEGEND = (
    "declared: FLOPs that the suite declares; unknown: calls of operators that have no formula, in no sum of FLOPs",
    "8 bits, 4 bits, 32 bits: the share of FLOPs that multiply elements so wide",
    "operators: FLOPs, bytes read and written in so many calls; (b) in backward",
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
    return [*lines, tape.fused] if tape.fused else lines


def _remarks_of(taped: Iterable[tuple[str, Tape]]) -> Iterator[str]:
    """What is the same for several cases is said once."""
    for remark, names in together((remark, name) for name, tape in taped for remark in remarks(tape)).items():
        yield f"{join_words(names)}: {remark}"


def page_of(title: str, taped: Sequence[Taped]) -> Page:
    parts = [
        Part(f"setting-{place}", setting, tuple(_elements(some)))
        for place, (setting, some) in enumerate(together((case.setting, case) for case in taped).items())
    ]
    return Page(title, "", tuple(parts), _LEGEND)


def _elements(taped: Sequence[Taped]) -> list[Element]:
    known = [(case, case.tape) for case in taped if case.tape is not None]
    elements: list[Element] = []
    if known:
        rows = side_by_side([tape for _, tape in known])
        elements += [_counts(known), _operators(known, rows)] if rows else [_counts(known)]
    words = [f"{case.mode}: no tape: {case.why}" for case in taped if case.tape is None]
    words += _remarks_of((case.mode, tape) for case, tape in known)
    return [*elements, Items(tuple(map(Text, words)))] if words else elements


def _counts(known: Sequence[tuple[Taped, Tape]]) -> Table:
    cols: list[Col[tuple[Taped, Tape]]] = [
        Col("tape", lambda row: row[0].mode),
        *_count_cols(lambda taped: taped.declared),
    ]
    return table("counts", "", cols, known)


def _count_cols(declared: Callable[[Any], float | None]) -> Iterator[Col[Any]]:
    """For rows of a case and its step's tape, or a phase's counts."""
    yield Col(
        "FLOPs",
        lambda row: row[1].flops or None,
        number=True,
        show=units.count,
        hint="of products, forward and backward; a product of M x K by K x N has 2MNK",
    )
    yield Col(
        "declared",
        lambda row: (declared(row[0]) or None) if isinstance(row[1], Tape) else None,
        number=True,
        show=units.count,
        hint="the FLOPs that the suite declares",
    )
    yield Col(
        "bytes",
        lambda row: row[1].bytes,
        number=True,
        unit="B",
        hint="read and written, each tensor once a call, as if nothing lay in a cache",
    )
    yield Col(
        "FLOP/B",
        lambda row: (
            intensity_of(row[1])
            if isinstance(row[1], Tape)
            else (row[1].flops / row[1].bytes if row[1].flops and row[1].bytes else None)
        ),
        number=True,
        show=units.count,
        hint="FLOPs for each byte",
    )
    yield Col(
        "launches", lambda row: row[1].launches, number=True, show=str, hint="operators that start a kernel at least"
    )
    yield Col(
        "unknown",
        lambda row: row[1].unknown or None,
        number=True,
        show=str,
        hint="calls of operators that have no formula, in no sum of FLOPs",
    )
    words = "the share of FLOPs that multiply elements so wide"
    for bits in _WIDTHS:
        share = partial(lambda bits, row: (share_of(row[1], bits) or None) if isinstance(row[1], Tape) else None, bits)
        yield Col(f"{bits} bits", share, number=True, show=units.percent, hint=words)


def _operators(known: Sequence[tuple[Taped, Tape]], rows: Sequence[TapeRow]) -> Table:
    cols: list[Col[TapeRow]] = [
        Col("phase", lambda row: phase_words(row.phase), shared=True),
        Col(
            "operator",
            lambda row: row.operator + (" (b)" if row.backward else ""),
            tone=lambda row: Tone.STRONG if row.differs else Tone.PLAIN,
        ),
        *(Col(taped.mode, partial(_sums, place=place), number=True) for place, (taped, _) in enumerate(known)),
    ]
    return table("operators", "", cols, rows)


def _sums(row: TapeRow, place: int) -> str | None:
    sums = row.sums[place]
    if not sums.calls:
        return None
    flops = "unknown, " if sums.flops is None else f"{units.count(sums.flops, 'FLOP')}, " if sums.flops else ""
    return f"{flops}{units.size(sums.bytes)} in {sums.calls}"


def tape_rows(taped: Sequence[Taped]) -> Rows:
    """FLOPs, bytes and launches are those of one call; unknown FLOPs are empty."""
    return _OF_CSV, (
        {
            **encode(operator),
            "setting": case.setting,
            "tape": case.mode,
            "inputs": " ".join(operator.inputs),
            "outputs": " ".join(operator.outputs),
        }
        for case in taped
        if case.tape is not None
        for operator in case.tape.operators
    )


@section("tape", "What a step does", 77)
def tape_section(material: Material) -> Iterator[Element]:
    """Counted operator by operator in an untimed step; only the column 'declared' comes from the suite. `fp8bench
    show RUN --tape` has the operators.
    """
    cols: list[Col[Any]] = [
        PRECISION,
        Col(
            "phase",
            lambda row: (
                phase_words(row[1].phase) if isinstance(row[1], PhaseCount) else Field("step", tone=Tone.STRONG)
            ),
        ),
        *_count_cols(lambda case: case.result.record.work.flops),
    ]
    for title, panel in titled_panels(material):
        taped, rows = [], []
        for case in panel.members:
            tape = case.result.record.tape
            if tape is None or not tape.phases:
                continue
            counts: list[Tape | PhaseCount] = [tape]
            counts += [phase for phase in tape.phases if phase.flops or phase.bytes or phase.launches or phase.unknown]
            taped.append((case, tape))
            rows.append((case.name, [(case, count) for count in counts]))
        name, words = f"tape-{panel.case.workload}", "counts of a step, by phase"
        yield from table_of_cases(name, title, words, cols, rows, "The CSV has them.")
        said = tuple(map(Text, _remarks_of((case.name, tape) for case, tape in taped)))
        yield from [Items(said)] if said else []


@section("traces", "Traces", 130)
def traces_section(material: Material) -> Iterator[Element]:
    """Traces of a few steps of each case, in a pass that is not timed. Recording makes steps longer."""
    if any(record.trace for entry in material.entries for record in entry.run.records):
        yield Text(_where(material))


def _where(material: Material) -> str:
    traced = (entry.run for entry in material.entries if any(record.trace for record in entry.run.records))
    folders = dict.fromkeys(run.request.trace for run in traced if run.request.trace)
    lie = f"The traces lie in {join_words(list(folders))}, a folder a case. " if folders else ""
    return (
        f"{lie}ui.perfetto.dev and chrome://tracing open them; so does TensorBoard with torch-tb-profiler, whose page "
        "needs internet access in the browser."
    )
