"""Bars of speed-up, never of an emulated case, and speed against error: where each case stands, which are outdone."""

from __future__ import annotations

import math
from dataclasses import replace

from fp8bench.model import Interval, Label, Verdict
from fp8bench.report.elements import Bars, Mark, Scatter, Tone
from fp8bench.report.page.drawing.scale import BARS
from tests.materials import Made, emulated_with_a_ratio, of_kind, part, recased, with_errors
from tests.runs import gemm, judged, transformer

FASTER = (Verdict.FASTER, 0.5)


def charts(*made: Made) -> list[Bars]:
    return of_kind(part("speedup", *made), Bars)


def scatters(*made: Made) -> list[Scatter]:
    return of_kind(part("speedup", *made), Scatter)


def marks(*made: Made) -> list[Mark]:
    return [mark for chart in charts(*made) for _, found in chart.groups for mark in found]


def test_an_emulated_case_has_no_bar() -> None:
    """Not even where a finding carries a ratio."""
    assert {mark.label for mark in marks(emulated_with_a_ratio())} == {"fp16"}


def test_doubt_is_grey_with_its_reason() -> None:
    (mark,) = marks(judged((*FASTER, Label.NOISY)))
    assert mark.tone is Tone.DOUBT and "bf16 2.00x as fast as fp32; noisy: so much noise" in mark.hint
    (unsure,) = marks(judged((Verdict.UNSURE, 1.0)))
    assert unsure.tone is Tone.DOUBT and unsure.hint.endswith("the interval is too wide to tell")


def test_an_end_that_is_none_is_not_drawn() -> None:
    run, findings = judged(FASTER)
    case = run.records[1].case.id
    findings[case] = replace(findings[case], ratio=Interval(0.5, 0.0, 0.6, 0.99))
    (mark,) = marks((run, findings))
    assert mark.low is not None and math.isclose(mark.low, 1 / 0.6) and mark.high is None


def test_speeds_over_two_references_share_no_axis() -> None:
    """bf16 over fp32 beside fp16 over bf16: one precision would stand at two ratios."""
    first, second = charts(gemm(), transformer())
    assert (first.axis.title, second.axis.title) == ("speed-up over fp32", "speed-up over bf16")
    assert [heading for heading, _ in first.groups] == ["bf16 over fp32"] and len(second.groups) == 1


def test_suites_share_a_chart_while_it_holds_them() -> None:
    (chart,) = charts(gemm(), judged(FASTER))
    assert len(chart.groups) == 2 and chart.groups[0][0].endswith("bf16 over fp32")
    assert chart.name == "speed-up" and chart.title.startswith("Speed-up over fp32 of its run: ")
    more = charts(judged(*[FASTER] * (BARS - 1)), judged(*[FASTER] * 2))
    assert [chart.name for chart in more] == ["speed-up-1", "speed-up-2"]
    assert [sum(len(found) for _, found in chart.groups) for chart in more] == [BARS - 1, 2]


def test_a_suite_is_not_parted() -> None:
    """Its chart draws the first bars, and the rest stands in the table of its numbers."""
    (chart,) = charts(judged(*[FASTER] * 60))
    assert len(chart.groups[0][1]) == 60


def test_errors_of_different_kinds_have_charts_of_their_own() -> None:
    first, second = scatters(gemm(), transformer())
    assert (first.y.title, second.y.title) == ("product_error", "gradient_error")
    assert (first.name, second.name) == ("trade-off-1", "trade-off-2")


def test_labels_say_the_suite_where_several_share_a_chart() -> None:
    alone = with_errors(judged(FASTER), 1e-7, 1e-3)
    assert [point.label for point in scatters(alone)[0].points] == ["fp32", "bf16"]
    run, findings = alone
    other, more = recased(alone, lambda case: replace(case, workload="mlp"))
    (chart,) = scatters((replace(run, records=(*run.records, *other.records)), findings | more))
    assert [point.label for point in chart.points] == ["gemm", "gemm", "mlp", "mlp"]


def test_each_run_has_an_axis_of_its_own() -> None:
    """Its speeds are over its own reference, whatever that of another run is called."""
    first, second = scatters(gemm(), with_errors(judged(FASTER), 1e-7, 1e-3))
    assert first.x.title == second.x.title == "speed-up over fp32" and len(second.points) == 2


def test_what_is_slower_and_less_exact_is_outdone() -> None:
    (chart,) = scatters(with_errors(judged((Verdict.SLOWER, 1.25), FASTER), 1e-7, 1e-3))
    assert chart.description.endswith("Outdone in both: gemm m=64 bf16 by fp32.")
    assert [("outdone by fp32, which is faster and more exact" in point.hint) for point in chart.points] == [
        False, True, False, False,
    ]  # fmt: skip


def test_only_what_is_sure_is_weighed() -> None:
    """Neither a verdict in doubt nor intervals that touch let one case outdo another."""
    doubted = with_errors(judged((Verdict.SLOWER, 1.25, Label.NOISY)), 1e-7, 1e-3)
    alike = with_errors(judged((Verdict.SAME, 1.005)), 1e-7, 1e-3)
    more_exact = with_errors(judged((Verdict.SLOWER, 1.25)), 1e-3, 1e-7)
    for made in (doubted, alike, more_exact):
        (chart,) = scatters(made)
        assert "utdone" not in chart.description and "outdone" not in "".join(point.hint for point in chart.points)


def test_a_point_in_doubt_is_grey_with_its_reason() -> None:
    (chart,) = scatters(with_errors(judged((*FASTER, Label.NOISY)), 1e-7, 1e-3))
    assert chart.points[1].tone is Tone.DOUBT and "noisy: so much noise" in chart.points[1].hint
    assert chart.margin == ""


def test_what_has_no_place_is_left_out() -> None:
    """An error of zero has none on a logarithmic axis, one that is no number has none at all."""
    for value in (0.0, math.nan, math.inf, -1.0):
        (chart,) = scatters(with_errors(judged(FASTER), value, 1e-3))
        assert [point.series for point in chart.points] == ["bf16"]
    unclear = with_errors(judged((Verdict.UNSURE, None), FASTER), 1e-7, 1e-3)
    assert [point.series for point in scatters(unclear)[0].points] == ["fp32", "fp32", "bf16"]


def test_the_point_of_an_emulation_has_no_speed() -> None:
    assert {point.series for point in scatters(emulated_with_a_ratio())[0].points if point.x is None} == {"fp8"}


def test_without_errors_there_is_no_chart_of_them() -> None:
    assert not scatters(judged(FASTER))
