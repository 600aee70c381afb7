"""Which figures are facts, which are uncertain, and which cases have no speed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fp8bench.model import Finding, Interval, Label, Record, Reruns, Status, Support, Verdict
from fp8bench.model.words import REMARK_LABELS
from fp8bench.report.case_status import CaseStatus, describe_intervals, find_case_status, speed_up, status_tone
from fp8bench.report.elements import Tone
from fp8bench.report.panels import Result
from tests.counts import for_each
from tests.runs import EMULATED, NATIVE, REFUSED, case

CASE = case("gemm", "bf16", {"m": 64})
HALF = Interval(0.5, 0.4, 0.625, 0.99)


def result(
    verdict: Verdict = Verdict.FASTER,
    *labels: Label,
    support: Support = NATIVE,
    status: Status = Status.OK,
    reference: bool = False,
    ratio: Interval | None = HALF,
) -> Result:
    record = Record(CASE, support, status, is_reference=reference)
    return Result(record, Finding(CASE, verdict, 1e-3, ratio=ratio, labels=labels))


@for_each(
    ("case_result", "expected", "tone"),
    [
        (result(Verdict.FASTER), CaseStatus.FASTER, Tone.GOOD),
        (result(Verdict.SLOWER), CaseStatus.SLOWER, Tone.BAD),
        (result(Verdict.SAME), CaseStatus.SAME, Tone.PLAIN),
        (result(Verdict.UNSURE), CaseStatus.UNSURE, Tone.DOUBT),
        (result(Verdict.NONE), CaseStatus.UNTIMED, Tone.DOUBT),
        *((result(Verdict.FASTER, label), CaseStatus.FASTER, Tone.GOOD) for label in sorted(REMARK_LABELS)),
        (result(Verdict.FASTER, support=EMULATED), CaseStatus.EMULATED, Tone.DOUBT),
        (result(Verdict.REFERENCE, reference=True), CaseStatus.REFERENCE, Tone.PLAIN),
        (result(Verdict.REFERENCE, reference=True, support=EMULATED), CaseStatus.EMULATED, Tone.DOUBT),
        (result(Verdict.FASTER, status=Status.FAILED), CaseStatus.FAILED, Tone.BAD),
        (result(Verdict.FASTER, status=Status.SKIPPED, support=REFUSED), CaseStatus.SKIPPED, Tone.DOUBT),
    ],
)
def test_standing(case_result: Result, expected: CaseStatus, tone: Tone) -> None:
    assert find_case_status(case_result) is expected and status_tone(case_result) is tone


@for_each(("level", "words"), [(0.99, "the 99% interval of this run, over 2 sessions"), (0.0, "over 2 sessions")])
def test_a_range_of_several_sessions_is_their_hull_too(level: float, words: str) -> None:
    one = result(ratio=replace(HALF, level=level))
    assert describe_intervals([replace(one, record=replace(one.record, sessions=(HALF,)))]) == words


@for_each(
    ("own_runs", "words"),
    [(None, "12 earlier runs"), (2, "2 earlier runs of the same case and commit, and of other cases")],
)
def test_an_interval_names_the_runs_behind_it(own_runs: int | None, words: str) -> None:
    case = result(ratio=HALF)
    case = replace(case, record=replace(case.record, reruns=Reruns(0.01, 9, 12, own_runs)))
    assert describe_intervals([case]) == f"the 99% interval of any run, from {words}"


@for_each("label", sorted(set(Label) - REMARK_LABELS))
@for_each("verdict", [Verdict.FASTER, Verdict.SLOWER, Verdict.SAME])
def test_a_label_makes_a_fact_doubtful(verdict: Verdict, label: Label) -> None:
    labelled = result(verdict, label)
    assert find_case_status(labelled) is CaseStatus.DOUBTED and status_tone(labelled) is Tone.DOUBT


def test_speed_up_is_the_inverse_with_its_ends_turned() -> None:
    assert speed_up(result()) == Interval(2.0, pytest.approx(1.6), 2.5, 0.99)
    speed = speed_up(result(ratio=Interval(0.5, 0.0, math.inf, 0.99)))
    assert speed is not None and (speed.low, speed.high) == (0.0, math.inf)
    broken = speed_up(result(ratio=Interval(0.5, math.nan, 0.6, 0.99)))
    assert broken is not None and math.isnan(broken.high)


@for_each(
    "case_result",
    [
        result(support=EMULATED),
        result(status=Status.FAILED),
        result(Verdict.REFERENCE, reference=True),
        result(Verdict.NONE),
        result(ratio=None),
        *(result(ratio=replace(HALF, point=point)) for point in (0.0, -1.0, math.nan, math.inf)),
    ],
)
def test_where_there_is_no_speed_none_is_made_up(case_result: Result) -> None:
    assert speed_up(case_result) is None
