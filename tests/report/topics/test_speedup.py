"""Bars of speed-up, never of an emulated case, and speed against error: where each case stands."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fp8bench.analysis.findings import findings
from fp8bench.model import Interval, Label, Verdict
from fp8bench.report.elements import Bars, Scatter
from tests.fakes import record, timing
from tests.materials import Made, emulated_with_a_ratio, of_kind, part, recased, with_errors
from tests.runs import gemm, judged, run_of, transformer
from tests.told_before import Told, as_before

FASTER = (Verdict.FASTER, 0.5)


def charts(*made: Made) -> list[Bars]:
    return of_kind(part("speedup", *made), Bars)


def scatters(*made: Made) -> list[Scatter]:
    return of_kind(part("speedup", *made), Scatter)


@as_before
def test_speedup() -> Told:
    yield (
        "an emulated case has no bar, not even where a finding carries a ratio; its point has no speed",
        part("speedup", emulated_with_a_ratio()),
    )
    yield "doubt is grey with its reason", charts(judged((*FASTER, Label.NOISY)))
    yield "so is what is unsure", charts(judged((Verdict.UNSURE, 1.0)))
    run, findings = judged(FASTER)
    case = run.records[1].case.id
    findings[case] = replace(findings[case], ratio=Interval(0.5, 0.0, 0.6, 0.99))
    yield "an end that is none is not drawn", charts((run, findings))
    yield (
        "speeds over two references share no axis, nor do errors of different kinds",
        part("speedup", gemm(), transformer()),
    )
    yield "suites share a chart while it holds them", charts(gemm(), judged(FASTER))
    yield "without errors there is no chart of them", scatters(judged(FASTER))


@as_before
def test_trade_off() -> Told:
    alone = with_errors(judged(FASTER), 1e-7, 1e-3)
    run, findings = alone
    other, more = recased(alone, lambda case: replace(case, workload="mlp"))
    both = replace(run, records=(*run.records, *other.records)), findings | more
    yield "labels say the suite where several share a chart", scatters(both)
    yield "each run has an axis of its own", scatters(gemm(), alone)
    for value in (0.0, math.nan, math.inf, -1.0):
        yield f"an error of {value} has no place", scatters(with_errors(judged(FASTER), value, 1e-3))
    unclear = with_errors(judged((Verdict.UNSURE, None), FASTER), 1e-7, 1e-3)
    yield "nor has a case without a speed", scatters(unclear)


def test_each_round_is_a_sample_over_the_middle_round_of_the_reference() -> None:
    """fp32 takes 9, 10 and 14 us, so 10 us are 1x; bf16 takes 5, 4 and 20 us."""
    lead = record(
        timing((9000,), (10000,), (14000,)), "fp32", is_reference=True, control=timing((9000,), (9500,), (9900,))
    )
    run = run_of([lead, record(timing((5000,), (4000,), (20000,)), "bf16")])
    (chart,) = charts((run, findings(run)))
    ((_, (fp32, bf16)),) = chart.groups
    assert fp32.samples == pytest.approx((10 / 9, 1.0, 10 / 14)) and bf16.samples == pytest.approx((2.0, 2.5, 0.5))
    assert "fastest calls of 3 rounds: 4.00 us to 20.0 us" in bf16.hint and fp32.hint.startswith("fp32, the reference")


def test_a_case_apart_is_over_the_reference_of_its_own_rounds() -> None:
    lead = record(timing((9000,), (10000,)), "fp32", is_reference=True, control=timing((9000,), (9500,)))
    apart = record(timing((5000,), (5000,), start=7), "bf16", paired_with=timing((20000,), (20000,), start=7))
    run = run_of([lead, apart])
    (chart,) = charts((run, findings(run)))
    assert chart.groups[0][1][1].samples == pytest.approx((4.0, 4.0))
