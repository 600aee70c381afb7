"""The main table, whose every case is a row that sorts by numbers."""

from __future__ import annotations

import math
from dataclasses import replace

from fp8bench.model import (
    Interval,
    Label,
    Measurement,
    Tape,
    Verdict,
)
from fp8bench.report.elements import Field, Table, Text
from tests.counts import for_each
from tests.materials import Made, emulated_with_a_ratio, nothing, of_kind, part
from tests.runs import gemm, judged, transformer
from tests.told_before import Told, as_before

FASTER = (Verdict.FASTER, 0.5)


def tables(*made: Made) -> list[Table]:
    return of_kind(part("results", *made), Table)


def details(*made: Made) -> Table:
    _, table = tables(*made)
    return table


@as_before
def test_results() -> Told:
    yield "every case is a row; what was not measured says why, an emulation has no speed", part("results", gemm())
    run, findings = emulated_with_a_ratio()
    yield "not even where a finding carries one", part("results", (run, findings))
    alone = (replace(run.records[2], is_reference=True),)
    yield "an emulated reference is called so", tables((replace(run, records=alone), findings))
    yield "a doubted verdict is perhaps one", part("results", judged((Verdict.SLOWER, 1.25, Label.NOISY)))
    yield "runs side by side have a column", part("results", gemm(), transformer())
    run, findings = judged(FASTER)
    moved = replace(run.records[1], case=replace(run.records[1].case, device="cuda:0"))
    both = replace(run, records=(run.records[0], moved)), findings
    yield "so have devices where there are several", tables(both)
    case = run.records[1].case.id
    findings[case] = replace(findings[case], ratio=Interval(0.5, 0.0, math.inf, 0.99))
    yield "a ratio without an interval says so", tables((run, findings))
    yield "without cases it says so", part("results", nothing())
    run, findings = gemm()
    alone_run = replace(run, id="alone", records=run.records[:4])
    texts = of_kind(part("results", (alone_run, findings), (run, findings)), Text)
    yield "what differs between runs is not said to be the same", texts


def test_a_number_of_a_suite_is_not_taken_for_the_steps_own() -> None:
    run, findings = gemm()
    own = tuple(Measurement(name, "J", (7.0,)) for name in ("time", "energy", "flops_per_second", "tokens_per_second"))
    records = tuple(replace(record, measurements=(*record.measurements, *own)) for record in run.records)
    assert details((replace(run, records=records), findings)) == details(gemm())


@for_each(
    ("labels", "tape", "told"),
    [
        ((Label.FEW_SAMPLES,), None, False),
        ((Label.FEW_SAMPLES,), Tape(), True),
        ((Label.WORK_MISMATCH,), Tape(), False),
        ((Label.NO_WORK, Label.NOISY), Tape(), False),
        ((Label.NOISY,), None, True),
    ],
)
def test_no_rate_is_told_of_work_that_nobody_saw(labels: tuple[Label, ...], tape: Tape | None, told: bool) -> None:
    """A quick run that counted nothing, or a count that differs from the declaration."""
    run, findings = gemm()
    place = next(place for place, known in enumerate(run.records) if known.case.mode == "bf16")
    record = replace(run.records[place], tape=tape)
    findings[record.case.id] = replace(findings[record.case.id], labels=labels)
    shown = details((replace(run, records=(*run.records[:place], record, *run.records[place + 1 :])), findings))
    column = [column.title for column in shown.columns].index("throughput")
    assert (shown.rows[place][column] != Field("-")) == told
