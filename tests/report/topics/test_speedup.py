"""Bars of speed-up, never of an emulated case, and speed against error: where each case stands."""

from __future__ import annotations

import math
from dataclasses import replace

from fp8bench.model import Interval, Label, Verdict
from fp8bench.report.elements import Bars, Scatter
from tests.materials import Made, emulated_with_a_ratio, of_kind, part, recased, with_errors
from tests.runs import gemm, judged, transformer
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


def test_all_cases_share_a_chart() -> None:
    """It draws the first bars, and the rest stands in the table of its numbers."""
    (chart,) = charts(judged(*[FASTER] * 60), judged(*[FASTER] * 2))
    assert sum(len(marks) for _, marks in chart.groups) == 62
