"""Reports the operators of a step: their counted FLOPs, bytes and kernel launches. Also reports where the traces of
the step are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from fp8bench import units
from fp8bench.analysis.tapes import (
    CaseTape,
    OperatorTapeRow,
    compute_flops_share,
    compute_intensity,
    tabulate_operators,
)
from fp8bench.model import PhaseCount, Tape
from fp8bench.model.codec import encode
from fp8bench.report.columns import Col, ColumnList, table
from fp8bench.report.data.plain import PlainRows
from fp8bench.report.elements import Elements, Field, Page, Part, Table, Text, Tone, bullet_list
from fp8bench.report.page.section import PRECISION_COLUMN, Material, iterate_titled_panels, section, table_of_cases
from fp8bench.report.panels import CaseValue, together
from fp8bench.report.words.naming import join_remarks, join_words, phase_words

_FACTOR_ELEMENT_BITS = (8, 4, 32)
_LEGEND = (
    "declared: FLOPs that the suite declares; unknown: calls of operators without a formula, which have no FLOPs here",
    "8 bits, 4 bits, 32 bits: the share of FLOPs whose factors have elements of this width",
    "operators: FLOPs, bytes read and written, and the number of calls; (b): in the backward pass",
)
_CSV_COLUMNS = (
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


def list_tape_remarks(tape: Tape) -> list[str]:
    calls_by_operator = together(
        (operator.operator, operator.calls) for operator in tape.operators if operator.flops is None
    )
    lines = [f"unknown x {sum(calls)}: {operator} has no formula" for operator, calls in calls_by_operator.items()]
    if tape.unwritten:
        lines.append(
            f"{tape.unwritten} tensors were written outside of torch's operators, and that work is not counted"
        )
    return [*lines, tape.fused] if tape.fused else lines


def make_tape_page(title: str, taped: Sequence[CaseTape]) -> Page:
    parts = []
    for setting_number, (setting, cases) in enumerate(together((case.setting, case) for case in taped).items()):
        parts.append(Part(f"setting-{setting_number}", setting, tuple(_make_tape_elements(cases))))
    return Page(title, "", tuple(parts), _LEGEND)


def _make_tape_elements(taped: Sequence[CaseTape]) -> Elements:
    cases_with_step_counts = [_StepCountsRow(case, case.tape) for case in taped if case.tape is not None]
    remarks = [f"{case.mode}: no tape: {case.why}" for case in taped if case.tape is None]
    if cases_with_step_counts:
        columns: ColumnList[_StepCountsRow] = [Col("tape", "case.mode"), *_count_columns()]
        # Show the declared FLOPs next to the counted ones.
        columns.insert(2, Col("declared", lambda row: row.case.declared or None, show=units.count))
        for bits in _FACTOR_ELEMENT_BITS:
            get_flops_share = partial(lambda bits, row: compute_flops_share(row.value, bits) or None, bits)
            columns.append(Col(f"{bits} bits", get_flops_share, show=units.percent))
        yield table("counts", "", columns, cases_with_step_counts)
        if rows := tabulate_operators([row.value for row in cases_with_step_counts]):
            yield _operators_table([row.case.mode for row in cases_with_step_counts], rows)
    yield from bullet_list(
        [*remarks, *join_remarks((row.case.mode, list_tape_remarks(row.value)) for row in cases_with_step_counts)]
    )


class _StepCountsRow(NamedTuple):
    """A row of the table of counts (FLOPs, bytes and launches). `value` has the counts of a whole step."""

    case: CaseTape
    value: Tape


def _count_columns() -> Iterator[Col[Any]]:
    """Yields the columns of a table of counts: FLOPs, bytes and kernel launches. The `value` of a row has the counts of
    a whole step or of one phase.
    """

    def intensity(row: Any) -> float | None:
        counts: Tape | PhaseCount = row.value
        if isinstance(counts, Tape):
            return compute_intensity(counts)
        if counts.flops and counts.bytes:
            return counts.flops / counts.bytes
        return None

    flops_hint = "of products, forward and backward; a product of M x K by K x N has 2MNK"
    yield Col("FLOPs", lambda row: row.value.flops or None, show=units.count, hint=flops_hint)
    bytes_hint = "read and written, each tensor once a call, as if nothing were cached"
    yield Col("bytes", "value.bytes", unit="B", hint=bytes_hint)
    yield Col("FLOP/B", intensity, show=units.count)
    yield Col("launches", "value.launches", show=str, hint="operators that start at least one kernel")
    unknown_flops_hint = "calls of operators without a formula, whose FLOPs are not counted"
    yield Col("unknown", lambda row: row.value.unknown or None, show=str, hint=unknown_flops_hint)


def _operators_table(modes: Sequence[str], rows: Sequence[OperatorTapeRow]) -> Table:
    cols: ColumnList[OperatorTapeRow] = [
        Col("phase", lambda row: phase_words(row.phase), shared=True),
        Col(
            "operator",
            lambda row: row.operator + (" (b)" if row.backward else ""),
            tone=lambda row: Tone.STRONG if row.differs else Tone.PLAIN,
        ),
    ]
    cols += [
        Col(mode, partial(_show_operator_sums, tape_number=tape_number_of_mode), number=True)
        for tape_number_of_mode, mode in enumerate(modes)
    ]
    return table("operators", "", cols, rows)


def _show_operator_sums(row: OperatorTapeRow, tape_number: int) -> str | None:
    operator_sums = row.sums[tape_number]
    if not operator_sums.calls:
        return None
    flops_text = (
        "unknown, "
        if operator_sums.flops is None
        else f"{units.count(operator_sums.flops, 'FLOP')}, "
        if operator_sums.flops
        else ""
    )
    return f"{flops_text}{units.size(operator_sums.bytes)} in {operator_sums.calls}"


def make_tape_csv_rows(taped: Sequence[CaseTape]) -> PlainRows:
    """Returns a CSV row for each operator. FLOPs, bytes and launches are those of one call. Unknown FLOPs are empty."""
    return _CSV_COLUMNS, chain.from_iterable(map(_operator_rows, taped))


def _operator_rows(case: CaseTape) -> Iterator[dict[str, Any]]:
    for operator in case.tape.operators if case.tape is not None else ():
        shapes = {"inputs": " ".join(operator.inputs), "outputs": " ".join(operator.outputs)}
        yield encode(operator) | {"setting": case.setting, "tape": case.mode} | shapes


@section("tape", "Operators of a step", 77)
def tape_section(material: Material) -> Elements:
    """The work is counted operator by operator in an untimed step. `fp8bench show RUN --tape` lists the operators."""

    def phase_field(row: CaseValue[Tape | PhaseCount]) -> Field | str:
        if isinstance(row.value, PhaseCount):
            return phase_words(row.value.phase)
        return Field("step", tone=Tone.STRONG)

    cols = [PRECISION_COLUMN, Col("phase", phase_field), *_count_columns()]
    for title, panel in iterate_titled_panels(material):
        remarks = []
        rows = []
        for case in panel.named_cases:
            tape = case.record.tape
            if tape is None or not tape.phases:
                continue
            counts: list[Tape | PhaseCount] = [tape]
            # Leave out phases in which nothing ran.
            counts += [phase for phase in tape.phases if phase.flops or phase.bytes or phase.launches or phase.unknown]
            remarks.append((case.name, list_tape_remarks(tape)))
            rows.append((case, counts))
        yield from table_of_cases(f"tape-{panel.suite}", f"{title}: counts of a step, by phase", cols, rows)
        yield from bullet_list(join_remarks(remarks))


@section("traces", "Traces", 130)
def traces_section(material: Material) -> Elements:
    """A few steps of each case were traced in an untimed pass. Recording makes steps longer."""
    runs = [entry.run for entry in material.entries]
    traced_runs = [run for run in runs if any(record.trace for record in run.records)]
    folders = [run.request.trace for run in traced_runs if run.request.trace]
    if traced_runs:
        trace_folders_text = f"The traces are in {join_words(folders)}, one folder per case. " if folders else ""
        yield Text(
            f"{trace_folders_text}ui.perfetto.dev and chrome://tracing open them; so does TensorBoard with "
            "torch-tb-profiler, whose page needs internet access in the browser."
        )
