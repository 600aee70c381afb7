"""The main table, whose every case is a row that sorts by numbers; and all rounds, relative to their medians."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fp8bench.model import (
    Finding,
    Interval,
    Label,
    Measurement,
    Record,
    Segments,
    SlotSample,
    Status,
    Tape,
    Timing,
    Verdict,
)
from fp8bench.report.elements import Field, Lines, Strips, Table, Text
from tests.counts import for_each
from tests.materials import Made, built, emulated_with_a_ratio, many, nothing, of_kind, part, skipped, strange
from tests.runs import EMULATED, NATIVE, case, gemm, judged, measured, run_of, transformer
from tests.told_before import Told, as_before

FASTER = (Verdict.FASTER, 0.5)


def table(*made: Made) -> Table:
    (only_table,) = of_kind(part("results", *made), Table)
    return only_table


@as_before
def test_results() -> Told:
    yield "every case is a row; what was not measured says why, an emulation has no speed", part("results", gemm())
    run, findings = emulated_with_a_ratio()
    yield "not even where a finding carries one", part("results", (run, findings))
    alone = (replace(run.records[2], is_reference=True),)
    yield "an emulated reference is called so", table((replace(run, records=alone), findings))
    for verdict in Verdict:
        if verdict not in (Verdict.REFERENCE, Verdict.EMULATED):
            yield f"colour follows the verdict: {verdict}", part("results", judged((verdict, 0.5)))
    yield "a doubted verdict is perhaps one", part("results", judged((Verdict.SLOWER, 1.25, Label.NOISY)))
    yield "columns that say nothing are left out", part("results", skipped())
    yield "runs side by side have a column", part("results", gemm(), transformer())
    run, findings = judged(FASTER)
    moved = replace(run.records[1], case=replace(run.records[1].case, device="cuda:0"))
    both = replace(run, records=(run.records[0], moved)), findings
    yield "so have devices where there are several", table(both)
    case = run.records[1].case.id
    findings[case] = replace(findings[case], ratio=Interval(0.5, 0.0, math.inf, 0.99))
    yield "a ratio without an interval says so", table((run, findings))
    yield "without cases it says so", part("results", nothing())
    run, findings = gemm()
    alone_run = replace(run, id="alone", records=run.records[:4])
    texts = of_kind(part("results", (alone_run, findings), (run, findings)), Text)
    yield "what differs between runs is not said to be the same", texts


def test_a_number_of_a_suite_is_not_taken_for_the_steps_own() -> None:
    run, findings = gemm()
    own = tuple(Measurement(name, "J", (7.0,)) for name in ("time", "energy", "flops_per_second", "tokens_per_second"))
    records = tuple(replace(record, measurements=(*record.measurements, *own)) for record in run.records)
    assert table((replace(run, records=records), findings)) == table(gemm())


def test_what_is_no_number_sorts_by_nothing() -> None:
    values = [field.value for fields in table(strange()).rows for field in fields if field.value is not None]
    assert values and not any(math.isnan(value) for value in values)


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
    """A quick look that counted nothing, or other work than was declared."""
    run, findings = gemm()
    place = next(place for place, known in enumerate(run.records) if known.case.mode == "bf16")
    record = replace(run.records[place], tape=tape)
    findings[record.case.id] = replace(findings[record.case.id], labels=labels)
    shown = table((replace(run, records=(*run.records[:place], record, *run.records[place + 1 :])), findings))
    column = [column.title for column in shown.columns].index("throughput")
    assert (shown.rows[place][column] != Field("-")) == told


def timing(*microseconds: int) -> Timing:
    """A round for each, with a first call that is slower."""
    slots = tuple(
        SlotSample(number, ((9 * 1000 * one,), (1000 * one,)), 1e-3, 1e-3) for number, one in enumerate(microseconds)
    )
    return Timing(Segments(("gemm",), (0,)), slots)


def made(*rounds: tuple[str, tuple[int, ...], tuple[Label, ...]]) -> Made:
    records, findings = [], {}
    for mode, microseconds, labels in rounds:
        named = case("gemm", mode, {"m": 1})
        support = EMULATED if mode == "fp8" else NATIVE
        records.append(Record(named, support, Status.OK, is_reference=mode == "fp32", timing=timing(*microseconds)))
        findings[named.id] = Finding(named, Verdict.UNSURE, 1e-3, labels=labels)
    return run_of(records), findings


def test_each_round_is_a_distance_from_the_median() -> None:
    """The fastest call of a round counts: 90, 100 and 130 us are -10, 0 and 30 percent; 1 ms would be too far out."""
    for microseconds, distances in (((100, 90, 130), (0, -10, 30)), ((100, 100, 100, 1000), (0, 0, 0))):
        (strips,) = of_kind(part("samples", made(("fp32", microseconds, ()))), Strips)
        ((_, values, _),) = strips.rows
        assert values == pytest.approx(distances)


@as_before
def test_samples() -> Told:
    cases = made(
        ("fp32", (1, 1), ()), ("bf16", (1, 1), (Label.FEW_SAMPLES,)),
        ("fp16", (1, 2), (Label.BIMODAL, Label.NOISY)), ("fp8", (1, 1), ()),
    )  # fmt: skip
    yield "unsteady cases stand first and grey with their labels, emulations apart", part("samples", cases)
    yield "rounds far out are counted", part("samples", made(("fp32", (100, 100, 100, 1000), ())))
    yield "cases without samples are left out", part("samples", measured())
    yield "a clock that saw nothing has no median", built("samples", made(("fp32", (0, 0), ())))
    run, _ = measured()
    yield "a case that lost its finding is shown", part("samples", (replace(run, records=run.records[:1]), {}))
    rounds = (100,) * 6 + (120,) * 7
    drifts = made(("fp32", rounds, (Label.DRIFT,)), ("bf16", rounds, (Label.NOISY,)))
    yield "rounds are drawn in their order where that explains a label", of_kind(part("samples", drifts), Lines)
    short = made(("fp32", rounds[3:10], (Label.DRIFT,)))
    yield "and where they are many", of_kind(part("samples", short), Lines)


def test_of_very_many_cases_the_rest_is_counted() -> None:
    found = part("samples", many(100))
    assert sum(len(strips.rows) for strips in of_kind(found, Strips)) == 250
    assert of_kind(found, Text)[0].text.startswith("50 more")
